"""Why a run is slow, or its numbers mislead, as its own record shows it.

What spoils numbers comes before what costs time, and of the latter what costs most comes first.
Peers are left out. No cause is named without evidence: a run in which nothing is wrong has none.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean, median

from harness import units
from harness.analysis.effects import Effect, effects
from harness.analysis.over_steps import course, leaked
from harness.analysis.recorded import TIMED, clock_limit, of_ranks, readings
from harness.analysis.roofline import WAITS, Limit
from harness.analysis.scaling import positive
from harness.analysis.study import Study
from harness.records import CaseSummary, Facts, Measurement, Outcome, Run, Scalar

MANY = 0.1
"""Share of readings or samples from which a disturbance is a cause."""
SETTING, SAME_WORK = 1.2, 1.05
"""Ratio of step times from which the slower value of a setting is a cause, and of FLOPs per token
within which two cases do the same work."""
GROWN, GROWN_BYTES = 0.05, 64 * 2**20
"""Growth of memory while sampling that is a leak: as a share, and in bytes."""
UNEVEN, UNEVEN_W = 1.1, 1.25
"""Slowest rank over fastest from which ranks are imbalanced, and the same of their power: equal
work draws up to a tenth more on another card."""
NEAR = 1.5
"""Step time over what its operators predict, or the reverse, within which dispatch is the step."""
EAGER_S = 30e-6
"""Longest time in which a host dispatches one of PyTorch's operators; other calls take longer."""

_RANK = re.compile(r"rank[-_ ]?\d+", re.IGNORECASE)
_POWER = "GPU power of rank"
_OF_RANKS = (
    ("step time of rank", "step_s"),
    ("GPU utilisation of rank", "gpu_utilisation"),
    (_POWER, "gpu_power_w"),
)


