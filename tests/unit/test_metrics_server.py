"""The address for a Prometheus elsewhere: two pages of all, to be read and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from metal_supervisor.sidecar.http.metrics import FORMATS, format_of
from metal_supervisor.sidecar.http.metrics_server import create_app
from tests.support.boards import full_board


def ask(path: str, method: str = "GET", accept: str = "") -> tuple[str, dict[str, str], bytes]:
    """(status line, headers, body) of an answer."""
    said: list[Any] = []
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "HTTP_ACCEPT": accept}
    app = create_app(full_board, lambda _program: ("", ""), "127.0.0.1")
    body = b"".join(app(environ, lambda *given: said.extend(given)))
    return said[0], dict(said[1]), body


def test_metrics_come_in_the_format_that_is_accepted() -> None:
    status, headers, body = ask("/metrics")
    assert status == "200 OK" and b"metal_supervisor_build_info" in body
    assert headers["Content-Length"] == str(len(body)) and headers["Content-Type"].startswith("text/plain")
    _, headers, body = ask("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")


@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
@pytest.mark.parametrize("version", ["1.x", "x", "²", "=1", "9" * 5000, "-1", "2.0.0", "0.0.1", '"1.0.0"', "1_0.0.0"])
def test_a_version_that_nobody_knows_gets_plain_text(kind: str, version: str) -> None:
    """The library fails at some, with a traceback in the log for each scrape, and answers others by their own name."""
    status, headers, body = ask("/metrics", accept=f"{kind};version={version};q=1, */*")
    assert (status, headers["Content-Type"]) == ("200 OK", "text/plain; version=0.0.4; charset=utf-8")
    assert b"metal_supervisor_build_info" in body


def test_what_is_accepted_makes_no_more_than_a_renderer_for_each_format() -> None:
    for number in range(300):
        accept = ("text/plain;version=1.0.0", "application/openmetrics-text", "text/plain")[number % 3]
        assert format_of(f"{accept};x={number}") in FORMATS


def test_health_is_told_as_on_loopback() -> None:
    status, headers, body = ask("/healthz")
    assert (status, json.loads(body)["status"]) == ("200 OK", "ok") and headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("path", ["/", "/status", "/readyz", "/livez", "/metrics/", "//metrics", "/metrics/../", ""])
def test_nothing_else_is_there(path: str) -> None:
    assert ask(path)[0] == "404 Not Found"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "X"])
def test_it_can_only_be_read(method: str) -> None:
    status, headers, _ = ask("/metrics", method)
    assert status == "405 Method Not Allowed" and headers["Allow"] == "GET, HEAD"


def test_a_head_has_the_headers_alone() -> None:
    status, headers, body = ask("/metrics", "HEAD")
    assert (status, body) == ("200 OK", b"") and int(headers["Content-Length"]) > 1000
