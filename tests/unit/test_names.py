"""Names of services, as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.spec.names import Aliases, Unknown, aliases, meant
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Standing
from tests.support.records import a_record


def record(namespace: str, name: str, ordinal: int = 0) -> Record:
    program = f"{namespace}.{name}" + (f"@{ordinal}" if ordinal else "")
    verdict = Verdict(Standing.RUN, "Admitted", "", 1.0)
    return a_record(name, namespace, program=program, model="m", verdict=verdict, endpoint=None, ordinal=ordinal)


def known(*records: Record) -> dict[str, Aliases]:
    return {"controller": ({"controller"},), **{each.program: aliases(each) for each in records}}


TWO = record("a", "two"), record("a", "two", 1)
THERE = known(record("a", "phi"), record("b", "phi"), record("a", "phi-mini"), *TWO)


@pytest.mark.parametrize(
    ("word", "program"),
    [
        ("a/phi", "a.phi"),
        ("a.phi", "a.phi"),
        ("b/phi", "b.phi"),
        ("phi-mini", "a.phi-mini"),
        ("two", "a.two"),
        ("a/two", "a.two"),
        ("a/two@1", "a.two@1"),
        ("two@1", "a.two@1"),
        ("controller", "controller"),
    ],
)
def test_a_name_means_one(word: str, program: str) -> None:
    assert meant(word, THERE) == program


def test_our_own_program_is_meant_before_a_service_of_its_name() -> None:
    there = known(record("a", "controller"))
    assert (meant("controller", there), meant("a/controller", there)) == ("controller", "a.controller")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("phi", "'phi' may be any of a.phi, b.phi; say which"),
        ("a/ph-mini", "there is no 'a/ph-mini'; did you mean a.phi-mini"),
        ("zzz", "there is no 'zzz'; there is a.phi, a.phi-mini, a.two, a.two@1, b.phi, controller"),
    ],
)
def test_a_name_of_several_or_of_none_says_what_there_is(word: str, says: str) -> None:
    with pytest.raises(Unknown) as raised:
        meant(word, THERE)
    assert str(raised.value).startswith(says)


def test_where_there_is_nothing_that_is_said() -> None:
    with pytest.raises(Unknown, match="there is none at all"):
        meant("x", {})


@given(st.text())
def test_anything_may_be_typed(word: str) -> None:
    if word not in {name for each in THERE.values() for names in each for name in names}:
        with pytest.raises(Unknown):
            meant(word, THERE)
