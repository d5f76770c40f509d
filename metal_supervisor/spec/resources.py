"""Interpretation of InferenceServices: each becomes a `Service`, or a `Rejected` with a reason.

A custom resource may hold anything, because LLMKube's CRD, ours, or an old one may have admitted it, so nothing
here trusts a type. Bad input never raises: it becomes a `Rejected` whose message names the field and says what to do,
and no other service is affected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from metal_supervisor.spec import auxiliary_files as companions
from metal_supervisor.spec import fields, misspelled
from metal_supervisor.spec.arguments import NO_FLAGS, ParsedArguments, parse
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.environment import Vocabulary
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.limits import PRIORITIES, SERVICE_TYPES
from metal_supervisor.spec.model_resource import model_files
from metal_supervisor.spec.nearest import did_you_mean
from metal_supervisor.spec.on_demand import OnDemandPolicy, unloading
from metal_supervisor.spec.references import OBJECT_NAME, read_environment
from metal_supervisor.spec.sources import library_model
from metal_supervisor.spec.types import MODEL_FAILED, Endpoint, Json, Key, Model, Rejected, Service

GROUP = "inference.llmkube.dev"
VERSION = "v1alpha1"
RUNTIME_ANNOTATION = "metal-supervisor.io/runtime"
ALIASES_ANNOTATION = "metal-supervisor.io/aliases"
ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
MOST_ALIASES = 32
ACCELERATOR = "metal"
MODEL_NOT_FOUND = "ModelNotFound"
DEFAULT_PORT = 8080
DEFAULT_PATH = "/v1/chat/completions"
LONGEST_DRAIN_S = 2**63 - 1
"""The schema has no other limit: a batch may well take days."""


def rank_of(priority: str) -> int:
    """Rank of a priority; an unknown one ranks as the default."""
    return PRIORITIES.get(priority, PRIORITIES["normal"])


# LLMKube's CRD writes `llamacpp` into every object as the default, so it does not show the user's intent.
UNSET_RUNTIMES = frozenset({"", "llamacpp"})
ELSEWHERE = {
    **dict.fromkeys(("vllm", "tgi", "sglang", "personaplex"), "which needs a GPU that containers can reach"),
    "generic": "which runs a container image",
    "llamacpp-router": "which routes between pods",
}
"""Runtimes of LLMKube that are not for a Mac, and why."""
LIBRARY_RUNTIME = "ollama"


@dataclass(frozen=True)
class Policy:
    """Rules of this Mac for custom resources: the runtimes it offers, and what manifests may set."""

    default_runtime: str
    """For services that name none, if it serves the model's format."""
    runtimes: Mapping[str, frozenset[str]]
    """Runtimes that this Mac offers, the preferred first: name -> the `Model.spec.format`s that it serves."""
    allowlist: frozenset[str] = frozenset()
    allowed_args: frozenset[str] = frozenset()
    """Flags of `spec.extraArgs` that are refused by default."""
    allowed_env: frozenset[str] = frozenset()
    """Variables of `spec.env` that are refused by default."""
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    """Runtime name -> the flags and variables that a manifest may give to its engine; without one, none."""
    on_demand: OnDemandPolicy = field(default_factory=OnDemandPolicy)
    installed: frozenset[str] = frozenset()
    """The `runtimes` whose program is installed: a service that names none gets one of these if possible."""


UNSUPPORTED = {
    "args": "engines on a Mac take their arguments from spec.extraArgs",
    "command": "the engine on a Mac is chosen with spec.runtime",
    "bindAddress": "what engines listen on is this Mac's setting --bind",
}
"""Fields that would mean something on a Mac but are not honoured: refused by name, never dropped."""
MEANINGLESS = {"multiNode": "pods on named nodes; a Mac is no node"}
"""Fields that LLMKube added for pods alone, and why they mean nothing here: named in a condition."""
MEANINGLESS_OF_MODEL = {
    "attestation": "verified by LLMKube's operator alone, if it runs with --model-attestation",
    "prefetchNodeSelector": "for Jobs of LLMKube's operator",
}
"""The same fields of a Model."""
OMLX_OPTIONS = ("hotCacheMaxSize", "pagedSSDCacheDir", "pagedSSDCacheMaxSize", "turboQuantBits")


