"""Sentences about decisions: the rules and the verdict of a suite."""

import math
from collections.abc import Iterable, Sequence

from harness import units
from harness.analysis.verdict import EVERY_CASE_RAN, EXPECTED, KERNELS_THAT_RAN, WHAT_RAN
from harness.records import (
    FAILURES,
    SPEEDS,
    Decision,
    Fact,
    Finding,
    Match,
    Outcome,
    Rule,
    RuleResult,
    Run,
    Verdict,
    range_of,
)
from harness.report.text import (
    BY_KERNELS,
    ending_text,
    every,
    finding_sentence,
    for_gpu,
    is_speed,
    listed,
    why_ended,
)

MAX_SUBJECTS = 2
"""Cases, and reasons, that one sentence names."""
LOOSE = 20.0
"""Factor by which a speed passes its limit from which the limit does not test this GPU."""
NO, OPEN, NOT_MEASURED, YES = "no", "open", "not measured", "yes"
BESIDE = "for information"
NOTED = f" ({BESIDE})"
"""Behind the answer of what does not change the verdict."""
WORDS = (NO, "likely not", OPEN, NOT_MEASURED, "likely", YES)
"""The answers to a question, worst first."""
_NUMBERS = (Fact.DECIDED, Fact.OPEN)
_DECIDED = (Fact.DECIDED, Fact.AT_MOST, Fact.AT_LEAST)
_BROKEN = (*FAILURES, Outcome.OUT_OF_MEMORY)
REQUIREMENTS = {
    EVERY_CASE_RAN: "every case ends ok, or as the suite allows",
    WHAT_RAN: "all required operators ran and no forbidden one did; on a GPU also kernels",
    EXPECTED: "every expectation that counts is met on this GPU",
    KERNELS_THAT_RAN: "all required kernels ran and no forbidden one did",
}

# --- rules and verdict of a suite --------------------------------------------------------


def status(v: Verdict, run: Run) -> str:
    """`GO on NVIDIA H200; open: Does a step grow in proportion to T?`: the verdict, the condition
    that it has, and each part, or rule without one, that is no yes."""
    env = run.environment
    device = env.gpu.name if env.gpu else f"CPU ({env.cpu})"
    said = v.said if v.not_measured else f"{v.said} on {device}"
    kept = conditions([r for r in v.rules if r.decides])
    rest: dict[str, dict[str, None]] = {}
    answered = {r.asks for r in v.rules if r.counts and r.applies}
    for r in v.rules:
        named = r.counts or (v.asked and r.asks and r.asks not in answered)
        if named and r.applies and word(r) != YES:
            name = run.suite.parts.get(r.asks, r.rule)
            kind, said_of = (word(r), name) if r.decides else (BESIDE, f"{name} ({word(r)})")
            rest.setdefault(kind, {})[said_of] = None
    ordered = sorted(rest.items(), key=lambda one: one[0] == BESIDE)
    others = (f"{kind}: {' '.join(parts)}" for kind, parts in ordered)
    return "; ".join([": ".join([said, *kept]), *others])


def conditions(rules: Iterable[RuleResult]) -> list[str]:
    """What a person must keep, of the rules that are not met and make a verdict CONDITIONAL."""
    missed = [r for r in rules if r.decision is Decision.CONDITIONAL and word(r) == NO]
    return [r.stated.condition for r in missed if r.stated and r.stated.condition]


def verdict_sentence(v: Verdict, most: int = MAX_SUBJECTS) -> str:
    """What decided: `all 5 rules are met`, or the rule and its reason."""
    if v.rule is None:
        return "no rule of the suite applies to this run"
    if v.rule.slow:
        return rule_sentence(v.rule, most)
    if not v.asked and v.rule.decision is Decision.GO:
        return f"no rule decides; {rule_sentence(v.rule, most)}"
    if v.decided_by != v.rule.rule:
        return f"{v.decided_by} are met"
    return rule_reason(v.rule, most)


def rule_reason(result: RuleResult, most: int = MAX_SUBJECTS) -> str:
    """The rule and why it decided; of a case that failed only the latter, as the name of the rule
    says the opposite."""
    said = rule_sentence(result, most)
    return said if result.rule == EVERY_CASE_RAN else f"{result.rule}: {said}"


