"""Programs that tests use are got before the tests, with a line for each; a test only looks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from find_llama_server import NotFound, missing

from tests.support.finders import prepare
from tests.support.system import ROOT


class Program:
    """A part that can be got, or not."""

    def __init__(self, name: str, *, here: bool = False, fails: str = "") -> None:
        self.name, self.here, self.fails, self.got = name, here, fails, 0

    def find(self, *, install_it: bool = True) -> Path:
        if not self.here and not install_it:
            raise missing(self.name)
        if not self.here:
            self.got += 1
            if self.fails:
                raise NotFound(self.fails)
            self.here = True
        return Path("/", self.name)


def run(*parts: prepare.Part, names: str = "") -> bool:
    return prepare.prepare(parts, prepare.asked(names, parts))


def test_each_part_is_a_line_with_what_it_is_and_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    light, there = Program("light"), Program("there", here=True)
    assert run(prepare.Part("light", "a package", light.find), prepare.Part("there", "a build", there.find))
    said = capsys.readouterr().out.splitlines()
    assert said == ["prepare: light: a package", "prepare: light is here, after 0 s"]
    assert (light.got, there.got) == (1, 0)


@pytest.mark.parametrize(("names", "got"), [("", 0), ("other", 0), ("all", 1), ("other, heavy", 1)])
def test_a_heavy_part_is_got_only_when_asked_for(names: str, got: int, capsys: pytest.CaptureFixture[str]) -> None:
    heavy, other = Program("heavy"), Program("other", here=True)
    parts = prepare.Part("heavy", "a long build", heavy.find, heavy=True), prepare.Part("other", "", other.find)
    assert run(*parts, names=names) and heavy.got == got
    left_out = "heavy left out: there is no heavy here; get one with: make prepare METAL_ENGINES=heavy (a long build)"
    assert (left_out in capsys.readouterr().out) is (got == 0)


def test_only_a_part_without_which_most_tests_fail_stops_them(capsys: pytest.CaptureFixture[str]) -> None:
    broken = Program("broken", fails="pip says no")
    assert run(prepare.Part("broken", "", broken.find))
    assert not run(prepare.Part("broken", "", broken.find, needed=True))
    assert capsys.readouterr().out.count("prepare: broken left out: pip says no, after 0 s") == 2


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"METAL_ENGINES names olama; use all, or of .*mlx_lm.*, ollama"):
        prepare.asked("ollama,olama", prepare.PARTS)


def test_no_test_installs_anything() -> None:
    tried = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        with_stand_ins = "test_tools.py", "test_set_up.py"
        of_the_finders = path.name.startswith("test_find_") or path.name in with_stand_ins
        source = path.read_text()
        if of_the_finders or path.parent.parent.name == "support" or "find_" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and (ast.unparse(node.func).partition(".")[0]).startswith("find_"):
                name = ast.unparse(node.func).rpartition(".")[2]
                looks = [ast.unparse(each.value) for each in node.keywords if each.arg == "install_it"] == ["False"]
                tried += [] if looks or not name.startswith("find") else [f"{path.name}:{node.lineno}"]
    assert not tried


def test_tests_of_an_absent_engine_are_skipped_counted_and_install_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "METAL_SUPERVISOR_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "pytest", "-k", "one_object", "tests/boundary/test_s3.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    counted = [line.split(maxsplit=1) for line in done.stdout.splitlines() if "no versitygw here" in line]
    assert [int(count) > 0 for count, _ in counted] == [True], done.stdout
    assert "get one with: make prepare METAL_ENGINES=versitygw" in counted[0][1]
    assert not (tmp_path / "cache").exists()
