"""What the cluster asks for becomes proposals: which engines are looked at again, and whose memory is counted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from metal_supervisor.cluster.report import UNLOADED
from metal_supervisor.controller import assignment as module
from metal_supervisor.controller import reconcile
from metal_supervisor.controller.assignment import AGAIN_S, LACKING_AGAIN_S, MODEL_LAG_S, Assignment, _charged
from metal_supervisor.controller.prerequisites.ports import Ports
from metal_supervisor.controller.resource_filter import ResourceFilter
from metal_supervisor.controller.snapshot import Room, Snapshot
from metal_supervisor.placement.placement import Placed
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec import grants, resources
from metal_supervisor.spec.processes import EngineUse, Observed, ProgramState, RunNote, State
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.resources import MODEL_NOT_FOUND, rejected
from metal_supervisor.spec.sources import Artifact
from metal_supervisor.spec.types import Key, Rejected, Standing
from metal_supervisor.state.programs import program_name
from tests.support.system import model, service
from tests.unit.model_supervisord import asked_for
from tests.unit.test_manifests import record as a_record
from tests.unit.test_report import record

ITEM = replace(asked_for("a", 0, False), replicas=2)


def peers(ready: int) -> Any:
    """A placement with so many replicas ready on other Macs; with any, they have taken over what this Mac lost."""
    return SimpleNamespace(peers_ready=lambda *_: ready, handed_over=lambda *_: bool(ready))


class Sharing(Assignment):
    """Shares one service out among the slots of this Mac; its engines run as they should."""

    def __init__(self, slots: tuple[int, ...]) -> None:
        self._placement: Any = peers(0)
        self._unsure_until = 0.0
        self.placed = Placed({ITEM.key: slots})
        self.taken: list[Key] = []
        self.notes: dict[str, RunNote] = {}
        self.down: set[str] = set()
        """Programs without a process."""

    def _accepted(self, service: Any, record: Record | None, *_: Any) -> Record:
        self.taken.append(service.key)
        return reconcile.unchanged(record or running(service.ordinal))

    def made(self, records: Collection[Record]) -> dict[Key, Record]:
        """The proposals of one pass."""
        table = {
            each.program: ProgramState(
                each.program, State.EXITED if each.program in self.down else State.RUNNING, 7, 1.0, 0.0
            )
            for each in records
        }
        for each in records:
            self.notes.setdefault(each.program, RunNote(7, 7, "s", {"edition": each.edition}, (1.0,), 0.0, "", ""))
        found: dict[Key, Record] = {}
        snapshot = Snapshot(100.0, {}, True, {}, table, self.notes, {})
        self._share_out(ITEM.key, ITEM, tuple(records), frozenset(), found, Ports(records), snapshot)
        assert all(proposal.key == key for key, proposal in found.items())
        return found


def running(ordinal: int) -> Record:
    namespace, name = ITEM.key
    program = program_name(replace(ITEM, ordinal=ordinal).key)
    return replace(
        a_record(),
        namespace=namespace,
        name=name,
        ordinal=ordinal,
        slot=ordinal,
        program=program,
        edition=f"{program}.0.json",
        asked=ITEM.asked,
        port=18101 + ordinal,
        claimed=True,
    )


@pytest.mark.parametrize("ordinal", [0, 1])
def test_the_only_engine_that_is_left_of_a_service_keeps_its_own_key(ordinal: int) -> None:
    sharing, left = Sharing((ordinal,)), running(ordinal)
    assert [list(sharing.made([left])) for _ in range(3)] == [[left.key]] * 3


def test_an_engine_that_runs_as_it_should_does_not_hide_a_slot_without_one() -> None:
    sharing, first = Sharing((0, 1)), running(0)
    assert [list(sharing.made([first])) for _ in range(3)] == [[first.key, running(1).key]] * 3
    assert sharing.taken.count(running(1).key) == 3


def test_a_service_that_is_still_being_checked_is_not_counted_as_charged() -> None:
    admitted = replace(record(reason="InsufficientMemory"), namespace="a", name="one")
    checking = replace(record(Standing.WAIT, "Checking"), namespace="a", name="two")
    assert _charged([admitted, checking]) == {("a", "one")}


def test_an_edit_has_only_the_files_of_its_own_service_asked_for_again() -> None:
    assignment: Any = Assignment.__new__(Assignment)
    own, other = (
        replace(each, model=replace(each.model, artifact=Artifact(f"/{each.name}.gguf")))
        for each in (asked_for("a", 0, False), asked_for("b", 0, False))
    )
    assignment._found = first = {own.key: own, other.key: other}
    assert list(assignment._edited(first)) == []
    edited = replace(own, generation=own.generation + 1)
    assert list(assignment._edited({own.key: edited, other.key: other})) == [own.model.artifact]


def test_an_engine_serves_whoever_holds_its_slot() -> None:
    """Its Mac takes the slot back from one that does not serve it."""
    assignment: Any = Assignment.__new__(Assignment)
    assignment._placement, assignment._sleep = SimpleNamespace(on=True), SimpleNamespace(look=lambda: None)
    lost = replace(running(0), claimed=False)
    seen = Observed(lost.program, 7, True, 1.0, "RUNNING")
    assert assignment._ready({lost.key: lost}, {lost.program: seen}) == {lost.owner: frozenset({0})}
    assert assignment._ready({lost.key: lost}, {lost.program: replace(seen, ready=False)}) == {}


def test_an_on_demand_service_at_rest_counts_as_served_where_the_gateway_holds_its_requests() -> None:
    """Two replicas at rest are both ready, as their endpoints are."""
    assignment: Any = Assignment.__new__(Assignment)
    assignment._placement, assignment._sleep = SimpleNamespace(on=True), SimpleNamespace(look=lambda: None)
    rests = replace(record(Standing.WAIT, UNLOADED), idle_s=60.0, front_port=18200, claimed=True)
    wakes = replace(rests, verdict=replace(rests.verdict, standing=Standing.RUN))
    for each in (rests, wakes):
        assert assignment._ready({each.key: each}, {}) == {each.owner: frozenset({each.slot})}
    failed = Observed(wakes.program, 0, False, 1.0, "FATAL")
    assert assignment._ready({wakes.key: wakes}, {wakes.program: failed}) == {}
    for changes in ({"claimed": False}, {"front_port": None}, {"idle_s": None}):
        assert assignment._ready({rests.key: replace(rests, **changes)}, {}) == {}


@pytest.mark.parametrize("waiting", [0, 1])
def test_an_engine_whose_slot_moved_first_answers_those_who_wait_for_it(waiting: int) -> None:
    sharing, lost = Sharing(()), running(0)
    sharing._placement = peers(1)
    snapshot = Snapshot(100.0, {}, True, {}, {}, {}, {}, {lost.program: EngineUse(waiting)})
    assert sharing._let_go(lost, 2, snapshot).asks is bool(waiting)


@pytest.mark.parametrize("standing", [Standing.RUN, Standing.REMOVING])
def test_until_the_leases_are_read_an_engine_whose_slot_is_anothers_is_left_as_it_is(standing: Standing) -> None:
    """A controller that starts anew reads services and Leases at once, and may have the services first."""
    sharing, lost = Sharing(()), replace(running(0), claimed=False)
    lost = lost if standing is Standing.RUN else reconcile.dismiss(lost, 100.0, reconcile.MOVED)
    sharing._placement = SimpleNamespace(
        peers_ready=lambda *_: 0, handed_over=lambda _, record, __: record.verdict.standing is not Standing.RUN
    )
    sharing.placed = Placed({}, known=False)
    (proposal,) = sharing.made([lost]).values()
    assert sharing.taken == [], "an edit would restart it while no other Mac serves"
    assert not proposal.claimed and proposal == reconcile.unchanged(lost)


class Reading(Assignment):
    """Proposes for what the cluster's resources were read as; notes which services got as far as that."""

    def __init__(self, **found: Any) -> None:
        nothing: Any = SimpleNamespace(
            prepare=lambda *_: None,
            named=lambda item: item,
            keys=lambda *_: frozenset(),
            place=lambda *_: Placed({}),
            read=lambda *_: {("default", name): item for name, item in self.found.items()},
        )
        self._prerequisites: Any = SimpleNamespace(daemons=nothing, claim_check=None, ports=SimpleNamespace(held=Ports))
        self._resource_filter = self._placement = nothing
        self._store: Any = SimpleNamespace(look_again=lambda _: None)
        self._lacking, self._found, self._failed, self._failed_before = {}, {}, {}, {}
        self._unable_until = {}
        self.placed = Placed({})
        self.found, self.shared, self.fails = found, list[str](), dict[str, Exception]()

    def _files_of(self, *_: Any) -> Any: ...

    def _look_for(self, files: object) -> None: ...

    def _ready(self, *_: Any) -> dict[Key, frozenset[int]]:
        return {}

    def _share_out(self, key: Key, *_: Any) -> None:
        if key[1] in self.fails:
            raise self.fails[key[1]]
        self.shared.append(key[1])

    def after(self, records: Collection[Record] = (), **snapshot: Any) -> tuple[list[str], dict[Key, Record]]:
        self.shared.clear()
        known = {each.key: each for each in records}
        proposals = self.propose(known, replace(Snapshot(100.0, {}, True, {}, {}, {}, {}), **snapshot))
        return self.shared, proposals


