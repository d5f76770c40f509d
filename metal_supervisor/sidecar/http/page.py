"""The HTML page: what runs on this Mac, what does not, why, and what to do.

It is rendered as a whole, from the board alone, and works without JavaScript; with it, it refreshes itself. Names,
messages and log lines on it are untrusted: each is cut, made printable and escaped on output, by the environment and
not by the template. Style and script are inline, and the Content-Security-Policy allows nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
from markupsafe import Markup

from metal_supervisor import __version__
from metal_supervisor.cluster.report import CRASH_LOOP, EVICTED, HUNG, TROUBLE
from metal_supervisor.sidecar.board import Board, Recent, Row, cluster_trouble, health
from metal_supervisor.sidecar.http.memory_picture import charge_bytes, picture
from metal_supervisor.sidecar.power import shown_power
from metal_supervisor.spec.document import mapping, objects, string
from metal_supervisor.spec.instants import utc
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.terminal_text import shortened
from metal_supervisor.state import gateway_note
from metal_supervisor.state.downloads import downloads

LONGEST = 600
"""Most characters shown of one text; /status has all of it."""
TEMPLATES = Path(__file__).parent / "templates"
ADVICE = {
    "Loading": "Nothing to do: it serves once its engine answers.",
    "Downloading": "Nothing to do: it starts once its model is here.",
    "Restarting": "Nothing to do: its engine is being replaced.",
    HUNG: "Nothing to do: it is being restarted.",
    EVICTED: "It returns by itself once there is room; close what else takes memory, or stop another model.",
    "ManuallyScaledToZero": "To start it: kubectl -n {namespace} scale isvc/{name} --replicas=1",
    "Suspended": "To start it, set spec.suspend to false.",
    CRASH_LOOP: "All of its log: metal-supervisor logs {namespace}/{name}",
}
"""Reason -> what to do, where the message does not say."""
ORDER = ("bad", "busy", "good", "off")
MOST_LOG = 6
"""Log lines shown of a service that needs a look."""
MOST_LOGS = 5
"""Number of services whose log is shown."""
LogTail: TypeAlias = Callable[[str], Sequence[str]]


def shown(value: Any) -> Any:
    """Output filter of the templates: cut a text to LONGEST, on one line and printable; escaping follows."""
    if isinstance(value, Markup):
        return value
    return shortened(" ".join(str(value)[: 4 * LONGEST].split()), LONGEST)


def _own(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text("utf-8"))


def _source(text: str) -> str:
    """Source expression of an inline text for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


