#!/usr/bin/env -S python3 -I -S
"""A stand-in for llama-server, for faults that a real engine cannot be made to show. It is not an engine.

It speaks as much of llama-server's HTTP protocol as a supervisor sees (503 while loading, `/health`, `/v1/models`,
`/slots`, `/metrics`, chat answers whole and streamed, embeddings, reranks), takes any of its flags, and misbehaves on
request: it loads for ever, hangs, answers HTML or errors, ignores SIGTERM, dies on time, leaves a child behind, floods
its log. Use the real thing (`tools/find_llama_server.py`) wherever it can show what a test needs.

Faults are flags, so that they can be given per service (`extraArgs`), or environment variables (`--fake-load-s 5` is
`FAKE_LOAD_S=5`); the flag wins. Most can be changed while it runs: `POST /fake` with `{"hang": true}`. `/argv` tells
how it was started. `--help` lists everything. Standard library only, and executable, so it can be set as llama-server.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SIGNALS = {signal.SIGTERM, signal.SIGINT}
TICK_S = 0.02
WORDS = ("this", "answer", "comes", "from", "a", "stand-in")

LLAMA_FLAGS = (
    "--model FNAME",
    "--alias STRING",
    "--host HOST",
    "--port PORT",
    "--ctx-size N",
    "--parallel N",
    "--batch-size N",
    "--ubatch-size N",
    "--threads N",
    "--n-gpu-layers N",
    "--flash-attn [on|off|auto]",
    "--cache-type-k TYPE",
    "--cache-type-v TYPE",
    "--cache-ram N",
    "--fit [on|off]",
    "--load-mode MODE",
    "--rope-scaling TYPE",
    "--rope-scale N",
    "--yarn-orig-ctx N",
    "--cpu-moe",
    "--n-cpu-moe N",
    "--no-kv-offload",
    "--override-tensor X",
    "--override-kv X",
    "--reasoning-budget N",
    "--reasoning-budget-message M",
    "--pooling TYPE",
    "--embedding",
    "--reranking",
    "--metrics",
    "--slots",
    "--jinja",
    "--no-warmup",
    "--no-webui",
    "--offline",
)
"""What --help names besides the faults; any other flag is taken too, and ignored."""


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class Faults:
    """Seconds are counted from the start of the process; 0 is "not at all" where nothing else is said."""

    bind_delay_s: float = option(0.0, "refuse connections for so long before the port is bound")
    load_s: float = option(0.0, "answer 503 for so long before it is ready")
    never_ready: bool = option(False, "answer 503 for ever")
    exit_code: int = option(1, "exit code of --fake-exit-after-s")
    exit_after_s: float = option(0.0, "exit after so long")
    last_words: str = option("", "write these bytes, in hexadecimal, as the last line before that")
    ignore_term: bool = option(False, "ignore SIGTERM")
    term_delay_s: float = option(0.0, "take so long to exit after SIGTERM")
    hang: bool = option(False, "accept connections and never answer")
    stall: bool = option(False, "answer /health, but neither /slots nor a chat, as a stuck work loop does")
    spin: bool = option(False, "use all of a processor")
    health_delay_s: float = option(0.0, "take so long to answer /health")
    signal: int = option(0, "end by this signal instead of --fake-exit-code")
    grow_mib_per_s: float = option(0.0, "hold more memory all the time, until --fake-limit-mib ends the process")
    limit_mib: int = option(0, "the system's limit for the process' memory; beyond it, the process is killed")
    bind_host: str = option("", "listen on this address, whatever --host says")
    junk: bool = option(False, "write bytes to the log that are neither text nor harmless")
    close_stdout: bool = option(False, "close standard output and error")
    hang_after_s: float = option(0.0, "begin to hang after so long")
    html: bool = option(False, "answer everything with a page of HTML, status 200, as some other server would")
    identity: str = option("", "name another model in /v1/models and in answers")
    fork: bool = option(False, "leave a child behind, which ignores SIGTERM and sleeps")
    flood_lines_per_s: float = option(0.0, "write so many lines a second to the log")
    quiet: bool = option(False, "log no requests, as llama-server logs none of those that a supervisor sends")
    ballast_mib: int = option(0, "hold so much memory")
    tokens: int = option(6, "length of an answer in tokens")
    tokens_per_s: float = option(0.0, "speed of an answer; 0 is at once")
    answer_status: int = option(200, "answer chats, embeddings and reranks with an error of this status")
    answer_delay_s: float = option(0.0, "take so long before any such answer")
    api_key: str = option("", "want this key for them, and quote a wrong one")
    metrics_file: str = option("", "answer /metrics with what this file has")
    cut_after_tokens: int = option(0, "close the connection in the middle of a stream")


def parse_value(default: Any, text: str) -> Any:
    """The text as a value of the option's type. Raises ValueError."""
    if isinstance(default, bool):
        return text.lower() not in ("", "0", "false", "no")
    return type(default)(text)


