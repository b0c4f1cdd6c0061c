"""What changed since an earlier run of the suite, and which run that is."""

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import units
from harness.analysis import scaling
from harness.analysis import verdict as gate
from harness.analysis.summary import summarise
from harness.gate import baselines, compare
from harness.gate.records import GateCase, State
from harness.machine import drift
from harness.records import (
    CaseSummary,
    Change,
    Comparison,
    Decision,
    Environment,
    Estimate,
    Outcome,
    RuleResult,
    Run,
    Suite,
    Verdict,
)
from harness.report.answer import names
from harness.report.tables import NONE, Table
from harness.report.text import listed, outcome_name, plural
from harness.report.verdict_text import limits_text
from harness.store import index
from harness.store.index import Index, RunFilter
from harness.store.reader import RunHeader

MOST = 3
"""Cases that one sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """The section of a page, and the table of its appendix."""

    head: str
    bullets: tuple[str, ...]
    details: Table


def earlier(run: Run, say: Callable[[str], None]) -> tuple[RunHeader, ...]:
    """The full runs of the same suite in the same store that started before, oldest first."""

    def question(known: Index) -> tuple[RunHeader, ...]:
        found = known.runs(RunFilter(suite=run.suite.name))
        began = run.started_at, run.run_id
        before = [h for h in found if h.full and (h.started_at, h.run_id) < began]
        return tuple(sorted(before, key=lambda h: (h.started_at, h.run_id)))

    return index.ask(Path(run.folder).parent, question, say)


def since(before: Run, now: Run, summaries: Sequence[CaseSummary], verdict: Verdict) -> Since:
    """How a run differs from an earlier one.

    Args:
        summaries: Of the later run, as its verdict.
    """
    found = compare.runs(before, now, across=True, calibrations=None)
    earlier_ones = summarise(before)
    ended = {s.case.case_id: s.outcome for s in earlier_ones}
    name = _names(now.suite)
    by = {c: [g for g in found.cases if _decided(g) is c] for c in Change}
    fixed, broken, open_ = _endings(ended, summaries, name)
    was = _judged(replace(before, suite=_with_rules_of(now.suite, before.suite)), earlier_ones)
    rules = {k: list(v) for k, v in _rules(was, verdict).items()}
    groups = {
        "Improved": [_moved(g, name) for g in _largest(by[Change.FASTER])],
        "Regressed": [
            *broken,
            *rules["worse"],
            *(_moved(g, name) for g in _largest(by[Change.SLOWER])),
        ],
        "Fixed": [*fixed, *rules["fixed"]],
        "Open": [*open_, *rules["open"]],
        "Limits": [*_limits(before.suite, now.suite)],
    }
    bullets = [f"**{k}**: {listed(v, MOST)}." for k, v in groups.items() if v]
    return Since(
        head=_head(before, now),
        bullets=(*bullets, _rest(found.cases, by)),
        details=_table(found.cases, name),
    )


def _head(before: Run, now: Run) -> str:
    day = datetime.datetime.fromisoformat(before.started_at).date()
    sides = [f"`{g.commit[:10]}`" if (g := r.environment.git) else "unknown" for r in (before, now)]
    code = f"both at commit {sides[0]}" if sides[0] == sides[1] else f"commit {' to '.join(sides)}"
    node = _node(before.environment, now.environment)
    changed = f"The node changed: {'; '.join(node)}" if node else "The node is the same"
    return (
        f"Compared with run `{before.run_id}` of {day}, {code}. {changed}. Step times; 99 % "
        "intervals, which include the variation between days."
    )


def _node(before: Environment, now: Environment) -> list[str]:
    """What changed beside the code, the most suspect first."""
    found = [d for d in drift.differences(before, now) if d.name not in baselines.EXPECTED]
    said = [_difference(d) for d in found]
    return [*said[:MOST], *([f"{len(said) - MOST} more"] if len(said) > MOST else ())]


def _difference(d: drift.Difference) -> str:
    if d.name == "GPU UUID":
        return f"another card ({d.baseline[:12]}, now {d.candidate[:12]})"
    if d.name == "power limit (W)":
        return f"power limit {float(d.baseline):g} W, now {float(d.candidate):g} W"
    return f"{d.name} {d.baseline}, now {d.candidate}"


# --- cases -------------------------------------------------------------------------------


def _names(suite: Suite) -> Mapping[str, str]:
    return {i: f"`{i}`" if name == i else name for i, name in names(suite).items()}


def _decided(case: GateCase) -> Change | None:
    return case.change if case.state is State.COMPARED else None


def _largest(cases: Sequence[GateCase]) -> list[GateCase]:
    return sorted(cases, key=lambda g: -abs(math.log(g.comparison.ratio)) if g.comparison else 0.0)


def _moved(case: GateCase, name: Mapping[str, str]) -> str:
    assert case.comparison is not None
    return f"{name[case.case_id]} {_ratio(case.comparison)}"


def _ratio(c: Comparison) -> str:
    """`1.12x [1.05 … 1.20] faster`."""
    value, low, high, word = c.ratio, c.low, c.high, "slower"
    if value < 1:
        value, word = 1 / value, "faster"
        low, high = (None if end is None else 1 / end for end in (c.high, c.low))
    e = Estimate(value=value, low=low, high=high, processes=c.pairs, samples=c.pairs)
    return f"{units.times(e)} {word}"


def _endings(
    ended: Mapping[str, Outcome | None],
    summaries: Sequence[CaseSummary],
    name: Mapping[str, str],
) -> tuple[list[str], list[str], list[str]]:
    """Cases that failed before and not now, that fail now and not before, and that still fail."""
    fixed: list[str] = []
    broken: list[str] = []
    still: list[str] = []
    for s in summaries:
        case_id, then, now = s.case.case_id, ended.get(s.case.case_id), s.outcome
        if then is None or now is None:
            continue
        failed, failing = (o is not Outcome.OK and o not in s.case.allow for o in (then, now))
        if failed and not failing:
            fixed.append(f"{name[case_id]} ({outcome_name(then)} before)")
        elif failing:
            (broken if then is Outcome.OK else still).append(
                f"{name[case_id]} ({outcome_name(now)})"
            )
    return fixed, broken, still


def _rest(cases: Sequence[GateCase], by: Mapping[Change, Sequence[GateCase]]) -> str:
    """How many cases are the same, undecided, or not compared."""
    both = [g for g in cases if g.state not in (State.NEW, State.MISSING)]
    compared = sum(map(len, by.values()))
    counts = {
        "moved": len(by[Change.FASTER]) + len(by[Change.SLOWER]),
        "the same within 5 %": len(by[Change.SAME]),
        "not decided": len(by[Change.UNDECIDED]),
        "not compared (too few steady processes, or the case changed)": len(both) - compared,
        "new": sum(g.state is State.NEW for g in cases),
    }
    said = [f"{n} {what}" for what, n in counts.items() if n]
    return f"{plural('case', len(both))} in both runs: {', '.join(said)}."


def _table(cases: Sequence[GateCase], name: Mapping[str, str]) -> Table:
    rows = []
    for g in cases:
        if g.state in (State.NEW, State.MISSING):
            continue
        before, now = (units.duration(s) if s else NONE for s in (g.baseline_s, g.candidate_s))
        ratio = NONE
        if g.baseline_s and g.candidate_s:
            ratio = units.change(g.candidate_s / g.baseline_s)
        if g.comparison:
            ratio = units.change(g.comparison.ratio, g.comparison.low, g.comparison.high)
        why = str(g.change) if _decided(g) else g.reason
        rows.append((name[g.case_id], before, now, ratio, why))
    columns = ("case", ">step before", ">step now", ">change [99 %]", "conclusion")
    return Table(columns=columns, rows=tuple(rows))


# --- rules -------------------------------------------------------------------------------


def _with_rules_of(judging: Suite, measured: Suite) -> Suite:
    """The cases of one suite, to be judged by another."""
    return replace(judging, cases=measured.cases, left_out=measured.left_out)


def _judged(run: Run, summaries: Sequence[CaseSummary]) -> Verdict:
    return gate.judge(run.suite, run.environment, summaries, scaling.fit(summaries))


def _rules(was: Verdict, now: Verdict) -> Mapping[str, Iterator[str]]:
    """Rules of today that were missed and are met, the reverse, and that are still missed."""
    before = {r.rule: r for r in was.rules if _asked(r)}
    pairs = [(before[r.rule], r) for r in now.rules if _asked(r) and r.rule in before]
    met = Decision.GO
    return {
        "fixed": (_both(a, b) for a, b in pairs if a.decision is not met and b.decision is met),
        "worse": (_both(a, b) for a, b in pairs if a.decision is met and b.decision is not met),
        "open": (_both(a, b) for a, b in pairs if met not in (a.decision, b.decision)),
    }


def _asked(result: RuleResult) -> bool:
    """Whether a rule decides something that the list of cases does not show."""
    return result.applies and result.counts and result.rule != gate.EVERY_CASE_RAN


def _both(before: RuleResult, now: RuleResult) -> str:
    then = "as before" if before.decision is now.decision else f"{before.decision} before"
    return f"“{now.rule}” is {now.decision} ({then})"


def _limits(before: Suite, now: Suite) -> Iterator[str]:
    """Rules of the same name whose limit changed."""
    stated = {r.name: r for r in before.rules}
    for rule in now.rules:
        if (old := stated.get(rule.name)) and limits_text(old) != limits_text(rule):
            yield f"the limit of “{rule.name}” was {limits_text(old)}, is {limits_text(rule)}"
