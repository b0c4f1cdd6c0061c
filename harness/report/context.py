"""From a run to what the analysis finds in it, and to the values that its page prints."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from harness import units
from harness.analysis import scaling
from harness.analysis import verdict as gate
from harness.analysis.causes import Cause, CauseKind, causes
from harness.analysis.dead_axes import dead_axes
from harness.analysis.effects import Effect, Versus, effects, longest, versus
from harness.analysis.expectation import Assessment, assess
from harness.analysis.overhead import time_use
from harness.analysis.roofline import Stack, stacks
from harness.analysis.scaling import ScalingFit
from harness.analysis.summary import Spread, spreads, summarise
from harness.analysis.suspects import (
    Diagnosis,
    Fingerprint,
    Reproduction,
    diagnose,
    fingerprint,
    reproduction,
)
from harness.records import VARIABLE_PREFIXES, CaseSummary, Run, Verdict, Weight
from harness.report import (
    answer,
    conditions,
    explained,
    remedies,
    steadiness,
    tables,
    text,
    verdict_text,
)
from harness.report.answer import Part
from harness.report.endings import failures, not_run
from harness.report.figures import Picture
from harness.report.markdown import code
from harness.report.pictures import draw, is_asked, judged
from harness.report.profile import profile_section, where_sentence, where_table
from harness.report.series.since import NO_RUN, Since, since

PERFETTO = "https://ui.perfetto.dev"
"""Shows Chrome traces."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What the analysis finds in a run, each thing once."""

    run: Run
    summaries: Sequence[CaseSummary]
    fits: Sequence[ScalingFit]
    verdict: Verdict
    """By the rules of the suite."""
    shown: Verdict
    """The same with the names to show, without what other sections say."""
    parts: Sequence[Part]
    """Of the question, with their answers."""
    stacks: Sequence[Stack]
    against: Sequence[Versus]
    assessments: Sequence[Assessment]
    causes: Sequence[Cause]
    diagnoses: Sequence[Diagnosis]
    again: Reproduction | None
    why: str
    """What explains the gap of the suite's suspects, in one sentence."""
    fingerprint: Fingerprint | None
    changed: Since | None
    spreads: Sequence[Spread]
    sections: Mapping[str, dict[str, Any]]
    """The results by workload."""
    names: Mapping[str, str]
    """Id of a case -> its short name."""


def study(run: Run, before: Run | None = None) -> Study:
    """Analyse and judge a run.

    Args:
        before: The earlier run that it is compared with.
    """
    summaries = summarise(run)
    withdrawn = {s.case.case_id for s in summaries if s.withdrawn}
    known = (replace(m, tokens=None) if m.case_id in withdrawn else m for m in run.measurements)
    run = replace(run, measurements=tuple(known))
    suite, fits = run.suite, scaling.fit(summaries)
    names = text.case_names(suite)
    verdict = gate.judge(suite, run.environment, summaries, fits)
    against = versus(summaries)
    first = remedies.slowest(verdict)
    asked = [s.case.case_id for s in judged(run, summaries)]
    diagnoses, again = diagnose(suite, summaries), reproduction(suite, summaries)
    why = explained.line(diagnoses, suite, run.environment.device_name, again)
    shown = answer.brief(answer.named(verdict, suite, fits))
    groups, axis_effects = scaling.by_workload(summaries), effects(summaries)
    return Study(
        run=run,
        summaries=summaries,
        fits=fits,
        verdict=verdict,
        shown=shown,
        parts=[*answer.parts(shown, suite, why)],
        stacks=stacks(run, summaries, asked, first=first),
        against=against,
        assessments=assess(suite, run.environment, summaries),
        causes=causes(run, summaries),
        diagnoses=diagnoses,
        again=again,
        why=why,
        fingerprint=fingerprint(run, summaries),
        changed=since(before, run, summaries, names) if before else None,
        spreads=spreads(run),
        sections={
            workload: _section(run, workload, members, axis_effects)
            for workload, members in groups.items()
        },
        names=names,
    )


