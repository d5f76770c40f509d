"""A fact of llama-server that docs/llama-server.md tells: it fetches the images that requests name.

Once this fails, a build can be held to `data:` URLs: have it held, make this an attack, and correct the page.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import threading
from pathlib import Path

from tests.support.system import ROOT, engine_path, eventually, free_ports, tiny_gguf
from tests.support.vision import projector

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def test_a_projector_makes_it_fetch_whatever_flags_and_proxies_say(tmp_path: Path) -> None:
    tiny_gguf.write_tiny_gguf(tmp_path / "tiny.gguf")
    projector(tmp_path / "eyes.gguf")
    (port,) = free_ports(1)
    flags = ["--model", "tiny.gguf", "--mmproj", "eyes.gguf", "--port", str(port), "--ctx-size", "512", "--offline"]
    nowhere = {**os.environ, **dict.fromkeys(PROXIES, "http://127.0.0.1:9")}
    with socket.create_server(("127.0.0.1", 0)) as server, (tmp_path / "log").open("wb") as log:
        server.settimeout(30)
        engine = subprocess.Popen([engine_path(), *flags], cwd=tmp_path, env=nowhere, stdout=log, stderr=log)
        try:
            eventually(lambda: ask(port, "GET", "/health") == 200, 60, "the engine")
            content = [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{server.getsockname()[1]}/x.png"}}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            threading.Thread(target=ask, args=(port, "POST", "/v1/chat/completions", body), daemon=True).start()
            with server.accept()[0] as client:
                assert client.recv(4096).startswith(b"GET /x.png ")
        finally:
            engine.terminate()
            engine.wait(30)
    page = (ROOT / "docs" / "llama-server.md").read_text("utf-8")
    assert "**Images by URL are held by confinement alone.**" in page


def ask(port: int, method: str, path: str, body: object = None) -> int:
    """HTTP status of one request."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, json.dumps(body) if body else None)
        return connection.getresponse().status
