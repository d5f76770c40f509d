"""Which service answers to a name: at the gateway, among those of several namespaces, and on a shared daemon.

A name with a namespace in it belongs to that namespace. Any other one belongs to the service that holds it, at first
the oldest; one of another namespace loses it until it is edited, even if the holder is deleted meanwhile: a client
that still uses the name gets an error, not another tenant's model.

A shared daemon serves each model under the service's own name and under further ones, such as its Model's. Several
services may claim one of those: their own names come first, then the present holder, then the oldest service.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Key, Rejected, Service, shown_to

NAME_TAKEN = "NameTaken"
QUALIFIED = re.compile(r"([a-z0-9-]{1,63})/[a-z0-9.-]{1,253}")
"""A name with a namespace in it."""


def lost_names(services: Collection[Service | Rejected], records: Collection[Record]) -> Mapping[Key, tuple[str, ...]]:
    """The names for which each service must not answer at the gateway. `records`: of the latest pass."""
    before = {(each.owner, each.uid, each.generation): each.lost_names for each in records if each.lost_names}
    held = {(name, each.uid) for each in records for name in (each.name, *each.aliases) if name not in each.lost_names}
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


def on_daemons(
    services: Collection[Service], records: Collection[Record], wanted: Callable[[Service], Collection[str]]
) -> Mapping[Key, Service]:
    """The services with the further names that their shared daemons serve them under.

    `wanted`: the further names that a service claims. `records`: of the latest pass. Names that differ only in case
    count as equal, because daemons look them up so.
    """
    held = {(each.daemon, name.casefold(), each.uid) for each in records for name in each.daemon_names}
    holders = dict[tuple[str, str], tuple[bool, bool, str, str, Key]]()
    for each in services:
        for name in dict.fromkeys((each.name, *map(str.casefold, wanted(each)))):
            claim = name != each.name, (each.runtime, name, each.uid) not in held, each.created, each.uid, each.key
            holders[each.runtime, name] = min(claim, holders.get((each.runtime, name), claim))
    found = {}
    for each in services:
        claimed = {name: holders[each.runtime, name.casefold()][-1] for name in wanted(each) if name != each.name}
        granted = replace(each, daemon_names=tuple(name for name, holder in claimed.items() if holder == each.key))
        for name, holder in claimed.items():
            if holder != each.key:
                who = shown_to(each.namespace, holder)
                text = f"the {each.runtime} daemon does not answer to {name} for this service: {who} has that name; "
                text += f"send {each.name}, or give the two services Models of their own"
                granted = replace(granted, not_granted=(*granted.not_granted, (NAME_TAKEN, text)))
        found[each.key] = granted
    return found


def without(service: Service, lost: tuple[str, ...]) -> Service:
    """A service without the names that it lost, and with the reason among what is not granted."""
    text = (
        f"the gateway does not answer to {', '.join(lost)} for this service: the name is, or was, of another "
        f"namespace's older service; use {service.namespace}/{service.name}, or edit the service or its aliases once "
        "the name is free"
    )
    return replace(service, lost_names=lost, not_granted=(*service.not_granted, (NAME_TAKEN, text)))
