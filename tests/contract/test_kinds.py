"""Services, EndpointSlices, Leases and Events: the rules that no schema says."""

from __future__ import annotations

import pytest

from tests.contract.api import MERGE, STRATEGIC, Space
from tests.contract.things import config_map, endpoint_slice, event, lease, service

TIME = "2026-01-01T00:00:00.000000Z"

# ---- Services ----------------------------------------------------------------------------------


def test_a_service_gets_an_address_for_life(space: Space) -> None:
    made = space.post("services", service("a")).body["spec"]
    address = made["clusterIP"]
    assert address.startswith("10.96.") and made["clusterIPs"] == [address]
    assert made == {
        "clusterIP": address, "clusterIPs": [address], "internalTrafficPolicy": "Cluster", "ipFamilies": ["IPv4"],
        "ipFamilyPolicy": "SingleStack", "sessionAffinity": "None", "type": "ClusterIP",
        "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}],
    }  # fmt: skip
    assert space.post("services", service("b")).body["spec"]["clusterIP"] != address
    for value in (None, ""):
        assert space.patch("services", "a", {"spec": {"clusterIP": value}}).body["spec"]["clusterIP"] == address
    assert space.put("services", "a", service("a", ports=[{"port": 81}])).body["spec"]["clusterIP"] == address
    for value in ("10.96.9.9", "None"):
        refused = space.patch("services", "a", {"spec": {"clusterIP": value}})
        assert refused.outline == (422, "Invalid") and "may not change once set" in refused.message
    taken = space.post("services", service("c", clusterIP=address))
    assert taken.outline == (422, "Invalid") and "provided IP is already allocated" in taken.message
    assert space.post("services", service("c", clusterIP="1.2.3.4")).causes == {"spec.clusterIPs": "FieldValueInvalid"}
    assert space.post("services", service("c", clusterIP="x")).causes == {"spec.clusterIPs[0]": "FieldValueInvalid"}


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("0c", ""),
        ("Bad", "a lowercase RFC 1123 label must consist of"),
        ("a_", "a lowercase RFC 1123 label must consist of"),
        ("a.b", "must not contain dots"),
        ("x" * 64, "must be no more than 63"),
    ],
)
def test_names_of_services(space: Space, name: str, complaint: str) -> None:
    reply = space.post("services", service(name))
    assert reply.code == (422 if complaint else 201)
    assert complaint in reply.message
    if complaint:
        assert reply.causes == {"metadata.name": "FieldValueInvalid"}


@pytest.mark.parametrize(
    ("spec", "causes"),
    [
        ({"ports": []}, {"spec.ports": "FieldValueRequired"}),
        (
            {"ports": [{"port": 0}]},
            {"spec.ports[0].port": "FieldValueInvalid", "spec.ports[0].targetPort": "FieldValueInvalid"},
        ),
        ({"ports": [{"port": 70000, "targetPort": 1}]}, {"spec.ports[0].port": "FieldValueInvalid"}),
        ({"ports": [{"port": 80, "name": "Bad"}]}, {"spec.ports[0].name": "FieldValueInvalid"}),
        (
            {"ports": [{"port": 80}, {"port": 81}]},
            {"spec.ports[0].name": "FieldValueRequired", "spec.ports[1].name": "FieldValueRequired"},
        ),
        (
            {"ports": [{"port": 80, "name": "a"}, {"port": 81, "name": "a"}]},
            {"spec.ports[1].name": "FieldValueDuplicate"},
        ),
        ({"ports": [{"port": 80, "name": "a"}, {"port": 80, "name": "b"}]}, {"spec.ports[1]": "FieldValueDuplicate"}),
        ({"ports": [{"port": 80, "protocol": "XYZ"}]}, {"spec.ports[0].protocol": "FieldValueNotSupported"}),
        ({"ports": [{"port": 80, "targetPort": "Bad_"}]}, {"spec.ports[0].targetPort": "FieldValueInvalid"}),
        ({"ports": [{"port": 80, "targetPort": "x" * 16}]}, {"spec.ports[0].targetPort": "FieldValueInvalid"}),
        ({"ports": [{"port": 80, "nodePort": 30500}]}, {"spec.ports[0].nodePort": "FieldValueForbidden"}),
        ({"type": "NodePort", "ports": [{"port": 1, "nodePort": 9}]}, {"spec.ports[0].nodePort": "FieldValueInvalid"}),
        ({"ports": [{"port": 80, "appProtocol": "no good"}]}, {"spec.ports[0].appProtocol": "FieldValueInvalid"}),
        ({"type": "Odd"}, {"spec.type": "FieldValueNotSupported"}),
        ({"sessionAffinity": "Odd"}, {"spec.sessionAffinity": "FieldValueNotSupported"}),
        ({"selector": {"a": "no good!"}}, {"spec.selector": "FieldValueInvalid"}),
        ({"ipFamilies": ["IPv6"]}, {"spec.ipFamilies[0]": "FieldValueInvalid"}),
        ({"ipFamilyPolicy": "RequireDualStack"}, {"spec.ipFamilyPolicy": "FieldValueInvalid"}),
        ({"type": "ExternalName", "ports": []}, {"spec.externalName": "FieldValueRequired"}),
    ],
)  # fmt: skip
def test_services_that_make_no_sense(space: Space, spec: dict[str, object], causes: dict[str, str]) -> None:
    refused = space.post("services", service(**spec))
    assert refused.outline == (422, "Invalid") and refused.causes == causes


