"""A Hugging Face Hub on loopback, as its protocol is documented, with the troubles that the real one and mirrors have.

    with Hub({"o/r": {"model.gguf": b"GGUF…", "config.json": b"{}"}}) as hub:
        hub.cut_after_bytes, hub.cut_times = 1 << 20, 3
        ...
        assert hub.sent("model.gguf") == …

Files may be given as paths: they are never held in memory. What is in LFS there (weights) answers with a redirect to
a CDN, which is the same server under another name (`localhost`), because it must be another origin.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import http.server
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
IN_LFS = (".gguf", ".safetensors", ".npz", ".bin", ".model", ".pt")
CHUNK_BYTES = 1 << 16
PER_PAGE = 1000
Content = bytes | Path


@dataclass
class Asked:
    """One request. It is in the log before its client hears of it; `sent_bytes` grows while its body is sent."""

    method: str
    path: str
    """With its query, as it came."""
    range: str
    authorization: str
    host: str
    """What the client calls this server: the Hub is 127.0.0.1, its CDN localhost."""
    status: int
    sent_bytes: int
    """Of the body, as far as it went."""


@dataclass(frozen=True)
class _Digest:
    size_bytes: int
    sha256: str
    git: str
    """What git would call it: the ETag of files that are not in LFS."""


def _digest(content: Content) -> _Digest:
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    for chunk in _chunks(content, 0, size):
        sha256.update(chunk)
        git.update(chunk)
    return _Digest(size, sha256.hexdigest(), git.hexdigest())


def _chunks(content: Content, start: int, end: int) -> Iterator[bytes]:
    if isinstance(content, bytes):
        for at in range(start, end, CHUNK_BYTES):
            yield content[at : min(end, at + CHUNK_BYTES)]
        return
    with content.open("rb") as file:
        file.seek(start)
        left = end - start
        while left and (chunk := file.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            yield chunk


class Hub:
    """The server. Its attributes may change while it runs; `commits` has what earlier uploads were."""

    def __init__(self, repos: Mapping[str, Mapping[str, Content]], commit: str = COMMIT) -> None:
        self.token = ""
        """What each request must bear; "" lets everybody in."""
        self.expired = ""
        """A token that is refused for what is public, too."""
        self.gated = False
        """Files answer 403 (401 without a token), while lists of them are public."""
        self.lfs = True
        """Whether weights are in LFS; a plain mirror serves all of them itself."""
        self.ranges = True
        """Whether Range is honoured."""
        self.cut_after_bytes, self.cut_times = 0, 0
        """The next so many bodies of files end after so many bytes, in the middle of the connection."""
        self.corrupt = False
        """Whether the byte in the middle of each file is wrong."""
        self.size_off_bytes = 0
        """By how much the Hub is wrong about the sizes of files; the CDN is right."""
        self.bytes_per_s = 0.0
        """How fast bodies of files are sent; 0: as fast as it goes."""
        self.chunk_delay_s = 0.0
        """A pause after each 64 KiB of a file."""
        self.forced_status, self.forced_times, self.retry_after = 0, 0, ""
        """The next so many requests answer with this status, and this Retry-After if there is one."""
        self.forced_path = ""
        """Only those whose path has this in it."""
        self.expires = 0
        """After how many uses a signed address of the CDN answers 403; 0: never."""
        self.left_out: set[str] = set()
        """Headers that are not sent, in lower case, e.g. `x-linked-etag`."""
        self.redirects: dict[str, str] = {}
        """Path → where a request of it is sent instead."""
        self.extra_names: tuple[str, ...] = ()
        """What lists of files name besides: a hostile mirror."""
        self.resolve_as = ""
        """Which commit files are said to be of, whatever was asked for."""
        self.log: list[Asked] = []
        self.commits: dict[str, dict[str, dict[str, Content]]] = {}
        """Commit → repository → its files."""
        self.commit = ""
        self._digests: dict[int, tuple[Content, _Digest]] = {}
        self._uses: dict[str, int] = {}
        self._signed = 0
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self.upload(commit, repos)
        self._server = _Server(self)
        port = self._server.server_address[1]
        self.url, self.cdn = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def upload(self, commit: str, repos: Mapping[str, Mapping[str, Content]]) -> None:
        """A new commit, which `main` is from now on; earlier ones stay."""
        with self._lock:
            self.commits[commit] = {name: dict(files) for name, files in repos.items()}
            self.commit = commit

    def start(self) -> Hub:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends it, and bodies under way with it."""
        self._stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Hub:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def asked(self, path_suffix: str = "", method: str = "") -> list[Asked]:
        """Requests whose path, without its query, ends so."""
        with self._lock:
            return [
                each for each in self.log if _plain(each.path).endswith(path_suffix) and method in ("", each.method)
            ]

    def sent(self, path_suffix: str) -> int:
        """Bytes of bodies written for files whose path ends so."""
        return sum(each.sent_bytes for each in self.asked(path_suffix))

    def sha256(self, repo: str, path: str) -> str:
        """Of a file as it is now."""
        return self.digest(self.commits[self.commit][repo][path]).sha256

    def digest(self, content: Content) -> _Digest:
        """Of a file, made once."""
        with self._lock:
            known = self._digests.get(id(content))
            if known is None:
                known = self._digests[id(content)] = (content, _digest(content))
            return known[1]

    # What follows is for the answers.

    def taken(self, counter: str) -> bool:
        """Whether a trouble that lasts so many times is due once more; counts it."""
        with self._lock:
            left = getattr(self, counter)
            if left > 0:
                setattr(self, counter, left - 1)
            return bool(left > 0)

    def signed(self, repo: str, commit: str, path: str) -> str:
        """A new address of a file at the CDN."""
        with self._lock:
            self._signed += 1
            number = self._signed
        return f"{self.cdn}/cdn/{repo}/{commit}/{urllib.parse.quote(path)}?signature=s{number}"

    def used(self, signature: str) -> bool:
        """Whether an address of the CDN is still good; counts it."""
        with self._lock:
            self._uses[signature] = self._uses.get(signature, 0) + 1
            return not self.expires or self._uses[signature] <= self.expires

    def note(self, asked: Asked) -> None:
        with self._lock:
            self.log.append(asked)

    def pause(self, size_bytes: int) -> bool:
        """Waits as long as so many bytes shall take; False once the server stops."""
        wait_s = self.chunk_delay_s + (size_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)
        return not (self._stopping.wait(wait_s) if wait_s else self._stopping.is_set())


