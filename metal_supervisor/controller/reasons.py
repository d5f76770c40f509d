"""Reasons of the controller's decisions that neither a record nor a condition holds: for `explain`.

Part of the controller's report, so kept short: the latest step for each program, and the origin of its runtime.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from metal_supervisor.controller.plan import Step
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.spec import resources
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.sources import library_model
from metal_supervisor.spec.types import Json

MOST = 500
"""Most programs in the report: more engines than any Mac has memory for."""
LONGEST_TEXT = 300


class Reasons:
    """The reasons of one controller; that of a runtime is kept while the record and its resources stay the same."""

    def __init__(self, default_runtime: str) -> None:
        """`default_runtime`: the one of `--runtime`."""
        self._default = default_runtime
        self._runtimes: dict[str, tuple[Record, Json, Json, str]] = {}

    def told(self, records: Collection[Record], snapshot: Snapshot, steps: Sequence[Step]) -> Json:
        """Program -> `step` (`wait: held after crashes`) and `runtime` (reason for it); either may be missing."""
        step_of = {step.program: f"{step.do.value}: {step.why}" for step in steps}
        services = snapshot.services or {}
        result: Json = {}
        known, self._runtimes = self._runtimes, {}
        for record in sorted(records, key=lambda each: each.program)[:MOST]:
            program, written = record.program, services.get(record.owner)
            model = snapshot.models.get((record.namespace, record.model))
            told = {"step": step_of[program][:LONGEST_TEXT]} if program in step_of else {}
            if written and model:
                kept = known.get(program)
                if kept is None or kept[0] is not record or kept[1] is not written or kept[2] is not model:
                    kept = record, written, model, _why_runtime(record, written, model, self._default)[:LONGEST_TEXT]
                self._runtimes[program] = kept
                if kept[3]:
                    told["runtime"] = kept[3]
            if told:
                result[program] = told
        return result


def _why_runtime(record: Record, written: Json, model: Json, default_runtime: str) -> str:
    """Reason why a service has its runtime, "" if the manifest is invalid or names another one by now."""
    try:
        named = resources.named_runtime(written, model, record.model)
    except Exception:  # noqa: BLE001 - Bad, or of our own code: it is told where the service is read
        return ""
    said = mapping(model, "spec")
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
