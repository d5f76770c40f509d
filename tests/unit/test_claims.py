"""Claims: which slot is whose, decided from Leases alone."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from metal_supervisor.placement import claims, leases, peers, placement
from metal_supervisor.placement.claims import Ask, Life
from metal_supervisor.placement.leases import Claim, ClaimAction, LeaseReader, Move, NodeLease
from metal_supervisor.placement.peers import Sighting

NS = "llm"
KEY = (NS, "tiny")
ME = "mac-a"
PEER = "mac-b"
ALIVE = {(NS, ME): Life.LIVE, (NS, PEER): Life.LIVE}
NOW = 1000.0


def ask(**changes: Any) -> Ask:
    return Ask(**{"uid": "u1", "slots": 1, **changes})


def claim(holder: str, index: int = 0, **changes: Any) -> Claim:
    slot = (*KEY, index)
    return Claim(
        **{
            "slot": slot,
            "holder": holder,
            "version": "7",
            "owner_uid": "u1",
            "acquired": "t",
            "ready": False,
            **changes,
        }
    )


def decide(
    *held: Claim,
    asked: Ask | None = None,
    lives: dict[tuple[str, str], Life] | None = None,
    accepting: bool = True,
    waiting: dict[leases.SlotId, float] | None = None,
    not_ours: tuple[tuple[str, str], ...] = (),
    now: float = NOW,
    delay_s: float | None = 0.0,
) -> claims.ClaimDecision:
    asks = {} if not_ours else {KEY: asked or ask()}
    found = {each.slot: each for each in held}
    lives = ALIVE if lives is None else lives
    return claims.decide(asks, lambda _: delay_s, found, lives, ME, accepting, waiting or {}, now, not_ours)


def kinds(decision: claims.ClaimDecision) -> list[tuple[ClaimAction, int]]:
    return [(move.do, move.slot[2]) for move in decision.moves]


# ── one pass ─────────────────────────────────────────────────────────────────────────────────────


def test_a_mac_that_is_alone_claims_at_once() -> None:
    found = decide(lives={(NS, ME): Life.LIVE}, delay_s=8.0)
    assert kinds(found) == [(ClaimAction.CLAIM, 0)]
    assert found.mine == {}, "a claim is ours only once it is on the server"


def test_far_more_replicas_than_there_are_macs_are_not_all_looked_at() -> None:
    """A cluster whose CRD has no maximum takes 2147483647 of them."""
    found = decide(asked=ask(slots=100_000), delay_s=8.0)
    assert len(found.waiting) == claims.MOST_SLOTS
    assert kinds(decide(asked=ask(slots=100_000), waiting={(*KEY, 0): NOW - 60})) == [(ClaimAction.CLAIM, 0)]


def test_a_mac_does_not_take_itself_for_alone_before_its_own_lease_is_seen() -> None:
    """With a namespace's first services no Mac has a Lease there: each would claim them all, room or not."""
    found = decide(lives={}, delay_s=8.0)
    assert found.moves == () and found.again_in_s is not None and found.again_in_s >= 8.0


def test_what_a_mac_cannot_run_is_marked_for_others_and_kept_until_one_takes_it() -> None:
    """Released, it would be held by no Mac if none can run it, and no status would name the reason."""
    asked = ask(unable=frozenset({0}))
    found = decide(claim(ME), asked=asked)
    assert [(move.do, move.unable) for move in found.moves] == [(ClaimAction.UPDATE, True)]
    assert found.mine == {KEY: (0,)}
    assert decide(claim(ME, unable=True), asked=asked).moves == ()
    assert decide(claim(ME), asked=asked, lives={(NS, ME): Life.LIVE}).moves == (), "no Mac reads it"
    (runs,) = decide(claim(ME, unable=True)).moves
    assert (runs.do, runs.unable) == (ClaimAction.UPDATE, False)


