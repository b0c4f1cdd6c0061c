"""The measuring processes and stored runs that pytest's tests of a suite share.

All processes of a pytest run, including pytest-xdist's workers, share a folder with a lock, so that
only one measures at a time, and a note for each suite that names its run. The main process finishes
those runs at the end and judges each by all rules of its suite.
"""

import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from harness.analysis import scaling, summary
from harness.analysis import verdict as rules
from harness.machine import environment
from harness.machine.gpu_idle import mismatch
from harness.records import (
    Case,
    CaseSummary,
    Decision,
    Environment,
    Evidence,
    Measurement,
    Outcome,
    Run,
    Suite,
    Verdict,
    gpu_matches,
)
from harness.report.verdict_text import requirement_text, rule_sentence, verdict_sentence
from harness.runner import rig as machine
from harness.runner.launcher import Launcher
from harness.runner.rig import Rig
from harness.runner.run import RunObserver, run_suite, settled
from harness.store import reader as store
from harness.store.writer import create, join
from harness.suite.load import shipped_roots

LOG_LINES = 20
"""Of a failed process's log, in the failure's text."""
LOG_BYTES = 2**16
_LOCK = "measuring.lock"


class CaseFailed(Exception):
    """A case failed; pytest shows only the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Result of the test of a case."""

    failure: str = ""
    """Why it fails, or empty."""
    expected: str = ""
    """The suite's reason for an outcome that it allows, or empty."""
    properties: tuple[tuple[str, object], ...] = ()
    """For JUnit: outcome, metrics, run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """Result of the run of one suite."""

    suite: str
    good: bool
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where all cases of a suite are measured."""

    environment: Environment
    folder: Path


class Session:
    """Measures cases in this process, one at a time across all processes of the pytest run."""

    def __init__(
        self, *, store: Path, shared: Path, wait_for_gpu_s: float, command: Sequence[str]
    ) -> None:
        self._store = store
        self._shared = shared
        self._wait_for_gpu_s = wait_for_gpu_s
        self._command = tuple(command)
        self._launchers: dict[tuple[bool, bool], Launcher] = {}  # suite: for a CPU, shipped
        self._places: dict[str, _Place] = {}

    def close(self) -> None:
        """End the forkservers."""
        for launcher in self._launchers.values():
            launcher.close()

    def _launcher(self, suite: Suite) -> Launcher:
        kind = suite.device == "cpu", bool(shipped_roots(suite))
        if kind not in self._launchers:
            self._launchers[kind] = Launcher.of(suite)
        return self._launchers[kind]

    def measure(self, suite: Suite, case: Case, selected: Sequence[Case]) -> CaseResult:
        """Run all processes of one case, store the measurements, and judge them.

        Args:
            suite: The whole suite.
            case: The case to measure.
            selected: All of its cases that this pytest run selected.

        Raises:
            HarnessError: The case cannot be measured here, or not be stored.
        """
        alone, recorder = replace(suite, cases=(case,)), _Recorder()
        rig = Rig(suite.device, wait_s=self._wait_for_gpu_s, say=warnings.warn)
        with _turn(self._shared), rig:
            place = self._place(suite, replace(suite, cases=tuple(selected)), rig)
            self._launcher(suite).preflight(alone)
            rig.observe(place.environment)
            with join(place.folder) as writer:
                run_suite(
                    alone,
                    writer=writer,
                    probes=rig.probes,
                    observer=recorder,
                    launcher=self._launcher(suite),
                    gpu=rig.gpu,
                    unfit=mismatch(suite.requires, place.environment),
                )
        recorded = Run(
            run_id=place.folder.name,
            folder=str(place.folder),
            suite=alone,
            environment=place.environment,
            measurements=tuple(recorder.measurements),
        )
        return judge(recorded)

    def _place(self, suite: Suite, selected: Suite, rig: Rig) -> _Place:
        """Lock the GPU of the suite, and create its run unless another process has."""
        if (known := self._places.get(suite.path)) is not None:
            rig.hold(known.environment.gpu)
            rig.measures(known.folder.name)
            return known
        here = rig.describe(
            self._launcher(suite),
            command=self._command,
            repository=environment.home_of(suite.cases[0].factory, shipped_roots(suite)),
            cases=selected.cases,
        )
        machine.require_gpu(suite, here, "Leave out its file, or run pytest on a GPU node.")
        note = self._shared / f"{hashlib.sha256(suite.path.encode()).hexdigest()}.json"
        if note.exists():
            folder = Path(json.loads(note.read_text())["folder"])
        else:
            with create(self._store, selected, here) as writer:
                folder = writer.folder.resolve()
            whole = len(suite.cases)
            note.write_text(json.dumps({"folder": str(folder), "cases_of_suite": whole}))
        rig.measures(folder.name)
        place = self._places[suite.path] = _Place(here, folder)
        return place


