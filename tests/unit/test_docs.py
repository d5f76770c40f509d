"""What the documentation names exists: files, flags, commands, labels; and its YAML is valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_crds import load, problems, root

from metal_supervisor import cli
from metal_supervisor.boundary import addresses
from metal_supervisor.core import claims, manifests
from metal_supervisor.runtimes.llama_flags import SWITCHES as LOADING
from metal_supervisor.runtimes.llama_memory import NAMES, SWITCHES
from metal_supervisor.runtimes.llama_server import GUARDED, OWNED

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
FOREIGN = {
    "--cache-ram", "--ctx-checkpoints", "--kv-unified", "--swa-full", "--ubatch-size",  # llama-server
    "--server-side", "--rm", "--restart", "--image", "--accelerator", "--network-address", "--api-key", "--context",
    *NAMES, *SWITCHES, *GUARDED, *OWNED, *LOADING,
}
"""Flags of kubectl, llmkube, colima and llama-server. Those in docs/fields.md are read from engines' command lines."""


def commands() -> dict[str, Any]:
    """The parsers of our commands."""
    (chosen,) = [action for action in cli.parser()._actions if hasattr(action, "choices") and action.choices]
    return dict(chosen.choices)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_every_file_that_is_named_is_there(path: Path) -> None:
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or (path.parent / link).exists(), link
    for name in re.findall(r"conf/[\w./-]*\w", text):
        assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("path", [each for each in DOCS if each.stem != "fields"], ids=lambda path: path.stem)
def test_every_flag_and_command_is_ours_or_known_to_be_anothers(path: Path) -> None:
    text = path.read_text()
    ours = {flag for parser in commands().values() for action in parser._actions for flag in action.option_strings}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= ours | FOREIGN
    assert set(re.findall(r"metal-supervisor ([a-z]+)", text)) <= set(commands())


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_yaml_is_yaml_and_our_kinds_in_it_are_valid(path: Path) -> None:
    schemas = {crd["spec"]["names"]["kind"]: root(crd) for crd in map(load, ("models", "inferenceservices"))}
    for block in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL):
        for document in yaml.safe_load_all(block):
            if document.get("kind") in schemas:
                assert list(problems(schemas[document["kind"]], document)) == []


def test_what_is_said_of_a_cluster_is_what_the_code_does() -> None:
    text = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    for said in (
        f"{manifests.ACCELERATOR_LABEL}=metal", f"{claims.KIND}=node", addresses.REASON,
        claims.node_lease_name("<node>"), claims.claim_name("<name>", 0).replace("-0", "-<slot>"),
        *addresses.HOST_NAMES,
    ):  # fmt: skip
        assert said in re.sub(r"\s+", " ", text), said