def rule_sentence(result: RuleResult, most: int = MAX_SUBJECTS) -> str:
    """Why a rule decided as it did, by so many reasons."""
    stated = result.stated
    if stated is None and result.decision is Decision.GO:
        return _built_in_met(result)
    if not result.findings:
        matched = "it has no number: a case that it needs ended as the suite allows"
        return matched if result.matched else "the rule matches no case of this run"
    if stated and not result.applies:
        elsewhere = result.findings[0].fact is Fact.OTHER_DEVICE
        device = f"{for_gpu(stated.gpu)}; " if elsewhere else ""
        return f"{device}{finding_sentence(result.findings[0])}"
    noun = "fits" if stated and stated.axis else "pairs" if stated and stated.against else "cases"
    if result.rule == EXPECTED and any(f.estimate for f in result.findings):
        return _farthest(result)
    if stated and (worst := _worst(result, stated)):
        if stated.quantifier == "any":
            return f"best of {result.judged} {noun} ({worst.subject}): {finding_sentence(worst)}"
        of = f"worst of {result.judged} {noun}"
        if missed := _missed(result):
            of = f"{missed} {noun}, worst"
        return f"{of} ({worst.subject}): {finding_sentence(worst)}"
    some = len(result.findings) < result.judged
    text = f"{len(result.findings)} of {result.judged} {noun}: " if some else ""
    text += _joined(result.findings, most)
    if result.perhaps:
        text += f"; undecided, GO is possible: {_joined(result.perhaps, most)}"
    return text


def number(result: RuleResult) -> str:
    """The number of the finding that decides; its case only of a missed expectation, of several,
    and of a ratio that is no speed."""
    if not result.findings:
        return ""
    worst = (result.stated and _worst(result, result.stated)) or result.findings[0]
    named = bool(worst.partner) and not is_speed(worst.metric)
    if result.rule == EXPECTED and any(f.estimate for f in result.findings):
        far, worst = _missed_most(result)
        named |= bool(far) and result.judged > 1
    missed, whose = _missed(result), f"{worst.subject}: " if named else ""
    return f"{f'{missed}, worst: ' if missed else ''}{whose}{finding_sentence(worst)}"


def _missed(result: RuleResult) -> str:
    """`misses 2 of 3`; empty if none is on the wrong side of the limit, or all are, or if one
    need not be."""
    one = result.stated and result.stated.quantifier == "any"
    missed = sum(misses(f, result.stated) for f in result.findings)
    some = 0 < missed < result.judged and not one
    return f"misses {missed} of {result.judged}" if some else ""


def _missed_most(result: RuleResult) -> tuple[list[Finding], Finding]:
    """The expectations that are missed, and of them, or of those left open, the farthest."""
    missed = [f for f in result.findings if f.fact is Fact.DECIDED]
    return missed, max(missed or result.findings, key=lambda f: distance(f, None))


def _farthest(result: RuleResult) -> str:
    """`8 of 8 missed, farthest: training: 6,090 tokens/s; expected ≥ 10,500`."""
    missed, worst = _missed_most(result)
    which = f"{worst.subject}: {finding_sentence(worst)}"
    if result.judged == 1:
        return which
    what = "missed, farthest" if missed[1:] else "missed" if missed else "not decided"
    return f"{len(missed or result.findings)} of {result.judged} {what}: {which}"


def word(r: RuleResult) -> str:
    """The answer to a question that a rule decides, one of WORDS."""
    if not r.applies or r.decision is Decision.GO:
        return YES if r.applies else NOT_MEASURED
    loose = [f for f in r.findings if f.fact is Fact.OPEN or f.likely]
    decided = [f for f in r.findings if f.fact in _DECIDED and f not in loose]
    failed = [f for f in r.findings if f.decision is Decision.CONDITIONAL and f.outcome in _BROKEN]
    if r.decision is Decision.NO_GO or decided or any(f.fact is Fact.ENDED for f in failed):
        return OPEN if r.perhaps else NO
    goes = [f.likely is Decision.GO for f in loose]
    if r.stated and r.stated.quantifier == "any" and any(goes):
        return "likely"
    if loose and all(f.likely for f in loose):
        return "likely" if all(goes) else "likely not"
    return OPEN if loose or len(r.findings) < r.judged else NOT_MEASURED


