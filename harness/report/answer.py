"""The first screen of a report: its first line, the answers, and the suspects.

Every sentence comes from the rules, rows and records that the rest of the page shows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from harness import units
from harness.analysis.expectation import Assessment, Judgement
from harness.analysis.scaling import ScalingFit
from harness.analysis.suspects import Conclusion, Diagnosis
from harness.records import (
    METRICS,
    OVER_STEPS,
    WORST_FIRST,
    Decision,
    Fact,
    Finding,
    Match,
    Rule,
    RuleResult,
    Run,
    Suite,
    Verdict,
    Weight,
    gpu_matches,
)
from harness.report.remedies import slow_of
from harness.report.tables import NONE, Table, bends, factors_text
from harness.report.text import (
    case_names,
    every,
    listed,
    shared_name,
)
from harness.report.verdict_text import (
    farthest,
    gap_text,
    met_sentence,
    misses,
    needed_text,
    outside,
    rule_sentence,
    verdict_sentence,
)
from harness.units import finding_sentence

MAX_ROWS, MAX_OTHERS = 8, 2
"""Of the first screen: rows of its table, and others that it names: rules that no part asks, cases
that miss an expectation."""
_MISSED = (Judgement.BELOW, Judgement.ABOVE)
_JUDGED = (Judgement.MET, Judgement.UNDECIDED, *_MISSED)
_ELSEWHERE = (Fact.ENDED, Fact.NO_PARTNER, Fact.ALLOWED, Fact.EXPECTED)
"""Facts whose detail is in a section of its own: what failed or did not run, what was expected."""


def named(v: Verdict, suite: Suite, fits: Sequence[ScalingFit] = ()) -> Verdict:
    """The verdict with short names for its cases and axes, and the segments of curves that bend.
    The partner of a pair is named by what differs from the case."""
    short, cases = case_names(suite), {c.case_id: c for c in suite.cases}
    curves: dict[object, ScalingFit] = {(f.group, f.axis): f for f in fits}

    def about(r: RuleResult, f: Finding) -> Finding:
        partner, ours = cases.get(f.partner), cases.get(f.subject)
        other = short.get(f.partner, f.partner)
        if partner and ours and partner.provider != ours.provider:
            other = partner.provider
        group = [short[i] for i in f.cases if i in short]
        shared = shared_name(group) if group else ""
        name = (f.fact is Fact.FASTEST and shared) or short.get(f.subject) or shared or f.subject
        fit = curves.get((f.subject, r.stated.axis)) if r.stated and f.estimate else None
        if fit and f.estimate == fit.exponent and len(fit.segments) > 1:
            last, before = fit.segments[-1], ", ".join(bends(fit))
            ends = f"{last.begin.x:g}–{last.end.x:g}; before that {before}"
            f = replace(f, estimate=last.exponent, detail=f"over {suite.axis(fit.axis)} {ends}")
        elif fit and f.estimate == fit.last:
            begin, end = fit.last_ends
            f = replace(f, detail=f"over {suite.axis(fit.axis)} {begin:g}–{end:g}")
        return replace(f, subject=name, partner=other)

    return _each(v, about, lambda rule: rule and _worded(rule, suite))


def brief(v: Verdict) -> Verdict:
    """The verdict without the reasons that other sections give; what has no number comes first."""
    return _each(v, lambda _, f: replace(f, detail="") if f.fact in _ELSEWHERE else f)


def _each(
    v: Verdict,
    about: Callable[[RuleResult, Finding], Finding],
    stated: Callable[[Rule | None], Rule | None] = lambda rule: rule,
) -> Verdict:
    def result(r: RuleResult) -> RuleResult:
        found, perhaps = ([about(r, f) for f in of] for of in (r.findings, r.perhaps))
        found.sort(key=lambda f: f.estimate is not None)
        return replace(r, findings=tuple(found), perhaps=tuple(perhaps), stated=stated(r.stated))

    return replace(v, rule=v.rule and result(v.rule), rules=tuple(map(result, v.rules)))


def _worded(rule: Rule, suite: Suite) -> Rule:
    """A rule with the suite's names for axes."""

    def match(m: Match) -> Match:
        return Match(criteria={suite.axis(name): values for name, values in m.criteria.items()})

    against, axis = rule.against and match(rule.against), rule.axis and suite.axis(rule.axis)
    return replace(rule, match=match(rule.match), against=against, axis=axis)


