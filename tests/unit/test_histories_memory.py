"""The histories of `test_histories` on a machine whose memory is too small for all that is asked of it."""

from __future__ import annotations

from hypothesis import given
from test_histories import HISTORIES, Event, machine, played, property_of

__all__ = ["machine"]


@property_of(1500)
@given(HISTORIES)
def test_where_memory_is_short_engines_never_hold_more_than_there_is(history: list[Event]) -> None:
    """The machine refuses any start beyond it; what waits has a reason, and starts when there is room."""
    played(history, budget_bytes=100)