def is_truth(text: str | None) -> bool:
    return text is not None and text.lower() in ("1", "0", "true", "false", "yes", "no")


def parse(argv: list[str], env: dict[str, str]) -> tuple[Faults, dict[str, str]]:
    """The faults, and the engine's flags with their values. Raises ValueError with a message."""
    faults, flags = Faults(), {}
    options = {item.name: item.default for item in fields(Faults)}
    given = {name: env[f"FAKE_{name.upper()}"] for name in options if f"FAKE_{name.upper()}" in env}
    index = 0
    while index < len(argv):
        name, _, value = argv[index].partition("=")
        following = argv[index + 1] if index + 1 < len(argv) else None
        fault = name.removeprefix("--fake-").replace("-", "_") if name.startswith("--fake-") else None
        if fault is not None and fault not in options:
            raise ValueError(f"error: invalid argument: {argv[index]}")
        if fault is not None and isinstance(options[fault], bool):
            takes = not value and is_truth(following)
            value = value or (str(following) if takes else "true")
        else:
            takes = not value and following is not None and not following.startswith("--")
            value = value or (str(following) if takes else "")
        if fault is None:
            flags[name] = value
        else:
            given[fault] = value
        index += 2 if takes else 1
    for name, text in given.items():
        try:
            setattr(faults, name, parse_value(options[name], text))
        except ValueError:
            raise ValueError(f"error: bad value for --fake-{name.replace('_', '-')}: {text!r}") from None
    return faults, flags


def usage() -> str:
    lines = ["fake_runtime: a stand-in for llama-server, for tests; flags of llama-server that it names:", ""]
    lines += LLAMA_FLAGS
    lines += ["", "faults (also as environment FAKE_..., most also over POST /fake):", ""]
    for item in fields(Faults):
        shown = "" if isinstance(item.default, bool) else " N" if not isinstance(item.default, str) else " NAME"
        lines.append(f"{'--fake-' + item.name.replace('_', '-') + shown:<32}{item.metadata['help']}")
    return "\n".join(lines)


