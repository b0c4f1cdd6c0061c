"""The executive summary: sentences, each computed from the records."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness import units
from harness.analysis import overhead
from harness.analysis.dead_axes import DeadAxis, Invariance, Oddities, Values
from harness.analysis.effects import Effect
from harness.analysis.expectation import SUSPICIOUS_MFU, Assessment, Judgement
from harness.analysis.overhead import Overhead, TimeUse
from harness.analysis.roofline import Target
from harness.analysis.scaling import ScalingFit
from harness.analysis.verdict import EVERY_CASE_RAN, KERNELS_THAT_RAN, WHAT_RAN
from harness.gate.counters import CHECK
from harness.gate.records import WORST_FIRST, GateCase, GateVerdict, Stage
from harness.records import (
    INTERPRETER,
    METRICS,
    Case,
    CaseSummary,
    Decision,
    Environment,
    Estimate,
    Finding,
    Match,
    Measurement,
    Outcome,
    RuleResult,
    Run,
    Scalar,
    Verdict,
)
from harness.units import finding_sentence


def target_text(t: Target) -> str:
    """The rule “floor” asks for 785 tokens/s: on A100 0.12 % MFU, 850x below the card's peak."""
    return (
        f"{t.stated_by} asks for {units.quantity('tokens_per_s', t.tokens_per_s)} of "
        f"`{t.case_id}`: on {t.peak.gpu} that is {units.percent(t.mfu)} MFU, "
        f"{units.factor(1 / t.mfu)} below the card's peak "
        f"({units.number(t.peak.flops_per_s / 1e12)} TFLOP/s, dense {t.peak.precision})"
    )


def time_use_sentence(used: TimeUse) -> str:
    """Where the wall time of a run went."""
    of = "" if used.whole else " of processes' life"
    if used.work_share is None or used.sampling_share is None or used.overhead_s is None:
        return f"{units.duration(used.wall_s)}{of}; what it went into is unknown"
    return (
        f"{units.duration(used.wall_s)}{of}: {units.percent(used.work_share)} work (accuracy, "
        f"counting, warm-up, sampling), {units.percent(used.sampling_share)} sampling; overhead "
        f"{units.duration(used.overhead_s)} a process"
    )


def command_text(case: Case) -> str:
    """The program of a case and its arguments, as one would type it; empty for a factory."""
    words = case.program.argv if case.program else ()
    return shlex.join("python" if word == INTERPRETER else word for word in words)


def variables_text(case: Case) -> str:
    """Names of the variables that a case sets; a value may be nobody's business."""
    return ", ".join(case.env)


def folder_text(case: Case, measured: Sequence[Measurement]) -> str:
    """Where the program of a case ran; as the suite has it, where none got so far."""
    ran = (m.code["program"] for m in measured if "program" in m.code)
    return next(ran, case.program.cwd if case.program else "")


def program_lines(cases: Sequence[Case], measured: Sequence[Measurement]) -> Sequence[str]:
    """What ran, of each workload that is a program: its first case."""
    said = []
    for name in dict.fromkeys(case.workload for case in cases if case.program):
        own = [case for case in cases if case.workload == name]
        first = own[0]
        where = folder_text(first, [m for m in measured if m.case_id == first.case_id])
        text = f"{name} runs: {command_text(first)} (in {where}"
        text += f"; sets {variables_text(first)})" if first.env else ")"
        rest = len(own) - 1
        if rest:
            text += f"; {rest} more case{'s run' if rest > 1 else ' runs'} it with other axes"
        said.append(text)
    return said


def overhead_sentence(found: Overhead, limit: float) -> str:
    """What reading the probes costs, with its interval and what that says of the limit."""
    cost = units.change(found.ratio, found.low, found.high)
    if found.low is None or found.high is None:
        shown = "one pair has no interval, and shows nothing"
    elif found.shown:
        shown = f"at most {units.percent(limit)}, as asked"
    elif found.shown is False:
        shown = f"more than the {units.percent(limit)} allowed"
    else:
        shown = f"not decided against {units.percent(limit)}: take more pairs"
    return f"sampling: step time {cost} over {found.pairs} pairs of processes; {shown}"


