"""Which download starts next, when several namespaces wait."""

from __future__ import annotations

import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.models.store_context import DownloadQueue


class OneDownload:
    """A download for some namespaces."""

    def __init__(self, *namespaces: str) -> None:
        self.namespaces = frozenset(namespaces)


def test_slow_downloads_of_one_namespace_do_not_hold_up_another() -> None:
    downloads, slow = DownloadQueue(2), [OneDownload("a") for _ in range(4)]
    asked = [downloads.ask(each) for each in slow]
    other = OneDownload("b")
    given, next_one = downloads.ask(other), downloads.ask(OneDownload("b"))
    assert [each.is_set() for each in (*asked, given, next_one)] == [True, True, False, False, True, False]
    downloads.leave(slow[0])
    assert not asked[2].is_set() and not next_one.is_set(), "two are still being fetched"
    downloads.leave(other)
    assert next_one.is_set() and not asked[2].is_set()


def test_a_third_namespace_is_next_whatever_the_first_two_still_want() -> None:
    downloads, first, second = DownloadQueue(2), OneDownload("a"), OneDownload("b")
    for each in (first, second):
        downloads.ask(each)
    more, third = downloads.ask(OneDownload("a")), downloads.ask(OneDownload("c"))
    assert not third.is_set(), "two namespaces at once"
    downloads.leave(first)
    assert third.is_set() and not more.is_set()


def test_a_download_of_several_namespaces_goes_with_the_first_whose_turn_it_is() -> None:
    downloads, first = DownloadQueue(1), OneDownload("a")
    downloads.ask(first)
    alone, shared = downloads.ask(OneDownload("a")), downloads.ask(OneDownload("a", "b"))
    downloads.leave(first)
    assert shared.is_set() and not alone.is_set()


def test_one_that_leaves_while_it_waits_is_woken_and_does_not_start() -> None:
    downloads, first, second, third = DownloadQueue(1), OneDownload(), OneDownload(), OneDownload()
    downloads.ask(first)
    woken, last = downloads.ask(second), downloads.ask(third)
    downloads.leave(second)
    assert woken.is_set() and not last.is_set()
    downloads.leave(first)
    assert last.is_set()


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=40), st.integers(1, 3))
def test_no_slot_is_left_over_and_no_namespace_has_two_while_another_could_start(
    steps: list[tuple[str, bool]], at_once: int
) -> None:
    downloads, asked, ended = DownloadQueue(at_once), dict[OneDownload, threading.Event](), set[OneDownload]()
    for namespace, ends in steps:
        before = [each for each in asked if asked[each].is_set() and each not in ended]
        if ends and before:
            downloads.leave(before[0])
            ended.add(before[0])
        else:
            one = OneDownload(namespace)
            asked[one] = downloads.ask(one)
        left = asked.keys() - ended
        active = [each for each in left if asked[each].is_set()]
        assert len(active) >= min(at_once, len(left))
        counts = Counter(name for each in active for name in each.namespaces)
        assert len(counts) <= at_once and len(active) < 2 * at_once
        pending = {name for each in left - set(active) for name in each.namespaces} - counts.keys()
        assert not pending or len(counts) == at_once
        for each in set(active) - set(before):
            (name,) = each.namespaces
            assert counts[name] == 1 or not pending, "a second one starts only while no other namespace waits"
