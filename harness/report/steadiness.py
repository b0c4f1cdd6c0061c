"""How far the numbers of a run can be trusted: spread, discards, the instrument's proof."""

from collections.abc import Sequence

from harness import units
from harness.analysis.summary import Spread
from harness.records import CaseSummary, Peaks, Run
from harness.report.tables import NONE, Table

_ANSWERS = {True: "holds", False: "FAILED", None: "not known"}


def table(found: Sequence[Spread], summaries: Sequence[CaseSummary]) -> Table | None:
    """One row a case: spread between and within its processes, and what was left out."""
    if not found:
        return None
    floors = {s.case.case_id: s for s in summaries}
    known = any(floors[s.case_id].floor_s for s in found)
    rows = [
        (
            f"`{s.case_id}`",
            str(s.processes),
            str(s.samples),
            str(s.discarded) if s.discarded else NONE,
            NONE if s.between is None else units.percent(s.between),
            f"{units.percent(s.within)} ({units.percent(s.widest)})",
            "yes" if not s.unsteady else f"not in {s.unsteady} of {s.processes}",
            *((_floor(floors[s.case_id]),) if known else ()),
        )
        for s in found
    ]
    return Table(
        columns=(
            "case",
            ">processes",
            ">samples",
            ">discarded",
            ">between",
            ">within",
            "steady",
            *((">floor",) if known else ()),
        ),
        rows=tuple(rows),
    )


def proof(run: Run) -> str:
    """How the instrument's proof ended, and what the machine was measured to reach."""
    found = run.proof
    if found is None:
        return (
            "The instrument's proof is not in the record: the run is older than it, or unfinished."
        )
    if found.skipped:
        return f"The instrument was not put to the proof ({found.skipped}): no floor is known."
    unknown = sum(check.holds is None for check in found.checks)
    if found.refuted:
        ended = "did not prove itself, and nothing was measured with it"
    elif unknown:
        ended = f"proved itself, as far as it could be asked ({unknown} unknown)"
    else:
        ended = "proved itself"
    peaks = _peaks(found.peaks)
    return (
        f"The instrument {ended}: {units.utc(found.at)}, {found.device}, "
        f"{units.duration(found.wall_s)}."
        + (f" Measured then: {peaks}. Floors rest on these." if peaks else "")
    )


def proof_checks(run: Run) -> Table | None:
    """Each question with its answer; None where none was asked."""
    if run.proof is None or not run.proof.checks:
        return None
    rows = [(c.name.replace("_", " "), _ANSWERS[c.holds], c.fact) for c in run.proof.checks]
    return Table(columns=("what", "answer", "seen"), rows=tuple(rows))


def _floor(summary: CaseSummary) -> str:
    if summary.floor_s is None:
        return NONE
    return f"{units.duration(summary.floor_s)} ({summary.floor_by})"


def _peaks(peaks: Peaks) -> str:
    parts = [
        f"{units.number(flops / 1e9)} GFLOP/s {precision}"
        for precision, flops in peaks.flops_per_s.items()
    ]
    if peaks.bytes_per_s is not None:
        parts.append(f"{units.number(peaks.bytes_per_s / 1e9)} GB/s")
    if peaks.launch_s is not None:
        parts.append(f"{units.duration(peaks.launch_s)} a launch")
    return ", ".join(parts)
