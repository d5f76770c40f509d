"""docs/fields.md: every field is on it, what it says is what the code does, and a field that is dropped is noticed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_crds import FIELD, PLURALS, load, nodes, parsed, root

from metal_supervisor import runtimes
from metal_supervisor.spec.attachment import JOB
from metal_supervisor.spec.types import Service
from tests.support.pages import fields, fields_leaves, fields_reasons, fields_samples, fields_trial
from tests.support.pages.fields_leaves import KINDS, LIST, Leaf, leaves, merged, own, written
from tests.support.pages.fields_table import Table, problems, table
from tests.support.pages.fields_trial import Cell, cell, columns, names_field

ROOT = Path(__file__).resolve().parents[2]

CONTEXT = Leaf("spec.contextSize", "integer")
DIRECTORY = Leaf("spec.pagedSSDCacheDir", "string")
ROW = runtimes.RUNTIMES["llama-server"]


def only(kind: str, *fields: Leaf) -> list[str]:
    """Problems of these fields; that samples and reasons are there for fields that are left out is none."""
    found = problems(table(kind, fields))
    return [
        each for each in found if not each.endswith(("no such field", "nothing needs the reason that is given for it"))
    ]


def instead(monkeypatch: pytest.MonkeyPatch, row: Any) -> None:
    """Lets llama-server be the only runtime, and another one than it is."""
    monkeypatch.setattr(runtimes, "RUNTIMES", {"llama-server": row})


def forgetting(forget: Callable[[Service], Service]) -> runtimes.Runtime:
    """llama-server, by somebody who forgot something that services say."""
    return replace(ROW, engine=lambda service, binary, place: ROW.engine(forget(service), binary, place))


# ── the page ─────────────────────────────────────────────────────────────────────────────────────


def test_the_page_is_what_the_code_says_and_no_field_is_dropped_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fields", "--check"])
    assert fields.main() == 0


def shown(kind: str) -> dict[str, int]:
    """The fields of a kind on the page, each with the number of those that its row stands for."""
    (section,) = re.findall(rf"(?ms)^## {kind}$(.*?)(?=^## |\Z)", (ROOT / "docs" / "fields.md").read_text())
    rows = re.findall(r"(?m)^\| `([^`]+)`(?: \((\d+) fields\))? \|", section)
    return {f"spec.{name}": int(count or 1) for name, count in rows}


def told_leaves(crd: Any) -> set[str]:
    """The fields with a value of their own in a definition, by another reader than the page's."""
    paths = {path.removeprefix(".").replace("{}", ".*") for path, _ in nodes(root(crd)) if path.startswith(".spec.")}
    return {path for path in paths if not any(each.startswith((f"{path}.", f"{path}[]")) for each in paths)}


def field_crd(plural: str) -> Any:
    path = FIELD / f"inference.llmkube.dev_{plural}.yaml"
    if not path.exists():
        pytest.skip(f"the field's schemas are not beside this checkout: {path} is missing")
    return parsed(path)


