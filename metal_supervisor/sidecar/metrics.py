"""Every metric: name, help and where its value comes from, in one place.

The `llmkube_metal_agent_*` names are the incumbent's, because dashboards and alerts depend on them; ours
stand beside them. Values are read from the board at the moment of a scrape, so a series disappears with
its service and nothing has to be cleaned up.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from metal_supervisor import __version__
from metal_supervisor.core.downloads import downloads
from metal_supervisor.sidecar.board import Board, cluster_trouble

INCUMBENT, OURS = "llmkube_metal_agent", "metal_supervisor"
PHASES = ("Pending", "Creating", "Progressing", "Ready", "Stopped", "Suspended", "Failed")
LABELS = ("name", "namespace")
PRESSURES = ("Normal", "Warning", "Critical")


class _BoardCollector(Collector):
    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        yield from _incumbent(self._board)
        yield from _ours(self._board)


def _incumbent(board: Board) -> Iterator[Metric]:
    live = [row for row in board.rows if row.observed.pid]
    yield GaugeMetricFamily(
        f"{INCUMBENT}_managed_processes", "Engine processes this Mac runs.", value=len(live)
    )
    healthy = GaugeMetricFamily(f"{INCUMBENT}_process_healthy", "1 if the engine serves, else 0.", labels=LABELS)
    restarts = CounterMetricFamily(f"{INCUMBENT}_process_restarts", "Unplanned restarts of the engine.", labels=LABELS)
    rss = GaugeMetricFamily(f"{INCUMBENT}_process_rss_bytes", "Resident memory of the engine.", labels=LABELS)
    for row in board.rows:
        names = (row.record.key[1], row.record.namespace)
        restarts.add_metric(names, row.observed.restarts)
        if row.observed.pid:
            healthy.add_metric(names, int(row.report.ready))
            rss.add_metric(names, row.rss_bytes)
    yield from (healthy, restarts, rss)
    yield from _memory(board)
    for domain, watts in (board.power.fresh_watts() if board.power else {}).items():
        text = f"Power that the chip draws, as Apple estimates it: {domain}."
        yield GaugeMetricFamily(f"{INCUMBENT}_apple_power_{domain}_watts", text, value=watts)


def _memory(board: Board) -> Iterator[Metric]:
    """The budget, what is charged to it, and the machine's pressure."""
    estimated = GaugeMetricFamily(
        f"{INCUMBENT}_memory_estimated_bytes", "What the engine was estimated to take.", labels=LABELS
    )
    held = GaugeMetricFamily(
        f"{OURS}_service_memory_bytes", "What the engine holds, with its children and the files it maps.", labels=LABELS
    )
    away = GaugeMetricFamily(
        f"{OURS}_service_evicted", "1 while the service is stopped because memory was short.", labels=LABELS
    )
    for row in board.rows:
        names = (row.record.key[1], row.record.namespace)
        away.add_metric(names, int(row.record.evicted_at is not None))
        if row.record.reserved_bytes:
            estimated.add_metric(names, row.record.reserved_bytes)
        if row.observed.pid:
            held.add_metric(names, row.observed.memory_bytes)
    yield from (estimated, held, away)
    told = board.controller.get("memory")
    if not isinstance(told, dict):
        return
    for name, key, text in (
        (f"{INCUMBENT}_memory_budget_bytes", "budget", "What all engines may take together."),
        (f"{INCUMBENT}_system_memory_available_bytes", "available", "Memory of the machine that is available."),
        (f"{OURS}_memory_charged_bytes", "charged", "What is charged to the budget."),
        (f"{OURS}_memory_waiting_services", "waiting", "Services that wait for memory."),
    ):
        if isinstance(told.get(key), (int, float)):
            yield GaugeMetricFamily(name, text, value=told[key])
    if told.get("pressure") in PRESSURES:
        yield GaugeMetricFamily(
            f"{INCUMBENT}_memory_pressure_level", "0 normal, 1 warning, 2 critical; not there while nobody knows.",
            value=PRESSURES.index(told["pressure"]),
        )
    yield CounterMetricFamily(
        f"{INCUMBENT}_evictions", "Engines stopped for want of memory.", value=told.get("evictions", 0)
    )
    skipped = CounterMetricFamily(
        f"{INCUMBENT}_evictions_skipped", "Times it was critical and nobody was stopped, by reason.", labels=("reason",)
    )
    for reason, count in sorted((told.get("skipped") or {}).items()):
        skipped.add_metric((reason,), count)
    yield skipped


def _ours(board: Board) -> Iterator[Metric]:
    info = GaugeMetricFamily(f"{OURS}_build_info", "1, with the version as a label.", labels=("version", "node"))
    info.add_metric((__version__, board.node), 1)
    yield info
    phase = GaugeMetricFamily(f"{OURS}_service_phase", "1 for the phase the service is in.", labels=(*LABELS, "phase"))
    for row in board.rows:
        for name in PHASES:
            phase.add_metric((row.record.key[1], row.record.namespace, name), int(row.report.phase == name))
    yield phase
    due = GaugeMetricFamily(
        f"{OURS}_service_next_start_timestamp_seconds", "When an engine that is held is tried again.", labels=LABELS
    )
    hung = GaugeMetricFamily(f"{OURS}_service_hung", "1 while the engine hangs and is to be restarted.", labels=LABELS)
    for row in board.rows:
        names = (row.record.key[1], row.record.namespace)
        hung.add_metric(names, int(bool(row.observed.hung)))
        if row.record.retry_at:
            due.add_metric(names, row.record.retry_at)
    yield from (due, hung)
    yield from _downloads(board)
    yield GaugeMetricFamily(
        f"{OURS}_cluster_reachable", "1 if the Kubernetes API can be read and written.",
        value=int(not cluster_trouble(board)),
    )
    yield GaugeMetricFamily(
        f"{OURS}_supervisord_reachable", "1 if supervisord answers.", value=int(not board.supervisord_error)
    )
    seen = board.controller.get("at")
    if isinstance(seen, (int, float)):
        yield GaugeMetricFamily(
            f"{OURS}_loop_last_success_timestamp_seconds", "Unix time of the controller's last pass.", value=seen
        )
    yield CounterMetricFamily(
        f"{OURS}_api_requests", "Requests the sidecar sent to the Kubernetes API.", value=board.requests
    )


def _downloads(board: Board) -> Iterator[Metric]:
    """Models that are being fetched; a series ends with its download."""
    labels = ("namespace", "model")
    got = GaugeMetricFamily(
        f"{OURS}_model_download_bytes", "How much of a model that is being fetched is here.", labels=labels
    )
    total = GaugeMetricFamily(
        f"{OURS}_model_download_total_bytes", "How large it is; not there while nobody knows.", labels=labels
    )
    for each in downloads(board.controller):
        if not each.under_way:
            continue
        got.add_metric(each.key, each.got_bytes)
        if each.total_bytes:
            total.add_metric(each.key, each.total_bytes)
    yield from (got, total)


def exposition(board: Board, accept: str) -> tuple[bytes, str]:
    """(body, content type) of a scrape, in the format the scraper asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_BoardCollector(board))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
