"""From a run to the values that the template of its report prints, and to its files."""

import datetime
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from harness import units
from harness.analysis import scaling
from harness.analysis import verdict as gate
from harness.analysis.causes import causes
from harness.analysis.dead_axes import oddities
from harness.analysis.effects import (
    Effect,
    Versus,
    effects,
    longest,
    per_token,
    versus,
)
from harness.analysis.expectation import assess
from harness.analysis.overhead import time_use
from harness.analysis.recorded import readings
from harness.analysis.roofline import Stack, stacks
from harness.analysis.scaling import ScalingFit
from harness.analysis.summary import spreads, summarise
from harness.analysis.suspects import Together, diagnose, together
from harness.records import (
    CaseSummary,
    Measurement,
    Outcome,
    Rule,
    Run,
    Suite,
    Weight,
    gpu_matches,
)
from harness.report import answer, figures, remedies, render, steadiness, tables, text
from harness.report.failures import failures, not_run
from harness.report.figures import Picture
from harness.report.markdown import code
from harness.report.profile import profile_section, where_table
from harness.report.series.since import NO_RUN, since
from harness.store.reader import is_full

PERFETTO = "https://ui.perfetto.dev"
"""Shows Chrome traces."""


_MADE, _END = "<!-- made from ", " -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """How a page was made: its last line, which no reader sees."""

    run: str
    mark: str
    """The last words of its title: `v2`."""
    rules: str = ""
    against: str = ""


def made(page: str) -> Made | None:
    """How a report was made; None if this is not a report of a run."""
    last = page.rstrip().rpartition("\n")[2]
    if not last.startswith(_MADE):
        return None
    return Made(**json.loads(last.removeprefix(_MADE).removesuffix(_END)))


def write(run: Run, directory: Path, against: Run | None = None, version: int = 1) -> Path:
    """Analyse, judge and draw a run; write its report, and its figures in `figures/`.

    Args:
        against: The earlier run that it is compared with.
        version: Which full run of its suite this is; a page of another run keeps its number.
            Partial runs and studies are named as such.

    Raises:
        ReportError: The directory cannot be written to. Nothing partial remains.
    """
    values, pictures = build(run, directory, against)
    drawn = {p.name: p.png() for p in pictures}

    def files(name: str, mark: str) -> dict[str, bytes]:
        links, texts = _texts(run, values, pictures, name, mark)
        pages = {to: text.encode() for to, text in texts.items()}
        return {links[p]: png for p, png in drawn.items()} | pages

    mark, day, subject = _mark(run, version), _day(run), run.suite.subject
    while mark.startswith("v") and _is_taken(render.path(directory, day, subject, mark), run):
        version += 1
        mark = _mark(run, version)
    return render.write(directory, day, subject, files, mark)


def _is_taken(page: Path, run: Run) -> bool:
    """Whether a page is there, and of another run."""
    how = made(page.read_text(encoding="utf-8")) if page.is_file() else None
    return how is not None and how.run != run.run_id


def _mark(run: Run, version: int) -> str:
    """`v2`, `partial 6ffe` or `study 459c`; the last two by the run's id."""
    own = run.run_id.rpartition("-")[2]
    if run.suite.name != PurePath(run.suite.path).stem:
        return f"study {own}"
    return f"v{version}" if is_full(run) else f"partial {own}"


def _day(run: Run) -> datetime.date:
    return datetime.datetime.fromisoformat(run.started_at or run.environment.captured_at).date()


def _texts(
    run: Run,
    values: Mapping[str, object],
    pictures: Sequence[Picture],
    name: str,
    mark: str,
) -> tuple[dict[str, str], dict[str, str]]:
    """Name of a figure -> its path below the directory; such a path -> its text, the page last."""
    day = _day(run)
    start = f"figures/{day}-{figures.slug(f'{run.suite.subject} {mark}')}"
    links = {p.name: f"{start}-{p.name}.png" for p in pictures}
    appendix = f"{start}-appendix.md"
    before = values["against"]
    how = Made(run=run.run_id, mark=mark, rules=run.judged_by, against=str(before))
    told = json.dumps({name: value for name, value in asdict(how).items() if value})
    printed = {
        **values,
        "made": f"{_MADE}{told}{_END}",
        "title": f"{day} Test Engineer Report - {run.suite.subject} {mark}",
        "date": day,
        "page": quote(name),
        "appendix": appendix,
        "figures": {p.name: (p.alt, links[p.name]) for p in pictures},
        "inside": {p.name: (p.alt, PurePath(links[p.name]).name) for p in pictures},
    }
    pages = {appendix: "appendix.md.j2", name: "report.md.j2"}
    return links, {to: render.rendered(template, printed) for to, template in pages.items()}


