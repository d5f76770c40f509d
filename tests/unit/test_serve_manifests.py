"""What `metal-supervisor serve` makes of what was typed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import tiny_gguf

from metal_supervisor.cli import chat, fit, main, model_source, serve, services
from metal_supervisor.cli.changes import commands_for
from metal_supervisor.cli.model_source import ServedModel, examples
from metal_supervisor.cli.serve import ServeOrder
from metal_supervisor.cli.terminal import CommandError
from metal_supervisor.cluster.kube import KubeError
from metal_supervisor.host.machine import NoBinary
from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.model_directory import Contents, ModelDirectory, kept
from metal_supervisor.settings.loader import Overrides, Settings
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.model_resource import read_artifact
from metal_supervisor.spec.sources import canonical
from metal_supervisor.spec.types import Json
from metal_supervisor.state import gateway_note
from metal_supervisor.state.own_processes import CannotBoot
from metal_supervisor.state.reports import CONTROLLER_REPORT


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf://o/r/Llama-3.2-3B-Instruct-Q4_K_M.gguf", "llama-3-2-3b-instruct-q4-k-m"),
        ("hf://mlx-community/Qwen3-4B-4bit", "qwen3-4b-4bit"),
        ("file:///models/big-00001-of-00003.gguf", "big"),
        ("https://ollama.com/library/llama3.2:3b", "llama3-2-3b"),
        ("https://example.com/m.gguf?token=secret/x", "m"),
        ("/models/7B/", "model-7b"),
        ("file:///models/Ünïcode €.gguf", "n-code"),
        ("file:///models/€€€.gguf", "model"),
        (f"file:///{'x' * 200}.gguf", "x" * 50),
        (f"file:///hub/models--acme--M-GGUF/snapshots/{'0' * 40}", "m-gguf"),
        (f"/hub/models--gpt2/snapshots/{'0' * 40}/", "gpt2"),
        (f"file:///hub/models--acme--M/snapshots/{'0' * 40}/M-Q8_0.gguf", "m-q8-0"),
    ],
)
def test_the_name_is_a_label_made_of_the_source(source: str, name: str) -> None:
    assert model_source.name_of(source) == name


def test_what_was_typed_is_in_the_manifests() -> None:
    order = ServeOrder("x", context=4096, on_demand=True, namespace="team")
    made = serve.manifests(order, ServedModel('file:///models/a "quoted": name #1.gguf', "gguf"))
    model, service = made
    assert model["spec"]["hardware"] == {"accelerator": "metal"} and model["metadata"]["namespace"] == "team"
    assert service["metadata"]["annotations"] == {"metal-supervisor.io/on-demand": "true"}
    assert service["spec"] == {"modelRef": model["metadata"]["name"], "replicas": 1, "contextSize": 4096}
    assert serve.path_of(service).endswith("/namespaces/team/inferenceservices/a-quoted-name-1")


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(Bad, match="--name must be"):
        serve.manifests(ServeOrder("x", name="Über"), ServedModel("/m.gguf", "gguf"))


def test_files_and_directories_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "mlx").mkdir()
    file, directory = (model_source.resolve(Settings(), str(tmp_path / name)) for name in ("m.gguf", "mlx"))
    assert file == ServedModel(f"file://{tmp_path / 'm.gguf'}", "gguf")
    assert directory == ServedModel(f"file://{tmp_path / 'mlx'}", "mlx")


@pytest.mark.parametrize("typed", ["M-00001-of-00002.gguf", "linked/M-00001-of-00002.gguf", "mlx"])
def test_a_link_keeps_the_name_that_the_user_typed(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "86198").write_bytes(b"GGUF")
    (tmp_path / "M-00001-of-00002.gguf").symlink_to(blobs / "86198")
    (tmp_path / "linked").symlink_to(tmp_path)
    (tmp_path / "mlx").symlink_to(blobs)
    monkeypatch.chdir(tmp_path)
    for spelled in (typed, f"./{typed}", str(tmp_path / typed)):
        assert model_source.resolve(Settings(), spelled).source == f"file://{tmp_path / typed}"


def test_two_dots_after_a_link_lead_where_the_link_leads(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "real" / "m.gguf").symlink_to(tmp_path / "blob")
    (tmp_path / "blob").write_bytes(b"GGUF")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    found = model_source.resolve(Settings(), str(tmp_path / "link" / ".." / "m.gguf"))
    assert found.source == f"file://{tmp_path / 'real' / 'm.gguf'}"


@pytest.mark.parametrize("name", ["my#1.gguf", "a%20b.gguf", "q?x.gguf", "Über uns.gguf"])
def test_a_file_is_found_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    assert canonical(model_source.resolve(Settings(), str(tmp_path / name)).source) == str(tmp_path / name)


def test_a_model_that_was_served_before_is_found_however_its_source_is_spelled(tmp_path: Path) -> None:
    class Cluster:
        """Has the Model as an earlier release wrote it."""

        clock_offset_s = 0.0
        applied: ClassVar[list[Json]] = []

        def request(self, _method: str, path: str) -> Json:
            field = {"source": "file:///My Models/m.gguf"} if "/models/" in path else {"modelRef": "m"}
            return {"metadata": {"name": "m"}, "spec": field}

        def apply(self, _path: str, body: Json, *_: object, dry_run: bool = False, **__: object) -> None:
            if not dry_run:
                self.applied.append(body)

    made = serve.manifests(ServeOrder("x", name="m"), ServedModel("file:///My%20Models/m.gguf", "gguf"))
    cluster: Any = Cluster()
    command = serve.Serve(Settings(state_dir=str(tmp_path)), Overrides(), ServeOrder("m"), io.StringIO())
    command._apply(cluster, made)
    assert cluster.applied[0]["spec"]["source"] == "file:///My Models/m.gguf"
    made[0]["spec"]["source"] = "file:///My%20Models/another.gguf"
    with pytest.raises(CannotBoot, match=r"there is a Model m already.*: metal-supervisor rm m"):
        command._apply(cluster, made)

    class Left(Cluster):
        """Has the Model alone, which `rm` does not remove."""

        def request(self, method: str, path: str) -> Json:
            if "/models/" not in path:
                raise KubeError(404, "NotFound", "there is none")
            return super().request(method, path)

    left: Any = Left()
    with pytest.raises(CannotBoot, match=r"there is a Model m already.*: kubectl .* delete -n default model m$"):
        command._apply(left, made)


def test_a_service_that_the_api_refuses_leaves_no_model_behind(tmp_path: Path) -> None:
    class Cluster:
        """Accepts Models alone."""

        applied: ClassVar[list[str]] = []

        def request(self, _method: str, _path: str) -> Json:
            raise KubeError(404, "NotFound", "there is none")

        def apply(self, path: str, *_: object, dry_run: bool = False, **__: object) -> None:
            if "/inferenceservices/" in path:
                raise KubeError(422, "Invalid", "refused")
            self.applied.append(path)

    cluster: Any = Cluster()
    command = serve.Serve(Settings(state_dir=str(tmp_path)), Overrides(), ServeOrder("m"), io.StringIO())
    with pytest.raises(KubeError):
        command._apply(cluster, serve.manifests(ServeOrder("x", name="m"), ServedModel("/m.gguf", "gguf")))
    assert not cluster.applied


class Lacking:
    """Stand-in for a cluster that answers everything with a 404."""

    def __init__(self, told: str) -> None:
        self._told = told

    def request(self, *_: object) -> Json:
        raise KubeError(404, "NotFound", self._told)

    def apply(self, *_: object, **__: object) -> None:
        self.request()

    def close(self) -> None:
        pass


def test_a_namespace_is_made_in_the_embedded_api_and_not_in_the_users_own_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster: Any = Lacking('namespaces "llm" not found')
    order, out = ServeOrder("x", name="m", namespace="llm"), io.StringIO()
    command = serve.Serve(Settings(state_dir=str(tmp_path)), Overrides(), order, out)
    made = serve.manifests(order, ServedModel("/m.gguf", "gguf"))
    with pytest.raises(CannotBoot, match=f"kubectl --kubeconfig {tmp_path}/kubeconfig create namespace llm"):
        command._beside(cluster, made)
    monkeypatch.setattr(serve, "Kube", lambda *_: cluster)
    monkeypatch.setattr(serve.time, "sleep", lambda _: pytest.fail("it waits although no later try can succeed"))
    monkeypatch.setattr(serve.foreground, "run", lambda *found: found[-1]())
    with pytest.raises(CommandError, match='could not be applied: 404 NotFound: namespaces "llm" not found'):
        command._as_the_system(made)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("the server could not find the requested resource", "kubectl apply --server-side -f conf/crds"),
        ("https://k:6443 answered 404 without saying why", "kubectl apply --server-side -f conf/crds"),
        ('namespaces "llm" not found', "there is no namespace llm: kubectl create namespace llm"),
        ('inferenceservices.inference.llmkube.dev "m" not found', '"m" not found; metal-supervisor serve --print'),
    ],
)
def test_what_a_cluster_lacks_is_told_with_the_way_to_make_it(tmp_path: Path, told: str, said: str) -> None:
    cluster: Any = Lacking(told)
    order = ServeOrder("x", name="m", namespace="llm")
    command = serve.Serve(Settings(state_dir=str(tmp_path), kubeconfig="/k"), Overrides(), order, io.StringIO())
    with pytest.raises(CannotBoot) as raised:
        command._beside(cluster, serve.manifests(order, ServedModel("/m.gguf", "gguf")))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("README.md", "README.md is something else, not a GGUF file"),
        ("empty", "a directory without config.json"),
    ],
)
def test_what_is_no_model_is_not_applied(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("words")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(serve.Serve, "_as_the_system", lambda *_: pytest.fail("it was applied"))
    assert main.main(["serve", str(tmp_path / name), "--state-dir", str(tmp_path / "state")]) == 1
    said = capsys.readouterr().err
    assert why in said and "nothing is applied" in said


@pytest.mark.parametrize("context", [64, 1 << 22])
def test_a_context_that_the_api_refuses_is_refused_here(context: int) -> None:
    with pytest.raises(Bad, match="--ctx must be from 128 to 2097152"):
        serve.manifests(ServeOrder("x", context=context), ServedModel("/m.gguf", "gguf"))


def test_what_only_fit_can_be_told_is_no_advice_of_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = "m", "it would fit with --kv-type q4_0 (x): 1 MiB", "it would fit with --ctx 512 (x): 1 MiB"
    monkeypatch.setattr(serve.fit, "answer", lambda *_: fit.FitAnswer(False, lines, {}))
    monkeypatch.setattr(serve.model_files, "looked_at", lambda _: None)
    said: list[str] = []
    command = serve.Serve(Settings(state_dir=str(tmp_path)), Overrides(), ServeOrder("m"), io.StringIO())
    assert not command._fits(ServedModel("/m.gguf", "gguf"), said.append) and said == list(lines[2:])


class Told:
    """A cluster that tells one state after another, and accepts whatever is applied."""

    def __init__(self, *states: tuple[str, ...]) -> None:
        self.states = list(states)
        self.applied: set[str] = set()

    def request(self, method: str, path: str, *_: object) -> Json:
        if method == "DELETE":
            self.applied.remove(path)
            return {}
        if path not in self.applied:
            raise KubeError(404, "NotFound", "m")
        phase, reason, *message = self.states.pop(0)
        if phase == "Ctrl-C":
            raise KeyboardInterrupt
        text = message[0] if message else "why; do this"
        said = {"type": "MetalReady", "reason": reason, "message": text, "observedGeneration": 1}
        return {
            "metadata": {"name": "m", "namespace": "default", "generation": 1},
            "spec": {"modelRef": "m", "env": [{"name": "LLAMA_API_KEY", "value": "sekrit"}]},
            "status": {"phase": phase, "conditions": [said], "endpoint": "http://127.0.0.1:18100/v1/chat/completions"},
        }

    def apply(self, path: str, *_: object, dry_run: bool = False, **__: object) -> None:
        self.applied |= set() if dry_run else {path}

    def close(self) -> None:
        pass


def follow(told: Any, out: io.StringIO, state: Path) -> int:
    """Serve a model m in a system that runs."""
    order = ServeOrder("x", name="m")
    command = serve.Serve(Settings(state_dir=str(state)), Overrides(), order, out)
    return command._beside(told, serve.manifests(order, ServedModel("/m.gguf", "gguf")))


def test_a_download_that_is_tried_again_does_not_end_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "LOOK_EVERY_S", 0.0)
    states = ("Failed", "DownloadFailed"), ("Pending", "Downloading"), ("Ready", "Serving")
    assert follow(Told(*states), io.StringIO(), tmp_path) == 0
    monkeypatch.setattr(serve, "PATIENT_S", 0.0)
    with pytest.raises(CommandError, match=r"^m: why; do this; "):
        follow(Told(*states), io.StringIO(), tmp_path)


DOWNLOADS = tuple(("Pending", "Downloading", f"{each} % of 8.0 GiB, 50.0 MB/s") for each in (1, 2, 3))


@pytest.mark.parametrize(("every_s", "shown"), [(0.0, ("1 %", "2 %", "3 %")), (1e9, ("1 %",))])
def test_a_download_is_a_plain_line_now_and_then_on_a_pipe(
    every_s: float, shown: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(serve, "PROGRESS_S", every_s)
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    assert follow(Told(*DOWNLOADS, ("Ready", "Serving")), out, tmp_path) == 0
    lines = out.getvalue().splitlines()
    assert lines[: len(shown)] == [f"m  Pending  {each} of 8.0 GiB, 50.0 MB/s" for each in shown]
    assert lines[len(shown)] == "m  Ready  why; do this" and all(map(str.isprintable, lines))


def test_a_download_is_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LOOK_EVERY_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    file = {"phase": "Downloading", "got_bytes": 1 << 30, "total_bytes": 8 << 30, "message": "12 %"}
    rows = {f"default/{name}": {"source": "", "file": file} for name in ("m", "other")}
    (tmp_path / CONTROLLER_REPORT).write_text(json.dumps({"models": rows}))
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    assert follow(Told(*DOWNLOADS, ("Ready", "Serving")), out, tmp_path) == 0
    text = out.getvalue()
    assert "default.m " in text and "1.0/8.0 GiB" in text and "default.other" not in text
    assert "1 %" in text and "2 %" not in text and text.count("\x1b[?25h") == text.count("\x1b[?25l") > 0


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (DOWNLOADS[0], "m: its download carries on in the running system"),
        (("Creating", "Loading"), "m: it stays applied"),
    ],
)
def test_ctrl_c_names_what_goes_on_and_how_to_remove_it(
    state: tuple[str, ...], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "LOOK_EVERY_S", 0.0)
    told, out = Told(state, ("Ctrl-C", "")), io.StringIO()
    assert follow(told, out, tmp_path) == 130
    last = out.getvalue().splitlines()[-1]
    assert last.startswith(f"{what}; metal-supervisor status") and "metal-supervisor rm m --state-dir" in last
    assert len(told.applied) == 2


def test_the_curl_has_the_key_that_the_gateway_wants(tmp_path: Path) -> None:
    gateway_note.write(tmp_path, {"at": time.time(), "pid": os.getpid()})
    order, out = ServeOrder("x", name="m"), io.StringIO()
    settings = Settings(state_dir=str(tmp_path), gateway_keys=str(tmp_path / "keys"))
    command = serve.Serve(settings, Overrides(), order, out)
    told: Any = Told(("Ready", "Serving"))
    assert command._beside(told, serve.manifests(order, ServedModel("/m.gguf", "gguf"))) == 0
    key = '-H "Authorization: Bearer $METAL_SUPERVISOR_KEY"'
    assert f"curl {settings.gateway_url}/chat/completions {key} -d" in out.getvalue()
    assert "export METAL_SUPERVISOR_KEY=$(metal-supervisor key add me" in out.getvalue()


@pytest.mark.parametrize(
    ("reason", "left"),
    [("RuntimeBinaryMissing", False), ("GatedModel", False), ("CrashLoopBackOff", True), ("Hung", True)],
)
def test_a_service_whose_engine_has_never_run_is_removed_again(reason: str, left: bool, tmp_path: Path) -> None:
    told, out = Told(("Failed", reason)), io.StringIO()
    with pytest.raises(CommandError) as raised:
        follow(told, out, tmp_path)
    assert len(told.applied) == (2 if left else 0) and not out.getvalue()
    assert ("metal-supervisor rm m --state-dir" in str(raised.value)) is left
    assert ("; the service is removed again" in str(raised.value)) is not left


def test_a_model_that_cannot_run_ends_the_system_that_was_started_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: Any = Told(("Failed", "CrashLoopBackOff"), ("Failed", "GatedModel"))
    order = ServeOrder("x", name="m")
    command = serve.Serve(Settings(state_dir=str(tmp_path)), Overrides(), order, io.StringIO())
    stopped = threading.Event()
    monkeypatch.setattr(serve, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(serve, "Kube", lambda *_: told)
    monkeypatch.setattr(serve.os, "kill", lambda *_: stopped.set())
    monkeypatch.setattr(serve.foreground, "run", lambda *found: found[-1]() or int(not stopped.wait(60)))
    with pytest.raises(CommandError, match=r"^m: why; do this; the service is removed again$"):
        command._as_the_system(serve.manifests(order, ServedModel("/m.gguf", "gguf")))
    assert not told.applied


def test_a_model_of_ollama_is_one_of_its_library() -> None:
    assert model_source.resolve(Settings(), "ollama://llama3.2:3b").source == "https://ollama.com/library/llama3.2:3b"


@pytest.mark.parametrize("typed", ["nothing", "/nowhere.gguf", "../nowhere", "o/r/../x", "ftp://h/x.gguf", "o/r:"])
def test_what_is_no_source_is_refused(typed: str) -> None:
    with pytest.raises(Bad):
        model_source.resolve(Settings(), typed)


@pytest.mark.parametrize("typed", ["models/none.gguf", "o/r/none.gguf"])
def test_a_relative_path_that_is_not_there_is_told_as_a_file(typed: str) -> None:
    with pytest.raises(Bad) as caught:
        model_source.resolve(Settings(hf_endpoint="http://127.0.0.1:9"), typed)
    assert caught.value.message.startswith(f"{typed}: there is no such file; ") and "hf://" in caught.value.message


def test_shipped_examples_are_served_by_name() -> None:
    found = model_source.resolve(Settings(), "phi-4-mini")
    model, service = serve.manifests(ServeOrder("phi-4-mini", context=4096), found)
    assert model["metadata"]["name"] == "phi-4-mini" and model["spec"]["source"].startswith("https://huggingface.co/")
    assert model["spec"]["hardware"]["accelerator"] == "metal"
    assert service["spec"]["contextSize"] == 4096 and service["spec"]["parallelSlots"] == 2
    assert not any(each.source.startswith("/") for each in examples().values())


def test_shipped_examples_are_read_whatever_the_locale_is() -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "metal_supervisor", "serve", "phi-4-mini", "--print"]
    done = subprocess.run(words, env={**os.environ, **locale}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "name: phi-4-mini" in done.stdout, done.stderr


def test_a_mistyped_example_is_answered_with_the_nearest() -> None:
    with pytest.raises(Bad) as caught:
        model_source.resolve(Settings(), "phi-4-mni")
    assert "did you mean phi-4-mini?" in caught.value.message


@pytest.mark.parametrize(
    ("there", "fitting", "chosen"),
    [
        (("Q4_K_M", "Q8_0"), ("Q4_K_M", "Q8_0"), "Q4_K_M"),
        (("Q4_K_M", "Q3_K_M", "Q2_K"), ("Q3_K_M", "Q2_K"), "Q3_K_M"),
        (("Q6_K", "Q8_0"), ("Q6_K", "Q8_0"), "Q6_K"),
        (("Q4_K_M", "Q2_K"), (), "Q4_K_M"),
        (("UD-Q4_K_XL", "Q8_0"), ("UD-Q4_K_XL", "Q8_0"), "UD-Q4_K_XL"),
        (("F16", "BF16"), ("F16",), ""),
    ],
)
def test_of_several_quantizations_the_usual_one_that_fits_is_taken(
    there: tuple[str, ...], fitting: tuple[str, ...], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "o/r").mkdir(parents=True)
    for quantization in (*there, "imatrix"):
        (tmp_path / f"o/r/m-{quantization}.gguf").write_bytes(b"GGUF")
    fits = {f"hf://o/r/m-{each}.gguf" for each in fitting}
    monkeypatch.setattr(model_source, "_fits", lambda _, source, __: source in fits)
    settings = Settings(hf_endpoint=str(tmp_path), state_dir=str(tmp_path))
    if not chosen:
        with pytest.raises(Unusable, match="has 2 GGUF files"):
            model_source.resolve(settings, "o/r")
        return
    found = model_source.resolve(settings, "o/r")
    assert found.source == f"hf://o/r/m-{chosen}.gguf"
    assert found.note == f"of several files, m-{chosen}.gguf is taken; o/r:QUANT names another"


def test_what_is_to_be_typed_next_is_what_the_model_can_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no `make run` has left a system
    monkeypatch.delenv("METAL_SUPERVISOR_STATE_DIR", raising=False)
    base = "http://127.0.0.1:18100/v1"
    curl, talk = commands_for(Settings(), "one", base, "chat")
    assert talk.split() == ["metal-supervisor", "chat", "one"]
    assert curl.startswith(f"curl {base}/chat/completions -d ") and '"messages"' in curl
    (only,) = commands_for(Settings(), "one", base, "rerank")
    assert "curl http://127.0.0.1:18100/v1/rerank -d " in only and '"documents"' in only


def test_what_is_to_be_typed_next_is_for_the_system_that_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("METAL_SUPERVISOR_STATE_DIR", raising=False)
    (told,) = commands_for(Settings(state_dir=str(tmp_path / "here")), "one", "", "chat")
    assert told.strip() == "metal-supervisor chat one --state-dir here"


@pytest.mark.parametrize(
    ("note", "answers"),
    [({}, True), ({"closed": True}, False), ({"pid": os.getpid()}, True), ({"pid": 1 << 22}, False)],
)
def test_no_request_is_sent_to_a_gateway_that_does_not_answer(
    note: dict[str, Any], answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program listens there, and would get the prompt; or its holder alone, and the request would wait."""
    endpoint = "http://127.0.0.1:18100/v1"
    found = {"metadata": {"namespace": "n", "name": "one"}, "status": {"phase": "Ready", "endpoint": endpoint}}
    services = SimpleNamespace(named=lambda _: found, close=lambda: None, api=None)
    monkeypatch.setattr(chat, "ServiceClient", lambda _: services)
    settings = Settings(state_dir=str(tmp_path))
    gateway_note.write(tmp_path, {"at": time.time(), **note})
    base = settings.gateway_url if answers else endpoint
    assert chat.partner_of(settings, "one").url == base


