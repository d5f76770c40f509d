"""Facts about this Mac's chip: name, cores by level, GPU and macOS, for capability labels and for people.

Most of it is a sysctl of a microsecond. Two things are not: the GPU's cores and its Metal family come only from
system_profiler, which takes seconds. So it runs once per boot, system build and model of Mac, in a background thread,
and the result is kept as JSON in the state directory. Facts that cannot be had are left out: none of them may keep a
Mac from serving. The profiler is asked for displays only, because its hardware section has a serial number in it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metal_supervisor.host import commands
from metal_supervisor.host.darwin_memory import Mac
from metal_supervisor.spec.document import mapping, string
from metal_supervisor.spec.types import Json
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.reports import read_object

FILE = "chip.json"
FORMAT = 1
PROFILER = "/usr/sbin/system_profiler", "-json", "-detailLevel", "mini", "SPDisplaysDataType"
PROFILER_TIMEOUT_S = 30.0
MOST_LEVELS = 4
MOST_CORES = 1024
LONGEST_TEXT = 100


@dataclass(frozen=True)
class Chip:
    """Facts about a chip and its system; "", () and None stand for unknown ones."""

    name: str = ""
    """`Apple M4 Max`."""
    model: str = ""
    """Model of the Mac: `Mac16,5`."""
    macos: str = ""
    """`26.1`."""
    build: str = ""
    """Build of macOS: `25B78`."""
    cores: tuple[tuple[str, int], ...] = ()
    """(name of a level, its physical cores), the fastest first. Not every chip has one called `Efficiency`."""
    gpu_cores: int | None = None
    metal: str = ""
    """`metal3`, `metal4`."""
    rosetta: bool = False
    """This process runs translated: a Python for Intel, whose children are for Intel too."""

    @property
    def label(self) -> str:
        """The name as the value of a Kubernetes label: `Apple-M4-Max`."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.name)[:63].strip("-._")


def quick(mac: Mac | None) -> Chip:
    """The facts that sysctls tell, within microseconds; an empty Chip off a Mac."""
    if mac is None:
        return Chip()
    return Chip(
        name=_text(mac, "machdep.cpu.brand_string"),
        model=_text(mac, "hw.model"),
        macos=_text(mac, "kern.osproductversion"),
        build=_text(mac, "kern.osversion"),
        cores=_levels(mac),
        rosetta=_number(mac, "sysctl.proc_translated") == 1,
    )


def facts(mac: Mac | None, state: Path, boot: str, run: commands.Runner = commands.run) -> Chip:
    """All facts. May take half a minute, once per boot: do not call it from a loop.

    `state`: directory where the result is kept. `boot`: identity of this boot of the machine.
    """
    found = quick(mac)
    if mac is None:
        return found
    key = [boot, found.build, found.model]
    gpu = _kept(state / FILE, key)
    if gpu is None:
        listed = run(PROFILER, PROFILER_TIMEOUT_S)
        gpu = cores, metal = displays(listed.out) if listed.ok else (None, "")
        if cores or metal:  # a profiler that tells nothing may do so after a while
            _keep(state / FILE, key, cores, metal)
    return replace(found, gpu_cores=gpu[0], metal=gpu[1])


def _text(mac: Mac, name: str) -> str:
    try:
        return "".join(each for each in mac.text(name) if each.isprintable())[:LONGEST_TEXT].strip()
    except OSError:
        return ""


def _number(mac: Mac, name: str) -> int | None:
    try:
        return mac.number(name)
    except OSError:
        return None


def _levels(mac: Mac) -> tuple[tuple[str, int], ...]:
    """Cores by level; a level whose cores cannot be counted is left out."""
    found = []
    for level in range(min(max(_number(mac, "hw.nperflevels") or 0, 0), MOST_LEVELS)):
        count = _number(mac, f"hw.perflevel{level}.physicalcpu")
        if count is not None and 0 < count <= MOST_CORES:
            found.append((_text(mac, f"hw.perflevel{level}.name") or f"level {level}", count))
    return tuple(found)


# ── the GPU ──────────────────────────────────────────────────────────────────────────────────────


def displays(listed: str) -> tuple[int | None, str]:
    """(GPU cores, Metal family) from system_profiler's report on displays; None and "" where missing.

    Keys differ between releases of macOS. Of several GPUs, which no Apple chip has, the first counts.
    """
    try:
        tree = json.loads(listed)
    except (ValueError, RecursionError):
        return None, ""
    cores = next((count for each in _values(tree, "sppci_cores") if (count := _count(each))), None)
    families = (
        word[1].lower()
        for key in ("spdisplays_mtlgpufamilysupport", "spdisplays_metal", "spdisplays_metal_support")
        for each in _values(tree, key)
        if isinstance(each, str) and (word := re.fullmatch(r"spdisplays_(metal[0-9]{1,2})", each))
    )
    return cores, next(families, "")


def _values(tree: Any, key: str) -> Iterator[Any]:
    """Every value of a key, the uppermost first, from a tree of lists and dictionaries."""
    level = [tree]
    while level:
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                if key in each:
                    yield each[key]
                below += each.values()
            elif isinstance(each, list):
                below += each
        level = below


def _count(found: Any) -> int | None:
    """A number of cores, which the profiler writes as text."""
    if isinstance(found, str) and re.fullmatch(r"[0-9]{1,4}", found):
        found = int(found)
    good = isinstance(found, int) and not isinstance(found, bool) and 0 < found <= MOST_CORES
    return found if good else None


# ── the cached answers ───────────────────────────────────────────────────────────────────────────


def _kept(path: Path, key: list[str]) -> tuple[int | None, str] | None:
    """(GPU cores, Metal family) as kept since the machine was started; None if they were not."""
    body = read_object(path)
    found = mapping(body, "chip")
    if (body.get("format"), body.get("key")) != (FORMAT, key) or "metal" not in found:
        return None
    metal = string(found, "metal")
    return (_count(found.get("gpu_cores")), metal) if re.fullmatch(r"(metal[0-9]{1,2})?", metal) else None


def _keep(path: Path, key: list[str], cores: int | None, metal: str) -> None:
    body: Json = {"format": FORMAT, "key": key, "chip": {"gpu_cores": cores, "metal": metal}}
    with contextlib.suppress(OSError):  # on a full disk it is asked again
        write_atomic(path, json.dumps(body, indent=1) + "\n", durable=False)
