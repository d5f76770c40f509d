"""Hugging Face's own library, as far as it is used: the files of a repository, and the metadata of one file.

Importing this costs 140 ms and 30 MiB, so only `hub` does, when a model of the Hub is requested. The library retries
for 23 s, or for ever where it has no timeout, follows redirects to any host, reads answers of any length, and quotes
URLs and headers in its errors. So it is given an HTTP client (a documented hook) that does none of that, and its errors
are replaced with this program's own.
"""

from __future__ import annotations

import contextlib
import email.utils
import logging
import re
import time
import urllib.parse
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import httpx2
import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

from metal_supervisor.cluster.answers import UP, line_trouble
from metal_supervisor.models import repository
from metal_supervisor.models.listing import Retry, Unusable
from metal_supervisor.spec.sources import DEFAULT_REVISION, shown

ALTOGETHER = 6
"""Timeout of all requests about one source, as a multiple of the timeout of one."""
MOST_BYTES = 16 << 20
REDIRECTS = 5
OWN_TOKEN_S = 10.0
LONGEST_AFTER_S = 300.0
ALSO_THE_HUB = ("https", "huggingface.co", 443)
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
PORTS = {"http": 80, "https": 443}


class RevisionGone(Unusable):
    """The repository exists, but has no such revision (any more)."""


@dataclass(frozen=True)
class HubEntry:
    """One file of a repository."""

    name: str
    """Path in the repository."""
    size_bytes: int | None
    """None if the server did not say."""
    sha256: str
    """SHA-256 of a file in LFS; "" for others."""
    etag: str
    """ETag without quotes that the server will send for it; "" if none."""
    commit: str = ""
    """Commit that the file is of, "" if the server did not say, or if this is from a list."""


# ── the client that the library is given ─────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Call:
    """Limits of the current thread's requests."""

    origin: tuple[str, str, int]
    timeout_s: float
    until: float
    """On the monotonic clock."""


class _Failed(Exception):
    """No answer, or an unusable one. Not a subclass of httpx2's errors, because the library retries those."""

    def __init__(self, what: str, after_s: float = 0.0, retry: Retry = Retry.SOON, advice: str = UP) -> None:
        super().__init__(what)
        self.after_s, self.retry, self.advice = after_s, retry, advice


_call: ContextVar[_Call | None] = ContextVar("_call", default=None)


class _CheckedTransport(httpx2.BaseTransport):
    """Transport that sends only a call's requests: in its time, to its host, with a bounded answer. Raises _Failed."""

    def __init__(self) -> None:
        self._plain = httpx2.HTTPTransport(limits=httpx2.Limits(keepalive_expiry=5.0))

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        call = _call.get()
        if call is None:
            raise _Failed("it was asked out of turn", retry=Retry.LATER)
        self._prepare(request, call)
        try:
            answer = self._plain.handle_request(request)
            try:
                _refuse_failures(answer)
                body = _body(answer, call) if request.method != "HEAD" else b""
            finally:
                answer.close()
        except httpx2.TransportError as error:
            what, advice = line_trouble(error)
            raise _Failed(what, advice=advice) from None
        return httpx2.Response(
            answer.status_code, headers=answer.headers, stream=httpx2.ByteStream(body), extensions=answer.extensions
        )

    def _prepare(self, request: httpx2.Request, call: _Call) -> None:
        left_s = call.until - time.monotonic()
        if left_s <= 0:
            raise _Failed("it takes too long")
        origin = _origin(str(request.url))
        if origin != call.origin:
            request.headers.pop("Authorization", None)
            if origin not in (("https", call.origin[1], 443), ALSO_THE_HUB):
                raise _Failed("it sends us to another server", retry=Retry.LATER)
        request.headers["Accept-Encoding"] = "identity"
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), min(call.timeout_s, left_s))

    def close(self) -> None:
        self._plain.close()


def _origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of a URL. Raises _Failed."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:
        raise _Failed("its address is no URL", retry=Retry.LATER) from None


def _refuse_failures(answer: httpx2.Response) -> None:
    if answer.status_code in (408, 429) or answer.status_code >= 500:
        raise _Failed(f"it answered {answer.status_code}", _after_s(answer.headers))


