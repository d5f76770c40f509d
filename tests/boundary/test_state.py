"""The state directory on a real file system: nothing half-written, nothing lost, nothing read as "not wanted"."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.launch import bar
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Program, Standing
from metal_supervisor.state import kept_files
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.home import StateError
from metal_supervisor.state.kept_files import write_atomic
from tests.support.records import a_record
from tests.support.system import eventually

LONGEST_SOCKET = 103
"""Bytes of a socket path on macOS, without the closing NUL."""


def record(name: str = "tiny", namespace: str = "default", edition: str | None = None) -> Record:
    verdict = Verdict(Standing.RUN, "Running", "", 1.0)
    return a_record(name, namespace, uid="uid", model="m", verdict=verdict, endpoint=None, edition=edition)


# ── write_atomic ─────────────────────────────────────────────────────────────────────────────────


def test_a_write_says_whether_anything_changed_and_leaves_only_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert write_atomic(path, "one\n")
    before = path.stat()
    assert not write_atomic(path, "one\n")
    assert path.stat().st_ino == before.st_ino
    assert write_atomic(path, "two ü\n", durable=False)
    assert path.read_bytes() == "two ü\n".encode()
    assert os.listdir(tmp_path) == ["f"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_write_over_a_damaged_file_makes_it_good(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\xff\xfe\x00")
    assert write_atomic(path, "good\n")
    assert path.read_text() == "good\n"


@pytest.mark.parametrize(("held", "wanted"), [(b"a\r\nb\n", "a\nb\n"), (b"a\nb\n", "a\r\nb\n"), (b"a\r", "a\n")])
def test_the_file_holds_exactly_the_text_line_ends_included(tmp_path: Path, held: bytes, wanted: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(held)
    assert write_atomic(path, wanted)
    assert path.read_bytes() == wanted.encode()
    assert not write_atomic(path, wanted), "what is there already was written again"


def test_text_that_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomic(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\udc80")
    assert path.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["f"]


def test_a_reader_never_sees_half_of_a_file_that_is_rewritten_all_the_time(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomic(path, "a" * 100_000)
    code = (
        "import sys; from pathlib import Path; from metal_supervisor.state.kept_files import write_atomic\n"
        "for n in range(300): write_atomic(Path(sys.argv[1]), 'ab'[n % 2] * 100_000, durable=False)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)]) as writer:
        seen = set()
        while writer.poll() is None:
            text = path.read_text()
            seen.add((len(text), text[0], text == text[0] * len(text)))
        assert writer.returncode == 0
    assert seen <= {(100_000, "a", True), (100_000, "b", True)}
    assert len(seen) == 2


def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomic(path, "a" * 100_000)
    code = (
        "import sys; from pathlib import Path; from metal_supervisor.state.kept_files import write_atomic\n"
        "print(flush=True)\n"
        "n = 0\n"
        "while True: n += 1; write_atomic(Path(sys.argv[1]), 'ab'[n % 2] * 100_000)\n"
    )
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout
            writer.stdout.readline()
            writer.kill()
        assert path.read_text() in ("a" * 100_000, "b" * 100_000)


# ── records ──────────────────────────────────────────────────────────────────────────────────────


def test_a_record_comes_back_as_it_was_written(state: StateDir) -> None:
    assert state.write_record(record())
    assert not state.write_record(record())
    assert state.records() == ({"default.tiny": record()}, {})


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "format"),
        (b"null", "format"),
        (b"{}", "format"),
        (b"\xff\xfe", "decode"),
        (b'{"format": 99}', "newer"),
        (b'{"format": 1}', "damaged"),
        (b'{"format": 1, "namespace": 7}', "damaged"),
        (b"[" * 100_000, "JSON"),
        (b"\x00" * 4096, "JSON"),
    ],
)
def test_a_damaged_or_newer_record_is_listed_with_a_reason_and_left_where_it_is(
    state: StateDir, content: bytes, why: str
) -> None:
    state.write_record(record("good"))
    path = state.record_path("default.tiny")
    path.write_bytes(content)
    gc.collect()
    gc.disable()  # a collection in the depth of brackets leaves a finalizer of pytest's no room on the stack
    try:
        good, bad = state.records()
    finally:
        gc.enable()
    assert set(good) == {"default.good"}
    assert set(bad) == {"default.tiny"}
    assert why in bad["default.tiny"]
    assert path.read_bytes() == content


def test_a_record_that_is_a_directory_or_a_dangling_link_does_not_hide_the_others(state: StateDir) -> None:
    state.write_record(record("good"))
    state.record_path("default.dir").mkdir()
    state.record_path("default.gone").symlink_to("/nowhere")
    good, bad = state.records()
    assert set(good) == {"default.good"}
    assert "default.dir" in bad


def test_a_barred_record_leaves_a_bar_for_the_launcher_until_it_is_written_without(state: StateDir) -> None:
    barred = replace(record(), barred="ModelSourceNotAllowed: rejected")
    state.write_record(barred)
    assert bar(str(state.note_path(barred.program))) == barred.barred
    state.write_record(record())
    assert bar(str(state.note_path(barred.program))) == ""


def test_a_copy_of_a_record_under_another_name_is_not_a_second_service(state: StateDir) -> None:
    state.write_record(record())
    text = state.record_path("default.tiny").read_text()
    state.record_path("default.other").write_text(text)
    good, bad = state.records()
    assert set(good) == {"default.tiny"}
    assert set(bad) == {"default.other"}


def test_an_observation_or_note_that_cannot_be_read_is_as_if_missing(state: StateDir) -> None:
    state.write_observed(Observed("default.tiny", 1, True, 1.0, "RUNNING"))
    (state.path / "observed" / "default.bad.json").write_text("{")
    assert set(state.observations()) == {"default.tiny"}
    assert state.run_note("default.tiny") is None
    (state.path / "runs" / "default.tiny.json").write_bytes(b"\xff")
    assert state.run_notes() == {}
    state.forget_observed("default.tiny")
    state.forget_observed("default.tiny")
    assert state.observations() == {}


DONE = st.sampled_from(["write", "forget", "damage", "look"])
WRITES = st.lists(st.tuples(st.sampled_from("abc"), DONE, st.integers(0, 3)))


@settings(max_examples=100, derandomize=True, database=None)
@given(WRITES)
def test_a_reader_that_looks_again_and_again_sees_what_one_that_looks_first_sees(
    writes: list[tuple[str, str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as base:
        writer, reader = StateDir(Path(base)), StateDir(Path(base))
        writer.create()
        for name, what, pid in writes:
            if what == "write":
                writer.write_observed(Observed(name, pid, False, 1.0, "RUNNING"))
            elif what == "forget":
                writer.forget_observed(name)
            elif what == "damage":
                write_atomic(Path(base, "observed", f"{name}.json"), "{")
            else:
                assert reader.observations() == StateDir(Path(base)).observations()
        assert reader.observations() == StateDir(Path(base)).observations()
        writer.remove_link()


def test_what_was_removed_is_written_anew_however_soon(state: StateDir) -> None:
    kept, made = record(edition="a"), Program("default.tiny", "a", "{}")
    for _ in range(3):
        assert state.write_record(kept) and state.write_spec(made)
        assert not state.write_record(kept) and not state.write_spec(made)
        state.forget(kept.program)
    assert state.write_spec(made)
    state.remove_spec("default.tiny")
    assert state.write_spec(made)


def test_a_file_that_somebody_removed_is_written_again_within_seconds(state: StateDir) -> None:
    kept = record()
    state.write_record(kept)
    state.record_path(kept.program).unlink()
    eventually(lambda: state.write_record(kept), what="the record to be written again")


def test_what_it_wrote_and_removed_itself_is_on_file_without_another_listing(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.write_section("default.a", "one")
    os.utime(state.path / "models.d", (1, 1))  # long ago, so that a listing counts for a while
    listed = dict(state.sections_on_file())
    monkeypatch.setattr(os, "scandir", lambda *_: pytest.fail("it was listed again"))
    state.write_section("default.b", "two")
    state.write_section("default.a", "other")
    assert state.sections_on_file().keys() == {"default.a", "default.b"}
    assert state.sections_on_file()["default.a"] != listed["default.a"]
    state.remove_section("default.a")
    known = dict(state.sections_on_file())
    monkeypatch.undo()
    assert known == StateDir(state.path).sections_on_file() and known.keys() == {"default.b"}


@pytest.mark.parametrize(("each_s", "most"), [(0.0, 3), (100.0, 1)])
def test_a_listing_of_many_files_counts_for_longer(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, each_s: float, most: int
) -> None:
    state.write_section("default.a", "one")
    os.utime(state.path / "models.d", (1, 1))
    monkeypatch.setattr(kept_files, "LISTED_S", 0.0)
    monkeypatch.setattr(kept_files, "EACH_LISTED_S", each_s)
    scandir, looks = os.scandir, list[str]()
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(path) or scandir(path))
    assert [set(state.sections_on_file()) for _ in range(3)] == [{"default.a"}] * 3
    assert len(looks) == most


def test_what_somebody_else_did_there_meanwhile_is_seen_too(state: StateDir) -> None:
    state.write_section("default.a", "one")
    os.utime(state.path / "models.d", (1, 1))
    state.sections_on_file()
    state.section_path("default.theirs").write_text("x")
    state.write_section("default.b", "two")
    assert state.sections_on_file().keys() == {"default.a", "default.b", "default.theirs"}
    os.utime(state.path / "models.d", (1, 1))
    state.sections_on_file()
    state.write_section("default.c", "three")
    state.section_path("default.a").unlink()  # perhaps within the resolution of the directory's time
    eventually(lambda: state.sections_on_file().keys() == {"default.b", "default.c", "default.theirs"})


def test_forgetting_a_service_leaves_one_whose_name_begins_alike(state: StateDir) -> None:
    for name in ("a", "a.b", "ab"):
        state.write_record(record(name))
        state.section_path(f"default.{name}").write_text("x")
        state.spec_path(f"default.{name}").write_text("x")
        state.log_path(f"default.{name}").write_text("x")
    state.forget("default.a")
    state.forget("default.a")
    assert set(state.records()[0]) == {"default.a.b", "default.ab"}
    assert sorted(os.listdir(state.path / "specs")) == ["default.a.b.json", "default.ab.json"]
    assert sorted(os.listdir(state.path / "models.d")) == ["default.a.b.conf", "default.ab.conf"]
    assert state.log_path("default.a").exists()


# ── quarantine ───────────────────────────────────────────────────────────────────────────────────


def aside(state: StateDir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (state.path / "quarantine").iterdir()}


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("after", range(6))
def test_a_controller_that_is_killed_while_it_forgets_a_service_forgets_the_rest_the_next_time(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """As long as the record is there: without it nothing would look for a spec, which may hold secrets, any more."""
    state.write_record(record(edition="a"))
    for path in (
        state.note_path("default.tiny"),
        state.bar_path("default.tiny"),
        state.spec_path("default.tiny"),
        state.attached_path("default.tiny"),
        state.section_path("default.tiny"),
    ):
        path.write_text("{}")
    state.scratch_path("default.tiny").mkdir()
    left, unlink = [after], Path.unlink

    def until_killed(path: Path, missing_ok: bool = False) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        unlink(path, missing_ok)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "unlink", until_killed)
        state.forget("default.tiny")
    (again,) = StateDir(state.path).records()[0]
    state.forget(again)
    assert not [each for each in state.path.glob("*/*tiny*") if each.parent.name != "log"]


def test_a_quarantined_file_is_kept_whole_beside_the_reason(state: StateDir) -> None:
    path = state.section_path("default.bad")
    path.write_bytes(b"\xffbad")
    state.quarantine(path, "because")
    assert not path.exists()
    found = aside(state)
    assert sorted(found.values()) == [b"because\n", b"\xffbad"]
    assert all("default.bad.conf" in name for name in found)
    state.quarantine(path, "again")
    assert aside(state) == found


def test_two_files_of_one_name_put_aside_at_the_same_moment_are_both_kept(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_007)
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101T000000")
    path = state.section_path("default.bad")
    for content in ("first", "second"):
        path.write_text(content)
        state.quarantine(path, "because")
    assert {b"first", b"second"} <= set(aside(state).values())


def test_a_file_is_put_aside_even_if_the_quarantine_was_removed(state: StateDir) -> None:
    (state.path / "quarantine").rmdir()
    path = state.section_path("default.bad")
    path.write_text("bad")
    state.quarantine(path, "because")
    assert not path.exists(), "said to be aside, but still in the way"
    assert b"bad" in aside(state).values()


@pytest.mark.parametrize("name", ["x" * 240 + ".conf", "sp ace\n.conf", "\udcff.conf"], ids=["long", "odd", "bytes"])
def test_a_file_with_any_name_can_be_put_aside(state: StateDir, name: str) -> None:
    path = state.path / "models.d" / name
    path.write_text("bad")
    state.quarantine(path, f"{path.name} is not wanted")
    assert not path.exists()
    assert b"bad" in aside(state).values()


# ── the directory and its short link ─────────────────────────────────────────────────────────────


def test_directories_are_private(state: StateDir) -> None:
    state.create()
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in state.path.iterdir()}
    assert modes == {True: 0o700, False: 0o600}


def test_a_state_directory_that_is_a_file_is_named_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("")
    with pytest.raises(StateError, match=r"s: .*--state-dir"):
        StateDir(tmp_path / "s").create()


@pytest.mark.parametrize("name", ["short", "with space", "semi;colon", "per%cent", "ünï", "long" * 30, "new\nline"])
def test_home_is_short_plain_and_the_same_directory(tmp_path: Path, name: str) -> None:
    state = StateDir(tmp_path / name)
    state.create()
    try:
        assert len(f"{state.socket}.99999") <= LONGEST_SOCKET
        assert not set(state.home) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789./_+-")
        assert Path(state.home).samefile(tmp_path / name)
        assert StateDir(tmp_path / name).home == state.home
    finally:
        state.remove_link()
    state.remove_link()


def test_the_short_link_is_short_where_a_mac_keeps_its_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac = "/private/var/folders/4f/7xk3_bxn1ks1rx9lk8w_v3mm0000gn/T"
    monkeypatch.setattr(tempfile, "gettempdir", lambda: mac)
    state = StateDir(Path("/Users/somebody/Library/Application Support/metal"))
    assert len(f"{state.socket}.99999") <= LONGEST_SOCKET


def test_the_short_link_does_not_depend_on_the_environment_of_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = set()
    for directory in ("/tmp", "/var/tmp"):
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setenv("TMPDIR", directory)
        homes.add(StateDir(Path("/with a space")).home)
    assert len(homes) == 1, "launchd's supervisord and a user's command would look at different sockets"


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[StateDir]:
    state = StateDir(tmp_path / "with space")
    yield state
    assert state.link
    if state.link.is_dir() and not state.link.is_symlink():
        state.link.rmdir()
    else:
        state.link.unlink(missing_ok=True)


def test_a_link_that_was_cleaned_away_or_points_elsewhere_is_made_again(odd: StateDir) -> None:
    odd.create()
    assert odd.link
    odd.link.unlink()
    odd.refresh_link()
    assert odd.link.readlink() == odd.path
    odd.link.unlink()
    odd.link.symlink_to("/nowhere")
    odd.refresh_link()
    assert odd.link.readlink() == odd.path


@pytest.mark.parametrize("kind", ["file", "directory", "foreign link"])
def test_what_is_in_the_way_of_the_link_is_named_and_not_touched(odd: StateDir, kind: str) -> None:
    assert odd.link
    if kind == "file":
        odd.link.write_text("mine")
    elif kind == "directory":
        odd.link.mkdir()
    else:
        if os.getuid():
            pytest.skip("only root can make a link of somebody else")
        odd.link.symlink_to("/nowhere")
        os.lchown(odd.link, 12345, 12345)
    with pytest.raises(StateError, match="is not trusted; remove it"):
        odd.create()
    assert os.path.lexists(odd.link)
    if kind == "foreign link":
        assert os.readlink(odd.link) == "/nowhere"


# ── logs ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bound", ["MOST_LEFT_BYTES", "MOST_LEFT_FILES"])
def test_logs_of_services_that_are_gone_do_not_fill_the_disk(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    logs = state.path / "log"
    (logs / "crashed").mkdir()
    gone = [f"crashed/team-a.release-{number}.log" for number in range(3)]
    gone += [f"team-a.release.log{number}" for number in ("", ".1", ".2")]
    stay = ["controller.log", "supervisord.log.1", "omlx.log", "default.tiny.log", "default.tiny.log.2"]
    for at, name in enumerate((*stay, *gone)):
        (logs / name).write_text("x" * 100)
        os.utime(logs / name, (at, at))
    state.remove_left_logs({"default.tiny"})
    assert all((logs / name).exists() for name in (*stay, *gone))
    monkeypatch.setattr(f"metal_supervisor.state.directory.{bound}", 450 if bound == "MOST_LEFT_BYTES" else 4)
    state.remove_left_logs({"default.tiny"})
    assert [name for name in (*stay, *gone) if not (logs / name).exists()] == gone[:2]


def test_the_tail_of_a_log_is_printable_and_bounded(state: StateDir) -> None:
    assert state.log_tail("default.tiny", 5) == []
    state.log_path("default.tiny").write_bytes(b"x" * 50_000 + b"\n\n\x1b[31mred\x00\xff\nlast \xc3\xa4")
    assert state.log_tail("default.tiny", 2) == ["[31mred\ufffd", "last ä"]
    assert sum(map(len, state.log_tail("default.tiny", 100))) <= 16384


def test_a_link_to_a_disk_that_is_not_there_is_named_and_not_only_the_state_directory(tmp_path: Path) -> None:
    (tmp_path / "hub").symlink_to(tmp_path / "unmounted")
    with pytest.raises(StateError, match=f"{tmp_path / 'hub'}"):
        StateDir(tmp_path).create()
