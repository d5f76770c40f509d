"""The waiting room of the gateway: who waits for a model on demand, and what the controller is told."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from metal_supervisor.gateway import waiting
from metal_supervisor.gateway.errors import GatewayError
from metal_supervisor.gateway.routing import Backend, ServiceTable
from metal_supervisor.gateway.waiting import (
    MOST_LOADS,
    MOST_OF_CLIENT,
    MOST_OF_CLIENT_FOR_ONE,
    MOST_OF_ONE,
    WaitingRoom,
)
from metal_supervisor.spec.processes import EngineUse
from metal_supervisor.spec.withdrawal import withdrawal_token
from metal_supervisor.state import use_notes

NAME = "default.tiny"
CLIENT = "192.0.2.7"


def table(withdraw: str = "", on_demand: bool = True) -> ServiceTable:
    token = withdrawal_token(float(withdraw)) if withdraw else withdrawal_token(0.0)
    made = Backend(
        NAME, "default", "tiny", "llama-server", True, "Ready", "Serving", "", "127.0.0.1", 1, on_demand=on_demand
    )
    return ServiceTable((made if not withdraw else Backend(**{**vars(made), "withdraw": token}),))


class Room:
    """A waiting room, and what it told."""

    def __init__(self) -> None:
        self.in_flight: Counter[str] = Counter()
        self.told: list[Mapping[str, EngineUse]] = []
        self.full = False
        """Nothing can be kept: the disk is full."""
        self.room = WaitingRoom(self.in_flight, self.keep)

    def keep(self, uses: Mapping[str, EngineUse]) -> bool:
        if not self.full:
            self.told.append(uses)
        return not self.full

    @property
    def last(self) -> EngineUse:
        return self.told[-1][NAME]


def test_the_first_who_waits_is_told_at_once_and_the_others_are_counted() -> None:
    async def go() -> None:
        here = Room()
        here.room.look(table())
        with here.room.wait_for(NAME, CLIENT):
            assert here.last.waiting == 1
            with here.room.wait_for(NAME, CLIENT):
                here.room.look(table())
                assert here.last.waiting == 2
        here.room.look(table())
        assert here.last.waiting == 0

    asyncio.run(go())


def test_nothing_is_kept_of_services_that_are_gone_but_what_is_under_way() -> None:
    async def go() -> None:
        here = Room()
        here.room.look(table())
        with here.room.wait_for(NAME, CLIENT):
            here.in_flight[NAME] += 1
        here.room.look(ServiceTable())
        assert here.in_flight == {NAME: 1}, "its answer has not ended"
        here.in_flight[NAME] -= 1
        here.room.look(table())
        assert NAME in here.in_flight, "it is back"
        here.room.look(ServiceTable())
        assert not (here.in_flight.keys() | here.room.waiting.keys() | here.room._used_at.keys())

    asyncio.run(go())


def test_what_could_not_be_kept_on_a_full_disk_is_told_once_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "AGAIN_S", 0.01)

    async def go() -> None:
        here = Room()
        here.room.look(table())
        here.full = True
        with here.room.wait_for(NAME, CLIENT):
            assert not here.last.waiting
            here.full = False
            while not here.last.waiting:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(go(), 30))


def test_a_withdrawal_is_acknowledged_and_so_is_the_last_answer_after_it() -> None:
    async def go() -> None:
        here = Room()
        here.in_flight[NAME] = 1
        here.room.look(table())
        here.room.look(table("5"))
        assert (here.last.withdrawn, here.last.in_flight) == (withdrawal_token(5.0), 1)
        here.in_flight[NAME] = 0
        here.room.used(NAME)
        assert here.last.in_flight == 0

    asyncio.run(go())


def test_a_service_that_is_put_on_demand_counts_as_used_then() -> None:
    """Its engine may have been up for days, and nothing was noted of its requests."""

    async def go() -> None:
        here = Room()
        for _ in range(2):
            here.room.look(ServiceTable(tuple(replace(each, on_demand=False) for each in table().backends)))
            assert not here.told or not here.told[-1]
            before = time.time()
            here.room.look(table())
            assert here.last.used_at >= before

    asyncio.run(go())


def test_a_worker_that_knows_of_no_use_counts_its_start_as_one() -> None:
    async def go() -> None:
        before = time.time()
        here = Room()
        here.room.look(table())
        assert here.last.used_at >= before
        assert not Room().told  # and of services that are always on nothing is told

    asyncio.run(go())


def test_too_many_are_refused_and_those_who_wait_are_when_it_closes() -> None:
    async def go() -> None:
        here = Room()
        here.room.look(table())
        here.room.waiting[NAME] = MOST_OF_ONE
        with pytest.raises(GatewayError) as refused, here.room.wait_for(NAME, CLIENT):
            pass
        assert refused.value.code == "queue_full"
        here.room.close()
        with pytest.raises(GatewayError) as refused:
            await here.room.change(time.monotonic() + 5)
        assert refused.value.code == "restarting"

    asyncio.run(go())


def test_one_client_leaves_places_to_others_and_gets_its_own_back() -> None:
    async def go() -> None:
        here = Room()
        here.room.look(table())
        with contextlib.ExitStack() as crowd:
            for _ in range(MOST_OF_CLIENT_FOR_ONE):
                crowd.enter_context(here.room.wait_for(NAME, CLIENT))
            with pytest.raises(GatewayError) as refused, here.room.wait_for(NAME, CLIENT):
                pass
            assert refused.value.code == "queue_full"
            with here.room.wait_for(NAME, "192.0.2.8"):
                pass
            for _ in range(MOST_OF_CLIENT - MOST_OF_CLIENT_FOR_ONE):
                crowd.enter_context(here.room.wait_for("default.other", CLIENT))
            with pytest.raises(GatewayError) as refused, here.room.wait_for("default.third", CLIENT):
                pass
            assert refused.value.code == "queue_full"
        with here.room.wait_for(NAME, CLIENT):
            pass

    asyncio.run(go())


def test_a_client_that_has_too_much_loaded_is_refused_and_no_other() -> None:
    async def go() -> None:
        here = Room()
        here.room.look(table())
        for _ in range(MOST_LOADS):
            with here.room.wait_for(NAME, CLIENT), here.room.wait_for(NAME, CLIENT):  # the second loads nothing
                pass
        with pytest.raises(GatewayError) as refused, here.room.wait_for(NAME, CLIENT):
            pass
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
        assert 55 <= (refused.value.retry_after_s or 0) <= 60 and CLIENT in refused.value.message
        with here.room.wait_for(NAME, "192.0.2.8"), here.room.wait_for(NAME, CLIENT):
            assert here.last.waiting == 1

    asyncio.run(go())


def test_notes_of_workers_that_live_count_together(tmp_path: Path) -> None:
    (tmp_path / "use").mkdir()
    (tmp_path / "use" / "1.json").write_text('{"format": 1, "pid": 1, "started": "another", "programs": {}}')
    (tmp_path / "use" / f"{1 << 30}.json").write_text("{")  # of a process that is gone
    use_notes.write(tmp_path, {NAME: EngineUse(1, 2, 3.0, withdrawal_token(5.0))})
    assert use_notes.read(tmp_path) == {NAME: EngineUse(1, 2, 3.0, withdrawal_token(5.0))}
    assert len(list((tmp_path / "use").iterdir())) == 1
    use_notes.remove(tmp_path)
    assert use_notes.read(tmp_path) == {}


def test_a_damaged_use_counts_as_none(tmp_path: Path) -> None:
    use_notes.write(tmp_path, {NAME: EngineUse()})
    (path,) = (tmp_path / "use").iterdir()
    path.write_text(path.read_text().replace('"waiting": 0', '"waiting": "many"'))
    assert use_notes.read(tmp_path) == {}


def test_a_note_that_cannot_be_read_for_a_moment_is_kept(tmp_path: Path) -> None:
    use_notes.write(tmp_path, {NAME: EngineUse(1, 2, 3.0, withdrawal_token(5.0))})
    (note,) = (tmp_path / use_notes.FOLDER).iterdir()
    text = note.read_bytes()
    note.unlink()
    note.mkdir()  # reading it is refused, to root too
    assert use_notes.read(tmp_path) == {}
    note.rmdir()
    note.write_bytes(text)
    assert use_notes.read(tmp_path)[NAME].in_flight == 2