def test_what_its_holder_cannot_run_is_taken_by_a_mac_that_can() -> None:
    marked, waited = claim(PEER, unable=True), {(*KEY, 0): NOW - 60.0}
    (move,) = decide(marked, waiting=waited).moves
    assert (move.do, move.version, move.unable) == (ClaimAction.TAKE, "7", False)
    assert decide(marked, delay_s=None, waiting=waited).moves == ()
    assert decide(claim(PEER), waiting=waited).moves == ()


@pytest.mark.parametrize(("life", "taken"), [(Life.SILENT, True), (Life.DRAINING, False)])
def test_a_mac_takes_over_what_it_cannot_run_only_if_no_other_reports_on_it(life: Life, taken: bool) -> None:
    lives = {(NS, ME): Life.LIVE, (NS, PEER): life, (NS, "third"): Life.LIVE}
    assert decide(claim(PEER), delay_s=None, lives=lives, waiting={(*KEY, 0): NOW - 7.0}).moves == ()
    later = decide(claim(PEER), delay_s=None, lives=lives, waiting={(*KEY, 0): NOW - 9.0})
    assert kinds(later) == ([(ClaimAction.TAKE, 0)] if taken else [])


def test_what_no_mac_can_run_is_claimed_last_by_one_that_reports_the_reason() -> None:
    first = decide(delay_s=None, waiting={(*KEY, 0): NOW - 7.0})
    assert first.moves == () and first.again_in_s is not None and first.again_in_s >= claims.CANNOT_S - 7.0
    assert kinds(decide(delay_s=None, waiting={(*KEY, 0): NOW - 9.0})) == [(ClaimAction.CLAIM, 0)]


def test_among_several_one_that_has_to_fetch_the_model_holds_back() -> None:
    first = decide(delay_s=2.0)
    assert first.moves == ()
    assert first.again_in_s is not None and 2.0 <= first.again_in_s <= 2.2
    assert first.waiting == {(*KEY, 0): NOW}
    later = decide(delay_s=2.0, waiting=dict(first.waiting), now=NOW + 2.3)
    assert kinds(later) == [(ClaimAction.CLAIM, 0)]


def test_what_is_held_is_kept_and_not_asked_for_again() -> None:
    found = decide(claim(ME))
    assert (found.mine, found.moves, found.again_in_s) == ({KEY: (0,)}, (), None)


def test_a_slot_of_a_live_mac_is_left_alone() -> None:
    found = decide(claim(PEER))
    assert (found.mine, found.moves, found.again_in_s) == ({}, (), None)


@pytest.mark.parametrize("life", [Life.SILENT, Life.DRAINING])
def test_a_slot_of_one_that_is_not_to_be_relied_on_is_taken_over_by_version(life: Life) -> None:
    lives = {(NS, ME): Life.LIVE, (NS, PEER): life}
    found = decide(claim(PEER), lives=lives, waiting={(*KEY, 0): NOW - 1})
    assert [(move.do, move.version) for move in found.moves] == [(ClaimAction.TAKE, "7")]


def test_a_mac_takes_back_what_it_serves_and_its_holder_does_not() -> None:
    """It was away for a while, and the other Mac has no room: else it would serve for ever what another one holds."""
    serving, waited = ask(ready=frozenset({0})), {(*KEY, 0): NOW - claims.BACK_S}
    assert decide(claim(PEER), asked=serving, delay_s=8.0).moves == (), "its holder may be about to serve it"
    (move,) = decide(claim(PEER), asked=serving, delay_s=8.0, waiting=waited).moves
    assert (move.do, move.version, move.ready) == (ClaimAction.TAKE, "7", True)
    assert decide(claim(PEER, ready=True), asked=serving, delay_s=8.0, waiting=waited).moves == ()
    assert decide(claim(PEER), asked=serving, delay_s=8.0, waiting=waited, accepting=False).moves == ()
    assert kinds(decide(asked=serving, delay_s=8.0)) == [(ClaimAction.CLAIM, 0)], "its claim was deleted"
    dead = {(NS, ME): Life.LIVE, (NS, PEER): Life.SILENT, (NS, "third"): Life.LIVE}
    assert kinds(decide(claim(PEER), asked=serving, delay_s=8.0, lives=dead)) == [(ClaimAction.TAKE, 0)]


