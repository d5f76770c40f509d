"""Daemons that several services share: absent, the user's own, restarted, without a key, or wrong with status 200."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import mlx, ollama, ollama_registry
from tests.support.engines import Stopwatch, gone, is_gone, reason
from tests.support.faults import Figure, fault
from tests.support.mlx import mlx_model, mlx_service
from tests.support.runtimes import CONTEXT, NOWHERE, answers, back, omlx, out, stream
from tests.support.system import System, eventually, halted, kill, model, running, service, slowed

GGUF = "words"
ONE = "left"
TWO = "right"
THEIRS = "theirs"
LIBRARY = "https://ollama.com/library/tiny:1b"
TOKENS = 400
"""Length of an answer that takes several seconds of an engine that is `slowed`."""


def on_ollama(name: str, model: str) -> dict[str, object]:
    return service(name, model, runtime="ollama", contextSize=CONTEXT, extraArgs=[])


# ── an oMLX of ours, and no Ollama at all ────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A GGUF service, and two models of one oMLX."""
    base = tmp_path_factory.mktemp("omlx")
    for name in (ONE, TWO):
        mlx.tiny(base / name, "--endless", "--context", str(CONTEXT))
    flags = "--omlx", str(omlx()), "--ollama", NOWHERE, "--ollama-url", "off"
    with running(base, *flags) as up:
        up.apply(up.tiny_model(), service(GGUF))
        for name in (ONE, TWO):
            up.apply(mlx_model(name, base / name), on_omlx(name))
        for name in (GGUF, ONE, TWO):
            up.ready(name, within_s=120)
        yield up


def on_omlx(name: str, model: str = "") -> dict[str, object]:
    return mlx_service(name, model or name, runtime="omlx")


def asked_with_key(system: System, method: str, path: str) -> int:
    """Status of a request to oMLX's gate with its key."""
    key = (system.state / "omlx.key").read_text()
    connection = http.client.HTTPConnection("127.0.0.1", system.port(ONE), timeout=20)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status
    finally:
        connection.close()


@fault(
    "R87",
    "a service asks for Ollama, and there is none",
    happens="that service waits; what other daemons and engines serve goes on",
    sees="RuntimeBinaryMissing with the setting and how to install it",
    bound="told within 20 s",
)
def test_without_an_ollama_its_service_says_how_to_get_one(system: System, figure: Figure) -> None:
    watch = Stopwatch(figure)
    system.apply(on_ollama("nowhere", "tiny"))
    watch.when(
        "apply to verdict",
        lambda: eventually(lambda: reason(system, "nowhere") == "RuntimeBinaryMissing", what="it to be told"),
    )
    assert "--ollama" in (said := system.told("nowhere")) and "brew install ollama" in said
    answers(system, ONE, TWO)
    gone(system, "nowhere")


@fault(
    "R92",
    "oMLX is asked for a model that it does not have; or somebody takes one of ours out of it",
    happens="404 to who asked; a model that was taken out is withdrawn and attached again",
    sees="Ready again; the other models answer on",
    bound="back within 20 s",
)
def test_a_model_that_omlx_does_not_know_is_a_404_and_one_of_ours_comes_back(system: System, figure: Figure) -> None:
    attendant, daemon = system.pid(ONE), system.own_pid("omlx")
    status, answer = system.ask(ONE, model="nobody")
    assert status == 404 and "nobody" in str(answer), answer
    with stream(system, TWO) as other:
        with halted(attendant):  # or it would be back before anybody could ask
            assert asked_with_key(system, "DELETE", f"/metal-supervisor/models/{ONE}") == 200
            assert system.ask(ONE, model=ONE)[0] == 404
        watch, since = Stopwatch(figure), system.observe(ONE)["since"]
        watch.when(
            "withdrawn and back",
            lambda: eventually(
                lambda: (row := system.observe(ONE))["ready"] and row["since"] != since, 40, "it to be back"
            ),
        )
        back(system, ONE)
        other.flows()
    assert (system.pid(ONE), system.own_pid("omlx")) == (attendant, daemon)


