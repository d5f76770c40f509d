"""Attendants of models on a daemon that is away, refuses, forgets, lies or stalls; they never give up, and end well."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_support import Answer, Stand, said, standing

from metal_supervisor.runtimes import model_attacher
from metal_supervisor.runtimes.daemon_client import Daemon, DaemonRefused
from metal_supervisor.runtimes.model_attacher import ModelAttacher
from metal_supervisor.runtimes.ollama_models import OllamaModel
from metal_supervisor.runtimes.omlx_models import MODELS
from metal_supervisor.spec.attachment import JOB, Attachment, Phase
from metal_supervisor.spec.record import Verdict
from metal_supervisor.spec.types import Standing
from metal_supervisor.state.directory import StateDir
from tests.support.records import a_record
from tests.support.system import eventually, free_ports

PROGRAM = "default.tiny"
NAME = "tiny"
MODEL = f"{MODELS}/{NAME}"
PAST_MOST_PIDS = 1 << 30


@pytest.fixture
def stand() -> Iterator[Stand]:
    with standing() as made:
        yield made


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    """A state directory, and attendants that are in a hurry."""
    monkeypatch.setattr(model_attacher, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(model_attacher, "AWAY_S", 0.02)
    monkeypatch.setattr(model_attacher, "LONGEST_AWAY_S", 0.02)
    monkeypatch.setattr(model_attacher, "REFUSED_S", 0.02)
    made = StateDir(tmp_path / "state")
    made.create()
    return made


def listens(state: StateDir, daemon: str, port: int) -> None:
    """Makes a daemon's record, as the controller does."""
    verdict = Verdict(Standing.RUN, "Needed", "", 0.0)
    record = a_record(
        daemon,
        "",
        uid="",
        generation=0,
        program=daemon,
        model="",
        runtime=daemon,
        mode="",
        priority="critical",
        verdict=verdict,
        endpoint=None,
        port=port,
        host="127.0.0.1",
    )
    state.write_record(record)


def omlx(state: StateDir, **more: Any) -> dict[str, Any]:
    """A job, as the runtime makes it; the key is there."""
    key = state.path / "omlx.key"
    if not key.exists():
        key.write_text("secret\n")
    return {"daemon": "omlx", "name": NAME, "path": "/m", "settings": {}, "key_file": str(key), **more}


def ollama(path: Path) -> dict[str, Any]:
    """The same of a file, for an Ollama of the user's own."""
    return {
        "daemon": "ollama",
        "name": NAME,
        "library": "",
        "registry": "",
        "path": str(path),
        "models": "",
        "book": f"{path}.made",
        "parameters": {},
        "mode": "chat",
    }


@contextlib.contextmanager
def attending(state: StateDir, job: dict[str, Any], program: str = PROGRAM) -> Iterator[ModelAttacher]:
    """An attendant at work; told to end afterwards, and that it has ended is checked."""
    made = ModelAttacher(state, program, job)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.end()
        thread.join(30)
    assert not thread.is_alive()


def phase(state: StateDir, wanted: Phase, words: str = "") -> str:
    """Waits until an attendant says what it does; returns all that it says."""

    def look() -> Attachment | None:
        found = state.attachment(PROGRAM)
        return found if found is not None and found.phase is wanted and words in found.message else None

    return eventually(look, what=f"{wanted.value}: {words}; it is {state.attachment(PROGRAM)}").message


class Omlx:
    """A stand-in for our gate: models come and go, and it can be told to misbehave."""

    def __init__(self, stand: Stand) -> None:
        self.loaded = False
        self.put: Callable[[], Answer] = self._put
        self.stand = stand
        self.asked: dict[str, Any] = {"path": "/m", "settings": {}}
        stand.answers["GET", MODELS] = lambda: said(
            200, {"data": [{"id": NAME, "loaded": True, "asked": self.asked}] * self.loaded}
        )
        stand.answers["PUT", MODEL] = lambda: self.put()  # noqa: PLW0108 - it may be another by then
        stand.answers["DELETE", MODEL] = self._delete

    def _put(self) -> Answer:
        self.loaded = True
        asked = next(json.loads(body) for method, _, body, _ in reversed(self.stand.asked) if method == "PUT")
        self.asked = {"path": asked["path"], "settings": asked["settings"]}
        return said(200, {"id": NAME})

    def _delete(self) -> Answer:
        self.loaded = False
        return said(200, {"id": NAME})


