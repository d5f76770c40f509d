"""Parallel execution with a deadline: each function runs in a thread of its own.

A thread that hangs (a dead network disk, a silent name server) cannot be stopped; as a daemon thread it ends with the
process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

from metal_supervisor.cluster.exec_plugin import scrub
from metal_supervisor.doctor.findings import Finding, Found, unknown

T = TypeVar("T")
Question = Callable[[], Found]


def _asked(question: Callable[[], T]) -> Future[T]:
    """The coming result of a function that runs in a thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(question())
        except Exception as error:  # noqa: BLE001 - a check that fails must not stop the others
            future.set_exception(error)

    threading.Thread(target=run, name="doctor", daemon=True).start()
    return future


def answers(questions: Sequence[Callable[[], T]], within_s: float) -> list[T]:
    """The results of all functions, in their order. Raises an exception of one of them, or TimeoutError."""
    asked = [_asked(each) for each in questions]
    done, late = wait(asked, within_s, FIRST_EXCEPTION)
    if late and not any(each.exception() for each in done):
        raise TimeoutError
    return [each.result() for each in asked if each in done]


def each_of(questions: Sequence[Question], within_s: float) -> list[Sequence[Finding]]:
    """The findings of each check, in order, within that time; `unknown` for a late or failed one. Raises nothing."""
    asked = [_asked(each) for each in questions]
    wait(asked, within_s)
    return [_found(each, within_s) for each in asked]


def _found(asked: Future[Found], within_s: float) -> Sequence[Finding]:
    if not asked.done():
        return [unknown(f"no answer within {within_s:g} s")]
    if error := asked.exception():
        text = str(error) or "no reason was given"
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return [unknown(scrub(f"{type(error).__name__}: {text}")[:300])]
    found = asked.result()
    return [found] if isinstance(found, Finding) else found
