"""What changed since an earlier run of the suite, and which run that is."""

import datetime
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from harness import units
from harness.analysis.study import Study
from harness.gate import compare
from harness.gate.records import GateCase, State
from harness.machine import drift
from harness.records import CaseSummary, Change, Decision, Outcome, Run
from harness.report.markdown import clipped
from harness.report.series.gate_text import reason
from harness.report.tables import NONE, Table
from harness.report.text import listed
from harness.store import reader

NO_RUN = "none"
"""`harness report --against none`: compare with no run."""
MOST = 3
"""Cases that one sentence names."""
MAX_ROWS = 10
"""Decided cases that the page shows."""
NEAR = 0.1
"""A change that is not excluded beyond this is not known."""
ALIKE_KERNELS = 1.03
"""Kernels that take as long as before differ by less."""
NODE_MOVED, ALIKE = 1.02, 2.0
"""Ratio of step times by which each provider is slower at least if the node did it, and how many
times as far (on logarithms) the one that moved most."""
NODE = ("GPU UUID", "driver", "power limit (W)")
"""Differences of two environments that make every provider slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    head: str
    bullets: tuple[str, ...]
    regressed: str
    """For the first screen: how many, and the worst; empty if the node explains all."""
    node: str
    """By how much this host is slower, in few words; empty if it is not shown to be."""
    day: datetime.date
    """Of the earlier run."""
    pace: Mapping[str, float]
    """Case -> how many times as long its steps take by that; empty if it is not shown."""
    step: str
    """What finds the cause of the worst slowdown; empty without one, if the node explains it, or if
    a run measured code that is not that of a commit."""
    decided: Table
    """The cases that are slower or faster, the largest change first."""


def earlier(run: Run, say: Callable[[str], None]) -> dict[str, str]:
    """The full runs of the same suite in the same store that started before, oldest first: id ->
    device."""
    began = (run.started_at, run.run_id)
    found = reader.stored(
        Path(run.folder).parent,
        say,
        lambda r: r.suite.name == run.suite.name and (r.started_at, r.run_id) < began,
    )
    full = [(r.started_at, r.run_id, r.environment.device_name) for r in found if reader.is_full(r)]
    return {run_id: device for _, run_id, device in sorted(full)}


def since(first: Study, second: Study) -> Since:
    """How the second run differs from the first."""
    before, now = first.run, second.run
    found = compare.runs(before, second, across=True)
    name = {i: f"`{i}`" if name == i else name for i, name in second.names.items()}
    both = [g for g in found.cases if g.state not in (State.NEW, State.MISSING)]
    moved = [g for g in both if g.change in (Change.SLOWER, Change.FASTER)]
    moved.sort(key=lambda g: -abs(math.log(_ratio(g))))
    node = {d.name for d in drift.differences(before.environment, now.environment)} & {*NODE}
    host, pace = _pace(first, second, both) if node else ({}, {})
    then, kernels = _kernels(first.summaries), _kernels(second.summaries)
    both_s = {i: (s, then[i]) for i, s in kernels.items() if i in then}
    alike = {i: s[0] for i, s in both_s.items() if max(s) < ALIKE_KERNELS * min(s)}

    busy = {s.case.case_id: s.busy for s in second.summaries}

    def by_host(g: GateCase) -> bool:
        if not host or g.comparison is None or g.comparison.ratio.value <= 1:
            return False
        ratio, share = g.comparison.ratio, busy[g.case_id]
        # The part of a step in which the GPU does not work takes as much longer as the host does.
        most = 1 / (share + (1 - share) / min(host.values())) if share else 1.0
        within = ratio.low is not None and ratio.low <= most
        paced = ratio.value <= pace.get(g.case_id, 1.0) ** ALIKE
        return within or paced or g.case_id in alike

    shown = [g for g in moved if not by_host(g)]
    slower = [g for g in shown if g.change is Change.SLOWER]
    failed = _failed(before, now, both, name)
    bullets, low = [], ""
    if host:
        whose = "host-bound steps" if any(g.case_id not in pace for g in both) else "steps"
        times = listed([f"{units.factor(ratio)} ({p})" for p, ratio in host.items()])
        low = f"slow host: {whose} on average {times} those of {day_of(before)}"
        kept = "losses, counters and memory are not affected"
        bullets.append(f"**{low[0].upper()}{low[1:]}**; {kept}.")
    bullets += [f"**Failed now**: {listed(failed, MOST)}."] if failed else []
    bullets.append(_counted(both, slower, len(moved) - len(shown)))
    regressed = ""
    if worse := [*failed, *(_slowed(g, name[g.case_id], alike) for g in slower)]:
        of = f"{len(worse)}, worst: " if worse[1:] else ""
        regressed = f"**Regressed since {day_of(before)}**: {of}{worse[0]}."
    theirs = [g for g in slower if not (node and g.case_id in alike)]
    return Since(
        head=_head(before, now, found.cases),
        bullets=tuple(bullets),
        regressed=regressed,
        node=low,
        day=day_of(before),
        pace=pace,
        step=_bisection(before, now, theirs, name),
        decided=_table(shown[:MAX_ROWS], name),
    )


def _counted(both: Sequence[GateCase], slower: Sequence[GateCase], excused: int) -> str:
    """How many cases changed, and what is excluded for the others."""
    still = [c for g in both if g.change in (Change.SAME, Change.UNDECIDED) and (c := g.comparison)]
    bounds = [(c.ratio.low, c.ratio.high) for c in still]
    ends = [max(-math.log(low), math.log(high)) for low, high in bounds if low and high]
    whys = [(reason(g).partition(":")[0], g) for g in both if g.change is None]
    lost = (f"{w}, ok before" if g.state is State.FAILED and g.baseline_s else w for w, g in whys)
    unknown = Counter(lost).most_common()
    why = "; ".join(f"{text}: {n}" if unknown[1:] else text for text, n in unknown[:MOST])
    near = sum(end < math.log1p(NEAR) for end in ends)
    counts = {
        "slower": len(slower),
        "slower as this host is": excused,
        "faster": sum(g.change is Change.FASTER for g in both),
        f"moved by less than {units.percent(NEAR)}": near,
        f"not known within {units.percent(NEAR)}": len(still) - near,
        f"not compared ({why})": sum(n for _, n in unknown),
    }
    said = [f"{units.plural('case', len(both))} in both runs"]
    said += [f"{count} {what}" for what, count in counts.items() if count]
    return f"{'; '.join(said)}."


def _ratio(g: GateCase) -> float:
    return g.comparison.ratio.value if g.comparison else 1.0


def day_of(run: Run) -> datetime.date:
    """When it began."""
    return datetime.datetime.fromisoformat(run.started_at or run.environment.captured_at).date()


def _head(before: Run, now: Run, cases: Sequence[GateCase]) -> str:
    then, today = (g.commit[:10] if (g := r.environment.git) else "" for r in (before, now))
    code = f"both at commit `{today}`" if then else "commits unknown"
    if then != today:
        code = f"commits {then or 'unknown'} and {today or 'unknown'}"
        if then and today:
            code = f"commits: `git log --oneline {then}..{today}`"
    found = drift.differences(before.environment, now.environment)
    beside = [d for d in found if d.name not in compare.EXPECTED]  # the most suspect first
    node = [f"{d.name} {_short(d.baseline)}, now {_short(d.candidate)}" for d in beside]
    if len(node) > MOST:
        node[MOST:] = [f"{len(node) - MOST} more"]
    shares = (c.facts["card"] for g in cases if (c := g.comparison) and "card" in c.facts)
    apart = next((f"cards: ±{units.percent(share)} by themselves" for share in shares), "days")
    changed = f"The node changed: {'; '.join(node)}" if node else "The node is the same"
    return (
        f"Compared with run `{before.run_id}` of {day_of(before)}, {code}. {changed}. Step times; "
        f"99 % intervals, which include the variation between {apart}."
    )


def _short(values: str) -> str:
    """A value, or each of several: a run on two GPUs has two UUIDs."""
    return listed([clipped(value, 13) for value in values.split(", ")])


def _table(cases: Sequence[GateCase], name: Mapping[str, str]) -> Table:
    rows = []
    for g, c in ((g, g.comparison) for g in cases if g.comparison):
        times = (units.duration(s) if s else NONE for s in (g.baseline_s, g.candidate_s))
        change = units.ratio(c.ratio, "change")
        rows.append((name[g.case_id], *times, change, str(c.change)))
    columns = ("case", ">step time before", ">step time now", ">change [99 %]", "conclusion")
    return Table(columns=columns, rows=tuple(rows))


# --- what is worse -----------------------------------------------------------------------


def _failed(before: Run, now: Run, cases: Sequence[GateCase], name: Mapping[str, str]) -> list[str]:
    """Cases, except peers', that ran before and fail now, unless the suite allows it."""
    theirs = {c.case_id for c in now.suite.cases if c.provider in now.suite.peers}
    allowed = {c.case_id: c.allow for c in now.suite.cases}
    texts = []
    for g in cases:
        ran = all(m.outcome is Outcome.OK for m in before.of(g.case_id))
        if g.state is State.FAILED and g.decision is Decision.NO_GO and g.case_id not in theirs:
            ended = next(m.outcome for m in now.of(g.case_id) if m.outcome is not Outcome.OK)
            if ran and ended not in allowed[g.case_id]:
                texts.append(f"{name[g.case_id]} ({units.outcome_name(ended)}, ok before)")
    return texts


