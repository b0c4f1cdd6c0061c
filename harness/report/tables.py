"""The tables of a report. Cells are finished text; the template only lays them out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from harness import units
from harness.analysis.expectation import Assessment, timeout_bound
from harness.analysis.overhead import by_phase
from harness.analysis.scaling import ScalingFit, groups_along
from harness.analysis.statistics import times_better
from harness.analysis.summary import why_absent
from harness.records import (
    METRICS,
    Case,
    CaseSummary,
    Environment,
    Estimate,
    Gpu,
    Outcome,
    Run,
    Scalar,
    Verdict,
)
from harness.report.markdown import clipped
from harness.report.text import JUDGEMENTS, outcome_name, unavailable
from harness.report.verdict_text import requirement_text, rule_sentence

MAX_AXIS_COLUMNS = 4
MAX_DETAIL = 240
"""Letters of a reason."""
_DETAILS = ("step_cycles",)
"""Metrics only of the table of details: each repeats another one in another unit."""
NONE = "–"
_TITLES = {m.name: m.title for m in METRICS.values()} | {
    "cpu_utilisation": "CPU cores",
    "gpu_utilisation": "GPU busy",
}


MAX_RATIOS = 3
"""Providers that the first one is compared with in a table."""
_SPEEDS = ("tokens_per_s", "step_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Headings (a leading `>` aligns a column right), rows, and remarks to print below."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()


def varying(cases: Sequence[Case]) -> tuple[str, ...]:
    """`provider` and the swept axes, those that take more than one value, in declared order."""
    names = dict.fromkeys(["provider", *(n for c in cases for n in c.swept)])
    # 1 and True are equal, but different values.
    return tuple(n for n in names if len({(type(v), v) for v in (c.get(n) for c in cases)}) > 1)


def labels(cases: Sequence[Case]) -> dict[str, str]:
    """Case id -> the shortest name that tells these cases apart."""
    names = varying(cases)
    return {
        c.case_id: "  ".join(_part(n, c.get(n)) for n in names if c.get(n) is not None)
        or c.provider
        for c in cases
    }


def results(summaries: Sequence[CaseSummary], run: Run, *, intervals: bool = False) -> Table:
    """Speed, utilisation and memory of one workload's cases.

    Args:
        intervals: Every metric with its interval; otherwise only tokens/s and step time have one,
            which keeps the table narrow.
    """
    cases = [s.case for s in summaries]
    axes = varying(cases)
    names = labels(cases)
    if len(axes) > MAX_AXIS_COLUMNS:
        heads: tuple[str, ...] = ("case",)
    else:
        heads = axes or ("provider",)
    free = dict.fromkeys(r.metric for c in cases if c.program for r in c.program.readings)
    timed = (name for name, metric in METRICS.items() if not metric.counted)  # see report.ran
    known = [*timed, *(name for name in free if name not in METRICS)]
    metrics = [m for m in known if any(m in s.metrics for s in summaries)]
    if not intervals:
        metrics = [m for m in metrics if m not in _DETAILS]
    rows = []
    for s in summaries:
        first = [f"`{names[s.case.case_id]}`"] if heads == ("case",) else axis_cells(s.case, heads)
        rows.append((*first, *(metric_cell(s, m, intervals) for m in metrics), _count(s)))
    named = titles(cases)
    columns = (*heads, *(f">{named[m]}" for m in metrics), ">n")
    remarks = () if intervals else tuple(_missing(summaries, run))
    return Table(columns=columns, rows=tuple(rows), remarks=remarks)


def titles(cases: Sequence[Case]) -> dict[str, str]:
    """Metric -> how a table calls it, also those that only a program of these cases knows."""
    own = (r for c in cases if c.program for r in c.program.readings)
    return {r.metric: f"{r.metric} ({r.unit})" for r in own} | _TITLES


def axis_cells(case: Case, axes: Sequence[str]) -> list[str]:
    return [units.scalar(v) if (v := case.get(a)) is not None else NONE for a in axes]


def pivot(summaries: Sequence[CaseSummary], run: Run) -> Table:
    """One row a configuration, one column a provider, and how the first compares with each other.

    The metric is that of the first rule on these cases, or tokens/s.
    """
    ours, *others = providers = [*dict.fromkeys(s.case.provider for s in summaries)]
    asked = (
        r.metric
        for r in run.suite.rules
        if r.metric in _SPEEDS and any(r.match.accepts(s.case) for s in summaries)
    )
    metric = next(asked, _SPEEDS[0])
    if not any(metric in s.metrics for s in summaries):
        metric = "step_s"
    axes = [a for a in varying([s.case for s in summaries]) if a != "provider"]
    groups = [{s.case.provider: s for s in g} for g in groups_along(summaries, "provider")]
    labels = [run.suite.label(g[ours].case) if ours in g else "" for g in groups]
    rows = []
    for side, label in zip(groups, labels, strict=True):
        case = next(iter(side.values())).case
        values = axis_cells(case, axes)
        cells = (metric_cell(side[p], metric, False) if p in side else NONE for p in providers)
        steps = {p: s.metrics.get("step_s") for p, s in side.items()}
        ratios = (_ratio_cell(steps.get(ours), steps.get(p)) for p in others[:MAX_RATIOS])
        rows.append((*((label,) if all(labels) else values), *cells, *ratios))
    columns = (
        *(("case",) if all(labels) else axes),
        *(f">{p}" for p in providers),
        *(f">{ours} against {p}" for p in others[:MAX_RATIOS]),
    )
    remark = (
        f"In {_TITLES[metric]}; ~: not decided. Memory, utilisation and the other metrics are in "
        "the appendix."
    )
    return Table(columns=columns, rows=tuple(rows), remarks=(remark,))


def _ratio_cell(ours: Estimate | None, theirs: Estimate | None) -> str:
    if ours is None or theirs is None:
        return NONE
    ratio = times_better(ours, theirs, higher_is_better=False)
    faster = ratio.value >= 1
    if not faster:
        ratio = times_better(theirs, ours, higher_is_better=False)
    open_ = "~ " if ratio.low is not None and ratio.low <= 1 else ""
    single = ratio.processes < 2  # a guard band is no interval
    text = units.number(ratio.value, 3) + "x" if single else units.times(ratio)
    return f"{open_}{text} {'faster' if faster else 'slower'}"


def rules(verdict: Verdict, parts: Mapping[str, str]) -> Table:
    """Every rule with its decision; those that answer the question first, in its order."""
    order = [*parts, ""]
    ranked = sorted(verdict.rules, key=lambda r: order.index(r.asks))
    rows = ((r.rule, requirement_text(r), r.said, rule_sentence(r)) for r in ranked)
    columns = ("rule", "requires", "decision", "because")
    if not parts:
        return Table(columns=columns, rows=tuple(rows))
    asked = tuple((parts.get(r.asks, ""), *row) for r, row in zip(ranked, rows, strict=True))
    return Table(columns=("question", *columns), rows=asked)


def environment(run: Run) -> Table:
    """Where, on what and with what."""
    rows = (
        *environment_rows(run.environment),
        ("suite", f"{run.suite.path}, sha256 {run.suite.sha256[:12]}"),
        ("captured", units.utc(run.environment.captured_at)),
    )
    return Table(columns=("what", "value"), rows=rows)


def environment_rows(e: Environment) -> list[tuple[str, str]]:
    """What each part of a machine is, or why that is not known."""
    rows: list[tuple[str, str]] = []
    if e.gpu:
        g = e.gpu
        facts = [units.size(g.memory_bytes), f"compute capability {g.compute_capability}"]
        if g.power_limit_w is not None:
            facts.append(power_limit(g))
        if g.max_sm_clock_hz is not None:
            facts.append(f"SM clock up to {g.max_sm_clock_hz / 1e6:,.0f} MHz")
        rows += [
            ("GPU", f"{g.name} ({', '.join(facts)}), {g.uuid}"),
            ("driver", f"{g.driver}, CUDA {g.cuda_driver}"),
        ]
    else:
        rows.append(("GPU", _unknown(e.gpu_unavailable)))
    rows += [
        ("host", e.hostname),
        ("CPU", f"{e.cpu}, {e.cpu_count} cores"),
        ("memory", units.size(e.memory_bytes)),
        ("system", e.os),
        *((name, version or "absent") for name, version in e.versions.items()),
        ("torch settings", _pairs(e.torch_settings) or _unknown("no worker reported them")),
        ("variables", _pairs(e.variables) or "none set"),
    ]
    if e.path:
        imported = ("imported packages", _pairs(e.packages) or "none of the repository")
        rows += [("interpreter", e.interpreter), ("search path", ", ".join(e.path)), imported]
    if e.git is None:
        rows.append(("git", _unknown("not a git repository")))
    else:
        dirty = e.git.dirty_sha256
        state = f"with uncommitted changes (hash {dirty[:12]})" if dirty else "clean"
        rows.append(("git", f"{e.git.commit[:12]} on {e.git.branch}, {state}"))
    return rows


def power_limit(gpu: Gpu) -> str:
    """`power limit 600 W, 86 % of its default`."""
    share = gpu.power_limit_share
    of = "its default not recorded" if share is None else f"{units.percent(share)} of its default"
    return f"power limit {units.number(gpu.power_limit_w or 0)} W, {of}"


def effective(summaries: Sequence[CaseSummary]) -> tuple[str, Table]:
    """The configuration observed in every ok case of a workload, and what differs by case."""
    observed = [s.effective for s in summaries if s.outcome is Outcome.OK]
    common = {
        k: v
        for k, v in (observed[0] if observed else {}).items()
        if all(k in o and o[k] == v for o in observed)
    }
    rows = []
    for s in summaries:
        own = _pairs({k: v for k, v in s.effective.items() if common.get(k) != v})
        if s.outcome is Outcome.OK:
            seen = own or "as above"
        else:
            seen = "; ".join(filter(None, (_unknown(outcome_name(s.outcome)), own)))
        env = f"; environment: {_pairs(s.case.env)}" if s.case.env else ""
        rows.append((f"`{s.case.case_id}`", seen + env))
    return _pairs(common), Table(columns=("case", "observed"), rows=tuple(rows))


def expectations(assessments: Sequence[Assessment]) -> Table:
    rows = []
    for a in assessments:
        e = a.expectation
        stated = "" if e.gpu == "*" else f" on {e.gpu}"
        source = f" ({e.source})" if e.source else ""
        rows.append(
            (
                f"`{a.case_id}`",
                f"{METRICS[e.metric].title}: {_range(e.metric, e.low, e.high)}{stated}{source}",
                _actual(a),
                _distance(a),
                JUDGEMENTS[a.judgement],
            )
        )
    return Table(columns=("case", "expected", "actual", "factor", "judgement"), rows=tuple(rows))


def scaling(fits: Sequence[ScalingFit]) -> Table:
    rows = []
    for f in fits:
        timed = sum(p.step_s is not None for p in f.points)
        rows.append(
            (f"`{f.group}`", f.axis, growth(f), str(timed), str(f.censored), f.note or NONE)
        )
    return Table(
        columns=("group", "axis", "exponent [95 %]", ">measured", ">timed out", "note"),
        rows=tuple(rows),
    )


def growth(f: ScalingFit) -> str:
    """The exponent, or that of each segment: `flat to 512, then 0.91 [0.88 … 0.94] to 2,048`."""
    *bent, last = f.segments or (None,)
    if last is None or not bent:
        fitted = f.exponent
        return units.cell("scaling_exponent", fitted) if fitted else _unknown(f.reason)
    parts = [
        f"{'flat' if s.flat else units.number(s.exponent.value, 2)} to {s.end.x:,g}" for s in bent
    ]
    end = "flat" if last.flat else units.cell("scaling_exponent", last.exponent)
    return f"{', '.join(parts)}, then {end} to {last.end.x:,g}"


def not_run(summaries: Sequence[CaseSummary], run: Run) -> Table | None:
    """Cases that a provider declined, that the machine was not fit for, or that did not start.
    Failures have a section of their own."""
    rows = []
    for s in summaries:
        outcome, measured = s.outcome, run.of(s.case.case_id)
        declined = next((m for m in measured if m.outcome is Outcome.UNSUPPORTED), None)
        if declined:
            outcome, why = declined.outcome, declined.detail
        elif outcome is None:
            why = s.detail or "the run ended before this case started"
        elif outcome is Outcome.INVALID_ENVIRONMENT and all(m.samples_s for m in measured):
            why = s.detail  # judged afterwards
        else:
            continue
        allowed = s.case.allow.get(outcome) if outcome else None
        reason = clipped(why.strip(), MAX_DETAIL) or NONE
        peer = "yes, a peer" if s.case.provider in run.suite.peers else NONE if s.stop else "no"
        rows.append((f"`{s.case.case_id}`", outcome_name(outcome), reason, allowed or peer))
    if not rows:
        return None
    return Table(columns=("case", "outcome", "why", "allowed"), rows=tuple(rows))


def cost(summaries: Sequence[CaseSummary], run: Run) -> Table | None:
    """Time, and money if the suite names a price, for the steps of the suite's `cost`."""
    plan = run.suite.cost
    if plan is None:
        return None
    columns = [f">time to {plan.steps:,} steps [95 %]"]
    units_of: list[Callable[[float], str]] = [units.duration]
    if (price := plan.usd_per_gpu_hour) is not None:
        columns.append(f">cost at ${price:,.2f} a GPU hour [95 %]")
        units_of.append(partial(_dollars, usd_per_hour=price))
    rows = []
    for s in summaries:
        if plan.match.accepts(s.case):
            cells = (_extrapolated(s, plan.steps, shown) for shown in units_of)
            rows.append((f"`{s.case.case_id}`", *cells))
    return Table(columns=("case", *columns), rows=tuple(rows)) if rows else None


