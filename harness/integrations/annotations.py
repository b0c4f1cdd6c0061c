"""A verdict as GitHub's workflow commands, within the limits of one step.

GitHub keeps ten annotations of each kind and silently drops the others: the tenth states how many.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from harness.gate.records import GateVerdict, Stage
from harness.records import Change, Decision
from harness.report.markdown import clipped, plain
from harness.report.verdict_text import case_text, worst_first

PER_KIND = 10
MAX_MESSAGE = 2000
MAX_PROPERTY = 200


class AnnotationKind(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    NOTICE = "notice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    kind: AnnotationKind
    title: str
    message: str
    file: str = ""
    """From the root of the repository."""


def annotations(verdict: GateVerdict) -> str:
    """The commands, one per line, worst first, for the standard output of a step."""
    found = list(_found(verdict))
    lines = []
    for kind in AnnotationKind:
        alike = [a for a in found if a.kind is kind]
        if (more := len(alike) - (PER_KIND - 1)) > 1:
            message = f"{more} more of this kind; the step summary lists all"
            last = Annotation(kind=kind, title=str(verdict.subject), message=message)
            alike = [*alike[: PER_KIND - 1], last]
        lines += [command(a) for a in alike]
    return "".join(f"{line}\n" for line in lines)


def command(a: Annotation) -> str:
    """One workflow command; its text cannot end it or begin another."""
    properties = {"title": a.title, "file": a.file}
    shown = ",".join(f"{name}={_property(text)}" for name, text in properties.items() if text)
    return f"::{a.kind} {shown}::{_data(clipped(plain(a.message), MAX_MESSAGE))}"


def _found(verdict: GateVerdict) -> Iterator[Annotation]:
    if verdict.decision is not Decision.GO:
        yield Annotation(
            kind=_kind(verdict.decision, verdict),
            title=f"{verdict.subject}: {verdict.decision}",
            message=verdict.reason,
        )
    for finding in verdict.findings:
        if finding.decision is not Decision.GO and finding.counts:
            kind = _kind(finding.decision, verdict)
            title = f"{finding.decision}: {finding.check}"
            yield Annotation(kind=kind, title=title, message=finding.reason)
    for case in worst_first(verdict):
        if case.decision is not Decision.GO or case.exemption or case.change is Change.FASTER:
            yield Annotation(
                kind=_kind(case.decision, verdict),
                title=f"{case.decision}: {case.case_id}",
                message=case_text(case),
                file=case.suite,
            )


def _kind(decision: Decision, verdict: GateVerdict) -> AnnotationKind:
    """An undecided case is a notice unless it blocks; the shadow stage has notices only."""
    if decision is Decision.GO or verdict.stage is Stage.SHADOW:
        return AnnotationKind.NOTICE
    if decision is Decision.NO_GO:
        return AnnotationKind.ERROR if verdict.stage is Stage.BLOCK else AnnotationKind.WARNING
    return AnnotationKind.WARNING if verdict.blocks else AnnotationKind.NOTICE


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    line = " ".join(clipped(plain(text), MAX_PROPERTY).split())
    return _data(line).replace(":", "%3A").replace(",", "%2C")
