"""Flags of `metal-supervisor install` and `uninstall`, and the calls behind them."""

from __future__ import annotations

import argparse
import grp
import os
import pwd
import sys
from pathlib import Path
from typing import Any

from metal_supervisor.cli.command_parser import add_command, state_dir, usable_path
from metal_supervisor.cli.terminal import say
from metal_supervisor.settings import loader


def add(commands: Any) -> None:
    """Add both commands."""
    text = "make this Mac run it from its next boot on, and now; again, to change what was said"
    command = add_command(commands, "install", _install, text)
    which = command.add_mutually_exclusive_group()
    which.add_argument("--embedded", action="store_true", help="with a Kubernetes API of its own")
    which.add_argument(
        "--cluster",
        type=usable_path,
        metavar="KUBECONFIG",
        help="with that cluster; the file is copied, for you alone",
    )
    command.add_argument("--agent", action="store_true", help="as a LaunchAgent: no sudo; runs while you are logged in")
    command.add_argument("--force", action="store_true", help="write launchd's file anew, though it was edited by hand")
    loader.add_flags(command)
    remove = add_command(commands, "uninstall", _uninstall, "stop it, and take it out of this Mac; weights stay")
    remove.add_argument("--purge", action="store_true", help="settings, logs and the embedded API's objects too")
    remove.add_argument("--state-dir", type=state_dir, default=loader.usual_state_dir(os.environ))
    for each in (command, remove):
        each.add_argument("--dry-run", action="store_true", help="only print every file and command")


def _machine(dry_run: bool) -> Any:
    """This Mac, for the user who runs the command. Raises InstallError."""
    from metal_supervisor.host import commands
    from metal_supervisor.install.steps import InstallError, Machine

    if sys.platform != "darwin" and not dry_run:
        text = "launchd is only on a Mac; here: metal-supervisor run, or `boot` under a service manager of your own"
        raise InstallError(f"{text}. --dry-run shows what a Mac would get")
    if os.getuid() == 0 and not dry_run:
        raise InstallError("not as root: run it as the user whose models these are; it asks for sudo by itself")
    try:  # never LOGNAME and its like, which another user's shell may have left there
        account = pwd.getpwuid(os.getuid())
        group = grp.getgrgid(account.pw_gid).gr_name
    except KeyError as error:
        raise InstallError(f"this user is in no directory of users, and launchd wants a name: {error}") from None
    return Machine(Path("/"), Path.home(), account.pw_name, group, os.getuid(), commands.run_here)


def _install(arguments: argparse.Namespace) -> int:
    from metal_supervisor.install import install, plan

    overrides = loader.overrides_from(arguments, os.environ)
    machine = _machine(arguments.dry_run)
    order = plan.InstallOrder(
        kubeconfig=Path(arguments.cluster).expanduser().absolute() if arguments.cluster else None,
        embedded=arguments.embedded,
        values=overrides.values,
        config=Path(overrides.config) if overrides.config else None,
        agent=arguments.agent,
        force=arguments.force,
    )
    found = plan.plan(order, machine)
    if arguments.dry_run:
        install.show(found, machine, print)
        return 0
    code = install.install(found, machine, say)
    if code == 0:
        print("\n".join(install.summary(found, machine)))
    return code


def _uninstall(arguments: argparse.Namespace) -> int:
    from metal_supervisor.install import uninstall

    machine = _machine(arguments.dry_run)
    found = uninstall.find(machine, Path(arguments.state_dir).expanduser().absolute())
    if not found.places and not found.ours:
        say("there is nothing to uninstall")
        return 0
    if arguments.dry_run:
        uninstall.show(found, machine, arguments.purge, print)
        return 0
    uninstall.uninstall(found, machine, arguments.purge, say)
    return 0
