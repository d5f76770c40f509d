"""Ollama behind a gate: this process becomes `ollama serve` on loopback, its child listens on the public address.

Ollama has no key: any client of its port may pull, delete and load models. Through the gate, clients on this machine
reach all of it, others only lists and inference with the models of services that run here. Their parameters of loading
(`keep_alive`, the context size and the like in `options`) are dropped, because a model belongs to its service.

Run as `ollama_engine HOST PORT STATE_DIRECTORY PROGRAM`. Ollama keeps the pid that supervisord knows; the gate, which
stays unconfined, ends with it, and it with the gate, which another process of ours sees to. Exit codes: 1 the port
cannot be bound, 77 Ollama cannot be confined, 126 it cannot be executed, others Ollama's.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Collection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from metal_supervisor import launch
from metal_supervisor.runtimes.shims import gate
from metal_supervisor.spec.types import Json
from metal_supervisor.state.directory import StateDir

LOOPBACK = "127.0.0.1"
READING = frozenset({"/", "/api/version", "/api/tags", "/api/ps", "/v1/models"})
INFERENCE = frozenset(
    {
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/show",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
    }
)
SAMPLING = frozenset(
    {
        "num_keep",
        "seed",
        "num_predict",
        "top_k",
        "top_p",
        "min_p",
        "tfs_z",
        "typical_p",
        "repeat_last_n",
        "temperature",
        "repeat_penalty",
        "presence_penalty",
        "frequency_penalty",
        "mirostat",
        "mirostat_tau",
        "mirostat_eta",
        "penalize_newline",
        "stop",
    }
)
"""The `options` of a request that do not make Ollama reload the model."""
OF_THE_SERVICE = ("model", "name", "keep_alive")
HOP_BY_HOP = frozenset({"host", "connection", "keep-alive", "proxy-connection", "expect", "upgrade"})
REQUEST_S = 60.0
"""Longest pause of a client while it sends a request."""
ANSWER_S = 600.0
"""Longest pause of a client while it reads the answer."""
MOST_CLIENTS = 512
PART_BYTES = 65536
NOT_HERE = "not here: only inference is served to other machines"


class Refusal(Exception):
    """A refused request: HTTP status and text."""


def judged(body: bytes, models: Collection[str]) -> bytes:
    """The body of an inference request, reduced to what may reach Ollama. Raises Refusal.

    Keys are folded first: Go's decoder takes `KEEP_ALIVE` for `keep_alive`.
    """
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not JSON") from None
    if not isinstance(read, dict):
        raise Refusal(400, "the body is not a JSON object")
    asked: Json = {key.casefold(): value for key, value in read.items()}
    name = asked.get("model") or asked.get("name")
    if not isinstance(name, str) or name.removesuffix(":latest") not in models:
        raise Refusal(404, f"no service of Ollama has the model {str(name)[:100]!r}")
    passed = {key: value for key, value in asked.items() if key not in OF_THE_SERVICE}
    if "options" in passed:
        options = passed["options"]
        given = options if isinstance(options, dict) else {}
        passed["options"] = {key: value for key, value in given.items() if key in SAMPLING}
    return json.dumps({**passed, "model": name}).encode()


class Handler(BaseHTTPRequestHandler):
    """One request of one connection."""

    protocol_version = "HTTP/1.1"
    rbufsize = 0  # unbuffered: the body is relayed from the socket itself
    timeout = REQUEST_S
    server: OllamaGate

    def log_message(self, format: str, *arguments: object) -> None:
        """Do nothing: Ollama logs its requests itself."""

    def _pass(self) -> None:
        self.close_connection = True
        try:
            if gate.from_foreign_page(self.headers.get_all("origin") or ()):
                raise Refusal(403, gate.FOREIGN)
            path = self.path.partition("?")[0]
            if self.client_address[0] in gate.LOCAL:
                kept = [f"{name}: {text}" for name, text in self.headers.items() if name.lower() not in HOP_BY_HOP]
                self._relay(self.path, kept, uploads=True)
            elif self.command == "POST" and path in INFERENCE:
                body = judged(self._body(), self.server.models())
                self._relay(path, ["Content-Type: application/json", f"Content-Length: {len(body)}"], body)
            elif self.command in ("GET", "HEAD") and path in READING:
                self._relay(path, [])
            else:
                raise Refusal(404, NOT_HERE)
        except Refusal as refusal:
            with contextlib.suppress(OSError):
                self._refuse(*refusal.args)
        except OSError:
            pass  # either end is gone

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = _pass

    def _refuse(self, status: int, text: str) -> None:
        body = json.dumps({"error": text}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        """The body of a request, whole. Raises Refusal."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts, size = [], 0
            while length := self._chunk_length():
                size += length
                if size > gate.MOST_BYTES:
                    raise Refusal(413, gate.TOO_LONG)
                parts.append(self._exactly(length))
                self.rfile.readline(PART_BYTES)
            return b"".join(parts)
        text = self.headers.get("Content-Length") or "0"
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise Refusal(400, "Content-Length is not a number")
        if int(text) > gate.MOST_BYTES:
            raise Refusal(413, gate.TOO_LONG)
        return self._exactly(int(text))

    def _chunk_length(self) -> int:
        try:
            return max(0, int(self.rfile.readline(PART_BYTES).partition(b";")[0], 16))
        except ValueError:
            raise Refusal(400, "a chunk has no length") from None

    def _exactly(self, size: int) -> bytes:
        body = bytearray()
        while len(body) < size:
            part = self.rfile.read(min(size - len(body), PART_BYTES))
            if not part:
                raise Refusal(400, "the body is shorter than it says")
            body += part
        return bytes(body)

    def _relay(self, path: str, headers: list[str], body: bytes = b"", uploads: bool = False) -> None:
        """Send a request to Ollama, then its answer byte by byte, until one of the two ends. Raises Refusal, OSError.

        `uploads`: also pass on what the client sends meanwhile. From other machines that could be a second request,
        which no rule has checked.
        """
        try:
            ollama = socket.create_connection((LOOPBACK, self.server.ollama_port), REQUEST_S)
        except OSError:
            raise Refusal(503, "Ollama is not up yet") from None
        with ollama, selectors.DefaultSelector() as ends:
            version = "HTTP/1.1" if self.request_version == "HTTP/1.1" else "HTTP/1.0"
            lines = [f"{self.command} {path} {version}", f"Host: {LOOPBACK}:{self.server.ollama_port}"]
            lines += [*headers, "Connection: close", "", ""]
            ollama.sendall("\r\n".join(lines).encode("latin-1") + body)
            client = self.connection
            client.settimeout(ANSWER_S)
            ollama.settimeout(ANSWER_S)
            ends.register(ollama, selectors.EVENT_READ, client)
            ends.register(client, selectors.EVENT_READ, ollama if uploads else None)
            while True:
                for key, _ in ends.select():
                    part = key.fileobj.recv(PART_BYTES)  # type: ignore[union-attr]
                    if not part:
                        return  # the answer is complete, or the client has gone and Ollama may stop
                    if key.data is not None:
                        key.data.sendall(part)


