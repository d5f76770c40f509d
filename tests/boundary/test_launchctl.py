"""launchctl's verbs and codes, as recorded on Macs: what is waited for, what is tried again, what is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from metal_supervisor.host import commands
from metal_supervisor.host.commands import Done
from metal_supervisor.host.launchctl import Launchctl, LaunchdError, LoadedJob
from metal_supervisor.host.launchd import LABEL
from tests.support.launchd import no_pause

PRINTED = """\
system/dev.metal-supervisor = {
\tactive count = 1
\tpath = /Library/LaunchDaemons/dev.metal-supervisor.plist
\ttype = LaunchDaemon
\tstate = running

\tprogram = /Users/u/.metal-supervisor/current/metal-supervisor
\targuments = {
\t\tprogram = not this one
\t}

\tdomain = system
\tminimum runtime = 15
\texit timeout = 120
\truns = 3
\tpid = 4122
\timmediate reason = inefficient
\tlast exit code = 78: EX_CONFIG
\tspawn type = interactive (4)
\tpid = 1
\tproperties = keepalive | runatload
}
"""
GONE = Done(113, "", 'Could not find service "dev.metal-supervisor" in domain for system')
YES = Done(0, "", "")
BUSY = Done(36, "", "36: Operation now in progress")
EARLY = Done(5, "", "5: Input/output error")
THERE = Done(0, PRINTED, "")


class Said:
    """Answers of each verb, one after another; the last one for ever."""

    def __init__(self, **answers: Sequence[Done]) -> None:
        self.answers = {verb: list(each) for verb, each in answers.items()}
        self.asked: list[list[str]] = []

    def __call__(self, argv: Sequence[str], _timeout_s: float) -> Done:
        self.asked.append(list(argv))
        answers = self.answers[argv[argv.index("/bin/launchctl") + 1]]
        return answers.pop(0) if len(answers) > 1 else answers[0]


def launchctl(said: Said) -> Launchctl:
    return Launchctl(said, "system", ("/usr/bin/sudo",), no_pause)


def test_what_is_printed_of_a_job_is_read_one_level_deep() -> None:
    assert Launchctl(Said(print=[THERE]), "system").job(LABEL) == LoadedJob(
        state="running",
        pid=4122,
        runs=3,
        last_exit="78: EX_CONFIG",
        exit_timeout_s=120,
        spawn_type="interactive (4)",
        program="/Users/u/.metal-supervisor/current/metal-supervisor",
    )


def test_a_job_that_was_killed_says_by_what() -> None:
    text = "x = {\n\tstate = spawn scheduled\n\tlast exit code = 0\n\tlast terminating signal = Killed: 9\n"
    text += "\tpid = 9x\n}"
    found = Launchctl(Said(print=[Done(0, text, "")]), "system").job(LABEL)
    assert found == LoadedJob("spawn scheduled", 0, 0, "Killed: 9", None, "", "")


def test_without_a_job_there_is_none() -> None:
    for code in (113, 112, 125, 3, commands.NOT_FOUND):
        assert Launchctl(Said(print=[Done(code, "", "no")]), "system").job(LABEL) is None


def test_an_answer_that_does_not_come_is_no_answer() -> None:
    for done in (Done(commands.TIMED_OUT, "", "launchctl did not end within 5 s"), Done(-9, "", ""), Done(1, "", "")):
        with pytest.raises(LaunchdError, match=rf"launchctl print system/{LABEL} failed with {done.code}: "):
            Launchctl(Said(print=[done]), "system").job(LABEL)


def test_a_wait_goes_on_over_an_answer_that_does_not_come() -> None:
    slow = Done(commands.TIMED_OUT, "", "slow")
    launchctl(Said(bootout=[YES], print=[THERE, slow, GONE])).unload(LABEL, 60.0)
    launchctl(Said(bootstrap=[EARLY, YES], print=[slow, THERE])).load(LABEL, Path("/x.plist"))


def test_a_load_that_comes_too_early_is_tried_again() -> None:
    said = Said(bootstrap=[EARLY, EARLY, YES], print=[GONE, GONE, THERE])
    launchctl(said).load(LABEL, Path("/x.plist"))
    assert [argv for argv in said.asked if "bootstrap" in argv] == [
        ["/usr/bin/sudo", "/bin/launchctl", "bootstrap", "system", "/x.plist"]
    ] * 3


def test_a_load_that_stays_impossible_says_so() -> None:
    with pytest.raises(LaunchdError, match="bootstrap failed with 5: 5: Input/output error"):
        launchctl(Said(bootstrap=[EARLY], print=[GONE])).load(LABEL, Path("/x.plist"))
    with pytest.raises(LaunchdError, match=r"said yes, and system has no dev.metal-supervisor"):
        launchctl(Said(bootstrap=[YES], print=[GONE])).load(LABEL, Path("/x.plist"))


def test_a_login_that_is_not_there_is_named() -> None:
    refused = Done(125, "", "Bootstrap failed: 125: Domain does not support specified action")
    with pytest.raises(LaunchdError, match="no user is logged in at the screen: log in there, or install without"):
        launchctl(Said(bootstrap=[refused], print=[GONE])).load(LABEL, Path("/x.plist"))


def test_an_unload_waits_until_the_job_is_gone() -> None:
    said = Said(bootout=[BUSY, BUSY, YES], print=[THERE, THERE, THERE, GONE])
    launchctl(said).unload(LABEL, 60.0)
    assert sum("bootout" in argv for argv in said.asked) == 4, "a yes alone is not believed"


def test_an_unload_that_does_not_end_says_so() -> None:
    with pytest.raises(LaunchdError, match=r"is not gone after 2 s; see: launchctl print system/dev.metal-supervisor"):
        launchctl(Said(bootout=[YES], print=[THERE])).unload(LABEL, 2.0)
    with pytest.raises(LaunchdError, match="bootout failed with 1: not permitted"):
        launchctl(Said(bootout=[Done(1, "", "not permitted\n")], print=[THERE])).unload(LABEL, 2.0)


def test_a_signal_to_a_job_without_a_process_is_none() -> None:
    launchctl(Said(kill=[Done(3, "", "No process")])).kill(LABEL, "SIGTERM")
    with pytest.raises(LaunchdError, match="kill failed with 1"):
        launchctl(Said(kill=[Done(1, "", "")])).kill(LABEL, "SIGTERM")


def test_a_command_that_is_not_there_or_hangs_is_an_answer_too() -> None:
    assert commands.run(["/no/such/program"]).code == commands.NOT_FOUND
    assert commands.run(["/bin/sleep", "60"], 0.05).code == commands.TIMED_OUT
    assert commands.run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"]) == Done(3, "out\n", "err\n")
    assert commands.run_here(["/bin/cat"]) == Done(0, "", "")
