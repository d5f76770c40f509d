"""The page as text: what it says of which board, and what other people's words may do to it, which is nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor import __version__
from metal_supervisor.cluster.report import Happening
from metal_supervisor.sidecar.board import Board, Recent, status
from metal_supervisor.sidecar.http.memory_picture import LENGTH, MOST_PIECES, picture
from metal_supervisor.sidecar.http.page import LONGEST, POLICY, advice, render, shown, shown_programs, summary, tone
from metal_supervisor.sidecar.power import PowerReading
from tests.support import page_boards as boards

PROPERTY = settings(max_examples=60, database=None, derandomize=True)
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Document(HTMLParser):
    """The elements of a page, and whether each was closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    @property
    def skeleton(self) -> list[tuple[str, frozenset[str]]]:
        return [(tag, frozenset(attributes)) for tag, attributes in self.elements]


def page(board: Board) -> Document:
    return Document(render(board, 0.0).decode("utf-8"))


def worded(text: str) -> Board:
    """A board where this text stands wherever somebody else's may."""
    what = Happening("Warning", "Crashed", text)
    return boards.board(
        4,
        text,
        cluster_error=text,
        supervisord_error=text,
        happenings=(Recent(boards.NOW, text, what),),
        power=PowerReading(problem=text),
        programs={text: text},
    )


# ── what it says ─────────────────────────────────────────────────────────────────────────────────


def test_it_has_every_service_with_phase_reason_message_and_what_to_do() -> None:
    text = page(boards.board(4)).text
    for said in (
        "model-000 default · phi on llama-server Ready Serving llama-server serves model-000 on port 18100",
        "Creating Loading loading the model Nothing to do: it serves once its engine answers.",
        "Failed CrashLoopBackOff exit status 1 All of its log: metal-supervisor logs default/model-002",
        "Pending InsufficientMemory needs 61.2 GiB, 10.3 GiB of 48.0 GiB left; try a smaller quantization",
        "256 MiB 341 MiB charged",
        "1 of 4 services serve, 2 need a look",
    ):
        assert said in text, said


def test_what_needs_a_look_comes_first() -> None:
    shown_first = re.findall('class="phase ([a-z]+)"', render(boards.board(8), 0.0).decode())
    assert shown_first == ["bad"] * 4 + ["busy"] * 2 + ["good"] * 2


def test_it_tells_downloads_events_notices_cluster_programs_and_power() -> None:
    power = PowerReading("powermetrics", "", 0.0, 0.0, 1e12, {"gpu": 12.34})
    what = Happening("Normal", "Serving", "it serves")
    document = page(boards.board(1, happenings=(Recent(boards.NOW, "default/x", what),), power=power))
    for said in (
        "default/phi Downloading 25 % of 4.0 GiB",
        "Serving default/x it serves",
        "Notice default.x.conf put aside: no section",
        "https://api.example:6443, reachable",
        "controller RUNNING; sidecar RUNNING",
        "gpu 12.3 W",
        "llama-server b7200",
        f"metal-supervisor {__version__}",
        "start default.model-000: new",
    ):
        assert said in document.text, said
    (progress,) = (attributes for tag, attributes in document.elements if tag == "progress")
    assert (progress["value"], progress["max"]) == (str(boards.GIB), str(4 * boards.GIB))


def test_what_failed_is_no_download() -> None:
    told = {"models": {"default/gone": {"file": {"phase": "Failed", "message": "answered 404"}}}}
    assert "404" not in page(boards.board(0, controller=told)).text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster_error": "connection refused"}, "The cluster is out of reach; what runs goes on. connection refused"),
        ({"supervisord_error": "no socket", "supervisord_since": -60.0}, "Not healthy. supervisord: no socket"),
        ({"passed_at": -100.0}, "Not healthy. the sidecar's loop has not run for 100 s"),
        ({"gateway_at": -100.0}, "Not healthy. the gateway has not looked at its services for 100 s"),
        ({"gateway_since": -6.0}, "Not healthy. the gateway is on and no worker of it runs"),
    ],
)
def test_what_concerns_everything_stands_above_it(changes: dict[str, Any], said: str) -> None:
    assert said in page(boards.board(1, **changes)).text
    assert "troubles" not in str(page(boards.board(1)).elements)


def test_an_empty_mac_says_how_to_start() -> None:
    text = page(Board(node="mac")).text
    assert "no service is wanted" in text and "kubectl apply" in text and "Memory" not in text


def test_a_worker_of_the_gateway_that_stands_by_is_no_trouble() -> None:
    waits = {"gateway": "RUNNING", "gateway-2": "STOPPED", "sidecar": "RUNNING"}
    assert shown_programs(waits) == {"gateway": "RUNNING", "sidecar": "RUNNING"}
    assert shown_programs({**waits, "gateway-2": "RUNNING"}) == {**waits, "gateway-2": "RUNNING"}
    assert shown_programs({**waits, "gateway": "FATAL"}) == {**waits, "gateway": "FATAL"}


def test_what_is_stopped_on_purpose_is_not_missing() -> None:
    stopped = boards.row(0)
    stopped = replace(stopped, report=replace(stopped.report, phase="Suspended", reason="Suspended"))
    assert tone(stopped) == "off" and "spec.suspend" in advice(stopped)
    assert summary([stopped]) == "all services are stopped"
    assert summary([stopped, boards.row(4)]) == "1 of 1 services serve"


