"""Names at the gateway: another namespace's service never gets the prompts of one that has a name, or had it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from metal_supervisor.gateway.access import AccessKey
from metal_supervisor.gateway.errors import GatewayError
from metal_supervisor.gateway.routing import Backend, ServiceTable, listing
from metal_supervisor.spec.name_claims import lost_names
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Key, Rejected, Service
from tests.support.gateway import Gateway, with_gateway
from tests.support.records import a_record
from tests.support.system import ISVC, eventually, service
from tests.unit.model_supervisord import asked_for

ANYBODY = AccessKey("all", "sha256:")


class Mac:
    """The services of a Mac, pass by pass, as the controller decides and the gateway reads."""

    def __init__(self) -> None:
        self._services = dict[Key, Service | Rejected]()
        self._records = dict[Key, Record]()

    def apply(self, namespace: str, name: str, *aliases: str, generation: int = 1) -> None:
        """Creates a service, later than those before it, or edits it."""
        key = namespace, name
        known = self._services.get(key)
        self._services[key] = replace(
            asked_for("a", 0, False),
            namespace=namespace,
            name=name,
            uid=f"{namespace}-{name}",
            generation=generation,
            aliases=aliases,
            created=known.created if known else f"2026-01-01T00:00:{len(self._services):02}Z",
        )
        self.one_pass()

    def reject(self, namespace: str, name: str) -> None:
        """Has a service rejected, as while its Model is missing."""
        found = self._services[namespace, name]
        self._services[namespace, name] = Rejected(
            namespace, name, found.uid, found.generation, "m", "ModelNotFound", "", created=found.created
        )
        self.one_pass()

    def delete(self, namespace: str, name: str) -> None:
        del self._services[namespace, name], self._records[namespace, name]
        self.one_pass()

    def one_pass(self) -> None:
        """What is remembered is in the records alone, as after a restart."""
        lost = lost_names(list(self._services.values()), list(self._records.values()))
        self._records = {
            key: a_record(
                each.name,
                each.namespace,
                uid=each.uid,
                generation=each.generation,
                aliases=each.aliases if isinstance(each, Service) else (),
                lost_names=lost.get(key, ()),
            )
            for key, each in self._services.items()
        }

    def table(self) -> ServiceTable:
        return ServiceTable(
            tuple(
                Backend(
                    each.program,
                    each.namespace,
                    each.name,
                    "llama-server",
                    True,
                    "Ready",
                    "Serving",
                    "",
                    "127.0.0.1",
                    1,
                    aliases=tuple(name for name in each.aliases if name not in each.lost_names),
                    lost_names=each.lost_names,
                )
                for each in self._records.values()
            )
        )

    def meant(self, name: str, key: AccessKey = ANYBODY) -> str:
        """The service that answers to a name, "" if none does."""
        try:
            (found,) = self.table().find(name, key.allows, key.at_home)
        except GatewayError as error:
            assert error.status == 404
            return ""
        return found.qualified


@pytest.fixture
def mac() -> Mac:
    return Mac()


@pytest.mark.parametrize("name", ["tiny", "default.tiny", "default/tiny"])
def test_an_equal_name_or_alias_of_another_namespace_takes_nothing_away(mac: Mac, name: str) -> None:
    mac.apply("default", "tiny")
    mac.apply("evil", "tiny", name)
    if "/" not in name:
        mac.apply("evil", name, "tiny")
    assert mac.meant(name) == "default/tiny"
    assert {row["id"] for row in listing(mac.table(), ANYBODY.allows)} >= {"tiny", "evil/tiny"}


@pytest.mark.parametrize("name", ["tiny", "default.tiny", "default/tiny"])
def test_a_name_is_nobodys_once_its_oldest_holder_is_deleted(mac: Mac, name: str) -> None:
    mac.apply("default", "tiny")
    mac.apply("evil", "tiny", name)
    mac.delete("default", "tiny")
    for _ in range(2):
        mac.one_pass()
        assert mac.meant(name) == ""
    assert mac.meant("evil/tiny") == "evil/tiny"
    mac.apply("evil", "tiny", name, generation=2)
    assert mac.meant(name) == ("" if "/" in name else "evil/tiny"), "edited: its owner wants the name"


def test_an_older_service_that_wants_a_name_later_does_not_take_it_from_its_holder(mac: Mac) -> None:
    mac.apply("evil", "older")
    mac.apply("team", "tiny")
    mac.apply("evil", "older", "tiny", generation=2)
    assert mac.meant("tiny") == "team/tiny"


def test_an_alias_with_a_namespace_in_it_never_answers_for_that_namespace(mac: Mac) -> None:
    mac.apply("evil", "bait", "default/victim", "Qwen/Qwen3-8B")
    assert mac.meant("default/victim") == ""
    assert mac.meant("Qwen/Qwen3-8B") == "evil/bait"
    mac.apply("evil", "bait", "default/victim", "evil/other", generation=2)
    assert (mac.meant("default/victim"), mac.meant("evil/other")) == ("", "evil/bait")


def test_an_owner_that_is_applied_again_has_its_name_before_one_that_lost_it(mac: Mac) -> None:
    mac.apply("default", "tiny")
    mac.apply("evil", "tiny")
    mac.delete("default", "tiny")
    mac.apply("default", "tiny")
    assert mac.meant("tiny") == "default/tiny"


def test_a_service_that_is_rejected_for_a_while_gets_no_name_by_it(mac: Mac) -> None:
    mac.apply("default", "tiny")
    mac.apply("evil", "bait", "tiny")
    mac.reject("evil", "bait")
    mac.delete("default", "tiny")
    mac.apply("evil", "bait", "tiny")
    assert mac.meant("tiny") == ""


def test_a_key_of_one_namespace_finds_that_namespaces_service_first(mac: Mac) -> None:
    mac.apply("default", "tiny")
    mac.apply("mine", "tiny")
    key = AccessKey("mine", "sha256:", services=("mine/*",))
    assert (mac.meant("tiny", key), mac.meant("tiny")) == ("mine/tiny", "default/tiny")


def test_a_key_for_a_short_name_opens_no_other_namespaces_service(mac: Mac) -> None:
    key = AccessKey("tiny", "sha256:", services=("tiny",))
    mac.apply("default", "tiny")
    mac.apply("evil", "tiny")
    assert mac.meant("tiny", key) == "default/tiny"
    assert mac.meant("evil/tiny", key) == ""
    mac.delete("default", "tiny")
    assert mac.meant("evil/tiny", key) == ""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with with_gateway(tmp_path_factory.mktemp("names"), "--namespace", "") as up:
        up.system.apply(up.system.tiny_model(), service("victim"))
        up.system.kube.request("POST", "/api/v1/namespaces", None, {"metadata": {"name": "evil"}})
        up.serves("victim")
        yield up


def test_a_running_gateway_keeps_a_deleted_services_names_from_another_namespace(gateway: Gateway) -> None:
    system = gateway.system
    evil = {"namespace": "evil", "annotations": {"metal-supervisor.io/aliases": "default/victim,default.victim"}}
    for item in (system.tiny_model(), service("victim")):
        item["metadata"] = {**item["metadata"], **evil}
        path = "models" if item["kind"] == "Model" else "inferenceservices"
        name = item["metadata"]["name"]
        system.kube.apply(f"{ISVC.rpartition('/namespaces/')[0]}/namespaces/evil/{path}/{name}", item, "test")
    gateway.serves("evil/victim")
    names = "victim", "default/victim", "default.victim"
    assert [gateway.chat(name)[0] for name in names] == [200, 200, 200]
    where = f"{ISVC.replace('/default/', '/evil/')}/victim"
    eventually(lambda: "NameTaken" in str(system.get(where).get("status")), 30, "the condition")
    system.delete("victim")
    eventually(lambda: gateway.state("evil/victim") == "loaded" and not system.engines()[1:], 30, "one service")
    assert [gateway.chat(name)[0] for name in names] == [404, 404, 404]
    controller = system.own_pid("controller")
    system.supervisorctl("restart", "controller")
    eventually(lambda: system.own_pid("controller") not in (0, controller), 30, "another controller")
    system.kube.request("PATCH", where, None, {"metadata": {"labels": {"x": "y"}}}, "application/merge-patch+json")
    assert [gateway.chat(name)[0] for name in names] == [404, 404, 404], "a label is no edit of the service"
    assert gateway.chat("evil/victim")[0] == 200