def timeline(run: Run) -> Table:
    """The wall time of the run by phase; only that of its processes if no more is known."""
    spent = by_phase(run)
    live = sum(m.wall_s for m in run.measurements)
    other = "launch and exit" if spent or not live else "unknown phases"
    spent[other] = max(0.0, live - sum(spent.values()))
    if run.wall_s is not None:
        spent["before and between processes"] = max(0.0, run.wall_s - live)
    whole = run.wall_s or live
    rows = [
        (name, units.duration(s), units.percent(s / whole) if whole else NONE)
        for name, s in spent.items()
    ]
    return Table(columns=("phase", ">time", ">share"), rows=tuple(rows))


# --- cells -------------------------------------------------------------------------------


def _part(name: str, value: Scalar | None) -> str:
    return units.scalar(value) if name == "provider" else f"{name}={units.scalar(value)}"


def _unknown(why: str) -> str:
    return f"not available ({why})" if why else "not available"


def _pairs(mapping: Mapping[str, Scalar] | Mapping[str, str]) -> str:
    return ", ".join(f"{k}={units.scalar(v)}" for k, v in mapping.items())


def metric_cell(s: CaseSummary, metric: str, intervals: bool) -> str:
    estimate = s.metrics.get(metric)
    if estimate is not None:
        whole = intervals or metric in ("tokens_per_s", "step_s")
        text = units.cell(metric, estimate) if whole else units.plain(metric, estimate.value, 3)
        if metric == "roofline_share" and s.roofline_by:
            text = f"{text} ({s.roofline_by})"
        return text if s.outcome is Outcome.OK else f"{text} ({outcome_name(s.outcome)})"
    bound = timeout_bound(s, metric)
    if bound is not None:
        return f"{units.bound_text(metric, bound)} (timeout)"
    if metric == "step_s":
        return "not repeatable" if s.apart_s else outcome_name(s.outcome)
    return NONE


