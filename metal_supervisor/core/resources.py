"""Custom resources in, `Service` or `Rejected` out: where a user's words are understood or refused.

A custom resource may hold anything, because the field's CRD, ours, or an old one may have let it in, so
nothing here trusts a type. Bad input never raises: it becomes a `Rejected` whose message names the field
and says what to do, and every other service goes on as before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from metal_supervisor.core.types import Endpoint, Json, Key, Model, Rejected, Service

GROUP = "inference.llmkube.dev"
VERSION = "v1alpha1"
RUNTIME_ANNOTATION = "metal-supervisor.io/runtime"
ACCELERATOR = "metal"
DEFAULT_PORT, DEFAULT_PATH = 8080, "/v1/chat/completions"
PRIORITIES: Mapping[str, int] = {"critical": 1_000_000, "high": 100_000, "normal": 10_000, "low": 1_000, "batch": 100}
# The field's CRD writes `llamacpp` into every object, so it says nothing about what its user wanted.
UNSET_RUNTIMES = frozenset({"", "llamacpp"})
SOURCE_SCHEMES = ("http://", "https://", "file://")
FORBIDDEN_ENV = re.compile(r"(LD_|DYLD_|SUPERVISOR_|METAL_SUPERVISOR_|LLAMA_ARG_)")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Policy:
    """What this Mac offers, as far as understanding a custom resource needs it."""

    default_runtime: str
    runtimes: Mapping[str, frozenset[str]]
    """Runtime name -> the `Model.spec.format`s it serves."""
    allowlist: frozenset[str] = frozenset()


class _Bad(Exception):
    """Carries a refusal out of the nested readers; never leaves this module."""

    def __init__(self, reason: str, message: str, keeps_running: bool = True) -> None:
        super().__init__(message)
        self.reason, self.message, self.keeps_running = reason, message, keeps_running


def _get(source: Any, path: str, kind: type, default: Any) -> Any:
    """The value at a dotted path below an object, of the given type. Null counts as unset."""
    value, walked = source, ""
    for step in path.split("."):
        if value is not None and not isinstance(value, dict):
            raise _Bad("InvalidSpec", f"{walked} must be an object, not {value!r:.80}")
        value, walked = (value or {}).get(step), f"{walked}.{step}".lstrip(".")
    if value is None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {str: "a string", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}
        raise _Bad("InvalidSpec", f"{path} must be {words.get(kind, kind.__name__)}, not {value!r:.80}")
    return value


def _text(value: str, path: str) -> str:
    """The string, if a process can be given it as an argument."""
    if "\0" in value:
        raise _Bad("InvalidSpec", f"{path} contains a NUL byte, which no argument can hold; remove it")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise _Bad("InvalidSpec", f"{path} contains half of a surrogate pair, which is not UTF-8; remove it")
    return value


def _texts(source: Any, path: str) -> tuple[str, ...]:
    values = _get(source, path, list, [])
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise _Bad("InvalidSpec", f"{path}[{index}] must be a string, not {value!r:.80}; put it in quotes")
        _text(value, f"{path}[{index}]")
    return tuple(values)


def _ranged(low: int, high: int) -> Callable[[Any, str], Any]:
    def read(source: Any, path: str) -> int | None:
        value: int | None = _get(source, path, int, None)
        if value is not None and not low <= value <= high:
            raise _Bad("InvalidSpec", f"{path} must be between {low} and {high}, not {value}")
        return value

    return read


def _bool(source: Any, path: str) -> Any:
    return _get(source, path, bool, None)


def _word(source: Any, path: str) -> str | None:
    value = _get(source, path, str, None)
    if value is None:
        return None
    if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,64}", value):
        raise _Bad("InvalidSpec", f"{path} must be one plain word, not {value!r:.80}")
    return str(value)


def _sentence(source: Any, path: str) -> str | None:
    value = _get(source, path, str, None)
    return None if value is None else _text(value, path)


def _rope(source: Any, path: str) -> dict[str, Any] | None:
    if _get(source, path, dict, None) is None:
        return None
    kind, factor = _word(source, f"{path}.type"), _word(source, f"{path}.factor")
    if kind not in ("linear", "yarn", "longrope"):
        raise _Bad("InvalidSpec", f"{path}.type must be linear, yarn or longrope, not {kind!r}")
    if factor is not None and not re.fullmatch(r"[0-9]+(\.[0-9]+)?", factor):
        raise _Bad("InvalidSpec", f"{path}.factor must be a decimal number, not {factor!r}")
    original = _ranged(128, 2**31 - 1)(source, f"{path}.originalContext")
    return {"type": kind, "factor": factor, "originalContext": original}


MAX = 2**31 - 1
OPTIONS: Mapping[str, Callable[[Any, str], Any]] = {
    "contextSize": _ranged(128, 2_097_152),
    "parallelSlots": _ranged(1, 64),
    "batchSize": _ranged(1, 16_384),
    "uBatchSize": _ranged(1, MAX),
    "flashAttention": _bool,
    "cacheTypeK": _word,
    "cacheTypeV": _word,
    "cacheTypeCustomK": _word,
    "cacheTypeCustomV": _word,
    "moeCPUOffload": _bool,
    "moeCPULayers": _ranged(0, MAX),
    "noKvOffload": _bool,
    "noWarmup": _bool,
    "jinja": _bool,
    "reasoningBudget": _ranged(0, MAX),
    "reasoningBudgetMessage": _sentence,
    "tensorOverrides": lambda source, path: _texts(source, path) or None,
    "metadataOverrides": lambda source, path: _texts(source, path) or None,
    "ropeScaling": _rope,
}
"""Engine options of the spec that are understood; a runtime refuses those it cannot honour."""

UNSUPPORTED = {
    "args": "engines on a Mac take their arguments from spec.extraArgs",
    "command": "the engine on a Mac is chosen with spec.runtime",
    "bindAddress": "what engines listen on is this Mac's setting --bind",
    "hotCacheMaxSize": "only the omlx runtime has it, which this version does not run yet",
    "pagedSSDCacheDir": "only the omlx runtime has it, which this version does not run yet",
    "pagedSSDCacheMaxSize": "only the omlx runtime has it, which this version does not run yet",
    "turboQuantBits": "only the omlx runtime has it, which this version does not run yet",
}
"""Fields that would mean something on a Mac but are not honoured: refused by name, never dropped."""


def service_name(name: str) -> str:
    """Name of the Kubernetes Service of an InferenceService, by LLMKube's rule."""
    return name.replace(".", "-")


