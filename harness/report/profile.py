"""The section "Profile": where the time goes, what limits the cases, ranks, exact counts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness import units
from harness.analysis.roofline import OTHER, OUTSIDE, Bottleneck, Limit, Stack, bottleneck
from harness.records import (
    COUNTERS,
    SAME_STEP,
    CaseSummary,
    Measurement,
    Peaks,
    Run,
)
from harness.report.tables import NONE, Table
from harness.report.text import (
    listed,
    own_name,
    program_lines,
    shared_name,
    unavailable,
)

SMALL = 0.02
"""Share of the step from which a part has a row."""
_HEADS = {
    "dispatched_ops": "operators",
    "host_syncs": "host syncs",
    "allocations": "allocations",
    "kernel_launches": "launches",
    "device_waits": "waits",
    "host_device_copies": "copies",
}


def profile_section(
    run: Run, summaries: Sequence[CaseSummary], names: Mapping[str, str]
) -> dict[str, Any]:
    """What the section shows, by name: tables or None, and sentences."""
    first = {s.case.case_id: _first(run, s) for s in summaries}
    return {
        "programs": tuple(program_lines([s.case for s in summaries], run.measurements)),
        "bottlenecks": _bottlenecks(run, summaries, names),
        "ranks": _ranks(run, summaries, names),
        "counts": _counts(summaries, first, names),
        "missing": tuple(_missing(first)),
    }


def where_table(found: Sequence[Stack], names: Mapping[str, str]) -> Table | None:
    """A row a part that reaches 2 % of a step, a column a case: its time, and its share."""
    share: dict[str, float] = {}
    for stack in found:
        for name, seconds in stack.parts.items():
            share[name] = max(share.get(name, 0.0), seconds / stack.step_s)
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
    said = listed([f"{part} {_part_cell(stack, part, [*stack.parts])}" for part in largest])
    name = names[stack.case.case_id]
    whose = "" if name == stack.case.case_id else f", {name}"
    return f"most of a step of {units.duration(stack.step_s)}{whose} is {said}"


def _part_cell(stack: Stack, part: str, shown: Sequence[str]) -> str:
    """`289 ms (79 %)`; the other kernels with those that have no row."""
    small = sum(t for n, t in stack.parts.items() if n not in shown) if part == OTHER else 0.0
    taken = stack.parts.get(part, 0.0) + small
    if not taken:
        return NONE
    return f"{units.duration(taken)} ({100 * taken / stack.step_s:.0f} %)"


def _bottlenecks(
    run: Run, summaries: Sequence[CaseSummary], names: Mapping[str, str]
) -> Table | None:
    """Each kind of bottleneck, its cases, and the evidence of the longest of them; None without a
    GPU."""
    gpu = run.environment.gpu
    if gpu is None:
        return None
    peaks = run.self_test.peaks if run.self_test else Peaks()
    kinds: dict[str, list[tuple[float, CaseSummary, Bottleneck]]] = {}
    for s in summaries:
        found = bottleneck(s, run.of(s.case.case_id), peaks, gpu.max_sm_clock_hz)
        if found is not None and "step_s" in s.metrics:
            limited = f", at the {found.clock.by} limit" if found.clock else ""
            one = s.metrics["step_s"].value, s, found
            kinds.setdefault(f"{found.limit}{limited}", []).append(one)
    rows = []
    for kind in sorted(kinds, key=lambda kind: [*Limit].index(kinds[kind][0][2].limit)):
        _, s, found = max(kinds[kind], key=lambda one: one[0])
        evidence = f"{names[s.case.case_id]}: {found.evidence}"
        rows.append((kind, f"{len(kinds[kind])} of {len(summaries)}", evidence))
    columns = ("bottleneck", ">cases", "evidence in the longest such case")
    return Table(columns=columns, rows=tuple(rows)) if rows else None


def _ranks(run: Run, summaries: Sequence[CaseSummary], names: Mapping[str, str]) -> Table | None:
    """The ranks of each case with several, in its first process; and how much of the communication
    other kernels hide."""
    rows, remarks = [], []
    for s in summaries:
        m = next((m for m in run.of(s.case.case_id) if m.ranks), None)
        for r in m.ranks if m else ():
            known = ("step_s", "gpu_utilisation", "peak_memory_bytes")
            values = ((name, getattr(r, name)) for name in known)
            shown = [NONE if x is None else units.quantity(name, x) for name, x in values]
            power = NONE if r.gpu_power_w is None else f"{r.gpu_power_w:.0f} W"
            clock = NONE if r.gpu_sm_clock_hz is None else f"{r.gpu_sm_clock_hz / 1e6:,.0f} MHz"
            steps, gpu = NONE if r.steps is None else f"{r.steps:,}", r.gpu[:12] or NONE
            case = names[s.case.case_id]
            rows.append((case, str(r.rank), gpu, steps, *shown, power, clock, r.ended or NONE))
        b = next((m.breakdown for m in run.of(s.case.case_id) if m.breakdown), None)
        if b is not None and b.communication_s is not None:
            sent, hidden = b.communication_s, 1 - b.exposed_s / b.communication_s
            remarks.append(
                f"{names[s.case.case_id]}: NCCL's kernels run for {units.duration(sent)} "
                f"({units.percent(sent / b.profiled_step_s)} of the profiled step, waits for other "
                f"ranks included); other kernels run during {units.percent(hidden)} of that time."
            )
    heads = (">rank", "GPU", ">steps", ">step time", ">GPU busy", ">peak memory", ">power")
    table = Table(
        columns=("case", *heads, ">SM clock", "ended"), rows=tuple(rows), remarks=tuple(remarks)
    )
    return table if rows else None


def _first(run: Run, summary: CaseSummary) -> Measurement | None:
    """The first process with counters or a profile."""
    return next((m for m in run.of(summary.case.case_id) if m.counters or m.profile), None)


# --- counts ------------------------------------------------------------------------------


def _counts(
    summaries: Sequence[CaseSummary],
    first: Mapping[str, Measurement | None],
    names: Mapping[str, str],
) -> Table | None:
    """A case a row; cases of one workload and provider with equal counts share one."""
    counted = [m.counters for m in first.values() if m and m.counters]
    shown = [
        name
        for name in COUNTERS
        if any(name in s.metrics for s in summaries)
        or any(getattr(c, name) is not None for c in counted)
    ]
    rows: dict[tuple[str, ...], list[str]] = {}
    for s in summaries:
        m = first[s.case.case_id]
        if m is not None:
            cells = tuple(_count(s, m, name) for name in shown)
            head = f"{s.case.workload}/{s.case.provider}"
            rows.setdefault((head, *cells), []).append(names[s.case.case_id])
    if not rows or not shown:
        return None
    heads = [head for head, *_ in rows]
    table: list[tuple[str, ...]] = []
    for (head, *counts), members in rows.items():
        alone = heads.count(head) == 1
        table.append((f"`{head}`" if alone else " or ".join(members), *counts))
    return Table(columns=("cases", *(f">{_HEADS[n]}" for n in shown)), rows=tuple(table))


def _count(summary: CaseSummary, m: Measurement, name: str) -> str:
    """The count; `12?` if steps or processes differ."""
    if name in summary.metrics:
        return units.cell(name, summary.metrics[name])
    value = getattr(m.counters, name) if m.counters else None
    return NONE if value is None else f"{value:,}?"


def _missing(first: Mapping[str, Measurement | None]) -> Iterable[str]:
    reasons = []
    known = {case_id: m for case_id, m in first.items() if m is not None}
    for case_id, m in known.items():
        if m.counters:
            reasons += [(_HEADS[name], why, case_id) for name, why in m.counters.unknown.items()]
            reasons += [
                (f"operators inside {what}", "not counted", case_id) for what in m.counters.hidden
            ]
        if m.profile and m.profile.skipped:
            reasons.append(("profile", m.profile.skipped, case_id))
    return unavailable(reasons, len(known))
