"""The first screen of a report: the answer, what to do next, and how far to trust it.

Every sentence comes from the rules, rows and records that the rest of the page shows.
"""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from harness import units
from harness.analysis.causes import Cause
from harness.analysis.suspects import Conclusion, Diagnosis
from harness.records import (
    METRICS,
    WORST_FIRST,
    Case,
    CaseSummary,
    Decision,
    Fact,
    Finding,
    Measurement,
    Outcome,
    RuleResult,
    Run,
    Suite,
    Verdict,
    Weight,
    gpu_matches,
)
from harness.report.failures import Failure
from harness.report.remedies import MINOR, excess, relevant, remedy, speed_up
from harness.report.tables import NONE, Table
from harness.report.text import listed, outcome_name, plural, rest_command
from harness.report.verdict_text import needed_text, rule_sentence, verdict_sentence

MAX_STEPS = 3
"""Commands that the first screen offers."""
_SLOW = (Fact.INTERVAL, Fact.EXPECTED)
_LOOSE = (Fact.ACROSS, Fact.NO_INTERVAL, Fact.TOO_FEW_PROCESSES, Fact.SINGLE_PROCESSES)


def names(suite: Suite) -> dict[str, str]:
    """Case id -> the suite's label for it, or the id if the suite has none or it is not unique."""
    labels = {c.case_id: suite.label(c) for c in suite.cases}
    count = Counter(labels.values())
    return {i: name if name and count[name] == 1 else i for i, name in labels.items()}


def named(v: Verdict, suite: Suite) -> Verdict:
    """The verdict with short names for its cases. The partner of a pair is named by what differs
    from the case."""
    short, cases = names(suite), {c.case_id: c for c in suite.cases}

    def about(f: Finding) -> Finding:
        partner, ours = cases.get(f.partner), cases.get(f.subject)
        other = short.get(f.partner, f.partner)
        if partner and ours and partner.provider != ours.provider:
            other = partner.provider
        name = short.get(f.subject) or _group(f, suite, cases)
        return replace(f, subject=name, partner=other)

    def result(r: RuleResult) -> RuleResult:
        found, perhaps = (tuple(map(about, of)) for of in (r.findings, r.perhaps))
        return replace(r, findings=found, perhaps=perhaps)

    return replace(v, rule=v.rule and result(v.rule), rules=tuple(map(result, v.rules)))


def _group(f: Finding, suite: Suite, cases: Mapping[str, Case]) -> str:
    """The label that the cases of a group share, or the group's id."""
    labels = [suite.label(cases[i]).split(", ") for i in f.cases if i in cases]
    shared = [part for part in (labels or [[]])[0] if all(part in own for own in labels)]
    return ", ".join(shared) if any(shared) else f.subject


# --- the answer --------------------------------------------------------------------------


def answers(v: Verdict, suite: Suite) -> Iterator[str]:
    """A sentence for each part of the question, then each other rule that is not met. `v` has the
    names to show."""
    diagnosed = suite.suspects.asks if suite.suspects else ""
    for part, question in suite.parts.items():
        if part == diagnosed:
            continue
        yield f"**{question} {_part([r for r in v.rules if r.asks == part], v)}"
    if not suite.parts:
        yield f"**{v.said}**: {verdict_sentence(v)}."
    worst = v.rule.rule if v.rule and not suite.parts else ""
    for r in v.rules:
        if r.asks in suite.parts or r.rule == worst or not r.applies:
            continue
        if r.decision is not Decision.GO:
            yield f"**{r.said}**: {r.rule}: {rule_sentence(r)}."
    if left := [f"“{r.rule}”" for r in v.rules if not r.applies and r.stated and not r.asks]:
        yield f"Not asked in this run: {listed(left)}."


def _part(rules: Sequence[RuleResult], v: Verdict) -> str:
    """`Yes.** lowest of 10 pairs: 2.76x ...; 1x needed.`"""
    asked = [r for r in rules if r.applies]
    if not asked:
        other = any(f.fact is Fact.OTHER_DEVICE for r in rules for f in r.findings)
        why = f"this is {v.device}" if other else "this run lacks its cases"
        return f"Not measured**: {why}."
    counting = [r for r in asked if r.counts]
    worst = min(counting or asked, key=lambda r: WORST_FIRST.index(r.decision))
    said = "; ".join(f"{rule_sentence(r)}{_needed(r)}" for r in asked)
    note = "" if counting else " (a note: it decides nothing)"
    return f"{_word(worst)}**{note}: {said}."


