"""What explains a gap: the effect of each suspect against the difference between seen and expected.

A suspect is ruled out if four effects of its size together would not do. It is enough if its whole
interval lies beyond the gap. If the case with it does far better than was expected, by more than
another GPU is assumed to explain, it is undecided. "Enough" is no proof: that needs a run in which
removing it closes the gap on the machine of the gap.

Below: what else was seen that day. A candidate is a case with a suspect that was not off in that
run, or one with that day's settings. It agrees within AGREES, ALIKE, or what _WITHIN allows.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean

from harness.analysis.effects import per_token
from harness.analysis.recorded import TIMED, readings
from harness.analysis.statistics import ratio_of
from harness.records import (
    METRICS,
    Case,
    CaseSummary,
    Estimate,
    Gap,
    Match,
    Observation,
    Outcome,
    Ratio,
    Run,
    Suite,
    Suspect,
    pairs,
    partners,
)

LEAST_GAP = 1.03
"""A gap below this factor is too small for one run to explain."""
SHOWN = 1.02
"""Least effect that counts as a contribution."""
RULING_OUT = 4
"""How many effects of this size may not explain the gap together."""
FASTER_GPU = 4.0
"""Assumed: how many times as fast as the GPU of the gap another one may be."""
AGREES, ALIKE = 2.0, 1.5
"""Factors within which a number, and a ratio of two, are what was seen."""
MAX_CANDIDATES = 5
_WITHIN = {
    "tokens_per_s": (FASTER_GPU, AGREES),
    "step_s": (AGREES, FASTER_GPU),
    "gpu_utilisation": (ALIKE, FASTER_GPU),
}
"""How many times as much as was seen a metric may be here, and as little: a slower GPU makes fewer
tokens/s and is busier. None is more than 100 % busy, so that a factor of two says little."""


class Conclusion(StrEnum):
    """What a run says of a suspect."""

    RULED_OUT = "ruled out"
    CONTRIBUTES = "contributes"
    UNDECIDED = "undecided"
    ENOUGH = "enough by itself"
    APART = "does not reproduce it"
    WAS_OFF = "cannot be the cause: it was off"
    NOT_TESTED = "not tested"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """The case with the settings of that day that comes nearest to what was seen."""

    case_id: str
    here: float
    """The metric of the gap."""
    times: float
    """Of what was seen: above one is more."""

    @property
    def reproduced(self) -> bool:
        """Whether it is no farther away than another GPU is assumed to explain."""
        return 1 / FASTER_GPU <= self.times <= FASTER_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One suspect with its effect and the conclusion."""

    name: str
    conclusion: Conclusion
    effect: Ratio | None = None
    """Step time per token with the suspect over that without: above one is slower."""
    control: Estimate | None = None
    """The metric of the gap in the worst case without what the subject shares with it."""
    is_control: bool = False
    then: str = "unknown"
    """Whether it was on, or off, in the run of the gap."""
    share: tuple[float, float] | None = None
    """Least and greatest share of the gap, on logarithms, that it contributes."""
    reached: float | None = None
    """The metric of the gap in the slowest case with the suspect, to compare with what was seen."""
    remedy: str = ""
    undecided: tuple[str, ...] = ()
    """Ids of the cases of which more processes may decide it."""


def diagnose(suite: Suite, summaries: Sequence[CaseSummary]) -> tuple[Diagnosis, ...]:
    """A conclusion for each suspect of the suite, the ruled out ones first; none without suspects
    or if the gap is too small to explain.

    What was off is no cause. If the settings of that day do not reproduce what was seen, nothing
    here explains it, whatever it costs.
    """
    if suite.suspects is None or suite.suspects.gap.factor < LEAST_GAP:
        return ()
    gap, again = suite.suspects.gap, reproduction(suite, summaries)
    found = []
    for s in suite.suspects.tested:
        d = _control(s, gap, summaries) if s.control else _effect(s, gap, summaries)
        if s.then == "off":
            d = replace(d, conclusion=Conclusion.WAS_OFF, share=None, undecided=())
        elif again and not again.reproduced and _accused(d, s):
            d = replace(d, conclusion=Conclusion.APART, share=None, undecided=())
        found.append(replace(d, then=s.then))
    for name in suite.suspects.not_tested:
        found.append(Diagnosis(name=name, conclusion=Conclusion.NOT_TESTED))
    order = [*Conclusion]
    return tuple(sorted(found, key=lambda d: order.index(d.conclusion)))


def _accused(d: Diagnosis, suspect: Suspect) -> bool:
    """Whether it may be a cause, or is undecided but was on."""
    if d.is_control or d.conclusion is Conclusion.UNDECIDED:
        return suspect.then == "on" and not d.is_control
    return d.conclusion in (Conclusion.CONTRIBUTES, Conclusion.ENOUGH)


