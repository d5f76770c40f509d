"""Membership of this Mac in the cluster: its node Lease, and the endpoints of peers whose Lease has expired.

The sidecar renews the Lease, beside the endpoints, and not the controller, whose death must take nothing out of
rotation. Nothing in Kubernetes withdraws the endpoints of a machine that is gone, so its peers do it, with the slice's
resourceVersion as a precondition: a Mac that wakes up wins. Behind conf/rbac/fence.yaml a Mac writes only its own
slices, and the reaper withdraws the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from metal_supervisor.cluster import manifests
from metal_supervisor.cluster.answers import now_micro
from metal_supervisor.cluster.kube import MERGE, Kube, KubeError
from metal_supervisor.cluster.manifests import api_path
from metal_supervisor.host import sleep_clock
from metal_supervisor.placement import leases
from metal_supervisor.spec.types import Json
from metal_supervisor.state.kept_files import write_atomic

STEADY_PAUSE_S = 2.0
log = logging.getLogger("sidecar")


def session_kept(path: Path) -> str:
    """A new name for this run of the sidecar, stored in a file after the latest few; names sort by start time.

    The controller uses the file to tell this Mac's Lease from one of another Mac with the same name.
    """
    session, before = f"{time.time():017.6f}-{os.urandom(4).hex()}", []
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text("utf-8"))
        before = [str(each) for each in found][-4:] if isinstance(found, list) else []
    with contextlib.suppress(OSError):  # a full disk ends no heartbeat; a later session is no clone, known or not
        write_atomic(path, json.dumps([*before, session]), durable=False)
    return session


class Membership:
    """This Mac's Leases, one in each namespace it serves. Methods may raise KubeError."""

    def __init__(self, kube: Kube, node: str, duration_s: float, session: str) -> None:
        self._kube, self._node, self._duration_s = kube, node, duration_s
        self.renew_every_s = duration_s / 5
        self._notes: Mapping[str, str] = {}
        self._session = session
        self._clock = sleep_clock.system_clocks().inclusive  # a term runs out during a sleep too
        self._renewed_at: dict[str, float] = {}
        self._due_now: set[str] = set()
        """Namespaces whose Lease is to be written at once; `_renewed_at` still holds their last renewal."""
        self._unsteady: set[str] = set()
        """Namespaces whose Lease was renewed after a gap, and not once more since: no endpoint is announced there."""
        self._withdrawn: set[tuple[str, str]] = set()

    def describe(self, notes: Mapping[str, str]) -> None:
        """Set the Lease's annotations from the next renewal on; renew at once if the cordon has changed."""
        if notes.get(leases.UNSCHEDULABLE) != self._notes.get(leases.UNSCHEDULABLE):
            self._due_now = set(self._renewed_at)
        self._notes = notes

    def steady(self, namespace: str) -> bool:
        """False for a moment after a gap: during a dark wake, after which it sleeps again, a Mac must not announce."""
        return namespace not in self._unsteady

    def due_at(self, namespaces: Collection[str]) -> float:
        """Monotonic time of the next renewal; in the past after a long sleep, infinity without namespaces."""
        due = min((self._renewed_at.get(each, 0.0) + self._pause_s(each) for each in namespaces), default=float("inf"))
        return due - self._clock() + time.monotonic()

    def _pause_s(self, namespace: str) -> float:
        if namespace in self._due_now:
            return 0.0
        return min(STEADY_PAUSE_S, self.renew_every_s) if namespace in self._unsteady else self.renew_every_s

    def renew(self, namespace: str) -> bool:
        """Renew the Lease of a namespace if it is due. True after a gap: peers may have withdrawn our endpoints."""
        last, now = self._renewed_at.get(namespace, 0.0), self._clock()
        if now - last < self._pause_s(namespace) * random.uniform(0.9, 1.0):
            return False
        self._write(namespace, self._duration_s)
        self._renewed_at[namespace] = self._clock()
        self._due_now.discard(namespace)
        if last and now - last > self._duration_s:
            self._unsteady.add(namespace)
            return True
        self._unsteady.discard(namespace)
        return False

    def release(self) -> None:
        """Release the Leases: peers need not wait for them to expire."""
        failed: KubeError | None = None
        for namespace in sorted(self._renewed_at):
            try:
                self._write(namespace, 0.0)
            except KubeError as error:
                if error.code in (0, 401):
                    raise
                failed = error  # of one namespace; the peers of the others are told all the same
        if failed is not None:
            raise failed

    def _write(self, namespace: str, duration_s: float) -> None:
        notes = {**self._notes, leases.SESSION: self._session}
        body = leases.node_lease_object(namespace, self._node, duration_s, notes, now_micro())
        path = api_path("leases", namespace, body["metadata"]["name"])
        self._kube.apply(path, body, manifests.field_manager(self._node), force=True)

    def to_withdraw(self, silent: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
        """(namespace, node) of the silent Macs whose endpoints have not been withdrawn yet."""
        self._withdrawn &= set(silent)
        return sorted(set(silent) - self._withdrawn)

    def withdraw_peer(self, namespace: str, node: str) -> None:
        """Withdraw the endpoints of a silent Mac; a slice that cannot be written does not keep the others."""
        path = api_path("endpointslices", namespace)
        selector = f"{leases.NODE}={node},{manifests.SLICE_MANAGER}={manifests.MANAGED_BY}"
        failed: KubeError | None = None
        for item in self._kube.request("GET", path, {"labelSelector": selector}).get("items", []):
            try:
                self._withdraw(f"{path}/{item['metadata']['name']}", item, node)
            except KubeError as error:
                if error.code < 500:
                    raise
                failed = error
        if failed is not None:
            raise failed
        self._withdrawn.add((namespace, node))

    def _withdraw(self, path: str, item: Json, node: str) -> None:
        endpoints = item.get("endpoints") or []
        if not any(each.get("conditions", {}).get("ready", True) for each in endpoints):
            return
        dead = {"ready": False, "serving": False, "terminating": False}
        body = {
            "metadata": {"resourceVersion": item["metadata"]["resourceVersion"]},
            "endpoints": [{**each, "conditions": dead} for each in endpoints],
        }
        try:
            self._kube.request("PATCH", path, {"fieldManager": manifests.field_manager(self._node)}, body, MERGE)
        except KubeError as error:
            if error.code not in (404, 409, 422):
                raise
            if error.code == 422:  # by admission, which would refuse it again
                log.warning("endpoint of a silent Mac left to the reaper", extra={"node": node, "error": str(error)})
            return
        log.warning("endpoint of a silent Mac withdrawn", extra={"node": node, "slice": item["metadata"]["name"]})
