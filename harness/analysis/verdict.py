"""The verdict of a run: its suite's rules, applied to its numbers. An unknown is never a pass.

A case decides a rule if all that its value can be is on one side of the thresholds, see
statistics.settle. A case that did not run, has one process or lacks the metric leaves the rule
INCONCLUSIVE. Two things are NO-GO without statistics: code that is wrong or out of memory, and a
timeout whose bound is too slow.

A ratio rule judges pairs in the same way. A partner without a value is what the rule says of it.

A suite without rules asks for no speed: a case that was slow or busy until its time limit is then
measured too, if another one ended in time.

Cases that a stopped run has left are not asked, as if a filter had left them out; but a rule that
has some of its cases is INCONCLUSIVE by the others.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from harness.analysis.expectation import assessed, timeout_bound
from harness.analysis.scaling import FLAT, ScalingFit, fit
from harness.analysis.statistics import settle, span, times_better, times_beyond
from harness.analysis.summary import summarise
from harness.records import (
    FAILURES,
    METRICS,
    WORST_FIRST,
    Case,
    CaseSummary,
    Decision,
    Environment,
    Estimate,
    Fact,
    Finding,
    Outcome,
    Rule,
    RuleResult,
    Run,
    Suite,
    Verdict,
    Weight,
    gpu_matches,
)

EVERY_CASE_RAN = "every case ran"
"""The rule that applies to every suite."""

WHAT_RAN = "required kernels and operators ran"
"""The rule that applies if the suite requires or forbids kernels or operators that can be seen."""

KERNELS_THAT_RAN = "required kernels ran"
"""The same for kernels without a GPU: listed, but not applied."""

EXPECTED = "expectations are met"
"""The rule that applies if an expectation counts in the verdict."""

LOOSE = (Fact.OPEN, Fact.TOO_FEW_PROCESSES)
"""Facts that more processes of the case may change."""

_ORDERS = {"all": WORST_FIRST, "any": WORST_FIRST[::-1]}


def judge(
    suite: Suite,
    environment: Environment,
    summaries: Sequence[CaseSummary],
    fits: Sequence[ScalingFit],
) -> Verdict:
    """Judge a run by its suite's rules and by the built-in rules.

    The worst rule that applies, counts and asks for a part that decides is the verdict, in the
    order NO-GO, INCONCLUSIVE, CONDITIONAL, GO. If all stated rules are for other GPUs, or the
    question is about another GPU, the verdict is INCONCLUSIVE or NO-GO.
    """
    stated = [_judge_rule(rule, environment, summaries, fits) for rule in suite.rules]
    by_id = {s.case.case_id: s for s in summaries}
    stopped = {s.case.case_id for s in summaries if s.stop}
    asked = [case for case in suite.cases if case.case_id not in stopped]
    about = [ran(case, by_id.get(case.case_id), suite.peers) for case in asked]
    if not suite.rules:
        about = _slow_or_busy(about, by_id)
    every_case_ran = _built_in(EVERY_CASE_RAN, about, passed=Fact.RAN)
    if every_case_ran.slow:
        first = _fastest([s for s in summaries if s.outcome is Outcome.OK])
        findings = (*first, *every_case_ran.findings)
        every_case_ran = replace(every_case_ran, findings=findings)
    there = [s for s in summaries if not s.stop]
    expected = _expected(suite, there, environment)
    found = (every_case_ran, *_attested(summaries), *expected, *stated)
    parts = ("", *suite.deciding)
    results = tuple(replace(r, beside=parts[1:] != () and r.asks not in parts) for r in found)
    worst = min((r for r in results if r.decides), key=lambda r: WORST_FIRST.index(r.decision))
    elsewhere = suite.decides_for and not gpu_matches(suite.decides_for, environment.device_name)
    unasked = stated and not any(r.applies and not r.beside for r in results if r.stated)
    unknown = (elsewhere or unasked) and worst.decision is not Decision.NO_GO
    whole = len(suite.cases) + suite.left_out
    return Verdict(
        decision=Decision.INCONCLUSIVE if unknown else worst.decision,
        rule=None if unasked and unknown else worst,
        rules=results,
        device=environment.device_name,
        not_measured=suite.decides_for if elsewhere else "",
        here=worst.decision if elsewhere else None,
        partial=f"{len(asked)} of {whole} cases" if len(asked) < whole else "",
    )


def of_run(run: Run) -> tuple[Sequence[CaseSummary], Verdict]:
    """The summaries of a run, and its verdict by them."""
    cases = summarise(run)
    return cases, judge(run.suite, run.environment, cases, fit(cases))


# --- built-in rules ----------------------------------------------------------------------


def ran(case: Case, summary: CaseSummary | None, peers: Sequence[str] = ()) -> Finding:
    """Whether a case ended ok in all processes, or in a way that the suite allows.

    Args:
        peers: Providers that may fail: that leaves a gap, and says nothing about the subject.
    """
    if summary is None or summary.outcome is None:
        return _of(case, Decision.INCONCLUSIVE, Fact.NOT_RUN)
    outcome = summary.outcome
    if outcome is Outcome.OK:
        step = summary.known("step_s")
        count = step.processes if step else 0
        if (asked := case.settings.processes) > count:
            fact = Fact.TOO_FEW_PROCESSES
            return _of(case, Decision.INCONCLUSIVE, fact, count=count, asked=asked)
        if summary.differing and summary.case.nondeterministic == "":
            fact, others = Fact.NOT_DETERMINISTIC, len(summary.differing)
            return _of(case, Decision.INCONCLUSIVE, fact, count=others, asked=count)
        return _of(case, Decision.GO, Fact.RAN)
    if outcome in summary.case.allow:
        why = summary.case.allow[outcome]
        return _of(case, Decision.GO, Fact.ALLOWED, outcome=outcome, detail=why)
    if case.provider in peers:
        return _ended(summary, Decision.GO)
    return _ended(summary, Decision.NO_GO if outcome in FAILURES else Decision.INCONCLUSIVE)


def _slow_or_busy(about: Sequence[Finding], summaries: Mapping[str, CaseSummary]) -> list[Finding]:
    """The findings where no rule asks for a speed: that a case is slow is then an answer, if
    another one ended in time."""
    if not any(f.fact is Fact.RAN for f in about):
        return [*about]
    bounds = {i: s.lower_bound_s for i, s in summaries.items() if s.working}
    return [
        replace(f, decision=Decision.GO, fact=Fact.SLOW, bound=bounds[f.subject])
        if f.fact is Fact.ENDED and f.subject in bounds
        else f
        for f in about
    ]


def _fastest(ended: Sequence[CaseSummary]) -> Iterator[Finding]:
    """The fastest case, with those that are not told apart from it; none if their steps are not
    the same work."""
    counted = all("tokens_per_s" in (s.metrics.keys() | s.apart.keys()) for s in ended)
    metric = "tokens_per_s" if counted else "step_s"
    speeds = {s.case.case_id: s.metrics[metric] for s in ended if metric in s.metrics}
    if not speeds or (metric == "step_s" and len({s.case.workload for s in ended}) > 1):
        return
    higher = METRICS[metric].higher_is_better
    best = (max if higher else min)(speeds, key=lambda i: speeds[i].value)
    near = {i: times_better(speeds[best], e, higher_is_better=higher) for i, e in speeds.items()}
    alike = [i for i, ratio in near.items() if i != best and (ratio.low or 0.0) <= 1]
    yield Finding(
        decision=Decision.GO,
        fact=Fact.FASTEST,
        subject=best,
        cases=(best, *alike),
        metric=metric,
        estimate=speeds[best],
    )


def attested(summary: CaseSummary) -> Finding | None:
    """Whether a case is known to have run what the suite requires; None if it requires nothing that
    can be seen here."""
    if summary.attested is None:
        return None
    if summary.attested:
        return _of(summary.case, Decision.GO, Fact.ATTESTED)
    why = summary.unattested
    return _of(summary.case, Decision.INCONCLUSIVE, Fact.NOT_ATTESTED, detail=why)


def _of(case: Case, decision: Decision, fact: Fact, **known: Any) -> Finding:
    ids = (case.case_id,)
    return Finding(decision=decision, fact=fact, subject=case.case_id, cases=ids, **known)


def _attested(summaries: Sequence[CaseSummary]) -> Iterator[RuleResult]:
    """Whether every case that ran is known to have run what the suite requires. A violation is the
    outcome path_mismatch, which the rule "every case ran" judges. Kernels need a GPU to be seen.
    """
    about = [found for s in summaries if (found := attested(s))]
    if about:
        yield _built_in(WHAT_RAN, about, passed=Fact.ATTESTED)
    if invisible := tuple(s.case.case_id for s in summaries if s.kernels_invisible):
        yield _not_applied(KERNELS_THAT_RAN, Fact.KERNELS_INVISIBLE, cases=invisible)


def _expected(
    suite: Suite, summaries: Sequence[CaseSummary], environment: Environment
) -> Iterator[RuleResult]:
    """Whether the expectations that count are met, for each part of the question that they ask.
    Those for other GPUs are not asked."""
    parts: dict[str, list[Finding]] = {}
    for e, found in assessed(suite, summaries):
        if found and e.counts is not Weight.NOTE:
            asked = parts.setdefault(e.asks, [])
            if gpu_matches(e.gpu, environment.device_name):
                asked += [_counted(e.counts, f) for f in found]
    for part, asked in parts.items():
        elsewhere = _not_applied(EXPECTED, Fact.OTHER_DEVICE, detail=environment.device_name)
        yield replace(_built_in(EXPECTED, asked) if asked else elsewhere, asks=part)


def _counted(counts: Weight, finding: Finding) -> Finding:
    """The finding, at worst CONDITIONAL if it counts as a condition."""
    if counts is not Weight.CONDITION or finding.decision is Decision.GO:
        return finding
    return replace(finding, decision=Decision.CONDITIONAL)


def _built_in(name: str, findings: Sequence[Finding], *, passed: Fact | None = None) -> RuleResult:
    decision, decisive = _settle(findings, WORST_FIRST)
    kept = tuple(f for f in decisive if f.fact is not passed)
    return RuleResult(rule=name, decision=decision, findings=kept, judged=len(findings))


def _not_applied(name: str, fact: Fact, *, stated: Rule | None = None, **known: Any) -> RuleResult:
    finding = Finding(decision=Decision.INCONCLUSIVE, fact=fact, **known)
    return RuleResult(
        rule=name,
        stated=stated,
        decision=Decision.INCONCLUSIVE,
        findings=(finding,),
        judged=1,
        applies=False,
        asks=stated.asks if stated else "",
    )


# --- a stated rule -----------------------------------------------------------------------


def _judge_rule(
    rule: Rule,
    environment: Environment,
    summaries: Sequence[CaseSummary],
    fits: Sequence[ScalingFit],
) -> RuleResult:
    if not gpu_matches(rule.gpu, environment.device_name):
        device = environment.device_name
        return _not_applied(rule.name, Fact.OTHER_DEVICE, stated=rule, detail=device)
    matched = [s for s in summaries if rule.match.accepts(s.case)]
    if rule.against is not None:
        findings = _pairs(rule, summaries)
    elif rule.metric == "scaling_exponent":
        findings = _exponents(rule, matched, fits)
    else:
        findings = [judge_case(rule, s) for s in matched if s.outcome not in s.case.allow]
    there = [s.case for s in summaries if not s.stop]
    if (rule.asked or len(there) < len(summaries)) and not rule.needs(there):
        why = next((s.detail for s in summaries if s.stop), "")
        return _not_applied(rule.name, Fact.LEFT_OUT, stated=rule, asked=rule.asked, detail=why)
    decision, decisive = _settle(
        [_counted(rule.counts, f) for f in findings], _ORDERS[rule.quantifier]
    )
    perhaps = [f for f in findings if f.decision is Decision.INCONCLUSIVE and f.may_be_go]
    fair = rule.quantifier == "any" and decision is Decision.CONDITIONAL
    return RuleResult(
        rule=rule.name,
        stated=rule,
        decision=decision,
        findings=tuple(decisive),
        perhaps=tuple(perhaps) if fair else (),
        judged=len(findings),
        matched=len(matched),
        counts=rule.counts is not Weight.NOTE,
        asks=rule.asks,
    )


def _pairs(rule: Rule, summaries: Sequence[CaseSummary]) -> list[Finding]:
    """One finding per pair, unless the suite allows our outcome or only notes that a partner has no
    value."""
    by_id = {s.case.case_id: s for s in summaries}
    pairs = [(by_id[a.case_id], by_id[b.case_id]) for a, b in rule.pairs(s.case for s in summaries)]
    found = [_pair(rule, a, b) for a, b in pairs if a.outcome not in a.case.allow]
    silent = rule.missing is Weight.NOTE
    return [f for f in found if not (silent and f.fact is Fact.NO_PARTNER)]


def _pair(rule: Rule, ours: CaseSummary, theirs: CaseSummary) -> Finding:
    """Whether one case is as many times better than its partner as the rule asks."""
    partner, name = theirs.case.case_id, rule.metric
    if bounded := _pair_by_bound(rule, ours, theirs):
        return bounded
    if ours.outcome is not Outcome.OK:
        return replace(_no_value(ours), partner=partner)
    a, b = ours.known(name), theirs.known(name) if theirs.outcome is Outcome.OK else None
    found = replace(_of(ours.case, Decision.INCONCLUSIVE, Fact.NO_METRIC), metric=name)
    if a is None or a.value <= 0:
        return found
    if b is None or b.value <= 0:
        found = replace(found, fact=Fact.NO_PARTNER, partner=partner, outcome=theirs.outcome)
        return _counted(rule.missing, replace(found, detail=theirs.detail))
    ratio = times_better(a, b, higher_is_better=rule.quantity.higher_is_better)
    return _decide(rule, replace(found, partner=partner), ratio)


def _pair_by_bound(rule: Rule, ours: CaseSummary, theirs: CaseSummary) -> Finding | None:
    """What a pair shows of which one side timed out; None if that decides nothing."""
    name, higher = rule.metric, rule.quantity.higher_is_better
    for timed, late in ((ours, theirs), (theirs, ours)):
        estimate, bound = timed.metrics.get(name), timeout_bound(late, name)
        if timed.outcome is not Outcome.OK or estimate is None or not bound:
            continue
        least = times_beyond(estimate, bound, higher_is_better=higher)
        go, abort = rule.go, rule.no_go
        if timed is ours and least >= max(go, abort):
            decision, fact = Decision.GO, Fact.AT_LEAST
        elif timed is theirs and least > 0 and 1 / least < abort:
            decision, fact, least = Decision.NO_GO, Fact.AT_MOST, 1 / least
        else:
            continue
        found = _of(ours.case, decision, fact, bound=least, metric=name)
        found = replace(found, partner=theirs.case.case_id)
        if estimate.processes < 2:
            return replace(found, decision=Decision.INCONCLUSIVE, likely=decision)
        return found
    return None


def _exponents(
    rule: Rule, matched: Sequence[CaseSummary], fits: Sequence[ScalingFit]
) -> list[Finding]:
    """One finding per fit whose cases the rule matches, and one per other matched case."""
    left = {s.case.case_id: s for s in matched}
    ours = [f for f in fits if f.axis == rule.axis and all(p.case_id in left for p in f.points)]
    for point in (p for f in ours for p in f.points):
        left.pop(point.case_id, None)
    return [
        *(_exponent(rule, f) for f in ours),
        *(
            _of(s.case, Decision.INCONCLUSIVE, Fact.NO_GROUP, detail=rule.axis)
            for s in left.values()
            if s.outcome not in s.case.allow
        ),
    ]


def _exponent(rule: Rule, fit: ScalingFit) -> Finding:
    found = Finding(
        decision=Decision.INCONCLUSIVE,
        fact=Fact.NO_FIT,
        subject=fit.group,
        cases=tuple(p.case_id for p in fit.points),
        metric=rule.metric,
        estimate=fit.exponent,
        detail=fit.reason,
    )
    if rule.over == "last_octave" or fit.steepens:
        begin, end = fit.last_ends
        octave = f"over {rule.axis} {begin:g}–{end:g}"
        if fit.last is None:
            return replace(found, estimate=None, detail=f"no time {octave}")
        found = replace(found, estimate=fit.last, detail=octave)
    elif fit.exponent is None:
        clear = fit.slope and _decide(rule, replace(found, detail=""), fit.slope)
        return clear if clear and clear.fact is Fact.DECIDED else found
    else:
        flat = abs(fit.exponent.value) < FLAT
        found = replace(found, detail=f"(hardly depends on {rule.axis})" if flat else "")
    assert found.estimate is not None
    return _decide(rule, found, found.estimate)


def judge_case(rule: Rule, summary: CaseSummary) -> Finding:
    """What one case says about a rule for one of its metrics."""
    case, name = summary.case, rule.metric
    if summary.outcome is None:
        return _of(case, Decision.INCONCLUSIVE, Fact.NOT_RUN, detail=summary.detail)
    if summary.outcome is Outcome.OK:
        found = _of(case, Decision.INCONCLUSIVE, Fact.NO_METRIC, metric=name)
        estimate = summary.known(name)
        return found if estimate is None else _decide(rule, found, estimate)
    # A timeout can show that a rule is broken, but not that it is met.
    bound, higher = timeout_bound(summary, name), rule.quantity.higher_is_better
    if bound is not None and (bound < rule.no_go if higher else bound > rule.no_go):
        fact = Fact.AT_MOST if higher else Fact.AT_LEAST
        return _of(case, Decision.NO_GO, fact, metric=name, bound=bound)
    return _no_value(summary)


def _no_value(summary: CaseSummary) -> Finding:
    """Wrong code, and code that is out of memory, breaks a rule without statistics."""
    broken = summary.outcome in FAILURES or summary.outcome is Outcome.OUT_OF_MEMORY
    return _ended(summary, Decision.NO_GO if broken else Decision.INCONCLUSIVE)


def _decide(rule: Rule, found: Finding, estimate: Estimate) -> Finding:
    """The finding with what an estimate says of the rule."""
    linear = rule.against is None and (rule.quantity.signed or rule.metric == "scaling_exponent")
    side, sure = settle(estimate, partial(_side, rule), linear=linear)
    found = replace(found, estimate=estimate)
    if side is not None and sure:
        return replace(found, fact=Fact.DECIDED, decision=side)
    low, high = span(estimate, linear=linear) or (-math.inf, math.inf)
    may_be_go = high >= rule.go if rule.higher_is_better else low <= rule.go
    return replace(found, fact=Fact.OPEN, likely=side, may_be_go=may_be_go)


def _side(rule: Rule, low: float, high: float) -> Decision | None:
    """The decision if everything from `low` to `high` is on one side of the thresholds."""
    go, abort = rule.go, rule.no_go
    if not rule.higher_is_better:
        low, high, go, abort = -high, -low, -go, -abort
    if high < abort:
        return Decision.NO_GO
    if low >= max(go, abort):
        return Decision.GO
    if low >= abort and high < go:
        return Decision.CONDITIONAL
    return None


# --- many findings, one decision ---------------------------------------------------------


def _settle(
    findings: Sequence[Finding], order: Sequence[Decision]
) -> tuple[Decision, list[Finding]]:
    """The first decision in this order that a finding has, with all findings that have it;
    INCONCLUSIVE without findings."""
    for decision in order:
        if decisive := [f for f in findings if f.decision is decision]:
            return decision, decisive
    return Decision.INCONCLUSIVE, []


def _ended(summary: CaseSummary, decision: Decision) -> Finding:
    known = {"outcome": summary.outcome, "detail": summary.detail}
    return _of(summary.case, decision, Fact.ENDED, **known)
