"""Typical mistakes, made at the running system: each answer names the field and the next step."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import Hub
from tests.support.mistakes import MISTAKES
from tests.support.system import System, eventually, model, running, service
from tests.support.tight import MIB, share

TOLD = {name: each for name, each in MISTAKES.items() if each.reason}
REFUSED = {name: each for name, each in MISTAKES.items() if not each.reason and not each.command}
TYPED = {name: each for name, each in MISTAKES.items() if each.command}


@dataclass
class Place:
    """A running system, and values for what a mistake cannot know beforehand."""

    system: System
    values: dict[str, Any]

    def filled(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The fields with those values."""
        return {
            name: self.values.get(value, value) if isinstance(value, str) else value for name, value in spec.items()
        }

    def manifests(self, name: str) -> list[dict[str, Any]]:
        """The Model, if it has one of its own, and the InferenceService of a mistake."""
        mistake = MISTAKES[name]
        wanted = service(name, "fine" if mistake.model is None else name)
        wanted["spec"] |= self.filled(mistake.spec)
        wanted["metadata"]["annotations"] = mistake.annotations
        if mistake.model is None:
            return [wanted]
        made = model(name, self.system.tiny_model()["spec"]["source"])
        made["spec"] |= self.filled(mistake.model)
        return [made, wanted]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    base = tmp_path_factory.mktemp("mistakes")
    (base / "directory").mkdir()
    (base / "text.gguf").write_text("no model" * 100)
    tiny = System(base).tiny.read_bytes()
    page = b"<!DOCTYPE html><html><body>Please log in</body></html>"
    files: dict[str, dict[str, bytes | Path]] = {
        "o/r": {"m-Q4_K_M.gguf": tiny, "m-Q8_0.gguf": tiny},
        "d/r": {"m.gguf": page},
    }
    flags = "--memory-fraction", f"{share(300 * MIB):.9f}"
    with Hub(files) as hub, running(base, "--hf-endpoint", hub.url, *flags) as up, socket.socket() as other:
        ports = up.flags[up.flags.index("--ports") + 1].split("-")
        other.bind(("127.0.0.1", int(ports[1])))
        other.listen()
        up.apply(up.tiny_model("fine"), service("holder", "fine", containerPort=int(ports[1]) - 1))
        up.ready("holder")
        yield Place(
            up,
            {
                "DIRECTORY": str(base / "directory"),
                "TEXT": str(base / "text.gguf"),
                "TAKEN": int(ports[1]),
                "HELD": int(ports[1]) - 1,
                "PAGE": f"{hub.url}/d/r/resolve/main/m.gguf",
            },
        )


@pytest.mark.parametrize("name", TOLD)
def test_a_mistake_is_answered_with_the_field_and_the_next_step(place: Place, name: str) -> None:
    system, mistake = place.system, TOLD[name]
    system.apply(*place.manifests(name))
    eventually(
        lambda: system.condition(mistake.condition, name).get("reason") == mistake.reason,
        20,
        f"{mistake.reason}; {system.status(name)}",
    )
    message = system.condition(mistake.condition, name)["message"]
    assert all(word in message for word in mistake.words), message
    if mistake.condition == "MetalReady":
        assert mistake.reason in system.kubectl("get", "isvc", name)
    system.delete(name)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_schema_refuses_is_told_by_kubectl(place: Place, name: str) -> None:
    items = {"apiVersion": "v1", "kind": "List", "items": place.manifests(name)}
    said = place.system.kubectl("apply", "-f", "-", stdin=json.dumps(items), check=False)
    assert all(word in said for word in REFUSED[name].words), said


@pytest.mark.parametrize("name", TYPED)
def test_what_is_typed_wrongly_is_told_in_the_terminal(place: Place, name: str) -> None:
    system, mistake = place.system, TYPED[name]
    where = ["--state-dir", str(system.state)] if mistake.command != ("statsu",) else []
    command = [sys.executable, "-I", "-m", "metal_supervisor", *mistake.command, *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and all(word in said for word in mistake.words), said
    assert "Traceback" not in said


def test_a_model_that_is_deleted_while_it_is_used_goes_on_and_the_field_is_named(place: Place) -> None:
    system = place.system
    system.apply(system.tiny_model("used"), service("user", "used"))
    engine = system.ready("user")
    system.kubectl("delete", "model", "used")
    eventually(lambda: system.condition("Degraded", "user").get("reason") == "ModelNotFound", 20, "it to be said")
    message = system.condition("Degraded", "user")["message"]
    assert "spec.modelRef" in message and "apply it" in message and system.pid("user") == engine
    system.delete("user")
