#!/usr/bin/env python3
"""Writes docs/fields.md: what becomes of every field of a Model and an InferenceService, engine by engine.

Nothing in it is written by hand but the reasons why a field has no meaning on a Mac: each field is tried out on the
code (`fields_trial.py`). With `--check` the page is only compared. Either way a field that is neither honoured, nor
refused by name, nor given a reason is an error: nothing that a user writes is dropped silently.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.pages.fields_leaves import Leaf
from tests.support.pages.fields_reasons import GAPS, REASONS
from tests.support.pages.fields_table import Table, all_tables, problems, reason
from tests.support.pages.fields_trial import Cell

ROOT = Path(__file__).resolve().parents[3]

PAGE = ROOT / "docs" / "fields.md"
HEAD = """# What becomes of every field

<!-- written by tests/support/pages/fields.py from the code and the schemas; change them, then run `make fields` -->

Each field of our schemas (`conf/crds`) and of LLMKube's was set in a resource for each engine, and what came of that
was compared with the same resource without it. A cell says

- what the field changes: flags of the engine's command line, its environment, or what is done with the service; with
  *daemon:* a flag of the shared daemon's command line, or what it is asked for by the attacher of the model;
- **refused**, with the reason of the condition; its message, which names the field, is the note. The service does not
  start with such a value, and one that runs keeps running as it last could;
- –, that it changes nothing, and the note why it has no meaning there;
- **not yet**, that it would mean something, and is accepted without effect for now.

Fields are of `spec`; `[]` is any item of a list, and `.*` any name of a map. A row with a number stands for so many
fields. Where only some values are refused they are named, with the note of the first one. What is said of flags is true
of a build that has them all: an older one gets fewer, and what it cannot do without is refused by name. `--your-flag`
and `YOUR_NAME` stand for any that this Mac accepts: [llama-server.md](llama-server.md#specextraargs) has the rules.
The Models that were tried lie on the Mac; of a repository, `files` says what is fetched
([models.md](models.md#sources)).
"""
NOTE = "\0"
"""What a note's text begins with, until it has a number."""


@dataclass
class Notes:
    """Numbered notes below a table, each text once."""

    texts: list[str] = field(default_factory=list)

    def shown(self, piece: str) -> str:
        """A piece of a cell; of a note its number, `(3)`."""
        if not piece.startswith(NOTE):
            return piece.replace("|", "\\|")
        if piece[1:] not in self.texts:
            self.texts.append(piece[1:])
        return f"({self.texts.index(piece[1:]) + 1})"


@dataclass(frozen=True)
class Row:
    """One line of a table, before its notes have numbers."""

    path: str
    cells: tuple[tuple[str, ...], ...]
    """For each engine: pieces of text, of which those that begin with NOTE become the number of a note."""
    plain: bool
    """No engine honours it."""


def pieces(kind: str, leaf: Leaf, runtime: str, found: Cell) -> tuple[str, ...]:
    """One cell."""
    if not found.changes and not found.refusals:
        key, gap = reason(kind, leaf.path, runtime) or ("", False)
        if not key:
            return ("?",)
        return ("**not yet** ", NOTE + GAPS[kind][key]) if gap else ("– ", NOTE + REASONS[kind][key])
    parts: list[str] = [", ".join(found.changes)] if found.changes else []
    if not parts and found.idle:
        parts.append(f"{', '.join(found.idle)} accepted")
    for values, why, message in found.refusals:
        before = "; " if parts else ""
        parts += [f"{before}{', '.join(values)}{' ' if values else ''}**refused**: {why} ", f"{NOTE}{why}: {message}"]
    return tuple(parts)


def collapsed(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows; one for all fields below another that nobody honours, if the same is to be said of each."""
    done: set[str] = set()
    for row in rows:
        if row.path in done:
            continue
        groups = ((above, alike(rows, row, above)) for above in parents(row.path))
        above, group = next((each for each in groups if len(each[1]) > 1), ("", [row]))
        done |= {each.path for each in group}
        yield Row(f"{above} ({len(group)} fields)", row.cells, True) if above else row


def parents(path: str) -> list[str]:
    """What is above a field, the outermost first: `spec.env[]`, then `spec.env[].valueFrom`."""
    names = path.split(".")
    return [".".join(names[:end]) for end in range(2, len(names))]


def alike(rows: Sequence[Row], row: Row, above: str) -> list[Row]:
    """All fields below `above`, if the very same as of `row` is to be said of each, and nobody honours them."""
    group = [each for each in rows if each.path.startswith(f"{above}.")]
    return group if all(each.plain and each.cells == row.cells for each in group) else []


def rendered(found: Table) -> str:
    """One kind's table and its notes."""
    notes = Notes()
    rows = [
        Row(
            leaf.path,
            tuple(pieces(found.kind, leaf, at.runtime, each) for at, each in zip(found.columns, cells, strict=True)),
            not any(each.changes for each in cells),
        )
        for leaf, cells in found.rows
    ]
    titles = [column.title for column in found.columns]
    lines = [f"\n## {found.kind}\n", f"\n| field | {' | '.join(titles)} |\n", "| --- " * (len(titles) + 1) + "|\n"]
    for row in collapsed(rows):
        cells = ["".join(notes.shown(each) for each in parts) for parts in row.cells]
        lines.append(f"| {label(row.path)} | {' | '.join(cells)} |\n")
    lines += ["\n", *(f"{number}. {text}\n" for number, text in enumerate(notes.texts, 1))]
    return "".join(lines)


def label(path: str) -> str:
    """A field as the page shows it."""
    name, _, count = path.removeprefix("spec.").partition(" ")
    return f"`{name}` {count}".rstrip()


def counted(tables: Sequence[Table]) -> str:
    """How many fields there are, and of how many a word holds."""
    fields = sum(len(each.rows) for each in tables)
    meant = sum(any(cell.changes or cell.refusals for cell in cells) for each in tables for _, cells in each.rows)
    return f"\nOf {fields} fields, {meant} are honoured or refused by some engine.\n"


def page(tables: Sequence[Table]) -> str:
    """The whole page."""
    return HEAD + counted(tables) + "".join(map(rendered, tables))


def main() -> int:
    """Exit code 1 if a field is dropped silently, or if `--check` found the page out of date."""
    tables = all_tables()
    wrong = [problem for each in tables for problem in problems(each)]
    sys.stderr.writelines(f"{problem}\n" for problem in wrong)
    text = page(tables)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.stderr.write("docs/fields.md is not what the code says; run make fields\n")
        return 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
