"""`metal-supervisor completion bash | zsh | fish`: prints a shell's completions, generated from the argument parser.

The shell reads the printed script once, and pressing TAB does not run this program. Arguments that are files complete
as files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from metal_supervisor.cli.command_parser import add_command
from metal_supervisor.settings import loader

SHELLS = ("bash", "zsh", "fish")
FILES = frozenset({"FILE", "FILE.tar.gz", "KUBECONFIG", "PLIST", "SOURCE"})
"""Metavariables of arguments that are files, or may be."""
DIRECTORIES = frozenset({"state_dir", "model_store", "ollama_models", "procfs"})
"""Settings that are directories; the other paths are files."""


def add(commands: Any, parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Add the command; `parser` makes the parser of all commands, this one among them."""
    text = "print the completions of a shell; the first lines of it say where to put them"

    def run(arguments: argparse.Namespace) -> int:
        print(script(parser(), arguments.shell))
        return 0

    command = add_command(commands, "completion", run, text)
    command.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Completion script for all commands, in a shell's language."""
    import shtab

    for action in _arguments(parser):
        if action.dest in DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in FILES or action.dest in loader.PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell=shell)


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of every command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _arguments(each)
        else:
            yield action
