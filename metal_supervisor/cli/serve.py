"""`metal-supervisor serve SOURCE`: from the name of a model to its URL.

What it applies is what a user would write: a Model and an InferenceService, which `--print` shows instead. If no system
runs, this command is one, as `metal-supervisor run` is, until Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import yaml

from metal_supervisor.cli import fit, foreground
from metal_supervisor.cli.changes import commands_for, shown, state_flag
from metal_supervisor.cli.model_source import ServedModel, name_of, question, resolve
from metal_supervisor.cli.render import DownloadBars
from metal_supervisor.cli.services import gateway_url, is_up, once_up, own_url
from metal_supervisor.cli.terminal import INTERRUPTED, USAGE, CommandError
from metal_supervisor.cluster.answers import missing
from metal_supervisor.cluster.kube import Kube, KubeError, find
from metal_supervisor.cluster.manifests import api_path, metal_ready
from metal_supervisor.cluster.reflector import key_of
from metal_supervisor.cluster.report import CRASH_LOOP, HUNG
from metal_supervisor.controller.prerequisites import own_ollama
from metal_supervisor.controller.resource_filter import policy_of
from metal_supervisor.host.machine import NoBinary
from metal_supervisor.models import model_files
from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.model_directory import ModelDirectory
from metal_supervisor.models.remote.origins import locate
from metal_supervisor.models.remote.web import Client
from metal_supervisor.models.store_context import lax_rules
from metal_supervisor.runtimes import RUNTIMES, builds
from metal_supervisor.settings.loader import Overrides, Settings
from metal_supervisor.spec.document import mapping, objects, string
from metal_supervisor.spec.fields import LEAST_CONTEXT, MOST_CONTEXT, Bad
from metal_supervisor.spec.model_resource import read_artifact
from metal_supervisor.spec.on_demand import ON_DEMAND_ANNOTATION
from metal_supervisor.spec.resources import GROUP, LIBRARY_RUNTIME, VERSION, read_service
from metal_supervisor.spec.sources import canonical, library_model
from metal_supervisor.spec.terminal_text import printable
from metal_supervisor.spec.types import Json, Key
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.downloads import AGAIN
from metal_supervisor.state.own_processes import CannotBoot

MANAGER = "metal-supervisor-serve"
LOOK_EVERY_S = 0.3
RETRIED = "DownloadFailed"
"""Reason of a failed download that is tried again."""
PATIENT_S = 60.0
"""Longest time for which such a failure is waited out."""
UNREACHED = frozenset({RETRIED, "SourceNotFound"})
"""Reasons of a server that does not answer, or lacks the model."""
FLAGS_OF_OTHERS = (" --kv-type ", " --slots ", " --cache-ram ")
"""Flags of `fit` and of engines: advice with them cannot be followed here."""
DOWNLOADING = "Downloading"
PROGRESS_S = 10.0
"""Seconds between two lines about a download on a pipe."""
HAS_RUN = frozenset({CRASH_LOOP, HUNG, "Unresponsive"})
"""Reasons of a failure that has left a log."""


@dataclass(frozen=True)
class ServeOrder:
    """What the command line asks for."""

    source: str
    name: str = ""
    context: int | None = None
    on_demand: bool = False
    detach: bool = False
    """Do not wait until it is ready."""
    namespace: str = "default"


# ── manifests ────────────────────────────────────────────────────────────────────────────────────


def manifests(order: ServeOrder, found: ServedModel) -> list[Json]:
    """The Model and the InferenceService. Raises Bad for a name that is none."""
    name = order.name or name_of(found.name or found.source)
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
        text = f"--name must be of lower-case letters, digits and dashes, at most 63, not {name!r:.80}"
        raise Bad("InvalidSpec", text)
    if order.context is not None and not LEAST_CONTEXT <= order.context <= MOST_CONTEXT:
        text = f"--ctx must be from {LEAST_CONTEXT} to {MOST_CONTEXT}, not {order.context}"
        raise Bad("InvalidSpec", text)
    metadata: Json = {"name": name, "namespace": order.namespace}
    api = f"{GROUP}/{VERSION}"
    service: Json = {**found.service, "modelRef": name, "replicas": 1}
    if order.context is not None:
        service["contextSize"] = order.context
    annotated = {**metadata, "annotations": {ON_DEMAND_ANNOTATION: "true"}} if order.on_demand else metadata
    metal = {**mapping(found.model, "hardware"), "accelerator": "metal"}
    model: Json = {**found.model, "source": found.source, "format": found.format, "hardware": metal}
    return [
        {"apiVersion": api, "kind": "Model", "metadata": metadata, "spec": model},
        {"apiVersion": api, "kind": "InferenceService", "metadata": annotated, "spec": service},
    ]


def path_of(manifest: Json) -> str:
    """API path of an object."""
    metadata = manifest["metadata"]
    return api_path(f"{manifest['kind'].lower()}s", metadata["namespace"], metadata["name"])


# ── the command ──────────────────────────────────────────────────────────────────────────────────


class Serve:
    """One run of the command."""

    def __init__(self, settings: Settings, overrides: Overrides, order: ServeOrder, out: TextIO) -> None:
        self._settings, self._overrides, self._order, self._out = settings, overrides, order, out
        self._flag = state_flag(settings.state_path)
        self._bars = DownloadBars(out)
        self._downloads, self._line, self._said_at = False, "", 0.0
        self._created: list[str] = []
        """API paths of the objects that this command has created."""
        self._problem = ""
        """Reason why the system in this terminal ends, "" for a signal."""

    def say(self, text: str) -> None:
        """Print one line."""
        self._bars.say(printable(text))

    def run(self, only_print: bool, complain: Callable[[str], None]) -> int:
        """Serve the model; return the exit code. Raises CommandError, CannotBoot, BadKubeconfig."""
        try:
            found = resolve(self._settings, self._order.source, self._order.context)
            made = manifests(self._order, found)
        except Unusable as error:
            if error.reason == RETRIED:
                raise CommandError(f"{error}; nothing is applied") from None
            raise CommandError(str(error), USAGE) from None
        except Bad as bad:
            raise CommandError(bad.message, USAGE) from None
        if only_print:
            self._out.write("---\n".join(yaml.safe_dump(each, sort_keys=False) for each in made))
            return 0
        if found.note:
            self.say(found.note)
        runs = is_up(StateDir(self._settings.state_path))
        if not runs and self._order.detach:
            text = "no system runs: metal-supervisor install makes one that stays; or leave out --detach"
            raise CommandError(text, USAGE)
        try:
            self._check(made, runs)
        except (Bad, Unusable, NoBinary) as error:
            text = getattr(error, "message", "") or str(error)
            raise CommandError(f"{text.replace('spec.source', 'SOURCE')}; nothing is applied") from None
        if not self._fits(found, complain):
            return 1
        if not runs:
            return self._as_the_system(made)
        return self._beside(Kube(self._settings.kubeconfig_path, self._settings.context), made)

    def _check(self, made: list[Json], runs: bool) -> None:
        """Check that this Mac has the file and an engine, and reaches the server. Raises Bad, Unusable, NoBinary.

        `runs`: a system runs, whose PATH decides which engines it has: it may be another than here.
        """
        model, service = made
        artifact = read_artifact(model)
        if artifact.local:
            model_files.looked_at(Path(artifact.source))
        if not runs:
            read = read_service(service, lambda _: model, policy_of(self._settings), "")
            if isinstance(read, Bad):
                raise read
            runtime = RUNTIMES[read.runtime]
            address = own_ollama.address_of(self._settings.ollama_url) if runtime.name == LIBRARY_RUNTIME else None
            if address is None or not own_ollama.answers(address):
                builds.find(self._settings, runtime.executables)
        stored = ModelDirectory(self._settings.store_path, artifact.slot)
        if artifact.local or library_model(artifact.source) or stored.model_path():
            return
        with contextlib.closing(Client(lax_rules(self._settings))) as client:
            try:
                locate(artifact, {}, client, self._settings.hub)
            except Unusable as error:
                if error.reason in UNREACHED:  # a system may have a token that this terminal lacks
                    raise

    def _fits(self, found: ServedModel, complain: Callable[[str], None]) -> bool:
        """True if the model fits into this Mac, or that cannot be told before it is there.

        False, with what is wrong told, if it does not. Raises CommandError if the file is no model.
        """
        if library_model(found.source):
            return True
        try:
            answer = fit.answer(self._settings, question(found, self._order.context, None))
        except fit.NotServable as error:
            raise CommandError(f"{error}; nothing is applied") from None
        except fit.CannotTell as error:
            self.say(f"whether it fits is not known: {error}")
            return True
        for line in (answer.lines[0], *(each for each in answer.lines[1:] if each.startswith(fit.NOTE))):
            self.say(line)
        if answer.fits or self._order.on_demand:  # others may make room for it
            return True
        for line in answer.lines[1:]:
            if not any(flag in line for flag in FLAGS_OF_OTHERS):
                complain(printable(line))
        return False

    def _as_the_system(self, made: list[Json]) -> int:
        """Run the system in this terminal, with the model in it. Raises CommandError if the model cannot run."""
        code = foreground.run(self._settings, self._overrides, None, key_of(made[-1]), lambda: self._begin(made))
        if self._problem:
            raise CommandError(self._problem)
        return code

    def _begin(self, made: list[Json]) -> None:
        """Apply the manifests once the system's API answers, and follow the service. Raises CommandError."""
        kube = Kube(self._settings.kubeconfig_path, self._settings.context)
        try:
            once_up(self._settings, lambda: self._apply(kube, made))
        except (KubeError, CannotBoot) as error:
            raise CommandError(f"the model could not be applied: {error}") from None
        follow = threading.Thread(
            target=self._end_if_failed, args=(kube, path_of(made[-1])), name="follow", daemon=True
        )
        follow.start()

    def _end_if_failed(self, kube: Kube, path: str) -> None:
        """Stop the system that runs in this terminal, as Ctrl-C does, if the model cannot run."""
        while True:
            try:
                self._settled(kube, path, lambda *_: None, HAS_RUN)
                return
            except CommandError as error:
                self._problem = str(error)
                os.kill(os.getpid(), signal.SIGINT)
                return
            except KubeError as error:
                if error.code == 404:  # it was removed
                    return
            time.sleep(LOOK_EVERY_S)

    def _apply(self, kube: Kube, made: list[Json]) -> None:
        """Apply the manifests. Raises KubeError, and CannotBoot where the name belongs to another model."""
        for each, field in zip(made, ("source", "modelRef"), strict=True):
            before = find(kube, path_of(each))
            if before is None and path_of(each) not in self._created:
                self._created.append(path_of(each))
            said = string(mapping(before, "spec"), field)
            if field == "source" and said and _is_same(said, each["spec"][field]):
                each["spec"][field] = said  # as it was spelled before: another spelling is an edit
            if said and said != each["spec"][field]:
                name = each["metadata"]["name"]
                text = f"there is a {each['kind']} {name} already, with spec.{field} {said}"
                own = f" --kubeconfig {shown(self._settings.kubeconfig_path)}" if self._settings.embedded else ""
                delete = f"kubectl{own} delete -n {each['metadata']['namespace']} model {name}"
                remove = f"metal-supervisor rm {name}{self._flag}" if find(kube, path_of(made[-1])) else delete
                text += f"; choose another name with --name, or remove it: {remove}"
                raise CannotBoot(text)
        kube.apply(path_of(made[-1]), made[-1], MANAGER, force=True, dry_run=True)  # refused, it leaves no Model behind
        for each in made:
            kube.apply(path_of(each), each, MANAGER, force=True)

    def _beside(self, kube: Kube, made: list[Json]) -> int:
        """Apply to the system that runs, and follow the service until it is Ready. Raises CannotBoot."""
        name = made[-1]["metadata"]["name"]
        try:
            once_up(self._settings, lambda: self._apply(kube, made))
            if self._order.detach:
                self.say(f"{name} is applied; metal-supervisor status{self._flag} shows what becomes of it")
                return 0
            found = self._settled(kube, path_of(made[-1]), self._show)
            base = gateway_url(self._settings) or own_url(self._settings, found, kube)
            mode = string(mapping(found, "status"), "mode") or "chat"
            for line in commands_for(self._settings, name, base, mode):
                self.say(f"  {line}")
            return 0
        except KubeError as error:
            own = shown(self._settings.kubeconfig_path) if self._settings.embedded else ""
            text = missing(error, self._order.namespace, own)
            text = text or f"{error}; metal-supervisor serve --print shows what to apply with kubectl"
            raise CannotBoot(text) from None
        except KeyboardInterrupt:
            what = "its download carries on in the running system" if self._downloads else "it stays applied"
            status, remove = (f"metal-supervisor {each}{self._flag}" for each in ("status", f"rm {name}"))
            self.say(f"{name}: {what}; {status} shows it, {remove} removes the service")
            return INTERRUPTED
        finally:
            self._bars.clear()
            kube.close()

    def _show(self, reason: str, line: str, model: Key) -> None:
        """Show a state that may be new: a download as a bar, or on a pipe as a line now and then."""
        now, goes_on = time.monotonic(), self._downloads and reason == DOWNLOADING
        self._downloads = reason == DOWNLOADING
        self._bars.follow(StateDir(self._settings.state_path), lambda key: key == model)
        if line == self._line or (goes_on and (self._bars.possible or now - self._said_at < PROGRESS_S)):
            return
        self._line, self._said_at = line, now
        self.say(line)

    def _settled(
        self, kube: Kube, path: str, show: Callable[[str, str, Key], None], passing: frozenset[str] = frozenset()
    ) -> Json:
        """The InferenceService once it is Ready. `show`: gets reason, line and Model of each state, often the same.

        Raises KubeError, and CommandError once it has failed for a reason that is not one of `passing`.
        """
        failed_at = 0.0
        while True:
            found = kube.request("GET", path)
            status, name = mapping(found, "status"), found["metadata"]["name"]
            # The status may still be about the manifest as it was before.
            generations = [each.get("observedGeneration") for each in objects(status, "conditions")]
            current = found["metadata"].get("generation") in generations
            ready = metal_ready(status)
            phase, reason = string(status, "phase"), string(ready, "reason")
            why = string(ready, "message").partition(AGAIN)[0]
            failed = current and phase == "Failed" and reason not in passing
            failed_at = failed_at or time.monotonic() if failed else 0.0
            # A failed download is tried again, usually within a second.
            patience_s = PATIENT_S if reason == RETRIED else 0.0
            if failed and time.monotonic() - failed_at >= patience_s:
                raise CommandError(printable(f"{name}: {why}; {self._withdrawn(kube, name, reason)}"))
            if current:
                model = found["metadata"].get("namespace", ""), string(mapping(found, "spec"), "modelRef")
                show(reason, f"{name}  {phase}  {why}".rstrip(), model)
            if current and phase == "Ready":
                return found
            time.sleep(LOOK_EVERY_S)

    def _withdrawn(self, kube: Kube, name: str, reason: str) -> str:
        """Remove what this command has created, unless its engine has run; return what is left, as part of a message.

        A service from before stays, and so does one with a log to read.
        """
        if self._created and reason not in HAS_RUN:
            with contextlib.suppress(KubeError):  # a login may create and not delete
                for path in reversed(self._created):
                    kube.request("DELETE", path)
                return "the service is removed again"
        return f"the service stays: metal-supervisor rm {name}{self._flag} removes it"


def _is_same(one: str, other: str) -> bool:
    """True if two spellings are of one source."""
    try:
        return canonical(one) == canonical(other)
    except Bad:
        return False
