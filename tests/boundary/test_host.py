"""This machine, as it really is."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from metal_supervisor.host import machine, processes
from metal_supervisor.host.machine import NoBinary
from tests.support.system import eventually


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_node_name_is_a_label_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine.node_name(tmp_path)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", first)
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    assert machine.node_name(tmp_path) == first


@pytest.mark.parametrize("name", ["", "ÜÖ", "x" * 200, "-a-", "My Mac (2).local", "a" * 39 + "-b"])
def test_any_hostname_makes_a_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", machine.node_name(tmp_path))


@pytest.mark.parametrize("kept", [b"", b"\n", b"\xff", b"not a label!\n"])
def test_a_damaged_node_file_is_made_again(tmp_path: Path, kept: bytes) -> None:
    (tmp_path / "node").write_bytes(kept)
    first = machine.node_name(tmp_path)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", first)
    assert machine.node_name(tmp_path) == first


def test_a_node_file_that_cannot_be_written_is_replaced(tmp_path: Path) -> None:
    """As one that a command with sudo left: the directory is the user's."""
    (tmp_path / "node").symlink_to("node")
    first = machine.node_name(tmp_path)
    assert machine.node_name(tmp_path) == first and not (tmp_path / "node").is_symlink()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.9.9.9",
        "::1",
        "0.0.0.0",
        "::",
        "169.254.1.1",
        "fe80::1",
        "224.0.0.1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "255.255.255.255",
    ],
)
def test_an_address_that_no_pod_can_reach_is_refused_with_a_way_out(address: str) -> None:
    assert "--host-ip" in (machine.address_problem(address, allow_loopback=False) or "")


@pytest.mark.parametrize("address", ["192.0.2.10", "10.0.0.1", "172.16.0.1", "100.64.0.1", "2001:db8::1", "fd00::1"])
def test_a_routable_address_is_accepted(address: str) -> None:
    assert machine.address_problem(address, allow_loopback=False) is None


def test_loopback_is_accepted_only_where_it_is_allowed() -> None:
    assert machine.address_problem("127.0.0.1", allow_loopback=True) is None
    assert machine.address_problem("169.254.1.1", allow_loopback=True)


def test_the_configured_binary_is_taken_and_a_bad_one_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = executable(tmp_path / "mine")
    executable(tmp_path / "engine")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine.find_binary(str(mine), "engine", "brew") == mine
    assert machine.find_binary("~/mine", "engine", "brew") == mine
    (tmp_path / "plain").write_text("")
    for bad in ("plain", "missing", ""):
        with pytest.raises(NoBinary, match=r"--engine is .*not an executable file"):
            machine.find_binary(f"{tmp_path}/{bad}", "engine", "brew")


def test_a_binary_is_found_on_path_then_where_homebrew_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("path", "brew"):
        (tmp_path / name).mkdir()
    brewed = executable(tmp_path / "brew" / "engine")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(machine, "HOMEBREW", (str(tmp_path / "brew"),))
    assert machine.find_binary("", "engine", "brew install engine") == brewed
    first = executable(tmp_path / "path" / "engine")
    assert machine.find_binary("", "engine", "") == first
    with pytest.raises(NoBinary, match="brew install none, or set --none"):
        machine.find_binary("", "none", "brew install none")


@pytest.mark.parametrize("path", ["", None])
def test_the_working_directory_is_never_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    executable(tmp_path / "engine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "HOMEBREW", ("/nowhere",))
    if path is None:
        monkeypatch.delenv("PATH")
    else:
        monkeypatch.setenv("PATH", path)
    with pytest.raises(NoBinary):
        machine.find_binary("", "engine", "brew")


def test_flags_are_read_from_the_help(tmp_path: Path) -> None:
    def flags_of(path: Path) -> frozenset[str]:
        return machine.flags_in(machine.help_of(path))

    engine = executable(tmp_path / "engine", "#!/bin/sh\necho 'usage: -m, --model X  --no-webui (see x--y)'\n")
    assert flags_of(engine) == {"--model", "--no-webui"}
    assert flags_of(tmp_path / "none") == frozenset()
    assert flags_of(executable(tmp_path / "bad", "#!/no/such\n")) == frozenset()
    assert flags_of(executable(tmp_path / "bytes", "#!/bin/sh\nprintf '\\377 --flag'\n")) == {"--flag"}


def test_who_holds_a_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"(pid {os.getpid()})" in processes.port_holder(port)
        assert not processes.port_free(port, "127.0.0.1")
    assert processes.port_holder(port) == "another process"
    assert processes.port_free(port, "127.0.0.1")
    assert not processes.port_free(port, "192.0.2.1")


def test_a_process_is_described_while_it_lives() -> None:
    process = subprocess.Popen(["sleep", "60"])
    eventually(lambda: processes.command_line(process.pid) == ["sleep", "60"], 5.0, "its exec")
    process.kill()
    process.wait()
    assert processes.command_line(process.pid) is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("proc_pidinfo(PROC_PIDLISTFDS) 1/2 syscall failed"),
        SystemError("x"),
        OSError(5, "x"),
        psutil.AccessDenied(1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_engine_whose_connections_a_mac_does_not_tell_may_have_clients(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    for name in ("net_connections", "cpu_times", "cmdline"):
        monkeypatch.setattr(psutil.Process, name, fail)
    assert processes.has_clients(os.getpid(), 1)
    assert processes.listens(os.getpid(), 1) is None
    assert processes.command_line(os.getpid()) is None
    found = processes.signs(os.getpid(), 1)
    assert found is not None and found.clients and not found.halted and found.cpu_s == 0.0
    monkeypatch.setattr(psutil.Process, "children", fail)
    assert processes.has_clients(os.getpid(), 1), "its descendants alone are not seen"
    monkeypatch.setattr(psutil.Process, "net_connections", lambda *_: [])
    assert not processes.has_clients(os.getpid(), 1)


def test_the_route_to_oneself_is_loopback_and_nowhere_is_none() -> None:
    assert machine.route_to("127.0.0.1", 80) == "127.0.0.1"
    assert machine.route_to("no-such-host.invalid", 80) is None