def test_node_ports_come_and_go_with_the_type(space: Space) -> None:
    made = space.post("services", service(type="NodePort")).body["spec"]
    port = made["ports"][0]["nodePort"]
    assert 30000 <= port < 32768 and made["externalTrafficPolicy"] == "Cluster"
    kept = space.patch("services", "s", {"spec": {"ports": [{"port": 80, "targetPort": "http"}]}}, STRATEGIC)
    assert kept.body["spec"]["ports"][0]["nodePort"] == port
    hidden = space.patch("services", "s", {"spec": {"type": "ClusterIP"}}).body["spec"]
    assert "nodePort" not in hidden["ports"][0] and "externalTrafficPolicy" not in hidden
    taken = space.post("services", service("t", type="NodePort")).body["spec"]["ports"][0]["nodePort"]
    again = space.post("services", service("u", type="NodePort", ports=[{"port": 80, "nodePort": taken}]))
    assert again.outline == (422, "Invalid") and "provided port is already allocated" in again.message


def test_a_load_balancer_without_node_ports_may_become_anything_else(space: Space) -> None:
    space.post("services", service(type="LoadBalancer", allocateLoadBalancerNodePorts=False))
    plain = space.patch("services", "s", {"spec": {"type": "ClusterIP"}})
    assert plain.code == 200 and "nodePort" not in plain.body["spec"]["ports"][0]
    assert "allocateLoadBalancerNodePorts" not in plain.body["spec"]


def test_what_is_immutable_stays_so(space: Space) -> None:
    space.post("configmaps", {**config_map("c", a="1"), "immutable": True})
    for change in ({"immutable": False}, {"immutable": None}):
        assert space.patch("configmaps", "c", change).causes == {"immutable": "FieldValueForbidden"}
    assert space.patch("configmaps", "c", {"data": {"a": "2"}}).causes == {"data": "FieldValueForbidden"}
    assert space.patch("configmaps", "c", {"metadata": {"labels": {"a": "b"}}}).code == 200
    space.post("secrets", {"metadata": {"name": "s"}, "stringData": {"a": "1"}})
    assert space.patch("secrets", "s", {"type": "example.test/t"}).causes == {"type": "FieldValueInvalid"}
    assert space.patch("secrets", "s", {"stringData": {"a": "2"}}).code == 200


def test_a_headless_service_needs_no_ports(space: Space) -> None:
    made = space.post("services", service(clusterIP="None", ports=[])).body["spec"]
    assert made["clusterIP"] == "None" and made["clusterIPs"] == ["None"] and "ports" not in made


# ---- EndpointSlices ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "kind", "complaint"),
    [
        ("10.0.0.1", "IPv4", ""),
        ("239.1.1.1", "IPv4", ""),
        ("255.255.255.255", "IPv4", ""),
        ("2001:db8::1", "IPv6", ""),
        ("10.0.0.1", "FQDN", ""),
        ("127.0.0.1", "IPv4", "may not be in the loopback range (127.0.0.0/8, ::1/128)"),
        ("::1", "IPv6", "may not be in the loopback range (127.0.0.0/8, ::1/128)"),
        ("169.254.1.1", "IPv4", "may not be in the link-local range (169.254.0.0/16, fe80::/10)"),
        ("fe80::1", "IPv6", "may not be in the link-local range (169.254.0.0/16, fe80::/10)"),
        ("224.0.0.1", "IPv4", "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"),
        ("ff02::1", "IPv6", "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"),
        ("0.0.0.0", "IPv4", "may not be unspecified (0.0.0.0)"),
        ("::", "IPv6", "may not be unspecified (::)"),
        ("010.0.0.1", "IPv4", "must not have leading 0s"),
        ("::ffff:10.0.0.1", "IPv6", "must not be an IPv4-mapped IPv6 address"),
        ("10.0.0.1", "IPv6", "must be an IPv6 address"),
        ("2001:db8::1", "IPv4", "must be an IPv4 address"),
        ("2001:DB8::1", "IPv6", 'must be in canonical form ("2001:db8::1")'),
        ("here", "IPv4", "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"),
        ("10.0.0.1/24", "IPv4", "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"),
        ("Bad_", "FQDN", "a lowercase RFC 1123 subdomain must consist of"),
    ],
)
def test_addresses_of_endpoints(space: Space, address: str, kind: str, complaint: str) -> None:
    reply = space.post("endpointslices", endpoint_slice(address, kind))
    assert reply.code == (422 if complaint else 201)
    assert complaint in reply.message
    if complaint:
        (field,) = reply.causes
        assert field.startswith("endpoints[0].addresses")


