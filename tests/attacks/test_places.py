"""Manifests that name what is not theirs: the state directory, another service's model, keys of this Mac's user.

Each goes the way a manifest goes: understood by `interpret`, then looked for by the store's own job. Every secret file
is a valid GGUF file here, so that nothing but its place can be what stops it.
"""

from __future__ import annotations

import os
import shutil
import threading
import unicodedata
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metal_supervisor.controller.prerequisites.daemons import Daemons
from metal_supervisor.controller.prerequisites.path_looks import PathLooks
from metal_supervisor.models.download_job import DownloadJob
from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.store import Store
from metal_supervisor.models.store_context import StoreContext, terms_of
from metal_supervisor.runtimes import omlx
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.resources import Policy, interpret
from metal_supervisor.spec.sources import NO_KEYS, Artifact
from metal_supervisor.spec.types import ModelFile, Rejected, Service
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.home import StateError
from tests.support.system import eventually, tiny_gguf

SLOT = "0123456789abcdef"
ACCENT = unicodedata.normalize("NFC", "é")
POLICY = Policy("llama-server", {"llama-server": frozenset({"gguf"}), "omlx": frozenset({"mlx"})})
REFUSED = "SourceNotAllowed"


@dataclass(frozen=True)
class Mac:
    """A Mac with secrets, and the directory in which a stranger's own files are."""

    base: Path
    home: Path
    own: Path
    settings: Settings

    @property
    def state(self) -> StateDir:
        return StateDir(self.settings.state_path)

    @cached_property
    def store(self) -> StoreContext:
        return StoreContext(self.settings.store_path, terms_of(self.settings))

    def targets(self) -> dict[str, Path]:
        """Files that no manifest may name."""
        state, store, home = self.settings.state_path, self.settings.store_path, self.home
        return {
            "cluster token": state / "cluster" / "token",
            "record": state / "records" / "default.other.json",
            "spec": state / "specs" / "default.other.json",
            "slot": store / SLOT / "model.gguf",
            "ollama": store / "ollama" / "blobs" / "sha256-0",
            "ssh": home / ".ssh" / "id_ed25519",
            "kube": home / ".kube" / "config",
            "aws": home / ".aws" / "credentials",
            "gnupg": home / ".gnupg" / "secring.gpg",
            "hidden": home / "work" / ".env",
            "library": home / "Library" / "Keychains" / "login.keychain-db",
        }


MACS = ("embedded", "cluster", "everything")
"""With the usual roots of both kinds, and with `--allowed-roots /`."""


@pytest.fixture(params=MACS)
def mac(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mac]:
    base = tmp_path / f"caf{ACCENT}"
    home = base / "home"
    own = home / "models"
    own.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("METAL_SUPERVISOR_ALLOWED_ROOTS", raising=False)
    kubeconfig = str(home / ".kube" / "config") if request.param == "cluster" else ""
    roots = {"embedded": "", "cluster": str(own), "everything": "/"}[request.param]
    settings = Settings(kubeconfig=kubeconfig, allowed_roots=roots, state_dir=str(home / ".metal-supervisor"))
    if request.param == "everything":
        settings = replace(settings, state_dir=str(base / "state"), model_store=str(base / "store"))
    made = Mac(base, home, own, settings)
    tiny_gguf.write_tiny_gguf(own / "own.gguf", n_layer=1, n_embd=32, n_ff=32, n_head=1, n_head_kv=1)
    for target in made.targets().values():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(own / "own.gguf", target)
    yield made


def artifacts_of(service: Service) -> list[Artifact]:
    return [service.model.artifact, *(each.artifact for each in service.companions)]


def understood(model: Mapping[str, Any], service: Mapping[str, Any]) -> Service | Rejected:
    """A manifest, as the API server hands it over."""
    hardware = {"accelerator": "metal"}
    named = {"metadata": {"namespace": "b", "name": "m", "uid": "m", "generation": 1}}
    asked = {"metadata": {"namespace": "b", "name": "s", "uid": "s", "generation": 1}}
    found = {("b", "m"): {**named, "spec": {"format": "gguf", "hardware": hardware, **model}}}
    key = ("b", "s")
    return interpret({key: {**asked, "spec": {"modelRef": "m", **service}}}, found, POLICY)[key]


