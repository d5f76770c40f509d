"""The whole agent beside a real API server: Macs in a namespace of their own, and a log of all that they ask for.

The helpers in tests/support (system.py, macs.py) speak of the namespace `default`; here it stands for the test's own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from metal_supervisor.cluster.kube import Kube, KubeError
from tests.cluster.server import KubeCluster
from tests.support.macs import Fleet, Mac, ended
from tests.support.system import SLICES

Object = dict[str, Any]
Right = tuple[str, str, str]
"""(API group, resource or resource/subresource, verb)."""


class OwnKube(Kube):
    """The administrator, for whom `default` is the test's namespace."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        super().__init__(kubeconfig)
        self.namespace = namespace

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        if body is not None and isinstance(body.get("metadata"), dict) and body["metadata"].get("namespace"):
            body = {**body, "metadata": {**body["metadata"], "namespace": self.namespace}}
        return super().request(method, self.own(path), query, body, content_type)

    def own(self, path: str) -> str:
        return path.replace("/namespaces/default/", f"/namespaces/{self.namespace}/")

    def changes(self, path: str, name: str, version: str, lasts_s: int = 1) -> list[Object]:
        """Every edition of an object since a resourceVersion, as a watch gives them."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": lasts_s}
        with contextlib.closing(self.stream(self.own(path), query)) as answer:
            events = [json.loads(line) for line in answer.data.splitlines() if line.strip()]
        return [event["object"] for event in events if event["object"].get("metadata", {}).get("name") == name]


class AgentMac(Mac):
    """A Mac that serves one namespace of a real cluster. The test looks at it as the administrator."""

    def __init__(
        self,
        base: Path,
        name: str,
        number: int,
        cluster: KubeCluster,
        namespace: str,
        *flags: str,
        login: Path | None = None,
    ) -> None:
        """`login`: the agent's kubeconfig, the administrator's by default."""
        base.mkdir(parents=True, exist_ok=True)
        self.namespace = namespace
        self.admin = cluster.kubeconfig(base / "admin", namespace=namespace)
        super().__init__(base, name, login or self.admin, number, "--namespace", namespace, *flags)

    @property
    def kubeconfig(self) -> Path:
        return self.admin

    @property
    def kube(self) -> OwnKube:
        if not isinstance(self._kube, OwnKube):
            self._kube = OwnKube(self.admin, self.namespace)
        return self._kube

    def pid(self, name: str = "tiny") -> int:
        note = self.files.run_note(f"{self.namespace}.{name}")
        row = self.rpc.table().get(f"{self.namespace}.{name}")
        if row is None or not row.pid:
            return 0
        return note.pid if note and note.launcher_pid == row.pid else row.pid

    def report(self) -> Object:
        """What /status says."""
        return dict(json.loads(self.fetch("/status")[1]))

    def log_lengths(self) -> dict[str, int]:
        """How much the controller and the sidecar have logged by now."""
        logs = {name: self.state / "log" / f"{name}.log" for name in ("controller", "sidecar")}
        return {name: path.stat().st_size for name, path in logs.items() if path.exists()}

    def logged(self, since: Mapping[str, int] | None = None) -> str:
        """What they have logged, since `log_lengths` if given."""
        text = b""
        for name in self.log_lengths():
            text += (self.state / "log" / f"{name}.log").read_bytes()[(since or {}).get(name, 0) :]
        return text.decode(errors="replace")

    def get_engine(self, port: int) -> int:
        """What the engine on a port of this machine answers when it is asked for its health."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status


class AgentFleet(Fleet):
    """Several of them, in one namespace."""

    def __init__(self, base: Path, cluster: KubeCluster, namespace: str, *flags: str) -> None:
        super().__init__(base, cluster.kubeconfig(base / "cluster-kubeconfig", namespace=namespace), *flags)
        self.kube.close()
        self.kube = OwnKube(self.kubeconfig, namespace)
        self.cluster, self.namespace = cluster, namespace

    def add(self, name: str, *flags: str, login: Path | None = None, **more: Any) -> AgentMac:
        mac = AgentMac(
            self.base / name, name, len(self.macs) + 11, self.cluster, self.namespace, *self.flags, *flags, login=login
        )
        self.macs.append(mac)
        mac.start()
        return mac


