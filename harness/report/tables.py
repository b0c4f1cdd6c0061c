"""The tables of a report. Cells are finished text; the template only lays them out."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness import units
from harness.analysis.bounds import timeout_bound
from harness.analysis.effects import longest
from harness.analysis.scaling import ScalingFit
from harness.analysis.statistics import settle, times_better
from harness.analysis.study import Study
from harness.records import (
    METRICS,
    OVER_STEPS,
    SPEEDS,
    Case,
    CaseSummary,
    Decision,
    Environment,
    Estimate,
    Fact,
    Finding,
    Outcome,
    Rule,
    Run,
    Scalar,
    Verdict,
    gpu_matches,
    pairs,
)
from harness.report.text import SCALING, Word, filled, listed, own_name, shared_name
from harness.report.verdict_text import (
    NOTED,
    distance,
    margin_text,
    requirement_text,
    rule_sentence,
    word,
)

MAX_AXIS_COLUMNS, MAX_ROWS = 2, 12
"""Of a page: axes with a column of their own, and rows of a table of results."""
_SHOWN = (
    *("tokens_per_s", "step_s", "energy_per_token_j"),
    *("gpu_utilisation", "cpu_utilisation", "peak_memory_bytes"),
)
"""Metrics on the page; the appendix has all."""
NONE = "–"
_TITLES = {m.name: m.title for m in METRICS.values()} | {
    "cpu_utilisation": "CPU cores",
    "gpu_utilisation": "GPU busy",
}


MAX_RATIOS = 2
"""Providers that the first one is compared with in a table."""


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


def results(summaries: Sequence[CaseSummary], of: Study, *, intervals: bool = False) -> Table:
    """Speed, utilisation and memory of one workload's cases; with `intervals` each metric, and all
    with their intervals."""
    cases = [s.case for s in summaries]
    axes = varying(cases)
    if len(axes) > MAX_AXIS_COLUMNS:
        heads: tuple[str, ...] = ("case",)
    else:
        heads = axes or ("provider",)
    free = dict.fromkeys(r.metric for c in cases if c.program for r in c.program.readings)
    timed = (name for name, metric in METRICS.items() if not metric.counted)
    known = [*timed, *(name for name in free if name not in METRICS)]
    metrics = [m for m in known if any(m in s.metrics or timeout_bound(s, m) for s in summaries)]
    if not intervals:
        metrics = [m for m in metrics if m in _SHOWN or m not in METRICS]
    rows = []
    for s in summaries:
        first = [of.names[s.case.case_id]] if heads == ("case",) else axis_cells(s.case, heads)
        if heads[0] == "provider":
            first[0] = of.run.suite.provider(s.case.workload, s.case.provider)
        count = (_count(s),) if intervals else ()
        rows.append((*first, *(metric_cell(s, m, intervals) for m in metrics), *count))
    named = titles(cases)
    last = (">n",) if intervals else ()
    columns = (*map(of.run.suite.axis, heads), *(f">{named[m]}" for m in metrics), *last)
    return Table(columns=columns, rows=tuple(rows))


def shows(metric: str) -> bool:
    """Whether `results` has a column for a metric; exact counts, errors and what a training run
    records over its steps have tables of their own."""
    own = metric in ("error_of_bound", *OVER_STEPS)
    return not own and not (metric in METRICS and METRICS[metric].counted)


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
    named = {p: run.suite.provider(summaries[0].case.workload, p) for p in providers}
    asked = (
        r.metric
        for r in run.suite.rules
        if r.metric in SPEEDS and any(r.match.accepts(s.case) for s in summaries)
    )
    metric = next(asked, SPEEDS[0])
    if not any(metric in s.metrics for s in summaries):
        metric = "step_s"
    remark = (
        f"Speeds: {_TITLES[metric]}. The appendix has memory, utilisation and the other metrics."
    )
    if len(others) > MAX_RATIOS:
        return replace(
            _by_provider(summaries, run, metric), remarks=(f"The fastest is bold. {remark}",)
        )
    axes = [a for a in varying([s.case for s in summaries]) if a != "provider"]
    groups = [{s.case.provider: s for s in g} for g in pairs(summaries, "provider", one_gpu=True)]
    labels = [run.suite.label(g[ours].case) if ours in g else () for g in groups]
    rows = []
    for side, label in zip(groups, labels, strict=True):
        case = next(iter(side.values())).case
        rest = [part for part in label if part not in named.values()]
        first = (", ".join(rest or label),) if all(labels) else axis_cells(case, axes)
        cells = (metric_cell(side[p], metric, False) if p in side else NONE for p in providers)
        steps = {p: s.metrics.get("step_s") for p, s in side.items()}
        ratios = (_ratio_cell(steps.get(ours), steps.get(p)) for p in others)
        rows.append((*first, *cells, *ratios))
    columns = (
        *(("case",) if all(labels) else map(run.suite.axis, axes)),
        *(f">{name}" for name in named.values()),
        *(f">{named[ours]} against {named[p]}" for p in others),
    )
    return Table(columns=columns, rows=tuple(rows), remarks=(remark,))


def _by_provider(summaries: Sequence[CaseSummary], run: Run, metric: str) -> Table:
    """One row a provider in each configuration, one column a value of an axis."""
    axis, values, heads = _across(summaries, run)
    rows = []
    for group in pairs(summaries, axis, "provider"):
        ranked = [_ranked(group, axis, value, metric) for value in values]
        best = {id(of[0]) for of in ranked if of[1:]}
        name = _configuration(group, run, heads)
        names = {
            c.provider: run.suite.provider(c.workload, c.provider) for c in (s.case for s in group)
        }
        for provider, shown in names.items():
            cells = [NONE] * len(values)
            for s in (s for s in group if s.case.provider == provider):
                text = metric_cell(s, metric, False)
                cells[values.index(s.case.get(axis))] = f"**{text}**" if id(s) in best else text
            rows.append((name, shown, *cells))
    return Table(columns=("case", "provider", *(f">{head}" for head in heads)), rows=tuple(rows))


def leaders(summaries: Sequence[CaseSummary], run: Run) -> Table:
    """One row a configuration, one column a value of an axis: the fastest provider there, its step
    time, and how many times as long the next takes, and each ahead of the suite's first."""
    axis, values, heads = _across(summaries, run)
    ours = run.suite.provider(summaries[0].case.workload, summaries[0].case.provider)
    rows = []
    for group in pairs(summaries, axis, "provider"):
        ranked = [_ranked(group, axis, value, "step_s") for value in values]
        rows.append((_configuration(group, run, heads), *(_lead(of, ours, run) for of in ranked)))
    remark = f"A cell: the fastest, its step time; the next, up to {ours}, as multiples of that."
    return Table(
        columns=("case", *(f">{head}" for head in heads)), rows=tuple(rows), remarks=(remark,)
    )


