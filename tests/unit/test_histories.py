"""Ten thousand random histories of one Mac, and what must be so after, and all through, each of them.

The machine is `model_supervisord`. A history is what people, the cluster and bad luck do to it, with pauses between;
then all of that ends, and within a bound the machine must be what the cluster asks for, and stay so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_supervisord import (
    CRASHES_LATER,
    EDITION,
    EDITIONS,
    FAILS,
    FOREIGN,
    FOREIGN_FILE,
    HOME,
    NAMES,
    NEVER_STOPS,
    RELEASES,
    SIZES,
    Mac,
    composed,
    installed,
    program,
)

from metal_supervisor.controller.plan import LONGEST_RETRY_S
from metal_supervisor.memory.refusals import INSUFFICIENT
from metal_supervisor.spec.processes import State
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Standing
from metal_supervisor.state import programs
from tests.support.effort import cases

Event = tuple[str, str, int, float]
"""(what, to whom, how, seconds until the next)."""
EVENTS = (
    "edit",
    "edit",
    "edit",
    "delete",
    "suspend",
    "crash",
    "stop",
    "start",
    "restart",
    "remove",
    "update",
    "delete file",
    "edit file",
    "kill controller",
    "kill controller in its pass",
    "sidecar down",
    "sidecar up",
    "clock back",
    "clock forward",
    "kill supervisord",
    "long answer",
    "hang",
    "upgrade",
    "upgrade",
)
PAUSES = (0.0, 0.01, 0.2, 1.0, 2.5, 16.0, 40.0)
HARMLESS = (
    "upgrade",
    "upgrade",
    "update",
    "update",
    "update",
    "kill controller",
    "kill controller in its pass",
    "sidecar down",
    "sidecar up",
    "clock back",
    "clock forward",
    "kill supervisord",
    "long answer",
)
"""What ends no engine."""


def histories_of(events: Sequence[str], most: int) -> st.SearchStrategy[list[Event]]:
    some = st.tuples(
        st.sampled_from(events), st.sampled_from(NAMES), st.integers(0, EDITIONS - 1), st.sampled_from(PAUSES)
    )
    return st.lists(some, min_size=1, max_size=most)


HISTORIES = histories_of(EVENTS, 7)
SETTLED_S = 120.0
HELD_S = LONGEST_RETRY_S + 60.0
"""Until everything is as it should be; and with the pause of something that crashed again and again."""
UNSTABLE = (FAILS, CRASHES_LATER)
MOST_PASSES = 40
MOST_PASSES_A_SECOND = 5
"""Until then; a process that does not end is looked at four times a second."""


def property_of(examples: int) -> settings:
    return settings(max_examples=cases(examples), database=None, derandomize=True)


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        installed(patch)
        yield


class Story:
    """One history on one Mac."""

    def __init__(self, *, reverse: bool = False, deaf: bool = False, **memory: int) -> None:
        self.mac = Mac(reverse, deaf, wanted={"a": (0, False), "b": (1, False)}, **memory)
        self.mac.run(20.0 if deaf else 5.0)
        self.touched: set[str] = set()
        """Services that somebody edited, stopped, crashed or whose file was changed."""
        self.healthy = {name: self.engine(name) for name in ("a", "b")}
        """The engines that nobody may end, of services that are not touched."""

    def engine(self, name: str) -> int:
        (found,) = self.mac.engines(program(name))
        return found.pid

    def tell(self, history: Sequence[Event]) -> None:
        for what, name, how, pause_s in history:
            self.mac.tell(f"-- {what} {name} {how}")
            self._happens(what, name, how)
            self.mac.run(pause_s)

    def _happens(self, what: str, name: str, how: int) -> None:
        mac, group = self.mac, program(name)
        pace_s = (0.001, 0.05, 0.5)[how % 3]
        if what in ("edit", "delete", "suspend"):
            before = mac.wanted.get(name)
            if what == "delete":
                mac.wanted.pop(name, None)
            elif what == "suspend" and before:
                mac.wanted[name] = before[0], not before[1]
            elif what == "edit":
                mac.wanted[name] = how, False
            if mac.wanted.get(name) != before:
                self.touched.add(name)
                self._allow(group)
            mac.wake()
        elif what == "crash":
            self.touched.add(name)
            for engine in mac.engines(group):
                mac.exit(engine, (9, 0, 1 << 8)[how % 3])
        elif what == "hang":
            for engine in mac.engines(group):
                self.touched.add(name)
                mac.hang(engine)
        elif what == "upgrade":
            self._upgrade(how % RELEASES)
        elif what in ("stop", "start", "restart", "remove"):
            self.touched.add(name)
            command = {
                "stop": lambda: mac.ctl("stopProcess", group),
                "start": lambda: mac.ctl("startProcess", group),
                "restart": lambda: mac.restart(group),
                "remove": lambda: mac.remove(group),
            }[what]
            mac.by_hand(command(), pace_s)
        elif what == "update":
            mac.by_hand(mac.update(), pace_s)
        elif what in ("delete file", "edit file"):
            text = mac.files.sections.pop(f"{group}.conf", None)
            if text is not None:
                self.touched.add(name)
                self._allow(group)
                if what == "edit file":
                    mac.files.sections[f"{group}.conf"] = text.replace("startretries=3", f"startretries={4 + how}")
        elif what == "kill controller":
            mac.kill_controller()
            mac.later(0.3 * how, mac.start_controller)
        elif what == "kill controller in its pass":
            mac.fuse = how + 1
            mac.wake()
        elif what == "sidecar down":
            mac.sidecar_since = None
        elif what == "sidecar up":
            mac.sidecar_since = mac.clock.now if mac.sidecar_since is None else mac.sidecar_since
        elif what in ("clock back", "clock forward"):
            mac.clock.offset += 8 * 3600.0 if what == "clock forward" else -3600.0
        elif what == "kill supervisord":
            if mac.rpc is not None:
                mac.kill_supervisord()
                mac.later(0.5 + how, self._supervisord_back)
        elif what == "long answer":
            mac.busy_until[group] = mac.clock.now + (0.5, 2.0, 5.0, 10.0, 30.0, 600.0, 6000.0)[how]

    def _upgrade(self, release: int) -> None:
        """This Mac's own composition changes. Whatever was done to a service before, its engine stays from now on."""
        for name in self.should_stay() if not self.mac.hands else ():
            self.healthy[name] = self.engine(name)
            self.touched.discard(name)
        self.mac.release = release
        self.mac.wake()

    def should_stay(self) -> list[str]:
        """The services whose engines run as they should, and as supervisord was told of them last."""
        mac, found = self.mac, []
        for name, (edition, suspended) in mac.wanted.items():
            up = not suspended and edition not in UNSTABLE and mac.state(program(name)) is State.RUNNING
            if up and not self.as_wanted(name) and mac.took_up(program(name)):
                found.append(name)
        return found

    def _allow(self, group: str) -> None:
        """From now on a service that was stopped by hand may stay stopped, but need not."""
        if group in self.mac.stop_by_hand:
            self.mac.stop_by_hand[group] = False

    def _supervisord_back(self) -> None:
        self.mac.boot()
        self.mac.later(0.3, self.mac.start_controller)  # Python is not that fast

    # ── what must be so ──

    def as_wanted(self, name: str) -> str:
        """What is not as it should be with a service, "" if all is."""
        mac, group = self.mac, program(name)
        state, engines = mac.state(group), mac.engines(group)
        file, record = mac.files.sections.get(f"{group}.conf"), mac.files.kept.get(group)
        edition, suspended = mac.wanted.get(name, (0, True))
        if suspended:
            left = (state, engines, file) != (None, [], None)
            wrong = record is not None if name not in mac.wanted else record.verdict.standing is not Standing.SUSPENDED
            return "it should be gone" if left or wrong else ""
        if record is not None and (reason := self.short_of_memory(record)):
            return self.waits_rightly(record, reason, edition)
        meant = composed(name, edition, mac.release)[2].edition
        if record is None or record.edition != meant or mac.files.spec_of(group).get("edition") != meant:
            return "its record or spec is not the wanted one"
        text = {starts: programs.section(group, HOME, starts) for starts in (True, False)}
        if record.stopped_by_hand:
            honoured = group in mac.stop_by_hand and not engines and state is State.STOPPED
            return "" if honoured and file == text[False] else f"nobody stopped it, or it runs: {state} {engines}"
        if mac.stop_by_hand.get(group):
            return "somebody stopped it"
        if edition in UNSTABLE:
            wrong = file not in text.values() or any(EDITION[each.spec] != edition for each in engines)
            return "it runs another spec, or would" if wrong else ""
        note = mac.files.read_notes.get(group)
        if state is State.FATAL and note and note.not_before:
            return "held"
        # One that was started by hand keeps the section that it was started by.
        if file not in (text.values() if engines else (text[True],)):
            return f"its section is not the wanted one: {file}"
        if any(each in mac.hanging for each in engines):
            return "it hangs"
        running = state is State.RUNNING and [EDITION[each.spec] for each in engines] == [edition]
        known = note and engines and note.pid == engines[0].pid
        return "" if running and known else f"it should run: {state} {engines} {note}"

    def short_of_memory(self, record: Record) -> str:
        """`waits` if it may not start, `edit` if it goes on as it was; "" if it has the memory it wants."""
        if record.verdict.standing is Standing.WAIT:
            return "waits"
        return "edit" if record.warning and record.warning[0] == INSUFFICIENT else ""

    def waits_rightly(self, record: Record, reason: str, edition: int) -> str:
        """What is not as it should be with one for which there is not enough memory."""
        mac, group = self.mac, record.program
        others = sum(
            each.reserved_bytes
            for each in mac.files.kept.values()
            if each.verdict.standing is Standing.RUN and each.program != group
        )
        ahead = any(self.short_of_memory(each) for each in mac.files.kept.values() if each is not record)
        if others + SIZES[edition] <= mac.budget_bytes and not ahead:
            return "there is room for it"
        engines, file = mac.engines(group), mac.files.sections.get(f"{group}.conf")
        if reason == "waits":
            return "it should be gone" if (mac.state(group), engines, file) != (None, [], None) else ""
        runs = [each.spec for each in engines] == [record.edition]
        unstable = EDITION.get(record.edition or "") in UNSTABLE
        return "" if runs or unstable or record.stopped_by_hand else f"it should go on as it was: {engines}"

    def left(self) -> dict[str, str]:
        return {name: why for name in NAMES if (why := self.as_wanted(name))}

    def settles(self) -> None:
        """Nothing happens any more: the machine must become what is asked for, within its bounds."""
        mac = self.mac
        mac.tell("-- the end of all events")
        mac.fuse = 0
        mac.sidecar_since = mac.clock.now if mac.sidecar_since is None else mac.sidecar_since
        mac.run(10.0)  # those at supervisorctl, boot and launchd finish what they began
        passes, began = mac.passes, mac.clock.now
        mac.run(SETTLED_S, lambda: not self.left())
        unsettled = {name: why for name, why in self.left().items() if why != "held"}
        assert not unsettled, f"{unsettled}\n{mac.story()}"
        mac.run(HELD_S, lambda: not self.left())
        assert not self.left(), f"held too long: {self.left()}\n{mac.story()}"
        assert mac.passes - passes <= MOST_PASSES + MOST_PASSES_A_SECOND * (mac.clock.now - began), mac.story()

    def rests(self) -> None:
        """As it should be, it is left as it is: for minutes, or at this moment if something will not stay up."""
        mac = self.mac
        mac.run(5.0)
        assert mac.brain is not None
        unstable = [name for name in mac.wanted if self.unstable(name)]
        if unstable:
            forks = {name: mac.forks[program(name)] for name in unstable}
            mac.run(HELD_S, lambda: all(mac.forks[program(name)] > forks[name] for name in unstable))
            for name in unstable:
                assert mac.forks[program(name)] > forks[name], f"{name} is not tried any more\n{mac.story()}"
            for _ in range(4):  # a pause may be over at this very moment
                mac.one_pass()
            before = self.all_there_is()
            mac.one_pass()
        else:
            before = self.all_there_is()
            mac.run(35.0)
        assert before == self.all_there_is(), mac.story()

    def unstable(self, name: str) -> bool:
        """Whether its engine comes and goes: the one that is asked for, or the one that goes on for want of room."""
        record = self.mac.files.kept[program(name)]
        runs = EDITION.get(record.edition or "") if self.short_of_memory(record) else self.mac.wanted[name][0]
        return runs in UNSTABLE and self.should_run(name)

    def should_run(self, name: str) -> bool:
        record = self.mac.files.kept[program(name)]
        return record.verdict.standing is Standing.RUN and not record.stopped_by_hand

    def all_there_is(self) -> tuple[object, ...]:
        """Every call that was made, every file, every process."""
        mac = self.mac
        alive = sorted((each.program, each.pid) for each in mac.all.values() if each.alive)
        return len(mac.journal), mac.files.writes, self.files(), dict(mac.files.kept), alive

    def files(self) -> tuple[dict[str, str], dict[str, str]]:
        return dict(self.mac.files.sections), dict(self.mac.files.specs)

    def left_others_alone(self) -> None:
        """The engines that nobody touched, or that an upgrade found in order, and what is not ours."""
        mac = self.mac
        for name, pid in self.healthy.items():
            assert name in self.touched or self.engine(name) == pid, f"{name} was restarted\n{mac.story()}"
        assert mac.files.sections["mine.conf"] == FOREIGN_FILE
        assert mac.state(FOREIGN) is State.RUNNING and mac.state("controller") is State.RUNNING


