"""Immutable snapshot of everything the sidecar knows, replaced as a whole; the only source of HTTP answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from metal_supervisor import __version__
from metal_supervisor.cluster.report import Happening, Report, confinement
from metal_supervisor.host.addresses import AddressChoice
from metal_supervisor.sidecar.counters import Counted
from metal_supervisor.sidecar.inventory import Offer
from metal_supervisor.sidecar.power import PowerReading, shown_power
from metal_supervisor.spec.document import mapping, string
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json
from metal_supervisor.state import gateway_note
from metal_supervisor.state.downloads import Download, downloads

STALLED_AFTER_S = 60.0
GATEWAY_AWAY_S = 5.0
"""Seconds after its end from which a worker of the gateway is not expected back."""
NO_ADDRESS = AddressChoice("", "")


@dataclass(frozen=True)
class Row:
    """One service."""

    record: Record
    observed: Observed
    report: Report
    address: str
    """`<address>:<port>` as advertised, "" without one."""
    rss_bytes: int
    """0 without a process, and before its first sample."""


@dataclass(frozen=True)
class Recent:
    """A recently posted Event."""

    at: float
    """Unix time."""
    about: str
    """`<namespace>/<name>` of a service, or the node."""
    what: Happening


@dataclass(frozen=True)
class Board:
    """A snapshot of everything that HTTP serves."""

    state_dir: str = ""
    """Absolute path of the state directory; commands use it to check which installation answers."""
    at: float = 0.0
    """Unix time of the snapshot."""
    passed_at: float = 0.0
    """Monotonic time of it, 0 before the first pass: setting the wall clock back must not hide a stall."""
    controller_at: float = 0.0
    """Monotonic time at which the controller last reported a pass, 0 if it never did."""
    rows: tuple[Row, ...] = ()
    supervisord_error: str = ""
    supervisord_since: float = 0.0
    """Monotonic time since when supervisord has not answered; 0 while it does."""
    controller: Json = field(default_factory=dict)
    """The controller's own report (`controller.json`)."""
    cluster_error: str = ""
    """Why the cluster cannot be written to, "" when it can."""
    cluster_since: float = 0.0
    node: str = ""
    programs: Mapping[str, str] = field(default_factory=dict)
    """State in supervisord of each program that is not a service's engine, e.g. controller -> RUNNING."""
    address: AddressChoice = NO_ADDRESS
    """The advertised address, its source, and any problem with it."""
    engines: tuple[Offer, ...] = ()
    """Runtimes this Mac can run; empty until the binaries have been asked."""
    requests: int = 0
    """Requests sent to the Kubernetes API since the start."""
    counted: Counted = field(default_factory=Counted)
    """Counters since the start."""
    power: PowerReading | None = None
    """Power draw of the chip; None unless enabled."""
    gateway: Json = field(default_factory=dict)
    """The gateway's note; empty unless it runs."""
    gateway_at: float = 0.0
    """Monotonic time at which the gateway last looked at its services; 0 unless it runs."""
    gateway_url: str = ""
    """Base URL of the gateway by the settings, "" if it is off."""
    gateway_since: float = 0.0
    """Monotonic time since when the gateway is on and none of its workers runs; 0 if one runs, or it is off."""
    happenings: tuple[Recent, ...] = ()
    """The latest Events of this run, oldest first."""


def cluster_trouble(board: Board) -> str:
    """Reason why the cluster cannot be read or written, or "" if it can."""
    return string(mapping(board.controller, "cluster"), "error") or board.cluster_error


def gateway_trouble(board: Board, now: float) -> str:
    """Reason why the gateway answers no request although it is on, and what to do; "" if it may answer."""
    if not board.gateway_since or now - board.gateway_since <= GATEWAY_AWAY_S:
        return ""
    found = {name: board.programs.get(name, "unknown to supervisord") for name in gateway_note.WORKERS}
    states = ", ".join(f"{name} is {state}" for name, state in found.items())
    start = f"{board.state_dir}/current/supervisorctl start {gateway_note.WORKERS[0]}"
    return f"the gateway is on and no worker of it runs ({states}); see its log, then run `{start}`"


