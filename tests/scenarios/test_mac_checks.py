"""The acceptance check of launchd, run against the stand-in for it: on a Mac it must not be tried for the first time.

What the stand-in cannot show (that launchd keeps its word) is what the check is for. Here it shows that the check
finds its way through an installation of ours, tells what it found, leaves nothing, and can fail.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from metal_supervisor.host import commands, root_file
from metal_supervisor.host.commands import Done
from metal_supervisor.install.steps import Machine
from tests.support import launchd, system
from tests.support.launchd import no_pause
from tests.support.mac import (
    mac_acceptance,
    mac_chat,
    mac_checks,
    mac_host,
    mac_install,
    mac_jobs,
    mac_kit,
    mac_power,
    mac_runtimes,
)
from tests.support.mac.mac_report import FAIL, PASS, Sheet


class Launchd(launchd.Mac):
    """The stand-in, with the two things that only the acceptance check asks of launchctl."""

    def __call__(self, argv: Sequence[str], timeout_s: float, content: bytes = b"") -> Done:
        words = [word for word in argv if word not in (mac_kit.SUDO, "-n")]
        if words[:3] == ["/bin/launchctl", "kill", "SIGTERM"]:
            process = self.jobs[words[3]].process
            assert process is not None
            process.send_signal(signal.SIGTERM)
            return launchd.FINE
        return super().__call__(argv, timeout_s, content)


@pytest.fixture
def mac() -> Iterator[Launchd]:
    found = Launchd()
    yield found
    found.close()


def kit_of(tmp_path: Path, mac: Launchd) -> mac_kit.Kit:
    return mac_kit.Kit(mac_kit.Options(hosted=True), tmp_path, here=mac)


def check_of(mac: Launchd, agent: bool = False) -> mac_checks.Check:
    """The check as it is on a Mac, but for the machine."""

    def machine(root: Path, home: Path, run: commands.Feeder) -> Machine:
        return Machine(root, home, "anna", "staff", os.getuid(), run, no_pause, label=mac_install.TRIAL)

    def story(kit: mac_kit.Kit, sheet: Sheet) -> None:
        mac_install.attempt(mac_install.Trial(kit, agent, machine), sheet)

    return mac_checks.Check("launchd", "g", "p", "f", story)


@pytest.fixture
def paced(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of systems is a stand-in: a real one takes two cores for as long as its answers last."""
    path, real = tmp_path_factory.mktemp("paced") / "llama-server", system.engine_path()
    stand_in = f'{sys.executable} {system.FAKE_ENGINE} "$@" --fake-tokens 3000 --fake-tokens-per-s 100'
    path.write_text(f'#!/bin/sh\n[ $# -gt 1 ] || exec {real} "$@"\nexec {stand_in}\n')
    path.chmod(0o755)
    monkeypatch.setattr(system, "engine_path", lambda: path)


@pytest.mark.usefixtures("paced")
def test_the_check_of_launchd_finds_its_way_through_an_installation_and_leaves_nothing(
    tmp_path: Path, mac: Launchd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mac_install, "SPAN_S", 8.0)
    found = mac_acceptance.perform(check_of(mac), kit_of(tmp_path, mac))
    assert found.outcome == PASS, (found.why, found.sheet.evidence)
    claims = " | ".join(text for _, text in found.sheet.claims)
    for said in (
        "0 tokens lost through the exchange",
        "0 tokens lost through kill -9",
        "a second install does nothing",
        "ExitTimeOut is honoured",
        "nothing is left",
        "no second one: after the exchange",
    ):
        assert said in claims, claims
    assert {each.unit for each in found.sheet.figures} == {"s", "ms", "tokens"}
    assert list(tmp_path.iterdir()) == [] and mac.jobs == {}


