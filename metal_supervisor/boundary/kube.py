"""The Kubernetes API: credentials and TLS from the official client, requests of our own.

Its typed API classes cost 0.4 s and 21 MB each and its own watch hangs for ever on a half-open connection,
so only its configuration is used, under plain JSON requests with a timeout on each. No exception, log line
or status ever holds a token: an error says what kind it is and nothing that it quotes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import urllib3

from metal_supervisor.core.types import Json

APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
CONNECT_S, READ_S, WATCH_READ_S = 5.0, 15.0, 75.0
RELOAD_EVERY_S = 30.0
LONGEST_RETRY_AFTER_S = 300.0
PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
KEEPALIVE_S = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
log = logging.getLogger(__name__)


class KubeError(Exception):
    """The API could not do what was asked. `code` is the HTTP status, 0 if there was no answer."""

    def __init__(self, code: int, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{code} {reason}: {message}"[:500] if code else message[:500])
        self.code, self.reason, self.retry_after_s = code, reason, retry_after_s

    @property
    def conflict(self) -> bool:
        return self.code == 409


class BadKubeconfig(Exception):
    """The kubeconfig cannot be used; the message names the file and says what to do."""


def _without_secrets(error: BaseException) -> str:
    """An exception's kind and nothing it quotes: header errors print the token."""
    if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason is not None:
        error = error.reason
    if isinstance(error, (urllib3.exceptions.NewConnectionError, ConnectionError, socket.gaierror)):
        return str(error).rpartition(": ")[2][:200]
    return type(error).__name__


