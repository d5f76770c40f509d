"""Attacks over the network on engines that run: web pages in browsers, and clients of the cluster."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from metal_supervisor.controller import boot
from metal_supervisor.host.machine import Interface
from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.remote import web
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.runtimes.shims import gate
from metal_supervisor.state import own_processes
from metal_supervisor.state.directory import StateDir
from tests.support import chromium, mlx, ollama
from tests.support.mlx import mlx_model, mlx_service
from tests.support.runtimes import omlx
from tests.support.system import System, eventually, halted, kill, model, running, service

FOREIGN = (
    "https://evil.example",
    "null",
    "http://localhost.evil.example",
    "http://127.0.0.1.evil.example:80",
    "http://127.0.0.2:8080",
    "file://",
    "http://evil.example@localhost",
    "http://evil.example:80@127.0.0.1",
    "http://[",
)
SEEN_LOCALLY = ("http://localhost:3000", "http://127.0.0.1:3000", "http://[::1]:3000")
LLAMA = "words"
MLX = "mlx"
OMLX = "shared"
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
        with halted(up.own_pid("controller")):
            kill(engine)
            eventually(lambda: up.noted_pid("default.kept") not in (0, engine), 60, "its next start")
        # Its port first, because an endpoint that is ready may be that of the old one.
        eventually(lambda: up.port("kept") in ports[:10], 60, "it to have another port")
        eventually(lambda: up.slice_ready("kept"), 60, "it to serve there")
        again = up.pid("kept")
        assert request(up.port("kept"), "GET", "/health")[0] == 200
        port = up.port("kept")
        up.supervisorctl("restart", "controller")
        assert up.ready("kept", within_s=60) == again and up.port("kept") == port != up.port("other")


# ── a client of the cluster uses Ollama's API (M2) ───────────────────────────────────────────────

ELSEWHERE = "127.0.0.2"
"""Address of a client that is not this machine, as far as the gate can tell."""
OURS = "ours"
OTHER = "other"


@pytest.fixture(scope="module")
def on_ollama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A service on an Ollama of ours, which also has a model that no service declares."""
    base = tmp_path_factory.mktemp("gated")
    file = ollama.endless(base / "file.gguf", context=32768)
    with running(base, "--ollama", str(ollama.program()), "--ollama-url", "off") as up:
        up.apply(model("file", str(file)), service(OURS, "file", runtime="ollama", extraArgs=[]))
        up.ready(OURS, within_s=90)
        made = request(up.port(OURS), "POST", "/api/create", {"model": OTHER, "from": OURS, "stream": False})
        assert made[0] == 200, "this machine itself may use all of the API"
        yield up


def rows(system: System, path: str = "/api/ps") -> list[dict[str, Any]]:
    """The models that Ollama has loaded, or has."""
    found: list[dict[str, Any]] = json.loads(request(system.port(OURS), "GET", path)[2])["models"]
    return sorted(found, key=lambda each: str(each["name"]))  # Ollama's own order changes by itself


ORDERS: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/api/pull", {"model": "127.0.0.1:9/library/x", "insecure": True}),
    ("POST", "/api/push", {"model": OURS}),
    ("POST", "/api/create", {"model": "mine", "from": OURS}),
    ("POST", "/api/copy", {"source": OURS, "destination": "mine"}),
    ("DELETE", "/api/delete", {"model": OURS}),
    ("POST", "/api/blobs/sha256:" + "0" * 64, "x"),
    ("HEAD", "/api/blobs/sha256:" + "0" * 64, None),
    ("GET", "/api/blobs/sha256:" + "0" * 64, None),
    ("POST", "/api/signout", None),
    ("POST", "/api/me", None),
    ("POST", "/api/experimental/web_fetch", {"url": "http://127.0.0.1/"}),
    ("DELETE", f"/v1/models/{OURS}", None),
    ("GET", "/api/chat/../delete", None),
    ("DELETE", "//api/delete", {"model": OURS}),
    ("DELETE", "/api/chat", {"model": OURS}),
    ("DELETE", "http://127.0.0.1/api/delete", {"model": OURS}),
    ("DELETE", "/api%2fdelete", {"model": OURS}),
    ("OPTIONS", "/api/delete", None),
    ("POST", "/api/tags", {"model": OURS}),
)


