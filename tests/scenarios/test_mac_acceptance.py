"""The acceptance check of launchd, run against the stand-in for it: on a Mac it must not be tried for the first time.

What the stand-in cannot show (that launchd keeps its word) is what the check is for. Here it shows that the check
finds its way through an installation of ours, tells what it found, leaves nothing, and can fail.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from metal_supervisor.boundary import commands
from metal_supervisor.boundary.commands import Done
from metal_supervisor.install_steps import Machine
from tests import launchd
from tests.launchd import no_pause
from tests.system import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import mac_acceptance
import mac_chat
import mac_checks
import mac_install
import mac_kit
import mac_runtimes
from mac_report import FAIL, PASS, Sheet


class Launchd(launchd.Mac):
    """The stand-in, with the two things that only the acceptance check asks of launchctl."""

    def __call__(self, argv: Sequence[str], timeout_s: float) -> Done:
        words = [word for word in argv if word not in (mac_kit.SUDO, "-n")]
        if words[:3] == ["/bin/launchctl", "kill", "SIGTERM"]:
            process = self.jobs[words[3]].process
            assert process is not None
            process.send_signal(signal.SIGTERM)
            return launchd.FINE
        return super().__call__(argv, timeout_s)


@pytest.fixture
def mac() -> Iterator[Launchd]:
    found = Launchd()
    yield found
    found.close()


def kit_of(tmp_path: Path, mac: Launchd) -> mac_kit.Kit:
    return mac_kit.Kit(mac_kit.Options(hosted=True), tmp_path, here=mac)


def check_of(mac: Launchd, agent: bool = False) -> mac_checks.Check:
    """The check as it is on a Mac, but for the machine."""

    def machine(root: Path, home: Path, run: commands.Runner) -> Machine:
        return Machine(root, home, "anna", "staff", os.getuid(), run, no_pause, label=mac_install.TRIAL)

    def story(kit: mac_kit.Kit, sheet: Sheet) -> None:
        mac_install.attempt(mac_install.Trial(kit, agent, machine), sheet)

    return mac_checks.Check("launchd", "g", "p", "f", story)


def test_the_check_of_launchd_finds_its_way_through_an_installation_and_leaves_nothing(
    tmp_path: Path, mac: Launchd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mac_install, "SPAN_S", 8.0)
    found = mac_acceptance.perform(check_of(mac), kit_of(tmp_path, mac))
    assert found.outcome == PASS, (found.why, found.sheet.evidence)
    claims = " | ".join(text for _, text in found.sheet.claims)
    for said in ("0 tokens lost through the exchange", "0 tokens lost through kill -9", "a second install does nothing",
                 "ExitTimeOut is honoured", "nothing is left", "no second one: after the exchange"):  # fmt: skip
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
