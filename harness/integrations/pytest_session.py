"""What pytest's tests of a suite share: the processes that measure, and the stored runs.

All processes of one pytest run, pytest-xdist's workers included, know one folder. In it are a
lock, which whoever measures holds, so that no two ever measure at once; and a note per suite of
the run they all write to. The process that pytest was started as marks those runs complete in the
end, and judges each by all rules of its suite.
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
from harness.analysis import verdict as gate
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
from harness.report.text import requirement_text, rule_sentence, verdict_sentence
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
    """A case did not end as its suite asks; the message is all that a reader needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a test says of its case."""

    failure: str = ""
    """Why it fails; empty if it does not."""
    expected: str = ""
    """The suite's reason for an outcome that it allows."""
    properties: tuple[tuple[str, object], ...] = ()
    """For JUnit: outcome, metrics, run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the run of one suite ended."""

    suite: str
    good: bool
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a suite is measured: the same for all its cases."""

    environment: Environment
    folder: Path


class Session:
    """Measures cases one by one in this process, in turn with the others of its pytest run."""

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
        """End the processes that wait for work."""
        for launcher in self._launchers.values():
            launcher.close()

    def _launcher(self, suite: Suite) -> Launcher:
        kind = suite.device == "cpu", bool(shipped_roots(suite))
        if kind not in self._launchers:
            self._launchers[kind] = Launcher.of(suite)
        return self._launchers[kind]

    def measure(self, suite: Suite, case: Case, asked: Sequence[Case]) -> Judged:
        """Run all processes of one case, store what they measured, and judge it.

        Args:
            suite: The suite as its file has it.
            case: The case of it to measure.
            asked: All of its cases that this pytest run was asked for.

        Raises:
            HarnessError: It cannot be measured here, or not be stored.
        """
        alone, heard = replace(suite, cases=(case,)), _Heard()
        rig = Rig(suite.device, wait_s=self._wait_for_gpu_s, say=warnings.warn)
        with _turn(self._shared), rig:
            place = self._place(suite, replace(suite, cases=tuple(asked)), rig)
            self._launcher(suite).preflight(alone)
            rig.observe(place.environment)
            with join(place.folder) as writer:
                run_suite(
                    alone,
                    writer=writer,
                    probes=rig.probes,
                    observer=heard,
                    launcher=self._launcher(suite),
                    gpu=rig.gpu,
                    unfit=mismatch(suite.requires, place.environment),
                )
        recorded = Run(
            run_id=place.folder.name,
            folder=str(place.folder),
            suite=alone,
            environment=place.environment,
            measurements=tuple(heard.measurements),
        )
        return judge(recorded)

    def _place(self, suite: Suite, asked: Suite, rig: Rig) -> _Place:
        """Where the suite is measured, its GPU locked; its run is begun if no process has yet."""
        if (known := self._places.get(suite.path)) is not None:
            rig.hold(known.environment.gpu)
            rig.measures(known.folder.name)
            return known
        here = rig.describe(
            self._launcher(suite),
            command=self._command,
            repository=environment.home_of(suite.cases[0].factory, shipped_roots(suite)),
            cases=asked.cases,
        )
        machine.require_gpu(suite, here, "Leave its file out, or run pytest on a GPU node.")
        note = self._shared / f"{hashlib.sha256(suite.path.encode()).hexdigest()}.json"
        if note.exists():
            folder = Path(json.loads(note.read_text())["folder"])
        else:
            with create(self._store, asked, here) as writer:
                folder = writer.folder.resolve()
            whole = len(suite.cases)
            note.write_text(json.dumps({"folder": str(folder), "cases_of_suite": whole}))
        rig.measures(folder.name)
        place = self._places[suite.path] = _Place(here, folder)
        return place


@contextmanager
def _turn(shared: Path) -> Iterator[None]:
    """Wait until no other process of this pytest run measures, and keep them waiting."""
    fd = os.open(shared / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class _Heard(RunObserver):
    """Keeps what a run measures, for its judge."""

    def __init__(self) -> None:
        self.measurements: list[Measurement] = []

    def finished(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)


# --- one case ----------------------------------------------------------------------------


def judge(run: Run) -> Judged:
    """Judge a run of one case by its outcome and by the rules that it alone decides.

    Those are the rules for every case that they match, stated for this GPU. Rules for the best
    case and for the scaling over an axis need the others too: see `conclude`.
    """
    (seen,) = summary.summarise(run)
    properties = (
        ("outcome", str(seen.outcome or "not run")),
        *((name, estimate.value) for name, estimate in seen.metrics.items()),
        ("run", run.run_id),
    )
    if seen.outcome is not None and seen.outcome in seen.case.allow:
        reason = f"{seen.outcome} is allowed: {seen.case.allow[seen.outcome]}"
        return Judged(expected=reason, properties=properties)
    device = run.environment.device_name
    rules = tuple(
        rule
        for rule in run.suite.rules
        if rule.quantifier == "all"
        and rule.metric != "scaling_exponent"
        and rule.match.accepts(seen.case)
        and gpu_matches(rule.gpu, device)
    )
    verdict = gate.judge(replace(run.suite, rules=rules), run.environment, [seen], ())
    if verdict.decision is Decision.GO:
        return Judged(properties=properties)
    return Judged(failure=failure_text(run, seen, verdict), properties=properties)


def failure_text(run: Run, seen: CaseSummary, verdict: Verdict) -> str:
    """Outcome, detail, rules, evidence and the end of the log of a case that failed."""
    ran = verdict.decision if seen.outcome is Outcome.OK else seen.outcome
    lines = [f"{seen.case.case_id}: {ran or 'did not run'}"]
    if seen.detail:
        lines += ["", seen.detail.rstrip()]
    broken = [r for r in verdict.rules if r.applies and r.decision is not Decision.GO]
    if seen.outcome is Outcome.OK:
        lines += ["", *(f"{r.decision} by {r.rule}: {rule_sentence(r)}" for r in broken)]
        lines += [f"  asked for: {requirement_text(r)}" for r in broken]
    bad = next((m for m in run.measurements if m.outcome is not Outcome.OK), None)
    if bad is not None:
        lines += ["", f"process {bad.process}, evidence in {run.folder}:"]
        lines += [f"  {line}" for line in _evidence(run, seen, bad.evidence or Evidence())]
        if tail := log_tail(Path(run.folder, bad.log)):
            lines += ["", f"end of {bad.log}:", *(f"  {line}" for line in tail)]
    lines += ["", f"run: {run.folder}"]
    return "\n".join(lines)


def _evidence(run: Run, seen: CaseSummary, bad: Evidence) -> Iterator[str]:
    """As the report's section "What went wrong" has it."""
    from harness.report.failures import (
        failures,
    )  # brings matplotlib, which a pass need not wait for

    for failure in failures([seen], run):
        yield from failure.facts
        yield from (f"{f.name}: {f.path or f'none ({f.note})'}" for f in bad.files)
        if failure.command:
            yield f"again: {failure.command}"


