"""All runtimes under one agent at once: what holds for one holds for each, and nothing done to one touches another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.engines import gone, reason
from tests.support.runtimes import (
    BUILD,
    CONTEXT,
    GGUF,
    KINDS,
    MLX,
    NOWHERE,
    Kind,
    answers,
    back,
    had,
    install,
    installed,
    manifest,
    missing,
    models,
    out,
    server,
    stream,
    untouched,
)
from tests.support.system import System, eventually, kill, running

HANG_S = 5


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A service of each runtime, all Ready at once."""
    base = tmp_path_factory.mktemp("runtimes")
    flags = installed(had(), base)
    with running(base, *flags, "--drain-timeout", "60", "--hang-timeout", str(HANG_S), engine=Path(NOWHERE)) as up:
        up.apply(*models(base), *(manifest(kind, kind.one, contextSize=CONTEXT - 512) for kind in had()))
        for kind in had():
            up.ready(kind.one, within_s=120)
        yield up


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each runtime in turn, if it can be had here."""
    found: Kind = request.param
    if why := missing(found):
        pytest.skip(why)
    return found


def others(kind: Kind) -> list[Kind]:
    return [each for each in had() if each is not kind]


def test_one_agent_serves_all_runtimes_at_once_each_service_under_its_own_name(system: System) -> None:
    assert {GGUF, MLX} <= {kind.format for kind in had()}, "at least one engine of each format"
    for kind in had():
        assert system.status(kind.one)["phase"] == "Ready"
        assert system.observe(kind.one)["runtime"] == kind.name
        assert system.condition("MetalReady", kind.one)["reason"] == "Serving"
    answers(system, *(kind.one for kind in had()))


def test_each_answers_to_its_models_name_too(system: System, kind: Kind) -> None:
    status, answer = system.ask(kind.one, model=kind.format)
    assert status == 200, answer


def test_another_service_comes_and_goes_under_the_stream_of_the_first(system: System, kind: Kind) -> None:
    with untouched(system, *had()), stream(system, kind.one) as first:
        system.apply(manifest(kind, kind.two))
        pid = system.ready(kind.two, within_s=90)
        answers(system, kind.two)
        first.flows()
        system.apply(manifest(kind, kind.two, replicas=0))
        eventually(lambda: not psutil.pid_exists(pid), 40, "the second to end")
        first.flows()
        gone(system, kind.two)


def test_an_edit_of_one_starts_that_one_anew_and_no_other(system: System, kind: Kind) -> None:
    before, serves = system.pid(kind.one), server(system, kind, kind.one)
    with untouched(system, *others(kind)):
        system.apply(manifest(kind, kind.one))
        eventually(lambda: system.pid(kind.one) not in (0, before), 60, "the edited one to be started anew")
        back(system, kind.one)
    assert (server(system, kind, kind.one) == serves) is bool(kind.daemon), "a daemon goes on, for others use it"


def test_what_serves_is_killed_and_is_back_while_the_others_notice_nothing(system: System, kind: Kind) -> None:
    before = server(system, kind, kind.one)
    with untouched(system, *others(kind)):
        kill(before)
        out(system, kind.one)
        back(system, kind.one)
    assert server(system, kind, kind.one) != before


def test_an_attendant_is_killed_and_its_model_is_attached_by_the_next(system: System, kind: Kind) -> None:
    if not kind.daemon:
        pytest.skip("it has none: each service has a process of its own")
    before, daemon = system.pid(kind.one), system.own_pid(kind.daemon)
    with untouched(system, *others(kind)), stream(system, kind.one) as answer:
        kill(before)
        eventually(lambda: system.pid(kind.one) not in (0, before), 40, "another attendant")
        answer.flows()
    back(system, kind.one)  # an Ollama with one slot has its first answer wait for the one under way
    assert system.own_pid(kind.daemon) == daemon


def test_a_model_of_another_format_is_refused_on_that_service_alone(system: System) -> None:
    with untouched(system, *had()):
        for kind in had():
            system.apply(manifest(kind, kind.two, model=MLX if kind.format == GGUF else GGUF))
        for kind in had():
            eventually(lambda kind=kind: reason(system, kind.two) == "FormatMismatch", what=f"{kind.two} to be refused")
            assert kind.name in system.told(kind.two)
        gone(system, *(kind.two for kind in had()))


def test_an_upgrade_of_every_executable_restarts_nothing_and_is_what_starts_next(system: System) -> None:
    with untouched(system, *had()):
        for kind in had():
            install(kind, system.base / kind.name, "second")
            system.apply(manifest(kind, kind.two))
        for kind in had():
            pid = system.ready(kind.two, within_s=90)
            if not (kind.daemon or kind.script):  # of these the interpreter is run, not the script
                assert psutil.Process(pid).environ()[BUILD] == "second"
        answers(system, *(kind.two for kind in had()))
        gone(system, *(kind.two for kind in had()))


@pytest.fixture(scope="module")
def halted(system: System) -> Iterator[dict[Kind, int]]:
    """What served each runtime, halted: that takes its time, in which agents of their own can be tested."""
    before = {kind: server(system, kind, kind.one) for kind in had()}
    for pid in before.values():
        psutil.Process(pid).suspend()
    yield before
    for pid in before.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).resume()


@pytest.mark.parametrize("there", ["vllm-swift", "llama-server"])
@pytest.mark.usefixtures("halted")
def test_an_agent_without_any_engine_of_a_format_serves_the_other(tmp_path: Path, there: str) -> None:
    serving = [kind for kind in had() if kind.name == there]
    absent = [kind for kind in KINDS if kind.name != there]
    with running(tmp_path, *installed(serving, tmp_path), engine=Path(NOWHERE)) as up:
        up.apply(*models(tmp_path), *(manifest(kind, kind.one) for kind in (*serving, *absent)))
        for kind in absent:
            eventually(lambda kind=kind: reason(up, kind.one) == "RuntimeBinaryMissing", what=f"{kind.one} to be told")
            said = up.told(kind.one)
            assert kind.setting in said and kind.advice in said, said
        for kind in serving:
            up.ready(kind.one, within_s=90)
        answers(up, *(kind.one for kind in serving))


def test_what_serves_is_halted_and_comes_back_as_another_process(system: System, halted: dict[Kind, int]) -> None:
    for kind, pid in halted.items():
        what = f"{kind.one} to be served by another process"
        eventually(lambda kind=kind, pid=pid: server(system, kind, kind.one) not in (0, pid), 60, what)
    back(system, *(kind.one for kind in had()))
