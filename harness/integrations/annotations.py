"""A verdict as GitHub's workflow commands, within the limits of one step.

GitHub keeps ten annotations of each kind a step and drops the others without a word: the tenth
says here how many more there were.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from harness.gate.records import GateCase, GateVerdict, Stage
from harness.records import Change, Decision
from harness.report.markdown import clipped, plain
from harness.report.verdict_text import case_text, worst_first

PER_KIND = 10
MAX_MESSAGE = 2000
MAX_PROPERTY = 200


class Kind(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    NOTICE = "notice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    kind: Kind
    title: str
    message: str
    file: str = ""
    """From the root of the repository."""


def annotations(verdict: GateVerdict) -> str:
    """The commands, one a line, worst first; for standard output of a step."""
    found = list(_found(verdict))
    lines = []
    for kind in Kind:
        mine = [a for a in found if a.kind is kind]
        if len(mine) > PER_KIND:
            more = len(mine) - (PER_KIND - 1)
            said = f"{more} more like these; all of them are in the step summary"
            mine = [
                *mine[: PER_KIND - 1],
                Annotation(kind=kind, title=str(verdict.subject), message=said),
            ]
        lines += [command(a) for a in mine]
    return "".join(f"{line}\n" for line in lines)


def command(a: Annotation) -> str:
    """One workflow command. Nothing in it can end it, or begin another."""
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
        if case.decision is not Decision.GO or _worth_a_word(case):
            yield Annotation(
                kind=_kind(case.decision, verdict),
                title=f"{case.decision}: {case.case_id}",
                message=case_text(case),
                file=case.suite,
            )


def _worth_a_word(case: GateCase) -> bool:
    return case.change is Change.FASTER or case.unexpected_pass


def _kind(decision: Decision, verdict: GateVerdict) -> Kind:
    """What is undecided is a notice, unless it blocks; the shadow stage only notes."""
    if decision is Decision.GO or verdict.stage is Stage.SHADOW:
        return Kind.NOTICE
    if decision is Decision.NO_GO:
        return Kind.ERROR if verdict.stage is Stage.BLOCK else Kind.WARNING
    return Kind.WARNING if verdict.blocks else Kind.NOTICE


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    line = " ".join(clipped(plain(text), MAX_PROPERTY).split())
    return _data(line).replace(":", "%3A").replace(",", "%2C")
