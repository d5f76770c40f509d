"""A model on an Ollama daemon: pulled or created, loaded for as long as its service runs, and unloaded.

Ollama runs one process for each model file, whatever names it has: its list of running models shows the first name, and
unloading one name unloads all. So running models are identified by digest, and a file in use by another service stays
loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from metal_supervisor.runtimes.daemon_client import Away, Daemon, DaemonRefused
from metal_supervisor.runtimes.ollama import MODELS
from metal_supervisor.spec.document import whole
from metal_supervisor.spec.types import Json
from metal_supervisor.state.kept_files import write_atomic

STALL_S = 120.0
"""Longest time that a pull may make no progress."""
READ_BYTES = 4 << 20
UNLOAD_EVERY_S = 0.2
FOREVER = -1
NOT = 0
YEARS = 2
"""A model with `keep_alive` -1 expires in centuries; one that another client has loaded, in minutes."""


class OllamaModel:
    """One model with the parameters of its service."""

    def __init__(self, job: Json) -> None:
        self._job = job
        self._made = ""
        """Digest in Ollama of the model created for the service, "" before."""
        self._names: tuple[str, ...] = ()
        """Further names of that model in Ollama."""
        self.file = ""
        """Model or file that Ollama runs, once attached, if services of the same file share its process; else ""."""

    def attached(self, daemon: Daemon) -> bool:
        """True if the model is loaded and does not expire. Raises Away, DaemonRefused."""
        rows = _rows(daemon.call("GET", "/api/ps"))
        return bool(self._made) and any(each.get("digest") == self._made and _stays(each) for each in rows)

    def attach(self, daemon: Daemon, timeout_s: float, progress: Callable[[str], None]) -> None:
        """Pull or create the model, and load it; return once it is loaded. Raises Away, DaemonRefused."""
        job = self._job
        self.file = job["library"] or ("" if daemon.ours else job["path"])
        self._claim_name(daemon)
        if job["library"]:
            made: Json = {"from": pulled(daemon, job, progress)}
        else:
            digest = _blob(daemon, job, timeout_s, progress)
            made = {"files": {"model.gguf": digest}}
        progress("Ollama makes the model")
        asked = {"model": job["name"], "parameters": job["parameters"], "stream": True, **made}
        _succeed(daemon, "/api/create", asked, lambda _: None)
        progress("Ollama loads the model")
        _keep(daemon, job, FOREVER, timeout_s)
        self._made = _digest_of(daemon, job["name"])
        if not daemon.ours:
            self._note(job["name"], self._made)

    def _claim_name(self, daemon: Daemon) -> None:
        """Make sure that the name is not that of a user's own model. Raises Away, DaemonRefused."""
        if daemon.ours:
            return
        name = self._job["name"]
        there = _digest_of(daemon, name)
        if there and not self._is_made(name, there):
            text = f"this Ollama has a model {name!r} that was not made for this service; rename the InferenceService"
            mine = name == _plain(self._job["library"])  # the user's, and what it is made from
            raise DaemonRefused(409, text if mine else f"{text}, or remove that model (ollama rm {name})")
        self._note(name, "")  # what is made next, even if this process is killed before its digest is known

    def _is_made(self, name: str, digest: str) -> bool:
        """True if the model that the user's own daemon has under a name was made for a service."""
        return self._book().get(name) in ("", digest)

    def _book(self) -> dict[str, str]:
        """Name -> digest of each model made on the user's own daemon; "" where it is not known."""
        try:
            lines = Path(self._job["book"]).read_text("utf-8").splitlines()
        except FileNotFoundError:
            return {}
        return {name: digest for name, _, digest in (line.partition(" ") for line in lines if line)}

    def _note(self, name: str, digest: str) -> None:
        """Note the digest of a model made under a name. Each attacher is a process, and all share one book."""
        path = Path(self._job["book"])
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = {**self._book(), name: digest}
            write_atomic(path, "".join(f"{name} {known}".strip() + "\n" for name, known in made.items()))

    def rename(self, daemon: Daemon, names: tuple[str, ...], others: Collection[str]) -> None:
        """Replace the further names of the model. Raises Away, DaemonRefused, once all that can be are set.

        `others`: names of other services, which may have a model of the same digest.
        """
        refused = None
        self._delete(daemon, set(self._names) - {*names, *others})
        self._names = ()
        for name in names:
            there = "" if daemon.ours else _digest_of(daemon, name)
            if there and not self._is_made(name, there):
                refused = DaemonRefused(409, f"this Ollama has a model {name!r} that was not made for a service")
                continue
            daemon.call("POST", "/api/copy", {"source": self._job["name"], "destination": name})
            self._names = (*self._names, name)
            if not daemon.ours:
                self._note(name, self._made)
        if refused is not None:
            raise refused

    def _delete(self, daemon: Daemon, names: Collection[str]) -> None:
        """Delete names of the model from a supervised daemon, except those that now lead to another model.

        The name of the pulled model stays, because Ollama deletes weights that no name leads to.
        """
        for name in names if daemon.ours else ():
            if name != _plain(self._job["library"]) and _digest_of(daemon, name) == self._made:
                daemon.call("DELETE", "/api/delete", {"model": name})

    def detach(self, daemon: Daemon, timeout_s: float, keep: bool, others: Collection[str]) -> None:
        """Unload the model, and delete its names from a supervised daemon, except those of other services.

        `keep`: another service uses the file, which stays loaded.

        Raises Away, DaemonRefused.
        """
        there = _digest_of(daemon, self._job["name"])
        if not daemon.ours and not self._is_made(self._job["name"], there):
            return  # it is the user's
        self._made = self._made or there
        if not keep:
            self._unload(daemon, timeout_s)
        self._delete(daemon, set(self._names) - set(others))
        if daemon.ours:  # of the user's own daemon nothing is deleted without being asked
            if self._job["name"] != _plain(self._job["library"]):  # what was pulled stays
                daemon.call("DELETE", "/api/delete", {"model": self._job["name"]})
            _served(self._job).unlink(missing_ok=True)

    def _unload(self, daemon: Daemon, timeout_s: float) -> None:
        """Unload the model, for up to `timeout_s`. Ollama unloads it once its requests are done, perhaps after that.

        Ollama loses a request to unload during a load, so it is repeated until the model is gone.
        """
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            _keep(daemon, self._job, NOT, left_s)
            if not any(each.get("digest") == self._made for each in _rows(daemon.call("GET", "/api/ps"))):
                return
            time.sleep(UNLOAD_EVERY_S)


