"""How a real S3 server is come by for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.s3 import find_s3
from tests.support.system import ROOT

from tests.support.finders import go_program  # isort: skip


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it, and no server of the user's."""
    monkeypatch.delenv(find_s3.VARIABLE, raising=False)
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(go_program, "HOMEBREW", ())
    return programs


def program(path: Path, text: str = "exit 0") -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_one_that_is_named_is_taken_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(find_s3.VARIABLE, "/bin/sh")
    assert find_s3.find(tmp_path) == Path("/bin/sh")
    monkeypatch.setenv(find_s3.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(find_s3.NotFound, match="is not an executable file"):
        find_s3.find(tmp_path)


def test_the_users_own_is_taken_before_one_is_built(tmp_path: Path, bare: Path) -> None:
    with pytest.raises(find_s3.NotFound, match=r"there is no go here .*; install it, or versitygw, and set METAL_"):
        find_s3.find(tmp_path / "cache")
    own = program(bare / "versitygw")
    assert find_s3.find(tmp_path / "cache") == own and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("go", "why"),
    [
        ("echo no such module; exit 1", "go mod download .* failed; install versitygw, and set .*:\nno such module"),
        ("""echo '{"Sum": "h1:other="}'""", "has the checksum h1:other=, which is not h1:"),
    ],
)
def test_a_build_that_fails_is_explained_and_leaves_nothing(tmp_path: Path, bare: Path, go: str, why: str) -> None:
    program(bare / "go", go)
    with pytest.raises(find_s3.NotFound, match=f"(?s){why}"):
        find_s3.find(tmp_path / "cache")
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [".versitygw-lock"]


def test_one_is_built_once_and_what_a_killed_builder_left_is_removed(
    tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bare / "go")
    (tmp_path / ".versitygw-part-killed").mkdir()
    made: list[Path] = []

    def build(program_: go_program.Program, target: Path) -> None:
        target.mkdir()
        made.append(program(target / "versitygw"))

    monkeypatch.setattr(go_program, "build", build)
    assert find_s3.find(tmp_path) == find_s3.find(tmp_path) == made[0]
    left = sorted(each.name for each in tmp_path.iterdir())
    assert len(made) == 1 and left == [".versitygw-lock", "bin", f"versitygw-{find_s3.PROGRAM.version}"]


def test_it_prints_the_path_or_what_is_missing(tmp_path: Path) -> None:
    def run(named: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.support.finders.find_s3"]
        environment = {**os.environ, find_s3.VARIABLE: named}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, cwd=ROOT)

    assert run("/bin/sh").stdout == "/bin/sh\n"
    failed = run(str(tmp_path / "none"))
    assert failed.returncode == 1 and failed.stdout == "" and "is not an executable file" in failed.stderr
