"""Ten thousand random histories of one Mac, and what must be so after, and all through, each of them.

The machine is `model_supervisord`. A history is what people, the cluster and bad luck do to it, with pauses between;
then all of that ends, and within a bound the machine must be what the cluster asks for, and stay so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_supervisord import (
    CRASHES_LATER,
    EDITIONS,
    FAILS,
    FOREIGN,
    FOREIGN_FILE,
    HOME,
    NAMES,
    Mac,
    composed,
    installed,
    program,
)  # fmt: skip

from metal_supervisor.core import programs
from metal_supervisor.core.plan import LONGEST_RETRY_S
from metal_supervisor.core.types import Standing, State

Event = tuple[str, str, int, float]
"""(what, to whom, how, seconds until the next)."""
EVENTS = (
    "edit", "edit", "edit", "delete", "suspend", "crash", "stop", "start", "restart", "remove", "update", "delete file",
    "edit file", "kill controller", "kill controller in its pass", "sidecar down", "sidecar up", "clock back",
    "clock forward", "kill supervisord", "long answer",
)  # fmt: skip
PAUSES = (0.0, 0.01, 0.2, 1.0, 2.5, 16.0, 40.0)
HISTORIES = st.lists(
    st.tuples(
        st.sampled_from(EVENTS), st.sampled_from(NAMES), st.integers(0, EDITIONS - 1), st.sampled_from(PAUSES)
    ),
    min_size=1, max_size=10,
)  # fmt: skip
SETTLED_S, HELD_S = 120.0, LONGEST_RETRY_S + 60.0
"""Until everything is as it should be; and with the pause of something that crashed again and again."""
UNSTABLE = (FAILS, CRASHES_LATER)
MOST_PASSES, MOST_PASSES_A_SECOND = 40, 5
"""Until then; a process that does not end is looked at four times a second."""


def property_of(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, database=None, derandomize=True)


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        installed(patch)
        yield


class Story:
    """One history on one Mac."""

    def __init__(self, *, reverse: bool = False, deaf: bool = False) -> None:
        self.mac = Mac(reverse, deaf, wanted={"a": (0, False), "b": (1, False)})
        self.mac.run(20.0 if deaf else 5.0)
        self.touched: set[str] = set()
        """Services that somebody edited, stopped, crashed or whose file was changed."""
        self.healthy = {name: self.engine(name) for name in ("a", "b")}

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
        elif what in ("stop", "start", "restart", "remove"):
            self.touched.add(name)
            command = {
                "stop": lambda: mac.ctl("stopProcess", group), "start": lambda: mac.ctl("startProcess", group),
                "restart": lambda: mac.restart(group), "remove": lambda: mac.remove(group),
            }[what]  # fmt: skip
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
            mac.busy_until[group] = mac.clock.now + 5.0 * how

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
        spec = composed(name, edition)[2].spec_file
        if record is None or record.spec_file != spec or spec not in mac.files.specs:
            return "its record or spec is not the wanted one"
        if record.stopped_by_hand:
            honoured = group in mac.stop_by_hand and not engines and state is State.STOPPED
            same = file == programs.section(group, spec, HOME, False)
            return "" if honoured and same else f"nobody stopped it, or it runs: {state} {engines}"
        if mac.stop_by_hand.get(group):
            return "somebody stopped it"
        if file != programs.section(group, spec, HOME, True):
            return "its section is not the wanted one"
        if edition in UNSTABLE:
            return "" if all(each.spec == spec for each in engines) else "it runs another spec"
        note = mac.files.read_notes.get(group)
        if state is State.FATAL and note and note.not_before:
            return "held"
        running = state is State.RUNNING and [each.spec for each in engines] == [spec]
        known = note and engines and note.pid == engines[0].pid
        return "" if running and known else f"it should run: {state} {engines} {note}"

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
        if any(edition in UNSTABLE for edition, _ in mac.wanted.values()):
            mac.brain.one_pass()
            before = self.all_there_is()
            mac.brain.one_pass()
        else:
            before = self.all_there_is()
            mac.run(50.0)
        assert before == self.all_there_is(), mac.story()

    def all_there_is(self) -> tuple[object, ...]:
        """Every call that was made, every file, every process."""
        mac = self.mac
        alive = sorted((each.program, each.pid) for each in mac.all.values() if each.alive)
        return len(mac.journal), mac.files.writes, dict(mac.files.sections), dict(mac.files.kept), alive

    def left_others_alone(self) -> None:
        """The healthy that nobody touched, and what is not ours."""
        mac = self.mac
        for name, pid in self.healthy.items():
            assert name in self.touched or self.engine(name) == pid, f"{name} was restarted\n{mac.story()}"
        assert mac.files.sections["mine.conf"] == FOREIGN_FILE
        assert mac.state(FOREIGN) is State.RUNNING and mac.state("controller") is State.RUNNING


def played(history: Sequence[Event], *, reverse: bool = False, deaf: bool = False) -> Story:
    """A history from its beginning to the rest after it."""
    story = Story(reverse=reverse, deaf=deaf)
    story.tell(history)
    story.settles()
    story.rests()
    story.left_others_alone()
    return story


# All through a history the machine itself refuses two engines of one service, a signal or a call for what is not
# ours, and a start of what was stopped by hand.


@property_of(1000)
@given(HISTORIES)
def test_after_any_history_the_machine_becomes_what_is_asked_for_and_stays_so(history: list[Event]) -> None:
    played(history)


@property_of(1)
@given(HISTORIES)
def test_it_does_so_without_any_wake_too(history: list[Event]) -> None:
    played(history, deaf=True)


@property_of(1)
@given(HISTORIES)
def test_no_step_depends_on_the_order_in_which_records_and_tables_are_presented(history: list[Event]) -> None:
    one, other = played(history), played(history, reverse=True)
    assert one.mac.journal == other.mac.journal
    assert one.all_there_is() == other.all_there_is()
