"""Flags of `metal-supervisor doctor`; the code behind it is imported only when the command runs."""

from __future__ import annotations

import argparse
import os
from typing import Any

from metal_supervisor.cli.command_parser import add_command
from metal_supervisor.cli.terminal import say
from metal_supervisor.settings import loader


def add(commands: Any) -> None:
    """Add the command."""
    text = "what is right and wrong with this Mac, its engines and its cluster, and what to do about it"
    command = add_command(commands, "doctor", _doctor, text)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--bundle", metavar="FILE.tar.gz", help="also write an archive to show to others, without secrets and names"
    )
    loader.add_flags(command)


def _doctor(arguments: argparse.Namespace) -> int:
    from metal_supervisor.doctor import command

    return command.main(arguments, os.environ, say)
