"""Keeps the cluster in line with what the sidecar knows, whatever the cluster is doing.

One thread writes, level-triggered: it is given what the cluster should show of every service and keeps at
it until it does. Bad news goes first, because a withdrawn endpoint saves requests and a new one can wait.
An API that is down is tried again every second or so, and nothing that happens here ever delays a probe.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from metal_supervisor.boundary.kube import Kube, KubeError
from metal_supervisor.core.report import Happening
from metal_supervisor.core.types import Key, Record
from metal_supervisor.sidecar.publisher import Published, Publisher, Wanted, WantedModel

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 1.5
MOST_EVENTS = 50
log = logging.getLogger("sidecar")


@dataclass
class _Trouble:
    error: str = ""
    since: float = 0.0


class Registrar(threading.Thread):
    """Keeps the cluster's objects in line with what it is given."""

    def __init__(self, kube: Kube, node: str, on_change: Callable[[], None]) -> None:
        super().__init__(name="registrar", daemon=True)
        self._publisher = Publisher(kube, node, on_change)
        self._on_change = on_change
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._wanted: Mapping[Key, Wanted] = {}
        self._models: Mapping[Key, WantedModel] = {}
        self._events: list[tuple[Record, Happening]] = []
        self._settled = threading.Event()
        self._trouble = _Trouble()
        self._pass_failed = False

    # ── what the sidecar says and asks ───────────────────────────────────────────────────────────

    def want(self, wanted: Mapping[Key, Wanted], models: Mapping[Key, WantedModel]) -> None:
        """What the cluster should show from now on."""
        with self._lock:
            if wanted == self._wanted and models == self._models:
                return
            self._wanted, self._models = wanted, models
            self._settled.clear()
        self._wake.set()

    def tell(self, record: Record, what: Happening) -> None:
        """Posts an Event, unless too many are waiting for an API that is down."""
        with self._lock:
            if len(self._events) < MOST_EVENTS:
                self._events.append((record, what))
        self._wake.set()

    def published(self, key: Key) -> Published:
        """How far the publication of a service has come."""
        return self._publisher.published(key)

    @property
    def trouble(self) -> tuple[str, float]:
        """(why the cluster cannot be written to, Unix time since when); ("", 0) when it can."""
        return self._trouble.error, self._trouble.since

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything wanted is shown; False if that took too long."""
        return self._settled.wait(timeout_s)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        failures = 0
        while True:
            self._wake.clear()
            self._one_pass()
            failures = failures + 1 if self._pass_failed else 0
            if failures:
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures, 8)) * random.uniform(0.5, 1.0)
                time.sleep(pause_s)  # a wake must not turn an outage into a hot loop
            else:
                self._wake.wait(max(0.05, self._publisher.due_at() - time.monotonic()))

    def _one_pass(self) -> None:
        with self._lock:
            wanted, models = self._wanted, self._models
            events, self._events = self._events, []
        self._pass_failed = False
        publish = self._publisher
        if time.monotonic() >= publish.resync_at:
            self._attempt(None, partial(publish.resync, wanted))
        # Withdrawals before announcements, everything that carries traffic before what is only looked at.
        for key, want in sorted(wanted.items(), key=lambda item: item[1].report.ready):
            self._attempt(key, partial(publish.endpoints, want))
        self._attempt(None, partial(publish.forget_all_but, wanted, models))
        for want in wanted.values():
            self._attempt(None, partial(publish.status, want))
        for key, model in models.items():
            self._attempt(None, partial(publish.model, key, model))
        for record, what in events:
            if not self._attempt(None, partial(publish.event, record, what)):
                self.tell(record, what)
        if not self._pass_failed:
            self._clear_trouble()
            with self._lock:
                if wanted is self._wanted:
                    self._settled.set()

    def _attempt(self, key: Key | None, action: Callable[[], None]) -> bool:
        """Runs one write; False if it has to be tried again because the API could not be had."""
        if self._pass_failed:
            return False
        try:
            action()
        except KubeError as error:
            if error.code in (400, 409, 422):
                self._problem(key, str(error))
                return True
            if error.code == 404:
                return True  # the object is gone, or its namespace is; the next list says what else is
            self._pass_failed = True
            if error.code in (401, 403):
                log.warning("the cluster refuses a write", extra={"error": str(error)})
            if self._trouble.error != str(error):
                self._trouble = _Trouble(str(error), self._trouble.since or time.time())
                self._on_change()
            return False
        return True

    def _problem(self, key: Key | None, text: str) -> None:
        log.warning("the cluster does not accept an object", extra={"service": ".".join(key or ()), "error": text})
        if key is not None:
            self._publisher.refused(key, text)

    def _clear_trouble(self) -> None:
        if self._trouble.error:
            self._trouble = _Trouble()
            self._on_change()
