"""What /metrics says: the names and types dashboards were made for, one series per thing that is there, and escaped."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import metrics_page
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from metal_supervisor.sidecar import exit_messages
from metal_supervisor.sidecar.board import Board
from metal_supervisor.sidecar.counters import Counters
from metal_supervisor.sidecar.http.metric_table import INCUMBENT, OURS, PHASES, SERVED, TABLE
from metal_supervisor.sidecar.http.metrics import Exposition
from metal_supervisor.spec import histogram
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.types import Json
from metal_supervisor.state import programs
from tests.support.boards import full_board, gateway_note, row

HOSTILE = 'a"b\\n\\x\\', 'line one\nline_two{x="1"} 7', "émoji 🙂 \ud800", "} 1\n# TYPE evil counter\nevil 1"
HUGE = 10**400
"""Beyond a float."""
THEIRS = {
    "managed_processes": ("gauge", ()),
    "process_healthy": ("gauge", ("name", "namespace")),
    "process_restarts_total": ("counter", ("name", "namespace")),
    "health_check_duration_seconds": ("histogram", ("name", "namespace")),
    "memory_budget_bytes": ("gauge", ()),
    "memory_estimated_bytes": ("gauge", ("name", "namespace")),
    "system_memory_available_bytes": ("gauge", ()),
    "system_memory_wired_bytes": ("gauge", ()),
    "process_rss_bytes": ("gauge", ("name",)),
    "memory_pressure_level": ("gauge", ()),
    "evictions_total": ("counter", ()),
    "evictions_skipped_total": ("counter", ("reason",)),
    "watch_consecutive_failures": ("gauge", ()),
    "fatal_exits_total": ("counter", ("subsystem",)),
    "apple_power_combined_watts": ("gauge", ()),
    "apple_power_gpu_watts": ("gauge", ()),
    "apple_power_cpu_watts": ("gauge", ()),
    "apple_power_ane_watts": ("gauge", ()),
    "client_proxy_requests_total": ("counter", ("outcome",)),
    "ingress_requests_total": ("counter", ("code",)),
}
"""LLMKube's agent (reference/llmkube-agent.md, 2.1)."""


