"""conf/prometheus/alerts.yaml, as promtool understands it: its own tests pass, and they can fail."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.prometheus import program
from tests.support.system import ROOT

CONF = ROOT / "conf" / "prometheus"


def promtool(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *arguments], cwd=directory, capture_output=True, text=True, timeout=60)


def test_the_tests_of_the_alerts_pass() -> None:
    assert promtool(CONF, "check", "rules", "alerts.yaml").returncode == 0
    done = promtool(CONF, "test", "rules", "alerts_test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alert_that_says_something_else_fails_them(tmp_path: Path) -> None:
    shutil.copytree(CONF, tmp_path, dirs_exist_ok=True)
    rules = tmp_path / "alerts.yaml"
    rules.write_text(rules.read_text().replace("> 60", "> 6000"))
    done = promtool(tmp_path, "test", "rules", "alerts_test.yaml")
    assert done.returncode and "MetalSupervisorLoopStalled" in done.stdout + done.stderr