class CauseKind(StrEnum):
    """What is wrong; the first ones spoil numbers, the others cost time."""

    OVERFLOW = "float16 overflow"
    CONFIGURATION = "another configuration ran"
    FALLBACK = "silent fallback"
    UNTIMED = "time outside the steps"
    RAISED = "exception"
    DEAD = "setting without effect"
    SHARED = "shared GPU"
    THERMAL = "thermal limit"
    LEAK = "memory leak"
    SINKING = "tokens/s sinks"
    SLOW_STEPS = "slow steps"
    COLD = "cold start"
    RANKS = "rank imbalance"
    SETTING = "costly setting"
    POWER = "power limit"
    DATA = "data"
    COMMUNICATION = "communication"
    SYNCS = "host syncs"
    LAUNCHES = "launches"
    DISPATCH = "dispatch in Python"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause in one case, with the same cause in other cases."""

    kind: CauseKind
    case_id: str
    facts: Facts
    """What the record shows, by name."""
    share: float | None = None
    """Of the step: removing the cause saves at most this. None if it spoils numbers."""
    about: str = ""
    """The value of a setting that is faster, as `NAME=value`; or the axis without effect."""
    beside: tuple["Cause", ...] = ()

    @property
    def cases(self) -> tuple[str, ...]:
        return self.case_id, *(one.case_id for one in self.beside)

    def within(self, pairs: Collection[tuple[str, str]]) -> "Cause | None":
        """The cause in those of its cases that are the first, slower ones of a pair, and show more
        of it than the second one, which may be empty; None without any."""
        every = self, *self.beside
        shares = {one.case_id: one.share or 0.0 for one in every}
        slower = {a for a, b in pairs if shares.get(a, 0.0) > shares.get(b, 0.0)}
        seen = [one for one in every if one.case_id in slower]
        return replace(seen[0], beside=tuple(seen[1:])) if seen else None


def causes(of: Study) -> tuple[Cause, ...]:
    """Every cause that the record of a run shows."""
    run = of.run
    ours = [s for s in of.summaries if s.case.provider not in run.suite.peers]
    measured = {s.case.case_id: run.of(s.case.case_id) for s in ours}
    wrong = [*_misconfigured(ours), *_disturbances(run, measured)]
    mistaken = {one.case_id for one in wrong if one.share is None}
    sound = [s for s in ours if s.outcome is Outcome.OK and s.case.case_id not in mistaken]
    judged = [s for s in sound if any(r.match.accepts(s.case) for r in run.suite.rules)] or sound
    found = [
        *wrong,
        *_failures(measured),
        *_in_output(run),
        *_without_effect(of, ours),
        *_over_time(run, measured),
        *_limits(of, sound, {s.case.case_id for s in judged}),
        *_ranks(measured),
        *_settings(run, judged),
    ]
    if any(one.kind is CauseKind.RANKS for one in found):  # the others wait for the slowest
        found = [one for one in found if one.kind is not CauseKind.COMMUNICATION]

    def place(c: Cause) -> tuple[float, int]:
        return -(math.inf if c.share is None else c.share), [*CauseKind].index(c.kind)

    return tuple(sorted(_merged(found), key=place))


def _merged(found: Iterable[Cause]) -> Iterator[Cause]:
    """One cause for all cases that show it. The case that it costs most is the first, but that of
    the suite for DISPATCH: it is easier to read."""
    in_order = CauseKind.DISPATCH
    groups: dict[tuple[CauseKind, str], dict[str, Cause]] = {}
    for one in sorted(found, key=lambda c: 0.0 if c.kind is in_order else -(c.share or 0.0)):
        groups.setdefault((one.kind, one.about), {}).setdefault(one.case_id, one)
    for first, *others in (by_case.values() for by_case in groups.values()):
        yield replace(first, beside=tuple(others))


# --- what spoils numbers -----------------------------------------------------------------


def _misconfigured(ours: Sequence[CaseSummary]) -> Iterator[Cause]:
    for s in ours:
        for axis, asked in s.case.axes.items():
            ran = s.effective.get(axis, asked)
            said, plain = _setting(ran), _setting(asked)
            if said != plain and not said.startswith(f"{plain} ("):
                facts = {"axis": axis, "asked": asked, "ran": ran}
                yield Cause(CauseKind.CONFIGURATION, s.case.case_id, facts)


def _setting(value: Scalar) -> str:
    text = str(value).lower().removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    return {"true": "on", "1": "on", "false": "off", "0": "off"}.get(text, text)


def _failures(measured: Mapping[str, Sequence[Measurement]]) -> Iterator[Cause]:
    """Overflows of float16, and cases that ran other kernels than they must."""
    for case_id, processes in measured.items():
        for m in processes:
            origins = m.evidence.origins if m.evidence else ()
            first = next((o for o in origins if o.computation == "run" and o.value), None)
            if first and first.precision.removeprefix("torch.") in ("float16", "fp16"):
                facts = {"value": first.value, "tensor": first.tensor, "module": first.module}
                yield Cause(CauseKind.OVERFLOW, case_id, facts)
            if m.outcome is Outcome.PATH_MISMATCH and m.profile is not None:
                yield Cause(CauseKind.FALLBACK, case_id, {"ended": m.detail.partition("\n")[0]})


def _in_output(run: Run) -> Iterator[Cause]:
    """Programs whose own times leave something out, or that end well after an exception."""
    by_share = sorted(run.measurements, key=lambda m: float(m.effective.get("timed_share") or 0.0))
    for m in by_share:  # the cause has the facts of the worst case
        if "timed_share" in m.effective:
            yield Cause(CauseKind.UNTIMED, m.case_id, m.effective)
        if m.effective.get("raised"):
            yield Cause(CauseKind.RAISED, m.case_id, m.effective)


def _without_effect(of: Study, ours: Sequence[CaseSummary]) -> Iterator[Cause]:
    """Axes whose values all do the same, and variables that a program never read."""
    run, never_read = of.run, set[str]()
    for s in ours:
        flags = [m.flags_read for m in run.of(s.case.case_id) if m.effective or m.flags_read]
        for name in s.case.env if flags else ():
            if all(read.get(name) is False for read in flags):
                never_read.add(name)
                yield Cause(CauseKind.DEAD, s.case.case_id, {"unread": name})
    for d in of.dead_axes:
        apart = d.axes == ("provider",) or d.provider in run.suite.peers
        if apart or d.time_differs or never_read & {*d.axes}:
            continue
        kind = d.workload, d.provider
        own = [s.case for s in ours if (s.case.workload, s.case.provider) == kind]
        carried = own[0].program.carried if own[0].program else {}
        flags = [m.flags_read for c in own for m in run.of(c.case_id)]
        was_read = any(read.get(carried.get(axis, axis)) for read in flags for axis in d.axes)
        values = " and ".join(", ".join(map(units.scalar, v)) for v in d.values)
        facts, about = {"axes": "/".join(d.axes), "values": values}, "/".join(kind)
        dead = CauseKind.FALLBACK if was_read else CauseKind.DEAD
        yield from (Cause(dead, c.case_id, facts, about=f"{about}: {facts['axes']}") for c in own)


def _disturbances(run: Run, measured: Mapping[str, Sequence[Measurement]]) -> Iterator[Cause]:
    gpu = run.environment.gpu
    for case_id, processes in measured.items():
        channels = of_ranks("gpu_foreign_processes", processes)
        each = [[x > 0 for m in processes for x in readings(m, c, TIMED)] for c in channels]
        foreign = max(each, key=sum)
        holders = [h for m in processes if m.evidence for h in m.evidence.holders]
        if holders or sum(foreign) > MANY * len(foreign):
            used = {"foreign": sum(foreign), "readings": len(foreign)}
            held = {"holders": ", ".join(holders)}
            yield Cause(CauseKind.SHARED, case_id, held if holders else used)
        limit = clock_limit(processes, gpu.max_sm_clock_hz if gpu else None)
        samples = sum(len(m.samples_s) for m in processes)
        lost = sum(len(m.discarded.get("throttled", ())) for m in processes)
        if limit is not None and limit.by == "power":
            yield Cause(CauseKind.POWER, case_id, limit.facts, limit.lost)
        elif limit is not None or lost > MANY * samples:
            throttled = {"lost": lost, "samples": samples}
            yield Cause(CauseKind.THERMAL, case_id, limit.facts if limit else throttled)


def _over_time(run: Run, measured: Mapping[str, Sequence[Measurement]]) -> Iterator[Cause]:
    """Memory that leaks, over the steps or while sampling; tokens/s that sink; slow steps, unless
    the suite expects one, to see that it is found."""
    wanted = [e.match for e in run.suite.expectations if e.metric == "slow_steps" and e.low]
    slow_wanted = {c.case_id for c in run.suite.cases if any(m.accepts(c) for m in wanted)}
    for case_id, processes in measured.items():
        if went := course(processes):
            if went.leaked and went.growth:
                grown_by = {"each": went.growth.value, "by": went.leaked, "steps": went.steps}
                yield Cause(CauseKind.LEAK, case_id, grown_by)
            if went.trend == "sinking" and went.drift:
                sinks = {"change": went.drift, "steps": went.steps}
                yield Cause(CauseKind.SINKING, case_id, sinks)
            if went.slow and case_id not in slow_wanted:
                step, times = next(iter(went.slow.items()))
                slow = {"step": step, "times": times, "others": len(went.slow) - 1 or None}
                if (n := sum(bool(m.over_steps) for m in processes)) > 1:
                    slow |= {"seen": went.slow_in[step], "processes": n}
                yield Cause(CauseKind.SLOW_STEPS, case_id, slow)
        for channel, what in (("gpu_memory_bytes", "GPU memory"), ("rss_bytes", "host memory")):
            read = (readings(m, channel, ("sampling",)) for m in processes)
            if grown := min((leaked(r, GROWN, GROWN_BYTES) for r in read), default=0.0):
                yield Cause(CauseKind.LEAK, case_id, {"memory": what, "grown": grown})


# --- what costs time ---------------------------------------------------------------------


def _limits(of: Study, sound: Sequence[CaseSummary], judged: set[str]) -> Iterator[Cause]:
    """What the GPU waits for, and cold starts: in the cases that are judged, have a suspect, or
    have the settings of the gap's day."""
    run = of.run
    if run.environment.gpu is None:
        return
    asked = {*judged}
    if suspects := run.suite.suspects:
        named = [*(s.with_ for s in suspects.tested if s.control is None), suspects.gap.then]
        asked |= {s.case.case_id for s in sound if any(m and m.accepts(s.case) for m in named)}
    found = [(s, b) for s in sound if (b := of.bottlenecks.get(s.case.case_id))]
    counted: dict[str, tuple[int, float]] = {}
    for s, b in found:
        step, counts = s.metrics.get("step_s"), [m.counters for m in run.of(s.case.case_id)]
        known = {None if c.hidden else c.dispatched_ops for c in counts if c}
        operators = known.pop() if len(known) == 1 else None
        if b.limit is Limit.HOST and step and operators:
            counted[s.case.case_id] = operators, step.value
    for s, b in found:
        case_id = s.case.case_id
        if case_id not in asked:
            continue
        if b.limit is Limit.COLD:
            yield Cause(CauseKind.COLD, case_id, b.facts)
        elif b.limit in (*WAITS, Limit.HOST) and (b.profiled or case_id in counted):
            kind, facts = CauseKind(str(b.limit)), b.facts
            others = [step_s / n for i, (n, step_s) in counted.items() if i != case_id]
            eager = [each_s for each_s in others if each_s <= EAGER_S]
            share = b.wait * b.waits.get(b.limit, 1.0)
            if case_id in counted and eager:
                busy = s.busy or b.busy or 0.0
                kind, facts = _dispatch(*counted[case_id], busy, median(eager))
                share = 1 - busy
            yield Cause(kind, case_id, facts, share)


