"""What tests of faults share: a faulty case among good ones, and its evidence."""

import time
from dataclasses import replace
from pathlib import Path

from harness.records import Case, Evidence, Measurement, Outcome
from harness.runner.launcher import Launcher
from harness.tests import workers
from harness.tests.workers import QUICK, Counter, Quiet, descendants
from harness.tests.workers import make_case as make_good

LONG_ENOUGH = replace(QUICK, min_samples=10)
"""For a fault in a later step to be reached."""
PATIENT = replace(LONG_ENOUGH, timeout_s=1e9)
"""For a case that a LeapingClock judges."""
LEAP_S = 3600.0


class LeapingClock(Quiet):
    """In place of the module `time`: real time, until a workload has made the file `mark`. Then
    every look comes an hour after the one before it, so that the silence is judged at once, and
    not before the mark. As the run's observer it goes back to real time for the next process."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        now = time.monotonic() + self._ahead_s
        if self.mark.exists():  # from the next look on: what was said before it is then heard
            self._ahead_s += LEAP_S
        return now

    def finished(self, measurement: Measurement) -> None:
        self.mark.unlink(missing_ok=True)
        self._ahead_s = 0.0


def make_case(fake: str, **changes: object) -> Case:
    case = make_good(fake, axes={"head_dim": 7, **changes.pop("axes", {})})  # type: ignore[dict-item]
    changes.setdefault("settings", LONG_ENOUGH)
    return replace(case, factory=f"harness.tests.fault_workloads:{fake}", **changes)  # type: ignore[arg-type]


def run(
    warm: Launcher, folder: Path, *cases: Case, observer: Quiet | None = None
) -> list[Measurement]:
    """All cases, then a good one, which must run whatever came before."""
    good = replace(make_case("good"), case_id="following")
    *found, following = workers.run(
        warm, folder, *cases, good, probes=[Counter()], observer=observer
    )
    assert following.outcome is Outcome.OK
    assert descendants() == []
    return found


def evidence_of(m: Measurement) -> Evidence:
    assert m.evidence is not None
    return m.evidence
