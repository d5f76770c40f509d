"""The commands of the documentation, page by page, as a reader would type them, beside a system that runs.

The reader's directory has what a checkout has, `.run` is the state directory, and the home directory's
`.metal-supervisor` is the same; its `supervisorctl` is the one that `install` puts on the PATH, which needs no `-c`.
Only ports are others: 9090 and 18100 may be somebody's.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.doc_commands import PAGES, ROOT, Block, Shown, blocks, run
from tests.support.gateway import with_gateway
from tests.support.system import System, eventually, service

HERE = [page for page in PAGES if any(block.here for block in blocks(page))]
CHECKOUT = (
    ".venv",
    "Makefile",
    "conf",
    "docs",
    "launchd",
    "metal_supervisor",
    "pyproject.toml",
    "requirements-dev.txt",
    "requirements.txt",
    "tests",
    "tools",
)
HERE_TOO = "tests/scenarios/test_docs_commands.py"
CURL = "silent\nshow-error\nfail-with-body\n"
"""A reader's .curlrc: no meter, as in a terminal, and what is answered with an error has failed, which curl hides."""


def reader(system: System, base: Path) -> Path:
    """A directory that is like a checkout in which `make run` runs; `home` beside it is the reader's."""
    (system.state / "metal-supervisor.toml").write_text("# as install makes one\n")
    place = base / "reader"
    place.mkdir()
    (base / "home").mkdir()
    for name in CHECKOUT:
        (place / name).symlink_to(ROOT / name)
    (place / ".run").symlink_to(system.state)
    (base / "home" / ".metal-supervisor").symlink_to(system.state)
    (base / "home" / ".curlrc").write_text(CURL)
    return place


def environment(system: System) -> dict[str, str]:
    """A reader's shell."""
    path = f"{system.state / 'current'}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(system.base / "home"), "LANG": "C.UTF-8"}


def serve(system: System) -> None:
    """The example of `make run`, up, and all programs beside it."""
    system.apply(system.tiny_model(), service())
    system.ready()
    eventually(lambda: system.supervisorctl("status").count("RUNNING") >= 4, what="all programs RUNNING")


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


def test_a_command_that_is_answered_with_an_error_fails(tmp_path: Path) -> None:
    (tmp_path / ".curlrc").write_text(CURL)
    (tmp_path / "there").write_text("ok\n")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = [Shown(f"curl http://127.0.0.1:{server.server_port}/{path}") for path in ("there", "absent")]
        found = [Block("page", 1, "sh", (each,), frozenset(), (), 0) for each in shown]
        there, absent = run(found, tmp_path, {"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
        server.shutdown()
    there.check()
    with pytest.raises(AssertionError, match="ended with 22"):
        absent.check()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The system of a reader who tries one page after another, with a gateway as `make run` has one."""
    with with_gateway(tmp_path_factory.mktemp("docs")) as up:
        reader(up.system, up.system.base)
        yield up.system


@pytest.mark.parametrize("page", HERE, ids=lambda page: page.stem)
def test_every_command_of_a_page_does_what_it_says(page: Path, system: System) -> None:
    serve(system)
    port = system.port()

    def typed(command: str) -> str:
        ours = command.replace("localhost:9090", f"localhost:{system.http}")
        return ours.replace("127.0.0.1:18100", f"127.0.0.1:{port}")

    for ran in run([each for each in blocks(page) if each.here], system.base / "reader", environment(system), typed):
        ran.check()
        if ran.shown.output:
            assert shape(ran.said.splitlines()) == shape(ran.shown.output), f"{ran.block.where}:\n{ran.said}"


def test_a_backup_brings_a_lost_state_directory_back(system: System) -> None:
    """As docs/operations.md has it: what was copied there is all that is needed. The last, as all else is lost."""
    page = blocks(ROOT / "docs/operations.md")
    keep = [each for each in page if each.here and any("~/backup" in shown.command for shown in each.shown)]
    back = [each for each in page if HERE_TOO in each.run_by]
    assert len(keep) == len(back) == 1
    serve(system)
    place, link, environ = system.base / "reader", system.base / "home" / ".metal-supervisor", environment(system)
    shutil.rmtree(system.base / "home" / "backup", ignore_errors=True)  # the page's own test has made one
    for ran in run(keep, place, environ):
        ran.check()
    system.stop()
    shutil.rmtree(system.state)
    link.unlink()
    for ran in run(back, place, environ):
        ran.check()
    link.rename(system.state)
    system.forget()
    system.start()
    # What is Ready in the file is so of old: this one has to come up.
    eventually(lambda: system.observe().get("ready"), 30, "the engine to serve")
    assert "hello world" in system.chat()
