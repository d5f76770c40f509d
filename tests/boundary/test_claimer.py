"""Claims carried out against an API server: one winner, and no claim that gets stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metal_supervisor.cluster.kube import Kube, KubeError
from metal_supervisor.placement.claimer import Claimer
from metal_supervisor.placement.leases import Claim, ClaimAction, LeaseReader, Move, SlotId
from tests.support.macs import LEASES, embedded_cluster
from tests.support.system import ISVC, SLICES, eventually, service

SLOT: SlotId = ("default", "tiny", 0)


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with embedded_cluster(tmp_path_factory.mktemp("claims")) as path:
        yield path


@pytest.fixture
def kube(kubeconfig: Path) -> Iterator[Kube]:
    kube = Kube(kubeconfig)
    yield kube
    for lease in kube.request("GET", LEASES)["items"]:
        kube.request("DELETE", f"{LEASES}/{lease['metadata']['name']}")
    kube.close()


@pytest.fixture
def uid(kube: Kube) -> str:
    """The owner of the claims: without one they are garbage."""
    return str(kube.apply(f"{ISVC}/tiny", service("tiny"), "test", force=True)["metadata"]["uid"])


class Asked:
    """A Claimer, and the moment it has done what it was given."""

    def __init__(self, kube: Kube, node: str, told: str = "") -> None:
        self._done = threading.Event()
        self.claimer = Claimer(kube, node, self._done.set, told)
        self.claimer.start()

    def do(self, *moves: Move) -> None:
        self._done.clear()
        self.claimer.want(moves)
        assert self._done.wait(30)


def claims(kube: Kube) -> dict[SlotId, Claim]:
    return LeaseReader().read(kube.request("GET", LEASES)["items"])[0]


def test_a_claim_is_made_once_and_the_second_comer_leaves_it(kube: Kube, uid: str) -> None:
    first, second = Asked(kube, "mac-a"), Asked(kube, "mac-b")
    first.do(Move(ClaimAction.CLAIM, SLOT, uid))
    second.do(Move(ClaimAction.CLAIM, SLOT, uid))
    assert claims(kube)[SLOT].holder == "mac-a"
    assert second.claimer.error == "", "to be second is no error"


@pytest.mark.parametrize("told", [False, True])
def test_whoever_takes_over_can_say_that_it_serves(kube: Kube, uid: str, told: bool) -> None:
    """What the holder before left as it is stays his field too: saying otherwise must not conflict for ever."""
    Asked(kube, "mac-a").do(Move(ClaimAction.CLAIM, SLOT, uid, ready=told))
    second = Asked(kube, "mac-b")
    second.do(Move(ClaimAction.TAKE, SLOT, uid, claims(kube)[SLOT].version))
    assert (claims(kube)[SLOT].holder, claims(kube)[SLOT].ready) == ("mac-b", False)
    second.do(Move(ClaimAction.UPDATE, SLOT, uid, claims(kube)[SLOT].version, ready=True))
    assert (claims(kube)[SLOT].holder, claims(kube)[SLOT].ready) == ("mac-b", True)


@pytest.mark.parametrize("do", [ClaimAction.TAKE, ClaimAction.UPDATE, ClaimAction.RELEASE])
def test_what_was_decided_from_an_older_version_is_refused(kube: Kube, uid: str, do: ClaimAction) -> None:
    first, second = Asked(kube, "mac-a"), Asked(kube, "mac-b")
    first.do(Move(ClaimAction.CLAIM, SLOT, uid))
    old = claims(kube)[SLOT].version
    second.do(Move(ClaimAction.TAKE, SLOT, uid, old))
    first.do(Move(do, SLOT, uid, old, ready=True))
    assert (claims(kube)[SLOT].holder, claims(kube)[SLOT].ready) == ("mac-b", False)


def test_an_answer_counts_until_the_watch_has_caught_up(kube: Kube, uid: str) -> None:
    mac = Asked(kube, "mac-a")
    mac.do(Move(ClaimAction.CLAIM, SLOT, uid))
    key = "default", "isvc-tiny-0"
    assert mac.claimer.seen({})[key]["spec"]["holderIdentity"] == "mac-a"
    lease = kube.request("GET", f"{LEASES}/{key[1]}")
    assert mac.claimer.seen({key: lease}) == {key: lease}
    assert mac.claimer.seen({}) == {}, "once seen, what is gone is gone"
    mac.do(Move(ClaimAction.RELEASE, SLOT, uid, lease["metadata"]["resourceVersion"]))
    assert mac.claimer.seen({key: lease}) == {}, "released, though the watch still shows it"
    other = Asked(kube, "mac-b")
    other.do(Move(ClaimAction.CLAIM, SLOT, uid))
    taken = kube.request("GET", f"{LEASES}/{key[1]}")
    assert mac.claimer.seen({key: taken}) == {key: taken}, "another Mac has claimed it meanwhile"
    assert mac.claimer.seen({}) == {}


@pytest.mark.parametrize(
    "refusal",
    [
        KubeError(403, "Forbidden", "the namespace is being terminated"),
        KubeError(500, "InternalError", 'failed calling webhook "leases": connection refused'),
        KubeError(400, "BadRequest", 'admission webhook "leases" denied the request'),
        KubeError(422, "Invalid", "ValidatingAdmissionPolicy 'leases' denied request"),
    ],
    ids=["forbidden", "webhook", "denied", "policy"],
)
def test_a_namespace_that_takes_no_claims_does_not_keep_the_others_from_theirs(
    kube: Kube, uid: str, monkeypatch: pytest.MonkeyPatch, refusal: KubeError
) -> None:
    mac, apply = Asked(kube, "mac-a"), kube.apply

    def refusing(path: str, *rest: Any, **named: Any) -> Any:
        if path.endswith("stuck-0"):
            raise refusal
        return apply(path, *rest, **named)

    monkeypatch.setattr(kube, "apply", refusing)
    mac.do(Move(ClaimAction.CLAIM, ("default", "stuck", 0), uid), Move(ClaimAction.CLAIM, SLOT, uid))
    assert claims(kube)[SLOT].holder == "mac-a"
    assert str(refusal) in mac.claimer.error


def test_a_move_is_not_repeated_at_once(kube: Kube, uid: str) -> None:
    mac = Asked(kube, "mac-a")
    mac.do(Move(ClaimAction.CLAIM, SLOT, uid))
    before = kube.requests
    mac.claimer.want([Move(ClaimAction.CLAIM, SLOT, uid)])
    assert not mac.claimer.busy
    mac.do(Move(ClaimAction.CLAIM, ("default", "other", 0), uid))
    assert kube.requests - before == 2, "the look for another agent, and the claim"


def test_what_the_watch_shows_to_be_taken_is_not_asked_for(kube: Kube, uid: str) -> None:
    Asked(kube, "mac-a").do(Move(ClaimAction.CLAIM, SLOT, uid))
    lease = kube.request("GET", f"{LEASES}/isvc-tiny-0")
    version = lease["metadata"]["resourceVersion"]
    done = threading.Event()
    late = Claimer(kube, "mac-b", done.set, "", lambda: {("default", "isvc-tiny-0"): lease})
    late.start()
    before = kube.requests
    for move in (Move(ClaimAction.CLAIM, SLOT, uid), Move(ClaimAction.TAKE, SLOT, uid, str(int(version) - 1))):
        done.clear()
        late.want([move])
        assert done.wait(30) and kube.requests == before
    done.clear()
    late.want([Move(ClaimAction.TAKE, SLOT, uid, version)])
    assert done.wait(30) and claims(kube)[SLOT].holder == "mac-b", "what is as it was decided from is"


def test_what_is_asked_for_while_it_is_under_way_is_asked_once(kube: Kube, uid: str) -> None:
    mac = Asked(kube, "mac-a")
    begun, go_on = threading.Event(), threading.Event()
    apply, sent = kube.apply, []

    def slow(path: str, *rest: Any, **more: Any) -> Any:
        sent.append(path)
        begun.set()
        assert go_on.wait(30)
        return apply(path, *rest, **more)

    kube.apply = slow  # type: ignore[method-assign]
    moves = [Move(ClaimAction.CLAIM, ("default", "tiny", index), uid) for index in range(3)]
    mac.claimer.want(moves)
    assert begun.wait(30)
    mac.claimer.want(moves)  # as every pass does until the watch shows them
    go_on.set()
    eventually(lambda: not mac.claimer.busy, what="all of it to be done")
    assert len(sent) == 3


def test_another_agent_that_lives_keeps_its_service(kube: Kube, uid: str) -> None:
    def slice_of_agent(beat: str, address: str) -> None:
        kube.apply(
            f"{SLICES}/tiny",
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": "tiny",
                    "namespace": "default",
                    "annotations": {"llmkube.ai/agent-heartbeat": beat},
                    "labels": {"llmkube.ai/managed-by": "metal-agent", "llmkube.ai/inference-service": "tiny"},
                },
                "addressType": "IPv4",
                "endpoints": [{"addresses": [address]}],
                "ports": [{"name": "http", "port": 1}],
            },
            "agent",
            force=True,
        )

    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for beat, told, theirs in (
        (now, "", True),
        ("2026-01-01T00:00:00Z", "", False),
        ("rubbish", "", False),
        (now, "192.0.2.7", False),  # our own, though no interface has it: a router's, told by --host-ip
        (now, "::ffff:192.0.2.7", False),  # which may spell it in another way
    ):
        slice_of_agent(beat, "192.0.2.7")
        mac = Asked(kube, "mac-a", told)
        mac.do(Move(ClaimAction.CLAIM, SLOT, uid))
        assert (SLOT in claims(kube)) is not theirs, beat
        assert bool(mac.claimer.foreign) is theirs
        if theirs:
            mac.claimer.want(())  # the service is gone, or another Mac has claimed it
            assert not mac.claimer.foreign
        else:
            kube.request("DELETE", f"{LEASES}/isvc-tiny-0")
    kube.request("DELETE", f"{SLICES}/tiny")


@pytest.mark.parametrize(
    ("name", "of", "theirs"),
    [
        ("tiny-agent", "tiny", True),  # since 0.10 its slice is for the operator's relay, and named so
        ("tiny", "m", False),  # the relay's slice of `m`, if this service were called `m-agent`
        ("tiny-agent", "tiny-agent", False),  # that of another service, as releases before wrote it
    ],
)
def test_another_agents_slice_is_known_by_its_service(kube: Kube, uid: str, name: str, of: str, theirs: bool) -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    labels = {"llmkube.ai/managed-by": "metal-agent", "llmkube.ai/inference-service": of}
    metadata = {"namespace": "default", "annotations": {"llmkube.ai/agent-heartbeat": now}, "labels": labels}
    kube.apply(
        f"{SLICES}/{name}",
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, **metadata},
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["192.0.2.7"]}],
            "ports": [{"name": "https", "port": 9443}],
        },
        "agent",
        force=True,
    )
    mac = Asked(kube, "mac-a")
    mac.do(Move(ClaimAction.CLAIM, SLOT, uid))
    kube.request("DELETE", f"{SLICES}/{name}")
    assert (SLOT in claims(kube), bool(mac.claimer.foreign)) == (not theirs, theirs)


def test_a_right_that_is_missing_is_named_with_what_to_do(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kube = Kube(kubeconfig)
    mac = Asked(kube, "mac-a")
    uid = "u1"

    def refuse(*_: object, **__: object) -> None:
        raise KubeError(403, "Forbidden", 'cannot patch leases in namespace "default"; grant the verb')

    monkeypatch.setattr(kube, "apply", refuse)
    mac.do(Move(ClaimAction.CLAIM, SLOT, uid))
    assert "cannot patch leases" in mac.claimer.error
    assert "claims = off" in mac.claimer.error
    monkeypatch.undo()
    mac.do(Move(ClaimAction.CLAIM, SLOT, "u2"))
    eventually(lambda: not mac.claimer.error, what="the trouble to pass")
    kube.close()


def test_an_answer_that_no_api_gives_ends_no_claimer() -> None:
    """A proxy that asks for a login answers 200, and with an object at times."""
    kube: Any = SimpleNamespace(request=lambda *_: {"login": "required"}, clock_offset_s=0.0)
    mac = Asked(kube, "mac-a")
    mac.do(Move(ClaimAction.CLAIM, SLOT, "u1"))
    assert mac.claimer.is_alive() and "'items'" in mac.claimer.error
    eventually(lambda: not mac.claimer.busy, what="the watch to wake passes again")
