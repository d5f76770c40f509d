"""A Mac that is about to sleep: nobody is sent to it any more, and it takes part again when it wakes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.macs import Mac, embedded_cluster
from tests.system import ROOT, SLICES, eventually, service

WITHIN_S = 1.0
NAMES = "one", "two"


class Watch:
    """A sleepwatch of that Mac, to which the system speaks through us."""

    def __init__(self, mac: Mac) -> None:
        command = [sys.executable, "-m", "tests.iokit", str(mac.files.path)]
        with (mac.state / "log" / "sleepwatch.log").open("ab") as log:
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


def test_endpoints_are_out_before_the_mac_sleeps_and_back_once_it_is_awake(mac: Mac, watch: Watch) -> None:
    pids = [mac.pid(name) for name in NAMES]
    watch.say("can")
    assert watch.allowed() == "allowed 0\n" and back(mac), "it was only asked"
    watch.say("will")
    assert watch.allowed() == "allowed 1\n"
    assert readiness(mac) == [False, False], "out by the time that it sleeps"
    eventually(lambda: reasons(mac) == {"Asleep"}, what="the reason")
    assert "going to sleep" in mac.condition("MetalReady", "one")["message"]
    watch.say("on")
    eventually(lambda: back(mac), WITHIN_S, "both to be back")
    eventually(lambda: reasons(mac) == {"Serving"}, what="the reason")
    assert [mac.pid(name) for name in NAMES] == pids


def test_a_sleep_that_does_not_come_is_taken_back(mac: Mac, watch: Watch) -> None:
    watch.say("will")
    watch.allowed()
    assert readiness(mac) == [False, False]
    watch.say("not")
    eventually(lambda: back(mac), WITHIN_S, "both to be back")


def test_a_watch_that_dies_with_its_note_in_place_keeps_nothing_out(mac: Mac, watch: Watch) -> None:
    watch.say("will")
    watch.allowed()
    assert readiness(mac) == [False, False]
    watch.close()
    assert Path(mac.state / "asleep.json").exists()
    eventually(lambda: back(mac), 5, "both to be back")
