"""What servers, disks and people do to downloads: nothing but a whole model is ever served, and it is said why."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from metal_supervisor.models.disk_space import KEPT_FREE_BYTES
from metal_supervisor.spec.sources import Artifact
from tests.support.downloads import MIB, at, downloading, from_web, lean, padded, served, whole
from tests.support.engines import Stopwatch, beside_a_bystander, gone, untouched
from tests.support.faults import Figure, fault
from tests.support.hub import COMMIT, Content, Hub
from tests.support.system import ISVC, MODELS, System, eventually, kill, model, running, tiny_gguf

WITHIN_S = 20.0
STALL_S = 2.0
SLOW_BYTES_PER_S = 6 * MIB
PAGE = b"<!DOCTYPE html><html><body>Please log in</body></html>"


@dataclass
class Place:
    """One running system, the Hub it asks, and a model for other servers."""

    system: System
    hub: Hub
    eight: Path
    """A model of 8 MiB."""
    nine: Path
    """Another, of 9 MiB."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    base = tmp_path_factory.mktemp("downloads")
    tiny = base / "tiny.gguf"
    tiny_gguf.write_tiny_gguf(tiny, context=32768)
    repos: dict[str, dict[str, Content]] = {"o/open": {"m.gguf": tiny}, "o/gated": {"m.gguf": tiny}}
    repos |= {f"o/{name}": {f"{name}.gguf": tiny} for name in ("sized", "evil", "wrong", "foreign")}
    flags = "--downloads", "8", "--stall-timeout", str(STALL_S)
    with Hub(repos) as hub, beside_a_bystander(base, "--hf-endpoint", hub.url, *flags) as system:
        eight, nine = (padded(base / f"{size}.gguf", tiny, size * MIB) for size in (8, 9))
        yield Place(system, hub, eight, nine)


def told(system: System, name: str, why: str, says: str = "") -> str:
    """Waits until a service is reported as not ready with that reason; returns the message."""

    def found() -> str:
        seen = system.condition("MetalReady", name)
        matches = (seen.get("status"), seen.get("reason")) == ("False", why) and says in seen["message"]
        return str(seen["message"]) if matches else ""

    try:
        return eventually(found, WITHIN_S, f"{name}: {why} {says}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {system.told(name)}; {system.status(name)}") from None


def not_here(system: System, name: str, source: str) -> None:
    """Nothing of a model is left that could be taken for one, and nothing runs."""
    slot = system.state / "models" / Artifact(source).slot
    assert not list(slot.glob("*.gguf")), list(slot.iterdir())
    assert not system.pid(name)
    eventually(lambda: system.get(f"{MODELS}/{name}")["status"]["phase"] == "Failed", WITHIN_S, "its Model to say so")


# ── D 111 to 114: what servers say ───────────────────────────────────────────────────────────────


@fault(
    "D111",
    "the model is gated, private, renamed, or the link is too old (401, 403, 404)",
    happens="the service waits; it is asked for again, and comes by itself once it may be had",
    sees="GatedModel, SourceUnauthorized or SourceNotFound with the page to go to",
    bound="10 s after it may be had",
)
def test_a_model_that_may_not_be_had_says_which_way_it_can(place: Place, figure: Figure) -> None:
    system, hub = place.system, place.hub
    expected = {
        "gated": ("hf://o/gated/m.gguf", "GatedModel", f"accept the terms on {hub.url}/o/gated"),
        "private": ("hf://o/nowhere/m.gguf", "SourceUnauthorized", "does not exist, or is private (401)"),
        "renamed": ("hf://o/open/n.gguf", "SourceNotFound", "has no file 'n.gguf' at 'main'; correct spec.source"),
        "moved": ("hf://o/open@v2/m.gguf", "SourceNotFound", "has no revision 'v2'"),
        "lost": (f"{hub.url}/nowhere.gguf", "SourceNotFound", "answered 404"),
        "expired": (f"{hub.url}/cdn/o/open/{'a' * 40}/m.gguf", "SourceUnauthorized", "answered 403"),
    }
    hub.gated = True
    with untouched(system):
        watch = Stopwatch(figure)
        for name, (source, _, _) in expected.items():
            if name != "renamed":
                system.apply(*from_web(name, source))
        message = watch.when("apply to verdict", lambda: told(system, "gated", *expected["gated"][1:]))
        assert "spec.sourceSecretRef (key HF_TOKEN)" in message
        hub.gated = False
        watch = Stopwatch(figure)
        watch.when("terms accepted to Ready", lambda: served(system, "gated"))
        system.apply(*from_web("renamed", expected["renamed"][0]))
        for name, (_, why, says) in expected.items():
            if name != "gated":
                told(system, name, why, says)
    gone(system, *expected)


