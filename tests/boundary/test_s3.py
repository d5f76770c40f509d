"""What an `s3://…` source comes to, against a real server that checks signatures; hostile ones are played."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st
from urllib3 import HTTPHeaderDict

from metal_supervisor.models.listing import Listing, Retry, Unusable
from metal_supervisor.models.remote import s3
from metal_supervisor.models.remote.s3_xml import page
from metal_supervisor.models.remote.web_answers import WholeAnswer
from metal_supervisor.spec.sources import Artifact
from tests.support.s3 import ID, REGION, SECRET, Server
from tests.support.system import ROOT

KEYS = {s3.ID: ID, s3.SECRET: SECRET}
GGUF = b"GGUF" + bytes(200)
MODEL = {"config.json": b"{}", "model.safetensors": b"weights", "sub dir/a+b é%.json": b"[]", "run.py": b"", ".x": b""}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("s3"))
    try:
        one.put("models", "", b"")
        one.put("models", "tiny/m.gguf", GGUF, hashed=True)
        one.put("models", "tiny/mmproj-m.gguf", GGUF)
        one.put("models", "empty.gguf", b"")
        for number in (1, 2, 3):
            one.put("models", f"big/m-0000{number}-of-00003.gguf", GGUF + bytes(number))
            one.put("models", f"two/m{number}.gguf", GGUF)
        for name, content in MODEL.items():
            one.put("models", f"mlx/{name}", content, hashed=name == "model.safetensors")
        one.put("public", "", b"")
        one.put("public", "m.gguf", GGUF)
        one.publish("public")
        yield one
    finally:
        one.end()


def fetched(listing: Listing) -> dict[str, bytes]:
    """Name → what a plain GET brings; and what was said of it is true."""
    found = {}
    for piece in listing.pieces:
        answer = urllib3.request("GET", piece.url, retries=False)
        assert answer.status == 200 and piece.size_bytes == len(answer.data)
        assert piece.validator and piece.validator == answer.headers["etag"]
        found[piece.name] = answer.data
    return found


def refused(artifact: Artifact, keys: Mapping[str, str], get: s3.Get) -> Unusable:
    with pytest.raises(Unusable) as caught:
        s3.listing(artifact, keys, get)
    assert caught.value.__cause__ is None
    assert not any(each in str(caught.value) for each in (ID, SECRET, "X-Amz", "?")) and str(caught.value).isprintable()
    return caught.value


# ── a real server ────────────────────────────────────────────────────────────────────────────────


def test_one_object_is_a_url_that_ranges_work_on(server: Server) -> None:
    listing = s3.listing(Artifact("s3://models/tiny/m.gguf"), server.keys, server.get)
    assert fetched(listing) == {"m.gguf": GGUF}
    (piece,) = listing.pieces
    assert piece.sha256 == hashlib.sha256(GGUF).hexdigest()
    part = urllib3.request("GET", piece.url, headers={"Range": "bytes=2-5", "If-Match": piece.validator}, retries=False)
    assert (part.status, part.data) == (206, GGUF[2:6])
    assert SECRET not in piece.url and "X-Amz-Expires=43200" in piece.url
    assert ID not in repr(listing) and "X-Amz" not in repr(listing)


def test_an_object_without_a_checksum_has_none(server: Server) -> None:
    (piece,) = s3.listing(Artifact("s3://models/tiny/mmproj-m.gguf"), server.keys, server.get).pieces
    assert piece.sha256 == "" and piece.size_bytes == len(GGUF)


def test_any_shard_brings_all_of_them_the_first_one_first(server: Server) -> None:
    listing = s3.listing(Artifact("s3://models/big/m-00002-of-00003.gguf"), server.keys, server.get)
    assert fetched(listing) == {f"m-0000{n}-of-00003.gguf": GGUF + bytes(n) for n in (1, 2, 3)}
    assert listing.pieces[0].name == "m-00001-of-00003.gguf"
    assert s3.listing(Artifact("s3://models/big/"), server.keys, server.get).pieces[0].name == listing.pieces[0].name


@pytest.mark.parametrize("page_keys", [1000, 1, 2])
@pytest.mark.parametrize("source", ["s3://models/mlx", "s3://models/mlx/"])
def test_a_directory_is_listed_page_by_page(
    server: Server, monkeypatch: pytest.MonkeyPatch, page_keys: int, source: str
) -> None:
    monkeypatch.setattr(s3, "PAGE_KEYS", page_keys)
    server.asked.clear()
    listing = s3.listing(Artifact(source, directory=True), server.keys, server.get)
    assert fetched(listing) == {name: MODEL[name] for name in MODEL if name not in ("run.py", ".x")}
    hashes = {piece.name: piece.sha256 for piece in listing.pieces if piece.sha256}
    assert hashes == {"model.safetensors": hashlib.sha256(b"weights").hexdigest()}
    pages = [url for method, url in server.asked if "list-type=2" in url]
    assert len(pages) == -(-len(MODEL) // page_keys)


def test_the_files_that_are_named_are_all_that_is_fetched(server: Server) -> None:
    wanted = ("model.safetensors", "config.json")
    listing = s3.listing(Artifact("s3://models/mlx", True, wanted), server.keys, server.get)
    assert {piece.name for piece in listing.pieces} == set(wanted)
    error = refused(Artifact("s3://models/mlx", True, (*wanted, "none.json")), server.keys, server.get)
    assert error.reason == "InvalidModel" and "s3://models/mlx/" in str(error) and "'none.json'" in str(error)


def test_a_prefix_with_one_gguf_file_is_that_file(server: Server) -> None:
    assert fetched(s3.listing(Artifact("s3://models/tiny/"), server.keys, server.get)) == {"m.gguf": GGUF}
    picked = s3.listing(Artifact("s3://models/two/", quantization="M2"), server.keys, server.get)
    assert fetched(picked) == {"m2.gguf": GGUF}
    error = refused(Artifact("s3://models/two/"), server.keys, server.get)
    assert (error.reason, error.retry) == ("AmbiguousSource", Retry.LATER)
    assert "m1.gguf, m2.gguf, m3.gguf" in str(error) and "spec.files" in str(error)


def test_a_bucket_in_another_region_is_asked_there(server: Server) -> None:
    server.asked.clear()
    keys = {**server.keys, "AWS_REGION": "us-west-2"}
    listing = s3.listing(Artifact("s3://models/tiny/m.gguf"), keys, server.get)
    assert fetched(listing) == {"m.gguf": GGUF} and len(server.asked) == 3
    assert "%2Fus-west-2%2F" in server.asked[0][1] and f"%2F{REGION}%2F" in server.asked[1][1]


def test_a_public_bucket_needs_no_keys_and_a_private_one_says_so(server: Server) -> None:
    anybody = {"AWS_ENDPOINT_URL": server.url, "AWS_REGION": REGION}
    listing = s3.listing(Artifact("s3://public/m.gguf"), anybody, server.get)
    assert fetched(listing) == {"m.gguf": GGUF} and listing.pieces[0].url == f"{server.url}/public/m.gguf"
    assert fetched(s3.listing(Artifact("s3://public/"), anybody, server.get)) == {"m.gguf": GGUF}
    error = refused(Artifact("s3://models/tiny/m.gguf"), anybody, server.get)
    assert error.reason == "SourceUnauthorized" and "set spec.sourceSecretRef to a Secret with AWS_" in str(error)


@pytest.mark.parametrize(
    ("source", "keys", "reason", "why"),
    [
        ("s3://models/none.gguf", {}, "SourceNotFound", "'s3://models/none.gguf': there is no such key"),
        ("s3://models/tiny/n-00001-of-00002.gguf", {}, "SourceNotFound", "n-00001-of-00002.gguf': there is no such"),
        ("s3://nobody/m.gguf", {}, "SourceNotFound", "there is no bucket nobody; correct spec.source"),
        ("s3://nobody/", {}, "SourceNotFound", "there is no bucket nobody; correct spec.source"),
        ("s3://models/none/", {}, "InvalidModel", "'s3://models/none/' has no GGUF file"),
        ("s3://models/tiny/m.gguf", {s3.SECRET: "other"}, "SourceUnauthorized", "correct AWS_SECRET_ACCESS_KEY"),
        ("s3://models/empty.gguf", {}, "InvalidModelFile", "'s3://models/empty.gguf' is empty"),
    ],
)
def test_what_is_not_to_be_had_is_refused_by_name(
    server: Server, source: str, keys: dict[str, str], reason: str, why: str
) -> None:
    error = refused(Artifact(source), {**server.keys, **keys}, server.get)
    assert (error.reason, error.retry) == (reason, Retry.LATER) and why in str(error)


# ── keys, addresses, signatures ──────────────────────────────────────────────────────────────────


def test_the_example_of_the_documentation_is_signed_as_it_says_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import botocore.auth

    at = datetime.datetime(2013, 5, 24, tzinfo=datetime.timezone.utc)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_said, **_more: at)
    example = s3.Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    url = s3.presigned("GET", "https://examplebucket.s3.amazonaws.com/test.txt", {}, example, "us-east-1", 86400)
    said = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query)
    assert said["X-Amz-Date"] == ["20130524T000000Z"]
    assert said["X-Amz-Signature"] == ["aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"]


@dataclass
class Played:
    """A server of one answer; says what it was asked."""

    status: int = 206
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-range": "bytes 0-0/7"})
    asked: list[str] = field(default_factory=list)

    def get(self, method: str, url: str, headers: Mapping[str, str]) -> WholeAnswer:
        self.asked.append(url)
        return WholeAnswer(self.status, HTTPHeaderDict(self.headers), self.body)


@pytest.mark.parametrize(
    ("bucket", "keys", "begin"),
    [
        ("models", {}, "https://models.s3.us-east-1.amazonaws.com/a%20b/%C3%A9%2B.gguf"),
        ("models", {"AWS_DEFAULT_REGION": "eu-west-1\n"}, "https://models.s3.eu-west-1.amazonaws.com/"),
        ("models", {"AWS_REGION": "a-1", "AWS_DEFAULT_REGION": "b-1"}, "https://models.s3.a-1.amazonaws.com/"),
        ("models", {"AWS_REGION": "cn-north-1"}, "https://models.s3.cn-north-1.amazonaws.com.cn/"),
        ("my.models", {}, "https://s3.us-east-1.amazonaws.com/my.models/a%20b/"),
        ("models", {"AWS_ENDPOINT_URL": "https://minio.test:9000/"}, "https://minio.test:9000/models/a%20b/"),
        ("models", {"AWS_ENDPOINT_URL_S3": "http://a", "AWS_ENDPOINT_URL": "http://b"}, "http://a/models/"),
    ],
)
def test_a_bucket_is_addressed_as_its_server_wants_it(bucket: str, keys: dict[str, str], begin: str) -> None:
    for more in ({}, KEYS, {**KEYS, s3.TOKEN: "to/ken"}):
        played = Played()
        (piece,) = s3.listing(Artifact(f"s3://{bucket}/a b/é+.gguf"), {**keys, **more}, played.get).pieces
        assert piece.url.startswith(begin) and piece.size_bytes == 7 and piece.name == "é+.gguf"
        assert ("X-Amz-Signature=" in piece.url) == bool(more)
        assert ("X-Amz-Security-Token=to%2Fken" in piece.url) == (s3.TOKEN in more)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({s3.ID: ID}, "lacks AWS_SECRET_ACCESS_KEY"),
        ({s3.SECRET: SECRET}, "lacks AWS_ACCESS_KEY_ID"),
        ({"HF_TOKEN": "x"}, "lacks AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ({s3.ID: " \n", s3.SECRET: "", s3.TOKEN: "t"}, "lacks AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ({**KEYS, "AWS_REGION": "evil.test/"}, "AWS_REGION in the Secret must be a region such as us-east-1"),
        ({**KEYS, "AWS_ENDPOINT_URL": "https://user:pass@minio"}, "AWS_ENDPOINT_URL in the Secret must look like"),
        ({**KEYS, "AWS_ENDPOINT_URL": "https://minio?key=pass"}, "AWS_ENDPOINT_URL in the Secret must look like"),
        ({**KEYS, "AWS_ENDPOINT_URL": "https://minio#pass"}, "AWS_ENDPOINT_URL in the Secret must look like"),
        ({**KEYS, "AWS_ENDPOINT_URL_S3": "ftp://minio"}, "AWS_ENDPOINT_URL_S3 in the Secret must look like"),
        ({**KEYS, "AWS_ENDPOINT_URL": "http://minio:x"}, "AWS_ENDPOINT_URL in the Secret must look like"),
        ({**KEYS, "AWS_ENDPOINT_URL": "http://[::1"}, "AWS_ENDPOINT_URL in the Secret must look like"),
        ({**KEYS, s3.TOKEN: "pass\nword"}, "'AWS_SESSION_TOKEN' in the Secret must be one line"),
        ({**KEYS, s3.SECRET: "pass\udcffword"}, "'AWS_SECRET_ACCESS_KEY' in the Secret must be one line"),
    ],
)
def test_a_secret_that_does_not_do_is_refused_without_its_values(keys: dict[str, str], why: str) -> None:
    played = Played()
    error = refused(Artifact("s3://models/m.gguf"), keys, played.get)
    assert (error.reason, error.retry) == ("SourceUnauthorized", Retry.LATER)
    assert why in str(error) and "pass" not in str(error) and played.asked == []


def test_nothing_shows_a_secret() -> None:
    bucket = s3.Bucket("models", REGION, "", s3.Credentials(ID, SECRET, "token"))
    assert not any(each in repr(bucket) for each in (ID, SECRET, "token"))


def test_the_keys_of_this_macs_user_are_never_looked_at(tmp_path: Path) -> None:
    """Neither files nor environment nor the address that machines of Amazon's ask; and botocore comes only at need."""
    (tmp_path / ".aws").mkdir()
    for name in ("config", "credentials"):
        (tmp_path / ".aws" / name).write_text("[default]\naws_access_key_id=USERS\naws_secret_access_key=USERS\n")
    text = """
import sys
touched = []
def hook(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen") or event == "open" and (
        ".aws" in str(args[0]) or ".boto" in str(args[0]) or "botocore/data" in str(args[0])):
        touched.append((event, str(args)))
sys.addaudithook(hook)
from metal_supervisor.models.remote import s3
from metal_supervisor.spec.sources import Artifact
assert not any(each.startswith("botocore") for each in sys.modules)
class Answer:
    status, body, headers = 206, b"", {"content-range": "bytes 0-0/7"}
for keys in ({}, {s3.ID: "OURS", s3.SECRET: "s"}):
    print(s3.listing(Artifact("s3://models/m.gguf"), keys, lambda *_: Answer).pieces[0].url)
assert touched == [], touched
"""
    users = {"AWS_ACCESS_KEY_ID": "USERS", "AWS_SECRET_ACCESS_KEY": "USERS", "AWS_SESSION_TOKEN": "USERS"}
    more = {
        "AWS_PROFILE": "default",
        "AWS_REGION": "users-1",
        "AWS_ENDPOINT_URL": "http://users",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        env={**users, **more, "AWS_CONFIG_FILE": str(tmp_path / ".aws" / "config")},
    )
    assert done.returncode == 0, done.stderr
    anybodys, ours = done.stdout.splitlines()
    assert anybodys == "https://models.s3.us-east-1.amazonaws.com/m.gguf"
    assert ours.startswith(anybodys + "?") and "=OURS%2F" in ours and "sers" not in ours.lower()