@contextmanager
def _turn(shared: Path) -> Iterator[None]:
    """Measure alone among the processes of this pytest run."""
    fd = os.open(shared / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class _Recorder(RunObserver):
    """Keeps the measurements of a run."""

    def __init__(self) -> None:
        self.measurements: list[Measurement] = []

    def finished(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)


# --- one case ----------------------------------------------------------------------------


def judge(run: Run) -> CaseResult:
    """Judge a run of one case by its outcome and by the rules that apply to each case on this GPU.

    Rules for the best case and for scaling over an axis need the other cases: see `conclude`.
    """
    (seen,) = summary.summarise(run)
    properties = (
        ("outcome", str(seen.outcome or "not run")),
        *((name, estimate.value) for name, estimate in seen.metrics.items()),
        ("run", run.run_id),
    )
    if seen.outcome is not None and seen.outcome in seen.case.allow:
        reason = f"{seen.outcome} is allowed: {seen.case.allow[seen.outcome]}"
        return CaseResult(expected=reason, properties=properties)
    device = run.environment.device_name
    stated = tuple(
        rule
        for rule in run.suite.rules
        if rule.quantifier == "all"
        and rule.metric != "scaling_exponent"
        and rule.match.accepts(seen.case)
        and gpu_matches(rule.gpu, device)
    )
    verdict = rules.judge(replace(run.suite, rules=stated), run.environment, [seen], ())
    if verdict.decision is Decision.GO:
        return CaseResult(properties=properties)
    return CaseResult(failure=failure_text(run, seen, verdict), properties=properties)


def failure_text(run: Run, seen: CaseSummary, verdict: Verdict) -> str:
    """Outcome, detail, rules, evidence and end of the log of a failed case."""
    ran = verdict.decision if seen.outcome is Outcome.OK else seen.outcome
    lines = [f"{seen.case.case_id}: {ran or 'did not run'}"]
    if seen.detail:
        lines += ["", seen.detail.rstrip()]
    broken = [r for r in verdict.rules if r.applies and r.decision is not Decision.GO]
    if seen.outcome is Outcome.OK:
        lines += ["", *(f"{r.decision} by {r.rule}: {rule_sentence(r)}" for r in broken)]
        lines += [f"  required: {requirement_text(r)}" for r in broken]
    bad = next((m for m in run.measurements if m.outcome is not Outcome.OK), None)
    if bad is not None:
        lines += ["", f"process {bad.process}, evidence in {run.folder}:"]
        lines += [f"  {line}" for line in _evidence(run, seen, bad.evidence or Evidence())]
        if tail := log_tail(Path(run.folder, bad.log)):
            lines += ["", f"end of {bad.log}:", *(f"  {line}" for line in tail)]
    lines += ["", f"run: {run.folder}"]
    return "\n".join(lines)


def _evidence(run: Run, seen: CaseSummary, bad: Evidence) -> Iterator[str]:
    """As in the failures of a report."""
    from harness.report.failures import failures  # imports matplotlib, which is slow

    for failure in failures([seen], run):
        yield from failure.facts
        yield from (f"{f.name}: {f.path or f'none ({f.note})'}" for f in bad.files)
        if failure.command:
            yield f"reproduce: {failure.command}"


def log_tail(path: Path) -> list[str]:
    """The last lines of a log, without control characters."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        text = file.read().decode(errors="replace")
    shown = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    return shown.rstrip().splitlines()[-LOG_LINES:]


# --- all of them -------------------------------------------------------------------------


def conclude(shared: Path) -> tuple[SuiteResult, ...]:
    """Finish and judge every complete run of this pytest run."""
    return tuple(
        _conclude(**json.loads(note.read_text())) for note in sorted(shared.glob("*.json"))
    )


def _conclude(folder: str, cases_of_suite: int) -> SuiteResult:
    path = Path(folder)
    recorded = store.load(path.parent, path)
    suite = recorded.suite
    planned = {(c.case_id, p) for c in suite.cases for p in range(c.settings.processes)}
    left = planned - settled(suite, recorded.measurements)
    if left:
        text = f"{len(left)} processes were not run; to resume: harness run --resume {folder}"
        return SuiteResult(suite=suite.path, good=False, lines=(text,))
    with join(path) as writer:
        writer.finish()
    if len(suite.cases) < cases_of_suite:
        text = (
            f"no verdict on the suite: {len(suite.cases)} of {cases_of_suite} cases were selected"
        )
        return SuiteResult(suite=suite.path, good=True, lines=(text, f"run: {folder}"))
    cases = summary.summarise(recorded)
    verdict = rules.judge(suite, recorded.environment, cases, scaling.fit(cases))
    return SuiteResult(
        suite=suite.path,
        good=verdict.decision is Decision.GO,
        lines=(
            f"verdict: {verdict.decision}: {verdict_sentence(verdict)}",
            f"run: {folder}",
        ),
    )
