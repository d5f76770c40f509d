"""The launcher: turn a spec file into a running engine, with the pid that supervisord knows.

Nothing a user wrote may reach supervisord's ini, so a program section only names this launcher and a
JSON spec, of which each start takes what is there then, and notes it: argv and environment come from there
and go to `execve` byte for byte. Before that the launcher
does the work that belongs to the moment of the start: clean the environment, refuse a taken port, hold a
crash loop, and stand in for an engine that outlived a killed supervisord, so that there are never two
copies of a model.

Run as `python -I -S launch.py SPEC`; standard library only, because every start waits for it.
Exit codes: 75 not now (held, or port taken), 77 cannot be confined, 78 bad or barred spec, 126/127 the engine cannot
be executed.
"""

from __future__ import annotations

import _socket  # `socket` itself is 5 ms of enums and selectors, which nothing here needs
import errno
import json
import os
import re
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FORMAT = 1
UNCONFINED = "ConfinementFailed"
BARRED = "StartBarred"
"""Reason of a refused start: the controller has written a bar for the program."""
SAYS = "metal-supervisor: "
CRASHED = "crashed "
ADOPTS = "outlived supervisord; standing in for it"
EXIT_NOT_NOW = 75
EXIT_UNCONFINED = 77
EXIT_BAD_SPEC = 78
EXIT_UNSEEN = 99
EXIT_CANNOT_EXEC = 126
EXIT_NOT_FOUND = 127
FIRST_HOLD_S = 10.0
LONGEST_HOLD_S = 300.0
FORGET_AFTER_S = 600.0
LOG_TAIL_BYTES = 65536
ANSWER_WAIT_S = 0.2
ANSWERED = "another server answers there"
NOW = b"."
"""Ring for news that the reader should have at once."""
LATER = b","
"""Ring for news that can wait."""
SOON = b";"
"""Ring for news that can wait unless the reader is in a hurry."""
UNHELD: dict[str, object] = {"starts": [], "not_before": 0.0}
"""The crash fields of a note, without crashes."""
# Below the 30 s after which supervisord would kill the stand-in, and leave the engine.
STAND_IN_KILL_AFTER_S = 25
MARK = "METAL_SUPERVISOR_ENGINE"
"""Variable with the path of an engine's spec: it identifies the engine and its children even if every file is lost."""
SIGCONT = 18
"""Number on Linux; the module `signal` is 5 ms of enums, for which each restart would wait."""
SIGSTOP = 19
"""The same."""
STATE_OF = rb"(?:^|\0)(?:%s=([^\0]+)/specs/[^/\0]+|--state-dir\0([^\0]+))(?=\0)" % MARK.encode()
# What an engine may inherit. Everything else of supervisord's environment stays behind: LLAMA_ARG_* would
# reconfigure every server, and SUPERVISOR_SERVER_URL would let a server stop its siblings.
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TMPDIR", "TZ")


class Unconfined(Exception):
    """The engine's policy cannot be enforced, so it must not start; the message says why."""


class BadSpec(Exception):
    """The spec file cannot be used; the message says why."""


def start_time(pid: int) -> str:
    """Identity of a process start: equal strings mean the same process. "" if there is no such process."""
    if sys.platform == "darwin":
        import ctypes

        info = ctypes.create_string_buffer(PROC_BSDINFO_BYTES)
        if _darwin("proc_pidinfo", pid, PROC_PIDTBSDINFO, 0, info, len(info)) != len(info):
            return ""
        return "tv " + " ".join(str(int.from_bytes(info.raw[at : at + 8], "little")) for at in STARTED_AT)
    fields = _linux_stat(pid)
    return f"ticks {fields[19].decode()}" if fields else ""


def _linux_stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; [] if the process is gone, or a zombie.

    A process whose first thread alone has ended looks like a zombie, and lives as long as another thread does.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in (b"Z", b"X") and int(fields[17]) < 2 else fields