@pytest.mark.parametrize(
    ("address", "ready", "url"),
    [
        ("10.0.7.2", True, "http://10.0.7.2:18101/v1"),
        ("fd00::7", True, "http://[fd00::7]:18101/v1"),
        ("10.0.7.2", False, ""),
    ],
)
def test_in_a_cluster_a_model_is_asked_where_an_engine_is(address: str, ready: bool, url: str, tmp_path: Path) -> None:
    """The name of its Service is one for pods."""
    endpoint = "http://one.n.svc.cluster.local:8080/v1/chat/completions"
    found = {"metadata": {"namespace": "n", "name": "one"}, "status": {"phase": "Ready", "endpoint": endpoint}}
    silent = {"endpoints": [{"addresses": ["10.0.7.1"], "conditions": {"ready": False}}], "ports": [{"port": 18100}]}
    other = {"endpoints": [{"addresses": [address], "conditions": {"ready": ready}}], "ports": [{"port": 18101}]}
    asked: list[Any] = []

    def request(*words: Any) -> Any:
        asked.append(words)
        return {"items": [silent, other]}

    settings = Settings(state_dir=str(tmp_path), kubeconfig="/a/file")
    assert services.own_url(settings, found, SimpleNamespace(request=request)) == url
    (words,) = asked
    assert words[1:] == (
        "/apis/discovery.k8s.io/v1/namespaces/n/endpointslices",
        {"labelSelector": "llmkube.ai/inference-service=one"},
    )


