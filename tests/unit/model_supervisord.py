"""One Mac in memory, with a clock of its own: what `test_histories` plays its histories on.

Most of it is the real thing. The states, faults and diffs are supervisor's own code (`Supervisor`, `Subprocess`, its
RPC interface and its parser), over an operating system that is a dictionary; the launcher is `launch.main` up to its
exec; the pass is `Controller.one_pass` with the real `Applier`, `decide` and `plan`, and the sweep is boot's own; their
files are in a dictionary. Modelled, in as few lines as possible, are only the neighbours: processes and signals (a
TERM within 5 ms of a fork is lost), what the sidecar and the engines answer, people with supervisorctl, and what
`_decide` learns of the cluster and of this Mac.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import supervisor.process
import supervisor.rpcinterface
import supervisor.supervisord
from supervisor.http import NOT_DONE_YET
from supervisor.options import ProcessConfig, ProcessGroupConfig, ServerOptions, UnhosedConfigParser
from supervisor.rpcinterface import SupervisorNamespaceRPCInterface
from supervisor.states import ProcessStates, SupervisorStates
from supervisor.xmlrpc import Faults, RPCError

from metal_supervisor import launch
from metal_supervisor.controller import applier, leftovers, loop, plan, reconcile
from metal_supervisor.controller.admission import Up
from metal_supervisor.controller.applier import Applier
from metal_supervisor.controller.assignment import Assignment
from metal_supervisor.controller.loop import Controller
from metal_supervisor.controller.memory_manager import Memory
from metal_supervisor.controller.prerequisites import prerequisites
from metal_supervisor.controller.prerequisites.ports import Ports
from metal_supervisor.controller.pressure_watch import MemoryState
from metal_supervisor.controller.reconcile import Outlook
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.memory.budget import Budget
from metal_supervisor.memory.ledger import Ledger
from metal_supervisor.memory.pressure import Pace
from metal_supervisor.models.metadata import Demand
from metal_supervisor.runtimes import probing
from metal_supervisor.spec.limits import Limits
from metal_supervisor.spec.processes import Observed, ProgramState, RunNote, State
from metal_supervisor.spec.record import DERIVED, Record
from metal_supervisor.spec.types import Endpoint, Engine, Model, ModelFile, Probe, Program, Service
from metal_supervisor.state import own_processes, programs
from metal_supervisor.supervisord import client, rpc_plugin
from metal_supervisor.supervisord.client import Refused, Supervisord, Unavailable

HOME = "/state"
NODE_EPOCH = 1_700_000_000.0
DRAIN_S = 8.0
DEAF_S = 0.005
LAUNCH_S = 0.015
SIDECAR_S = 0.03
NOTICE_S = 0.4
HUNG_S = 3.0
"""After which the sidecar calls an engine hung; 90 s as it comes."""
HANDS_S = 0.1
"""Nobody is quicker with supervisorctl after a boot. A TERM for a launcher that has not yet found the survivor it is
to stand in for leaves that one alone, which is known, and not played here."""
STEADY = (0, 1, 2)
FAILS = 3
NEVER_STOPS = 4
STOPS_SLOWLY = 5
CRASHES_LATER = 6
EDITIONS = 7
RELEASES = 3
SIZES = (20, 30, 40, 50, 60, 70, 110)
"""Bytes of memory that an edition takes."""
FOREIGN = "default.mine"
FOREIGN_FILE = f"[program:{FOREIGN}]\ncommand=/bin/sleep 60\n"
NAMES = ("a", "b", "c")


class Clock:
    """Time as everybody in a history sees it; `wall` may jump, `now` only goes on."""

    def __init__(self) -> None:
        self.now, self.offset = 0.0, NODE_EPOCH

    def time(self) -> float:
        return self.now + self.offset


# ── the operating system ─────────────────────────────────────────────────────────────────────────


@dataclass
class Process:
    """A process: a launcher until it has its spec, then an engine, or a stand-in for one."""

    pid: int
    program: str
    spec: str
    born: float
    parent: int
    """Which supervisord it is a child of; an orphan is never reaped by a later one."""
    alive: bool = True
    engine: bool = False
    stands_for: int = 0
    asked_to_end: bool = False
    hangs_since: float = math.inf
    """One that hangs answers nobody; it ends as others of its edition do."""


class Gone(Exception):
    """What would have replaced or ended the launcher's process."""


# ── supervisord ──────────────────────────────────────────────────────────────────────────────────


class Silent:
    """supervisord's logger; only its last words on each program are kept, as in its log file."""

    def __init__(self, words: dict[str, str]) -> None:
        self._words = words

    def info(self, text: str) -> None:
        verb, _, rest = text.partition(": ")
        if verb in ("stopped", "exited"):
            self._words[rest.partition(" ")[0]] = verb

    warn = info

    def debug(self, text: str, **_: object) -> None:
        pass

    blather = critical = debug


