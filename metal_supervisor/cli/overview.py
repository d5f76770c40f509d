"""Output of `metal-supervisor status` as lines: the /status document, and facts that only this machine can add.

The document may come from another version, and has text of users and of engines in it: only its outline is relied on,
and none of it gets onto the terminal unescaped. On a narrow terminal the least important columns are left out; a table
in a file has them all.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metal_supervisor.spec.progress import duration
from metal_supervisor.spec.progress_bar import cells, fitted
from metal_supervisor.spec.sizes import GIB, MIB, amount
from metal_supervisor.spec.types import Json
from metal_supervisor.state.downloads import Download
from metal_supervisor.supervisord.ctl_plugin import LONGEST_WHY, escaped, table

COLUMNS = ("NAMESPACE/NAME", "PHASE", "RUNTIME", "PORT", "MEMORY", "RESTARTS", "UPTIME", "TOKENS/S", "WHY")
LEFT_OUT = ("TOKENS/S", "RUNTIME", "UPTIME", "RESTARTS", "PORT", "MEMORY")
"""Columns left out on a narrow terminal, the least important first."""
LEAST_WHY, LEAST_NAME = 24, 20
LONGEST_BAR, SHORTEST_BAR = 40, 10
LABEL = 10
DAY_S = 86400


class Strange(Exception):
    """An answer that is no /status document."""


@dataclass(frozen=True)
class Beside:
    """Facts about a service that the document lacks."""

    name: str
    """`namespace/name`, with the number of the engine where a service has several."""
    port: int = 0
    """0: not known."""
    started: float | None = None
    """Unix time at which its process was started."""
    tokens_per_s: float | None = None
    """Generation speed of its engine, by the engine's own count."""


def services(document: Json) -> list[Json]:
    """The rows of the services. Raises Strange."""
    found = document.get("services")
    if not isinstance(found, list) or not isinstance(document.get("cluster"), dict) or "node" not in document:
        raise Strange
    return [each for each in found if isinstance(each, dict)]


def downloads(document: Json) -> tuple[Download, ...]:
    """The downloads in the document."""
    found = document.get("downloads")
    return tuple(
        Download(
            _text(each, "namespace"), _text(each, "model"), "", _text(each, "phase"),
            _whole(each, "gotBytes"), _whole(each, "totalBytes"), _text(each, "message"),
        )
        for each in (found if isinstance(found, list) else [])
        if isinstance(each, dict)
    )  # fmt: skip


def lines(
    document: Json, beside: Mapping[str, Beside], coming: Sequence[str], now: float, width: int | None = None
) -> list[str]:
    """All lines, the machine first and the services last. Raises Strange.

    `beside`: by program. `coming`: a line for each download. `now`: Unix time. `width`: columns available, None for no
    limit.
    """
    rows = services(document)
    found = [*_machine(document, width), *_memory(document, rows, width)]
    found += [f"{'fetches':<{LABEL}}{escaped(each)}" for each in coming]
    found += [_said("notice", f"{_text(each, 'name')}: {_text(each, 'reason')}", width) for each in _notices(document)]
    if open_ones := [row for row in rows if row.get("confined") is False]:
        names = ", ".join(f"{_text(row, 'namespace')}/{_text(row, 'name')}" for row in open_ones)
        found.append(_said("unconfined", f"{names}: {_text(open_ones[0], 'unconfinedWhy')}", width))
    if rows:
        made = [_row(row, beside.get(_text(row, "program")), now) for row in rows]
        found += ["", *_table(made, width)]
    else:
        found += ["", "no InferenceService is this Mac's"]
    each_line = [line for text in found for line in text.split("\n")]
    return [fitted(line, width) if width else line for line in each_line]


