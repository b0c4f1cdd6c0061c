"""The first screen of a report: its first five lines, the answers, and the suspects.

Every sentence comes from the rules, rows and records that the rest of the page shows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness import units
from harness.analysis.expectation import Assessment, Judgement
from harness.analysis.scaling import ScalingFit
from harness.analysis.suspects import Conclusion, Diagnosis, Reproduction
from harness.records import (
    METRICS,
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
from harness.report.tables import NONE, Table, bends, factors_text
from harness.report.text import case_names, listed, sampling_bullet, shared_name
from harness.report.verdict_text import (
    NO,
    NOT_MEASURED,
    OPEN,
    WORDS,
    YES,
    margin_text,
    met_sentence,
    misses,
    needed_text,
    rule_sentence,
    verdict_sentence,
    word,
)

MAX_ROWS, MAX_OTHERS = 8, 2
"""Of the first screen: rows of its table, and others that it names: rules that no part asks, cases
that miss an expectation."""
_MISSED = (Judgement.BELOW, Judgement.ABOVE)
SEE_WHY = "see Why"
"""The answer to the part that the suspects answer."""
_JUDGED = (Judgement.MET, Judgement.UNDECIDED, *_MISSED)
_ELSEWHERE = (Fact.ENDED, Fact.NO_PARTNER, Fact.ALLOWED)
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
            other = suite.provider(partner.workload, partner.provider)
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

    def bare(_: RuleResult, f: Finding) -> Finding:
        ranged = f.low is not None or f.high is not None
        return replace(f, detail="") if ranged or f.fact in _ELSEWHERE else f

    return _each(v, bare)


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
        (workload,) = m.criteria.get("workload", ("",))[:1]
        words = {suite.axis(name): values for name, values in m.criteria.items()}
        if providers := words.get("provider"):
            names = (suite.provider(str(workload), str(p)) for p in providers)
            words["provider"] = tuple(dict.fromkeys(names))
        return Match(criteria=words)

    against, axis = rule.against and match(rule.against), rule.axis and suite.axis(rule.axis)
    return replace(rule, match=match(rule.match), against=against, axis=axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the question with its answer."""

    question: str
    word: str
    """One of WORDS, or SEE_WHY."""
    said: str
    """The number that decides."""
    limit: str = ""
    """The number that is needed."""


def first_lines(
    found: Sequence[Part], v: Verdict, run: Run, *, cost: str, why: str, step: str, trust: str
) -> tuple[tuple[str, str], ...]:
    """Label and text of five lines, each understood alone: what was asked, the answer, why, what to
    do next, how far to trust it. Without a text for it, a line is left out.

    Args:
        v: With the names to show, and brief.
        cost: What the suite's number of steps costs.
    """
    said = "".join(sampling_bullet(run)) or f"{_answer(found, v)}{cost}"
    lines = {"Asked": run.suite.question, "Answer": said, "Why": why}
    if not run.ended_at:
        lines["Answer"] = "Not yet: the run is unfinished."
    lines |= {"Next": step or "Nothing: the limits are met.", "Trust": f"{trust}."}
    return tuple((label, text) for label, text in lines.items() if text)


def outcome(found: Sequence[Part], v: Verdict) -> str:
    """For the title: `50,000 steps in 24 hours? Yes`."""
    main = _main(found)
    said = f"{main.question} {main.word.capitalize()}" if main else v.said
    return f"{said}; {v.not_measured} not measured" if main and v.not_measured else said


def _main(found: Sequence[Part]) -> Part | None:
    """The first part that this run answers; without one the first of all."""
    return next((p for p in found if p.word != NOT_MEASURED), next(iter(found), None))


def _answer(found: Sequence[Part], v: Verdict) -> str:
    """The main part with its number; of each other part that is not a yes, the word."""
    main = _main(found)
    if main is None:
        return f"{v.said}: {verdict_sentence(v, 1)}."
    rest: dict[str, list[str]] = {}
    for part in found:
        if part is not main and part.word != SEE_WHY:
            rest.setdefault(part.word, []).append(part.question)
    yes = len(rest.pop(YES, []))
    needed = f"; {main.limit} needed" if main.limit else ""
    said = [f"{main.question} {main.word.capitalize()}: {main.said}{needed}."]
    said += [f"{name.capitalize()}: {' '.join(questions)}" for name, questions in rest.items()]
    if yes:
        said.append(f"Yes to {f'{yes} more parts' if yes > 1 else 'one more part'}.")
    return " ".join(said)


def deciding(v: Verdict) -> RuleResult | None:
    """The rule of the worst decision: one with a number before one without, a missed one first."""
    counted = [r for r in v.rules if r.decides]
    if not counted or v.rule is None:
        return None
    worst = [r for r in counted if r.decision is v.rule.decision]
    numbers = [r for r in worst if any(f.estimate for f in r.findings)] or worst
    return next((r for r in numbers if any(misses(f, r.stated) for f in r.findings)), numbers[0])


