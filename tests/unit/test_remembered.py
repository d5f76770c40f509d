"""What is remembered is what would be computed anew, whatever changes, and in whatever order."""

from __future__ import annotations

import random
from typing import Any

import pytest

from metal_supervisor.controller.remembered import Remembered
from metal_supervisor.controller.resource_filter import ResourceFilter
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.runtimes import setting_checks  # noqa: F401 - completes the settings
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec import resources
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Rejected, Standing
from tests.support.effort import cases
from tests.support.records import ADMITTED, a_record
from tests.support.system import model, service

NAMES = [*(f"{key}{at}" for key in "abc" for at in range(3)), "more0", "more1"]


class Text:
    """A value that is compared by identity, as what is read from a file."""

    def __init__(self, said: int) -> None:
        self.said = said


@pytest.mark.parametrize("seed", range(cases(50)))
def test_a_result_that_is_remembered_is_the_one_that_would_be_computed(seed: int) -> None:
    rng, remembered = random.Random(seed), Remembered[int, str, Text | None]()
    files: dict[str, Text] = {}
    inputs = {key: rng.randrange(3) for key in "abc"}
    computed = 0

    def compute(key: str, look: object) -> int:
        nonlocal computed
        computed += 1
        assert callable(look)
        first = look(f"{key}{inputs[key]}")
        if first is None:
            return -1
        more = look(f"more{first.said}")  # what is read tells what to read next
        return inputs[key] + (more or first).said

    for _ in range(200):
        change = rng.random()
        if change < 0.3:
            inputs[rng.choice("abc")] = rng.randrange(3)
        elif change < 0.6:
            files[rng.choice(NAMES)] = Text(rng.randrange(2))
        elif change < 0.7 and files:
            del files[rng.choice(sorted(files))]
        elif change < 0.75:
            remembered.forget_all_but(["a"])
        for key in "abc":
            kept = remembered.of(key, (inputs[key],), files.get, lambda look, key=key: compute(key, look))
            assert kept == compute(key, files.get)
    assert computed < 200 * 3 * 2, "something was remembered"


def test_nothing_is_computed_while_nothing_changes() -> None:
    remembered, computed = Remembered[int, str, Text](), []
    text = Text(7)
    for _ in range(3):
        found = remembered.of("a", ([1], "x"), lambda _: text, lambda look: computed.append(1) or look("f").said)
        assert found == 7
    assert computed == [1]


EDITS: list[dict[str, Any]] = [
    {"contextSize": 1024},
    {"contextSize": "many"},
    {"extraArgs": ["--threads", "2"]},
    {"extraArgs": ["--rpc", "x"]},
    {"runtime": "mlx-server"},
    {"runtime": "vllm-swift"},
    {"modelRef": "b"},
    {"modelRef": "gone"},
    {"replicas": 0},
    {"speculativeDecoding": {"type": "draft", "draftModelRef": "b"}},
    {"priority": "high"},
    {"endpoint": {"port": 80}},
]


def with_status(items: dict[tuple[str, str], Any], number: int) -> dict[tuple[str, str], Any]:
    """The resources after a write of each one's status."""
    return {
        key: {**item, "status": {"n": number}, "metadata": {**item["metadata"], "resourceVersion": str(number)}}
        for key, item in items.items()
    }


def test_an_edit_makes_nobody_read_the_other_services_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ResourceFilter(Settings(kubeconfig="/k", runtimes="llama-server"), "mac")
    models = {("default", "a"): model("a", "/m.gguf")}
    services: dict[tuple[str, str], Any] = {("default", f"s{n}"): service(f"s{n}", "a") for n in range(3)}
    read: list[str] = []
    really = resources.read_service

    def noted(resource: Any, *more: Any) -> Any:
        read.append(resource["metadata"]["name"])
        return really(resource, *more)

    monkeypatch.setattr(resources, "read_service", noted)
    before = kept.read(Snapshot(1.0, services, True, models, {}, {}, {}), {})
    assert kept.read(Snapshot(2.0, services, True, models, {}, {}, {}), {}) is before
    edited = {**services["default", "s1"]["spec"], "contextSize": 1024}
    services = {**services, ("default", "s1"): {**services["default", "s1"], "spec": edited}}
    kept.read(Snapshot(3.0, services, True, models, {}, {}, {}), {})
    assert read == ["s0", "s1", "s2", "s1"]


