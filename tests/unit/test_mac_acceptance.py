"""The acceptance run for a Mac, as far as it can be tried without one: its readers, report, driver and page."""

from __future__ import annotations

import json
import plistlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from metal_supervisor.host import darwin_memory, powermetrics
from metal_supervisor.host.commands import Done
from metal_supervisor.runtimes import RUNTIMES
from tests.boundary.mac_memory import M4_MAX, FakeLibc, u32, u64
from tests.support.mac import (
    mac_acceptance,
    mac_checks,
    mac_confinement,
    mac_host,
    mac_jobs,
    mac_kit,
    mac_metal,
    mac_parse,
    mac_power,
    mac_report,
    mac_runtimes,
)
from tests.support.mac.mac_checks import CHECKS, ITEMS, Check
from tests.support.mac.mac_report import FAIL, MEASURED, PASS, SKIPPED, Redactor, Sheet, Skip

REPOSITORY = Path(__file__).resolve().parents[2]
DEVICES = (
    "Available devices:\n  MTL0: Apple M4 Max (110100 MiB, 110100 MiB free)\n  BLAS: Accelerate (0 MiB, 0 MiB free)\n"
)
ASSERTIONS = """\
Assertion status system-wide:
   PreventUserIdleSystemSleep     1
Listed by owning process:
   pid 366(caffeinate): [0x00000025000180ba] 03:16:41 PreventUserIdleSystemSleep named: "caffeinate command-line tool"
\tDetails: caffeinate asserting on behalf of process 12
   pid 91(powerd): [0x0000000100001234] 00:00:03 UserIsActive named: "com.apple.iohideventsystem.queue.tickle"
"""
VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               65,536.
Pages wired down:                         10.
"Translation faults":                     123.
Pages occupied by compressor:             2.
"""


# ── what macOS prints ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1234 B", 1234),
        ("14 MB", 14 << 20),
        ("2049M+", 2049 << 20),
        ("1.5 GB", 3 << 29),
        ("12K", 12288),
        ("7", 7),
        ("", None),
        ("x", None),
        ("MB", None),
        ("1.2.3 MB", None),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    assert mac_parse.size_bytes(text) == size


def test_the_footprint_is_the_ledgers_own_where_it_is_told() -> None:
    head = "======\nllama-server [4122]: 64-bit    Footprint: 1234 B (16384 bytes per page)\n======\n"
    assert mac_parse.footprint_bytes(head) == 1234
    assert mac_parse.footprint_bytes(head + "Auxiliary data:\n    phys_footprint: 5678 B\n    x: 1 B\n") == 5678
    assert mac_parse.footprint_bytes("python [1]: Footprint: 12 MB (16384") == 12 << 20
    assert mac_parse.footprint_bytes("footprint: no such process") is None


def test_top_ps_and_the_small_tools() -> None:
    assert mac_parse.top_bytes("PID    MEM\n4122   12M+\n412    5M\n99     1G\n", 412) == 5 << 20
    assert mac_parse.top_bytes("PID MEM\n4122 12M\n", 412) is None
    assert mac_parse.ps_rss_bytes("  2048\n") == 2 << 20 and mac_parse.ps_rss_bytes("") is None
    assert mac_parse.free_percent("System-wide memory free percentage: 40%\n") == 40
    assert mac_parse.free_percent("") is None
    swap = "vm.swapusage: total = 2048.00M  used = 1024.50M  free = 1023.50M  (encrypted)"
    assert mac_parse.swap_used_bytes(swap) == round(1024.5 * (1 << 20)) and mac_parse.swap_used_bytes("") is None


def test_vm_stat_counts_pages_of_the_size_it_tells() -> None:
    found = mac_parse.vm_stat_bytes(VM_STAT)
    assert found["Pages free"] == 65536 * 16384 and found["Pages occupied by compressor"] == 2 * 16384
    assert mac_parse.vm_stat_bytes(VM_STAT.partition("\n")[2]) == {}


def test_devices_and_the_first_of_metals() -> None:
    assert mac_parse.devices(DEVICES)["MTL0"] == ("Apple M4 Max", 110100)
    assert mac_parse.metal_mib(DEVICES) == 110100
    assert mac_parse.metal_mib(DEVICES.replace("MTL0", "CPU")) == 0 and mac_parse.metal_mib("") == 0


def test_assertions_are_listed_by_their_owners() -> None:
    assert mac_parse.assertions(ASSERTIONS) == [
        (366, "caffeinate", "PreventUserIdleSystemSleep"),
        (91, "powerd", "UserIsActive"),
    ]


def test_frames_of_powermetrics_and_the_names_of_their_keys() -> None:
    frame = {"processor": {"gpu_power": 42.5, "cpu_power": 7, "clusters": [{"name": "E"}, {"name": "S", "x": 1}]}}
    stream = b"\0".join(plistlib.dumps(frame) for _ in range(3)) + b"\0<?xml version='1.0'?><plist><dict>"
    assert mac_parse.frames(stream) == [frame] * 3
    assert mac_parse.frames(b"garbage</plist>" + stream) == [frame] * 3
    assert mac_parse.key_names(frame) == [
        "processor.clusters[].name (str)",
        "processor.clusters[].x (int)",
        "processor.cpu_power (int)",
        "processor.gpu_power (float)",
    ]
    assert mac_power.watts([frame, {}], "gpu") == [0.0425] and mac_power.watts([frame], "ane") == []


def test_rates_gaps_and_agreement() -> None:
    assert mac_parse.tokens_per_s([1.0, 1.5, 2.0]) == 2.0
    assert mac_parse.tokens_per_s([1.0]) is None and mac_parse.tokens_per_s([1.0, 1.0]) is None
    assert mac_parse.longest_gap_s([0.0, 1.0, 3.5, 4.0]) == 2.5 and mac_parse.longest_gap_s([]) == 0.0
    assert mac_parse.within(95, 100, 0.05) and not mac_parse.within(94, 100, 0.05)
    assert mac_parse.within(1, 9, 0.05, slack=8)


# ── the report ───────────────────────────────────────────────────────────────────────────────────

WHO = Redactor("anna", "/Users/anna", ["annas-studio.local"], {"nas.example.net"})
PRIVATE = (
    "/Users/anna/models/x.gguf",
    "user anna",
    "Annas-Studio: up",
    "annas-studio.local",
    "nas.example.net:445",
    '"IOPlatformSerialNumber" = "C02XY1ZJHX87"',
    "Serial Number (system): C02XY1ZJHX87",
    "192.168.1.23",
    "10.0.0.7:6443",
    "a4:83:e7:01:02:03",
    "564D3A5B-0001-4C2A-9D1E-0123456789AB",
    "hf_abcdefghijklmnop",
    "Bearer abcdefghijkl",
    "fe80::1c2d:3e4f:5a6b:7c8d%en0",
    "http://127.0.0.1:18000/k-0123456789abcdefABCDEF",
    "/Users/berta/x",
)
HIDDEN = (
    "anna",
    "nas.example",
    "C02XY1ZJHX87",
    "192.168",
    "10.0.0",
    "a4:83",
    "564D3A5B",
    "abcdefghij",
    "fe80",
    "berta",
    "k-0123",
)


@pytest.mark.parametrize("text", PRIVATE)
def test_nothing_tells_whose_mac_it_was(text: str) -> None:
    seen = WHO.text(text)
    assert seen != text and not [word for word in HIDDEN if word in seen.lower() or word in seen], seen


@pytest.mark.parametrize("text", ["127.0.0.1:9090", "Mac16,5", "macOS 26.1", "savannah", "/Users/Shared/models"])
def test_what_tells_nothing_stays(text: str) -> None:
    assert WHO.text(text) == text


def test_a_report_is_redacted_everywhere_and_its_markdown_cannot_be_broken_out_of() -> None:
    sheet = Sheet()
    sheet.claim(False, "it is at /Users/anna/x <script>")
    sheet.figure("delay", "ms", 1.0, 2.0, 9.0)
    sheet.figure("once", "MiB", 3.14159)
    sheet.figure("never", "s")
    sheet.show("said by anna", "line\n```\n# anna\x1b[31m")
    sheet.show("json", {"anna": ["192.168.1.2", 1, None]})
    sheet.omit("as anna")
    result = mac_report.Result("n", "a", "It <b> proves.", "ask anna", FAIL, "anna | x", sheet, 1.23456)
    found = mac_report.report({"model": "Mac16,5"}, [result], WHO)
    assert "anna" not in json.dumps(found) and found["counts"] == {PASS: 0, FAIL: 1, SKIPPED: 0, MEASURED: 0}
    figures = found["checks"][0]["figures"]
    assert figures[0] == {
        "name": "delay",
        "unit": "ms",
        "median": 2.0,
        "lowest": 1.0,
        "highest": 9.0,
        "spread": 8.0,
        "times": 3,
    }
    assert figures[1] == {"name": "once", "unit": "MiB", "median": 3.142} and len(figures) == 2
    text = mac_report.markdown(found)
    assert "<script>" not in text.replace("\\<script\\>", "") and "\x1b" not in text and "\n```" not in text
    assert "delay 2 ms (1 to 9, 3 times)" in text.replace("\\", "") and "What to do: ask" in text


def test_long_evidence_is_cut() -> None:
    sheet = Sheet()
    sheet.show("log", "x" * 100_000)
    assert len(sheet.evidence["log"]) < 5000 and "96000 more" in sheet.evidence["log"]


# ── the driver ───────────────────────────────────────────────────────────────────────────────────


def check(name: str, run: Callable[[mac_kit.Kit, Sheet], None]) -> Check:
    return Check(name, "a", "It proves.", "do that", run)


def passing(_kit: mac_kit.Kit, sheet: Sheet) -> None:
    sheet.claim(True, "so it is")


def failing(_kit: mac_kit.Kit, sheet: Sheet) -> None:
    sheet.claim(True, "one holds")
    sheet.claim(False, "the other does not")


def crashing(_kit: mac_kit.Kit, sheet: Sheet) -> None:
    sheet.claim(True, "before that")
    raise OSError(65, "No route to host")


def skipping(_kit: mac_kit.Kit, _sheet: Sheet) -> None:
    raise Skip("it needs root; give it")


def measuring(_kit: mac_kit.Kit, sheet: Sheet) -> None:
    sheet.figure("speed", "m/s", 3.0)


def run(tmp_path: Path, *checks: Check) -> tuple[int, dict[str, Any]]:
    base = tmp_path / "work"
    base.mkdir()
    output = tmp_path / "report.json"
    code = mac_acceptance.run(list(checks), mac_kit.Options(), base, output, lambda _text: None)
    assert list(base.iterdir()) == []
    assert output.with_suffix(".md").read_text().startswith("# Acceptance on a Mac")
    return code, json.loads(output.read_text())


FAKES = (
    check("good", passing),
    check("bad", failing),
    check("broken", crashing),
    check("not here", skipping),
    check("how fast", measuring),
)


def test_every_outcome_gets_its_row_and_one_failure_is_enough(tmp_path: Path) -> None:
    code, found = run(tmp_path, *FAKES)
    rows = {each["name"]: each for each in found["checks"]}
    outcomes = [PASS, FAIL, FAIL, SKIPPED, MEASURED]
    assert code == 1 and [rows[each.name]["outcome"] for each in FAKES] == outcomes
    assert rows["bad"]["why"] == "the other does not" and rows["bad"]["on_failure"] == "do that"
    assert "OSError" in rows["broken"]["why"] and "crashing" in rows["broken"]["evidence"]["traceback"]
    assert rows["not here"]["why"] == "it needs root; give it" and "on_failure" not in rows["not here"]
    assert rows["how fast"]["figures"][0]["median"] == 3.0


@pytest.mark.parametrize("fakes", [(0,), (3,), (0, 3, 4)])
def test_without_a_failure_the_exit_code_is_zero(tmp_path: Path, fakes: tuple[int, ...]) -> None:
    assert run(tmp_path, *(FAKES[each] for each in fakes))[0] == 0


@pytest.mark.parametrize("end", [passing, failing, crashing, skipping])
def test_whatever_a_check_comes_to_all_that_it_did_is_undone_the_last_first(
    tmp_path: Path, end: Callable[[mac_kit.Kit, Sheet], None]
) -> None:
    undone: list[str] = []
    child: list[subprocess.Popen[bytes]] = []

    def messy(kit: mac_kit.Kit, sheet: Sheet) -> None:
        kit.cleanup("one", lambda: undone.append("one"))
        kit.cleanup("two", lambda: undone.append("two"))
        (kit.scratch / "left").write_text("behind")
        child.append(kit.start([sys.executable, "-c", "input()"], kit.scratch / "log"))
        end(kit, sheet)

    run(tmp_path, check("messy", messy))
    assert undone == ["two", "one"] and child[0].poll() is not None


def test_what_cannot_be_undone_is_told_and_keeps_nothing_else_from_being_undone(tmp_path: Path) -> None:
    undone: list[str] = []

    def messy(kit: mac_kit.Kit, sheet: Sheet) -> None:
        kit.cleanup("first", lambda: undone.append("first"))
        kit.cleanup("stuck", lambda: {}["no"])
        passing(kit, sheet)

    code, found = run(tmp_path, check("messy", messy), check("good", passing))
    assert code == 1 and undone == ["first"] and "stuck: KeyError" in found["checks"][0]["why"]
    assert found["checks"][1]["outcome"] == PASS


@pytest.mark.parametrize("where", ["check", "cleanup"])
def test_whoever_ends_the_run_still_gets_a_report_and_a_clean_mac(tmp_path: Path, where: str) -> None:
    undone: list[str] = []

    def interrupted() -> None:
        raise mac_acceptance.Ended

    def long(kit: mac_kit.Kit, _sheet: Sheet) -> None:
        kit.cleanup("it", lambda: undone.append("it"))
        if where == "check":
            interrupted()
        kit.cleanup("slow", interrupted)

    _, found = run(tmp_path, check("long", long), check("next", passing))
    assert undone == ["it"] and found["checks"][1]["why"] == mac_acceptance.INTERRUPTED
    assert found["checks"][0]["outcome"] == (SKIPPED if where == "check" else FAIL)


def test_what_is_known_is_written_after_each_check(tmp_path: Path) -> None:
    """A Mac that panics in the second one has kept the first."""
    seen: list[list[str]] = []

    def look(_kit: mac_kit.Kit, _sheet: Sheet) -> None:
        seen.append([each["name"] for each in json.loads((tmp_path / "report.json").read_text())["checks"]])

    run(tmp_path, check("good", passing), check("look", look))
    assert seen == [["good"]]


def test_a_checkout_that_launchds_jobs_cannot_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mac_kit.need_readable()
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(mac_kit, "ROOT", tmp_path / "Documents" / "checkout")
    with pytest.raises(Skip, match="Documents"):
        mac_kit.need_readable()


def test_the_report_is_named_after_the_model_and_the_day() -> None:
    names = {"Mac16,5": "acceptance-Mac16-5-2026-11-22.json", "../x": "acceptance----x-2026-11-22.json"}
    for model, name in names.items():
        assert str(mac_acceptance.file_name({"model": model, "date": "2026-11-22"})) == name


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.support.mac.mac_acceptance", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_list_names_every_item_and_every_check() -> None:
    done = command("--list")
    assert done.returncode == 0
    for letter, item in ITEMS.items():
        assert f"{letter}  {item}\n" in done.stdout
    for each in CHECKS:
        assert each.proves in done.stdout
    assert list(ITEMS) == [chr(ord("a") + number) for number in range(16)]
    assert {each.item for each in CHECKS} == set(ITEMS), "each item has a check"
    for topic in (
        "plist",
        "sudoers",
        "vm_stat",
        "footprint",
        "residency",
        "wired limit",
        "kqueue",
        "MLX",
        "daemon",
        "agent",
        "shell",
        "exchange under a stream",
        "kill -9",
        "ExitTimeOut",
        "ThrottleInterval",
        "bootout",
        "Local Network",
        "sleep and wake",
        "awake",
        "powermetrics",
        "memory pressure",
        "ProcessType",
        "tokens per second",
        "firewall",
        "quarantine",
        "doctor",
        "Ollama",
        "oMLX",
        "vllm-swift",
        "mlx_lm",
        "mlx-server",
        "llama-server",
    ):
        assert topic.lower() in done.stdout.lower(), topic


@pytest.mark.skipif(sys.platform == "darwin", reason="there it begins")
@pytest.mark.parametrize("arguments", [(), ("--hosted",), ("--only", "plists")])
def test_on_another_system_it_refuses_in_a_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = command(*arguments, "--output", str(tmp_path / "report.json"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and "no Mac" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_checks_are_chosen_by_name_and_by_place() -> None:
    assert [each.name for each in mac_acceptance.chosen("exits, plists", False)] == ["plists", "exits"]
    hosted = {each.name for each in mac_acceptance.chosen("", True)}
    assert {"plists", "sysctls", "exits", "launchd-daemon", "doctor", "modules"} <= hosted
    assert not hosted & {"metal-contexts", "wired-limit", "footprint", "sleep", "process-type"}
    with pytest.raises(ValueError, match="no check nonsense"):
        mac_acceptance.chosen("plists,nonsense", False)


@pytest.mark.parametrize("arguments", [["--model", "/nowhere.gguf"], ["--mlx-model", "/nowhere"], ["--model-mib", "0"]])
def test_wrong_flags_are_named(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match=arguments[0]):
        mac_acceptance.options_of(mac_acceptance.parser().parse_args(arguments))


def test_the_table_of_checks_is_complete() -> None:
    assert len({each.name for each in CHECKS}) == len(CHECKS)
    for each in CHECKS:
        assert re.fullmatch(r"[a-z][a-z_-]+", each.name) and each.proves.endswith(".") and each.on_failure
    assert {each.runtime for each in mac_runtimes.ENGINES} == set(RUNTIMES), "every runtime is on the conformance list"
    for engine in mac_runtimes.ENGINES:
        assert engine.program in {one.name for one in RUNTIMES[engine.runtime].executables}


# ── single checks ────────────────────────────────────────────────────────────────────────────────


def test_deaths_of_others_children_are_told_here_too(tmp_path: Path) -> None:
    found = mac_acceptance.perform(check("exits", mac_host.exits), mac_kit.Kit(mac_kit.Options(), tmp_path))
    assert found.outcome == PASS, found.why
    assert len(found.sheet.figures[0].values) == mac_host.DEATHS


def test_a_confined_llama_server_serves_and_is_held_here_too(tmp_path: Path) -> None:
    wanted = check("confinement", mac_confinement.confinement)
    found = mac_acceptance.perform(wanted, mac_kit.Kit(mac_kit.Options(), tmp_path))
    assert found.outcome == PASS, found.why


def test_every_module_can_be_imported_here(tmp_path: Path) -> None:
    found = mac_acceptance.perform(check("modules", mac_host.modules), mac_kit.Kit(mac_kit.Options(), tmp_path))
    assert found.outcome == PASS, found.sheet.evidence


@pytest.mark.parametrize("name", ["metal-contexts", "launchd-daemon", "sleep", "pressure", "powermetrics"])
def test_without_root_what_needs_it_says_how_to_get_it(tmp_path: Path, name: str) -> None:
    (wanted,) = [each for each in CHECKS if each.name == name]
    assert wanted.root
    if name in ("metal-contexts", "powermetrics"):
        return  # parts of them need none, or are not in every release
    found = mac_acceptance.perform(wanted, mac_kit.Kit(mac_kit.Options(sudo=False), tmp_path))
    assert found.outcome == SKIPPED and mac_kit.HOW_ROOT in found.why


class Sudo:
    """Answers commands of root's; a password is never asked for."""

    def __init__(self, code: int = 0) -> None:
        self.asked: list[list[str]] = []
        self.code = code

    def __call__(self, argv: Any, _timeout_s: float) -> Done:
        self.asked.append(list(argv))
        return Done(self.code, "", "sudo: a password is required" if self.code else "")


