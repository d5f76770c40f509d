"""Bad input: each gets a clear condition or error that names the field, and touches nothing else."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor.cli.main import main
from metal_supervisor.cluster.kube import KubeError
from metal_supervisor.spec.processes import State
from tests.support import vision
from tests.support.faults import Figure, fault
from tests.support.system import MODELS, System, engine_path, eventually, free_ports, model, running, service

NASTY = [
    "line\nbreak",
    "[program:evil]\ncommand=/bin/touch /tmp/evil",
    "semi ; colon",
    "hash # tag",
    "%(ENV_HOME)s",
    "%s",
    "%%",
    "'single'",
    '"double"',
    "tab\there",
    "emoji \U0001f600 ünïcode",
    "",
    " lead and trail ",
    "\\back\\slash",
    "\r",
]

NAMES = [f"NASTY_{index}" for index in range(len(NASTY))]
FOREIGN = {"broken.conf": b"\xff\xfe[program:x]\n", "sneaky.conf": b"[supervisord]\nlogfile=/dev/null\n"}
"""Files in models.d that must not keep supervisord from starting."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    base = tmp_path_factory.mktemp("bad")
    (base / "llama-server").symlink_to(engine_path())
    (base / "run" / "models.d").mkdir(parents=True)
    for name, content in FOREIGN.items():
        (base / "run" / "models.d" / name).write_bytes(content)
    with running(base, "--allow-env", ",".join(NAMES), engine=base / "llama-server") as up:
        up.apply(up.tiny_model(), service("witness"))
        up.ready("witness")
        yield up


@pytest.fixture(autouse=True)
def witness_is_untouched(system: System) -> Iterator[None]:
    """Whatever a test does to its own service, another one never notices."""
    before = system.pid("witness")
    yield
    assert system.pid("witness") == before != 0
    assert "hello world" in system.chat("witness")


def failed(system: System, name: str, reason: str) -> str:
    """Waits until a service is reported as failed for the reason; returns the message."""
    eventually(lambda: system.condition("MetalReady", name).get("reason") == reason, what=f"{name}: {reason}")
    assert system.status(name)["phase"] == "Failed"
    degraded = system.condition("Degraded", name)
    assert (degraded["status"], degraded["reason"], degraded["message"]) == ("True", "Failed", "see MetalReady")
    return str(system.condition("MetalReady", name)["message"])


def gone(system: System, *names: str) -> None:
    for name in names:
        system.delete(name)
    eventually(lambda: not system.rpc.table().keys() & {f"default.{name}" for name in names}, what="gone")


def test_a_model_ref_to_nothing_is_named_and_heals_when_the_model_appears(system: System) -> None:
    system.apply(service("lost", "nowhere"))
    assert 'spec.modelRef names "nowhere"' in failed(system, "lost", "ModelNotFound")
    system.apply(system.tiny_model("nowhere"))
    system.ready("lost")
    gone(system, "lost")


def test_a_model_that_is_not_for_a_mac_is_named(system: System) -> None:
    system.apply(model("cuda", f"file://{system.tiny}", accelerator="cuda"), service("other", "cuda"))
    assert "spec.hardware.accelerator" in failed(system, "other", "NotMetal")
    assert system.slice("other") is None
    gone(system, "other")


def test_an_unknown_runtime_is_refused_by_the_api_or_by_name(system: System) -> None:
    with pytest.raises(KubeError, match=r"spec\.runtime"):
        system.apply(service("odd", runtime="nonsense"))
    system.apply(service("odd", runtime="vllm"))
    assert "spec.runtime is 'vllm'" in failed(system, "odd", "UnsupportedRuntime")
    gone(system, "odd")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [({"source": "models/foo.gguf"}, "UnsupportedSource"), ({"format": "mlx"}, "InvalidModelFile")],
    ids=["source", "format"],
)
def test_a_model_and_its_service_name_the_same_cause(system: System, spec: dict[str, str], reason: str) -> None:
    written = model("odd", system.tiny.as_uri())
    system.apply({**written, "spec": {**written["spec"], **spec}}, service("odd", "odd", extraArgs=[]))
    message = failed(system, "odd", reason)

    def of_model() -> dict[str, str]:
        status = system.get(f"{MODELS}/odd").get("status") or {}
        return dict(status["conditions"][0]) if status.get("phase") == "Failed" else {}

    condition = eventually(of_model, what="the Model's status")
    assert (condition["type"], condition["reason"]) == ("Degraded", reason)
    assert condition["message"] in message
    gone(system, "odd")
    system.delete("odd", MODELS)


