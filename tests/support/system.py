"""The whole system under test: real supervisord, real engines, real kubectl, in a directory of its own.

A `System` is one `metal-supervisor run` on free ports. Everything in it is waited for, never slept for;
everything it started is gone when it is closed, and that is checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import find_llama_server
import psutil
import tiny_gguf
from supervisor.options import ClientOptions
from supervisor.supervisorctl import Controller

from metal_supervisor.cluster.kube import BadKubeconfig, Kube, KubeError
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.client import Supervisord, Unavailable
from tests.support import fake_runtime, faulty_api, ports
from tests.support.pace import patience

ROOT = Path(__file__).resolve().parents[2]

T = TypeVar("T")
ISVC = "/apis/inference.llmkube.dev/v1alpha1/namespaces/default/inferenceservices"
MODELS = "/apis/inference.llmkube.dev/v1alpha1/namespaces/default/models"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
SERVICES = "/api/v1/namespaces/default/services"
FAKE_ENGINE = ROOT / "tests/support/fake_runtime.py"


SHORTEST_LOOK_S = 0.01
LONGEST_LOOK_S = 0.1
"""Between two looks of `eventually`."""


def eventually(look: Callable[[], T | None], within_s: float = 20.0, what: str = "") -> T:
    """The first true value of `look`, or a failure that says what was waited for.

    `within_s` is for an idle machine of two cores. Once it has passed, it becomes as much longer as this one is slower.
    It looks each 10 ms, and less often after a while: each look costs this process and the one that it asks.
    """
    start = time.monotonic()
    until, stretched_s = start + within_s, 0.0
    last: object = None
    while True:
        if time.monotonic() >= until:
            if stretched_s:
                raise AssertionError(f"not within {stretched_s:.1f} s: {what or look.__name__} (last: {last!r})")
            stretched_s = patience(within_s)
            until = start + stretched_s
        try:
            found = look()
            if found:
                return found
            last = found
        except (KubeError, BadKubeconfig, Unavailable, OSError, LookupError, http.client.HTTPException) as error:
            last = error
        waited_s = time.monotonic() - start
        time.sleep(min(max(SHORTEST_LOOK_S, waited_s / 20), LONGEST_LOOK_S))


@functools.cache
def _own_ports() -> ports.Range:
    return ports.Range()


def free_ports(count: int) -> list[int]:
    """Distinct ports on which nothing listens; no other process of tests takes them."""
    return [_own_ports().free() for _ in range(count)]


def engine_path() -> Path:
    """A real llama-server for this machine."""
    return find_llama_server.find(install_it=False)


def model(name: str = "tiny", source: str = "", accelerator: str = "metal", **spec: Any) -> dict[str, Any]:
    """A Model manifest."""
    return {
        "apiVersion": "inference.llmkube.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"source": source, "format": "gguf", "hardware": {"accelerator": accelerator}, **spec},
    }


def service(name: str = "tiny", model: str = "tiny", **spec: Any) -> dict[str, Any]:
    """An InferenceService manifest; one thread and a small context, because the tests share two cores."""
    spec = {"contextSize": 512, "extraArgs": ["--threads", "1"], **spec}
    return {
        "apiVersion": "inference.llmkube.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"modelRef": model, **spec},
    }


def seccomp(pid: int) -> str:
    """`2` for a process with a filter of system calls."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Seccomp:"))


BREATH_S = 0.5
"""Between two answers of a stream: an engine that never rests takes a core from all that is tested beside it."""


class Stream:
    """Chat answers that stream one after another, in a thread of their own, until told to end."""

    def __init__(self, port: int, tokens: int, path: str = "/v1/chat/completions", engine: int = 0) -> None:
        """`engine`: pid of one that is `slowed` meanwhile, 0 for none; 400 tokens take a tiny model 2 s then."""
        self._port, self._tokens, self._path, self._engine = port, tokens, path, engine
        self.chunks = 0
        self.answers = 0
        self.error = ""
        self._flowing, self._last = threading.Event(), threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with slowed(self._engine) if self._engine else contextlib.nullcontext():
                while not self._last.is_set():
                    self._one()
                    self._last.wait(BREATH_S)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = repr(error)

    def _one(self) -> None:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "ignore_eos": True,
            "max_tokens": self._tokens,
        }
        connection = self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("POST", self._path, json.dumps(body), {"Content-Type": "application/json"})
            lines = [line for line in self._lines(connection) if line.startswith(b"data:")]
        finally:
            connection.close()
        if not lines or lines[-1].strip() != b"data: [DONE]" or len(lines) < self._tokens:
            raise ValueError(f"an answer ended after {len(lines)} of {self._tokens} events: {lines[-1:]}")
        self.answers += 1

    def _lines(self, connection: http.client.HTTPConnection) -> Iterator[bytes]:
        for line in connection.getresponse():
            if line.startswith(b"data:"):
                self.chunks += 1
                self._flowing.set()
            yield line

    def flowing(self) -> Stream:
        """Waits for the first token."""
        assert self._flowing.wait(30), f"no token: {self.error}"
        return self

    def last(self) -> Stream:
        """Lets the answer under way be the last."""
        self._last.set()
        return self

    def ended(self) -> bool:
        """Whether nothing streams any more."""
        return not self._thread.is_alive()

    def goes_on(self) -> None:
        """Waits for more of the answer under way."""
        assert not self.ended(), self.error
        before = self.chunks
        eventually(lambda: self.chunks > before + 10, 60, f"more than {before} chunks: {self.error}")

    def leave(self) -> None:
        """Hangs up in the middle of an answer."""
        self._last.set()
        with contextlib.suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)

    def completed(self, within_s: float = 90.0) -> bool:
        """Lets the current answer be the last; whether every answer ended by itself, whole."""
        self._last.set()
        self._thread.join(within_s)
        return self.answers > 0 and not self.error and not self._thread.is_alive()


