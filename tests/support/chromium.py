"""A real headless Chromium, driven over its debugging protocol: one tab, its DOM, its console, its pictures."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket

from tests.support import parts
from tests.support.finders import find_chromium
from tests.support.system import eventually

FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Tab:
    """One tab. What it complains of in its console is kept in `complaints`."""

    def __init__(self, url: str) -> None:
        self._socket = websocket.create_connection(url, timeout=30, suppress_origin=True)
        self._count = 0
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What Chromium answers to one order; what it tells meanwhile is looked at."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": parameters}))
        while True:
            told = json.loads(self._socket.recv())
            if told.get("id") == self._count:
                if "error" in told:
                    raise LookupError(told["error"])  # e.g. of a document that has just been replaced
                return dict(told["result"])
            self._hear(told)

    def _hear(self, told: dict[str, Any]) -> None:
        method, body = told.get("method"), told.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(body["exceptionDetails"]))
        elif method == "Log.entryAdded" and body["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{body['entry']['text']} {body['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and body["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(body["args"]))

    def open(self, url: str) -> None:
        """Goes there and waits until something of it is there."""
        assert not self.call("Page.navigate", url=url).get("errorText")
        eventually(lambda: "</footer>" in self.html(), what=f"{url} in the browser")

    def html(self) -> str:
        """The DOM as it is now, without running anything in the page."""
        root = self.call("DOM.getDocument", depth=0)["root"]["nodeId"]
        return str(self.call("DOM.getOuterHTML", nodeId=root)["outerHTML"])

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def size(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Makes the window so large (CSS pixels), and asks for dark colours or light ones."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def picture(self, path: Path) -> None:
        """A PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def tab(base: Path, *flags: str) -> Iterator[Tab]:
    """A tab of a Chromium of its own, which is gone afterwards; skips where there is none."""
    program = parts.found(find_chromium.find)
    profile = base / "chromium"
    sandbox = ("--no-sandbox",) if os.getuid() == 0 else ()
    with (base / "chromium.log").open("wb") as log:
        command = [str(program), *FLAGS, *sandbox, *flags, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        port_file = profile / "DevToolsActivePort"
        port = eventually(lambda: int(port_file.read_text().split()[0]), 60, "Chromium to listen")
        found = Tab(eventually(lambda: _socket_url(port), 30, "a tab"))
        try:
            yield found
        finally:
            found.close()
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def _socket_url(port: int) -> str:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", "/json")
        pages = [each for each in json.load(connection.getresponse()) if each["type"] == "page"]
    return str(pages[0]["webSocketDebuggerUrl"])
