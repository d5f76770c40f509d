"""Each check of the doctor in its good and its bad state; what a Mac says is retyped from recordings."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from metal_supervisor.cluster.accounts import Token
from metal_supervisor.cluster.answers import KubeError
from metal_supervisor.doctor import cluster, engines, launchd, login, machine, rights, software
from metal_supervisor.doctor.findings import Finding, sound, summary
from metal_supervisor.doctor.registry import CHECKS
from metal_supervisor.doctor.surroundings import Link, Surroundings
from metal_supervisor.host import local_status, processes
from metal_supervisor.host.addresses import AddressChoice
from metal_supervisor.host.commands import TIMED_OUT, Done
from metal_supervisor.host.launchctl import LoadedJob
from metal_supervisor.host.machine import Interface
from metal_supervisor.memory.budget import budget, metal_limit
from metal_supervisor.memory.pressure import MemorySample
from metal_supervisor.runtimes import RUNTIMES
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import Observed, ProgramState, RunNote, State
from metal_supervisor.spec.record import Verdict
from metal_supervisor.spec.sizes import GIB
from metal_supervisor.spec.types import Standing
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.client import Unavailable
from tests.support.records import a_record

PAGE = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
CELLS = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]
ROWS = {name: cells for name, *cells in CELLS}
"""Check -> what it looks at, when it fails or warns, what helps; from docs/doctor.md."""
RBAC = Path(__file__).resolve().parents[2] / "conf" / "rbac"
STATE = Path("/Users/u/.metal-supervisor")
NOW = 1_800_000_000.0
DAY_S = 86400.0


def said(out: str = "", code: int = 0, err: str = "") -> Done:
    return Done(code, out, err)


def status(mode: int, uid: int = 501) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, uid, 20, 0, 0, 0, 0))


def row(name: str, state: State = State.RUNNING, pid: int = 7) -> ProgramState:
    return ProgramState(name, state, pid, NOW, 0.0)


def asked(name: str, said: Done | dict[str, Done] | None = None, **facts: Any) -> Any:
    """What a check comes to where only these facts are known; `said`: by programs, by how their command line begins."""

    def run(argv: Sequence[str], _timeout_s: float) -> Done:
        told = said if isinstance(said, dict) else {"": said or Done(127, "", "")}
        return next((done for line, done in told.items() if " ".join(argv).startswith(line)), Done(113, "", "no"))

    settings = Settings(**{"state_dir": str(STATE), "gateway": "off", **facts.pop("settings", {})})
    (check,) = (each for each in CHECKS if each.name == name)
    return check.ask(cast(Surroundings, SimpleNamespace(settings=settings, uid=501, run=run, **facts)))


def a_directory(mode: int, uid: int = 501) -> Any:
    look = mock.patch.multiple(Path, exists=lambda _: True, stat=lambda _: status(mode, uid))
    with look, mock.patch.object(software, "_parts", lambda _: None):
        return asked("state")


def a_supervisord(problem: str = "") -> Any:
    def call(_method: str, timeout_s: float) -> str:
        if problem:
            raise Unavailable(problem)
        return "4.3.0"

    client = SimpleNamespace(call=call, close=lambda: None)
    with mock.patch("os.path.lexists", lambda _: True):
        return asked("supervisord", directory=SimpleNamespace(socket="/s.sock"), supervisord=client)


def programs(table: dict[str, ProgramState], embedded: bool = True) -> Any:
    settings = {} if embedded else {"kubeconfig": "/kubeconfig"}
    return asked("programs", table=lambda: table, clock=lambda: NOW, settings=settings)


def launchd_job(domain: str) -> Any:
    keys = {
        "state": "running",
        "pid": "123",
        "runs": "1",
        "last exit code": "(never exited)",
        "exit timeout": "120",
        "spawn type": "interactive (4)",
    }
    printed = "".join(f"\t{key} = {value}\n" for key, value in keys.items())
    return asked("launchd", {f"/bin/launchctl print {domain}/dev.metal-supervisor": said(printed)})


def other_agent(*domains: str) -> Any:
    jobs = [f"/bin/launchctl print {each}/com.llmkube.metal-agent" for each in domains]
    return asked("other agent", dict.fromkeys(jobs, said("\tstate = running\n")))


def a_chip(name: str, macos: str, translated: bool = False) -> Any:
    told = {"machdep.cpu.brand_string": name, "kern.osproductversion": macos, "sysctl.proc_translated": int(translated)}
    return asked("chip", mac=SimpleNamespace(text=lambda key: told.get(key, ""), number=lambda key: told.get(key, 0)))


def room(free_bytes: int, report: dict[str, Any]) -> Any:
    return asked("disk", free_bytes=lambda _: free_bytes, report=lambda: report)


def store_of(number: int = 0, path: str = "") -> Any:
    def listed(_: Path) -> list[str]:
        if number:
            raise OSError(number, os.strerror(number))
        return []

    return asked("store", list_directory=listed, settings={"model_store": path})


def version(done: Done) -> Any:
    return engines._version(cast(Surroundings, SimpleNamespace(run=lambda *_: done)), LLAMA)


def embedded_api(table: dict[str, ProgramState] | None) -> Any:
    return asked("api", table=lambda: table, directory=StateDir(STATE), link=Link())


def clock(offset_s: float) -> Any:
    link = SimpleNamespace(kube=SimpleNamespace(clock_offset_s=offset_s))
    return asked("clock", link=link, settings={"kubeconfig": "/kubeconfig"})


def watch(leases: list[dict[str, Any]], server_now: float, fenced: bool = False) -> Any:
    def request(method: str, path: str, *_: Any) -> dict[str, Any]:
        if method == "POST" and fenced:
            raise KubeError(422, "Invalid", "the fence")
        return {"items": leases}

    link = SimpleNamespace(kube=SimpleNamespace(request=request, clock_offset_s=server_now - NOW))
    settings = {"kubeconfig": "/kubeconfig", "namespace": "llm", "node_name": "mac-a"}
    return asked("watch", link=link, clock=lambda: NOW, settings=settings)


def address(choice: AddressChoice, interfaces: Sequence[Interface], embedded: bool = False) -> Any:
    facts = {"advertised": lambda *_: choice, "interfaces": lambda: interfaces}
    if embedded:
        return asked("address", **facts)
    chosen = SimpleNamespace(first_hop="https://a")
    return asked("address", **facts, chosen=lambda: chosen, settings={"kubeconfig": "/kubeconfig"})


def missing(away: dict[str, str], here: list[engines.FoundEngine], runtimes: str = "") -> Any:
    with mock.patch.object(engines, "found", lambda _: (here, away)):
        return asked("engines", said("version: 7200"), records=dict, settings={"runtimes": runtimes})


def engine_here(check: str, path: str = "/opt/homebrew/bin/llama-server", chip: str = "Apple M4", **facts: Any) -> Any:
    here = replace(LLAMA, path=Path(path))
    mac = SimpleNamespace(text=lambda _: chip, number=lambda _: 0)
    with mock.patch.object(engines, "found", lambda _: ([here], {})):
        return asked(check, facts.pop("said", None), mac=mac, **facts)


def firewall(state: Done, apps: Done, programs: list[Path], loopback: bool) -> Any:
    told = {f"{engines.FIREWALL} --getglobalstate": state, f"{engines.FIREWALL} --listapps": apps}
    with mock.patch.object(engines, "_listening", lambda _: (programs, loopback)):
        return asked("firewall", told)


def build(changed_at: float | None, started_at: float) -> Any:
    directory = SimpleNamespace(run_note=lambda _: replace(NOTE, spec={"argv": [str(LLAMA.path)]}))
    with (
        mock.patch.object(processes, "started_at", lambda _: started_at),
        mock.patch.object(engines, "_changed_at", lambda _: changed_at),
    ):
        return asked("builds", directory=directory, table=lambda: {"default.tiny": row("default.tiny")})


def ports(taken: dict[str, tuple[int, str]], wanted: int, other: str = "") -> Any:
    with (
        mock.patch.object(cluster, "_held_ports", lambda _: (wanted, dict(taken))),
        mock.patch.object(local_status, "other_system_on", lambda *_: other),
    ):
        return asked("ports")


OURS = {name: row(name) for name in ("controller", "sidecar", "apiserver")}
LLAMA = engines.FoundEngine(
    "llama-server", RUNTIMES["llama-server"].executables[0], Path("/opt/homebrew/bin/llama-server")
)
JOB = LoadedJob("running", 123, 1, "(never exited)", 120, "interactive (4)", "/Users/u/venv/bin/python")
CUSTOM = """Battery Power:
 sleep                1
 displaysleep         2
