"""The command `doctor`: run the checks, print a line for each finding, exit with 1 if a check failed.

It works with broken settings too, because it checks them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from metal_supervisor.doctor import bundle, registry
from metal_supervisor.doctor.findings import Finding, report, sound, summary
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.settings import loader
from metal_supervisor.settings.loader import ConfigError, Overrides, Settings
from metal_supervisor.spec.document import string
from metal_supervisor.spec.terminal_text import escaped
from metal_supervisor.state.reports import read_object

WELL, FAILED, USAGE = 0, 1, 2
Say = Callable[[str], None]


def settings_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Settings, str, str]:
    """(settings, their file, what is wrong with them) of the system that runs, or else of the file.

    Writes nothing. Raises ConfigError for an invalid flag.
    """
    problem = ""
    try:
        overrides = loader.overrides_from(arguments, environ)
    except ConfigError as error:
        overrides, problem = loader.overrides_from(arguments, {}), str(error)  # an invalid flag is a usage error
    given = dict(overrides.values)
    usual = {"state_dir": loader.found_state_dir(environ)}
    state = Settings(**{**usual, **given}).state_path
    with contextlib.suppress(ConfigError):
        state = loader.load(overrides, **usual).state_path  # the file may name another
    try:
        if not loader.system_in(state):
            return loader.load(overrides, **usual), overrides.config, problem
        if overrides.config:
            problem = _problem_of(overrides) or problem  # of a file that is to be tried out
        return dataclasses.replace(loader.load_saved(state), **given), _file_of(state), problem
    except ConfigError as error:
        return _in_spite_of(state, overrides), overrides.config or _file_of(state), str(error)


def _problem_of(overrides: Overrides) -> str:
    try:
        loader.load(overrides)
    except ConfigError as error:
        return str(error)
    return ""


def _in_spite_of(state: Path, overrides: Overrides) -> Settings:
    """The last good settings, or else the defaults, overridden by flags and environment."""
    try:
        found, _ = loader.load_good(state)
    except ConfigError:
        found = Settings(state_dir=str(state))
    return dataclasses.replace(found, **overrides.values)


def _file_of(state: Path) -> str:
    """Path of the settings file of the system with this state directory, "" without one."""
    return string(read_object(state / loader.OVERRIDES_FILE), "config")


def lines(findings: Sequence[Finding]) -> list[str]:
    """The report as text: one line per finding, its fix below, the summary last."""
    width = max((len(each.check) for each in findings), default=0)
    told = []
    for each in findings:
        told.append(f"{each.status:<4}  {each.check:<{width}}  {escaped(each.text)}")
        if each.fix and each.status != "ok":
            told.append(f"{'':<{6 + width}}  → {escaped(each.fix)}")
    return [*told, summary(findings)]


def body(findings: Sequence[Finding]) -> str:
    """The report as JSON."""
    return json.dumps({"ok": sound(findings), **report(findings)}, indent=2)


def main(arguments: argparse.Namespace, environ: Mapping[str, str], say: Say) -> int:
    """Run the command. Returns 0 if nothing failed, 1 if a check failed, 2 if the archive could not be written."""
    settings, file, problem = settings_of(arguments, environ)
    around = Surroundings(settings, config_file=file, config_problem=problem)
    logging.disable()  # problems are reported as findings, and not in the log too
    try:
        findings = registry.examine(around)
    finally:
        logging.disable(logging.NOTSET)
    print(body(findings) if arguments.json else "\n".join(lines(findings)))
    if arguments.bundle is not None:
        target = Path(arguments.bundle).expanduser().absolute()
        try:
            count = bundle.write(target, around, findings)
        except bundle.NotWritten as error:
            say(str(error))
            return USAGE
        say(f"wrote {target}, {count} files; look through it before you show it to anybody")
    return WELL if sound(findings) else FAILED
