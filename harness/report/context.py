"""From a run to the values that the template of its report prints, and to its files."""

import datetime
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from harness import units
from harness.analysis import scaling
from harness.analysis import verdict as gate
from harness.analysis.causes import causes
from harness.analysis.dead_axes import oddities
from harness.analysis.effects import Effect, Stack, Versus, effects, per_token, stacks, versus
from harness.analysis.expectation import assess
from harness.analysis.overhead import time_use
from harness.analysis.roofline import done, modest
from harness.analysis.scaling import ScalingFit
from harness.analysis.statistics import readings
from harness.analysis.summary import spreads, summarise
from harness.analysis.suspects import diagnose
from harness.records import CaseSummary, Measurement, Outcome, Run, gpu_matches
from harness.report import answer, figures, remedies, render, steadiness, tables, text
from harness.report.failures import failures
from harness.report.figures import Picture
from harness.report.markdown import code
from harness.report.profile import profile_section, where_table
from harness.report.verdict_text import decided_by

PERFETTO = "https://ui.perfetto.dev"
"""Shows Chrome traces."""


def write(run: Run, directory: Path) -> Path:
    """Analyse, judge and draw a run; write its report, and its figures in `figures/`.

    Raises:
        ReportError: The directory cannot be written to. Nothing partial remains.
    """
    values, pictures = build(run, directory)
    return render.write(
        directory,
        _day(run),
        run.suite.subject,
        lambda name, version: _files(run, values, pictures, name, version),
    )


def _day(run: Run) -> datetime.date:
    return datetime.datetime.fromisoformat(run.started_at or run.environment.captured_at).date()


