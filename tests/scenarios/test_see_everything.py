"""Whoever looks at one Mac with our own commands: what runs, what does not, why, and what an engine says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import logs_page
import pytest

from metal_supervisor.settings.logging import KEYS, LEVELS, entry_in
from tests.support.engines import stand_in
from tests.support.own_logs import logged, strange
from tests.support.pseudo import Following, Terminal
from tests.support.system import eventually, service
from tests.support.tight import LARGE, MIB, Tight, lean, share, tight
from tests.support.typed import typed

BUDGET_BYTES = 120 * MIB
"""A large one with a small one beside it, and never two large ones."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tight]:
    usual = {"memory_fraction": share(BUDGET_BYTES), "memory_watchdog_interval": 0}
    with tight(tmp_path_factory.mktemp("seen"), **usual) as up:
        system = up.system
        system.apply(system.tiny_model(), lean("first", LARGE))
        system.ready("first")
        crashing = stand_in("loops", exit_after_s=0.05, exit_code=3)
        crashing["spec"]["extraArgs"] += ["--cache-ram", "0"]
        system.apply(lean("second", LARGE), service("refused", extraArgs=["--nonsense"]), crashing)
        up.waits("second", "InsufficientMemory", "queue position 1")
        up.waits("refused", "UnsupportedField")
        up.waits("loops", "CrashLoopBackOff", "next start at", within_s=60)
        yield up


def command(machine: Tight, name: str, *arguments: str) -> list[str]:
    """One of our commands, told nothing but where the system's state is."""
    return [sys.executable, "-m", "metal_supervisor", name, "--state-dir", str(machine.system.state), *arguments]


def ours(machine: Tight, *arguments: str) -> tuple[int, str, str]:
    """(exit code, what it printed, what it said) of one."""
    done = typed(*command(machine, *arguments)[3:])
    return done.returncode, done.stdout, done.stderr


def explained(machine: Tight, name: str, says: str = "") -> dict[str, list[str]]:
    """The sentences about a service, by topic, once the first is what the cluster shows, and has these words in it.

    The cluster is told a moment later, and an engine in a crash loop is tried again now and then.
    """

    def found() -> dict[str, list[str]]:
        code, out, said = ours(machine, "explain", f"default/{name}", "--json")
        assert (code, said) == (0, "")
        told = json.loads(out)
        condition = machine.system.condition("MetalReady", name)
        topics: dict[str, list[str]] = {}
        for each in told["sentences"]:
            topics.setdefault(each["topic"], []).append(each["text"])
        same = topics["now"] == [condition["message"]] and told["reason"] == condition["reason"]
        return topics if same and says in condition["message"] else {}

    return eventually(found, 20, f"the sentence about {name} to be that of the condition")


def rows_of(out: str) -> dict[str, str]:
    """The lines of the services, by name, each with the reason below it."""
    rows: dict[str, str] = {}
    name = ""
    for line in out.splitlines():
        name = line.split()[0] if line.startswith("default/") else name if line.startswith(" ") else ""
        if name:
            rows[name] = f"{rows.get(name, '')} {line.strip()}".strip()
    return rows


def test_the_table_shows_all_services_their_memory_and_why_they_are_not_ready(machine: Tight) -> None:
    assert machine.system.stream("first", tokens=64, slow=False).completed()

    def held() -> str:
        code, out, said = ours(machine, "status")
        assert (code, said) == (0, "")
        return out if "; next attempt " in rows_of(out)["default/loops"] else ""

    out = eventually(held, 30, "the crash loop to be held")
    rows = rows_of(out)
    assert set(rows) == {"default/first", "default/second", "default/refused", "default/loops"}
    cells = rows["default/first"].split()
    assert cells[1:4] == ["Ready", "llama-server", f"http://127.0.0.1:{machine.system.port('first')}/v1"]
    assert float(cells[-1]) > 0, "tokens per second, as the engine counts them"
    assert "/82 MiB" in rows["default/first"]
    assert " Pending " in rows["default/second"] and "InsufficientMemory: needs 82 MiB" in rows["default/second"]
    assert " Failed " in rows["default/refused"] and "'--nonsense' is not known" in rows["default/refused"]
    assert " Failed " in rows["default/loops"] and "CrashLoopBackOff: exit status 3" in rows["default/loops"]
    assert "of 120 MiB charged" in out and "1 waiting" in out and out.startswith("node ")
    code, out, _ = ours(machine, "status", "--json")
    assert code == 0 and json.loads(out).keys() == json.loads(machine.system.fetch("/status")[1]).keys()


def test_of_one_that_serves_it_is_explained_what_it_is_charged_and_why_it_has_its_runtime(machine: Tight) -> None:
    told = explained(machine, "first")
    assert told["now"] == [f"llama-server serves first on port {machine.system.port('first')}"]
    assert told["runtime"][0].startswith("llama-server: nothing names one; it serves spec.format gguf")
    assert told["memory"][0].startswith("estimate: 82 MiB = weights 1 MiB + KV cache")
    assert "charged: 82 MiB" in told["memory"][1] and "budget of this Mac: 120 MiB" in told["memory"][2]
    assert told["process"][0].startswith(f"pid {machine.system.pid('first')}, started at ")
    assert told["published"] == ["Service first, port 8080: endpoint ready"]


