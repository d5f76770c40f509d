"""A process that its parent left behind, as import-launchd and the budget find it."""

from __future__ import annotations

import os
import plistlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from metal_supervisor.cli import main
from metal_supervisor.controller.pressure_watch import LEFT_EVERY_S, Watchdog, budget_of
from metal_supervisor.host import darwin_memory, processes
from metal_supervisor.host.darwin_memory import Mac
from metal_supervisor.host.left_engines import AGENTS_OWN, Process
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.sizes import GIB, MIB
from tests.boundary.mac_memory import M4_MAX, FakeLibc
from tests.boundary.test_watchdog import look_again


@pytest.fixture
def left(tmp_path: Path) -> Iterator[int]:
    """The pid of what the agent's llama-server would be, after the agent was killed."""
    script = tmp_path / "llama-server"
    script.write_text(f"#!{sys.executable}\nprint('up', flush=True)\nimport time\ntime.sleep(600)\n")
    script.chmod(0o755)
    flags = ["--model", "/m.gguf", "--host", "0.0.0.0", "--port", "52011"]
    line = ["sh", "-c", '"$@" & echo $!', "agent", str(script), *flags]
    environ = {**os.environ, AGENTS_OWN[0]: AGENTS_OWN[1]}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environ) as agent:
        assert agent.stdout is not None
        said = {agent.stdout.readline().strip(), agent.stdout.readline().strip()}
        agent.wait(20)
    pid = int((said - {"up"}).pop())
    try:
        if psutil.Process(pid).ppid() != 1:
            pytest.skip("a subreaper takes over what is left behind here")
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def test_models_may_not_have_what_it_holds(left: int) -> None:
    budget = budget_of(Settings())
    assert "less 256 MiB of engines that LLMKube's agent left behind" in budget.reason
    rest = {reason: size for reason, size in budget.limits.items() if "left behind" not in reason}
    assert budget.bytes == min(rest.values()) - 256 * MIB == Watchdog(Settings(), lambda: None).budget.bytes


@pytest.mark.parametrize(("shards", "held_gib"), [(1, 40), (2, 80)])
def test_on_a_mac_its_model_counts_beside_its_footprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, held_gib: int
) -> None:
    """Of a mapped model the system tells nothing: neither the footprint nor the resident size has it."""
    names = [f"big-{number:05d}-of-{shards:05d}.gguf" for number in range(1, shards + 1)]
    for name in names:
        with (tmp_path / name).open("wb") as file:
            file.truncate(40 * GIB - 3 * GIB // shards)
    argv = ["llama-server", "--model", str(tmp_path / names[0]), "--host", "0.0.0.0", "--port", "52011"]
    engine = Process(os.getpid(), argv, {AGENTS_OWN[0]: AGENTS_OWN[1]}, GIB)
    monkeypatch.setattr(processes, "abandoned", lambda: [engine])
    monkeypatch.setattr(processes, "descendants", lambda _: [])
    mac = Mac(FakeLibc(M4_MAX, {os.getpid(): (3 * GIB, GIB)}))
    monkeypatch.setattr(darwin_memory, "mac", lambda: mac)
    assert f"less {held_gib}.0 GiB of engines that LLMKube's agent left behind" in budget_of(Settings()).reason


def test_all_processes_are_looked_at_seldom_unless_an_engine_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["llama-server", "--model", "/m.gguf", "--host", "0.0.0.0", "--port", "52011"]
    engine = Process(os.getpid(), argv, {AGENTS_OWN[0]: AGENTS_OWN[1]}, GIB)
    found, looks = [engine], []

    def abandoned() -> list[Process]:
        looks.append(time.monotonic())
        return list(found)

    monkeypatch.setattr(processes, "abandoned", abandoned)
    watchdog = Watchdog(Settings(), lambda: None)
    for _ in range(3):
        look_again(watchdog)
    assert len(looks) == 4 and "left behind" in watchdog.budget.reason
    found.clear()
    for _ in range(3):
        look_again(watchdog)
    assert len(looks) == 5 and "left behind" not in watchdog.budget.reason
    found.append(engine)
    watchdog._left_at -= LEFT_EVERY_S
    look_again(watchdog)
    assert "left behind" in watchdog.budget.reason


def test_import_launchd_names_it(tmp_path: Path, left: int, capsys: pytest.CaptureFixture[str]) -> None:
    job = {"Label": "com.llmkube.metal-agent", "ProgramArguments": ["/usr/local/bin/llmkube-metal-agent"]}
    (tmp_path / "agent.plist").write_bytes(plistlib.dumps(job))
    assert main.main(["import-launchd", str(tmp_path / "agent.plist")]) == 0
    assert f"port 52011 was left behind by the agent; end it with: kill {left}\n" in capsys.readouterr().err