def _slowed(g: GateCase, name: str, alike: Mapping[str, float]) -> str:
    """`paper shape: 2.0x [1.9 … 2.1] slower`, and that it is the host if the kernels are not."""
    assert g.comparison is not None
    why = ""
    if g.case_id in alike:
        why = f", though its kernels still take {units.duration(alike[g.case_id])}: the host"
    return f"{name}: {units.ratio(g.comparison.ratio, 'times')} slower{why}"


def _kernels(summaries: Sequence[CaseSummary]) -> Mapping[str, float]:
    """Case -> the time of its kernels in a step, if it was profiled."""
    return {s.case.case_id: e.value for s in summaries if (e := s.known("kernel_s"))}


def _bisection(before: Run, now: Run, slower: Sequence[GateCase], name: Mapping[str, str]) -> str:
    """The search for what made the worst case slower."""
    good, bad = (
        g.commit[:10] if (g := r.environment.git) and not g.dirty_sha256 else ""
        for r in (before, now)
    )
    if not (slower and good and bad):
        return ""
    ends = f"--runs {before.run_id} {now.run_id}"  # one commit: something else differs
    if good != bad:
        ends = f"{shlex.quote(now.suite.path)} --good {good} --bad {bad}"
    search = f"harness bisect {ends} --case {shlex.quote(slower[0].case_id)}"
    return f"Find what made {name[slower[0].case_id]} slower: `{search}`"


