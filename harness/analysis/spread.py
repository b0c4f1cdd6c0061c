"""How far readings lie apart: within one process, and from one process to the next.

The first says how long a process must sample; the second how many processes a comparison needs,
and no number of samples replaces them. Run the same code in twelve processes (an A/A study), and
the table of this module is its answer.

Source: Kalibera & Jones, "Rigorous benchmarking in reasonable time", ISMM 2013, section 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.records import Measurement, Outcome, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of one case, over its processes that ended ok and are evidence."""

    case_id: str
    processes: int
    samples: int
    """Kept, over all processes."""
    between: float | None
    """Coefficient of variation of the processes' medians; None of fewer than two."""
    within: float
    """Interquartile range over median inside a process; the median over processes."""
    widest: float
    """The same, of the process where it is largest."""
    unsteady: int
    """Processes in which no steady state was found."""
    discarded: int
    """Samples discarded, over all processes that ended ok."""


def spreads(run: Run) -> tuple[Spread, ...]:
    """One a case that has a number, in the order of the suite."""
    found = []
    for case in run.suite.cases:
        ok = [m for m in run.of(case.case_id) if m.outcome is Outcome.OK]
        evidence = [m for m in ok if m.is_evidence(case.settings.min_samples)]
        if evidence:
            found.append(_spread(case.case_id, ok, evidence))
    return tuple(found)


def _spread(case_id: str, ok: Sequence[Measurement], evidence: Sequence[Measurement]) -> Spread:
    quartiles = np.asarray([np.quantile(m.kept_s, (0.25, 0.5, 0.75)) for m in evidence])
    medians = quartiles[:, 1]
    within = (quartiles[:, 2] - quartiles[:, 0]) / medians
    between = float(medians.std(ddof=1) / medians.mean()) if len(medians) > 1 else None
    return Spread(
        case_id=case_id,
        processes=len(evidence),
        samples=sum(len(m.kept_s) for m in evidence),
        between=between,
        within=float(np.median(within)),
        widest=float(within.max()),
        unsteady=sum(m.steady is False for m in evidence),
        discarded=sum(len(m.samples_s) - len(m.kept_s) for m in ok),
    )
