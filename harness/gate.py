"""Rules and numbers in, verdict out. An unknown is never called good.

A rule is decided by a case only when the whole 95 % interval lies on one side of its
thresholds; a case that did not run, has one process or lacks the metric leaves the rule
INCONCLUSIVE. Two things are NO-GO without statistics: code that is wrong or does not fit
in memory, and a timeout whose bound already proves it too slow.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness import units
from harness.analysis.expectation import upper_bound
from harness.analysis.scaling import ScalingFit
from harness.records import (
    FAILURES,
    CaseSummary,
    Decision,
    Environment,
    Estimate,
    Match,
    Outcome,
    Rule,
    RuleResult,
    Suite,
    Verdict,
    gpu_matches,
)

EVERY_CASE_RAN = "every case ran"
"""The rule that every suite has without writing it."""

WHAT_RAN = "what ran is what was asked for"
"""The rule that a suite has where it states kernels or operators that can be seen."""

KERNELS_THAT_RAN = "the kernels are those asked for"
"""The rule that a suite has instead, of its kernels, where there is no GPU: it is not applied."""

WORST_FIRST = (Decision.NO_GO, Decision.INCONCLUSIVE, Decision.CONDITIONAL, Decision.GO)
_ORDERS = {"all": WORST_FIRST, "any": WORST_FIRST[::-1]}


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one case, or one fit over cases, says of one rule."""

    subject: str
    decision: Decision
    reason: str
    cases: tuple[str, ...] = ()
    """Ids of the cases behind it, where the subject is not itself one."""
    may_be_go: bool = True
    """Of what is undecided: whether it may turn out to be GO."""


def judge(
    suite: Suite,
    environment: Environment,
    summaries: Sequence[CaseSummary],
    fits: Sequence[ScalingFit],
) -> Verdict:
    """Judge a run by its suite's rules and by the built-in rule that every case ran.

    The worst applicable rule decides: NO-GO, INCONCLUSIVE, CONDITIONAL, GO. A suite whose
    rules were all stated for other GPUs is INCONCLUSIVE at best; one that states no rule asks
    only whether its cases run.
    """
    stated = [_judge_rule(rule, environment, summaries, fits) for rule in suite.rules]
    results = (
        _every_case_ran(suite, summaries),
        *_attested(summaries),
        *stated,
    )
    applied = [r for r in results if r.applies]
    worst = min(applied, key=lambda r: WORST_FIRST.index(r.decision))
    if stated and not any(r.applies for r in stated) and worst.decision is not Decision.NO_GO:
        return Verdict(
            decision=Decision.INCONCLUSIVE,
            decided_by="no applicable rule",
            reason=f"no rule of the suite was stated for {environment.device_name}",
            rules=results,
        )
    if worst.decision is Decision.GO:
        names = [r.rule for r in applied]
        return Verdict(
            decision=Decision.GO,
            decided_by=names[0] if len(names) == 1 else f"all {len(names)} rules",
            reason=worst.reason if len(names) == 1 else f"all hold: {'; '.join(names)}",
            rules=results,
        )
    return Verdict(
        decision=worst.decision, decided_by=worst.rule, reason=worst.reason, rules=results
    )


def requirement(rule: Rule) -> str:
    """A rule as a sentence: `tokens/s ≥ 500 in every case with gc=off; NO-GO under 100`."""
    metric = rule.quantity
    sign = "≥" if metric.higher_is_better else "≤"
    whose = "every case" if rule.quantifier == "all" else "the best case"
    if chosen := _criteria(rule.match):
        whose += f" with {chosen}"
    along = f" over {rule.axis}" if rule.axis else ""
    text = f"{metric.title}{along} {sign} {units.plain(rule.metric, rule.go)} in {whose}"
    if rule.abort is not None:
        side = "under" if metric.higher_is_better else "over"
        text += f"; NO-GO {side} {units.plain(rule.metric, rule.abort)}"
    return text


def _criteria(match: Match) -> str:
    return " and ".join(
        f"{name}={' or '.join(map(str, values))}" for name, values in match.criteria.items()
    )


# --- every case ran ----------------------------------------------------------------------


def _every_case_ran(suite: Suite, summaries: Sequence[CaseSummary]) -> RuleResult:
    by_id = {s.case.case_id: s for s in summaries}
    findings = [_ran(case.case_id, by_id.get(case.case_id)) for case in suite.cases]
    tolerated = [f for f in findings if f.decision is Decision.GO and f.reason]
    decision, decisive = _settle(findings, WORST_FIRST)
    if decision is Decision.GO:
        ran = f"all {len(findings)} cases ran" if len(findings) > 1 else "the case ran"
        reason = ran
        if tolerated:
            allowed = "; ".join(f"{f.subject}: {f.reason}" for f in tolerated)
            reason = f"{ran} or ended as the suite allows ({allowed})"
    else:
        reason = _share(decisive, findings) + _join(decisive)
    return RuleResult(
        rule=EVERY_CASE_RAN,
        requirement="every case ends ok, or as the suite allows",
        decision=decision,
        reason=reason,
        evidence=_evidence(tolerated if decision is Decision.GO else decisive),
    )