def rule_sentence(result: RuleResult) -> str:
    """Why a rule decided as it did."""
    if not result.applies and result.stated:
        return f"stated for {result.stated.gpu}; {finding_sentence(result.findings[0])}"
    share = f"{len(result.findings)} of {result.judged}: " if result.judged > 1 else ""
    if result.stated is None and result.decision is Decision.GO:
        return _held(result)
    if result.findings:
        text = share + _joined(result.findings)
        if result.perhaps:
            text += f"; undecided, perhaps GO: {_joined(result.perhaps)}"
        return text
    if result.matched:
        return "no matched case has an outcome that could decide"
    return "the rule matches no case of this run"


def _held(result: RuleResult) -> str:
    """Of a rule that every suite has."""
    if result.rule == WHAT_RAN:
        if result.judged == 1:
            return "seen in the one case that states any"
        return f"seen in all {result.judged} cases that state any"
    ran = f"all {result.judged} cases ran" if result.judged > 1 else "the case ran"
    if not result.findings:
        return ran
    allowed = "; ".join(f"{f.subject}: {finding_sentence(f)}" for f in result.findings)
    return f"{ran} or ended as the suite allows ({allowed})"


def verdict_sentence(v: Verdict) -> str:
    """Why a suite's verdict is what it is."""
    if v.rule is None:
        return f"no rule of the suite was stated for {v.device}"
    applied = [r.rule for r in v.rules if r.applies]
    if v.decision is Decision.GO and len(applied) > 1:
        return f"all hold: {'; '.join(applied)}"
    return rule_sentence(v.rule)


REQUIREMENTS = {
    EVERY_CASE_RAN: "every case ends ok, or as the suite allows",
    WHAT_RAN: "all required operators ran and no forbidden one did; on a GPU also kernels",
    KERNELS_THAT_RAN: "all required kernels ran and no forbidden one did",
}


def requirement_text(result: RuleResult) -> str:
    """A rule as a sentence: `tokens/s ≥ 500 in every case with gc=off; NO-GO under 100`."""
    if result.stated is None:
        return REQUIREMENTS[result.rule]
    stated = result.stated
    metric = stated.quantity
    sign = "≥" if metric.higher_is_better else "≤"
    whose = "every case" if stated.quantifier == "all" else "the best case"
    if chosen := _criteria(stated.match):
        whose += f" with {chosen}"
    along = f" over {stated.axis}" if stated.axis else ""
    text = f"{metric.title}{along} {sign} {units.plain(stated.metric, stated.go)} in {whose}"
    if stated.abort is not None:
        side = "under" if metric.higher_is_better else "over"
        text += f"; NO-GO {side} {units.plain(stated.metric, stated.abort)}"
    return text


def _criteria(match: Match) -> str:
    return " and ".join(
        f"{name}={' or '.join(map(str, values))}" for name, values in match.criteria.items()
    )


def _joined(findings: Sequence[Finding], most: int = 2) -> str:
    """The first few findings as a sentence; those of one reason share it."""
    by_reason: dict[str, list[str]] = {}
    for f in findings:
        by_reason.setdefault(finding_sentence(f), []).append(f.subject)
    shown = list(by_reason.items())[:most]
    text = "; ".join(
        f"{_subjects(names, most)}: {reason}" if any(names) else reason for reason, names in shown
    )
    rest = len(findings) - sum(len(names) for _, names in shown)
    return f"{text}; and {rest} more" if rest else text


def _subjects(names: Sequence[str], most: int) -> str:
    if len(names) <= most:
        return " and ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


MAX_FITS = 4
"""Groups up to which each exponent is said; past it, the least and the greatest."""
DIFFERENT, MIXED = 1.1, 2.0
"""Ratio between pairs from which a reader must know of their range; and from which their mean is no
effect, and has no interval."""
BUSY = 0.5
"""GPU utilisation under which the card waits for something else most of the time."""