def again(
    run: Run, page: Path, how: Made, against: Run | None = None
) -> tuple[dict[str, str], dict[str, Picture]]:
    """The texts of a page and its appendix as they would be written now, and its figures, by their
    paths below the page's folder."""
    values, pictures = build(run, page.parent, against)
    links, texts = _texts(run, values, pictures, page.name, how.mark)
    return texts, {links[p.name]: p for p in pictures}


def build(
    run: Run, directory: Path, before: Run | None = None
) -> tuple[dict[str, object], tuple[Picture, ...]]:
    """The values that the template prints, by name, except those of a version; the figures.

    Args:
        directory: Folder of the report; records below it are linked.
        before: The earlier run that it is compared with.
    """
    summaries = summarise(run)
    withdrawn = {s.case.case_id for s in summaries if s.withdrawn}
    known = (replace(m, tokens=None) if m.case_id in withdrawn else m for m in run.measurements)
    run = replace(run, measurements=tuple(known))
    fits = scaling.fit(summaries)
    suite, env = run.suite, run.environment
    verdict = gate.judge(suite, env, summaries, fits)
    against = versus(summaries)
    slow = remedies.slowest(verdict)
    parts = stacks(
        run,
        summaries,
        [s.case.case_id for s in _judged(run, summaries)],
        first=slow,
    )
    pictures = _pictures(run, summaries, fits, parts)
    names = [p.name for p in pictures]
    assessments = assess(suite, env, summaries)
    axis_effects, acting = effects(summaries), together(summaries)
    odd, found = oddities(run, summaries), causes(run, summaries)
    used = time_use(run)
    failed = failures(summaries, run)
    diagnoses, shown = diagnose(suite, summaries), answer.named(verdict, suite, fits)
    briefly, short = answer.brief(shown), text.case_names(suite)
    changed = since(before, run, summaries) if before else None
    worse = [changed.regressed] if changed and changed.regressed else []
    groups = _by_workload(summaries)
    sections = {
        workload: _section(run, workload, members, axis_effects, acting, against)
        for workload, members in groups.items()
    }
    ratios = [r for r in suite.rules if r.against]
    compared = {a.workload for r in ratios for a, _ in r.pairs(suite.cases)}
    crossed = [v for v in against if v.crossover and v.workload in compared]
    met = dict.fromkeys((v.workload, v.theirs) for v in crossed)
    ahead = [[v for v in against if (v.workload, v.theirs) == k and v.points[1:]] for k in met]
    counting = [r for r in suite.rules if r.counts is not Weight.NOTE]
    timed = [r.match for r in counting if tables.shows(r.metric)]
    stated = [*timed, *(e.match for e in suite.expectations if tables.shows(e.metric))]
    asked = {c.workload for c in suite.cases if any(m.accepts(c) for m in stated)} & {*sections}
    paged = {w for w in asked if len(groups[w]) > 1} or asked or {*sections}
    fitted = [f for f in fits if any(_fits(r, f, suite) for r in suite.rules)]
    values: dict[str, object] = {
        "run": run,
        "since": changed,
        "against": before.run_id if before else "",
        "status": text.status(verdict, env),
        "commit": env.git.commit if env.git else "not available (not a git repository)",
        "dirty": env.uncommitted,
        "verdict": verdict,
        "headline": answer.headline(briefly, run, assessments, regressed=bool(worse)),
        "answers": (
            *answer.answers(briefly, suite, assessments),
            *worse,
            *(text.together_sentences(acting, run.suite.axis) if not verdict.asked else ()),
            *answer.explained(diagnoses, suite, env.device_name),
            *(text.crossover_brief(of, suite.axis) for of in ahead),
            *text.sampling_bullet(run),
            *remedies.sentences(
                [
                    c
                    for c in remedies.relevant(found, verdict)
                    if c.share is None or not (slow or diagnoses)
                ],
                short,
            ),
        ),
        "next_steps": (
            *remedies.next_steps(verdict, run, diagnoses, found),
            *filter(None, [changed.step if changed else ""]),
        )[: remedies.MAX_STEPS],
        "causes": remedies.table(found, short),
        "suspects": answer.suspects_table(diagnoses, suite),
        "trust": "; ".join(steadiness.trust(run, summaries, verdict, found)),
        "rules": tables.rules(briefly, suite.parts),
        "correctness": steadiness.correctness(run, summaries),
        "sections": [*sections.values()],
        "asked": [s for w, s in sections.items() if w in paged],
        "beside": [*text.in_appendix(sections, paged, asked)],
        "others": [s for w, s in sections.items() if w not in paged],
        "where": where_table(parts, short),
        "profile": profile_section(run, summaries),
        "oddities": text.oddity_sentences(odd, suite.axis),
        "flags": tuple(text.flag_sentences(run)),
        "failures": failed,
        "not_run": not_run(summaries, run),
        "expectations": tables.expectations(assessments, short),
        "judged_scaling": tables.scaling(fitted, short, suite.axis) if fitted else None,
        "scaling": tables.scaling(fits, short, suite.axis) if fits else None,
        "scaling_pictures": [n for n in names if n.startswith("scaling-")],
        "judged_pictures": [n for n in names if n in {_scaling(f) for f in fitted}],
        "over_steps": steadiness.over_steps(run, short),
        "steadiness": steadiness.table(spreads(run), summaries),
        "self_test": steadiness.self_test_sentence(run),
        "self_test_checks": steadiness.self_test_checks(run),
        "cost": tables.cost(summaries, run),
        "machine": tables.environment_line(env),
        "environment": tables.environment(run),
        "requirements": tuple(text.requirement_bullets(run)),
        "doctor": tuple(text.doctor_bullets(env)),
        "elapsed": _elapsed(run),
        "time_use": text.time_use_sentence(used) if used else "not available",
        "timeline": tables.timeline(run),
        "commands": _commands(run, before),
        "exports": [f"export {n}={shlex.quote(v)}" for n, v in env.variables.items()],
        "artefacts": _artefacts(run, directory),
    }
    return values, pictures


