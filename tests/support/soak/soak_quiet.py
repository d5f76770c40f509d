"""What a system must look like once faults have stopped: as it was asked for, whole, and nothing besides."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import psutil

from metal_supervisor.spec.processes import State
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Standing
from metal_supervisor.state.gateway_note import WORKERS
from metal_supervisor.supervisord.client import Refused, Unavailable
from tests.support.soak.soak_check import Resources, overdue
from tests.support.soak.soak_faults import Hand
from tests.support.soak.soak_memory import Want, claims, untrue, waits
from tests.support.soak.soak_watch import OWN, ApiError, engines, is_launcher, ready_services, role_of
from tests.support.system import ISVC, SLICES

LOOK_EVERY_S = 0.3
NUDGE_EVERY_S = 2.0
Problem = tuple[int, str]
"""(rule, what is not as it must be)."""


def converge(hand: Hand, bound_s: float, meanwhile: Callable[[], None]) -> tuple[list[Problem], str]:
    """Waits until two looks in a row find nothing.

    Returns (what the last look found, if that takes longer than `bound_s`; what was waited for last).
    """
    until = time.monotonic() + bound_s
    asked, nudged_at, good, last = False, 0.0, 0, ""
    problems: list[Problem] = [(7, "nothing was looked at")]
    while time.monotonic() < until:
        meanwhile()
        try:
            if not asked:
                hand.end_api_faults()
                hand.ask_again()
                asked = True
            if time.monotonic() - nudged_at > NUDGE_EVERY_S:
                nudged_at = time.monotonic()
                hand.nudge()
            problems = [(7, "supervisorctl is still under way")] if hand.typing() else look(hand)
        except (ApiError, Unavailable, Refused, psutil.Error, OSError, http.client.HTTPException) as error:
            problems = [(7, repr(error)[:300])]
        good, last = (0, problems[0][1]) if problems else (good + 1, last)
        if good == 2:
            return [], last
        time.sleep(LOOK_EVERY_S)
    return problems, last


def look(hand: Hand) -> list[Problem]:
    """What is not as it must be. Raises ApiError, Unavailable, Refused."""
    records = hand.system.files.records()[0]
    runs = {name for name, want in hand.wanted.items() if want.runs and not _is_out(records.get(f"default.{name}"))}
    found = [*_processes(hand, runs), *_table(hand, runs), *_memory(hand, records)]
    status, body = hand.system.health()
    if status != 200 or body.get("cluster"):
        found.append((7, f"/healthz says {status} {body}"))
    items = {item["metadata"]["name"]: item for item in hand.api.ask("GET", ISVC)["items"]}
    if items.keys() != hand.wanted.keys():
        found.append((7, f"the API holds {sorted(items)}"))
    ready = ready_services(hand.api.ask("GET", SLICES)["items"])
    if ready != runs:
        found.append((7, f"ready endpoints of {sorted(ready)}, but {sorted(runs)} should run"))
    for name, want in hand.wanted.items():
        item = items.get(name, {})
        told = item.get("status") or {}
        phase = want.phase if name in runs or not want.runs else "Pending"
        if told.get("phase") != phase:
            found.append((7, f"{name} is {told.get('phase')}, not {phase}: {_why(told)}"))
        record = records.get(f"default.{name}")
        found += _files(hand, name, want, record, int((item.get("metadata") or {}).get("generation", 0)))
    aside = [path.name for path in (hand.system.state / "quarantine").glob("*")]
    for name in hand.foreign:
        if not (hand.system.state / "models.d" / name).exists() and not any(each.endswith(name) for each in aside):
            found.append((4, f"{name} is neither in models.d nor in quarantine"))
    return found


def _why(told: dict[str, object]) -> str:
    conditions = told.get("conditions")
    found = [each for each in conditions if each["type"] == "MetalReady"] if isinstance(conditions, list) else []
    return f"{found[0]['reason']}, {found[0]['message']}" if found else "no condition"


def _is_out(record: Record | None) -> bool:
    """Whether a service may not run at all, for want of memory."""
    return record is not None and record.verdict.standing is Standing.WAIT and bool(waits(record))


def waiting(hand: Hand) -> list[str]:
    """Names of the services that wait for memory, or run as they were before an edit that does."""
    records = hand.system.files.records()[0]
    return [name for name in hand.wanted if (record := records.get(f"default.{name}")) is not None and waits(record)]


def _memory(hand: Hand, records: Mapping[str, Record]) -> list[Problem]:
    """Whoever waits for memory has reason to, is told so, and the system keeps its books by that."""
    budget_bytes = hand.sizes.budget.bytes
    claimed = claims(hand.wanted, records, hand.sizes)
    found = [(7, text) for text in overdue(claimed, budget_bytes, hand.preemption)]
    for claim in claimed:
        record = records[f"default.{claim.service}"]
        if claim.waits and (text := untrue(claim, waits(record), claimed, budget_bytes)):
            found.append((7, f"{claim.service}: {text}"))
        if not claim.waits and claim.holds_bytes != claim.need_bytes:
            found.append(
                (
                    7,
                    f"{claim.service} is charged {claim.holds_bytes} bytes, not {claim.need_bytes}: "
                    f"{record.verdict.reason} {record.warning}",
                )
            )
    told = json.loads(hand.system.fetch("/status")[1])["memory"] or {}  # None until the controller has said anything
    kept = told.get("budget"), told.get("charged"), told.get("waiting")
    queued = sum(each.waits and each.need_bytes <= budget_bytes for each in claimed)  # who never fits is in no queue
    true = budget_bytes, sum(each.holds_bytes for each in claimed), queued
    if kept != true:
        why = told.get("pressure")
        found.append((7, f"/status has (budget, charged, waiting) as {kept}, not {true}; pressure {why}"))
    return found


def _processes(hand: Hand, runs: Collection[str]) -> list[Problem]:
    """Exactly one of each of ours, one engine per service, and nothing else that bears our mark."""
    found: list[Problem] = []
    processes = hand.scan.processes()
    roles = Counter(role for _, command in processes.values() if (role := role_of(command)))
    found += [(5, f"{roles[role]} processes of {role}") for role in OWN if roles[role] != 1]
    running = engines(processes)
    count = Counter(each.service for each in running)
    for name in sorted({*count, *hand.wanted}):
        expected = 1 if name in runs else 0
        if count[name] != expected:
            rule = 7 if count[name] < expected else 5
            pids = [each.pid for each in running if each.service == name]
            found.append((rule, f"{name} has {count[name]} engines {pids}, not {expected}"))
    known = {each.pid for each in running}
    launchers: Counter[str] = Counter()
    for pid, (_, command) in processes.items():
        if is_launcher(command):
            launchers[command[-1].rpartition("/")[2].removesuffix(".json")] += 1
        elif not role_of(command) and pid not in known:
            found.append((5, f"pid {pid} is left over: {' '.join(command)[:200]}"))
    found += [(5, f"{number} launchers of {name}") for name, number in launchers.items() if number > 1]
    return found


def _table(hand: Hand, runs: Collection[str]) -> list[Problem]:
    """supervisord's own view: RUNNING what should run, and no program besides."""
    found: list[Problem] = []
    table = hand.system.rpc.table()
    workers = {name: table[name].state.value for name in WORKERS if name in table}
    if list(workers.values()).count("RUNNING") != 1:
        found.append((7, f"the gateway's workers are {workers}"))
    for name, row in table.items():
        if name in WORKERS:
            continue
        if name not in OWN and name.removeprefix("default.") not in runs:
            found.append((7, f"supervisord still has {name}, {row.state.value}"))
        elif row.state is not State.RUNNING:
            found.append((7, f"{name} is {row.state.value}"))
    missing = [name for name in sorted(runs) if f"default.{name}" not in table]
    return [*found, *((7, f"supervisord does not have {name}") for name in missing)]


