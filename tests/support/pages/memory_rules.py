"""The parts of docs/memory.md about the budget and the queue, with tables and messages from the code that decides."""

from __future__ import annotations

from metal_supervisor.memory.budget import budget, metal_default_bytes, share_of
from metal_supervisor.memory.ledger import Decision, Entry, admit
from metal_supervisor.memory.pressure import PACE, thresholds
from metal_supervisor.spec.sizes import GIB, amount

MACS_GIB = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
RECENT = 26
OLD = 15
"""Major versions of macOS: Metal wires more since the first."""

BUDGET = """
## The budget

All engines together may have the least of three: a share of the memory, by its size or as configured; what Metal
will wire, less 512 MiB for everybody else's buffers; and all of it, less a sixteenth (2 GiB at least) that stays
with the system. What Metal wires is asked of `iogpu.wired_limit_mb`, then of the engine's own list of devices;
where neither says, it is what was measured for that memory and macOS. On Linux there is no Metal, and a container
counts as a machine of its limit's size.

| memory | share | Metal wires | stays with the system | budget | Metal wires, macOS 15 and older | budget there |
| --- | --- | --- | --- | --- | --- | --- |
"""
ADMISSION = """
## Who may start

Every engine that runs or starts is charged its estimate, or what it is measured to take if that is more: an idle
one gives memory back to the system, but not its claim to it. Whatever waits starts only if the sum stays within the
budget, to the byte. What does not fit waits with `InsufficientMemory`, the arithmetic, and what would help; it
starts by itself when there is room.

- **The queue**: higher priority first, then who has waited longer. A later one may start past one that does not
  fit, but only if both fit into the budget together, along with all from behind that have passed it already: small
  ones never keep a big one out for good. One that is larger than the whole budget holds up nobody, and has no
  position. Nor does one hold up a service on demand while it waits for an engine that is not, and so may wait for ever.
- **Preemption**, where it is configured: lower priorities make room for higher ones: the lowest first, then the
  largest, then the oldest, and no more than needed. They finish what they answer. `evictionProtection` is respected.
  What they leave is kept for whom they left it, who starts once they are gone.
- **An edit** that takes more waits in the same queue, and the engine goes on as it was, with the condition
  `Degraded`; one that takes less is never refused. What ends still counts until its process is gone.
- **Unknown sizes** (see *What is charged*) are refused (`MemoryCheckFailed`) under `--memory-check-mode enforce`; under
  `warn` they start with a warning and count for what they are measured.
- **A Model's own limit** (`spec.hardware.memoryBudget` or `memoryFraction`) is held to as well.

For example, on a Mac with 64 GiB, in the words of the message:
"""

PRESSURE = f"""
## When memory is short all the same

The budget keeps our own engines in bounds; it knows nothing of the browser beside them. So the machine is
looked at every `--memory-watchdog-interval` seconds (5): how much is available, the kernel's own level and the
growth of swap on a Mac, and on Linux how long tasks waited for memory (PSI). The worst of them counts. What
cannot be read changes nothing: an unknown reading neither delays a start nor stops or returns an engine. A
level takes two looks to rise (one, where less than half of what is critical is available), and a fifth of
`--memory-recovery` ({PACE.recover_s:g} s) of clearly better readings to fall a step, so that it does not flap.
The share that must be available follows from what the budget leaves free: a Mac that is full of models by the
budget's own rule is not in trouble. `--memory-pressure-warning` and `-critical` (0.20 and 0.10 of the memory) are upper
caps.

| memory | budget | Warning below | Critical below |
| --- | --- | --- | --- |
"""
EVICTION = f"""
**Warning**: nothing starts that takes room; what waits says `MemoryPressure` and why. Nothing is stopped.

**Critical**, and only with `--eviction-enabled`: one engine is stopped, and the next only once its process is
gone and two looks later it is critical still, {PACE.settle_s:g} s at the least. Who goes: the lowest
`spec.priority`, an idle one before a busy one, the largest, the one that runs longest. Never the last one,
never one with `spec.evictionProtection`, and nobody while our engines hold less than 30 % of what is in use:
then others are the cause. It finishes what it answers, for 20 s at most. The reason is in its condition
`MemoryPressure` (`Evicted`), in an Event and in the log.

**Coming back** needs nobody: after {PACE.recover_s:g} s of Normal the most important one returns, one every
{PACE.return_every_s:g} s, if there is room for it. One that had to go again and again stays away longer:
{PACE.back_off_s / 60:g} minutes, then twice as long each time, an hour at most. It stays evicted over a restart
of the controller and of the machine.

## Idle engines

The annotation `metal-supervisor.io/idle-ttl: 15m` on an InferenceService lets llama-server give its model back
after that time without a request, and load it again with the next one, which waits for that. Its endpoint
stays, and so does its reservation: nobody else can take the room, so that it can always come back. Nothing that
we ask wakes it. But whoever scrapes the engine's own `/metrics` does, and a scrape every minute keeps it awake
for ever.
"""


