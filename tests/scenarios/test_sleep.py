"""A Mac that is about to sleep: nobody is sent to it any more, and it takes part again when it wakes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cluster.answers import now_micro
from metal_supervisor.placement import leases
from tests.support.engines import Stopwatch
from tests.support.faults import Figure, fault
from tests.support.gateway import with_gateway
from tests.support.mac_part import say, standing_in
from tests.support.macs import LEASES, Mac, embedded_cluster
from tests.support.own_logs import logged
from tests.support.system import ROOT, SLICES, System, eventually, halted, service

WITHIN_S, AWAKE_WITHIN_S = 1.0, 15.0
HOUR_S = 3600
NAMES = "one", "two"


class Watch:
    """A sleepwatch of that Mac, to which the system speaks through us."""

    def __init__(self, mac: System) -> None:
        command = [sys.executable, "-m", "tests.support.iokit", str(mac.files.path)]
        self._log = mac.state / "log" / "sleepwatch.log"
        with self._log.open("wb") as log:
            self.process: subprocess.Popen[str] = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
            )

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")

    def allowed(self) -> str:
        """Waits until it lets the system sleep."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def withdrawn(self) -> bool:
        """Whether it lets the system sleep because it was told that all is out, and not because it waited in vain."""
        assert self.allowed()
        (told,) = logged(self._log)
        return (told["msg"], told["endpoints"]) == ("asleep", "withdrawn")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def mac(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mac]:
    base = tmp_path_factory.mktemp("sleep")
    with embedded_cluster(base) as kubeconfig:
        found = Mac(base / "mac", "mac", kubeconfig, 1)
        try:
            found.start().apply(found.tiny_model(), *(service(name) for name in NAMES))
            for name in NAMES:
                found.ready(name)
            yield found
        finally:
            found.close()


@pytest.fixture
def watch(mac: Mac) -> Iterator[Watch]:
    found = Watch(mac)
    try:
        yield found
    finally:
        found.close()


def readiness(mac: Mac) -> list[bool]:
    return [each["endpoints"][0]["conditions"]["ready"] for each in mac.get(SLICES)["items"]]


def reasons(mac: Mac) -> set[str]:
    return {mac.condition("MetalReady", name).get("reason", "") for name in NAMES}


def back(mac: Mac) -> Any:
    return readiness(mac) == [True, True]


@fault(
    "H2", "macOS announces that this Mac will sleep; later it wakes",
    happens="every endpoint is out before it is let go to sleep, and back once it is awake; engines stay",
    sees="MetalReady Asleep, then Serving", bound="out by the time it sleeps; back within 1 s",
)
def test_endpoints_are_out_before_the_mac_sleeps_and_back_once_it_is_awake(
    mac: Mac, watch: Watch, figure: Figure
) -> None:
    pids = [mac.pid(name) for name in NAMES]
    watch.say("can")
    assert watch.allowed() == "allowed 0\n" and back(mac), "it was only asked"
    with figure.timed("announcement to let go"):
        watch.say("will")
        assert watch.withdrawn()
    assert readiness(mac) == [False, False], "out by the time that it sleeps"
    eventually(lambda: reasons(mac) == {"Asleep"}, what="the reason")
    assert "going to sleep" in mac.condition("MetalReady", "one")["message"]
    awake = Stopwatch(figure)
    watch.say("on")
    awake.when("wake to back", lambda: eventually(lambda: back(mac), WITHIN_S, "both to be back"))
    eventually(lambda: reasons(mac) == {"Serving"}, what="the reason")
    assert [mac.pid(name) for name in NAMES] == pids


@fault(
    "H3", "a sleep that was announced does not come", happens="every endpoint is back", sees="MetalReady Serving",
    bound="1 s",
)
def test_a_sleep_that_does_not_come_is_taken_back(mac: Mac, watch: Watch, figure: Figure) -> None:
    watch.say("will")
    watch.allowed()
    assert readiness(mac) == [False, False]
    taken = Stopwatch(figure)
    watch.say("not")
    taken.when("taken back to back", lambda: eventually(lambda: back(mac), WITHIN_S, "both to be back"))


def passed_at(mac: Mac) -> float:
    """When the sidecar last looked."""
    return float(json.loads(mac.fetch("/status")[1])["at"])