@pytest.mark.parametrize(
    ("name", "content", "reason", "expected"),
    [
        ("missing", None, "ModelFileMissing", "does not exist"),
        ("empty", b"", "InvalidModelFile", "is empty"),
        ("page", b"<!DOCTYPE html><html>please log in</html>", "InvalidModelFile", "web page"),
        ("junk", b"\0\1\2\3junk", "InvalidModelFile", "not a GGUF file"),
        ("projector", b"", "InvalidModelFile", "name it in spec.mmproj of the Model"),
    ],
)
def test_a_source_that_is_not_a_model_file_is_named(
    system: System, name: str, content: bytes | None, reason: str, expected: str
) -> None:
    path = system.base / f"{name}.gguf"
    if content is not None:
        path.write_bytes(content)
    if name == "projector":
        vision.projector(path)
    system.apply(model(name, f"file://{path}"), service(name, name))
    message = failed(system, name, reason)
    assert expected in message and "spec.source" in message
    path.write_bytes(system.tiny.read_bytes())
    system.ready(name)  # and it heals when the file is put right
    gone(system, name)


class _Site(http.server.BaseHTTPRequestHandler):
    """A small site: the model, a login page, an empty file, a refusal."""

    model = b""

    def do_GET(self) -> None:
        status, body = {
            "/model.gguf": (200, self.model),
            "/login.gguf": (200, b"<html>log in</html>"),
            "/empty.gguf": (200, b""),
        }.get(self.path, (403, b"no"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


def test_http_sources_are_fetched_or_refused_with_a_reason(system: System) -> None:
    _Site.model = system.tiny.read_bytes()
    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{site.server_port}"
    try:
        for name in ("model", "login", "empty", "denied"):
            system.apply(model(f"web-{name}", f"{url}/{name}.gguf?token=s3cr3t"), service(f"web-{name}", f"web-{name}"))
        # The query is not part of the path the site knows, so only those without it are found.
        assert "answered 403" in failed(system, "web-denied", "SourceUnauthorized")
        for name in ("model", "login", "empty"):
            system.apply(model(f"web-{name}", f"{url}/{name}.gguf"))
        system.ready("web-model")
        assert "web page" in failed(system, "web-login", "InvalidModelFile")
        assert "is empty" in failed(system, "web-empty", "InvalidModelFile")
        assert "s3cr3t" not in system.kubectl("get", "isvc", "-o", "jsonpath={.items[*].status}")
        gone(system, "web-model", "web-login", "web-empty", "web-denied")
    finally:
        site.shutdown()
        site.server_close()


def test_names_of_63_characters_work_and_of_253_are_refused_by_name(system: System) -> None:
    long, longest = "n" * 63, ".".join(["n" * 62] * 4)[:250] + "end"
    assert len(longest) == 253
    system.apply(service(long), service(longest))
    assert "metadata.name has 253 characters" in failed(system, longest, "ServiceNameTooLong")
    system.ready(long)
    assert "hello world" in system.chat(long)
    gone(system, long, longest)


def test_a_dotted_name_works_and_its_twin_with_a_dash_is_refused(system: System) -> None:
    system.apply(service("a.b"))
    eventually(lambda: system.status("a.b").get("phase") == "Ready", what="a.b")
    system.apply(service("a-b"))
    message = failed(system, "a-b", "ServiceConflict")
    assert '"a-b" and "a.b" both need the Service "a-b"' in message
    assert system.status("a.b")["phase"] == "Ready"
    gone(system, "a-b", "a.b")


def test_extra_args_of_any_text_reach_the_engine_byte_for_byte_and_do_nothing_else(system: System) -> None:
    arguments = [part for text in NASTY for part in ("--reverse-prompt", text)]
    env = [{"name": name, "value": text} for name, text in zip(NAMES, NASTY, strict=True)]
    programs = system.rpc.table().keys()
    system.apply(service("nasty", extraArgs=arguments, env=env))
    engine = Path(f"/proc/{system.ready('nasty')}")  # psutil would take a CR for a newline
    argv, environ = ((engine / name).read_bytes().decode().split("\0")[:-1] for name in ("cmdline", "environ"))
    assert argv[-len(arguments) :] == arguments
    seen = dict(each.split("=", 1) for each in environ)
    assert [seen[name] for name in NAMES] == NASTY
    steering = {name for name in seen if name.startswith(("SUPERVISOR_", "LLAMA_", "METAL_"))}
    assert steering == {"METAL_SUPERVISOR_ENGINE"}
    assert system.rpc.table().keys() - programs == {"default.nasty"}
    assert not Path("/tmp/evil").exists()
    section = (system.state / "models.d" / "default.nasty.conf").read_text()
    assert "evil" not in section and "ENV_HOME" not in section
    gone(system, "nasty")


@pytest.mark.parametrize("argument", ["--host", "--port=1", "--model", "-m", "--api_key=x", "nul\0byte"])
def test_flags_that_are_ours_and_nul_are_refused_by_index(system: System, argument: str) -> None:
    system.apply(service("flags", extraArgs=["--threads", "1", argument]))
    assert "spec.extraArgs[2]" in failed(system, "flags", "InvalidSpec")
    gone(system, "flags")


def test_a_bad_edit_of_a_running_service_is_reported_and_the_engine_keeps_running(system: System) -> None:
    system.apply(service("edited"))
    before = system.ready("edited")
    system.apply(service("edited", extraArgs=["--port", "1"]))
    eventually(lambda: system.condition("Degraded", "edited").get("reason") == "InvalidSpec", what="Degraded")
    assert "spec.extraArgs[0] --port" in system.condition("Degraded", "edited")["message"]
    assert system.status("edited")["phase"] == "Ready"
    assert system.pid("edited") == before
    system.apply(service("edited"))
    eventually(lambda: not system.condition("Degraded", "edited"), what="Degraded to be gone")
    assert system.pid("edited") == before
    gone(system, "edited")


@fault(
    "P79",
    "another program listens on the port that spec.containerPort asks for",
    happens="the engine is not started there; it is as soon as the port is free",
    sees="PortInUse with the field, the port, and the other program's name and pid",
    bound="told within 30 s",
)
def test_a_taken_port_is_named_with_its_holder_and_heals(system: System, figure: Figure) -> None:
    with socket.create_server(("127.0.0.1", system.ports[-1])) as stranger:
        port = stranger.getsockname()[1]
        with figure.timed("told"):
            system.apply(service("ported", containerPort=port))
            eventually(lambda: system.condition("MetalReady", "ported").get("reason") == "PortInUse", 30, "PortInUse")
        message = system.condition("MetalReady", "ported")["message"]
        assert "spec.containerPort" in message and str(port) in message and f"pid {os.getpid()}" in message
    with figure.timed("Ready once it is free"):
        system.ready("ported", within_s=60)
    assert system.port("ported") == port
    gone(system, "ported")


@fault(
    "P80a",
    "the port that was chosen for a service is taken while the service is scaled to zero",
    happens="it starts on another port; the stranger keeps his",
    sees="Ready",
    bound="Ready within 40 s",
)
def test_a_chosen_port_that_a_stranger_took_meanwhile_is_left_to_him(system: System, figure: Figure) -> None:
    system.apply(service("mover"))
    system.ready("mover")
    port = system.port("mover")
    system.apply(service("mover", replicas=0))
    eventually(lambda: "default.mover" not in system.rpc.table(), what="the program to be gone")
    with socket.create_server(("127.0.0.1", port)), figure.timed("Ready elsewhere"):
        system.apply(service("mover", replicas=1))
        system.ready("mover", within_s=40)
        assert system.port("mover") != port
        assert "hello world" in system.chat("mover")
    gone(system, "mover")


def test_a_foreign_service_of_the_same_name_is_not_touched(system: System) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "occupied", "namespace": "default"},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]},
    }
    system.apply(foreign)
    before = system.get("/api/v1/namespaces/default/services/occupied")
    system.apply(service("occupied"))
    eventually(lambda: system.observe("occupied").get("publishError"), what="the conflict to be reported")
    assert "is not ours" in system.observe("occupied")["publishError"]
    eventually(
        lambda: "is not ours" in system.condition("MetalReady", "occupied").get("message", ""), what="a condition"
    )
    assert system.get("/api/v1/namespaces/default/services/occupied")["spec"] == before["spec"]
    assert system.slice("occupied") is None
    gone(system, "occupied")


