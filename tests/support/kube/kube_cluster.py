#!/usr/bin/env python3
"""A real kube-apiserver with etcd on loopback, for tests: what our own embedded API is compared with.

    python -m tests.support.kube.kube_cluster build          builds the binaries, once (see kube_binaries.py)
    python -m tests.support.kube.kube_cluster available      succeeds if there are binaries, or Go to build them with
    python -m tests.support.kube.kube_cluster run [CRDS …] a server in the foreground, with these CRDs;
                                                prints the path of its kubeconfig; Ctrl-C ends it

Everything is as in a cluster (RBAC, watch cache, admission, garbage collection), but that nobody runs Pods, and that
data needn't survive a power cut. It listens on free loopback ports, keeps its data in a temporary directory, and is
gone when the process that started it is, even if that was killed.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from tests.support.kube import kube_binaries
from tests.support.kube.kube_guard import Guard

READY_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 30.0
SERVICE_RANGE = "10.96.0.0/16"
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CONTROLLERS = "garbage-collector-controller,namespace-controller,resourcequota-controller"
MANAGER = "kube-cluster"


class ClusterError(Exception):
    """The server did not start, or refused something; the text says why."""


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on just now."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in socks]


def signing_key() -> str:
    """A new P-256 private key in PEM. The structure is fixed around 32 random bytes, so that takes no library."""
    number = b"\x00" + secrets.token_bytes(31)
    text = base64.b64encode(bytes.fromhex("30310201010420") + number + bytes.fromhex("a00a06082a8648ce3d030107"))
    return f"-----BEGIN EC PRIVATE KEY-----\n{text.decode()}\n-----END EC PRIVATE KEY-----\n"


class KubeCluster:
    """One server. `with KubeCluster(directory) as cluster:`; all files are below the directory."""

    def __init__(self, directory: Path, binaries: Path | None = None) -> None:
        self.binaries = binaries or kube_binaries.find()
        self.directory = directory
        self.token = secrets.token_hex(16)
        """Bearer token of a member of system:masters."""
        self.port, self.etcd_port, self._peer_port = free_ports(3)
        self.url = f"https://127.0.0.1:{self.port}"
        self.ca_file = directory / "ca.crt"
        """Made by the server at its first start."""
        self._certificates = directory / "certificates"
        self._guard = Guard()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    # ---- life ----------------------------------------------------------------------------------

    def __enter__(self) -> KubeCluster:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts etcd and the API server, and waits until it serves."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("tokens.csv", f'{self.token},admin,admin,"system:masters"\n'),
            ("service-accounts.key", signing_key()),
        ):
            path = self.directory / name
            path.touch(mode=0o600)
            path.write_text(text)
        self._start_etcd()
        self.start_apiserver()

    def close(self) -> None:
        """Ends everything. Nothing is kept that would need a slow farewell."""
        for name in ("kube-controller-manager", "kube-apiserver", "etcd"):
            if process := self._processes.pop(name, None):
                self._guard.kill(process)
        self._guard.close()

    def _start(self, name: str, *flags: str) -> None:
        command = [str(self.binaries / name), *flags]
        self._processes[name] = self._guard.start(command, self._log(name), cwd=self.directory)

    def pid(self, name: str) -> int:
        """Of a running process, by its program's name."""
        return self._processes[name].pid

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def _start_etcd(self) -> None:
        client, peer = f"http://127.0.0.1:{self.etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        self._start(
            "etcd",
            "--name=test",
            f"--data-dir={self.directory / 'etcd'}",
            "--log-level=warn",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=test={peer}",
        )

    def start_apiserver(self) -> None:
        """Starts the API server on its port, with the data that etcd has, and waits until it serves."""
        key = self.directory / "service-accounts.key"
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={self._certificates}",
            f"--token-auth-file={self.directory / 'tokens.csv'}",
            "--anonymous-auth=false",
            "--authorization-mode=RBAC",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--disable-admission-plugins=ServiceAccount",
            "--endpoint-reconciler-type=none",
            "--shutdown-delay-duration=0s",
            "--profiling=false",
        )
        self.wait_ready()

    def stop_apiserver(self) -> None:
        """Ends the API server; its port refuses connections then."""
        self._guard.kill(self._processes.pop("kube-apiserver"))

    @contextlib.contextmanager
    def stopped(self) -> Iterator[Path]:
        """Ends every process; yields etcd's data directory, and starts them again with what it has then."""
        names = [name for name in ("kube-controller-manager", "kube-apiserver", "etcd") if name in self._processes]
        for name in names:
            self._guard.kill(self._processes.pop(name))
        yield self.directory / "etcd"
        self._start_etcd()
        self.start_apiserver()
        if "kube-controller-manager" in names:
            self.start_controllers()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until the server says it is ready. Raises ClusterError with the end of the logs."""
        until_s = time.monotonic() + timeout_s
        state: object = None
        while time.monotonic() < until_s:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise ClusterError(f"{name} ended with {process.returncode}:\n{self._tail(name)}")
            try:
                self._take_ca()
                code, state = self.request("GET", "/readyz")
                if code == 200:
                    return
            except (OSError, ValueError, http.client.HTTPException) as error:
                state = error
            time.sleep(0.05)
        raise ClusterError(f"not ready within {timeout_s:.0f} s: {state}\n{self._tail('kube-apiserver')}")

    def _tail(self, name: str) -> str:
        return "\n".join(self._log(name).read_text("utf-8", "replace").splitlines()[-20:])

    def _take_ca(self) -> None:
        """The server signs its certificate with an authority made for it, which comes last in the file.

        At each look anew: the server may be writing the file.
        """
        mark = "-----BEGIN CERTIFICATE-----"
        chain = (self._certificates / "apiserver.crt").read_text()
        (self.directory / "ca.part").write_text(mark + chain.split(mark)[-1])
        (self.directory / "ca.part").rename(self.ca_file)

    def start_controllers(self) -> None:
        """Starts garbage collection, quotas, removal of namespaces. After the CRDs, as it learns of new ones late."""
        config = self.kubeconfig(self.directory / "controllers.kubeconfig")
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={config}",
            f"--controllers={CONTROLLERS}",
            "--leader-elect=false",
            "--secure-port=0",
            "--concurrent-gc-syncs=2",
        )

    @property
    def has_controllers(self) -> bool:
        """Whether there is a kube-controller-manager."""
        return kube_binaries.complete(self.binaries, ("kube-controller-manager",))

    # ---- use -----------------------------------------------------------------------------------

    def request(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> tuple[int, Any]:
        """(status, JSON or text) of one request as the administrator."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=REQUEST_TIMEOUT_S, context=context)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Authorization": f"Bearer {self.token}", "Content-Type": kind})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def _expect(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        code, answer = self.request(method, path, body, kind)
        if code >= 300:
            raise ClusterError(f"{method} {path}: {code} {answer}")
        return answer

    def kubeconfig(self, path: Path, token: str | None = None, namespace: str | None = None) -> Path:
        """Writes a kubeconfig, the administrator's by default, and returns its path."""
        context = {"cluster": "test", "user": "test", **({"namespace": namespace} if namespace else {})}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.ca_file)}}],
            "users": [{"name": "test", "user": {"token": token or self.token}}],
            "contexts": [{"name": "test", "context": context}],
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))
        return path

    def apply_crds(self, directory: Path) -> list[str]:
        """Installs all CRDs of a directory and waits until each is established. Returns their names."""
        applied = {}
        for path in sorted(directory.glob("*.yaml")):
            for crd in yaml.safe_load_all(path.read_text("utf-8")):
                if crd and crd.get("kind") == "CustomResourceDefinition":
                    name = crd["metadata"]["name"]
                    where = f"{CRD_PATH}/{name}?{urlencode({'fieldManager': MANAGER, 'force': 'true'})}"
                    applied[name] = self._expect("PATCH", where, crd, "application/apply-patch+yaml")
        until_s = time.monotonic() + READY_TIMEOUT_S
        for name, crd in applied.items():
            while not _established(crd):
                if time.monotonic() > until_s:
                    raise ClusterError(f"{name} is not established: {crd.get('status')}")
                time.sleep(0.02)
                crd = self._expect("GET", f"{CRD_PATH}/{name}")  # noqa: PLW2901
            version = crd["spec"]["versions"][0]["name"]
            served = f"/apis/{crd['spec']['group']}/{version}/{crd['spec']['names']['plural']}"
            while self.request("GET", served)[0] == 404 and time.monotonic() < until_s:
                time.sleep(0.02)  # established, and yet a moment before it is served
        return list(applied)

    def service_account_token(self, namespace: str, name: str) -> str:
        """A token of a ServiceAccount, which is made if need be. What it may do is for RBAC to say."""
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        code, answer = self.request("POST", accounts, {"metadata": {"name": name}})
        if code not in (201, 409):
            raise ClusterError(f"ServiceAccount {namespace}/{name}: {code} {answer}")
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        return str(self._expect("POST", f"{accounts}/{name}/token", asked)["status"]["token"])

    def compact_etcd(self) -> int:
        """Forgets all history before now, as etcd does every few minutes; returns the revision that is left."""
        key = base64.b64encode(b"/").decode()
        revision = int(self._etcd("range", {"key": key})["header"]["revision"])
        self._etcd("compaction", {"revision": str(revision), "physical": True})
        return revision

    def _etcd(self, call: str, body: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.etcd_port, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.request("POST", f"/v3/kv/{call}", json.dumps(body))
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise ClusterError(f"etcd {call}: {response.status} {text}")
        return json.loads(text)


def _established(crd: dict[str, Any]) -> bool:
    conditions = crd.get("status", {}).get("conditions") or []
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


@contextlib.contextmanager
def temporary_cluster() -> Iterator[KubeCluster]:
    """A server whose files are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kube-cluster-") as directory, KubeCluster(Path(directory)) as cluster:
        yield cluster


def run(crds: list[Path]) -> int:
    """A server in the foreground, until SIGINT or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        started_s = time.monotonic()
        with temporary_cluster() as cluster:
            for directory in crds:
                cluster.apply_crds(directory)
            if cluster.has_controllers:
                cluster.start_controllers()
            path = cluster.kubeconfig(cluster.directory / "kubeconfig")
            kube_binaries.say(f"{cluster.url} is ready after {time.monotonic() - started_s:.1f} s; Ctrl-C ends it")
            print(path, flush=True)
            signal.pause()
    except KeyboardInterrupt:
        pass
    return 0


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in ("run", "build", "available") or (argv[0] != "run" and len(argv) > 1):
        print(__doc__, file=sys.stderr)
        return 0 if argv in (["-h"], ["--help"]) else 2
    try:
        if argv[0] == "available":
            return 0 if kube_binaries.available() else 1
        if argv[0] == "build":
            print(kube_binaries.find())
            return 0
        return run([Path(name).expanduser() for name in argv[1:]])
    except (kube_binaries.NotAvailable, kube_binaries.BuildFailed, ClusterError) as error:
        kube_binaries.say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
