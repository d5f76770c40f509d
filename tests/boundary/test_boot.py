"""What boot does with what a killed supervisord left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor import launch
from metal_supervisor.confinement import probe
from metal_supervisor.controller import boot, leftovers
from metal_supervisor.install import uninstall
from metal_supervisor.settings.loader import Overrides, Settings
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
    directory.write_spec(made)
    directory.section_path(PROGRAM).write_text(programs.section(PROGRAM, directory.home, autostart))
    note = {
        "format": 1,
        "pid": engine.pid,
        "launcher_pid": engine.pid,
        "started": launch.start_time(engine.pid),
        "directory": launch.identity(directory.home),
        "spec": json.loads(made.spec),
        "starts": [1.0],
        "not_before": 0.0,
        "refused": "",
        "refused_message": "",
    }
    (directory.path / "runs" / f"{PROGRAM}.json").write_text(json.dumps(note))
    said: list[str] = []
    leftovers.sweep(directory, said.append)
    assert "keeps serving" in said[0] and engine.poll() is None
    expected = programs.section(PROGRAM, directory.home, True)
    # Its first line says that somebody edited it, so the controller writes it anew.
    assert directory.section_text(PROGRAM).partition("\n")[2] == expected.partition("\n")[2]


@pytest.mark.parametrize("ours", [True, False])
def test_a_stand_in_is_ended_and_not_that_of_another_system_which_has_its_pid_by_now(
    tmp_path: Path, engine: subprocess.Popen[bytes], ours: bool
) -> None:
    directory = StateDir(tmp_path)
    directory.create()
    made = programs.compose(PROGRAM, Engine(("/bin/sleep", "60"), (), "/", Probe()), 18100, "::1", directory.home)
    directory.section_path(PROGRAM).write_text(programs.section(PROGRAM, directory.home, True))
    home = directory.home if ours else "/elsewhere"
    arguments = f"{home}/current/launch.py", f"{home}/specs/{PROGRAM}.json"
    with subprocess.Popen(["/bin/sh", "-c", "read nothing", *arguments], stdin=subprocess.PIPE) as standing_in:
        note = {
            "format": 1,
            "pid": engine.pid,
            "launcher_pid": standing_in.pid,
            "spec": json.loads(made.spec),
            "started": launch.start_time(engine.pid),
            "directory": launch.identity(directory.home),
        }
        directory.note_path(PROGRAM).write_text(json.dumps(note))
        leftovers.sweep(directory, lambda _: None)
        assert standing_in.stdin is not None
        standing_in.stdin.close()
        assert (standing_in.wait() == -signal.SIGKILL) is ours


def stopped(tmp_path: Path) -> StateDir:
    """A state directory with one service, whose supervisord was killed."""
    directory = StateDir(tmp_path / "state")
    directory.create()
    made = programs.compose(PROGRAM, Engine(("/bin/sleep", "60"), (), "/", Probe()), 18100, "::1", directory.home)
    directory.write_spec(made)
    directory.section_path(PROGRAM).write_text(programs.section(PROGRAM, directory.home, True))
    boot.write_conf(directory, Settings(state_dir=str(directory.path)))
    return directory


@contextlib.contextmanager
def noted_engine(state: StateDir, mark: str, **note: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process with that mark, and its launcher's note."""
    spec = state.spec_of(PROGRAM)
    with subprocess.Popen(["/bin/sleep", "60"], env={launch.MARK: mark}, start_new_session=True) as engine:
        try:
            found = {
                "format": 1,
                "pid": engine.pid,
                "launcher_pid": engine.pid,
                "spec": spec,
                "started": launch.start_time(engine.pid),
                **note,
            }
            state.note_path(PROGRAM).write_text(json.dumps(found))
            yield engine
        finally:
            engine.kill()


def swept(directory: StateDir) -> list[str]:
    """What boot says of a directory."""
    said = list[str]()
    leftovers.rehome(directory, said.append)
    leftovers.sweep(directory, said.append)
    return said


@pytest.mark.parametrize("release", ["this", "earlier"])
@pytest.mark.parametrize("case", ["renamed", "restored", "copied", "unknown"])
def test_a_process_is_adopted_by_the_very_directory_that_it_runs_from(tmp_path: Path, case: str, release: str) -> None:
    before = stopped(tmp_path)
    mark = before.launched_path(PROGRAM) if case != "unknown" else ""
    by_note = {"directory": launch.identity(before.home)} if release == "this" else {}
    with noted_engine(before, mark, **by_note) as engine:
        other = tmp_path / "other"
        if case == "renamed":
            before.path.rename(other)
        else:
            shutil.copytree(before.path, other)
        if case == "restored":
            before.path.rename(tmp_path / "kept, lest the copy get its inode")
            other.rename(other := before.path)
        said = swept(directory := StateDir(other))
        # An older release's note says nothing of the directory, and a path that is gone proves nothing.
        ours = case == "restored" or (case == "renamed" and release == "this")
        found = launch.read_note(str(directory.note_path(PROGRAM)))
        assert engine.poll() is None and found["pid"] == (engine.pid if ours else 0)
        assert any(("keeps serving" if ours else "left alone") in each and str(engine.pid) in each for each in said)
        assert programs.starts_itself(directory.section_text(PROGRAM)) is ours