def _ran(case_id: str, summary: CaseSummary | None) -> _Finding:
    if summary is None or summary.outcome is None:
        return _Finding(case_id, Decision.INCONCLUSIVE, "did not run")
    outcome, case = summary.outcome, summary.case
    if outcome is Outcome.OK:
        ran = summary.metrics["step_s"].processes if "step_s" in summary.metrics else 0
        if ran < case.settings.processes:
            missing = f"{ran} of {case.settings.processes} processes ran"
            return _Finding(case_id, Decision.INCONCLUSIVE, missing)
        return _Finding(case_id, Decision.GO, "")
    if outcome in case.allow:
        return _Finding(case_id, Decision.GO, f"{outcome} is allowed: {case.allow[outcome]}")
    decision = Decision.NO_GO if outcome in FAILURES else Decision.INCONCLUSIVE
    return _Finding(case_id, decision, _ended(summary))


def _attested(summaries: Sequence[CaseSummary]) -> Iterator[RuleResult]:
    """Whether every case that ran is known to have run what the suite states; a breach is an
    outcome, which "every case ran" judges.

    Operators are seen everywhere, so that one not attested is unknown, whatever the reason.
    Kernels that there is no GPU to see are not judged.
    """
    about = [s for s in summaries if s.attested is not None]
    invisible = [s for s in summaries if s.kernels_invisible]
    unknown = [
        _Finding(s.case.case_id, Decision.INCONCLUSIVE, f"not attested: {s.unattested}")
        for s in about
        if not s.attested
    ]
    if about:
        stated = "operators" if invisible else "kernels and operators"
        yield RuleResult(
            rule=WHAT_RAN,
            requirement=f"the {stated} that the suite states ran, and no others it forbids",
            decision=Decision.INCONCLUSIVE if unknown else Decision.GO,
            reason=_share(unknown, about) + _join(unknown)
            if unknown
            else "seen in the one case that states any"
            if len(about) == 1
            else f"seen in all {len(about)} cases that state any",
            evidence=_evidence(unknown),
        )
    if invisible:
        yield RuleResult(
            rule=KERNELS_THAT_RAN,
            requirement="the kernels that the suite states ran, and no others it forbids",
            decision=Decision.INCONCLUSIVE,
            reason="no GPU here: kernels cannot be seen",
            evidence=tuple(s.case.case_id for s in invisible),
            applies=False,
        )


# --- a stated rule -----------------------------------------------------------------------


def _judge_rule(
    rule: Rule,
    environment: Environment,
    summaries: Sequence[CaseSummary],
    fits: Sequence[ScalingFit],
) -> RuleResult:
    if not gpu_matches(rule.gpu, environment.device_name):
        return RuleResult(
            rule=rule.name,
            requirement=requirement(rule),
            decision=Decision.INCONCLUSIVE,
            reason=f"stated for {rule.gpu}; this is {environment.device_name}",
            applies=False,
        )
    matched = [s for s in summaries if rule.match.accepts(s.case)]
    if rule.metric == "scaling_exponent":
        findings = _exponents(rule, matched, fits)
    else:
        findings = [_finding(rule, s) for s in matched if s.outcome not in s.case.allow]
    decision, decisive = _settle(findings, _ORDERS[rule.quantifier])
    if findings:
        reason = _share(decisive, findings) + _join(decisive)
        perhaps = [f for f in findings if f.decision is Decision.INCONCLUSIVE and f.may_be_go]
        if perhaps and rule.quantifier == "any" and decision is Decision.CONDITIONAL:
            reason += f"; undecided, perhaps GO: {_join(perhaps)}"
    elif matched:
        reason = "no matched case has an outcome that could decide"
    else:
        reason = "the rule matches no case of this run"
    return RuleResult(
        rule=rule.name,
        requirement=requirement(rule),
        decision=decision,
        reason=reason,
        evidence=_evidence(decisive),
    )


def _exponents(
    rule: Rule, matched: Sequence[CaseSummary], fits: Sequence[ScalingFit]
) -> list[_Finding]:
    """One finding per fit whose cases the rule matches, and one per case that is in no fit."""
    left = {s.case.case_id: s for s in matched}
    ours = [f for f in fits if f.axis == rule.axis and all(p.case_id in left for p in f.points)]
    for point in (p for f in ours for p in f.points):
        left.pop(point.case_id, None)
    alone = f"in no group of cases with three values of {rule.axis}"
    return [
        *(_exponent(rule, f) for f in ours),
        *(
            _Finding(case_id, Decision.INCONCLUSIVE, alone)
            for case_id, s in left.items()
            if s.outcome not in s.case.allow
        ),
    ]


