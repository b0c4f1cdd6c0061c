"""All processes of a case, together."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from harness.analysis import counts, stats, told
from harness.analysis.discards import median_clock_hz
from harness.analysis.expectation import peak, precision_of
from harness.analysis.floor import Floor, floor
from harness.records import (
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
from harness.what_ran import COUNTERS

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
        return counts.exact_counters(ok).absent.get(metric, "")
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
    if metric in stats.LAG_S and any(m.telemetry and metric in m.telemetry.channels for m in ok):
        return f"timed too briefly for a counter that lags {stats.LAG_S[metric]:g} s"
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
    unattested = counts.unattested(case, ok, gpu=gpu)
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
            *stats.weaknesses(
                measurements,
                asked=case.settings.processes,
                min_samples=case.settings.min_samples,
            ),
            *counts.disagreements(ok),
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
        said = "; ".join(f"process {m.process}: {stats.discards(m)}" for m in ok)
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
        launches=None if case.settings.graph else counts.launches(first),
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
    metrics = {"step_s": stats.geometric(steps, samples=samples)}
    if least is not None:
        metrics["floor_share"] = stats.geometric(
            [least.seconds / s for s in steps], samples=samples
        )
    clocks = [median_clock_hz(m) for m in ok]
    cycles = [s * hertz for s, hertz in zip(steps, clocks, strict=True) if hertz]
    if len(cycles) == len(ok):
        metrics["step_cycles"] = stats.geometric(cycles, samples=samples)

    tokens = [m.tokens / s for m, s in zip(ok, steps, strict=True) if m.tokens]
    if len(tokens) == len(ok):
        metrics["tokens_per_s"] = stats.geometric(tokens, samples=samples)

    card = peak(environment.device_name, precision_of(case.axes, observed, environment))
    flops = [m.flops / s for m, s in zip(ok, steps, strict=True) if m.flops]
    if card is not None and len(flops) == len(ok):
        shares = [f / card.flops_per_s for f in flops]
        metrics["mfu"] = stats.geometric(shares, samples=samples)

    memory = [m.peak_memory_bytes for m in ok if m.peak_memory_bytes is not None]
    if memory:
        metrics["peak_memory_bytes"] = _bounded(stats.arithmetic(memory, samples=len(memory)))

    for channel, most in (("gpu_utilisation", 1.0), ("cpu_utilisation", None)):
        seen = [r for m in ok if (r := stats.readings(m, channel, stats.TIMED))]
        if seen:
            means = [float(np.mean(r)) for r in seen]
            estimate = stats.arithmetic(means, samples=sum(map(len, seen)))
            metrics[channel] = _bounded(estimate, most)
    return {**metrics, **counts.estimates(ok), **told.estimates(case, ok)}


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
