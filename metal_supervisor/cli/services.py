"""`metal-supervisor list`, `stop`, `start` and `rm`: the services of this Mac's API, as kubectl would do it."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TextIO, TypeVar

from metal_supervisor.cli.terminal import NOT_FOUND, CommandError
from metal_supervisor.cluster.answers import missing
from metal_supervisor.cluster.kube import MERGE, Kube, KubeError
from metal_supervisor.cluster.manifests import api_path, direct_url, metal_ready
from metal_supervisor.cluster.report import UNLOADED, WAKING
from metal_supervisor.host import processes
from metal_supervisor.settings.loader import Settings, start_command
from metal_supervisor.spec.document import mapping, objects, string, whole
from metal_supervisor.spec.names import of_another_namespace
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.terminal_text import printable, table
from metal_supervisor.spec.types import Json
from metal_supervisor.spec.user_error import NOT_RUNNING
from metal_supervisor.state import gateway_note
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.own_processes import run_holds
from metal_supervisor.supervisord.client import Supervisord

COLUMNS = ("NAMESPACE/NAME", "STATE", "MEMORY", "MODEL", "URL")
START_WAIT_S = 10.0
LOOK_EVERY_S = 0.1
T = TypeVar("T")


def is_up(directory: StateDir) -> bool:
    """True once supervisord answers; waits for that only if a `metal-supervisor run` is about to start it."""
    supervisord, until = Supervisord(directory.socket), time.monotonic() + START_WAIT_S
    while not supervisord.answers():
        if not run_holds(directory.path) or time.monotonic() > until:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def once_up(settings: Settings, ask: Callable[[], T]) -> T:
    """Result of `ask`, which is repeated while the embedded API of a system that is up does not answer yet.

    Raises KubeError.
    """
    until = time.monotonic() + START_WAIT_S
    while True:
        try:
            return ask()
        except KubeError as error:
            comes_up = settings.embedded and error.code == 0 and time.monotonic() < until
            if not comes_up or not is_up(StateDir(settings.state_path)):
                raise
        time.sleep(LOOK_EVERY_S)


class ServiceClient:
    """The InferenceServices that this Mac's login may see."""

    def __init__(self, settings: Settings) -> None:
        """Raises BadKubeconfig, and CommandError where no system has run yet."""
        if settings.embedded and not settings.kubeconfig_path.exists():
            where = settings.state_path
            text = f"no system has run in {where} (--state-dir); metal-supervisor serve SOURCE starts one"
            raise CommandError(text, NOT_RUNNING)
        if settings.embedded and (other := StateDir(settings.state_path).other_home()):
            where = settings.state_path
            text = f"{where} is a copy of {other}, or was moved from there, and has not been started since"
            raise CommandError(f"{text}; start it with: {start_command(where)}", NOT_RUNNING)
        self.api = Kube(settings.kubeconfig_path, settings.context)
        self._settings = settings

    def close(self) -> None:
        """Close the connections."""
        self.api.close()

    def all(self) -> list[Json]:
        """The InferenceServices. Raises CommandError."""
        return objects(self._asked("GET", api_path("inferenceservices", self._settings.namespace)), "items")

    def named(self, name: str) -> Json:
        """The service of a name, or of NAMESPACE/NAME. Raises CommandError."""
        every = self.all()
        found = [each for each in every if name in (_key(each), each["metadata"]["name"])]
        if len(found) == 1:
            return found[0]
        if found:
            raise CommandError(f"{name} is ambiguous; name one of {', '.join(map(_key, found))}", NOT_FOUND)
        known = ", ".join(map(_key, every)) or "none"
        text = of_another_namespace(name, self._settings.namespace) or f"there is no service {name}; there are: {known}"
        raise CommandError(text, NOT_FOUND)

    def scale(self, name: str, replicas: int) -> str:
        """Set the number of replicas; returns what was done. Raises CommandError."""
        found = self.named(name)
        before = mapping(found, "spec").get("replicas", 1)
        if (before == 0) == (replicas == 0):
            if replicas and _reason(found) == "StoppedByHand":
                conf = shlex.quote(str(self._settings.state_path / "supervisord.conf"))
                conf = f" -c {conf}" if self._settings.embedded else ""  # a cluster's may be on another Mac
                start = f"supervisorctl{conf} start {_key(found).replace('/', '.')}"
                raise CommandError(f"{_key(found)} was stopped with supervisorctl; start it there with: {start}")
            return f"{_key(found)} has {before} replica{'' if before == 1 else 's'} already"
        by_hand = f"scale {_typed(found)} --replicas={replicas}"
        self._asked("PATCH", _path(found), {"spec": {"replicas": replicas}}, by_hand)
        return f"{_key(found)}: spec.replicas is {replicas} now"

    def remove(self, name: str) -> str:
        """Delete a service, and its Model unless another uses it; returns what was done. Raises CommandError."""
        found = self.named(name)
        model, namespace = _models_of(found)[0], found["metadata"]["namespace"]
        near = [each for each in self.all() if each["metadata"]["namespace"] == namespace]
        others = [_key(each) for each in near if model in _models_of(each) and _key(each) != _key(found)]
        self._asked("DELETE", _path(found), by_hand=f"delete {_typed(found)}")
        if others:
            return f"{_key(found)} is removed; its Model {model} stays, as {others[0]} uses it"
        try:
            self._asked("DELETE", api_path("models", namespace, model), by_hand=f"-n {namespace} delete model {model}")
        except CommandError as error:
            return f"{_key(found)} is removed; its Model {model} stays: {error}"
        return f"{_key(found)} is removed, and its Model; what was fetched stays: metal-supervisor models ls"

    def _asked(self, method: str, path: str, body: Json | None = None, by_hand: str = "") -> Json:
        """Ask the API. `by_hand`: what to type after kubectl where this login may not. Raises CommandError."""
        content_type = MERGE if body is not None else "application/json"
        try:
            return once_up(self._settings, lambda: self.api.request(method, path, None, body, content_type))
        except KubeError as error:
            if method == "DELETE" and error.code == 404:
                return {}
            if self._settings.embedded and error.code == 0:
                state = self._settings.state_path
                up = is_up(StateDir(state))
                advice = "see metal-supervisor logs apiserver" if up else f"start it with: {start_command(state)}"
                text = f"the system in {state} (--state-dir) does not answer: {error}; {advice}"
                raise CommandError(text, NOT_RUNNING) from None
            hint = f"; with a login that may: kubectl {by_hand}" if error.code == 403 and by_hand else ""
            raise CommandError(f"{missing(error, self._settings.namespace) or error}{hint}") from None


