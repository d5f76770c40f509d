"""What a killed supervisord left behind: ended, or left to their launchers, before the next one starts.

A launcher that finds its engine alive stands in for it. Every finding is printed on a line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from metal_supervisor import launch
from metal_supervisor.host import processes
from metal_supervisor.runtimes import metal_device, metal_state
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.types import Json
from metal_supervisor.state import own_processes, programs
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.own_processes import Noted

Say = Callable[[str], None]
OTHERS_FILES = (
    "attached/*.json",
    "runs/*.family",
    "trial-*.json",
    "use/*.json",
    "apiserver.json",
    "gateway.json",
)
"""Files about the running processes of a state directory; in a copy, about the original's."""


def sweep(directory: StateDir, say: Say) -> None:
    """End or adopt the processes that a killed supervisord left behind, and forget the crashes of dead engines."""
    doomed = [*own_processes.live(directory), *_note_unknown(directory)]
    for path in sorted((directory.path / "runs").glob("*.json")):
        program, found = path.name.removesuffix(".json"), launch.read_note(str(path))
        if not own_processes.is_own(found, directory.path):
            pid = found.get("pid")
            if own_processes.is_alive(found):
                whose = ", ".join(launch.states_of(int(str(pid)))) or "unknown"
                text = f"pid {pid} does not belong to this state directory (its own: {whose})"
                say(f"{program}: {text}; it is left alone")
            else:
                _end_left(directory, program, found, say)
            # An orderly stop looks like a crash to the launcher, and a loop that outlasts a boot is found anew.
            launch.write_note(str(path), {**found, **launch.UNHELD, "pid": 0})
            continue
        pid = int(str(found["pid"]))
        # The launcher noted its own pid before it became the engine: this is that engine, if perhaps of an older spec.
        if directory.has_section(program):
            say(f"{program}: its engine, pid {pid}, outlived the last supervisord and keeps serving")
            # It runs, so a stop by hand was followed by a start: its section must start the stand-in.
            with contextlib.suppress(OSError):
                section = programs.with_autostart(directory.section_text(program))
                write_atomic(directory.section_path(program), section)
            # Its launcher may be a stand-in that lost its supervisord too; it has nothing left to do.
            _end_stand_in(directory, program, found, pid)
        else:
            say(f"{program}: ending pid {pid}, left over from the last supervisord and no longer wanted")
            doomed.append((program, pid, str(found["started"])))
    own_processes.end_all(doomed)


def forget_families(directory: StateDir) -> None:
    """Remove the notes of descendants of engines that have ended: of one whose note was lost, nothing else does."""
    for path in (directory.path / "runs").glob("*.family"):
        if not path.stem.isdecimal() or not launch.start_time(int(path.stem)):
            path.unlink(missing_ok=True)


def end_left_by_engines(directory: StateDir, say: Say) -> list[str]:
    """End what engines left behind that have ended; returns who holds the port of one of them nevertheless."""
    notes = {path.stem: launch.read_note(str(path)) for path in sorted((directory.path / "runs").glob("*.json"))}
    ended = {name: note for name, note in notes.items() if note.get("pid") and not own_processes.is_alive(note)}
    killed = [name for name, note in ended.items() if _end_left(directory, name, note, say)]
    until = time.monotonic() + (own_processes.KILL_WAIT_S if killed else 0.0)
    while True:
        held = [held_port(mapping(note, "spec"), ()) for note in ended.values()]
        if not any(held) or time.monotonic() >= until:
            return [each for each in held if each]
        time.sleep(0.05)


def held_port(spec: Json, engines: Collection[int]) -> str:
    """Sentence about who holds the port of an ended engine, "" if it is free or one of `engines` has it."""
    port, host = spec.get("port"), spec.get("host")
    if not isinstance(port, int) or not isinstance(host, str) or spec.get("shared"):
        return ""
    keeper = processes.keeper_of(port, host, engines)
    return f"port {port} is still held by {keeper}; end it by its pid" if keeper else ""


def _end_left(directory: StateDir, program: str, note: dict[str, object], say: Say) -> list[int]:
    """End what a dead engine left behind; returns the pids."""
    pid, session = note.get("pid"), launch.session_of(note, str(directory.path))
    left = isinstance(pid, int) and launch.sweep_group(pid, directory.launched_path(program), session)
    if left:
        say(f"{program}: ended what pid {pid} had left behind: {', '.join(map(str, left))}")
    return left or []


