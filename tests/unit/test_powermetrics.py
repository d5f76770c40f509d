"""powermetrics' output becomes watts however it is cut, whatever chip it comes from, and whatever else it holds."""

from __future__ import annotations

import itertools
import plistlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.host.powermetrics import DOMAINS, END, MOST_BYTES, Frames, reading
from tests.support.power import (
    FIGURES,
    M1_CLUSTERS,
    M5_CLUSTERS,
    ULTRA_CLUSTERS,
    WATTS,
    processor,
    sample,
    stream,
)

CAPTURES = Path(__file__).resolve().parents[2].parent / "shared" / "fixtures"
CAPTURED = {
    "pm-m1.xml": {"combined": 0.0594301, "gpu": 0.0153528, "cpu": 0.0440773, "ane": 0.0},
    "pm-m1-2.xml": {"combined": 0.121675, "gpu": 0.0190117, "cpu": 0.102663, "ane": 0.0},
    "pm-m2ultra.xml": {"combined": 71.7598, "gpu": 70.9246, "cpu": 0.835188, "ane": 0.0},
}
SMALL = [
    sample({"cpu_power": 1500.5, "ane_power": 0, "clusters": [{"name": name}]}) for name in (*M1_CLUSTERS, "S-Cluster")
]


def capture(name: str) -> bytes:
    path = CAPTURES / name
    if not path.is_file():
        pytest.skip(f"there is no capture {name} of a real powermetrics beside this repository, in shared/fixtures")
    return path.read_bytes()


def watts(*chunks: bytes) -> list[dict[str, float] | None]:
    """What each list in these chunks tells."""
    frames = Frames()
    return [reading(frame) for chunk in chunks for frame in frames.feed(chunk)]


def only(found: list[dict[str, float] | None]) -> dict[str, float]:
    (each,) = found
    assert each is not None
    return each


@pytest.mark.parametrize("name", CAPTURED)
def test_a_real_capture_is_read(name: str) -> None:
    assert only(watts(capture(name))) == pytest.approx(CAPTURED[name])


def test_real_captures_in_one_stream_are_read_whatever_the_size_of_the_chunks() -> None:
    text = stream(*map(capture, CAPTURED))
    whole = watts(text)
    assert len(whole) == 3
    for size in (1, 7, 4096, 65536):
        assert watts(*(text[at : at + size] for at in range(0, len(text), size))) == whole


@pytest.mark.parametrize("clusters", [M1_CLUSTERS, ULTRA_CLUSTERS, M5_CLUSTERS])
def test_the_names_of_clusters_and_a_key_that_is_there_twice_make_no_difference(clusters: tuple[str, ...]) -> None:
    assert only(watts(sample(clusters=clusters))) == pytest.approx(WATTS)


def test_every_cut_in_two_gives_the_same() -> None:
    text = stream(*SMALL)
    whole = watts(text)
    assert whole == [{"cpu": 1.5005, "ane": 0.0}] * 3
    for at in range(len(text) + 1):
        assert watts(text[:at], text[at:]) == whole, at


@given(st.lists(st.integers(1, 900), min_size=1, max_size=200), st.sampled_from([b"", b"\0", b"\0\0\n"]))
def test_chunks_of_any_sizes_give_the_same(sizes: list[int], tail: bytes) -> None:
    text, chunks, at = stream(*SMALL) + tail, [], 0
    for size in itertools.cycle(sizes):
        chunks.append(text[at : at + size])
        at += size
        if at >= len(text):
            break
    assert watts(*chunks) == watts(text)


@given(st.data())
@settings(max_examples=50)
def test_nuls_anywhere_change_nothing(data: st.DataObject) -> None:
    text = SMALL[0]
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    parts = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    assert watts(b"\0".join(parts)) == watts(text)


@pytest.mark.parametrize(
    "garbage",
    [b"Second underflow occured.\n", b"\xff\xfe\x00", SMALL[0][:300], SMALL[0][: SMALL[0].index(END) - 1], b"<plist>"],
    ids=["text", "bytes", "a list cut off early", "a list cut off late", "an empty beginning"],
)
def test_garbage_before_a_list_costs_no_list(garbage: bytes) -> None:
    assert watts(garbage + sample() + b"\0" + garbage + sample()) == [pytest.approx(WATTS)] * 2


def test_a_list_that_is_cut_off_at_the_end_is_never_given() -> None:
    text = sample()
    assert watts(text[: text.index(END) + len(END) - 1]) == []


