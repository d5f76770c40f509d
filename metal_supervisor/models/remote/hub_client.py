"""Hugging Face's own library, as far as it is used: the files of a repository, and the metadata of one file.

Importing this costs 140 ms and 30 MiB, so only `hub` does, when a model of the Hub is requested. The library retries
for 23 s, or for ever where it has no timeout, connects to any address, follows redirects to any host, reads answers of
any length, and quotes URLs and headers in its errors. So it is given an HTTP client (a documented hook) that sends its
requests through `web.Client`, which does none of that, and its errors are replaced with this program's own.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace

import httpx2
import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

from metal_supervisor.models import repository
from metal_supervisor.models.listing import Piece, Retry, Unusable
from metal_supervisor.models.remote import web, web_answers
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.spec.sources import shown

ALTOGETHER = 6
"""Timeout of all requests about one source, as a multiple of the timeout of one."""
REDIRECTS = 5
OWN_TOKEN_S = 10.0
ALSO_THE_HUB = ("https", "huggingface.co", 443)
SHA256 = re.compile(r"[0-9a-f]{64}")


class RevisionGone(Unusable):
    """The repository exists, but has no such revision (any more)."""


# ── the client that the library is given ─────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Call:
    """Client and limits of the current thread's requests."""

    client: web.Client
    endpoint: str
    timeout_s: float
    until: float
    """On the monotonic clock."""


_call: ContextVar[_Call | None] = ContextVar("_call", default=None)


class _CheckedTransport(httpx2.BaseTransport):
    """Transport that sends only a call's requests: by its client, in its time, to its host.

    Raises Unusable and Stopped, which the library does not retry, unlike httpx2's own errors.
    """

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        call, url = _call.get(), str(request.url)
        if call is None:
            raise Unusable("DownloadFailed", f"{shown(url)} was asked out of turn")
        left_s = call.until - time.monotonic()
        if left_s <= 0:
            raise Unusable("DownloadFailed", f"{shown(url)} takes too long", Retry.SOON)
        _judge(request, call)
        request.headers["Accept-Encoding"] = "identity"
        page = call.client.page(request.method, url, request.headers, min(call.timeout_s, left_s), call.until)
        if page.status in (408, 429) or page.status >= 500:
            raise _failure(url, page)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in page.headers.items()]
        return httpx2.Response(page.status, headers=headers, stream=httpx2.ByteStream(page.body))


def _judge(request: httpx2.Request, call: _Call) -> None:
    """Strip the token from a request to another origin than the call's. Raises Unusable if it leads elsewhere."""
    own, origin = web.origin(call.endpoint), web.origin(str(request.url))
    if origin == own:
        return
    request.headers.pop("Authorization", None)
    if origin not in (("https", own[1], 443), ALSO_THE_HUB):
        raise _no_mirror(call.endpoint, "sends us to another server")


def _no_mirror(endpoint: str, trouble: str) -> Unusable:
    return Unusable("DownloadFailed", f"{shown(endpoint)} {trouble}; is it a mirror of Hugging Face?")


def _failure(url: str, page: web_answers.WholeAnswer) -> Unusable:
    """Error for a server in trouble, with the wait that it asks for, in a header of either kind."""
    error = web_answers.refusal(url, page)
    if not error.after_s and (limit := parse_ratelimit_headers(page.headers)) and limit.remaining == 0:
        error.after_s = min(web_answers.LONGEST_WAIT_S, float(limit.reset_in_seconds))
    return error


def _client() -> httpx2.Client:
    return httpx2.Client(transport=_CheckedTransport(), follow_redirects=True, max_redirects=REDIRECTS, trust_env=False)


constants.HF_HUB_DISABLE_TELEMETRY = True  # and no request for /api/agent-harnesses, to tell servers of this program
constants.HF_DEBUG = False  # every request would be logged
huggingface_hub.set_client_factory(_client)
for _name in ("huggingface_hub", "httpx2"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)  # they log URLs; what matters is in a condition


# ── what is asked ────────────────────────────────────────────────────────────────────────────────


