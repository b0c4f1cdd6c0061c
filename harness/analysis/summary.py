"""All processes of a case, together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis import counters, statistics
from harness.analysis.discards import median_clock_hz
from harness.analysis.expectation import peak, precision_of
from harness.analysis.roofline import Floor, floor
from harness.records import (
    COUNTERS,
    METRICS,
    Case,
    CaseSummary,
    Environment,
    Estimate,
    Measurement,
    Outcome,
    Proof,
    Run,
    Scalar,
)

BY_THE_HARNESS = ("step_s", "peak_memory_bytes")
"""Told as well, and kept where the harness keeps its own."""


def estimates(case: Case, measurements: Sequence[Measurement]) -> Mapping[str, Estimate]:
    """By metric; one that a process did not tell is absent.

    A process counts once, by its last value or by the median of all. Those of the harness's
    metrics are rates, and get a geometric mean; of another nobody knows whether it can be zero.
    """
    found = {}
    for reading in case.program.readings if case.program else ():
        name = reading.metric
        values = [m.readings.get(name, ()) for m in measurements]
        if name in BY_THE_HARNESS or not values or not all(values):
            continue
        each = [float(v[-1] if reading.last else np.median(v)) for v in values]
        samples = len(each) if reading.last else sum(map(len, values))
        rate = name in METRICS and all(v > 0 for v in each)
        mean = statistics.geometric if rate else statistics.arithmetic
        found[name] = mean(each, samples=samples)
    return found


IMPOSSIBLE = 1.02
"""Floor over time from which it is no scatter of the peak that was measured."""


def summarise(run: Run) -> tuple[CaseSummary, ...]:
    """One summary per case, in the order of the suite, cases without a measurement included."""
    return tuple(
        _summarise(case, run.of(case.case_id), run.environment, run.proof)
        for case in run.suite.cases
    )


def why_absent(
    summary: CaseSummary, measurements: Sequence[Measurement], environment: Environment, metric: str
) -> str:
    """Why a case has no value of a metric, in a few words for a report."""
    if summary.outcome is None:
        return "did not run"
    ok = [m for m in measurements if m.outcome is Outcome.OK]
    if not ok:
        return summary.outcome.value.replace("_", " ")
    if metric in COUNTERS:
        return counters.exact_counters(ok).absent.get(metric, "")
    if metric == "tokens_per_s":
        return "the workload counts no tokens"
    if metric == "floor_share":
        if not (summary.flops or any(m.bytes for m in ok)):
            return "the workload counts neither FLOPs nor bytes"
        precision = precision_of(summary.case.axes, summary.effective, environment)
        return f"no peak was measured for {precision or 'its precision'} in this run"
    if metric == "step_cycles":
        return environment.gpu_unavailable or "the SM clock was not read while sampling"
    if metric == "mfu":
        if summary.flops is None:
            return "the workload counts no FLOPs"
        precision = precision_of(summary.case.axes, summary.effective, environment)
        if precision is None:
            return "precision unknown"
        return f"no data-sheet peak for {environment.device_name} at {precision}"
    if metric == "peak_memory_bytes":
        return "no device memory to measure" if environment.gpu is None else "not reported"
    if all(m.telemetry is None for m in ok) and not summary.case.settings.telemetry:
        return "the suite switched telemetry off"
    for m in ok:
        if m.telemetry is not None and metric in m.telemetry.unavailable:
            return m.telemetry.unavailable[metric]
    if metric == "gpu_utilisation" and environment.gpu is None:
        return environment.gpu_unavailable or "no GPU"
    if metric in statistics.LAG_S and any(
        m.telemetry and metric in m.telemetry.channels for m in ok
    ):
        return f"timed too briefly for a counter that lags {statistics.LAG_S[metric]:g} s"
    return "no reading fell into warm-up or sampling"


def _summarise(
    case: Case,
    measurements: Sequence[Measurement],
    environment: Environment,
    proof: Proof | None,
) -> CaseSummary:
    bad = next((m for m in measurements if m.outcome is not Outcome.OK), None)
    ok = [m for m in measurements if m.outcome is Outcome.OK]
    bounds = [m.lower_bound_s for m in measurements if m.lower_bound_s is not None]
    observed = next((m.effective for m in [*ok, *measurements] if m.effective), {})
    evidence = [m for m in ok if m.is_evidence(case.settings.min_samples)]
    outcome, detail = _outcome(bad, ok, evidence, proof)
    least = _floor(case, evidence, observed, environment, proof)
    gpu = environment.gpu is not None
    unattested = counters.unattested(case, ok, gpu=gpu)
    visible = case.operators or (case.kernels and gpu)
    metrics = _metrics(case, evidence, observed, environment, least) if evidence else {}
    return CaseSummary(
        case=case,
        outcome=outcome,
        detail=detail,
        metrics=metrics,
        lower_bound_s=max(bounds, default=None),
        tokens=next((m.tokens for m in measurements if m.tokens is not None), None),
        flops=next((m.flops for m in measurements if m.flops is not None), None),
        effective=observed,
        floor_s=least.seconds if least else None,
        floor_by=least.by if least else "",
        notes=(
            *statistics.weaknesses(
                measurements,
                asked=case.settings.processes,
                min_samples=case.settings.min_samples,
            ),
            *counters.disagreements(ok),
            *_under_its_floor(metrics.get("floor_share"), least),
        ),
        attested=not unattested if ok and visible else None,
        unattested=unattested,
        kernels_invisible=bool(ok and case.kernels and not gpu),
    )


def _outcome(
    bad: Measurement | None,
    ok: Sequence[Measurement],
    evidence: Sequence[Measurement],
    proof: Proof | None,
) -> tuple[Outcome | None, str]:
    """The outcome of a case and why it is not OK."""
    if bad is not None:
        return bad.outcome, bad.detail
    if evidence:
        return Outcome.OK, ""
    if ok:
        said = "; ".join(f"process {m.process}: {statistics.discards(m)}" for m in ok)
        return Outcome.INVALID_ENVIRONMENT, f"no process is evidence; {said}"
    if proof is not None and proof.refuted:
        said = "; ".join(f"{check.name}: {check.fact}" for check in proof.refuted)
        return Outcome.INVALID_ENVIRONMENT, f"the instrument did not prove itself; {said}"
    return None, ""


def _floor(
    case: Case,
    evidence: Sequence[Measurement],
    observed: Mapping[str, Scalar],
    environment: Environment,
    proof: Proof | None,
) -> Floor | None:
    if proof is None or not evidence:
        return None
    first = evidence[0]
    return floor(
        proof.peaks,
        flops=first.flops,
        bytes_moved=first.bytes,
        launches=None if case.settings.graph else counters.launches(first),
        precision=precision_of(case.axes, observed, environment),
    )


def _under_its_floor(share: Estimate | None, least: Floor | None) -> Iterator[str]:
    """What cannot be: the time, the work it states or the machine's peak is not what it says."""
    if share is not None and least is not None and share.value > IMPOSSIBLE:
        yield (
            f"faster than its floor ({least.by}) allows, {share.value:.0%} of it: "
            "what the workload says it does, or the peak that was measured, is wrong"
        )


