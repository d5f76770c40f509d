"""docs/security.md claims nothing that no test tries, and docs/attacks.md lists the attacks there are."""

from __future__ import annotations

import re
from pathlib import Path

from tests.attacks.test_confinement import NOT_HELD
from tests.support.pages import attacks_page

ROOT = Path(__file__).resolve().parents[2]

PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
HEADS = ("| cannot |", "| cannot happen |", "| ---")
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"(?m)^def (test_\w+)\(", path.read_text("utf-8"))
}


def claims() -> list[str]:
    """The rows that say what cannot be done."""
    return [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(HEADS)]


def test_every_claim_names_a_test_that_exists() -> None:
    assert len(claims()) > 20
    for row in claims():
        named = re.findall(r"`(test_\w+)`", row)
        assert named, f"no test tries it: {row}"
        assert not set(named) - TESTS, f"no such test: {row}"


def test_the_page_of_attacks_is_the_generated_one() -> None:
    assert attacks_page.PAGE.read_text("utf-8") == attacks_page.page(), "attacks_page.py writes it anew"


def test_what_confinement_does_not_hold_is_told() -> None:
    assert all(f": {reason}\n" in PAGE for reason in NOT_HELD.values())