@pytest.mark.parametrize("size", [65536, 3 * MOST_BYTES])
def test_one_that_is_too_long_is_left_out_and_the_next_is_read(size: int) -> None:
    text = b"<array>" * (MOST_BYTES // 4) + END + sample()
    assert watts(*(text[at : at + size] for at in range(0, len(text), size))) == [None, WATTS]


def test_what_never_ends_is_not_kept() -> None:
    frames = Frames()
    for _ in range(64):
        assert frames.feed(b"x" * 65536) == []
        assert len(frames._held) <= MOST_BYTES
    *_, last = frames.feed(END + sample())
    assert reading(last) == WATTS


# ── figures ──────────────────────────────────────────────────────────────────────────────────────


def figures(elapsed_ns: Any = 2_000_000_000, **keys: Any) -> dict[str, float] | None:
    return reading(sample(processor(**keys), elapsed_ns))


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_domain_that_is_not_told_of_is_unknown_and_not_0(domain: str) -> None:
    keys = {f"{name}_power": value for name, value in FIGURES.items() if name != domain}
    assert figures(**keys) == pytest.approx({name: value for name, value in WATTS.items() if name != domain})


def test_whole_numbers_are_figures_too() -> None:
    assert figures(cpu_power=164, gpu_power=7.5) == {"cpu": 0.164, "gpu": 0.0075}


@pytest.mark.parametrize("bad", [-1, -0.5, float("nan"), float("inf"), True, "12", [3], {"mW": 3}, 10**400])
def test_what_is_no_power_is_unknown_and_takes_nothing_else_with_it(bad: Any) -> None:
    assert figures(cpu_power=bad, cpu_energy=10, gpu_power=5) == {"gpu": 0.005}


def test_energy_counts_only_where_there_is_no_power_and_over_the_time_it_took() -> None:
    assert figures(cpu_energy=3000, gpu_energy=1, gpu_power=70000) == {"cpu": 1.5, "gpu": 70.0}
    assert figures(5_000_000_000, ane_energy=500) == {"ane": 0.1}


@pytest.mark.parametrize("elapsed", [0, -1, True, "2", float("nan"), float("inf"), 10**400, [1]])
def test_without_a_sensible_time_energy_says_nothing(elapsed: Any) -> None:
    assert figures(elapsed, cpu_energy=3000, gpu_power=5) == {"gpu": 0.005}


def test_energy_over_next_to_no_time_is_no_figure() -> None:
    assert figures(1e-300, cpu_energy=1e300, gpu_power=5) == {"gpu": 0.005}


def test_unknown_keys_are_passed_over() -> None:
    assert figures(cpu_power=1000, future_power={"watts": 3}, dram_energy="?") == {"cpu": 1.0}


@pytest.mark.parametrize("found", [{}, {"clusters": []}, 3, "x", [], {"cpu_power": -1.0}])
def test_a_list_without_power_tells_of_none(found: Any) -> None:
    assert reading(sample(found)) is None


DOCTYPE = "<!DOCTYPE plist"
BODY = "<dict><key>processor</key><dict><key>cpu_power</key><integer>7</integer></dict></dict>"
DEEP = f"{'<array>' * 50_000}{'</array>' * 50_000}"


@pytest.mark.parametrize(
    "text",
    [
        f'{DOCTYPE} [<!ENTITY a "7"><!ENTITY b "&a;&a;">]><plist>{BODY.replace("7", "&b;")}</plist>',
        f'{DOCTYPE} [<!ENTITY a SYSTEM "file:///etc/passwd">]><plist><string>&a;</string></plist>',
        f'{DOCTYPE} [<!ENTITY % a SYSTEM "file:///etc/passwd"> %a;]><plist>{BODY}</plist>',
        f"<plist>{DEEP}</plist>",
        "<plist></plist>",
        "<plist><dict><integer>3</integer></dict></plist>",
        "<plist><dict><key>a</key></dict></plist>",
        "<plist><dict><key>a</key><key>b</key></dict></plist>",
        "<plist><date></date></plist>",
        "<plist><date>9999-99-99T99:99:99Z</date></plist>",
        "<plist><integer></integer></plist>",
        f"<plist><integer>{'9' * 5000}</integer></plist>",
        "<plist><real>x</real></plist>",
        "<plist><data>=</data></plist>",
        "<plist><nonsense/></plist>",
        "<plist><dict>",
        '<?xml version="1.0" encoding="x-unknown"?><plist/>',
        '<?xml version="1.0" encoding="utf-7"?><plist/>',
        "",
    ],
)
def test_what_is_no_list_of_ours_is_none_and_never_an_error(text: str) -> None:
    assert reading(text.encode()) is None


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text("ab<&", max_size=5) | st.binary(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text("ab", max_size=2), each, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from([f"{domain}_{kind}" for domain in DOMAINS for kind in ("power", "energy")])


@given(st.dictionaries(keys, values.filter(lambda each: each is not None)), values)
def test_values_of_any_type_give_sensible_watts_or_none(found: dict[str, Any], elapsed: Any) -> None:
    try:
        frame = plistlib.dumps({"processor": found, "elapsed_ns": 1 if elapsed is None else elapsed})
    except (TypeError, OverflowError):
        return  # no property list can hold that
    power = reading(frame)
    assert power is None or all(0 <= value < float("inf") for value in power.values())


@given(st.binary(max_size=400))
def test_bytes_of_any_kind_raise_nothing(noise: bytes) -> None:
    frames = Frames()
    for frame in [noise, *frames.feed(b"<plist>" + noise + END), *frames.feed(END)]:
        assert reading(frame) is None or b"_power" in frame
    assert watts(noise + END + sample())[-1] == pytest.approx(WATTS)
