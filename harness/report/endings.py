"""How cases and runs ended: the sections "Failures" and "What did not run" of a report; the last
lines on the screen, for a person who has never seen the harness: the verdict, three numbers, where
the report is, what to try next."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import units
from harness.analysis.statistics import times_better
from harness.analysis.study import Study
from harness.records import (
    CaseSummary,
    Decision,
    Evidence,
    Measurement,
    NonFiniteOrigin,
    Outcome,
    Run,
    Suite,
    Verdict,
    pairs,
)
from harness.report.answer import excused, named
from harness.report.markdown import clipped
from harness.report.tables import NONE, Table
from harness.report.text import alone_command, command_text, listed, together_sentences, why_ended
from harness.report.verdict_text import rule_reason, verdict_sentence

MAX_UNMET = 3
"""Rules that are not met, of which the reason is printed."""
NEXT = {
    "smoke": "On a GPU node: harness run smoke-gpu",
    "smoke-gpu": "The operator against dense attention and its peers: harness run attention",
}
"""Suite -> what to try after it."""
OWN = 'In your own repository: harness init --command "python train.py"'


# --- of a case ---------------------------------------------------------------------------

FAILED = frozenset(Outcome) - {Outcome.OK, Outcome.UNSUPPORTED}
MAX_DETAIL, MAX_CASES, MAX_OF_ONE = 240, 4, 2
"""Letters of a reason, cases of one reason that are named, and those if all are of one provider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failed case, in the words of the report. Of texts that do not apply, empty ones."""

    case_id: str
    outcome: str
    detail: str
    allowed: str
    """Why the suite allows it."""
    facts: tuple[str, ...]
    """What the evidence adds to the detail."""
    command: str
    """Runs the case alone, if the suite does not allow the outcome."""
    log: str
    """On this machine, in the run's folder."""


def failures(of: Study) -> tuple[Failure, ...]:
    """Every case of the run that ended otherwise than OK or unsupported, in the suite's order."""
    run, found = of.run, []
    for s in of.summaries:
        m = next((m for m in run.of(s.case.case_id) if m.outcome in FAILED), None)
        if m is None:
            continue
        seen, allowed = m.evidence or Evidence(), s.case.allow.get(m.outcome, "")
        frame = [f"innermost frame: {seen.frame}"] if seen.frame and not seen.silent_s else []
        failure = Failure(
            case_id=s.case.case_id,
            outcome=units.outcome_name(m.outcome),
            detail=m.detail.partition("\n")[0],
            allowed=allowed,
            facts=(*frame, *map(_origin, seen.origins)),
            command="" if allowed else alone_command(run, s.case.case_id),
            log=m.log if m.log and Path(run.folder, m.log).is_file() else "",
        )
        found.append(failure)
    return tuple(found)


def _origin(o: NonFiniteOrigin) -> str:
    """Where NaN or Inf came from, as a sentence."""
    if not o.value:
        finite = f"{o.computation}{f' ({o.precision})' if o.precision else ''}: finite"
        return f"{o.computation}: {o.note}" if o.note else finite
    where = [f"step {o.step + 1}" if o.step is not None else "", o.tensor]
    if o.module:
        where.append(f"in {o.module}")
    text = f"{o.computation} ({o.precision}): first {o.value} in {', '.join(filter(None, where))}"
    return f"{text}; {o.note}" if o.note else text


def not_run(of: Study) -> Table | None:
    """Cases that a provider declined, that the machine was not fit for, or that did not start; one
    row a reason. Failures have a section of their own."""
    run, rows = of.run, dict[tuple[str, str, str], list[CaseSummary]]()
    for s in of.summaries:
        outcome, measured = s.outcome, run.of(s.case.case_id)
        declined = next((m for m in measured if m.outcome is Outcome.UNSUPPORTED), None)
        if declined:
            outcome, why = declined.outcome, declined.detail
        elif outcome is None:
            why = s.detail or "the run ended before this case started"
        elif outcome is Outcome.IMPOSSIBLE or (
            outcome is Outcome.INVALID_ENVIRONMENT and all(m.samples_s for m in measured)
        ):
            why = why_ended(s)  # judged afterwards
        else:
            continue
        allowed = s.case.allow.get(outcome) if outcome else None
        reason = clipped(why.strip(), MAX_DETAIL) or NONE
        peer = "yes, a peer" if s.case.provider in run.suite.peers else NONE if s.stop else "no"
        key = units.outcome_name(outcome), reason, allowed or peer
        rows.setdefault(key, []).append(s)
    if not rows:
        return None
    shown = ((_whose(cases, of), *key) for key, cases in rows.items())
    return Table(columns=("cases", "outcome", "why", "allowed"), rows=tuple(shown))


def _whose(found: Sequence[CaseSummary], of: Study) -> str:
    """The cases, or how many of one provider if they are many."""
    if len(found) <= MAX_OF_ONE or len({s.case.provider for s in found}) > 1:
        return listed([of.names[s.case.case_id] for s in found], MAX_CASES)
    theirs = [c for c in of.run.suite.cases if c.provider == found[0].case.provider]
    shown = of.run.suite.provider(found[0].case.workload, found[0].case.provider)
    return f"{shown}: {len(found)} of {units.plural('case', len(theirs))}"


