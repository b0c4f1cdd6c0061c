"""Formatting of numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import units
from harness.records import METRICS, Estimate


def estimate(value: float, low: float | None, high: float | None) -> Estimate:
    return Estimate(value=value, low=low, high=high, processes=3, samples=60)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"),
        (4.2e-7, "420 ns"),
        (1.5e-5, "15.0 µs"),
        (1.234e-3, "1.23 ms"),
        (0.9996, "1,000 ms"),
        (45, "45.0 s"),
        (119.94, "120 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (21.1 * 86400, "21 d 2 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("metric", "bound", "said"),
    [
        ("tokens_per_s", 1024.0, "under 1,030"),
        ("tokens_per_s", 10.72, "under 10.8"),
        ("tokens_per_s", 500.0, "under 500"),
        ("step_s", 51.26, "over 51.2 s"),
        ("step_s", 0.5, "over 500 ms"),
    ],
)
def test_the_bound_of_a_timeout_is_rounded_so_that_it_stays_true(
    metric: str, bound: float, said: str
) -> None:
    assert units.bound_text(metric, bound) == said


def test_other_quantities() -> None:
    assert units.percent(0.0021) == "0.21 %"
    assert units.factor(785 / 27) == "29x"
    assert units.factor(1.074) == "1.07x"
    assert units.utc("2026-11-21T09:30:12.5+02:00") == "2026-11-21 07:30:12 UTC"
    assert units.utc("2026-11-21T07:30:12Z") == "2026-11-21 07:30:12 UTC"
    assert units.utc("") == ""
    assert [units.scalar(v) for v in (True, 2048, 0.5, "off")] == ["true", "2048", "0.5", "off"]


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        pytest.param(10_512, 10_301, 10_728, "10,500 [10,300 … 10,700]", id="plain"),
        pytest.param(10_512, 10_507, 10_517, "10,512 [10,507 … 10,517]", id="narrow"),
        pytest.param(24.2, 13.1, 44.8, "24 [13 … 45]", id="wide"),
        pytest.param(24.2, 3.1, 310, "24.2 (not bounded by 3 processes)", id="beyond-2x"),
        pytest.param(24.2, 0.0, 40, "24.2 (not bounded by 3 processes)", id="down-to-0"),
        pytest.param(11.3, None, None, "11.3", id="one-process"),
        pytest.param(0.9996, None, None, "1.00", id="one-process-rounds-up"),
        pytest.param(1_512_000, 1_501_000, 1_523_000, "1.51 M [1.50 … 1.52]", id="millions"),
    ],
)
def test_the_interval_sets_the_digits(
    value: float, low: float | None, high: float | None, text: str
) -> None:
    assert units.cell("tokens_per_s", estimate(value, low, high)) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        ((1.24, 1.20, 1.28), "+24 % [+20 … +28]"),
        ((0.95, 0.91, 0.99), "-5 % [-9 … -1]"),
        ((4.0, 3.4, 4.6), "4.0x [3.4 … 4.6]"),
        ((0.1, 0.08, 0.125), "10.0x [8.0 … 12.5] less"),
        ((0.953, 0.49, 1.86), "-5 % [-50 … +90]"),
        ((0.916, 0.0121, 68.981), "-8.4 %, not bounded"),
        ((0.1, 0.02, 0.5), "10x less, not bounded"),
        ((1.00003, 0.996, 1.004), "+0.0 % [-0.4 … +0.4]"),
    ],
)
def test_change(ratio: tuple[float, float, float], text: str) -> None:
    assert units.change(*ratio) == text


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((1.24, 1.20, 1.28), "24 % [20 … 28] slower"),
        ((0.8, 0.78, 0.82), "25.0 % [22.0 … 28.2] faster"),
        ((0.01, 0.008, 0.0125), "100x [80 … 125] faster"),
        ((52.0, 17.0, 155.0), "52x [17 … 155] slower"),
        ((1.017, 0.998, 1.033), "+1.7 % [-0.2 … +3.3]"),
        ((1.24,), "24 % slower"),
    ],
)
def test_a_slowdown_has_its_plain_direction(ends: tuple[float, ...], text: str) -> None:
    assert units.slowdown(*ends) == text


@pytest.mark.parametrize(
    ("metric", "values", "text"),
    [
        ("scaling_exponent", (0.4, -0.02, 0.8), "0.4 [-0.02 … 0.8]"),
        ("loss", (276, 1.86, 40_957), "280 [2 … 40,960]"),
    ],
)
def test_an_end_that_would_be_rounded_to_0_has_digits_of_its_own(
    metric: str, values: tuple[float, float, float], text: str
) -> None:
    assert units.cell(metric, estimate(*values)) == text


@pytest.mark.parametrize(
    ("both", "text"),
    [
        ((2.08e-3, 2.14e-3), "2.08 and 2.14 ms"),
        ((0.4352, 0.43529), "435 ms"),
        ((0.97, 1.04), "0.970 and 1.04 s"),
    ],
)
def test_two_processes_without_an_interval_are_both_printed(
    both: tuple[float, float], text: str
) -> None:
    mean = math.sqrt(both[0] * both[1])
    two = Estimate(value=mean, low=both[0] / 9, high=both[1] * 9, processes=2, samples=9, each=both)

    assert units.cell("step_s", two) == text
    assert not units.informs("step_s", two)


POSITIVE = st.floats(1e-12, 1e15)


@given(st.sampled_from(sorted(METRICS)), st.lists(POSITIVE, min_size=3, max_size=3))
def test_only_0_is_printed_as_0(metric: str, values: list[float]) -> None:
    low, value, high = sorted(values)

    ends = printed_ends(units.cell(metric, estimate(value, low, high)))

    assert 0 not in ends


@given(st.lists(st.floats(1e-300, 1e6), min_size=3, max_size=3))
def test_an_end_of_a_change_is_printed_as_0_only_if_it_is(values: list[float]) -> None:
    low, ratio, high = sorted(values)

    text = units.change(ratio, low, high)

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

    text = units.cell(metric, e)

    number, _, unit = text.partition(" [")[0].partition(" ")
    size = {
        "ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400,
        "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "%": 0.01, "M": 1e6,
    }.get(unit, 1)  # fmt: skip
    printed = float(number.replace(",", "")) * size
    assert math.isclose(printed, value, rel_tol=max(0.006, spread))
