"""Lines of a running system's downloads, from reports as its controller writes them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from metal_supervisor.cli.incoming import Incoming
from metal_supervisor.spec.types import ModelFile
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.reports import CONTROLLER_REPORT

GIB = 1 << 30


def tell(state: Path, **files: ModelFile) -> None:
    body = {"models": {f"default/{name}": {"source": "", "file": asdict(file)} for name, file in files.items()}}
    fresh = state / "fresh"
    fresh.write_text(json.dumps(body))
    fresh.replace(state / CONTROLLER_REPORT)


def coming(gib: int) -> ModelFile:
    return ModelFile("Downloading", message="so many", got_bytes=gib * GIB, total_bytes=8 * GIB)


def test_each_download_has_a_line_with_its_rate_and_goes_when_it_is_over(tmp_path: Path) -> None:
    incoming, state = Incoming(), StateDir(tmp_path)
    assert incoming.lines(state, 0.0, 100) == []
    tell(tmp_path, big=coming(1), small=ModelFile("Downloading", message="it waits for its turn"))
    assert incoming.lines(state, 10.0, 100) == [
        "default.big  [===                           ]   12 %  1.0 of 8.0 GiB", "default.small  it waits for its turn",
    ]  # fmt: skip
    tell(tmp_path, big=coming(2))
    (line,) = incoming.lines(state, 20.0, 100)
    assert line == "default.big  [=======                       ]   25 %  2.0 of 8.0 GiB  107 MB/s  60 s left"
    tell(tmp_path, big=ModelFile("Ready", "/m"), failed=ModelFile("Failed", message="404"))
    assert incoming.lines(state, 30.0, 100) == []


def test_a_download_that_begins_anew_is_not_told_at_the_old_rate(tmp_path: Path) -> None:
    incoming, state = Incoming(), StateDir(tmp_path)
    for at, gib in ((0.0, 1), (10.0, 3), (20.0, 2)):
        tell(tmp_path, m=coming(gib))
        (line,) = incoming.lines(state, at, 100)
        assert ("MB/s" in line) is (gib == 3)


def test_words_are_shown_while_there_is_nothing_to_count_or_the_line_is_cut(tmp_path: Path) -> None:
    incoming, state = Incoming(), StateDir(tmp_path)
    cut = ModelFile("Downloading", message="the line was cut; tried again in 4 s", got_bytes=GIB, total_bytes=8 * GIB)
    tell(tmp_path, begun=ModelFile("Downloading", message="0 %", total_bytes=8 * GIB), cut=cut)
    begun, waits = incoming.lines(state, 0.0, 100)
    assert "]    0 %  0 MiB of 8.0 GiB" in begun
    assert waits == "default.cut  the line was cut; tried again in 4 s"


def test_half_a_report_changes_nothing(tmp_path: Path) -> None:
    incoming, state = Incoming(), StateDir(tmp_path)
    tell(tmp_path, m=coming(1))
    before = incoming.lines(state, 0.0, 100)
    for text in ("{", "[]"):
        (tmp_path / CONTROLLER_REPORT).unlink()
        (tmp_path / CONTROLLER_REPORT).write_text(text)
        assert incoming.lines(state, 1.0, 100) == before
