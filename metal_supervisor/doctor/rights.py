"""Check of this Mac's rights in the cluster: each verb that conf/rbac grants is asked for, so that none is forgotten.

A missing right shows only days later, as an endpoint that is not withdrawn or a token that is not renewed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from metal_supervisor.cluster.accounts import read_token
from metal_supervisor.cluster.credentials import BadKubeconfig
from metal_supervisor.cluster.kube import Kube, KubeError
from metal_supervisor.cluster.manifests import api_path
from metal_supervisor.doctor.findings import Check, Finding, Found, fail, ok, unasked, unknown, warn
from metal_supervisor.doctor.surroundings import ASK_S, Surroundings
from metal_supervisor.doctor.together import answers
from metal_supervisor.settings.loader import conf_dir
from metal_supervisor.spec.types import Json

REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
ACCOUNT = "metal-mac-a"
"""Placeholder of conf/rbac for the name of the account."""
SPACE = "llm"
"""Placeholder of conf/rbac for the namespace."""
AT_ONCE = 4
"""Size of the client's connection pool."""


@dataclass(frozen=True)
class Right:
    """One verb on one resource."""

    group: str
    resource: str
    """With its subresource, e.g. `models/status`."""
    verb: str
    namespace: str
    """"" for all namespaces."""
    name: str = ""
    """Name of the only object, "" for any."""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


@dataclass(frozen=True)
class Bundle:
    """The rights of one shipped file, and the command that grants them."""

    rights: tuple[Right, ...]
    grant: str
    optional: bool = False
    """Only some services need it."""


def rights_in(rules: Iterable[Json], namespace: str, name: str = "") -> tuple[Right, ...]:
    """The rights that rules grant. `name`: replaces the placeholder account in resourceNames."""
    return tuple(
        Right(group, resource, verb, namespace, name if rule.get("resourceNames") else "")
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


def rules_of(file: Path, kind: str, name: str) -> list[Json]:
    """The rules of one Role or ClusterRole in a shipped file."""
    import yaml

    found: list[Any] = [each for each in yaml.safe_load_all(file.read_text("utf-8")) if each]
    return next(list(e["rules"]) for e in found if (e["kind"], e["metadata"]["name"]) == (kind, name))


def bundles(rbac: Path, namespace: str, account: tuple[str, str] | None, node: str, values: bool) -> list[Bundle]:
    """The bundles of rights that this mode needs.

    `namespace`: the watched one, "" for all. `account`: (namespace, name) of the ServiceAccount whose token this Mac
    renews, None if it renews none. `values`: True if services take values from Secrets or ConfigMaps.
    """
    lives_in = account[0] if account else namespace or "default"
    mac = f"-e 's/mac-a/{account[1].removeprefix('metal-') if account else node}/g'"
    space = f"-e 's/namespace: {SPACE}/namespace: {lives_in}/'"
    wide = not namespace
    file = "cluster-wide.yaml" if wide else "namespace.yaml"
    rules = rules_of(rbac / file, "ClusterRole" if wide else "Role", "metal-supervisor")

    def applied(name: str, *replace: str) -> str:
        return f"sed {' '.join(replace)} {shlex.quote(str(rbac / name))} | kubectl apply -f -"

    main = applied(file, mac, space) if wide else applied(file, f"-e 's/namespace: {SPACE}/namespace: {namespace}/'")
    found = [Bundle(rights_in(rules, namespace), main)]
    if account:
        own = rules_of(rbac / "mac.yaml", "Role", f"{ACCOUNT}-token")
        found.append(Bundle(rights_in(own, account[0], account[1]), applied("mac.yaml", mac, space)))
    if values:
        rules = rules_of(rbac / "secrets.yaml", "ClusterRole", "metal-supervisor-references")
        found.append(Bundle(rights_in(rules, namespace), applied("secrets.yaml", mac, space), optional=True))
    return found


def judge(found: Sequence[tuple[Bundle, Sequence[Right]]], bind: str) -> list[Finding]:
    """Findings about the rights. `found`: (bundle, its missing rights); `bind`: command that binds the main role."""
    result = []
    for at, (bundle, missing) in enumerate(found):
        if not missing:
            continue
        where = f"namespace {missing[0].namespace}" if missing[0].namespace else "all namespaces"
        text = f"this Mac may not, in {where}: {', '.join(map(str, missing))}"
        unbound = at == 0 and len(missing) == len(bundle.rights)
        fix = f"as an administrator: {bundle.grant}" + (f"; and, to bind it: {bind}" if unbound and bind else "")
        result.append(warn(text, fix) if bundle.optional else fail(text, fix))
    if result:
        return result
    return [ok(f"all {sum(len(bundle.rights) for bundle, _ in found)} rights that it needs, each asked for")]


def allowed(kube: Kube, right: Right) -> bool:
    """True if the server grants the right. Raises KubeError."""
    resource, _, sub = right.resource.partition("/")
    asked = {
        "namespace": right.namespace,
        "group": right.group,
        "resource": resource,
        "subresource": sub,
        "verb": right.verb,
        "name": right.name,
    }
    body: Json = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    status = kube.request("POST", REVIEW, body=body).get("status")
    return bool(isinstance(status, dict) and status.get("allowed"))


def _missing(kube: Kube, wanted: Sequence[Right]) -> list[Right]:
    """The rights that the server denies. They are asked for in groups of AT_ONCE: a distant server takes long for each.

    Raises KubeError.
    """
    found: list[Right] = []
    for at in range(0, len(wanted), AT_ONCE):
        some = wanted[at : at + AT_ONCE]
        told = answers([partial(allowed, kube, each) for each in some], ASK_S)
        found += [each for each, may in zip(some, told, strict=True) if not may]
    return found


def _takes_values(kube: Kube, namespace: str) -> bool:
    """True if a service or model in the cluster names a Secret or a ConfigMap; False also if they cannot be read."""
    try:
        services = kube.request("GET", api_path("inferenceservices", namespace)).get("items") or []
        models = kube.request("GET", api_path("models", namespace)).get("items") or []
    except KubeError:
        return False
    specs = [each.get("spec") or {} for each in (*services, *models) if isinstance(each, dict)]
    named = any(isinstance(e, dict) and e.get("valueFrom") for spec in specs for e in spec.get("env") or [])
    return named or any(spec.get("sourceSecretRef") for spec in specs)


def _rights(around: Surroundings) -> Found:
    kube, settings = around.link.kube, around.settings
    if kube is None:
        return unasked(around.link.problem)
    try:
        file = around.chosen().token_file
        token = read_token(file.read_text("ascii")) if file else None  # which this Mac renews
        account = (token.namespace, token.account) if token else None
        node = settings.node_name or "<node>"
        rbac = conf_dir() / "rbac"
        values = bool(settings.gateway_keys_secret) or _takes_values(kube, settings.namespace)
        needed = bundles(rbac, settings.namespace, account, node, values)
        found = [(each, _missing(kube, each.rights)) for each in needed]
    except KubeError as error:
        if error.code == 404 and settings.embedded:
            return ok("the embedded API lets everybody who knows its address do everything")
        return unknown(str(error))
    except BadKubeconfig as error:
        return unknown(str(error))
    bind = bundles(rbac, settings.namespace or "default", account or ("default", f"metal-{node}"), node, False)[1].grant
    return judge(found, bind)


CHECKS = (Check("rights", _rights, needs_api=True),)
