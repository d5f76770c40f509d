"""What our own programs have logged, read as a machine reads it: one object of JSON a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metal_supervisor.settings.logging import entry_in

Entry = dict[str, Any]


def logged(path: Path, message: str = "", since_bytes: int = 0) -> list[Entry]:
    """The entries of a log, with this message if one is given. A line that is still being written is none yet."""
    whole = path.read_bytes()[since_bytes:].rpartition(b"\n")[0].decode()
    found = [entry for line in whole.split("\n") if (entry := entry_in(line)) is not None]
    return [entry for entry in found if message in ("", entry["msg"])]


def strange(path: Path) -> list[str]:
    """The lines of a log that are none of that form."""
    return [line for line in path.read_text().splitlines() if entry_in(line) is None]
