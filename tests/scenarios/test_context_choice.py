"""The context of an engine whose spec names none is chosen for its first start, and kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.support.system import eventually
from tests.support.tight import MIB, Tight, lean, share, tight


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tight]:
    usual = {"memory_fraction": share(100 * MIB), "memory_watchdog_interval": 0}
    with tight(tmp_path_factory.mktemp("context"), **usual) as up:
        yield up


@pytest.fixture(autouse=True)
def emptied(machine: Tight) -> Iterator[None]:
    yield
    machine.empty()


def open_(name: str, **spec: Any) -> dict[str, Any]:
    """An InferenceService that names no context."""
    made = lean(name, **spec)
    del made["spec"]["contextSize"]
    return made


def context(machine: Tight, name: str) -> int:
    """Tokens of all slots of an engine that serves."""
    words = psutil.Process(machine.system.ready(name)).cmdline()
    return int(words[words.index("--ctx-size") + 1])


def test_where_there_is_room_each_slot_gets_8192_tokens_and_keeps_them(machine: Tight) -> None:
    system = machine.system
    system.apply(open_("roomy"))
    assert context(machine, "roomy") == 8192
    engine = system.pid("roomy")
    machine.kill_controller()
    assert system.ready("roomy") == engine
    system.apply(open_("roomy", parallelSlots=2))
    eventually(lambda: system.pid("roomy") not in (0, engine), 30, "an engine of the edited spec")
    assert context(machine, "roomy") == 2 * 8192


def test_where_there_is_less_room_it_gets_what_fits_and_keeps_it_when_there_is_more(machine: Tight) -> None:
    system = machine.system
    system.apply(lean("first", 16384))
    system.ready("first")
    system.apply(open_("second"))
    chosen = context(machine, "second")
    assert chosen in (2048, 4096), chosen
    engine = system.pid("second")
    system.delete("first")
    machine.kill_controller()
    assert system.ready("second") == engine and context(machine, "second") == chosen


def test_what_waits_for_room_chooses_once_it_has_some(machine: Tight) -> None:
    system = machine.system
    system.apply(lean("large", 32768))
    system.ready("large")
    system.apply(open_("waits"))
    machine.waits("waits", "InsufficientMemory")
    system.delete("large")
    assert context(machine, "waits") == 8192


def test_it_is_chosen_once_a_spec_names_none_any_more(machine: Tight) -> None:
    system = machine.system
    system.apply(lean("edited", 512))
    engine = system.ready("edited")
    system.apply(open_("edited"))
    eventually(lambda: system.pid("edited") not in (0, engine), 30, "an engine of the edited spec")
    assert context(machine, "edited") == 8192
