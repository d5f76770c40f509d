"""Checks of the cluster: our kinds, its clock, withdrawal of a silent Mac; and of this Mac's address and ports."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Sequence

from metal_supervisor.cluster.credentials import BadKubeconfig
from metal_supervisor.cluster.kube import Kube, KubeError
from metal_supervisor.cluster.manifests import MANAGED_BY, SLICE_MANAGER, api_path
from metal_supervisor.cluster.status_mode import age_s
from metal_supervisor.doctor.findings import Check, Finding, Found, fail, ok, unasked, unknown, warn
from metal_supervisor.doctor.surroundings import ASK_S, Surroundings
from metal_supervisor.host import addresses, local_status, machine, processes
from metal_supervisor.host.machine import Interface
from metal_supervisor.placement.leases import KIND, NODE, REAPER_LEASE
from metal_supervisor.settings.loader import conf_dir
from metal_supervisor.spec.resources import GROUP, VERSION
from metal_supervisor.spec.types import Json
from metal_supervisor.state import gateway_note

KINDS = ("inferenceservices", "models")
SKEW_WARN_S = 10.0
SKEW_FAIL_S = 300.0
SILENT_S = 300.0
MOST_OTHERS = 6


def judge_kinds(versions: Sequence[str], served: Sequence[str]) -> Finding:
    """Finding about our kinds. `versions`: of our API group, none if the group is unknown; `served`: resources of our
    version.
    """
    install = f"kubectl apply --server-side -f {shlex.quote(str(conf_dir() / 'crds'))}"
    install += " (not beside LLMKube's operator, which brings its own)"
    if not versions:
        return fail(f"{GROUP} is not installed: the cluster knows neither Model nor InferenceService", install)
    if VERSION not in versions:
        return fail(f"{GROUP} is there in {', '.join(versions)}, and we speak {VERSION}", install)
    missing = [each for each in KINDS if each not in served]
    if missing:
        return fail(f"{GROUP}/{VERSION} lacks {', '.join(missing)}", install)
    return ok(f"{', '.join(KINDS)} of {GROUP} in {', '.join(versions)}")


def _kinds(around: Surroundings) -> Found:
    kube = around.link.kube
    if kube is None:
        return unasked(around.link.problem)
    try:
        group = kube.request("GET", f"/apis/{GROUP}")
        versions = [str(each.get("version")) for each in group.get("versions") or []]
        served = kube.request("GET", f"/apis/{GROUP}/{VERSION}").get("resources") or [] if VERSION in versions else []
    except KubeError as error:
        if error.code != 404:
            return unknown(str(error))
        versions, served = [], []
    return [judge_kinds(versions, [str(each.get("name")) for each in served]), *_namespace(kube, around)]


def _namespace(kube: Kube, around: Surroundings) -> Sequence[Finding]:
    """A failure if the watched namespace does not exist; nothing if it does, or that is unknown."""
    name = around.settings.namespace
    try:
        if name:
            kube.request("GET", f"/api/v1/namespaces/{name}")
    except KubeError as error:
        if error.code == 404:
            text = f"the cluster has no namespace {name!r}, so it has no services"
            return [fail(text, f"kubectl create namespace {shlex.quote(name)}, or correct --namespace")]
    return []


def _clock(around: Surroundings) -> Found:
    if around.settings.embedded:
        return []
    if around.link.kube is None:
        return unasked(around.link.problem)
    offset_s = around.link.kube.clock_offset_s  # the server's minus this machine's, within a second
    if abs(offset_s) < SKEW_WARN_S:
        return ok("this Mac's clock and the API server's agree")
    text = f"this Mac's clock is {abs(offset_s):.0f} s {'behind' if offset_s > 0 else 'ahead of'} the API server's"
    fix = "set the date and time automatically (System Settings > General > Date & Time); else look at the server's"
    if abs(offset_s) >= SKEW_FAIL_S:
        return fail(f"{text}: tokens and certificates seem not valid yet, or over", fix)
    return warn(text, fix)


def _watch(around: Surroundings) -> Found:
    """Withdrawal of this Mac's endpoints if it falls silent: by other Macs, or by the reaper."""
    kube, space = around.link.kube, around.settings.namespace
    if around.settings.embedded:
        return []
    if kube is None:
        return unasked(around.link.problem)
    try:
        leases = kube.request("GET", api_path("leases", space), {"labelSelector": KIND}).get("items") or []
        served = space or next((each["metadata"]["namespace"] for each in leases), "default")
        fenced = is_fenced(kube, served)
    except KubeError as error:
        return unknown(str(error))
    server_now = around.clock() + kube.clock_offset_s
    macs, awake, reaper = set(), set(), False
    for each in leases:
        metadata, spec = each.get("metadata") or {}, each.get("spec") or {}
        renewed = age_s(str(spec.get("renewTime") or ""), server_now) < SILENT_S
        if (metadata.get("labels") or {}).get(KIND) == "node" and spec.get("holderIdentity"):
            macs.add(spec["holderIdentity"])
            awake |= {spec["holderIdentity"]} if renewed else set()
        if metadata.get("name") == REAPER_LEASE:
            reaper = renewed
    others = awake - {_own_name(around)}  # the Lease of a Mac that is off for good stays
    if reaper:
        return ok(f"the reaper runs, for {len(macs)} Macs")
    if others and not fenced:
        return ok(f"{len(others) + 1} Macs watch over each other")
    why = "the fence leaves their withdrawal to the reaper, and no reaper runs" if fenced else "no other Mac, no reaper"
    text = f"this Mac's endpoints would stay if it fell silent: {why}"
    where = shlex.quote(str(conf_dir() / "reaper" / "reaper.yaml"))
    return warn(text, f"sed 's/namespace: llm/namespace: {served}/' {where} | kubectl apply -f -")


