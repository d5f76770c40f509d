"""Jobs of launchd of our own, under a label that nothing else has: where a process runs decides what it may do.

A daemon, an agent and this shell differ in three things that nobody can tell without trying: whether Metal gives them
a device, whether they may reach the local network, and how fast macOS lets them be.
"""

from __future__ import annotations

import getpass
import json
import os
import plistlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metal_supervisor.host import root_file
from metal_supervisor.host.launchctl import NO_DOMAIN, Launchctl, LaunchdError
from metal_supervisor.host.launchd import LABEL, PREFIXES, SYSTEM_PATH
from tests.support.mac import mac_chat, mac_parse
from tests.support.mac.mac_kit import (
    COMMAND_S,
    HOW_ROOT,
    SUDO,
    Kit,
    eventually,
    found_on_path,
    free_port,
    need_readable,
    python_of,
    wait_ready,
)
from tests.support.mac.mac_report import Sheet, Skip

TRIAL = f"{LABEL}.acceptance"
ONCE = Path(__file__).resolve().parent / "mac_once.py"
SHELL = "shell"
AGENT = "agent"
DAEMON = "daemon"
RESULT_WAIT_S = 90.0
UNLOAD_S = 30.0
REPEATS = 5
TOKENS = 256
SLOWER = 0.9
NO_ROUTE = 65
"""errno of a connection that Local Network privacy forbids."""
MLX_PROBE = "import mlx.core as mx; print(mx.default_device(), mx.metal.is_available())"


def launchctl(kit: Kit, context: str) -> Launchctl:
    """launchd's domain of daemons, or of this user's agents."""
    if context == DAEMON:
        return Launchctl(kit.here, "system", (SUDO, "-n"))
    return Launchctl(kit.here, f"gui/{os.getuid()}")


def plist(context: str, argv: list[str], scratch: Path, process_type: str = "Interactive") -> dict[str, Any]:
    """A property list of a job that runs once. `process_type`: "" for none."""
    content: dict[str, Any] = {
        "Label": TRIAL,
        "ProgramArguments": argv,
        "WorkingDirectory": str(scratch),
        "RunAtLoad": True,
        "KeepAlive": False,
        "StandardOutPath": str(scratch / "job.log"),
        "StandardErrorPath": str(scratch / "job.log"),
        "EnvironmentVariables": {"HOME": str(Path.home()), "PATH": ":".join((*PREFIXES, *SYSTEM_PATH))},
    }
    if context == DAEMON:
        content |= {"UserName": getpass.getuser(), "InitGroups": True}
    if process_type:
        content["ProcessType"] = process_type
    return content


def load(kit: Kit, context: str, content: dict[str, Any]) -> Callable[[], None]:
    """Loads a job; what takes it out again, which the end of the check does too. Raises Skip, LaunchdError."""
    need_readable()
    domain, text = launchctl(kit, context), plistlib.dumps(content)
    if context == DAEMON:
        kit.need_root("a LaunchDaemon is root's to load")
        path = kit.roots_directory() / f"{context}.plist"
        done = kit.root(*root_file.command(str(path), 0o644, text), content=text)
        if not done.ok:
            raise LaunchdError(f"the property list cannot be made root's: {done.err}")
    else:
        path = kit.scratch / f"{context}.plist"
        path.unlink(missing_ok=True)
        path.write_bytes(text)
        path.chmod(0o644)

    def unload() -> None:
        if domain.job(TRIAL) is not None:
            domain.unload(TRIAL, UNLOAD_S)

    unload()  # of a run that was killed
    kit.cleanup(f"take out {domain.domain}/{TRIAL}", unload)
    domain.enable(TRIAL)
    try:
        domain.load(TRIAL, path)
    except LaunchdError as error:
        if context == AGENT and str(NO_DOMAIN) in str(error):
            raise Skip("no user is logged in at the screen; run it there for the LaunchAgent's part") from None
        raise
    return unload


def once(kit: Kit, context: str, *words: str) -> dict[str, Any]:
    """What mac_once.py finds in a context. Raises Skip, LaunchdError, AssertionError."""
    result = kit.scratch / f"{context}-{len(list(kit.scratch.glob('*.json')))}.json"
    argv = [sys.executable, "-I", str(ONCE), str(result), *words]
    if context == SHELL:
        done = kit.run(*argv, timeout_s=RESULT_WAIT_S)
        assert result.exists(), f"no answer in this shell: {done.err}"
    else:
        unload = load(kit, context, plist(context, argv, kit.scratch))
        eventually(result.exists, RESULT_WAIT_S, f"an answer from the {context}; {job_log(kit)}")
        unload()
    found: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return found


