"""A Mac's own credential: a ServiceAccount token, created once by an administrator, then renewed by the Mac.

An administrator's kubeconfig does not belong on a Mac that may be stolen, and a token that never expires cannot be
revoked. So `metal-supervisor kubeconfig` requests a token for the Mac's own account, and the Mac requests the next one
after two thirds of its lifetime. No token is printed, logged or part of an error.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metal_supervisor.cluster import credentials
from metal_supervisor.cluster.answers import NO_KINDS
from metal_supervisor.cluster.credentials import BadKubeconfig
from metal_supervisor.cluster.kube import Kube, KubeError
from metal_supervisor.cluster.kubeconfig_copy import text_of
from metal_supervisor.cluster.manifests import api_path
from metal_supervisor.settings.checks import kubeconfigs
from metal_supervisor.spec.hosts import is_loopback, web_url
from metal_supervisor.spec.instants import utc
from metal_supervisor.spec.types import Json
from metal_supervisor.spec.user_error import UserError
from metal_supervisor.state.kept_files import write_atomic

SHORTEST_S = 600
"""Shortest lifetime of a token that the API accepts."""
LONGEST_S = 2**32
"""Longest lifetime of a token that the API accepts."""
FRESH = 2 / 3
"""Share of a token's lifetime after which it is renewed: a Mac may sleep through the last third."""
LOOK_AGAIN_S = 3600.0
RETRY_S = 60.0
LONGEST_RETRY_S = 900.0
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
log = logging.getLogger(__name__)


class AccountError(UserError):
    """A credential could not be created or used; the message says what to do, and holds no secret."""


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Token:
    """A ServiceAccount's token with its claims, which are not verified."""

    text: str = field(repr=False)
    namespace: str
    account: str
    issued: float
    """Unix time, by the server's clock."""
    expires: float

    @property
    def due(self) -> float:
        """Unix time at which it should be renewed."""
        return self.issued + FRESH * (self.expires - self.issued)


def claims_of(text: str) -> Any:
    """The claims of a JWT, not verified, of any shape. Raises ValueError, LookupError, RecursionError."""
    part = text.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))


def read_token(text: str) -> Token | None:
    """Parse a ServiceAccount's token that expires; None for anything else."""
    text = text.strip()
    try:
        payload = claims_of(text)
        subject = re.fullmatch(r"system:serviceaccount:([a-z0-9-]+):([a-z0-9.-]+)", payload["sub"])
        issued, expires = float(payload["iat"]), float(payload["exp"])
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return None
    whole = text.count(".") == 2 and re.fullmatch(r"[\x21-\x7e]+", text)
    if not whole or not subject or not 0 <= issued < expires < math.inf:
        return None
    return Token(text, subject[1], subject[2], issued, expires)


def request_token(kube: Kube, namespace: str, account: str, life_s: float) -> Token:
    """Request a new token for an account. Raises KubeError, or AccountError if the answer holds none."""
    body: Json = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": max(SHORTEST_S, round(life_s))},
    }
    answer = kube.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", body=body)
    status = answer.get("status")
    token = read_token(str(status.get("token") or "")) if isinstance(status, dict) else None
    if token is None or (token.namespace, token.account) != (namespace, account):
        raise AccountError(f"{kube.server_name} gave no token of {namespace}/{account}; is it a Kubernetes API?")
    return token


# ── the command ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TokenOrder:
    """Arguments of `metal-supervisor kubeconfig`."""

    source: Path
    """The administrator's kubeconfig."""
    context: str
    """Context in it, "" for the current one."""
    server: str
    """URL by which the Mac reaches the API; "" for the administrator's."""
    namespace: str
    account: str
    life_s: float
    output: Path
    force: bool = False

    @property
    def token_file(self) -> Path:
        return self.output.with_name(self.output.name + ".token")


def duration_s(text: str) -> float:
    """Parse `720h`, `30d` or `45m` into seconds. Raises AccountError."""
    found = re.fullmatch(r"(\d{1,10})([smhd])", text.strip())
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise AccountError(f"--duration must be a time like 720h or 30d, of ten minutes at least, not {text!r:.40}")
    return float(seconds)


