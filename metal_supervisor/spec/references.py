"""The environment of an engine, and its values that are kept elsewhere: a key of a Secret or of a ConfigMap.

Their values reach an engine's environment and nothing else. A service waits while one is not known; a message names
the field that asks for one that is missing; and a changed value counts as an edit of the service.
"""

from __future__ import annotations

import hashlib
import json
import re
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from metal_supervisor.spec import fields
from metal_supervisor.spec.arguments import FlagVerdict
from metal_supervisor.spec.environment import Vocabulary
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.sources import NO_KEYS, Artifact, Keys, hub_parts
from metal_supervisor.spec.types import Json, Reference, Service, Standing

Source: TypeAlias = tuple[str, str, str]
"""(namespace, plural of the kind, name) of a Secret or a ConfigMap."""
KINDS: Mapping[str, tuple[str, str]] = {
    "secretKeyRef": ("secrets", "Secret"),
    "configMapKeyRef": ("configmaps", "ConfigMap"),
}
"""Field of valueFrom -> (plural, kind) of what it names."""
KIND_OF = dict(KINDS.values())
OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
KEY_NAME = re.compile(r"[-._a-zA-Z0-9]{1,253}")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
RIGHTS = "conf/rbac/secrets.yaml"
SECRET_FIELD = "spec.sourceSecretRef"
HUB_KEY = "HF_TOKEN"
HOSTS_ANNOTATION = "metal-supervisor.io/hosts"
HUB_HOSTS = ("huggingface.co", "hf.co")
"""Hosts that a Secret is sent to unless its own annotation names others: a Model's author can name any host."""


@dataclass(frozen=True)
class Holding:
    """A Secret or a ConfigMap, as last read."""

    code: int
    """HTTP status of the answer that counts: 200, 403, 404; 0 before there is one."""
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Its values by their keys."""
    binary: frozenset[str] = frozenset()
    """Keys of values that no environment can hold: not UTF-8, or with a NUL in it."""
    hosts: tuple[str, ...] = ()
    """Hosts that its annotation names; () without one."""
    text: str = ""
    """The server's message when it refused to return it."""


def read_environment(
    spec: Json, known: Vocabulary | None, opened: Collection[str] = (), opened_flags: Collection[str] = ()
) -> tuple[tuple[tuple[str, str], ...], tuple[Reference, ...], tuple[str, ...]]:
    """(name and value of each variable, references to values kept elsewhere, fields left out); raises Bad.

    `known`: the engine's vocabulary, None if its runtime does the checking. `opened`, `opened_flags`: variables and
    flags that the administrator of this Mac allows in addition.
    """
    pairs: dict[str, str] = {}
    kept: dict[str, Reference] = {}
    ignored: list[str] = []
    for index, item in enumerate(fields.items(spec, "spec.env")):
        path = f"spec.env[{index}]"
        if not isinstance(item, dict):
            raise Bad("InvalidSpec", f"{path} must be an object with name and value")
        name = item.get("name")
        if not isinstance(name, str) or not ENV_NAME.fullmatch(name):
            raise Bad("InvalidSpec", f"{path}.name must be a variable name, not {name!r:.80}")
        if known is not None and (problem := known.refusal(name, f"{path}.name", opened, opened_flags)):
            raise Bad(*problem)
        value = item.get("value") or ""
        if not isinstance(value, str):
            raise Bad("InvalidSpec", f"{path}.value must be a string; put it in quotes")
        pairs[name] = fields.text(value, f"{path}.value")
        kept.pop(name, None)
        if item.get("valueFrom") is not None:
            if value:
                raise Bad("InvalidSpec", f"{path}: set one of value and valueFrom, not both")
            kept[name] = _reference(name, item["valueFrom"], f"{path}.valueFrom")
        if known is not None:
            allowed = known.variable(name, opened)
            if allowed.verdict is FlagVerdict.IGNORED:
                ignored.append(f"{path} {name}")
                del pairs[name]
                kept.pop(name, None)
            elif name in kept and known.flag(name):
                text = f"{path}.valueFrom: {name} becomes a flag, which every user of this Mac can read; use value"
                raise Bad("InvalidSpec", text)
            elif name in kept:
                kept[name] = replace(kept[name], check=allowed.check)
            elif not allowed.check.allows(value):  # which may be a secret, so it is not shown
                raise Bad("InvalidSpec", f"{path}.value: {name} takes {allowed.check.says}")
    return tuple(sorted(pairs.items())), tuple(kept.values()), tuple(ignored)


def _reference(variable: str, item: Any, path: str) -> Reference:
    """A `valueFrom` of the environment. Raises Bad, which names the field."""
    if not isinstance(item, dict):
        raise Bad("InvalidSpec", f"{path} must be an object with secretKeyRef or configMapKeyRef")
    said = [name for name, value in item.items() if value is not None]
    foreign = next((name for name in said if name not in KINDS), None)
    if foreign is not None:
        shown = foreign if foreign.isidentifier() else repr(foreign)
        text = f"{path}.{shown:.80} is not supported: there is no pod that it could tell of; give a plain value"
        raise Bad("UnsupportedField", text)
    if len(said) != 1:
        raise Bad("InvalidSpec", f"{path} must hold one of secretKeyRef and configMapKeyRef")
    path = f"{path}.{said[0]}"
    wanted = {"it": item[said[0]]}
    try:
        name, key = (fields.get(wanted, f"it.{part}", str, "") for part in ("name", "key"))
        optional = fields.get(wanted, "it.optional", bool, False)
    except Bad as bad:
        raise Bad(bad.reason, f"{path}{bad.message.removeprefix('it')}") from None
    if not OBJECT_NAME.fullmatch(name):
        raise Bad("InvalidSpec", f"{path}.name {name!r:.80} is not the name of a {KINDS[said[0]][1]}")
    if not KEY_NAME.fullmatch(key):
        raise Bad("InvalidSpec", f"{path}.key {key!r:.80} is not a key: letters, digits, dashes, dots and underscores")
    return Reference(variable, KINDS[said[0]][0], name, key, optional, path)