class Hub:
    """Client for one repository on one server, within a bounded time. Its requests raise Unusable."""

    def __init__(self, endpoint: str, token: str, repo: str, client: web.Client, timeout_s: float) -> None:
        self.endpoint, self.repo = endpoint, repo
        self._token: str | bool = token or False  # False: the library shall not look for one itself
        self._api = huggingface_hub.HfApi(endpoint=endpoint, token=self._token)
        self._call = _Call(client, endpoint, timeout_s, time.monotonic() + ALTOGETHER * timeout_s)

    def url(self, revision: str, path: str) -> str:
        """URL of a file of the repository; the server may redirect from there."""
        return huggingface_hub.hf_hub_url(self.repo, path, revision=revision, endpoint=self.endpoint)

    def _piece(self, revision: str, path: str, size: object, sha256: str, etag: str) -> Piece:
        # The library strips the quotes; with them it is the ETag that the file's server sends.
        validator = etag if sha256 or not etag else f'"{etag}"'
        return Piece(path, self.url(revision, path), _size(size), sha256, validator)

    def head(self, revision: str, path: str) -> tuple[str, Piece]:
        """(commit of a file, "" if the server does not say; the file), from a HEAD request."""
        with self._asking(revision, path):
            found = huggingface_hub.get_hf_file_metadata(
                self.url(revision, path), token=self._token, timeout=self._call.timeout_s, endpoint=self.endpoint
            )
            etag = found.etag or ""
            sha256 = etag if SHA256.fullmatch(etag) else ""
            return _commit(found.commit_hash), self._piece(revision, path, found.size, sha256, etag)

    def commit(self, revision: str) -> str:
        """Commit that a revision points to now."""
        with self._asking(revision):
            commit = _commit(self._api.model_info(self.repo, revision=revision, timeout=self._call.timeout_s).sha)
            if not commit:
                raise _no_mirror(self.endpoint, f"names no commit of {self.repo}")
            return commit

    def files(self, commit: str) -> dict[str, Piece]:
        """All files of a commit by name, at most MOST_FILES; each name is checked to stay below a directory."""
        held: dict[str, Piece] = {}
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
                held[item.path] = self._piece(commit, item.path, item.size, sha256, etag)
        return held

    @contextlib.contextmanager
    def _asking(self, revision: str, path: str = "") -> Iterator[None]:
        """Apply the limits to the library's requests, and turn its errors into Unusable without quoting them."""
        if huggingface_hub.is_offline_mode():
            raise Unusable("DownloadFailed", "HF_HUB_OFFLINE is set, so the Hub is not asked; unset it", Retry.SOON)
        token = _call.set(self._call)
        try:
            yield
        except (Unusable, web.Stopped):
            raise
        except errors.HfHubHTTPError as error:
            raise self._refusal(error, revision, path) from None
        except errors.HFValidationError as error:  # of the name alone, which it quotes
            text = f"{self.repo} is no name of a repository for Hugging Face's own library: {error!s:.200}"
            raise Unusable("InvalidModel", text, Retry.NEVER) from None
        except Exception as error:  # noqa: BLE001 - whatever a server's answer makes the library raise
            text = f"gives an answer on {self.repo} that is not understood ({type(error).__name__})"
            raise _no_mirror(self.endpoint, text) from None
        finally:
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
    return said if isinstance(said, str) and repository.COMMIT.fullmatch(said) else ""


def _size(said: object) -> int | None:
    return said if isinstance(said, int) and not isinstance(said, bool) and said >= 0 else None


def own_token(rules: SourcePolicy) -> str:
    """The token of this Mac's user, "" if none can be read. The library may renew a browser login for it."""
    client = web.Client(replace(rules, lax=True, hosts=()))
    call = _call.set(_Call(client, constants.ENDPOINT, OWN_TOKEN_S, time.monotonic() + OWN_TOKEN_S))
    try:
        return huggingface_hub.get_token() or ""
    except Exception:  # noqa: BLE001 - a file that cannot be read, a login that has ended: as good as none
        return ""
    finally:
        _call.reset(call)
        client.close()
