"""Asks engines whether they are serving requests: all at once, because each may be slow to answer, or not answer."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from metal_supervisor.host import local_status, processes
from metal_supervisor.runtimes import probing
from metal_supervisor.spec.types import Probe

TIMEOUT_S = 0.5
MOST_ASKED = 64
"""Engines that are asked at a time."""
K = TypeVar("K")


@dataclass(frozen=True)
class Asked:
    """Address and probe by which an engine is asked whether it is busy."""

    pid: int
    address: str
    """The address that it listens on."""
    port: int
    probe: Probe


def are_busy(engines: Mapping[K, Asked]) -> dict[K, bool]:
    """Key -> True if that engine is serving a request."""
    if not engines:
        return {}
    with ThreadPoolExecutor(min(len(engines), MOST_ASKED), "busy") as pool:
        return dict(zip(engines, pool.map(_is_busy, engines.values()), strict=True))


def _is_busy(asked: Asked) -> bool:
    """An engine that cannot tell is judged by its connections."""
    told = probing.busy(asked.port, asked.probe, local_status.asked_at(asked.address), TIMEOUT_S)
    return processes.has_clients(asked.pid, asked.port) if told is None else told
