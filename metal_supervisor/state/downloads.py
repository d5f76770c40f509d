"""Downloads of models, read from the controller's report: for metrics, /status and a terminal.

The report may have been written by another version, before an upgrade, so nothing in it is taken for granted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from metal_supervisor.spec.document import mapping, whole
from metal_supervisor.spec.types import Json

AGAIN = "; tried again in "
"""Part of the store's message for a temporary failure."""


@dataclass(frozen=True)
class Download:
    """One Model whose file is not whole on this Mac."""

    namespace: str
    model: str
    source: str
    """`spec.source` as written: not for a log."""
    phase: str
    """`Downloading`, `Pending` or `Failed`."""
    got_bytes: int
    total_bytes: int
    """0 if unknown."""
    message: str

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.model

    @property
    def under_way(self) -> bool:
        """True if bytes are arriving, or are about to."""
        return self.phase == "Downloading"

    @property
    def failed(self) -> bool:
        """True if it failed: no bytes come, and its service tells why and when it is tried again."""
        return self.phase == "Failed"


def counts(got_bytes: int, total_bytes: int, message: str) -> bool:
    """True if a download's byte counts are to be shown rather than its message."""
    return bool(got_bytes or total_bytes) and AGAIN not in message


def downloads(told: Json) -> tuple[Download, ...]:
    """All downloads in a report (`controller.json`), sorted by name."""
    found = (_download(name, row) for name, row in sorted(mapping(told, "models").items()))
    return tuple(each for each in found if each is not None)


def _download(name: str, row: Any) -> Download | None:
    file = mapping(row, "file")
    if file.get("phase") not in ("Downloading", "Pending", "Failed"):
        return None
    namespace, _, model = name.partition("/")
    got, total = whole(file, "got_bytes"), whole(file, "total_bytes")
    source = str(row.get("source") or "")
    return Download(namespace, model, source, file["phase"], got, total, str(file.get("message") or ""))