class Section(ProcessConfig):  # type: ignore[misc]
    """A program's section, without pipes."""

    def make_dispatchers(self, process: Any) -> tuple[dict[int, Any], dict[str, Any]]:
        self.options.forking = process.config
        return {}, {}

    def create_autochildlogs(self) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


@lru_cache(maxsize=512)
def parsed(text: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """(name, options) of each program in a file, by supervisor's own parser."""
    options, parser = ServerOptions(), UnhosedConfigParser()
    options.here = "/"
    parser.read_string(text.replace(f"{HOME}/log/", "/dev/shm/"))
    parser.expansions = {"here": "/"}
    names = [*ProcessConfig.req_param_names, *ProcessConfig.optional_param_names]
    return tuple(
        (group.name, {name: getattr(group.process_configs[0], name) for name in names})
        for group in options.process_groups_from_parser(parser)
    )


class Options:
    """supervisord's facade of the system: all that its process logic asks of it."""

    nodaemon, first, test, identifier = True, False, False, "supervisor"

    def __init__(self, mac: Mac, generation: int) -> None:
        self.mac, self.generation = mac, generation
        self.mood, self.pidhistory = SupervisorStates.RUNNING, {}
        self.logger = Silent(mac.words)
        self.process_group_configs: list[Any] = []
        self.forking: Any = None
        self.made: dict[str, list[Any]] = {}

    def process_config(self, do_usage: bool = True) -> None:
        texts = [OWN_CONF, *(self.mac.files.sections[name] for name in sorted(self.mac.files.sections))]
        self.process_group_configs = [each for text in texts for each in self.groups(text)]

    def groups(self, text: str) -> list[Any]:
        """The groups that a file makes."""
        if text not in self.made:
            self.made[text] = [
                ProcessGroupConfig(self, name, values["priority"], [Section(self, **values)])
                for name, values in parsed(text)
            ]
        return self.made[text]

    def fork(self) -> int:
        return self.mac.fork(self.forking.name, self.forking.command, self.generation)

    def kill(self, pid: int, sig: int) -> None:
        self.mac.kill(pid, sig)

    def waitpid(self) -> tuple[int | None, int | None]:
        for at, (pid, status, parent) in enumerate(self.mac.zombies):
            if parent == self.generation:
                del self.mac.zombies[at]
                return pid, status
        return None, None

    def nothing(self, *_: object) -> None:
        pass

    stat = check_execv_args = close_parent_pipes = close_child_pipes = nothing


OWN_CONF = "[program:controller]\ncommand=/bin/controller\npriority=1002\n"


class OwnCalls(rpc_plugin.Programs):
    """The product's own calls, but for the file that they read."""

    def __init__(self, running: Any) -> None:
        supervisor.events.clear()  # as supervisord does when it starts
        super().__init__(running, Path("/"))

    def _read(self, name: str) -> Any:
        options = self._supervisord.options
        text = options.mac.files.sections.get(f"{name}.conf")
        found = options.groups(text) if text is not None else [None]
        if text is not None and [each.name for each in found] != [name]:
            raise RPCError(Faults.CANT_REREAD, name)
        return found[0]


class Client(Supervisord):
    """The product's own client, short of the socket. Every call that changes something is written down."""

    def __init__(self, mac: Mac) -> None:
        super().__init__("/")
        self._mac = mac

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        if method == "system.multicall":
            return [self._one(each["methodName"], each["params"]) for each in arguments[0]]
        answer = self._one(method, arguments)
        if isinstance(answer, Mapping):
            raise Refused(answer["faultCode"], answer["faultString"])
        return answer

    def _one(self, method: str, arguments: Any) -> Any:
        mac, name = self._mac, method.rpartition(".")[2]
        mac.burn()
        if mac.rpc is None:
            raise Unavailable("it is down")
        if name not in ("reloadConfig", "reread", "getState", "changes"):
            mac.journal.append((name, *arguments))
            assert arguments[0] in OURS, f"touched {arguments[0]}\n{mac.story()}"
        mac.turn_soon()
        try:
            return getattr(mac.own_rpc if method.startswith("metal.") else mac.rpc, name)(*arguments)
        except RPCError as error:
            return {"faultCode": error.code, "faultString": error.text}

    def table(self) -> dict[str, ProgramState]:
        """The real one, made of changes; it has to be what `getAllProcessInfo` would tell, but for clocks set back."""
        mac = self._mac
        rows = list(super().table().values())
        told = {name: (STATES[process.state], process.pid) for name, process in mac.processes().items()}
        assert {row.name: (row.state, row.pid) for row in rows} == told, f"{rows} is not {told}"
        return {row.name: row for row in (reversed(rows) if mac.reverse else rows)}


STATES = {getattr(ProcessStates, state.value): state for state in State}


# ── the state directory ──────────────────────────────────────────────────────────────────────────


@dataclass
class File:
    """As much of a path as is used."""

    files: dict[str, Any]
    name: str

    def __lt__(self, other: File) -> bool:
        return self.name < other.name

    def __str__(self) -> str:
        return f"{HOME}/{self.name}"

    def exists(self) -> bool:
        return self.name in self.files

    def unlink(self, missing_ok: bool = False) -> None:
        self.files.pop(self.name, None)

    def replace(self, target: File) -> None:
        target.files[target.name] = self.files.pop(self.name)

    def read_text(self, _: str) -> str:
        if self.name not in self.files:
            raise FileNotFoundError(self.name)
        return str(self.files[self.name])


class Files:
    """The state directory in memory. It outlives everybody."""

    home = HOME

    def __init__(self, mac: Mac) -> None:
        self.mac = mac
        self.sections: dict[str, str] = {"mine.conf": FOREIGN_FILE}
        self.specs: dict[str, str] = {}
        self.kept: dict[str, Record] = {}
        self.notes: dict[str, dict[str, object]] = {}
        self.read_notes: dict[str, RunNote] = {}
        self.writes = 0

    @property
    def path(self) -> Files:
        return self

    def __truediv__(self, name: str) -> Any:
        if name == "runs":
            files: dict[str, Any] = {f"{program}.json": note for program, note in self.notes.items()}
            return SimpleNamespace(glob=lambda _: [File(files, each) for each in files])
        files = {"models.d": self.sections}[name]
        return SimpleNamespace(glob=lambda _: [File(files, each) for each in list(files)])

    def sections_on_file(self) -> dict[str, object]:
        return {name.removesuffix(".conf"): text for name, text in self.sections.items()}

    def specs_on_file(self) -> list[str]:
        return [name.removesuffix(".json") for name in self.specs]

    def remove_spec(self, program: str) -> None:
        self.specs.pop(f"{program}.json", None)

    def write_spec(self, made: Program) -> bool:
        return self.write_atomic(self.spec_path(made.name), made.spec)

    def write_atomic(self, file: File, text: str) -> bool:
        if file.files.get(file.name) == text:
            return False
        self.mac.burn()
        self.writes += 1
        file.files[file.name] = text
        return True

    def spec_of(self, program: str) -> dict[str, Any]:
        text = self.specs.get(f"{program}.json")
        return {} if text is None else loaded(text)

    def write_section(self, program: str, text: str) -> None:
        self.write_atomic(self.section_path(program), text)

    def remove_section(self, program: str) -> None:
        self.section_path(program).unlink(missing_ok=True)

    def section_path(self, program: str) -> File:
        return File(self.sections, f"{program}.conf")

    def note_path(self, program: str) -> str:
        return f"{HOME}/runs/{program}.json"

    def launched_path(self, program: str) -> str:
        return f"{HOME}/specs/{program}.json"

    def section_text(self, program: str) -> str:
        return self.sections.get(f"{program}.conf", "")

    def has_section(self, program: str) -> bool:
        return programs.is_section(self.section_text(program))

    def spec_path(self, program: str) -> File:
        return File(self.specs, f"{program}.json")

    def run_notes(self) -> dict[str, RunNote]:
        return dict(self.read_notes)

    def write_note(self, program: str, note: dict[str, object]) -> None:
        self.notes[program], self.read_notes[program] = note, programs.read_run(json.dumps(note))

    def observations(self) -> dict[str, Observed]:
        return self.mac.observations()

    def write_record(self, record: Record) -> bool:
        before = self.kept.get(record.program)
        if before is record or before == record:
            return False
        self.mac.burn()
        self.writes += 1
        self.kept[record.program] = record
        if record.withdraw and (before is None or before.withdraw != record.withdraw):
            self.mac.asked[record.program] = self.mac.clock.now
            self.mac.later(SIDECAR_S + 0.01, self.mac.wake)
        return True

    def remove_left_logs(self, programs_here: Any) -> None:
        """It has none."""

    def forget(self, program: str) -> None:
        for files in (self.kept, self.notes, self.read_notes):
            files.pop(program, None)
        self.sections.pop(f"{program}.conf", None)
        self.specs.pop(f"{program}.json", None)

    def refresh_link(self) -> None:
        pass


# ── the controller ───────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=256)
def composed(name: str, edition: int, release: int = 0) -> tuple[Service, Engine, Program]:
    """The InferenceService of that name in one of its editions, and what a release of this Mac's makes of it."""
    service = Service(
        "default",
        name,
        f"u-{name}",
        edition + 1,
        Model("default", name, "m", 1, "/m", "gguf", None, None),
        "llama-server",
        1,
        False,
        Endpoint(name, 8080, "/v1", "ClusterIP", None),
        "chat",
        "normal",
        None,
        {"contextSize": edition},
    )
    engine = Engine(("/bin/engine", str(edition), str(release)), (), "/", Probe())
    made = programs.compose(program(name), engine, PORTS[name], "::", HOME, service.asked, SIZES[edition])
    return service, engine, made


@lru_cache(maxsize=256)
def asked_for(name: str, edition: int, suspended: bool) -> Service:
    service = composed(name, edition)[0]
    return replace(service, suspended=suspended)


def program(name: str) -> str:
    return f"default.{name}"


OURS = frozenset(program(name) for name in NAMES)
PORTS = {name: 18100 + at for at, name in enumerate(NAMES)}
AT_PORT = {port: program(name) for name, port in PORTS.items()}
EDITION = {
    composed(name, edition, release)[2].edition: edition
    for name in NAMES
    for edition in range(EDITIONS)
    for release in range(RELEASES)
}
SETTINGS: Any = SimpleNamespace(
    limits=Limits(),
    confinement="off",
    uses_claims=False,
    log_size=20,
    log_files=3,
    drain_timeout=DRAIN_S,
    bind_address="::",
    ollama_url="off",
    memory_check_mode="enforce",
    preemption=False,
    eviction_enabled=False,
    parallel_starts=0,
    ollama_registry="",
)


class Lookout(prerequisites.Prerequisites):
    """What this Mac can do: everything, at once."""

    def __init__(self, mac: Mac) -> None:
        headers: Any = SimpleNamespace(forget_others=lambda: None)
        nobody: Any = SimpleNamespace()
        super().__init__(SETTINGS, mac.files, nobody, headers, nobody)  # type: ignore[arg-type]
        self._mac = mac

    def outlook(self, service: Service, record: Any, engines: Any, snapshot: Snapshot) -> Outlook:
        _, engine, made = composed(service.name, service.generation - 1, self._mac.release)
        self._keep_spec(made)
        up = plan.live_note(snapshot.notes.get(made.name), snapshot.table.get(made.name))
        ready, port = ModelFile("Ready", "/m"), PORTS[service.name]
        live = ("::", port) if up else None
        return Outlook(
            ready,
            port,
            engine,
            made,
            demand=self._mac.demand(service),
            live=live,
            live_edition=up.edition if up else "",
        )


class Purse(Memory):
    """The machine's memory: a budget, and nobody who watches for pressure."""

    def __init__(self, mac: Mac) -> None:
        self._settings, self._state = SETTINGS, mac.files
        self.ledger = Ledger(0, {})
        self._leaving, self._skipping, self._seen = frozenset(), "", MemoryState()
        self._reserved = {}
        self._exited_at = self._returned_at = None
        self.watchdog: Any = SimpleNamespace(
            level=lambda _: None,
            seen=MemoryState(),
            ask_about=lambda _: None,
            pace=Pace(),
            budget=Budget(mac.budget_bytes, mac.budget_bytes, "all of it", {}),
        )

    def ups(self, *world: Any) -> dict[Any, Up]:
        """The engines that are up, and what each holds: as looked up anew, or what its process was given before."""
        found = super().ups(*world)
        kept, self._reserved = self._reserved, {}
        anew = super().ups(*world)
        self._reserved = kept
        assert found.keys() == anew.keys()
        for key, each in anew.items():
            same = found[key].edition == each.edition and found[key].bytes >= each.bytes
            assert same, f"{found[key]} was kept, {each} is right"
        return found


class Asked(Assignment):
    """What a cluster asks for that answers at once, and has one Mac."""

    def __init__(self, mac: Mac, prerequisites: Any) -> None:
        self.mac, self._prerequisites = mac, prerequisites
        self._placement: Any = SimpleNamespace(peers_ready=lambda *_: 0)
        self._unsure_until = 0.0
        mine = {("default", name): (0,) for name in NAMES}
        self.placed: Any = SimpleNamespace(again_in_s=None, known=True, mine=mine)

    def propose(self, before: Mapping[Any, Record], snapshot: Snapshot) -> dict[Any, Record]:
        found, result, ports = self.mac.wanted, dict[Any, Record](), Ports(before.values())
        for name in reversed(found) if self.mac.reverse else found:
            item = asked_for(name, *found[name])
            ours = tuple(record for record in before.values() if record.name == name)
            self._share_out(item.key, item, ours, frozenset(), result, ports, snapshot)
        for record in before.values():
            if record.name not in found:
                result[record.key] = reconcile.unchanged(reconcile.dismiss(record, snapshot.now))
        return result


class Brain(Controller):
    """The controller, with a cluster, a store and a placement that answer at once. Its passes are the real ones."""

    def __init__(self, mac: Mac) -> None:
        self.mac, self.supervisord, self.settings = mac, Client(mac), SETTINGS
        self.state: Any = mac.files
        self.records = {record.key: record for record in mac.files.kept.values()}
        self.applier = Applier(self.state, self.supervisord, SETTINGS)
        self.prerequisites: Any = Lookout(mac)
        self.memory = Purse(mac)
        self.controller_status: Any = SimpleNamespace(quarantined=lambda *_: None, tell=lambda *_: None)
        self._trash: Any = SimpleNamespace(problem="", wake=lambda: None)
        self._problems = {}
        self.assignment: Any = Asked(mac, self.prerequisites)
        self.exits: Any = SimpleNamespace(watch_only=lambda _: None)
        self.awake: Any = SimpleNamespace(look=lambda *_: None)
        self._untold, self._unkept = False, ""

    def _observe(self) -> Snapshot:
        now, table = self.mac.clock.time(), self.supervisord.table()
        notes, seen = self.state.run_notes(), self.state.observations()
        return Snapshot(now, {}, True, {}, table, notes, seen, news=self.mac.release)

    def _publish(self, snapshot: Snapshot, steps: Any, done: Any) -> None:
        self.mac.done = len(done)


# ── all of it ────────────────────────────────────────────────────────────────────────────────────


class Killed(Exception):
    """The controller died in the middle of a pass."""


@dataclass
class Mac:
    """The whole machine. Time passes only in `run`."""

    reverse: bool = False
    """Records and tables are presented in the opposite order."""
    deaf: bool = False
    """No wake ever arrives: only the controller's own ticks are left."""
    clock: Clock = field(default_factory=Clock)
    wanted: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """What the cluster asks for: name -> (edition, suspended)."""
    budget_bytes: int = 10**9

    def __post_init__(self) -> None:
        CURRENT.append(self)
        del CURRENT[:-1]
        self.told: list[str] = []
        self.words: dict[str, str] = {}
        self.forks: Counter[str] = Counter()
        self.all: dict[int, Process] = {}
        self.hanging: list[Process] = []
        self.zombies: list[tuple[int, int, int]] = []
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.journal: list[tuple[Any, ...]] = []
        self.files = Files(self)
        self.asked: dict[str, float] = {}
        self.busy_until: dict[str, float] = {}
        self.sidecar_since: float | None = 0.0
        self.seen: dict[str, Observed] = {}
        self.fuse = 0
        self.release = 0
        """What this Mac composes: another one gives every engine another spec."""
        self.hands = 0
        """How many are at supervisorctl."""
        self.done, self.passes = 0, 0
        self.stop_by_hand: dict[str, bool] = {}
        """Services that somebody stopped and nobody asked for since; True if that must be honoured from now on."""
        self.stopped_asked: dict[str, str | None] = {}
        self._count, self._generation = 0, 0
        self._shown: dict[str, int] = {}
        self.turn_at = self.pass_at = math.inf
        self.supervisord: Any = None
        self.rpc: Any = None
        self.brain: Brain | None = None
        self.boot()
        self.start_controller()

    def story(self) -> str:
        return "\n".join(self.told[-60:])

    def tell(self, text: str) -> None:
        self.told.append(f"{self.clock.now:10.3f} {text}")

    # ── time ──

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self.agenda, (self.clock.now + seconds, self._count, what))

    def wake(self) -> None:
        if self.brain is not None and not self.deaf:
            self.pass_at = min(self.pass_at, self.clock.now + 0.004)

    def turn_soon(self) -> None:
        self.turn_at = min(self.turn_at, self.clock.now + 0.002)

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> None:
        """Lets time pass; less of it if `until` comes true after a pass."""
        end = self.clock.now + seconds
        while True:
            first = self.agenda[0][0] if self.agenda else math.inf
            at = min(first, self.turn_at, self.pass_at)
            if at > end:
                self.clock.now = end
                return
            self.clock.now = max(self.clock.now, at)
            if first <= self.clock.now:
                heapq.heappop(self.agenda)[2]()
                continue
            if self.turn_at <= self.clock.now:
                self.turn()
                continue
            self.one_pass()
            if until is not None and until():
                return

    # ── processes ──

    def fork(self, name: str, command: str, parent: int) -> int:
        self._count += 1
        pid = 1000 + self._count
        spec = command.rpartition("/specs/")[2] if name in OURS else ""  # its file; the launcher reads the edition
        self.forks[name] += 1
        self.all[pid] = process = Process(pid, name, spec, self.clock.now, parent)
        self.tell(f"fork {name} pid {pid}")
        assert not self.stop_by_hand.get(name), f"{name} was stopped by hand\n{self.story()}"
        if spec:
            self.later(LAUNCH_S, partial(self._launch, process))
        return pid

    def _launch(self, process: Process) -> None:
        """The launcher's own code, up to its exec."""
        if not process.alive:
            return
        RUNNING.append((self, process))
        try:
            code = launch.main(f"{HOME}/specs/{process.spec}")
        except Gone:
            pass
        else:
            self.exit(process, code << 8)
        finally:
            RUNNING.pop()

    def execs(self, process: Process) -> None:
        others = [each.pid for each in self.engines(process.program)]
        assert not others, f"{process.program}: pid {process.pid} beside {others}\n{self.story()}"
        process.engine = True
        process.spec = self.files.read_notes[process.program].edition
        edition = EDITION[process.spec]
        held = sum(SIZES[EDITION[each.spec]] for each in self.all.values() if each.engine and each.alive)
        assert held <= self.budget_bytes, f"{held} bytes are held\n{self.story()}"
        if edition == FAILS:
            self.later(0.1, partial(self.exit, process, 1 << 8))
        elif edition == CRASHES_LATER:
            self.later(5.0, partial(self.exit, process, signal.SIGSEGV))

    def demand(self, service: Service) -> Demand:
        """What an engine takes of the memory."""
        return Demand(SIZES[service.generation - 1])

    def stands_in(self, process: Process, pid: int) -> None:
        process.stands_for = pid
        self.tell(f"pid {process.pid} stands in for {pid}")

    def engines(self, name: str) -> list[Process]:
        return [each for each in self.all.values() if each.engine and each.alive and each.program == name]

    def exit(self, process: Process, status: int) -> None:
        if not process.alive:
            return
        process.alive = False
        self.tell(f"{process.program} pid {process.pid} ends with {status}")
        if process.parent == self._generation and self.rpc is not None:
            self.zombies.append((process.pid, status, process.parent))
            # The exit watch of the controller pokes supervisord; without it, supervisord finds out by itself.
            self.turn_at = min(self.turn_at, self.clock.now + (0.002 if self.brain and not self.deaf else 1.0))
            self.wake()
        for each in list(self.all.values()):
            if each.stands_for == process.pid and each.alive:
                self.later(0.002, partial(self.exit, each, 0))

    def kill(self, pid: int, sig: int) -> None:
        process = self.all[pid]
        if not process.alive:
            return
        self.tell(f"{signal.Signals(sig).name} for {process.program} pid {pid}")
        assert process.program in OURS, f"a signal for {process.program}\n{self.story()}"
        if sig == signal.SIGKILL:
            self.exit(process, sig)
        elif self.clock.now - process.born < DEAF_S:
            self.tell("... which is lost")
        elif process.stands_for:
            engine = self.all[process.stands_for]
            self.kill(engine.pid, sig)
            self.later(launch.STAND_IN_KILL_AFTER_S, partial(self.kill, engine.pid, signal.SIGKILL))
        elif not process.engine:
            self.exit(process, sig)
        elif EDITION[process.spec] != NEVER_STOPS:
            # Told once, it waits for those whom it still answers, as llama-server does; told again, it does not.
            again, process.asked_to_end = process.asked_to_end, True
            left_s = 0.0 if again else self.busy_until.get(process.program, 0.0) - self.clock.now
            ends_s = 3.0 if EDITION[process.spec] == STOPS_SLOWLY else 0.02
            self.later(max(ends_s, left_s), partial(self.exit, process, sig))

    # ── supervisord ──

    def boot(self) -> None:
        """A supervisord starts after boot's own sweep of what its predecessor left."""
        leftovers.sweep(self.files, self.tell)  # type: ignore[arg-type]
        self._generation += 1
        self.booted_at = self.clock.now
        options = Options(self, self._generation)
        self.supervisord = supervisor.supervisord.Supervisor(options)
        self.supervisord.process_groups = {}
        options.process_config()
        for config in options.process_group_configs:
            self.supervisord.add_process_group(config)
        self.rpc, self.own_rpc = SupervisorNamespaceRPCInterface(self.supervisord), OwnCalls(self.supervisord)
        self.turn_soon()

    def processes(self) -> dict[str, Any]:
        """supervisord's process of each group."""
        return {name: group.processes[name] for name, group in self.supervisord.process_groups.items()}

    def state(self, name: str) -> State | None:
        found = self.processes().get(name) if self.rpc is not None else None
        return None if found is None else STATES[found.state]

    def took_up(self, name: str) -> bool:
        """Whether supervisord holds a program as its section on file says."""
        (values,) = [values for group, values in parsed(self.files.section_text(name)) if group == name]
        config = self.processes()[name].config
        return all(getattr(config, option) == value for option, value in values.items())

    def turn(self) -> None:
        """One turn of supervisord's loop."""
        self.turn_at = math.inf
        if self.rpc is None:
            return
        for group in list(self.supervisord.process_groups.values()):
            group.transition()
        self.supervisord.reap()
        states = {name: each.state for name, each in self.processes().items()}
        if states != self._shown:  # the sidecar looks every second
            self._shown = states
            self.later(NOTICE_S, self._noticed)
        moving = (ProcessStates.STARTING, ProcessStates.BACKOFF, ProcessStates.STOPPING, ProcessStates.EXITED)
        if any(each in moving for each in states.values()):
            self.turn_at = self.clock.now + 1.0

    def kill_supervisord(self) -> None:
        self.tell("kill -9 supervisord")
        for name in list(self.stop_by_hand):
            if self.state(name) is not State.STOPPED or "autostart=false" not in self.files.section_text(name):
                self.stop_by_hand[name] = False  # it may not have been carried out, or not been noticed to last yet
        self.rpc, self.zombies = None, []
        self.kill_controller()

    # ── the controller and the sidecar ──

    def start_controller(self) -> None:
        if self.brain is None and self.rpc is not None:
            self.brain, self.pass_at = Brain(self), self.clock.now

    def kill_controller(self) -> None:
        self.brain, self.pass_at = None, math.inf

    def burn(self) -> None:
        """The controller's next act; it may be its last."""
        if self.fuse:
            self.fuse -= 1
            if not self.fuse:
                raise Killed

    def one_pass(self) -> None:
        assert self.brain is not None
        self.passes += 1
        try:
            pause_s = self.brain.one_pass()
        except Unavailable:
            pause_s = loop.RETRY_S
        except Killed:
            self.tell("the controller dies in the middle of a pass")
            self.kill_controller()
            self.later(1.0, self.start_controller)
            return
        self.pass_at = self.clock.now + pause_s
        for name, asked in self.stopped_asked.items():
            record = self.files.kept.get(name)
            if record is None or record.asked != asked:
                self.stop_by_hand.pop(name, None)

    def _noticed(self) -> None:
        """The sidecar writes down what has changed, and rings."""
        if self.sidecar_since is not None:
            self.wake()

    def observations(self) -> dict[str, Observed]:
        """What the sidecar has written last of those whose endpoint is to go."""
        if self.sidecar_since is None:
            return self.seen
        self.seen = {}
        for name, record in self.files.kept.items():
            if not record.withdraw:
                continue
            out = self.clock.now - max(self.asked[name], self.sidecar_since) >= SIDECAR_S
            busy = self.busy(name)
            token = record.withdraw if out else ""
            self.seen[name] = Observed(
                name, 1, True, 0.0, "", withdrawn=token, busy=busy, drained="" if busy else token
            )
        for process in self.hanging:
            if process.alive and self.clock.now - max(process.hangs_since, self.sidecar_since) >= HUNG_S:
                before = self.seen.get(process.program, Observed(process.program, 1, False, 0.0, ""))
                self.seen[process.program] = replace(before, pid=process.pid, busy=False, hung="it does not answer")
        return self.seen

    def busy(self, name: str) -> bool:
        """Whether an engine answers somebody; one that hangs does not even say so in time."""
        engines = self.engines(name)
        hangs = any(each.hangs_since < math.inf for each in engines)
        return bool(engines) and (hangs or self.clock.now < self.busy_until.get(name, 0.0))

    def hang(self, process: Process) -> None:
        process.hangs_since = min(process.hangs_since, self.clock.now)
        self.hanging.append(process)
        self.later(HUNG_S + 0.01, self._noticed)

    # ── people ──

    def by_hand(self, what: Iterator[float], pace_s: float) -> None:
        """Somebody at supervisorctl, whose commands wait for their outcome."""
        self.hands += 1
        self._types(what, pace_s)

    def _types(self, what: Iterator[float], pace_s: float) -> None:
        wait_s = self.booted_at + HANDS_S - self.clock.now
        if 0 < wait_s <= HANDS_S:
            self.later(wait_s, partial(self._types, what, pace_s))
            return
        with contextlib.suppress(StopIteration, RPCError):
            if self.rpc is not None:
                pause_s = next(what) or pace_s
                self.turn_soon()
                self.later(pause_s, partial(self._types, what, pace_s))
                return
        self.hands -= 1

    def ctl(self, method: str, name: str) -> Iterator[float]:
        """One command of supervisorctl; a fault is printed, and that is all."""
        if method.startswith("stop") and name in OURS and self.state(name) in RUNS:
            note, record = self.files.read_notes.get(name), self.files.kept.get(name)
            wanted = self.wanted.get(record.name, (0, True)) if record else (0, True)
            clean = (
                note is not None
                and record is not None
                and not record.withdraw
                and self.state(name) is State.RUNNING
                and not wanted[1]
                and note.edition == record.edition
                and EDITION[note.edition] == wanted[0]
            )
            if method == "stopProcess":
                self.stop_by_hand[name] = clean
                self.stopped_asked[name] = record.asked if record else None
        elif method.startswith("start") and self.state(name) is not State.STOPPING:
            self.stop_by_hand.pop(name, None)
        try:
            answer = getattr(self.rpc, method)(name)
            while callable(answer) and answer() is NOT_DONE_YET:
                yield 0.1
        except RPCError:
            pass

    def restart(self, name: str) -> Iterator[float]:
        yield from self.ctl("stopProcess", name)
        yield NEXT
        yield from self.ctl("startProcess", name)

    def remove(self, name: str) -> Iterator[float]:
        yield from self.ctl("stopProcess", name)
        self._may_be_missed(name)
        yield NEXT
        yield from self.ctl("removeProcessGroup", name)

    def _may_be_missed(self, name: str) -> None:
        """A stop whose program is gone before anybody saw that it was stopped."""
        if name in self.stop_by_hand:
            self.stop_by_hand[name] = False

    def update(self) -> Iterator[float]:
        added, changed, removed = self.rpc.reloadConfig()[0]
        yield NEXT
        for name in [*removed, *changed]:
            yield from self.ctl("stopProcessGroup", name)
            self._may_be_missed(name)
            yield NEXT
            yield from self.ctl("removeProcessGroup", name)
            if name in changed:
                yield from self.ctl("addProcessGroup", name)
            yield NEXT
        for name in added:
            yield from self.ctl("addProcessGroup", name)
            yield NEXT