def service_name(name: str) -> str:
    """Name of the Kubernetes Service of an InferenceService, by LLMKube's rule."""
    return name.replace(".", "-")


def is_metal(resource: Json) -> bool:
    """True if a Model is meant for a Mac, even one that is invalid otherwise."""
    return bool(mapping(mapping(resource, "spec"), "hardware").get("accelerator") == ACCELERATOR)


def _endpoint(resource: Json, name: str) -> Endpoint:
    kind = fields.get(resource, "spec.endpoint.type", str, "ClusterIP")
    if kind not in SERVICE_TYPES:
        raise Bad("InvalidSpec", f"spec.endpoint.type must be one of {', '.join(SERVICE_TYPES)}, not {kind!r:.80}")
    path = fields.get(resource, "spec.endpoint.path", str, "") or DEFAULT_PATH
    if not re.fullmatch(r"/[!-~]{0,1023}", path):
        raise Bad("InvalidSpec", f"spec.endpoint.path must begin with / and hold no spaces, not {path!r:.80}")
    return Endpoint(
        service=service_name(name),
        port=fields.ranged(1, 65535)(resource, "spec.endpoint.port") or DEFAULT_PORT,
        path=path,
        type=kind,
        node_port=fields.ranged(30000, 32767)(resource, "spec.endpoint.nodePort"),
    )


def _mode(resource: Json, said_args: ParsedArguments, path: str) -> str:
    said = fields.get(resource, "spec.mode", str, "")
    if said in ("chat", "embedding", "rerank"):
        return str(said)
    if said:
        raise Bad("InvalidSpec", f"spec.mode must be chat, embedding or rerank, not {said!r:.80}")
    if said_args.given("--reranking", "--rerank") or path.endswith("/rerank"):
        return "rerank"
    if said_args.given("--embedding", "--embeddings") or path.endswith("/embeddings"):
        return "embedding"
    return "chat"


def _annotated(resource: Json, what: str) -> str:
    value = fields.get(resource, "metadata.annotations", dict, {}).get(RUNTIME_ANNOTATION)
    if value is not None and not isinstance(value, str):
        raise Bad("InvalidSpec", f"{what} {RUNTIME_ANNOTATION} must be a string, not {value!r:.80}")
    return value or ""


def named_runtime(resource: Json, written_model: Json, model_name: str) -> tuple[str, str] | None:
    """(runtime, field that names it) of a service: an annotation, there or on its Model, or its spec. Raises Bad."""
    said = fields.get(resource, "spec.runtime", str, "")
    origins = (
        (_annotated(resource, "annotation"), f"annotation {RUNTIME_ANNOTATION}"),
        (
            _annotated(written_model, f'Model "{model_name}": annotation'),
            f'annotation {RUNTIME_ANNOTATION} of Model "{model_name}"',
        ),
        ("" if said in UNSET_RUNTIMES else said, "spec.runtime"),
    )
    return next(((runtime, origin) for runtime, origin in origins if runtime), None)


def _runtime(resource: Json, written_model: Json, model: Model, policy: Policy, kept: str) -> str:
    """The runtime of a service: that of `named_runtime`, else the one for its model's format. Raises Bad."""
    named = named_runtime(resource, written_model, model.name)
    if library := library_model(model.source):
        if LIBRARY_RUNTIME in policy.runtimes and (named is None or named[0] == LIBRARY_RUNTIME):
            return LIBRARY_RUNTIME
        raise Bad(
            "UnsupportedSource",
            f'Model "{model.name}": spec.source names {library} of Ollama\'s library, which only the runtime '
            f"{LIBRARY_RUNTIME} serves" + (f", not {named[0]!r:.40} ({named[1]})" if named else f"; {_offers(policy)}"),
        )
    if named is None:
        return _by_format(model, policy, kept)
    runtime, origin = named
    if runtime in ELSEWHERE:
        raise Bad("UnsupportedRuntime", f"{origin} is {runtime!r}, {ELSEWHERE[runtime]}; {_offers(policy)}")
    if runtime not in policy.runtimes:
        near = did_you_mean(runtime, policy.runtimes)
        text = f"{origin} is {runtime!r:.80}, which this Mac does not run{near}"
        raise Bad("UnsupportedRuntime", f"{text}; {_offers(policy)}")
    if model.format not in policy.runtimes[runtime]:
        serves = ", ".join(sorted(policy.runtimes[runtime]))
        able = ", ".join(name for name, formats in policy.runtimes.items() if model.format in formats)
        raise Bad(
            "FormatMismatch",
            f'Model "{model.name}": spec.format is {model.format!r:.40}, which {runtime} ({origin}) does not serve: it '
            f"serves {serves}" + (f"; {model.format} is served by {able}" if able else ""),
        )
    return runtime