def say(text: str) -> None:
    """A line for the log, if somebody still reads it: like llama-server it outlives a killed supervisord."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


class Engine:
    """State shared by the handlers."""

    def __init__(self, faults: Faults, flags: dict[str, str]) -> None:
        self.faults = faults
        self.flags = flags
        self.started = time.monotonic()
        self.lock = threading.Lock()
        self.changed = threading.Condition()
        """Notified when a fault is another one."""
        self.slots = [False] * max(1, int(flags.get("--parallel") or 1))
        self.served = {"prompt_tokens": 0, "tokens": 0}

    def age_s(self) -> float:
        return time.monotonic() - self.started

    def names(self) -> list[str]:
        """Served names in llama-server's order, which is alphabetical."""
        given = self.faults.identity or self.flags.get("--alias") or self.flags.get("--model") or "stand-in"
        return sorted(given.split(","))

    def loading(self) -> bool:
        return self.faults.never_ready or self.age_s() < self.faults.bind_delay_s + self.faults.load_s

    def hanging(self) -> bool:
        return self.faults.hang or 0 < self.faults.hang_after_s <= self.age_s()

    def take_slot(self) -> int:
        """Waits for a free slot, as llama-server queues what it has no slot for."""
        while True:
            with self.lock:
                if False in self.slots:
                    index = self.slots.index(False)
                    self.slots[index] = True
                    return index
            time.sleep(0.005)

    def free_slot(self, index: int) -> None:
        with self.lock:
            self.slots[index] = False

    def metrics(self) -> str:
        if self.faults.metrics_file:
            return Path(self.faults.metrics_file).read_text()
        busy = sum(self.slots)
        rows = (
            ("prompt_tokens_total", "counter", self.served["prompt_tokens"]),
            ("tokens_predicted_total", "counter", self.served["tokens"]),
            ("requests_processing", "gauge", busy),
            ("requests_deferred", "gauge", 0),
        )
        return "".join(f"# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n" for name, kind, value in rows)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def do_GET(self) -> None:
        self.answer("GET")

    def do_HEAD(self) -> None:
        self.answer("HEAD")

    def do_POST(self) -> None:
        self.answer("POST")

    def log_message(self, format: str, *args: Any) -> None:
        if not self.engine.faults.quiet:
            say(f"srv  log_server_r: {format % args}")

    def send(self, status: int, body: str, kind: str = "application/json; charset=utf-8") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_json(self, value: Any, status: int = 200) -> None:
        self.send(status, json.dumps(value))

    def send_error_json(self, status: int, message: str, kind: str) -> None:
        self.send_json({"error": {"code": status, "message": message, "type": kind}}, status)

    def answer(self, method: str) -> None:
        engine, path = self.engine, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/fake" and method == "POST":  # works in every state, or a hang could not be ended
            return self.change(body)
        if path == "/argv":
            return self.send_json(self.origin())
        stalls = engine.faults.stall and path not in ("/health", "/v1/health", "/v1/models")
        while engine.hanging() or (stalls and engine.faults.stall):
            time.sleep(0.25)
        if engine.faults.html:
            return self.send(200, "<!doctype html><title>It works</title><h1>It works!</h1>", "text/html")
        if engine.loading():
            return self.send_error_json(503, "Loading model", "unavailable_error")
        routes = {
            ("GET", "/health"): self.health,
            ("GET", "/v1/health"): self.health,
            ("GET", "/v1/models"): self.models,
            ("GET", "/models"): self.models,
            ("GET", "/props"): self.props,
            ("GET", "/slots"): self.slots,
            ("GET", "/metrics"): self.metrics,
            ("POST", "/v1/chat/completions"): lambda: self.work(self.chat, body),
            ("POST", "/v1/embeddings"): lambda: self.work(lambda _body: self.embed(), body),
            ("POST", "/v1/rerank"): lambda: self.work(self.rerank, body),
        }
        route = routes.get(("GET" if method == "HEAD" else method, path))
        if route is None:
            return self.send_error_json(404, "File Not Found", "not_found_error")
        return route()

    def change(self, body: bytes) -> None:
        defaults: dict[str, Any] = {item.name: item.default for item in fields(Faults)}
        try:
            with self.engine.changed:
                self.engine.changed.notify_all()  # first: one value may be refused after another was taken
                for name, value in json.loads(body or b"{}").items():
                    setattr(self.engine.faults, name, type(defaults[name])(value))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return self.send_error_json(400, f"no such fault, or a bad value: {error}", "invalid_request_error")
        return self.send_json({name: getattr(self.engine.faults, name) for name in defaults})

    def origin(self) -> dict[str, Any]:
        return {
            "argv": sys.argv,
            "env": dict(os.environ),
            "cwd": str(Path.cwd()),
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "pgid": os.getpgrp(),
        }

    def health(self) -> None:
        time.sleep(self.engine.faults.health_delay_s)
        self.send_json({"status": "ok"})

    def models(self) -> None:
        names = self.engine.names()
        meta = {"n_ctx": int(self.engine.flags.get("--ctx-size") or 4096) // len(self.engine.slots)}
        card = {"id": names[0], "aliases": names, "object": "model", "owned_by": "llamacpp", "meta": meta}
        self.send_json({"object": "list", "data": [card]})

    def props(self) -> None:
        names = self.engine.names()
        path = self.engine.flags.get("--model", "")
        self.send_json({"total_slots": len(self.engine.slots), "model_alias": names[0], "model_path": path})

    def slots(self) -> None:
        context = int(self.engine.flags.get("--ctx-size") or 4096) // len(self.engine.slots)
        self.send_json([{"id": i, "n_ctx": context, "is_processing": busy} for i, busy in enumerate(self.engine.slots)])

    def metrics(self) -> None:
        if "--metrics" not in self.engine.flags:
            message = "This server does not support metrics endpoint. Start it with `--metrics`"
            return self.send_error_json(501, message, "not_supported_error")
        return self.send(200, self.engine.metrics(), "text/plain; version=0.0.4")

    def work(self, route: Any, body: bytes) -> None:
        """What a client of the model asks for; each is a line in the log."""
        faults = self.engine.faults
        say(f"asked {self.path} {body.decode('utf-8', 'replace')}")
        time.sleep(faults.answer_delay_s)
        given = self.headers.get("Authorization") or ""
        if faults.api_key and given != f"Bearer {faults.api_key}":
            return self.send_error_json(401, f"Invalid API Key {given}", "authentication_error")
        if faults.answer_status != 200:
            return self.send_error_json(faults.answer_status, "no answer,\x1b[31m as asked", "server_error")
        return route(body)

    def embed(self) -> None:
        if not {"--embedding", "--embeddings"} & self.engine.flags.keys():
            return self.send_error_json(501, "This server does not support embeddings", "not_supported_error")
        row = {"object": "embedding", "index": 0, "embedding": [0.5, 0.5]}
        return self.send_json({"object": "list", "model": self.engine.names()[0], "data": [row]})

    def rerank(self, body: bytes) -> None:
        if not {"--reranking", "--rerank"} & self.engine.flags.keys():
            return self.send_error_json(501, "This server does not support reranking", "not_supported_error")
        rows = [{"index": index, "relevance_score": 0.5} for index, _ in enumerate(json.loads(body)["documents"])]
        return self.send_json({"object": "list", "model": self.engine.names()[0], "results": rows})

    def chat(self, body: bytes) -> None:
        engine = self.engine
        try:
            asked = json.loads(body)
            messages = asked["messages"]
        except (ValueError, KeyError, TypeError):
            return self.send_error_json(400, "'messages' is required", "invalid_request_error")
        limit = asked.get("max_tokens") or engine.faults.tokens
        count = min(engine.faults.tokens, int(limit))
        words = [" " + WORDS[i % len(WORDS)] for i in range(count)]
        slot = engine.take_slot()
        try:
            engine.served["prompt_tokens"] += len(json.dumps(messages).split())
            if asked.get("stream"):
                self.stream(words)
            else:
                for _ in words:
                    self.pause()
                self.whole(words)
            engine.served["tokens"] += count
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client went away
        finally:
            engine.free_slot(slot)

    def pause(self) -> None:
        if self.engine.faults.tokens_per_s > 0:
            time.sleep(1.0 / self.engine.faults.tokens_per_s)

    def whole(self, words: list[str]) -> None:
        message = {"role": "assistant", "content": "".join(words)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage_ = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 1 + len(words)}
        model = self.engine.names()[0]
        self.send_json({"object": "chat.completion", "model": model, "choices": [choice], "usage": usage_})

    def stream(self, words: list[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for position, word in enumerate(words, 1):
            self.pause()
            self.event({"content": word}, None)
            if position == self.engine.faults.cut_after_tokens:
                self.close_connection = True
                return
        self.event({}, "stop")
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, delta: dict[str, str], finish: str | None) -> None:
        choice = {"index": 0, "finish_reason": finish, "delta": delta}
        chunk = {"object": "chat.completion.chunk", "model": self.engine.names()[0], "choices": [choice]}
        self.chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nothing to report."""


def end_by_signal(faults: Faults) -> None:
    """Ends at a signal. All threads block them: a handler would run in the main one once its `select` returns."""
    while True:
        signal.sigwait(SIGNALS)
        if not faults.ignore_term:
            time.sleep(faults.term_delay_s)
            os._exit(0)
        say("SIGTERM ignored")


def leave(faults: Faults) -> None:
    """Ends as asked."""
    if faults.signal:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), faults.signal)
    words = bytes.fromhex(faults.last_words) or f"exiting with {faults.exit_code} as asked".encode()
    with contextlib.suppress(OSError):
        os.write(2, words + b"\n")
    os._exit(faults.exit_code)


def spin(engine: Engine) -> None:
    """Uses a processor while asked to; in a process of its own it would be another's time."""
    while True:
        with engine.changed:
            engine.changed.wait_for(lambda: engine.faults.spin)
        until = time.monotonic() + 0.2
        while engine.faults.spin and time.monotonic() < until:
            pass
        time.sleep(0.001)


def grow(faults: Faults, held: list[bytearray]) -> None:
    """Takes a tick's worth of memory; a process that may have no more is killed, as the system would."""
    try:
        held.append(bytearray(b"x") * int(faults.grow_mib_per_s * TICK_S * (1 << 20)))
    except MemoryError:
        os.kill(os.getpid(), signal.SIGKILL)


def pause(engine: Engine) -> None:
    """Until the next tick of what is done by the clock, or a change; an engine at rest does nothing, as real ones."""
    faults = engine.faults
    ticks = faults.flood_lines_per_s > 0 or faults.junk or faults.grow_mib_per_s > 0
    ends_in = faults.exit_after_s - engine.age_s() if faults.exit_after_s > 0 else None
    engine.changed.wait(TICK_S if ticks else ends_in)


def background(engine: Engine) -> None:
    """Everything that happens by the clock."""
    faults = engine.faults
    line = "x" * 119
    held: list[bytearray] = []
    while True:
        if 0 < faults.exit_after_s <= engine.age_s():
            leave(faults)
        if faults.flood_lines_per_s > 0:
            count = max(1, int(faults.flood_lines_per_s * TICK_S))
            say("\n".join([line] * count))
        if faults.junk:
            with contextlib.suppress(OSError):
                sys.stderr.buffer.write(b"\x1b[31m\x1b]0;title\x07\xff\xfe\x00\x9b31mred error\r\n" * 3)
                sys.stderr.flush()
        if faults.grow_mib_per_s > 0:
            grow(faults, held)
        with engine.changed:
            pause(engine)


def leave_child() -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.DEVNULL)
    say(f"child {child.pid}")


def main(argv: list[str]) -> int:
    if not {"-h", "--help"}.isdisjoint(argv):
        print(usage())
        return 0
    if "--version" in argv:
        print("version: 0 (fake_runtime, a stand-in)", file=sys.stderr)
        return 0
    try:
        faults, flags = parse(argv, dict(os.environ))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    engine = Engine(faults, flags)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=end_by_signal, args=(faults,), daemon=True).start()
    ballast = bytearray(os.urandom(1 << 20)) * faults.ballast_mib  # written, so that it is really resident
    if faults.limit_mib:
        resource.setrlimit(resource.RLIMIT_AS, (faults.limit_mib << 20, faults.limit_mib << 20))
    if faults.fork:
        leave_child()
    if faults.close_stdout:
        os.close(1)
        os.close(2)
    threading.Thread(target=spin, args=(engine,), daemon=True).start()
    threading.Thread(target=background, args=(engine,), daemon=True).start()
    time.sleep(faults.bind_delay_s)
    host, port = faults.bind_host or flags.get("--host") or "127.0.0.1", int(flags.get("--port") or 8080)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = type("BoundServer", (Server,), {"address_family": family})
        server = bound((host, port), type("BoundHandler", (Handler,), {"engine": engine}))
    except OSError as error:
        print(f"couldn't bind HTTP server socket, hostname: {host}, port: {port}: {error}", file=sys.stderr)
        return 1
    if faults.close_stdout:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process lives
    say(f"stand-in: listening on http://{host}:{port}, ballast {len(ballast)} bytes")
    server.serve_forever(poll_interval=3600)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
