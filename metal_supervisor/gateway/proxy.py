"""The way of a request through the gateway: checked, its body read, and routed to an engine."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ParamSpec, TypeVar

from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDictProxy
from yarl import URL

from metal_supervisor.gateway import bodies, routing, signs
from metal_supervisor.gateway.access import AccessKey, Doorman, check_engine_key, network_of, sent_key
from metal_supervisor.gateway.backends import BackendReader
from metal_supervisor.gateway.body_reader import BodyReader
from metal_supervisor.gateway.engines import EngineClient, Exchange, cut, show_life
from metal_supervisor.gateway.errors import GatewayError, quoted
from metal_supervisor.gateway.routing import Backend
from metal_supervisor.gateway.traffic import NO_SERVICE, Traffic
from metal_supervisor.gateway.waiting import HOLD_S, WaitingRoom
from metal_supervisor.runtimes.shims.gate import from_foreign_page
from metal_supervisor.settings import checks
from metal_supervisor.spec.processes import EngineUse

THREAD_BYTES = 1 << 20
"""A body from this size on is parsed in a thread."""
STALE_S = 60.0
"""Age of the last reading of the records at which the gateway counts as stuck."""
CLIENT_GONE = 499
"""Status in the log of a request whose client left before its answer began."""
CONTAINERS = (
    "host.docker.internal",
    "gateway.docker.internal",
    "docker.for.mac.host.internal",
    "docker.for.mac.localhost",
    "host.containers.internal",
    "host.k3d.internal",
    "host.lima.internal",
    "host.minikube.internal",
    "host.orb.internal",
    "host.rancher-desktop.internal",
)
"""Names that container tools give this Mac: Docker, Podman, k3d, Lima and Colima, minikube, OrbStack, Rancher Desktop.

