"""The conformance list: every engine that is installed, through a real InferenceService on the embedded API.

Two of them run on a Mac alone and were written for by their documentation; the others were only ever tried without a
GPU. Each is asked the same: does it come up under its name, answer, stream, come back after a kill, and leave.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metal_supervisor.host import darwin_memory
from metal_supervisor.memory import machine_memory
from metal_supervisor.spec.sizes import MIB
from tests.support.mac import mac_chat, mac_parse
from tests.support.mac.mac_kit import ROOT, Kit, found_on_path, python_of, show_logs
from tests.support.mac.mac_report import Sheet, Skip

if TYPE_CHECKING:
    from tests.support.system import System

NAME = "acceptance"
MODEL = "weights"
NOWHERE = "/nonexistent"
READY_S = 600.0
GONE_S = 120.0
TOKENS = 128


@dataclass(frozen=True)
class Engine:
    """One engine of the list."""

    title: str
    runtime: str
    """As in `spec.runtime`."""
    setting: str
    program: str
    format: str
    install: str
    daemon: str = ""
    """Program that serves all its services, "" if each has a process of its own."""
    health: str = "/health"
    named: bool = True
    """Whether it can be given the service's name."""
    endless: bool = False
    """Whether a request can keep it from ending its answer."""


ENGINES = (
    Engine(
        "llama-server", "llama-server", "--llama-server", "llama-server", "gguf", "brew install llama.cpp", endless=True
    ),
    Engine(
        "mlx-server",
        "mlx-server",
        "--mlx-server",
        "mlx-server",
        "mlx",
        "github.com/defilantech/mlx-server",
        named=False,
    ),
    Engine("mlx_lm", "mlx-server", "--mlx-lm-server", "mlx_lm.server", "mlx", "pipx install mlx-lm"),
    Engine("omlx", "omlx", "--omlx", "omlx", "mlx", "brew install jundot/omlx/omlx", "omlx"),
    Engine("vllm-swift", "vllm-swift", "--vllm-swift", "vllm-swift", "mlx", "brew install TheTom/tap/vllm-swift"),
    Engine("ollama", "ollama", "--ollama", "ollama", "gguf", "brew install ollama", "ollama", "/api/version"),
)
SETTINGS = tuple(each.setting for each in ENGINES if each.setting != "--llama-server")


def check(engine: Engine) -> Callable[[Kit, Sheet], None]:
    """The check of one engine."""
    return lambda kit, sheet: conform(kit, sheet, engine)


def flags(engine: Engine, program: Path) -> list[str]:
    """Flags by which this engine is the only one; the user's own Ollama is never used."""
    found = ["--ollama-url", "off"]
    for setting in SETTINGS:
        found += [setting, str(program) if setting == engine.setting else NOWHERE]
    return found


def weights(kit: Kit, engine: Engine) -> Path:
    """What it serves. Raises Skip."""
    if engine.format == "gguf":
        return kit.model()
    if kit.options.mlx_model is not None:
        return kit.options.mlx_model
    path, script = kit.base / "mlx", found_on_path("mlx_lm.server")
    python = python_of(script) if script else ""
    if not python:
        raise Skip("no MLX model was named, and none can be made without mlx_lm; run it with --mlx-model DIRECTORY")
    if not path.exists():
        done = kit.run(python, str(ROOT / "tests/support/tiny_mlx.py"), str(path), "--endless", timeout_s=120)
        assert done.ok, f"no MLX model could be made: {done.err[-400:]}"
    return path


def conform(kit: Kit, sheet: Sheet, engine: Engine) -> None:
    """One engine, on a system of its own."""
    program = found_on_path(engine.program)
    if program is None:
        raise Skip(f"{engine.program} is not installed; {engine.install}")
    said = kit.run(str(program), "--version")
    sheet.show("version", said.out + said.err)
    source = weights(kit, engine)
    from tests.support.system import System

    llama = program if engine.program == "llama-server" else Path(NOWHERE)
    system = System(kit.scratch, *flags(engine, program), engine=llama)
    kit.cleanup("end the system", system.close)
    system.start()
    try:
        lifetime(system, sheet, engine, source)
    except AssertionError:
        show_logs(system.state, sheet)
        raise


