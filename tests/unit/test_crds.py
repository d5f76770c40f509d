"""The shipped CRDs: what a real API server would refuse, what the field expects, what `kubectl explain` shows.

No API server is needed here; the rules of structural schemas are written out below. Where the schemas of the field lie
beside the checkout (`../shared/crds`), ours are also compared with them, field by field.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from metal_supervisor.runtimes import RUNTIMES
from metal_supervisor.spec.resources import Policy, interpret
from metal_supervisor.spec.types import Json, Key, Rejected, Service

REPOSITORY = Path(__file__).resolve().parents[2]
CRDS = REPOSITORY / "conf" / "crds"
EXAMPLES = REPOSITORY / "conf" / "examples"
OURS = sorted([*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("*gb/*.yaml")])
"""Examples of what runs on a Mac; the others are LLMKube's."""
FIELD = REPOSITORY.parent / "shared" / "crds"
PLURALS = ("models", "inferenceservices")
DEMO = REPOSITORY / "tools" / "tiny.yaml"
PRESERVE = "x-kubernetes-preserve-unknown-fields"

Schema = dict[str, Any]


@functools.cache
def parsed(path: Path) -> Schema:
    return yaml.safe_load(path.read_text())


def load(plural: str) -> Schema:
    return copy.deepcopy(parsed(CRDS / f"{plural}.yaml"))


def root(crd: Schema) -> Schema:
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """(path, schema) of a schema and everything below it."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], path + suffix)


def types_match(schema: Schema, value: Any) -> bool:
    if schema.get("x-kubernetes-int-or-string"):
        return isinstance(value, (int, str)) and not isinstance(value, bool)
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool}
    if schema["type"] in kinds:
        return isinstance(value, kinds[schema["type"]])
    return isinstance(value, int if schema["type"] == "integer" else (int, float)) and not isinstance(value, bool)


def problems(schema: Schema, value: Any, path: str = "") -> Iterator[str]:
    """What is wrong with a value: the keywords that our schemas use, and unknown fields where they are not kept."""
    if not types_match(schema, value):
        yield f"{path}: {value!r} is not of type {schema.get('type', 'integer or string')}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not one of {schema['enum']}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, (int, float)) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{path}: {value!r} is out of range"
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from problems(schema["items"], item, f"{path}[{index}]")
    if isinstance(value, dict):
        yield from (f"{path}.{name}: is required" for name in schema.get("required", ()) if name not in value)
        for name, child in value.items():
            if name in schema.get("properties", {}):
                yield from problems(schema["properties"][name], child, f"{path}.{name}")
            elif isinstance(schema.get("additionalProperties"), dict):
                yield from problems(schema["additionalProperties"], child, f"{path}.{name}")
            elif not schema.get(PRESERVE) and path != ".metadata":
                yield f"{path}.{name}: unknown field"


@pytest.mark.parametrize("plural", PLURALS)
def test_an_api_server_accepts_the_schema_as_structural(plural: str) -> None:
    crd = load(plural)
    assert crd["metadata"]["name"] == f"{plural}.{crd['spec']['group']}"
    assert set(root(crd)["properties"]["metadata"]) == {"type"}, "metadata is implied: nothing may be said about it"
    for path, schema in nodes(root(crd)):
        assert ("type" in schema) != bool(schema.get("x-kubernetes-int-or-string")), f"{path} has no type"
        assert not ("properties" in schema and "additionalProperties" in schema), path
        assert schema.get("type") != "array" or "items" in schema, f"{path} has no items"
        assert set(schema.get("required", ())) <= set(schema.get("properties", {})), path
        if schema.get("x-kubernetes-list-type") == "map":
            assert set(schema["x-kubernetes-list-map-keys"]) <= set(schema["items"]["required"]), path
        if "default" in schema:
            assert list(problems(schema, schema["default"], path)) == []
        if "pattern" in schema:
            re.compile(schema["pattern"])
        for rule in schema.get("x-kubernetes-validations", ()):
            assert "\n" not in rule["message"].strip() and rule["rule"], path


@pytest.mark.parametrize("plural", PLURALS)
def test_every_typed_field_is_explained(plural: str) -> None:
    silent = [
        path
        for path, schema in nodes(root(load(plural)))
        if path != ".metadata" and not path.endswith(("[]", "{}")) and len(schema.get("description", "")) < 5
    ]
    assert silent == []


@pytest.mark.parametrize("plural", PLURALS)
def test_fields_without_meaning_on_a_mac_are_kept(plural: str) -> None:
    properties = root(load(plural))["properties"]
    assert properties["spec"][PRESERVE] is True
    assert properties["status"][PRESERVE] is True
    assert properties["status"]["properties"]["conditions"]["x-kubernetes-list-map-keys"] == ["type"]


def test_the_runtime_may_be_left_out_and_may_be_any_engine_of_a_mac() -> None:
    runtime = root(load("inferenceservices"))["properties"]["spec"]["properties"]["runtime"]
    assert "default" not in runtime
    field = {"llamacpp", "llamacpp-router", "personaplex", "vllm", "tgi", "sglang", "generic"}
    mac = {"llama-server", "mlx-server", "omlx", "ollama", "vllm-swift", "tensorfold"}
    assert set(runtime["enum"]) == field | mac


def test_inference_services_scale_and_print_like_in_the_field() -> None:
    version = load("inferenceservices")["spec"]["versions"][0]
    assert version["subresources"] == {
        "status": {},
        "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"},
    }
    columns = {column["name"]: column for column in version["additionalPrinterColumns"]}
    assert list(columns) == ["Phase", "Model", "Replicas", "Reason", "Queue", "Priority", "Endpoint", "Age"]
    assert [name for name, column in columns.items() if column.get("priority")] == ["Queue", "Priority"]


def test_models_print_like_in_the_field() -> None:
    version = load("models")["spec"]["versions"][0]
    assert version["subresources"] == {"status": {}}
    names = [column["name"] for column in version["additionalPrinterColumns"]]
    assert names == ["Phase", "Size", "Accelerator", "Arch", "Age"]


def test_what_a_user_leaves_out_has_the_fields_defaults() -> None:
    defaults = {
        path: schema["default"]
        for plural in PLURALS
        for path, schema in nodes(root(load(plural)))
        if "default" in schema
    }
    assert defaults == {
        ".spec.sourceSecretRef.name": "",
        ".spec.format": "gguf",
        ".spec.refreshPolicy": "IfNotPresent",
        ".spec.hardware.accelerator": "cpu",
        ".spec.replicas": 1,
        ".spec.suspend": False,
        ".spec.endpoint.port": 8080,
        ".spec.endpoint.path": "/v1/chat/completions",
        ".spec.endpoint.type": "ClusterIP",
        ".spec.priority": "normal",
        ".spec.rolloutPolicy.idleTimeoutSeconds": 300,
        ".spec.slo.indicator": "availability",
        ".spec.slo.window": "28d",
    }


def same_text(value: Any) -> Any:
    """A schema without descriptions, and with every run of blanks in texts as one."""
    if isinstance(value, dict):
        return {k: same_text(v) for k, v in value.items() if k != "description" or isinstance(v, dict)}
    if isinstance(value, list):
        return [same_text(item) for item in value]
    return " ".join(value.split()) if isinstance(value, str) else value


def differences(ours: Schema, field: Schema, path: str = "") -> Iterator[str]:
    """How ours differs from the field's, beyond fields that are kept without a type."""
    ignored = {"properties", "items", PRESERVE}
    if path == ".spec.runtime":
        ignored |= {"enum", "default"}
    if path == ".spec.hardware.gpu":
        ignored |= {"x-kubernetes-validations"}  # a rule about fields that mean nothing on a Mac
    for keyword in sorted((set(ours) | set(field)) - ignored):
        if ours.get(keyword) != field.get(keyword):
            yield f"{path} {keyword}: {ours.get(keyword)!r}, in the field {field.get(keyword)!r}"
    children, theirs = ours.get("properties", {}), field.get("properties", {})
    for name in sorted(children):
        if name not in theirs:
            yield f"{path}.{name}: not in the field"
        else:
            yield from differences(children[name], theirs[name], f"{path}.{name}")
    if set(theirs) - set(children) and not ours.get(PRESERVE):
        yield f"{path}: {sorted(set(theirs) - set(children))} would be pruned"
    if "items" in ours and "items" in field:
        yield from differences(ours["items"], field["items"], f"{path}[]")


