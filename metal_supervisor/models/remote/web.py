"""Requests for model files, which any user who may write a Model can make this Mac send.

So their destination is checked: by the host's name, and by the address that it resolves to at the moment of connecting,
because a name may resolve to the router's admin page or to a cloud's metadata. Redirects are followed here, each
checked like the first, never to a weaker scheme, and credentials are sent only to the origin that they are for. A
request can be stopped from another thread at any moment.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from metal_supervisor.cluster.answers import line_trouble, proxy_refusal
from metal_supervisor.host import authorities
from metal_supervisor.host.addresses import networks_near
from metal_supervisor.host.machine import interfaces
from metal_supervisor.host.proxies import is_proxy, login_headers, proxy_for, reached
from metal_supervisor.models.listing import Retry, Unusable
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.remote.web_answers import Answer, WholeAnswer, is_encoded, refusal
from metal_supervisor.spec.hosts import Address, in_url
from metal_supervisor.spec.sources import shown

CONNECT_S = 10.0
STALL_S = 60.0
REDIRECTS = 5
MOVED = (301, 302, 303, 307, 308)
LONGEST_PAGE_BYTES = 16 << 20
TINY_BYTES = 512
"""A smaller part is followed by a pause: one byte in each chunk would take a whole core."""
TINY_PAUSE_S = 0.001
"""That pause."""
logging.getLogger("urllib3").setLevel(logging.ERROR)  # it logs the URL, key and all, of a header that it cannot read


class Stopped(Exception):
    """The request was stopped, because its model is no longer wanted."""


class Client:
    """HTTP client for one model, for one thread at a time; `stop` may be called from any."""

    def __init__(self, rules: SourcePolicy, stall_s: float = STALL_S) -> None:
        self.rules, self.stall_s = rules, stall_s
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.stopped = False
        self.cut = False
        """The latest wait was ended because it took too long."""
        self._until = math.inf
        """Monotonic time until which the present wait may last."""
        self._closed = threading.Event()
        self._watch: threading.Thread | None = None
        trusted = rules.ca_file or authorities.file_instead()
        kind = "ca_cert_dir" if trusted and Path(trusted).is_dir() else "ca_certs"
        self._options: dict[str, Any] = {"retries": False, kind: trusted}
        self._http = urllib3.PoolManager(**self._options)
        self._http.pool_classes_by_scheme = _pools(self)
        self._proxied: dict[str, urllib3.PoolManager] = {}

    def stop(self) -> None:
        """Abort the current request, and refuse new ones."""
        self.stopped = True
        self._abort()

    def _abort(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):  # closed meanwhile
                # The plain socket's own method: that of a TLS socket drops the session that another thread reads from.
                socket.socket.shutdown(each, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the idle connections."""
        self._closed.set()
        self._watch = None
        for each in (self._http, *self._proxied.values()):
            each.clear()

    @contextlib.contextmanager
    def in_time(self) -> Iterator[None]:
        """Abort what is done meanwhile, once it takes twice `stall_s`.

        The timeout of a socket is over with each byte: a server that sends one now and then, in a header or between two
        chunks, would be waited for for ever.
        """
        if self._watch is None:
            self._closed = threading.Event()
            self._watch = threading.Thread(target=self._watch_time, args=(self._closed,), name="in time", daemon=True)
            self._watch.start()
        self.cut, self._until = False, time.monotonic() + 2 * self.stall_s
        try:
            yield
        finally:
            self._until = math.inf

    def _watch_time(self, closed: threading.Event) -> None:
        while not closed.wait(self.stall_s / 4):
            if time.monotonic() > self._until:
                self.cut, self._until = True, math.inf
                self._abort()

    def get(
        self, url: str, headers: Mapping[str, str] | None = None, secret: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a GET, follow redirects, and return the answer, whatever its status, its body unread and not decoded.

        `secret`: headers for the origin of `url` only. Raises Unusable, Stopped.
        """
        first, current = origin(url), url
        for _ in range(REDIRECTS + 1):
            own = secret if secret and origin(current) == first else {}
            answer = self._once("GET", current, {"Accept-Encoding": "identity", **(headers or {}), **own})
            where = answer.headers.get("Location")
            if answer.status not in MOVED or not where:
                return answer
            answer.close()
            current = _following(url, current, where)
        text = f"{shown(url)} leads to more than {REDIRECTS} other addresses; check spec.source"
        raise Unusable("DownloadFailed", text)

    def check_plain(self, url: str, token: bool = False) -> None:
        """Raise Unusable for plain http to a host that this Mac's settings do not name: the file may be changed in
        transit, and a token read. Raises Stopped.
        """
        scheme, host, port = origin(url)
        if scheme != "http":
            return
        self._check_name(url)
        through = self._proxy(url)
        if not (self.rules.is_named(host, literal(host), port) if through else self._is_near(url, host, port)):
            risk = "and can be changed on the way; use https, or set spec.sha256 (one file)"
            if token:
                risk = "and the token of spec.sourceSecretRef can be read on the way; use https"
            text = f"{shown(url)} is plain http, {risk}, or name its host in --private-hosts of this Mac"
            raise Unusable("SourceNotAllowed", text)

    def _is_near(self, url: str, host: str, port: int) -> bool:
        """Return True if settings name a host, or all addresses that it resolves to. Raises Unusable, Stopped."""
        try:
            found = self.addresses(host, port)
        except (_Forbidden, OSError, UnicodeError) as error:
            raise self.trouble(url, error) from None
        return all(self.rules.is_named(host, ipaddress.ip_address(each), port) for each in found)

    def page(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        wait_s: float | None = None,
        until: float = math.inf,
    ) -> WholeAnswer:
        """Send one request, and return the answer, which may be a redirect, with its body. Raises Unusable, Stopped.

        `wait_s`: for each wait on the network, `stall_s` by default; `until`: monotonic time by which it must be over.
        """
        answer = self._once(method, url, headers, wait_s)
        try:
            if method != "HEAD" and is_encoded(answer):
                unasked = Unusable("DownloadFailed", f"{shown(url)} answered compressed, unasked")
                raise refusal(url, answer) if answer.status >= 400 else unasked
            found = bytearray()
            for part in body(self, url, answer, 1 << 16):
                found += part
                if len(found) > LONGEST_PAGE_BYTES:
                    raise Unusable("DownloadFailed", f"{shown(url)}: its answer is too long")
                if time.monotonic() > until:
                    raise Unusable("DownloadFailed", f"{shown(url)}: its answer takes too long", Retry.SOON)
            return WholeAnswer(answer.status, answer.headers, bytes(found))
        finally:
            answer.close()

    def _once(self, method: str, url: str, headers: Mapping[str, str], wait_s: float | None = None) -> Answer:
        self._check_name(url)
        pool = self._pool(url, headers)
        try:
            with self.in_time():
                answer = pool.request(
                    method,
                    url,
                    headers=dict(headers),
                    preload_content=False,
                    decode_content=False,
                    redirect=False,
                    timeout=urllib3.Timeout(connect=min(CONNECT_S, wait_s or CONNECT_S), read=wait_s or self.stall_s),
                )
            if self.cut:  # a header that ends like that counts as whole
                raise ConnectionAbortedError
            return answer
        except Exception as error:  # noqa: BLE001 - whatever a URL or a server makes a library raise
            raise self.trouble(url, error) from None

    def _proxy(self, url: str) -> str:
        """Return the proxy for a URL, "" for none. Reads the URL as urllib3 does, which connects."""
        scheme, host, port = origin(url)
        return proxy_for(f"{scheme}://{in_url(host)}:{port}", self.rules.proxies)

    def _pool(self, url: str, headers: Mapping[str, str]) -> urllib3.PoolManager:
        """Return the connections for a request. Raises Unusable if it must not go through the proxy."""
        if (trusted := self.rules.ca_file) and not os.access(trusted, os.R_OK):
            text = f"{trusted} cannot be read; check download_ca_file, REQUESTS_CA_BUNDLE and SSL_CERT_FILE"
            raise Unusable("DownloadFailed", text, Retry.SOON)
        proxy = self._proxy(url)
        if not proxy:
            return self._http
        scheme, host, port = origin(url)
        near = networks_near(interfaces())
        if not self.rules.lax and not self.rules.allows_through_proxy(host, literal(host), port, near):
            text = f"{shown(url)}: {host:.253} may not be requested through the proxy; name it in --allowed-hosts"
            raise Unusable("SourceNotAllowed", f"{text}, or in --private-hosts if its address is not public")
        if scheme == "http" and ("?" in url or any(each.lower() == "authorization" for each in headers)):
            text = f"{shown(url)} is plain http, and the proxy could read its token or signature; use https"
            raise Unusable("SourceNotAllowed", f"{text}, or name its host in --download-no-proxy")
        if proxy not in self._proxied:
            try:
                self._proxied[proxy] = _through(proxy, self, self._options)
            except ValueError:
                text = "the proxy for downloads is no http, https or socks5 URL; check download_proxy and HTTPS_PROXY"
                raise Unusable("DownloadFailed", text, Retry.SOON) from None
        return self._proxied[proxy]

    def _check_name(self, url: str) -> None:
        if self.stopped:
            raise Stopped
        host = origin(url)[1]
        if not host:
            raise Unusable("InvalidModel", f"{shown(url)} is no URL; check spec.source")
        if not self.rules.allows_host(host):
            text = f"{shown(url)}: {host:.253} is not one of --allowed-hosts of this Mac"
            raise Unusable("SourceNotAllowed", text)

    def trouble(self, url: str, error: Exception, underway: bool = False) -> Exception:
        """Unusable or Stopped for an error of a request, without its own text, which may quote the whole URL.

        `underway`: True if the connection broke after the answer had begun.
        """
        if self.stopped:
            return Stopped()
        if isinstance(error, Unusable | Stopped):
            return error
        cause = getattr(error, "reason", None) or error
        known = error, cause, *error.args, *getattr(cause, "args", ())
        refused = next((each for each in known if isinstance(each, _Forbidden)), None)
        if refused is not None:
            return Unusable("SourceNotAllowed", f"{shown(url)}: {refused}")
        if any(isinstance(each, ssl.SSLCertVerificationError) for each in known):
            own = "; --download-ca-file can name the authority of a company's proxy" if self._proxy(url) else ""
            return Unusable("DownloadFailed", f"{shown(url)}: its certificate is not one that this Mac trusts{own}")
        if isinstance(error, urllib3.exceptions.LocationParseError | UnicodeError | ValueError):
            return Unusable("InvalidModel", f"{shown(url)} is no URL; check spec.source")
        if self.cut:
            slow = f"it sends next to nothing in {2 * self.stall_s:.0f} s"
            return Unusable("DownloadFailed", f"{shown(url)}: {slow}", Retry.SOON)
        text = "the line was cut" if underway else proxy_refusal(error) or "; ".join(line_trouble(cause))
        return Unusable("DownloadFailed", f"{shown(url)}: {text}", Retry.SOON)

    # ── connections ──────────────────────────────────────────────────────────────────────────────

    def addresses(self, host: str, port: int) -> list[str]:
        """Addresses of a host that may be connected to. Raises _Forbidden, socket.gaierror."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        known = dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found)
        near, rules = networks_near(interfaces()), self.rules
        allowed = [each for each in known if rules.allows_address(host, ipaddress.ip_address(each), port, near)]
        if known and not allowed:
            first = next(iter(known))
            which = host if host == first else f"{host:.253} is at {first}, which"
            raise _Forbidden(f"{which} is no public address; --private-hosts can allow it")
        return allowed

    def hold(self, opened: socket.socket) -> None:
        """Remember a connection, so that `stop` can abort it. Raises Stopped."""
        with self._lock:
            self._sockets = [each for each in self._sockets if each.fileno() != -1]
            self._sockets.append(opened)
            # Names and addresses that do not answer have timeouts of their own.
            self.cut, self._until = False, time.monotonic() + 2 * self.stall_s
        if self.stopped:
            opened.close()
            raise Stopped


class _Forbidden(Exception):
    """An address that must not be connected to."""


def _pools(client: Client) -> dict[str, type[HTTPConnectionPool]]:
    """Connection pools, by scheme, that connect only to addresses that `client` allows."""

    def connected(connection: HTTPConnection) -> socket.socket:
        host, last = connection._dns_host, None
        try:
            addresses = client.addresses(host, connection.port)
        except (OSError, UnicodeError) as error:
            raise urllib3.exceptions.NewConnectionError(connection, f"no address: {type(error).__name__}") from None
        for address in addresses:
            if client.stopped:
                raise Stopped
            connection._dns_host = address
            try:
                return HTTPConnection._new_conn(connection)
            except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError) as error:
                last = error
            finally:
                connection._dns_host = host
        raise last or urllib3.exceptions.NewConnectionError(connection, "no address")

    def checked(pool: Any) -> Any:
        class CheckedConnection(pool.ConnectionCls):  # type: ignore[misc]
            def _new_conn(self) -> socket.socket:
                return connected(self)

            def connect(self) -> None:
                super().connect()
                client.hold(self.sock)

        return type("Pool", (pool,), {"ConnectionCls": CheckedConnection})

    return {"http": checked(HTTPConnectionPool), "https": checked(HTTPSConnectionPool)}


