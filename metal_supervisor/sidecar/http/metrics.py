"""The /metrics page: values of the metrics in metric_table.py.

They are read from the board at each scrape, so a series disappears with its service and nothing has to be cleaned up. A
metric without a value is absent. Unchanged services are not rendered again: rendering a hundred would keep the
interpreter from the loop for longer than the detection of a crash takes.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from metal_supervisor import __version__
from metal_supervisor.sidecar.board import Board, Row, cluster_trouble
from metal_supervisor.sidecar.http.metric_table import HISTOGRAM, INCUMBENT, OURS, PHASES, TABLE, MetricEntry
from metal_supervisor.spec import histogram
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.histogram import Histogram
from metal_supervisor.state.downloads import downloads

END = b"# EOF\n"
HEAD_LINES = 2
"""Of an encoded family, before its samples."""
_FAMILY = re.compile(rb"(?m)^(?=# HELP )")
PRESSURES = ("Normal", "Warning", "Critical")


class _Page:
    """Collected values. Raises KeyError for a metric that is not in the table, or for other labels than the table's."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, name: str, value: Any, /, **labels: str) -> None:
        """Add a value; None, and anything else that is no number, or one beyond a float, is skipped."""
        if not isinstance(value, (int, float, Histogram)):
            return
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            return
        entry = TABLE[name]
        if len(labels) != len(entry.labels):
            raise KeyError(f"{name} has the labels {entry.labels}")
        told = {label: _text(labels[label]) for label in entry.labels}
        if name not in self._families:
            self._families[name] = _family(entry)
        family = self._families[name]
        if isinstance(value, Histogram):
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric(list(told.values()), value.buckets, value.total)
        else:
            family.add_sample(name, told, value)

    def collect(self) -> Iterator[Metric]:
        """The families in the order of the table; called by the encoder."""
        return (self._families[name] for name in self.names)

    @property
    def names(self) -> list[str]:
        """Names of the metrics that have values, in the order of the table."""
        return [name for name in TABLE if name in self._families]


def _family(entry: MetricEntry) -> Metric:
    if entry.kind == HISTOGRAM:
        return HistogramMetricFamily(entry.name, entry.help, labels=entry.labels)
    return Metric(entry.name.removesuffix("_total").removesuffix("_info"), entry.help, entry.kind)


def _text(value: str) -> str:
    """A label's value without lone surrogates: one could not be encoded, and would spoil the whole page."""
    return value.encode("utf-8", "replace").decode("utf-8")


def _service(page: _Page, row: Row, probes: Histogram | None, starts: Histogram | None) -> None:
    """Add one service."""
    record, observed = row.record, row.observed
    service = {"name": record.key[1], "namespace": record.namespace}
    page.add(INCUMBENT + "health_check_duration_seconds", probes, **service)
    page.add(OURS + "time_to_ready_seconds", starts, **service)
    page.add(INCUMBENT + "process_restarts_total", observed.restarts, **service)
    page.add(INCUMBENT + "memory_estimated_bytes", record.reserved_bytes or None, **service)
    if observed.pid:
        page.add(INCUMBENT + "process_healthy", int(row.report.ready), **service)
        page.add(INCUMBENT + "process_rss_bytes", row.rss_bytes or None, **service)
        page.add(OURS + "service_memory_bytes", observed.memory_bytes or None, **service)
        page.add(OURS + "service_confined", observed.confined, **service)
    for phase in PHASES:
        page.add(OURS + "service_phase", int(row.report.phase == phase), **service, phase=phase)
    page.add(OURS + "service_reason", 1, **service, reason=row.report.reason)
    page.add(OURS + "service_next_start_timestamp_seconds", record.retry_at or None, **service)
    page.add(OURS + "service_hung", int(bool(observed.hung)), **service)
    page.add(OURS + "service_evicted", int(record.evicted_at is not None), **service)
    page.add(OURS + "memory_reserved_bytes", record.reserved_bytes or None, **service)
    for reason, count in observed.exits.items():
        page.add(OURS + "process_exits_total", count, **service, reason=reason)


