"""conf/prometheus and conf/grafana: what it selects is what there is, and they name only metrics that are served."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from metal_supervisor.sidecar.http.metric_table import TABLE, MetricEntry
from metal_supervisor.spec import throughput

CONF = Path(__file__).resolve().parents[2] / "conf" / "prometheus"
DASHBOARD = CONF.parent / "grafana" / "dashboard.json"
JOB = "metal-supervisor"
ENGINES = "metal-engines"


NO_SCHEMA = "definition"
"""What a Grafana itself writes beside a variable's query, and its schema does not have."""


def scrape() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CONF / "scrape.yaml").read_text()))


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((CONF / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def series(entry: MetricEntry) -> set[str]:
    """The names that a metric has in a Prometheus."""
    parts = ("_bucket", "_sum", "_count") if entry.kind == "histogram" else ("",)
    return {entry.name + part for part in parts}


def test_both_ways_to_a_mac_end_at_the_same_port_and_job() -> None:
    config, service, slice_, monitor, engines = scrape()
    assert [each["kind"] for each in (config, service, slice_, monitor, engines)] == [
        "ScrapeConfig",
        "Service",
        "EndpointSlice",
        "ServiceMonitor",
        "ScrapeConfig",
    ]
    (port,), (address,) = slice_["ports"], slice_["endpoints"][0]["addresses"]
    assert config["spec"]["jobName"] == JOB == service["metadata"]["name"], "a ServiceMonitor's job is its Service"
    assert config["spec"]["staticConfigs"][0]["targets"] == [f"{address}:{port['port']}"]
    assert service["spec"] == {"clusterIP": "None", "ports": [{"name": port["name"], "port": port["port"]}]}
    assert slice_["metadata"]["labels"] == {"kubernetes.io/service-name": JOB}
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == port["name"] and endpoint["honorLabels"] is True


def test_both_configurations_find_the_engines_with_the_same_limits() -> None:
    config, engines = scrape()[0]["spec"], scrape()[-1]["spec"]
    plain_macs, plain = yaml.safe_load((CONF / "prometheus.yml").read_text())["scrape_configs"]
    assert (plain_macs["job_name"], plain["job_name"], engines["jobName"]) == (JOB, ENGINES, ENGINES)
    assert plain_macs["static_configs"] == config["staticConfigs"]
    (address,) = config["staticConfigs"][0]["targets"]
    assert plain["http_sd_configs"][0]["url"] == engines["httpSDConfigs"][0]["url"] == f"http://{address}/sd"
    for limit, of_operator in (("sample", "sample"), ("label", "label"), ("label_value_length", "labelValueLength")):
        assert plain[f"{limit}_limit"] == engines[f"{of_operator}Limit"]
    assert not {"honor_labels", "honorLabels"} & {*plain, *engines}, "an engine would set the labels of others"


def test_every_alert_names_metrics_that_are_served_and_says_what_to_do() -> None:
    known = {"up"}.union(*map(series, TABLE.values()))
    assert {rule["alert"].removeprefix("MetalSupervisor") for rule in rules()} == {
        "AgentDown",
        "LoopStalled",
        "ClusterUnreachable",
        "ServiceNotReady",
        "CrashLooping",
        "MemoryPressure",
        "EvictionHappened",
        "DownloadStuck",
    }
    for rule in rules():
        named = set(re.findall(r"([a-z_]+)\{", rule["expr"]))
        assert named and named <= known, rule["alert"]
        assert rule["expr"].count(f'job="{JOB}"') == rule["expr"].count("{"), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"runbook_url", "summary", "description"}
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        titles = re.findall(r"(?m)^##+ (.*)$", (CONF.parents[1] / page).read_text("utf-8"))
        assert not anchor or anchor in [title.lower().replace(" ", "-") for title in titles], rule["alert"]


def test_every_alert_is_tested_both_ways() -> None:
    tests = yaml.safe_load((CONF / "alerts_test.yaml").read_text())["tests"]
    asked = [each for test in tests for each in test["alert_rule_test"]]
    for rule in rules():
        found = {bool(each["exp_alerts"]) for each in asked if each["alertname"] == rule["alert"]}
        assert found == {True, False}, rule["alert"]


def test_the_dashboard_names_metrics_that_are_served_of_the_macs_and_the_namespaces_that_are_chosen() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "instance", "namespace"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    entries = {name: entry for entry in TABLE.values() for name in series(entry)}
    shown, engines = set(), set()
    for expression in (target["expr"] for panel in board["panels"] for target in panel.get("targets", [])):
        for name, selector in re.findall(r"([a-z_:]+)\{([^}]*)\}", expression):
            job = ENGINES if ":" in name else JOB
            assert f'job="{job}", instance=~"$instance"' in selector, expression
            if ":" in name:  # an engine's own, which has the labels of its service
                engines.add(name)
                assert 'namespace=~"$namespace"' in selector, expression
                continue
            entry = entries[name]
            shown.add(entry.name)
            assert "$namespace" not in selector or "namespace" in entry.labels, expression
    assert len(shown) > 20 and throughput.TOKENS in engines


def unknown(board: Any, understood: Any, at: str = "") -> list[str]:
    """Where a dashboard says what a Grafana's own types, once they have read it, do not say again."""
    if isinstance(board, dict) and isinstance(understood, dict):
        return [
            where
            for name, value in board.items()
            if name != NO_SCHEMA
            for where in unknown(value, understood.get(name), f"{at}.{name}")
        ]
    if isinstance(board, list) and isinstance(understood, list) and len(board) == len(understood):
        return [
            where
            for at_, pair in enumerate(zip(board, understood, strict=True))
            for where in unknown(*pair, f"{at}[{at_}]")
        ]
    return [] if board == understood else [at]


def read_by_grafana(board: Any) -> Any:
    """A dashboard as Grafana's own types have it: no Grafana could be had, and these are made of its schema."""
    sdk = pytest.importorskip("grafana_foundation_sdk", reason="its types of a dashboard are for Python 3.11 and newer")
    assert sdk
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()  # the types of each kind of panel
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


def test_the_dashboard_says_only_what_grafanas_schema_knows() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert unknown(board, read_by_grafana(board)) == []


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ((), "templatin"),
        (("panels", 1), "fieldConfi"),
        (("panels", 1, "fieldConfig", "defaults"), "unti"),
        (("panels", 1, "options"), "colourMode"),
        (("panels", 1, "targets", 0), "legend"),
    ],
)
def test_a_name_that_no_grafana_knows_is_found(place: tuple[str | int, ...], name: str) -> None:
    board = json.loads(DASHBOARD.read_text())
    inside = board
    for step in place:
        inside = inside[step]
    inside[name] = "x"
    (found,) = unknown(board, read_by_grafana(board))
    assert found.endswith(f".{name}")