def create(order: TokenOrder) -> list[str]:
    """Write kubeconfig and token file, try them with one request, and return the lines to print.

    Raises AccountError or BadKubeconfig; if only the trial failed, the files are written.
    """
    _check(order)
    kube = Kube(order.source, order.context)
    try:
        token = request_token(kube, order.namespace, order.account, order.life_s)
    except KubeError as error:
        raise _explained(error, order) from None
    finally:
        kube.close()
    chosen = credentials.choose(order.source, order.context)
    server = (order.server or chosen.server).rstrip("/")
    user = {"tokenFile": order.token_file.name}
    content = text_of(order.account, chosen.cluster_info(server), user, order.namespace)
    try:
        for path, text in ((order.token_file, token.text + "\n"), (order.output, content)):
            write_atomic(path, text)
            path.chmod(0o600)
    except OSError as error:
        raise AccountError(f"--output: cannot write {error.filename}: {error.strerror}") from None
    told = [
        f"wrote {order.output} and {order.token_file.name} beside it, for your eyes only",
        f"account {order.namespace}/{order.account} at {server}, until {utc(token.expires)}; the Mac renews it in time",
    ]
    if token.expires - token.issued < order.life_s * 0.99:
        hours = (token.expires - token.issued) / 3600
        told.append(f"the server gives tokens of {hours:.1f} h at most; a Mac that sleeps longer needs a new one")
    told += _tried(order, server)
    if not order.server and chosen.local:
        told.append("the server's address is this machine's own; for another Mac, say with --server how it is reached")
    node = f" --node-name {order.account[6:]}" if order.account.startswith("metal-") else ""
    return [*told, f"on the Mac: metal-supervisor run --kubeconfig {order.output} --namespace {order.namespace}{node}"]


def _check(order: TokenOrder) -> None:
    for flag, text in (("--namespace", order.namespace), ("--service-account", order.account)):
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", text) or (flag == "--namespace" and "." in text):
            raise AccountError(f"{flag} must be a name of lower-case letters, digits and dashes, not {text!r:.80}")
    if order.server:
        parts = web_url(order.server)
        plain = parts is not None and parts.scheme == "http" and not is_loopback(parts.hostname or "")
        if parts is None or plain or "@" in order.server:
            raise AccountError("--server must be the https URL of the API server, as the Mac reaches it")
    if not any(map(Path.is_file, kubeconfigs(str(order.source)))):
        raise AccountError(f"--from: {order.source} does not exist; name the kubeconfig of an administrator")
    if not order.output.parent.is_dir():
        raise AccountError(f"--output: {order.output.parent} is not a directory; create it first")
    for path in (order.output, order.token_file):
        if (path.exists() or path.is_symlink()) and not order.force:
            raise AccountError(f"--output: {path} exists; name another file, or overwrite it with --force")
        if path.is_dir():
            raise AccountError(f"--output: {path} is a directory; name a file")


def _explained(error: KubeError, order: TokenOrder) -> AccountError:
    """AccountError for a refused token request, with advice for the administrator."""
    where = f'in namespace "{order.namespace}"'
    if error.code == 404:
        return AccountError(
            f'ServiceAccount "{order.account}" does not exist {where}; create it and its rights with '
            f"conf/rbac/mac.yaml, or: kubectl -n {order.namespace} create serviceaccount {order.account}"
        )
    if error.code == 403:
        return AccountError(f"{error.message}; {order.source} must belong to an account that may")
    return AccountError(f"no token for {order.namespace}/{order.account}: {error}")


def _tried(order: TokenOrder, server: str) -> list[str]:
    """Try the new credential with one request, and return the lines to print. Raises AccountError if it fails."""
    kept = f"the files are written, and stay: {order.output}"
    kube = Kube(order.output)
    try:
        kube.request("GET", api_path("inferenceservices", order.namespace), {"limit": 1})
    except KubeError as error:
        if error.code == 404:
            return [f"it works, but {NO_KINDS}"]
        if error.code == 401:
            text = f"{server} refuses the token: check that --server is the cluster of {order.source}"
        elif error.code == 403:
            text = f"{error.message}; apply conf/rbac/namespace.yaml and conf/rbac/mac.yaml, and it works at once"
        elif error.code == 0:
            text = f"not tried, because from here {error.message}; if only the Mac reaches --server, that is well"
        else:
            text = f"the new credential does not work: {error}"
        raise AccountError(f"{text}; {kept}") from None
    finally:
        kube.close()
    return ["tried it: it may list inferenceservices"]


