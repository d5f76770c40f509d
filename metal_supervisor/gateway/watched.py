"""Files of the gateway that their owner may change while it runs: keys and certificates. The last good ones stay."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from metal_supervisor.gateway import access, tls
from metal_supervisor.gateway.access import BadKeys, Doorman
from metal_supervisor.gateway.tls import BadCertificate
from metal_supervisor.state.kept_files import Edition, edition_of

SETTLED_S = 0.5
"""Age of a change from which it is taken for whole: many editors empty a file, and then write it."""
log = logging.getLogger("gateway")


class WatchedFiles:
    """One or two files, and what is made of them."""

    def __init__(self, paths: tuple[Path, ...], load: Callable[[], None], kind: str) -> None:
        self._paths, self._load, self._kind = paths, load, kind
        self._editions: tuple[Edition | None, ...] | None = None
        self.problem = ""
        """Why the files on disk are not in use, "" if they are."""

    def look(self) -> None:
        """Load the files if they were replaced or edited, not just now, or could not be used. A problem is logged once.

        Who may read a file can change without its edition.
        """
        now, known, before = tuple(map(edition_of, self._paths)), self._editions, self.problem
        if known is not None and (_is_under_way(now) or (now == known and not before)):
            return
        self._editions = now
        try:
            self._load()
        except (BadKeys, BadCertificate, OSError, UnicodeDecodeError) as error:
            self.problem = f"{self._kind}: {error}"
            if now != known or self.problem != before:
                told = {"kind": self._kind, "why": str(error)}
                log.error("files cannot be used; the last good ones stay", extra=told)
            return
        self.problem = ""
        if known is not None:
            log.info("files were loaded anew", extra={"kind": self._kind})


def _is_under_way(editions: Iterable[Edition | None]) -> bool:
    """True for files that may not be whole yet."""
    return any(0 <= time.time() - each[1] / 1e9 < SETTLED_S for each in editions if each)


def keys(path: Path, doorman: Doorman, secret: str = "") -> WatchedFiles:
    """The file of keys, or the copy of a Secret's. Until there is a good one, every request is refused."""
    where = f"Secret {secret}" if secret else str(path)
    doorman.admit_only(())

    def load() -> None:
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            if secret:
                text = f"{where} has not been read yet; `metal-supervisor logs controller` says why"
            else:
                text = f"{where} cannot be read: {error.strerror}; --gateway-keys names it"
            raise BadKeys(text) from None
        try:
            doorman.admit_only(access.parse(text))
        except BadKeys as error:
            raise BadKeys(f"{where}: {error}") from None

    return WatchedFiles((path,), load, "keys")


def certificate(cert: Path, key: Path) -> tuple[WatchedFiles, ssl.SSLContext]:
    """The certificate and its context. Raises BadCertificate if there has never been a good one."""
    context = tls.loaded(cert, key)
    watched = WatchedFiles((cert, key), lambda: tls.renew(context, cert, key), "certificate")
    return watched, context
