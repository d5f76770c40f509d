"""Shared daemons: which port, which options, whose Ollama, and when one is stopped; with plain parts around them."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_support import Stand, said, standing

from metal_supervisor.controller.prerequisites import daemons, own_ollama, path_looks
from metal_supervisor.controller.prerequisites.confinement_policies import Confined
from metal_supervisor.controller.prerequisites.daemons import Daemons, key_of
from metal_supervisor.controller.prerequisites.ports import Ports
from metal_supervisor.controller.reconcile import Outlook
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.host import machine
from metal_supervisor.runtimes import Binary
from metal_supervisor.runtimes.daemon_client import DaemonRefused
from metal_supervisor.runtimes.omlx_models import OmlxModel
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import ProgramState, RunNote, State
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.sources import Artifact, canonical
from metal_supervisor.spec.types import Endpoint, Key, Model, ModelFile, Program, Service, Standing
from metal_supervisor.state.directory import StateDir
from tests.support.records import a_record, accept
from tests.support.system import eventually, free_ports

ENDPOINT = Endpoint("one", 8080, "/v1/chat/completions", "ClusterIP", None)


def world(table: dict[str, ProgramState], notes: dict[str, RunNote], now: float = 1000.0) -> Snapshot:
    return Snapshot(now, {}, True, {}, table, notes, {})


class Builds:
    """Every executable is there, as `path` says, unless `missing`."""

    def __init__(self) -> None:
        self.path, self.missing = "/opt/daemon", False

    def look(self, _executables: object) -> Binary:
        if self.missing:
            raise machine.NoBinary("gone")
        return Binary(self.path, frozenset({"--port"}), "daemon", "/opt/python")


class Keeper:
    """The daemons of one Mac, pass by pass."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.state, self.builds, self.specs = StateDir(path / "state"), Builds(), dict[str, Program]()
        self.state.create()
        first, *_ = free_ports(1)
        settings = {"ports": f"{first}-{first + 20}", "ollama_url": "off", "allowed_roots": "/a,/b,/cache", **settings}
        self.settings = replace(Settings(), state_dir=str(path / "state"), **settings)
        self.woken = threading.Event()
        self.restart()
        self.records: dict[Key, Record] = {}

    def restart(self) -> None:
        """Begin with what is on file, as another controller."""
        self.daemons = Daemons(self.settings, self.state, self.builds, self._keep_spec, self.woken.set)  # type: ignore[arg-type]

    def _keep_spec(self, made: Program) -> None:
        self.specs[made.name] = made

    def one_pass(
        self, *services: Service, table: dict[str, ProgramState] | None = None, notes: dict[str, RunNote] | None = None
    ) -> Record | None:
        """What is asked for is looked at, accepted and kept; the record of oMLX or Ollama, whichever there is."""
        own = {key: each for key, each in self.records.items() if each.is_daemon}
        self.records = {**{each.key: record_of(each) for each in services}, **own}
        self.daemons.prepare(services, self.records)
        self.records = self.daemons.keep(self.records, world(table or {}, notes or {}))
        found = [each for each in self.records.values() if each.is_daemon]
        return found[0] if found else None


LIBRARY = "https://ollama.com/library/tiny:1b"


def service(name: str = "one", runtime: str = "omlx", source: str = "/m", **more: Any) -> Service:
    artifact = Artifact(canonical(source))
    model = Model("default", "phi", "m", 1, source, "mlx", None, None, artifact=artifact)
    options = more.pop("options", {})
    made = Service("default", name, "u", 1, model, runtime, 1, False, ENDPOINT, "chat", "normal", None, options)
    return replace(made, **more)


