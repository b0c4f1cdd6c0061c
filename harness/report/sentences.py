"""The executive summary: sentences, each computed from the records."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from harness import phrases, units
from harness.analysis import overhead
from harness.analysis.effects import Effect
from harness.analysis.expectation import SUSPICIOUS_MFU, Assessment, Judgement
from harness.analysis.scaling import ScalingFit
from harness.analysis.targets import Target
from harness.gate import KERNELS_THAT_RAN
from harness.records import (
    METRICS,
    CaseSummary,
    Decision,
    Environment,
    Estimate,
    Measurement,
    Outcome,
    Run,
    Scalar,
    Verdict,
)

MAX_FITS = 4
"""Groups up to which each exponent is said; past it, the least and the greatest."""
DIFFERENT, MIXED = 1.1, 2.0
"""Ratio between pairs from which a reader must know of their range; and from which their mean is no
effect, and has no interval."""
BUSY = 0.5
"""GPU utilisation under which the card waits for something else most of the time."""


def executive_summary(
    run: Run,
    summaries: Sequence[CaseSummary],
    verdict: Verdict,
    effects: Sequence[Effect],
    assessments: Sequence[Assessment],
    fits: Sequence[ScalingFit],
    targets: Sequence[Target] = (),
) -> tuple[str, ...]:
    """The verdict, what ran, what is odd, then one sentence for each further matter.

    At most one sentence a workload and one a matter, so that it stays short; the sections
    below the summary hold the rest.
    """
    return (
        f"{_decided(verdict)}: {phrases.verdict_sentence(verdict)}.",
        _what_ran(run, summaries),
        *_sampling(run),
        *_other_rules(verdict),
        *_expectations(assessments),
        *_speeds(summaries, effects),
        *_scaling(fits),
        *_targets(targets),
        *_idle_gpu(run, summaries),
        *_unsteady(summaries, run),
        *_anomalies(summaries),
    )


def outcome_name(outcome: Outcome | None) -> str:
    return "not run" if outcome is None else outcome.value.replace("_", " ")


def effect_sentence(e: Effect) -> str:
    """`gc=on` against `gc=off`: step time per token +24 % [+20 … +28], over 4 pairs of cases.

    Where pairs differ widely, or point both ways: +54 % in the mean, ..., from -31 % to 4.4x.
    """
    once = "; one process a case, so no interval" if e.low is None and not _mixed(e) else ""
    return (
        f"{_axis(e.axis, e.value)} against {_axis(e.axis, e.base)}: step time per token "
        f"{_effect(e)}, over {e.pairs} {_plural('pair', e.pairs)} of cases{_spread(e)}{once}."
    )


def _spread(e: Effect) -> str:
    """What lies behind the mean, where its pairs differ."""
    if e.pairs < 2 or e.largest / e.smallest <= DIFFERENT:
        return ""
    return f", from {units.change(e.smallest)} to {units.change(e.largest)}"


def _mixed(e: Effect) -> bool:
    """Whether its pairs differ so widely, or point both ways, that their mean is none of them."""
    return e.pairs > 1 and (
        e.largest / e.smallest > MIXED or e.smallest * DIFFERENT < 1 < e.largest / DIFFERENT
    )


def _effect(e: Effect) -> str:
    if _mixed(e):
        return f"{units.change(e.ratio)} in the mean"
    amount = units.change(e.ratio, e.low, e.high)
    if e.negligible:
        return f"unchanged ({amount})"
    if e.low is not None and e.high is not None and e.low <= 1 <= e.high:
        return f"not shown to differ ({amount})"
    return amount


def _targets(targets: Sequence[Target]) -> Iterable[str]:
    if targets:
        highest = max(targets, key=lambda t: t.mfu)
        yield (
            f"Targets under {units.percent(SUSPICIOUS_MFU)} of their card's peak prove little "
            f"when met; the highest of {len(targets)}: {phrases.target_text(highest)}."
        )


def _unsteady(summaries: Sequence[CaseSummary], run: Run) -> Iterable[str]:
    """Cases with a process that found no steady state: their numbers are of a moving thing."""
    unsteady = [
        s.case.case_id
        for s in summaries
        if any(m.steady is False and m.outcome is Outcome.OK for m in run.of(s.case.case_id))
    ]
    if unsteady:
        first = f"`{unsteady[0]}`" + (f" and {len(unsteady) - 1} more" if unsteady[1:] else "")
        yield f"No steady state was reached in {first}: those numbers may still move."


def _decided(verdict: Verdict) -> str:
    if verdict.decision is Decision.GO:
        return f"**{verdict.decision}** by {verdict.decided_by}"
    return f"**{verdict.decision}** by the rule “{verdict.decided_by}”"


def _other_rules(verdict: Verdict) -> Iterable[str]:
    """The rules that are not GO, beside the one that decided."""
    others = [r for r in verdict.rules if r.rule != verdict.decided_by]
    for decision in (Decision.NO_GO, Decision.INCONCLUSIVE, Decision.CONDITIONAL):
        if names := [f"“{r.rule}”" for r in others if r.applies and r.decision is decision]:
            yield f"Also {decision}, by {_list(names)}; see Verdict."
    left = [r for r in others if not r.applies]
    if names := [f"“{r.rule}”" for r in left if r.rule != KERNELS_THAT_RAN]:
        yield f"Stated for other GPUs and not applied here: {_list(names)}."
    for r in left:
        if r.rule == KERNELS_THAT_RAN:
            yield f"Not applied, “{r.rule}”: {phrases.rule_sentence(r)}."


def _what_ran(run: Run, summaries: Sequence[CaseSummary]) -> str:
    per_workload = Counter(s.case.workload for s in summaries)
    what = _list([f"{n} {name}" for name, n in per_workload.items()])
    outcomes = Counter(outcome_name(s.outcome) for s in summaries)
    ended = ", ".join(f"{n} {name}" for name, n in outcomes.most_common())
    live = sum(m.wall_s for m in run.measurements)
    interrupted = "" if run.ended_at else " **The run is unfinished.**"
    return (
        f"{what} {_plural('case', len(summaries))} on {device(run.environment)}: {ended}; "
        f"{len(run.measurements)} {_plural('process', len(run.measurements))} lived "
        f"{units.duration(live)} in all.{interrupted}"
    )


def _sampling(run: Run) -> Iterable[str]:
    if found := overhead.overhead(run):
        said = phrases.overhead_sentence(found, overhead.LIMIT)
        yield f"{said[0].upper()}{said[1:]}."


def device(environment: Environment) -> str:
    return environment.gpu.name if environment.gpu else f"CPU ({environment.cpu})"


def _speeds(summaries: Sequence[CaseSummary], effects: Sequence[Effect]) -> Iterable[str]:
    """One sentence a workload: its slowest and fastest case, and what each axis does."""
    for workload in dict.fromkeys(s.case.workload for s in summaries):
        ok = [s for s in summaries if s.case.workload == workload and s.outcome is Outcome.OK]
        if not ok:
            continue
        metric = "tokens_per_s" if all("tokens_per_s" in s.metrics for s in ok) else "step_s"
        ranked = sorted(ok, key=lambda s: _goodness(s.metrics[metric], metric))
        slowest, fastest = ranked[0], ranked[-1]
        text = f"**{workload}**: {_speed(slowest, metric)}"
        if slowest is not fastest:
            ends = (_goodness(s.metrics[metric], metric) for s in (fastest, slowest))
            apart = units.factor(next(ends) / next(ends))
            text += f" to {_speed(fastest, metric)}, {apart} apart"
        if found := [e for e in effects if e.workload == workload]:
            # Providers are the question, then the largest: a manager reads the first two.
            ranked_effects = sorted(
                found, key=lambda e: (e.axis != "provider", -abs(math.log(e.ratio)))
            )
            said = "; ".join(
                f"{_axis(e.axis, e.value)} against {_axis(e.axis, e.base)} {_effect(e)}"
                + (_spread(e) if e.axis == "provider" or _mixed(e) else "")
                for e in ranked_effects
            )
            text += f". Step time per token: {said}"
        yield f"{text}."


def _speed(summary: CaseSummary, metric: str) -> str:
    return f"{units.measured(metric, summary.metrics[metric])} (`{summary.case.case_id}`)"


def _goodness(estimate: Estimate, metric: str) -> float:
    return estimate.value if METRICS[metric].higher_is_better else 1 / estimate.value


def _expectations(assessments: Sequence[Assessment]) -> Iterable[str]:
    if not assessments:
        return
    counts = Counter(a.judgement for a in assessments)
    names = {
        Judgement.MET: "met",
        Judgement.BELOW: "below",
        Judgement.ABOVE: "above",
        Judgement.UNDECIDED: "undecided",
        Judgement.OTHER_GPU: "stated for another GPU and not judged",
        Judgement.NOT_MEASURED: "without a measurement",
    }
    said = ", ".join(f"{counts[j]} {name}" for j, name in names.items() if counts[j])
    missed = [a for a in assessments if a.judgement in (Judgement.BELOW, Judgement.ABOVE)]
    farthest = max((a for a in missed if a.factors), key=lambda a: a.factors[0], default=None)
    worst = (
        f"; farthest {farthest.judgement.value}: `{farthest.case_id}`, by "
        f"{units.factor(farthest.factors[0])}"
        if farthest
        else ""
    )
    yield f"Expected against actual: {said}{worst}."


def _scaling(fits: Sequence[ScalingFit]) -> Iterable[str]:
    for axis in dict.fromkeys(f.axis for f in fits):
        ours = [f for f in fits if f.axis == axis]
        fitted = [(f.exponent, f) for f in ours if f.exponent is not None]
        ranked = sorted(fitted, key=lambda pair: pair[0].value)
        if not ranked:
            continue
        few = len(ranked) <= MAX_FITS
        shown = ranked if few else [ranked[0], ranked[-1]]
        head = "" if few else f"the extremes of {len(ranked)} fits: "
        said = "; ".join(_exponent(exponent, f) for exponent, f in shown)
        yield f"Exponent of the step time over {axis}: {head}{said}."
    if noted := [f for f in fits if f.note]:
        first = noted[0]
        more = f"; and {len(noted) - 1} more, see Scaling" if len(noted) > 1 else ""
        yield f"Odd: in `{first.group}`, {first.note}{more}."


def _exponent(exponent: Estimate, f: ScalingFit) -> str:
    late = f" ({f.censored} timed out, {_plural('bound', f.censored)} only)" if f.censored else ""
    return f"`{f.group}` {units.cell('scaling_exponent', exponent)}{late}"


def _idle_gpu(run: Run, summaries: Sequence[CaseSummary]) -> Iterable[str]:
    """Of cases whose step was not profiled: the probes read the pauses between runs too, in which
    a device that no step keeps waiting has nothing to do."""
    idle = [
        s
        for s in summaries
        if s.outcome is Outcome.OK
        and "gpu_utilisation" in s.metrics
        and s.metrics["gpu_utilisation"].value < BUSY
        and not any(_knows_launch_gap(m) for m in run.of(s.case.case_id))
    ]
    if not idle:
        return
    least = min(idle, key=lambda s: s.metrics["gpu_utilisation"].value)
    cpu = least.metrics.get("cpu_utilisation")
    beside = "" if cpu is None else f", with {units.measured('cpu_utilisation', cpu)} busy"
    yield (
        f"The GPU was busy less than half of the time in {len(idle)} "
        f"{_plural('case', len(idle))}; least in `{least.case.case_id}`, "
        f"{units.measured('gpu_utilisation', least.metrics['gpu_utilisation'])}{beside}."
    )


def _knows_launch_gap(m: Measurement) -> bool:
    b = m.breakdown
    return b is not None and b.launch_gap is not None


def _anomalies(summaries: Sequence[CaseSummary]) -> Iterable[str]:
    noted = [s for s in summaries if s.notes]
    if noted:
        verb = "carries" if len(noted) == 1 else "carry"
        yield (
            f"{len(noted)} {_plural('case', len(noted))} {verb} a note that weakens "
            "the numbers; see Results."
        )


def _axis(name: str, value: Scalar) -> str:
    return f"`{name}={units.scalar(value)}`"


def _list(parts: Sequence[str]) -> str:
    """a, b and c"""
    *rest, last = parts
    return f"{', '.join(rest)} and {last}" if rest else last


def _plural(noun: str, count: int) -> str:
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"
