"""Writes docs/logs.md: how the lines of our programs are made, and every line there is, read from the source.

    python tools/logs_page.py

A message has to be a constant and a field a name of its own, or nobody could search for one line in a year of logs;
what is neither is a Broken. The source is parsed, never run, so a line that is hardly ever written is in the page too.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from metal_supervisor.controller import plan  # noqa: E402
from metal_supervisor.placement import leases  # noqa: E402
from metal_supervisor.settings import logging  # noqa: E402

PAGE = ROOT / "docs" / "logs.md"
SOURCE = ROOT / "metal_supervisor"
LEVEL_OF = {**{level: level for level in logging.LEVELS}, "exception": "error", "critical": "critical", "log": "any"}
BESIDE = frozenset({"extra", "exc_info"})
ANY_PROGRAM = "the program's"
VERBS = {
    plan.Action.ADD: "its program is new to supervisord, which starts it",
    plan.Action.REPLACE: "its program is another by now; what runs is exchanged for it",
    plan.Action.REMOVE: "nobody wants it any more: its program is taken away",
    plan.Action.START: "supervisord is told to start it",
    plan.Action.STOP: "supervisord is told to stop it",
    plan.Action.TERM: "TERM is sent once more to one that is stopping",
    plan.Action.RESTART: "its engine hangs and is told to end; supervisord starts another",
    plan.Action.KILL: "the same, of one that did not heed it",
    plan.Action.WITHDRAW: "the sidecar is asked to take its endpoint out, before it is stopped",
}
"""What a pass may have done. To wait is nothing done, and an alarm has a line of its own."""
HEAD = """# Logs

<!-- written by tools/logs_page.py from the sources; change those, then run it -->

## Where they are

In `log/` in the state directory, a file for each program: `controller.log`, `sidecar.log`, and where they run
`apiserver.log`, `gateway.log`, `gateway-2.log` (the other worker), `gateway-holder.log` and `power.log`,
in the form below; `default.tiny.log` is what the engine of a service wrote, byte for byte, and
`crashed/` has the end of its life before; `supervisord.log` is supervisord's own, and `boot.log` or `launchd.log` has
the words of a start, as text.
`metal-supervisor logs NAME -f` shows any of them, on a terminal without anything that it would act on.

supervisord rotates them by renaming: ours at 20 MB with two older files (`controller.log.1` …), its own with three,
those of engines by the settings `log_size` and `log_files`. A long line may begin in one file and end in the next.
A deleted file is made again within five seconds of output.

## Form

A line is one object of JSON, in ASCII. On a terminal it is text instead; the setting `log_format` (`auto`, `text` or
`json`) may decide otherwise. `metal-supervisor logs controller` shows text on a terminal and leaves the lines as they
are in a pipe, so this finds every pass that did something:

```sh
metal-supervisor logs controller -n all | grep -F '"msg": "pass"'
```

This line

```json
@JSON@
```

is in text

```text
@TEXT@
```

| key | what |
| --- | --- |
| `ts` | when, RFC 3339 in UTC with milliseconds |
| `level` | `debug`, `info`, `warning`, `error`; `critical` only of libraries |
| `logger` | which part says it |
| `msg` | the sentence: one of those below, always the same; libraries have their own |
| fields | under their own names; numbers, `true`, `false` and `null` are that, everything else is text |
| `exc` | a traceback, its lines ended by `\\n` |

A field that would have the name of one of these keys has an underscore at its end (`level_`), in JSON only. Of a value
beyond @VALUE@ characters the beginning is kept, of a traceback beyond @TRACEBACK@ the end, and how much is missing is
said. Whatever a value holds, it is one line: everything but printable ASCII is escaped, halves of characters (which not
every parser takes) are spelled out as `\\\\udcff`, and a number that JSON has no form for is text. No prompt, no answer
and no token is ever in a line.

What is not of this form, such as the last words of an interpreter that could not start, is plain text: a program that
reads along takes what begins with `{`.

## How much

`metal-supervisor log-level debug` (or `info`, `warning`, `error`) changes what controller, sidecar and gateway write
while they run, and `metal-supervisor log-level setting` goes back to the setting `log_level`, which the others have
from their start.

## What a pass did

The controller writes one `pass` for each pass that did something: `did` has a step or several, with `; ` between, each
`VERB PROGRAM: why`. The program is `NAMESPACE.NAME` of an InferenceService or a shared daemon, the reason is for people
and may change with a release.

"""
MOVES = """
On claims of several Macs, `claim` has in `did` one of: @MOVES@.

## Every line there is

A level `any` is the one that was just chosen; the logger `@ANY@` has the name of the program that writes the line.