def lifetime(system: System, sheet: Sheet, engine: Engine, source: Path) -> None:
    """From its start to its end."""
    from tests.support.system import model, service

    free_before = level()
    spec: dict[str, Any] = {"runtime": engine.runtime, "contextSize": 4096, "extraArgs": []}
    system.apply(model(MODEL, str(source), format=engine.format), service(NAME, MODEL, **spec))
    sheet.figure("from apply to ready", "s", until(lambda: ready(system), READY_S, f"Ready; {system.told(NAME)}"))
    sheet.show("what MetalReady said", system.told(NAME))
    sheet.claim(True, "it is Ready")
    answers(system, sheet, engine)
    server = server_of(system, engine)
    held = machine_memory.used_bytes(server)
    sheet.figure("footprint", "MiB", *([held.footprint_bytes / MIB] if held else []))
    os.kill(server, signal.SIGKILL)
    took = until(
        lambda: server_of(system, engine) not in (0, server) and serves(system, engine), READY_S, "it to be back"
    )
    sheet.figure("from kill -9 to ready", "s", took)
    status, _ = mac_chat.ask(system.port(NAME), model=listed(system)[0])
    sheet.claim(status == 200, "it answers again after kill -9")
    server = server_of(system, engine)
    system.apply(service(NAME, MODEL, replicas=0, **spec))
    sheet.figure("from replicas 0 to its end", "s", until(lambda: not alive(server), GONE_S, "its process to end"))
    sheet.claim(True, "it ends when no replica is wanted")
    if free_before is not None:
        sheet.figure("memorystatus_level before and after", "%", free_before, level() or 0)


def answers(system: System, sheet: Sheet, engine: Engine) -> None:
    """Health, the list of models, one answer and one stream."""
    port = system.port(NAME)
    sheet.claim(mac_chat.ask(port, engine.health)[0] == 200, f"{engine.health} answers")
    names = listed(system)
    sheet.show("names in /v1/models", names)
    if engine.named:
        sheet.claim(NAME in names, "its list of models has the service's name")
    asked = NAME if NAME in names else names[0]
    status, answer = mac_chat.ask(port, model=asked, max_tokens=16)
    text = content(answer)
    sheet.show("an answer", text or answer)
    sheet.claim(status == 200 and text, "a chat is answered")
    stream = mac_chat.Stream(port, TOKENS, asked, engine.endless)
    whole = stream.end(GONE_S)
    sheet.claim(whole and stream.arrivals_s, f"a stream ends whole: {stream.told()}")
    if stream.arrivals_s:
        sheet.figure("first token", "ms", 1e3 * (stream.arrivals_s[0] - stream.asked_at))
    if (rate := mac_parse.tokens_per_s(stream.arrivals_s)) is not None:
        sheet.figure("stream", "tokens/s", rate)


def listed(system: System) -> list[str]:
    """The names in an engine's list of models. Raises AssertionError."""
    status, found = mac_chat.ask(system.port(NAME), "/v1/models")
    rows = found.get("data") if isinstance(found, dict) else None
    names = [str(row.get("id")) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    assert status == 200 and names, f"/v1/models: {status} {found!r:.200}"
    return names


def content(answer: Any) -> str:
    """The words of an answer, "" without any."""
    try:
        return str(answer["choices"][0]["message"]["content"] or "")
    except (LookupError, TypeError):
        return ""


def ready(system: System) -> bool:
    return system.status(NAME).get("phase") == "Ready"


def serves(system: System, engine: Engine) -> bool:
    """True if it is healthy and Ready; its status alone may be from before it ended."""
    return mac_chat.ask(system.port(NAME), engine.health)[0] == 200 and ready(system)


def server_of(system: System, engine: Engine) -> int:
    """Pid of the process that serves, 0 without one."""
    return system.own_pid(engine.daemon) if engine.daemon else system.pid(NAME)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def level() -> int | None:
    """`kern.memorystatus_level`, None off a Mac."""
    mac = darwin_memory.mac()
    return mac.number("kern.memorystatus_level") if mac else None


def until(look: Callable[[], object], within_s: float, what: str) -> float:
    """Waits as the tests do; how many seconds that took. Raises AssertionError."""
    from tests.support import system

    began = time.monotonic()
    system.eventually(look, within_s, what)
    return time.monotonic() - began