@fault(
    "R93",
    "oMLX's key is deleted while it runs, and the daemon is killed later",
    happens="its models go on; a new key is made, which the daemon takes",
    sees="nothing: models are attached and detached as before",
    bound="0 withdrawals; all back within 90 s of the kill",
)
def test_a_key_that_is_deleted_stops_no_model_and_is_made_again(system: System, figure: Figure) -> None:
    key = system.state / "omlx.key"
    before = {name: (system.pid(name), system.observe(name)["since"]) for name in (ONE, TWO)}
    old = key.read_text()
    key.unlink()
    system.apply(on_omlx("middle", ONE))
    watch = Stopwatch(figure)
    watch.when("another model attached", lambda: system.ready("middle", within_s=90))
    assert key.read_text() != old and key.stat().st_mode & 0o077 == 0
    answers(system, ONE, TWO, "middle")
    assert {name: (system.pid(name), system.observe(name)["since"]) for name in (ONE, TWO)} == before
    gone(system, "middle")
    listed = system.ask(ONE, "/metal-supervisor/models")[1]["data"]
    assert [each["id"] for each in listed] == [ONE, TWO], "it was detached with the new key"
    kill(system.own_pid("omlx"))
    watch = Stopwatch(figure)
    out(system, ONE, TWO)
    watch.when("all back after a kill", lambda: back(system, ONE, TWO))


# ── the user's own Ollama ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Shared:
    """A system beside a user's own Ollama, which runs a model of theirs and pulls from a registry of the test's."""

    system: System
    own: ollama.Ollama
    registry: ollama_registry.Registry


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    base, theirs = tmp_path_factory.mktemp("ollama"), tmp_path_factory.mktemp("theirs")
    file = ollama.endless(base / "library.gguf", context=CONTEXT)
    with ollama_registry.registry() as registry, ollama.serving(theirs) as own:
        name = registry.publish("tiny", file, tag="1b")
        pulled = own.pull(name).ended()
        assert pulled[-1] == {"status": "success"}, pulled
        own.create(THEIRS, own.link(ollama.tiny(base / "theirs.gguf", n_layer=3)))
        own.keep(THEIRS)
        urls = "--ollama-url", f"http://127.0.0.1:{own.port}", "--ollama-registry", f"http://127.0.0.1:{registry.port}"
        with running(base, *urls, "--ollama", NOWHERE) as up:
            up.apply(up.tiny_model(), service(GGUF), model("library", LIBRARY))
            up.apply(on_ollama(ONE, "library"))
            up.ready(GGUF, within_s=60)
            up.ready(ONE, within_s=60)
            yield Shared(up, own, registry)


@fault(
    "R90",
    "a service asks for a model of the library that the user has pulled by hand",
    happens="it is not pulled again, and stays when the service goes",
    sees="Ready",
    bound="0 pulls",
)
def test_a_model_that_was_pulled_by_hand_is_used_as_it_is(shared: Shared, figure: Figure) -> None:
    answers(shared.system, ONE)
    by_hand, pulls = 1, shared.own.said().count('"/api/pull"')
    assert pulls == by_hand
    figure.add("pulls", pulls - by_hand, "")


