"""A fleet of Macs on a real kube-apiserver: its cost at rest, and how it takes a start, an outage, edits and losses.

    python -m tests.fleet.fleet [--macs 100] [--services 1000] [--rest-s 630] [--whole]

`mac.py` says which part of a Mac is real. All Macs share this machine with the API server, so times until something
has happened are upper bounds, and the CPU of the workers is not that of Macs; --whole adds one whole Mac, with
stand-ins for its engines, whose processes are measured. Requests are counted where they leave a Mac.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from metal_supervisor.cluster.kube import MERGE, Kube
from metal_supervisor.placement import leases
from tests.cluster.server import crd_directory
from tests.fleet.figures import Figures, Span
from tests.fleet.mac import Held
from tests.fleet.tally import Requests
from tests.fleet.worker import Order, Worker
from tests.support.kube.kube_cluster import KubeCluster
from tests.support.macs import Mac
from tests.support.system import FAKE_ENGINE, eventually, model, service

API = "/apis/inference.llmkube.dev/v1alpha1"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    macs: int = 100
    services: int = 1000
    namespaces: int = 1
    lost: int = 10
    """Macs that vanish at once."""
    workers: int = 4
    lease_s: float = 40.0
    rest_s: float = 630.0
    """Longer than anything that the product does now and then."""
    quiet_s: float = 10.0
    """After the last status, until rest is rest."""
    after_s: float = 60.0
    """For which the requests after an event are counted."""
    down_s: float = 5.0
    """For which the API server is gone."""
    within_s: float = 600.0
    """Bound on each wait."""
    whole: bool = False
    """One whole Mac comes to them before rest is measured."""


def spaces(plan: Plan) -> list[str]:
    """The namespaces."""
    return [f"fleet-{number}" for number in range(plan.namespaces)]


class History:
    """Holders of all claims over time, by a watch of their Leases that lasts through restarts of the API server."""

    def __init__(self, kube: Kube) -> None:
        self._kube, self._over = kube, threading.Event()
        self.changes: list[tuple[float, str, str, str]] = []
        """(monotonic time, Lease as namespace/name, holder before, holder now)."""
        self.holders: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the watch."""
        self._over.set()
        self._kube.close()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(Exception):
                self._look()
            time.sleep(0.2)

    def _look(self) -> None:
        path, selector = "/apis/coordination.k8s.io/v1/leases", {"labelSelector": f"{leases.KIND}=claim"}
        found = self._kube.request("GET", path, selector)
        for item in found["items"]:
            self._see(item)
        query = {
            "watch": "true",
            "resourceVersion": found["metadata"]["resourceVersion"],
            "timeoutSeconds": 3000,
            "allowWatchBookmarks": "true",
            **selector,
        }
        with contextlib.closing(self._kube.stream(path, query)) as answer:
            buffer = b""
            for chunk in answer.stream(amt=None, decode_content=False):
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in filter(None, lines):
                    event = json.loads(line)
                    if event["type"] in ("ADDED", "MODIFIED"):
                        self._see(event["object"])

    def _see(self, item: dict[str, Any]) -> None:
        name, now = f"{item['metadata']['namespace']}/{item['metadata']['name']}", item["spec"]["holderIdentity"]
        before = self.holders.get(name, "")
        if now != before:
            self.changes.append((time.monotonic(), name, before, now))
            self.holders[name] = now

    def since(self, at: float) -> list[tuple[float, str, str, str]]:
        """The changes since a moment."""
        return [each for each in list(self.changes) if each[0] >= at]


def overlaps(held: dict[str, list[Held]], until: dict[str, float]) -> list[str]:
    """Slots that two Macs took for their own at the same time. `until`: when Macs vanished, with all they held."""
    spans: dict[tuple[Any, ...], list[tuple[float, float, str]]] = {}
    for mac, changes in held.items():
        begun: dict[tuple[Any, ...], float] = {}
        for at, key, slot, holds in changes:
            if holds:
                begun[(*key, slot)] = at
            else:
                spans.setdefault((*key, slot), []).append((begun.pop((*key, slot)), at, mac))
        for where, at in begun.items():
            spans.setdefault(where, []).append((at, until.get(mac, float("inf")), mac))
    found = []
    for where, each in spans.items():
        each.sort()
        found += [
            f"{where}: {first[2]} until {first[1]:.2f}, {second[2]} from {second[0]:.2f}"
            for first, second in itertools.pairwise(each)
            if first[2] != second[2] and second[0] < first[1]
        ]
    return found