def headline(
    v: Verdict,
    run: Run,
    noted: Sequence[Assessment] = (),
    *,
    regressed: bool = False,
) -> str:
    """What to do, and the number that decides beside the one that is needed.

    Args:
        v: With the names to show, and brief.
        regressed: Whether anything is worse than in the last report; the answer has what.
    """
    missed = any(a.judgement in _MISSED for a in noted)
    decides = deciding(v) if v.asked else None
    said = _number(decides) if decides else verdict_sentence(v)
    facts = {f.fact for f in decides.findings} if decides else set()
    word = "Act"
    match v.here or v.decision:
        case Decision.NO_GO:
            todo = "do not go ahead"
        case _ if not v.asked:
            word, todo = "Read", (v.rule.in_time if v.rule else "") or "nothing is decided"
        case Decision.INCONCLUSIVE:
            todo = "measure again"
        case Decision.CONDITIONAL if decides and (slow := _slowest(decides)):
            todo, said = slow
        case Decision.CONDITIONAL if facts == {Fact.FEW}:
            todo = "measure in three processes before you go ahead"
        case Decision.CONDITIONAL if facts == {Fact.NO_PARTNER}:
            todo = "close the gap in the comparison before you go ahead"
        case Decision.CONDITIONAL:
            todo = "meet this condition before you go ahead"
        case _ if v.partial:
            word, todo = "Read", "the limits are met, but only a part of the suite ran"
        case _ if missed:
            short = [a for a in noted if a.judgement in _MISSED]
            judged = [a for a in noted if a.judgement in _JUDGED]
            word, todo = "Read", "the limits are met"
            said = f"{said}; but {len(short)} of {units.plural('expectation', len(judged))} missed"
        case _:
            unmet = [r for r in v.rules if r.applies and r.decision is not Decision.GO]
            read = regressed or unmet
            word, todo = "Read" if read else "Nothing to do", "the limits are met"
    if not run.ended_at:
        return "**Act**: finish the run before you decide."
    if v.not_measured:
        word, todo = "Act", f"run the suite on {v.not_measured}. On {v.device}, {todo}"
    return f"**{word}**: {todo}: {said}."


def _slowest(r: RuleResult) -> tuple[str, str] | tuple[()]:
    """How much faster the slowest case of a rule must become, and its number; empty if the rule is
    not about speed."""
    if not (due := slow_of(r)):
        return ()
    f, times = next(iter(due.items()))
    said = f"now {finding_sentence(f)}{_needed(r)}"
    more = f", and {units.plural('more case', len(due) - 1)}" if due.keys() - {f} else ""
    return f"speed up {f.subject} by {units.factor(times)}{more}", said


def deciding(v: Verdict) -> RuleResult | None:
    """The rule of the worst decision: one with a number before one without, a missed one first."""
    counted = [r for r in v.rules if r.applies and r.counts]
    if not counted or v.rule is None:
        return None
    worst = [r for r in counted if r.decision is v.rule.decision]
    numbers = [r for r in worst if any(f.estimate for f in r.findings)] or worst
    return next((r for r in numbers if any(misses(f, r.stated) for f in r.findings)), numbers[0])


def _surely(f: Finding, stated: Rule | None) -> bool:
    """Whether all of the interval is worse than is needed."""
    ends = (f.estimate.low, f.estimate.high) if f.estimate else (None, None)
    return misses(f, stated) and all(
        e is not None
        and (stated is None or (e < stated.go if stated.higher_is_better else e > stated.go))
        for e in ends
    )


def _number(r: RuleResult) -> str:
    """The deciding number of a rule and the one that is needed."""
    if missed := [f for f in r.findings if outside(f)]:
        f = farthest(missed)
        return f"{f.subject}: {finding_sentence(f)}"
    of = METRICS[r.stated.metric].title if r.stated and r.stated.metric in OVER_STEPS else ""
    return f"{of}{', ' * bool(of)}{_crossing(rule_sentence(r, 1))}{_needed(r)}{gap_text(r)}"