def build(
    run: Run, directory: Path, before: Run | None = None
) -> tuple[dict[str, object], tuple[Picture, ...]]:
    """The values that the template prints, by name, except those of a version; the figures.

    Args:
        directory: Folder of the report; records below it are linked.
        before: The earlier run that it is compared with.
    """
    of = study(run, before)
    pictures = draw(of.run, of.summaries, of.fits, of.stacks, of.verdict)
    values: dict[str, object] = {
        "run": of.run,
        "against": before.run_id if before else "",
        **_screen(of),
        **_results(of),
        **_evidence(of, [p.name for p in pictures]),
        **_closing(of, directory, before),
    }
    return values, pictures


def _screen(of: Study) -> dict[str, object]:
    """The first five lines, the answers, why, and what to do next."""
    run, v, suite = of.run, of.verdict, of.run.suite
    steps = (
        *remedies.next_steps(v, run, of.diagnoses, of.causes, of.stacks),
        *filter(None, [of.changed.step if of.changed else ""]),
    )[: remedies.MAX_STEPS]
    relevant = remedies.relevant(of.causes, v)
    if suite.suspects:  # how the step of that day goes explains what somebody saw
        then = of.again.case_id if of.again else ""
        how = [c.of(then) for c in of.causes if c.kind is CauseKind.DISPATCH and then in c.cases]
        relevant = [*how, *(c for c in relevant if c.kind is not CauseKind.DISPATCH)]
    causes_said = [*remedies.sentences(relevant, of.names)]
    worse = [of.changed.regressed] if of.changed and of.changed.regressed else []
    node = [of.changed.node] if of.changed and of.changed.node else []
    lines = answer.first_lines(
        of.parts,
        of.shown,
        run,
        cost=conditions.cost_sentence(of.summaries, run, of.names),
        why=_why(of) or ("Why", next(iter(causes_said), "")),
        step=next(iter(steps), ""),
        trust="; ".join((*node, *steadiness.trust(run, of.summaries, v, of.spreads, of.causes))),
    )
    return {
        "outcome": answer.outcome(of.parts, of.shown),
        "lines": lines,
        "status": verdict_text.status(v, run),
        "parts": answer.parts_table(of.parts),
        "answers": (
            *answer.beside(of.shown, suite),
            *worse,
            *text.crossovers(of.against, suite),
        ),
        "why": causes_said,
        "suspects": explained.suspects_table(of.diagnoses, suite),
        "fingerprint": explained.fingerprint_table(of.fingerprint, suite),
        "reproduced": explained.reproduced_sentence(of.again, suite),
        "where": where_table(of.stacks, of.names),
        "next_steps": steps,
        "cost": conditions.cost(of.summaries, run, of.names),
    }


def _why(of: Study) -> tuple[str, str] | None:
    """The cause of what was seen, if the suite asks for it; else the largest parts of a step."""
    asks = of.run.suite.suspects.asks if of.run.suite.suspects else ""
    if of.why:
        return of.run.suite.parts.get(asks, "Why").rstrip("?"), of.why
    takes = where_sentence(of.stacks, of.names)
    return ("Why", takes) if takes else None


def _results(of: Study) -> dict[str, object]:
    """The sections of the workloads: those on the page, and those in the appendix."""
    suite, sections = of.run.suite, of.sections
    counting = [r for r in suite.rules if r.counts is not Weight.NOTE]
    timed = [r.match for r in counting if tables.shows(r.metric)]
    stated = [*timed, *(e.match for e in suite.expectations if tables.shows(e.metric))]
    asked = {c.workload for c in suite.cases if any(m.accepts(c) for m in stated)} & {*sections}
    several = {w for w in asked if [s.case.workload for s in of.summaries].count(w) > 1}
    paged = several or asked or {*sections}
    return {
        "sections": [*sections.values()],
        "asked": [s for w, s in sections.items() if w in paged],
        "others": [s for w, s in sections.items() if w not in paged],
    }


