"""Bytes for people to read, and people's quantities as bytes."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Any, Literal

from metal_supervisor.spec.fields import Bad

MIB = 1 << 20
GIB = 1 << 30
MAX_QUANTITY_BYTES = 1 << 50
QUANTITY = re.compile(r"([+-]?)([0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:([eE][+-]?[0-9]{1,3})|([A-Za-z]{1,2}))?")
UNITS = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}


def amount(size_bytes: int, toward: Literal["nearest", "up", "down"] = "nearest") -> str:
    """`61.2 GiB`, or `512 MiB` below one. Round needs up and room down, so that too little never looks like enough."""
    gib = abs(size_bytes) >= GIB
    # A tenth of a GiB is no whole number of bytes, hence the multiplication.
    scaled, unit = (size_bytes * 10, GIB) if gib else (size_bytes, MIB)
    steps = {"up": -(-scaled // unit), "down": scaled // unit, "nearest": (2 * scaled + unit) // (2 * unit)}[toward]
    if not gib:
        return "1.0 GiB" if steps == 1024 else f"{steps} MiB"
    sign, steps = ("-" if steps < 0 else ""), abs(steps)
    return f"{sign}{steps // 10}.{steps % 10} GiB"


def quantity(value: Any, path: str) -> int:
    """Bytes of a Kubernetes quantity such as `16Gi` (binary) or `16G` (decimal), rounded up.

    Raises Bad, which names the field, if it is no quantity, not positive, or more than any machine has.
    """
    text = value if isinstance(value, str) else str(value) if isinstance(value, int | float) else ""
    found = QUANTITY.fullmatch(text.strip()) if not isinstance(value, bool) else None
    if found is None or (found[4] or "") not in UNITS:
        raise Bad("InvalidSpec", f"{path} must be a quantity of memory such as 16Gi, not {value!r:.80}")
    number = Decimal(found[2]) * (Decimal(f"1{found[3]}") if found[3] else UNITS[found[4] or ""])
    if found[1] == "-" or number == 0:
        raise Bad("InvalidSpec", f"{path} must be more than nothing, not {text!r:.80}")
    if number > MAX_QUANTITY_BYTES:
        raise Bad("InvalidSpec", f"{path} is {text!r:.80}, which is more memory than any machine has")
    return int(number.to_integral_value(ROUND_CEILING))


def fraction(value: Any, path: str) -> float:
    """A share: more than 0, at most 1. Raises Bad, which names the field."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise Bad("InvalidSpec", f"{path} must be more than 0 and at most 1, not {value!r:.80}")
    return float(value)
