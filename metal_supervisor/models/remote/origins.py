"""Resolution of a source by its origin: the Hub, a local mirror of it, S3, or the web server that it names."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from metal_supervisor.models import repository
from metal_supervisor.models.listing import Listing, Piece, Unusable
from metal_supervisor.models.remote import hub, web, web_answers
from metal_supervisor.spec.shards import shard_names
from metal_supervisor.spec.sources import Artifact, bucket_key, hub_parts, shown


def locate(artifact: Artifact, keys: Mapping[str, str], client: web.Client, where: str, pinned: str = "") -> Listing:
    """List the files of an artifact. `where`: base URL of the Hub or of a mirror, or the absolute path of a local one.

    `pinned`: commit of an earlier try, "" if there was none. Raises Unusable, Stopped.
    """
    if hub_parts(artifact.source):
        return _on_hub(artifact, keys, client, where, pinned)
    if bucket_key(artifact.source):
        from metal_supervisor.models.remote import s3  # XML, which most Macs never need

        return s3.listing(artifact, keys, client.page)
    return _on_web(artifact, keys, client)


def _on_hub(artifact: Artifact, keys: Mapping[str, str], client: web.Client, where: str, pinned: str) -> Listing:
    if where.startswith("/"):
        return Listing((), path=str(hub.local(artifact, Path(where))))
    token = keys.get("HF_TOKEN", "")
    if not token and not artifact.secret and (own := hub.own_token(client.rules)):
        try:
            return hub.listing(artifact, where.rstrip("/"), own, client, pinned)
        except Unusable as error:
            if error.reason != "SourceUnauthorized":
                raise  # the Hub refuses one that has expired for what is public, too
    return hub.listing(artifact, where.rstrip("/"), token, client, pinned)


def _on_web(artifact: Artifact, keys: Mapping[str, str], client: web.Client) -> Listing:
    parts = urllib.parse.urlsplit(artifact.source)
    directory, slash, last = parts.path.rpartition("/")
    if artifact.directory:  # a web server cannot list it
        names = repository.directory(artifact.files, artifact.files, shown(artifact.source))
    else:
        names = shard_names(urllib.parse.unquote(last))
    token = keys.get("HF_TOKEN", "").strip()
    if token or not all(artifact.expected(names)):
        client.check_plain(artifact.source, token=bool(token))
    secret = web.bearer(token)
    pieces = []
    for name in names:
        path = directory + slash + (last if names == (urllib.parse.unquote(last),) else urllib.parse.quote(name))
        url = urllib.parse.urlunsplit(parts._replace(path=path))
        kept = name if artifact.directory else re.sub(r"[^A-Za-z0-9._-]", "_", name)[-128:] or "model.gguf"
        pieces.append(_asked(client, Piece(kept, url), secret))
    return Listing(tuple(pieces), headers=secret)


def _asked(client: web.Client, piece: Piece, secret: Mapping[str, str]) -> Piece:
    """Return a piece with the size and validator that its server reports. Raises Unusable, Stopped.

    Sends a GET for the first byte: a HEAD would do, but many servers refuse it.
    """
    answer = client.get(piece.url, {"Range": "bytes=0-0"}, secret)
    try:
        _, size = web_answers.extent(answer)
        if answer.status == 416 and size == 0:
            raise Unusable("InvalidModelFile", f"{shown(piece.url)} is empty")
        if answer.status not in (200, 206):
            raise web_answers.refusal(piece.url, answer, bool(secret))
        if web_answers.is_encoded(answer):
            size = None
        return replace(piece, size_bytes=size, validator=web_answers.validator(answer))
    finally:
        answer.close()
