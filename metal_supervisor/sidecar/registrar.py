"""Reconciles the cluster's objects with what the sidecar has observed.

One thread writes, level-triggered: it is given the desired state of every service's objects and retries until the
cluster has it. The Lease goes first, because without it peers take a Mac for dead; then withdrawals, because they save
requests, and a new endpoint can wait. An object whose write the server fails (5xx) or refuses (4xx) backs off alone. An
API that is down is tried again every second or so, and nothing here ever delays a probe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from metal_supervisor.cluster.answers import only_kube_errors
from metal_supervisor.cluster.kube import Kube, KubeError
from metal_supervisor.cluster.report import Happening, report
from metal_supervisor.sidecar.backoff import Backoffs, pause_s
from metal_supervisor.sidecar.cluster_context import ALONE, ClusterContext
from metal_supervisor.sidecar.counters import Counters
from metal_supervisor.sidecar.fleetnode import FleetNode
from metal_supervisor.sidecar.membership import Membership
from metal_supervisor.sidecar.publisher import CONFLICT_RETRY_S, Publisher
from metal_supervisor.sidecar.statuses import WantedModel, WantedStatus
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Key

LONGEST_PAUSE_S = 1.5
REFUSED_PAUSE_S = 5.0
CONFLICT_PAUSE_S = 1.0
SLOW_S = 1.0
"""Seconds that one pass may lose to failing writes; the rest waits for the next pass, which renews the Lease first.

