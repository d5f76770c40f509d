"""Whether there is a Metal device, as a llama-server of a Mac tells it; and who asks, and when again."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from metal_supervisor.cluster.report import NO_METAL
from metal_supervisor.host import darwin_memory
from metal_supervisor.host.darwin_memory import Mac
from metal_supervisor.memory import machine_memory
from metal_supervisor.runtimes import metal_device
from metal_supervisor.runtimes.metal_device import Metal, question_of
from metal_supervisor.runtimes.metal_state import ASKED, MetalState
from metal_supervisor.settings.loader import Settings
from tests.boundary.mac_memory import DEVICES, M4_MAX, FakeLibc

NONE = "Available devices:\n  (none)\n"
"""What a real build without one prints."""


def engine(path: Path, text: str, code: int = 0) -> Path:
    path.write_text(f"#!/bin/sh\necho x >>{path}.asked\ncat <<E\n{text}E\nexit {code}\n")
    path.chmod(0o755)
    return path


def asked(path: Path) -> int:
    return len(Path(f"{path}.asked").read_text().split())


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac(FakeLibc(M4_MAX))
    monkeypatch.setattr(darwin_memory, "mac", lambda: mac)
    monkeypatch.setattr("metal_supervisor.host.machine.HOMEBREW", ())
    monkeypatch.setattr(machine_memory, "_devices", {})


@pytest.mark.parametrize(
    ("text", "there"),
    [
        (DEVICES, True),
        ("Available devices:\n  MTL0: Apple M1 (0 MiB, 0 MiB free)\n", True),
        ("ggml_metal: x\nAvailable devices:\n  BLAS: Accelerate (0 MiB, 0 MiB free)\n", False),
        (NONE, False),
        ("error: invalid argument: --list-devices\n", None),
        ("", None),
    ],
)
def test_only_a_list_is_an_answer(on_a_mac: None, tmp_path: Path, text: str, there: bool | None) -> None:
    assert machine_memory.metal_there(engine(tmp_path / "llama-server", text), 60) is there


def test_an_engine_that_hangs_or_is_not_there_has_not_answered(
    on_a_mac: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_memory, "DEVICES_TIMEOUT_S", 0.2)
    slow = engine(tmp_path / "slow", NONE)
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    assert machine_memory.metal_there(slow, 60) is None
    assert machine_memory.metal_there(tmp_path / "none", 60) is None


def test_a_no_is_asked_again_and_a_yes_is_not(on_a_mac: None, tmp_path: Path) -> None:
    path = engine(tmp_path / "llama-server", NONE)
    assert [machine_memory.metal_there(path, 60) for _ in range(3)] == [False] * 3 and asked(path) == 1
    assert machine_memory.metal_there(path, 0) is False and asked(path) == 2
    path = engine(tmp_path / "other", DEVICES)
    assert [machine_memory.metal_there(path, 0) for _ in range(3)] == [True] * 3 and asked(path) == 1
    assert machine_memory.metal_limits(path)[1] == 110100 and asked(path) == 1, "one question answers both"


def test_an_engine_that_replaces_another_of_the_same_time_is_asked_itself(on_a_mac: None, tmp_path: Path) -> None:
    path, fresh = engine(tmp_path / "llama-server", DEVICES), engine(tmp_path / "fresh", NONE)
    for each in (path, fresh):
        os.utime(each, (1, 1))
    assert machine_memory.metal_there(path, 60) is True
    fresh.replace(path)
    assert machine_memory.metal_there(path, 60) is False


def test_the_question_is_llama_servers_where_there_is_one(on_a_mac: None, tmp_path: Path) -> None:
    settings = replace(Settings(), llama_server=str(tmp_path / "llama-server"))
    question = question_of(settings)
    assert question is not None and question() is None, "nobody is there to be asked"
    engine(tmp_path / "llama-server", NONE)
    assert question() is False


@pytest.mark.skipif(sys.platform == "darwin", reason="what it is elsewhere")
def test_nothing_is_asked_elsewhere() -> None:
    assert question_of(Settings()) is None
    alone = Metal(None, lambda: pytest.fail("nothing changes"))
    alone.run()
    assert alone.seen == MetalState() and alone.seen.problem is None and not alone.seen.held


def test_it_is_asked_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal_device, "AGAIN_S", 0.0)
    answers = iter([None, False, None, False, True])
    seen: list[tuple[str, str]] = []
    found = Metal(lambda: next(answers), lambda: seen.append((found.seen.held, (found.seen.problem or ("",))[0])))
    assert found.seen.held == ASKED and found.seen.problem is None, "nothing is started or refused before"
    found.start()
    found.join(30)
    assert not found.is_alive(), "and no longer"
    assert seen == [("", ""), (NO_METAL, NO_METAL), ("", "")], "not knowing takes nothing back"
    assert found.seen.word == "there"


def test_a_question_that_takes_its_time_keeps_nobody_waiting() -> None:
    answer, told = threading.Event(), threading.Event()

    def question() -> bool:
        answer.wait(30)
        return False

    found = Metal(question, told.set)
    found.start()
    assert found.seen.asking and found.seen.problem is None
    answer.set()
    assert told.wait(30) and found.seen.word == "absent"
