"""A real forward proxy (proxy.py) for tests, and a small stand-in for a SOCKS5 server, such as that of `ssh -D`."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.pace import patience
from tests.support.system import eventually


@dataclass(frozen=True)
class ForwardProxy:
    """A running proxy."""

    url: str
    log: Path

    @property
    def requests(self) -> list[str]:
        """`METHOD HOST:PORT…` of each finished request, in order."""
        return re.findall(r" - ((?:CONNECT|GET|HEAD|POST|PUT|PATCH) \S+) - ", self.log.read_text())


@contextlib.contextmanager
def forward_proxy(directory: Path, login: str = "", certificate: Path | None = None) -> Iterator[ForwardProxy]:
    """Run proxy.py on a free port. `login`: required USER:PASSWORD; `certificate`: PEM for TLS, with its key."""
    port, log = directory / "proxy.port", directory / "proxy.log"
    for each in (port, log):
        each.unlink(missing_ok=True)
    command = [sys.executable, "-m", "proxy", "--hostname", "127.0.0.1", "--port", "0", "--port-file", str(port)]
    command += ["--num-workers", "1", "--num-acceptors", "1", "--log-file", str(log)]
    command += ["--basic-auth", login] if login else []
    command += ["--cert-file", str(certificate), "--key-file", str(certificate)] if certificate else []
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: port.exists() and port.read_text().strip())
        yield ForwardProxy(f"http{'s' if certificate else ''}://127.0.0.1:{port.read_text().strip()}", log)
    finally:
        process.terminate()
        process.wait(patience(30))


class _Socks(socketserver.StreamRequestHandler):
    """CONNECT of RFC 1928 without a login. Every name and address leads to `target`, as names on a bastion may."""

    def handle(self) -> None:
        self.request.recv(2 + self.request.recv(2, socket.MSG_PEEK)[1])
        self.request.sendall(b"\5\0")
        kind = self.request.recv(4)[3]
        size = {1: 4, 4: 16}.get(kind) or self.request.recv(1)[0]
        asked, port = self.request.recv(size), int.from_bytes(self.request.recv(2), "big")
        named = asked.decode() if kind == 3 else str(ipaddress.ip_address(asked))
        self.server.asked.append(f"{named}:{port}")  # type: ignore[attr-defined]
        with socket.create_connection(("127.0.0.1", self.server.target)) as far:  # type: ignore[attr-defined]
            self.request.sendall(b"\5\0\0\1\0\0\0\0\0\0")
            back = threading.Thread(target=_pump, args=(far, self.request), daemon=True)
            back.start()
            _pump(self.request, far)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def socks_stand_in(target: int) -> Iterator[tuple[str, list[str]]]:
    """(HOST:PORT, the `HOST:PORT` that clients requested) of a SOCKS5 server that leads to a port of this machine."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Socks) as server:
        server.daemon_threads, server.block_on_close = True, False
        server.target, server.asked = target, []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", server.asked  # type: ignore[attr-defined]
        server.shutdown()