# ── servers that refuse, and hostile ones ────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "code", "reason", "retry", "why"),
    [
        (404, "NoSuchKey", "SourceNotFound", Retry.LATER, "there is no such key"),
        (404, "NoSuchBucket", "SourceNotFound", Retry.LATER, "there is no bucket models"),
        (404, "", "SourceNotFound", Retry.LATER, "there is no such key (404)"),
        (403, "AccessDenied", "SourceUnauthorized", Retry.LATER, "its keys may not read it, or there is no such key"),
        (403, "RequestTimeTooSkewed", "SourceUnauthorized", Retry.LATER, "set this Mac's clock"),
        (403, "InvalidObjectState", "SourceUnauthorized", Retry.LATER, "it is archived"),
        (403, "Sig <nature", "SourceUnauthorized", Retry.LATER, "answered 403; see that the keys"),
        (401, "", "SourceUnauthorized", Retry.LATER, "answered 401; see that the keys"),
        (400, "ExpiredToken", "SourceUnauthorized", Retry.LATER, "renew AWS_ACCESS_KEY_ID"),
        (400, "InvalidRequest", "DownloadFailed", Retry.LATER, "answered 400 InvalidRequest"),
        (301, "PermanentRedirect", "DownloadFailed", Retry.LATER, "set AWS_REGION or AWS_ENDPOINT_URL in the Secret"),
        (429, "", "DownloadFailed", Retry.SOON, "answered 429"),
        (503, "SlowDown", "DownloadFailed", Retry.SOON, "answered 503 SlowDown"),
        (500, "InternalError", "DownloadFailed", Retry.SOON, "answered 500 InternalError"),
    ],
)
@pytest.mark.parametrize("source", ["s3://models/m.gguf", "s3://models/m/"])
def test_refusals_are_told_apart(status: int, code: str, reason: str, retry: Retry, why: str, source: str) -> None:
    escaped = code.replace("<", "&lt;")
    body = f"<Error><Code>{escaped}</Code><Message>{ID} {SECRET}?</Message></Error>".encode() if code else b"<html>"
    error = refused(Artifact(source), KEYS, Played(status, body, {"retry-after": "9"}).get)
    assert (error.reason, error.retry) == (reason, retry) and why in str(error) and repr(source) in str(error)
    assert error.after_s == (9.0 if retry is Retry.SOON else 0.0)


