"""Effect of the provider, or of an axis with two values, on the speed of otherwise equal cases."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.analysis.scaling import groups_along
from harness.analysis.statistics import half_width
from harness.records import CaseSummary, Estimate, Outcome, Scalar

NO_EFFECT = 0.02
"""If the whole interval is within this of 1, the effect is reported as no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Step time per token at `value` over that at `base`: above one is slower."""

    workload: str
    axis: str
    base: Scalar
    value: Scalar
    ratio: float
    """Geometric mean over the pairs."""
    low: float | None
    high: float | None
    """95 % interval over processes, for exactly these pairs; None with one process per case."""
    smallest: float
    largest: float
    """Ratios of the pairs that the axis slows least and most."""
    pairs: int

    @property
    def negligible(self) -> bool:
        return (
            self.low is not None
            and self.high is not None
            and self.low > 1 / (1 + NO_EFFECT)
            and self.high < 1 + NO_EFFECT
        )


def effects(summaries: Sequence[CaseSummary]) -> tuple[Effect, ...]:
    """One effect per workload and swept axis with exactly two values, and per provider.

    A pair counts if both cases are ok and all other axes are equal, so axes that change together
    have no effect of their own. The base is the first value in the suite, or the first provider
    with an ok case.
    """
    found = []
    for workload in dict.fromkeys(s.case.workload for s in summaries):
        cases = [s for s in summaries if s.case.workload == workload]
        names = dict.fromkeys(name for s in cases for name in s.case.swept)
        for axis in ["provider", *names]:
            base, *others = _values(cases, axis) or [""]
            ok = [s for s in cases if _has_a_speed(s)]
            groups = [{s.case.get(axis): s for s in group} for group in groups_along(ok, axis)]
            for value in others:
                both = [group for group in groups if {base, value} <= group.keys()]
                pairs = [(_per_token(group[base]), _per_token(group[value])) for group in both]
                if pairs:
                    found.append(_effect(workload, axis, base, value, pairs))
    return tuple(found)


def _values(cases: Sequence[CaseSummary], axis: str) -> list[Scalar]:
    """The values to compare, the base first; none for an axis with more than two values."""
    if axis == "provider":
        return [*dict.fromkeys(s.case.provider for s in cases if _has_a_speed(s))]
    values = [*dict.fromkeys(s.case.get(axis) for s in cases)]
    known = [v for v in values if v is not None]
    return known if len(known) == len(values) == 2 else []


def _has_a_speed(summary: CaseSummary) -> bool:
    return summary.outcome is Outcome.OK and "step_s" in summary.metrics


def _per_token(summary: CaseSummary) -> Estimate:
    """Step time per token, or per step if the workload does not count tokens."""
    step = summary.metrics["step_s"]
    tokens = summary.tokens or 1
    low, high = (None if end is None else end / tokens for end in (step.low, step.high))
    return replace(step, value=step.value / tokens, low=low, high=high)


def _effect(
    workload: str,
    axis: str,
    base: Scalar,
    value: Scalar,
    pairs: Sequence[tuple[Estimate, Estimate]],
) -> Effect:
    logs = [math.log(b.value / a.value) for a, b in pairs]
    mean = sum(logs) / len(logs)
    half = half_width([estimate for pair in pairs for estimate in pair], len(pairs))
    return Effect(
        workload=workload,
        axis=axis,
        base=base,
        value=value,
        ratio=math.exp(mean),
        low=None if half is None else math.exp(mean - half),
        high=None if half is None else math.exp(mean + half),
        smallest=math.exp(min(logs)),
        largest=math.exp(max(logs)),
        pairs=len(pairs),
    )
