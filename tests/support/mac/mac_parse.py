"""What macOS's tools print, read into numbers: footprint, top, vm_stat, pmset, powermetrics and their like.

None of it is an interface, so each function takes only what it has to, and says None or nothing where a line is not
there. All of it is text in, values out, so that it is tested without a Mac.
"""

from __future__ import annotations

import plistlib
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from xml.parsers.expat import ExpatError

UNITS = {"B": 1, "KB": 1024, "K": 1024, "MB": 1024**2, "M": 1024**2, "GB": 1024**3, "G": 1024**3, "T": 1024**4}
MIB = 1024**2
PLIST_END = b"</plist>"


def size_bytes(text: str) -> int | None:
    """Bytes of `1234 B`, `14 MB`, `2049M+` or `1.5 GB`; None of anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?B?)[+-]?", text.strip())
    if not found or (found[2] and found[2] not in UNITS):
        return None
    return round(float(found[1]) * UNITS.get(found[2], 1))


def footprint_bytes(text: str) -> int | None:
    """The footprint in the words of `footprint -f bytes -p PID`: the ledger's own figure if it is told."""
    for pattern in (r"(?m)^\s*phys_footprint:\s*([0-9.]+ ?[KMG]?B?)\s*$", r"Footprint:\s*([0-9.]+ ?[KMG]?B?)\b"):
        if found := re.search(pattern, text):
            return size_bytes(found[1])
    return None


def top_bytes(text: str, pid: int) -> int | None:
    """The memory of a process in the words of `top -l 1 -stats pid,mem`, which rounds to three digits."""
    found = re.search(rf"(?m)^\s*{pid}[*-]?\s+([0-9.]+[BKMGT]?[+-]?)\s*$", text)
    return size_bytes(found[1]) if found else None


def ps_rss_bytes(text: str) -> int | None:
    """Resident bytes in the words of `ps -o rss= -p PID`."""
    return int(text) * 1024 if text.strip().isdecimal() else None


def vm_stat_bytes(text: str) -> dict[str, int]:
    """Bytes by the names that `vm_stat` gives to its counts of pages; nothing without a page size."""
    page = re.search(r"page size of (\d+) bytes", text)
    if not page:
        return {}
    rows = re.findall(r'(?m)^"?([A-Z][^":\n]*)"?:\s+([\d,]+)\.?\s*$', text)
    return {name: int(count.replace(",", "")) * int(page[1]) for name, count in rows}


def free_percent(text: str) -> int | None:
    """The percentage of `memory_pressure -Q`."""
    found = re.search(r"free percentage:\s*(\d+)\s*%", text)
    return int(found[1]) if found else None


def swap_used_bytes(text: str) -> int | None:
    """What `sysctl vm.swapusage` says is used."""
    found = re.search(r"used = ([0-9.]+[KMG])", text)
    return size_bytes(found[1]) if found else None


def devices(text: str) -> dict[str, tuple[str, int]]:
    """Devices of `llama-server --list-devices`: `MTL0` -> (name, MiB)."""
    rows = re.findall(r"(?m)^\s*(\w+): (.+) \((\d+) MiB, \d+ MiB free\)\s*$", text)
    return {key: (name, int(mib)) for key, name, mib in rows}


def metal_mib(text: str) -> int:
    """MiB of the first Metal device in such a list, 0 without one."""
    found = [mib for key, (_, mib) in devices(text).items() if re.fullmatch(r"(MTL|Metal)\d*", key)]
    return found[0] if found else 0


def assertions(text: str) -> list[tuple[int, str, str]]:
    """(pid, program, kind) of every assertion that `pmset -g assertions` lists by its owner."""
    rows = re.findall(r"(?m)^\s*pid (\d+)\(([^)]*)\): \[0x[0-9a-fA-F]+\] \S+ (\w+) named:", text)
    return [(int(pid), program, kind) for pid, program, kind in rows]


def frames(text: bytes) -> list[dict[str, Any]]:
    """The whole property lists in the output of powermetrics, which puts a NUL before each but the first."""
    found = []
    for piece in text.split(PLIST_END)[:-1]:
        try:
            loaded = plistlib.loads(piece.replace(b"\0", b"").lstrip() + PLIST_END)
        except (ExpatError, ValueError, LookupError, TypeError, SyntaxError):
            continue
        if isinstance(loaded, dict):
            found.append(loaded)
    return found


def key_names(found: Any, path: str = "") -> list[str]:
    """Names of all keys of a property list, `processor.clusters[].name`, with the type of each; no value of any."""
    if isinstance(found, dict):
        below = {f"{path}.{key}" if path else str(key): value for key, value in found.items()}
        rows = [name for inner, value in below.items() for name in key_names(value, inner)]
    elif isinstance(found, list):
        rows = [name for each in found for name in key_names(each, f"{path}[]")] or [f"{path}[]"]
    else:
        rows = [f"{path} ({type(found).__name__})"]
    return sorted(set(rows))


def tokens_per_s(arrivals_s: Sequence[float]) -> float | None:
    """Tokens a second between the first and the last that arrived; the wait for the first is another figure."""
    if len(arrivals_s) < 2 or arrivals_s[-1] <= arrivals_s[0]:
        return None
    return (len(arrivals_s) - 1) / (arrivals_s[-1] - arrivals_s[0])


def longest_gap_s(arrivals_s: Sequence[float]) -> float:
    """The longest wait between two tokens."""
    return max((after - before for before, after in pairwise(arrivals_s)), default=0.0)


def within(one: float, other: float, share: float, slack: float = 0.0) -> bool:
    """Whether two measurements of the same agree: within a share of the larger, or an absolute slack."""
    return abs(one - other) <= max(share * max(abs(one), abs(other)), slack)
