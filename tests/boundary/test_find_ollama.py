"""How a real ollama is come by for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ollama import find_ollama
from tests.support.system import ROOT


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it, and no ollama of the user's."""
    for name in (find_ollama.VARIABLE, "CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(find_ollama, "HOMEBREW", ())
    return programs


def program(path: Path, text: str = "exit 0") -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def left_over(cache: Path) -> list[str]:
    return sorted(each.name for each in cache.iterdir() if each.name != ".ollama-lock")


def test_the_one_that_is_named_is_taken_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(find_ollama.VARIABLE, "/bin/sh")
    assert find_ollama.find(tmp_path) == Path("/bin/sh")
    monkeypatch.setenv(find_ollama.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(find_ollama.NotFound, match="is not an executable file"):
        find_ollama.find(tmp_path)


def test_the_users_own_is_taken_before_one_is_built(tmp_path: Path, bare: Path) -> None:
    own = program(bare / "ollama")
    assert find_ollama.find(tmp_path / "cache") == own
    assert not (tmp_path / "cache").exists()


def test_what_the_build_lacks_is_said_by_name(tmp_path: Path, bare: Path) -> None:
    with pytest.raises(find_ollama.NotFound, match=r"no go, no cc, no c\+\+ here .*install it, or Ollama itself"):
        find_ollama.find(tmp_path / "cache")
    program(bare / "go")
    program(bare / "cc")
    with pytest.raises(find_ollama.NotFound, match=r"there is no c\+\+ here"):
        find_ollama.find(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("go", "why"),
    [
        ("echo no such module; exit 1", "go mod download .* failed; install Ollama, and set .*:\nno such module"),
        ("""echo '{"Sum": "h1:other="}'""", "has the checksum h1:other=, which is not h1:"),
    ],
)
def test_a_build_that_fails_is_explained_and_leaves_nothing(tmp_path: Path, bare: Path, go: str, why: str) -> None:
    for name, text in (("go", go), ("cc", ""), ("c++", "")):
        program(bare / name, text)
    with pytest.raises(find_ollama.NotFound, match=f"(?s){why}"):
        find_ollama.find(tmp_path / "cache")
    assert left_over(tmp_path / "cache") == []


def test_one_is_built_once_and_what_a_killed_builder_left_is_removed(
    tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("go", "cc", "c++"):
        program(bare / name)
    (tmp_path / ".ollama-part-killed").mkdir()
    made: list[Path] = []

    def build(target: Path) -> None:
        target.mkdir()
        made.append(program(target / "ollama"))

    monkeypatch.setattr(find_ollama, "build", build)
    assert find_ollama.find(tmp_path) == find_ollama.find(tmp_path) == made[0]
    assert len(made) == 1 and left_over(tmp_path) == ["bin", f"ollama-{find_ollama.VERSION}"]


def test_it_prints_the_path_or_what_is_missing(tmp_path: Path) -> None:
    def run(named: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.support.finders.find_ollama"]
        environment = {**os.environ, find_ollama.VARIABLE: named}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, cwd=ROOT)

    assert run("/bin/sh").stdout == "/bin/sh\n"
    failed = run(str(tmp_path / "none"))
    assert failed.returncode == 1 and failed.stdout == "" and "is not an executable file" in failed.stderr
