"""Errors of requests to the API server: one exception type, with messages that say what to do.

A refusal names the verb and the resource, because the fix is a line of RBAC; an untrusted certificate is reported with
the reason; Retry-After is respected, up to a limit. Texts that may quote a header or a URL are left out.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

import urllib3

from metal_supervisor.spec.types import Json

LONGEST_RETRY_AFTER_S = 60.0
UP = "is the server up?"
APPLY_KINDS = "kubectl apply --server-side -f conf/crds"
NO_KINDS = f"LLMKube's kinds are not installed: {APPLY_KINDS}"
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}

_RESOURCE = re.compile(r"/(?:api|apis/([^/]+))/[^/]+(?:/namespaces/([^/]+))?/([^/]+)(?:/([^/]+))?(?:/([^/]+))?")
_UNDECLARED = re.compile(r"\.status\.(\w+)[^:\n]*: field not declared in schema")
_NO_RIGHT = re.compile(r'User "([^"]+)" cannot (\w+) resource "([^"]+)"')
_NOT_RBAC = re.compile(r"(?i)denied|webhook|quota|violates|being terminated|admission")


class KubeError(Exception):
    """A request to the API failed. `code` is the HTTP status, 0 if there was no usable answer."""

    def __init__(self, code: int, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{code} {reason}: {message}"[:500] if code else message[:500])
        self.code, self.reason, self.message, self.retry_after_s = code, reason, message[:500], retry_after_s

    @property
    def conflict(self) -> bool:
        return self.code == 409

    @property
    def is_refusal(self) -> bool:
        """True if the server refuses this object for itself: by a right, a quota, a schema or an admission policy.

        A webhook may answer with any code below 500, 400 by default.
        """
        return 400 <= self.code < 500 and self.code not in (401, 404, 408, 409, 410, 429)


@contextlib.contextmanager
def only_kube_errors() -> Iterator[None]:
    """Raise KubeError also for an answer that is no API's, found where it is used: as of a proxy that asks for a login.

    So too if this Mac's own addresses cannot be read, with which another agent's objects are compared.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise KubeError(0, "BadAnswer", f"an answer lacks what an API's has: {error!r:.100}") from None
    except OSError as error:
        raise KubeError(0, "Unreachable", f"this Mac's own addresses cannot be read: {error!r:.100}") from None


def missing(error: KubeError, namespace: str, kubeconfig: str = "") -> str:
    """What a cluster lacks by a 404, and how to make it; "" if that is a single object, or the error is no 404.

    `kubeconfig`: quoted path of the one that kubectl needs for it, "" for the reader's own.
    """
    if error.code != 404:
        return ""
    if error.message.startswith('namespaces "'):
        kubectl = f"kubectl --kubeconfig {kubeconfig}" if kubeconfig else "kubectl"
        return f"there is no namespace {namespace}: {kubectl} create namespace {namespace}; or choose with --namespace"
    # Of a kind that it does not serve, a server says only that there is nothing at this path, or sends no status.
    return "" if error.message.endswith('" not found') else NO_KINDS


def undeclared(error: KubeError) -> set[str]:
    """The fields of a status that a server's definition of its kind lacks, by its refusal of all that was applied."""
    return set(_UNDECLARED.findall(error.message))


def without_secrets(error: BaseException) -> tuple[str, str]:
    """(reason, text) of an exception: its kind, but no text that it quotes, because header errors print the token."""
    if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason is not None:
        error = error.reason
    if isinstance(error, urllib3.exceptions.SSLError) and error.args and isinstance(error.args[0], ssl.SSLError):
        error = error.args[0]
    if isinstance(error, ssl.SSLCertVerificationError):
        why = str(error.verify_message).rstrip(".")
        text = f"its certificate is not accepted: {why}; check server and certificate-authority in the kubeconfig"
        return "Untrusted", text
    if isinstance(error, ssl.SSLError):
        return "Unreachable", f"no TLS: {error.reason or type(error).__name__}"
    if refusal := proxy_refusal(error):
        return "Unreachable", refusal
    if isinstance(error, (urllib3.exceptions.NewConnectionError, ConnectionError, socket.gaierror)):
        return "Unreachable", str(error).rpartition(": ")[2][:200]
    return "Unreachable", type(error).__name__


