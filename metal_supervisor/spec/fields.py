"""Readers of what a user wrote: each takes the resource and a dotted path, and refuses by that path.

A custom resource may hold any JSON at all, so every reader checks the type, and says which field is wrong
and what it should be. Null counts as unset, and so does an empty text where it would mean nothing: LLMKube's programs
do not tell the two apart, and templates render one for a value that was not given.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any


class Bad(Exception):
    """A refusal on its way out of nested readers; `resources` turns it into a Rejected."""

    def __init__(self, reason: str, message: str, keeps_running: bool = True) -> None:
        super().__init__(message)
        self.reason, self.message, self.keeps_running = reason, message, keeps_running


def get(source: Any, path: str, kind: type, default: Any) -> Any:
    """The value at a dotted path below an object, of the given type. Null counts as unset."""
    value, walked = source, ""
    for step in path.split("."):
        if value is not None and not isinstance(value, dict):
            raise Bad("InvalidSpec", f"{walked} must be an object, not {value!r:.80}")
        value, walked = (value or {}).get(step), f"{walked}.{step}".lstrip(".")
    if value is None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        numbers = {int: "a whole number", float: "a number"}
        words = {**numbers, str: "a string", bool: "true or false", list: "a list", dict: "an object"}
        raise Bad("InvalidSpec", f"{path} must be {words.get(kind, kind.__name__)}, not {value!r:.80}")
    return value


def text(value: str, path: str) -> str:
    """The string, if a process can be given it as an argument."""
    if "\0" in value:
        raise Bad("InvalidSpec", f"{path} contains a NUL byte, which no argument can hold; remove it")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise Bad("InvalidSpec", f"{path} contains half of a surrogate pair, which is not UTF-8; remove it")
    return value


LONGEST_ADDRESS = 4096
"""In characters. To look up where a path leads takes time and memory that grow with the square of its parts."""


def address(value: str, path: str) -> str:
    """A string as of `text` that names a file, a directory or a URL."""
    if len(value) > LONGEST_ADDRESS:
        raise Bad("InvalidSpec", f"{path} has {len(value)} characters; at most {LONGEST_ADDRESS} are possible")
    return text(value, path)


MOST_ITEMS = 10_000
"""Of a list: composing an engine takes time that grows faster than its arguments."""
MOST_FILES = 4096
"""Of a list of files."""


def items(source: Any, path: str, most: int = MOST_ITEMS) -> list[Any]:
    """A list of a bounded length, [] if it is unset."""
    values: list[Any] = get(source, path, list, [])
    if len(values) > most:
        raise Bad("InvalidSpec", f"{path} has {len(values)} items; at most {most} are possible")
    return values


def texts(source: Any, path: str, most: int = MOST_ITEMS) -> tuple[str, ...]:
    values = items(source, path, most)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise Bad("InvalidSpec", f"{path}[{index}] must be a string, not {value!r:.80}; put it in quotes")
        text(value, f"{path}[{index}]")
    return tuple(values)


def ranged(low: int, high: int) -> Callable[[Any, str], Any]:
    def read(source: Any, path: str) -> int | None:
        value: int | None = get(source, path, int, None)
        if value is not None and not low <= value <= high:
            raise Bad("InvalidSpec", f"{path} must be between {low} and {high}, not {value}")
        return value

    return read


def boolean(source: Any, path: str) -> Any:
    return get(source, path, bool, None)


def word(source: Any, path: str) -> str | None:
    value = get(source, path, str, None)
    if not value:
        return None
    if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,64}", value):
        raise Bad("InvalidSpec", f"{path} must be one plain word, not {value!r:.80}")
    return str(value)


def sentence(source: Any, path: str) -> str | None:
    value = get(source, path, str, None)
    return text(value, path) if value else None


def directory(source: Any, path: str) -> str | None:
    value = sentence(source, path)
    return address(value, path) if value else None


def size(source: Any, path: str) -> str | None:
    """A size as oMLX understands it, `20GB`."""
    value = word(source, path)
    if value is not None and not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,3})?[KMGT]B", value):
        raise Bad("InvalidSpec", f"{path} must be a size such as 20GB, not {value!r:.80}")
    return value


DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(ms|[hms])")
DURATIONS = re.compile(rf"({DURATION.pattern}){{1,8}}")
SECONDS = {"h": Decimal(3600), "m": Decimal(60), "s": Decimal(1), "ms": Decimal("0.001")}


def seconds_of(text: str) -> Decimal | None:
    """Seconds of a duration as Go programs write it, `1h30m`; None if it is none."""
    if not DURATIONS.fullmatch(text):
        return None
    return sum((Decimal(number) * SECONDS[unit] for number, unit in DURATION.findall(text)), Decimal(0))


def duration(value: Any, path: str, low_s: int, high_s: int) -> int | None:
    """Whole seconds, rounded up, of a duration such as `1h30m`, or of plain seconds; None for `off`, 0 or nothing.

    Raises Bad, which names the field, for what is none or is not between `low_s` and `high_s`.
    """
    said = value.strip() if isinstance(value, str) else value
    if said in (None, "", "off"):
        return None
    text = said if isinstance(said, str) else ""
    text += "s" if re.fullmatch(r"[0-9.]+", text) else ""
    exact = seconds_of(text)
    if exact is None:
        raise Bad("InvalidSpec", f'{path} must be a duration such as 15m, 1h30m or "off", not {value!r:.80}')
    length_s = int(exact.to_integral_value(ROUND_CEILING))
    if length_s and not low_s <= length_s <= high_s:
        raise Bad("InvalidSpec", f'{path} must be "off" or between {low_s} s and {high_s} s, not {value!r:.80}')
    return length_s or None


def rope_scaling(source: Any, path: str) -> dict[str, Any] | None:
    if get(source, path, dict, None) is None:
        return None
    kind, factor = word(source, f"{path}.type"), word(source, f"{path}.factor")
    if kind not in ("linear", "yarn", "longrope"):
        raise Bad("InvalidSpec", f"{path}.type must be linear, yarn or longrope, not {kind!r}")
    if factor is not None and not re.fullmatch(r"[0-9]+(\.[0-9]+)?", factor):
        raise Bad("InvalidSpec", f"{path}.factor must be a decimal number, not {factor!r}")
    original = ranged(128, 2**31 - 1)(source, f"{path}.originalContext")
    return {"type": kind, "factor": factor, "originalContext": original}


MAX = 2**31 - 1
LEAST_CONTEXT = 128
MOST_CONTEXT = 2_097_152
MOST_SLOTS = 64
OPTIONS: Mapping[str, Callable[[Any, str], Any]] = {
    "contextSize": ranged(LEAST_CONTEXT, MOST_CONTEXT),
    "parallelSlots": ranged(1, MOST_SLOTS),
    "batchSize": ranged(1, 16_384),
    "uBatchSize": ranged(1, MAX),
    "flashAttention": boolean,
    "cacheTypeK": word,
    "cacheTypeV": word,
    "cacheTypeCustomK": word,
    "cacheTypeCustomV": word,
    "moeCPUOffload": boolean,
    "moeCPULayers": ranged(0, MAX),
    "noKvOffload": boolean,
    "noWarmup": boolean,
    "jinja": boolean,
    "reasoningBudget": ranged(0, MAX),
    "reasoningBudgetMessage": sentence,
    "tensorOverrides": lambda source, path: texts(source, path) or None,
    "metadataOverrides": lambda source, path: texts(source, path) or None,
    "ropeScaling": rope_scaling,
    "turboQuantBits": ranged(2, 8),
    "pagedSSDCacheDir": directory,
    "pagedSSDCacheMaxSize": size,
    "hotCacheMaxSize": size,
}
"""Engine options of the spec that are understood; a runtime refuses those it cannot honour."""
