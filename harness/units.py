"""Numbers in SI units, formatted for people. No number is computed here.

A number has three significant digits, one with an interval as many as that justifies. What is
known of one side only is rounded so that it stays true.
"""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from harness.records import METRICS, Estimate, Interval, Outcome, Ratio, Stop

MOST_APART = 2.0
"""A bound beyond this factor of the estimate is not printed: it would not inform."""

RatioStyle = Literal["slower", "change", "least", "most", "times", "fast", "beside", "share"]
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0


def number(value: float, digits: int | None = None) -> str:
    """Significant digits with thousands separators: 11, 10,500, 0.0123. Without `digits` at most
    three and no trailing zeros, as for a stated value."""
    if not math.isfinite(value):
        return str(value)
    wanted = 3 if digits is None else digits
    rounded = _rounded(value, wanted)
    text = f"{rounded:,.{max(0, _place(rounded, wanted))}f}" if rounded else "0"
    if digits is None and "." in text:
        text = text.rstrip("0").rstrip(".")
    return text


def duration(seconds: float) -> str:
    """1.23 ms, 45.0 s, 2 min 05 s, 2 h 05 min, 21 d 3 h."""
    if not math.isfinite(seconds) or abs(seconds) < 2 * MINUTE_S:
        one, unit = _time(seconds)
        return number(seconds / one, 3) + unit
    if seconds < HOUR_S - 0.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    if seconds < 2 * DAY_S - 30:
        hours, rest = divmod(round(seconds / MINUTE_S), 60)
        return f"{hours} h {rest:02d} min"
    days, rest = divmod(round(seconds / HOUR_S), 24)
    return f"{days:,} d {rest} h"


def size(value: float) -> str:
    """7.21 GiB: binary units under their own names, never "GB"."""
    one, unit = _SCALES["B"](value)
    return number(value / one, 3) + unit


def percent(ratio: float) -> str:
    """24 %, 0.21 %, from a ratio."""
    return number(ratio * 100) + " %"


def factor(ratio: float) -> str:
    """29x, 1.07x: two digits, three near one."""
    return number(ratio, 3 if 0.5 < ratio < 2 else 2) + "x"


