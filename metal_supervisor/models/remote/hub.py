"""Resolution of Hugging Face sources: on the Hub, on a mirror, or in a local directory for Macs without a network.

The Hub's own library is used for names, revisions and sizes. Bytes are fetched by `fetch`, because the library begins a
killed download anew, and checks neither the range that it is sent nor how much. All files of one model are of one
commit, however often the download is interrupted and whatever is uploaded meanwhile.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from metal_supervisor.models import repository
from metal_supervisor.models.listing import Listing, Piece, Retry, Unusable
from metal_supervisor.models.remote.web import Client, bearer
from metal_supervisor.spec.shards import shard_names
from metal_supervisor.spec.sources import Artifact, hub_parts, shown

if TYPE_CHECKING:
    from metal_supervisor.models.remote.hub_client import Hub, HubEntry


def own_token() -> str:
    """The token of this Mac's user: HF_TOKEN in the environment, else the file that `hf auth login` wrote; else ""."""
    from metal_supervisor.models.remote import hub_client

    return hub_client.own_token()


# ── on a server ──────────────────────────────────────────────────────────────────────────────────


def listing(
    artifact: Artifact, endpoint: str, token: str, client: Client, pinned: str = "", timeout_s: float = 20.0
) -> Listing:
    """List the files of an artifact whose source is a canonical `hf://…`, all of one commit. Raises Unusable, Stopped.

    `endpoint`: URL of the Hub or of a mirror, without a slash at its end. `token`: "" for none; the library does not
    look for one itself. `pinned`: the commit of an earlier try, "" if there was none; if it is gone, the revision is
    used. `timeout_s`: for each wait on the network; all of them together take at most six times as long.
    """
    from metal_supervisor.models.remote import hub_client

    token = token.strip()
    headers = bearer(token)
    repo, revision, path = _parts(artifact)
    hub = hub_client.Hub(endpoint, token, repo, client, timeout_s)
    if repository.COMMIT.fullmatch(pinned):
        try:
            return _at(hub, artifact, pinned, path, headers)
        except hub_client.RevisionGone:
            pass  # a force push, or a mirror that keeps only what is new
    return _at(hub, artifact, revision, path, headers)


def _at(hub: Hub, artifact: Artifact, revision: str, path: str, headers: Mapping[str, str]) -> Listing:
    commit = ""
    if artifact.directory:
        commit = hub.commit(revision)
        pieces = _directory(hub, artifact, commit, path)
    else:
        if not path:
            revision = hub.commit(revision)
            path = repository.chosen(hub.files(revision), artifact, hub.repo)[0]
        commit, pieces = _shards(hub, revision, path)
    return Listing(pieces, commit, headers, chosen="" if artifact.directory else path)


def _shards(hub: Hub, revision: str, path: str) -> tuple[str, tuple[Piece, ...]]:
    """Return the commit, "" if the server names none, and the pieces of a file: all its shards, each requested by name.

    Raises Unusable.
    """
    commit = revision if repository.COMMIT.fullmatch(revision) else ""
    pieces = []
    for name in shard_names(path):
        found = hub.head(commit or revision, name)
        if not commit and not found.commit and (commit := _told_apart(hub, revision)):
            found = hub.head(commit, found.name)
        commit = commit or found.commit
        if found.commit not in ("", commit):
            text = f"{shown(hub.endpoint)} serves another commit of {hub.repo} than it was asked for"
            raise Unusable("DownloadFailed", f"{text}; is it a mirror of Hugging Face?")
        pieces.append(_piece(hub, found, posixpath.basename(name), commit or revision))
    return commit, tuple(pieces)


def _told_apart(hub: Hub, revision: str) -> str:
    """Commit of a revision on a mirror that does not send it with each file, "" if it cannot be had.

    Some mirrors follow the Hub's redirects themselves, and so lose the header.
    """
    try:
        return hub.commit(revision)
    except Unusable:
        return ""  # a mirror that serves files only


def _directory(hub: Hub, artifact: Artifact, commit: str, path: str) -> tuple[Piece, ...]:
    held, prefix = hub.files(commit), f"{path}/" if path else ""
    below = {name.removeprefix(prefix): entry for name, entry in held.items() if name.startswith(prefix)}
    names = repository.chosen(below, artifact, _shown(hub.repo, path))
    # The list of names is public even where the files are not: only a request for one shows that they may be read.
    hub.head(commit, below[names[0]].name)
    return tuple(_piece(hub, below[name], name, commit) for name in names)


