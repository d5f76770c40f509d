"""The doctor asks a Mac (recorded), real files, sockets and processes, and nothing that it meets stops it."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_support import CHIP, FIREWALL, LOADED, Programs, found, shown, surroundings, web
from mac_memory import u32

from metal_supervisor.doctor.findings import Check, Finding, ok
from metal_supervisor.doctor.registry import CHECKS, examine
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.host.commands import TIMED_OUT, Done
from metal_supervisor.spec.processes import ProgramState, State
from metal_supervisor.spec.record import Verdict
from metal_supervisor.spec.types import Standing
from metal_supervisor.state import gateway_note
from tests.support.records import a_record
from tests.support.system import free_ports

GUI = f"/bin/launchctl print gui/{os.getuid()}"
JOB = "/bin/launchctl print system/dev.metal-supervisor"


def test_a_mac_on_which_all_is_well_only_has_to_be_started(tmp_path: Path) -> None:
    told = found(surroundings(tmp_path))
    assert "platform" not in told
    assert {name for name, each in told.items() if any(one.status == "fail" for one in each)} == set()
    warned = {name for name, each in told.items() if any(one.status == "warn" for one in each)}
    assert warned == {"supervisord", "metal", "api", "rights", "kinds"}, "nothing runs, and so nobody tells"
    assert "MTL0: Apple M4 Max" in shown(told["metal"]) and "controller does not run" in shown(told["metal"])
    assert "system/dev.metal-supervisor runs, pid 123, interactive (4)" in shown(told["launchd"])
    assert sorted(os.listdir(tmp_path / "state")) == ["models"], "asking writes nothing"


@pytest.mark.parametrize(
    ("check", "said", "status", "word"),
    [
        ("launchd", {JOB: Done(113, "", "not found")}, "warn", "no launchd job"),
        ("launchd", {JOB: Done(0, LOADED.replace("interactive (4)", "daemon (3)"), "")}, "fail", "efficiency cores"),
        ("launchd", {JOB: Done(0, LOADED.replace("timeout = 120", "timeout = 5"), "")}, "warn", "killed 5 s after"),
        ("launchd", {JOB: Done(0, LOADED.replace("timeout = 120", "timeout = 60"), "")}, "warn", "takes up to 120 s"),
        ("launchd", {JOB: Done(TIMED_OUT, "", "slow")}, "warn", "could not be asked: launchctl print system/"),
        ("other agent", {f"{GUI}/com.llmkube.metal-agent": Done(TIMED_OUT, "", "slow")}, "warn", "could not be asked"),
        (
            "launchd",
            {
                JOB: Done(
                    0,
                    LOADED.replace("state = running", "state = spawn scheduled").replace(
                        "(never exited)", "78: EX_CONFIG"
                    ),
                    "",
                )
            },
            "fail",
            "78: EX_CONFIG",
        ),
        ("launchd", {JOB: Done(113, "", ""), f"{GUI}/dev.metal-supervisor": Done(0, LOADED, "")}, "warn", "agent of a"),
        ("launchd", {f"{GUI}/dev.metal-supervisor": Done(0, LOADED, "")}, "fail", "loaded twice"),
        ("other agent", {f"{GUI}/com.llmkube.metal-agent": Done(0, LOADED, "")}, "fail", "bootout gui/"),
        ("sleep", {"/usr/bin/pmset -g custom": Done(0, "AC Power:\n sleep  10\n", "")}, "warn", "10 min on AC Power"),
        ("sleep", {"/usr/bin/pmset -g custom": Done(TIMED_OUT, "", "slow")}, "warn", "could not be asked"),
        ("binaries", {"/usr/bin/xattr -p": Done(0, "0083;5f000000;Safari;\n", "")}, "fail", "quarantined"),
    ],
)
def test_what_a_mac_says_is_asked_of_the_right_program(
    tmp_path: Path, check: str, said: dict[str, Done], status: str, word: str
) -> None:
    told = found(surroundings(tmp_path, said), check)[check]
    assert status in {each.status for each in told} and word in shown(told)


def test_the_firewall_is_asked_only_where_others_connect(tmp_path: Path) -> None:
    engine = (tmp_path / "bin" / "llama-server").resolve()
    on = {f"{FIREWALL} --getglobalstate": Done(0, "Firewall is enabled. (State = 1)\n", "")}
    listed = Done(0, f"Total number of apps = 1\n1 : {engine}\n             (Block incoming connections)\n", "")
    blocked = {**on, f"{FIREWALL} --listapps": listed}
    assert found(surroundings(tmp_path, blocked), "firewall")["firewall"][0].status == "ok"
    open_to_all = {"settings": {"bind": "0.0.0.0"}}
    (told,) = found(surroundings(tmp_path, blocked, **open_to_all), "firewall")["firewall"]
    assert told.status == "fail" and str(engine) in told.fix
    (told,) = found(surroundings(tmp_path, on, **open_to_all), "firewall")["firewall"]
    assert told.status == "warn"


def framework(base: Path) -> tuple[Path, Path]:
    """(interpreter of an environment, the app that it becomes) of a Python as Homebrew and python.org build it."""
    version, python = base / "Python.framework/Versions/3.13", base / "venv/bin/python"
    for each in (version / "bin", version / "Resources/Python.app/Contents/MacOS", python.parent):
        each.mkdir(parents=True)
    (version / "bin/python3.13").touch(0o755)
    python.symlink_to(version / "bin/python3.13")
    return python, (version / "Resources/Python.app").resolve()


def test_the_firewall_is_told_of_the_app_that_an_interpreter_becomes(tmp_path: Path) -> None:
    python, app = framework(tmp_path)
    script = tmp_path / "mlx_lm.server"
    script.write_text(f"#!{python}\n")
    script.chmod(0o755)
    said = {f"{FIREWALL} --getglobalstate": Done(0, "Firewall is enabled. (State = 1)\n", "")}
    settings = {"bind": "0.0.0.0", "gateway": "off", "runtimes": "mlx-server", "mlx_lm_server": str(script)}
    (told,) = found(surroundings(tmp_path, said, settings=settings), "firewall")["firewall"]
    assert told.status == "warn" and f"--unblockapp {app}" in told.fix
    listed = f"Total number of apps = 1 \n1 : {app} \n             (Allow incoming connections) \n\n"
    said[f"{FIREWALL} --listapps"] = Done(0, listed, "")
    (told,) = found(surroundings(tmp_path, said, settings=settings), "firewall")["firewall"]
    assert told.status == "ok"


@pytest.mark.parametrize(
    "more",
    [
        {"gateway": "0.0.0.0:18080", "gateway_insecure": True},
        {"metrics_listen": "0.0.0.0:19091"},
        {"bind": "0.0.0.0", "runtimes": "ollama"},
        {"bind": "0.0.0.0", "runtimes": "vllm-swift"},
    ],
    ids=["gateway", "metrics", "ollama's gate", "a service on demand"],
)
def test_what_of_ours_listens_for_others_needs_the_firewalls_leave_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    python, app = framework(tmp_path)
    monkeypatch.setattr(sys, "executable", str(python))
    (tmp_path / "ollama").touch(0o755)
    said = {f"{FIREWALL} --getglobalstate": Done(0, "Firewall is enabled. (State = 1)\n", "")}
    settings = {"gateway": "off", "ollama": str(tmp_path / "ollama"), **more}
    if more.get("runtimes") == "vllm-swift":  # which is not here
        (tmp_path / "state").mkdir()
        gateway_note.write(tmp_path / "state", {"fronts": [18090]})
    told = found(surroundings(tmp_path, said, settings=settings), "firewall")["firewall"]
    assert [each.status for each in told] == ["warn"] and f"--add {app}" in told[0].fix


@pytest.mark.parametrize(
    ("check", "more", "status", "word"),
    [
        ("chip", {"sysctls": {**CHIP, "sysctl.proc_translated": u32(1)}}, "fail", "Rosetta"),
        ("chip", {"sysctls": {}}, "fail", "unknown chip"),
        ("disk", {"free_bytes": lambda _: 1 << 30}, "warn", "no model can be fetched"),
    ],
)
def test_what_the_machine_says_is_judged(
    tmp_path: Path, check: str, more: dict[str, Any], status: str, word: str
) -> None:
    (told,) = found(surroundings(tmp_path, **more), check)[check]
    assert told.status == status and word in told.text


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_a_store_that_macos_hides_is_told_from_one_of_somebody_else(tmp_path: Path, number: int) -> None:
    def refuse(_: Path) -> list[str]:
        raise PermissionError(number, os.strerror(number))

    (told,) = found(surroundings(tmp_path, list_directory=refuse), "store")["store"]
    assert told.status == "fail" and ("Full Disk Access" in told.fix) == (number == errno.EPERM)


def test_an_engine_for_another_processor_is_found_through_links(tmp_path: Path) -> None:
    cellar = tmp_path / "Cellar"
    around = surroundings(tmp_path, {f"/usr/bin/file -b {cellar}": Done(0, "Mach-O 64-bit executable x86_64\n", "")})
    cellar.touch(0o755)
    engine = Path(around.settings.llama_server)
    engine.unlink()
    engine.symlink_to(cellar)
    (told,) = found(around, "binaries")["binaries"]
    assert told.status == "fail" and str(cellar) in told.text and "Rosetta" in told.text
    assert isinstance(around.run, Programs)
    quarantine = [line for line in around.run.asked if line.startswith("/usr/bin/xattr")]
    assert {line.split()[-1] for line in quarantine} == {str(engine), str(cellar)}


def test_engines_that_are_missing_matter_where_somebody_wants_them(tmp_path: Path) -> None:
    gone = {"llama_server": str(tmp_path / "none"), "runtimes": ""}
    some = {"runtimes": "", "omlx": str(tmp_path / "none")}
    assert shown(found(surroundings(tmp_path, settings=some), "engines")["engines"]).startswith("ok llama-server")
    named = {"runtimes": "llama-server,omlx", "omlx": "/none"}
    told = found(surroundings(tmp_path, settings=named), "engines")["engines"]
    assert [each.status for each in told] == ["fail", "ok"] and "--omlx is '/none'" in told[0].text
    around = surroundings(tmp_path, settings=gone)
    around.directory.create()
    record = a_record(
        model="m",
        verdict=Verdict(Standing.RUN, "", "", 0.0),
        endpoint=None,
        edition="0123456789ab",
    )
    around.directory.write_record(record)
    assert "llama-server is wanted by default/tiny" in shown(found(around, "engines")["engines"])


# ── sockets and processes ────────────────────────────────────────────────────────────────────────


def test_a_socket_that_nobody_listens_on_is_left_of_one_that_was_killed(tmp_path: Path) -> None:
    around = surroundings(tmp_path)
    path = around.directory.socket
    if around.directory.link is not None:
        around.directory.refresh_link()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    try:
        told = found(around, "supervisord")
        assert told["supervisord"][0].status == "fail" and "refused" in told["supervisord"][0].text
    finally:
        around.directory.remove_link()


def test_a_state_directory_that_others_can_read_is_a_failure(tmp_path: Path) -> None:
    around = surroundings(tmp_path)
    assert found(around, "state")["state"][0].status == "ok"
    around.settings.state_path.chmod(0o755)
    assert "mode 755" in found(around, "state")["state"][0].text
    other = replace(around, uid=os.getuid() + 1)
    assert "as the user" in found(other, "state")["state"][0].fix


def test_a_part_of_the_state_directory_that_cannot_be_used_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after one command with sudo."""
    around = surroundings(tmp_path)
    (around.settings.state_path / "run.lock").touch()
    (around.settings.state_path / "hub").symlink_to(tmp_path / "unmounted")
    (told,) = found(around, "state")["state"]
    assert told.status == "fail" and told.text == f"{around.settings.state_path / 'hub'} is no directory"
    (around.settings.state_path / "hub").unlink()
    assert found(around, "state")["state"][0].status == "ok"
    look = Path.lstat

    def of_root(path: Path) -> os.stat_result:
        status = look(path)
        return os.stat_result((*status[:4], around.uid + 1, *status[5:])) if path.name == "run.lock" else status

    monkeypatch.setattr(Path, "lstat", of_root)
    (told,) = found(around, "state")["state"]
    assert told.status == "fail" and "run.lock belongs to user id" in told.text
    assert f"chown -R {around.uid} {around.settings.state_path}" in told.fix


