"""Options of an API server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")


@dataclass(frozen=True)
class Options:
    """Settings of one API server, which listens on loopback only, for it has no authentication.

    Raises ValueError for a bad prefix.
    """

    data_file: Path
    """SQLite file with all objects; created, 0600, when missing."""
    prefix: str
    """Unguessable first part of every path, e.g. `/k-3f…`; clients that do not know it see only 404."""
    port: int = 0
    """TCP port; 0 lets the system choose one."""
    crd_paths: tuple[Path, ...] = ()
    """YAML files with CRDs, applied at every start."""
    allow_loopback_endpoints: bool = False
    """Accept loopback addresses in EndpointSlices, which a real server refuses."""
    bookmark_s: float = 60.0
    """Pause between bookmarks on a quiet watch."""

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError("prefix: must be / and then letters, digits, dots, dashes or underscores")
