"""The section "What ran": where the time goes, kernels or operators, counts, and what was asked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness import units
from harness.records import (
    COUNTERS,
    Breakdown,
    CaseSummary,
    Measurement,
    Outcome,
    Profile,
    Run,
    Use,
)
from harness.report.tables import NONE, Table, labels
from harness.report.text import command_text, folder_text, variables_text

TOP = 3
"""Kernels, or operators, that a row names."""
LARGE = 0.1
"""Share of the time from which a range is named."""
MOST = 3
"""Cases that have a sentence."""
GAPPY = 0.5
"""Share of a step's time without device work from which the summary says so."""
LETTERS = 60
"""Of a name."""
_HEADS = {
    "dispatched_ops": "operators",
    "host_syncs": "host syncs",
    "allocations": "allocations",
    "kernel_launches": "launches",
    "device_waits": "waits",
    "host_device_copies": "copies",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What the section shows."""

    programs: Table | None
    """What command each case of a program is; None where none is."""
    asked: str
    """What the suite states of kernels and operators, and what became of it; empty for nothing."""
    where: tuple[str, ...]
    """Where a step's time goes, in the MOST cases that wait most, or take longest."""
    parts: Table | None
    """The same of every workload and provider, with its kernels, or without a GPU its operators."""
    counts: Table | None
    missing: tuple[str, ...]
    """Why counts or a census are missing, and what hides operators."""


def ran(run: Run, summaries: Sequence[CaseSummary]) -> Ran:
    """What the measurements say of what ran."""
    first = {s.case.case_id: _first(run, s) for s in summaries}
    typical = _typical(summaries, first)
    return Ran(
        programs=_programs(run, summaries),
        asked=_asked(summaries),
        where=tuple(_where(typical)),
        parts=_parts(typical),
        counts=_counts(summaries, first),
        missing=tuple(_missing(summaries, first)),
    )


def in_brief(run: Run, summaries: Sequence[CaseSummary]) -> Iterable[str]:
    """One sentence on the case whose step waits most for the host; none where none waits long."""
    found = []
    for s in summaries:
        m = _first(run, s)
        b = m.breakdown if m else None
        if b is not None and (gap := b.launch_gap) is not None and gap >= GAPPY:
            found.append((gap, s, b))
    if not found:
        return
    _, summary, worst = max(found, key=lambda f: f[0])
    yield (
        f"In {len(found)} {'case' if len(found) == 1 else 'cases'} the device waits for the host "
        f"most of a step; most in `{summary.case.case_id}`: {_gap(worst)}."
    )


def _first(run: Run, summary: CaseSummary) -> Measurement | None:
    """The first process that tells anything."""
    return next((m for m in run.of(summary.case.case_id) if m.counters or m.census), None)


def _typical(
    summaries: Sequence[CaseSummary], first: Mapping[str, Measurement | None]
) -> list[tuple[CaseSummary, Breakdown, Profile]]:
    """Of each workload and provider the case with the longest step."""
    longest: dict[tuple[str, str], tuple[CaseSummary, Breakdown, Profile]] = {}
    for s in summaries:
        m = first[s.case.case_id]
        if s.outcome is not Outcome.OK or m is None or m.census is None:
            continue
        b = m.breakdown
        key = s.case.workload, s.case.provider
        if b is not None and (key not in longest or b.step_s > longest[key][1].step_s):
            longest[key] = s, b, m.census
    return list(longest.values())


def _programs(run: Run, summaries: Sequence[CaseSummary]) -> Table | None:
    cases = [s.case for s in summaries if s.case.program]
    rows = [
        (
            f"`{case.case_id}`",
            f"`{command_text(case)}`",
            f"`{folder_text(case, run.of(case.case_id))}`",
            variables_text(case) or NONE,
        )
        for case in cases
    ]
    if not rows:
        return None
    return Table(columns=("case", "command", "in", "sets"), rows=tuple(rows))


# --- where the step goes -----------------------------------------------------------------


def _where(typical: Sequence[tuple[CaseSummary, Breakdown, Profile]]) -> Iterable[str]:
    ranked = sorted(typical, key=lambda t: (t[1].launch_gap or 0.0, t[1].step_s), reverse=True)
    for summary, b, _ in ranked[:MOST]:
        if said := _host(b) if b.launch_gap is None else _gap(b):
            yield f"`{summary.case.case_id}`: {said}."


def _gap(b: Breakdown) -> str:
    """83 % of the step is launch gap (device busy 12 ms of 71 ms), 64 % of it before kernels of
    nsa.select; the host is then mostly in nsa/selected.py:120 gather (41 %)"""
    busy = b.device_busy_s or 0.0
    named = _most(b.gap_by_range)
    text = (
        f"{units.percent(b.launch_gap or 0.0)} of the step is launch gap (device busy "
        f"{units.duration(busy)} of {units.duration(b.step_s)})"
    )
    if named:
        name, share = named
        text += f", {units.percent(share)} of it before kernels of {name}"
    if frame := _frame(b, named):
        text += f"; the host is then most often in {frame}"
    return text


def _host(b: Breakdown) -> str:
    """56 % of the host's time is in nsa.select; most often in nsa/selected.py:242 copy (41 %)"""
    parts = []
    named = _most(b.host_by_range)
    if named:
        name, share = named
        parts.append(f"{units.percent(share)} of the host's time is in {name}")
    if frame := _frame(b, named):
        parts.append(f"most often in {frame}")
    return "; ".join(parts)


def _most(shares: Mapping[str, float]) -> tuple[str, float] | None:
    """The range with the largest share; None where no range has a large one."""
    named = [(name, share) for name, share in shares.items() if name and share >= LARGE]
    return max(named, key=lambda pair: pair[1], default=None)


def _frame(b: Breakdown, named: tuple[str, float] | None) -> str:
    """The function seen most often, in that range if in any; empty where none was seen."""
    inside = [f for f in b.frames if named and f.where == named[0]]
    for frame in inside or b.frames:
        return f"`{frame.function}` ({units.percent(frame.share)})"
    return ""


# --- names -------------------------------------------------------------------------------


def _parts(typical: Sequence[tuple[CaseSummary, Breakdown, Profile]]) -> Table | None:
    on_device = any(b.launch_gap is not None for _, b, _ in typical)
    rows = []
    for s, b, census in typical:
        gap = NONE if b.launch_gap is None else units.percent(b.launch_gap)
        named = _most(b.gap_by_range if on_device else b.host_by_range)
        uses = census.kernels if on_device else census.operators
        total = sum(u.time_s for u in uses)
        rows.append(
            (
                f"`{s.case.case_id}`",
                *([gap] if on_device else []),
                f"{named[0]} {units.percent(named[1])}" if named else NONE,
                _frame(b, named) or NONE,
                ", ".join(_use(u, total) for u in uses[:TOP]) or NONE,
            )
        )
    if not rows:
        return None
    head: tuple[str, ...] = ("case", "most of the host's time", "most often at", "operators")
    if on_device:
        head = ("case", ">launch gap", "most of it before", "host then at", "kernels")
    return Table(columns=head, rows=tuple(rows))


def _use(use: Use, total_s: float) -> str:
    name = use.name if len(use.name) <= LETTERS else use.name[: LETTERS - 1] + "…"
    where = f" in {use.where}" if use.where else ""
    share = f" {units.percent(use.time_s / total_s)}" if total_s else ""
    return f"`{name}`{where} ×{use.calls:g}{share}"


# --- counts ------------------------------------------------------------------------------


def _counts(
    summaries: Sequence[CaseSummary], first: Mapping[str, Measurement | None]
) -> Table | None:
    """A case a row; cases of one workload and provider that count alike share one."""
    shown = [
        name
        for name in COUNTERS
        if any(name in s.metrics for s in summaries)
        or any(m and m.counters and getattr(m.counters, name) is not None for m in first.values())
    ]
    names = labels([s.case for s in summaries])
    rows: dict[tuple[str, ...], list[str]] = {}
    for s in summaries:
        if first[s.case.case_id] is None:
            continue
        cells = tuple(_count(s, first[s.case.case_id], name) for name in shown)
        rows.setdefault((f"{s.case.workload}/{s.case.provider}", *cells), []).append(
            names[s.case.case_id]
        )
    if not rows or not shown:
        return None
    several = {head for head in (r[0] for r in rows) if sum(r[0] == head for r in rows) > 1}
    table: list[tuple[str, ...]] = []
    for (head, *counted), members in rows.items():
        what = f"`{head}`" if head not in several else f"`{head}`: {_members(members, head)}"
        table.append((what, *counted))
    return Table(columns=("cases", *(f">{_HEADS[n]}" for n in shown)), rows=tuple(table))


def _members(names: Sequence[str], head: str) -> str:
    provider = head.partition("/")[2]
    short = [" ".join(n.replace(provider, "", 1).split()) or n for n in names]
    return " or ".join(short)


def _count(summary: CaseSummary, m: Measurement | None, name: str) -> str:
    """The count; `12?` where steps or processes disagree."""
    if name in summary.metrics:
        return units.cell(name, summary.metrics[name])
    value = getattr(m.counters, name) if m and m.counters else None
    return NONE if value is None else f"{value:,}?"


def _missing(
    summaries: Sequence[CaseSummary], first: Mapping[str, Measurement | None]
) -> Iterable[str]:
    """Reasons, each once, with its cases unless it is all of them."""
    reasons: dict[str, list[str]] = {}
    told = [(s, m) for s in summaries if (m := first[s.case.case_id]) is not None]
    for s, m in told:
        for name, why in (m.counters.unknown if m.counters else {}).items():
            reasons.setdefault(f"{_HEADS[name]} unknown: {why}", []).append(s.case.case_id)
        for what in m.counters.hidden if m.counters else ():
            text = f"{what}: operators inside are not among those counted"
            reasons.setdefault(text, []).append(s.case.case_id)
        if m.census and m.census.skipped:
            reasons.setdefault(f"no census: {m.census.skipped}", []).append(s.case.case_id)
    by_why: dict[tuple[str, str], list[str]] = {}
    for text, ids in reasons.items():
        head, _, why = text.partition(": ")
        whose = "" if len(ids) == len(told) else f" ({_few(ids)})"
        by_why.setdefault((why, whose), []).append(head)
    for (why, whose), heads in by_why.items():
        yield f"{_joined(heads)}: {why}{whose}."


def _joined(heads: Sequence[str]) -> str:
    """`launches, waits and copies unknown`."""
    unknown = [h.removesuffix(" unknown") for h in heads if h.endswith(" unknown")]
    others = [h for h in heads if not h.endswith(" unknown")]
    if unknown:
        others.insert(0, f"{', '.join(unknown)} unknown")
    text = "; ".join(others)
    return text[:1].upper() + text[1:]


def _few(case_ids: Sequence[str], most: int = 2) -> str:
    rest = len(case_ids) - most
    shown = ", ".join(f"`{i}`" for i in case_ids[:most])
    return f"{shown} and {rest} more" if rest > 0 else shown


# --- asked against seen ------------------------------------------------------------------


def _asked(summaries: Sequence[CaseSummary]) -> str:
    stating = [s for s in summaries if s.case.kernels or s.case.operators]
    if not stating:
        return ""
    seen = [s for s in stating if s.attested and not s.kernels_invisible]
    operators = [s for s in stating if s.attested and s.kernels_invisible]
    broken = [s for s in stating if s.outcome is Outcome.PATH_MISMATCH]
    parts = [f"The suite states kernels or operators of {len(stating)} cases"]
    if seen:
        parts.append(f"seen as stated in {len(seen)}")
    if operators:
        parts.append(f"operators seen as stated in {len(operators)}")
    if broken:
        parts.append(f"**not** in {len(broken)}, see What went wrong")
    unknown: dict[str, int] = {}
    for s in stating:
        if s.attested is False:
            unknown[s.unattested] = unknown.get(s.unattested, 0) + 1
    parts += [f"not attested in {n}: {why}" for why, n in unknown.items()]
    if invisible := sum(s.kernels_invisible for s in stating):
        parts.append(f"kernels not attested in {invisible}: no GPU")
    return f"{'; '.join(parts)}."
