"""What an engine's logs say for people: how it ended, its last lines, when it is tried again."""

from __future__ import annotations

import time

from metal_supervisor import launch
from metal_supervisor.boundary.state import StateDir
from metal_supervisor.boundary.supervisord import last_exit
from metal_supervisor.core.types import Record, RunNote

LINES = 20
HELD = f"{launch.SAYS}{launch.CRASHED}"


def ended(state: StateDir, program: str) -> str:
    """How an engine last ended, e.g. `exit status 1`."""
    return last_exit(state.path / "log" / "supervisord.log", program)


def last_lines(state: StateDir, program: str) -> list[str]:
    """The last lines of an engine's log, without its launcher's word that it is held."""
    lines = state.log_tail(program, 2 * LINES)
    return [line for line in lines if not line.startswith(HELD)][-LINES:]


def why_down(state: StateDir, record: Record, note: RunNote | None) -> str:
    """Why an engine does not stay up: how it ended, the last line it wrote, and when it is tried again."""
    lines = last_lines(state, record.program)
    due = record.retry_at or (note.not_before if note else 0.0)
    again = f"next start at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(due))}" if due else ""
    parts = ended(state, record.program), lines[-1][:300] if lines else "", again
    return "; ".join(part for part in parts if part)
