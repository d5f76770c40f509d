"""Our own commands, run by this process: a start of Python costs 0.25 s of CPU, and what is tried is what they say."""

from __future__ import annotations

import contextlib
import io

from metal_supervisor.cli.main import main


def typed(*words: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `metal-supervisor WORDS`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()