def executive_summary(
    run: Run,
    summaries: Sequence[CaseSummary],
    verdict: Verdict,
    effects: Sequence[Effect],
    assessments: Sequence[Assessment],
    fits: Sequence[ScalingFit],
    targets: Sequence[Target] = (),
) -> tuple[str, ...]:
    """The verdict, what ran, what is odd, then one sentence for each further matter.

    At most one sentence a workload and one a matter, so that it stays short; the sections
    below the summary hold the rest.
    """
    return (
        f"{_decided(verdict)}: {verdict_sentence(verdict)}.",
        _what_ran(run, summaries),
        *_sampling(run),
        *_other_rules(verdict),
        *_expectations(assessments),
        *_speeds(summaries, effects),
        *_scaling(fits),
        *_targets(targets),
        *_idle_gpu(run, summaries),
        *_unsteady(summaries, run),
        *_anomalies(summaries),
    )


def outcome_name(outcome: Outcome | None) -> str:
    return "not run" if outcome is None else outcome.value.replace("_", " ")


def effect_sentence(e: Effect) -> str:
    """`gc=on` against `gc=off`: step time per token +24 % [+20 … +28], over 4 pairs of cases.

    Where pairs differ widely, or point both ways: +54 % in the mean, ..., from -31 % to 4.4x.
    """
    once = "; one process a case, so no interval" if e.low is None and not _mixed(e) else ""
    return (
        f"{_axis(e.axis, e.value)} against {_axis(e.axis, e.base)}: step time per token "
        f"{_effect(e)}, over {e.pairs} {_plural('pair', e.pairs)} of cases{_spread(e)}{once}."
    )


def _spread(e: Effect) -> str:
    """What lies behind the mean, where its pairs differ."""
    if e.pairs < 2 or e.largest / e.smallest <= DIFFERENT:
        return ""
    return f", from {units.change(e.smallest)} to {units.change(e.largest)}"


def _mixed(e: Effect) -> bool:
    """Whether its pairs differ so widely, or point both ways, that their mean is none of them."""
    return e.pairs > 1 and (
        e.largest / e.smallest > MIXED or e.smallest * DIFFERENT < 1 < e.largest / DIFFERENT
    )


def _effect(e: Effect) -> str:
    if _mixed(e):
        return f"{units.change(e.ratio)} in the mean"
    amount = units.change(e.ratio, e.low, e.high)
    if e.negligible:
        return f"unchanged ({amount})"
    if e.low is not None and e.high is not None and e.low <= 1 <= e.high:
        return f"not shown to differ ({amount})"
    return amount


def _targets(targets: Sequence[Target]) -> Iterable[str]:
    if targets:
        highest = max(targets, key=lambda t: t.mfu)
        yield (
            f"Targets under {units.percent(SUSPICIOUS_MFU)} of their card's peak prove little "
            f"when met; the highest of {len(targets)}: {target_text(highest)}."
        )


def _unsteady(summaries: Sequence[CaseSummary], run: Run) -> Iterable[str]:
    """Cases with a process that found no steady state: their numbers are of a moving thing."""
    unsteady = [
        s.case.case_id
        for s in summaries
        if any(m.steady is False and m.outcome is Outcome.OK for m in run.of(s.case.case_id))
    ]
    if unsteady:
        first = f"`{unsteady[0]}`" + (f" and {len(unsteady) - 1} more" if unsteady[1:] else "")
        yield f"No steady state was reached in {first}: those numbers may still move."


def _decided(verdict: Verdict) -> str:
    if verdict.decision is Decision.GO:
        return f"**{verdict.decision}** by {verdict.decided_by}"
    return f"**{verdict.decision}** by the rule “{verdict.decided_by}”"


def _other_rules(verdict: Verdict) -> Iterable[str]:
    """The rules that are not GO, beside the one that decided."""
    others = [r for r in verdict.rules if r.rule != verdict.decided_by]
    for decision in (Decision.NO_GO, Decision.INCONCLUSIVE, Decision.CONDITIONAL):
        if names := [f"“{r.rule}”" for r in others if r.applies and r.decision is decision]:
            yield f"Also {decision}, by {_list(names)}; see Verdict."
    left = [r for r in others if not r.applies]
    if names := [f"“{r.rule}”" for r in left if r.rule != KERNELS_THAT_RAN]:
        yield f"Stated for other GPUs and not applied here: {_list(names)}."
    for r in left:
        if r.rule == KERNELS_THAT_RAN:
            yield f"Not applied, “{r.rule}”: {rule_sentence(r)}."