@fault(
    "D112",
    "the line is cut in the middle of a file, twice",
    happens="it goes on from the byte it had come to",
    sees="Downloading: the line was cut, tried again in so many seconds",
    bound="0 bytes fetched twice",
)
def test_a_line_that_is_cut_goes_on_where_it_was(place: Place, figure: Figure) -> None:
    system = place.system
    with Hub({"d/r": {"m.gguf": place.eight}}) as web, untouched(system):
        web.cut_after_bytes, web.cut_times = 3 * MIB, 3  # once for the header
        system.apply(*from_web("cut", at(web)))
        assert served(system, "cut").stat().st_size == 8 * MIB
        asked = [each.range for each in web.asked("m.gguf", "GET") if each.sent_bytes]
        assert f"bytes={3 * MIB}-" in asked, asked
        figure.add("fetched twice", whole(web, "m.gguf") - 8 * MIB, "bytes")
        assert whole(web, "m.gguf") == 8 * MIB
    gone(system, "cut")


@fault(
    "D113",
    "the line is cut, and the server ignores Range",
    happens="the file is fetched from its beginning",
    sees="Downloading, the percentage begins again",
    bound="the file is whole",
)
def test_a_server_without_ranges_is_asked_for_all_of_it(place: Place, figure: Figure) -> None:
    system = place.system
    with Hub({"d/r": {"m.gguf": place.eight}}) as web, untouched(system):
        web.ranges, web.bytes_per_s = False, SLOW_BYTES_PER_S
        system.apply(*from_web("plain", at(web)))
        downloading(system, "plain")
        web.cut_after_bytes, web.cut_times = 2 * MIB, 1
        before = system.own_pid("controller")
        kill(before)
        path = served(system, "plain")
        figure.add("fetched", whole(web, "m.gguf") / MIB, "MiB")
        assert path.read_bytes() == place.eight.read_bytes()
    gone(system, "plain")


@fault(
    "D114",
    "Content-Length is wrong, or another than the Hub's list says",
    happens="what came does not count as whole",
    sees="the line was cut, tried again in so many seconds; or: has so many bytes, and should have so many",
    bound="never served; Ready once it is right",
)
def test_a_wrong_length_is_no_model(place: Place, figure: Figure) -> None:
    system, hub = place.system, place.hub
    size = system.tiny.stat().st_size
    with Hub({"d/r": {"m.gguf": system.tiny}}) as web, untouched(system):
        web.lfs, web.ranges = False, False
        web.size_off_bytes = hub.size_off_bytes = 1000
        system.apply(*from_web("longer", at(web)), *from_web("sized", "hf://o/sized/sized.gguf"))
        said = f"has {size} bytes, and should have {size + 1000}"
        eventually(lambda: said in system.told("sized"), WITHIN_S, f"the Hub's to be said: {system.told('sized')}")
        eventually(lambda: "line was cut" in system.told("longer"), WITHIN_S, f"it: {system.told('longer')}")
        assert not system.pid("longer") and not system.pid("sized")
        web.size_off_bytes = hub.size_off_bytes = 0
        watch = Stopwatch(figure)
        watch.when("right again to Ready", lambda: served(system, "sized"))
        served(system, "longer")
    gone(system, "longer", "sized")