def versions(mac: Mac) -> set[str]:
    return {each["metadata"]["resourceVersion"] for each in mac.get(SLICES)["items"]}


def test_endpoints_stay_out_while_it_wakes_in_the_dark_and_sleeps_on(mac: Mac, watch: Watch, tmp_path: Path) -> None:
    with standing_in(mac, "sidecar", tmp_path):
        # Its start takes long on a busy machine, and is not to count in the time that macOS is kept waiting.
        eventually(lambda: passed_at(mac) and back(mac), 30, "it to serve under this sidecar")
        watch.say("will")
        assert watch.withdrawn()
        before = versions(mac)
        say(tmp_path, "slept", HOUR_S)
        eventually(lambda: not before & versions(mac), AWAKE_WITHIN_S, "all slices to be written anew, as after a gap")
        passed = passed_at(mac)
        eventually(lambda: passed_at(mac) > passed, what="another pass of the sidecar")
        told = json.loads(mac.fetch("/status")[1])["services"]
        assert {each["reason"] for each in told} == {"Asleep"}, "it may sleep on without a word"
        assert readiness(mac) == [False, False]
        watch.say("on")
        eventually(lambda: back(mac), AWAKE_WITHIN_S, "both to be back")


def claimed_ready(mac: Mac) -> set[str]:
    """What this Mac's claims tell its peers."""
    return {mac.get(f"{LEASES}/isvc-{name}-0")["metadata"]["annotations"][leases.READY] for name in NAMES}


def test_no_peer_stops_serving_for_a_mac_that_is_asleep(mac: Mac, watch: Watch) -> None:
    path = f"{LEASES}/{leases.node_lease_name('peer')}"
    mac.kube.apply(path, leases.node_lease_object("default", "peer", HOUR_S, {}, now_micro()), "peer")
    try:
        eventually(lambda: claimed_ready(mac) == {"true"}, AWAKE_WITHIN_S, "it to say that it serves")
        watch.say("will")
        eventually(lambda: claimed_ready(mac) == {"false"}, AWAKE_WITHIN_S, "it to say that it does not")
        watch.say("on")
        eventually(lambda: claimed_ready(mac) == {"true"}, WITHIN_S, "it to say that it does")
    finally:
        mac.kube.request("DELETE", path)


def test_a_watch_that_dies_with_its_note_in_place_keeps_nothing_out(mac: Mac, watch: Watch) -> None:
    watch.say("will")
    watch.allowed()
    assert readiness(mac) == [False, False]
    watch.close()
    assert Path(mac.state / "asleep.json").exists()
    eventually(lambda: back(mac), 5, "both to be back")


@fault(
    "W21", "the Mac sleeps while a request waits for a model on demand",
    happens="its endpoint is out meanwhile; once the Mac is awake its engine goes on loading",
    sees="an answer, later, if its connection outlasts the sleep", bound="200",
)
def test_a_wake_goes_on_after_a_sleep(tmp_path: Path) -> None:
    demanded = service("tiny")
    demanded["metadata"]["annotations"] = {"metal-supervisor.io/on-demand": "true"}
    with with_gateway(tmp_path) as gateway, ThreadPoolExecutor() as clients:
        system = gateway.system
        system.apply(system.tiny_model(), demanded)
        eventually(lambda: system.condition("MetalReady").get("reason") == "Unloaded", 30, system.said())
        with contextlib.closing(Watch(system)) as watch:
            with halted(system.own_pid("sidecar")):  # nobody finds it ready
                asked = clients.submit(gateway.chat, "tiny", timeout_s=90)
                engine = eventually(system.pid, what="its engine to load")
                os.kill(engine, signal.SIGSTOP)
            watch.say("will")
            assert watch.withdrawn() and not system.slice_ready()
            with contextlib.ExitStack() as asleep:
                for name in ("controller", "sidecar", "gateway"):
                    asleep.enter_context(halted(system.own_pid(name)))
                time.sleep(2)
            os.kill(engine, signal.SIGCONT)
            assert not asked.done()
            watch.say("on")
            assert asked.result()[0] == 200
            eventually(system.slice_ready, WITHIN_S, "its endpoint to be back")