@dataclass
class Fleet:
    """The cluster, the workers, and what they have told."""

    plan: Plan
    cluster: KubeCluster
    kube: Kube
    workers: list[Worker]
    victims: Worker
    history: History
    whole: Mac | None = None
    requests: Requests = field(default_factory=Requests)
    held: dict[str, list[Held]] = field(default_factory=dict)
    passes: dict[str, tuple[int, float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    worker_s: dict[int, float] = field(default_factory=dict)

    def hear(self) -> None:
        """Take over what the Macs have counted."""
        for worker in self.workers:
            told = worker.told()
            self.requests.add(told["requests"])
            for mac, changes in told["held"].items():
                self.held.setdefault(mac, []).extend(changes)
            self.passes.update(told["passes"])
            self.worker_s[worker.process.pid or 0] = told["cpu_s"]
            self.errors += [each for each in told["errors"] if each not in self.errors]

    def cpu_s(self) -> dict[str, float]:
        """CPU so far, by process; that of all workers together."""
        servers = {name: psutil.Process(self.cluster.pid(name)) for name in ("kube-apiserver", "etcd")}
        found = {name: sum(process.cpu_times()[:2]) for name, process in servers.items()}
        if self.whole is not None and self.whole.process is not None:
            for name in ("controller", "sidecar"):
                found[f"whole Mac's {name}"] = sum(psutil.Process(self.whole.own_pid(name)).cpu_times()[:2])
        return {**found, "all Macs": sum(self.worker_s.values())}

    @contextlib.contextmanager
    def span(self) -> Iterator[Span]:
        """Measure what happens inside. Times are whole seconds, as the requests are counted by them."""
        found, since = Span(macs=len(self.macs)), time.monotonic()
        self.hear()
        before = self.cpu_s()
        yield found
        self.hear()
        found.seconds, after = time.monotonic() - since, self.cpu_s()
        found.cpu_s = {name: after[name] - before.get(name, 0.0) for name in after if after[name] >= before[name]}
        found.requests = self.requests.total(since, time.monotonic())

    @property
    def macs(self) -> list[str]:
        return [name for worker in self.workers for name in worker.names]

    def everywhere(self, action: Callable[[str, int], None]) -> float:
        """Perform an action for each service by its namespace and number, eight at a time; return the seconds."""
        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: action(self.space_of(number), number), range(self.plan.services)))
        return time.monotonic() - began

    def space_of(self, number: int) -> str:
        return spaces(self.plan)[number % self.plan.namespaces]

    def wait(self, look: Callable[[], object], what: str) -> None:
        eventually(look, self.plan.within_s, what)

    def all_ready(self) -> bool:
        """True if each status says Ready."""
        found = self.kube.request("GET", f"{API}/inferenceservices")["items"]
        time.sleep(1)  # a look costs the server as much as all that it is looked at for
        return all((each.get("status") or {}).get("phase") == "Ready" for each in found)

    # ── what is measured ─────────────────────────────────────────────────────────────────────────

    def create(self, source: str) -> None:
        """The namespaces, a Model for each service, and the services."""
        for name in spaces(self.plan):
            self.kube.request("POST", "/api/v1/namespaces", None, {"metadata": {"name": name}})

        def one(space: str, number: int) -> None:
            name = f"svc-{number:04}"
            for kind, body in (("models", model(name, source)), ("inferenceservices", service(name, name))):
                body["metadata"]["namespace"] = space
                self.kube.request("POST", f"{API}/namespaces/{space}/{kind}", None, body)

        self.everywhere(one)

    def cold_start(self, figures: Figures) -> None:
        with self.span() as figures.cold:
            since = time.monotonic()
            for worker in self.workers:
                worker.start()
            self.wait(lambda: len(self.history.holders) == self.plan.services, "all to be claimed")
            figures.claimed_s = max(at for at, *_ in self.history.changes) - since
            for worker in self.workers:
                worker.started()
        until = since + figures.claimed_s
        figures.refused_claims = self.requests.refusals(since, until)
        self.wait(self.all_ready, "all to be Ready")
        figures.ready_s = time.monotonic() - since
        figures.claims = len(self.history.since(since))
        self.hear()
        figures.cold_worst = self.requests.worst_second(since, time.monotonic())

    def rest(self, figures: Figures) -> None:
        if self.whole is not None:
            self.whole.start()  # not before all is claimed: alone it would claim everything
        time.sleep(self.plan.quiet_s)
        with self.span() as figures.rest:
            before = dict(self.passes)
            time.sleep(self.plan.rest_s)
        counts = [count - before[mac][0] for mac, (count, _) in self.passes.items()]
        figures.passes_a_minute = sum(counts) / len(counts) / figures.rest.minutes

    def restart(self, figures: Figures) -> None:
        since = time.monotonic()
        with self.span() as figures.restart:
            self.cluster.stop_apiserver()
            time.sleep(self.plan.down_s)
            self.cluster.start_apiserver()
            self.kube.close()
            time.sleep(self.plan.after_s)
        figures.restart.cpu_s["kube-apiserver"] = self.cpu_s()["kube-apiserver"]  # of the new process
        figures.restart_worst = self.requests.worst_second(since, time.monotonic())
        figures.restart_moves = len(self.history.since(since))

    def edit(self, figures: Figures) -> None:
        def one(space: str, number: int) -> None:
            path = f"{API}/namespaces/{space}/models/svc-{number:04}"
            self.kube.request("PATCH", path, None, {"spec": {"hardware": {"memoryBudget": "8Gi"}}}, MERGE)

        with self.span() as figures.edit:
            figures.edit_s = self.everywhere(one)
            time.sleep(self.plan.after_s)

    def vanish(self, figures: Figures) -> None:
        self.hear()
        lost = set(self.victims.names)
        theirs = [name for name, holder in self.history.holders.items() if holder in lost]
        figures.vanished, figures.lost_slots = len(lost), len(theirs)
        self.workers.remove(self.victims)
        for mac in lost:
            self.passes.pop(mac)
        self.worker_s.pop(self.victims.process.pid or 0)
        since = time.monotonic()
        with self.span() as figures.vanish:
            self.victims.kill()
            self.wait(lambda: all(self.history.holders[each] not in lost for each in theirs), "their slots to move")
            figures.moved_s = max((at for at, *_ in self.history.since(since)), default=since) - since
            self.wait(lambda: not self._announced(lost), "their endpoints to be withdrawn")
            figures.withdrawn_s = time.monotonic() - since
            self.wait(self.all_ready, "all to be Ready elsewhere")
            time.sleep(max(0.0, self.plan.after_s + since - time.monotonic()))
        figures.vanish_worst = self.requests.worst_second(since, time.monotonic())
        figures.living_moves = sum(before not in lost for _, _, before, _ in self.history.since(since))
        figures.overlaps = overlaps(self.held, dict.fromkeys(lost, since))

    def _announced(self, nodes: set[str]) -> list[str]:
        """Slices of these Macs that say ready."""
        found = []
        for space in spaces(self.plan):
            path = f"/apis/discovery.k8s.io/v1/namespaces/{space}/endpointslices"
            query = {"labelSelector": f"{leases.NODE} in ({','.join(sorted(nodes))})"}
            found += [
                each["metadata"]["name"]
                for each in self.kube.request("GET", path, query)["items"]
                if any(point["conditions"]["ready"] for point in each["endpoints"])
            ]
        return found


