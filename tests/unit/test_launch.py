"""The launcher: what the moment of starting decides, and real runs of it as supervisord would make them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor import launch
from metal_supervisor.state.doorbell import Doorbell
from metal_supervisor.state.programs import read_run

PROPERTY = settings(max_examples=100, database=None, derandomize=True)
NOW = 1_000_000.0
SPEC = "0123456789ab"
DEEP = pytest.param("[" * 200_000, id="deep")
NASTY = [
    "x\n[program:evil]\ncommand=touch /tmp/pwned",
    " ;",
    "#",
    "%(ENV_HOME)s",
    "%s",
    "%%",
    "'",
    '"',
    "\\",
    "\t",
    "\r\n",
    "",
    " ",
    "🦙",
    "é",
    "\x01\x7f",
    "$HOME `id` $(id)",
    "*",
    "--port=1",
    "a" * 10_000,
]


def note(*starts: float, **other: Any) -> dict[str, object]:
    return {"format": 1, "spec": {"edition": SPEC}, "starts": list(starts), "not_before": 0.0, **other}


# ── the hold of a crash loop ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("before", "ended", "expected"),
    [
        ({}, "", ([], 0.0)),
        (note(NOW - 5), "exited", ([NOW - 5], 0.0)),
        (note(NOW - 9, NOW - 5), "exited", ([NOW - 9, NOW - 5], NOW + 10)),
        (note(NOW - 9, NOW - 5), "", ([NOW - 9, NOW - 5], NOW + 10)),
        (note(*[NOW - 5] * 3), "exited", ([NOW - 5] * 3, NOW + 20)),
        (note(*[NOW - 5] * 6), "exited", ([NOW - 5] * 6, NOW + 160)),
        (note(*[NOW - 5] * 7), "exited", ([NOW - 5] * 7, NOW + 300)),
        (note(*[NOW - 5] * 20), "exited", ([NOW - 5] * 20, NOW + 300)),
        # The pause of one crash does not grow with every try that it refuses.
        (note(NOW - 9, NOW - 5, not_before=NOW + 3), "exited", ([NOW - 9, NOW - 5], NOW + 3)),
        (note(NOW - 19, NOW - 15, not_before=NOW - 1), "exited", ([NOW - 19, NOW - 15], NOW - 1)),
        # A time too far ahead is of a clock that was set back.
        (note(NOW - 9, NOW - 5, not_before=NOW + 301), "exited", ([NOW - 9, NOW - 5], 0.0)),
        # Forgotten: ten minutes up, a new spec, an orderly stop.
        (note(NOW - 700, NOW - 601), "exited", ([], 0.0)),
        (note(NOW - 700, NOW - 599), "exited", ([NOW - 700, NOW - 599], NOW + 10)),
        (note(NOW - 5, NOW - 3, spec={"edition": "other"}), "exited", ([], 0.0)),
        (note(NOW - 5, NOW - 3), "stopped", ([], 0.0)),
        # A long pause is not ten minutes up.
        (note(*[NOW - 650] * 7, not_before=NOW - 350), "exited", ([NOW - 650] * 7, NOW - 350)),
    ],
)
def test_a_crash_loop_is_held_from_the_second_crash_on(
    before: dict[str, object], ended: str, expected: tuple[list[float], float]
) -> None:
    assert launch.hold(before, SPEC, ended, NOW) == expected


def test_the_pauses_of_an_engine_that_dies_at_once_double_from_ten_seconds_to_five_minutes() -> None:
    now, history, pauses = NOW, note(), []
    for _ in range(9):
        starts, not_before = launch.hold(history, SPEC, "exited", now)
        pauses.append(round(max(0.0, not_before - now)))
        history = note(*starts, not_before=not_before)
        now = max(now, not_before)
        assert launch.hold(history, SPEC, "exited", now)[1] <= now, "it may start when its time has come"
        history = note(*starts, now)
        now += 1.0
    assert pauses == [0, 0, 10, 20, 40, 80, 160, 300, 300]


@PROPERTY
@given(st.lists(st.floats(0, 2000), min_size=1, max_size=12))
def test_no_history_of_runs_holds_longer_than_five_minutes_or_after_ten_minutes_up(runs: list[float]) -> None:
    now, history = NOW, note()
    for up_s in runs:
        starts, not_before = launch.hold(history, SPEC, "exited", now)
        assert not_before - now <= launch.LONGEST_HOLD_S
        now = max(now, not_before)
        history = note(*starts, now)
        now += up_s
        if up_s > launch.FORGET_AFTER_S:
            assert launch.hold(history, SPEC, "exited", now) == ([], 0.0)


@PROPERTY
@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.integers(0, 20))
def test_a_clock_that_jumped_never_makes_a_hold_longer_than_five_minutes(
    started: float, not_before: float, crashes: int
) -> None:
    history = note(*[NOW + started] * crashes, not_before=NOW + not_before)
    assert launch.hold(history, SPEC, "exited", NOW)[1] <= NOW + launch.LONGEST_HOLD_S


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@PROPERTY
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("starts", "not_before", "pid", "started"), ANY_JSON)))
def test_a_damaged_note_never_keeps_an_engine_from_starting(damage: dict[str, object]) -> None:
    damaged = {**note(NOW - 5, NOW - 3), **damage}
    _, not_before = launch.hold(damaged, SPEC, "exited", NOW)
    assert not not_before > NOW + launch.LONGEST_HOLD_S
    assert launch.survivor(damaged, "/") == 0


# ── what supervisord said last ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", ""),
        ("2026-11-21 09:00:00,000 INFO stopped: default.tiny (terminated by SIGTERM)", "stopped"),
        ("2026-11-21 09:00:00,000 INFO stopped: default.tiny (exit status 0)", "stopped"),
        ("2026-11-21 09:00:00,000 WARN exited: default.tiny (exit status 1; not expected)", "exited"),
        ("x INFO stopped: default.tiny (exit status 0)\nx WARN exited: default.tiny (terminated by SIGKILL)", "exited"),
        ("x WARN exited: default.tiny (exit status 1)\nx INFO stopped: default.tiny (exit status 0)", "stopped"),
        ("x INFO stopped: default.tiny2 (exit status 0)", ""),
        ("x INFO stopped: other.default.tiny (exit status 0)", ""),
        ("x INFO stopped: defaultxtiny (exit status 0)", ""),
        ("x INFO spawned: 'default.tiny' with pid 5", ""),
    ],
)
def test_the_last_word_on_a_program_is_found_among_those_on_others(tmp_path: Path, lines: str, expected: str) -> None:
    log = tmp_path / "supervisord.log"
    log.write_text(f"{lines}\nx INFO stopped: another.one (exit status 0)\n")
    assert launch.last_words(str(log), "default.tiny") == expected


def test_only_the_end_of_a_long_log_is_read_and_no_bytes_in_it_do_harm(tmp_path: Path) -> None:
    log = tmp_path / "supervisord.log"
    log.write_bytes(b"x INFO stopped: a.b (x)\n" + b"\xff\0" * launch.LOG_TAIL_BYTES + b"\nx WARN exited: a.b (x)\n")
    assert launch.last_words(str(log), "a.b") == "exited"
    log.write_bytes(b"x INFO stopped: a.b (x)\n" + b"y" * launch.LOG_TAIL_BYTES)
    assert launch.last_words(str(log), "a.b") == ""
    assert launch.last_words(str(tmp_path / "none"), "a.b") == ""
    assert launch.last_words(str(tmp_path), "a.b") == ""


# ── environment, specs, ports ────────────────────────────────────────────────────────────────────


def test_an_engine_inherits_a_few_names_and_what_its_spec_says() -> None:
    inherited = {
        "PATH": "/bin",
        "HOME": "/h",
        "USER": "u",
        "LOGNAME": "u",
        "SHELL": "/s",
        "LANG": "l",
        "TMPDIR": "/t",
        "TZ": "z",
        "LC_ALL": "c",
        "LC_CTYPE": "d",
        "LLAMA_ARG_PORT": "1",
        "SUPERVISOR_SERVER_URL": "unix:///s",
        "HF_TOKEN": "secret",
        "SUPERVISOR_ENABLED": "1",
        "METAL_SUPERVISOR_PORT": "1",
        "PYTHONPATH": "x",
        "LD_PRELOAD": "x",
        "KUBECONFIG": "k",
        "DYLD_LIBRARY_PATH": "x",
        "GGML_METAL_PATH": "x",
        "PATHEXT": "x",
        "LCX": "x",
    }
    kept = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TMPDIR", "TZ", "LC_ALL", "LC_CTYPE"}
    mark = {"METAL_SUPERVISOR_ENGINE": "/s/specs/x.json"}
    assert launch.environment({}, inherited, "/s/specs/x.json") == {name: inherited[name] for name in kept} | mark
    own = {"HOME": "/other", "LLAMA_API_KEY": "k"}
    assert launch.environment(own, {"HOME": "/h", "HF_TOKEN": "t"}, "/s/specs/x.json") == mark | {
        "HOME": "/other",
        "LLAMA_API_KEY": "k",
    }


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "[]",
        "\xff",
        '{"format": 2, "argv": ["x"], "env": {}}',
        '{"argv": ["x"], "env": {}}',
        '{"format": 1, "argv": [], "env": {}}',
        '{"format": 1, "argv": "x", "env": {}}',
        '{"format": 1, "argv": ["x", 5], "env": {}}',
        '{"format": 1, "argv": ["x\\u0000"], "env": {}}',
        '{"format": 1, "argv": ["x"]}',
        '{"format": 1, "argv": ["x"], "env": []}',
        '{"format": 1, "argv": ["x"], "env": {"A": 5}}',
        '{"format": 1, "argv": ["x"], "env": {"A": "b\\u0000"}}',
        '{"format": 1, "argv": ["x"], "env": {"A=": "b"}}',
        '{"format": 1, "argv": ["x"], "env": {}}',
        DEEP,
    ],
)
def test_a_spec_that_cannot_be_used_is_refused_before_anything_happens(tmp_path: Path, content: str) -> None:
    path = tmp_path / "default.tiny.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(launch.BadSpec, match=path.name):
        launch.read_spec(str(path))


def test_a_missing_spec_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(launch.BadSpec, match=r"cannot read .*gone\.json"):
        launch.read_spec(str(tmp_path / "gone.json"))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": "x", "pid": 1}', "{}", "\0\0", DEEP])
def test_a_note_that_cannot_be_read_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    assert launch.read_note(str(path)) == {}
    assert launch.read_note(str(tmp_path / "gone")) == {}


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_port_is_free_or_the_reason_it_is_not_is_told(listener: int) -> None:
    assert launch.holder_of(free_port(), "127.0.0.1") is None
    assert "in use" in (launch.holder_of(listener, "127.0.0.1") or "")
    assert "in use" in (launch.holder_of(listener, "0.0.0.0") or "")
    assert launch.holder_of(free_port(), "192.0.2.1"), "an address that is not of this machine"


def test_a_survivor_is_the_very_process_that_was_noted_whatever_its_spec(tmp_path: Path) -> None:
    parent, state = os.getppid(), str(tmp_path)
    alive = {
        "pid": parent,
        "started": launch.start_time(parent),
        "spec": {"edition": SPEC},
        "directory": launch.identity(state),
    }
    assert launch.survivor(alive, state) == parent
    assert launch.survivor({**alive, "spec": {"edition": "other"}}, state) == parent
    for difference in ({"started": "ticks 1"}, {"started": ""}, {"pid": 0}, {"pid": None}):
        assert launch.survivor({**alive, **difference}, state) == 0
    for difference in ({"directory": None}, {"directory": launch.identity("/")}):
        assert launch.survivor({**alive, **difference}, state) == 0
    assert launch.survivor(launch.this_process(state), state) == 0, "a pid that was given anew, to the launcher itself"
    assert launch.survivor({}, state) == 0


def test_a_process_that_is_gone_or_only_waits_to_be_reaped_has_no_start() -> None:
    child = subprocess.Popen(["/bin/sh", "-c", ":"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert launch.start_time(child.pid) == ""
    child.wait()
    child.stdout.close()
    assert launch.start_time(child.pid) == ""


# ── real runs ────────────────────────────────────────────────────────────────────────────────────

REPORTER = """
import json, os, sys
sys.stdout.write(json.dumps({
    "pid": os.getpid(), "cwd": os.getcwd(), "argv": [os.fsencode(each).hex() for each in sys.argv[1:]],
    "env": {name.hex(): value.hex() for name, value in os.environb.items()},
}))
"""
INHERITED = {
    "PATH": os.environ["PATH"],
    "HOME": "/nowhere",
    "LC_ALL": "C.UTF-8",
    "SUPERVISOR_SERVER_URL": "unix:///s",
    "SUPERVISOR_PROCESS_NAME": "x",
    "LLAMA_ARG_PORT": "1",
    "HF_TOKEN": "secret",
}


class Place:
    """A state directory as the launcher sees it."""

    def __init__(self, path: Path) -> None:
        self.path, self.note, self.log = path, path / "runs" / "default.tiny.json", path / "supervisord.log"
        for name in ("runs", "specs"):
            (path / name).mkdir()

    def spec(self, *argv: str, env: dict[str, str] | None = None, **other: Any) -> str:
        body = {
            "format": 1,
            "program": "default.tiny",
            "argv": list(argv),
            "env": env or {},
            "cwd": str(self.path),
            "host": "127.0.0.1",
            "port": free_port(),
            "supervisor_log": str(self.log),
            "confinement": False,
            "edition": SPEC,
            **other,
        }
        path = self.path / "specs" / "default.tiny.json"
        path.write_text(json.dumps({key: value for key, value in body.items() if value is not None}))
        return str(path)

    def remember(self, **fields: object) -> None:
        self.note.write_text(
            json.dumps(
                {
                    "format": 1,
                    "spec": {"edition": SPEC},
                    "pid": 0,
                    "launcher_pid": 0,
                    "started": "",
                    "starts": [],
                    "not_before": 0.0,
                    "refused": "",
                    "refused_message": "",
                    **fields,
                }
            )
        )

    def start(self, spec: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", launch.__file__, spec]
        return subprocess.Popen(
            command, env=INHERITED, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, spec: str) -> tuple[int, bytes, str, int]:
        """(exit code, output, errors, pid)."""
        process = self.start(spec)
        output, errors = process.communicate(timeout=20)
        return process.returncode, output, errors.decode(), process.pid

    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.note.read_text())
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path.resolve())


ENGINE = (sys.executable, "-I", "-S", "-c", REPORTER)


def test_the_engine_gets_its_argv_and_environment_byte_for_byte_under_the_same_pid(place: Place) -> None:
    env = {f"V{number}": text for number, text in enumerate(NASTY)} | {"A.B-c": "x", "HOME": "/other"}
    before = time.time()
    code, output, errors, pid = place.run(place.spec(*ENGINE, *NASTY, env=env))
    assert (code, errors) == (0, "")
    told = json.loads(output)
    assert (told["pid"], told["cwd"]) == (pid, str(place.path))
    assert [bytes.fromhex(each).decode() for each in told["argv"]] == NASTY
    got = {bytes.fromhex(name).decode(): bytes.fromhex(value).decode() for name, value in told["env"].items()}
    mark = {"METAL_SUPERVISOR_ENGINE": str(place.path / "specs" / "default.tiny.json")}
    assert got == {"PATH": INHERITED["PATH"], "LC_ALL": "C.UTF-8", **mark, **env}
    noted = read_run(place.note.read_text())
    assert (noted.pid, noted.launcher_pid, noted.edition, noted.refused) == (pid, pid, SPEC, "")
    assert noted.started and len(noted.starts) == 1 and before <= noted.starts[0] <= time.time()
    assert place.note.stat().st_mode & 0o777 == 0o600
    assert list(place.note.parent.iterdir()) == [place.note]


def test_an_engine_begins_in_an_empty_directory_of_its_own(place: Place) -> None:
    own, foreign = place.path / "scratch" / "default.tiny", place.path / "foreign"
    (own / "a" / "b").mkdir(parents=True)
    foreign.mkdir()
    (foreign / "kept").write_text("x")
    (own / "a" / "b" / "c").write_text("of the run before")
    (own / "link").symlink_to(foreign)
    (own / "a" / "link").symlink_to(foreign / "kept")
    code, output, errors, _ = place.run(place.spec(*ENGINE, cwd=str(own)))
    assert (code, errors) == (0, "")
    assert json.loads(output)["cwd"] == str(own) and list(own.iterdir()) == []
    assert own.stat().st_mode & 0o77 == 0 and (foreign / "kept").read_text() == "x"
    own.rmdir()
    own.symlink_to(foreign)
    place.note.unlink()
    assert place.run(place.spec(*ENGINE, cwd=str(own)))[0] == 0, "a link is replaced"
    assert own.is_dir() and not own.is_symlink() and (foreign / "kept").read_text() == "x"


def test_no_other_directory_is_emptied(place: Place) -> None:
    scratch = place.path / "scratch"
    for directory in (place.path, place.path / "specs", scratch / "default.tiny" / "deeper", scratch / ".."):
        directory.mkdir(parents=True, exist_ok=True)
        place.note.unlink(missing_ok=True)
        (directory / "kept").write_text("x")
        assert place.run(place.spec(*ENGINE, cwd=str(directory)))[0] == 0
        assert (directory / "kept").read_text() == "x"


def test_an_engine_ignores_a_broken_pipe_as_its_launcher_did(place: Place) -> None:
    # A survivor of a killed supervisord must not die of its next log line.
    code = "import signal; print(signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN, end='')"
    assert place.run(place.spec(sys.executable, "-I", "-S", "-c", code))[1] == b"True"


def test_a_taken_port_is_not_now_and_says_so(place: Place, listener: int) -> None:
    code, output, errors, _ = place.run(place.spec(*ENGINE, port=listener))
    assert (code, output) == (75, b"")
    noted = read_run(place.note.read_text())
    assert (noted.refused, noted.pid, noted.starts, noted.not_before) == ("PortInUse", 0, (), 0.0)
    assert str(listener) in noted.refused_message and noted.refused_message in errors


def test_a_taken_port_is_no_crash_and_never_turns_into_one(place: Place, listener: int) -> None:
    # Two crashes, their pause is over, but now a stranger has the port: that is what every further try must say.
    now = time.time()
    place.remember(starts=[now - 60, now - 50], not_before=now - 5)
    spec = place.spec(*ENGINE, port=listener)
    assert [(place.run(spec)[0], place.said()["refused"]) for _ in range(2)] == [(75, "PortInUse")] * 2


def test_a_barred_program_is_78_and_its_note_has_the_reason_until_the_bar_is_removed(place: Place) -> None:
    place.note.parent.mkdir(exist_ok=True)
    bar, why = place.note.with_suffix(".bar"), "ModelSourceNotAllowed: rejected"
    bar.write_text(why)
    code, output, errors, _ = place.run(place.spec(*ENGINE))
    assert (code, output) == (78, b"") and f"not started: {why}" in errors
    noted = read_run(place.note.read_text())
    assert (noted.refused, noted.refused_message, noted.pid) == (launch.BARRED, why, 0)
    bar.unlink()
    assert place.run(place.spec(*ENGINE))[0] == 0


@pytest.mark.parametrize("damage", ["empty", "a directory", "not text"])
def test_a_bar_that_cannot_be_read_is_a_bar_too(place: Place, damage: str) -> None:
    place.note.parent.mkdir(exist_ok=True)
    bar = place.note.with_suffix(".bar")
    if damage == "a directory":
        bar.mkdir()
    else:
        bar.write_bytes(b"" if damage == "empty" else b"\xff")
    assert place.run(place.spec(*ENGINE))[0] == 78


def test_a_spec_without_a_policy_is_not_started(place: Place) -> None:
    code, output, errors, _ = place.run(place.spec(*ENGINE, confinement=None))
    assert (code, output) == (launch.EXIT_UNCONFINED, b"") and "cannot be confined: its spec has no policy" in errors
    noted = read_run(place.note.read_text())
    assert (noted.refused, noted.pid, noted.confined) == (launch.UNCONFINED, 0, False)


@pytest.mark.parametrize("policy", [{}, {"read": ["x"]}, {"bind": [0]}, True, "on"])
def test_a_policy_that_cannot_be_enforced_starts_nothing(place: Place, policy: Any) -> None:
    if policy == {}:
        policy = {"execute": "/bin/true"}
    code, output, errors, _ = place.run(place.spec(*ENGINE, confinement=policy))
    assert (code, output) == (launch.EXIT_UNCONFINED, b"") and "cannot be confined" in errors


@pytest.mark.parametrize("content", ["", "{", '{"format": 9}'])
def test_a_bad_spec_is_78_and_leaves_word_of_which_it_was(place: Place, content: str) -> None:
    spec = place.spec(*ENGINE)
    Path(spec).write_text(content)
    code, output, errors, _ = place.run(spec)
    assert (code, output) == (78, b"") and spec in errors
    noted = json.loads(place.note.read_text())
    assert (noted["refused"], noted["spec"], noted["pid"]) == ("BadSpec", {}, 0)


@pytest.mark.parametrize(
    "change", [{"port": None}, {"cwd": None}, {"host": None}, {"port": "x"}, {"supervisor_log": None}]
)
def test_a_spec_that_lacks_a_part_is_78_too_and_no_traceback(place: Place, change: dict[str, Any]) -> None:
    code, output, errors, _ = place.run(place.spec(*ENGINE, **change))
    assert (code, output) == (78, b"")
    assert "Traceback" not in errors


def test_a_missing_binary_is_127_and_one_that_is_none_126(place: Place) -> None:
    code, _, errors, _ = place.run(place.spec("/no/such/engine"))
    assert code == 127 and "/no/such/engine" in errors
    plain = place.path / "plain"
    plain.write_text("not a program")
    code, _, errors, _ = place.run(place.spec(str(plain)))
    assert code == 126 and str(plain) in errors


def test_a_crash_loop_is_held_with_the_time_of_the_next_start(place: Place) -> None:
    now = time.time()
    place.remember(starts=[now - 9, now - 5], pid=0)
    place.log.write_text("x WARN exited: default.tiny (exit status 1; not expected)\n")
    spec = place.spec(*ENGINE)
    code, output, errors, _ = place.run(spec)
    assert (code, output) == (75, b"") and "crashed 2 times" in errors
    noted = read_run(place.note.read_text())
    assert (noted.refused, noted.pid, noted.starts) == ("CrashLoopBackOff", 0, (now - 9, now - 5))
    assert noted.refused_message == "crashed 2 times", "read at any time, and the time is in not_before"
    assert now + 10 <= noted.not_before <= time.time() + 10
    assert place.run(spec)[0] == 75
    assert read_run(place.note.read_text()).not_before == noted.not_before, "a refused try does not prolong the pause"


def test_a_held_engine_starts_when_its_time_has_come_and_counts(place: Place) -> None:
    now = time.time()
    place.remember(starts=[now - 60, now - 50], not_before=now - 1)
    code, output, _, pid = place.run(place.spec(*ENGINE))
    assert (code, json.loads(output)["pid"]) == (0, pid)
    noted = read_run(place.note.read_text())
    assert (len(noted.starts), noted.not_before, noted.refused) == (3, 0.0, "")


def test_an_orderly_stop_forgets_the_crashes(place: Place) -> None:
    now = time.time()
    place.remember(starts=[now - 9, now - 5])
    place.log.write_text("x INFO stopped: default.tiny (terminated by SIGTERM)\n")
    assert place.run(place.spec(*ENGINE))[0] == 0
    assert len(place.said()["starts"]) == 1


@pytest.mark.parametrize("damage", [{"starts": None}, {"starts": 5}, {"not_before": "x"}, {"started": 5, "pid": "x"}])
def test_a_damaged_note_does_not_keep_a_real_engine_from_starting(place: Place, damage: dict[str, Any]) -> None:
    place.remember(**damage)
    code, output, errors, _ = place.run(place.spec(*ENGINE))
    assert (code, errors) == (0, "") and output


def test_a_note_that_cannot_be_written_is_no_traceback(place: Place) -> None:
    place.note.parent.rmdir()
    assert "Traceback" not in place.run(place.spec(*ENGINE))[2]


def test_a_start_rings_for_the_controller_and_the_sidecar_and_a_refused_one_too(place: Place, listener: int) -> None:
    bells = [Doorbell(place.path, name) for name in ("controller", "sidecar")]
    for spec in (place.spec(*ENGINE), place.spec(*ENGINE, port=listener)):
        place.run(spec)
        for bell in bells:
            assert select.select([bell], [], [], 0)[0] == [bell]
            bell.wait(0)
    for bell in bells:
        os.close(bell.fileno())


def test_only_a_refused_start_is_urgent_for_the_controller(place: Place, listener: int) -> None:
    bells = {name: Doorbell(place.path, name) for name in ("controller", "sidecar")}

    def heard() -> dict[str, bytes]:
        return {name: os.read(bell.fileno(), 100) for name, bell in bells.items()}

    place.run(place.spec(*ENGINE))
    assert heard() == {"controller": launch.LATER, "sidecar": launch.NOW}
    place.run(place.spec(*ENGINE, port=listener))
    assert heard() == {"controller": launch.NOW, "sidecar": launch.NOW}
    for bell in bells.values():
        os.close(bell.fileno())


@pytest.mark.parametrize("kind", ["no listener", "full", "file", "link"])
def test_a_bell_that_cannot_be_rung_holds_no_start_up_and_is_left_alone(place: Place, kind: str) -> None:
    elsewhere, path = Doorbell(place.path, "elsewhere"), place.path / "sidecar.bell"
    if kind == "file":
        path.write_text("not a bell")
    elif kind == "link":
        path.symlink_to(place.path / "elsewhere.bell")
    else:
        os.mkfifo(path)
    listener = os.open(path, os.O_RDWR | os.O_NONBLOCK) if kind == "full" else None
    with contextlib.suppress(BlockingIOError):
        while listener is not None:
            os.write(listener, b"x" * 4096)
    code, output, errors, _ = place.run(place.spec(*ENGINE))
    assert (code, errors) == (0, "") and output
    assert kind != "file" or path.read_text() == "not a bell"
    assert not select.select([elsewhere], [], [], 0)[0]
    for each in (elsewhere.fileno(), *([listener] if listener is not None else [])):
        os.close(each)


# ── standing in for a survivor ───────────────────────────────────────────────────────────────────


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal; True where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


@pytest.fixture
def survivor(place: Place) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    spec = place.spec("/bin/sh", "-c", "echo up; exec sleep 60")
    engine = place.start(spec)
    assert engine.stdout is not None and engine.stderr is not None
    try:
        assert engine.stdout.readline() == b"up\n"
        yield engine, spec
    finally:
        engine.kill()
        engine.wait()
        engine.stdout.close()
        engine.stderr.close()


@pytest.fixture
def stand_in(place: Place, survivor: tuple[subprocess.Popen[bytes], str]) -> Iterator[subprocess.Popen[bytes]]:
    second = place.start(survivor[1])
    assert second.stdout is not None and second.stderr is not None
    try:
        assert b"standing in" in second.stderr.readline()
        until = time.monotonic() + 30
        while not catches(second.pid, signal.SIGTERM) and second.poll() is None and time.monotonic() < until:
            os.sched_yield()
        yield second
    finally:
        second.kill()
        second.wait()
        second.stdout.close()
        second.stderr.close()


def test_a_second_launcher_of_the_same_spec_represents_the_survivor_and_passes_term_on(
    place: Place, survivor: tuple[subprocess.Popen[bytes], str], stand_in: subprocess.Popen[bytes]
) -> None:
    engine = survivor[0]
    noted = read_run(place.note.read_text())
    assert (noted.pid, noted.launcher_pid, noted.refused, len(noted.starts)) == (engine.pid, stand_in.pid, "", 1)
    assert stand_in.poll() is None and engine.poll() is None
    stand_in.terminate()
    assert stand_in.wait(30) == launch.EXIT_UNSEEN
    assert engine.wait(30) == -signal.SIGTERM
    assert stand_in.stdout is not None and stand_in.stdout.read() == b"", "it never became an engine"


def test_a_term_that_comes_as_soon_as_a_stand_in_says_what_it_is_reaches_the_engine_too(
    place: Place, survivor: tuple[subprocess.Popen[bytes], str]
) -> None:
    engine, spec = survivor
    second = place.start(spec)
    assert second.stderr is not None
    assert b"standing in" in second.stderr.readline()
    second.terminate()
    second.communicate(timeout=30)
    assert second.returncode == launch.EXIT_UNSEEN
    assert engine.wait(30) == -signal.SIGTERM


def test_a_launcher_of_another_spec_stands_in_too_and_says_which_one_runs(
    place: Place, survivor: tuple[subprocess.Popen[bytes], str]
) -> None:
    other = {**json.loads(Path(survivor[1]).read_text()), "edition": "other"}
    Path(survivor[1]).write_text(json.dumps(other))
    second = place.start(survivor[1])
    assert second.stderr is not None
    assert b"standing in" in second.stderr.readline()
    noted = read_run(place.note.read_text())
    assert (noted.pid, noted.launcher_pid, noted.edition) == (survivor[0].pid, second.pid, SPEC)
    second.terminate()
    second.communicate(timeout=30)
    assert survivor[0].wait(30) == -signal.SIGTERM


def test_a_stand_in_ends_when_its_engine_does(
    survivor: tuple[subprocess.Popen[bytes], str], stand_in: subprocess.Popen[bytes]
) -> None:
    survivor[0].kill()
    assert stand_in.wait(30) == launch.EXIT_UNSEEN


def test_a_survivor_that_has_ended_is_replaced_by_a_new_engine(
    place: Place, survivor: tuple[subprocess.Popen[bytes], str]
) -> None:
    engine, spec = survivor
    engine.terminate()
    engine.wait(30)
    second = place.start(spec)
    assert second.stdout is not None and second.stderr is not None
    assert second.stdout.readline() == b"up\n"
    second.kill()
    second.communicate()
    assert read_run(place.note.read_text()).pid == second.pid


LEADER = """
import os, signal, subprocess, sys
os.setpgid(0, 0)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
for env in (dict(os.environ), {}):
    kept = subprocess.Popen([sys.executable, "-I", "-S", "-c", child], env=env, stdout=subprocess.PIPE)
    kept.stdout.readline()
    print(kept.pid, flush=True)
