"""Sources that a Model's `spec.source` may name: a file, a repository, or a model of Ollama's library.

People copy addresses from browsers, from documentation and from other tools, so one file has many spellings. They are
normalized to one, so that each file is fetched once; and a source that this Mac cannot fetch is refused by its scheme.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from metal_supervisor.spec import fields
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.hosts import in_url, web_url
from metal_supervisor.spec.shards import PIECE, join, shard_names

LIBRARY = re.compile(
    r"https?://(?:www\.)?(?:ollama\.com|registry\.ollama\.ai)/"
    r"(?:library/)?([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::([\w][\w.-]{0,127}))?/?"
)
DEFAULT_TAG = "latest"
DEFAULT_REVISION = "main"
REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*"
REVISION = r"refs/(?:pr|convert)/[^/@]+|[^/@]+"
HUB_PAGE = re.compile(
    rf"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/|api/)({REPOSITORY})"
    rf"(?:/(?:resolve|blob|raw|tree)/({REVISION})(?:/(.*))?)?/?",
    re.ASCII,
)
HUB_URI = re.compile(rf"hf://(?:models/)?({REPOSITORY})(?:@({REVISION}))?(?:/(.*))?", re.ASCII)
QUANTIZED = re.compile(rf"((?:hf://)?(?:models/)?{REPOSITORY}(?:@(?:{REVISION}))?):(\w[\w.-]{{0,62}})", re.ASCII)
BARE = re.compile(REPOSITORY, re.ASCII)
BUCKET_KEY = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(.*)", re.ASCII | re.DOTALL)
FORMS = "an absolute path, file:///…, http(s)://…, hf://O/R[@REV][/FILE], hf://O/R:QUANT or s3://BUCKET/KEY"
WINDOWS = re.compile(r"[A-Za-z]:/")
ELSEWHERE = {
    "pvc": "names a volume of the cluster, which no Mac can mount; name a file of the Mac, or hf://O/R",
    "oci": "names an image of a container registry, which is not supported; name the model by hf://O/R or https://…",
    "ollama": "is no source of a Model; write https://ollama.com/library/NAME:TAG",
}


@dataclass(frozen=True)
class Artifact:
    """One model file with its shards, or a directory of them, as resources name it. Equal ones are fetched once."""

    source: str
    """`/…` on this Mac, `http(s)://…`, `hf://O/R@REV` with or without `/PATH`, `s3://BUCKET/KEY`."""
    directory: bool = False
    """A whole repository or directory (config.json and weights) instead of one GGUF file."""
    files: tuple[str, ...] = ()
    """Paths to fetch from below a directory; empty: all that an engine reads."""
    quantization: str = ""
    """Part of the name of the repository's GGUF file, e.g. `Q4_K_M`, if `source` names no file; in capitals."""
    sha256: str = ""
    """Expected digest of the file, lower-case hex; "" if none is set."""
    secret: tuple[str, str] | None = None
    """(namespace, name) of the Secret whose keys open it."""
    model: str = field(default="", compare=False)
    """Name of a Model that has it: LLMKube's own agent keeps its file in a directory of that name."""
    digests: tuple[tuple[str, str], ...] = ()
    """(file, expected digest) of files of its Model: paths below a directory, else canonical sources."""

    @property
    def local(self) -> bool:
        """True if the source is a path on this Mac, whether or not the file exists."""
        return self.source.startswith("/")

    def expected(self, names: Sequence[str]) -> tuple[str, ...]:
        """Expected digest of each of its files, "" if none is set. `names`: below a directory, else of the shards."""
        known = dict(self.digests)
        if self.directory:
            return tuple(known.get(name, "") for name in names)
        found = [known.get(shard, "") for shard in shard_names(self.source)]
        found = [found[0] or self.sha256, *found[1:]] + [""] * len(names)
        return tuple(found[: len(names)])

    def digest_field(self, name: str) -> str:
        """The field of the Model that has the digest of a file, as a message has it."""
        return f"spec.fileSha256[{name!r:.120}]" if self.digests else "spec.sha256"

    @property
    def slot(self) -> str:
        """Name of its directory in the store; one per namespace if a Secret opens it, as others may not have it."""
        said: list[object] = [self.source]
        if self.directory or self.quantization or self.secret:
            said += [self.directory, self.files, self.quantization, self.secret[0] if self.secret else ""]
        text = self.source if len(said) == 1 else json.dumps(said)
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


