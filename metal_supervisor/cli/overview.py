"""Output of `metal-supervisor status` as lines: the /status document, and facts that only this machine can add.

The document may come from another version, and has text of users and of engines in it: only its outline is relied on,
and none of it gets onto the terminal unescaped. On a narrow terminal the least important columns are left out; a table
in a file has them all. Services that do not serve come first, each with its reason on a line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metal_supervisor.cli.render import Line
from metal_supervisor.cluster.report import UNLOADED, WAKING
from metal_supervisor.spec.document import mapping, objects, string, whole
from metal_supervisor.spec.progress import duration
from metal_supervisor.spec.sizes import GIB, MIB, amount
from metal_supervisor.spec.terminal_text import cells, escaped, shortened, table
from metal_supervisor.spec.types import Json
from metal_supervisor.state import gateway_note
from metal_supervisor.supervisord.ctl_plugin import cut

COLUMNS = ("NAMESPACE/NAME", "PHASE", "RUNTIME", "URL", "MEMORY", "RESTARTS", "UPTIME", "TOKENS/S")
LEFT_OUT = ("TOKENS/S", "RUNTIME", "UPTIME", "RESTARTS", "URL", "MEMORY")
"""Columns left out on a narrow terminal, the least important first."""
FIRST = "Failed", "Stopped", "Pending"
"""Phases listed first, in this order; then what is under way, and last what is Ready or rests."""
LEAST_NAME = 20
INDENT = "    "
COMING = f"Pending|Creating|Progressing|Downloading|{WAKING}"
STATES = rf"^\S+/\S+ +((?P<green>Ready)|(?P<red>Failed)|(?P<yellow>{COMING}))(?= |$)"
"""The state of a service in its line, in a group named after its colour."""
BAR_CELLS = 40
LABEL = 10
DAY_S = 86400
NEXT_START = re.compile(r"; next start at \S+$")
"""End of what `sidecar.exit_messages` says of a crash loop; the same is said here as the seconds that are left."""


class Strange(Exception):
    """An answer that is no /status document."""


@dataclass(frozen=True)
class Beside:
    """Facts about a service that the document lacks."""

    name: str
    """`namespace/name`, with the number of the engine where a service has several."""
    url: str = ""
    """Base URL for clients on this Mac; "": not known."""
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


def lines(document: Json, beside: Mapping[str, Beside], now: float, width: int | None = None) -> list[Line]:
    """All lines, the machine first and the services last. Raises Strange.

    `beside`: by program. `now`: Unix time. `width`: columns that the table may
    take, None for no limit.
    """
    rows = services(document)
    found = [*_machine(document), *_memory(document, rows)]
    for each in objects(document, "downloads"):
        if each.get("phase") != "Failed":
            text = string(each, "message") or "about to begin"
            found.append(_said("fetches", f"{string(each, 'namespace')}.{string(each, 'model')}  {text}"))
    notices = objects(mapping(document, "controller"), "notices")
    for each in notices:
        found.append(_said("notice", f"{string(each, 'name')}: {string(each, 'reason')}"))
    if open_ones := [row for row in rows if row.get("confined") is False]:
        names = ", ".join(f"{string(row, 'namespace')}/{string(row, 'name')}" for row in open_ones)
        found.append(_said("confined", f"all but {names}: {string(open_ones[0], 'unconfinedWhy')}"))
    if rows:
        rows = sorted(rows, key=_rank)
        head, *made = _table([_row(row, beside.get(string(row, "program")), now) for row in rows], width)
        found += ["", head]
        for row, line in zip(rows, made, strict=True):
            why = _why(row, now)
            found += [line, *([(INDENT, why)] if why else ())]
    else:
        found += ["", "no InferenceService is this Mac's"]
    return found


def facts(document: Json) -> object:
    """The values whose change is worth printing again: all but clocks, and numbers that always move."""
    memory, cluster = mapping(document, "memory"), mapping(document, "cluster")
    words = "program", "phase", "reason", "message", "ready", "warning", "pid", "restarts", "address", "runtime"
    return (
        [[row.get(word) for word in words] for row in services(document)],
        [cluster.get(word) for word in ("server", "reachable", "error", "advice", "cloned")],
        [memory.get(word) for word in ("budget", "charged", "waiting", "pressure")],
        [
            (
                *map(each.get, ("namespace", "model", "phase")),
                whole(each, "gotBytes") * 10 // max(whole(each, "totalBytes"), 1),
            )
            for each in objects(document, "downloads")
        ],
        [document.get(word) for word in ("programs", "supervisord")],
        objects(mapping(document, "controller"), "notices"),
    )


# ── the machine ──────────────────────────────────────────────────────────────────────────────────


def _machine(document: Json) -> list[Line]:
    cluster, supervisord = mapping(document, "cluster"), mapping(document, "supervisord")
    version, gateway = string(document, "version"), mapping(document, "gateway")
    reached = "reachable" if cluster.get("reachable") else string(cluster, "error") or "not reachable"
    address = string(mapping(document, "address"), "address")
    told = [
        ("node", f"{string(document, 'node')}{f', metal-supervisor {version}' if version else ''}"),
        ("cluster", f"{string(cluster, 'server')} {reached}{f'; pods reach this Mac at {address}' if address else ''}"),
        ("", string(cluster, "advice")),
        ("", string(cluster, "cloned")),
        ("", "" if supervisord.get("reachable", True) else f"supervisord: {string(supervisord, 'error')}"),
        ("gateway", string(gateway, "problem") or string(gateway, "url")),
        ("", ", ".join(f"{name} is {word}" for name, word in _unwell(document))),
    ]
    return [_said(label, text.strip()) for label, text in told if text.strip()]


def _unwell(document: Json) -> list[tuple[str, str]]:
    """Our own programs that are not running; a worker of the gateway may stand by."""
    programs = {str(name): str(word) for name, word in sorted(mapping(document, "programs").items())}
    fine = {name for name, word in programs.items() if word in ("RUNNING", "STARTING")}
    standby = gateway_note.WORKERS if fine & set(gateway_note.WORKERS) else ()
    return [(name, word) for name, word in programs.items() if name not in fine and name not in standby]


def _said(label: str, text: str) -> Line:
    return f"{label:<{LABEL}}", escaped(text)


def _memory(document: Json, rows: Sequence[Json]) -> list[Line]:
    """The memory bar and its numbers: `#` is measured, `=` is reserved beyond that."""
    memory = mapping(document, "memory")
    budget, charged = whole(memory, "budget"), whole(memory, "charged")
    if not budget:
        return []
    measured = sum(whole(mapping(row, "memory"), "measuredBytes") for row in rows if row.get("pid"))
    waiting, pressure = whole(memory, "waiting"), string(memory, "pressure")
    held, kept = (min(BAR_CELLS, BAR_CELLS * part // budget) for part in (measured, max(charged, measured)))
    picture = f"[{'#' * held}{'=' * (kept - held)}{' ' * (BAR_CELLS - kept)}] {100 * charged // budget} %"
    numbers = [f"{amount(charged)} of {amount(budget)} charged"]
    numbers += [f"{amount(measured)} measured"] if measured else []
    numbers += [f"{waiting} waiting"] if waiting else []
    numbers += [f"pressure {pressure}"] if pressure else []
    why = string(memory, "why") if pressure not in ("Normal", "") else ""
    return [f"{'memory':<{LABEL}}{picture}", _said("", f"{', '.join(numbers)}{f' ({why})' if why else ''}")]


# ── the services ─────────────────────────────────────────────────────────────────────────────────


def _row(row: Json, beside: Beside | None, now: float) -> tuple[str, ...]:
    """One service, as the columns have it."""
    beside = beside or Beside(f"{string(row, 'namespace')}/{string(row, 'name')}")
    address = string(row, "address")
    url = beside.url or (f"http://{address}/v1" if address else "")
    runs = bool(row.get("pid"))
    return (
        beside.name,
        _state(row),
        string(row, "runtime"),
        url,
        _held(mapping(row, "memory"), runs),
        str(whole(row, "restarts")),
        uptime(now - beside.started) if runs and beside.started is not None else "",
        "" if (rate := beside.tokens_per_s) is None else f"{rate:.1f}" if rate < 100 else f"{rate:.0f}",
    )


def _rank(row: Json) -> int:
    """Position of a service in the list, by its phase: those that need attention first."""
    phase = string(row, "phase")
    if phase in FIRST:
        return FIRST.index(phase)
    return len(FIRST) + (phase in ("Ready", "Suspended"))


def _state(row: Json) -> str:
    """Phase of a service; of one on demand without an engine, which is Ready in the cluster, the reason."""
    reason = string(row, "reason")
    return reason if reason in (UNLOADED, WAKING) else string(row, "phase")


def _held(memory: Json, runs: bool) -> str:
    """`1.2/3.0 GiB`: measured of charged; "" for a service that does not run."""
    measured = whole(memory, "measuredBytes") if runs else 0
    charged = max(measured, whole(memory, "reservedBytes"))
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
    if _state(row) in (UNLOADED, WAKING):
        text = text or string(row, "message")
        asked, seconds = next(reversed(mapping(row, "wakes").items()), ("", 0.0))
        text += f"; last loaded {asked}, in {seconds} s" if asked else ""
    elif row.get("phase") != "Ready":
        text = f"{string(row, 'reason')}: {string(row, 'message')}"
    if not isinstance(due, int | float) or row.get("phase") == "Ready":
        return cut(text, None, now)
    return cut(NEXT_START.sub("", text), due, now)


def _table(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """The table, with the columns that there is room for."""
    if not width:
        return table([COLUMNS, *rows])
    shown = list(COLUMNS)
    longest = max(LEAST_NAME, width // 3)
    for each in (None, *LEFT_OUT):
        if each:
            shown.remove(each)
        at = [COLUMNS.index(name) for name in shown]
        chosen = table([[shortened(row[i], longest) if i == 0 else row[i] for i in at] for row in [COLUMNS, *rows]])
        if max(map(cells, chosen)) <= width:
            break
    return chosen
