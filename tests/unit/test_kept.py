"""What is rendered once for many who look."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from metal_supervisor.sidecar.board import Board
from metal_supervisor.sidecar.http import render_cache
from metal_supervisor.sidecar.http.render_cache import HOLDS_S, LAG_S, RenderCache


class World:
    """A board and a clock that a test moves, and everything that was rendered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lag_s: float = 0.0) -> None:
        self.board, self.now, self.rendered = Board(node="a"), 100.0, list[str]()
        monkeypatch.setattr(render_cache.time, "monotonic", lambda: self.now)
        self.kept = RenderCache(lambda: self.board, self._render, lag_s)

    def _render(self, board: Board) -> str:
        self.rendered.append(board.node)
        return board.node


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


def test_what_is_long_to_render_may_be_a_little_old(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, LAG_S)
    world.kept.get()
    world.board = Board(node="b")
    assert world.kept.get() == "a"
    world.now += LAG_S
    assert world.kept.get() == "b"


def test_many_who_ask_at_once_have_it_rendered_once() -> None:
    numbers, rendered, begun, goes_on = iter(range(100)), list[str](), threading.Event(), threading.Event()

    def render(board: Board) -> str:
        rendered.append(board.node)
        begun.set()
        assert goes_on.wait(20)
        return board.node

    made = RenderCache(lambda: Board(node=str(next(numbers))), render, lag_s=60.0)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(made.get) for _ in range(8)]
        assert begun.wait(20)
        goes_on.set()
        assert [each.result(20) for each in asked] == ["0"] * 8
    assert rendered == ["0"]


def test_what_cannot_be_rendered_is_told_to_who_asks_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    monkeypatch.setattr(world.kept, "_render", lambda _board: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            world.kept.get()
    monkeypatch.setattr(world.kept, "_render", lambda board: board.node)
    assert world.kept.get() == "a"