def _exponent(rule: Rule, fit: ScalingFit) -> _Finding:
    cases = tuple(p.case_id for p in fit.points)
    if fit.exponent is None:
        return _Finding(fit.group, Decision.INCONCLUSIVE, fit.reason, cases)
    if fit.exponent.processes < 2:
        once = f"{units.measured(rule.metric, fit.exponent)} from cases with a single process"
        return _Finding(fit.group, Decision.INCONCLUSIVE, once, cases)
    return replace(_by_interval(rule, fit.group, fit.exponent), cases=cases)


def _finding(rule: Rule, summary: CaseSummary) -> _Finding:
    """What a case says of a rule about one of its metrics."""
    case_id, outcome = summary.case.case_id, summary.outcome
    if outcome is None:
        return _Finding(case_id, Decision.INCONCLUSIVE, "did not run")
    if outcome in FAILURES or outcome is Outcome.OUT_OF_MEMORY:
        return _Finding(case_id, Decision.NO_GO, _ended(summary))
    if outcome is Outcome.TIMEOUT:
        return _by_bound(rule, summary)
    if outcome is not Outcome.OK:
        return _Finding(case_id, Decision.INCONCLUSIVE, _ended(summary))
    estimate = summary.metrics.get(rule.metric)
    if estimate is None:
        missing = f"{rule.quantity.title} not available"
        return _Finding(case_id, Decision.INCONCLUSIVE, missing)
    return _by_interval(rule, case_id, estimate)


def _by_bound(rule: Rule, summary: CaseSummary) -> _Finding:
    """A timeout proves a rule broken, or proves nothing; it never proves it kept."""
    case_id, abort = summary.case.case_id, rule.go if rule.abort is None else rule.abort
    bound = upper_bound(summary, rule.metric)
    if bound is not None and bound < abort:
        at_most = units.quantity(rule.metric, bound)
        return _Finding(case_id, Decision.NO_GO, f"timed out: at most {at_most}")
    if rule.metric == "step_s" and (summary.lower_bound_s or 0.0) > abort:
        at_least = units.duration(summary.lower_bound_s or 0.0)
        return _Finding(case_id, Decision.NO_GO, f"timed out: at least {at_least} a step")
    return _Finding(case_id, Decision.INCONCLUSIVE, _ended(summary))


def _by_interval(rule: Rule, case_id: str, estimate: Estimate) -> _Finding:
    text = units.measured(rule.metric, estimate)
    low, high = estimate.low, estimate.high
    if low is None or high is None:
        return _Finding(
            case_id, Decision.INCONCLUSIVE, f"{text} from one process, which has no interval"
        )
    if not (math.isfinite(low) and math.isfinite(high) and low <= estimate.value <= high):
        return _Finding(case_id, Decision.INCONCLUSIVE, f"{text} is not a finite interval")
    go, abort = rule.go, rule.go if rule.abort is None else rule.abort
    if not rule.quantity.higher_is_better:
        low, high, go, abort = -high, -low, -go, -abort
    if high < abort:
        return _Finding(case_id, Decision.NO_GO, text)
    if low >= max(go, abort):
        return _Finding(case_id, Decision.GO, text)
    if low >= abort and high < go:
        return _Finding(case_id, Decision.CONDITIONAL, text)
    across = f"{text} lies across a threshold"
    return _Finding(case_id, Decision.INCONCLUSIVE, across, may_be_go=high >= go)


# --- many findings, one decision ---------------------------------------------------------


def _settle(
    findings: Sequence[_Finding], order: Sequence[Decision]
) -> tuple[Decision, list[_Finding]]:
    """The first decision in the order that any finding holds, with the findings that hold it.

    INCONCLUSIVE without findings: nothing is known.
    """
    for decision in order:
        if decisive := [f for f in findings if f.decision is decision]:
            return decision, decisive
    return Decision.INCONCLUSIVE, []


def _evidence(findings: Sequence[_Finding]) -> tuple[str, ...]:
    return tuple(case_id for f in findings for case_id in (f.cases or (f.subject,)))


def _ended(summary: CaseSummary) -> str:
    outcome = str(summary.outcome or "did not run").replace("_", " ")
    first_line = summary.detail.strip().partition("\n")[0]
    return f"{outcome}: {first_line}" if first_line else outcome


def _share(decisive: Sequence[_Finding], findings: Sequence[object]) -> str:
    return f"{len(decisive)} of {len(findings)}: " if len(findings) > 1 else ""


def _join(findings: Sequence[_Finding], most: int = 2) -> str:
    """The first few findings as a sentence; those of one reason share it."""
    by_reason: dict[str, list[str]] = {}
    for f in findings:
        by_reason.setdefault(f.reason, []).append(f.subject)
    shown = list(by_reason.items())[:most]
    text = "; ".join(f"{_names(names, most)}: {reason}" for reason, names in shown)
    rest = len(findings) - sum(len(names) for _, names in shown)
    return f"{text}; and {rest} more" if rest else text


def _names(names: Sequence[str], most: int) -> str:
    if len(names) <= most:
        return " and ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"
