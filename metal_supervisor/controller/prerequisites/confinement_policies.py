"""Confinement of the services of this Mac: a policy for each, once a trial of its engine's build has worked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from metal_supervisor import launch
from metal_supervisor.confinement.access import Access
from metal_supervisor.confinement.policy import policy
from metal_supervisor.confinement.probe import GGUF, MLX, LoadRequest, Trial, Trials
from metal_supervisor.controller.prerequisites.path_looks import PathLooks
from metal_supervisor.models.metadata import Reading
from metal_supervisor.runtimes import RUNTIMES, Binary, Place, ollama, omlx, shims
from metal_supervisor.runtimes.omlx_models import MODELS
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.arguments import is_opened, parse
from metal_supervisor.spec.fields import LONGEST_ADDRESS
from metal_supervisor.spec.first_request import smallest
from metal_supervisor.spec.shards import shard_names
from metal_supervisor.spec.sources import Artifact
from metal_supervisor.spec.types import Endpoint, Engine, Json, Model, Service
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.programs import program_name

CODE = str(Path(shims.__file__).resolve().parent)
LOOPBACK = "127.0.0.1"
UNSAFE_BUILD = "UnsafeEngineVersion"
OWN = "it is served by the user's own Ollama, which this Mac does not start"


@dataclass(frozen=True)
class Confined:
    """Confinement of one engine at its next start: its policy, or the reason why it has none or must not start."""

    policy: Json | Literal[False]
    """False: it starts unconfined."""
    problem: tuple[str, str] | None = None
    """(reason, message) of why it must not start at all."""
    why: str = ""
    """Why it is not confined, "" if it is."""
    warning: tuple[str, str] | None = None
    """(reason, message) of what is wrong with its build, though it may start."""


class Confinement:
    """Composes policies, and caches the outcomes of trials."""

    def __init__(self, settings: Settings, directory: StateDir, wake: Callable[[], None]) -> None:
        self._mode, self._state, self._wake = settings.confinement, directory, wake
        self.paths = PathLooks(settings, wake)

    @cached_property
    def _trials(self) -> Trials:
        return Trials(self._state.path, Path(launch.__file__), self._wake)

    def of(self, service: Service, binary: Binary, engine: Engine, paths: Sequence[str], port: int) -> Confined | None:
        """The confinement of a service's engine; None while its build is being tried, or a path being looked at.

        `paths`: real ones of its model's files, as they were judged; they are not resolved again.
        """
        found = self._of(service, binary, engine, paths, port)
        danger = RUNTIMES[service.runtime].runs_code(binary)
        if not danger or found is None or found.problem:
            return found
        if found.policy is not False:
            return replace(found, warning=(UNSAFE_BUILD, f"{danger}; until then only its confinement holds it"))
        return replace(found, problem=(UNSAFE_BUILD, f"{danger}; it does not start unconfined, and {found.why}"))

    def _of(self, service: Service, binary: Binary, engine: Engine, paths: Sequence[str], port: int) -> Confined | None:
        if engine.daemon:
            return self._shared(service.runtime, binary)
        found = self.tried(service.runtime, binary)
        if found is None or found.why:
            return found
        scratch = str(self._state.scratch_path(program_name(service.key)))
        opened = self.paths.all_of(_opened(service))
        if opened is None:
            return None
        read = [*dict.fromkeys(paths), *(each.real for each in opened if each.is_file)]
        write = [scratch, *(each.real for each in opened if each.is_directory)]
        return Confined(_policy(_access(service.runtime, binary, port, read, write)))

    def is_looking(self, service: Service) -> bool:
        """True while a path behind an opened flag is still to be looked at: a spec keeps the policy that it has."""
        return self.paths.all_of(_opened(service)) is None

    def tried(self, runtime: str, binary: Binary) -> Confined | None:
        """Outcome for a build of an engine of its own, still without a policy; None while it is being tried."""
        return self._tried(binary.build, lambda scratch, at: self._trial(runtime, binary, scratch, at))

    def daemon(
        self, runtime: str, binary: Binary, port: int, read: Sequence[str], write: Sequence[str]
    ) -> Confined | None:
        """The confinement of a shared daemon; None while its build is being tried.

        `read`: what it may read besides its own. Not looked at: it may be on a disk that hangs.
        """
        found = self._shared(runtime, binary)
        if found is None or found.why:
            return found
        return Confined(_policy(_access(runtime, binary, port, list(dict.fromkeys(read)), write)))

    def _shared(self, runtime: str, binary: Binary) -> Confined | None:
        """Verdict on a daemon's confinement, without a policy; None while its build is being tried.

        It serves as the confinement of the daemon's services as well: their attachers are never confined.
        """
        if self._mode != "off" and not binary.path:
            return self._without(OWN)
        return self._tried(
            f"daemon {binary.build}", lambda scratch, at: self._daemon_trial(runtime, binary, scratch, at)
        )

    def _tried(self, build: str, trial: Callable[[Path, int], Trial]) -> Confined | None:
        """Outcome for a build, still without a policy; None while it is being tried."""
        if self._mode == "off":
            return Confined(False, why="this Mac's --confinement is off")
        verdict = self._trials.look(build, trial)
        if verdict is None:
            return None
        return Confined(False) if verdict.works else self._without(f"confinement does not work here: {verdict.why}")

    def _daemon_trial(self, runtime: str, binary: Binary, scratch: Path, port: int) -> Trial:
        """Trial of a daemon in a state directory of its own, which has to load the shipped model."""
        row = RUNTIMES[runtime].shared
        assert row is not None
        base, models = scratch / runtime, scratch / "models"
        for each in (base, models):
            each.mkdir()
        read, attach = (_ollama_files if runtime == ollama.NAME else _omlx_files)(scratch)
        engine = row.engine(binary, Place("", LOOPBACK, port, None, str(scratch), daemon_models=str(models)), {})
        path, body = smallest("chat", "probe")
        probe = replace(engine.probe, first_path=path, first_body=body)
        access = _access(runtime, binary, port, read, [str(base), str(models)])
        return Trial(engine.argv, engine.env, probe, access, port, attach)

    def _without(self, why: str) -> Confined:
        if self._mode != "required":
            return Confined(False, why=why)
        text = f"{why}, and this Mac's --confinement is required; set it to on, or use another runtime"
        return Confined(False, ("ConfinementUnavailable", text), why)

    def _trial(self, runtime: str, binary: Binary, scratch: Path, port: int) -> Trial:
        """Trial of an engine as a service of this runtime would have it, with the shipped model."""
        mlx = "gguf" not in RUNTIMES[runtime].formats
        path = str(MLX if mlx else GGUF)
        model = Model("", "probe", "", 0, path, "mlx" if mlx else "gguf", None, None, artifact=Artifact(path))
        endpoint = Endpoint("probe", 8080, "", "ClusterIP", None)
        service = Service(
            "", "probe", "", 0, model, runtime, 1, False, endpoint, "chat", "normal", None, {"contextSize": 256}
        )
        place = Place(path, LOOPBACK, port, 1, self._state.home, Reading(None))
        engine = RUNTIMES[runtime].engine(service, binary, place)
        access = _access(runtime, binary, port, [os.path.realpath(path)], [str(scratch)])
        return Trial(engine.argv, engine.env, engine.probe, access, port)


def _omlx_files(scratch: Path) -> tuple[list[str], LoadRequest]:
    """(paths that oMLX is to read, how it is given the shipped model), with all it expects in the state directory."""
    served, key = scratch / omlx.SERVED, secrets.token_urlsafe(16)
    served.mkdir(parents=True)
    (scratch / omlx.KEY).write_text(key)
    (scratch / "current").symlink_to(CODE)
    body = json.dumps({"path": str(MLX), "settings": {}})
    return [str(served), str(MLX)], LoadRequest("PUT", f"{MODELS}/probe", body, key)


def _ollama_files(scratch: Path) -> tuple[list[str], LoadRequest]:
    """As `_omlx_files`, for Ollama."""
    gate = scratch / "current" / "ollama-gate"
    gate.parent.mkdir()
    gate.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -m {shims.__name__}.ollama_engine "$@"\n')
    gate.chmod(0o700)
    digest = hashlib.sha256(GGUF.read_bytes()).hexdigest()
    blobs = scratch / "models" / "blobs"
    blobs.mkdir()
    (blobs / f"sha256-{digest}").symlink_to(GGUF)
    asked = {"model": "probe", "files": {"probe.gguf": f"sha256:{digest}"}, "stream": False}
    return [str(GGUF)], LoadRequest("POST", "/api/create", json.dumps(asked))


def _access(runtime: str, binary: Binary, port: int, read: Sequence[str], write: Sequence[str]) -> Access:
    """System access of a runtime's process: its own code, and what this one may read, write and listen on."""
    base = RUNTIMES[runtime].access(binary, CODE)
    return replace(base, read=(*base.read, *read), write=tuple(write), bind=(port,))