def test_a_corrupt_record_and_one_of_a_newer_format_are_made_again(system: System) -> None:
    system.apply(service("rec-a"), service("rec-b"))
    before = {name: system.ready(name) for name in ("rec-a", "rec-b")}
    records = system.state / "records"
    newer = {**json.loads((records / "default.rec-b.json").read_text()), "format": 99}
    system.supervisorctl("stop", "controller")
    (records / "default.rec-a.json").write_text("{ half a rec")
    (records / "default.rec-b.json").write_text(json.dumps(newer))
    system.supervisorctl("start", "controller")
    for name in before:
        eventually(lambda name=name: (records / f"default.{name}.json").exists(), what="the record to be back")
        eventually(lambda name=name: system.status(name).get("phase") == "Ready", what=f"{name} Ready")
    aside = system.state / "quarantine"
    eventually(lambda: len(list(aside.glob("*rec-*.json"))) == 2, what="both to be put aside")
    eventually(lambda: all((records / f"default.{name}.json").exists() for name in before), what="both to be back")
    assert {name: system.pid(name) for name in before} == before
    gone(system, *before)


def test_a_lost_spec_neither_stops_the_engine_nor_keeps_it_from_healing(system: System) -> None:
    system.apply(service("speced"))
    before = system.ready("speced")
    system.supervisorctl("stop", "controller", "apiserver")
    record = system.state / "records" / "default.speced.json"
    text = record.read_text()
    spec = json.loads(text)["edition"]
    record.write_text(text.replace(spec, "0123456789ab"))
    system.supervisorctl("start", "controller")
    eventually(lambda: system.rpc.table()["controller"].state is State.RUNNING, what="the controller to run")
    assert system.pid("speced") == before
    system.supervisorctl("start", "apiserver")
    eventually(lambda: json.loads(record.read_text())["edition"] == spec, 30, "the record to be put right")
    assert system.pid("speced") == before
    gone(system, "speced")


