"""`metal-supervisor key`: what it prints, and what becomes of the file."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cli import changes, keys, main
from metal_supervisor.gateway import access
from metal_supervisor.settings.schema import Settings
from metal_supervisor.spec.types import Program
from metal_supervisor.state.directory import StateDir
from tests.support.records import a_record


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


SECRET = "sk-of-the-engine"
ENGINE = "http://127.0.0.1:18100/v1"
GATEWAY = "http://127.0.0.1:9100/v1"
OWN = "$(m key show tiny --state-dir here)"
GIVEN = "$METAL_SUPERVISOR_KEY"
EXPORT = "export METAL_SUPERVISOR_KEY=$(m key add me --state-dir here)"
CHAT = "m chat tiny --state-dir here"
CHAT_WITH_OWN = f'METAL_SUPERVISOR_KEY="{OWN}" {CHAT}'


def with_engine(state: StateDir, name: str, namespace: str, env: dict[str, str]) -> None:
    """Write the record and the spec of an engine."""
    state.write_record(a_record(name, namespace, edition="a"))
    state.write_spec(Program(f"{namespace}.{name}", "a", json.dumps({"env": env})))


@pytest.fixture
def keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    """A state directory with an engine that requires a key."""
    monkeypatch.chdir(tmp_path)
    for name in ("METAL_SUPERVISOR_KEY", "METAL_SUPERVISOR_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    state = StateDir(tmp_path / "here")
    state.create()
    with_engine(state, "tiny", "default", {"LLAMA_API_KEY": f"{SECRET},other"})
    return state


@pytest.mark.parametrize(
    ("base", "has_own", "settings_of_gateway", "before", "key", "after"),
    [
        (ENGINE, False, {}, [], "", CHAT),
        (ENGINE, True, {}, [], OWN, CHAT_WITH_OWN),
        (ENGINE, True, {"gateway_keys": "keys"}, [EXPORT], OWN, CHAT),
        (ENGINE, False, {"gateway_keys": "keys"}, [EXPORT], "", CHAT),
        (ENGINE, False, {"gateway": "off"}, [], "", CHAT),
        (ENGINE, True, {"gateway": "off", "gateway_keys": "keys"}, [], OWN, CHAT_WITH_OWN),
        (GATEWAY, False, {}, [], "", CHAT),
        (GATEWAY, True, {}, [], OWN, CHAT_WITH_OWN),
        (GATEWAY, True, {"gateway_keys": "keys"}, [EXPORT], GIVEN, CHAT),
        (GATEWAY, True, {"gateway_keys_secret": "llm/keys"}, [], GIVEN, CHAT),
    ],
)
def test_a_printed_command_reads_the_key_that_it_needs(
    keyed: StateDir,
    base: str,
    has_own: bool,
    settings_of_gateway: dict[str, Any],
    before: list[str],
    key: str,
    after: str,
) -> None:
    if not has_own:
        with_engine(keyed, "tiny", "default", {})
    settings = Settings(**{"state_dir": str(keyed.path), "gateway": "127.0.0.1:9100", **settings_of_gateway})
    lines = changes.commands_for(settings, "tiny", base, "chat", "m")
    header = f'-H "Authorization: Bearer {key}" ' if key else ""
    body = '{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
    assert lines == [*before, f"curl {base}/chat/completions {header}-d '{body}'", after]


def test_a_key_that_is_exported_already_is_not_made_again(keyed: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAL_SUPERVISOR_KEY", "ms-x")
    settings = Settings(state_dir=str(keyed.path), gateway="127.0.0.1:9100", gateway_keys="keys")
    lines = changes.commands_for(settings, "tiny", "", "chat", "m")
    assert lines == [CHAT]


@pytest.mark.parametrize(
    ("name", "code", "out", "err"),
    [
        ("tiny", 0, f"{SECRET}\n", ""),
        ("default/tiny", 0, f"{SECRET}\n", ""),
        ("none", 4, "", "no engine on this Mac requires a key for 'none'"),
        ("open", 4, "", "no engine on this Mac requires a key for 'open'"),
        ("twice", 1, "", "twice is the name of 2 services; name one: default/twice, other/twice"),
    ],
)
def test_the_key_of_an_engine_is_shown_to_who_types_its_name(
    keyed: StateDir, capsys: pytest.CaptureFixture[str], name: str, code: int, out: str, err: str
) -> None:
    with_engine(keyed, "open", "default", {})
    for namespace in ("default", "other"):
        with_engine(keyed, "twice", namespace, {"VLLM_API_KEY": SECRET})
    assert main.main(["key", "show", name, "--state-dir", str(keyed.path)]) == code
    told = capsys.readouterr()
    assert told.out == out and err in told.err and (code == 0 or SECRET not in told.err)
