"""A disk that hangs, such as a network mount whose server is gone: no pass of the controller waits for it."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from range_server import serving

from metal_supervisor.confinement.probe import Trials, TrialVerdict
from metal_supervisor.controller.prerequisites.claim_check import FETCH_S, ClaimCheck
from metal_supervisor.controller.prerequisites.confinement_policies import Confinement
from metal_supervisor.controller.prerequisites.daemons import key_of
from metal_supervisor.controller.prerequisites.ports import Ports
from metal_supervisor.controller.prerequisites.prerequisites import Prerequisites
from metal_supervisor.controller.prerequisites.readings import Readings
from metal_supervisor.controller.reconcile import Outlook
from metal_supervisor.controller.snapshot import Room, Snapshot
from metal_supervisor.models import background
from metal_supervisor.models.background import LOOK_WAIT_S, BackgroundLooks
from metal_supervisor.models.headers import Headers
from metal_supervisor.models.model_directory import USED
from metal_supervisor.models.places import Places
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.store import Store
from metal_supervisor.models.store_context import Terms
from metal_supervisor.runtimes import Binary
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.sources import NO_KEYS, Artifact, canonical
from metal_supervisor.spec.types import ModelFile
from metal_supervisor.state.directory import StateDir
from tests.boundary.test_confined import BINARY, ENGINE, SERVICE
from tests.boundary.test_daemons import LIBRARY, Keeper, service
from tests.support.records import a_record, accept
from tests.support.system import eventually, tiny_gguf

WITHIN_S = 30.0
FILE_CALLS = ((os, "stat"), (os, "lstat"), (os, "open"), (os, "utime"), (io, "open"))


@dataclass
class Disk:
    """A directory that may hang: the main thread must not ask it then, and other threads get no answer."""

    path: Path
    answers: threading.Event

    def ask(self, call: Callable[..., Any], path: Any, *rest: Any, **more: Any) -> Any:
        if not self.answers.is_set() and isinstance(path, (str, os.PathLike)) and str(path).startswith(str(self.path)):
            assert threading.current_thread() is not threading.main_thread(), f"the pass itself asked for {path}"
            self.answers.wait(WITHIN_S)
        return call(path, *rest, **more)

    def hang(self) -> None:
        self.answers.clear()


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(tmp_path / "mount", threading.Event())
    made.path.mkdir()
    made.answers.set()
    for module, name in FILE_CALLS:
        call = getattr(module, name)
        monkeypatch.setattr(module, name, lambda path, *rest, _call=call, **more: made.ask(_call, path, *rest, **more))
    yield made
    made.answers.set()
    for thread in threading.enumerate():
        if thread.name in ("paths", "fetched", "headers"):
            thread.join(WITHIN_S)


def test_many_paths_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest names a thousand, and a Mac has hundreds of services: a pass waits as long for all as for one."""
    answers, now, wait = threading.Event(), [0.0], threading.Event.wait

    def waits(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is None or threading.current_thread() is not threading.main_thread():
            return wait(event, timeout)
        now[0] += timeout
        return False

    monkeypatch.setattr(threading.Event, "wait", waits)
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: now[0]))
    looks: BackgroundLooks[bool] = BackgroundLooks("paths", lambda: None)
    for asked in (1, 2):
        for number in range(20):
            assert looks.look(f"{asked} {number}", lambda _: answers.wait(), LOOK_WAIT_S, 1.0) is None
        assert now[0] == pytest.approx(LOOK_WAIT_S * asked)
        looks.forget_others()
        looks.forget_others()
    answers.set()


def test_a_path_behind_an_opened_flag(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trials, "look", lambda *_: TrialVerdict(True))
    state = StateDir(tmp_path / "state")
    state.create()
    (disk.path / "keys").write_text("x")
    flag = "--api-key-file"
    opened = replace(SERVICE, extra_args=(flag, str(disk.path / "keys")), allowed_args=frozenset({flag}))
    rang = threading.Event()
    confinement = Confinement(Settings(confinement="on"), state, rang.set)
    disk.hang()
    assert confinement.of(opened, BINARY, ENGINE, (), 18100) is None
    disk.answers.set()
    assert rang.wait(WITHIN_S)
    found = confinement.of(opened, BINARY, ENGINE, (), 18100)
    assert found is not None and str(disk.path / "keys") in str(found.policy)


