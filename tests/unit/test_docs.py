"""What the documentation names exists: files, flags, commands, labels; and its YAML is valid."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from pathlib import Path

import conditions_table as conditions
import pytest
import yaml
from test_crds import load, problems, root

from metal_supervisor.cli import main
from metal_supervisor.cluster import manifests
from metal_supervisor.controller.prerequisites import daemons
from metal_supervisor.host import addresses
from metal_supervisor.placement import leases
from metal_supervisor.runtimes import RUNTIMES, VOCABULARIES, omlx, probing
from metal_supervisor.runtimes.llama_arguments import GRAMMAR
from metal_supervisor.runtimes.llama_flags import SWITCHES as LOADING
from metal_supervisor.runtimes.llama_server import refuse
from metal_supervisor.runtimes.mlx_arguments import MLX
from metal_supervisor.runtimes.shims import omlx_engine
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.resources import Policy, interpret
from metal_supervisor.spec.types import Probe, Service
from tests.support.doc_commands import blocks
from tests.support.mac import mac_acceptance
from tests.support.system import free_ports

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = ("omlx", "ollama")
README = REPOSITORY / "README.md"
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
BESIDE = [REPOSITORY / name for name in ("CHANGELOG.md", "SECURITY.md")]
DOCS = [README, CONTRIBUTING, *sorted((REPOSITORY / "docs").glob("*.md"))]
AGENTS_PAGE = REPOSITORY / "docs" / "coming-from-the-go-agent.md"
AGENTS_FLAGS = re.findall(r"^\| `(--[a-z-]+)`[^|]*\|[^|]*\| (`\w+`|–) \|", AGENTS_PAGE.read_text(), re.MULTILINE)
"""(flag of LLMKube's own agent, setting that replaces it, in backticks)."""
FOREIGN = {
    "--model-attestation",
    "--cache-ram",
    "--ctx-checkpoints",
    "--kv-unified",
    "--swa-full",
    "--ubatch-size",  # llama-server
    "--server-side",
    "--rm",
    "--restart",
    "--image",
    "--accelerator",
    "--network-address",
    "--api-key",
    "--context",
    "--replicas",
    "--for",
    "--local-dir",
    "--strict",
    "--seed",
    "--prompt-cache-bytes",
    "--gpu-memory-utilization",
    "--samplers",  # powermetrics
    "--check",  # of the tools that write pages
    "--no-index",
    "--find-links",
    "--dest",
    "--require-hashes",
    "--only-binary",
    "--no-deps",  # pip
    "--force-reinstall",  # pip
    "--from-file",
    "--hard",  # kubectl
    "--upgrade",  # tests/support/finders/lock.py
    "--flag",
    "--other-flag",  # an example in a check of ours
    *GRAMMAR.flags,
    *MLX.grammar.flags,
    *LOADING,
    *(flag for flag, _ in AGENTS_FLAGS),  # LLMKube's own agent
}
"""Flags of kubectl, llmkube, colima, powermetrics, tools, engines. docs/fields.md's are read from command lines."""


@functools.cache
def commands(parser: argparse.ArgumentParser | None = None) -> dict[str, argparse.ArgumentParser]:
    """The parsers of our commands, `models ls` among them as `models.ls`."""
    found = {}
    for action in (parser or main.parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                found |= {name: each, **{f"{name}.{below}": more for below, more in commands(each).items()}}
    return found


def typed(text: str) -> list[tuple[str, set[str]]]:
    """(command, its flags) wherever a page has `metal-supervisor COMMAND …`, in a sentence or in a block."""
    fence = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
    lines = [line for block in fence.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += [each.replace("\n", " ") for each in re.findall(r"`([^`]+)`", fence.sub("", text))]
    found = []
    for words in re.findall(r"(?<![\w.-])metal-supervisor ([a-z][^|;&#\n]*)", "\n".join(lines)):
        name, *rest = words.split()
        below = ".".join((name, *rest[:1]))
        flags = re.findall(r"(?<![\w-])(?:--[a-z][a-z0-9-]+|-[a-z])(?![\w-])", words)
        found.append((below if below in commands() else name, set(flags)))
    return found


@pytest.mark.parametrize("path", [*DOCS, *BESIDE], ids=lambda path: path.stem)
def test_every_file_that_is_named_is_there(path: Path) -> None:
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or (path.parent / link).exists(), link
    for name in re.findall(r"(?<![\w./-])(?:conf|docs|tests|tools|launchd|metal_supervisor)/[\w./-]*\w", text):
        assert (REPOSITORY / name).exists(), name


def test_the_readme_is_short_and_the_index_has_every_page() -> None:
    assert len(README.read_text().splitlines()) <= 120
    index = REPOSITORY / "docs" / "README.md"
    pages = {path.name for path in index.parent.glob("*.md")} - {index.name}
    assert set(re.findall(r"\]\(([\w-]+\.md)[)#]", index.read_text())) == pages


def test_the_readme_shows_what_is_said_first_of_an_engine_that_starts() -> None:
    shown = re.findall(r"default\.tiny +Creating +(.*)", README.read_text())
    (port,) = free_ports(1)
    assert shown == [probing.probe(port, Probe(), identify=False).message]


@pytest.mark.parametrize(
    ("question", "page", "section", "answer"),
    [
        ("Can my 16 GB Mac run Qwen 3?", "examples.md", "A Mac with 16 GB", "| [qwen3-8b]"),
        ("My pod can't reach it", "troubleshooting.md", "My pod can't reach it", "--host-ip"),
        ("How do I get rid of it?", "mac.md", "Taking it out", "metal-supervisor uninstall"),
    ],
)
def test_a_newcomers_question_is_answered_one_click_from_the_index(
    question: str, page: str, section: str, answer: str
) -> None:
    """The index itself is the other click."""
    (row,) = [line for line in (REPOSITORY / "docs" / "README.md").read_text().splitlines() if question in line]
    assert f"]({page}" in row
    text = (REPOSITORY / "docs" / page).read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert answer in text


def test_every_flag_of_the_go_agent_becomes_a_setting_that_exists_or_none() -> None:
    settings = {setting.strip("`") for _, setting in AGENTS_FLAGS} - {"–"}
    assert len(AGENTS_FLAGS) == 41 and settings <= {each.name for each in dataclasses.fields(Settings)}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_every_target_of_make_is_there(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    commands = "\n".join(each.command for block in blocks(path) for each in block.shown)
    shown = set(re.findall(r"^make ([a-z-]+)", commands, re.MULTILINE))
    assert shown | set(re.findall(r"`make ([a-z][a-z-]*)", path.read_text())) <= targets


@pytest.mark.parametrize("path", [*DOCS, *BESIDE], ids=lambda path: path.stem)
def test_every_section_that_is_linked_is_there(path: Path) -> None:
    for page, section in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", path.read_text()):
        text = (path.parent / page).read_text() if page else path.read_text()
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert section in [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in titles], (page, section)


@pytest.mark.parametrize("path", [each for each in DOCS if each.stem != "fields"], ids=lambda path: path.stem)
def test_every_flag_and_command_is_ours_or_known_to_be_anothers(path: Path) -> None:
    text = path.read_text()
    ours = {flag for parser in commands().values() for action in parser._actions for flag in action.option_strings}
    ours |= {flag for action in mac_acceptance.parser()._actions for flag in action.option_strings}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) <= ours | FOREIGN
    assert set(re.findall(r"metal-supervisor ([a-z]+(?:-[a-z]+)*)", text)) <= set(commands())


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_every_flag_beside_a_command_is_one_of_that_command(path: Path) -> None:
    takes = {
        name: {flag for action in each._actions for flag in action.option_strings} for name, each in commands().items()
    }
    assert [(name, flags - takes[name]) for name, flags in typed(path.read_text()) if flags - takes[name]] == []


def test_commands_of_a_page_are_found_with_their_flags_wherever_they_stand() -> None:
    page = """Say `metal-supervisor logs default/tiny [-f]
[--previous]`, or `.venv/bin/metal-supervisor status --watch | less --raw`; no `supervisorctl --help`.
```sh
sudo metal-supervisor models rm SLOT --force   # never --all
metal-supervisor install --embedded \\
  --user me
```
"""
    assert typed(page) == [
        ("models.rm", {"--force"}),
        ("install", {"--embedded", "--user"}),
        ("logs", {"-f", "--previous"}),
        ("status", {"--watch"}),
    ]
    assert sum(len(flags) for path in DOCS for _, flags in typed(path.read_text())) > 20, "or none is looked at"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_yaml_is_yaml_and_our_kinds_in_it_are_valid(path: Path) -> None:
    schemas = {crd["spec"]["names"]["kind"]: root(crd) for crd in map(load, ("models", "inferenceservices"))}
    for block in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL):
        for document in yaml.safe_load_all(block):
            if document.get("kind") in schemas:
                assert list(problems(schemas[document["kind"]], document)) == []


def test_what_is_said_of_shared_daemons_is_what_the_code_does() -> None:
    page = (REPOSITORY / "docs" / "runtimes.md").read_text()
    section = page.partition("## Several models on one daemon")[2].partition("\n## ")[0]
    text = re.sub(r"\s+", " ", section)
    for said in (
        f"{daemons.UNUSED_S:g} s after",
        f"`{omlx.KEY_FILE}`",
        f"written for {omlx_engine.KNOWN}",
        "DaemonUnreachable",
        Settings().ollama_url,
        "`ServedNameConflict`",
        "`DaemonSettingsConflict`",
        *(f"`{each}`" for each in SHARED),
        *(f"`{name}`" for name in omlx.DAEMON_OPTIONS),
    ):
        assert said in text, said
    assert {"/health", "/v1/models"} == omlx_engine.READING, "what is said of oMLX's list of models"


def test_every_runtime_has_a_row_and_is_named_in_the_readme() -> None:
    table = (REPOSITORY / "docs" / "runtimes.md").read_text().partition("\n\nThey run")[0]
    named = {name: row for name, row in RUNTIMES.items() if f"| `{name}`" in table}
    assert set(named) == set(RUNTIMES)
    shown = README.read_text().partition("## Engines and models")[2].partition("\n## ")[0].lower()
    assert [name for name in RUNTIMES if name not in shown] == []
    assert [name for name, row in named.items() if row.shared is not None] == list(SHARED)
    for row in named.values():
        for executable in row.executables:
            source = re.sub(r"^install it \(|\)$", "", executable.install)
            assert source in table, source


def test_extra_arguments_that_are_shown_are_a_users_to_set() -> None:
    text = (REPOSITORY / "docs" / "llama-server.md").read_text()
    shown = [yaml.safe_load(block)["spec"] for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    (spec,) = [each for each in shown if "extraArgs" in each]
    key = "default", "large"
    model = {"metadata": {"name": "large"}, "spec": {"source": "/m.gguf", "hardware": {"accelerator": "metal"}}}
    asked = {"metadata": {"namespace": "default", "name": "large"}, "spec": spec}
    policy = Policy("llama-server", {"llama-server": frozenset({"gguf"})}, vocabularies=VOCABULARIES)
    found = interpret({key: asked}, {key: model}, policy)[key]
    assert isinstance(found, Service) and found.extra_args[0] == "--lora" and refuse(found) is None


def test_the_phases_of_a_service_are_told_with_reasons_that_they_have() -> None:
    text = (REPOSITORY / "docs" / "concepts.md").read_text().partition("## The life of a service")[2]
    rows = re.findall(r"^\| (`[^|]*) \| (`[^|]*) \|", text.partition("**Ready**")[0], re.MULTILINE)
    assert len(rows) == 8
    for phases, told in rows:
        for reason in re.findall(r"`(\w+)`", told):
            (group,) = [each for each in conditions.OF_METAL_READY if reason in {r.name for r in each.reasons}]
            assert set(re.findall(r"`(\w+)`", phases)) & set(group.phases), reason


def test_what_is_said_of_a_cluster_is_what_the_code_does() -> None:
    text = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    for said in (
        f"{manifests.ACCELERATOR_LABEL}=metal",
        f"{leases.KIND}=node",
        addresses.REASON,
        leases.node_lease_name("<node>"),
        leases.claim_name("<name>", 0).replace("-0", "-<slot>"),
        *addresses.HOST_NAMES,
    ):
        assert said in re.sub(r"\s+", " ", text), said
