"""What does not fit into the memory waits and says why, and starts by itself once there is room."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.boundary.range_server import serving
from tests.support.engines import Stopwatch, events, gone, is_gone
from tests.support.faults import Figure, fault
from tests.support.pace import within
from tests.support.system import eventually, model
from tests.support.tight import LARGE, MIB, SMALL, Tight, lean, share, tight

BUDGET_BYTES = 100 * MIB
"""A large one or two small ones; never a large one and a small one."""
WITHIN_S = 20.0
SUCCEEDS_S = 5.0
"""The longest from the end of one engine to the start of the next."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tight]:
    # The watchdog is off: what other tests do to this machine's memory must not hold up these.
    usual = {"memory_fraction": share(BUDGET_BYTES), "memory_watchdog_interval": 0}
    with tight(tmp_path_factory.mktemp("admission"), **usual) as up:
        yield up


@pytest.fixture(autouse=True)
def emptied(machine: Tight) -> Iterator[None]:
    yield
    machine.empty()
    machine.configure()


def successor(machine: Tight, name: str, engine: int) -> tuple[int, float]:
    """(pid, seconds after the old engine's end) of one that waits for the end of another's engine."""
    gone_at: list[float] = []

    def started() -> int:
        if not gone_at and is_gone(engine):
            gone_at.append(time.monotonic())
        pid = machine.system.pid(name)
        assert not pid or gone_at or is_gone(engine), "both engines live"
        return pid

    pid = eventually(started, 40, f"{name} to start")
    after_s = time.monotonic() - (gone_at or [time.monotonic()])[0]
    assert within(after_s, SUCCEEDS_S)
    return pid, after_s


# ── M 95: all of it is not enough ────────────────────────────────────────────────────────────────


@fault(
    "M95a",
    "two services that fit alone and not together; then the first is deleted, or suspended",
    happens="the second waits, and starts by itself when the engine of the first has ended, never before",
    sees="Pending, InsufficientMemory with the arithmetic and the place in the queue",
    bound="5 s after that end",
)
@pytest.mark.parametrize("leaves", ["deleted", "suspended"])
def test_what_does_not_fit_beside_another_starts_when_that_has_ended(
    machine: Tight, leaves: str, figure: Figure
) -> None:
    system = machine.system
    system.apply(lean("first", LARGE))
    engine = system.ready("first")
    system.apply(lean("second", LARGE))
    text = machine.waits("second", "InsufficientMemory")
    wanted = r"needs 82 MiB, 18 MiB of 100 MiB left; try a shorter context.* \(queue position 1\)"
    assert re.fullmatch(wanted, text), text
    status = system.status("second")
    assert (status["phase"], status["schedulingStatus"]) == ("Pending", "InsufficientMemory")
    assert status["schedulingMessage"] == text
    told = eventually(lambda: events(system, "second").get("InsufficientMemory"), what="the Event")
    assert told == text
    eventually(lambda: machine.metric("metal_supervisor_memory_waiting_services") == 1, what="one to wait")
    assert not system.pid("second")
    if leaves == "deleted":
        system.delete("first")
    else:
        system.apply(lean("first", LARGE, suspend=True))
    _, after_s = successor(machine, "second", engine)
    figure.add("end of the first to start of the second", after_s)
    system.ready("second")
    assert "schedulingStatus" not in system.status("second")
    eventually(lambda: machine.metric("metal_supervisor_memory_waiting_services") == 0, what="none to wait")


@fault(
    "M95b",
    "an edit asks for more memory than is left",
    happens="the engine goes on as it was, until there is room",
    sees="Ready, Degraded with InsufficientMemory and the arithmetic",
    bound="0 restarts before; 5 s after there is room",
)
def test_an_edit_that_does_not_fit_leaves_the_engine_alone_until_it_does(machine: Tight, figure: Figure) -> None:
    system = machine.system
    system.apply(lean("edited"), lean("other"))
    engine, other = system.ready("edited"), system.ready("other")
    system.apply(lean("edited", LARGE))
    text = machine.condition("edited", "Degraded", "True", "InsufficientMemory")
    assert text.startswith("needs 82 MiB, 65 MiB of 100 MiB left; "), text
    assert text.endswith("the engine keeps running as it last could")
    assert system.status("edited")["phase"] == "Ready" and "hello world" in system.chat("edited")
    assert system.pid("edited") == engine
    system.delete("other")
    eventually(lambda: is_gone(other), WITHIN_S, "the other to end")
    watch = Stopwatch(figure)
    watch.when(
        "end of the other to end of the old engine",
        lambda: eventually(lambda: is_gone(engine), SUCCEEDS_S, "the edit to be taken up"),
    )
    eventually(lambda: system.pid("edited") not in (0, engine), WITHIN_S, "the new engine")
    system.ready("edited")
    eventually(lambda: not system.condition("Degraded", "edited"), WITHIN_S, "the warning to go")
    assert machine.charged("edited") > 80 * MIB


