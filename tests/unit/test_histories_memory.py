"""The histories of `test_histories` on a machine whose memory is too small for all that is asked of it."""

from __future__ import annotations

from hypothesis import given
from test_histories import EVENTS, HISTORIES, Event, histories_of, machine, played, property_of

__all__ = ["machine"]

UNBROKEN = histories_of([each for each in EVENTS if not each.startswith("kill")], 7)


@property_of(1500)
@given(HISTORIES)
def test_where_memory_is_short_engines_never_hold_more_than_there_is(history: list[Event]) -> None:
    """The machine refuses any start beyond it; what waits has a reason, and starts when there is room."""
    played(history, budget_bytes=100)


@property_of(500)
@given(UNBROKEN)
def test_engines_of_a_release_that_kept_no_books_count_as_well(history: list[Event]) -> None:
    """What such an engine takes while it ends after an edit is only remembered, and later only measured."""
    played(history, budget_bytes=100, keeps_books=False)