def _across(
    summaries: Sequence[CaseSummary], run: Run
) -> tuple[str, list[Scalar | None], list[str]]:
    """The axis along which the cases make the fewest rows, its values, and their heads."""
    axis = longest(summaries) or "seq_len"
    values = [*dict.fromkeys(s.case.get(axis) for s in summaries)]
    heads = [f"{run.suite.axis(axis)}={units.scalar(v)}" if v is not None else "" for v in values]
    return axis, values, heads


def _lead(ranked: Sequence[CaseSummary], ours: str, run: Run) -> str:
    """`dense cuDNN 399 µs; dense flash-attn 1.88x; NSA Triton 2.66x`."""
    if not ranked:
        return NONE
    names = [run.suite.provider(s.case.workload, s.case.provider) for s in ranked]
    times = [s.metrics["step_s"].value for s in ranked]
    last = max(1, names.index(ours)) if ours in names else 1
    later = zip(names[1 : last + 1], times[1 : last + 1], strict=True)
    factors = (f"{name} {units.factor(time / times[0])}" for name, time in later)
    return "; ".join([f"{names[0]} {units.duration(times[0])}", *factors])


def _configuration(group: Sequence[CaseSummary], run: Run, heads: Sequence[str]) -> str:
    """The label of cases without what the columns and the providers say."""
    cases = [s.case for s in group]
    beside = {*heads, *(run.suite.provider(c.workload, c.provider) for c in cases)}
    parts = run.suite.label(cases[0]) or (cases[0].case_id,)
    return ", ".join(part for part in parts if part not in beside)


