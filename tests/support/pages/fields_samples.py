"""What docs/fields.md is tried out with: values for fields, and words for what they change.

No verdict stands here. `fields_trial.py` gives these values to the code and looks at what comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BASES: Mapping[str, Mapping[str, Any]] = {
    "gguf": {"source": "/models/base-00001-of-00002.gguf"},
    "mlx": {"source": "/models/base", "format": "mlx"},
    "ollama": {"source": "/models/base.gguf"},  # it takes no shards
}
"""A Model's spec to start from, by the name of a runtime or else by a format that it serves."""

DRAFT: Mapping[str, Any] = {"source": "/models/draft.gguf", "hardware": {"accelerator": "metal"}}
"""Spec of a Model that drafts for another one."""

HELD = ("engine", "example")
"""Keys of any Secret and ConfigMap."""

FLAGS: Mapping[str, frozenset[str]] = {
    "mlx-server": frozenset({"--model", "--host", "--port", "--max-slots", "--reasoning", "--your-flag"}),
}
"""Flags of executables that are documented to know no others; of all others the best build is meant."""

MLX_CONFIG: Mapping[str, int | str] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "model_type": "llama",
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
"""config.json of the directory that MLX runtimes are tried with."""

MAP_KEY = "base.gguf"
"""Any name of a map: of a label, or of a file."""

SCALARS: Mapping[str, tuple[Any, ...]] = {
    "string": ("example",),
    "integer": (3,),
    "number": (0.5,),
    "boolean": (True, False),
    "quantity": (3,),
    "object": ({"example": "example"},),
}
"""Values to try by type, of fields that are not listed below and whose schema names no values."""

VALUES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "Model": {
        "spec.source": (
            "/models/example.gguf",
            "https://ollama.com/library/example:8b",
            "hf://example/example",
            "pvc://example/m",
            "oci://example/m",
        ),
        "spec.quantization": ("Q4_K_M",),
        "spec.sourceSecretRef.name": ("keys",),
        "spec.files[]": ("base-00002-of-00002.gguf", "example.gguf"),
        "spec.mmproj": ("mmproj-example.gguf",),
        "spec.sha256": ("0123456789abcdef" * 4,),
        "spec.fileSha256.*": ("0123456789abcdef" * 4,),
        "spec.hardware.gpu.layers": (20,),
        "spec.hardware.memoryBudget": ("8Gi",),
    },
    "InferenceService": {
        "spec.replicas": (0, 3),
        "spec.endpoint.port": (9000,),
        "spec.endpoint.path": ("/v1/completions",),
        "spec.endpoint.nodePort": (30080,),
        "spec.containerPort": (9000,),
        "spec.bindAddress": ("127.0.0.1",),
        "spec.contextSize": (4096,),
        "spec.batchSize": (512,),
        "spec.uBatchSize": (256,),
        "spec.cacheTypeCustomK": ("q8_0", "turbo4"),
        "spec.cacheTypeCustomV": ("q8_0",),
        "spec.tensorOverrides[]": ("blk.0.*=CPU",),
        "spec.metadataOverrides[]": ("tokenizer.ggml.add_bos_token=bool:false",),
        "spec.ropeScaling.factor": ("2.0",),
        "spec.ropeScaling.originalContext": (8192,),
        "spec.speculativeDecoding.draftModelRef": ("draft",),
        "spec.speculativeDecoding.draftModel": ("draft.gguf",),
        "spec.pagedSSDCacheDir": ("/caches/omlx",),
        "spec.pagedSSDCacheMaxSize": ("100GB",),
        "spec.hotCacheMaxSize": ("8GB",),
        "spec.extraArgs[]": ("--your-flag",),
        "spec.env[].name": ("YOUR_NAME",),
        "spec.env[].value": ("yours",),
        "spec.rolloutPolicy.idleTimeoutSeconds": (60,),
        "spec.resources.memory": ("48Gi",),
        "spec.resources.hostMemory": ("48Gi",),
        "spec.vllmConfig.maxModelLen": (4096,),
    },
}
"""Kind -> field -> values to try, where none of the type will do."""

