"""The roofline: the shortest time a step could take on the machine it ran on, by measured peaks.

    bound = max(FLOPs / peak FLOP/s, bytes / peak bytes per second, launches x cheapest launch)
    share of roofline = bound / time; 1 is as fast as this machine allows

The self-test measures the peaks on the same card just before the run: the best of a few matrix
products, copies or sums, and empty kernels. A sustained rate under the power limit is lower, so it
is not a bound. Peaks of data sheets are used for MFU only, and for the targets below.

Source: Williams, Waterman & Patterson, "Roofline", CACM 52(4), 2009; launches added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.analysis.expectation import SUSPICIOUS_MFU, Peak, peak, precision_of, stated_peak
from harness.records import (
    Case,
    CaseSummary,
    Environment,
    Measurement,
    Outcome,
    Peaks,
    Scalar,
    Suite,
    Work,
    gpu_matches,
)

HOST_BELOW, BUSY_FROM = 0.8, 0.9
"""Shares of a step that the GPU works: below the first it waits for the host, from the second on it
is the limit itself."""
NEAR = 0.6
"""Share of the roofline from which its term is the limit."""
COLD = 1.5
"""First sample over last, without a steady state, from which a case is still starting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineBound:
    """A lower bound on the time of one step."""

    seconds: float
    by: str
    """The term that sets it: compute, bandwidth or launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A stated tokens/s that asks for less than SUSPICIOUS_MFU of a card."""

    stated_by: str
    """`the rule “throughput”`, or `the expectation of <source>`."""
    tokens_per_s: float
    case_id: str
    mfu: float
    peak: Peak


# --- the bound ---------------------------------------------------------------------------


def bound(
    peaks: Peaks,
    *,
    flops: int | None,
    bytes_moved: int | None,
    launches: float | None,
    precision: str | None,
) -> RooflineBound | None:
    """The roofline bound of one step; None if no term is known.

    Args:
        bytes_moved: Bytes that a perfect implementation moves.
        launches: Kernels that one step launches; None if unknown, or replayed from a CUDA graph,
            which costs less.
        precision: Of its matrix products, as `precision_of` names it.
    """
    terms: Mapping[str, float | None] = {
        "compute": _over(flops, peaks.flops_per_s.get(precision or "")),
        "bandwidth": _over(bytes_moved, peaks.bytes_per_s),
        "launches": launches * peaks.launch_s if launches and peaks.launch_s else None,
    }
    known = {by: seconds for by, seconds in terms.items() if seconds is not None}
    if not known:
        return None
    by = max(known, key=lambda name: known[name])
    return RooflineBound(seconds=known[by], by=by)


def _over(amount: int | None, rate: float | None) -> float | None:
    return amount / rate if amount and rate else None


# --- what limits a step ------------------------------------------------------------------


class Limit(StrEnum):
    """What a step waits for most, in one word."""

    NOT_MEASURED = "not measured"
    COLD = "cold start"
    LAUNCHES = "launches"
    HOST = "host"
    BOTH = "host and GPU"
    COMPUTE = "compute"
    BANDWIDTH = "memory bandwidth"
    BELOW = "GPU kernels, below the roofline"
    GPU = "GPU, roofline unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What limits a step, with the numbers behind it."""

    limit: Limit
    busy: float | None = None
    """Share of the step in which the GPU works; by NVML if there is no profile."""
    profiled: bool = False
    launches: float | None = None
    """Share of the wait that launching its kernels one by one explains."""
    share: float | None = None
    """Of the roofline."""