def _judged(run: Run, summaries: Sequence[CaseSummary]) -> list[CaseSummary]:
    """The cases that a rule of the suite asks on this GPU."""
    rules = [r for r in run.suite.rules if gpu_matches(r.gpu, run.environment.device_name)]
    return [s for s in summaries if any(r.match.accepts(s.case) for r in rules)]


def _by_workload(summaries: Sequence[CaseSummary]) -> dict[str, list[CaseSummary]]:
    groups: dict[str, list[CaseSummary]] = {}
    for s in summaries:
        groups.setdefault(s.case.workload, []).append(s)
    return groups


def _pictures(
    run: Run,
    summaries: Sequence[CaseSummary],
    fits: Sequence[ScalingFit],
    parts: Sequence[Stack],
) -> tuple[Picture, ...]:
    short = text.case_names(run.suite)
    drawn = [figures.where(parts, short)]
    for workload, axis in dict.fromkeys((f.workload, f.axis) for f in fits):
        group = [f for f in fits if (f.workload, f.axis) == (workload, axis)]
        group.sort(key=lambda f: not any(_fits(r, f, run.suite) for r in run.suite.rules))
        drawn.append(figures.scaling(group, _group_labels(group, short), run.suite.axis(axis)))
    trained = [
        (short[c.case_id], next((m for m in run.of(c.case_id) if m.over_steps), None))
        for c in run.suite.cases
    ]
    drawn.append(figures.over_steps([(name, m) for name, m in trained if m]))
    judged = _judged(run, summaries)
    counted = [s for s in judged or summaries if s.tokens]
    if slow := max(counted or judged or summaries, key=_time_per_token, default=None):
        label = f"Slowest {'judged ' if judged else ''}case a token: {short[slow.case.case_id]}"
        most = max(run.of(slow.case.case_id), key=_sampled_readings, default=None)
        drawn.append(figures.telemetry(most, label) if most else None)
    return tuple(p for p in drawn if p is not None)


def _group_names(
    run: Run, members: Sequence[CaseSummary], found: Sequence[Versus]
) -> dict[str, str]:
    """Id of a group's first case -> `panel, curve`: its label, or its axes, without the axis."""
    firsts = [v.first.case for v in found]
    moving = [a for a in tables.varying([s.case for s in members]) if a != "provider"]
    names = {}
    for v, case in zip(found, firsts, strict=True):
        own = f"{run.suite.axis(v.axis)}={case.axes.get(v.axis)}"
        label = [part for part in run.suite.label(case).split(", ") if part not in (own, "")]
        rest = {run.suite.axis(a): x for a in moving if (x := case.get(a)) and a != v.axis}
        others = [f"{a}={units.scalar(x)}" for a, x in rest.items()]
        names[case.case_id] = ", ".join(label or others or [case.workload])
    return names


