"""What the pages have one do with a cluster, done: on a real API server that has nothing of ours yet.

`metal-supervisor run` and `make run` do not end by themselves: they are ended once they serve, and have to end well.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.server import KubeCluster
from tests.support import ports
from tests.support.doc_commands import PAGES, ROOT, Block, blocks, run
from tests.support.system import engine_path, eventually, free_ports

HERE = "tests/cluster/test_docs_commands.py"
ADMINISTRATORS = [each for each in blocks(ROOT / "docs/kubernetes.md") if HERE in each.run_by]
TUTORIAL = [each for each in blocks(ROOT / "docs/tutorial.md") if HERE in each.run_by]
ALL = [*ADMINISTRATORS, *TUTORIAL, *(each for each in blocks(ROOT / "README.md") if HERE in each.run_by)]
RUNS = [each for each in ALL if " run " in str(each)]
CONTEXT = "my-cluster"
"""The README's."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`home`, whose kubeconfig is an administrator's, and `checkout`; a cluster is there."""
    found = tmp_path_factory.mktemp("docs")
    (found / "home" / ".kube").mkdir(parents=True)
    place = found / "checkout"
    place.mkdir()
    for name in ("conf", "tools", "metal_supervisor"):
        shutil.copytree(ROOT / name, place / name)
    for name in ("Makefile", "pyproject.toml", "requirements-dev.txt"):
        shutil.copy(ROOT / name, place / name)
    (place / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (place / ".venv" / name).symlink_to(ROOT / ".venv" / name)
    (place / ".venv" / ".installed").touch()  # newer than pyproject.toml: make installs nothing into it
    with KubeCluster(found / "cluster") as cluster:
        path = cluster.kubeconfig(found / "home" / ".kube" / "config")
        config = json.loads(path.read_text())
        config["current-context"] = config["contexts"][0]["name"] = CONTEXT
        path.write_text(json.dumps(config))
        yield found


_held: list[ports.Range] = []
"""Until this process ends."""


def environment(base: Path) -> dict[str, str]:
    (port,), held = free_ports(1), ports.Range()
    _held.append(held)
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(base / "home"),
        "LANG": "C.UTF-8",
        "METAL_SUPERVISOR_PORT": str(port),
        "METAL_SUPERVISOR_PORTS": f"{held.first}-{held.last}",
        "METAL_SUPERVISOR_LLAMA_SERVER": str(engine_path()),
    }


def test_an_administrator_connects_a_mac_and_it_serves(base: Path) -> None:
    place, environ = base / "checkout", environment(base)
    for ran in run([each for each in ADMINISTRATORS if each not in RUNS], place, environ):
        ran.check()
    for name in ("studio", "studio.token"):
        assert stat.S_IMODE((place / name).stat().st_mode) == 0o600, "which only you can read"
    (block,) = [each for each in RUNS if each.page.endswith("kubernetes.md")]
    assert "studio" in serves(block, place, environ)


def test_make_run_with_a_cluster_says_which(base: Path) -> None:
    (block,) = [each for each in RUNS if each.page == "README.md"]
    assert CONTEXT in serves(block, base / "checkout", environment(base))


def test_a_reader_of_the_tutorial_gets_as_far_as_there_are_no_pods(base: Path) -> None:
    place, environ = base / "checkout", environment(base)
    (block,) = [each for each in RUNS if each in TUTORIAL]
    serves(block, place, environ)
    for ran in run([each for each in TUTORIAL if each is not block], place, environ):
        ran.check()


def serves(block: Block, place: Path, environ: dict[str, str]) -> str:
    """What a command that runs until it is told to end prints, if it serves and ends in order."""
    (shown,) = block.shown
    process = subprocess.Popen(
        ["bash", "-c", f"exec {shown.command}"],
        cwd=place,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        eventually(lambda: healthy(int(environ["METAL_SUPERVISOR_PORT"])), 60, block.where)
    finally:
        os.killpg(process.pid, signal.SIGINT)  # what a terminal's Ctrl-C does
        said = process.communicate(timeout=60)[0]
    assert "nothing is left running" in said, said
    return said


def healthy(port: int) -> bool:
    """Whether it reaches its cluster."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/healthz")
        answer = json.load(connection.getresponse())
    finally:
        connection.close()
    return bool(answer == {"status": "ok"})


def test_no_block_of_a_cluster_is_left_out() -> None:
    mine = {each.where for page in PAGES for each in blocks(page) if HERE in each.run_by}
    assert mine == {each.where for each in ALL}
