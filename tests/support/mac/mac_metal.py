"""Checks of Metal's memory: what a model really takes, and what Metal will wire at most.

A footprint leaves out clean pages of files, and llama-server lets go of what it wired once nobody asked for three
minutes. Both are read from source and reports, and both decide what a model is charged for: here they are measured.
"""

from __future__ import annotations

from metal_supervisor.host import machine
from metal_supervisor.memory import machine_memory
from metal_supervisor.spec.sizes import MIB
from tests.support.mac import mac_chat, mac_parse
from tests.support.mac.mac_host import compare, this_mac
from tests.support.mac.mac_kit import Kit
from tests.support.mac.mac_report import Sheet

EXPIRY_S = 200.0
"""llama.cpp keeps weights resident for three minutes after the last graph."""
CONTEXT = ("--ctx-size", "4096", "--parallel", "1")


def footprint(kit: Kit, sheet: Sheet) -> None:
    """What llama-server holds, mapped and not, while it works and after it has been idle."""
    model = kit.model()
    weights_mib = model.stat().st_size / MIB
    sheet.figure("model file", "MiB", weights_mib)
    flags = machine.flags_in(machine.help_of(kit.llama_server()))
    modes: dict[str, tuple[str, ...]] = {"mmap": ()}
    if "--no-mmap" in flags:
        modes["no mmap"] = ("--no-mmap",)
    elif "--load-mode" in flags:
        modes["no mmap"] = ("--load-mode", "none")
    else:
        sheet.omit("without mmap: this llama-server has no flag for it")
    for mode, more in modes.items():
        served = kit.serve(model, *CONTEXT, *more)
        status, _ = mac_chat.ask(served.port, max_tokens=64)
        sheet.claim(status == 200, f"it answers: {mode}")
        busy_mib = compare(kit, sheet, served.pid, f"{mode}, after an answer")
        level = this_mac().number("kern.memorystatus_level")
        kit.pause(EXPIRY_S, "until llama-server lets go of what Metal wired")
        idle_mib = compare(kit, sheet, served.pid, f"{mode}, idle")
        sheet.figure(f"memorystatus_level, {mode}, working", "%", level)
        sheet.figure(f"memorystatus_level, {mode}, idle", "%", this_mac().number("kern.memorystatus_level"))
        charged_mib = charge(served.pid, model.stat().st_size if mode == "mmap" else 0) / MIB
        sheet.figure(f"charged, {mode}", "MiB", charged_mib)
        sheet.figure(f"idle less working, {mode}", "MiB", idle_mib - busy_mib)
        sheet.claim(charged_mib >= weights_mib * 0.95, f"what is charged is never below the weights: {mode}")
        for problem in kit.tidy_last():
            sheet.claim(False, f"the engine could be ended: {problem}")


def charge(pid: int, mapped_bytes: int) -> int:
    """What our ledger would charge for a process. Raises AssertionError."""
    found = machine_memory.used_bytes(pid, mapped_bytes)
    assert found is not None, "the engine is gone"
    return found.charged_bytes


def wired(kit: Kit, sheet: Sheet) -> None:
    """Our budget stays below what Metal will wire, as the system and the engine tell it."""
    engine, mac = kit.llama_server(), this_mac()
    total_mib, limit_mib = mac.total_bytes() / MIB, mac.wired_limit_mib()
    said = kit.run("/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb")
    sheet.show("sysctl iogpu.wired_limit_mb", said.out + said.err)
    sheet.claim(said.out.strip() == str(limit_mib), f"iogpu.wired_limit_mb is {limit_mib}, as sysctl says")
    done = kit.run(str(engine), "--list-devices", timeout_s=60)
    sheet.show("llama-server --list-devices", done.out + done.err)
    device_mib = mac_parse.metal_mib(done.out + done.err)
    sheet.figure("memory", "MiB", total_mib)
    sheet.figure("Metal's device", "MiB", device_mib)
    sheet.figure("share of the memory", "%", 100 * device_mib / total_mib)
    if limit_mib:
        sheet.claim(device_mib == limit_mib, "the device has what the administrator lets Metal wire")
    ours = machine_memory.host_budget(None, engine)
    sheet.show("budget", ours.explain())
    sheet.figure("budget", "MiB", ours.bytes / MIB)
    sheet.claim(device_mib, "the engine lists a Metal device")
    sheet.claim(ours.bytes <= device_mib * MIB, "the budget is no more than that")
