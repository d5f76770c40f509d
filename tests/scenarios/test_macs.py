"""Several Macs and one cluster: every replica is run once, by a Mac that lives."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.faults import Figure, fault
from tests.support.macs import LEASES, Fleet, Mac, embedded_cluster, fleet, lose
from tests.support.system import ISVC, MODELS, SLICES, eventually, kill, service

TTL_S = 4.0


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    base = tmp_path_factory.mktemp("three")
    with embedded_cluster(base) as kubeconfig, fleet(base, kubeconfig, "--lease-duration", str(TTL_S)) as found:
        for name in ("mac-a", "mac-b", "mac-c"):
            found.add(name)
        yield found


@pytest.fixture
def macs(three: Fleet) -> Iterator[Fleet]:
    """Three Macs that notice a silent one within seconds, and run nothing yet."""
    yield three
    three.empty()


def test_three_replicas_on_three_macs_are_three_ready_endpoints_of_one_service(macs: Fleet) -> None:
    first = macs.macs[0]
    first.apply(first.tiny_model(), service("tiny", replicas=3))
    eventually(lambda: len(macs.ready()) == 3, 40, "three endpoints")
    eventually(lambda: macs.status().get("phase") == "Ready", what="Ready")
    assert macs.status()["readyReplicas"] == 3
    assert {macs.holder("tiny", slot) for slot in range(3)} == {"mac-a", "mac-b", "mac-c"}
    assert first.maybe("/api/v1/namespaces/default/services/tiny") is not None
    assert [bool(mac.pid()) for mac in macs.macs] == [True] * 3

    # One Mac speaks for the Model, whoever looks at it anew: one that does not use it says nothing.
    pinned = service("pinned", "other", nodeSelector={"kubernetes.io/hostname": "mac-b"})
    first.apply(first.tiny_model("other"), pinned)
    eventually(lambda: macs.ready("pinned") == ["mac-b"], 40, "it to serve")
    eventually(lambda: first.get(f"{MODELS}/other")["status"]["phase"] == "Ready", what="the Model's status")
    version = first.get(f"{MODELS}/other")["metadata"]["resourceVersion"]
    for mac in macs.macs:
        old = mac.own_pid("sidecar")
        mac.supervisorctl("restart", "sidecar")
        eventually(lambda mac=mac, old=old: mac.own_pid("sidecar") not in (0, old), what="another sidecar")
    for mac in macs.macs:
        eventually(lambda mac=mac: mac.health()[0] == 200 and mac.observe("tiny").get("ready"), what="it to look")
    assert first.get(f"{MODELS}/other")["metadata"]["resourceVersion"] == version

    # Fewer: the Macs above give their slots back, and their endpoints with them.
    first.apply(service("tiny", replicas=1))
    eventually(lambda: len(macs.slices()) == 1, what="two Macs to let go")
    eventually(lambda: macs.status().get("readyReplicas") == 1, what="the count")
    eventually(lambda: sum(bool(mac.pid()) for mac in macs.macs) == 1, what="two engines to end")
    assert macs.ready() == [macs.holder()]


def test_a_mac_that_loses_power_is_taken_out_and_its_slot_moves(macs: Fleet) -> None:
    first = macs.macs[0]
    first.apply(first.tiny_model(), *(service(name) for name in ("tiny", "other", "third")))
    eventually(lambda: all(macs.ready(name) for name in ("tiny", "other", "third")), 40, "all to serve")
    victim = macs.holder()
    theirs = [name for name in ("tiny", "other", "third") if macs.holder(name) == victim]
    others = {name: macs.holder(name) for name in ("tiny", "other", "third") if name not in theirs}
    lose(macs.mac(victim))
    gone_at = time.monotonic()
    for name in theirs:
        eventually(lambda name=name: macs.holder(name) not in ("", victim), TTL_S + 20, f"{name} to move")
    moved_s = time.monotonic() - gone_at
    for name in theirs:
        eventually(lambda name=name: macs.ready(name) == [macs.holder(name)], 30, f"{name} to serve elsewhere only")
    assert {name: macs.holder(name) for name in others} == others
    print(f"slots moved {moved_s:.1f} s after the loss (term {TTL_S} s)")
    # It comes back: what moved stays where it is, and is served once.
    macs.mac(victim).start()
    eventually(lambda: macs.mac(victim).health()[0] == 200, what="it to be back")
    for name in theirs:
        assert macs.holder(name) != victim
        eventually(lambda name=name: macs.ready(name) == [macs.holder(name)], what="one endpoint")
        eventually(lambda name=name: macs.mac(victim).pid(name) == 0, 30, "no second engine")


def test_a_mac_that_serves_nothing_in_a_namespace_can_take_over_there(tmp_path: Path) -> None:
    """With all namespaces watched each Mac shows that it lives wherever there is something it could serve."""
    flags = ("--lease-duration", str(TTL_S), "--namespace", "")
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig, *flags) as found:
        first = found.add("mac-a")
        first.apply(first.tiny_model(), service("tiny"))
        eventually(lambda: found.ready() == ["mac-a"], 40, "it to serve")
        second = found.add("mac-b")
        eventually(lambda: second.maybe(f"{LEASES}/metal-mac-b"), what="the other Mac to show itself")
        lose(first)
        eventually(lambda: found.ready() == ["mac-b"], TTL_S + 30, "it to serve there")


def test_a_mac_that_stops_in_order_hands_over_at_once(macs: Fleet) -> None:
    first = macs.macs[0]
    first.apply(first.tiny_model(), service("tiny"))
    eventually(macs.ready, 40, "it to serve")
    holder = macs.holder()
    macs.mac(holder).stop()
    eventually(lambda: macs.holder() not in ("", holder), what="the slot to move")
    eventually(lambda: macs.ready() == [macs.holder()], 30, "it to serve there")
    macs.mac(holder).start()
    eventually(lambda: macs.mac(holder).pid() == 0, 30, "what moved to end where it was")
    assert macs.ready() == [macs.holder()] != [holder]


def test_a_mac_that_does_not_believe_its_list_yet_leaves_a_service_to_one_that_does(macs: Fleet) -> None:
    """All that it knew was replaced while it was down: this may be another cluster, until a second list says so too."""
    first = macs.macs[0]
    first.apply(first.tiny_model(), service("tiny"))
    eventually(macs.ready, 40, "it to serve")
    doubter = macs.mac(macs.holder())
    others = [mac for mac in macs.macs if mac is not doubter]
    for mac in others:
        mac.command("cordon")
    doubter.stop()
    macs.kube.request("DELETE", f"{ISVC}/tiny")
    others[0].apply(service("tiny"))
    doubter.start()
    eventually(doubter.pid, what="it to run what it ran")
    others[0].command("uncordon")
    eventually(lambda: macs.ready() == [others[0].name], 20, "the one that believes its list to serve")
    others[1].command("uncordon")
    eventually(lambda: doubter.pid() == 0, 40, "the other one to let go")


def test_draining_a_mac_moves_its_slots_without_cutting_an_answer(macs: Fleet) -> None:
    first = macs.macs[0]
    first.apply(first.tiny_model(), service("tiny", contextSize=16384))
    eventually(macs.ready, 40, "it to serve")
    holder = macs.mac(macs.holder())
    stream = holder.stream(tokens=600).last()
    assert "default.tiny has moved" in holder.command("drain")
    assert stream.completed(), f"an answer under way was cut: {stream.error}"
    assert macs.holder() not in ("", holder.name)
    assert macs.ready() == [macs.holder()]
    assert holder.pid() == 0
    events, uid = "/apis/events.k8s.io/v1/namespaces/default/events", first.get(f"{ISVC}/tiny")["metadata"]["uid"]

    def told() -> set[str]:
        return {each["reason"] for each in first.get(events)["items"] if each["regarding"]["uid"] == uid}

    eventually(lambda: "ClaimLost" in told(), what="an Event of it")
    # A cordoned Mac takes nothing, an uncordoned one does.
    assert "uncordoned" in holder.command("uncordon")
    for mac in macs.macs:
        if mac is not holder:
            assert "takes nothing new" in mac.command("cordon")
    lease = f"{LEASES}/metal-{holder.name}"
    eventually(
        lambda: "metal-supervisor.io/unschedulable" not in holder.get(lease)["metadata"]["annotations"],
        what="the Lease to say so",
    )
    first.apply(service("later"))
    eventually(lambda: macs.holder("later") == holder.name, 30, "the only open Mac to take it")
    for mac in macs.macs:
        if mac is not holder:
            mac.command("uncordon")


def test_a_node_selector_pins_a_service_to_the_mac_it_names(macs: Fleet) -> None:
    first = macs.macs[0]
    first.apply(first.tiny_model(), service("tiny", nodeSelector={"kubernetes.io/hostname": "mac-c"}))
    eventually(lambda: macs.ready() == ["mac-c"], 40, "it to serve there")
    first.apply(service("tiny", nodeSelector={"kubernetes.io/hostname": "mac-b"}))
    eventually(lambda: macs.ready() == ["mac-b"], 40, "it to move")
    eventually(lambda: macs.mac("mac-c").pid() == 0, what="the old engine to end")


@fault(
    "H2",
    "the lid of a laptop that serves is closed: macOS sleeps at once, and every process stops where it is",
    happens="its endpoint stays in the Service until its Lease has expired; then another Mac takes the service over",
    sees="requests that reach it until then hang; once awake it lets go of the service",
    bound="taken over within 20 s of the Lease's expiry, of 4 s here, 40 s by default",
)
def test_a_frozen_mac_is_replaced_and_gives_way_when_it_wakes(macs: Fleet, figure: Figure) -> None:
    first = macs.macs[0]
    first.apply(first.tiny_model(), service("tiny"))
    eventually(macs.ready, 40, "it to serve")
    sleeper = macs.mac(macs.holder())
    frozen: list[psutil.Process] = sleeper.processes()
    for process in frozen:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        with figure.timed("lid closed to taken over"):
            eventually(lambda: macs.holder() != sleeper.name, TTL_S + 20, "the slot to move")
        eventually(lambda: macs.ready() == [macs.holder()], 30, "it to serve elsewhere only")
    finally:
        for process in frozen:
            os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: sleeper.pid() == 0, 40, "the sleeper to let go")
    assert macs.holder() != sleeper.name
    eventually(lambda: macs.ready() == [macs.holder()], 30, "one endpoint")
    eventually(lambda: macs.status().get("readyReplicas") == 1, what="the count")


def test_one_mac_may_run_several_replicas_if_it_is_allowed_to(tmp_path: Path) -> None:
    flags = ("--lease-duration", str(TTL_S), "--replicas-per-mac", "2")
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig, *flags) as found:
        mac = found.add("mac-a")
        mac.apply(mac.tiny_model(), service("tiny", replicas=2))
        eventually(lambda: found.status().get("phase") == "Ready", 40, "both to serve")
        assert found.status()["readyReplicas"] == 2
        assert "default.tiny@1" in mac.supervisorctl("status")
        names = f"{SLICES}/tiny-mac-a", f"{SLICES}/tiny-mac-a-1"
        ports = {mac.get(name)["ports"][0]["port"] for name in names}
        assert len(ports) == 2 and all(mac.get(name)["endpoints"][0]["conditions"]["ready"] for name in names)
        first = mac.pid()

        # Fewer replicas end the further engine only.
        mac.apply(service("tiny", replicas=1))
        eventually(lambda: mac.maybe(names[1]) is None and len(mac.engines()) == 1, 30, "the second to end")
        assert (mac.pid(), found.holder("tiny", 0), found.holder("tiny", 1)) == (first, "mac-a", "")
        eventually(lambda: found.status().get("readyReplicas") == 1, what="the count")
        mac.apply(service("tiny", replicas=2))
        eventually(lambda: len(mac.engines()) == 2, 30, "it to be back")
        kill(max(set(mac.engines()) - {first}))
        eventually(lambda: mac.get(names[1])["endpoints"][0]["conditions"]["ready"] and len(mac.engines()) == 2, 30, "")
        assert mac.pid() == first
        mac.delete("tiny")
        eventually(lambda: not mac.engines() and found.slices() == {}, 30, "all of it to go")


def test_a_service_goes_to_a_mac_that_has_room_for_it(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig, "--lease-duration", str(TTL_S)) as macs:
        first = Mac(tmp_path / "asked", "asked", kubeconfig, 9)
        need = json.loads(first.command("fit", str(first.tiny), "--ctx", "512", "--json"))["needBytes"]
        room_for_two = "--memory-fraction", f"{2.5 * need / psutil.virtual_memory().total:.9f}"
        macs.add("mac-a", *room_for_two)
        names = [f"tiny-{number}" for number in range(5)]

        def shared_out() -> str:
            """Waits until each of two Macs serves two; the one that is left."""
            eventually(lambda: sum(bool(macs.ready(name)) for name in names) == 4, 60, "four of them to serve")
            assert Counter(macs.holder(name) for name in names if macs.ready(name)) == {"mac-a": 2, "mac-b": 2}
            (left,) = [name for name in names if not macs.ready(name)]

            def alone_in_the_queue() -> bool:
                told = macs.status(left)
                return (told.get("schedulingStatus"), told.get("queuePosition")) == ("InsufficientMemory", 1)

            eventually(alone_in_the_queue, 40, "a verdict, without those that were before it")
            return left

        # The second one comes when the first one has claimed all.
        first.apply(first.tiny_model(), *(service(name) for name in names))
        eventually(lambda: [macs.holder(name) for name in names] == ["mac-a"] * 5, 40, "all to be claimed")
        macs.add("mac-b", *room_for_two)
        shared_out()
        # Both are there.
        macs.empty()
        first.apply(*(service(name) for name in names))
        left = shared_out()
        lease = first.get(f"{LEASES}/metal-mac-a")["metadata"]["annotations"]
        assert int(lease["metal-supervisor.io/memory-left"]) < need <= int(lease["metal-supervisor.io/memory-budget"])
        assert "llama-server" in lease["metal-supervisor.io/engines"]
        assert "gguf" in lease["metal-supervisor.io/formats"].split()
        # Room appears on the other Mac, which takes what waits, then on the one that holds it.
        waits_at = macs.holder(left)
        first.delete(next(name for name in names if name != left and macs.holder(name) != waits_at))
        eventually(lambda: macs.ready(left) and macs.holder(left) != waits_at, 20, "the other Mac to serve it")
        first.apply(service("tiny-5"))
        waits_at = eventually(lambda: macs.holder("tiny-5"), 40, "one that no Mac can run to be held")
        first.delete(next(name for name in names if macs.ready(name) == [waits_at]))
        eventually(lambda: macs.ready("tiny-5") == [waits_at], 20, "it to serve where it waited")