def test_a_model_is_attached_with_the_key_and_unloaded_at_the_end(state: StateDir, stand: Stand) -> None:
    Omlx(stand)
    listens(state, "omlx", stand.port)
    with attending(state, omlx(state, settings={"max_context_window": 512})):
        phase(state, Phase.ATTACHED)
        found = state.attachment(PROGRAM)
        assert found is not None and found.pid == os.getpid()
    changes = [each for each in stand.asked if each[0] != "GET"]
    asked = json.dumps({"path": "/m", "settings": {"max_context_window": 512}}).encode()
    assert changes == [("PUT", MODEL, asked, "Bearer secret"), ("DELETE", MODEL, b"", "Bearer secret")]
    assert all(key == "" for method, _, _, key in stand.asked if method == "GET"), "a look needs none"
    assert state.attachment(PROGRAM) is None


def test_a_daemon_that_is_not_there_is_waited_for(state: StateDir, stand: Stand) -> None:
    Omlx(stand)
    with attending(state, omlx(state)):
        phase(state, Phase.WAITING, "omlx is waited for: it is being started")
        listens(state, "omlx", free_ports(1)[0])
        phase(state, Phase.WAITING, "ConnectionRefusedError")
        listens(state, "omlx", stand.port)
        phase(state, Phase.ATTACHED)


def test_a_model_that_the_daemon_has_lost_is_attached_again(state: StateDir, stand: Stand) -> None:
    daemon = Omlx(stand)
    listens(state, "omlx", stand.port)
    with attending(state, omlx(state)):
        phase(state, Phase.ATTACHED)
        daemon.loaded = False
        eventually(lambda: daemon.loaded, what="it to be loaded again")
        phase(state, Phase.ATTACHED)
    assert stand.paths("PUT") == [MODEL, MODEL]


@pytest.mark.parametrize(
    "answer",
    [said(500, {"error": {"message": "ValueError: no such layer"}}), said(200, {"error": "ValueError: no such layer"})],
    ids=["500", "200"],
)
def test_a_refusal_is_told_whatever_its_status_and_asked_again(state: StateDir, stand: Stand, answer: Answer) -> None:
    daemon = Omlx(stand)
    mended = daemon.put
    daemon.put = lambda: answer
    listens(state, "omlx", stand.port)
    with attending(state, omlx(state)):
        told = phase(state, Phase.REFUSED, "ValueError: no such layer")
        assert told.startswith("omlx: ") and "; it is asked again in " in told
        eventually(lambda: len(stand.paths("PUT")) > 2, what="it to be asked again")
        daemon.put = mended
        phase(state, Phase.ATTACHED)


@pytest.mark.parametrize("answer", [Answer(200, b"<html>"), said(200, {"data": None}), said(200, [])])
def test_another_server_at_the_daemons_port_is_told(state: StateDir, stand: Stand, answer: Answer) -> None:
    stand.answers["GET", MODELS] = answer
    listens(state, "omlx", stand.port)
    with attending(state, omlx(state)):
        phase(state, Phase.REFUSED, "another server has oMLX's port")
    assert stand.paths("PUT") == []


def test_without_the_key_a_model_that_is_loaded_serves_and_another_waits_for_it(state: StateDir, stand: Stand) -> None:
    daemon = Omlx(stand)
    job, key = omlx(state), state.path / "omlx.key"
    key.unlink()
    daemon.loaded = True
    listens(state, "omlx", stand.port)
    with attending(state, job):
        phase(state, Phase.ATTACHED)
        daemon.loaded = False
        phase(state, Phase.WAITING, "its key cannot be read: No such file or directory")
        key.write_text("another")
        phase(state, Phase.ATTACHED)
    assert {key for method, _, _, key in stand.asked if method == "PUT"} == {"Bearer another"}


def test_told_to_end_during_a_load_it_unloads_and_ends(state: StateDir, stand: Stand) -> None:
    daemon = Omlx(stand)
    loading = threading.Event()

    def never() -> Answer:
        loading.set()
        stand.hold.wait()
        return Answer(200)

    daemon.put = never
    listens(state, "omlx", stand.port)
    with attending(state, omlx(state)):
        assert loading.wait(30)
        phase(state, Phase.ATTACHING)
    assert stand.paths("DELETE") == [MODEL]


def test_it_ends_also_where_the_daemon_is_gone(state: StateDir, stand: Stand) -> None:
    Omlx(stand)
    listens(state, "omlx", stand.port)
    with attending(state, omlx(state)):
        phase(state, Phase.ATTACHED)
        listens(state, "omlx", free_ports(1)[0])
    assert state.attachment(PROGRAM) is None and stand.paths("DELETE") == []


