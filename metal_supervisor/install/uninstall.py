"""`metal-supervisor uninstall`: removes what install put on this Mac, and reports what it leaves.

Weights cost hours to fetch and objects of the embedded API cannot be fetched at all, so both stay. Credentials, specs
with secrets in them and files that only a running system needs are removed. In a cluster, this Mac's endpoints are
deleted while there still is a credential for it; without one, its peers and the reaper have withdrawn them anyhow.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from metal_supervisor.cluster.kube import BadKubeconfig, Kube, KubeError
from metal_supervisor.cluster.manifests import api_path, node_lease_name
from metal_supervisor.confinement import probe
from metal_supervisor.host import launchd
from metal_supervisor.host import machine as host
from metal_supervisor.host.powermetrics import FRAGMENT
from metal_supervisor.install.checks import KEPT, is_state_directory, refuse_anothers, refuse_running
from metal_supervisor.install.plan import (
    CLUSTER,
    MARK,
    NOTE_FILE,
    PROGRAMS,
    SETTINGS_FILE,
    InstallPaths,
    logs_link,
    places,
    read,
)
from metal_supervisor.install.steps import FileStep, InstallError, Machine, Say, ask_for_sudo
from metal_supervisor.models.inventory import files_of
from metal_supervisor.placement.leases import NODE
from metal_supervisor.settings import loader
from metal_supervisor.settings.schema import SECRET_KEYS, Settings
from metal_supervisor.spec.sizes import amount
from metal_supervisor.state import own_processes, trees
from metal_supervisor.state.directory import APPLIED_FILE, StateDir
from metal_supervisor.state.home import DIRECTORIES, FORMAT_FILE
from metal_supervisor.state.reports import CONTROLLER_REPORT

PASSING = (
    *(name for name in DIRECTORIES if name not in KEPT),
    "kubectl-cache",
    "omlx",
    "served",
    NOTE_FILE,
    "log-level",
    CLUSTER,
    "apiserver.json",
    "kubeconfig",
    CONTROLLER_REPORT,
    "controller.bell",
    "sidecar.bell",
    "overrides.json",
    "settings.json",
    "session",
    "supervisord.conf",
    "supervisord.pid",
    "supervisor.sock",
    "run.lock",
    "omlx.key",
    "chip.json",
    "power.json",
    "power.bell",
    "cordon",
    "handover",
    "app",
    FORMAT_FILE,
    "confinement.json",
    "gateway.json",
    "gateway.bell",
    "gateway.sock",
    "gateway.keys",
    SECRET_KEYS,
    "ollama",
    "ollama.made.lock",
    "use",
)
"""Files that only a running system needs, or that must not be left behind."""
DATABASE = tuple(f"apiserver.db{end}" for end in ("", "-wal", "-shm"))
USERS = (SETTINGS_FILE, f"{SETTINGS_FILE}.before", *DATABASE, APPLIED_FILE, "node", "ollama.made", *KEPT)
"""Files of the user; --purge removes them too."""


@dataclass(frozen=True)
class Found:
    """The installation found on this Mac."""

    places: tuple[InstallPaths, ...]
    """Those with a loaded job or an existing file."""
    settings: Settings
    steps: tuple[FileStep, ...]
    ours: bool
    """The directory is recognisably a state directory; False also if it is missing."""


def find(machine: Machine, state: Path) -> Found:
    """Look for what install may have made; change nothing.

    Raises InstallError if it belongs to another system, or if the directory is not recognisably a state directory but
    has files of the names that would be removed.
    """
    here, steps, known = [], [], is_state_directory(state)
    for agent in (False, True):
        where = places(machine, state, agent)
        known = refuse_anothers(where) or known
        ours = [FileStep(where.plist, root=where.root)]
        for name in PROGRAMS:
            if MARK.encode() in read(where.programs / name):
                ours.append(FileStep(where.programs / name, root=where.root))
        if any(step.due() for step in ours) or where.job(machine) is not None:
            here.append(where)
            steps += ours
    logs = logs_link(machine)
    if logs.is_symlink():
        steps.append(FileStep(logs))
    settings = Settings(state_dir=str(state))
    strange = [] if known else sorted(path.name for path in _going(settings, purge=True))
    if strange:
        text = f"{state} is not a state directory of metal-supervisor, though it has {', '.join(strange)}"
        raise InstallError(f"{text}; nothing is removed; name the directory of the system with --state-dir")
    with contextlib.suppress(loader.ConfigError):
        settings = loader.load_good(state)[0]
    return Found(tuple(here), settings, tuple(step for step in steps if step.due()), known)


def show(found: Found, machine: Machine, purge: bool, say: Say) -> None:
    """Print everything that would be done; change nothing."""
    for where in found.places:
        if where.job(machine):
            say(f"run    {where.launchctl(machine).line('bootout', f'{where.domain}/{where.label}')}")
    for step in found.steps:
        for line in step.lines():
            say(line)
    for path in _going(found.settings, purge):
        say(f"remove {path}")
    for line in left(found.settings, machine, purge):
        say(line)


def uninstall(found: Found, machine: Machine, purge: bool, say: Say) -> None:
    """Shut the system down in order and remove it. Raises InstallError, LaunchdError, OSError."""
    settings = found.settings
    loaded = [where for where in found.places if where.job(machine)]
    if not loaded:
        refuse_running(settings.state_path)
    if any(where.root for where in found.places):
        ask_for_sudo(machine, "the job's file and launchd's commands are root's", say)
    for where in loaded:
        bound = f"at most {settings.stop_timeout:g} s"
        say(f"stopping  {where.domain}/{where.label}: answers end ({bound}), then the models")
        where.launchctl(machine).unload(where.label, launchd.exit_timeout_s(settings.stop_timeout))
    directory = StateDir(settings.state_path)
    own_processes.end_all(own_processes.left_over(directory))
    probe.end_left(directory.path)
    for line in _leave_cluster(directory, settings):
        say(line)
    for step in found.steps:
        step.do(machine)
        say(f"removed   {machine.shown(step.path)}")
    for path in _going(settings, purge):
        if path.is_dir() and not path.is_symlink():
            trees.remove(path)
        else:
            path.unlink()
    directory.remove_link()
    with contextlib.suppress(OSError):
        settings.state_path.rmdir()  # only if nothing is left in it
    for line in left(settings, machine, purge):
        say(line)


def _going(settings: Settings, purge: bool) -> Iterator[Path]:
    """The files and directories to remove from the state directory, by name: it may also have foreign ones.

    What the settings name as the user's own stays, wherever it is.
    """
    own = [settings.store_path, Path(settings.ollama_models_path)]
    own += [Path(settings.gateway_keys)] if settings.gateway_keys else []
    kept = [path.expanduser().resolve() for path in own]
    for name in (*PASSING, *(USERS if purge else ())):
        path = settings.state_path / name
        if os.path.lexists(path) and not any(each.is_relative_to(path) for each in kept):
            yield path
        yield from settings.state_path.glob(f".{name}.*.tmp")  # of a process that was killed while it wrote the file


def _leave_cluster(directory: StateDir, settings: Settings) -> Iterator[str]:
    """Delete this Mac's endpoints and Lease, as far as the cluster answers; yield lines about it."""
    # Its own Lease is there without any service, in the namespace that it watches.
    if other := directory.other_home():
        yield f"left      the endpoints of {other}, which this directory is a copy of, or was moved from"
        return
    watched = {settings.namespace} - {""}
    namespaces = sorted({record.namespace for record in directory.records()[0].values()} | watched)
    if settings.embedded or not namespaces:
        return
    node = host.node_name(directory.path, settings.node_name)
    try:
        kube = Kube(settings.kubeconfig_path, settings.context)
        for namespace in namespaces:
            slices = api_path("endpointslices", namespace)
            for item in kube.request("GET", slices, {"labelSelector": f"{NODE}={node}"}).get("items") or []:
                kube.request("DELETE", f"{slices}/{item['metadata']['name']}")
            with contextlib.suppress(KubeError):
                kube.request("DELETE", api_path("leases", namespace, node_lease_name(node)))
        yield f"deleted   this Mac's endpoints in {', '.join(namespaces)}"
    except (BadKubeconfig, KubeError) as error:
        yield f"left      this Mac's endpoints in {', '.join(namespaces)}, out of service: {error}"


def left(settings: Settings, machine: Machine, purge: bool) -> Iterator[str]:
    """Lines about what stays on the disk, its size, and how to remove it."""
    store = settings.store_path
    if size_bytes := sum({each.inode: each.size_bytes for each in files_of(store)}.values()):
        how = f"rm -r {shlex.quote(str(store))}"
        yield f"left      {amount(size_bytes)} of models in {machine.shown(store)}; remove them with: {how}"
    kept = () if purge else USERS
    users = [path for name in kept if (path := settings.state_path / name).exists() and path != store]
    if users:
        names = ", ".join(path.name for path in users)
        yield f"left      {names} in {machine.shown(settings.state_path)}; uninstall --purge removes them"
    rule = machine.root / FRAGMENT.lstrip("/")
    if os.path.lexists(rule):
        how = f"make uninstall-powermetrics-sudo, or sudo rm {rule}"
        yield f"left      {rule}, by which sudo lets the power of the chip be measured; remove it with: {how}"
