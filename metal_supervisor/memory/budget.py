"""Memory budget: the bytes that all models together may use on this machine.

Metal keeps a model's memory wired, and a Mac whose memory is nearly all wired does not swap: it stops, and its watchdog
reboots it. So the budget is the least of three limits, and names that one: a share of the memory (by its size, or as
configured), Metal's wired limit less a little for the buffers of other programs, and all of the memory less a reserve
for the system.

The share, by the memory in GiB: 67 % up to 36, 75 % up to 64, 80 % below 128, 90 % from 128 on. LLMKube documents
16/36, 48/64 and 128; the steps between are this program's own: 8, 18, 24 and 32 as 36, 96 half-way between 64 and 128
(Metal wires 81 % of it), and 192, 256 and 512 as 128, where Metal's limit or the reserve is usually smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metal_supervisor.spec.sizes import GIB, MIB, amount

SHARES = ((36, 0.67), (64, 0.75), (127, 0.80))
LARGEST_SHARE = 0.90
METAL_SPARE_BYTES = 512 * MIB
RESERVE_BYTES = 2 * GIB
"""Memory that the system keeps at least, on a machine of 8 GiB or more."""
RESERVE_PART = 16
"""Part of the memory that the system keeps; a quarter on a smaller machine."""

# Memory in GiB below which Metal wires that share of it; measured by many users, published nowhere by Apple.
METAL_SHARES = ((16, 2 / 3), (32, 0.74), (64, 0.78), (128, 0.81), (256, 0.84), (512, 0.87))
METAL_LARGEST_SHARE = 0.906
METAL_SHARE_BELOW_36_BEFORE_26 = 2 / 3
METAL_SHARE_BEFORE_26 = 0.75


@dataclass(frozen=True)
class Budget:
    """Memory that all models together may use, and the limit that it comes from."""

    bytes: int
    total_bytes: int
    reason: str
    """Name of the smallest limit, e.g. `90 % of 128.0 GiB`."""
    limits: Mapping[str, int]
    """All limits: reason -> bytes."""

    def explain(self) -> str:
        """One line: the budget, the limit that it comes from, and the other limits."""
        others = ", ".join(f"{name}: {amount(size)}" for name, size in self.limits.items() if name != self.reason)
        return f"{amount(self.bytes)} ({self.reason}; {others})"


def share_of(total_bytes: int) -> float:
    """Default share of the memory for models, by the size of the memory."""
    whole_gib = -(-total_bytes // GIB)
    return next((share for limit, share in SHARES if whole_gib <= limit), LARGEST_SHARE)


def metal_default_bytes(total_bytes: int, macos: int | None) -> int:
    """Metal's default wired limit in bytes, by the memory and the major version of macOS; None counts as an old one.

    Used only if neither `iogpu.wired_limit_mb` nor the engine's list of devices can be read.
    """
    gib = total_bytes / GIB
    if macos is None or macos < 26:
        share = METAL_SHARE_BELOW_36_BEFORE_26 if gib < 36 else METAL_SHARE_BEFORE_26
    else:
        share = next((share for limit, share in METAL_SHARES if gib < limit), METAL_LARGEST_SHARE)
    return round(total_bytes * share)


def metal_limit(total_bytes: int, wired_limit_mib: int, device_mib: int, macos: int | None) -> tuple[int, str]:
    """Metal's wired limit, (bytes, source): the administrator's setting, else the device's, else the default.

    `wired_limit_mib`: sysctl `iogpu.wired_limit_mb`, 0 if unset. `device_mib`: from `llama-server --list-devices`.
    """
    if wired_limit_mib > 0:
        return min(wired_limit_mib * MIB, total_bytes), "iogpu.wired_limit_mb"
    if device_mib > 0:
        return min(device_mib * MIB, total_bytes), "the engine's list of devices"
    return metal_default_bytes(total_bytes, macos), "Metal's usual limit"


def budget(
    total_bytes: int,
    configured: float | None = None,
    metal_bytes: int | None = None,
    metal_source: str = "",
) -> Budget:
    """Compute the budget of a machine.

    `configured`: a share from the configuration, which replaces the default share, but not the other limits.
    `metal_bytes`: Metal's wired limit, None where there is no Metal; `metal_source`: the source of that number.
    """
    share = configured if configured else share_of(total_bytes)
    percent = f"{share * 100:.4g} % of {amount(total_bytes)}"
    reserve = min(max(RESERVE_BYTES, total_bytes // RESERVE_PART), total_bytes // 4)
    limits = {percent: round(total_bytes * share), f"{amount(reserve)} stay with the system": total_bytes - reserve}
    if metal_bytes is not None:
        source = f" ({metal_source})" if metal_source else ""
        limits[f"Metal wires no more{source}, less 512 MiB"] = max(metal_bytes - METAL_SPARE_BYTES, 0)
    reason = min(limits, key=lambda name: limits[name])
    return Budget(limits[reason], total_bytes, reason, limits)