def test_a_mac_that_its_peers_take_for_dead_takes_nothing_back() -> None:
    """They would take it over again at once: with its sidecar stopped, a slot went to and fro every five seconds."""
    serving, lives = ask(ready=frozenset({0})), {(NS, ME): Life.SILENT, (NS, PEER): Life.LIVE}
    decision = decide(claim(PEER), asked=serving, lives=lives, waiting={(*KEY, 0): NOW - 60.0})
    assert decision.moves == () and decision.again_in_s == claims.BACK_S
    again = decide(claim(PEER), asked=serving, waiting=dict(decision.waiting), now=NOW + claims.BACK_S)
    assert kinds(again) == [(ClaimAction.TAKE, 0)]


def test_a_claim_made_for_an_earlier_object_of_the_name_is_void() -> None:
    found = decide(claim(PEER, owner_uid="u0"), waiting={(*KEY, 0): NOW - 1})
    assert kinds(found) == [(ClaimAction.TAKE, 0)]
    ours = decide(claim(ME, owner_uid="u0"))
    assert ours.mine == {KEY: (0,)} and kinds(ours) == [(ClaimAction.TAKE, 0)]


@pytest.mark.parametrize("serving", [ME, PEER, ""])
@pytest.mark.parametrize("uids", [("u1", "u2"), ("u2", "u1")])
@pytest.mark.parametrize("times", [("2026-01-01T00:00:00Z", "2026-01-01T00:00:09Z"), ("2026-01-01T00:00:00Z",) * 2])
def test_macs_that_see_different_objects_of_the_name_do_not_take_a_slot_from_each_other(
    serving: str, uids: tuple[str, str], times: tuple[str, str]
) -> None:
    """One had not heard yet that it was deleted and created again: 40 requests a second, until it had."""
    older, newer = (
        {node: ask(uid=uid, created=at, ready=frozenset({0} if node == serving else ())) for node in (ME, PEER)}
        for uid, at in zip(uids, times, strict=True)
    )
    server, waiting, now = Server(), dict[str, Any]({ME: {}, PEER: {}}), NOW

    def moved(seen: dict[str, Ask], seconds: int) -> int:
        nonlocal now
        count = 0
        for _, node in itertools.product(range(seconds * 20), (ME, PEER)):
            now += 0.025
            found = claims.decide(
                {KEY: seen[node]}, lambda _: 0.0, dict(server.slots), ALIVE, node, True, waiting[node], now
            )
            waiting[node], count = found.waiting, count + len(found.moves)
            for move in found.moves:
                server.perform(node, move)
        return count

    assert moved(older, 10) <= 3
    assert moved({ME: newer[ME], PEER: older[PEER]}, 30) <= 3
    assert moved(newer, 10) <= 3
    (settled,) = server.slots.values()
    assert settled.owner_uid == uids[1] and moved(newer, 10) == 0


def test_a_claim_of_an_earlier_release_says_nothing_about_the_age_of_its_object() -> None:
    asked, waited = ask(created="2026-01-01T00:00:00Z"), {(*KEY, 0): NOW - 1}
    assert decide(claim(PEER), asked=asked, waiting=waited).moves == ()
    assert kinds(decide(claim(PEER, owner_uid="u2"), asked=asked, waiting=waited)) == [(ClaimAction.TAKE, 0)]


def test_a_cordoned_mac_keeps_what_it_has_and_takes_nothing() -> None:
    assert decide(claim(ME), accepting=False).mine == {KEY: (0,)}
    assert decide(accepting=False).moves == ()
    assert decide(claim(PEER), accepting=False, lives={(NS, PEER): Life.SILENT}).moves == ()


