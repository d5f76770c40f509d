#!/usr/bin/env python3
"""Tests need a vllm-swift, which runs on a Mac with Apple silicon alone: this stands in for it.

    python tests/support/standin_vllm_swift.py serve DIRECTORY [flags of vLLM]

It follows what vllm-swift and vLLM's server document. The model is the first word after `serve`, and nothing listens
until it is loaded. /health is an empty 200. Every name of `--served-model-name` is listed and answered to, another is a
404. With VLLM_API_KEY everything below /v1 wants that key. There are at most `--max-num-seqs` answers at a time, and a
prompt with its answer has at most `--max-model-len` tokens. Every prompt is answered with the same four words, over and
over if `max_tokens` says so. Flags that it does not know end it, as they end vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VERSION = "0.0.0"
WORDS = ("hello", "world", "from", "vllm")
TOKEN_S = 0.002
HELP = """vllm-swift (a stand-in)

  vllm-swift serve MODEL [flags of vLLM]   e.g. vllm-swift serve DIRECTORY --max-model-len 4096
  vllm-swift version
"""


def parser() -> argparse.ArgumentParser:
    """The flags that matter here, under vLLM's names; they may be abbreviated, as there."""
    made = argparse.ArgumentParser("vllm-swift serve")
    made.add_argument("model")
    made.add_argument("--host", default="0.0.0.0")
    made.add_argument("--port", type=int, default=8000)
    made.add_argument("--served-model-name", nargs="+")
    made.add_argument("--max-model-len", type=int)
    made.add_argument("--max-num-seqs", type=int, default=256)
    made.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    made.add_argument("--additional-config", type=json.loads, default={})
    made.add_argument("--tool-call-parser")
    made.add_argument("--reasoning-parser")
    return made


class Engine:
    """What the handlers share."""

    def __init__(self, asked: argparse.Namespace) -> None:
        config = json.loads((Path(asked.model) / "config.json").read_text("utf-8"))
        own = int(config["max_position_embeddings"])
        self.context = asked.max_model_len or own
        if self.context > own:
            raise ValueError(f"max_model_len ({self.context}) is greater than the model's {own}")
        self.names: list[str] = asked.served_model_name or [asked.model]
        self.key = os.environ.get("VLLM_API_KEY", "")
        self.turns = threading.Semaphore(asked.max_num_seqs)
        self.lock = threading.Lock()
        self.running = self.waiting = 0

    def count(self, *, running: int = 0, waiting: int = 0) -> None:
        with self.lock:
            self.running, self.waiting = self.running + running, self.waiting + waiting

    def metrics(self) -> str:
        rows = (("running", self.running), ("waiting", self.waiting))
        lines = [f'vllm:num_requests_{name}{{engine="0",model_name="{self.names[0]}"}} {n}.0' for name, n in rows]
        return "\n".join([*lines, ""])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:
        print(f"INFO: {format % args}", flush=True)

    def answer(self, status: int, body: Any = "", kind: str = "application/json") -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def fail(self, status: int, message: str, kind: str) -> None:
        self.answer(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})

    def locked_out(self) -> bool:
        if not self.path.startswith("/v1") or self.engine.key in ("", self.headers.get("Authorization", "")[7:]):
            return False
        self.answer(401, {"error": "Unauthorized"})
        return True

    def do_GET(self) -> None:
        if self.locked_out():
            return
        if self.path in ("/health", "/ping"):
            self.answer(200)
        elif self.path == "/version":
            self.answer(200, {"version": VERSION})
        elif self.path == "/metrics":
            self.answer(200, self.engine.metrics(), "text/plain; version=0.0.4")
        elif self.path == "/v1/models":
            context = self.engine.context
            cards = [{"id": each, "object": "model", "max_model_len": context} for each in self.engine.names]
            self.answer(200, {"object": "list", "data": cards})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.locked_out():
            return
        if self.path != "/v1/chat/completions":
            self.answer(404, {"detail": "Not Found"})
            return
        try:
            asked = json.loads(body)
            read = sum(len(str(each["content"]).split()) for each in asked["messages"])
        except (ValueError, LookupError, TypeError) as error:
            self.fail(400, f"{type(error).__name__}: {error}", "Bad Request")
            return
        model = asked.get("model", self.engine.names[0])
        if model not in self.engine.names:
            self.fail(404, f"The model `{model}` does not exist.", "NotFoundError")
            return
        room = self.engine.context - read
        tokens = int(asked.get("max_tokens") or min(room, len(WORDS)))
        if tokens > room:
            self.fail(400, f"This model's maximum context length is {self.engine.context} tokens.", "BadRequestError")
            return
        self.chat(model, tokens, bool(asked.get("stream")), read)

    def chat(self, model: str, tokens: int, streamed: bool, read: int) -> None:
        engine = self.engine
        engine.count(waiting=1)
        with engine.turns:
            engine.count(waiting=-1, running=1)
            try:
                (self.stream if streamed else self.whole)(model, tokens, read)
            except OSError:
                self.close_connection = True  # the client went away
            finally:
                engine.count(running=-1)

    def whole(self, model: str, tokens: int, read: int) -> None:
        time.sleep(tokens * TOKEN_S)
        message = {"role": "assistant", "content": " ".join(WORDS[n % len(WORDS)] for n in range(tokens))}
        usage = {"prompt_tokens": read, "completion_tokens": tokens, "total_tokens": read + tokens}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        self.answer(200, {"object": "chat.completion", "model": model, "choices": [choice], "usage": usage})

    def stream(self, model: str, tokens: int, _read: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(tokens):
            time.sleep(TOKEN_S)
            finish = "length" if number == tokens - 1 else None
            choice = {"index": 0, "delta": {"content": f"{WORDS[number % len(WORDS)]} "}, "finish_reason": finish}
            self.chunk(json.dumps({"object": "chat.completion.chunk", "model": model, "choices": [choice]}))
        self.chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main(argv: list[str]) -> int:
    if argv[:1] == ["version"]:
        print(f"vllm-swift {VERSION} (a stand-in)")
        return 0
    if argv[:1] != ["serve"]:
        print(HELP)
        return 0
    asked = parser().parse_args(argv[1:])
    try:
        engine = Engine(asked)
    except (OSError, ValueError, LookupError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    Server((asked.host, asked.port), type("Bound", (Handler,), {"engine": engine})).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
