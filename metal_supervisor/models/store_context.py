"""What all downloads of a store have in common: this Mac's settings for them, and the state that they share."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from metal_supervisor.models.disk_space import Space
from metal_supervisor.models.model_directory import ModelDirectory
from metal_supervisor.models.places import Places, places_of
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.remote.web import STALL_S, origin
from metal_supervisor.settings.checks import listed
from metal_supervisor.settings.loader import HUB, Settings
from metal_supervisor.spec.sources import Artifact

LOOPBACK = ("localhost", "127.0.0.0/8", "::1")


@dataclass(frozen=True)
class Terms:
    """Settings of this Mac for downloads."""

    rules: SourcePolicy = field(default_factory=SourcePolicy)
    places: Places = field(default_factory=Places)
    """Allowed places of files that are named by their path."""
    hub: str = HUB
    """Base URL of the Hub or of a mirror, or the absolute path of a local mirror."""
    at_once: int = 2
    """Number of models fetched at the same time, and of namespaces that they are fetched for."""
    stall_s: float = STALL_S


def terms_of(settings: Settings) -> Terms:
    """Terms from this Mac's settings."""
    # A mirror that is configured is trusted, whatever its address.
    _, host, port = origin(settings.hub)
    own = (host, port) if host and settings.hub != HUB else None
    rules = SourcePolicy(
        hosts=listed(settings.allowed_hosts),
        private=listed(settings.private_hosts),
        mirror=own,
        proxies=_proxies(settings),
        proxied=tuple(filter(None, (host, origin(settings.ollama_registry)[1]))),
        ca_file=_authorities(settings),
    )
    return Terms(rules, places_of(settings), settings.hub, settings.downloads, settings.stall_timeout)


def lax_rules(settings: Settings) -> SourcePolicy:
    """Policy for requests of a user at this Mac: any host, by the same proxy."""
    return SourcePolicy(lax=True, proxies=_proxies(settings), ca_file=_authorities(settings))


def _proxies(settings: Settings) -> Mapping[str, str]:
    """The proxies for downloads: the setting's, else those of the environment, which are not for loopback."""
    if settings.download_proxy == "off":
        return {}
    if proxy := settings.download_proxy:
        if proxy.startswith(("/", "~")):
            proxy = str(Path(proxy).expanduser())
            # While the file is missing or empty, its path stands in: no URL, so downloads fail and do not go direct.
            with contextlib.suppress(OSError, UnicodeDecodeError):
                proxy = Path(proxy).read_text("utf-8").strip() or proxy
        return {"all": proxy, "no": settings.download_no_proxy}
    found = urllib.request.getproxies_environment()
    return found | {"no": ",".join((settings.download_no_proxy or found.get("no", ""), *LOOPBACK))}


def _authorities(settings: Settings) -> str:
    names = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
    written = settings.download_ca_file or next(filter(None, map(os.environ.get, names)), "")
    return str(Path(written).expanduser()) if written else ""


class QueuedDownload(Protocol):
    """One download in the queue."""

    namespaces: frozenset[str]
    """Namespaces that want it; it counts for one of them. Empty for a download of the administrator."""


class DownloadQueue:
    """Order of the downloads of one store. Thread-safe.

    Next is a download of the namespace with the fewest active ones, then of the one that started its latest the longest
    ago. A namespace's first needs fewer than `at_once` namespaces, a further one fewer than `at_once` active downloads:
    one active download per namespace while others wait, and slow servers of one namespace never hold up another.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._waiting: dict[QueuedDownload, threading.Event] = {}
        """Pending downloads, the oldest first."""
        self._active: dict[QueuedDownload, str] = {}
        """Active download -> the namespace that it counts for."""
        self._latest: dict[str, int] = {}
        """Namespace -> number of its latest start."""
        self._numbers = itertools.count(1)

    def ask(self, download: QueuedDownload) -> threading.Event:
        """Queue a download; the event is set once it may start, or has left."""
        with self._lock:
            event = self._waiting[download] = threading.Event()
            self._start()
        return event

    def leave(self, download: QueuedDownload) -> None:
        """Remove a download, pending or active."""
        with self._lock:
            if event := self._waiting.pop(download, None):
                event.set()
            self._active.pop(download, None)
            self._start()

    def _start(self) -> None:
        """Start all downloads that may start; the caller holds the lock."""
        while self._waiting:
            counts = Counter(self._active.values())
            count, _, _, namespace, download = min(
                (counts[name], self._latest.get(name, 0), place, name, each)
                for place, each in enumerate(self._waiting)
                for name in each.namespaces or ("",)
            )
            if (len(self._active) if count else len(counts)) >= self._at_once:
                return
            self._active[download] = namespace
            self._latest[namespace] = next(self._numbers)
            self._waiting.pop(download).set()


class StoreContext:
    """State shared by all jobs of a store: its directory, the terms, the download slots and the disk reservations."""

    def __init__(self, directory: Path, terms: Terms) -> None:
        self.directory, self.terms = directory, terms
        self.downloads = DownloadQueue(terms.at_once)
        self.space = Space(directory)

    def slot(self, artifact: Artifact) -> ModelDirectory:
        return ModelDirectory(self.directory, artifact.slot)
