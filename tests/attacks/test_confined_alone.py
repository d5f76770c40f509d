"""Flags and variables that the allow-lists refuse, given to a real llama-server as if they did not.

Each is made twice. Without confinement it has to work, or it would prove nothing; under the policy of a service of this
model it must not. What the operating system holds does not depend on the tables of flags.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import find_llama_server
import pytest

from metal_supervisor import launch
from metal_supervisor.confinement.probe import launcher_command
from metal_supervisor.runtimes import RUNTIMES, Binary
from metal_supervisor.runtimes.builds import homes_of
from tests.support.pace import patience
from tests.support.system import engine_path, free_ports, tiny_gguf

SECRET = "hunter2-of-another-tenant"
TRIES = 3
"""An engine that ends at once may lose what it wrote last: a thread of its own writes its log."""
MARK = "mark"
LIBRARY = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void run(void) {{
  int fd = open("{mark}", O_CREAT | O_WRONLY, 0600);
  if (fd >= 0) close(fd);
}}
"""


class World:
    """A model of one's own, files of others, and a listener."""

    def __init__(self, base: Path) -> None:
        self.base = base.resolve()
        self.own, self.others, self.scratch = (self.base / name for name in ("own", "others", "scratch"))
        for each in (self.own, self.others, self.scratch, self.base / "specs"):
            each.mkdir()
        self.model, self.other = self.own / "tiny.gguf", self.others / "other.gguf"
        tiny_gguf.write_tiny_gguf(self.model)
        shutil.copy(self.model, self.other)
        self.secret, self.config = self.others / "token", self.others / "config.json"
        self.secret.write_text(SECRET)
        self.config.write_text(json.dumps({"title": SECRET}))
        self.mark = self.others / MARK
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.port, self.second = free_ports(2)

    def was_called(self) -> bool:
        """True once something connected to the listener."""
        try:
            self.listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def asked(self, method: str, path: str, body: object = None, port: int = 0) -> str:
        """Answer of the engine, "" without one."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=patience(20))
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            return connection.getresponse().read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            return ""
        finally:
            connection.close()

    def library(self) -> str:
        """A shared library beside the model that writes a file of others as soon as it is loaded."""
        source, path = self.base / "x.c", self.own / "tokenizer.model"
        source.write_text(LIBRARY.format(mark=self.mark))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True, timeout=120)
        return str(path)


@dataclass(frozen=True)
class Attack:
    """One way in, and how to tell that it worked."""

    flags: Callable[[World], Sequence[str]]
    worked: Callable[[World, str], bool]
    """(world, what the engine printed) -> True if it worked."""
    env: Callable[[World], Mapping[str, str]] = field(default=lambda _world: {})


def _saved(world: World, _said: str) -> bool:
    world.asked("POST", "/completion", {"prompt": "a b c", "n_predict": 1, "id_slot": 0, "cache_prompt": True})
    world.asked("POST", "/slots/0?action=save", {"filename": MARK})
    return world.mark.exists()


ATTACKS = {
    "a file of others as the chat template": Attack(
        lambda world: ["--jinja", "--chat-template-file", str(world.secret)],
        lambda world, _: SECRET in world.asked("GET", "/props"),
    ),
    "a file of others as settings of the web page": Attack(
        lambda world: ["--webui-config-file", str(world.config)],
        lambda world, _: SECRET in world.asked("GET", "/props"),
    ),
    "the first bytes of a file of others in an error": Attack(
        lambda world: ["--lora", str(world.secret)], lambda _, said: f"'{SECRET[:4]}'" in said
    ),
    "the model of another tenant": Attack(
        lambda world: ["--model", str(world.other)], lambda world, _: "other.gguf" in world.asked("GET", "/props")
    ),
    "a log anywhere": Attack(lambda world: ["--log-file", str(world.mark)], lambda world, _: world.mark.exists()),
    "saved slots anywhere": Attack(lambda world: ["--slots", "--slot-save-path", f"{world.others}/"], _saved),
    "layers on another host": Attack(
        lambda world: ["--rpc", f"127.0.0.1:{world.listener.getsockname()[1]}"], lambda world, _: world.was_called()
    ),
    "a model from another host": Attack(
        lambda world: [
            "--model-url",
            f"http://127.0.0.1:{world.listener.getsockname()[1]}/m.gguf",
            "--model",
            f"{world.scratch}/m.gguf",
        ],
        lambda world, _: world.was_called(),
    ),
    "another port": Attack(
        lambda world: ["--port", str(world.second)],
        lambda world, _: bool(world.asked("GET", "/health", port=world.second)),
    ),
    "a library that came with the model, by variable": Attack(
        lambda _world: ["--override-tensor", "x=CPU"],
        lambda world, _: world.mark.exists(),
        env=lambda world: {"GGML_BACKEND_PATH": world.library()},
    ),
}


def made(attack: Attack, world: World, program: Path, confined: bool) -> bool:
    """True if an attack works on a real llama-server, started by the real launcher."""
    path = str(program)
    binary = Binary(path, frozenset(), homes=homes_of(Path(path), ""))
    access = RUNTIMES["llama-server"].access(binary, "")
    access = replace(access, read=(*access.read, str(world.model)), write=(str(world.scratch),), bind=(world.port,))
    argv = [path, "--model", str(world.model), "--host", "127.0.0.1", "--port", str(world.port), "--ctx-size", "512"]
    env = {"HOME": str(world.scratch), **attack.env(world)}
    command = launcher_command(
        world.base, Path(launch.__file__), [*argv, *attack.flags(world)], env, access, confined=confined
    )
    log = world.base / "log"
    with log.open("wb") as out:
        engine = subprocess.Popen(command, stdout=out, stderr=out, cwd=world.base)
    try:
        until = time.monotonic() + patience(30)
        # Up, or ended, or as far as the attack got: an engine that waits for a host that says nothing does neither.
        while engine.poll() is None and "ok" not in world.asked("GET", "/health") and time.monotonic() < until:
            if attack.worked(world, log.read_text("utf-8", "replace")):
                return True
            time.sleep(0.05)
        return attack.worked(world, log.read_text("utf-8", "replace"))
    finally:
        engine.kill()
        engine.wait()
        world.listener.close()


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_confinement_alone_holds_what_the_tables_of_flags_refuse(name: str, tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("the acceptance run on a Mac tries its profile")
    # Where the engine at hand is llama-server's library, some ways in are only the packaged binary's, before it loads.
    programs = [*dict.fromkeys((engine_path(), find_llama_server.with_full_help()))]
    for at, program in enumerate(programs * TRIES):
        plain, confined = (tmp_path / f"{each}{at}" for each in ("plain", "confined"))
        plain.mkdir()
        confined.mkdir()
        if made(ATTACKS[name], World(plain), program, confined=False):
            assert not made(ATTACKS[name], World(confined), program, confined=True)
            return
    pytest.fail("it proves nothing where it does not work unconfined")
