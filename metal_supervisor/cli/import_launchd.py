"""`metal-supervisor import-launchd`: converts the launchd plist of LLMKube's own Mac agent to a settings file.

The plist goes through install/go_agent.py and then through our own checks, so the printed file is valid. A flag that
cannot be taken over is named in it, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import plistlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from metal_supervisor.cli.command_parser import add_command, usable_path
from metal_supervisor.cli.terminal import FAILED, OK, USAGE, CommandError, say
from metal_supervisor.install import go_agent
from metal_supervisor.install.go_agent import GoAgentJob, Import, Remark
from metal_supervisor.settings import loader

PLIST_BYTES = 1 << 20
"""Largest plist read; no launchd job's is larger."""
TEXT_CHARS = 400
KINDS: dict[type, str] = {dict: "a dictionary", list: "an array", str: "a string", bool: "a boolean", int: "a number"}
TEMPLATE_MARKS = ("__HOME__", "__LLMKUBE_USER__")
EXITS = "exits with 0 if all could be taken over, 1 if something was refused, 2 if there is nothing to read or write"


class BadPlist(Exception):
    """A file that is no plist of the agent; the message names the key, and what it should hold."""


def add(commands: Any) -> None:
    """Add the command."""
    text = "turn the launchd plist of LLMKube's Go agent into a settings file"
    command = add_command(commands, "import-launchd", _run, text, f"; {EXITS}")
    command.add_argument(
        "plist", type=usable_path, metavar="PLIST", help="e.g. ~/Library/LaunchAgents/com.llmkube.metal-agent.plist"
    )
    command.add_argument(
        "--output", type=usable_path, metavar="FILE", help="file to write, for your eyes only; default: print it"
    )
    command.add_argument("--force", action="store_true", help="overwrite")


def _run(arguments: argparse.Namespace) -> int:
    output = Path(arguments.output).expanduser() if arguments.output else None
    if output and (output.exists() or output.is_symlink()) and not arguments.force:
        raise CommandError(f"--output: {output} exists; name another file, or overwrite it with --force", USAGE)
    plist = Path(arguments.plist).expanduser()
    try:
        found = checked(go_agent.translate(read(plist)))
    except BadPlist as bad:
        raise CommandError(f"{plist}: {bad}", USAGE) from None
    if output is None:
        print(text_of(found), end="")
    else:
        _write(output, text_of(found))
    for kind, remarks in (("warning", found.warnings), ("refused", found.refused)):
        for each in remarks:
            say(f"{kind}: {each.subject}: {each.text}")
    _tell_left()
    return FAILED if found.refused else OK


def _tell_left() -> None:
    """Name the engines that the agent left behind, which hold memory and ports beside ours."""
    from metal_supervisor.host import processes

    for each in processes.left_behind():
        text = f"was left behind by the agent; end it with: kill {each.pid}"
        say(f"warning: {each.runtime} on port {each.port} {text}")


def _write(path: Path, text: str) -> None:
    from metal_supervisor.state.kept_files import write_atomic

    try:
        write_atomic(path, text)
        path.chmod(0o600)
    except OSError as error:
        raise CommandError(f"--output: cannot write {path}: {error.strerror}", USAGE) from None


def read(path: Path) -> GoAgentJob:
    """The job of a launchd plist, XML or binary. Raises BadPlist."""
    try:
        with path.open("rb") as file:
            raw = file.read(PLIST_BYTES + 1)
    except OSError as error:
        raise BadPlist(f"cannot read: {error.strerror}") from None
    if len(raw) > PLIST_BYTES:
        raise BadPlist(f"is larger than {PLIST_BYTES} bytes, which no launchd plist is")
    try:
        content = plistlib.loads(raw)
    # What plistlib lets through of a broken file depends on how it is broken, and on Python's version.
    except (ExpatError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise BadPlist(f"is not a plist that can be read ({why:.200}); see `plutil -lint`") from None
    return _job_of(content)


def _job_of(content: Any) -> GoAgentJob:
    if not isinstance(content, dict):
        raise BadPlist(f"must hold a dictionary of launchd's keys, not {_kind(content)}")
    if "ProgramArguments" not in content:
        raise BadPlist("has no ProgramArguments; give the plist that starts LLMKube's metal-agent")
    words = _typed(content["ProgramArguments"], list, "ProgramArguments")
    if not words:
        raise BadPlist("ProgramArguments is empty; it must hold the agent's command line")
    for number, word in enumerate(words):
        _typed(word, str, f"ProgramArguments[{number}]")
    environment = _typed(content.get("EnvironmentVariables", {}), dict, "EnvironmentVariables")
    for name, value in environment.items():
        _typed(name, str, "a name in EnvironmentVariables")
        _typed(value, str, f"EnvironmentVariables[{name!r:.80}]")
    directory = _typed(content.get("WorkingDirectory", "/"), str, "WorkingDirectory")
    if "metal-agent" not in words[0].rpartition("/")[2]:
        text = f"ProgramArguments[0] is {words[0]!r:.80}, not LLMKube's metal-agent; give the plist that starts it"
        raise BadPlist(text)
    return GoAgentJob(tuple(words), environment, directory)


def _kind(value: Any) -> str:
    return KINDS.get(type(value), f"a {type(value).__name__}")


def _typed(value: Any, kind: type, key: str) -> Any:
    """The value under a key of the plist. Raises BadPlist if it is of another kind, or a template's."""
    if not isinstance(value, kind):
        raise BadPlist(f"{key} must be {KINDS[kind]}{'' if kind is str else ' of strings'}, not {_kind(value)}")
    if isinstance(value, str) and (mark := next((each for each in TEMPLATE_MARKS if each in value), "")):
        raise BadPlist(f"{key} holds {mark}: this is a template; the installed plist is in ~/Library/LaunchAgents")
    return value


def checked(found: Import) -> Import:
    """The import after our own checks: invalid values are among the refused, the rest have the settings' types."""
    for name, said in list(found.settings.items()):
        origin = " and ".join(said.origins) or name
        try:
            found.settings[name] = replace(said, value=loader.checked(name, said.value, origin))
        except loader.ConfigError as error:
            text = str(error).removeprefix(f"{origin}: ")
            found.refused.append(Remark(origin, text if len(text) <= TEXT_CHARS else text[:TEXT_CHARS] + "…"))
            del found.settings[name]
    return found


def text_of(found: Import) -> str:
    """The settings file, in TOML, with a comment on the origin of each line."""
    lines = ["# Settings of metal-supervisor, from the launchd plist of LLMKube's own agent (import-launchd).", ""]
    for name, said in found.settings.items():
        source = f"from {' and '.join(said.origins)}" if said.origins else ""
        # JSON's escapes are TOML's, but for characters written as two halves.
        value = json.dumps(said.value, ensure_ascii=False)
        lines += [f"# {': '.join(filter(None, (source, said.note)))}", f"{name} = {value}", ""]
    for title, remarks in (
        ("Refused; see to these yourself:", found.refused),
        ("Not needed:", found.unneeded),
        ("To look at:", found.warnings),
    ):
        if remarks:
            lines += [f"# {title}", *(f"#   {each.subject}: {each.text}" for each in remarks), ""]
    return "\n".join(lines)
