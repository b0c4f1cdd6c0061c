"""What changed since an earlier run of the suite, and which run that is."""

import datetime
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from harness import units
from harness.analysis import roofline, scaling
from harness.analysis import verdict as gate
from harness.analysis.comparison import ALIKE, HOST_MOVED, NodeChange, node_change
from harness.analysis.roofline import Limit
from harness.analysis.summary import summarise
from harness.gate import compare
from harness.gate.records import GateCase, State
from harness.machine import drift
from harness.records import (
    WORST_FIRST,
    CaseSummary,
    Change,
    Decision,
    Environment,
    Estimate,
    Outcome,
    Peaks,
    RuleResult,
    Run,
    Suite,
    Verdict,
)
from harness.report.tables import NONE, Table
from harness.report.text import case_names, listed, outcome_name
from harness.report.verdict_text import limits_text
from harness.store import summaries
from harness.store.reader import RunHeader
from harness.store.summaries import RunFilter

NO_RUN = "none"
"""`harness report --against none`: compare with no run."""
MOST = 3
"""Cases that one sentence names."""
ALIKE_KERNELS = 1.03
"""Kernels that take as long as before differ by less."""
GROUPS = ("Faster", "Regressed", "Passes now", "Still open", "Limits")
WORDS = {
    "same": "less than 5 % slower",
    "not compared": "not compared (too few steady processes, or the case changed)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """The section of a page, and the table of its appendix."""

    head: str
    bullets: tuple[str, ...]
    regressed: str
    """For the first screen: how many, and the worst; empty if nothing did."""
    step: str
    """What finds the cause of the worst slowdown; empty without one, if the node is suspect, or if
    a run measured code that is not that of a commit."""
    details: Table


def earlier(run: Run, say: Callable[[str], None]) -> tuple[RunHeader, ...]:
    """The full runs of the same suite in the same store that started before, oldest first."""
    root, began = Path(run.folder).parent, (run.started_at, run.run_id)
    found = summaries.read(root, say).runs(RunFilter(suite=run.suite.name))
    before = [h for h in found if h.full and (h.started_at, h.run_id) < began]
    return tuple(sorted(before, key=lambda h: (h.started_at, h.run_id)))


def since(before: Run, now: Run, summaries: Sequence[CaseSummary], verdict: Verdict) -> Since:
    """How a run differs from an earlier one, whose cases are judged by the rules of the later.

    Args:
        summaries: Of the later run, as its verdict.
    """
    sides = before, now
    found, then = compare.runs(before, now, across=True), summarise(before)
    suite = replace(now.suite, cases=before.suite.cases)
    was = gate.judge(suite, before.environment, then, scaling.fit(then))
    name = {i: f"`{i}`" if name == i else name for i, name in case_names(now.suite).items()}
    ours = [s for s in summaries if s.case.provider not in now.suite.peers]
    both = [g for g in found.cases if g.state not in (State.NEW, State.MISSING)]
    said: dict[str, list[str]] = {k: [] for k in GROUPS}
    for group, text in (
        *_ended({s.case.case_id: s.outcome for s in then}, ours, name),
        *_rules(was, verdict),
        *_moved(both, name, sides),
        *_limits(before.suite, now.suite),
    ):
        said[group].append(text)
    bullets = [f"**{group}**: {listed(texts, MOST)}." for group, texts in said.items() if texts]
    worse = said["Regressed"]
    of = f"{len(worse)}, worst: " if worse[1:] else ""
    regressed = f"**Regressed since {_day(before)}**: {of}{worse[0]}" if worse else ""
    slower = [g for g in both if g.change is Change.SLOWER]
    step = ""
    if _slow_launches(sides):  # no commit of the code can change that
        slower = [g for g in slower if not _as_before(sides, g.case_id)]
    good, bad = (
        g.commit[:10] if (g := r.environment.git) and not g.dirty_sha256 else "" for r in sides
    )
    if slower and good and bad:
        worst = max(slower, key=lambda g: g.comparison.ratio if g.comparison else 0.0)
        ends = f"--runs {before.run_id} {now.run_id}"  # one commit: something else differs
        if good != bad:
            ends = f"{shlex.quote(now.suite.path)} --good {good} --bad {bad}"
        search = f"harness bisect {ends} --case {shlex.quote(worst.case_id)}"
        step = f"Find what made {name[worst.case_id]} slower: `{search}`"
    old = {s.case.case_id: s for s in then}
    pairs = [(a, b) for b in summaries if (a := old.get(b.case.case_id))]
    by_host = [p for p in pairs if _waits(before, p[0]) and _waits(now, p[1])]
    decided = any(g.change in (Change.SLOWER, Change.FASTER) for g in both)
    peaks = [test.peaks for run in (before, now) if (test := run.self_test)]
    for where, those in (("", pairs), (" where the GPU waits for the host", by_host)):
        change = node_change(before.environment, now.environment, those, peaks)
        # Two cards of a model may differ by more than node_change asks.
        if change and (decided or any(not what.startswith("card ") for what in change.what)):
            moved = (f"{p} {units.change(ratio)}" for p, ratio in change.moved.items())
            alike = f"every provider moved alike{where} ({', '.join(moved)} in step time)"
            bullets.insert(
                0, f"**Suspect the node, not the code**: {'; '.join(change.what)}; {alike}."
            )
            if _of_node(worse, both, those, change):
                regressed += f"; every provider moved alike{where}: suspect the node"
                step = ""
            break
    counts = Counter(str(g.change or "not compared") for g in both)
    words = WORDS | {"undecided": f"not decided{_open(both, name)}"}
    total = ", ".join(f"{n} {words.get(what, what)}" for what, n in counts.most_common())
    new = sum(g.state is State.NEW for g in found.cases)
    total += f"; {units.plural('case', new)} only in this run" if new else ""
    return Since(
        head=_head(before, now, found.cases),
        bullets=(*bullets, f"{units.plural('case', len(both))} in both runs: {total}."),
        regressed=f"{regressed}." if worse else "",
        step=step,
        details=Table(
            columns=("case", ">step before", ">step now", ">change [99 %]", "conclusion"),
            rows=tuple(_row(g, name) for g in both),
        ),
    )


def _of_node(
    worse: Sequence[str],
    both: Sequence[GateCase],
    pairs: Sequence[tuple[CaseSummary, CaseSummary]],
    change: NodeChange,
) -> bool:
    """Whether all that is worse is slower by no more than its provider is on average, or twice."""
    slower = {g.case_id for g in both if g.change is Change.SLOWER}
    within = {
        b.case.case_id
        for a, b in pairs
        if b.case.case_id in slower
        and math.log(b.metrics["step_s"].value / a.metrics["step_s"].value)
        <= ALIKE * math.log(change.moved[b.case.provider])
    }
    return bool(worse) and len(worse) == len(slower) and slower == within


def _waits(run: Run, s: CaseSummary) -> bool:
    """Whether the GPU waits for the host."""
    found = roofline.bottleneck(s, run.of(s.case.case_id), Peaks())
    return found is not None and found.limit in (Limit.HOST, Limit.LAUNCHES)


def _day(run: Run) -> datetime.date:
    return datetime.datetime.fromisoformat(run.started_at).date()


def _head(before: Run, now: Run, cases: Sequence[GateCase]) -> str:
    sides = [f"`{g.commit[:10]}`" if (g := r.environment.git) else "unknown" for r in (before, now)]
    code = f"both at commit {sides[0]}" if sides[0] == sides[1] else f"commit {' to '.join(sides)}"
    node = _node(before.environment, now.environment)
    shares = (c.card for g in cases if (c := g.comparison) and c.card)
    apart = next((f"cards: ±{units.percent(share)} by themselves" for share in shares), "days")
    changed = f"The node changed: {'; '.join(node)}" if node else "The node is the same"
    return (
        f"Compared with run `{before.run_id}` of {_day(before)}, {code}. {changed}. Step times; "
        f"99 % intervals, which include the variation between {apart}."
    )


def _node(before: Environment, now: Environment) -> list[str]:
    """What changed beside the code, the most suspect first."""
    found = [d for d in drift.differences(before, now) if d.name not in compare.EXPECTED]
    said = [_difference(d) for d in found]
    return [*said[:MOST], *([f"{len(said) - MOST} more"] if len(said) > MOST else ())]


def _difference(d: drift.Difference) -> str:
    if d.name == "GPU UUID":
        return f"another card ({d.baseline[:12]}, now {d.candidate[:12]})"
    watts = ".0" if "(W)" in d.name else ""
    return f"{d.name} {d.baseline.removesuffix(watts)}, now {d.candidate.removesuffix(watts)}"


# --- what changed: a group and a sentence ------------------------------------------------


def _moved(
    cases: Sequence[GateCase], name: Mapping[str, str], sides: Sequence[Run]
) -> Iterator[tuple[str, str]]:
    """`2.0x [1.9 … 2.1] faster`, the largest change first."""
    for g in sorted(cases, key=lambda g: -abs(math.log(g.comparison.ratio if g.comparison else 1))):
        c = g.comparison
        if c is None or g.change not in (Change.FASTER, Change.SLOWER):
            continue
        e = Estimate(value=c.ratio, low=c.low, high=c.high, processes=c.pairs, samples=c.pairs)
        group = "Regressed"
        if g.change is Change.FASTER:
            low, high = c.high and 1 / c.high, c.low and 1 / c.low
            group, e = "Faster", replace(e, value=1 / c.ratio, low=low, high=high)
        why = ""
        if g.change is Change.SLOWER and (busy_s := _as_before(sides, g.case_id)):
            kernels = f"though its kernels still take {units.duration(busy_s)}"
            why = f", {kernels}: the host{_slow_launches(sides)}"
        yield group, f"{name[g.case_id]}: {units.times(e)} {g.change}{why}"


def _open(cases: Sequence[GateCase], name: Mapping[str, str]) -> str:
    """` (interval too wide; median -1 %, farthest +17 %: nsa, graph=off)`."""
    open_ = (g for g in cases if g.change is Change.UNDECIDED)
    ratios = {g.case_id: g.comparison.ratio for g in open_ if g.comparison}
    if not ratios:
        return ""
    far = max(ratios, key=lambda case_id: abs(math.log(ratios[case_id])))
    middle = f"median {units.change(median(ratios.values()))}, farthest " if len(ratios) > 1 else ""
    return f" (interval too wide; {middle}{units.change(ratios[far])}: {name[far]})"


def _as_before(sides: Sequence[Run], case_id: str) -> float:
    """How long the GPU works in a step, if that is as long as before; else 0."""
    busy = [_busy_s(run, case_id) for run in sides]
    return busy[-1] if 0 < max(busy) < ALIKE_KERNELS * min(busy) else 0.0


def _slow_launches(sides: Sequence[Run]) -> str:
    """What the self-tests say of the host of the later run, if it launches more slowly."""
    before, now = (t.peaks.launch_s if (t := run.self_test) else None for run in sides)
    if not before or not now or now < HOST_MOVED * before:
        return ""
    return f" ({units.duration(now)} a launch, {units.duration(before)} before)"


def _busy_s(run: Run, case_id: str) -> float:
    """How long the GPU works in a step, median over processes; 0 if it was not profiled."""
    profiles = [m.profile.breakdown for m in run.of(case_id) if m.profile]
    return median([b.device_busy_s for b in profiles if b and b.device_busy_s] or [0.0])


def _row(g: GateCase, name: Mapping[str, str]) -> tuple[str, ...]:
    before, now = (units.duration(s) if s else NONE for s in (g.baseline_s, g.candidate_s))
    ratio = NONE
    if c := g.comparison:
        ratio = units.change(c.ratio, c.low, c.high)
    elif g.baseline_s and g.candidate_s:
        ratio = units.change(g.candidate_s / g.baseline_s)
    return name[g.case_id], before, now, ratio, str(g.change or g.reason)


def _ended(
    before: Mapping[str, Outcome | None],
    summaries: Sequence[CaseSummary],
    name: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """Cases that failed before or fail now, unless the suite allows it."""
    for s in summaries:
        then, now = before.get(s.case.case_id), s.outcome
        if then is None or now is None:
            continue
        failed, fails = (o is not Outcome.OK and o not in s.case.allow for o in (then, now))
        if fails:
            group, was = ("Still open", "") if failed else ("Regressed", f", {then} before")
            yield group, f"{name[s.case.case_id]} ({outcome_name(now)}{was})"
        elif failed:
            yield "Passes now", f"{name[s.case.case_id]} ({outcome_name(then)} before)"


def _rules(was: Verdict, now: Verdict) -> Iterator[tuple[str, str]]:
    """Rules that were or are missed, the worst first. Cases that failed are named themselves."""

    def asked(r: RuleResult) -> bool:
        return r.applies and r.counts and r.rule != gate.EVERY_CASE_RAN

    before = {r.rule: r.decision for r in was.rules if asked(r)}
    for r in sorted(now.rules, key=lambda r: WORST_FIRST.index(r.decision)):
        then, met = before.get(r.rule), r.decision is Decision.GO
        if then is None or not asked(r) or (met and then is Decision.GO):
            continue
        group = "Passes now" if met else "Regressed" if then is Decision.GO else "Still open"
        said = "as before" if then is r.decision else f"{then} before"
        yield group, f"“{r.rule}” is {r.decision} ({said})"


def _limits(before: Suite, now: Suite) -> Iterator[tuple[str, str]]:
    """Rules of the same name whose limit changed."""
    stated = {r.name: limits_text(r) for r in before.rules}
    for rule in now.rules:
        old, new = stated.get(rule.name), limits_text(rule)
        if old not in (None, new):
            yield "Limits", f"the limit of “{rule.name}” was {old}, is {new}"
