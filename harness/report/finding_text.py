"""What a finding states, in words."""

from harness import units
from harness.records import METRICS, Fact, Finding, Outcome


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
        case Fact.NO_METRIC:
            return f"{units.title(f.metric)} not available{why}"
        case Fact.AT_LEAST | Fact.AT_MOST:
            return _bounded(f)
        case Fact.DECIDED | Fact.OPEN:
            after = f.estimate.processes if f.fact is Fact.OPEN and f.estimate else 0
            return f"{value}{_expected(f)}{f', open after {after} processes' if after > 2 else ''}"
        case Fact.NO_PARTNER:
            absent = f"no {units.title(f.metric)}"
            if f.outcome is not Outcome.OK:
                absent = units.ending_text(f.outcome, f.detail)
            return f"nothing to compare with: {f.partner}: {absent}"
        case Fact.LEFT_OUT:
            return f"this run lacks its {'case' if f.asked == 1 else f'{f.asked} cases'}{why}"
    return units.fact_text(f)


def _value(f: Finding) -> str:
    """The measured number of a finding; empty without one."""
    if f.estimate is None:
        return ""
    few = f" ({units.plural('process', f.estimate.processes)})" * (f.estimate.processes < 3)
    few = few if f.estimate.each else ""
    if f.partner:
        return f"{units.times(f.estimate)} {better(f.metric)} {f.partner}{few}"
    value = units.measured(f.metric, f.estimate)
    value = f"exponent {value}" if f.metric == "scaling_exponent" else value
    if f.low is not None or f.high is not None:
        name = f"{METRICS[f.metric].title} " if METRICS[f.metric].unit == "ratio" else ""
        return f"{name}{value}{few}"
    return f"{value}{f' {f.detail}' if f.detail else ''}{few}"


def _expected(f: Finding) -> str:
    """`; expected ≥ 500 (source)`; empty if the finding has no range."""
    ends = [None if e is None else units.plain(f.metric, e) for e in (f.low, f.high)]
    signs = [f"{sign} {end}" for sign, end in zip("≥≤", ends, strict=True) if end]
    source = f" ({f.detail})" if f.detail else ""
    return f"; expected {' and '.join(signs)}{source}" if signs else ""


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