def utc(iso: str) -> str:
    """2026-11-21 07:30:12 UTC, from ISO 8601 with an offset or a Z; empty stays empty."""
    if not iso:
        return ""
    moment = datetime.datetime.fromisoformat(iso)
    if moment.tzinfo is not None:
        moment = moment.astimezone(datetime.UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _time(seconds: float) -> tuple[float, str]:
    for limit, one, unit in (
        (1e-6, 1e-9, " ns"),
        (1e-3, 1e-6, " µs"),
        (1.0, 1e-3, " ms"),
        (2 * MINUTE_S, 1.0, " s"),
        (2 * HOUR_S, MINUTE_S, " min"),
        (2 * DAY_S, HOUR_S, " h"),
    ):
        if abs(seconds) < limit:
            return one, unit
    return DAY_S, " d"


def _rate(value: float) -> tuple[float, str]:
    return (1e6, " M") if abs(value) >= 1e6 else (1.0, "")


def _prefixed(value: float, *units: tuple[float, str]) -> tuple[float, str]:
    """The largest of the units, in descending order, of which the value has one; else the last."""
    return next((unit for unit in units if abs(value) >= unit[0]), units[-1])


_SCALES: Mapping[str, Callable[[float], tuple[float, str]]] = {
    "s": _time,
    "tokens/s": _rate,
    "cycles": _rate,
    "ratio": lambda _: (0.01, " %"),
    "B": lambda x: _prefixed(x, (2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B")),
    "J": lambda x: _prefixed(x, (1e3, " kJ"), (1, " J"), (1e-3, " mJ"), (1e-6, " µJ")),
}
"""Unit -> the one that a magnitude is printed in, as (that in SI, suffix); others are kept."""
_NAMED_ONCE = ("tokens/s", "cycles", "cores", "steps")
"""Units that a table has in its heading, and that a sentence must add."""


def _unit(metric: str) -> str:
    """Empty for a metric that only a program knows: its values are printed as reported."""
    return METRICS[metric].unit if metric in METRICS else ""


def _scaled(metric: str, value: float) -> tuple[float, str]:
    scale = _SCALES.get(_unit(metric))
    return scale(value) if scale else (1.0, "")


def suffix(metric: str) -> str:
    if metric in METRICS and METRICS[metric].counted:
        return f" {METRICS[metric].title}"
    return f" {_unit(metric)}" if _unit(metric) in _NAMED_ONCE else ""


def _is_count(metric: str) -> bool:
    return metric in METRICS and (METRICS[metric].counted or METRICS[metric].unit == "steps")


def plain(metric: str, value: float, digits: int | None = None) -> str:
    """A value of a metric, for use beside the metric's name: `tokens/s ≥ 500`."""
    if _is_count(metric):
        return _count(value)
    one, unit = _scaled(metric, value)
    return number(value / one, digits) + unit


def quantity(metric: str, value: float) -> str:
    """A stated value of a metric with its unit, for a sentence: `500 tokens/s`."""
    return plain(metric, value) + suffix(metric)


def informs(metric: str, estimate: Interval) -> bool:
    """Whether an estimate has an interval that is worth printing."""
    low, high = estimate.low, estimate.high
    if estimate.both or low is None or high is None:
        return False
    if _unit(metric) in ("", "1") or METRICS[metric].signed:
        return True  # may be 0 or negative, so a factor says nothing
    return low * MOST_APART >= estimate.value >= high / MOST_APART


def value(metric: str, estimate: Interval, *, unit: bool = False) -> str:
    """A measured metric with its 95 % interval: `1.23 ms [1.20 … 1.26]`; with `unit`, for a
    sentence, also the unit that a table has in its heading.

    A count has all its digits, and its range if steps differ. Of two processes: `2.08 and 2.14 ms`.
    Without an interval that informs: `25.0 ms (not bounded by 3 processes)`.
    """
    end = suffix(metric) if unit else ""
    low, high = estimate.low, estimate.high
    steps = estimate.samples if isinstance(estimate, Estimate) and _is_count(metric) else 0
    if steps and low is not None and high is not None:
        ranged = "" if low == high else f" ({_count(low)} to {_count(high)} in {steps} steps)"
        end = end.removesuffix("s") if estimate.value == 1 else end
        return f"{_count(estimate.value)}{ranged}{end}"
    if metric == "scaling_exponent" and estimate.n == 1:
        low = high = None  # over lengths, not processes
    one, scale = _scaled(metric, estimate.value)
    if estimate.both:
        signed = metric in METRICS and METRICS[metric].signed
        return f"{ends(one, estimate.both, ' and ', sign=signed)}{scale}{end}"
    if estimate.low is None and estimate.ends and estimate.n > 1:
        return f"{ends(one, estimate.ends, ' to ')}{scale}{end}"
    if estimate.low is not None and not informs(metric, estimate):
        text = _with_interval(estimate.value / one, None, None, scale)
        return f"{text}{end} (not bounded by {estimate.n} processes)"
    low, high = (None if x is None else x / one for x in (low, high))
    return _with_interval(estimate.value / one, low, high, scale) + end


def ends(one: float, values: Sequence[float], between: str, *, sign: bool = False) -> str:
    """Two numbers with three digits; one, if these do not tell them apart."""
    texts = (f"{'+' if sign and v > 0 else ''}{number(v / one, 3)}" for v in values)
    return between.join(dict.fromkeys(texts))


def plural(noun: str, count: int) -> str:
    """`1 case`, `3 cases`, `2 processes`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def repeats(processes: int) -> str:
    """` (2 processes)`: how few a number is from; empty from three on."""
    return f" ({plural('process', processes)})" if processes in (1, 2) else ""


def ratio(found: Ratio | float, style: RatioStyle = "slower") -> str:
    """One side over the other, with its interval from two processes on:

    - `slower`, of times: `24 % [20 … 28] slower`; as `change` if the interval contains 1
    - `change`, of times: `+24 % [+20 … +28]`, `91x less`; if a bound is 2x away, `not bounded`
    - `least`, of times of which only the nearer end is known: `at least 47x faster`
    - `most`, an upper bound of times: `at most 2 % slower`, `at least 1 % faster`
    - `times`, how many times better: `4.56x [4.53 … 4.59]`, `1.50x and 1.93x`
    - `fast`, of speeds: `1.2x as fast`, `1.2x slower`; `beside`: `1.2x slower than`
    - `share`, of what is no speed: `102 % [101 … 103]`, from twice on `3.1x`
    """
    r = found if isinstance(found, Ratio) else Ratio(value=found, n=1)
    r = r if r.n > 1 else replace(r, low=None, high=None)
    match style:
        case "change":
            return _change(r)
        case "least":
            return _at_least(r)
        case "most":
            return f"{'at most' if r.value >= 1 else 'at least'} {_slower(r)}"
        case "times":
            return _times(r)
        case "fast" | "beside":
            slower = (r.high or r.value) < 1
            said = f"{_times(r.inverse)} slower" if slower else f"{_times(r)} as fast"
            return said if style == "fast" else f"{said} {'than' if slower else 'as'}"
        case "share":
            return value("mfu", r) if r.value < MOST_APART else _times(r)
    return _slower(r)


def _change(r: Ratio) -> str:
    apart = max(r.value / (r.low or r.value), (r.high or r.value) / r.value)
    if apart > MOST_APART and not r.both:
        return f"{_change(replace(r, low=None, high=None))}, not bounded"
    return f"{_larger(r.inverse)} less" if r.value <= 0.5 else _larger(r, sign=True)


def _slower(r: Ratio) -> str:
    if (r.value if r.low is None else r.low) <= 1 <= (r.value if r.high is None else r.high):
        return _change(r)
    return f"{_larger(r.inverse)} faster" if r.value < 1 else f"{_larger(r)} slower"


def _at_least(r: Ratio) -> str:
    times, word = (r.value, "slower") if r.value >= 1 else (r.inverse.value, "faster")
    amount, unit = (times, "x") if times >= 2 else ((times - 1) * 100, " %")
    return f"at least {number(rounded_down(amount, 2), 2)}{unit} {word}"


def _times(r: Ratio) -> str:
    if r.n == len(r.each) == 2:
        return f"{ends(1.0, r.each, 'x and ')}x"
    return _with_interval(r.value, r.low, r.high, "x")


def rounded_down(value: float, digits: int) -> float:
    """Rounded down to so many significant digits."""
    unit = 10.0 ** (math.floor(math.log10(abs(value))) + 1 - digits) if value else 1.0
    return math.floor(value / unit + 1e-9) * unit


def rounded_up(value: float, digits: int) -> float:
    return -rounded_down(-value, digits)


def _larger(ratio: Ratio, *, sign: bool = False) -> str:
    """In percent, from twice on as a factor."""
    if ratio.both and min(ratio.both) >= 2:
        return f"{ends(1.0, ratio.both, 'x and ')}x"
    if ratio.both:
        return f"{ends(0.01, [x - 1 for x in ratio.both], ' and ', sign=sign)} %"
    if ratio.value >= 2:
        return _with_interval(ratio.value, ratio.low, ratio.high, "x", digits=2)
    below, above = (None if end is None else (end - 1) * 100 for end in (ratio.low, ratio.high))
    return _with_interval((ratio.value - 1) * 100, below, above, " %", sign=sign, digits=2)


def _count(value: float) -> str:
    """1,203, with all digits; a stated bound may have a fraction."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,}"


def _with_interval(
    value: float,
    low: float | None,
    high: float | None,
    unit: str,
    *,
    sign: bool = False,
    digits: int = 3,
) -> str:
    """Value and interval in one unit, with the decimal places that the interval justifies.

    Three significant digits, but fewer for a wide interval (the rounding rule of the Particle Data
    Group), and more for one so narrow that three would hide it. An exact value has no interval.
    """
    if math.isfinite(value) and value == low == high and not sign:
        return (_count(value) if value == round(value) else number(value, digits)) + unit
    if low is None or high is None or not all(map(math.isfinite, (value, low, high))):
        rounded = _rounded(value, digits)
        return _fixed(rounded, _place(rounded, digits), sign) + unit
    half = min(value - low, high - value)
    if half > 0:
        leading = half / 10.0 ** math.floor(math.log10(half))
        justified = _place(half, 2 if leading < 3.55 else 1)
        place = min(justified, max(_place(value, 3), min(_place(half, 1), _place(value, 5))))
    else:
        place = _place(value, 3)
    coarse = place < 0 and round(value, place) == 0
    text = _fixed(value, min(0, _place(value, 1)) if coarse else place, sign)
    below, above = (  # an end that would be rounded to 0 has its first digit
        _fixed(end, place if round(end, place) else _place(end, 1), sign) for end in (low, high)
    )
    return f"{text}{unit} [{below} … {above}]"


def _rounded(value: float, digits: int) -> float:
    """To this number of significant digits: 0.9996 becomes 1.0."""
    return float(f"{value:.{digits - 1}e}")


def _place(value: float, digits: int) -> int:
    """Decimal place of the last significant digit; negative left of the point."""
    if value == 0 or not math.isfinite(value):
        return digits - 1
    return digits - 1 - math.floor(math.log10(abs(value)))


def _fixed(value: float, place: int, sign: bool) -> str:
    if not math.isfinite(value):
        return str(value)
    rounded = round(value, place) + 0.0
    return f"{rounded:{'+' if sign and rounded else ''},.{max(0, place)}f}"


def scalar(value: bool | int | float | str | None) -> str:
    """A configuration value as YAML writes it: true, 2048, 0.5, text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def title(metric: str) -> str:
    """Of a metric; its name, if only a program knows it."""
    return METRICS[metric].title if metric in METRICS else metric


def bound_text(metric: str, bound: float) -> str:
    """`under 10.8`, `over 51.2 s`: what a timeout leaves of a metric."""
    if METRICS[metric].higher_is_better:
        return f"under {plain(metric, rounded_up(bound, 3))}"
    return f"over {plain(metric, rounded_down(bound, 3))}"


def stop_text(stop: Stop) -> str:
    """`decided by rule “floor”`, `the budget of 10 min left no more time`."""
    if stop.budget_s is None:
        return f"decided by rule “{stop.rule}”"
    return f"the budget of {number(stop.budget_s / MINUTE_S)} min left no more time"


def outcome_name(outcome: Outcome | None) -> str:
    return "not run" if outcome is None else outcome.replace("_", " ")
