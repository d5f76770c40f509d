"""Requests to claim and release slots, one each, in a thread of their own: a pass must never wait for one.

The watch decides who holds a slot; the answer to a request only counts until the watch has caught up with
it. A refusal is not an error: another Mac was first, and the watch will show which.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from metal_supervisor.cluster import manifests
from metal_supervisor.cluster.answers import now_micro, only_kube_errors
from metal_supervisor.cluster.kube import Kube, KubeError
from metal_supervisor.cluster.manifests import api_path
from metal_supervisor.cluster.reflector import precedes
from metal_supervisor.host import machine
from metal_supervisor.placement import leases
from metal_supervisor.placement.leases import ClaimAction, Move, SlotId
from metal_supervisor.spec.types import Json, Key

SAME_AGAIN_S = 5.0
FOREIGN_AGAIN_S = 60.0
PAUSE_S = 1.0
ANSWER_HOLDS_S = 30.0
log = logging.getLogger("controller")


class Claimer(threading.Thread):
    """Requests slots on behalf of the controller."""

    def __init__(
        self,
        kube: Kube,
        node: str,
        on_done: Callable[[], None],
        told: str = "",
        watched: Callable[[], Mapping[Key, Json]] = dict,
    ) -> None:
        """`told`: the configured `--host-ip` of this Mac, "" if it is not set. `watched`: the Leases as last seen."""
        super().__init__(name="claimer", daemon=True)
        self._watched = watched
        self._kube, self._node, self._on_done, self._told = kube, node, on_done, told
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._moves: Sequence[Move] = ()
        self._tried: dict[SlotId, tuple[Move, float]] = {}
        self._answers: dict[Key, tuple[str, Json | None, float]] = {}
        """Lease -> (version, object or None once deleted, monotonic time), from the answers to our requests."""
        self.error = ""
        self.busy = False
        self._refused = False
        """A request of this batch was refused for itself."""
        self.foreign: dict[Key, str] = {}
        """InferenceService -> description of the other kind of agent that serves it."""

    def want(self, moves: Sequence[Move]) -> None:
        """Set the requests to make now; they replace those not yet made."""
        with self._lock:
            if not moves:
                self.error = ""  # without a request there is no refusal
            asked = {move.slot[:2] for move in moves}
            for key in self.foreign.keys() - asked:  # gone, or claimed by another Mac since
                self.foreign.pop(key, None)
            now = time.monotonic()
            self._tried = {move.slot: self._tried[move.slot] for move in moves if move.slot in self._tried}
            fresh = [move for move in moves if not self._tried_lately(move, now)]
            self._moves = fresh
            self.busy = self.busy or bool(fresh)
        if fresh:
            self._wake.set()

    def _tried_lately(self, move: Move, now: float) -> bool:
        tried = self._tried.get(move.slot)
        again_s = FOREIGN_AGAIN_S if move.slot[:2] in self.foreign else SAME_AGAIN_S
        return tried is not None and tried[0] == move and now - tried[1] < again_s

    def seen(self, leases: Mapping[Key, Json]) -> Mapping[Key, Json]:
        """The watched Leases, updated with newer answers to our own requests."""
        with self._lock:
            now = time.monotonic()
            for key, (version, answer, at) in list(self._answers.items()):
                found = leases.get(key)
                if found is None:
                    confirmed = answer is None
                else:  # after our deletion of this version, another one is another Mac's claim
                    seen = found["metadata"]["resourceVersion"]
                    confirmed = not precedes(seen, version) or (answer is not None and seen == version)
                if confirmed or now - at > ANSWER_HOLDS_S:  # a rebuilt cluster never gets as far as the old one was
                    del self._answers[key]
            if not self._answers:
                return leases
            merged = {**leases, **{key: lease for key, (_, lease, _) in self._answers.items() if lease is not None}}
            for key, (_, lease, _) in self._answers.items():
                if lease is None:
                    merged.pop(key, None)
            return merged

    def run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            with self._lock:
                moves, self._moves = self._moves, ()
            failed = self._refused = False
            for move in moves:
                with self._lock:  # the previous batch may have included it
                    done = self._tried_lately(move, time.monotonic())
                error = None if done else self._perform(move)
                failed = failed or error is not None
                if error is not None and error.code != 500:
                    break
            with self._lock:
                self.busy = bool(self._moves)
            self._on_done()
            if failed:
                time.sleep(PAUSE_S)

    def _perform(self, move: Move) -> KubeError | None:
        """Make one request; returns the error after which it is to be made again soon."""
        namespace, service, index = move.slot
        name = leases.claim_name(service, index)
        with self._lock:
            self._tried[move.slot] = move, time.monotonic()
        if self._in_vain(move, self._watched().get((namespace, name))):
            return None
        try:
            with only_kube_errors():
                if move.do is ClaimAction.CLAIM and self._other_agent(move.slot[:2]):
                    return None
                answer = self._sent(move, name)
                version = answer["metadata"]["resourceVersion"] if answer else move.version
        except KubeError as error:
            first = move.do is ClaimAction.CLAIM  # which no other Mac can have made invalid
            if error.code in (404, 409) or (error.code == 422 and not first):
                log.info("claim refused", extra={"service": service, "slot": index, "why": str(error)})
                return None
            self._failed(error)
            # Of one namespace, perhaps, as by a webhook that fails: the claims of the others are made all the same.
            self._refused = error.is_refusal or error.code == 500
            if error.is_refusal:
                return None
            with self._lock:
                self._tried.pop(move.slot, None)
            return error
        if not self._refused:
            self.error = ""
        with self._lock:
            self._answers[namespace, name] = version, answer, time.monotonic()
        if move.do is not ClaimAction.UPDATE:
            log.info("claim", extra={"did": move.do.value, "service": service, "slot": index})
        return None

    def _sent(self, move: Move, name: str) -> Json | None:
        """Send the request of a move; returns the Lease, None if it was deleted. Raises KubeError."""
        path = api_path("leases", move.slot[0], name)
        if move.do is ClaimAction.RELEASE:
            self._kube.request("DELETE", path, None, {"preconditions": {"resourceVersion": move.version}})
            return None
        # Fields unchanged since the previous holder are owned by both, and would conflict for ever. All but the first
        # claim are forced, and guarded by the resourceVersion that they were decided from.
        first = move.do is ClaimAction.CLAIM
        body = leases.claim_object(move, self._node, now_micro())
        return self._kube.apply(path, body, manifests.field_manager(self._node), force=not first)

    def _in_vain(self, move: Move, lease: Json | None) -> bool:
        """True if the watch shows meanwhile that another Mac was first, so that the request would be refused."""
        if lease is None or move.do not in (ClaimAction.CLAIM, ClaimAction.TAKE):
            return False
        return move.do is ClaimAction.CLAIM or not precedes(lease["metadata"]["resourceVersion"], move.version)

    def _failed(self, error: KubeError) -> None:
        text = str(error)
        if error.code == 403:
            text = f"{error}; grant it in the cluster's RBAC (conf/rbac), or set claims = off if this is the only Mac"
        if text != self.error:
            log.warning("no claim can be made", extra={"error": text})
            self.error = text

    def _other_agent(self, key: Key) -> bool:
        """True if LLMKube's own agent serves this already: it has a slice with a fresh heartbeat for it.

        The slice is looked for by its labels: since 0.10 it has another name, where the operator has a relay before it.
        """
        selector = f"llmkube.ai/managed-by=metal-agent,llmkube.ai/inference-service={key[1]}"
        try:
            found = self._kube.request("GET", api_path("endpointslices", key[0]), {"labelSelector": selector})["items"]
        except KubeError as error:
            if error.code not in (400, 404, 422):
                raise
            found = []
        now = time.time() + self._kube.clock_offset_s
        fresh = next(
            (
                item
                for item in found
                if leases.NODE not in (item["metadata"].get("labels") or {})
                and manifests.fresh_elsewhere(item, now, machine.own_addresses(self._told))
            ),
            None,
        )
        if fresh is None:
            self.foreign.pop(key, None)
            return False
        addresses = [address for each in fresh.get("endpoints") or [] for address in each.get("addresses") or []]
        text = f"LLMKube's metal-agent serves it at {', '.join(addresses) or 'an unknown address'}"
        if key not in self.foreign:
            log.warning("left to another agent", extra={"service": ".".join(key), "why": text})
        self.foreign[key] = text
        return True
