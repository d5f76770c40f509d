"""Parser for S3's answers in XML, from servers that may be hostile: without entities, and bounded in size.

All that makes XML dangerous begins with a document type, which S3 never sends and which is refused here: so there are
no entities, and a package for safe XML has nothing to add.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

MOST_BYTES = 8 << 20
"""A full page is 1000 keys of 1 KiB, three times as long when they are quoted."""
DOCTYPE = "<!DOCTYPE"


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
    root = document(body, "ListBucketResult")
    top = fields(root)
    # XML cannot represent some characters that a key may hold. Not every server quotes them, even on request.
    quoted, more = top.get("EncodingType") == "url", top.get("IsTruncated") == "true"
    listed = [_listed(fields(row), prefix, quoted) for row in root.iterfind("{*}Contents")]
    token = top.get("NextContinuationToken", "") if more else ""
    if more and not token:
        raise ValueError("there is more, and no way to ask for it")
    # A key that ends with a slash marks an empty directory.
    return [each for each in listed if each.name and not each.name.endswith("/")], token


def _listed(row: Mapping[str, str], prefix: str, quoted: bool) -> Listed:
    key = row.get("Key", "")
    key = urllib.parse.unquote_plus(key, errors="strict") if quoted else key
    if not key.startswith(prefix):
        raise ValueError("a key is not below the prefix")
    size = row.get("Size", "")
    size_bytes = int(size) if re.fullmatch("[0-9]{1,18}", size) else None
    return Listed(key[len(prefix) :], size_bytes, row.get("ETag", ""), row.get("ChecksumAlgorithm") == "SHA256")


def document(body: bytes, name: str) -> ElementTree.Element:
    """Parse a document whose root has this name. Raises ValueError for any other, a document type, or a long one."""
    if len(body) > MOST_BYTES:
        raise ValueError("it is too long")
    if b"\0" in body or DOCTYPE in body.decode():  # UTF-16 would hide it
        raise ValueError("it has a document type")
    try:
        root = ElementTree.fromstring(body)
    except (ElementTree.ParseError, LookupError) as error:
        raise ValueError(type(error).__name__) from None
    if _name(root) != name:
        raise ValueError("it is another document")
    return root


def fields(element: ElementTree.Element) -> dict[str, str]:
    """Texts of an element's children, by their names."""
    return {_name(each): each.text or "" for each in element}


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]  # without its namespace
