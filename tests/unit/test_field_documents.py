"""What the field writes and says: the documents this project was asked for by, LLMKube's command, and its router.

The documents are web pages that lost the indentation of their YAML. It is restored from the schemas: a key belongs to
the innermost object that knows it. They lie in `../shared/seeds`, the schemas in `../shared/crds`, beside a checkout.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_crds import EXAMPLES, FIELD, REPOSITORY, documents, problems, root

from metal_supervisor.cluster.manifests import service_object
from metal_supervisor.spec.resources import GROUP, VERSION, Policy, interpret
from metal_supervisor.spec.types import Endpoint, Json, Key, Rejected, Service
from tests.support.records import a_record

SEEDS = REPOSITORY.parent / "shared" / "seeds"
CURRENT = f"{GROUP}/{VERSION}"
OLD = "llmkube.io/v1alpha1"
PLURALS = {"Model": "models", "InferenceService": "inferenceservices", "ModelRouter": "modelrouters"}
POLICY = Policy("llama-server", {"llama-server": frozenset({"gguf"})})
LINE = re.compile(r"(?P<item>- )?(?P<key>[A-Za-z]+):(?: (?P<value>\S.*))?")


@functools.cache
def field_schema(kind: str) -> Json:
    path = FIELD / f"{GROUP}_{PLURALS[kind]}.yaml"
    if not path.exists():
        pytest.skip(f"the field's schemas are not beside this checkout: {path} is missing")
    return root(yaml.safe_load(path.read_text()))


def seeds() -> list[tuple[Path, list[str]]]:
    """(file, lines) of each YAML document in the seeds: from its apiVersion to what is no YAML any more."""
    if not SEEDS.is_dir():
        pytest.skip(f"the documents of the field are not beside this checkout: {SEEDS} is missing")
    found = []
    for path in sorted(SEEDS.glob("*.txt")):
        lines: list[str] = []
        for line in path.read_text().splitlines():
            if line.startswith("apiVersion:"):
                lines = []
                found.append((path, lines))
            elif not LINE.fullmatch(line.strip()):
                lines = []
            if found and (lines or line.startswith("apiVersion:")):
                lines.append(line.strip())
                found[-1] = (path, lines)
    return found


def scalar(text: str) -> Any:
    """A value; where the page's prose was glued to it, that is cut off."""
    if text[0] in "{[":
        return yaml.safe_load(text[: max(text.rfind("}"), text.rfind("]")) + 1])
    return yaml.safe_load(text.split(maxsplit=1)[0])


def restored(lines: list[str], schema: Json) -> Json:
    """The object that the lines were before their indentation was lost. Fails where no open object knows a key."""
    document: Json = {}
    open_now: list[tuple[Json, Json | list[Any]]] = [(schema, document)]
    for line in lines:
        found = LINE.fullmatch(line)
        assert found, line
        key, value = found["key"], found["value"]
        if found["item"]:
            while open_now[-1][0].get("type") != "array":
                open_now.pop()
            items = open_now[-1][1]
            assert isinstance(items, list)
            items.append({})
            open_now.append((open_now[-1][0]["items"], items[-1]))
        while key not in open_now[-1][0].get("properties", {}):
            open_now.pop()
            assert open_now, f"nothing knows {key}"
        known, target = open_now[-1][0]["properties"][key], open_now[-1][1]
        assert isinstance(target, dict)
        if value is None:
            target[key] = [] if known["type"] == "array" else {}
            open_now.append((known, target[key]))
        else:
            target[key] = scalar(value)
    return document


def current() -> Iterator[tuple[str, Json]]:
    """(file, document) of the current API."""
    for path, lines in seeds():
        api, kind = (line.split()[1] for line in lines[:2])
        if api == CURRENT:
            yield path.name, restored(lines, field_schema(kind))


def understood(found: list[Json]) -> dict[Key, Service | Rejected]:
    """The InferenceServices as this Mac understands them, in namespace default if they name none."""
    kinds: dict[str, dict[Key, Json]] = {"Model": {}, "InferenceService": {}}
    for document in found:
        metadata = {"namespace": "default", "uid": "u", "generation": 1, **document["metadata"]}
        if document["kind"] in kinds:
            kinds[document["kind"]][metadata["namespace"], metadata["name"]] = {**document, "metadata": metadata}
    return interpret(kinds["InferenceService"], kinds["Model"], POLICY)


# ── the documents of the field ───────────────────────────────────────────────────────────────────


