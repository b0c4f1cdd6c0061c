"""The measuring processes and stored runs that pytest's tests of a suite share.

All processes of a pytest run, including pytest-xdist's workers, share a folder with a lock, so that
only one measures at a time, and a note for each suite that names its run. The main process finishes
those runs at the end and judges each by all rules of its suite.
"""

import fcntl
import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from harness.analysis import summary
from harness.analysis import verdict as rules
from harness.records import (
    Case,
    CaseSummary,
    Decision,
    Environment,
    Evidence,
    Outcome,
    Run,
    Suite,
    Verdict,
    gpu_matches,
)
from harness.report.markdown import plain
from harness.report.text import rest_command
from harness.report.verdict_text import requirement_text, rule_sentence, verdict_sentence
from harness.runner.launcher import Launcher
from harness.runner.rig import Rig, take
from harness.runner.run import Agenda, run_suite
from harness.runner.watchdog import RunObserver
from harness.store import reader as store
from harness.store.writer import create, join

LOG_LINES = 20
"""Of a failed process's log, in the failure's text."""


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

    rig: Rig
    launcher: Launcher
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
        self._places: dict[str, _Place] = {}
        self._held = ExitStack()

    def close(self) -> None:
        """End the forkservers."""
        self._held.close()

    def measure(self, suite: Suite, case: Case, selected: Sequence[Case]) -> CaseResult:
        """Run all processes of one case, store the measurements, and judge them.

        Args:
            suite: The whole suite.
            case: The case to measure.
            selected: All of its cases that this pytest run selected.

        Raises:
            HarnessError: The case cannot be measured here, or not be stored.
        """
        alone = replace(suite, cases=(case,))
        with (self._shared / "measuring.lock").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if suite.path not in self._places:
                self._places[suite.path] = self._open(suite, replace(suite, cases=tuple(selected)))
            place = self._places[suite.path]
            place.rig.hold(place.environment.gpu)
            place.rig.measures(place.folder.name)
            try:
                place.launcher.preflight(alone)
                with join(place.folder) as writer:
                    run_suite(
                        Agenda(alone),
                        writer=writer,
                        probes=place.rig.probes,
                        observer=RunObserver(),
                        launcher=place.launcher,
                        gpu=place.rig.gpu,
                    )
            finally:
                place.rig.hold(None)  # the next case may be another process's
        recorded = store.load(self._store, place.folder)
        return judge(replace(recorded, suite=alone, measurements=recorded.of(case.case_id)))

    def _open(self, suite: Suite, selected: Suite) -> _Place:
        """Reserve the machine for a suite, and create its run unless another process has."""
        with ExitStack() as held:
            rig, launcher, here = take(
                held,
                selected,
                command=self._command,
                wait_s=self._wait_for_gpu_s,
                say=warnings.warn,
            )
            rig.observe(here)
            note = self._shared / f"{hashlib.sha256(suite.path.encode()).hexdigest()}.json"
            if note.exists():
                folder = Path(json.loads(note.read_text())["folder"])
            else:
                with create(self._store, selected, here) as writer:
                    folder = writer.folder.resolve()
                whole = len(suite.cases)
                note.write_text(json.dumps({"folder": str(folder), "cases_of_suite": whole}))
            self._held.push(held.pop_all())
        return _Place(rig, launcher, here, folder)


# --- one case ----------------------------------------------------------------------------


def judge(run: Run) -> CaseResult:
    """Judge a run of one case by its outcome and by the rules that apply to each case on this GPU.

    Rules for the best case, for pairs and for scaling over an axis need the other cases: see
    `conclude`.
    """
    (seen,) = summary.summarise(run)
    properties = (
        ("outcome", str(seen.outcome or "not run")),
        *((name, estimate.value) for name, estimate in seen.metrics.items()),
        ("run", run.run_id),
    )
    if seen.outcome is not None and seen.outcome in seen.case.allow:
        reason = f"{seen.outcome} is allowed: {seen.case.allow[seen.outcome]}"
        return CaseResult(expected=plain(reason), properties=properties)
    device = run.environment.device_name
    stated = tuple(
        rule
        for rule in run.suite.rules
        if rule.quantifier == "all"
        and rule.metric != "scaling_exponent"
        and rule.against is None
        and rule.match.accepts(seen.case)
        and gpu_matches(rule.gpu, device)
    )
    alone = replace(run.suite, rules=stated, decides_for="")
    verdict = rules.judge(alone, run.environment, [seen], ())
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
        log = Path(run.folder, bad.log)
        if log.is_file():
            tail = log.read_text(errors="replace").rstrip().splitlines()[-LOG_LINES:]
            lines += ["", f"end of {bad.log}:", *(f"  {line}" for line in tail)]
    lines += ["", f"run: {run.folder}"]
    return plain("\n".join(lines))


def _evidence(run: Run, seen: CaseSummary, bad: Evidence) -> Iterator[str]:
    """As in the failures of a report."""
    from harness.report.failures import failures  # imports matplotlib, which is slow

    for failure in failures([seen], run):
        yield from failure.facts
        yield from (f"{f.name}: {f.path or f'none ({f.note})'}" for f in bad.files)
        if failure.command:
            yield f"reproduce: {failure.command}"


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
    if left := Agenda(suite, recorded=recorded.measurements).left:
        text = f"{left} processes were not run; to resume: {rest_command(None, folder)}"
        return SuiteResult(suite=suite.path, good=False, lines=(text,))
    with join(path) as writer:
        writer.finish()
    if len(suite.cases) < cases_of_suite:
        text = (
            f"no verdict on the suite: {len(suite.cases)} of {cases_of_suite} cases were selected"
        )
        return SuiteResult(suite=suite.path, good=True, lines=(text, f"run: {folder}"))
    _, verdict = rules.of_run(recorded)
    return SuiteResult(
        suite=suite.path,
        good=verdict.decision is Decision.GO,
        lines=(f"verdict: {verdict.said}: {plain(verdict_sentence(verdict))}", f"run: {folder}"),
    )
