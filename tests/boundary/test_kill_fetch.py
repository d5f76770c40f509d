"""kill -9 in the middle of a download, again and again: it goes on at the byte where it was, and ends whole."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from uneven_server import File, Uneven, serving

from metal_supervisor.models.model_directory import ModelDirectory
from metal_supervisor.spec.sources import Artifact
from tests.support.effort import cases
from tests.support.system import eventually

SIZE_BYTES = cases(200, 2) << 20
KILLS = 20
DRIVER = Path(__file__).with_name("fetching_process.py")
WITHIN_S = 20.0


@pytest.fixture(scope="module")
def web() -> Iterator[Uneven]:
    block = random.Random(1).randbytes(1 << 20)
    with serving() as server:
        data = b"".join(number.to_bytes(4, "big") + block[4:] for number in range(SIZE_BYTES >> 20))
        server.files["/m.gguf"] = File(b"GGUF" + data[4:])
        yield server


def test_a_download_that_is_killed_twenty_times_ends_whole_and_costs_nothing_twice(web: Uneven, tmp_path: Path) -> None:
    """Each body stalls at a random byte. Every second time the process is killed while it still reads what came; else
    when nothing more comes, and then every byte of it must be on the disk."""
    file, artifact, store = web.files["/m.gguf"], Artifact(f"{web.url}/m.gguf"), tmp_path / "store"
    part = store / artifact.slot / "m.gguf.partial"
    chance, kept = random.Random(7), [0]
    for number in range(KILLS):
        file.stalls_at = min(SIZE_BYTES - 1, kept[-1] + chance.randrange(1, 2 * SIZE_BYTES // KILLS))
        web.stalled.clear()
        process = subprocess.Popen([sys.executable, str(DRIVER), str(store), artifact.source])
        try:
            assert web.stalled.wait(WITHIN_S)
            if number % 2:
                eventually(lambda: part.stat().st_size == file.stalls_at, WITHIN_S, "all that came to be written")
        finally:
            process.kill()
            process.wait(WITHIN_S)
        kept.append(part.stat().st_size)
        assert not part.with_name("m.gguf").exists() and ModelDirectory(store, artifact.slot).model_path() is None
        # Which ends the answer that nobody reads any more.
        web.hold.set()
        web.hold.clear()
    file.stalls_at = -1
    done = subprocess.run([sys.executable, str(DRIVER), str(store), artifact.source], capture_output=True, timeout=60)
    path = Path(done.stdout.decode().strip())
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(file.data).digest()
    assert [start or 0 for start in web.starts()] == kept  # exactly what was on the disk
    assert [each.name for each in store.rglob("*.partial*")] == []
