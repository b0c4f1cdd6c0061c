"""Formatting of numbers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import units
from harness.records import METRICS, Estimate
from harness.tests.fake_runs import ratio


def estimate(value: float, low: float | None, high: float | None) -> Estimate:
    return Estimate(value=value, low=low, high=high, n=3, samples=60)


def both(first: float, second: float) -> Estimate:
    """Of two processes, with an interval that does not inform."""
    mean, each = math.sqrt(first * second), (first, second)
    return Estimate(value=mean, low=first / 9, high=9 * second, n=2, samples=9, each=each)


PRINTED = [
    (units.duration(0.0), "0 ns"),
    (units.duration(4.2e-7), "420 ns"),
    (units.duration(1.5e-5), "15.0 µs"),
    (units.duration(1.234e-3), "1.23 ms"),
    (units.duration(0.9996), "1,000 ms"),
    (units.duration(45), "45.0 s"),
    (units.duration(119.94), "120 s"),
    (units.duration(125), "2 min 05 s"),
    (units.duration(3599.7), "1 h 00 min"),
    (units.duration(7500), "2 h 05 min"),
    (units.duration(21.1 * 86400), "21 d 2 h"),
    # The bound of a timeout stays true.
    (units.bound_text("tokens_per_s", 1024.0), "under 1,030"),
    (units.bound_text("tokens_per_s", 10.72), "under 10.8"),
    (units.bound_text("tokens_per_s", 500.0), "under 500"),
    (units.bound_text("step_s", 51.26), "over 51.2 s"),
    (units.bound_text("step_s", 0.5), "over 500 ms"),
    (units.percent(0.0021), "0.21 %"),
    (units.factor(785 / 27), "29x"),
    (units.factor(1.074), "1.07x"),
    (units.utc("2026-11-21T09:30:12.5+02:00"), "2026-11-21 07:30:12 UTC"),
    (units.utc("2026-11-21T07:30:12Z"), "2026-11-21 07:30:12 UTC"),
    (units.utc(""), ""),
    (units.scalar(True), "true"),
    # The interval sets the digits: plain, narrow, wide, beyond 2x, down to 0, none, millions.
    (units.value("tokens_per_s", estimate(10_512, 10_301, 10_728)), "10,500 [10,300 … 10,700]"),
    (units.value("tokens_per_s", estimate(10_512, 10_507, 10_517)), "10,512 [10,507 … 10,517]"),
    (units.value("tokens_per_s", estimate(24.2, 13.1, 44.8)), "24 [13 … 45]"),
    (units.value("tokens_per_s", estimate(24.2, 3.1, 310)), "24.2 (not bounded by 3 processes)"),
    (units.value("tokens_per_s", estimate(24.2, 0.0, 40)), "24.2 (not bounded by 3 processes)"),
    (units.value("tokens_per_s", estimate(11.3, None, None)), "11.3"),
    (units.value("tokens_per_s", estimate(0.9996, None, None)), "1.00"),
    (units.value("tokens_per_s", estimate(1.512e6, 1.501e6, 1.523e6)), "1.51 M [1.50 … 1.52]"),
    # An end that would be rounded to 0 has digits of its own.
    (units.value("scaling_exponent", estimate(0.4, -0.02, 0.8)), "0.4 [-0.02 … 0.8]"),
    (units.value("scaling_exponent", replace(estimate(0.4, -0.02, 0.8), n=1)), "0.400"),
    (units.value("loss", estimate(276, 1.86, 40_957)), "280 [2 … 40,960]"),
    (units.value("step_s", both(2.08e-3, 2.14e-3)), "2.08 and 2.14 ms"),
    (units.value("step_s", both(0.4352, 0.43529)), "435 ms"),
    (units.value("step_s", both(0.97, 1.04)), "0.970 and 1.04 s"),
    (units.ratio(ratio(1.24, 1.20, 1.28), "change"), "+24 % [+20 … +28]"),
    (units.ratio(ratio(0.95, 0.91, 0.99), "change"), "-5 % [-9 … -1]"),
    (units.ratio(ratio(1.43, 0.8, 2.6, 1.50, 1.34)), "+50.0 and +34.0 %"),
    (units.ratio(ratio(1.29, 1.27, 1.31, 1.289, 1.291)), "28.9 and 29.1 % slower"),
    (units.ratio(ratio(52.1, 17.0, 155.0, 52.04, 52.1)), "52.0x and 52.1x slower"),
    (units.ratio(ratio(4.0, 3.4, 4.6), "change"), "4.0x [3.4 … 4.6]"),
    (units.ratio(ratio(0.1, 0.08, 0.125), "change"), "10.0x [8.0 … 12.5] less"),
    (units.ratio(ratio(0.953, 0.49, 1.86), "change"), "-5 % [-50 … +90]"),
    (units.ratio(ratio(0.916, 0.0121, 68.981), "change"), "-8.4 %, not bounded"),
    (units.ratio(ratio(0.1, 0.02, 0.5), "change"), "10x less, not bounded"),
    (units.ratio(ratio(1.00003, 0.996, 1.004), "change"), "0.0 % [-0.4 … +0.4]"),
    (units.ratio(ratio(1.24, 1.20, 1.28)), "24 % [20 … 28] slower"),
    (units.ratio(ratio(0.8, 0.78, 0.82)), "25.0 % [22.0 … 28.2] faster"),
    (units.ratio(ratio(0.01, 0.008, 0.0125)), "100x [80 … 125] faster"),
    (units.ratio(ratio(1.017, 0.998, 1.033)), "+1.7 % [-0.2 … +3.3]"),
    (units.ratio(1.24), "24 % slower"),
]


@pytest.mark.parametrize(("text", "wanted"), PRINTED)
def test_a_number_is_printed_for_people(text: str, wanted: str) -> None:
    assert text == wanted


POSITIVE = st.floats(1e-12, 1e15)


@given(st.sampled_from(sorted(METRICS)), st.lists(POSITIVE, min_size=3, max_size=3))
def test_only_0_is_printed_as_0(metric: str, values: list[float]) -> None:
    low, value, high = sorted(values)

    ends = printed_ends(units.value(metric, estimate(value, low, high)))

    assert 0 not in ends


@given(st.lists(st.floats(1e-300, 1e6), min_size=3, max_size=3))
def test_an_end_of_a_change_is_printed_as_0_only_if_it_is(values: list[float]) -> None:
    low, value, high = sorted(values)

    text = units.ratio(ratio(value, low, high), "change")

    ends = printed_ends(text)
    if " % [" in text:
        assert (0 in ends) == (1.0 in (low, high))
    else:
        assert 0 not in ends


def printed_ends(text: str) -> list[float]:
    """The numbers between brackets; none for a count without an interval."""
    inside = text.partition("[")[2].partition("]")[0]
    return [float(end.replace(",", "").lstrip("<>")) for end in inside.split(" … ") if end]


@given(st.sampled_from(sorted(METRICS)), st.floats(1e-9, 1e15), st.floats(0, 0.5))
def test_a_printed_value_is_close_to_the_value(metric: str, value: float, spread: float) -> None:
    e = estimate(value, value * (1 - spread), value * (1 + spread))

    text = units.value(metric, e)

    number, _, unit = text.partition(" [")[0].partition(" ")
    size = {
        "ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400,
        "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "%": 0.01, "M": 1e6,
        "µJ": 1e-6, "mJ": 1e-3, "kJ": 1e3,
    }.get(unit, 1)  # fmt: skip
    printed = float(number.replace(",", "")) * size
    assert math.isclose(printed, value, rel_tol=max(0.006, spread))
