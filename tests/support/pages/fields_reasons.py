"""Why a field that changes nothing on a Mac changes nothing.

A field needs a reason here only if the trials found that it is neither honoured nor refused; a reason that no field
needs any more is an error, as is a field without one.
"""

from __future__ import annotations

from collections.abc import Mapping

POD = "it is of a pod, and a Mac runs a process"
CONTAINER = "it is of a container, and a Mac runs a process"
AGE = "it ends pods by their age; an engine is restarted when it hangs or crashes"
PLACEMENT = "nothing is scheduled as a pod; spec.nodeSelector says which Macs may serve it"
GPU = "it hands GPUs of a cluster's nodes to pods; a Mac has one, which all of its models share"
CHARGED = "it is of pods; memory is charged by the model's own header, see docs/memory.md"
ELSEWHERE = "it is of an engine that runs in the cluster only, whose spec.runtime is refused"

WHOLE = "MLX has the whole model on the GPU, whatever the number"
IN_PLACE = "a directory of the Mac is used whole; its files are listed for spec.fileSha256"

MLX_RUNTIMES = ("mlx-server", "omlx", "vllm-swift")
OF_GPUS = (
    "enabled",
    "count",
    "memory",
    "vendor",
    "runtime",
    "resourceName",
    "resourceClaims",
    "tolerationKey",
    "sharding",
)
OF_PODS = ("cpu", "ephemeralStorage", "gpu", "gpuMemory", "gpuSharing")
"""Fields of `resources`. The others are named one by one: they mean something."""

REASONS: Mapping[str, Mapping[str, str]] = {
    "Model": {
        **dict.fromkeys((f"spec.quantization with {name}" for name in MLX_RUNTIMES), "it tells GGUF files apart"),
        **dict.fromkeys((f"spec.hardware.gpu.{name}" for name in OF_GPUS), GPU),
        **dict.fromkeys((f"spec.hardware.gpu.layers with {name}" for name in MLX_RUNTIMES), WHOLE),
        **dict.fromkeys((f"spec.files with {name}" for name in MLX_RUNTIMES), IN_PLACE),
        "spec.prefetch": "LLMKube's operator fetches ahead with Jobs; a Mac fetches what its services need",
        "spec.prefetchTolerations": "it is of those Jobs",
        "spec.prefetchNodeSelector": "it is of those Jobs",
        "spec.attestation": "LLMKube's operator verifies it; a Model that it rejects is not started",
        "spec.resources": CHARGED,
    },
    "InferenceService": {
        "spec.endpoint.gateway": "LLMKube's operator makes the route, to the Service that a Mac publishes",
        **dict.fromkeys((f"spec.resources.{name}" for name in OF_PODS), CHARGED),
        "spec.slo": "LLMKube's operator evaluates it, and marks a service on a Mac as off-cluster",
        "spec.autoscaling": "a process has nothing for an autoscaler of pods to scale; set spec.replicas",
        "spec.image": CONTAINER,
        "spec.imagePullSecrets": CONTAINER,
        "spec.securityContext": CONTAINER,
        "spec.podSecurityContext": POD,
        "spec.podAnnotations": POD,
        "spec.podLabels": POD,
        "spec.extraVolumes": POD,
        "spec.extraVolumeMounts": CONTAINER,
        "spec.runtimeClassName": CONTAINER,
        "spec.skipModelInit": "there is no init container to skip; a file that is on the Mac is used in place",
        "spec.modelCache": "it is of volumes; a Mac keeps its models in its own store",
        "spec.affinity": PLACEMENT,
        "spec.tolerations": PLACEMENT,
        "spec.topologySpreadConstraints": PLACEMENT,
        "spec.priorityClassName": "it is of the scheduler of pods; spec.priority is what counts on a Mac",
        "spec.revisionHistoryLimit": "it is of a Deployment, and there is none",
        "spec.disruption": "it is of a PodDisruptionBudget; spec.evictionProtection is what counts on a Mac",
        "spec.maxPodLifetimeSeconds": AGE,
        "spec.maxPodLifetimeIdleTimeoutSeconds": AGE,
        "spec.multiNode": "it starts pods of the runtime vllm on named nodes, and a Mac is no node",
        "spec.personaPlexConfig": ELSEWHERE,
        "spec.vllmConfig": ELSEWHERE,
        "spec.tgiConfig": ELSEWHERE,
        "spec.sglangConfig": ELSEWHERE,
    },
}
"""Kind -> field, or what it is below -> why it has no meaning here; the longest counts.

`spec.x with R` is said of runtime R only.
"""

GAPS: Mapping[str, Mapping[str, str]] = {
    "Model": {},
    "InferenceService": {
        "spec.resources.memory": "it is not yet reserved where it is more than the estimate",
        "spec.resources.hostMemory": "it is not yet reserved where it is more than the estimate",
        "spec.probeOverrides": "engines are not yet asked in any other way than their runtime's own",
    },
}
"""The same for fields that mean something, and are accepted without effect for now."""
