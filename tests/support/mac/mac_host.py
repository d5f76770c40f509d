"""Checks of what macOS itself tells: property lists, memory by ctypes, deaths by kqueue, pressure, the doctor."""

from __future__ import annotations

import getpass
import importlib
import json
import pkgutil
import queue
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import metal_supervisor
from metal_supervisor.cluster.credentials import ClusterAccess, tls_context
from metal_supervisor.host import darwin_memory, launchd
from metal_supervisor.host.exit_watch import ExitWatch
from metal_supervisor.memory import machine_memory
from metal_supervisor.settings.loader import launchd_dir
from tests.support.mac import mac_parse
from tests.support.mac.mac_kit import Kit, eventually
from tests.support.mac.mac_report import Sheet, Skip

CALLS = 200
DEATHS = 20
NOTICED_S = 5.0
SIMULATED_S = 60.0
TELL_ALL_NORMAL = 2 << 16 | 1
"""For the kernel's test of memory pressure: tell every process of level 1, which also ends the test."""
SLACK = 32 * mac_parse.MIB
# Its parent is gone by the time it is watched, and it holds no pipe of ours.
ORPHAN = "import subprocess as s; print(s.Popen(['/bin/sleep', '600'], stdout=s.DEVNULL).pid)"
NOT_YET = "not in this release"


def modules(_kit: Kit, sheet: Sheet) -> None:
    """Every module of ours can be imported on macOS, and servers can be verified."""
    names = [each.name for each in pkgutil.walk_packages(metal_supervisor.__path__, "metal_supervisor.")]
    failed = {}
    for name in names:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the check is for
            failed[name] = f"{type(error).__name__}: {error}"
    sheet.figure("modules", "modules", len(names))
    sheet.show("not importable", failed)
    sheet.claim(not failed, "every module can be imported")
    if sys.platform == "darwin":
        known = tls_context(ClusterAccess(), True).cert_store_stats()["x509_ca"]
        sheet.claim(known, f"servers of the internet can be verified, by {known} authorities")


def plists(kit: Kit, sheet: Sheet) -> None:
    """Apple's own tools take what we render."""
    template = (launchd_dir() / f"{launchd.LABEL}.plist").read_bytes()
    for agent in (False, True):
        name = "agent" if agent else "daemon"
        path = kit.scratch / f"{name}.plist"
        job = launchd.Job(getpass.getuser(), "staff", str(Path.home()), str(kit.scratch / "a&b <c>"), 20.0, agent)
        path.write_bytes(launchd.rendered(template, job))
        done = kit.run("/usr/bin/plutil", "-lint", str(path))
        sheet.show(f"plutil -lint, {name}", done.out + done.err)
        sheet.claim(done.ok, f"plutil takes the property list of the {name}")
    rule = (launchd_dir() / "metal-supervisor-power.sudoers").read_text("utf-8")
    path = kit.scratch / "fragment"
    path.write_text(rule.replace("@USER@", getpass.getuser()), "utf-8")
    path.chmod(0o440)
    done = kit.run("/usr/sbin/visudo", "-cf", str(path))
    sheet.show("visudo -cf", done.out + done.err)
    sheet.claim(done.ok, "visudo takes the fragment for powermetrics")


def timed_us(call: Callable[[], object], calls: int = CALLS) -> list[float]:
    """Microseconds of each of many calls."""
    found = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        found.append((time.perf_counter() - began) * 1e6)
    return found


NUMBERS = (
    "hw.nperflevels",
    "hw.perflevel0.physicalcpu",
    "hw.perflevel1.physicalcpu",
    "sysctl.proc_translated",
    "iogpu.wired_limit_mb",
    "debug.iogpu.wired_limit",
)
TEXTS = (
    "machdep.cpu.brand_string",
    "hw.model",
    "kern.osproductversion",
    "kern.osversion",
    "kern.bootsessionuuid",
    "hw.perflevel0.name",
    "hw.perflevel1.name",
)
"""sysctls that no header names, and that the system's own tool is asked for too; either may be absent."""