def answers(v: Verdict, suite: Suite, noted: Sequence[Assessment] = ()) -> Iterator[str]:
    """A sentence for each part of the question, then each other rule that is not met, then the
    expectations that decide nothing. `v` has the names to show."""
    diagnosed = suite.suspects.asks if suite.suspects else ""
    for part, question in suite.parts.items():
        if part == diagnosed:
            continue
        yield f"**{question} {_part([r for r in v.rules if r.asks == part], v)}"
    if not suite.parts:
        yield f"**{v.said}**: {verdict_sentence(v, 1)}."
    worst = v.rule.rule if v.rule and not suite.parts else ""
    others = [r for r in v.rules if r.asks not in suite.parts and r.rule != worst and r.applies]
    decides = deciding(v)
    unmet = [r for r in others if r.decision is not Decision.GO and r is not decides]
    for r in unmet[:MAX_OTHERS]:
        yield f"**{r.said}**: {r.rule}: {rule_sentence(r, 1)}."
    if more := [f"“{r.rule}”" for r in unmet[MAX_OTHERS:]]:
        yield f"Not met either: {listed(more)}."
    if left := [f"“{r.rule}”" for r in v.rules if not r.applies and r.stated and not r.asks]:
        yield f"Not asked in this run: {listed(left)}."
    asked = [a for a in noted if a.expectation.counts is Weight.NOTE and a.judgement in _JUDGED]
    if asked:
        missed = [a for a in asked if a.judgement in _MISSED]
        met = [a for a in asked if a.judgement is Judgement.MET]
        word = "missed" if missed else "met" if len(met) == len(asked) else "not decided"
        those = missed or (met if word == "met" else asked)
        names = case_names(suite)
        missed.sort(key=lambda a: -a.factors[0])
        far = [f"{names[a.case_id]} ({factors_text([a])})" for a in missed]
        by = f": {listed(far)}" if far else ""
        by = by if len(far) <= MAX_OTHERS else f", farthest {far[0]}"
        count = f"{len(those)} of {units.plural('expectation', len(asked))}"
        yield f"Noted: {count} {word}{by}."


def _part(rules: Sequence[RuleResult], v: Verdict) -> str:
    """`Yes.** lowest of 10 pairs: 2.76x ...; 1x needed.`"""
    asked = [r for r in rules if r.applies]
    if not asked:
        other = any(f.fact is Fact.OTHER_DEVICE for r in rules for f in r.findings)
        why = f"this is {v.device}" if other else "this run lacks its cases"
        return f"Not measured**: {why}."
    counting = [r for r in asked if r.counts]
    worst = min(counting or asked, key=lambda r: WORST_FIRST.index(r.decision))
    decides = deciding(v)
    met = [r for r in asked if r.decision is Decision.GO and r is not decides]
    if len(asked) == 1:
        met = []
    said = [_above(r) if r is decides else _short(r) for r in asked if r not in met]
    if met:
        rest = f"the other {len(met)} limits are" if met[1:] else "the other limit is"
        said.append(f"{rest if said else f'{every(len(met))} limits are'} met")
    note = "" if counting else " (noted)"
    return f"{_word(worst)}**{note}: {'; '.join(said)}."


def _above(r: RuleResult) -> str:
    """Of the rule whose number the first line has: how many miss it, if not all."""
    missed = sum(misses(f, r.stated) for f in r.findings)
    if not r.stated or not 0 < missed < r.judged:
        return "see above"
    noun = "pair" if r.stated.against else "case"
    return f"{missed} of {units.plural(noun, r.judged)} miss it, see above"


def _short(r: RuleResult) -> str:
    """The reason, and what is needed where that is not in the question."""
    plain = r.stated and r.stated.against and r.stated.go == 1
    timed = [f for f in r.findings if f.estimate]
    gaps = [f for f in r.findings if f not in timed and f.bound is None]
    if plain and timed and gaps:
        worst = min(timed, key=lambda f: f.estimate.value if f.estimate else 0.0)
        some = f"lowest of {units.plural('pair', len(timed))}: {finding_sentence(worst)}"
        ran = "gave no time" if any(f.outcome is None for f in gaps) else "could not run"
        return f"{some}; {len(gaps):,} more {ran}"
    met = r.decision is Decision.GO
    said = met_sentence(r, r.stated) if met and r.stated else rule_sentence(r, 1)
    return f"{said if plain else _crossing(said)}{'' if plain else _needed(r)}{gap_text(r)}"


def _word(result: RuleResult) -> str:
    """The answer to a question of yes or no."""
    facts = {f.fact for f in result.findings}
    match result.decision:
        case Decision.GO:
            return "Yes"
        case Decision.INCONCLUSIVE:
            return "Not decided"
        case Decision.CONDITIONAL if Fact.EXPECTED in facts and not any(
            map(outside, result.findings)
        ):
            return "Not decided"
        case Decision.CONDITIONAL if facts <= {Fact.FEW} and not any(
            misses(f, result.stated) for f in result.findings
        ):
            return "Probably"
        case Decision.CONDITIONAL if facts == {Fact.NO_PARTNER}:
            every = len(result.findings) == result.judged
            return "Not measured" if every else "In part"
        case Decision.CONDITIONAL if Fact.NO_PARTNER in facts:
            return "In part"
        case Decision.CONDITIONAL if Fact.FEW in facts or not any(
            _surely(f, result.stated) for f in result.findings
        ):
            return "Not quite"
        case _:
            return "No"