def _ranked(
    group: Sequence[CaseSummary], axis: str, value: Scalar | None, metric: str
) -> list[CaseSummary]:
    """Those with a speed at a value of an axis, the fastest first."""
    timed = [s for s in group if s.case.get(axis) == value and metric in s.metrics]
    return sorted(timed, key=lambda s: s.metrics[metric].value, reverse=metric != "step_s")


def _ratio_cell(ours: Estimate | None, theirs: Estimate | None) -> str:
    """`1.45x [1.40 … 1.50] slower`; `~ 0.98x as fast` if it may be as fast."""
    if ours is None or theirs is None:
        return NONE
    ratio = times_better(ours, theirs, higher_is_better=False)
    side, sure = settle(ratio, lambda low, high: low > 1 or high < 1 or None, linear=False)
    if side is None or (ratio.n > 2 and not sure):
        return f"~ {units.ratio(ratio, 'times')} as fast"
    if ratio.value >= 1:
        return f"{units.ratio(ratio, 'times')} faster"
    return f"{units.ratio(ratio.inverse, 'times')} slower"


def rules(verdict: Verdict, parts: Mapping[str, str]) -> Table:
    """Every rule with its decision; those that answer the question first, in its order."""
    order, count = [*parts, ""], Counter(r.asks for r in verdict.rules)
    ranked = sorted(verdict.rules, key=lambda r: order.index(r.asks))
    rows = [
        (
            parts.get(r.asks, r.rule) + (f" ({r.rule})" if r.asks and count[r.asks] > 1 else ""),
            requirement_text(r),
            f"{word(r)}{'' if r.counts else NOTED}" if r.applies else r.said,
            f"{rule_sentence(r)}{margin_text(r)}",
        )
        for r in ranked
    ]
    head = "part of the question, or rule" if parts else "rule"
    columns = (head, "requires", "answer", "because")
    return Table(columns=columns, rows=tuple(rows))


def expectations(
    assessed: Iterable[tuple[Rule, Sequence[Finding]]],
    environment: Environment,
    names: Mapping[str, str],
) -> Table:
    """A row for each expectation of this GPU, with its farthest case; a remark counts others."""
    rows, elsewhere = [], list[str]()
    for e, of in assessed:
        if of and not gpu_matches(e.gpu, environment.device_name):
            elsewhere.append(e.gpu.strip("*"))
        elif of:
            shared = shared_name([names[f.subject] for f in of])
            worst = max(of, key=lambda f: (distance(f, e), f.estimate is None))
            own = own_name(names[worst.subject], shared) if of[1:] else ""
            counts = Counter(_result(f) for f in of)
            results = [f"{n} {word}" if of[1:] else word for word, n in counts.items()]
            rows.append(
                (
                    f"{shared}{f' ({len(of)} cases)' if of[1:] else ''}",
                    f"{METRICS[e.metric].title} {_range(e.metric, e.low, e.high)}",
                    e.source or NONE,
                    f"{_actual(worst)}{f' ({own})' if own else ''}",
                    units.factor(far) if (far := distance(worst, e)) > 1 else NONE,
                    listed(results),
                )
            )
    stated = units.plural("expectation", len(elsewhere))
    remark = f"Not asked on this GPU: {stated} for {', '.join(sorted({*elsewhere}))}."
    columns = ("cases", "expected", "source", ">actual, worst case", ">missed by", "result")
    remarks = (remark,) if elsewhere else ()
    return Table(columns=columns, rows=tuple(rows), remarks=remarks)


