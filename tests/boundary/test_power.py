"""What measures power, with real children behind real pipes, and a real sudo where one is to be had."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from powermetrics_sudo import sudoers

from metal_supervisor.host import power_program
from metal_supervisor.host.powermetrics import COMMAND, POWERMETRICS
from metal_supervisor.sidecar.board import Board, status
from metal_supervisor.sidecar.http.metrics import Exposition
from metal_supervisor.sidecar.power import NOTHING_YET, PowerFile, PowerReading, read, shown_power
from metal_supervisor.state.home import POWER_FILE
from tests.support.power import pids, printing
from tests.support.sudo import Room, visudo
from tests.support.system import ROOT, eventually


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# ── the program ──────────────────────────────────────────────────────────────────────────────────


class Running:
    """The program in a thread."""

    def __init__(self, state: Path, command: Sequence[str], first_pause_s: float, silent_s: float) -> None:
        self.path, self._stopped = state / POWER_FILE, threading.Event()
        self.program = power_program.PowerProgram(state, command, first_pause_s, silent_s)
        self._thread = threading.Thread(target=self.program.run, args=(self._stopped.is_set,))
        self._thread.start()

    def written(self) -> dict[str, Any]:
        """The file's content, {} if there is none."""
        found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        return found

    def problem(self) -> str:
        return str(self.written().get("problem", ""))

    def stop(self) -> None:
        self._stopped.set()
        self.program.wake()
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(command: Sequence[str], first_pause_s: float = 0.01, silent_s: float = 30.0) -> Running:
        started.append(Running(tmp_path, command, first_pause_s, silent_s))
        return started[-1]

    yield begin
    for each in started:
        each.stop()


def test_the_file_has_what_was_measured_when_and_goes_with_the_program(
    tmp_path: Path, start: Callable[..., Running]
) -> None:
    before_s = time.monotonic()
    running = start(printing(tmp_path))
    told = eventually(running.written, what="a reading")
    assert told == {
        "format": 1,
        "at": told["at"],
        "monotonic_s": told["monotonic_s"],
        "source": "powermetrics",
        "every_s": 5,
        "watts": {"combined": 0.122, "gpu": 0.019, "cpu": 0.103, "ane": 0.0},
    }
    assert before_s <= told["monotonic_s"] <= time.monotonic() and told["at"] == pytest.approx(time.time(), abs=60)
    assert running.path.stat().st_mode & 0o777 == 0o600
    eventually(lambda: running.written()["monotonic_s"] > told["monotonic_s"], what="the next one")
    running.stop()
    assert not running.path.exists() and gone(*pids(tmp_path))


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("sys.exit(1)", "powermetrics ended with exit code 1; log/power.log has its last message"),
        ("os.kill(os.getpid(), 9)", "powermetrics was killed"),
        ("pass", "powermetrics ended with exit code 0"),
    ],
)
def test_one_that_ends_is_reported_with_how_it_ended_and_what_to_do(
    tmp_path: Path, start: Callable[..., Running], end: str, problem: str
) -> None:
    running = start(printing(tmp_path, end), 60.0)
    found = eventually(running.problem, what="the problem")
    assert found.startswith(problem) and "make install-powermetrics-sudo" in found


@pytest.mark.parametrize("noise", ["", "while True: out.write(b'<plist></plist>'); out.flush(); time.sleep(0.01)"])
def test_one_that_is_silent_or_babbles_counts_as_hung_and_is_ended(
    tmp_path: Path, start: Callable[..., Running], noise: str
) -> None:
    running = start(printing(tmp_path, noise or "time.sleep(60)"), 60.0, 0.2)
    eventually(lambda: "has given no reading for 0.2 s" in running.problem(), what="the problem")
    assert gone(*pids(tmp_path))


