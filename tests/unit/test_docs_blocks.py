"""Every block of the documentation says what it is, and every command in it has somebody who runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import doc_commands
from tests.support.doc_commands import COMMANDS, NEEDS, OTHER, PAGES, READS, ROOT, Block, blocks, verbs

EVERY = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in EVERY if block.shown]


@pytest.mark.parametrize("block", EVERY, ids=lambda block: block.where)
def test_a_block_says_whether_it_is_of_commands(block: Block) -> None:
    assert block.kind in COMMANDS | OTHER, f"{block.where}: ```{block.kind}; say sh, console, text or what it is"
    assert bool(block.shown) == (block.kind in COMMANDS), f"{block.where}: no command in it"


@pytest.mark.parametrize("block", EVERY, ids=lambda block: block.where)
def test_its_marks_are_known_and_at_a_block_of_commands(block: Block) -> None:
    assert block.needs <= NEEDS
    assert block.shown or not (block.needs or block.run_by or block.exits), "marks are of commands"
    assert not block.exits or block.here, "an exit code is only looked at where the block is run"


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.where)
def test_a_line_can_be_pasted_into_zsh(block: Block) -> None:
    """The shell of a Mac takes a comment for arguments, and refuses a * that matches nothing."""
    for each in block.shown:
        bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", each.command)
        assert not re.search(r"\s#", bare), f"{block.where}: say it beside the block: {each.command}"
        assert not re.search(r",\S*\*", bare), f"{block.where}: quote it: {each.command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_mark_is_lost(page: Path) -> None:
    """One that is misspelt, or away from its block, would leave its block without it."""
    marks = re.findall(r"<!-- (?:needs|run|exits)\b.*?-->", page.read_text())
    heard = [block for block in blocks(page) if block.shown]
    assert len(marks) == sum(len(each.needs) + len(each.run_by) + bool(each.exits) for each in heard), marks


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.where)
def test_what_needs_a_cluster_is_run_beside_one(block: Block) -> None:
    assert "cluster" not in block.needs or block.run_by, f"{block.where}: say which test runs it"


@pytest.mark.parametrize("block", [each for each in RUN if each.run_by], ids=lambda block: block.where)
def test_the_test_that_runs_it_is_there_and_names_what_it_does(block: Block) -> None:
    text = "\n".join((ROOT / name).read_text() for name in block.run_by)
    if f'{READS}{block.page}")' in text:
        return
    for each in block.shown:
        for verb in verbs(each.command):
            assert re.search(rf"(?<![\w-]){re.escape(verb)}(?![\w-])", text), f"{verb} in {block.run_by}"


def test_there_are_commands_that_are_run_here() -> None:
    pages = {each.page for each in RUN if each.here}
    assert {"docs/concepts.md", "docs/models.md", "docs/operations.md", "docs/settings.md", "docs/tour.md"} <= pages


@pytest.mark.parametrize(
    "command, found",
    [
        ("make run CLUSTER=~/.kube/config", ("run",)),
        ("kubectl -n llm --context c get pods | grep x", ("get", "x")),
        ("sed 's/a/b/' conf/x.yaml | kubectl apply -f -", ("sed", "apply")),
        ("make dist && uv tool install dist/*.whl   # or pipx", ("dist", "tool")),
        ("METAL_X=1 .venv/bin/python -m pytest tests", ("pytest",)),
        (".venv/bin/python tools/cli_page.py --check", ("cli_page.py",)),
        ("curl localhost:9090/healthz", ("curl",)),
        (".ci/run", ("run",)),
    ],
)
def test_what_a_command_does_is_told(command: str, found: tuple[str, ...]) -> None:
    assert tuple("pytest" if each == "tests" else each for each in verbs(command)) == found


def test_a_page_is_read_as_it_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doc_commands, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- needs: mac -->\n\n```sh\nls \\\n  -l\n# not a command\n```\n"
        "<!-- needs: cluster -->\n<!-- run by: tests/x.py -->\n```console\n$ one\nNAME   AGE\n$ two\n```\n"
        "<!-- exits: 3 -->\n```sh\nthree\n```\n"
    )
    first, second, third = blocks(page)
    assert [each.command for each in first.shown] == ["ls    -l"] and first.here, "a mark is right before its block"
    assert [(each.command, each.output) for each in second.shown] == [("one", ("NAME   AGE",)), ("two", ())]
    assert (second.needs, second.run_by, second.here) == ({"cluster"}, ("tests/x.py",), False)
    assert (third.exits, third.line) == (3, 16)
    page.write_text("```sh\nls\n")
    with pytest.raises(ValueError, match="without an end"):
        blocks(page)