def _word(result: RuleResult) -> str:
    """The answer to a question of yes or no."""
    facts = {f.fact for f in result.findings}
    match result.decision:
        case Decision.GO:
            return "Yes"
        case Decision.INCONCLUSIVE:
            return "Not decided"
        case Decision.CONDITIONAL if facts <= {Fact.FEW} and _beyond_go(result):
            return "Yes, as far as one process shows"
        case Decision.CONDITIONAL if facts == {Fact.NO_PARTNER}:
            every = len(result.findings) == result.judged
            return "Not measured" if every else "In part"
        case Decision.CONDITIONAL if Fact.NO_PARTNER in facts:
            return "In part"
        case Decision.CONDITIONAL if result.stated and result.stated.counts is Weight.FAIL:
            return "Not quite"
        case _:
            return "No"


def _beyond_go(result: RuleResult) -> bool:
    go = result.stated.go if result.stated else 0.0
    return all(f.estimate is not None and f.estimate.value >= go for f in result.findings)


def _needed(result: RuleResult) -> str:
    return f"; {needed_text(result.stated)}" if result.stated else ""


def explained(found: Sequence[Diagnosis], suite: Suite, device: str) -> Iterator[str]:
    """What explains the gap of the suite's suspects: one sentence, the table has the rest."""
    if suite.suspects is None:
        return
    gap = suite.suspects.gap
    head = f"**{suite.parts.get(suite.suspects.asks, 'What explains the gap?')}"
    if not found:
        yield f"{head}** The gap ({units.factor(gap.factor)}) is too small to explain by one run."
        return
    by = {c: [d for d in found if d.conclusion is c] for c in Conclusion}
    parts = []
    if enough := by[Conclusion.ENOUGH]:
        nearest = min(enough, key=lambda d: abs(math.log((d.reached or math.inf) / gap.seen)))
        seen = units.quantity(gap.metric, nearest.reached or 0.0)
        many = f"; nearest to what was seen: {nearest.name} ({seen})" if len(enough) > 1 else ""
        parts.append(f"enough by itself: {listed([d.name for d in enough])}{many}")
    for c in (Conclusion.CONTRIBUTES, Conclusion.UNDECIDED, Conclusion.RULED_OUT):
        if those := by[c]:
            parts.append(f"{c}: {listed([d.name for d in those])}")
    if not gpu_matches(gap.gpu, device):
        parts.append(f"the gap is from {gap.gpu}, the effects from {device}: no proof of a cause")
    yield f"{head}** {'; '.join(parts)}."


def suspects_table(found: Sequence[Diagnosis], suite: Suite) -> Table | None:
    """One row a suspect: its effect, and the conclusion against the gap."""
    if suite.suspects is None or not found:
        return None
    gap = suite.suspects.gap
    rows = []
    for d in found:
        if d.conclusion is Conclusion.NOT_TESTED and d.effect is None:
            continue
        e, text = d.effect, str(d.conclusion)
        if d.share:
            text += f" {units.percent(d.share[0])} to {units.percent(d.share[1])}"
        effect = NONE
        if e is not None:
            control = f"control: {units.measured(gap.metric, e)}"
            effect = control if d.is_control else units.slowdown(e)
            effect += "" if e.processes > 2 else f" ({plural('process', e.processes)})"
        rows.append((d.name, effect, text))
    if untested := [d.name for d in found if d.conclusion is Conclusion.NOT_TESTED]:
        rows.append((listed(untested), NONE, str(Conclusion.NOT_TESTED)))
    seen, expected = (units.quantity(gap.metric, v) for v in (gap.seen, gap.expected))
    side = "below" if METRICS[gap.metric].higher_is_better else "above"
    title = f"what could explain {seen} ({units.factor(gap.factor)} {side} {expected})"
    where = ", ".join(f"{k}={v[0]}" for k, v in gap.where.criteria.items())
    return Table(
        columns=(title, f">effect on the step{f' at {where}' if where else ''}", "conclusion"),
        rows=tuple(rows),
        remarks=(
            "Ruled out: four effects of this size together would not do; a control, which lacks "
            "the subject, does as well as was expected. Enough: the whole interval lies beyond the "
            f"gap. Source of the gap: {gap.source}.",
        ),
    )


# --- what to do next ---------------------------------------------------------------------


