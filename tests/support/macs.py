"""Several Macs under test: each a whole system of its own on this machine, all of one cluster.

The addresses they advertise are of the documentation range and are never dialled; their engines listen on
loopback, on ports of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil

from metal_supervisor.apiserver import Options
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.controller import boot
from metal_supervisor.settings.loader import conf_dir
from tests.support.faulty_api import FaultyApi
from tests.support.own_command import typed
from tests.support.system import ISVC, SLICES, System, eventually

LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"


class Mac(System):
    """One of several."""

    def __init__(self, base: Path, name: str, kubeconfig: Path, number: int, *flags: str, **more: Any) -> None:
        base.mkdir(parents=True, exist_ok=True)
        self.name, self._kubeconfig, self.address = name, kubeconfig, f"192.0.2.{number}"
        super().__init__(
            base,
            "--kubeconfig",
            str(kubeconfig),
            "--node-name",
            name,
            "--host-ip",
            self.address,
            "--bind",
            "127.0.0.1",
            *flags,
            **more,
        )

    @property
    def kubeconfig(self) -> Path:
        return self._kubeconfig

    def slice(self, name: str = "tiny") -> dict[str, Any] | None:
        return self.maybe(f"{SLICES}/{name}-{self.name}")

    def command(self, *arguments: str) -> str:
        """What one of our commands about this Mac prints."""
        code, out, err = typed(*arguments, "--state-dir", str(self.state))
        assert code == 0, out + err
        return out


class Fleet:
    """A cluster and its Macs."""

    def __init__(self, base: Path, kubeconfig: Path, *flags: str) -> None:
        self.base, self.kubeconfig, self.flags = base, kubeconfig, flags
        self.macs: list[Mac] = []
        self.kube = Kube(kubeconfig)

    def add(self, name: str, *flags: str, **more: Any) -> Mac:
        """One more Mac, started."""
        number = len(self.macs) + 11
        mac = Mac(self.base / name, name, self.kubeconfig, number, *self.flags, *flags, **more)
        self.macs.append(mac)
        mac.start()
        return mac

    def holder(self, service: str = "tiny", slot: int = 0) -> str:
        """Who holds a slot, "" if nobody does."""
        items = self.kube.request("GET", LEASES, {"labelSelector": "metal-supervisor.io/kind=claim"})["items"]
        found = [each for each in items if each["metadata"]["name"] == f"isvc-{service}-{slot}"]
        return str(found[0]["spec"].get("holderIdentity", "")) if found else ""

    def mac(self, name: str) -> Mac:
        return next(each for each in self.macs if each.name == name)

    def slices(self, service: str = "tiny") -> dict[str, bool]:
        """Node -> whether its slice says ready."""
        query = {"labelSelector": f"kubernetes.io/service-name={service}"}
        return {
            each["metadata"]["labels"].get("metal-supervisor.io/node", each["metadata"]["name"]): each["endpoints"][0][
                "conditions"
            ]["ready"]
            for each in self.kube.request("GET", SLICES, query)["items"]
        }

    def ready(self, service: str = "tiny") -> list[str]:
        """The Macs whose endpoints are ready."""
        return sorted(node for node, ready in self.slices(service).items() if ready)

    def status(self, service: str = "tiny") -> dict[str, Any]:
        return dict(self.kube.request("GET", f"{ISVC}/{service}").get("status") or {})

    def empty(self) -> None:
        """Deletes all services, and waits until nothing of them is left; a Mac that is down is started."""
        for each in self.kube.request("GET", ISVC)["items"]:
            self.kube.request("DELETE", f"{ISVC}/{each['metadata']['name']}")
        for mac in self.macs:
            if mac.process is None:
                mac.start()
            eventually(lambda mac=mac: not mac.engines(), 30, f"nothing to run on {mac.name}")
        eventually(lambda: not self.kube.request("GET", SLICES)["items"] and not self.holder(), 30, "all to be gone")

    def close(self) -> None:
        """Ends every Mac, the failures of one not keeping the others."""
        with contextlib.ExitStack() as stack:
            for mac in self.macs:
                stack.callback(mac.close)
            stack.callback(self.kube.close)


def show(fleet: Fleet) -> None:
    """What the Macs said last, for whoever looks into a failure."""
    for mac in fleet.macs:
        sys.stderr.write(f"── {mac.name} ──\n{mac.said()}\n")
        for name in ("controller", "sidecar"):
            path = mac.state / "log" / f"{name}.log"
            if path.exists():
                sys.stderr.write(f"── {mac.name} {name} ──\n{path.read_text(errors='replace')[-3000:]}\n")


def lose(mac: Mac) -> float:
    """A power cut: nothing of this Mac runs on, and nobody was told. Returns its moment (monotonic)."""
    assert mac.process is not None
    found, at = mac.processes(), time.monotonic()
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # all at once: no part may see another one end
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum)
    mac.process.wait(10)
    psutil.wait_procs(found, 10)
    mac.process = None
    return at


@contextlib.contextmanager
def embedded_cluster(base: Path) -> Iterator[Path]:
    """A cluster of ours for Macs that see it as somebody else's; gives its kubeconfig. It takes orders to misbehave."""
    crds = tuple((conf_dir() / "crds").glob("*.yaml"))
    with FaultyApi(Options(data_file=base / "api.db", prefix="/k-test", crd_paths=crds)) as api:
        kubeconfig = base / "cluster-kubeconfig"
        kubeconfig.write_text(boot.kubeconfig(api.url))
        yield kubeconfig


@contextlib.contextmanager
def fleet(base: Path, kubeconfig: Path, *flags: str) -> Iterator[Fleet]:
    """Macs that are gone afterwards; what they said is shown if the test fails."""
    with ended(Fleet(base, kubeconfig, *flags)) as found:
        yield found


AnyFleet = TypeVar("AnyFleet", bound=Fleet)


@contextlib.contextmanager
def ended(found: AnyFleet) -> Iterator[AnyFleet]:
    """A fleet that is closed afterwards, and shown if the test fails."""
    try:
        yield found
    except BaseException:
        show(found)
        raise
    finally:
        found.close()
