"""docs/architecture.md: every station of its walks is a function of the source."""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path

import pytest

from tests.support.sources import statements

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
OF_THREADS = {*vars(threading.Thread()), *vars(threading.Thread), "_context", "_handle", "_os_thread_handle"} - {"run"}
"""Names that a thread's class has for itself, also from Python 3.13 and 3.14 on."""
STATIONS = re.findall(r"\[`([A-Za-z_.]+)`\]\(\.\./(metal_supervisor/[a-z_/]+\.py)\)", PAGE)


def defined(path: Path) -> set[str]:
    """Functions, constants and `Class.method`s of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{each.name}" for each in methods}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


@pytest.mark.parametrize(("name", "file"), STATIONS)
def test_a_station_is_where_the_page_says(name: str, file: str) -> None:
    assert name in defined(ROOT / file)


def test_every_room_has_a_row() -> None:
    rooms = {path.parent.name for path in (ROOT / "metal_supervisor").glob("*/__init__.py")}
    rows = {room for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for room in re.findall(r"`([a-z]+)`", row)}
    assert rows == rooms


def test_no_file_is_loose() -> None:
    loose = {path.name for path in (ROOT / "metal_supervisor").glob("*.py")}
    assert loose == {"__init__.py", "__main__.py", "launch.py"}


def test_no_two_classes_share_a_name() -> None:
    seen: dict[str, str] = {}
    for path in sorted((ROOT / "metal_supervisor").rglob("*.py")):
        for node in statements(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                assert node.name not in seen, f"{path} and {seen[node.name]}"
                seen[node.name] = str(path)


def test_no_thread_keeps_something_of_its_own_under_a_name_of_its_class() -> None:
    """Such a thread ends as it starts: Python 3.14 runs it in what it keeps as `_context`."""
    found = 0
    for path in sorted((ROOT / "metal_supervisor").rglob("*.py")):
        for each in statements(ast.parse(path.read_text("utf-8"))):
            bases = [ast.unparse(base) for base in each.bases] if isinstance(each, ast.ClassDef) else []
            if not isinstance(each, ast.ClassDef) or "threading.Thread" not in bases:
                continue
            found += 1
            nodes = list(ast.walk(each))
            own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)} - {"__init__"}
            own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
            assert not own & OF_THREADS, f"{path}: {each.name}"
    assert found > 5