def looked_for(mac: Mac, artifact: Artifact) -> ModelFile:
    """What the store's job says of an artifact. Raises Unusable."""
    return DownloadJob(artifact, mac.store, lambda _: None, lambda *_: None).ready()


def attack(mac: Mac, model: Mapping[str, Any], service: Mapping[str, Any] | None = None) -> str:
    """Why a manifest gets nothing; "" if each of its files was taken for a model."""
    found = understood(model, service or {})
    if isinstance(found, Rejected):
        return f"{found.reason}: {found.message}"
    for artifact in artifacts_of(found):
        try:
            if artifact != Artifact(str(mac.own / "own.gguf")):
                looked_for(mac, artifact)
        except Unusable as error:
            return f"{error.reason}: {error}"
        except OSError as error:
            return f"OSError: {error.strerror}"
    return ""


# ── spellings ────────────────────────────────────────────────────────────────────────────────────


def _quoted(path: Path | str) -> str:
    return urllib.parse.quote(str(path))


def _link(mac: Mac, to: Path | str, name: str = "innocent.gguf") -> Path:
    link = mac.own / name
    link.unlink(missing_ok=True)
    link.symlink_to(to)
    return link


def _through_directory(mac: Mac, path: Path) -> str:
    return f"{_link(mac, path.parent, 'innocent')}/{path.name}"


def _chained(mac: Mac, path: Path) -> str:
    return str(_link(mac, _link(mac, _link(mac, path, "one.gguf"), "two.gguf"), "three.gguf"))


def _descriptor(mac: Mac, path: Path) -> str:
    found = os.open(path, os.O_RDONLY)  # ended with the test's process: a number that stays open is the point
    OPENED.append(found)
    return str(found)


OPENED: list[int] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        os.close(OPENED.pop())


def _climbing(mac: Mac, path: Path) -> str:
    return os.path.relpath(path, mac.own)


