"""What a real llama-server counts is at /metrics beside what others claim, and a real Prometheus reads all of it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from metal_supervisor.spec.throughput import TOKENS
from tests.support.engines import either
from tests.support.prometheus import lint_ours, prometheus
from tests.support.system import ROOT, System, eventually, kill, running, service

THIEF = f"""# TYPE {TOKENS} gauge
{TOKENS} 1
# TYPE metal_supervisor_service_phase gauge
metal_supervisor_service_phase{{name="tiny",namespace="default",phase="Failed"}} 1
up{{job="metal-supervisor"}} 0
# HELP own_total Something of its own
# TYPE own_total counter
own_total{{name="tiny",namespace="default",job="other",text="q\\"\\\\ \x1b[31m \u202e 🙂"}} 3 1600000000000
odd_minutes 1
"""
PAGES = {
    "thief": THIEF,
    "html": "<!doctype html>\n<script>alert(1)</script>\n",
    "large": "# nothing\n" * (1 << 17),
    "many": "".join(f"many_{number} 1\n" for number in range(2001)),
    "binary": "\x00\x01\x02 1\n",
}
LOADS_S = "3"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    base = tmp_path_factory.mktemp("engines")
    with running(base, "--engine-metrics", "true", engine=either(base)) as up:
        dozy = service("dozy")
        dozy["metadata"]["annotations"] = {"metal-supervisor.io/idle-ttl": "10s"}
        up.apply(up.tiny_model(), service(), dozy, *(engine(base, name, text) for name, text in PAGES.items()))
        for name in ("tiny", "dozy", *PAGES):
            up.ready(name)
        yield up


def engine(base: Path, name: str, text: str) -> dict[str, Any]:
    """A service of an engine that says this."""
    said = base / f"{name}.metrics"
    said.write_text(text)
    return service(name, extraArgs=["--fake-metrics-file", str(said), "--fake-load-s", LOADS_S])


def page(system: System, accept: str = "") -> str:
    return fetched(f"http://127.0.0.1:{system.http}/metrics", accept)


def fetched(url: str, accept: str = "") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def series(text: str, name: str) -> dict[str, str]:
    """Value by labels, of the series of this name."""
    found = (line.rpartition(" ") for line in text.splitlines() if line.startswith(f"{name}{{"))
    return {labels.removeprefix(name): value for labels, _, value in found}


def dropped(system: System) -> set[tuple[str, str]]:
    """(service, reason) of all that was left out."""
    families = {each.name: each for each in plain(page(system))}
    found = families.get("metal_supervisor_engine_metrics_dropped")
    return {(each.labels["name"], each.labels["reason"]) for each in found.samples} if found else set()


def test_a_real_engine_is_told_of_by_its_service_and_a_hostile_one_spoils_nothing(system: System) -> None:
    wanted = {
        ("thief", "name"),
        ("thief", "type"),
        ("html", "format"),
        ("large", "size"),
        ("many", "series"),
        ("binary", "format"),
    }
    eventually(lambda: wanted <= dropped(system), 40, "every engine's answer to be judged")
    text = page(system)
    assert set(series(text, TOKENS)) == {'{namespace="default",name="tiny"}'}
    assert series(text, "own_total") == {
        '{namespace="default",name="thief",exported_name="tiny",exported_namespace="default",exported_job="other",'
        'text="q\\"\\\\ ?[31m ? 🙂"}': "3"
    }
    assert 'metal_supervisor_service_phase{name="tiny",namespace="default",phase="Failed"} 0.0\n' in text
    assert "\nup{" not in text and "many_1" not in text and "script" not in text
    up = series(text, "metal_supervisor_engine_metrics_up")
    assert {labels.split('"')[1] for labels, value in up.items() if value == "1.0"} == {"tiny", "thief"}
    assert lint_ours(text) == ""
    assert list(openmetrics(page(system, "application/openmetrics-text; version=1.0.0")))


def test_a_real_prometheus_takes_the_page_in_either_format(system: System, tmp_path: Path) -> None:
    eventually(lambda: series(page(system), "own_total"), 40, "the thief's own metric")
    alerts = ROOT / "conf" / "prometheus" / "alerts.yaml"
    with prometheus(tmp_path, {"metal-supervisor": [system.http]}, alerts) as server:
        (found,) = eventually(lambda: server.ask(TOKENS), 20, "the tokens")
        whose = {name: found["metric"][name] for name in ("namespace", "name", "job")}
        assert whose == {"namespace": "default", "name": "tiny", "job": "metal-supervisor"}
        (own,) = server.ask("own_total")
        assert own["metric"]["exported_job"] == "other" and own["value"][1] == "3"
        assert [each["value"][1] for each in server.ask("up")] == ["1"], "the thief's is not there"


def test_series_go_with_the_process_and_come_with_the_next(system: System) -> None:
    pid = system.ready("thief")
    eventually(lambda: series(page(system), "own_total"), 40, "its metric")
    kill(pid)
    # It loads for some seconds; what the one before said is gone long before.
    eventually(lambda: not series(page(system), "own_total"), float(LOADS_S), "its metric to be gone")
    assert series(page(system), TOKENS), "the others are there"
    system.ready("thief")
    eventually(lambda: series(page(system), "own_total"), 40, "the metric of the next process")


def test_an_engine_that_is_to_sleep_is_never_asked(system: System) -> None:
    props = f"http://127.0.0.1:{system.port('dozy')}/props"
    eventually(lambda: json.loads(fetched(props))["is_sleeping"], 30, "it to sleep")
    system.chat()
    before = series(page(system), TOKENS)
    system.chat()
    eventually(lambda: series(page(system), TOKENS) != before, 40, "the others to be asked again")
    assert json.loads(fetched(props))["is_sleeping"]
    assert '"dozy"' not in "".join(series(page(system), "metal_supervisor_engine_metrics_up"))
    assert '"dozy"' not in "".join(series(page(system), TOKENS))
