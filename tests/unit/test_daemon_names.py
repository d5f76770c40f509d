"""Names on a shared daemon: which of the services that claim one the daemon serves under it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metal_supervisor.runtimes import RUNTIMES, omlx
from metal_supervisor.spec.name_claims import on_daemons
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Service
from tests.support.records import a_record
from tests.unit.model_supervisord import asked_for


def service(name: str, model: str = "phi", created: str = "1", **more: Any) -> Service:
    asked = asked_for("a", 0, False)
    found = replace(asked.model, name=model, source=more.pop("source", "/m"))
    return replace(asked, name=name, uid=f"uid-{name}", model=found, created=created, **{"runtime": "ollama", **more})


def wanted(service: Service) -> tuple[str, ...]:
    shared = RUNTIMES[service.runtime].shared
    assert shared is not None
    return shared.names(service)


class Mac:
    """The services of a Mac, pass by pass; what is remembered is in the records alone."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def one_pass(self, *services: Service) -> dict[str, tuple[str, ...]]:
        """Service -> its further names. The condition of a service names what it has lost."""
        found = on_daemons(services, self._records, wanted)
        self._records = [
            a_record(each.name, each.namespace, uid=each.uid, daemon=each.runtime, daemon_names=each.daemon_names)
            for each in found.values()
        ]
        for each in found.values():
            lost = [name for name in wanted(each) if name not in (each.name, *each.daemon_names)]
            assert [reason for reason, _ in each.not_granted] == ["NameTaken"] * len(lost)
            assert all(name in text for name, (_, text) in zip(lost, each.not_granted, strict=True))
        return {each.name: each.daemon_names for each in found.values()}


OLD = service("old")
NEW = service("new", created="2")


@pytest.fixture
def mac() -> Mac:
    return Mac()


@pytest.mark.parametrize("services", [(OLD, NEW), (NEW, OLD)])
def test_the_older_of_two_services_keeps_their_models_name(mac: Mac, services: tuple[Service, ...]) -> None:
    for _ in range(2):
        assert mac.one_pass(*services) == {"old": ("phi",), "new": ()}
    assert mac.one_pass(NEW) == {"new": ("phi",)}


def test_a_holder_keeps_a_name_that_an_older_service_claims_later(mac: Mac) -> None:
    mac.one_pass(replace(OLD, model=replace(OLD.model, name="other")), NEW)
    for _ in range(2):
        assert mac.one_pass(OLD, NEW) == {"old": (), "new": ("phi",)}


def test_a_services_own_name_comes_before_the_models_name_of_an_older_one(mac: Mac) -> None:
    mac.one_pass(OLD)
    assert mac.one_pass(OLD, service("phi", "phi", "3")) == {"old": (), "phi": ()}


def test_another_daemon_is_no_rival(mac: Mac) -> None:
    elsewhere = replace(NEW, runtime="omlx", model=replace(NEW.model, source="/"))
    assert mac.one_pass(OLD, elsewhere) == {"old": ("phi",), "new": ("phi",)}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("/models/Qwen3-8B", ("phi", "Qwen3-8B")),
        ("/models/Qwen3-8B/", ("phi", "Qwen3-8B")),
        ("hf://mlx-community/Qwen3-8B", ("phi", "Qwen3-8B")),
        ("/models/phi", ("phi",)),
        ("/models/a b", ("phi",)),
        ("/models/..", ("phi",)),
        ("/", ("phi",)),
        ("/m/" + "x" * 129, ("phi",)),
    ],
)
def test_omlx_serves_a_model_under_the_base_name_of_its_directory(source: str, names: tuple[str, ...]) -> None:
    assert omlx.names(service("tiny", source=source)) == names


def test_names_that_differ_in_case_alone_are_one(mac: Mac) -> None:
    upper = service("b", created="2", runtime="omlx", source="/m/OLD")
    assert mac.one_pass(replace(OLD, runtime="omlx"), upper)["b"] == ()
