"""The page of a running system in a real browser: with JavaScript and without, young, quiet, and of use on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import chromium
from tests.support.chromium import Tab
from tests.support.system import System, eventually, running, service

WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("page")) as up:
        up.apply(up.tiny_model(), service())
        up.ready()
        yield up


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with chromium.tab(tmp_path) as found:
        yield found


@pytest.fixture
def tab_without_javascript(tmp_path: Path) -> Iterator[Tab]:
    with chromium.tab(tmp_path, "--blink-settings=scriptEnabled=false") as found:
        yield found


def row(html: str, name: str) -> str:
    """The text of a service's row, "" if it has none."""
    found = re.search(rf'<tr role="row">\s*<th role="rowheader" scope="row"><bdi>{name}</bdi>.*?</tr>', html, re.S)
    return " ".join(re.sub("<[^>]*>", " ", found[0]).split()) if found else ""


def note(html: str) -> str:
    """What the page says of itself."""
    return re.findall(r'<p id="note" role="status">(.*?)</p>', html)[0]


def test_the_page_shows_a_service_and_its_end_without_being_loaded_again(
    system: System, tab: Tab, tmp_path: Path
) -> None:
    system.apply(service("leaving"))
    system.ready("leaving")
    tab.open(f"http://localhost:{system.http}/")
    eventually(lambda: "Ready Serving llama-server serves leaving" in row(tab.html(), "leaving"), what="the row")
    for width in WIDTHS:
        for dark in (False, True):
            tab.size(width, dark=dark)
            assert tab.run("document.documentElement.scrollWidth") <= width, "nothing sticks out"
            tab.picture(tmp_path / f"page-{width}{'-dark' if dark else ''}.png")
    assert tab.run("getComputedStyle(document.querySelector('.good')).color") == "rgb(95, 207, 133)", "the style counts"
    assert tab.run("window.isTheSame = true") is True
    system.delete("leaving")
    eventually(lambda: not row(tab.html(), "leaving"), what="the row to go")
    assert tab.run("window.isTheSame") is True
    assert "Ready" in row(tab.html(), "tiny")
    assert tab.complaints == []


def test_a_page_that_nobody_answers_says_so_and_recovers(system: System, tab: Tab) -> None:
    tab.open(f"http://127.0.0.1:{system.http}/")
    system.supervisorctl("stop", "sidecar")
    eventually(lambda: note(tab.html()).startswith("No answer since"), what="the note")
    system.supervisorctl("start", "sidecar")
    eventually(lambda: not note(tab.html()), 30, "the note to go")
    assert "Ready" in row(tab.html(), "tiny")


def test_without_javascript_the_page_is_the_same_and_refreshes_itself(
    system: System, tab_without_javascript: Tab
) -> None:
    tab = tab_without_javascript
    system.apply(service("brief"))
    system.ready("brief")
    tab.open(f"http://localhost:{system.http}/")
    eventually(lambda: "Ready" in row(tab.html(), "brief"), what="the row")
    assert '<meta http-equiv="refresh"' in tab.html()
    system.delete("brief")
    eventually(lambda: "</footer>" in tab.html() and not row(tab.html(), "brief"), 30, "the row to go")
    assert tab.complaints == []
