#!/usr/bin/env python3
# <xbar.title>metal_supervisor</xbar.title>
# <xbar.desc>The models of this Mac: which serve, what they take, why one does not.</xbar.desc>
# <xbar.dependencies>python3</xbar.dependencies>
"""A plugin of SwiftBar (or xbar): put it, or a link to it, into the directory of plugins. It asks every 10 s.

METAL_SUPERVISOR_PORT is the port of the page, where that is not 9090. Python 3.9 is enough, as Apple's tools bring it.
"""

import json
import os
import urllib.request

URL = f"http://127.0.0.1:{os.environ.get('METAL_SUPERVISOR_PORT', '9090')}"
LONGEST = 100


def line(text, **options):
    """One line of a menu; `|` would begin its options."""
    shown = "".join(char if char.isprintable() and char != "|" else " " for char in str(text))[:LONGEST]
    return " ".join([shown, "|", *(f"{name}={value}" for name, value in options.items())])


def gib(size):
    """An amount of memory."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def menu(told):
    """The lines of the menu for what /status says, the one in the menu bar first."""
    services = told["services"]
    wanted = [each for each in services if each["phase"] not in ("Stopped", "Suspended")]
    serving = sum(bool(each["ready"]) for each in wanted)
    yield line(f"{serving}/{len(wanted)}", sfimage="cpu" if serving == len(wanted) else "exclamationmark.triangle")
    yield "---"
    for each in services:
        memory, address = each["memory"]["reservedBytes"], each["address"]
        words = (each["name"], each["phase"], *([gib(memory)] if memory else []))
        yield line("  ".join(words), href=f"http://{address}" if address else URL)
        if each["message"] and not each["ready"]:
            yield f"--{line(each['message'])}"
    if told["memory"]:
        yield "---"
        yield line(f"{gib(told['memory']['charged'])} of {gib(told['memory']['budget'])} taken")
    yield "---"
    yield line("Open the page", href=URL)
    yield line("Refresh", refresh="true")


def main():
    """Print the menu."""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a Mac's proxy is not for loopback
        with opener.open(f"{URL}/status", timeout=5) as answer:
            told = json.load(answer)
    except (OSError, ValueError) as error:
        print("-", line("", sfimage="moon.zzz"), "---", line(f"metal_supervisor does not answer: {error}"), sep="\n")
        return
    print("\n".join(menu(told)))


if __name__ == "__main__":
    main()