def _what_ran(run: Run, summaries: Sequence[CaseSummary]) -> str:
    per_workload = Counter(s.case.workload for s in summaries)
    what = _list([f"{n} {name}" for name, n in per_workload.items()])
    outcomes = Counter(outcome_name(s.outcome) for s in summaries)
    ended = ", ".join(f"{n} {name}" for name, n in outcomes.most_common())
    live = sum(m.wall_s for m in run.measurements)
    interrupted = "" if run.ended_at else " **The run is unfinished.**"
    return (
        f"{what} {_plural('case', len(summaries))} on {device(run.environment)}: {ended}; "
        f"{len(run.measurements)} {_plural('process', len(run.measurements))} lived "
        f"{units.duration(live)} in all.{interrupted}"
    )


def _sampling(run: Run) -> Iterable[str]:
    if found := overhead.overhead(run):
        said = overhead_sentence(found, overhead.LIMIT)
        yield f"{said[0].upper()}{said[1:]}."


def device(environment: Environment) -> str:
    return environment.gpu.name if environment.gpu else f"CPU ({environment.cpu})"


def _speeds(summaries: Sequence[CaseSummary], effects: Sequence[Effect]) -> Iterable[str]:
    """One sentence a workload: its slowest and fastest case, and what each axis does."""
    for workload in dict.fromkeys(s.case.workload for s in summaries):
        ok = [s for s in summaries if s.case.workload == workload and s.outcome is Outcome.OK]
        if not ok:
            continue
        metric = "tokens_per_s" if all("tokens_per_s" in s.metrics for s in ok) else "step_s"
        ranked = sorted(ok, key=lambda s: _goodness(s.metrics[metric], metric))
        slowest, fastest = ranked[0], ranked[-1]
        text = f"**{workload}**: {_speed(slowest, metric)}"
        if slowest is not fastest:
            ends = (_goodness(s.metrics[metric], metric) for s in (fastest, slowest))
            apart = units.factor(next(ends) / next(ends))
            text += f" to {_speed(fastest, metric)}, {apart} apart"
        if found := [e for e in effects if e.workload == workload]:
            # Providers are the question, then the largest: a manager reads the first two.
            ranked_effects = sorted(
                found, key=lambda e: (e.axis != "provider", -abs(math.log(e.ratio)))
            )
            said = "; ".join(
                f"{_axis(e.axis, e.value)} against {_axis(e.axis, e.base)} {_effect(e)}"
                + (_spread(e) if e.axis == "provider" or _mixed(e) else "")
                for e in ranked_effects
            )
            text += f". Step time per token: {said}"
        yield f"{text}."


def _speed(summary: CaseSummary, metric: str) -> str:
    return f"{units.measured(metric, summary.metrics[metric])} (`{summary.case.case_id}`)"


def _goodness(estimate: Estimate, metric: str) -> float:
    return estimate.value if METRICS[metric].higher_is_better else 1 / estimate.value


def _expectations(assessments: Sequence[Assessment]) -> Iterable[str]:
    if not assessments:
        return
    counts = Counter(a.judgement for a in assessments)
    names = {
        Judgement.MET: "met",
        Judgement.BELOW: "below",
        Judgement.ABOVE: "above",
        Judgement.UNDECIDED: "undecided",
        Judgement.OTHER_GPU: "stated for another GPU and not judged",
        Judgement.NOT_MEASURED: "without a measurement",
    }
    said = ", ".join(f"{counts[j]} {name}" for j, name in names.items() if counts[j])
    missed = [a for a in assessments if a.judgement in (Judgement.BELOW, Judgement.ABOVE)]
    farthest = max((a for a in missed if a.factors), key=lambda a: a.factors[0], default=None)
    worst = (
        f"; farthest {farthest.judgement.value}: `{farthest.case_id}`, by "
        f"{units.factor(farthest.factors[0])}"
        if farthest
        else ""
    )
    yield f"Expected against actual: {said}{worst}."