def bottleneck(
    summary: CaseSummary, measured: Sequence[Measurement], peaks: Peaks
) -> Bottleneck | None:
    """What limits a case on a GPU; None for one without a time.

    A GPU that works for less than HOST_BELOW of the step waits for the host: for launches, if these
    explain half of the wait. One that works for BUSY_FROM or more is limited by the term of its
    roofline bound, if it reaches NEAR of that.
    """
    ok = [m for m in measured if m.outcome is Outcome.OK and m.kept_s]
    if not ok:
        return None
    if all(m.steady is False and m.kept_s[0] > COLD * m.kept_s[-1] for m in ok):
        return Bottleneck(limit=Limit.COLD)
    timed = next((m for m in ok if m.breakdown and m.breakdown.launch_gap is not None), None)
    nvml = summary.metrics.get("gpu_utilisation")
    launches = None
    if timed is not None and timed.breakdown is not None:
        gap = timed.breakdown.launch_gap or 0.0
        busy = 1 - gap
        count = timed.counters.kernel_launches if timed.counters else None
        if count and peaks.launch_s and gap > 0:
            launches = min(1.0, count * peaks.launch_s / (gap * timed.breakdown.step_s))
    elif nvml is not None:
        busy = nvml.value
    else:
        return Bottleneck(limit=Limit.NOT_MEASURED)
    roofline = summary.metrics.get("roofline_share")
    share = roofline.value if roofline else None
    if busy < HOST_BELOW:
        limit = Limit.LAUNCHES if launches is not None and launches >= 0.5 else Limit.HOST
    elif busy < BUSY_FROM:
        limit = Limit.BOTH
    elif share is None:
        limit = Limit.GPU
    elif share < NEAR:
        limit = Limit.BELOW
    else:
        by = {"compute": Limit.COMPUTE, "bandwidth": Limit.BANDWIDTH}
        limit = by.get(summary.roofline_by, Limit.LAUNCHES)
    return Bottleneck(
        limit=limit, busy=busy, profiled=timed is not None, launches=launches, share=share
    )


# --- targets of little ambition ----------------------------------------------------------


def modest(
    suite: Suite,
    environment: Environment,
    work: Mapping[str, Work],
    effective: Mapping[str, Mapping[str, Scalar]] | None = None,
) -> tuple[Target, ...]:
    """The tokens/s of rules and expectations that prove little when met, in the suite's order.

    Each is given for the case in which it asks for most.

    Args:
        environment: Its GPU is assumed if a statement names no GPU, or a pattern that matches it.
        work: Case id -> the work of one step.
        effective: Case id -> the observed configuration, for cases that have run.
    """
    stated = [
        (f"the expectation of “{e.source}”", e.match, e.gpu, (e.low, e.high))
        for e in suite.expectations
        if e.metric == "tokens_per_s"
    ] + [
        (f"the rule “{r.name}”", r.match, r.gpu, (r.go, r.abort))
        for r in suite.rules
        if r.metric == "tokens_per_s" and r.against is None
    ]
    found = []
    for by, match, gpu, ends in stated:
        most = max(end for end in ends if end is not None)
        targets = [
            target
            for case in suite.cases
            if match.accepts(case)
            and (target := _target(by, most, gpu, case, work, effective or {}, environment))
        ]
        highest = max(targets, key=lambda t: t.mfu, default=None)
        if highest is not None and highest.mfu < SUSPICIOUS_MFU:
            found.append(highest)
    return tuple(found)


def done(summaries: tuple[CaseSummary, ...]) -> Mapping[str, Work]:
    """The work of one step of each case whose workload was built."""
    return {
        s.case.case_id: Work(tokens=s.tokens, flops=s.flops)
        for s in summaries
        if s.tokens or s.flops
    }


def _target(
    by: str,
    tokens_per_s: float,
    gpu: str,
    case: Case,
    work: Mapping[str, Work],
    effective: Mapping[str, Mapping[str, Scalar]],
    environment: Environment,
) -> Target | None:
    step = work.get(case.case_id)
    precision = precision_of(case.axes, effective.get(case.case_id, {}), environment)
    card = stated_peak(gpu, precision)
    if gpu_matches(gpu, environment.device_name):
        card = peak(environment.device_name, precision) or card
    if card is None or step is None or not step.tokens or not step.flops:
        return None
    mfu = tokens_per_s * step.flops / step.tokens / card.flops_per_s
    return Target(stated_by=by, tokens_per_s=tokens_per_s, case_id=case.case_id, mfu=mfu, peak=card)
