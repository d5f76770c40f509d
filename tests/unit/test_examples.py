"""conf/examples: what is there is what its table says, fits its Mac, and has names of its own."""

from __future__ import annotations

from collections import Counter

import pytest
import yaml

from metal_supervisor.cli.model_source import examples
from tests.support.pages.examples import EXAMPLES, HERE, ROOT, Example, budgets, demand, documents, files, page


def test_the_files_are_those_of_the_table() -> None:
    wanted = dict(files())
    assert set(HERE.glob("*gb/*")) == set(wanted)
    for path, content in wanted.items():
        assert path.read_text("utf-8") == content, f"{path.name}: python -m tests.support.pages.examples"
        assert list(yaml.safe_load_all(content)) == documents(next(each for each in EXAMPLES if each.name == path.stem))
    assert (ROOT / "docs" / "examples.md").read_text("utf-8") == page()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_fits_its_mac_with_any_macos_and_no_smaller_one_better(example: Example) -> None:
    needs = demand(example).bytes
    assert needs is not None
    assert all(needs <= budget.bytes for budget in budgets(example.mac_gb))
    if example.mac_gb > 16:  # with as much again for the system and the rest, it belongs a directory higher
        assert needs > budgets(example.mac_gb // 2)[1].bytes * 0.5


def test_no_two_examples_are_of_one_name() -> None:
    found = [each for path in HERE.rglob("*.yaml") for each in yaml.safe_load_all(path.read_text("utf-8")) if each]
    assert max(Counter((each["kind"], each["metadata"]["name"]) for each in found).values()) == 1


def test_serve_knows_them_but_for_those_with_two_models() -> None:
    assert {each.name for each in EXAMPLES if not each.draft} <= examples().keys()
    assert not {each.name for each in EXAMPLES if each.draft} & examples().keys()
