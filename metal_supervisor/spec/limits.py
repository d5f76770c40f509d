"""Limits per namespace: how much of this Mac the users of a namespace may ask for.

An administrator writes them as settings, with `*` for all other namespaces; `grants` applies them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

PRIORITIES: Mapping[str, int] = {"critical": 1_000_000, "high": 100_000, "normal": 10_000, "low": 1_000, "batch": 100}
SERVICE_TYPES = ("ClusterIP", "NodePort", "LoadBalancer")
ANY = "*"
NAMESPACE = re.compile(r"\*|[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def _parts(text: str) -> list[str]:
    return [part for each in text.split(",") if (part := each.strip())]


def priorities(text: str) -> dict[str, str]:
    """Namespace -> its priority, `*` for all others, from `NAMESPACE=PRIORITY,…`. Raises ValueError."""
    found: dict[str, str] = {}
    for each in _parts(text):
        name, equals, value = each.partition("=")
        if not equals or not NAMESPACE.fullmatch(name):
            raise ValueError("must look like NAMESPACE=PRIORITY,NAMESPACE=PRIORITY, with * for all other namespaces")
        if name in found:
            raise ValueError(f"must not give {name} two values")
        if value not in PRIORITIES:
            raise ValueError(f"must have values of {', '.join(PRIORITIES)}")
        found[name] = value
    return found


def namespaces(text: str) -> frozenset[str]:
    """Read a list of namespaces, `*` for all. Raises ValueError."""
    found = frozenset(_parts(text))
    if not all(NAMESPACE.fullmatch(each) for each in found):
        raise ValueError("must name namespaces, separated by commas, or be *")
    return found


def service_types(text: str) -> frozenset[str]:
    """Read a list of Service types. Raises ValueError."""
    found = frozenset(_parts(text))
    if not found <= set(SERVICE_TYPES):
        raise ValueError(f"must name some of {', '.join(SERVICE_TYPES)}")
    return found


def problem(read: Callable[[str], object]) -> Callable[[str], str | None]:
    """Make a check of a setting from its reader: None, or what is wrong with a text."""

    def check(text: str) -> str | None:
        try:
            read(text)
        except ValueError as error:
            return str(error)
        return None

    return check


@dataclass(frozen=True)
class Limits:
    """The limits of all namespaces; by default there are none."""

    priority: Mapping[str, str] = field(default_factory=dict)
    """The highest priority that counts."""
    protection: frozenset[str] = frozenset({ANY})
    """Namespaces whose `spec.evictionProtection` counts."""
    service_types: frozenset[str] = frozenset(SERVICE_TYPES)