def _metrics(
    case: Case,
    ok: Sequence[Measurement],
    observed: Mapping[str, Scalar],
    environment: Environment,
    least: Floor | None,
) -> Mapping[str, Estimate]:
    samples = sum(len(m.kept_s) for m in ok)
    steps = [float(np.median(m.kept_s)) for m in ok]
    metrics = {"step_s": statistics.geometric(steps, samples=samples)}
    if least is not None:
        metrics["floor_share"] = statistics.geometric(
            [least.seconds / s for s in steps], samples=samples
        )
    clocks = [median_clock_hz(m) for m in ok]
    cycles = [s * hertz for s, hertz in zip(steps, clocks, strict=True) if hertz]
    if len(cycles) == len(ok):
        metrics["step_cycles"] = statistics.geometric(cycles, samples=samples)

    tokens = [m.tokens / s for m, s in zip(ok, steps, strict=True) if m.tokens]
    if len(tokens) == len(ok):
        metrics["tokens_per_s"] = statistics.geometric(tokens, samples=samples)

    card = peak(environment.device_name, precision_of(case.axes, observed, environment))
    flops = [m.flops / s for m, s in zip(ok, steps, strict=True) if m.flops]
    if card is not None and len(flops) == len(ok):
        shares = [f / card.flops_per_s for f in flops]
        metrics["mfu"] = statistics.geometric(shares, samples=samples)

    memory = [m.peak_memory_bytes for m in ok if m.peak_memory_bytes is not None]
    if memory:
        metrics["peak_memory_bytes"] = _bounded(statistics.arithmetic(memory, samples=len(memory)))

    for channel, most in (("gpu_utilisation", 1.0), ("cpu_utilisation", None)):
        seen = [r for m in ok if (r := statistics.readings(m, channel, statistics.TIMED))]
        if seen:
            means = [float(np.mean(r)) for r in seen]
            estimate = statistics.arithmetic(means, samples=sum(map(len, seen)))
            metrics[channel] = _bounded(estimate, most)
    return {**metrics, **counters.estimates(ok), **estimates(case, ok)}


def _bounded(estimate: Estimate, most: float | None = None) -> Estimate:
    """Cut the interval to what the quantity can be: from 0 to `most`."""
    if estimate.low is None or estimate.high is None:
        return estimate
    return Estimate(
        value=estimate.value,
        low=max(0.0, estimate.low),
        high=estimate.high if most is None else min(most, estimate.high),
        processes=estimate.processes,
        samples=estimate.samples,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of one case, over its processes that ended ok and are evidence."""

    case_id: str
    processes: int
    samples: int
    """Kept, over all processes."""
    between: float | None
    """Coefficient of variation of the processes' medians; None of fewer than two."""
    within: float
    """Interquartile range over median inside a process; the median over processes."""
    widest: float
    """The same, of the process where it is largest."""
    unsteady: int
    """Processes in which no steady state was found."""
    discarded: int
    """Samples discarded, over all processes that ended ok."""


def spreads(run: Run) -> tuple[Spread, ...]:
    """One a case that has a number, in the order of the suite."""
    found = []
    for case in run.suite.cases:
        ok = [m for m in run.of(case.case_id) if m.outcome is Outcome.OK]
        evidence = [m for m in ok if m.is_evidence(case.settings.min_samples)]
        if evidence:
            found.append(_spread(case.case_id, ok, evidence))
    return tuple(found)


def _spread(case_id: str, ok: Sequence[Measurement], evidence: Sequence[Measurement]) -> Spread:
    quartiles = np.asarray([np.quantile(m.kept_s, (0.25, 0.5, 0.75)) for m in evidence])
    medians = quartiles[:, 1]
    within = (quartiles[:, 2] - quartiles[:, 0]) / medians
    between = float(medians.std(ddof=1) / medians.mean()) if len(medians) > 1 else None
    return Spread(
        case_id=case_id,
        processes=len(evidence),
        samples=sum(len(m.kept_s) for m in evidence),
        between=between,
        within=float(np.median(within)),
        widest=float(within.max()),
        unsteady=sum(m.steady is False for m in evidence),
        discarded=sum(len(m.samples_s) - len(m.kept_s) for m in ok),
    )