def next_steps(
    v: Verdict,
    run: Run,
    failed: Sequence[Failure],
    diagnoses: Sequence[Diagnosis] = (),
    found: Sequence[Cause] = (),
) -> tuple[str, ...]:
    """At most MAX_STEPS: what would turn the answer into a GO, each with its command."""
    cases = {c.case_id: c for c in run.suite.cases}
    commands = {f.case_id: f.command for f in failed if f.command}
    suite = shlex.quote(run.suite.path)
    urgent = [c for c in found if c.share is None and c.kind not in MINOR]
    steps = dict.fromkeys(remedy(c, run) for c in urgent)
    if v.not_measured:
        took = f" (took {units.duration(run.elapsed_s)} here)" if run.elapsed_s else ""
        steps[f"Run it on an {v.not_measured}{took}: `harness run {suite}`"] = None
    left = [r for r in v.rules if r.applies and r.counts and r.decision is not Decision.GO]
    for r in sorted(left, key=lambda r: WORST_FIRST.index(r.decision)):
        for step in _steps(r, cases, commands, run):
            steps[step] = None
    remedies = [d.remedy for d in diagnoses if d.conclusion is Conclusion.ENOUGH and d.remedy]
    if remedies:
        steps[f"Set `{' '.join(remedies)}`, so that what is enough by itself cannot run"] = None
    later = [c for c in relevant(found, v) if c not in urgent and (left or c.share)]
    slow = sorted(
        (f for r in left for f in r.findings if f.fact in _SLOW and f.subject in cases),
        key=_shortfall,
    )
    if over := excess(v, run):
        steps[speed_up(over, names(run.suite), run)] = None
        slow = []
    for f in [f for f in slow if _largest_part(run.of(f.subject))][:1]:
        part = _largest_part(run.of(f.subject))
        steps[f"Speed up {part} of `{f.subject}`"] = None
    steps |= dict.fromkeys(remedy(c, run) for c in later[:1])
    if v.partial:
        rest = rest_command(run.stopped, run.folder) if run.stopped else f"harness run {suite}"
        steps[f"Run the cases of the suite that this run lacks: `{rest}`"] = None
    return tuple(steps)[:MAX_STEPS]


def _shortfall(f: Finding) -> float:
    """The measured value as a share of the required one; the smallest is the largest miss."""
    value = f.estimate.value if f.estimate else 1.0
    if f.partner:
        return value
    return min(value / f.low if f.low else 1.0, f.high / value if f.high else 1.0)


def _steps(
    result: RuleResult, cases: Mapping[str, Case], commands: Mapping[str, str], run: Run
) -> Iterator[str]:
    facts = {f.fact for f in result.findings}
    again = f"harness run {shlex.quote(run.suite.path)}"
    if Fact.NOT_RUN in facts:
        yield f"Finish the run: `{rest_command(run.stopped, run.folder)}`"
    ended = [f for f in result.findings if f.fact is Fact.ENDED]
    for f in ended[:1]:
        alone = commands.get(f.subject, f"{again} -f {shlex.quote(f.subject)}")
        yield f"Reproduce the {outcome_name(f.outcome)} of `{f.subject}`: `{alone}`"
    for f in [f for f in result.findings if f.fact is Fact.NO_PARTNER][:1]:
        script = commands.get(f.partner)
        how = f"`{script}`" if script else units.ending_text(f.outcome, f.detail)
        yield f"Get a time of `{f.partner}`: {how}"
    if few := [f for f in result.findings if f.fact is Fact.FEW]:
        single = [c for f in few for c in (cases.get(f.subject), cases.get(f.partner)) if c]
        once = [c for c in single if c.settings.processes < 2]
        groups = dict.fromkeys(f"{c.workload}/{c.provider}/*" for c in once)
        filters = " ".join(f"-f {shlex.quote(g)}" for g in groups)
        yield f"Measure in three processes: `{again} {filters} -s measure.processes=3`"
    loose = [f for f in result.findings if f.fact in _LOOSE]
    for f in loose[:1]:
        more = 2 * max((c.settings.processes for i in f.cases if (c := cases.get(i))), default=3)
        filters = " ".join(f"-f {shlex.quote(i)}" for i in f.cases[:2])
        yield f"Decide “{result.rule}”: `{again} {filters} -s measure.processes={more}`"


def _largest_part(measured: Sequence[Measurement]) -> str:
    """The kernel with the most time in a step, or the wait for the host if that is longer."""
    for m in measured:
        if (b := m.breakdown) is not None and (b.launch_gap or 0) > 0.5:
            return f"the host: the GPU waits for {units.percent(b.launch_gap or 0)} of a step"
        if m.profile and m.profile.kernels:
            use = m.profile.kernels[0]
            return f"`{use.name[:60]}`, the kernel with the most time"
    return ""


