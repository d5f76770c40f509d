"""Resolution of `s3://BUCKET/KEY` to ordinary URLs for a GET with a Range, on S3 and on servers compatible with it.

Keys come from the resource's Secret only: the credentials, profiles and environment of the Mac's user must not serve
any user who may write a Model. So only botocore's signer is used, which reads none of them; its sessions and clients
would. URLs are signed in their query, and the code that fetches bytes needs to know nothing of S3; an expired URL
answers 403, and then the listing is requested again.
"""

from __future__ import annotations

import base64
import logging
import posixpath
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from metal_supervisor.cluster.answers import retry_after_s
from metal_supervisor.models import repository
from metal_supervisor.models.listing import Listing, Piece, Retry, Unusable
from metal_supervisor.models.remote.s3_xml import Listed, document, fields, page
from metal_supervisor.models.remote.web_answers import LONGEST_WAIT_S, WholeAnswer, extent
from metal_supervisor.spec.hosts import web_url
from metal_supervisor.spec.shards import shard_names
from metal_supervisor.spec.sources import Artifact, bucket_key, is_file

ID = "AWS_ACCESS_KEY_ID"
SECRET = "AWS_SECRET_ACCESS_KEY"
TOKEN = "AWS_SESSION_TOKEN"
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
DEFAULT_REGION = "us-east-1"
EXPIRES_S = 12 * 3600
"""Long enough for a download over night, and a leaked URL is useless the day after; S3 allows a week."""
MOST_KEYS = 4096
PAGE_KEYS = 1000
MOST_PAGES = 64
REGION = re.compile(r"[a-z0-9-]{1,32}", re.ASCII)
EXPECTED = re.compile(r"expecting ['\"]([a-z0-9-]{1,32})['\"]", re.ASCII)
NONE: Mapping[str, str] = {}
CHECKSUM_MODE = {"x-amz-checksum-mode": "ENABLED"}
logging.getLogger("botocore").setLevel(logging.ERROR)  # it logs what it signs, and the signature
REFUSED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch")
ADVICE = {
    "ExpiredToken": f"renew {ID}, {SECRET} and {TOKEN} in the Secret",
    "TokenRefreshRequired": f"renew {ID}, {SECRET} and {TOKEN} in the Secret",
    "InvalidToken": f"correct {TOKEN} in the Secret",
    "InvalidAccessKeyId": f"correct {ID} in the Secret",
    "SignatureDoesNotMatch": f"correct {SECRET} in the Secret",
    "RequestTimeTooSkewed": "set this Mac's clock",
    "InvalidObjectState": "it is archived; restore it first",
    "AccessDenied": "its keys may not read it, or there is no such key and they may not list the bucket",
}


Get: TypeAlias = Callable[[str, str, Mapping[str, str]], WholeAnswer]
"""(method, URL, headers) → the answer, without following redirects. Raises Unusable for a failed connection."""


