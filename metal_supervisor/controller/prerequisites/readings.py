"""Metadata of the model files that manifests and command lines name, read in the background (see `models.headers`)."""

from __future__ import annotations

from pathlib import Path

from metal_supervisor.models.headers import Headers
from metal_supervisor.models.metadata import Reading
from metal_supervisor.models.store import Store
from metal_supervisor.spec.sources import Artifact


class Readings:
    """Looks files up."""

    def __init__(self, headers: Headers, store: Store, home: str) -> None:
        """`home`: directory that relative paths in a command line start from."""
        self.headers, self._store, self._home = headers, store, home

    def judged(self, artifact: Artifact) -> Reading | None:
        """Metadata of a file that a manifest names; MISSING if it is not here or not allowed, None while it is read."""
        return self.headers.judged(artifact.source, lambda: self._store.here(artifact) is not None)

    def look_from_home(self, path: str) -> Reading | None:
        """Metadata of a file in a command line. A file that a manifest may not name is never opened."""
        whole = str(Path(self._home, path))
        if self._store.has(whole):
            return self.headers.look(whole)
        return self.headers.judged(whole, lambda: self._store.may_open(whole))