def missing(fields: set[str], rows: dict[str, int]) -> set[str]:
    """Fields that have no row, neither of their own nor together with others."""
    return {
        path
        for path in fields
        if path not in rows and not any(path.startswith(f"{row}.") and count > 1 for row, count in rows.items())
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_our_schemas_has_a_row(kind: str) -> None:
    fields = told_leaves(load(KINDS[kind])) - {"spec.env[].valueFrom"}  # which the field's schema tells in detail
    assert len(fields) >= 12 and missing(fields, shown(kind)) == set()


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_the_fields_schemas_has_a_row(kind: str) -> None:
    fields = told_leaves(field_crd(KINDS[kind]))
    assert len(fields) >= 32 and missing(fields, shown(kind)) == set()
    assert sum(shown(kind).values()) == len(fields_leaves.every(kind)) >= len(fields)


def test_the_list_of_the_fields_fields_is_that_of_its_schemas() -> None:
    for plural in PLURALS:
        field_crd(plural)
    assert written(FIELD) == LIST.read_text()


def test_what_one_schema_tells_in_detail_and_the_other_keeps_as_it_is_counts_in_detail() -> None:
    ours = [Leaf("spec.b", "string", ("x",)), Leaf("spec.a[].from", "object")]
    theirs = [Leaf("spec.c", "string"), Leaf("spec.a[].from.name", "string"), Leaf("spec.b", "string", ("x", "y"))]
    assert merged(ours, theirs) == [
        Leaf("spec.b", "string", ("x", "y")),
        Leaf("spec.a[].from.name", "string"),
        Leaf("spec.c", "string"),
    ]


def test_maps_lists_and_values_that_may_be_of_two_types_are_leaves() -> None:
    schema = {
        "properties": {
            "map": {"additionalProperties": {"type": "string"}},
            "list": {"items": {"properties": {"a": {"type": "integer"}}}},
            "port": {"x-kubernetes-int-or-string": True},
            "word": {"type": "string", "enum": ["x"]},
        }
    }
    assert list(leaves(schema, "spec")) == [
        Leaf("spec.map.*", "string"),
        Leaf("spec.list[].a", "integer"),
        Leaf("spec.port", "quantity"),
        Leaf("spec.word", "string", ("x",)),
    ]


def described(kind: str, path: str) -> str:
    """What our schema says of a field and of what it is a part of, below spec."""
    found = {at.removeprefix("."): schema.get("description", "") for at, schema in nodes(root(load(KINDS[kind])))}
    names = path.removesuffix("[]").split(".")
    return " ".join(found.get(".".join(names[:end]), "") for end in range(2, len(names) + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_our_schema_promises_nothing_that_is_accepted_without_effect(kind: str) -> None:
    told = {path: described(kind, path) for path in fields_reasons.GAPS[kind]}
    assert [path for path, text in told.items() if not re.search(r"\b(yet|so far)\b", text)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_our_schema_says_so_of_what_no_engine_can_be_asked_for(kind: str) -> None:
    alone = [leaf for leaf in own(kind) if "valueFrom" not in leaf.path]  # whose message says it
    found = [(leaf, cells) for leaf, cells in table(kind, alone).rows if all(each.refusals for each in cells)]
    never = [leaf.path for leaf, cells in found if not any(each.changes or each.idle for each in cells)]
    assert never or kind == "Model"
    assert [path for path in never if "refused" not in described(kind, path).lower()] == []


# ── the trials ───────────────────────────────────────────────────────────────────────────────────


def tried(kind: str, path: str, title: str) -> Cell:
    (leaf,) = [each for each in fields_leaves.every(kind) if each.path == path]
    (column,) = [each for each in columns() if each.title == title]
    return cell(column, kind, leaf)


@pytest.mark.parametrize(
    ("kind", "path", "title", "change"),
    [
        ("InferenceService", "spec.contextSize", "llama-server", "`--ctx-size`"),
        ("InferenceService", "spec.contextSize", "mlx-server", "memory that is charged"),
        ("InferenceService", "spec.contextSize", "mlx-server: mlx_lm.server", "`--context`"),
        ("InferenceService", "spec.env[].value", "llama-server", "environment `YOUR_NAME`"),
        ("InferenceService", "spec.nodeSelector.*", "llama-server", "which Macs claim it"),
        ("InferenceService", "spec.endpoint.nodePort", "llama-server", "nodePort of the Service"),
        ("InferenceService", "spec.rolloutPolicy.force", "llama-server", "how long running requests may finish"),
        ("InferenceService", "spec.ropeScaling.factor", "llama-server", "`--rope-scale`"),
        ("Model", "spec.mmproj", "llama-server", "`--mmproj`"),
        ("Model", "spec.hardware.memoryFraction", "llama-server", "most memory that it is admitted with"),
    ],
)
def test_a_field_that_is_honoured_is_shown_with_what_it_changes(kind: str, path: str, title: str, change: str) -> None:
    found = tried(kind, path, title)
    assert change in found.changes and found.refusals == ()


def test_a_field_is_honoured_with_some_values_and_refused_with_others() -> None:
    found = tried("InferenceService", "spec.cacheTypeK", "mlx-server: mlx_lm.server")
    ((values, reason, message),) = found.refusals
    assert "`--kv-bits`" in found.changes and found.idle == ("`f16`",)
    assert "`q5_1`" in values and "`q8_0`" not in values
    assert reason == "UnsupportedField" and "spec.cacheTypeK" in message


def test_a_field_without_meaning_changes_nothing_at_all() -> None:
    for column in columns():
        assert cell(column, "Model", Leaf("spec.resources.cpu", "string")) == Cell((), (), ("`example`",))


@pytest.mark.parametrize(
    ("kind", "path", "title", "change"),
    [
        ("InferenceService", "spec.contextSize", "omlx", "daemon: `settings.max_context_window`"),
        ("InferenceService", "spec.pagedSSDCacheDir", "omlx", "daemon: `--paged-ssd-cache-dir`"),
        ("InferenceService", "spec.hotCacheMaxSize", "omlx", "daemon: `--hot-cache-max-size`"),
        ("InferenceService", "spec.batchSize", "ollama", "daemon: `parameters.num_batch`"),
        ("Model", "spec.hardware.gpu.layers", "ollama", "daemon: `parameters.num_gpu`"),
        ("Model", "spec.source", "ollama", "daemon: `library`"),
    ],
)
def test_what_a_shared_daemon_is_asked_for_and_started_with_counts_as_well(
    kind: str, path: str, title: str, change: str
) -> None:
    assert change in tried(kind, path, title).changes


def test_an_attendants_job_is_told_by_its_parts_only() -> None:
    (column,) = [each for each in columns() if each.title == "ollama"]
    told = [each for leaf in own("InferenceService") for each in cell(column, "InferenceService", leaf).changes]
    assert [each for each in told if JOB in each] == [] and "daemon: `parameters.num_ctx`" in told


@pytest.mark.parametrize(
    ("kind", "path", "change"),
    [
        ("Model", "spec.hardware.gpu.layers", "`--n-gpu-layers`"),
        ("InferenceService", "spec.speculativeDecoding.draftModelRef", "`--model-draft`"),
        ("InferenceService", "spec.speculativeDecoding.draftModel", "`--model-draft`"),
        ("InferenceService", "spec.speculativeDecoding.type", "`--spec-type`"),
        ("InferenceService", "spec.env[].valueFrom.secretKeyRef.key", "environment `YOUR_NAME`"),
        ("InferenceService", "spec.env[].valueFrom.configMapKeyRef.optional", "whether it runs"),
    ],
)
def test_further_files_and_values_that_are_kept_elsewhere_are_honoured(kind: str, path: str, change: str) -> None:
    found = tried(kind, path, "llama-server")
    assert change in found.changes and found.refusals == ()


def test_files_that_are_shards_are_accepted_and_others_refused() -> None:
    found = tried("Model", "spec.files[]", "llama-server")
    ((values, reason, _),) = found.refusals
    assert found.idle == ("`base-00002-of-00002.gguf`",) and values == ("`example.gguf`",)
    assert reason == "UnsupportedField"


def test_another_engine_is_told_as_that_and_nothing_else() -> None:
    assert tried("InferenceService", "spec.runtime", "omlx").changes == ("which engine runs it",)


# ── what is wrong is noticed ─────────────────────────────────────────────────────────────────────


def test_a_runtime_that_drops_a_field_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only("InferenceService", CONTEXT) == []
    instead(monkeypatch, forgetting(lambda service: replace(service, options={})))
    (told,) = only("InferenceService", CONTEXT)
    assert told.startswith("InferenceService spec.contextSize with llama-server: it changes nothing")


def test_a_runtime_that_drops_one_value_of_a_field_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Leaf("spec.cacheTypeV", "string", ("f16", "q8_0", "iq4_nl"))
    assert only("InferenceService", cache) == []

    def forget(service: Service) -> Service:
        dropped = service.options.get("cacheTypeV") == "iq4_nl"
        return replace(service, options={}) if dropped else service

    instead(monkeypatch, forgetting(forget))
    assert (
        only("InferenceService", cache)[0]
        == "InferenceService spec.cacheTypeV with llama-server: `iq4_nl` changes nothing"
    )


def test_a_field_that_is_new_in_a_schema_is_noticed() -> None:
    told = only("Model", Leaf("spec.brandNew", "boolean"))
    assert len(told) == len(columns()) and "spec.brandNew" in told[0] and "say why" in told[0]


def test_a_daemon_that_drops_an_option_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = runtimes.RUNTIMES["omlx"]
    assert row.shared is not None
    forgetful = replace(row.shared, engine=lambda binary, place, _options: row.shared.engine(binary, place, {}))
    assert only("InferenceService", DIRECTORY) == []
    monkeypatch.setattr(runtimes, "RUNTIMES", {"omlx": replace(row, shared=forgetful)})
    (told,) = only("InferenceService", DIRECTORY)
    assert told.startswith("InferenceService spec.pagedSSDCacheDir with omlx: it changes nothing")


def test_a_field_whose_resource_is_refused_without_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields_trial, "BESIDE", {"spec.ropeScaling": {"spec.ropeScaling.factor": "2.0"}})
    told = only("InferenceService", Leaf("spec.ropeScaling.type", "string", ("yarn",)))
    assert any("spec.ropeScaling.type with llama-server: its resource is refused without it" in each for each in told)


def test_a_refusal_that_does_not_name_its_field_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, replace(ROW, refuse=lambda service: ("No", "no spec.con") if service.options else None))
    (told,) = only("InferenceService", CONTEXT)
    assert "does not name it: no spec.con" in told


def test_a_reason_that_nothing_needs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fields_reasons.REASONS["InferenceService"], "spec.contextSize", "it is not needed")
    told = problems(table("InferenceService", own("InferenceService")))
    assert "InferenceService spec.contextSize: nothing needs the reason that is given for it" in told


def test_a_reason_for_one_runtime_is_none_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fields_reasons.GAPS["Model"], "spec.brandNew with mlx-server", "it is not needed")
    told = only("Model", Leaf("spec.brandNew", "boolean"))
    unexplained = {each.title for each in columns() if each.runtime != "mlx-server"}
    assert {each.partition(" with ")[2].partition(": it changes")[0] for each in told} == unexplained


