"""What measures power, with real children behind real pipes, and a real sudo where one is to be had."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from powermetrics_sudo import sudoers

from metal_supervisor.host import power_meter as boundary
from metal_supervisor.host import power_program
from metal_supervisor.host.commands import Done
from metal_supervisor.host.power_meter import (
    COMMAND,
    POWERMETRICS,
    NoMeter,
    PowerError,
    Powermetrics,
    open_meter,
)
from metal_supervisor.sidecar.board import Board, status
from metal_supervisor.sidecar.http.metrics import Exposition
from metal_supervisor.sidecar.power import NOTHING_YET, PowerFile, PowerReading, read, shown_power
from metal_supervisor.state.doorbell import Doorbell
from metal_supervisor.state.home import POWER_FILE
from tests.support.power import WATTS, pids, printing
from tests.support.sudo import Room, visudo
from tests.support.system import ROOT, eventually


@pytest.fixture
def bell(tmp_path: Path) -> Doorbell:
    return Doorbell(tmp_path, "power")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# ── one run of powermetrics ──────────────────────────────────────────────────────────────────────


def test_it_is_read_as_it_prints_and_ends_when_it_is_closed(tmp_path: Path, bell: Doorbell) -> None:
    meter = Powermetrics(printing(tmp_path))
    assert [meter.next(bell) for _ in range(3)] == [WATTS] * 3
    meter.close()
    assert meter.left() == "" and gone(*pids(tmp_path)) and meter.unreadable == 0


def test_a_ring_ends_the_wait_before_it_and_in_it(tmp_path: Path, bell: Doorbell) -> None:
    meter = Powermetrics(printing(tmp_path, "time.sleep(60)"))
    assert meter.next(bell) == WATTS
    bell.ring()
    assert meter.next(bell) is None
    threading.Timer(0.05, bell.ring).start()
    assert meter.next(bell) is None
    meter.close()


def test_one_that_ends_says_how_and_its_last_words_harmlessly(tmp_path: Path, bell: Doorbell) -> None:
    last = "sys.stderr.write('first\\n\\x1b[2Jsudo: a password is required\\n'); sys.exit(1)"
    meter = Powermetrics(printing(tmp_path, last))
    assert meter.next(bell) == WATTS
    with pytest.raises(PowerError) as caught:
        meter.next(bell)
    assert str(caught.value) == "powermetrics ended with exit code 1: [2Jsudo: a password is required"
    meter.close()


@pytest.mark.parametrize(
    ("end", "said"),
    [("os.kill(os.getpid(), 9)", "was killed: it said nothing"), ("", "ended with exit code 0: it said nothing")],
)
def test_one_that_is_killed_or_just_ends_says_so(tmp_path: Path, bell: Doorbell, end: str, said: str) -> None:
    meter = Powermetrics(printing(tmp_path, end or "pass"))
    assert meter.next(bell) == WATTS
    with pytest.raises(PowerError, match=f"powermetrics {said}"):
        meter.next(bell)
    meter.close()


@pytest.mark.parametrize("noise", ["", "while True: out.write(b'<plist></plist>'); out.flush(); time.sleep(0.01)"])
def test_one_that_is_silent_or_babbles_counts_as_hung(tmp_path: Path, bell: Doorbell, noise: str) -> None:
    meter = Powermetrics(printing(tmp_path, noise or "time.sleep(60)"), silent_s=0.2)
    eventually(lambda: meter.next(bell) == WATTS)
    with pytest.raises(PowerError, match=r"has given no reading for 0\.2 s"):
        meter.next(bell)
    assert bool(meter.unreadable) is bool(noise)
    meter.close()
    assert gone(*pids(tmp_path))


def test_warnings_of_its_own_neither_fill_a_pipe_nor_spoil_a_sample(tmp_path: Path, bell: Doorbell) -> None:
    loud = "for n in range(50):\n    os.write(2, b'x' * 65536)\n    out.write(b'\\0' + data); out.flush()\n"
    meter = Powermetrics(printing(tmp_path, loud + "time.sleep(60)"))
    assert meter.next(bell) == WATTS
    eventually(lambda: meter.next(bell) == WATTS and len(meter._said) == boundary.ERROR_BYTES)
    assert meter.unreadable == 0
    meter.close()


def test_one_that_heeds_no_term_is_killed(tmp_path: Path, bell: Doorbell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "END_WAIT_S", 0.3)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nout.write(b'\\0' + data); out.flush()\ntime.sleep(60)"
    meter = Powermetrics(printing(tmp_path, deaf))
    assert meter.next(bell) == WATTS
    meter.close()
    assert meter.left() == "" and gone(*pids(tmp_path))


def test_a_command_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(PowerError, match="nowhere/sudo: No such file"):
        Powermetrics([str(tmp_path / "nowhere/sudo")])


# ── its leave ──────────────────────────────────────────────────────────────────────────────


def test_sudo_is_asked_for_just_what_would_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def runner(argv: Any, _timeout_s: float) -> Done:
        asked.append(tuple(argv))
        return Done(0, "", "")

    monkeypatch.setattr(boundary, "Powermetrics", lambda: Powermetrics(["/bin/true"]))
    meter = open_meter(runner)
    meter.close()
    assert asked == [("/usr/bin/sudo", "-n", "-l", *POWERMETRICS)] and asked[0] == (*COMMAND[:2], "-l", *COMMAND[2:])


def test_without_sudos_leave_it_says_what_to_do() -> None:
    def refuses(_argv: Any, _timeout_s: float) -> Done:
        return Done(1, "", "sudo: a password is required")

    with pytest.raises(NoMeter, match="make install-powermetrics-sudo"):
        open_meter(refuses)


def test_a_rule_that_wants_a_password_after_all_is_told_as_sudo_did(bell: Doorbell) -> None:
    meter = Powermetrics(["/bin/sh", "-c", "echo sudo: a password is required >&2; exit 1"])
    with pytest.raises(PowerError, match="exit code 1: sudo: a password is required"):
        meter.next(bell)
    meter.close()


# ── the program ──────────────────────────────────────────────────────────────────────────────────


class Running:
    """The program in a thread."""

    def __init__(self, state: Path, opened: Callable[[], Powermetrics], first_pause_s: float = 0.01) -> None:
        self.path, self._stopped = state / POWER_FILE, threading.Event()
        self.program = power_program.PowerProgram(state, opened, first_pause_s)
        self._thread = threading.Thread(target=self.program.run, args=(self._stopped.is_set,))
        self._thread.start()

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found

    def stop(self) -> None:
        self._stopped.set()
        self.program.wake()
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(opened: Callable[[], Powermetrics], first_pause_s: float = 0.01) -> Running:
        started.append(Running(tmp_path, opened, first_pause_s))
        return started[-1]

    yield begin
    for each in started:
        each.stop()


def test_the_file_says_what_was_measured_when_and_goes_with_the_program(
    tmp_path: Path, start: Callable[..., Running]
) -> None:
    before_s = time.monotonic()
    running = start(lambda: Powermetrics(printing(tmp_path)))
    told = eventually(running.told, what="a reading")
    assert told == {
        "format": 1, "at": told["at"], "monotonic_s": told["monotonic_s"], "source": "powermetrics", "every_s": 5,
        "watts": {"combined": 0.122, "gpu": 0.019, "cpu": 0.103, "ane": 0.0},
    }  # fmt: skip
    assert before_s <= told["monotonic_s"] <= time.monotonic() and told["at"] == pytest.approx(time.time(), abs=60)
    assert running.path.stat().st_mode & 0o777 == 0o600
    running.stop()
    assert not running.path.exists() and gone(*pids(tmp_path))


def test_a_failure_is_told_once_and_tried_again_until_it_works(
    tmp_path: Path, start: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[float] = []
    may = threading.Event()

    def opened() -> Powermetrics:
        attempts.append(time.monotonic())
        return Powermetrics(printing(tmp_path) if may.is_set() else [sys.executable, "-c", "raise SystemExit(3)"])

    why = "powermetrics ended with exit code 3: it said nothing"
    with caplog.at_level("INFO", "power"):
        running = start(opened)
        eventually(lambda: len(attempts) >= 4, what="more attempts")
        may.set()
        eventually(lambda: "watts" in running.told(), what="it to work")
        running.stop()
    pauses = [b - a for a, b in itertools.pairwise(attempts)]
    assert all(pause >= 0.01 * 2**n for n, pause in enumerate(pauses))
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO"]
    assert vars(caplog.records[0])["why"] == why


def test_pauses_double_to_five_minutes_and_a_steady_minute_makes_them_short_again(tmp_path: Path) -> None:
    program = power_program.PowerProgram(tmp_path)
    pauses = [program._next_pause_s(PowerError("x")) for _ in range(8)]
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300]
    assert program._next_pause_s(NoMeter("x")) == power_program.LOOK_AGAIN_S == 300


class Scripted(Powermetrics):
    """Gives so many readings and ends; nothing is left of it once that is allowed."""

    def __init__(self, readings: int = 0, ended: threading.Event | None = None) -> None:
        self._readings, self._ended = readings, ended

    @property
    def unreadable(self) -> int:
        return 0

    def next(self, bell: Doorbell) -> dict[str, float] | None:
        if not self._readings:
            raise PowerError("it is silent")
        self._readings -= 1
        return WATTS

    def close(self) -> None:
        """Ended or not."""

    def left(self) -> str:
        return "" if self._ended is None or self._ended.is_set() else "an earlier one does not end"


@pytest.mark.parametrize("steady", [True, False])
def test_only_what_measured_steadily_is_tried_again_soon_after_it_ends(
    start: Callable[..., Running], steady: bool
) -> None:
    attempts: list[int] = []

    def opened() -> Powermetrics:
        attempts.append(1)
        if len(attempts) < 5:
            raise PowerError("not yet")
        return Scripted(power_program.STEADY - (not steady))

    running = start(opened)
    eventually(lambda: len(attempts) >= 6, 20, "more attempts")
    assert (running.program._pause_s <= 0.02) is steady, "it doubles, from 0.01 s"


def test_nothing_that_measures_is_said_in_the_file(tmp_path: Path, start: Callable[..., Running]) -> None:
    def opened() -> Powermetrics:
        raise NoMeter("nobody may")

    running = start(opened)
    told = eventually(running.told, what="the problem to be told")
    assert told["problem"] == "nobody may" and "watts" not in told


def test_none_is_started_beside_one_that_does_not_end(tmp_path: Path, start: Callable[..., Running]) -> None:
    stays = threading.Event()
    opened_: list[int] = []

    def opened() -> Powermetrics:
        opened_.append(1)
        return Scripted(ended=stays)

    running = start(opened)
    eventually(lambda: running.told()["problem"] == "an earlier one does not end", what="that to be told")
    assert len(opened_) == 1
    stays.set()
    eventually(lambda: len(opened_) > 1, what="another attempt")


def test_a_killed_program_leaves_no_powermetrics_behind(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from metal_supervisor.host import power_program as power\n"
        "from metal_supervisor.host.power_meter import Powermetrics\n"
        "argv = sys.argv[2:]\n"
        "power.PowerProgram(Path(sys.argv[1]), lambda: Powermetrics(argv)).run(lambda: False)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *printing(tmp_path)], cwd=ROOT) as program:
        eventually((tmp_path / POWER_FILE).exists, what="a reading")
        (child,) = pids(tmp_path)
        program.kill()
    eventually(lambda: gone(child), what="it to meet the closed pipe")
    assert (tmp_path / POWER_FILE).exists(), "a killed program cleans nothing up; its figures age"
    begun = Running(tmp_path, lambda: Powermetrics(printing(tmp_path, "time.sleep(60)")))
    begun.stop()
    assert not (tmp_path / POWER_FILE).exists()


# ── what the sidecar makes of the file ───────────────────────────────────────────────────────────


def text(age_s: float = 0.0, **content: Any) -> str:
    written = {"format": 1, "at": 1.0, "monotonic_s": time.monotonic() - age_s, "source": "powermetrics", "every_s": 5}
    return json.dumps({**written, "watts": {"combined": 12.5, "gpu": 10}, **content})


def gauges(reading: PowerReading | None) -> dict[str, float]:
    body = Exposition().render(Board(power=reading))[0].decode()
    prefix = "llmkube_metal_agent_apple_power_"
    lines = [line.removeprefix(prefix).split() for line in body.splitlines() if line.startswith(prefix)]
    return {name: float(value) for name, value in lines}


def test_fresh_figures_are_gauges_and_domains_that_are_not_known_are_absent() -> None:
    assert gauges(read(text())) == {"combined_watts": 12.5, "gpu_watts": 10.0}
    everything = read(text(watts={"combined": 4, "gpu": 3, "cpu": 2, "ane": 0, "dram": 7}))
    assert set(gauges(everything)) == {f"{name}_watts" for name in ("combined", "gpu", "cpu", "ane")}


@pytest.mark.parametrize(("age_s", "there"), [(0, True), (10, True), (16, False), (-3600, False), (1e9, False)])
def test_old_figures_are_gone_by_a_clock_that_cannot_be_set(age_s: float, there: bool) -> None:
    reading = read(text(age_s, at=time.time() - 86_400))
    assert bool(gauges(reading)) is there
    told = status(Board(power=reading))["power"]
    assert bool(told["watts"]) is there and bool(told["problem"]) is not there


def test_without_the_setting_there_is_no_gauge_and_no_word() -> None:
    assert gauges(None) == {} and status(Board())["power"] is None
    assert shown_power(read(text(problem="x", watts={}))) == {
        "source": "powermetrics", "problem": "x", "at": 1.0, "watts": {}
    }  # fmt: skip


@pytest.mark.parametrize(
    "bad",
    ["", "{", "[]", "3", "null", '{"format": 2}', '{"format": 1, "watts": 3}', '{"format": 1, "watts": {"gpu": "x"}}',
     '{"format": 1, "watts": {"gpu": -1}}', '{"format": 1, "every_s": NaN}', '{"format": 1, "watts": {"gpu": 1e999}}',
     '{"format": 1, "watts": null}', '{"format": 1, "at": [1]}', "[" * 100_000],
)  # fmt: skip
def test_a_file_of_another_version_or_of_none_is_a_problem(bad: str) -> None:
    reading = read(bad)
    assert "cannot be read" in reading.problem and gauges(reading) == {}


def test_the_file_is_read_when_it_was_replaced_and_forgotten_when_it_is_gone(tmp_path: Path) -> None:
    kept = PowerFile(tmp_path, True)
    kept.look()
    assert kept.reading is not None and kept.reading.problem == NOTHING_YET
    path = tmp_path / POWER_FILE
    path.write_text(text())
    kept.look()
    first = kept.reading
    kept.look()
    assert gauges(first) and kept.reading is first
    (tmp_path / "new").write_text(text(watts={"gpu": 1}))
    (tmp_path / "new").replace(path)
    kept.look()
    assert gauges(kept.reading) == {"gpu_watts": 1.0}
    path.unlink()
    kept.look()
    assert gauges(kept.reading) == {}
    assert PowerFile(tmp_path, False).reading is None


# ── sudo's rule ──────────────────────────────────────────────────────────────────────────────────


def test_the_template_is_what_is_rendered() -> None:
    template = (ROOT / "launchd" / "metal-supervisor-power.sudoers").read_text()
    assert template.replace("@USER@", "mac.user") == sudoers("mac.user")


@pytest.mark.parametrize(
    "name",
    ["", "ALL", "a b", "a,b", "a=b", "%admin", "#0", "+group", "a\nb ALL=(ALL) ALL", "a\n", "1st", "-a", ".a", "a\\",
     "ünal", "a!", "a:b", "@USER@", "a*"],
)  # fmt: skip
def test_a_user_name_that_could_say_more_than_a_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no user name"):
        sudoers(name)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    found = Room(tmp_path_factory.mktemp("room") / "root", sudoers("mac.user"))
    found.powermetrics("exec sleep 60")
    return found


def test_a_real_sudo_allows_the_very_command_line_to_that_user(room: Room) -> None:
    checked = room.run("root", "/usr/sbin/visudo", "-cf", "/etc/sudoers")
    assert checked.returncode == 0, checked
    assert room.allows("mac.user", *POWERMETRICS)
    assert not room.allows("other", *POWERMETRICS)


@pytest.mark.parametrize(
    "argv",
    [
        (*POWERMETRICS, "-o", "/etc/x"),
        (*POWERMETRICS, "--output-file=/etc/x"),
        (*POWERMETRICS, "-u", "/etc/x"),
        (*POWERMETRICS, ""),
        (*POWERMETRICS[:-1], "1000"),
        (*POWERMETRICS[:-1], "5000 -o /etc/x"),
        (*POWERMETRICS[:-1], "50000"),
        POWERMETRICS[:-1],
        POWERMETRICS[:-2],
        POWERMETRICS[:1],
        tuple(word.replace("cpu_power,gpu_power,thermal", "all") for word in POWERMETRICS),
        tuple(word.replace(",thermal", "") for word in POWERMETRICS),
        tuple(word.replace("plist", "text") for word in POWERMETRICS),
        ("/bin/sh", *POWERMETRICS[1:]),
        ("/bin/sh",),
    ],
)
def test_a_real_sudo_denies_any_other(room: Room, argv: tuple[str, ...]) -> None:
    assert not room.allows("mac.user", *argv)
    assert room.run("mac.user", "/usr/bin/sudo", "-n", *argv).returncode == 1


def test_a_wildcard_for_the_interval_would_let_it_write_any_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Why every argument is literal, and proof that the denials above could fail."""
    rules = sudoers("mac.user").replace("-i 5000", "-i [0-9]*")
    loose = Room(tmp_path_factory.mktemp("loose") / "root", rules)
    loose.powermetrics("exec sleep 60")
    assert loose.allows("mac.user", *POWERMETRICS, "-o", "/etc/x")


