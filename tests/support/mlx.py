"""MLX for tests: mlx_lm's own server in an environment of its own, tiny models, and a stand-in for the Swift server.

The Swift mlx-server runs on a Mac alone; the stand-in follows what its documentation says: it loads before it
listens, answers /health with a plain `ok`, knows no aliases, has three routes, and wants a `model` in a chat.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import parts
from tests.support.finders import find_mlx
from tests.support.system import ROOT, model, service

SWIFT = '''#!{python}
"""A stand-in for the Swift mlx-server."""
import argparse, http.server, json, pathlib, sys
parser = argparse.ArgumentParser()
for flag, kind in (("--model", str), ("--host", str), ("--port", int), ("--max-slots", int), ("--reasoning", str)):
    parser.add_argument(flag, type=kind)
asked = parser.parse_args()
MODEL = pathlib.Path(asked.model)
if MODEL.is_symlink() or not (MODEL / "config.json").is_file():
    sys.exit("cannot load " + asked.model)

class Page(http.server.BaseHTTPRequestHandler):
    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        models = json.dumps({{"object": "list", "data": [{{"id": MODEL.name, "object": "model"}}]}})
        found = {{"/health": "ok", "/v1/models": models}}.get(self.path)
        self.answer(200 if found else 404, found or "")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not isinstance(asked.get("model"), str):
            return self.answer(400, json.dumps({{"error": {{"message": "Malformed request body: no model"}}}}))
        words = {{"choices": [{{"message": {{"role": "assistant", "content": "hello world from swift"}}}}]}}
        self.answer(200 if self.path == "/v1/chat/completions" else 404, json.dumps(words))

http.server.ThreadingHTTPServer((asked.host, asked.port), Page).serve_forever()
'''


def server() -> Path:
    """A real mlx_lm.server; the test is skipped where none is to be had, and says why."""
    return parts.quick(parts.found(find_mlx.find))


def python() -> str:
    """The interpreter that has mlx_lm."""
    return str(parts.found(find_mlx.find).parent / "python")


def tiny(path: Path, *flags: str) -> Path:
    """A directory of a tiny model; see tests/support/tiny_mlx.py for the flags."""
    subprocess.run([python(), str(ROOT / "tests/support/tiny_mlx.py"), str(path), *flags], check=True, timeout=60)
    return path


def swift(path: Path) -> Path:
    """An executable that stands in for the Swift mlx-server."""
    path.write_text(SWIFT.format(python=sys.executable))
    path.chmod(0o755)
    return path


def mlx_model(name: str, source: Path | str, **spec: Any) -> dict[str, Any]:
    """A Model manifest of a directory."""
    return model(name, str(source), **{"format": "mlx", **spec})


def mlx_service(name: str, model: str, **spec: Any) -> dict[str, Any]:
    """An InferenceService manifest; what llama-server would be told of threads means nothing here."""
    return service(name, model, **{"extraArgs": [], "contextSize": 32768, **spec})
