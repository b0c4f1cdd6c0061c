"""Which figures a page has: each has one message, which is its title, or it is not drawn."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import fmean

from harness import units
from harness.analysis import over_steps
from harness.analysis.roofline import HOST_BELOW, Stack
from harness.analysis.scaling import ScalingFit
from harness.analysis.study import Study
from harness.records import (
    METRICS,
    Case,
    CaseSummary,
    Interval,
    OverSteps,
    Ratio,
    Run,
    Suite,
    Verdict,
)
from harness.report import figures, remedies, text
from harness.report.figures import MAX_DOTS, Line, Panel, Picture, Row

MIN_CURVE, MAX_LINES, MAX_SLOW = 20, 3, 3
"""Fewest steps of a curve; most runs and slow steps in a panel."""


Rows = Callable[..., Row]
"""Makes a row of a case, its estimates and its marks."""


def draw(of: Study, parts: Sequence[Stack], verdict: Verdict) -> tuple[Picture, ...]:
    """The figures of a run, in the order of the page; `verdict` as the page has it."""
    run, names, asked = of.run, of.names, _asked(of.run.suite, verdict)

    def row(s: CaseSummary, *values: Interval, **marks: float) -> Row:
        return Row(names[s.case.case_id], values, s.case.case_id in asked, marks)

    drawn = [
        figures.where(parts, names, asked),
        _speeds(run.suite, of.summaries, row) or _versus(of, row),
        *_scalings(run.suite, of.fits, names),
        _over_steps(run, names),
        _utilisation(of.asked, of.waiting, row),
    ]
    return tuple(p for p in drawn if p is not None)


def _asked(suite: Suite, verdict: Verdict) -> tuple[str, ...]:
    """The case that misses a rule about speed farthest, or the worst one of the first part of the
    question; and the one that it is compared with."""
    order, found = [*suite.parts, ""], []
    for r in (r for r in verdict.rules if r.applies and r.stated and not r.stated.axis):
        sign = 1 if r.stated and r.stated.higher_is_better else -1
        for f in (f for f in r.findings if f.estimate and f.cases):
            worse = sign * f.estimate.value if f.estimate else 0.0
            found.append((order.index(r.asks), worse, (f.subject, f.partner)))
    return remedies.slowest(verdict) or min(found, default=(0, 0.0, ()))[2]


# --- dots ------------------------------------------------------------------------------------


def _utilisation(of: Sequence[CaseSummary], by_host: Collection[str], row: Rows) -> Picture | None:
    """Where the GPU waits for the host."""
    both = [s for s in of if {"gpu_utilisation", "cpu_utilisation"} <= s.metrics.keys()]
    rows = [row(s, s.metrics["gpu_utilisation"], s.metrics["cpu_utilisation"]) for s in both]
    waits = any(s.case.case_id in by_host for s in both)
    low = sum(s.metrics["gpu_utilisation"].value < HOST_BELOW for s in both)
    panels = (
        Panel("GPU busy", units.percent, {f"waits under {units.percent(HOST_BELOW)}": HOST_BELOW}),
        Panel("CPU cores", lambda x: f"{x:.2f}", {"one core": 1.0}),
    )
    said = f"GPU busy under {units.percent(HOST_BELOW)} in {low} of the {len(rows)} drawn"
    return _dots("utilisation", sorted(rows, key=_first), panels, said if waits else "")


def _speeds(suite: Suite, of: Sequence[CaseSummary], row: Rows) -> Picture | None:
    """The speed of each case with or without a suspect, by what was seen and expected."""
    if suite.suspects is None or not METRICS[suite.suspects.gap.metric].higher_is_better:
        return None
    gap, metric = suite.suspects.gap, suite.suspects.gap.metric
    tested = [s for s in suite.suspects.tested if s.control is None]
    sides = [side for s in tested for side in (s.without, s.with_)]
    rows = [
        row(s, s.metrics[metric])
        for s in of
        if metric in s.metrics and gap.where.accepts(s.case)
        if any(side.accepts(s.case) for side in sides)
    ]
    if not rows:
        return None
    rows.sort(key=_first)
    shared = text.shared_name([r.name for r in rows])
    below = [text.own_name(r.name, shared) for r in rows if _first(r) < gap.expected]
    below = [", ".join(name.split(", ")[:2]) for name in below]
    seen, expected = (units.quantity(metric, v) for v in (gap.seen, gap.expected))
    least = units.quantity(metric, float(f"{_first(rows[0]):.3g}"))
    said = f"All {len(rows)} drawn make {least} or more; {seen} were seen"
    if below:
        count = f"{len(below)} of the {len(rows)} drawn"
        said = f"{count} below the {expected} expected: {text.listed(below)}"
    lines = {f"{gap.seen:g} seen": gap.seen, f"{gap.expected:g} expected": gap.expected}
    panel = Panel(METRICS[metric].title, lambda v: units.plain(metric, v, 3), lines, log=True)
    return _dots("speed", rows, [panel], said)


def _versus(of: Study, row: Rows) -> Picture | None:
    """How many times as fast the first provider is as those that a rule compares it with, along the
    longest axis, or at its far end."""
    run = of.run
    rules = [r for r in run.suite.rules if r.against and {*r.against.criteria} == {"provider"}]
    compared = [pair for r in rules for pair in r.pairs(run.suite.cases)]
    others = [*dict.fromkeys(b.provider for _, b in compared)]
    found = [v for v in of.versus if v.theirs in others and v.ours == compared[0][0].provider]
    if not found:
        return None
    far = sum(len(v.points) for v in found if v.theirs == others[0]) > MAX_DOTS
    ratios: dict[str, Ratio] = {}
    for v in found:
        for i, (_, ratio) in [*zip(v.cases, v.points, strict=True)][-1 if far else 0 :]:
            ratios[i] = min(ratio, ratios.get(i, ratio), key=lambda e: e.value)
    rows = []
    for s in (s for s in of.summaries if s.case.case_id in ratios):
        ratio = ratios[s.case.case_id]
        needed = (r for r in rules if r.go != 1 and r.match.accepts(s.case))
        marks = {f"needed: {r.name}": r.limits[0] for r in needed}
        for e in run.suite.expectations:
            if e.metric == "step_s" and e.high and e.match.accepts(s.case):
                limit = ratio.value * s.metrics["step_s"].value / e.high
                marks[e.name] = limit
        rows.append(row(s, ratio, **marks))
    beside = [p for p in others if any(v.theirs == p for v in found)]
    named = [run.suite.provider(v.workload, p) for v in found[:1] for p in (v.ours, *beside)]
    theirs = f"{'the faster of ' if beside[1:] else ''}{text.listed(named[1:])}"
    if beside[3:]:
        theirs = f"the fastest of {len(beside)} others"
    ends = " to ".join(units.factor(end(map(_first, rows), default=1)) for end in (min, max))
    ahead = sum(_first(r) > 1 for r in rows)
    how = f"ahead in {ahead} of the {len(rows)} drawn"
    at = f"At {run.suite.axis(found[0].axis)}={found[0].points[-1][0]:g} " if far else ""
    said = [f"{at}{''.join(named[:1])} is {ends} as fast as {theirs}, {how}"]
    for mark in dict.fromkeys(mark for r in rows for mark in r.marks):
        reached = [_first(r) >= r.marks[mark] for r in rows if mark in r.marks]
        said += [f"“{mark}” met in {sum(reached)} of {len(reached)}"] if reached[1:] else []
    panel = Panel("times as fast", units.factor, {"equal": 1.0}, log=True)
    known = [*dict.fromkeys(mark for r in rows for mark in r.marks)][: len(figures.MARKS)]
    rows = [r._replace(marks={m: x for m, x in r.marks.items() if m in known}) for r in rows]
    return _dots("speed", rows, [panel], "; ".join(said))


def _dots(name: str, rows: Sequence[Row], panels: Sequence[Panel], said: str) -> Picture | None:
    return figures.dots(name, rows, panels, said) if said and 1 < len(rows) <= MAX_DOTS else None


def _first(row: Row) -> float:
    return row.values[0].value


# --- curves ----------------------------------------------------------------------------------


def _scalings(
    suite: Suite, fits: Sequence[ScalingFit], names: Mapping[str, str]
) -> Iterator[Picture | None]:
    """A figure for each growth that a rule asks, beside the groups that differ least from it."""
    cases = {c.case_id: c for c in suite.cases}
    for workload, axis in dict.fromkeys((f.workload, f.axis) for f in fits):
        along = [f for f in fits if (f.workload, f.axis) == (workload, axis)]
        first = next((f for f in along if is_asked(f, suite)), None)
        if first is None:
            continue
        group = {f: cases[f.points[0].case_id] for f in along}
        own = group[first]
        moving = {*own.swept} - {axis}
        apart = {f: sum(c.get(a) != own.get(a) for a in moving) for f, c in group.items()}
        near = sorted((f for f in along if apart[f] < 2), key=lambda f: (f is not first, apart[f]))
        some = {f: group[f] for f in near[: len(figures.LINES)]}
        yield figures.scaling([*some], _group_labels(suite, some, names), suite.axis(axis))


def _group_labels(
    suite: Suite, groups: Mapping[ScalingFit, Case], names: Mapping[str, str]
) -> dict[str, str]:
    """Group -> what the names of its cases share, without what those of all groups do; with the
    provider, if another group has the same."""
    own = {f.group: text.shared_name([names[p.case_id] for p in f.points]) for f in groups}
    if len({*own.values()}) < len(own):
        routes = {f.group: suite.provider(c.workload, c.provider) for f, c in groups.items()}
        own = {group: f"{name}, {routes[group]}" for group, name in own.items()}
    return {
        group: text.own_name(name, text.shared_name([*own.values()])) for group, name in own.items()
    }


def is_asked(fit: ScalingFit, suite: Suite) -> bool:
    """Whether a rule asks for the growth of this group."""
    ids = {p.case_id for p in fit.points}
    cases = [c for c in suite.cases if c.case_id in ids]
    return any(r.axis == fit.axis and r.match.accepts(c) for r in suite.rules for c in cases)


def _over_steps(run: Run, names: Mapping[str, str]) -> Picture | None:
    """Losses by workload, and the step times of the workload that has a rule on its drift. Short
    runs are left out."""
    cases = [(max(s.step[-1] for s in of), c) for c in run.suite.cases if (of := _series(run, c))]
    far = max((end for end, _ in cases), default=0) / 2
    groups: dict[str, list[Case]] = {}
    for case in (c for end, c in cases if end >= far):
        groups.setdefault(case.workload, []).append(case)
    drifts = [r.match for r in run.suite.rules if r.metric == "tokens_per_s_drift"]
    shown = [g[:MAX_LINES] for g in groups.values()]
    steady = [g for g in shown if any(match.accepts(c) for match in drifts for c in g)]
    panels = [p for g in shown[:2] if (p := _losses(run, g, names))[2]]
    panels += [_step_times(run, g, names) for g in (steady or shown)[:1]]
    return figures.over_steps(panels) if panels else None


def _series(run: Run, case: Case) -> list[OverSteps]:
    """The processes with enough steps for a curve."""
    found = (m.over_steps for m in run.of(case.case_id))
    return [s for s in found if s and len(s.step) >= MIN_CURVE]


def _losses(run: Run, group: Sequence[Case], names: Mapping[str, str]) -> figures.Curves:
    """The loss of each run, or how far it is from that of the one that a rule names."""
    rules = [r for r in run.suite.rules if r.metric == "loss_last" and r.against]
    base = next((b for r in rules for _, b in r.pairs(group)), None)
    shared, lines, said = text.shared_name([names[c.case_id] for c in group]), [], []
    theirs = over_steps.mean_loss(run.of(base.case_id)) if base else {}
    for case in (c for c in group if c is not base):
        of = over_steps.mean_loss(run.of(case.case_id))
        if not (steps := [s for s in of if not base or s in theirs]):
            continue
        values = [of[s] - theirs.get(s, 0.0) for s in steps]
        mean = over_steps.running_mean(values, 4 if base else 10)
        name = text.own_name(names[case.case_id], shared)
        change = f": {values[0]:.3f} to {mean[-1]:.3f}"
        if base:
            last = over_steps.running_mean([theirs[s] for s in steps], 4)[-1]
            change = f" {units.ratio(1 + mean[-1] / last, 'change')}"
        said.append(name + change)
        events = {}
        for what, at in (one for s in _series(run, case) for one in s.not_finite.items()):
            dropped = what == "grad_norm" and case.axes.get("precision") == "fp16"
            cause = "fp16 overflow, update dropped" if dropped else f"{what} is NaN or Inf"
            events[at[0]] = f"step {at[0]}: {cause}"
        lines.append(Line(name, steps, values, mean, events))
    unit = "nats, mean over processes"
    if base is None:
        return f"loss of {', '.join(said)}", f"loss, {unit}", lines
    other = text.own_name(names[base.case_id], shared)
    return f"{shared}: loss against {other}: {', '.join(said)}", f"difference, {unit}", lines


def _step_times(run: Run, group: Sequence[Case], names: Mapping[str, str]) -> figures.Curves:
    """The step times of the first process, without the first steps, which compile."""
    shared, lines, said = text.shared_name([names[c.case_id] for c in group]), [], []
    for case in group:
        s, name = _series(run, case)[0], text.own_name(names[case.case_id], shared)
        steps, ms = s.step[over_steps.START :], [1e3 * t for t in s.step_s[over_steps.START :]]
        own = [median for *_, median in over_steps.blocks(s.step_s)]
        ends = own[: over_steps.QUARTER], own[-over_steps.QUARTER :]
        times = [units.duration(fmean(of)) for of in ends if of]
        late = [*over_steps.slow_steps(s.step, s.step_s)][:MAX_SLOW]
        events = {n: f"step {n}: {units.factor(x)} as long" for n, x in late}
        first, *last = dict.fromkeys(times) or [""]
        change = f" in the first quarter, {last[0]} in the last" if last else ""
        said.append(f"{name}: {first}{change}")
        lines.append(Line(name, steps, ms, over_steps.running_mean(ms, 10), events))
    whose = f"{shared}: " if shared and group[1:] else ""
    return f"{whose}step time of {', '.join(said)}", "ms, first process", lines