def _after_s(headers: httpx2.Headers) -> float:
    """Seconds to wait before the next request, by the server's headers; 0 without one, at most LONGEST_AFTER_S."""
    said = headers.get("Retry-After", "").strip()
    wait_s = 0.0
    if said.isascii() and said.isdigit():
        wait_s = float(said[:9])
    elif said:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            wait_s = email.utils.parsedate_to_datetime(said).timestamp() - time.time()
    elif (limit := parse_ratelimit_headers(headers)) and limit.remaining == 0:
        wait_s = float(limit.reset_in_seconds)
    return min(LONGEST_AFTER_S, max(0.0, wait_s))


def _body(answer: httpx2.Response, call: _Call) -> bytes:
    body = bytearray()
    if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _Failed("it answered compressed, unasked", retry=Retry.LATER)
    for chunk in answer.iter_raw():
        body += chunk
        if len(body) > MOST_BYTES:
            raise _Failed("its answer is too long", retry=Retry.LATER)
        if time.monotonic() > call.until:
            raise _Failed("it takes too long")
    return bytes(body)


def _client() -> httpx2.Client:
    return httpx2.Client(transport=_CheckedTransport(), follow_redirects=True, max_redirects=REDIRECTS, trust_env=False)


huggingface_hub.set_client_factory(_client)
for _name in ("huggingface_hub", "httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)  # they log URLs; what matters is in a condition


# ── what is asked ────────────────────────────────────────────────────────────────────────────────


class Hub:
    """Client for one repository on one server, within a bounded time. Its requests raise Unusable."""

    def __init__(self, endpoint: str, token: str, repo: str, timeout_s: float) -> None:
        self.endpoint, self.repo = endpoint, repo
        self._token: str | bool = token or False  # False: the library shall not look for one itself
        self._api = huggingface_hub.HfApi(endpoint=endpoint, token=self._token)
        self._timeout_s, self._until = timeout_s, time.monotonic() + ALTOGETHER * timeout_s

    def url(self, revision: str, path: str) -> str:
        """URL of a file of the repository; the server may redirect from there."""
        return huggingface_hub.hf_hub_url(self.repo, path, revision=revision, endpoint=self.endpoint)

    def head(self, revision: str, path: str) -> HubEntry:
        """Metadata of one file, from a HEAD request."""
        with self._asking(revision, path):
            found = huggingface_hub.get_hf_file_metadata(
                self.url(revision, path), token=self._token, timeout=self._timeout_s, endpoint=self.endpoint
            )
            etag = found.etag or ""
            sha256 = etag if SHA256.fullmatch(etag) else ""
            return HubEntry(path, _size(found.size), sha256, etag, _commit(found.commit_hash))

    def commit(self, revision: str) -> str:
        """Commit that a revision points to now."""
        with self._asking(revision):
            commit = _commit(self._api.model_info(self.repo, revision=revision, timeout=self._timeout_s).sha)
            if not commit:
                raise _Failed("it names no commit", retry=Retry.LATER)
            return commit

    def files(self, commit: str) -> dict[str, HubEntry]:
        """All files of a commit by name, at most MOST_FILES; each name is checked to stay below a directory."""
        held: dict[str, HubEntry] = {}
        with self._asking(commit):
            for item in self._api.list_repo_tree(self.repo, recursive=True, revision=commit):
                if not isinstance(item, huggingface_hub.RepoFile):
                    continue
                if not isinstance(item.path, str) or not repository.is_safe(item.path):
                    text = f"{self.repo} lists {item.path!r:.120}, which would lead out of its directory"
                    raise Unusable("InvalidModelFile", f"{text}; use another source", Retry.NEVER)
                if len(held) >= repository.MOST_FILES:
                    text = f"{self.repo} has more than {repository.MOST_FILES} files"
                    raise Unusable("InvalidModelFile", f"{text}; use another source, or one file of it")
                said = str(item.lfs.sha256) if item.lfs else ""
                sha256 = said if SHA256.fullmatch(said) else ""
                etag = sha256 or (item.blob_id if isinstance(item.blob_id, str) else "")
                held[item.path] = HubEntry(item.path, _size(item.size), sha256, etag)
        return held

    @contextlib.contextmanager
    def _asking(self, revision: str, path: str = "") -> Iterator[None]:
        """Apply the limits to the library's requests, and turn its errors into Unusable without quoting them."""
        if huggingface_hub.is_offline_mode():
            raise Unusable("DownloadFailed", "HF_HUB_OFFLINE is set, so the Hub is not asked; unset it", Retry.SOON)
        token = None
        try:
            token = _call.set(_Call(_origin(self.endpoint), self._timeout_s, self._until))
            yield
        except Unusable:
            raise
        except _Failed as error:
            text = f"{shown(self.endpoint)} does not tell of {self.repo}: {error}"
            text += f"; {error.advice if error.retry is Retry.SOON else 'is it a mirror of Hugging Face?'}"
            raise Unusable("DownloadFailed", text, error.retry, error.after_s) from None
        except errors.HfHubHTTPError as error:
            raise self._refusal(error, revision, path) from None
        except errors.HFValidationError:
            raise Unusable("InvalidModel", f"{self.repo} is no name of a repository", Retry.NEVER) from None
        except Exception as error:  # noqa: BLE001 - whatever a server's answer makes the library raise
            text = f"what {shown(self.endpoint)} says of {self.repo} is not understood ({type(error).__name__})"
            raise Unusable("DownloadFailed", f"{text}; is it a mirror of Hugging Face?") from None
        finally:
            if token is not None:
                _call.reset(token)

    def _refusal(self, error: errors.HfHubHTTPError, revision: str, path: str) -> Unusable:
        status = error.response.status_code
        page, secret = f"{shown(self.endpoint)}/{self.repo}", "spec.sourceSecretRef (key HF_TOKEN)"
        if isinstance(error, errors.GatedRepoError):
            who = "the token's account must" if self._token else f"give a token with {secret}, whose account must"
            return Unusable("GatedModel", f"{self.repo} is gated: {who} accept the terms on {page}")
        if isinstance(error, errors.DisabledRepoError):
            return Unusable("SourceNotFound", f"{page} has been disabled; use another source")
        if isinstance(error, errors.RevisionNotFoundError):
            text = f"{page} has no revision {revision!r:.80}; correct it in spec.source"
            return RevisionGone("SourceNotFound", text)
        if isinstance(error, errors.RemoteEntryNotFoundError):
            text = f"{page} has no file {path!r:.160} at {revision!r:.80}"
            return Unusable("SourceNotFound", f"{text}; correct spec.source")
        if status in (401, 403) and self._token:
            text = f"{page} answered {status} to the token of {secret}"
            return Unusable("SourceUnauthorized", f"{text}; is it right, and may it read this?")
        if status in (401, 403):
            text = f"{page} does not exist, or is private ({status})"
            return Unusable("SourceUnauthorized", f"{text}; correct spec.source, or give a token with {secret}")
        if status == 404:
            also = "" if self._token else f", or is private: then give a token with {secret}"
            return Unusable("SourceNotFound", f"{page} does not exist{also}; check spec.source")
        return Unusable("DownloadFailed", f"{page} answered {status}; check spec.source")


def _commit(said: object) -> str:
    return said if isinstance(said, str) and COMMIT.fullmatch(said) else ""


def _size(said: object) -> int | None:
    return said if isinstance(said, int) and not isinstance(said, bool) and said >= 0 else None


def parsed(source: str) -> tuple[str, str, str]:
    """Parse a canonical `hf://…` into (repository, revision, path). Raises Unusable."""
    try:
        uri = huggingface_hub.parse_hf_uri(source)
    except errors.HfUriError as error:
        text = f"spec.source {shown(source)!r:.200} is refused by Hugging Face's own reader"
        raise Unusable("InvalidModel", f"{text}: {error.msg:.200}", Retry.NEVER) from None
    if uri.type != "model":
        text = f"spec.source {shown(source)!r:.200} names a {uri.type}"
        raise Unusable("InvalidModel", f"{text}; give a model's repository", Retry.NEVER)
    return uri.id, uri.revision or DEFAULT_REVISION, urllib.parse.unquote(uri.path_in_repo)


def own_token() -> str:
    """The token of this Mac's user, "" if none can be read. The library may renew a browser login for it."""
    call = _call.set(_Call(_origin(constants.ENDPOINT), OWN_TOKEN_S, time.monotonic() + OWN_TOKEN_S))
    try:
        return huggingface_hub.get_token() or ""
    except Exception:  # noqa: BLE001 - a file that cannot be read, a login that has ended: as good as none
        return ""
    finally:
        _call.reset(call)
