"""Sentences about what a run measured: its cases, its programs, its axes, and a finding.

Beside it: verdict_text (rules, verdicts), explained (suspects), conditions, endings,
profile and steadiness (their sections), series/gate_text and series/bisection.
"""

import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from harness import units
from harness.analysis.dead_axes import DeadAxis
from harness.analysis.effects import Effect, Versus, together
from harness.records import (
    INTERPRETER,
    METRICS,
    SPEEDS,
    Case,
    CaseSummary,
    Decision,
    Fact,
    Facts,
    Finding,
    Outcome,
    Ratio,
    Run,
    Stop,
    Suite,
)

BY_KERNELS = " by kernels"
_NAMED = {"scaling_exponent": "exponent", "tokens_per_s_drift": "tokens/s changed by"}
"""What a number without a unit is."""
Word = Callable[[str], str]
"""Name of an axis -> as people read it: `Suite.axis`."""


def words(name: str) -> Mapping[str, Any]:
    """A table of clauses, for `filled`."""
    return tomllib.loads((Path(__file__).parent / f"templates/{name}.toml").read_text("utf-8"))


SCALING, FINDINGS, NOTES = words("scaling"), words("findings"), words("notes")
"""What is said of a curve (`no_fit`, `note` and `exponent`), of a finding, and of what weakens the
numbers of a case, by its facts."""


# --- words -------------------------------------------------------------------------------


def every(count: int) -> str:
    """`both`, `all 3`."""
    return "both" if count == 2 else f"all {count}"


def a_gpu(name: str) -> str:
    """`an A100`, `a B200`."""
    return f"{'an' if name[:1] in 'AEFHILMNORSX' else 'a'} {name}"


def for_gpu(pattern: str) -> str:
    """Where a rule counts: `for A100 only`, `for any GPU but H200`."""
    but = pattern.removeprefix("!")
    return f"for {pattern} only" if but == pattern else f"for any GPU but {but}"


def listed(parts: Sequence[str], most: int | None = None) -> str:
    """`a, b and c`; with `most`, `a, b and 3 more`."""
    shown = list(parts if most is None else parts[:most])
    if rest := len(parts) - len(shown):
        shown.append(f"{rest} more")
    *head, last = shown
    return f"{', '.join(head)} and {last}" if head else last


