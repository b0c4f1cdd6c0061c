"""Why a run is slow, or its numbers mislead, as its own record shows it.

What spoils numbers comes before what costs time, and of the latter what costs most comes first.
Peers are left out. No cause is named without evidence: a run in which nothing is wrong has none.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

from harness import units
from harness.analysis.dead_axes import dead_axes
from harness.analysis.effects import effects
from harness.analysis.over_steps import course, leaked
from harness.analysis.recorded import TIMED, clock_limit, of_ranks, readings
from harness.analysis.roofline import WAITS, Limit, bottleneck, kernels_by_range
from harness.analysis.scaling import groups_along, positive
from harness.records import CaseSummary, Match, Measurement, Outcome, Peaks, Run, Scalar

MANY = 0.1
"""Share of readings or samples from which a disturbance is a cause."""
SETTING = 1.2
"""Ratio of step times from which the slower value of a setting is a cause."""
SAME_WORK = 1.05
"""Ratio of FLOPs per token within which two cases do the same work."""
GROWN, GROWN_BYTES = 0.05, 64 * 2**20
"""Growth of memory while sampling that is a leak: as a share, and in bytes."""
STEEP, STEEPER = 1.5, 0.3
"""Exponent of a range that is too steep, and how far it exceeds that of the FLOPs."""
LARGE_PART = 0.25
"""Share of the kernels' time from which the growth of a range matters."""
UNEVEN = 1.1
"""Slowest rank over fastest from which ranks are imbalanced."""
UNEVEN_W = 1.25
"""The same of their power; equal work draws up to a tenth more on another card."""
NEAR = 1.5
"""Step time over what its operators predict, or the reverse, within which dispatch is the step."""
EAGER_S = 30e-6
"""Longest time in which a host dispatches one of PyTorch's operators; other calls take longer."""

_RANK = re.compile(r"rank[-_ ]?\d+", re.IGNORECASE)
_POWER = "GPU power of rank"


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
    STEEP = "steep range"
    SETTING = "costly setting"
    POWER = "power limit"
    DATA = "data"
    COMMUNICATION = "communication"
    SYNCS = "host syncs"
    LAUNCHES = "launches"
    DISPATCH = "dispatch in Python"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """One cause in one case."""

    kind: CauseKind
    case_id: str
    evidence: str
    share: float | None = None
    """Of the step: removing the cause saves at most this. None if it spoils numbers."""
    about: str = ""
    """The value of a setting that is faster, as `NAME=value`; the axis without effect; or the range
    that is steep."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause in all cases that show it; the first speaks for them."""

    seen: tuple[Symptom, ...]

    @property
    def kind(self) -> CauseKind:
        return self.seen[0].kind

    @property
    def cases(self) -> tuple[str, ...]:
        return tuple(s.case_id for s in self.seen)

    @property
    def evidence(self) -> str:
        return self.seen[0].evidence

    @property
    def share(self) -> float | None:
        return self.seen[0].share

    @property
    def about(self) -> str:
        return self.seen[0].about

    def within(self, pairs: Collection[tuple[str, str]]) -> "Cause | None":
        """The cause in the slower cases of these pairs; None if it explains none of them.

        Args:
            pairs: Id of a case, and of the faster one that it is compared with, or empty. If the
                faster one shows as much of the cause, that does not explain the difference.
        """
        shares = {s.case_id: s.share or 0.0 for s in self.seen}
        slower = {a for a, b in pairs if shares.get(a, 0.0) > shares.get(b, 0.0)}
        seen = tuple(s for s in self.seen if s.case_id in slower)
        return Cause(seen) if seen else None


def causes(run: Run, summaries: Sequence[CaseSummary]) -> tuple[Cause, ...]:
    """Every cause that the record of a run shows."""
    ours = [s for s in summaries if s.case.provider not in run.suite.peers]
    measured = {s.case.case_id: run.of(s.case.case_id) for s in ours}
    wrong = [*_misconfigured(ours), *_disturbances(run, measured)]
    mistaken = {one.case_id for one in wrong if one.share is None}
    sound = [s for s in ours if s.outcome is Outcome.OK and s.case.case_id not in mistaken]
    judged = [s for s in sound if any(r.match.accepts(s.case) for r in run.suite.rules)] or sound
    found = [
        *wrong,
        *_failures(measured),
        *_in_output(run),
        *_without_effect(run, ours),
        *_over_time(measured, slow_wanted=_slow_wanted(run)),
        *_limits(run, sound, {s.case.case_id for s in judged} | _quoted(run)),
        *_ranks(measured),
        *_settings(run, judged),
        *_steep(run, judged),
    ]
    if any(one.kind is CauseKind.RANKS for one in found):  # the others wait for the slowest
        found = [one for one in found if one.kind is not CauseKind.COMMUNICATION]
    order = [*CauseKind]
    return tuple(
        sorted(
            merged(found),
            key=lambda c: (-(math.inf if c.share is None else c.share), order.index(c.kind)),
        )
    )


