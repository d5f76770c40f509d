"""A model on the shared oMLX daemon, attached and detached through the daemon's gate (`omlx_engine.py`)."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import quote

from metal_supervisor.runtimes.daemon_client import Daemon, DaemonRefused
from metal_supervisor.runtimes.omlx import MODELS as SERVED
from metal_supervisor.spec.types import Json
from metal_supervisor.state import trees

MODELS = "/metal-supervisor/models"
IN_PLACE = (
    "its files could not be linked (another disk?), and a confined oMLX reads those in place that were there when it "
    "was started: supervisorctl restart omlx"
)


class OmlxModel:
    """One model with the settings of its service."""

    def __init__(self, job: Json) -> None:
        self._job = job
        self._path = f"{MODELS}/{quote(job['name'])}"
        self._served = Path(job["key_file"]).parent / SERVED / job["name"]
        self._judged = job["path"], *job.get("files", ())
        self._body = {"path": job["path"], "settings": job["settings"]}
        self.file = ""
        """Always "": no two services share a model's process."""

    def attached(self, daemon: Daemon) -> bool:
        """True if the model is loaded, with the wanted path and settings. Raises Away, DaemonRefused."""
        listed = daemon.call("GET", MODELS).get("data")
        if not isinstance(listed, list):
            raise DaemonRefused(200, f"{MODELS} answered without a list of models; another server has oMLX's port")
        wanted = self._job["name"], True, self._body
        rows = [each for each in listed if isinstance(each, dict)]
        return any((each.get("id"), each.get("loaded"), each.get("asked")) == wanted for each in rows)

    def attach(self, daemon: Daemon, timeout_s: float, progress: Callable[[str], None]) -> None:
        """Load the model; return once it is loaded. Raises Away, DaemonRefused."""
        linked = self._lay_out()
        progress(f"oMLX loads {self._job['path']}")
        try:
            daemon.call("PUT", self._path, self._body, timeout_s)
        except DaemonRefused as error:
            raise error if linked else DaemonRefused(error.status, f"{error}; {IN_PLACE}") from None

    def rename(self, daemon: Daemon, names: tuple[str, ...], _others: Collection[str]) -> None:
        """Replace the further names that the model answers to. Raises Away, DaemonRefused."""
        daemon.call("PUT", self._path, {**self._body, "names": names})

    def detach(self, daemon: Daemon, timeout_s: float, _keep: bool, _others: Collection[str]) -> None:
        """Unload the model and remove its links. Raises Away, DaemonRefused."""
        daemon.call("DELETE", self._path, timeout_s=timeout_s)
        _removed(self._served)

    def _lay_out(self) -> bool:
        """Link the model's files where a confined oMLX may read them: its policy is older than the model.

        False where that fails, as on another disk: then it reads them in place, if they were there when it was started.
        """
        made = self._served.with_name(f".{self._served.name}")
        _removed(made)
        try:
            made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copytree(
                self._job["path"],
                made,
                ignore=_left_out,
                copy_function=self._link,
                ignore_dangling_symlinks=True,
            )
            _writable(made)
            _removed(self._served)
            made.rename(self._served)
            return True
        except (OSError, shutil.Error, RecursionError):
            _removed(made)
            _removed(self._served)  # it may be of another path, and the daemon prefers what is here
            return False

    def _link(self, source: str, target: str) -> None:
        """Give a file another name, unless a link to it was swapped since the model was judged. Raises OSError."""
        real = Path(os.path.realpath(source))
        if not any(real.is_relative_to(each) for each in self._judged):
            raise OSError(errno.EPERM, "it was not judged", source)
        os.link(real, target)


def _left_out(directory: str, names: list[str]) -> list[str]:
    """What no engine reads, and links to directories: they may lead in circles, and what is behind was not judged."""
    inside = [Path(directory, each) for each in names]
    return [each.name for each in inside if each.name.startswith(".") or (each.is_symlink() and each.is_dir())]


def _writable(place: Path) -> None:
    """Let its owner remove what is in a directory: a copy has the mode of what it was made from."""
    for path, _, _ in trees.walk(place):
        with contextlib.suppress(OSError):
            Path(path).chmod(0o700)


def _removed(place: Path) -> None:
    with contextlib.suppress(OSError):
        trees.remove(place)
