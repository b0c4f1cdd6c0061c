"""A verdict as GitHub's workflow commands: the verdict, and the worst of its findings and cases.

GitHub keeps ten annotations of each kind; the step summary has all.
"""

from harness.gate.records import GateRecord, Stage
from harness.records import Decision, worst_first
from harness.report.markdown import clipped, plain
from harness.report.series.gate_text import case_text, stated, verdict_reason

MOST = 10
MAX_MESSAGE = 2000
MAX_PROPERTY = 200


def annotations(verdict: GateRecord) -> str:
    """At most MOST commands, one per line, for the standard output of a step."""
    lines = [(verdict.decision, str(verdict.subject), verdict_reason(verdict), "")]
    lines += [(f.decision, f.check, stated(f), "") for f in verdict.findings]
    lines += [(c.decision, c.case_id, case_text(c), c.suite) for c in worst_first(verdict.cases)]
    bad = [line for line in lines if line[0] is not Decision.GO]
    return "".join(command(_kind(line[0], verdict), *line) + "\n" for line in bad[:MOST])


def command(kind: str, decision: Decision, about: str, message: str, file: str) -> str:
    """One workflow command; its text cannot end it or begin another."""
    title = _property(f"{decision}: {about}")
    where = f",file={_property(file)}" if file else ""
    return f"::{kind} title={title}{where}::{_data(clipped(plain(message), MAX_MESSAGE))}"


def _kind(decision: Decision, verdict: GateRecord) -> str:
    """What is undecided is a notice unless it blocks; the shadow stage has notices only."""
    if verdict.stage is Stage.SHADOW:
        return "notice"
    if decision is Decision.NO_GO:
        return "error" if verdict.stage is Stage.BLOCK else "warning"
    return "error" if verdict.undecided_blocks else "notice"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    line = " ".join(clipped(plain(text), MAX_PROPERTY).split())
    return _data(line).replace(":", "%3A").replace(",", "%2C")
