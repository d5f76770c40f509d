"""A Lease claimed by apply without force: of many, exactly one wins, and it stays won until it is taken over."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from tests.contract.api import Space
from tests.contract.things import lease

CONTENDERS = 8
ROUNDS = 60


def test_of_eight_exactly_one_claims_and_exactly_one_takes_over(space: Space) -> None:
    clients = [Space(space.api.another(), space.name) for _ in range(CONTENDERS)]
    start = threading.Barrier(CONTENDERS)

    def claim(number: int, name: str, seen: str = "") -> int:
        body = lease(name, holderIdentity=f"mac-{number}")
        force = {}
        if seen:
            body["metadata"]["resourceVersion"], force = seen, {"force": "true"}
        start.wait()
        return clients[number].apply("leases", body, f"metal/mac-{number}", **force).code

    try:
        with ThreadPoolExecutor(CONTENDERS) as pool:
            for round_number in range(ROUNDS):
                name = f"slot-{round_number}"
                codes = list(pool.map(claim, range(CONTENDERS), [name] * CONTENDERS))
                assert sorted(codes) == [201] + [409] * (CONTENDERS - 1), codes
                first = codes.index(201)
                taken = space.get("leases", name)
                assert taken.body["spec"]["holderIdentity"] == f"mac-{first}"
                others = [number for number in range(CONTENDERS) if number != first]
                start = threading.Barrier(len(others))
                codes = list(pool.map(lambda number: claim(number, name, taken.version), others))  # noqa: B023
                assert sorted(codes) == [200] + [409] * (len(others) - 1), codes
                second = others[codes.index(200)]
                assert space.get("leases", name).body["spec"]["holderIdentity"] == f"mac-{second}"
                start = threading.Barrier(1)
                assert claim(first, name) == 409
                assert claim(second, name) == 200
                start = threading.Barrier(CONTENDERS)
    finally:
        for client in clients:
            client.api.close()
