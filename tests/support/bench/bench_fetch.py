#!/usr/bin/env python3
"""How fast a model comes over a line that is faster than the disk, beside curl on the same one: part of `make bench`.

A server of its own process sends a file from the page cache with sendfile, so that neither side waits for it. curl and
our loop take turns; what counts is the share of curl's rate that ours reaches, for the machine is noisy and curl is on
it too. Ours syncs what it writes and curl does not; the check of a sha256 is measured apart.

    python -m tests.support.bench.bench_fetch [--mib 512] [--rounds 5]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from metal_supervisor.models.listing import Piece
from metal_supervisor.models.remote import fetch
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.remote.web import Client


class Nobody:
    """Listens to nothing."""

    def begin(self) -> None:
        """Nothing."""

    def got(self, more_bytes: int) -> None:
        """Nothing."""

    def synced(self) -> None:
        """Nothing."""

    def hashed(self, more_bytes: int) -> None:
        """Nothing."""


def serve(path: Path, listener: socket.socket) -> None:
    """Answers GETs with the file, one after the other, until it is killed."""
    size = path.stat().st_size
    while True:
        connection, _ = listener.accept()
        with connection, path.open("rb") as file:
            asked = b""
            while b"\r\n\r\n" not in asked:
                more = connection.recv(65536)
                if not more:
                    break
                asked += more
            if not asked:
                continue
            found = re.search(rb"[Rr]ange: bytes=(\d+)-", asked)
            start = int(found[1]) if found else 0
            status = b"206 Partial Content" if found else b"200 OK"
            span = b"Content-Range: bytes %d-%d/%d\r\n" % (start, size - 1, size) if found else b""
            head = b'HTTP/1.1 %s\r\nContent-Length: %d\r\n%sETag: "one"\r\nConnection: close\r\n\r\n'
            connection.sendall(head % (status, size - start, span))
            try:
                connection.sendfile(file, start)
            except OSError:
                continue


def measure(directory: Path, mib: int = 512, rounds: int = 5) -> dict[str, list[float]]:
    """MB/s of each round: `curl`, `ours`, and `hash` for the check of what came."""
    source, target = directory / "source.gguf", directory / "target.gguf"
    block = b"GGUF" + os.urandom((1 << 20) - 4)
    with source.open("wb") as file:
        for _ in range(mib):
            file.write(block)
    digest = hashlib.sha256(block * mib).hexdigest() if mib <= 64 else fetch.digest(source)
    listener = socket.create_server(("127.0.0.1", 0), backlog=8)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/model.gguf"
    child = os.fork()
    if not child:
        serve(source, listener)
    listener.close()
    found: dict[str, list[float]] = {"curl": [], "ours": [], "hash": []}
    megabytes = mib * (1 << 20) / 1e6
    try:
        for round_ in range(rounds + 1):  # the first one warms up
            start = time.perf_counter()
            subprocess.run([shutil.which("curl") or "curl", "-sS", "-o", str(target), url], check=True)
            curl_s = time.perf_counter() - start
            target.unlink()
            start = time.perf_counter()
            client = Client(SourcePolicy(lax=True))
            fetch.fetch(client, Piece("model.gguf", url, mib << 20, "", '"one"'), target, {}, Nobody())
            client.close()
            ours_s = time.perf_counter() - start
            start = time.perf_counter()
            assert fetch.digest(target) == digest
            hash_s = time.perf_counter() - start
            target.unlink()
            if round_:
                for name, took_s in (("curl", curl_s), ("ours", ours_s), ("hash", hash_s)):
                    found[name].append(megabytes / took_s)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        source.unlink()
    return found


def main() -> int:
    """Prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), arguments.mib, arguments.rounds)
    for name, values in found.items():
        print(f"{name:<6} median {statistics.median(values):7.0f} MB/s  worst {min(values):7.0f}  n={len(values)}")
    shares = [ours / curl for ours, curl in zip(found["ours"], found["curl"], strict=True)]
    print(f"ours / curl: median {statistics.median(shares):.2f}, worst {min(shares):.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