def merged(found: Iterable[Symptom]) -> list[Cause]:
    """One cause for all cases that show it. The case that it costs most is the first, but that of
    the suite for DISPATCH: it is easier to read."""
    groups: dict[tuple[CauseKind, str], list[Symptom]] = {}
    for one in found:
        groups.setdefault((one.kind, one.about), []).append(one)
    made = []
    for (kind, _), seen in groups.items():
        if kind is not CauseKind.DISPATCH:
            seen.sort(key=lambda one: -(one.share or 0.0))
        first: dict[str, Symptom] = {}
        for one in seen:
            first.setdefault(one.case_id, one)
        made.append(Cause(tuple(first.values())))
    return made


# --- what spoils numbers -----------------------------------------------------------------


def _misconfigured(ours: Sequence[CaseSummary]) -> Iterator[Symptom]:
    for s in ours:
        for axis, asked in s.case.axes.items():
            ran = s.effective.get(axis, asked)
            said, plain = _setting(ran), _setting(asked)
            if said != plain and not said.startswith(f"{plain} ("):
                text = f"asked for {axis}={units.scalar(asked)}, ran {axis}={units.scalar(ran)}"
                yield Symptom(kind=CauseKind.CONFIGURATION, case_id=s.case.case_id, evidence=text)


def _setting(value: Scalar) -> str:
    text = str(value).lower().removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    return {"true": "on", "1": "on", "false": "off", "0": "off"}.get(text, text)


def _failures(measured: Mapping[str, Sequence[Measurement]]) -> Iterator[Symptom]:
    """Overflows of float16, and cases that ran other kernels than they must."""
    for case_id, processes in measured.items():
        for m in processes:
            origins = m.evidence.origins if m.evidence else ()
            first = next((o for o in origins if o.computation == "run" and o.value), None)
            if first and first.precision.removeprefix("torch.") in ("float16", "fp16"):
                where = f" in {first.module}" if first.module else ""
                text = f"first {first.value} in {first.tensor}{where}"
                yield Symptom(kind=CauseKind.OVERFLOW, case_id=case_id, evidence=text)
            if m.outcome is Outcome.PATH_MISMATCH and m.profile is not None:
                text = m.detail.partition("\n")[0]
                yield Symptom(kind=CauseKind.FALLBACK, case_id=case_id, evidence=text)


def _in_output(run: Run) -> Iterator[Symptom]:
    """Programs whose own times leave something out, or that end well after an exception."""

    def share(m: Measurement) -> float:
        return float(m.effective.get("timed_share") or 0.0)

    for m in sorted(run.measurements, key=share):  # the cause has the words of the worst case
        if "timed_share" in m.effective:
            made = units.percent(share(m))
            text = f"its own step times make up {made} of the time from line to line"
            rest = "step time and tokens/s leave out the rest, such as loading data"
            yield Symptom(kind=CauseKind.UNTIMED, case_id=m.case_id, evidence=f"{text}; {rest}")
        if why := m.effective.get("raised"):
            text = f"exit status 0, but its output has a traceback: {why}"
            yield Symptom(kind=CauseKind.RAISED, case_id=m.case_id, evidence=text)


def _without_effect(run: Run, ours: Sequence[CaseSummary]) -> Iterator[Symptom]:
    """Axes whose values all do the same, and variables that a program never read."""
    known: set[str] = set()
    for s in ours:
        flags = [m.flags_read for m in run.of(s.case.case_id) if m.effective or m.flags_read]
        for name in s.case.env if flags else ():
            if all(read.get(name) is False for read in flags):
                known.add(name)
                text = f"sets {name}, which was never read"
                yield Symptom(kind=CauseKind.DEAD, case_id=s.case.case_id, evidence=text)
    for d in dead_axes(run, ours):
        if d.axes == ("provider",) or d.time_differs or known & {*d.axes}:
            continue
        own = [s.case for s in ours if s.case.workload == d.workload]
        own = [c for c in own if c.provider == d.provider]
        names = {c.program.carried.get(a, a) if c.program else a for c in own for a in d.axes}
        processes = [m for c in own for m in run.of(c.case_id)]
        was_read = any(m.flags_read.get(name) for m in processes for name in names)
        head = f"{'/'.join(d.axes)} {'was read but ' if was_read else ''}has no effect"
        values = " and ".join(", ".join(map(units.scalar, v)) for v in d.values)
        same = f"the same operators, counters and results with {values}"
        for c in own:
            yield Symptom(
                kind=CauseKind.FALLBACK if was_read else CauseKind.DEAD,
                case_id=c.case_id,
                evidence=f"{head}: {same}",
                about=f"{d.workload}/{d.provider}: {'/'.join(d.axes)}",
            )