# Numbers and signatures of macOS: tests/boundary/test_darwin_headers.py holds them against Apple's headers.
PROC_PIDTBSDINFO = 3
"""Flavour of proc_pidinfo."""
PROC_BSDINFO_BYTES = 136
"""Size of its `proc_bsdinfo`."""
STARTED_AT = (120, 128)
"""Offsets in it of the seconds and microseconds of a process's start."""
PROC_PGRP_ONLY = 2
PROC_PPID_ONLY = 6
MOST_PIDS = 1024
CTL_KERN = 1
KERN_PROCARGS2 = 49
PROCARGS_BYTES = 1 << 20
DARWIN = {
    "proc_pidinfo": ("c_int", "c_int", "c_uint64", "c_void_p", "c_int"),
    "proc_listpids": ("c_uint32", "c_uint32", "c_void_p", "c_int"),
    "sysctl": ("c_void_p", "c_uint", "c_void_p", "c_void_p", "c_void_p", "c_size_t"),
}
"""Functions of libSystem that return int -> ctypes' names of their arguments' types."""


def _darwin(name: str, *arguments: object) -> int:
    """Call one of those functions with declared types: an undeclared argument would be passed as a C int."""
    import ctypes  # 8 ms, and only here

    function = getattr(ctypes.CDLL(None), name)
    function.argtypes, function.restype = [getattr(ctypes, each) for each in DARWIN[name]], ctypes.c_int
    return int(function(*arguments))


def read_spec(path: str) -> dict[str, object]:
    """The spec, checked. Raises BadSpec."""
    try:
        with open(path, encoding="utf-8") as file:
            spec = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise BadSpec(f"cannot read {path}: {error}") from None
    written = spec.get("format") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(written, int) or not 0 < written <= FORMAT:
        raise BadSpec(f"{path} is not of format {FORMAT}; a newer version may have written it")
    argv, env, port = spec.get("argv"), spec.get("env"), spec.get("port")
    if not (isinstance(argv, list) and argv and all(isinstance(item, str) and "\0" not in item for item in argv)):
        raise BadSpec(f"{path}: argv must be a list of strings without NUL")
    if not (isinstance(env, dict) and all(_is_variable(name, env[name]) for name in env)):
        raise BadSpec(f"{path}: env must map names without = to strings without NUL")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise BadSpec(f"{path}: port must be between 1 and 65535, not {port!r:.40}")
    for name in ("program", "host", "cwd", "supervisor_log"):
        if not isinstance(spec.get(name), str) or "\0" in spec[name]:
            raise BadSpec(f"{path}: {name} must be a string")
    return spec


def _is_variable(name: object, value: object) -> bool:
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    return bool(name) and "=" not in name and "\0" not in name + value


def read_note(path: str) -> dict[str, object]:
    """The note of earlier starts. An unreadable note counts as none: it is only history."""
    try:
        with open(path, encoding="utf-8") as file:
            note = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(note, dict) or not isinstance(note.get("format"), int):
        return {}
    return note  # even of a newer format: the process runs, and each field is checked where it is used


def _number(value: object) -> float:
    """A number of a note, 0 for anything else: a damaged note must not keep an engine from starting."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e12 else 0.0


def write_note(path: str, note: dict[str, object]) -> None:
    """Replace the note atomically, and wake its readers.

    A note that cannot be written (disk full) must not keep an engine from starting.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(note, file)
        os.replace(temporary, path)
    except OSError as error:
        say(f"cannot keep {path}: {error}")
    # Nothing else tells them of a start with supervisorctl. The controller has mostly asked for it.
    state = os.path.dirname(os.path.dirname(path))
    ring(state, "sidecar")
    ring(state, "controller", NOW if note.get("refused") else LATER)


