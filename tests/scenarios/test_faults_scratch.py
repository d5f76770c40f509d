"""An engine that leaves its scratch directory in a state that is hard to remove (case P87)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from metal_supervisor.state import trees
from tests.support.engines import gone, restarted
from tests.support.faults import Figure, fault
from tests.support.system import System, eventually, kill, running, service
from tests.support.trees import nest

DEPTH = 3000


@contextlib.contextmanager
def removed(base: Path) -> Iterator[None]:
    """Leaves no tree behind that pytest could not remove itself."""
    try:
        yield
    finally:
        for each in base.glob("run/*/*/d"):
            trees.remove(each)


def nested(system: System, name: str) -> Path:
    """An engine's scratch with directories as it may make them itself."""
    scratch = system.files.scratch_path(f"default.{name}")
    nest(scratch / "d", DEPTH)
    return scratch


@fault(
    "P87",
    f"an engine makes {DEPTH} nested directories in its scratch, is restarted, does it again, and is deleted",
    happens="the scratch is moved aside at once, and removed in the background",
    sees="nothing: the next engine begins in an empty directory, and the service is forgotten",
    bound="/healthz stays 200, and nothing of it is left within 30 s",
)
def test_a_deep_scratch_neither_fails_a_pass_nor_lasts(tmp_path: Path, figure: Figure) -> None:
    with running(tmp_path) as system, removed(tmp_path):
        system.apply(system.tiny_model(), service("deep", "tiny"))
        before = system.ready("deep")
        scratch = nested(system, "deep")
        kill(before)
        restarted(system, "deep", before)
        eventually(lambda: not (scratch / "d").exists(), 20, "an empty scratch")
        eventually(lambda: system.observe("deep")["ready"], 30, "the next engine")
        nested(system, "deep")
        with figure.timed("deleted and forgotten"):
            gone(system, "deep")
            eventually(lambda: not system.files.records()[0] and not scratch.exists(), 30, "a record that is forgotten")
        assert system.health()[0] == 200
        with figure.timed("removed"):
            eventually(lambda: not list((system.state / "trash").iterdir()), 30, "an empty trash")
        assert "pass failed" not in system.files.log_path("controller").read_text()
