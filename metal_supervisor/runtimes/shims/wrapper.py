"""Parts of the wrappers that an engine's own interpreter runs: its log, its options, and an end with a reason.

Standard library only, and no import of metal_supervisor, as in `gate.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

EXIT_CANNOT_SERVE = 1
EXIT_UNKNOWN = 69


class WrapperLog(io.TextIOBase):
    """Replacement of stdout and stderr that ignores write errors: a closed log pipe must not cut off an answer."""

    turn = threading.RLock()  # reentrant: a finalizer that runs during a write may write, too

    def write(self, text: str) -> int:
        with WrapperLog.turn, contextlib.suppress(OSError):
            os.write(2, text.encode("utf-8", "replace"))
        return len(text)


def begin(argv: Sequence[str], defaults: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Replace stdout and stderr; return (the wrapper's own options, the engine's arguments behind them)."""
    sys.stdout = sys.stderr = WrapperLog()
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]  # it must not import ours
    own, rest = dict(defaults), list(argv)
    while len(rest) > 1 and rest[0] in own:
        own[rest[0]], rest = rest[1], rest[2:]
    return own, rest


def end(name: str, why: str, code: int = EXIT_CANNOT_SERVE) -> None:
    """End the process at once, because it cannot serve: other threads would keep it alive. `name`: the wrapper's."""
    # Keep other threads from writing after the reason; with a timeout, because one may be blocked on a full pipe.
    WrapperLog.turn.acquire(timeout=1)
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 1)[1]:  # unless its pipe is full
            os.write(2, f"{name}: {why}\n".encode("utf-8", "replace"))
    os._exit(code)


def run(name: str, serve: Callable[[], Any]) -> None:
    """Run an engine's server; ends the process, with its own exit code if it has one."""
    try:
        serve()
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else EXIT_CANNOT_SERVE)
    except BaseException as error:  # noqa: BLE001 - a port that is taken, mostly
        end(name, f"{type(error).__name__}: {error}"[:1000])
    os._exit(0)
