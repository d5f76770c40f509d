"""Services, EndpointSlices, Leases and Events: the rules that no schema says."""

from __future__ import annotations

import pytest

from tests.contract.api import MERGE, Space
from tests.contract.things import endpoint_slice, event, lease, service

TIME = "2026-01-01T00:00:00.000000Z"

# ---- Services ----------------------------------------------------------------------------------


def test_a_service_gets_an_address_for_life(space: Space) -> None:
    made = space.post("services", service("a")).body["spec"]
    address = made["clusterIP"]
    assert address.startswith("10.96.") and made["clusterIPs"] == [address]
    assert (
        made.items()
        >= {
            "clusterIP": address,
            "clusterIPs": [address],
            "sessionAffinity": "None",
            "type": "ClusterIP",
            "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}],
        }.items()
    )
    assert space.post("services", service("b")).body["spec"]["clusterIP"] != address
    for value in (None, ""):
        assert space.patch("services", "a", {"spec": {"clusterIP": value}}).body["spec"]["clusterIP"] == address
    assert space.put("services", "a", service("a", ports=[{"port": 81}])).body["spec"]["clusterIP"] == address
    for value in ("10.96.9.9", "None"):
        refused = space.patch("services", "a", {"spec": {"clusterIP": value}})
        assert refused.outline == (422, "Invalid") and "may not change once set" in refused.message


@pytest.mark.parametrize(("name", "code"), [("0c", 201), ("Bad", 422), ("a_", 422), ("x" * 254, 422)])
def test_names_of_services(space: Space, name: str, code: int) -> None:
    reply = space.post("services", service(name))
    assert reply.code == code
    if code == 422:
        assert reply.causes == {"metadata.name": "FieldValueInvalid"}


@pytest.mark.parametrize(
    ("spec", "causes"),
    [
        ({"ports": [{"port": 70000, "targetPort": 1}]}, {"spec.ports[0].port": "FieldValueInvalid"}),
        ({"ports": [{"port": 80, "name": "a"}, {"port": 80, "name": "b"}]}, {"spec.ports[1]": "FieldValueDuplicate"}),
        ({"ports": [{"port": 80, "protocol": "XYZ"}]}, {"spec.ports[0].protocol": "FieldValueNotSupported"}),
        ({"type": "Odd"}, {"spec.type": "FieldValueNotSupported"}),
        ({"sessionAffinity": "Odd"}, {"spec.sessionAffinity": "FieldValueNotSupported"}),
    ],
)
def test_services_that_make_no_sense(space: Space, spec: dict[str, object], causes: dict[str, str]) -> None:
    refused = space.post("services", service(**spec))
    assert refused.outline == (422, "Invalid") and refused.causes == causes


def test_a_headless_service_needs_no_ports(space: Space) -> None:
    made = space.post("services", service(clusterIP="None", ports=[])).body["spec"]
    assert made["clusterIP"] == "None" and made["clusterIPs"] == ["None"] and not made.get("ports")


# ---- EndpointSlices ----------------------------------------------------------------------------


def test_slices_have_defaults(space: Space) -> None:
    made = space.post("endpointslices", endpoint_slice()).body
    assert made["ports"] == [{"name": "", "port": 80, "protocol": "TCP"}]
    assert made["endpoints"] == [{"addresses": ["10.1.2.3"], "conditions": {}}]
    empty = space.put("endpointslices", "e", endpoint_slice(endpoints=[], ports=[])).body
    assert not empty["endpoints"] and not empty["ports"]


@pytest.mark.parametrize(
    ("more", "causes"),
    [
        ({"ports": [{"port": 80, "protocol": "X"}]}, {"ports[0].protocol": "FieldValueNotSupported"}),
    ],
)
def test_slices_that_make_no_sense(space: Space, more: dict[str, object], causes: dict[str, str]) -> None:
    refused = space.post("endpointslices", endpoint_slice(**more))  # type: ignore[arg-type]
    assert refused.outline == (422, "Invalid") and refused.causes == causes


# ---- Leases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["2026-01-01T00:00:00.000000", "2026-02-30T00:00:00.000000Z", "now", ""])
def test_lease_times_are_times(space: Space, text: str) -> None:
    refused = space.post("leases", lease(renewTime=text))
    assert refused.code in (400, 422) and f'"{text}"' in refused.message
    assert space.post("leases", lease(renewTime=TIME)).body["spec"] == {"renewTime": TIME}
    patched = space.patch("leases", "l", {"spec": {"renewTime": text}})
    assert patched.outline == (422, "Invalid")
    assert not space.post("leases", {"metadata": {"name": "bare"}}).body.get("spec")


def test_leases_that_make_no_sense(space: Space) -> None:
    for field, value in (("leaseDurationSeconds", 0), ("leaseDurationSeconds", -1), ("leaseTransitions", -1)):
        refused = space.post("leases", lease(**{field: value}))
        assert refused.outline == (422, "Invalid") and refused.causes == {f"spec.{field}": "FieldValueInvalid"}
    assert space.post("leases", lease(leaseDurationSeconds="x")).code in (400, 422)


# ---- Events ------------------------------------------------------------------------------------


def test_an_event_without_a_time_is_refused(space: Space) -> None:
    refused = space.post("events", event(space.name, eventTime="now"))
    assert refused.code in (400, 422) and '"now"' in refused.message


def test_an_event_has_two_faces(space: Space) -> None:
    assert space.post("events", event(space.name)).code == 201
    older = f"/api/v1/namespaces/{space.name}/events"
    core = space.api.request("GET", f"{older}/e").body
    assert (core["apiVersion"], core["message"], core["involvedObject"]["name"]) == ("v1", "n", "p")
    assert core["reportingComponent"] == "example.test/c"
    for path, field in ((older, "involvedObject.name"), (space.path("events"), "regarding.name")):
        assert len(space.api.request("GET", path, fieldSelector=f"{field}=p,reason=R").body["items"]) == 1
        assert space.api.request("GET", path, fieldSelector=f"{field}=q").body["items"] == []
    assert space.api.request("GET", older, fieldSelector="bogus=R").outline == (400, "BadRequest")


def test_an_event_of_the_old_form_may_count(space: Space) -> None:
    older = f"/api/v1/namespaces/{space.name}/events"
    body = {
        "metadata": {"name": "old"},
        "reason": "R",
        "message": "m",
        "type": "Normal",
        "count": 1,
        "involvedObject": {"kind": "Pod", "name": "p", "namespace": space.name},
        "source": {"component": "c"},
        "firstTimestamp": "2026-01-01T00:00:00Z",
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    assert space.api.request("POST", older, body).code == 201
    assert space.api.request("PATCH", f"{older}/old", {"count": 2}, kind=MERGE).body["count"] == 2
    for name in ("firstTimestamp", "lastTimestamp"):
        # Clients with types could read no Event any more.
        assert space.api.request("POST", older, {**body, "metadata": {"name": "new"}, name: "now"}).code in (400, 422)
    assert space.get("events", "old").body["deprecatedCount"] == 2