def record_of(asked: Service) -> Record:
    """As it is once it was accepted."""
    verdict = Verdict(Standing.RUN, "Accepted", "", 0.0)
    return a_record(
        asked.name,
        asked.namespace,
        runtime=asked.runtime,
        verdict=verdict,
        endpoint=ENDPOINT,
        edition="spec",
        daemon=asked.runtime,
    )


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look at a path is waited for, however busy this machine is."""
    monkeypatch.setattr(path_looks, "LOOK_WAIT_S", 30.0)


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    return Keeper(tmp_path)


# ── a daemon of ours ─────────────────────────────────────────────────────────────────────────────


def test_a_daemon_is_made_for_its_first_service_with_a_key_and_the_first_free_port(keeper: Keeper) -> None:
    assert keeper.one_pass() is None and not (keeper.state.path / "omlx.key").exists()
    first = keeper.settings.port_range[0]
    with socket.create_server((keeper.settings.bind_address, first)):
        found = keeper.one_pass(service())
    assert found is not None and found.runs and found.protected and found.port == first + 1
    assert found.edition == keeper.specs["omlx"].edition and "--port" in keeper.specs["omlx"].spec
    key = keeper.state.path / "omlx.key"
    assert len(key.read_text()) > 30 and key.stat().st_mode & 0o077 == 0
    assert key.read_text() not in keeper.specs["omlx"].spec


def test_a_port_of_a_service_is_not_taken_and_its_own_is_kept(keeper: Keeper) -> None:
    first = keeper.settings.port_range[0]
    other = replace(record_of(service("gguf", "llama-server")), port=first, daemon="")
    keeper.records[other.key] = other
    keeper.daemons.prepare([service()], keeper.records)
    assert keeper.daemons.address("omlx", Ports(keeper.records.values())) == (keeper.settings.bind_address, first + 1)
    found = keeper.one_pass(service())
    assert found is not None
    with socket.create_server((keeper.settings.bind_address, found.port or 0)):
        again = keeper.one_pass(service())  # the daemon itself has it
    assert again == found


def test_without_an_executable_there_is_no_daemon_and_one_that_runs_goes_on(keeper: Keeper) -> None:
    keeper.builds.missing = True
    assert keeper.one_pass(service()) is None
    keeper.builds.missing = False
    found = keeper.one_pass(service())
    keeper.builds.missing = True
    assert found is not None and keeper.one_pass(service()) == found


def test_one_that_runs_is_started_otherwise_only_once_it_ends(keeper: Keeper) -> None:
    found = keeper.one_pass(service())
    assert found is not None and found.edition
    table = {"omlx": ProgramState("omlx", State.RUNNING, 4242, 1.0, 0.0)}
    spec = {"edition": found.edition, "asked": found.asked}
    notes = {"omlx": RunNote(4242, 4242, "started", spec, (1.0,), 0.0, "", "")}
    keeper.builds.path = "/opt/another"
    edited = service(options={"pagedSSDCacheDir": "/cache"})
    goes_on = keeper.one_pass(edited, table=table, notes=notes)
    assert goes_on is not None and goes_on.edition != found.edition
    assert goes_on.is_run_by(found.edition, found.asked), "it is not restarted"
    assert keeper.one_pass(edited) == goes_on


def test_a_key_that_was_lost_is_made_again(keeper: Keeper) -> None:
    keeper.one_pass(service())
    (keeper.state.path / "omlx.key").unlink()
    keeper.one_pass(service())
    assert (keeper.state.path / "omlx.key").read_text()


@pytest.mark.parametrize("what", ["no room", "a key that is no text"])
def test_a_daemon_whose_files_cannot_be_made_fails_no_pass_and_stays_as_it_was(
    keeper: Keeper, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All else on this Mac is decided in the same pass."""
    key, served = keeper.state.path / "omlx.key", keeper.state.path / "served"
    if what == "no room":
        served.write_text("a file in the place of the directory")
    else:
        key.write_bytes(b"\xff")
    assert keeper.one_pass(service()) is None and keeper.one_pass(service()) is None
    assert [each.message for each in caplog.records] == ["the files of a shared daemon cannot be made"], "once"
    (served if what == "no room" else key).unlink()
    found = keeper.one_pass(service())
    assert found is not None and found.runs
    key.write_bytes(b"\xff")
    assert keeper.one_pass(service()) == found


def test_a_daemon_waits_for_the_trial_of_its_build_and_is_not_started_where_it_may_not_be(keeper: Keeper) -> None:
    answers: list[Confined | None] = [None, Confined({"format": 1}), Confined(False, why="it fails")]
    keeper.daemons._confine = lambda *_: answers[0]
    assert keeper.one_pass(service()) is None and not keeper.specs
    for answer in answers[1:]:
        answers[0] = answer
        found = keeper.one_pass(service())
        assert found is not None and found.edition and answer is not None and found.unconfined == answer.why
        assert json.loads(keeper.specs["omlx"].spec)["confinement"] == answer.policy
    answers[0] = Confined(False, ("ConfinementUnavailable", "it fails"), "it fails")
    table = {"omlx": ProgramState("omlx", State.RUNNING, 4242, 1.0, 0.0)}
    notes = {"omlx": RunNote(4242, 4242, "started", {"edition": found.edition}, (1.0,), 0.0, "", "")}
    assert keeper.one_pass(service(), table=table, notes=notes) == found, "one that runs is left alone"
    refused = keeper.one_pass(service())
    assert refused is not None and not refused.runs and refused.verdict.reason == "ConfinementUnavailable"


