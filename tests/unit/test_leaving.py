"""Which services a Mac without room leaves to another one, and how often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metal_supervisor.controller import leaving
from metal_supervisor.controller.leaving import LACKING_AGAIN_S, LEAVE_S, OFFER_AGAIN_S, OFFERS_EVERY_S, Leaving
from metal_supervisor.placement.claims import Claim, NodeLease, SlotId
from metal_supervisor.placement.placement import Placed
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json, Standing
from tests.unit.test_report import record

PEER = NodeLease("default", "peer", "1", False, 40.0, "", "", 100, frozenset({"llama-server"}))


def waiting(**changes: Any) -> Record:
    found = record(Standing.WAIT, "InsufficientMemory")
    return replace(found, **{"namespace": "default", "runtime": "llama-server", "reserved_bytes": 60, **changes})


def left(
    *records: Record, written: Json | None = None, macs: tuple[NodeLease, ...] = (PEER,),
    held: dict[SlotId, Claim] | None = None,
) -> set[str]:
    services = {each.owner: written or {} for each in records}
    return {key[1] for key in Leaving().keys(records, services, Placed({}, claims=held or {}, open=macs))}


def test_what_waits_is_left_to_a_mac_with_room() -> None:
    assert left(waiting()) == {waiting().name}
    assert left(waiting(), macs=()) == left(waiting(reserved_bytes=101)) == set()


def test_what_waits_is_not_left_to_a_mac_that_holds_another_replica_of_it() -> None:
    slot = (*waiting().owner, 0)
    held = {slot: Claim(slot, PEER.node, "1", "u", "t", True)}
    assert left(waiting(slot=1), held=held) == set()
    assert left(waiting(slot=1), held=held, macs=(PEER, replace(PEER, node="third"))) == {waiting().name}


def test_the_first_in_the_queue_is_left_first() -> None:
    queue = [waiting(name=name, queue_position=place) for name, place in (("second", 2), ("first", 1))]
    assert left(*queue) == {"first"}


@pytest.mark.parametrize("changes", [
    {"verdict": replace(waiting().verdict, standing=Standing.RUN)},
    {"verdict": replace(waiting().verdict, reason="MemoryPressure")},
    {"limit_bytes": 59},
    {"idle_s": 60.0, "queue_position": 1},
])  # fmt: skip
def test_what_lacks_something_else_or_runs_stays(changes: dict[str, Any]) -> None:
    assert left(waiting(**changes)) == set()


@pytest.mark.parametrize(("reason", "goes"), [("RuntimeBinaryMissing", True), ("ModelFileMissing", True),
                                               ("InvalidSpec", False), ("SourceNotFound", False)])  # fmt: skip
def test_what_fails_for_something_that_this_mac_lacks_is_left_to_one_with_an_engine(reason: str, goes: bool) -> None:
    """The first Mac after a power cut claims all services, also those that only another one can run."""
    failed = replace(record(Standing.FAILED, reason), namespace="default", runtime="llama-server", reserved_bytes=0)

    def left_to(mac: NodeLease) -> set[str]:
        kept = Leaving()
        assert not kept.keys([failed], {}, Placed({}))
        return {key[1] for key in kept.keys([failed], {}, Placed({}, open=(mac,)))}

    assert left_to(PEER) == ({failed.name} if goes else set())
    assert left_to(replace(PEER, engines=frozenset({"omlx"}))) == set()


def test_what_no_mac_took_for_lack_of_something_is_not_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelled file would go from Mac to Mac."""
    records = [replace(record(Standing.FAILED, "ModelFileMissing"), runtime="llama-server")]
    now, kept = [0.0], Leaving()
    monkeypatch.setattr(leaving.time, "monotonic", lambda: now[0])
    mac, is_left = replace(PEER, namespace=records[0].namespace), []
    for at in (0.0, OFFERS_EVERY_S, LACKING_AGAIN_S - 1, LACKING_AGAIN_S):
        now[0] = at
        is_left.append(bool(kept.keys(records, {}, Placed({}, open=(mac,)))))
    assert is_left == [False, False, False, True]


def test_a_pinned_service_stays_and_so_does_one_with_another_engine_here() -> None:
    assert left(waiting(), written={"spec": {"nodeSelector": {"a": "b"}}}) == set()
    assert left(waiting(), written={"spec": ["no", "object"]}) == {waiting().name}
    assert left(waiting(), waiting(ordinal=1)) == set()


def test_others_are_left_once_leases_can_say_what_the_first_ones_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now, kept, records = [0.0], Leaving(), [waiting(name="first", queue_position=1)]
    monkeypatch.setattr(leaving.time, "monotonic", lambda: now[0])
    found = []
    for at in (0.0, OFFERS_EVERY_S - 1, OFFERS_EVERY_S):
        now[0] = at
        found.append({key[1] for key in kept.keys(records, {}, Placed({}, open=(PEER,)))})
        records = [waiting(name="second", queue_position=1)]
    assert found == [{"first"}, set(), {"second"}]


def test_one_that_nobody_took_waits_here_before_it_is_left_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, kept, records = [0.0], Leaving(), [waiting()]
    monkeypatch.setattr(leaving.time, "monotonic", lambda: now[0])
    is_left = []
    for at in (0.0, LEAVE_S - 1, LEAVE_S, OFFER_AGAIN_S - 1, OFFER_AGAIN_S):
        now[0] = at
        is_left.append(bool(kept.keys(records, {}, Placed({}, open=(PEER,)))))
    assert is_left == [True, True, False, False, True]
