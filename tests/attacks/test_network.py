"""Attacks over the network on engines that run: web pages in browsers, and clients of the cluster."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import chromium, mlx
from tests.mlx import mlx_model, mlx_service
from tests.runtimes import omlx
from tests.system import System, eventually, kill, running, service

FOREIGN = (
    "https://evil.example", "null", "http://localhost.evil.example", "http://127.0.0.1.evil.example:80",
    "http://127.0.0.2:8080", "file://", "http://evil.example@localhost", "http://evil.example:80@127.0.0.1", "http://[",
)  # fmt: skip
SEEN_LOCALLY = ("http://localhost:3000", "http://127.0.0.1:3000", "http://[::1]:3000")
LLAMA, MLX, OMLX = "words", "mlx", "shared"
CHAT = "/v1/chat/completions"


def request(
    port: int, method: str, path: str, body: Any = None, *, source: str = "127.0.0.1", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers in lower case, body) of one request to this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30, source_address=(source, 0))
    text = json.dumps(body) if isinstance(body, dict) else body
    with contextlib.closing(connection):
        connection.request(method, path, text, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def chat(name: str) -> dict[str, Any]:
    return {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A service each on llama-server, mlx_lm and oMLX."""
    base = tmp_path_factory.mktemp("network")
    mlx.tiny(base / "tiny-mlx")
    with running(base, "--mlx-lm-server", str(mlx.server()), "--omlx", str(omlx()), "--ollama-url", "off") as up:
        up.apply(up.tiny_model(), service(LLAMA), mlx_model("tiny-mlx", base / "tiny-mlx"))
        up.apply(mlx_service(MLX, "tiny-mlx"), mlx_service(OMLX, "tiny-mlx", runtime="omlx"))
        for name in (LLAMA, MLX, OMLX):
            up.ready(name, within_s=120)
        yield up


# ── a web page uses an engine (H6) ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("name", [LLAMA, MLX, OMLX])
def test_no_engine_lets_the_page_of_another_host_read_an_answer(system: System, name: str, origin: str) -> None:
    port = system.port(name)
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
    for told in (
        request(port, "OPTIONS", CHAT, Origin=origin, **asked),
        request(port, "GET", "/v1/models", Origin=origin),
        request(port, "POST", CHAT, chat(name), Origin=origin, Content_Type="text/plain"),
    ):
        allowed = told[1].get("access-control-allow-origin")
        # llama-server answers this one with itself; no browser writes an Origin with credentials.
        assert allowed is None or (name == LLAMA and "@" in origin), told
        if name != LLAMA:
            assert told[0] == 403 and b"choices" not in told[2], told


@pytest.mark.parametrize("origin", [*SEEN_LOCALLY, ""])
@pytest.mark.parametrize("name", [LLAMA, MLX, OMLX])
def test_a_page_of_this_machine_and_a_program_are_answered(system: System, name: str, origin: str) -> None:
    headers = {"Origin": origin} if origin else {}
    status, _, answer = request(system.port(name), "POST", CHAT, chat(name), Content_Type="application/json", **headers)
    assert status == 200 and b"hello" in answer


@pytest.mark.parametrize("name", [MLX, OMLX])
def test_a_rebound_name_does_not_make_a_page_local(system: System, name: str) -> None:
    rebound = f"evil.example:{system.port(name)}"
    told = request(system.port(name), "POST", CHAT, chat(name), Host=rebound, Origin=f"http://{rebound}")
    assert told[0] == 403


class _Page(http.server.BaseHTTPRequestHandler):
    """A page of nothing."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><footer></footer>")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def page() -> Iterator[str]:
    """URL of a page of another host, for a browser that resolves evil.example to this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://evil.example:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


def test_a_real_browser_keeps_answers_from_a_page(system: System, page: str, tmp_path: Path) -> None:
    with chromium.tab(tmp_path, "--host-resolver-rules=MAP evil.example 127.0.0.1") as tab:
        tab.open(page)
        for name in (LLAMA, MLX, OMLX):
            body = json.dumps(json.dumps(chat(name)))
            for kind in ("application/json", "text/plain"):
                options = f"{{method: 'POST', body: {body}, headers: {{'Content-Type': '{kind}'}}}}"
                url = f"http://127.0.0.1:{system.port(name)}{CHAT}"
                read = "text => { window.told = text }, error => { window.told = 'kept from us: ' + error }"
                tab.run(f"window.told = ''; fetch('{url}', {options}).then(a => a.text()).then({read})")
                told = eventually(lambda: str(tab.run("window.told")), 30, "the page to be told")
                assert told.startswith("kept from us: TypeError"), (name, kind, told)


# ── a manifest puts a server on a port of the Mac's own (M6) ─────────────────────────────────────


@pytest.mark.parametrize("port", [22, 80, 5900, 11434])
def test_a_port_outside_of_ports_is_ignored_and_named(system: System, port: int) -> None:
    system.apply(service("ported", containerPort=port))
    try:
        system.ready("ported")
        assert system.port("ported") in system.ports
        told = eventually(lambda: system.condition("Degraded", "ported"), what="the port to be named")
        assert told["reason"] == "PortIgnored" and f"spec.containerPort {port} " in told["message"]
        assert str(system.port("ported")) in system.told("ported")
    finally:
        system.delete("ported")
        eventually(lambda: system.pid("ported") == 0, what="it to be gone")


def test_an_engine_on_such_a_port_keeps_it_until_it_starts_next(tmp_path: Path) -> None:
    with running(tmp_path, "--ollama-url", "off") as up:
        ports = up.ports
        up.apply(up.tiny_model(), service("kept", containerPort=ports[50]))
        engine = up.ready("kept")
        narrowed = f"{ports[0]}-{ports[9]}"
        settings = up.state / "overrides.json"
        saved = json.loads(settings.read_text())
        settings.write_text(json.dumps({**saved, "values": {**saved["values"], "ports": narrowed}}))
        up.supervisorctl("restart", "controller")
        told = eventually(lambda: up.condition("Degraded", "kept"), 60, "the port to be named")
        assert told["reason"] == "PortIgnored" and "starts next" in told["message"]
        up.apply(service("other"))
        up.ready("other")
        assert up.ready("kept") == engine and up.port("kept") == ports[50]
        assert request(ports[50], "GET", "/health")[0] == 200
        kill(engine)
        eventually(lambda: up.port("kept") in ports[:10], 60, "another port")
        again = up.ready("kept", within_s=60)
        assert request(up.port("kept"), "GET", "/health")[0] == 200
        port = up.port("kept")
        up.supervisorctl("restart", "controller")
        assert up.ready("kept", within_s=60) == again and up.port("kept") == port != up.port("other")
