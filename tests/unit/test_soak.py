"""The soak's checker can fail: every violation, made by hand, is reported; what is allowed is not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_gguf

from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Standing
from tests.support.records import a_record
from tests.support.soak import soak_check, soak_memory, soak_plan
from tests.support.soak.soak_check import Answer, Claim, Engine, Excuses, Resources, Sample, overdue
from tests.support.soak.soak_faults import order
from tests.support.soak.soak_memory import Queue, Reservations, Sizes, Want, first_wants, untrue
from tests.support.soak.soak_watch import engines, is_launcher, ready_services, role_of
from tests.support.system import eventually

ONE = Engine(11, "one", 9001)
OTHER = Engine(12, "one", 9001)


def history(*looks: tuple[float, tuple[Engine, ...], frozenset[str] | None], **more: object) -> list[Sample]:
    """Samples of (time, engines, ready); the API is asked at the same moment."""
    return [Sample(at, found, at, ready, **more) for at, found, ready in looks]  # type: ignore[arg-type]


READY = frozenset({"one"})
NONE = frozenset[str]()


def rules(samples: list[Sample], **more: object) -> list[int]:
    return [violation.rule for violation in soak_check.check(samples, **more)]  # type: ignore[arg-type]


def test_a_quiet_history_breaks_nothing() -> None:
    assert rules(history(*((at / 5, (ONE,), READY) for at in range(100)))) == []


@pytest.mark.parametrize("second", [OTHER, Engine(12, "one", 9002)])
def test_two_live_engines_of_a_service_are_reported_once_whatever_their_ports(second: Engine) -> None:
    found = soak_check.check(history((0.0, (ONE,), READY), *((at, (ONE, second), READY) for at in (0.2, 0.4))))
    assert [each.rule for each in found if each.rule == 1] == [1]
    assert "pid 11" in found[0].text and "pid 12" in found[0].text


def test_two_engines_are_not_told_again_as_restarts() -> None:
    both = history(*((at / 5, (ONE, OTHER), READY) for at in range(10)))
    assert rules([*history((-1.0, (ONE,), READY)), *both]) == [1]


def test_engines_of_two_services_are_no_double() -> None:
    assert rules(history((0.0, (ONE, Engine(12, "two", 9002)), READY))) == []


def test_a_ready_endpoint_on_a_dead_engine_is_reported_after_the_grace_and_once() -> None:
    after_a_pause = history((0.0, (ONE,), READY), (10.0, (), READY), (10.9, (), READY))
    assert rules(after_a_pause) == []
    assert rules([*after_a_pause, *history((11.1, (), READY), (11.3, (), READY))]) == [2]
    assert rules([*after_a_pause, *history((11.1, (), READY))], grace_s=2.0) == []
    assert rules([*after_a_pause, *history((11.1, (), NONE))]) == []


def test_an_old_answer_of_the_api_proves_nothing() -> None:
    assert rules([Sample(10.0, (), 9.9, READY), Sample(11.2, (), 10.9, READY)]) == []


@pytest.mark.parametrize("trouble", [{"sidecar": False}, {"held": frozenset({"apiserver"})}, {"ready": None}])
def test_the_clock_stands_while_sidecar_or_api_are_down_and_runs_again_afterwards(trouble: dict[str, object]) -> None:
    down = [Sample(at, (), at, **{"ready": READY, **trouble}) for at in (10.0, 12.0, 14.0)]  # type: ignore[arg-type]
    up = history((14.2, (), READY), (16.6, (), READY))
    assert rules([*down, *up]) == []
    assert rules([*down, *up, *history((16.8, (), READY))]) == [2]


def test_a_held_supervisord_or_controller_does_not_stop_the_clock() -> None:
    held = {"held": NONE}  # they are never among what is held
    assert rules(history((10.0, (), READY), (11.2, (), READY), **held)) == [2]


def test_an_engine_restarted_unasked_is_reported_and_one_that_was_asked_for_is_not() -> None:
    restarted = history((0.0, (ONE,), READY), (5.0, (), NONE), (9.0, (OTHER,), READY))
    assert rules(restarted) == [3]
    excuses = Excuses(quiets=[0.0])
    excuses.touch(4.0, "two")
    assert rules(restarted, excuses=excuses) == [3]
    excuses.touch(4.0, "one")
    assert rules(restarted, excuses=excuses) == []
    excuses.quiets.append(4.5)  # whatever was done is over: it explains no restart after this
    late = history((4.6, (ONE,), READY), (9.0, (OTHER,), READY))
    assert rules(late, excuses=excuses) == [3]


def test_a_cut_answer_is_reported_unless_something_was_done_to_its_service_meanwhile() -> None:
    whole = Answer("one", 1.0, 5.0, 100, 102)
    cut = Answer("one", 1.0, 5.0, 100, 40, "IncompleteRead(0 bytes read)")
    excuses = Excuses(quiets=[0.0])
    assert [each.rule for each in soak_check.cut([whole, cut], excuses)] == [3]
    assert "40 of 100" in soak_check.cut([cut], excuses)[0].text
    excuses.touch(6.0, "one")
    assert soak_check.cut([cut], excuses), "what is done afterwards excuses nothing"
    excuses.touch(0.5, "one")
    assert not soak_check.cut([cut], excuses), "an edit may take a while to arrive"
    excuses.quiets.append(0.7)
    assert soak_check.cut([cut], excuses), "but not beyond a quiet moment"


def test_descriptors_that_grow_are_reported_and_those_of_more_engines_are_not() -> None:
    def point(fds: int, engines: int = 5) -> dict[str, Resources]:
        return {"sidecar": Resources("sidecar", 1, fds, 1 << 20, engines)}

    assert soak_check.leaks([point(20), point(25), point(28)]) == []
    assert "sidecar holds 29" in soak_check.leaks([point(20), point(29)])[0]
    assert soak_check.leaks([point(20), point(32, engines=6)]) == []
    assert soak_check.leaks([point(20, engines=9), point(29, engines=5)]), "fewer engines allow no more"


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def test_engines_beyond_the_budget_are_reported_once_and_a_sum_at_the_budget_is_none() -> None:
    one, two = Engine(11, "one", 9001, 0.0, 60), Engine(12, "two", 9002, 0.0, 40)
    at_it = history(*((at / 5, (one, two), NONE) for at in range(5)))
    assert rules(at_it, budget_bytes=100) == []
    assert rules(at_it) == [], "nobody knows of a budget"
    over = history(*((1 + at / 5, (one, replace(two, reserved_bytes=41)), NONE) for at in range(5)))
    found = soak_check.check([*at_it, *over], budget_bytes=100)
    assert [each.rule for each in found] == [6]
    assert "101 bytes of a budget of 100" in found[0].text and "one 60 (pid 11)" in found[0].text
    again = history((3.0, (one,), NONE), (3.2, (one, replace(two, reserved_bytes=41)), NONE))
    assert rules([*over, *again], budget_bytes=100) == [6, 6]


def test_an_engine_on_its_way_out_counts_beside_the_one_that_takes_its_room() -> None:
    old, new = Engine(11, "one", 9001, 0.0, 60), Engine(12, "two", 9002, 0.0, 60)
    assert rules(history((0.0, (old,), NONE), (0.2, (old, new), NONE), (0.4, (new,), NONE)), budget_bytes=100) == [6]
    assert rules(history((0.0, (old,), NONE), (0.2, (), NONE), (0.4, (new,), NONE)), budget_bytes=100) == []


def test_what_somebody_starts_by_hand_although_it_is_off_is_not_counted_and_what_ran_before_is() -> None:
    excuses, old = Excuses(by_hand={"one": 50.0}), Engine(11, "one", 9001, 40.0, 60)
    other = Engine(12, "two", 9002, 70.0, 60)
    assert rules([Sample(0.0, (old, other))], budget_bytes=100, excuses=excuses) == [6]
    assert rules([Sample(0.0, (replace(old, started=51.0), other))], budget_bytes=100, excuses=excuses) == []
    assert rules([Sample(0.0, (old, replace(other, started=51.0)))], budget_bytes=100, excuses=excuses) == [6]


def test_a_reservation_below_zero_makes_no_room_and_one_that_nobody_can_read_is_counted() -> None:
    checker = soak_check.Checker(1.0, Excuses(), 100)
    strange = Engine(11, "one", 9001, 0.0, -50), Engine(12, "two", 9002, 0.0, 101)
    assert [each.rule for each in checker.see(Sample(0.0, strange))] == [6]
    assert checker.peak_bytes == 101 and checker.unsized == 0
    checker.see(Sample(0.2, (Engine(11, "one", 9001),)))
    assert checker.unsized == 1


def test_what_is_reserved_is_read_from_the_note_of_the_process_and_remembered(tmp_path: Path) -> None:
    note = tmp_path / "runs" / "default.one.json"
    note.parent.mkdir()
    environment = {**os.environ, "METAL_SUPERVISOR_ENGINE": str(tmp_path / "specs" / note.name)}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as process:
        reservations, engine = Reservations(), Engine(process.pid, "one", 9001, 1.0)
        note.write_text(json.dumps({"pid": process.pid, "spec": {"reserved_bytes": 7}}))
        eventually(lambda: reservations.of(engine) == 7, what="the environment of a young program")
        note.write_text("{ half a f")
        assert reservations.of(engine) == 7
        assert Reservations().of(engine) == 0
        process.communicate(b"\n")
    assert Reservations().of(engine) == 0


def claim(name: str, need: int, holds: int = 0, asked: float = 0.0, priority: int = 1, **more: bool) -> Claim:
    return Claim(name, priority, asked, need, holds, **{"waits": not holds, **more})


def test_who_waits_although_it_fits_is_overdue_and_who_does_not_fit_is_not() -> None:
    runs = claim("one", 60, 60)
    assert overdue([runs, claim("two", 41)], 100) == []
    assert overdue([runs, claim("two", 101)], 160) == [], "60 + 101 > 160"
    assert "two waits" in overdue([runs, claim("two", 40)], 100)[0], "to the byte"
    assert overdue([runs, claim("two", 101)], 100) == [], "more than there ever is"


def test_an_edit_waits_only_if_its_own_engine_leaves_too_little() -> None:
    other = claim("one", 60, 60)
    assert overdue([other, claim("two", 41, 30, waits=True)], 100) == []
    assert "30 by itself" in overdue([other, claim("two", 40, 30, waits=True)], 100)[0]
    assert overdue([other, claim("two", 20, 30, waits=True)], 100), "what gives room back waits for nobody"


def test_one_that_fits_may_wait_behind_one_that_it_would_keep_out_and_behind_no_other() -> None:
    runs, ahead = claim("one", 60, 60), claim("two", 80, asked=1.0)
    assert overdue([runs, ahead, claim("three", 30, asked=2.0)], 100) == []
    assert overdue([runs, ahead, claim("three", 20, asked=2.0)], 100), "both fit once the first is gone"
    assert overdue([runs, ahead, claim("three", 30, asked=0.5)], 100), "it is ahead itself"
    assert overdue([runs, ahead, claim("three", 30, asked=2.0, priority=2)], 100), "it is more important"
    assert overdue([runs, replace(ahead, need_bytes=101), claim("three", 30, asked=2.0)], 100), "that one never fits"


def test_with_preemption_nobody_waits_for_what_less_important_ones_hold_unless_they_are_protected() -> None:
    low, high = claim("low", 60, 60), claim("high", 90, priority=2)
    assert overdue([low, high], 100) == []
    assert overdue([low, high], 100, preemption=True)
    assert overdue([replace(low, protected=True), high], 100, preemption=True) == []
    assert overdue([replace(low, priority=2), high], 100, preemption=True) == []


def test_the_arithmetic_that_somebody_who_waits_is_told_must_be_right() -> None:
    mib = 1 << 20
    runs, waits = claim("one", 60 * mib, 60 * mib), claim("two", 41 * mib)
    said = "needs 41 MiB, 40 MiB of 100 MiB left; try a smaller quantization (queue position 1)"
    assert untrue(waits, said, [runs, waits], 100 * mib) == ""
    assert "needs 41 MiB, 39 MiB" in untrue(waits, said, [runs, waits], 99 * mib)
    edit = claim("two", 50 * mib, 30 * mib, waits=True)
    assert untrue(edit, "needs 50 MiB, 40 MiB of 100 MiB left", [runs, edit], 100 * mib) == ""
    assert untrue(edit, "needs 20 MiB, 10 MiB of 100 MiB left, but one …", [runs, edit], 100 * mib) == ""
    assert untrue(edit, "needs 50 MiB, 10 MiB of 100 MiB left", [runs, edit], 100 * mib)


def test_the_budget_of_a_soak_is_tight(tmp_path: Path) -> None:
    tiny_gguf.write_tiny_gguf(tmp_path / "tiny.gguf", context=soak_memory.CALM_CONTEXT)
    sizes = Sizes(tmp_path / "tiny.gguf")
    first, one = sum(map(sizes.need_bytes, first_wants().values())), sizes.need_bytes(Want())
    assert first < sizes.budget.bytes < first + one
    assert sizes.need_bytes(Want(cache_mib=int(soak_plan.CACHES_MIB[-1]))) > sizes.budget.bytes
    assert sizes.need_bytes(Want(cache_mib=16)) < one < sizes.need_bytes(Want(context=8192))


def test_waits_are_counted_when_they_begin() -> None:
    def record(name: str, standing: Standing, reason: str, warning: tuple[str, str] | None = None) -> Record:
        verdict = Verdict(standing, reason, "text", 0.0)
        return a_record(
            name,
            program=name,
            model="m",
            runtime="llama.cpp",
            verdict=verdict,
            endpoint=name,
            port=1,
            warning=warning,
        )

    runs, out = record("a", Standing.RUN, "Admitted"), record("b", Standing.WAIT, "InsufficientMemory")
    edit, loads = record("c", Standing.RUN, "", ("InsufficientMemory", "t")), record("d", Standing.WAIT, "Downloading")
    queue = Queue()
    for seen in ([runs, loads], [runs, out], [runs, out, edit], [runs, edit], [runs, out, edit]):
        queue.look({each.program: each for each in seen})
    assert (queue.times, queue.longest) == (3, 2)


def test_one_seed_is_one_sequence_and_another_is_another() -> None:
    again = [soak_plan.sequence(7, 60, 30) for _ in range(2)]
    assert again[0] == again[1] != soak_plan.sequence(8, 60, 30)
    assert len(again[0]) == 2 and all(0 < fault.at_s < 30 for each in again[0] for fault in each)


def test_nothing_that_excuses_a_cut_is_done_to_the_calm_and_every_fault_can_be_drawn() -> None:
    drawn = [fault for each in soak_plan.sequence(1, 4000, 30) for fault in each]
    assert {fault.kind.name for fault in drawn} == {kind.name for kind in soak_plan.KINDS}
    assert not [fault for fault in drawn if fault.target in soak_plan.CALM and fault.kind.hurts]
    assert {fault.target for fault in drawn} >= {*soak_plan.CALM, *soak_plan.PREY, *soak_plan.ROLES}
    assert {fault.target for fault in drawn if fault.kind.name == "term"} == {*soak_plan.TERMINATED}


def test_command_lines_are_told_apart() -> None:
    engine = ["llama-server", "--model", "m", "--alias", "one,tiny", "--port", "9001"]
    launcher = ["python", "-I", "-S", "/x/current/launch.py", "/x/specs/default.one.json"]
    assert engines({5: (1.0, engine), 6: (1.0, launcher)}) == [Engine(5, "one", 9001, 1.0)]
    assert is_launcher(launcher) and not is_launcher(engine)
    assert role_of(["python", "-I", "-m", "metal_supervisor", "sidecar", "--state-dir", "/x"]) == "sidecar"
    assert role_of(["python", "-I", "-m", "metal_supervisor.supervisord.daemon", "-n"]) == "supervisord"
    assert role_of(["python", "-I", "-m", "metal_supervisor", "gateway-2", "--state-dir", "/x"]) == "gateway"
    assert role_of(engine) == ""


def test_ready_endpoints_are_read_from_slices() -> None:
    def item(name: str, *ready: bool) -> dict[str, object]:
        endpoints = [{"conditions": {"ready": each}} for each in ready]
        return {"metadata": {"labels": {"kubernetes.io/service-name": name}}, "endpoints": endpoints}

    assert ready_services([item("one", False, True), item("two", False), item("three")]) == {"one"}


def test_an_order_that_is_not_answered_in_time_counts_as_given() -> None:
    """The stand-in may have taken it: the fault has to be expected, and undone."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        order(port, {"hang": True})
        taken, _ = busy.accept()
        with taken:
            assert b'{"hang": true}' in taken.recv(4096)
    with pytest.raises(ConnectionRefusedError):
        order(port, {"hang": True})
