"""Mistakes that users of this project make, each with the words of the answer: rows of docs/mistakes.md.

tests/scenarios/test_mistakes.py makes each of them at a running system. An answer names the field, and the next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KUBECTL = "`kubectl apply`"
CONDITION = "condition"
TERMINAL = "terminal"
RUNTIME = "metal-supervisor.io/runtime"
GGUF = {"accelerator": "metal", "gpu": {}}


@dataclass(frozen=True)
class Mistake:
    """One mistake."""

    title: str
    """What was done, for people."""
    words: tuple[str, ...]
    """Words that the answer has: the field, and the next step."""
    reason: str = ""
    """Reason of the condition that tells it; "" if kubectl or the terminal does."""
    condition: str = "MetalReady"
    spec: dict[str, Any] = field(default_factory=dict)
    """Fields of the InferenceService."""
    model: dict[str, Any] | None = None
    """Fields of a Model of its own; None for one that is right."""
    annotations: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    """What was typed after `metal-supervisor`."""

    @property
    def where(self) -> str:
        """The place where a user sees the answer."""
        if self.command:
            return TERMINAL
        return f"{CONDITION} {self.condition}, reason {self.reason}" if self.reason else KUBECTL


MISTAKES: dict[str, Mistake] = {
    "model-name": Mistake(
        "a typo in modelRef", ("spec.modelRef", "did you mean fine?"), "ModelNotFound", spec={"modelRef": "fin"}
    ),
    "other-namespace": Mistake(
        "a Model of another namespace in modelRef",
        ("spec.modelRef 'other/fine'", "name one of the same namespace"),
        "InvalidSpec",
        spec={"modelRef": "other/fine"},
    ),
    "field-name": Mistake(
        "a typo in the name of a field of the InferenceService",
        ("spec.'contextsize'", "did you mean contextSize?"),
        "FieldIgnored",
        "Degraded",
        spec={"contextsize": 4096},
    ),
    "model-field-name": Mistake(
        "a typo in the name of a field of the Model",
        ("Model \"model-field-name\" spec.'quantisation'", "did you mean quantization?"),
        "FieldIgnored",
        "Degraded",
        model={"quantisation": "Q4_K_M"},
    ),
    "annotation-name": Mistake(
        "a typo in an annotation",
        ("annotation 'metal-supervisor.io/ondemand'", "did you mean metal-supervisor.io/on-demand?"),
        "FieldIgnored",
        "Degraded",
        annotations={"metal-supervisor.io/ondemand": "true"},
    ),
    "annotation-value": Mistake(
        "an annotation that says yes instead of true",
        ("annotation metal-supervisor.io/on-demand", '"true" or "false"'),
        "InvalidSpec",
        annotations={"metal-supervisor.io/on-demand": "yes"},
    ),
    "no-gateway": Mistake(
        "a model on demand while the gateway is off",
        ("metal-supervisor.io/on-demand", "set --gateway"),
        "OnDemandIgnored",
        "Degraded",
        annotations={"metal-supervisor.io/on-demand": "true"},
    ),
    "flag-name": Mistake(
        "a typo in a flag of the engine",
        ("spec.extraArgs[0]", "did you mean --temp?"),
        "UnsupportedField",
        spec={"extraArgs": ["--tmp", "1"]},
    ),
    "flag-and-value": Mistake(
        "a flag and its value in one item",
        ("spec.extraArgs[0]", "split it: spec.extraArgs"),
        "InvalidSpec",
        spec={"extraArgs": ["--temp 0.2"]},
    ),
    "flag-value": Mistake(
        "a word where a flag takes a number",
        ("spec.extraArgs[1]", "takes a number"),
        "InvalidSpec",
        spec={"extraArgs": ["--temp", "warm"]},
    ),
    "flag-of-ours": Mistake(
        "a flag that the supervisor sets itself",
        ("spec.extraArgs[0] --port", "is not yours"),
        "InvalidSpec",
        spec={"extraArgs": ["--port", "1"]},
    ),
    "variable": Mistake(
        "a variable of the engine that is not known to be harmless",
        ("spec.env[0].name 'LLAMA_ARG_CTX'", "--allow-env"),
        "InvalidSpec",
        spec={"env": [{"name": "LLAMA_ARG_CTX", "value": "1"}]},
    ),
    "runtime-annotation": Mistake(
        "a typo in the annotation of the runtime",
        (RUNTIME, "did you mean llama-server?"),
        "UnsupportedRuntime",
        annotations={RUNTIME: "lama-server"},
    ),
    "format": Mistake(
        "an MLX model for llama-server",
        ("spec.format", "is served by"),
        "FormatMismatch",
        annotations={RUNTIME: "llama-server"},
        model={"format": "mlx"},
    ),
    "selector": Mistake(
        "a nodeSelector that this Mac does not have",
        ("nodeSelector", "--node-labels"),
        "NodeSelectorMismatch",
        spec={"nodeSelector": {"zone": "moon"}},
    ),
    "no-accelerator": Mistake(
        "no accelerator in the Model",
        ("spec.hardware.accelerator", '"metal"; set it'),
        "NotMetal",
        model={"hardware": None},
    ),
    "quantity-in-words": Mistake(
        "a quantity of memory in words",
        ("spec.hardware.memoryBudget", "such as 16Gi"),
        model={"hardware": {**GGUF, "memoryBudget": "lots"}},
    ),
    "quantity-unit": Mistake(
        "a quantity of memory in GB",
        ("spec.hardware.memoryBudget", "such as 16Gi"),
        model={"hardware": {**GGUF, "memoryBudget": "16GB"}},
    ),
    "too-large": Mistake(
        "a model that is too large for this Mac",
        ("never fits here", "= weights ", "KV cache (1 x 2097152 tokens) ", "spec.contextSize 65536 would fit"),
        "InsufficientMemory",
        spec={"contextSize": 2_097_152},
    ),
    "port-taken": Mistake(
        "a port that another program has",
        ("spec.containerPort", "free it, or choose another"),
        "PortInUse",
        "Degraded",
        spec={"containerPort": "TAKEN"},
    ),
    "port-twice": Mistake(
        "a port that another service has",
        ("spec.containerPort", "belongs to default.holder already", "choose another"),
        "PortInUse",
        spec={"containerPort": "HELD"},
    ),
    "missing-file": Mistake(
        "a file that is not there",
        ("spec.source", "/no/such.gguf"),
        "ModelFileMissing",
        model={"source": "/no/such.gguf"},
    ),
    "relative-path": Mistake(
        "a relative path",
        ("spec.source", "use an absolute path"),
        "UnsupportedSource",
        model={"source": "models/m.gguf"},
    ),
    "directory": Mistake(
        "a directory instead of a file",
        ("spec.source", "must name one .gguf file"),
        "InvalidModelFile",
        model={"source": "DIRECTORY"},
    ),
    "no-gguf": Mistake(
        "a file that is no model",
        ("spec.source", "not a GGUF file", "check spec.source"),
        "InvalidModelFile",
        model={"source": "TEXT"},
    ),
    "checksum": Mistake(
        "a wrong checksum", ("spec.sha256", "correct one of them"), "ModelDigestMismatch", model={"sha256": "0" * 64}
    ),
    "volume": Mistake(
        "a volume of the cluster as the source",
        ("spec.source", "hf://"),
        "UnsupportedSource",
        model={"source": "pvc://claim/m.gguf"},
    ),
    "repository-without-file": Mistake(
        "`hf://` without a file, of a repository with several",
        ("spec.source", "m-Q8_0.gguf", "set spec.files"),
        "AmbiguousSource",
        model={"source": "hf://o/r"},
    ),
    "quantization": Mistake(
        "a quantization that the repository does not have",
        ("no GGUF file of quantization 'Q9'", "it has m-Q4_K_M.gguf"),
        "InvalidModel",
        model={"source": "hf://o/r:Q9"},
    ),
    "no-repository": Mistake(
        "a repository that does not exist, or is private (401)",
        ("correct spec.source", "spec.sourceSecretRef"),
        "SourceUnauthorized",
        model={"source": "hf://o/nothing"},
    ),
    "not-found": Mistake(
        "a file that the repository does not have (404)",
        ("no file 'x.gguf'", "correct spec.source"),
        "SourceNotFound",
        model={"source": "hf://o/r/x.gguf"},
    ),
    "login-page": Mistake(
        "an address that answers with a web page",
        ("a login or error page?", "check spec.source"),
        "InvalidModelFile",
        model={"source": "PAGE"},
    ),
    "no-secret": Mistake(
        "a Secret that does not exist",
        ("spec.sourceSecretRef", 'the Secret "nothing"', "create it"),
        "SecretNotFound",
        model={"source": "hf://o/r/m-Q8_0.gguf", "sourceSecretRef": {"name": "nothing"}},
    ),
    "checksum-form": Mistake(
        "a checksum that is too short",
        ("spec.sha256", "64 hexadecimal digits that sha256sum prints"),
        model={"sha256": "abc"},
    ),
    "source-form": Mistake(
        "a source with a blank in it", ("spec.source", "give hf://OWNER/NAME/FILE.gguf"), model={"source": "my model"}
    ),
    "cache-size": Mistake(
        "a size of oMLX's cache in Gi", ("spec.hotCacheMaxSize", "such as 8GB"), spec={"hotCacheMaxSize": "8Gi"}
    ),
    "negative": Mistake(
        "a negative number of replicas", ("spec.replicas", "greater than or equal to 0"), spec={"replicas": -1}
    ),
    "number-in-words": Mistake("a number in words", ("spec.contextSize", "integer"), spec={"contextSize": "8k"}),
    "runtime-name": Mistake(
        "a typo in the runtime", ("spec.runtime", '"llama-server"'), spec={"runtime": "lama-server"}
    ),
    "priority-name": Mistake(
        "a priority that there is not", ("spec.priority", '"critical", "high", "normal"'), spec={"priority": "urgent"}
    ),
    "accelerator": Mistake(
        "a typo in the accelerator",
        ("spec.hardware.accelerator", '"metal"'),
        model={"hardware": {"accelerator": "metall"}},
    ),
    "command": Mistake("a typo in a command", ("did you mean status?",), command=("statsu",)),
    "command-flag": Mistake("a typo in a flag", ("did you mean --watch?",), command=("status", "--wacth")),
    "no-such-service": Mistake("a name that no service has", ("nothing", "there are:"), command=("stop", "nothing")),
    "serve-typo": Mistake(
        "a source that is nothing", ("nothing-here", "OWNER/REPO"), command=("serve", "nothing-here")
    ),
    "no-kubeconfig": Mistake(
        "a kubeconfig that is not there",
        ("/no/such does not exist", "check --kubeconfig"),
        command=("run", "--kubeconfig", "/no/such"),
    ),
    "range-of-ports": Mistake(
        "a range of ports that ends before it starts",
        ("--ports", "must look like 18100-18999"),
        command=("run", "--ports", "9000-8000"),
    ),
    "gateway-yes": Mistake(
        "a word where the gateway takes an address",
        ("--gateway", "must be off, or look like 127.0.0.1:9100"),
        command=("run", "--gateway", "yes"),
    ),
    "second-start": Mistake("a second start on the same state", ("another run", "stop it first"), command=("run",)),
}
