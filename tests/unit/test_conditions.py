"""The table of reasons is what the code says: no reason is missing in it, none of it is made up."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import conditions_table as conditions
import pytest
from conditions_table import EVENT, GROUPS, METAL, MODEL, OF_METAL_READY, Group

from metal_supervisor.cluster import manifests
from metal_supervisor.cluster.report import Report, happening, report
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.references import KIND_OF
from metal_supervisor.spec.types import ModelFile, Standing
from tests.support.records import a_record

ROOT = Path(__file__).resolve().parents[2]

PACKAGE = ROOT / "metal_supervisor"
TOLD = {reason.name for group in GROUPS for reason in group.reasons}
ELSEWHERE = ("apiserver", "doctor")
"""Packages that put nothing into a condition of ours; the embedded API has a server's own reasons."""
WORD = re.compile(r"([A-Z][a-z]+[A-Za-z]*)(?:: .*)?", re.DOTALL)
OTHER_WORDS = frozenset(
    {
        "ConfinementFailed",
        "Cellar",
        "ConfigMaps",
        "Secrets",
        "Klear",
        "Available",
        "Degraded",
        "MetalReady",
        "Progressing",
        "Ready",
        "Downloading",
        "Stopped",
        "Started",
        "Ended",
        "Gone",
        "Waiting",
        "Draining",
        "Unknown",
        "True",
        "False",
        "Skipped",
        "ClusterIP",
        "NodePort",
        "LoadBalancer",
        "StartBarred",
        "InvalidFileSet",
        "Connection",
        "ConfigMap",
        "Secret",
        "Service",
        "Event",
        "EndpointSlice",
        "InferenceService",
        "Model",
        "Lease",
        "FleetNode",
        "TokenRequest",
        "ExecCredential",
        "Config",
        "Authorization",
        "Origin",
        "MemAvailable",
        "MemTotal",
        "SwapFree",
        "SwapTotal",
        "GiB",
        "KiB",
        "MiB",
        "TiB",
        "Error",
        "ListBucketResult",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "BadAnswer",
        "MethodNotAllowed",
        "TooLarge",
        "Unreachable",
        "Untrusted",
        "All",
        "BadKubeconfig",
        "BadSpec",
        "Binary",
        "Executable",
        "Kube",
        "KubeError",
        "Place",
        "Pool",
        "Settings",
        "Ollama",
        "WithdrawalToken",
        "GroupName",
        "InitGroups",
        "UserName",
        "Desktop",
        "Documents",
        "Downloads",
        "LaunchAgents",
        "LaunchDaemons",
        "Library",
        "Logs",
    }
)
"""Types of conditions; phases and the words of `make run`; Kubernetes' kinds; headers, fields and units; S3's words;
what a request to the API failed by; names that modules export, of classes, of engines; launchd's keys; directories."""


@functools.cache
def words() -> list[tuple[str, str]]:
    """(word, where) of everything in the code that may be a reason, in order."""
    return sorted(_everywhere())


def _everywhere() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        inner = path.relative_to(PACKAGE)
        if inner.parts[0] not in ELSEWHERE:
            for word, line in _words(ast.parse(path.read_text("utf-8"))):
                yield word, f"{inner}:{line}"