# ── D 115 to 117: what comes ─────────────────────────────────────────────────────────────────────


@fault(
    "D115a",
    "the file is another than spec.sha256 says; then the services and their Model are edited",
    happens="it is thrown away, and not fetched again until spec.sha256 or spec.source changes",
    sees="ModelDigestMismatch with both digests",
    bound="0 bytes more over 3 edits and a new controller",
)
def test_a_wrong_digest_is_fetched_once(place: Place, figure: Figure) -> None:
    system = place.system
    right = place.hub.sha256("o/open", "m.gguf")
    with Hub({"d/r": {"m.gguf": system.tiny}}) as web, untouched(system):
        source = at(web)
        system.apply(*from_web("digest", source, sha256="0" * 64))
        message = told(system, "digest", "ModelDigestMismatch")
        assert "0" * 64 in message and right in message
        not_here(system, "digest", source)
        before = len(web.log)
        for edit in range(3):
            system.apply(lean("digest", contextSize=1024 + edit))
            system.apply(model("digest", source, sha256="0" * 64, license=f"edit-{edit}"))
            wanted = system.get(f"{ISVC}/digest")["metadata"]["generation"]
            eventually(
                lambda wanted=wanted: system.condition("MetalReady", "digest").get("observedGeneration") == wanted, 20
            )
        pid = system.own_pid("controller")
        kill(pid)
        eventually(lambda: system.own_pid("controller") not in (0, pid), 30, "another controller")
        told(system, "digest", "ModelDigestMismatch", "it is not fetched again until that changes")
        figure.add("bytes more", sum(each.sent_bytes for each in web.log[before:]), "bytes")
        assert len(web.log) == before, web.log[before:]
        system.apply(model("digest", source, sha256=right))
        assert served(system, "digest").read_bytes() == system.tiny.read_bytes()
    gone(system, "digest")


@fault(
    "D115b",
    "the Hub has another digest than spec.sha256; or what comes has another than the Hub says",
    happens="the one is not fetched at all, the other not kept",
    sees="ModelDigestMismatch with both digests",
    bound="0 bytes; never served",
)
def test_the_hubs_digest_counts(place: Place, figure: Figure) -> None:
    system, hub = place.system, place.hub
    with untouched(system):
        system.apply(*from_web("foreign", "hf://o/foreign/foreign.gguf", sha256="1" * 64))
        told(system, "foreign", "ModelDigestMismatch", "nothing was fetched")
        figure.add("bytes of what cannot be right", hub.sent("foreign.gguf"), "bytes")
        assert hub.sent("foreign.gguf") == 0
        hub.corrupt = True
        system.apply(*from_web("corrupt", "hf://o/wrong/wrong.gguf"))
        told(system, "corrupt", "ModelDigestMismatch", "should have sha256")
        not_here(system, "corrupt", "hf://o/wrong@main/wrong.gguf")
        hub.corrupt = False
    gone(system, "foreign", "corrupt")


@fault(
    "D116",
    "a login page comes instead of the model",
    happens="nothing of it is kept",
    sees="InvalidModelFile: a web page, not a GGUF file",
    bound="never served; Ready once the model comes",
)
def test_a_web_page_is_no_model(place: Place, figure: Figure) -> None:
    refused(place, "page", PAGE, "InvalidModelFile", "is a web page (a login or error page?), not a GGUF file", figure)


@fault(
    "D117",
    "the file is empty",
    happens="it is not kept",
    sees="InvalidModelFile: it is empty",
    bound="never served; Ready once the model comes",
)
def test_nothing_is_no_model(place: Place, figure: Figure) -> None:
    refused(place, "empty", b"", "InvalidModelFile", "is empty", figure)


