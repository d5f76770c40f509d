"""Writes docs/conditions.md from the table in tools/conditions_table.py; `--check` only compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from conditions_table import EVENT, GROUPS, METAL, MODEL, OF_METAL_READY, Group, warns

PAGE = Path(__file__).resolve().parents[1] / "docs" / "conditions.md"
HEAD = """# Conditions, and what to do

<!-- written by tools/conditions_page.py from tools/conditions_table.py; change that, then run it -->

`kubectl describe isvc NAME` shows them, `metal-supervisor explain NAMESPACE/NAME` says the same with the numbers. The
message of a condition names the field, the path or the limit, and what to do; this page is what can be said beforehand.

**`MetalReady` is the one to read**: True while this service serves from here, and else its reason is the one word for
what goes on. Beside LLMKube's operator it and `MemoryPressure` are the only conditions that are ours; without one the
others are, too, with LLMKube's words. `schedulingStatus` and `schedulingMessage` repeat MetalReady's until it serves,
except, beside LLMKube's operator, for the progress of a download.
Without the operator, `Ready` repeats MetalReady's status and reason, True if any Mac serves it, so that `kubectl wait
--for=condition=Ready isvc/NAME` works; it is left alone where another field manager has written it.

A reason with a star is a Warning among the Events. So is everything else while the phase is Failed; Serving and what is
switched off are Normal ones.
"""
OTHERS = """
## The other conditions

| type | reason | when | what to do |
| --- | --- | --- | --- |
"""


def _where(group: Group) -> str:
    """One line on where the reasons of a group are found."""
    told = [f"`{each}`" for each in group.types if each not in (EVENT, METAL) and not each.startswith(MODEL)]
    models = [f"`{each.removeprefix(MODEL)}` of the Model" for each in group.types if each.startswith(MODEL)]
    phases = " or ".join(group.phases)
    first = f"Phase {phases}; reasons of {', '.join(['`MetalReady`', *told, *models])}."
    return f"{first if phases else f'Reasons of {told[0]}; the phase stays.'} {group.note}".strip()


def _sections() -> Iterator[str]:
    for group in OF_METAL_READY:
        yield f"\n## {group.title}\n\n{_where(group)}\n\n| reason | when | what to do |\n| --- | --- | --- |\n"
        for reason in group.reasons:
            star = " \\*" if warns(reason.name, group) and group.phases != ("Failed",) else ""
            yield f"| `{reason.name}`{star} | {reason.when} | {reason.do} |\n"
    yield OTHERS
    for group in GROUPS[len(OF_METAL_READY) :]:
        for reason in group.reasons:
            yield f"| {group.title} | `{reason.name}` | {reason.when} | {reason.do} |\n"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_sections())


def main() -> int:
    """Writes the page, or says what to do if it is another."""
    if "--check" not in sys.argv:
        PAGE.write_text(page(), "utf-8")
        return 0
    if PAGE.read_text("utf-8") == page():
        return 0
    sys.stderr.write("docs/conditions.md is not what the table says; run: .venv/bin/python tools/conditions_page.py\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