@pytest.mark.parametrize(
    "told",
    [
        {"cluster": [1], "memory": "x", "notices": {"a": 1}, "models": 7, "did": None},
        {"memory": {"budget": "48"}, "notices": [1, {}], "cluster": None},
        {"memory": {"budget": True}},
        {"memory": {"budget": 1 << 30}},
        {"memory": {"budget": 10**400}},
        {"memory": {"budget": 1 << 30, "charged": 10**400}},
    ],
)
def test_a_report_of_another_version_is_no_error(told: dict[str, Any]) -> None:
    board = boards.board(1, controller=told)
    assert "model-000" in page(board).text and status(board)["cluster"]["reachable"]


# ── its form ─────────────────────────────────────────────────────────────────────────────────────


def test_a_reader_of_screens_finds_language_title_landmarks_headings_and_heads_of_rows_and_columns() -> None:
    document = page(boards.board(4))
    tags = [tag for tag, _ in document.elements]
    assert tags.count("h1") == tags.count("main") == tags.count("header") == tags.count("footer") == 1
    assert dict(document.elements)["html"]["lang"] == "en"
    heads = [attributes.get("scope") for tag, attributes in document.elements if tag == "th"]
    assert heads == ["col"] * 6 + ["row"] * 4
    ids = {attributes["id"] for _, attributes in document.elements if "id" in attributes}
    named = [attributes["aria-labelledby"] for _, attributes in document.elements if "aria-labelledby" in attributes]
    assert named and set(named) <= ids
    assert "10.0 GiB of 48.0 GiB charged, 38.0 GiB free; 512 MiB measured." in document.text


def test_the_policy_allows_its_own_style_and_script_and_nothing_else() -> None:
    text = render(worded(boards.HOSTILE), 0.0).decode()
    for kind in ("style", "script"):
        (inside,) = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in POLICY
    assert "default-src 'none'" in POLICY and "unsafe" not in POLICY and "frame-ancestors 'none'" in POLICY


def test_nothing_of_it_comes_from_elsewhere_and_it_refreshes_without_javascript() -> None:
    document = page(boards.board(4))
    for tag, attributes in document.elements:
        assert "style" not in attributes and not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "action"):
            value = attributes.get(name) or "/"
            link = tag == "a" and re.fullmatch(r"#downloads|http://10[.]0[.]0[.]5:[0-9]+/v1/models", value)
            assert link or (value.startswith(("/", "data:image/svg+xml,")) and value != "//"), value
    noscript = [tag for tag, _ in document.elements].index("noscript")
    assert document.elements[noscript + 1] == ("meta", {"http-equiv": "refresh", "content": "5"})


# ── other people's words ─────────────────────────────────────────────────────────────────────────


def test_hostile_words_are_words_and_nothing_else() -> None:
    text = render(worded(boards.HOSTILE), 0.0).decode("utf-8")
    assert Document(text).skeleton == page(worded("plain")).skeleton
    assert not [char for char in text if not char.isprintable() and char != "\n"]
    assert "alert(1)" in Document(text).text and "{{7*7}}" in Document(text).text


@PROPERTY
@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("<>\"'&{}%#\u202e\x1b\n;=`/-! ")), min_size=1))
def test_no_word_changes_what_the_page_is_made_of(text: str) -> None:
    found = render(worded(f"x{text}"), 0.0).decode("utf-8")
    assert Document(found).skeleton == page(worded("x")).skeleton
    assert not [char for char in found if not char.isprintable() and char != "\n"]


def test_a_long_word_is_cut() -> None:
    assert shown("a" * 10_000) == "a" * (LONGEST - 1) + "…"
    assert shown("a\n" * 10_000).startswith("a a a ") and len(shown("a\n" * 10_000)) == LONGEST
    assert len(render(worded("m" * 10_000), 0.0)) < 60_000


# ── the picture ──────────────────────────────────────────────────────────────────────────────────


def test_the_bar_has_a_piece_for_each_that_is_charged_and_one_for_what_is_charged_beside_them() -> None:
    found = picture(boards.board(4))
    assert found is not None
    assert [piece.name for piece in found.pieces] == ["default/model-000", "default/model-001", "charged beside them"]
    assert (found.charged_bytes, found.left_bytes, found.limit) == (10 * boards.GIB, 38 * boards.GIB, LENGTH)
    assert sum(piece.width for piece in found.pieces) == pytest.approx(LENGTH * 10 / 48)


def test_more_than_the_budget_is_drawn_with_the_budget_in_it() -> None:
    told = {"memory": {"budget": 8 * boards.GIB, "charged": 10 * boards.GIB}}
    found = picture(boards.board(4, controller=told))
    assert found is not None and (found.left_bytes, found.limit) == (-2 * boards.GIB, pytest.approx(LENGTH * 0.8))
    assert "2.0 GiB too much" in page(boards.board(4, controller=told)).text


def test_many_services_are_few_pieces_that_add_up() -> None:
    board = boards.board(100)
    found = picture(board)
    assert found is not None and len(found.pieces) == MOST_PIECES
    assert sum(piece.services for piece in found.pieces) == 50
    assert found.measured_bytes == sum(row.observed.memory_bytes for row in board.rows)
    for piece, following in zip(found.pieces, found.pieces[1:], strict=False):
        assert piece.start + piece.width == pytest.approx(following.start)
    assert all(piece.measured_width <= piece.width for piece in found.pieces)


def test_without_a_budget_there_is_no_picture() -> None:
    assert picture(Board()) is None