def _keep(daemon: Daemon, job: Json, keep_alive: int, timeout_s: float) -> None:
    """Load or unload the model: an empty prompt does either, by its `keep_alive`."""
    body: dict[str, Any] = {"model": job["name"], "keep_alive": keep_alive}
    if job["mode"] == "embedding":
        daemon.call("POST", "/api/embed", {**body, "input": ""}, timeout_s)
    else:
        daemon.call("POST", "/api/generate", {**body, "stream": False}, timeout_s)


def _plain(name: object) -> str:
    """A name without the default tag."""
    return str(name).removesuffix(":latest")


def _rows(found: Json) -> list[Json]:
    rows = found.get("models")
    return [each for each in rows if isinstance(each, dict)] if isinstance(rows, list) else []


def _stays(row: Json) -> bool:
    """True if the model does not expire within years."""
    until = str(row.get("expires_at"))[:4]
    return until.isdecimal() and int(until) >= time.gmtime().tm_year + YEARS


def _digest_of(daemon: Daemon, name: str) -> str:
    """Digest of the model of that name, "" if there is none."""
    rows = _rows(daemon.call("GET", "/api/tags"))
    return next((str(each.get("digest")) for each in rows if _plain(each.get("name")) == name), "")


def pulled(daemon: Daemon, job: Json, progress: Callable[[str], None]) -> str:
    """Pull a model of the library unless it is there, e.g. pulled by the user. Returns its name.

    `job`: its "library" is the model's name, its "registry" the URL of a mirror or "".

    Raises Away, DaemonRefused.
    """
    name, mirror = job["library"], job["registry"].partition("://")[2].rstrip("/")
    wanted = f"{mirror}/{name if '/' in name else f'library/{name}'}" if mirror else name
    if _digest_of(daemon, _plain(wanted)):
        return wanted
    progress(f"Ollama pulls {name}")
    sizes: dict[str, tuple[int, int]] = {}
    moved_at, most = time.monotonic(), 0

    def told(line: Json) -> None:
        nonlocal moved_at, most
        if size := whole(line, "total"):
            sizes[str(line.get("digest"))] = whole(line, "completed"), size
        done, total = (sum(each[at] for each in sizes.values()) for at in (0, 1))
        if done > most or not sizes:
            moved_at, most = time.monotonic(), done
        if time.monotonic() - moved_at > STALL_S:  # progress lines keep coming without progress
            raise Away(f"the pull of {name} stands still at {done / 1e9:.1f} of {total / 1e9:.1f} GB")
        if total:
            progress(f"Ollama pulls {name}: {100 * done // total} % of {total / 1e9:.1f} GB")

    plain = job["registry"].startswith("http://")
    _succeed(daemon, "/api/pull", {"model": wanted, "insecure": plain, "stream": True}, told)
    return wanted


def _succeed(daemon: Daemon, path: str, asked: Json, told: Callable[[Json], None]) -> None:
    """Send a request whose answer is streamed as progress lines, the last with the outcome. Raises Away, DaemonRefused.

    `told`: called with each line.
    """
    last: Json = {}
    for last in daemon.lines("POST", path, asked, STALL_S):
        told(last)
    if last.get("status") != "success":
        raise Away(f"{path} ended before it was done")


def _blob(daemon: Daemon, job: Json, timeout_s: float, progress: Callable[[str], None]) -> str:
    """Make a file known to the daemon as a blob. Returns its digest.

    A supervised daemon gets a link, named by a digest of the file's identity and the service: it finds a blob by its
    name alone, so 40 GB need not be read, and two services of one file each get their own process and context. The link
    leads to another name of the file, where a confined daemon may read it and not write.
    """
    path = Path(job["path"])
    if daemon.ours:
        found = path.stat()
        identity = f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {job['name']}"
        digest = hashlib.sha256(identity.encode()).hexdigest()
        link = Path(job["models"], "blobs", f"sha256-{digest}")
        served = _served(job)
        try:
            for each in (served, link):
                each.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                each.unlink(missing_ok=True)
            os.link(path.resolve(), served)
            link.symlink_to(served)
            return f"sha256:{digest}"
        except OSError:
            pass  # another disk: it is copied
    progress(f"{path.name} is read for its digest")
    digest = _sha256(path)
    url = f"/api/blobs/sha256:{digest}"
    if not _has(daemon, url):
        progress(f"{path.name} is copied to Ollama")
        with path.open("rb") as file:
            daemon.call("POST", url, file, timeout_s)
    return f"sha256:{digest}"


def _served(job: Json) -> Path:
    """Where a confined daemon reads the file of the service."""
    return Path(job["book"]).resolve().parent / MODELS / str(job["name"])


def _has(daemon: Daemon, url: str) -> bool:
    try:
        daemon.call("HEAD", url)
    except DaemonRefused as error:
        if error.status == 404:
            return False
        raise
    return True


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()
