"""Where paths lead that manifests and settings name, apart from model files: asked in threads, for a disk may hang."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from metal_supervisor.models.background import LOOK_WAIT_S, BackgroundLooks
from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.places import Places, places_of
from metal_supervisor.settings.loader import Settings

AGAIN_S = 10.0
"""Age after which a path is looked at again."""


@dataclass(frozen=True)
class PathLook:
    """A path as it was found."""

    real: str
    """The path that it leads to, whether or not it exists."""
    is_file: bool
    is_directory: bool
    refusal: tuple[str, str] | None
    """(reason, message) if no manifest may name it."""


class PathLooks:
    """Looks paths up."""

    def __init__(self, settings: Settings, on_change: Callable[[], None]) -> None:
        self._settings = settings
        self._looks: BackgroundLooks[PathLook] = BackgroundLooks("paths", on_change)

    def look(self, path: str) -> PathLook | None:
        """The latest look at a path; None until there is one."""
        return self._looks.look(path, lambda _: self._look(path), LOOK_WAIT_S, AGAIN_S)

    def all_of(self, paths: Iterable[str]) -> list[PathLook] | None:
        """The latest look at each path; None until there is one of each."""
        found = [self.look(each) for each in paths]
        known = [each for each in found if each is not None]
        return known if len(known) == len(found) else None

    def forget_others(self) -> None:
        """Drop the paths that this pass has not asked for; the next one begins."""
        self._looks.forget_others()

    @cached_property
    def _places(self) -> Places:
        return places_of(self._settings)

    def _look(self, path: str) -> PathLook:
        real, refusal = None, None
        try:
            real = self._places.resolved(Path(path))
        except Unusable as error:
            refusal = error.reason, str(error)
        try:
            real = real or Path(os.path.realpath(path))  # never again: a link may lead elsewhere since it was judged
            return PathLook(str(real), real.is_file(), real.is_dir(), refusal)
        except (OSError, ValueError):  # a name that no file can have, or in a directory that is closed to this user
            return PathLook(path, False, False, refusal)
