"""What the system says of sleep, and the note that is left for as long as it is true, and no longer."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from metal_supervisor import launch
from metal_supervisor.cli import programs
from metal_supervisor.controller import boot
from metal_supervisor.host import iokit, sleep_note, sleepwatch
from metal_supervisor.host.sleep_clock import Clocks
from metal_supervisor.host.sleep_note import LONGEST_S, SleepNoteReader
from metal_supervisor.settings.loader import Settings
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.doorbell import Doorbell, ring
from metal_supervisor.state.own_processes import CannotBoot
from tests.support import iokit as fake
from tests.support.iokit import Power
from tests.support.system import ROOT


class Heard(list[str]):
    """What was done, in its order."""

    def listen(self, *words: str, fails: bool = False) -> None:
        def will_sleep() -> None:
            self.append("will")
            if fails:
                raise OSError("a full disk")

        power = Power(words, lambda number: self.append(f"allowed {number - 2**40}"))
        iokit.PowerEvents(power.frameworks, will_sleep, lambda: self.append("awake")).run()
        assert power.added == (fake.LOOP, fake.SOURCE, fake.MODE), "pointers as they were given"


def test_the_system_may_sleep_after_we_did_our_part_and_is_never_kept_waiting() -> None:
    heard = Heard()
    heard.listen("can", "will", "on", "can", "not")
    assert heard == ["allowed 0", "will", "allowed 1", "awake", "allowed 3", "awake"]


def test_it_may_sleep_though_our_part_fails() -> None:
    heard = Heard()
    heard.listen("will", "on", fails=True)
    assert heard == ["will", "allowed 0", "awake"]


def test_a_system_that_does_not_take_us_is_an_error() -> None:
    power = Power((), lambda _: None, refuses=True)
    with pytest.raises(iokit.Untold, match="refused"):
        iokit.PowerEvents(power.frameworks, lambda: None, lambda: None).run()


@pytest.mark.skipif(sys.platform == "darwin", reason="what it is elsewhere")
def test_elsewhere_there_is_nothing_to_load_and_no_such_program(tmp_path: Path) -> None:
    with pytest.raises(iokit.Untold):
        iokit.load()
    assert "sleepwatch.conf" not in list(boot._parts(Settings(kubeconfig="/k")))


@pytest.mark.parametrize("silent", [True, False])
def test_only_a_system_that_does_not_tell_is_said_not_to(
    silent: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs, "_program", lambda _: (Settings(state_dir=str(tmp_path)), None, ""))
    monkeypatch.setattr(iokit, "load", lambda: Power((), lambda _: None, refuses=silent).frameworks)
    if not silent:
        (tmp_path / "sleepwatch.bell").mkdir()
    with pytest.raises(CannotBoot if silent else OSError, match="not tell" if silent else "sleepwatch.bell"):
        programs._sleepwatch(argparse.Namespace())


@pytest.mark.parametrize(("platform", "kubeconfig", "there"), [
    ("darwin", "/k", True), ("darwin", "", False), ("linux", "/k", False),
])  # fmt: skip
def test_it_is_a_program_of_a_mac_that_serves_a_cluster(
    platform: str, kubeconfig: str, there: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    directory = StateDir(tmp_path)
    boot.write_conf(directory, Settings(kubeconfig=kubeconfig))
    text = (tmp_path / "supervisord.conf").read_text()
    assert ("[program:sleepwatch]" in text) == there
    assert "@HOME@" not in text


# ── the note ─────────────────────────────────────────────────────────────────────────────────────


class Hands:
    """A pair of clocks that are set by hand."""

    awake_s, asleep_s = 1000.0, 500.0

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.awake_s + self.asleep_s, lambda: self.awake_s)


@pytest.fixture
def hands() -> Hands:
    return Hands()


def test_a_note_counts_until_it_is_taken_away(tmp_path: Path, hands: Hands) -> None:
    reader = SleepNoteReader(tmp_path, hands.clocks)
    assert reader.look() is None
    coming = sleep_note.announce(tmp_path)
    assert reader.look() == coming
    assert not sleep_note.answered(tmp_path, coming)
    sleep_note.answer(tmp_path, coming)
    assert sleep_note.answered(tmp_path, coming)
    assert sleep_note.call_off(tmp_path) and not sleep_note.call_off(tmp_path)
    assert reader.look() is None


def test_a_note_counts_through_wakes_in_the_dark_that_the_system_tells_nobody_of(tmp_path: Path, hands: Hands) -> None:
    reader = SleepNoteReader(tmp_path, hands.clocks)
    coming = sleep_note.announce(tmp_path)
    assert reader.look() == coming
    for _ in range(3):
        hands.asleep_s += 3600.0
        hands.awake_s += LONGEST_S - 15.0
        assert reader.look() == coming, "nobody would say that it sleeps on"
    hands.awake_s += LONGEST_S + 1.0
    assert reader.look() is None, "it is really awake, and that word was lost"
    hands.asleep_s += 1.0
    assert reader.look() is None, "the clocks are read one after the other"


def test_a_note_counts_for_a_minute_of_being_awake(tmp_path: Path, hands: Hands) -> None:
    reader = SleepNoteReader(tmp_path, hands.clocks)
    sleep_note.announce(tmp_path)
    assert reader.look() is not None
    hands.awake_s += LONGEST_S
    assert reader.look() is not None
    hands.awake_s += 1.0
    assert reader.look() is None
    assert sleep_note.announce(tmp_path) == reader.look(), "another sleep, another note"


def test_a_note_whose_writer_is_gone_counts_for_nothing(tmp_path: Path, hands: Hands) -> None:
    text = "from pathlib import Path; from metal_supervisor.host import sleep_note; "
    text += f"sleep_note.announce(Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", text], check=True, cwd=ROOT)
    assert (tmp_path / sleep_note.NOTE).exists() and SleepNoteReader(tmp_path, hands.clocks).look() is None
    note = json.loads((tmp_path / sleep_note.NOTE).read_text())
    (tmp_path / sleep_note.NOTE).write_text(json.dumps({**note, "pid": os.getpid()}))
    assert SleepNoteReader(tmp_path, hands.clocks).look() is None, "its number is somebody else's by now"
    ours = {"pid": os.getpid(), "started": launch.start_time(os.getpid())}
    (tmp_path / sleep_note.NOTE).write_text(json.dumps({**note, **ours}))
    assert SleepNoteReader(tmp_path, hands.clocks).look() is not None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "pid": "x", "started": "", "at": 1}',
             '{"format": 1, "pid": 1e999, "started": "", "at": 1}', '{"format": 1, "pid": 1, "started": "", "at": 1}']
)  # fmt: skip
def test_what_is_no_note_is_none(tmp_path: Path, hands: Hands, text: str) -> None:
    (tmp_path / sleep_note.NOTE).write_text(text)
    assert SleepNoteReader(tmp_path, hands.clocks).look() is None


# ── the program ──────────────────────────────────────────────────────────────────────────────────


def test_the_system_sleeps_as_soon_as_the_sidecar_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sleepwatch, "PATIENCE_S", 3600.0)  # waiting in vain is not what ends it
    watch, sidecar, waits = sleepwatch.Sleepwatch(tmp_path), Doorbell(tmp_path, "sidecar"), threading.Event()
    wait = watch._bell.wait
    monkeypatch.setattr(watch._bell, "wait", lambda timeout_s: (waits.set(), wait(timeout_s)))
    thread = threading.Thread(target=watch.will_sleep, daemon=True)
    with caplog.at_level(logging.INFO):
        thread.start()
        sidecar.wait(20)
        coming = SleepNoteReader(tmp_path).look()
        assert coming is not None and waits.wait(20), "nobody has answered"
        sleep_note.answer(tmp_path, coming)
        ring(tmp_path, sleepwatch.PROGRAM)
        thread.join(20)
        assert not thread.is_alive()
    (told,) = caplog.records
    assert told.endpoints == "withdrawn" and (tmp_path / sleep_note.NOTE).exists()  # type: ignore[attr-defined]
    watch.awake()
    assert not (tmp_path / sleep_note.NOTE).exists()


def test_the_system_sleeps_though_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sleepwatch, "PATIENCE_S", 0.05)
    sleepwatch.Sleepwatch(tmp_path).will_sleep()
    assert [each.levelname for each in caplog.records] == ["WARNING"]


def test_a_note_of_a_watch_that_was_killed_is_taken_away_by_the_next(tmp_path: Path) -> None:
    sleep_note.announce(tmp_path)
    sleepwatch.Sleepwatch(tmp_path)
    assert not (tmp_path / sleep_note.NOTE).exists()