def _system(page: _Page, board: Board) -> None:
    """Add this Mac, supervisord, and the connection to the cluster."""
    page.add(INCUMBENT + "managed_processes", sum(bool(row.observed.pid) for row in board.rows))
    for domain, watts in (board.power.fresh_watts() if board.power else {}).items():
        page.add(f"{INCUMBENT}apple_power_{domain}_watts", watts)
    page.add(OURS + "build_info", 1, version=__version__, node=board.node)
    page.add(OURS + "cluster_reachable", int(not cluster_trouble(board)))
    page.add(OURS + "supervisord_reachable", int(not board.supervisord_error))
    page.add(OURS + "api_requests_total", board.requests)
    page.add(OURS + "endpoint_withdraw_seconds", board.counted.withdrawals)
    for (what, code), count in sorted(board.counted.refused.items()):
        page.add(OURS + "apply_errors_total", count, op=what, code=code)
    watches = mapping(board.controller, "watches")
    found = {kind: mapping(watches, kind) for kind in watches}
    for kind, each in found.items():
        page.add(OURS + "watch_reconnects_total", each.get("reconnects"), kind=kind)
    failures = [each["failures"] for each in found.values() if isinstance(each.get("failures"), int)]
    page.add(INCUMBENT + "watch_consecutive_failures", max(failures, default=None))


def _gateway(page: _Page, board: Board) -> None:
    """Add the gateway's requests, from its note; another version may have written it."""
    note, known = board.gateway, {("", ""), *(row.record.owner for row in board.rows)}

    def add(name: str, items: Iterable[Sequence[Any]], *labels: str) -> None:
        """Add a list of the note: each item has the values of `labels`, and a number or a histogram."""
        for *values, found in items:
            whose = dict(zip(labels, map(str, values), strict=True))
            if (whose["namespace"], whose["name"]) in known:
                page.add(name, histogram.read(found) if TABLE[name].kind == HISTOGRAM else found, **whose)

    with contextlib.suppress(TypeError, ValueError, OverflowError):
        add(OURS + "gateway_requests_total", note.get("requests", ()), "key", "namespace", "name", "code")
        for metric, kind in (("in_flight", "inFlight"), ("waiting", "waiting")):
            of_engines: Counter[tuple[str, str]] = Counter()
            for namespace, name, count in note.get(kind, ()):
                of_engines[namespace, name] += int(count)
            add(f"{OURS}gateway_{metric}", [(*key, n) for key, n in of_engines.items()], "namespace", "name")
        add(OURS + "gateway_events_total", note.get("events", ()), "key", "namespace", "name")
        add(OURS + "gateway_first_byte_seconds", note.get("firstByte", ()), "key", "namespace", "name")
        add(OURS + "gateway_request_seconds", note.get("whole", ()), "namespace", "name")
        add(OURS + "gateway_wait_seconds", note.get("wait", ()), "namespace", "name")


def _loops(page: _Page, board: Board) -> None:
    """Add the passes of the controller and of the sidecar."""
    page.add(OURS + "loop_duration_seconds", histogram.read(board.controller.get("passes")), loop="controller")
    page.add(OURS + "loop_duration_seconds", board.counted.passes, loop="sidecar")
    page.add(OURS + "loop_last_success_timestamp_seconds", board.controller.get("at"), loop="controller")
    page.add(OURS + "loop_last_success_timestamp_seconds", board.at or None, loop="sidecar")


def _memory(page: _Page, board: Board) -> None:
    """Add the budget, its charges and the memory pressure, from the controller's report."""
    told = mapping(board.controller, "memory")
    for name, key in (
        (INCUMBENT + "memory_budget_bytes", "budget"),
        (INCUMBENT + "system_memory_available_bytes", "available"),
        (INCUMBENT + "system_memory_wired_bytes", "wired"),
        (INCUMBENT + "evictions_total", "evictions"),
        (OURS + "memory_charged_bytes", "charged"),
        (OURS + "memory_waiting_services", "waiting"),
    ):
        page.add(name, told.get(key))
    if told.get("pressure") in PRESSURES:
        page.add(INCUMBENT + "memory_pressure_level", PRESSURES.index(told["pressure"]))
    for reason, count in sorted(mapping(told, "skipped").items()):
        page.add(INCUMBENT + "evictions_skipped_total", count, reason=reason)


