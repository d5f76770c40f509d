"""Checks of sleep and of power: what a Mac does when it is put to sleep, and what powermetrics says on this chip."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from typing import Any

from metal_supervisor.host.sleep_clock import Wake, system_clocks
from tests.support.mac import mac_kit, mac_parse
from tests.support.mac.mac_kit import Kit
from tests.support.mac.mac_report import Sheet, Skip

FRAMES = 3
FRAME_S = 6.0
ASLEEP_S = 75
NOTABLE_S = 20.0
OVER_S = 300.0
PMSET = "/usr/bin/pmset"
POWERMETRICS = "/usr/bin/powermetrics"


def powermetrics(kit: Kit, sheet: Sheet) -> None:
    """powermetrics gives frames that we can read, by sudo's leave for one command line and no other."""
    from metal_supervisor.host import powermetrics as product

    kit.need_root("powermetrics is root's")
    found = mac_parse.frames(output_of(kit, product.POWERMETRICS, FRAMES * FRAME_S))
    sheet.claim(len(found) >= FRAMES - 1, f"{len(found)} frames in {FRAMES * FRAME_S:.0f} s")
    sheet.show("keys, names and types only", sorted({name for frame in found for name in mac_parse.key_names(frame)}))
    for domain in ("cpu", "gpu", "ane", "combined"):
        sheet.figure(domain, "W", *watts(found, domain))
    sheet.claim(watts(found, "gpu"), "the power of the GPU is among them")
    leave(kit, sheet, product.POWERMETRICS)


def output_of(kit: Kit, argv: tuple[str, ...], seconds: float) -> bytes:
    """What a command of root's says within so long; it is ended then."""
    child, said = kit.start_root(*argv), bytearray()

    def read() -> None:
        while child.stdout and (piece := child.stdout.read1(1 << 16)):  # type: ignore[attr-defined]
            said.extend(piece)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(seconds)
    kit.root("/bin/kill", "-TERM", str(child.pid))
    reader.join(10.0)
    return bytes(said)


def watts(found: list[dict[str, Any]], domain: str) -> list[float]:
    """What each frame says of a domain; none of frames that do not tell."""
    parts = [each.get("processor") for each in found]
    told = [part.get(f"{domain}_power") for part in parts if isinstance(part, dict)]
    return [value / 1000 for value in told if isinstance(value, int | float) and not isinstance(value, bool)]


def leave(kit: Kit, sheet: Sheet, argv: tuple[str, ...]) -> None:
    """sudo lets exactly that be run without a password; asked with -k, which takes no notice of one given before."""
    listed = kit.here([mac_kit.SUDO, "-k", "-n", "-l", *argv], 15.0)
    other = kit.here([mac_kit.SUDO, "-k", "-n", POWERMETRICS, "-n", "1", "-i", "100"], 15.0)
    sheet.show("sudo of another command line", other.err)
    if other.ok:
        sheet.omit("that other command lines are refused: this account may do everything without a password")
        return
    sheet.claim("password" in other.err or "not allowed" in other.err, "another command line is refused")
    if not listed.ok:
        sheet.omit("that ours is allowed: make install-powermetrics-sudo, and run it again")
        return
    child = subprocess.Popen(
        [mac_kit.SUDO, "-k", "-n", *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    kit.cleanup("end powermetrics", lambda: kit.end_root(child))
    assert child.stdout is not None
    sheet.claim(child.stdout.read(64), "ours is allowed without a password")


def sleep(kit: Kit, sheet: Sheet) -> None:
    """The clocks show a sleep, and the Mac serves again soon after it wakes."""
    kit.need_root("waking this Mac at a time is root's to order")
    if not kit.options.terminal:
        raise Skip("nobody is there to be asked whether this Mac may sleep; run it in a terminal")
    from tests.support.macs import Mac, embedded_cluster
    from tests.support.system import eventually, service

    cluster = embedded_cluster(kit.scratch)
    kubeconfig = cluster.__enter__()
    kit.cleanup("end the cluster", lambda: cluster.__exit__(None, None, None))
    mac = Mac(kit.scratch / "mac", "acceptance", kubeconfig, 11)
    kit.cleanup("end the system", mac.close)
    mac.start()
    mac.apply(mac.tiny_model(), service())
    engine = mac.ready(within_s=120)
    if not consent(kit):
        raise Skip("nobody agreed to let this Mac sleep; run it again and answer y")
    wake, clocks = Wake(), system_clocks()
    slept_s = go_to_sleep(kit, wake)
    sheet.claim(slept_s >= NOTABLE_S, "the pair of clocks saw the sleep")
    sheet.figure("slept by the clocks", "s", slept_s)
    back = clocks.inclusive()
    eventually(mac.slice_ready, 120, "the endpoint to be back")
    sheet.figure("from waking to ready", "s", clocks.inclusive() - back)
    sheet.claim(mac.pid() == engine, "the engine is the same")


def consent(kit: Kit) -> bool:
    """Asks on the terminal."""
    kit.say(f"  this Mac is going to sleep for about {ASLEEP_S} s and to wake by itself; save your work")
    sys.stdout.write("  may it? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def go_to_sleep(kit: Kit, wake: Wake) -> float:
    """Sends this Mac to sleep and waits until it is awake again; seconds slept by its clocks, 0 if it did not."""
    at = (datetime.now() + timedelta(seconds=ASLEEP_S)).strftime("%m/%d/%y %H:%M:%S")
    done = kit.root(PMSET, "schedule", "wake", at)
    assert done.ok, f"pmset schedule wake: {done.err or done.out}"
    kit.cleanup("cancel the wake", lambda: kit.root(PMSET, "schedule", "cancel", "wake", at))
    done = kit.run(PMSET, "sleepnow")
    assert done.ok, f"pmset sleepnow: {done.err or done.out}"
    until = time.time() + OVER_S
    while time.time() < until:
        if slept_s := wake.slept_s():
            return slept_s
        threading.Event().wait(0.2)
    return 0.0
