"""The commands of the documentation, page by page, as a reader would type them, beside a system that runs.

The reader's directory has what a checkout has, `.run` is the state directory, and the home directory's
`.metal-supervisor` is the same. Only ports are others: 9090 and 18100 may be somebody's.
"""

from __future__ import annotations

import os
import plistlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.doc_commands import PAGES, ROOT, blocks, run
from tests.system import System, eventually, running, service

HERE = [page for page in PAGES if any(block.here for block in blocks(page))]
CHECKOUT = (".venv", "Makefile", "conf", "docs", "launchd", "metal_supervisor", "pyproject.toml", "tests", "tools")
GO_AGENT = "com.llmkube.metal-agent"


def reader(system: System, base: Path) -> Path:
    """A directory that is like a checkout in which `make run` runs; `home` beside it is the reader's."""
    place, agents = base / "reader", base / "home" / "Library" / "LaunchAgents"
    place.mkdir()
    agents.mkdir(parents=True)
    for name in CHECKOUT:
        (place / name).symlink_to(ROOT / name)
    (place / ".run").symlink_to(system.state)
    (base / "home" / ".metal-supervisor").symlink_to(system.state)
    (base / "home" / ".curlrc").write_text("silent\nshow-error\n")  # no meter, as in a terminal
    job = {"Label": GO_AGENT, "ProgramArguments": ["/usr/local/bin/llmkube-metal-agent", "--namespace", "default"]}
    (agents / f"{GO_AGENT}.plist").write_bytes(plistlib.dumps(job))
    return place


def shape(lines: Sequence[str]) -> list[list[str]]:
    """What of an output is the same every time: the heads of tables, what each row is of, and JSON."""
    found = []
    for line in filter(str.strip, lines):
        whole = re.fullmatch(r"[A-Z][A-Z0-9()/ -]*|\{.*\}", line.strip())
        row = re.sub(r"-[a-z0-9-]+-[0-9a-f]{8}$", "", line.split()[0])  # a slice's name has this machine's
        found.append(line.split() if whole else [row])
    return found


def test_shapes_differ_where_a_reader_would_see_it() -> None:
    told = ["NAME   PHASE", "tiny-vm-34e37c21   Ready", '{"status":"ok"}']
    assert shape(told) == shape(["NAME  PHASE", "", "tiny-other-mac-01234567  Creating", '{"status":"ok"}'])
    for other in (["NAME   AGE", *told[1:]], [told[0], "large   Ready", told[2]], [*told[:2], '{"status":"bad"}']):
        assert shape(told) != shape(other)


@pytest.mark.parametrize("page", HERE, ids=lambda page: page.stem)
def test_every_command_of_a_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    environ = {"PATH": path, "HOME": str(tmp_path / "home"), "LANG": "C.UTF-8"}
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), service())
        system.ready()
        eventually(lambda: system.supervisorctl("status").count("RUNNING") >= 4, what="all programs RUNNING")
        place, port = reader(system, tmp_path), system.port()

        def typed(command: str) -> str:
            ours = command.replace("localhost:9090", f"localhost:{system.http}")
            return ours.replace("127.0.0.1:18100", f"127.0.0.1:{port}")

        for ran in run([each for each in blocks(page) if each.here], place, environ, typed):
            ran.check()
            if ran.shown.output:
                assert shape(ran.said.splitlines()) == shape(ran.shown.output), f"{ran.block.where}:\n{ran.said}"
