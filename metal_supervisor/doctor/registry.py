"""All checks in the order of the report, and their execution within fifteen seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from metal_supervisor.doctor import cluster, engines, launchd, login, machine, rights, software, store
from metal_supervisor.doctor.findings import Check, Finding, ok
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.doctor.together import each_of

CHECK_S = 5.0
"""Time limit of a check. Those that need the API server run in a second round, so all take twice as long at most."""
PLATFORM = "platform"

CHECKS: tuple[Check, ...] = (
    *software.CHECKS,
    *launchd.CHECKS,
    *machine.CHECKS,
    *store.CHECKS,
    *engines.CHECKS,
    *login.CHECKS,
    *rights.CHECKS,
    *cluster.CHECKS,
)


def examine(around: Surroundings, checks: Sequence[Check] = CHECKS, check_s: float = CHECK_S) -> list[Finding]:
    """Run the checks. Returns all findings in the order of the checks. Raises nothing."""
    asked = [each for each in checks if around.on_mac or not each.mac]
    found: dict[str, list[Finding]] = {}
    for later in (False, True):
        these = [each for each in asked if each.needs_api is later]
        questions = [partial(each.ask, around) for each in these]
        for check, findings in zip(these, each_of(questions, check_s), strict=True):
            found[check.name] = [replace(finding, check=check.name) for finding in findings]
    told = [finding for each in asked for finding in found[each.name]]
    left_out = [each.name for each in checks if each not in asked]
    if left_out:
        told.insert(0, replace(ok(f"this is no Mac; left out: {', '.join(left_out)}"), check=PLATFORM))
    return told