def _plain(path: str) -> str:
    return urllib.parse.unquote(path.partition("?")[0])


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.hub = hub

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left is what some tests want."""


class _Answer(http.server.BaseHTTPRequestHandler):
    """One answer."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server.hub, _plain(self.path)
        try:
            if hub.forced_status and hub.forced_path in path and hub.taken("forced_times"):
                again = {"Retry-After": hub.retry_after} if hub.retry_after else {}
                return self._send(hub.forced_status, again)
            if path in hub.redirects:
                return self._send(302, {"Location": hub.redirects[path]})
            if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", path):
                return self._cdn(*found.groups())
            if hub.expired and self.headers.get("Authorization") == f"Bearer {hub.expired}":
                return self._refuse(401, "", "Invalid credentials in Authorization header")
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._refuse(401, "RepoNotFound", "Invalid username or password.")
            # Revisions are one part of a path: a slash in them comes as %2F, which is why this looks at the raw one.
            raw = self.path.partition("?")[0]
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", raw):
                return self._api(found[1], found[2] or "revision", urllib.parse.unquote(found[3] or "main"))
            if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", raw):
                return self._resolve(found[1], urllib.parse.unquote(found[2]), urllib.parse.unquote(found[3]))
            return self._refuse(404, "", "Sorry, we can't find the page you are looking for.")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _commit(self, repo: str, revision: str) -> str:
        """Of a revision, "" once the refusal has been sent."""
        hub = self.server.hub
        if not any(repo in repos for repos in hub.commits.values()):
            # The Hub does not tell a stranger what is private and what does not exist.
            status = 404 if self.headers.get("Authorization") else 401
            self._refuse(status, "RepoNotFound", "Repository not found")
            return ""
        commit = hub.commit if revision in ("main", "refs/pr/1") else revision
        if repo not in hub.commits.get(commit, {}):
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
            return ""
        return commit

    def _api(self, repo: str, what: str, revision: str) -> None:
        hub = self.server.hub
        if not (commit := self._commit(repo, revision)):
            return None
        files = hub.commits[commit][repo]
        names = [*files, *hub.extra_names]
        if what == "revision":
            said: object = {
                "_id": "1",
                "id": repo,
                "modelId": repo,
                "sha": commit,
                "private": False,
                "tags": [],
                "downloads": 0,
                "siblings": [{"rfilename": name} for name in names],
            }
            return self._json(said, {})
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        start = int(query.get("cursor", ["0"])[0])
        folders = sorted({name[:at] for name in names for at in range(len(name)) if name[at] == "/" and at})
        tree: list[dict[str, object]] = []
        tree += [{"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in folders]
        for name in names:
            digest = hub.digest(files.get(name, b"x"))
            size = digest.size_bytes + hub.size_off_bytes
            entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": digest.git}
            if hub.lfs and name.endswith(IN_LFS):
                entry["lfs"] = {"oid": digest.sha256, "size": size, "pointerSize": 134}
            tree.append(entry)
        more = {}
        if start + PER_PAGE < len(tree):
            rest = f"{hub.url}{self.path.partition('?')[0]}?recursive=true&expand=false&cursor={start + PER_PAGE}"
            more["Link"] = f'<{rest}>; rel="next"'
        return self._json(tree[start : start + PER_PAGE], more)

    def _resolve(self, repo: str, revision: str, path: str) -> None:
        hub = self.server.hub
        if not (commit := self._commit(repo, revision)):
            return None
        commit_said = {"X-Repo-Commit": hub.resolve_as or commit}
        if hub.gated:
            status = 403 if self.headers.get("Authorization") else 401
            return self._refuse(status, "GatedRepo", "Access to this repository is restricted.")
        content = hub.commits[commit][repo].get(path)
        if content is None:
            return self._refuse(404, "EntryNotFound", "Entry not found", commit_said)
        digest = hub.digest(content)
        if not (hub.lfs and path.endswith(IN_LFS)):
            return self._file(content, f'"{digest.git}"', commit_said, hub.size_off_bytes)
        said = {
            "Location": hub.signed(repo, commit, path),
            "X-Linked-Size": str(digest.size_bytes + hub.size_off_bytes),
            "X-Linked-Etag": f'"{digest.sha256}"',
            "ETag": f'"{digest.git}"',
            "Accept-Ranges": "bytes",
        }
        return self._send(302, {**commit_said, **said})

    def _cdn(self, repo: str, commit: str, path: str) -> None:
        hub = self.server.hub
        signature = self.path.rpartition("signature=")[2]
        content = hub.commits.get(commit, {}).get(repo, {}).get(path)
        if content is None or not hub.used(signature):
            return self._send(403, {"X-Error-Message": "Request has expired"})
        return self._file(content, f'"{hub.digest(content).sha256}"', {})

    def _file(self, content: Content, etag: str, more: Mapping[str, str], size_off: int = 0) -> None:
        hub = self.server.hub
        size = hub.digest(content).size_bytes
        said = {"ETag": etag, "Content-Type": "application/octet-stream", **more}
        if hub.ranges:
            said["Accept-Ranges"] = "bytes"
        start, end, status = 0, size, 200
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        unchanged = self.headers.get("If-Range", etag) == etag
        if found and hub.ranges and unchanged:
            start, end = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
            if start >= size:
                return self._send(416, {**said, "Content-Range": f"bytes */{size}"})
            status, said["Content-Range"] = 206, f"bytes {start}-{end - 1}/{size}"
        return self._send(status, said, content, start, end, size_off, wrong_at=size // 2 if hub.corrupt else -1)

    def _json(self, said: object, more: Mapping[str, str]) -> None:
        body = json.dumps(said).encode()
        self._send(200, {"Content-Type": "application/json; charset=utf-8", **more}, body, 0, len(body), steady=True)

    def _refuse(self, status: int, code: str, message: str, more: Mapping[str, str] | None = None) -> None:
        said = {"X-Error-Code": code} if code else {}
        self._send(status, {**said, "X-Error-Message": message, **(more or {})})

    def _send(
        self,
        status: int,
        headers: Mapping[str, str],
        content: Content = b"",
        start: int = 0,
        end: int = 0,
        size_off: int = 0,
        wrong_at: int = -1,
        steady: bool = False,
    ) -> None:
        """Headers and a part of a content; `steady`: with none of the troubles of files."""
        hub = self.server.hub
        asked = Asked(
            self.command,
            self.path,
            self.headers.get("Range", ""),
            self.headers.get("Authorization", ""),
            self.headers.get("Host", "").partition(":")[0],
            status,
            0,
        )
        hub.note(asked)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(end - start + size_off)}.items():
            if name.lower() not in hub.left_out:
                self.send_header(name, value)
        if "content-length" in hub.left_out or size_off:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if self.command == "HEAD" or end <= start:
            return
        cut = hub.cut_after_bytes if not steady and hub.taken("cut_times") else None
        for chunk in _chunks(content, start, end):
            part = _wrong(chunk, wrong_at - start - asked.sent_bytes)
            if cut is not None:
                part = part[: cut - asked.sent_bytes]
            asked.sent_bytes += len(part)
            try:
                self.wfile.write(part)
            except OSError:
                asked.sent_bytes -= len(part)
                raise
            if cut is not None and asked.sent_bytes >= cut:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                return
            if not steady and not hub.pause(len(part)):
                self.close_connection = True
                return


def _wrong(chunk: bytes, at: int) -> bytes:
    """A chunk with another byte at a place, if the place is in it."""
    return chunk[:at] + bytes([chunk[at] ^ 0xFF]) + chunk[at + 1 :] if 0 <= at < len(chunk) else chunk


def http_date(seconds: float) -> str:
    """A moment as Retry-After may give it."""
    return email.utils.formatdate(seconds, usegmt=True)