def _downloads(page: _Page, board: Board) -> None:
    """Add the Models whose files are incomplete here; a series ends with its download."""
    for each in downloads(board.controller):
        model = {"namespace": each.namespace, "model": each.model}
        if each.under_way:
            page.add(OURS + "model_download_bytes", each.got_bytes, **model)
            page.add(OURS + "model_download_total_bytes", each.total_bytes or None, **model)
        elif each.phase == "Failed":
            page.add(OURS + "model_fetch_failed", 1, **model)


Encode = Callable[[Any], bytes]
PLAIN = ""
PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PLAIN_1 = "text/plain; version=1.0.0"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
FORMATS = (PLAIN, PLAIN_1, OPENMETRICS)


def format_of(accept: str) -> str:
    """One of FORMATS for an Accept header, which may hold anything: the library fails at a version that is no number.

    Which version of OpenMetrics or scheme of escaping else is asked for makes no difference to what is served.
    """
    for part in accept.split(","):
        kind, *parameters = (each.strip() for each in part.split(";"))
        version = next((each.partition("=")[2] for each in parameters if each.startswith("version=")), "")
        if kind == "application/openmetrics-text" and version in ("", "1.0.0"):
            return OPENMETRICS
        if kind == "text/plain" and version == "1.0.0":
            return PLAIN_1
    return PLAIN


def _parts(page: _Page, encode: Encode) -> dict[str, bytes]:
    """Metric -> its encoded family, head included."""
    parts = _FAMILY.split(encode(page).removesuffix(END))[1:]
    return dict(zip(page.names, parts, strict=True))


class Exposition:
    """Renders boards; thread-safe."""

    def __init__(self, accept: str = "") -> None:
        """`accept`: a scraper's Accept header, or one of FORMATS."""
        self._encode, self._content_type = choose_encoder(format_of(accept))
        if isinstance(self._encode, partial) and "escaping" in self._encode.keywords:
            # Our names are the same under every scheme, and this one does not check each letter: saves 18 of 48 ms.
            self._encode = partial(self._encode, escaping="allow-utf-8")
        self._known: dict[str, tuple[tuple[Row, Histogram | None, Histogram | None], Mapping[str, bytes]]] = {}
        """Program -> (what was rendered of its service, metric -> its family, head included)."""
        self._lock = threading.Lock()

    def render(self, board: Board) -> tuple[bytes, str]:
        """(body, content type) of a scrape."""
        with self._lock:
            rows = [self._row(board, row) for row in board.rows]
            self._known = {row.record.program: self._known[row.record.program] for row in board.rows}
        around = _Page()
        for add in (_system, _gateway, _loops, _memory, _downloads):
            add(around, board)
        found = _parts(around, self._encode)
        for name in TABLE:
            if of_services := [parts[name] for parts in rows if name in parts]:
                more = (each.split(b"\n", HEAD_LINES)[HEAD_LINES] for each in of_services[1:])
                found[name] = of_services[0] + b"".join(more)
        end = END if self._content_type.startswith("application/openmetrics-text") else b""
        return b"".join(found[name] for name in TABLE if name in found) + end, self._content_type

    def _row(self, board: Board, row: Row) -> Mapping[str, bytes]:
        """The families of one service, with their heads."""
        program = row.record.program
        now = row, board.counted.probes.get(program), board.counted.starts.get(program)
        known = self._known.get(program)
        if known is None or known[0] != now:
            page = _Page()
            _service(page, *now)
            known = self._known[program] = now, _parts(page, self._encode)
        return known[1]
