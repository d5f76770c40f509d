#!/usr/bin/env python3
"""`make run`: finds an engine, makes the tiny model, and becomes `metal-supervisor run`.

What this does beyond the product's own command is what a checkout needs and an installation does not: an
engine for Linux out of a Python package, and a model small enough to be made on the spot. What it writes is in `.run/`,
the state directory, and in `build/demo/`, because no manifest may name a file of the state directory; but for the
engine's package, which is cached in the home directory.

Reads CLUSTER, CONTEXT, NAMESPACE, PORT and ARGS from the environment, where make puts them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import sys
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import find_llama_server
import tiny_gguf

from metal_supervisor.install.checks import OF_A_CLUSTER
from metal_supervisor.runtimes import setting_checks  # noqa: F401 - completes the checks of settings
from metal_supervisor.settings.loader import ConfigError, add_flags, load, overrides_from

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / ".run"
DEMO = ROOT / "build" / "demo"
PLACEHOLDER = "@TINY_GGUF@"


def example() -> Path:
    """The demo's manifest, with the path of a tiny model made here."""
    DEMO.mkdir(parents=True, exist_ok=True)
    model = DEMO / "tiny.gguf"
    tiny_gguf.write_tiny_gguf(model)
    manifest = DEMO / "tiny.yaml"
    text = (ROOT / "tools" / "tiny.yaml").read_text("utf-8")
    # As a URL, because a path may hold what YAML would read as something else.
    manifest.write_text(text.replace(PLACEHOLDER, urllib.parse.quote(str(model))), "utf-8")
    return manifest


def roots(arguments: Sequence[str]) -> list[str]:
    """The flag that lets manifests name the demo's model too; [] where a setting is wrong, as `run` will say."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(parser, ("allowed_roots",))
    try:
        settings = load(overrides_from(parser.parse_known_args(arguments)[0], os.environ))
    except ConfigError:
        return []
    return ["--allowed-roots", ",".join(map(str, (*settings.roots, DEMO)))]


def main() -> int:  # noqa: RET503 - exec does not return
    """Becomes the product's own command; returns only with a failure."""
    given = {name: os.environ.pop(name, "") for name in ("CLUSTER", "CONTEXT", "NAMESPACE", "PORT", "ARGS")}
    run = RUN
    flags: list[str] = []
    try:
        further = shlex.split(given["ARGS"])
    except ValueError as error:
        print(f"make run: ARGS={given['ARGS']}: {error}", file=sys.stderr)
        return 2
    if given["CLUSTER"]:
        kubeconfig = str(Path(given["CLUSTER"]).expanduser().absolute())
        identity = f"{kubeconfig} {given['CONTEXT']}"
        run = RUN / f"{OF_A_CLUSTER}{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
        flags += ["--kubeconfig", kubeconfig]
        flags += ["--context", given["CONTEXT"]] if given["CONTEXT"] else []
    if given["NAMESPACE"]:
        flags += ["--namespace", given["NAMESPACE"]]
    if given["PORT"]:
        flags += ["--port", given["PORT"]]
    if not given["CLUSTER"]:
        flags += ["--apply", str(example())]
    try:
        engine = find_llama_server.find()
    except find_llama_server.NotFound as error:
        print(f"make run: {error}", file=sys.stderr)
        return 1
    os.environ.pop("METAL_SUPERVISOR_CACHE", None)  # the finder's, not a setting of the product
    os.environ.pop("METAL_SUPERVISOR_LLAMA_SERVER", None)
    command = [sys.executable, "-m", "metal_supervisor", "run", "--state-dir", str(run), "--llama-server", str(engine)]
    os.chdir(ROOT)
    os.execv(sys.executable, [*command, *flags, *further, *([] if given["CLUSTER"] else roots(further))])


if __name__ == "__main__":
    sys.exit(main())
