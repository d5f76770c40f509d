"""What becomes of an engine's confinement: its policy, and the trial of its build."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor import launch
from metal_supervisor.confinement import enforce, probe
from metal_supervisor.confinement.access import Access
from metal_supervisor.confinement.policy import policy
from metal_supervisor.confinement.probe import Trial, Trials, TrialVerdict
from metal_supervisor.confinement.seatbelt import profile
from metal_supervisor.controller.prerequisites import path_looks
from metal_supervisor.controller.prerequisites.confinement_policies import CODE, Confined, Confinement, require_policies
from metal_supervisor.controller.prerequisites.path_looks import PathLooks
from metal_supervisor.models.model_files import looked_at
from metal_supervisor.runtimes import RUNTIMES, Binary
from metal_supervisor.runtimes.builds import Builds, homes_of
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.fields import LONGEST_ADDRESS
from metal_supervisor.spec.types import Endpoint, Engine, Model, Probe, Service
from metal_supervisor.state.directory import StateDir
from tests.support import ollama
from tests.support.runtimes import omlx
from tests.support.system import engine_path, eventually

BINARY = Binary("/opt/engine/llama-server", frozenset(), homes=("/opt/engine",), build="b")
ENGINE = Engine((BINARY.path,), (), "", Probe())
MODEL = Model("default", "m", "u", 1, "/m.gguf", "gguf", None, None)
SERVICE = Service(
    "default",
    "tiny",
    "u",
    1,
    MODEL,
    "llama-server",
    1,
    False,
    Endpoint("tiny", 8080, "", "ClusterIP", None),
    "chat",
    "normal",
    None,
    {},
)


def asked(
    base: Path,
    mode: str,
    verdict: TrialVerdict | None,
    monkeypatch: pytest.MonkeyPatch,
    service: Service = SERVICE,
    engine: Engine = ENGINE,
    paths: tuple[str, ...] = (),
) -> Confined | None:
    monkeypatch.setattr(Trials, "look", lambda *_: verdict)
    monkeypatch.setattr(path_looks, "LOOK_WAIT_S", 30.0)
    state = StateDir(base / "state")
    state.create()
    return Confinement(Settings(confinement=mode), state, lambda: None).of(service, BINARY, engine, paths, 18100)


def test_a_policy_names_the_real_files_the_scratch_directory_and_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = tuple(str(tmp_path / f"real-0000{number}-of-00002.gguf") for number in (1, 2))
    found = asked(tmp_path, "on", TrialVerdict(True), monkeypatch, paths=judged)
    assert found is not None and not found.why and found.problem is None and isinstance(found.policy, dict)
    if sys.platform == "linux":
        assert found.policy["read"] == list(judged)
        assert found.policy["write"] == [str(tmp_path / "state" / "scratch" / "default.tiny")]
        assert (found.policy["execute"], found.policy["bind"]) == ([BINARY.path], [18100])


def test_a_link_that_was_swapped_after_the_judgement_is_not_in_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged, secret = tmp_path / "judged.gguf", tmp_path / "secret"
    link = tmp_path / "link.gguf"
    for each in (judged, secret):
        each.write_bytes(b"GGUF" * 4)
    link.symlink_to(judged)
    file = looked_at(link)
    link.unlink()
    link.symlink_to(secret)
    judged.unlink()
    judged.symlink_to(secret)
    found = asked(tmp_path, "on", TrialVerdict(True), monkeypatch, paths=file.real)
    assert found is not None and isinstance(found.policy, dict)
    assert str(secret) not in json.dumps(found.policy)
    with pytest.raises(launch.Unconfined, match="link to another place"):
        launch.confinement(found.policy)


def test_what_opened_flags_name_joins_the_policy_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slots").mkdir()
    (tmp_path / "keys").write_text("x")
    (tmp_path / "text").mkdir()
    arguments = "--slot-save-path", str(tmp_path / "slots"), "--api-key-file", str(tmp_path / "keys")
    arguments += "--chat-template", str(tmp_path / "text")  # a text that is a path opens nothing
    service = replace(SERVICE, extra_args=arguments)
    plain = asked(tmp_path, "on", TrialVerdict(True), monkeypatch, service)
    opened = replace(service, allowed_args=frozenset({"--slot-save-path", "--api-key-file"}))
    wider = asked(tmp_path, "on", TrialVerdict(True), monkeypatch, opened)
    assert plain and wider and isinstance(plain.policy, dict) and isinstance(wider.policy, dict)
    assert plain.policy["read"] == [] and wider.policy["read"] == [str(tmp_path / "keys")]
    assert wider.policy["write"] == [*plain.policy["write"], str(tmp_path / "slots")]


def test_an_opened_flag_with_a_path_that_is_far_too_long_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To judge it takes time and memory that grow with the square of its parts."""
    looked: list[str] = []
    monkeypatch.setattr(PathLooks, "look", lambda _, path: looked.append(path))
    named = "/a" * LONGEST_ADDRESS
    service = replace(SERVICE, extra_args=("--api-key-file", named), allowed_args=frozenset({"--api-key-file"}))
    found = asked(tmp_path, "on", TrialVerdict(True), monkeypatch, service)
    assert not looked and found is not None and isinstance(found.policy, dict) and found.policy["read"] == []


