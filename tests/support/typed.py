"""Commands of `metal-supervisor` in the tests' own process: what they print, and how they end.

A start of the command takes up to a fifth of a second of CPU, most of it for imports. Where the process itself is the
point (signals, terminals, closed streams), and once for each command, tests start one.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from subprocess import CompletedProcess
from unittest import mock

import pytest

from metal_supervisor.cli.main import main


@contextlib.contextmanager
def _stream(text: str = "") -> Iterator[io.TextIOWrapper]:
    """A stream with a descriptor, as a redirected one is."""
    with tempfile.TemporaryFile() as file, io.TextIOWrapper(file, encoding="utf-8") as stream:
        stream.write(text)
        stream.seek(0)
        yield stream


def _written(stream: io.TextIOWrapper) -> str:
    """All of it, whatever bytes it has."""
    stream.seek(0)
    return stream.buffer.read().decode("utf-8", "surrogateescape")


def typed(*words: str, stdin: str = "", environ: Mapping[str, str] = os.environ) -> CompletedProcess[str]:
    """One command, as it ends without a terminal."""
    with (
        _stream(stdin) as given,
        _stream() as out,
        _stream() as err,
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(os.environ, dict(environ), clear=True),
    ):
        for name, stream in (("stdin", given), ("stdout", out), ("stderr", err)):
            patch.setattr(sys, name, stream)
        try:
            code = main(words)
        except SystemExit as error:
            code = int(error.code or 0)
        return CompletedProcess(words, code, _written(out), _written(err))
