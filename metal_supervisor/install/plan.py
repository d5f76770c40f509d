"""Plan of an installation on this Mac: the files and their content, decided before anything is changed.

Settings live in their own file and not in launchd's, so that a change of settings never touches the job. Edits of
either by hand are kept.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metal_supervisor.cluster import kubeconfig_copy
from metal_supervisor.cluster.kubeconfig_copy import TOKEN_FILE, Copy
from metal_supervisor.host import launchd
from metal_supervisor.host.launchctl import Launchctl, LoadedJob
from metal_supervisor.host.launchd import LABEL
from metal_supervisor.install.steps import SUDO, FileStep, InstallError, Machine
from metal_supervisor.settings import loader as config
from metal_supervisor.settings.checks import kubeconfigs
from metal_supervisor.settings.schema import Settings
from metal_supervisor.spec.document import string
from metal_supervisor.state.reports import read_object

SETTINGS_FILE = "metal-supervisor.toml"
CLUSTER = "cluster"
SOURCE = "source"
"""Note of the digest and the path of the kubeconfig that was copied."""
NOTE_FILE = "installed.json"
PROGRAMS = ("metal-supervisor", "supervisorctl")
"""Scripts that users call."""
MARK = "metal-supervisor install wrote this"
HEADER = """\
# Settings of metal_supervisor on this Mac; conf/metal-supervisor.toml of the project has them all.
# After an edit: metal-supervisor upgrade. No model is stopped for it.
"""
SCRIPT = """\
#!/bin/sh
# {mark}; `metal-supervisor uninstall` removes it.
# What it starts is the user's to write, and so an engine's: root runs it only where root is that user.
[ "$(/usr/bin/id -u)" != 0 ] || [ {uid} = 0 ] || {{ echo "run this as user {uid}, not as root" >&2; exit 1; }}
[ -n "$METAL_SUPERVISOR_STATE_DIR" ] || METAL_SUPERVISOR_STATE_DIR={state}
export METAL_SUPERVISOR_STATE_DIR
exec {state}/current/{name} "$@"
"""


@dataclass(frozen=True)
class InstallOrder:
    """Options of `install`."""

    kubeconfig: Path | None
    """Kubeconfig to copy; None: see `embedded`."""
    embedded: bool
    """Use the embedded API. With neither, the existing settings decide."""
    values: Mapping[str, Any]
    """Settings from flags and the environment."""
    config: Path | None
    """Settings file to begin with."""
    agent: bool
    force: bool


@dataclass(frozen=True)
class InstallPaths:
    """Paths of an installation on one Mac."""

    state: Path
    plist: Path
    programs: Path
    """Directory of the scripts that users call."""
    domain: str
    root: bool
    """Plist and programs belong to root."""
    label: str = LABEL

    def launchctl(self, machine: Machine) -> Launchctl:
        """launchctl for the job's domain."""
        return Launchctl(machine.run, self.domain, (SUDO,) if self.root else (), machine.pause)

    def job(self, machine: Machine) -> LoadedJob | None:
        """The loaded job, None if there is none. Raises LaunchdError."""
        return self.launchctl(machine).job(self.label)

    @property
    def settings(self) -> Path:
        return self.state / SETTINGS_FILE

    @property
    def kubeconfig(self) -> Path:
        """Our copy of the cluster's kubeconfig."""
        return self.state / CLUSTER / "kubeconfig"

    @property
    def note(self) -> Path:
        """Digests of what launchd has loaded and of what its programs were started with."""
        return self.state / NOTE_FILE


def places(machine: Machine, state: Path, agent: bool) -> InstallPaths:
    """The usual paths for a LaunchDaemon, or for a LaunchAgent."""
    name = f"{machine.label}.plist"
    if agent:
        library = machine.home / "Library" / "LaunchAgents"
        programs = machine.home / ".local" / "bin"
        return InstallPaths(state, library / name, programs, f"gui/{machine.uid}", False, machine.label)
    library = machine.root / "Library" / "LaunchDaemons"
    return InstallPaths(state, library / name, machine.root / "usr" / "local" / "bin", "system", True, machine.label)


def logs_link(machine: Machine) -> Path:
    """The link to the logs, where a Mac's Console looks for a user's."""
    return machine.home / "Library" / "Logs" / "metal-supervisor"


@dataclass(frozen=True)
class InstallPlan:
    """Steps of an installation, and its result."""

    places: InstallPaths
    settings: Settings
    steps: tuple[FileStep, ...]
    plist: bytes
    """Content that the property list will have."""
    notes: tuple[str, ...]

    def due(self) -> tuple[FileStep, ...]:
        """The steps that would change something."""
        return tuple(step for step in self.steps if step.due())