@pytest.mark.parametrize("named", [f"/{'a' * 300}", "/proc/1/root"])
def test_an_opened_flag_with_a_name_that_no_file_can_have_opens_nothing_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """What is raised here ends the pass, and so every pass, for all services of this Mac."""
    service = replace(SERVICE, extra_args=("--api-key-file", named), allowed_args=frozenset({"--api-key-file"}))
    found = asked(tmp_path, "on", TrialVerdict(True), monkeypatch, service)
    assert found is not None and isinstance(found.policy, dict) and found.policy["read"] == []


@pytest.mark.parametrize(
    ("mode", "verdict", "engine", "why"),
    [
        ("off", TrialVerdict(True), ENGINE, "--confinement is off"),
        ("on", TrialVerdict(False, "no Landlock"), ENGINE, "does not work here: no Landlock"),
    ],
)
def test_an_engine_that_is_not_confined_starts_and_tells_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, verdict: TrialVerdict, engine: Engine, why: str
) -> None:
    found = asked(tmp_path, mode, verdict, monkeypatch, engine=engine)
    assert found is not None and found.policy is False and found.problem is None and why in found.why


def test_where_it_is_required_none_starts_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(tmp_path, "required", TrialVerdict(False, "x"), monkeypatch)
    assert found is not None and found.problem is not None and found.problem[0] == "ConfinementUnavailable"


@pytest.mark.parametrize(
    ("runtime", "path", "works", "why"),
    [
        ("omlx", "/opt/omlx", True, ""),
        ("omlx", "/opt/omlx", False, "does not work here: no"),
        ("ollama", "/opt/ollama", True, ""),
        ("ollama", "/opt/ollama", False, "does not work here: no"),
        ("ollama", "", True, "the user's own Ollama"),
    ],
)
def test_a_service_of_a_daemon_is_told_what_becomes_of_that_and_refused_where_it_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, path: str, works: bool, why: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "BINARY", replace(BINARY, path=path))
    service, engine = replace(SERVICE, runtime=runtime), replace(ENGINE, daemon=runtime)
    for mode in ("on", "required"):
        found = asked(tmp_path, mode, TrialVerdict(works, "no"), monkeypatch, service, engine)
        assert found is not None and found.policy is False and why in found.why and bool(why) == bool(found.why)
        assert (found.problem is not None) is (mode == "required" and bool(why))
        if found.problem is not None:
            assert found.problem[0] == "ConfinementUnavailable" and "use another runtime" in found.problem[1]


