"""Boot: prepare the state directory, clean up after the last supervisord, and become supervisord.

supervisord refuses to start over one bad file, and a predecessor that was killed leaves its children
running: it would start a second copy of every model. So boot makes the directories and the static
configuration, puts bad files aside, ends what was left of our own programs, and leaves a running engine
to its launcher, which stands in for it. Every finding is printed on a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from metal_supervisor import launch
from metal_supervisor.controller import leftovers
from metal_supervisor.controller.leftovers import Say
from metal_supervisor.controller.prerequisites.confinement_policies import require_policies
from metal_supervisor.controller.program_files import put_aside_refused
from metal_supervisor.host import machine, processes
from metal_supervisor.runtimes import metal_device, shims
from metal_supervisor.settings.loader import Overrides, Settings, save_overrides
from metal_supervisor.state import own_processes
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.own_processes import CannotBoot
from metal_supervisor.supervisord.client import Supervisord

OPTIONAL_PROGRAMS = ("caffeinate",)
"""Programs of the system that not every Mac has; an upgrade takes over their sections, and nothing else of them."""
TEMPLATES = Path(__file__).parent / "templates"
"""Parts of supervisord's own configuration."""
SIDECAR_STOP_S = 10
HANDOVER_FILE = "handover"
"""While this file exists, nothing may start: an installer is exchanging the job that starts everything."""
HANDOVER_S = 60.0
LAUNCHD_LOG_BYTES = 4 << 20
SCRIPTS = {
    "metal-supervisor": "metal_supervisor",
    "attacher": "metal_supervisor.runtimes.model_attacher",
    "ollama-gate": "metal_supervisor.runtimes.shims.ollama_engine",
}
LAUNCH = """\
# The launcher from its bytecode: as a script it would be compiled at each start.
import sys
sys.path.insert(0, {package!a})
import launch
sys.exit(launch.main(sys.argv[1]))
"""
CTL = """\
for word do
  case $word in -c* | --configuration* | -s* | --serverurl*) exec {python} -I -m supervisor.supervisorctl "$@" ;; esac
  case $word in -*) ;; *) break ;; esac
done
exec {python} -I -m supervisor.supervisorctl -c {conf} "$@"
"""
"""supervisorctl for this system, unless the reader says which; it takes no option twice."""


def prepare(settings: Settings, overrides: Overrides, say: Say) -> StateDir:
    """Make the state directory ready for a supervisord. Raises CannotBoot, StateError."""
    directory = StateDir(settings.state_path)
    directory.create()
    if Supervisord(directory.socket).answers():
        raise CannotBoot(f"a supervisord runs on {directory.path} already; see: metal-supervisor status")
    if pid := processes.supervisord_of(directory.path):
        text = f"supervisord (pid {pid}) runs on {directory.path} and does not answer: its socket or the directory"
        raise CannotBoot(f"{text} was replaced while it ran. Stop it and its engines first: kill {pid}")
    directory.remove_unfinished()
    save_overrides(directory.path, overrides)
    leftovers.rehome(directory, say)
    require_policies(directory, settings.confinement)
    link_current(directory)
    leftovers.sweep(directory, say)
    leftovers.forget_families(directory)
    leftovers.renew_sections(directory, settings)
    for name, reason in put_aside_refused(directory):
        say(f"put {name} aside: {reason}")
    leftovers.hold_without_metal(directory, metal_device.question_of(settings), say)
    if settings.embedded:
        embedded_access(directory)  # after the sweep, which frees the port that its predecessor held
    write_conf(directory, settings)
    return directory


def command(directory: StateDir) -> list[str]:
    """The supervisord command line for a prepared state directory."""
    module = "metal_supervisor.supervisord.daemon"
    return [sys.executable, "-I", "-m", module, "-n", "-c", f"{directory.home}/supervisord.conf"]


def environment() -> dict[str, str]:
    """supervisord's environment: ours without what would silently steer an engine or a client."""
    steering = ("LLAMA_", "SUPERVISOR_", "METAL_SUPERVISOR_", "MAKE", "MFLAGS")
    return {key: value for key, value in os.environ.items() if key != "KUBECONFIG" and not key.startswith(steering)}


def boot(settings: Settings, overrides: Overrides, say: Say) -> None:
    """Entry point for launchd: prepare the state directory, then exec supervisord. Raises CannotBoot, StateError."""
    os.umask(0o077)
    _shorten_log()
    _wait_for_handover(settings.state_path, say)
    directory = prepare(settings, overrides, say)
    arguments = command(directory)
    os.execve(arguments[0], arguments, environment())


def _shorten_log() -> None:
    """Truncate the file that launchd writes our output to once it is long: launchd never rotates it."""
    with contextlib.suppress(OSError):
        found = os.fstat(2)
        if stat.S_ISREG(found.st_mode) and found.st_size > LAUNCHD_LOG_BYTES:
            os.ftruncate(2, 0)


