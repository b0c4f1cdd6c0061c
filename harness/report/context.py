"""From a run to the values that the template of its report prints."""

import datetime
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from urllib.parse import quote

from harness import units
from harness.analysis import scaling
from harness.analysis import verdict as gate
from harness.analysis.dead_axes import oddities
from harness.analysis.effects import Effect, effects
from harness.analysis.expectation import assess
from harness.analysis.overhead import time_use
from harness.analysis.roofline import done, modest
from harness.analysis.scaling import ScalingFit
from harness.analysis.statistics import TIMED, readings
from harness.analysis.summary import spreads, summarise
from harness.records import CaseSummary, Measurement, Outcome, Run, Verdict
from harness.report import figures, steadiness, tables, text
from harness.report.failures import failures
from harness.report.figures import Picture
from harness.report.profile import longest_wait, profile_section
from harness.report.tables import Table
from harness.report.verdict_text import decided_by, verdict_bullets


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A report before it has a version: everything analysed, every figure drawn."""

    run: Run
    summaries: tuple[CaseSummary, ...]
    fits: tuple[ScalingFit, ...]
    verdict: Verdict
    pictures: tuple[Picture, ...]

    @property
    def date(self) -> datetime.date:
        """The day, in UTC, on which the run started."""
        started = self.run.started_at or self.run.environment.captured_at
        return datetime.datetime.fromisoformat(started).date()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The results of one workload."""

    title: str
    fixed: str
    """Axes that have one value in all its cases."""
    picture: str
    """Name of its figure; empty without one."""
    table: Table
    details: Table | None
    """The same with the interval of every metric; None if no case has one."""
    effects: tuple[str, ...]
    notes: tuple[str, ...]
    common: str
    """The observed configuration that all its cases share."""
    effective: Table


def analyse(run: Run) -> Content:
    """Do everything that does not depend on where the report is written."""
    summaries = summarise(run)
    fits = scaling.fit(summaries)
    verdict = gate.judge(run.suite, run.environment, summaries, fits)
    return Content(
        run=run,
        summaries=summaries,
        fits=fits,
        verdict=verdict,
        pictures=_pictures(run, summaries, fits),
    )


def build(
    content: Content, *, author: str, version: int, directory: Path, links: Mapping[str, str]
) -> dict[str, object]:
    """The values that the template prints, by name.

    Args:
        directory: Folder of the report; records below it are linked.
        links: Name of a picture -> its path relative to the report.
    """
    run, summaries, fits = content.run, content.summaries, content.fits
    suite, env = run.suite, run.environment
    no_git = "not available (not a git repository)"
    assessments = assess(suite, env, summaries)
    targets = modest(suite, env, done(summaries), {s.case.case_id: s.effective for s in summaries})
    drawn = {p.name: (p.alt, links[p.name]) for p in content.pictures}
    axis_effects = effects(summaries)
    odd = oddities(run, summaries)
    used = time_use(run)
    return {
        "title": f"{content.date} Test Engineer Report - {suite.subject} v{version}",
        "date": str(content.date),
        "author": author,
        "run": run,
        "device": text.device(env),
        "branch": env.git.branch if env.git else no_git,
        "commit": env.git.commit if env.git else no_git,
        "dirty": env.uncommitted,
        "verdict": content.verdict,
        "decided_by": decided_by(content.verdict),
        "summary": (
            *verdict_bullets(content.verdict),
            *text.executive_summary(run, summaries, axis_effects, assessments, fits, targets, odd),
            *longest_wait(run, summaries),
        ),
        "rules": tables.rules(content.verdict),
        "sections": _sections(run, summaries, axis_effects, drawn),
        "profile": profile_section(run, summaries),
        "oddities": text.oddity_sentences(odd),
        "compared": text.coverage_sentence(odd),
        "flags": tuple(text.flag_sentences(run)),
        "failures": failures(summaries, run),
        "not_run": tables.not_run(summaries, run),
        "expectations": tables.expectations(assessments) if assessments else None,
        "low_targets": tuple(f"{text.target_text(t)}." for t in targets),
        "scaling": tables.scaling(fits) if fits else None,
        "scaling_pictures": tuple(n for n in drawn if n.startswith("scaling-")),
        "telemetry_missing": "" if "utilisation" in drawn else _telemetry_missing(run),
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
        "figures": drawn,
    }


def _by_workload(summaries: Sequence[CaseSummary]) -> dict[str, list[CaseSummary]]:
    groups: dict[str, list[CaseSummary]] = {}
    for s in summaries:
        groups.setdefault(s.case.workload, []).append(s)
    return groups


