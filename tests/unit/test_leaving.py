"""Which services a Mac without room leaves to another one, and how often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metal_supervisor.controller import leaving
from metal_supervisor.controller.leaving import LACKING_AGAIN_S, LEAVE_S, OFFER_AGAIN_S, OFFERS_EVERY_S, Leaving
from metal_supervisor.placement.leases import Claim, NodeLease, SlotId
from metal_supervisor.placement.placement import Placed
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json, Service, Standing
from tests.unit.model_supervisord import asked_for
from tests.unit.test_report import record

ITEM = asked_for("a", 0, False)
PEER = NodeLease("default", "peer", False, 40.0, "", "", 100, frozenset({"llama-server"}))


def waiting(**changes: Any) -> Record:
    found = record(Standing.WAIT, "InsufficientMemory")
    return replace(found, **{"namespace": "default", "runtime": "llama-server", "reserved_bytes": 60, **changes})


def left(
    *records: Record,
    written: Json | None = None,
    macs: tuple[NodeLease, ...] = (PEER,),
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


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": replace(waiting().verdict, standing=Standing.RUN)},
        {"verdict": replace(waiting().verdict, reason="MemoryPressure")},
        {"limit_bytes": 59},
        {"idle_s": 60.0, "queue_position": 1},
    ],
)
def test_what_lacks_something_else_or_runs_stays(changes: dict[str, Any]) -> None:
    assert left(waiting(**changes)) == set()


@pytest.mark.parametrize(
    ("reason", "goes"),
    [("RuntimeBinaryMissing", True), ("ModelFileMissing", True), ("InvalidSpec", False), ("SourceNotFound", False)],
)
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


def lacking(kept: Leaving, reason: str, item: Service, standing: Standing = Standing.FAILED) -> bool:
    """Whether a service is left in a pass in which a Mac with an engine for it is there."""
    verdict = record(standing, reason).verdict
    found = replace(waiting(verdict=verdict, reserved_bytes=0), namespace=item.namespace, name=item.name)
    mac = replace(PEER, namespace=item.namespace)
    return bool(kept.keys([found], {}, Placed({}, open=(mac,)), {found.owner: item}))


def test_a_full_disk_is_left_at_once_as_no_mac_knows_of_it_before_it_claims() -> None:
    kept = Leaving()
    assert not lacking(kept, "Downloading", ITEM, Standing.WAIT)
    assert lacking(kept, "InsufficientDisk", ITEM)


def test_what_was_off_when_it_was_claimed_is_left_at_once_as_no_mac_had_to_have_its_file() -> None:
    kept = Leaving()
    assert not lacking(kept, "ManuallyScaledToZero", ITEM, Standing.STOPPED)
    assert lacking(kept, "ModelFileMissing", ITEM)


def test_an_edit_is_left_to_other_macs_though_what_was_asked_before_it_may_not_be_yet() -> None:
    """As of a misspelled path, which no Mac has, to one that another Mac has."""
    kept = Leaving()
    assert [lacking(kept, "ModelFileMissing", ITEM) for _ in range(2)] == [False, False]
    edited = replace(ITEM, extra_args=("--other",), generation=ITEM.generation + 1)
    assert not lacking(kept, "Checking", edited, Standing.WAIT)
    assert lacking(kept, "ModelFileMissing", edited)


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


def test_an_on_demand_service_that_fits_no_mac_does_not_move_with_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now, kept, is_left = [0.0], Leaving(), []
    monkeypatch.setattr(leaving.time, "monotonic", lambda: now[0])
    never = waiting(idle_s=60.0, reserved_bytes=101)
    for at in (0.0, LEAVE_S, OFFERS_EVERY_S, OFFER_AGAIN_S - 1, OFFER_AGAIN_S):
        now[0] = at
        is_left.append(bool(kept.keys([never], {}, Placed({}, open=(PEER,)))))
    assert is_left == [True, False, False, False, True]
    assert left(never, macs=()) == left(never, macs=(replace(PEER, engines=frozenset()),)) == set()
    assert left(never, written={"spec": {"nodeSelector": {"a": "b"}}}) == set()
