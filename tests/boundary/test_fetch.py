"""One file over a bad line: whatever is cut, wrong or hostile, it ends whole or not at all, resumed where it was."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from uneven_server import File, Uneven, serving

from metal_supervisor.host import machine
from metal_supervisor.models import model_directory
from metal_supervisor.models.listing import Piece, Retry, Unusable
from metal_supervisor.models.remote import fetch as fetch_module
from metal_supervisor.models.remote.fetch import Mismatch, discard, fetch, partial
from metal_supervisor.models.remote.origins import locate
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.remote.web import Client, Stopped
from metal_supervisor.spec.sources import Artifact
from tests.support.pace import patience

NEAR = SourcePolicy(private=("127.0.0.0/8",))
MODEL = b"GGUF" + random.Random(1).randbytes(1_000_000)
HALF = 500_000


@pytest.fixture(scope="module")
def server() -> Iterator[Uneven]:
    with serving() as made:
        yield made


@pytest.fixture
def web(server: Uneven) -> Uneven:
    server.files = {"/m.gguf": File(MODEL)}
    server.asked.clear()
    server.heads = 0
    for event in (server.stalled, server.left, server.hold):
        event.clear()
    return server


class Counting:
    """Counts what comes."""

    def __init__(self) -> None:
        self.bytes = self.hashed_bytes = self.syncs = 0

    def begin(self) -> None:
        """Nothing."""

    def got(self, more_bytes: int) -> None:
        self.bytes += more_bytes

    def synced(self) -> None:
        self.syncs += 1

    def hashed(self, more_bytes: int) -> None:
        self.hashed_bytes += more_bytes


class Line:
    """Fetches one file as often as it is asked to, each time as a process that knows only what is on the disk."""

    def __init__(self, web: Uneven, directory: Path, name: str = "m.gguf") -> None:
        self.web, self.target, self.url = web, directory / name, f"{web.url}/{name}?sig=hunter2"
        self.part, self.note = partial(self.target), directory / f"{name}.partial.json"
        self.file = web.files.get(f"/{name}", File(b""))
        self.stall_s, self.wanted, self.sha256 = 5.0, "", ""

    def once(self) -> Counting:
        """Raises Unusable, Stopped, OSError."""
        client, watcher = Client(NEAR, self.stall_s), Counting()
        try:
            piece = locate(Artifact(self.url), {}, client, "").pieces[0]
            more = {"wanted_sha256": self.wanted, "sha256": self.sha256, "gguf": True}
            fetch(
                client,
                Piece(self.target.name, piece.url, piece.size_bytes, validator=piece.validator, **more),
                self.target,
                {},
                watcher,
            )
        except Unusable as error:
            assert "hunter2" not in f"{error}{error!r}"
            raise
        finally:
            client.close()
        return watcher

    def fails(self, text: str, reason: str = "DownloadFailed", retry: Retry | None = Retry.SOON) -> Unusable:
        with pytest.raises(Unusable, match=text) as caught:
            self.once()
        assert caught.value.reason == reason and retry in (None, caught.value.retry)
        assert not self.target.exists()
        return caught.value

    def whole(self) -> Counting:
        found = self.once()
        assert self.target.read_bytes() == self.file.data
        assert sorted(self.target.parent.iterdir()) == [self.target]
        return found


@pytest.fixture
def line(web: Uneven, tmp_path: Path) -> Line:
    return Line(web, tmp_path)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ── cut and resumed ──────────────────────────────────────────────────────────────────────────────


def test_a_whole_file_comes_in_one_go(line: Line) -> None:
    assert line.whole().bytes == len(MODEL)
    assert line.web.starts() == [None] and line.web.sent() == len(MODEL)


def test_a_file_that_was_cut_in_the_middle_goes_on_there(line: Line) -> None:
    line.file.cuts = [HALF]
    line.fails("the line was cut")
    assert line.part.stat().st_size == HALF
    assert line.whole().bytes == len(MODEL)
    assert line.web.starts() == [None, HALF] and line.web.asked[1].if_range == '"one"'
    assert line.web.sent() == len(MODEL)


def test_a_cut_within_the_magic_is_no_other_file(line: Line) -> None:
    line.file.cuts = [1, 1, 1]
    for _ in range(3):
        line.fails("the line was cut")
    line.whole()
    assert line.web.starts() == [None, 1, 2, 3]


def test_what_was_killed_before_it_was_synced_is_synced_before_it_gets_its_name(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.part.write_bytes(MODEL)
    said = {"validator": '"one"', "size_bytes": len(MODEL), "sha256": "", "durable_bytes": 0, "boot": machine.boot_id()}
    line.note.write_text(json.dumps(said))
    synced: list[int] = []
    real = model_directory.sync
    monkeypatch.setattr(model_directory, "sync", lambda fd: (synced.append(os.fstat(fd).st_ino), real(fd))[1])
    line.whole()
    assert line.target.stat().st_ino in synced and line.web.asked == []


@pytest.mark.parametrize("etag", ["", 'W/"weak"'])
def test_a_server_that_does_not_know_ranges_starts_anew(line: Line, etag: str) -> None:
    line.file.ranges, line.file.cuts, line.file.etag = False, [HALF], etag
    line.fails("the line was cut")
    assert line.whole().bytes == len(MODEL)
    assert line.web.starts() == ([None, HALF] if etag else [None, None])
    assert line.web.sent() == len(MODEL) + HALF


def test_without_a_validator_nothing_is_put_together(line: Line) -> None:
    line.file.etag, line.file.cuts = "", [HALF]
    line.fails("the line was cut")
    line.file.data = b"GGUF" + bytes(len(MODEL) - 4)
    line.whole()
    assert line.web.starts() == [None, None]


def test_a_date_is_a_validator_too(line: Line) -> None:
    line.file.etag, line.file.date, line.file.cuts = "", "Thu, 01 Jan 2026 00:00:00 GMT", [HALF]
    line.fails("the line was cut")
    line.whole()
    assert line.web.asked[1].if_range == line.file.date and line.web.sent() == len(MODEL)


# ── another edition ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wanted", [False, True])
def test_a_file_that_changes_between_two_tries_is_fetched_anew(line: Line, wanted: bool) -> None:
    """Also when its sha256 is given: that of two editions put together would be a mismatch for ever."""
    other = b"GGUF" + random.Random(2).randbytes(len(MODEL) - 4)
    line.wanted = sha256(other) if wanted else ""
    line.file.cuts = [HALF]
    line.fails("the line was cut")
    line.file.data, line.file.etag = other, '"two"'
    assert line.whole().bytes == len(other)
    assert line.web.starts() == [None, None]


@pytest.mark.parametrize("etags", [('"one"', '"two"'), ('W/"one"', 'W/"two"')])
def test_a_file_that_changes_after_it_was_asked_about_is_not_put_together(
    line: Line, etags: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line.file.etag, line.file.cuts = etags[0], [HALF]
    line.fails("the line was cut")
    other = b"GGUF" + random.Random(3).randbytes(len(MODEL) - 4)
    real = fetch_module._usable

    def usable(*at: object) -> int:
        line.file.data, line.file.etag = other, etags[1]
        return real(*at)  # type: ignore[arg-type]

    monkeypatch.setattr(fetch_module, "_usable", usable)
    if etags[0].startswith("W/"):
        line.fails("has changed; it is fetched anew")
    line.whole()


def test_the_edition_that_came_counts_and_not_the_one_that_was_asked_about(line: Line) -> None:
    """The file is replaced between the question and the body, the body is cut, and the old file comes back."""
    old, other = line.file.data, b"GGUF" + random.Random(4).randbytes(len(MODEL) - 4)
    piece = Piece("m.gguf", line.url, len(old), validator='"one"', gguf=True)
    line.web.files = {"/m.gguf": File(other, '"two"', cuts=[HALF])}
    with pytest.raises(Unusable, match="the line was cut"):
        fetch(Client(NEAR), piece, line.target, {}, Counting())
    line.web.files = {"/m.gguf": line.file}
    line.whole()


def test_a_file_that_became_shorter_is_fetched_anew(line: Line) -> None:
    line.file.cuts = [HALF]
    line.fails("the line was cut")
    line.file.data = MODEL[:1000]
    line.whole()


# ── wrong lengths ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("off", [-1000, 1000, 10**12])
def test_a_body_whose_length_is_not_that_of_the_file_is_not_taken(line: Line, off: int) -> None:
    line.file.length_off = off
    line.fails("is it being replaced")
    assert not line.part.exists() or line.part.stat().st_size == 0
    line.file.length_off = 0
    line.whole()


def test_a_server_that_promises_more_than_it_has_never_ends_whole(line: Line) -> None:
    line.file.ranges, line.file.length_off = False, 0
    line.file.cuts = [len(MODEL) - 1]
    line.fails("the line was cut")
    assert line.part.stat().st_size == len(MODEL) - 1


def test_a_body_without_end_is_ended(line: Line) -> None:
    line.file.sized, line.file.endless = False, True
    line.fails("sends more than the")
    assert line.part.stat().st_size <= len(MODEL)
    assert line.web.left.wait(30)


def test_a_body_of_unknown_length_is_taken_if_it_ends_and_not_if_it_is_cut(line: Line) -> None:
    line.file.sized, line.file.ranges, line.file.cuts = False, False, [HALF]
    line.fails("the line was cut")
    assert line.part.stat().st_size == HALF
    line.whole()


def test_a_chunked_body_that_is_cut_goes_on_there(line: Line) -> None:
    line.file.sized, line.file.cuts = False, [HALF]
    line.fails("the line was cut")
    line.whole()
    assert line.web.starts() == [None, HALF]


def test_a_stop_is_no_end_of_a_body_of_unknown_length(line: Line) -> None:
    """A close-delimited body ends like that, and half a model would get its name."""
    piece = Piece("m.gguf", line.url, None, gguf=True)
    line.file.sized, line.file.stalls_at = False, 1 << 16
    client = Client(NEAR)
    ended: list[BaseException] = []

    def run() -> None:
        try:
            fetch(client, piece, line.target, {}, Counting())
        except BaseException as error:  # noqa: BLE001 - looked at below
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert line.web.stalled.wait(30)
    client.stop()
    thread.join(patience(1.0))
    assert not thread.is_alive() and isinstance(ended[0], Stopped)
    assert not line.target.exists()


# ── what is no model ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["m.gguf", "download"])
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"<!DOCTYPE html><title>Log in</title>" + bytes(200_000), "is a web page"),
        (b"PK\x03\x04" * 9, "something"),
        (b"GGU", "something else"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer, not a GGUF file; run git lfs pull"),
    ],
)
def test_what_does_not_begin_like_a_model_is_not_kept(
    web: Uneven, tmp_path: Path, data: bytes, text: str, name: str
) -> None:
    web.files[f"/{name}"] = File(data)
    Line(web, tmp_path, name).fails(text, "InvalidModelFile", Retry.LATER)
    assert list(tmp_path.iterdir()) == []


def test_nothing_at_all_is_no_model(web: Uneven, tmp_path: Path) -> None:
    web.files["/m.gguf"] = File(b"")
    Line(web, tmp_path).fails("is empty", "InvalidModelFile", Retry.LATER)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_of_a_repository_is_one(web: Uneven, tmp_path: Path) -> None:
    fetch(Client(NEAR), Piece("merges.txt", f"{web.url}/merges.txt", 0), tmp_path / "merges.txt", {}, Counting())
    assert (tmp_path / "merges.txt").read_bytes() == b"" and web.asked == []


def test_another_digest_is_a_mismatch_and_nothing_is_kept(line: Line) -> None:
    line.wanted = "a" * 64
    error = line.fails("should have sha256 aaaa", "ModelDigestMismatch", Retry.NEVER)
    assert isinstance(error, Mismatch) and (error.wanted, error.found) == ("a" * 64, sha256(MODEL))
    assert list(line.target.parent.iterdir()) == []


def test_the_right_digest_is_proven_by_reading_the_disk(line: Line) -> None:
    line.wanted, line.file.cuts = sha256(MODEL), [HALF]
    line.fails("the line was cut")
    assert line.whole().hashed_bytes == len(MODEL)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "reason", "retry"),
    [
        (404, "SourceNotFound", Retry.LATER),
        (410, "SourceNotFound", Retry.LATER),
        (400, "DownloadFailed", Retry.LATER),
        (401, "SourceUnauthorized", Retry.SOON),
        (403, "SourceUnauthorized", Retry.SOON),
        (429, "DownloadFailed", Retry.SOON),
        (503, "DownloadFailed", Retry.SOON),
        (500, "DownloadFailed", Retry.SOON),
    ],
)
def test_a_refusal_of_the_body_is_told_apart_and_costs_nothing(
    line: Line, status: int, reason: str, retry: Retry
) -> None:
    line.file.cuts = [HALF]
    line.fails("the line was cut")
    line.file.statuses, line.file.retry_after = [status], "7"
    error = line.fails(f"answered {status}", reason, retry)
    assert error.after_s == (7.0 if status in (429, 500, 503) else 0.0)
    line.whole()
    assert line.web.sent() == len(MODEL)


def test_a_server_that_drips_is_given_up(line: Line) -> None:
    line.stall_s, line.file.stalls_at = 0.2, 1 << 16
    line.fails("the line was cut")
    assert line.part.stat().st_size == 1 << 16
    line.file.stalls_at = -1
    line.whole()
    assert line.web.starts() == [None, 1 << 16]


def test_bytes_that_come_one_by_one_are_a_stall_too(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(fetch_module.time, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(fetch_module.web, "body", lambda *_: iter([b"GGUF", *[b"x"] * 1000]))
    line.fails(r"sent only \d+ bytes in 5 s")


# ── the disk ─────────────────────────────────────────────────────────────────────────────────────


def test_a_disk_that_is_full_keeps_what_came(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = os.write, [HALF]

    def write(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = real(descriptor, data[: room[0]])
        room[0] -= size
        return size

    monkeypatch.setattr(fetch_module.os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        line.once()
    monkeypatch.undo()
    assert line.part.stat().st_size == HALF
    line.whole()
    assert line.web.starts() == [None, HALF]


@pytest.mark.parametrize("suffix", ["", ".partial", ".partial.json", ".partial.json.new"])
@pytest.mark.parametrize("size", [len(MODEL), 0])
def test_no_link_is_followed(line: Line, tmp_path: Path, suffix: str, size: int) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_bytes(MODEL[:HALF])
    said = {"validator": '"one"', "size_bytes": size, "sha256": "", "durable_bytes": 9, "boot": machine.boot_id()}
    line.note.write_text(json.dumps(said))
    link = tmp_path / f"m.gguf{suffix}"
    link.unlink(missing_ok=True)
    link.symlink_to(outside)
    piece = Piece("m.gguf" if size else "m.txt", line.url, size, validator='"one"')
    fetch(Client(NEAR), piece, line.target, {}, Counting())
    assert outside.read_bytes() == MODEL[:HALF]
    assert not line.target.is_symlink() and line.target.read_bytes() == MODEL[:size]


def test_a_link_to_nowhere_is_not_followed_either(line: Line, tmp_path: Path) -> None:
    nowhere = tmp_path.parent / f"{tmp_path.name}-nowhere"
    line.part.symlink_to(nowhere)
    fetch(Client(NEAR), Piece("m.txt", line.url, 0), line.target, {}, Counting())
    assert not nowhere.exists() and not line.target.is_symlink()


def test_after_a_power_cut_only_what_was_synced_counts(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "SYNC_BYTES", 1 << 17)
    line.file.cuts = [HALF]
    line.fails("the line was cut")
    said = json.loads(line.note.read_text())
    durable = said["durable_bytes"]
    assert 0 < durable <= HALF and line.part.stat().st_size == HALF
    with line.part.open("r+b") as file:  # what such a cut leaves there is anything
        file.seek(durable)
        file.write(bytes(HALF - durable))
    line.note.write_text(json.dumps({**said, "boot": "another"}))
    line.whole()
    assert line.web.starts() == [None, durable]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '{"validator": 1}', '{"validator": "\\"one\\"", "x": 1}']
)
def test_a_journal_that_makes_no_sense_is_as_good_as_none(line: Line, text: str) -> None:
    line.part.write_bytes(b"anything")
    line.note.write_text(text)
    line.whole()
    assert line.web.starts() == [None]


def test_what_is_thrown_away_is_gone(line: Line) -> None:
    line.file.cuts = [HALF]
    line.fails("the line was cut")
    discard(line.target)
    discard(line.target)
    assert list(line.target.parent.iterdir()) == []


# ── any order ────────────────────────────────────────────────────────────────────────────────────

TROUBLE = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, len(MODEL))),
    st.tuples(st.just("status"), st.sampled_from([429, 500, 503])),
    st.tuples(st.just("ranges"), st.booleans()),
    st.tuples(st.just("sized"), st.booleans()),
    st.tuples(st.just("boot"), st.just(0)),
    st.tuples(st.just("etag"), st.sampled_from(['"one"', '"two"', ""])),
    st.tuples(st.just("data"), st.sampled_from([1, 2])),
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(troubles=st.lists(TROUBLE, max_size=8), wanted=st.booleans())
def test_whatever_happens_it_ends_with_the_right_bytes(
    web: Uneven, tmp_path_factory: pytest.TempPathFactory, troubles: list[tuple[str, int | str]], wanted: bool
) -> None:
    web.files = {"/m.gguf": File(MODEL)}
    line = Line(web, tmp_path_factory.mktemp("any"))
    for what, value in troubles:
        if what == "cut":
            line.file.cuts.append(int(value))
        elif what == "status":
            line.file.statuses.append(int(value))
        elif what == "boot" and line.note.exists():
            line.note.write_text(json.dumps({**json.loads(line.note.read_text()), "boot": "another"}))
        elif what == "data":  # an honest server: another file has another tag
            line.file.data = b"GGUF" + random.Random(int(value)).randbytes(900_000 + int(value))
            line.file.etag = f'"data-{value}"' if line.file.etag else ""
        elif what in ("ranges", "sized", "etag"):
            setattr(line.file, what, value)
            if what == "etag" and value:
                line.file.etag = f'"{value}-{sha256(line.file.data)[:8]}"'.replace('""', '"')
        try:
            line.once()
            discard(line.target)
            assert line.target.read_bytes() == line.file.data
            line.target.unlink()
        except Unusable as error:
            assert error.retry is Retry.SOON
    line.file.cuts, line.file.statuses = [], []
    line.wanted = sha256(line.file.data) if wanted else ""
    line.whole()