def proxy_refusal(error: BaseException) -> str:
    """Reason why a proxy did not connect to a server, "" for any other error. Quotes only the status of its answer."""
    if not isinstance(error, urllib3.exceptions.ProxyError):
        return ""
    status = re.search(r"failed: (407|\d{3})\b", str(error.original_error))
    if status is None:
        return f"the proxy cannot be used: {without_secrets(error.original_error)[1]}"
    login = "; put its user and password into its URL: http://USER:PASSWORD@HOST:PORT" if status[1] == "407" else ""
    return f"the proxy answered {status[1]} to CONNECT{login}"


def line_trouble(error: BaseException) -> tuple[str, str]:
    """(trouble, advice) for a failed connection, by its underlying cause; quotes nothing of it."""
    causes: list[BaseException] = [error]
    for each in causes:
        further = [getattr(each, "reason", None), each.__cause__, each.__context__, *each.args]
        causes += [one for one in further if isinstance(one, BaseException) and one not in causes]
    if any(isinstance(each, socket.gaierror) for each in causes):
        return "its name has no address", "check this Mac's network and DNS, and the host name"
    if any(isinstance(each, ConnectionRefusedError) for each in causes):
        return "connection refused", UP
    if any(isinstance(each, TimeoutError) for each in causes):
        return "no answer in time", UP
    return type(error).__name__, UP


def http_date(text: str) -> float | None:
    """Unix time of an HTTP date, None for anything else."""
    try:
        found = parsedate_to_datetime(text)
        return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, TypeError, LookupError, OverflowError):
        return None


def retry_after_s(
    headers: Mapping[str, str], status: Json | None = None, longest_s: float = LONGEST_RETRY_AFTER_S
) -> float:
    """Seconds that a server asks to wait, from a number, a date by its own clock or the status; 0.0 if not asked.

    At most `longest_s`.
    """
    text = headers.get("Retry-After", "").strip()
    pause_s = 0.0
    if text.isascii() and text.isdigit():
        pause_s = float(text[:9])
    elif (until := http_date(text)) is not None:
        pause_s = until - (http_date(headers.get("Date", "")) or time.time())
    elif isinstance(details := (status or {}).get("details"), dict):
        asked = details.get("retryAfterSeconds")
        pause_s = float(asked) if isinstance(asked, int) and 0 <= asked < 10**9 else 0.0
    return min(max(pause_s, 0.0), longest_s)


def forbidden(method: str, path: str, watch: bool, told: str) -> str:
    """Message for a 403: the verb and the resource, and the right to grant; the server's own text if not for RBAC."""
    found = _RESOURCE.fullmatch(path)
    if not found:
        return f"cannot {method} {path}: {told}"
    group, namespace, plural, name, sub = found.groups()
    verb = VERBS.get(method) or ("watch" if watch else "get" if name else "list")
    if method == "DELETE":
        verb = "delete" if name else "deletecollection"
    right = _NO_RIGHT.search(told)
    if right:
        verb = right[2]  # an apply that would create is refused as a create
    resource = f"{plural}/{sub}" if sub else plural
    where = f' in namespace "{namespace}"' if namespace else ""
    text = f"cannot {verb} {resource}{where}"
    if _NOT_RBAC.search(told) and not right:
        return f"{text}: {told}"
    to = f" to {right[1]}" if right else ""
    return f'{text}; grant the verb "{verb}" on "{resource}"{f" of {group}" if group else ""}{to}'


def now_micro() -> str:
    """Current time in the format of MicroTime fields."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