def misses(f: Finding, stated: Rule | None) -> bool:
    """Whether the value alone, without its interval, is worse than is needed."""
    if f.estimate is None:
        return False
    low, high = _limits(f, stated)
    return not low <= f.estimate.value <= high


def distance(f: Finding, stated: Rule | None) -> float:
    """The factor from a value to its limit: above 1 if it misses it, 0 if that says nothing."""
    if f.estimate is None or f.estimate.value <= 0 or (stated and stated.axis):
        return 0.0
    low, high = _limits(f, stated)
    value = f.estimate.value
    return max(0.0, low / value, value / high if high > 0 else 0.0)


def _limits(f: Finding, stated: Rule | None) -> tuple[float, float]:
    return stated.limits if stated else range_of(f.low, f.high)


def _worst(result: RuleResult, stated: Rule) -> Finding | None:
    """Of several cases with the same answer, the one with the worst value; the best if one is
    enough for the rule."""
    found = result.findings
    alike = len({f.fact for f in found}) == 1 and found[0].fact in _NUMBERS
    timed = [((f.metric == "kernel_s" and f.beside) or f.estimate, f) for f in found]
    measured = [(e.value, f) for e, f in timed if alike and e]
    one = stated.quantifier == "any"
    if result.judged < 2 or (len(measured) < 2 and not one) or len(measured) < len(found):
        return None
    if one and result.perhaps:
        return None
    pick = min if stated.higher_is_better != one else max
    return pick(measured, key=lambda pair: pair[0])[1] if measured else None


def _built_in_met(result: RuleResult) -> str:
    """Why a rule that every suite has is met."""
    if result.rule == WHAT_RAN:
        return f"confirmed in {units.plural('case', result.judged)}"
    if result.rule == EXPECTED:
        near = max(result.findings, key=lambda f: distance(f, None))
        speeds = all(is_speed(f.metric) for f in result.findings)
        by = [1 / far for f in result.findings if (far := distance(f, None)) and speeds]
        range_ = f", by {units.factor(min(by))} to {units.factor(max(by))}" if by[1:] else ""
        count = f"{every(result.judged)} are met{range_}; nearest: " if result.judged > 1 else ""
        return f"{count}{near.subject}: {finding_sentence(near)}"
    if result.slow:
        return _fastest_first(result)
    ran = f"{every(result.judged)} cases ran" if result.judged > 1 else "the case ran"
    if not result.findings:
        return ran
    return f"{ran} or ended as the suite allows ({_joined(result.findings, 1)})"


def _fastest_first(result: RuleResult) -> str:
    """`the fastest is A=1, B=1 with 5,040 tokens/s; 6 cases take over 5.82 s a step`."""
    first = [f for f in result.findings if f.fact is Fact.FASTEST]
    parts = [f"the fastest is {f.subject} with {finding_sentence(f)}" for f in first]
    slow, bounds = units.plural("case", len(result.slow)), [f.bound or 0.0 for f in result.slow]
    each = "takes" if len(result.slow) == 1 else "take"
    bound = f"{each} {units.bound_text('step_s', min(bounds))} a step" if all(bounds) else ""
    return "; ".join([*parts, f"{slow} {bound or 'did not end in time'}"])


def requirement_text(result: RuleResult) -> str:
    """A rule as a sentence: `tokens/s ≥ 500 in every case with gc=off; NO-GO under 100`."""
    stated = result.stated
    if stated is None:
        slow = "; without a rule, a slow case is measured too" if result.slow else ""
        return f"{REQUIREMENTS[result.rule]}{slow}"
    noun = "pair" if stated.against else "case"
    cases = f"every {noun}" if stated.quantifier == "all" else f"the best {noun}"
    abort = ""
    if stated.abort is not None:
        worse = "under" if _is_least(stated) else "over"
        abort = f"; NO-GO {worse} {_limit(stated, stated.bearable)}"
    return f"{limit_text(stated)} in {cases}{_criteria(stated.match)}{abort}"