@fault(
    "R91",
    "of two services of one model, which Ollama runs once, one is deleted while the other streams",
    happens="it is not unloaded",
    sees="the other stays Ready, and its answer goes on",
    bound="0 answers cut",
)
def test_what_another_service_uses_is_not_unloaded(shared: Shared, figure: Figure) -> None:
    system = shared.system
    system.apply(on_ollama(TWO, "library"))
    system.ready(TWO, within_s=60)
    answers(system, ONE, TWO)
    runners = shared.own.runners()
    assert len(runners) == 2, "theirs, and one for both of ours"
    attendant, since = system.pid(TWO), system.observe(ONE)["since"]
    with stream(system, ONE, tokens=TOKENS) as answer:
        with contextlib.ExitStack() as slow:
            for runner in runners:
                slow.enter_context(slowed(runner.pid))
            gone(system, TWO)
            eventually(lambda: is_gone(attendant), what="its attendant to end")
            answer.flows()
        answer.ends()  # Ollama 0.17.4 may answer nothing more once a stream was hung up on
    figure.add("answers cut", 0, "")
    answers(system, ONE)
    assert shared.own.runners() == runners and system.observe(ONE)["since"] == since


@fault(
    "R89",
    "the user's Ollama is quit, and started again",
    happens="its services are withdrawn, and loaded again when it is back; none of ours is started instead",
    sees="not Ready with `ollama is waited for`; then Ready again",
    bound="withdrawn within 40 s; back within 20 s of its start",
)
def test_the_users_ollama_restarts_and_our_models_are_loaded_again(shared: Shared, figure: Figure) -> None:
    system, own = shared.system, shared.own
    attendant = system.pid(ONE)
    assert own.stop() == 0
    watch = Stopwatch(figure)
    watch.when("withdrawn", lambda: out(system, ONE))
    eventually(lambda: "ollama is waited for" in system.told(ONE), what="it to be told")
    assert system.slice_ready(GGUF)
    own.start()
    watch = Stopwatch(figure)
    watch.when("serves", lambda: back(system, ONE, within_s=40))
    assert system.pid(ONE) == attendant and "ollama " not in system.supervisorctl("status")


@fault(
    "R94",
    "Ollama answers a pull with status 200 and an error in its last line",
    happens="it is an error like any other, and tried again, later each time",
    sees="the error's own words in the condition; Ready once it can be pulled",
    bound="told within 40 s; Ready within 60 s of the mending",
)
def test_an_error_that_comes_as_a_success_is_told_and_overcome(shared: Shared, figure: Figure, tmp_path: Path) -> None:
    system, registry = shared.system, shared.registry
    file = ollama.endless(tmp_path / "bad.gguf", n_layer=4)
    registry.publish("bad", file, tag="1b")
    digest, content = ollama.digest_of(file), file.read_bytes()
    registry.blobs[digest] = content[:-1] + bytes([content[-1] ^ 1])
    watch = Stopwatch(figure)
    system.apply(model("bad", "https://ollama.com/library/bad:1b"), on_ollama("bad", "bad"))
    watch.when("told", lambda: eventually(lambda: "digest mismatch" in system.told("bad"), 40, "it to be told"))
    assert "it is asked again in" in system.told("bad")
    answers(system, ONE)
    registry.blobs[digest] = content
    watch = Stopwatch(figure)
    watch.when("Ready once mended", lambda: system.ready("bad", within_s=60))
    answers(system, "bad")
    gone(system, "bad")


@fault(
    "R88",
    "the user's own Ollama runs already; services come and go, and the whole system is stopped",
    happens="it is used and never stopped; what it runs for the user stays loaded, ours is unloaded",
    sees="the endpoint is that of the user's Ollama; no program `ollama`",
    bound="0 of the user's processes ended",
)
def test_the_users_ollama_is_used_and_outlives_us(shared: Shared, figure: Figure) -> None:
    system, own = shared.system, shared.own
    assert own.process is not None
    own.keep(THEIRS)
    assert system.port(ONE) == own.port and "ollama " not in system.supervisorctl("status")
    assert len(own.loaded()) == 2
    watch = Stopwatch(figure)
    system.stop()
    watch.when("stopped", lambda: eventually(lambda: list(own.loaded()) == [f"{THEIRS}:latest"], 20, "ours to go"))
    assert own.process.poll() is None and own.chat(THEIRS)[0] == 200
    figure.add("of the user's processes ended", 0, "")
