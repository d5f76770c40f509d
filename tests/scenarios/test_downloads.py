"""Models that are not on this Mac yet: every way to name one, and what is seen of them until they serve.

The Hub is one on loopback, asked through huggingface_hub as the real one is; S3 is a real server. What shall last
comes from further such servers that drip, as plain URLs.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import psutil
import pytest

from metal_supervisor.spec.sources import Artifact
from tests.support import mlx, s3
from tests.support.downloads import MIB, at, downloading, from_web, lean, lines, padded, served, whole
from tests.support.engines import BYSTANDER, beside_a_bystander, gone, is_gone, reason, stand_in, untouched
from tests.support.faults import Figure, fault
from tests.support.hub import COMMIT, Content, Hub
from tests.support.mlx import mlx_model, mlx_service
from tests.support.system import MODELS, System, eventually, kill, model, running, tiny_gguf

DRIP_BYTES_PER_S = 1.5 * MIB
SLOTS = 7
SLOW = "k"
LEAST_S = 9.5
"""The download whose words are watched all along, and how long they stay the same at least."""
KILLS = 5
SOCKET_BYTES = 4 * MIB
"""What a server may have sent that nobody had read when its client died."""
SECRETS = "/api/v1/namespaces/default/secrets"


class Words(threading.Thread):
    """Notes when the words about a service change."""

    def __init__(self, look: Callable[[], str]) -> None:
        super().__init__(daemon=True)
        self._look, self._over = look, threading.Event()
        self.said: list[tuple[float, str]] = []
        """(monotonic time, words), each when they were new."""
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.05):
            now, words = time.monotonic(), self._look()
            if not self.said or self.said[-1][1] != words:
                self.said.append((now, words))

    def end(self) -> None:
        self._over.set()
        self.join(10)


@dataclass
class Place:
    """One running system, and where its models come from."""

    system: System
    hub: Hub
    drip: Hub
    """Never in a hurry."""
    large: Path
    """A model that is mostly padding."""
    words: Words
    """What is said of SLOW."""


def shards_of(directory: Path) -> dict[str, Content]:
    """A tiny model that can be served, in several files, by name."""
    directory.mkdir()
    whole, maker = directory / "split.gguf", gguf.GGUFWriter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", lambda path, arch: maker(path, arch, split_max_tensors=8))
        tiny_gguf._write(whole, tiny_gguf.Recipe())
    found: dict[str, Content] = {path.name: path for path in sorted(directory.glob("split-*.gguf"))}
    assert len(found) > 2
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    base = tmp_path_factory.mktemp("downloads")
    tiny = base / "tiny.gguf"
    tiny_gguf.write_tiny_gguf(tiny, context=32768)
    large = padded(base / "large.gguf", tiny, 128 * MIB)
    one: dict[str, Content] = {"m.gguf": tiny}
    repos = {
        **{f"o/{name}": one for name in ("uri", "bare", "page", "draft", "small", "seeing", "once", "replaced")},
        "o/quants": {"q/m-Q4_K_M.gguf": tiny, "q/m-Q8_0.gguf": b"GGUF", "README.md": b"#"},
        "o/sighted": {"m.gguf": tiny, "mmproj-m.gguf": tiny},
        "o/shards": shards_of(base / "shards"),
        "o/old": one,
    }
    drips: dict[str, dict[str, Content]] = {"d/r": {f"{name}.gguf": large for name in "abcdefghijk"}}
    with Hub(repos) as hub, Hub(drips) as drip:
        hub.upload("f" * 40, {**repos, "o/old": {"other.gguf": tiny}})
        drip.bytes_per_s = DRIP_BYTES_PER_S
        drip.sha256("d/r", "a.gguf")
        with beside_a_bystander(base, "--hf-endpoint", hub.url, "--downloads", str(SLOTS)) as system:
            system.apply(*from_web(SLOW, at(drip, f"{SLOW}.gguf")))
            downloading(system, SLOW)
            words = Words(lambda: str(system.condition("MetalReady", SLOW).get("message")))
            yield Place(system, hub, drip, large, words)
            words.end()


def dripping(place: Place, *names: str) -> tuple[dict[str, Any], ...]:
    """Manifests of Models and services of these names that take long to come."""
    return tuple(each for name in names for each in from_web(name, at(place.drip, f"{name}.gguf")))


# ── ways to name a model ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "source", "spec"),
    [
        ("uri", "hf://o/uri/m.gguf", {}),
        ("bare", "o/bare", {"files": ["m.gguf"]}),
        ("page", "https://huggingface.co/o/page/blob/main/m.gguf?download=true", {}),
        ("quants", "hf://o/quants", {"quantization": "Q4_K_M"}),
        ("named-quants", "hf://o/quants:Q4_K_M", {}),
        ("old", f"hf://o/old@{COMMIT}/m.gguf", {}),
        ("small", "https://huggingface.co/o/small", {}),
    ],
)
def test_a_model_of_the_hub_is_fetched_and_served(place: Place, name: str, source: str, spec: dict[str, Any]) -> None:
    system = place.system
    with untouched(system):
        system.apply(model(name, source, **spec), lean(name))
        path = served(system, name)
    assert path.read_bytes() == system.tiny.read_bytes()
    gone(system, name)


def test_any_shard_brings_them_all(place: Place) -> None:
    system = place.system
    last = sorted(place.hub.commits[place.hub.commit]["o/shards"])[-1]
    system.apply(model("shards", f"hf://o/shards/{last}"), lean("shards"))
    path = served(system, "shards")
    assert path.name.endswith("-00001-of-" + last.rpartition("-of-")[2])
    assert {each.name for each in path.parent.glob("*.gguf")} == set(place.hub.commits[place.hub.commit]["o/shards"])
    gone(system, "shards")


def test_a_plain_url_is_fetched_and_served(place: Place) -> None:
    system = place.system
    with Hub({"d/r": {"m.gguf": system.tiny}}) as web:
        system.apply(model("web", at(web)), lean("web"))
        assert served(system, "web").read_bytes() == system.tiny.read_bytes()
        assert not any(each.authorization for each in web.log), "nobody gave it a token"
    shown = system.kubectl("get", "model", "web", "-o", "jsonpath={.status.phase} {.status.path}")
    assert shown.startswith(f"Ready {system.state}/models/") and shown.endswith("/m.gguf")
    gone(system, "web")


def test_a_model_of_a_bucket_is_fetched_with_the_keys_of_a_secret(place: Place) -> None:
    system = place.system
    server = s3.Server(system.base / "s3")
    try:
        server.put("models", "", b"")
        server.put("models", "deep/m.gguf", system.tiny.read_bytes(), hashed=True)
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": server.keys}
        system.apply(model("bucket", "s3://models/deep/m.gguf", sourceSecretRef={"name": "keys"}), lean("bucket"))
        eventually(lambda: reason(system, "bucket") == "SecretNotFound", 20, "the Secret to be missed")
        system.kube.request("POST", SECRETS, None, secret)
        assert served(system, "bucket").read_bytes() == system.tiny.read_bytes()
    finally:
        server.end()
    gone(system, "bucket")


def test_what_a_model_has_beside_it_is_fetched_too(place: Place) -> None:
    """A draft model is loaded by the real engine. No real one loads so small a projector: a stand-in is given it."""
    system = place.system
    speculation = {"type": "draft-simple", "draftModelRef": "draft", "nDraftMax": 4}
    system.apply(model("draft", "hf://o/draft/m.gguf"), lean("drafted", "tiny", speculativeDecoding=speculation))
    line = psutil.Process(system.ready("drafted")).cmdline()
    assert Path(line[line.index("--model-draft") + 1]).read_bytes() == system.tiny.read_bytes()
    assert "hello world" in system.chat("drafted")
    system.apply(model("seeing", "hf://o/seeing/m.gguf", mmproj="mmproj-m.gguf"), lean("seeing"))
    eventually(lambda: reason(system, "seeing") == "SourceNotFound", 20, f"a projector: {system.told('seeing')}")
    assert "spec.mmproj: " in system.told("seeing") and "mmproj-m.gguf" in system.told("seeing")
    assert not system.pid("seeing")
    system.apply(model("sighted", "hf://o/sighted/m.gguf", mmproj="mmproj-m.gguf"))
    system.apply({**stand_in("sighted"), "spec": {**stand_in("sighted")["spec"], "modelRef": "sighted"}})
    line = psutil.Process(system.ready("sighted")).cmdline()
    model_path, projector = (Path(line[line.index(flag) + 1]) for flag in ("--model", "--mmproj"))
    assert model_path.read_bytes() == projector.read_bytes() == system.tiny.read_bytes()
    assert (model_path.name, projector.name) == ("m.gguf", "mmproj-m.gguf")
    gone(system, "drafted", "seeing", "sighted")


# ── while they come ──────────────────────────────────────────────────────────────────────────────


def test_one_serves_while_three_others_come(place: Place) -> None:
    system = place.system
    three = "abc"
    with untouched(system):
        stream = system.stream(BYSTANDER)
        system.apply(*dripping(place, *three))
        for name in three:
            downloading(system, name)
        sent = [whole(place.drip, f"{name}.gguf") for name in three]
        system.apply(model("once", "hf://o/once/m.gguf"), lean("once"))
        served(system, "once", 30)
        assert all(reason(system, name) == "Downloading" for name in three)
        for name, before in zip(three, sent, strict=True):
            eventually(lambda name=name, before=before: whole(place.drip, f"{name}.gguf") > before, what="more of it")
        assert stream.completed()
    gone(system, "once", *three)


@fault(
    "D124",
    "a service is deleted or suspended, or its Model's source replaced, while it is downloaded",
    happens="the connection is closed, other downloads go on",
    sees="Suspended; or the new source's progress",
    bound="1 s",
)
@pytest.mark.parametrize("how", ["deleted", "suspended", "replaced"])
def test_what_is_not_wanted_any_more_ends_within_a_second(place: Place, how: str, figure: Figure) -> None:
    system, name = place.system, how[0] + "x"
    with Hub({"d/r": {"m.gguf": place.large}}) as own, Hub({"d/r": {"m.gguf": place.large}}) as other:
        own.bytes_per_s = other.bytes_per_s = DRIP_BYTES_PER_S
        system.apply(*from_web(name, at(own)), *from_web("goes-on", at(other)))
        for each in (name, "goes-on"):
            downloading(system, each)
        eventually(lambda: lines(system, own) and whole(own, "m.gguf"), 10, "bytes to come")
        if how == "deleted":
            system.delete(name)
        elif how == "suspended":
            system.apply(lean(name, suspend=True))
        else:
            system.apply(model(name, "hf://o/replaced/m.gguf"))
        with figure.timed("until the connection is closed"):
            eventually(lambda: not lines(system, own), 1.0, "the connection to be closed")
        if how == "replaced":
            assert served(system, name).read_bytes() == system.tiny.read_bytes()
        elif how == "suspended":
            eventually(lambda: system.status(name).get("phase") == "Suspended", 10, f"it: {system.status(name)}")
            assert reason(system, name) != "Downloading"
        before = whole(other, "m.gguf")
        eventually(lambda: whole(other, "m.gguf") > before, 5, "the other one to go on")
        assert lines(system, other) and reason(system, "goes-on") == "Downloading"
        gone(system, *({name, "goes-on"} if how != "deleted" else {"goes-on"}))


@fault(
    "D123",
    "several services and Models want one file, and spell its source differently",
    happens="it is downloaded once, and is one file",
    sees="Downloading, then Ready, of all of them",
    bound="0 bytes fetched twice",
)
def test_one_file_comes_once_whoever_wants_it_however_it_is_spelt(place: Place, figure: Figure) -> None:
    system = place.system
    with Hub({"d/r": {"m.gguf": padded(system.base / "twice.gguf", system.tiny, 6 * MIB)}}) as web:
        web.bytes_per_s = 8 * MIB
        system.apply(model("twice", at(web)), model("again", f"{at(web)}#fragment"))
        system.apply(lean("twice"), lean("second", "twice"), lean("again"))
        found = {served(system, name) for name in ("twice", "again")}
        system.ready("second")
        assert len(found) == 1
        figure.add("fetched twice", whole(web, "m.gguf") - 6 * MIB, "bytes")
        assert whole(web, "m.gguf") == 6 * MIB, list(web.log)
    gone(system, "twice", "second", "again")
    before = whole(place.hub, "m.gguf")
    sources = {"uri": "hf://o/once@main/m.gguf", "url": "https://hf.co/o/once/resolve/main/m.gguf?download=1"}
    for name, source in sources.items():
        system.apply(model(f"one-{name}", source), lean(f"one-{name}"))
    assert len({served(system, f"one-{name}") for name in sources}) == 1
    more = whole(place.hub, "m.gguf") - before
    assert more <= system.tiny.stat().st_size, "at most once, and not at all if it was here"
    gone(system, *(f"one-{name}" for name in sources))


def test_progress_is_said_in_words_that_change_every_ten_seconds_at_most(place: Place) -> None:
    system, name, words = place.system, SLOW, place.words
    eventually(lambda: len(words.said) >= 3, 40, f"the words to change twice: {words.said}")
    words.end()
    times, texts = [at for at, _ in words.said], [text for _, text in words.said]
    for text in texts[1:]:  # the first are from before there was a rate
        assert re.fullmatch(r"\d+ % of [\d.]+ MiB, \d+\.\d MB/s, \d+ (s|min) left", text), text
    assert min(later - earlier for earlier, later in itertools.pairwise(times[1:])) > LEAST_S, words.said
    shares = [int(text.partition(" ")[0]) for text in texts]
    assert shares == sorted(set(shares)) and shares[-1] < 100
    status = system.get(f"{MODELS}/{name}")["status"]
    assert status["phase"] == "Downloading" and "%" in status["conditions"][0]["message"]
    gone(system, name)


# ── whatever happens to us meanwhile ─────────────────────────────────────────────────────────────


def killed_at(system: System, part: Path, more_than_bytes: int) -> int:
    """kill -9 of the controller once so many bytes of a file are here; how many were when it had ended."""
    eventually(lambda: part.exists() and part.stat().st_size > more_than_bytes, 40, f"more than {more_than_bytes}")
    before = system.own_pid("controller")
    kill(before)
    eventually(lambda: is_gone(before), 10, "its end")
    have = part.stat().st_size
    eventually(lambda: system.own_pid("controller") not in (0, before), 30, "another controller")
    return have


@fault(
    "D125",
    "the controller is killed five times in the middle of a download",
    happens="each goes on from the last byte; what is not whole is never served",
    sees="Downloading, then Ready",
    bound="1 MiB and what sockets hold, each time",
)
def test_a_controller_that_is_killed_again_and_again_fetches_nothing_twice(place: Place, figure: Figure) -> None:
    system, name = place.system, "killed"
    size = 12 * MIB
    with Hub({"d/r": {"m.gguf": padded(system.base / "killed.gguf", system.tiny, size)}}) as web:
        web.bytes_per_s = DRIP_BYTES_PER_S
        source = at(web)
        part = system.state / "models" / Artifact(source).slot / "m.gguf.partial"
        with untouched(system):
            system.apply(model(name, source), lean(name))
            kept = [0]
            for _ in range(KILLS):
                kept.append(killed_at(system, part, kept[-1]))
                assert not system.pid(name) and not part.with_name("m.gguf").exists()
            web.bytes_per_s = 0.0
            path = served(system, name)
    starts = [int(each.range[6:-1]) for each in web.asked("m.gguf", "GET") if re.fullmatch(r"bytes=\d+-", each.range)]
    assert path.stat().st_size == size and len(starts) >= KILLS
    assert set(starts) <= set(kept), "each went on where the one before had come to"
    figure.add("sent beyond the size", (whole(web, "m.gguf") - size) / KILLS / MIB, "MiB a kill")
    assert whole(web, "m.gguf") - size <= KILLS * (MIB + SOCKET_BYTES)
    gone(system, name)


@contextlib.contextmanager
def watched(port: int) -> Iterator[list[tuple[str, int]]]:
    """Nothing but an open port where a server was; gives who connects to it."""
    came: list[tuple[str, int]] = []
    with socket.create_server(("127.0.0.1", port)) as listening:

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, who = listening.accept()
                    came.append(who)
                    connection.close()

        thread = threading.Thread(target=take)
        thread.start()
        yield came
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_mlx_repository_serves_and_does_so_again_while_the_hub_is_down(tmp_path: Path) -> None:
    folder = mlx.tiny(tmp_path / "model")
    files: dict[str, Content] = {str(each.relative_to(folder)): each for each in folder.rglob("*") if each.is_file()}
    files |= {"README.md": b"# no part of the model", "pytorch_model.bin": b"the same, in other words"}
    tiny_gguf.write_tiny_gguf(tmp_path / "tiny.gguf", context=32768)
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(Hub({"o/mlx": files, "o/gguf": {"m.gguf": tmp_path / "tiny.gguf"}}))
        flags = "--hf-endpoint", hub.url, "--mlx-lm-server", str(mlx.server())
        with running(tmp_path, *flags) as system:
            system.apply(model("words", "hf://o/gguf/m.gguf"), lean("words"))
            system.apply(mlx_model("mlx", "hf://o/mlx"), mlx_service("mlx", "mlx"))
            served(system, "words")
            directory = mlx_served(system)
            assert {each.name for each in directory.iterdir()} == files.keys() - {"README.md", "pytorch_model.bin"}
            assert (directory / "config.json").read_bytes() == (folder / "config.json").read_bytes()
            system.stop()
            hub.stop()
            with watched(int(hub.url.rpartition(":")[2])) as came:
                system.start()
                served(system, "words")
                assert mlx_served(system) == directory
                assert not came


def mlx_served(system: System) -> Path:
    """Waits until the MLX service answers; the directory of its model."""
    system.ready("mlx", 90)
    assert "hello world" in system.ask("mlx", model="mlx")[1]["choices"][0]["message"]["content"]
    return Path(eventually(lambda: system.get(f"{MODELS}/mlx")["status"].get("path"), 20, "the Model's path"))
