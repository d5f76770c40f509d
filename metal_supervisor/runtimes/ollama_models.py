"""A model on an Ollama daemon: pulled or made, loaded for as long as its service runs, and unloaded.

Ollama runs one process for each model file, whatever names it goes by: its list of what runs shows the name that came
first, and unloading one name unloads all. So what runs is told by digests, and a file that somebody else uses stays.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metal_supervisor.runtimes.daemon_client import Away, Daemon, DaemonRefused
from metal_supervisor.spec.types import Json

STALL_S = 120.0
"""How long a pull may stand still."""
READ_BYTES = 4 << 20
UNLOAD_EVERY_S = 0.2
FOREVER, NOT = -1, 0
YEARS = 2
"""A model that is to stay says that it leaves in centuries; one that somebody else asked for, in minutes."""


class OllamaModel:
    """One model, as a service wants it."""

    def __init__(self, job: Json) -> None:
        self._job = job
        self._made = ""
        """Digest under which Ollama knows what was made for the service, "" before."""
        self.file = ""
        """What Ollama runs for it, once attached, if another service of the same file would share its process."""

    def attached(self, daemon: Daemon) -> bool:
        """Whether it is loaded, and stays. Raises Away, Refused."""
        rows = _rows(daemon.call("GET", "/api/ps"))
        return bool(self._made) and any(each.get("digest") == self._made and _stays(each) for each in rows)

    def attach(self, daemon: Daemon, timeout_s: float, progress: Callable[[str], None]) -> None:
        """Pulls or makes it, and loads it; returns once it is loaded. Raises Away, Refused."""
        job = self._job
        self.file = job["library"] or ("" if daemon.ours else job["path"])
        if job["library"]:
            made: Json = {"from": _pulled(daemon, job, progress)}
        else:
            digest = _blob(daemon, job, timeout_s, progress)
            made = {"files": {"model.gguf": digest}}
        self._claim_name(daemon)
        progress("Ollama makes the model")
        asked = {"model": job["name"], "parameters": job["parameters"], "stream": True, **made}
        _succeed(daemon, "/api/create", asked, lambda _: None)
        progress("Ollama loads the model")
        _keep(daemon, job, FOREVER, timeout_s)
        self._made = _digest_of(daemon, job["name"])

    def _claim_name(self, daemon: Daemon) -> None:
        """Makes sure that what is replaced is not a model of the user's. Raises Away, Refused."""
        name, book = self._job["name"], Path(self._job["book"])
        made = set(book.read_text("utf-8").split()) if book.exists() else set()
        if name in made:
            return
        if not daemon.ours and _digest_of(daemon, name):
            text = f"this Ollama has a model {name!r} that was not made for this service; rename the InferenceService"
            raise DaemonRefused(409, f"{text}, or remove that model (ollama rm {name})")
        with book.open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")

    def detach(self, daemon: Daemon, timeout_s: float, keep: bool) -> None:
        """Unloads it, and forgets its name; with `keep` the file stays loaded, for another service has it.

        Raises Away, Refused.
        """
        if not keep:
            self._unload(daemon, timeout_s)
        if daemon.ours:  # of the user's own daemon nothing is deleted without being asked
            daemon.call("DELETE", "/api/delete", {"model": self._job["name"]})

    def _unload(self, daemon: Daemon, timeout_s: float) -> None:
        """Once it has answered; it may answer on for longer than `timeout_s`, and goes then.

        Told during a load Ollama forgets it, so it is told until it has heeded.
        """
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            _keep(daemon, self._job, NOT, timeout_s)
            if not any(each.get("digest") == self._made for each in _rows(daemon.call("GET", "/api/ps"))):
                return
            time.sleep(UNLOAD_EVERY_S)


def _keep(daemon: Daemon, job: Json, keep_alive: int, timeout_s: float) -> None:
    """Loads or unloads: an empty prompt does either, by how long it is to be kept."""
    body: dict[str, Any] = {"model": job["name"], "keep_alive": keep_alive}
    if job["mode"] == "embedding":
        daemon.call("POST", "/api/embed", {**body, "input": ""}, timeout_s)
    else:
        daemon.call("POST", "/api/generate", {**body, "stream": False}, timeout_s)


def _plain(name: object) -> str:
    """A name without the tag that means nothing."""
    return str(name).removesuffix(":latest")


def _rows(found: Json) -> list[Json]:
    rows = found.get("models")
    return [each for each in rows if isinstance(each, dict)] if isinstance(rows, list) else []


def _stays(row: Json) -> bool:
    """Whether nobody has told Ollama to unload it soon."""
    until = str(row.get("expires_at"))[:4]
    return until.isdigit() and int(until) >= time.gmtime().tm_year + YEARS


def _digest_of(daemon: Daemon, name: str) -> str:
    """Of the model of that name, "" if there is none."""
    rows = _rows(daemon.call("GET", "/api/tags"))
    return next((str(each.get("digest")) for each in rows if _plain(each.get("name")) == name), "")


def _pulled(daemon: Daemon, job: Json, progress: Callable[[str], None]) -> str:
    """Pulls a model of the library, unless it is there; its name. One that the user pulled is as good as any."""
    name, mirror = job["library"], job["registry"].partition("://")[2].rstrip("/")
    wanted = f"{mirror}/{name if '/' in name else f'library/{name}'}" if mirror else name
    if _digest_of(daemon, _plain(wanted)):
        return wanted
    progress(f"Ollama pulls {name}")
    sizes: dict[str, tuple[int, int]] = {}
    moved_at, most = time.monotonic(), 0

    def told(line: Json) -> None:
        nonlocal moved_at, most
        if isinstance(line.get("total"), int):
            sizes[str(line.get("digest"))] = int(line.get("completed") or 0), line["total"]
        done, total = (sum(each[at] for each in sizes.values()) for at in (0, 1))
        if done > most or not sizes:
            moved_at, most = time.monotonic(), done
        if time.monotonic() - moved_at > STALL_S:  # lines go on coming, also when nothing else does
            raise Away(f"the pull of {name} stands still at {done / 1e9:.1f} of {total / 1e9:.1f} GB")
        if total:
            progress(f"Ollama pulls {name}: {100 * done // total} % of {total / 1e9:.1f} GB")

    plain = job["registry"].startswith("http://")
    _succeed(daemon, "/api/pull", {"model": wanted, "insecure": plain, "stream": True}, told)
    return wanted


def _succeed(daemon: Daemon, path: str, asked: Json, told: Callable[[Json], None]) -> None:
    """Asks for what is told of in lines, of which only the last says whether it came to pass. Raises Away, Refused."""
    last: Json = {}
    for last in daemon.lines("POST", path, asked, STALL_S):
        told(last)
    if last.get("status") != "success":
        raise Away(f"{path} ended before it was done")


def _blob(daemon: Daemon, job: Json, timeout_s: float, progress: Callable[[str], None]) -> str:
    """Makes a file known to the daemon; its digest.

    One of ours gets a link, under a name of the service's own: it looks for a blob by its name alone, 40 GB need not be
    read for that, and two services of one file each get a process and a context of their own.
    """
    path = Path(job["path"])
    if daemon.ours:
        found = path.stat()
        identity = f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {job['name']}"
        digest = hashlib.sha256(identity.encode()).hexdigest()
        link = Path(job["models"], "blobs", f"sha256-{digest}")
        try:
            link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            os.link(path.resolve(), link)
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
