"""The check of a service before a claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from metal_supervisor.controller.prerequisites.claim_check import READY_S, ClaimCheck
from metal_supervisor.spec.types import Rejected

NOTHING = cast(Any, None)
REFUSED = Rejected("default", "tiny", "u1", 1, "tiny", "InvalidSpec", "spec.mode is wrong")


@pytest.mark.parametrize(
    ("reason", "delay_s"),
    [
        ("InvalidSpec", READY_S),
        ("UnsupportedRuntime", None),
        ("FormatMismatch", None),
        ("UnsupportedSource", None),
    ],
)
def test_what_another_mac_may_have_a_runtime_for_is_left_to_it(reason: str, delay_s: float | None) -> None:
    check = ClaimCheck(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING)
    assert check.delay_s(replace(REFUSED, reason=reason), NOTHING) == delay_s
    assert check.delay_s(replace(REFUSED, reason=reason, replicas=0), NOTHING) == READY_S