@pytest.mark.parametrize("source", ["", " "])
def test_an_empty_source_is_not_the_current_directory(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["serve", source, "--print"]) == 2
    said = capsys.readouterr()
    assert "SOURCE is empty; name a file" in said.err and not said.out


CLOSED = "http://127.0.0.1:9"
"""A server that accepts no connection."""
ENGINE = "--llama-server", "/bin/true"


@pytest.mark.parametrize(
    ("source", "flags", "named"),
    [
        ("./tiny.gguf", (), "llama-server was not found on PATH or in Homebrew's prefixes; install it"),
        ("./mlx", (), "mlx_lm.server was not found"),
        ("./mlx", ("--runtimes", "llama-server"), "spec.format is 'mlx', which no runtime of this Mac serves"),
        ("ollama://gemma3", (), "ollama was not found on PATH or in Homebrew's prefixes; install it"),
        (f"{CLOSED}/m.gguf", ENGINE, f"{CLOSED}/m.gguf: connection refused; "),
        ("hf://o/r/m.gguf", ENGINE, "connection refused; "),
        ("o/r", ENGINE, "connection refused; "),
        ("qwen3-8b", ENGINE, "connection refused; "),
        ("https://example.com/m.gguf", (*ENGINE, "--download-proxy", CLOSED), "the proxy cannot be used"),
    ],
)
def test_a_missing_engine_or_server_is_one_sentence_before_anything_starts(
    source: str,
    flags: tuple[str, ...],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_gguf.write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "config.json").write_text("{}")
    (tmp_path / "mlx" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(serve.Serve, "_as_the_system", lambda *_: pytest.fail("it was started"))
    words = "--state-dir", "state", "--hf-endpoint", CLOSED, "--ollama-url", "off", *flags
    assert main.main(["serve", source, *words]) == 1
    said = capsys.readouterr().err
    assert named in said and "nothing is applied" in said and said.count("\n") == 1
    assert not (tmp_path / "state").exists()


def test_a_model_in_the_store_needs_no_server(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path / "state"), hf_endpoint=CLOSED, llama_server="/bin/true")
    order = ServeOrder("hf://o/r/m.gguf")
    made = serve.manifests(order, model_source.resolve(settings, order.source))
    slot = ModelDirectory(settings.store_path, read_artifact(made[0]).slot)
    slot.prepare()
    (slot.path / "m.gguf").write_bytes(b"GGUF")
    command = serve.Serve(settings, Overrides(), order, io.StringIO())
    for whole in (False, True):
        files = {"m.gguf": kept(slot.path / "m.gguf")}
        slot.write(Contents("hf://o/r/m.gguf", "m.gguf", files=files, whole=whole))
        with contextlib.nullcontext() if whole else pytest.raises(Unusable, match="connection refused"):
            command._check(made, runs=False)


def test_the_users_own_ollama_needs_no_program_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    settings, order = Settings(state_dir=str(tmp_path)), ServeOrder("ollama://gemma3")
    made = serve.manifests(order, model_source.resolve(settings, order.source))
    command = serve.Serve(settings, Overrides(), order, io.StringIO())
    for answers in (False, True):
        monkeypatch.setattr(serve.own_ollama, "answers", lambda _, answers=answers: answers)
        with contextlib.nullcontext() if answers else pytest.raises(NoBinary, match="ollama was not found"):
            command._check(made, runs=False)
