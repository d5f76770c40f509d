#!/usr/bin/env python3
"""One command, or one connection, in the context of whoever starts this; what came of it goes into a file.

launchd runs it as a daemon and as an agent, so that the same question is asked in each context by the same program.
The file appears whole (temporary file, rename), so whoever waits for it may read it as soon as it is there.

    mac_once.py RESULT run ARGV…
    mac_once.py RESULT connect HOST PORT
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
CONNECT_S = 5.0


def run(argv: list[str]) -> dict[str, Any]:
    """What a command said."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return {"code": 127, "out": "", "err": f"{type(error).__name__}: {error}"}
    return {
        "code": done.returncode,
        "out": done.stdout.decode("utf-8", "replace"),
        "err": done.stderr.decode("utf-8", "replace"),
    }


def connect(host: str, port: str) -> dict[str, Any]:
    """Whether a connection comes about; errno if not."""
    try:
        with socket.create_connection((host, int(port)), CONNECT_S):
            return {"code": 0, "errno": 0, "err": ""}
    except OSError as error:
        return {"code": 1, "errno": error.errno or 0, "err": error.strerror or type(error).__name__}


def main(argv: list[str]) -> int:
    """Writes the result; 2 if it is not called as above."""
    if len(argv) < 3 or argv[1] not in ("run", "connect"):
        sys.stderr.write(__doc__ or "")
        return 2
    found = run(argv[2:]) if argv[1] == "run" else connect(*argv[2:4])
    found |= {"uid": os.getuid(), "pid": os.getpid()}
    result = Path(argv[0])
    part = result.with_name(f".{result.name}.part")
    part.write_text(json.dumps(found), "utf-8")
    part.replace(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
