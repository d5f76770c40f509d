"""What boot does with what a killed supervisord left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor import launch
from metal_supervisor.controller import boot, leftovers
from metal_supervisor.controller.prerequisites.confinement_policies import complete_specs
from metal_supervisor.spec.types import Engine, Probe
from metal_supervisor.state import own_processes, programs
from metal_supervisor.state.directory import StateDir

PROGRAM = "default.tiny"


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("autostart", [True, False])
def test_a_survivor_gets_a_stand_in_although_it_was_stopped_by_hand_once(
    tmp_path: Path, engine: subprocess.Popen[bytes], autostart: bool
) -> None:
    # Stopped by hand, started by hand, and supervisord killed before the controller wrote the section anew.
    directory = StateDir(tmp_path)
    directory.create()
    made = programs.compose(PROGRAM, Engine(("/bin/sleep", "60"), (), "/", Probe()), 18100, "::1", directory.home)
    directory.spec_path(made.spec_file).write_text(made.spec)
    directory.section_path(PROGRAM).write_text(programs.section(PROGRAM, made.spec_file, directory.home, autostart))
    note = {
        "format": 1, "pid": engine.pid, "launcher_pid": engine.pid, "started": launch.start_time(engine.pid),
        "spec": made.spec_file, "starts": [1.0], "not_before": 0.0, "held_after": 0, "refused": "",
        "refused_message": "",
    }  # fmt: skip
    (directory.path / "runs" / f"{PROGRAM}.json").write_text(json.dumps(note))
    said: list[str] = []
    leftovers.sweep(directory, said.append)
    assert "keeps serving" in said[0] and engine.poll() is None
    expected = programs.section(PROGRAM, made.spec_file, directory.home, True)
    # Its first line says that somebody edited it, so the controller writes it anew.
    assert directory.section_text(PROGRAM).partition("\n")[2] == expected.partition("\n")[2]


@pytest.mark.parametrize("ours", [True, False])
def test_a_stand_in_is_ended_and_not_that_of_another_system_which_has_its_pid_by_now(
    tmp_path: Path, engine: subprocess.Popen[bytes], ours: bool
) -> None:
    directory = StateDir(tmp_path)
    directory.create()
    made = programs.compose(PROGRAM, Engine(("/bin/sleep", "60"), (), "/", Probe()), 18100, "::1", directory.home)
    directory.section_path(PROGRAM).write_text(programs.section(PROGRAM, made.spec_file, directory.home, True))
    home = directory.home if ours else "/elsewhere"
    arguments = f"{home}/current/launch.py", f"{home}/specs/{made.spec_file}"
    with subprocess.Popen(["/bin/sh", "-c", "read nothing", *arguments], stdin=subprocess.PIPE) as standing_in:
        note = {"format": 1, "pid": engine.pid, "launcher_pid": standing_in.pid, "spec": made.spec_file,
                "started": launch.start_time(engine.pid)}  # fmt: skip
        directory.note_path(PROGRAM).write_text(json.dumps(note))
        leftovers.sweep(directory, lambda _: None)
        assert standing_in.stdin is not None
        standing_in.stdin.close()
        assert (standing_in.wait() == -signal.SIGKILL) is ours


def test_a_script_that_an_upgrade_replaces_can_be_started_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, replace, seen = StateDir(tmp_path), Path.replace, list[str]()

    def looked_at(path: Path, target: Path) -> Path:
        replaced = replace(path, target)
        if target.read_bytes().startswith(b"#!/bin/sh"):
            seen.append(target.name)
            assert os.access(target, os.X_OK), target.name
        return replaced

    directory.create()
    monkeypatch.setattr(Path, "replace", looked_at)
    boot.link_current(directory)
    assert {"metal-supervisor", "attendant", "supervisorctl"} <= set(seen)


@pytest.mark.parametrize("answer", [True, False, None])
def test_without_metal_nothing_is_started_by_supervisord_but_the_stand_in_of_what_lives(
    tmp_path: Path, engine: subprocess.Popen[bytes], answer: bool | None
) -> None:
    directory = StateDir(tmp_path)
    directory.create()
    for program, pid in (("default.dead", 0), ("default.lives", engine.pid)):
        made = programs.compose(program, Engine(("/bin/sleep", "60"), (), "/", Probe()), 18100, "::1", directory.home)
        directory.section_path(program).write_text(programs.section(program, made.spec_file, directory.home, True))
        note = {"format": launch.FORMAT, "pid": pid, "started": launch.start_time(pid) if pid else ""}
        directory.note_path(program).write_text(json.dumps(note))
    said: list[str] = []
    leftovers.hold_without_metal(directory, lambda: answer, said.append)
    held = {name for name in ("dead", "lives") if "autostart=false" in directory.section_text(f"default.{name}")}
    assert held == ({"dead"} if answer is False else set())
    assert len(said) == len(held) and all("no Metal device" in each for each in said)
    leftovers.hold_without_metal(directory, None, said.append)
    assert all(programs.is_unedited(directory.section_text(f"default.{name}")) for name in ("dead", "lives"))


def test_what_killed_writers_left_is_removed_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    directory.create()
    with subprocess.Popen(["true"]) as ended:
        pass
    left = [
        directory.path / "specs" / f".default.tiny.aaaaaaaaaaaa.json.{ended.pid}.tmp",
        directory.path / f".omlx-key.{ended.pid}.tmp",
    ]
    ours = directory.path / "runs" / f"default.tiny.json.{os.getpid()}.tmp"
    for path in (*left, ours):
        path.write_text("secret")
    directory.remove_unfinished()
    assert not any(path.exists() for path in left) and ours.exists()


@pytest.mark.parametrize("text", ['{"port": 99999, "prefix": "/k-1"}', '{"port": -1, "prefix": "/k-1"}', "[" * 100_000])
def test_a_damaged_address_of_the_embedded_api_is_chosen_anew(tmp_path: Path, text: str) -> None:
    directory = StateDir(tmp_path / "state")
    directory.create()
    (directory.path / "apiserver.json").write_text(text)
    assert boot.embedded_access(directory) == own_processes.saved_access(directory)


@pytest.mark.parametrize("argv", [5, {}, None, "x"])
def test_a_damaged_spec_of_an_older_release_keeps_nothing_from_starting(tmp_path: Path, argv: object) -> None:
    directory = StateDir(tmp_path / "state")
    directory.create()
    directory.write_spec("default.a.0123456789ab.json", json.dumps({"program": "default.a", "argv": argv}))
    complete_specs(directory, "on")
    assert "confinement" in directory.read_spec("default.a.0123456789ab.json")
