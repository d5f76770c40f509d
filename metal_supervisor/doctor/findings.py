"""Checks and their findings: one line of text each, with a fix if something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from metal_supervisor.spec.types import Json

if TYPE_CHECKING:
    from metal_supervisor.doctor.surroundings import Surroundings

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    """Name of its check; set when the check is over, "" before."""
    status: Status
    text: str
    """The observation, with figures. It may quote untrusted text: escape it before printing."""
    fix: str = ""
    """Advice; "" only if all is well."""


Found = Finding | Sequence[Finding]
Ask = Callable[["Surroundings"], Found]
"""Runs a check; returns no finding if it does not apply. May raise any exception: that becomes a finding too."""


@dataclass(frozen=True)
class Check:
    """One question; docs/doctor.md tells what it looks at, when it warns or fails, and what helps."""

    name: str
    ask: Ask
    mac: bool = False
    """It runs on macOS only."""
    needs_api: bool = False
    """It runs in the second round, once the API server has answered or failed to."""


def ok(text: str) -> Finding:
    """A finding that all is well."""
    return Finding("", "ok", text)


def warn(text: str, fix: str) -> Finding:
    """A finding that it works but deserves attention, or that the state is unknown."""
    return Finding("", "warn", text, fix)


def fail(text: str, fix: str) -> Finding:
    """A finding that something does not work."""
    return Finding("", "fail", text, fix)


def unknown(why: str) -> Finding:
    """A finding that the check itself failed: the state of what it checks is unknown."""
    return warn(f"could not be asked: {why}", "run it again; if it stays so, ask what is named here by hand")


def unasked(problem: str) -> Finding:
    """A finding that the check was skipped because the API server cannot be used. `problem`: the reason."""
    return warn(f"could not be asked: {problem}", "see api")


def summary(findings: Sequence[Finding]) -> str:
    """The last line of the report: the number of findings by status."""
    counts = {status: sum(each.status == status for each in findings) for status in ("ok", "warn", "fail")}
    told = ", ".join(f"{counts[status]} {status}" for status in ("fail", "warn", "ok") if counts[status])
    return f"{len(findings)} findings: {told}" if findings else "nothing was asked"


def report(findings: Sequence[Finding]) -> Json:
    """The report as JSON: its summary, and all findings."""
    return {"summary": summary(findings), "findings": [asdict(each) for each in findings]}


def sound(findings: Sequence[Finding]) -> bool:
    """True if nothing failed."""
    return all(each.status != "fail" for each in findings)
