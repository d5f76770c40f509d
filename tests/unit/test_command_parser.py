"""Help of the commands, and the answer to a mistyped one."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cli import main, programs
from metal_supervisor.cli.command_parser import GROUPS
from metal_supervisor.install import upgrade
from metal_supervisor.settings import loader

INTERNAL = {"boot", *programs.PROGRAMS}


def _said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    done = capsys.readouterr()
    return int(ended.value.code or 0), done.out, done.err


def test_each_command_is_in_one_group_or_internal() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted([*grouped, *INTERNAL]) == sorted(main.parser().commands())


@pytest.mark.parametrize("name", sorted(main.parser().commands()))
def test_a_command_that_is_asked_for_is_made_without_most_others_and_is_the_same(name: str) -> None:
    alone, all_of_them = main.parser(name).commands(), main.parser().commands()
    assert len(alone) <= len(programs.PROGRAMS)
    assert alone[name].help_without([]) == all_of_them[name].help_without([])


def test_help_shows_the_groups_and_no_internal_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _said(capsys, "--help")
    assert code == 0
    first_words = [line.split()[0] for line in out.splitlines() if line[:3].strip() and line.startswith("  ")]
    assert not INTERNAL & set(first_words)
    found = [out.index(f"\n{title}:\n") for title in GROUPS]
    assert found == sorted(found)
    assert all(name in first_words for names in GROUPS.values() for name in names)


def test_who_types_no_command_is_shown_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    assert capsys.readouterr().err == main.parser().format_help()


def test_an_internal_command_still_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert _said(capsys, "controller", "--help")[:1] == (0,)


def test_help_of_a_command_with_every_setting_is_short_and_points_to_all(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run", "boot", "install", "status", "doctor", "fit"):
        _, short, _ = _said(capsys, name, "--help")
        assert len(short.splitlines()) < 30 and "docs/settings.md" in short and "--help-all" in short
        _, long, _ = _said(capsys, name, "--help-all")
        assert all(loader.flag_of(setting) in long for setting in loader.FIELDS)


def test_help_of_a_command_with_few_settings_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _said(capsys, "cordon", "--help")
    assert "--state-dir" in out and "--help-all" not in out


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["stat"], "there is no command 'stat' (did you mean status?); see metal-supervisor --help"),
        (["statsu"], "there is no command 'statsu' (did you mean status?); see metal-supervisor --help"),
        (["controler"], "there is no command 'controler'; see metal-supervisor --help"),
        (["models", "lss"], "there is no command 'lss' (did you mean ls?); see metal-supervisor models --help"),
        (["run", "--prot", "9"], "there is no flag '--prot' (did you mean --port?); see metal-supervisor run --help"),
        (["fit", "--jsno=1", "x"], "there is no flag '--jsno' (did you mean --json?); see metal-supervisor fit --help"),
        (["version", "--zzz"], "there is no flag '--zzz'; see metal-supervisor version --help"),
        (["status", "a/b"], "'a/b' is one argument too many; see metal-supervisor status --help"),
        (["--state-dir", "x", "status"], "--state-dir comes after the command; see metal-supervisor --help"),
        (["--state-dir=x"], "--state-dir comes after the command; see metal-supervisor --help"),
        (["models", "--json", "ls"], "--json comes after the command; see metal-supervisor models --help"),
        (["--zzz", "status"], "there is no flag '--zzz'; see metal-supervisor --help"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], typed: list[str], answer: str
) -> None:
    code, _, err = _said(capsys, *typed)
    assert (code, err.rpartition("error: ")[2]) == (2, f"{answer}\n")
    assert len(err.splitlines()) < 6


@pytest.mark.parametrize("command", ["uninstall", "upgrade", "cordon", "uncordon", "drain", "sidecar"])
def test_an_empty_state_directory_is_refused(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, _, err = _said(capsys, command, "--state-dir", "")
    assert code == 2 and "argument --state-dir: must not be empty" in err


@pytest.mark.parametrize(
    ("words", "on_demand"),
    [
        (["--on-demand", "m"], "true"),
        (["--on-demand", "off", "m"], "off"),
        (["m", "--on-demand"], "true"),
        (["m", "--on-demand=no"], "no"),
    ],
)
def test_a_setting_that_is_true_alone_does_not_take_the_argument_after_it(words: list[str], on_demand: str) -> None:
    parsed = main.parser("serve").parse_args(["serve", *words])
    assert (parsed.source, parsed.on_demand) == ("m", on_demand)


def test_ctrl_c_while_the_modules_are_still_imported_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed script begins where the guard is, as `python -m metal_supervisor` does."""

    class Interrupted(types.ModuleType):
        def __getattr__(self, _name: str) -> Any:
            raise KeyboardInterrupt

    written = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    (found,) = re.findall(r'(?m)^metal-supervisor = "([\w.]+):(\w+)"$', written)
    begin = getattr(importlib.import_module(found[0]), found[1])
    monkeypatch.setitem(sys.modules, "metal_supervisor.cli.main", Interrupted("main"))
    monkeypatch.setattr(sys, "argv", ["metal-supervisor", "version"])
    assert begin() == 130


def test_a_full_disk_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a write, unlike an open, names no file

    monkeypatch.setattr(upgrade, "upgrade", full)
    assert main.main(["upgrade", "--state-dir", str(tmp_path)]) == 1
    text = f"a file cannot be written: {os.strerror(errno.ENOSPC)}; make room, then run this again"
    assert capsys.readouterr().err == f"metal-supervisor: {text}\n"