def scaling(fits: Sequence[ScalingFit], names: Mapping[str, str], word: Word = str) -> Table:
    """One row a group: the exponent of its points, by segment where it bends."""
    rows = []
    for f in fits:
        timed = sum(p.step_s is not None for p in f.points)
        late = f", {f.censored} timed out" if f.censored else ""
        shared = shared_name([names[p.case_id] for p in f.points])
        by = f"by kernels {units.value('scaling_exponent', f.kernels)}" if f.kernels else NONE
        note = filled(SCALING["note"], f.facts, "; ") or by
        rows.append((shared, word(f.axis), growth(f), f"{timed}{late}", note))
    columns = ("cases", "along", ">exponent [95 %]", ">points", "note")
    return Table(columns=columns, rows=tuple(rows))


def growth(f: ScalingFit) -> str:
    """The exponent, or that of each segment: `flat to 512, then 0.91 [0.88 … 0.94] to 2,048`."""
    *bent, last = f.segments or (None,)
    if last is None or not bent:
        why = filled(SCALING["no_fit"], f.facts)
        return units.value("scaling_exponent", f.exponent) if f.exponent else unknown(why)
    end = "flat" if last.flat else units.value("scaling_exponent", last.exponent)
    return f"{', '.join(bends(f))}, then {end} to {last.end.x:,g}"


def bends(f: ScalingFit) -> list[str]:
    """The segments before the last: `flat to 512`, `0.404 to 32,768`."""
    return [
        f"{'flat' if s.flat else units.number(s.exponent.value, 3)} to {s.end.x:,g}"
        for s in f.segments[:-1]
    ]


# --- cells -------------------------------------------------------------------------------


def unknown(why: str) -> str:
    return f"not available ({why})" if why else "not available"


def settings_text(mapping: Mapping[str, Scalar] | Mapping[str, str]) -> str:
    return ", ".join(f"{k}={units.scalar(v)}" for k, v in mapping.items())


def metric_cell(s: CaseSummary, metric: str, intervals: bool) -> str:
    estimate = s.metrics.get(metric)
    if estimate is not None:
        whole = intervals or metric in ("tokens_per_s", "step_s")
        text = units.value(metric, estimate) if whole else units.plain(metric, estimate.value, 3)
        if metric == "roofline_share" and s.roofline_by:
            text = f"{text} ({s.roofline_by})"
        return text if s.outcome is Outcome.OK else f"{text} ({units.outcome_name(s.outcome)})"
    bound = timeout_bound(s, metric)
    if bound is not None:
        return f"{units.bound_text(metric, bound)} (timeout)"
    if metric == "tokens_per_s" and s.tokens and s.untimed_s:
        return f"{units.bound_text(metric, s.tokens / s.untimed_s)} with start-up (timeout)"
    if metric == "step_s":
        return "not repeatable" if "step_s" in s.apart else units.outcome_name(s.outcome)
    return NONE


def _count(s: CaseSummary) -> str:
    step = s.metrics.get("step_s")
    if step is None:
        return str(s.apart["step_s"].n if s.apart else 0)
    return f"{step.n} × {step.samples / step.n:.0f}"


def _range(metric: str, low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{units.plain(metric, low)} to {units.plain(metric, high)}"
    return f"at {'most' if low is None else 'least'} {units.plain(metric, low or high or 0.0)}"


def _result(f: Finding) -> str:
    """`met`, `missed`, `likely missed`, `open`, `not measured`."""
    words = {Decision.GO: "met", Decision.NO_GO: "missed"}
    if f.likely:
        return f"likely {words[f.likely]}"
    if f.fact is Fact.OPEN:
        return "open"
    unknown_word = "open" if f.estimate or f.bound else "not measured"
    return words.get(f.decision, unknown_word)


def _actual(f: Finding) -> str:
    if f.estimate is not None:
        return units.value(f.metric, f.estimate)
    if f.bound is None:
        return unknown("no measurement")
    return f"{units.bound_text(f.metric, f.bound)} (timeout)"