def pressure() -> str:
    """Where the levels begin on every Mac, and what happens then."""
    lines = [PRESSURE]
    for gib in MACS_GIB:
        total = gib * GIB
        found = budget(total, metal_bytes=metal_default_bytes(total, RECENT))
        limits = thresholds(total, found.bytes)
        told = [(size, 100 * size / total) for size in (limits.warning_bytes, limits.critical_bytes)]
        cells = f"{gib} GiB", amount(found.bytes), *(f"{amount(size)} ({part:.1f} %)" for size, part in told)
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join([*lines, EVICTION])


def budgets() -> str:
    """The budget of every Mac there is."""
    lines = [BUDGET]
    for gib in MACS_GIB:
        total = gib * GIB
        recent, old = (metal_default_bytes(total, version) for version in (RECENT, OLD))
        now, then = budget(total, metal_bytes=recent), budget(total, metal_bytes=old)
        reserve = total - max(size for name, size in now.limits.items() if "stay with the system" in name)
        cells = (f"{gib} GiB", f"{share_of(total):.0%}", amount(recent), amount(reserve), amount(now.bytes))
        lines.append(f"| {' | '.join((*cells, amount(old), amount(then.bytes)))} |\n")
    example = budget(128 * GIB, metal_bytes=metal_default_bytes(128 * GIB, RECENT))
    lines.append(f"\nIt says which of the three it is: `{example.explain()}`.\n")
    return "".join(lines)


def _waiting(name: str, priority: int, gib: float | None, asked: float, limit_gib: float | None = None) -> Entry:
    return Entry(
        ("default", name),
        priority,
        None if gib is None else round(gib * GIB),
        True,
        asked,
        limit_bytes=None if limit_gib is None else round(limit_gib * GIB),
    )


def _table(entries: list[Entry], budget_bytes: int, preemption: bool) -> list[str]:
    ledger = admit(budget_bytes, entries, preemption=preemption)
    lines = ["\n| service | priority | needs | | what is said |\n", "| --- | --- | --- | --- | --- |\n"]
    for entry in entries:
        need = "unknown" if entry.unknown else amount(entry.charge_bytes, "up")
        decision = ledger.decisions.get(entry.key, Decision(True, "runs"))
        state = "starts" if decision.admitted and not decision.reason else decision.reason
        lines.append(f"| {entry.key[1]} | {entry.priority} | {need} | {state} | {decision.message} |\n")
    return lines


def admission() -> str:
    """The rules of the queue, and what the ledger says in an example."""
    whole = budget(64 * GIB, metal_bytes=metal_default_bytes(64 * GIB, RECENT)).bytes
    runs = Entry(("default", "coder"), 50, round(29.6 * GIB), False, 1.0, admitted=1.0)
    queue = [
        runs,
        _waiting("writer", 50, 31.0, 2.0),
        _waiting("small", 50, 9.1, 3.0),
        _waiting("second", 50, 8.5, 4.0),
        _waiting("huge", 50, 90.0, 5.0),
        _waiting("capped", 50, 6.5, 6.0, limit_gib=4.0),
        _waiting("mystery", 50, None, 7.0),
    ]
    lines = [ADMISSION, *_table(queue, whole, preemption=False)]
    lines.append("\nWith preemption, one of a higher priority makes room for itself:\n")
    lines += _table([runs, _waiting("urgent", 100, 31.0, 2.0)], whole, preemption=True)
    return "".join(lines)
