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
from metal_supervisor.sidecar.http.metric_table import INCUMBENT, OURS, SERVED, MetricEntry  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
ALERTS = ROOT / "conf" / "prometheus" / "alerts.yaml"
HEAD = """# Metrics

<!-- written by tools/metrics_page.py from metal_supervisor/sidecar/http/metric_table.py; change that, then run it -->

`/metrics` on the sidecar's port (9090, loopback) answers in Prometheus' text format, or in OpenMetrics where the
scraper accepts it, from memory. A series is there as long as what it tells of: it goes with its service, its process or
its download. A metric without a value is not there at all.
"""
THEIRS = f"""
## LLMKube's names

Dashboards and rules for `{INCUMBENT}*` go on working: same names, same types, same labels.

"""
FROM_AFAR = """
## From the cluster

Nothing but loopback is listened on, unless `--metrics-listen ADDRESS:PORT` says so: there `/metrics`, `/healthz` and
[the engines' metrics](#metrics-of-the-engines) are served, and nothing else, to whoever can reach it. `conf/prometheus`
has scrape configurations with the operator (`scrape.yaml`) and without it (`prometheus.yml`),
`conf/grafana/dashboard.json` is a dashboard to import (watts need `--apple-power-enabled`, the panel "Tokens per
second" needs the job `metal-engines`), and `conf/prometheus/alerts.yaml` has what somebody should be told:

"""
OWN = f"""
## Ours

`name` and `namespace` are those of the InferenceService; a second engine of one service has a name of its own, with its
number. `loop` is `controller` or `sidecar`, and `op` what was written: `endpoints`, `status`, `lease`, `event` …
All begin with `{OURS}`.

"""
ENGINES = """
## Metrics of the engines

With `--metrics-listen`, `GET /sd` lists the engines that serve, in the format of Prometheus' HTTP service discovery:

```json
[{"targets": ["192.0.2.10:9091"],
  "labels": {"__metrics_path__": "/engines/default/phi/metrics", "namespace": "default", "name": "phi"}}]
```

The target is the address from which the list was requested; the listener passes each scrape to the engine, with the key
of its `spec.env` if it requires one. Engines may therefore listen on loopback only, and Prometheus needs no key.
`conf/prometheus/prometheus.yml` is an example.

- Only engines that serve are listed and asked. An engine that unloads its model when idle
  (`metal-supervisor.io/idle-ttl`) never is: a scrape would wake it or keep it awake. A path of a service whose engine
  is not asked answers 503, an unknown path 404.
- An answer may take 5 s and have less than 1 MiB of `text/plain`; otherwise the scrape gets 502 and the reason. Four
  engines are asked at a time; further scrapes get 503.
- Metrics are passed on as the engine writes them. Leave `honor_labels` off and set `sample_limit` as in the example, so
  that an engine cannot write series of others.
- llama-server's `llamacpp:predicted_tokens_seconds` and `llamacpp:prompt_tokens_seconds` are averages since the last
  scrape: with several scrapers, each gets a part. Use `rate()` of the counters instead.

| runtime | metrics |
| --- | --- |
{runtimes}"""
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
    """How engines are scraped, and which runtimes have metrics."""
    nowhere = {True: "the daemon's metrics are no one service's", False: "the engine has none"}
    runtimes = "".join(
        f"| `{name}` | {f'`{each.metrics_path}`' if each.metrics_path else nowhere[each.shared is not None]} |\n"
        for name, each in RUNTIMES.items()
    )
    return ENGINES.replace("{runtimes}", runtimes)


def page() -> str:
    """The text of the page."""
    theirs = _rows(entry for entry in SERVED if entry.name.startswith(INCUMBENT))
    own = _rows(entry for entry in SERVED if entry.name.startswith(OURS))
    missing = "".join(f"- `{name}`: {reason}.\n" for name, reason in UNSERVED.items())
    return HEAD + THEIRS + theirs + OWN + own + _engines() + MISSING + missing + FROM_AFAR + _alerts()


if __name__ == "__main__":
    PAGE.write_text(page())