FAKE_FLAGS = tuple(f"--fake-{each.name.replace('_', '-')}" for each in dataclasses.fields(fake_runtime.Faults))
"""What the stand-in for an engine takes besides the engine's own flags."""
OPENED = f"--allow-extra-args={','.join(FAKE_FLAGS)}", "--allow-env", "TEST_OPEN_FILES"
LOOPBACK = "--private-hosts", "127.0.0.0/8,::1", "--allowed-roots", "/"
"""What tests fetch from are servers of this machine, and their files are anywhere."""


def _is_question(process: psutil.Process) -> bool:
    """True for a program that is asked for its version: that ends within seconds, also without who asked."""
    try:
        return process.cmdline()[-1:] == ["--version"]
    except psutil.Error:
        return False


def system_environment() -> dict[str, str]:
    """Ours, but `env python3`, which stand-ins are, is no version manager's shim: that costs more than they do."""
    return {**os.environ, "PATH": f"{sys.base_exec_prefix}/bin{os.pathsep}{os.environ['PATH']}"}


class System:
    """One running metal-supervisor."""

    def __init__(
        self,
        base: Path,
        *flags: str,
        engine: Path | None = None,
        state: Path | None = None,
        python: Path | str = sys.executable,
    ) -> None:
        """`python`: of the installation that starts it."""
        self.base, self.python = base, str(python)
        self.state = state or base / "run"
        self._ports = ports.Range()
        self.http = self._ports.last
        # Many of their engines never load, and would keep the others waiting.
        known = (*(OPENED if engine else ()), "--gateway", "off", "--parallel-starts", "1000")
        opened = known if self.python == sys.executable else ()  # an older release does not know all of them
        self.flags = [
            "--state-dir",
            str(self.state),
            "--port",
            str(self.http),
            "--ports",
            f"{self._ports.first}-{self.http - 1}",
            "--llama-server",
            str(engine or engine_path()),
            *LOOPBACK,
            *opened,
            *flags,
        ]
        self.ports = range(self._ports.first, self.http)
        """Its --ports."""
        self.log = base / "run.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.files = StateDir(self.state.resolve())
        self.rpc = Supervisord(self.files.socket)
        self.tiny = base / "tiny.gguf"
        if not self.tiny.exists():
            tiny_gguf.write_tiny_gguf(self.tiny, context=32768)
        self._kube: Kube | None = None

    def settings(self) -> dict[str, str]:
        """Its flags but for the state directory, by their names with the dashes."""
        words = [word for flag in self.flags[2:] for word in flag.split("=", 1)]
        return dict(zip(words[::2], words[1::2], strict=True))

    # ── its life ─────────────────────────────────────────────────────────────────────────────────

    def start_if_stopped(self) -> System:
        """Start it where a test has left it stopped."""
        return self if self.process is not None else self.start()

    def start(self) -> System:
        """Starts it and waits until its API answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.python, "-I", "-m", "metal_supervisor", "run", *self.flags],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=system_environment(),
            )
        eventually(lambda: self.get("/version"), what=f"the API to answer; {self.said()}")
        eventually(lambda: self.health()[0] == 200, what="the sidecar to answer")
        return self

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Ends it in order; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            return self.process.wait(60)
        finally:
            self.process = None

    def close(self) -> None:
        """Ends it whatever state it is in; what is still there afterwards is a failure."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        self.rpc.close()
        self.forget()
        psutil.wait_procs([each for each in self.processes() if _is_question(each)], 10)
        left = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                left.append(process.cmdline())
                process.kill()
        self._ports.release()
        assert not left, f"left running: {left}"

    def processes(self) -> list[psutil.Process]:
        """Every process of this system, wherever it hangs in the tree."""
        found = []
        marks = {str(self.state), self.files.home, str(self.base)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if any(mark in part for part in process.cmdline() for mark in marks):
                    found.append(process)
        return found

    def commands(self) -> dict[int, list[str]]:
        """Command line of each process of this system, by pid, without those that end meanwhile."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found[process.pid] = process.cmdline()
        return found

    def said(self) -> str:
        """What it printed."""
        return self.log.read_text() if self.log.exists() else ""

    # ── Kubernetes ───────────────────────────────────────────────────────────────────────────────

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def kube(self) -> Kube:
        if self._kube is None:
            self._kube = Kube(self.kubeconfig)
        return self._kube

    def forget(self) -> None:
        """Reads the kubeconfig anew: the embedded API has a new address."""
        if self._kube is not None:
            self._kube.close()
        self._kube = None

    def get(self, path: str) -> dict[str, Any]:
        return self.kube.request("GET", path)

    def maybe(self, path: str) -> dict[str, Any] | None:
        """The object, or None if there is none."""
        try:
            return self.get(path)
        except KubeError as error:
            if error.code == 404:
                return None
            raise

    def apply(self, *objects: dict[str, Any]) -> None:
        """Server-side apply, as a user's tool would."""
        plural = {"Model": MODELS, "InferenceService": ISVC, "Service": SERVICES}
        for item in objects:
            self.kube.apply(f"{plural[item['kind']]}/{item['metadata']['name']}", item, "test", force=True)

    def delete(self, name: str, path: str = ISVC) -> None:
        self.kube.request("DELETE", f"{path}/{name}")

    def tiny_model(self, name: str = "tiny") -> dict[str, Any]:
        return model(name, f"file://{urllib.parse.quote(str(self.tiny))}")

    def kubectl(self, *arguments: str, check: bool = True, stdin: str | None = None) -> str:
        """Runs the real kubectl; returns what it printed."""
        done = subprocess.run(
            ["kubectl", "--kubeconfig", str(self.kubeconfig), "--cache-dir", str(self.base / "cache"), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            input=stdin,
        )
        assert not check or done.returncode == 0, f"kubectl {arguments}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def status(self, name: str = "tiny") -> dict[str, Any]:
        return dict(self.get(f"{ISVC}/{name}").get("status") or {})

    def condition(self, kind: str, name: str = "tiny") -> dict[str, Any]:
        found = [item for item in self.status(name).get("conditions", []) if item["type"] == kind]
        return found[0] if found else {}

    def slice(self, name: str = "tiny") -> dict[str, Any] | None:
        """This Mac's slice of a service."""
        found = self.kube.request("GET", SLICES, {"labelSelector": f"kubernetes.io/service-name={name}"})["items"]
        return found[0] if found else None

    def slice_ready(self, name: str = "tiny") -> bool | None:
        found = self.slice(name)
        return None if found is None else found["endpoints"][0]["conditions"]["ready"]

    def ready(self, name: str = "tiny", within_s: float = 30.0) -> int:
        """Waits until a service is Ready in the cluster; returns its engine's pid."""
        eventually(lambda: self.status(name).get("phase") == "Ready", within_s, f"{name} to be Ready; {self.said()}")
        return self.pid(name)

    # ── supervisord and the engines ──────────────────────────────────────────────────────────────

    def supervisorctl(self, *arguments: str) -> str:
        """What supervisorctl prints. Its own code runs here, as a process of its own costs 0.1 s of CPU each time."""
        options, printed = ClientOptions(), io.StringIO()
        options.realize(["-c", f"{self.state}/supervisord.conf", *arguments])
        controller = Controller(options, stdout=printed)
        thread = threading.Thread(target=controller.onecmd, args=(" ".join(options.args),), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), f"supervisorctl {arguments}: {printed.getvalue()}"
        return printed.getvalue()

    def supervisorctl_program(self, *arguments: str) -> str:
        """The same of the real program, as a user types it."""
        done = subprocess.run(
            [str(Path(sys.executable).parent / "supervisorctl"), "-c", f"{self.state}/supervisord.conf", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout + done.stderr

    def pid(self, name: str = "tiny") -> int:
        """Pid of a service's engine (not of a stand-in), 0 if there is none."""
        note = self.files.run_note(f"default.{name}")
        row = self.rpc.table().get(f"default.{name}")
        if row is None or not row.pid:
            return 0
        return note.pid if note and note.launcher_pid == row.pid else row.pid

    def noted_pid(self, program: str) -> int:
        """Pid in the launcher's note of a program, 0 without one."""
        note = self.files.run_note(program)
        return note.pid if note else 0

    def own_pid(self, program: str) -> int:
        row = self.rpc.table().get(program)
        return row.pid if row else 0

    def take_orders(self) -> None:
        """Makes its embedded API one that `api_faults` can tell to misbehave, until the next boot."""
        before = self.own_pid("apiserver")
        faulty_api.take_over(self.state / "current" / "metal-supervisor")
        kill(before)
        eventually(lambda: self.own_pid("apiserver") not in (0, before), what="the API to be started again")
        eventually(lambda: api_faults(self.kube.server) is None, what="an API that takes orders")

    def supervisord_pid(self) -> int:
        return int((self.state / "supervisord.pid").read_text() or "0")

    def port(self, name: str = "tiny") -> int:
        found = eventually(lambda: self.slice(name), what=f"a slice of {name}")
        return int(found["ports"][0]["port"])

    def engines(self) -> list[int]:
        """Pids of all engine processes of this system."""
        return sorted(
            pid
            for pid, command in self.commands().items()
            if "--alias" in command and not any("launch.py" in part for part in command)
        )

    def stream(self, name: str = "tiny", tokens: int = 400, slow: bool = True) -> Stream:
        """Answers of an engine under way. `slow`: it is `slowed` until they end."""
        return Stream(self.port(name), tokens, engine=self.pid(name) if slow else 0).flowing()

    def chat(self, name: str = "tiny") -> str:
        """One chat answer, from the registered address."""
        found = self.slice(name)
        assert found is not None
        address, port = found["endpoints"][0]["addresses"][0], found["ports"][0]["port"]
        body = json.dumps({"model": name, "messages": [{"role": "user", "content": "hi"}]}).encode()
        connection = http.client.HTTPConnection(address, port, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            return str(json.load(connection.getresponse())["choices"][0]["message"]["content"])

    def ask(
        self, name: str, path: str = "/v1/chat/completions", timeout_s: float = 120, **body: Any
    ) -> tuple[int, Any]:
        """(status, answer) of one request to the registered endpoint of a service; without a body a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port(name), timeout=timeout_s)
        with contextlib.closing(connection):
            if body:
                body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **body}
            connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
            answer = connection.getresponse()
            return answer.status, json.load(answer)

    def told(self, name: str) -> str:
        """What MetalReady says of a service."""
        found = self.condition("MetalReady", name)
        return f"{found.get('reason')}: {found.get('message')}"

    # ── the sidecar ──────────────────────────────────────────────────────────────────────────────

    def fetch(self, path: str, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=10)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def health(self) -> tuple[int, dict[str, Any]]:
        status, body = self.fetch("/healthz")
        return status, json.loads(body)

    def observe(self, name: str = "tiny") -> dict[str, Any]:
        """The row of a service in /status."""
        rows = json.loads(self.fetch("/status")[1])["services"]
        found = [row for row in rows if row["name"] == name]
        return found[0] if found else {}


@contextlib.contextmanager
def running(
    base: Path, *flags: str, engine: Path | None = None, state: Path | None = None, python: Path | str = sys.executable
) -> Iterator[System]:
    """A started System that is gone afterwards."""
    system = System(base, *flags, engine=engine, state=state, python=python)
    try:
        yield system.start()
    except BaseException:
        sys.stderr.write(f"── run.log ──\n{system.said()}\n")
        for path in sorted((system.state / "log").glob("*.log")):
            sys.stderr.write(f"── {path.name} ──\n{path.read_text(errors='replace')[-3000:]}\n")
        raise
    finally:
        system.close()


def kill(pid: int) -> None:
    """kill -9 of a process of the system under test."""
    assert pid > 0
    os.kill(pid, signal.SIGKILL)


def api_faults(url: str, *rules: dict[str, Any]) -> None:
    """Tells an embedded API that takes such orders how to misbehave; without rules, not to any more."""
    server = urllib.parse.urlsplit(url)
    method, body = ("POST", json.dumps(rules)) if rules else ("DELETE", None)
    with contextlib.closing(http.client.HTTPConnection(server.netloc, timeout=10)) as connection:
        connection.request(method, server.path + "/faults", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()


@contextlib.contextmanager
def halted(pid: int) -> Iterator[None]:
    """Stops a process (SIGSTOP) for as long as the block lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Lets an engine run a twentieth of the time: answers stay under way, and take no core from the tests beside it.

    It still does within 0.2 s what it is asked to. It may end meanwhile, but supervisord may not: one that is halted
    when its process group is orphaned gets a SIGHUP.
    """
    process, over = psutil.Process(pid), threading.Event()

    def take_turns() -> None:
        with contextlib.suppress(psutil.Error):
            while not over.wait(0.01):
                process.suspend()
                over.wait(0.19)
                process.resume()

    thread = threading.Thread(target=take_turns, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
