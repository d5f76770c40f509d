#!/usr/bin/env python3
"""Everything about metal_supervisor that only a Mac can prove, in one command that writes one report.

Nobody who wrote it had a Mac. Each check takes care of itself: one that fails, crashes or cannot be made ends no other,
and what it started is gone when it is over. The report, JSON and the same as Markdown, names no user, host or address.

    python -m tests.support.mac.mac_acceptance [--hosted] [--only NAME,..] [--list] [--output FILE.json]

Exit code 0 if nothing failed, 1 if something did, 2 if it is not called rightly or this is no Mac.
"""

from __future__ import annotations

import argparse
import getpass
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from metal_supervisor import __version__
from metal_supervisor.host import commands, darwin_memory
from metal_supervisor.memory import machine_memory
from metal_supervisor.state.kept_files import write_atomic
from tests.support.mac import mac_report
from tests.support.mac.mac_checks import CHECKS, Check, listing
from tests.support.mac.mac_kit import Kit, Options, Password, workplace
from tests.support.mac.mac_report import FAIL, SKIPPED, Redactor, Result, Sheet, Skip, outcome_of

INTERRUPTED = "the run was ended before this"
TRACE_LINES = 12
Say = Callable[[str], None]


class Ended(KeyboardInterrupt):
    """The run is to end: Ctrl-C, or a signal."""


def perform(check: Check, kit: Kit) -> Result:
    """Makes one check and undoes what it did; raises nothing. `kit.ended` says afterwards whether to go on."""
    sheet, began, outcome, why = Sheet(), time.monotonic(), "", ""
    try:
        with kit.directory_for(check.name):
            check.run(kit, sheet)
    except Skip as skip:
        outcome, why = SKIPPED, str(skip)
    except AssertionError as error:
        sheet.claim(False, str(error) or "an assertion")
    except KeyboardInterrupt:
        outcome, why, kit.ended = SKIPPED, "the run was ended during this", True
    except Exception as error:  # noqa: BLE001 - a check that crashes must not end the others
        sheet.claim(False, f"the check crashed: {type(error).__name__}: {error}")
        sheet.show("traceback", "".join(traceback.format_exception(error)[-TRACE_LINES:]))
    for problem in kit.tidy():
        sheet.claim(False, f"it could not be undone: {problem}")
    if outcome != SKIPPED or not all(holds for holds, _ in sheet.claims):
        outcome = outcome_of(sheet)
        why = "; ".join(text for holds, text in sheet.claims if not holds) or why
    return result_of(check, outcome, why, sheet, time.monotonic() - began)


def result_of(check: Check, outcome: str, why: str, sheet: Sheet, seconds: float) -> Result:
    """A result with what the report says of its check."""
    return Result(check.name, check.item, check.proves, check.on_failure, outcome, why, sheet, seconds)


def perform_all(checks: Sequence[Check], kit: Kit, say: Say, keep: Callable[[list[Result]], None]) -> list[Result]:
    """Makes them one after another; what is left when the run is ended is skipped. `keep` has what is known so far."""
    results: list[Result] = []
    for number, check in enumerate(checks, 1):
        if kit.ended:
            results.append(result_of(check, SKIPPED, INTERRUPTED, Sheet(), 0.0))
            continue
        say(f"{number:>2}/{len(checks)}  {check.name}, about {check.minutes:g} min")
        results.append(perform(check, kit))
        keep(results)
        say(f"       {results[-1].outcome}{': ' + results[-1].why if results[-1].why else ''}")
    return results


def chosen(only: str, hosted: bool, checks: Sequence[Check] = CHECKS) -> list[Check]:
    """The checks that were asked for. Raises ValueError over a name that there is not."""
    names = [each.strip() for each in only.split(",") if each.strip()]
    unknown = sorted(set(names) - {each.name for each in checks})
    if unknown:
        raise ValueError(f"--only: there is no check {', '.join(unknown)}; --list has them all")
    return [each for each in checks if (each.name in names or not names) and (each.hosted or not hosted)]


def about(checks: Sequence[Check], options: Options) -> dict[str, Any]:
    """This Mac and this release, as far as that may be told."""
    mac = darwin_memory.mac()
    facts = {"release": __version__, "python": platform.python_version(), "date": date.today().isoformat()}
    names = {
        "model": "hw.model",
        "chip": "machdep.cpu.brand_string",
        "macos": "kern.osproductversion",
        "build": "kern.osversion",
    }
    for name, key in names.items():
        try:
            facts[name] = mac.text(key) if mac else ""
        except OSError as error:
            facts[name] = f"not told: {error.strerror}"
    return {
        **facts,
        "memory_gib": mac_report.rounded(machine_memory.total_bytes() / 1024**3),
        "hosted": options.hosted,
        "sudo": options.sudo,
        "model_file": options.model.name if options.model else f"made, {options.model_mib} MiB",
        "asked_for": [each.name for each in checks],
    }


