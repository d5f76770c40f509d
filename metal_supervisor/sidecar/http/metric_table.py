"""Table of all metrics, for /metrics and docs/metrics.md.

The `llmkube_metal_agent_*` names are LLMKube's, with its types and labels, because dashboards, rules and power
collectors depend on them; tools/metrics_page.py lists those that are not served. Our own are named
`metal_supervisor_*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metal_supervisor.host.powermetrics import DOMAINS

INCUMBENT = "llmkube_metal_agent_"
OURS = "metal_supervisor_"
SERVICE = ("name", "namespace")
MODEL = ("namespace", "model")
PHASES = ("Pending", "Creating", "Progressing", "Ready", "Stopped", "Suspended", "Failed")
GAUGE = "gauge"
COUNTER = "counter"
HISTOGRAM = "histogram"
INFO = "info"
KEPT = "kept in the state directory: it outlives the sidecar and goes with its service"
GATEWAY = "begins at 0 with every worker of the gateway; up to 20 s old"
SIDECAR = "begins at 0 with every sidecar"
CONTROLLER = "begins at 0 with every controller"


@dataclass(frozen=True)
class MetricEntry:
    """One metric."""

    name: str
    """As it is scraped, `_total` and `_info` included."""
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    note: str = ""
    """When the metric is absent, and when a counter is reset."""


SERVED = (
    MetricEntry(INCUMBENT + "managed_processes", GAUGE, "Engine processes this Mac runs."),
    MetricEntry(
        INCUMBENT + "process_healthy",
        GAUGE,
        "1 if the engine serves, else 0.",
        SERVICE,
        "not there without a process",
    ),
    MetricEntry(INCUMBENT + "process_restarts_total", COUNTER, "Unplanned restarts of the engine.", SERVICE, KEPT),
    MetricEntry(
        INCUMBENT + "health_check_duration_seconds",
        HISTOGRAM,
        "Seconds until the engine answered a probe.",
        SERVICE,
        SIDECAR,
    ),
    MetricEntry(INCUMBENT + "memory_budget_bytes", GAUGE, "Memory budget of all engines together."),
    MetricEntry(
        INCUMBENT + "memory_estimated_bytes",
        GAUGE,
        "Memory reserved for the engine.",
        SERVICE,
        "not there while nothing is charged",
    ),
    MetricEntry(INCUMBENT + "system_memory_available_bytes", GAUGE, "Memory of the machine that is available."),
    MetricEntry(
        INCUMBENT + "system_memory_wired_bytes",
        GAUGE,
        "Memory that can be neither paged out nor compressed.",
        note="macOS alone tells",
    ),
    MetricEntry(
        INCUMBENT + "process_rss_bytes",
        GAUGE,
        "Resident memory of the engine and its children.",
        SERVICE,
        "LLMKube's has no namespace and never goes; ours has both, from its first sample to the process's end",
    ),
    MetricEntry(
        INCUMBENT + "memory_pressure_level",
        GAUGE,
        "0 normal, 1 warning, 2 critical.",
        note="absent while it is unknown",
    ),
    MetricEntry(INCUMBENT + "evictions_total", COUNTER, "Engines stopped for want of memory.", note=CONTROLLER),
    MetricEntry(
        INCUMBENT + "evictions_skipped_total",
        COUNTER,
        "Times it was critical and no engine was stopped.",
        ("reason",),
        CONTROLLER,
    ),
    MetricEntry(
        INCUMBENT + "watch_consecutive_failures",
        GAUGE,
        "Failed attempts to watch the cluster since the last that went well, of the kind that fails most.",
    ),
    *(
        MetricEntry(
            f"{INCUMBENT}apple_power_{domain}_watts",
            GAUGE,
            f"Power that the chip draws, as Apple estimates it: {domain}.",
            note="with --apple-power-enabled, while the figure is young",
        )
        for domain in DOMAINS
    ),
    MetricEntry(OURS + "build_info", INFO, "1, with what runs here as labels.", ("version", "node")),
    MetricEntry(
        OURS + "loop_duration_seconds", HISTOGRAM, "Seconds a pass took.", ("loop",), "begins at 0 with its process"
    ),
    MetricEntry(
        OURS + "loop_last_success_timestamp_seconds", GAUGE, "Unix time of the last pass that went well.", ("loop",)
    ),
    MetricEntry(
        OURS + "watch_reconnects_total",
        COUNTER,
        "Watches opened anew, also after one that ended in order.",
        ("kind",),
        CONTROLLER,
    ),
    MetricEntry(
        OURS + "service_phase", GAUGE, "1 for the phase the service is in, 0 for the others.", (*SERVICE, "phase")
    ),
    MetricEntry(
        OURS + "service_reason",
        GAUGE,
        "1, with the reason of the service's condition MetalReady as a label; docs/conditions.md has all of them.",
        (*SERVICE, "reason"),
    ),
    MetricEntry(
        OURS + "service_next_start_timestamp_seconds",
        GAUGE,
        "When an engine that is held is tried again.",
        SERVICE,
        "there while an engine is held",
    ),
    MetricEntry(OURS + "service_hung", GAUGE, "1 while the engine hangs and is to be restarted.", SERVICE),
    MetricEntry(
        OURS + "service_confined",
        GAUGE,
        "1 if the operating system confines the engine, 0 if it does not.",
        SERVICE,
        "not there without a process, or while that is unknown",
    ),
    MetricEntry(OURS + "service_evicted", GAUGE, "1 while the service is stopped because memory was short.", SERVICE),
    MetricEntry(
        OURS + "service_memory_bytes",
        GAUGE,
        "Memory of the engine, with its children and the files it maps.",
        SERVICE,
        "not there without a process, and before its first sample",
    ),
    MetricEntry(
        OURS + "memory_reserved_bytes",
        GAUGE,
        "Memory reserved for the service: for its engine, or for the next one.",
        SERVICE,
        "not there while nothing is kept",
    ),
    MetricEntry(OURS + "memory_charged_bytes", GAUGE, "Memory reserved in all."),
    MetricEntry(OURS + "memory_waiting_services", GAUGE, "Services that wait for memory; those that never fit do not."),
    MetricEntry(
        OURS + "process_exits_total",
        COUNTER,
        "Ends of the engine: stopped where it was to, else exit_<status>, the signal, or unknown.",
        (*SERVICE, "reason"),
        KEPT,
    ),
    MetricEntry(
        OURS + "time_to_ready_seconds",
        HISTOGRAM,
        "Seconds from the start of the process until it served.",
        SERVICE,
        SIDECAR + "; not there for a model on a shared daemon",
    ),
    MetricEntry(
        OURS + "endpoint_withdraw_seconds",
        HISTOGRAM,
        "Seconds from the decision to take an endpoint out until the cluster had it.",
        note=SIDECAR,
    ),
    MetricEntry(
        OURS + "apply_errors_total",
        COUNTER,
        "Writes to the cluster that failed, by HTTP status, or by the reason of there being none.",
        ("op", "code"),
        SIDECAR,
    ),
    MetricEntry(
        OURS + "gateway_requests_total",
        COUNTER,
        "Requests to the gateway that have ended, by the name of their key and by status; 499: the client left.",
        ("key", *SERVICE, "code"),
        GATEWAY,
    ),
    MetricEntry(
        OURS + "gateway_events_total",
        COUNTER,
        "Events of streamed answers that have ended; of llama-server, each token is one.",
        ("key", *SERVICE),
        GATEWAY,
    ),
    MetricEntry(
        OURS + "gateway_in_flight",
        GAUGE,
        "Requests of the gateway that the engines of a service are answering.",
        SERVICE,
        GATEWAY,
    ),
    MetricEntry(
        OURS + "gateway_waiting",
        GAUGE,
        "Requests that wait for the engine of an on-demand service.",
        SERVICE,
        GATEWAY,
    ),
    MetricEntry(
        OURS + "gateway_wait_seconds",
        HISTOGRAM,
        "Seconds that a request waited for the engine of an on-demand service; counts those that had to.",
        SERVICE,
        GATEWAY,
    ),
    MetricEntry(
        OURS + "gateway_first_byte_seconds",
        HISTOGRAM,
        "Seconds from a request to the gateway until the first byte of its engine's answer.",
        ("key", *SERVICE),
        GATEWAY,
    ),
    MetricEntry(
        OURS + "gateway_request_seconds",
        HISTOGRAM,
        "Seconds from a request to the gateway until the end of its engine's answer.",
        SERVICE,
        GATEWAY,
    ),
    MetricEntry(OURS + "api_requests_total", COUNTER, "Requests the sidecar sent to the Kubernetes API.", note=SIDECAR),
    MetricEntry(OURS + "cluster_reachable", GAUGE, "1 if the Kubernetes API can be read and written."),
    MetricEntry(OURS + "supervisord_reachable", GAUGE, "1 if supervisord answers."),
    MetricEntry(
        OURS + "model_download_bytes",
        GAUGE,
        "Bytes of a model that have been downloaded.",
        MODEL,
        "goes when the file is whole",
    ),
    MetricEntry(
        OURS + "model_download_total_bytes",
        GAUGE,
        "Size of a model that is being downloaded.",
        MODEL,
        "absent while it is unknown",
    ),
    MetricEntry(
        OURS + "model_fetch_failed",
        GAUGE,
        "1 while a model cannot be had; the Model's condition says why.",
        MODEL,
        "goes when it can",
    ),
)
TABLE: Mapping[str, MetricEntry] = {entry.name: entry for entry in SERVED}