A web page of another site reaches a loopback address by DNS rebinding: its own name, resolved to 127.0.0.1. These names
are safe to accept because `.internal` and `.localhost` are reserved, so no site can be registered under them.
"""
ALLOW_ORIGIN = "Access-Control-Allow-Origin"
PREFLIGHT_S = 600
"""Time for which a browser keeps the answer to its question whether a page may send a request."""
MOST_NAMES_CHARS = 1024
"""Longest list of headers that a browser may ask for."""
_NAMES = re.compile(r"[a-z0-9-]+( ?, ?[a-z0-9-]+)*")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:]*)(?::[0-9]{1,5})?", re.ASCII)
_IPV4 = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){3}", re.ASCII)
log = logging.getLogger("gateway")
P = ParamSpec("P")
T = TypeVar("T")


class Proxy:
    """Answers requests, for `aiohttp.web.Server`."""

    def __init__(
        self,
        reader: BackendReader,
        doorman: Doorman,
        hosts: Collection[str] | None,
        public_port: int,
        tell: Callable[[Mapping[str, EngineUse]], bool],
        origins: Collection[str],
    ) -> None:
        """`hosts`: names accepted in the Host header besides addresses, None to accept any; they may change.

        `public_port`: of the listener for all services. `tell`: see WaitingRoom.

        `origins`: of the web pages that may use models.
        """
        self._public_port, self.origins = public_port, origins
        self._reader, self._doorman, self.hosts = reader, doorman, hosts
        self._engines = EngineClient()
        self._bodies = BodyReader()
        self.in_flight: Counter[str] = Counter()
        """Requests at an engine, by program."""
        self.traffic = Traffic()
        self.room = WaitingRoom(self.in_flight, tell, self.traffic.waited)
        self.busy: set[RequestHandler] = set()
        """Connections with a request under way, those included whose body is still to come."""
        self.closing = False
        """Answers end their connection: this worker is to end."""

    @property
    def active(self) -> int:
        """Requests under way: each connection has one at a time."""
        return len(self.busy)

    async def close(self) -> None:
        """Close the connections to the engines."""
        await self._engines.close()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self.busy.add(connection)
        try:
            response = await self._answer(request)
            if self._is_last(request) and not response.prepared:
                response.force_close()
            return response
        finally:
            self.busy.remove(connection)

    def _is_last(self, request: web.BaseRequest) -> bool:
        """True if its connection ends with its answer.

        aiohttp drops what came along with a request for another protocol, and would read what comes next, the middle of
        a body perhaps, as a request. The last trailer of a body in chunks would become a header of the next request.
        """
        return self.closing or hdrs.UPGRADE in request.headers or hdrs.TRANSFER_ENCODING in request.headers

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        exchange = Exchange(request.raw_path.partition("?")[0])
        try:
            if (front := self._front(request)) is not None:
                return await self._at_front(request, exchange, front)
            goal = routing.target(exchange.path)
            self._check_origin(request.headers, exchange, goal)
            if exchange.cors.keys() & {ALLOW_ORIGIN} and request.method == "OPTIONS":
                return _preflight(request.headers, exchange, goal)
            if exchange.path == "/healthz" and request.method in ("GET", "HEAD"):
                return self._health(exchange)
            exchange.key = self._doorman.known(sent_key(request.headers))
            if request.method in ("GET", "HEAD"):
                return self._models(exchange, goal)
            return await self._pass_on(request, exchange, goal)
        except GatewayError as error:
            if exchange.early is not None:
                exchange.end = exchange.code = error.code
                await cut(request, exchange.early, error.event(exchange.path, exchange.id))
            exchange.end = "refused"
            return _refusal(exchange, error)
        except asyncio.CancelledError:
            exchange.end = "client_gone"
            raise
        except ConnectionError:
            exchange.end = exchange.end if exchange.end != "complete" else "client_gone"
            raise
        except Exception:  # aiohttp answers 500, or cuts the answer, and its own log is off
            log.exception("a request failed", extra={"id": exchange.id})
            exchange.status, exchange.end = exchange.status or 500, "failed"
            raise
        finally:
            if exchange.entered:
                self._doorman.leave(exchange.key)
                self._note(exchange)

    # ── the listeners of on-demand services ──────────────────────────────────────────────────────

    def _front(self, request: web.BaseRequest) -> routing.Backend | None:
        """The service whose own listener a request came to, None for the public one. Raises GatewayError."""
        name = request.transport.get_extra_info("sockname") if request.transport is not None else None
        if name is not None and name[1] == self._public_port:
            return None
        found = self._reader.services.at_port(name[1]) if name else []
        if not found:
            raise GatewayError(404, "model_not_found", "this address serves no model any more", final=True, close=True)
        return found[0]

    async def _at_front(self, request: web.BaseRequest, exchange: Exchange, front: Backend) -> web.StreamResponse:
        """Answer for one service, as its engine would; keyless, as an engine is, unless that has a key of its own.

        The engine sees no `Origin`, so pages of other hosts are refused here. As of an engine, `Host` may be any: pods
        use the name of a Service, an Ingress any.
        """
        if from_foreign_page(request.headers.getall("origin", ())):
            text = "web pages of other hosts may not use it"
            raise GatewayError(403, "origin_not_allowed", text, final=True, close=True)
        goal = routing.Target(exchange.path, (front.namespace, front.name))
        if request.method in ("GET", "HEAD"):
            if exchange.path == "/health":
                good = front.ready or front.held
                body = {"status": "ok" if good else front.reason, "model": routing.state(front)}
                return _json(exchange, 200 if good else 503, json.dumps(body).encode())
            return self._models(exchange, goal)
        return await self._pass_on(request, exchange, goal)

    # ── checks ───────────────────────────────────────────────────────────────────────────────────

    def _check_origin(self, headers: CIMultiDictProxy[str], exchange: Exchange, goal: routing.Target) -> None:
        """Refuse a web page of an origin that the settings do not name, and a Host that may be a rebound name.

        Raises GatewayError.
        """
        if self.origins:
            exchange.cors["Vary"] = "Origin"
        if "Origin" in headers:
            sent = ", ".join(headers.getall("Origin"))
            if sent not in self.origins:
                text = f"web pages of {quoted(sent)!r} may not use this gateway"
                if checks.origin(sent) is None:
                    text += "; add that origin to the setting gateway_origins, and run `metal-supervisor upgrade`"
                raise GatewayError(403, "origin_not_allowed", text, final=True, close=True)
            if not goal.method:
                text = f"web pages may use the paths of models only, and not {quoted(goal.path)}"
                raise GatewayError(403, "origin_not_allowed", text, final=True, close=True)
            exchange.cors |= {ALLOW_ORIGIN: sent, "Access-Control-Expose-Headers": "x-request-id, retry-after"}
        found = _HOST.fullmatch(headers.get("Host", ""))
        name = found[1].lower() if found else ""
        literal = name.startswith("[") or _IPV4.fullmatch(name)
        if self.hosts is not None and not literal and name not in self.hosts:
            known = ", ".join(sorted(self.hosts))
            text = f"the Host header names {quoted(name)!r}; use an IP address or one of: {known}"
            raise GatewayError(421, "misdirected_request", text, final=True, close=True)

    # ── what the gateway answers itself ──────────────────────────────────────────────────────────

    def _health(self, exchange: Exchange) -> web.Response:
        age_s = time.monotonic() - self._reader.read_at
        ready = sum(each.ready for each in self._reader.services.backends)
        body = {
            "status": "ok" if age_s < STALE_S else "stuck",
            "services": len(self._reader.services.backends),
            "ready": ready,
            "inFlight": self.active - 1,
            "recordsReadSecondsAgo": round(age_s, 1),
        }
        return _json(exchange, 200 if age_s < STALE_S else 503, json.dumps(body).encode() + b"\n")

    def _models(self, exchange: Exchange, goal: routing.Target) -> web.Response:
        """`/v1/models`, and one of them."""
        services, allowed = self._reader.services, exchange.key.allows
        if goal.service is not None:
            services = routing.ServiceTable(tuple(services.of(*goal.service)))
        if goal.path == routing.MODELS:
            rows = routing.listing(services, allowed)
            ends = {"first_id": rows[0]["id"] if rows else None, "last_id": rows[-1]["id"] if rows else None}
            body = {"object": "list", "data": rows, "has_more": False, **ends}
            return _json(exchange, 200, json.dumps(body).encode())
        if goal.path.startswith(f"{routing.MODELS}/"):
            name = URL(goal.path, encoded=True).path[len(routing.MODELS) + 1 :]
            named = services.find(name, allowed, exchange.key.at_home)
            rows = routing.listing(self._reader.services, lambda each: each.qualified == named[0].qualified)
            return _json(exchange, 200, json.dumps(rows[0]).encode())
        raise _not_found("GET", exchange.path)

    # ── what an engine answers ───────────────────────────────────────────────────────────────────

    async def _pass_on(self, request: web.BaseRequest, exchange: Exchange, goal: routing.Target) -> web.StreamResponse:
        if request.method != "POST" or goal.path not in routing.PATHS:
            raise _not_found(request.method, exchange.path)
        self._doorman.enter(exchange.key, time.monotonic())
        exchange.entered = True
        client = _client(request, exchange)
        body = await self._bodies.read(request, client)
        size = len(body)
        try:
            asked = await _off_loop(size, bodies.read, body, request.headers.get("Content-Type", ""))
            exchange.streamed = asked.stream
            backend = exchange.backend = await self._ready(request, exchange, goal, asked)
            try:
                check_engine_key(exchange.key, request.headers, backend)
                if backend.checks_model:
                    name = await self._engines.name_at(backend)
                    body = await _off_loop(size, bodies.renamed, body, asked, name)
                query = request.raw_path.partition("?")[2]
                path = goal.path + (f"?{query}" if query else "")
                upstream = await self._engines.send(request, exchange, path, body)
                del body, asked  # the engine has it; the answer may take long
                self._bodies.release(client, size)
                size = 0
                try:
                    return await self._engines.pass_on(request, exchange, upstream, self._is_last(request))
                except BaseException:
                    upstream.close()
                    raise
            finally:
                self.in_flight[backend.program] -= 1
                self.room.used(backend.program)
        finally:
            self._bodies.release(client, size)

    async def _ready(
        self, request: web.BaseRequest, exchange: Exchange, goal: routing.Target, asked: bodies.RequestBody
    ) -> Backend:
        """A ready engine of the service that a request names, with the request counted as in flight.

        The request waits for the engine of an on-demand service. Raises GatewayError.
        """
        found = self._found(exchange.key, goal, asked)
        if (held := routing.waited_for(found)) is None:
            return self._engaged(found)
        sign = signs.sign(goal.path, exchange.id, held.name) if asked.stream else b""
        began = time.monotonic()
        until, sign_at = (began + signs.HOLD_S, began + signs.FIRST_S) if sign else (began + HOLD_S, math.inf)
        while True:
            # Before it is loaded, and others are unloaded for it.
            check_engine_key(exchange.key, request.headers, held)
            program = held.program
            with self.room.wait_for(program, _client(request, exchange)):
                while held is not None and held.program == program:
                    if await self.room.change(min(until, sign_at)):
                        found = self._found(exchange.key, goal, asked)
                        held = routing.waited_for(found)
                    elif time.monotonic() >= until:
                        text = f"{held.name} is still being loaded: {held.message}"
                        raise GatewayError(503, "model_waking", text, retry_after_s=routing.LOADING_RETRY_S)
                    else:
                        await show_life(request, exchange, sign)
                        sign_at += signs.EVERY_S
                if held is None:
                    return self._engaged(found)

    def _engaged(self, found: Sequence[Backend]) -> Backend:
        """The engine for a request, with the request counted as in flight. Raises GatewayError."""
        backend = routing.choose(found, self.in_flight)
        self.in_flight[backend.program] += 1
        self.room.used(backend.program)
        return backend

    def _found(self, key: AccessKey, goal: routing.Target, asked: bodies.RequestBody) -> Sequence[Backend]:
        """The engines of the service that a request names. Raises GatewayError."""
        services = self._reader.services
        if goal.service is not None:
            return services.at_path(*goal.service, key.allows)
        if asked.model is None:
            raise GatewayError(400, "invalid_request", "model is missing: name a model of /v1/models", final=True)
        return services.find(asked.model, key.allows, key.at_home)

    def _note(self, exchange: Exchange) -> None:
        """Write the line of the access log; no text of a request or an answer is in it."""
        backend, now = exchange.backend, time.monotonic()
        first = exchange.first_byte - exchange.began if exchange.first_byte is not None else None
        service = (backend.namespace, backend.name) if backend else NO_SERVICE
        status = exchange.status or CLIENT_GONE
        self.traffic.ended(exchange.key.name, service, status, first, now - exchange.began, exchange.events)
        detail = {
            "id": exchange.id,
            "key": exchange.key.name,
            "service": backend.qualified if backend else "",
            "path": quoted(exchange.path),
            "status": status,
            "end": exchange.end,
            "code": exchange.code,
            "first_byte_s": round(first, 4) if first is not None else None,
            "seconds": round(now - exchange.began, 4),
            "bytes": exchange.bytes_out,
        }
        log.info("request", extra=detail)


async def _off_loop(size: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Result of some work on a body of that size; of a long one in a thread. Raises what that raises."""
    if size >= THREAD_BYTES:
        return await asyncio.to_thread(work, *arguments, **named)
    return work(*arguments, **named)


