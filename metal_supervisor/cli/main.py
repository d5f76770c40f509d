"""The command line: `metal-supervisor run | boot | status | cordon | …`; see `--help`."""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import io
import json
import logging
import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from metal_supervisor import __version__
from metal_supervisor.cli import programs
from metal_supervisor.cli.command_parser import CommandParser, add_command, state_dir, usable_path
from metal_supervisor.cli.terminal import INTERRUPTED, CommandError, discard_output, output_problem, say
from metal_supervisor.settings import checks, loader
from metal_supervisor.spec.terminal_text import printable
from metal_supervisor.spec.user_error import UserError

FOREIGN = frozenset({errno.EACCES, errno.EPERM})
"""Errors of a path that is another user's."""
UNUSABLE = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""Errors of a path that cannot be one, or leads to something else than a file."""


def _load_runtime_checks() -> None:
    """Load the runtimes for the settings that name some; it takes 20 ms, and few systems have such a setting."""
    from metal_supervisor.runtimes import setting_checks  # noqa: F401


def _running_systems() -> list[Path]:
    from metal_supervisor.host import processes

    return processes.systems()


checks.load_runtime_checks = _load_runtime_checks  # settings are read from here on
loader.running_systems = _running_systems


def _end(command: str, text: str) -> None:
    """Report why a command ends: in the log if it is a program that has one by now, else on the terminal."""
    if command in programs.PROGRAMS and logging.getLogger().handlers:
        logging.getLogger(command).error("the program cannot go on", extra={"why": text})
    else:
        say(text)


def _settings(arguments: argparse.Namespace) -> tuple[loader.Settings, loader.Overrides]:
    overrides = loader.overrides_from(arguments, os.environ)
    return loader.load(overrides), overrides


def _run(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cli import foreground

    settings, overrides = _settings(arguments)
    return foreground.run(settings, overrides, Path(arguments.apply).absolute() if arguments.apply else None)


def _boot(arguments: argparse.Namespace) -> int:
    from metal_supervisor.controller import boot

    try:
        settings, overrides = _settings(arguments)
    except loader.ConfigError as error:
        # No user is there to fix a broken file when a Mac starts, so it serves what it served before.
        overrides = loader.overrides_from(arguments, os.environ)
        state = Path(str(overrides.values.get("state_dir", loader.Settings().state_dir))).expanduser()
        settings, _ = loader.load_good(state.absolute())
        say(f"{error}; going on with the last settings that were in order")
    boot.boot(settings, overrides, say)
    return 1


def _upgrade(arguments: argparse.Namespace) -> int:
    """Have this installation take over a running system."""
    from metal_supervisor.install import upgrade

    return upgrade.upgrade(_existing(arguments), say)


def _existing(arguments: argparse.Namespace) -> Path:
    """The state directory of the system that a command addresses. Raises ConfigError."""
    return Path(arguments.state_dir or loader.found_state_dir(os.environ)).expanduser().resolve()


def _cordon(arguments: argparse.Namespace) -> int:
    from metal_supervisor.placement import cordon
    from metal_supervisor.state.directory import StateDir

    state = _existing(arguments)
    settings, _ = loader.load_good(state)
    if not settings.uses_claims:
        text = "this Mac is the only one: without a cluster, or with claims = off, nothing can move to another"
        raise CommandError(text)
    directory = StateDir(state)
    if arguments.command == "drain":
        return cordon.drain(directory, arguments.timeout, print)
    cordon.say(directory, arguments.command == "cordon", print)
    return 0


def _kubeconfig_command(arguments: argparse.Namespace) -> int:
    from metal_supervisor.cluster import accounts

    print("\n".join(accounts.create(accounts.order_from(arguments))))
    return 0


def _add_kubeconfig(commands: Any) -> None:
    help_text = "write a kubeconfig and token for one Mac's ServiceAccount, with an administrator's kubeconfig"
    command = add_command(commands, "kubeconfig", _kubeconfig_command, help_text)
    for flag, default, text in (
        ("--server", "", "URL of the API server as the Mac reaches it; default: the administrator's"),
        ("--namespace", "default", "namespace of the ServiceAccount [default]"),
        ("--context", "", "context within the administrator's kubeconfig; default: its current one"),
        ("--duration", "720h", "how long the token holds, if the server agrees; the Mac renews it in time [720h]"),
    ):
        command.add_argument(flag, default=default, help=text)
    command.add_argument("--service-account", required=True, metavar="NAME", help="see conf/rbac/mac.yaml")
    command.add_argument(
        "--from",
        dest="source",
        type=usable_path,
        default="~/.kube/config",
        metavar="FILE",
        help="the administrator's kubeconfig [~/.kube/config]",
    )
    command.add_argument(
        "--output", required=True, type=usable_path, metavar="FILE", help="file to write; its token goes beside it"
    )
    command.add_argument("--force", action="store_true", help="overwrite")


def _version(arguments: argparse.Namespace) -> int:
    if not arguments.json:
        print(f"metal-supervisor {__version__}")
        return 0
    import platform
    from importlib.metadata import version

    packages = {name: version(name) for name in ("supervisor", "kubernetes", "flask")}
    print(json.dumps({"version": __version__, "python": platform.python_version(), **packages}, indent=2))
    return 0


def _add_system(commands: Any) -> None:
    command = add_command(commands, "run", _run, "everything in this terminal, until Ctrl-C")
    text = "manifest to apply to the embedded API, once per content and state directory"
    command.add_argument("--apply", metavar="FILE", help=text)
    loader.add_flags(command)
    # Commands without a help text are internal: they work, and neither --help nor completion offers them.
    command = commands.add_parser("boot", description="prepare, then become supervisord: what launchd runs")
    loader.add_flags(command)
    command.set_defaults(action=_boot)


def _add_cordon(commands: Any) -> None:
    for name, help_text in (
        ("cordon", "take nothing new on this Mac; what it runs goes on"),
        ("uncordon", "take part again"),
        ("drain", "hand what this Mac runs over to other Macs, and wait until they serve it"),
    ):
        command = add_command(commands, name, _cordon, help_text)
        command.add_argument("--state-dir", type=state_dir)
        if name == "drain":
            command.add_argument("--timeout", type=int, default=600, help="seconds to wait [600]")


def _add_upgrade(commands: Any) -> None:
    text = "let a running system go on with this installation; no engine is touched"
    command = add_command(commands, "upgrade", _upgrade, text)
    command.add_argument("--state-dir", type=state_dir)


def _add_version(commands: Any) -> None:
    command = add_command(commands, "version", _version, "print the version")
    command.add_argument("--json", action="store_true", help="print JSON, with the versions that matter")


def _add_completion(commands: Any) -> None:
    from metal_supervisor.cli import completion

    completion.add(commands, parser)


def _by(module: str) -> Callable[[Any], None]:
    """Function that adds the commands of a module of this package."""
    return lambda commands: importlib.import_module(f"{__package__}.{module}").add(commands)


COMMANDS: Mapping[tuple[str, ...], Callable[[Any], None]] = {
    ("serve", "chat", "list", "stop", "start", "rm"): _by("use"),
    ("run", "boot"): _add_system,
    tuple(programs.PROGRAMS): programs.add,
    ("cordon", "uncordon", "drain"): _add_cordon,
    ("upgrade",): _add_upgrade,
    ("status", "explain", "logs", "fit", "doctor", "log-level"): _by("look"),
    ("kubeconfig",): _add_kubeconfig,
    ("pull", "models"): _by("model_flags"),
    ("key",): _by("keys"),
    ("install", "uninstall"): _by("install"),
    ("completion",): _add_completion,
    ("version",): _add_version,
}
"""Names of commands -> function that adds them to a parser."""


def parser(word: str = "") -> CommandParser:
    """The argument parser, every setting a flag of the commands that take settings.

    `word`: if it is a command, most others are left out, which take longer than what many a command does.
    """
    top = CommandParser(prog="metal-supervisor", description="Kubernetes models, native on this Mac.")
    top.add_argument("--version", action="version", version=f"metal-supervisor {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in [add for names, add in COMMANDS.items() if word in names] or COMMANDS.values():
        add(commands)
    top.with_help_all()
    return top


def _carried_out(parsed: argparse.Namespace) -> int:
    """Exit code of a command, after its complaint if it cannot be carried out."""
    if parsed.command not in programs.PROGRAMS:
        gc.enable()  # a program does so once all of its modules are loaded
    try:
        return int(parsed.action(parsed))
    except CommandError as error:
        say(printable(str(error)))  # it may quote an engine or a manifest
        return error.code


def _reader_left() -> bool:
    """True if the reader of stdout has left, as in `metal-supervisor … | head`; then discard what is not yet printed.

    False if the broken pipe was a socket's.
    """
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not output.poll(0):
        return False
    discard_output()
    return True


def _open_streams() -> None:
    """Have no closed stdin or stderr, and no character that a stream's encoding lacks, end a command."""
    sys.stdin = sys.stdin or Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _has_home() -> bool:
    """False for a container's user that has no account, and no HOME either."""
    try:
        Path.home()
    except RuntimeError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. 2: wrong usage, 3: not running, 78: bad configuration."""
    _open_streams()
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser().print_help(sys.stderr)
        return 2
    if not words[0].startswith("-") and not _has_home():
        say("this user has no home directory: there is no account of it, and no HOME; set HOME")
        return loader.ConfigError.code
    parsed = parser(words[0]).parse_args(words)
    if sys.stdout is None and parsed.command not in (*programs.PROGRAMS, "boot"):
        say("standard output is closed, so that nothing could be shown; nothing was done")
        return 1
    try:
        code = _carried_out(parsed)
        print(end="", flush=True)
        return code
    except BrokenPipeError:
        if not _reader_left():
            raise
        return 0
    except UserError as error:
        _end(parsed.command, str(error))
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if problem := output_problem(error):
            say(problem)
            return 1
        # The log of a program rather has the traceback.
        at_a_terminal = parsed.command not in programs.PROGRAMS
        if at_a_terminal and error.errno in (errno.ENOSPC, errno.EDQUOT):
            say(f"{error.filename or 'a file'} cannot be written: {error.strerror}; make room, then run this again")
            return 1
        if at_a_terminal and error.errno in FOREIGN | UNUSABLE and error.filename:
            yours = "run this as its owner, make it yours (chown, chmod)"
            advice = yours if error.errno in FOREIGN else "move what is in the way"
            say(f"{error.filename}: {error.strerror}; {advice}, or name another")
            return loader.ConfigError.code
        raise
