"""Packages that our code imports are those that pyproject.toml declares: another release of one may drop another."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.support.sources import statements

ROOT = Path(__file__).resolve().parents[2]
OWN = frozenset({"metal_supervisor", "gate", "wrapper"})
"""`gate`, `wrapper`: files of this package that a program beside them imports by their own names."""


def imported() -> dict[str, str]:
    """Module of another package -> a file of ours that imports it."""
    found = {}
    for path in sorted((ROOT / "metal_supervisor").rglob("*.py")):
        for node in statements(ast.parse(path.read_text("utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            found |= {name.partition(".")[0]: path.name for name in names}
    return {name: file for name, file in found.items() if name not in (sys.stdlib_module_names | {"tomllib"}) | OWN}


def test_each_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in project["dependencies"]}
    owners = packages_distributions()
    found = {
        name: file
        for name, file in imported().items()
        if not {each.lower().replace("_", "-") for each in owners.get(name, [name])} & declared
    }
    assert found == {}
