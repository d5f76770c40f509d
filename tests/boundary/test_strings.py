"""What a user writes reaches the engine byte for byte through a real supervisord, and never its configuration."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_supervisord import Daemon

from metal_supervisor import launch
from metal_supervisor.spec.types import Engine, Probe
from metal_supervisor.state import programs
from metal_supervisor.supervisord.client import Unavailable
from tests.support.faults import Figure, fault
from tests.support.system import eventually, free_ports

SETS = 400
SETS_A_PROGRAM = 16
MARK = "Zq7"
"""Stands in every set and nowhere else on this machine."""
REPORTER = """
import json, os, sys, time
told = {
    "pid": os.getpid(), "argv": [os.fsencode(each).hex() for each in sys.argv[2:]],
    "env": {name.hex(): value.hex() for name, value in os.environb.items()},
}
with open(sys.argv[1] + ".tmp", "w") as file:
    json.dump(told, file)
os.replace(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""
NASTY = (
    "x\n[program:evil]\ncommand=touch /tmp/pwned",
    'x\'\nenvironment=LD_PRELOAD="/tmp/evil.so"\nstopsignal=KILL',
    'x",LD_PRELOAD="/tmp/evil.so',
    "be nice ;) please",
    "%s",
    "%(ENV_HOME)s",
    "%(here)s",
    "%%(here)s",
    "100%",
    " ;",
    "\t#",
    "; comment",
    "# comment",
    "\r\n",
    "\n\n",
    "\n x",
    "'",
    '"',
    "\"'\"'",
    "\\",
    "\\\n",
    "",
    " ",
    "*",
    "-",
    "--",
    "[include]\nfiles=/tmp/*",
    "\x0b\x0c\x1c\x85\u00a0\u2028\ufeff",
    "\x01\x1b[2J\x7f",
    "é",
    "e\u0301",
    "=",
    "A=B",
    "$HOME `id` $(id)",
    "🦙",
    "a" * 5000,
    "\U0010ffff",
    "\ufffe\uffff",
)
PIECES = st.sampled_from([*" \t\n\r;#%'\"\\=,:()[]{}$`&|<>*?!~", "%%", "%s", "%(here)s", " ;", "\n[x]\n", "\n#"])
TEXT = st.sampled_from(NASTY) | st.lists(
    PIECES | st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12
).map("".join)
NAME = st.text(st.characters(min_codepoint=33, max_codepoint=0x17F, exclude_characters="="), min_size=1, max_size=8)


def corpus() -> list[tuple[list[str], dict[str, str]]]:
    """(argv, environment) of each set, the same in every run."""
    found: list[tuple[list[str], dict[str, str]]] = [([text], {"NASTY": text}) for text in NASTY]

    @settings(max_examples=SETS, database=None, derandomize=True)
    @given(st.lists(TEXT, min_size=2, max_size=6, unique=True), st.dictionaries(NAME, TEXT, max_size=4))
    def collect(argv: list[str], env: dict[str, str]) -> None:
        if (argv, env) not in found:
            found.append((argv, env))

    collect()
    return found


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    daemon = Daemon()
    home = daemon.path / "home"
    for name in ("current", "specs", "runs", "log"):
        (home / name).mkdir(parents=True)
    (home / "current" / "python").symlink_to(sys.executable)
    (home / "current" / "launch.py").symlink_to(launch.__file__)
    try:
        yield daemon
    finally:
        with contextlib.suppress(Unavailable):  # all at once: supervisord alone would end one after another
            daemon.rpc.call("supervisor.stopAllProcesses", False)
        daemon.rpc.close()
        daemon.end()
        shutil.rmtree(daemon.path)


def shape(text: str) -> str:
    """A section without its number and its digests."""
    return re.sub(r"\bm\d+\b", "m0", re.sub(r"\b[0-9a-f]{12}\b", "0", text))


def report(path: Path) -> dict[str, Any] | None:
    return dict(json.loads(path.read_text())) if path.exists() else None


@fault(
    "G130",
    "arguments and variables hold what supervisord's parser would act on: sections, %, ;, #, quotes, newlines",
    happens="the engine gets them byte for byte through a real supervisord",
    sees="nothing",
    bound="0 of them in an ini; no other section, no other process",
)
def test_every_string_arrives_byte_for_byte_and_none_of_it_stands_in_the_ini(daemon: Daemon, figure: Figure) -> None:
    sets, home = corpus(), str(daemon.path.resolve() / "home")
    assert len(sets) >= 300
    expected: dict[str, tuple[list[str], dict[str, str], Path]] = {}
    ports = free_ports(-(-len(sets) // SETS_A_PROGRAM))
    for at, port in enumerate(ports):
        program, told = f"default.m{at}", Path(home) / f"told.{at}"
        argv, env = [], {}
        for number, (words, variables) in enumerate(sets[at * SETS_A_PROGRAM : (at + 1) * SETS_A_PROGRAM]):
            argv += [f"{MARK}{number}", *words]
            env |= {f"{MARK}{number}{name}": value for name, value in variables.items()}
        command = (sys.executable, "-I", "-S", "-c", REPORTER, str(told), *argv)
        engine = Engine(command, tuple(env.items()), home, Probe())
        made = programs.compose(program, engine, port, "127.0.0.1", home)
        (Path(home) / "specs" / f"{program}.json").write_text(made.spec, "utf-8")
        daemon.write(program, programs.section(program, home, True))
        expected[program] = argv, env, told

    daemon.start()
    assert set(daemon.rpc.table()) == set(expected), "a string has become a section"
    for program, (argv, env, path) in expected.items():
        told = eventually(lambda path=path: report(path), 60, f"{program} to tell")
        assert [bytes.fromhex(each) for each in told["argv"]] == [each.encode() for each in argv]
        got = {bytes.fromhex(name): bytes.fromhex(value) for name, value in told["env"].items()}
        own = {name: value for name, value in got.items() if name.startswith(MARK.encode())}
        assert own == {name.encode(): value.encode() for name, value in env.items()}
        assert {os.fsdecode(name) for name in got.keys() - own.keys()} <= {
            launch.MARK,
            *launch.INHERITED,
            *(name for name in os.environ if name.startswith("LC_")),
        }
        assert told["pid"] == daemon.rpc.table()[program].pid

    strings = {text for argv, env in sets for text in (*argv, *env, *env.values())}
    plain = programs.section("default.m0", home, True)
    for path in daemon.files.iterdir():
        text = path.read_text("utf-8")
        assert MARK not in text
        assert shape(text) == shape(plain)
    assert len({text for text in strings if text and text not in plain}) >= 300
    figure.add("strings", len(strings), "")
    figure.add("of them in an ini", 0, "")