def test_a_password_is_asked_for_once_at_most() -> None:
    for code, allowed in ((0, True), (1, False)):
        sudo = Sudo(code)
        password = mac_kit.Password(sudo)
        assert password.ask() is allowed
        password.close()
        assert [mac_kit.SUDO, "-v"] not in sudo.asked or code
        assert sudo.asked.count([mac_kit.SUDO, "-v"]) <= 1


def test_root_is_never_asked_for_in_the_midst_of_a_check(tmp_path: Path) -> None:
    sudo = Sudo(1)
    kit = mac_kit.Kit(mac_kit.Options(), tmp_path, here=sudo)
    assert not kit.root("/usr/bin/true").ok
    assert all(argv[:2] == [mac_kit.SUDO, "-n"] for argv in sudo.asked)


@pytest.mark.parametrize("context", [mac_jobs.AGENT, mac_jobs.DAEMON])
def test_trial_jobs_have_a_label_of_their_own_and_run_once(tmp_path: Path, context: str) -> None:
    content = mac_jobs.plist(context, ["/bin/true"], tmp_path, "Background")
    assert content["Label"] == "dev.metal-supervisor.acceptance" and content["KeepAlive"] is False
    assert ("UserName" in content) is (context == mac_jobs.DAEMON) and content["ProcessType"] == "Background"
    assert "ProcessType" not in mac_jobs.plist(context, ["/bin/true"], tmp_path, "")
    assert plistlib.loads(plistlib.dumps(content)) == content