SPELLINGS: dict[str, Callable[[Mac, Path], str]] = {
    "plain": lambda mac, path: str(path),
    "file URL": lambda mac, path: f"file://{_quoted(path)}",
    "file URL of localhost": lambda mac, path: f"file://localhost{_quoted(path)}",
    "FILE in capitals": lambda mac, path: f"FILE://{_quoted(path)}",
    "unquoted URL": lambda mac, path: f"file://{path}",
    "every byte quoted": lambda mac, path: "file:///" + "".join(f"%{each:02x}" for each in os.fsencode(path)[1:]),
    "slashes quoted": lambda mac, path: "file:///" + _quoted(path)[1:].replace("/", "%2F"),
    "quoted twice": lambda mac, path: f"file://{_quoted(_quoted(path))}",
    "two slashes": lambda mac, path: f"/{path}",
    "three slashes": lambda mac, path: f"//{path}",
    "slashes within": lambda mac, path: str(path).replace("/", "//"),
    "dots within": lambda mac, path: str(path).replace("/", "/./"),
    "dot at the end": lambda mac, path: f"{path}/.",
    "slash at the end": lambda mac, path: f"{path}/",
    "spaces around": lambda mac, path: f"  {path}  ",
    "query": lambda mac, path: f"file://{_quoted(path)}?x=1",
    "fragment": lambda mac, path: f"file://{_quoted(path)}#x.gguf",
    "up and down": lambda mac, path: f"{path.parent}/../{path.parent.name}/{path.name}",
    "up from one's own": lambda mac, path: f"{mac.own}/{_climbing(mac, path)}",
    "up, quoted": lambda mac, path: f"file://{_quoted(mac.own)}/{_climbing(mac, path)}".replace("..", "%2e%2e"),
    "up, half quoted": lambda mac, path: f"file://{_quoted(mac.own)}/{_climbing(mac, path)}".replace("..", ".%2E"),
    "up by what is not there": lambda mac, path: f"{mac.own}/none/../{_climbing(mac, path)}",
    "up by a file": lambda mac, path: f"{mac.own}/own.gguf/../{_climbing(mac, path)}",
    "up from the root": lambda mac, path: f"/../../..{path}",
    "a link": lambda mac, path: str(_link(mac, path)),
    "a link by URL": lambda mac, path: f"file://{_quoted(_link(mac, path))}",
    "a relative link": lambda mac, path: str(_link(mac, os.path.relpath(path, mac.own))),
    "three links": _chained,
    "a link to its directory": _through_directory,
    "a link to the root": lambda mac, path: f"{_link(mac, '/', 'root')}{path}",
    "a link to a link of the system": lambda mac, path: str(_link(mac, f"/proc/self/root{path}")),
    "/proc/self/root": lambda mac, path: f"/proc/self/root{path}",
    "/proc/thread-self/root": lambda mac, path: f"/proc/thread-self/root{path}",
    "/proc/PID/root": lambda mac, path: f"/proc/{os.getpid()}/root{path}",
    "/proc/1/root": lambda mac, path: f"/proc/1/root{path}",
    "/proc/self/cwd": lambda mac, path: f"/proc/self/cwd/{os.path.relpath(path)}",
    "/proc/self/root twice": lambda mac, path: f"/proc/self/root/proc/self/root{path}",
    "/proc/self/fd": lambda mac, path: f"/proc/self/fd/{_descriptor(mac, path)}",
    "/dev/fd": lambda mac, path: f"/dev/fd/{_descriptor(mac, path)}",
    "/private": lambda mac, path: f"/private{path}",
    "the data volume": lambda mac, path: f"/System/Volumes/Data{path}",
    "a volume's link": lambda mac, path: f"/Volumes/Macintosh HD{path}",
    "/.vol": lambda mac, path: f"/.vol/{path.stat().st_dev}/{path.stat().st_ino}",
    "/.nofollow": lambda mac, path: f"/.nofollow{path}",
    "capitals": lambda mac, path: str(path).upper(),
    "one capital": lambda mac, path: str(path.with_name(path.name.capitalize())),
    "NFD": lambda mac, path: unicodedata.normalize("NFD", str(path)),
    "NFKC": lambda mac, path: unicodedata.normalize("NFKC", str(path)),
    "~": lambda mac, path: f"~/{_climbing(mac, path)}",
    "$HOME": lambda mac, path: f"$HOME/{path.name}",
    "NUL": lambda mac, path: f"{mac.own}/own.gguf\0{path}",
    "newline": lambda mac, path: f"{path}\n",
    "backslashes": lambda mac, path: str(path).replace("/", "\\"),
    "the Hub, climbing": lambda mac, path: f"hf://o/r/{'../' * 20}{path}",
}


def spelled(mac: Mac) -> Iterator[tuple[str, Path, str]]:
    """Each forbidden place in each spelling: (name of the spelling, path, what it is written as)."""
    return ((name, path, write(mac, path)) for name, write in SPELLINGS.items() for path in mac.targets().values())


def test_no_spelling_of_a_forbidden_place_is_a_source(mac: Mac) -> None:
    taken = []
    for spelling, _, written in spelled(mac):
        if written.startswith("hf://"):
            found = understood({"source": written}, {})
            assert not isinstance(found, Service) or not found.model.artifact.local
        elif not attack(mac, {"source": written}):
            taken.append((spelling, written))
    assert taken == []


def test_no_spelling_of_a_forbidden_place_is_a_projector_a_draft_or_a_file(mac: Mac) -> None:
    assert [each for each in spelled(mac) if not refused_beside(mac, each[2])] == []


@pytest.mark.parametrize("way", [_climbing, lambda mac, path: os.path.basename(_link(mac, path))], ids=["up", "link"])
def test_no_way_from_ones_own_directory_to_a_forbidden_place_is_a_projector_a_draft_or_a_file(
    mac: Mac, way: Callable[[Mac, Path], str]
) -> None:
    for path in mac.targets().values():
        assert refused_beside(mac, way(mac, path)), path