@pytest.mark.parametrize("status", [301, 307, 400, 403])
@pytest.mark.parametrize("told", ["header", "element", "words"])
def test_a_server_that_sends_us_round_in_circles_is_left(status: int, told: str) -> None:
    regions = iter(["a-1", "b-1", "c-1"])
    asked: list[str] = []

    def get(method: str, url: str, headers: Mapping[str, str]) -> WholeAnswer:
        asked.append(url)
        region = next(regions)
        element = {"element": f"<Region>{region}</Region>", "words": f"<Message>expecting '{region}'</Message>"}
        body = f"<Error><Code>PermanentRedirect</Code>{element.get(told, '')}</Error>".encode()
        return WholeAnswer(status, {"x-amz-bucket-region": region} if told == "header" else {}, body)

    assert refused(Artifact("s3://models/m.gguf"), KEYS, get).reason == "DownloadFailed"
    assert [urllib.parse.urlsplit(url).hostname for url in asked] == [
        "models.s3.us-east-1.amazonaws.com",
        "models.s3.a-1.amazonaws.com",
    ]


def test_a_refusal_that_names_the_region_we_are_in_is_a_refusal() -> None:
    played = Played(403, b"<Error><Code>AccessDenied</Code></Error>", {"x-amz-bucket-region": s3.DEFAULT_REGION})
    assert refused(Artifact("s3://models/m.gguf"), KEYS, played.get).reason == "SourceUnauthorized"
    assert len(played.asked) == 1