def _offers(policy: Policy) -> str:
    return f"it runs {', '.join(policy.runtimes) or 'nothing'}"


def _by_format(model: Model, policy: Policy, kept: str) -> str:
    """The runtime of a service that names none: the one it runs on, else the first that is installed here."""
    names = (kept, policy.default_runtime, *policy.runtimes)
    able = [name for name in names if model.format in policy.runtimes.get(name, ())]
    if able and able[0] == kept:
        return kept
    found = next((name for name in able if name in policy.installed), able[0] if able else None)
    if found is None:
        served = ", ".join(sorted({each for formats in policy.runtimes.values() for each in formats}))
        raise Bad(
            "FormatMismatch",
            f'Model "{model.name}": spec.format is {model.format!r:.40}, which no runtime of this Mac serves; they '
            f"serve {served or 'nothing'}, see --runtimes",
        )
    return found


def _drain_s(resource: Json) -> float | None:
    """Seconds to wait for running requests before the engine is replaced; None if the spec does not say."""
    path = "spec.rolloutPolicy"
    if fields.get(resource, path, dict, None) is None:
        return None
    longest = fields.ranged(0, LONGEST_DRAIN_S)(resource, f"{path}.idleTimeoutSeconds")
    waits = fields.boolean(resource, f"{path}.waitForIdle")
    if fields.boolean(resource, f"{path}.force") or waits is False:
        return 0.0
    return None if longest is None else float(longest)


def _aliases(resource: Json) -> tuple[str, ...]:
    """Further names by which the gateway's clients may ask for the service. Raises Bad."""
    said = fields.get(resource, "metadata.annotations", dict, {}).get(ALIASES_ANNOTATION)
    names = [each.strip() for each in said.split(",")] if isinstance(said, str) and said else []
    good = said is None or (isinstance(said, str) and len(names) <= MOST_ALIASES and all(map(ALIAS.fullmatch, names)))
    if not good:
        wanted = f"must be at most {MOST_ALIASES} names of letters, digits and . _ : / -, separated by commas"
        raise Bad("InvalidSpec", f"annotation {ALIASES_ANNOTATION} {wanted}, not {said!r:.80}")
    return tuple(dict.fromkeys(names))


Reader: TypeAlias = Callable[[Json, Callable[[Key], Json | None], Policy, str], "Service | Bad"]
"""As `read_service`."""


def read_service(resource: Json, model_of: Callable[[Key], Json | None], policy: Policy, kept: str) -> Service | Bad:
    """The Service of one InferenceService, or its refusal. `kept`: the runtime that it runs on, "" if it is open."""
    try:
        return _interpret(resource, model_of, policy, kept)
    except Bad as bad:
        return bad


def _referenced(resource: Json, model_of: Callable[[Key], Json | None]) -> Json:
    """The Model that a service refers to, and that is for a Mac; raises Bad."""
    namespace = resource["metadata"]["namespace"]
    reference = fields.get(resource, "spec.modelRef", str, "")
    if not OBJECT_NAME.fullmatch(reference):
        text = f"spec.modelRef {reference!r:.80} is not the name of a Model; name one of the same namespace"
        raise Bad("InvalidSpec", text)
    found = model_of((namespace, reference))
    if found is None:
        text = f'Model not found: spec.modelRef names "{reference}", and namespace "{namespace}" has no such Model'
        raise Bad(MODEL_NOT_FOUND, f"{text}; apply it, or change the name")
    if not is_metal(found):
        text = f'Model "{reference}" is not for a Mac: its spec.hardware.accelerator is not "{ACCELERATOR}"; set it'
        raise Bad("NotMetal", text, keeps_running=False)
    return found