def _dispatch(operators: int, step_s: float, busy: float, each_s: float) -> tuple[CauseKind, Facts]:
    """Whether the operators of a step explain it, at the time that one takes in other cases."""
    predicted_s = operators * each_s
    share = predicted_s / step_s
    facts = {"operators": operators, "each": each_s, "predicted": predicted_s, "part": share}
    facts |= {"step": step_s, "works": busy}
    if not 1 / NEAR <= share <= NEAR:
        return CauseKind.HOST, facts
    fills = "alone would fill" if share >= 1 else "is most of"
    return CauseKind.DISPATCH, {**facts, "fills": fills}


def _ranks(measured: Mapping[str, Sequence[Measurement]]) -> Iterator[Cause]:
    """Ranks that differ alike in every process: in a metric that they report, or in time,
    utilisation or power. Under DDP the steps of all ranks take as long as the slowest, and NCCL
    keeps a GPU that waits busy; but such a GPU draws less power."""
    for case_id, processes in measured.items():
        each: dict[str, dict[int, float]] = {}
        for m in processes:
            found = {n: median(v) for n, v in m.readings.items() if v and _RANK.search(n)}
            for r in m.ranks:
                found |= {f"{name} {r.rank}": x for name, of in _OF_RANKS if (x := getattr(r, of))}
            for name, value in found.items():
                each.setdefault(name, {})[m.process] = value
        for what in dict.fromkeys(_RANK.sub("rank", name) for name in each):
            names = [name for name in each if _RANK.sub("rank", name) == what]
            names.sort(key=lambda name: fmean(each[name].values()))
            least, most = each[names[0]], each[names[-1]]
            low, high = (fmean(of.values()) for of in (least, most))
            limit = UNEVEN_W if what == _POWER else UNEVEN
            both = least.keys() & most.keys()
            if low > 0 and both and all(most[p] > limit * least[p] for p in both):
                best = _RANK.findall(names[0])[0]
                facts = {"slowest": names[-1], "times": high / low, "best": best}
                yield Cause(CauseKind.RANKS, case_id, facts, 1 - low / high)