def played(history: Sequence[Event], *, reverse: bool = False, deaf: bool = False, **memory: int) -> Story:
    """A history from its beginning to the rest after it."""
    story = Story(reverse=reverse, deaf=deaf, **memory)
    story.tell(history)
    story.settles()
    story.rests()
    story.left_others_alone()
    return story


# All through a history the machine itself refuses two engines of one service, a signal or a call for what is not
# ours, and a start of what was stopped by hand.


@property_of(5000)
@given(HISTORIES)
# An engine that was stopped by hand and started again outlives supervisord; its section still said autostart=false.
@example([("stop", "a", 0, 16.0), ("start", "a", 0, 0.0), ("kill supervisord", "a", 0, 0.0), ("edit", "a", 1, 0.0)])
# What is started by hand dies at once: nobody ever sees it alive.
@example([("edit", "a", FAILS, 1.0), ("stop", "a", 0, 1.0), ("start", "a", 0, 0.0)])
# `supervisorctl update` stops, removes and adds, and a pass comes between.
@example([("delete file", "a", 0, 0.0), ("update", "a", 1, 0.0)])
@example([("edit file", "a", 0, 0.0), ("update", "a", 1, 0.0)])
# A stop of our own, long ago, is no excuse to undo somebody's.
@example([("suspend", "a", 0, 2.5), ("suspend", "a", 0, 16.0), ("stop", "a", 0, 2.5), ("stop", "a", 0, 16.0)])
# A section that is lost while a spec waits for the next start.
@example([("delete file", "a", 0, 0.0), ("upgrade", "a", 1, 0.0)])
# What this Mac alone composes anew does not start what somebody stopped.
@example([("stop", "a", 0, 16.0), ("upgrade", "a", 1, 2.5)])
@example([("stop", "a", 0, 0.2), ("upgrade", "a", 1, 0.0)])
@example([("stop", "a", 0, 0.2), ("upgrade", "a", 1, 0.2), ("start", "a", 0, 0.0)])
# An engine that hangs, and does not heed a TERM.
@example([("edit", "a", NEVER_STOPS, 2.5), ("hang", "a", 0, 0.0)])
# A pause after crashes that the clock moves out of sight.
@example([("edit", "a", FAILS, 40.0), ("clock back", "a", 0, 0.0)])
def test_after_any_history_the_machine_becomes_what_is_asked_for_and_stays_so(history: list[Event]) -> None:
    played(history)


