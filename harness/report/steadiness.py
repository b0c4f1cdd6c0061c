"""How far to trust the numbers of a run, and how its training runs went over their steps."""

from collections.abc import Mapping, Sequence

from harness import units
from harness.analysis.overhead import LEAKS_BYTES, Course, course, loss_difference
from harness.analysis.summary import Spread
from harness.records import CaseSummary, Peaks, Run
from harness.report.tables import NONE, Table
from harness.report.text import plural

MAX_STEPS = 3
"""Slow steps that a row names."""
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
    """One row a training run; None without one.

    Args:
        names: Case id -> its short name.
    """
    found = [(c, went) for c in run.suite.cases if (went := course(run.of(c.case_id)))]
    if not found:
        return None
    rows, against = [], dict[str, str]()
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
        rows.append(
            (
                names[case.case_id],
                f"{went.steps:,}",
                *(_from_to(went, name) for name in ("loss", "bits_per_byte")),
                difference,
                f"{' → '.join(tokens)} ({went.trend})" if tokens else NONE,
                f"leak: {growth}" if went.leaked else growth,
                ", ".join(f"{n} ({units.factor(x)})" for n, x in [*went.slow.items()][:MAX_STEPS])
                or NONE,
                ", ".join(f"{what} at {n}" for what, n in went.not_finite.items()) or NONE,
            )
        )
    heads = ("case", ">steps", ">loss", ">bits per byte", ">loss at equal steps", ">tokens/s")
    remarks = (
        "Loss and bits per byte: the first step, and the mean of the last tenth. Loss at equal "
        "steps: the mean difference from the first case of the workload in the last quarter; the "
        "same if it is surely within 1 %, or within what the processes of one case differ. "
        "Tokens/s: the first and the last quarter after the start; steady if it surely "
        "changes by less than 5 %. Slow steps take three times as long as those around them, and "
        "50 ms more.",
    )
    columns = (*heads, ">memory", ">slow steps", "first NaN or Inf")
    return Table(columns=columns, rows=tuple(rows), remarks=remarks)


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
        ended = f"Passed; {plural('check', unknown)} had no answer on this machine"
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
    return ", ".join(parts)
