"""A real Prometheus scrapes a running system, and every expression of our dashboard and alerts says something."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
import yaml

from metal_supervisor.sidecar.http.metrics_server import create_app
from tests.support.boards import full_board
from tests.support.prometheus import Prometheus, jobs, prometheus
from tests.support.system import ROOT, eventually, free_ports, running, service

DASHBOARD = ROOT / "conf" / "grafana" / "dashboard.json"
ALERTS = ROOT / "conf" / "prometheus" / "alerts.yaml"
UNKNOWN = {
    "Power A": "no powermetrics here",
    **dict.fromkeys((f"Power of the chip {ref}" for ref in "ABCD"), "no powermetrics here"),
    "Memory of the machine B": "macOS alone tells what is wired",
    "Kubernetes API C": "no write failed",
    "Restarts B": "nothing ended",
    "Downloads A": "nothing is fetched",
    "Downloads B": "everything can be had",
    "Requests at the gateway A": "the gateway is off",
    "Requests at the gateway B": "the gateway is off",
    "Streamed at the gateway, by key A": "the gateway is off",
    "Time to the first byte (p95) A": "the gateway is off",
    "Time to the first byte (p95) B": "the gateway is off",
    "Waits for a model on demand (p95) A": "the gateway is off",
}
"""Expressions that say nothing of a system on Linux with one service that is Ready, with the reason."""


@dataclass(frozen=True)
class Site:
    """What is scraped, and by whom."""

    server: Prometheus
    system: str
    """The instance that is a running system; another is a page with a value for everything."""


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def page_with_everything() -> Iterator[int]:
    """A /metrics with every metric there is; the port."""
    page = create_app(full_board, lambda _program: ("", ""), "127.0.0.1")
    with make_server("127.0.0.1", 0, page, handler_class=_Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    base = tmp_path_factory.mktemp("site")
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    with running(base, "--metrics-listen", address) as system, page_with_everything() as full:
        system.apply(system.tiny_model(), service())
        system.ready()
        system.chat()
        with prometheus(base, jobs(address, f"127.0.0.1:{full}"), ALERTS) as server:
            yield Site(server, address)


def expressions() -> dict[str, str]:
    """Every expression of the dashboard, by the title of its panel and its letter there."""
    found = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def filled(expression: str, instance: str = ".*") -> str:
    """An expression as Grafana would send it."""
    values: Mapping[str, str] = {
        "$instance": instance,
        "$namespace": ".*",
        "$__rate_interval": "1m",
        "$__range": "1h",
    }
    for name, value in values.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def silent(site: Site, instance: str) -> set[str]:
    """The expressions without data."""
    return {name for name, each in expressions().items() if not site.server.ask(filled(each, instance))}


def test_every_expression_of_the_dashboard_returns_data(site: Site) -> None:
    eventually(lambda: not silent(site, ".*"), 60, "data for everything")


def test_a_system_with_one_ready_service_says_all_but_what_it_cannot_know(site: Site) -> None:
    eventually(lambda: silent(site, site.system) <= set(UNKNOWN), 60, "data of the system")


def test_every_alert_is_evaluated_and_none_is_about_a_system_in_order(site: Site) -> None:
    wanted = {rule["alert"]: rule["expr"] for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]}

    def evaluated() -> bool:
        (group,) = site.server.get("rules")["groups"]
        assert not [rule["lastError"] for rule in group["rules"] if rule.get("lastError")]
        return all(rule["health"] == "ok" for rule in group["rules"]) and len(group["rules"]) == len(wanted)

    eventually(evaluated, 30, "all rules to be evaluated")
    for alert, expression in wanted.items():
        about = [each["metric"]["instance"] for each in site.server.ask(expression)]
        assert site.system not in about, alert
    everything = {alert for alert, expression in wanted.items() if site.server.ask(expression)}
    noticed = {f"MetalSupervisor{name}" for name in ("LoopStalled", "MemoryPressure", "DownloadStuck")}
    assert everything >= noticed, "what the other page says is noticed"