def _pictures(
    run: Run, summaries: Sequence[CaseSummary], fits: Sequence[ScalingFit]
) -> tuple[Picture, ...]:
    drawn: list[Picture | None] = []
    for workload, members in _by_workload(summaries).items():
        names = tables.labels([s.case for s in members])
        drawn.append(figures.throughput(workload, members, names, run.suite, run.environment))
    for workload, axis in dict.fromkeys((f.workload, f.axis) for f in fits):
        group = [f for f in fits if (f.workload, f.axis) == (workload, axis)]
        drawn.append(figures.scaling(workload, axis, group, _group_labels(group)))
    shown = _representative(run)
    if shown is not None:
        drawn.append(figures.telemetry(shown, f"{shown.case_id}, process {shown.process}"))
    return tuple(p for p in drawn if p is not None)


def _group_labels(fits: Sequence[ScalingFit]) -> dict[str, str]:
    """Group -> the parts of its id that differ from the other groups of the figure."""
    parts = {f.group: f.group.split("/") for f in fits}
    shared = set.intersection(*(set(p) for p in parts.values()))
    return {group: " ".join(x for x in p if x not in shared) or p[1] for group, p in parts.items()}


def _representative(run: Run) -> Measurement | None:
    """The ok process with the most telemetry while it was timed."""

    def count(m: Measurement) -> int:
        return max(len(readings(m, c, TIMED)) for c in ("gpu_utilisation", "cpu_utilisation"))

    ok = [m for m in run.measurements if m.outcome is Outcome.OK and count(m)]
    return max(ok, key=count, default=None)


def _telemetry_missing(run: Run) -> str:
    reasons = dict.fromkeys(
        why for m in run.measurements if m.telemetry for why in m.telemetry.unavailable.values()
    )
    return "; ".join(reasons) or "no probe took a reading while an ok process was timed"


def _sections(
    run: Run,
    summaries: Sequence[CaseSummary],
    axis_effects: Sequence[Effect],
    drawn: Mapping[str, object],
) -> list[Section]:
    sections = []
    for workload, members in _by_workload(summaries).items():
        cases = [s.case for s in members]
        moving = tables.varying(cases)
        fixed = {
            name: value
            for name, value in {"provider": cases[0].provider, **cases[0].axes}.items()
            if name not in moving and all(c.get(name) == value for c in cases)
        }
        picture = f"speed-{figures.slug(workload)}"
        common, effective = tables.effective(members)
        sure = any(e.low is not None for s in members for e in s.metrics.values())
        sections.append(
            Section(
                title=workload,
                fixed=", ".join(f"{k}={units.scalar(v)}" for k, v in fixed.items()),
                picture=picture if picture in drawn else "",
                table=tables.results(members, run),
                details=tables.results(members, run, intervals=True) if sure else None,
                effects=tuple(
                    text.effect_sentence(e) for e in axis_effects if e.workload == workload
                ),
                notes=tuple(
                    f"`{s.case.case_id}`: {'; '.join(s.notes)}." for s in members if s.notes
                ),
                common=common,
                effective=effective,
            )
        )
    return sections


def _commands(run: Run) -> tuple[str, ...]:
    env = run.environment
    lines = [f"git checkout {env.git.commit}"] if env.git else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.variables.items()]
    if env.command:
        program = PurePath(env.command[0]).name
        lines.append(shlex.join([program, *env.command[1:]]))
    lines.append(f"harness report {run.run_id}  # this report again, from the stored run")
    return tuple(lines)


def _artefacts(run: Run, directory: Path) -> tuple[str, ...]:
    folder = Path(run.folder)

    def named(path: Path, *, link: bool = True) -> str:
        try:
            inside = path.resolve().relative_to(directory.resolve())
        except ValueError:
            return f"`{path}`"
        return f"[`{inside}`]({quote(str(inside))})" if link else f"`{inside}`"

    lines = [
        f"{named(folder / 'run.jsonl')}: environment, suite and every measurement with its samples"
    ]
    if logs := sorted({m.log for m in run.measurements if m.log}):
        # No link: logs stay on the machine of the run, and reports are read elsewhere.
        where = named(folder / PurePath(logs[0]).parent, link=False)
        lines.append(f"{where}: output of {text.plural('process', len(logs))}")
    return tuple(lines)


def _elapsed(run: Run) -> str:
    if run.elapsed_s is not None:
        return units.duration(run.elapsed_s)
    if not (run.started_at and run.ended_at):
        return "not available (the run is unfinished)"
    start, end = (datetime.datetime.fromisoformat(t) for t in (run.started_at, run.ended_at))
    return units.duration((end - start).total_seconds())
