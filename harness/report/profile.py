"""The section "Profile": where the time goes, kernels or operators, exact counts, requirements."""

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
from harness.report.markdown import clipped
from harness.report.tables import NONE, Table, labels
from harness.report.text import command_text, folder_text, plural, unavailable, variables_text

TOP = 3
"""Kernels, or operators, that a row names."""
LARGE = 0.1
"""Share of the time from which a range is named."""
MOST = 3
"""Cases that have a sentence."""
GAPPY = 0.5
"""Share of a step without device work from which the summary mentions it."""
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
class ProfileSection:
    """What the section shows."""

    programs: Table | None
    """The command of each case that is a program."""
    required: str
    """How many cases require kernels or operators, and whether those ran; empty if none does."""
    where: tuple[str, ...]
    """Where a step's time goes, in the MOST cases that wait most, or take longest."""
    parts: Table | None
    """The same for every workload and provider, with kernels, or without a GPU with operators."""
    counts: Table | None
    missing: tuple[str, ...]
    """Why counts or a profile are missing, and what hides operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profiled:
    """The profiled case of one workload and provider that has the longest step."""

    case_id: str
    breakdown: Breakdown
    profile: Profile


def profile_section(run: Run, summaries: Sequence[CaseSummary]) -> ProfileSection:
    first = {s.case.case_id: _first(run, s) for s in summaries}
    longest = _longest(summaries, first)
    ranked = sorted(
        longest, key=lambda p: (p.breakdown.launch_gap or 0.0, p.breakdown.step_s), reverse=True
    )
    sentences = ((p.case_id, _step_sentence(p.breakdown)) for p in ranked[:MOST])
    return ProfileSection(
        programs=_programs(run, summaries),
        required=_required(summaries),
        where=tuple(f"`{case_id}`: {text}." for case_id, text in sentences if text),
        parts=_parts(longest),
        counts=_counts(summaries, first),
        missing=tuple(_missing(first)),
    )


def longest_wait(run: Run, summaries: Sequence[CaseSummary]) -> Iterable[str]:
    """One sentence on the case whose GPU waits most for the host, if one waits long."""
    found = []
    for s in summaries:
        m = _first(run, s)
        b = m.breakdown if m else None
        if b is not None and (gap := b.launch_gap) is not None and gap >= GAPPY:
            found.append((gap, s.case.case_id, b))
    if found:
        _, case_id, worst = max(found, key=lambda f: f[0])
        yield (
            f"In {plural('case', len(found))} the GPU waits for the host most of the time. "
            f"The worst is `{case_id}`: {_step_sentence(worst)}."
        )


def _first(run: Run, summary: CaseSummary) -> Measurement | None:
    """The first process with counters or a profile."""
    return next((m for m in run.of(summary.case.case_id) if m.counters or m.profile), None)


def _longest(
    summaries: Sequence[CaseSummary], first: Mapping[str, Measurement | None]
) -> list[_Profiled]:
    longest: dict[tuple[str, str], _Profiled] = {}
    for s in summaries:
        m = first[s.case.case_id]
        if s.outcome is not Outcome.OK or m is None or m.profile is None or m.breakdown is None:
            continue
        key = s.case.workload, s.case.provider
        if key not in longest or m.breakdown.step_s > longest[key].breakdown.step_s:
            longest[key] = _Profiled(
                case_id=s.case.case_id, breakdown=m.breakdown, profile=m.profile
            )
    return list(longest.values())


def _programs(run: Run, summaries: Sequence[CaseSummary]) -> Table | None:
    rows = [
        (
            f"`{case.case_id}`",
            f"`{command_text(case)}`",
            f"`{folder_text(case, run.of(case.case_id))}`",
            variables_text(case) or NONE,
        )
        for case in (s.case for s in summaries)
        if case.program
    ]
    if not rows:
        return None
    return Table(columns=("case", "command", "in", "sets"), rows=tuple(rows))


# --- where the step goes -----------------------------------------------------------------


def _step_sentence(b: Breakdown) -> str:
    """the GPU waits for the host in 83 % of the step (busy 12 ms of 71 ms), 64 % of that before
    kernels of nsa.select; the host is meanwhile most often in nsa/selected.py:120 gather (41 %)

    Without a GPU: 56 % of the host's time is in nsa.select; most often in ...
    """
    named = _largest(b.host_by_range if b.launch_gap is None else b.gap_by_range)
    frame = _frame(b, named)
    parts = []
    if b.launch_gap is not None:
        text = (
            f"the GPU waits for the host in {units.percent(b.launch_gap)} of the step "
            f"(busy {units.duration(b.device_busy_s or 0.0)} of {units.duration(b.step_s)})"
        )
        if named:
            text += f", {units.percent(named[1])} of that before kernels of {named[0]}"
        parts.append(text)
        frame = frame and f"the host is meanwhile most often in {frame}"
    else:
        if named:
            parts.append(f"{units.percent(named[1])} of the host's time is in {named[0]}")
        frame = frame and f"most often in {frame}"
    return "; ".join(filter(None, (*parts, frame)))


def _largest(shares: Mapping[str, float]) -> tuple[str, float] | None:
    """The range with the largest share; None if no range has a large one."""
    named = [(name, share) for name, share in shares.items() if name and share >= LARGE]
    return max(named, key=lambda pair: pair[1], default=None)


def _frame(b: Breakdown, named: tuple[str, float] | None) -> str:
    """The function seen most often, within that range if possible; empty without frames."""
    inside = [f for f in b.frames if named and f.where == named[0]]
    return next((f"`{f.function}` ({units.percent(f.share)})" for f in inside or b.frames), "")


def _parts(longest: Sequence[_Profiled]) -> Table | None:
    on_device = any(p.breakdown.launch_gap is not None for p in longest)
    rows = []
    for p in longest:
        b = p.breakdown
        gap = NONE if b.launch_gap is None else units.percent(b.launch_gap)
        named = _largest(b.gap_by_range if on_device else b.host_by_range)
        uses = p.profile.kernels if on_device else p.profile.operators
        total = sum(u.time_s for u in uses)
        rows.append(
            (
                f"`{p.case_id}`",
                *([gap] if on_device else []),
                f"{named[0]} {units.percent(named[1])}" if named else NONE,
                _frame(b, named) or NONE,
                ", ".join(_use(u, total) for u in uses[:TOP]) or NONE,
            )
        )
    if not rows:
        return None
    head: tuple[str, ...] = ("case", "most of the host's time", "most often in", "operators")
    if on_device:
        head = ("case", ">GPU waits", "mostly before kernels of", "host meanwhile in", "kernels")
    return Table(columns=head, rows=tuple(rows))


def _use(use: Use, total_s: float) -> str:
    where = f" in {use.where}" if use.where else ""
    share = f" {units.percent(use.time_s / total_s)}" if total_s else ""
    return f"`{clipped(use.name, LETTERS)}`{where} ×{use.calls:g}{share}"


# --- counts ------------------------------------------------------------------------------


def _counts(
    summaries: Sequence[CaseSummary], first: Mapping[str, Measurement | None]
) -> Table | None:
    """A case a row; cases of one workload and provider with equal counts share one."""
    counted = [m.counters for m in first.values() if m and m.counters]
    shown = [
        name
        for name in COUNTERS
        if any(name in s.metrics for s in summaries)
        or any(getattr(c, name) is not None for c in counted)
    ]
    names = labels([s.case for s in summaries])
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
        table.append((f"`{head}`" if alone else f"`{head}`: {_members(members, head)}", *counts))
    return Table(columns=("cases", *(f">{_HEADS[n]}" for n in shown)), rows=tuple(table))


def _members(names: Sequence[str], head: str) -> str:
    provider = head.partition("/")[2]
    return " or ".join(" ".join(n.replace(provider, "", 1).split()) or n for n in names)


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


# --- requirements ------------------------------------------------------------------------


def _required(summaries: Sequence[CaseSummary]) -> str:
    stating = [s for s in summaries if s.case.kernels or s.case.operators]
    if not stating:
        return ""
    seen = sum(bool(s.attested) and not s.kernels_invisible for s in stating)
    operators = sum(bool(s.attested) and s.kernels_invisible for s in stating)
    broken = sum(s.outcome is Outcome.PATH_MISMATCH for s in stating)
    parts = [
        f"confirmed in {seen}" if seen else "",
        f"operators confirmed in {operators}" if operators else "",
        f"**not** met in {broken}, see Failures" if broken else "",
    ]
    unknown: dict[str, int] = {}
    for s in stating:
        if s.attested is False:
            unknown[s.unattested] = unknown.get(s.unattested, 0) + 1
    parts += [f"not checked in {n}: {why}" for why, n in unknown.items()]
    if invisible := sum(s.kernels_invisible for s in stating):
        parts.append(f"kernels not checked in {invisible}: no GPU")
    required = f"The suite requires kernels or operators in {plural('case', len(stating))}"
    return f"{required}: {'; '.join(filter(None, parts))}."
