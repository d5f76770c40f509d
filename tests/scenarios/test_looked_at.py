"""Whoever looks at the sidecar, however badly he behaves, costs nobody an endpoint and this Mac no heartbeat."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor.cluster.kube import Kube, KubeError
from tests.support import chromium
from tests.support.crowd import REFUSED, RESET, UNCONNECTED
from tests.support.engines import timeline
from tests.support.faults import Figure, fault
from tests.support.macs import LEASES, Mac, embedded_cluster, fleet
from tests.support.system import FAKE_ENGINE, ROOT, eventually, kill, service

LEASE_S = 5
BEATS = 6
NAMES = tuple(f"one-{number}" for number in range(6))
LOADS_S = "3"
"""An engine that is back before its withdrawal is written is not withdrawn at all, and there is nothing to see."""
LOOP = re.compile(r'^metal_supervisor_loop_last_success_timestamp_seconds\{loop="sidecar"\} (\S+)$', re.M)


@pytest.fixture(scope="module")
def mac(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mac]:
    base = tmp_path_factory.mktemp("looked-at")
    with embedded_cluster(base) as kubeconfig, fleet(base, kubeconfig) as macs:
        found = macs.add("mac-a", "--lease-duration", str(LEASE_S), engine=FAKE_ENGINE)
        slow = ["--fake-load-s", LOADS_S]
        found.apply(found.tiny_model(), *(service(name, extraArgs=slow) for name in NAMES))
        for name in NAMES:
            found.ready(name, 60)
        yield found


@contextlib.contextmanager
def crowd(mac: Mac) -> Iterator[dict[str, dict[str, int]]]:
    """Clients that misbehave; afterwards, what they were answered."""
    found: dict[str, dict[str, int]] = {}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.crowd", str(mac.http)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield found
        found |= json.loads(process.communicate("", timeout=60)[0])
    finally:
        process.kill()
        process.communicate()


class Pulse(threading.Thread):
    """Notes when the Lease was renewed."""

    def __init__(self, mac: Mac) -> None:
        super().__init__(name="pulse", daemon=True)
        self._kube, self._over = Kube(mac.kubeconfig), threading.Event()
        self.beats: list[float] = []
        self._renewed = ""
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.02):
            with contextlib.suppress(KubeError, OSError):
                self._look()

    def _look(self) -> None:
        renewed = str(self._kube.request("GET", f"{LEASES}/metal-mac-a")["spec"]["renewTime"])
        if renewed != self._renewed:
            self._renewed = renewed
            self.beats.append(time.monotonic())

    def longest_gap_s(self) -> float:
        return max(later - sooner for sooner, later in itertools.pairwise(self.beats))

    def end(self) -> None:
        self._over.set()
        self.join(20)
        self._kube.close()


def lived(mac: Mac, names: tuple[str, ...]) -> tuple[float, list[float]]:
    """(longest gap between heartbeats, time to each withdrawal) while these engines are killed. Seconds."""
    pulse = Pulse(mac)
    try:
        eventually(lambda: pulse.beats, what="a heartbeat")
        delays = []
        with timeline(mac, *names) as seen:
            for name in names:
                pid, killed = mac.pid(name), time.monotonic()
                kill(pid)
                delays.append(seen.withdrawn_s(name, killed, 20))
        eventually(lambda: len(pulse.beats) > BEATS, 60, "more heartbeats")
        return pulse.longest_gap_s(), delays
    finally:
        pulse.end()


@fault(
    "G133",
    "headers of 64 KiB, paths of 64 KiB and what is no HTTP come as fast as they are answered, all at once "
    "with G134 to G136",
    happens="each is refused; Lease, slices and passes go on",
    sees="431, 400, or the end of a connection that was sent more than is read",
    bound="no heartbeat later than its Lease holds; no answer but a refusal; none waits 20 s or is not let in",
)
@fault(
    "G134",
    "200 connections say nothing, send a header that never ends, or never read what they asked for",
    happens="they are closed in time; a crash is withdrawn meanwhile as without them",
    sees="the page, /metrics, /status and /healthz as ever",
    bound="withdrawn within 20 s; heartbeats as above",
)
@fault(
    "G135",
    "DELETE comes as fast as it is answered",
    happens="it is refused",
    sees="405, Allow: GET, HEAD",
    bound="0 answers but refusals",
)
@fault(
    "G136",
    "requests come in the name of another host, as a page of a browser can make them by rebinding its name",
    happens="they are refused",
    sees="421 Misdirected Request, and by which names it may be asked",
    bound="0 answers but refusals",
)
def test_many_idle_slow_and_wrong_clients_delay_neither_a_heartbeat_nor_a_withdrawal(mac: Mac, figure: Figure) -> None:
    half = len(NAMES) // 2
    gap, delays = lived(mac, NAMES[:half])
    with crowd(mac) as answers:
        before = LOOP.search(mac.fetch("/metrics")[1])
        worse_gap, worse_delays = lived(mac, NAMES[half:])
        assert worse_gap < LEASE_S, "a peer would have taken it for dead"
        for path in ("/", "/metrics", "/status", "/healthz"):
            assert mac.fetch(path)[0] == 200, path
        after = LOOP.search(mac.fetch("/metrics")[1])
        assert before and after and float(after[1]) > float(before[1]), "its passes go on"
    for name in NAMES:
        mac.ready(name, 60)
    refusals = {"huge header": "431", "huge path": "431", "method": "405", "host": "421", "none": "400"}
    assert set(refusals) == set(REFUSED)
    huge = "huge header", "huge path"
    for kind, status in refusals.items():
        allowed = {status, RESET} if kind in huge else {status}
        assert set(answers[kind]) <= allowed and answers[kind].get(status, 0) > 1, (kind, answers[kind])
    assert answers["held"]["most"] >= 200 and UNCONNECTED not in answers["held"], answers["held"]
    for name, each, more in (("without them", gap, delays), ("with them", worse_gap, worse_delays)):
        figure.add(f"longest gap of heartbeats {name}", each, case="G134")
        for delay in more:
            figure.add(f"kill to withdrawal {name}", delay, case="G134")
    figure.add("connections held", answers["held"]["most"], "", case="G134")
    figure.add("headers and paths answered with 431", sum(answers[kind]["431"] for kind in huge), "", case="G133")
    figure.add("cut off before that", sum(answers[kind].get(RESET, 0) for kind in huge), "", case="G133")
    figure.add("what is no HTTP, answered with 400", answers["none"]["400"], "", case="G133")
    figure.add("refused", answers["method"]["405"], "", case="G135")
    figure.add("refused", answers["host"]["421"], "", case="G136")


def test_a_browser_that_was_sent_here_under_another_name_is_shown_nothing(mac: Mac, tmp_path: Path) -> None:
    with chromium.tab(tmp_path, "--host-resolver-rules=MAP evil.test 127.0.0.1") as tab:
        for path in ("/", "/status", "/metrics"):
            assert not tab.call("Page.navigate", url=f"http://evil.test:{mac.http}{path}").get("errorText")
            html = eventually(lambda: "Misdirected" in tab.html() and tab.html(), what=path)
            assert not any(name in html for name in NAMES)
