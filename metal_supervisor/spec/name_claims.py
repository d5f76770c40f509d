"""Which service of several namespaces answers to a name at the gateway, so that no prompt reaches another tenant.

A name with a namespace in it belongs to that namespace. Any other one belongs to the service that holds it, at first
the oldest; one of another namespace loses it until it is edited, even if the holder is deleted meanwhile: a client
that still uses the name gets an error, not another tenant's model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Key, Rejected, Service

NAME_TAKEN = "NameTaken"
QUALIFIED = re.compile(r"([a-z0-9-]{1,63})/[a-z0-9.-]{1,253}")
"""A name with a namespace in it."""


def lost_names(
    services: Collection[Service | Rejected], records: Collection[Record]
) -> Mapping[Key, tuple[str, ...]]:
    """The names for which each service must not answer at the gateway. `records`: of the latest pass."""
    before = {(each.owner, each.uid, each.generation): each.lost_names for each in records if each.lost_names}
    held = {
        (name, each.uid) for each in records for name in (each.name, *each.aliases) if name not in each.lost_names
    }
    kept, holders = dict[Key, frozenset[str]](), dict[str, tuple[bool, bool, str, str, str]]()
    for each in services:
        owner = each.namespace, each.name
        kept[owner] = frozenset(before.get((owner, each.uid, each.generation), ()))
        claims = [(f"{each.namespace}.{each.name}", False), *((name, True) for name in _wanted(each, ()))]
        for name, short in claims:
            if name not in kept[owner]:
                claim = short, (name, each.uid) not in held, each.created, each.uid, each.namespace
                holders[name] = min(claim, holders.get(name, claim))
    found = {}
    for each in services:
        owner = each.namespace, each.name
        lost = [
            name
            for name in _wanted(each, kept[owner])
            if name in kept[owner] or holders[name][-1] != each.namespace or _is_of_another(name, each.namespace)
        ]
        if lost:
            found[owner] = tuple(lost)
    return found


def _wanted(item: Service | Rejected, lost: Collection[str]) -> Collection[str]:
    """The names that a service asks for; of a rejected one, its own and those that it lost."""
    return dict.fromkeys((item.name, *(item.aliases if isinstance(item, Service) else lost)))


def _is_of_another(name: str, namespace: str) -> bool:
    qualified = QUALIFIED.fullmatch(name)
    return qualified is not None and qualified[1] != namespace


def without(service: Service, lost: tuple[str, ...]) -> Service:
    """A service without the names that it lost, and with the reason among what is not granted."""
    text = (
        f"the gateway does not answer to {', '.join(lost)} for this service: the name is, or was, of another "
        f"namespace's older service; use {service.namespace}/{service.name}, or edit the service or its aliases once "
        "the name is free"
    )
    return replace(service, lost_names=lost, not_granted=(*service.not_granted, (NAME_TAKEN, text)))
