"""A verdict as JUnit XML, valid by Jenkins' schema, for GitLab, GitHub actions and IDEs.

NO-GO is a failure. An undecided test is skipped, or an error if the policy blocks it. In the shadow
stage nothing fails.
"""

import math
from itertools import groupby
from xml.etree import ElementTree

from harness.gate.records import GateCase, GateSide, GateVerdict, Stage, VerdictSubject
from harness.records import Decision
from harness.report.markdown import clipped, plain
from harness.report.verdict_text import case_sentence, case_text

MAX_TEXT = 10_000
MAX_LINE = 500


def junit(verdict: GateVerdict) -> str:
    """The document: a test suite for each suite file, a test for each case and for the verdict."""
    root = ElementTree.Element("testsuites", name=f"harness {verdict.subject}")
    whole = _suite(root, str(verdict.subject), verdict)
    _properties(whole, verdict)
    test = _testcase(whole, "verdict")
    _judge(test, verdict.decision, verdict.reason, "\n".join(verdict.remedies), verdict)
    for finding in verdict.findings:
        test = _testcase(whole, finding.check)
        if finding.counts:
            _judge(test, finding.decision, finding.reason, "", verdict)
        else:
            _child(test, "skipped", message=f"not applied: {finding.reason}")
    _count(whole, 0.0)
    for suite, cases in _by_suite(verdict):
        element = _suite(root, suite, verdict)
        for case in cases:
            test = _testcase(element, case.case_id, case.gpu_s)
            _judge(test, case.decision, case_sentence(case), case_text(case), verdict)
        for out in verdict.left_out:
            if out.suite == suite:
                test = _testcase(element, out.case_id)
                _child(test, "skipped", message=f"left out: {out.reason}")
        _count(element, sum(case.gpu_s for case in cases))
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _by_suite(verdict: GateVerdict) -> list[tuple[str, list[GateCase]]]:
    """Every suite with its cases, including suites whose cases were all left out."""
    ordered = sorted(verdict.cases, key=lambda c: c.suite)
    found = {suite: list(cases) for suite, cases in groupby(ordered, key=lambda c: c.suite)}
    for out in verdict.left_out:
        found.setdefault(out.suite, [])
    return list(found.items())


def _suite(root: ElementTree.Element, name: str, verdict: GateVerdict) -> ElementTree.Element:
    element = _child(root, "testsuite", name=name)
    if verdict.started_at:
        element.set("timestamp", plain(verdict.started_at)[:19])
    return element


def _properties(element: ElementTree.Element, verdict: GateVerdict) -> None:
    properties = ElementTree.SubElement(element, "properties")
    values = {"device": verdict.device, "candidate": _side(verdict.candidate)}
    if verdict.subject is VerdictSubject.RUN:
        values |= {"run": verdict.candidate.run_id, "suite": verdict.policy}
    else:
        values |= {
            "mode": str(verdict.mode),
            "stage": str(verdict.stage),
            "blocks": "yes" if verdict.blocks else "no",
            "baseline": _side(verdict.baseline) if verdict.baseline else "",
            "policy": verdict.policy,
        }
    for name, value in values.items():
        _child(properties, "property", name=name, value=value)


def _side(side: GateSide) -> str:
    return (side.commit or side.ref) + side.beyond


def _judge(
    test: ElementTree.Element, decision: Decision, reason: str, text: str, verdict: GateVerdict
) -> None:
    message = f"{decision}: {reason}"
    if decision is Decision.GO:
        pass
    elif verdict.stage is Stage.SHADOW:
        _child(test, "skipped", message=f"{message} (shadow stage: nothing fails)")
    elif decision is Decision.NO_GO:
        _child(test, "failure", text, message=message, type=str(decision))
    elif verdict.blocks and verdict.decision is not Decision.NO_GO:
        _child(test, "error", text, message=message, type=str(decision))
    else:
        _child(test, "skipped", message=message)
    if text and test.find("failure") is None and test.find("error") is None:
        _child(test, "system-out", text)


def _testcase(suite: ElementTree.Element, name: str, seconds: float = 0.0) -> ElementTree.Element:
    classname = suite.get("name", "")
    return _child(suite, "testcase", classname=classname, name=name, time=_seconds(seconds))


def _child(
    parent: ElementTree.Element, tag: str, text: str = "", **attributes: str
) -> ElementTree.Element:
    clean = {name: clipped(plain(value), MAX_LINE) for name, value in attributes.items()}
    child = ElementTree.SubElement(parent, tag, clean)
    child.text = clipped(plain(text), MAX_TEXT) or None
    return child


def _count(suite: ElementTree.Element, seconds: float) -> None:
    tests = suite.findall("testcase")
    suite.set("tests", str(len(tests)))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(test.find(tag) is not None for test in tests)))
    suite.set("time", _seconds(seconds))


def _seconds(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) and value > 0 else "0.000"