# --- of a run ----------------------------------------------------------------------------

Line = tuple[str, str]
"""A label and a text."""


def verdict_lines(of: Study) -> Iterator[Line]:
    """The verdict in one sentence, and the rules that are not met."""
    v = named(excused(of), of)
    decided = [r for r in v.rules if r.decides]
    unmet = [r for r in decided if r.decision is not Decision.GO]
    said = f"{verdict_sentence(v, 1)}{_checked(of.run)}" if len(unmet) < 2 else ""
    yield "Verdict", f"{v.said}: {said or f'{len(unmet)} of {len(decided)} rules are not met'}"
    for r in unmet[:MAX_UNMET] if not said else ():
        yield "", f"{r.decision}: {rule_reason(r, 1)}"
    if more := len(unmet[MAX_UNMET:]):
        yield "", f"and {units.plural('more rule', more)}"


def next_lines(of: Study) -> Iterator[Line]:
    """What to try next: after a failure its log and the command that repeats the case."""
    run = of.run
    steps = [f"Every number of this run: harness show {run.run_id}"]
    if run.suite.name in NEXT:
        steps = [NEXT[run.suite.name], OWN]
    if bad := next((m for m in run.measurements if m.outcome in FAILED or _unread(m)), None):
        steps = [f"Read its output: {run.folder}/{bad.log}"] if bad.log else []
        steps.append(f"Repeat it alone: {alone_command(run, bad.case_id)}")
        if _unread(bad):
            case = next(c for c in run.suite.cases if c.case_id == bad.case_id)
            way = f"harness init --command {shlex.quote(command_text(case))}"
            steps.append(f"Correct `progress` in {run.suite.path}, or let init find it: {way}")
    for i, step in enumerate(steps):
        yield "Next" if i == 0 else "", step


def _unread(m: Measurement) -> bool:
    """Whether a program ended, and its steps or metrics could not be read."""
    read = m.evidence.steps if m.evidence else None
    return m.outcome is Outcome.UNSUPPORTED and read is not None


def _checked(run: Run) -> str:
    """`; 28 processes agree with the reference`, `; 16 ..., 2 were not compared`."""
    ok = [m for m in run.measurements if m.outcome is Outcome.OK]
    agreed = sum(m.accuracy is not None and not m.accuracy.skipped for m in ok)
    if not agreed:
        return ""
    others = f", {len(ok) - agreed} were not compared" if agreed < len(ok) else ""
    verb = "agrees" if agreed == 1 else "agree"
    return f"; {units.plural('process', agreed)} {verb} with the reference{others}"


def number_lines(of: Study) -> Iterator[Line]:
    """What two axes do only together; up to three numbers: two providers compared, the speed, its
    growth along an axis."""
    suite, names = of.run.suite, of.names
    yield from (("Together", said) for said in together_sentences(of.effects, suite.axis))
    by_id = {s.case.case_id: s for s in of.summaries}
    timed = [s for s in of.summaries if s.outcome is Outcome.OK and "step_s" in s.metrics]
    if pair := _pair(timed, by_id, of.verdict):
        yield "Compared", f"{names[pair[0].case.case_id]}: {_compared(*pair, suite)}"
    if fast := next((s for s in timed if "tokens_per_s" in s.metrics), None):
        speed = units.value("tokens_per_s", fast.metrics["tokens_per_s"], unit=True)
        yield "Speed", f"{names[fast.case.case_id]}: {speed}"
    for f in of.fits:
        if f.last is not None:
            begin, end = f.last_ends
            law = f"{suite.axis(f.axis)}^{units.number(f.last.value, 2)}"
            provider = by_id[f.points[0].case_id].case.provider
            whose = f"{f.workload} {suite.provider(f.workload, provider)}"
            yield "Growth", f"{whose}: a step grows as {law} from {begin:,g} to {end:,g}"
            return


def _compared(ours: CaseSummary, theirs: CaseSummary, suite: Suite) -> str:
    """`nsa is 3.8x [2.5 … 5.8] slower than dense (153 ms and 39.8 ms a step)`."""
    a, b = ours.metrics["step_s"], theirs.metrics["step_s"]
    ratio = times_better(b, a, higher_is_better=False)
    first, second = (suite.provider(c.workload, c.provider) for c in (ours.case, theirs.case))
    steps = f"{units.duration(a.value)} and {units.duration(b.value)} a step"
    return f"{first} is {units.ratio(ratio)} than {second} ({steps})"


def _pair(
    timed: Sequence[CaseSummary], by_id: dict[str, CaseSummary], verdict: Verdict
) -> tuple[CaseSummary, CaseSummary] | None:
    """Two cases that differ in the provider alone: those of a rule, or the first of the suite."""
    found = [f for r in verdict.rules if r.applies for f in r.findings if f.partner and f.estimate]
    for f in found:
        pair = by_id[f.cases[0]], by_id[f.partner]
        if all(s in timed for s in pair) and pair[0].case.provider != pair[1].case.provider:
            return pair
    return next(((g[0], g[1]) for g in pairs(timed, "provider") if len(g) > 1), None)
