"""Every field with every engine: honoured, refused by name, without meaning for a stated reason; or a problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.support.pages import fields_samples
from tests.support.pages.fields_leaves import KINDS, Leaf, every
from tests.support.pages.fields_reasons import GAPS, REASONS
from tests.support.pages.fields_trial import Cell, Column, attempt, beside, cell, columns, names_field, said, silent


@dataclass(frozen=True)
class Table:
    """What was found about the fields of one kind."""

    kind: str
    columns: Sequence[Column]
    rows: Sequence[tuple[Leaf, Sequence[Cell]]]
    """Each with a cell for each column."""


def table(kind: str, fields: Sequence[Leaf]) -> Table:
    """Tries fields of a kind with all engines."""
    engines = columns()
    return Table(kind, engines, [(leaf, [cell(each, kind, leaf) for each in engines]) for leaf in fields])


def listed(path: str, runtime: str, reasons: Mapping[str, str]) -> str:
    """The key that stands for a field with a runtime: of the field or the nearest above it; "" if there is none."""
    found = [
        key
        for key in reasons
        for above, _, only in [key.partition(" with ")]
        if only in ("", runtime) and (path == above or path.startswith((f"{above}.", f"{above}[")))
    ]
    return max(found, key=len, default="")


def reason(kind: str, path: str, runtime: str) -> tuple[str, bool] | None:
    """(key, whether it is a gap) of what is said about a field that changes nothing."""
    why, gap = listed(path, runtime, REASONS.get(kind, {})), listed(path, runtime, GAPS.get(kind, {}))
    if not why and not gap:
        return None
    return (gap, True) if len(gap) >= len(why) else (why, False)


def problems(found: Table) -> list[str]:
    """What keeps the table from being whole and true."""
    told = [
        f"{found.kind}: {each.title}: the base is refused"
        for each in found.columns
        if attempt(each, found.kind, {}).refusal
    ]
    used: set[tuple[str, bool]] = set()
    idle: dict[str, set[str]] = {}
    for leaf, cells in found.rows:
        for column, each in zip(found.columns, cells, strict=True):
            where = f"{found.kind} {leaf.path} with {column.title}"
            idle.setdefault(leaf.path, set()).update(each.idle)
            if each.untried:
                told.append(f"{where}: its resource is refused without it: {each.untried}")
            elif each.changes or each.refusals:
                told += [f"{where}: {value} changes nothing" for value in silent(leaf, each)]
                told += [
                    f"{where}: its refusal does not name it: {message}"
                    for _, _, message in each.refusals
                    if not any(names_field(found.kind, path, message) for path in (leaf.path, *beside(leaf.path)))
                ]
            elif (why := reason(found.kind, leaf.path, column.runtime)) is not None:
                used.add(why)
            else:
                told.append(f"{where}: it changes nothing; honour it, refuse it, or say why in fields_reasons.py")
    known = {(key, gap) for gap, keys in ((False, REASONS), (True, GAPS)) for key in keys.get(found.kind, {})}
    told += [f"{found.kind} {key}: nothing needs the reason that is given for it" for key, _ in sorted(known - used)]
    return told + _unused(found, idle)


def _unused(found: Table, idle: Mapping[str, set[str]]) -> list[str]:
    """Samples of fields that there are not, and values that are said to be neutral and are not."""
    paths = set(idle)
    known = fields_samples.VALUES[found.kind]
    told = [f"{found.kind} {path}: there is no such field" for path in known if path not in paths]
    return told + [
        f"{found.kind} {path}: {said(value)} is not neutral"
        for path, values in fields_samples.NEUTRAL.items()
        if path in paths
        for value in values
        if said(value) not in idle[path]
    ]


def all_tables() -> list[Table]:
    """One for each kind."""
    return [table(kind, every(kind)) for kind in KINDS]