def test_of_one_that_waits_it_is_explained_what_was_compared_with_what(machine: Tight) -> None:
    told = explained(machine, "second")
    left = json.loads(machine.system.fetch("/status")[1])["memory"]["left"]
    assert told["now"][0].startswith("needs 82 MiB, "), (told, left)
    assert any(each.startswith("position in the queue: 1") for each in told["memory"])
    assert told["process"] == ["none; supervisord has no program for it"]


def test_of_one_that_was_refused_it_is_explained_which_field_it_is(machine: Tight) -> None:
    told = explained(machine, "refused")
    assert told["now"][0].startswith("spec.extraArgs[0] '--nonsense'")
    assert told["wanted"][0].startswith("cannot run (UnsupportedField)")


def test_of_a_crash_loop_it_is_explained_how_often_and_when_it_is_tried_again(machine: Tight) -> None:
    told = explained(machine, "loops", "next start at")
    assert any("unplanned; last: exit status 3" in each for each in told["restarts"])
    assert any(each.startswith("next attempt: ") for each in told["restarts"])


def test_a_new_line_of_an_engine_is_seen_by_whoever_follows_its_log(machine: Tight) -> None:
    along = Following(command(machine, "logs", "-f", "-n", "0", "default/first"))
    try:
        assert along.process.stdout is not None
        path = str(machine.system.files.log_path("default.first"))
        eventually(lambda: reads(along.process.pid, path), 30, "it to read")
        machine.system.chat("first")
        assert b"\n" in along.until(b"\n")
        assert along.close() == (0, b"")
    finally:
        along.process.kill()
        along.process.wait()


def reads(pid: int, path: str) -> bool:
    """Whether a process has a file open."""
    import psutil

    return any(each.path == path for each in psutil.Process(pid).open_files())


def test_what_our_own_programs_log_is_json_of_the_kinds_of_lines_that_there_are(machine: Tight) -> None:
    known = {(each.logger, each.message, each.fields) for each in logs_page.lines()}
    for name in ("controller", "sidecar", "apiserver"):
        path = machine.system.files.log_path(name)
        assert strange(path) == []
        for each in logged(path):
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", each["ts"]) and each["level"] in LEVELS
            assert (each["logger"], each["msg"], tuple(each)[len(KEYS) :]) in known, each
    passes = [each["did"] for each in logged(machine.system.files.log_path("controller"), "pass")]
    assert any(re.search(r"(^|; )add default\.first: \w+", did) for did in passes), passes
    steps = {part.split()[0] for did in passes for part in re.findall(r"(?:^|; )(\w+ default\.\w+: )", did)}
    assert steps and steps <= {do.value for do in logs_page.VERBS}


def test_what_a_program_of_ours_logged_is_text_before_people_and_json_for_a_pipe(machine: Tight) -> None:
    code, out, said = ours(machine, "logs", "controller", "-n", "all")
    assert (code, said) == (0, "") and all(entry_in(line) for line in out.splitlines())
    terminal = Terminal(command(machine, "logs", "controller", "-n", "all"), columns=1000)
    shown = terminal.rest()
    assert terminal.process.wait(30) == 0
    assert re.search(r'Z INFO controller pass did="[^"]*add default\.first: ', shown) and "{" not in shown


def levels(log: Path) -> list[str]:
    return [each["now"] for each in logged(log, "level")]


def test_how_much_is_logged_is_changed_while_it_runs(machine: Tight) -> None:
    before = machine.system.own_pid("controller"), machine.system.own_pid("sidecar")
    for word, now in (("debug", "debug"), ("setting", "info")):
        assert ours(machine, "log-level", word) == (0, "", "")
        for name in ("controller", "sidecar"):
            log = machine.system.files.log_path(name)
            eventually(lambda log=log, now=now: now in levels(log), 30, f"{log.name}: {now}")
    assert (machine.system.own_pid("controller"), machine.system.own_pid("sidecar")) == before


def test_what_a_crashed_engine_wrote_is_kept(machine: Tight) -> None:
    code, out, said = ours(machine, "logs", "loops", "--previous")
    assert (code, said) == (0, "") and out


def files_are_shown(machine: Tight, first: str, explained: int) -> None:
    """Asserts that our commands say what the files have, and of the first service this; `explained`: explain's code."""
    code, out, said = ours(machine, "status")
    assert code == 3 and "this is what its files say" in said
    assert rows_of(out).keys() == {"default/first", "default/second", "default/refused", "default/loops"}
    assert "InsufficientMemory" in rows_of(out)["default/second"] and first in rows_of(out)["default/first"]
    code, out, _ = ours(machine, "explain", "default/second", "--json")
    assert code == explained and json.loads(out)["reason"] == "InsufficientMemory"


def test_while_controller_and_sidecar_are_down_the_files_are_shown(machine: Tight) -> None:
    """The last but one: they stay down."""
    out = machine.system.supervisorctl("stop", "controller", "sidecar")
    assert out.count("stopped") == 2, out
    assert [machine.system.own_pid(name) for name in ("controller", "sidecar")] == [0, 0]
    files_are_shown(machine, " Ready ", 0)
    assert "hello world" in machine.system.chat("first")


def test_while_everything_of_ours_is_down_the_files_are_shown(machine: Tight) -> None:
    """The last: nothing runs after it."""
    assert machine.system.stop() == 0
    assert machine.system.processes() == []
    files_are_shown(machine, " Stopped ", 3)
