"""What this Mac says that it can run, by executables that are there, missing, slow to answer, or silent."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from metal_supervisor.settings.loader import Settings
from metal_supervisor.sidecar import board, inventory
from metal_supervisor.sidecar.inventory import Inventory, Offer, look, noted

LLAMA = Offer("llama-server", "llama-server", "7200", ("gguf",))
MLX = Offer("mlx-server", "mlx_lm.server", "", ("mlx", "safetensors"))


def program(path: Path, says: str) -> str:
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """One runtime that tells its version, and one of which there is none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("metal_supervisor.host.machine.HOMEBREW", ())
    return replace(Settings(), llama_server=program(tmp_path / "llama-server", "echo version: 7200 >&2"))


def test_what_is_here_is_told_with_its_version_and_formats(settings: Settings, tmp_path: Path) -> None:
    assert look(settings) == (LLAMA,)
    silent = replace(settings, mlx_lm_server=program(tmp_path / "mlx_lm.server", "exit 2"))
    assert look(silent) == (LLAMA, MLX)
    assert look(replace(silent, runtimes="mlx-server")) == (MLX,)


@pytest.mark.parametrize("setting", ["~no-such-user/mlx", "/" + "a" * 300])
def test_a_setting_that_cannot_be_looked_at_hides_no_other_engine(settings: Settings, setting: str) -> None:
    """As in a directory that this user may not look into."""
    assert look(replace(settings, mlx_lm_server=setting)) == (LLAMA,)


def test_the_lease_names_engines_and_formats_and_status_has_them_one_by_one() -> None:
    assert noted((LLAMA, MLX)) == {
        "metal-supervisor.io/engines": "llama-server 7200, mlx_lm.server",
        "metal-supervisor.io/formats": "gguf mlx safetensors",
    }
    assert set(noted(()).values()) == {""}
    told = json.loads(json.dumps(board.status(board.Board(engines=(LLAMA, MLX)))["engines"]))
    assert [each["program"] for each in told] == ["llama-server", "mlx_lm.server"] and told[0] == {
        "runtime": "llama-server",
        "program": "llama-server",
        "version": "7200",
        "formats": ["gguf"],
    }


def test_it_looks_again_and_tells_of_a_change(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "LOOK_EVERY_S", 0.02)
    changed = threading.Semaphore(0)
    kept = Inventory(replace(settings, mlx_lm_server=str(tmp_path / "mlx_lm.server")), changed.release)
    assert kept.offers == ()
    kept.start()
    assert changed.acquire(timeout=20) and kept.offers == (LLAMA,)
    program(tmp_path / "mlx_lm.server", "exit 2")
    assert changed.acquire(timeout=20) and kept.offers == (LLAMA, MLX)
