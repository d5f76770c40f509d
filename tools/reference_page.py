#!/usr/bin/env python3
"""Writes docs/reference.md from the schemas in conf/crds.

python tools/reference_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
SCHEMAS = ROOT / "conf" / "crds"
HEAD = """# Custom resources

<!-- written by tools/reference_page.py from conf/crds; change those, then run it -->

Every field of a `Model` and an `InferenceService` that means something on a Mac, with its type, what it may be, and
what it is without being said; `kubectl explain isvc.spec` has the same. What each engine makes of a field is in
[fields.md](fields.md), with LLMKube's fields that have no meaning here. A field in bold has to be there. `[]` is an
item of a list, `.*` a value of a map.
"""
KINDS = (("models", "Model"), ("inferenceservices", "InferenceService"))
LONGEST_CHOICE = 8
ON_ANNOTATIONS = """
## Annotations

On an InferenceService, and where it says so on its Model, which counts for the services that do not say otherwise.

| annotation | value | what it does |
| --- | --- | --- |
"""
ANNOTATIONS = {
    "runtime": (
        "`llama-server`, `mlx-server`, `vllm-swift`, `omlx`, `ollama`",
        "names the engine; before `spec.runtime`; also on a Model ([runtimes.md](runtimes.md))",
    ),
    "on-demand": (
        '`"true"`, `"false"`',
        "loads the model when somebody asks for it; also on a Model ([on-demand.md](on-demand.md))",
    ),
    "idle-ttl": (
        "seconds, `15m`, or `off`",
        "how long such a model stays loaded without a request; also on a Model",
    ),
    "aliases": ("names with commas", "further names at the gateway ([gateway.md](gateway.md#names))"),
    "hosts": ("hosts with commas; on a Secret", "where the Secret may be sent ([models.md](models.md#credentials))"),
}


def rows(schema: dict[str, Any], above: str = "") -> Iterator[str]:
    """A row for each field of a schema, and for those inside it."""
    required = schema.get("required", ())
    for name, inner in schema.get("properties", {}).items():
        path = f"{above}{name}"
        shown = f"**`{path}`**" if name in required else f"`{path}`"
        text = " ".join(inner["description"].split()).replace("|", "\\|")
        yield f"| {shown} | {kind(inner)} | {default(inner)} | {text} |\n"
        yield from rows(inner, f"{path}.")
        yield from rows(inner.get("items", {}), f"{path}[].")
        if isinstance(more := inner.get("additionalProperties"), dict):
            yield from rows(more, f"{path}.*.")


def kind(schema: dict[str, Any]) -> str:
    """The type of a value, or what it may be."""
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if (choice := schema.get("enum")) and len(choice) <= LONGEST_CHOICE:
        return ", ".join(f"`{each}`" for each in choice if each != "")
    what = str(schema.get("type", "any"))
    if what == "array":
        return f"list of {kind(schema['items'])}"
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None or most is not None:
        what += f" {least if least is not None else ''}…{most if most is not None else ''}"
    return what


def default(schema: dict[str, Any]) -> str:
    """What the API server puts where a field is left out."""
    value = schema.get("default", "")
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else ""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for plural, name in KINDS:
        found = yaml.safe_load((SCHEMAS / f"{plural}.yaml").read_text("utf-8"))["spec"]["versions"][0]
        spec = found["schema"]["openAPIV3Schema"]["properties"]["spec"]
        parts += [f"\n## {name}\n\n| field of spec | type | default | |\n| --- | --- | --- | --- |\n", *rows(spec)]
    told = (f"| `metal-supervisor.io/{name}` | {value} | {text} |\n" for name, (value, text) in ANNOTATIONS.items())
    return "".join((*parts, ON_ANNOTATIONS, *told))


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.exit(0)
