"""How long the sidecar's answers take while its loop is busy: `/metrics`, `/status` and `/` of a hundred services.

`/metrics` has what each of a hundred engines counts, too: fifteen series, as llama-server has. The server is the real
one, in a process of its own. A thread beside it does nothing but make boards, as a loop would that never rests, with a
tenth of the services different each time. Requests are so far apart that none is answered with what was rendered for
the one before, and each has a connection of its own, as the server has it.
"""

from __future__ import annotations

import contextlib
import http.client
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from metal_supervisor.core import histogram  # noqa: E402
from metal_supervisor.sidecar.kept import FRESH_S  # noqa: E402
from metal_supervisor.sidecar.server import SWITCH_S  # noqa: E402
from tests import page_boards as boards  # noqa: E402

PATHS = ("/metrics", "/status", "/", "/healthz")
APART_S = {"/metrics": FRESH_S + 0.01, "/": FRESH_S + 0.01}
"""Seconds between two requests, where a younger answer would be given again."""
PROBES = histogram.empty(histogram.PROBE_S).with_value(0.01)


def serve(services: int) -> None:
    """Serves ever new boards until standard input ends; prints its port."""
    sys.setswitchinterval(SWITCH_S)  # as the sidecar has it
    told = boards.told(services)
    latest, over = [boards.board(services, told=told)], threading.Event()

    def loop() -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            fresh = boards.board(services, at=time.time(), told=told)
            rows = (
                replace(row, observed=replace(row.observed, restarts=turn)) if number % 10 == turn % 10 else row
                for number, row in enumerate(fresh.rows)
            )
            probes = dict.fromkeys(fresh.counted.probes, replace(PROBES, total=float(turn)))
            latest[0] = replace(fresh, rows=tuple(rows), counted=replace(fresh.counted, probes=probes))

    busy = threading.Thread(target=loop, daemon=True)
    with boards.served(lambda: latest[0]) as server:
        print(server.effective_port, flush=True)
        busy.start()
        sys.stdin.read()
        over.set()
        busy.join()


@contextlib.contextmanager
def busy_server(services: int) -> Iterator[int]:
    """The port of a process that runs `serve`."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(services)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.communicate(timeout=30)


def asked(port: int, path: str, times: int) -> list[float]:
    """Seconds that each of so many requests took, its connection included."""
    found = []
    for _ in range(times):
        time.sleep(APART_S.get(path, 0.0))
        start = time.monotonic()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
        found.append(time.monotonic() - start)
        assert answer.status == 200, answer.status
    return found


def measure(services: int = 100, times: int = 200) -> dict[str, list[float]]:
    """Path -> seconds of each request."""
    with busy_server(services) as port:
        return {path: asked(port, path, times) for path in PATHS}


def percentile_99(values: list[float]) -> float:
    """What one in a hundred took longer than."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def main() -> None:
    """Measures, and prints."""
    for path, values in measure().items():
        print(f"{path:<10} p50 {1000 * statistics.median(values):6.1f} ms  p99 {1000 * percentile_99(values):6.1f} ms")


if __name__ == "__main__":
    serve(int(sys.argv[1])) if sys.argv[1:] else main()
