"""Samples of powermetrics as various chips print them, made here, and a program that prints them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HEADER = (
    '<?xml version="1.0" encoding="UTF-8"?>\n'
    '<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">\n'
)
M1_CLUSTERS = "E-Cluster", "P-Cluster"
ULTRA_CLUSTERS = "E0-Cluster", "P0-Cluster", "P1-Cluster", "E1-Cluster", "P2-Cluster", "P3-Cluster"
M5_CLUSTERS = "P0-Cluster", "P1-Cluster", "S-Cluster"
FIGURES = {"combined": 121.675, "gpu": 19.0117, "cpu": 102.663, "ane": 0}
"""Milliwatts of an idle laptop."""
WATTS = {name: value / 1000 for name, value in FIGURES.items()}


def element(value: Any) -> str:
    """A value as powermetrics writes it: whole numbers as integers, others as reals."""
    if isinstance(value, bool):
        return f"<{str(value).lower()}/>"
    if isinstance(value, dict):
        return "<dict>\n" + "".join(f"<key>{key}</key>{element(each)}\n" for key, each in value.items()) + "</dict>"
    if isinstance(value, list):
        return "<array>\n" + "\n".join(map(element, value)) + "\n</array>"
    name = {int: "integer", float: "real"}.get(type(value), "string")
    return f"<{name}>{value:g}</{name}>" if isinstance(value, float) else f"<{name}>{value}</{name}>"


def processor(clusters: tuple[str, ...] = M1_CLUSTERS, **figures: Any) -> dict[str, Any]:
    """The part of a sample that has the figures, in milliwatts and millijoules, by their keys."""
    state = {"freq": 972, "used_ns": 1856923416, "used_ratio": 0.9198}
    core = {"cpu": 0, "freq_hz": 1.04615e9, "idle_ns": 1832463458, "idle_ratio": 0.9078, "dvfm_states": [state]}
    rows = [{"name": name, "hw_resid_counters": True, "freq_hz": 1.0e9, "cpus": [core, core]} for name in clusters]
    return {"clusters": rows, **figures}


def sample(found: Any = None, elapsed_ns: Any = 5_003_211_000, clusters: tuple[str, ...] = M1_CLUSTERS) -> bytes:
    """A whole property list, without the NUL that leads it and with the line's end that follows it."""
    if found is None:
        found = processor(clusters, **{f"{name}_power": value for name, value in FIGURES.items()})
    body = element({"is_delta": True, "elapsed_ns": elapsed_ns, "hw_model": "Mac17,6", "processor": found})
    # The real one has the idle ratio of the GPU twice.
    gpu = "<key>gpu</key><dict>\n<key>idle_ratio</key><real>0.9</real>\n<key>idle_ratio</key><real>0.9</real>\n</dict>"
    text = f'{HEADER}<plist version="1.0">\n{body.removesuffix("</dict>")}{gpu}\n</dict>\n</plist>\n'
    return text.encode()


def stream(*samples: bytes) -> bytes:
    """What powermetrics prints of these samples."""
    return b"\0".join(samples)


def printing(directory: Path, then: str = "") -> tuple[str, ...]:
    """The command line of a program that prints a sample every 50 ms, or one and then does what is said."""
    data = directory / "sample.xml"
    data.write_bytes(sample())
    again = "while True:\n    out.write(b'\\0' + data)\n    out.flush()\n    time.sleep(0.05)\n"
    script = directory / "standin_powermetrics.py"
    script.write_text(
        "import os, signal, sys, time\n"
        f"data, out = open({str(data)!r}, 'rb').read(), sys.stdout.buffer\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in any program that is not written in Python\n"
        f"open({str(directory / 'standin.pid')!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "out.write(data)\nout.flush()\n" + (then or again)
    )
    return sys.executable, "-I", "-S", str(script)


def pids(directory: Path) -> list[int]:
    """Of the programs that `printing` named, those that were started, the latest last."""
    noted = directory / "standin.pid"
    return [int(line) for line in noted.read_text().splitlines()] if noted.exists() else []
