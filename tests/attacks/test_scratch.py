"""Engines that fill their scratch directory, or hide what they have in it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metal_supervisor.cluster.report import Happening
from metal_supervisor.sidecar import scratch_watch
from metal_supervisor.sidecar.scratch_watch import ScratchWatch, excess
from metal_supervisor.state.directory import StateDir

RECORD: Any = SimpleNamespace(program="default.tiny", key=("default", "tiny"))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch" / "default.tiny"
    path.mkdir(parents=True)
    return path


def test_an_engine_that_fills_its_scratch_directory_is_warned_of_once_until_it_is_empty(scratch: Path) -> None:
    told: list[tuple[Any, Happening]] = []
    watch = ScratchWatch(StateDir(scratch.parents[1]), lambda: [RECORD], lambda *each: told.append(each))
    watch.turn()
    assert told == []
    (scratch / "large").write_bytes(bytes(scratch_watch.MOST_BYTES))
    watch.turn()
    watch.turn()
    ((record, what),) = told
    assert record is RECORD and (what.type, what.reason) == ("Warning", "ScratchLarge")
    assert what.note.startswith("the engine's scratch directory holds 256 MiB, or more; check what the engine writes")
    (scratch / "large").unlink()
    watch.turn()
    for number in range(scratch_watch.MOST_ENTRIES):
        (scratch / str(number)).touch()
    watch.turn()
    assert len(told) == 2 and "2000 files and directories, or more" in told[1][1].note


def test_a_sparse_file_and_a_link_take_no_room(scratch: Path) -> None:
    with (scratch / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    (scratch / "out").symlink_to("/")
    assert excess(str(scratch)) == ""
    assert excess(str(scratch / "gone")) == ""


def test_directories_deeper_than_a_path_can_be_count_as_too_much(scratch: Path) -> None:
    base, here = scratch, os.open(scratch, os.O_RDONLY)
    for _ in range(20):  # by their parents, as an engine does: the whole path is longer than any call takes
        os.mkdir("d" * 250, dir_fd=here)
        inner = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    assert excess(str(base)) == "a directory that cannot be read (File name too long)"


def test_the_walk_ends_at_the_limit(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, scandir = list[str](), os.scandir

    def counted(path: str) -> Any:
        looked.append(path)
        return scandir(path)

    for number in range(300):
        (scratch / f"a{number}" / "b").mkdir(parents=True)
    monkeypatch.setattr(os, "scandir", counted)
    assert excess(str(scratch), most_entries=10) == "10 files and directories, or more"
    assert len(looked) == 1
