"""Client for the Kubernetes API. The official client supplies only proxies, URLs and the pool of connections.

It is not imported for the embedded API, which has neither proxy nor TLS: each process and command starts 0.25 s sooner.
Its typed API classes cost 0.4 s and 21 MB each, its watch hangs for ever on a half-open connection, and its loader
becomes anonymous when a plugin fails. So logins and requests are implemented here: every request is plain JSON with a
timeout, and all connections can be dropped at once after a sleep or a change of network. No exception, log line or
status ever holds a token: an error is reported by its kind, without the text that it quotes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import ssl
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import urllib3

from metal_supervisor.cluster import credentials
from metal_supervisor.cluster.answers import KubeError, forbidden, http_date, retry_after_s, without_secrets
from metal_supervisor.cluster.credentials import PARSE_ERRORS, BadKubeconfig, ClusterAccess, Login
from metal_supervisor.cluster.decoding import decode
from metal_supervisor.cluster.exec_plugin import scrub
from metal_supervisor.host import proxies
from metal_supervisor.settings.checks import kubeconfigs
from metal_supervisor.spec.types import Json
from metal_supervisor.state.kept_files import Edition, edition_of

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
CONNECT_S = 5.0
READ_S = 15.0
WATCH_READ_S = 75.0
RELOAD_EVERY_S = 30.0
ANSWER_S = 120.0
"""Time limit of a whole answer."""
LONGEST_ANSWER_BYTES = 256 << 20
"""The longest answer is a page of a list: 500 objects, most of a few KiB."""
PART_BYTES = 1 << 18
KEEPALIVE_S = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
POOL: Json = {
    "maxsize": 4,
    "socket_options": [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        *((socket.IPPROTO_TCP, getattr(socket, each), s) for each, s in KEEPALIVE_S.items() if hasattr(socket, each)),
    ],
}
TLS_OF_THE_CLIENT = ("ca_certs", "ca_cert_data", "cert_file", "key_file")
__all__ = ["APPLY", "MERGE", "BadKubeconfig", "Kube", "KubeError", "find"]
log = logging.getLogger(__name__)


def _traced(pool_class: Any, note: Callable[[socket.socket], None]) -> Any:
    """Subclass of a pool class that calls `note` with the socket of each new connection."""

    class Connection(pool_class.ConnectionCls):  # type: ignore[misc]
        traced: socket.socket | None = None

        def connect(self) -> None:
            super().connect()
            self.traced = self.sock
            note(self.sock)

    return type("Pool", (pool_class,), {"ConnectionCls": Connection})


class Kube:
    """Client for one API server with one login. Thread-safe."""

    def __init__(self, kubeconfig: Path, context: str = "") -> None:
        """Read the kubeconfig, and run its plugin if it names one. Raises BadKubeconfig."""
        self._kubeconfig, self._context = kubeconfig, context
        self._lock, self._renewing = threading.Lock(), threading.Lock()
        self._renewed_at = -math.inf
        self._editions: list[Edition | None] = []
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._on_kick: list[Callable[[], None]] = []
        self._login: Login | None = None
        self._manager = urllib3.PoolManager()
        self._unusable: ClusterAccess | None = None
        self.requests = 0
        self.kicks = 0
        self.clock_offset_s = 0.0
        """Seconds to add to this machine's clock to get the server's, within about one; 0.0 until known."""
        self.peer: tuple[str, int] | None = None
        """Numeric address and port of the latest connection: the server's, or a proxy's."""
        self.load()

    # ── login and connections ────────────────────────────────────────────────────────────────────

    def load(self) -> None:
        """Read kubeconfig and credentials (again). Raises BadKubeconfig, and then keeps the previous ones."""
        self._editions = self._current_editions()
        chosen = credentials.choose(self._kubeconfig, self._context)
        login = Login(chosen, self._login)
        access = login.current()
        problem = ""
        try:
            pool = self._pool(chosen, access)
        except ssl.SSLError as error:
            problem = f"certificate-authority, certificate and key do not fit ({error.reason or 'not readable'})"
        except (ImportError, *PARSE_ERRORS, OSError) as error:
            problem = f"{type(error).__name__} with its proxy or certificates"
        if problem:
            raise chosen.bad(f"cannot be used: {problem}")
        first, before = self._login is None, self._manager
        with self._lock:
            self._login, self._built, self._chosen, self._manager = login, access, chosen, pool
            self.server: str = chosen.server
            self.server_name = chosen.server_name
            self.first_hop = chosen.first_hop
            self.context_name = chosen.context
        before.clear()
        if chosen.server.startswith("https:") and not chosen.verified:
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # the log line below, once, is enough
            if first:
                log.warning("server not verified: insecure-skip-tls-verify", extra={"server": self.server_name})

    def _pool(self, chosen: credentials.Chosen, access: ClusterAccess) -> urllib3.PoolManager:
        """Create a pool of connections with these credentials. Raises ssl.SSLError, and what a bad proxy causes.

        For an http server on loopback it is a plain one, without the official client.
        """
        made, proxy = urllib3.PoolManager(), chosen.proxy
        if not (chosen.local and chosen.server.startswith("http:")):
            from kubernetes import client

            options = client.Configuration()
            options.host, options.verify_ssl, options.retries = chosen.server, chosen.verified, False
            options.tls_server_name = chosen.cluster.get("tls-server-name") or None
            options.proxy, options.no_proxy = proxies.reached(proxy) or None, ""
            options.proxy_headers = proxies.login_headers(proxy)
            if proxy.startswith("https:"):
                options.proxy_ssl_context = credentials.proxy_context(access, chosen.verified)
            made = client.ApiClient(options).rest_client.pool_manager
            for name in TLS_OF_THE_CLIENT:
                made.connection_pool_kw.pop(name, None)
            if chosen.server.startswith("https:"):
                made.connection_pool_kw["ssl_context"] = credentials.tls_context(access, chosen.verified)
        made.connection_pool_kw |= POOL
        classes = made.pool_classes_by_scheme
        made.pool_classes_by_scheme = {scheme: _traced(each, self._connected) for scheme, each in classes.items()}
        return made

    def _connected(self, sock: Any) -> None:
        plain = getattr(sock, "socket", sock)  # TLS through a TLS proxy wraps it
        with self._lock:
            self._sockets.add(plain)
            with contextlib.suppress(OSError):
                self.peer = plain.getpeername()[:2]

    def _now(self) -> tuple[ClusterAccess, urllib3.PoolManager]:
        """Return the current credentials and the pool to send them on; a new pool if the certificates were renewed."""
        with self._lock:
            login, built, chosen, pool = self._login, self._built, self._chosen, self._manager
        assert login is not None
        access = login.current()
        if access.tls == built.tls or access == self._unusable:
            return access, pool
        try:
            fresh = self._pool(chosen, access)
        except (OSError, *PARSE_ERRORS) as error:  # a certificate whose key is still being written
            log.warning("new certificates are not usable; the old ones stay", extra={"error": type(error).__name__})
            self._unusable = access
            return access, pool
        with self._lock:
            if self._login is login:
                self._built, self._manager = access, fresh
        pool.clear()
        return access, fresh

    def _renew(self, refused: ClusterAccess) -> bool:
        """Look for a new login after a 401, at most twice a minute. Returns True if there is one now."""
        with self._renewing:
            assert self._login is not None
            if self._login.current() == refused and time.monotonic() - self._renewed_at >= RELOAD_EVERY_S:
                self._renewed_at = time.monotonic()
                self._reload()
            return self._login.current() != refused

    def _follow(self) -> None:
        """Read the kubeconfig if it was changed: a local cluster may have been started on another port."""
        with self._renewing:
            if self._current_editions() != self._editions:
                self._reload()

    def _current_editions(self) -> list[Edition | None]:
        return [edition_of(each) for each in kubeconfigs(str(self._kubeconfig))]

    def _reload(self) -> None:
        try:
            self.load()
        except BadKubeconfig as error:
            log.warning("credentials not reloaded; the old ones stay", extra={"error": str(error)})

    def close(self) -> None:
        """Drop all connections, also those in use; the next request opens a new one."""
        with self._lock:
            sockets, pool = list(self._sockets), self._manager
        pool.clear()
        for each in sockets:
            with contextlib.suppress(OSError):
                # The plain socket's own method: that of a TLS socket drops the session that another thread reads from.
                socket.socket.shutdown(each, socket.SHUT_RDWR)

    def kick(self) -> None:
        """Drop every connection after a sleep or a change of network, and call the actions of `when_kicked`."""
        self.kicks += 1
        self.close()
        for each in list(self._on_kick):
            each()

    def when_kicked(self, action: Callable[[], None]) -> None:
        """Register an action to call after each kick; it must not block."""
        self._on_kick.append(action)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """Send a request, and return its JSON answer, an object. Raises KubeError."""
        found: Any = None
        failed: KubeError | None = None
        with contextlib.closing(self._send(method, path, query, body, content_type)) as answer:
            try:
                found = decode(_whole(answer))
            except (urllib3.exceptions.HTTPError, OSError) as error:
                failed = KubeError(0, "Unreachable", f"answer broke off: {without_secrets(error)[1]}")
            except (ValueError, RecursionError):
                failed = KubeError(0, "BadAnswer", f"{method} {path} was not answered in JSON")
            answer.release_conn()
        if failed is None and not isinstance(found, dict):
            failed = KubeError(0, "BadAnswer", f"{method} {path} was not answered with an object")
        if failed is not None:
            raise failed
        return dict(found)

    def apply(self, path: str, body: Json, manager: str, force: bool = False, dry_run: bool = False) -> Json:
        """Server-side apply. `body`: all fields of this manager, and no others. Raises KubeError."""
        query = {"fieldManager": manager, **({"force": "true"} if force else {})}
        query |= {"dryRun": "All"} if dry_run else {}
        return self.request("PATCH", path, query, body, APPLY)

    def stream(self, path: str, query: Mapping[str, Any]) -> urllib3.BaseHTTPResponse:
        """Open a watch, whose read fails after 75 s of silence. Raises KubeError."""
        answer = self._send("GET", path, query, None, "")
        connection: Any = answer.connection
        if getattr(connection, "traced", None) is not None:
            with contextlib.suppress(OSError):
                connection.traced.settimeout(WATCH_READ_S)
        return answer

    def _send(
        self, method: str, path: str, query: Mapping[str, Any] | None, body: Json | None, content_type: str
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": "application/json", "User-Agent": "metal-supervisor"}
        if body is not None:
            headers["Content-Type"] = content_type
        url = path + ("?" + urllib.parse.urlencode(query) if query else "")
        data = None if body is None else json.dumps(body).encode()
        used, answer = self._once(method, url, data, headers)
        if answer.status == 401 and self._renew(used):
            answer.close()
            used, answer = self._once(method, url, data, headers)
        if answer.status >= 300:
            watch = bool(query and query.get("watch"))
            raise self._failure(answer, used, lambda told: forbidden(method, path, watch, told))
        return answer

    def _once(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[ClusterAccess, urllib3.BaseHTTPResponse]:
        access, pool = self._now()
        if access.authorization:
            headers = {**headers, "Authorization": access.authorization}
        sent_at = time.time()
        self.requests += 1
        try:
            answer: urllib3.BaseHTTPResponse = pool.request(
                method,
                self.server + url,
                body=data,
                headers=headers,
                preload_content=False,
                retries=False,
                timeout=urllib3.Timeout(connect=CONNECT_S, read=READ_S),
            )
            if answer.status < 300:
                self._compare_clocks(answer.headers.get("Date", ""), sent_at)
            return access, answer
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            reason, text = without_secrets(error)
            silent = isinstance(error, urllib3.exceptions.TimeoutError)
        if silent:
            pool.clear()  # its idle connections are probably dead too
        self._follow()
        raise KubeError(0, reason, f"{self.server_name}: {text}")

    def _compare_clocks(self, date: str, sent_at: float) -> None:
        """Update the clock offset: a Date is cut to seconds, and set between request and answer, which bounds it."""
        server = http_date(date)
        if server is not None:
            low, high = server - time.time(), server + 1.0 - sent_at
            if low <= high:  # else the clock was set meanwhile
                self.clock_offset_s = min(max(self.clock_offset_s, low), high)

    def scrub(self, text: str) -> str:
        """Remove this login's secrets from a text of the server, in case it quotes them."""
        login = self._login
        return scrub(text, login.current().secret) if login else text

    def _failure(
        self, answer: urllib3.BaseHTTPResponse, used: ClusterAccess, refused: Callable[[str], str]
    ) -> KubeError:
        status: Any = None
        with contextlib.suppress(KubeError, urllib3.exceptions.HTTPError, OSError, ValueError, RecursionError):
            status = json.loads(_whole(answer))
        answer.release_conn()
        given = status if isinstance(status, dict) else {}
        reason, message = (scrub(str(given.get(name) or ""), used.secret) for name in ("reason", "message"))
        if answer.status == 401:
            assert self._login is not None
            message = f"{self._login.advice} every {RELOAD_EVERY_S:g} s, and until then the old ones are used"
        elif answer.status == 403:
            message = refused(message)
        elif not given:
            message = f"{self.server_name} answered {answer.status} without saying why"
        return KubeError(answer.status, reason, message, retry_after_s(answer.headers, given))


def _whole(answer: urllib3.BaseHTTPResponse) -> bytes:
    """The content of an answer. Raises KubeError if that is too long or does not end, and what the library does."""
    content, until = bytearray(), time.monotonic() + ANSWER_S
    try:
        while part := answer.read1(PART_BYTES):
            content += part
            if len(content) > LONGEST_ANSWER_BYTES:
                raise KubeError(0, "TooLarge", f"an answer exceeds {LONGEST_ANSWER_BYTES >> 20} MiB")
            if time.monotonic() > until:
                raise KubeError(0, "Unreachable", f"an answer did not end within {ANSWER_S:g} s")
    except KubeError:
        answer.close()  # and its connection: what is left of it is not the beginning of the next answer
        raise
    return bytes(content)


def find(kube: Kube, path: str) -> Json | None:
    """An object as it is in the cluster, None if it is not there. Raises KubeError."""
    try:
        return kube.request("GET", path)
    except KubeError as error:
        if error.code != 404:
            raise
        return None
