"""Resolution of a source by its origin: the Hub, a local mirror of it, S3, or the web server that it names."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from metal_supervisor.models import repository, web
from metal_supervisor.models.fetch import CONTENT_RANGE
from metal_supervisor.models.listing import Listing, Piece, Unusable
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.shards import shard_names
from metal_supervisor.spec.sources import Artifact, bucket_key, hub_parts, shown

LONGEST_ANSWER_BYTES = 16 << 20


@dataclass(frozen=True)
class _Listed:
    """An answer of S3, with its body read."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def locate(artifact: Artifact, keys: Mapping[str, str], client: web.Client, hub: str, pinned: str = "") -> Listing:
    """List the files of an artifact. `hub`: base URL of the Hub or of a mirror, or the absolute path of a local one.

    `pinned`: commit of an earlier try, "" if there was none. Raises Unusable, Stopped.
    """
    if hub_parts(artifact.source):
        return _on_hub(artifact, keys, client, hub, pinned)
    if bucket_key(artifact.source):
        return _in_bucket(artifact, keys, client)
    return _on_web(artifact, keys, client)


def _on_hub(artifact: Artifact, keys: Mapping[str, str], client: web.Client, where: str, pinned: str) -> Listing:
    from metal_supervisor.models import hub  # slow to import, and most services do not need it

    if where.startswith("/"):
        return Listing((), path=str(hub.local(artifact, Path(where))))
    client.check(where)
    token = keys.get("HF_TOKEN") or ("" if artifact.secret else hub.own_token())
    return hub.listing(artifact, where.rstrip("/"), token, pinned)


def _in_bucket(artifact: Artifact, keys: Mapping[str, str], client: web.Client) -> Listing:
    from metal_supervisor.models import s3

    def get(method: str, url: str, headers: Mapping[str, str]) -> s3.S3Answer:
        answer = client.once(method, url, headers)
        try:
            parts, size = [], 0
            for part in web.body(client, url, answer, 1 << 16):
                parts.append(part)
                size += len(part)
                if size > LONGEST_ANSWER_BYTES:
                    break
            return _Listed(answer.status, answer.headers, b"".join(parts))
        finally:
            answer.close()

    return s3.listing(artifact, keys, get)


def _on_web(artifact: Artifact, keys: Mapping[str, str], client: web.Client) -> Listing:
    parts = urllib.parse.urlsplit(artifact.source)
    directory, slash, last = parts.path.rpartition("/")
    names = _files(artifact) if artifact.directory else shard_names(urllib.parse.unquote(last))
    if not artifact.sha256 or len(names) > 1:
        client.check_plain(artifact.source)
    token = keys.get("HF_TOKEN", "").strip()
    if not token.isascii() or not token.isprintable():
        text = "the token of spec.sourceSecretRef (key HF_TOKEN) has characters that none has; write it again"
        raise Unusable("SourceUnauthorized", text)
    secret = {"Authorization": f"Bearer {token}"} if token else {}
    pieces = []
    for name in names:
        path = directory + slash + (last if names == (urllib.parse.unquote(last),) else urllib.parse.quote(name))
        url = urllib.parse.urlunsplit(parts._replace(path=path))
        kept = name if artifact.directory else re.sub(r"[^A-Za-z0-9._-]", "_", name)[-128:] or "model.gguf"
        pieces.append(_asked(client, Piece(kept, url), secret))
    return Listing(tuple(pieces), headers=secret)


def _files(artifact: Artifact) -> tuple[str, ...]:
    """File names of a directory on a web server, which cannot list it: those of `spec.files`. Raises Unusable."""
    try:
        found = repository.directory(artifact.files, artifact.files, shown(artifact.source))
    except Bad as bad:
        raise Unusable(bad.reason, bad.message) from None
    if strange := next((name for name in found if not repository.is_safe(name)), None):
        raise Unusable("InvalidModel", f"spec.files: {strange!r:.120} is no name of a file; correct or remove it")
    return found


def _asked(client: web.Client, piece: Piece, secret: Mapping[str, str]) -> Piece:
    """Return a piece with the size and validator that its server reports. Raises Unusable, Stopped.

    Sends a GET for the first byte: a HEAD would do, but many servers refuse it.
    """
    answer = client.get(piece.url, {"Range": "bytes=0-0"}, secret)
    try:
        said = answer.headers.get("Content-Range", "").strip()
        if answer.status == 416 and said == "bytes */0":
            raise Unusable("InvalidModelFile", f"{shown(piece.url)} is empty")
        if answer.status not in (200, 206):
            raise web.refusal(piece.url, answer, bool(secret))
        found = CONTENT_RANGE.fullmatch(said) if answer.status == 206 else None
        text = found[2] if found else answer.headers.get("Content-Length", "") if answer.status == 200 else ""
        encoded = answer.headers.get("Content-Encoding", "identity") != "identity"
        size = int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) and not encoded else None
        return replace(piece, size_bytes=size, validator=web.validator(answer))
    finally:
        answer.close()