def parts(
    v: Verdict, suite: Suite, found: Sequence[Diagnosis], again: Reproduction | None = None
) -> Iterator[Part]:
    """Each part of the question with its answer. `v` has the names to show."""
    for name, question in suite.parts.items():
        if suite.suspects and name == suite.suspects.asks:
            said = explained(found, suite, v.device, again)
            yield Part(question=question, word=SEE_WHY, said=said)
        else:
            yield _part(question, [r for r in v.rules if r.asks == name], v)


def parts_table(found: Sequence[Part]) -> Table | None:
    """One row a part of the question."""
    rows = tuple((p.question, p.word, p.said, p.limit or NONE) for p in found)
    return Table(columns=("question", "answer", "number", "limit"), rows=rows) if rows else None


def readiness(found: Sequence[Part], suite: Suite) -> Iterator[str]:
    """Where the question is whether to start, which is where the suite names a cost: what is ready,
    and what is not."""
    said = {"Ready": (YES,), "Conditional": (OPEN, "likely"), "Not ready": (NO, "likely not")}
    said["Not known"] = (NOT_MEASURED,)
    for state, words in said.items() if suite.cost else ():
        parts = [p.question for p in found if p.word.removesuffix(" (noted)") in words]
        if parts:
            yield f"**{state}**: {' '.join(parts)}"


def beside(v: Verdict, suite: Suite, noted: Sequence[Assessment] = ()) -> Iterator[str]:
    """Each rule that no part asks and that is not met, then the expectations that decide nothing.
    `v` has the names to show."""
    worst = v.rule.rule if v.rule and not suite.parts else ""
    others = [r for r in v.rules if r.asks not in suite.parts and r.rule != worst and r.applies]
    unmet = [r for r in others if r.decision is not Decision.GO]
    for r in unmet[:MAX_OTHERS]:
        yield f"**{word(r)}**: {r.rule}: {rule_sentence(r, 1)}{margin_text(r)}."
    if more := [f"“{r.rule}”" for r in unmet[MAX_OTHERS:]]:
        yield f"Not met either: {listed(more)}."
    if left := [f"“{r.rule}”" for r in v.rules if not r.applies and r.stated and not r.asks]:
        yield f"Not asked in this run: {listed(left)}."
    asked = [a for a in noted if a.expectation.counts is Weight.NOTE and a.judgement in _JUDGED]
    if asked:
        missed = [a for a in asked if a.judgement in _MISSED]
        met = [a for a in asked if a.judgement is Judgement.MET]
        said = "missed" if missed else "met" if len(met) == len(asked) else "open"
        those = missed or (met if said == "met" else asked)
        names = case_names(suite)
        missed.sort(key=lambda a: -a.factors[0])
        far = [f"{names[a.case_id]} ({factors_text([a])})" for a in missed]
        by = f": {listed(far)}" if far else ""
        by = by if len(far) <= MAX_OTHERS else f", farthest {far[0]}"
        count = f"{len(those)} of {units.plural('expectation', len(asked))}"
        yield f"Noted: {count} {said}{by}."


def _part(question: str, rules: Sequence[RuleResult], v: Verdict) -> Part:
    """The answer by the worst of the rules that ask for a part."""
    asked = [r for r in rules if r.applies]
    if not asked:
        other = any(f.fact is Fact.OTHER_DEVICE for r in rules for f in r.findings)
        why = f"this is {v.device}" if other else "this run lacks its cases"
        return Part(question=question, word=NOT_MEASURED, said=why)
    counting = [r for r in asked if r.counts]
    worst = min(map(word, counting or asked), key=WORDS.index)
    note = "" if counting else " (noted)"
    if not asked[1:]:
        (one,) = asked
        limit = needed_text(one)
        return Part(question=question, word=f"{worst}{note}", said=_number(one), limit=limit)
    met = [r for r in asked if word(r) == YES]
    unmet = [r for r in asked if r not in met]
    said = [f"{r.rule}: {_number(r)}; {needed_text(r)} needed" for r in unmet]
    if met:
        said.append(f"{'met: ' if unmet else ''}{listed([r.rule for r in met])}")
    return Part(question=question, word=f"{worst}{note}", said="; ".join(said))


def _number(r: RuleResult) -> str:
    met = r.decision is Decision.GO
    said = met_sentence(r, r.stated) if met and r.stated else rule_sentence(r, 1)
    return f"{said}{margin_text(r)}"