def sysctls(kit: Kit, sheet: Sheet) -> None:
    """What we read through libc is what macOS's own tools say."""
    mac = this_mac()
    total = mac.total_bytes()
    told = kit.run("/usr/sbin/sysctl", "-n", "hw.memsize").out.strip()
    sheet.claim(told == str(total), f"hw.memsize is {total}, as sysctl says")
    pages = mac_parse.vm_stat_bytes(kit.run("/usr/bin/vm_stat").out)
    parts = ("free", "active", "inactive", "speculative", "throttled", "wired down", "purgeable")
    known = sum(pages.get(f"Pages {part}", 0) for part in parts[:-1]) + pages.get("Pages occupied by compressor", 0)
    sheet.show("vm_stat, bytes", pages)
    sheet.claim(mac_parse.within(known, total, 0.1), "the pages of vm_stat add up to hw.memsize within a tenth")
    level = mac.number("kern.memorystatus_level")
    said = mac_parse.free_percent(kit.run("/usr/bin/memory_pressure", "-Q").out)
    near = said is not None and abs(said - level) <= 5
    sheet.claim(near, f"memorystatus_level {level} is memory_pressure's {said} %")
    kernel = mac.number("kern.memorystatus_vm_pressure_level")
    sheet.claim(kernel in (1, 2, 4), f"the kernel's level of pressure is {kernel}: 1, 2 or 4")
    swap = mac_parse.swap_used_bytes(kit.run("/usr/sbin/sysctl", "vm.swapusage").out)
    used = mac.swap_used_bytes()
    sheet.claim(swap is not None and mac_parse.within(swap, used, 0.05, SLACK), f"swap used {used} is sysctl's {swap}")
    compressed = mac.number("vm.compressor_bytes_used")
    sheet.claim(0 <= compressed < total, f"the compressor holds {compressed} bytes, less than there are")
    for name in (*NUMBERS, *TEXTS):
        ask: Callable[[str], object] = mac.number if name in NUMBERS else mac.text
        try:
            ours = str(ask(name))
        except OSError:
            ours = ""
        told = kit.run("/usr/sbin/sysctl", "-n", name).out.strip()
        sheet.claim(told == ours, f"{name} is {ours or 'absent'}, as sysctl says")
    own = subprocess.Popen([sys.executable, "-c", "x = b'1' * (200 << 20); input()"], stdin=subprocess.PIPE)
    kit.cleanup("end a child", lambda: own.communicate(b"\n", timeout=10))
    eventually(lambda: mac.process(own.pid)[0] > 200 << 20, 20, "a child to hold 200 MiB")
    compare(kit, sheet, own.pid, "a child of 200 MiB")
    for name, call in (
        ("sysctl by ctypes", lambda: mac.number("kern.memorystatus_level")),
        ("proc_pid_rusage by ctypes", lambda: mac.process(own.pid)),
        ("a whole sample", machine_memory.sample),
    ):
        sheet.figure(name, "µs", *timed_us(call))


def this_mac() -> darwin_memory.Mac:
    """This Mac's memory. Raises Skip."""
    mac = darwin_memory.mac()
    if mac is None:
        raise Skip("this is no Mac")
    return mac


def compare(kit: Kit, sheet: Sheet, pid: int, what: str) -> float:
    """Our footprint of a process beside the system's own figures; MiB."""
    ours, resident = this_mac().process(pid)
    tool = kit.run("/usr/bin/footprint", "-f", "bytes", "-p", str(pid), timeout_s=60)
    top = kit.run("/usr/bin/top", "-l", "1", "-stats", "pid,mem", timeout_s=30)
    rss = mac_parse.ps_rss_bytes(kit.run("/bin/ps", "-o", "rss=", "-p", str(pid)).out)
    theirs, shown = mac_parse.footprint_bytes(tool.out), mac_parse.top_bytes(top.out, pid)
    sheet.show(f"footprint, {what}", tool.out[:1500] + tool.err)
    for name, value in (("ours", ours), ("footprint", theirs), ("top", shown), ("resident", resident), ("ps rss", rss)):
        if value is not None:
            sheet.figure(f"{name}, {what}", "MiB", value / mac_parse.MIB)
    agrees = theirs is not None and mac_parse.within(ours, theirs, 0.05, SLACK)
    sheet.claim(agrees, f"our footprint is that of footprint(1), within 5 %: {what}")
    if shown is not None:
        sheet.claim(mac_parse.within(ours, shown, 0.05, SLACK), f"and that of Activity Monitor (top): {what}")
    return ours / mac_parse.MIB


def exits(kit: Kit, sheet: Sheet) -> None:
    """The end of a process that is not our child is told within milliseconds."""
    told: queue.Queue[tuple[int, float]] = queue.Queue()
    watch = ExitWatch(lambda pid: told.put((pid, time.perf_counter())))
    delays, missed = [], 0
    for _ in range(DEATHS):
        pid = int(subprocess.check_output([sys.executable, "-c", ORPHAN], timeout=20))
        kit.cleanup(f"end {pid}", lambda pid=pid: _kill(kit, pid))
        watch.watch_only([pid])
        began = time.perf_counter()
        kit.run("/bin/kill", "-KILL", str(pid))
        try:
            name, at = told.get(timeout=NOTICED_S)
        except queue.Empty:
            missed += 1
            continue
        missed += name != pid
        delays.append((at - began) * 1e3)
    sheet.figure("from kill to its being told, kill itself included", "ms", *delays)
    sheet.claim(not missed, f"each of {DEATHS} deaths is told, of processes that are not our children")


