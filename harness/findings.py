"""What is odd about axes and flags, in sentences: for the report and for the command line."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness import units
from harness.analysis.dead_axes import DeadAxis, Invariance, Oddities, Values
from harness.records import Run
from harness.report.sentences import _list


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
