"""How long a Mac leaves a free slot to others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from metal_supervisor.controller.prerequisites.offers import CANNOT_S, READY_S, Offers
from metal_supervisor.spec.types import Rejected

NOTHING = cast(Any, None)
REFUSED = Rejected("default", "tiny", "u1", 1, "tiny", "InvalidSpec", "spec.mode is wrong")


@pytest.mark.parametrize(
    ("reason", "delay_s"),
    [
        ("InvalidSpec", READY_S),
        ("UnsupportedRuntime", CANNOT_S),
        ("FormatMismatch", CANNOT_S),
        ("UnsupportedSource", CANNOT_S),
    ],
)
def test_what_another_mac_may_have_a_runtime_for_is_left_to_it(reason: str, delay_s: float) -> None:
    offers = Offers(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING)
    assert offers.delay_s(replace(REFUSED, reason=reason), NOTHING) == delay_s
    assert offers.delay_s(replace(REFUSED, reason=reason, replicas=0), NOTHING) == READY_S
