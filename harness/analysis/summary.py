"""What all processes of a case say together: estimates of its metrics, and what weakens them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from harness import units
from harness.analysis import recorded, statistics
from harness.analysis.bounds import peak, precision_of
from harness.analysis.dead_axes import inert_work
from harness.analysis.over_steps import course_metrics
from harness.analysis.recorded import POWER_CAP, THROTTLE, TIMED, of_ranks, readings
from harness.analysis.roofline import RooflineBound, bound, works
from harness.records import (
    METRICS,
    Case,
    CaseSummary,
    Clock,
    Environment,
    Estimate,
    Facts,
    Measurement,
    Outcome,
    Run,
    Scalar,
    SelfTest,
)

MEASURED_HERE = ("step_s", "peak_memory_bytes")
"""Metrics of which a value that a program reports is not used as an estimate: step times are the
samples, and peak memory is in the measurement."""
TOO_FAST = 1.02
"""Share of the roofline above which scatter of the measured peak cannot be the cause."""
IMPOSSIBLE = 1.05
"""Share of the roofline above which a case with a cold cache has no speed."""
LARGE_DISAGREEMENT = 0.10
"""Slowest process over fastest, less one, above which a summary notes it."""
APART = 2.0
"""Slowest process over fastest above which a case has no speed."""

DRIFT = "tokens_per_s_drift"
OF_WORK = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "roofline_share", "energy_per_token_j")
"""Metrics that need the tokens or FLOPs of a step."""


_Kind = tuple[Clock | None, bool]
"""Cases scatter alike if they are timed by one clock, and the GPU works or waits in all of them."""


def summarise(run: Run) -> tuple[CaseSummary, ...]:
    """One summary per case, also without a measurement, in the order of the suite."""
    evidence = [_evidence(case, run.of(case.case_id)) for case in run.suite.cases]
    rates = [_rates(case, of) for case, of in zip(run.suite.cases, evidence, strict=True)]
    kinds = [(of[0].clock if of else None, works(of)) for of in evidence]
    alike = defaultdict(list)
    for own, kind in zip(rates, kinds, strict=True):
        for name, values in own.items():
            if not _apart(values):
                alike[kind, name].append(values)
    priors = {key: statistics.variance_prior(cases) for key, cases in alike.items()}
    found = [
        _summarise(run, case, of, own, {name: priors.get((kind, name)) for name in own})
        for case, of, own, kind in zip(run.suite.cases, evidence, rates, kinds, strict=True)
    ]
    inert = inert_work(run, found)
    known = (_without_work(s, inert.get(s.case.case_id)) for s in _with_usual(found, kinds))
    if run.stopped is None:
        return tuple(known)
    why = units.stop_text(run.stopped)
    return tuple(s if s.outcome else replace(s, stop=run.stopped, detail=why) for s in known)


def _with_usual(found: Sequence[CaseSummary], kinds: Sequence[_Kind]) -> Iterator[CaseSummary]:
    """The cases, each estimate with the usual scatter of its metric among cases of its kind. A
    drift of tokens/s scatters as the steps do."""
    alike = defaultdict(list)
    for s, kind in zip(found, kinds, strict=True):
        for name, e in s.metrics.items():
            if name not in METRICS or not METRICS[name].signed:  # others have no logarithm
                alike[kind, name].append(e)
    usual = {key: statistics.usual_scatter(of) for key, of in alike.items()}
    for s, kind in zip(found, kinds, strict=True):
        own = {n: usual.get((kind, "step_s" if n == DRIFT else n)) for n in s.metrics}
        metrics = {n: replace(e, usual=own[n]) for n, e in s.metrics.items()}
        yield replace(s, metrics=metrics)


def _without_work(s: CaseSummary, axis: str | None) -> CaseSummary:
    """The case without the work that follows an axis without effect, and without its metrics."""
    if axis is None:
        return s
    reported = {r.metric for r in s.case.program.readings} if s.case.program else set()
    kept, apart = (
        {n: e for n, e in those.items() if n not in OF_WORK or n in reported}
        for those in (s.metrics, s.apart)
    )
    notes = (*s.notes, {"withdrawn": axis})
    return replace(s, metrics=kept, apart=apart, notes=notes, tokens=None, withdrawn=axis)


def _summarise(
    run: Run,
    case: Case,
    evidence: Sequence[Measurement],
    rates: Mapping[str, Sequence[float]],
    priors: Mapping[str, statistics.VariancePrior | None],
) -> CaseSummary:
    measurements, environment = run.of(case.case_id), run.environment
    card = ", ".join(cards := sorted({m.card for m in measurements if m.card}))
    proof = run.self_test_of(card)
    bad = next((m for m in measurements if m.outcome is not Outcome.OK), None)
    ok = [m for m in measurements if m.outcome is Outcome.OK]
    bounds = [m.lower_bound_s for m in measurements if m.lower_bound_s is not None]
    observed = next((m.effective for m in [*ok, *measurements] if m.effective), {})
    outcome, facts = _outcome(bad, ok, evidence, proof)
    sole = proof if len(cards) < 2 else None  # the peaks are those of one
    limit = roofline_bound(case, evidence, observed, environment, sole)
    gpu = environment.gpu is not None
    unattested = recorded.unattested(case, ok, gpu=gpu)
    visible = case.operators or (case.kernels and gpu)
    found: Mapping[str, Estimate] = {}
    if evidence:
        found = _metrics(case, evidence, observed, environment, limit, rates, priors)
    ends = {name: e.ends for name, e in found.items() if name in (*rates, *OF_WORK) and e.ends}
    apart = {
        name: replace(found[name], low=None, high=None, freedom=None)
        for name in ends
        if _apart(ends[name])
    }
    metrics = {name: e for name, e in found.items() if name not in apart}
    share = metrics.get("roofline_share")
    too_fast = _faster_than_possible(case, share, limit)
    beyond = share and limit and share.value > IMPOSSIBLE and not _cached(case, limit)
    if beyond and outcome is Outcome.OK:
        outcome, facts = Outcome.IMPOSSIBLE, too_fast
        metrics, apart, too_fast = {}, {}, {}
    untimed_s = None
    if bad and bad.outcome is Outcome.TIMEOUT and not bounds:
        finished = bad.evidence.steps if bad.evidence else None
        untimed_s = case.settings.timeout_s / ((finished or 0) + 1)
    return CaseSummary(
        case=case,
        outcome=outcome,
        detail=bad.detail if bad else "",
        facts=facts,
        metrics=metrics,
        lower_bound_s=max(bounds, default=None),
        working=bool(bad and bad.evidence and bad.evidence.working),
        untimed_s=untimed_s,
        tokens=next((m.tokens for m in measurements if m.tokens is not None), None),
        flops=next((m.flops for m in measurements if m.flops is not None), None),
        effective=observed,
        roofline_by=limit.by if limit else "",
        notes=(
            *_weaknesses(case, measurements, ok, evidence, rates.get("step_s", ())),
            *recorded.disagreements(ok),
            *([{"cards": len(cards)}] if cards[1:] else []),
            *([too_fast] if too_fast else []),
        ),
        attested=not unattested if ok and visible else None,
        unattested=unattested,
        differing=tuple(m.process for m in ok if m.output_digest != ok[0].output_digest),
        kernels_invisible=bool(ok and case.kernels and not gpu),
        apart=apart,
        card=card,
    )


def _evidence(case: Case, measurements: Sequence[Measurement]) -> list[Measurement]:
    ok = (m for m in measurements if m.outcome is Outcome.OK)
    return [m for m in ok if m.is_evidence(case.settings.min_samples)]


def step_time(case: Case, measurements: Sequence[Measurement]) -> float | None:
    """The step time of a case: the geometric mean over its processes; None without evidence."""
    steps = [m.step_s for m in _evidence(case, measurements)]
    return statistics.geometric(steps, samples=len(steps)).value if steps else None


def _apart(values: Sequence[float]) -> bool:
    """Whether the processes disagree so much that none of them is typical."""
    return bool(values) and max(values) > APART * min(values)


def _rates(case: Case, evidence: Sequence[Measurement]) -> Mapping[str, Sequence[float]]:
    """The rates that have a scatter of their own; none without evidence."""
    hertz = [recorded.median_clock_hz(m.telemetry, m.phases) for m in evidence]
    steps = [m.step_s for m in evidence]
    rates = {
        "step_s": steps,
        "step_cycles": [s * hz for s, hz in zip(steps, hertz, strict=True) if hz],
        "kernel_s": [b.device_busy_s for m in evidence if (b := m.breakdown) and b.device_busy_s],
        **{name: v for name, v, _ in _reported(case, evidence) if _is_rate(name, v)},
    }
    return {n: v for n, v in rates.items() if v and len(v) == len(evidence)}


def _outcome(
    bad: Measurement | None,
    ok: Sequence[Measurement],
    evidence: Sequence[Measurement],
    proof: SelfTest | None,
) -> tuple[Outcome | None, Facts]:
    """The outcome of a case, and why it is not that of a process."""
    if bad is not None:
        return bad.outcome, {}
    if evidence:
        return Outcome.OK, {}
    if ok:
        kept = [{"process": m.process, "discards": _discards(m)} for m in ok]
        return Outcome.INVALID_ENVIRONMENT, {"none_kept": kept}
    if proof is not None and proof.refuted:
        refuted = [{"check": check.name, "found": check.fact} for check in proof.refuted]
        return Outcome.INVALID_ENVIRONMENT, {"refuted": refuted}
    return None, {}


def roofline_bound(
    case: Case,
    evidence: Sequence[Measurement],
    observed: Mapping[str, Scalar],
    environment: Environment,
    proof: SelfTest | None,
) -> RooflineBound | None:
    """The bound of a case by the counts of its first process and the peaks of a self-test."""
    if proof is None or not evidence:
        return None
    first = evidence[0]
    return bound(
        proof.peaks,
        flops=first.flops,
        bytes_moved=first.bytes,
        launches=None if case.settings.graph else recorded.launches(first),
        precision=precision_of(case.axes, observed, environment),
    )


def _faster_than_possible(case: Case, share: Estimate | None, limit: RooflineBound | None) -> Facts:
    """Why a step cannot have done the work that is stated; empty if it can."""
    if share is None or limit is None or share.value <= TOO_FAST:
        return {}
    cached = _cached(case, limit) or None
    return {"too_fast": True, "bound": limit.by, "reached": share.value, "cached": cached}


def _cached(case: Case, limit: RooflineBound) -> bool:
    """Whether the cache may have held data that the bound counts as read from memory."""
    return limit.by == "bandwidth" and not case.settings.flush_l2


def _metrics(
    case: Case,
    ok: Sequence[Measurement],
    observed: Mapping[str, Scalar],
    environment: Environment,
    limit: RooflineBound | None,
    rates: Mapping[str, Sequence[float]],
    priors: Mapping[str, statistics.VariancePrior | None],
) -> Mapping[str, Estimate]:
    samples = sum(len(m.kept_s) for m in ok)
    metrics = {
        name: statistics.geometric(rates[name], samples=samples, prior=priors[name])
        for name in ("step_cycles", "step_s", "kernel_s")
        if name in rates
    }
    steps = rates["step_s"]
    timed = list(zip(ok, steps, strict=True))
    size = case.program.world_size if case.program else 0
    card = peak(environment.device_name, precision_of(case.axes, observed, environment))
    of_the_step = {
        "roofline_share": [limit.seconds / s for s in steps] if limit else [],
        "tokens_per_s": [m.tokens / s for m, s in timed if m.tokens],
        "tokens_per_s_per_gpu": [m.tokens / s / size for m, s in timed if m.tokens and size],
        "mfu": [m.flops / s / card for m, s in timed if card and m.flops],
        "energy_j": (spent := [w * s for m, s in timed if (w := recorded.power_w(m))]),
        "energy_per_token_j": [e / m.tokens for m, e in zip(ok, spent, strict=False) if m.tokens],
    }
    metrics |= {
        name: statistics.geometric(values, samples=samples, prior=priors["step_s"])
        for name, values in of_the_step.items()
        if len(values) == len(ok)
    }
    memory = [m.peak_memory_bytes for m in ok if m.peak_memory_bytes is not None]
    if memory:
        metrics["peak_memory_bytes"] = _bounded(statistics.arithmetic(memory, samples=len(memory)))

    for channel, most in (("gpu_utilisation", 1.0), ("cpu_utilisation", None)):
        seen = [r for m in ok if (r := readings(m, channel, TIMED))]
        if seen:
            means = [float(np.mean(r)) for r in seen]
            estimate = statistics.arithmetic(means, samples=sum(map(len, seen)))
            metrics[channel] = _bounded(estimate, most)
    for name, values, count in _reported(case, ok):
        if not _is_rate(name, values):
            metrics[name] = statistics.arithmetic(values, samples=count)
        else:
            metrics[name] = statistics.geometric(values, samples=count, prior=priors[name])
    compared = recorded.error_of_bound(ok)
    return {**recorded.estimates(ok), **metrics, **course_metrics(ok), **compared}


def _bounded(estimate: Estimate, most: float | None = None) -> Estimate:
    """Cut the interval to the possible values: from 0 to `most`."""
    if estimate.low is None or estimate.high is None:
        return estimate
    high = estimate.high if most is None else min(most, estimate.high)
    return replace(estimate, low=max(0.0, estimate.low), high=high)


def _reported(
    case: Case, measurements: Sequence[Measurement]
) -> Iterator[tuple[str, list[float], int]]:
    """The metrics that a program reports itself, if every process reported them: name, value of
    each process (its last, or the median of all), and the number of readings."""
    for reading in case.program.readings if case.program else ():
        name = reading.metric
        values = [m.readings.get(name, ()) for m in measurements]
        if name in MEASURED_HERE or not values or not all(values):
            continue
        last = reading.take == "last"
        each = [float(v[-1] if last else np.median(v)) for v in values]
        yield name, each, len(each) if last else sum(map(len, values))


def _is_rate(name: str, values: Sequence[float]) -> bool:
    """The harness's own metrics are rates and get a geometric mean; any other may be zero and gets
    an arithmetic mean."""
    return name in METRICS and all(v > 0 for v in values)


def _discards(m: Measurement) -> Facts:
    """How many samples of a process were discarded, and why."""
    causes = [{"times": len(i), "cause": why.replace("_", " ")} for why, i in m.discarded.items()]
    count = sum(map(len, m.discarded.values()))
    return {"discarded": count, "samples": len(m.samples_s), "causes": causes}


def _weaknesses(
    case: Case,
    measurements: Sequence[Measurement],
    ok: Sequence[Measurement],
    evidence: Sequence[Measurement],
    steps: Sequence[float],
) -> Iterator[Facts]:
    """What a reader must know before trusting the numbers of a case."""
    asked = case.settings.processes
    if ok and len(ok) < len(measurements):
        yield {"ended_ok": len(ok), "started": len(measurements)}
    elif ok and len(ok) < asked:
        yield {"ran": len(ok), "asked": asked}
    for m in ok:
        if m.discarded:
            too_few = m not in evidence or None
            yield {"process": m.process, "discards": _discards(m), "too_few": too_few}
    if not evidence:
        return
    if _apart(steps):
        yield {"fastest": min(steps), "slowest": max(steps), "no_speed": True}
    elif (gap := max(steps) / min(steps) - 1) > LARGE_DISAGREEMENT:
        yield {"slower": gap}
    yield from _disturbances(evidence)
    if len({m.tokens for m in evidence}) > 1 or len({m.flops for m in evidence}) > 1:
        yield {"different_work": True}


def _disturbances(evidence: Sequence[Measurement]) -> Iterator[Facts]:
    limits, others = (
        of_ranks(name, evidence) for name in ("gpu_throttle_reasons", "gpu_foreign_processes")
    )
    for rank, (limit, other) in enumerate(zip(limits, others, strict=True)):
        gpu = {"gpu": True, "rank": rank if any(m.ranks for m in evidence) else None}
        masks = [int(x) for m in evidence for x in readings(m, limit, ("sampling",))]
        for kind, reasons in (("throttled", THROTTLE), ("clock_limited", POWER_CAP)):
            if hit := [mask for mask in masks if any(mask & bit for bit in reasons)]:
                seen = [r for bit, r in reasons.items() if any(mask & bit for mask in hit)]
                among = {"seen": len(hit), "readings": len(masks)}
                yield {**gpu, kind: True, **among, "reasons": seen}
        foreign = [x for m in evidence for x in readings(m, other, TIMED)]
        if shared := sum(x > 0 for x in foreign):
            yield {"foreign": True, **gpu, "seen": shared, "readings": len(foreign)}
