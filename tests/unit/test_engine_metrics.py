"""What engines say they count: read strictly, put under their services' names, and never a page that cannot be read."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from metal_supervisor.runtimes.engine_metrics import (
    MOST_CHARACTERS,
    MOST_FAMILIES,
    MOST_IN_ALL,
    REASONS,
    Block,
    Told,
    Unreadable,
    blocks,
    merged,
)
from metal_supervisor.sidecar.exposition import (
    LONGEST_LINE,
    LONGEST_TEXT,
    MOST_LABELS,
    MOST_LINES,
    MOST_SERIES,
    read,
)
from metal_supervisor.sidecar.http.metrics import Exposition
from metal_supervisor.spec.types import Key
from tests.support.boards import full_board

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TINY = ("default", "tiny")
OTHER = ("models", "other")
LLAMA = """# HELP llamacpp:tokens_predicted_total Number of generation tokens processed
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 6
# HELP llamacpp:n_tokens_max Largest observed sequence length (prompt + generation)
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max 29
# TYPE llamacpp:predicted_tokens_seconds gauge
llamacpp:predicted_tokens_seconds NaN
"""
HISTOGRAM = """# TYPE wait_seconds histogram
wait_seconds_bucket{le="1"} 1
wait_seconds_bucket{le="+Inf"} 2
wait_seconds_count 2
wait_seconds_sum 3.5
"""


def told(*answers: tuple[Key, str]) -> tuple[Told, dict[Key, Counter[str]]]:
    """What is served of these answers, and what was left out of each."""
    found = {key: blocks(read(text), key) for key, text in answers}
    page, conflicts = merged((number, kept) for number, (kept, _) in enumerate(found.values()))
    dropped = {key: left + conflicts.get(number, Counter()) for number, (key, (_, left)) in enumerate(found.items())}
    return Told(page, frozenset(range(len(found)))), dropped


def series(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    samples = (each for family in plain(text) for each in family.samples)
    return {(each.name, frozenset(each.labels.items())): each.value for each in samples}


def valid(said: Told) -> str:
    """The page in the text format; it and the one in OpenMetrics have been read with everything of ours."""
    board = replace(full_board(), told=said)
    body, _ = Exposition(OPENMETRICS).render(board)
    assert body.endswith(b"# EOF\n") and body.count(b"# EOF") == 1
    assert list(openmetrics(body.decode()))
    assert list(plain(Exposition().render(board)[0].decode()))
    return said.text(False)


# ── one engine ───────────────────────────────────────────────────────────────────────────────────


def test_an_engines_metrics_are_served_under_its_services_name_and_their_own() -> None:
    said, dropped = told((TINY, LLAMA))
    text = valid(said)
    assert 'llamacpp:tokens_predicted_total{namespace="default",name="tiny"} 6\n' in text
    assert 'llamacpp:predicted_tokens_seconds{namespace="default",name="tiny"} NaN\n' in text
    assert "# HELP llamacpp:tokens_predicted_total Number of generation tokens processed\n" in text
    assert "# TYPE llamacpp:n_tokens_max counter\n" in text
    assert not dropped[TINY]


def test_openmetrics_names_families_as_it_wants_them_and_samples_as_the_engine_does() -> None:
    text = told((TINY, LLAMA))[0].text(True)
    assert "# TYPE llamacpp:tokens_predicted counter\nllamacpp:tokens_predicted_total{" in text
    assert "# TYPE llamacpp:n_tokens_max unknown\nllamacpp:n_tokens_max{" in text


def test_two_engines_share_a_family() -> None:
    text = valid(told((TINY, LLAMA), (OTHER, LLAMA))[0])
    assert text.count("# TYPE llamacpp:n_tokens_max counter") == 1
    assert len([line for line in text.splitlines() if line.startswith("llamacpp:n_tokens_max{")]) == 2


def test_labels_that_say_whose_a_series_is_are_ours() -> None:
    given = 'a{name="x",job="metal-supervisor",instance="i",exported_name="y",namespace="n",other="o"} 1'
    text = valid(told((TINY, given))[0])
    assert text.splitlines()[-1] == (
        'a{namespace="default",name="tiny",exported_exported_name="x",exported_job="metal-supervisor",'
        'exported_instance="i",exported_name="y",exported_namespace="n",other="o"} 1'
    )


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("a 1 1700000000000", "1"),
        ('a 2 # {trace="x"} 0.5', "2"),
        ("a +Inf", "+Inf"),
        ("a -inf", "-Inf"),
        ("a nan", "NaN"),
        ("a 1e999", "+Inf"),
        ("a .5", "0.5"),
        ("a 5.", "5"),
        ("a\t-3e2\r", "-300"),
        ("a{} 7", "7"),
        ("a { } 7", "7"),
        ("a 123456789012345678", "1.2345678901234568e+17"),
    ],
)
def test_a_value_is_kept_and_its_time_and_exemplar_are_not(given: str, value: str) -> None:
    text = valid(told((TINY, given))[0])
    assert text.splitlines()[-1] == f'a{{namespace="default",name="tiny"}} {value}'


def test_a_label_is_printable_bounded_and_escaped() -> None:
    hostile = 'a{x="q\\"b\\\\n\\n' + "\x1b\x00\u202e\ufffd émoji 🙂" + '",long="' + "l" * 999 + '"} 1'
    text = valid(told((TINY, hostile))[0])
    ((_, labels),) = series(text)
    assert dict(labels)["x"] == 'q"b\\n????\ufffd émoji 🙂'
    assert len(dict(labels)["long"]) == LONGEST_TEXT and dict(labels)["long"].endswith("l…")


def test_labels_that_are_the_same_once_they_are_cut_are_the_same_series() -> None:
    twice = "".join(f'a{{x="{"l" * LONGEST_TEXT}{number}"}} 1\n' for number in range(2))
    said, dropped = told((TINY, twice + "b 1"))
    assert series(valid(said)).keys() == {("b", frozenset({("namespace", "default"), ("name", "tiny")}))}
    assert dropped[TINY] == {"duplicate": 1}


def test_a_histogram_and_a_summary_are_served_whole() -> None:
    summary = '# TYPE s summary\ns{quantile="0.5"} NaN\ns_sum 1\ns_count 2\n'
    text = valid(told((TINY, HISTOGRAM + summary))[0])
    assert 'wait_seconds_bucket{namespace="default",name="tiny",le="1.0"} 1\n' in text
    assert 's_count{namespace="default",name="tiny"} 2\n' in text


def test_parts_of_histograms_that_are_mixed_up_are_put_together() -> None:
    lines = [
        line
        for part in ("a", "b")
        for line in (
            f'h_bucket{{le="1",x="{part}"}} 1',
            f'h_bucket{{le="+Inf",x="{part}"}} 1',
            f'h_sum{{x="{part}"}} 1',
            f'h_count{{x="{part}"}} 1',
        )
    ]
    mixed = "\n".join(["# TYPE h histogram", *lines[::2], "other 1", *lines[1::2]])
    said, dropped = told((TINY, mixed))
    text = valid(said)
    assert text.index('h_count{namespace="default",name="tiny",x="a"}') < text.index('le="1.0",x="b"')
    assert not dropped[TINY]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("metal_supervisor_service_phase 1", "name"),
        ("llmkube_metal_agent_x 1", "name"),
        ("up 0", "name"),
        ("# TYPE target_info gauge\ntarget_info 1", "name"),
        ("process_start_time_seconds 1", "name"),
        ("python_info 1", "name"),
        ("scrape_samples_scraped 1", "name"),
        ("ALERTS 1", "name"),
        ("a 1\na 1", "duplicate"),
        ('a{x="1",y="2"} 1\na{y="2",x="1"} 2', "duplicate"),
        ("# TYPE a_total counter\na_total -1", "value"),
        ("# TYPE a_total counter\na_total NaN", "value"),
        (HISTOGRAM.replace('"+Inf"', '"2"'), "format"),
        (HISTOGRAM.replace('"1"} 1', '"1"} 5'), "format"),
        (HISTOGRAM.replace("count 2", "count 3"), "format"),
        (HISTOGRAM.replace('"1"', '"x"'), "format"),
        (HISTOGRAM.replace('"1"', '"NaN"'), "format"),
        (HISTOGRAM + "wait_seconds 3", "format"),
        *((HISTOGRAM.replace('"1"', f'"{bound}"'), "format") for bound in ("1_0", " 1", "1 ", "\u0663", "-1")),
        (HISTOGRAM.replace("sum 3.5", "sum NaN"), "value"),
        (HISTOGRAM.replace("sum 3.5", "sum -3.5"), "value"),
        (HISTOGRAM.replace('"+Inf"} 2', '"+Inf"} 2.5').replace("count 2", "count 2.5"), "value"),
        ('# TYPE s summary\ns{quantile="0_1"} 1', "format"),
        ('# TYPE s summary\ns{quantile="0.5"} -1', "value"),
        ("# TYPE s summary\ns_sum NaN", "value"),
        ("# TYPE s summary\ns_count 1.5", "value"),
        (HISTOGRAM.replace("wait_seconds_sum 3.5", ""), "format"),
        (HISTOGRAM.replace("count 2", "count -2"), "value"),
        (HISTOGRAM.replace("sum 3.5", 'sum{le="1"} 3.5'), "format"),
        (HISTOGRAM + 'wait_seconds_bucket{le="1.0"} 1', "duplicate"),
        ('# TYPE s summary\ns{quantile="2"} 1', "format"),
        ("# TYPE s summary\ns 1", "format"),
        ('# TYPE s summary\ns_sum{quantile="0.5"} 1', "format"),
        ("# TYPE s summary\ns_count NaN", "value"),
        ("# TYPE x gauge\nx 1\n# TYPE x_total counter\nx_total 1", "type"),
        (HISTOGRAM + '# TYPE wait_seconds_count gauge\nwait_seconds_count{x="1"} 1\n', "format"),
    ],
)
def test_a_family_that_would_spoil_the_page_is_left_out_with_a_reason(given: str, reason: str) -> None:
    said, dropped = told((TINY, f"good 1\n{given}"))
    assert 'good{namespace="default",name="tiny"} 1\n' in valid(said)
    assert reason in dropped[TINY] and reason in REASONS


def test_when_a_metric_began_is_not_passed_on() -> None:
    text = "# TYPE a_total counter\na_total 1\n# TYPE a_created gauge\na_created 1.7e9\nb_created 1\n"
    said, dropped = told((TINY, text))
    assert {name for name, _ in series(valid(said))} == {"a_total", "b_created"}
    assert not dropped[TINY]


def test_an_answer_in_openmetrics_is_understood_too() -> None:
    text = '# TYPE a counter\n# HELP a words\na_total 1 # {x="1"} 1\na_created 3\n# TYPE b unknown\nb 1\n# EOF\n'
    page = valid(told((TINY, text))[0])
    assert "# HELP a_total words\n# TYPE a_total counter\na_total{" in page
    assert "# TYPE b untyped\nb{" in page and "a_created" not in page


# ── what is refused as a whole ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "# EOF",
        "<!doctype html><html></html>",
        '{"error": {"code": 501}}',
        "\x00\x01\x02\ufffd",
        "a",
        "a b",
        "a{",
        "a{b}",
        'a{b="c} 1',
        'a{b="c"',
        'a{b="c"d="e"} 1',
        'a{b="1",b="2"} 1',
        'a 1{b="c"} 2',
        'a{__name__="x"} 1',
        "a 0x10",
        "a 1_000",
        "1a 1",
        "a-b 1",
        "é 1",
        'a{é="1"} 1',
        "a 1e",
        f"a {'1' * 400}",
        "a" * 201 + " 1",
        f'a{{{"b" * 201}="1"}} 1',
        "ok 1\nnot ok\n",
        "# TYPE a gauge\n# TYPE a counter\na 1",
        "a{" + ",".join(f'l{number}="1"' for number in range(MOST_LABELS + 1)) + "} 1",
        "a 1 x",
        "١ 1",
        "nan",
        '{"a"} 1',
        '{__name__="a"} 1',
        "a\u2028 1",
        'a{"é"="1"} 1',
        'a{"x y"="1"} 1',
        'a{b:c="1"} 1',
        'a{"__b"="1"} 1',
        '{"é","b"="c"} 1',
        "# TYPE a nonsense\na 1",
        "# HELP é words\na 1",
    ],
)
def test_what_is_not_the_format_is_refused_as_a_whole(text: str) -> None:
    with pytest.raises(Unreadable, match="format"):
        read(text)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("a 1 2 3", "1"),
        ("a{,} 2", "2"),
        ("a{b=} 3", "3"),
        ("a ٤", "4"),
        (f"a {'5' * 20}", "5.555555555555556e+19"),
        ("a infinity", "+Inf"),
        ("a 6 x 7", "6"),
    ],
)
def test_what_the_library_takes_beyond_the_format_is_a_plain_sample(given: str, value: str) -> None:
    assert valid(told((TINY, given))[0]).splitlines()[-1] == f'a{{namespace="default",name="tiny"}} {value}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("".join(f"a{number} 1\n" for number in range(MOST_SERIES + 1)), "series"),
        ("\n" * (MOST_LINES + 1), "size"),
        ("a 1\n#" + "x" * LONGEST_LINE, "size"),
    ],
)
def test_what_is_too_much_is_refused_as_a_whole(text: str, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        read(text)
    assert reason in REASONS


def test_as_many_series_as_are_allowed_are_taken() -> None:
    assert len(read("".join(f"a{number} 1\n" for number in range(MOST_SERIES)))) == MOST_SERIES


@pytest.mark.parametrize(
    "text",
    [
        'a{b="' + "\\" * (1 << 20),
        'a{b="' + '\\"' * (1 << 19),
        "a{" + 'b="",' * 200_000,
        "a" + " \t" * (1 << 19),
        "a " + "9" * (1 << 20),
        "# HELP a " + "\\n" * (1 << 19),
        "a{" + " " * (1 << 20),
        "a 1 " + "1" * (1 << 20) + "x",
        'a{b="c' * 150_000,
    ],
    ids=range(9),
)
def test_no_line_takes_time_out_of_proportion(text: str) -> None:
    with pytest.raises(Unreadable, match="size"):
        read(text)  # the library looks at what it has seen already, and would be at it for minutes


@pytest.mark.parametrize(
    "line",
    [
        'a{x="N",b="' + '\\"' * 8000 + '"} 1',
        'a{x="N"} 1' + " 1" * 8000,
        "# HELP b" + " " * 16_000 + 'x\na{x="N"} 1',
        "a{" + " " * 16_000 + 'x="N"} 1',
        'a{x="N"} ' + "0" * 16_000 + "1",
    ],
    ids=["quotes", "times", "help", "spaces", "digits"],
)
def test_a_page_of_the_longest_lines_is_read(line: str) -> None:
    (family,) = read("\n".join(line.replace("N", str(number)) for number in range(60)))
    assert len(family.samples) == 60


# ── several ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("# TYPE a gauge\na 1", "# TYPE a untyped\na 1"),
        ("# TYPE a gauge\na 1", "# TYPE a_total counter\na_total 1"),
        (HISTOGRAM, "wait_seconds_count 1"),
        ("wait_seconds_bucket 1", HISTOGRAM),
        ("# TYPE a_total counter\na_total 1", "a_created 1"),
    ],
)
def test_who_was_there_first_keeps_a_name(first: str, second: str) -> None:
    said, dropped = told((TINY, first), (OTHER, f"{second}\nb 1"))
    owners = {(name, dict(labels)["name"]) for name, labels in series(valid(said))}
    assert {name for name, owner in owners if owner == "other"} == {"b"}
    assert "tiny" in {owner for _, owner in owners}
    assert dropped == {TINY: Counter(), OTHER: Counter(type=1)}


def test_what_goes_leaves_the_others_and_no_empty_family() -> None:
    said, _ = told((TINY, LLAMA + "alone 1"), (OTHER, LLAMA))
    text = valid(replace(said, live=frozenset({1})))
    assert {dict(labels)["name"] for _, labels in series(text)} == {"other"} and "alone" not in text
    assert valid(replace(said, live=frozenset())) == ""


def test_all_engines_together_have_a_bound() -> None:
    most = Block("a", "gauge", "", "", MOST_IN_ALL)
    page, dropped = merged([(1, [most]), (2, [replace(most, name="b", series=1)])])
    assert [family.name for family in page] == ["a"] and dropped == {2: Counter(series=1)}
    long = Block("a", "gauge", "", "x" * (MOST_CHARACTERS - 1), 1)
    page, dropped = merged([(1, [long, replace(long, name="b", lines="xx"), replace(long, name="c", lines="x")])])
    assert [family.name for family in page] == ["a", "c"] and dropped == {1: Counter(series=1)}
    many = [Block(f"a{number}", "gauge", "", "", 1) for number in range(MOST_FAMILIES + 1)]
    page, dropped = merged([(1, many), (2, many)])
    assert len(page) == MOST_FAMILIES and dropped == {1: Counter(series=1), 2: Counter(series=1)}
    assert all(len(family.parts) == 2 for family in page), "a name that is there is there for all"


# ── anything at all ──────────────────────────────────────────────────────────────────────────────

PIECES = (
    "# TYPE ",
    "# HELP ",
    "a",
    "a_total",
    "a_bucket",
    "a_sum",
    "a_count",
    "a_created",
    "up",
    "x:y",
    " counter",
    " gauge",
    " histogram",
    " summary",
    "{",
    "}",
    'le="1"',
    'le="+Inf"',
    'quantile="0.5"',
    'name="',
    '"',
    "\\",
    ",",
    "=",
    " 1",
    " 2",
    " NaN",
    " -1",
    " 1e400",
    "\n",
    "\n",
    "\n",
    "#",
    "\x00",
    "\u2028",
    "\ud800",
    "é",
)
LINES = (
    "# TYPE a counter",
    "# TYPE a_total counter",
    "# TYPE a histogram",
    "# TYPE a summary",
    "# TYPE a gauge",
    '# HELP a "quoted\\',
    'a{quantile="0.5"} 1',
    'a_bucket{le="1"} 1',
    'a_bucket{le="2"} 1',
    'a_bucket{le="+Inf"} 2',
    "a_sum 1",
    "a_count 2",
    "a_count NaN",
    "a_total 1",
    "a_total -1",
    "a_created 5",
    "a 1",
    "a 2",
    'a{x="1"} 3',
    'a_bucket{x="1",le="+Inf"} 2',
    'a_count{x="1"} 2',
    'a_sum{x="1"} 2',
    "# TYPE a_count gauge",
    "a_bucket 1",
    "# TYPE a_created gauge",
    'a_total{name="z"} 1 7',
    "# UNIT a seconds",
)


@pytest.mark.parametrize("seed", range(300))
def test_whatever_engines_say_the_page_can_be_read(seed: int) -> None:
    chance = random.Random(seed)
    answers = []
    for key in (TINY, OTHER, ("a", "b")):
        lines = "\n".join(chance.choices(LINES, k=chance.randint(1, 12)))
        junk = "".join(chance.choices(PIECES, k=chance.randint(0, 12)))
        for text in (lines, f"{lines}\n{junk}"):
            try:
                read(text)
            except Unreadable as error:
                assert error.reason in REASONS
            else:
                answers.append((key, text))
    said, _ = told(*dict(answers).items())
    assert {dict(labels)["namespace"] for _, labels in series(valid(said))} <= {key[0] for key, _ in answers}
