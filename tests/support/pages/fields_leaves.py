#!/usr/bin/env python3
"""Every field that an InferenceService or a Model can have, read from the schemas: ours, and the field's own.

LLMKube's definitions are what a cluster with its operator has installed, so its users write fields that ours keep but
do not describe. They are not part of this repository; `fields_leaves.txt` has what matters of them by line, and
`python -m tests.support.pages.fields_leaves DIRECTORY` writes that anew from a directory of LLMKube's definitions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
OWN = ROOT / "conf" / "crds"
LIST = Path(__file__).with_suffix(".txt")
KINDS = {"Model": "models", "InferenceService": "inferenceservices"}
"""Kind -> plural."""
NEWER = (
    "Model spec.fileSha256.* string",
    "Model spec.attestation.configMapKeyRef.name string",
    "Model spec.attestation.configMapKeyRef.key string",
    "Model spec.prefetchNodeSelector.* string",
    "InferenceService spec.multiNode.members[].node string",
    "InferenceService spec.multiNode.members[].fabric.address string",
    "InferenceService spec.multiNode.members[].fabric.socketInterface string",
    "InferenceService spec.multiNode.members[].fabric.ibHCA string",
    "InferenceService spec.multiNode.members[].modelCache.claimName string",
    "InferenceService spec.multiNode.rdmaResource string",
    "InferenceService spec.multiNode.ibGIDIndex integer",
    "InferenceService spec.multiNode.rendezvousPort integer",
    "InferenceService spec.vllmConfig.pipelineParallelSize integer",
)
"""Fields that LLMKube has added since, as the list has them: from the Go types of 0.9.24 to 0.10.1."""
HEAD = "# kind, field, type, and its values if they are told, of LLMKube's schemas; written by fields_leaves.py\n"


@dataclass(frozen=True)
class Leaf:
    """One field that has a value of its own."""

    path: str
    """`spec.env[].name`: `[]` is any item of a list, `.*` any name of a map."""
    type: str
    """Of OpenAPI, or `quantity` where a number or a string will do."""
    values: tuple[str, ...] = ()
    """The only ones that the schema allows, () if it names none."""


def leaves(schema: Any, path: str) -> Iterator[Leaf]:
    """The leaves at and below a schema, in its order."""
    if schema.get("properties"):
        for name, child in schema["properties"].items():
            yield from leaves(child, f"{path}.{name}")
    elif isinstance(schema.get("additionalProperties"), dict):
        yield from leaves(schema["additionalProperties"], f"{path}.*")
    elif isinstance(schema.get("items"), dict):
        yield from leaves(schema["items"], f"{path}[]")
    else:
        yield Leaf(path, schema.get("type", "quantity"), tuple(map(str, schema.get("enum", ()))))


def spec_leaves(path: Path) -> list[Leaf]:
    """The leaves of `spec` in a file with one custom resource definition."""
    version = yaml.safe_load(path.read_text())["spec"]["versions"][0]
    return list(leaves(version["schema"]["openAPIV3Schema"]["properties"]["spec"], "spec"))


def own(kind: str) -> list[Leaf]:
    """What our definition describes."""
    return spec_leaves(OWN / f"{KINDS[kind]}.yaml")


def listed(kind: str) -> list[Leaf]:
    """What the field's definition describes, by the list."""
    lines = [*LIST.read_text().splitlines(), *NEWER]
    rows = [line.split(" ") for line in lines if not line.startswith("#")]
    return [Leaf(path, what, tuple(values)) for of, path, what, *values in rows if of == kind]


def merged(ours: list[Leaf], theirs: list[Leaf]) -> list[Leaf]:
    """Each field once, in our order and then in theirs; what one of them says in more detail counts."""
    found = {leaf.path: leaf for leaf in ours}
    for leaf in theirs:
        mine = found.get(leaf.path, leaf)
        found[leaf.path] = Leaf(leaf.path, mine.type, tuple(dict.fromkeys((*mine.values, *leaf.values))))
    above = {leaf.path[:at] for leaf in theirs for at, sign in enumerate(leaf.path) if sign in ".["}
    first: dict[str, int] = {}
    for leaf in ours:
        first.setdefault(top(leaf.path), len(first))
    kept = [leaf for leaf in found.values() if leaf.path not in above]
    return sorted(kept, key=lambda leaf: first.get(top(leaf.path), len(first)))


def top(path: str) -> str:
    """The field directly below spec that a path leads through: `env` of `spec.env[].name`."""
    return path.split(".")[1].removesuffix("[]")


def every(kind: str) -> list[Leaf]:
    """Every leaf of a kind."""
    return merged(own(kind), listed(kind))


def written(directory: Path) -> str:
    """The list, made from a directory of the field's definitions."""
    lines = [
        " ".join((kind, leaf.path, leaf.type, *leaf.values)) + "\n"
        for kind, plural in KINDS.items()
        for leaf in spec_leaves(directory / f"inference.llmkube.dev_{plural}.yaml")
    ]
    return HEAD + "".join(lines)


if __name__ == "__main__":
    LIST.write_text(written(Path(sys.argv[1])))