def test_one_that_ignores_term_is_killed(
    tmp_path: Path, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power_program, "END_WAIT_S", 0.3)
    running = start(printing(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"))
    eventually(running.written, what="a reading")
    running.stop()
    assert gone(*pids(tmp_path))


def test_none_is_started_while_an_earlier_one_does_not_end(
    tmp_path: Path, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if no signal may be sent to it.
    monkeypatch.setattr(power_program, "_end", lambda _child, output: output.close())
    running = start(printing(tmp_path, "time.sleep(60)"), silent_s=0.2)
    eventually(lambda: "an earlier powermetrics" in running.problem(), what="the problem")
    (child,) = pids(tmp_path)
    os.kill(child, signal.SIGKILL)
    eventually(lambda: len(pids(tmp_path)) > 1, what="another attempt")
    running.stop()
    assert running.program._child is not None
    os.kill(pids(tmp_path)[-1], signal.SIGKILL)
    running.program._child.wait(20)


def test_a_command_that_is_not_there_is_named(tmp_path: Path, start: Callable[..., Running]) -> None:
    running = start([str(tmp_path / "nowhere/sudo")], 60.0)
    assert "nowhere/sudo: No such file" in eventually(running.problem, what="the problem")
    assert "watts" not in running.written()


def test_a_failure_is_logged_once_and_retried_until_it_works(
    tmp_path: Path, start: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    works = tmp_path / "works"
    attempts = tmp_path / "attempts"
    script = f"echo >> {attempts}; test -e {works} || exit 3; exec {shlex.join(printing(tmp_path))}"
    with caplog.at_level("INFO", "power"):
        running = start(["/bin/sh", "-c", script])
        eventually(lambda: attempts.exists() and len(attempts.read_text()) >= 4, what="more attempts")
        works.touch()
        eventually(lambda: "watts" in running.written(), what="it to work")
        running.stop()
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO"]
    assert "exit code 3" in vars(caplog.records[0])["why"]


def test_pauses_double_to_five_minutes_until_a_reading_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    program = power_program.PowerProgram(tmp_path, [str(tmp_path / "none")])
    monkeypatch.setattr(program._bell, "wait", pauses.append)
    program.run(lambda: len(pauses) == 8)
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300]
    program._command = printing(tmp_path, "sys.exit(1)")
    program.run(lambda: len(pauses) == 9)
    assert pauses[8:] == [5]


def test_a_killed_program_leaves_no_powermetrics_behind(tmp_path: Path, start: Callable[..., Running]) -> None:
    code = (
        "import sys; from pathlib import Path; from metal_supervisor.host.power_program import PowerProgram\n"
        "PowerProgram(Path(sys.argv[1]), sys.argv[2:]).run(lambda: False)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *printing(tmp_path)], cwd=ROOT) as program:
        eventually((tmp_path / POWER_FILE).exists, what="a reading")
        (child,) = pids(tmp_path)
        program.kill()
    eventually(lambda: gone(child), what="it to meet the closed pipe")
    assert (tmp_path / POWER_FILE).exists(), "a killed program cleans nothing up; its figures age"
    start(printing(tmp_path, "time.sleep(60)")).stop()
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
        "source": "powermetrics",
        "problem": "x",
        "at": 1.0,
        "watts": {},
    }


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '{"format": 2}',
        '{"format": 1, "watts": 3}',
        '{"format": 1, "watts": {"gpu": "x"}}',
        '{"format": 1, "watts": {"gpu": -1}}',
        '{"format": 1, "every_s": NaN}',
        '{"format": 1, "watts": {"gpu": 1e999}}',
        '{"format": 1, "watts": null}',
        '{"format": 1, "at": [1]}',
        "[" * 100_000,
    ],
)
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
    [
        "",
        "ALL",
        "a b",
        "a,b",
        "a=b",
        "%admin",
        "#0",
        "+group",
        "a\nb ALL=(ALL) ALL",
        "a\n",
        "1st",
        "-a",
        ".a",
        "a\\",
        "ünal",
        "a!",
        "a:b",
        "@USER@",
        "a*",
    ],
)
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


def test_a_real_sudo_runs_it_as_root_and_its_user_can_end_it(
    room: Room, tmp_path: Path, start: Callable[..., Running]
) -> None:
    room.powermetrics("exec sleep 60")
    running = start(room.command("mac.user", *COMMAND))

    def asleep() -> list[psutil.Process]:
        child = running.program._child
        found = psutil.Process(child.pid).children() if child else []
        return [each for each in found if each.cmdline() == ["sleep", "60"]]

    (child,) = eventually(asleep, what="sudo to run it")
    assert child.uids().real == 0 and running.program._child is not None
    if os.getuid() == 0:  # as the user, who is another one here
        ended = ["setpriv", "--reuid=1000", "--clear-groups", "kill", "-TERM", str(running.program._child.pid)]
        assert subprocess.run(ended).returncode == 0
    else:
        running.stop()
    eventually(lambda: gone(child.pid), what="sudo to pass the signal on")


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