def _words(tree: ast.AST) -> Iterator[tuple[str, int]]:
    nodes = list(ast.walk(tree))
    asked = {id(each) for node in nodes for each in _asked_for(node)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield from ((word, node.lineno) for word in _composed(node))
            asked |= {id(part) for part in node.values[1:]}
            asked |= {id(part) for part in node.values if len(node.values) > 1 and _bare(part)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in asked:
            found = WORD.fullmatch(node.value)
            if found and (":" not in node.value or re.search("[a-z][A-Z]", found[1])):
                yield found[1], node.lineno


def _bare(part: ast.expr) -> bool:
    return isinstance(part, ast.Constant) and ":" not in str(part.value)


def _composed(node: ast.JoinedStr) -> Iterator[str]:
    """`SecretNotFound` and `ConfigMapNotFound` of f"{kind}NotFound"."""
    names = [part for part in node.values if isinstance(part, ast.FormattedValue)]
    if len(node.values) == 2 and len(names) == 1 and ast.unparse(names[0].value) == "kind":
        for kind in KIND_OF.values():
            text = "".join(kind if part is names[0] else str(part.value) for part in node.values)  # type: ignore[attr-defined]
            if WORD.fullmatch(text) and " " not in text:
                yield text


def _asked_for(node: ast.AST) -> Iterator[ast.AST]:
    """What is only looked for in something else: a key, or the other side of a comparison."""
    if isinstance(node, ast.Dict):
        yield from (key for key in node.keys if key is not None)
    elif isinstance(node, ast.Subscript):
        yield from ast.walk(node.slice)
    elif isinstance(node, ast.Compare):
        yield from ast.walk(node)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "find"):
        yield from node.args


def test_every_reason_of_the_code_has_its_line() -> None:
    unknown = {word: where for word, where in words() if word not in TOLD | OTHER_WORDS}
    assert not unknown, "say in tools/conditions_table.py when it is and what helps; or in OTHER_WORDS what else it is"


def test_nothing_is_told_of_that_the_code_never_says() -> None:
    said = {word for word, _ in words()}
    assert said >= TOLD, f"never said: {TOLD - said}"
    assert said >= OTHER_WORDS, f"never said: {OTHER_WORDS - said}"
    assert not (TOLD & OTHER_WORDS) - {"Downloading"}, "a phase of a Model, and a reason"


def test_a_reason_has_one_line_in_one_place() -> None:
    named = [reason.name for group in OF_METAL_READY for reason in group.reasons]
    assert len(named) == len(set(named))
    for group in GROUPS:
        assert all(reason.when and reason.do for reason in group.reasons), group.title


# ── and what `report` makes of them ──────────────────────────────────────────────────────────────

RECORD = a_record(port=18100, host="a")
UP = Observed("default.tiny", 7, True, 1.0, "RUNNING")
DOWN = replace(UP, pid=0, ready=False, state="FATAL")
OBSERVED = (
    None,
    UP,
    replace(UP, confined=True),
    replace(UP, confined=False),
    DOWN,
    replace(DOWN, state="BACKOFF"),
    replace(UP, ready=False),
    replace(UP, ready=False, served=True),
    replace(UP, ready=False, hung="no answer"),
    replace(UP, ready=False, state="STOPPING"),
    replace(UP, published="the API said no"),
    replace(UP, published="NoRoutableAddress: x"),
    replace(UP, published="EndpointNameConflict: x"),
    replace(UP, published="DaemonUnreachable: x"),
)


def refused_by(group: Group) -> Iterator[Record]:
    """A service that does not run, and one that does, for each reason of a group."""
    standing = Standing.FAILED if group.phases == ("Failed",) else Standing.WAIT
    for reason in group.reasons:
        yield replace(RECORD, verdict=Verdict(standing, reason.name, "x", 1.0), edition=None)
        yield replace(RECORD, warning=(reason.name, "x"))


WARNINGS = "PortInUse", "MetalUnavailable", "DaemonSettingsWait", "PortIgnored", "MissingAfterRestore"
IGNORED = (
    "NameTaken",
    "FieldIgnored",
    "ServiceTypeIgnored",
    "PriorityCapped",
    "ProtectionIgnored",
    "OnDemandIgnored",
    "ModelFailedInCluster",
)
ON_DEMAND = replace(RECORD, idle_s=60.0, front_port=18101)


def every_record() -> Iterator[Record]:
    yield from (RECORD, replace(RECORD, claimed=False), replace(RECORD, withdraw="x"), replace(RECORD, replicas=2))
    yield replace(RECORD, unconfined="x")
    yield from (ON_DEMAND, replace(ON_DEMAND, verdict=Verdict(Standing.WAIT, "Unloaded", "x", 1.0), edition=None))
    yield from (replace(RECORD, stopped_by_hand=True), replace(RECORD, peers_ready=1))
    for reason in (*WARNINGS, *IGNORED):
        yield replace(RECORD, warning=(reason, "x"))
    yield from (replace(RECORD, pressure=(level, "x")) for level in ("Normal", "Warning", "Critical"))
    yield from (replace(RECORD, verdict=Verdict(each, "", "", 1.0)) for each in (Standing.STOPPED, Standing.SUSPENDED))
    yield replace(RECORD, verdict=Verdict(Standing.WAIT, "Evicted", "x", 1.0), evicted_at=1.0)
    for group in OF_METAL_READY:
        if group.phases in (("Pending",), ("Failed",)):
            yield from refused_by(group)


def every_report() -> Iterator[tuple[Report, Record]]:
    for record, observed, leaving in itertools.product(every_record(), OBSERVED, (False, True)):
        yield report(record, observed, leaving=leaving), record


def test_conditions_have_the_reasons_of_their_types() -> None:
    seen = {(each.type, each.reason) for told, _ in every_report() for each in told.conditions}
    files = [ModelFile("Ready"), ModelFile("Downloading"), ModelFile("Pending"), ModelFile("Failed")]
    files += [ModelFile("Failed", reason=each.name) for each in (*conditions._FIELD.reasons, *conditions._FILE.reasons)]
    for file in files:
        (shown,) = manifests.model_status(file, "x", 1, {}, "now")["conditions"]
        seen.add((MODEL + shown["type"], shown["reason"]))
    types = {METAL, "Available", "Progressing", "Degraded", "MemoryPressure", "Suspended", "Confined"}
    told = {
        (kind, reason.name)
        for group in GROUPS
        for reason in group.reasons
        for kind in group.types
        if kind in types or kind.startswith(MODEL)
    }
    assert seen == told


def test_a_message_is_no_longer_than_the_api_takes() -> None:
    """As of a nodeSelector of 40 kB, which it quotes: the API would refuse the status as a whole."""
    record = replace(RECORD, verdict=Verdict(Standing.FAILED, "InvalidSpec", "x" * 40_000, 1.0))
    told = manifests.status(record, report(record, None), {}, "2026-11-27T00:00:00Z")
    assert max(len(each["message"]) for each in told["conditions"]) == manifests.LONGEST_MESSAGE


def test_metal_ready_has_a_reason_in_the_phases_that_are_told() -> None:
    phases: dict[str, set[str]] = {}
    for told, record in every_report():
        if not record.peers_ready:  # else it is Progressing, whatever there is here
            phases.setdefault(told.reason, set()).add(told.phase)
    for group in OF_METAL_READY:
        for reason in group.reasons if METAL in group.types else ():
            assert phases[reason.name] <= set(group.phases), reason.name


def test_events_are_warnings_where_that_is_said() -> None:
    for told, _ in every_report():
        event = happening(None, told, "")
        for group in OF_METAL_READY:
            named = METAL in group.types and told.reason in {reason.name for reason in group.reasons}
            if named and told.phase != "Failed":
                assert bool(event and event.type == "Warning") == conditions.warns(told.reason, group), told.reason
                assert EVENT not in group.types or told.phase == "Progressing" or event is not None, told.reason


# ── the page ─────────────────────────────────────────────────────────────────────────────────────


def test_the_page_is_that_of_the_table() -> None:
    done = subprocess.run(
        [sys.executable, "tools/conditions_page.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_page_that_is_not_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import conditions_page

    monkeypatch.setattr(conditions_page, "PAGE", tmp_path / "conditions.md")
    monkeypatch.setattr(sys, "argv", ["conditions_page.py"])
    assert conditions_page.main() == 0
    assert all(f"`{name}`" in conditions_page.PAGE.read_text() for name in TOLD)
    conditions_page.PAGE.write_text("old")
    monkeypatch.setattr(sys, "argv", ["conditions_page.py", "--check"])
    assert conditions_page.main() == 1