# ── Ollama, where several services may share what runs ───────────────────────────────────────────

EVER = "2319-01-01T00:00:00Z"


def ollama_stand(stand: Stand) -> None:
    """One that has every blob, makes every model, and has loaded it."""
    row = {"name": f"{NAME}:latest", "digest": "d", "expires_at": EVER}
    loaded = {"rows": [row]}

    def generate() -> Answer:
        asked = json.loads(stand.asked[-1][2])
        loaded["rows"] = [row] if asked["keep_alive"] else []
        return said(200, {"done": True})

    stand.answers["HEAD", "/api/blobs/sha256:" + "0" * 64] = Answer(200)
    stand.answers["POST", "/api/create"] = said(200, {"status": "success"})
    stand.answers["POST", "/api/generate"] = generate
    stand.answers["GET", "/api/tags"] = said(200, {"models": [row]})
    stand.answers["GET", "/api/ps"] = lambda: said(200, {"models": loaded["rows"]})


def keep_alives(stand: Stand) -> list[int]:
    return [json.loads(body)["keep_alive"] for _, path, body, _ in stand.asked if path == "/api/generate"]


@pytest.fixture
def file(state: StateDir, stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that an Ollama of the user's own runs for the service."""
    monkeypatch.setattr("metal_supervisor.runtimes.ollama_models._sha256", lambda _path: "0" * 64)
    (made := tmp_path / "model.gguf").write_bytes(b"GGUF")
    ollama_stand(stand)
    Path(f"{made}.made").write_text(NAME)  # it was made for this service, by an earlier process
    listens(state, "ollama", stand.port)
    return made


@pytest.mark.parametrize(
    ("pid", "its_phase", "unloads"),
    [(os.getpid(), Phase.ATTACHED, False), (PAST_MOST_PIDS, Phase.ATTACHED, True), (os.getpid(), Phase.REFUSED, True)],
    ids=["lives", "is-gone", "is-refused"],
)
def test_what_another_service_has_ollama_run_is_left_alone_while_that_one_lives(
    state: StateDir, stand: Stand, file: Path, pid: int, its_phase: Phase, unloads: bool
) -> None:
    with attending(state, ollama(file)):
        phase(state, Phase.ATTACHED)
        state.write_attached(Attachment("default.other", pid, its_phase, "", 0.0, str(file)))
    assert keep_alives(stand) == [-1, 0][: 1 + unloads]


def test_of_two_services_of_one_file_that_end_together_one_unloads_it(
    state: StateDir, stand: Stand, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_end, looks = threading.Barrier(2, timeout=30), ModelAttacher._needed_by_another

    def at_once(attacher: ModelAttacher) -> bool:
        both_end.wait()
        return looks(attacher)

    monkeypatch.setattr(ModelAttacher, "_needed_by_another", at_once)
    with attending(state, ollama(file)) as one, attending(state, ollama(file), "default.other") as other:
        for program in (PROGRAM, "default.other"):
            eventually(lambda program=program: (it := state.attachment(program)) and it.phase is Phase.ATTACHED)
        one.end()
        other.end()
    assert keep_alives(stand)[-1] == 0 and [each.file for each in state.attachments()] == []


def test_a_model_that_is_put_out_soon_is_not_loaded_again_at_once(state: StateDir, stand: Stand) -> None:
    """Two that do not fit together would put each other out for ever."""
    daemon = Omlx(stand)
    listens(state, "omlx", stand.port)
    with attending(state, omlx(state)):
        phase(state, Phase.ATTACHED)
        daemon.loaded = False
        phase(state, Phase.REFUSED, "soon after it had loaded it")
        phase(state, Phase.ATTACHED)
        daemon.loaded = False
        phase(state, Phase.REFUSED, "asked again in 0.04 s")
        phase(state, Phase.ATTACHED)


def named(state: StateDir, *names: str, program: str = PROGRAM, daemon: str = "omlx") -> None:
    """Writes a service's record with further names, as the controller does."""
    state.write_record(a_record(program.partition(".")[2], program=program, daemon=daemon, daemon_names=names))


def test_a_model_answers_to_the_further_names_of_its_record_and_follows_them_without_a_load(
    state: StateDir, stand: Stand
) -> None:
    listens(state, "omlx", stand.port)
    Omlx(stand)

    def given() -> list[Any]:
        return [json.loads(body).get("names") for method, _, body, _ in stand.asked if method == "PUT"]

    named(state, "phi")
    with attending(state, omlx(state)):
        phase(state, Phase.ATTACHED)
        assert given() == [None, ["phi"]]
        named(state, "phi", "Phi-4")
        eventually(lambda: given() == [None, ["phi"], ["phi", "Phi-4"]], what="the new names")


def test_a_model_that_may_not_start_is_not_attached_again_after_the_daemon_has_lost_it(
    state: StateDir, stand: Stand
) -> None:
    listens(state, "omlx", stand.port)
    daemon = Omlx(stand)
    with attending(state, omlx(state)):
        phase(state, Phase.ATTACHED)
        state.write_record(a_record(NAME, program=PROGRAM, daemon="omlx", barred="ModelSourceNotAllowed: rejected"))
        phase(state, Phase.ATTACHED)
        puts = sum(method == "PUT" for method, *_ in stand.asked)
        daemon.loaded = False
        eventually(lambda: state.attachment(PROGRAM) is None, what="it to end, so that its next start is refused")
        assert sum(method == "PUT" for method, *_ in stand.asked) == puts


class Library:
    """A stand-in for Ollama's names and what it runs: no more than `OllamaModel` asks for."""

    def __init__(self, ours: bool, **digests: str) -> None:
        self.ours, self.digests, self.loaded = ours, dict(digests), set(digests)
        self.asked: list[tuple[str, str]] = []

    def call(self, method: str, path: str, body: Any = None, _timeout_s: float = 0.0) -> dict[str, Any]:
        self.asked.append((path, body.get("model", "") if isinstance(body, dict) else ""))
        if path == "/api/generate":
            (self.loaded.add if body["keep_alive"] else self.loaded.discard)(body["model"])
        if path == "/api/delete":
            del self.digests[body["model"]]
        if path == "/api/copy":
            self.digests[body["destination"]] = self.digests[body["source"]]
            self.asked[-1] = path, body["destination"]
        names = self.loaded & self.digests.keys() if path == "/api/ps" else self.digests.keys()
        return {"models": [{"name": f"{each}:latest", "digest": self.digests[each]} for each in sorted(names)]}

    def lines(self, _method: str, path: str, body: Any, _stall_s: float) -> Iterator[dict[str, Any]]:
        self.asked.append((path, body["model"]))
        self.digests[body["model"]] = "made" if path == "/api/create" else "pulled"
        yield {"status": "success"}


class Answering(Library):
    """Ollama while it finishes a long answer: a request to unload takes a while, and the model stays."""

    waits: list[float]

    def call(self, method: str, path: str, body: Any = None, timeout_s: float = 0.0) -> dict[str, Any]:
        if path == "/api/generate" and not body["keep_alive"]:
            self.waits.append(timeout_s)
            time.sleep(0.3)
            return {}
        return super().call(method, path, body, timeout_s)


def use(library: Any, job: dict[str, Any]) -> OllamaModel:
    """A model attached by a process of its own."""
    model = OllamaModel(job)
    model.attach(library, 1.0, lambda _: None)
    return model


def leave(model: OllamaModel, library: Any) -> None:
    model.detach(library, 1.0, False, ())


def test_a_model_of_the_users_is_neither_replaced_nor_unloaded(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    job, ours, theirs = ollama(path) | {"models": str(tmp_path)}, Library(ours=True), Library(ours=False, tiny="mine")
    leave(use(ours, job), ours)
    assert ours.digests == {}
    with pytest.raises(DaemonRefused, match="rename the InferenceService, or remove"):
        use(theirs, job)
    leave(OllamaModel(job), theirs)
    assert theirs.digests == {"tiny": "mine"} and theirs.loaded == {"tiny"}
    assert not any(each in ("/api/create", "/api/generate") for each, _ in theirs.asked)

    theirs.digests.clear()  # they remove it, as they were told
    use(theirs, job)
    leave(use(theirs, job), theirs)
    assert theirs.digests == {"tiny": "made"} and theirs.loaded == set(), "made for the service, and found again"
    theirs.digests["tiny"], theirs.loaded = "another", {"tiny"}
    with pytest.raises(DaemonRefused):
        use(theirs, job)
    leave(OllamaModel(job), theirs)
    assert theirs.loaded == {"tiny"}, "what they have made since under that name"


def test_further_names_are_copies_that_go_with_the_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    library: Any = Library(ours=True)
    model = use(library, ollama(path) | {"models": str(tmp_path)})
    model.rename(library, ("phi", "qwen"), ())
    assert library.digests.keys() == {NAME, "phi", "qwen"}
    library.digests["qwen"] = "another"  # the model of a service of that name
    model.rename(library, ("gemma",), ())
    assert library.digests.keys() == {NAME, "qwen", "gemma"}
    model.rename(library, (), {"gemma"})
    assert "gemma" in library.digests, "it is that of another service now, which has the same digest"
    model.rename(library, ("phi",), ())
    leave(model, library)
    assert library.digests == {"qwen": "another", "gemma": "made"}


def test_a_further_name_that_is_that_of_the_pulled_model_keeps_its_weights(tmp_path: Path) -> None:
    library: Any = Library(ours=True)
    model = use(library, ollama(tmp_path / "m.gguf") | {"library": "qwen3"})
    model.rename(library, ("qwen3",), ())
    leave(model, library)
    assert library.digests.keys() == {"qwen3"}, "without a name Ollama would delete what it has pulled"


def test_a_model_of_the_users_keeps_a_name_that_a_service_claims(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    theirs: Any = Library(ours=False, phi="mine")
    model = use(theirs, ollama(path))
    with pytest.raises(DaemonRefused, match="phi"):
        model.rename(theirs, ("phi", "qwen"), ())
    assert theirs.digests == {NAME: "made", "phi": "mine", "qwen": "made"}
    model.rename(theirs, (), ())
    assert theirs.digests.keys() == {NAME, "phi", "qwen"}, "of the user's own daemon nothing is deleted"
    use(theirs, ollama(path) | {"name": "qwen"})


def test_an_unload_is_waited_for_as_long_as_it_may_take_and_no_longer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    library = Answering(ours=True)
    library.waits = []
    leave(use(library, ollama(path) | {"models": str(tmp_path)}), library)
    assert len(library.waits) == 2 and library.waits[1] < 0.7, library.waits


def test_a_service_may_be_named_as_the_model_of_the_library_that_it_runs(tmp_path: Path) -> None:
    job = ollama(tmp_path / "m.gguf") | {"name": "qwen3", "library": "qwen3"}
    ours = Library(ours=True)
    leave(use(ours, job), ours)
    assert "qwen3" in ours.digests, "what was pulled stays"
    free = Library(ours=False)
    use(free, job)
    use(free, job)
    theirs = Library(ours=False, qwen3="mine")
    with pytest.raises(DaemonRefused, match=r"rename the InferenceService$"):
        use(theirs, job)


@pytest.mark.parametrize("odd", [[], {}, "x", "²²²²", 1e999, 1e99, int("1" * 400), -1, True, None], ids=ascii)
def test_numbers_of_an_ollama_that_are_none_end_no_attendant(stand: Stand, tmp_path: Path, odd: object) -> None:
    lines = {"digest": odd, "total": odd, "completed": odd}, {"total": 5, "completed": odd}, {"status": "success"}
    stand.answers["POST", "/api/pull"] = Answer(200, b"".join(json.dumps(each).encode() + b"\n" for each in lines))
    stand.answers["POST", "/api/create"] = said(200, {"status": "success"})
    stand.answers["POST", "/api/generate"] = said(200, {})
    made = {"name": NAME, "digest": "d", "expires_at": odd}
    for path in ("/api/tags", "/api/ps"):
        stand.answers["GET", path] = said(200, {"models": [made]})
    told: list[str] = []
    daemon = Daemon("127.0.0.1", stand.port, ours=True)
    model = OllamaModel({**ollama(tmp_path / "m"), "library": "qwen3"})
    model.attach(daemon, 20.0, told.append)
    assert told[-1] == "Ollama loads the model" and not model.attached(daemon)


def test_a_file_that_has_gone_is_told_and_waited_for(state: StateDir, stand: Stand, tmp_path: Path) -> None:
    ollama_stand(stand)
    (tmp_path / "gone.gguf.made").write_text(NAME)
    listens(state, "ollama", stand.port)
    with attending(state, ollama(tmp_path / "gone.gguf")):
        phase(state, Phase.REFUSED, "gone.gguf: No such file or directory")
        eventually(lambda: stand.paths("GET").count("/api/ps") > 2, what="it to be tried again")


# ── the process ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("job", ["", "{", "[]", '{"daemon": "another"}', '{"daemon": "omlx"}'])
def test_a_job_that_cannot_be_understood_ends_it_as_a_mistake_of_the_configuration(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], job: str
) -> None:
    monkeypatch.setenv(JOB, job)
    assert model_attacher.main([PROGRAM, str(state.path)]) == 78
    assert f"cannot attend to {PROGRAM}" in capfd.readouterr().err