def _kill(kit: Kit, pid: int) -> None:
    """Ends one of the sleepers, if it is still that one."""
    if "sleep" in kit.run("/bin/ps", "-o", "comm=", "-p", str(pid)).out:
        kit.run("/bin/kill", "-KILL", str(pid))


def pressure(kit: Kit, sheet: Sheet) -> None:
    """The kernel's levels, simulated, are what we take them for, and go again."""
    kit.need_root("simulating pressure is root's")
    this_mac()
    sheet.claim(machine_memory.sample().kernel_level == 1, "the Mac is not short of memory before")
    kit.cleanup("let the pressure be real again", lambda: calm(kit))
    for name, level in (("warn", 2), ("critical", 4)):
        child = kit.start_root("/usr/bin/memory_pressure", "-S", "-l", name)
        what = f"level {level} for {name}"
        took = eventually(lambda level=level: machine_memory.sample().kernel_level == level, 30, what)
        sheet.figure(f"until {name} is seen", "s", took)
        sheet.claim(True, f"memory_pressure -S -l {name} is seen as {level}")
        try:
            child.wait(SIMULATED_S)  # it takes its level back by itself; one that is killed does not
        except subprocess.TimeoutExpired:
            sheet.omit(f"that memory_pressure takes {name} back by itself: it did not within {SIMULATED_S:.0f} s")
            kit.end_root(child)
            calm(kit)
        took = eventually(lambda: machine_memory.sample().kernel_level == 1, 120, "the level to be normal again")
        sheet.figure(f"from its end until normal, after {name}", "s", took)


def calm(kit: Kit) -> None:
    """Takes a simulated level back, which outlives whoever set it. Raises AssertionError."""
    if machine_memory.sample().kernel_level == 1:
        return
    kit.root("/usr/sbin/sysctl", f"kern.memorypressure_manual_trigger={TELL_ALL_NORMAL}")
    eventually(lambda: machine_memory.sample().kernel_level == 1, 30, "the level of memory pressure to be normal again")


def doctor(kit: Kit, sheet: Sheet) -> None:
    """The doctor runs on a Mac, and its findings, firewall and quarantine among them, are in the report."""
    done = kit.run(sys.executable, "-m", "metal_supervisor", "doctor", "--json", timeout_s=120)
    if done.code == 2 and "invalid choice" in done.err:
        raise Skip(f"metal-supervisor doctor is {NOT_YET}")
    try:
        found = json.loads(done.out)
    except ValueError:
        sheet.show("what it said", done.out + done.err)
        found = None
    sheet.claim(isinstance(found, dict) and found.get("findings"), "metal-supervisor doctor --json tells its findings")
    sheet.claim(done.code in (0, 1), f"it ends with 0 or 1: {done.code}")
    sheet.show("doctor", found)
    firewall = "/usr/libexec/ApplicationFirewall/socketfilterfw"
    for name in ("--getglobalstate", "--getstealthmode"):
        said = kit.run(firewall, name)
        sheet.show(f"socketfilterfw {name}", said.out + said.err)
    said = kit.run(firewall, "--listapps")
    sheet.show("socketfilterfw --listapps, its first line", (said.out + said.err).partition("\n")[0])
    try:
        engine = kit.llama_server().resolve()
    except Skip as skip:
        sheet.omit(f"quarantine of the engine: {skip}")
        return
    said = kit.run("/usr/bin/xattr", "-p", "com.apple.quarantine", str(engine))
    sheet.show("quarantine of llama-server", said.out + said.err)
    sheet.claim(not said.ok, "llama-server is not quarantined")


def caffeinate(kit: Kit, sheet: Sheet) -> None:
    """While a model is wanted this Mac is kept awake, and not a moment longer."""
    kit.llama_server()
    from tests.support.system import System, service

    def awake() -> set[tuple[int, str]]:
        listed = mac_parse.assertions(kit.run("/usr/bin/pmset", "-g", "assertions").out)
        return {(pid, kind) for pid, program, kind in listed if program == "caffeinate"}

    others = {pid for pid, _ in awake()}
    system = System(kit.scratch)
    kit.cleanup("end the system", system.close)
    system.start()
    system.apply(system.tiny_model(), service())
    system.ready(within_s=120)

    def held() -> set[str]:
        return {kind for pid, kind in awake() if pid not in others}

    eventually(held, 30, "an assertion of our caffeinate")
    kinds = held()
    sheet.show("assertions", sorted(kinds))
    sheet.claim("PreventUserIdleSystemSleep" in kinds, "while a model is wanted, the Mac does not sleep when idle")
    sheet.claim(not any("Display" in kind for kind in kinds), "the display is left alone")
    system.apply(service(replicas=0))
    took = eventually(lambda: not held(), 60, "the assertion to be gone")
    sheet.figure("until it may sleep again", "s", took)
    sheet.claim(True, "without a model it may sleep")