def is_fenced(kube: Kube, namespace: str) -> bool:
    """True if admission refuses slices of another Mac (conf/rbac/fence.yaml), by a dry run. Raises KubeError."""
    metadata = {"name": "doctor", "labels": {NODE: "reaper", SLICE_MANAGER: MANAGED_BY}}  # no Mac has that name
    body: Json = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": "IPv4",
        "endpoints": [],
    }
    try:
        kube.request("POST", api_path("endpointslices", namespace), {"dryRun": "All"}, body)
    except KubeError as error:
        if error.code in (403, 404, 409):  # `rights` reports missing rights
            return False
        if error.code != 422:
            raise
        return True
    return False


def _own_name(around: Surroundings) -> str:
    """This Mac's name in the cluster, "" if none has been chosen yet."""
    if around.settings.node_name:
        return around.settings.node_name
    try:
        return (around.settings.state_path / "node").read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def why_not(each: Interface) -> str:
    """Reason why an address of this machine was not chosen."""
    address = ipaddress.ip_address(each.address)
    if not each.up:
        return "down"
    if address.is_loopback or address.is_link_local:
        return "loopback" if address.is_loopback else "link-local"
    if any(address in network for network in addresses.VIRTUAL):
        return "of virtual machines or containers"
    return "not routable" if machine.address_problem(each.address, allow_loopback=False) else "not on the way"


def _address(around: Surroundings) -> Found:
    embedded = around.settings.embedded
    try:
        server = "" if embedded else around.chosen().first_hop
    except BadKubeconfig:
        return unknown("the kubeconfig cannot be used")
    choice = around.advertised(around.settings.host_ip, server, embedded)
    if choice.problem:
        return fail(choice.problem, "set --host-ip to an address of this Mac that the cluster's pods reach")
    left = [each for each in around.interfaces() if each.address != choice.address]
    others = [f"{each.address} ({each.name}: {why_not(each)})" for each in left]
    more = f" and {len(others) - MOST_OTHERS} more" if len(others) > MOST_OTHERS else ""
    instead = f"; not {', '.join(others[:MOST_OTHERS])}{more}" if others and not embedded else ""
    if choice.note:
        return warn(f"{choice.note}{instead}", "correct --host-ip, unless that address is forwarded to this Mac")
    return ok(f"pods are told {choice.address}, by {choice.origin}{instead}")


def _held_ports(around: Surroundings) -> tuple[int, dict[str, tuple[int, str]]]:
    """(number of our ports, owner -> (port, other process that holds it)), as of now."""
    settings, state = around.settings, around.directory
    table = around.table() or {}
    notes = state.run_notes()
    sidecar = [table["sidecar"].pid] if "sidecar" in table else []
    owners = {"the sidecar": (settings.port, "127.0.0.1", sidecar)}
    if settings.metrics_listen:
        address, port = settings.metrics_address
        owners["the metrics"] = port, address, sidecar
    if settings.gateway_on:
        address, port = settings.gateway_address
        pids = [table[name].pid for name in gateway_note.PROGRAMS if name in table]
        owners["the gateway"] = port, address, pids
    for program, record in around.records().items():
        if record.port and not record.daemon:
            pids = [table[program].pid] if program in table else []
            pids += [notes[program].pid] if program in notes else []
            owners[program] = record.port, record.host or settings.bind_address, pids
    taken = {}
    for name, (port, address, pids) in owners.items():
        free = processes.port_free(port, address)
        if free or any(processes.listens(pid, port) != frozenset() for pid in pids if pid):
            continue
        taken[name] = port, processes.port_holder(port)
    return len(owners), taken


def _ports(around: Surroundings) -> Found:
    settings, found = around.settings, []
    wanted, taken = _held_ports(around)
    if taken:  # an engine that was started again meanwhile is no stranger
        again = _held_ports(around)[1]
        taken = {name: held for name, held in taken.items() if again.get(name) == held}
    ours = "the sidecar" in taken
    # A stranger may say nothing: that must leave time for the rest of the check.
    if ours and (other := local_status.other_system_on(settings.port, settings.state_path, ASK_S / 2)):
        del taken["the sidecar"]
        wanted -= 1
        text = f"{settings.port} of the sidecar is that of the system in {other}"
        fix = f"ask about that one with --state-dir {shlex.quote(other)}; to run both, give one another --port"
        found.append(warn(text, fix))
    if taken:
        told = "; ".join(f"{port} of {name} is held by {holder}" for name, (port, holder) in sorted(taken.items()))
        others = "--port, --metrics-listen, --gateway, --ports, spec.containerPort"
        return [*found, fail(told, f"end what holds it, or choose others: {others}")]
    return [*found, ok(f"each that was given out ({wanted}) is ours or free; engines get theirs from {settings.ports}")]


CHECKS = (
    Check("kinds", _kinds, needs_api=True),
    Check("clock", _clock, needs_api=True),
    Check("watch", _watch, needs_api=True),
    Check("address", _address),
    Check("ports", _ports),
)
