"""Metadata of the model files that a pass asks for, read in the background (see `models.headers`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from metal_supervisor.models.headers import Headers, judged_name
from metal_supervisor.models.metadata import Reading
from metal_supervisor.models.store import Store
from metal_supervisor.spec.sources import Artifact


class Readings:
    """Looks files up, and notes which ones a pass has asked for: no other header is kept."""

    def __init__(self, headers: Headers, store: Store, home: str, ollama_registry: str) -> None:
        """`home`: directory that relative paths in a command line start from."""
        self._headers, self._store, self._home, self._registry = headers, store, home, ollama_registry
        self._wanted: set[str] = set()
        """Files, and models of Ollama's library, that were asked for in this pass."""

    def look(self, path: str) -> Reading | None:
        """Metadata of a file; None while it is being read."""
        self._wanted.add(path)
        return self._headers.look(path)

    def latest(self, path: str) -> Reading | None:
        """As `look`; what is known is not read again, however old it is."""
        self._wanted.add(path)
        return self._headers.latest(path)

    def judged(self, artifact: Artifact) -> Reading | None:
        """Metadata of a file that a manifest names; MISSING if it is not here or not allowed, None while it is read."""
        return self._judged(artifact.source, lambda: self._store.here(artifact) is not None)

    def _judged(self, path: str, is_here: Callable[[], bool]) -> Reading | None:
        self._wanted.add(judged_name(path))
        return self._headers.judged(path, is_here)

    def look_from_home(self, path: str) -> Reading | None:
        """Metadata of a file in a command line. A file that a manifest may not name is never opened."""
        whole = str(Path(self._home, path))
        if self._store.has(whole):
            return self.look(whole)
        return self._judged(whole, lambda: self._store.may_open(whole))

    def library(self, source: str) -> Reading | None:
        """Metadata of a model of Ollama's library, from its registry; None while the request is under way."""
        self._wanted.add(source)
        return self._headers.library(source, self._registry)

    def still_wanted(self, paths: Collection[str]) -> None:
        """Keep the headers of files for another pass without a look at them."""
        self._wanted.update(paths)

    def forget_others(self) -> None:
        """Drop the headers that this pass has not asked for; the next one begins.

        What comes anew is read anew: a file may have been put back in the meantime.
        """
        self._headers.keep(self._wanted)
        self._wanted = set()