@dataclass(frozen=True)
class Credentials:
    """Credentials in the form that botocore's signer reads."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Bucket:
    """Location of a bucket, and the credentials for it."""

    name: str
    region: str
    endpoint: str = field(repr=False)
    """`http(s)://HOST` of a server other than Amazon's, "" for Amazon's."""
    credentials: Credentials | None
    """None for anonymous requests."""

    def address(self, key: str) -> str:
        """Unsigned URL of a key; key "" is the bucket itself."""
        path = urllib.parse.quote(key, safe="/~")
        if self.endpoint:
            return f"{self.endpoint}/{self.name}/{path}" if path else f"{self.endpoint}/{self.name}"
        domain = f"s3.{self.region}.amazonaws.com" + (".cn" if self.region.startswith("cn-") else "")
        # A certificate for *.s3.… covers no name with a dot in it.
        return f"https://{domain}/{self.name}/{path}" if "." in self.name else f"https://{self.name}.{domain}/{path}"

    def url(
        self, key: str, query: Mapping[str, str] = NONE, method: str = "GET", signed: Mapping[str, str] = NONE
    ) -> str:
        """URL of a key, signed if there are credentials; `signed`: headers that must be sent with it."""
        asked = urllib.parse.urlencode(query, quote_via=urllib.parse.quote)
        plain = self.address(key) + (f"?{asked}" if asked else "")
        if self.credentials is None:
            return plain
        return presigned(method, plain, signed, self.credentials, self.region, EXPIRES_S)


class _Elsewhere(Exception):
    """The bucket is in another region, whose name is the message."""


def listing(artifact: Artifact, keys: Mapping[str, str], get: Get) -> Listing:
    """List the files of an artifact whose source is an `s3://…`. Raises Unusable.

    `keys`: those of the Secret, as text; {} for anonymous requests.
    """
    name, key = bucket_key(artifact.source) or ("", "")  # `origins` passes no other source
    bucket = _bucket(name, keys)
    for _ in range(2):
        try:
            return _asked(artifact, bucket, key, get)
        except _Elsewhere as moved:
            bucket = replace(bucket, region=str(moved))
    raise Unusable("DownloadFailed", f"s3://{name}: no two answers agree on its region")


def presigned(
    method: str, url: str, headers: Mapping[str, str], credentials: Credentials, region: str, expires_s: int
) -> str:
    """Presign a URL: for `expires_s` seconds it gives access to anyone who sends it with these headers."""
    # At module level this would load half of botocore: 0.3 s that most Macs never need.
    from botocore.auth import S3SigV4QueryAuth
    from botocore.awsrequest import AWSRequest

    request = AWSRequest(method=method, url=url, headers=dict(headers))
    S3SigV4QueryAuth(credentials, "s3", region, expires=expires_s).add_auth(request)
    return str(request.url)


# ── where it is ──────────────────────────────────────────────────────────────────────────────────


def _bucket(bucket: str, keys: Mapping[str, str]) -> Bucket:
    said = {name: value.strip() for name, value in keys.items() if value.strip()}
    region = next((said[name] for name in REGIONS if name in said), DEFAULT_REGION)
    for name, value in said.items():
        if name.startswith("AWS_") and not (value.isascii() and value.isprintable()):
            raise Unusable("SourceUnauthorized", f"{name!r:.40} in the Secret must be one line of plain characters")
    if not REGION.fullmatch(region):
        raise Unusable("SourceUnauthorized", f"{REGIONS[0]} in the Secret must be a region such as {DEFAULT_REGION}")
    credentials = None
    if not said.keys() <= {*REGIONS, *ENDPOINTS}:
        if lacking := [name for name in (ID, SECRET) if name not in said]:
            raise Unusable("SourceUnauthorized", f"the Secret of s3://{bucket} lacks {' and '.join(lacking)}")
        credentials = Credentials(said[ID], said[SECRET], said.get(TOKEN))
    return Bucket(bucket, region, _endpoint(said), credentials)


def _endpoint(said: Mapping[str, str]) -> str:
    name = next((name for name in ENDPOINTS if name in said), None)
    if name is None:
        return ""
    url = said[name].rstrip("/")
    parts = web_url(url)
    if parts is None or "@" in parts.netloc or not url.isprintable() or any(each in url for each in "?# "):
        raise Unusable(
            "SourceUnauthorized", f"{name} in the Secret must look like https://HOST:PORT, without a user or a query"
        )
    return url


# ── what is there ────────────────────────────────────────────────────────────────────────────────


def _asked(artifact: Artifact, bucket: Bucket, key: str, get: Get) -> Listing:
    if any(part in (".", "..") for part in key.split("/")):
        message = f"{_place(bucket, key)}: a part of the key is {'. or ..'!r}, which HTTP clients take for a path"
        raise Unusable("InvalidModelFile", message, Retry.NEVER)
    if not artifact.directory and is_file(artifact.source):
        folder, name = key[: key.rfind("/") + 1], posixpath.basename(key)
        names = shard_names(name)
        _check_names(bucket, key, names)
        return Listing(tuple(_object(bucket, folder + each, each, get) for each in names))
    prefix = key if key.endswith("/") or not key else f"{key}/"
    found = {each.name: each for each in _below(bucket, prefix, get)}
    taken = repository.chosen(found, artifact, of := _place(bucket, prefix))
    if missing := next((name for name in taken if name not in found), None):
        raise Unusable("SourceNotFound", f"{of} has no {missing!r:.120}, but other shards of it")
    _check_names(bucket, prefix, taken)
    pieces = (_piece(bucket, prefix, found[name], get) for name in taken)
    if not artifact.directory:  # a GGUF file is stored with its shards beside it, not in their folders
        pieces = (replace(each, name=posixpath.basename(each.name)) for each in pieces)
    return Listing(tuple(pieces))


def _check_names(bucket: Bucket, key: str, names: tuple[str, ...]) -> None:
    """Raise Unusable for a name that cannot be a file below a directory."""
    if strange := next((name for name in names if not repository.is_safe(name)), None):
        text = f"{_place(bucket, key)}: {strange!r:.120} is no name of a file here; rename it"
        raise Unusable("InvalidModelFile", text, Retry.NEVER)


def _object(bucket: Bucket, key: str, name: str, get: Get) -> Piece:
    """Request the first byte of a key, and return its piece. Raises Unusable.

    Unlike a HEAD, this shows that it may be read, and its error has a body.
    """
    url = bucket.url(key)
    answer = get("GET", url, {"Range": "bytes=0-0"})
    _, size_bytes = extent(answer)
    if answer.status == 416 or (answer.status == 206 and size_bytes == 0):
        raise Unusable("InvalidModelFile", f"{_place(bucket, key)} is empty; put the file there")
    if answer.status not in (200, 206):
        raise _refusal(bucket, key, answer)
    return Piece(name, url, size_bytes, _checksum(bucket, key, get), answer.headers.get("etag", ""))


def _checksum(bucket: Bucket, key: str, get: Get) -> str:
    """SHA-256 of a whole object in hex, "" if it was uploaded without one; S3 sends it for a HEAD that asks for it."""
    answer = get("HEAD", bucket.url(key, method="HEAD", signed=CHECKSUM_MODE), CHECKSUM_MODE)
    said = answer.headers.get("x-amz-checksum-sha256", "")
    # For a multipart object it is a checksum of the parts' checksums: `…-N`.
    if answer.status != 200 or answer.headers.get("x-amz-checksum-type", "FULL_OBJECT") != "FULL_OBJECT":
        return ""
    try:
        digest = base64.b64decode(said, validate=True)
    except ValueError:
        return ""
    return digest.hex() if len(digest) == 32 else ""


# ── a prefix ─────────────────────────────────────────────────────────────────────────────────────


def _piece(bucket: Bucket, prefix: str, listed: Listed, get: Get) -> Piece:
    key = prefix + listed.name
    sha256 = _checksum(bucket, key, get) if listed.hashed else ""
    return Piece(listed.name, bucket.url(key), listed.size_bytes, sha256, listed.validator)


def _below(bucket: Bucket, prefix: str, get: Get) -> list[Listed]:
    """List every object below a prefix, page by page. Raises Unusable."""
    query = {"list-type": "2", "encoding-type": "url", "max-keys": str(PAGE_KEYS), "prefix": prefix}
    found: list[Listed] = []
    for _ in range(MOST_PAGES):
        answer = get("GET", bucket.url("", query), {})
        if answer.status != 200:
            raise _refusal(bucket, prefix, answer)
        try:
            listed, token = page(answer.body, prefix)
        except ValueError:
            raise Unusable("DownloadFailed", f"{_place(bucket, prefix)}: the answer is no listing of S3's") from None
        found += listed
        if not token:
            return found
        if len(found) >= MOST_KEYS:
            break
        query["continuation-token"] = token
    message = f"{_place(bucket, prefix)}: there are more than {MOST_KEYS} objects; name the model's own directory"
    raise Unusable("AmbiguousSource", message)


# ── what went wrong ──────────────────────────────────────────────────────────────────────────────


def _refusal(bucket: Bucket, key: str, answer: WholeAnswer) -> Exception:
    """Error for a failed request, by its status and S3's error code. S3's text is not shown: it holds the signature."""
    place, status = _place(bucket, key), answer.status
    try:
        said = fields(document(answer.body, "Error"))
    except ValueError:
        said = {}
    code = said.get("Code", "")
    code = code if re.fullmatch(r"[A-Za-z]{1,64}", code, re.ASCII) else ""
    if status in (301, 307, 400, 403) and (region := _region(answer, said)) not in ("", bucket.region):
        return _Elsewhere(region)
    words = f"{place}: the server answered {status}" + (f" {code}" if code else "")
    if status == 404:
        missing = f"there is no bucket {bucket.name}" if code == "NoSuchBucket" else "there is no such key"
        return Unusable("SourceNotFound", f"{place}: {missing}{'' if code else ' (404)'}; correct spec.source")
    if status in (401, 403) or code in REFUSED:
        advice = ADVICE.get(code, "see that the keys of the Secret may read it")
        if bucket.credentials is None:
            advice = f"it is not public; set spec.sourceSecretRef to a Secret with {ID} and {SECRET}"
        return Unusable("SourceUnauthorized", f"{words}; {advice}")
    if status == 429 or status >= 500:
        after_s = retry_after_s(answer.headers, longest_s=LONGEST_WAIT_S)
        return Unusable("DownloadFailed", f"{words}; it is asked again", Retry.SOON, after_s)
    if 300 <= status < 400:
        return Unusable("DownloadFailed", f"{words}; set {REGIONS[0]} or {ENDPOINTS[1]} in the Secret to where it is")
    return Unusable("DownloadFailed", words)


def _region(answer: WholeAnswer, said: Mapping[str, str]) -> str:
    """Region of the bucket by an answer's headers or body, "" if it names none."""
    told = answer.headers.get("x-amz-bucket-region", "") or said.get("Region", "")
    if REGION.fullmatch(told):
        return told
    found = EXPECTED.search(said.get("Message", ""))
    return found[1] if found else ""


def _place(bucket: Bucket, key: str) -> str:
    return f"{f's3://{bucket.name}/{key}'!r:.200}"