def test_slices_have_defaults_and_say_null_for_nothing(space: Space) -> None:
    made = space.post("endpointslices", endpoint_slice()).body
    assert made["ports"] == [{"name": "", "port": 80, "protocol": "TCP"}]
    assert made["endpoints"] == [{"addresses": ["10.1.2.3"], "conditions": {}}]
    empty = space.put("endpointslices", "e", endpoint_slice(endpoints=[], ports=[])).body
    assert empty["endpoints"] is None and empty["ports"] is None
    assert space.get("endpointslices").body["items"][0]["endpoints"] is None


@pytest.mark.parametrize(
    ("more", "causes"),
    [
        ({"endpoints": [{"addresses": []}]}, {"endpoints[0].addresses": "FieldValueRequired"}),
        ({"ports": [{"port": 80, "name": "Bad_"}]}, {"ports[0].name": "FieldValueInvalid"}),
        ({"ports": [{"port": 80}, {"port": 81}]}, {"ports[1].name": "FieldValueDuplicate"}),
        ({"ports": [{"port": 80, "protocol": "X"}]}, {"ports[0].protocol": "FieldValueNotSupported"}),
    ],
)
def test_slices_that_make_no_sense(space: Space, more: dict[str, object], causes: dict[str, str]) -> None:
    refused = space.post("endpointslices", endpoint_slice(**more))  # type: ignore[arg-type]
    assert refused.outline == (422, "Invalid") and refused.causes == causes


def test_the_kind_of_the_addresses_is_for_life(space: Space) -> None:
    space.post("endpointslices", endpoint_slice())
    refused = space.put("endpointslices", "e", endpoint_slice("2001:db8::1", "IPv6"))
    assert refused.outline == (422, "Invalid") and refused.causes == {"addressType": "FieldValueInvalid"}


# ---- Leases ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rest", "element"),
    [
        ("2026-01-01T00:00:00Z", "Z", ".000000"),
        ("2026-01-01T00:00:00.123Z", ".123Z", ".000000"),
        ("2026-01-01T00:00:00.000000", "", "Z07:00"),
        ("now", "now", "2006"),
        ("", "", "2006"),
    ],
)
def test_lease_times_have_microseconds(space: Space, text: str, rest: str, element: str) -> None:
    refused = space.post("leases", lease(renewTime=text))
    assert refused.outline == (400, "BadRequest")
    said = f'parsing time "{text}" as "2006-01-02T15:04:05.000000Z07:00": cannot parse "{rest}" as "{element}"'
    assert refused.message == f'Lease in version "v1" cannot be handled as a Lease: {said}'
    space.post("leases", lease(renewTime=TIME))
    patched = space.patch("leases", "l", {"spec": {"renewTime": text}})
    assert patched.outline == (422, "Invalid") and patched.causes == {"patch": "FieldValueInvalid"}


def test_lease_times_are_kept_in_utc(space: Space) -> None:
    made = space.post("leases", lease(renewTime="2026-01-01T00:00:00.000000+02:00", acquireTime=TIME)).body["spec"]
    assert made == {"renewTime": "2025-12-31T22:00:00.000000Z", "acquireTime": TIME}
    assert space.post("leases", {"metadata": {"name": "bare"}}).body["spec"] == {}


def test_leases_that_make_no_sense(space: Space) -> None:
    for field, value in (("leaseDurationSeconds", 0), ("leaseDurationSeconds", -1), ("leaseTransitions", -1)):
        refused = space.post("leases", lease(**{field: value}))
        assert refused.outline == (422, "Invalid") and refused.causes == {f"spec.{field}": "FieldValueInvalid"}
    assert space.post("leases", lease(leaseDurationSeconds="x")).outline == (400, "BadRequest")


