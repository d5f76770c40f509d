"""`metal-supervisor key`: what it prints, and what becomes of the file."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from metal_supervisor.cli import keys, main
from metal_supervisor.gateway import access


def test_the_list_has_limits_and_never_a_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ["--file", str(tmp_path / "keys")]
    assert main.main(["key", "add", "ci", *file, "--services", "a,team/*", "--per-minute", "5"]) == 0
    capsys.readouterr()
    assert main.main(["key", "list", *file]) == 0
    assert capsys.readouterr().out == "ci services=a,team/* per-minute=5\n"
    assert main.main(["key", "list", *file, "--json"]) == 0
    wanted = [{"name": "ci", "services": ["a", "team/*"], "perMinute": 5, "atOnce": 0}]
    assert json.loads(capsys.readouterr().out) == wanted


@pytest.mark.parametrize("name", ["#x", "#", "a b", ""])
def test_a_name_that_would_make_no_key_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A line that begins with # is a comment: its key would never let anyone in."""
    assert main.main(["key", "add", name, "--file", str(tmp_path / "keys")]) == 1
    said = capsys.readouterr()
    assert not said.out and "NAME must be of letters" in said.err and not (tmp_path / "keys").exists()


def test_the_file_keeps_its_mode_its_group_and_the_links_to_it(tmp_path: Path) -> None:
    real, link = tmp_path / "real" / "keys", tmp_path / "keys"
    real.parent.mkdir()
    link.symlink_to(real)
    assert main.main(["key", "add", "first", "--file", str(link)]) == 0
    assert real.stat().st_mode & 0o777 == 0o600
    real.chmod(0o640)
    group = next((each for each in os.getgroups() if each != os.getgid()), 12345 if os.getuid() == 0 else os.getgid())
    os.chown(real, -1, group)
    assert main.main(["key", "add", "second", "--file", str(link)]) == 0
    assert main.main(["key", "remove", "first", "--file", str(link)]) == 0
    assert link.is_symlink() and [key.name for key in access.parse(real.read_text())] == ["second"]
    assert (real.stat().st_mode & 0o777, real.stat().st_gid) == (0o640, group)
    assert list(real.parent.iterdir()) == [real]


def test_keys_that_are_added_at_the_same_time_are_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second command reads the file only after the first has replaced it."""
    file = ["--file", str(tmp_path / "keys")]
    assert main.main(["key", "add", "zero", *file]) == 0
    second = threading.Thread(target=main.main, args=(["key", "add", "second", *file],))
    waiting, lock, begun = threading.Event(), keys.fcntl.flock, []

    def locked(descriptor: int, how: int) -> None:
        if threading.current_thread() is second:
            waiting.set()
        lock(descriptor, how)

    def fresh() -> str:
        if not begun:  # the first command: it has read the file, and not written it
            begun.append(True)
            second.start()
            waiting.wait(30)
        return access.PREFIX + str(len(begun))

    monkeypatch.setattr(keys.fcntl, "flock", locked)
    monkeypatch.setattr(access, "new_key", fresh)
    assert main.main(["key", "add", "first", *file]) == 0
    second.join()
    assert [key.name for key in access.parse((tmp_path / "keys").read_text())] == ["zero", "first", "second"]


def test_a_file_or_a_key_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "typo")
    for words in (["list"], ["list", "--json"], ["remove", "ci"]):
        assert main.main(["key", *words, "--file", file]) == 1
        assert f"{file}: No such file or directory" in capsys.readouterr().err
    assert main.main(["key", "add", "ci", "--file", file]) == 0
    assert main.main(["key", "remove", "ic", "--file", file]) == 4
    assert "there is no key called ic" in capsys.readouterr().err


def test_a_name_that_is_taken_is_told_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a line that the file does not have, nobody would find the mistake."""
    command = ["key", "add", "laptop", "--file", str(tmp_path / "keys")]
    assert main.main(command) == 0
    before = (tmp_path / "keys").read_text()
    assert main.main(command) == 1
    assert "there is a key called laptop already; remove it, or choose another name" in capsys.readouterr().err
    assert (tmp_path / "keys").read_text() == before
