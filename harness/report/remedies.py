"""What makes a run slow or spoils its numbers, and what to do next: sentences, tables, commands."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from harness import units
from harness.analysis.causes import Cause, CauseKind
from harness.analysis.roofline import OUTSIDE, Stack
from harness.analysis.study import Study
from harness.analysis.suspects import Conclusion, Diagnosis
from harness.analysis.verdict import LOOSE
from harness.records import (
    OVER_STEPS,
    SPEEDS,
    Case,
    Decision,
    Fact,
    Finding,
    Outcome,
    RuleResult,
    Run,
    Verdict,
    worst_first,
)
from harness.report.profile import WORDS, shown
from harness.report.tables import NONE, Table
from harness.report.text import a_gpu, alone_command, filled, gap_place, listed, rest_command
from harness.report.verdict_text import distance, misses

MAX_STEPS = 5
AGAIN = "harness run {suite} -f {case}"
GRAPH = f"{AGAIN} -s measure.graph=true"


def evidence(cause: Cause) -> str:
    """What the record shows in the first case."""
    return filled(WORDS[cause.kind].get("evidence", ()), cause.facts) or shown(cause.facts)


def _graph_command(case_id: str, run: Run) -> str:
    """The case as a CUDA graph, if its axes or the harness can do that."""
    case = next((c for c in run.suite.cases if c.case_id == case_id), None)
    if case and "graph" in case.axes:
        return f"{AGAIN} -s graph=on"
    own = case and (case.program or any(m.over_steps for m in run.of(case_id)))
    return AGAIN if own else GRAPH


def remedy(cause: Cause, run: Run) -> str:
    """`Set `gc=off`: `harness run ...`; gain at most 1.35x`."""
    words = WORDS[cause.kind]
    command = words.get("command", AGAIN)
    case = cause.cases[0]
    if cause.kind is CauseKind.SETTING:  # the same case with the other value
        name = cause.about.partition("=")[0]
        case = re.sub(rf"(?<=/){re.escape(name)}=[^/]*", lambda _: cause.about, case)
    elif "graph" in words:
        command = _graph_command(case, run)
    named = {"suite": shlex.quote(run.suite.path), "case": shlex.quote(case)}
    known = cause.share and cause.kind is not CauseKind.HOST  # whose part of the wait is unknown
    gain = f"; gain at most {units.factor(1 / (1 - (cause.share or 0.0)))}" if known else ""
    return f"{words['remedy'].format(value=cause.about)}: `{command.format(**named)}`{gain}"


def relevant(found: Sequence[Cause], v: Verdict) -> list[Cause]:
    """The causes that spoil numbers, and those in cases that miss a rule, by what these show; all
    without a rule."""
    if not any(r.stated for r in v.rules):
        return [*found]
    asked = [r for r in v.rules if r.stated and r.applies and r.counts]
    timed = [r for r in asked if r.stated and r.stated.metric not in OVER_STEPS]
    missed = [f for r in timed for f in r.findings if misses(f, r.stated)]
    pairs = {(case_id, f.partner) for f in missed for case_id in f.cases}
    return [c for one in found if (c := one if one.share is None else one.within(pairs))]


def table(found: Sequence[Cause], names: Mapping[str, str]) -> Table | None:
    """One row a cause: its evidence in the first case, and what removing it saves."""
    rows = []
    for c in found:
        saved = None if c.kind in (CauseKind.HOST, CauseKind.POWER) else c.share
        share = NONE if saved is None else units.percent(saved)
        rows.append((str(c.kind), _where(c, names), evidence(c), share))
    columns = ("cause", "where", "evidence", ">saves at most, of the step")
    return Table(columns=columns, rows=tuple(rows)) if rows else None


def sentences(found: Sequence[Cause], names: Mapping[str, str]) -> Iterator[str]:
    """The first cause, every setting without effect, and a mechanism, for the first screen."""
    words = {CauseKind.SLOW_STEPS: "Seen", CauseKind.DISPATCH: "Mechanism in these cases"}
    for i, c in enumerate(found):
        if i == 0 or c.kind in (CauseKind.DEAD, CauseKind.FALLBACK, CauseKind.DISPATCH):
            yield f"**{words.get(c.kind, 'Cause')}: {c.kind}**: {_where(c, names)}: {evidence(c)}."


def _where(c: Cause, names: Mapping[str, str]) -> str:
    more = f" and {units.plural('more case', len(c.cases) - 1)}" if c.cases[1:] else ""
    return f"{names[c.cases[0]]}{more}"


# --- next steps ---------------------------------------------------------------------------


def slow_of(r: RuleResult) -> dict[Finding, float]:
    """What misses a rule, or an expectation, about speed -> how many times as fast it must become,
    slowest first."""
    stated = r.stated
    timed = [f for f in r.findings if (stated.metric if stated else f.metric) in SPEEDS]
    due = sorted(((distance(f, stated), f) for f in timed), key=lambda pair: -pair[0])
    return {f: times for times, f in due if times > 1}


def slowest(v: Verdict) -> tuple[str, ...]:
    """The case that misses a rule about speed farthest, and the one that it is compared with."""
    missed = [r for r in v.rules if r.applies and r.stated and r.decision is not Decision.GO]
    due = {f: times for r in missed for f, times in slow_of(r).items()}
    worst = max(due, key=lambda f: due[f], default=None)
    return (worst.subject, worst.partner) if worst else ()


def next_steps(
    v: Verdict,
    of: Study,
    found: Sequence[Cause] = (),
    parts: Sequence[Stack] = (),
    *,
    slow_host: bool = False,
) -> Iterator[str]:
    """What would turn the answer into a GO, the most urgent first, each with its command."""
    run = of.run
    if not run.ended_at:
        yield f"Finish the run: `{rest_command(run.stopped, run.folder)}`"
        return
    suite = shlex.quote(run.suite.path)
    urgent = [c for c in found if c.share is None and c.kind is not CauseKind.DEAD]
    yield from (remedy(c, run) for c in urgent)
    if v.not_measured:
        took = units.duration(run.elapsed_s or sum(m.wall_s for m in run.measurements))
        yield f"Run the suite on {a_gpu(v.not_measured)}: `harness run {suite}`, {took} here"
    asked = (r for r in v.rules if r.applies and r.counts and r.decision is not Decision.GO)
    left = worst_first(asked)
    tested = run.suite.suspects.tested if run.suite.suspects else ()
    controls = [s.control for s in tested if s.control]
    beside = {c.case_id for c in run.suite.cases if any(m.accepts(c) for m in controls)}
    timed = [r for r in left if not r.beside and not beside & {*r.evidence}]
    yield from _speed_up(timed, of, parts)
    yield from _steps(left, of, slow_host)
    yield from _keep_out(of.diagnoses, gap_place(run.suite))
    if of.reproduction and not of.reproduction.reproduced:
        yield "Look at the code of that day: the settings tested here do not explain what was seen"
    later = [c for c in relevant(found, v) if c not in urgent and (left or c.share)]
    yield from (remedy(c, run) for c in later[:1])
    if v.partial and not v.not_measured:
        rest = rest_command(run.stopped, run.folder) if run.stopped else f"harness run {suite}"
        more = "the rest of the suite" if run.stopped else f"all {v.partial.rpartition(' of ')[2]}"
        yield f"Run {more}: `{rest}`"


def _keep_out(diagnoses: Sequence[Diagnosis], where: str) -> Iterator[str]:
    """What each suspect that slows a step down costs, the most first, and how to avoid it."""
    spared = (Conclusion.RULED_OUT, Conclusion.WAS_OFF)
    told = [d for d in diagnoses if d.remedy and d.conclusion not in spared]
    slow = [(d, e) for d in told if (e := d.effect) and (e.low or 0) > 1]
    step = f"a step at {where}" if where else "a step"
    for d, e in sorted(slow, key=lambda one: -one[1].value):
        yield f"Use `{d.remedy}`: with {d.name} {step} is {units.ratio(e)}{units.repeats(e.n)}"


def _price(run: Run, ids: Iterable[str], processes: int = 1) -> str:
    """`, 12.3 s here`: what so many processes of each of these cases take; empty if none ran."""
    walls = [[m.wall_s for m in run.of(case_id)] for case_id in dict.fromkeys(ids)]
    wall_s = processes * sum(fmean(own) for own in walls if own)
    return f", {units.duration(wall_s)} here" if wall_s else ""


def _speed_up(left: Sequence[RuleResult], of: Study, parts: Sequence[Stack]) -> Iterator[str]:
    """By how much the slowest case of the worst rule must become faster, its largest part, and the
    command that times it."""
    taken = {s.case.case_id: s for s in parts}
    for r in left:
        if r.decision is not Decision.INCONCLUSIVE and (due := slow_of(r)):
            f, times = next(iter(due.items()))
            more = f", and {len(due) - 1} more" if due.keys() - {f} else ""
            said = f"Speed up {of.names.get(f.subject, f.subject)} by {units.factor(times)}{more}"
            if its := taken.get(f.subject):
                part = max(its.parts, key=lambda name: its.parts[name])
                share = units.percent(its.parts[part] / its.step_s)
                said += f"; {part} {'are' if part == OUTSIDE else 'is'} {share} of its step"
            if f.subject in of.names:
                alone = alone_command(of.run, f.subject)
                said += f"; time it: `{alone}`{_price(of.run, [f.subject])}"
            yield said
            return


def _steps(left: Sequence[RuleResult], of: Study, slow_host: bool) -> Iterator[str]:
    """What repeats a failure, and measures what is absent or, of what decides, open."""
    found = [f for r in left for f in r.findings]
    asked = [f for r in left if not r.beside for f in r.findings]
    run, cases = of.run, {c.case_id: c for c in of.run.suite.cases}
    again = f"harness run {shlex.quote(run.suite.path)}"
    ended = [f for f in found if f.fact is Fact.ENDED and f.outcome is not Outcome.UNSUPPORTED]
    for f in ended[:1]:
        alone = alone_command(run, f.subject)
        yield f"Reproduce {of.names.get(f.subject)} ({units.outcome_name(f.outcome)}): `{alone}`"
    partners = [(f, c) for f in found if f.fact is Fact.NO_PARTNER and (c := cases.get(f.partner))]
    lacking = {c.case_id: c for f, c in partners if f.outcome not in c.allow}
    if lacking:
        theirs = listed([*dict.fromkeys(c.provider for c in lacking.values())])
        install = all(f.outcome is Outcome.UNSUPPORTED for f, c in partners)
        first = f"Install what is needed by {theirs}" if install else f"Time {theirs}"
        yield f"{first}: `{again} {_only(lacking, cases)}`"
    loose = [i for f in asked if f.fact in LOOSE or f.likely for i in (*f.cases, f.partner)]
    if loose := [i for i in loose if i in cases]:
        made = [cases[i].settings.most for i in loose]
        more = 2 * max(made) if min(made) > 1 else 3
        only = f"{again} {_only(loose, cases)}"
        hosted = any(f.busy and f.fact in LOOSE and f.likely is not Decision.GO for f in asked)
        if slow_host or hosted:
            yield f"Measure on a host that is not slow: `{only}`"
        else:
            said = f"Measure in {more} processes per case"
            yield f"{said}: `{only} -s measure.processes={more}`{_price(run, loose, more)}"


def _only(ids: Iterable[str], cases: Mapping[str, Case]) -> str:
    """`-f 'train/dense/*'`: the cases of their workloads and providers; one alone by its id."""
    groups: dict[str, set[str]] = {}
    for c in filter(None, map(cases.get, ids)):
        groups.setdefault(f"{c.workload}/{c.provider}*", set()).add(c.case_id)
    chosen = (group if len(of) > 1 else next(iter(of)) for group, of in groups.items())
    return " ".join(f"-f {shlex.quote(one)}" for one in chosen)