@pytest.mark.parametrize("region", ["evil.test/", "a b", "x" * 40, "é"])
def test_a_region_that_is_none_makes_no_address(region: str) -> None:
    played = Played(301, b"", {"x-amz-bucket-region": region})
    refused(Artifact("s3://models/m.gguf"), KEYS, played.get)
    assert len(played.asked) == 1


@pytest.mark.parametrize("key", ["../m.gguf", "a/./m.gguf", "..", "a/../m/"])
def test_a_key_that_clients_would_shorten_is_refused(key: str) -> None:
    played = Played()
    error = refused(Artifact(f"s3://models/{key}"), KEYS, played.get)
    assert (error.reason, error.retry, played.asked) == ("InvalidModelFile", Retry.NEVER, [])


def listed(*keys: str, more: str = "") -> bytes:
    rows = "".join(f"<Contents><Key>{urllib.parse.quote_plus(key)}</Key><Size>5</Size></Contents>" for key in keys)
    end = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    return f'<ListBucketResult xmlns="x"><EncodingType>url</EncodingType>{rows}{end}</ListBucketResult>'.encode()


@pytest.mark.parametrize(
    "name", ["../x.json", "a/../x.json", "/x.json", "a//x.json", "a\\x.json", "a\nx.json", "x\0.json", "Config.JSON"]
)
def test_a_hostile_name_in_a_listing_is_refused(name: str) -> None:
    played = Played(200, listed("m/config.json", "m/model.safetensors", f"m/{name}"), {})
    wanted = ("config.json", "model.safetensors", name)
    error = refused(Artifact("s3://models/m", True, wanted), KEYS, played.get)
    assert error.reason == ("InvalidModelFile" if name.endswith(".json") else "InvalidModel")


