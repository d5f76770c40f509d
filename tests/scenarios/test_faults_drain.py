"""An engine that has to go finishes what it answers, whatever else breaks meanwhile, and never takes for ever."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.faults import Figure, fault
from tests.support.system import Stream, System, api_faults, eventually, halted, kill, running, service

LONG = 500
"""Tokens of an answer that takes some seconds."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    base = tmp_path_factory.mktemp("drain")
    with running(base, "--drain-timeout", "120", "--stop-timeout", "60") as up:
        up.take_orders()
        up.apply(up.tiny_model())
        yield up


@pytest.fixture
def system(shared: System) -> System:
    """One that runs; a test may leave it stopped."""
    if shared.process is None:
        shared.start().take_orders()
    return shared


def roomy(name: str, **spec: Any) -> dict[str, Any]:
    return service(name, **{"contextSize": 32768, **spec})


def streaming(system: System, name: str, tokens: int = LONG, **spec: Any) -> tuple[int, Any]:
    """(pid, an answer under way) of a service of its own."""
    system.apply(roomy(name, **spec))
    return system.ready(name), system.stream(name, tokens).last()


def uncut(stream: Stream, figure: Figure) -> None:
    """Waits for the end of an answer, and tells whether it came by itself."""
    whole = stream.completed()
    figure.add("answers cut", int(not whole), "")
    assert whole, stream.error


def replaced(system: System, name: str, engine: int) -> None:
    eventually(lambda: system.pid(name) not in (0, engine), 60, "the new engine")
    system.ready(name, within_s=60)


def gone(system: System, name: str) -> None:
    system.delete(name)
    eventually(lambda: f"default.{name}" not in system.rpc.table(), 60, f"{name} to be gone")


@fault(
    "L1",
    "a spec is edited under a streaming chat",
    happens="withdrawn, drained, replaced",
    sees="Progressing, Restarting, then Ready",
    bound="0 bytes lost",
)
def test_an_edit_waits_for_the_answer_under_way(system: System, figure: Figure) -> None:
    engine, stream = streaming(system, "edited", 3 * LONG)  # under way until the endpoint is seen to be withdrawn
    with figure.timed("edit to new engine"):
        system.apply(roomy("edited", parallelSlots=2))
        eventually(lambda: system.slice_ready("edited") is False, 20, "the endpoint to be withdrawn")
        assert system.pid("edited") == engine
        uncut(stream, figure)
        replaced(system, "edited", engine)
    gone(system, "edited")


@fault(
    "L1b",
    "the edit gives the engine another port, or the engine does not tell whether it is busy",
    happens="the old port is asked; without slots, whether anybody is connected",
    sees="as above",
    bound="0 bytes lost",
)
@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {"containerPort": -1}), ({"extraArgs": ["--threads", "1", "--no-slots"]}, {"parallelSlots": 2})],
    ids=["port", "no-slots"],
)
def test_an_edit_of_what_is_asked_waits_too(
    system: System, before: dict[str, Any], after: dict[str, Any], figure: Figure
) -> None:
    engine, stream = streaming(system, "moved", **before)
    if "containerPort" in after:
        after = {"containerPort": system.ports[after["containerPort"]]}
    with figure.timed("edit to new engine"):
        system.apply(roomy("moved", **{**before, **after}))
        uncut(stream, figure)
        replaced(system, "moved", engine)
    gone(system, "moved")


@fault(
    "L2",
    "a service is deleted under a streaming chat",
    happens="withdrawn, drained, ended",
    sees="it is listed until the answer has ended",
    bound="0 bytes lost",
)
def test_a_deletion_waits_for_the_answer_under_way(system: System, figure: Figure) -> None:
    _, stream = streaming(system, "deleted")
    with figure.timed("delete to gone"):
        gone(system, "deleted")
    uncut(stream, figure)


@fault(
    "L3",
    "the sidecar is killed with -9 in the middle of a drain",
    happens="the next one goes on asking",
    sees="nothing",
    bound="0 bytes lost",
)
def test_a_sidecar_that_dies_in_a_drain_cuts_nothing(system: System, figure: Figure) -> None:
    engine, stream = streaming(system, "orphaned")
    system.apply(roomy("orphaned", parallelSlots=2))
    eventually(lambda: system.slice_ready("orphaned") is False, 20, "the endpoint to be withdrawn")
    kill(system.own_pid("sidecar"))
    uncut(stream, figure)
    with figure.timed("end of the answer to new engine"):
        replaced(system, "orphaned", engine)
    gone(system, "orphaned")