# ── renewal ──────────────────────────────────────────────────────────────────────────────────────


class Renewal:
    """Renewal of the token in a kubeconfig's token file. For one thread; raises nothing.

    Does nothing if the kubeconfig has no token file, or if that holds no ServiceAccount token that expires.
    """

    def __init__(self, kubeconfig: Path, context: str, kube: Kube, clock: Callable[[], float] = time.time) -> None:
        """`kube`: client of the same kubeconfig; it reads a replaced token file by itself."""
        self._kubeconfig, self._context, self._kube, self._clock = kubeconfig, context, kube, clock
        self._failures = 0
        self._not_before = -math.inf
        self.problem = ""
        """Reason why the token is not renewed, and its expiry; "" if all is well. For /status and `doctor`."""

    def _current(self) -> tuple[Path, Token] | None:
        """Token file and the token in it; None if there is none to renew."""
        try:
            chosen = credentials.choose(self._kubeconfig, self._context)
            if not chosen.token_file:
                return None
            path = chosen.token_file.resolve()
            token = read_token(path.read_text("ascii"))
        except (BadKubeconfig, OSError, ValueError, RuntimeError):
            return None
        return (path, token) if token else None

    def _due_s(self, found: tuple[Path, Token] | None) -> float:
        """Seconds until the token is due, 0.0 if it is; at most an hour, because the files may be replaced."""
        if found is None:
            return LOOK_AGAIN_S
        return min(LOOK_AGAIN_S, max(0.0, found[1].due - self._server_time()))

    def _server_time(self) -> float:
        return self._clock() + self._kube.clock_offset_s

    def step(self) -> float:
        """Renew the token if it is due; return the seconds until the next call. May take seconds."""
        pause_s = self._not_before - time.monotonic()
        if pause_s > 0:
            return min(pause_s, LONGEST_RETRY_S)
        found = self._current()
        wait_s = self._due_s(found)
        if found is not None and wait_s <= 0:
            if error := self._renewed(*found):
                return self._failed(found[1], error)
            wait_s = max(1.0, self._due_s(self._current()))
        self._failures, self.problem = 0, ""
        return wait_s

    def _renewed(self, path: Path, old: Token) -> str:
        """Replace the token file with a new token. Returns the reason why that failed, or "" if it did not."""
        try:
            new = request_token(self._kube, old.namespace, old.account, old.expires - old.issued)
            if new.expires <= old.expires:
                return f"the server gives only one that ends no later, {utc(new.expires)}"
            write_atomic(path, new.text + "\n")
        except (KubeError, AccountError) as error:
            return str(error)
        except OSError as error:
            return f"cannot write {path}: {error.strerror or type(error).__name__}"
        log.info("token renewed", extra={"account": f"{old.namespace}/{old.account}", "expires": utc(new.expires)})
        return ""

    def _failed(self, old: Token, error: str) -> float:
        pause_s = min(LONGEST_RETRY_S, RETRY_S * 2.0 ** min(self._failures, 8))
        self._failures += 1
        self._not_before = time.monotonic() + pause_s
        over = old.expires <= self._server_time()
        until = (
            f"expired at {utc(old.expires)}; make a new one with `metal-supervisor kubeconfig`"
            if over
            else (f"stays, and expires at {utc(old.expires)}")
        )
        self.problem = f"the token of {old.namespace}/{old.account} is not renewed: {error}; the old one {until}"
        log.warning("token not renewed", extra={"problem": self.problem, "again_s": round(pause_s)})
        return pause_s


def order_from(arguments: Any) -> TokenOrder:
    """Build the order from the command line's arguments. Raises AccountError."""
    return TokenOrder(
        source=Path(arguments.source).expanduser().absolute(),
        context=arguments.context,
        server=arguments.server,
        namespace=arguments.namespace,
        account=arguments.service_account,
        life_s=duration_s(arguments.duration),
        output=Path(arguments.output).expanduser().absolute(),
        force=arguments.force,
    )