def test_marks_of_directories_are_no_files_and_quoted_names_are_read() -> None:
    body = listed("m/", "m/sub/", "m/config.json", "m/a+b c.json", "m/weights.npz")
    pieces = s3.listing(Artifact("s3://models/m", True), KEYS, Played(200, body, {}).get).pieces
    assert [piece.name for piece in pieces] == ["config.json", "a+b c.json", "weights.npz"]
    assert pieces[1].url.startswith("https://models.s3.us-east-1.amazonaws.com/m/a%2Bb%20c.json?")


@pytest.mark.parametrize("keys", [(), ("m/a.json",), tuple(f"m/{number}.json" for number in range(1000))])
def test_a_listing_without_end_is_left(keys: tuple[str, ...]) -> None:
    played = Played(200, listed(*keys, more="again"), {})
    error = refused(Artifact("s3://models/m", True), KEYS, played.get)
    assert error.reason == "AmbiguousSource" and "more than 4096 objects" in str(error)
    assert len(played.asked) == (5 if len(keys) == 1000 else s3.MOST_PAGES)


LAUGHS = b'<!DOCTYPE l [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><ListBucketResult><Name>&b;</Name></ListBucketResult>'
OUTSIDE = b'<!DOCTYPE l [<!ENTITY a SYSTEM "file:///etc/passwd">]><ListBucketResult>&a;</ListBucketResult>'