@pytest.mark.parametrize(("method", "path", "body"), ORDERS)
def test_another_machine_cannot_manage_ollama(on_ollama: System, method: str, path: str, body: Any) -> None:
    before = rows(on_ollama, "/api/tags"), rows(on_ollama)
    assert request(on_ollama.port(OURS), method, path, body, source=ELSEWHERE)[0] == 404
    assert (rows(on_ollama, "/api/tags"), rows(on_ollama)) == before


@pytest.mark.parametrize(
    "asked",
    [
        {"model": OTHER},
        {"model": f"{OTHER}:latest"},
        {"model": f"library/{OURS}"},
        {"model": OURS, "MODEL": OTHER},
        {"name": OTHER},
        {"model": ["x"]},
        {},
        {"model": f"registry.ollama.ai/library/{OTHER}"},
        {"model": f"../{OURS}"},
    ],
)
@pytest.mark.parametrize("path", ["/api/generate", "/api/chat", "/api/embed", "/api/show", CHAT, "/v1/embeddings"])
def test_another_machine_cannot_load_what_no_service_declares(on_ollama: System, path: str, asked: Any) -> None:
    before = rows(on_ollama)
    status, _, text = request(on_ollama.port(OURS), "POST", path, {**asked, "stream": False}, source=ELSEWHERE)
    assert status == 404 and b"no service of Ollama" in text
    assert rows(on_ollama) == before


@pytest.mark.parametrize(
    "asked",
    [
        {"keep_alive": 0},
        {"keep_alive": "0s"},
        {"KEEP_ALIVE": 0},
        {"\u212aeep_alive": 0},
        {"keep_alive": "1s"},
        {"options": {"num_ctx": 8192}},
        {"Options": {"num_gpu": 3, "num_batch": 7}},
        {"options": {"use_mmap": False}},
    ],
)
@pytest.mark.parametrize("path", ["/api/generate", "/api/chat", "/api/embed"])
def test_another_machine_cannot_unload_or_reload_a_model(on_ollama: System, path: str, asked: Any) -> None:
    def loaded() -> list[Any]:
        told = "name", "digest", "context_length"
        return [([each[name] for name in told], each["expires_at"][:3]) for each in rows(on_ollama)]

    before, engines = loaded(), runners(on_ollama)
    body = {"model": OURS, "prompt": "", "input": "", "messages": [], "stream": False, **asked}
    request(on_ollama.port(OURS), "POST", path, body, source=ELSEWHERE)
    assert loaded() == before and runners(on_ollama) == engines


def runners(system: System) -> set[int]:
    """Pids of the processes in which Ollama runs models."""
    daemon = psutil.Process(system.own_pid("ollama"))
    return {each.pid for each in daemon.children(recursive=True) if "runner" in each.cmdline()}


def test_ollama_itself_listens_on_loopback_and_the_gate_where_engines_do(on_ollama: System) -> None:
    daemon = psutil.Process(on_ollama.own_pid("ollama"))
    assert daemon.cmdline()[1:] == ["serve"], "it keeps the pid that supervisord knows"
    assert {each.laddr.ip for each in daemon.net_connections() if each.status == "LISTEN"} == {"127.0.0.1"}
    assert on_ollama.port(OURS) not in {each.laddr.port for each in daemon.net_connections()}


def test_another_machine_is_served_and_may_look(on_ollama: System) -> None:
    port = on_ollama.port(OURS)
    for path in ("/", "/api/version", "/api/tags", "/api/ps", "/v1/models"):
        assert request(port, "GET", path, source=ELSEWHERE)[0] == 200, path
    status, _, text = request(port, "POST", CHAT, chat(OURS), source=ELSEWHERE)
    assert status == 200 and json.loads(text)["choices"][0]["message"]["content"]
    options = {"num_predict": 3, "temperature": 0}
    asked = {"model": f"{OURS}:latest", "prompt": "hi", "stream": False, "options": options}
    status, _, text = request(port, "POST", "/api/generate", asked, source=ELSEWHERE)
    assert status == 200 and json.loads(text)["eval_count"] == 3, "what it says of sampling counts"
    chunked = iter([json.dumps(asked)[:20].encode(), json.dumps(asked)[20:].encode()])
    assert request(port, "POST", "/api/generate", chunked, source=ELSEWHERE)[0] == 200