def explained(
    found: Sequence[Diagnosis], suite: Suite, device: str, again: Reproduction | None = None
) -> str:
    """What explains the gap of the suite's suspects, in one sentence; empty without any."""
    if suite.suspects is None:
        return ""
    gap = suite.suspects.gap
    tested = [d for d in found if d.conclusion is not Conclusion.NOT_TESTED]
    if found and not tested:
        return "not tested in this run"
    if not found:
        return f"the gap ({units.factor(gap.factor)}) is too small to explain by one run"
    seen = units.quantity(gap.metric, gap.seen)
    if again and not again.reproduced:
        return f"not reproduced: {_again(again, suite)}"
    if all(d.then == "off" or d.is_control for d in tested):
        return f"not explained: everything tested was off in the run that made {seen}"
    elsewhere = "" if gpu_matches(gap.gpu, device) else f"; not proven: seen on {gap.gpu}"
    if enough := [d for d in found if d.conclusion is Conclusion.ENOUGH]:
        nearest = min(enough, key=lambda d: (d.then != "on", _distance(d, gap.seen)))
        here = ""
        if nearest.reached is not None and nearest.reached < gap.expected:
            here = f", {units.quantity(gap.metric, nearest.reached)} here"
        on = ", which was on," if nearest.then == "on" else ""
        others = len(enough) - 1
        more = f"; {units.plural('other suspect', others)} would be too" if others else ""
        return f"{nearest.name}{on} is enough by itself{here}{more}{elsewhere}"
    if some := [d.name for d in found if d.conclusion is Conclusion.CONTRIBUTES]:
        return f"not explained; in part by {listed(some)}{elsewhere}"
    return f"not explained: no suspect costs enough here{elsewhere}"


def _distance(d: Diagnosis, seen: float) -> float:
    return abs(math.log((d.reached or math.inf) / seen))


def _again(again: Reproduction, suite: Suite) -> str:
    """`the settings of that day make 4,030 tokens/s here, 149x the 27 tokens/s seen`."""
    assert suite.suspects
    gap = suite.suspects.gap
    here, seen = (units.quantity(gap.metric, x) for x in (again.here, gap.seen))
    return f"the settings of that day give {here} here, {units.factor(again.times)} the {seen} seen"


def reproduced_sentence(again: Reproduction | None, suite: Suite) -> str:
    """Whether the settings of that day reproduce the gap; empty without a case of them."""
    if again is None:
        return ""
    said, case = _again(again, suite), case_names(suite)[again.case_id]
    does = "reproduce it" if again.reproduced else "do not reproduce it, whatever they cost here"
    return f"{said[0].upper()}{said[1:]} ({case}): they {does}."


def suspects_table(found: Sequence[Diagnosis], suite: Suite) -> Table | None:
    """One row a suspect: its effect, and the conclusion against the gap."""
    if suite.suspects is None or all(d.conclusion is Conclusion.NOT_TESTED for d in found):
        return None
    gap = suite.suspects.gap
    higher, rows = METRICS[gap.metric].higher_is_better, []
    tested = [d for d in found if d.effect or d.conclusion is not Conclusion.NOT_TESTED]
    out = [d for d in tested if d.conclusion is Conclusion.RULED_OUT and not d.is_control]
    out.sort(key=lambda d: d.effect.value if d.effect else 1.0)
    over = len(tested) + (len(found) > len(tested)) - MAX_ROWS
    small = out[: over + 1] if over > 0 else []
    if small and (most := small[-1].effect):
        effect = f"at most {units.slowdown(most.value, most.low, most.high)}"
        then = listed([*dict.fromkeys(d.then for d in small)])
        rows.append((listed([d.name for d in small]), then, effect, str(Conclusion.RULED_OUT)))
    for d in tested:
        if d in small:
            continue
        e, text = d.effect, str(d.conclusion)
        if d.share:
            text += f" {units.percent(d.share[0])} to {units.percent(d.share[1])}"
        spared = d.conclusion in (Conclusion.UNDECIDED, Conclusion.APART)
        if spared and d.reached and (d.reached > gap.expected) == higher:
            text += f": still {units.quantity(gap.metric, d.reached)} here"
        effect = NONE
        if e is not None:
            control = f"control: {units.measured(gap.metric, e)}"
            effect = control if d.is_control else units.slowdown(e.value, e.low, e.high)
            effect += "" if e.processes > 2 else f" ({units.plural('process', e.processes)})"
        rows.append((d.name, NONE if d.is_control else d.then, effect, text))
    if untested := [d.name for d in found if d.conclusion is Conclusion.NOT_TESTED]:
        rows.append((listed(untested), NONE, NONE, str(Conclusion.NOT_TESTED)))
    seen, expected = (units.quantity(gap.metric, v) for v in (gap.seen, gap.expected))
    side = "below" if higher else "above"
    title = f"what could explain {seen} ({units.factor(gap.factor)} {side} {expected})"
    where = ", ".join(f"{suite.axis(k)}={v[0]}" for k, v in gap.where.criteria.items())
    effect = f">effect on the step here{f', {where}' if where else ''}"
    return Table(columns=(title, "in that run", effect, "conclusion"), rows=tuple(rows))
