"""`metal-supervisor explain NAMESPACE/NAME`: explains the state of a service, from the files of this Mac alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TextIO

from metal_supervisor.cli.explanation import Case, explain, numbers
from metal_supervisor.cli.render import Line, Screen
from metal_supervisor.cli.terminal import NOT_FOUND
from metal_supervisor.settings.loader import start_command
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.names import Unknown, aliases, meant, of_another_namespace
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.terminal_text import escaped
from metal_supervisor.spec.types import Json
from metal_supervisor.spec.user_error import NOT_RUNNING
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.reports import controller_report
from metal_supervisor.supervisord.client import Supervisord
from metal_supervisor.supervisord.ctl_plugin import still_so

LABEL = 11
MOST_AHEAD = 5


def run(state: StateDir, name: str, as_json: bool, out: TextIO, say: Callable[[str], None], namespace: str = "") -> int:
    """Print the explanation. Returns the exit code: 4 if there is no such service, 3 if no supervisord runs.

    `namespace`: the one that this Mac watches, "" for all.
    """
    records, unreadable = state.records()
    told = controller_report(state.path)
    try:
        program = meant(name, {each.program: aliases(each) for each in records.values() if not each.is_daemon})
    except Unknown as unknown:
        why = _why_unknown(name, told, unreadable) or of_another_namespace(name, namespace)
        say(escaped(why or str(unknown)))
        return NOT_FOUND
    case = _case(state, records[program], told, _ahead(records[program], records.values()))
    if not case.up:
        say(f"nothing runs in {state.path}; start it with: {start_command(state.path)}; this is what was known last:")
    Screen(out, raw=as_json).print([json.dumps(_as_json(case), indent=2)] if as_json else lines(case))
    return 0 if case.up else NOT_RUNNING


def lines(case: Case) -> list[Line]:
    """Lines for people: one sentence each."""
    told, sentences = explain(case)
    found: list[Line] = [escaped(f"{'/'.join(case.record.key)}: {told.phase}, {told.reason}")]
    before = ""
    for topic, text in sentences:
        found.append((f"  {'' if topic == before else topic:<{LABEL}}", escaped(text)))
        before = topic
    return found


def _as_json(case: Case) -> Json:
    told, sentences = explain(case)
    record = case.record
    return {
        "namespace": record.namespace,
        "name": record.name,
        "program": record.program,
        "phase": told.phase,
        "reason": told.reason,
        "message": told.message,
        "sentences": [{"topic": topic, "text": text} for topic, text in sentences],
        "numbers": numbers(case),
    }


def _ahead(record: Record, records: Iterable[Record]) -> tuple[str, ...]:
    """The services ahead of it in the queue for memory, the first one first."""
    before = (each for each in records if 0 < each.queue_position < record.queue_position)
    return tuple("/".join(each.key) for each in sorted(before, key=lambda each: each.queue_position))[:MOST_AHEAD]


def _case(state: StateDir, record: Record, told: Json, ahead: tuple[str, ...]) -> Case:
    note = state.run_note(record.program)
    observed = still_so(state.observations().get(record.program), note)
    argv = (state.spec_of(record.program) or (note.spec if note else {})).get("argv")
    program = argv[0] if isinstance(argv, list) and argv and isinstance(argv[0], str) else ""
    up = Supervisord(state.socket).answers()
    return Case(record, observed, note, program, told, time.time(), ahead, up)


def _why_unknown(name: str, told: Json, bad: Mapping[str, str]) -> str:
    """Message why a service has no readable record, "" if unknown. `bad`: what is wrong with the others, by program."""
    elsewhere = mapping(told, "elsewhere")
    typed = name.replace("/", ".", 1)
    program = next((each for each in (*elsewhere, *bad) if typed in (each, each.partition(".")[2])), "")
    if why := elsewhere.get(program):
        return f"{name} is not this Mac's: {why}"
    if why := bad.get(program):
        return f"the record of {name} cannot be read: {why}; the controller puts it aside and makes it anew"
    return ""
