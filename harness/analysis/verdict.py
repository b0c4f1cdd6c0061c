"""The verdict of a run: its suite's rules, applied to its numbers. An unknown is never a pass.

A case decides a rule if all that its value can be is on one side of the thresholds, see
statistics.settle. A case that did not run, has one process or lacks the metric leaves the rule
INCONCLUSIVE. Two things are NO-GO without statistics: code that is wrong or out of memory, and a
timeout whose bound is too slow.

Cases that a stopped run has left are not asked, as if a filter had left them out; but a rule that
has some of its cases is INCONCLUSIVE by the others.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from harness.analysis.bounds import by_kernels, timeout_bound
from harness.analysis.scaling import FLAT, ScalingFit
from harness.analysis.statistics import near, settle, span, times_better, times_beyond
from harness.records import (
    FAILURES,
    METRICS,
    Case,
    CaseSummary,
    Decision,
    Environment,
    Fact,
    Finding,
    Interval,
    Outcome,
    Rule,
    RuleResult,
    Suite,
    Verdict,
    Weight,
    gpu_matches,
    range_of,
    worst,
)

EVERY_CASE_RAN = "every case ran"
WHAT_RAN = "required kernels and operators ran"
KERNELS_THAT_RAN = "required kernels ran"
EXPECTED = "expectations are met"
"""The built-in rules. The second one applies if the suite requires or forbids kernels or operators
that can be seen; the third, for kernels without a GPU, is listed but not applied; the last applies
if an expectation counts in the verdict."""

LOOSE = (Fact.OPEN, Fact.TOO_FEW_PROCESSES)
"""Facts that more processes of the case may change."""


def judge(
    suite: Suite,
    environment: Environment,
    summaries: Sequence[CaseSummary],
    fits: Sequence[ScalingFit],
) -> Verdict:
    """Judge a run by its suite's rules and by the built-in rules.

    The worst rule that applies, counts and asks for a part that decides is the verdict. If all
    stated rules are for other GPUs, or the question is about another GPU, the verdict is
    INCONCLUSIVE or NO-GO.
    """
    device, by_id = environment.device_name, {s.case.case_id: s for s in summaries}
    stated = [_judge_rule(rule, device, summaries, fits) for rule in suite.rules]
    stopped = {s.case.case_id for s in summaries if s.stop}
    asked = [case for case in suite.cases if case.case_id not in stopped]
    late_counts = not suite.rules and any(s.outcome is Outcome.OK for s in summaries)
    about = [ran(case, by_id.get(case.case_id), suite.peers, late_counts) for case in asked]
    every_case_ran = _settled(EVERY_CASE_RAN, about)
    if every_case_ran.slow:
        fastest = _fastest([s for s in summaries if s.outcome is Outcome.OK])
        every_case_ran = replace(every_case_ran, findings=(*fastest, *every_case_ran.findings))
    expected = _expected(suite, [s for s in summaries if not s.stop], device)
    found = (every_case_ran, *_attested(summaries), *expected, *stated)
    parts = ("", *suite.deciding)
    results = tuple(replace(r, beside=parts[1:] != () and r.asks not in parts) for r in found)
    decisive = worst(r for r in results if r.decides)[0]
    elsewhere = suite.decides_for and not gpu_matches(suite.decides_for, device)
    unasked = stated and not any(r.applies and not r.beside for r in results if r.stated)
    unknown = (elsewhere or unasked) and decisive.decision is not Decision.NO_GO
    whole = len(suite.cases) + suite.left_out
    return Verdict(
        decision=Decision.INCONCLUSIVE if unknown else decisive.decision,
        rule=None if unasked and unknown else decisive,
        rules=results,
        device=device,
        not_measured=suite.decides_for if elsewhere else "",
        here=decisive.decision if elsewhere else None,
        partial=f"{len(asked):,} of {whole:,} cases" if len(asked) < whole else "",
    )


# --- built-in rules ----------------------------------------------------------------------


def ran(
    case: Case, summary: CaseSummary | None, peers: Sequence[str] = (), late_counts: bool = False
) -> Finding:
    """Whether a case ended ok in all processes, or in a way that the suite allows. One of the
    `peers`, providers that may fail, leaves a gap and says nothing about the subject; with
    `late_counts`, that a case was slow or busy until its time limit is an answer too."""
    if summary is None or summary.outcome is None:
        return _of(case, Decision.INCONCLUSIVE, Fact.NOT_RUN)
    outcome = summary.outcome
    if outcome is Outcome.OK:
        step = summary.known("step_s")
        count = step.n if step else 0
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
    if late_counts and summary.working:
        return _of(case, Decision.GO, Fact.SLOW, bound=summary.lower_bound_s)
    if case.provider in peers:
        return _ended(summary, Decision.GO)
    return _ended(summary, Decision.NO_GO if outcome in FAILURES else Decision.INCONCLUSIVE)


def _fastest(ended: Sequence[CaseSummary]) -> Iterator[Finding]:
    """The fastest case, with those that are not told apart from it; none if their steps are not
    the same work."""
    metric = "tokens_per_s" if all(s.known("tokens_per_s") for s in ended) else "step_s"
    timed = [s for s in ended if metric in s.metrics]
    if not timed or (metric == "step_s" and len({s.case.workload for s in ended}) > 1):
        return
    higher = METRICS[metric].higher_is_better
    best = (max if higher else min)(timed, key=lambda s: s.metrics[metric].value)
    top, others = best.metrics[metric], [s for s in timed if s is not best]
    near = [times_better(top, s.metrics[metric], higher_is_better=higher) for s in others]
    alike = [s for s, ratio in zip(others, near, strict=True) if (ratio.low or 0.0) <= 1]
    found = _of(best.case, Decision.GO, Fact.FASTEST, metric=metric, estimate=top)
    yield replace(found, cases=tuple(s.case.case_id for s in (best, *alike)))


def attested(summary: CaseSummary) -> Finding | None:
    """Whether a case is known to have run what the suite requires; None if it requires nothing that
    can be seen here."""
    if summary.attested is None:
        return None
    if summary.attested:
        return _of(summary.case, Decision.GO, Fact.ATTESTED)
    return _of(summary.case, Decision.INCONCLUSIVE, Fact.NOT_ATTESTED, detail=summary.unattested)


def _of(case: Case, decision: Decision, fact: Fact, **known: Any) -> Finding:
    ids = (case.case_id,)
    return Finding(decision=decision, fact=fact, subject=case.case_id, cases=ids, **known)


def _attested(summaries: Sequence[CaseSummary]) -> Iterator[RuleResult]:
    """Whether every case that ran is known to have run what the suite requires. A violation is the
    outcome path_mismatch, which EVERY_CASE_RAN judges. Kernels need a GPU to be seen."""
    about = [found for s in summaries if (found := attested(s))]
    if about:
        yield _settled(WHAT_RAN, about)
    if invisible := tuple(s.case.case_id for s in summaries if s.kernels_invisible):
        yield _not_applied(KERNELS_THAT_RAN, Fact.KERNELS_INVISIBLE, cases=invisible)


def _expected(suite: Suite, summaries: Sequence[CaseSummary], device: str) -> Iterator[RuleResult]:
    """Whether the expectations that count are met, for each part of the question that they ask.
    Those for other GPUs are not asked."""
    parts: dict[str, list[Finding]] = {}
    for e in suite.expectations:
        found = by_case(e, summaries)
        if found and e.counts is not Weight.NOTE:
            asked = parts.setdefault(e.asks, [])
            if gpu_matches(e.gpu, device):
                asked += [_counted(e.counts, f) for f in found]
    for part, asked in parts.items():
        elsewhere = _not_applied(EXPECTED, Fact.OTHER_DEVICE, detail=device)
        yield replace(_settled(EXPECTED, asked) if asked else elsewhere, asks=part)


def _counted(counts: Weight, finding: Finding) -> Finding:
    """The finding, at worst CONDITIONAL if it counts as a condition."""
    if counts is not Weight.CONDITION or finding.decision is Decision.GO:
        return finding
    return replace(finding, decision=Decision.CONDITIONAL)


def _settled(name: str, findings: Sequence[Finding], *, best: bool = False) -> RuleResult:
    """A rule by its worst findings, or its best; INCONCLUSIVE without findings."""
    decisive = worst(findings, best=best)
    decision = decisive[0].decision if decisive else Decision.INCONCLUSIVE
    kept = tuple(f for f in decisive if f.fact not in (Fact.RAN, Fact.ATTESTED))
    return RuleResult(rule=name, decision=decision, findings=kept, judged=len(findings))


def _not_applied(name: str, fact: Fact, *, stated: Rule | None = None, **known: Any) -> RuleResult:
    finding = Finding(decision=Decision.INCONCLUSIVE, fact=fact, **known)
    asks = stated.asks if stated else ""
    return replace(_settled(name, [finding]), stated=stated, applies=False, asks=asks)


# --- a stated rule -----------------------------------------------------------------------


def _judge_rule(
    rule: Rule, device: str, summaries: Sequence[CaseSummary], fits: Sequence[ScalingFit]
) -> RuleResult:
    if not gpu_matches(rule.gpu, device):
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
    best = rule.quantifier == "any"
    settled = _settled(rule.name, [_counted(rule.counts, f) for f in findings], best=best)
    perhaps = [f for f in findings if f.decision is Decision.INCONCLUSIVE and f.may_be_go]
    return replace(
        settled,
        stated=rule,
        perhaps=tuple(perhaps) if best and settled.decision is Decision.CONDITIONAL else (),
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
    """Whether one case is as many times better than its partner as the rule asks. By the kernels,
    if the host sets both speeds, the times leave it open and lie on the same side."""
    partner, name = theirs.case.case_id, rule.metric
    if bounded := _pair_by_bound(rule, ours, theirs):
        return bounded
    if ours.outcome is not Outcome.OK:
        return replace(_no_value(ours), partner=partner)
    a, b = ours.known(name), theirs.known(name) if theirs.outcome is Outcome.OK else None
    found = _of(ours.case, Decision.INCONCLUSIVE, Fact.NO_METRIC, metric=name)
    apart = {"elsewhere": partner} if b and ours.card != theirs.card else {}
    if a is None or a.value <= 0 or apart:
        return replace(found, facts=apart)
    if b is None or b.value <= 0:
        found = replace(found, fact=Fact.NO_PARTNER, partner=partner, outcome=theirs.outcome)
        return _counted(rule.missing, replace(found, detail=theirs.detail, facts=theirs.facts))
    ratio = times_better(a, b, higher_is_better=rule.quantity.higher_is_better)
    kernels = by_kernels(ours, theirs, name)
    answer = work = _decide(rule, replace(found, partner=partner, beside=kernels), ratio)
    if answer.fact is Fact.OPEN and kernels and ours.behind(name) and theirs.behind(name):
        work = _decide(rule, replace(answer, metric="kernel_s", beside=ratio), kernels)
    return work if work.decision is _side(rule, ratio.value, ratio.value) else answer


def _pair_by_bound(rule: Rule, ours: CaseSummary, theirs: CaseSummary) -> Finding | None:
    """What a pair shows of which one side timed out; None if that decides nothing."""
    name, higher = rule.metric, rule.quantity.higher_is_better
    for timed, late in ((ours, theirs), (theirs, ours)):
        estimate, bound = timed.metrics.get(name), timeout_bound(late, name)
        if timed.outcome is not Outcome.OK or estimate is None or not bound:
            continue
        least = times_beyond(estimate, bound, higher_is_better=higher)
        if timed is ours and _side(rule, least, math.inf) is Decision.GO:
            decision, fact = Decision.GO, Fact.AT_LEAST
        elif timed is theirs and least > 0 and _side(rule, 0.0, 1 / least) is Decision.NO_GO:
            decision, fact, least = Decision.NO_GO, Fact.AT_MOST, 1 / least
        else:
            continue
        partner = theirs.case.case_id
        found = _of(ours.case, decision, fact, bound=least, metric=name, partner=partner)
        if estimate.n < 2:
            return replace(found, decision=Decision.INCONCLUSIVE, likely=decision)
        return found
    return None


def _exponents(
    rule: Rule, matched: Sequence[CaseSummary], fits: Sequence[ScalingFit]
) -> list[Finding]:
    """One finding per fit whose cases the rule matches, and one per other matched case."""
    ids = {s.case.case_id for s in matched}
    ours = [f for f in fits if f.axis == rule.axis and all(p.case_id in ids for p in f.points)]
    left = ids - {p.case_id for f in ours for p in f.points}
    others = [s.case for s in matched if s.case.case_id in left and s.outcome not in s.case.allow]
    no_group = (_of(c, Decision.INCONCLUSIVE, Fact.NO_GROUP, detail=rule.axis) for c in others)
    return [*(_exponent(rule, f) for f in ours), *no_group]


def _exponent(rule: Rule, fit: ScalingFit) -> Finding:
    found = Finding(
        decision=Decision.INCONCLUSIVE,
        fact=Fact.NO_FIT,
        subject=fit.group,
        cases=tuple(p.case_id for p in fit.points),
        metric=rule.metric,
        estimate=fit.exponent,
        facts=fit.facts,
    )
    if "gpus" in fit.facts:
        return replace(found, estimate=None)
    steps = fit.last if fit.steepens else fit.exponent or fit.slope
    if fit.kernels and rule.over != "last_octave" and steps and fit.kernels.value > steps.value:
        return _decide(rule, replace(found, facts={"by": "the kernels"}), fit.kernels)
    if rule.over == "last_octave" or fit.steepens:
        begin, end = fit.last_ends
        octave = {"axis": rule.axis, "begin": begin, "end": end}
        if fit.last is None:
            return replace(found, estimate=None, facts=octave)
        return _decide(rule, replace(found, facts=octave), fit.last)
    if fit.exponent is None:
        clear = fit.slope and _decide(rule, replace(found, facts={}), fit.slope)
        return clear if clear and clear.fact is Fact.DECIDED else found
    flat = {"flat": rule.axis} if abs(fit.exponent.value) < FLAT else {}
    return _decide(rule, replace(found, facts=flat), fit.exponent)


def by_case(rule: Rule, summaries: Sequence[CaseSummary]) -> list[Finding]:
    """What each case that a rule matches says about it, also on another GPU."""
    return [judge_case(rule, s) for s in summaries if rule.match.accepts(s.case)]


def judge_case(rule: Rule, summary: CaseSummary) -> Finding:
    """What one case says about a rule for one of its metrics. To an expectation only the value
    matters, as EVERY_CASE_RAN judges how the case ended."""
    case, name = summary.case, rule.metric
    expected: dict[str, Any] = {"low": rule.low, "high": rule.high, "detail": rule.source}
    found = _of(case, Decision.INCONCLUSIVE, Fact.NO_METRIC, metric=name, **expected)
    if summary.outcome is Outcome.OK:
        found, estimate = replace(found, busy=summary.behind(name)), summary.known(name)
        if estimate is None:
            return replace(found, detail="")  # the source of the rule is no reason
        return _decide(rule, found, estimate)
    # A timeout can show that a rule is broken, but not that it is met.
    bound, higher = timeout_bound(summary, name), rule.quantity.higher_is_better
    ends = range_of(None, bound) if higher else range_of(bound, None)
    if bound is not None and _side(rule, *ends) is Decision.NO_GO:
        fact = Fact.AT_MOST if higher else Fact.AT_LEAST
        return _of(case, Decision.NO_GO, fact, metric=name, bound=bound)
    if rule.go is None:
        return replace(found, bound=bound)
    if summary.outcome is None:
        return _of(case, Decision.INCONCLUSIVE, Fact.NOT_RUN, detail=summary.detail)
    return _no_value(summary)


def _no_value(summary: CaseSummary) -> Finding:
    """Wrong code, and code that is out of memory, breaks a rule without statistics."""
    broken = summary.outcome in FAILURES or summary.outcome is Outcome.OUT_OF_MEMORY
    return _ended(summary, Decision.NO_GO if broken else Decision.INCONCLUSIVE)


def _ended(summary: CaseSummary, decision: Decision) -> Finding:
    why: dict[str, Any] = {"detail": summary.detail, "facts": summary.facts}
    return _of(summary.case, decision, Fact.ENDED, outcome=summary.outcome, **why)


def _decide(rule: Rule, found: Finding, estimate: Interval) -> Finding:
    """The finding with what an estimate says of the rule."""
    linear = rule.against is None and (rule.quantity.signed or rule.metric == "scaling_exponent")
    side, sure = settle(estimate, partial(_side, rule), linear=linear)
    found = replace(found, estimate=estimate)
    doubtful = side is Decision.NO_GO and estimate.n > 2 and near(estimate, *rule.bearable)
    if side is not None and sure and not doubtful:
        return replace(found, fact=Fact.DECIDED, decision=side)
    low, high = span(estimate, linear=linear) or (-math.inf, math.inf)
    least, most = rule.limits
    return replace(found, fact=Fact.OPEN, likely=side, may_be_go=high >= least and low <= most)


def _side(rule: Rule, low: float, high: float) -> Decision | None:
    """The decision if everything from `low` to `high` is on one side of the thresholds."""
    least, most = rule.limits
    bottom, top = rule.bearable
    if high < bottom or low > top:
        return Decision.NO_GO
    if least <= low and high <= most:
        return Decision.GO
    if bottom <= low and high <= top and (high < least or low > most):
        return Decision.CONDITIONAL
    return None