def test_a_key_that_was_made_again_is_where_a_confined_daemon_reads_it(keeper: Keeper) -> None:
    for _ in range(2):
        keeper.one_pass(service())
        key, read = keeper.state.path / "omlx.key", keeper.state.path / "served" / "omlx" / "key"
        assert key.read_text() == read.read_text() and read.stat().st_mode & 0o077 == 0
        key.unlink()


class Told:
    """A daemon that takes what it is told."""

    def call(self, _method: str, _path: str, _body: object = None, timeout_s: float = 0.0) -> dict[str, Any]:
        return {}


def test_a_models_files_are_linked_for_the_daemon_and_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, blob, here = tmp_path / "m", tmp_path / "blob", tmp_path / "served" / "omlx" / "models" / "one"
    (source / ".cache").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    blob.write_text("weights")
    (source / "model.safetensors").symlink_to(blob)
    (source / "gone").symlink_to(tmp_path / "nowhere")
    job = {"name": "one", "path": str(source), "settings": {}, "key_file": str(tmp_path / "omlx.key")}
    job |= {"files": [str(blob)]}
    model, daemon = OmlxModel(job), Told()
    for _ in range(2):
        model.attach(daemon, 1.0, lambda _: None)  # type: ignore[arg-type]
        assert sorted(each.name for each in here.iterdir()) == ["config.json", "model.safetensors"]
        assert (here / "model.safetensors").samefile(blob) and not (here / "model.safetensors").is_symlink()
    model.detach(daemon, 1.0, False, ())  # type: ignore[arg-type]
    assert not list(here.parent.iterdir())

    source.chmod(0o555)
    model.attach(daemon, 1.0, lambda _: None)  # type: ignore[arg-type]
    assert here.stat().st_mode & 0o777 == 0o700, "its owner could not replace it by another model"
    source.chmod(0o755)

    (source / "model.safetensors").unlink()
    (source / "model.safetensors").symlink_to(tmp_path / "secret")  # swapped since it was judged
    (tmp_path / "secret").write_text("secret")
    model.attach(daemon, 1.0, lambda _: None)  # type: ignore[arg-type]
    assert not list(here.parent.iterdir())

    def other_disk(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    model.attach(daemon, 1.0, lambda _: None)  # type: ignore[arg-type]
    assert not list(here.parent.iterdir()), "it is read in place"

    def refused(*_: object, **__: object) -> dict[str, Any]:
        raise DaemonRefused(400, "it is not a model")

    monkeypatch.setattr(daemon, "call", refused)
    with pytest.raises(DaemonRefused, match="not a model; its files could not be linked"):
        model.attach(daemon, 1.0, lambda _: None)  # type: ignore[arg-type]


def test_links_to_directories_lead_no_copy_of_a_model_in_circles(tmp_path: Path) -> None:
    source, here = tmp_path / "m", tmp_path / "served" / "omlx" / "models" / "one"
    (source / "parts").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "parts" / "weights").write_text("")
    (source / "main").symlink_to(".")
    model = OmlxModel({"name": "one", "path": str(source), "settings": {}, "key_file": str(tmp_path / "omlx.key")})
    model.attach(Told(), 1.0, lambda _: None)  # type: ignore[arg-type]
    assert sorted(str(each.relative_to(here)) for each in here.rglob("*")) == ["config.json", "parts", "parts/weights"]