def test_the_check_of_launchd_can_fail_and_cleans_up_after_itself(
    tmp_path: Path, mac: Launchd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(trial: mac_install.Trial, sheet: Sheet) -> None:
        stream = trial.stream(mac_install.MOST)
        os.kill(trial.system.pid(), signal.SIGKILL)
        mac_install.streamed(stream, sheet, "of an engine that was killed", mac_install.MOST, True)
        raise RuntimeError("and then the check itself crashed")

    monkeypatch.setattr(mac_install, "terminated", cut)
    for step in ("exchange", "killed"):
        monkeypatch.setattr(mac_install, step, lambda *_: None)
    found = mac_acceptance.perform(check_of(mac, agent=True), kit_of(tmp_path, mac))
    assert found.outcome == FAIL
    assert "0 tokens lost of an engine that was killed" in found.why and "the check itself crashed" in found.why
    assert any(title.startswith("log/controller.log") for title in found.sheet.evidence)
    assert list(tmp_path.iterdir()) == [] and mac.jobs == {}


def test_a_real_llama_server_conforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.symlink_to(mac_kit.Kit(mac_kit.Options(), tmp_path).llama_server())
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (engine,) = [each for each in mac_runtimes.ENGINES if each.title == "llama-server"]
    check = mac_checks.Check("runtime-llama-server", "m", "p", "f", mac_runtimes.check(engine))
    kit = mac_kit.Kit(mac_kit.Options(model_mib=1), tmp_path / "work")
    kit.base.mkdir()
    found = mac_acceptance.perform(check, kit)
    assert found.outcome == PASS, (found.why, found.sheet.evidence)
    assert {"from apply to ready", "stream", "from kill -9 to ready"} <= {each.name for each in found.sheet.figures}
    assert [path.name for path in kit.base.iterdir()] == ["model-1.gguf"]


def test_a_stream_that_is_cut_is_not_whole(tmp_path: Path) -> None:
    kit = mac_kit.Kit(mac_kit.Options(), tmp_path)
    with kit.directory_for("cut"):
        served = kit.serve(kit.made_model(0), "--threads", "1", "--ctx-size", "32768", "--parallel", "1")
        whole = mac_chat.Stream(served.port, 50)
        assert whole.end(60) and len(whole.arrivals_s) == 50, whole.told()
        cut = mac_chat.Stream(served.port, 30000).flowing()
        os.kill(served.pid, signal.SIGKILL)
        assert not cut.end(60) and ", cut" in cut.told()
    assert kit.tidy() == []


class OneShots:
    """launchctl and install for jobs that run once, whatever else is in their property lists."""

    def __init__(self) -> None:
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        self.types: list[str] = []

    def __call__(self, argv: Sequence[str], _timeout_s: float, content: bytes = b"") -> Done:
        words = [word for word in argv if word not in (mac_kit.SUDO, "-n")]
        if words[0] == root_file.SHELL:
            return commands.run_here(words, 30.0, content)
        if words[0] == "/usr/bin/install":
            Path(words[-1]).mkdir(exist_ok=True)
            return launchd.FINE
        if words[0] == "/bin/rm":
            shutil.rmtree(words[-1], ignore_errors=True)
            return launchd.FINE
        verb = words[1]
        if verb == "bootstrap":
            content = plistlib.loads(Path(words[3]).read_bytes())
            self.types.append(content.get("ProcessType", ""))
            with Path(content["StandardOutPath"]).open("ab") as log:
                child = subprocess.Popen(content["ProgramArguments"], stdout=log, stderr=log)
            self.jobs[f"{words[2]}/{content['Label']}"] = child
        elif verb == "print":
            known = words[2] in self.jobs
            return Done(0, "x = {\n\tstate = running\n}\n", "") if known else Done(113, "", "no such job")
        elif verb == "bootout":
            child = self.jobs.pop(words[2])
            child.terminate()
            child.wait(20)
        return launchd.FINE


def test_jobs_that_run_once_answer_in_each_context_and_are_gone(tmp_path: Path) -> None:
    shots = OneShots()
    kit = mac_kit.Kit(mac_kit.Options(), tmp_path, here=shots)
    kit.roots = tmp_path
    with kit.directory_for("once"):
        for context in (mac_jobs.AGENT, mac_jobs.DAEMON):
            found = mac_jobs.once(kit, context, "run", sys.executable, "-c", "print(3)")
            assert (found["out"], found["code"]) == ("3\n", 0)
    assert shots.jobs == {} and shots.types == ["Interactive"] * 2
    assert kit.tidy() == []


def test_the_process_type_is_measured_with_a_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shots = OneShots()
    monkeypatch.setattr(mac_jobs, "REPEATS", 2)
    monkeypatch.setattr(mac_jobs, "SLOWER", 0.0)
    kit = mac_kit.Kit(mac_kit.Options(model_mib=1), tmp_path, here=shots)
    kit.roots = tmp_path
    found = mac_acceptance.perform(mac_checks.Check("type", "n", "p", "f", mac_jobs.process_type), kit)
    assert found.outcome == PASS, found.why
    assert shots.types == ["Interactive", "", "Background"] and shots.jobs == {}
    assert [len(each.values) for each in found.sheet.figures] == [2, 2, 2]


def test_the_story_of_a_sleep_is_told_around_a_real_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mac_power, "consent", lambda _kit: True)
    monkeypatch.setattr(mac_power, "go_to_sleep", lambda _kit, _wake: 75.0)
    kit = mac_kit.Kit(mac_kit.Options(), tmp_path)
    found = mac_acceptance.perform(mac_checks.Check("sleep", "i", "p", "f", mac_power.sleep), kit)
    assert found.outcome == PASS, (found.why, found.sheet.evidence)
    assert list(tmp_path.iterdir()) == []


def test_the_assertion_is_looked_for_around_a_real_system(tmp_path: Path) -> None:
    row = '   pid 366(caffeinate): [0x0000000100018001] 00:00:01 PreventUserIdleSystemSleep named: "x"\n'
    told = iter(["", row, row, row, ""])
    kit = mac_kit.Kit(mac_kit.Options(), tmp_path, run=lambda _argv, _timeout_s: Done(0, next(told, ""), ""))
    found = mac_acceptance.perform(mac_checks.Check("caffeinate", "j", "p", "f", mac_host.caffeinate), kit)
    assert found.outcome == PASS, (found.why, found.sheet.evidence)
