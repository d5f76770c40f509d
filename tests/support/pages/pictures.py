#!/usr/bin/env python3
"""Makes the pictures of the README and docs/tour.md from a system that runs: a terminal as SVG, and the page as PNG.

The services are of the tiny model, whatever they are called. Needs a Chromium.

    python -m tests.support.pages.pictures
"""

from __future__ import annotations

import re
import sys
import tempfile
from html import escape
from pathlib import Path

from tests.support.chromium import tab
from tests.support.gateway import with_gateway
from tests.support.pseudo import Terminal
from tests.support.system import System, eventually, service
from tests.support.tight import room_for

PICTURES = Path(__file__).resolve().parents[3] / "docs" / "pictures"
COLUMNS = 100
LINE = 18
CHARACTER = 8.0
MARGIN = 16
FONT = "ui-monospace, Menlo, Consolas, monospace"


def svg(shown: list[tuple[str, str]]) -> str:
    """Commands and what they printed, as a terminal shows them."""
    rows: list[tuple[str, str]] = []
    for command, printed in shown:
        rows += [("command", f"$ {command}"), *(("", line) for line in printed.rstrip().splitlines()), ("", "")]
    width = max(len(text) for _, text in rows) * CHARACTER + 2 * MARGIN
    height = (len(rows) - 1) * LINE + 2 * MARGIN
    lines = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * number + 13}" textLength="{len(text) * CHARACTER:g}"'
        f'{" font-weight=" + chr(34) + "bold" + chr(34) if kind else ""} xml:space="preserve">{escape(text)}</text>'
        for number, (kind, text) in enumerate(rows)
        if text
    ]
    frame = f'<rect width="{width:g}" height="{height}" rx="8" fill="#1b1e24"/>'
    style = f'font-family="{FONT}" font-size="13" fill="#d7dae0"'
    size = f'width="{width:g}" height="{height}" viewBox="0 0 {width:g} {height}"'
    body = "\n".join(lines)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{frame}\n<g {style}>\n{body}\n</g>\n</svg>\n'


def services(system: System) -> None:
    """Three services: one that serves, one that waits for memory, one on demand."""
    made = [service(name, contextSize=32768) for name in ("chat", "notes", "vision")]
    made[1]["metadata"]["annotations"] = {"metal-supervisor.io/on-demand": "true"}
    system.apply(system.tiny_model(), *made[:2])
    system.ready("chat")
    system.apply(made[2])
    for name, reason in (("vision", "InsufficientMemory"), ("notes", "Unloaded")):
        eventually(lambda n=name, r=reason: system.condition("MetalReady", n).get("reason") == r, what=reason)


def typed(system: System) -> list[tuple[str, str]]:
    """What the terminal shows of them."""
    state, program = str(system.state), str(Path(sys.executable).parent / "metal-supervisor")
    found = [("kubectl get isvc", system.kubectl("get", "isvc"))]
    for words in (["status"], ["explain", "vision"]):
        terminal = Terminal([program, *words, "--state-dir", state], COLUMNS)
        found.append((f"metal-supervisor {' '.join(words)}", terminal.rest()))
    return [(command, plain(printed).replace(str(system.base), "~/models")) for command, printed in found]


def plain(printed: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\r", "", printed)


def main() -> int:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        base = Path(made)
        flags = "--memory-fraction", room_for(1.5, base), "--node-name", "studio"
        with with_gateway(base, *flags) as gateway, tab(base) as browser:
            services(gateway.system)
            (PICTURES / "terminal.svg").write_text(svg(typed(gateway.system)), "utf-8")
            browser.size(1100, 700)
            browser.open(f"http://127.0.0.1:{gateway.system.http}/")
            browser.picture(PICTURES / "page.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