def test_a_page_of_another_host_cannot_use_ollama(on_ollama: System) -> None:
    for origin in FOREIGN:
        told = request(on_ollama.port(OURS), "POST", CHAT, chat(OURS), Origin=origin)
        assert told[0] == 403 and "access-control-allow-origin" not in told[1], told


@pytest.mark.parametrize("source", ["127.0.0.1", ELSEWHERE])
def test_a_stream_passes_as_it_is_made_and_ends_with_its_client(on_ollama: System, source: str) -> None:
    body = {"model": OURS, "prompt": "hi", "options": {"num_predict": 30000, "ignore_eos": True}}
    connection = http.client.HTTPConnection("127.0.0.1", on_ollama.port(OURS), timeout=30, source_address=(source, 0))
    connection.request("POST", "/api/generate", json.dumps(body))
    answer = connection.getresponse()
    for _ in range(3):
        assert json.loads(answer.readline())["done"] is False
    (runner,) = (psutil.Process(each) for each in runners(on_ollama))
    connection.close()
    answer.close()
    eventually(lambda: runner.cpu_percent(0.5) < 10, 30, "Ollama to stop computing an answer that nobody reads")


def test_a_second_request_behind_the_first_is_not_passed_on(on_ollama: System) -> None:
    order = json.dumps({"model": OTHER}).encode()
    hidden = b"DELETE /api/delete HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(order), order)
    with socket.create_connection(("127.0.0.1", on_ollama.port(OURS)), 20, (ELSEWHERE, 0)) as client:
        client.sendall(b"GET /api/tags HTTP/1.1\r\nHost: x\r\n\r\n" + hidden)
        text = b"".join(iter(lambda: client.recv(65536), b""))
    assert text.count(b"HTTP/1.1 ") == 1
    assert f"{OTHER}:latest" in {each["name"] for each in rows(on_ollama, "/api/tags")}


def test_ollama_and_its_runner_are_confined_and_the_gate_is_not(on_ollama: System) -> None:
    if sys.platform != "linux":
        pytest.skip("a process tells on Linux alone whether it is confined")
    daemon = psutil.Process(on_ollama.own_pid("ollama"))
    (runner,) = runners(on_ollama)
    ours = [each.pid for each in beside(daemon)]
    held = {pid: "Seccomp:\t2\n" in Path(f"/proc/{pid}/status").read_text() for pid in (daemon.pid, runner, *ours)}
    assert held == {daemon.pid: True, runner: True, **dict.fromkeys(ours, False)}
    conditions = on_ollama.status(OURS)["conditions"]
    assert {each["status"] for each in conditions if each["type"] == "Confined"} == {"True"}


def beside(daemon: psutil.Process) -> list[psutil.Process]:
    """The gate of an Ollama, and the process that sees to its end."""
    found = [each for each in daemon.children() if "ollama_engine" in " ".join(each.cmdline())]
    return sorted(found, key=lambda each: each.create_time())


@pytest.mark.parametrize("which", ["ollama", "gate"])
def test_ollama_and_its_gate_end_together_and_come_back(on_ollama: System, which: str) -> None:
    daemon = psutil.Process(on_ollama.own_pid("ollama"))
    gate, watcher = beside(daemon)
    kill(daemon.pid if which == "ollama" else gate.pid)
    # Long before it would be found to hang.
    eventually(lambda: on_ollama.own_pid("ollama") not in (0, daemon.pid), 30, "another")
    for each in (daemon, gate, watcher):
        eventually(lambda each=each: not each.is_running() or each.status() == psutil.STATUS_ZOMBIE)
    eventually(lambda: on_ollama.slice_ready(OURS) and rows(on_ollama), 90, "the service to be back")
    assert request(on_ollama.port(OURS), "POST", CHAT, chat(OURS), source=ELSEWHERE)[0] == 200


# ── a Model's host resolves to the Mac or a neighbour, at an address of the internet (M5) ────────