def _evidence(of: Study, pictures: Sequence[str]) -> dict[str, object]:
    """What the answer rests on."""
    run, names, word = of.run, of.names, of.run.suite.axis
    fitted = [f for f in of.fits if is_asked(f, run.suite)]
    return {
        "verdict": of.verdict,
        "rules": tables.rules(of.shown, run.suite.parts),
        "correctness": steadiness.correctness(run, of.summaries),
        "profile": profile_section(run, of.summaries, names),
        "causes": remedies.table(of.causes, names),
        "dead": [text.dead_axis_sentence(d, word) for d in dead_axes(run, of.summaries)],
        "failures": failures(of.summaries, run),
        "not_run": not_run(of.summaries, run, names),
        "expectations": tables.expectations(of.assessments, names),
        "judged_scaling": tables.scaling(fitted, names, word) if fitted else None,
        "scaling": tables.scaling(of.fits, names, word) if of.fits else None,
        "scaling_pictures": [n for n in pictures if n.startswith("scaling-")],
        "over_steps": steadiness.over_steps(run, names),
        "steadiness": steadiness.table(of.spreads, of.summaries),
        "self_test": steadiness.self_test_sentence(run),
        "self_test_checks": steadiness.self_test_checks(run),
    }


def _closing(of: Study, directory: Path, before: Run | None) -> dict[str, object]:
    """Where and when it was measured, what changed since, and how to repeat it."""
    run, env = of.run, of.run.environment
    used = time_use(run)
    return {
        "since": of.changed,
        "commit": env.git.commit if env.git else "not available (not a git repository)",
        "dirty": env.uncommitted,
        "machine": conditions.environment_line(env),
        "environment": conditions.environment(run),
        "requirements": tuple(conditions.requirement_bullets(run)),
        "doctor": tuple(conditions.doctor_bullets(env)),
        "flags": tuple(conditions.flag_sentences(run)),
        "elapsed": conditions.elapsed(run),
        "time_use": conditions.time_use_sentence(used) if used else "not available",
        "commands": _commands(of, before),
        "exports": [
            f"export {n}={shlex.quote(v)}"
            for n, v in env.variables.items()
            if n.startswith(VARIABLE_PREFIXES)
        ],
        "artefacts": _artefacts(run, directory),
    }


def _essential(summaries: Sequence[CaseSummary]) -> tuple[set[str], tuple[str, str] | None]:
    """Ids of the cases that a page shows, and the axis and value of those at its far end."""
    axis = longest(summaries)
    far = max((scaling.positive(s, axis) for s in summaries), default=0.0)
    some = [s for s in summaries if scaling.positive(s, axis) == far]
    few = len(scaling.groups_along(summaries, "provider")) <= tables.MAX_ROWS
    kept, where = (summaries, None) if few or not far else (some, (axis, f"{far:.10g}"))
    first = scaling.groups_along(kept, "provider")[: tables.MAX_ROWS]
    return {s.case.case_id for group in first for s in group}, where