def test_what_is_wrong_with_the_gateway_is_told_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around = surroundings(tmp_path)
    names = ("controller", "sidecar", "apiserver", "gateway")
    table = {name: ProgramState(name, State.RUNNING, 1, 0.0, 0) for name in names}
    monkeypatch.setattr(Surroundings, "table", lambda _: table)
    told = {"pid": os.getpid(), "at": time.time(), "problem": "127.0.0.1:9000 is taken by another program"}
    gateway_note.write(around.settings.state_path, told)
    (finding,) = found(around, "programs")["programs"]
    assert finding.status == "fail" and "127.0.0.1:9000 is taken" in finding.text
    gateway_note.write(around.settings.state_path, {**told, "at": 1.0})  # an earlier process of this pid
    (finding,) = found(around, "programs")["programs"]
    assert finding.status == "ok"


def test_a_lost_kubeconfig_of_the_embedded_api_is_told_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = surroundings(tmp_path)
    path = around.settings.kubeconfig_path
    assert "kubeconfig" not in {name for name, told in found(around, "kubeconfig").items() if told}
    monkeypatch.setattr(Surroundings, "table", lambda _: {})
    (told,) = found(around, "kubeconfig")["kubeconfig"]
    assert told.status == "fail" and f"{path} does not exist" in told.text and "start it again" in told.fix
    path.write_text("{")
    assert "start it again" in found(around, "kubeconfig")["kubeconfig"][0].fix