AC Power:
 sleep                {} (sleep prevented by caffeinate)
 Sleep On Power Button 1
 displaysleep         10
"""
DEVICES = "Available devices:\n  MTL0: Apple M4 Max (110100 MiB, 110100 MiB free)\n"
SAMPLE = MemorySample(0.0, 128 * GIB, 90 * GIB, 1, 0, None, None)
BUDGET = budget(128 * GIB, None, *metal_limit(128 * GIB, 0, 110100, 26))
TOKEN = Token("x.y.z", "llm", "metal-studio", NOW - DAY_S, NOW + 30 * DAY_S)
APPS = """Total number of apps = 2
1 : /usr/libexec/rapportd
             (Allow incoming connections)

2 : {}
             ({} incoming connections)

"""
ON = said("Firewall is enabled. (State = 1)\n")
OFF = said("Firewall is disabled. (State = 0)\n")
NOTE = RunNote(40, 40, "tv 1 2", {"edition": "default.tiny.ab.json"}, (), 0.0, "", "")
RECORD = a_record(model="tiny", verdict=Verdict(Standing.RUN, "Admitted", "", 0.0), endpoint=None)
SEEN = Observed("default.tiny", 40, True, 0.0, "RUNNING", confined=False)
EN0 = Interface("en0", "192.168.1.20", True)
INCOMING = {
    "models": {
        "llm/big": {"source": "s", "file": {"phase": "Downloading", "got_bytes": 10 * GIB, "total_bytes": 60 * GIB}}
    }
}
LEASE: dict[str, Any] = {
    "metadata": {"name": "metal-a", "labels": {cluster.KIND: "node"}},
    "spec": {"holderIdentity": "mac-a", "renewTime": "2027-01-15T07:59:00.000000Z"},
}
PEER: dict[str, Any] = {**LEASE, "spec": {**LEASE["spec"], "holderIdentity": "mac-b"}}
REAPER: dict[str, Any] = {**LEASE, "metadata": {"name": "metal-reaper", "labels": {cluster.KIND: "reaper"}}}
NEEDED = rights.bundles(RBAC, "llm", ("llm", "metal-studio"), "studio", True)
MAIN, OWN, VALUES = NEEDED


def only(found: Finding | Sequence[Finding | None] | None) -> list[Finding]:
    if found is None or isinstance(found, Finding):
        return [found] if found else []
    return [each for each in found if each]


def without(bundle: rights.Bundle, *missing: str) -> tuple[rights.Bundle, list[rights.Right]]:
    gone = [each for each in bundle.rights if str(each) in missing]
    assert len(gone) == len(missing)
    return bundle, gone


INTEL = "Mach-O 64-bit executable x86_64\n"
UNIVERSAL = (
    "Mach-O universal binary with 2 architectures: [x86_64:Mach-O 64-bit executable x86_64] [arm64]\n"
    " (for architecture x86_64):\tMach-O 64-bit executable x86_64\n"
    " (for architecture arm64):\tMach-O 64-bit executable arm64\n"
)
CASES: list[tuple[str, str, Any, tuple[str, ...]]] = [
    # check, status, what it came to, what has to be in the text and the fix
    ("settings", "ok", asked("settings", config_file="/m.toml", config_problem=""), ("/m.toml",)),
    (
        "settings",
        "fail",
        asked("settings", config_file="/m.toml", config_problem="unknown 'prot'; use 'port'"),
        ("'port'",),
    ),
    (
        "settings",
        "fail",
        asked("settings", config_file="/m.toml", config_problem="", settings={"gateway": "0.0.0.0:9100"}),
        ("the gateway does not listen", "keys"),
    ),
    ("state", "ok", a_directory(stat.S_IFDIR | 0o700), ()),
    ("state", "ok", asked("state"), ("first start",)),
    ("state", "fail", a_directory(stat.S_IFDIR | 0o750), ("mode 750", "chmod 700")),
    ("state", "fail", a_directory(stat.S_IFDIR | 0o700, 0), ("user id 0", "as the user")),
    ("state", "fail", a_directory(stat.S_IFREG | 0o600), ("--state-dir",)),
    ("supervisord", "ok", a_supervisord(), ("4.3.0 answers at /s.sock",)),
    (
        "supervisord",
        "warn",
        asked("supervisord", directory=SimpleNamespace(socket="/none/s.sock")),
        ("nothing runs", "start it with `metal-supervisor run"),
    ),
    ("supervisord", "fail", a_supervisord("supervisord does not answer: refused"), ("does not answer: refused",)),
    ("programs", "ok", programs(OURS), ("apiserver, controller, sidecar",)),
    ("programs", "fail", programs({"sidecar": row("sidecar")}, False), ("controller is missing",)),
    ("programs", "fail", programs({**OURS, "sidecar": row("sidecar", State.FATAL)}), ("sidecar FATAL", "logs")),
    (
        "programs",
        "warn",
        programs({**OURS, "sidecar": replace(row("sidecar"), stop=NOW - 4)}),
        ("sidecar 4 s ago", "log"),
    ),
    ("launchd", "ok", launchd_job("system"), ("system/dev.metal-supervisor",)),
    ("launchd", "warn", asked("launchd", {}), ("no launchd job", "LaunchDaemon")),
    ("launchd", "warn", launchd_job("gui/501"), ("agent of a login session",)),
    ("launchd", "warn", launchd.judge_job("system", replace(JOB, exit_timeout_s=5), 30), ("killed 5 s", "ExitTimeOut")),
    (
        "launchd",
        "fail",
        launchd.judge_job("system", replace(JOB, state="x", last_exit="78: EX_CONFIG"), 9),
        ("78: EX_CONFIG", "directory of its log"),
    ),
    (
        "launchd",
        "fail",
        launchd.judge_job("system", replace(JOB, state="spawn scheduled", last_exit="1"), 30),
        ("spawn scheduled", "last exit 1"),
    ),
    ("launchd", "fail", launchd.judge_job("system", replace(JOB, spawn_type="daemon (3)"), 30), ("Interactive",)),
    ("other agent", "ok", other_agent(), ()),
    ("other agent", "fail", other_agent("gui/501"), ("com.llmkube.metal-agent", "bootout gui/501/")),
    (
        "other agent",
        "fail",
        other_agent("system", "gui/501"),
        ("system/com.llmkube.metal-agent, gui/501/com.llmkube.metal-agent", "bootout system/", "with sudo"),
    ),
    ("chip", "ok", a_chip("Apple M4 Max", "26.1"), ("Apple M4 Max, macOS 26.1",)),
    ("chip", "fail", a_chip("Apple M4 Max", "26.1", True), ("Rosetta", "/opt/homebrew")),
    ("chip", "fail", a_chip("Intel(R) Core(TM) i9", "15.2"), ("without an Apple chip",)),
    ("chip", "warn", a_chip("Apple M1", "12.7"), ("older",)),
    ("metal", "ok", machine._metal_here(said(DEVICES)), ("MTL0: Apple M4 Max", "107.5 GiB")),
    ("metal", "fail", machine._metal_here(said("Available devices:\n")), ("no Metal device",)),
    ("metal", "warn", machine._metal_here(said(code=TIMED_OUT, err="did not end")), ("did not end",)),
    ("metal", "ok", machine._metal_of_daemon({"metal": "there"}), ("it is there, too",)),
    ("metal", "fail", machine._metal_of_daemon({"metal": "absent"}), ("MetalUnavailable", "--agent")),
    ("metal", "warn", machine._metal_of_daemon({"metal": ""}), ("has not told yet",)),
    ("metal", "warn", machine._metal_of_daemon({}), ("does not run",)),
    ("sleep", "ok", asked("sleep", said("AC Power:\n sleep 0\n")), ("never",)),
    (
        "sleep",
        "warn",
        asked("sleep", said(CUSTOM.format(10)), settings={"caffeinate": "/usr/bin/caffeinate"}),
        ("1 min on Battery Power, 10 min on AC Power", "caffeinate keeps", "pmset -a sleep 0"),
    ),
    ("sleep", "warn", asked("sleep", said()), ("could not be asked",)),
    ("store", "ok", store_of(), ("can be read",)),
    ("store", "ok", store_of(errno.ENOENT), ("first download",)),
    ("store", "warn", store_of(path="/tmp/m"), ("temporary", "--model-store")),
    ("store", "fail", store_of(errno.EPERM), ("Full Disk Access",)),
    ("store", "fail", store_of(errno.EACCES), ("Permission denied", "give it")),
    ("disk", "ok", room(80 * GIB, INCOMING), ("llm/big, needs 50.0 GiB",)),
    ("disk", "ok", room(80 * GIB, {}), ("80.0 GiB free",)),
    ("disk", "warn", room(GIB, {}), ("no model can be fetched", "models gc")),
    ("disk", "fail", room(51 * GIB, INCOMING), ("still needs 50.0 GiB", "models gc")),
    ("engines", "ok", version(said(err="version: 7200 (abc)\nbuilt with clang")), ("7200",)),
    ("engines", "fail", version(said(code=-9)), ("signal 9", "brew install llama.cpp")),
    ("engines", "fail", version(said(code=1, err="dyld: Library not loaded")), ("dyld",)),
    ("engines", "warn", version(said(code=TIMED_OUT)), ("4 s",)),
    ("engines", "ok", missing({"omlx": "no"}, [LLAMA]), ("llama-server (llama-server) 7200",)),
    (
        "engines",
        "fail",
        missing({"omlx": "not found"}, [], runtimes="omlx"),
        ("omlx is wanted by --runtimes", "brew install jundot"),
    ),
    ("engines", "fail", missing({"llama-server": "no"}, []), ("no engine", "brew install llama.cpp")),
    ("binaries", "ok", engine_here("binaries", said={engines.FILE: said(UNIVERSAL)}), ()),
    ("binaries", "ok", engine_here("binaries", chip="Intel", said={engines.FILE: said(INTEL)}), ()),
    ("binaries", "fail", engine_here("binaries", said={engines.FILE: said(INTEL)}), ("Rosetta", "/opt/homebrew")),
    ("binaries", "ok", engine_here("binaries", "/e", said=said(code=1, err="No such xattr")), ("none quarantined",)),
    ("binaries", "fail", engine_here("binaries", "/a b", said=said("0083;5f;Safari;\n")), ("-d com.apple", "'/a b'")),
    ("firewall", "ok", firewall(OFF, said(), [LLAMA.path], False), ("off",)),
    ("firewall", "ok", firewall(ON, said(), [LLAMA.path], True), ("loopback",)),
    ("firewall", "ok", firewall(ON, said(APPS.format(LLAMA.path, "Allow")), [LLAMA.path], False), ("1 programs",)),
    (
        "firewall",
        "ok",
        firewall(ON, said(APPS.format("/v/Python.app/Contents/MacOS/Python", "Allow")), [Path("/v/Python.app")], False),
        (),
    ),
    (
        "firewall",
        "warn",
        firewall(ON, said(APPS.format("/x", "Allow")), [LLAMA.path], False),
        ("does not know", "--unblockapp /opt/homebrew"),
    ),
    (
        "firewall",
        "fail",
        firewall(ON, said(APPS.format(LLAMA.path, "Block")), [LLAMA.path], False),
        ("blocks /opt/homebrew", "--unblockapp"),
    ),
    ("firewall", "fail", firewall(said("Firewall … (State = 2)"), said(), [LLAMA.path], False), ("all incoming",)),
    ("firewall", "warn", firewall(said(code=127, err="none"), said(), [], False), ("could not be asked",)),
    (
        "firewall",
        "warn",
        firewall(ON, said(code=1, err="Must be root"), [LLAMA.path], False),
        ("could not be asked: the programs", "Must be root"),
    ),
    ("firewall", "warn", firewall(ON, said(), [LLAMA.path], False), ("it said nothing",)),
    ("builds", "ok", build(NOW, NOW + 1), ()),
    ("builds", "ok", build(NOW + 0.4, NOW), ()),
    ("builds", "warn", build(NOW, NOW - 1), ("upgrade", "restart default.tiny")),
    ("builds", "fail", build(None, NOW), ("there no more",)),
    ("credential", "ok", login.judge_token(TOKEN, NOW), ("llm/metal-studio", "renewed")),
    ("credential", "warn", login.judge_token(TOKEN, NOW + 25 * DAY_S), ("should have been renewed",)),
    ("credential", "fail", login.judge_token(TOKEN, NOW + 31 * DAY_S), ("expired", "--service-account metal-studio")),
    ("credential", "ok", login.judge_expiry("a token", None, NOW), ("does not say",)),
    ("credential", "ok", login.judge_expiry("a token", NOW + 9 * DAY_S, NOW), ("holds until",)),
    ("credential", "warn", login.judge_expiry("a token", NOW + DAY_S, NOW), ("nothing renews it",)),
    ("credential", "fail", login.judge_expiry("a client certificate", NOW - 1, NOW), ("certificate expired",)),
    (
        "api",
        "fail",
        login.judge_connection("https://a", OSError(65, "No route to host"), True),
        ("Local Network privacy", "a terminal that is not Apple's", "LaunchDaemon", "tailnet", "ssh -N -L"),
    ),
    (
        "api",
        "fail",
        login.judge_connection("https://a", OSError(errno.EHOSTUNREACH, "No route to host"), False),
        ("VPN",),
    ),
    (
        "api",
        "fail",
        login.judge_connection("https://a", socket.gaierror(8, "not known"), True),
        ("name is not known", "DNS"),
    ),
    (
        "api",
        "fail",
        login.judge_connection("https://a", ConnectionRefusedError(errno.ECONNREFUSED, "x"), True),
        ("refused", "start the cluster"),
    ),
    ("api", "fail", login.judge_connection("https://a", TimeoutError("timed out"), True), ("in time", "firewall")),
    (
        "api",
        "fail",
        login.judge_connection("https://a", OSError(errno.ENETUNREACH, "Network is unreachable"), True),
        ("unreachable", "network"),
    ),
    (
        "api",
        "fail",
        login.judge_answer("https://a", KubeError(0, "Untrusted", "https://a: it is not accepted")),
        ("not accepted", "certificate-authority-data"),
    ),
    (
        "api",
        "fail",
        login.judge_answer("https://a", KubeError(401, "Unauthorized", "refused")),
        ("who we are", "renew"),
    ),
    ("api", "warn", login.judge_answer("https://a", KubeError(403, "Forbidden", "no")), ("refuses", "rights")),
    ("api", "fail", login.judge_answer("https://a", KubeError(404, "", "answered 404")), ("is it a Kubernetes API",)),
    ("api", "warn", embedded_api(None), ("does not run", "start it with `")),
    (
        "api",
        "fail",
        embedded_api({"apiserver": row("apiserver", State.BACKOFF)}),
        ("apiserver as BACKOFF", "apiserver.log"),
    ),
    ("api", "fail", embedded_api({}), ("apiserver as missing",)),
    ("rights", "ok", rights.judge([(each, []) for each in NEEDED], "bind"), ("29 rights",)),
    (
        "rights",
        "fail",
        rights.judge([without(MAIN, "patch endpointslices.discovery.k8s.io", "get services")], "bind"),
        ("patch endpointslices.discovery.k8s.io", "get services", "namespace llm", "namespace.yaml"),
    ),
    ("rights", "fail", rights.judge([(MAIN, MAIN.rights)], "bind it"), ("and, to bind it: bind it",)),
    (
        "rights",
        "fail",
        rights.judge([(MAIN, []), (OWN, OWN.rights)], "x"),
        ("create serviceaccounts/token", "mac.yaml"),
    ),
    ("rights", "warn", rights.judge([(MAIN, []), (VALUES, VALUES.rights)], "x"), ("get secrets", "secrets.yaml")),
    ("kinds", "ok", cluster.judge_kinds(["v1alpha1"], ["models", "inferenceservices", "models/status"]), ("v1alpha1",)),
    ("kinds", "fail", cluster.judge_kinds([], []), ("not installed", "--server-side -f")),
    ("kinds", "fail", cluster.judge_kinds(["v1"], ["models"]), ("in v1, and we speak v1alpha1",)),
    ("kinds", "fail", cluster.judge_kinds(["v1alpha1"], ["models"]), ("lacks inferenceservices",)),
    ("clock", "ok", clock(-9.0), ("agree",)),
    ("clock", "warn", clock(12.0), ("12 s behind",)),
    ("clock", "fail", clock(-3600.0), ("3600 s ahead", "Date & Time")),
    ("watch", "ok", watch([LEASE, PEER], NOW), ("2 Macs",)),
    ("watch", "ok", watch([PEER], NOW), ("2 Macs",)),
    ("watch", "warn", watch([LEASE, PEER], NOW + 3600), ("no other Mac", "reaper.yaml")),
    ("watch", "ok", watch([LEASE, REAPER], NOW), ("the reaper runs",)),
    ("watch", "warn", watch([LEASE], NOW), ("namespace: llm/", "reaper.yaml")),
    ("watch", "warn", watch([LEASE, PEER], NOW, True), ("the fence", "no reaper", "reaper.yaml")),
    ("watch", "ok", watch([LEASE, REAPER], NOW, True), ("the reaper runs",)),
    ("watch", "warn", watch([LEASE, REAPER], NOW + 3600), ("no reaper",)),
    (
        "address",
        "ok",
        address(
            AddressChoice("192.168.1.20", "the route to api"),
            [
                Interface("lo0", "127.0.0.1", True),
                EN0,
                Interface("en7", "10.0.0.9", False),
                Interface("utun4", "100.64.0.3", True),
                Interface("en0", "fe80::1", True),
                Interface("bridge100", "192.168.64.1", True),
            ],
        ),
        (
            "192.168.1.20, by the route to api",
            "lo0: loopback",
            "en7: down",
            "fe80::1 (en0: link-local)",
            "bridge100: of virtual machines",
            "utun4: not on the way",
        ),
    ),
    ("address", "ok", address(AddressChoice("127.0.0.1", "the embedded API"), [EN0], True), ("by the embedded API",)),
    (
        "address",
        "warn",
        address(AddressChoice("10.1.1.1", "--host-ip", note="no address now"), []),
        ("no address now",),
    ),
    ("address", "fail", address(AddressChoice("", "r", "NoRoutableAddress: no route"), [EN0]), ("--host-ip",)),
    ("ports", "ok", ports({}, 3), ("given out (3)", "18100-18999")),
    (
        "ports",
        "fail",
        ports({"the sidecar": (9090, "nginx (pid 3)")}, 1),
        ("9090 of the sidecar is held by nginx", "--port"),
    ),
    (
        "ports",
        "warn",
        ports({"the sidecar": (9090, "python (pid 3)")}, 1, "/Users/u/an other")[:1],
        ("9090 of the sidecar", "--state-dir '/Users/u/an other'"),
    ),
]
NAMES = [f"{check}-{wanted}" for check, wanted, _, _ in CASES]
WITH_A_CLUSTER = {"kubeconfig"}
"""What reads files: tested in tests/boundary/test_doctor.py."""


@pytest.mark.parametrize(("check", "wanted", "found", "words"), CASES, ids=NAMES)
def test_a_check_says_what_is_wrong_and_what_helps(check: str, wanted: str, found: Any, words: tuple[str, ...]) -> None:
    findings = only(found)
    if not findings:
        assert wanted == "ok", "nothing said is nothing wrong"
        return
    assert {each.status for each in findings} == {wanted}
    told = " ".join(f"{each.text} {each.fix}" for each in findings)
    for word in words:
        assert word in told, f"{word!r} in {told!r}"
    assert all(bool(each.fix) == (each.status != "ok") for each in findings), "a way out, exactly where one is needed"


def test_every_check_is_judged_both_ways() -> None:
    for check in CHECKS:
        if check.name in WITH_A_CLUSTER:
            continue
        told = {wanted for name, wanted, _, _ in CASES if name == check.name}
        assert told - {"ok"}, check.name
        assert "ok" in told or check.name == "api", check.name  # whose good answer takes a server
        for word in ("fail", "warn"):
            _, wrong, helps = ROWS[f"{check.name} (Mac)" if check.mac else check.name]
            assert (word in told) == (f"{word}s" in wrong), f"what docs/doctor.md says of {check.name}: {wrong}"
            assert helps


def test_the_page_has_exactly_the_checks() -> None:
    assert list(ROWS) == [f"{check.name} (Mac)" if check.mac else check.name for check in CHECKS]
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_only_a_failure_counts_and_the_summary_counts_everything() -> None:
    found = [Finding("a", "ok", "x"), Finding("b", "warn", "y", "z"), Finding("c", "ok", "x")]
    assert sound(found) and not sound([*found, Finding("d", "fail", "x", "y")])
    assert summary(found) == "3 findings: 1 warn, 2 ok"


def test_the_rights_are_those_of_the_files() -> None:
    assert {str(each) for each in OWN.rights} == {"create serviceaccounts/token"}
    assert [each.name for each in OWN.rights] == ["metal-studio"], "only its own token"
    assert len(MAIN.rights) == 26 and {each.namespace for each in MAIN.rights} == {"llm"}
    wide = rights.bundles(RBAC, "", None, "studio", False)
    assert len(wide) == 1 and {each.namespace for each in wide[0].rights} == {""}
    assert "cluster-wide.yaml" in wide[0].grant
    assert {str(each) for each in wide[0].rights} == {str(each) for each in MAIN.rights}