def test_an_unused_one_is_stopped_after_a_while(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper.one_pass(service())
    waits = keeper.one_pass()
    assert waits is not None and waits.runs
    assert keeper.daemons.again_in_s is not None and 0 < keeper.daemons.again_in_s <= daemons.UNUSED_S
    used = keeper.one_pass(service())
    assert used == waits and keeper.daemons.again_in_s is None
    keeper.one_pass()
    monkeypatch.setattr(daemons, "UNUSED_S", 0.0)
    stopped = keeper.one_pass()
    assert stopped is not None and stopped.verdict.standing is Standing.REMOVING and stopped.edition is None
    again = keeper.one_pass(service())
    assert again is not None and again.runs and again.port == waits.port


def test_a_model_that_is_still_to_be_unloaded_needs_it(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper.one_pass(service())
    monkeypatch.setattr(daemons, "UNUSED_S", 0.0)
    leaving = replace(record_of(service()), edition=None, verdict=Verdict(Standing.REMOVING, "Deleted", "", 0.0))
    keeper.records[leaving.key] = leaving
    table = {"default.one": ProgramState("default.one", State.STOPPING, 4242, 1.0, 0.0)}
    kept = keeper.daemons.keep(keeper.records, world(table, {}))
    assert kept[key_of("omlx")].runs
    assert not keeper.daemons.keep(keeper.records, world({}, {}))[key_of("omlx")].runs


def test_until_the_cluster_has_spoken_a_daemon_stays_as_it_was(keeper: Keeper) -> None:
    found = keeper.one_pass(service())
    keeper.restart()
    keeper.builds.path = "/opt/another"
    assert keeper.daemons.keep(keeper.records, world({}, {}, 2000.0))[key_of("omlx")] == found


# ── several services of one ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("one", "two", "reason", "words"),
    [
        (service(), service(namespace="other"), "ServedNameConflict", "metadata.name: default/one is served as 'one'"),
        (service(), service("two", ordinal=1), "ServedNameConflict", "spec.replicas: the shared omlx daemon"),
        (
            service(options={"pagedSSDCacheDir": "/a"}),
            service("two", options={"pagedSSDCacheDir": "/b"}),
            "DaemonSettingsConflict",
            "spec.pagedSSDCacheDir: the omlx daemon has it as default/one says",
        ),
        (
            service(options={"pagedSSDCacheDir": "/a"}),
            service("two", options={"pagedSSDCacheDir": "/a", "hotCacheMaxSize": "1GB"}),
            "DaemonSettingsConflict",
            "spec.hotCacheMaxSize",
        ),
        (
            service("one", "ollama", LIBRARY, options={"contextSize": 512}),
            service("two", "ollama", LIBRARY, options={"contextSize": 1024}),
            "DaemonSettingsConflict",
            "spec.contextSize",
        ),
    ],
)
def test_what_the_one_that_came_first_excludes_is_refused_by_field(
    tmp_path: Path, one: Service, two: Service, reason: str, words: str
) -> None:
    keeper = Keeper(tmp_path, shared_daemons="*")
    keeper.daemons.prepare([two, one], {one.key: record_of(one)})
    found = keeper.daemons.problem(two)
    assert found is not None and found[0] == reason and words in found[1]
    assert keeper.daemons.problem(one) is None


@pytest.mark.parametrize(
    "two",
    [
        service("two"),
        service("two", options={"contextSize": 512}),
        service("one", "llama-server", namespace="other"),
        service("two", "omlx", options={"pagedSSDCacheDir": "/a"}),
    ],
)
def test_what_can_be_had_beside_it_is_not(keeper: Keeper, two: Service) -> None:
    one = service(options={"pagedSSDCacheDir": "/a"})
    keeper.daemons.prepare([two, one], {one.key: record_of(one)})
    assert keeper.daemons.problem(two) is None


# ── several namespaces of one ────────────────────────────────────────────────────────────────────


A = service("one", namespace="a")
B = service("two", namespace="b")


@pytest.mark.parametrize("runtime", ["omlx", "ollama"])
def test_a_daemon_serves_the_namespace_that_had_it_first(keeper: Keeper, runtime: str) -> None:
    a, b = (replace(each, runtime=runtime) for each in (A, B))
    later, sooner = replace(record_of(a), queued_at=20.0), replace(record_of(b), queued_at=10.0)
    for order in ((a, b), (b, a)):
        for records in ({a.key: later, b.key: sooner}, {b.key: sooner}):  # a has it too, or asks for it
            keeper.daemons.prepare(order, records)
            found = keeper.daemons.problem(a)
            assert found is not None and found[0] == "DaemonNotShared" and keeper.daemons.problem(b) is None
            assert found[1].startswith("metadata.namespace:") and "namespace b" in found[1]
            assert "--shared-daemons" in found[1]
        keeper.daemons.prepare(order, {})
        assert keeper.daemons.problem(a) is None and keeper.daemons.problem(b) is not None, "neither has it: by name"
    keeper.daemons.prepare([b], {b.key: sooner})
    assert keeper.daemons.foreign(a) is not None, "nor does this Mac offer itself for it"


def test_one_that_waits_to_come_back_keeps_its_daemon_and_one_that_was_off_does_not(keeper: Keeper) -> None:
    evicted = replace(record_of(B), edition=None, queued_at=10.0, verdict=Verdict(Standing.WAIT, "Evicted", "", 0.0))
    keeper.daemons.prepare([A, B], {B.key: evicted})
    assert keeper.daemons.problem(A) is not None and keeper.daemons.problem(B) is None
    keeper.daemons.prepare([A, B], {B.key: replace(evicted, queued_at=None)})
    assert keeper.daemons.problem(A) is None and keeper.daemons.problem(B) is not None


def test_one_that_comes_from_another_runtime_does_not_drive_out_what_is_there(keeper: Keeper) -> None:
    moving = replace(record_of(A), daemon="", queued_at=1.0)
    keeper.daemons.prepare([A, B], {A.key: moving, B.key: replace(record_of(B), queued_at=2.0)})
    assert keeper.daemons.problem(A) is not None and keeper.daemons.problem(B) is None


def test_a_second_namespace_that_an_older_release_let_in_runs_on_with_the_condition(keeper: Keeper) -> None:
    had = replace(record_of(B), queued_at=20.0)
    keeper.daemons.prepare([A, B], {A.key: replace(record_of(A), queued_at=10.0), B.key: had})
    ready = Outlook(ModelFile("Ready", "/m", directory=True), 18100, problem=keeper.daemons.problem(B))
    found = accept(B, had, ready, 100.0)
    assert found.runs and found.edition == had.edition and found.warning and found.warning[0] == "DaemonNotShared"
    assert not accept(B, None, ready, 100.0).runs


@pytest.mark.parametrize(("sharing", "may"), [("", False), ("a", False), ("a,c", False), ("b,a", True), ("*", True)])
def test_namespaces_share_a_daemon_where_the_administrator_says_so(tmp_path: Path, sharing: str, may: bool) -> None:
    keeper = Keeper(tmp_path, shared_daemons=sharing)
    keeper.daemons.prepare([A, B], {A.key: record_of(A)})
    assert (keeper.daemons.problem(B) is None) is may and keeper.daemons.problem(A) is None


def test_a_service_that_is_off_excludes_nobody(keeper: Keeper) -> None:
    off = service(replicas=0), service(suspended=True)
    for one in off:
        keeper.daemons.prepare([one, two := service(namespace="other")], {one.key: record_of(one)})
        assert keeper.daemons.problem(two) is None


# ── the user's own Ollama ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    """A user's own Ollama, as far as it is looked for."""
    monkeypatch.setattr(own_ollama, "LOOK_EVERY_S", 0.5)
    with standing() as made:
        made.answers["GET", "/api/version"] = said(200, {"version": "0.17.4"})
        yield made


def with_own(path: Path, stand: Stand) -> Keeper:
    """One that has looked for the user's own."""
    keeper = Keeper(path, ollama_url=stand.url)
    assert not keeper.daemons.is_known("ollama") and keeper.one_pass(service("one", "ollama")) is None
    eventually(lambda: keeper.daemons.own.known, what="it to be looked for")
    assert keeper.woken.is_set()
    return keeper


def test_the_users_own_is_used_without_a_program_of_ours(tmp_path: Path, theirs: Stand) -> None:
    keeper = with_own(tmp_path, theirs)
    keeper.builds.missing = True
    found = keeper.one_pass(service("one", "ollama"))
    assert found is not None and (found.host, found.port) == ("127.0.0.1", theirs.port)
    assert found.edition is None and not keeper.daemons.needs_binary("ollama") and keeper.specs == {}
    assert keeper.one_pass() is None, "nothing is remembered of it once it is unused"


def test_the_users_own_may_be_away_for_a_while_and_is_then_replaced(
    tmp_path: Path, theirs: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = with_own(tmp_path, theirs)
    used = keeper.one_pass(service("one", "ollama"))
    del theirs.answers["GET", "/api/version"]
    eventually(lambda: not keeper.daemons.own.here(), what="it to be missed")
    assert keeper.one_pass(service("one", "ollama")) == used, "it may only be restarted"
    monkeypatch.setattr(daemons, "FORSAKEN_S", 0.0)
    ours = keeper.one_pass(service("one", "ollama"))
    assert ours is not None and ours.runs and ours.port in keeper.settings.port_range
    theirs.answers["GET", "/api/version"] = said(200, {"version": "0.17.4"})
    eventually(keeper.daemons.own.here, what="it to be back")
    assert keeper.one_pass(service("one", "ollama")) == ours, "what runs is not moved"


@pytest.mark.parametrize("answer", [None, {"name": "another server"}, {"version": 1}], ids=str)
def test_where_there_is_none_one_of_ours_is_started(
    tmp_path: Path, theirs: Stand, answer: dict[str, Any] | None
) -> None:
    theirs.answers.clear()
    if answer is not None:
        theirs.answers["GET", "/api/version"] = said(200, answer)
    keeper = with_own(tmp_path, theirs)
    found = keeper.one_pass(service("one", "ollama"))
    assert found is not None and found.runs and keeper.daemons.needs_binary("ollama")
