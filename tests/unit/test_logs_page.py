"""docs/logs.md has every line that our programs write, and each of these can be searched for."""

from __future__ import annotations

import re
from pathlib import Path

import logs_page
import pytest
from logs_page import Broken, Line

from metal_supervisor.controller.plan import Action
from metal_supervisor.settings import logging

ROOT = Path(__file__).resolve().parents[2]

HEAD = 'import logging\nlog = logging.getLogger("here")\n'


def lines_of(tmp_path: Path, body: str) -> list[Line]:
    source = tmp_path / "made"
    source.mkdir(exist_ok=True)
    (source / "part.py").write_text(HEAD + body)
    return logs_page.lines(source)


def test_the_page_is_that_of_the_sources_as_they_are() -> None:
    assert logs_page.PAGE.read_text("utf-8") == logs_page.page(), "run: .venv/bin/python tools/logs_page.py"


def test_what_the_page_shows_as_json_is_what_it_shows_as_text() -> None:
    page = logs_page.PAGE.read_text("utf-8")
    (as_json,) = re.findall(r"(?s)```json\n(.*?)\n```", page)
    (as_text,) = re.findall(r"(?s)```text\n(.*?)\n```", page)
    found = logging.entry_in(as_json)
    assert found is not None and logging.text_lines(found) == as_text


def test_every_verb_of_a_pass_is_explained() -> None:
    assert set(logs_page.VERBS) == set(Action) - {Action.WAIT, Action.ALARM}, "of which a pass does neither"


def test_every_call_of_a_logger_is_found() -> None:
    """Counted another way: by what looks like one in the text of the sources."""
    looks = re.compile(r'\blog\.(?:debug|info|warning|error|exception)\(\s*"([^"]+)"')
    messages = {one for path in logs_page.SOURCE.rglob("*.py") for one in looks.findall(path.read_text())}
    found = {line.message for line in logs_page.lines()}
    assert len(messages) > 40 and messages <= found
    assert found - messages == {
        "level",
        "memory pressure",
        "metal",
        "program died",
        "thread died; so does the process",
        "the program cannot go on",
    }, "those that are called in another way"


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ('log.info("said")', ("here", "said", "info", ())),
        ('log.warning("said", extra={"a": 1, "level": 2})', ("here", "said", "warning", ("a", "level_"))),
        ('log.exception("said")', ("here", "said", "error", ("exc",))),
        ('log.error("said", exc_info=True)', ("here", "said", "error", ("exc",))),
        ('log.log(10, "said")', ("here", "said", "any", ())),
        ('logging.getLogger(__name__).debug("said")', ("made.part", "said", "debug", ())),
        ('logging.getLogger(arguments.command).debug("said")', (logs_page.ANY_PROGRAM, "said", "debug", ())),
        ('detail = {"a": 1}\n    log.info("said", extra=detail)', ("here", "said", "info", ("a",))),
        ('own = logging.getLogger("own")\n    own.info("said")', ("own", "said", "info", ())),
        ('def inner() -> None:\n        log.info("said")', ("here", "said", "info", ())),
    ],
)
def test_a_line_is_read_from_its_call(tmp_path: Path, call: str, line: tuple[object, ...]) -> None:
    (found,) = lines_of(tmp_path, f"def run(arguments):\n    {call}\n")
    assert (found.logger, found.message, found.level, found.fields) == line


def test_a_call_of_one_or_another_level_is_two_lines(tmp_path: Path) -> None:
    found = lines_of(tmp_path, '(log.info if log else log.error)("said")')
    assert [each.level for each in found] == ["error", "info"]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ('log.info(f"a {x}")', "constant"),
        ('log.info("a %s", x)', "constant"),
        ('log.info("a " + x)', "constant"),
        ('log.info("a %s" % x)', "constant"),
        ("log.info(x)", "constant"),
        ("log.info()", "constant"),
        ("log.info(1)", "constant"),
        ('(log.info if x else log.error)(f"{x}")', "constant"),
        ('logging.info(f"{x}")', "constant"),
        ('logging.getLogger("a").error(f"{x}")', "constant"),
        ('log.log(10, f"{x}")', "constant"),
        ('log.info("a", stack_info=True)', "extra and exc_info"),
        ('log.info("a", extra=x)', "written out"),
        ('log.info("a", extra={**x})', "constant name"),
        ('log.info("a", extra=dict(a=1))', "written out"),
        ('log.info("a", extra={x: 1})', "constant name"),
        ('log.info("a", extra={"A b": 1})', "lower case"),
        ('log.info("a", extra={"name": 1})', "'name' is an attr"),
        ('log.info("a", extra={"message": 1})', "'message' is an attribute"),
        ('log.info("a", **x)', "extra and exc"),
        ('other.info("a", extra={})', "no logger that is known"),
    ],
)
def test_what_could_not_be_searched_for_is_refused(tmp_path: Path, call: str, why: str) -> None:
    with pytest.raises(Broken, match=rf"^made\.part, line 4: .*{why}"):
        lines_of(tmp_path, f"def run(x):\n    {call}\n")
