"""Where the time of a step goes, what limits it, and the exact counts of one step."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from harness import units
from harness.analysis.roofline import OTHER, OUTSIDE, Bottleneck, Limit, Stack
from harness.analysis.study import Study
from harness.records import COUNTERS, SAME_STEP, CaseSummary, Facts, Measurement, Outcome
from harness.report.tables import NONE, Table
from harness.report.text import filled, listed, own_name, shared_name, words

SMALL = 0.02
"""Share of the step from which a part has a row."""
WORDS = words("causes")
"""Kind of cause -> what a page says of it; `shared` by those of a step that waits."""
_HEADS = {
    "dispatched_ops": "operators",
    "host_syncs": "host syncs",
    "allocations": "allocations",
    "kernel_launches": "launches",
    "device_waits": "waits",
    "host_device_copies": "copies",
}


def where_table(found: Sequence[Stack], names: Mapping[str, str]) -> Table | None:
    """A row a part that reaches 2 % of a step, a column a case: its time, and its share."""
    share: dict[str, float] = {}
    for stack in found:
        for name, seconds in stack.parts.items():
            share[name] = max(share.get(name, 0.0), seconds / stack.step_s)
    small = {OTHER, *(n for n in share if share[n] < SMALL and n != OUTSIDE)}
    rest = [sum(s.parts.get(n, 0.0) for n in small) / s.step_s for s in found]
    share[OTHER] = max(rest, default=0.0)
    last = [name for name in (OTHER, OUTSIDE) if share.pop(name, 0.0) >= SMALL]
    shown = [*sorted((n for n in share if share[n] >= SMALL), key=lambda n: -share[n]), *last]
    rows = [(part, *(_part_cell(stack, part, shown) for stack in found)) for part in shown]
    rows.append(("**step**", *(units.duration(stack.step_s) for stack in found)))
    shared = shared_name([names[stack.case.case_id] for stack in found]) if found[1:] else ""
    columns = ("part", *(f">{own_name(names[s.case.case_id], shared)}" for s in found))
    remarks = [f"All: {shared}."] if shared else []
    noted = [stack for stack in found if stack.note and not stack.note.startswith(SAME_STEP)]
    remarks += [f"{names[stack.case.case_id]}: {stack.note}." for stack in noted]
    return Table(columns=columns, rows=tuple(rows), remarks=tuple(remarks)) if found else None


def where_sentence(found: Sequence[Stack], names: Mapping[str, str]) -> str:
    """The two largest parts of the first case; empty without a profile."""
    if not found:
        return ""
    stack = found[0]
    largest = sorted(stack.parts, key=lambda part: -stack.parts[part])[:2]
    one, other = sorted(largest, key=lambda part: part == OUTSIDE)
    takes, also = (_part_cell(stack, part, [*stack.parts]) for part in (one, other))
    name = names[stack.case.case_id]
    whose = "" if name == stack.case.case_id else f", {name}"
    step = units.duration(stack.step_s)
    return f"{one} takes {takes} and {other} {also} of a step of {step}{whose}"


def _part_cell(stack: Stack, part: str, shown: Sequence[str]) -> str:
    """`289 ms (79 %)`; the other kernels with those that have no row."""
    small = sum(t for n, t in stack.parts.items() if n not in shown) if part == OTHER else 0.0
    taken = stack.parts.get(part, 0.0) + small
    if not taken:
        return NONE
    return f"{units.duration(taken)} ({100 * taken / stack.step_s:.0f} %)"


def limits(of: Study) -> Table | None:
    """Each kind of bottleneck, its cases, and the evidence of the longest of them; None without a
    GPU or profiles."""
    kinds: dict[str, list[tuple[float, CaseSummary, Bottleneck]]] = {}
    profiled = any(s.case.settings.profile for s in of.summaries)
    for s, found in _bottlenecks(of, of.summaries if profiled else ()):
        one = s.metrics["step_s"].value, s, found
        if s.case.settings.profile or found.limit is not Limit.NOT_MEASURED:
            kinds.setdefault(_kind(found), []).append(one)
    rows = []
    for kind in sorted(kinds, key=lambda kind: [*Limit].index(kinds[kind][0][2].limit)):
        _, s, found = max(kinds[kind], key=lambda one: one[0])
        evidence = f"{of.names[s.case.case_id]}: {_evidence(found)}"
        rows.append((kind, f"{len(kinds[kind])} of {len(of.summaries)}", evidence))
    columns = ("bottleneck", ">cases", "evidence in the longest such case")
    return Table(columns=columns, rows=tuple(rows)) if rows else None


def limit_sentence(of: Study, cases: Sequence[CaseSummary]) -> str:
    """What limits the longest step of these; empty if that is not known."""
    timed = _bottlenecks(of, cases)
    found = max(timed, key=lambda one: one[0].metrics["step_s"].value, default=None)
    if found is None or found[1].limit in (Limit.NOT_MEASURED, Limit.COLD, Limit.GPU):
        return ""
    name = of.names[found[0].case.case_id]
    return f"{name} is limited by {_kind(found[1])}: {_evidence(found[1])}"


def host_bound(of: Study, members: Sequence[CaseSummary]) -> str:
    """`Host-bound: dense SDPA (2 of 3 cases), ….`: whose speed is not that of its kernels."""
    ok = [s.case for s in members if s.outcome is Outcome.OK]
    shown = {case.case_id: of.run.suite.provider(case.workload, case.provider) for case in ok}
    every = Counter(shown.values())
    some = Counter(name for case_id, name in shown.items() if case_id in of.waiting)
    said = (f"{name} ({n} of {units.plural('case', every[name])})" for name, n in some.items())
    return f"Host-bound: {', '.join(said)}." if some else ""


def _bottlenecks(
    of: Study, cases: Sequence[CaseSummary]
) -> Iterator[tuple[CaseSummary, Bottleneck]]:
    for s in cases if of.run.environment.gpu else ():
        if (found := of.bottlenecks.get(s.case.case_id)) and "step_s" in s.metrics:
            yield s, found


def _kind(found: Bottleneck) -> str:
    return f"{found.limit}, at the {found.clock.by} limit" if found.clock else str(found.limit)


def _evidence(found: Bottleneck) -> str:
    if not found.facts:
        return "neither a profile nor five readings of NVML while sampling"
    clock = found.clock if found.busy is not None else None
    return shown(found.facts) + (f"; {shown(clock.facts)}" if clock else "")


def shown(facts: Facts) -> str:
    """What limits a step, by the facts of a bottleneck, of a clock or of its operators."""
    return filled(WORDS["shared"], facts)


def counts(of: Study) -> Table | None:
    """A case a row; cases of one workload and provider with equal counts share one. Below, what was
    not counted, and why."""
    counted: dict[str, Measurement] = {}
    for m in of.run.measurements:
        if m.counters or m.profile:
            counted.setdefault(m.case_id, m)
    known = [s for s in of.summaries if s.case.case_id in counted]
    shown = [n for n in COUNTERS if any(_count(s, counted, n) != NONE for s in known)]
    rows: dict[tuple[str, ...], list[str]] = {}
    for s in known:
        head = f"{s.case.workload}/{s.case.provider}"
        cells = (_count(s, counted, name) for name in shown)
        rows.setdefault((head, *cells), []).append(of.names[s.case.case_id])
    if not rows or not shown:
        return None
    heads = [head for head, *_ in rows]
    table = [
        (f"`{head}`" if heads.count(head) == 1 else " or ".join(members), *cells)
        for (head, *cells), members in rows.items()
    ]
    columns = ("cases", *(f">{_HEADS[n]}" for n in shown))
    return Table(columns=columns, rows=tuple(table), remarks=_not_counted(counted, of.names))


def _count(s: CaseSummary, counted: Mapping[str, Measurement], name: str) -> str:
    """The count; `12?` if steps or processes differ."""
    if name in s.metrics:
        return units.value(name, s.metrics[name])
    found = counted[s.case.case_id].counters
    value = getattr(found, name) if found else None
    return NONE if value is None else f"{value:,}?"


def _not_counted(counted: Mapping[str, Measurement], names: Mapping[str, str]) -> tuple[str, ...]:
    """`Not counted: no GPU; operators inside torch.compile in a and 2 more.`"""
    cases: dict[str, list[str]] = {}
    for case_id, m in counted.items():
        unknown = m.counters.unknown.values() if m.counters else ()
        hidden = m.counters.hidden if m.counters else ()
        for what in dict.fromkeys((*unknown, *(f"operators inside {name}" for name in hidden))):
            cases.setdefault(what, []).append(names[case_id])
    said = [
        what if len(of) == len(counted) else f"{what} in {listed(of, 2)}"
        for what, of in cases.items()
    ]
    return (f"Not counted: {'; '.join(said)}.",) if said else ()