def test_a_missing_llama_server_is_a_condition(system: System) -> None:
    link = system.base / "llama-server"
    link.unlink()
    try:
        system.apply(service("bare"))
        assert "--llama-server" in failed(system, "bare", "RuntimeBinaryMissing")
    finally:
        link.symlink_to(engine_path())
    system.apply(service("bare", priority="high"))
    system.ready("bare")
    gone(system, "bare")


# ── at the start ─────────────────────────────────────────────────────────────────────────────────


def test_a_broken_file_in_models_d_does_not_keep_supervisord_from_starting(system: System) -> None:
    assert "put broken.conf aside" in system.said()
    assert "put sneaky.conf aside: [supervisord] belongs into supervisord.conf" in system.said()


def refused(base: Path, *flags: str) -> int:
    """Exit code of a run that does not come up."""
    return main(["run", "--state-dir", str(base / "run"), "--port", str(free_ports(1)[0]), *flags])


def test_a_broken_toml_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text("namespace = 'a'\nport = = 3\n")
    assert refused(tmp_path, "--config", str(tmp_path / "c.toml")) == 78
    said = capsys.readouterr().err
    assert "c.toml: not valid TOML" in said and "line 2" in said


def test_an_unknown_setting_is_refused_with_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text("memory_fracton = 0.5\n")
    assert refused(tmp_path, "--config", str(tmp_path / "c.toml")) == 78
    assert "did you mean memory_fraction" in capsys.readouterr().err
    monkeypatch.setenv("METAL_SUPERVISOR_HOSTIP", "1.2.3.4")
    assert refused(tmp_path) == 78
    assert "METAL_SUPERVISOR_HOST_IP" in capsys.readouterr().err


def test_a_kubeconfig_that_is_missing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(tmp_path, "--kubeconfig", str(tmp_path / "none")) == 1
    assert "does not exist" in capsys.readouterr().err


def test_a_second_run_in_the_same_directory_is_refused_with_the_first_ones_pid(system: System) -> None:
    assert system.process is not None
    command = [sys.executable, "-m", "metal_supervisor", "run", "--state-dir", str(system.state)]
    done = subprocess.run([*command, "--port", str(free_ports(1)[0])], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"another run (pid {system.process.pid})" in done.stderr