def test_a_model_that_comes_a_moment_after_its_service_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a watch of its own: a file with both was told as a Failed service, and `serve` gave up."""
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    lacks, bad = (rejected(service("one", "m"), why, "") for why in (MODEL_NOT_FOUND, "InvalidSpec"))
    reading = Reading(one=lacks, two=bad, three=ITEM)
    assert reading.again_in_s is None
    assert reading.after()[0] == ["two", "three"]
    assert reading.again_in_s == MODEL_LAG_S
    now += MODEL_LAG_S / 2
    reading.found["one"] = ITEM
    assert reading.after()[0] == ["one", "two", "three"] and reading.again_in_s is None

    reading.found["one"] = lacks
    assert reading.after()[0] == ["two", "three"]
    now += MODEL_LAG_S
    assert reading.after()[0] == ["one", "two", "three"] and reading.again_in_s is None, "it is not there"


def test_an_engine_whose_model_goes_with_its_service_is_left_alone_until_that_is_known() -> None:
    up = replace(running(0), namespace="default", name="one")
    reading = Reading(one=rejected(service("one", "m"), MODEL_NOT_FOUND, ""))
    assert reading.after([up]) == ([], {up.key: reconcile.unchanged(up)})


def test_a_service_that_a_restored_api_lacks_keeps_its_engine_for_ten_minutes() -> None:
    up = replace(running(0), namespace="default", name="one")

    def outcome(reading: Reading, restored_at: float, now: float = 1000.0) -> str:
        proposal = reading.after([up], restored_at=restored_at, now=now)[1][up.key]
        return proposal.verdict.reason or (proposal.warning or ("",))[0]

    assert outcome(Reading(), restored_at=0.0) == "Deleted"
    restored = Reading()
    assert outcome(restored, restored_at=990.0) == "MissingAfterRestore"
    assert outcome(restored, restored_at=990.0, now=1589.0) == "MissingAfterRestore"
    assert outcome(restored, restored_at=990.0, now=1590.0) == "Deleted"
    again = Reading()
    assert outcome(again, restored_at=990.0) == "MissingAfterRestore"
    again.after([up], restored_at=990.0, services={up.owner: service("one", "m")})
    assert outcome(again, restored_at=990.0) == "Deleted", "it was there, and was deleted"
    assert outcome(again, restored_at=995.0) == "MissingAfterRestore", "restored once more"


def test_a_service_at_which_a_decision_fails_keeps_its_engine_and_costs_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever a manifest or a model makes of our code: it was every decision of the Mac, as long as it was there."""
    up = replace(running(0), namespace="default", name="one")
    reading = Reading(one=ITEM, two=ITEM)
    reading.fails["one"] = RecursionError("too deep")
    for _ in range(3):
        assert reading.after([up]) == (["two"], {up.key: reconcile.unchanged(up)})
    assert [each.__dict__["service"] for each in caplog.records] == ["default.one"], "told once"
    reading.found["one"] = replace(ITEM, generation=ITEM.generation + 1)
    reading.after([up])
    assert len(caplog.records) == 2, "and again once it is edited"
    failing = reading.fails.pop("one")
    reading.after([up])
    reading.fails["one"] = failing
    reading.after([up])
    assert len(caplog.records) == 3, "or was over: the next error may be another"
    reading.fails["one"] = OSError(28, "disk full")
    with pytest.raises(OSError, match="disk full"):
        reading.after([up])