NOTHING = Artifact("")


@dataclass(frozen=True)
class Keys:
    """Credentials that open a source."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Values of the Secret that the Model names: HF_TOKEN, AWS_ACCESS_KEY_ID …"""
    problem: tuple[str, str] | None = None
    """(reason, message) if they are not available."""
    passing: bool = False
    """The problem is transient: it ends once the API server answers."""


NO_KEYS = Keys()


def library_model(source: str) -> str:
    """`NAME:TAG` of a source like `https://ollama.com/library/NAME:TAG`, "" if it is none; no tag means `latest`."""
    found = LIBRARY.fullmatch(source)
    return f"{found[1]}:{found[2] or DEFAULT_TAG}" if found else ""


def hub_parts(source: str) -> tuple[str, str, str] | None:
    """(repository, revision, path) of a canonical `hf://…`, path "" for the whole of it; None for another source."""
    found = HUB_URI.fullmatch(source)
    if found is None:
        return None
    return found[1], urllib.parse.unquote(found[2] or DEFAULT_REVISION), urllib.parse.unquote(found[3] or "")


def bucket_key(source: str) -> tuple[str, str] | None:
    """(bucket, key) of an `s3://…`, None for another source."""
    found = BUCKET_KEY.fullmatch(source)
    return (found[1], found[2]) if found else None


def is_file(source: str) -> bool:
    """True if a canonical source names a file, not a repository or a directory on a server."""
    if parts := hub_parts(source):
        return bool(parts[2])
    return not source.endswith("/")


def same_origin(one: str, other: str) -> bool:
    """True if two canonical sources share credentials: both on the Hub, on S3, or on one web server."""
    first, second = urllib.parse.urlsplit(one), urllib.parse.urlsplit(other)
    return first.scheme == second.scheme and (first.scheme in ("hf", "s3") or first.netloc == second.netloc)


def without_quantization(written: str) -> tuple[str, str]:
    """(source, QUANT) of a source like `hf://O/R:QUANT`; (the source, "") for any other."""
    found = QUANTIZED.fullmatch(written)
    return (found[1], found[2]) if found else (written, "")


def canonical(written: str, where: str = "spec.source") -> str:
    """The canonical spelling of a source. Raises Bad, which names the field, for one that this Mac cannot fetch."""
    found = _spelled(written, where)
    name = urllib.parse.unquote(posixpath.basename(shown(found) if "://" in found else found))
    if piece := PIECE.fullmatch(name):
        raise Bad("InvalidModel", f"{where} {name!r:.200} is a piece of {piece[1]}; {join(name)}, and name that file")
    return found


def _spelled(written: str, where: str) -> str:
    fields.address(written, where)
    if not written:
        raise Bad("InvalidModel", f"{where} is empty; give {FORMS}")
    if written.startswith("/"):
        return shard_names(written)[0]
    if library := library_model(written):
        return f"https://ollama.com/{'' if '/' in library else 'library/'}{library}"
    scheme, separator, _ = written.partition("://")
    scheme = scheme.lower()
    if not separator:
        if BARE.fullmatch(written) and not written.endswith(".gguf"):
            return _hub_uri(f"hf://{written}", where)
        why = f"is not supported; use {FORMS}"
        if written.startswith("~"):
            why = "begins with ~, which only a shell expands; write the home directory in full"
        elif "\\" in written or WINDOWS.match(written):
            why = "is a Windows path; a path on a Mac begins with / and has / between its parts"
        raise Bad("UnsupportedSource", f"{where} {shown(written)!r:.200} {why}")
    if not written.isprintable():
        raise Bad("InvalidModel", f"{where} {shown(written)!r:.200} has a control character; remove it")
    if scheme in ELSEWHERE:
        raise Bad("UnsupportedSource", f"{where} {shown(written)!r:.200} {ELSEWHERE[scheme]}")
    if scheme == "file":
        return _file(written, where)
    if scheme == "s3":
        if bucket_key(written) is None:
            raise Bad("InvalidModel", f"{where} {shown(written)!r:.200} must look like s3://BUCKET/KEY")
        return shard_names(written)[0]
    if scheme == "hf":
        return _hub_uri(written, where)
    if scheme not in ("http", "https"):
        raise Bad("UnsupportedSource", f"{where} {shown(written)!r:.200} is not supported; use {FORMS}")
    found = _web(written, where)
    return canonical(found, where) if library_model(found) else found  # without an empty query it is a library's


