"""Every runtime on one agent: the real llama-server, mlx_lm, oMLX and Ollama, and a stand-in for vllm-swift.

vllm-swift needs a Mac, and the stand-in follows what it documents. An engine that cannot be had here is left out, and
who asks for it is skipped with the reason. Their executables are reached through files of the system's own, so that
they can be replaced under it as an upgrade replaces them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import mlx, ollama, parts
from tests.support.finders import find_omlx
from tests.support.system import ROOT, System, engine_path, eventually, model, service

GGUF = "gguf"
MLX = "mlx"
CONTEXT = 32768
"""Tokens: a stream must not end while something else is tested."""
BUILD = "TEST_BUILD"
"""Variable by which an engine of a later build is known."""
NOWHERE = "/nonexistent"


def omlx() -> Path:
    """Absolute path of a real omlx; skips the test where there is none."""
    return parts.quick(parts.found(find_omlx.find))


@dataclass(frozen=True)
class Kind:
    """One runtime, as it is tested."""

    name: str
    """As in `spec.runtime`."""
    setting: str
    """The flag with its executable."""
    program: Callable[[], Path]
    """Where it is; skips where there is none."""
    format: str
    """Of the Model that it serves."""
    advice: str
    """What is said where it is missing."""
    daemon: str = ""
    """Program that serves all its services, "" if each has a process of its own."""
    script: bool = False
    """It is Python's, and says in its first line which one runs it."""

    @property
    def one(self) -> str:
        """The service that is always there."""
        return f"{self.name}-one"

    @property
    def two(self) -> str:
        """The service that comes and goes beside it."""
        return f"{self.name}-two"


KINDS = (
    Kind("llama-server", "--llama-server", engine_path, GGUF, "brew install llama.cpp"),
    Kind("mlx-server", "--mlx-lm-server", mlx.server, MLX, "pipx install mlx-lm", script=True),
    Kind("omlx", "--omlx", omlx, MLX, "brew install jundot/omlx/omlx", "omlx", script=True),
    Kind("ollama", "--ollama", ollama.program, GGUF, "brew install ollama", "ollama"),
    Kind(
        "vllm-swift",
        "--vllm-swift",
        lambda: ROOT / "tests/support/standin_vllm_swift.py",
        MLX,
        "brew install TheTom/tap/vllm-swift",
    ),
)


@cache
def missing(kind: Kind) -> str:
    """Why an engine cannot be had here, "" if it can."""
    try:
        kind.program()
    except pytest.skip.Exception as skipped:
        return str(skipped)
    return ""


def had() -> list[Kind]:
    """The runtimes that can be tested here."""
    return [kind for kind in KINDS if not missing(kind)]


def manifest(kind: Kind, name: str, **spec: Any) -> dict[str, Any]:
    """An InferenceService of a runtime."""
    threads = ["--threads", "1"] if kind.name == "llama-server" else []
    return service(
        name, **{"model": kind.format, "runtime": kind.name, "contextSize": CONTEXT, "extraArgs": threads, **spec}
    )


def models(base: Path) -> list[dict[str, Any]]:
    """The Models, one for each format; their answers do not end by themselves."""
    mlx.tiny(base / MLX, "--endless", "--context", str(CONTEXT))
    words = ollama.endless(base / "words.gguf", context=CONTEXT)
    return [model(GGUF, str(words)), model(MLX, str(base / MLX), format=MLX)]


def install(kind: Kind, path: Path, build: str) -> None:
    """Puts an executable there in one step, as an installer does; `build` tells one from another."""
    program = kind.program()
    if kind.script:
        text = f"{program.read_text()}\n# {build}\n"
    else:
        python = [sys.executable] if program.suffix == ".py" else []
        command = shlex.join([*python, str(program)])
        text = f'#!/bin/sh\n{BUILD}={build} exec {command} "$@"\n'
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    shutil.copymode("/bin/sh", new)
    new.replace(path)


def installed(kinds: Sequence[Kind], base: Path, build: str = "first") -> list[str]:
    """Flags that name executables of these runtimes, installed there; of the others they name nothing."""
    flags = ["--mlx-server", NOWHERE, "--ollama-url", "off"]
    for kind in kinds:
        install(kind, base / kind.name, build)
    for kind in KINDS:
        flags += [kind.setting, str(base / kind.name) if kind in kinds else NOWHERE]
    return flags


def answers(system: System, *names: str) -> None:
    """Each service answers a chat under its own name."""
    for name in names:
        status, answer = system.ask(name, model=name)
        assert status == 200, (name, answer)
        # llama-server answers by one of its names, the Model's.
        assert answer["model"] in (name, GGUF) and answer["choices"][0]["message"]["content"].strip(), (name, answer)


def back(system: System, *names: str, within_s: float = 90.0) -> None:
    """Waits until services are published again, and each answers."""
    for name in names:
        eventually(lambda name=name: system.slice_ready(name), within_s, f"{name} to be back; {system.told(name)}")
    answers(system, *names)


def out(system: System, *names: str, within_s: float = 40.0) -> None:
    """Waits until services are withdrawn."""
    for name in names:
        eventually(lambda name=name: system.slice_ready(name) is False, within_s, f"{name} to be withdrawn")


def server(system: System, kind: Kind, name: str) -> int:
    """Pid of the process that serves a service."""
    return system.own_pid(kind.daemon) if kind.daemon else system.pid(name)


@contextlib.contextmanager
def untouched(system: System, *kinds: Kind) -> Iterator[None]:
    """Whatever is done to others, the first service of these runtimes keeps its processes and its endpoint."""

    def seen() -> dict[str, tuple[int, int, float]]:
        found = {}
        for kind in kinds:
            row = system.observe(kind.one)
            assert row["ready"], row
            found[kind.one] = system.pid(kind.one), server(system, kind, kind.one), row["since"]
        return found

    before = seen()
    yield
    assert seen() == before


class Stream:
    """One long streamed answer, read as far as it is asked for."""

    def __init__(self, system: System, name: str, tokens: int = CONTEXT - 1000) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", system.port(name), timeout=60)
        body = {
            "model": name,
            "stream": True,
            "max_tokens": tokens,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": "hi"}],
        }
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        self._answer = self._connection.getresponse()
        self.flows()

    def flows(self) -> None:
        """More of it comes, and it is no end."""
        for _ in range(20):
            line = self._answer.readline()
            assert line and b"[DONE]" not in line and b'"error"' not in line, line

    def ends(self) -> None:
        """The rest of it comes, to its end."""
        while line := self._answer.readline():
            assert b'"error"' not in line, line
            if b"[DONE]" in line:
                return
        raise AssertionError("it was cut")

    def close(self) -> None:
        self._answer.close()  # it has the socket to itself where the server says Connection: close
        self._connection.close()


def stream(system: System, name: str, **given: int) -> contextlib.closing[Stream]:
    """An answer under way; whoever leaves hangs up."""
    return contextlib.closing(Stream(system, name, **given))


def command(pid: int) -> list[str]:
    """Command line of a process, [] if there is none."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []
