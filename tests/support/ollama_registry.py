"""A registry of models for a real Ollama to pull from, which stalls, cuts and lies when it is told to.

It speaks as much of the OCI distribution protocol as Ollama asks for: a manifest and blobs, by GET and HEAD. Ollama
takes a blob only from another host than the registry's, to which it has to be redirected; so this one is the registry
as 127.0.0.1 and the store of the blobs as localhost.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 16
MEDIA = "application/vnd.ollama.image"


def digest_of(content: bytes) -> str:
    """`sha256:…` of some bytes."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: Registry

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        registry, last = self.registry, self.path.rpartition("/")[2]
        with registry.lock:
            registry.asked.append((self.command, self.path, self.headers.get("Range", "")))
        if self.path.startswith("/store/"):
            self._blob(last)
        elif "/blobs/" in self.path and last in registry.blobs:
            self._head(307 if self.command == "GET" else 200, len(registry.blobs[last]), redirect=last)
        elif "/manifests/" in self.path and self.path in registry.manifests:
            manifest = registry.manifests[self.path]
            self._head(200, len(manifest))
            self.wfile.write(manifest)
        else:
            self._head(404, 0)

    def _head(self, status: int, size: int, *, redirect: str = "", of: str = "") -> None:
        self.send_response(status)
        if of:
            self.send_header("Content-Range", of)
        if status == 307:
            self.send_header("Location", f"http://localhost:{self.registry.port}/store/{redirect}")
            size = 0
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def _blob(self, digest: str) -> None:
        """A range of a blob; it is held, or ends, where the registry says."""
        registry, content = self.registry, self.registry.blobs[digest]
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        rest = memoryview(content)[int(first) : int(last or len(content)) + 1]
        self._head(206, len(rest), of=f"bytes {first}-{int(first) + len(rest) - 1}/{len(content)}")
        sent = 0
        while sent < len(rest):
            limit = registry.limit_bytes
            if limit is not None and int(first) + sent >= limit:
                registry.reached.set()
                if registry.cuts:
                    self.close_connection = True
                    return
                registry.released.wait()
                continue
            part = rest[sent : sent + CHUNK_BYTES]
            if limit is not None:
                part = part[: limit - int(first) - sent]
            try:
                self.wfile.write(part)
            except OSError:
                self.close_connection = True
                return
            sent += len(part)


class Registry:
    """One registry on a port of its own."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, str]] = []
        """(method, path, Range) of every request."""
        self.lock = threading.Lock()
        self.limit_bytes: int | None = None
        """Where in a blob it goes no further."""
        self.cuts = False
        """Whether it then ends the connection, rather than keeping it."""
        self.reached, self.released = threading.Event(), threading.Event()
        handler = type("Bound", (_Handler,), {"registry": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def publish(self, name: str, gguf: Path, *, tag: str = "latest", **parameters: Any) -> str:
        """Offers a GGUF file with parameters; returns the name to pull it by. One thread, as in `Ollama.create`."""
        content = gguf.read_bytes()
        config = {
            "model_format": "gguf",
            "model_family": "llama",
            "model_families": ["llama"],
            "os": "linux",
            "architecture": "amd64",
            "rootfs": {"type": "layers", "diff_ids": [digest_of(content)]},
        }
        layers = [self._layer("model", content)]
        layers.append(self._layer("params", json.dumps({"num_thread": 1, **parameters}).encode()))
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {
                **self._layer("", json.dumps(config).encode()),
                "mediaType": "application/vnd.docker.container.image.v1+json",
            },
            "layers": layers,
        }
        self.manifests[f"/v2/library/{name}/manifests/{tag}"] = json.dumps(manifest).encode()
        return f"127.0.0.1:{self.port}/library/{name}:{tag}"

    def _layer(self, kind: str, content: bytes) -> dict[str, Any]:
        digest = digest_of(content)
        self.blobs[digest] = content
        return {"mediaType": f"{MEDIA}.{kind}", "digest": digest, "size": len(content)}

    def stop_at(self, limit_bytes: int, *, cut: bool = False) -> None:
        """From now on no blob goes further than this."""
        self.limit_bytes, self.cuts = limit_bytes, cut
        self.reached.clear()
        self.released.clear()

    def go_on(self) -> None:
        """Lets everything through again."""
        self.limit_bytes = None
        self.released.set()

    def ranges(self) -> list[str]:
        """What has been asked of the store so far, in order."""
        with self.lock:
            return [wanted for _, path, wanted in self.asked if path.startswith("/store/")]

    def close(self) -> None:
        self.go_on()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def registry() -> Iterator[Registry]:
    """A registry that is gone afterwards."""
    made = Registry()
    try:
        yield made
    finally:
        made.close()
