"""What a finding states, in words."""

from dataclasses import replace

from harness import units
from harness.records import METRICS, Fact, Finding, Outcome

CROSSES = "crosses a threshold"
"""What a finding says of an interval; a page that states the limit behind it leaves it out."""


def better(metric: str) -> str:
    if metric in ("step_s", "step_cycles", "tokens_per_s"):
        return "as fast as"
    return f"as good in {units.title(metric)} as"


def finding_sentence(f: Finding) -> str:
    """What a finding states, without its case."""
    value = _value(f)
    why = f": {f.detail}" if f.detail else ""
    match f.fact:
        case Fact.SLOW:
            return f"slow: {units.bound_text('step_s', f.bound)} a step" if f.bound else "slow"
        case Fact.FASTEST:
            each = " a step" if f.metric == "step_s" else ""
            near = f" ({len(f.cases)} cases not told apart)" if f.cases[1:] else ""
            return f"{value}{each}{near}"
        case Fact.SINGLE_PROCESSES:
            return f"{value}, one process a case"
        case Fact.NO_METRIC:
            return f"{units.title(f.metric)} not available{why}"
        case Fact.AT_LEAST | Fact.AT_MOST:
            return _bounded(f)
        case Fact.NO_INTERVAL:
            return f"{value}, one process"
        case Fact.NOT_FINITE:
            return f"{value} has no finite interval"
        case Fact.INTERVAL:
            return value
        case Fact.CLEAR:
            return f"{value}, every process"
        case Fact.ACROSS:
            if f.estimate and not units.informs(f.metric, f.estimate):
                return f"{value}: too few processes to decide"
            return f"{value} {CROSSES}"
        case Fact.FEW:
            return f"{value}, one process{' each' if f.count > 1 else ''}"
        case Fact.NO_PARTNER:
            absent = f"no {units.title(f.metric)}"
            if f.outcome is not Outcome.OK:
                absent = units.ending_text(f.outcome, f.detail)
            return f"nothing to compare with: {f.partner}: {absent}"
        case Fact.LEFT_OUT:
            return f"this run lacks its {'case' if f.asked == 1 else f'{f.asked} cases'}{why}"
        case Fact.EXPECTED:
            ends = [None if e is None else units.plain(f.metric, e) for e in (f.low, f.high)]
            signs = [f"{sign} {end}" for sign, end in zip("≥≤", ends, strict=True) if end]
            name = f"{METRICS[f.metric].title} " if METRICS[f.metric].unit == "ratio" else ""
            source = f" ({f.detail})" if f.detail else ""
            return f"{name}{value}; expected {' and '.join(signs)}{source}"
    return units.fact_text(f)


def _value(f: Finding) -> str:
    """The measured number of a finding; empty without one."""
    if f.estimate is None:
        return ""
    if f.partner:
        return f"{_ratio(f)} {better(f.metric)} {f.partner}"
    clear = f.fact is Fact.CLEAR
    shown = replace(f.estimate, low=None, high=None) if clear else f.estimate
    value = units.measured(f.metric, shown)
    value = f"exponent {value}" if f.metric == "scaling_exponent" else value
    return f"{value} {f.detail}" if f.detail and f.fact is not Fact.EXPECTED else value


def _ratio(f: Finding) -> str:
    assert f.estimate is not None
    if f.fact is Fact.FEW:  # a guard band is no interval of anything measured
        return units.number(f.estimate.value, 3) + "x"
    if f.fact is Fact.CLEAR and f.estimate.ends:
        return units.ends(1.0, f.estimate.ends, "x to ") + "x"
    return units.times(f.estimate)


def _bounded(f: Finding) -> str:
    """What a timeout leaves of a metric, or of a ratio."""
    bound, least = f.bound or 0.0, f.fact is Fact.AT_LEAST
    if f.partner and least:
        ratio = units.number(units.rounded_down(bound, 3), 3)
        return f"at least {ratio}x {better(f.metric)} {f.partner}, which timed out"
    if f.partner:
        ratio = units.number(units.rounded_up(bound, 3), 3)
        return f"timed out: under {ratio}x {better(f.metric)} {f.partner}"
    unit = " per step" if least else units.suffix(f.metric)
    return f"timed out: {units.bound_text(f.metric, bound)}{unit}"
