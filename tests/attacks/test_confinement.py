"""A hostile program in an engine's place, started by the real launcher under the real policy: it gets nowhere.

Each attempt is made twice. Without confinement it has to work, or it would prove nothing; the few that this machine
refuses to everybody are named.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor import launch
from metal_supervisor.confinement import enforce
from metal_supervisor.confinement.access import Access
from metal_supervisor.confinement.policy import policy
from tests.support.system import free_ports

HOSTILE = Path(__file__).parent / "hostile_engine.py"
NOT_HELD = {
    "open_see_that_a_file_is_there": "Landlock does not govern stat: names and sizes of known paths can be asked for",
    "open_listen_on_a_port_that_the_system_chooses": "listen() without bind() takes a random port",
    "open_run_a_program_in_memory": "it stays in the same confinement",
    "open_move_another_to_a_core": "needs the same user; it slows another engine, and tells nothing of it",
}
"""Attempts that work though confined, and why that is accepted; docs/security.md has them."""
REFUSED_ANYWAY = frozenset(
    {
        "connect_over_sctp",
        "vsock",
        "a_call_of_the_x32_interface",
        "a_call_nobody_has_judged",
        "module",
        "io_uring",
        "host_name",
        "handle_of_a_file",
        "queue_a_signal",
        "keys",
        "bpf",
        "userfaultfd",
        "fast_open",
        "fast_open_by_sendmsg",
        "message_queue",
        "performance_events",
        "mount",
        "user_namespace",
        "clone_into_a_namespace",
        "io_uring_enter",
        "io_uring_register",
        "socket_of_the_x32_interface",
        "pair_of_the_x32_interface",
        "pair_of_another_family",
        "send_to_a_path_by_a_pair_of_streams",
        "connect_a_pair_of_streams_to_a_path",
        "connect_a_lone_end_of_a_pair_to_a_path",
        "turn_tcp_into_smc",
        "dump_its_memory",
        "enter_a_namespace",
        "clone_into_a_pid_namespace",
    }
)
"""Attempts that some kernels, or a container around the tests, refuse to everybody."""


class World:
    """A state directory, a sibling engine and listeners: what there is to attack."""

    def __init__(self, base: Path) -> None:
        self.base = base.resolve()
        state, home = self.base / "state", self.base / "home"
        for path in (
            *(state / name for name in ("specs", "runs", "scratch/own", "models.d", "current", "cluster", "models")),
            home / ".ssh",
            home / "Library" / "LaunchAgents",
        ):
            path.mkdir(parents=True)
        files = {
            "secret": state / "cluster" / "token",
            "sibling_model": state / "models" / "other.gguf",
            "sibling_spec": state / "specs" / "other.json",
            "ssh_key": home / ".ssh" / "id_ed25519",
            "supervisord_conf": state / "supervisord.conf",
            "victim": state / "models.d" / "other.conf",
            "movable": state / "cluster" / "a",
            "exchanged": state / "cluster" / "b",
            "model": state / "models" / "own.gguf",
        }
        for path in files.values():
            path.write_text("secret text")
        (state / "current" / "launch.py").write_text("# the launcher")
        self.sibling = subprocess.Popen(["/bin/sleep", "600"], env={"TOKEN": "secret"})
        self.sockets = [socket.create_server(("0.0.0.0", 0)) for _ in range(2)]
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        name = f"metal-attack-{os.getpid()}-{base.name}"
        unix.bind(str(state / "s.sock"))
        unix.listen()
        abstract.bind(f"\0{name}")
        abstract.listen()
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bell.bind(str(state / "bell"))
        self.sockets += [udp, unix, abstract, bell]
        self.port, free = free_ports(2)
        self.facts: dict[str, Any] = {
            **{name: str(path) for name, path in files.items()},
            "passwd": "/etc/passwd",
            "state": str(state),
            "scratch": str(state / "scratch" / "own"),
            "agents": str(home / "Library" / "LaunchAgents"),
            "sibling_pid": self.sibling.pid,
            "sibling_port": self.sockets[0].getsockname()[1],
            "api_port": self.sockets[1].getsockname()[1],
            "udp_port": udp.getsockname()[1],
            "free_port": free,
            "outside": "127.0.0.2",
            "unix": str(state / "s.sock"),
            "abstract": name,
            "port": self.port,
            "doorbell": str(state / "bell"),
            "sibling_address": self._address(),
        }

    def _address(self) -> int:
        """An address that is mapped in the sibling."""
        return int(Path(f"/proc/{self.sibling.pid}/maps").read_text().partition("-")[0], 16)

    def access(self) -> Access:
        """The access of a Python engine, as the runtimes compose it."""
        real = Path(os.path.realpath(sys.executable))
        prefixes = dict.fromkeys(str(each) for each in (Path(sys.prefix), real.parent.parent))
        return Access(
            execute=(sys.executable, str(real)),
            libraries=(*prefixes, str(HOSTILE)),
            read=(self.facts["model"],),
            write=(self.facts["scratch"],),
            bind=(self.port,),
            python=True,
        )

    def run(self, confinement: object) -> dict[str, str]:
        """What each attempt came to, under a policy or without one."""
        state = Path(self.facts["state"])
        spec = state / "specs" / "default.tiny.json"
        spec.write_text(
            json.dumps(
                {
                    "format": 1,
                    "program": "default.own",
                    "argv": [sys.executable, "-I", str(HOSTILE), json.dumps(self.facts)],
                    "env": {},
                    "cwd": self.facts["scratch"],
                    "host": "127.0.0.1",
                    "port": self.port,
                    "supervisor_log": str(state / "supervisord.log"),
                    "confinement": confinement,
                }
            )
        )
        done = subprocess.run(
            [sys.executable, "-I", "-S", launch.__file__, str(spec)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, str] = json.loads(done.stdout)
        return found

    def close(self) -> None:
        self.sibling.kill()
        self.sibling.wait()
        for each in self.sockets:
            each.close()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, World]]:
    if sys.platform != "linux":
        pytest.skip("Seatbelt's rows are tried by tests/support/mac/mac_acceptance.py")
    assert enforce.landlock_abi() >= enforce.LEAST_ABI, "this kernel cannot confine; nothing here would be proven"
    both = World(tmp_path_factory.mktemp("plain")), World(tmp_path_factory.mktemp("confined"))
    yield both
    for each in both:
        each.close()


@pytest.fixture(scope="module")
def outcomes(worlds: tuple[World, World]) -> tuple[dict[str, str], dict[str, str]]:
    """(without confinement, with it): attempt -> what it came to."""
    plain, confined = worlds
    found = confined.run(policy(confined.access(), sys.platform, str(confined.base / "home")))
    return plain.run(False), found


def test_nothing_that_an_engine_has_no_business_with_works(outcomes: tuple[dict[str, str], dict[str, str]]) -> None:
    plain, confined = outcomes
    tried = [name for name in confined if not name.startswith(("own_", "open_"))]
    assert len(tried) >= 60
    assert {name: said for name in tried if (said := confined[name]) == "worked"} == {}
    futile = {name: plain[name] for name in tried if plain[name] != "worked"}
    assert not futile.keys() - REFUSED_ANYWAY, f"these prove nothing: {futile}"


def test_no_call_that_makes_a_socket_reaches_one_outside(
    worlds: tuple[World, World], outcomes: tuple[dict[str, str], dict[str, str]]
) -> None:
    plain, confined = (select.select(world.sockets, [], [], 0)[0] for world in worlds)
    assert plain == worlds[0].sockets, "without confinement, each has a connection or a datagram"
    assert confined == []


def test_nor_does_it_under_the_policy_of_a_daemon(tmp_path: Path) -> None:
    """oMLX may list `/proc` as well, because psutil ends it otherwise."""
    world = World(tmp_path)
    try:
        found = world.run(policy(replace(world.access(), list=("/proc",)), sys.platform, str(world.base / "home")))
    finally:
        world.close()
    worked = {name for name, said in found.items() if said == "worked" and not name.startswith("own_")}
    assert worked == set(NOT_HELD)
    assert {name: said for name, said in found.items() if name.startswith("own_") and said != "worked"} == {}


OF_A_PULLER = frozenset(
    {
        "connect_outward",
        "connect_over_ipv6",
        "connect_to_api_port",
        "connect_to_sibling_port",
        "fast_open_by_an_option",
        "listen_on_another_port",
        "send_udp",
    }
)
PRETENDED = frozenset({"chmod_a_secret", "fchmodat2_a_secret"})


def test_what_ollama_could_do_beyond_that_is_the_network(tmp_path: Path) -> None:
    """It pulls, and its runners listen on ports of their own; published as not held."""
    world = World(tmp_path)
    try:
        secret = Path(world.facts["secret"])
        before = secret.stat().st_mode
        found = world.run(policy(replace(world.access(), pulls=True), sys.platform, str(world.base / "home")))
        assert secret.stat().st_mode == before, "chmod only pretends"
    finally:
        world.close()
    worked = {name for name, said in found.items() if said == "worked" and not name.startswith("own_")}
    assert worked == NOT_HELD.keys() | OF_A_PULLER | PRETENDED
    assert {name: said for name, said in found.items() if name.startswith("own_") and said != "worked"} == {}


def test_what_an_engine_needs_works(outcomes: tuple[dict[str, str], dict[str, str]]) -> None:
    for found in outcomes:
        assert {name: said for name, said in found.items() if name.startswith("own_") and said != "worked"} == {}


def test_what_is_not_held_is_exactly_what_is_published(outcomes: tuple[dict[str, str], dict[str, str]]) -> None:
    _, confined = outcomes
    assert {name for name, said in confined.items() if name.startswith("open_") and said == "worked"} == set(NOT_HELD)
