"""What this Mac asks of the cluster: as much as changes, and next to nothing while nothing does."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import yaml

from metal_supervisor.cluster.kube import Kube
from metal_supervisor.spec.types import Json
from tests.support.macs import LEASES, Mac, embedded_cluster, fleet
from tests.support.own_logs import logged
from tests.support.system import ISVC, MODELS, SERVICES, SLICES, eventually, service

EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"
HEARTBEAT = "llmkube.ai/agent-heartbeat"
QUIET_S = 12.0


def versions(kube: Kube) -> dict[str, tuple[str, str]]:
    """Every object that we may write -> (its version, its heartbeat)."""
    return {
        f"{path}/{item['metadata']['name']}": (
            item["metadata"]["resourceVersion"], (item["metadata"].get("annotations") or {}).get(HEARTBEAT, "")
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


def test_many_services_at_once_are_placed_in_a_few_passes(tmp_path: Path) -> None:
    """The engines are stand-ins that only stay alive: what is tried is deciding, claiming and placing."""
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\ncase $1 in --help) echo --model --alias --port ;; *) exec sleep 600 ;; esac\n")
    engine.chmod(0o755)
    names = [f"svc-{index:02}" for index in range(90)]  # each has a port of this test's range
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig) as macs:
        mac = macs.add("mac-a", "--confinement", "off", engine=engine)  # it serves nothing, so a trial is in vain
        log = mac.state / "log" / "controller.log"
        mac.apply(mac.tiny_model())
        eventually((mac.state / "controller.json").exists, what="the controller's first pass")
        asked = requests(mac)
        mac.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(map(service, names)))

        def placed() -> bool:
            return sum(bool(row.pid) for name, row in mac.rpc.table().items() if "svc-" in name) == len(names)

        def published() -> bool:
            return sum(key.startswith(f"{SLICES}/svc-") for key in versions(macs.kube)) == len(names)

        eventually(placed, 60, "all to be placed")
        eventually(published, 60, "all to be published")
        passes = [each["did"] for each in logged(log, "pass")]
        adds = [did.count("add default.svc-") for did in passes if "add default.svc-" in did]
        assert sum(adds) == len(names), "each is added once"
        # kubectl applies one after another; what is there together is placed together.
        assert len(adds) <= 30, adds
        after = requests(mac)
        # Claim and look for another agent; Service, look for a foreign one, slice, two looks for leftovers; status.
        print(f"{len(adds)} passes, {(after - asked) / len(names):.1f} requests a service")
        assert after - asked <= len(names) * 14, (after - asked) / len(names)
        time.sleep(QUIET_S / 2)
        assert requests(mac) - after <= len(names) * 4, "requests grow with changes, not with time"