def _scaling(fits: Sequence[ScalingFit]) -> Iterable[str]:
    for axis in dict.fromkeys(f.axis for f in fits):
        ours = [f for f in fits if f.axis == axis]
        fitted = [(f.exponent, f) for f in ours if f.exponent is not None]
        ranked = sorted(fitted, key=lambda pair: pair[0].value)
        if not ranked:
            continue
        few = len(ranked) <= MAX_FITS
        shown = ranked if few else [ranked[0], ranked[-1]]
        head = "" if few else f"the extremes of {len(ranked)} fits: "
        said = "; ".join(_exponent(exponent, f) for exponent, f in shown)
        yield f"Exponent of the step time over {axis}: {head}{said}."
    if noted := [f for f in fits if f.note]:
        first = noted[0]
        more = f"; and {len(noted) - 1} more, see Scaling" if len(noted) > 1 else ""
        yield f"Odd: in `{first.group}`, {first.note}{more}."


def _exponent(exponent: Estimate, f: ScalingFit) -> str:
    late = f" ({f.censored} timed out, {_plural('bound', f.censored)} only)" if f.censored else ""
    return f"`{f.group}` {units.cell('scaling_exponent', exponent)}{late}"


def _idle_gpu(run: Run, summaries: Sequence[CaseSummary]) -> Iterable[str]:
    """Of cases whose step was not profiled: the probes read the pauses between runs too, in which
    a device that no step keeps waiting has nothing to do."""
    idle = [
        s
        for s in summaries
        if s.outcome is Outcome.OK
        and "gpu_utilisation" in s.metrics
        and s.metrics["gpu_utilisation"].value < BUSY
        and not any(_knows_launch_gap(m) for m in run.of(s.case.case_id))
    ]
    if not idle:
        return
    least = min(idle, key=lambda s: s.metrics["gpu_utilisation"].value)
    cpu = least.metrics.get("cpu_utilisation")
    beside = "" if cpu is None else f", with {units.measured('cpu_utilisation', cpu)} busy"
    yield (
        f"The GPU was busy less than half of the time in {len(idle)} "
        f"{_plural('case', len(idle))}; least in `{least.case.case_id}`, "
        f"{units.measured('gpu_utilisation', least.metrics['gpu_utilisation'])}{beside}."
    )


def _knows_launch_gap(m: Measurement) -> bool:
    b = m.breakdown
    return b is not None and b.launch_gap is not None


def _anomalies(summaries: Sequence[CaseSummary]) -> Iterable[str]:
    noted = [s for s in summaries if s.notes]
    if noted:
        verb = "carries" if len(noted) == 1 else "carry"
        yield (
            f"{len(noted)} {_plural('case', len(noted))} {verb} a note that weakens "
            "the numbers; see Results."
        )


def _axis(name: str, value: Scalar) -> str:
    return f"`{name}={units.scalar(value)}`"


def _list(parts: Sequence[str]) -> str:
    """a, b and c"""
    *rest, last = parts
    return f"{', '.join(rest)} and {last}" if rest else last


def _plural(noun: str, count: int) -> str:
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def oddity_sentences(found: Oddities) -> tuple[str, ...]:
    """One sentence for each axis; alike ones of several providers or groups together."""
    alike: dict[object, list[DeadAxis]] = {}
    for d in found.dead:
        alike.setdefault((d.workload, d.axes, d.values, d.all_values), []).append(d)
    still: dict[object, list[Invariance]] = {}
    for i in found.still:
        workload = i.group.partition("/")[0]
        still.setdefault((workload, i.axis, i.metric, i.reached), []).append(i)
    return (*map(_dead_axes, alike.values()), *map(_invariances, still.values()))


def without_code(found: Oddities) -> tuple[str, ...]:
    """The same for the command line."""
    return tuple(sentence.replace("`", "") for sentence in oddity_sentences(found))


def coverage_sentence(found: Oddities) -> str:
    """Of how many pairs of cases it is known whether they did the same; empty without pairs."""
    if not found.pairs:
        return ""
    if not found.compared:
        return (
            "Whether an axis has no effect is not known: no two cases that differ in one axis have "
            "both counters and outputs to compare."
        )
    missing = found.pairs - found.compared
    rest = f"; too little is known of {missing} more" if missing else ""
    none = "" if found.dead else ", and each axis changed something"
    return f"{found.compared} pairs of cases that differ in one axis were compared{none}{rest}."


