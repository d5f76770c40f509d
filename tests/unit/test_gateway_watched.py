"""The gateway's file of keys, as people edit it: what is being written is not taken for what was meant."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from unittest import mock

import pytest

from metal_supervisor.gateway import access, watched
from metal_supervisor.gateway.access import Doorman
from metal_supervisor.gateway.errors import GatewayError

KEY = access.new_key()
LINE = access.line_of(access.AccessKey("laptop", access.digest_of(KEY)))


def written(path: Path, text: str, ago_s: float) -> None:
    """Write a file as if it had been so long ago."""
    path.write_text(text, "utf-8")
    at = time.time() - ago_s
    os.utime(path, (at, at))


def is_known(doorman: Doorman) -> bool:
    try:
        return doorman.known(KEY).name == "laptop"
    except GatewayError:
        return False


@pytest.fixture
def doorman() -> Doorman:
    return Doorman()


def test_an_editor_that_empties_the_file_first_shuts_nobody_out(tmp_path: Path, doorman: Doorman) -> None:
    path = tmp_path / "gateway.keys"
    written(path, LINE, 0)
    files = watched.keys(path, doorman)
    files.look()
    assert is_known(doorman), "at its start it waits for nothing"
    written(path, "", 0)
    files.look()
    assert is_known(doorman)
    written(path, f"# one\n{LINE}\n", 0)
    files.look()
    assert is_known(doorman) and not files.problem
    written(path, "", 2 * watched.SETTLED_S)
    files.look()
    assert not is_known(doorman), "an empty file has no keys"


def test_a_file_from_the_future_is_taken_at_once(tmp_path: Path, doorman: Doorman) -> None:
    path = tmp_path / "gateway.keys"
    written(path, "", 0)
    files = watched.keys(path, doorman)
    files.look()
    written(path, LINE, -3600)
    files.look()
    assert is_known(doorman), "a clock may be set"


def test_files_that_their_reader_is_given_later_are_taken_then(
    tmp_path: Path, doorman: Doorman, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by `sudo cp`, and a chown a moment later, which changes neither the file's time nor its size."""
    path = tmp_path / "gateway.keys"
    written(path, LINE, 2 * watched.SETTLED_S)
    files = watched.keys(path, doorman)
    closed = PermissionError(errno.EACCES, "Permission denied")  # not by its mode: root may run this
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", mock.Mock(side_effect=closed))
        files.look()
        files.look()
    assert not is_known(doorman) and "cannot be read" in files.problem
    files.look()
    assert is_known(doorman) and not files.problem
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == [
        "files cannot be used; the last good ones stay"
    ]
