"""The user's own Ollama: where it is, and whether it answers. It is never started or stopped."""

from __future__ import annotations

import threading
import time
import urllib.parse
from collections.abc import Callable

from metal_supervisor.runtimes.daemon_client import Away, Daemon, DaemonRefused

LOOK_EVERY_S, LOOK_TIMEOUT_S = 5.0, 1.0


class Own:
    """Whether the user's own Ollama answers, looked at in the background while anybody wants to know."""

    def __init__(self, url: str, wake: Callable[[], None]) -> None:
        parts = urllib.parse.urlsplit(url)
        self.address = (parts.hostname or "127.0.0.1", parts.port or 80) if parts.scheme == "http" else None
        self._wake = wake
        self._wanted = threading.Event()
        self._seen_at: float | None = None
        self.known = self.address is None
        """Whether it has been looked for."""
        if self.address is not None:
            threading.Thread(target=self._look, name="own ollama", daemon=True).start()

    def want(self, wanted: bool) -> None:
        """Whether anybody needs to know."""
        if not wanted:
            self._wanted.clear()
        elif not self._wanted.is_set():
            self.known = self.address is None  # what was known may be long ago
            self._wanted.set()

    def here(self, patience_s: float = 0.0) -> bool:
        """Whether it answered at the latest look, or did so within that time."""
        return self._seen_at is not None and time.monotonic() - self._seen_at <= patience_s + 2 * LOOK_EVERY_S

    def _look(self) -> None:
        assert self.address is not None
        while True:
            self._wanted.wait()
            try:
                Daemon(*self.address).call("GET", "/api/version", timeout_s=LOOK_TIMEOUT_S)
                found = True
            except (Away, DaemonRefused):
                found = False
            news = not self.known or found != self.here()
            self._seen_at, self.known = time.monotonic() if found else self._seen_at, True
            if news:
                self._wake()
            time.sleep(LOOK_EVERY_S)