def refused(place: Place, name: str, content: bytes, why: str, says: str, figure: Figure) -> None:
    system = place.system
    with Hub({"d/r": {"m.gguf": content}}) as web, untouched(system):
        web.lfs = False
        system.apply(*from_web(name, at(web)))
        told(system, name, why, says)
        not_here(system, name, at(web))
        web.commits[COMMIT]["d/r"]["m.gguf"] = system.tiny
        watch = Stopwatch(figure)
        watch.when("right again to Ready", lambda: served(system, name))
    gone(system, name)


# ── D 119, 120: how it comes ─────────────────────────────────────────────────────────────────────


@fault(
    "D119a",
    "the server sends a part, and then nothing",
    happens="it is asked anew after --stall-timeout",
    sees="Downloading: tried again in so many seconds",
    bound="0 bytes fetched twice",
)
def test_a_server_that_falls_silent_is_asked_anew(place: Place, figure: Figure) -> None:
    system = place.system
    with Hub({"d/r": {"m.gguf": place.eight}}) as web, untouched(system):
        web.bytes_per_s = SLOW_BYTES_PER_S
        system.apply(*from_web("silent", at(web)))
        downloading(system, "silent")
        web.chunk_delay_s = 60.0
        watch = Stopwatch(figure)
        eventually(lambda: "tried again in" in system.told("silent"), 10, f"it: {system.told('silent')}")
        watch.when("silence to another try announced", lambda: True)
        web.chunk_delay_s = web.bytes_per_s = 0.0
        served(system, "silent")
        # What the server counted and nobody received was within its sockets.
        assert whole(web, "m.gguf") - 8 * MIB <= MIB
    gone(system, "silent")


@fault(
    "D119b",
    "the server drips single bytes",
    happens="it is asked anew: that is no download",
    sees="sent only so many bytes in so many seconds",
    bound="--stall-timeout",
)
def test_a_drip_is_no_download(place: Place, figure: Figure, monkeypatch: pytest.MonkeyPatch) -> None:
    system = place.system
    with Hub({"d/r": {"m.gguf": place.eight}}) as web, untouched(system):
        web.bytes_per_s = SLOW_BYTES_PER_S
        system.apply(*from_web("drip", at(web)))
        downloading(system, "drip")
        monkeypatch.setattr("tests.support.hub.CHUNK_BYTES", 16)
        web.chunk_delay_s = 0.1
        watch, said = Stopwatch(figure), f"bytes in {STALL_S:.0f} s"
        watch.when(
            "begin of the drip to verdict",
            lambda: eventually(lambda: said in system.told("drip"), WITHIN_S, f"it: {system.told('drip')}"),
        )
        assert not system.pid("drip")
        gone(system, "drip")


@fault(
    "D120",
    "redirects in a circle, to file://, or to the address of a cloud's metadata",
    happens="they are not followed",
    sees="DownloadFailed or SourceNotAllowed, and where it leads",
    bound="6 requests",
)
def test_redirects_lead_nowhere_else(place: Place, figure: Figure) -> None:
    system = place.system
    with Hub({"d/r": {"m.gguf": system.tiny}}) as web, untouched(system):
        web.redirects = {
            "/circle.gguf": "/circle.gguf",
            "/file.gguf": "file:///etc/passwd",
            "/cloud.gguf": "http://169.254.169.254/latest/meta-data/m.gguf",
            "/good.gguf": at(web),
        }
        system.apply(*from_web("circle", f"{web.url}/circle.gguf"))
        told(system, "circle", "DownloadFailed", "leads to more than 5 other addresses; check spec.source")
        asked = len(web.asked("/circle.gguf"))
        for name in ("file", "cloud", "good"):
            system.apply(*from_web(name, f"{web.url}/{name}.gguf"))
        told(system, "file", "SourceNotAllowed", "leads to a 'file' address, which is not followed")
        told(system, "cloud", "SourceNotAllowed", "169.254.169.254")
        served(system, "good")
        figure.add("requests of a circle", asked, "")
        assert asked == 6
    gone(system, "circle", "file", "cloud", "good")


