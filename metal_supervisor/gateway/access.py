"""Access to the gateway: hashed keys, the services that each may use, and its limits.

A key is random and long, so one round of SHA-256 is enough: there is no dictionary to try.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from metal_supervisor.gateway.errors import GatewayError
from metal_supervisor.gateway.routing import Backend
from metal_supervisor.spec.hosts import parsed_address

PREFIX = "ms-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SERVICE = re.compile(r"[a-z0-9][a-z0-9.-]*(/([a-z0-9][a-z0-9.-]*|\*))?")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
MINUTE_S = 60.0
MOST_NAMES = 10_000


class BadKeys(Exception):
    """A file of keys that cannot be used; the message names the line."""


@dataclass(frozen=True)
class AccessKey:
    """One line of the file of keys."""

    name: str
    digest: str = field(repr=False)
    """`sha256:` and the digest of the key in hexadecimal."""
    services: tuple[str, ...] = ()
    """Services that it may use, as `name`, `namespace/name` or `namespace/*`; empty: all."""
    per_minute: int = 0
    """Requests in any 60 s, 0 without a limit."""
    at_once: int = 0
    """Requests at the same time, 0 without a limit."""

    def allows(self, backend: Backend) -> bool:
        """True if its holder may use a service."""
        names = {backend.name, backend.qualified, f"{backend.namespace}/*"} - {*backend.lost_names}
        return not self.services or not names.isdisjoint(self.services)

    @property
    def at_home(self) -> bool:
        """True if all its services are of one namespace."""
        namespaces = {each.rpartition("/")[0] for each in self.services}
        return len(namespaces) == 1 and "" not in namespaces


def digest_of(key: str) -> str:
    """The form in which a key is kept."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def line_of(key: AccessKey) -> str:
    """The line of the file for a key."""
    words = [key.name, key.digest]
    words += [f"services={','.join(key.services)}"] if key.services else []
    words += [f"per-minute={key.per_minute}"] if key.per_minute else []
    words += [f"at-once={key.at_once}"] if key.at_once else []
    return " ".join(words)


