"""Go's flag syntax and values, as its standard package has them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.install import go_flags
from metal_supervisor.install.go_flags import GivenFlags, split, value

KNOWN, SWITCHES = {"port", "namespace", "on"}, {"on"}
PROPERTY = settings(max_examples=200, database=None, derandomize=True)


@pytest.mark.parametrize(
    ("words", "found", "left"),
    [
        (["-port", "1"], [GivenFlags("port", "1")], []),
        (["--port", "1"], [GivenFlags("port", "1")], []),
        (["--port=1"], [GivenFlags("port", "1")], []),
        (["-port=a=b"], [GivenFlags("port", "a=b")], []),
        (["--namespace", ""], [GivenFlags("namespace", "")], []),
        (["--namespace="], [GivenFlags("namespace", "")], []),
        (["--namespace", "-x"], [GivenFlags("namespace", "-x")], []),
        (["--namespace", "--"], [GivenFlags("namespace", "--")], []),
        (["--on"], [GivenFlags("on", "true")], []),
        (["--on=false", "-on"], [GivenFlags("on", "false"), GivenFlags("on", "true")], []),
        (["--on", "false", "--port", "1"], [GivenFlags("on", "true")], ["false", "--port", "1"]),
        (["--port", "1", "--", "--on"], [GivenFlags("port", "1")], ["--on"]),
        (["--port", "1", "-", "--on"], [GivenFlags("port", "1")], ["-", "--on"]),
        (["", "--on"], [], ["", "--on"]),
        (["--port"], [GivenFlags("port", problem="has no value")], []),
        (
            ["---port", "--on"],
            [GivenFlags("---port", problem="is not how a flag is written"), GivenFlags("on", "true")],
            [],
        ),
        (["-=1"], [GivenFlags("-=1", problem="is not how a flag is written")], []),
        (["--what", "5", "--on"], [GivenFlags("what", "5"), GivenFlags("on", "true")], []),
        (["--what", "--on"], [GivenFlags("what"), GivenFlags("on", "true")], []),
    ],
)
def test_a_command_line_is_split_as_go_does(words: list[str], found: list[GivenFlags], left: list[str]) -> None:
    assert split(words, KNOWN, SWITCHES) == (found, left)


@PROPERTY
@given(st.lists(st.text(max_size=6) | st.sampled_from(["--port", "-on", "--", "-", "--x=1"]), max_size=8))
def test_no_word_is_lost(words: list[str]) -> None:
    found, left = split(words, KNOWN, SWITCHES)
    assert words[len(words) - len(left) :] == left
    assert len(found) <= len(words) - len(left) <= 2 * len(found) + 1, "a flag is one word or two, and `--` may follow"


@pytest.mark.parametrize(
    ("text", "length_s"),
    [("0", 0.0), ("10s", 10.0), ("1h2m3s", 3723.0), ("300ms", 0.3), ("1.5h", 5400.0), ("1m1m", 120.0)],
)  # fmt: skip
def test_durations_are_gos(text: str, length_s: float) -> None:
    assert go_flags.value(go_flags.DURATION, text) == pytest.approx(length_s)


@pytest.mark.parametrize(
    "text", ["", "10", "1d", "s", "1h ", " 1h", "1h-2m", "1 s", "-1s", "--1s", "1٠s", "9" * 400 + "h"]
)
def test_what_is_no_duration_for_go_is_none_here(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration such as 90s, 1m30s or 300ms"):
        go_flags.value(go_flags.DURATION, text)


@pytest.mark.parametrize(
    ("kind", "text", "result"),
    [
        (go_flags.SWITCH, "T", True), (go_flags.SWITCH, "0", False), (go_flags.WHOLE, "-3", -3),
        (go_flags.NUMBER, ".2", 0.2), (go_flags.NUMBER, "1e-1", 0.1), (go_flags.LIST, " a, ,b,", "a,b"),
        (go_flags.TEXT, " as it is ", " as it is "), (go_flags.DURATION, "90s", 90.0),
    ],
)  # fmt: skip
def test_values_are_read_by_their_kind(kind: str, text: str, result: object) -> None:
    assert value(kind, text) == result and type(value(kind, text)) is type(result)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(go_flags.SWITCH, ""), (go_flags.SWITCH, "yes"), (go_flags.WHOLE, "1.0"), (go_flags.WHOLE, "010"),
     (go_flags.WHOLE, "9" * 30), (go_flags.WHOLE, "٣"), (go_flags.NUMBER, "nan"), (go_flags.NUMBER, "1e999"),
     (go_flags.NUMBER, "1_0"), (go_flags.NUMBER, "")],
)  # fmt: skip
def test_values_of_another_kind_are_refused(kind: str, text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        value(kind, text)
