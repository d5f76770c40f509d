"""What a Mac tells of its chip: sysctls through a libc called by pointer, tools by what they were recorded to say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from metal_supervisor.host import chip, commands, darwin_memory, machine
from metal_supervisor.host.chip import Chip, displays
from metal_supervisor.host.commands import Done
from metal_supervisor.host.darwin_memory import Mac
from tests.boundary.mac_memory import GIB, M4_MAX, FakeLibc, u32

SYSCTLS = {
    **M4_MAX,
    "machdep.cpu.brand_string": b"Apple M4 Max\0",
    "hw.model": b"Mac16,5\0",
    "kern.osversion": b"25B78\0",
    "hw.nperflevels": u32(2),
    "sysctl.proc_translated": u32(0),
    "hw.perflevel0.name": b"Performance\0",
    "hw.perflevel0.physicalcpu": u32(12),
    "hw.perflevel1.name": b"Efficiency\0",
    "hw.perflevel1.physicalcpu": u32(4),
}
DISPLAYS = json.dumps(
    {
        "SPDisplaysDataType": [
            {"_name": "Apple M4 Max", "sppci_cores": "40", "spdisplays_mtlgpufamilysupport": "spdisplays_metal4"}
        ]
    }
)
WHOLE = Chip(
    "Apple M4 Max", "Mac16,5", "26.1", "25B78", (("Performance", 12), ("Efficiency", 4)), gpu_cores=40, metal="metal4"
)


class Tools:
    """system_profiler, with what it says; every question is counted."""

    def __init__(self, says: Done) -> None:
        self._says = says
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str], timeout_s: float) -> Done:
        self.asked.append(Path(argv[0]).name)
        assert timeout_s > 0 and tuple(argv) == chip.PROFILER
        return self._says


def tools(profiler: str | None = DISPLAYS) -> Tools:
    """None: the tool is not there."""
    return Tools(Done(commands.NOT_FOUND, "", "") if profiler is None else Done(0, profiler, ""))


def test_all_of_a_mac_is_told_and_the_slow_half_of_it_is_asked_once_per_boot(tmp_path: Path) -> None:
    mac, run = Mac(FakeLibc(SYSCTLS)), tools()
    assert [chip.facts(mac, tmp_path, "boot-1", run) for _ in range(3)] == [WHOLE] * 3
    assert run.asked == ["system_profiler"]
    chip.facts(mac, tmp_path, "boot-2", run)
    assert len(run.asked) == 2, "another boot"
    chip.facts(Mac(FakeLibc({**SYSCTLS, "kern.osversion": b"25C1\0"})), tmp_path, "boot-2", run)
    assert len(run.asked) == 3, "another macOS"
    (tmp_path / chip.FILE).write_text('{"format": 1}')
    assert chip.facts(mac, tmp_path, "boot-2", run) == WHOLE, "a damaged file is made again"


def test_levels_are_called_what_the_chip_calls_them() -> None:
    m5 = {**SYSCTLS, "hw.perflevel0.name": b"Super\0", "hw.perflevel1.name": b"Performance\0"}
    assert chip.quick(Mac(FakeLibc(m5))).cores == (("Super", 12), ("Performance", 4))


@pytest.mark.parametrize("name", sorted(SYSCTLS.keys() - M4_MAX.keys()))
def test_each_sysctl_may_be_missing(name: str) -> None:
    found = chip.quick(Mac(FakeLibc({key: value for key, value in SYSCTLS.items() if key != name})))
    assert found != Chip() and found.gpu_cores is None and not found.rosetta


def test_nothing_is_told_where_nothing_is_there(tmp_path: Path) -> None:
    run = tools(None)
    assert chip.facts(Mac(FakeLibc({})), tmp_path, "boot", run) == Chip()
    assert not (tmp_path / chip.FILE).exists(), "and it is asked again"
    assert chip.facts(None, tmp_path, "boot", run) == Chip() and len(run.asked) == 1, "no tool is run off a Mac"


def test_a_translated_python_is_noticed() -> None:
    assert chip.quick(Mac(FakeLibc({**SYSCTLS, "sysctl.proc_translated": u32(1)}))).rosetta


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (DISPLAYS, (40, "metal4")),
        ('{"SPDisplaysDataType":[{"sppci_cores":"8","spdisplays_metal":"spdisplays_metal3"}]}', (8, "metal3")),
        ('{"SPDisplaysDataType":[{"spdisplays_metal_support":"spdisplays_metal3"}]}', (None, "metal3")),
        ('{"SPDisplaysDataType":[{"spdisplays_metal":"spdisplays_supported","sppci_cores":"many"}]}', (None, "")),
        ('{"a":' * 5000, (None, "")),
        ("[]", (None, "")),
        ("", (None, "")),
    ],
    ids=["recorded", "older", "another key", "words", "deep", "empty", "nothing"],
)
def test_the_list_of_displays(listed: str, expected: tuple[int | None, str]) -> None:
    assert displays(listed) == expected


def test_a_profiler_that_tells_nothing_is_asked_again(tmp_path: Path) -> None:
    mac = Mac(FakeLibc(SYSCTLS))
    assert chip.facts(mac, tmp_path, "b", tools(profiler=None)).metal == ""
    assert chip.facts(mac, tmp_path, "b", tools()).gpu_cores == 40


@pytest.mark.parametrize("name", ["Apple M4 Max", " Apple (M4)  Max. ", "Ä" * 80 + "x" * 80, ""])
def test_a_label_is_one_that_the_api_accepts(name: str) -> None:
    label = Chip(name=name).label
    assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", label)
    assert Chip(name="Apple M4 Max").label == "Apple-M4-Max"


def test_the_lease_tells_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: 128 * GIB)
    told = machine.capabilities.__wrapped__(WHOLE)
    assert told == {
        "chip": "Apple M4 Max",
        "memory": str(128 * GIB),
        "model": "Mac16,5",
        "macos": "26.1",
        "cores": "12 Performance, 4 Efficiency",
        "gpu-cores": "40",
        "metal": "metal4",
    }
    assert set(machine.capabilities.__wrapped__(Chip())) == {"chip", "memory"}


def test_performance_cores_are_those_of_the_first_level(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: value for name, value in SYSCTLS.items() if name != "hw.perflevel0.physicalcpu"}
    assert others != SYSCTLS and "hw.perflevel1.physicalcpu" in others
    for sysctls, cores in ((SYSCTLS, 12), (M4_MAX, None), (others, None)):
        mac = Mac(FakeLibc(sysctls))
        monkeypatch.setattr(darwin_memory, "mac", lambda mac=mac: mac)
        assert machine.performance_cores.__wrapped__() == cores


def test_a_boot_stays_the_same_when_the_clock_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """kern.boottime, which psutil reads, is the time by the clock less the time since the boot."""
    session = b"5A0E0F3C-8C5B-4B0E-9B1A-0D2C6C1F7E11"
    mac = Mac(FakeLibc({**SYSCTLS, "kern.bootsessionuuid": session + b"\0"}))
    for boot_time in (1785713468.9, 1785713470.1):
        monkeypatch.setattr(psutil, "boot_time", lambda at=boot_time: at)
        monkeypatch.setattr(darwin_memory, "mac", lambda: mac)
        assert machine.boot_id.__wrapped__() == session.decode()
        monkeypatch.setattr(darwin_memory, "mac", lambda: Mac(FakeLibc({})))
        assert machine.boot_id.__wrapped__() == str(int(boot_time)), "without one"


@pytest.mark.skipif(sys.platform == "darwin", reason="what it is elsewhere")
def test_importing_everything_looks_no_symbol_up() -> None:
    """A Mac's symbols do not exist here: whoever asked for one while being imported would fail."""
    text = (
        "import ctypes, importlib, pkgutil, metal_supervisor\n"
        "def none(*a, **k): raise AssertionError(f'loaded {a}')\n"
        "ctypes.CDLL = ctypes.PyDLL = none\n"
        "ctypes.cdll = ctypes.LibraryLoader(none)\n"
        "for each in pkgutil.walk_packages(metal_supervisor.__path__, 'metal_supervisor.'):\n"
        "    if not each.name.endswith(('__main__', 'mlx_engine', 'omlx_engine')): importlib.import_module(each.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