def health(board: Board, now: float) -> tuple[int, Json]:
    """(HTTP status, body) of /healthz; `now`: monotonic.

    An unreachable cluster does not make it unhealthy: the models serve.
    """
    if board.supervisord_error and now - board.supervisord_since > 5:
        return 503, {"status": "unhealthy", "reason": f"supervisord: {board.supervisord_error}"}
    if trouble := gateway_trouble(board, now):
        return 503, {"status": "unhealthy", "reason": trouble}
    for what, seen in (
        ("the sidecar's loop has not run", board.passed_at),
        ("the controller has not finished a pass", board.controller_at),
        ("the gateway has not looked at its services", board.gateway_at),
    ):
        if seen and now - seen > STALLED_AFTER_S:
            return 503, {"status": "stalled", "reason": f"{what} for {now - seen:.0f} s"}
    body: Json = {"status": "ok"}
    if trouble := cluster_trouble(board):
        body |= {"cluster": "unreachable", "reason": trouble}
        if board.cluster_since:
            body["since"] = round(board.cluster_since, 3)
    return 200, body


def readiness(board: Board, now: float) -> tuple[int, list[tuple[str, bool, str]]]:
    """(HTTP status, [(check, passed, reason if not)]) of /readyz; `now`: monotonic."""
    wanted = [row for row in board.rows if row.report.replicas and row.report.phase not in ("Stopped", "Suspended")]
    serving = [row for row in wanted if row.report.ready]
    status, body = health(board, now)
    synced = bool(mapping(board.controller, "cluster").get("synced"))
    checks = [
        ("supervisord", not board.supervisord_error, board.supervisord_error),
        ("controller", status == 200, str(body.get("reason", ""))),
        ("synced", synced or bool(board.rows), "the cluster has not been read yet"),
        ("models", not wanted or bool(serving), "no model serves"),
    ]
    return (200 if all(passed for _, passed, _ in checks) else 503), checks


def status(board: Board) -> Json:
    """The body of /status: everything, for people and scripts."""
    return {
        "version": __version__,
        "node": board.node,
        "stateDirectory": board.state_dir,
        "at": board.at,
        "supervisord": {"reachable": not board.supervisord_error, "error": board.supervisord_error},
        "programs": dict(board.programs),
        "cluster": {
            **mapping(board.controller, "cluster"),
            "reachable": not cluster_trouble(board),
            "error": cluster_trouble(board),
        },
        "address": asdict(board.address),
        "engines": [asdict(each) for each in board.engines],
        "memory": board.controller.get("memory"),
        "power": shown_power(board.power),
        "gateway": {
            "url": string(board.gateway, "url") or board.gateway_url or None,
            "problem": gateway_trouble(board, board.passed_at) or string(board.gateway, "problem"),
            "active": board.gateway.get("active"),
        },
        "controller": {key: board.controller.get(key) for key in ("at", "did", "notices", "elsewhere", "silent")},
        "downloads": [_download(each) for each in downloads(board.controller)],
        "services": [_service(row) for row in board.rows],
    }


def _download(found: Download) -> Json:
    """A Model whose file is incomplete here. The source is left out: its URL may hold credentials."""
    return {
        "namespace": found.namespace,
        "model": found.model,
        "phase": found.phase,
        "gotBytes": found.got_bytes,
        "totalBytes": found.total_bytes,
        "message": found.message,
    }


def _service(row: Row) -> Json:
    record, observed, report = row.record, row.observed, row.report
    return {
        "namespace": record.namespace,
        "name": record.name,
        "program": record.program,
        "phase": report.phase,
        "reason": report.reason,
        "message": report.message,
        "ready": report.ready,
        "warning": list(record.warning) if record.warning else None,
        "runtime": record.runtime,
        "model": record.model,
        "address": row.address,
        "pid": observed.pid,
        "state": observed.state,
        "since": observed.since,
        "restarts": observed.restarts,
        "lastExit": observed.last_exit,
        "wakes": observed.wakes,
        "confined": observed.confined if observed.pid else None,
        "unconfinedWhy": confinement(record, observed)[2] if observed.pid and observed.confined is False else "",
        "nextAttempt": record.retry_at,
        "rssBytes": row.rss_bytes or None,
        "memory": {
            "reservedBytes": record.reserved_bytes,
            "measuredBytes": observed.memory_bytes or None,
            "limitBytes": record.limit_bytes,
            "estimate": record.memory,
            "evictions": record.evictions,
        },
        "published": not observed.published,
        "publishError": observed.published,
    }
