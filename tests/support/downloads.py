"""What scenarios of downloads share: models whose files take their time, and what can be seen of them on the way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil

from tests.support.hub import COMMIT, Hub
from tests.support.system import MODELS, System, eventually, model, service

MIB = 1 << 20
NARROW = "--threads", "1", "--cache-ram", "0"


def padded(path: Path, tiny: Path, size_bytes: int) -> Path:
    """A model that can be served, with so many bytes in its file that nobody reads."""
    with path.open("wb") as file:
        file.write(tiny.read_bytes())
        file.truncate(size_bytes)
    return path


def at(hub: Hub, name: str = "m.gguf") -> str:
    """The URL of a file of its repository `d/r`, as any web server has them."""
    return f"{hub.url}/d/r/resolve/{COMMIT}/{name}"


def from_web(name: str, source: str, **spec: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A Model and a service of one name."""
    return model(name, source, **spec), lean(name)


def lean(name: str, model: str | None = None, **spec: Any) -> dict[str, Any]:
    return service(name, model or name, **{"extraArgs": list(NARROW), **spec})


def served(system: System, name: str, within_s: float = 60.0, store: Path | None = None) -> Path:
    """Waits until a service answers; the file that its engine has, which its Model tells too."""
    pid = system.ready(name, within_s)
    assert "hello world" in system.chat(name)
    line = psutil.Process(pid).cmdline()
    path = Path(line[line.index("--model") + 1])
    status = eventually(
        lambda: (found := system.get(f"{MODELS}/{name}")["status"])["phase"] == "Ready" and found, 20, f"Model {name}"
    )
    assert status["path"] == str(path) and re.fullmatch(r"\d+\.\d [KM]iB", status["size"]), status
    assert path.is_relative_to(store or system.state / "models") and not list(path.parent.glob("*.partial*"))
    return path


def downloading(system: System, name: str) -> str:
    """Waits until a service is being fetched; what is said of it."""

    def told() -> str:
        found = system.condition("MetalReady", name)
        return found["message"] if found.get("reason") == "Downloading" and "%" in found["message"] else ""

    found = eventually(told, 20, f"{name} to be fetched: {system.told(name)}")
    assert system.condition("MetalReady", name)["status"] == "False"
    return found


def whole(hub: Hub, suffix: str) -> int:
    """Bytes sent of a file for its own sake: not to read its header, nor to see whether it is there."""
    bounded = re.compile(r"bytes=\d+-\d+")
    return sum(each.sent_bytes for each in hub.asked(suffix, "GET") if not bounded.fullmatch(each.range))


def lines(system: System, hub: Hub) -> int:
    """How many connections of the controller lead to a server."""
    port = int(hub.url.rpartition(":")[2])
    held = psutil.Process(system.own_pid("controller")).net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and bool(each.raddr) and each.raddr.port == port for each in held)
