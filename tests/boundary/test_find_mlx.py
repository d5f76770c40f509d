"""How an mlx_lm.server is come by for tests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.boundary.test_locked_install import index, lock_of
from tests.support.mlx import find_mlx

import locked  # isort: skip


def test_the_one_that_is_named_is_taken_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(find_mlx.VARIABLE, "/bin/sh")
    assert find_mlx.find(tmp_path) == Path("/bin/sh")
    monkeypatch.setenv(find_mlx.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(find_mlx.NotFound, match="is not an executable file"):
        find_mlx.find(tmp_path)


def test_a_package_with_another_digest_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(find_mlx.VARIABLE, raising=False)
    monkeypatch.setattr(locked, "ROOT", tmp_path)
    lock = locked.path(find_mlx.LOCK)
    lock.parent.mkdir(parents=True)
    wheel = index(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    lock.write_text(lock_of("0" * 64))
    advice = f"pip could not install .*DO NOT MATCH THE HASHES.*; install it, and set {find_mlx.VARIABLE}"
    with pytest.raises(find_mlx.NotFound, match=advice):
        find_mlx.find(tmp_path / "cache")
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [".mlx_lm.server-lock"]
    # The same package, under its own digest.
    lock.write_text(lock_of(hashlib.sha256(wheel.read_bytes()).hexdigest()))
    home = find_mlx.find(tmp_path / "cache").parents[1]
    assert home.name.startswith(f"mlx-{locked.digest('mlx')}-py")
    assert list(home.glob("lib/*/site-packages/lock_probe.py"))


def test_one_that_is_complete_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(find_mlx.VARIABLE, raising=False)
    monkeypatch.setattr(find_mlx, "_install", lambda home, *_: (home.mkdir(), (home / find_mlx.MARK).touch()))
    first = find_mlx.find(tmp_path)
    monkeypatch.setattr(find_mlx, "_install", lambda home, *_: pytest.fail("it is there"))
    assert find_mlx.find(tmp_path) == first and first.name == "mlx_lm.server"
