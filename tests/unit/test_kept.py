"""What is rendered once for many who look."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from metal_supervisor.sidecar.board import Board
from metal_supervisor.sidecar.http import render_cache
from metal_supervisor.sidecar.http.render_cache import FRESH_S, HOLDS_S, RenderCache
from tests.support.system import eventually


class World:
    """A board and a clock that a test moves, and everything that was rendered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, warm: bool = False) -> None:
        self.board, self.now, self.rendered = Board(node="a"), 100.0, list[str]()
        monkeypatch.setattr(render_cache.time, "monotonic", lambda: self.now)
        self.kept = RenderCache(lambda: self.board, self._render, warm)
        idle = SimpleNamespace(start=lambda: None)
        monkeypatch.setattr(render_cache.threading, "Thread", lambda **_: idle)  # nobody renders but who asks

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
    world = World(monkeypatch, warm=True)
    world.kept.get()
    world.board = Board(node="b")
    assert world.kept.get() == "a"
    world.now += FRESH_S
    assert world.kept.get() == "b"


def test_who_asks_has_what_is_newer_unless_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_cache, "WAIT_S", 20.0)
    boards, slow = [Board(node="a")], threading.Event()

    def render(board: Board) -> str:
        if board.node == "c":
            slow.wait(20)
        return board.node

    made = RenderCache(lambda: boards[0], render, warm=True)
    assert made.get() == "a"
    boards[0] = Board(node="b")
    assert made.get() == "b"
    boards[0] = Board(node="c")
    monkeypatch.setattr(render_cache, "WAIT_S", 0.02)
    assert made.get() == "b"
    slow.set()
    eventually(lambda: made.get() == "c", what="what took long")


def test_while_somebody_looks_it_is_rendered_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_cache, "WARM_EVERY_S", 0.01)
    boards, rendered, by = [Board(node="a")], list[str](), set[str]()

    def render(board: Board) -> str:
        by.add(threading.current_thread().name)
        rendered.append(board.node)
        return board.node

    made = RenderCache(lambda: boards[0], render, warm=True)
    assert made.get() == "a"
    boards[0] = Board(node="b")
    eventually(lambda: rendered == ["a", "b"], what="it to be rendered without being asked for")
    assert made.get() == "b" and by == {threading.current_thread().name, "rendering"}
    monkeypatch.setattr(render_cache, "LOOKED_AT_S", -1.0)
    eventually(lambda: not made._warms, what="an end of it once nobody looks")


def test_what_cannot_be_rendered_is_told_to_who_asks_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_cache, "WARM_EVERY_S", 0.01)
    broken = [False]

    def render(_board: Board) -> str:
        if broken[0]:
            raise ValueError("broken")
        return "whole"

    made = RenderCache(lambda: Board(at=time.time()), render, warm=True)
    assert made.get() == "whole"
    broken[0] = True
    eventually(lambda: not made._warms, what="the thread to give up")
    monkeypatch.setattr(render_cache, "FRESH_S", 0.0)
    with pytest.raises(ValueError, match="broken"):
        made.get()
    broken[0] = False
    assert made.get() == "whole"


def test_a_thread_that_cannot_be_started_fails_no_page_and_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while other programs of this user have as many as the system allows."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    by = set[str]()
    made = RenderCache(lambda: Board(at=time.time()), lambda *_: by.add(threading.current_thread().name), warm=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        made.get()
    eventually(lambda: (made.get(), "rendering" in by)[1], what="a page that is rendered beside who looks")
    monkeypatch.setattr(render_cache, "LOOKED_AT_S", -1.0)
    eventually(lambda: not made._warms, what="an end of it once nobody looks")