def test_the_spec_of_an_engine_that_runs_keeps_its_policy_meanwhile(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that has just started has looked at nothing yet; without a policy the launcher starts no engine."""
    monkeypatch.setattr(Trials, "look", lambda *_: TrialVerdict(True))
    state, flag, model = StateDir(tmp_path / "state"), "--api-key-file", tmp_path / "m.gguf"
    state.create()
    tiny_gguf.write_tiny_gguf(model)
    (disk.path / "keys").write_text("x")
    opened = replace(SERVICE, extra_args=(flag, str(disk.path / "keys")), allowed_args=frozenset({flag}))
    rang = threading.Event()
    ready = ModelFile("Ready", str(model), model.stat().st_size, real=(str(model),))
    store = cast(Any, SimpleNamespace(state=lambda _: ready, has=lambda _: True))
    builds = cast(Any, SimpleNamespace(look=lambda _: BINARY))
    found = Prerequisites(Settings(confinement="on"), state, store, Headers(rang.set), builds, rang.set)
    snapshot = Snapshot(1.0, {}, True, {}, {}, {}, {}, room=Room(64 << 30, 48 << 30, 48 << 30))
    disk.hang()
    kept = a_record(edition="0123456789ab", port=18100)

    def looked() -> Outlook:
        return found.outlook(opened, kept, Ports([kept]), snapshot)

    eventually(lambda: found.headers.look(str(model)) is not None, WITHIN_S, "the model's header")
    waits = looked()
    assert not found.composed and accept(opened, kept, waits, 1.0) == kept
    disk.answers.set()
    eventually(lambda: looked().program is not None, WITHIN_S, "the look at the path")
    assert str(disk.path / "keys") in next(iter(found.composed.values())).spec


def test_the_cache_directory_that_a_service_names(disk: Disk, tmp_path: Path) -> None:
    """Others on the daemon do without it until the disk answers."""
    keeper = Keeper(tmp_path, allowed_roots=str(disk.path))
    disk.hang()
    caching = service(options={"pagedSSDCacheDir": str(disk.path / "cache")})
    assert not keeper.daemons.is_looked_at(caching)
    found = keeper.one_pass(caching, service("two"))
    assert found is not None and found.edition is not None
    assert str(disk.path) not in keeper.specs["omlx"].spec
    disk.answers.set()
    assert keeper.woken.wait(WITHIN_S)
    found = keeper.one_pass(caching, service("two"))
    assert found is not None and str(disk.path) in keeper.specs["omlx"].spec


def test_a_cache_directory_that_hangs_decides_nothing_anew_about_a_daemon_that_has_it(
    disk: Disk, tmp_path: Path
) -> None:
    """A controller that has just started has looked at nothing yet."""
    keeper = Keeper(tmp_path, allowed_roots=f"{disk.path},/cache")
    caching = service(options={"pagedSSDCacheDir": str(disk.path / "cache")})
    other = service("two", options={"pagedSSDCacheDir": "/cache"})
    eventually(lambda: keeper.daemons.is_looked_at(caching), WITHIN_S, "the look at its directory")
    found = keeper.one_pass(caching)
    assert found is not None and found.runs
    keeper.restart()
    disk.hang()
    assert keeper.one_pass(caching) == found, "it is to start with its cache, also while it is down"
    keeper.daemons.prepare([other, caching], keeper.records)
    assert (keeper.daemons.problem(other) or ("",))[0] == "DaemonSettingsConflict", "the first to have it keeps it"


def test_the_directory_of_the_models_that_ollama_pulls(disk: Disk, tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, ollama_models=str(disk.path / "models"))
    disk.hang()
    assert keeper.one_pass(service("one", "ollama", LIBRARY)) is None
    disk.answers.set()
    assert keeper.woken.wait(WITHIN_S)
    keeper.one_pass(service("one", "ollama", LIBRARY))
    assert keeper.records[key_of("ollama")].runs


def test_a_file_in_an_engines_arguments(disk: Disk, tmp_path: Path) -> None:
    rang = threading.Event()
    store = Store(tmp_path / "store", lambda: None, Terms(places=Places((disk.path,))))
    readings = Readings(Headers(rang.set), store, str(tmp_path))
    tiny_gguf.write_tiny_gguf(disk.path / "m.gguf")
    disk.hang()
    assert readings.look_from_home(str(disk.path / "m.gguf")) is None
    disk.answers.set()
    assert rang.wait(WITHIN_S)
    found = readings.look_from_home(str(disk.path / "m.gguf"))
    assert found is not None and found.header is not None


def test_a_model_in_the_store(disk: Disk, tmp_path: Path) -> None:
    """Neither the check of its service before a claim, nor the end of its use, waits for the store's disk."""
    rang = threading.Event()
    store = Store(disk.path, rang.set, Terms(SourcePolicy(lax=True)))
    tiny_gguf.write_tiny_gguf(tmp_path / "m.gguf")
    with serving() as web:
        web.files["m.gguf"] = (tmp_path / "m.gguf").read_bytes()
        artifact = Artifact(canonical(f"{web.url}/range/m.gguf"))
        store.want({artifact: NO_KEYS})
        store.give_leave(artifact)
        eventually(lambda: store.state(artifact).phase == "Ready", WITHIN_S, "the model")
    used = disk.path / artifact.slot / USED
    os.utime(used, (0, 0))
    readings = Readings(Headers(rang.set), store, str(tmp_path))
    binary = Binary("/bin/engine", frozenset())
    check = ClaimCheck(store, cast(Any, None), readings, cast(Any, None), lambda *_: (binary, None), rang.set)
    asked = replace(SERVICE, model=replace(SERVICE.model, artifact=artifact))
    snapshot = cast(Any, SimpleNamespace(room=Room(64 << 30, 48 << 30, 48 << 30)))
    disk.hang()
    assert check.delay_s(asked, snapshot) == FETCH_S
    store.want({})
    disk.answers.set()
    eventually(lambda: used.stat().st_mtime > 0, WITHIN_S, "the note of its last use")