@fault(
    "M95c",
    "several wait for the same room",
    happens="the higher priority starts first, whoever asked first",
    sees="the place in the queue",
    bound="as above",
)
def test_the_queue_goes_by_priority(machine: Tight, figure: Figure) -> None:
    system = machine.system
    system.apply(lean("holder", LARGE))
    engine = system.ready("holder")
    system.apply(lean("humble", LARGE, priority="low"))
    machine.waits("humble", "InsufficientMemory", "(queue position 1)")
    system.apply(lean("urgent", LARGE, priority="high"))
    machine.waits("urgent", "InsufficientMemory", "(queue position 1)")
    machine.waits("humble", "InsufficientMemory", "(queue position 2)")
    system.delete("holder")
    _, after_s = successor(machine, "urgent", engine)
    figure.add("end of the one to start of the next", after_s)
    machine.waits("humble", "InsufficientMemory", "(queue position 1)")
    assert not system.pid("humble")


@fault(
    "M95d",
    "one of a higher priority does not fit, and --preemption is set; the lower one streams a chat",
    happens="the lower one is withdrawn, drained and stopped, and is back when the other has gone",
    sees="Pending, InsufficientMemory: stopped for whom",
    bound="0 bytes lost; 5 s after each end",
)
def test_a_higher_priority_displaces_a_lower_one_once_that_has_answered(machine: Tight, figure: Figure) -> None:
    system = machine.system
    machine.configure(preemption=True)
    system.apply(lean("humble", LARGE, priority="low"))
    engine = system.ready("humble")
    stream = system.stream("humble").last()
    system.apply(lean("urgent", LARGE, priority="high"))
    eventually(lambda: system.slice_ready("humble") is False, WITHIN_S, "the endpoint to be withdrawn")
    urgent, after_s = successor(machine, "urgent", engine)
    figure.add("end of the lower to start of the higher", after_s)
    whole = stream.completed()
    figure.add("answers cut", int(not whole), "")
    assert whole, stream.error
    system.ready("urgent")
    text = machine.waits("humble", "InsufficientMemory", "(queue position 1)")
    assert text.startswith("it was stopped for default/urgent (priority high); needs 82 MiB, 18 MiB"), text
    system.delete("urgent")
    _, after_s = successor(machine, "humble", urgent)
    figure.add("end of the higher to start of the lower", after_s)
    system.ready("humble")


@fault(
    "M95e",
    "a model on a web server is too large for this machine",
    happens="its header alone is read",
    sees="Pending, InsufficientMemory: it is not fetched",
    bound="1 MiB read",
)
def test_a_model_that_cannot_fit_is_not_fetched(machine: Tight, figure: Figure) -> None:
    system = machine.system
    with serving() as web:
        web.files["big.gguf"] = widened(system.tiny.read_bytes(), 600_000)
        web.padding["big.gguf"] = 300 * MIB
        watch = Stopwatch(figure)
        system.apply(model("big", f"{web.url}/range/big.gguf"), lean("big", model="big"))
        text = watch.when("apply to verdict", lambda: machine.waits("big", "InsufficientMemory"))
        assert text.endswith("; it is not fetched"), text
        assert {said for _, said in web.asked} == {"bytes=0-0", "bytes=0-1048575"}
        figure.add("read", web.sent_bytes / MIB, "MiB")
        assert web.sent_bytes <= MIB + 1
    assert system.status("big")["phase"] == "Pending"
    gone(system, "big")


# ── M 96: to the byte ────────────────────────────────────────────────────────────────────────────


def one_less(pattern: str, text: str) -> bool:
    """True if the second number that a text begins with is one less than the first."""
    found = re.match(pattern, text)
    return found is not None and int(found[1]) - int(found[2]) == 1