def _section(
    run: Run,
    workload: str,
    members: Sequence[CaseSummary],
    axis_effects: Sequence[Effect],
) -> dict[str, Any]:
    """The results of one workload."""
    cases = [s.case for s in members]
    moving = tables.varying(cases)
    several = len({c.provider for c in cases}) > 1
    fixed = ", ".join(
        f"{run.suite.axis(name)}={units.scalar(value)}"
        for name, value in {
            "provider": run.suite.provider(workload, cases[0].provider),
            **cases[0].axes,
        }.items()
        if name not in moving and (name == "provider" or all(c.get(name) == value for c in cases))
    )
    common, effective = tables.effective(members)
    ids, where = _essential(members)
    page = [s for s in members if s.case.case_id in ids]
    sure = any(e.low is not None for s in members for e in s.metrics.values())
    full = tables.pivot(members, run) if several else tables.results(members, run)
    shown = full
    if some := len(page) < len(members):
        shown = tables.pivot(page, run) if several else tables.results(page, run)
        which = f"Rows with {run.suite.axis(where[0])}={where[1]}" if where else "The first rows"
        said = f"{which}; the appendix has all {len(full.rows)}."
        shown = replace(shown, remarks=(" ".join((said, *shown.remarks)),))
    length = longest(members) if len(members) == 2 else ""  # the table shows how it grows
    return {
        "title": workload,
        "fixed": fixed,
        "table": shown,
        "full": full if some else None,
        "details": tables.results(members, run, intervals=sure) if sure or several else None,
        "per_token": any(s.tokens for s in members),
        "effects": [
            *text.effect_sentences(
                [
                    e
                    for e in axis_effects
                    if e.workload == workload
                    and e.axis != length
                    and not (several and e.axis == "provider")
                ],
                run.suite.axis,
            ),
        ],
        "notes": [f"`{s.case.case_id}`: {'; '.join(s.notes)}." for s in members if s.notes],
        "common": common,
        "effective": effective,
    }


def _commands(of: Study, before: Run | None) -> tuple[str, ...]:
    """The page again, from the stored run; then the run again, and the case that decides."""
    run, env = of.run, of.run.environment
    options = {"--rules": run.judged_by, "--against": before.run_id if before else NO_RUN}
    again = shlex.join([run.run_id, *(x for o in options.items() if o[1] for x in o)])
    lines = [f"harness report {again}  # this page again, from the stored run"]
    lines += [f"git checkout {env.git.commit}  # the code of the run"] if env.git else []
    lines += [f"# with {env.interpreter}"] if env.interpreter else []
    if env.command:
        program = PurePath(env.command[0]).name
        lines.append(shlex.join([program, *env.command[1:]]))
    if run.suite.name != PurePath(run.suite.path).stem:
        return tuple(lines)  # a study made its cases itself
    there = [c.case_id for c in run.suite.cases]
    decides = [i for r in of.verdict.rules if r.stated and r.applies for i in r.evidence]
    only = shlex.quote(next((i for i in decides if i in there), there[0]))
    lines.append(f"harness run {shlex.quote(run.suite.path)} -f {only}  # one case alone")
    return tuple(lines)


def _artefacts(run: Run, directory: Path) -> tuple[str, ...]:
    folder = Path(run.folder)

    def named(path: Path, *, link: bool = True) -> str:
        try:
            inside = path.resolve().relative_to(directory.resolve())
        except ValueError:
            return code(str(path))
        return f"[{code(str(inside))}]({quote(str(inside))})" if link else code(str(inside))

    lines = [
        f"{named(folder / 'run.jsonl')}: environment, suite and every measurement with its samples"
    ]
    logs = {m.log for m in run.measurements if m.log and (folder / m.log).is_file()}
    if logs:
        # No link: logs stay on the machine of the run, and reports are read elsewhere.
        where = named(folder / PurePath(min(logs)).parent, link=False)
        lines.append(f"{where}: output of {units.plural('process', len(logs))}")
    profiles = [m.profile for m in run.measurements if m.profile and m.profile.trace_bytes]
    kept = [p for p in profiles if p.trace]
    if traces := [p for p in kept if (folder / p.trace).is_file()]:
        first = named(folder / traces[0].trace, link=False)
        size = units.size(sum(p.trace_bytes for p in traces))
        others = f", and {len(traces) - 1} more beside it" if traces[1:] else ""
        lines.append(f"{first}{others}: Chrome traces, {size}, for {code(PERFETTO)}")
    if large := len(profiles) - len(kept):
        lines.append(f"{units.plural('Chrome trace', large)} too large to keep")
    return tuple(lines)
