"""The reader of supervisord's table: who waits for it can be called away, and what was asked is not asked again."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from metal_supervisor.supervisord.client import Unavailable
from metal_supervisor.supervisord.table_reader import TableReader


class Slow:
    """A supervisord that answers once it is let."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked = 0
        self.error: Exception | None = None

    def table(self) -> Any:
        self.asked += 1
        self.may_answer.wait(30)
        if self.error is not None:
            raise self.error
        return {"number": self.asked}


@pytest.fixture
def slow() -> Slow:
    return Slow()


def test_who_is_called_away_finds_the_answer_later_and_supervisord_is_asked_once(slow: Slow) -> None:
    client: Any = slow
    reader, called = TableReader(client), threading.Event()

    def call_away() -> None:
        called.set()
        reader.interrupt()

    threading.Timer(0.05, call_away).start()
    assert reader.read(called.is_set) is None
    assert reader.read(called.is_set) is None
    called.clear()
    slow.may_answer.set()
    assert reader.read(called.is_set) == {"number": 1}
    assert reader.read(called.is_set) == {"number": 2}


def test_an_error_is_raised_where_the_answer_is_read_and_the_next_read_asks_anew(slow: Slow) -> None:
    client: Any = slow
    reader = TableReader(client)
    slow.error = Unavailable("no")
    slow.may_answer.set()
    with pytest.raises(Unavailable):
        reader.read(lambda: False)
    slow.error = None
    assert reader.read(lambda: False) == {"number": 2}


def test_a_thread_that_cannot_be_started_is_not_waited_for(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while other programs of this user have as many as the system allows."""
    client: Any = slow
    reader = TableReader(client)

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    slow.may_answer.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError):
            reader.read(lambda: False)
    given_up = threading.Event()
    timer = threading.Timer(30.0, lambda: (given_up.set(), reader.interrupt()))
    timer.start()
    assert reader.read(given_up.is_set) == {"number": 1}
    timer.cancel()