def test_a_service_at_which_a_decision_fails_keeps_an_engine_whose_record_was_lost() -> None:
    """A section without a record is deleted, and its engine ended, unless some engine may lack its record."""
    reading = Reading(one=ITEM, two=ITEM)
    assert reading.after() == (["one", "two"], {}) and not reading.unsure
    reading.fails["one"] = RecursionError("too deep")
    assert reading.after() == (["two"], {}) and reading.unsure


def test_a_claim_check_that_fails_costs_no_other_service(caplog: pytest.LogCaptureFixture) -> None:
    """In a cluster each free service is looked at before it is claimed: that ended every pass of each Mac."""
    delays = list[float | None]()

    def failing(*_: Any) -> float:
        raise RuntimeError("can't start new thread")

    def place(found: Any, _elsewhere: object, _ready: object, delay_s: Any, *_: Any) -> Placed:
        delays.extend(map(delay_s, found.values()))
        return Placed({})

    reading = Reading(one=ITEM, two=ITEM)
    reading._placement = SimpleNamespace(place=place)
    reading._prerequisites.claim_check = SimpleNamespace(delay_s=failing)
    for _ in range(2):
        assert reading.after()[0] == ["one", "two"]
    assert delays == 4 * [None], "other Macs come first"
    assert len(caplog.records) == 1, "told once"