def _dead_axes(alike: Sequence[DeadAxis]) -> str:
    """`train/nsa`: `NSA_FWE_Q` 1 and 4 do the same: ... in 6 pairs of cases."""
    d = replace(
        alike[0],
        pairs=sum(d.pairs for d in alike),
        fastest=min(d.fastest for d in alike),
        slowest=max(d.slowest for d in alike),
        time_differs=any(d.time_differs for d in alike),
        without_kernels=any(d.without_kernels for d in alike),
    )
    places = [f"{d.workload}/{d.provider}" if d.provider else d.workload for d in alike]
    where = ", ".join(f"`{place}`" for place in places)
    names = ", ".join(f"`{name}`" for name in d.axes)
    values = _list([_value(v) for v in d.values])
    head = f"{names} has no effect ({values})" if d.all_values else f"{names}: {values} do the same"
    if d.axes == ("provider",):
        head = f"providers {values} do the same"
    same = "operators, kernels, counters and outputs"
    if d.without_kernels:
        same = "operators, counters and outputs, kernels unknown without a GPU,"
    pairs = f"{d.pairs} {'pair' if d.pairs == 1 else 'pairs'} of cases"
    return f"{where}: {head}: the same {same} in {pairs}; {_time(d)}."


def _invariances(alike: Sequence[Invariance]) -> str:
    """`forward/nsa`: 10.2 tokens/s from `seq_len` 128 to 2048, though ...; ..."""
    i = alike[0]
    more = f" So in {len(alike) - 1} more {'group' if len(alike) == 2 else 'groups'}." * (
        len(alike) > 1
    )
    low, high = units.scalar(i.low), units.scalar(i.high)
    over = f"from `{i.axis}` {low} to {high}, within {units.percent(i.spread)}"
    value = units.quantity(i.metric, i.value)
    grown = i.growth is not None and units.factor(i.growth)
    if i.metric == "step_s":
        text = f"`{i.group}`: the step takes {value} {over}"
        cost, fixed = f"it needs {grown} the FLOPs", "a fixed cost decides"
    else:
        text = f"`{i.group}`: {value} {over}"
        cost, fixed = f"a token costs {grown} the FLOPs", "a fixed cost per token decides"
    if i.growth is not None and i.growth > 1:
        text += f", though {cost}"
    why = fixed if i.reached else "nothing shows that the axis reached the workload"
    return f"{text}: {why}.{more}"


def flag_sentences(run: Run) -> tuple[str, ...]:
    """Variables that cases set, and those around them: which were asked for, as far as is known."""
    cases = {c.case_id: c for c in run.suite.cases}
    asked: set[str] = set()
    told: set[str] = set()
    unknown: set[str] = set()
    around: set[str] = set()
    for m in run.measurements:
        own = cases[m.case_id].env if m.case_id in cases else {}
        asked |= {name for name, was_read in m.flags_read.items() if was_read}
        told |= own.keys() & m.flags_read.keys()
        if m.samples_s:
            unknown |= own.keys() - m.flags_read.keys()
            around |= m.flags_read.keys() - own.keys()
    said = []
    if told & asked:
        said.append(f"Set by cases, and asked for by what ran: {_names(told & asked)}.")
    if unknown:
        said.append(f"Set by cases, and nobody can tell whether they were read: {_names(unknown)}.")
    if ignored := around - asked:
        said.append(f"Exported around the run, and asked for by no case: {_names(ignored)}.")
    return tuple(said)


def oddities_in_brief(found: Oddities) -> Iterable[str]:
    """One sentence for a summary; none where nothing was found."""
    parts = []
    if whole := [d for d in found.dead if d.all_values and not d.time_differs]:
        names = dict.fromkeys(f"`{name}`" for d in whole for name in d.axes)
        parts.append(f"no effect of {_list([*names])}")
    if found.still:
        names = dict.fromkeys(f"`{i.axis}`" for i in found.still)
        parts.append(f"a speed that does not change with {_list([*names])}")
    if parts:
        yield f"Odd: {' and '.join(parts)}; see What ran."


def _time(d: DeadAxis) -> str:
    low, high = units.change(d.fastest), units.change(d.slowest)
    between = low if low == high else f"{low} to {high}"
    return f"only the step time differs ({between})" if d.time_differs else f"step time {between}"