# ── D 121, 122, 126: what else can be wrong ──────────────────────────────────────────────────────


@fault(
    "D121",
    "a source, or a server's list of files, names a path that leads out of the store",
    happens="nothing is fetched",
    sees="InvalidSpec or InvalidModelFile, and the name",
    bound="0 files outside",
)
def test_no_name_leads_out_of_the_store(place: Place, figure: Figure) -> None:
    system, hub = place.system, place.hub
    with untouched(system):
        hub.extra_names = ("../../../evil.gguf",)
        system.apply(*from_web("listed", "hf://o/evil"), *from_web("named", "hf://o/open/../../../evil.gguf"))
        system.apply(*from_web("beside", "o/open", files=["../evil.gguf"]))
        told(system, "listed", "InvalidModelFile", "lists '../../../evil.gguf', which would lead out of its directory")
        told(system, "named", "InvalidSpec", "evil.gguf'; leave out its path")
        told(system, "beside", "InvalidSpec", "spec.files[0] must name a file beside spec.source, not '../evil.gguf'")
        hub.extra_names = ()
        found = list(system.base.rglob("evil*"))
        figure.add("files outside", len(found), "")
        assert not found
    gone(system, "listed", "named", "beside")


@fault(
    "D122",
    "somebody put a symbolic link where a model of the store would be",
    happens="it is not followed",
    sees="InvalidModelFile, and which link to remove",
    bound="0 bytes written through it",
)
def test_a_link_in_the_store_is_not_followed(place: Place, figure: Figure, tmp_path: Path) -> None:
    system = place.system
    with Hub({"d/r": {"m.gguf": system.tiny}}) as web, untouched(system):
        slot = system.state / "models" / Artifact(at(web)).slot
        slot.symlink_to(tmp_path)
        system.apply(*from_web("linked", at(web)))
        told(system, "linked", "InvalidModelFile", f"{slot} is a symbolic link, which is not followed")
        figure.add("files written through it", len(list(tmp_path.iterdir())), "")
        assert not list(tmp_path.iterdir())
        slot.unlink()
        served(system, "linked")
        gone(system, "linked")
        victim, second = tmp_path / "victim", at(web) + "?second"
        victim.write_bytes(b"GGUF, and dear to its owner")
        slot = system.state / "models" / Artifact(second).slot
        slot.mkdir()
        (slot / "m.gguf.partial").symlink_to(victim)
        system.apply(*from_web("parted", second))
        served(system, "parted")
        assert victim.read_bytes() == b"GGUF, and dear to its owner"
        gone(system, "parted")


@fault(
    "D126",
    "the file is replaced on the server while it comes",
    happens="it is fetched anew, none of the old is kept",
    sees="Downloading, the percentage begins again",
    bound="no byte of the old one",
)
def test_a_file_that_is_replaced_meanwhile_is_never_a_mixture(place: Place, figure: Figure) -> None:
    system = place.system
    with Hub({"d/r": {"m.gguf": place.eight}}) as web, untouched(system):
        web.lfs, web.bytes_per_s = False, SLOW_BYTES_PER_S
        system.apply(*from_web("edition", at(web)))
        downloading(system, "edition")
        web.commits[COMMIT]["d/r"]["m.gguf"] = place.nine
        web.cut_after_bytes, web.cut_times = MIB // 2, 1
        kill(system.own_pid("controller"))
        web.bytes_per_s = 0.0
        path = served(system, "edition")
        figure.add("size", path.stat().st_size / MIB, "MiB")
        assert path.read_bytes() == place.nine.read_bytes()
    gone(system, "edition")


# ── G 131, 132: what a Mac is not allowed to touch; and one without a network ────────────────────