def file_name(facts: dict[str, Any]) -> Path:
    """acceptance-<model>-<date>.json, in this directory."""
    model = "".join(letter if letter.isalnum() else "-" for letter in str(facts.get("model") or "mac"))
    return Path(f"acceptance-{model}-{facts['date']}.json")


def write(output: Path, found: dict[str, Any]) -> None:
    """Writes both files."""
    import json

    write_atomic(output, json.dumps(found, indent=2) + "\n")
    write_atomic(output.with_suffix(".md"), mac_report.markdown(found))


def redactor(options: Options) -> Redactor:
    """For this user, home and host."""
    hosts = {socket.gethostname(), platform.node()}
    for key in ("ComputerName", "LocalHostName", "HostName"):
        hosts.add(commands.run(["/usr/sbin/scutil", "--get", key]).out.strip())
    lan = options.lan.rpartition(":")[0]
    return Redactor(getpass.getuser(), str(Path.home()), hosts, {lan} if lan else ())


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    found.add_argument("--list", action="store_true", help="say what there is, and do nothing")
    found.add_argument("--only", default="", metavar="NAME,..", help="only these checks")
    found.add_argument("--hosted", action="store_true", help="only what a virtual machine without a GPU can show")
    found.add_argument("--no-sudo", action="store_true", help="leave out what needs root")
    found.add_argument("--lan", default="", metavar="HOST:PORT", help="a host of the local network to connect to")
    found.add_argument("--model", type=Path, metavar="FILE.gguf", help="measure with this; default: one is made")
    found.add_argument("--model-mib", type=int, default=1024, metavar="N", help="size of the one that is made [1024]")
    found.add_argument("--mlx-model", type=Path, metavar="DIRECTORY", help="for the MLX engines; default: a tiny one")
    found.add_argument("--output", type=Path, metavar="FILE.json", help="the report; default: by model and date")
    return found


def options_of(asked: argparse.Namespace) -> Options:
    """The flags as the checks want them. Raises ValueError."""
    for name, path, there in (("--model", asked.model, Path.is_file), ("--mlx-model", asked.mlx_model, Path.is_dir)):
        if path is not None and not there(path.expanduser()):
            raise ValueError(f"{name}: {path} is not there")
    if not 1 <= asked.model_mib <= 1 << 16:
        raise ValueError("--model-mib must be between 1 and 65536")
    return Options(
        lan=asked.lan,
        model=asked.model and asked.model.expanduser().absolute(),
        mlx_model=asked.mlx_model and asked.mlx_model.expanduser().absolute(),
        model_mib=asked.model_mib,
        hosted=asked.hosted,
        sudo=not asked.no_sudo,
        terminal=sys.stdin.isatty(),
    )


def run(checks: Sequence[Check], options: Options, base: Path, output: Path | None, say: Say) -> int:
    """Makes the checks and writes the report; 1 if one failed."""
    facts = about(checks, options)
    path, private = output or file_name(facts), redactor(options)

    def keep(results: list[Result]) -> None:
        """After each check: a Mac that is driven to its limits may not come to the end of this."""
        write(path, mac_report.report(facts, results, private))

    results = perform_all(checks, Kit(options, base, say=say), say, keep)
    found = mac_report.report(facts, results, private)
    write(path, found)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found["counts"].items())
    say(f"{counts}; see {path} and {path.with_suffix('.md').name}")
    return int(any(each.outcome == FAIL for each in results))


def main(argv: Sequence[str]) -> int:
    """See above."""
    asked = parser().parse_args(argv)
    if asked.list:
        print("\n".join(listing()))
        return 0
    if sys.platform != "darwin":
        sys.stderr.write("mac_acceptance: this is no Mac; --list says what it would do on one\n")
        return 2
    if os.getuid() == 0:
        sys.stderr.write("mac_acceptance: not as root: run it as the user whose models these are; it asks for sudo\n")
        return 2
    try:
        checks, options = chosen(asked.only, asked.hosted), options_of(asked)
    except ValueError as error:
        sys.stderr.write(f"mac_acceptance: {error}\n")
        return 2
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)
    password = Password()
    try:
        if options.sudo and any(each.root for each in checks):
            print("sudo may ask for your password, once; --no-sudo leaves out what needs it")
            options = Options(**{**options.__dict__, "sudo": password.ask()})
        with workplace() as base:
            return run(checks, options, base, asked.output, lambda text: print(text, flush=True))
    finally:
        password.close()


def _end(_signum: int, _frame: object) -> None:
    raise Ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
