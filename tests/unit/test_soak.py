"""The soak's checker can fail: every violation, made by hand, is reported; what is allowed is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import soak_check
import soak_plan
from soak_check import Answer, Engine, Excuses, Resources, Sample
from soak_watch import engines, is_launcher, ready_services, role_of

ONE, OTHER = Engine(11, "one", 9001), Engine(12, "one", 9001)


def history(*looks: tuple[float, tuple[Engine, ...], frozenset[str] | None], **more: object) -> list[Sample]:
    """Samples of (time, engines, ready); the API is asked at the same moment."""
    return [Sample(at, found, at, ready, **more) for at, found, ready in looks]  # type: ignore[arg-type]


READY, NONE = frozenset({"one"}), frozenset[str]()


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


def test_one_seed_is_one_sequence_and_another_is_another() -> None:
    again = [soak_plan.sequence(7, 60, 30) for _ in range(2)]
    assert again[0] == again[1] != soak_plan.sequence(8, 60, 30)
    assert len(again[0]) == 2 and all(0 < fault.at_s < 30 for each in again[0] for fault in each)


def test_nothing_that_excuses_a_cut_is_done_to_the_calm_and_every_fault_can_be_drawn() -> None:
    drawn = [fault for each in soak_plan.sequence(1, 4000, 30) for fault in each]
    assert {fault.kind.name for fault in drawn} == {kind.name for kind in soak_plan.KINDS}
    assert not [fault for fault in drawn if fault.target in soak_plan.CALM and fault.kind.hurts]
    assert {fault.target for fault in drawn} >= {*soak_plan.CALM, *soak_plan.PREY, *soak_plan.ROLES}


def test_command_lines_are_told_apart() -> None:
    engine = ["llama-server", "--model", "m", "--alias", "one,tiny", "--port", "9001"]
    launcher = ["python", "-I", "-S", "/x/current/launch.py", "/x/specs/default.one.0123.json"]
    assert engines({5: (1.0, engine), 6: (1.0, launcher)}) == [Engine(5, "one", 9001, 1.0)]
    assert is_launcher(launcher) and not is_launcher(engine)
    assert role_of(["python", "-I", "-m", "metal_supervisor", "sidecar", "--state-dir", "/x"]) == "sidecar"
    assert role_of(["python", "-I", "-m", "metal_supervisor.boundary.supervisord", "-n"]) == "supervisord"
    assert role_of(engine) == ""


def test_ready_endpoints_are_read_from_slices() -> None:
    def item(name: str, *ready: bool) -> dict[str, object]:
        endpoints = [{"conditions": {"ready": each}} for each in ready]
        return {"metadata": {"labels": {"kubernetes.io/service-name": name}}, "endpoints": endpoints}

    assert ready_services([item("one", False, True), item("two", False), item("three")]) == {"one"}