def _group_labels(fits: Sequence[ScalingFit], names: Mapping[str, str]) -> dict[str, str]:
    """Group -> what the names of its cases share, without what those of all groups do."""
    own = {f.group: text.shared_name([names[p.case_id] for p in f.points]) for f in fits}
    every = text.shared_name([*own.values()]).split(", ")
    return {
        group: ", ".join(part for part in name.split(", ") if part not in every) or name
        for group, name in own.items()
    }


def _fits(rule: Rule, fit: ScalingFit, suite: Suite) -> bool:
    """Whether a rule asks for the growth of this group."""
    ids = {p.case_id for p in fit.points}
    return rule.axis == fit.axis and any(
        c.case_id in ids and rule.match.accepts(c) for c in suite.cases
    )


def _scaling(fit: ScalingFit) -> str:
    """The name of the figure that shows a group."""
    return f"scaling-{figures.slug(fit.workload)}-{figures.slug(fit.axis)}"


def _time_per_token(s: CaseSummary) -> float:
    timed = s.outcome is Outcome.OK and "step_s" in s.metrics
    return per_token(s).value if timed else -1.0


def _sampled_readings(m: Measurement) -> int:
    return max(len(readings(m, c, ("sampling",))) for c in ("gpu_utilisation", "cpu_utilisation"))


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
    acting: Sequence[Together],
    against: Sequence[Versus],
) -> dict[str, Any]:
    """The results of one workload."""
    cases = [s.case for s in members]
    moving = tables.varying(cases)
    several = len({c.provider for c in cases}) > 1
    fixed = ", ".join(
        f"{run.suite.axis(name)}={units.scalar(value)}"
        for name, value in {"provider": cases[0].provider, **cases[0].axes}.items()
        if name not in moving and all(c.get(name) == value for c in cases)
    )
    common, effective = tables.effective(members)
    ids, where = _essential(members)
    page = [s for s in members if s.case.case_id in ids]
    sure = any(e.low is not None for s in members for e in s.metrics.values())
    compared = [v for v in against if v.workload == workload]
    along = [v for v in compared if len(v.points) > 1]
    groups = [[v for v in along if v.theirs == other] for other in {v.theirs: 0 for v in along}]
    full = tables.pivot(members, run) if several else tables.results(members, run)
    shown = full
    if some := len(page) < len(members):
        shown = tables.pivot(page, run, along) if several else tables.results(page, run)
        which = f"Rows with {run.suite.axis(where[0])}={where[1]}" if where else "The first rows"
        said = f"{which}; the appendix has all {len(full.rows)}."
        shown = replace(shown, remarks=(" ".join((said, *shown.remarks)),))
    names = _group_names(run, members, compared)
    length = longest(members) if len(members) == 2 else ""  # the table shows how it grows
    return {
        "title": workload,
        "fixed": fixed,
        "table": shown,
        "full": full if some else None,
        "crossovers": [
            text.crossover_sentence(group, names, run.suite.axis)
            for group in groups
            if some or any(v.crossover for v in group)  # else the table shows it
        ],
        "details": tables.results(members, run, intervals=sure) if sure or several else None,
        "per_token": any(s.tokens for s in members),
        "effects": [
            *text.together_sentences([t for t in acting if t.workload == workload], run.suite.axis),
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


def _commands(run: Run, before: Run | None) -> tuple[str, ...]:
    env = run.environment
    lines = [f"git checkout {env.git.commit}"] if env.git else []
    lines += [f"# with {env.interpreter}"] if env.interpreter else []
    if env.command:
        program = PurePath(env.command[0]).name
        lines.append(shlex.join([program, *env.command[1:]]))
    only = shlex.quote(run.suite.cases[0].case_id)
    lines.append(f"harness run {shlex.quote(run.suite.path)} -f {only}  # one case alone")
    options = {
        "--rules": run.judged_by,
        "--against": before.run_id if before else NO_RUN,
    }
    again = shlex.join([run.run_id, *(x for o in options.items() if o[1] for x in o)])
    lines.append(f"harness report {again}  # this report again, from the stored run")
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


def _elapsed(run: Run) -> str:
    if run.elapsed_s is not None:
        return units.duration(run.elapsed_s)
    if not (run.started_at and run.ended_at):
        return "unfinished"
    start, end = (datetime.datetime.fromisoformat(t) for t in (run.started_at, run.ended_at))
    return units.duration((end - start).total_seconds())
