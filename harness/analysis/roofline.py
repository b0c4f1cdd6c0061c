"""What limits a step: the roofline, what the GPU waits for, and the parts of a step.

The roofline is the shortest time a step could take on the machine it ran on, by measured peaks.

    bound = max(FLOPs / peak FLOP/s, bytes / peak bytes per second, launches x cheapest launch)
    share of roofline = bound / time; 1 is as fast as this machine allows

The self-test measures the peaks on the same card just before the run: the best of a few matrix
products, copies or sums, and empty kernels. A sustained rate under the power limit is lower, so it
is not a bound. Peaks of data sheets are used for MFU only.

Source: Williams, Waterman & Patterson, "Roofline", CACM 52(4), 2009; launches added.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean

from harness.analysis.effects import has_a_speed, longest
from harness.analysis.recorded import ClockLimit, clock_limit, launches, readings
from harness.analysis.scaling import by_workload, positive
from harness.records import (
    WORKS,
    Breakdown,
    Case,
    CaseSummary,
    Counters,
    Facts,
    Measurement,
    Outcome,
    Peaks,
    Run,
    by_range,
    pairs,
)

HOST_BELOW, BUSY_FROM = WORKS, 0.9
"""Shares of a step that the GPU works: below the first it waits for the host, from the second on it
is the limit itself."""
NEAR = 0.6
"""Share of the roofline from which its term is the limit."""
COLD = 1.5
"""First sample over last, without a steady state, from which a case is still starting."""
HALF = 0.5
"""Share of a wait from which one cause has its name."""
_DATA = re.compile(r"dataloader|\b(data|loader|batch)\b", re.IGNORECASE)
_COMMUNICATION = re.compile(r"nccl|c10d|gloo|\bcommunication\b", re.IGNORECASE)
"""Ranges, and kernels, of one kind: as PyTorch names them, or by these words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineBound:
    """A lower bound on the time of one step."""

    seconds: float
    by: str
    """The term that sets it: compute, bandwidth or launches."""


# --- the bound ---------------------------------------------------------------------------


def bound(
    peaks: Peaks,
    *,
    flops: int | None,
    bytes_moved: int | None,
    launches: float | None,
    precision: str | None,
) -> RooflineBound | None:
    """The roofline bound of one step; None if no term is known. `bytes_moved`: of a perfect
    implementation; `launches`: kernels of one step, None if unknown, or replayed from a CUDA graph,
    which costs less; `precision`: of its matrix products, as `precision_of` names it."""
    rate = peaks.flops_per_s.get(precision or "")
    terms = {
        "compute": flops / rate if flops and rate else 0.0,
        "bandwidth": bytes_moved / peaks.bytes_per_s if bytes_moved and peaks.bytes_per_s else 0.0,
        "launches": (launches or 0.0) * (peaks.launch_s or 0.0),
    }
    known = {by: seconds for by, seconds in terms.items() if seconds > 0}
    if not known:
        return None
    by = max(known, key=lambda name: known[name])
    return RooflineBound(seconds=known[by], by=by)


# --- what limits a step ------------------------------------------------------------------


class Limit(StrEnum):
    """What a step waits for most, in one word."""

    NOT_MEASURED = "not measured"
    COLD = "cold start"
    DATA = "data"
    COMMUNICATION = "communication"
    SYNCS = "host syncs"
    LAUNCHES = "launches"
    HOST = "host"
    GRAPH = "launch and gaps of a CUDA graph"
    BOTH = "host and GPU"
    COMPUTE = "compute"
    BANDWIDTH = "memory bandwidth"
    BELOW = "GPU kernels, below the roofline"
    GPU = "GPU, class of kernels not measured"


WAITS = (Limit.DATA, Limit.COMMUNICATION, Limit.SYNCS, Limit.LAUNCHES)
"""What the wait of a GPU may be for, in the order in which it is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What limits a step, with the numbers behind it."""

    limit: Limit
    busy: float | None = None
    """Share of the step in which the GPU works, exposed communication aside; by NVML if there is no
    profile."""
    profiled: bool = False
    waits: Mapping[Limit, float] = field(default_factory=dict)
    """Share of the GPU's wait that each known cause explains, at most 1."""
    share: float | None = None
    """Of the roofline."""
    clock: ClockLimit | None = None
    facts: Facts = field(default_factory=dict)
    """The numbers by name; empty if nothing was measured."""

    @property
    def wait(self) -> float:
        """Share of the step in which the GPU does not work."""
        return 0.0 if self.busy is None else max(0.0, 1 - self.busy)