class OllamaGate(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """The gate's server, one thread for each client."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, ollama_port: int, state: StateDir) -> None:
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.ollama_port, self._state, self._turn = ollama_port, state, threading.Lock()
        self._free = threading.BoundedSemaphore(MOST_CLIENTS)

    def models(self) -> frozenset[str]:
        """The names that clients of other machines may use: those of the services of Ollama that run."""
        with self._turn:
            records = self._state.records()[0].values()
        running = [each for each in records if each.daemon == "ollama" and each.runs]
        return frozenset(name for each in running for name in (each.name, *each.daemon_names))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. Close connections of other machines beyond MOST_CLIENTS; this machine has no limit."""
        if client_address[0] in gate.LOCAL or self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Run that thread, and free its place when it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            if client_address[0] not in gate.LOCAL:
                self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a broken connection is no error of the gate."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for clients: of `host`, and on loopback unless that includes it. Raises OSError."""
    both = host == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = [socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)]
    if host not in ("0.0.0.0", "::", LOOPBACK):
        found.append(socket.create_server((LOOPBACK, port), backlog=128))
    return found


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


def watch(gate_pid: int, parent: int, started: str) -> None:
    """Have Ollama end once its gate has, also by a KILL; never returns."""
    launch.wait_for_exit(gate_pid, launch.start_time(gate_pid))
    _end(parent, started)
    os._exit(0)


def _end(parent: int, started: str) -> None:
    """End Ollama, so that it is started again: it cannot be reached without its gate."""
    with contextlib.suppress(ProcessLookupError):
        if launch.start_time(parent) == started:
            os.kill(parent, signal.SIGTERM)


def guard(sockets: list[socket.socket], ollama_port: int, home: Path, parent: int, started: str) -> None:
    """Serve as the gate of the process `parent` until that ends; never returns."""

    def until(wait: Callable[[], None]) -> None:
        try:
            wait()
        finally:
            _end(parent, started)
            os._exit(0)

    for each in sockets:
        serve = OllamaGate(each, ollama_port, StateDir(home)).serve_forever
        threading.Thread(target=until, args=(serve,), daemon=True).start()
    until(lambda: launch.wait_for_exit(parent, started))


def main(arguments: list[str]) -> int:
    """Start the gate and exec Ollama; returns an exit code only if that fails."""
    host, port, home, program = arguments
    try:
        sockets = listen(host, int(port))
    except OSError as error:
        launch.say(f"port {port} on {host} cannot be bound: {error.strerror}")
        return 1
    try:
        restrict = launch.confinement(launch.read_spec(os.environ[launch.MARK]).get("confinement"), by_gate=True)
    except (launch.BadSpec, launch.Unconfined) as error:
        launch.say(f"Ollama is not started: {error}")
        return launch.EXIT_UNCONFINED
    inner, parent = free_port(), os.getpid()
    started = launch.start_time(parent)
    if (gate_pid := os.fork()) == 0:
        guard(sockets, inner, Path(home), parent, started)
    for each in sockets:
        each.close()
    if os.fork() == 0:
        watch(gate_pid, parent, started)
    try:
        restrict()
        os.execve(program, [program, "serve"], {**os.environ, "OLLAMA_HOST": f"{LOOPBACK}:{inner}"})
    except (OSError, RuntimeError) as error:
        launch.say(f"cannot start {program!r}: {error}")
        return launch.EXIT_CANNOT_EXEC


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
