#!/usr/bin/env python3
"""`make run`: finds an engine, makes the tiny model, and becomes `metal-supervisor run`.

What this does beyond the product's own command is what a checkout needs and an installation does not: an
engine for Linux out of a Python package, and a model small enough to be made on the spot. What it writes is in `.run/`,
the state directory, and in `build/demo/`, because no manifest may name a file of the state directory; but for the
engine's package, which is cached in the home directory.

Reads CLUSTER, CONTEXT, NAMESPACE, PORT and ARGS from the environment, where make puts them. They can be
checked alone, by the command's own parser, with the standard library only: set_up.py does so before it installs.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before an installation there is only the checkout

from steps import Step, shown

from metal_supervisor.cli import main as command_line
from metal_supervisor.cli.terminal import say
from metal_supervisor.settings.loader import ConfigError, add_flags, load, missing_kubeconfig, overrides_from
from metal_supervisor.spec.user_error import UserError

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / ".run"
DEMO = ROOT / "build" / "demo"
PLACEHOLDER = "@TINY_GGUF@"
FINDERS = ("METAL_SUPERVISOR_CACHE", "METAL_SUPERVISOR_LLAMA_SERVER")
"""Variables of find_llama_server.py, which are no settings of the command."""


def check(flags: Sequence[str]) -> int:
    """Exit code for the flags of `run`, after the message that the command itself would end with."""
    parsed = command_line.parser("run").parse_args(["run", *flags])
    environ = {name: value for name, value in os.environ.items() if name not in FINDERS}
    try:
        problem = missing_kubeconfig(load(overrides_from(parsed, environ)))
    except ModuleNotFoundError:  # tomli, for a file with settings and Python 3.10: the command itself will check it
        return 0
    except UserError as error:
        say(str(error))
        return error.code
    if problem:
        say(problem)
    return int(bool(problem))


def example() -> Path:
    """The demo's manifest, with the path of a tiny model made here."""
    import tiny_gguf

    DEMO.mkdir(parents=True, exist_ok=True)
    model = DEMO / "tiny.gguf"
    tiny_gguf.write_tiny_gguf(model)
    manifest = DEMO / "tiny.yaml"
    text = (ROOT / "tools" / "tiny.yaml").read_text("utf-8")
    # As a URL, because a path may hold what YAML would read as something else.
    manifest.write_text(text.replace(PLACEHOLDER, urllib.parse.quote(str(model))), "utf-8")
    return manifest


def engine() -> Path:
    """Path of a llama-server, installed in a step of the set-up if it is missing. Raises NotFound."""
    import find_llama_server as finder

    try:
        return finder.find(install_it=False)
    except finder.NotFound:
        if sys.platform != "linux":
            raise
    cache = finder.default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    with Step("engine", f"llama-server, into {shown(cache)}", cache) as step:
        finder.say = step.note
        return finder.find()


def roots(arguments: Sequence[str]) -> list[str]:
    """The flag that lets manifests name the demo's model too; [] where a setting is wrong, as `run` will say."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(parser, ("allowed_roots",))
    try:
        settings = load(overrides_from(parser.parse_known_args(arguments)[0], os.environ))
    except ConfigError:
        return []
    return ["--allowed-roots", ",".join(map(str, (*settings.roots, DEMO)))]


def main(*, only_check: bool = False) -> int:  # noqa: RET503 - exec does not return
    """Becomes the product's own command; returns with a failure, or after a check."""
    given = {name: os.environ.pop(name, "") for name in ("CLUSTER", "CONTEXT", "NAMESPACE", "PORT", "ARGS")}
    flags: list[str] = []
    try:
        further = shlex.split(given["ARGS"])
    except ValueError as error:
        print(f"make run: ARGS={given['ARGS']}: {error}", file=sys.stderr)
        return 2
    if given["CLUSTER"]:
        kubeconfig = str(Path(given["CLUSTER"]).expanduser().absolute())
        flags += ["--kubeconfig", kubeconfig]
        flags += ["--context", given["CONTEXT"]] if given["CONTEXT"] else []
    if given["NAMESPACE"]:
        flags += ["--namespace", given["NAMESPACE"]]
    if given["PORT"]:
        flags += ["--port", given["PORT"]]
    if only_check:
        return check([*flags, *further])
    from find_llama_server import NotFound

    from metal_supervisor.install.checks import OF_A_CLUSTER

    run = RUN
    if given["CLUSTER"]:
        identity = f"{kubeconfig} {given['CONTEXT']}"
        run = RUN / f"{OF_A_CLUSTER}{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    else:
        flags += ["--apply", str(example())]
    try:
        path = engine()
    except NotFound as error:
        print(f"make run: {error}", file=sys.stderr)
        return 1
    for name in FINDERS:
        os.environ.pop(name, None)
    command = [sys.executable, "-m", "metal_supervisor", "run", "--state-dir", str(run), "--llama-server", str(path)]
    os.chdir(ROOT)
    os.execv(sys.executable, [*command, *flags, *further, *([] if given["CLUSTER"] else roots(further))])


if __name__ == "__main__":
    sys.exit(main())