def _files(hand: Hand, name: str, want: Want, kept: Record | None, generation: int) -> list[Problem]:
    """The files of one service: there, whole, and about what is wanted now."""
    state, program = hand.system.state, f"default.{name}"
    try:
        record = json.loads((state / "records" / f"{program}.json").read_text())
        json.loads((state / "observed" / f"{program}.json").read_text())
    except (OSError, ValueError) as error:
        return [(4, f"{name}: {error!r}")]
    if record.get("generation") != generation:
        return [(7, f"{name}: the record is of generation {record.get('generation')}, not {generation}")]
    if not want.runs or kept is None or _is_out(kept):
        return []
    edition = str(record.get("edition"))
    if not hand.system.files.has_section(program):
        return [(4, f"{name}: it has no section")]
    try:
        spec = json.loads((state / "specs" / f"{program}.json").read_text())
        argv = spec["argv"]
    except (OSError, ValueError, KeyError) as error:
        return [(4, f"{name}: {error!r}")]
    try:
        ran = str(json.loads((state / "runs" / f"{program}.json").read_text())["spec"]["edition"])
    except (OSError, ValueError, KeyError) as error:
        if name not in hand.noteless:
            return [(4, f"{name}: {error!r}")]
        ran = edition
    edited = bool(waits(kept))
    if not ran == spec["edition"] == edition or not (edited or str(want.context) in argv):
        return [(7, f"{name}: it runs {ran}, {edition} is wanted, with --ctx-size {want.context}")]
    return []


def resources(hand: Hand) -> dict[str, Resources]:
    """What our processes hold."""
    processes = hand.scan.processes()
    running = len(engines(processes))
    found = {}
    for pid, (_, command) in processes.items():
        if role := role_of(command):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                found[role] = Resources(role, pid, process.num_fds(), process.memory_info().rss, running)
    return {role: found[role] for role in OWN if role in found}
