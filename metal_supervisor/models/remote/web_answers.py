"""What a server's answer about a model file says: its extent, its version, or why there is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from urllib3 import BaseHTTPResponse

from metal_supervisor.cluster.answers import retry_after_s
from metal_supervisor.models.listing import Retry, Unusable
from metal_supervisor.spec.sources import shown

Answer: TypeAlias = BaseHTTPResponse
LONGEST_WAIT_S = 300.0
CONTENT_RANGE = re.compile(r"bytes +(?:(\d{1,18})-\d{1,18}|\*)/(\d{1,18}|\*)", re.ASCII)


@dataclass(frozen=True)
class WholeAnswer:
    """An answer whose body has been read."""

    status: int
    headers: Mapping[str, str] = field(repr=False)
    """Headers, by names in any letter case."""
    body: bytes = field(repr=False)


def refusal(url: str, answer: Answer | WholeAnswer, has_secret: bool = False) -> Unusable:
    """Error for an answer whose status is not a success."""
    status, what = answer.status, shown(url)
    if status in (404, 410):
        return Unusable("SourceNotFound", f"{what} answered {status}: there is no such file; check spec.source")
    if status in (401, 403):
        advice = "is what spec.sourceSecretRef holds right?" if has_secret else "it needs a key, or the link is too old"
        return Unusable("SourceUnauthorized", f"{what} answered {status}; {advice}")
    if status in (408, 429) or status >= 500:
        wait_s = retry_after_s(answer.headers, longest_s=LONGEST_WAIT_S)
        return Unusable("DownloadFailed", f"{what} answered {status}", Retry.SOON, wait_s)
    return Unusable("DownloadFailed", f"{what} answered {status}; check spec.source")


def is_encoded(answer: Answer) -> bool:
    """True if a body is not the file's own bytes, though no encoding was asked for."""
    return answer.headers.get("Content-Encoding", "identity").lower() != "identity"


def extent(answer: Answer | WholeAnswer) -> tuple[int | None, int | None]:
    """(offset of an answer's first byte, size of the whole file), None for what it does not tell."""
    if answer.status == 200:
        said = answer.headers.get("Content-Length", "")
        return 0, int(said) if re.fullmatch(r"\d{1,18}", said, re.ASCII) else None
    found = CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
    start, size = found.groups() if found else (None, None)
    return int(start) if start else None, int(size) if size and size != "*" else None


def validator(answer: Answer) -> str:
    """Value that changes with the file: an ETag, else a date; "" if there is none."""
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
