"""People and their files around supervisord (cases S54 to S60): supervisorctl by hand, files in models.d by hand.

One running system with one engine that streams throughout; whatever is done to another program, that engine keeps
its pid and its answers end whole.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from metal_supervisor.supervisord.client import Refused, Unavailable
from tests.support.faults import Figure, fault
from tests.support.supervisord_support import engines_of, gone, in_table, streaming, taken, with_context
from tests.support.system import System, eventually, running, service


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("super")) as up:
        up.apply(up.tiny_model(), service("tiny", parallelSlots=2, contextSize=16384))
        up.ready()
        yield up


# ── files ────────────────────────────────────────────────────────────────────────────────────────


@fault(
    "S54",
    "files that supervisord refuses (CANT_REREAD) lie in models.d: an unknown variable, no section, not UTF-8",
    happens="each is put aside by name; a good foreign file stays, and what waited for the reload goes on",
    sees="the file and the reason in /status; every service as before",
    bound="the next service Ready within 30 s",
)
def test_a_broken_foreign_file_in_models_d_is_put_aside_by_name(system: System, figure: Figure) -> None:
    directory = system.state / "models.d"
    broken = {
        "foreign.conf": b"[program:foreign]\ncommand=%(nonsense)s\n",
        "text.conf": b"command=/bin/true\n",
        "bytes.conf": b"[program:bytes]\ncommand=/bin/\xff\n",
    }
    with streaming(system, figure):
        for name, content in broken.items():
            (directory / name).write_bytes(content)
        fine = directory / "mine.conf"
        fine.write_text("[program:mine]\ncommand=/bin/sleep 1000\nautostart=false\n")
        with figure.timed("next service Ready"):
            system.apply(service("next"))
            system.ready("next")
        for name in broken:
            assert not (directory / name).exists()
            assert list((system.state / "quarantine").glob(f"*{name}"))
            eventually(lambda name=name: name in system.fetch("/status")[1], what=f"{name} to be named in /status")
        assert fine.exists() and system.observe()["ready"]
        fine.unlink()
        gone(system, "next")


@fault(
    "S59",
    "the section of a running model is deleted by hand",
    happens="it is written again; supervisord's `removed` is not obeyed",
    sees="nothing; one whose section an `update` found gone was stopped by hand, and is Ready after a start",
    bound="written within 30 s",
)
def test_a_deleted_section_is_written_again(system: System, figure: Figure) -> None:
    section = system.files.section_path("default.tiny")
    text = section.read_text()
    with streaming(system, figure):
        section.unlink()
        assert "default.tiny: disappeared" in system.supervisorctl_program("reread")
        with figure.timed("written again"):
            eventually(lambda: section.exists() and section.read_text() == text, 30, "the section to be back")
        system.apply(service("victim"))
        system.ready("victim")
        system.files.section_path("default.victim").unlink()
        system.supervisorctl_program("update")
        with figure.timed("back in the table after `update`"):
            eventually(lambda: in_table(system, "victim") in ("STOPPED", "STARTING", "RUNNING"), 30, "it to be back")
        # The section may have been written again before the `update` looked: then nothing happened at all.
        eventually(lambda: started(system, "victim"), 30, "an engine")
        system.ready("victim")
        assert len(engines_of(system, "victim")) == 1
        gone(system, "victim")


def ours(section: str) -> bool:
    """Whether a section starts an engine the way that we write it."""
    return "launch" in section and "/bin/sleep" not in section


@fault(
    "S60",
    "the section of a running model is edited by hand: another command, an option, rubbish",
    happens="it is written again; an engine that an `update` put in its place is replaced by the wanted one",
    sees="nothing; one that an `update` stopped is Ready after a start",
    bound="written within 30 s",
)
def test_an_edited_section_is_written_again(system: System, figure: Figure) -> None:
    section = system.files.section_path("default.tiny")
    text = section.read_text()
    with streaming(system, figure):
        section.write_text(text.replace("startretries=3", "startretries=9"))
        with figure.timed("written again"):
            eventually(lambda: section.read_text() == text, 30, "the section to be as it was")
        section.write_text("rubbish\n")
        system.apply(service("victim"))
        system.ready("victim")
        theirs = system.files.section_path("default.victim")
        assert ours(theirs.read_text())
        theirs.write_text("[program:default.victim]\ncommand=/bin/sleep 1000\n")
        system.supervisorctl_program("update")
        eventually(lambda: in_table(system, "victim") in ("STOPPED", "STARTING", "RUNNING"), 30, "it to be back")
        with figure.timed("its own engine again after `update`"):
            eventually(lambda: started(system, "victim") and len(engines_of(system, "victim")) == 1, 40, "its engine")
            system.ready("victim")
        # Its port may be another one by now: the engine that `update` stopped may have held the old one too long.
        eventually(lambda: section.read_text() == text and ours(theirs.read_text()), 30, "both sections")
        gone(system, "victim")


def started(system: System, name: str) -> int:
    """Starts a program by hand, if it is there to be started; its engine's pid."""
    system.supervisorctl_program("start", f"default.{name}")
    return system.pid(name)