def test_the_helper_of_jobs_tells_what_came_of_it(tmp_path: Path) -> None:
    kit = mac_kit.Kit(mac_kit.Options(), tmp_path)
    with kit.directory_for("once"):
        found = mac_jobs.once(kit, mac_jobs.SHELL, "run", sys.executable, "-c", "print('hi'); raise SystemExit(3)")
        assert (found["code"], found["out"]) == (3, "hi\n")
        port = str(mac_kit.free_port())
        assert mac_jobs.once(kit, mac_jobs.SHELL, "connect", "127.0.0.1", port)["errno"] != 0
        assert mac_jobs.once(kit, mac_jobs.SHELL, "run", "/nowhere")["code"] == 127
    assert kit.tidy() == []


@pytest.mark.parametrize("lan", ["", "nas", "nas:", ":80", "nas:http"])
def test_a_host_of_the_network_has_to_be_named(tmp_path: Path, lan: str) -> None:
    with pytest.raises(Skip, match="--lan HOST:PORT"):
        mac_jobs.lan(mac_kit.Kit(mac_kit.Options(lan=lan), tmp_path), Sheet())


# ── checks of a Mac's memory, with recorded answers ──────────────────────────────────────────────

DOCTOR = f"{Path(sys.executable).name} -m metal_supervisor doctor --json"
GIB = 1024**3
CHILD = 210 << 20, 205 << 20