def _files(
    run: Run,
    values: Mapping[str, object],
    pictures: Sequence[Picture],
    name: str,
    version: int,
) -> dict[str, bytes]:
    """Path below the directory -> content, the page last."""
    day = _day(run)
    start = f"figures/{day}-{figures.slug(run.suite.subject)}-v{version}"
    links = {p.name: f"{start}-{p.name}.png" for p in pictures}
    appendix = f"{start}-appendix.md"
    printed = {
        **values,
        "title": f"{day} Test Engineer Report - {run.suite.subject} v{version}",
        "date": day,
        "page": quote(name),
        "appendix": appendix,
        "figures": {p.name: (p.alt, links[p.name]) for p in pictures},
    }
    pages = {appendix: "appendix.md.j2", name: "report.md.j2"}
    texts = {to: render.rendered(template, printed) for to, template in pages.items()}
    return {
        **{links[p.name]: p.png for p in pictures},
        **{to: text.encode() for to, text in texts.items()},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a page says of how it was made."""

    run_id: str
    rules: str
    """The suite file that judged it; empty for the run's own."""
    version: int


def written(page: str) -> Written | None:
    """How a report was made, by its own words; None if this is not a report of a run."""
    title = re.search(r"^# .* v(\d+)$", page, re.MULTILINE)
    command = re.search(r"^harness report (.+?)  #", page, re.MULTILINE)
    if title is None or command is None:
        return None
    run_id, *options = shlex.split(command[1])
    return Written(run_id=run_id, rules=options[-1] if options else "", version=int(title[1]))


def pages(run: Run, page: Path, version: int) -> dict[Path, str]:
    """The texts of a report and its appendix, as they would be written now."""
    values, pictures = build(run, page.parent)
    files = _files(run, values, pictures, page.name, version)
    return {page.parent / n: data.decode() for n, data in files.items() if n.endswith(".md")}


def build(run: Run, directory: Path) -> tuple[dict[str, object], tuple[Picture, ...]]:
    """The values that the template prints, by name, except those of a version; the figures.

    Args:
        directory: Folder of the report; records below it are linked.
    """
    summaries = summarise(run)
    fits = scaling.fit(summaries)
    suite, env = run.suite, run.environment
    verdict = gate.judge(suite, env, summaries, fits)
    against = versus(summaries)
    parts = stacks(run, summaries)
    pictures = _pictures(run, summaries, fits, against, parts)
    names = [p.name for p in pictures]
    no_git = "not available (not a git repository)"
    assessments = assess(suite, env, summaries)
    targets = modest(suite, env, done(summaries), {s.case.case_id: s.effective for s in summaries})
    axis_effects = effects(summaries)
    odd, found = oddities(run, summaries), causes(run, summaries)
    names_of = answer.names(suite)
    used = time_use(run)
    failed = failures(summaries, run)
    diagnoses, shown = diagnose(suite, summaries), answer.named(verdict, suite)
    sections = {
        workload: _section(run, workload, members, axis_effects, against, names)
        for workload, members in _by_workload(summaries).items()
    }
    ratios = [r for r in suite.rules if r.against]
    compared = {a.workload for r in ratios for a, _ in r.pairs(suite.cases)}
    judged = [s for workload, s in sections.items() if workload in compared]
    values: dict[str, object] = {
        "run": run,
        "device": text.device(env),
        "branch": env.git.branch if env.git else no_git,
        "commit": env.git.commit if env.git else no_git,
        "dirty": env.uncommitted,
        "verdict": verdict,
        "decided_by": decided_by(verdict),
        "answers": (
            *answer.answers(shown, suite),
            *answer.explained(diagnoses, suite, env.device_name),
            *(sentence for s in judged for sentence in s["crossovers"]),
            *text.overhead_bullet(run),
            *remedies.sentences(remedies.relevant(found, verdict), names_of),
            *text.constant_speed_bullet(odd),
        ),
        "next_steps": answer.next_steps(verdict, run, failed, diagnoses, found),
        "causes": remedies.table(found, names_of),
        "savings": remedies.savings_table(remedies.excess(verdict, run), names_of),
        "required": remedies.required(diagnoses),
        "suspects": answer.suspects_table(diagnoses, suite),
        "trust": "; ".join(answer.trust(run, summaries, verdict)),
        "rules": tables.rules(shown, suite.parts),
        "correctness": answer.correctness(run, summaries),
        "sections": [*sections.values()],
        "where": where_table(parts, answer.names(suite)),
        "profile": profile_section(run, summaries),
        "oddities": text.oddity_sentences(odd),
        "compared": text.coverage_sentence(odd),
        "flags": tuple(text.flag_sentences(run)),
        "failures": failed,
        "not_run": tables.not_run(summaries, run),
        "expectations": tables.expectations(assessments) if assessments else None,
        "low_targets": tuple(f"{text.target_text(t)}." for t in targets),
        "scaling": tables.scaling(fits) if fits else None,
        "scaling_pictures": [n for n in names if n.startswith("scaling-")],
        "telemetry_missing": "" if "utilisation" in names else _telemetry_missing(run),
        "steadiness": steadiness.table(spreads(run), summaries),
        "self_test": steadiness.self_test_sentence(run),
        "self_test_checks": steadiness.self_test_checks(run),
        "cost": tables.cost(summaries, run),
        "environment": tables.environment(run),
        "elapsed": _elapsed(run),
        "time_use": text.time_use_sentence(used) if used else "not available",
        "timeline": tables.timeline(run),
        "commands": _commands(run),
        "artefacts": _artefacts(run, directory),
    }
    return values, pictures


def _by_workload(summaries: Sequence[CaseSummary]) -> dict[str, list[CaseSummary]]:
    groups: dict[str, list[CaseSummary]] = {}
    for s in summaries:
        groups.setdefault(s.case.workload, []).append(s)
    return groups


def _pictures(
    run: Run,
    summaries: Sequence[CaseSummary],
    fits: Sequence[ScalingFit],
    against: Sequence[Versus],
    parts: Sequence[Stack],
) -> tuple[Picture, ...]:
    short = answer.names(run.suite)
    drawn = [figures.where(parts, short)]
    for workload, members in _by_workload(summaries).items():
        names = tables.labels([s.case for s in members])
        names |= {i: short[i] for i in names if short[i] != i}
        compared = [v for v in against if v.workload == workload]
        shown = figures.versus(workload, compared, _group_names(run, members, compared))
        if shown is None and not any(p.alone and p.case.workload == workload for p in parts):
            shown = figures.throughput(workload, members, names, run.suite, run.environment)
        drawn.append(shown)
    for workload, axis in dict.fromkeys((f.workload, f.axis) for f in fits):
        group = [f for f in fits if (f.workload, f.axis) == (workload, axis)]
        drawn.append(figures.scaling(workload, axis, group, _group_labels(group)))
    judged = _judged(run, summaries)
    if slow := max(judged or summaries, key=_time_per_token, default=None):
        label = f"Slowest {'judged ' if judged else ''}case: {short[slow.case.case_id]}"
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
        own = f"{run.suite.axis_names.get(v.axis, v.axis)}={case.axes.get(v.axis)}"
        label = [part for part in run.suite.label(case).split(", ") if part not in (own, "")]
        others = [f"{a}={units.scalar(x)}" for a in moving if (x := case.get(a)) and a != v.axis]
        names[case.case_id] = ", ".join(label or others or [case.workload])
    return names


def _group_labels(fits: Sequence[ScalingFit]) -> dict[str, str]:
    """Group -> the parts of its id that differ from the other groups of the figure."""
    parts = {f.group: f.group.split("/") for f in fits}
    shared = set.intersection(*(set(p) for p in parts.values()))
    return {group: " ".join(x for x in p if x not in shared) or p[1] for group, p in parts.items()}


def _judged(run: Run, summaries: Sequence[CaseSummary]) -> list[CaseSummary]:
    """The cases that a rule of the suite asks on this GPU."""
    rules = [r for r in run.suite.rules if gpu_matches(r.gpu, run.environment.device_name)]
    return [s for s in summaries if any(r.match.accepts(s.case) for r in rules)]


def _time_per_token(s: CaseSummary) -> float:
    timed = s.outcome is Outcome.OK and "step_s" in s.metrics
    return per_token(s).value if timed else -1.0


def _sampled_readings(m: Measurement) -> int:
    return max(len(readings(m, c, ("sampling",))) for c in ("gpu_utilisation", "cpu_utilisation"))


def _telemetry_missing(run: Run) -> str:
    reasons = dict.fromkeys(
        why for m in run.measurements if m.telemetry for why in m.telemetry.unavailable.values()
    )
    return "; ".join(reasons) or "no probe took a reading while an ok process was timed"


def _section(
    run: Run,
    workload: str,
    members: Sequence[CaseSummary],
    axis_effects: Sequence[Effect],
    against: Sequence[Versus],
    pictures: Sequence[str],
) -> dict[str, Any]:
    """The results of one workload."""
    cases = [s.case for s in members]
    moving = tables.varying(cases)
    fixed = ", ".join(
        f"{name}={units.scalar(value)}"
        for name, value in {"provider": cases[0].provider, **cases[0].axes}.items()
        if name not in moving and all(c.get(name) == value for c in cases)
    )
    picture = f"speed-{figures.slug(workload)}"
    common, effective = tables.effective(members)
    sure = any(e.low is not None for s in members for e in s.metrics.values())
    several = len({c.provider for c in cases}) > 1
    compared = [v for v in against if v.workload == workload]
    along = [v for v in compared if len(v.points) > 1]
    groups = [[v for v in along if v.theirs == other] for other in {v.theirs: 0 for v in along}]
    names = _group_names(run, members, compared)
    return {
        "title": workload,
        "fixed": fixed,
        "picture": picture if picture in pictures else "",
        "table": tables.pivot(members, run) if several else tables.results(members, run),
        "crossovers": [text.crossover_sentence(group, names) for group in groups],
        "details": tables.results(members, run, intervals=sure) if sure or several else None,
        "effects": [
            text.effect_sentence(e)
            for e in axis_effects
            if e.workload == workload and not (several and e.axis == "provider")
        ],
        "notes": [f"`{s.case.case_id}`: {'; '.join(s.notes)}." for s in members if s.notes],
        "common": common,
        "effective": effective,
    }


def _commands(run: Run) -> tuple[str, ...]:
    env = run.environment
    lines = [f"git checkout {env.git.commit}"] if env.git else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.variables.items()]
    lines += [f"# with {env.interpreter}"] if env.interpreter else []
    if env.command:
        program = PurePath(env.command[0]).name
        lines.append(shlex.join([program, *env.command[1:]]))
    rules = f" --rules {shlex.quote(run.judged_by)}" if run.judged_by else ""
    lines.append(f"harness report {run.run_id}{rules}  # this report again, from the stored run")
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
    if logs := sorted({m.log for m in run.measurements if m.log}):
        # No link: logs stay on the machine of the run, and reports are read elsewhere.
        where = named(folder / PurePath(logs[0]).parent, link=False)
        lines.append(f"{where}: output of {text.plural('process', len(logs))}")
    profiles = [m.profile for m in run.measurements if m.profile and m.profile.trace_bytes]
    if traces := [p for p in profiles if p.trace]:
        first = named(folder / traces[0].trace, link=False)
        size = units.size(sum(p.trace_bytes for p in traces))
        others = f", and {len(traces) - 1} more beside it" if traces[1:] else ""
        lines.append(f"{first}{others}: Chrome traces, {size}, for {code(PERFETTO)}")
    if large := len(profiles) - len(traces):
        lines.append(f"{text.plural('Chrome trace', large)} too large to keep")
    return tuple(lines)


def _elapsed(run: Run) -> str:
    if run.elapsed_s is not None:
        return units.duration(run.elapsed_s)
    if not (run.started_at and run.ended_at):
        return "not available (the run is unfinished)"
    start, end = (datetime.datetime.fromisoformat(t) for t in (run.started_at, run.ended_at))
    return units.duration((end - start).total_seconds())
