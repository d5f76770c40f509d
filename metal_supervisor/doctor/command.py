"""The command `doctor`: run the checks, print a line for each finding, exit with 1 if a check failed.

It works with broken settings too, because it checks them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence

from metal_supervisor.doctor import registry
from metal_supervisor.doctor.findings import Finding, report, sound, summary
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.settings import loader
from metal_supervisor.settings.loader import ConfigError, Settings
from metal_supervisor.spec.document import string
from metal_supervisor.spec.terminal_text import escaped
from metal_supervisor.state.reports import read_object


def settings_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Settings, str, str]:
    """(settings, their file, what is wrong with them) of the system that runs, or else of the file.

    Writes nothing. Raises ConfigError for an invalid flag, and if it is unclear which of several systems is meant.
    """
    problem = ""
    try:
        overrides = loader.overrides_from(arguments, environ)
    except ConfigError as error:
        overrides, problem = loader.overrides_from(arguments, {}), str(error)  # an invalid flag is a usage error
    try:
        found = loader.load(overrides, state_dir="")
    except ConfigError as error:  # a broken file, which may be one to try out beside a system that runs
        found, problem = Settings(**{"state_dir": "", **overrides.values}), str(error)
    if not found.state_dir:
        found = dataclasses.replace(found, state_dir=loader.found_state_dir(environ))
    state, file = found.state_path, overrides.config
    try:
        if not loader.system_in(state):
            return found, file, problem
        file = string(read_object(state / loader.OVERRIDES_FILE), "config")
        found = loader.load_saved(state)
    except ConfigError as error:
        file, problem = overrides.config or file, str(error)
        with contextlib.suppress(ConfigError):
            found = loader.load_good(state)[0]  # the last good ones
    return dataclasses.replace(found, **overrides.values), file, problem


def lines(findings: Sequence[Finding]) -> list[str]:
    """The report as text: one line per finding, its fix below, the summary last."""
    width = max((len(each.check) for each in findings), default=0)
    told = []
    for each in findings:
        told.append(f"{each.status:<4}  {each.check:<{width}}  {escaped(each.text)}")
        if each.fix and each.status != "ok":
            told.append(f"{'':<{6 + width}}  → {escaped(each.fix)}")
    return [*told, summary(findings)]


def main(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the command. Returns 0 if nothing failed, 1 if a check failed."""
    settings, file, problem = settings_of(arguments, environ)
    around = Surroundings(settings, config_file=file, config_problem=problem)
    logging.disable()  # problems are reported as findings, and not in the log too
    try:
        findings = registry.examine(around)
    finally:
        logging.disable(logging.NOTSET)
    body = {"ok": sound(findings), **report(findings)}
    print(json.dumps(body, indent=2) if arguments.json else "\n".join(lines(findings)))
    return int(not sound(findings))
