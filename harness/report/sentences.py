"""The executive summary: sentences, each computed from the records."""

from collections import Counter
from collections.abc import Iterable, Sequence

from harness import units
from harness.analysis.effects import Effect
from harness.analysis.expectation import SUSPICIOUS_MFU, Assessment, Judgement
from harness.analysis.scaling import ScalingFit
from harness.records import (
    METRICS,
    CaseSummary,
    Decision,
    Environment,
    Estimate,
    Outcome,
    Run,
    Scalar,
    Verdict,
)

MAX_FITS = 4
"""Groups up to which each fit gets a sentence; past it, the least and the greatest."""
DIFFERENT = 1.1
"""Ratio between pairs from which an effect is not one number."""
BUSY = 0.5
"""GPU utilisation under which the card waits for something else most of the time."""


def executive_summary(
    run: Run,
    summaries: Sequence[CaseSummary],
    verdict: Verdict,
    effects: Sequence[Effect],
    assessments: Sequence[Assessment],
    fits: Sequence[ScalingFit],
) -> tuple[str, ...]:
    """What ran on what, the verdict, the spread of speeds, what each axis does, anomalies."""
    return (
        _what_ran(run, summaries),
        f"**{verdict.decision}** by the rule “{verdict.decided_by}”: {verdict.reason}.",
        *_other_rules(verdict),
        *_extremes(summaries),
        *(effect_sentence(e) for e in effects),
        *_expectations(assessments),
        *target_warnings(assessments),
        *_scaling(fits),
        *_idle_gpu(summaries),
        *_anomalies(summaries),
    )


def outcome_name(outcome: Outcome | None) -> str:
    return "not run" if outcome is None else outcome.value.replace("_", " ")


def effect_sentence(e: Effect) -> str:
    """`gc=on` against `gc=off` in train: step time per token: +24 % [+20 … +28] (4 pairs)."""
    amount = units.change(e.ratio, e.low, e.high)
    if e.low is None or e.high is None:
        claim = f"{amount}, without an interval (one process a case)"
    elif e.negligible:
        claim = f"unchanged ({amount}): no effect"
    elif e.low <= 1 <= e.high:
        claim = f"no difference shown ({amount})"
    else:
        claim = amount
    spread = ""
    if e.pairs > 1 and e.largest / e.smallest > DIFFERENT:
        spread = f", from {units.change(e.smallest)} to {units.change(e.largest)}"
    return (
        f"{_axis(e.axis, e.value)} against {_axis(e.axis, e.base)} in {e.workload}: step time "
        f"per token: {claim} ({e.pairs} {_plural('pair', e.pairs)} of cases{spread})."
    )


def target_warnings(assessments: Iterable[Assessment]) -> tuple[str, ...]:
    """Expectations that ask so little of the card that meeting them would prove little."""
    found = {}
    for a in assessments:
        if a.target_mfu is None or a.target_peak is None or a.target_mfu >= SUSPICIOUS_MFU:
            continue
        stated = [x for x in (a.expectation.low, a.expectation.high) if x is not None]
        card = a.target_peak
        key = (max(stated), card.gpu)
        found[key] = (
            f"The expectation of {units.quantity('tokens_per_s', max(stated))} on "
            f"{card.gpu} is {units.percent(a.target_mfu)} MFU: the target itself lies "
            f"{units.factor(1 / a.target_mfu)} below the card's peak "
            f"({units.number(card.flops_per_s / 1e12)} TFLOP/s, dense {card.precision})."
        )
    return tuple(found.values())


def _other_rules(verdict: Verdict) -> Iterable[str]:
    for r in verdict.rules:
        if not r.applies:
            yield f"The rule “{r.rule}” does not apply: {r.reason}."
        elif r.rule != verdict.decided_by and r.decision is not Decision.GO:
            yield f"Also {r.decision}, by the rule “{r.rule}”: {r.reason}."


def _what_ran(run: Run, summaries: Sequence[CaseSummary]) -> str:
    per_workload = Counter(s.case.workload for s in summaries)
    what = " and ".join(f"{n} {name} {_plural('case', n)}" for name, n in per_workload.items())
    outcomes = Counter(outcome_name(s.outcome) for s in summaries)
    ended = ", ".join(f"{n} {name}" for name, n in outcomes.most_common())
    live = sum(m.wall_s for m in run.measurements)
    interrupted = "" if run.ended_at else " **The run is unfinished.**"
    return (
        f"{what} on {device(run.environment)}: {ended}; "
        f"{len(run.measurements)} {_plural('process', len(run.measurements))} lived "
        f"{units.duration(live)} in all.{interrupted}"
    )


def device(environment: Environment) -> str:
    return environment.gpu.name if environment.gpu else f"CPU ({environment.cpu})"


def _extremes(summaries: Sequence[CaseSummary]) -> Iterable[str]:
    for workload in dict.fromkeys(s.case.workload for s in summaries):
        ok = [s for s in summaries if s.case.workload == workload and s.outcome is Outcome.OK]
        metric = "tokens_per_s" if all("tokens_per_s" in s.metrics for s in ok) else "step_s"
        ranked = sorted(ok, key=lambda s: _goodness(s.metrics[metric], metric))
        if len(ranked) < 2:
            for s in ranked:
                yield f"`{s.case.case_id}`: {units.measured(metric, s.metrics[metric])}."
            continue
        slowest, fastest = ranked[0], ranked[-1]
        apart = _goodness(fastest.metrics[metric], metric) / _goodness(
            slowest.metrics[metric], metric
        )
        yield (
            f"Fastest of {workload}: `{fastest.case.case_id}`, "
            f"{units.measured(metric, fastest.metrics[metric])}; slowest: "
            f"`{slowest.case.case_id}`, {units.measured(metric, slowest.metrics[metric])}; "
            f"{units.factor(apart)} apart."
        )


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
    yield f"Expected against actual: {said}."


def _scaling(fits: Sequence[ScalingFit]) -> Iterable[str]:
    for axis in dict.fromkeys(f.axis for f in fits):
        fitted = [(f.exponent, f) for f in fits if f.axis == axis and f.exponent is not None]
        ranked = sorted(fitted, key=lambda pair: pair[0].value)
        shown = ranked if len(ranked) <= MAX_FITS else [ranked[0], ranked[-1]]
        if len(ranked) > MAX_FITS:
            yield f"The step time of {len(ranked)} groups was fitted over {axis}; the extremes:"
        for exponent, f in shown:
            late = f", {f.censored} timed out and taken as bounds" if f.censored else ""
            yield (
                f"Step time of `{f.group}` grows as {axis} to the power "
                f"{units.cell('scaling_exponent', exponent)} "
                f"({exponent.samples} measured points{late})."
            )
    for f in fits:
        if f.note:
            yield f"Suspicious: in `{f.group}`, {f.note}"


def _idle_gpu(summaries: Sequence[CaseSummary]) -> Iterable[str]:
    idle = [
        s
        for s in summaries
        if s.outcome is Outcome.OK
        and "gpu_utilisation" in s.metrics
        and s.metrics["gpu_utilisation"].value < BUSY
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


def _anomalies(summaries: Sequence[CaseSummary]) -> Iterable[str]:
    noted = [s for s in summaries if s.notes]
    if noted:
        yield (
            f"{len(noted)} {_plural('case', len(noted))} carry a note that weakens their "
            "numbers; see the end of Results."
        )


def _axis(name: str, value: Scalar) -> str:
    return f"`{name}={units.scalar(value)}`"


def _plural(noun: str, count: int) -> str:
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"