A pass that takes less is over before a Lease matters.
"""
END_S = 2.0
"""Seconds that the thread may take to end."""
MOST_EVENTS = 100
log = logging.getLogger("sidecar")


class Registrar(threading.Thread):
    """The thread that writes the desired objects."""

    def __init__(
        self,
        kube: Kube,
        node: str,
        membership: Membership,
        on_change: Callable[[], None],
        embedded: bool = False,
        fleet_node: FleetNode | None = None,
        counters: Counters | None = None,
        namespace: str = "",
    ) -> None:
        """`namespace`: the only one that is served, "" for all."""
        super().__init__(name="registrar", daemon=True)
        self._publisher = Publisher(kube, node, on_change, not embedded, namespace)
        self.published = self._publisher.published
        self._fleet_node = fleet_node
        self._membership = membership
        self._cluster_context = ALONE
        self._restored_at = time.time()
        """As `ClusterContext.restored_at`, at the latest pass; a restore before this process began is past."""
        self._on_change = on_change
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._wanted: Mapping[Key, WantedStatus] = {}
        self._models: Mapping[Key, WantedModel] = {}
        self._events: list[tuple[Record | str, Happening]] = []
        """(service, or namespace for an Event about this Mac; Event), each until it is posted."""
        self._counters = counters or Counters()
        self._urgent = threading.Event()
        """Set while an endpoint is to be withdrawn that no pass has begun with yet."""
        self._out_since: dict[Key, float] = {}
        """Monotonic time of the decision to withdraw an endpoint that the cluster still shows as ready."""
        self._settled = threading.Event()
        self._ends = False
        """The thread is to end."""
        self.trouble = "", 0.0
        """(reason why the cluster cannot be written to, Unix time since when); ("", 0) if it can."""
        self._pass_failed = self._refused = False
        self._began = 0.0
        """Monotonic time at which the latest pass began."""
        self._backoffs = Backoffs()
        self._tried: Mapping[Key, WantedStatus] = {}
        """What the latest pass was about."""
        self._lost_s = 0.0
        """Seconds that this pass lost to writes that failed."""

    # ── what the sidecar says and asks ───────────────────────────────────────────────────────────

    def want(
        self, wanted: Mapping[Key, WantedStatus], models: Mapping[Key, WantedModel], context: ClusterContext = ALONE
    ) -> None:
        """Set the desired state of the cluster's objects."""
        with self._lock:
            if self._publisher.begin():
                self._wake.set()
            if (wanted, models, context) == (self._wanted, self._models, self._cluster_context):
                return
            self._note_withdrawals(wanted)
            self._wanted, self._models, self._cluster_context = wanted, models, context
            self._settled.clear()
        self._wake.set()

    def withdraw_all(self) -> None:
        """Withdraw every endpoint as last wanted; used if the last pass of a shutdown fails."""
        with self._lock:
            wanted, models, context = self._wanted, self._models, self._cluster_context
        ends = Observed("", 0, False, time.time(), "STOPPING")
        ending = {key: replace(each, report=report(each.record, ends, leaving=True)) for key, each in wanted.items()}
        self.want(ending, models, context)

    def _note_withdrawals(self, wanted: Mapping[Key, WantedStatus]) -> None:
        """Record the time of the decision for endpoints to withdraw; the caller holds the lock."""
        serving = {key for key, want in wanted.items() if want.report.ready}
        for key, before in self._wanted.items():
            if before.report.ready and before.report.wants_slice and key not in serving:
                self._out_since.setdefault(key, time.monotonic())
                self._urgent.set()
        for key in self._out_since.keys() & serving:
            del self._out_since[key]

    def tell(self, about: Record | str, what: Happening) -> None:
        """Queue an Event; drop it if MOST_EVENTS wait. `about`: a service, or a namespace for one about this Mac."""
        with self._lock:
            if len(self._events) < MOST_EVENTS:
                self._events.append((about, what))
        self._wake.set()

    def tell_of_mac(self, what: Happening) -> None:
        """Queue an Event about this Mac in each namespace that it serves."""
        for namespace in sorted(self._cluster_context.namespaces):
            self.tell(namespace, what)

    def look_now(self) -> None:
        """Wake the thread to write what is due: after a sleep, more is due than it waits for."""
        self._wake.set()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything wanted is written, but for messages that `Statuses.rests` holds back.

        False if that took longer than `timeout_s`.
        """
        return self._settled.wait(timeout_s)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        failures = 0
        while True:
            self._wake.clear()
            if self._ends:  # after the clear, which may take back the wake of `release`
                return
            self._one_pass()
            failures = failures + 1 if self._pass_failed else 0
            if failures:
                time.sleep(pause_s(failures, LONGEST_PAUSE_S))  # a wake must not turn an outage into a hot loop
            else:
                self._wake.wait(min(threading.TIMEOUT_MAX, max(0.05, self._due_at() - time.monotonic())))

    def _due_at(self) -> float:
        """Monotonic time of the next write that is due without any change.

        What was due before the latest pass and still is was refused, or is held back. It must not be tried in a circle.
        """
        listed_at = self._fleet_node.due_at if self._fleet_node else float("inf")
        dues = (
            listed_at,
            self._publisher.due_at(),
            self._membership.due_at(self._cluster_context.namespaces),
            self._backoffs.due_at(),
            self._publisher.statuses.held_until(),
        )
        again_at = time.monotonic() + REFUSED_PAUSE_S
        return min(each if each >= self._began else again_at for each in dues)

    def release(self) -> None:
        """End the thread, which would renew them, and release the Leases: peers know then that this Mac stops.

        Errors are logged.
        """
        self._ends = True
        self._wake.set()
        if self.is_alive():
            self.join(END_S)
        if self._cluster_context.cloned:
            return  # it is the other one's Lease
        try:
            self._membership.release()
        except KubeError as error:
            log.warning("peers could not be told that this Mac stops", extra={"error": str(error)})

    def _one_pass(self) -> None:
        """One pass: Leases and withdrawals first, and all else until one of these is due again, in another pass."""
        self._urgent.clear()
        began = self._began = time.monotonic()
        with self._lock:
            wanted, models, context = self._wanted, self._models, self._cluster_context
            events = list(self._events)
        self._pass_failed = self._refused = False
        self._lost_s = 0.0
        self._forgive(wanted)
        if context.cloned:
            return self._troubled(context.cloned)
        publish, membership = self._publisher, self._membership
        publish.statuses.silence = context.silence
        if publish.statuses.operator is not context.operator:
            publish.statuses.operator = context.operator
            publish.statuses.look_anew()
        if context.restored_at > self._restored_at:  # the API may lack, or have older versions of, what was written
            self._restored_at = context.restored_at
            publish.forget_slices()
            publish.resync_at = began
        membership.describe(dict(context.notes))
        for namespace in sorted(context.namespaces):
            self._attempt("lease", namespace, partial(self._live, namespace))
        if time.monotonic() >= publish.resync_at:
            self._attempt("resync", "", partial(publish.resync, wanted))
        late = [key for key, want in wanted.items() if want.report.ready]
        for key in sorted(wanted.keys() - set(late)):
            if self._is_overtaken(began):
                return self._wake.set()
            if not publish.rests(wanted[key]):
                self._attempt("endpoints", key, partial(publish.endpoints, wanted[key]))
            if publish.published(key).out:
                self._is_out(key)
        for what, on, action in self._after_withdrawals(wanted, models, context, late):
            if self._is_overtaken(began):
                return self._wake.set()
            self._attempt(what, on, action)
        for about, happened in events:
            if self._is_overtaken(began):
                return self._wake.set()
            on = about if isinstance(about, str) else about.key
            posted = self._attempt("event", on, partial(publish.event, about, happened))
            if posted or not (self._pass_failed or ("event", on) in self._backoffs):
                with self._lock:
                    self._events.remove((about, happened))
        if self._pass_failed:
            return None
        self._backoffs.prune()
        if self._backoffs:
            self._troubled(self._backoffs.told())
        elif not self._refused:
            self._troubled("")
        if self._backoffs.is_awaited:
            return None
        held = any(not membership.steady(key[0]) for key in late)  # for a Lease that was renewed late
        with self._lock:
            if wanted is self._wanted and not held:
                self._settled.set()
        return None

    def _forgive(self, wanted: Mapping[Key, WantedStatus]) -> None:
        """Forget the backoffs of endpoints that are wanted otherwise than in the last pass.

        An engine that died must not wait for its announcement, also if that fails only after the death was told.
        """
        before, self._tried = self._tried, wanted
        for key in before.keys() & wanted.keys():
            if before[key] is not wanted[key] and before[key] != wanted[key]:
                self._backoffs.over(("endpoints", key))

    def _after_withdrawals(
        self,
        wanted: Mapping[Key, WantedStatus],
        models: Mapping[Key, WantedModel],
        context: ClusterContext,
        late: Sequence[Key],
    ) -> Iterator[tuple[str, Hashable, Callable[[], None]]]:
        """The writes of a pass that may wait, as for `_attempt`: what carries traffic first, then statuses."""
        publish, membership = self._publisher, self._membership
        for key in late:
            if membership.steady(key[0]) and not publish.rests(wanted[key]):
                yield "endpoints", key, partial(publish.endpoints, wanted[key])
        for key in publish.unwanted(wanted):
            yield "forget", key, partial(publish.forget, key)
        for key in self._out_since.keys() - wanted.keys() - publish.unwanted(wanted):
            self._is_out(key)
        for peer in membership.to_withdraw(context.silent):
            yield "peers", peer, partial(membership.withdraw_peer, *peer)
        for key, want in wanted.items():
            if not publish.statuses.rests(want):
                yield "status", key, partial(publish.statuses.service, want)
        publish.statuses.forget_models_but(models)
        for key, model in models.items() if context.operator is False else ():
            yield "status", ("Model", *key), partial(publish.statuses.model, key, model)
        if self._fleet_node is not None:
            served = [want.record.model for want in wanted.values() if want.report.ready]
            yield "fleetnode", "", partial(self._fleet_node.write, served)

    def _is_overtaken(self, began: float) -> bool:
        """True if an endpoint is to be withdrawn, or a Lease to be renewed, since a pass began, or the thread to end.

        With a slow API a pass over many services takes a minute. What is written already costs the next one nothing.
        """
        if self._ends:
            return True
        if self._urgent.is_set() or time.monotonic() - began < SLOW_S:
            return self._urgent.is_set()
        return began < self._membership.due_at(self._cluster_context.namespaces) <= time.monotonic()

    def _live(self, namespace: str) -> None:
        """Renew the Lease of a namespace. After a gap peers may have withdrawn our endpoints: write them again."""
        if self._membership.renew(namespace):
            self._publisher.forget_slices()

    def _is_out(self, key: Key) -> None:
        """Record the duration of a completed withdrawal, if one was pending."""
        with self._lock:
            since = self._out_since.pop(key, None)
        if since is not None:
            self._counters.withdrawn(time.monotonic() - since)

    def _attempt(self, what: str, on: Hashable, action: Callable[[], None]) -> bool:
        """Run one write. False if it was not made and is retried: in the next pass, or when its backoff expires.

        `what`: kind of write, as in the counter of failures; `on`: the object.
        """
        if self._pass_failed or self._backoffs.holds((what, on)):
            return False
        began = time.monotonic()
        try:
            with only_kube_errors():
                action()
        except KubeError as error:
            if error.code != 404:
                self._counters.refused(what, str(error.code or error.reason))
            if error.code == 409 or (error.code in (400, 422) and what in ("endpoints", "event")):
                self._problem(on if what == "endpoints" else None, error)
            elif error.is_refusal and what != "event":
                if self._backoffs.hold((what, on), error):
                    log.warning("the cluster refuses a write", extra={"error": str(error)})
                if what == "endpoints":
                    self._forbidden(on, error)
                return False
            elif error.code >= 500:
                self._backoffs.hold((what, on), error)
                self._lost_s += time.monotonic() - began
                if self._lost_s >= SLOW_S:
                    self._pass_failed = True
                    self._troubled(str(error))
                return False
            elif error.code != 404:  # the object is gone, or its namespace is; the next list says what else is
                if error.is_refusal:  # what else may be written should be
                    self._refused = True
                else:
                    self._pass_failed = True
                if error.code in (401, 403) and self.trouble[0] != str(error):
                    log.warning("the cluster refuses a write", extra={"error": str(error)})
                self._troubled(str(error))
                return False
        self._backoffs.over((what, on))
        return True

    def _forbidden(self, key: Any, error: KubeError) -> None:
        """Have a service's status say that its endpoint cannot be announced."""
        if self._tried[key].report.ready:
            self._publisher.forbidden(key, str(error))

    def _troubled(self, error: str) -> None:
        """Set `trouble`; `error`: "" if there is none any more."""
        before, since = self.trouble
        if error != before:
            self.trouble = (error, since or time.time()) if error else ("", 0.0)
            self._on_change()

    def _problem(self, key: Any, error: KubeError) -> None:
        """Log an object that the cluster rejects. `key`: the service, if its endpoints are rejected, else None."""
        what = {"service": ".".join(key or ()), "error": str(error)}
        log.warning("the cluster does not accept an object", extra=what)
        if key is not None:  # a conflict is short: the fields that we apply are ours
            self._publisher.refused(key, str(error), CONFLICT_PAUSE_S if error.conflict else CONFLICT_RETRY_S)