@pytest.mark.parametrize(
    "body",
    [
        LAUGHS,
        OUTSIDE,
        b"",
        b"<html>log in</html>",
        b"<ListBucketResult>",
        b"\xff\xfe",
        b"<Error/>",
        b"<ListBucketResult>" + b"<a>" * 9,
        b"<ListBucketResult>" + b" " * (8 << 20) + b"</ListBucketResult>",
        b'<?xml version="1.0" encoding="no-such"?><ListBucketResult/>',
        listed("n/other.json"),
        listed("m/config.json")[:-9],
        LAUGHS.decode().encode("utf-16"),
        LAUGHS.decode().encode("utf-16-le"),
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
        b"<ListBucketResult><EncodingType>url</EncodingType><Contents><Key>m/%FF</Key></Contents></ListBucketResult>",
    ],
    ids=range(16),
)
def test_what_is_no_listing_is_refused(body: bytes) -> None:
    error = refused(Artifact("s3://models/m", True), KEYS, Played(200, body, {}).get)
    assert error.reason == "DownloadFailed" and "no listing of S3's" in str(error)


TAGS = st.sampled_from(["ListBucketResult", "Contents", "Key", "Size", "ETag", "IsTruncated", "EncodingType", "Error"])
TREES = st.recursive(
    st.sampled_from(["m/a.json", "url", "true", "%ff", "9" * 30, "&amp;", "&x;", "٣"]),
    lambda inner: st.tuples(TAGS, st.lists(inner, max_size=4)).map(lambda t: f"<{t[0]}>{''.join(t[1])}</{t[0]}>"),
)


@given(st.one_of(st.binary(), TREES.map(lambda text: f"<ListBucketResult>{text}</ListBucketResult>".encode())))
def test_no_answer_does_worse_than_not_being_one(body: bytes) -> None:
    try:
        found, _ = page(body, "m/")
    except ValueError:
        return
    for each in found:
        assert each.name and (each.size_bytes is None or 0 <= each.size_bytes < 10**18)


WHOLE = base64.b64encode(hashlib.sha256(GGUF).digest()).decode()


@pytest.mark.parametrize(
    ("headers", "sha256"),
    [
        ({"x-amz-checksum-sha256": WHOLE}, True),
        ({"x-amz-checksum-sha256": f"{WHOLE}-3"}, False),
        ({"x-amz-checksum-sha256": WHOLE, "x-amz-checksum-type": "COMPOSITE"}, False),
        ({"x-amz-checksum-sha256": "abcd"}, False),
        ({"x-amz-checksum-sha256": "é"}, False),
        ({}, False),
    ],
    ids=json.dumps,
)
def test_only_the_checksum_of_a_whole_object_counts(headers: dict[str, str], sha256: bool) -> None:
    played = Played(200, b"", {"content-length": "7", **headers})
    (piece,) = s3.listing(Artifact("s3://models/m.gguf"), KEYS, played.get).pieces
    assert (len(piece.sha256) == 64) == sha256 and piece.size_bytes == 7