def test_a_mac_holds_one_slot_of_a_service_and_takes_the_next_free_one() -> None:
    found = decide(claim(PEER), asked=ask(slots=3), waiting={(*KEY, 1): NOW - 1})
    assert kinds(found) == [(ClaimAction.CLAIM, 1)]
    assert decide(claim(PEER), claim(ME, 1), asked=ask(slots=3)).moves == ()


def test_fewer_replicas_give_the_slots_above_back() -> None:
    found = decide(claim(PEER), claim(ME, 2), asked=ask(slots=1))
    assert found.mine == {} and kinds(found) == [(ClaimAction.RELEASE, 2)]
    assert found.moves[0].version == "7"


def test_a_second_slot_of_the_same_service_is_given_back() -> None:
    found = decide(claim(ME, 0), claim(ME, 1), asked=ask(slots=2))
    assert found.mine == {KEY: (0,)} and kinds(found) == [(ClaimAction.RELEASE, 1)]


def test_a_mac_may_be_allowed_several_slots_and_leaves_them_to_others_first() -> None:
    def of(*held: Claim, lives: dict[tuple[str, str], Life] = ALIVE, waited: float = 0.0) -> claims.ClaimDecision:
        found, waiting = {each.slot: each for each in held}, {(*KEY, index): NOW - waited for index in range(3)}
        return claims.decide({KEY: ask(slots=3)}, lambda _: 0.0, found, lives, ME, True, waiting, NOW, most=2)

    assert kinds(of(lives={(NS, ME): Life.LIVE})) == [(ClaimAction.CLAIM, 0), (ClaimAction.CLAIM, 1)], (
        "alone: both at once"
    )
    assert kinds(of(waited=0.2)) == [(ClaimAction.CLAIM, 0)]
    assert kinds(of(claim(ME), waited=2.0)) == []
    assert kinds(of(claim(ME), waited=3.2)) == [(ClaimAction.CLAIM, 1)]
    both = of(claim(ME), claim(ME, 1), waited=9.0)
    assert both.mine == {KEY: (0, 1)} and both.moves == ()
    assert kinds(of(claim(ME), claim(ME, 1), claim(ME, 2), waited=9.0)) == [(ClaimAction.RELEASE, 2)]


def test_what_is_no_longer_for_this_mac_is_given_back() -> None:
    assert kinds(decide(claim(ME), not_ours=(KEY,))) == [(ClaimAction.RELEASE, 0)]
    assert decide(claim(PEER), not_ours=(KEY,)).moves == ()


def test_readiness_is_told_only_where_somebody_may_read_it() -> None:
    alone = {(NS, ME): Life.LIVE}
    assert decide(claim(ME), asked=ask(ready=frozenset({0})), lives=alone).moves == ()
    assert kinds(decide(claim(ME), asked=ask(ready=frozenset({0})))) == [(ClaimAction.UPDATE, 0)]
    assert kinds(decide(claim(ME), asked=ask(ready=frozenset({0}), slots=2), lives=alone)) == [(ClaimAction.UPDATE, 0)]
    told = decide(claim(ME, ready=True), asked=ask(ready=frozenset({0})), lives=alone)
    assert told.moves == (), "what is told stays told"
    assert kinds(decide(claim(ME, ready=True), lives=alone)) == [(ClaimAction.UPDATE, 0)]


def test_peers_that_live_and_serve_are_counted() -> None:
    holders = (ME, PEER, "dead")
    held = {(*KEY, index): claim(holder, index, ready=True) for index, holder in enumerate(holders)}
    lives = {**ALIVE, (NS, "dead"): Life.SILENT}
    assert claims.peers_ready(held.values(), lives, ME, 3) == 1
    assert claims.peers_ready(held.values(), {**lives, (NS, PEER): Life.DRAINING}, ME, 3) == 1
    assert claims.peers_ready(held.values(), lives, ME, 1) == 0, "slots above the replicas do not count"


# ── who lives ────────────────────────────────────────────────────────────────────────────────────


