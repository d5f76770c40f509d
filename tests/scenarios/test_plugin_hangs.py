"""A kubeconfig whose credential plugin hangs: this Mac goes on with what it has, and what hangs is ended."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

import psutil

from metal_supervisor.cluster.exec_plugin import Plugin
from tests.support.engines import restarted, timeline
from tests.support.faults import Figure, fault
from tests.support.macs import LEASES, Mac, embedded_cluster
from tests.support.system import eventually, kill, service

LIFE_S = 30
"""Of a credential: it is over before a plugin that hangs is ended."""
LEASE_S = 40.0
"""The default of --lease-duration."""
SCRIPT = """#!/bin/sh
cd "$(dirname "$0")"
if [ -e hold ]; then
    trap '' TERM
    sleep 600 &
    echo "$$ $!" >> held
    wait
fi
echo run >> runs
exec {python} - <<'END'
import json, time
end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + {life_s}))
status = {{"token": "from-the-plugin", "expirationTimestamp": end}}
print(json.dumps({{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}}))
END
"""


def with_plugin(kubeconfig: Path, directory: Path) -> Path:
    """The kubeconfig, with a plugin in that directory."""
    program = directory / "plugin"
    program.write_text(SCRIPT.format(python="python3", life_s=LIFE_S))
    program.chmod(0o755)
    content = json.loads(kubeconfig.read_text())
    spec = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program), "interactiveMode": "Never"}
    content["users"][0]["user"] = {"exec": spec}
    path = directory / "with-plugin"
    path.write_text(json.dumps(content))
    return path


class Plugged(Mac):
    """A Mac that logs in with a plugin; who tests it does not."""

    def __init__(self, base: Path, kubeconfig: Path) -> None:
        super().__init__(base / "mac", "mac", with_plugin(kubeconfig, base), 1)
        self._plain = kubeconfig

    @property
    def kubeconfig(self) -> Path:
        return self._plain


def held(directory: Path) -> list[int]:
    """Pids of plugins that hang, or hung, and of their children."""
    path = directory / "held"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def renewed(mac: Mac) -> str:
    return str(mac.get(f"{LEASES}/metal-mac")["spec"]["renewTime"])


@fault(
    "G139",
    "the credential plugin of the kubeconfig hangs, ignores SIGTERM and has a child, when it is to be renewed",
    happens="the old credential is used; the plugin is ended with its child, and run again later",
    sees="one warning in the log, with the plugin's name",
    bound="no heartbeat later than its Lease holds; 0 left over",
)
def test_a_plugin_that_hangs_costs_no_heartbeat_and_leaves_nothing(tmp_path: Path, figure: Figure) -> None:
    with embedded_cluster(tmp_path) as kubeconfig:
        mac = Plugged(tmp_path, kubeconfig)
        try:
            mac.start().apply(mac.tiny_model(), service())
            engine = mac.ready()
            (tmp_path / "hold").touch()
            eventually(lambda: len(held(tmp_path)) >= 2, 60, "it to be run, and to hang")
            with timeline(mac, "tiny") as seen:
                begun = time.monotonic()
                kill(engine)
                figure.add("kill to withdrawal", seen.withdrawn_s("tiny", begun, 40))
            engine = restarted(mac, "tiny", engine)
            mac.ready()
            beats, last = [begun], renewed(mac)
            while time.monotonic() - begun < LIFE_S + Plugin.TIMEOUT_S:
                last = eventually(lambda last=last: (now := renewed(mac)) != last and now, LEASE_S, "a heartbeat")
                beats.append(time.monotonic())
                assert mac.health()[0] == 200
            gap = max(later - sooner for sooner, later in itertools.pairwise(beats))
            assert gap < LEASE_S, "a peer would have taken it for dead"
            figure.add("longest gap of heartbeats", gap)
            (tmp_path / "hold").unlink()
            pids = held(tmp_path)
            eventually(lambda: not any(map(psutil.pid_exists, pids)), 60, "what hung to be ended")
            figure.add("processes left", 0, "")
            assert mac.pid() == engine and mac.slice_ready()
            said = {part: (mac.state / "log" / f"{part}.log").read_text() for part in ("controller", "sidecar")}
            assert f"{os.sep}plugin did not finish within" in said["sidecar"], "who renews the Lease met it"
            assert not any("from-the-plugin" in each for each in said.values())
        finally:
            mac.close()