def log_tail(path: Path) -> list[str]:
    """The last lines of a log, without what a terminal would act on."""
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


def conclude(shared: Path) -> tuple[End, ...]:
    """Mark every run of this pytest run complete that is, and judge it as a whole."""
    return tuple(
        _conclude(**json.loads(note.read_text())) for note in sorted(shared.glob("*.json"))
    )


def _conclude(folder: str, cases_of_suite: int) -> End:
    path = Path(folder)
    recorded = store.load(path.parent, path)
    suite = recorded.suite
    planned = {(c.case_id, p) for c in suite.cases for p in range(c.settings.processes)}
    left = planned - settled(suite, recorded.measurements)
    if left:
        where = f"{len(left)} processes were not run; go on with: harness run --resume {folder}"
        return End(suite=suite.path, good=False, lines=(where,))
    with join(path) as writer:
        writer.finish()
    if len(suite.cases) < cases_of_suite:
        said = f"{len(suite.cases)} of {cases_of_suite} cases were chosen: no verdict on the suite"
        return End(suite=suite.path, good=True, lines=(said, f"run: {folder}"))
    cases = summary.summarise(recorded)
    verdict = gate.judge(suite, recorded.environment, cases, scaling.fit(cases))
    return End(
        suite=suite.path,
        good=verdict.decision is Decision.GO,
        lines=(
            f"verdict: {verdict.decision}, decided by {verdict.decided_by}: "
            f"{verdict_sentence(verdict)}",
            f"run: {folder}",
        ),
    )