def _limit(stated: Rule, ends: tuple[float, float]) -> str:
    """`500`; of a ratio `6x`, `95 %`: of a metric that is better if less, that of its value."""
    at = next(filter(math.isfinite, ends))
    if not stated.against:
        return units.plain(stated.metric, at)
    if is_speed(stated.metric):
        return f"{units.number(at)}x"
    return units.percent(at if stated.quantity.higher_is_better else 1 / at)


def _is_least(stated: Rule) -> bool:
    """Whether the limit, as it is printed, is the least value."""
    speed = stated.against and is_speed(stated.metric)
    return bool(speed or stated.quantity.higher_is_better)


def limit_text(stated: Rule) -> str:
    """`tokens/s ≥ 500`, or `at least 6x as fast as dense`."""
    limit, title = _limit(stated, stated.limits), stated.quantity.title
    sign = "≥" if _is_least(stated) else "≤"
    if stated.against:
        other = _other(stated.against)
        if is_speed(stated.metric):
            by = BY_KERNELS * (stated.metric == "kernel_s")
            return f"at least {limit} as fast as {other}{by}"
        return f"{title} {sign} {limit} of that of {other}"
    last = "last octave of " if stated.over == "last_octave" else ""
    along = f" over {last}{stated.axis}" if stated.axis else ""
    return f"{title}{along} {sign} {limit}"


def _other(against: Match) -> str:
    """What a ratio rule compares with: `dense-cudnn`, or `the case with precision=fp32`."""
    only = against.criteria if {*against.criteria} == {"provider"} else {}
    names = only.get("provider")
    return " or ".join(map(str, names)) if names else f"the case{_criteria(against)}"


def needed(limit: str) -> str:
    """`; ≥ 500 needed`."""
    return f"; {limit} needed" if limit else ""


def needed_text(result: RuleResult) -> str:
    """`≥ 500`; empty without a limit, and where the question says it: as fast as the other side."""
    stated = result.stated
    if stated is None or _as_fast(stated):
        return ""
    return f"{'≥' if _is_least(stated) else '≤'} {_limit(stated, stated.limits)}"


def margin_text(result: RuleResult) -> str:
    """`, missed by 1.12x`, or of a speed far beyond its limit `, met by 450x`; else empty."""
    stated, found = result.stated, result.findings
    if missed := [d for f in found if (d := distance(f, stated)) > 1]:
        far = (min if stated and stated.quantifier == "any" else max)(missed)
        if word(result) != NO or _as_fast(stated):  # how much slower it is stands there already
            return ""
        return f", missed by {units.factor(far)}"
    nearest = max((distance(f, stated) for f in found), default=0.0)
    speed = stated and not stated.against and stated.metric in SPEEDS
    if not speed or not nearest or nearest > 1 / LOOSE or word(result) != YES:
        return ""
    return f", met by {units.factor(1 / nearest)}"


def _as_fast(stated: Rule | None) -> bool:
    """Whether one side must be as fast as the other, not by some factor."""
    return bool(stated and stated.against and stated.go == 1)


def _criteria(match: Match) -> str:
    chosen = " and ".join(
        f"{name}={' or '.join(map(str, values))}" for name, values in match.criteria.items()
    )
    return f" with {chosen}" if chosen else ""


def _joined(findings: Sequence[Finding], most: int) -> str:
    """The first findings as a sentence; those with the same reason share it."""
    by_reason: dict[str, list[str]] = {}
    for f in findings:
        reason, subject = finding_sentence(f), f.subject
        if f.fact is Fact.NO_PARTNER and f.outcome is not Outcome.OK:
            # Which cases lack this partner is in the table of results.
            ending = ending_text(f.outcome, why_ended(f))
            same = [x.partner for x in findings if ending_text(x.outcome, why_ended(x)) == ending]
            reason, subject = f"no time of {listed([*dict.fromkeys(same)])} ({ending})", ""
        by_reason.setdefault(reason, []).append(subject)
    shown = list(by_reason.items())[:most]
    text = "; ".join(
        f"{listed(names, most)}: {reason}" if any(names) else reason for reason, names in shown
    )
    rest = len(findings) - sum(len(names) for _, names in shown)
    return f"{text}; and {rest} more" if rest else text