class Anybody(dict[int, tuple[int, int]]):
    """Every process holds the same."""

    def __contains__(self, _pid: object) -> bool:
        return True

    def __missing__(self, _pid: int) -> tuple[int, int]:
        return CHILD


class Tools:
    """macOS's own tools, as they answer on one Mac with 128 GiB."""

    def __init__(self, **other: str) -> None:
        pages = 128 * GIB // 16384
        self.said = {
            "plutil": "OK",
            "sysctl -n hw.memsize": str(128 * GIB),
            "sysctl -n kern.osproductversion": "26.1\n",
            "sysctl -n iogpu.wired_limit_mb": "0\n",
            "sysctl vm.swapusage": "vm.swapusage: total = 23552.00M  used = 22392.56M  free = 1159.44M  (encrypted)",
            "vm_stat": "Stats: (page size of 16384 bytes)\n"
            f"Pages free: {pages // 2}.\nPages wired down: {pages // 2}.\n",
            "memory_pressure -Q": "System-wide memory free percentage: 81%\n",
            "footprint": f"x\n    phys_footprint: {CHILD[0]} B\n",
            "ps": str(CHILD[1] // 1024),
            "true --list-devices": DEVICES,
            **other,
        }

    def __call__(self, argv: Any, _timeout_s: float) -> Done:
        line = " ".join([Path(argv[0]).name, *argv[1:]])
        if line.startswith("top "):
            return Done(0, "", "")
        found = [said for start, said in self.said.items() if line.startswith(start)]
        return Done(0, found[0], "") if found else Done(127, "", f"unexpected: {line}")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> FakeLibc:
    libc = FakeLibc(M4_MAX)
    libc.processes = Anybody()
    libc.sysctls["vm.compressor_bytes_used"] = u64(1 << 30)
    mac = darwin_memory.Mac(libc)
    monkeypatch.setattr(darwin_memory, "mac", lambda: mac)
    monkeypatch.setattr(mac_kit.Kit, "llama_server", lambda _self: Path("/bin/true"))
    return libc


@pytest.mark.parametrize(
    ("run", "tools", "outcome", "why"),
    [
        (mac_host.plists, {}, PASS, ""),
        (mac_host.sysctls, {}, PASS, ""),
        (mac_host.sysctls, {"footprint": "phys_footprint: 900 MB\n"}, FAIL, "that of footprint(1)"),
        (mac_host.sysctls, {"memory_pressure -Q": "free percentage: 40%"}, FAIL, "memory_pressure's 40 %"),
        (mac_host.sysctls, {"vm_stat": "page size of 4096 bytes\nPages free: 1.\n"}, FAIL, "add up to hw.memsize"),
        (mac_metal.wired, {}, PASS, ""),
        (mac_metal.wired, {"true --list-devices": DEVICES.replace("110100", "9000")}, FAIL, "no more than that"),
        (mac_metal.wired, {"true --list-devices": "Available devices:\n"}, FAIL, "lists a Metal device"),
        (mac_host.doctor, {DOCTOR: '{"findings": [{"check": "chip"}]}'}, PASS, ""),
        (mac_host.doctor, {DOCTOR: '{"findings": [1]}', "xattr": "0081;Safari"}, FAIL, "is not quarantined"),
        (mac_host.doctor, {DOCTOR: "Traceback"}, FAIL, "tells its findings"),
    ],
)
def test_what_macos_tells_is_judged_both_ways(
    tmp_path: Path,
    recorded: FakeLibc,
    run: Callable[[mac_kit.Kit, Sheet], None],
    tools: dict[str, str],
    outcome: str,
    why: str,
) -> None:
    kit = mac_kit.Kit(mac_kit.Options(), tmp_path, run=Tools(**tools))
    if run is mac_host.plists:
        kit = mac_kit.Kit(mac_kit.Options(), tmp_path, run=Tools(visudo="parsed OK"))
    found = mac_acceptance.perform(check("recorded", run), kit)
    assert (found.outcome, why in found.why) == (outcome, True), found.why


def test_simulated_pressure_is_taken_back_if_its_tool_was_killed(tmp_path: Path, recorded: FakeLibc) -> None:
    asked: list[list[str]] = []
    level = "kern.memorystatus_vm_pressure_level"

    def here(argv: Any, _timeout_s: float) -> Done:
        asked.append(list(argv))
        recorded.sysctls[level] = u32(1)
        return Done(0, "", "")

    kit = mac_kit.Kit(mac_kit.Options(), tmp_path, here=here)
    mac_host.calm(kit)
    assert asked == []
    recorded.sysctls[level] = u32(2)
    mac_host.calm(kit)
    assert [argv[-1] for argv in asked] == ["kern.memorypressure_manual_trigger=131073"]


def test_what_root_prints_is_read_for_so_long_and_its_process_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    sudo.chmod(0o755)
    monkeypatch.setattr(mac_kit, "SUDO", str(sudo))
    endless = "import itertools\nfor n in itertools.count(): print(n, flush=True)"
    kit = mac_kit.Kit(mac_kit.Options(), tmp_path)
    assert mac_power.output_of(kit, (sys.executable, "-c", endless), 1.0).startswith(b"0\n1\n2\n")
    assert kit.tidy() == []


SUDO_OF_ONE_LINE = """\
#!/bin/sh
[ "$1" = -k ] && ignored=yes && shift
shift
[ "$1" = -l ] && exit 0
[ "$ignored$1" = yes/usr/bin/powermetrics ] && echo "sudo: a password is required" >&2 && exit 1
exec "$@"
"""


def test_powermetrics_is_read_and_sudos_leave_for_it_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = plistlib.dumps({"processor": {"gpu_power": 5000.0, "combined_power": 6000, "new_key": "M9"}})
    script = "import sys, time\nwhile True:\n    sys.stdout.buffer.write(" + repr(frame + b"\0") + ")\n"
    script += "    sys.stdout.flush()\n    time.sleep(0.1)\n"
    monkeypatch.setattr(powermetrics, "POWERMETRICS", (sys.executable, "-c", script))
    monkeypatch.setattr(mac_power, "FRAME_S", 0.7)
    sudo = tmp_path / "sudo"
    sudo.write_text(SUDO_OF_ONE_LINE)
    sudo.chmod(0o755)
    monkeypatch.setattr(mac_kit, "SUDO", str(sudo))
    kit = mac_kit.Kit(mac_kit.Options(), tmp_path)
    found = mac_acceptance.perform(check("powermetrics", mac_power.powermetrics), kit)
    assert found.outcome == PASS, found.why
    assert "processor.new_key (str)" in found.sheet.evidence["keys, names and types only"]
    assert {each.name: each.values[0] for each in found.sheet.figures} == {"gpu": 5.0, "combined": 6.0}
    assert [text for _, text in found.sheet.claims][-2:] == [
        "another command line is refused",
        "ours is allowed without a password",
    ]
    assert "M9" not in json.dumps(found.row())


# ── the page and the workflow ────────────────────────────────────────────────────────────────────

PAGE = REPOSITORY / "docs" / "mac-acceptance.md"
WORKFLOW = REPOSITORY / ".github" / "workflows" / "macos.yml"


def test_the_page_has_the_table_of_the_code() -> None:
    assert mac_checks.table() in PAGE.read_text(), "write it anew: the table is mac_checks.table()"


def steps() -> list[dict[str, Any]]:
    loaded = yaml.safe_load(WORKFLOW.read_text())
    return [step for job in loaded["jobs"].values() for step in job["steps"]]


def test_the_workflow_may_read_and_nothing_else_and_cannot_run_for_ever() -> None:
    loaded = yaml.safe_load(WORKFLOW.read_text())
    assert loaded["permissions"] == {"contents": "read"}
    assert set(loaded[True]) == {"push", "pull_request"} and loaded[True]["push"] == {"branches": ["main"]}
    for job in loaded["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 120
    (job,) = loaded["jobs"].values()
    assert job["strategy"]["matrix"]["os"] == ["macos-15", "macos-latest"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.13", "3.14"]
    for step in steps():
        assert ("uses" in step) != ("run" in step)
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step.get("uses", f"actions/x@{40 * '0'}")), step
        assert "${{ github.event" not in step.get("run", ""), "what a stranger wrote never reaches a shell"


def test_every_command_of_the_workflow_names_a_target_or_a_file_that_is_there() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (REPOSITORY / "Makefile").read_text()))
    commands = [line.strip() for step in steps() for line in step.get("run", "").splitlines() if line.strip()]
    text = "\n".join(commands).replace("\\\n", " ")
    assert set(re.findall(r"(?m)^make ([a-z-]+)", text)) <= targets and "make lint" in text
    named = re.findall(r"(?<![\w/.-])((?:tools|tests|launchd|conf|docs)/[\w./-]+)", text)
    assert named and all((REPOSITORY / name).exists() for name in named), named
    for said in ("plutil -lint launchd/", "mac.mac_acceptance --hosted", "mac.mac_whole", "tests/unit"):
        assert said in text, said
    flags = {flag for action in mac_acceptance.parser()._actions for flag in action.option_strings}
    (acceptance,) = [line for line in text.splitlines() if "mac_acceptance" in line]
    assert set(re.findall(r"--[a-z-]+", acceptance)) <= flags
