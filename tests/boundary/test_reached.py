"""A daemon that is not where pods would ask it: told with its fix, and never called ready."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from metal_supervisor.host.liveness import HangLimits
from metal_supervisor.sidecar import sharing
from metal_supervisor.sidecar.probes import ProbeFinding, Prober, ProbeTarget
from metal_supervisor.spec.types import Probe
from tests.support.system import eventually

ELSEWHERE = "127.0.0.2"
"""An address of this machine on which nothing listens."""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"Ollama is running")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.mark.parametrize(("reached_at", "ready"), [("", True), ("127.0.0.1", True), (ELSEWHERE, False)])
def test_a_daemon_that_listens_on_loopback_alone_is_not_ready_for_a_cluster(reached_at: str, ready: bool) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    prober = Prober(lambda: None, lambda: None, HangLimits(60.0, 0.0), lambda _: ("", ""))
    try:
        probe = Probe(path="/", expects="Ollama is running", shared=True)
        target = ProbeTarget(1, "127.0.0.1", server.server_address[1], probe, reached_at)
        prober.ask_only({"default.tiny": (target, ProbeFinding(False, ""))}, set())
        found = eventually(lambda: prober.finding("default.tiny"))
        assert found.ready is ready
        if not ready:
            assert found.message.startswith(sharing.UNREACHABLE)
            assert ELSEWHERE in found.message and "OLLAMA_HOST" in found.message and "--ollama-url" in found.message
    finally:
        prober.ask_only({}, set())
        server.shutdown()
        server.server_close()
