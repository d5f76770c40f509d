"""The flags of the commands that only look: `metal-supervisor status`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from metal_supervisor import config
from metal_supervisor.model_flags import settings_of

Say = Callable[[str], None]


def add(commands: Any, say: Say) -> None:
    """Adds them."""
    text = "what runs and what does not, and why: services, memory, downloads, cluster"
    status = commands.add_parser("status", help=text, description=text)
    status.add_argument("--json", action="store_true", help="print JSON, the document that /status answers with")
    status.add_argument("--watch", action="store_true", help="go on, and show every change, until Ctrl-C")
    config.add_flags(status)
    status.set_defaults(action=lambda arguments: _status(arguments, say))


def _status(arguments: argparse.Namespace, say: Say) -> int:
    from metal_supervisor import status_command

    how = status_command.How(arguments.json, arguments.watch)
    return status_command.Status(settings_of(arguments), sys.stdout, say).run(how)
