"""Stored baselines: the step times of one run on one GPU, with its environment and cases."""

import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import StoreError
from harness.gate import files
from harness.gate.files import Moment
from harness.gate.unpaired import FEWEST, Process
from harness.machine import drift
from harness.records import Case, Environment, Measurement, Outcome, Run
from harness.runner.interleave import clock, usable
from harness.store.writer import now

EXPECTED = ("commit", "uncommitted changes", "host", *drift.SEARCH)
"""Differences that are allowed: the code under test, where this Python and the checkout are, and
the name of a container. A CPU is identified by its host name in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What one run measured on one device."""

    suite: str
    suite_sha256: str
    device: str
    """GPU UUID; see files.device_id."""
    commit: str
    run_id: str
    measured_at: Moment
    """Start of the run, ISO 8601, UTC."""
    set_at: str
    environment: Environment
    cases: Mapping[str, tuple[Process, ...]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Case -> its outcome, which the suite allows."""
    asked: Mapping[str, Case] = field(default_factory=dict)
    """Case id -> the case that was measured."""


def processes(measured: Sequence[Measurement], case: Case) -> tuple[Process, ...]:
    """The steady processes of a case."""
    return tuple(_process(m) for m in measured if usable(m, case))


def changed(baseline: Baseline, case: Case) -> str:
    """Why a case is not the one of the same id in the baseline, or an empty string."""
    stored = baseline.asked.get(case.case_id)
    why = differs(stored, case) if stored else "the baseline does not define this case"
    return f"{why}; {_make(baseline.suite)}" if why else ""


def differs(baseline: Case, candidate: Case) -> str:
    """Why two cases of one id are not the same: axes, code, or how samples are taken."""
    for name, (a, b) in drift.measured(baseline, candidate).items():
        return f"the case has changed: {name} is {a} in the baseline, {b} in the candidate"
    return ""


def of_run(run: Run) -> Baseline:
    """Make a baseline of a run.

    Raises:
        StoreError: The run is unfinished, failed, unsteady, or its code is not committed.
    """
    git = run.environment.git
    left_out = {
        c.case_id: str(bad[0])
        for c in run.suite.cases
        if (bad := _bad(run.of(c.case_id))) and all(outcome in c.allow for outcome in bad)
    }
    problem = next(_problems(run, left_out), "")
    if problem or git is None:
        raise StoreError(
            f"run {run.run_id} cannot be a baseline: {problem}",
            f"{'Commit, then measure' if git and git.dirty_sha256 else 'Measure'} again: "
            f"harness run {run.suite.path}",
        )
    return Baseline(
        suite=run.suite.path,
        suite_sha256=run.suite.sha256,
        device=files.device_id(run.environment),
        commit=git.commit,
        run_id=run.run_id,
        measured_at=run.started_at,
        set_at=now(),
        environment=run.environment,
        cases={
            c.case_id: tuple(_process(m) for m in run.of(c.case_id))
            for c in run.suite.cases
            if c.case_id not in left_out
        },
        left_out=left_out,
        asked={c.case_id: c for c in run.suite.cases},
    )


def _problems(run: Run, left_out: Container[str]) -> Iterator[str]:
    """Why a run cannot be a baseline."""
    git = run.environment.git
    if not run.ended_at:
        yield "it is unfinished"
    if git is None:
        yield "its code was not in a git repository"
    elif git.dirty_sha256:
        yield "its code had uncommitted changes"
    for case in run.suite.cases:
        measured = run.of(case.case_id)
        if case.case_id in left_out:
            continue
        if bad := [outcome for outcome in _bad(measured) if outcome not in case.allow]:
            yield f"{case.case_id} ended {bad[0]}"
        if len(measured) < FEWEST:
            yield f"{case.case_id} has {len(measured)} processes; {FEWEST} are needed"
        if unsteady := [m.process for m in measured if not usable(m, case)]:
            yield f"{case.case_id} was not steady, or was disturbed, in process {unsteady[0]}"


def _bad(measured: Sequence[Measurement]) -> list[Outcome]:
    return [m.outcome for m in measured if m.outcome is not Outcome.OK]


def load(folder: Path, device: str, suite: str) -> Baseline | None:
    """The baseline of a device and a suite, or None.

    Raises:
        StoreError: The file is damaged.
    """
    return files.read(
        files.path_of(folder, device, suite), Baseline, f"To replace it, {_make(suite)}."
    )


def unfit(baseline: Baseline | None, suite: str, here: Environment, max_age_days: int) -> str:
    """Why a baseline cannot be compared with measurements made here, or an empty string."""
    device = files.device_id(here)
    make = _make(suite)
    if baseline is None:
        return f"no baseline of {suite} on {here.device_name} ({device}); {make}"
    if problem := files.out_of_date(baseline.measured_at, max_age_days):
        return f"the baseline {problem}; {make}"
    found = drift.differences(baseline.environment, here)
    other = [str(d) for d in found if d.name not in EXPECTED]
    return f"the baseline has another environment ({other[0]}); {make}" if other else ""


def _make(suite: str) -> str:
    return f"make one: harness run {suite}, then harness baseline set latest"


def _process(m: Measurement) -> Process:
    return Process(samples_s=m.kept_s, hz=clock(m), wall_s=m.wall_s or None)


def compared(baseline: Baseline, run: Run) -> Mapping[str, tuple[float | None, float | None]]:
    """Case id -> its step time in the baseline and in the run, each the median over processes of
    their medians; None if it has none there."""
    measured = {c.case_id: processes(run.of(c.case_id), c) for c in run.suite.cases}
    return {
        i: (_median(baseline.cases.get(i, ())), _median(measured.get(i, ())))
        for i in (*baseline.cases, *measured)
    }


def _median(found: Sequence[Process]) -> float | None:
    return statistics.median(p.step_s for p in found) if found else None