def _interpret(resource: Json, model_of: Callable[[Key], Json | None], policy: Policy, kept: str) -> Service:
    """The Service of one InferenceService; raises Bad."""
    namespace, name = resource["metadata"]["namespace"], resource["metadata"]["name"]
    found = _referenced(resource, model_of)
    if resource["metadata"].get("deletionTimestamp"):
        held = ", ".join(map(str, resource["metadata"].get("finalizers") or ["nothing any more"]))
        raise Bad("Deleting", f"it is being deleted; its finalizers are waited for: {held}", keeps_running=False)
    speculation = companions.speculation(resource)
    model, further = model_files(namespace, found, speculation, model_of)
    endpoint = _endpoint(resource, name)
    if len(endpoint.service) > 63:
        text = f"metadata.name has {len(name)} characters, but the Service it is reached by may have 63; shorten it"
        raise Bad("ServiceNameTooLong", text)
    spec = fields.get(resource, "spec", dict, {})
    for field_name, advice in UNSUPPORTED.items():
        if spec.get(field_name) not in (None, "", [], {}):
            raise Bad("UnsupportedField", f"spec.{field_name} is not supported: {advice}")
    priority = fields.get(resource, "spec.priority", str, "normal")
    if priority not in PRIORITIES:
        raise Bad("InvalidSpec", f"spec.priority must be one of {', '.join(PRIORITIES)}, not {priority!r:.80}")
    replicas = fields.ranged(0, fields.MAX)(resource, "spec.replicas")
    extra_args = fields.texts(resource, "spec.extraArgs")
    runtime = _runtime(resource, found, model, policy, kept)
    known = policy.vocabularies.get(runtime)
    arguments = parse(extra_args, known.grammar if known is not None else NO_FLAGS)
    further += companions.named_by_arguments(arguments, model.artifact)
    options = {option: read(resource, f"spec.{option}") for option, read in fields.OPTIONS.items()}
    for option in OMLX_OPTIONS:
        if options[option] is not None and runtime != "omlx":
            raise Bad("UnsupportedField", f"spec.{option} is not supported by {runtime}: only the runtime omlx has it")
    unload = unloading(resource, found, policy.on_demand)
    options["idleTtlS"], options["speculativeDecoding"] = unload.engine_s, speculation
    env, references, ignored = read_environment(resource, known, policy.allowed_env, policy.allowed_args)
    if runtime != "llama-server" and (speculation or further):
        field_name = further[0].field if further else companions.SPECULATION
        raise Bad("UnsupportedField", f"{field_name} has no meaning for {runtime}; remove it, or use llama-server")
    return Service(
        namespace=namespace,
        name=name,
        uid=resource["metadata"].get("uid", ""),
        generation=resource["metadata"].get("generation", 0),
        model=model,
        runtime=runtime,
        replicas=1 if replicas is None else replicas,
        suspended=fields.get(resource, "spec.suspend", bool, False),
        endpoint=endpoint,
        mode=_mode(resource, arguments, endpoint.path),
        priority=priority,
        container_port=fields.ranged(1, 65535)(resource, "spec.containerPort"),
        options={option: value for option, value in options.items() if value is not None},
        extra_args=extra_args,
        env=env,
        drain_s=_drain_s(resource),
        protected=fields.boolean(resource, "spec.evictionProtection") or False,
        aliases=_aliases(resource),
        allowed_args=policy.allowed_args,
        companions=further,
        references=references,
        idle_s=unload.idle_s,
        not_granted=(*unload.not_granted, *_failed_in_cluster(model)),
        created=_created(resource),
        ignored=(
            *_without_meaning(spec, MEANINGLESS),
            *_without_meaning(found["spec"], MEANINGLESS_OF_MODEL, f'Model "{model.name}" '),
            *misspelled.misspelled(resource, misspelled.SERVICE),
            *misspelled.misspelled(found, misspelled.MODEL, f'Model "{model.name}" '),
            *(f"spec.extraArgs[{each.index}] {each.name}" for each in arguments.items if each.ignored),
            *ignored,
        ),
    )


