"""Whoever looks at the sidecar, however badly he behaves, costs nobody an endpoint and this Mac no heartbeat."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

from tests.macs import LEASES, embedded_cluster, fleet
from tests.system import System, eventually, kill, service

IDLE = 200


def renewed(mac: System) -> str:
    return str(mac.get(f"{LEASES}/metal-mac-a")["spec"]["renewTime"])


def dribble(sock: socket.socket, over: threading.Event) -> None:
    """Sends a header that never ends, a byte at a time."""
    with contextlib.suppress(OSError):
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: ")
        while not over.wait(0.05):
            sock.sendall(b"x")


def test_200_idle_and_slow_clients_delay_neither_a_heartbeat_nor_a_withdrawal(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig) as macs, contextlib.ExitStack() as stack:
        mac = macs.add("mac-a", "--lease-duration", "5")
        mac.apply(mac.tiny_model(), service())
        engine = mac.ready()
        over = threading.Event()
        stack.callback(over.set)
        for number in range(IDLE):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", mac.http), timeout=20))
            if number % 10 == 0:
                threading.Thread(target=dribble, args=(sock, over), daemon=True).start()
            elif number % 10 == 1:  # asks for much, and reads nothing of it
                sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        for _ in range(4):
            before = renewed(mac)
            eventually(lambda before=before: renewed(mac) != before, 5, "the next heartbeat, before the last expires")
        kill(engine)
        eventually(lambda: mac.slice_ready() is False or mac.pid() not in (0, engine), what="the death to be seen")
        assert mac.ready() != engine
        for path in ("/", "/metrics", "/status", "/healthz"):
            assert mac.fetch(path)[0] == 200, path