STYLE = _own("page.css")
SCRIPT = _own("page.js")
ICON = urllib.parse.quote(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="4" fill="#1c7c3c"/>'
    '<path d="M4 12V5l4 4 4-4v7" fill="none" stroke="#fff" stroke-width="2" stroke-linejoin="round"/></svg>'
)
POLICY = (
    f"default-src 'none'; style-src {_source(STYLE)}; script-src {_source(SCRIPT)}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
EDITION = hashlib.sha256((STYLE + SCRIPT).encode()).hexdigest()[:12]
"""Version of style and script. A page with another one reloads as a whole, instead of its content only."""
ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    autoescape=True,
    finalize=shown,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters["amount"] = amount
ENVIRONMENT.filters["clock"] = lambda at: time.strftime("%H:%M:%S", time.localtime(at))
ENVIRONMENT.filters["date"] = lambda at: time.strftime("%d %b %H:%M:%S", time.localtime(at))
ENVIRONMENT.filters["stamp"] = utc


def tone(row: Row) -> str:
    """Condition of a service: `good`, `busy`, `bad` or `off`."""
    if row.report.phase == "Ready":
        return "good"
    if row.report.phase == "Failed" or row.report.reason in TROUBLE:
        return "bad"
    return "off" if row.report.phase in ("Stopped", "Suspended") else "busy"


def advice(row: Row) -> str:
    """Advice about a service that does not serve, "" if its message has it, or there is none."""
    record = row.record
    text = ADVICE.get(row.report.reason, "")
    return text.format(namespace=record.namespace, name=record.name)


def chat(row: Row) -> str:
    """Address of the chat that llama-server serves itself, where it is on: at loopback, and not on demand; else ""."""
    record = row.record
    alone = record.runtime == "llama-server" and record.idle_s is None and row.report.engine_ready
    here = row.address.rpartition(":")[0]
    return f"http://{row.address}/" if alone and here in ("127.0.0.1", "[::1]") else ""


def summary(rows: Sequence[Row]) -> str:
    """E.g. `3 of 5 services serve, 1 needs a look`; what is stopped on purpose is not counted as missing."""
    tones = [tone(row) for row in rows]
    wanted, bad = len(tones) - tones.count("off"), tones.count("bad")
    if not wanted:
        return "no service is wanted" if not rows else "all services are stopped"
    text = f"{tones.count('good')} of {wanted} services serve"
    return f"{text}, {bad} {'needs' if bad == 1 else 'need'} a look" if bad else text


def troubles(board: Board, now: float) -> list[tuple[str, str]]:
    """[(problem, cause)] of those that concern more than one service; `now`: monotonic."""
    status, body = health(board, now)
    cluster = mapping(board.controller, "cluster")
    found = [
        ("Not healthy", body.get("reason", "") if status != 200 else ""),
        ("The cluster is out of reach; what runs goes on", cluster_trouble(board)),
        ("This Mac cannot be reached by pods", board.address.problem),
        ("The address of this Mac", board.address.note),
        ("This Mac and another", cluster.get("cloned")),
        ("The cluster", cluster.get("advice")),
    ]
    memory = mapping(board.controller, "memory")
    if memory.get("pressure") in ("Warning", "Critical"):
        found.append(("Memory is short", memory.get("why")))
    return [(what, str(why)) for what, why in found if why]


def told_once(happenings: Sequence[Recent]) -> list[tuple[Recent, int]]:
    """The latest of each reason and subject with the number of all of them, the latest first."""
    found: dict[tuple[str, str], tuple[Recent, int]] = {}
    for each in reversed(happenings):
        key = each.about, each.what.reason
        found[key] = found[key][0] if key in found else each, found[key][1] + 1 if key in found else 1
    return list(found.values())


def notices(board: Board) -> list[tuple[str, str]]:
    """[(subject, text)] of the controller's notices, the latest first."""
    return [(string(each, "name"), string(each, "reason")) for each in reversed(objects(board.controller, "notices"))]


def shown_programs(programs: Mapping[str, str]) -> dict[str, str]:
    """Programs and their states, without the gateway's worker that stands by for another."""
    serves = any(programs.get(name) == "RUNNING" for name in gateway_note.WORKERS)
    spare = frozenset(gateway_note.WORKERS) if serves else frozenset()
    return {name: state for name, state in programs.items() if state == "RUNNING" or name not in spare}


def render(board: Board, now: float, log_of: LogTail = lambda _program: ()) -> bytes:
    """The page, UTF-8; `now`: monotonic, `log_of`: the last lines of a program's log."""
    rows = sorted(board.rows, key=lambda row: (ORDER.index(tone(row)), row.record.key))
    ill = [row.record.program for row in rows[:MOST_LOGS] if tone(row) == "bad"]
    text = ENVIRONMENT.get_template("page.html").render(
        style=STYLE,
        script=SCRIPT,
        edition=EDITION,
        icon=Markup(ICON),
        version=__version__,
        board=board,
        programs=shown_programs(board.programs),
        summary=summary(rows),
        troubles=troubles(board, now),
        rows=rows,
        logs={program: log_of(program)[-MOST_LOG:] for program in ill},
        tone=tone,
        advice=advice,
        chat=chat,
        charge_bytes=charge_bytes,
        picture=picture(board),
        memory=mapping(board.controller, "memory"),
        downloads=[each for each in downloads(board.controller) if not each.failed],
        happenings=told_once(board.happenings),
        notices=notices(board),
        cluster=mapping(board.controller, "cluster"),
        reachable=not cluster_trouble(board),
        power=shown_power(board.power),
    )
    return text.encode("utf-8", "replace")
