"""Flags of the commands that only read, `status`, `explain`, `logs`, `fit` and `doctor`, and of `log-level`.

The code behind each is imported only when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from metal_supervisor.cli.command_parser import SOURCE_HELP, add_command
from metal_supervisor.cli.terminal import CommandError, say
from metal_supervisor.models.listing import Unusable
from metal_supervisor.settings import loader
from metal_supervisor.settings.logging import LEVEL_FILE, LEVELS
from metal_supervisor.spec.fields import Bad

STATE = ("state_dir",)
LINES = 100
SETTING = "setting"
NAME_HELP = "NAMESPACE/NAME of an InferenceService, or its name alone where only one has it"


def add(commands: Any) -> None:
    """Add the commands."""
    text = "what runs and what does not, and why: services, memory, downloads, cluster"
    status = add_command(commands, "status", _status, text)
    status.add_argument("--json", action="store_true", help="print JSON, the document that /status answers with")
    status.add_argument("--watch", action="store_true", help="go on, and show every change, until Ctrl-C")
    loader.add_flags(status)
    text = "why a service is as it is: the last decisions about it, with the numbers that were used"
    explain = add_command(commands, "explain", _explain, text)
    explain.add_argument("name", metavar="NAME", help=NAME_HELP)
    explain.add_argument("--json", action="store_true", help="print JSON, with the numbers")
    loader.add_flags(explain, STATE)
    logs = add_command(commands, "logs", _logs, "what an engine, or one of our own programs, wrote")
    ours = "; or controller, sidecar, apiserver, gateway, supervisord, power"
    logs.add_argument("name", metavar="NAME", help=NAME_HELP + ours)
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what it writes, until Ctrl-C")
    logs.add_argument(
        "-n",
        "--lines",
        type=_lines,
        default=LINES,
        metavar="LINES",
        help=f"how many of the last lines, or all [{LINES}]",
    )
    logs.add_argument("--previous", action="store_true", help="what it wrote before it crashed last")
    loader.add_flags(logs, STATE)
    text = "whether a model fits into the memory that is left on this Mac, and what would; reads only its header"
    fit = add_command(commands, "fit", _fit, text)
    fit.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    fit.add_argument("--ctx", type=int, metavar="N", help="spec.contextSize: tokens of all slots together")
    fit.add_argument("--slots", type=int, metavar="N", help="spec.parallelSlots [1]")
    fit.add_argument("--kv-type", default="f16", metavar="TYPE", help="spec.cacheTypeK and cacheTypeV [f16]")
    fit.add_argument("--json", action="store_true", help="print JSON")
    loader.add_flags(fit)
    text = "what is right and wrong with this Mac, its engines and its cluster, and what to do about it"
    doctor = add_command(commands, "doctor", _doctor, text)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    loader.add_flags(doctor)
    text = "how much controller, sidecar and gateway log from now on, without a restart of any"
    level = add_command(commands, "log-level", _log_level, text)
    words = (*LEVELS, SETTING)
    level.add_argument("level", choices=words, help=f"{', '.join(LEVELS)}; or {SETTING}: what --log-level says")
    loader.add_flags(level, STATE)


def _status(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cli import status as status_command

    status = status_command.Status(loader.settings_of(arguments), sys.stdout, say, arguments.json)
    return status.watch() if arguments.watch else status.once()


def _explain(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cli import explain
    from metal_supervisor.state.directory import StateDir

    settings = loader.settings_of(arguments)
    state = StateDir(settings.state_path)
    return explain.run(state, arguments.name, arguments.json, sys.stdout, say, settings.namespace)


def _lines(text: str) -> int | None:
    """A number of lines; None for all."""
    if text == "all":
        return None
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r:.40} is neither a number of lines nor all")
    return int(text)


def _logs(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cli import logs as logs_command
    from metal_supervisor.state.directory import StateDir

    order = logs_command.LogsOrder(arguments.name, arguments.lines, arguments.follow, arguments.previous)
    return logs_command.run(StateDir(loader.settings_of(arguments).state_path), order, sys.stdout, say)


def _fit(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cli import fit, model_source

    settings = loader.settings_of(arguments)
    try:
        found = model_source.resolve(settings, arguments.source, arguments.ctx)
    except (Bad, Unusable) as error:
        raise fit.CannotTell(str(error)) from None
    if found.note:
        say(found.note)
    question = model_source.question(found, arguments.ctx, arguments.slots, arguments.kv_type)
    return fit.main(settings, question, arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from metal_supervisor.doctor import command

    return command.main(arguments, os.environ)


def _log_level(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cli.services import is_up
    from metal_supervisor.state.directory import StateDir
    from metal_supervisor.state.doorbell import ring
    from metal_supervisor.state.kept_files import write_atomic

    state = loader.settings_of(arguments).state_path
    path = state / LEVEL_FILE
    try:
        if arguments.level == SETTING:
            path.unlink(missing_ok=True)
        else:
            write_atomic(path, f"{arguments.level}\n")
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}; see --state-dir") from None
    for name in ("controller", "sidecar", "gateway"):
        ring(state, name)
    if not is_up(StateDir(state)):
        say(f"nothing runs in {state} (--state-dir): this counts from its next start")
    return 0