def reproduction(suite: Suite, summaries: Sequence[CaseSummary]) -> Reproduction | None:
    """How near the settings of that day come to what was seen; None without a case of them."""
    gap = suite.suspects.gap if suite.suspects else None
    if gap is None or gap.then is None:
        return None
    cases = [s for s in summaries if gap.then.accepts(s.case) and in_gap(gap.where, s.case)]
    here = {s.case.case_id: e.value for s in cases if (e := s.metrics.get(gap.metric))}
    if not here:
        return None
    nearest = min(here, key=lambda i: abs(math.log(here[i] / gap.seen)))
    return Reproduction(case_id=nearest, here=here[nearest], times=here[nearest] / gap.seen)


def _control(suspect: Suspect, gap: Gap, summaries: Sequence[CaseSummary]) -> Diagnosis:
    """What the subject shares with a case that lacks it is ruled out if that case does as well as
    was expected."""
    assert suspect.control is not None
    cases = [s for s in summaries if suspect.control.accepts(s.case) and in_gap(gap.where, s.case)]
    values = [e for s in cases if s.outcome is Outcome.OK and (e := s.metrics.get(gap.metric))]
    higher = METRICS[gap.metric].higher_is_better
    worst = (min if higher else max)(values, key=lambda e: e.value, default=None)
    loose = tuple(s.case.case_id for s in cases if s.metrics.get(gap.metric) is worst)
    found = Diagnosis(name=suspect.name, conclusion=Conclusion.NOT_TESTED, is_control=True)
    if worst is None or worst.low is None or worst.high is None:
        return replace(found, undecided=loose if worst else ())
    low, high, limit = worst.low, worst.high, gap.expected
    if not higher:
        low, high, limit = -high, -low, -limit
    if low >= limit:
        return replace(found, control=worst, conclusion=Conclusion.RULED_OUT)
    if high < limit:
        return replace(found, control=worst, conclusion=Conclusion.CONTRIBUTES)
    return replace(found, control=worst, conclusion=Conclusion.UNDECIDED, undecided=loose)


def _effect(suspect: Suspect, gap: Gap, summaries: Sequence[CaseSummary]) -> Diagnosis:
    pairs = list(_pairs(suspect, gap.where, summaries))
    effect = _spanning(pairs) if pairs else None
    loose = tuple(s.case.case_id for pair in pairs for s in pair)
    if effect is None or effect.low is None or effect.high is None:
        return Diagnosis(
            name=suspect.name, conclusion=Conclusion.NOT_TESTED, effect=effect, undecided=loose
        )
    low, high, factor = effect.low, effect.high, gap.factor
    higher = METRICS[gap.metric].higher_is_better
    reached = [e.value for _, b in pairs if (e := b.metrics.get(gap.metric))]
    worst = (min if higher else max)(reached, default=gap.seen)
    share = None
    faster, slower = (worst, gap.expected) if higher else (gap.expected, worst)
    far = faster >= FASTER_GPU * slower
    if high**RULING_OUT < factor:
        conclusion = Conclusion.RULED_OUT
    elif low >= factor and not far:
        conclusion = Conclusion.ENOUGH
    elif SHOWN < low < factor and not far:
        conclusion = Conclusion.CONTRIBUTES
        share = math.log(low) / math.log(factor), min(1.0, math.log(high) / math.log(factor))
    else:
        conclusion = Conclusion.UNDECIDED
    return Diagnosis(
        name=suspect.name,
        conclusion=conclusion,
        effect=effect,
        share=share,
        reached=worst if reached else None,
        remedy=suspect.remedy,
        undecided=loose if conclusion is Conclusion.UNDECIDED and low < factor else (),
    )


def _pairs(
    suspect: Suspect, where: Match, summaries: Sequence[CaseSummary]
) -> Iterator[tuple[CaseSummary, CaseSummary]]:
    """Summaries of `sides` that have a step time."""
    timed = {
        s.case.case_id: s for s in summaries if s.outcome is Outcome.OK and "step_s" in s.metrics
    }
    for a, b in sides(suspect, where, [s.case for s in timed.values()]):
        yield timed[a.case_id], timed[b.case_id]


def sides(suspect: Suspect, where: Match, cases: Iterable[Case]) -> list[tuple[Case, Case]]:
    """Cases without and with the suspect that are equal in every axis that neither side names."""
    there = (c for c in cases if in_gap(where, c))
    free = *suspect.without.criteria, *suspect.with_.criteria
    return partners(there, suspect.without, suspect.with_, *free)


def in_gap(where: Match, case: Case) -> bool:
    """Whether a case is in the configuration of the gap; an axis that it lacks does not count."""
    return all(case.get(name) in (*values, None) for name, values in where.criteria.items())