def _policy(access: Access) -> Json:
    return policy(access, sys.platform, os.path.realpath(Path.home()))


def _opened(service: Service) -> list[str]:
    """Paths that a manifest names behind flags which the administrator opened, at their own risk."""
    vocabulary = RUNTIMES[service.runtime].vocabulary
    if not service.allowed_args or vocabulary is None:
        return []
    given = parse(service.extra_args, vocabulary.grammar).items
    opened = [item for item in given if is_opened(item, item.flag, service.allowed_args)]
    # A longer one is no file's, and takes memory that grows with the square of its parts.
    return [each for item in opened for each in item.values if each.startswith("/") and len(each) <= LONGEST_ADDRESS]


def _parts(path: str) -> list[str]:
    """A model file with all of its shards, or a directory."""
    place = Path(path)
    return [str(place.with_name(name)) for name in shard_names(place.name)] if path else []


def require_policies(directory: StateDir, mode: str) -> None:
    """Where confinement is required, start no engine from a spec without a policy, until the controller composes one.

    An engine that was started before that setting may crash before the first pass. An attacher needs no policy.
    `mode`: as `--confinement`.
    """
    if mode != "required":
        return
    for path in (directory.path / "specs").glob("*.json"):
        spec = directory.spec_of(path.stem)
        if spec.get("confinement") is False and spec.get("shared") is not True:
            with contextlib.suppress(OSError):  # on a full disk the engine keeps running; its next start reports why
                write_atomic(path, json.dumps({**spec, "confinement": None}, indent=1, sort_keys=True) + "\n")