def _piece(hub: Hub, entry: HubEntry, name: str, revision: str) -> Piece:
    # The library strips the quotes; with them it is the ETag that the file's server sends.
    validator = entry.etag if entry.sha256 or not entry.etag else f'"{entry.etag}"'
    return Piece(name, hub.url(revision, entry.name), entry.size_bytes, entry.sha256, validator)


def _shown(repo: str, path: str) -> str:
    return f"{repo}/{path:.120}" if path else repo


def _parts(artifact: Artifact) -> tuple[str, str, str]:
    """(repository, revision, path). Raises Unusable for a path that no file here can have."""
    repo, revision, path = hub_parts(artifact.source) or ("", "", "")  # `origins` passes no other source
    _check_name(path or "-", artifact.source)
    return repo, revision, path


def _check_name(name: str, source: str) -> None:
    if not repository.is_safe(name):
        text = f"spec.source {shown(source)!r:.200} names no file that could be kept"
        raise Unusable("InvalidModel", f"{text}; correct its path", Retry.NEVER)


# ── in a directory of this Mac ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Mirror:
    """One directory of a local mirror that may hold a repository's files."""

    root: Path
    """Directory of the mirror: no link may lead out of it."""
    repository: Path
    """Directory of the repository's files; it need not exist."""

    def files(self) -> dict[str, Path]:
        """Its files by their names in the repository, without hidden directories. Raises Unusable for too many."""
        found: dict[str, Path] = {}
        for where, folders, names in os.walk(self.repository):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in names:
                path = Path(where, name)
                found[path.relative_to(self.repository).as_posix()] = path
                if len(found) > repository.MOST_FILES:
                    text = f"{self.repository} has more than {repository.MOST_FILES} files"
                    raise Unusable("InvalidModelFile", f"{text}; name one of them in spec.source")
        return found

    def file(self, name: str) -> Path | None:
        """Path of a file in it, None if there is none. Raises Unusable if a link leads out of the mirror."""
        path = self.repository / name
        try:
            if not path.is_file():
                return None
            inside = path.resolve(strict=True).is_relative_to(self.root.resolve(strict=True))
        except OSError as error:
            raise Unusable("ModelFileUnreadable", f"{path}: {error.strerror}; check its permissions") from None
        if not inside:
            text = f"{path} is a link that leads out of {self.root}"
            raise Unusable("InvalidModelFile", f"{text}; put the file itself there")
        return path


def local(artifact: Artifact, directory: Path) -> Path:
    """Find a model in a local mirror: its file (the first of its shards), or the directory of its repository.

    Looks in `<directory>/O/R`, the layout of `hf download --local-dir`, which has no revisions; then in
    `<directory>/models--O--R`, the layout of the Hub's own cache. The Hub's library is not imported: both layouts are
    documented. Raises Unusable.
    """
    repo, revision, path = _parts(artifact)
    _check_name(revision, artifact.source)
    plain = directory / repo
    cache = directory / f"models--{repo.replace('/', '--')}"
    for place in (plain, cache / "snapshots" / _commit_of(cache, revision)):
        if found := _looked_up(_Mirror(directory, place), artifact, path):
            return found
    what = _shown(repo, path)
    text = f"{what} is neither in {plain} nor, at {revision!r:.80}, in {cache}; put it there"
    raise Unusable("ModelFileMissing", text)


def _commit_of(cache: Path, revision: str) -> str:
    """Commit that a cache records for a revision; without a record the revision itself, which may be a commit."""
    try:
        with (cache / "refs" / revision).open(encoding="ascii") as file:
            commit = file.read(64).strip()
    except (OSError, ValueError):
        return revision
    return commit if repository.COMMIT.fullmatch(commit) else revision


def _looked_up(mirror: _Mirror, artifact: Artifact, path: str) -> Path | None:
    """Find an artifact's model in one place; None unless all of it is there. Raises Unusable if it cannot be used."""
    if path and not artifact.directory:
        names = shard_names(path)
    else:
        mirror = _Mirror(mirror.root, mirror.repository / path)
        if not (held := mirror.files()):
            return None
        names = repository.chosen(held, artifact, str(mirror.repository))
    found = [mirror.file(name) for name in names]
    return None if None in found else mirror.repository if artifact.directory else found[0]
