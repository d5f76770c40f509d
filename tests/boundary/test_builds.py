"""Executables of engines on a real disk, and what runs those that are scripts."""

from __future__ import annotations

import errno
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metal_supervisor.host import machine
from metal_supervisor.runtimes import RUNTIMES, Binary
from metal_supervisor.runtimes import builds as builds_module
from metal_supervisor.runtimes.builds import Broken, Builds, find, homes_of, interpreter_of
from metal_supervisor.state.kept_files import edition_of
from tests.support.system import eventually

HELP = 'import sys\nprint("--model --kv-bits")\n'
MLX = RUNTIMES["mlx-server"].executables


def script(path: Path, first_line: str) -> Path:
    path.write_text(f"{first_line}\n{HELP}")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("first_line", "python"),
    [
        ("#!/v/bin/python3", "/v/bin/python3"),
        ("#!/v/bin/python3.11 -s", "/v/bin/python3.11"),
        ("#!/bin/sh\n'''exec' /v/bin/python \"$0\" \"$@\"\n' '''", "/v/bin/python"),
        ("#!/bin/sh\n'''exec' \"/a b/bin/python3\" \"$0\" \"$@\"\n' '''", "/a b/bin/python3"),
        ("#!/bin/sh\n'''exec' '/a b/bin/python3' \"$0\" \"$@\"\n' '''", "/a b/bin/python3"),
        ("#!/usr/bin/env python3", ""),
        ("#!/bin/sh", ""),
        ("\x7fELF", ""),
    ],
)
def test_the_first_line_of_a_script_tells_what_runs_it(tmp_path: Path, first_line: str, python: str) -> None:
    assert interpreter_of(script(tmp_path / "s", first_line)) == python
    assert interpreter_of(tmp_path / "none") == ""


def laid_out(base: Path, *paths: str) -> None:
    """Empty files, and links, which are written `path -> target`."""
    for path, _, target in (each.partition(" -> ") for each in paths):
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        if target:
            (base / path).symlink_to(target)
        else:
            (base / path).touch()


@pytest.mark.parametrize("prefix", ["opt/homebrew", "usr/local"])
def test_a_brewed_engine_may_read_the_kegs_and_not_what_the_user_keeps_in_the_prefix(
    tmp_path: Path, prefix: str
) -> None:
    brew = tmp_path / prefix
    laid_out(brew, "Cellar/llama.cpp/1/bin/llama-server", "Cellar/ggml/1/libexec/libggml-metal.so", "etc/key", "var/db")
    laid_out(brew, "bin/llama-server -> ../Cellar/llama.cpp/1/bin/llama-server", "opt/ggml -> ../Cellar/ggml/1")
    assert homes_of(brew / "bin/llama-server", "") == tuple(f"{brew}/{name}" for name in ("Cellar", "opt", "lib"))


@pytest.mark.parametrize("place", ["", "Downloads", "bin"])
def test_an_engine_among_the_users_files_may_read_its_libraries_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "link"))
    laid_out(tmp_path, "link -> me")
    own = "libggml-cpu-apple_m1.so", "libggml.0.dylib", "libllama.so.0.1", "default.metallib", "mlx-swift_Cmlx.bundle/x"
    laid_out(tmp_path / "me", ".ssh/id", "lib/libz.dylib", "lib/secret")
    laid_out(tmp_path / "me" / place, "llama-server", "taxes.pdf", "notes.so.txt", "repo.bundle", *own)
    directory, beside = tmp_path / "me" / place, tmp_path / "me/lib/libz.dylib"
    loaded = {str(directory / name.removesuffix("/x")) for name in own} | ({str(beside)} if place else set())
    assert set(homes_of(directory / "llama-server", "")) == loaded