os._exit(0)
"""


def test_what_a_dead_engine_left_behind_is_ended_and_nothing_of_a_stranger_is() -> None:
    env = {**os.environ, "METAL_SUPERVISOR_ENGINE": "/s/specs/default.tiny.json"}
    leader = subprocess.Popen([sys.executable, "-I", "-S", "-c", LEADER], env=env, stdout=subprocess.PIPE)
    output, _ = leader.communicate(timeout=20)
    ours, strange = map(int, output.split())
    try:
        assert launch.sweep_group(leader.pid, "/s/specs/default.other.json") == []
        assert launch.sweep_group(leader.pid, "/s/specs/default.tin.json") == []
        assert launch.sweep_group(leader.pid, "/other/specs/default.tiny.json") == []
        assert launch.start_time(ours) and launch.start_time(strange)
        assert launch.sweep_group(leader.pid, "/s/specs/default.tiny.json") == [ours]
        until = time.monotonic() + 30
        while launch.start_time(ours) and time.monotonic() < until:
            time.sleep(0.01)
        assert not launch.start_time(ours) and launch.start_time(strange)
        assert launch.sweep_group(os.getpid(), "/s/specs/default.tiny.json") == []  # alive: that is no leftover
    finally:
        os.kill(strange, signal.SIGKILL)
