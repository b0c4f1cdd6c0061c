"""Stored baselines: the step times of one run, with its environment and cases.

One for each suite and GPU model. On another card of the model it is used too: the interval then
includes the variation between cards.
"""

import math
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import units
from harness.errors import StoreError
from harness.gate import files
from harness.gate.files import Moment
from harness.gate.noise import CARD_CV
from harness.gate.unpaired import FEWEST, Process
from harness.machine import drift, facts
from harness.records import Case, Environment, Measurement, Outcome, Run, Thresholds
from harness.runner.interleave import clock, usable
from harness.store import index
from harness.store.index import Index
from harness.store.reader import node_of
from harness.store.writer import now

EXPECTED = ("commit", "uncommitted changes", "host", *facts.SEARCH)
"""Differences that are allowed: the code under test, where this Python and the checkout are, and
the name of a container. A CPU is identified by its host name in any case."""
CARD = "GPU UUID"
"""The difference of two cards of one model: allowed, and part of the interval."""
MET_BY = 3
"""Later runs that show that a baseline is never met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What one run measured on one card."""

    suite: str
    suite_sha256: str
    device: str
    """The card's UUID; see files.device_id."""
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
    author: str = ""
    """Who set it, as git knows them."""
    correct: Mapping[str, int] | None = None
    """Case id -> processes whose output was compared with the reference, and was correct; without
    the cases that have none. None in older files."""


def processes(measured: Sequence[Measurement], case: Case) -> tuple[Process, ...]:
    """The steady processes of a case."""
    return tuple(_process(m) for m in measured if usable(m, case))


def changed(baseline: Baseline, case: Case) -> str:
    """Why a case is not the one of the same id in the baseline, or an empty string."""
    stored = baseline.asked.get(case.case_id)
    why = differs(stored, case) if stored else "the baseline does not define this case"
    return f"{why}; {renewal(baseline.suite)}" if why else ""


def differs(baseline: Case, candidate: Case) -> str:
    """Why two cases of one id are not the same: axes, code, or how samples are taken."""
    for name, (a, b) in drift.measured(baseline, candidate).items():
        return f"the case has changed: {name} is {a} in the baseline, {b} in the candidate"
    return ""


def of_run(run: Run, author: str = "") -> Baseline:
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
        author=author,
        correct={
            c.case_id: sum(bool(m.accuracy and m.accuracy.tensors) for m in run.of(c.case_id))
            for c in run.suite.cases
            if c.case_id not in left_out
            if not any(m.accuracy and m.accuracy.skipped for m in run.of(c.case_id))
        },
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


def load(folder: Path, here: Environment, suite: str) -> Baseline | None:
    """The baseline of a suite for this GPU model, or None.

    Raises:
        StoreError: The file is damaged.
    """
    path = files.path_of(folder, files.model_id(here), suite)
    return files.read(path, Baseline, f"To replace it, {renewal(suite)}.")


def of_model(folder: Path, here: Environment) -> Iterator[Baseline | StoreError]:
    """The baselines of all suites for this GPU model; of a damaged file, why it cannot be read."""
    place = files.path_of(folder, files.model_id(here), "any").parent
    for path in sorted(p for p in place.glob("*.json") if "." not in p.stem):
        try:
            found = files.read(path, Baseline, "Remove it, then: harness baseline set RUN")
            yield from [found] if found else ()
        except StoreError as error:
            yield error


def unfit(baseline: Baseline | None, suite: str, here: Environment, max_age_days: int) -> str:
    """Why a baseline cannot be compared with measurements made here, or an empty string."""
    device = files.device_id(here)
    make = renewal(suite)
    if baseline is None:
        return f"no baseline of {suite} on {here.device_name} ({device}); {make}"
    if problem := files.out_of_date(baseline.measured_at, max_age_days):
        return f"the baseline {problem}; {make}"
    found = drift.differences(baseline.environment, here)
    other = [str(d) for d in found if d.name not in (*EXPECTED, CARD)]
    return f"the baseline has another environment ({other[0]}); {make}" if other else ""


def doubts(baseline: Baseline, here: Environment, store: Path, say: index.Say) -> Iterator[str]:
    """What speaks against a baseline of this GPU model; `renewal` mends each."""
    suite, gpu = baseline.suite, baseline.environment.gpu
    if gpu and here.gpu and gpu.driver != here.gpu.driver:
        yield f"{suite}: measured with driver {gpu.driver}, and this is {here.gpu.driver}"
    old = baseline.correct is None
    counts = baseline.correct or dict.fromkeys(baseline.cases if old else (), 0)
    if unknown := [i for i, count in counts.items() if not count]:
        why = "not on record in this file" if old else "not compared with a reference"
        yield f"{suite}: correctness of {_such(unknown, baseline)} is {why}"
    if unmet := index.ask(store, lambda known: dict(_never_met(baseline, known)), say):
        best = units.change(min(unmet.values()))
        which = f"{_such(list(unmet), baseline)} since {baseline.measured_at[:10]}"
        yield f"{suite}: no later run met {which}, the best one is {best}"


def _such(cases: Sequence[str], baseline: Baseline) -> str:
    return f"{len(cases)} of {len(baseline.cases)} cases, such as {cases[0]},"


def _never_met(baseline: Baseline, known: Index) -> Iterator[tuple[str, float]]:
    """Cases that were slower in each of several later runs of committed code on this GPU model,
    with the same driver and power limit, beyond the tolerance of stored times and the variation of
    cards, with the best ratio."""
    gpu, node = baseline.environment.gpu, node_of(baseline.environment)
    model = gpu.name if gpu else baseline.environment.hostname
    digests = {case_id: index.digest_of(case) for case_id, case in baseline.asked.items()}
    two_cards = 1 + 2 * math.sqrt(2) * CARD_CV
    for case_id, measured in baseline.cases.items():
        level_s = statistics.geometric_mean(p.step_s for p in measured)
        later = [
            p.metrics["step_s"].value
            / level_s
            / (two_cards if p.device_id and p.device_id != baseline.device else 1)
            for p in known.history(case_id, metric="step_s")
            if p.started_at > baseline.measured_at
            and (p.device if p.device_id else p.host) == model
            if p.node == node and p.digest == digests.get(case_id) and not p.dirty
            if p.outcome == Outcome.OK and "step_s" in p.metrics
        ]
        if len(later) >= MET_BY and min(later) > 1 + Thresholds().stored_tolerance:
            yield case_id, min(later)


def renewal(suite: str) -> str:
    """How to make, or to replace, the baseline of a suite."""
    return f"make one: harness run {suite}, then harness baseline set latest"


def _process(m: Measurement) -> Process:
    return Process(samples_s=m.kept_s, hz=clock(m), wall_s=m.wall_s or None)
