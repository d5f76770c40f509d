"""An engine of the same user exchanges what root is about to install: root gets what was decided, or nothing."""

from __future__ import annotations

import os
import plistlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from metal_supervisor.host.commands import Done
from metal_supervisor.install import plan
from metal_supervisor.install.steps import Machine
from tests.support.launchd import Mac, no_pause

EVIL = plistlib.dumps({"Label": "dev.metal-supervisor", "ProgramArguments": ["/bin/sh", "-c", "id > /tmp/owned"]})
"""A job without a UserName, which launchd would run as root."""


class Raced(Mac):
    """A Mac on which the user's files are overwritten right before each command of root's."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.home, self.replaced = home, 0

    def __call__(self, argv: Sequence[str], timeout_s: float, *content: bytes) -> Done:
        for path in [each for each in self.home.rglob("*") if each.is_file()]:
            path.write_bytes(EVIL)
            self.replaced += 1
        return super().__call__(argv, timeout_s, *content)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try what root is kept from")
@pytest.mark.parametrize("uid", [501, 0])
def test_root_does_not_run_what_an_engine_of_the_user_can_write(tmp_path: Path, uid: int) -> None:
    home = tmp_path / "it's home"
    machine = Machine(tmp_path / "root", home, "anna", "staff", uid, Mac(), no_pause)
    order = plan.InstallOrder(None, True, {"state_dir": str(home / "state")}, None, False, False)
    script = tmp_path / "metal-supervisor"
    (text,) = [
        step.content
        for step in plan.plan(order, machine).steps
        if isinstance(step.content, bytes) and step.path.name == script.name
    ]
    script.write_bytes(text)
    program = home / "state" / "current" / script.name
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "it ran: $*"\n')
    for path in (program, script):
        path.chmod(0o755)
    done = subprocess.run([script, "status"], capture_output=True, text=True, timeout=30)
    expected = (1, "", "run this as user 501, not as root\n") if uid else (0, "it ran: status\n", "")
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_a_file_exchanged_before_root_installs_it_is_not_what_root_gets(tmp_path: Path) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    root.mkdir()
    mac = Raced(home)
    machine = Machine(root, home, "anna", "staff", 501, mac, no_pause)
    order = plan.InstallOrder(None, True, {"state_dir": str(home / "state")}, None, False, False)
    found = plan.plan(order, machine)
    for step in found.steps:
        step.do(machine)
    roots = [step for step in found.steps if step.path.is_relative_to(root)]
    assert mac.replaced == 3, "the attack was made, before each command"
    assert len(roots) == 3 and found.places.plist in [step.path for step in roots]
    for step in roots:
        assert step.path.read_bytes() == step.content, f"{step.path} holds what an engine wrote"
        assert step.path.stat().st_mode & 0o777 == step.mode
    assert plistlib.loads(found.places.plist.read_bytes())["UserName"] == "anna"
