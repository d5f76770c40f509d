#!/usr/bin/env python3
"""Writes docs/metrics.md from the table in metal_supervisor/sidecar/metric_table.py, and from our alerts.

    python tools/metrics_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from metal_supervisor.sidecar.metric_table import INCUMBENT, OURS, SERVED, UNSERVED, Entry  # noqa: E402

PAGE, ALERTS = ROOT / "docs" / "metrics.md", ROOT / "conf" / "prometheus" / "alerts.yaml"
HEAD = """# Metrics

<!-- written by tools/metrics_page.py from metal_supervisor/sidecar/metric_table.py; change that, then run it -->

`/metrics` on the sidecar's port (9090, loopback) answers in Prometheus' text format, or in OpenMetrics where the
scraper accepts it, from memory: a scrape waits for nothing. A series is there as long as what it tells of: it goes with
its service, its process or its download. A metric without a value is not there at all.
"""
THEIRS = f"""
## LLMKube's names

Dashboards and rules for `{INCUMBENT}*` go on working: same names, same types, same labels.

"""
FROM_AFAR = """
## From the cluster

Nothing but loopback is listened on, unless `--metrics-listen ADDRESS:PORT` says so: there `/metrics` and `/healthz` are
served, and nothing else, to whoever can reach it. `conf/prometheus/scrape.yaml` has what a Prometheus in the cluster
needs to find a Mac, `conf/grafana/dashboard.json` is a dashboard to import (watts need `--apple-power-enabled`, tokens
per second a scrape of the engines too), and `conf/prometheus/alerts.yaml` has what somebody should be told:

"""
OWN = f"""
## Ours

`name` and `namespace` are those of the InferenceService; a second engine of one service has a name of its own, with its
number. `loop` is `controller` or `sidecar`, and `op` what was written: `endpoints`, `status`, `lease`, `event` …
All begin with `{OURS}`.

"""
MISSING = """
## What LLMKube's agent has and this has not

"""


def _rows(entries: Iterable[Entry]) -> str:
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


def page() -> str:
    """The text of the page."""
    theirs = _rows(entry for entry in SERVED if entry.name.startswith(INCUMBENT))
    own = _rows(entry for entry in SERVED if entry.name.startswith(OURS))
    missing = "".join(f"- `{name}`: {reason}.\n" for name, reason in UNSERVED.items())
    return HEAD + THEIRS + theirs + OWN + own + MISSING + missing + FROM_AFAR + _alerts()


if __name__ == "__main__":
    PAGE.write_text(page())