def _file(written: str, where: str) -> str:
    host, slash, path = written[len("file://") :].partition("/")
    if host not in ("", "localhost"):
        raise Bad("InvalidModel", f"{where} {shown(written)!r:.200}: file:// needs three slashes")
    if not path:
        raise Bad("InvalidModel", f"{where} {shown(written)!r:.200} names no file")
    return shard_names(fields.text(urllib.parse.unquote(slash + path), where))[0]  # `#` and `?` are parts of a name


def _hub_uri(written: str, where: str) -> str:
    found = HUB_URI.fullmatch(written)
    if found is None or re.match(r"hf://(buckets|datasets|kernels|spaces)/", written):
        raise Bad(
            "InvalidModel",
            f"{where} {shown(written)!r:.200} must look like hf://O/R, hf://O/R:QUANT or hf://O/R@REV/FILE",
        )
    return _hub(found[1], found[2] or "", found[3] or "", where)


def _web(written: str, where: str) -> str:
    parts = web_url(written)
    if parts is None:
        raise Bad("InvalidModel", f"{where} {shown(written)!r:.200} is no URL of a web server")
    if parts.username is not None or parts.password is not None:
        raise Bad("InvalidModel", f"{where} {shown(written)!r:.200} holds a user or password; use spec.sourceSecretRef")
    named = in_url(parts.hostname or "")  # lower case by now
    usual = parts.port in (None, {"http": 80, "https": 443}[parts.scheme])
    parts = parts._replace(netloc=named if usual else f"{named}:{parts.port}")
    found = HUB_PAGE.fullmatch(urllib.parse.urlunsplit(parts._replace(query="", fragment="")))
    if found:
        return _hub(found[1], found[2] or "", found[3] or "", where)
    return urllib.parse.urlunsplit(parts._replace(path=shard_names(parts.path)[0], fragment=""))


def _hub(repository: str, revision: str, path: str, where: str) -> str:
    plain = urllib.parse.unquote(path).strip("/")
    if plain:
        inside(plain, where)
    revision = urllib.parse.quote(urllib.parse.unquote(revision or DEFAULT_REVISION), safe="")
    base = f"hf://{repository}@{revision}"
    return shard_names(f"{base}/{urllib.parse.quote(plain)}")[0] if plain else base


def inside(name: str, where: str) -> str:
    """The normalized relative path of a file below a directory. Raises Bad for one that leads out of it."""
    plain = posixpath.normpath(name)
    if name.startswith("/") or plain in (".", "..") or plain.startswith("../") or "\\" in name:
        raise Bad("InvalidSpec", f"{where} must name a file beside spec.source, not {name!r:.80}; leave out its path")
    return plain


def beside(source: str, name: str, where: str) -> str:
    """The source of a file that is named next to a canonical one: in its directory, or in its repository.

    Raises Bad, which names the field.
    """
    fields.address(name, where)
    if library_model(source):
        raise Bad("UnsupportedField", f"{where} has no meaning for a model of Ollama's library; remove it")
    plain = inside(name, where)
    if source.startswith("/"):
        return posixpath.join(posixpath.dirname(source), plain)
    if parts := hub_parts(source):
        return _hub(parts[0], urllib.parse.quote(parts[1], safe=""), urllib.parse.quote(plain), where)
    if source.startswith("s3://"):
        return source[: source.rindex("/") + 1] + plain
    web = urllib.parse.urlsplit(source)
    path = web.path[: web.path.rindex("/") + 1] if "/" in web.path else "/"
    return urllib.parse.urlunsplit(web._replace(path=path + urllib.parse.quote(plain), query=""))


def shown(source: str) -> str:
    """A source without credentials or query, fit for a log or a status."""
    plain = source.partition("?")[0].partition("#")[0]
    scheme, separator, rest = plain.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"[:300] if separator else source[:300]