def _pace(
    before: Study, now: Study, cases: Sequence[GateCase]
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """If every provider is slower alike, in all cases or where the GPU waits for the host: how many
    times as long each takes, and each case that waits, also one that the earlier run lacks."""
    provider = {c.case_id: c.provider for c in now.run.suite.cases}
    both, unknown = before.waiting & now.waiting, now.waiting - {*_kernels(before.summaries)}
    now_waits, every = now.waiting, {*provider}
    for known, ids in ((both, both | unknown), (now_waits, now_waits), (every, every)):
        if moved := _moved_alike([g for g in cases if g.case_id in known], provider):
            least = min(moved.values())
            return moved, {i: moved.get(p, least) for i, p in provider.items() if i in ids}
    return {}, {}


def _moved_alike(cases: Sequence[GateCase], provider: Mapping[str, str]) -> Mapping[str, float]:
    """Provider -> step time now over before, if two or more are slower alike; else empty."""
    logs: dict[str, list[float]] = {}
    for g in cases:
        if g.baseline_s and g.candidate_s:
            log = math.log(g.candidate_s / g.baseline_s)
            logs.setdefault(provider[g.case_id], []).append(log)
    means = [fmean(of) for of in logs.values()]
    if len(means) < 2 or min(means) < math.log(NODE_MOVED) or max(means) > ALIKE * min(means):
        return {}
    return {p: math.exp(mean) for p, mean in zip(logs, means, strict=True)}