# ---- Events ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "causes"),
    [
        ({"action": ""}, {"action": "FieldValueRequired"}),
        ({"reason": ""}, {"reason": "FieldValueRequired"}),
        ({"reportingInstance": ""}, {"reportingInstance": "FieldValueRequired"}),
        ({"reportingController": "no good"}, {"reportingController": "FieldValueInvalid"}),
        ({"eventTime": None}, {"eventTime": "FieldValueRequired"}),
        ({"type": "Odd"}, {"type": "FieldValueInvalid"}),
        ({"note": "x" * 1025}, {"message": "FieldValueInvalid"}),
        ({"reason": "x" * 129}, {"reason": "FieldValueInvalid"}),
        ({"action": "x" * 129}, {"action": "FieldValueInvalid"}),
        ({"regarding": {"kind": "Pod", "name": "p"}}, {"involvedObject.namespace": "FieldValueInvalid"}),
        ({"series": {"count": 1, "lastObservedTime": TIME}}, {"series.count": "FieldValueInvalid"}),
        ({"series": {"count": 2}}, {"series.lastObservedTime": "FieldValueRequired"}),
        ({"deprecatedCount": 2}, {"count": "FieldValueInvalid"}),
    ],
)
def test_events_that_say_too_little_or_too_much(space: Space, more: dict[str, object], causes: dict[str, str]) -> None:
    refused = space.post("events", event(space.name, **more))
    assert refused.outline == (422, "Invalid") and refused.causes == causes
    assert refused.message.startswith('Event "e" is invalid: ')


def test_an_event_without_microseconds_is_none(space: Space) -> None:
    refused = space.post("events", event(space.name, eventTime="2026-01-01T00:00:00Z"))
    assert refused.outline == (400, "BadRequest") and 'cannot parse "Z" as ".000000"' in refused.message


def test_of_an_event_only_the_series_changes(space: Space) -> None:
    assert space.post("events", event(space.name)).code == 201
    assert space.post("events", event(space.name)).outline == (409, "AlreadyExists")
    for field, value in (
        ("note", "other"), ("action", "B"), ("reason", "Q"), ("type", "Warning"), ("reportingInstance", "j"),
        ("eventTime", "2026-01-01T00:00:01.000000Z"), ("related", {"kind": "Pod", "name": "z"}),
    ):  # fmt: skip
        refused = space.patch("events", "e", {field: value})
        name = {"note": "message"}.get(field, field)
        assert refused.outline == (422, "Invalid") and refused.causes == {name: "FieldValueInvalid"}
    applied = space.apply("events", event(space.name, note="other"), "m", force="true")
    assert applied.outline == (422, "Invalid") and "message" in applied.causes
    series = {"series": {"count": 2, "lastObservedTime": TIME}}
    assert space.patch("events", "e", series).body["series"]["count"] == 2
    assert space.patch("events", "e", {"series": {"count": 3}}).body["series"]["count"] == 3
    assert space.patch("events", "e", {"metadata": {"labels": {"a": "b"}}}).code == 200


def test_an_event_has_two_faces(space: Space) -> None:
    made = space.post("events", event(space.name)).body
    assert made["deprecatedFirstTimestamp"] is None and made["deprecatedSource"] == {}
    older = f"/api/v1/namespaces/{space.name}/events"
    core = space.api.request("GET", f"{older}/e").body
    assert (core["apiVersion"], core["message"], core["involvedObject"]["name"]) == ("v1", "n", "p")
    assert (core["reportingComponent"], core["source"], core["firstTimestamp"]) == ("example.test/c", {}, None)
    for path, field in ((older, "involvedObject.name"), (space.path("events"), "regarding.name")):
        assert len(space.api.request("GET", path, fieldSelector=f"{field}=p,reason=R").body["items"]) == 1
        assert space.api.request("GET", path, fieldSelector=f"{field}=q").body["items"] == []
    assert space.api.request("GET", older, fieldSelector="bogus=R").outline == (400, "BadRequest")


def test_an_event_of_the_old_form_may_count(space: Space) -> None:
    older = f"/api/v1/namespaces/{space.name}/events"
    body = {
        "metadata": {"name": "old"}, "reason": "R", "message": "m", "type": "Normal", "count": 1,
        "involvedObject": {"kind": "Pod", "name": "p", "namespace": space.name}, "source": {"component": "c"},
        "firstTimestamp": "2026-01-01T00:00:00Z", "lastTimestamp": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    assert space.api.request("POST", older, body).body["eventTime"] is None
    assert space.api.request("PATCH", f"{older}/old", {"count": 2}, kind=MERGE).body["count"] == 2
    for name in ("firstTimestamp", "lastTimestamp"):
        # Clients with types could read no Event any more.
        assert space.api.request("POST", older, {**body, "metadata": {"name": "new"}, name: "now"}).code in (400, 422)
    assert space.get("events", "old").body["deprecatedCount"] == 2
