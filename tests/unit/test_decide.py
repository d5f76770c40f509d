"""What becomes of one InferenceService: who keeps running, who is taken down, which port it has, and since when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.controller.prerequisites.ports import PortChoice, Ports, choose_port
from metal_supervisor.controller.reconcile import (
    Outlook,
    dismiss,
    fitting,
    verdict,
)
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import EngineUse, RunNote
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import (
    Endpoint,
    Engine,
    Key,
    Model,
    ModelFile,
    ModelLimit,
    Probe,
    Program,
    Rejected,
    Service,
    Standing,
)
from metal_supervisor.state.directory import StateDir
from tests.support.records import accept, refuse

TINY = "default", "tiny"
ENDPOINT = Endpoint("tiny", 8080, "/v1/chat/completions", "ClusterIP", None)
MODEL = Model("default", "phi", "m", 1, "/m.gguf", "gguf", None, None)
SERVICE = Service("default", "tiny", "u", 2, MODEL, "llama-server", 1, False, ENDPOINT, "chat", "normal", None, {})
READY = ModelFile("Ready", "/m.gguf", 10)
SNAPSHOT = Snapshot(1.0, {}, True, {}, {}, {}, {})
ENGINE = Engine(("/bin/llama-server",), (), "/", Probe(identity="tiny"))


def outlook(digest: str = "a", port: int | None = 18100, **other: Any) -> Outlook:
    program = Program("default.tiny", digest, "{}")
    return replace(Outlook(READY, port, ENGINE, program), **other)


def rejected(keeps_running: bool = True, reason: str = "InvalidSpec", **other: Any) -> Rejected:
    base = Rejected("default", "tiny", "u", 3, "phi", reason, "spec.x is wrong", 1, keeps_running, ENDPOINT)
    return replace(base, **other)


def running(**other: Any) -> Record:
    return replace(accept(SERVICE, None, outlook(), 100.0), **other)


# ── accepted ─────────────────────────────────────────────────────────────────────────────────────


def test_a_service_with_everything_it_needs_runs() -> None:
    record = running()
    assert (record.verdict.standing, record.verdict.since) == (Standing.RUN, 100.0)
    assert (record.program, record.edition, record.port) == ("default.tiny", "a", 18100)
    assert (record.files, record.probe, record.endpoint) == (("/m.gguf",), ENGINE.probe, ENDPOINT)
    assert (record.uid, record.generation, record.model, record.runtime) == ("u", 2, "phi", "llama-server")
    assert (record.warning, record.withdraw, record.retry_at, record.stopped_by_hand) == (None, "", None, False)


def test_what_is_wrong_with_the_engine_at_hand_comes_before_fields_that_mean_nothing() -> None:
    found = accept(replace(SERVICE, ignored=("spec.x",)), None, outlook(warning=("UnsafeEngineVersion", "old")), 100.0)
    assert found.warning == ("UnsafeEngineVersion", "old") and found.runs


def test_accepting_again_changes_nothing() -> None:
    record = running(retry_at=5.0, withdraw="t")
    assert accept(SERVICE, record, outlook(), 999.0) == record


def test_a_changed_spec_is_taken_over_and_forgets_the_stop_by_hand() -> None:
    before = running(stopped_by_hand=True)
    assert accept(SERVICE, before, outlook("a"), 200.0).stopped_by_hand
    ours = accept(SERVICE, before, outlook("b"), 200.0)  # nobody edited anything
    assert (ours.edition, ours.stopped_by_hand) == ("b", True)
    after = accept(EDITED, before, outlook("b"), 200.0)
    assert (after.edition, after.stopped_by_hand) == ("b", False)


UP = {"live": ("127.0.0.1", 18100), "live_edition": "a"}


def test_what_only_this_mac_changes_waits_for_the_next_start() -> None:
    before, other = running(), replace(ENGINE, probe=Probe("/other"))
    kept = accept(SERVICE, before, outlook("b", 18101, engine=other, **UP), 200.0)
    assert kept.edition == "b" and kept.is_run_by("a", before.asked)
    assert (kept.port, kept.probe) == (18100, ENGINE.probe), "as long as it runs"
    assert accept(SERVICE, kept, outlook("b", 18101, engine=other, **UP), 300.0) == kept
    down = accept(SERVICE, kept, outlook("b", 18101, engine=other), 300.0)
    assert (down.port, down.probe) == (18101, other.probe)


EDITED = replace(SERVICE, generation=3, options={"contextSize": 8192})


def test_an_edit_that_says_nothing_of_the_engine_leaves_the_change_of_ours_waiting() -> None:
    before = running()
    scaled = replace(SERVICE, generation=3, replicas=2, priority="high")
    assert accept(scaled, before, outlook("b", **UP), 200.0).is_run_by("a", before.asked)


def test_a_field_that_another_release_reads_of_a_model_makes_no_edit() -> None:
    """Else an edit that says nothing of the engine would end it, the first one after an upgrade."""

    @dataclass(frozen=True)
    class LaterModel(Model):
        more: str = "x"

    later = LaterModel(**vars(SERVICE.model))
    assert replace(SERVICE, model=later).asked == SERVICE.asked
    assert replace(SERVICE, model=replace(later, limit=ModelLimit(1))).asked != SERVICE.asked


@pytest.mark.parametrize("edit", [{"options": {"contextSize": 1}}, {"extra_args": ("-x",)}, {"uid": "other"}])
def test_an_edit_of_the_resource_is_taken_over_at_once(edit: dict[str, Any]) -> None:
    before = running()
    edited = replace(SERVICE, generation=3, **edit)
    assert not accept(edited, before, outlook("b", **UP), 200.0).is_run_by("a", before.asked)
    model = replace(SERVICE.model, generation=9, source="/models/other.gguf")
    after = accept(replace(SERVICE, model=model), before, outlook("b", **UP), 200.0)
    assert not after.is_run_by("a", before.asked)


def test_an_edit_that_could_not_be_followed_at_once_is_followed_later() -> None:
    before, edited = running(), EDITED
    waiting = accept(edited, before, outlook("b", file=ModelFile("Downloading"), **UP), 200.0)
    assert (waiting.edition, waiting.generation, waiting.asked) == ("a", 3, SERVICE.asked)
    assert accept(edited, waiting, outlook("b", **UP), 300.0).edition == "b"


def test_what_is_only_looked_at_again_is_no_warning_and_what_an_edit_waits_for_is_one() -> None:
    before = accept(SERVICE, None, outlook("a"), 100.0)
    asked = outlook("a", file=ModelFile("Checking", message="asked what it knows"))
    assert accept(SERVICE, before, asked, 200.0) == before
    warned = accept(replace(SERVICE, generation=9), before, asked, 200.0).warning
    assert warned is not None and warned[1] == "asked what it knows; the engine keeps running as it last could"
    assert accept(SERVICE, None, asked, 200.0).verdict.standing is Standing.WAIT


@pytest.mark.parametrize("up, says", [(True, "keeps running"), (False, "starts again")])
def test_a_warning_says_that_an_engine_keeps_running_only_of_one_that_has_a_process(up: bool, says: str) -> None:
    lost = outlook("b", file=ModelFile("Failed", "", reason="ModelFileMissing", message="it is gone"))
    for warned in (refuse(rejected(), running(), 200.0, up=up), accept(EDITED, running(), lost, 200.0, up=up)):
        assert warned.warning and warned.warning[1].endswith(f"; the engine {says} as it last could")


def test_a_good_edit_clears_the_warning_of_a_bad_one() -> None:
    warned = refuse(rejected(), running(), 200.0)
    assert warned.warning is not None
    assert accept(SERVICE, warned, outlook(), 300.0).warning is None


@pytest.mark.parametrize(
    ("service", "standing", "reason"),
    [
        (replace(SERVICE, suspended=True), Standing.SUSPENDED, "Suspended"),
        (replace(SERVICE, replicas=0), Standing.STOPPED, "ManuallyScaledToZero"),
        (replace(SERVICE, replicas=0, suspended=True), Standing.SUSPENDED, "Suspended"),
    ],
)
@pytest.mark.parametrize("hindrance", [{}, {"problem": ("RuntimeBroken", "x")}, {"file": ModelFile("Failed", "R")}])
def test_suspended_and_scaled_to_zero_take_a_running_engine_down_whatever_else_is_wrong(
    service: Service, standing: Standing, reason: str, hindrance: dict[str, Any]
) -> None:
    for before in (None, running()):
        record = accept(service, before, outlook(**hindrance), 200.0)
        assert (record.verdict.standing, record.verdict.reason, record.edition) == (standing, reason, None)
        assert record.port == 18100, "the port stays with a service that rests"


@pytest.mark.parametrize(
    ("hindrance", "standing", "reason", "text"),
    [
        ({"file": ModelFile("Downloading", message="12 %")}, Standing.WAIT, "Downloading", "12 %"),
        ({"file": ModelFile("Checking")}, Standing.WAIT, "Checking", ""),
        (
            {"file": ModelFile("Failed", reason="ModelFileMissing", message="/m.gguf does not exist")},
            Standing.FAILED,
            "ModelFileMissing",
            'Model "phi": spec.source: /m.gguf does not exist',
        ),
        (
            {"file": ModelFile("Failed", reason="SecretNotFound", message="spec.sourceSecretRef: create it")},
            Standing.FAILED,
            "SecretNotFound",
            'Model "phi": spec.sourceSecretRef: create it',
        ),
        ({"problem": ("RuntimeBroken", "no llama-server")}, Standing.FAILED, "RuntimeBroken", "no llama-server"),
        (
            {"problem": ("NoPort", "none free"), "file": ModelFile("Downloading")},
            Standing.FAILED,
            "NoPort",
            "none free",
        ),
    ],
)
class TestSomethingIsInTheWay:
    """Of a service that does not run yet, and of one that does."""

    def test_a_service_that_does_not_run_waits_or_fails_with_the_reason(
        self, hindrance: dict[str, Any], standing: Standing, reason: str, text: str
    ) -> None:
        record = accept(SERVICE, None, outlook(**hindrance, engine=None, program=None), 100.0)
        assert (record.verdict.standing, record.verdict.reason) == (standing, reason)
        assert text in record.verdict.message
        assert record.edition is None

    def test_an_engine_that_runs_keeps_its_spec_and_says_what_is_wrong(
        self, hindrance: dict[str, Any], standing: Standing, reason: str, text: str
    ) -> None:
        before = running(stopped_by_hand=True, retry_at=7.0, withdraw="t")
        record = accept(replace(SERVICE, generation=9), before, outlook(**hindrance, engine=None, program=None), 200.0)
        assert record.warning is not None
        assert record.warning[0] == reason and text in record.warning[1] and "keeps running" in record.warning[1]
        assert record == replace(before, generation=9, warning=record.warning)

    def test_it_runs_as_soon_as_that_is_gone(
        self, hindrance: dict[str, Any], standing: Standing, reason: str, text: str
    ) -> None:
        waiting = accept(SERVICE, None, outlook(**hindrance, engine=None, program=None), 100.0)
        record = accept(SERVICE, waiting, outlook(), 150.0)
        assert (record.verdict.standing, record.verdict.since) == (Standing.RUN, 150.0)


def test_a_file_that_nothing_is_known_of_yet_is_still_a_message() -> None:
    assert accept(SERVICE, None, outlook(file=ModelFile("Checking")), 1.0).verdict.message


# ── refused ──────────────────────────────────────────────────────────────────────────────────────


def test_a_bad_edit_leaves_the_engine_exactly_as_it_runs() -> None:
    before = running(retry_at=3.0, withdraw="t", stopped_by_hand=True)
    record = refuse(rejected(replicas=5, endpoint=None), before, 500.0)
    assert record.warning is not None and record.warning[0] == "InvalidSpec"
    assert record.warning[1].startswith("spec.x is wrong") and "keeps running" in record.warning[1]
    assert record == replace(before, uid="u", generation=3, warning=record.warning)


# ── rejected by LLMKube's operator ───────────────────────────────────────────────────────────────


def test_a_running_engine_of_a_rejected_model_is_left_running_and_its_next_start_is_barred() -> None:
    before = running()
    record = refuse(rejected(reason="ModelSourceNotAllowed"), before, 500.0)
    assert (record.runs, record.edition) == (True, before.edition)
    assert record.barred == "ModelSourceNotAllowed: spec.x is wrong"
    assert record.warning is not None and record.warning[1].endswith("keeps running, and its next start is refused")


def test_a_barred_service_fails_once_a_start_was_refused_and_stays_barred_until_its_model_is_accepted() -> None:
    barred = refuse(rejected(reason="ModelSourceNotAllowed"), running(), 500.0)
    failed = refuse(rejected(reason="ModelSourceNotAllowed"), barred, 600.0, start_refused=True)
    assert (failed.verdict.standing, failed.verdict.reason) == (Standing.FAILED, "ModelSourceNotAllowed")
    assert failed.edition is None and failed.barred, "supervisord may try again before its section is gone"
    assert refuse(rejected(reason="ModelSourceNotAllowed"), None, 500.0).barred, "one that never ran, too"
    assert not accept(SERVICE, failed, outlook(), 700.0).barred
    assert not refuse(rejected(), barred, 700.0).barred, "another refusal bars no start"


@pytest.mark.parametrize("reason", ["Deleting", "NotMetal", "ServiceConflict"])
def test_a_refusal_that_means_it_takes_the_engine_down_and_keeps_the_port(reason: str) -> None:
    record = refuse(rejected(False, reason), running(), 500.0)
    assert (record.verdict.standing, record.verdict.reason) == (Standing.FAILED, reason)
    assert (record.verdict.message, record.verdict.since) == ("spec.x is wrong", 500.0)
    assert (record.edition, record.port, record.endpoint) == (None, 18100, ENDPOINT)


def test_a_withdrawal_that_was_asked_for_is_not_forgotten_by_the_next_pass() -> None:
    # Otherwise the controller waits out the full 2 s, and the sidecar drops the slice instead of draining it.
    asked = replace(refuse(rejected(False), running(), 500.0), withdraw="token")
    assert refuse(rejected(False), asked, 501.0).withdraw == "token"
    assert accept(replace(SERVICE, suspended=True), running(withdraw="token"), outlook(), 1.0).withdraw == "token"
    assert dismiss(running(withdraw="token"), 1.0).withdraw == "token"


def test_that_we_stopped_the_process_ourselves_is_not_forgotten_by_the_next_pass() -> None:
    # Otherwise a Model that comes back within the seconds of a stop finds its service "stopped by hand" for good.
    asked = replace(refuse(rejected(False), running(), 500.0), stop_sent=True)
    assert refuse(rejected(False), asked, 501.0).stop_sent
    assert accept(replace(SERVICE, suspended=True), running(stop_sent=True), outlook(), 1.0).stop_sent
    assert accept(SERVICE, running(stop_sent=True), outlook("b"), 1.0).stop_sent
    assert dismiss(running(stop_sent=True), 1.0).stop_sent


def test_what_is_wrong_with_the_model_is_told_before_what_this_mac_lacks() -> None:
    # A wrong spec.format asks for another engine, which may be missing: that is not what has to be put right.
    file = ModelFile("Failed", reason="InvalidModelFile", message="/m.gguf is a file, and spec.format mlx wants more")
    record = accept(SERVICE, None, outlook(file=file, problem=("RuntimeBinaryMissing", "install mlx_lm")), 1.0)
    assert record.verdict.reason == "InvalidModelFile" and 'Model "phi"' in record.verdict.message


def test_a_service_that_never_ran_fails_even_if_an_engine_would_have_kept_running() -> None:
    for before in (None, accept(SERVICE, None, outlook(file=ModelFile("Downloading")), 1.0)):
        record = refuse(rejected(), before, 500.0)
        assert (record.verdict.standing, record.edition, record.warning) == (Standing.FAILED, None, None)
        assert (record.program, record.generation, record.model) == ("default.tiny", 3, "phi")


@pytest.mark.parametrize("off", [{"suspended": True}, {"replicas": 0}])
def test_a_refusal_does_not_start_what_was_suspended_or_scaled_to_zero(off: dict[str, Any]) -> None:
    resting = accept(replace(SERVICE, **off), running(), outlook(), 200.0)
    record = refuse(rejected(), resting, 300.0)
    assert (record.verdict.standing, record.edition) == (Standing.FAILED, None)


def test_what_is_gone_is_removed() -> None:
    record = dismiss(running(warning=("a", "b")), 300.0)
    assert (record.verdict.standing, record.verdict.since) == (Standing.REMOVING, 300.0)
    assert (record.edition, record.warning, record.program) == (None, None, "default.tiny")
    assert dismiss(record, 400.0) == record


# ── since ────────────────────────────────────────────────────────────────────────────────────────


@given(st.sampled_from(Standing), st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
@settings(max_examples=30, database=None, derandomize=True)
def test_since_is_when_standing_or_reason_last_changed_whatever_the_message(
    standing: Standing, reason: str, message: str, other: str
) -> None:
    first = verdict(None, standing, reason, message, 10.0)
    assert first.since == 10.0
    second = verdict(first, standing, reason, other, 20.0)
    assert (second.since, second.message) == (10.0, other)
    assert verdict(second, standing, reason + "x", other, 30.0).since == 30.0
    another = Standing.RUN if standing is not Standing.RUN else Standing.WAIT
    assert verdict(second, another, reason, other, 30.0).since == 30.0


def test_progress_of_a_download_does_not_move_since() -> None:
    record = accept(SERVICE, None, outlook(file=ModelFile("Downloading", message="1 %")), 10.0)
    later = accept(SERVICE, record, outlook(file=ModelFile("Downloading", message="2 %")), 20.0)
    assert (later.verdict.since, later.verdict.message) == (10.0, "2 %")


# ── ports ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("wanted", "kept", "taken", "expected"),
    [
        (None, (), (), 100),
        (None, (), (100, 101), 102),
        (None, (102,), (), 102),
        (None, (102,), (102,), 100),
        (None, (900,), (), 100),
        (None, (900, 101), (), 101),
        (101, (102,), (), 101),
        (101, (), (101,), 101),
        (7, (102,), (), 102),
        (22, (22,), (), 100),
        (None, (), (100, 101, 102), None),
        (None, (102,), (100, 101, 102), None),
    ],
)
def test_the_port_is_the_wanted_else_a_kept_else_the_first_free_of_those_allowed(
    wanted: int | None, kept: tuple[int, ...], taken: tuple[int, ...], expected: int | None
) -> None:
    assert choose_port(wanted, kept, range(100, 103), lambda port: port not in taken) == expected


def test_the_ports_of_all_others_are_taken_also_those_at_rest() -> None:
    other = replace(dismiss(running(), 1.0), name="other", port=18101)
    none = replace(running(), name="none", port=None)
    ports = Ports([running(), other, none])
    assert (ports.holder(18101, TINY), ports.holder(18100, TINY)) == (("default", "other"), None)
    assert ports.holder(18100, ("default", "other")) == TINY


def test_the_port_of_the_next_start_is_taken_for_all_others(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.create()
    state.write_spec(Program("default.tiny", "b", '{"port": 18105}'))
    ports = PortChoice(Settings(), state).held([running()])
    assert ports.holder(18105, ("default", "other")) is not None and ports.holder(18105, TINY) is None


def test_a_port_that_no_spec_names_is_not_blamed_on_one(tmp_path: Path) -> None:
    note = RunNote(0, 0, "", {"edition": "a"}, (), 0.0, "PortInUse", "port 18100 is taken by x")
    choice = PortChoice(Settings(ports="18100-18101"), StateDir(tmp_path))
    for wanted, says in ((18100, "spec.containerPort 18100 is taken"), (None, "port 18100 is taken")):
        service = replace(SERVICE, container_port=wanted)
        warning = choice.with_trouble(running(), service, {"default.tiny": note}).warning
        assert warning is not None and warning[1].startswith(says)
    assert "--ports 18100-18101" in warning[1]


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"port": 18101}, "belongs to default.other already"),
        ({"namespace": "team", "port": 18101}, "is taken"),
        ({"namespace": "team", "front_port": 18101}, "is taken"),
        ({"namespace": "", "port": 18101}, "is taken"),
    ],
)
def test_a_port_conflict_names_no_service_of_another_namespace(tmp_path: Path, held: Any, says: str) -> None:
    choice = PortChoice(Settings(ports="18100-18101"), StateDir(tmp_path))
    ports = Ports([replace(running(), name="other", **held)])
    port, problem = choice.of(replace(SERVICE, container_port=18101), None, ports, SNAPSHOT)
    assert (port, problem) == (None, ("PortInUse", f"spec.containerPort 18101 {says}; choose another"))


def test_an_unloaded_service_leaves_its_engines_port_to_others_and_gets_one_when_it_is_loaded(tmp_path: Path) -> None:
    choice = PortChoice(Settings(ports="18100-18102"), StateDir(tmp_path))
    on_demand = replace(SERVICE, idle_s=60.0, container_port=18101)
    unloaded = verdict(None, Standing.WAIT, "Unloaded", "", 1.0)
    record = replace(running(), verdict=unloaded, edition=None, idle_s=60.0, port=18101, front_port=18100)
    other = replace(running(), name="other", namespace="team", port=18101)
    assert Ports([record]).holder(18101, other.key) is None
    waited_for = replace(SNAPSHOT, uses={record.program: EngineUse(waiting=1)})
    full = Ports([record, other, replace(other, name="third", port=18102)])
    assert choice.of(on_demand, record, full, SNAPSHOT) == (18101, None), "judged by a port that it does not hold"
    says = "no port of --ports 18100-18102 is free: team holds 2, default holds 1; widen the range"
    assert choice.of(on_demand, record, full, waited_for) == (None, ("NoPort", says))
    assert choice.of(on_demand, record, Ports([record, other]), waited_for) == (18102, None)


def test_an_engine_that_moves_leaves_its_port_and_a_daemon_shares_its_own() -> None:
    ports = Ports([running(), replace(running(), name="shares")])
    ports.hold(replace(running(), port=18102))
    assert (ports.holder(18102, ("", "")), ports.holder(18100, ("", ""))) == (TINY, ("default", "shares"))
    assert ports.holder(18100, ("", ""), "llama-server") is None, "the daemon's own services"
    ports.hold(replace(running(), name="shares", port=None))
    assert ports.holder(18100, ("", "")) is None


def free_of(records: list[Record], key: Key) -> Callable[[int], bool]:
    ports = Ports(records)
    return lambda port: ports.holder(port, key) is None


@given(st.lists(st.booleans(), max_size=12))
@settings(max_examples=50, database=None, derandomize=True)
def test_no_two_services_ever_get_one_port_and_each_keeps_its_own(arrivals: list[bool]) -> None:
    records: list[Record] = []
    for number, arrives in enumerate(arrivals):
        if not arrives and records:
            records.pop(0)
            continue
        key = ("default", f"s{number}")
        port = choose_port(None, (), range(100, 120), free_of(records, key))
        records.append(replace(running(), name=key[1], port=port))
        for record in records:
            free = free_of(records, record.key)
            assert choose_port(None, (record.port,), range(100, 120), free) == record.port
    ports = [record.port for record in records]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize(("kind", "directory"), [("gguf", True), ("mlx", False), ("safetensors", False)])
def test_a_directory_for_a_file_and_the_other_way_round_is_refused(kind: str, directory: bool) -> None:
    ready = ModelFile("Ready", "/models/m", 5, directory=directory)
    found = fitting(ready, kind)
    assert (found.phase, found.reason) == ("Failed", "InvalidModelFile")
    assert f"spec.format {kind} wants" in found.message
    assert fitting(replace(ready, directory=not directory), kind).phase == "Ready"
    assert fitting(ModelFile("Checking"), kind).phase == "Checking"