RUNS = (State.STARTING, State.RUNNING, State.BACKOFF)
NEXT = 0.0
"""What a command of supervisorctl yields between two calls, rather than seconds."""
CURRENT: list[Mac] = []
RUNNING: list[tuple[Mac, Process]] = []
"""The launcher whose code runs right now."""


@lru_cache(maxsize=512)
def loaded(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


def program_of(note_path: str) -> str:
    return os.path.basename(note_path).removesuffix(".json")


def replaced_quickly(value: Any, **changes: Any) -> Any:
    """`dataclasses.replace` in a tenth of its time, which is a third of a history's."""
    result = object.__new__(type(value))
    result.__dict__.update(value.__dict__, **changes)
    for name in DERIVED if isinstance(value, Record) else ():
        result.__dict__.pop(name, None)
    return result


def installed(patch: pytest.MonkeyPatch) -> None:
    """Puts the machine under the modules that look at the real one."""

    def wall() -> float:
        return CURRENT[-1].clock.time()

    def ticks() -> float:
        return CURRENT[-1].clock.now

    clock = SimpleNamespace(time=wall, monotonic=ticks)
    for module in (supervisor.process, supervisor.rpcinterface, applier, client, loop, launch):
        patch.setattr(module, "time", clock)
    patch.setattr(supervisor.process, "shlex", SimpleNamespace(split=lru_cache(shlex.split)))

    patch.setattr(loop, "ring", lambda *_: None)
    for module in (loop, reconcile, applier):
        patch.setattr(module, "replace", replaced_quickly)

    def start_time(pid: int) -> str:
        process = CURRENT[-1].all.get(pid)
        return f"born {process.born}" if process and process.alive else ""

    def kill(pid: int, sig: int) -> None:
        CURRENT[-1].kill(pid, sig)

    def command_line(pid: int) -> list[str]:
        process = CURRENT[-1].all.get(pid)
        return ["python", "/launch.py"] if process and process.alive and not process.engine else []

    def end_all(doomed: list[tuple[str, int, str]]) -> None:
        for _, pid, _ in doomed:
            CURRENT[-1].exit(CURRENT[-1].all[pid], signal.SIGKILL)

    def put(file: File, text: str) -> bool:
        file.files[file.name] = text
        return True

    patch.setattr(leftovers, "write_atomic", put)
    patch.setattr(own_processes, "end_all", end_all)
    patch.setattr(leftovers, "_note_unknown", lambda _: [])  # no note is ever lost here
    patch.setattr(own_processes, "live", lambda _: [])
    patch.setattr(leftovers, "processes", SimpleNamespace(command_line=command_line, keeper_of=lambda *_: ""))
    patch.setattr(leftovers, "os", SimpleNamespace(kill=kill))
    patch.setattr(applier, "ADD_AT_ONCE", 2)
    patch.setattr(probing, "busy", lambda port, *_: CURRENT[-1].busy(AT_PORT[port]))
    for name in ("section", "is_unedited"):  # the same few texts, again and again
        patch.setattr(programs, name, lru_cache(maxsize=4096)(getattr(programs, name)))

    def replaced(*_: object) -> None:
        mac, process = RUNNING[-1]
        mac.execs(process)
        raise Gone

    def waits(pid: int, _: str) -> None:
        mac, process = RUNNING[-1]
        mac.stands_in(process, pid)
        raise Gone

    def read_spec(path: str) -> dict[str, object]:
        text = RUNNING[-1][0].files.specs.get(os.path.basename(path))
        if text is None:
            raise launch.BadSpec("no such spec")
        return loaded(text)

    own = SimpleNamespace(
        getpid=lambda: RUNNING[-1][1].pid,
        getsid=lambda _: 0,
        chdir=lambda _: None,
        execve=replaced,
        path=os.path,
        environ={},
    )
    patch.setattr(launch, "os", own)
    patch.setattr(launch, "start_time", start_time)
    patch.setattr(launch, "read_spec", read_spec)
    patch.setattr(launch, "read_note", lambda path: CURRENT[-1].files.notes.get(program_of(path), {}))
    patch.setattr(launch, "write_note", lambda path, note: CURRENT[-1].files.write_note(program_of(path), note))
    patch.setattr(launch, "confinement", lambda *_: lambda: None)
    patch.setattr(launch, "identity", lambda _: [1, 1])  # of the one state directory
    patch.setattr(launch, "bar", lambda _: "")
    patch.setattr(launch, "enter", lambda *_: None)  # the file system is not part of this
    patch.setattr(launch, "sweep_group", lambda *_: [])
    patch.setattr(launch, "kill_engine", lambda pid, _: kill(pid, signal.SIGKILL))
    patch.setattr(launch, "last_words", lambda log, name: RUNNING[-1][0].words.get(name, ""))
    patch.setattr(launch, "holder_of", lambda *_: None)  # there are never two even without that guard
    patch.setattr(launch, "represent", lambda *_: None)
    patch.setattr(launch, "wait_for_exit", waits)
    patch.setattr(launch, "say", lambda _: None)
