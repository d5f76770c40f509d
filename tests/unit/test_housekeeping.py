"""What may go to make room: only what was asked for, never what is used, the longest unused first."""

from __future__ import annotations

import pytest

from metal_supervisor.models.housekeeping import Bounds, Item, Kind, age, choose, period_s, size_bytes, unused_models
from metal_supervisor.spec.fields import Bad

DAY = 86400.0
GIB = 1 << 30
NOW = 1000 * DAY


def item(name: str, days: float, size: int = GIB, kind: Kind = Kind.WHOLE, used: bool = False) -> Item:
    return Item(name, kind, size, NOW - days * DAY, used)


STORE = [
    item("new", 1),
    item("used", 99, used=True),
    item("old", 40),
    item("linked", 50, 0),
    item("middle", 10),
    item("in place", 90, 0, Kind.IN_PLACE),
    item("theirs", 90, GIB, Kind.LLMKUBE),
]


def gone(bounds: Bounds, *more: Item, store: int = 6 * GIB) -> list[str]:
    return list(choose([*STORE, *more], bounds, store, NOW))


def test_nothing_goes_that_was_not_asked_for_but_what_never_became_whole() -> None:
    assert gone(Bounds()) == []
    coming = [item("left", 2, kind=Kind.PARTIAL), item("waits", 2, kind=Kind.PARTIAL, used=True)]
    assert gone(Bounds(), *coming, item("fresh", 300 / DAY, kind=Kind.PARTIAL)) == ["left"]


def test_a_partial_of_a_clock_that_was_put_back_is_not_kept_for_ever() -> None:
    assert gone(Bounds(), item("left", -2, kind=Kind.PARTIAL)) == ["left"]


@pytest.mark.parametrize(
    ("keep", "names"),
    [(0, ["linked", "old", "middle", "new"]), (1, ["linked", "old", "middle"]), (3, ["linked"]), (4, []), (9, [])],
)
def test_so_many_unused_ones_stay_the_most_recently_used(keep: int, names: list[str]) -> None:
    assert gone(Bounds(keep=keep)) == names


@pytest.mark.parametrize(
    ("gib", "names"), [(6, []), (5, ["old"]), (4, ["old", "middle"]), (1, ["old", "middle", "new"])]
)
def test_until_the_store_is_small_enough_and_what_frees_nothing_stays(gib: int, names: list[str]) -> None:
    assert gone(Bounds(size_bytes=gib * GIB)) == names


def test_leftovers_count_before_models_have_to_go_for_a_size() -> None:
    left = item("left", 2, 2 * GIB, Kind.PARTIAL)
    assert gone(Bounds(size_bytes=6 * GIB), left, store=8 * GIB) == ["left"]


def test_what_was_not_used_for_longer() -> None:
    assert gone(Bounds(older_s=30 * DAY)) == ["linked", "old"]
    assert gone(Bounds(older_s=50 * DAY)) == []


def test_each_bound_holds_beside_the_others_and_says_why() -> None:
    found = choose(STORE, Bounds(keep=2, size_bytes=4 * GIB, older_s=45 * DAY), 6 * GIB, NOW)
    assert found == {
        "linked": "unused for 50 d",
        "old": "more than 2 are unused",
        "middle": "the store is larger than 4.0 GiB",
    }


def test_to_keep_none_is_said_plainly() -> None:
    assert set(choose(STORE, Bounds(keep=0), 6 * GIB, NOW).values()) == {"nothing uses it"}


def test_a_model_without_a_note_is_a_model() -> None:
    assert [each.name for each in unused_models([item("noteless", 3, kind=Kind.UNKNOWN)])] == ["noteless"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (7199, "119 min"),
        (7200, "2 h"),
        (2 * DAY - 1, "47 h"),
        (2 * DAY, "2 d"),
    ],
)
def test_ages_are_whole_units(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_periods_and_sizes_as_people_write_them() -> None:
    assert [period_s(each, "--older") for each in ("30d", "12h", "2w", "0s")] == [30 * DAY, 43200, 14 * DAY, 0]
    assert size_bytes("200G", "--size") == size_bytes("200GB", "--size") == 200 * 10**9
    assert size_bytes("1.5GiB", "--size") == 3 * GIB // 2
    for bad in ("", "30", "d", "-3d", "3 d", "٣d", "9999999d"):
        with pytest.raises(Bad, match="--older must be a period such as 30d"):
            period_s(bad, "--older")
    for bad in ("", "much", "-1G", "0"):
        with pytest.raises(Bad, match="--size must be a size such as 200G"):
            size_bytes(bad, "--size")
