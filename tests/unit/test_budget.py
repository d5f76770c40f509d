"""How much memory models may have: by the size of the machine, by Metal, by the system, by what users write."""

from __future__ import annotations

from typing import Any

import pytest

from metal_supervisor.memory.budget import (
    budget,
    metal_default_bytes,
    metal_limit,
    share_of,
)
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.model_resource import read_limit
from metal_supervisor.spec.sizes import GIB, MIB, amount, fraction, quantity
from metal_supervisor.spec.types import ModelLimit

# Memory in GiB -> what Metal was measured to wire on recent versions of macOS and up to 15, in MiB
# (reference/macos.md section 2); None where nobody measured.
MEASURED: dict[int, tuple[int | None, int | None]] = {
    8: (None, 5461),
    16: (12_124, 10_923),
    24: (18_186, 16_384),
    32: (25_559, 21_845),
    36: (28_754, 27_648),
    48: (38_338, 36_864),
    64: (53_084, 49_152),
    96: (79_626, 73_728),
    128: (110_100, 98_304),
    256: (228_000, None),
    512: (475_136, None),
}


# ── the least of three ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("gib", "expected", "reason"),
    [
        (8, "4.8 GiB", "Metal wires no more, less 512 MiB"),
        (16, "10.7 GiB", "67 % of 16.0 GiB"),
        (18, "12.1 GiB", "67 % of 18.0 GiB"),
        (24, "16.1 GiB", "67 % of 24.0 GiB"),
        (32, "21.4 GiB", "67 % of 32.0 GiB"),
        (36, "24.1 GiB", "67 % of 36.0 GiB"),
        (48, "36.0 GiB", "75 % of 48.0 GiB"),
        (64, "48.0 GiB", "75 % of 64.0 GiB"),
        (96, "76.8 GiB", "80 % of 96.0 GiB"),
        (128, "107.0 GiB", "Metal wires no more, less 512 MiB"),
        (192, "160.8 GiB", "Metal wires no more, less 512 MiB"),
        (256, "222.2 GiB", "Metal wires no more, less 512 MiB"),
        (512, "460.8 GiB", "90 % of 512.0 GiB"),
    ],
)
def test_the_budget_of_every_mac_there_is(gib: int, expected: str, reason: str) -> None:
    total = gib * GIB
    found = budget(total, metal_bytes=metal_default_bytes(total, macos=27))
    assert (amount(found.bytes), found.reason) == (expected, reason)
    assert found.bytes == min(found.limits.values())
    assert found.explain().startswith(f"{expected} ({reason}; ")
    assert len(found.limits) == 3


def test_an_administrator_who_lets_metal_wire_more_gets_the_documented_share() -> None:
    metal, origin = metal_limit(128 * GIB, wired_limit_mib=120 * 1024, device_mib=110_100, macos=27)
    assert origin == "iogpu.wired_limit_mb"
    found = budget(128 * GIB, metal_bytes=metal)
    assert (amount(found.bytes), found.reason) == ("115.2 GiB", "90 % of 128.0 GiB")


def test_a_configured_share_replaces_the_one_by_size_but_not_the_limits() -> None:
    metal = 110_100 * MIB
    assert budget(128 * GIB, configured=0.5, metal_bytes=metal).bytes == 64 * GIB
    high = budget(128 * GIB, configured=1.0, metal_bytes=metal)
    assert high.bytes == metal - 512 * MIB
    assert "100 % of 128.0 GiB: 128.0 GiB" in high.explain()
    without_metal = budget(128 * GIB, configured=1.0)
    assert (without_metal.bytes, without_metal.reason) == (120 * GIB, "8.0 GiB stay with the system")


def test_small_machines_keep_something_for_models() -> None:
    for mib in (512, 1024, 2048, 4096):
        found = budget(mib * MIB)
        assert 0 < found.bytes <= mib * MIB * 3 // 4


def test_a_metal_that_wires_nothing_leaves_nothing() -> None:
    assert budget(16 * GIB, metal_bytes=100 * MIB).bytes == 0


def test_the_share_never_falls_as_machines_grow() -> None:
    shares = [share_of(gib * GIB) for gib in range(1, 1025)]
    assert shares == sorted(shares)
    assert share_of(36 * GIB - 1) == share_of(36 * GIB) == 0.67, "a machine that keeps some of it for itself"
    assert share_of(127 * GIB + 1) == 0.90


@pytest.mark.parametrize("gib", MEASURED)
def test_the_usual_limits_of_metal_are_the_measured_ones(gib: int) -> None:
    for macos, known in zip((26, 15), MEASURED[gib], strict=True):
        if known is not None:
            found = metal_default_bytes(gib * GIB, macos) / MIB
            assert abs(found / known - 1) < 0.001
    assert metal_default_bytes(gib * GIB, None) == metal_default_bytes(gib * GIB, 15), "unknown is taken for old"


