"""What this Mac asks of the cluster: as much as changes, and next to nothing while nothing does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import yaml

from metal_supervisor.cluster.kube import Kube
from metal_supervisor.spec.processes import State
from metal_supervisor.spec.types import Json
from tests.support.faults import Figure, fault
from tests.support.macs import LEASES, Mac, embedded_cluster, fleet
from tests.support.own_logs import logged
from tests.support.system import ISVC, MODELS, SERVICES, SLICES, eventually, service

EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"
HEARTBEAT = "llmkube.ai/agent-heartbeat"
QUIET_S = 12.0
MANY = int(os.environ.get("METAL_MANY", "100"))
"""Programs of the largest Mac; 500 with `make faults`, which takes a minute longer."""
# It reads what nobody writes, in the shell itself: one process, which names the state directory as an engine does.
SLEEPER = """#!/bin/sh
case "$*" in *--help*) echo "--metrics --alias STRING" ;; *) read -r nothing ;; esac
"""


def versions(kube: Kube) -> dict[str, tuple[str, str]]:
    """Every object that we may write -> (its version, its heartbeat)."""
    return {
        f"{path}/{item['metadata']['name']}": (
            item["metadata"]["resourceVersion"],
            (item["metadata"].get("annotations") or {}).get(HEARTBEAT, ""),
        )
        for path in (ISVC, MODELS, SERVICES, SLICES, LEASES, EVENTS)
        for item in kube.request("GET", path)["items"]
    }


def told(mac: Mac) -> Json:
    """The controller's report."""
    found: Json = json.loads((mac.state / "controller.json").read_text())
    return found


def asked_by_controller(mac: Mac) -> int:
    return int(told(mac)["cluster"]["requests"])


def requests(mac: Mac) -> int:
    """How many requests controller and sidecar have sent so far."""
    found = re.search(r"(?m)^metal_supervisor_api_requests_total (\S+)$", mac.fetch("/metrics")[1])
    assert found
    return asked_by_controller(mac) + int(float(found[1]))


def test_while_nothing_happens_only_heartbeats_are_written(tmp_path: Path) -> None:
    names = [f"svc-{index}" for index in range(4)]
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig) as macs:
        mac = macs.add("mac-a")
        mac.apply(mac.tiny_model(), *(service(name) for name in names))
        for name in names:
            mac.ready(name)

        def settled() -> bool:
            before = versions(macs.kube)
            time.sleep(1)
            return {key for key, seen in versions(macs.kube).items() if seen != before.get(key)} <= {node_lease}

        node_lease = f"{LEASES}/metal-mac-a"
        eventually(settled, 30, "the last word of the start")
        before = versions(macs.kube)
        # A controller that looks at everything anew finds nothing to say.
        old = mac.own_pid("controller")
        mac.supervisorctl("restart", "controller")
        eventually(lambda: old != mac.own_pid("controller") != 0, what="another controller")
        since = told(mac)["at"]
        eventually(lambda: told(mac)["at"] > since, what="a report of its own")
        eventually(lambda: 6 <= asked_by_controller(mac) < 20, what="it to list and to watch three kinds")
        asked = requests(mac)
        time.sleep(QUIET_S)
        after = versions(macs.kube)
        assert after.keys() == before.keys()
        changed = {key for key in after if after[key] != before[key]}
        beats = {key for key in changed if key.startswith(SLICES) and after[key][1] != before[key][1]}
        assert changed - beats == {node_lease}, "the Mac's own Lease, and endpoints whose heartbeat was due"
        print(f"{requests(mac) - asked} requests in {QUIET_S:.0f} s")
        # Two renewals, and each service's heartbeat at most once, with its Service.
        assert 1 <= requests(mac) - asked <= 2 + 2 * len(names) + 1


@contextlib.contextmanager
def as_from_launchd() -> Iterator[None]:
    """The limit of open files that launchd gives a job: supervisord has to raise it by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@fault(
    "S64",
    "500 InferenceServices are applied to one Mac (100 in `make test`), each with an engine that never gets ready",
    happens="all are started; one more edit still gets through, and supervisord keeps answering",
    sees="as many programs in supervisorctl",
    bound="all have a process within 240 s of the last apply",
)
def test_hundreds_of_services_at_once_are_placed_in_a_few_passes_and_all_run(tmp_path: Path, figure: Figure) -> None:
    """The engines only stay alive: what is tried is deciding, claiming and placing, and what it takes to keep them."""
    engine = tmp_path / "engine"
    engine.write_text(SLEEPER)
    engine.chmod(0o755)
    names = [f"svc-{index:03}" for index in range(MANY)]
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig, "--ports", "32100-32699") as macs:
        with as_from_launchd():
            mac = macs.add("mac-a", "--confinement", "off", engine=engine)  # it serves nothing, so a trial is in vain
        log = mac.state / "log" / "controller.log"
        mac.apply(mac.tiny_model())
        eventually((mac.state / "controller.json").exists, what="the controller's first pass")
        asked = requests(mac)
        figure.add("programs", MANY, "")
        # kubectl applies one after another: the controller finds all of them at once, however fast either is.
        controller = mac.own_pid("controller")
        os.kill(controller, signal.SIGSTOP)
        with figure.timed("all applied"):
            for first in range(0, MANY, 100):
                several = map(service, names[first : first + 100])
                mac.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(several))
        os.kill(controller, signal.SIGCONT)

        def published() -> bool:
            return sum(key.startswith(f"{SLICES}/svc-") for key in versions(macs.kube)) == MANY

        with figure.timed("all have a process"):
            eventually(lambda: live(mac) == MANY, 240, "a process each")
        eventually(published, 60, "all to be published")

        spawned = (mac.state / "log" / "supervisord.log").read_text().count("spawned: 'default.svc-")
        assert spawned == MANY, "each is started once"
        passes = [each["did"] for each in logged(log, "pass")]
        adds = [did.count("add default.svc-") for did in passes if "add default.svc-" in did]
        assert len(adds) <= MANY // 3, adds
        after = requests(mac)
        # Claim and look for another agent; Service, look for a foreign one, slice, two looks for leftovers; status.
        print(f"{len(adds)} passes, {(after - asked) / MANY:.1f} requests a service")
        assert after - asked <= MANY * 14, (after - asked) / MANY
        time.sleep(QUIET_S / 2)
        assert requests(mac) - after <= MANY * 4, "requests grow with changes, not with time"

        for name in ("supervisord", "controller", "sidecar"):
            process = psutil.Process(mac.supervisord_pid() if name == "supervisord" else mac.own_pid(name))
            figure.add(f"RSS of {name}", process.memory_info().rss / 2**20, "MiB")
            figure.add(f"CPU of {name}", sum(process.cpu_times()[:2]))
        for _ in range(5):
            with figure.timed("table"):
                mac.rpc.table()
        for _ in range(3):
            with figure.timed("reload"):
                mac.rpc.reload()
        before = mac.pid(names[0])
        with figure.timed("an edit is carried out"):
            mac.apply(service(names[0], contextSize=1024))
            eventually(lambda: mac.pid(names[0]) not in (0, before), 60, "the edit to run")
        eventually(lambda: live(mac) == MANY, 60, "it to be RUNNING beside the others")
        assert mac.process is not None
        with figure.timed("all gone"):
            mac.process.send_signal(signal.SIGTERM)
            assert mac.process.wait(240) == 0
        mac.process = None


def live(mac: Mac) -> int:
    """How many models have a process that stays."""
    rows = mac.rpc.table().items()
    time.sleep(0.2)  # asking all the time would be the load
    return sum(row.state is State.RUNNING and name.startswith("default.") for name, row in rows)
