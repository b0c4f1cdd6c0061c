"""From a run to what the analysis finds in it, and to the values that its page prints."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from harness import units
from harness.analysis import scaling
from harness.analysis import verdict as verdicts
from harness.analysis.causes import CauseKind, causes
from harness.analysis.dead_axes import dead_axes
from harness.analysis.effects import Effect, effects, longest, versus
from harness.analysis.roofline import stacks
from harness.analysis.summary import summarise
from harness.analysis.suspects import diagnose, fingerprint, reproduction
from harness.records import (
    VARIABLE_PREFIXES,
    CaseSummary,
    Decision,
    Fact,
    Outcome,
    Run,
    Weight,
    gpu_matches,
    pairs,
)
from harness.report import (
    answer,
    conditions,
    explained,
    profile,
    remedies,
    steadiness,
    tables,
    text,
    verdict_text,
)
from harness.report.endings import failures, not_run
from harness.report.figures import Picture
from harness.report.markdown import code
from harness.report.pictures import draw, is_asked, judged
from harness.report.profile import counts, limit_sentence, limits, where_sentence, where_table
from harness.report.series.since import NO_RUN, since

MAX_RESULTS = 40
"""Rows of results on a page, but for its first table; the appendix has the others."""
MOST_WORDS = 50
"""Of a command that a page prints."""
PERFETTO = "https://ui.perfetto.dev"
"""Shows Chrome traces."""


class Study:
    """What the analysis finds in a run, each thing once."""

    def __init__(self, run: Run, before: Run | None = None) -> None:
        self.summaries = summarise(run)
        withdrawn = {s.case.case_id for s in self.summaries if s.withdrawn}
        known = (replace(m, tokens=None) if m.case_id in withdrawn else m for m in run.measurements)
        device = run.environment.device_name
        parts = {n: q.replace("{gpu}", device) for n, q in run.suite.parts.items()}
        suite = replace(run.suite, parts=parts)
        self.run = run = replace(run, measurements=tuple(known), suite=suite)
        self.names = text.case_names(run.suite)
        self.fits = scaling.fit(self.summaries)
        earlier = summarise(before) if before else ()
        self.changed = None
        if before:
            self.changed = since(before, run, earlier, self.summaries, self.names)
        judged_as = verdicts.judge(run.suite, run.environment, self.summaries, self.fits)
        pace = self.changed.pace if self.changed else {}
        self.verdict = answer.excused(judged_as, pace)
        self.expected = [
            (e, [answer.excuse(f, e, pace) for f in verdicts.by_case(e, self.summaries)])
            for e in run.suite.expectations
        ]
        first = remedies.slowest(self.verdict)
        asked = [s.case.case_id for s in judged(run, self.summaries)]
        self.stacks = stacks(run, self.summaries, asked, first=first)
        self.causes = causes(run, self.summaries)
        self.diagnoses = diagnose(run.suite, self.summaries)
        self.earlier = diagnose(run.suite, earlier)
        self.again = reproduction(run.suite, self.summaries)
        self.marks = fingerprint(run, self.summaries, pace)
        self.why = explained.line(self.diagnoses, run.suite, device, self.again, self.marks)
        # With the names to show, without what other sections say.
        self.shown = answer.brief(answer.named(self.verdict, run.suite, self.fits))
        self.parts = [*answer.parts(self.shown, run.suite, self.why)]


def build(
    run: Run, directory: Path, before: Run | None = None
) -> tuple[dict[str, object], tuple[Picture, ...]]:
    """The values that the template prints, by name, except those of a version; the figures.
    Records below the folder of the report are linked."""
    of = Study(run, before)
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
    run, v, suite, changed = of.run, of.verdict, of.run.suite, of.changed
    slow = bool(changed and changed.node)
    needed = remedies.next_steps(v, run, of.diagnoses, of.causes, of.stacks, slow_host=slow)
    search = [changed.step] if changed and changed.step else []
    steps = [*[*dict.fromkeys(needed)][: remedies.MAX_STEPS - len(search)], *search]
    relevant = remedies.relevant(of.causes, v)
    if suite.suspects:  # how the step of that day goes explains what somebody saw
        then = of.again.case_id if of.again else ""
        dispatch = [c for c in of.causes if c.kind is CauseKind.DISPATCH]
        how = [own for c in dispatch if (own := c.within({(then, "")}))]
        relevant = [*how, *(c for c in relevant if c.kind is not CauseKind.DISPATCH)]
    causes_said = [*remedies.sentences(relevant, of.names)]
    trust = steadiness.trust(run, of.summaries, v)
    notes = [(e, found) for e, found in of.expected if e.counts is Weight.NOTE]
    noted = [f for e, found in notes if gpu_matches(e.gpu, v.device) for f in found]
    lines = answer.first_lines(
        of.parts,
        of.shown,
        run,
        cost=conditions.cost_sentence(of.summaries, run, of.names),
        why=_why(of) or ("Why", next(iter(causes_said), "")),
        steps=steps,
        missed=sum(f.fact is Fact.DECIDED and f.decision is Decision.NO_GO for f in noted),
        node=changed.node if changed else "",
        trust="; ".join(trust),
    )
    return {
        "outcome": answer.outcome(of.parts, of.shown),
        "lines": lines,
        "status": verdict_text.status(v, run),
        "parts": answer.parts_table(of.parts),
        "answers": (
            *answer.beside(of.shown, suite),
            *([changed.regressed] if changed and changed.regressed else []),
            *text.crossovers(versus(of.summaries), suite),
        ),
        "why": causes_said,
        "suspects": explained.suspects_table(
            of.diagnoses, suite, of.earlier, str(changed.day) if changed else ""
        ),
        "fingerprint": explained.fingerprint_table(of.marks, suite),
        "reproduced": explained.reproduced_sentence(of.again, suite),
        "where": where_table(of.stacks, of.names),
        "next_steps": tuple(steps),
        "readiness": [*answer.readiness(of.parts, suite, of.summaries)],
        "cost": conditions.cost(of.summaries, run, of.names),
    }


def _why(of: Study) -> tuple[str, str] | None:
    """The cause of what was seen, if the suite asks for it; else the largest parts of a step, or
    what limits it in the cases that decide."""
    asks = of.run.suite.suspects.asks if of.run.suite.suspects else ""
    if of.why:
        return of.run.suite.parts.get(asks, "Why").rstrip("?"), of.why
    deciding = next((r.evidence for r in of.verdict.rules if r.stated and r.applies), ())
    asked = [s for s in of.summaries if s.case.case_id in deciding]
    takes = where_sentence(of.stacks, of.names) or limit_sentence(of.run, asked, of.names)
    return ("Why", takes) if takes else None


def _results(of: Study) -> dict[str, object]:
    """The sections of the workloads: those on the page, and those in the appendix."""
    suite, axis_effects = of.run.suite, effects(of.summaries)
    found = scaling.by_workload(of.summaries).items()
    ran = {w: m for w, m in found if any(s.outcome is not Outcome.UNSUPPORTED for s in m)}
    leads = any(map(_many, ran.values()))
    sections = {w: _section(of.run, w, m, axis_effects, leads) for w, m in ran.items()}
    counting = [r for r in suite.rules if r.counts is not Weight.NOTE]
    timed = [r.match for r in counting if tables.shows(r.metric)]
    stated = [*timed, *(e.match for e in suite.expectations if tables.shows(e.metric))]
    asked = {c.workload for c in suite.cases if any(m.accepts(c) for m in stated)} & {*sections}
    several = {w for w in asked if [s.case.workload for s in of.summaries].count(w) > 1}
    paged: list[str] = []
    rows = 0
    for w in (w for w in sections if w in (several or asked or {*sections})):
        if not paged or rows + len(sections[w]["table"].rows) <= MAX_RESULTS:
            paged.append(w)
            rows += len(sections[w]["table"].rows)
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
        "operators": conditions.operators(of.summaries, run),
        "correctness": steadiness.correctness(run, of.summaries),
        "programs": [*text.ran_lines(run)],
        "limits": limits(run, of.summaries, names),
        "counts": counts(run, of.summaries, names),
        "causes": remedies.table(of.causes, names),
        "dead": [text.dead_axis_sentence(d, word) for d in dead_axes(run, of.summaries)],
        "failures": failures(of.summaries, run),
        "not_run": not_run(of.summaries, run, names),
        "expectations": tables.expectations(of.expected, run.environment, names),
        "judged_scaling": tables.scaling(fitted, names, word) if fitted else None,
        "scaling": tables.scaling(of.fits, names, word) if of.fits else None,
        "scaling_pictures": [n for n in pictures if n.startswith("scaling-")],
        "over_steps": steadiness.over_steps(run, names),
        "self_test": steadiness.self_test_sentence(run),
        "self_test_checks": steadiness.self_test_checks(run),
    }


def _closing(of: Study, directory: Path, before: Run | None) -> dict[str, object]:
    """Where and when it was measured, what changed since, and how to repeat it."""
    run, env = of.run, of.run.environment
    return {
        "since": of.changed,
        "commit": env.git.commit if env.git else "not available (not a git repository)",
        "dirty": env.uncommitted,
        "machine": conditions.environment_line(env),
        "models": sorted(
            {str(s.effective["model"]) for s in of.summaries if "model" in s.effective}
        ),
        "environment": conditions.environment(run),
        "doctor": (*conditions.requirement_bullets(run), *conditions.doctor_bullets(env)),
        "flags": tuple(conditions.flag_sentences(run)),
        "price": conditions.price_sentence(run),
        "time_use": conditions.time_use_sentence(run),
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
    few = len(pairs(summaries, "provider")) <= tables.MAX_ROWS
    kept, where = (summaries, None) if few or not far else (some, (axis, f"{far:.10g}"))
    first = pairs(kept, "provider")[: tables.MAX_ROWS]
    return {s.case.case_id for group in first for s in group}, where


def _many(members: Sequence[CaseSummary]) -> bool:
    """Whether a table of these cases by provider is too long for the page."""
    providers = len({s.case.provider for s in members})
    rows = len(pairs(members, longest(members)))
    return providers > tables.MAX_RATIOS + 1 and rows > tables.MAX_ROWS


def _section(
    run: Run,
    workload: str,
    members: Sequence[CaseSummary],
    axis_effects: Sequence[Effect],
    leads: bool,
) -> dict[str, Any]:
    """The results of one workload. `leads`: by the fastest provider of each case."""
    cases = [s.case for s in members]
    moving = tables.varying(cases)
    several = len({c.provider for c in cases}) > 1
    leads = leads and several
    fixed = ", ".join(
        f"{run.suite.axis(name)}={units.scalar(value)}"
        for name, value in {
            "provider": run.suite.provider(workload, cases[0].provider),
            **cases[0].axes,
        }.items()
        if name not in moving and (name == "provider" or all(c.get(name) == value for c in cases))
    )
    common, effective = conditions.effective(members)
    ids, where = _essential(members)
    page = [s for s in members if s.case.case_id in ids]
    sure = any(e.low is not None for s in members for e in s.metrics.values())
    full = tables.pivot(members, run) if several else tables.results(members, run)
    shown, which = full, ""
    if leads:
        shown = tables.leaders(members, run)
        if len(shown.rows) > tables.MAX_ROWS:
            which = "The first rows; "
            shown = replace(shown, rows=shown.rows[: tables.MAX_ROWS])
    elif len(page) < len(members):
        shown = tables.pivot(page, run) if several else tables.results(page, run)
        which = (
            f"Rows with {run.suite.axis(where[0])}={where[1]}; " if where else "The first rows; "
        )
    if shown is not full:
        said = f"{which or 'By provider: '}the appendix has all {len(full.rows)}."
        said = f"Fixed: {fixed}. {said}" if leads else said
        shown = replace(shown, remarks=(" ".join((said, *shown.remarks)),))
    waits = profile.host_bound(run, members) if several else ""
    # The table shows how a step grows, and compares the providers.
    told = {"provider" if several else "", longest(members) if len(members) == 2 else ""}
    own = [e for e in axis_effects if e.workload == workload and e.axis not in told]
    return {
        "title": workload,
        "fixed": "" if leads else fixed,
        "table": replace(shown, remarks=(*shown.remarks, waits)) if waits else shown,
        "full": full if shown is not full else None,
        "details": tables.results(members, run, intervals=sure) if sure or several else None,
        "per_token": any(s.tokens for s in members),
        "effects": []
        if leads
        else [
            *text.together_sentences(own, run.suite.axis),
            *text.effect_sentences(own, run.suite.axis),
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
    changed = ", but for what was not committed" if env.uncommitted else ""
    lines += [f"git checkout {env.git.commit}  # the code of the run{changed}"] if env.git else []
    lines += [f"# with {env.interpreter}"] if env.interpreter else []
    if env.command:
        program = PurePath(env.command[0]).name
        long = f"# {len(env.command)} words: `command` in the first line of the record"
        short = len(env.command) <= MOST_WORDS
        lines.append(shlex.join([program, *env.command[1:]]) if short else long)
    if run.suite.name != PurePath(run.suite.path).stem:
        return tuple(lines)  # a study made its cases itself
    there = [c.case_id for c in run.suite.cases]
    decides = [i for r in of.verdict.rules if r.stated and r.applies for i in r.evidence]
    only = shlex.quote(next((i for i in decides if i in there), there[0]))
    lines.append(f"harness run {shlex.quote(run.suite.path)} -f {only}  # one case alone")
    return tuple(lines)


def _artefacts(run: Run, directory: Path) -> tuple[str, ...]:
    """The record, and the folder of the logs where it is."""
    folder = Path(run.folder)
    record = code(str(folder / "run.jsonl"))
    if folder.resolve().is_relative_to(directory.resolve()):
        folder = folder.resolve().relative_to(directory.resolve())
        inside = str(folder / "run.jsonl")
        record = f"[{code(inside)}]({quote(inside)})"
    lines = [f"{record}: environment, suite and every measurement with its samples"]
    if Path(run.folder, "logs").is_dir():
        # No link: logs stay on the machine of the run, and reports are read elsewhere.
        logs = code(str(folder / "logs"))
        lines.append(f"{logs}: output of the processes, and traces for {code(PERFETTO)}")
    return tuple(lines)
