"""Whose download is next, when several namespaces wait for a turn."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.models import download_turns
from metal_supervisor.models.download_turns import LONG_S, DownloadTurns


class OneDownload:
    """A download for some namespaces."""

    def __init__(self, *namespaces: str) -> None:
        self.namespaces = frozenset(namespaces)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [1000.0]
    monkeypatch.setattr(download_turns.time, "monotonic", lambda: at[0])
    return at


def test_slow_downloads_of_one_namespace_do_not_keep_all_turns_from_another(clock: list[float]) -> None:
    turns, slow = DownloadTurns(2), [OneDownload("a") for _ in range(4)]
    asked = [turns.ask(each) for each in slow]
    other, second = OneDownload("b"), OneDownload("b")
    given, next_one = turns.ask(other), turns.ask(second)
    turns.look()
    assert [each.is_set() for each in (*asked, given)] == [True, True, False, False, False]
    clock[0] += LONG_S
    turns.look()
    assert given.is_set() and not next_one.is_set()
    clock[0] += LONG_S
    turns.look()
    assert not any(each.is_set() for each in (*asked[2:], next_one)), "both have one under way"
    turns.leave(slow[0])
    assert not asked[2].is_set(), "there are still as many as there may be"
    turns.leave(other)
    assert next_one.is_set() and not asked[2].is_set()


def test_a_download_of_several_namespaces_goes_with_the_first_whose_turn_it_is(clock: list[float]) -> None:
    turns, first = DownloadTurns(1), OneDownload("a")
    turns.ask(first)
    alone, shared = turns.ask(OneDownload("a")), turns.ask(OneDownload("a", "b"))
    turns.leave(first)
    assert shared.is_set() and not alone.is_set()


def test_one_that_gives_up_is_woken_and_gets_no_turn(clock: list[float]) -> None:
    turns, first, second, third = DownloadTurns(1), OneDownload(), OneDownload(), OneDownload()
    turns.ask(first)
    given, last = turns.ask(second), turns.ask(third)
    turns.give_up(second)
    assert given.is_set() and not last.is_set()
    turns.leave(second)
    turns.leave(first)
    assert last.is_set()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40), st.integers(1, 3))
def test_no_turn_is_left_over_and_none_is_given_twice(steps: list[tuple[str, bool]], at_once: int) -> None:
    turns, asked, ended = DownloadTurns(at_once), dict[OneDownload, threading.Event](), set[OneDownload]()
    for namespace, ends in steps:
        under_way = [each for each in asked if asked[each].is_set() and each not in ended]
        if ends and under_way:
            turns.leave(under_way[0])
            ended.add(under_way[0])
        else:
            one = OneDownload(namespace)
            asked[one] = turns.ask(one)
        left = asked.keys() - ended
        assert sum(asked[each].is_set() for each in left) == min(at_once, len(left))