def _client(request: web.BaseRequest, exchange: Exchange) -> str:
    """Whose request it is: its key's, or else that of an address."""
    return exchange.key.name or network_of(request.remote or "")


def _not_found(method: str, path: str) -> GatewayError:
    text = f"{quoted(method)} {quoted(path)} is not served; see docs/gateway.md for the paths that are"
    return GatewayError(404, "not_found", text, final=True, close=True)


def _preflight(headers: CIMultiDictProxy[str], exchange: Exchange, goal: routing.Target) -> web.Response:
    """Answer to a browser that asks whether a page of an allowed origin may send a request. Raises GatewayError."""
    if "Access-Control-Request-Method" not in headers:
        raise _not_found("OPTIONS", exchange.path)
    allowed = {"Access-Control-Allow-Methods": goal.method, "Access-Control-Max-Age": str(PREFLIGHT_S)}
    names = headers.get("Access-Control-Request-Headers", "")
    if len(names) <= MOST_NAMES_CHARS and _NAMES.fullmatch(names):
        allowed["Access-Control-Allow-Headers"] = names
    return web.Response(status=204, headers={**exchange.headers(), **allowed})


def _json(exchange: Exchange, status: int, body: bytes) -> web.Response:
    headers = {**exchange.headers(), "X-Content-Type-Options": "nosniff"}
    exchange.status = status
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")


def _refusal(exchange: Exchange, error: GatewayError) -> web.Response:
    exchange.code = error.code
    response = _json(exchange, error.status, error.body(exchange.path, exchange.id))
    response.headers.update(error.headers())
    if error.close:
        response.force_close()
    return response