def _disturbances(run: Run, measured: Mapping[str, Sequence[Measurement]]) -> Iterator[Symptom]:
    gpu = run.environment.gpu
    for case_id, processes in measured.items():
        channels = of_ranks("gpu_foreign_processes", processes)
        each = [[x > 0 for m in processes for x in readings(m, c, TIMED)] for c in channels]
        foreign = max(each, key=sum)
        holders = [h for m in processes if m.evidence for h in m.evidence.holders]
        if holders or sum(foreign) > MANY * len(foreign):
            used = f"other processes in {sum(foreign)} of {len(foreign)} readings"
            text = f"held by {', '.join(holders)}" if holders else used
            yield Symptom(kind=CauseKind.SHARED, case_id=case_id, evidence=text)
        limit = clock_limit(processes, gpu.max_sm_clock_hz if gpu else None)
        samples = sum(len(m.samples_s) for m in processes)
        lost = sum(len(m.discarded.get("throttled", ())) for m in processes)
        if limit is not None and limit.by == "power":
            yield Symptom(
                kind=CauseKind.POWER, case_id=case_id, evidence=str(limit), share=limit.lost
            )
        elif limit is not None or lost > MANY * samples:
            throttled = f"{lost} of {samples} samples were taken while the GPU was throttled"
            text = str(limit) if limit else throttled
            yield Symptom(kind=CauseKind.THERMAL, case_id=case_id, evidence=text)


def _slow_wanted(run: Run) -> set[str]:
    """Cases in which the suite expects a slow step, to see that it is found."""
    wanted = [e for e in run.suite.expectations if e.metric == "slow_steps" and e.low]
    return {c.case_id for c in run.suite.cases if any(e.match.accepts(c) for e in wanted)}


def _over_time(
    measured: Mapping[str, Sequence[Measurement]], *, slow_wanted: Collection[str]
) -> Iterator[Symptom]:
    """Memory that leaks, over the steps or while sampling; tokens/s that sink; slow steps."""
    for case_id, processes in measured.items():
        if went := course(processes):
            if went.leaked and went.growth:
                each, by = units.size(went.growth.value), units.size(went.leaked)
                text = f"memory grows by {each} a step, {by} in {went.steps} steps"
                yield Symptom(kind=CauseKind.LEAK, case_id=case_id, evidence=text)
            if went.trend == "sinking" and went.drift:
                change = units.cell("tokens_per_s_drift", went.drift)
                text = f"tokens/s changes by {change} in {went.steps} steps"
                yield Symptom(kind=CauseKind.SINKING, case_id=case_id, evidence=text)
            if went.slow and case_id not in slow_wanted:
                step, factor = next(iter(went.slow.items()))
                text = f"step {step} takes {units.factor(factor)} as long as those around it"
                if (n := sum(bool(m.over_steps) for m in processes)) > 1:
                    text += f", in {went.slow_in[step]} of {n} processes"
                if others := len(went.slow) - 1:
                    text += f"; {others} more {'is' if others == 1 else 'are'} slow"
                yield Symptom(kind=CauseKind.SLOW_STEPS, case_id=case_id, evidence=text)
        for channel, what in (("gpu_memory_bytes", "GPU memory"), ("rss_bytes", "host memory")):
            read = (readings(m, channel, ("sampling",)) for m in processes)
            if grown := min((leaked(r, GROWN, GROWN_BYTES) for r in read), default=0.0):
                text = f"{what} grows by {units.size(grown)} while sampling"
                yield Symptom(kind=CauseKind.LEAK, case_id=case_id, evidence=text)


# --- what costs time ---------------------------------------------------------------------