@dataclass
class Strict:
    """A system that fetches from nowhere but a directory, and may use files of another one."""

    system: System
    mirror: Path
    models: Path


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strict]:
    base = tmp_path_factory.mktemp("strict")
    mirror, models = base / "mirror", base / "models"
    (mirror / "o" / "local").mkdir(parents=True)
    models.mkdir()
    tiny_gguf.write_tiny_gguf(mirror / "o" / "local" / "m.gguf", context=32768)
    flags = "--hf-endpoint", str(mirror), "--allowed-roots", str(models), "--private-hosts", ""
    with running(base, *flags) as system:
        yield Strict(system, mirror, models)


def test_a_mac_without_a_network_serves_from_a_directory(strict: Strict) -> None:
    system, file = strict.system, strict.mirror / "o" / "local" / "m.gguf"
    system.apply(*from_web("local", "https://huggingface.co/o/local"))
    pid = system.ready("local")
    assert "hello world" in system.chat("local") and str(file) in psutil.Process(pid).cmdline()
    assert not list((system.state / "models").rglob("*.gguf")), "it is used where it is"
    status = eventually(
        lambda: (found := system.get(f"{MODELS}/local")["status"])["phase"] == "Ready" and found, WITHIN_S, "its Model"
    )
    assert status["path"] == str(file)
    system.apply(*from_web("absent", "hf://o/absent/m.gguf"))
    told(system, "absent", "ModelFileMissing", f"o/absent/m.gguf is neither in {strict.mirror}/o/absent nor")
    gone(system, "local", "absent")


PRIVATE = "is in a part of it that no manifest may name"


@fault(
    "G131",
    "spec.source names a file outside --allowed-roots, one that exists or one that does not",
    happens="it is not looked at",
    sees="SourceNotAllowed, the same words for both",
    bound="1 pass",
)
def test_a_file_outside_the_roots_is_not_even_missed(strict: Strict, figure: Figure) -> None:
    system, models = strict.system, strict.models
    outside = models.parent / "outside.gguf"
    outside.write_bytes(system.tiny.read_bytes())
    (models / "way-out.gguf").symlink_to(outside)
    paths = ["/etc/passwd", "/etc/shadow", "/etc/no-such-file", str(outside), f"{outside}.not", "/root/.ssh/id_rsa"]
    paths += [f"{models}/../outside.gguf", f"{models}/way-out.gguf"]
    watch = Stopwatch(figure)
    for number, path in enumerate(paths):
        system.apply(*from_web(f"file-{number}", f"file://{path}"))
    for number, path in enumerate(paths):
        message = told(system, f"file-{number}", "SourceNotAllowed")
        expected = f"{path} is not below --allowed-roots of this Mac ({models}), or {PRIVATE}"
        assert message.replace(str(outside), "PATH") == f'Model "file-{number}": spec.source: {expected}'.replace(
            str(outside), "PATH"
        ), message
    watch.when("apply to verdict, all of them", lambda: True)
    (models / "mine.gguf").write_bytes(system.tiny.read_bytes())
    system.apply(*from_web("mine", f"file://{models}/mine.gguf"))
    system.ready("mine")
    gone(system, "mine", *(f"file-{number}" for number in range(len(paths))))


@fault(
    "G132",
    "spec.source names loopback, a link-local address, or a name that resolves to one",
    happens="nobody is connected to",
    sees="SourceNotAllowed, the address, and --private-hosts",
    bound="1 pass, 0 connections",
)
def test_no_source_reaches_what_is_not_public(strict: Strict, figure: Figure) -> None:
    system = strict.system
    came: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listening, accepting(listening, came):
        port = listening.getsockname()[1]
        hosts = {
            "loopback": f"127.0.0.1:{port}",
            "name": f"localhost:{port}",
            "short": f"127.1:{port}",
            "number": f"2130706433:{port}",
            "mapped": f"[::ffff:127.0.0.1]:{port}",
            "any": f"0.0.0.0:{port}",
            "metadata": "169.254.169.254",
            "router": "192.168.0.1",
        }
        watch = Stopwatch(figure)
        for name, host in hosts.items():
            system.apply(*from_web(name, f"http://{host}/latest/m.gguf"))
        for name in hosts:
            message = told(system, name, "SourceNotAllowed", "is no public address; --private-hosts can allow it")
            assert message.startswith(f'Model "{name}": spec.source: http://'), message
        watch.when("apply to verdict, all of them", lambda: True)
        gone(system, *hosts)
    figure.add("connections", len(came), "")
    assert not came


