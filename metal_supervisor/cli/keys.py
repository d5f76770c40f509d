"""`metal-supervisor key add | list | remove | show`: the keys that the gateway asks for, and that of an engine."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from metal_supervisor.cli.command_parser import add_command, usable_path
from metal_supervisor.cli.terminal import NOT_FOUND, CommandError
from metal_supervisor.gateway import access
from metal_supervisor.gateway.access import AccessKey, BadKeys
from metal_supervisor.settings import loader
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.kept_files import write_atomic

HEAD = "# Keys of the gateway: NAME sha256:DIGEST [services=a,team/*] [per-minute=N] [at-once=N]\n"


def add(commands: Any) -> None:
    """Add the command."""
    text = "the keys that the gateway asks for (--gateway-keys); the file holds digests, never a key itself"
    key = commands.add_parser("key", help=text, description=text)
    actions = key.add_subparsers(dest="key_action", required=True, metavar="ACTION")
    for name, help_text in (
        ("add", "make a key and print it, this once"),
        ("list", "print names, services and limits"),
        ("remove", "let a key no longer in"),
    ):
        command = add_command(actions, name, _run, help_text)
        if name != "list":
            command.add_argument("name", metavar="NAME", help="name of the key, for logs and metrics")
        command.add_argument(
            "--file", type=usable_path, default="", metavar="FILE", help="the file of keys; default: --gateway-keys"
        )
        if name == "add":
            command.add_argument(
                "--services", metavar="LIST", help="services that it may use, as name, namespace/name or namespace/*"
            )
            command.add_argument("--per-minute", default="", metavar="N", help="most requests in a minute")
            command.add_argument("--at-once", default="", metavar="N", help="most requests at the same time")
        if name == "list":
            command.add_argument("--json", action="store_true", help="print JSON")
        loader.add_flags(command, ("state_dir", "gateway_keys"))
    command = add_command(actions, "show", _show, "print the API key that the engine of a service requires")
    command.add_argument("name", metavar="NAME", help="name of the service, or NAMESPACE/NAME")
    loader.add_flags(command, ("state_dir",))


def _run(arguments: argparse.Namespace) -> int:
    named = arguments.file or loader.settings_of(arguments).gateway_keys
    if not named:
        text = "no file of keys is set; name one with --file, and give it to the gateway with --gateway-keys"
        raise CommandError(text)
    # The file itself: a link to it, as into a directory that is shared, must not be replaced.
    path = Path(named).expanduser().resolve()
    try:
        if arguments.key_action == "list":
            return _list(path, sys.stdout, arguments.json)
        with _alone(path):
            return _add(path, arguments, sys.stdout) if arguments.key_action == "add" else _remove(path, arguments.name)
    except (BadKeys, OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from None


def engine_keys(state: StateDir, name: str) -> dict[str, str]:
    """API keys that engines on this Mac require, by NAMESPACE/NAME, of the services of a name, qualified or not."""
    records = [each for each in state.records()[0].values() if name in (each.name, "/".join(each.owner))]
    keys = {"/".join(each.owner): state.key_of(each.program)[1] for each in records}
    return {owner: key for owner, key in keys.items() if key}


def _show(arguments: argparse.Namespace) -> int:
    name, found = arguments.name, engine_keys(StateDir(loader.settings_of(arguments).state_path), arguments.name)
    if len(found) > 1:
        raise CommandError(f"{name} is the name of {len(found)} services; name one: {', '.join(sorted(found))}")
    if not found:
        text = f"no engine on this Mac requires a key for {name!r:.80}; metal-supervisor list shows the services"
        raise CommandError(text, NOT_FOUND)
    print(*found.values())
    return 0


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold off other commands that change the file; raises OSError. The lock is its directory's, as it is replaced."""
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _list(path: Path, out: TextIO, as_json: bool) -> int:
    keys = access.parse(path.read_text("utf-8"))
    if as_json:
        rows = [
            {"name": key.name, "services": key.services, "perMinute": key.per_minute, "atOnce": key.at_once}
            for key in keys
        ]
        out.write(json.dumps(rows, indent=2) + "\n")
        return 0
    for key in keys:
        words = access.line_of(key).split()
        out.write(" ".join([words[0], *words[2:]]) + "\n")
    return 0


def _add(path: Path, arguments: argparse.Namespace, out: TextIO) -> int:
    """Append the line of a fresh key, and print the key."""
    if not access.is_name(arguments.name):  # in the file, blanks end a name, and # begins a comment
        text = "NAME must be of letters, digits, '.', '_' and '-', at most 63, and begin with a letter or digit"
        raise BadKeys(f"{text}, not {arguments.name!r:.80}")
    text = path.read_text("utf-8") if path.exists() else ""
    if any(each.name == arguments.name for each in access.parse(text)):
        raise BadKeys(f"there is a key called {arguments.name} already; remove it, or choose another name")
    secret = access.new_key()
    written = ("--per-minute", arguments.per_minute), ("--at-once", arguments.at_once)
    limits = (access.limit(text or None, flag) for flag, text in written)
    services = access.services_of(arguments.services, "--services")
    line = access.line_of(AccessKey(arguments.name, access.digest_of(secret), services, *limits))
    whole = f"{text or HEAD}{'' if text.endswith(chr(10)) or not text else chr(10)}{line}\n"
    access.parse(whole)
    write_atomic(path, whole, as_before=True)
    out.write(f"{secret}\n")
    return 0


def _remove(path: Path, name: str) -> int:
    text = path.read_text("utf-8")
    if name not in {key.name for key in access.parse(text)}:
        raise CommandError(f"{path}: there is no key called {name}; see metal-supervisor key list", NOT_FOUND)
    kept = [line for line in text.splitlines(keepends=True) if line.split()[:1] != [name]]
    write_atomic(path, "".join(kept), as_before=True)
    return 0