def bottleneck(
    summary: CaseSummary,
    measured: Sequence[Measurement],
    peaks: Peaks,
    max_clock_hz: float | None = None,
) -> Bottleneck | None:
    """What limits a case on a GPU; None for one without a time.

    A GPU that works for less than HOST_BELOW of the step waits: for whatever explains half of the
    wait, or for the rest of the host. One that works for BUSY_FROM or more is limited by the term
    of its roofline bound, if it reaches NEAR of that.
    """
    ok = [m for m in measured if m.outcome is Outcome.OK and m.kept_s]
    if not ok:
        return None
    clock = clock_limit(ok, max_clock_hz)
    if all(m.steady is False and min([m.kept_s[0], *m.warmup_s]) > COLD * m.kept_s[-1] for m in ok):
        facts = {"first": ok[0].kept_s[0], "last": ok[0].kept_s[-1]}
        return Bottleneck(limit=Limit.COLD, clock=clock, facts=facts)
    timed = [(m, b) for m in ok if (b := m.breakdown) and b.launch_gap is not None]
    waits: Mapping[Limit, float] = {}
    if timed:
        each = [_waits(m, b, peaks) for m, b in timed]
        busy = fmean(of_one for of_one, _ in each)
        waits = {kind: fmean(w.get(kind, 0.0) for _, w in each) for kind in WAITS}
    elif nvml := [r for m in ok if (r := readings(m, "gpu_utilisation", ("sampling",)))]:
        busy = fmean(map(fmean, nvml))
    else:
        return Bottleneck(limit=Limit.NOT_MEASURED, clock=clock)
    roofline = summary.metrics.get("roofline_share")
    share = roofline.value if roofline else None
    one = any(m.counters and m.counters.kernel_launches == 1 and launches(m) is None for m in ok)
    if busy < BUSY_FROM and one:  # the step is one graph
        limit = Limit.GRAPH
    elif busy < HOST_BELOW:
        limit = next((kind for kind, part in waits.items() if part >= HALF), Limit.HOST)
    elif busy < BUSY_FROM:
        limit = Limit.BOTH
    elif share is None:
        limit = Limit.GPU
    elif share < NEAR:
        limit = Limit.BELOW
    else:
        by = {"compute": Limit.COMPUTE, "bandwidth": Limit.BANDWIDTH}
        limit = by.get(summary.roofline_by, Limit.LAUNCHES)
    found = Bottleneck(
        limit=limit, busy=busy, profiled=bool(timed), waits=waits, share=share, clock=clock
    )
    counts = (timed[0][0].counters if timed else None) or Counters()
    return replace(found, facts=_facts(found, summary.roofline_by, counts.host_syncs or 0))


def works(ok: Sequence[Measurement]) -> bool:
    """Whether the GPU is known to work for most of a step: then the host's scatter does not reach
    it. By the profile, else by NVML while sampling."""
    gaps = [m.breakdown.launch_gap for m in ok if m.breakdown]
    known = [1 - gap for gap in gaps if gap is not None]
    busy = known or [x for m in ok for x in readings(m, "gpu_utilisation", ("sampling",))]
    return bool(busy) and fmean(busy) >= HOST_BELOW


def _facts(found: Bottleneck, bound_by: str, syncs: int) -> Facts:
    """The share of the step in which the GPU works, and what explains the rest or its speed."""
    facts = {"busy": found.busy or 0.0, "by": None if found.profiled else "NVML"}
    if found.limit in WAITS:
        facts |= {"wait": found.limit, "explained": found.waits[found.limit]}
    if found.limit in (*WAITS, Limit.HOST, Limit.BOTH):
        facts |= {"syncs": syncs or None, "cause": None if found.profiled else "not profiled"}
    if found.share is not None and (found.busy or 0) >= BUSY_FROM:
        facts |= {"reached": found.share, "bound": bound_by}
    return facts