def plan(order: InstallOrder, machine: Machine) -> InstallPlan:
    """Make the plan for this Mac; change nothing. Raises InstallError, ConfigError, BadKubeconfig."""
    state = Path(str(order.values.get("state_dir", machine.home / ".metal-supervisor"))).absolute()
    where = places(machine, state, order.agent)
    text, copy = _settings(order, where)
    settings = _checked(text, where)
    steps = _copied(where, copy) if copy else []
    before = read(where.settings)
    if order.config is not None and before not in (b"", text.encode()):
        steps.append(FileStep(where.settings.with_suffix(".toml.before"), before))
    steps.append(FileStep(where.settings, text.encode()))
    if settings.embedded:
        steps += [FileStep(where.kubeconfig.with_name(name)) for name in ("kubeconfig", TOKEN_FILE, SOURCE)]
    notes = []
    plist = read(where.plist)
    if plist and launchd.is_edited(plist) and not order.force:
        notes.append(f"{where.plist} was edited by hand and stays; --force writes ours")
    else:
        job = launchd.Job(
            machine.user,
            machine.group,
            str(machine.home),
            str(state),
            settings.stop_timeout,
            order.agent,
            where.label,
        )
        plist = launchd.rendered((config.launchd_dir() / f"{LABEL}.plist").read_bytes(), job)
        steps.append(FileStep(where.plist, plist, 0o644, where.root))
    if copy is not None and copy.plugin:
        notes.append(f"the kubeconfig's command {copy.plugin} has to be in {launchd.path_of(str(machine.home))}")
    for name in PROGRAMS:
        script = where.programs / name
        if os.path.lexists(script) and MARK.encode() not in read(script):
            notes.append(f"{script} is not ours and stays; ours is {state}/current/{name}")
        else:
            text = SCRIPT.format(mark=MARK, state=shlex.quote(str(state)), name=name, uid=machine.uid)
            steps.append(FileStep(script, text.encode(), 0o755, where.root))
    steps.append(FileStep(logs_link(machine), state / "log"))
    return InstallPlan(where, settings, tuple(steps), plist, tuple(notes))


def _settings(order: InstallOrder, where: InstallPaths) -> tuple[str, Copy | None]:
    """(text of the settings file, copy of the kubeconfig to install, if any)."""
    text, name = _text(order, where), str(where.settings)
    source_file = order.config or where.settings
    written = config.parsed(text, str(source_file))
    found = config.placed(written, source_file.absolute().parent)
    moved = {name: found[name] for name, value in written.items() if order.config and value != found[name]}
    values = {**moved, **order.values}
    values.pop("state_dir", None)
    if order.embedded:
        _refuse_context(values, "")
        return config.edited(text, {**values, "kubeconfig": "", "context": ""}, name), None
    named = str(order.kubeconfig or values.get("kubeconfig") or found.get("kubeconfig", ""))
    source = Path(os.pathsep.join(str(each.absolute()) for each in kubeconfigs(named)))
    # Uninstall removes our copy, and leaves the settings that name it.
    gone = bool(named) and source == where.kubeconfig and not source.exists()
    if gone or (not named and "kubeconfig" not in found):
        raise InstallError(
            "say which cluster: --cluster KUBECONFIG, or --embedded for the one that we bring along "
            "(with make: METAL_KUBECONFIG=KUBECONFIG or EMBEDDED=1)"
        )
    if not named or source == where.kubeconfig:
        _refuse_context(values, _kept_context(where) if named else "")
        return config.edited(text, values, name), None
    if order.kubeconfig and not any(map(Path.is_file, kubeconfigs(named))):
        raise InstallError(f"--cluster {source}: there is no such file; name the kubeconfig of the cluster")
    context = str(values.get("context") or found.get("context", ""))
    if not context and _taken(where)[1] == str(source):
        context = _kept_context(where)  # the same file again: keep its chosen context
    copy = kubeconfig_copy.copy(source, context)
    return config.edited(text, {**values, "kubeconfig": str(where.kubeconfig), "context": ""}, name), copy


def _text(order: InstallOrder, where: InstallPaths) -> str:
    """The settings to begin with. Raises InstallError."""
    if order.config is None:
        try:
            return where.settings.read_text("utf-8") if where.settings.exists() else HEADER
        except UnicodeDecodeError as error:
            raise InstallError(f"{where.settings} cannot be read: {error}; write it in UTF-8") from None
    try:
        return order.config.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InstallError(f"--config: {order.config} cannot be read: {error}") from None


def _refuse_context(values: Mapping[str, Any], kept: str) -> None:
    """Raise InstallError for a context without the kubeconfig that has it. `kept`: the context of our copy."""
    context = str(values.get("context", ""))
    if context not in ("", kept):
        raise InstallError(f"--context {context} needs --cluster KUBECONFIG: of a cluster, one context alone is kept")


def _kept_context(where: InstallPaths) -> str:
    """The context of our copy of a kubeconfig, "" without one."""
    return string(read_object(where.kubeconfig), "current-context")


def _taken(where: InstallPaths) -> tuple[str, str]:
    """(digest of the kubeconfig that was copied, its path), "" for both if none was."""
    digest, _, file = read(where.kubeconfig.with_name(SOURCE)).decode("utf-8", "replace").strip().partition("\n")
    return digest, file


def _checked(text: str, where: InstallPaths) -> Settings:
    """The settings of a text. Raises ConfigError, InstallError."""
    found = config.placed(config.parsed(text, str(where.settings)), where.settings.parent)
    if "state_dir" in found and Path(found["state_dir"]).expanduser() != where.state:
        raise InstallError(f"state_dir in the settings is not {where.state}; remove it there, or give --state-dir")
    return Settings(**{**found, "state_dir": str(where.state)})


def read(path: Path) -> bytes:
    """Content of a file, b"" if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _copied(where: InstallPaths, copy: Copy) -> list[FileStep]:
    """Steps for the copy's files. One taken already is not written again: its token may have been renewed since."""
    digest = hashlib.sha256(f"{copy.kubeconfig}\0{copy.token}".encode()).hexdigest()
    note = FileStep(where.kubeconfig.with_name(SOURCE), f"{digest}\n{copy.file}\n".encode())
    if _taken(where)[0] == digest and where.kubeconfig.exists():
        return [note]
    token = where.kubeconfig.with_name(TOKEN_FILE)
    return [
        FileStep(where.kubeconfig, copy.kubeconfig.encode(), secret=True),
        FileStep(token, copy.token.encode() or None, secret=True),
        note,
    ]
