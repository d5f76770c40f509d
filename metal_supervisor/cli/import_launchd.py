"""`metal-supervisor import-launchd`: converts the launchd plist of LLMKube's own Mac agent to a settings file.

The plist goes through install/go_agent.py and then through our own checks, so the printed file is valid. A flag that
cannot be taken over is named in it, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import plistlib
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from metal_supervisor.cli.command_parser import add_command
from metal_supervisor.cli.terminal import FAILED, OK, USAGE, CommandError, say
from metal_supervisor.install import go_agent
from metal_supervisor.install.go_agent import GoAgentJob, Import, Remark
from metal_supervisor.settings import loader

PLIST_BYTES = 1 << 20
"""Largest plist read; no launchd job's is larger."""
TEXT_CHARS = 400
TEMPLATE_MARKS = ("__HOME__", "__LLMKUBE_USER__")
EXITS = "exits with 0 if all could be taken over, 1 if something was refused, 2 if there is nothing to read or write"


class BadPlist(CommandError):
    """A file that is no plist of the agent; the message names the key, and what it should hold."""

    def __init__(self, text: str) -> None:
        super().__init__(text, USAGE)


def add(commands: Any) -> None:
    """Add the command."""
    text = "turn the launchd plist of LLMKube's Go agent into a settings file"
    command = add_command(commands, "import-launchd", _run, text, f"; {EXITS}")
    command.add_argument("plist", metavar="PLIST", help="e.g. ~/Library/LaunchAgents/com.llmkube.metal-agent.plist")
    command.add_argument("--output", metavar="FILE", help="file to write, for your eyes only; default: print it")
    command.add_argument("--force", action="store_true", help="overwrite")


def _run(arguments: argparse.Namespace) -> int:
    output = Path(arguments.output).expanduser() if arguments.output else None
    if output and (output.exists() or output.is_symlink()) and not arguments.force:
        raise CommandError(f"--output: {output} exists; name another file, or overwrite it with --force", USAGE)
    found = checked(go_agent.translate(read(Path(arguments.plist).expanduser())))
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
    from metal_supervisor.host import machine
    from metal_supervisor.host.left_engines import left_by_agent
    from metal_supervisor.launch import MARK

    for each in left_by_agent(machine.abandoned(), MARK):
        text = f"{each.runtime} on port {each.port} was left behind by the agent; end it with: kill {each.pid}"
        say(f"warning: {text}")


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
        raise BadPlist(f"{path}: cannot read: {error.strerror}") from None
    if len(raw) > PLIST_BYTES:
        raise BadPlist(f"{path}: is larger than {PLIST_BYTES} bytes, which no launchd plist is")
    try:
        content = plistlib.loads(raw)
    # What plistlib lets through of a broken file depends on how it is broken, and on Python's version.
    except (ExpatError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise BadPlist(f"{path}: is not a plist that can be read ({why:.200}); see `plutil -lint`") from None
    return job_of(content, str(path))


def job_of(content: Any, origin: str) -> GoAgentJob:
    """The job that a plist describes. Raises BadPlist, which begins with `origin` and names the key."""
    if not isinstance(content, dict):
        raise BadPlist(f"{origin}: must hold a dictionary of launchd's keys, not {_kind(content)}")
    words = _typed(content, "ProgramArguments", list, None, origin)
    if not words:
        raise BadPlist(f"{origin}: ProgramArguments is empty; it must hold the agent's command line")
    for number, word in enumerate(words):
        _text(word, f"ProgramArguments[{number}]", origin)
    environment = _typed(content, "EnvironmentVariables", dict, {}, origin)
    for name, value in environment.items():
        _text(name, "a name in EnvironmentVariables", origin)
        _text(value, f"EnvironmentVariables[{name!r:.80}]", origin)
    directory = _text(content.get("WorkingDirectory", "/"), "WorkingDirectory", origin)
    if "metal-agent" not in words[0].rpartition("/")[2]:
        text = f"ProgramArguments[0] is {words[0]!r:.80}, not LLMKube's metal-agent; give the plist that starts it"
        raise BadPlist(f"{origin}: {text}")
    return GoAgentJob(tuple(words), environment, directory)


def _kind(value: Any) -> str:
    names = {dict: "a dictionary", list: "an array", str: "a string", bool: "a boolean", int: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")


def _typed(content: dict[str, Any], key: str, wanted: type, default: Any, origin: str) -> Any:
    if key not in content and default is None:
        raise BadPlist(f"{origin}: has no {key}; give the plist that starts LLMKube's metal-agent")
    value = content.get(key, default)
    if not isinstance(value, wanted):
        name = "an array of strings" if wanted is list else "a dictionary of strings"
        raise BadPlist(f"{origin}: {key} must be {name}, not {_kind(value)}")
    return value


def _text(value: Any, key: str, origin: str) -> str:
    if not isinstance(value, str):
        raise BadPlist(f"{origin}: {key} must be a string, not {_kind(value)}")
    if mark := next((each for each in TEMPLATE_MARKS if each in value), ""):
        where = "the installed plist is in ~/Library/LaunchAgents"
        raise BadPlist(f"{origin}: {key} holds {mark}: this is a template; {where}")
    return value


def checked(found: Import) -> Import:
    """The import after our own checks: invalid values are among the refused, the rest have the settings' types."""
    accepted = {}
    for name, said in found.settings.items():
        origin = " and ".join(said.origins) or name
        try:
            value = loader.checked(name, said.value, origin)
        except loader.ConfigError as error:
            text = str(error).removeprefix(f"{origin}: ")
            found.refused.append(Remark(origin, text if len(text) <= TEXT_CHARS else text[:TEXT_CHARS] + "…"))
        else:
            accepted[name] = go_agent.Said(name, value, said.origins, said.note)
    return Import(accepted, found.unneeded, found.refused, found.warnings)


def text_of(found: Import) -> str:
    """The settings file, in TOML, with a comment on the origin of each line."""
    lines = ["# Settings of metal-supervisor, from the launchd plist of LLMKube's own agent (import-launchd).", ""]
    for said in found.settings.values():
        source = f"from {' and '.join(said.origins)}" if said.origins else ""
        # JSON's escapes are TOML's, but for characters written as two halves.
        value = json.dumps(said.value, ensure_ascii=False)
        lines += [f"# {': '.join(filter(None, (source, said.note)))}", f"{said.setting} = {value}", ""]
    for title, remarks in (
        ("Refused; see to these yourself:", found.refused),
        ("Not needed:", found.unneeded),
        ("To look at:", found.warnings),
    ):
        if remarks:
            lines += [f"# {title}", *(f"#   {each.subject}: {each.text}" for each in remarks), ""]
    return "\n".join(lines)
