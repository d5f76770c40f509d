"""Messages about the exit of an engine, from its logs: how it ended, its last lines, when it is started again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from metal_supervisor import launch
from metal_supervisor.spec.instants import utc
from metal_supervisor.spec.processes import Observed, RunNote
from metal_supervisor.spec.record import Record
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.exits import UNKNOWN

LINES = 20
AGAIN = "; next start at "
ERROR = re.compile(r"error|fail|fatal|cannot|unable|invalid|abort|assert|exception|terminat|denied", re.IGNORECASE)
ASIDE = re.compile(r"usage\b|-|\s|to show|#\d+ |\d+ +\S+ +0x|\S+\(\S*\+0x", re.IGNORECASE)
"""Lines of a usage text, and stack frames as lldb, gdb, macOS and glibc print them."""
LLAMA = re.compile(r"[0-9.]+ E |(?:clip|cmn|common|ggml|gguf|llama|main|mtmd|srv)\w*\b.*(?:error|fail|couldn't|unable)")
"""Errors of llama.cpp: newer releases mark them with E, older ones name the function that reports them."""
FINAL = re.compile(r"dyld(?:\[\d+\])?: |libc\+\+abi: |panic: |fatal error: |\s*what\(\): |.*GGML_ASSERT")
"""Last words of a process that aborts: what follows are stack frames."""
TRACEBACK = "Traceback (most recent call last):"
IGNORED = "Exception ignored in"
KILLED = re.compile(r"terminated by SIG(?!ABRT|BUS|FPE|ILL|PIPE|SEGV|SYS|TRAP|XCPU|XFSZ)")
"""Exits by a signal that comes from outside, of which the log does not tell why."""
NO_CAUSE = re.compile(rf"{launch.SAYS}({launch.CRASHED}|engine pid \d+ {launch.ADOPTS})")
"""Lines of the launcher about the backoff and about an adoption."""


def manner(last_exit: str, crashed: bool) -> str:
    """Kind of an engine's exit in one word: `stopped` if it was planned, else e.g. `exit_1`, `SIGKILL`, `unknown`."""
    if not crashed:
        return "stopped"
    code, signal = re.fullmatch(r"exit status (\d{1,3})", last_exit), re.fullmatch(r"terminated by (SIG\w+)", last_exit)
    return f"exit_{code[1]}" if code else signal[1] if signal else "unknown"


def exits(before: Observed | None, reason: str) -> dict[str, int]:
    """Exits of an engine by reason, with one more of `reason` unless that is ""."""
    known = before.exits if before is not None else {}
    return {**known, reason: known.get(reason, 0) + 1} if reason else known


def last_lines(state: StateDir, program: str) -> list[str]:
    """The last lines of an engine's log, without those of the launcher that tell of no fault."""
    lines = state.log_tail(program, 2 * LINES)
    return [line for line in lines if not NO_CAUSE.match(line)][-LINES:]


def cause(lines: Sequence[str], ended: str) -> str:
    """The line of a log with the reason why its engine ended: an exception's, else the last error, else the last line.

    `ended`: its exit, as `Exits` tells it; "" is returned for an engine that was killed, or may have been, and reported
    no error.

    llama-server reports the fault first, and then each function that failed by it: the first of these counts. An engine
    that refuses its command line prints the error first, and then how to use it.
    """
    if not lines or KILLED.match(ended):
        return ""
    final = [*_exceptions(lines), *(index for index, line in enumerate(lines) if FINAL.match(line))]
    if final:
        return lines[max(final)].strip()[:300]
    told = [index for index, line in enumerate(lines) if ERROR.search(line) and not ASIDE.match(line)]
    if ended == UNKNOWN and not told:
        return ""
    found = told[-1] if told else len(lines) - 1
    chain = {index for index, line in enumerate(lines) if LLAMA.match(line)}
    while found in chain and chain & {found - 1, found - 2}:
        found = max(chain & {found - 1, found - 2})
    return lines[found][:300]


def _exceptions(lines: Sequence[str]) -> list[int]:
    """Indices of the lines that name the exceptions of Python's tracebacks.

    Those that Python ignores, as in a finalizer, end nothing.
    """
    found = []
    for index, line in enumerate(lines):
        if TRACEBACK in line and not (index and lines[index - 1].startswith(IGNORED)):
            found += [at for at in range(index + 1, len(lines)) if not lines[at].startswith(" ")][:1]
    return found


def why_down(state: StateDir, record: Record, note: RunNote | None, ended: str) -> str:
    """Reason why an engine does not stay up: `ended`, any cause in its log, and the time of the next start."""
    lines = last_lines(state, record.program)
    due = record.retry_at or (note.not_before if note else 0.0)
    told = "; ".join(part for part in (ended, cause(lines, ended)) if part)
    return f"{told}{AGAIN if told else AGAIN[2:]}{utc(due)}" if due else told


def without_next_start(message: str) -> str:
    """A message of `why_down`, for the time from that start on."""
    return message.rpartition(AGAIN)[0] or message