# ── hands ────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def over_and_over(act: Callable[[], object], at_least: int = 3) -> Iterator[list[object]]:
    """Does something again and again, in a thread of its own, as long as the block runs; yields what it returned."""
    done: list[object] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            done.append(act())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield done
        eventually(lambda: len(done) >= at_least, 60, "it to be done often enough")
    finally:
        stop.set()
        thread.join(60)


def asked(system: System, method: str, *arguments: object) -> str:
    """A call of somebody else's; his faults are his."""
    try:
        system.rpc.call(method, *arguments)
    except (Refused, Unavailable) as error:
        return str(error)
    return ""


def serves(system: System) -> int:
    """Pid of the racer's engine if it runs the last edit and is Ready, else 0."""
    pid = with_context(system, "racer", 1033)
    return pid if pid and system.ready("racer") == pid else 0


@fault(
    "S55",
    "a program is edited ten times while others call reread, remove, add and `supervisorctl update` without pause",
    happens="BAD_NAME, ALREADY_ADDED and STILL_RUNNING are read as the state they tell; the last edit wins",
    sees="the engine of the last edit, once",
    bound="Ready with the last edit within 60 s",
)
def test_races_with_others_end_in_the_last_edit(system: System, figure: Figure) -> None:
    name = "default.racer"

    def meddle() -> str:
        told = ""
        for method, *arguments in (("reloadConfig",), ("removeProcessGroup", name), ("addProcessGroup", name)):
            told += asked(system, f"supervisor.{method}", *arguments)
            time.sleep(0.02)  # his pace; without one he would only keep supervisord busy
        return told

    with streaming(system, figure):
        system.apply(service("racer"))
        with over_and_over(meddle) as told, over_and_over(lambda: system.supervisorctl_program("update")):
            for size in range(1024, 1034):
                system.apply(service("racer", contextSize=size))
                eventually(lambda: taken(system, "racer"), 20, "the edit to be taken")
            with figure.timed("Ready after the last edit"):
                # The others go on: which process it is may change between two looks.
                eventually(lambda: serves(system), 120, "the last edit to run, and to be Ready")
        last = eventually(lambda: serves(system), 60, "it to be Ready once they have left")
        assert engines_of(system, "racer") == [last]
        faults = sum(str(each).count("fault ") for each in told)
        figure.add("faults the others got", faults, "")
        assert faults
        gone(system, "racer")


@fault(
    "S56",
    "somebody runs `supervisorctl update` over and over while five services are applied, edited and deleted",
    happens="`update` makes the same calls from the same files, so either of the two may come first",
    sees="every service Ready, with one engine each",
    bound="all Ready within 60 s",
)
def test_an_update_in_the_middle_of_an_apply_does_no_harm(system: System, figure: Figure) -> None:
    names = [f"many-{number}" for number in range(5)]
    with streaming(system, figure):
        with over_and_over(lambda: system.supervisorctl_program("update")) as told:
            with figure.timed("five Ready"):
                system.apply(*map(service, names))
                for name in names:
                    system.ready(name, 60)
            with figure.timed("edited and Ready"):
                system.apply(service("many-0", contextSize=1024))
                eventually(lambda: with_context(system, "many-0", 1024), 60, "the edit to run")
                system.ready("many-0", 60)
            gone(system, "many-4")
        assert all(len(engines_of(system, name)) == 1 for name in names[:4])
        assert not engines_of(system, "many-4")
        figure.add("updates meanwhile", len(told), "")
        gone(system, *names[:4])


@fault(
    "S58",
    "somebody runs `supervisorctl remove` on a running model, and on one that he stopped",
    happens="supervisord refuses the first; the second is back in its table, and stays stopped if it had been for 2 s",
    sees="StoppedByHand; Ready after `supervisorctl start`",
    bound="back in the table within 30 s",
)
def test_a_removal_by_hand_does_not_make_supervisord_forget_a_wanted_model(system: System, figure: Figure) -> None:
    with streaming(system, figure):
        assert "still running: default.tiny" in system.supervisorctl_program("remove", "default.tiny")
        system.apply(service("removed"))
        system.ready("removed")
        system.supervisorctl_program("stop", "default.removed")
        eventually(lambda: system.condition("MetalReady", "removed").get("reason") == "StoppedByHand", 30, "its reason")
        kept = system.files.section_path("default.removed")
        eventually(lambda: "autostart=false" in kept.read_text(), 10, "the stop to have lasted")
        system.supervisorctl_program("remove", "default.removed")
        with figure.timed("back in the table"):
            eventually(lambda: in_table(system, "removed"), 40, "the program to be back")
        assert in_table(system, "removed") == "STOPPED"
        assert system.condition("MetalReady", "removed")["reason"] == "StoppedByHand"
        with figure.timed("Ready after a start"):
            system.supervisorctl_program("start", "default.removed")
            system.ready("removed")
        gone(system, "removed")