def parse(text: str) -> tuple[AccessKey, ...]:
    """The keys of a file's text. Raises BadKeys, naming the line and what is expected."""
    found: dict[str, AccessKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key = _parsed(words, f"line {number}")
        if key.name in found:
            raise BadKeys(f"line {number}: a second key called {key.name}; names must differ")
        found[key.name] = key
    return tuple(found.values())


def is_name(text: str) -> bool:
    """True if a key may be called so."""
    return bool(_NAME.fullmatch(text))


def _parsed(words: Sequence[str], where: str) -> AccessKey:
    if not is_name(words[0]):
        raise BadKeys(f"{where}: the first word must be a name of letters, digits, '.', '_' and '-'")
    if len(words) < 2 or not _HASH.fullmatch(words[1]):
        text = "the second word must be sha256: and 64 hexadecimal digits, as `metal-supervisor key add` writes it"
        raise BadKeys(f"{where}: {text}")
    values: dict[str, str] = {}
    for word in words[2:]:
        name, equals, value = word.partition("=")
        if name not in ("services", "per-minute", "at-once") or not equals or name in values:
            raise BadKeys(f"{where}: {name[:40]!r} must be services=…, per-minute=… or at-once=…, each once")
        values[name] = value
    return AccessKey(
        words[0],
        words[1],
        services_of(values.get("services"), where),
        limit(values.get("per-minute"), f"{where}: per-minute"),
        limit(values.get("at-once"), f"{where}: at-once"),
    )


def services_of(text: str | None, where: str) -> tuple[str, ...]:
    """The services in a comma-separated list, () for None: all. Raises BadKeys."""
    if text is None:
        return ()
    names = tuple(text.split(","))
    if not all(_SERVICE.fullmatch(each) for each in names):
        raise BadKeys(f"{where}: services must name services as name, namespace/name or namespace/*, with commas")
    return names


def limit(text: str | None, what: str) -> int:
    """A limit as it is written, 0 for None. Raises BadKeys, which begins with `what`."""
    if text is None:
        return 0
    if not re.fullmatch(r"[1-9][0-9]{0,6}", text, re.ASCII):
        raise BadKeys(f"{what} must be a whole number from 1 on")
    return int(text)


ANYONE = AccessKey("", "")
"""The key of every caller of a gateway that asks for none."""


def network_of(address: str) -> str:
    """Name of a client without a key: its IPv4 address, or the /64 network in which it may take any IPv6 address."""
    found = parsed_address(address)
    if found is None:
        return "unknown"
    return str(ipaddress.ip_network((found, 64), strict=False) if found.version == 6 else found)


def sent_key(headers: Mapping[str, str]) -> str:
    """The key in a request's headers, "" without one."""
    scheme, _, value = headers.get("Authorization", "").partition(" ")
    return (value if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


def check_engine_key(key: AccessKey, headers: Mapping[str, str], backend: Backend) -> None:
    """Refuse a caller who has shown no key of the gateway and lacks the engine's own. Raises GatewayError.

    A gateway without keys lends that of an engine to no one.
    """
    if key.name or not backend.key:
        return
    sent = digest_of(sent_key(headers))
    if not sum(hmac.compare_digest(sent, digest_of(each)) for each in (backend.key, *backend.further_keys)):
        text = f"{backend.name} has a key of its own, which this request does not have"
        raise GatewayError(401, "invalid_api_key", text, final=True)


class LastMinute:
    """Counts of what each of several names did within the last 60 s."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def enter(self, name: str, most: int, now: float) -> int:
        """Count one more at a monotonic time and return 0, or seconds to wait if there were `most` already."""
        if len(self._times) > MOST_NAMES:
            self._times = {each: times for each, times in self._times.items() if times and times[-1] > now - MINUTE_S}
        times = self._times.setdefault(name, deque())
        while times and times[0] <= now - MINUTE_S:
            times.popleft()
        if len(times) >= most:
            return min(60, max(1, int(times[0] + MINUTE_S - now) + 1))
        times.append(now)
        return 0

    def forget_others(self, names: Collection[str]) -> None:
        self._times = {name: times for name, times in self._times.items() if name in names}


class Doorman:
    """Tells callers by their keys, and keeps count of their requests."""

    def __init__(self) -> None:
        self._keys: Sequence[AccessKey] | None = None
        """None if no keys are asked for."""
        self._recent = LastMinute()
        self._at_once: Counter[str] = Counter()

    def admit_only(self, keys: Sequence[AccessKey]) -> None:
        """Ask for one of these keys from now on; with none, every request is refused."""
        self._keys = keys
        self._recent.forget_others({each.name for each in keys})

    def known(self, sent: str) -> AccessKey:
        """The key that was sent, if it is known. Raises GatewayError."""
        if self._keys is None:
            return ANYONE
        digest = digest_of(sent)
        for key in self._keys:
            if sent and hmac.compare_digest(key.digest, digest):
                return key
        text = "the key is not known" if sent else "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
        raise GatewayError(401, "invalid_api_key", text, final=True, close=True)

    def enter(self, key: AccessKey, now: float) -> None:
        """Count a request from now on, a monotonic time. Raises GatewayError beyond a limit."""
        if key.at_once and self._at_once[key.name] >= key.at_once:
            text = f"the key {key.name} has {key.at_once} requests under way, which is its limit"
            raise GatewayError(429, "rate_limit_exceeded", text, retry_after_s=1)
        if key.per_minute and (wait_s := self._recent.enter(key.name, key.per_minute, now)):
            text = f"the key {key.name} may send {key.per_minute} requests a minute"
            raise GatewayError(429, "rate_limit_exceeded", text, retry_after_s=wait_s)
        self._at_once[key.name] += 1

    def leave(self, key: AccessKey) -> None:
        """Count the end of a request that entered."""
        self._at_once[key.name] -= 1
        if not self._at_once[key.name]:
            del self._at_once[key.name]