def facts(document: Json) -> object:
    """The values whose change is worth printing again: all but clocks, and numbers that always move."""
    rows = services(document)
    words = "phase", "reason", "message", "ready", "warning", "pid", "restarts", "address", "runtime"
    memory = _mapping(document, "memory")
    return (
        [[_text(row, "program"), *(str(row.get(word)) for word in words)] for row in rows],
        [str(_mapping(document, "cluster").get(word)) for word in ("server", "reachable", "error", "advice", "cloned")],
        [str(memory.get(word)) for word in ("budget", "charged", "waiting", "pressure")],
        [(each.key, each.phase, each.got_bytes * 10 // max(each.total_bytes, 1)) for each in downloads(document)],
        str(document.get("programs")), str(document.get("supervisord")), str(_notices(document)),
    )  # fmt: skip


# ── the machine ──────────────────────────────────────────────────────────────────────────────────


def _machine(document: Json, width: int | None) -> list[str]:
    cluster, supervisord = _mapping(document, "cluster"), _mapping(document, "supervisord")
    version = _text(document, "version")
    reached = "reachable" if cluster.get("reachable") else _text(cluster, "error") or "not reachable"
    address = _text(_mapping(document, "address"), "address")
    told = [
        ("node", f"{_text(document, 'node')}{f', metal-supervisor {version}' if version else ''}"),
        ("cluster", f"{_text(cluster, 'server')} {reached}{f'; pods reach this Mac at {address}' if address else ''}"),
        ("", _text(cluster, "advice")),
        ("", _text(cluster, "cloned")),
        ("", "" if supervisord.get("reachable", True) else f"supervisord: {_text(supervisord, 'error')}"),
        ("", ", ".join(f"{name} is {word}" for name, word in _unwell(document))),
    ]
    return [_said(label, text.strip(), width) for label, text in told if text.strip()]


def _unwell(document: Json) -> list[tuple[str, str]]:
    """Our own programs that are not running."""
    programs = _mapping(document, "programs")
    return [(str(name), str(word)) for name, word in sorted(programs.items()) if word not in ("RUNNING", "STARTING")]


def _notices(document: Json) -> list[Json]:
    found = _mapping(document, "controller").get("notices")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _said(label: str, text: str, width: int | None) -> str:
    """A text beside its label; further lines of a long one are indented."""
    plain = escaped(text)
    if not width:
        return f"{label:<{LABEL}}{plain}"
    if width < LABEL + 20:
        return f"{label} {plain}".strip()
    indent = " " * LABEL
    return textwrap.fill(plain, width, initial_indent=f"{label:<{LABEL}}", subsequent_indent=indent)


def _memory(document: Json, rows: Sequence[Json], width: int | None) -> list[str]:
    """The memory bar and its numbers: `#` is measured, `=` is reserved beyond that."""
    memory = _mapping(document, "memory")
    budget, charged = _whole(memory, "budget"), _whole(memory, "charged")
    if not budget:
        return []
    measured = sum(_whole(_mapping(row, "memory"), "measuredBytes") for row in rows if row.get("pid"))
    waiting, pressure = _whole(memory, "waiting"), _text(memory, "pressure")
    length = max(SHORTEST_BAR, min(LONGEST_BAR, (width or 999) - LABEL - 8))
    held, kept = (min(length, length * part // budget) for part in (measured, max(charged, measured)))
    picture = f"[{'#' * held}{'=' * (kept - held)}{' ' * (length - kept)}] {100 * charged // budget} %"
    numbers = [f"{amount(charged)} of {amount(budget)} charged", f"{amount(measured)} measured"]
    numbers += [f"{waiting} waiting"] if waiting else []
    numbers += [f"pressure {pressure}"] if pressure else []
    why = _text(memory, "why") if pressure not in ("Normal", "") else ""
    return [f"{'memory':<{LABEL}}{picture}", _said("", f"{', '.join(numbers)}{f' ({why})' if why else ''}", width)]


# ── the services ─────────────────────────────────────────────────────────────────────────────────


def _row(row: Json, beside: Beside | None, now: float) -> tuple[str, ...]:
    """One service, as the columns have it."""
    beside = beside or Beside(f"{_text(row, 'namespace')}/{_text(row, 'name')}")
    port = str(beside.port or "") or _text(row, "address").rpartition(":")[2]
    runs = bool(row.get("pid"))
    written = (
        beside.name, _text(row, "phase"), _text(row, "runtime"), port, _held(_mapping(row, "memory"), runs),
        str(_whole(row, "restarts")),
        uptime(now - beside.started) if runs and beside.started is not None else "",
        "" if (rate := beside.tokens_per_s) is None else f"{rate:.1f}" if rate < 100 else f"{rate:.0f}",
        _why(row, now),
    )  # fmt: skip
    return tuple(escaped(cell) or "-" for cell in written)


def _held(memory: Json, runs: bool) -> str:
    """`1.2/3.0 GiB`: measured of charged; "" for a service that does not run."""
    measured = _whole(memory, "measuredBytes") if runs else 0
    charged = max(measured, _whole(memory, "reservedBytes"))
    if not runs or not charged:
        return ""
    if not measured:
        return f"?/{amount(charged)}"
    same_unit = (measured >= GIB - MIB) == (charged >= GIB - MIB)
    first = amount(measured)
    return f"{first.partition(' ')[0] if same_unit else first}/{amount(charged)}"


def uptime(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 5 min` or `4 d 2 h`; a clock that was set back has gone nowhere."""
    if seconds < 2 * DAY_S:
        return duration(max(0.0, seconds))
    return f"{int(seconds // DAY_S)} d {int(seconds % DAY_S // 3600)} h"


def _why(row: Json, now: float) -> str:
    """Reason why a service is not Ready, or its warning although it is; "" without either."""
    warning, due = row.get("warning"), row.get("nextAttempt")
    text = ": ".join(map(str, warning)) if isinstance(warning, list) else ""
    if row.get("phase") != "Ready":
        text = f"{_text(row, 'reason')}: {_text(row, 'message')}"
    text = escaped(text)
    text = f"{text[:LONGEST_WHY]}…" if len(text) > LONGEST_WHY else text
    if isinstance(due, int | float) and row.get("phase") != "Ready":
        text += "; next attempt is due" if due <= now else f"; next attempt in {due - now:.0f} s"
    return text


def _table(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """The table, with the columns that there is room for."""
    if not width:
        return table([COLUMNS, *rows])
    quiet = all(row[-1] == "-" for row in rows)
    shown = list(COLUMNS)
    longest = max(LEAST_NAME, width // 3)
    for each in (None, *LEFT_OUT):
        if each:
            shown.remove(each)
        at = [COLUMNS.index(name) for name in shown]
        chosen = [[fitted(row[i], longest) if i == 0 else row[i] for i in at] for row in [COLUMNS, *rows]]
        needed = max(cells(line) for line in table([row[:-1] for row in chosen]))
        if needed + (len("  WHY") if quiet else LEAST_WHY) <= width:
            break
    return table(chosen)


# ── what is in a document that may be anything ───────────────────────────────────────────────────


def _mapping(item: Json, key: str) -> Json:
    found = item.get(key)
    return found if isinstance(found, dict) else {}


def _text(item: Json, key: str) -> str:
    found: Any = item.get(key)
    return "" if found is None else str(found)


def _whole(item: Json, key: str) -> int:
    found = item.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0
