"""Fields and annotations that nobody knows and that look like a known one: an API server keeps them without a word."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.nearest import did_you_mean
from metal_supervisor.spec.types import Json

DOMAIN = "metal-supervisor.io/"
ANNOTATIONS = frozenset({f"{DOMAIN}{name}" for name in ("aliases", "idle-ttl", "on-demand", "runtime")})
_MODEL = (
    "attestation fileSha256 files format hardware mmproj prefetch prefetchNodeSelector prefetchTolerations "
    "quantization refreshPolicy resources sha256 source sourceSecretRef"
)
_SERVICE = (
    "affinity args autoscaling batchSize bindAddress cacheTypeCustomK cacheTypeCustomV cacheTypeK cacheTypeV "
    "command containerPort contextSize disruption endpoint env evictionProtection extraArgs extraVolumeMounts "
    "extraVolumes flashAttention hotCacheMaxSize image imagePullSecrets jinja maxPodLifetimeIdleTimeoutSeconds "
    "maxPodLifetimeSeconds metadataOverrides mode modelCache modelRef moeCPULayers moeCPUOffload multiNode noKvOffload "
    "noWarmup nodeSelector pagedSSDCacheDir pagedSSDCacheMaxSize parallelSlots personaPlexConfig podAnnotations "
    "podLabels podSecurityContext priority priorityClassName probeOverrides reasoningBudget reasoningBudgetMessage "
    "replicas resources revisionHistoryLimit rolloutPolicy ropeScaling runtime runtimeClassName securityContext "
    "sglangConfig skipModelInit slo speculativeDecoding suspend tensorOverrides tgiConfig tolerations "
    "topologySpreadConstraints turboQuantBits uBatchSize vllmConfig"
)
MOST_LOOKED_AT = 64
"""Unknown names of one object: to look for what is like one takes as long as to read a whole object."""
MODEL = frozenset(_MODEL.split())
"""Fields of a Model's `spec` in LLMKube's schemas and this project's."""
SERVICE = frozenset(_SERVICE.split())
"""Fields of an InferenceService's `spec` in both."""


def misspelled(resource: Json, known: Collection[str], of: str = "") -> Iterator[str]:
    """The misspelled fields and annotations of a resource, each with the name that was meant. `of`: put before each.

    A field of a schema that is newer than this program is none, unless it looks like a known one.
    """
    for name in _first(mapping(resource, "spec").keys() - set(known)):
        if meant := did_you_mean(str(name), known):
            yield f"{of}spec.{str(name)!a:.80}{meant}"
    annotations = mapping(mapping(resource, "metadata"), "annotations").keys() - ANNOTATIONS
    for name in _first(name for name in annotations if str(name).startswith(DOMAIN)):
        yield f"{of}annotation {str(name)!a:.80}{did_you_mean(str(name), ANNOTATIONS)}"


def _first(names: Iterable[object]) -> list[object]:
    return sorted(names, key=str)[:MOST_LOOKED_AT]