def ring(state: str, name: str, sound: bytes = NOW) -> None:
    """Wake the process of that name, if it runs; never blocks. The other end is `state.doorbell`."""
    try:
        bell = os.open(os.path.join(state, f"{name}.bell"), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if stat.S_ISFIFO(os.fstat(bell).st_mode):
            os.write(bell, sound)
    except OSError:
        pass  # full, so it will wake; or it has just ended
    finally:
        os.close(bell)


def environment(spec_env: dict[str, str], inherited: dict[str, str], spec_path: str) -> dict[str, str]:
    """A clean environment: the few inherited names (and locale), the spec's own, and MARK with the spec's path."""
    kept = {name: value for name, value in inherited.items() if name in INHERITED or name.startswith("LC_")}
    return {**kept, **spec_env, MARK: spec_path}


def holder_of(port: int, host: str) -> str | None:
    """Reason why the port is taken, None if it can be bound and no server answers on it.

    Both are checked, because BSD allows to bind `127.0.0.1:p` beside another process's `*:p`.
    """
    family = _socket.AF_INET6 if ":" in host else _socket.AF_INET
    probe = _socket.socket(family, _socket.SOCK_STREAM)
    probe.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    finally:
        probe.close()
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    probe = _socket.socket(family, _socket.SOCK_STREAM)
    probe.settimeout(ANSWER_WAIT_S)
    try:
        answered = probe.connect_ex((target, port)) == 0
        # The system may assign an ephemeral port to the probe itself, which then connects to itself.
        return ANSWERED if answered and probe.getsockname() != probe.getpeername() else None
    finally:
        probe.close()


def last_words(log: str, program: str) -> str:
    """The program's last exit in supervisord's log: `stopped` (on request), `exited` (by itself) or "" without one.

    Always `stopped` if supervisord was restarted since (SIGHUP): the sidecar then ends the engines before supervisord
    does, which logs that as `exited`.
    """
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            tail = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    found = re.findall(rf"(?m) (?:(stopped|exited): {re.escape(program)} \(|supervisord started with pid)", tail)
    return (found[-1] or "stopped") if found else ""


def hold(note: dict[str, object], edition: object, ended: str, now: float) -> tuple[list[float], float]:
    """(starts that count towards a crash loop, time before which not to start; 0 for at once).

    The first restart is at once; from the second crash on the pause doubles from 10 s to 5 min, counted from
    the end of the crashed run. A new spec, an orderly stop, or ten minutes without a start forget all of it.
    """
    noted = note.get("starts")
    starts = [at for each in noted if (at := _number(each))] if isinstance(noted, list) else []
    noted_before = _number(note.get("not_before"))
    not_before = noted_before if noted_before <= now + LONGEST_HOLD_S else 0.0  # else the clock was set back
    forgotten = not starts or now - max(starts[-1], not_before) > FORGET_AFTER_S
    if forgotten or edition_of(note) != edition or ended == "stopped":
        return [], 0.0
    if len(starts) < 2:
        return starts, 0.0
    if noted_before:  # its last crash was held already
        return starts, not_before
    return starts, now + min(LONGEST_HOLD_S, FIRST_HOLD_S * 2 ** min(len(starts) - 2, 16))


def survivor(note: dict[str, object], state: str) -> int:
    """Pid of the program's engine that outlived its supervisord, or 0. `state`: the state directory of this launcher.

    One of another spec too: the controller sees which it is, and lets it finish before it is replaced.
    """
    pid, started = note.get("pid"), note.get("started")
    if not isinstance(pid, int) or pid in (0, os.getpid()) or not started:
        return 0
    return pid if start_time(pid) == started and belongs_to(note, state) else 0


def kill_engine(pid: int, started: str) -> None:
    """Send KILL to exactly this process, if it still exists."""
    if started and start_time(pid) == started:
        import signal  # seldom needed, as in the functions below

        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has just exited by itself


def _group_members(group: int) -> list[int]:
    """Pids of the processes of a process group."""
    if sys.platform == "darwin":
        return listed_pids(PROC_PGRP_ONLY, group)
    stats = {int(name): _linux_stat(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
    return [pid for pid, fields in stats.items() if fields and int(fields[2]) == group]


def listed_pids(flavour: int, of: int) -> list[int]:
    """Pids that libproc's `proc_listpids` lists: of a process group, or of a process's children."""
    import ctypes

    pids = (ctypes.c_int * MOST_PIDS)()
    size = _darwin("proc_listpids", flavour, of, pids, ctypes.sizeof(pids))
    return [pid for pid in pids[: max(0, size) // ctypes.sizeof(ctypes.c_int)] if pid]


def _started_with(pid: int) -> bytes:
    """The arguments and environment a process was started with, as far as they can be read, each ended by a NUL."""
    if sys.platform == "darwin":
        import ctypes

        query, size = (ctypes.c_int * 3)(CTL_KERN, KERN_PROCARGS2, pid), ctypes.c_size_t(PROCARGS_BYTES)
        area = ctypes.create_string_buffer(size.value)
        done = _darwin("sysctl", query, len(query), area, ctypes.byref(size), None, 0)
        return area.raw[: size.value] if done == 0 else b""
    found = b""
    for name in ("cmdline", "environ"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                found += file.read()
        except OSError:
            pass
    return found


def identity(directory: str) -> list[int]:
    """Device and inode of a directory: the same after a rename, others in a copy. [] if there is no such directory."""
    try:
        found = os.stat(directory)
    except (OSError, ValueError):
        return []
    return [found.st_dev, found.st_ino]


def states_of(pid: int) -> list[str]:
    """The state directories that a process names in its arguments and MARK; [] if they cannot be read."""
    found = re.findall(STATE_OF, _started_with(pid))
    return [os.fsdecode(by_mark or by_flag) for by_mark, by_flag in found]


def belongs_to(note: dict[str, object], state: str) -> bool:
    """True if the process of a note runs from this very state directory.

    A copy of a directory has the original's notes: they prove which process it is, and not whose. The note names the
    directory in which it was written. Without that (a restored backup), the process itself decides.
    """
    here, pid = identity(state), note.get("pid")
    if not here or not isinstance(pid, int):
        return False
    return note.get("directory") == here or any(identity(each) == here for each in states_of(pid))


def session_of(note: dict[str, object], state: str) -> int:
    """Session that the processes of a confined engine cannot leave; 0 without one, or by another directory's note."""
    session = note.get("session")
    is_own = note.get("directory") == identity(state)
    return session if is_own and isinstance(session, int) and session > 1 else 0


def _is_kept(pid: int, session: int) -> bool:
    """True if a process is in this session and under a system call filter, as all of a confined engine's are."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return os.getsid(pid) == session and "\nSeccomp:\t2\n" in file.read()
    except OSError:
        return False


def family_path(runs: str, pid: int) -> str:
    """Path of the note of an engine's descendants, which the sidecar writes while the engine lives."""
    return os.path.join(runs, f"{pid}.family")


def _noted_family(pid: int, spec_path: str) -> list[int]:
    """The noted descendants of a dead engine that still live. Their note is removed: its pid may be reused."""
    path = family_path(os.path.dirname(note_path(spec_path)), pid)
    try:
        with open(path, encoding="utf-8") as file:
            noted = json.load(file)
        os.unlink(path)
        return [each for each, born in noted if born and each > 1 and start_time(each) == born]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def sweep_group(pid: int, spec_path: str, session: int = 0) -> list[int]:
    """Send KILL to the processes that a dead engine left behind; returns their pids.

    An engine leads a group of its own. The group's number may have been reused since, so a process is killed only if it
    has the program's MARK, or, since it can erase that, if the engine was confined: its processes can leave neither
    the group nor the session. Those that left the group are killed if they were noted as its descendants.

    `session`: as by `session_of`.
    """
    if pid <= 1 or start_time(pid):
        return []
    try:
        # A process that forks and ends all the time would be another one whenever it is looked at.
        os.killpg(pid, SIGSTOP if session else 0)
        members = _group_members(pid)
    except ProcessLookupError:
        members = []
    except PermissionError:
        members = _group_members(pid)  # as macOS reports for zombies
    mark = re.compile(re.escape(f"{MARK}={spec_path}".encode()) + rb"(\0|$)")
    left = [each for each in members if mark.search(_started_with(each)) or (session and _is_kept(each, session))]
    left += [each for each in _noted_family(pid, spec_path) if each not in left]
    for each in left:
        kill_engine(each, start_time(each))
    if session:
        try:
            os.killpg(pid, SIGCONT)
        except OSError:
            pass  # none is left
    return left


def represent(pid: int, started: str) -> None:
    """Make this process forward signals to an engine that is not its child.

    supervisord's KILL would hit the stand-in and miss the engine, so the stand-in sends its own before that.
    """
    import signal

    def forward(signum: int, _frame: object) -> None:
        if start_time(pid) == started:
            os.kill(pid, signal.SIGKILL if signum == signal.SIGALRM else signum)
            signal.alarm(STAND_IN_KILL_AFTER_S)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(signum, forward)


def confinement(policy: object, by_gate: bool = False) -> Callable[[], None]:
    """The last step before `execve`: put an engine's policy in force. All that may fail is done here already.

    `policy`: of the spec; `False` where this Mac's settings, or our own probe, leave an engine unconfined. None, while
    the policy is not known, is never taken for that. `by_gate`: the caller is a gate, which executes a `gated` engine.
    Raises Unconfined.
    """
    if policy is False:
        return lambda: None
    if not isinstance(policy, dict):
        raise Unconfined("its spec has no policy")
    # Beside this very file, and compiled already; `-I -S` keeps everything else off the path.
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "confinement"))
    enforce = __import__("enforce")
    try:
        prepared = enforce.prepare(policy)
    except (enforce.ConfinementError, OSError) as error:
        raise Unconfined(str(error)) from None
    if policy.get("gated") is True and not by_gate:
        return lambda: None
    return prepared.restrict  # type: ignore[no-any-return]


def wait_for_exit(pid: int, started: str) -> None:
    """Block until the process is gone, without being its parent."""
    import select

    try:
        if sys.platform == "darwin":
            event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
            select.kqueue().control([event], 1)
            return
        if hasattr(os, "pidfd_open"):
            poller = select.poll()
            poller.register(os.pidfd_open(pid), select.POLLIN)
            poller.poll()
            return
    except OSError as error:
        if error.errno == errno.ESRCH:
            return
    while start_time(pid) == started:  # no notification: poll
        time.sleep(0.5)


def say(text: str) -> None:
    """Write one line to the program's own log."""
    sys.stderr.write(f"{SAYS}{text}\n")
    sys.stderr.flush()


def this_process(state: str) -> dict[str, object]:
    """What a note says of the process that writes it: which one it is, and of which state directory."""
    return {"pid": os.getpid(), "started": start_time(os.getpid()), "directory": identity(state)}


def note_path(spec_path: str) -> str:
    """Path of a program's note: in `runs/` beside `specs/`, under the same name."""
    specs, name = os.path.split(spec_path)
    return os.path.join(os.path.dirname(specs), "runs", name)


def edition_of(note: dict[str, object]) -> object:
    """Edition of the spec that a note names."""
    spec = note.get("spec")
    return spec.get("edition") if isinstance(spec, dict) else None


def set_aside(scratch: str) -> None:
    """Move an engine's scratch into the trash, which the controller empties: what is in it may take long to remove.

    Raises OSError.
    """
    try:
        if stat.S_ISDIR(os.lstat(scratch).st_mode):
            if hasattr(os, "chflags"):
                os.chflags(scratch, 0)  # `chflags uchg` would keep it in place
            os.chmod(scratch, 0o700)  # only who may write a directory may move it
            os.rmdir(scratch)
        else:
            os.unlink(scratch)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        trash = os.path.join(os.path.dirname(os.path.dirname(scratch)), "trash")
        os.makedirs(trash, 0o700, exist_ok=True)
        os.rename(scratch, os.path.join(trash, f"{os.path.basename(scratch)}.{os.getpid()}.{time.time_ns()}"))


def bar(run: str) -> str:
    """Reason why a program must not be started, which the controller writes next to its note; "" if it may be."""
    try:
        with open(f"{run.removesuffix('.json')}.bar", encoding="utf-8") as file:
            return file.read() or "its bar is empty"
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f"its bar cannot be read: {error}"


def enter(directory: str, spec_path: str) -> None:
    """Change to a directory. An engine's own, in `scratch/` beside the specs, is made anew and empty."""
    parent, name = os.path.split(directory)
    if parent == os.path.join(os.path.dirname(os.path.dirname(spec_path)), "scratch") and name not in ("", ".", ".."):
        try:
            set_aside(directory)
        except OSError as error:
            say(f"cannot empty {directory}: {error}")
        os.makedirs(directory, 0o700, exist_ok=True)
        os.chmod(directory, 0o700)
    os.chdir(directory)


def refuse(run: str, note: dict[str, object], reason: str, text: str, line: str) -> None:
    """Report why the engine is not started: in the note for our other programs, and on a line of its log."""
    write_note(run, {**note, "refused": reason, "refused_message": text})
    say(line)


def main(path: str) -> int:
    """Exec the engine of the spec at `path`; returns an exit code only if it does not."""
    run = note_path(path)
    state = os.path.dirname(os.path.dirname(path))
    note, now = read_note(run), time.time()
    idle: dict[str, object] = {
        "format": FORMAT,
        "spec": {},
        "launcher_pid": os.getpid(),
        "pid": 0,
        "started": "",
        **UNHELD,
    }
    if pid := survivor(note, state):  # before the spec is read, which may be damaged
        started = str(note["started"])
        represent(pid, started)  # first of all: a TERM from now on is for the engine
        write_note(run, {**note, "launcher_pid": os.getpid(), "refused": "", "refused_message": ""})
        say(f"engine pid {pid} {ADOPTS}")
        wait_for_exit(pid, started)
        return EXIT_UNSEEN  # only its parent, which is gone, would be told how it ended
    try:
        spec, refused, text = read_spec(path), "", ""
        idle["spec"] = spec
    except BadSpec as error:
        refused, text = "BadSpec", str(error)
    if barred := bar(run):
        refused, text = BARRED, barred
    if refused:
        refuse(run, idle, refused, text, f"not started: {text}")
        return EXIT_BAD_SPEC
    argv: list[str] = spec["argv"]  # type: ignore[assignment]
    left = note.get("pid")
    if isinstance(left, int) and (swept := sweep_group(left, path, session_of(note, state))):
        say(f"ended what pid {left} had left behind: {', '.join(map(str, swept))}")
    starts, not_before = hold(
        note, spec.get("edition"), last_words(str(spec["supervisor_log"]), str(spec["program"])), now
    )
    idle["starts"] = starts
    if now < not_before:
        text = f"{CRASHED}{len(starts)} times"
        # The note is read later, so how long from now is for the log alone.
        refuse(
            run,
            {**idle, "not_before": not_before},
            "CrashLoopBackOff",
            text,
            f"{text}; next start in {not_before - now:.0f} s",
        )
        return EXIT_NOT_NOW
    port, host = int(spec["port"]), str(spec["host"])  # type: ignore[call-overload]
    if reason := "" if spec.get("shared") is True else holder_of(port, host):
        text = f"port {port} on {host} cannot be bound: {reason}"
        # The pause after a crash is over: it must not begin anew once the port is free.
        refuse(run, {**idle, "not_before": not_before}, "PortInUse", text, text)
        return EXIT_NOT_NOW
    try:
        enter(str(spec["cwd"]), path)  # first: a policy is for the directories that there are by then
        restrict = confinement(spec.get("confinement"))
        me = {"starts": [*starts, now][-20:], "confined": bool(spec.get("confinement"))}
        me["session"] = os.getsid(0) if me["confined"] and sys.platform != "darwin" else 0
        write_note(run, {**idle, **this_process(state), **me, "refused": "", "refused_message": ""})
        # SIGPIPE stays ignored, as inherited: an engine whose supervisord is killed must survive its next log line.
        whole = environment(spec["env"], dict(os.environ), path)  # type: ignore[arg-type]
        restrict()
        os.execve(argv[0], argv, whole)
    except Unconfined as error:
        text = f"it cannot be confined: {error}"
        refuse(run, idle, UNCONFINED, text, f"not started: {text}")
        return EXIT_UNCONFINED
    except (OSError, ValueError, RuntimeError) as error:
        say(f"cannot start {argv[0]!r}: {error}")
        return EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_CANNOT_EXEC


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
