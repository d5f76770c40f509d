"""A kubeconfig of several clusters: `kubectl config use-context` is for kubectl, and takes no running Mac along."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.macs import Mac, embedded_cluster
from tests.support.system import eventually, free_ports, kill, service


def test_another_current_context_takes_no_running_system_along(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path) as one:
        content, file = json.loads(one.read_text()), tmp_path / "config"
        away = {"server": f"http://127.0.0.1:{free_ports(1)[0]}"}
        content["clusters"].append({"name": "away", "cluster": away})
        context = {**content["contexts"][0]["context"], "cluster": "away"}
        content["contexts"].append({"name": "away", "context": context})
        file.write_text(json.dumps(content))
        mac = Mac(tmp_path / "mac", "mac", file, 1)
        try:
            mac.start().apply(mac.tiny_model(), service())
            pid = mac.ready()
            file.write_text(json.dumps({**content, "current-context": "away"}))
            for program in ("controller", "sidecar"):
                old = mac.own_pid(program)
                kill(old)
                eventually(lambda name=program, old=old: mac.own_pid(name) not in (0, old), what=program)
            mac.apply(service("second"))
            mac.ready("second")
            assert mac.pid() == pid
            assert "second" in mac.command("list"), "a command is for the system's cluster"
        finally:
            mac.close()
