"""`metal-supervisor explain` as a process of its own, on the files of a system of which nothing runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from metal_supervisor.spec.processes import Observed
from metal_supervisor.state.directory import StateDir
from tests.support.pseudo import WITHIN_S, Terminal
from tests.support.records import a_record
from tests.support.typed import typed

SPEC = "0123456789ab"
TINY = a_record(endpoint=None, port=18100, edition=SPEC)
HIDDEN = "hf_never_to_be_seen"
EVIL = "x\r\n\x1b[2J\u202e\x9b31m"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    directory = StateDir(tmp_path / "state")
    directory.create()
    directory.write_record(TINY)
    spec = {"format": 1, "argv": ["/bin/engine", "--api-key", HIDDEN], "env": {"TOKEN": HIDDEN}}
    directory.spec_path(TINY.program).write_text(json.dumps(spec))
    # The process is gone, and the sidecar was not there to see it.
    directory.write_observed(Observed("default.tiny", 1 << 22, True, 1.0, "FATAL", message=EVIL, last_exit=EVIL))
    told = {"at": 1.0, "elsewhere": {"default.theirs": f"another agent serves it {EVIL}"}}
    (directory.path / "controller.json").write_text(json.dumps(told))
    return directory


def command(state: StateDir, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "metal_supervisor", "explain", "--state-dir", str(state.path), *arguments]


def explain(state: StateDir, *arguments: str) -> tuple[int, str, str]:
    done = typed(*command(state, *arguments)[3:])
    return done.returncode, done.stdout, done.stderr


def test_it_tells_from_the_files_alone_and_keeps_secrets_and_control_characters_back(state: StateDir) -> None:
    code, out, said = explain(state, "tiny")
    assert code == 3 and f"nothing runs in {state.path}; start it with" in said and "no supervisord runs" in out
    assert out.startswith("default/tiny: Failed, CrashLoopBackOff\n") and "program: /bin/engine" in out
    assert "report of the controller is " in out
    assert all(line.isprintable() for line in out.splitlines())
    raw = explain(state, "default.tiny", "--json")[1]
    told = json.loads(raw)
    assert (told["phase"], told["sentences"][0]) == ("Failed", {"topic": "now", "text": told["message"]})
    assert told["numbers"]["port"] == 18100 and told["numbers"]["pid"] is None
    assert HIDDEN not in out + raw


def test_a_process_that_has_the_pid_of_an_engine_by_now_is_not_taken_for_it(state: StateDir) -> None:
    """As after a reboot: neither sidecar nor launcher was there to note the engine's end."""
    state.write_observed(Observed("default.tiny", os.getpid(), True, 1.0, "RUNNING", memory_bytes=1 << 30))
    note = {
        "format": 1,
        "pid": os.getpid(),
        "launcher_pid": os.getpid(),
        "started": "before",
        "spec": {"edition": SPEC},
        "starts": [1.0],
        "not_before": 0.0,
        "refused": "",
        "refused_message": "",
    }
    state.note_path("default.other").write_text(json.dumps(note))  # that one's engine had this pid before
    assert explain(state, "tiny")[1].startswith("default/tiny: Ready")
    state.note_path("default.tiny").write_text(json.dumps(note))
    code, out, _ = explain(state, "tiny")
    assert code == 3 and out.startswith("default/tiny: Stopped, NotRunning\n"), out
    assert "process    none; no supervisord runs" in out and "1.0 GiB" not in out


def test_a_service_of_a_namespace_that_is_not_watched_is_told_as_such(state: StateDir) -> None:
    """It has no status, and its own namesake was proposed instead."""
    code, out, said = explain(state, "team-a/tiny")
    assert (code, out) == (4, "") and "this Mac serves the namespace default only; see --namespace" in said
    assert "did you mean default.tiny?" in explain(state, "default/tinny")[2]


def test_on_a_terminal_the_sentences_are_wrapped_and_indented(state: StateDir) -> None:
    terminal = Terminal(command(state, "tiny"), 60)
    shown = terminal.rest().partition("known last:\r\n")[2].splitlines()
    assert terminal.process.wait(WITHIN_S) == 3
    assert all(len(line) <= 60 and line.isprintable() for line in shown)
    assert sum(line.startswith("  wanted ") for line in shown) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("default/tyni", "there is no 'default/tyni'; did you mean default.tiny?"),
        ("default/theirs", "default/theirs is not this Mac's: another agent serves it x\\r\\n"),
        ("theirs", "theirs is not this Mac's: another agent serves it x\\r\\n"),
        ("default/torn", "the record of default/torn cannot be read"),
        ("torn", "the record of torn cannot be read"),
    ],
)
def test_a_name_that_is_no_service_of_this_mac_is_told_to_be_none(state: StateDir, name: str, says: str) -> None:
    state.record_path("default.torn").write_text("{")
    code, out, said = explain(state, name)
    assert (code, out) == (4, "") and says in said and said.rstrip("\n").isprintable()