def _value(values: Values) -> str:
    return ", ".join(units.scalar(v) for v in values)


def _names(variables: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(variables))


MAX_CHECKS = 20
"""Of a case, named in its text."""


def worst_first(verdict: GateVerdict) -> list[GateCase]:
    """The cases in the order in which they matter; those alike keep theirs."""
    return sorted(verdict.cases, key=lambda c: WORST_FIRST[c.decision])


def case_counts(verdict: GateVerdict) -> str:
    """`1 NO-GO, 2 INCONCLUSIVE, 9 GO`."""
    of = [(decision, verdict.count(decision)) for decision in WORST_FIRST]
    return ", ".join(f"{n} {decision}" for decision, n in of if n) or "no cases"


def change_text(case: GateCase) -> str:
    """`+4.1 % [+3.2 … +5.0] slower`, the counters that differ, or why there is no comparison."""
    c = case.comparison
    if c is not None and math.isfinite(c.ratio) and c.ratio > 0:
        return f"{units.change(c.ratio, c.low, c.high)} {c.change}"
    if case.counters:
        differ = (f"{c.name} {_count(c.before)} → {_count(c.after)}" for c in case.counters)
        return ", ".join(differ)
    if case.candidate_s is not None and math.isfinite(case.candidate_s):
        return f"{case.state}: {units.duration(case.candidate_s)}"
    return str(case.state)


def open_question(case: GateCase) -> str:
    """What an undecided case could have seen, and what would decide it."""
    c = case.comparison
    if c is None or case.decision is not Decision.INCONCLUSIVE:
        return ""
    seen = needed = ""
    if c.smallest_effect is not None:
        seen = f"a slowdown of {units.percent(c.smallest_effect)} would have been found"
    if c.pairs_needed is not None:
        minutes = c.minutes_needed
        cost = f", {units.number(minutes)} minutes" if minutes is not None else ""
        needed = f"{c.pairs_needed} pairs{cost} would decide"
    return "; ".join(filter(None, (seen, needed)))


def case_reason(case: GateCase) -> str:
    """What `sentence` says; it stands beside the change, and does not say that once more."""
    counted = [f.detail for f in case.findings if f.check == CHECK and f.decision is case.decision]
    return _said(case, counted[0] if case.counters and counted and counted[0] else case.reason)


def case_sentence(case: GateCase) -> str:
    """The reason, with what is open, what is excused and what surprised; it stands alone."""
    return _said(case, case.reason)


def _said(case: GateCase, reason: str) -> str:
    parts = [reason, open_question(case)]
    if case.exemption:
        parts.append(f"exempt: {case.exemption}")
    if case.unexpected_pass:
        parts.append("expected to fail, and it passed: take it off the policy's list")
    return "; ".join(filter(None, parts))


def case_text(case: GateCase) -> str:
    """All that is known of a case, over several lines."""
    lines = [f"{case.decision}: {case.reason}", f"change: {change_text(case)}"]
    if case.baseline_s is not None and case.candidate_s is not None:
        times = units.duration(case.baseline_s), units.duration(case.candidate_s)
        pairs = case.comparison.pairs if case.comparison else 0
        lines.append(f"step time: {times[0]} → {times[1]}, {pairs} pairs")
    if said := open_question(case):
        lines.append(said)
    if case.exemption:
        lines.append(f"exempt: {case.exemption}")
    for f in case.findings[:MAX_CHECKS]:
        excused = "" if f.counts else " (excused)"
        lines.append(f"  {f.decision} by {f.check}{excused}: {f.reason}")
    if len(case.findings) > MAX_CHECKS:
        lines.append(f"  and {len(case.findings) - MAX_CHECKS} more checks")
    if case.log:
        lines.append(f"log: {case.log}")
    return "\n".join(lines)


def undecided_text(verdict: GateVerdict) -> str:
    """`inconclusive: neutral`, where that setting of the policy's and not its stage says whether
    the verdict blocks; else empty."""
    settled = verdict.decision in (Decision.GO, Decision.NO_GO)
    if settled or verdict.stage is not Stage.BLOCK:
        return ""
    return f"inconclusive: {'block' if verdict.blocks else 'neutral'}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