def test_a_daemon_may_read_its_own_and_what_was_judged_even_if_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass does not ask whether it is: the disk may hang."""
    monkeypatch.setattr(Trials, "look", lambda *_: TrialVerdict(True))
    state = StateDir(tmp_path / "state")
    state.create()
    binary = replace(BINARY, interpreter="/opt/engine/python")
    confinement = Confinement(Settings(confinement="on"), state, lambda: None)
    found = confinement.daemon("omlx", binary, 18100, [str(tmp_path), "/is/gone"], ["/base"])
    assert found is not None and isinstance(found.policy, dict)
    if sys.platform == "linux":
        kept = {name: found.policy[name] for name in ("execute", "read", "write", "bind", "list")}
        assert kept == {
            "execute": ["/opt/engine/python"],
            "read": [str(tmp_path), "/is/gone"],
            "write": ["/base"],
            "bind": [18100],
            "list": ["/proc"],
        }
        enforce.prepare({**found.policy, "write": [str(tmp_path)]})


@pytest.mark.parametrize(("runtime", "program"), [("omlx", omlx), ("ollama", ollama.program)])
def test_the_real_daemons_pass_their_trial_and_load_a_model(
    tmp_path: Path, runtime: str, program: Callable[[], Path]
) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    settings = replace(Settings(), **{runtime: str(program())}, confinement="on")
    builds = Builds(settings, lambda: None)
    binary = eventually(lambda: builds.look(RUNTIMES[runtime].executables), 60, "its help")
    assert binary is not None
    confinement = Confinement(settings, state, lambda: None)
    found = eventually(lambda: confinement.daemon(runtime, binary, 18100, [], ["/base"]), 90, "the outcome")
    assert (found.why, bool(found.policy)) == ("", True)


@pytest.mark.parametrize(
    ("version", "mode", "safe"),
    [
        ("0.31.3", "on", False),
        ("0.31.3", "off", False),
        ("0.9", "off", False),
        ("0.32.2", "off", True),
        ("1.0", "off", True),
        ("0.32.10", "on", True),
        ("", "off", True),
    ],
)
def test_an_mlx_lm_that_runs_a_models_code_warns_confined_and_is_refused_unconfined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, mode: str, safe: bool
) -> None:
    binary = replace(BINARY, name="mlx_lm.server", interpreter="/opt/engine/python", version=version)
    monkeypatch.setattr(sys.modules[__name__], "BINARY", binary)
    found = asked(tmp_path, mode, TrialVerdict(True), monkeypatch, replace(SERVICE, runtime="mlx-server"))
    assert found is not None
    told = found.warning if mode == "on" else found.problem
    assert (told is None) is safe and (mode == "on" or found.warning is None) and (mode == "off" or not found.problem)
    if told is not None:
        assert told[0] == "UnsafeEngineVersion" and f"mlx-lm {version} runs" in told[1] and "0.32.2 or later" in told[1]


def test_starts_wait_for_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(tmp_path, "on", None, monkeypatch) is None


# ── trials ───────────────────────────────────────────────────────────────────────────────────────


def trial_of(argv: tuple[str, ...], access: Access) -> Any:
    def make(scratch: Path, port: int) -> Trial:
        held = replace(access, write=(str(scratch),), bind=(port,))
        return Trial((*argv, "--port", str(port)), (), Probe(), held, port)

    return make


def test_a_real_engine_passes_its_trial_and_the_outcome_is_kept(tmp_path: Path) -> None:
    program, woken = engine_path(), []
    access = Access((str(program),), homes_of(program, ""), (str(probe.GGUF.resolve()),))
    make = trial_of((str(program), "-m", str(probe.GGUF.resolve()), "--host", "127.0.0.1", "-c", "256"), access)
    trials = Trials(tmp_path, Path(launch.__file__), lambda: woken.append(1))
    assert trials.look("build", make) is None
    verdict = eventually(lambda: trials.look("build", make), 60, "the outcome")
    assert verdict == TrialVerdict(True) and woken
    assert Trials(tmp_path, Path(launch.__file__), lambda: None).look("build", make) == verdict


def test_a_trial_that_could_not_be_carried_out_is_repeated_after_a_restart(tmp_path: Path) -> None:
    def full(_scratch: Path, _port: int) -> Trial:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trials = Trials(tmp_path, Path(launch.__file__), lambda: None)
    trials.look("build", full)
    verdict = eventually(lambda: trials.look("build", full), 20, "the outcome")
    assert not verdict.works and "No space left" in verdict.why
    assert Trials(tmp_path, Path(launch.__file__), lambda: None).look("build", full) is None


def test_a_trial_whose_thread_could_not_be_started_is_begun_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while other programs of this user have as many as the system allows."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def broken(_scratch: Path, _port: int) -> Trial:
        raise OSError(errno.ENOENT, "no engine")

    trials = Trials(tmp_path, Path(launch.__file__), lambda: None)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(threading.Thread, "start", refused)
        trials.look("build", broken)
    verdict = eventually(lambda: trials.look("build", broken), 20, "the outcome")
    assert "no engine" in verdict.why


def test_a_real_engine_in_the_home_directory_serves_and_reads_nothing_else_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, real = tmp_path / "me", engine_path()
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id").write_text("secret")
    program = home / real.name
    shutil.copy(real, program)
    beside = [each for each in real.parent.iterdir() if each != real]
    for each in beside:
        (home / each.name).symlink_to(each)
    monkeypatch.setenv("HOME", str(home))
    bundled = [str(each) for each in beside if each.is_dir()]  # of a program that brings Python along
    access = Access((str(program),), (*homes_of(program, ""), *bundled), (str(probe.GGUF.resolve()),))
    make = trial_of((str(program), "-m", str(probe.GGUF.resolve()), "--host", "127.0.0.1", "-c", "256"), access)
    assert probe.try_out(make, Path(launch.__file__)) == TrialVerdict(True)
    attempt = """if True:
        import contextlib, os, sys
        with contextlib.suppress(PermissionError):
            print(os.listdir(sys.argv[1]))
        open(f"{sys.argv[1]}/.ssh/id")
    """
    argv = (sys.executable, "-I", "-c", attempt, str(home))
    python = homes_of(Path(), sys.executable)
    held = replace(access, execute=(sys.executable,), libraries=(*access.libraries, *python), bind=(probe.free_port(),))
    (tmp_path / "specs").mkdir()
    (tmp_path / "scratch").mkdir()
    command = probe.launcher_command(tmp_path, Path(launch.__file__), argv, {}, replace(held, python=True))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ("libggml" in done.stdout) == (not bundled), "names may be read where the linker looks for libraries"
    assert "Permission denied" in done.stderr and ".ssh" in done.stderr


def trying(state: str) -> None:
    """A controller in whose trial the engine is never found ready, until its input ends."""
    program = engine_path()
    access = Access((str(program),), homes_of(program, ""), (str(probe.GGUF.resolve()),))
    made = trial_of((str(program), "-m", str(probe.GGUF.resolve()), "--host", "127.0.0.1", "-c", "256"), access)
    trials = Trials(Path(state), Path(launch.__file__), lambda: None)
    trials.look("build", lambda scratch, port: replace(made(scratch, port), probe=Probe(path="/never")))
    sys.stdin.read()


@pytest.mark.parametrize("killed", [True, False])
def test_the_engine_of_a_trial_ends_with_its_controller_or_with_the_next(tmp_path: Path, killed: bool) -> None:
    root = Path(__file__).resolve().parents[2]
    code = f"import sys; sys.path[:0] = {[str(root), str(root / 'tools')]!r}; "
    code += f"from tests.boundary.test_confined import trying; trying({str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as controller:
        (note,) = eventually(lambda: list(tmp_path.glob("trial-*.json")), 30, "a trial")
        told = json.loads(note.read_text())
        assert launch.start_time(told["pid"]) == told["started"]
        if killed:
            controller.kill()
    if killed:
        assert launch.start_time(told["pid"]) == told["started"]
        Trials(tmp_path, Path(launch.__file__), lambda: None)
    eventually(lambda: launch.start_time(told["pid"]) != told["started"], 20, "its end")
    assert not list(tmp_path.glob("trial-*.json"))


def test_an_engine_that_cannot_serve_confined_fails_its_trial_with_its_last_line(tmp_path: Path) -> None:
    program = engine_path()
    missing = Access((str(program),), homes_of(program, ""))  # its model is not among what it may read
    make = trial_of((str(program), "-m", str(probe.GGUF.resolve()), "--host", "127.0.0.1"), missing)
    verdict = probe.try_out(make, Path(launch.__file__))
    assert not verdict.works and "the engine ended with 1" in verdict.why


def test_what_was_started_without_is_not_started_so_again_once_it_is_required(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    was = {"format": 1, "program": "default.tiny", "argv": [str(engine_path())], "port": 18100, "confinement": False}
    specs = {"engine": was, "daemon": {**was, "program": "ollama"}, "attacher": {**was, "shared": True}}
    for name, spec in specs.items():
        state.spec_path(name).write_text(json.dumps(spec))
    require_policies(state, "required")
    found = {name: state.spec_of(name)["confinement"] for name in specs}
    assert found["attacher"] is False
    for name in ("engine", "daemon"):
        with pytest.raises(launch.Unconfined, match="no policy"):
            launch.confinement(found[name])


# ── the profile of a Mac, as text ────────────────────────────────────────────────────────────────


def test_no_path_stands_in_the_text_of_a_profile() -> None:
    access = Access(("/b/llama",), ("/b",), ('/m/") (allow default) ("',), ("/s",), (18100,), python=True)
    text, judged, resolved = profile(access, "/Users/me")
    assert text.startswith("(version 1)\n(deny default)") and text.count("(") == text.count(")")
    values = [*judged.values(), *resolved.values()]
    assert '/m/") (allow default) ("' in values and not [each for each in values if each in text]
    assert judged["HOME"] == "/Users/me" and judged["BIND_0"] == "*:18100"
    assert all(f'(param "{name}")' in text for name in (*judged, *resolved))
    assert "(allow default)" not in text and text.index("(deny file-read*") > text.index("(import")


BREWED = "Cellar/python@3.12/3.12.1", "Frameworks/Python.framework/Versions/3.12"


@pytest.mark.parametrize(
    ("base", "links"),
    [
        ("opt/homebrew/" + "/".join(BREWED), {"opt/homebrew/opt/python@3.12": "../" + BREWED[0]}),
        ("usr/local/" + "/".join(BREWED), {"usr/local/opt/python@3.12": "../" + BREWED[0]}),
        ("Library/Frameworks/Python.framework/Versions/3.12", {}),
    ],
)
def test_a_framework_python_may_execute_the_app_that_its_stub_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, links: dict[str, str]
) -> None:
    app = tmp_path / base / "Resources/Python.app/Contents/MacOS"
    for each in (app, tmp_path / base / "bin", tmp_path / "venv/bin"):
        each.mkdir(parents=True)
    (tmp_path / base / "bin/python3.12").touch()
    through = tmp_path / base
    for link, target in links.items():
        (tmp_path / link).parent.mkdir()
        (tmp_path / link).symlink_to(target)
        through = tmp_path / link / BREWED[1]
    (tmp_path / "venv/pyvenv.cfg").touch()
    interpreter = tmp_path / "venv/bin/python"
    interpreter.symlink_to(through / "bin/python3.12")
    homes = homes_of(Path(), str(interpreter))
    for runtime in ("mlx-server", "omlx"):
        access = RUNTIMES[runtime].access(Binary("/x", frozenset(), interpreter=str(interpreter), homes=homes), CODE)
        text, _, resolved = profile(access, "/Users/me")
        assert resolved["APP_0"] == str(app) and '(allow process-exec* (subpath (param "APP_0")))' in text
    if links:
        brew = tmp_path / base.partition("/Cellar")[0]
        assert {f"{brew}/{name}" for name in ("Cellar", "opt", "lib")} < set(homes) and str(brew) not in homes
    monkeypatch.setattr(sys, "executable", str(interpreter))
    told: list[Access] = []
    monkeypatch.setattr(probe, "launcher_command", lambda *arguments: told.append(arguments[-1]) or ["true"])
    probe._leak(tmp_path, Path(), access)
    assert profile(told[0], "/Users/me")[2]["APP_0"] == str(app)


def test_a_home_directory_that_a_link_leads_to_is_denied_by_its_real_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "platform", "darwin")
    found = asked(tmp_path, "on", TrialVerdict(True), monkeypatch)
    (tmp_path / "specs").mkdir()
    probe.launcher_command(tmp_path, Path(launch.__file__), (), {}, Access(bind=(18100,)))
    spec = json.loads((tmp_path / "specs/probe.000000000000.json").read_text())
    for made in (found and found.policy, spec["confinement"]):
        assert isinstance(made, dict) and made["parameters"]["HOME"] == str(tmp_path / "disk")
        enforce.prepare(made)


@pytest.mark.skipif(sys.platform == "darwin", reason="there the acceptance run asks the disk itself")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_path_in_another_case_or_form_is_given_to_seatbelt_as_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """A disk of a Mac finds the file by each of its spellings, and the system's name for it is the stored one."""
    named, stored = tmp_path / "mod\u00e8les/TINY.gguf", tmp_path / "Mode\u0300les/tiny.gguf"
    named.parent.mkdir()
    named.touch()
    told = {named: tmp_path / "other/tiny.gguf" if elsewhere else stored, named.parent: stored.parent}

    def name_of(descriptor: int, command: int, _area: bytes) -> bytes:
        assert command == 50
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        return os.fsencode(told.get(path, path)).ljust(1024, b"\0")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_GETPATH", 50, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", name_of)
    monkeypatch.setenv("HOME", str(named.parent))
    access = Access(read=(str(named),), write=(str(tmp_path / "scratch"),), bind=(18100,))
    made = enforce.prepare(policy(access, "darwin", str(named.parent)))
    assert isinstance(made, enforce.Profile)
    given = dict(zip(*[iter(each.decode() for each in made._values)] * 2, strict=True))
    assert given == {
        "HOME": str(stored.parent),
        "READ_0": str(named if elsewhere else stored),
        "WRITE_0": str(tmp_path / "scratch"),
        "BIND_0": "*:18100",
    }


@pytest.mark.parametrize(
    "odd",
    [
        {"profile": 1},
        {"parameters": []},
        {"parameters": {"HOME": 5}},
        {"parameters": {"WRITE_0": None}},
        {"resolved": {"BINARY_0": 5}},
        {"resolved": None},
    ],
)
def test_a_policy_of_a_mac_that_is_damaged_keeps_the_engine_from_being_started(
    monkeypatch: pytest.MonkeyPatch, odd: dict[str, Any]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(enforce.ConfinementError, match="policy: "):
        enforce.prepare({"profile": "", "parameters": {}, "resolved": {}, **odd})


def test_the_code_that_python_engines_need_is_this_package() -> None:
    assert os.path.isfile(f"{CODE}/mlx_engine.py")


def test_the_port_that_must_be_refused_is_none_that_the_engine_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports, asked = iter([18100, 18101]), []
    monkeypatch.setattr(probe, "free_port", lambda: next(ports))
    monkeypatch.setattr(
        probe, "launcher_command", lambda _base, _launcher, argv, *_: asked.append(argv) or [sys.executable, "-c", ""]
    )
    assert probe._leak(tmp_path, tmp_path, Access(bind=(18100,))) == ""
    assert asked[0][-2] == "18101"