def _key(found: Json) -> str:
    return f"{found['metadata']['namespace']}/{found['metadata']['name']}"


def _models_of(found: Json) -> tuple[str, str]:
    """Names of the Models that a service names: its own, and its draft, "" without one."""
    spec = mapping(found, "spec")
    return string(spec, "modelRef"), string(mapping(spec, "speculativeDecoding"), "draftModelRef").strip()


def _typed(found: Json) -> str:
    return f"-n {found['metadata']['namespace']} isvc/{found['metadata']['name']}"


def _path(found: Json) -> str:
    metadata = found["metadata"]
    return api_path("inferenceservices", metadata["namespace"], metadata["name"])


def _reason(found: Json) -> str:
    return string(metal_ready(mapping(found, "status")), "reason")


def state_of(found: Json) -> str:
    """State of a service in one word: its phase, or the reason of one that rests or loads."""
    reason = _reason(found)
    return reason if reason in (UNLOADED, WAKING) else string(mapping(found, "status"), "phase") or "Pending"


def gateway_url(settings: Settings) -> str:
    """Base URL of the gateway, "" if it does not answer: another program may there, which must not get the prompt."""
    note = gateway_note.read(settings.state_path)
    # Its holder keeps the port, so that a request to a gateway that has ended waits in vain.
    ended = "pid" in note and not processes.has_written(note)
    listens = settings.gateway_on and not ended and not gateway_note.closed(note)
    return settings.gateway_url if listens else ""


def own_url(settings: Settings, found: Json, api: Kube) -> str:
    """Base URL of a service for a client on this Mac without the gateway, "" while none is ready.

    In a cluster that is the address of an engine, as names of Services are known to pods only. Raises CommandError.
    """
    url, metadata = string(mapping(found, "status"), "endpoint").removesuffix("/chat/completions"), found["metadata"]
    if settings.embedded:
        return url
    query = {"labelSelector": f"llmkube.ai/inference-service={metadata['name']}"}
    try:
        slices = api.request("GET", api_path("endpointslices", metadata["namespace"]), query)
    except KubeError as error:
        raise CommandError(str(error)) from None
    for each in objects(slices, "items"):
        for endpoint in objects(each, "endpoints"):
            if mapping(endpoint, "conditions").get("ready"):
                port = whole(objects(each, "ports")[0], "port")
                return direct_url(endpoint["addresses"][0], port, urllib.parse.urlsplit(url).path)
    return ""


def listing(found: list[Json], memory: Mapping[str, int]) -> list[str]:
    """The table of `list`. `memory`: bytes reserved on this Mac, by NAMESPACE/NAME."""
    rows = [
        (
            _key(each),
            state_of(each),
            amount(memory[_key(each)]) if _key(each) in memory else "",
            _models_of(each)[0],
            string(mapping(each, "status"), "endpoint").removesuffix("/chat/completions"),
        )
        for each in found
    ]
    return table([COLUMNS, *sorted(rows)])


def _reserved(settings: Settings) -> dict[str, int]:
    """Bytes that this Mac reserves for each service whose engines run here, by NAMESPACE/NAME."""
    found: Counter[str] = Counter()
    for record in StateDir(settings.state_path).records()[0].values():
        if record.runs and record.reserved_bytes:
            found["/".join(record.owner)] += record.reserved_bytes
    return found


def show(settings: Settings, as_json: bool, out: TextIO) -> int:
    """`metal-supervisor list`. Raises CommandError, BadKubeconfig."""
    with contextlib.closing(ServiceClient(settings)) as services:
        found = services.all()
    if as_json:
        out.write(json.dumps([{**each, "state": state_of(each)} for each in found], indent=2) + "\n")
    elif found:
        out.write("\n".join(listing(found, _reserved(settings))) + "\n")
    else:
        out.write("no services; metal-supervisor serve SOURCE adds one\n")
    return 0


def change(settings: Settings, command: str, name: str, out: TextIO) -> int:
    """`metal-supervisor stop`, `start` or `rm`: say what was done. Raises CommandError, BadKubeconfig."""
    with contextlib.closing(ServiceClient(settings)) as services:
        done = services.remove(name) if command == "rm" else services.scale(name, int(command == "start"))
    out.write(printable(done) + "\n")
    return 0
