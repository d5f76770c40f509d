"""A process that its parent left behind, as import-launchd and the budget find it."""

from __future__ import annotations

import os
import plistlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from metal_supervisor.cli import main
from metal_supervisor.controller.pressure_watch import Watchdog, budget_of
from metal_supervisor.host.left_engines import AGENTS_OWN
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.sizes import MIB


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


def test_import_launchd_names_it(tmp_path: Path, left: int, capsys: pytest.CaptureFixture[str]) -> None:
    job = {"Label": "com.llmkube.metal-agent", "ProgramArguments": ["/usr/local/bin/llmkube-metal-agent"]}
    (tmp_path / "agent.plist").write_bytes(plistlib.dumps(job))
    assert main.main(["import-launchd", str(tmp_path / "agent.plist")]) == 0
    assert f"port 52011 was left behind by the agent; end it with: kill {left}\n" in capsys.readouterr().err