def test_every_document_of_the_current_api_is_valid_in_the_field() -> None:
    found = list(current())
    assert {document["kind"] for _, document in found} == {"Model", "InferenceService", "ModelRouter"}
    wrong = [(name, list(problems(field_schema(document["kind"]), document))) for name, document in found]
    assert [each for each in wrong if each[1]] == []


def test_every_inference_service_of_the_current_api_is_understood_or_refused_by_name() -> None:
    by_file: dict[str, list[Json]] = {}
    for name, document in current():
        by_file.setdefault(name, []).append(document)
    results = {key: result for found in by_file.values() for key, result in understood(found).items()}
    assert results, "the seeds hold an InferenceService"
    for key, result in results.items():
        if isinstance(result, Rejected):
            assert result.reason.startswith("Unsupported") and "spec." in result.message, (key, result.message)
    served = results["default", "phi-4-mini"]
    assert isinstance(served, Service)
    assert served.model.source.endswith("phi-4-mini-instruct-Q4_K_M.gguf") and served.endpoint.port == 8080


def test_what_is_not_of_the_current_api_is_the_old_one() -> None:
    old = [(path.name, lines) for path, lines in seeds() if not lines[0].endswith(CURRENT)]
    assert [(name, lines[0], lines[1]) for name, lines in old] == [
        ("003_d1d31dbba3a01c59.txt", f"apiVersion: {OLD}", "kind: InferenceService")
    ] * 2
    explained = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    assert OLD in explained
    for line in {line for _, lines in old for line in lines}:
        key = line.partition(":")[0]
        assert key in explained, f"docs/kubernetes.md says what became of {key}"


# ── LLMKube's command and router ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_valid_in_the_field(path: Path) -> None:
    for document in documents(path):
        assert list(problems(field_schema(document["kind"]), document)) == []


def test_what_llmkubes_command_creates_is_served() -> None:
    found = documents(EXAMPLES / "llmkube-deploy.yaml")
    found[1]["spec"]["image"] = "llama.cpp:server"  # which it also writes
    (result,) = understood(found).values()
    assert isinstance(result, Service), result
    assert result.endpoint == Endpoint("llama-3-1-8b", 8080, "/v1/chat/completions", "ClusterIP", None)
    assert result.options["contextSize"] == 131072


def test_the_routers_backends_and_rules_name_what_there_is() -> None:
    path = EXAMPLES / "llmkube" / "router.yaml"
    (router,) = documents(path)
    spec = router["spec"]
    beside = documents(path.parent.parent / "phi-4-mini.yaml")
    services = {document["metadata"]["name"] for document in beside if document["kind"] == "InferenceService"}
    backends = {each["name"]: each for each in spec["backends"]}
    referred = {each["inferenceServiceRef"]["name"] for each in backends.values() if "inferenceServiceRef" in each}
    assert referred == services
    routed = {each for rule in spec["rules"] for each in rule["route"]["backends"]}
    assert routed | {spec["defaultRoute"]} <= set(backends)
    for each in backends.values():
        assert "inferenceServiceRef" not in each or each["timeout"], "a Mac may be gone: a backend on it has a timeout"


def router_address(service: Json) -> str:
    """Where LLMKube's router sends requests for an inferenceServiceRef."""
    name = service["metadata"]["name"].replace(".", "-")
    port = (service["spec"].get("endpoint") or {}).get("port") or 8080
    return f"http://{name}.{service['metadata']['namespace']}.svc.cluster.local:{port}"


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [("phi-4-mini", None), ("llama-3.1-8b", {}), ("a.b.c", {"port": 80}), ("tiny", {"type": "NodePort", "port": 9000})],
)
def test_the_router_finds_the_service_that_we_make(name: str, endpoint: Json | None) -> None:
    metadata = {"namespace": "llm", "name": name, "uid": "u", "generation": 1}
    spec: Json = {"modelRef": "m", **({"endpoint": endpoint} if endpoint is not None else {})}
    model = {
        "metadata": {"namespace": "llm", "name": "m"},
        "spec": {"source": "/m.gguf", "hardware": {"accelerator": "metal"}},
    }
    resource = {"metadata": metadata, "spec": spec}
    service = interpret({("llm", name): resource}, {("llm", "m"): model}, POLICY)["llm", name]
    assert isinstance(service, Service)
    record = a_record(
        name,
        "llm",
        program=f"llm.{name}",
        model="m",
        endpoint=service.endpoint,
        port=18100,
    )
    made = service_object(record, service.endpoint)
    (port,) = made["spec"]["ports"]
    where = f"http://{made['metadata']['name']}.{made['metadata']['namespace']}.svc.cluster.local:{port['port']}"
    assert where == router_address(resource)
    assert "selector" not in made["spec"], "or Kubernetes would look for pods behind it"