# --- how far to trust it -----------------------------------------------------------------


def trust(run: Run, summaries: Sequence[CaseSummary], v: Verdict) -> Iterator[str]:
    """One line: processes, correctness, and what disturbed the numbers."""
    ok = [s for s in summaries if s.outcome is Outcome.OK]
    counts = sorted({e.processes for s in ok if (e := s.metrics.get("step_s"))})
    if counts:
        most = plural("process", counts[-1])
        yield f"{most if len(counts) == 1 else f'{counts[0]} to {most}'} a case"
    outcomes = Counter(outcome_name(s.outcome) for s in summaries)
    ended = ", ".join(f"{n} {name}" for name, n in outcomes.most_common())
    yield f"{plural('case', len(summaries))}: {ended}"
    if compared := _compared(run.measurements):
        behind = {i for r in v.rules if r.stated and r.applies for i in r.evidence}
        asked = [m for m in run.measurements if m.case_id in behind]
        none = bool(asked) and not any(m.accuracy and m.accuracy.tensors for m in asked)
        yield f"{compared}{', but none of a case behind the answer' if none else ''}"
    if apart := [f"`{s.case.case_id}`" for s in summaries if s.apart_s]:
        yield f"not repeatable, so without a speed: {listed(apart, 1)}"
    if unsteady := [
        f"`{s.case.case_id}`"
        for s in summaries
        if any(m.steady is False and m.outcome is Outcome.OK for m in run.of(s.case.case_id))
    ]:
        yield f"no steady state, so the numbers may still change: {listed(unsteady, 1)}"
    limited = [s for s in summaries if any("clock limited" in note for note in s.notes)]
    if limited:
        yield f"{plural('case', len(limited))} ran at a limited clock"
    if not run.ended_at:
        yield "**the run is unfinished**"


def _compared(measured: Sequence[Measurement]) -> str:
    """`95 of 96 processes were compared with a reference, largest error 0.59 of its bound`."""
    with_result = [m for m in measured if m.accuracy is not None and m.accuracy.tensors]
    if not with_result:
        return "nothing was compared with a reference" if measured else ""
    largest = _largest_error(with_result)
    return (
        f"{len(with_result):,} of {plural('process', len(measured))} were compared with a "
        f"reference; largest error {units.number(largest[0])} of its bound"
    )


def _largest_error(measured: Iterable[Measurement]) -> tuple[float, str]:
    """Of all outputs that have a bound: error over bound, and the output's name."""
    tensors = [t for m in measured if m.accuracy for t in m.accuracy.tensors if t.bound > 0]
    return max(((t.error / t.bound, t.name) for t in tensors), default=(0.0, ""))


def _sampled(compared: Sequence[Measurement]) -> str:
    """`; 6 by 90 of 8,192 to 92 of 65,536 rows`, if not all compared every row."""
    rows = [m.accuracy.sampled for m in compared if m.accuracy and m.accuracy.sampled]
    said = [f"{few:,} of {every:,}" for few, every in sorted(rows, key=lambda r: r[1])]
    ends = " to ".join(dict.fromkeys((said[0], said[-1]))) if said else ""
    return f"; {len(said)} by {ends} rows" if said else ""


def correctness(run: Run, summaries: Sequence[CaseSummary]) -> Table | None:
    """By workload and provider: how many processes were compared, how closely, and why not all."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for s in summaries:
        key = s.case.workload, s.case.provider
        groups.setdefault(key, []).extend(run.of(s.case.case_id))
    rows = []
    for (workload, provider), measured in groups.items():
        done = [m for m in measured if m.accuracy is not None and m.accuracy.tensors]
        share, tensor = _largest_error(done)
        why = Counter(
            m.accuracy.skipped if m.accuracy else f"no answer ({outcome_name(m.outcome)})"
            for m in measured
            if m not in done
        )
        skipped = "; ".join(f"{reason or 'not asked'}: {n}" for reason, n in why.most_common(2))
        error = f"{units.number(share)} ({tensor or 'the output'})" if done else NONE
        counted = f"{len(done)} of {len(measured)}{_sampled(done)}"
        rows.append((f"{workload}/{provider}", counted, error, skipped or NONE))
    columns = ("cases", ">processes compared", ">largest error / bound", "not compared")
    return Table(columns=columns, rows=tuple(rows)) if rows else None