def lease(node: str, **changes: Any) -> NodeLease:
    return NodeLease(
        **{
            "namespace": NS,
            "node": node,
            "released": False,
            "duration_s": 40.0,
            "unschedulable": "",
            "session": "s",
            **changes,
        }
    )


def judge(peer_at: float, own_at: float | None, connected_at: float = 0.0, **changes: Any) -> Life:
    nodes = {(NS, PEER): lease(PEER, **changes)}
    seen = {(NS, leases.node_lease_name(PEER)): Sighting("1", peer_at)}
    if own_at is not None:
        nodes[NS, ME] = lease(ME)
        seen[NS, leases.node_lease_name(ME)] = Sighting("9", own_at)
    return peers.judge({}, nodes, seen, ME, connected_at, 40.0)[NS, PEER]


def test_silence_counts_only_as_far_as_our_own_renewals_are_seen() -> None:
    assert judge(peer_at=100, own_at=139) is Life.LIVE
    assert judge(peer_at=100, own_at=140) is Life.SILENT
    assert judge(peer_at=100, own_at=101) is Life.LIVE, "a watch that hangs, a Mac that sleeps: no evidence"
    assert judge(peer_at=100, own_at=None) is Life.LIVE


def test_a_mac_whose_own_renewals_are_not_seen_counts_as_silent_itself() -> None:
    nodes, seen = {(NS, ME): lease(ME)}, {(NS, leases.node_lease_name(ME)): Sighting("9", 100.0)}
    for now, life in ((139.0, Life.LIVE), (140.0, Life.SILENT)):
        assert peers.judge({}, nodes, seen, ME, 0.0, 40.0, now=now)[NS, ME] is life


def test_after_an_outage_peers_have_a_whole_term_to_come_back() -> None:
    nodes = {(NS, name): lease(name) for name in (ME, PEER)}
    seen = {(NS, leases.node_lease_name(PEER)): Sighting("1", 100.0)}
    for own_at, life in ((150.0, Life.LIVE), (189.0, Life.LIVE), (190.0, Life.SILENT)):
        seen[NS, leases.node_lease_name(ME)] = Sighting("9", own_at)
        assert peers.judge({}, nodes, seen, ME, 0.0, 40.0, {NS: 150.0})[NS, PEER] is life
    assert peers.judge({}, nodes, seen, ME, 0.0, 40.0, {"other": 150.0})[NS, PEER] is Life.SILENT


def test_a_new_connection_gives_everybody_a_whole_term() -> None:
    assert judge(peer_at=100, own_at=500, connected_at=499) is Life.LIVE
    assert judge(peer_at=100, own_at=540, connected_at=499) is Life.SILENT


def test_who_says_so_is_gone_at_once_or_draining() -> None:
    assert judge(peer_at=100, own_at=None, released=True) is Life.SILENT
    assert judge(peer_at=100, own_at=101, unschedulable="drain") is Life.DRAINING
    assert judge(peer_at=100, own_at=101, unschedulable="cordon") is Life.LIVE
    assert judge(peer_at=100, own_at=141, unschedulable="drain") is Life.SILENT


def test_a_peer_is_looked_at_again_when_it_may_be_silent_and_every_second_once_it_is_overdue() -> None:
    nodes, seen = (
        {(NS, ME): lease(ME), (NS, PEER): lease(PEER)},
        {
            (NS, leases.node_lease_name(ME)): Sighting("9", 100.0),
            (NS, leases.node_lease_name(PEER)): Sighting("1", 90.0),
        },
    )
    assert peers.next_silence_s(nodes, ALIVE, seen, ME, 0.0, 110.0) == 20.0
    assert peers.next_silence_s(nodes, ALIVE, seen, ME, 105.0, 110.0) == 35.0, "a new connection gives a whole term"
    assert peers.next_silence_s(nodes, ALIVE, seen, ME, 0.0, 135.0) == peers.OVERDUE_AGAIN_S
    silent = {**ALIVE, (NS, PEER): Life.SILENT}
    assert peers.next_silence_s(nodes, silent, seen, ME, 0.0, 135.0) is None