@fault(
    "L3b",
    "the sidecar hangs while a service is edited under a chat",
    happens="the controller waits 2 s for it, and then as long as a drain may take at most",
    sees="nothing",
    bound="2 s, then --drain-timeout",
)
def test_a_sidecar_that_hangs_does_not_hold_an_idle_engine(system: System, figure: Figure) -> None:
    system.apply(roomy("held"))
    engine = system.ready("held")
    with halted(system.own_pid("sidecar")):
        started = time.monotonic()
        system.apply(roomy("held", parallelSlots=2))
        eventually(lambda: system.pid("held") not in (0, engine), 60, "the new engine")
        figure.add("edit to new engine", time.monotonic() - started)
    system.ready("held", within_s=60)
    gone(system, "held")


@fault(
    "L4",
    "the API takes no writes while a service is edited under a chat",
    happens="the endpoint cannot be withdrawn; the answer is waited for all the same",
    sees="PublishFailed until it can be written",
    bound="0 bytes lost",
)
def test_an_api_that_takes_no_writes_cuts_nothing(system: System, figure: Figure) -> None:
    engine, stream = streaming(system, "unwritable")
    rule = {"verb": "apply", "resource": "endpointslices", "action": {"status": 503}}
    api_faults(system.kube.server, rule)
    system.apply(roomy("unwritable", parallelSlots=2))
    uncut(stream, figure)
    assert system.slice_ready("unwritable") is True
    with figure.timed("end of the answer to new engine"):
        eventually(lambda: system.pid("unwritable") not in (0, engine), 60, "the new engine")
    api_faults(system.kube.server)
    system.ready("unwritable", within_s=90)
    gone(system, "unwritable")


@fault(
    "L5",
    "spec.rolloutPolicy says force, or a short idleTimeoutSeconds, and a chat streams",
    happens="the engine is replaced at once, or after that time",
    sees="the answer ends early, as was asked for",
    bound="0 s, or the time given",
)
def test_a_rollout_policy_bounds_the_wait(system: System, figure: Figure) -> None:
    for name, policy in (
        ("forced", {"force": True}),
        ("unwaited", {"waitForIdle": False}),
        ("short", {"idleTimeoutSeconds": 2}),
    ):
        # It outlasts the stop: llama-server keeps answering until a second TERM.
        engine, stream = streaming(system, name, 8 * LONG, rolloutPolicy=policy)
        started = time.monotonic()
        system.apply(roomy(name, rolloutPolicy=policy, parallelSlots=2))
        eventually(lambda name=name, engine=engine: system.pid(name) != engine, 60, "the old engine to end")
        figure.add(f"{name} after", time.monotonic() - started)
        assert not stream.completed()
        gone(system, name)


# ── the end of it all ────────────────────────────────────────────────────────────────────────────


@fault(
    "L6",
    "the whole system gets SIGTERM under a streaming chat",
    happens="withdrawn, drained, ended",
    sees="the answer ends by itself, and new ones are refused",
    bound="0 bytes lost; at most --stop-timeout and 40 s",
)
def test_the_whole_system_lets_answers_end(system: System, figure: Figure) -> None:
    _, stream = streaming(system, "last")
    with figure.timed("signal to gone"):
        assert system.stop() == 0
    uncut(stream, figure)
    assert system.processes() == []


@fault(
    "L7b",
    "the same as L7, and a second Ctrl-C",
    happens="it is cut at once",
    sees="`Ctrl-C again`",
    bound="15 s",
)
def test_a_second_signal_ends_it_all_at_once(system: System, figure: Figure) -> None:
    _, stream = streaming(system, "endless", 30000)
    said = len(system.said())
    assert system.process is not None
    system.process.send_signal(signal.SIGINT)
    eventually(lambda: "Ctrl-C again" in system.said()[said:], 20, "the hint")
    started = time.monotonic()
    assert system.stop(signal.SIGINT) == 0
    figure.add("second signal to gone", time.monotonic() - started)
    assert not stream.completed()
    assert system.processes() == []
