"""A sidecar's board with a value for every metric there is, and its rows one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from metal_supervisor.cluster.report import report
from metal_supervisor.gateway.traffic import Traffic
from metal_supervisor.sidecar.board import Board, Row
from metal_supervisor.sidecar.counters import Counters
from metal_supervisor.sidecar.power import PowerReading
from metal_supervisor.spec import histogram
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.types import Json
from tests.support.records import a_record

TOLD: dict[str, Any] = {
    "at": 900.0,
    "passes": histogram.empty(histogram.PASS_S).with_value(0.03).as_json(),
    "watches": {"inferenceservices": {"reconnects": 4, "failures": 0}, "models": {"reconnects": 2, "failures": 3}},
    "memory": {
        "budget": 48,
        "available": 30,
        "wired": 7,
        "charged": 20,
        "waiting": 1,
        "evictions": 2,
        "pressure": "Warning",
        "skipped": {"floor": 1},
    },
    "models": {
        "default/here": {"file": {"phase": "Downloading", "got_bytes": 1, "total_bytes": 4}},
        "default/gone": {"file": {"phase": "Failed"}},
    },
}


def row(name: str = "tiny", **observed: Any) -> Row:
    """A service that serves."""
    program = "default.tiny"
    seen = replace(Observed(program, 7, True, 1.0, "RUNNING", memory_bytes=9, confined=False), **observed)
    record = a_record(
        name,
        program=program,
        port=18100,
        host=f"{program}.a.json",
        reserved_bytes=11,
        retry_at=5.0,
    )
    return Row(record, seen, report(record, seen), "127.0.0.1:18100", 8)


def full_board() -> Board:
    """One with a value for everything."""
    counters = Counters()
    counters.probed("default.tiny", 0.2)
    counters.started("default.tiny", 3.0)
    counters.withdrawn(0.05)
    counters.passed(0.002)
    counters.refused("endpoints", "409")
    power = PowerReading("powermetrics", watts=dict.fromkeys(("combined", "gpu", "cpu", "ane"), 1.5), every_s=1e12)
    return Board(
        at=1000.0,
        rows=(row(restarts=2, exits={"SIGKILL": 2, "stopped": 1}),),
        controller=TOLD,
        node="mac-a",
        requests=5,
        power=power,
        counted=counters.counted(),
        gateway=gateway_note(),
    )


def gateway_note(name: str = "tiny") -> Json:
    """What the gateway notes of a request that has ended, and of another that has not."""
    traffic = Traffic()
    traffic.ended("laptop", ("default", name), 200, 0.2, 3.0, 64)
    traffic.waited(("default", name), 2.0)
    counts = {"inFlight": [["default", name, 1]], "waiting": [["default", name, 2]]}
    return {"url": "http://127.0.0.1:9100/v1", **counts, **traffic.as_json()}
