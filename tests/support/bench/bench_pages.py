"""How long the sidecar's answers take while its loop is busy: `/metrics`, `/status` and `/` of a hundred services.

The whole system runs, with stand-ins for engines, and a service is edited every second, so that every process has
something to do. Each request has a connection of its own, as the server has it.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.system import FAKE_ENGINE, System, eventually, service

ROOT = Path(__file__).resolve().parents[3]

PATHS = ("/metrics", "/status", "/", "/healthz")
APART_S = 0.26
"""Between two requests."""
EDIT_EVERY_S = 1.0


@contextlib.contextmanager
def busy_system(services: int) -> Iterator[int]:
    """The sidecar's port of a system with so many services, some of which are edited all the time."""
    names = [f"many-{number}" for number in range(services)]
    with tempfile.TemporaryDirectory(prefix="ms-pages-") as base:
        flags = "--ports", "32100-32699"
        system, over = System(Path(base), *flags, engine=FAKE_ENGINE), threading.Event()

        def edit() -> None:
            for turn in itertools.count():
                if over.wait(EDIT_EVERY_S):
                    return
                system.apply(service(names[turn % services], contextSize=1024 + turn // services))

        editing = threading.Thread(target=edit)
        try:
            system.start()
            system.apply(system.tiny_model(), *(service(name) for name in names))
            eventually(lambda: _ready(system) == services, 240, "all of them to serve")
            editing.start()
            yield system.http
        finally:
            over.set()
            if editing.ident is not None:
                editing.join()
            system.close()


def _ready(system: System) -> int:
    time.sleep(1)  # asking all the time would be the load
    return sum(each["ready"] for each in json.loads(system.fetch("/status")[1])["services"])


def asked(port: int, path: str, times: int) -> list[float]:
    """Seconds that each of so many requests took, its connection included."""
    found = []
    for _ in range(times):
        time.sleep(APART_S)
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
    with busy_system(services) as port:
        return {path: asked(port, path, times) for path in PATHS}


def percentile_99(values: list[float]) -> float:
    """What one in a hundred took longer than."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def main() -> None:
    """Measures, and prints."""
    for path, values in measure().items():
        print(f"{path:<10} p50 {1000 * statistics.median(values):6.1f} ms  p99 {1000 * percentile_99(values):6.1f} ms")


if __name__ == "__main__":
    main()
