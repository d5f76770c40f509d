"""Asks many things at once, each in a thread, and waits no longer than it was told to.

A thread that hangs (a dead network disk, a name server that is silent) cannot be ended; as a daemon it ends with us.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from metal_supervisor.cluster.exec_plugin import scrub
from metal_supervisor.doctor.findings import Finding, unknown

T = TypeVar("T")
Question = Callable[[], Sequence[Finding]]


class _Asked(Generic[T]):
    """One question under way."""

    def __init__(self, question: Callable[[], T]) -> None:
        self._question = question
        self._done = threading.Event()
        self._answer: list[T] = []
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="doctor", daemon=True).start()

    def _run(self) -> None:
        try:
            self._answer.append(self._question())
        except Exception as error:  # noqa: BLE001 - whatever a check meets, the others go on
            self._error = error
        finally:
            self._done.set()

    def answer(self, until: float) -> T:
        """What it came to by then (monotonic time). Raises what it raised, TimeoutError."""
        if not self._done.wait(max(0.0, until - time.monotonic())):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._answer[0]


def answers(questions: Sequence[Callable[[], T]], within_s: float) -> list[T]:
    """The answers to all questions, in their order. Raises what the first that failed did, TimeoutError."""
    until = time.monotonic() + within_s
    asked = [_Asked(each) for each in questions]
    return [each.answer(until) for each in asked]


def each_of(questions: Sequence[Question], within_s: float) -> list[Sequence[Finding]]:
    """The findings of each question, in their order; at the latest after that time. Raises nothing."""
    until = time.monotonic() + within_s
    asked = [_Asked(each) for each in questions]
    return [_found(each, until, within_s) for each in asked]


def together(questions: Sequence[Question], within_s: float) -> list[Finding]:
    """The same as one list."""
    return [finding for found in each_of(questions, within_s) for finding in found]


def _found(asked: _Asked[Sequence[Finding]], until: float, within_s: float) -> Sequence[Finding]:
    try:
        return asked.answer(until)
    except TimeoutError as error:
        if error.args:  # its own, of a system call
            return (_failed(error),)
        return (unknown(f"no answer within {within_s:g} s"),)
    except Exception as error:  # noqa: BLE001 - as above
        return (_failed(error),)


def _failed(error: Exception) -> Finding:
    text = getattr(error, "strerror", None) or str(error) or "no reason was given"
    return unknown(scrub(f"{type(error).__name__}: {text}")[:300])
