"""Takes Macs that fell silent out of the cluster's traffic: power cut, panic, lost network, sleep without a word.

Nothing in Kubernetes withdraws an endpoint whose machine is gone, so requests would hang in it for minutes. Each Mac
renews a Lease; once one has not changed for as long as it promised to, the Mac's endpoints are marked as gone. The
Mac marks them as ready again when it is back. Clocks of two machines are never compared: what counts is how long *we*
watched a Lease not change, and while the API was away or this process stood still, nobody grew any older.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

ACCOUNT = Path(os.environ.get("ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount"))
PERIOD_S = float(os.environ.get("PERIOD_S", "5"))
TTL_S = float(os.environ.get("TTL_S", "40"))  # for the slices of a Mac that has no Lease
ME = "metal-reaper"
KIND, NODE, REAPED = (f"metal-supervisor.io/{name}" for name in ("kind", "node", "reaped"))
MANAGED = "endpointslice.kubernetes.io/managed-by=metal-supervisor"
LEASES, SLICES = ("coordination.k8s.io", "leases"), ("discovery.k8s.io", "endpointslices")
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
TIME = "%Y-%m-%dT%H:%M:%S.000000Z"
DEAD = {"ready": False, "serving": False, "terminating": False}
FAILURES = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError)


def call(method: str, what: tuple[str, str], name: str, query: dict, body: dict | None = None, kind: str = "") -> dict:
    """One request about the namespace's objects; the token is read anew, because Kubernetes replaces it."""
    host = os.environ.get("API_URL") or "https://{KUBERNETES_SERVICE_HOST}:{KUBERNETES_SERVICE_PORT}".format(
        **os.environ
    )
    namespace = os.environ.get("NAMESPACE") or (ACCOUNT / "namespace").read_text().strip()
    path = f"/apis/{what[0]}/v1/namespaces/{namespace}/{what[1]}{name and '/' + name}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{host}{path}?{urllib.parse.urlencode(query)}", data, method=method)
    handlers: list = [urllib.request.ProxyHandler({})]
    if data:
        request.add_header("Content-Type", kind)
    if host.startswith("https:"):
        request.add_unredirected_header("Authorization", f"Bearer {(ACCOUNT / 'token').read_text().strip()}")
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))))
    with urllib.request.build_opener(*handlers).open(request, timeout=10) as answer:
        return json.load(answer)


class Reaper:
    """What has been seen so far."""

    def __init__(self) -> None:
        self.listened_s = 0.0  # time during which we could have heard something
        self.last = time.monotonic()
        self.seen: dict[str, tuple[str, float]] = {}  # node -> (version of its Lease, when we first saw that)

    def listen(self) -> None:
        """Proves with our own Lease that writes work, then lets time pass, but never more than was watched."""
        spec = {"holderIdentity": ME, "leaseDurationSeconds": max(1, round(4 * PERIOD_S))}
        spec["renewTime"] = time.strftime(TIME, time.gmtime())
        own = {"name": ME, "labels": {KIND: "reaper"}}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": own, "spec": spec}
        call("PATCH", LEASES, ME, {"fieldManager": ME, "force": "true"}, lease, APPLY)
        self.last, before = time.monotonic(), self.last
        self.listened_s += min(self.last - before, 2 * PERIOD_S)

    def silence(self, node: str, lease: dict | None) -> tuple[float, float]:
        """(for how long that Mac has been silent, how long it may be), in seconds."""
        version = lease["metadata"]["resourceVersion"] if lease else ""
        if node not in self.seen or self.seen[node][0] != version:
            self.seen[node] = version, self.listened_s
        spec = lease.get("spec") or {} if lease else {"holderIdentity": node}
        limit_s = float(spec.get("leaseDurationSeconds") or TTL_S)
        # Without a holder it said itself that it leaves.
        return self.listened_s - self.seen[node][1], limit_s if spec.get("holderIdentity") else 0.0

    def tick(self) -> None:
        """Looks at all Macs and their endpoints once."""
        self.listen()
        found = call("GET", LEASES, "", {"labelSelector": f"{KIND}=node"})["items"]
        leases = {each["metadata"]["name"]: each for each in found}
        slices = call("GET", SLICES, "", {"labelSelector": f"{MANAGED},{NODE}"})["items"]
        nodes = {each["metadata"]["labels"][NODE] for each in slices}
        silences = {node: self.silence(node, leases.get(f"metal-{node}")) for node in nodes}
        self.seen = {node: self.seen[node] for node in nodes}
        for each in slices:
            silent_s, limit_s = silences[each["metadata"]["labels"][NODE]]
            conditions = [one.get("conditions") or {} for one in each.get("endpoints") or []]
            if silent_s >= limit_s and any(one.get("ready") is not False or one.get("serving") for one in conditions):
                self.reap(each, silent_s)

    def reap(self, found: dict, silent_s: float) -> None:
        """Marks the endpoints as gone, unless their Mac was faster: then their version is another."""
        name, version, node = (found["metadata"][key] for key in ("name", "resourceVersion", "labels"))
        body = {"metadata": {"resourceVersion": version, "annotations": {REAPED: time.strftime(TIME, time.gmtime())}}}
        body["endpoints"] = [{**each, "conditions": DEAD} for each in found["endpoints"]]
        try:
            call("PATCH", SLICES, name, {"fieldManager": ME}, body, MERGE)
            print(f"reaped {name}: {node[NODE]} is silent for {silent_s:.0f} s", flush=True)
        except urllib.error.HTTPError as error:
            error.close()  # Python 3.14 warns of one that is left to the collector
            if error.code not in (404, 409):
                print(f"cannot reap {name}: {error.code} {error.reason}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as process 1 it would otherwise be deaf to it
    reaper = Reaper()
    while True:
        try:
            reaper.tick()
        except FAILURES as error:
            reaper.last = time.monotonic()
            print(f"tick failed: {type(error).__name__} {str(error)[:200]} {getattr(error, 'url', '')}", flush=True)
        time.sleep(PERIOD_S * random.uniform(0.9, 1.1))