@contextlib.contextmanager
def accepting(listening: socket.socket, came: list[str]) -> Iterator[None]:
    """Notes who connects."""

    def take() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, who = listening.accept()
                came.append(str(who))
                connection.close()

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        thread.join()


# ── D 118: no room ───────────────────────────────────────────────────────────────────────────────


@dataclass
class Disk:
    """A system whose models are on a small disk of their own."""

    system: System
    path: Path

    def resize(self, size_bytes: int) -> None:
        """Makes the disk larger or smaller; what is on it stays."""
        subprocess.run(["mount", "-o", f"remount,size={size_bytes}", str(self.path)], check=True)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    base = tmp_path_factory.mktemp("disk")
    path = base / "store"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={KEPT_FREE_BYTES + 4 * MIB}", "tmpfs", str(path)]
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root can mount a small disk, and only on Linux")
    try:
        with running(base, "--model-store", str(path)) as system:
            yield Disk(system, path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@fault(
    "D118a",
    "the disk has no room for a model",
    happens="no byte is fetched; it is, once there is room",
    sees="InsufficientDisk with the arithmetic",
    bound="2 GiB are left to the machine",
)
def test_a_model_without_room_is_not_begun(disk: Disk, figure: Figure) -> None:
    system = disk.system
    with Hub({"d/r": {"m.gguf": padded(system.base / "eight.gguf", system.tiny, 8 * MIB)}}) as web:
        system.apply(*from_web("large", at(web)))
        message = told(system, "large", "InsufficientDisk", "m.gguf needs 8 MiB; ")
        assert "GiB are free, 2.0 GiB of them are left to the machine; free some, see " in message
        figure.add("bytes fetched", whole(web, "m.gguf"), "bytes")
        assert whole(web, "m.gguf") == 0
        disk.resize(KEPT_FREE_BYTES + 64 * MIB)
        served(system, "large", store=disk.path)
        assert whole(web, "m.gguf") == 8 * MIB
    gone(system, "large")


@fault(
    "D118b",
    "others fill the disk while a model comes",
    happens="the download ends, and goes on once there is room",
    sees="DownloadFailed: No space left on device, or InsufficientDisk",
    bound="0 bytes fetched twice; never served",
)
def test_a_disk_that_fills_up_meanwhile_ends_it(disk: Disk, figure: Figure) -> None:
    system = disk.system
    size = 24 * MIB
    with Hub({"d/r": {"m.gguf": padded(system.base / "more.gguf", system.tiny, size)}}) as web:
        web.bytes_per_s = SLOW_BYTES_PER_S
        disk.resize(KEPT_FREE_BYTES + 64 * MIB)
        source = at(web)
        part = disk.path / Artifact(source).slot / "m.gguf.partial"
        system.apply(*from_web("filled", source))
        downloading(system, "filled")
        eventually(lambda: part.stat().st_size > 2 * MIB, WITHIN_S, "some of it")
        used = shutil.disk_usage(disk.path).used
        disk.resize(used + 2 * MIB)
        message = told(system, "filled", "DownloadFailed", "No space left on device")
        assert message.startswith('Model "filled": spec.source: '), message
        have = part.stat().st_size
        assert not system.pid("filled") and have > 2 * MIB
        web.bytes_per_s = 0.0
        disk.resize(KEPT_FREE_BYTES + 128 * MIB)
        served(system, "filled", store=disk.path)
        # What had come in and found no room was fetched in vain.
        figure.add("fetched in vain", (whole(web, "m.gguf") - size) / MIB, "MiB")
        assert whole(web, "m.gguf") - size < 6 * MIB
    gone(system, "filled")
