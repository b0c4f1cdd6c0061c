"""Sections "Failures", with the evidence and how to run a case again, and "What did not run"."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.records import (
    CaseSummary,
    Evidence,
    EvidenceFile,
    Measurement,
    NonFiniteOrigin,
    Outcome,
    Run,
)
from harness.report.markdown import clipped
from harness.report.tables import NONE, Table
from harness.report.text import alone_command, case_names, listed, outcome_name

FAILED = frozenset(Outcome) - {Outcome.OK, Outcome.UNSUPPORTED}
MAX_DETAIL, MAX_CASES = 240, 4
"""Letters of a reason, and cases of one reason that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failed case, in the words of the report."""

    case_id: str
    outcome: str
    detail: str
    allowed: str
    """Why the suite allows it; empty if it does not."""
    facts: tuple[str, ...]
    """What the evidence adds to the detail."""
    command: str
    """Runs the case alone; empty if the suite allows the outcome."""
    files: str
    """The other files of evidence on this machine, and those never written, with the reason."""


def failures(summaries: Sequence[CaseSummary], run: Run) -> tuple[Failure, ...]:
    """Every case of the run that ended otherwise than OK or unsupported, in the suite's order."""
    found = []
    for s in summaries:
        bad = next((m for m in run.of(s.case.case_id) if m.outcome in FAILED), None)
        if bad is not None:
            found.append(_failure(s, bad, run))
    return tuple(found)


def _failure(s: CaseSummary, m: Measurement, run: Run) -> Failure:
    evidence = m.evidence or Evidence()
    files = [f for f in evidence.files if not f.path or Path(run.folder, f.path).is_file()]
    allowed = s.case.allow.get(m.outcome, "")
    log = m.log if m.log and Path(run.folder, m.log).is_file() else ""
    return Failure(
        case_id=s.case.case_id,
        outcome=outcome_name(m.outcome),
        detail=m.detail.partition("\n")[0],
        allowed=allowed,
        facts=tuple(_facts(evidence)),
        command="" if allowed else alone_command(run, s.case.case_id),
        files=_files(files, log),
    )


def _facts(evidence: Evidence) -> Iterator[str]:
    if evidence.frame and not evidence.silent_s:
        yield f"innermost frame: {evidence.frame}"
    yield from map(_origin, evidence.origins)


def _origin(o: NonFiniteOrigin) -> str:
    """Where NaN or Inf came from, as a sentence."""
    if not o.value:
        finite = f"{o.computation}{f' ({o.precision})' if o.precision else ''}: finite"
        return f"{o.computation}: {o.note}" if o.note else finite
    where = [f"step {o.step} (from 0)" if o.step is not None else "", o.tensor]
    if o.module:
        where.append(f"in {o.module}")
    text = f"{o.computation} ({o.precision}): first {o.value} in {', '.join(filter(None, where))}"
    return f"{text}; {o.note}" if o.note else text


def _files(files: Sequence[EvidenceFile], log: str) -> str:
    """The files in the run's folder, those never written, and the log."""
    parts = [f"`{f.path}`" if f.path else f"no {f.name} ({f.note})" for f in files]
    return ", ".join([*parts, *([f"log `{log}`"] if log else [])])


def not_run(summaries: Sequence[CaseSummary], run: Run) -> Table | None:
    """Cases that a provider declined, that the machine was not fit for, or that did not start; one
    row a reason. Failures have a section of their own."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    names = case_names(run.suite)
    for s in summaries:
        outcome, measured = s.outcome, run.of(s.case.case_id)
        declined = next((m for m in measured if m.outcome is Outcome.UNSUPPORTED), None)
        if declined:
            outcome, why = declined.outcome, declined.detail
        elif outcome is None:
            why = s.detail or "the run ended before this case started"
        elif outcome is Outcome.INVALID_ENVIRONMENT and all(m.samples_s for m in measured):
            why = s.detail  # judged afterwards
        else:
            continue
        allowed = s.case.allow.get(outcome) if outcome else None
        reason = clipped(why.strip(), MAX_DETAIL) or NONE
        peer = "yes, a peer" if s.case.provider in run.suite.peers else NONE if s.stop else "no"
        key = outcome_name(outcome), reason, allowed or peer
        rows.setdefault(key, []).append(names[s.case.case_id])
    if not rows:
        return None
    shown = ((listed(cases, MAX_CASES), *key) for key, cases in rows.items())
    return Table(columns=("cases", "outcome", "why", "allowed"), rows=tuple(shown))