def _through(proxy: str, client: Client, options: Mapping[str, Any]) -> urllib3.PoolManager:
    """Connections by way of a proxy, which `client` can end. Raises ValueError for the URL of none."""
    if not is_proxy(proxy):
        raise ValueError
    if proxy.startswith("socks"):
        from urllib3.contrib.socks import SOCKSProxyManager  # rarely needed

        made: urllib3.PoolManager = SOCKSProxyManager(reached(proxy), **options)
    else:
        made = urllib3.ProxyManager(proxy, proxy_headers=login_headers(proxy), **options)

    def held(pool: Any) -> Any:
        class HeldConnection(pool.ConnectionCls):  # type: ignore[misc]
            def _new_conn(self) -> socket.socket:
                opened: socket.socket = super()._new_conn()
                client.hold(opened)  # the proxy's answer to CONNECT is waited for, too
                return opened

            def connect(self) -> None:
                super().connect()
                sock: Any = self.sock
                client.hold(getattr(sock, "socket", sock))  # TLS through a TLS proxy wraps it

        return type("Pool", (pool,), {"ConnectionCls": HeldConnection})

    made.pool_classes_by_scheme = {scheme: held(each) for scheme, each in made.pool_classes_by_scheme.items()}
    return made


def literal(host: str) -> Address | None:
    """Return the address that a host spells in any form (127.1, 0x7f000001, 2130706433), None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host.rstrip(".")))
    except OSError:
        return None


def origin(url: str) -> tuple[str, str, int]:
    """(scheme, host, port) of a URL, with an empty host if it is none.

    Parsed by urllib3, which also connects: other parsers read some URLs differently.
    """
    try:
        parts = urllib3.util.parse_url(url)
    except (ValueError, urllib3.exceptions.HTTPError):
        return "", "", 0
    scheme, host = (parts.scheme or "").lower(), (parts.host or "").lower().strip("[]")
    return (scheme, host, parts.port or {"https": 443}.get(scheme, 80)) if host else (scheme, "", 0)


def _following(first: str, current: str, where: str) -> str:
    """Target URL of a redirect. Raises Unusable if it must not be followed. `first`: the first URL, for messages."""
    try:
        following = urllib.parse.urljoin(current, where)
    except ValueError:
        raise Unusable("DownloadFailed", f"{shown(first)} leads to what is no URL; check spec.source") from None
    schemes = origin(current)[0], origin(following)[0]
    if schemes[1] not in ("http", "https") or schemes == ("https", "http"):
        text = f"{shown(first)} leads to a {schemes[1]!r:.20} address, which is not followed; check spec.source"
        raise Unusable("SourceNotAllowed", text)
    return following


def body(client: Client, url: str, answer: Answer, chunk_bytes: int) -> Iterator[bytes]:
    """Yield the body as it arrives, in parts of at most `chunk_bytes`. Raises Unusable, Stopped."""
    while part := read_part(client, url, answer, chunk_bytes):
        yield part


def read_part(client: Client, url: str, answer: Answer, most_bytes: int) -> bytes:
    """Read what has arrived of a body, at most `most_bytes`; b"" at its end. Raises Unusable, Stopped."""
    try:
        with client.in_time():
            part = answer.read1(most_bytes, decode_content=False)
    except Exception as error:  # noqa: BLE001 - whatever a server makes a library raise
        raise client.trouble(url, error, underway=True) from None
    if not part and (client.stopped or client.cut):  # that ends a body of unknown length as if it were complete
        raise client.trouble(url, ConnectionAbortedError())
    if 0 < len(part) < TINY_BYTES:
        time.sleep(TINY_PAUSE_S)
    return part


def bearer(token: str) -> dict[str, str]:
    """Header for a token of the Hub, {} for none. Raises Unusable for one that no header can hold."""
    if not token.isascii() or not token.isprintable() or " " in token:
        text = "the token of spec.sourceSecretRef (key HF_TOKEN) has characters that none has; write it again"
        raise Unusable("SourceUnauthorized", text)
    return {"Authorization": f"Bearer {token}"} if token else {}