def test_each_live_mac_has_another_turn_to_withdraw_a_silent_one() -> None:
    nodes = [f"mac-{index}" for index in range(9)]
    lives = {**{(NS, node): Life.LIVE for node in nodes}, (NS, "gone"): Life.SILENT, ("other", "mac-x"): Life.LIVE}
    turns = {peer: [peers.turn(lives, node, (NS, peer)) for node in nodes] for peer in ("gone", "late")}
    assert all(sorted(found) == list(range(9)) for found in turns.values())
    assert turns["gone"] != turns["late"], "not one Mac for all"
    first = nodes[turns["gone"].index(0)]
    assert 0 in [peers.turn({**lives, (NS, first): Life.SILENT}, node, (NS, "gone")) for node in nodes if node != first]


def test_equal_macs_ask_for_different_slots_first() -> None:
    asks = {(NS, f"svc-{index}"): ask() for index in range(50)}
    waiting = {(*key, 0): NOW - 0.06 for key in asks}
    first = {
        node: claims.decide(
            asks, lambda _: 0.0, {}, {(NS, node): Life.LIVE, (NS, PEER): Life.LIVE}, node, True, waiting, NOW
        ).moves[0]
        for node in ("mac-1", "mac-2", "mac-3", "mac-4")
    }
    assert len({move.slot for move in first.values()}) > 2


def test_a_holder_without_a_node_lease_is_believed_for_a_term() -> None:
    held = {(*KEY, 0): claim("ghost")}

    def life(own_at: float) -> Life:
        seen = {
            (NS, leases.node_lease_name("ghost")): Sighting("", 100.0),
            (NS, leases.node_lease_name(ME)): Sighting("9", own_at),
        }
        return peers.judge(held, {(NS, ME): lease(ME)}, seen, ME, 0.0, 40.0)[NS, "ghost"]

    assert (life(139.0), life(140.0)) == (Life.LIVE, Life.SILENT)


def test_a_mac_whose_node_lease_is_deleted_is_believed_for_a_term_however_old_its_claims_are() -> None:
    def written(lease: dict[str, Any], version: int) -> dict[str, Any]:
        lease["metadata"]["resourceVersion"] = str(version)
        return lease

    theirs = written(leases.claim_object(Move(ClaimAction.CLAIM, (NS, "tiny", 0), "u1"), PEER, "t"), 7)
    own, peer = (leases.node_lease_object(NS, name, 40.0, {}, "t") for name in (ME, PEER))
    seen: dict[tuple[str, str], Sighting] = {}

    def life(at: float, *others: dict[str, Any]) -> Life:
        nonlocal seen
        found = {(NS, each["metadata"]["name"]): each for each in (theirs, written(own, int(at)), *others)}
        held, nodes = LeaseReader().read(found.values())
        seen = peers.sight(seen, found, at, missing=peers.without_lease(held, nodes))
        return peers.judge(held, nodes, seen, ME, 1.0, 40.0)[NS, PEER]

    assert [life(at, written(peer, int(at))) for at in (10.0, 500.0)] == [Life.LIVE] * 2
    assert [life(at) for at in (501.0, 540.0, 541.0)] == [Life.LIVE, Life.LIVE, Life.SILENT]
    assert life(542.0, written(peer, 542)) is Life.LIVE
    assert life(543.0) is Life.LIVE, "another term"


# ── to and from Leases ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["tiny", "qwen2.5-7b", "a" * 253, "x-1"])
def test_a_claim_is_read_back_as_it_was_written(name: str) -> None:
    move = Move(ClaimAction.CLAIM, (NS, name, 12), "u1", ready=True, created="2026-11-20T01:40:00Z", unable=True)
    body = leases.claim_object(move, ME, "2026-11-21T01:40:00.000000Z")
    body["metadata"]["resourceVersion"] = "5"
    assert len(body["metadata"]["name"]) <= 253
    assert all(len(value) <= 63 for value in body["metadata"]["labels"].values())
    found, nodes = LeaseReader().read([body])
    assert nodes == {}
    assert found == {
        (NS, name, 12): Claim((NS, name, 12), ME, "5", "u1", "2026-11-21T01:40:00.000000Z", True, move.created, True)
    }
    assert "resourceVersion" not in leases.claim_object(move, ME, "t")["metadata"], "nobody's slot has no version"
    take = Move(ClaimAction.TAKE, (NS, name, 12), "u1", "5")
    assert leases.claim_object(take, ME, "t")["metadata"]["resourceVersion"] == "5"


