"""Verdicts in CI: valid, within the limits, and safe with any text."""

import dataclasses
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import xmlschema

from harness.gate import counters
from harness.gate.plan import unfit
from harness.gate.records import GateCase, GateSide, Stage
from harness.integrations.annotations import MOST, annotations, command
from harness.integrations.junit import junit
from harness.integrations.page import MOST_CASES, page
from harness.records import Decision, Finding, KernelChange
from harness.report.series.gate_text import encode
from harness.tests.command_line import harness
from harness.tests.fake_verdicts import FASTER, KERNEL, OPEN, SLOWER, gate_case, gate_verdict

SCHEMA = xmlschema.XMLSchema(Path(__file__).resolve().parents[2] / "tests/data/junit-10.xsd")
PAGE = Path(__file__).with_name("page.md")
NASTY = (
    "a|b\n::error::injected\r\n## title <img src=x onerror=alert(1)> @everyone "
    "[click](https://evil.example) ![i](http://evil.example/x.png) `code` ]]> "
    "\x00\x1b[31m\u202e %0A"
)
EXEMPT = {"exempt_until": "2999-12-31", "exempt_because": NASTY}


CHANGES, MORE = counters.judge({"host_syncs": 12}, {"host_syncs": 1600}, source="the baseline")
COUNTED = gate_case(
    "prefill/nsa", Decision.NO_GO, comparison=None, counters=CHANGES, findings=(MORE,)
)
SHARED = unfit({"shows": "GPU is shared"})
OWN = {"shows": "it changes its own policy"}


def results(document: str) -> dict[str, str]:
    """Test -> what it is, after validation by the schema."""
    SCHEMA.validate(document)
    found = {}
    for test in ElementTree.fromstring(document).iter("testcase"):
        kinds = [child.tag for child in test if child.tag != "system-out"]
        found[test.get("name", "")] = kinds[0] if kinds else "passed"
    return found


def test_junit_has_a_test_for_every_case_and_the_verdict() -> None:
    document = junit(gate_verdict(gate_case(), SLOWER, OPEN))

    assert results(document) == {
        "verdict": "failure",
        "train/nsa": "passed",
        "forward/nsa": "failure",
        "decode/nsa": "skipped",
    }
    suites = {s.get("name"): s.attrib for s in ElementTree.fromstring(document)}
    counted = suites["suites/gate.yaml"]
    numbers = ("tests", "failures", "errors", "skipped", "time")
    assert [counted[name] for name in numbers] == ["3", "1", "0", "1", "184.500"]


@pytest.mark.parametrize(
    ("case", "policy", "kind"),
    [
        (OPEN, {"blocks": True}, "error"),
        (OPEN, {}, "skipped"),
        (SLOWER, {"stage": Stage.SHADOW, "blocks": False}, "skipped"),
        (gate_case(), {"findings": (SHARED,)}, "skipped"),
    ],
)
def test_the_policy_decides_what_is_an_error(
    case: GateCase, policy: dict[str, Any], kind: str
) -> None:
    document = junit(gate_verdict(case, **policy))

    named = "preflight" if "findings" in policy else case.case_id
    found = results(document)
    assert {name for name in found if found[name] == kind} == {"verdict", named}


def test_no_text_breaks_the_xml() -> None:
    nasty = dict.fromkeys(("case_id", "suite", "reason", "log"), NASTY)
    case = gate_case(decision=Decision.NO_GO, exemption=EXEMPT, **nasty)

    found = results(junit(gate_verdict(case, device=NASTY, policy=NASTY)))

    assert len(found) == 2


SPILLING = dataclasses.replace(KERNEL, registers=255, local_bytes=120)
WIDER = KernelChange(name="_forward", before=KERNEL, after=SPILLING, ir=("- 64", "+ 128"))
NEW = KernelChange(name="_merge", before=None, after=KERNEL)


def test_the_page_of_a_gate() -> None:
    verdict = gate_verdict(
        gate_case(),
        OPEN,
        COUNTED,
        dataclasses.replace(SLOWER, kernels=(WIDER, NEW)),
        candidate=GateSide(ref=".", commit="a" * 40, uncommitted=True),
        findings=(Finding(check="policy", decision=Decision.GO, facts=OWN),),
        gpu_s=184.5,
    )

    assert page(verdict) == PAGE.read_text()