@contextlib.contextmanager
def agents(base: Path, cluster: KubeCluster, namespace: str, *flags: str) -> Iterator[AgentFleet]:
    """Macs that are gone afterwards; what they said is shown if the test fails."""
    with ended(AgentFleet(base, cluster, namespace, *flags)) as found:
        yield found


class Sampler:
    """Looks at all EndpointSlices again and again, and keeps for how long a service had two ready ones."""

    def __init__(self, kube: Kube, every_s: float = 0.05) -> None:
        self._kube, self._every_s = kube, every_s
        self._over = threading.Event()
        self._since: dict[str, float] = {}
        self.longest_s: dict[str, float] = {}
        """Service -> the longest time on end with more than one ready Mac."""
        self.samples = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            with contextlib.suppress(KubeError):
                self._look()

    def _look(self) -> None:
        ready: dict[str, set[str]] = {}
        for each in self._kube.request("GET", SLICES)["items"]:
            labels = each["metadata"].get("labels", {})
            if each["endpoints"] and each["endpoints"][0]["conditions"]["ready"]:
                ready.setdefault(labels["kubernetes.io/service-name"], set()).add(labels["metal-supervisor.io/node"])
        now = time.monotonic()
        self.samples += 1
        for service in ready.keys() | self._since.keys():
            if len(ready.get(service, ())) > 1:
                since = self._since.setdefault(service, now)
                self.longest_s[service] = max(self.longest_s.get(service, 0.0), now - since)
            else:
                self._since.pop(service, None)

    def end(self) -> float:
        """Ends; the longest overlap of any service in seconds."""
        self._over.set()
        self._thread.join(30)
        return max(self.longest_s.values(), default=0.0)


# ── what accounts asked for ──────────────────────────────────────────────────────────────────────

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
}


class AuditedCluster(KubeCluster):
    """A server of its own that keeps a record of every request of a service account."""

    @property
    def audit_file(self) -> Path:
        return self.directory / "audit.log"

    def _start(self, name: str, *flags: str) -> None:
        if name == "kube-apiserver":
            policy = self.directory / "audit-policy.json"
            policy.write_text(json.dumps(POLICY))
            flags = (*flags, f"--audit-policy-file={policy}", f"--audit-log-path={self.audit_file}")
        super()._start(name, *flags)

    def audit(self, account: str, since: int = 0) -> list[Object]:
        """The requests of `<namespace>:<name>`, oldest first; `since`: how many lines to leave out."""
        user = f"system:serviceaccount:{account}"
        lines = self.audit_file.read_text().splitlines(keepends=True)[since:]
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [each for each in found if each["user"]["username"] == user]

    def audited(self) -> int:
        """How many lines there are by now."""
        return len(self.audit_file.read_text().splitlines())


def rights_used(events: list[Object]) -> set[Right]:
    """What the requests needed. An apply that creates is a patch that needs the right to create, too."""
    used = set()
    for each in events:
        where = each.get("objectRef") or {}
        if "resource" not in where:
            continue  # /version and the like
        name = "/".join(part for part in (where["resource"], where.get("subresource")) if part)
        verbs = {each["verb"]} | ({"create"} if each.get("responseStatus", {}).get("code") == 201 else set())
        used |= {(where.get("apiGroup", ""), name, verb) for verb in verbs}
    return used


def refused(events: list[Object]) -> list[str]:
    """The requests that were forbidden, as `verb URI`."""
    return [
        f"{each['verb']} {each['requestURI']}"
        for each in events
        if each.get("responseStatus", {}).get("code") in (401, 403)
        or each.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid"
    ]