CLEARER = {
    ".spec.source",
    ".spec.sha256",
    ".spec.hardware.memoryBudget",
    ".spec.hotCacheMaxSize",
    ".spec.pagedSSDCacheMaxSize",
}
"""Fields whose mistakes are answered with an example; the schema of the field has a regular expression, or nothing."""
NEWER = {
    ".spec x-kubernetes-validations",
    ".spec.fileSha256",
    ".spec.files maxItems",
    ".spec.files[] maxLength",
    ".spec.replicas maximum",
}
"""Differences that LLMKube's own schemas have by now, by 0.10; those next to this checkout are of 0.9.19."""
CLEARER_BY = {"maxLength", "pattern", "x-kubernetes-validations"}


@pytest.mark.parametrize("plural", PLURALS)
def test_the_schema_differs_from_the_fields_only_on_purpose(plural: str) -> None:
    reference = FIELD / f"inference.llmkube.dev_{plural}.yaml"
    if not reference.exists():
        pytest.skip(f"the field's schemas are not beside this checkout ({reference.name} in ../shared/crds)")
    ours, field = same_text(load(plural)), same_text(yaml.safe_load(reference.read_text()))
    assert ours["spec"]["names"] == field["spec"]["names"]
    assert ours["spec"]["scope"] == field["spec"]["scope"]
    our_version, field_version = ours["spec"]["versions"][0], field["spec"]["versions"][0]
    for key in ("name", "served", "storage", "subresources"):
        assert our_version[key] == field_version[key], key
    # The field's REASON is schedulingStatus, shown with -o wide only, and empty for a crash.
    ours_columns, theirs = (
        {column["name"]: column for column in version["additionalPrinterColumns"]}
        for version in (our_version, field_version)
    )
    different = {name for name in {*ours_columns, *theirs} if ours_columns.get(name) != theirs.get(name)}
    assert list(ours_columns) == list(theirs)
    assert different == ({"Reason"} if plural == "inferenceservices" else set())
    clearer = [each for each in differences(root(ours), root(field)) if each.split()[0] in CLEARER]
    found = [each for each in differences(root(ours), root(field)) if each not in clearer]
    assert [each for each in found if each.partition(":")[0] not in NEWER] == []
    assert all(each.split()[1].rstrip(":") in CLEARER_BY for each in clearer), clearer