def scraped(board: Board, accept: str = "") -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(name of the sample, its labels) -> value."""
    text, kind = Exposition(accept).render(board)
    families = (openmetrics if "openmetrics" in kind else plain)(text.decode())
    return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}


def value(board: Board, name: str, /, **labels: str) -> float | None:
    return scraped(board).get((name, frozenset(labels.items())))


def test_what_was_rendered_before_is_rendered_again_once_it_is_different() -> None:
    """In each format, with services that come, change and go."""
    accepts = "", "application/openmetrics-text; version=1.0.0", "text/plain; version=1.0.0"
    full = full_board()
    program = full.rows[0].record.program
    probes = histogram.empty(histogram.PROBE_S).with_value(0.2)
    counted = replace(full.counted, probes={program: probes})
    more = replace(full.counted, probes={program: probes.with_value(0.001).with_value(77.25)})
    first = replace(full.rows[0], observed=replace(full.rows[0].observed, restarts=77))
    boards = (
        full,
        full,
        replace(full, rows=full.rows[1:]),
        full,
        replace(full, rows=(first, *full.rows[1:])),
        replace(full, counted=counted),
        replace(full, counted=more),
        replace(full, rows=()),
        full,
    )
    for accept in accepts:
        kept = Exposition(accept)
        for board in boards:
            assert kept.render(board) == Exposition(accept).render(board)
        assert b"process_restarts_total" in kept.render(full)[0] != kept.render(boards[4])[0]


# ── the table ────────────────────────────────────────────────────────────────────────────────────


def test_every_metric_of_llmkubes_agent_is_served_with_its_type_and_labels_or_has_a_reason() -> None:
    for short, (kind, labels) in THEIRS.items():
        entry = TABLE.get(INCUMBENT + short)
        if entry is None:
            assert metrics_page.UNSERVED[INCUMBENT + short], short
        else:
            assert entry.kind == kind and set(labels) <= set(entry.labels), short
            assert set(entry.labels) - set(labels) <= {"namespace"}, short
    known = {INCUMBENT + short for short in THEIRS}
    assert {name for name in (*TABLE, *metrics_page.UNSERVED) if name.startswith(INCUMBENT)} == known
    assert not set(TABLE) & set(metrics_page.UNSERVED)


def test_everything_in_the_table_is_scraped_with_its_type_and_labels_and_nothing_else_is() -> None:
    text = Exposition().render(full_board())[0].decode()
    assert "# HELP" in text
    found = {family.name: family for family in plain(text)}
    assert len(TABLE) == len(SERVED) == len(found)
    for entry in SERVED:
        family = found[entry.name.removesuffix("_total")]
        kind = "gauge" if entry.kind == "info" else entry.kind
        assert (family.type, family.documentation) == (kind, entry.help), entry.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(entry.labels), entry.name


def test_names_are_as_prometheus_wants_them() -> None:
    for entry in SERVED:
        assert entry.name.endswith("_total") == (entry.kind == "counter"), entry.name
        assert entry.kind != "histogram" or entry.name.endswith("_seconds"), entry.name
        assert all(re.fullmatch("[a-z_]+", each) for each in (entry.name, *entry.labels)), "no scheme escapes them"
        assert entry.help.endswith(".") and "\n" not in entry.help, entry.name


# ── values ───────────────────────────────────────────────────────────────────────────────────────


def test_values_are_those_of_the_board() -> None:
    board, tiny = full_board(), {"name": "tiny", "namespace": "default"}
    for name, labels, wanted in (
        (INCUMBENT + "process_restarts_total", tiny, 2),
        (INCUMBENT + "process_rss_bytes", tiny, 8),
        (INCUMBENT + "health_check_duration_seconds_count", tiny, 1),
        (INCUMBENT + "memory_estimated_bytes", tiny, 11),
        (INCUMBENT + "health_check_duration_seconds_bucket", {**tiny, "le": "0.1"}, 0),
        (INCUMBENT + "health_check_duration_seconds_bucket", {**tiny, "le": "0.5"}, 1),
        (INCUMBENT + "system_memory_wired_bytes", {}, 7),
        (INCUMBENT + "watch_consecutive_failures", {}, 3),
        (INCUMBENT + "memory_pressure_level", {}, 1),
        (INCUMBENT + "evictions_skipped_total", {"reason": "floor"}, 1),
        (OURS + "process_exits_total", {**tiny, "reason": "SIGKILL"}, 2),
        (OURS + "time_to_ready_seconds_sum", tiny, 3.0),
        (OURS + "endpoint_withdraw_seconds_count", {}, 1),
        (OURS + "apply_errors_total", {"op": "endpoints", "code": "409"}, 1),
        (OURS + "api_requests_total", {}, 5),
        (OURS + "loop_duration_seconds_count", {"loop": "controller"}, 1),
        (OURS + "loop_duration_seconds_sum", {"loop": "sidecar"}, 0.002),
        (OURS + "loop_last_success_timestamp_seconds", {"loop": "controller"}, 900.0),
        (OURS + "watch_reconnects_total", {"kind": "models"}, 2),
        (OURS + "service_memory_bytes", tiny, 9),
        (OURS + "memory_reserved_bytes", tiny, 11),
        (OURS + "memory_charged_bytes", {}, 20),
        (OURS + "model_download_total_bytes", {"namespace": "default", "model": "here"}, 4),
        (OURS + "model_fetch_failed", {"namespace": "default", "model": "gone"}, 1),
    ):
        assert value(board, name, **labels) == wanted, (name, labels)


def test_a_service_is_in_one_phase_of_all_there_are() -> None:
    board = full_board()
    phases = {
        phase: value(board, OURS + "service_phase", name="tiny", namespace="default", phase=phase) for phase in PHASES
    }
    assert phases == {phase: float(phase == "Ready") for phase in PHASES}


def test_series_go_with_their_service_and_with_its_process() -> None:
    board = full_board()
    stopped = replace(board, rows=(row(pid=0, ready=False, state="STOPPED"),))
    names = {name for name, _ in scraped(stopped)}
    assert not names & {INCUMBENT + "process_healthy", INCUMBENT + "process_rss_bytes", OURS + "service_memory_bytes"}
    assert OURS + "service_phase" in names
    gone = replace(board, rows=())
    assert not [labels for _, labels in scraped(gone) if dict(labels).get("name") == "tiny"]


def test_memory_has_no_series_before_its_first_sample() -> None:
    young = replace(full_board(), rows=(replace(row(memory_bytes=0), rss_bytes=0),))
    names = {name for name, _ in scraped(young)}
    assert not names & {INCUMBENT + "process_rss_bytes", OURS + "service_memory_bytes"}
    assert INCUMBENT + "process_healthy" in names


def test_what_was_counted_of_a_program_goes_with_it() -> None:
    counters = Counters()
    for program in ("default.a", "default.b"):
        counters.probed(program, 0.1)
        counters.started(program, 0.1)
    counters.forget_all_but({"default.b"})
    counted = counters.counted()
    assert set(counted.probes) == set(counted.starts) == {"default.b"}


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"memory": 3, "watches": [], "passes": {"bounds": [1]}, "at": "now"},
        {"watches": {"models": 1}, "memory": {"budget": "all", "skipped": 2}},
        {"memory": {"budget": HUGE, "charged": -HUGE}, "at": HUGE},
        {"models": {"a/b": {"file": {"phase": "Downloading", "total_bytes": HUGE}}}},
        {"passes": {"bounds": [1], "counts": [1, HUGE], "total": 1}},
    ],
)
def test_a_report_of_another_version_takes_nothing_else_down(told: dict[str, Any]) -> None:
    assert value(Board(rows=(row(),), controller=told), INCUMBENT + "managed_processes") == 1.0


# ── the format ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_stays_in_its_label(name: str, accept: str) -> None:
    board = replace(full_board(), rows=(row(name, exits={name: 1}),), node=name, gateway=gateway_note(name))
    text = name.encode("utf-8", "replace").decode()
    found = scraped(board, accept)
    assert found[INCUMBENT + "process_healthy", frozenset({("name", text), ("namespace", "default")})] == 1.0
    assert {each for each, _ in found} == {each for each, _ in scraped(full_board(), accept)}


def test_a_scraper_gets_the_format_it_accepts() -> None:
    body, kind = Exposition("application/openmetrics-text; version=1.0.0").render(full_board())
    assert kind.startswith("application/openmetrics-text; version=1.0.0") and body.endswith(b"# EOF\n")
    assert b"\nmetal_supervisor_cluster_reachable 1.0\n" in body
    body, kind = Exposition("*/*").render(full_board())
    assert kind.startswith("text/plain; version=0.0.4") and b"# EOF" not in body


# ── what is counted ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("last_exit", "crashed", "reason"),
    [
        ("exit status 1", True, "exit_1"),
        ("terminated by SIGSEGV", True, "SIGSEGV"),
        ("", True, "unknown"),
        ("exit status 0; x", True, "unknown"),
        ("terminated by SIGTERM", False, "stopped"),
    ],
)
def test_ends_are_counted_by_reason_and_outlive_the_sidecar(last_exit: str, crashed: bool, reason: str) -> None:
    assert exit_messages.manner(last_exit, crashed) == reason
    once = Observed("default.tiny", 0, False, 1.0, "EXITED", exits=exit_messages.exits(None, reason))
    twice = replace(once, exits=exit_messages.exits(once, reason))
    again = programs.read_observed(programs.text_of(twice))
    assert again == twice and again.exits == {reason: 2}
    assert exit_messages.exits(again, "") == {reason: 2}


def test_an_observation_with_damaged_counts_is_refused() -> None:
    text = programs.text_of(Observed("default.tiny", 0, False, 1.0, "EXITED", exits={"stopped": 1}))
    with pytest.raises(programs.UnreadableRecord, match="exits"):
        programs.read_observed(text.replace('"stopped": 1', '"stopped": "x"'))


def test_a_histogram_counts_a_value_up_to_its_bound_and_comes_back_from_a_file() -> None:
    found = histogram.empty((0.5, 1.0))
    for seconds in (0.5, 0.7, 9.0):
        found = found.with_value(seconds)
    assert found.buckets == [("0.5", 1), ("1.0", 2), ("+Inf", 3)]
    assert found.total == pytest.approx(10.2)
    assert histogram.read(found.as_json()) == found


@pytest.mark.parametrize(
    "change",
    [{"counts": [1]}, {"total": "x"}, {"counts": [1, "x", 0]}, {"bounds": None}, {"counts": [1, float("inf"), 0]}],
)
def test_a_histogram_of_another_version_is_none(change: dict[str, Any]) -> None:
    assert histogram.read({**histogram.empty((0.5, 1.0)).as_json(), **change}) is None
    assert histogram.read([]) is None


def test_the_page_is_written_from_the_table() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run `python tools/metrics_page.py`"


def test_the_gateways_requests_are_counted_by_key_service_and_status() -> None:
    board, service = full_board(), {"name": "tiny", "namespace": "default"}
    assert value(board, OURS + "gateway_requests_total", **service, key="laptop", code="200") == 1
    assert value(board, OURS + "gateway_in_flight", **service) == 1
    assert value(board, OURS + "gateway_waiting", **service) == 2
    assert value(board, OURS + "gateway_wait_seconds_count", **service) == 1
    assert value(board, OURS + "gateway_first_byte_seconds_bucket", **service, key="laptop", le="0.25") == 1
    assert value(board, OURS + "gateway_events_total", **service, key="laptop") == 64
    assert value(board, OURS + "gateway_request_seconds_sum", **service) == 3.0


@pytest.mark.parametrize(
    "note",
    [
        {},
        {"requests": 7},
        {"requests": [[1]]},
        {"whole": [["a", "b", 1]]},
        {"events": [["laptop", "default", "tiny", HUGE]]},
        {"inFlight": [["default", "tiny", float("inf")]]},
    ],
)
def test_a_note_of_another_version_costs_no_scrape(note: Json) -> None:
    assert scraped(replace(full_board(), gateway=note))