def _wait_for_handover(state: Path, say: Say) -> None:
    """Wait while an installer replaces the job; a marker older than HANDOVER_S is ignored."""
    marker, told = state / HANDOVER_FILE, False
    while True:
        try:
            age_s = time.time() - marker.stat().st_mtime
        except OSError:
            return
        if not 0 <= age_s < HANDOVER_S:
            return
        if not told:
            say("waiting: an installation is under way")
            told = True
        time.sleep(0.1)


def start(directory: StateDir) -> subprocess.Popen[bytes]:
    """Start supervisord as a child in a session of its own, so that a Ctrl-C does not reach it directly."""
    with (directory.path / "log" / "boot.log").open("ab") as log:
        return subprocess.Popen(
            command(directory),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            umask=0o077,
        )


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def _replace_link(link: Path, target: str) -> None:
    if link.is_symlink() and os.readlink(link) == target:  # noqa: PTH115 - compared as text
        return
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def link_current(directory: StateDir) -> None:
    """Point `current/` at this installation: sections name it, so an upgrade changes no section."""
    current = directory.path / "current"
    # Unresolved: Homebrew's own link survives an upgrade of Python, what it points at does not.
    _replace_link(current / "python", getattr(sys, "_base_executable", "") or os.path.realpath(sys.executable))
    for name in ("mlx_engine.py", "omlx_engine.py"):
        _replace_link(current / name, str(Path(shims.__file__).absolute().with_name(name)))
    write_atomic(current / "launch.py", LAUNCH.format(package=str(Path(launch.__file__).absolute().parent)))
    python = shlex.quote(sys.executable)
    scripts = {name: f'exec {python} -I -m {module} "$@"\n' for name, module in SCRIPTS.items()}
    scripts["supervisorctl"] = CTL.format(python=python, conf=shlex.quote(f"{directory.home}/supervisord.conf"))
    for name, text in scripts.items():
        _write_script(current / name, text)


def _write_script(path: Path, text: str) -> None:
    # With its mode: an upgrade replaces it while supervisord may start it at any moment.
    write_atomic(path, f"#!/bin/sh\n{text}", mode=0o700)
    path.chmod(0o700)


def _parts(settings: Settings) -> Iterator[str]:
    """The templates that these settings ask for."""
    yield "supervisord.conf"
    if settings.embedded:
        yield "apiserver.conf"
    if settings.gateway_on:
        yield "gateway.conf"
    if settings.apple_power_enabled:
        yield "power.conf"
    if _keeps_awake(settings):
        yield "caffeinate.conf"


def _keeps_awake(settings: Settings) -> bool:
    """True if the configured program that keeps this Mac awake exists and is executable."""
    return machine.executable(settings.caffeinate) is not None


def write_conf(directory: StateDir, settings: Settings) -> None:
    """Write supervisord's own configuration; `models.d` is the controller's."""
    text = "".join((TEMPLATES / part).read_text("utf-8") for part in _parts(settings))
    text = text.replace("@HOME@", directory.home).replace("@SOCKET@", directory.socket)
    text = text.replace("@STOP_WAIT@", str(int(settings.stop_timeout) + SIDECAR_STOP_S))
    write_atomic(directory.path / "supervisord.conf", text)
    if _keeps_awake(settings):
        # No -d: a display that is kept on costs the GPU. supervisord is the parent, which it must not outlive.
        program = shlex.quote(str(Path(settings.caffeinate).expanduser()))
        _write_script(directory.path / "current" / "awake", f"exec {program} -i -s -w $PPID\n")


def embedded_access(directory: StateDir) -> tuple[int, str]:
    """(port, path prefix) of the embedded API; chosen once, and anew if the port was taken meanwhile.

    After a port change the old prefix counts as leaked: clients have sent it to the new listener on the old port.
    """
    path = directory.path / "apiserver.json"
    try:
        port, prefix = own_processes.saved_access(directory)
    except CannotBoot:
        port, prefix = 0, ""
    if not port or not processes.port_free(port, "127.0.0.1"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port, prefix = probe.getsockname()[1], f"/k-{secrets.token_urlsafe(24)}"
    write_atomic(path, json.dumps({"port": port, "prefix": prefix}) + "\n")
    write_atomic(directory.path / "kubeconfig", kubeconfig(f"http://127.0.0.1:{port}{prefix}"))
    return port, prefix


def kubeconfig(server: str) -> str:
    """A kubeconfig as JSON, which is YAML."""
    context = {"cluster": "embedded", "user": "embedded", "namespace": "default"}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "embedded", "cluster": {"server": server}}],
        "users": [{"name": "embedded", "user": {}}],
        "contexts": [{"name": "embedded", "context": context}],
        "current-context": "embedded",
    }
    return json.dumps(content, indent=1) + "\n"