def _quoted(run: Run) -> set[str]:
    """The cases with a suspect, and those with the settings of the gap's day."""
    if run.suite.suspects is None:
        return set()
    tested = [s for s in run.suite.suspects.tested if s.control is None]
    asked = [*(s.with_ for s in tested), run.suite.suspects.gap.then]
    return {c.case_id for c in run.suite.cases if any(m and m.accepts(c) for m in asked)}


def _limits(run: Run, sound: Sequence[CaseSummary], asked: Collection[str]) -> Iterator[Symptom]:
    """What the GPU waits for in the cases that are asked about, and cold starts."""
    if run.environment.gpu is None:
        return
    peaks = run.self_test.peaks if run.self_test else Peaks()
    found = {s.case.case_id: bottleneck(s, run.of(s.case.case_id), peaks) for s in sound}
    by_host = [s for s in sound if (b := found[s.case.case_id]) and b.limit is Limit.HOST]
    counted = {
        s.case.case_id: (n, step.value)
        for s in by_host
        if (n := _operators(run, s)) and (step := s.metrics.get("step_s"))
    }
    for case_id, b in found.items():
        if b is None or case_id not in asked:
            continue
        if b.limit is Limit.COLD:
            yield Symptom(kind=CauseKind.COLD, case_id=case_id, evidence=b.evidence)
        elif b.limit in (*WAITS, Limit.HOST) and (b.profiled or case_id in counted):
            kind, text = CauseKind(str(b.limit)), b.evidence
            others = [step_s / n for i, (n, step_s) in counted.items() if i != case_id]
            eager = [each_s for each_s in others if each_s <= EAGER_S]
            if case_id in counted and eager:
                kind, text = _dispatch(*counted[case_id], b.busy or 0.0, median(eager))
            saved = b.wait * b.waits.get(b.limit, 1.0)
            yield Symptom(kind=kind, case_id=case_id, evidence=text, share=saved)


def _operators(run: Run, s: CaseSummary) -> int | None:
    """How many a step dispatches; None if processes differ, or if not all can be counted."""
    counted = [m.counters for m in run.of(s.case.case_id) if m.counters]
    each = {c.dispatched_ops for c in counted}
    return next(iter(each)) if len(each) == 1 and not any(c.hidden for c in counted) else None


def _dispatch(operators: int, step_s: float, busy: float, each_s: float) -> tuple[CauseKind, str]:
    """Whether the operators of a step explain it, at the time that one takes in other cases."""
    predicted_s = operators * each_s
    sum_ = f"{operators:,} operators x {units.duration(each_s)} = {units.duration(predicted_s)}"
    gpu = f"the GPU works {units.percent(busy)} of it"
    if 1 / NEAR <= predicted_s / step_s <= NEAR:
        text = f"{sum_}, the step takes {units.duration(step_s)}"
        return CauseKind.DISPATCH, f"{text}: dispatch in Python is the step; {gpu}"
    text = f"{sum_} do not explain the step of {units.duration(step_s)}"
    return CauseKind.HOST, f"{text}; {gpu}"


def _ranks(measured: Mapping[str, Sequence[Measurement]]) -> Iterator[Symptom]:
    """Ranks that differ alike in every process: in a metric that they report, or in time,
    utilisation or power.

    Under DDP the steps of all ranks take as long as the slowest, and NCCL keeps a GPU that waits
    busy; but such a GPU draws less power.
    """
    for case_id, processes in measured.items():
        each: dict[str, dict[int, float]] = {}
        for m in processes:
            found = {n: median(v) for n, v in m.readings.items() if v and _RANK.search(n)}
            for name, value in (found | _of_ranks(m)).items():
                each.setdefault(name, {})[m.process] = value
        alike: dict[str, list[str]] = {}
        for name in each:
            alike.setdefault(_RANK.sub("rank", name), []).append(name)
        for what, names in alike.items():
            names.sort(key=lambda name: fmean(each[name].values()))
            least, most = each[names[0]], each[names[-1]]
            low, high = (fmean(of.values()) for of in (least, most))
            limit = UNEVEN_W if what == _POWER else UNEVEN
            both = least.keys() & most.keys()
            if low > 0 and both and all(most[p] > limit * least[p] for p in both):
                best = _RANK.findall(names[0])[0]
                text = f"{names[-1]} is {units.factor(high / low)} that of {best}"
                lost = 1 - low / high
                yield Symptom(kind=CauseKind.RANKS, case_id=case_id, evidence=text, share=lost)