@property_of(500)
@given(HISTORIES)
def test_it_does_so_without_any_wake_too(history: list[Event]) -> None:
    played(history, deaf=True)


@property_of(750)
@given(HISTORIES)
def test_no_step_depends_on_the_order_in_which_records_and_tables_are_presented(history: list[Event]) -> None:
    one, other = played(history), played(history, reverse=True)
    assert one.mac.journal == other.mac.journal
    assert one.all_there_is() == other.all_there_is()


@property_of(1000)
@given(histories_of(EVENTS, 3), histories_of(HARMLESS, 5), st.integers(1, RELEASES - 1), st.sampled_from(PAUSES))
def test_what_this_mac_alone_composes_anew_ends_no_engine_and_neither_does_supervisorctl_update(
    before: list[Event], after: list[Event], release: int, pause_s: float
) -> None:
    story = Story()
    story.tell(before)
    story.settles()
    running = {name: story.engine(name) for name in story.should_stay()}
    story.tell([("upgrade", "a", (story.mac.release + release) % RELEASES, pause_s), *after, ("update", "a", 1, 2.5)])
    story.settles()
    story.tell([("update", "a", 1, 2.5)])
    story.rests()
    assert running == {name: story.engine(name) for name in running}, story.mac.story()


def test_a_stop_by_hand_is_honoured_although_another_spec_waits() -> None:
    story = Story()
    story.tell([("upgrade", "a", 1, 2.5), ("stop", "a", 0, 16.0)])
    assert story.mac.state(program("a")) is State.STOPPED, story.mac.story()