def read_model(resource: Json) -> Model:
    """The Model of a custom resource, with defaults; raises _Bad within this module."""
    metadata, spec = resource.get("metadata", {}), {"spec": resource.get("spec")}
    source = _text(_get(spec, "spec.source", str, ""), "spec.source").strip()
    for name in ("mmproj", "files"):
        if _get(spec, "spec", dict, {}).get(name):
            raise _Bad("UnsupportedField", f"spec.{name} is not supported yet; this version serves single-file models")
    if _get(spec, "spec.sourceSecretRef", dict, {}).get("name"):
        raise _Bad("UnsupportedField", "spec.sourceSecretRef is not supported yet; use a source that needs no secret")
    if _get(spec, "spec.refreshPolicy", str, "IfNotPresent") != "IfNotPresent":
        raise _Bad("UnsupportedField", "spec.refreshPolicy is not supported yet; leave it at IfNotPresent")
    return Model(
        namespace=metadata.get("namespace", ""),
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 0),
        source=source,
        format=_get(spec, "spec.format", str, "gguf"),
        accelerator=_get(spec, "spec.hardware.accelerator", str, "cpu"),
        gpu_layers=_get(spec, "spec.hardware.gpu.layers", int, None),
        sha256=_get(spec, "spec.sha256", str, None),
    )


def is_metal(resource: Json) -> bool:
    """Whether a Model is meant for a Mac, whatever else may be wrong with it."""
    hardware = (resource.get("spec") or {}).get("hardware") if isinstance(resource.get("spec"), dict) else None
    return isinstance(hardware, dict) and hardware.get("accelerator") == ACCELERATOR


def model_problem(model: Model) -> tuple[str, str] | None:
    """(reason, message) if this Mac cannot fetch what the Model points at."""
    if not model.source:
        return "InvalidModel", f'Model "{model.name}": spec.source is empty; give a path, a file:// or an http(s) URL'
    if model.source.startswith("/") or model.source.startswith(SOURCE_SCHEMES):
        return None
    return "UnsupportedSource", (
        f'Model "{model.name}": spec.source {model.source!r:.200} is not supported yet; '
        "use an absolute path, file:///… or http(s)://…"
    )