def test_a_node_lease_is_read_back_and_a_release_says_so() -> None:
    body = leases.node_lease_object(NS, ME, 40.0, {leases.SESSION: "s1", leases.UNSCHEDULABLE: "drain"}, "t")
    assert body["spec"] == {"holderIdentity": ME, "leaseDurationSeconds": 40, "renewTime": "t"}
    assert LeaseReader().read([body])[1][NS, ME] == NodeLease(NS, ME, False, 40.0, "drain", "s1")
    gone = leases.node_lease_object(NS, ME, 0.0, {}, "t")
    assert gone["spec"]["holderIdentity"] == ""
    assert LeaseReader().read([gone])[1][NS, ME].released


@pytest.mark.parametrize(
    "damage",
    [
        {"labels": None},
        {"ownerReferences": []},
        {"name": "isvc-other-0"},
        {"name": "isvc-tiny-x"},
        {"annotations": None},
    ],
)
def test_a_damaged_lease_harms_nobody(damage: dict[str, Any]) -> None:
    body = leases.claim_object(Move(ClaimAction.CLAIM, (NS, "tiny", 0), "u1"), ME, "t")
    body["metadata"].update(damage)
    body["spec"] = None
    found, nodes = LeaseReader().read([body])
    assert nodes == {} and all(each.holder == "" for each in found.values())


def test_a_claim_that_lost_its_owner_is_mended_by_its_holder() -> None:
    """Its slot cannot be claimed anew, because the Lease exists."""
    body = leases.claim_object(Move(ClaimAction.CLAIM, (*KEY, 0), "u1"), ME, "t")
    del body["metadata"]["ownerReferences"]
    (found,) = LeaseReader().read([body])[0].values()
    assert (found.slot, found.holder, found.owner_uid) == ((*KEY, 0), ME, "")
    assert kinds(decide(found)) == [(ClaimAction.TAKE, 0)]


def test_leases_that_come_change_and_go_are_read_as_they_are_now() -> None:
    reader, found, generator = LeaseReader(), dict[int, dict[str, Any]](), random.Random(1)
    for version in range(2000):
        slot = generator.randrange(20)
        body = leases.claim_object(Move(ClaimAction.CLAIM, (NS, "tiny", slot), "u1"), ME, "t")
        body["metadata"]["resourceVersion"] = str(version)
        found.pop(slot, None)
        if generator.random() < 0.7:
            found[slot] = {**body}  # takes the id of the removed one if that is free
        if generator.random() < 0.3:
            assert reader.read(found.values()) == LeaseReader().read(found.values())


def test_a_renewal_is_told_from_what_a_mac_has_to_say() -> None:
    def at(time: str, version: str, duration_s: float = 40.0, **notes: str) -> dict[str, Any]:
        body = leases.node_lease_object(NS, PEER, duration_s, {leases.SESSION: "s", **notes}, time)
        body["metadata"]["resourceVersion"] = version
        return body

    assert peers.is_renewal(at("t1", "1"), at("t2", "2", **{"metal-supervisor.io/memory-left": "5"}))
    for said in ({leases.SESSION: "other"}, {leases.UNSCHEDULABLE: "drain"}):
        assert not peers.is_renewal(at("t1", "1"), at("t2", "2", **said))
    assert not peers.is_renewal(at("t1", "1"), at("t2", "2", duration_s=0.0)), "a release"
    held = leases.claim_object(Move(ClaimAction.CLAIM, (NS, "tiny", 0), "u1"), PEER, "t")
    assert not peers.is_renewal(held, held), "a claim is decided from by its version"


