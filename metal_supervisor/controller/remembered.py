"""Results that are kept from pass to pass by what they depend on, so that an edit costs what it changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace
from operator import is_
from typing import Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def nothing(_name: object) -> None:
    """Look nothing up: for a result that depends on its inputs alone."""


@dataclass(frozen=True)
class _Kept(Generic[T, K, V]):
    inputs: tuple[object, ...]
    looked_up: dict[K, V]
    result: T


class Remembered(Generic[T, K, V]):
    """Results by key; each is computed anew once an input, or anything that was looked up for it, has changed."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept[T, K, V]] = {}

    def of(
        self,
        key: Hashable,
        inputs: tuple[object, ...],
        look: Callable[[K], V],
        compute: Callable[[Callable[[K], V]], T],
    ) -> T:
        """The result of `compute`, which must depend on the inputs and on what it looks up alone.

        Inputs are compared by value. What `look` returns is compared by identity: it returns the same object until that
        changes; it is called for each name in either case.
        """
        known = self._kept.get(key)
        if known is not None and known.inputs == inputs:
            now = [look(name) is found for name, found in known.looked_up.items()]
            if all(now):
                if not all(map(is_, known.inputs, inputs)):  # equal: the next comparison is quicker
                    self._kept[key] = replace(known, inputs=inputs)
                return known.result
        looked_up: dict[K, V] = {}

        def noted(name: K) -> V:
            looked_up[name] = found = look(name)
            return found

        result = compute(noted)
        self._kept[key] = _Kept(inputs, looked_up, result)
        return result

    def forget_all_but(self, keys: Collection[Hashable]) -> None:
        """Drop the results of all other keys."""
        if len(self._kept) > len(keys) or self._kept.keys() - keys:
            self._kept = {key: kept for key, kept in self._kept.items() if key in keys}