def refused_beside(mac: Mac, written: str) -> bool:
    """True if it is neither a projector, nor a draft, nor a file beside a model of one's own."""
    own = {"source": str(mac.own / "own.gguf")}
    draft = {"speculativeDecoding": {"type": "draft-simple", "draftModel": written}}
    return bool(
        attack(mac, {**own, "mmproj": written}) and attack(mac, own, draft) and attack(mac, {**own, "files": [written]})
    )


def test_no_spelling_of_a_forbidden_place_is_a_cache_directory(mac: Mac) -> None:
    builds: Any = SimpleNamespace()
    for spelling, path, written in spelled(mac):
        daemons = Daemons(mac.settings, mac.state, builds, lambda *_: None, lambda: None)
        found = understood({"source": str(mac.own), "format": "mlx"}, {"runtime": "omlx", "pagedSSDCacheDir": written})
        if isinstance(found, Rejected):
            continue
        eventually(partial(daemons.is_looked_at, found), what="the look at the directory")
        daemons.prepare([found], {})
        if omlx.refuse(found) is None and _is_that(written, path):
            assert (daemons.problem(found) or ("",))[0] == REFUSED, (spelling, written)
            assert daemons._services == {}, "the daemon must not be started with it"


def _is_that(written: str, path: Path) -> bool:
    """Whether a name leads to the file on this machine; others are made anew, in a directory of the manifest's own."""
    try:
        return Path(written).samefile(path)
    except (OSError, ValueError):
        return False


def test_a_shard_may_not_be_a_link_to_a_forbidden_place(mac: Mac) -> None:
    for path in mac.targets().values():
        first = mac.own / "m-00001-of-00002.gguf"
        tiny_gguf.write_tiny_gguf(first)
        _link(mac, path, "m-00002-of-00002.gguf")
        for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
            assert attack(mac, {"source": str(mac.own / name)}).startswith(REFUSED)


def test_a_directory_may_not_hold_links_to_a_forbidden_place(mac: Mac) -> None:
    for path in mac.targets().values():
        model = mac.own / "mlx"
        (model / "deep").mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"x")
        for name in ("tokenizer.json", "deep/tokenizer.json"):
            _link(mac, path, f"mlx/{name}")
            assert attack(mac, {"source": str(model), "format": "mlx"}).startswith(REFUSED)
            (model / name).unlink()
        _link(mac, path.parent, "mlx/more")
        if path.name == ".env":
            continue  # its directory is an ordinary one
        assert attack(mac, {"source": str(model), "format": "mlx"}).startswith(REFUSED)
        (model / "more").unlink()


def test_the_short_link_is_the_state_directory(mac: Mac) -> None:
    state = StateDir(mac.settings.state_path / ("x" * 60))
    assert state.link is not None
    state.create()
    try:
        tiny_gguf.write_tiny_gguf(state.path / "token")
        assert attack(mac, {"source": f"{state.home}/token"}).startswith(REFUSED)
    finally:
        state.remove_link()


@pytest.mark.parametrize("what", ["a link", "a directory", "a file"])
def test_a_short_link_that_another_user_made_first_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    state = StateDir(tmp_path / ("x" * 60))
    link = state.link
    assert link is not None
    evil = tmp_path / "evil"
    evil.mkdir()
    {"a link": lambda: link.symlink_to(evil), "a directory": link.mkdir, "a file": link.touch}[what]()
    if what == "a link":
        monkeypatch.setattr("os.getuid", lambda: 4242)
    try:
        for use in (state.create, state.refresh_link, lambda: state.socket):
            with pytest.raises(StateError, match="is not trusted; remove it, or choose a shorter --state-dir"):
                use()
        assert not list(evil.iterdir())
    finally:
        monkeypatch.undo()
        link.rmdir() if what == "a directory" else link.unlink()