def test_a_sighting_lasts_as_long_as_the_version() -> None:
    one = {(NS, "l"): {"metadata": {"resourceVersion": "1"}}}
    two = {(NS, "l"): {"metadata": {"resourceVersion": "2"}}}
    first = peers.sight({}, one, 1.0)
    assert peers.sight(first, one, 2.0) == first
    assert peers.sight(first, two, 2.0)[NS, "l"] == Sighting("2", 2.0)
    assert peers.sight(first, {}, 2.0) == {}
    noted = {(NS, "l"): Sighting("2", 1.5)}
    assert peers.sight(first, two, 2.0, noted) == noted, "the watch saw it before this pass"
    assert peers.sight(first, one, 2.0, noted) == first


@pytest.mark.parametrize(
    ("selector", "missing"),
    [
        (None, ""),
        ({}, ""),
        ({"kubernetes.io/os": "darwin"}, ""),
        ({"zone": "attic", "kubernetes.io/os": "darwin"}, "zone=attic"),
        ({"kubernetes.io/os": "linux"}, "os=linux"),
        (["x"], "must be an object"),
        ("x", "must be an object"),
    ],
)
def test_a_node_selector_is_held_against_the_labels(selector: object, missing: str) -> None:
    found = placement.unplaced({"spec": {"nodeSelector": selector}}, {"kubernetes.io/os": "darwin"})
    assert (missing in found) if missing else found == ""


# ── many Macs, many passes ───────────────────────────────────────────────────────────────────────


class Server:
    """What matters of an API server's Leases: who applied last, with which version, forced or not."""

    def __init__(self) -> None:
        self.slots: dict[leases.SlotId, Claim] = {}
        self._versions = itertools.count(1)

    def perform(self, node: str, move: Move) -> None:
        found = self.slots.get(move.slot)
        if move.do is ClaimAction.RELEASE:
            if found and found.version == move.version:
                del self.slots[move.slot]
            return
        if move.do is ClaimAction.TAKE and (found is None or found.version != move.version):
            return  # 409
        if move.do is not ClaimAction.TAKE and found and found.holder != node:
            return  # 409: another manager's field
        version = str(next(self._versions))
        held = Claim(move.slot, node, version, move.uid, "t", move.ready, move.created, move.unable)
        self.slots[move.slot] = held


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_passes_settles_with_every_slot_held_once_by_a_live_mac(seed: int) -> None:
    chance = random.Random(seed)
    nodes = [f"mac-{index}" for index in range(4)]
    keys = [(NS, f"svc-{index}") for index in range(6)]
    wanted = {key: chance.randint(1, 3) for key in keys}
    server, dead = Server(), set()
    waiting: dict[str, Any] = {node: {} for node in nodes}
    now = 0.0
    for step in range(400):
        now += 0.2
        if step == 200:
            dead.add(chance.choice(nodes))
        node = chance.choice([each for each in nodes if each not in dead])
        lives = {(NS, each): Life.SILENT if each in dead else Life.LIVE for each in nodes}
        asks = {
            key: ask(
                uid="u",
                slots=count,
                unable=frozenset(range(chance.randint(0, count))),
            )
            for key, count in wanted.items()
        }
        snapshot = dict(server.slots)
        decision = claims.decide(
            asks, lambda _: chance.choice([0.0, 2.0, None]), snapshot, lives, node, True, waiting[node], now
        )
        waiting[node] = decision.waiting
        for move in decision.moves:
            if chance.random() < 0.8:  # an answer may get lost, a request may never arrive
                server.perform(node, move)
    assert set(server.slots) == {(*key, index) for key, count in wanted.items() for index in range(count)}
    for key in keys:
        holders = [each.holder for slot, each in server.slots.items() if slot[:2] == key]
        assert len(set(holders)) == len(holders), "two slots of one service on one Mac"
        assert not set(holders) & dead
