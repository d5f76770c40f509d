"""mlx_lm's own server as our engine holds it: what ends it, with which exit code and which last words."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from metal_supervisor.runtimes.shims import mlx_engine
from tests.support import mlx
from tests.support.system import eventually, free_ports

ENGINE = mlx_engine.__file__
AT = ["--alias", "svc", "--host", "127.0.0.1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlx.tiny(tmp_path_factory.mktemp("mlx-engine") / "tiny")


def run(*arguments: str) -> tuple[int, str]:
    """(exit code, last line) of an engine that ends by itself."""
    command = [mlx.python(), "-E", ENGINE, *AT[:2], *arguments, *AT[2:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_what_cannot_be_served_ends_it_in_one_line(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        code, words = run("--model", str(model), "--port", str(stranger.getsockname()[1]))
    assert code == 1 and words.startswith("mlx_engine: OSError") and words.endswith("Address already in use")
    (port,) = free_ports(1)
    code, words = run("--model", str(tmp_path), "--port", str(port))
    assert code == 1 and words.startswith("mlx_engine: the model cannot be loaded: FileNotFoundError")
    code, words = run("--model", str(model), "--port", str(port), "--no-such-flag")
    assert code == 2 and "unrecognized arguments: --no-such-flag" in words


def test_other_threads_do_not_have_the_last_word() -> None:
    noisy = (
        "import sys, threading, warnings; from metal_supervisor.runtimes.shims import mlx_engine, wrapper\n"
        "sys.stdout = sys.stderr = wrapper.WrapperLog(); warnings.simplefilter('always')\n"
        "def noise():\n    while True: warnings.warn('of a library')\n"
        "for _ in range(8): threading.Thread(target=noise, daemon=True).start()\n"
        "mlx_engine.end('why it ended')\n"
    )
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", noisy], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and done.stderr.splitlines()[-1] == "mlx_engine: why it ended"


@pytest.mark.parametrize("module", ["mlx_engine", "omlx_engine"])
def test_it_ends_although_nobody_reads_what_it_says(module: str) -> None:
    full = (
        "import os, sys\n"
        f"from metal_supervisor.runtimes.shims import {module} as engine\n"
        "os.set_blocking(2, False)\n"
        "try:\n    while True: os.write(2, b'x' * 4096)\nexcept BlockingIOError: os.set_blocking(2, True)\n"
        "engine.end('why it ended')\n"
    )
    reader, writer = os.pipe()
    with subprocess.Popen([sys.executable, "-c", full], stderr=writer) as engine:
        os.close(writer)
        assert engine.wait(30) == 1
    os.close(reader)


def test_what_is_collected_while_it_writes_may_write_too() -> None:
    nested = (
        "import sys\n"
        "from metal_supervisor.runtimes.shims import wrapper\n"
        "class Text(str):\n    def encode(self, *_): log.write('inner\\n'); return b'outer\\n'\n"
        "log = wrapper.WrapperLog()\n"
        "log.write(Text('x')); wrapper.end('mlx_engine', 'why it ended')\n"
    )
    done = subprocess.run([sys.executable, "-c", nested], capture_output=True, text=True, timeout=30)
    assert done.stderr.splitlines() == ["inner", "outer", "mlx_engine: why it ended"]


def test_it_answers_although_nobody_reads_what_it_says(model: Path) -> None:
    (port,) = free_ports(1)
    reader, writer = os.pipe()
    command = [mlx.python(), "-E", ENGINE, *AT, "--model", str(model), "--port", str(port)]
    with subprocess.Popen(command, stdout=writer, stderr=writer) as engine:
        os.close(writer)
        os.close(reader)

        def asked() -> str:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            body = {"model": "svc", "messages": [{"role": "user", "content": "hi"}]}
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            answer = connection.getresponse()
            found = answer.read().decode()
            connection.close()
            return found

        try:
            assert "hello world from tiny" in eventually(asked, 30, "an answer")
            assert "hello world from tiny" in asked()
        finally:
            engine.terminate()
    assert engine.returncode == -15


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("class ModelProvider: pass", "mlx-lm 9.9 is not as it is known here: module 'mlx_lm.server' has no attribute"),
        ("import nothing_of_this_name", "mlx_lm cannot be used: ModuleNotFoundError: No module named"),
    ],
)
def test_an_mlx_lm_that_is_not_as_it_is_known_is_not_run(tmp_path: Path, server: str, words: str) -> None:
    (tmp_path / "mlx_lm").mkdir()
    (tmp_path / "mlx_lm" / "__init__.py").touch()
    (tmp_path / "mlx_lm" / "server.py").write_text(server)
    (tmp_path / "mlx_lm-9.9.dist-info").mkdir()
    (tmp_path / "mlx_lm-9.9.dist-info" / "METADATA").write_text("Name: mlx-lm\nVersion: 9.9\n")
    done = subprocess.run(
        [sys.executable, ENGINE, *AT, "--port", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 69 and done.stderr.startswith(f"mlx_engine: {words}")
    assert len(done.stderr.splitlines()) == 1