NAMED = {"spec.env[].name": "YOUR_NAME"}
SECRET = "spec.env[].valueFrom.secretKeyRef"
CONFIG_MAP = "spec.env[].valueFrom.configMapKeyRef"
DRAFTS = {"spec.speculativeDecoding.type": "draft-mtp"}
CACHE = {"spec.pagedSSDCacheDir": "/caches/omlx"}
HUB = {"spec.source": "hf://example/example"}
BESIDE: Mapping[str, Mapping[str, Any]] = {
    "spec.sourceSecretRef": HUB,
    "spec.fileSha256": {"spec.source": f"/models/{MAP_KEY}", "spec.files": [MAP_KEY]},
    "spec.quantization": HUB,
    "spec.endpoint.nodePort": {"spec.endpoint.type": "NodePort"},
    "spec.ropeScaling.factor": {"spec.ropeScaling.type": "yarn"},
    "spec.ropeScaling.originalContext": {"spec.ropeScaling.type": "yarn"},
    "spec.pagedSSDCacheMaxSize": CACHE,
    "spec.hotCacheMaxSize": CACHE,
    "spec.env[].value": NAMED,
    "spec.env[].valueFrom": NAMED,
    **{kept: {**NAMED, f"{kept}.name": "keys", f"{kept}.key": "engine"} for kept in (SECRET, CONFIG_MAP)},
    **{
        f"{kept}.optional": {**NAMED, f"{kept}.name": "keys", f"{kept}.key": "missing"} for kept in (SECRET, CONFIG_MAP)
    },
    "spec.speculativeDecoding.draftModelRef": DRAFTS,
    "spec.speculativeDecoding.draftModel": DRAFTS,
    "spec.speculativeDecoding.pMin": DRAFTS,
    "spec.speculativeDecoding.nDraftMax": {"spec.speculativeDecoding.type": "ngram-simple"},
}
"""Field, or what it is below -> what has to be said with it; it is there before the field is added, too."""

NEEDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "spec.speculativeDecoding.type": {
        kind: {"spec.speculativeDecoding.draftModelRef": "draft"}
        for kind in ("draft", "draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark")
    },
}
"""Field -> value -> what only that value has to be said with."""

NEUTRAL: Mapping[str, frozenset[Any]] = {
    "spec.format": frozenset({"gguf", "mlx", "safetensors"}),
    "spec.files[]": frozenset({"base-00002-of-00002.gguf"}),
    "spec.refreshPolicy": frozenset({"IfNotPresent"}),
    "spec.hardware.accelerator": frozenset({"metal"}),
    "spec.runtime": frozenset({"llamacpp"}),
    "spec.endpoint.type": frozenset({"ClusterIP"}),
    "spec.mode": frozenset({"chat"}),
    "spec.cacheTypeK": frozenset({"f16"}),
    "spec.cacheTypeV": frozenset({"f16"}),
    "spec.speculativeDecoding.type": frozenset({"none", "disabled"}),
    "spec.priority": frozenset({"normal"}),
}
"""Values that ask for what there is without them, so that they may change nothing."""

WORDS: Mapping[str, str] = {
    "reserved_bytes": "memory that is charged",
    "fetched": "which files are fetched",
    "digest": "what its file has to be",
    "opened": "the Secret that opens its source",
    "limit_bytes": "most memory that it is admitted with",
    "standing": "whether it runs",
    "replicas": "how many Macs claim it",
    "priority": "order of admission and eviction",
    "protected": "never evicted",
    "drain_s": "how long running requests may finish",
    "placement": "which Macs claim it",
    "mode": "`status.mode`",
    "runtime": "which engine runs it",
    **dict.fromkeys(("probe.first_path", "probe.first_body"), "what it is asked first"),
    "daemon_names": "names that the daemon serves it under",
    "url": "`status.endpoint`",
    "Service.spec.type": "type of the Service",
    "Service.spec.ports.0.port": "port of the Service",
    "Service.spec.ports.0.nodePort": "nodePort of the Service",
}
"""What a field changed, besides command line and environment -> as the page says it."""

BY_THE_WAY = frozenset({"reserved_bytes", "mode", "url", "model", "fetched"})
"""Changes that follow from others, and are told only where there is nothing else."""