@pytest.mark.parametrize("address", ["2a01:4f8:1:2::1", "2a01:4f8:1:2:aaaa:bbbb:cccc:dddd", "203.0.114.9"])
def test_a_model_is_not_fetched_from_the_mac_or_its_ipv6_neighbours(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    own = Interface("en0", "2a01:4f8:1:2::7", True, "ffff:ffff:ffff:ffff::"), Interface("en0", "203.0.114.9", True)
    monkeypatch.setattr(web, "interfaces", lambda: own)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = [(family, socket.SOCK_STREAM, 6, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it was connected to"))
    with pytest.raises(Unusable, match="no public address"):
        web.Client(SourcePolicy()).get("http://models.example.com/m.gguf")


# ── another user of the Mac, or a web page, and the embedded API (M4) ────────────────────────────


def test_a_thousand_idle_connections_stop_neither_kubectl_nor_the_system(system: System) -> None:
    port, _ = own_processes.saved_access(system.files)
    with contextlib.ExitStack() as strangers:
        for _ in range(1000):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        assert LLAMA in system.kubectl("get", "isvc")
        system.apply(service("meanwhile"))
        system.ready("meanwhile")
    system.delete("meanwhile")
    eventually(lambda: system.pid("meanwhile") == 0, what="it to be gone")


def test_without_the_path_the_api_answers_404_and_reads_no_body(system: System) -> None:
    port, prefix = own_processes.saved_access(system.files)
    for path in ("/api/v1/namespaces", prefix[:-1], prefix + "x/api/v1/namespaces", "/.." + prefix, "/"):
        with socket.create_connection(("127.0.0.1", port), 10) as stranger:
            stranger.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n".encode())
            assert stranger.recv(65536).startswith(b"HTTP/1.1 404 "), path


def test_a_stranger_on_the_port_of_the_api_does_not_learn_the_next_path(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    directory.create()
    port, prefix = boot.embedded_access(directory)
    assert boot.embedded_access(directory) == (port, prefix), "both stay while the port is free"
    with socket.create_server(("127.0.0.1", port)):
        moved = boot.embedded_access(directory)
    assert moved[0] != port and moved[1] != prefix
    kubeconfig = (directory.path / "kubeconfig").read_text()
    assert f"http://127.0.0.1:{moved[0]}{moved[1]}" in kubeconfig and prefix not in kubeconfig


# ── a request has the engine open or fetch an image (H7) ─────────────────────────────────────────

NAMED = (
    {"type": "image_url", "image_url": {"url": "PLACE"}},
    {"type": "image_url", "image_url": "PLACE"},
    {"type": "input_image", "image_url": "PLACE"},
    {"type": "input_image", "url": "PLACE"},
    {"type": "input_image", "input_image": {"url": "PLACE"}},
    {"type": "image", "source": {"type": "url", "url": "PLACE"}},
    {"type": "input_audio", "input_audio": {"url": "PLACE", "format": "wav"}},
    {"type": "audio", "audio": "PLACE"},
    {"type": ["image_url"], "image_url": {"url": "PLACE"}},
)


@pytest.fixture
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """(URL of a server of the test, what was asked of it)."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as client:
                        asked.append(client.recv(4096))

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/x.png", asked
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("place", ["URL", "/etc/hostname", "file:///etc/hostname", "ftp://[::1]/", "DATA:,", " data:"])
@pytest.mark.parametrize("part", NAMED)
def test_omlx_opens_and_fetches_nothing_for_a_request(
    system: System, listener: tuple[str, list[bytes]], part: dict[str, Any], place: str
) -> None:
    url, asked = listener
    content = json.loads(json.dumps(part).replace("PLACE", url if place == "URL" else place))
    text = {"type": "text", "text": "hi"}
    for deep in (0, 300):
        for _ in range(deep):
            content = {"type": "text", "text": "x", "more": [content]}
        body = {**chat(OMLX), "messages": [{"role": "user", "content": [text, content]}]}
        status, _, answer = request(system.port(OMLX), "POST", CHAT, body)
        assert status == 400 and b"must be data: URLs" in answer, answer
    assert asked == []


def test_omlx_takes_content_that_names_no_media(system: System) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "image": {"type": ["string", "null"]},
                    "url": {"type": "string"},
                    "source": {"type": "string"},
                },
            },
        },
    }
    content = [{"type": "text", "text": "hi", "url": "https://example.com/", "source": "web"}]
    body = {**chat(OMLX), "messages": [{"role": "user", "content": content}], "tools": [tool]}
    status, _, answer = request(system.port(OMLX), "POST", CHAT, body)
    assert status == 200, answer
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    assert not gate.names_foreign_media({"content": [image]})