@pytest.mark.parametrize("case", ["own", "copied"])
def test_a_program_of_ours_is_ended_by_the_directory_that_it_was_given_alone(tmp_path: Path, case: str) -> None:
    before = stopped(tmp_path)
    shell = ["/bin/sh", "-c", "echo; read nothing", "metal-supervisor", "controller", "--state-dir", before.home]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline()  # right after exec it has no arguments yet
        note = {"format": 1, "pid": program.pid, "started": launch.start_time(program.pid)}
        (before.path / "runs" / "controller.own").write_text(json.dumps(note))
        copy = Path(shutil.copytree(before.path, tmp_path / "copy"))
        swept(StateDir(copy) if case == "copied" else before)
        assert program.stdin is not None
        program.stdin.close()
        assert program.wait() == (1 if case == "copied" else -signal.SIGTERM)


def test_a_copy_starts_nothing_that_leads_to_the_original(tmp_path: Path) -> None:
    before = stopped(tmp_path)
    copy = StateDir(Path(shutil.copytree(before.path, tmp_path / "copy")))
    (copy.path / "use").mkdir()
    (copy.path / "use" / "1.json").write_text("{}")
    assert (before.other_home(), copy.other_home()) == ("", before.home)
    said = swept(copy)
    text = copy.section_text(PROGRAM)
    assert before.home in said[0] and before.home not in text and not programs.starts_itself(text)
    assert not copy.specs_on_file() and not (copy.path / "use" / "1.json").exists()
    boot.write_conf(copy, Settings(state_dir=str(copy.path)))
    assert not copy.other_home() and before.specs_on_file()


def test_an_uninstall_from_a_copy_leaves_the_endpoints_of_the_original(tmp_path: Path) -> None:
    before = stopped(tmp_path)
    copy = StateDir(Path(shutil.copytree(before.path, tmp_path / "copy")))
    settings = Settings(state_dir=str(copy.path), kubeconfig=str(tmp_path / "is not read"), namespace="default")
    (line,) = uninstall._leave_cluster(copy, settings)
    assert line.startswith(f"left      the endpoints of {before.home}")


@pytest.mark.parametrize("case", ["own", "copied"])
def test_the_engine_of_an_interrupted_trial_is_ended_by_its_own_directory_alone(
    tmp_path: Path, engine: subprocess.Popen[bytes], case: str
) -> None:
    state = tmp_path / case
    state.mkdir()
    of = {"directory": launch.identity(str(state if case == "own" else tmp_path))}
    note = {"pid": engine.pid, "started": launch.start_time(engine.pid), **of}
    (state / "trial-1.json").write_text(json.dumps(note))
    probe.end_left(state)
    engine.send_signal(signal.SIGTERM)
    assert engine.wait() == -(signal.SIGKILL if case == "own" else signal.SIGTERM)


def test_a_supervisord_whose_directory_was_replaced_is_named_and_no_second_one_starts(tmp_path: Path) -> None:
    directory = stopped(tmp_path)
    settings = Settings(state_dir=str(directory.path))
    words = boot.command(directory)[3:]
    with subprocess.Popen(["/bin/sh", "-c", "read nothing", *words], stdin=subprocess.PIPE) as supervisord:
        shutil.copytree(directory.path, tmp_path / "backup")
        shutil.rmtree(directory.path)
        (tmp_path / "backup").rename(directory.path)
        with pytest.raises(own_processes.CannotBoot, match=f"does not answer.*kill {supervisord.pid}"):
            boot.prepare(settings, Overrides(), print)
        assert supervisord.stdin is not None and supervisord.poll() is None
        supervisord.stdin.close()


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
    assert {"metal-supervisor", "attacher", "supervisorctl"} <= set(seen)


@pytest.mark.parametrize("answer", [True, False, None])
def test_without_metal_nothing_is_started_by_supervisord_but_the_stand_in_of_what_lives(
    tmp_path: Path, engine: subprocess.Popen[bytes], answer: bool | None
) -> None:
    directory = StateDir(tmp_path)
    directory.create()
    for program, pid in (("default.dead", 0), ("default.lives", engine.pid)):
        programs.compose(program, Engine(("/bin/sleep", "60"), (), "/", Probe()), 18100, "::1", directory.home)
        directory.section_path(program).write_text(programs.section(program, directory.home, True))
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