def _waits(m: Measurement, b: Breakdown, peaks: Peaks) -> tuple[float, Mapping[Limit, float]]:
    """The share of the step in which the GPU works, and what its wait is for: also communication
    that no other kernel hides, though its kernels run."""
    busy_s, kernels = b.device_busy_s or 0.0, m.profile.kernels if m.profile else ()
    others_s = sum(u.time_s for u in kernels if not _COMMUNICATION.search(f"{u.where} {u.name}"))
    sent_s = sum(u.time_s for u in kernels) - others_s
    exposed_s = min(sent_s, max(0.0, busy_s - others_s))
    if b.communication_s is not None:  # others may run together, or not be kept
        exposed_s = b.exposed_s
    gap_s = max(0.0, b.step_s - busy_s)
    wait_s = gap_s + exposed_s
    counts = m.counters or Counters()
    syncs = max(counts.host_syncs or 0, counts.device_waits or 0)
    known = (
        gap_s * _in_range(b, _DATA),
        exposed_s + gap_s * _in_range(b, _COMMUNICATION),
        syncs * (peaks.sync_s or 0.0),
        (launches(m) or 0) * (peaks.launch_s or 0.0),
    )
    waits = {
        kind: min(1.0, s / wait_s) for kind, s in zip(WAITS, known, strict=True) if s > 0 < wait_s
    }
    return max(0.0, 1 - wait_s / b.step_s), waits


def _in_range(b: Breakdown, names: re.Pattern[str]) -> float:
    """Share of the GPU's idle time that a kind of range explains, at least: what comes before its
    kernels, or its time on the host beyond that of the GPU's work."""

    def share(of: Mapping[str, float]) -> float:
        return sum(part for name, part in of.items() if names.search(name))

    gap = b.launch_gap or 0.0
    beyond = (share(b.host_by_range) - (1 - gap)) / gap if gap else 0.0
    return max(share(b.gap_by_range), beyond)


# --- where the time of a step goes ---------------------------------------------------------

OTHER, OUTSIDE = "other kernels", "outside kernels"
MAX_STACKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Parts of a case's step with their seconds, by a profile. They add up to the step."""

    case: Case
    step_s: float
    parts: Mapping[str, float]
    note: str = ""
    """Where the ranges of a graph's kernels are from."""


def stacks(
    run: Run,
    summaries: Sequence[CaseSummary],
    judged: Collection[str] = (),
    *,
    first: Sequence[str] = (),
) -> tuple[Stack, ...]:
    """The longest of each group of cases along their longest axis, those that rules ask (`judged`)
    before the others and then the longest step: of each factory and provider one at least, so that
    an operator is beside the model that calls it. The `first` are shown whatever their length."""
    found: list[Stack] = []
    for cases in by_workload(filter(has_a_speed, summaries)).values():
        axis = longest(cases)
        profiled = [(s, stack) for s in cases if (stack := stack_of(run, s.case))]
        curves = pairs(cases, axis)
        last = [max(curve, key=lambda s: positive(s, axis)) for curve in curves]
        found += [stack for s, stack in profiled if s in last or s.case.case_id in first]

    def place(s: Stack) -> tuple[bool, bool, float]:
        return s.case.case_id not in first, s.case.case_id not in judged, -s.step_s

    found.sort(key=place)
    kinds = [(s.case.factory, s.case.provider) for s in found]
    firsts = [stack for i, stack in enumerate(found) if kinds.index(kinds[i]) == i]
    shown = [*firsts, *(stack for stack in found if stack not in firsts)][:MAX_STACKS]
    return tuple(stack for stack in found if stack in shown)


def stack_of(run: Run, case: Case) -> Stack | None:
    """Kernel time by range, and the rest of the step; None unless two ranges are named.

    Kernels that run side by side share the time.
    """
    m = next((m for m in run.of(case.case_id) if m.breakdown and m.profile), None)
    if m is None or m.breakdown is None or m.profile is None or not m.breakdown.device_busy_s:
        return None
    step_s, parts = m.breakdown.step_s, dict[str, float]()
    longest = m.profile.kernels  # all that a record without times by range has
    for where, time_s in (m.breakdown.kernels_by_range or by_range(longest)).items():
        name = _part(where)
        parts[name] = parts.get(name, 0.0) + time_s
    busy_s, total_s = min(m.breakdown.device_busy_s, step_s), sum(parts.values())
    if len(parts.keys() - {OTHER}) < 2:
        return None
    parts = {name: t * min(1.0, busy_s / total_s) for name, t in parts.items()}
    parts[OTHER] = parts.pop(OTHER, 0.0) + max(0.0, busy_s - total_s)
    parts[OUTSIDE] = step_s - busy_s
    return Stack(case=case, step_s=step_s, parts=parts, note=m.breakdown.ranges)


def _part(where: str) -> str:
    """`nsa.select` -> `select`; PyTorch's `Optimizer.step#AdamW.step` -> `optimiser`, and its
    `nccl:all_reduce` -> `communication`."""
    known = {"Optimizer.": "optimiser", "nccl:": "communication"}
    name = next((part for start, part in known.items() if where.startswith(start)), "")
    return name or where.rpartition(".")[2].replace("_", " ") or OTHER