def _environment(spec: Json) -> tuple[tuple[str, str], ...]:
    pairs = {}
    for index, item in enumerate(_get(spec, "spec.env", list, [])):
        path = f"spec.env[{index}]"
        if not isinstance(item, dict):
            raise _Bad("InvalidSpec", f"{path} must be an object with name and value")
        name = item.get("name")
        if not isinstance(name, str) or not ENV_NAME.fullmatch(name):
            raise _Bad("InvalidSpec", f"{path}.name must be a variable name, not {name!r:.80}")
        if FORBIDDEN_ENV.match(name):
            text = f"{path}.name {name!r} would change the loader, the supervisor or flags of ours; remove it"
            raise _Bad("InvalidSpec", text)
        if item.get("valueFrom") is not None:
            raise _Bad("UnsupportedField", f"{path}.valueFrom is not supported yet; give {name} a plain value")
        value = item.get("value") or ""
        if not isinstance(value, str):
            raise _Bad("InvalidSpec", f"{path}.value must be a string; put it in quotes")
        pairs[name] = _text(value, f"{path}.value")
    return tuple(sorted(pairs.items()))


def _endpoint(resource: Json, name: str) -> Endpoint:
    kind = _get(resource, "spec.endpoint.type", str, "ClusterIP")
    if kind not in ("ClusterIP", "NodePort", "LoadBalancer"):
        raise _Bad("InvalidSpec", f"spec.endpoint.type must be ClusterIP, NodePort or LoadBalancer, not {kind!r:.80}")
    path = _get(resource, "spec.endpoint.path", str, DEFAULT_PATH)
    if not re.fullmatch(r"/[!-~]{0,1023}", path):
        raise _Bad("InvalidSpec", f"spec.endpoint.path must begin with / and hold no spaces, not {path!r:.80}")
    return Endpoint(
        service=service_name(name),
        port=_ranged(1, 65535)(resource, "spec.endpoint.port") or DEFAULT_PORT,
        path=path,
        type=kind,
        node_port=_ranged(30000, 32767)(resource, "spec.endpoint.nodePort"),
    )


def _mode(resource: Json, extra_args: tuple[str, ...], path: str) -> str:
    said = _get(resource, "spec.mode", str, "")
    if said in ("chat", "embedding", "rerank"):
        return str(said)
    if said:
        raise _Bad("InvalidSpec", f"spec.mode must be chat, embedding or rerank, not {said!r:.80}")
    if {"--reranking", "--rerank"} & set(extra_args) or path.endswith("/rerank"):
        return "rerank"
    if {"--embedding", "--embeddings"} & set(extra_args) or path.endswith("/embeddings"):
        return "embedding"
    return "chat"


def _runtime(resource: Json, model: Model, policy: Policy) -> str:
    annotated = _get(resource, "metadata.annotations", dict, {}).get(RUNTIME_ANNOTATION)
    if annotated is not None and not isinstance(annotated, str):
        raise _Bad("InvalidSpec", f"annotation {RUNTIME_ANNOTATION} must be a string, not {annotated!r:.80}")
    said = _get(resource, "spec.runtime", str, "")
    if annotated:
        runtime, origin = annotated, f"annotation {RUNTIME_ANNOTATION}"
    elif said not in UNSET_RUNTIMES:
        runtime, origin = said, "spec.runtime"
    else:
        runtime, origin = policy.default_runtime, "this Mac's setting --runtime"
    if runtime not in policy.runtimes:
        raise _Bad(
            "UnknownRuntime", f"{origin} is {runtime!r:.80}; this Mac runs {', '.join(sorted(policy.runtimes))}"
        )
    if model.format not in policy.runtimes[runtime]:
        raise _Bad(
            "WrongFormat",
            f'Model "{model.name}": spec.format is {model.format!r:.40}, which {runtime} does not serve; '
            f"it serves {', '.join(sorted(policy.runtimes[runtime]))}",
        )
    return str(runtime)


