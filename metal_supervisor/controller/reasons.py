"""Why the controller decided as it did, as far as neither a record nor a condition tells: for `explain`.

It is part of the controller's report, so it is short: the latest step for each program, and where its runtime is from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from metal_supervisor.controller.plan import Step
from metal_supervisor.spec import resources
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.sources import library_model
from metal_supervisor.spec.types import Json, Key, Record

MOST = 500
"""Programs that are told of: more engines than any Mac has room for."""
LONGEST_TEXT = 300


def reasons(
    records: Collection[Record],
    services: Mapping[Key, Json],
    models: Mapping[Key, Json],
    steps: Sequence[Step],
    default_runtime: str,
) -> Json:
    """Program -> `step` (`wait: held after crashes`) and `runtime` (why it has this one); either may be missing.

    `default_runtime`: the one of `--runtime`.
    """
    step_of = {step.program: f"{step.do.value}: {step.why}" for step in steps}
    result: Json = {}
    for record in sorted(records, key=lambda each: each.program)[:MOST]:
        written, model = services.get(record.owner), models.get((record.namespace, record.model))
        told = {
            "step": step_of.get(record.program, ""),
            "runtime": _why_runtime(record, written, model, default_runtime) if written and model else "",
        }
        if any(told.values()):
            result[record.program] = {name: text[:LONGEST_TEXT] for name, text in told.items() if text}
    return result


def _why_runtime(record: Record, written: Json, model: Json, default_runtime: str) -> str:
    """Why a service has the runtime it has, "" if that is not as it is written now."""
    try:
        named = resources.named_runtime(written, model, record.model)
    except Bad:
        return ""
    spec = model.get("spec")
    said = spec if isinstance(spec, dict) else {}
    source, kind = said.get("source"), said.get("format") or "gguf"
    if not record.runtime:
        return ""
    if isinstance(source, str) and library_model(source):
        return "its Model is of Ollama's library, which no other serves"
    if named is not None:
        return f"{named[1]} names it" if named[0] == record.runtime else ""
    first = "it is the first of --runtimes that does, or ran it before"
    which = "it is --runtime" if record.runtime == default_runtime else first
    return f"nothing names one; it serves spec.format {kind!s:.40} of its Model, and {which}"