def _count(s: CaseSummary) -> str:
    step = s.metrics.get("step_s")
    if step is None:
        return str(len(s.apart_s))
    return f"{step.processes} × {step.samples // step.processes}"


def _missing(summaries: Sequence[CaseSummary], run: Run) -> Iterable[str]:
    """Why metrics are missing from cases that ended ok."""
    ok = [s for s in summaries if s.outcome is Outcome.OK]
    named = [m for m in METRICS.values() if m.of_case and m.name not in _DETAILS]
    reasons = (
        (
            _TITLES[m.name],
            why_absent(s, run.of(s.case.case_id), run.environment, m.name),
            s.case.case_id,
        )
        for m in named
        for s in ok
        if m.name not in s.metrics
    )
    return unavailable(reasons, len(ok))


def _range(metric: str, low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{units.plain(metric, low)} to {units.plain(metric, high)}"
    if low is not None:
        return f"at least {units.plain(metric, low)}"
    return "not stated" if high is None else f"at most {units.plain(metric, high)}"


def _actual(a: Assessment) -> str:
    metric = a.expectation.metric
    if a.actual is not None:
        return units.cell(metric, a.actual)
    if a.bound is None:
        return _unknown("no measurement")
    return f"{units.bound_text(metric, a.bound)} (timeout)"


def _distance(a: Assessment) -> str:
    if not a.factors:
        return "within" if a.actual is not None else NONE
    value, low = a.actual.value if a.actual else a.bound, a.expectation.low
    side = "below" if low is not None and value is not None and value < low else "above"
    over = "more than " if a.actual is None else ""
    ends = list(dict.fromkeys(units.factor(f) for f in a.factors))
    return f"{over}{' to '.join(ends)} {side}"


def _extrapolated(s: CaseSummary, steps: int, shown: Callable[[float], str]) -> str:
    """What that many steps of a case need."""
    e = s.metrics.get("step_s")
    if s.outcome is Outcome.OK and e is not None:
        if e.low is None or e.high is None:
            return f"{shown(e.value * steps)} (one process, no interval)"
        if e.both:
            return " and ".join(shown(value * steps) for value in e.both)
        if not units.informs("step_s", e):
            return f"{shown(e.value * steps)} (not bounded by {e.processes} processes)"
        return f"{shown(e.value * steps)} [{shown(e.low * steps)} … {shown(e.high * steps)}]"
    if s.apart_s:
        return _unknown("not repeatable")
    if s.outcome is Outcome.TIMEOUT and s.lower_bound_s is not None:
        return f"more than {shown(s.lower_bound_s * steps)}"
    return _unknown(outcome_name(s.outcome))


def _dollars(seconds: float, usd_per_hour: float) -> str:
    usd = seconds / units.HOUR_S * usd_per_hour
    return f"${usd:,.2f}" if usd < 1000 else f"${usd:,.0f}"
