"""What is rendered once for many who look."""

from __future__ import annotations

import pytest

from metal_supervisor.sidecar import kept
from metal_supervisor.sidecar.board import Board
from metal_supervisor.sidecar.kept import FRESH_S, HOLDS_S, Kept


class World:
    """A board and a clock that a test moves, and everything that was rendered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fresh_s: float = 0.0) -> None:
        self.board, self.now, self.rendered = Board(node="a"), 100.0, list[str]()
        monkeypatch.setattr(kept.time, "monotonic", lambda: self.now)
        self.kept = Kept(lambda: self.board, self._render, fresh_s)

    def _render(self, board: Board, kind: str) -> str:
        self.rendered.append(f"{board.node}{kind}")
        return self.rendered[-1]


def test_the_same_board_is_rendered_once_until_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert [world.kept.get() for _ in range(3)] == ["a"] * 3
    world.board = Board(node="a")  # another one that says the same
    assert world.kept.get() == "a" and world.rendered == ["a"]
    world.now += HOLDS_S
    assert world.kept.get() == "a" and world.rendered == ["a", "a"]


def test_another_board_is_rendered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.kept.get()
    world.board = Board(node="b")
    assert world.kept.get() == "b"


def test_another_form_is_rendered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, FRESH_S)
    assert [world.kept.get("x"), world.kept.get("y")] == ["ax", "ay"]


def test_what_is_long_to_render_may_be_a_little_old(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, FRESH_S)
    world.kept.get()
    world.board = Board(node="b")
    assert world.kept.get() == "a"
    world.now += FRESH_S
    assert world.kept.get() == "b"
