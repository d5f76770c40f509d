"""/metrics of a running system, as a real promtool and a real Prometheus see it."""

from __future__ import annotations

import contextlib
import http.client
import urllib.request
from collections.abc import Iterator

import pytest

from tests.support.prometheus import lint
from tests.support.system import System, eventually, free_ports, kill, model, running, service

HOSTILE = 'it"s \\n \\ {evil="1"}\n# TYPE evil counter\nevil 1'


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    (port,) = free_ports(1)
    with running(tmp_path_factory.mktemp("metrics"), "--metrics-listen", f"127.0.0.1:{port}") as up:
        up.apply(up.tiny_model(), service())
        up.ready()
        yield up


def metric(system: System, name: str) -> float | None:
    """A value of /metrics, with its labels if it has any; None while it is not there."""
    lines = (line.rpartition(" ") for line in system.fetch("/metrics")[1].splitlines())
    return next((float(value) for found, _, value in lines if found == name), None)


def test_promtool_finds_nothing_wrong_with_it_whatever_users_write(system: System) -> None:
    system.apply(model("odd", "/it's" + "".join(HOSTILE.split())), service("odd", "odd"))
    system.apply(service("third", "tiny", extraArgs=[HOSTILE]))
    eventually(lambda: system.status("third").get("phase") == "Failed", what="the argument to be refused")
    eventually(lambda: system.status("odd").get("phase"), what="a word on the source")
    eventually(lambda: 'name="third"' in system.fetch("/metrics")[1], what="its series")
    text = system.fetch("/metrics")[1]
    assert "evil" not in text
    assert lint(text) == ""


def test_a_promtool_that_is_shown_something_wrong_says_so() -> None:
    assert "no help text" in lint("# TYPE some_thing counter\nsome_thing 1\n")
    assert lint('broken{name="a"b"} 1\n')


def test_a_life_of_an_engine_is_counted_and_outlives_the_sidecar(system: System) -> None:
    labels = 'name="tiny",namespace="default"'
    ended = f'metal_supervisor_process_exits_total{{{labels},reason="SIGKILL"}}'
    system.ready()
    for name in ("metal_supervisor_time_to_ready", "llmkube_metal_agent_health_check_duration"):
        eventually(lambda name=name: (metric(system, f"{name}_seconds_count{{{labels}}}") or 0) >= 1, what=name)
    ready = f'metal_supervisor_service_phase{{{labels},phase="Ready"}}'
    eventually(lambda: metric(system, ready) == 1, what="its phase")
    restarts = f"llmkube_metal_agent_process_restarts_total{{{labels}}}"
    kill(system.ready())
    eventually(lambda: metric(system, ended) == 1, what="the end to be counted")
    # Its phase may still be that of before the crash, and a start so soon after another has a pause before it.
    eventually(lambda: metric(system, restarts) == 1, what="the next start to be counted")
    system.ready()
    eventually(
        lambda: (metric(system, "metal_supervisor_endpoint_withdraw_seconds_count") or 0) >= 1,
        what="the withdrawal to be counted",
    )
    before = system.own_pid("sidecar")
    kill(before)
    eventually(lambda: system.own_pid("sidecar") not in (0, before), what="another sidecar")
    eventually(lambda: metric(system, ended) == 1, what="the count of the sidecar before it")
    assert metric(system, restarts) == 1


def test_passes_of_both_loops_and_watches_of_both_kinds_are_told(system: System) -> None:
    for loop in ("controller", "sidecar"):
        name = f'metal_supervisor_loop_duration_seconds_count{{loop="{loop}"}}'
        eventually(lambda name=name: (metric(system, name) or 0) >= 1, what=name)
        assert metric(system, f'metal_supervisor_loop_last_success_timestamp_seconds{{loop="{loop}"}}')
    for kind in ("inferenceservices", "models"):
        assert metric(system, f'metal_supervisor_watch_reconnects_total{{kind="{kind}"}}') is not None
    failures = "llmkube_metal_agent_watch_consecutive_failures"
    eventually(lambda: metric(system, failures) == 0, what="watches that go well")  # before the CRDs, they fail


def test_series_go_with_their_service(system: System) -> None:
    system.apply(service("brief", "tiny"))
    system.ready("brief")
    eventually(lambda: 'name="brief"' in system.fetch("/metrics")[1], what="its series")
    system.delete("brief")
    eventually(lambda: 'name="brief"' not in system.fetch("/metrics")[1], what="its series to be gone")


def test_openmetrics_is_served_to_whom_asks_for_it(system: System) -> None:
    asked = urllib.request.Request(
        f"http://127.0.0.1:{system.http}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert answer.read().endswith(b"# EOF\n")


def test_the_address_for_the_cluster_serves_metrics_and_nothing_else(system: System) -> None:
    for path, status in (("/metrics", 200), ("/healthz", 200), ("/sd", 200), ("/status", 404), ("/", 404)):
        assert elsewhere(system, path) == status, path
    assert elsewhere(system, "/metrics", "POST") == 405
    assert system.fetch("/status")[0] == 200, "loopback is as it was"


def elsewhere(system: System, path: str, method: str = "GET") -> int:
    """The status of an answer of the address for the cluster."""
    address = system.flags[system.flags.index("--metrics-listen") + 1]
    connection = http.client.HTTPConnection(address, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path)
        return connection.getresponse().status
