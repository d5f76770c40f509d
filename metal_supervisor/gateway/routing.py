"""Routes of the gateway: which path is passed on, which service a name means, and which engine gets a request.

Only paths of inference are passed on. Engines have others, which load, unload or configure models.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from metal_supervisor.gateway.errors import GatewayError, quoted
from metal_supervisor.spec.nearest import nearest
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL, WithdrawalToken

_OPENAI = (
    "chat/completions",
    "completions",
    "responses",
    "embeddings",
    "rerank",
    "reranking",
    "audio/transcriptions",
    "audio/translations",
    "audio/speech",
    "images/generations",
    "images/edits",
    "images/variations",
)
_LLAMA = (
    "completion",
    "completions",
    "chat/completions",
    "responses",
    "embedding",
    "embeddings",
    "infill",
    "tokenize",
    "detokenize",
    "apply-template",
    "rerank",
    "reranking",
)
PATHS = frozenset(
    {f"/v1/{each}" for each in (*_OPENAI, "messages", "messages/count_tokens")} | {f"/{each}" for each in _LLAMA}
)
"""The paths that are passed on, POST only; with `/services/NAMESPACE/NAME` before them too."""
MODELS = "/v1/models"
_BY_PATH = re.compile(r"/services/([a-z0-9.-]{1,253})/([a-z0-9.-]{1,253})(/.*)")
MOST_NAMES = 3
WHY_STOPPED = frozenset({"Stopped", "Suspended"})
SHOWN = frozenset(
    {
        "Loading",
        "Restarting",
        "Stopping",
        "StoppedByHand",
        "Suspended",
        "ManuallyScaledToZero",
        "InsufficientMemory",
        "MemoryPressure",
        "Evicted",
        "Unloaded",
        "Waking",
        "MetalUnavailable",
        "Hung",
    }
)
"""Reasons whose sentence may be shown to a client; others can hold paths and sources."""
MEMORY = frozenset({"InsufficientMemory", "MemoryPressure", "Evicted", "MemoryCheckFailed"})
LOADING_RETRY_S = 5
MEMORY_RETRY_S = 30
CRASH_RETRY_S = 30
CRASHING = "CrashLoopBackOff"


@dataclass(frozen=True)
class Backend:
    """One engine of this Mac, as the gateway uses it."""

    program: str
    namespace: str
    name: str
    runtime: str
    ready: bool
    phase: str
    reason: str
    """Reason of the condition MetalReady."""
    message: str
    address: str
    port: int
    pid: int = 0
    key: str = ""
    """API key that the engine itself requires, "" without one."""
    further_keys: tuple[str, ...] = ()
    """Others that it takes, as while one is replaced."""
    checks_model: bool = False
    """The engine serves other models too, or refuses names it does not know: the body must have its own name."""
    names_itself: bool = False
    """The engine's own model name has to be asked from it."""
    context: int = 0
    """Tokens of one request, 0 if not known."""
    created: int = 0
    aliases: tuple[str, ...] = ()
    lost_names: tuple[str, ...] = ()
    """As `Record.lost_names`: only clients whose key is for its namespace alone may use them."""
    on_demand: bool = False
    held: bool = False
    """It has no engine that is ready, and requests wait for one."""
    withdraw: WithdrawalToken = NO_WITHDRAWAL
    """The controller's request that it be sent nothing more."""
    front: str = ""
    """Address of its own listener, as ADDRESS:PORT, "" without one."""

    @property
    def qualified(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Target:
    """What a path asks for."""

    path: str
    """Path at the engine."""
    service: tuple[str, str] | None
    """(namespace, name) if the path names the service, None if the body does."""

    @property
    def method(self) -> str:
        """The method that its path takes, "" for a path that is none of a model."""
        lists = self.path == MODELS or self.path.startswith(f"{MODELS}/")
        return "POST" if self.path in PATHS else "GET" if lists else ""


def target(path: str) -> Target:
    """The target of a request's path."""
    found = _BY_PATH.fullmatch(path)
    return Target(found[3], (found[1], found[2])) if found else Target(path, None)


@dataclass(frozen=True)
class ServiceTable:
    """The services of this Mac by every name that clients may use."""

    backends: tuple[Backend, ...] = ()

    def of(self, namespace: str, name: str) -> list[Backend]:
        """The engines of a service."""
        return [each for each in self.backends if (each.namespace, each.name) == (namespace, name)]

    def key_of(self, program: str) -> tuple[str, str]:
        """(namespace, name) of the service of an engine, ("", "") if it is gone."""
        return next(((each.namespace, each.name) for each in self.backends if each.program == program), ("", ""))

    def fronts(self) -> list[str]:
        """The addresses of the services' own listeners."""
        return [each.front for each in self.backends if each.front]

    def at_port(self, port: int) -> list[Backend]:
        """The engines of the service whose own listener has a port."""
        return [each for each in self.backends if each.front.endswith(f":{port}")]

    def public_name(self, backend: Backend) -> str:
        """The name in `/v1/models`: short where it is the only one of that name."""
        return backend.name if self._meant.get(backend.name) == {backend.qualified} else backend.qualified

    @functools.cached_property
    def _meant(self) -> dict[str, set[str]]:
        """Short name -> services that it may mean; a list of all services asks for each."""
        found: dict[str, set[str]] = {}
        for each in self.backends:
            for name in _short_names(each):
                found.setdefault(name, set()).add(each.qualified)
        return found

    def find(self, model: str, allowed: Filter, at_home: bool = False) -> list[Backend]:
        """The engines that a name means, among the allowed services. Raises GatewayError, with the nearest names.

        `at_home`: the allowed services are of one namespace, by the client's key.
        """
        visible = [each for each in self.backends if allowed(each)]
        exact = [each for each in visible if each.qualified == model]
        named = exact or [each for each in visible if model in _short_names(each, at_home)]
        named = named or [each for each in visible if model in (*each.aliases, *(each.lost_names if at_home else ()))]
        services = sorted({each.qualified for each in named})
        if len(services) == 1:
            return named
        if services:
            text = f"the model name {quoted(model)!r} means several services; use {' or '.join(services)}"
            raise GatewayError(404, "model_not_found", text, final=True)
        raise GatewayError(404, "model_not_found", self._unknown(model, visible), final=True)

    def at_path(self, namespace: str, name: str, allowed: Filter) -> list[Backend]:
        """The engines of the service that a path names: never of another one, which may have that name as an alias.

        Raises GatewayError, with the nearest names.
        """
        named = [each for each in self.of(namespace, name) if allowed(each)]
        if not named:
            text = self._unknown(f"{namespace}/{name}", [each for each in self.backends if allowed(each)])
            raise GatewayError(404, "model_not_found", text, final=True)
        return named

    def _unknown(self, model: str, visible: Sequence[Backend]) -> str:
        names = dict.fromkeys(self.public_name(each) for each in visible)
        if not names:
            return f"there is no model {quoted(model)!r} here: this Mac has no service that you may use"
        near = nearest(model, tuple(names), likeness=0.4)
        told = ", ".join(near or list(names)[:MOST_NAMES])
        return f"there is no model {quoted(model)!r} here; {'the nearest names are' if near else 'there are'}: {told}"


def _short_names(backend: Backend, at_home: bool = False) -> tuple[str, ...]:
    """Names of a service that one of another namespace may have too: `b`, and `a.b` of `b` in `a`."""
    dotted = f"{backend.namespace}.{backend.name}"
    return (dotted,) if backend.name in backend.lost_names and not at_home else (backend.name, dotted)


Filter: TypeAlias = Callable[[Backend], bool]


def choose(backends: Sequence[Backend], in_flight: Mapping[str, int]) -> Backend:
    """The ready engine with the fewest requests. Raises GatewayError with the service's condition if none is ready."""
    ready = [each for each in backends if each.ready]
    if ready:
        return min(ready, key=lambda each: in_flight.get(each.program, 0))
    raise unavailable(backends[0])


def waited_for(backends: Sequence[Backend]) -> Backend | None:
    """The engine that a request waits for, None if it does not wait."""
    return None if any(each.ready for each in backends) else next((each for each in backends if each.held), None)


def unavailable(backend: Backend) -> GatewayError:
    """The answer for a service none of whose engines is ready."""
    text = backend.message if backend.reason in SHOWN else "`metal-supervisor explain` on this Mac tells why"
    said = f"{backend.name} is not ready ({backend.reason}): {text}"
    if backend.phase in WHY_STOPPED:
        return GatewayError(503, "model_stopped", said, final=True)
    if backend.reason in MEMORY:
        return GatewayError(503, "insufficient_memory", said, retry_after_s=MEMORY_RETRY_S)
    if backend.reason == CRASHING:
        return GatewayError(503, "model_failed", said, retry_after_s=CRASH_RETRY_S)
    if backend.phase == "Failed":
        return GatewayError(503, "model_failed", said, final=True)
    return GatewayError(503, "model_loading", said, retry_after_s=LOADING_RETRY_S)


def listing(services: ServiceTable, allowed: Filter) -> list[dict[str, object]]:
    """The models of `/v1/models`, one for each service, in OpenAI's shape and with what clients read besides."""
    rows: dict[str, dict[str, object]] = {}
    for each in sorted(services.backends, key=lambda each: (each.name, each.namespace, not each.ready)):
        if not allowed(each) or each.qualified in rows:
            continue
        row: dict[str, object] = {
            "id": services.public_name(each),
            "object": "model",
            "created": each.created,
            "owned_by": each.namespace,
            "type": "model",  # Anthropic's lists read these
            "display_name": each.qualified,
            "runtime": each.runtime,
            "status": {"value": state(each), "reason": each.reason},
        }
        if each.context:
            row |= {"context_length": each.context, "max_model_len": each.context, "meta": {"n_ctx": each.context}}
        if each.aliases:
            row["aliases"] = list(each.aliases)
        rows[each.qualified] = row
    return list(rows.values())


def state(backend: Backend) -> str:
    """`loaded`, `loading` or `unloaded`."""
    if backend.ready:
        return "loaded"
    return "loading" if backend.reason in ("Loading", "Restarting", "Waking") else "unloaded"
