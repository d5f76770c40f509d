"""A real Ollama for tests: a server of its own with its own directory of models, and what can be asked of it.

Its models are the tiny ones of `tools/tiny_gguf.py`; `endless` makes one that never ends by itself, because Ollama
knows no `ignore_eos`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support import parts
from tests.support.finders import find_ollama
from tests.support.system import eventually, free_ports, tiny_gguf

FOREVER = -1
TIMEOUT_S = 60.0


def program() -> Path:
    """A real ollama; the test is skipped where none is to be had, and says why."""
    return parts.found(find_ollama.find)


def tiny(path: Path, **recipe: Any) -> Path:
    """A tiny GGUF file; the recipe is that of tools/tiny_gguf.py."""
    tiny_gguf.write_tiny_gguf(path, **recipe)
    return path


def endless(path: Path, **recipe: Any) -> Path:
    """One that says its words again and again: nothing makes it say end-of-text."""
    import gguf

    tiny(path, **recipe)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path, "r+").tensors}
    tensors["output.weight"][tiny_gguf.EOS] = 0
    tensors["output.weight"][tiny_gguf.EOS, 0] = -10
    return path


def digest_of(path: Path) -> str:
    """`sha256:…` of a file."""
    status = path.stat()
    return _digest(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.cache
def _digest(path: Path, *_version: int) -> str:
    """Kept, because several tests link the same file of 400 MiB."""
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


class Stream:
    """One request whose lines are read in a thread of its own."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        self.lines: list[dict[str, Any]] = []
        self.error = ""
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(path, body), daemon=True)
        self._thread.start()

    def _read(self, path: str, body: dict[str, Any]) -> None:
        try:
            self._connection.request("POST", path, json.dumps(body))
            for line in self._connection.getresponse():
                self.lines.append(json.loads(line))
                self._began.set()
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:
            self.error = repr(error)  # AttributeError: it has been closed by `leave`

    def flowing(self) -> Stream:
        """Waits for the first line."""
        assert self._began.wait(TIMEOUT_S), f"nothing came: {self.error}"
        return self

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def ended(self, within_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
        """Waits for its end; returns all lines."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "it goes on"
        return self.lines

    def leave(self) -> None:
        """Hangs up, as a client that is killed does."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(2)
        self._thread.join(TIMEOUT_S)
        self._connection.close()


class Ollama:
    """One server."""

    def __init__(self, base: Path, **environment: str) -> None:
        self.base, self.models = base, base / "models"
        (base / "home").mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(base / "home"),
            "OLLAMA_MODELS": str(self.models),
            "OLLAMA_HOST": f"127.0.0.1:{self.port}",
            "OLLAMA_NO_CLOUD": "1",
            "OLLAMA_CONTEXT_LENGTH": "512",
            **environment,
        }
        self.log = base / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Ollama:
        """Starts it and waits until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(program()), "serve"],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                start_new_session=True,
            )
        eventually(lambda: self.ask("GET", "/")[0] == 200, 30, f"ollama to answer; {self.said()[-500:]}")
        return self

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def runners(self) -> list[psutil.Process]:
        """Its processes that have a model each, in order of their start."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.process.pid).children()
            return sorted((each for each in found if "--model" in _command(each)), key=lambda each: each.create_time())
        return []

    def stop(self) -> int:
        """Ends it in order; returns the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(TIMEOUT_S)

    def end(self) -> None:
        """Ends it, and whatever a killed one has left."""
        if self.process is not None:
            left = self.runners()
            self.process.kill()
            self.process.wait(TIMEOUT_S)
            for each in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()

    # ── what it is asked ─────────────────────────────────────────────────────────────────────────

    def ask(self, method: str, path: str, body: Any = None, timeout_s: float = TIMEOUT_S) -> tuple[int, Any]:
        """(status, JSON, or else text). A body of bytes goes as it is, anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body))
            answer = connection.getresponse()
            text = answer.read().decode()
        except TimeoutError:
            raise AssertionError(f"{method} {path}: no answer in {timeout_s:g} s; {self.said()[-4000:]}") from None
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def link(self, gguf: Path) -> str:
        """Makes a file one of its blobs without a copy; returns the digest."""
        digest = digest_of(gguf)
        blob = self.models / "blobs" / digest.replace(":", "-")
        blob.parent.mkdir(parents=True, exist_ok=True)
        if not blob.exists():
            os.link(gguf, blob)
        return digest

    def create(self, name: str, digest: str, **parameters: Any) -> None:
        """Makes a model of a blob; one thread, because the tests share two cores, and two wait for each other."""
        parameters = {"num_thread": 1, **parameters}
        body = {"model": name, "files": {"model.gguf": digest}, "parameters": parameters, "stream": False}
        status, answer = self.ask("POST", "/api/create", body)
        assert (status, answer) == (200, {"status": "success"}), answer

    def keep(self, name: str, seconds: float | None = FOREVER) -> tuple[int, Any]:
        """Loads a model, or with 0 unloads it; None leaves the time to the server."""
        body = {"model": name, "stream": False} | ({} if seconds is None else {"keep_alive": seconds})
        return self.ask("POST", "/api/generate", body)

    def loaded(self) -> dict[str, dict[str, Any]]:
        """name -> its row of /api/ps."""
        return {each["name"]: each for each in self.ask("GET", "/api/ps")[1]["models"]}

    def chat(self, name: str, **body: Any) -> tuple[int, Any]:
        """One answer by the API of OpenAI."""
        body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **body}
        return self.ask("POST", "/v1/chat/completions", body)

    def stream(self, name: str, tokens: int, **body: Any) -> Stream:
        """An answer that streams."""
        body = {"model": name, "prompt": "hi", "options": {"num_predict": tokens}, **body}
        return Stream(self.port, "/api/generate", body)

    def pull(self, name: str) -> Stream:
        """A download that tells how it goes."""
        return Stream(self.port, "/api/pull", {"model": name, "insecure": True})


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextlib.contextmanager
def serving(base: Path, **environment: str) -> Iterator[Ollama]:
    """A server that is gone afterwards, with all that it started."""
    made = Ollama(base, **environment)
    try:
        yield made.start()
    finally:
        made.end()
        shutil.rmtree(made.models, ignore_errors=True)