def _of_ranks(m: Measurement) -> dict[str, float]:
    """What the harness knows of the ranks of a program, by name."""
    time, busy = ("step time of rank", "step_s"), ("GPU utilisation of rank", "gpu_utilisation")
    known = time, busy, (_POWER, "gpu_power_w")
    return {f"{name} {r.rank}": x for r in m.ranks for name, of in known if (x := getattr(r, of))}


def _settings(run: Run, sound: Sequence[CaseSummary]) -> Iterator[Symptom]:
    """Settings (not sizes) that make the same work slower, unless the suite names them suspects.

    A value that is faster at another level of some axis is not a cause.
    """
    suspects = run.suite.suspects.tested if run.suite.suspects else ()
    named = {n for s in suspects for n in (*s.with_.criteria, *s.without.criteria)}
    found: list[tuple[str, Symptom]] = []
    slower: set[tuple[str, str]] = set()
    for e in effects(sound):
        levels = Match(criteria={name: (value,) for name, value in e.within.items()})
        timed = [s for s in sound if s.case.workload == e.workload and "step_s" in s.metrics]
        timed = [s for s in timed if levels.accepts(s.case)]
        both = [s for s in timed if s.case.get(e.axis) in (e.base, e.value)]
        sizes = any(positive(s, e.axis) for s in both) and not e.axis.isupper()
        if e.axis in ("provider", *named) or sizes or e.low is None or e.high is None:
            continue
        slow, quick = (e.value, e.base) if e.ratio > 1 else (e.base, e.value)
        if not e.low <= 1 <= e.high:
            slower.add((e.workload, f"{e.axis}={units.scalar(slow)}"))
        least = min(e.low, e.smallest) if e.ratio > 1 else 1 / max(e.high, e.largest)
        if least < SETTING or not _same_work(both, e.axis):
            continue
        factor = max(e.ratio, 1 / e.ratio)
        name, value = (f"{run.suite.axis(e.axis)}={units.scalar(v)}" for v in (slow, quick))
        text = f"{name} is {units.factor(factor)} slower than {value}"
        text += "".join(f" at {run.suite.axis(a)}={units.scalar(at)}" for a, at in e.within.items())
        for s in both:
            if s.case.get(e.axis) == slow:
                one = Symptom(
                    kind=CauseKind.SETTING,
                    case_id=s.case.case_id,
                    evidence=f"{text} ({units.plural('pair', e.pairs)} of cases)",
                    share=1 - 1 / factor,
                    about=f"{e.axis}={units.scalar(quick)}",
                )
                found.append((e.workload, one))
    yield from (one for workload, one in found if (workload, one.about) not in slower)


def _same_work(both: Sequence[CaseSummary], axis: str) -> bool:
    """Whether the FLOPs of a token do not follow a setting; of a variable they may be unknown."""
    work = [[s.flops / (s.tokens or 1) for s in g if s.flops] for g in groups_along(both, axis)]
    known = [of for of in work if len(of) > 1]
    return bool(known or axis.isupper()) and all(max(w) <= SAME_WORK * min(w) for w in known)


def _steep(run: Run, sound: Sequence[CaseSummary]) -> Iterator[Symptom]:
    """Ranges of the profile whose time grows faster over the last octave than the work does."""
    for axis in dict.fromkeys(name for s in sound for name in s.case.swept):
        for group in groups_along([s for s in sound if positive(s, axis)], axis):
            ranked = sorted(group, key=lambda s: positive(s, axis))
            measured = [run.of(s.case.case_id) for s in ranked]
            parts = [next((p for m in of if (p := kernels_by_range(m))), {}) for of in measured]
            if len(ranked) < 3 or not all(parts[-2:]):
                continue
            (a, b), (before, last) = ranked[-2:], parts[-2:]
            octaves = math.log(positive(b, axis) / positive(a, axis))
            work = math.log((b.flops or 1) / (a.flops or 1)) / octaves
            for name in before.keys() & last.keys():
                power = math.log(last[name] / before[name]) / octaves
                part = last[name] / sum(last.values())
                if name and part > LARGE_PART and power > max(STEEP, work + STEEPER):
                    word = run.suite.axis(axis)
                    of = f"{units.percent(part)} of the kernels"
                    text = f"{name} grows as {word}^{power:.2f}, {of}"
                    text += f"; the FLOPs as {word}^{work:.2f}" if a.flops and b.flops else ""
                    yield Symptom(
                        kind=CauseKind.STEEP,
                        case_id=b.case.case_id,
                        evidence=text,
                        share=part,
                        about=name,
                    )