def documents(path: Path) -> list[Schema]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def identities(path: Path) -> list[tuple[str, str]]:
    return [(document["kind"], document["metadata"]["name"]) for document in documents(path)]


def test_each_object_is_in_one_example_and_none_is_the_demos() -> None:
    """Else `kubectl apply -f conf/examples` would leave one of several meanings, or change what `make run` serves."""
    found = [each for path in [DEMO, *EXAMPLES.rglob("*.yaml")] for each in identities(path)]
    assert sorted(found) == sorted(set(found))


def test_only_the_demo_is_a_template() -> None:
    assert "@" in DEMO.read_text()
    assert [path.name for path in EXAMPLES.rglob("*.yaml") if re.search(r"@[A-Z_]+@", path.read_text())] == []


@pytest.mark.parametrize("path", [DEMO, *OURS], ids=lambda path: path.stem)
def test_examples_are_valid_and_complete(path: Path) -> None:
    schemas = {crd["spec"]["names"]["kind"]: root(crd) for crd in map(load, PLURALS)}
    found = documents(path)
    assert [problem for document in found for problem in problems(schemas[document["kind"]], document)] == []
    models = {document["metadata"]["name"] for document in found if document["kind"] == "Model"}
    services = [document for document in found if document["kind"] == "InferenceService"]
    named = {service["spec"]["modelRef"] for service in services}
    named |= {service["spec"].get("speculativeDecoding", {}).get("draftModelRef") for service in services} - {None}
    assert services and named == models
    for document in found:
        assert document["apiVersion"] == "inference.llmkube.dev/v1alpha1"
        assert document["metadata"]["namespace"] == "default"
        unknown = set(document["spec"]) - set(schemas[document["kind"]]["properties"]["spec"]["properties"])
        unknown -= {"resources"} if path.stem == "llmkube-deploy" else set()  # as LLMKube's command writes it
        assert not unknown, "an example may only use fields that mean something on a Mac"
        if document["kind"] == "Model":
            assert document["spec"]["hardware"]["accelerator"] == "metal"


def understood(path: Path) -> dict[Key, Service | Rejected]:
    """What becomes of an example on a Mac that has every engine."""
    found: dict[str, dict[Key, Json]] = {"Model": {}, "InferenceService": {}}
    for document in documents(path):
        if document["kind"] in found:
            key = document["metadata"]["namespace"], document["metadata"]["name"]
            found[document["kind"]][key] = document
    policy = Policy("llama-server", {name: row.formats for name, row in RUNTIMES.items()})
    return interpret(found["InferenceService"], found["Model"], policy)


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_examples_can_be_served_as_they_are(path: Path) -> None:
    found = understood(path).values()
    assert [each.message for each in found if isinstance(each, Rejected)] == []
    services = [each for each in found if isinstance(each, Service)]
    assert services and [RUNTIMES[each.runtime].refuse(each) for each in services] == [None] * len(services)


def test_the_example_of_mixed_runtimes_has_four_of_them() -> None:
    found = understood(EXAMPLES / "mixed-runtimes.yaml")
    told = {name: each.runtime for (_, name), each in found.items() if isinstance(each, Service)}
    assert sorted(told.values()) == ["llama-server", "mlx-server", "ollama", "omlx"]


def test_the_example_check_notices_what_is_wrong() -> None:
    schema = root(load("inferenceservices"))
    good = {"apiVersion": "v", "kind": "InferenceService", "metadata": {"name": "a"}, "spec": {"modelRef": "m"}}
    assert list(problems(schema, good)) == []
    for spec in (
        {},
        {"modelRef": 1},
        {"modelRef": "m", "contextSize": 127},
        {"modelRef": "m", "replicas": True},
        {"modelRef": "m", "runtime": "llama"},
        {"modelRef": "m", "endpoint": {"prot": 1}},
        {"modelRef": "m", "ropeScaling": {"type": "yarn", "factor": "two"}},
    ):
        bad = copy.deepcopy(good) | {"spec": spec}
        assert list(problems(schema, bad)) != [], spec
