"""Parallel execution with a deadline: each function runs in a thread of its own.

A thread that hangs (a dead network disk, a silent name server) cannot be stopped; as a daemon thread it ends with the
process.
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
    """One function that runs in a thread, and its result."""

    def __init__(self, question: Callable[[], T]) -> None:
        self._question = question
        self._done = threading.Event()
        self._answer: list[T] = []
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="doctor", daemon=True).start()

    def _run(self) -> None:
        try:
            self._answer.append(self._question())
        except Exception as error:  # noqa: BLE001 - a check that fails must not stop the others
            self._error = error
        finally:
            self._done.set()

    def answer(self, until: float) -> T:
        """The result, waited for until then (monotonic time). Raises the function's exception, or TimeoutError."""
        if not self._done.wait(max(0.0, until - time.monotonic())):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._answer[0]


def answers(questions: Sequence[Callable[[], T]], within_s: float) -> list[T]:
    """The results of all functions, in their order. Raises the first one's exception, or TimeoutError."""
    until = time.monotonic() + within_s
    asked = [_Asked(each) for each in questions]
    return [each.answer(until) for each in asked]


def each_of(questions: Sequence[Question], within_s: float) -> list[Sequence[Finding]]:
    """The findings of each check, in order, within that time; `unknown` for a late or failed one. Raises nothing."""
    until = time.monotonic() + within_s
    asked = [_Asked(each) for each in questions]
    return [_found(each, until, within_s) for each in asked]


def together(questions: Sequence[Question], within_s: float) -> list[Finding]:
    """The findings of `each_of` as one list."""
    return [finding for found in each_of(questions, within_s) for finding in found]


def _found(asked: _Asked[Sequence[Finding]], until: float, within_s: float) -> Sequence[Finding]:
    try:
        return asked.answer(until)
    except TimeoutError as error:
        if error.args:  # raised by a system call of the check
            return (_failed(error),)
        return (unknown(f"no answer within {within_s:g} s"),)
    except Exception as error:  # noqa: BLE001 - as above
        return (_failed(error),)


def _failed(error: Exception) -> Finding:
    text = getattr(error, "strerror", None) or str(error) or "no reason was given"
    return unknown(scrub(f"{type(error).__name__}: {text}")[:300])
