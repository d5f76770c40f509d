#!/usr/bin/env python3
"""Writes docs/metrics.md from the tables of metrics, reasons and runtimes, and from our alerts.

python tools/metrics_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from metal_supervisor.runtimes import RUNTIMES  # noqa: E402
from metal_supervisor.runtimes.engine_metrics import REASONS  # noqa: E402
from metal_supervisor.sidecar.http.metric_table import INCUMBENT, OURS, SERVED, MetricEntry  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
ALERTS = ROOT / "conf" / "prometheus" / "alerts.yaml"
HEAD = """# Metrics

<!-- written by tools/metrics_page.py from metal_supervisor/sidecar/http/metric_table.py; change that, then run it -->

`/metrics` on the sidecar's port (9090, loopback) answers in Prometheus' text format, or in OpenMetrics where the
scraper accepts it, from memory. It is rendered twice a second at most, and never while nobody scrapes: a scrape may
show the state of half a second ago. A series is there as long as what it tells of: it goes with its service, its
process or its download. A metric without a value is not there at all.
"""
THEIRS = f"""
## LLMKube's names

Dashboards and rules for `{INCUMBENT}*` go on working: same names, same types, same labels.

"""
FROM_AFAR = """
## From the cluster

Nothing but loopback is listened on, unless `--metrics-listen ADDRESS:PORT` says so: there `/metrics` and `/healthz` are
served, and nothing else, to whoever can reach it. `conf/prometheus/scrape.yaml` has what a Prometheus in the cluster
needs to find a Mac, `conf/grafana/dashboard.json` is a dashboard to import (watts need `--apple-power-enabled`, its
panel "Tokens per second" needs `--engine-metrics`), and `conf/prometheus/alerts.yaml` has what somebody should be told:

"""
OWN = f"""
## Ours

`name` and `namespace` are those of the InferenceService; a second engine of one service has a name of its own, with its
number. `loop` is `controller` or `sidecar`, and `op` what was written: `endpoints`, `status`, `lease`, `event` …
All begin with `{OURS}`.

"""
ENGINES = f"""
## The engines' own

With `--engine-metrics true` (or `engine_metrics = true`) `/metrics` has what the engines count themselves, too, under
their own names: `llamacpp:tokens_predicted_total`, `vllm:generation_tokens_total` … Each series has the labels
`namespace` and `name` of its InferenceService before its own; an engine's own label of such a name, or `job` or
`instance`, becomes `exported_name` and so on.

- Each engine that serves is asked every 15 s, for at most 2 s, by one thread of the sidecar; a scrape gets what was
  said last. One that does not answer is asked less often. It is off by default, since each question wakes an engine
  that is idle: six context switches of a llama-server that otherwise has one a second.
- One that loads, ends or hangs is not asked, and one that unloads its model when idle (`metal-supervisor.io/idle-ttl`)
  never is: a question would wake it, or keep it awake.
- Series go with the process that they are of, and once what they say is 60 s old.
- llama-server's `llamacpp:predicted_tokens_seconds` and `llamacpp:prompt_tokens_seconds` are averages since somebody
  last asked: with several who ask, each gets a part. `rate()` of the counters does not have that trouble.
- An engine that wants a key is sent the one of its `spec.env`, as with its first request. With `--metrics-listen`
  what it then tells is there for whoever can reach that address, without a key.
- Timestamps, exemplars and `*_created` are dropped, labels and help texts cut to 200 characters. A counter whose name
  does not end in `_total` is of type `unknown` in OpenMetrics, which has no others.

| runtime | asked at |
| --- | --- |
{{runtimes}}
What cannot stand on the page is left out, so that the rest of it is always valid; `{OURS}engine_metrics_up` is 0 for an
engine whose last answer was not taken, and `{OURS}engine_metrics_dropped_total` counts by `reason`:

| reason | what happened |
| --- | --- |
{{reasons}}"""
_PROXY = "clients ask the engines themselves, or the gateway, which has metrics of its own"
UNSERVED = {
    INCUMBENT + "fatal_exits_total": "nothing is fatal: a lost watch is tried again, a taken port is waited for, and "
    "supervisord restarts what dies; see loop_last_success_timestamp_seconds and watch_consecutive_failures",
    INCUMBENT + "client_proxy_requests_total": f"there is no client proxy; {_PROXY}",
    INCUMBENT + "ingress_requests_total": f"there is no ingress; {_PROXY}",
    "go_*": "this is not a Go program",
    "process_*": "of the agent's one process; here are several, which supervisorctl lists",
}
"""Metrics of LLMKube's agent that are not served, each with the reason."""
MISSING = """
## What LLMKube's agent has and this has not

"""


def _rows(entries: Iterable[MetricEntry]) -> str:
    lines = ["| metric | type | labels | what it says |", "| --- | --- | --- | --- |"]
    for entry in entries:
        labels = ", ".join(f"`{label}`" for label in entry.labels)
        text = entry.help.removesuffix(".") + (f" ({entry.note})" if entry.note else "")
        lines.append(f"| `{entry.name}` | {entry.kind} | {labels} | {text} |")
    return "\n".join(lines) + "\n"


def _alerts() -> str:
    """The alerts by name, each with its condition."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    lines = ["| alert | when | for |", "| --- | --- | --- |"]
    for rule in group["rules"]:
        when = rule["expr"].replace("|", "\\|")
        lines.append(f"| {rule['alert']} | `{when}` | {rule.get('for', 'at once')} |")
    return "\n".join(lines) + "\n"


def _engines() -> str:
    """Who is asked, and what is left out."""
    nowhere = {True: "the daemon's metrics are no one service's", False: "the engine has none"}
    runtimes = "".join(
        f"| `{name}` | {f'`{each.metrics_path}`' if each.metrics_path else nowhere[each.shared is not None]} |\n"
        for name, each in RUNTIMES.items()
    )
    reasons = "".join(f"| `{name}` | {text} |\n" for name, text in REASONS.items())
    return ENGINES.format(runtimes=runtimes, reasons=reasons)


def page() -> str:
    """The text of the page."""
    theirs = _rows(entry for entry in SERVED if entry.name.startswith(INCUMBENT))
    own = _rows(entry for entry in SERVED if entry.name.startswith(OURS))
    missing = "".join(f"- `{name}`: {reason}.\n" for name, reason in UNSERVED.items())
    return HEAD + THEIRS + theirs + OWN + own + _engines() + MISSING + missing + FROM_AFAR + _alerts()


if __name__ == "__main__":
    PAGE.write_text(page())
