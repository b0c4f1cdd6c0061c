"""A verdict as JUnit XML, valid by Jenkins' schema, which GitLab, GitHub actions and IDEs read.

NO-GO is a failure. What is undecided is skipped, so that it is seen and counts for neither side;
where the policy says that it blocks, it is an error. In the shadow stage nothing fails.
"""

import math
from itertools import groupby
from xml.etree import ElementTree

from harness.gate.records import GateCase, GateSide, GateVerdict, Stage, Subject
from harness.records import Decision
from harness.report.markdown import clipped, plain
from harness.report.verdict_text import case_sentence, case_text

MAX_TEXT = 10_000
MAX_LINE = 500


def junit(verdict: GateVerdict) -> str:
    """The document. One test suite a suite file, one test a case; the verdict itself is a test."""
    root = ElementTree.Element("testsuites", name=f"harness {verdict.subject}")
    group = str(verdict.subject)  # class of the tests that stand for the whole
    whole = _suite(root, group, verdict)
    _properties(whole, verdict)
    _test(
        whole,
        group,
        "verdict",
        verdict.decision,
        verdict.reason,
        "\n".join(verdict.remedies),
        verdict,
    )
    for finding in verdict.findings:
        if finding.counts:
            _test(whole, group, finding.check, finding.decision, finding.reason, "", verdict)
        else:
            test = _testcase(whole, group, finding.check, 0.0)
            _child(test, "skipped", message=f"not applied: {finding.reason}")
    _count(whole, 0.0)
    for suite, cases in _by_suite(verdict):
        element = _suite(root, suite, verdict)
        for case in cases:
            text = case_text(case)
            _test(
                element,
                suite,
                case.case_id,
                case.decision,
                case_sentence(case),
                text,
                verdict,
                case,
            )
        for out in verdict.left_out:
            if out.suite == suite:
                test = _testcase(element, suite, out.case_id, 0.0)
                _child(test, "skipped", message=f"left out: {out.reason}")
        _count(element, sum(case.gpu_s for case in cases))
    ElementTree.indent(root)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        + ElementTree.tostring(root, encoding="unicode")
        + "\n"
    )


def _by_suite(verdict: GateVerdict) -> list[tuple[str, list[GateCase]]]:
    """Every suite with its cases, those included of which all cases were left out."""
    ordered = sorted(verdict.cases, key=lambda c: c.suite)
    found = {suite: list(cases) for suite, cases in groupby(ordered, key=lambda c: c.suite)}
    for out in verdict.left_out:
        found.setdefault(out.suite, [])
    return list(found.items())


def _suite(root: ElementTree.Element, name: str, verdict: GateVerdict) -> ElementTree.Element:
    element = ElementTree.SubElement(root, "testsuite", name=clipped(plain(name), MAX_LINE))
    if verdict.started_at:
        element.set("timestamp", plain(verdict.started_at)[:19])
    return element


def _properties(element: ElementTree.Element, verdict: GateVerdict) -> None:
    properties = ElementTree.SubElement(element, "properties")
    if verdict.subject is Subject.RUN:
        said = [
            ("device", verdict.device),
            ("candidate", _side(verdict.candidate)),
            ("run", verdict.candidate.run_id),
            ("suite", verdict.policy),
        ]
    else:
        said = [
            ("mode", str(verdict.mode)),
            ("stage", str(verdict.stage)),
            ("blocks", "yes" if verdict.blocks else "no"),
            ("device", verdict.device),
            ("candidate", _side(verdict.candidate)),
            ("baseline", _side(verdict.baseline) if verdict.baseline else ""),
            ("calibration", verdict.calibration),
            ("policy", verdict.policy),
        ]
    for name, value in said:
        ElementTree.SubElement(
            properties, "property", name=name, value=clipped(plain(value), MAX_LINE)
        )


def _side(side: GateSide) -> str:
    return (side.commit or side.ref) + side.beyond


def _test(
    suite: ElementTree.Element,
    classname: str,
    name: str,
    decision: Decision,
    reason: str,
    text: str,
    verdict: GateVerdict,
    case: GateCase | None = None,
) -> None:
    test = _testcase(suite, classname, name, case.gpu_s if case else 0.0)
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


def _testcase(
    suite: ElementTree.Element, classname: str, name: str, seconds: float
) -> ElementTree.Element:
    return ElementTree.SubElement(
        suite,
        "testcase",
        classname=clipped(plain(classname), MAX_LINE),
        name=clipped(plain(name), MAX_LINE),
        time=_seconds(seconds),
    )


def _child(parent: ElementTree.Element, tag: str, text: str = "", **attributes: str) -> None:
    clean = {name: clipped(plain(value), MAX_LINE) for name, value in attributes.items()}
    child = ElementTree.SubElement(parent, tag, clean)
    child.text = clipped(plain(text), MAX_TEXT) or None


def _count(suite: ElementTree.Element, seconds: float) -> None:
    tests = suite.findall("testcase")
    suite.set("tests", str(len(tests)))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(test.find(tag) is not None for test in tests)))
    suite.set("time", _seconds(seconds))


def _seconds(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) and value > 0 else "0.000"
