"""`metal-supervisor fit` as somebody types it: real files, real servers, what a real state directory says runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from range_server import Web, serving

from metal_supervisor import launch
from metal_supervisor.cli import main
from metal_supervisor.cli.fit import _argv
from metal_supervisor.cli.serve import Serve
from metal_supervisor.memory.estimate import estimate
from metal_supervisor.memory.fit_advice import FitPlan
from metal_supervisor.models.metadata import Reading
from metal_supervisor.runtimes.llama_memory import demands
from metal_supervisor.runtimes.runtime import Binary
from metal_supervisor.spec.gguf import read_header
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Verdict
from metal_supervisor.spec.types import Standing
from metal_supervisor.state.directory import StateDir
from tests.support import kv_models, vision
from tests.support.in_memory import InMemory
from tests.support.records import a_record
from tests.support.system import tiny_gguf

MIB = 1 << 20
GIB = 1 << 30
TOTAL = 16 * GIB
BUDGET = round(0.67 * TOTAL)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fit")
    tiny_gguf.write_tiny_gguf(directory / "tiny.gguf", context=131072)
    kv_models.write(directory / "mamba.gguf", kv_models.KINDS["mamba"])
    return directory


@pytest.fixture
def web(models: Path) -> Iterator[Web]:
    with serving() as server:
        server.files["tiny.gguf"] = (models / "tiny.gguf").read_bytes()
        yield server


class Said:
    """What the command answered."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.lines = out.splitlines()


