"""`metal-supervisor doctor` as somebody types it: exit codes, JSON, broken settings, texts that are not ours."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_support import surroundings

from metal_supervisor.cli import main
from metal_supervisor.doctor import command
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.host.commands import Done
from metal_supervisor.settings import loader
from metal_supervisor.settings.loader import Overrides, Settings
from tests.support.system import free_ports


def unreadable(path: Path) -> list[str]:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the command find this Mac; keyword arguments as `surroundings` takes them."""

    def put(**more: Any) -> None:
        def made(settings: Settings, **said: Any) -> Surroundings:
            return replace(surroundings(tmp_path, **more), settings=settings, **said)

        monkeypatch.setattr(command, "Surroundings", made)

    return put


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = main.main(["doctor", *flags])
    return code, *capsys.readouterr()


def flags(tmp_path: Path) -> list[str]:
    port, gateway = free_ports(2)
    return [
        "--state-dir",
        str(tmp_path / "state"),
        "--llama-server",
        str(tmp_path / "bin" / "llama-server"),
        "--port",
        str(port),
        "--gateway",
        f"127.0.0.1:{gateway}",
        "--runtimes",
        "llama-server",
    ]


def test_the_exit_code_tells_and_every_fix_is_below_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: Callable[..., None]
) -> None:
    machine()
    code, out, _ = run(capsys, *flags(tmp_path))
    lines = out.splitlines()
    assert code == 0 and "fail" not in lines[-1] and "warn" in lines[-1] and "\x1b" not in out
    for at, line in enumerate(lines[:-1]):
        if line.startswith("warn"):
            assert lines[at + 1].lstrip().startswith("→ ")
    machine(list_directory=unreadable)
    code, out, _ = run(capsys, *flags(tmp_path))
    assert code == 1 and "1 fail" in out.splitlines()[-1]


def test_json_has_the_same_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: Callable[..., None]
) -> None:
    machine(list_directory=unreadable)
    code, out, _ = run(capsys, "--json", *flags(tmp_path))
    said = json.loads(out)
    assert code == 1 and said["ok"] is False and said["summary"].endswith(" ok")
    assert [each["status"] for each in said["findings"] if each["check"] == "store"] == ["fail"]
    assert all(set(each) == {"check", "status", "text", "fix"} for each in said["findings"])


def test_nothing_foreign_acts_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: Callable[..., None]
) -> None:
    evil = "\x1b[2J\x07\u202eX\nok    fake  all is well"
    machine(programs={"/usr/bin/pmset -g custom": Done(0, f"{evil}:\n sleep 9\n", "")})
    out = run(capsys, *flags(tmp_path))[1]
    assert "\x1b" not in out and "\u202e" not in out and "\nok    fake" not in out


@pytest.mark.parametrize(
    ("text", "word"),
    [("prot = 1\n", "did you mean port?"), ("port = \n", "not valid TOML"), ("port = 0\n", "between")],
)
def test_a_broken_settings_file_is_a_finding_and_the_rest_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: Callable[..., None], text: str, word: str
) -> None:
    machine()
    broken = tmp_path / "m.toml"
    broken.write_text(text)
    code, out, _ = run(capsys, "--config", str(broken), *flags(tmp_path))
    line = next(each for each in out.splitlines() if each.startswith("fail"))
    assert code == 1 and line.startswith("fail  settings") and word in line and str(broken) in line
    assert "\nok    store" in out


def test_a_gateway_that_must_not_listen_is_a_finding_though_each_setting_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: Callable[..., None]
) -> None:
    machine()
    usual = flags(tmp_path)
    for said in (["--gateway", "0.0.0.0:9100"], ["--gateway-tls-cert", "/c"]):
        code, out, _ = run(capsys, *usual, *said)
        assert code == 1 and "\nfail  settings     the gateway does not listen: " in f"\n{out}"
    assert run(capsys, *usual, "--gateway-tls-cert", "/c", "--gateway", "off")[0] == 0, "nothing asks for it"


def parsed(*flags: str) -> Any:
    return main.parser().parse_args(["doctor", *flags])


def test_the_settings_are_those_of_the_system_that_runs(tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / "m.toml"
    state.mkdir()
    file.write_text("lease_duration = 7\n")
    loader.save_overrides(state, Overrides(str(file), {"namespace": "llm", "state_dir": str(state)}))
    settings, said, problem = command.settings_of(parsed("--state-dir", str(state), "--port", "9191"), {})
    assert (settings.namespace, settings.lease_duration, settings.port) == ("llm", 7.0, 9191)
    assert (said, problem) == (str(file), "")
    assert loader.load_good(state)[0].namespace == "llm"  # which notes the last good ones
    file.write_text("lease_duration = 1e9\n")
    settings, said, problem = command.settings_of(parsed("--state-dir", str(state)), {})
    assert (settings.namespace, settings.lease_duration, said) == ("llm", 7.0, str(file))
    assert "lease_duration" in problem


def test_a_settings_file_may_say_where_the_system_is_and_one_is_tried_out_beside_it(tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / "m.toml"
    state.mkdir()
    loader.save_overrides(state, Overrides("", {"namespace": "llm", "state_dir": str(state)}))
    file.write_text(f'state_dir = "{state}"\n')
    assert command.settings_of(parsed("--config", str(file)), {})[0].namespace == "llm"
    file.write_text("prot = 1\n")
    settings, _, problem = command.settings_of(parsed("--config", str(file), "--state-dir", str(state)), {})
    assert settings.namespace == "llm" and "did you mean port" in problem
    assert not (state / loader.GOOD_FILE).exists(), "nothing is written"


def test_a_wrong_variable_is_a_finding_and_a_wrong_flag_is_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, _, problem = command.settings_of(parsed("--state-dir", str(tmp_path)), {"METAL_SUPERVISOR_PROT": "1"})
    assert "METAL_SUPERVISOR_PORT" in problem and settings.state_path == tmp_path.resolve()
    assert main.main(["doctor", "--port", "many"]) == 78
    assert "--port" in capsys.readouterr().err


def test_a_state_directory_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "none"
    main.main(["doctor", "--state-dir", str(state), "--port", str(free_ports(1)[0])])
    assert "is made at the first start" in capsys.readouterr().out
    assert not state.exists()