class _Wording(Formatter):
    """`{by:size}` is `units.size(by)`, `{pairs:plural pair}` is `units.plural("pair", pairs)`; a
    flag prints nothing, and `{names:, }` joins a list."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is True:
            return ""
        if isinstance(value, list):
            return format_spec.join(map(str, value))
        name, _, noun = format_spec.partition(" ")
        made, given = getattr(units, name, None), [noun, value] if noun else [value]
        if made is None:
            return format(value, format_spec)
        return str(made(*(given[::-1] if made is units.ratio else given)))


def filled(clauses: Sequence[str], facts: Facts, between: str = "") -> str:
    """The clauses whose facts are all known, with these facts; the inner facts are filled first."""

    def plain(fact: Any) -> Any:
        if isinstance(fact, list | tuple):
            return [plain(one) for one in fact]
        return filled(clauses, fact) if isinstance(fact, Mapping) else fact

    values = {name: plain(fact) for name, fact in facts.items()}
    known = {name: value for name, value in values.items() if value not in (None, "")}
    wording = _Wording()
    named = ((clause, {name for _, name, *_ in wording.parse(clause)}) for clause in clauses)
    texts = (wording.format(c, **known) for c, its in named if its - {None} <= known.keys())
    return between.join(texts)


def note_text(note: Facts) -> str:
    """`2 of 3 processes ran`: what weakens the numbers of a case."""
    return filled(NOTES["said"], note)


def shared_name(names: Sequence[str]) -> str:
    """The parts that names of cases share."""
    split = [name.split(", ") for name in names]
    return ", ".join(part for part in split[0] if all(part in own for own in split))


def own_name(name: str, shared: str) -> str:
    """A name without the parts that those of a group share; whole if it has no others."""
    own = [part for part in name.split(", ") if part not in shared.split(", ")]
    return ", ".join(own) or name


def rest_command(stop: Stop | None, folder: object) -> str:
    """The command that measures what a run lacks."""
    more = " --no-abort" if stop and stop.rule else ""
    return f"harness run --resume {shlex.quote(str(folder))}{more}"


def alone_command(run: Run, case_id: str) -> str:
    """The command that runs one case again."""
    suite, case = shlex.quote(run.suite.path), shlex.quote(case_id)
    return f"harness run {suite} --filter {case} --set measure.processes=1"


def gap_place(suite: Suite) -> str:
    """`T=512`: where the gap that the suspects explain was seen; may be empty."""
    place = suite.suspects.gap.where.criteria if suite.suspects else {}
    return ", ".join(f"{suite.axis(name)}={values[0]}" for name, values in place.items())


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# --- programs ----------------------------------------------------------------------------


def command_text(case: Case) -> str:
    """The program of a case and its arguments as typed in a shell; empty for a factory."""
    words = case.program.argv if case.program else ()
    return shlex.join("python" if word == INTERPRETER else word for word in words)


def ran_lines(run: Run) -> Iterable[str]:
    """The command of each workload that is a program, by its first case: where it ran, and the
    names of the variables that it sets, without values, which may be secret; and which Python
    `{python}` was."""
    for name in dict.fromkeys(case.workload for case in run.suite.cases if case.program):
        first, *rest = (case for case in run.suite.cases if case.workload == name)
        ran = [m.code for m in run.of(first.case_id) if "program" in m.code]
        where = ran[0]["program"] if ran else first.program.cwd if first.program else ""
        sets = f"; sets {', '.join(first.env)}" if first.env else ""
        more = f"; {units.plural('more case', len(rest))}" if rest else ""
        yield f"{name} runs: {command_text(first)} (in {where}{sets}){more}"
    own = {c.case_id for c in run.suite.cases if c.program and c.program.argv[0] == INTERPRETER}
    found = {m.effective.get("program") for m in run.measurements if m.case_id in own} - {None}
    yield from (f"python is that of the harness, by {INTERPRETER} in the suite: {x}" for x in found)


# --- effects of axes ---------------------------------------------------------------------


def effect_sentences(found: Sequence[Effect], word: Word = str) -> Iterable[str]:
    """One sentence an axis: `gc`, on against off: 24 % [20 … 28] slower (4 pairs)."""
    for axis, base in dict.fromkeys((e.axis, e.base) for e in found):
        own = [e for e in found if (e.axis, e.base) == (axis, base)]
        parts, last = [], own[0].value
        for e in own:
            parts.append(
                f"{f'{units.scalar(e.value)}: ' if e.value != last else ''}{_effect(e, word)}"
            )
            last = e.value
        head = f"`{word(axis)}`, {units.scalar(own[0].value)} against {units.scalar(base)}"
        yield f"{head}: {'; '.join(parts)}."


def together_sentences(found: Sequence[Effect], word: Word = str) -> Iterable[str]:
    """`A=1 with B=1 is at least 47x faster; neither alone is shown to be.`"""
    for e in together(found):
        ends = zip(e.axis.split("/"), str(e.value).split("/"), strict=True)
        pair = " with ".join(f"{word(axis)}={value}" for axis, value in ends)
        levels = [f"{word(axis)}={units.scalar(at)}" for axis, at in e.within.items()]
        where = f" at {listed(levels)}" if levels else ""
        amount = units.ratio(e.ratio, "least" if e.at_least else "slower")
        yield f"{pair} is {amount}{where}; neither alone is shown to be."


def _effect(e: Effect, word: Word) -> str:
    """An effect on the step time: only a range where the pairs disagree."""
    pairs, each = units.plural("pair", e.pairs), e.by_pair
    if e.within:
        pairs += f", {listed([f'{word(a)}={units.scalar(at)}' for a, at in e.within.items()])}"
    amount = units.ratio(e.ratio)
    if e.ratio.both and e.pairs > 1:
        pairs = f"2 processes of {pairs}"
    if e.at_least:
        amount = units.ratio(e.ratio, "least")
    elif e.disagree or max(each) > units.MOST_APART * min(each):
        least, most = (units.ratio(end(each)) for end in (min, max))
        near, far = (most, least) if max(each) < 1 else (least, most)
        amount = f"{near.removesuffix(far[far.rindex(' ') :])} to {far}"
    elif e.negligible:
        amount = f"unchanged ({units.ratio(e.ratio, 'change')})"
    elif e.ratio.low is None:
        pairs += ", one process on a side"
    elif not e.ratio.differs:
        amount = f"no difference shown ({amount})"
    return f"{amount} ({pairs})"


def crossovers(found: Sequence[Versus], suite: Suite) -> Iterator[str]:
    """`nsa overtakes dense between T 8192 and 32768 (7 of 10 configurations; 2 already ahead).`,
    of two providers that a rule compares."""
    ratios = [r for r in suite.rules if r.against]
    compared = {a.workload for r in ratios for a, _ in r.pairs(suite.cases)}
    groups: dict[tuple[str, str, str], list[Versus]] = {}
    for v in found:
        if v.points[1:] and v.workload in compared:
            groups.setdefault((v.workload, v.ours, v.theirs), []).append(v)
    for (workload, *providers), group in groups.items():
        ends = [v.crossover for v in group if v.crossover]
        if not ends:
            continue
        ahead = sum((v.points[0][1].low or 0) > 1 for v in group if not v.crossover)
        ours, theirs = (suite.provider(workload, p) for p in providers)
        ours = f"{workload}: {ours}" if len({c.workload for c in suite.cases}) > 1 else ours
        between = f"{min(low for low, _ in ends):.10g} and {max(high for _, high in ends):.10g}"
        many = f"{len(ends)} of {units.plural('configuration', len(group))}"
        many += f"; {ahead} already ahead" if ahead else ""
        left = len(group) - len(ends) - ahead
        many += f"; {left} not decided" if left else ""
        yield f"{ours} overtakes {theirs} between {suite.axis(group[0].axis)} {between} ({many})."


# --- axes without effect -----------------------------------------------------------------


def dead_axis_sentence(d: DeadAxis, word: Word = str) -> str:
    """`train/nsa`: `NSA_FWE_Q` has no effect (1 and 4): the same ... in 6 pairs of cases."""
    place = f"{d.workload}/{d.provider}" if d.provider else d.workload
    values = listed([", ".join(map(units.scalar, v)) for v in d.values])
    axes = quoted(map(word, d.axes))
    if d.axes == ("provider",):
        head = f"providers {values} do the same"
    else:
        head = f"{axes} {'has' if len(d.axes) == 1 else 'have'} no effect ({values})"
    same = "operators, kernels, counters and results"
    if d.without_kernels:
        same = "operators, counters and results (kernels not seen)"
    time = "; only the step time differs" if d.time_differs else ""
    return f"`{place}`: {head}: the same {same} in {units.plural('pair', d.pairs)} of cases{time}."


# --- findings ----------------------------------------------------------------------------


def is_speed(metric: str) -> bool:
    return metric in (*SPEEDS, "step_cycles", "kernel_s")


def _against(e: Ratio, metric: str, partner: str) -> str:
    """`1.2x slower than dense`, `last loss 102 % of that of bf16`."""
    if not is_speed(metric):
        own = e if METRICS[metric].higher_is_better else e.inverse
        return f"{units.title(metric)} {units.ratio(own, 'share')} of that of {partner}"
    by = BY_KERNELS if metric == "kernel_s" else ""
    return f"{units.ratio(e, 'beside')} {partner}{by}"


def _host_set(f: Finding) -> str:
    """`; host-bound: kernels are 27 % of the step`, of a pair the ratio by kernels; empty of a
    speed that the host does not set, or that is enough."""
    if f.beside:
        by = " by time, which leaves it open" if f.metric == "kernel_s" else BY_KERNELS
        return f"; {units.ratio(f.beside, 'fast')}{by}"
    low = f.busy and f.decision is not Decision.GO
    return f"; host-bound: kernels are {units.percent(f.busy)} of the step" if low else ""


def fact_text(f: Finding) -> str:
    """What a finding without a measured number states, without its case."""
    if f.fact is Fact.ALLOWED:
        return f"{f.outcome} is allowed{f': {f.detail}' if f.detail else ''}"
    if f.fact in (Fact.ENDED, Fact.NOT_RUN):
        return ending_text(f.outcome, why_ended(f))
    return str(FINDINGS[f.fact].format(count=f.count, asked=f.asked, detail=f.detail))


def why_ended(of: Finding | CaseSummary) -> str:
    """What a process said at its end, or what was found of the case afterwards."""
    return of.detail or note_text(of.facts)


def ending_text(outcome: Outcome | None, detail: str) -> str:
    """`crash: illegal memory access`."""
    word = units.outcome_name(outcome) if outcome else "did not run"
    first_line = detail.strip().partition("\n")[0]
    return f"{word}: {first_line}" if first_line else word


def finding_sentence(f: Finding) -> str:
    """What a finding states, without its case."""
    value = _value(f)
    why = f": {f.detail}" if f.detail else filled(FINDINGS["why"], f.facts)
    match f.fact:
        case Fact.SLOW:
            return f"slow: {units.bound_text('step_s', f.bound)} a step" if f.bound else "slow"
        case Fact.FASTEST:
            each = " a step" if f.metric == "step_s" else ""
            near = f" ({len(f.cases)} cases alike)" if f.cases[1:] else ""
            return f"{value}{each}{near}"
        case Fact.NO_FIT:
            return filled(SCALING["note" if "gpus" in f.facts else "no_fit"], f.facts, "; ")
        case Fact.NO_METRIC:
            return f"{units.title(f.metric)} not available{why}"
        case Fact.AT_LEAST | Fact.AT_MOST:
            return _bounded(f)
        case Fact.DECIDED | Fact.OPEN:
            after = f.estimate.n if f.fact is Fact.OPEN and f.estimate else 0
            near = " near" if f.likely else ""
            still = f",{near} after {after} processes" if after > 2 else ""
            return f"{value}{_expected(f)}{_host_set(f)}{still}"
        case Fact.NO_PARTNER:
            absent = f"no {units.title(f.metric)}"
            if f.outcome is not Outcome.OK:
                absent = ending_text(f.outcome, why_ended(f))
            return f"nothing to compare with: {f.partner}: {absent}"
        case Fact.LEFT_OUT:
            return f"this run lacks its {'case' if f.asked == 1 else 'cases'}{why}"
    return fact_text(f)


def _value(f: Finding) -> str:
    """The measured number of a finding; empty without one."""
    if f.estimate is None:
        return ""
    few = units.repeats(f.estimate.n) if f.estimate.each else ""
    if f.partner and isinstance(f.estimate, Ratio):
        return f"{_against(f.estimate, f.metric, f.partner)}{few}"
    value = units.value(f.metric, f.estimate, unit=True)
    value = f"{_NAMED[f.metric]} {value}" if f.metric in _NAMED else value
    if f.low is not None or f.high is not None:
        name = f"{METRICS[f.metric].title} " if METRICS[f.metric].unit == "ratio" else ""
        return f"{name}{value}{few}"
    of = f.detail or filled(SCALING["exponent"], f.facts)
    return f"{value}{few}{f' {of}' if of else ''}"


def _expected(f: Finding) -> str:
    """`; expected ≥ 500 (source)`; empty if the finding has no range."""
    ends = [None if e is None else units.plain(f.metric, e) for e in (f.low, f.high)]
    signs = [f"{sign} {end}" for sign, end in zip("≥≤", ends, strict=True) if end]
    source = f" ({f.detail})" if f.detail else ""
    return f"; expected {' and '.join(signs)}{source}" if signs else ""


def _bounded(f: Finding) -> str:
    """What a timeout leaves of a metric, or of a ratio."""
    bound, least = f.bound or 0.0, f.fact is Fact.AT_LEAST
    if f.partner:
        rounded = (units.rounded_down if least else units.rounded_up)(bound, 3)
        times = f"{units.number(rounded, 3)}x as fast as {f.partner}"
        return f"at least {times}, which timed out" if least else f"timed out: under {times}"
    unit = " per step" if least else units.suffix(f.metric)
    return f"timed out: {units.bound_text(f.metric, bound)}{unit}"