class Shell:
    """Runs the command in this process, on a Mac of 16 GB."""

    def __init__(self, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state = StateDir(state)
        self._capsys = capsys

    def fit(self, source: object, *flags: str) -> Said:
        try:
            code = main.main(["fit", str(source), "--state-dir", str(self.state.path), *flags])
        except SystemExit as error:
            code = int(str(error.code))
        return Said(code, *self._capsys.readouterr())

    def json(self, source: object, *flags: str) -> dict[str, Any]:
        found = json.loads(self.fit(source, "--json", *flags).out)
        assert isinstance(found, dict)
        return found

    def runs(
        self,
        name: str,
        reserved: int,
        measured: int = 0,
        standing: Standing = Standing.RUN,
        by_hand: bool = False,
        pid: int = 0,
    ) -> None:
        """Write what a system has on file of an engine. `by_hand`: it was stopped so; `pid`: of its process."""
        self.state.create()
        program = f"default.{name}"
        edition = "a" if standing is Standing.RUN else None
        verdict = Verdict(standing, "", "", 0.0)
        record = a_record(name, program=program, model="m", verdict=verdict, endpoint=None, edition=edition)
        self.state.write_record(replace(record, reserved_bytes=reserved, stopped_by_hand=by_hand))
        if pid:
            note = {
                "format": 1,
                "pid": pid,
                "launcher_pid": pid,
                "started": launch.start_time(pid),
                "spec": {"edition": "a"},
                "starts": [],
                "not_before": 0.0,
                "refused": "",
                "refused_message": "",
            }
            self.state.note_path(program).write_text(json.dumps(note))
        if measured:
            self.state.write_observed(Observed(program, 1, True, 0.0, "RUNNING", memory_bytes=measured))


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setattr("metal_supervisor.host.machine.memory_bytes", lambda: TOTAL)
    monkeypatch.setattr("metal_supervisor.cli.fit.is_up", lambda _state: True)
    return Shell(tmp_path / "state", capsys)


def test_a_small_model_fits_and_says_why(shell: Shell, models: Path) -> None:
    said = shell.fit(models / "tiny.gguf")
    assert (said.code, said.err) == (0, "")
    assert said.lines[0] == "tiny.gguf: llama, 1 MiB, trained for 131072 tokens"
    assert said.lines[1].startswith("needs    110 MiB = weights 1 MiB + KV cache (1 x 8192 tokens) 4 MiB + ")
    assert said.lines[2] == "budget   10.7 GiB (67 % of 16.0 GiB; 2.0 GiB stay with the system: 14.0 GiB)"
    assert said.lines[3:5] == [
        "running  nothing on this Mac",
        "It fits: 10.7 GiB are left, 10.6 GiB of them after it.",
    ]
    assert said.lines[5:] == ["it would fit up to --ctx 131072 (spec.contextSize)"]
    assert not shell.state.path.exists(), "asking changes nothing"


def test_what_is_charged_is_what_the_engine_would_be_started_with(shell: Shell, models: Path) -> None:
    found = shell.json(models / "tiny.gguf", "--ctx", "8192", "--slots", "4", "--kv-type", "q8_0")
    argv = _argv(FitPlan(8192, 4, "q8_0"), Binary("llama-server", frozenset()), Reading(None))
    asked = demands(argv).settings
    assert (asked.context, asked.slots, asked.batch, asked.cache_k, asked.cache_v) == (8192, 4, 2048, "q8_0", "q8_0")
    assert asked.flash_attention
    data = (models / "tiny.gguf").read_bytes()
    expected = estimate(read_header(InMemory(data), len(data)), replace(asked, prompt_cache_bytes=64 * MIB))
    assert found["needBytes"] == expected.total_bytes
    assert (found["budgetBytes"], found["fits"], found["running"]) == (BUDGET, True, {})


def test_what_runs_now_counts_by_what_was_reserved_or_measured(shell: Shell, models: Path) -> None:
    shell.runs("a", 4 * GIB, 3 * GIB)
    shell.runs("b", 4 * GIB, 5 * GIB)
    shell.runs("waits", 8 * GIB, standing=Standing.WAIT)
    shell.runs("off", 8 * GIB, standing=Standing.STOPPED)
    found = shell.json(models / "tiny.gguf")
    assert found["running"] == {"default/a": 4 * GIB, "default/b": 5 * GIB}
    assert found["freeBytes"] == BUDGET - 9 * GIB
    said = shell.fit(models / "tiny.gguf")
    assert said.lines[3] == "running  9.0 GiB: default/b 5.0 GiB, default/a 4.0 GiB"
    assert said.code == 0


def test_an_engine_counts_that_was_stopped_by_hand_or_has_not_ended_yet(shell: Shell, models: Path) -> None:
    shell.runs("stopped", 8 * GIB, by_hand=True)
    shell.runs("scaled", 1 * GIB, standing=Standing.STOPPED, pid=os.getpid())
    assert shell.json(models / "tiny.gguf")["running"] == {"default/stopped": 8 * GIB, "default/scaled": 1 * GIB}


def test_of_a_system_that_is_stopped_only_engines_that_outlived_it_count(
    shell: Shell, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metal_supervisor.cli.fit.is_up", lambda _state: False)
    shell.runs("gone", 8 * GIB, 8 * GIB)
    shell.runs("left", 2 * GIB, pid=os.getpid())
    assert shell.json(models / "tiny.gguf")["running"] == {"default/left": 2 * GIB}


def test_what_does_not_fit_says_by_how_much_and_what_would(shell: Shell, models: Path) -> None:
    shell.runs("large", BUDGET - GIB)
    said = shell.fit(models / "tiny.gguf", "--ctx", "2000000", "--slots", "2")
    assert said.code == 1
    assert said.lines[4].startswith("It does not fit: 1.0 GiB are left, ")
    assert said.lines[5] == "note: 1000000 tokens for a slot are more than the 131072 it was trained for"
    assert len(said.lines) <= 8
    advice = shell.json(models / "tiny.gguf", "--ctx", "2000000", "--slots", "2")["advice"]
    assert any(each.startswith("it would fit with --ctx ") for each in advice)
    assert "it would fit as it is if enough of what runs here were stopped" in advice
    context = next(each.split()[5] for each in advice if each.startswith("it would fit with --ctx "))
    assert shell.fit(models / "tiny.gguf", "--ctx", context, "--slots", "2").code == 0
    more = str(int(context) + 512)
    assert shell.fit(models / "tiny.gguf", "--ctx", more, "--slots", "2").code == 1


def test_where_there_is_no_room_at_all_nothing_is_promised(shell: Shell, models: Path) -> None:
    shell.runs("large", BUDGET + GIB)
    said = shell.fit(models / "tiny.gguf")
    assert said.code == 1
    assert "It does not fit: 0 MiB are left, 110 MiB too little." in said.lines
    assert "it would take no quantization of it" in said.out


def test_a_state_model_is_known_by_its_own_kind(shell: Shell, models: Path) -> None:
    assert "state" in shell.fit(models / "mamba.gguf").lines[1]


@pytest.mark.parametrize("how", ["range", "plain", "moved", "star"])
def test_a_model_on_a_server_is_judged_by_its_first_bytes(how: str, shell: Shell, web: Web, models: Path) -> None:
    web.padding["tiny.gguf"] = 70 << 30
    said = shell.fit(f"{web.url}/{how}/tiny.gguf?token=secret")
    assert said.code == 0
    assert said.lines[1:] == shell.fit(models / "tiny.gguf").lines[1:]
    assert said.lines[0].startswith("tiny.gguf: llama, ")
    assert web.sent_bytes < 64 * MIB
    found = shell.json(f"{web.url}/{how}/tiny.gguf?token=secret")
    assert found["source"] == f"{web.url}/{how}/tiny.gguf"


@pytest.mark.parametrize("how", ["smaller", "shifted", "forbidden", "gzip", "loop", "file", "breaking", "none"])
def test_a_server_that_lies_or_fails_is_no_answer(how: str, shell: Shell, web: Web) -> None:
    name = "none.gguf" if how == "none" else "tiny.gguf"
    said = shell.fit(f"{web.url}/{how}/{name}?token=secret")
    assert (said.code, said.out) == (2, "")
    assert name in said.err and "secret" not in said.err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--ctx", "0"], "--ctx must be from 128 to 2097152, not 0"),
        (["--ctx", "127"], "not 127"),
        (["--ctx", "2097153"], "not 2097153"),
        (["--ctx", "many"], "invalid int"),
        (["--slots", "65"], "--slots"),
        (["--kv-type", "f8"], "--kv-type must be one of f32, f16"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(flags: list[str], text: str, shell: Shell, models: Path) -> None:
    said = shell.fit(models / "tiny.gguf", *flags)
    assert said.code == 2 and text in said.err


def test_what_is_no_model_is_named(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>")
    (tmp_path / "lfs.gguf").write_text("version https://git-lfs.github.com/spec/v1")
    (tmp_path / "\x1b[31mred.gguf").write_text("<html>")
    for source, text in (
        (tmp_path / "page.gguf", "page.gguf: it is not a GGUF file, but a web page"),
        (tmp_path / "lfs.gguf", "but a Git LFS pointer; run git lfs pull"),
        (tmp_path / "\x1b[31mred.gguf", "?[31mred.gguf: it is not"),
        (tmp_path, "without a config.json"),
        (tmp_path / "none", "there is no such file"),
        ("nofile.gguf", "nofile.gguf: there is no such file"),
        ("models/nofile.gguf", "models/nofile.gguf: there is no such file"),
        ("/dev/null", "it is not a regular file"),
        ("", "SOURCE is empty; name"),
        (".", ": it is a directory"),
        ("pvc://c/m.gguf", "names a volume"),
        ("file:///nowhere/m%20x.gguf", "m x.gguf: it cannot be read"),
        ("http://[bad", "no URL"),
        ("~nobody-of-that-name/m", "home"),
        ("a\0b", "NUL byte"),
    ):
        said = shell.fit(source)
        assert (said.code, said.out) == (2, ""), source
        assert text in said.err


@pytest.mark.parametrize("command", ["fit", "serve"])
def test_a_projector_is_no_model_and_is_not_applied(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Serve, "_as_the_system", lambda *_: pytest.fail("it was applied"))
    vision.projector(tmp_path / "mmproj.gguf")
    engine = ["--llama-server", sys.executable]
    code = main.main([command, str(tmp_path / "mmproj.gguf"), "--state-dir", str(tmp_path / "state"), *engine])
    told = capsys.readouterr().err
    assert code != 0 and "mmproj.gguf: it is a projector" in told and "spec.mmproj" in told
    assert ("nothing is applied" in told) is (command == "serve")


def test_hyperparameters_that_make_no_sense_are_refused_and_said(shell: Shell, models: Path, tmp_path: Path) -> None:
    data = (models / "tiny.gguf").read_bytes().replace(b"llama.block_count", b"llama.block_cOunt")
    (tmp_path / "odd.gguf").write_bytes(data)
    said = shell.fit(tmp_path / "odd.gguf")
    assert (said.code, said.out) == (2, "")
    assert "odd.gguf: llama.block_count is missing" in said.err


# ── MLX ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def mlx(tmp_path: Path) -> Path:
    path = tmp_path / "Qwen3-MLX"
    path.mkdir()
    config = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    }
    (path / "config.json").write_text(json.dumps(config))
    with (path / "model.safetensors").open("wb") as file:
        file.truncate(4 * GIB)
    return path


def test_a_directory_of_an_mlx_model_is_judged_by_its_config(shell: Shell, mlx: Path) -> None:
    said = shell.fit(mlx)
    assert said.code == 1
    assert said.lines[0] == "Qwen3-MLX: qwen3 (MLX), 4.0 GiB, trained for 40960 tokens"
    assert "KV cache (1 x 40960 tokens) 5.6 GiB" in said.lines[1] and "by config" in said.lines[1]
    assert "prompt cache 1.0 GiB" in said.lines[1]
    assert shell.fit(mlx, "--ctx", "32768").code == 0
    said = shell.fit(mlx, "--ctx", "65536", "--slots", "2")
    assert said.code == 1
    advice = [each for each in said.lines if each.startswith("it would fit")]
    assert any("--ctx" in each for each in advice) and any("--kv-type q8_0" in each for each in advice)
    assert shell.fit(mlx, "--ctx", "65536", "--slots", "2", "--kv-type", "q8_0").code == 0
    assert shell.fit(mlx, "--kv-type", "q5_1").code == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_hidden_layers": -1}', "[" * 100_000, "\xff"])
def test_an_mlx_config_that_makes_no_sense_is_no_answer(text: str, shell: Shell, mlx: Path) -> None:
    (mlx / "config.json").write_text(text, "latin-1")
    for flags in ([], ["--ctx", "4096"]):
        said = shell.fit(mlx, *flags)
        assert (said.code, said.out) == (2, ""), said.err


# ── the settings ─────────────────────────────────────────────────────────────────────────────────


def test_a_context_that_is_not_told_may_be_said(shell: Shell, mlx: Path) -> None:
    config = json.loads((mlx / "config.json").read_text())
    del config["max_position_embeddings"]
    (mlx / "config.json").write_text(json.dumps(config))
    assert "max_position_embeddings is missing" in shell.fit(mlx).err
    assert shell.fit(mlx, "--ctx", "4096").code == 0


def test_the_settings_of_the_system_that_runs_count_and_flags_win(shell: Shell, models: Path) -> None:
    assert shell.json(models / "tiny.gguf", "--memory-fraction", "0.5")["budgetBytes"] == 8 * GIB
    shell.state.create()
    saved = {"config": "", "values": {"memory_fraction": 0.25}}
    (shell.state.path / "overrides.json").write_text(json.dumps(saved))
    assert shell.json(models / "tiny.gguf")["budgetBytes"] == 4 * GIB
    assert shell.json(models / "tiny.gguf", "--memory-fraction", "0.5")["budgetBytes"] == 8 * GIB


def test_it_is_a_command_of_its_own(models: Path, tmp_path: Path) -> None:
    """The real program, on this machine."""
    command = [sys.executable, "-m", "metal_supervisor", "fit", str(models / "tiny.gguf"), "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "It fits: " in done.stdout and 3 <= len(done.stdout.splitlines()) <= 8
