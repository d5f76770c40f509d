"""The page about LLMKube's own agent says what the import does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from metal_supervisor.install.go_agent import ENVIRONMENT, FLAGS

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("go_agent_page", ROOT / "tools" / "go_agent.py")
assert SPEC and SPEC.loader
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)


def test_the_tables_are_what_the_import_goes_by() -> None:
    text = tool.PAGE.read_text("utf-8")
    assert tool.page(text) == text, "run tools/go_agent.py"


def test_every_flag_and_variable_has_a_row() -> None:
    lines = tool.tables().splitlines()
    for name in FLAGS:
        assert sum(line.startswith((f"| `--{name}` |", f"| `--{name}` (0.10) |")) for line in lines) == 1, name
    for name in ENVIRONMENT:
        assert sum(line.startswith((f"| `{name}` |", f"| {name} |")) for line in lines) == 1, name
    assert {line.count(" | ") for line in lines if line} == {2, 3}, "three cells or four"


def test_an_outdated_table_is_written_anew_and_nothing_else_is_touched() -> None:
    begin, end = tool.MARKS
    assert tool.page(f"a\n{begin}old\n{end}b\n") == f"a\n{begin}\n{tool.tables()}\n{end}b\n"
    with pytest.raises(ValueError, match="once each"):
        tool.page("no marks")