def test_what_metal_will_wire_is_asked_in_order() -> None:
    assert metal_limit(16 * GIB, 14_000, 12_124, 27) == (14_000 * MIB, "iogpu.wired_limit_mb")
    assert metal_limit(16 * GIB, 0, 12_124, 27) == (12_124 * MIB, "the engine's list of devices")
    assert metal_limit(16 * GIB, 0, 0, 15)[1] == "Metal's usual limit"
    assert metal_limit(16 * GIB, 1 << 40, 0, 27)[0] == 16 * GIB, "nobody wires more than there is"


# ── what a Model says ────────────────────────────────────────────────────────────────────────────


def model(**hardware: Any) -> dict[str, Any]:
    return {"spec": {"hardware": {"accelerator": "metal", **hardware}}}


def test_a_model_may_limit_itself() -> None:
    assert read_limit(model()) == ModelLimit()
    assert read_limit({}) == ModelLimit()
    assert read_limit(model(memoryBudget="", memoryFraction=None)) == ModelLimit()
    assert read_limit(model(memoryBudget="16Gi")).resolve(64 * GIB) == 16 * GIB
    assert read_limit(model(memoryFraction=0.25)).resolve(64 * GIB) == 16 * GIB
    both = read_limit(model(memoryBudget="1Gi", memoryFraction=0.5))
    assert both.resolve(64 * GIB) == GIB, "the absolute number wins"
    assert ModelLimit().resolve(64 * GIB) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16Gi", 16 * GIB),
        ("16G", 16 * 10**9),
        ("1.5Gi", 3 * GIB // 2),
        ("0.5Ti", 512 * GIB),
        (" 4Mi ", 4 * MIB),
        ("1e9", 10**9),
        ("2E9", 2 * 10**9),
        ("+3k", 3000),
        ("1500m", 2),
        (".5Ki", 512),
        ("7.", 7),
        (17179869184, 16 * GIB),
        ("1Pi", 1 << 50),
        ("100M", 10**8),
        ("1n", 1),
    ],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: Any, expected: int) -> None:
    assert quantity(text, "spec.hardware.memoryBudget") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-1Gi", "more than nothing, not '-1Gi'"),
        ("0", "more than nothing"),
        ("0Gi", "more than nothing"),
        ("NaN", "such as 16Gi, not 'NaN'"),
        ("inf", "such as 16Gi"),
        (float("nan"), "such as 16Gi"),
        ("2Pi", "'2Pi', which is more memory than any machine has"),
        ("9" * 40, "more memory than any machine has"),
        ("1e999", "more memory than any machine has"),
        ("16 Gi", "such as 16Gi"),
        ("16gi", "such as 16Gi"),
        ("16GB", "such as 16Gi"),
        ("0x10", "such as 16Gi"),
        ("1_000", "such as 16Gi"),
        ("١٦Gi", "such as 16Gi"),
        (True, "such as 16Gi, not True"),
        (["16Gi"], "such as 16Gi"),
        ("1" * 10_000, "such as 16Gi"),
    ],
)
def test_what_is_no_quantity_is_refused_by_name(text: Any, message: str) -> None:
    with pytest.raises(Bad) as refused:
        read_limit(model(memoryBudget=text))
    assert refused.value.message.startswith("spec.hardware.memoryBudget ")
    assert message in refused.value.message
    assert len(refused.value.message) < 250


@pytest.mark.parametrize("value", [0, -0.5, 1.01, float("nan"), float("inf"), "0.5", True, [0.5]])
def test_what_is_no_share_is_refused_by_name(value: Any) -> None:
    with pytest.raises(Bad, match=r"spec\.hardware\.memoryFraction must be more than 0 and at most 1"):
        read_limit(model(memoryFraction=value))


def test_shares_up_to_all_of_it_are_accepted() -> None:
    assert (fraction(1, "x"), fraction(0.01, "x")) == (1.0, 0.01)


# ── bytes for people ─────────────────────────────────────────────────────────────────────────────


def test_a_need_is_rounded_up_and_what_is_left_down() -> None:
    assert amount(48 * GIB, "up") == amount(48 * GIB, "down") == amount(48 * GIB) == "48.0 GiB"
    assert (amount(48 * GIB + 1, "up"), amount(48 * GIB - 1, "down")) == ("48.1 GiB", "47.9 GiB")
    assert (amount(0), amount(1, "up"), amount(MIB - 1, "down")) == ("0 MiB", "1 MiB", "0 MiB")
    assert amount(GIB - 1) == "1.0 GiB"
    assert amount(-3 * GIB // 2) == "-1.5 GiB"