def _spanning(pairs: Sequence[tuple[CaseSummary, CaseSummary]]) -> Ratio:
    """The mean effect. Where the pairs disagree, its interval spans all of them."""
    steps = [(per_token(b), per_token(a)) for a, b in pairs]
    mean, each = ratio_of(*steps), [b.value / a.value for b, a in steps]
    if mean.low is None or mean.high is None:
        return mean
    return replace(mean, low=min(mean.low, *each), high=max(mean.high, *each))


# --- what was seen that day against what each candidate does here --------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A case with its value of each observation; None if it was not measured."""

    case_id: str
    suspects: tuple[str, ...]
    """Their names; empty if it only has that day's settings."""
    here: tuple[float | None, ...]
    agrees: tuple[bool, ...]
    pace: float
    """How many times as long its steps take on this host as on one that is not slow."""

    @property
    def against(self) -> Sequence[int]:
        """The observations that it contradicts: 0 is the gap itself."""
        return [i for i, x in enumerate(self.here) if x is not None and not self.agrees[i]]

    @property
    def misfit(self) -> tuple[bool, int]:
        """What does not make the gap fits less than what contradicts all else."""
        return not self.agrees[0], len(self.against)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The first observation is the gap itself."""

    seen: tuple[Observation, ...]
    candidates: tuple[Candidate, ...]
    """Those that fit best come first, of them those nearest to the gap."""

    def quiet(self, suspect: str, here: float) -> float:
        """The metric of the gap as it would be with this suspect on a host that is not slow."""
        pace = next((c.pace for c in self.candidates if suspect in c.suspects), 1.0)
        return here * _by_host(self.seen[0].metric, pace)


def fingerprint(
    run: Run, summaries: Sequence[CaseSummary], pace: Mapping[str, float]
) -> Fingerprint | None:
    """None without observations, or without a candidate that was measured. By `pace`, how many
    times as long a step takes on this host, speeds are compared as on one that is not slow."""
    suspects = run.suite.suspects
    if suspects is None or not suspects.observed:
        return None
    gap = suspects.gap
    seen = (Observation(metric=gap.metric, seen=gap.seen), *suspects.observed)
    ok = {s.case.case_id: s for s in summaries if s.outcome is Outcome.OK}
    again = reproduction(run.suite, summaries)
    names: dict[str, list[str]] = {again.case_id: []} if again else {}
    for suspect in suspects.tested:
        if suspect.control is None and suspect.then != "off":
            its = [i for i, s in ok.items() if suspect.with_.accepts(s.case)]
            for first in [i for i in its if in_gap(gap.where, ok[i].case)][:1]:
                names.setdefault(first, []).append(suspect.name)
    found = []
    for i, of in names.items():
        here = tuple(_here(run, ok, ok[i].case, o) for o in seen)
        by, both = pace.get(i, 1.0), zip(here, seen, strict=True)
        agrees = tuple(x is not None and _agrees(x, o, by) for x, o in both)
        found.append(Candidate(case_id=i, suspects=tuple(of), here=here, agrees=agrees, pace=by))
    found.sort(key=lambda c: (c.misfit, abs(math.log((c.here[0] or math.inf) / gap.seen))))
    some = tuple(found[:MAX_CANDIDATES])
    return Fingerprint(seen=seen, candidates=some) if some else None


def _here(run: Run, ok: Mapping[str, CaseSummary], case: Case, o: Observation) -> float | None:
    """The number, or for a ratio that in `at` over that in `over`, on one GPU."""
    a, b = _like(ok, case, o.at), _like(ok, case, o.over)
    top = _value(run, a, o.metric) if a else None
    below = _value(run, b, o.metric) if a and b and a.card == b.card else None
    if not o.over.criteria or top is None:
        return top
    return top / below if below else None


def _like(ok: Mapping[str, CaseSummary], case: Case, axes: Match) -> CaseSummary | None:
    """The case that differs from this one only in these axes."""
    alike = next(g for g in pairs(ok.values(), *axes.criteria) if ok[case.case_id] in g)
    return next((s for s in alike if axes.accepts(s.case)), None)


def _value(run: Run, s: CaseSummary, metric: str) -> float | None:
    if metric == "gpu_memory_bytes":  # by NVML, as nvidia-smi prints it
        each = [r for m in run.of(s.case.case_id) if (r := readings(m, metric, TIMED))]
        return fmean(map(max, each)) if each else None
    estimate = s.metrics.get(metric)
    return estimate.value if estimate else None


def _agrees(here: float, o: Observation, pace: float) -> bool:
    """Whether a number here is near what was seen; a ratio of two within ALIKE."""
    if o.over.criteria:
        return here / ALIKE <= o.seen <= here * ALIKE
    here *= _by_host(o.metric, pace)
    least, most = _WITHIN.get(o.metric, (AGREES, AGREES))
    return here / least <= o.seen <= here * most


def _by_host(metric: str, pace: float) -> float:
    """What a number is multiplied by to be that of a host that is not slow."""
    return {"tokens_per_s": pace, "step_s": 1 / pace}.get(metric, 1.0)