def test_a_value_that_is_not_neutral_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields_samples, "NEUTRAL", {"spec.priority": frozenset({"high"})})
    (leaf,) = [each for each in own("InferenceService") if each.path == "spec.priority"]
    assert only("InferenceService", leaf) == ["InferenceService spec.priority: `high` is not neutral"]


def test_a_base_that_is_refused_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, replace(ROW, refuse=lambda _service: ("No", "spec.contextSize, no")))
    assert (
        problems(Table("InferenceService", columns(), [])).count("InferenceService: llama-server: the base is refused")
        == 1
    )


@pytest.mark.parametrize(
    ("kind", "path", "message", "named"),
    [
        ("InferenceService", "spec.env[].valueFrom.x.name", "spec.env[0].valueFrom is not supported", True),
        ("InferenceService", "spec.nodeSelector.*", "spec.nodeSelector asks for a=b", True),
        ("InferenceService", "spec.cacheTypeV", "spec.cacheTypeK must be f16, and cacheTypeV the same", True),
        ("InferenceService", "spec.cacheTypeV", "spec.cacheTypeVX is wrong", False),
        ("InferenceService", "spec.args[]", "spec.extraArgs is wrong", False),
        ("InferenceService", "spec.env[].name", "the name is wrong", False),
        ("Model", "spec.source", 'Model "m": spec.source is wrong', True),
        ("Model", "spec.source", "spec.source is wrong", False),
    ],
)
def test_a_message_names_a_field_or_what_it_is_a_part_of(kind: str, path: str, message: str, named: bool) -> None:
    assert names_field(kind, path, message) is named