def _without_meaning(spec: Json, names: Mapping[str, str], of: str = "") -> list[str]:
    """Those of the fields that are set, each with the reason. `of`: put before each."""
    return [f"{of}spec.{name} ({why})" for name, why in names.items() if spec.get(name) not in (None, "", [], {})]


def _failed_in_cluster(model: Model) -> tuple[tuple[str, str], ...]:
    """The warning about a Model that LLMKube's operator cannot obtain."""
    if not model.failed:
        return ()
    text = f'LLMKube\'s operator reports Model "{model.name}" as Failed, because it cannot obtain the files itself'
    return ((MODEL_FAILED, f"{text} ({model.failed:.500}); this Mac reads its source without the operator"),)


def rejected(resource: Json, reason: str, message: str, keeps_running: bool = True) -> Rejected:
    """A refusal of the given InferenceService."""
    metadata, spec = resource.get("metadata", {}), mapping(resource, "spec")
    replicas, reference = spec.get("replicas"), spec.get("modelRef")
    count = 1
    if isinstance(replicas, int) and not isinstance(replicas, bool) and 0 <= replicas <= fields.MAX:
        count = replicas
    suspended = spec.get("suspend") is True
    try:
        endpoint = _endpoint(resource, metadata["name"])
    except Bad:
        endpoint = None
    return Rejected(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 0),
        model_name=reference[:253] if isinstance(reference, str) else "",
        reason=reason,
        message=message,
        replicas=count,
        suspended=suspended,
        # Off is off, whatever else is wrong.
        keeps_running=keeps_running and count > 0 and not suspended and not metadata.get("deletionTimestamp"),
        endpoint=endpoint,
        created=_created(resource),
    )


def _created(resource: Json) -> str:
    return str(resource["metadata"].get("creationTimestamp") or "")


def rivals(names: Collection[Key]) -> set[Key]:
    """The InferenceServices among these that may need the Kubernetes Service of another one."""
    dotted = {(namespace, service_name(name)) for namespace, name in names if "." in name}
    return {key for key in names if (key[0], service_name(key[1])) in dotted} if dotted else set()


def interpret(
    services: Mapping[Key, Json],
    models: Mapping[Key, Json],
    policy: Policy,
    running: Collection[Key] = (),
    kept: Mapping[Key, tuple[int, str]] | None = None,
    read: Reader = read_service,
) -> dict[Key, Service | Rejected]:
    """Interpret every InferenceService of this Mac. Those not on the allowlist are left out.

    Two whose names map to the same Service (`a.b` and `a-b`) cannot both be reached: the one that is among
    the `running` keeps it, else the older one. `kept`: (generation, runtime) of those that run; a runtime installed
    since must not move the engine of a service that was not edited.
    """
    result: dict[Key, Service | Rejected] = {}
    taken: dict[tuple[str, str], str] = {}
    for namespace, name in sorted(services, key=lambda key: (key not in running, _created(services[key]), key)):
        resource = services[namespace, name]
        if policy.allowlist and name not in policy.allowlist:
            continue
        try:
            generation, runtime = (kept or {}).get((namespace, name), (None, ""))
            unedited = generation == resource["metadata"].get("generation")
            service = read(resource, models.get, policy, runtime if unedited else "")
            if isinstance(service, Bad):
                raise service.with_traceback(None)
            holder = taken.setdefault((namespace, service.endpoint.service), name)
            if holder != name:
                text = f'metadata.name: "{name}" and "{holder}" both need the Service "{service.endpoint.service}"'
                raise Bad("ServiceConflict", f"{text}; rename one of them", keeps_running=False)
            result[namespace, name] = service
        except Bad as bad:
            if bad.keeps_running and (namespace, name) in running:
                taken.setdefault((namespace, service_name(name)), name)  # it still serves under that name
            result[namespace, name] = rejected(resource, bad.reason, bad.message, bad.keeps_running)
    for key, item in result.items():
        if isinstance(item, Rejected) and taken.get((key[0], service_name(key[1])), key[1]) != key[1]:
            result[key] = replace(item, endpoint=None)  # its URL is that of the other one
    return result