def rehome(directory: StateDir, say: Say) -> None:
    """Take a copied or moved directory into use: its files lead to the other until then, and its notes are of that one.

    The controller composes new specs and starts the engines. An engine that survived a move keeps its spec, and a
    section for its stand-in.
    """
    other = directory.other_home()
    if not other:
        return
    say(f"this directory is a copy of {other}, or was moved from there; its engines start with new specs")
    alive = {
        path.stem
        for path in (directory.path / "runs").glob("*.json")
        if own_processes.is_own(launch.read_note(str(path)), directory.path)
    }
    for path in (directory.path / "models.d").glob("*.conf"):
        program = path.name.removesuffix(".conf")
        if directory.has_section(program):
            write_atomic(path, programs.section(program, directory.home, program in alive))
    for program in directory.specs_on_file():
        if program not in alive:
            directory.remove_spec(program)
    for pattern in OTHERS_FILES:
        for path in directory.path.glob(pattern):
            path.unlink()


def renew_sections(directory: StateDir, settings: Settings) -> None:
    """Write the sections of programs that no engine runs by: another release, or another setting, may make others."""
    for path in (directory.path / "models.d").glob("*.conf"):
        program = path.name.removesuffix(".conf")
        text = directory.section_text(program)
        if programs.is_unedited(text) and not own_processes.is_alive(_note_of(directory, program)):
            starts = programs.starts_itself(text)
            write_atomic(path, programs.section(program, directory.home, starts, settings.log_size, settings.log_files))


def _note_of(directory: StateDir, program: str) -> dict[str, object]:
    return launch.read_note(str(directory.note_path(program)))


def hold_without_metal(directory: StateDir, question: metal_device.Question | None, say: Say) -> None:
    """Turn autostart off where there is no Metal device; the controller starts the engines once there is one.

    This process runs in the same context as the engines would. An engine that outlived the last supervisord keeps
    autostart, for its stand-in.
    """
    if question is None or question() is not False:
        return
    say(metal_state.WHY)
    for path in sorted((directory.path / "models.d").glob("*.conf")):
        program = path.name.removesuffix(".conf")
        if not own_processes.is_alive(_note_of(directory, program)):
            write_atomic(path, programs.with_autostart(directory.section_text(program), starts=False))


def _note_unknown(directory: StateDir) -> list[Noted]:
    """Write a new note for each engine whose note was lost: without one, a second engine would be started beside it.

    Returns engines that are such duplicates already.
    """
    second = []
    for pid, spec_path in sorted(processes.marked(directory.path).items()):
        spec = _spec_of(pid, spec_path)
        if spec is None:
            continue
        note, started = launch.note_path(spec_path), launch.start_time(pid)
        found = launch.read_note(note)
        if not own_processes.is_own(found, directory.path):
            known = {"spec": spec, "pid": pid, "launcher_pid": pid, "started": started}
            known["directory"] = launch.identity(str(directory.path))
            fine = {"refused": "", "refused_message": "", "restored": True}
            launch.write_note(note, {"format": launch.FORMAT, **launch.UNHELD, **known, **fine})
        elif found["pid"] != pid:
            second.append((Path(note).stem, pid, started))
    return second


def _spec_of(pid: int, spec_path: str) -> Json | None:
    """The spec of an engine, {} if it was started from another than the one on file; None for a helper of one."""
    if os.getsid(pid) == pid:
        return None  # in a session of its own, unlike what supervisord starts
    try:
        spec = launch.read_spec(spec_path)
    except launch.BadSpec:
        return {}
    argv = spec["argv"]
    assert isinstance(argv, list)
    # Without the first, because a script is run by its interpreter.
    same = len(argv) < 2 or (processes.command_line(pid) or [])[-len(argv) + 1 :] == argv[1:]
    return spec if same else {}


def _end_stand_in(directory: StateDir, program: str, note: dict[str, object], engine_pid: int) -> None:
    """End a launcher that stands in for an engine; another process may have its pid by now."""
    pid = note.get("launcher_pid")
    if not isinstance(pid, int) or pid in (0, engine_pid):
        return
    words = [Path(each) for each in processes.command_line(pid) or ()]
    here = launch.identity(f"{directory.path}/specs")
    if any(each.name == f"{program}.json" and launch.identity(str(each.parent)) == here for each in words):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
