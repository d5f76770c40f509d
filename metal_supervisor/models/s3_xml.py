"""Parser for S3's answers in XML, from servers that may be hostile: without entities, and bounded in size and depth.

expat is in the standard library. All that makes XML dangerous begins with a document type, which S3 never sends and
which is refused here: so there are no entities, and a package for safe XML has nothing to add.
"""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass
from xml.parsers import expat

MOST_BYTES = 8 << 20
"""A full page is 1000 keys of 1 KiB, three times as long when they are quoted."""
MOST_DEPTH = 8
PAGE, ROW = "ListBucketResult", "Contents"


@dataclass(frozen=True)
class Listed:
    """One object of a listing."""

    name: str
    """Key below the prefix."""
    size_bytes: int | None
    validator: str
    """ETag, "" if there is none."""
    hashed: bool
    """True if S3 has its SHA-256."""


def page(body: bytes, prefix: str) -> tuple[list[Listed], str]:
    """Parse a page of ListObjectsV2: its objects, and the token of the next page, "" on the last. Raises ValueError."""
    top: dict[str, str] = {}
    rows: list[dict[str, str]] = []
    row: dict[str, str] = {}
    for path, text in elements(body):
        if path[0] != PAGE:
            raise ValueError("it is no listing")
        if path == (PAGE, ROW):
            rows.append(row)
            row = {}
        elif path[1:2] == (ROW,):
            row[path[-1]] = text
        elif len(path) == 2:
            top[path[1]] = text
    # XML cannot represent some characters that a key may hold. Not every server quotes them, even on request.
    quoted = top.get("EncodingType") == "url"
    listed = [_listed(each, prefix, quoted) for each in rows]
    token = top.get("NextContinuationToken", "") if top.get("IsTruncated") == "true" else ""
    if not token and top.get("IsTruncated") == "true":
        raise ValueError("there is more, and no way to ask for it")
    # A key that ends with a slash marks an empty directory.
    return [each for each in listed if each.name and not each.name.endswith("/")], token


def _listed(row: dict[str, str], prefix: str, quoted: bool) -> Listed:
    key = row.get("Key", "")
    key = urllib.parse.unquote_plus(key, errors="strict") if quoted else key
    if not key.startswith(prefix):
        raise ValueError("a key is not below the prefix")
    size = row.get("Size", "")
    size_bytes = int(size) if re.fullmatch("[0-9]{1,18}", size) else None
    return Listed(key[len(prefix) :], size_bytes, row.get("ETag", ""), row.get("ChecksumAlgorithm") == "SHA256")


def elements(body: bytes) -> list[tuple[tuple[str, ...], str]]:
    """(path, text) of each element of a document, in the order in which they end.

    Raises ValueError if it is no XML, has a document type, or is too long or too deep.
    """
    if len(body) > MOST_BYTES:
        raise ValueError("it is too long")
    ended: list[tuple[tuple[str, ...], str]] = []
    path: list[str] = []
    text: list[str] = []

    def begin(name: str, _attributes: object) -> None:
        path.append(name)
        text.clear()
        if len(path) > MOST_DEPTH:
            raise ValueError("it is too deep")

    def end(_name: str) -> None:
        ended.append((tuple(path), "".join(text)))
        path.pop()
        text.clear()

    def refuse(*_said: object) -> None:
        raise ValueError("it has a document type")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = text.append, refuse
    try:
        parser.Parse(body, True)
    except (expat.ExpatError, LookupError) as error:
        raise ValueError(type(error).__name__) from None
    return ended
