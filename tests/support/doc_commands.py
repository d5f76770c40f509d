"""The commands that the documentation shows: who runs which, so that none of them is only believed.

A fenced block says what it is by its info string: `sh` (every line is a command), `console` (a transcript, whose lines
that begin with `$ ` are commands), or something that is no command (`text`, `yaml`, …). Comments right before a block
of commands say what a test cannot have, or which test has it:

    <!-- needs: mac -->        or cluster, pods (a cluster whose nodes run some), network
    <!-- run by: tests/… -->   the file that runs these commands; several lines name several
    <!-- exits: 1 -->          how the last command of the block ends, where that is not 0

A block without `needs` and `run by` is run by tests/scenarios/test_docs_commands.py.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
COMMANDS = frozenset({"sh", "console"})
OTHER = frozenset({"text", "yaml", "json", "toml", "python"})
"""A block of Python is run by the test of its page."""
NEEDS = frozenset({"mac", "cluster", "pods", "network"})
VALUED = frozenset({"-n", "-c", "-m", "--kubeconfig", "--context", "--namespace"})
"""Flags before a verb that have a value."""

READS = 'blocks(ROOT / "'
"""How a test that takes a page's blocks from the page itself does so: it needs to name no command."""

_MARK = re.compile(r"<!-- (needs|run by|exits): (\S+) -->")
_SEPARATORS = frozenset({"|", "&&", "||", ";"})


@dataclass(frozen=True)
class Shown:
    """One command, and what the page says that it prints."""

    command: str
    output: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    """Relative to the repository."""
    line: int
    """Of its fence, from 1."""
    kind: str
    """Its info string."""
    shown: tuple[Shown, ...]
    """Its commands, none if it is no block of commands."""
    needs: frozenset[str]
    run_by: tuple[str, ...]
    exits: int

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def here(self) -> bool:
        """Whether it is run by the scenario of the documentation."""
        return bool(self.shown) and not self.needs and not self.run_by


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page, in order. Raises ValueError for one that has no end."""
    lines, found, marks, at = path.read_text("utf-8").splitlines(), [], [], 0
    while at < len(lines):
        mark = _MARK.fullmatch(lines[at].strip())
        if mark:
            marks.append((mark[1], mark[2]))
        elif lines[at].lstrip().startswith("```"):
            end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == "```"), None)
            if end is None:
                raise ValueError(f"{path.name}:{at + 1}: a block without an end")
            found.append(_block(path, at + 1, lines[at].strip()[3:], lines[at + 1 : end], marks))
            at, marks = end, []
        else:
            marks = []
        at += 1
    return found


def _block(path: Path, line: int, kind: str, inside: list[str], marks: list[tuple[str, str]]) -> Block:
    shown = _lines(inside) if kind == "sh" else _transcript(inside) if kind == "console" else ()
    return Block(
        str(path.relative_to(ROOT)),
        line,
        kind,
        shown,
        frozenset(value for name, value in marks if name == "needs"),
        tuple(value for name, value in marks if name == "run by"),
        next((int(value) for name, value in marks if name == "exits"), 0),
    )


def _lines(inside: list[str]) -> tuple[Shown, ...]:
    """Every line is a command; one that ends with a backslash goes on."""
    whole = "\n".join(inside).replace("\\\n", " ")
    return tuple(Shown(line.strip()) for line in whole.splitlines() if line.strip() and not line.startswith("#"))


def _transcript(inside: list[str]) -> tuple[Shown, ...]:
    found: list[Shown] = []
    for line in inside:
        if line.startswith("$ "):
            found.append(Shown(line[2:].strip()))
        elif found and line.strip():
            found[-1] = Shown(found[-1].command, (*found[-1].output, line))
    return tuple(found)


def verbs(command: str) -> tuple[str, ...]:
    """What each part of a command line does: `apply` of `kubectl -n llm apply -f x`, or a program without arguments."""
    parts: list[list[str]] = [[]]
    for word in shlex.split(command, comments=True):
        if word in _SEPARATORS:
            parts.append([])
        else:
            parts[-1].append(word)
    return tuple(_verb(part) for part in parts if part)


def _verb(words: list[str]) -> str:
    program, *rest = (word for word in words if "=" not in word.partition("/")[0] and word != "sudo")
    while rest and rest[0].startswith("-"):
        rest = rest[2:] if rest[0] in VALUED else rest[1:]
    plain = rest and re.fullmatch(r"[a-z][a-z0-9-]*", rest[0])
    return rest[0] if plain else Path(rest[0]).name if program.endswith("python") and rest else Path(program).name


@dataclass(frozen=True)
class Ran:
    """What came of one command."""

    block: Block
    shown: Shown
    code: int
    said: str
    """Both its streams."""

    def check(self) -> None:
        """Fails unless it ended as its page says."""
        wanted = self.block.exits if self.shown is self.block.shown[-1] else 0
        assert self.code == wanted, f"{self.block.where}: {self.shown.command}\nended with {self.code}:\n{self.said}"


def run(found: list[Block], place: Path, environ: Mapping[str, str], typed: Callable[[str], str] = str) -> list[Ran]:
    """Runs every command of some blocks in one shell, as a reader's would be; `typed` is what is really typed."""
    orders = [(block, each) for block in found for each in block.shown]
    mark = "=== ended with"
    script = "".join(f"{typed(each.command)}\nended=$?; echo; echo {mark} $ended\n" for _, each in orders)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=place,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    parts = re.split(rf"\n{mark} (\d+)\n", done.stdout)
    assert len(parts) == 2 * len(orders) + 1, f"the shell ended early: {done.stdout}"
    return [Ran(*order, int(parts[2 * n + 1]), parts[2 * n]) for n, order in enumerate(orders)]
