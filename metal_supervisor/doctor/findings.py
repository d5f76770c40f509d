"""What a check comes to: one line for people, with a way out if something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from metal_supervisor.doctor.surroundings import Surroundings

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    """Name of its check; "" until the check is over."""
    status: Status
    text: str
    """What was found, with the figures. May quote what others wrote: escape it before it is shown."""
    fix: str = ""
    """What to do; "" only if all is well."""


Ask = Callable[["Surroundings"], Sequence[Finding]]
"""Looks and judges; no finding where it does not apply. May raise anything: that is a finding too."""


@dataclass(frozen=True)
class Check:
    """One row of docs/doctor.md."""

    name: str
    looks: str
    """What is looked at."""
    wrong: str
    """When it warns, and when it fails."""
    fix: str
    """What helps, in a few words."""
    ask: Ask
    mac: bool = False
    """Left out on any other system."""
    needs_api: bool = False
    """Asked once it is known whether the API server answers."""


def ok(text: str) -> Finding:
    """All is well."""
    return Finding("", "ok", text)


def warn(text: str, fix: str) -> Finding:
    """It works, but somebody should know; or nobody can tell."""
    return Finding("", "warn", text, fix)


def fail(text: str, fix: str) -> Finding:
    """Something does not work like that."""
    return Finding("", "fail", text, fix)


def unknown(why: str) -> Finding:
    """A check that could not be carried out, which says nothing about what it checks."""
    return warn(f"could not be asked: {why}", "run it again; if it stays so, ask what is named here by hand")


def unasked(problem: str) -> Finding:
    """A check that waits for another: `problem` tells what stands in its way."""
    return warn(f"could not be asked: {problem}", "see api")


def summary(findings: Sequence[Finding]) -> str:
    """The last line."""
    counts = {status: sum(each.status == status for each in findings) for status in ("ok", "warn", "fail")}
    told = ", ".join(f"{counts[status]} {status}" for status in ("fail", "warn", "ok") if counts[status])
    return f"{len(findings)} findings: {told}" if findings else "nothing was asked"


def sound(findings: Sequence[Finding]) -> bool:
    """Whether nothing failed."""
    return all(each.status != "fail" for each in findings)