def test_a_program_that_ends_again_and_again_is_told_though_it_runs_whenever_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = surroundings(tmp_path)
    stopped = dict.fromkeys(("controller", "sidecar", "apiserver", "gateway"), 0.0)
    monkeypatch.setattr(
        Surroundings, "table", lambda _: {n: ProgramState(n, State.RUNNING, 1, 0.0, at) for n, at in stopped.items()}
    )
    assert found(around, "programs")["programs"][0].status == "ok"
    stopped["controller"] = around.clock() - 4.0
    (told,) = found(around, "programs")["programs"]
    assert told.status == "warn" and "controller 4 s ago" in told.text and "sidecar" not in told.text
    stopped["controller"] = around.clock() - 600.0
    assert found(around, "programs")["programs"][0].status == "ok"


def test_a_port_in_a_strangers_hands_is_a_failure(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        (told,) = found(surroundings(tmp_path, settings={"port": port}), "ports")["ports"]
    assert told.status == "fail" and f"{port} of the sidecar is held by" in told.text
    (told,) = found(surroundings(tmp_path, settings={"port": free_ports(1)[0]}), "ports")["ports"]
    assert told.status == "ok"


def test_the_port_where_the_cluster_asks_for_metrics_is_one_of_ours(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        settings = {"port": free_ports(1)[0], "metrics_listen": f"127.0.0.1:{port}"}
        (told,) = found(surroundings(tmp_path, settings=settings), "ports")["ports"]
    assert told.status == "fail" and f"{port} of the metrics is held by" in told.text and "--metrics-listen" in told.fix


def test_the_port_of_another_system_of_ours_is_not_a_strangers(tmp_path: Path) -> None:
    with web(lambda path, body: (200, b'{"stateDirectory": "/Users/u/.run"}')) as url:
        told = found(surroundings(tmp_path, settings={"port": int(url.rpartition(":")[2])}), "ports")["ports"]
    assert [each.status for each in told] == ["warn", "ok"] and "--state-dir /Users/u/.run" in told[0].fix


def check(name: str, ask: Callable[[Surroundings], list[Finding]], **more: Any) -> Check:
    return Check(name, ask, **more)


def test_a_check_that_fails_or_hangs_is_a_warning_and_stops_no_other(tmp_path: Path) -> None:
    for_ever, secret = threading.Event(), "Bearer abc123def456"

    def hang(_: Surroundings) -> list[Finding]:
        for_ever.wait()
        return []

    def broken(_: Surroundings) -> list[Finding]:
        raise LookupError(f"no such thing, {secret}")

    def unreadable(_: Surroundings) -> list[Finding]:
        (tmp_path / "nothing").read_text()
        return []

    checks = [
        check("hangs", hang),
        check("broken", broken),
        check("fine", lambda _: [ok("well")]),
        check("file", unreadable),
        check("later", lambda _: [ok("well")], needs_api=True),
    ]
    try:
        told = {each.check: each for each in examine(surroundings(tmp_path), checks, check_s=0.3)}
    finally:
        for_ever.set()
    assert told["hangs"].status == "warn" and told["hangs"].text == "could not be asked: no answer within 0.3 s"
    assert told["broken"].status == "warn" and "LookupError: no such thing" in told["broken"].text
    assert "abc123" not in told["broken"].text
    assert f"FileNotFoundError: {tmp_path / 'nothing'}: No such file" in told["file"].text
    assert (told["fine"].status, told["later"].status) == ("ok", "ok")
    assert list(told) == ["hangs", "broken", "fine", "file", "later"], "in the order of the checks"


def test_off_a_mac_its_checks_are_left_out_and_one_line_says_so(tmp_path: Path) -> None:
    around = surroundings(tmp_path, on_mac=False, mac=None)
    told = found(around)
    left_out = {each.name for each in CHECKS if each.mac}
    assert not left_out & told.keys()
    (said,) = told["platform"]
    assert said.status == "ok" and all(name in said.text for name in left_out)
    assert isinstance(around.run, Programs)
    assert all("llama-server" in each for each in around.run.asked)
