"""The user's own Ollama: its address, and a background check that it answers. It is never started or stopped."""

from __future__ import annotations

import threading
import time
import urllib.parse
from collections.abc import Callable

from metal_supervisor.runtimes.daemon_client import Away, Daemon, DaemonRefused

LOOK_EVERY_S = 5.0
LOOK_TIMEOUT_S = 1.0


def address_of(url: str) -> tuple[str, int] | None:
    """(host, port) of an Ollama's URL, None for one that is not http."""
    parts = urllib.parse.urlsplit(url)
    return (parts.hostname or "127.0.0.1", parts.port or 80) if parts.scheme == "http" else None


def answers(address: tuple[str, int]) -> bool:
    """True if an Ollama answers at an address: any web server may have the port."""
    try:
        return isinstance(Daemon(*address).call("GET", "/api/version", timeout_s=LOOK_TIMEOUT_S).get("version"), str)
    except (Away, DaemonRefused):
        return False


class Own:
    """Checks in the background, while wanted, that the user's own Ollama answers."""

    def __init__(self, url: str, wake: Callable[[], None]) -> None:
        self.address = address_of(url)
        self._wake = wake
        self._wanted = threading.Event()
        self._seen_at: float | None = None
        self.known = self.address is None
        """True once it has been checked, or if there is no address to check."""
        if self.address is not None:
            threading.Thread(target=self._look, name="own ollama", daemon=True).start()

    def want(self, wanted: bool) -> None:
        """Turn the background check on or off; `known` becomes False when it is turned on."""
        if not wanted:
            self._wanted.clear()
        elif not self._wanted.is_set():
            self.known = self.address is None  # the last result may be old
            self._wanted.set()

    def here(self, patience_s: float = 0.0) -> bool:
        """True if it answered within the last two check intervals and `patience_s` before those."""
        return self._seen_at is not None and time.monotonic() - self._seen_at <= patience_s + 2 * LOOK_EVERY_S

    def _look(self) -> None:
        assert self.address is not None
        while True:
            self._wanted.wait()
            found = answers(self.address)
            news = not self.known or found != self.here()
            self._seen_at, self.known = time.monotonic() if found else self._seen_at, True
            if news:
                self._wake()
            time.sleep(LOOK_EVERY_S)
