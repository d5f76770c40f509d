"""The parts of docs/memory.md about the budget and the queue, with tables and messages from the code that decides."""

from __future__ import annotations

from metal_supervisor.core.budget import budget, metal_default_bytes, share_of
from metal_supervisor.core.ledger import Decision, Entry, Phase, admit
from metal_supervisor.core.sizes import GIB, amount

MACS_GIB = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
RECENT, OLD = 26, 15
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
  position.
- **Preemption**, where it is configured: lower priorities make room for higher ones: the lowest first, idle before
  busy, the largest, then the oldest, and no more than needed. `evictionProtection` is respected. What they leave is
  kept for whom they left it, who starts once they are gone.
- **Unknown sizes** are refused under `enforce`; under `warn` they start with a warning and count for what they are
  measured.
- **A Model's own limit** (`spec.hardware.memoryBudget` or `memoryFraction`) is held to as well.

For example, on a Mac with 64 GiB, in the words of the message:
"""


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
        ("default", name), priority, None if gib is None else round(gib * GIB), Phase.WAITING, asked,
        limit_bytes=None if limit_gib is None else round(limit_gib * GIB),
    )  # fmt: skip


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
    runs = Entry(("default", "coder"), 50, round(29.6 * GIB), Phase.RUNNING, 1.0, admitted=1.0)
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