def test_every_refusal_reads_the_same(mac: Mac) -> None:
    """Whether a file is there, may be read, is a directory, or is in a directory that is not there."""
    locked = mac.home / ".ssh" / "locked"
    locked.mkdir()
    locked.chmod(0)
    said = set()
    paths = [
        *mac.targets().values(),
        mac.home / ".ssh",
        mac.home / ".ssh" / "none",
        mac.home / ".none" / "none",
        locked,
        locked / "none",
        mac.settings.state_path,
        mac.settings.state_path / "none",
        mac.settings.store_path / SLOT,
        mac.settings.store_path / ("f" * 16) / "none",
        # Through what is not a directory, or not there, and back to a file that may be named.
        Path(f"{mac.home}/.ssh/id_ed25519/../../models/own.gguf"),
        Path(f"{mac.home}/.ssh/none/../../models/own.gguf"),
        Path(f"{mac.home}/.ssh/../models/own.gguf"),
    ]
    for path in paths:
        for form in ("gguf", "mlx"):
            said.add(attack(mac, {"source": str(path), "format": form}).replace(str(path), "PATH"))
    locked.chmod(0o700)
    assert len(said) == 1 and next(iter(said)).startswith(REFUSED), said


def test_no_header_quotes_a_file(mac: Mac) -> None:
    (mac.own / "text.gguf").write_bytes(b"xyzw:x:0:0:hunter2")
    said = attack(mac, {"source": str(mac.own / "text.gguf")})
    assert "InvalidModelFile" in said and "xyz" not in said


def test_ones_own_files_still_serve(mac: Mac, tmp_path: Path) -> None:
    own = mac.own / "own.gguf"
    for written in (str(own), f"file://{_quoted(own)}", f"//{own}", str(_link(mac, own, "mine.gguf"))):
        found = understood({"source": written}, {})
        assert isinstance(found, Service)
        assert looked_for(mac, found.model.artifact).phase == "Ready"
    # Beside the slots of the store, and in a hidden directory that is named as a root itself.
    theirs, hidden = mac.base / "volume" / "a.gguf", mac.home / ".cache" / "hub" / "b.gguf"
    for path in (theirs, hidden):
        path.parent.mkdir(parents=True)
        tiny_gguf.write_tiny_gguf(path)
    roots = f"{theirs.parent},{hidden.parent}"
    wider = replace(mac, settings=replace(mac.settings, allowed_roots=roots, model_store=str(theirs.parent)))
    for path in (theirs, hidden):
        assert looked_for(wider, Artifact(str(path))).phase == "Ready"


def test_a_cache_directory_is_the_very_one_that_was_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is swapped right after the judgement: the daemon may write where a look says that it leads."""
    allowed, secret, link = tmp_path / "roots" / "cache", tmp_path / "secret", tmp_path / "roots" / "link"
    for each in (allowed, secret):
        each.mkdir(parents=True)
    link.symlink_to(allowed)
    resolve = os.path.realpath

    def swapped(path: Any, **more: Any) -> Any:
        found = resolve(path, **more)
        if str(path) == str(link):
            link.unlink()
            link.symlink_to(secret)
        return found

    monkeypatch.setattr(os.path, "realpath", swapped)
    looks = PathLooks(Settings(state_dir=str(tmp_path / "state"), allowed_roots=str(tmp_path / "roots")), lambda: None)
    found = eventually(lambda: looks.look(str(link)), what="the look")
    assert found.refusal is not None or found.real == str(allowed)


def test_a_name_in_argv_that_is_no_file_of_the_service_is_not_opened(mac: Mac) -> None:
    rang = threading.Event()
    store = Store(mac.settings.store_path, rang.set, terms_of(mac.settings))
    own = Artifact(str(mac.own / "own.gguf"))
    store.want({own: NO_KEYS})
    assert store.has(str(mac.own / "own.gguf")) and store.may_open(str(mac.own / "own.gguf"))
    assert not any(store.has(str(path)) or store.may_open(str(path)) for path in mac.targets().values())
    store.want({})