class Claiming(Reading):
    """Notes what placement is given: the slots that this Mac cannot run, and its delay before a claim."""

    def __init__(self) -> None:
        super().__init__(tiny=replace(ITEM, name="tiny"))
        self.unable: dict[Key, frozenset[int]] = {}
        self.delay_s: float | None = None
        self._placement: Any = SimpleNamespace(place=self._place)
        self._prerequisites.claim_check = SimpleNamespace(delay_s=lambda *_: 2.0)

    def _place(
        self, found: Any, _not_ours: object, _ready: object, delay_s: Any, _begun: object, unable: Any
    ) -> Placed:
        self.unable, self.delay_s = unable, delay_s(found["default", "tiny"])
        return Placed({})

    def with_record(self, standing: Standing, reason: str, blocked: bool = True, **changes: Any) -> frozenset[int]:
        """The slots that are marked with a record of this verdict. `blocked`: by the ledger."""
        held = replace(record(standing, reason), namespace="default", name="tiny", slot=1, **changes)
        self.after([held], room=Room(0, 0, 0, blocked={held.key} if blocked else ()))
        return self.unable.get(held.owner, frozenset())


HELD = frozenset({1})


def test_what_waits_for_memory_that_no_engine_is_freeing_may_go_to_another_mac() -> None:
    assert Claiming().with_record(Standing.WAIT, "InsufficientMemory") == HELD
    assert not Claiming().with_record(Standing.WAIT, "InsufficientMemory", blocked=False)
    assert not Claiming().with_record(Standing.RUN, "Admitted"), "only its edit waits"
    too_large = {"reserved_bytes": 60, "limit_bytes": 59}
    assert not Claiming().with_record(Standing.WAIT, "InsufficientMemory", **too_large), "its Model allows it on no Mac"


def test_an_on_demand_service_may_go_only_if_it_never_fits() -> None:
    """A request for it makes others give their memory."""
    assert Claiming().with_record(Standing.WAIT, "InsufficientMemory", idle_s=60.0) == HELD
    assert not Claiming().with_record(Standing.WAIT, "InsufficientMemory", idle_s=60.0, queue_position=1)


@pytest.mark.parametrize(
    ("reason", "goes"),
    [
        ("RuntimeBinaryMissing", True),
        ("UnsupportedRuntime", True),
        ("ModelFileMissing", True),
        ("InsufficientDisk", True),
        ("InvalidSpec", False),
        ("SourceNotFound", False),
    ],
)
def test_what_fails_for_something_that_this_mac_lacks_may_go_to_another_one(reason: str, goes: bool) -> None:
    assert Claiming().with_record(Standing.FAILED, reason, blocked=False) == (HELD if goes else frozenset())


def test_a_mac_does_not_take_back_at_once_what_it_could_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service whose download fits on no disk would go from Mac to Mac without end."""
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    for standing, reason, again_s in (
        (Standing.WAIT, "InsufficientMemory", AGAIN_S),
        (Standing.FAILED, "InsufficientDisk", LACKING_AGAIN_S),
    ):
        mac = Claiming()
        mac.with_record(standing, reason)
        now += again_s - 1
        mac.after()
        assert mac.delay_s is None
        mac.found["tiny"] = replace(ITEM, name="tiny", extra_args=("--other",), generation=ITEM.generation + 1)
        mac.after()
        assert mac.delay_s == 2.0, "it is edited"
        mac.found["tiny"] = replace(ITEM, name="tiny")
        now += 1
        mac.after()
        assert mac.delay_s == 2.0


@pytest.mark.parametrize("where", ["read_service", "granted"])
def test_an_object_that_cannot_be_read_is_refused_and_keeps_no_other_from_being_read(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    here: Any = resources if where == "read_service" else grants
    read = getattr(here, where)

    def failing(item: Any, *rest: Any) -> Any:
        if (item["metadata"]["name"] if isinstance(item, dict) else item.name) == "odd":
            raise RecursionError
        return read(item, *rest)

    monkeypatch.setattr(here, where, failing)
    services = {("default", name): service(name, model="m") for name in ("odd", "tiny")}
    snapshot = Snapshot(100.0, services, True, {("default", "m"): model("m", "file:///m.gguf")}, {}, {}, {})
    found = ResourceFilter(Settings(), "mac").read(snapshot, {})
    odd, tiny = found["default", "odd"], found["default", "tiny"]
    assert isinstance(odd, Rejected) and odd.reason == "InvalidSpec" and "RecursionError" in odd.message
    assert not (isinstance(tiny, Rejected) and "cannot be read" in tiny.message)
