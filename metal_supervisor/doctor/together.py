"""Asks many things at once, each in a thread, and waits no longer than it was told to.

A thread that hangs (a dead network disk, a name server that is silent) cannot be ended; as a daemon it ends with us.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from metal_supervisor.boundary.plugin import scrub
from metal_supervisor.doctor.findings import Finding, unknown

Question = Callable[[], Sequence[Finding]]


class _Asked:
    """One question under way."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._done = threading.Event()
        self._found: Sequence[Finding] = ()
        threading.Thread(target=self._run, name="doctor", daemon=True).start()

    def _run(self) -> None:
        try:
            self._found = self._question()
        except Exception as error:  # noqa: BLE001 - whatever a check meets, the others go on
            text = getattr(error, "strerror", None) or str(error) or "no reason was given"
            self._found = (unknown(scrub(f"{type(error).__name__}: {text}")[:300]),)
        finally:
            self._done.set()

    def found(self, until: float, within_s: float) -> Sequence[Finding]:
        """What it came to by then (monotonic time)."""
        if self._done.wait(max(0.0, until - time.monotonic())):
            return self._found
        return (unknown(f"no answer within {within_s:g} s"),)


def together(questions: Sequence[Question], within_s: float) -> list[Finding]:
    """The findings of all questions, in their order; at the latest after that time."""
    return [finding for found in each_of(questions, within_s) for finding in found]


def each_of(questions: Sequence[Question], within_s: float) -> list[Sequence[Finding]]:
    """The same, by question."""
    until = time.monotonic() + within_s
    asked = [_Asked(each) for each in questions]
    return [each.found(until, within_s) for each in asked]