class Kube:
    """One API server with one set of credentials."""

    def __init__(self, kubeconfig: Path, context: str = "") -> None:
        self._kubeconfig, self._context = kubeconfig, context
        self._lock = threading.Lock()
        self._reloaded_at = time.monotonic()
        self.requests = 0
        self.context_name = ""
        self.clock_offset_s = 0.0
        """How far the server's clock is ahead of this machine's, as far as known."""
        self.load()

    def load(self) -> None:
        """Reads kubeconfig and credentials (anew). Raises BadKubeconfig."""
        import yaml
        from kubernetes import client, config  # 0.2 s: not before it is needed

        options = client.Configuration()
        try:
            if not self._kubeconfig.is_file():
                raise BadKubeconfig(f"kubeconfig {self._kubeconfig} does not exist; check --kubeconfig")
            if os.pathsep in str(self._kubeconfig):
                raise BadKubeconfig(f"kubeconfig {self._kubeconfig}: {os.pathsep!r} in a path is not possible; move it")
            options.host = ""  # the client's default is localhost, which nobody wrote
            content = yaml.safe_load(self._kubeconfig.read_text("utf-8"))
            self.context_name = str(self._context or content.get("current-context", ""))
            if missing := self._missing_credential(content):
                raise BadKubeconfig(f"kubeconfig {self._kubeconfig} names {missing}, which does not exist")
            config.load_kube_config(  # type: ignore[no-untyped-call]
                str(self._kubeconfig), context=self._context or None, client_configuration=options
            )
        except BadKubeconfig:
            raise
        except (config.ConfigException, yaml.YAMLError, OSError, *PARSE_ERRORS) as error:
            known = isinstance(error, config.ConfigException)
            told = str(error).splitlines()[0][:200] if known else type(error).__name__
            raise BadKubeconfig(f"kubeconfig {self._kubeconfig} cannot be used: {told}") from None
        parts = urllib.parse.urlsplit(options.host)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadKubeconfig(f"kubeconfig {self._kubeconfig}: the cluster's server must be an http(s) URL")
        for path in (options.ssl_ca_cert, options.cert_file, options.key_file):
            if path and not Path(path).is_file():
                raise BadKubeconfig(f"kubeconfig {self._kubeconfig} names {path}, which does not exist")
        name = parts.hostname
        if name == "localhost" or name.startswith("127.") or name == "::1":
            options.proxy = None  # an exported proxy is not for this machine
        options.retries = False
        options.connection_pool_maxsize = 4
        options.socket_options = [
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            *(
                (socket.IPPROTO_TCP, getattr(socket, name), value)
                for name, value in KEEPALIVE_S.items()
                if hasattr(socket, name)
            ),
        ]
        try:
            made = client.ApiClient(options)
        except (ImportError, ValueError, OSError) as error:
            text = f"cannot be used: {type(error).__name__} with its proxy or certificates"
            text = f"kubeconfig {self._kubeconfig} {text}"
            raise BadKubeconfig(text) from None
        with self._lock:
            self._options, self._client = options, made
        self.server: str = options.host.rstrip("/")

    def _missing_credential(self, content: Any) -> str:
        """The first credential file of the context that is not there: the client would go on without it."""
        named = (each["context"] for each in content["contexts"] if each["name"] == self.context_name)
        context: Any = next(named, {})
        user = next((each["user"] for each in content["users"] if each["name"] == context.get("user")), None) or {}
        paths = [str(user[name]) for name in ("client-certificate", "client-key", "tokenFile") if user.get(name)]
        return next((path for path in paths if not (self._kubeconfig.parent / path).is_file()), "")

    def close(self) -> None:
        """Drops all pooled connections; the next request makes a new one."""
        with self._lock:
            self._client.rest_client.pool_manager.clear()

    def reload(self) -> None:
        """Credentials anew after a 401, at most twice a minute; keeps the old ones if there are no new."""
        if time.monotonic() - self._reloaded_at < RELOAD_EVERY_S:
            return
        self._reloaded_at = time.monotonic()
        try:
            self.load()
        except BadKubeconfig as error:
            log.warning("credentials not reloaded", extra={"error": str(error)})

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """One request with a JSON answer. Raises KubeError."""
        with contextlib.closing(self._send(method, path, query, body, content_type, READ_S)) as answer:
            try:
                found = json.loads(answer.data)
            except urllib3.exceptions.HTTPError as error:
                raise KubeError(0, "Unreachable", f"answer broke off: {_without_secrets(error)}") from None
            except (ValueError, RecursionError):
                raise KubeError(0, "BadAnswer", f"{method} {path} was not answered in JSON") from None
            answer.release_conn()
        if not isinstance(found, dict):
            raise KubeError(0, "BadAnswer", f"{method} {path} was not answered with an object")
        return found

    def apply(self, path: str, body: Json, manager: str, force: bool = False) -> Json:
        """Server-side apply: our fields, all of them, and nothing else."""
        query = {"fieldManager": manager, **({"force": "true"} if force else {})}
        return self.request("PATCH", path, query, body, APPLY)

    def stream(self, path: str, query: Mapping[str, Any]) -> urllib3.BaseHTTPResponse:
        """An open watch. Raises KubeError."""
        return self._send("GET", path, query, None, "", WATCH_READ_S)

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        body: Json | None,
        content_type: str,
        read_s: float,
    ) -> urllib3.BaseHTTPResponse:
        with self._lock:
            options, pool = self._options, self._client.rest_client.pool_manager
        self.requests += 1
        try:
            headers = {"Accept": "application/json", "User-Agent": "metal-supervisor"}
            settings: Any = options.auth_settings()
            headers.update((each["key"], str(each["value"]).strip()) for each in settings.values() if each["value"])
            if body is not None:
                headers["Content-Type"] = content_type
            answer: urllib3.BaseHTTPResponse = pool.request(
                method,
                self.server + path + ("?" + urllib.parse.urlencode(query) if query else ""),
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=urllib3.Timeout(connect=CONNECT_S, read=read_s),
                preload_content=False,
                retries=False,
            )
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise KubeError(0, "Unreachable", f"{self.server_name}: {_without_secrets(error)}") from None
        if answer.status >= 300:
            raise self._failure(answer)
        return answer

    @property
    def server_name(self) -> str:
        """The server without its path, which may be a secret of the embedded API."""
        parts = urllib.parse.urlsplit(self.server)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def _failure(self, answer: urllib3.BaseHTTPResponse) -> KubeError:
        try:
            text = answer.data
            status = json.loads(text)
            reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
        except (urllib3.exceptions.HTTPError, ValueError, AttributeError, RecursionError):
            reason, message = "", f"{self.server_name} answered {answer.status} without saying why"
        finally:
            answer.release_conn()
        if answer.status == 401:
            message = "the credentials are refused; renew the token or certificate of the kubeconfig"
            self.reload()
        after = answer.headers.get("Retry-After", "")
        pause_s = float(after) if after.isascii() and after.isdigit() else 0.0
        return KubeError(answer.status, reason, message, min(pause_s, LONGEST_RETRY_AFTER_S))
