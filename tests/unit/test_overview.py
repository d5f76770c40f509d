"""The lines of `metal-supervisor status`, for documents of any content and terminals of any width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.cli.overview import COLUMNS, STATES, Beside, Strange, facts, lines, uptime
from metal_supervisor.cli.render import Line, Screen
from metal_supervisor.sidecar import board
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.terminal_text import cells
from metal_supervisor.spec.throughput import tokens_per_s
from tests.support import boards
from tests.support.sized_terminal import SizedTerminal

NOW = 10_000.0
GIB = 1 << 30
EVIL = "x\nevil/other  Ready\r\x1b[2J\u202egpj\u2028\x9b31m\0\t`id`"


def service(name: str = "tiny", **more: Any) -> dict[str, Any]:
    memory = {"reservedBytes": 3 * GIB, "measuredBytes": 2 * GIB}
    return {
        "namespace": "default",
        "name": name,
        "program": f"default.{name}",
        "phase": "Ready",
        "reason": "Serving",
        "message": "it serves",
        "ready": True,
        "warning": None,
        "runtime": "llama-server",
        "pid": 41,
        "restarts": 2,
        "address": "127.0.0.1:18100",
        "nextAttempt": None,
        "memory": memory,
        **more,
    }


def document(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    memory = {"budget": 8 * GIB, "charged": 4 * GIB, "waiting": 1, "pressure": "Normal", "why": "", "left": 4 * GIB}
    return {
        "version": "1",
        "node": "mac",
        "cluster": {"server": "http://k", "reachable": True, "error": ""},
        "supervisord": {"reachable": True, "error": ""},
        "programs": {"controller": "RUNNING"},
        "memory": memory,
        "controller": {"notices": []},
        "downloads": [],
        "services": list(rows),
        **more,
    }


def shown(body: dict[str, Any], width: int | None = None, **beside: Beside) -> list[str]:
    found = lines(body, {f"default.{name}": each for name, each in beside.items()}, NOW, width)
    return ["".join(line) for line in found]


def drawn(body: dict[str, Any], terminal: SizedTerminal) -> list[str]:
    """The lines as a terminal shows them."""
    screen = Screen(terminal, STATES)
    screen.print(lines(body, {}, NOW, screen.width))
    return terminal.fresh().splitlines()


def cell(body: dict[str, Any], column: str, **beside: Beside) -> str:
    """What the only service has in a column."""
    found = shown(body, **beside)
    start = next(i for i, line in enumerate(found) if line.startswith(COLUMNS[0]))
    head, row = found[start : start + 2]
    at = head.index(column)
    end = head.find("  ", at + len(column))
    following = len(row) if end < 0 else next(i for i in range(end, len(head)) if head[i] != " ")
    return row[at:following].strip()


def why(body: dict[str, Any]) -> str:
    """The reason below the last service; "" if there is none."""
    last = shown(body)[-1]
    return last.strip() if last.startswith(" ") else ""


def test_a_label_is_apart_from_what_it_labels() -> None:
    open_one = service(confined=False, unconfinedWhy="no Seatbelt")
    found = shown(document(open_one, gateway={"url": "http://g", "on": True}))
    assert "confined  all but default/tiny: no Seatbelt" in found


def test_a_service_that_serves() -> None:
    beside = Beside("default/tiny", "http://127.0.0.1:18101/v1", NOW - 3900, 41.26)
    found = {column: cell(document(service()), column, tiny=beside) for column in COLUMNS}
    assert found == {
        "NAMESPACE/NAME": "default/tiny",
        "PHASE": "Ready",
        "RUNTIME": "llama-server",
        "URL": "http://127.0.0.1:18101/v1",
        "MEMORY": "2.0/3.0 GiB",
        "RESTARTS": "2",
        "UPTIME": "65 min",
        "TOKENS/S": "41.3",
    }
    assert why(document(service())) == ""


def test_what_is_not_known_beside_the_document_is_left_open() -> None:
    found = {column: cell(document(service()), column) for column in COLUMNS}
    assert (found["URL"], found["UPTIME"], found["TOKENS/S"]) == ("http://127.0.0.1:18100/v1", "-", "-")


def test_one_that_does_not_run_has_no_memory_and_no_uptime_and_says_why() -> None:
    row = service(phase="Pending", reason="InsufficientMemory", message="needs 3.0 GiB", pid=0, address="")
    body = document(row)
    assert cell(body, "MEMORY", tiny=Beside("default/tiny", "", NOW - 5)) == "-"
    assert cell(body, "UPTIME", tiny=Beside("default/tiny", "", NOW - 5)) == "-"
    assert why(body) == "InsufficientMemory: needs 3.0 GiB"


@pytest.mark.parametrize(("due", "words"), [(NOW + 35, "next attempt in 35 s"), (NOW - 1, "next attempt is due")])
def test_a_crash_loop_says_when_it_is_tried_again_however_long_its_last_words(due: float, words: str) -> None:
    row = service(phase="Failed", reason="CrashLoopBackOff", message="x" * 999, nextAttempt=due)
    assert why(document(row)).endswith(f"x…; {words}")


def test_when_it_is_tried_again_is_said_once() -> None:
    said = "exit status 1; it fails; next start at 2026-11-21T09:00:00Z"
    row = service(phase="Failed", reason="CrashLoopBackOff", message=said, nextAttempt=NOW + 35)
    assert why(document(row)) == "CrashLoopBackOff: exit status 1; it fails; next attempt in 35 s"


def test_memory_is_left_open_before_its_first_sample() -> None:
    young = replace(boards.row(memory_bytes=0), rss_bytes=0)
    told = board.status(replace(boards.full_board(), rows=(young,)))
    (found,) = told["services"]
    assert (found["rssBytes"], found["memory"]["measuredBytes"]) == (None, None)
    assert cell(document(found), "MEMORY") == f"?/{amount(young.record.reserved_bytes)}"
    assert not [line for line in shown(document(found)) if "measured" in line]


def test_a_bad_edit_beside_a_running_engine_is_told() -> None:
    assert why(document(service(warning=["InvalidSpec", "no"]))) == "InvalidSpec: no"


def test_the_bar_shows_what_is_held_what_is_kept_and_what_is_left() -> None:
    bar, numbers = (line for line in shown(document(service())) if "[" in line or "charged" in line)
    assert (bar.count("#"), bar.count("="), bar.count(" ", bar.index("["), bar.index("]"))) == (10, 10, 20)
    assert numbers.strip() == "4.0 GiB of 8.0 GiB charged, 2.0 GiB measured, 1 waiting, pressure Normal"


def test_more_than_the_budget_fills_the_bar_and_is_told_in_numbers() -> None:
    body = document(service(), memory={"budget": GIB, "charged": 2 * GIB, "pressure": "Critical", "why": "swap"})
    bar = next(line for line in shown(body) if "[" in line)
    assert bar.endswith(f"[{'#' * 40}] 200 %")
    assert any(line.endswith("pressure Critical (swap)") for line in shown(body))


def test_what_is_wrong_with_the_machine_is_told() -> None:
    body = document(
        cluster={"server": "https://k", "reachable": False, "error": "timed out"},
        supervisord={"reachable": False, "error": "refused"},
        programs={"controller": "FATAL", "sidecar": "RUNNING"},
        controller={"notices": [{"name": "evil.conf", "reason": "no section"}]},
    )
    text = "\n".join(shown(body))
    for part in ("https://k timed out", "supervisord: refused", "controller is FATAL", "evil.conf: no section"):
        assert part in text
    assert "sidecar is" not in text
    assert text.endswith("no InferenceService is this Mac's")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_at_every_width_name_and_phase_are_there_and_no_line_is_longer(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [service(), service("a-service-with-a-rather-long-name", phase="Pending", message="words " * 40)]
    away = {"server": "https://k:6443", "reachable": False, "error": "no " * 60}
    found = drawn(document(*rows, cluster=away), SizedTerminal(monkeypatch, width))
    assert max(map(cells, found)) <= width
    assert any("Pending" in line and "a-service" in line for line in found)
    head = next(line for line in found if line.startswith("NAMESPACE"))
    assert ("MEMORY" in head, "TOKENS/S" in head) == {40: (False, False), 80: (True, False), 200: (True, True)}[width]


def test_services_that_need_attention_come_first() -> None:
    phases = ("Ready", "Creating", "Failed", "Suspended", "Pending", "Failed")
    rows = [service(f"s{i}", phase=phase, message="no") for i, phase in enumerate(phases)]
    found = [line.split()[0] for line in shown(document(*rows)) if line.startswith("default/")]
    assert found == [f"default/s{i}" for i in (2, 5, 4, 1, 0, 3)]


def test_a_long_reason_is_wrapped_below_its_service_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    row = service(phase="Failed", reason="CrashLoopBackOff", message="word " * 40 + "end")
    found = drawn(document(row, service("other")), SizedTerminal(monkeypatch, 60))
    at = next(i for i, line in enumerate(found) if line.startswith("default/tiny"))
    end = next(i for i, line in enumerate(found) if line.startswith("default/other"))
    assert " ".join(found[at + 1 : end]).split() == ["CrashLoopBackOff:", *["word"] * 40, "end"]


@pytest.mark.parametrize(
    ("line", "coloured"),
    [
        ("default/Failed  Failed  Failed", "default/Failed  \x1b[31mFailed\x1b[0m  Failed"),
        ("default/tiny  Ready", "default/tiny  \x1b[32mReady\x1b[0m"),
        (("    ", "CrashLoopBackOff: Failed Ready a/b Ready"), "    CrashLoopBackOff: Failed Ready a/b Ready"),
        (("notice    ", "Failed"), "notice    Failed"),
        ("default/tiny  Suspended", "default/tiny  Suspended"),
    ],
)
def test_only_the_state_of_a_service_is_coloured(line: Line, coloured: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = SizedTerminal(monkeypatch, 80)
    Screen(terminal, STATES).print([line])
    assert terminal.getvalue() == f"{coloured}\n"


WORDS = st.one_of(st.text(), st.just(EVIL), st.text(st.characters(categories=["Cc", "Cf", "Zl", "Zp", "Cs", "Lo"])))
ANY: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)
FIELDS = sorted(service())


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, ANY)),
    st.fixed_dictionaries({}, optional=dict.fromkeys(sorted({*document()} - {"services", "cluster"}), ANY)),
    st.dictionaries(st.sampled_from(["server", "reachable", "error", "advice", "cloned"]), ANY),
    WORDS,
    st.one_of(st.none(), st.integers(1, 250)),
)
def test_whatever_a_document_holds_no_line_moves_the_cursor(
    row: dict[str, Any], more: dict[str, Any], cluster: dict[str, Any], word: str, width: int | None
) -> None:
    body = document(service(**row), service(word, message=word), **{**more, "cluster": cluster})
    found = lines(body, {"default.tiny": Beside(word)}, NOW, width)
    assert all("".join(line).isprintable() for line in found)
    assert facts(body) == facts(body)


@pytest.mark.parametrize("body", [{}, {"services": [], "cluster": None, "node": "x"}, {"services": 1}])
def test_what_is_no_document_of_ours_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(Strange):
        shown(body)


def test_what_always_moves_is_no_change_and_what_matters_is() -> None:
    before = document(service(), at=1.0)
    assert facts(before) == facts(document(service(memory={"measuredBytes": 1}), at=2.0))
    assert facts(before) != facts(document(service(phase="Failed"), at=1.0))
    assert facts(before) != facts(document(service(), programs={"controller": "FATAL"}))


def test_a_download_is_shown_unless_it_has_failed_and_each_tenth_of_it_is_news() -> None:
    row = {"namespace": "d", "model": "m", "phase": "Downloading", "gotBytes": 50, "totalBytes": 99, "message": "x"}
    found = [line for line in shown(document(downloads=[row, row | {"message": ""}, "rubbish"])) if "fetches" in line]
    assert found == ["fetches   d.m  x", "fetches   d.m  about to begin"]
    assert not [line for line in shown(document(downloads=[row | {"phase": "Failed"}])) if "fetches" in line]
    before = facts(document(downloads=[row]))
    assert (
        before
        == facts(document(downloads=[row | {"gotBytes": 55}]))
        != facts(document(downloads=[row | {"gotBytes": 60}]))
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (41, "41 s"), (720, "12 min"), (11_100, "3 h 5 min"), (353_000, "4 d 2 h")]
)
def test_how_long_something_has_been_up(seconds: float, text: str) -> None:
    assert uptime(seconds) == text


def test_how_fast_an_engine_writes_is_what_it_counts() -> None:
    text = (
        "# TYPE llamacpp:tokens_predicted_total counter\nllamacpp:tokens_predicted_total 600\n"
        "llamacpp:tokens_predicted_seconds_total 12.5\nllamacpp:predicted_tokens_seconds 9\n"
    )
    assert tokens_per_s(text) == 48.0
    first = text.replace("600", "1").replace("12.5", "0.000001")
    assert tokens_per_s(first) is None, "our own first request, of one token"
    for other in ("", text.replace("12.5", "0"), text.replace("600", "x"), text.replace("600", "nan"), "<html>"):
        assert tokens_per_s(other) is None