@pytest.mark.parametrize(
    ("case", "stage", "blocks", "effect"),
    [
        (SLOWER, Stage.BLOCK, True, "is blocked (stage block)"),
        (OPEN, Stage.BLOCK, False, "is not blocked (stage block, inconclusive: neutral)"),
        (OPEN, Stage.BLOCK, True, "is blocked (stage block, inconclusive: block)"),
        (OPEN, Stage.WARN, False, "is not blocked (stage warn: shown, blocks nothing)"),
    ],
)
def test_the_setting_that_decides_about_blocking_is_named(
    case: GateCase, stage: Stage, blocks: bool, effect: str
) -> None:
    assert f"The change {effect}." in page(gate_verdict(case, stage=stage, blocks=blocks))


def test_a_page_has_the_worst_cases_and_counts_the_others() -> None:
    many = [gate_case(f"case/{i}", reason="µ" * 400) for i in range(1500)]

    text = page(gate_verdict(*many, SLOWER))

    assert len(text) < 65_536
    rows = [line for line in text.splitlines() if line.startswith(("| ✅", "| ❌"))]
    assert len(rows) == MOST_CASES
    assert f"\n{1501 - len(rows)} more cases" in text
    assert "forward/nsa" in rows[0], "the worst is never omitted"
    assert "harness bisect" in text, "what follows the table is kept"


def test_no_text_breaks_a_table_or_adds_mentions_or_links() -> None:
    nasty: dict[str, Any] = dict.fromkeys(("case_id", "suite", "reason"), NASTY)
    case = gate_case(decision=Decision.INCONCLUSIVE, exemption=EXEMPT, **nasty)
    verdict = gate_verdict(
        case,
        device=NASTY,
        findings=(Finding(check=NASTY, decision=Decision.GO, facts={"shows": NASTY}),),
    )

    text = page(verdict)

    outside_code = re.sub(r"`[^`\n]*`", "", text)
    assert "@everyone" not in outside_code
    assert "://" not in outside_code
    assert not re.search(r"(?<!\\)<", outside_code)
    assert not re.search(r"(?<!\\)\]\(", outside_code)
    assert "\n## title" not in text
    assert not re.search("[\x00-\x08\x1b\u202e]", text)
    (row,) = (line for line in text.splitlines() if line.startswith("| ❔"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 5


def test_text_in_a_command_is_escaped() -> None:
    line = command("error", Decision.NO_GO, "a:b,c%\nd", "50 %\r\n::stop", "s,x.yaml")

    title = "title=NO-GO%3A a%3Ab%2Cc%25 d"
    assert line == f"::error {title},file=s%2Cx.yaml::50 %25%0D%0A::stop"


def test_the_kind_of_an_annotation_follows_decision_and_policy() -> None:
    def kinds(*bad: GateCase, **changes: Any) -> list[str]:
        lines = annotations(gate_verdict(gate_case(), *(bad or (SLOWER, OPEN)), FASTER, **changes))
        return [f"{m[1]} {m[2]}" for m in re.finditer(r"^::(\w+) title=([^:,]*)", lines, re.M)]

    many = [dataclasses.replace(OPEN, case_id=f"case/{i}") for i in range(30)]
    assert annotations(gate_verdict(gate_case())) == ""
    assert len(annotations(gate_verdict(*many)).splitlines()) == MOST
    slower, undecided = "NO-GO%3A forward/nsa", "INCONCLUSIVE%3A decode/nsa"
    assert kinds(blocks=False) == ["error NO-GO%3A gate", f"error {slower}", f"notice {undecided}"]
    assert f"warning {slower}" in kinds(stage=Stage.WARN, blocks=False)
    assert {k.split()[0] for k in kinds(stage=Stage.SHADOW, blocks=False)} == {"notice"}
    assert f"notice {undecided}" in kinds(blocks=True), "the NO-GO blocks"
    assert f"error {undecided}" in kinds(OPEN, blocks=True)


def test_the_command_prints_a_verdict_and_refuses_another_file(tmp_path: Path) -> None:
    (tmp_path / "verdict.json").write_text(encode(gate_verdict(gate_case(), SLOWER)))
    (tmp_path / "other.json").write_text("{}")

    good, other, absent = (
        harness("export", file, "--format", "page", cwd=tmp_path)
        for file in ("verdict.json", "other.json", "absent.json")
    )

    assert good.stdout.startswith("## ❌ Gate: NO-GO"), good.stderr
    for refused in (other, absent):
        assert refused.returncode == 2
        assert "harness gate --verdict FILE" in refused.stderr