def _crossing(said: str) -> str:
    """The sentence without what the limit behind it says as well."""
    return said.replace(f" {units.CROSSES}", "")


def _needed(result: RuleResult) -> str:
    return f"; {needed_text(result.stated)}" if result.stated else ""


def explained(found: Sequence[Diagnosis], suite: Suite, device: str) -> Iterator[str]:
    """What explains the gap of the suite's suspects: one sentence, the table has the rest."""
    if suite.suspects is None:
        return
    gap = suite.suspects.gap
    head = f"**{suite.parts.get(suite.suspects.asks, 'What explains the gap?')}"
    if found and all(d.conclusion is Conclusion.NOT_TESTED for d in found):
        yield f"{head} Not tested** in this run."
        return
    if not found:
        yield f"{head}** The gap ({units.factor(gap.factor)}) is too small to explain by one run."
        return
    parts = []
    if enough := [d for d in found if d.conclusion is Conclusion.ENOUGH]:
        nearest = min(enough, key=lambda d: abs(math.log((d.reached or math.inf) / gap.seen)))
        seen = ""
        if nearest.reached is not None and nearest.reached < gap.expected:
            seen = f" ({units.quantity(gap.metric, nearest.reached)})"
        many = f"Each of {len(enough)} suspects alone, nearest: "
        one = "" if len(enough) > 1 else " is enough by itself"
        parts.append(f"{'' if one else many}{nearest.name}{one}{seen}")
    elif some := [d.name for d in found if d.conclusion is Conclusion.CONTRIBUTES]:
        parts.append(f"contributes: {listed(some)}")
    else:
        parts.append("nothing that was tested is shown to be enough")
    if not gpu_matches(gap.gpu, device):
        parts.append(f"not proven: seen on {gap.gpu}")
    yield f"{head}** {'; '.join(parts)}."


def suspects_table(found: Sequence[Diagnosis], suite: Suite) -> Table | None:
    """One row a suspect: its effect, and the conclusion against the gap."""
    if suite.suspects is None or all(d.conclusion is Conclusion.NOT_TESTED for d in found):
        return None
    gap = suite.suspects.gap
    rows = []
    tested = [d for d in found if d.effect or d.conclusion is not Conclusion.NOT_TESTED]
    out = [d for d in tested if d.conclusion is Conclusion.RULED_OUT and not d.is_control]
    out.sort(key=lambda d: d.effect.value if d.effect else 1.0)
    over = len(tested) + (len(found) > len(tested)) - MAX_ROWS
    small = out[: over + 1] if over > 0 else []
    if small and (most := small[-1].effect):
        effect = f"at most {units.slowdown(most.value, most.low, most.high)}"
        rows.append((listed([d.name for d in small]), effect, str(Conclusion.RULED_OUT)))
    for d in tested:
        if d in small:
            continue
        e, text = d.effect, str(d.conclusion)
        if d.share:
            text += f" {units.percent(d.share[0])} to {units.percent(d.share[1])}"
        if d.conclusion is Conclusion.UNDECIDED and d.reached and e and (e.low or 0) >= gap.factor:
            text += f": still {units.quantity(gap.metric, d.reached)} here"
        effect = NONE
        if e is not None:
            control = f"control: {units.measured(gap.metric, e)}"
            effect = control if d.is_control else units.slowdown(e.value, e.low, e.high)
            effect += "" if e.processes > 2 else f" ({units.plural('process', e.processes)})"
        rows.append((d.name, effect, text))
    if untested := [d.name for d in found if d.conclusion is Conclusion.NOT_TESTED]:
        rows.append((listed(untested), NONE, str(Conclusion.NOT_TESTED)))
    seen, expected = (units.quantity(gap.metric, v) for v in (gap.seen, gap.expected))
    side = "below" if METRICS[gap.metric].higher_is_better else "above"
    title = f"what could explain {seen} ({units.factor(gap.factor)} {side} {expected})"
    where = ", ".join(f"{suite.axis(k)}={v[0]}" for k, v in gap.where.criteria.items())
    return Table(
        columns=(title, f">effect on the step{f' at {where}' if where else ''}", "conclusion"),
        rows=tuple(rows),
    )


# --- what to do next ---------------------------------------------------------------------