@contextlib.contextmanager
def fleet(plan: Plan, base: Path) -> Iterator[Fleet]:
    """A cluster with its Macs, which are made and not started."""
    with KubeCluster(base / "cluster") as cluster, contextlib.ExitStack() as stack:
        cluster.apply_crds(crd_directory())
        if cluster.has_controllers:
            cluster.start_controllers()
        kubeconfig = cluster.kubeconfig(base / "kubeconfig")
        history = History(Kube(kubeconfig))
        stack.callback(history.end)
        kube = Kube(kubeconfig)
        stack.callback(kube.close)
        names = [f"mac-{number:03}" for number in range(plan.macs)]
        groups = [names[: plan.lost]]
        rest = names[plan.lost :]
        groups += [rest[number :: plan.workers] for number in range(plan.workers)]
        scope = spaces(plan)[0] if plan.namespaces == 1 else ""
        part = (os.cpu_count() or 1) / plan.macs
        workers, first = [], 0
        for number, group in enumerate(each for each in groups if each):
            order = Order(base / f"worker-{number}", kubeconfig, tuple(group), first, scope, plan.lease_s, part)
            workers.append(Worker(order))
            first += len(group)
            stack.callback(workers[-1].kill)
        for worker in workers:
            worker.built()
        whole = None
        if plan.whole:
            flags = ("--namespace", scope, "--lease-duration", str(plan.lease_s))
            whole = Mac(base / "whole", "mac-whole", kubeconfig, 200, *flags, engine=FAKE_ENGINE)
            stack.callback(whole.close)
        yield Fleet(plan, cluster, kube, workers, workers[0], history, whole)


def measure(plan: Plan, say: Callable[[str], None] = lambda _: None) -> Figures:
    """All figures of one fleet."""
    figures = Figures(plan.macs, plan.services, plan.namespaces, plan.lease_s)
    with tempfile.TemporaryDirectory(prefix="fleet-") as directory, fleet(plan, Path(directory)) as found:
        found.create(str(found.whole.tiny) if found.whole else "/models/simulated.gguf")
        for phase in (found.cold_start, found.rest, found.restart, found.edit, found.vanish):
            say(f"{phase.__name__} …")
            phase(figures)
        found.hear()
        figures.errors = found.errors
    return figures


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Plan()).items():
        if isinstance(value, bool):
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s {text}", flush=True)

    figures = measure(Plan(**vars(parser.parse_args())), say)
    print(figures.table(), flush=True)


if __name__ == "__main__":
    main()
