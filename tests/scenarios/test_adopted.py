"""Engines that outlive a killed supervisord stay in rotation: no edition of a slice or a status says anything else."""

from __future__ import annotations

from pathlib import Path

from tests.support import effort
from tests.support.engines import events
from tests.support.faults import Figure, fault
from tests.support.macs import embedded_cluster, fleet
from tests.support.system import eventually, kill, running, service
from tests.support.transitions import supervisord_killed, unmoved

NAMES = ["one", "two", "three"]


@fault(
    "S49b",
    "kill -9 of supervisord, three times, beside three engines; a watch records every edition",
    happens="the engines are adopted, and are taken for what they were until a probe fails",
    sees="nothing: endpoints stay ready, services Ready",
    bound="0 editions that say otherwise",
)
def test_adopted_engines_stay_published_and_ready_in_a_cluster(tmp_path: Path, figure: Figure) -> None:
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig) as macs:
        mac = macs.add("mac-a")
        mac.apply(mac.tiny_model(), *(service(name, "tiny") for name in NAMES))
        for name in NAMES:
            mac.ready(name)
        with unmoved(mac):
            supervisord_killed(mac, NAMES)
        figure.add("editions that say otherwise", 0, "")


def test_adopted_engines_stay_published_and_ready_though_the_embedded_api_was_killed_too(tmp_path: Path) -> None:
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), *(service(name, "tiny") for name in NAMES))
        for name in NAMES:
            system.ready(name)
        with unmoved(system, gaps=True):
            supervisord_killed(system, NAMES, times=3 if effort.ALL else 1)
        kill(system.pid(NAMES[0]))
        eventually(lambda: "exit status unknown" in events(system, NAMES[0]).get("Crashed", ""), 30, "an Event")