def test_an_engine_with_a_directory_of_its_own_may_read_all_of_it_and_lib_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    laid_out(tmp_path, "b1/bin/llama-server", "b1/lib/libllama.dylib", "bin/x -> ../b1/bin/llama-server")
    assert homes_of(tmp_path / "bin/x", "") == (f"{tmp_path}/b1/bin", f"{tmp_path}/b1/lib")


def test_what_lies_around_a_link_to_an_interpreter_is_no_environment(tmp_path: Path) -> None:
    laid_out(tmp_path, "python/bin/python3.12", ".local/bin/python3 -> ../../python/bin/python3.12")
    laid_out(tmp_path, "venv/pyvenv.cfg", "venv/bin/python -> ../../.local/bin/python3")
    assert homes_of(Path("x"), f"{tmp_path}/.local/bin/python3") == (f"{tmp_path}/python",)
    assert homes_of(Path("x"), f"{tmp_path}/venv/bin/python") == (f"{tmp_path}/venv", f"{tmp_path}/python")


def test_of_a_python_in_the_home_directory_itself_only_what_is_pythons_may_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was built with --prefix=$HOME: its prefix is where keys are, too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    laid_out(tmp_path, "bin/python3.12", "lib/python3.12/os.py", "lib/libpython3.12.so", "lib/keys", ".ssh/id")
    laid_out(tmp_path, "mlx/pyvenv.cfg", "mlx/bin/python -> ../../bin/python3.12")
    library = f"{tmp_path}/lib/python3.12", f"{tmp_path}/lib/libpython3.12.so"
    assert homes_of(Path("x"), f"{tmp_path}/mlx/bin/python") == (f"{tmp_path}/mlx", *library)
    laid_out(tmp_path, "pyvenv.cfg")
    assert homes_of(Path("x"), f"{tmp_path}/bin/python3.12") == (f"{tmp_path}/pyvenv.cfg", *library)


def test_a_python_of_macports_may_read_the_libraries_of_its_prefix(tmp_path: Path) -> None:
    python = tmp_path / "local/Library/Frameworks/Python.framework/Versions/3.12"
    laid_out(python, "bin/python3.12")
    assert homes_of(Path("x"), f"{python}/bin/python3.12") == (str(python), f"{tmp_path}/local/lib")


def test_a_directory_of_an_engine_s_own_name_in_lib_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    laid_out(tmp_path, "ollama/ollama", "ollama/lib/ollama/libggml-base.so", "ollama/secret", "lib/secret")
    assert homes_of(tmp_path / "ollama/ollama", "") == (f"{tmp_path}/ollama/lib/ollama",)


