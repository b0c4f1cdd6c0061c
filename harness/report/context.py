"""From a run to what the analysis finds in it, and to the values that its page prints."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from harness import units
from harness.analysis import scaling
from harness.analysis.causes import CauseKind, causes
from harness.analysis.effects import longest
from harness.analysis.roofline import stacks
from harness.analysis.study import Study
from harness.analysis.suspects import diagnose, fingerprint
from harness.analysis.verdict import by_case
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
from harness.report.pictures import draw, is_asked
from harness.report.profile import counts, limit_sentence, limits, where_sentence, where_table
from harness.report.series.since import NO_RUN, since

MAX_RESULTS = 40
"""Rows of results on a page, but for its first table; the appendix has the others."""
MOST_WORDS = 50
"""Of a command that a page prints."""
PERFETTO = "https://ui.perfetto.dev"
"""Shows Chrome traces."""


class _Page:
    """What a page says of a run beyond its study."""

    def __init__(self, of: Study, before: Study | None) -> None:
        run = of.run
        self.of, self.before = of, before
        self.changed = since(before, of) if before else None
        of.pace = self.changed.pace if self.changed else {}
        self.verdict = answer.excused(of)
        self.expected = [
            (e, [answer.excuse(f, e, of.pace) for f in by_case(e, of.summaries)])
            for e in run.suite.expectations
        ]
        first = remedies.slowest(self.verdict)
        asked = [s.case.case_id for s in of.asked]
        self.stacks = stacks(run, of.summaries, asked, first=first)
        self.causes = causes(of)
        self.earlier = diagnose(run.suite, before.summaries) if before else ()
        self.again = of.reproduction
        self.marks = fingerprint(run, of.summaries, of.pace)
        device = run.environment.device_name
        self.why = explained.line(of.diagnoses, run.suite, device, self.again, self.marks)
        # With the names to show, without what other sections say.
        self.shown = answer.brief(answer.named(self.verdict, of, of.fits))
        self.parts = [*answer.parts(self.shown, run.suite, self.why)]
        self.rules = [r for r in self.verdict.rules if r.stated and r.applies]


def build(
    of: Study, directory: Path, before: Study | None = None
) -> tuple[dict[str, object], tuple[Picture, ...]]:
    """The values that the template prints, by name, except those of a version; the figures.
    Records below the folder of the report are linked."""
    page = _Page(of, before)
    pictures = draw(of, page.stacks, page.verdict)
    values: dict[str, object] = {
        "run": of.run,
        "against": before.run.run_id if before else "",
        **_screen(page),
        **_results(of),
        **_evidence(page, [p.name for p in pictures]),
        **_closing(page, directory),
    }
    return values, pictures


def _screen(page: _Page) -> dict[str, object]:
    """The first five lines, the answers, why, and what to do next."""
    of, v, changed, again = page.of, page.verdict, page.changed, page.again
    run, suite = of.run, of.run.suite
    slow = bool(changed and changed.node)
    needed = remedies.next_steps(v, of, page.causes, page.stacks, slow_host=slow)
    search = [changed.step] if changed and changed.step else []
    steps = [*[*dict.fromkeys(needed)][: remedies.MAX_STEPS - len(search)], *search]
    relevant = remedies.relevant(page.causes, v)
    if suite.suspects:  # how the step of that day goes explains what somebody saw
        then = again.case_id if again else ""
        dispatch = [c for c in page.causes if c.kind is CauseKind.DISPATCH]
        rules = page.rules[:1] if not then or then in of.waiting else ()
        of_day, of_rule = {(then, "")}, {(i, "") for r in rules for i in r.evidence}
        how = [own for c in dispatch if (own := c.within(of_day) or c.within(of_rule))]
        relevant = [*how, *(c for c in relevant if c.kind is not CauseKind.DISPATCH)]
    causes_said = [*remedies.sentences(relevant, of.names)]
    trust = steadiness.trust(of)
    notes = [(e, found) for e, found in page.expected if e.counts is Weight.NOTE]
    noted = [f for e, found in notes if gpu_matches(e.gpu, v.device) for f in found]
    lines = answer.first_lines(
        page.parts,
        page.shown,
        run,
        cost=conditions.cost_sentence(of),
        why=_why(page) or ("Why", next(iter(causes_said), "")),
        steps=steps,
        missed=sum(f.fact is Fact.DECIDED and f.decision is Decision.NO_GO for f in noted),
        node=changed.node if changed else "",
        trust="; ".join(trust),
    )
    return {
        "outcome": answer.outcome(page.parts, page.shown),
        "lines": lines,
        "status": verdict_text.status(v, run),
        "parts": answer.parts_table(page.parts),
        "answers": (
            *answer.beside(page.shown, suite),
            *([changed.regressed] if changed and changed.regressed else []),
            *text.crossovers(of.versus, suite),
        ),
        "why": causes_said,
        "suspects": explained.suspects_table(
            of.diagnoses, suite, page.earlier, str(changed.day) if changed else ""
        ),
        "fingerprint": explained.fingerprint_table(page.marks, of),
        "reproduced": explained.reproduced_sentence(again, of),
        "where": where_table(page.stacks, of.names),
        "next_steps": tuple(steps),
        "readiness": [*answer.readiness(page.parts, suite, of.summaries)],
        "cost": conditions.cost(of),
    }


def _why(page: _Page) -> tuple[str, str] | None:
    """The cause of what was seen, if the suite asks for it; else the largest parts of a step, or
    what limits it in the cases that decide."""
    of, suite = page.of, page.of.run.suite
    if page.why:
        asks = suite.suspects.asks if suite.suspects else ""
        return suite.parts.get(asks, "Why").rstrip("?"), page.why
    asked = [s for s in of.summaries for r in page.rules[:1] if s.case.case_id in r.evidence]
    takes = where_sentence(page.stacks, of.names) or limit_sentence(of, asked)
    return ("Why", takes) if takes else None


def _results(of: Study) -> dict[str, object]:
    """The sections of the workloads: those on the page, and those in the appendix."""
    suite = of.run.suite
    found = scaling.by_workload(of.summaries).items()
    ran = {w: m for w, m in found if any(s.outcome is not Outcome.UNSUPPORTED for s in m)}
    leads = any(map(_many, ran.values()))
    sections = {w: _section(of, w, m, leads) for w, m in ran.items()}
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


def _evidence(page: _Page, pictures: Sequence[str]) -> dict[str, object]:
    """What the answer rests on."""
    of, run, names, word = page.of, page.of.run, page.of.names, page.of.run.suite.axis
    fitted = [f for f in of.fits if is_asked(f, run.suite)]
    return {
        "verdict": page.verdict,
        "rules": tables.rules(page.shown, run.suite.parts),
        "operators": conditions.operators(of),
        "correctness": steadiness.correctness(of),
        "programs": [*text.ran_lines(run)],
        "limits": limits(of),
        "counts": counts(of),
        "causes": remedies.table(page.causes, names),
        "dead": [text.dead_axis_sentence(d, word) for d in of.dead_axes],
        "failures": failures(of),
        "not_run": not_run(of),
        "expectations": tables.expectations(page.expected, run.environment, names),
        "judged_scaling": tables.scaling(fitted, names, word) if fitted else None,
        "scaling": tables.scaling(of.fits, names, word) if of.fits else None,
        "scaling_pictures": [n for n in pictures if n.startswith("scaling-")],
        "over_steps": steadiness.over_steps(run, names),
        "self_test": steadiness.self_test_sentence(run),
        "self_test_checks": steadiness.self_test_checks(run),
    }


def _closing(page: _Page, directory: Path) -> dict[str, object]:
    """Where and when it was measured, what changed since, and how to repeat it."""
    run, env = page.of.run, page.of.run.environment
    return {
        "since": page.changed,
        "commit": env.git.commit if env.git else "not available (not a git repository)",
        "dirty": env.uncommitted,
        "machine": conditions.environment_line(env),
        "models": sorted(
            {str(s.effective["model"]) for s in page.of.summaries if "model" in s.effective}
        ),
        "environment": conditions.environment(run),
        "doctor": (*conditions.requirement_bullets(run), *conditions.doctor_bullets(env)),
        "flags": tuple(conditions.flag_sentences(run)),
        "price": conditions.price_sentence(run),
        "time_use": conditions.time_use_sentence(run),
        "commands": _commands(page),
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
    of: Study, workload: str, members: Sequence[CaseSummary], leads: bool
) -> dict[str, Any]:
    """The results of one workload. `leads`: by the fastest provider of each case."""
    run = of.run
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
    full = tables.pivot(members, run) if several else tables.results(members, of)
    shown, which = full, ""
    if leads:
        shown = tables.leaders(members, run)
        if len(shown.rows) > tables.MAX_ROWS:
            which = "The first rows; "
            shown = replace(shown, rows=shown.rows[: tables.MAX_ROWS])
    elif len(page) < len(members):
        shown = tables.pivot(page, run) if several else tables.results(page, of)
        which = (
            f"Rows with {run.suite.axis(where[0])}={where[1]}; " if where else "The first rows; "
        )
    if shown is not full:
        said = f"{which or 'By provider: '}the appendix has all {len(full.rows)}."
        said = f"Fixed: {fixed}. {said}" if leads else said
        shown = replace(shown, remarks=(" ".join((said, *shown.remarks)),))
    waits = profile.host_bound(of, members) if several else ""
    # The table shows how a step grows, and compares the providers.
    told = {"provider" if several else "", longest(members) if len(members) == 2 else ""}
    own = [e for e in of.effects if e.workload == workload and e.axis not in told]
    return {
        "title": workload,
        "fixed": "" if leads else fixed,
        "table": replace(shown, remarks=(*shown.remarks, waits)) if waits else shown,
        "full": full if shown is not full else None,
        "details": tables.results(members, of, intervals=sure) if sure or several else None,
        "per_token": any(s.tokens for s in members),
        "effects": []
        if leads
        else [
            *text.together_sentences(own, run.suite.axis),
            *text.effect_sentences(own, run.suite.axis),
        ],
        "notes": [
            f"`{s.case.case_id}`: {'; '.join(map(text.note_text, s.notes))}."
            for s in members
            if s.notes
        ],
        "common": common,
        "effective": effective,
    }


def _commands(page: _Page) -> tuple[str, ...]:
    """The page again, from the stored run; then the run again, and the case that decides."""
    run, env = page.of.run, page.of.run.environment
    against = page.before.run.run_id if page.before else NO_RUN
    options = {"--rules": run.judged_by, "--against": against}
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
    decides = [*remedies.slowest(page.verdict), *(i for r in page.rules for i in r.evidence)]
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
