"""The first screen of a report: its first five lines, and the answers.

Every sentence comes from the rules, rows and records that the rest of the page shows.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from harness import units
from harness.analysis.scaling import ScalingFit
from harness.analysis.study import Study
from harness.records import (
    FAILURES,
    SPEEDS,
    CaseSummary,
    Decision,
    Fact,
    Finding,
    Match,
    Outcome,
    Rule,
    RuleResult,
    Run,
    Suite,
    Verdict,
)
from harness.report.tables import NONE, Table, bends
from harness.report.text import for_gpu, listed, shared_name
from harness.report.verdict_text import (
    BESIDE,
    NO,
    NOT_MEASURED,
    NOTED,
    OPEN,
    WORDS,
    YES,
    conditions,
    distance,
    margin_text,
    needed,
    needed_text,
    number,
    rule_sentence,
    verdict_sentence,
    word,
)

MET, _NO_YES = "met", (NO, "likely not", OPEN)
SEE_WHY = "see Why"
"""The answer to the part that the suspects answer."""
_ELSEWHERE = (Fact.ENDED, Fact.NO_PARTNER, Fact.ALLOWED)
"""Facts whose detail is in a section of its own: what failed or did not run, what was expected."""


def named(v: Verdict, of: Study, fits: Sequence[ScalingFit] = ()) -> Verdict:
    """The verdict with short names for its cases and axes, and the segments of curves that bend.
    The partner of a pair is named by what differs from the case."""
    suite, short, cases = of.run.suite, of.names, {c.case_id: c for c in of.run.suite.cases}
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
        ends = f"{fit.points[0].x:g}–{fit.points[-1].x:g}" if fit else ""
        if fit and f.estimate == fit.kernels:
            steps = fit.exponent or fit.slope
            of = f"{round(steps.value, 2) + 0.0:.2f}" if steps else "not known"
            by = f"by kernels, which decide; by steps, in part host-bound, {of}"
            f = replace(f, detail=f"over {suite.axis(fit.axis)} {ends} {by}")
        elif fit and f.estimate == fit.exponent and len(fit.segments) > 1:
            last, before = fit.segments[-1], ", ".join(bends(fit))
            ends = f"{last.begin.x:g}–{last.end.x:g}; before that {before}"
            f = replace(f, estimate=last.exponent, detail=f"over {suite.axis(fit.axis)} {ends}")
        elif fit and f.estimate == fit.last:
            begin, end = fit.last_ends
            f = replace(f, detail=f"over {suite.axis(fit.axis)} {begin:g}–{end:g}")
        elif fit and f.estimate == fit.exponent:
            f = replace(f, detail=f"over {suite.axis(fit.axis)} {ends}")
        return replace(f, subject=name, partner=other)

    return _each(v, about, lambda rule: rule and _worded(rule, suite))


def excused(of: Study) -> Verdict:
    """The verdict in which a speed is open, not missed, if it is missed by no more than the host of
    the run is slower, or met by the kernels alone on a slow host, or likely missed where the host
    sets it, and its rule is no NO-GO."""

    def result(r: RuleResult) -> RuleResult:
        if r.decision is Decision.NO_GO:
            return r
        return replace(r, findings=tuple(excuse(f, r.stated, of.pace) for f in r.findings))

    v = of.verdict
    return replace(v, rule=v.rule and result(v.rule), rules=tuple(map(result, v.rules)))


def excuse(f: Finding, stated: Rule | None, pace: Mapping[str, float]) -> Finding:
    """The finding of a rule, or without one of several expectations, as `excused` leaves it."""
    speed = f.metric in SPEEDS and not f.partner
    by_host = min((pace.get(i, 1.0) for i in f.cases), default=1.0)
    far = distance(f, stated)
    met_by_kernels = by_host > 1 and 0 < f.busy * far <= 1
    missed = f.fact is Fact.DECIDED and speed and far > 1 and (far <= by_host or met_by_kernels)
    perhaps = f.likely not in (None, Decision.GO) and speed and f.busy > 0
    return replace(f, fact=Fact.OPEN, likely=None) if missed or perhaps else f


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
    question: str
    word: str
    """One of WORDS, or SEE_WHY."""
    noted: bool = False
    """Whether only rules that are for information ask it."""
    said: str = ""
    """The number that decides, and of which case it is."""
    number: str = ""
    """The number alone."""
    limit: str = ""
    """The number that is needed."""
    asked: bool = True
    """Whether it decides."""
    condition: str = ""
    """What a person must keep, of a part that is met with a condition only."""

    @property
    def answer(self) -> str:
        """`no`, `open (for information)`."""
        return f"{self.word}{NOTED}" if self.noted else self.word


def first_lines(
    found: Sequence[Part],
    v: Verdict,
    run: Run,
    *,
    cost: str,
    why: tuple[str, str],
    steps: Sequence[str],
    missed: int,
    node: str,
    trust: str,
) -> tuple[tuple[str, str], ...]:
    """Label and text of five lines, each understood alone: what was asked, the answer, why, what to
    do next, how far to trust it. Without a text for it, a line is left out.
    `v` has the names to show; `why` is a label and a text; `missed` counts expectations that are
    for information; `node` says how slow the host is.
    """
    said = f"{_answer(found, v)}{cost}"
    deciding_parts = [q for n, q in run.suite.parts.items() if n in run.suite.deciding]
    asked = " ".join(deciding_parts) or run.suite.question
    lines = {"Asked": asked, "Answer": said, why[0]: why[1]}
    if not run.ended_at:
        lines["Answer"] = f"The run is unfinished. So far: {said}"
    quiet = f"Measure on a host that is not slow: `harness run {shlex.quote(run.suite.path)}`"
    which = "missed, for information (see Expected against actual)"
    noted = f"; {units.plural('expectation', missed)} {which}" if missed else ""
    doubted = node and any(p.answer == OPEN for p in found)
    nothing = quiet if doubted else f"Nothing: every limit that decides is met{noted}."
    step, *more = steps or [nothing]
    lines["Next"] = f"{step} ({len(more)} more below)" if more else step
    on = "" if v.device in asked else v.device
    lines["Trust"] = f"{'; '.join(filter(None, (on, node, trust)))}."
    return tuple((label, text) for label, text in lines.items() if text)


def outcome(found: Sequence[Part], v: Verdict) -> str:
    """For the title: `50,000 steps in 24 hours? Yes`."""
    main = _main(found)
    missed = [p for p in found if p.asked and p is not main and p.answer in (NO, "likely not")]
    each = (f"{p.question} {p.answer.capitalize()}" for p in ([main] if main else []) + missed)
    said = "; ".join(each) or v.said
    return f"{said}; {v.not_measured} not measured" if main and v.not_measured else said


def _main(found: Sequence[Part]) -> Part | None:
    """The first part that this run answers; without one the first of all."""
    answered = [p for p in found if p.word != NOT_MEASURED] or found
    return next((p for p in answered if p.asked), next(iter(answered), None))


def _answer(found: Sequence[Part], v: Verdict) -> str:
    """The main part, and each that decides and is no or open, with its number; the word of the
    others that decide or are not yes."""
    main = _main(found)
    if main is None:
        return f"{v.said}: {verdict_sentence(v, 1)}."
    shown = [main, *(p for p in found if p.asked and p is not main and p.answer in _NO_YES)]
    said = []
    for p in shown:  # `**Yes** (50,000 steps in 24 hours?): 10.0 ms; ≤ 1.73 s needed.`
        because = p.said if p is main else p.number
        number = f": {because}{needed(p.limit)}" if because else ""
        said.append(f"{_bold(_kind(p))} ({p.question}){number}.")
    rest: dict[tuple[str, str], list[str]] = {}
    for part in found:
        beside = part.word == YES and not part.asked  # the table below has it
        if part not in shown and part.word != SEE_WHY and not beside:
            why = f": {part.said}" if part.answer == NOT_MEASURED and not part.asked else ""
            rest.setdefault((_kind(part), why), []).append(part.question)
    if also := rest.pop((main.answer, ""), []):
        alone = [f": {p.number}" for p in found if p.limit and [p.question] == also]
        said.insert(1, f"{_bold(f'also {main.answer}')} ({' '.join(also)}){''.join(alone)}.")
    said += [f"{_bold(name)} ({' '.join(of)}){why}." for (name, why), of in rest.items()]
    return " ".join(said)


def _kind(part: Part) -> str:
    """The answer; where it changes nothing, it is marked so."""
    return part.answer if part.asked or part.word == SEE_WHY else f"{part.word}{NOTED}"


def _bold(word: str) -> str:
    """`**No, for information**`."""
    return f"**{word.replace(NOTED, f', {BESIDE}').capitalize()}**"


def parts(v: Verdict, suite: Suite, why: str) -> Iterator[Part]:
    """Each part of the question with its answer. `v` has the names to show."""
    for name, question in suite.parts.items():
        if suite.suspects and name == suite.suspects.asks:
            yield Part(question=question, word=SEE_WHY, said=why)
        else:
            part = _part(question, [r for r in v.rules if r.asks == name], v)
            noted = part.noted and v.asked  # else no part decides
            yield replace(part, noted=noted, asked=name in (suite.deciding or suite.parts))


def parts_table(found: Sequence[Part]) -> Table | None:
    """One row a part of the question."""
    rows = tuple((p.question, _kind(p), p.said, p.limit or NONE) for p in found)
    return Table(columns=("question", "answer", "number", "limit"), rows=rows) if rows else None


def readiness(
    found: Sequence[Part], suite: Suite, summaries: Sequence[CaseSummary]
) -> Iterator[str]:
    """Where the question is whether to start, which is where the suite names a cost: what is ready,
    on which condition, what is not, and which phases, the workloads in their order, ran."""
    said = {"Ready": (YES, "likely"), "Open": (OPEN,), "Not ready": (NO, "likely not")}
    said["Not known"] = (NOT_MEASURED,)
    asked = [p for p in found if p.asked and suite.cost]
    for state, words in said.items():
        if parts := [p.question for p in asked if p.word in words and not p.condition]:
            yield f"**{state}**: {' '.join(parts)}"
    for part in (p for p in asked if p.condition):
        yield f"**Conditional**: {part.question} {part.condition[:1].upper()}{part.condition[1:]}"
    yield from _phases(summaries) if suite.cost else ()


def _phases(summaries: Sequence[CaseSummary]) -> Iterator[str]:
    """Which workloads, in their order, ran as the suite allows, failed, or left a case open."""
    ends = {s.case.workload: "ran" for s in summaries}
    for s in summaries:
        wrong = s.outcome in (*FAILURES, Outcome.OUT_OF_MEMORY)
        if s.outcome not in (Outcome.OK, *s.case.allow) and ends[s.case.workload] != "failed":
            ends[s.case.workload] = "failed" if wrong else "are open"
    for state in dict.fromkeys(ends.values()):
        yield f"**Phases that {state}**: {listed([w for w, end in ends.items() if end == state])}"


def beside(v: Verdict, suite: Suite) -> Iterator[str]:
    """Each rule that no part asks and that is not met. `v` has the names to show."""
    worst = v.rule.rule if v.rule and not suite.parts else ""
    for r in v.rules:
        other = r.asks not in suite.parts and r.rule != worst and r.applies
        if other and r.decision is not Decision.GO:
            yield f"**{word(r)}**: {r.rule}: {rule_sentence(r, 1)}{margin_text(r)}."


def _part(question: str, rules: Sequence[RuleResult], v: Verdict) -> Part:
    """The answer by the worst of the rules that ask for a part."""
    asked = [r for r in rules if r.applies]
    if not asked:
        other = any(f.fact is Fact.OTHER_DEVICE for r in rules for f in r.findings)
        gpus = dict.fromkeys(for_gpu(r.stated.gpu) for r in rules if r.stated and r.stated.gpu)
        only = f"{listed([*gpus])}; " if gpus else ""
        why = f"{only}this is {v.device}" if other else "this run lacks its cases"
        return Part(question=question, word=NOT_MEASURED, said=why)
    counting = [r for r in asked if r.counts]
    worst = min(map(word, counting or asked), key=WORDS.index)
    missed = any(r.decision is Decision.NO_GO for r in counting)
    condition = "" if missed else "; ".join(conditions(counting))
    part = Part(question=question, word=worst, noted=not counting, condition=condition)
    if not asked[1:]:
        (one,) = asked
        return replace(part, said=_said(one), number=number(one), limit=needed_text(one))
    of: dict[str, list[RuleResult]] = {}
    for r in sorted(asked, key=lambda r: WORDS.index(word(r))):
        of.setdefault(word(r), []).append(r)
    deciding = of.pop(worst)
    said = [f"{r.rule}: {_said(r)}{needed(needed_text(r))}" for r in deciding]
    if worst == YES:
        said = [listed([r.rule for r in deciding]) if deciding[1:] else _said(deciding[0])]
    said += [
        f"{MET if w == YES else w}: {listed([r.rule for r in some])}" for w, some in of.items()
    ]
    first = f"{number(deciding[0])}{needed(needed_text(deciding[0]))}"
    return replace(part, said="; ".join(said), number=first)


def _said(r: RuleResult) -> str:
    return f"{rule_sentence(r, 1)}{margin_text(r)}"
