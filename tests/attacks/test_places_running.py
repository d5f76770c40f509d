"""The running system: Models that name what is not theirs, and where an engine finds itself."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from metal_supervisor.state.programs import scratch_name
from tests.support.engines import gone
from tests.support.system import System, eventually, model, running, service

SLOT = "0123456789abcdef"
REFUSED = ("SourceNotAllowed", "ModelFileMissing")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("places")) as up:  # which has `--allowed-roots /`: nothing else stops them
        yield up


def forbidden(system: System) -> list[Path]:
    """Files that are valid models, so that nothing but their place can be what stops them."""
    content = system.tiny.read_bytes()
    paths = [system.state / "cluster" / "token", system.state / "models" / SLOT / "model.gguf"]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return paths


def spellings(system: System, path: Path) -> list[str]:
    link = system.base / f"innocent-{path.name}"
    link.symlink_to(path)
    quoted = urllib.parse.quote(str(path))
    return [
        str(path),
        f"file://{quoted}",
        f"/{path}",
        f"/proc/self/root{path}",
        str(link),
        f"file:///{quoted[1:]}?x",
        f"{system.base}/run/../run/{path.relative_to(system.state)}",
        f"file:///{quoted[1:].replace('/', '%2f')}",
        f"file://{system.base}/%2e%2e/{system.base.name}/run/{path.relative_to(system.state)}",
    ]


def test_no_engine_starts_on_a_forbidden_file(system: System) -> None:
    paths = forbidden(system)
    written = [each for path in paths for each in spellings(system, path)]
    names = [f"evil-{number}" for number in range(len(written))]
    for name, source in zip(names, written, strict=True):
        system.apply(model(name, source), service(name, name))
    for name, source in zip(names, written, strict=True):
        reason = lambda name=name: system.condition("MetalReady", name).get("reason") in REFUSED  # noqa: E731
        eventually(reason, 60, f"a verdict on {source}")
        assert system.pid(name) == 0
    programs = [part for each in system.processes() for part in each.cmdline()]
    assert not any(str(path) in part or path.name == Path(part).name for part in programs for path in paths)
    gone(system, *names)


def test_an_engine_has_an_empty_directory_of_its_own(system: System) -> None:
    system.apply(system.tiny_model(), service())
    engine = psutil.Process(system.ready())
    own = f"{system.files.home}/scratch/{scratch_name('default.tiny', system.files.home)}"
    environ = engine.environ()
    assert (environ["HOME"], environ["TMPDIR"]) == (own, own)
    there = Path(engine.cwd())
    assert there == system.files.scratch_path("default.tiny") and there.stat().st_mode & 0o777 == 0o700
    assert list(there.iterdir()) == [], "what an engine names by a relative path is not the state directory's"
    (there / "left").write_text("x")
    engine.kill()
    eventually(lambda: system.pid() not in (0, engine.pid), 30, "its next start")
    eventually(lambda: not (there / "left").exists(), 30, "a fresh directory")
    system.ready()
    gone(system, "tiny")
    eventually(lambda: not there.exists(), 30, "its directory to be gone")
