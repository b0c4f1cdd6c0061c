"""A verdict as JUnit XML, valid by Jenkins' schema, for GitLab, GitHub actions and IDEs.

NO-GO is a failure. An undecided test is skipped, or an error if the policy blocks it. In the shadow
stage nothing fails.
"""

from collections import defaultdict
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from harness.gate.records import GateRecord, Stage
from harness.records import Decision
from harness.report.markdown import clipped, plain
from harness.report.series import gate_text

MAX_TEXT = 10_000
MAX_LINE = 500
COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def junit(verdict: GateRecord) -> str:
    """The document: a test suite for each suite file, a test for each case and for the verdict."""
    whole = str(verdict.subject)
    tests: defaultdict[str, list[Element]] = defaultdict(list)
    answer, steps = gate_text.verdict_reason(verdict), "\n".join(gate_text.next_steps(verdict))
    tests[whole].append(_judged(verdict, "verdict", verdict.decision, answer, steps))
    for f in verdict.findings:
        tests[whole].append(_judged(verdict, f.check, f.decision, gate_text.stated(f)))
    for case in verdict.cases:
        said, text = gate_text.case_sentence(case), gate_text.case_text(case)
        test = _judged(verdict, case.case_id, case.decision, said, text, case.gpu_s)
        tests[case.suite].append(test)
    root = Element("testsuites", name=f"harness {whole}")
    for suite, own in tests.items():
        element = _child(root, "testsuite", name=suite, tests=str(len(own)))
        if verdict.started_at:
            element.set("timestamp", plain(verdict.started_at)[:19])
        element.set("time", f"{sum(float(test.get('time', 0)) for test in own):.3f}")
        for attribute, tag in COUNTED.items():
            element.set(attribute, str(sum(test.find(tag) is not None for test in own)))
        for test in own:
            test.set("classname", element.get("name", ""))
            element.append(test)
    indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'


def _judged(
    verdict: GateRecord,
    name: str,
    decision: Decision,
    reason: str,
    text: str = "",
    seconds: float = 0.0,
) -> Element:
    """A test with the result that the policy gives it."""
    test = _child(None, "testcase", name=name, time=f"{seconds:.3f}")
    message = f"{decision}: {reason}"
    undecided = decision not in (Decision.GO, Decision.NO_GO)
    if decision is not Decision.GO and verdict.stage is Stage.SHADOW:
        _child(test, "skipped", message=f"{message} (shadow stage: nothing fails)")
    elif undecided and not verdict.undecided_blocks:
        _child(test, "skipped", message=message)
    elif decision is not Decision.GO:
        tag = "error" if undecided else "failure"
        _child(test, tag, text, message=message, type=str(decision))
        return test
    if text:
        _child(test, "system-out", text)
    return test


def _child(parent: Element | None, tag: str, text: str = "", **attributes: str) -> Element:
    clean = {name: clipped(plain(value), MAX_LINE) for name, value in attributes.items()}
    child = Element(tag, clean) if parent is None else SubElement(parent, tag, clean)
    child.text = clipped(plain(text), MAX_TEXT) or None
    return child