@pytest.mark.parametrize("seed", range(cases(100)))
def test_services_that_are_read_pass_by_pass_are_those_that_would_be_read_anew(seed: int) -> None:
    rng, settings = random.Random(seed), Settings(kubeconfig="/k", runtimes="llama-server,mlx-server,vllm-swift")
    kept, records = ResourceFilter(settings, "mac"), dict[tuple[str, str], Record]()
    models: dict[tuple[str, str], Any] = {}
    services: dict[tuple[str, str], Any] = {}
    operator = False
    for generation in range(100):
        name = rng.choice("ab" if rng.random() < 0.4 else ["one", "two", "a.b", "a-b"])
        key = "default", name
        if name in "ab":
            spec = {"format": rng.choice(["gguf", "gguf", "mlx"]), "mmproj": rng.choice(["", "p.gguf"])}
            models = {**models, key: model(name, rng.choice(["/m.gguf", "hf://o/r:Q4", "/d"]), **spec)}
        else:
            services = {**services, key: service(name, "a", **rng.choice(EDITS))}
        found = services.get(key) or models.get(key)
        found["metadata"] |= {"uid": name, "generation": generation}
        if rng.random() < 0.3:
            services, models = with_status(services, generation), with_status(models, generation)
        if rng.random() < 0.1 and services:
            gone = rng.choice(sorted(services))
            services = {each: item for each, item in services.items() if each != gone}
        if rng.random() < 0.2 and services:
            runs = rng.choice(sorted(services))
            runtime, edition = rng.choice(["mlx-server", "vllm-swift"]), services[runs]["metadata"]["generation"]
            verdict = rng.choice([ADMITTED, Verdict(Standing.WAIT, "Downloading", "", 0.0)])
            records[runs] = a_record(runs[1], generation=edition, runtime=runtime, verdict=verdict)
        if rng.random() < 0.1 and records:
            del records[rng.choice(sorted(records))]
        operator = rng.choice([True, False]) if rng.random() < 0.1 else operator
        snapshot = Snapshot(1.0, services, True, models, {}, {}, {}, operator=operator)
        assert kept.read(snapshot, records) == ResourceFilter(settings, "mac").read(snapshot, records)


def test_of_services_that_come_at_once_the_older_is_first() -> None:
    """Of two that ask for one port, that one gets it."""
    kept = ResourceFilter(Settings(kubeconfig="/k", runtimes="llama-server"), "mac")
    models, services = {("default", "m"): model("m", "/m.gguf")}, dict[tuple[str, str], Any]()
    for day, names in enumerate(["ca", "dfbe"], 1):
        come = {("default", name): service(name, "m", containerPort=18100) for name in names}
        for hour, (_, name) in enumerate(come):
            at = f"2026-11-0{day}T0{hour}:00:00Z"
            come["default", name]["metadata"] |= {"creationTimestamp": at, "uid": name, "generation": 1}
        services = dict(sorted({**services, **come}.items()))
        found = kept.read(Snapshot(1.0, services, True, models, {}, {}, {}), {})
        assert "".join(name for _, name in found).endswith(names)


def test_a_model_that_is_not_there_is_answered_with_the_nearest_name_of_its_namespace() -> None:
    settings = Settings(kubeconfig="/k", runtimes="llama-server")
    models = {("default", "phi-4-mini"): model("phi-4-mini", "/m.gguf"), ("other", "phi4-mini"): {}}
    written = {("default", "one"): service("one", "phi4-mini"), ("default", "two"): service("two", "zzz")}
    for key, item in written.items():
        item["metadata"] |= {"uid": key[1], "generation": 1}
    snapshot = Snapshot(1.0, written, True, models, {}, {}, {}, operator=False)
    found = ResourceFilter(settings, "mac").read(snapshot, {})
    one, two = found["default", "one"], found["default", "two"]
    assert isinstance(one, Rejected) and one.message.endswith("or change the name (did you mean phi-4-mini?)")
    assert isinstance(two, Rejected) and two.message.endswith("or change the name")
