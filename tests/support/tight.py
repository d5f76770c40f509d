"""Systems with little memory to give: a budget of some tiny engines, and settings that change while they run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_gguf

from metal_supervisor.memory import machine_memory as memory
from metal_supervisor.settings.loader import FIELDS
from tests.support.engines import either, gone, is_gone
from tests.support.system import FAKE_FLAGS, ISVC, System, eventually, kill, running, service

MIB = 1 << 20
SMALL = 512
LARGE = 32768
"""Contexts in tokens; tiny engines of these are charged some 35 and 82 MiB."""
SPARSE = ("--threads", "1", "--cache-ram", "0")
"""Without a prompt cache, which would be most of what a tiny engine is charged."""


def lean(name: str, context: int = SMALL, *more: str, model: str = "tiny", **spec: Any) -> dict[str, Any]:
    """An InferenceService that takes as little as can be."""
    return service(name, model, contextSize=context, extraArgs=[*SPARSE, *more], **spec)


def share(budget_bytes: float) -> float:
    """The `memory_fraction` that makes exactly this budget on this machine."""
    return budget_bytes / memory.host_budget(None, None).total_bytes


def room_for(count: float, base: Path, context: int = LARGE) -> str:
    """The `--memory-fraction` with room for so many engines of the tiny model, which is made in `base`."""
    base.mkdir(exist_ok=True)
    tiny_gguf.write_tiny_gguf(base / "tiny.gguf", context=context)
    command = [sys.executable, "-I", "-m", "metal_supervisor", "fit", str(base / "tiny.gguf")]
    command += ["--ctx", str(context), "--json", "--state-dir", str(base / "none")]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return f"{share(count * json.loads(asked.stdout)['needBytes']):.9f}"


class Tight:
    """A running system whose settings are in a file, so that a new controller can have others."""

    def __init__(self, system: System, conf: Path, **usual: Any) -> None:
        self.system, self._conf, self._usual = system, conf, usual
        self._set = usual

    def configure(self, **settings: Any) -> None:
        """Gives a new controller these settings; whatever is not named is as usual."""
        wanted = {**self._usual, **settings}
        if wanted == self._set:
            return
        write(self._conf, wanted)
        self._set = wanted
        self.kill_controller()

    def kill_controller(self) -> None:
        """kill -9, and waits until the next one knows what the cluster asks for."""
        before = self.system.own_pid("controller")
        kill(before)
        eventually(lambda: is_gone(before), 30, "the old controller to be gone")
        killed_at = time.time()  # the sidecar is told of the first report at once, of one that says no more much later
        eventually(lambda: (told := self._told())[0] > killed_at and told[1], 30, "the next one's report")

    def _told(self) -> tuple[float, bool]:
        """(Unix time of the controller's latest report, whether it has read the cluster by then)."""
        said = json.loads(self.system.fetch("/status")[1])
        return said["controller"]["at"] or 0.0, bool(said["cluster"].get("synced"))

    def memory(self) -> dict[str, Any]:
        """What /status says of the machine's memory; LookupError before the first look at it."""
        told = json.loads(self.system.fetch("/status")[1])["memory"]
        if told is None:
            raise LookupError("memory")
        return dict(told)

    def charged(self, name: str) -> int:
        """The bytes that a service is charged."""
        return int(self.system.observe(name)["memory"]["reservedBytes"])

    def waits(self, name: str, reason: str, says: str = "", within_s: float = 20.0) -> str:
        """Waits until a service waits for that reason; returns what it says."""

        def found() -> str:
            seen = self.system.condition("MetalReady", name)
            matches = seen.get("reason") == reason and says in seen["message"]
            return str(seen["message"]) if matches else ""

        return eventually(found, within_s, f"{name} to wait: {reason} {says}; {self.system.said()[-2000:]}")

    def condition(self, name: str, kind: str, status: str, reason: str, within_s: float = 20.0) -> str:
        """Waits for a condition of a service; returns its message."""

        def found() -> str:
            seen = self.system.condition(kind, name)
            return str(seen["message"]) if (seen.get("status"), seen.get("reason")) == (status, reason) else ""

        return eventually(found, within_s, f"{name}: {kind} {status} {reason}; {self.system.said()[-2000:]}")

    def ready(self, *names: str) -> dict[str, int]:
        """Waits until services serve; their engines."""
        return {name: self.system.ready(name) for name in names}

    def level(self, wanted: str) -> None:
        """Waits until the machine is seen to be at this level of memory pressure."""
        eventually(lambda: self.memory()["pressure"] == wanted, 20, f"the level to be {wanted}")

    def evicted(self, name: str) -> str:
        """Waits until a service is stopped for want of memory; returns what its condition says."""
        return self.condition(name, "MemoryPressure", "True", "Evicted")

    def skips(self, reason: str) -> float:
        """Waits until no engine is evicted for this reason; how often this controller has found that."""
        name = f'llmkube_metal_agent_evictions_skipped_total{{reason="{reason}"}}'
        return eventually(lambda: self.metric(name), 20, f"nobody to be evicted: {reason}")

    def metric(self, name: str) -> float:
        """A value of /metrics, with its labels if it has any; LookupError while it is not there."""
        for line in self.system.fetch("/metrics")[1].splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        raise LookupError(name)

    def empty(self) -> None:
        """Deletes all services and waits until nothing of them is left, a record neither.

        A controller that finds records and no service waits for half a minute before it believes that.
        """
        gone(self.system, *[item["metadata"]["name"] for item in self.system.get(ISVC)["items"]])
        eventually(lambda: not self.system.files.records()[0], 20, "the records to be gone")


def write(conf: Path, settings: dict[str, Any]) -> None:
    """A file of settings, as a user would write it."""
    fresh = conf.with_suffix(".new")
    fresh.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()), "utf-8")
    os.replace(fresh, conf)


@contextlib.contextmanager
def tight(base: Path, **usual: Any) -> Iterator[Tight]:
    """A system with these settings, whose engines can be stand-ins and whose API takes orders to misbehave."""
    assert usual.keys() <= FIELDS.keys()
    conf = base / "settings.toml"
    write(conf, usual)
    opened = f"--allow-extra-args={','.join((*FAKE_FLAGS, '--mmproj-url'))}"
    with running(base, "--config", str(conf), opened, engine=either(base)) as up:
        up.take_orders()
        up.apply(up.tiny_model())
        yield Tight(up, conf, **usual)