def test_a_directory_beside_an_engine_may_be_closed_to_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path.is_dir raises for what is in it: no pass of the controller came to its end."""
    laid_out(tmp_path, "b1/bin/llama-server", "b1/lib/x", "venv/pyvenv.cfg", "venv/bin/python")
    stat, closed = os.stat, (f"{tmp_path}/b1/lib/", f"{tmp_path}/venv/pyvenv.cfg")

    def refusing(path: Any, *more: Any, **named: Any) -> os.stat_result:
        if str(path).startswith(closed):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return stat(path, *more, **named)

    monkeypatch.setattr(os, "stat", refusing)
    assert homes_of(tmp_path / "b1/bin/llama-server", "") == (f"{tmp_path}/b1/bin", f"{tmp_path}/b1/lib")
    assert homes_of(Path("x"), f"{tmp_path}/venv/bin/python") == (f"{tmp_path}/venv",)


def settings(tmp_path: Path, **found: Path) -> SimpleNamespace:
    return SimpleNamespace(**{each.setting: str(found.get(each.setting, tmp_path / "none")) for each in MLX})


def test_the_first_executable_that_is_there_is_taken_and_a_script_with_its_interpreter(tmp_path: Path) -> None:
    lm = script(tmp_path / "mlx_lm.server", f"#!{sys.executable}")
    builds = Builds(settings(tmp_path, mlx_lm_server=lm), lambda: None)
    found = eventually(lambda: builds.look(MLX), 10, "the help to be read")
    flags, said = frozenset({"--model", "--kv-bits"}), "--model --kv-bits\n"
    homes, build = (sys.prefix, sys.base_prefix), f"{lm}|{edition_of(lm)}"
    assert found == Binary(str(lm), flags, "mlx_lm.server", sys.executable, said, homes, build)
    swift = script(tmp_path / "mlx-server", "#!/bin/sh\necho --max-slots; exit")
    builds = Builds(settings(tmp_path, mlx_lm_server=lm, mlx_server=swift), lambda: None)
    found = eventually(lambda: builds.look(MLX), 10, "the help to be read")
    homes, build = (str(swift.parent),), f"{swift}|{edition_of(swift)}"
    assert found == Binary(str(swift), frozenset({"--max-slots"}), "mlx-server", "", "--max-slots\n", homes, build)


@pytest.mark.parametrize(("package", "version"), [("pytest", pytest.__version__), ("none-of-that-name", "")])
def test_the_version_of_a_package_is_known_with_the_flags(tmp_path: Path, package: str, version: str) -> None:
    lm = script(tmp_path / "mlx_lm.server", f"#!{sys.executable}")
    builds = Builds(settings(tmp_path, mlx_lm_server=lm), lambda: None)
    asked = [replace(each, package=package if each.script else "") for each in MLX]
    assert eventually(lambda: builds.look(asked), 10, "the help to be read").version == version


def test_a_script_may_take_its_time_to_tell_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds_module, "HELP_WAIT_S", 0.3)
    slow = script(tmp_path / "slow", f"#!{sys.executable}\nimport time; time.sleep(1)")
    lm = Builds(settings(tmp_path, mlx_lm_server=slow), lambda: None)
    assert eventually(lambda: lm.look(MLX), 30, "the help to be read").flags == {"--model", "--kv-bits"}
    swift = Builds(settings(tmp_path, mlx_server=slow.rename(tmp_path / "slower")), lambda: None)
    with pytest.raises(Broken, match="--help does not work"):
        eventually(lambda: swift.look(MLX), 30, "the help to be given up")


def test_a_build_that_replaces_another_with_the_same_time_is_seen(tmp_path: Path) -> None:
    """All that Nix installs is of 1970."""
    path, fresh = tmp_path / "mlx-server", tmp_path / "fresh"
    for each, flag in ((path, "--old"), (fresh, "--new")):
        os.utime(script(each, f"#!/bin/sh\necho {flag}; exit"), (1, 1))
    builds = Builds(settings(tmp_path, mlx_server=path), lambda: None)
    old = eventually(lambda: builds.look(MLX), 10, "the help to be read")
    fresh.replace(path)
    new = eventually(lambda: builds.look(MLX), 10, "the help to be read")
    assert (old.flags, new.flags) == ({"--old"}, {"--new"}) and old.build != new.build


def test_a_thread_that_cannot_be_started_leaves_no_help_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while other programs of this user have as many as the system allows."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    builds = Builds(settings(tmp_path, mlx_lm_server=script(tmp_path / "lm", f"#!{sys.executable}")), lambda: None)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(threading.Thread, "start", refused)
        builds.look(MLX)
    assert eventually(lambda: builds.look(MLX), 10, "the help to be read").flags == {"--model", "--kv-bits"}


def test_what_is_missing_and_what_is_broken_is_said_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(machine.NoBinary, match=r"--mlx-server is .*; --mlx-lm-server is .*not an executable file"):
        find(settings(tmp_path), MLX)
    odd = script(tmp_path / "mlx_lm.server", "#!/bin/sh\necho --model; exit")
    builds = Builds(settings(tmp_path, mlx_lm_server=odd), lambda: None)

    def complaint() -> str:
        try:
            builds.look(MLX)
        except Broken as error:
            return str(error)
        return ""

    assert "which Python runs it" in eventually(complaint, 10, "the help to be read")
