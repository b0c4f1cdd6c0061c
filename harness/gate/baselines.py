"""Stored baselines: the times of a run on one GPU, with where and of what they were taken."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import StoreError
from harness.gate import files
from harness.gate.unpaired import Process
from harness.machine import drift
from harness.records import Case, Environment, Measurement, Outcome, Run
from harness.runner.interleave import clock, usable

EXPECTED = ("commit", "uncommitted changes", "host")
"""What may differ: the code is what is compared, and a runner in a container has a new name each
time. A CPU goes by its host's name anyway."""
FEWEST = 2
"""Processes of a case without which nothing can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProcess:
    """One fresh process of a baseline."""

    samples_s: tuple[float, ...]
    hz: float | None = None
    wall_s: float | None = None

    def __post_init__(self) -> None:
        if not self.samples_s or not all(math.isfinite(s) and s > 0 for s in self.samples_s):
            raise ValueError("a sample is not a positive, finite time, or there is none")

    @property
    def process(self) -> Process:
        step_s = statistics.median(self.samples_s)
        return Process(step_s=step_s, hz=self.hz, wall_s=self.wall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What one run measured on one device, and where it stood."""

    suite: str
    suite_sha256: str
    device: str
    """GPU UUID; see files.device_id."""
    commit: str
    run_id: str
    measured_at: str
    """ISO 8601, UTC: when the run began."""
    set_at: str
    environment: Environment
    cases: Mapping[str, tuple[StoredProcess, ...]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Case -> the outcome that the suite allows it."""
    asked: Mapping[str, Case] = field(default_factory=dict)
    """What each case was then."""

    def __post_init__(self) -> None:
        files.moment(self.measured_at)

    def processes(self, case_id: str) -> tuple[Process, ...]:
        return tuple(p.process for p in self.cases.get(case_id, ()))


def processes(measured: Sequence[Measurement], case: Case) -> tuple[Process, ...]:
    """Today's processes of a case, as a stored baseline compares them; unsteady ones left out."""
    return tuple(
        _stored(m).process for m in measured if m.outcome is Outcome.OK and usable(m, case)
    )


def changed(baseline: Baseline, case: Case) -> str:
    """Why a case of the same id is not the one that was measured; empty where it is."""
    make = _make(baseline.suite)
    then = baseline.asked.get(case.case_id)
    if then is None:
        return f"the baseline does not say what the case was; {make}"
    for name, (a, b) in drift.measured(then, case).items():
        return f"the case is another than the baseline's: {name} was {a}, and is {b}; {make}"
    return ""


def case_ids(folder: Path, suite: str) -> frozenset[str]:
    """All cases of a suite that any device has a baseline of.

    Raises:
        StoreError: A file is damaged.
    """
    name = files.path_of(folder, "any", suite).name
    found = (files.read(path, Baseline, _renew(suite)) for path in sorted(folder.glob(f"*/{name}")))
    return frozenset(case_id for b in found if b for case_id in b.cases)


def of_run(run: Run) -> Baseline:
    """The baseline that a run makes.

    Raises:
        StoreError: The run is not good enough to hold anything against.
    """
    git = run.environment.git
    problem = ""
    if not run.ended_at:
        problem = "it is unfinished"
    elif git is None:
        problem = "its code was in no git repository, so nobody could find it again"
    elif git.dirty_sha256:
        problem = "its code had uncommitted changes, so nobody could find it again"
    left_out: dict[str, str] = {}
    for case in run.suite.cases:
        measured = run.of(case.case_id)
        bad = next((m for m in measured if m.outcome is not Outcome.OK), None)
        if bad is not None and bad.outcome in case.allow:
            left_out[case.case_id] = str(bad.outcome)
        elif bad is not None:
            problem = problem or f"{case.case_id} ended {bad.outcome}"
        elif len(measured) < FEWEST:
            problem = problem or f"{case.case_id} has {len(measured)} processes; two are the least"
        elif unsteady := [m.process for m in measured if not usable(m, case)]:
            problem = (
                problem
                or f"{case.case_id} is not steady, or was disturbed, in process {unsteady[0]}"
            )
    if problem or git is None:
        raise StoreError(
            f"run {run.run_id} makes no baseline: {problem}",
            f"Make one that does: {'commit, then ' if git and git.dirty_sha256 else ''}"
            f"harness run {run.suite.path}",
        )
    return Baseline(
        suite=run.suite.path,
        suite_sha256=run.suite.sha256,
        device=files.device_id(run.environment),
        commit=git.commit,
        run_id=run.run_id,
        measured_at=run.started_at,
        set_at=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=run.environment,
        cases={
            c.case_id: tuple(_stored(m) for m in run.of(c.case_id))
            for c in run.suite.cases
            if c.case_id not in left_out
        },
        left_out=left_out,
        asked={c.case_id: c for c in run.suite.cases},
    )


def load(folder: Path, device: str, suite: str) -> Baseline | None:
    """The baseline of a device and a suite; None where there is none.

    Raises:
        StoreError: The file is damaged.
    """
    return files.read(files.path_of(folder, device, suite), Baseline, _renew(suite))


def unfit(baseline: Baseline | None, suite: str, here: Environment, max_age_days: int) -> str:
    """Why a baseline says nothing about numbers taken here and now; empty where it does."""
    device = files.device_id(here)
    make = _make(suite)
    if baseline is None:
        return f"no baseline of {suite} on {here.device_name} ({device}); {make}"
    if baseline.device != device:
        return f"the baseline is of another device ({baseline.device}); {make}"
    if problem := files.out_of_date(baseline.measured_at, max_age_days):
        return f"the baseline {problem}; {make}"
    found = drift.differences(baseline.environment, here)
    other = [str(d) for d in found if d.name not in EXPECTED]
    return f"the baseline is of another environment ({other[0]}); {make}" if other else ""


def _make(suite: str) -> str:
    return f"make one: harness run {suite}, then harness baseline set latest"


def _renew(suite: str) -> str:
    return f"Renew it: harness run {suite}, then harness baseline set latest."


def _stored(m: Measurement) -> StoredProcess:
    return StoredProcess(samples_s=m.kept_s, hz=clock(m), wall_s=m.wall_s or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case in a baseline and in a run; None where it is absent."""

    case_id: str
    baseline_s: float | None
    run_s: float | None


def compared(baseline: Baseline, run: Run) -> tuple[Row, ...]:
    """Step times side by side: medians over processes of their medians."""
    today = {c.case_id: processes(run.of(c.case_id), c) for c in run.suite.cases}
    return tuple(
        Row(
            case_id=case_id,
            baseline_s=_median(baseline.processes(case_id)),
            run_s=_median(today.get(case_id, ())),
        )
        for case_id in dict.fromkeys((*baseline.cases, *today))
    )


def _median(found: Sequence[Process]) -> float | None:
    return statistics.median(p.step_s for p in found) if found else None
