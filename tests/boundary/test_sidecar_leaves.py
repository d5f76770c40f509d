"""The end of the whole system, when the sidecar's last pass fails: endpoints go out and engines end all the same."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cluster.report import report
from metal_supervisor.settings.loader import Settings
from metal_supervisor.sidecar.board import Row, health, status
from metal_supervisor.sidecar.loop import Sidecar
from metal_supervisor.spec.processes import ProgramState, State
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.gateway_note import WORKERS
from tests.boundary.test_failure_registrar import UP, Cluster, wanted
from tests.support.system import eventually


def a_sidecar(base: Path, cluster: Any, **settings: Any) -> Sidecar:
    """The sidecar of mac-a, without a supervisord."""
    state = StateDir(base / "state")
    state.create()
    supervisord: Any = None
    return Sidecar(Settings(state_dir=str(state.path), node_name="mac-a", **settings), state, cluster, supervisord)


def test_a_last_pass_that_fails_leaves_nothing_published_and_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    (key, want), *_ = wanted().items()
    sidecar = a_sidecar(tmp_path, cluster, stop_timeout=20.0)
    sidecar.registrar.start()
    sidecar.registrar.want({key: want}, {})
    eventually(lambda: cluster.bodies["tiny-mac-a"]["endpoints"][0]["conditions"]["ready"], 10, "it to be published")

    def broken() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sidecar, "one_pass", broken)
    with subprocess.Popen(["sleep", "600"]) as engine:
        observed = replace(UP, pid=engine.pid, since=time.time())
        sidecar.board = replace(sidecar.board, rows=(Row(want.record, observed, report(want.record, observed), "", 0),))
        try:
            sidecar._leave()
            assert not cluster.bodies["tiny-mac-a"]["endpoints"][0]["conditions"]["ready"]
            assert engine.wait(10) == -15
        finally:
            engine.kill()


READY = {"phase": "Ready", "path": "/m.gguf", "size_bytes": 10}
MODEL = {"uid": "u", "generation": 1, "source": "hf://a/b", "file": READY}


@pytest.mark.parametrize(
    "models",
    [
        5,
        ["a"],
        {"a/b": 5},
        {"a/b": {**MODEL, "source": 5}},
        {"a/b": {**MODEL, "file": {**READY, "phase": [1]}}},
        {"a/b": {**MODEL, "file": {**READY, "size_bytes": "x"}}},
        {"a/b": {**MODEL, "file": 5}},
        {"a/b": {**MODEL, "file": {**READY, "size_bytes": 10**400}}},
    ],
    ids=range(8),
)
def test_models_that_a_report_tells_wrongly_fail_no_pass_and_keep_nothing_from_the_cluster(
    tmp_path: Path, models: Any
) -> None:
    cluster = Cluster()
    sidecar = a_sidecar(tmp_path, cluster)
    whole = {"models": {"a/whole": MODEL}, "cluster": {"operator": False}}
    both = {**whole, "models": {**models, "a/whole": MODEL} if isinstance(models, dict) else models}
    for told in (both, whole):
        sidecar._register([], told)
        sidecar.registrar._one_pass()
        assert sidecar.registrar.trouble == ("", 0.0)
    assert cluster.bodies["status"]["status"]["size"] == "10 B"


@pytest.mark.parametrize(
    ("states", "listens"),
    [
        (("RUNNING", "STOPPED"), True),
        (("EXITED", "RUNNING"), True),
        (("BACKOFF", "STOPPED"), True),
        (("STOPPED", "STOPPED"), False),
        (("FATAL", "EXITED"), False),
        (("UNKNOWN",), False),
        ((), True),
    ],
)
def test_a_gateway_listens_until_it_has_been_away_for_longer_than_a_restart(
    tmp_path: Path, states: tuple[str, ...], listens: bool
) -> None:
    sidecar, ended = a_sidecar(tmp_path, Cluster()), time.time()
    sidecar._gateway = {"fronts": [18101]}
    for ago_s in (0.0, 60.0):
        sidecar._table = {
            name: ProgramState(name, State(word), 0, 0.0, ended - ago_s)
            for name, word in zip(WORKERS, states, strict=False)
        }
        assert sidecar._fronts() == ((18101,) if listens or not ago_s else ())


def test_a_gateway_that_an_upgrade_replaces_is_there_before_supervisord_has_started_it(tmp_path: Path) -> None:
    """An endpoint that is withdrawn for this moment stays so until something wakes the sidecar again."""
    sidecar = a_sidecar(tmp_path, Cluster())
    sidecar._gateway = {"fronts": [18101]}
    first, second = (ProgramState(name, State.STOPPED, 0, 0.0, 0.0) for name in WORKERS)
    for table in ({first.name: first, second.name: second}, {second.name: second}):
        sidecar._table = table
        assert sidecar._fronts() == (18101,)
    sidecar._table = {first.name: replace(first, start=1.0, stop=2.0), second.name: second}
    assert sidecar._fronts() == ()


@pytest.mark.parametrize(
    ("states", "runs"),
    [
        (("RUNNING", "STOPPED"), True),
        (("EXITED", "RUNNING"), True),
        (("BACKOFF", "STOPPED"), False),
        (("STARTING", "STOPPED"), False),
        (("STOPPED", "STOPPED"), False),
        (("EXITED", "EXITED"), False),
        ((), False),
    ],
)
def test_a_gateway_that_is_on_without_a_worker_that_runs_makes_health_503(
    tmp_path: Path, states: tuple[str, ...], runs: bool
) -> None:
    """Also without a note of it: no data of the gateway does not mean that it is off."""
    sidecar = a_sidecar(tmp_path, Cluster(), gateway="127.0.0.1:9100")
    off = a_sidecar(tmp_path, Cluster(), gateway="off")
    table = {name: ProgramState(name, State(word), 0, 0.0, 0.0) for name, word in zip(WORKERS, states, strict=False)}
    sidecar._table = off._table = table
    since = sidecar._gateway_since()
    assert bool(since) is not runs and not off._gateway_since()
    programs = {name: each.state.value for name, each in table.items()}
    board = replace(sidecar.board, gateway_since=since, programs=programs)
    assert health(board, since + 1)[0] == 200, "a restart takes a moment"
    code, body = health(board, since + 6)
    assert (code == 200) is runs and all(word in str(body) for word in states if not runs)


def test_the_address_of_a_gateway_without_a_note_is_shown(tmp_path: Path) -> None:
    board = replace(a_sidecar(tmp_path, Cluster()).board, gateway_url="http://127.0.0.1:9100/v1")
    assert status(board)["gateway"]["url"] == "http://127.0.0.1:9100/v1"
