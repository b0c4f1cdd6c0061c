"""How far to trust the numbers of a run, and how its training runs went over their steps."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from harness import units
from harness.analysis.causes import Cause, CauseKind
from harness.analysis.over_steps import LEAKS_BYTES, Course, course, loss_difference
from harness.analysis.recorded import TIMED, largest_error, readings
from harness.analysis.summary import Spread
from harness.machine import doctor, requirements
from harness.records import CaseSummary, Grade, Measurement, Outcome, Peaks, Run, Verdict
from harness.report.tables import NONE, Table
from harness.report.text import case_names, listed

MAX_STEPS, MAX_ROWS = 3, 8
"""Slow steps that a row names; rows of the table of correctness."""
LOOSE = 1.3
"""Slowest process of a case over its fastest from which its number is not repeatable."""
_RESULTS = {True: "ok", False: "FAILED", None: "unknown"}


def table(found: Sequence[Spread], summaries: Sequence[CaseSummary]) -> Table | None:
    """One row a case: spread between and within its processes, discarded samples, roofline."""
    if not found:
        return None
    by_id = {s.case.case_id: s for s in summaries}
    columns = ["case", ">processes", ">samples", ">discarded", ">between", ">within", "steady"]
    if bounded := any(by_id[s.case_id].roofline_s for s in found):
        columns.append(">roofline bound")
    rows = [
        (
            f"`{s.case_id}`",
            str(s.processes),
            str(s.samples),
            str(s.discarded) if s.discarded else NONE,
            NONE if s.between is None else units.percent(s.between),
            f"{units.percent(s.within)} ({units.percent(s.widest)})",
            f"not in {s.unsteady} of {s.processes}" if s.unsteady else "yes",
            *((_bound(by_id[s.case_id]),) if bounded else ()),
        )
        for s in found
    ]
    return Table(columns=tuple(columns), rows=tuple(rows))


def over_steps(run: Run, names: Mapping[str, str]) -> Table | None:
    """One row a training run, or several that went alike; None without one.

    Args:
        names: Case id -> its short name.
    """
    found = [(c, went) for c in run.suite.cases if (went := course(run.of(c.case_id)))]
    if not found:
        return None
    rows, against = dict[tuple[str, ...], list[str]](), dict[str, str]()
    for case, went in found:
        difference = NONE
        if (first := against.setdefault(case.workload, case.case_id)) != case.case_id:
            compared = loss_difference(run.of(case.case_id), run.of(first))
            if compared:
                difference = f"{units.change(1 + compared[0].value)} ({compared[1]})"
        tokens = [units.plain("tokens_per_s", v, 3) for v in went.speed or ()]
        growth = NONE
        if went.growth:
            flat = abs(went.growth.value) * went.steps < LEAKS_BYTES
            growth = "flat" if flat else f"{units.size(went.growth.value)} a step"
        slow = [*went.slow.items()][:MAX_STEPS]
        cells = (
            f"{went.steps:,}",
            *(_from_to(went, name) for name in ("loss", "bits_per_byte")),
            difference,
            f"{' → '.join(tokens)} ({went.trend})" if tokens else NONE,
            f"leak: {growth}" if went.leaked else growth,
            ", ".join(f"{n} ({units.factor(x)})" for n, x in slow) or NONE,
            ", ".join(f"{what} at {n}" for what, n in went.not_finite.items()) or NONE,
        )
        rows.setdefault(cells, []).append(names[case.case_id])
    heads = ("case", ">steps", ">loss", ">bits per byte", ">loss at equal steps", ">tokens/s")
    columns = (*heads, ">memory", ">slow steps", "first NaN or Inf")
    shown = [(listed(of, 1), *cells) for cells, of in rows.items()]
    return Table(columns=columns, rows=tuple(shown))


def _from_to(went: Course, name: str) -> str:
    if name not in went.last:
        return NONE
    return f"{went.first[name]:.3f} → {went.last[name]:.3f}"


def self_test_sentence(run: Run) -> str:
    """How the self-test ended, and which peaks it measured."""
    found = run.self_test
    if found is None:
        return "Not recorded: the run predates the self-test, or is unfinished."
    if found.skipped:
        return f"Skipped ({found.skipped}), so no roofline bound is known."
    unknown = sum(check.holds is None for check in found.checks)
    if found.refuted:
        ended = "Failed, so nothing was measured"
    elif unknown:
        ended = f"Passed; {units.plural('check', unknown)} had no answer on this machine"
    else:
        ended = "Passed"
    text = f"{ended}: {units.utc(found.at)}, {found.device}, {units.duration(found.wall_s)}."
    if peaks := _peaks(found.peaks):
        text += f" Measured peaks, on which roofline bounds rest: {peaks}."
    return text


def self_test_checks(run: Run) -> Table | None:
    """Each check with its result; None without a self-test."""
    if run.self_test is None or not run.self_test.checks:
        return None
    rows = [(c.name.replace("_", " "), _RESULTS[c.holds], c.fact) for c in run.self_test.checks]
    return Table(columns=("check", "result", "measured"), rows=tuple(rows))


def _bound(summary: CaseSummary) -> str:
    if summary.roofline_s is None:
        return NONE
    return f"{units.duration(summary.roofline_s)} ({summary.roofline_by})"


def _peaks(peaks: Peaks) -> str:
    parts = [
        f"{units.number(flops / 1e9)} GFLOP/s {precision}"
        for precision, flops in peaks.flops_per_s.items()
    ]
    if peaks.bytes_per_s is not None:
        parts.append(f"{units.number(peaks.bytes_per_s / 1e9)} GB/s")
    if peaks.launch_s is not None:
        parts.append(f"{units.duration(peaks.launch_s)} a launch")
    if peaks.sync_s is not None:
        parts.append(f"{units.duration(peaks.sync_s)} a host sync")
    if peaks.host_loop_s is not None:
        parts.append(f"{units.duration(peaks.host_loop_s)} the host loop")
    return ", ".join(parts)


# --- one line for the first screen, and what was compared ---


def trust(
    run: Run,
    summaries: Sequence[CaseSummary],
    v: Verdict,
    spread: Sequence[Spread],
    found: Sequence[Cause] = (),
) -> Iterator[str]:
    """One line: processes, correctness, and what disturbed the numbers."""
    ok = [s for s in summaries if s.outcome is Outcome.OK]
    counts = sorted({e.processes for s in ok if (e := s.metrics.get("step_s"))})
    if counts:
        most = units.plural("process", counts[-1])
        yield f"{most if len(counts) == 1 else f'{counts[0]} to {most}'} a case"
    yield f"{len(ok)} of {units.plural('case', len(summaries))} ok"
    if (cards := len({t.device for t in run.self_tests})) > 1:
        yield f"on {cards} cards"
    required = requirements.checks(run.suite, run.environment)
    if lacking := sum(c.grade is not Grade.OK for c in required):
        yield f"{lacking} of {units.plural('requirement', len(required))} not met"
    done = [m for m in run.measurements if m.accuracy is not None and m.accuracy.tensors]
    asked = [r for r in v.rules if r.stated and r.applies]
    behind = {i for r in asked if r.asks or not run.suite.parts for i in r.evidence}
    if all(c.program for c in run.suite.cases):
        yield "a program has no reference: outputs are not checked"
    elif run.measurements:
        none = done and behind and not any(m.case_id in behind for m in done)
        share, _ = max(map(largest_error, done), default=(0.0, ""))
        beyond = f", largest error {units.number(share, 2)} of its bound" if share > 1 else ""
        counted = f"{len(done):,} of {units.plural('process', len(run.measurements))}"
        more = f"{beyond}{', none deciding' if none else ''}"
        yield f"{counted} compared with the reference{more}"
    loose = [s for s in ok if "step_s" not in s.apart and s.spread > LOOSE]
    for what, those in (
        ("not repeatable, so without a speed", [s for s in summaries if "step_s" in s.apart]),
        (f"processes {LOOSE:g}x or more apart", loose),
    ):
        if those:
            yield f"{what}: {_roles({s.case.case_id for s in those}, v, run)}"
    if unsteady := {x.case_id for x in spread if x.unsteady}:
        yield f"no steady state: {_roles(unsteady, v, run)}"
    clocks = (CauseKind.POWER, CauseKind.THERMAL)
    if limited := {i for c in found if c.kind in clocks for i in c.cases}:
        yield f"clock limited: {_roles(limited, v, run)}"
    if (share := _stolen(run)) > doctor.STEAL:
        yield doctor.stolen_text(share)
    if (gpu := run.environment.gpu) and (gpu.power_limit_share or 1) != 1:
        yield f"power limit {units.percent(gpu.power_limit_share or 1)} of its default"


def _stolen(run: Run) -> float:
    """Share of the CPU time wanted by the timed processes that other virtual machines took."""
    lost, used = (
        sum(x for m in run.measurements for x in readings(m, channel, TIMED))
        for channel in ("cpu_steal", "cpu_utilisation")
    )
    return lost / (lost + used) if lost else 0.0


def _roles(ids: Collection[str], v: Verdict, run: Run) -> str:
    """`1 judged, 10 baselines`: what these are to the rules, or the name of the only one; the
    others only if these are all."""
    asked = [r.stated for r in v.rules if r.stated and r.applies]
    against = {b.case_id for rule in asked for _, b in rule.pairs(run.suite.cases)}
    cases = [c for c in run.suite.cases if c.case_id in ids]
    judged = {c.case_id for c in cases if any(rule.match.accepts(c) for rule in asked)}
    theirs = against & {*ids} - judged
    if not judged | theirs:
        spared = asked and not run.suite.suspects  # these rest on such cases too
        return f"{units.plural('case', len(ids))}{' outside the rules' if spared else ''}"
    if len(judged | theirs) == 1:
        return case_names(run.suite)[min(judged | theirs)]
    parts = [f"{len(judged)} judged"] if judged else []
    return ", ".join([*parts, *([units.plural("baseline", len(theirs))] if theirs else [])])


def _sampled(compared: Sequence[Measurement]) -> str:
    """`; 6 by 90 of 8,192 to 92 of 65,536 rows`, if not all compared every row."""
    rows = [m.accuracy.sampled for m in compared if m.accuracy and m.accuracy.sampled]
    said = [f"{few:,} of {every:,}" for few, every in sorted(rows, key=lambda r: r[1])]
    ends = " to ".join(dict.fromkeys((said[0], said[-1]))) if said else ""
    return f"; {len(said)} by {ends} rows" if said else ""


def _compared(m: Measurement) -> bool:
    return m.accuracy is not None and bool(m.accuracy.tensors)


def correctness(run: Run, summaries: Sequence[CaseSummary]) -> Table | None:
    """By workload, and provider if these are few: how many processes were compared, how closely,
    and why not all."""
    if all(s.case.program for s in summaries):
        return None
    groups: dict[str, list[Measurement]] = {}
    several = len({(s.case.workload, s.case.provider) for s in summaries}) <= MAX_ROWS
    for s in summaries:
        provider = run.suite.provider(s.case.workload, s.case.provider)
        said = provider if s.case.workload in provider else f"{s.case.workload} {provider}"
        key = said if several else s.case.workload
        groups.setdefault(key, []).extend(run.of(s.case.case_id))
    whole = [name for name, measured in groups.items() if all(map(_compared, measured))]
    if whole[2:]:  # they have nothing of their own to say
        together = "all" if len(whole) == len(groups) else listed(whole)
        groups[together] = [m for name in whole for m in groups.pop(name)]
    rows = []
    for name, measured in groups.items():
        done = [m for m in measured if _compared(m)]
        share, tensor = max(map(largest_error, done), default=(0.0, ""))
        why = Counter(
            m.accuracy.skipped if m.accuracy else f"no answer ({units.outcome_name(m.outcome)})"
            for m in measured
            if m not in done
        )
        shown = why.most_common(2)
        skipped = "; ".join(f"{reason or 'not asked'}: {n}" for reason, n in shown)
        if more := why.total() - sum(n for _, n in shown):
            skipped += f"; for {units.plural('other reason', len(why) - 2)}: {more}"
        error = f"{units.number(share)} ({tensor or 'the output'})" if done else NONE
        length = sorted({int(n) for m in done if (n := m.effective.get("checked_tokens"))})
        on = f", {' or '.join(f'{n:,}' for n in length)} tokens" if length else ""
        counted = f"{len(done)} of {len(measured)}{on}{_sampled(done)}"
        rows.append((name, counted, error, skipped or NONE))
    columns = ("cases", ">processes compared", ">largest error / bound", "not compared")
    return Table(columns=columns, rows=tuple(rows)) if rows else None