@fault(
    "M96",
    "a service takes all that its Model, or this machine, allows to the byte; or one byte more",
    happens="the one starts, the other waits",
    sees="InsufficientMemory, and which limit it is",
    bound="1 byte",
)
def test_the_last_byte_counts(machine: Tight, figure: Figure) -> None:
    system = machine.system
    machine.configure(memory_fraction=share(2 * BUDGET_BYTES))
    system.apply(lean("alone", LARGE))  # more than it ever holds: what it holds would count else
    system.ready("alone")
    size = machine.charged("alone")
    source = system.tiny_model()["spec"]["source"]
    for name, limit in (("exact", size), ("wide", size - 1)):
        hardware = {"accelerator": "metal", "memoryBudget": str(limit)}
        system.apply(model(name, source, hardware=hardware), lean(name, LARGE, model=name))
    system.ready("exact")
    text = machine.waits("wide", "InsufficientMemory")
    assert one_less(r"needs (\d+) MiB, its Model allows (\d+) MiB \(spec.hardware.memoryBudget", text), text
    gone(system, "wide", "exact")
    machine.configure(memory_fraction=share(2 * size - 1))
    assert machine.memory()["budget"] == 2 * size - 1
    system.apply(lean("beside", LARGE))
    text = machine.waits("beside", "InsufficientMemory")
    assert one_less(r"needs (\d+) MiB, (\d+) MiB of \d+ MiB left; ", text), text
    machine.configure(memory_fraction=share(2 * size))
    system.ready("beside")
    figure.add("left", machine.memory()["left"], "bytes")
    assert machine.memory()["left"] == 0


# ── M 97, 98: nobody knows, or somebody lies ─────────────────────────────────────────────────────


@fault(
    "M97",
    "the size of what an engine will load is not known",
    happens="refused; with --memory-check-mode warn it is started",
    bound="no start",
    sees="MemoryCheckFailed, and what cannot be read; with warn Ready, Degraded with the same word",
)
def test_an_unknown_size_is_refused_or_started_with_a_warning(machine: Tight, figure: Figure) -> None:
    system = machine.system
    unsized = lean("unsized", SMALL, "--mmproj-url", "")  # the engine takes that for nothing to load
    system.apply(unsized, lean("known"))
    assert "--memory-check-mode warn" in machine.waits("unsized", "MemoryCheckFailed", "--mmproj-url")
    system.ready("known")
    figure.add("starts", len(system.engines()) - 1, "")
    assert not system.pid("unsized")
    assert system.status("unsized")["schedulingStatus"] == "MemoryCheckFailed"
    machine.configure(memory_check_mode="warn")
    system.ready("unsized")
    text = machine.condition("unsized", "Degraded", "True", "MemoryCheckFailed")
    assert text == "its size is not known, so it was started without knowing whether it fits"


def forged(data: bytes, **numbers: int) -> bytes:
    """The model file with other hyperparameters, four bytes each; `__` stands for a dot."""
    for name, number in numbers.items():
        key = f"llama.{name.replace('__', '.')}".encode()
        at = data.index(key) + len(key) + 4
        data = data[:at] + struct.pack("<I", number) + data[at + 4 :]
    return data


def widened(data: bytes, rows: int) -> bytes:
    """The head of a model file with as many rows of 512 bytes in its last tensor: a large model's."""
    name = b"blk.1.ffn_down.weight"
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 12  # after the count, and the first length
    return data[:at] + struct.pack("<Q", rows) + data[at + 8 :]


MOST = (1 << 32) - 1
FORGERIES: dict[str, dict[str, Any]] = {
    "context": {"context_length": MOST},
    "blocks": {"block_count": MOST},
    "heads": {"attention__head_count_kv": MOST},
    "keys": {"attention__key_length": MOST, "attention__value_length": MOST},
    "width": {"embedding_length": MOST},
}


@fault(
    "M98",
    "model files whose headers claim 4 billion blocks, heads, tokens, or 2^63 keys",
    happens="none is believed, and none starts: what an engine would make of it is unknown; others go on",
    sees="Pending, MemoryCheckFailed; /status names the number",
    bound="0 controller restarts",
)
def test_headers_that_lie_are_refused_and_disturb_nobody(machine: Tight, tmp_path: Path, figure: Figure) -> None:
    system = machine.system
    system.apply(lean("bystander"))
    engine, controller = system.ready("bystander"), system.own_pid("controller")
    data = system.tiny.read_bytes()
    files = {name: forged(data, **numbers) for name, numbers in FORGERIES.items()}
    files["counts"] = data[:8] + struct.pack("<QQ", 1 << 63, 1 << 63) + data[24:]
    watch = Stopwatch(figure)
    for name, content in files.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        system.apply(model(name, f"file://{path}"), lean(name, model=name))
    watch.when("apply to all verdicts", lambda: [machine.waits(name, "MemoryCheckFailed") for name in files])
    said = {name: system.observe(name)["memory"]["estimate"] for name in files}
    assert "llama.block_count must be a number from 0 to 2147483647, not 4294967295" in said["blocks"]
    assert "it claims 9223372036854775808 tensors" in said["counts"]
    assert system.pid("bystander") == engine and "hello world" in system.chat("bystander")
    figure.add("controller restarts", int(system.own_pid("controller") != controller), "")
    assert system.own_pid("controller") == controller