def _interpret(resource: Json, models: Mapping[Key, Json], policy: Policy) -> Service:
    """The Service of one InferenceService; raises _Bad."""
    namespace, name = resource["metadata"]["namespace"], resource["metadata"]["name"]
    reference = _get(resource, "spec.modelRef", str, "")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", reference):
        text = f"spec.modelRef {reference!r:.80} is not the name of a Model; name one of the same namespace"
        raise _Bad("InvalidSpec", text)
    found = models.get((namespace, reference))
    if found is None:
        text = f'Model not found: spec.modelRef names "{reference}", and namespace "{namespace}" has no such Model'
        raise _Bad("ModelNotFound", text, keeps_running=False)
    if not is_metal(found):
        text = f'Model "{reference}" is not for a Mac: its spec.hardware.accelerator is not "{ACCELERATOR}"'
        raise _Bad("NotMetal", text, keeps_running=False)
    try:
        model = read_model(found)
    except _Bad as bad:
        raise _Bad(bad.reason, f'Model "{reference}": {bad.message}') from None
    if problem := model_problem(model):
        raise _Bad(*problem)
    endpoint = _endpoint(resource, name)
    if len(endpoint.service) > 63:
        text = f"metadata.name has {len(name)} characters, but the Service it is reached by may have 63; shorten it"
        raise _Bad("ServiceNameTooLong", text)
    spec = _get(resource, "spec", dict, {})
    for field_name, advice in UNSUPPORTED.items():
        if spec.get(field_name) not in (None, "", [], {}):
            raise _Bad("UnsupportedField", f"spec.{field_name} is not supported: {advice}")
    if _get(resource, "spec.speculativeDecoding.type", str, "none") not in ("none", "disabled"):
        raise _Bad("UnsupportedField", "spec.speculativeDecoding is not supported yet; remove it or set type: none")
    priority = _get(resource, "spec.priority", str, "normal")
    if priority not in PRIORITIES:
        raise _Bad("InvalidSpec", f"spec.priority must be one of {', '.join(PRIORITIES)}, not {priority!r:.80}")
    replicas = _ranged(0, MAX)(resource, "spec.replicas")
    extra_args = _texts(resource, "spec.extraArgs")
    options = {option: read(resource, f"spec.{option}") for option, read in OPTIONS.items()}
    return Service(
        namespace=namespace,
        name=name,
        uid=resource["metadata"].get("uid", ""),
        generation=resource["metadata"].get("generation", 0),
        model=model,
        runtime=_runtime(resource, model, policy),
        replicas=1 if replicas is None else replicas,
        suspended=_get(resource, "spec.suspend", bool, False),
        endpoint=endpoint,
        mode=_mode(resource, extra_args, endpoint.path),
        priority=priority,
        container_port=_ranged(1, 65535)(resource, "spec.containerPort"),
        options={option: value for option, value in options.items() if value is not None},
        extra_args=extra_args,
        env=_environment(resource),
    )


def rejected(resource: Json, reason: str, message: str, keeps_running: bool = True) -> Rejected:
    """A refusal of the given InferenceService."""
    metadata = resource.get("metadata", {})
    spec = resource.get("spec") if isinstance(resource.get("spec"), dict) else {}
    assert isinstance(spec, dict)
    replicas, reference = spec.get("replicas"), spec.get("modelRef")
    count = replicas if isinstance(replicas, int) and not isinstance(replicas, bool) and 0 <= replicas <= MAX else 1
    suspended = spec.get("suspend") is True
    try:
        endpoint = _endpoint(resource, metadata["name"])
    except _Bad:
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
        keeps_running=keeps_running and count > 0 and not suspended,  # off is off, whatever else is wrong
        endpoint=endpoint,
    )


def _created(resource: Json) -> str:
    return str(resource["metadata"].get("creationTimestamp") or "")


def interpret(
    services: Mapping[Key, Json], models: Mapping[Key, Json], policy: Policy, running: Collection[Key] = ()
) -> dict[Key, Service | Rejected]:
    """Every InferenceService of this Mac, understood or refused. Those not on the allowlist are left out.

    Two whose names map to the same Service (`a.b` and `a-b`) cannot both be reached: the one that is among
    the `running` keeps it, else the older one.
    """
    result: dict[Key, Service | Rejected] = {}
    taken: dict[tuple[str, str], str] = {}
    for namespace, name in sorted(services, key=lambda key: (key not in running, _created(services[key]), key)):
        resource = services[namespace, name]
        if policy.allowlist and name not in policy.allowlist:
            continue
        try:
            service = _interpret(resource, models, policy)
            holder = taken.setdefault((namespace, service.endpoint.service), name)
            if holder != name:
                text = f'metadata.name: "{name}" and "{holder}" both need the Service "{service.endpoint.service}"'
                raise _Bad("ServiceConflict", f"{text}; rename one of them", keeps_running=False)
            result[namespace, name] = service
        except _Bad as bad:
            if bad.keeps_running and (namespace, name) in running:
                taken.setdefault((namespace, service_name(name)), name)  # it still serves under that name
            result[namespace, name] = rejected(resource, bad.reason, bad.message, bad.keeps_running)
    return result
