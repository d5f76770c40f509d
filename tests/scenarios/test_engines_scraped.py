"""A real Prometheus finds and scrapes engines, hostile ones included, as configured in conf/prometheus."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.spec.throughput import TOKENS
from tests.support import hostile
from tests.support.engines import either
from tests.support.prometheus import jobs, prometheus
from tests.support.system import ROOT, System, eventually, free_ports, kill, running, service

THIEF = f"""# TYPE {TOKENS} gauge
{TOKENS} 1
# TYPE metal_supervisor_service_phase gauge
metal_supervisor_service_phase{{name="tiny",namespace="default",phase="Failed"}} 1
up{{job="metal-supervisor"}} 0
own_total{{name="tiny",namespace="default",job="other",text="q\\"\\\\ \x1b[31m \u202e 🙂"}} 3
"""
PAGES = {
    "thief": THIEF,
    "words": hostile.engine_metrics(),
    "html": "<!doctype html>\n<script>alert(1)</script>\n",
    "large": "# nothing\n" * (1 << 17),
    "many": "".join(f"many_{number} 1\n" for number in range(2001)),
    "binary": "\x01\x02 1\n",
}
REFUSED = {"html", "large", "many", "binary"}
LOADS_S = "3"
KEY = "key-of-an-engine"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    base = tmp_path_factory.mktemp("engines")
    (port,) = free_ports(1)
    with running(base, "--metrics-listen", f"127.0.0.1:{port}", engine=either(base)) as up:
        dozy = service("dozy")
        dozy["metadata"]["annotations"] = {"metal-supervisor.io/idle-ttl": "10s"}
        locked = service("locked", env=[{"name": "LLAMA_API_KEY", "value": KEY}])
        engines = (engine(base, name, text) for name, text in PAGES.items())
        up.apply(up.tiny_model(), service(), dozy, locked, *engines)
        for name in ("tiny", "dozy", "locked", *PAGES):
            up.ready(name)
        yield up


def engine(base: Path, name: str, text: str) -> dict[str, Any]:
    """A service of an engine with these metrics."""
    path = base / f"{name}.metrics"
    path.write_bytes(text.encode("utf-8", "replace"))
    return service(name, extraArgs=["--fake-metrics-file", str(path), "--fake-load-s", LOADS_S])


def listener(system: System) -> str:
    return system.flags[system.flags.index("--metrics-listen") + 1]


def fetched(url: str) -> tuple[int, str]:
    """(status, body)"""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scraped(system: System, name: str) -> tuple[int, str]:
    return fetched(f"http://{listener(system)}/engines/default/{name}/metrics")


def listed(system: System) -> set[str]:
    """The engines in /sd."""
    return {each["labels"]["name"] for each in json.loads(fetched(f"http://{listener(system)}/sd")[1])}


def test_prometheus_scrapes_each_engine_and_a_hostile_one_affects_no_other(system: System, tmp_path: Path) -> None:
    eventually(lambda: listed(system) == {"tiny", "locked", *PAGES}, 20, "the engines to be listed")
    alerts = ROOT / "conf" / "prometheus" / "alerts.yaml"
    with prometheus(tmp_path, jobs(listener(system)), alerts) as server:

        def health() -> dict[str, str]:
            targets = server.get("targets")["activeTargets"]
            return {each["labels"]["name"]: each["health"] for each in targets if "name" in each["labels"]}

        wanted = {name: "down" if name in REFUSED else "up" for name in ("tiny", "locked", *PAGES)}
        eventually(lambda: health() == wanted, 40, "each engine to be scraped")
        whose = {each["metric"]["name"]: each["metric"] for each in server.ask(TOKENS)}
        assert whose.keys() == {"tiny", "locked", "thief"}
        assert whose["tiny"].items() >= {"namespace": "default", "job": "metal-engines"}.items()
        (own,) = server.ask("own_total")
        assert own["metric"].items() >= {"name": "thief", "exported_name": "tiny", "exported_job": "other"}.items()
        failed = 'metal_supervisor_service_phase{job="metal-supervisor", name="tiny", phase="Failed"}'
        assert [each["value"][1] for each in server.ask(failed)] == ["0"]
        assert [each["value"][1] for each in server.ask('up{job="metal-supervisor"}')] == ["1"]
        assert {each["metric"]["kind"] for each in server.ask("own_words")} == set(hostile.TEXTS)
        assert server.ask(hostile.FORGED) == []


def test_the_key_of_an_engine_opens_its_metrics_and_is_shown_nowhere(system: System) -> None:
    assert fetched(f"http://127.0.0.1:{system.port('locked')}/metrics")[0] == 401
    status, text = scraped(system, "locked")
    assert status == 200 and TOKENS in text
    found = [fetched(f"http://{listener(system)}{path}")[1] for path in ("/sd", "/metrics", "/engines/x/y/metrics")]
    logs = [path.read_text("utf-8", "replace") for path in (system.state / "log").glob("*.log*")]
    assert not [each for each in (text, *found, *logs) if KEY in each]


def test_an_engine_leaves_the_list_with_its_process_and_returns_once_it_serves(system: System) -> None:
    pid = system.ready("thief")
    eventually(lambda: "thief" in listed(system), 20, "it to be listed")
    kill(pid)
    eventually(lambda: "thief" not in listed(system), float(LOADS_S), "it to leave the list")
    assert "tiny" in listed(system), "others stay"
    system.ready("thief")
    eventually(lambda: "thief" in listed(system) and scraped(system, "thief")[0] == 200, 20, "it to return")


def test_an_engine_that_sleeps_is_not_listed_and_no_scrape_wakes_it(system: System) -> None:
    props = f"http://127.0.0.1:{system.port('dozy')}/props"
    eventually(lambda: json.loads(fetched(props)[1])["is_sleeping"], 30, "it to sleep")
    assert "dozy" not in listed(system)
    assert scraped(system, "dozy")[0] == 503
    assert json.loads(fetched(props)[1])["is_sleeping"]


def test_an_unknown_engine_is_not_found(system: System) -> None:
    for name in ("nothing", "..%2f..%2fstatus", "%2e%2e", "tiny%00", "tiny%2fmetrics"):
        assert scraped(system, name)[0] == 404, name
