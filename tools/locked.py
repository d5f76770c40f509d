"""Lock files as pip is given them: only what they name, and only with the digests that they have."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = "tools/locks"
CHECKED = ("--require-hashes", "--only-binary", ":all:")
"""Flags of pip for a lock: the build of a source distribution would run programs that no lock names."""


def path(name: str) -> Path:
    """The lock file of a part, by its name without .txt."""
    return ROOT / LOCKS / f"{name}.txt"


def digest(name: str) -> str:
    """Short digest of a lock file, for the name of what was installed from it."""
    return hashlib.sha256(path(name).read_bytes()).hexdigest()[:8]


def reason(said: str) -> str:
    """The line of pip's messages that says why it failed."""
    lines = said.strip().splitlines() or ["no message"]
    return next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