def sources(service: Service) -> set[Source]:
    """The Secrets and ConfigMaps that a service's environment refers to."""
    return {(service.namespace, each.kind, each.name) for each in service.references}


def keys_of(artifact: Artifact, look: Callable[[Source], Holding | None]) -> Keys:
    """The keys that open a model's source, or the problem why there are none."""
    if artifact.secret is None:
        return NO_KEYS
    namespace, name = artifact.secret
    found, what = look((namespace, "secrets", name)), f'the Secret "{name}" of namespace "{namespace}"'
    if found is None or found.code == 0:
        why = f": {found.text}" if found is not None else ""
        return Keys(problem=("WaitingForSecret", f"{SECRET_FIELD}: {what} has not been read yet{why}"), passing=True)
    if found.code == 403:
        return Keys(problem=("SecretForbidden", f"{SECRET_FIELD}: {found.text}; apply {RIGHTS}"))
    if found.code != 200:
        return Keys(problem=("SecretNotFound", f"{SECRET_FIELD}: {what} does not exist; create it"))
    if hub_parts(artifact.source) and not found.values.get(HUB_KEY, "").strip():  # no fallback to this Mac's own token
        lacks = f'holds no plain text in key "{HUB_KEY}"' if HUB_KEY in found.binary else f'has no key "{HUB_KEY}"'
        return Keys(problem=("SecretKeyNotFound", f"{SECRET_FIELD}: {what} {lacks}; add your token, or remove it"))
    if (host := _host_of(artifact.source)) and host not in (found.hosts or HUB_HOSTS):
        text = f"{what} is not for {host:.253}; its owner can name that host in its annotation {HOSTS_ANNOTATION}"
        return Keys(problem=("SourceUnauthorized", f"{SECRET_FIELD}: {text}"))
    return Keys(found.values)


def _host_of(source: str) -> str:
    """The host that a Secret would go to; "" for S3, whose endpoint the Secret itself names."""
    if hub_parts(source):
        return HUB_HOSTS[0]  # or the mirror that stands in for it on this Mac
    return (urllib.parse.urlsplit(source).hostname or "").rstrip(".") if source.startswith("http") else ""


def read_hosts(annotation: Any) -> tuple[str, ...]:
    """The hosts that an annotation of a Secret names, separated by commas."""
    names = annotation.split(",") if isinstance(annotation, str) else ()
    return tuple(each.strip().lower().rstrip(".") for each in names if each.strip())


def filled(service: Service, look: Callable[[Source], Holding | None]) -> Service:
    """The service with the values of its references filled in, or with `awaits` set to what it waits for."""
    if not service.references:
        return service
    env = dict(service.env)
    for each in service.references:
        found = look((service.namespace, each.kind, each.name))
        hindrance = _hindrance(service.namespace, each, found)
        if hindrance is not None:
            return replace(service, awaits=hindrance)
        value = found.values.get(each.key) if found is not None else None
        if value is None:  # it is optional
            del env[each.variable]
        elif not each.check.allows(value):
            text = f"{each.path}: {each.variable} takes {each.check.says}; correct its value"
            return replace(service, awaits=(Standing.FAILED, "InvalidSpec", text))
        else:
            env[each.variable] = value
    taken = [[each.variable, env.get(each.variable)] for each in service.references]
    digest = hashlib.sha256(json.dumps([service.uid, taken]).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return replace(service, env=tuple(sorted(env.items())), values_digest=digest)


def _hindrance(namespace: str, asked: Reference, found: Holding | None) -> tuple[Standing, str, str] | None:
    """(standing, reason, message) if a value is not available; None if it is, or is optional."""
    kind = KIND_OF[asked.kind]
    what = f'the {kind} "{asked.name}" of namespace "{namespace}"'
    if found is None or found.code == 0:
        why = f": {found.text}" if found is not None else ""
        return Standing.WAIT, f"WaitingFor{kind}", f"{asked.path}: {what} has not been read yet{why}"
    if found.code == 403:
        text = f"{asked.path}: {found.text}; apply {RIGHTS}, or give a plain value"
        return Standing.FAILED, f"{kind}Forbidden", text
    if found.code == 404 and not asked.optional:
        text = f"{asked.path}: {what} does not exist; create it, or set optional: true"
        return Standing.FAILED, f"{kind}NotFound", text
    if asked.key in found.binary:
        return Standing.FAILED, f"{kind}NotText", f'{asked.path}: key "{asked.key}" of {what} holds no plain text'
    if asked.key not in found.values and not asked.optional:
        text = f'{asked.path}: {what} has no key "{asked.key}"; add it, or set optional: true'
        return Standing.FAILED, f"{kind}KeyNotFound", text
    return None