def test_a_real_sudo_runs_it_as_root_and_its_user_can_end_it(room: Room, tmp_path: Path, bell: Doorbell) -> None:
    room.powermetrics("echo ready >&2; exec sleep 60")
    meter = Powermetrics(room.command("mac.user", *COMMAND))
    reader = threading.Thread(target=meter.next, args=(bell,))
    reader.start()
    eventually(lambda: b"ready" in meter._said, what="sudo to run it")
    bell.ring()
    reader.join(30)
    (child,) = psutil.Process(meter._child.pid).children()
    assert child.uids().real == 0 and child.cmdline() == ["sleep", "60"]
    if os.getuid() == 0:  # as the user, who is another one here
        ended = ["setpriv", "--reuid=1000", "--clear-groups", "kill", "-TERM", str(meter._child.pid)]
        assert subprocess.run(ended).returncode == 0
    eventually(lambda: gone(child.pid), what="sudo to pass the signal on")
    meter.close()


# ── the tool that installs the rule ──────────────────────────────────────────────────────────────


def tool(*arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "SUDO_USER"}
    command = [sys.executable, str(ROOT / "tools" / "powermetrics_sudo.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**environment, "PATH": path})


def test_it_installs_what_visudo_has_read_says_so_and_takes_it_away_again(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    path = f"{visudo(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}"
    root = tmp_path / "root"
    for _ in range(2):
        done = tool("install", "--user", "mac.user", "--root", str(root), path=path)
        assert done.returncode == 0, done.stderr
        assert sudoers("mac.user") in done.stdout and "make uninstall-powermetrics-sudo" in done.stdout
    (made,) = [each for each in root.rglob("*") if each.is_file()]
    assert made == root / "etc/sudoers.d/metal-supervisor-power" and made.read_text() == sudoers("mac.user")
    assert made.stat().st_mode & 0o777 == 0o440
    assert tool("remove", "--root", str(root), path=path).returncode == 0 and not made.exists()
    assert tool("remove", "--root", str(root), path=path).returncode == 0


def test_it_installs_nothing_without_visudo_or_against_it(tmp_path: Path) -> None:
    root, empty = tmp_path / "root", tmp_path / "bin"
    empty.mkdir()
    if not Path("/usr/sbin/visudo").exists():
        done = tool("install", "--user", "mac.user", "--root", str(root), path=str(empty))
        assert done.returncode == 1 and "no visudo" in done.stderr and not root.exists()
    (empty / "visudo").write_text("#!/bin/sh\necho 'syntax error near line 1' >&2\nexit 1\n")
    (empty / "visudo").chmod(0o755)
    done = tool("install", "--user", "mac.user", "--root", str(root), path=str(empty))
    assert done.returncode == 1 and "syntax error near line 1" in done.stderr and not root.exists()


def test_it_prints_and_refuses_strange_users_and_other_systems(tmp_path: Path) -> None:
    path = os.environ["PATH"]
    assert tool("print", "--user", "mac.user", path=path).stdout == sudoers("mac.user")
    refused = tool("print", "--user", "x ALL=(ALL) ALL", path=path)
    assert refused.returncode == 1 and "no user name" in refused.stderr
    if sys.platform != "darwin":
        away = tool("remove", path=path)
        assert away.returncode == 1 and "Macs only" in away.stderr
    if os.getuid() == 0:
        nobody = tool("print", path=path)
        assert nobody.returncode == 1 and "--user" in nobody.stderr