"""
SAMPLE: dict[str, logging.Scalar] = {
    "ts": "2026-11-21T09:00:00.000Z",
    "level": "info",
    "logger": "controller",
    "msg": "pass",
    "did": "start default.tiny: new",
}


class Broken(Exception):
    """A line whose message is no constant, or with a field that cannot have its name; the text says which and where."""


@dataclass(frozen=True, order=True)
class Line:
    """One line that our programs may write."""

    logger: str
    message: str
    level: str
    fields: tuple[str, ...]
    """As JSON has them, in their order."""


# ── the source ───────────────────────────────────────────────────────────────────────────────────


def lines(source: Path = SOURCE) -> list[Line]:
    """Every line in a tree of modules, sorted. Raises Broken."""
    found: set[Line] = set()
    for path in sorted(source.rglob("*.py")):
        module = ".".join((source.name, *path.relative_to(source).with_suffix("").parts))
        found |= _lines_of(module, path.read_text("utf-8"))
    return sorted(found)


@functools.cache
def _lines_of(module: str, text: str) -> frozenset[Line]:
    return frozenset(_Module(module, ast.parse(text)).lines())


class _Module:
    """One module, and the names in it that say something about its lines."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self._name = name
        kinds = ast.Module | ast.FunctionDef
        self._scopes = [list(_inside(each)) for each in ast.walk(tree) if isinstance(each, kinds)]
        self._constants: dict[str, str] = {"__name__": name}
        self._loggers: dict[str, str] = {}
        for target, value in _assignments(self._scopes[0]):
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                self._constants[target] = value.value
        for scope in self._scopes:
            for target, value in _assignments(scope):
                if _is_get_logger(value):
                    self._loggers[target] = self._logger(value)

    def lines(self) -> Iterator[Line]:
        """Its lines, one for each level of a call. Raises Broken."""
        for scope in self._scopes:
            dicts = {name: value for name, value in _assignments(scope) if isinstance(value, ast.Dict)}
            for call in (each for each in scope if isinstance(each, ast.Call)):
                methods = list(self._methods(call.func))
                if not methods and any(each.arg == "extra" for each in call.keywords):
                    raise self._broken(call, "this looks like a line of a log, but of no logger that is known here")
                for method in methods:
                    yield self._line(call, method, dicts)

    def _methods(self, func: ast.expr) -> Iterator[ast.Attribute]:
        """The methods of loggers that may be called: `log.info`, or one of `(log.info if … else log.error)`."""
        if isinstance(func, ast.IfExp):
            yield from self._methods(func.body)
            yield from self._methods(func.orelse)
        elif isinstance(func, ast.Attribute) and func.attr in LEVEL_OF and self._of(func.value) is not None:
            yield func

    def _of(self, value: ast.expr) -> str | None:
        """The name of a logger, None for what is none."""
        if isinstance(value, ast.Name):
            return "root" if value.id == "logging" else self._loggers.get(value.id)
        return self._logger(value) if _is_get_logger(value) else None

    def _logger(self, call: ast.expr) -> str:
        assert isinstance(call, ast.Call)
        (name,) = call.args or [ast.Constant("root")]
        if isinstance(name, ast.Constant):
            return str(name.value)
        return self._constants.get(name.id, ANY_PROGRAM) if isinstance(name, ast.Name) else ANY_PROGRAM

    def _line(self, call: ast.Call, method: ast.Attribute, dicts: dict[str, ast.Dict]) -> Line:
        level, arguments = LEVEL_OF[method.attr], call.args[1:] if method.attr == "log" else call.args
        if len(arguments) != 1 or not isinstance(arguments[0], ast.Constant) or not isinstance(arguments[0].value, str):
            raise self._broken(call, "its message has to be a constant, and what varies a field: extra={…}")
        given = {each.arg: each.value for each in call.keywords}
        if strange := given.keys() - BESIDE:
            raise self._broken(call, f"only extra and exc_info are known here, not {sorted(map(str, strange))}")
        fields = self._fields(call, given.get("extra"), dicts)
        if method.attr == "exception" or "exc_info" in given:
            fields = (*fields, "exc")
        return Line(self._of(method.value) or "", arguments[0].value, level, fields)

    def _fields(self, call: ast.Call, extra: ast.expr | None, dicts: dict[str, ast.Dict]) -> tuple[str, ...]:
        if extra is None:
            return ()
        found = dicts.get(extra.id) if isinstance(extra, ast.Name) else extra
        if not isinstance(found, ast.Dict):
            raise self._broken(call, "its fields have to be written out, or a name of this function that is")
        names = [key.value if isinstance(key, ast.Constant) else None for key in found.keys]
        for name in names:
            if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise self._broken(call, f"a field has to have a constant name in lower case, not {name!r}")
            if name in logging.STANDARD:
                raise self._broken(call, f"{name!r} is an attribute of every record: give the field another name")
        return tuple(f"{name}_" if name in logging.RESERVED else str(name) for name in names)

    def _broken(self, call: ast.Call, text: str) -> Broken:
        return Broken(f"{self._name}, line {call.lineno}: {text}")


def _is_get_logger(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "getLogger"


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Everything in a module or function but what is in a function within it."""
    left = [scope]
    while left:
        each = left.pop()
        if each is not scope:
            yield each
        if each is scope or not isinstance(each, ast.FunctionDef):
            left += reversed(list(ast.iter_child_nodes(each)))


def _assignments(scope: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of what is assigned to a single name."""
    for each in scope:
        if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
            yield each.targets[0].id, each.value


# ── the page ─────────────────────────────────────────────────────────────────────────────────────


def page() -> str:
    """The text of the page. Raises Broken."""
    head = HEAD.replace("@JSON@", logging.json_line(SAMPLE)).replace("@TEXT@", logging.text_lines(SAMPLE))
    head = head.replace("@VALUE@", str(logging.LONGEST_VALUE)).replace("@TRACEBACK@", str(logging.LONGEST_TRACEBACK))
    verbs = [f"| `{do.value}` | {text} |" for do, text in VERBS.items()]
    moves = MOVES.replace("@MOVES@", ", ".join(f"`{do.value}`" for do in leases.ClaimAction)).replace(
        "@ANY@", ANY_PROGRAM
    )
    rows = [
        f"| `{each.logger}` | {each.message} | {each.level} | {', '.join(f'`{name}`' for name in each.fields)} |"
        for each in lines()
    ]
    verbs = ["| verb | what |", "| --- | --- |", *verbs]
    rows = ["| logger | msg | level | fields |", "| --- | --- | --- | --- |", *rows]
    return head + "\n".join(verbs) + "\n" + moves + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
