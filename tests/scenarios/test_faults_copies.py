"""A second system from a copy of a running state directory (case S49c): whose processes are whose."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import openai

from tests.support.effort import cases
from tests.support.faults import Figure, fault
from tests.support.gateway import Gateway, with_gateway
from tests.support.system import System, eventually, free_ports, service, slowed

ROUNDS = 20
TOKENS = 300
QUESTION: Any = [{"role": "user", "content": "hi"}]


class Streams(threading.Thread):
    """Answers of openai's client through the gateway, one after another."""

    def __init__(self, gateway: Gateway, engine: int) -> None:
        super().__init__(daemon=True)
        self._url, self._engine = f"{gateway.url}/v1", engine
        self.whole, self.events = 0, 0
        self.problem = ""
        self.last = threading.Event()

    def run(self) -> None:
        """Stream until `last`."""
        try:
            with openai.OpenAI(base_url=self._url, api_key="unused", max_retries=0) as client, slowed(self._engine):
                while not self.last.is_set():
                    self._one(client)
        except (openai.OpenAIError, AssertionError) as error:
            self.problem = repr(error)

    def flow(self) -> None:
        """Wait for the next event of an answer."""
        before = self.events
        eventually(lambda: self.events > before, 60, f"an answer under way: {self.problem}")

    def _one(self, client: openai.OpenAI) -> None:
        reason = None
        more = {"ignore_eos": True}
        for chunk in client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=TOKENS, stream=True, extra_body=more
        ):
            self.events += 1
            reason = chunk.choices[0].finish_reason if chunk.choices else reason
        assert reason == "length", f"an answer ended with {reason}"
        self.whole += 1


def everything(system: System) -> dict[str, int]:
    """Pid of each program that supervisord has here."""
    return {name: row.pid for name, row in system.rpc.table().items() if row.pid}


def serves_itself(copy: System) -> bool:
    """True once the copy's engine is published in the place of the original's."""
    return copy.observe()["ready"] and copy.port() in copy.ports


@fault(
    "S49c",
    "a copy of a running state directory is started as a second system, and stopped again",
    happens="it adopts and ends nothing of the original; its engines start with specs and ports of its own",
    sees="a line for each engine of the original that is left alone; commands in an unstarted copy name the original",
    bound="no stream is cut, and every process of the original stays",
)
def test_a_copy_of_a_running_state_directory_leaves_the_original_alone(tmp_path: Path, figure: Figure) -> None:
    (tmp_path / "original").mkdir()
    with with_gateway(tmp_path / "original") as gateway:
        original = gateway.system
        original.apply(original.tiny_model(), service(contextSize=32768))
        engine = original.ready()
        gateway.serves("tiny")
        before = everything(original)
        streams = Streams(gateway, engine)
        streams.start()
        rounds = cases(ROUNDS)
        for number in range(rounds):
            streams.flow()
            base = tmp_path / f"copy-{number}"
            base.mkdir()
            (port,) = free_ports(1)
            copy = System(base, "--gateway", f"127.0.0.1:{port}")
            subprocess.run(["cp", "-a", original.state, copy.state], check=True)
            if number == 0:
                stop = [sys.executable, "-m", "metal_supervisor", "stop", "tiny", "--state-dir", str(copy.state)]
                done = subprocess.run(stop, capture_output=True, text=True, timeout=60)
                assert done.returncode == 3 and f"copy of {original.files.home}" in done.stderr
            try:
                copy.start().forget()  # until its boot, its kubeconfig leads to the original
                eventually(partial(serves_itself, copy), 60, "an engine of its own")
                assert copy.pid() not in (0, engine)
                assert f"pid {engine} does not belong to this state directory" in copy.said()
            finally:
                copy.close()
            assert everything(original) == before and not streams.problem
        streams.last.set()
        streams.join(120)
        assert not streams.problem and streams.whole >= rounds
        assert original.health()[0] == 200 and original.pid() == engine
        figure.add("copies started and stopped", rounds, "")
        figure.add("answers meanwhile, all whole", streams.whole, "")
        figure.add("answers cut", 0, "")