def _settings(run: Run, sound: Sequence[CaseSummary]) -> Iterator[Cause]:
    """Settings (not sizes) that make the same work slower, unless the suite names them suspects. A
    value that is faster at another level of some axis is not a cause."""
    suspects = run.suite.suspects.tested if run.suite.suspects else ()
    named = {n for s in suspects for n in (*s.with_.criteria, *s.without.criteria)}
    found: list[Cause] = []
    slower: set[tuple[str, str]] = set()
    for e in effects(sound):
        both = [s for pair in e.cases for s in pair]
        sizes = any(positive(s, e.axis) for s in both) and not e.axis.isupper()
        if e.axis in ("provider", *named) or sizes or e.ratio.low is None or e.ratio.high is None:
            continue
        ratio, slow, quick, least = e.ratio, e.value, e.base, min(e.by_pair)
        if ratio.value <= 1:
            ratio, slow, quick, least = ratio.inverse, e.base, e.value, 1 / max(e.by_pair)
        if ratio.differs:
            slower.add((e.workload, f"{e.axis}={units.scalar(slow)}"))
        if min(ratio.low or 0.0, least) < SETTING or not _same_work(e):
            continue
        name, value = (f"{run.suite.axis(e.axis)}={units.scalar(v)}" for v in (slow, quick))
        at = [f"{run.suite.axis(a)}={units.scalar(level)}" for a, level in e.within.items()]
        facts = {"slow": name, "quick": value, "times": ratio.value, "pairs": e.pairs}
        facts["at"] = " at ".join(at)
        about = f"{e.axis}={units.scalar(quick)}"
        slowed = [s.case.case_id for s in both if s.case.get(e.axis) == slow]
        found += [Cause(CauseKind.SETTING, i, facts, 1 - 1 / ratio.value, about) for i in slowed]
    yield from (c for c in found if (c.case_id.partition("/")[0], c.about) not in slower)


def _same_work(e: Effect) -> bool:
    """Whether the FLOPs of a token do not follow a setting; of a variable they may be unknown."""
    work = [[s.flops / (s.tokens or 1) for s in pair if s.flops] for pair in e.cases]
    known = [of for of in work if len(of) > 1]
    return bool(known or e.axis.isupper()) and all(max(w) <= SAME_WORK * min(w) for w in known)
