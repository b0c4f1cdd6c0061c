"""One record a template may see, built from a run."""

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
from harness.report.failures import Failure, failures
from harness.report.figures import Picture
from harness.report.profile import Ran, in_brief, ran
from harness.report.tables import Table


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
    """The same with every metric's interval; None where no case has one."""
    effects: tuple[str, ...]
    """What each axis does to the speed."""
    notes: tuple[str, ...]
    common: str
    """The observed configuration that all its cases share."""
    effective: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContext:
    """Everything a report says."""

    title: str
    date: str
    author: str
    version: int
    run: Run
    device: str
    branch: str
    commit: str
    verdict: Verdict
    summary: tuple[str, ...]
    rules: Table
    environment: Table
    sections: tuple[Section, ...]
    expectations: Table | None
    target_warnings: tuple[str, ...]
    dead_axes: tuple[str, ...]
    """Values that do the same as others, and speeds that do not move."""
    compared: str
    """Of how many pairs of cases it is known whether they did the same."""
    flags: tuple[str, ...]
    """Variables, and whether anything asked for them."""
    scaling: Table | None
    scaling_pictures: tuple[str, ...]
    telemetry_picture: str
    telemetry_missing: str
    """Why there is no figure of utilisation over time; empty where there is one."""
    ran: Ran
    failures: tuple[Failure, ...]
    not_run: Table | None
    cost: Table | None
    commands: tuple[str, ...]
    dirty: bool
    artefacts: tuple[str, ...]
    elapsed: str
    time_use: str
    timeline: Table
    steadiness: Table | None
    """Spread within and between processes, a case a row; None where nothing was timed."""
    proof: str
    """How the instrument's proof ended, or why there is none."""
    proof_checks: Table | None
    figures: Mapping[str, tuple[str, str]]
    """Name of a picture -> (alternative text, relative link)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A report before it has a version: all analysis done, all pictures drawn."""

    run: Run
    summaries: tuple[CaseSummary, ...]
    fits: tuple[ScalingFit, ...]
    verdict: Verdict
    pictures: tuple[Picture, ...]


def analyse(run: Run) -> Content:
    """Do all that does not depend on where the report is written."""
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
    content: Content,
    *,
    date: datetime.date,
    author: str,
    version: int,
    directory: Path,
    links: Mapping[str, str],
) -> ReportContext:
    """The record that the template prints.

    Args:
        directory: Where the report will lie; records under it are linked, not only named.
        links: Name of a picture -> its path relative to the report.
    """
    run, summaries, fits = content.run, content.summaries, content.fits
    suite, env = run.suite, run.environment
    assessments = assess(suite, env, summaries)
    targets = modest(suite, env, done(summaries), {s.case.case_id: s.effective for s in summaries})
    drawn = {p.name: (p.alt, links[p.name]) for p in content.pictures}
    axis_effects = effects(summaries)
    odd = oddities(run, summaries)
    return ReportContext(
        title=f"{date:%Y-%m-%d} Test Engineer Report - {suite.subject} v{version}",
        date=f"{date:%Y-%m-%d}",
        author=author,
        version=version,
        run=run,
        device=text.device(env),
        branch=env.git.branch if env.git else "not available (not a git repository)",
        commit=env.git.commit if env.git else "not available (not a git repository)",
        verdict=content.verdict,
        summary=(
            *text.executive_summary(
                run, summaries, content.verdict, axis_effects, assessments, fits, targets
            ),
            *in_brief(run, summaries),
            *text.oddities_in_brief(odd),
        ),
        ran=ran(run, summaries),
        rules=tables.rules(content.verdict),
        environment=tables.environment(env, run),
        sections=tuple(_sections(run, summaries, axis_effects, drawn)),
        expectations=tables.expectations(assessments) if assessments else None,
        target_warnings=tuple(f"{text.target_text(t)}." for t in targets),
        dead_axes=text.oddity_sentences(odd),
        compared=text.coverage_sentence(odd),
        flags=text.flag_sentences(run),
        scaling=tables.scaling(fits) if fits else None,
        scaling_pictures=tuple(n for n in drawn if n.startswith("scaling-")),
        telemetry_picture="utilisation" if "utilisation" in drawn else "",
        telemetry_missing=_telemetry_missing(run),
        failures=failures(summaries, run),
        not_run=tables.not_run(summaries, run),
        cost=tables.cost(summaries, run),
        commands=_commands(run),
        dirty=env.uncommitted,
        artefacts=_artefacts(run, directory),
        elapsed=_elapsed(run),
        time_use=text.time_use_sentence(used)
        if (used := time_use(run))
        else "unknown"
        if run.measurements
        else "no process ran",
        timeline=tables.timeline(run),
        steadiness=steadiness.table(spreads(run), summaries),
        proof=steadiness.proof(run),
        proof_checks=steadiness.proof_checks(run),
        figures=drawn,
    )


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
    """Group -> what tells it from the other groups of the figure."""
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
    if _representative(run) is not None:
        return ""
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
        f"{named(folder / 'run.jsonl')}: environment, suite and every measurement, samples included"
    ]
    if logs := sorted({m.log for m in run.measurements if m.log}):
        # No link: logs stay on the machine that ran this, and reports are read elsewhere.
        where = named(folder / PurePath(logs[0]).parent, link=False)
        lines.append(
            f"{where}: output of {len(logs)} {'process' if len(logs) == 1 else 'processes'}"
        )
    return tuple(lines)


def _elapsed(run: Run) -> str:
    if run.elapsed_s is not None:
        return units.duration(run.elapsed_s)
    if not (run.started_at and run.ended_at):
        return "not available (the run is unfinished)"
    start, end = (datetime.datetime.fromisoformat(t) for t in (run.started_at, run.ended_at))
    return units.duration((end - start).total_seconds())
