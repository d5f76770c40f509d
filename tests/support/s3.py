"""A real S3 server for tests: Versity's gateway over a directory of its own, which checks every signature itself."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import urllib3

from metal_supervisor.models.remote import s3
from metal_supervisor.models.remote.web_answers import WholeAnswer
from tests.support import parts
from tests.support.finders import find_s3
from tests.support.system import eventually, free_ports

ID = "AKIATESTTESTTESTTEST"
SECRET = "secret/of+the=tests"
REGION = "eu-central-1"


def program() -> Path:
    """A real S3 server; the test is skipped where none is to be had, and says why."""
    return parts.found(find_s3.find)


class Server:
    """One server."""

    def __init__(self, base: Path) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.keys = {s3.ID: ID, s3.SECRET: SECRET, "AWS_REGION": REGION, "AWS_ENDPOINT_URL": self.url}
        self.asked: list[tuple[str, str]] = []
        """(method, URL) of every request of `get`."""
        self._http = urllib3.PoolManager()
        store = base / "store"
        store.mkdir(parents=True)
        place = ["--port", f"127.0.0.1:{self.port}", "--region", REGION, "posix", str(store)]
        with (base / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [str(program()), "--quiet", *place],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"HOME": str(base), "ROOT_ACCESS_KEY_ID": ID, "ROOT_SECRET_ACCESS_KEY": SECRET},
            )
        eventually(lambda: self.put("ready", "", b""), 30, "the S3 server to make a bucket")

    def get(self, method: str, url: str, headers: Mapping[str, str]) -> WholeAnswer:
        """One request, as the product's client would make it."""
        self.asked.append((method, url))
        try:
            answer = self._http.request(method, url, headers=dict(headers), retries=False, redirect=False)
            return WholeAnswer(answer.status, answer.headers, answer.data)
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(type(error).__name__) from None

    def put(self, bucket: str, key: str, content: bytes, query: str = "", hashed: bool = False) -> bool:
        """Uploads an object, or makes a bucket if the key is "". `hashed`: the server keeps its SHA-256 too."""
        place = s3.Bucket(bucket, REGION, self.url, None).address(key) + query
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        headers = {"x-amz-checksum-sha256": digest} if hashed else {}
        url = s3.presigned("PUT", place, headers, s3.Credentials(ID, SECRET), REGION, 60)
        try:
            answer = self._http.request("PUT", url, body=content, headers=headers, retries=False)
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(type(error).__name__) from None
        assert answer.status in (200, 204), answer.data
        return True

    def publish(self, bucket: str) -> None:
        """Lets anybody read a bucket."""
        grant = {"Effect": "Allow", "Principal": "*", "Action": ["s3:GetObject", "s3:ListBucket"]}
        policy = {"Statement": [{**grant, "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]}]}
        self.put(bucket, "", json.dumps(policy).encode(), "?policy=")

    def end(self) -> None:
        self._process.kill()
        self._process.wait(30)
        self._http.clear()
