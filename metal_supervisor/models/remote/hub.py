"""Resolution of Hugging Face sources: on the Hub, on a mirror, or in a local directory for Macs without a network.

The Hub's own library is used for names, revisions and sizes. Bytes are fetched by `fetch`, because the library begins a
killed download anew, and checks neither the range that it is sent nor how much. All files of one model are of one
commit, however often the download is interrupted and whatever is uploaded meanwhile.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from metal_supervisor.models import repository
from metal_supervisor.models.listing import Listing, Piece, Retry, Unusable
from metal_supervisor.models.remote.fetch import Opened
from metal_supervisor.models.remote.remote_headers import read_listing
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.remote.web import Client, bearer
from metal_supervisor.spec.gguf import BadGguf, read_header
from metal_supervisor.spec.shards import shard_names
from metal_supervisor.spec.sources import Artifact, hub_parts, shown
from metal_supervisor.state import trees

if TYPE_CHECKING:
    from metal_supervisor.models.remote.hub_client import Hub


def own_token(rules: SourcePolicy) -> str:
    """The token of this Mac's user: HF_TOKEN in the environment, else the file that `hf auth login` wrote; else ""."""
    from metal_supervisor.models.remote import hub_client

    return hub_client.own_token(rules)


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
            return _at(hub, artifact, pinned, path, headers, client)
        except hub_client.RevisionGone:
            pass  # a force push, or a mirror that keeps only what is new
    return _at(hub, artifact, revision, path, headers, client)


def _at(hub: Hub, artifact: Artifact, revision: str, path: str, headers: Mapping[str, str], client: Client) -> Listing:
    commit = ""
    if artifact.directory:
        commit = hub.commit(revision)
        pieces = _directory(hub, artifact, commit, path)
    else:
        if not path:
            revision = hub.commit(revision)

            def is_companion(name: str) -> bool:
                named = Listing((Piece(name, hub.url(revision, name)),), headers=headers)
                header = read_listing(named, client).header
                return header is not None and bool(header.companion)

            path = repository.chosen(hub.files(revision), artifact, hub.repo, is_companion)[0]
        commit, pieces = _shards(hub, revision, path)
    return Listing(pieces, commit, headers, chosen="" if artifact.directory else path)


def _shards(hub: Hub, revision: str, path: str) -> tuple[str, tuple[Piece, ...]]:
    """Return the commit, "" if the server names none, and the pieces of a file: all its shards, each requested by name.

    Raises Unusable.
    """
    commit = revision if repository.COMMIT.fullmatch(revision) else ""
    pieces = []
    for name in shard_names(path):
        said, piece = hub.head(commit or revision, name)
        if not commit and not said and (commit := _told_apart(hub, revision)):
            said, piece = hub.head(commit, name)
        commit = commit or said
        if said not in ("", commit):
            text = f"{shown(hub.endpoint)} serves another commit of {hub.repo} than it was asked for"
            raise Unusable("DownloadFailed", f"{text}; is it a mirror of Hugging Face?")
        pieces.append(replace(piece, name=posixpath.basename(name), url=hub.url(commit or revision, name)))
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
    below = {name.removeprefix(prefix): piece for name, piece in held.items() if name.startswith(prefix)}
    names = repository.chosen(below, artifact, _shown(hub.repo, path))
    # The list of names is public even where the files are not: only a request for one shows that they may be read.
    hub.head(commit, prefix + names[0])
    return tuple(replace(below[name], name=name) for name in names)


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
        if found := _looked_up(directory, place, artifact, path):
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


def _looked_up(mirror: Path, place: Path, artifact: Artifact, path: str) -> Path | None:
    """Find an artifact's model in a directory of a mirror that may hold its repository.

    None unless all of it is there. Raises Unusable if it cannot be used.
    """
    if path and not artifact.directory:
        names = shard_names(path)
    else:
        place = place / path
        if not (held := _names_below(place)):
            return None
        names = repository.chosen(held, artifact, str(place), lambda name: _is_companion(place / name))
    if not all(_is_in(mirror, place / name) for name in names):
        return None
    return place if artifact.directory else place / names[0]


def _is_companion(path: Path) -> bool:
    with contextlib.suppress(OSError, BadGguf):
        if path.is_file():  # opening a pipe would wait for its other end
            with path.open("rb", buffering=0) as file:
                return bool(read_header(Opened(file.fileno())).companion)
    return False


def _names_below(place: Path) -> list[str]:
    """Names of the files below a directory, without those in hidden ones. Raises Unusable for too many."""
    found: list[str] = []
    for where, folders, names in trees.walk(place):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(where, name).relative_to(place).as_posix() for name in names]
        if len(found) > repository.MOST_FILES:
            text = f"{place} has more than {repository.MOST_FILES} files"
            raise Unusable("InvalidModelFile", f"{text}; name one of them in spec.source")
    return found


def _is_in(mirror: Path, path: Path) -> bool:
    """True if there is such a file. Raises Unusable if a link leads out of the mirror."""
    try:
        if not path.is_file():
            return False
        inside = path.resolve(strict=True).is_relative_to(mirror.resolve(strict=True))
    except OSError as error:
        raise Unusable("ModelFileUnreadable", f"{path}: {error.strerror}; check its permissions") from None
    if not inside:
        text = f"{path} is a link that leads out of {mirror}"
        raise Unusable("InvalidModelFile", f"{text}; put the file itself there")
    return True
