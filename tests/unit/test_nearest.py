"""The names that are suggested for a mistyped one."""

from __future__ import annotations

import difflib

import pytest

from metal_supervisor.settings.loader import FIELDS
from metal_supervisor.spec import nearest as module
from metal_supervisor.spec.nearest import MOST_COMPARED, did_you_mean, nearest

MODELS = tuple(f"llama-3.1-{size}b-instruct-{number:03d}" for size in (8, 70) for number in range(400))


def slips(name: str) -> list[str]:
    """What a hand makes of a name: one character too few, too many, or two in the wrong order."""
    at = len(name) // 2
    swapped = name[: at - 1] + name[at] + name[at - 1] + name[at + 1 :]
    return [name[:at] + name[at + 1 :], f"{name[:at]}x{name[at:]}", swapped]


@pytest.mark.parametrize("name", FIELDS)
def test_a_slip_of_the_hand_is_understood_among_many_names(name: str) -> None:
    for word in slips(name):
        assert nearest(word, tuple(FIELDS))[:1] == tuple(difflib.get_close_matches(word, FIELDS, n=1))


def test_a_word_is_compared_closely_with_few_of_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    really = module.get_close_matches

    def noted(word: str, names: list[str], cutoff: float) -> list[str]:
        compared.append(len(names))
        return really(word, names, cutoff=cutoff)

    monkeypatch.setattr(module, "get_close_matches", noted)
    assert did_you_mean("llama-3.1-8b-instuct-007", MODELS) == " (did you mean llama-3.1-8b-instruct-007?)"
    assert compared == [MOST_COMPARED]