def job_log(kit: Kit) -> str:
    """What a job said last."""
    log = kit.scratch / "job.log"
    return log.read_text("utf-8", "replace")[-400:] if log.exists() else "it said nothing"


def in_each(kit: Kit, sheet: Sheet, *words: str) -> dict[str, dict[str, Any]]:
    """The same question in every context that can be had."""
    found = {}
    for context in (SHELL, AGENT, DAEMON):
        if context == DAEMON and not kit.options.sudo:
            sheet.omit(f"as a LaunchDaemon: {HOW_ROOT}")
            continue
        try:
            found[context] = once(kit, context, *words)
        except Skip as skip:
            sheet.omit(f"as a Launch{context.capitalize()}: {skip}")
    return found


def metal(kit: Kit, sheet: Sheet) -> None:
    """llama.cpp and MLX find the GPU in launchd's contexts as in a shell."""
    for context, found in in_each(kit, sheet, "run", str(kit.llama_server()), "--list-devices").items():
        said = found["out"] + found["err"]
        sheet.show(f"--list-devices, {context}", said)
        mib = mac_parse.metal_mib(said)
        sheet.claim(mib, f"llama-server finds a Metal device: {context}")
        sheet.figure(f"device, {context}", "MiB", mib)
    script = found_on_path("mlx_lm.server")
    python = python_of(script) if script else ""
    if not python:
        sheet.omit("MLX: there is no mlx_lm.server whose interpreter could be asked; pipx install mlx-lm")
        return
    for context, found in in_each(kit, sheet, "run", python, "-c", MLX_PROBE).items():
        sheet.show(f"MLX, {context}", found["out"] + found["err"])
        sheet.claim("gpu" in found["out"] and "True" in found["out"], f"MLX finds the GPU: {context}")


def lan(kit: Kit, sheet: Sheet) -> None:
    """A daemon and a shell reach a host of the local network; an agent is measured."""
    host, mark, port = kit.options.lan.rpartition(":")
    if not (mark and host and port.isdecimal()):
        raise Skip("no host of the local network was named; run it with --lan HOST:PORT, such as the API server's")
    for context, found in in_each(kit, sheet, "connect", host.strip("[]"), port).items():
        sheet.show(context, {"errno": found["errno"], "said": found["err"]})
        if context == AGENT:
            told = "blocked by Local Network privacy" if found["errno"] == NO_ROUTE else found["err"] or "let through"
            sheet.show("a LaunchAgent is", told)
        else:
            sheet.claim(found["code"] == 0, f"a host of the local network can be reached: {context}")


def process_type(kit: Kit, sheet: Sheet) -> None:
    """Interactive is the fastest that launchd lets an engine be."""
    context = DAEMON if kit.options.sudo else AGENT
    if context == AGENT:
        sheet.omit(f"as a LaunchDaemon: {HOW_ROOT}")
    medians: dict[str, float] = {}
    for kind in ("Interactive", "", "Background"):
        rates = rates_under(kit, context, kind)
        name = kind or "unset"
        sheet.figure(f"{name}, {context}", "tokens/s", *rates)
        medians[name] = statistics.median(rates)
    for name in ("unset", "Background"):
        sheet.claim(medians["Interactive"] >= SLOWER * medians[name], f"Interactive is no slower than {name}")


def rates_under(kit: Kit, context: str, kind: str) -> list[float]:
    """Tokens a second of some answers of an engine that is a job of this ProcessType."""
    port = free_port()
    argv = [str(kit.llama_server()), "--model", str(kit.model()), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--ctx-size", "4096", "--parallel", "1"]
    unload = load(kit, context, plist(context, argv, kit.scratch, kind))
    try:
        domain = launchctl(kit, context)
        wait_ready(port, lambda: domain.job(TRIAL) is not None, kit.scratch / "job.log")
        mac_chat.ask(port, max_tokens=16)  # the first answer compiles kernels
        rates = []
        for _ in range(REPEATS):
            stream = mac_chat.Stream(port, TOKENS)
            assert stream.end(COMMAND_S * 8), f"an answer was not whole: {stream.told()}"
            if (rate := mac_parse.tokens_per_s(stream.arrivals_s)) is not None:
                rates.append(rate)
    finally:
        unload()
    assert rates, "no answer had two tokens"
    return rates
