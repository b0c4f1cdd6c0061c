"""Verdicts in CI: valid, within the limits, and safe with any text."""

import dataclasses
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import xmlschema
from rich.console import Console

from harness.analysis import scaling, summary
from harness.analysis import verdict as gate
from harness.cli.console import judged
from harness.gate import counters
from harness.gate.records import CounterChange, GateCase, GateSide, LeftOut, Stage
from harness.integrations import page, run_verdict
from harness.integrations.annotations import annotations, command
from harness.integrations.junit import junit
from harness.integrations.page import comment, step_summary
from harness.records import Case, Decision, Finding, Measurement, Outcome, Stop
from harness.tests import fake_runs
from harness.tests.command_line import harness
from harness.tests.fake_verdicts import FASTER, OPEN, SLOWER, gate_case, gate_verdict
from harness.tests.stored_runs import store

SCHEMA = xmlschema.XMLSchema(Path(__file__).resolve().parents[2] / "tests/data/junit-10.xsd")
PAGE = Path(__file__).with_name("page.md")
NASTY = (
    "a|b\n::error::injected\r\n## title <img src=x onerror=alert(1)> @everyone "
    "[click](https://evil.example) ![i](http://evil.example/x.png) `code` ]]> "
    "\x00\x1b[31m\u202e %0A"
)


COUNTED = gate_case(
    "prefill/nsa",
    Decision.NO_GO,
    reason="host_syncs 12 → 1,600: more than the baseline",
    comparison=None,
    counters=(CounterChange(name="host_syncs", before=12, after=1600),),
    findings=(
        Finding(check=counters.CHECK, decision=Decision.NO_GO, detail="more than the baseline"),
    ),
)
SHARED = Finding(check="preflight", decision=Decision.INCONCLUSIVE, reason="GPU is shared")


def results(document: str) -> dict[str, str]:
    """Test -> what it is, after validation by the schema."""
    SCHEMA.validate(document)
    found = {}
    for test in ElementTree.fromstring(document).iter("testcase"):
        kinds = [child.tag for child in test if child.tag != "system-out"]
        found[test.get("name", "")] = kinds[0] if kinds else "passed"
    return found


# --- JUnit -------------------------------------------------------------------------------


def test_junit_has_a_test_for_every_case_and_the_verdict() -> None:
    document = junit(gate_verdict(gate_case(), SLOWER, OPEN))

    assert results(document) == {
        "verdict": "failure",
        "train/nsa": "passed",
        "forward/nsa": "failure",
        "decode/nsa": "skipped",
        "train/dense": "skipped",
    }
    suites = {s.get("name"): s.attrib for s in ElementTree.fromstring(document)}
    counted = suites["suites/gate.yaml"]
    numbers = ("tests", "failures", "errors", "skipped", "time")
    assert [counted[name] for name in numbers] == ["4", "1", "0", "2", "184.500"]


@pytest.mark.parametrize(
    ("case", "policy", "kind"),
    [
        (OPEN, {"blocks": True}, "error"),
        (OPEN, {}, "skipped"),
        (OPEN, {"stage": Stage.SHADOW}, "skipped"),
        (SLOWER, {"stage": Stage.SHADOW, "blocks": False}, "skipped"),
        (gate_case(), {"findings": (SHARED,), "decision": SHARED.decision}, "skipped"),
        (
            gate_case(),
            {"findings": (SHARED,), "decision": SHARED.decision, "blocks": True},
            "error",
        ),
    ],
)
def test_the_policy_decides_what_is_an_error(
    case: GateCase, policy: dict[str, Any], kind: str
) -> None:
    document = junit(gate_verdict(case, left_out=(), **policy))

    named = "preflight" if "findings" in policy else case.case_id
    assert {name for name, found in results(document).items() if found == kind} == {
        "verdict",
        named,
    }


def test_no_text_and_no_nan_breaks_the_xml() -> None:
    fields = ("case_id", "suite", "reason", "exemption", "log")
    case = dataclasses.replace(SLOWER, **dict.fromkeys(fields, NASTY), gpu_s=float("nan"))

    found = results(junit(gate_verdict(case, reason=NASTY, device=NASTY, remedies=(NASTY,))))

    assert len(found) == 3


# --- pages -------------------------------------------------------------------------------


def test_the_page_of_a_gate() -> None:
    verdict = gate_verdict(
        gate_case(),
        OPEN,
        COUNTED,
        SLOWER,
        candidate=GateSide(ref=".", commit="a" * 40, uncommitted=True),
        findings=(
            Finding(check="policy", decision=Decision.GO, reason="it changes its own policy"),
            Finding(check="tokens_per_s", decision=Decision.NO_GO, reason="low", counts=False),
        ),
        gpu_s=184.5,
        remedies=(
            "if the difference is intended, accept it: harness gate --counters --record",
            "31 pairs would decide, about 12 minutes: confirm_pairs in ci/gate.yaml",
            "harness doctor --against RUN",
        ),
    )

    assert step_summary(verdict) == comment(verdict) == PAGE.read_text()


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
    verdict = gate_verdict(case, stage=stage, blocks=blocks)
    terminal = Console(width=200)

    with terminal.capture() as captured:
        terminal.print(judged(verdict))

    assert f"The change {effect}." in step_summary(verdict)
    assert f"it {'blocks' if blocks else 'does not block'}: the policy " in captured.get()


@pytest.mark.parametrize(
    ("render", "limit", "size"),
    [
        pytest.param(step_summary, 2**20, lambda t: len(t.encode()), id="step-summary"),
        pytest.param(comment, 65_536, len, id="comment"),
    ],
)
def test_a_page_fits_and_counts_omitted_cases(render: Any, limit: int, size: Any) -> None:
    many = [gate_case(f"case/{i}", reason="µ" * 400) for i in range(1500)]

    text = render(gate_verdict(*many, SLOWER))

    assert 0.9 * page.COMMENT_CHARACTERS < size(text) < limit
    rows = [line for line in text.splitlines() if line.startswith(("| ✅", "| ❌"))]
    assert all(row.count(" | ") == 3 and row.endswith(" |") for row in rows), "no row is cut"
    assert f"\n{1501 - len(rows)} more cases" in text
    assert "forward/nsa" in rows[0], "the worst is never omitted"
    assert "harness doctor" in text, "what follows the table is kept"


def test_no_text_breaks_a_table_or_adds_mentions_or_links() -> None:
    fields = ("case_id", "suite", "reason", "exemption")
    case = dataclasses.replace(OPEN, **dict.fromkeys(fields, NASTY))
    verdict = gate_verdict(
        case,
        reason=NASTY,
        device=NASTY,
        remedies=(NASTY,),
        findings=(Finding(check=NASTY, decision=Decision.GO, reason=NASTY),),
        left_out=(LeftOut(case_id=NASTY, suite=NASTY, reason=NASTY),),
    )

    text = comment(verdict)

    outside_code = re.sub(r"`[^`\n]*`", "", text)
    assert "@everyone" not in outside_code
    assert "://" not in outside_code
    assert not re.search(r"(?<!\\)<", outside_code)
    assert not re.search(r"(?<!\\)\]\(", outside_code)
    assert "\n## title" not in text
    assert not re.search("[\x00-\x08\x1b\u202e]", text)
    (row,) = (line for line in text.splitlines() if line.startswith("| ❔"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 5


# --- annotations -------------------------------------------------------------------------


def test_text_in_a_command_is_escaped() -> None:
    line = command("error", Decision.NO_GO, "a:b,c%\nd", "50 %\r\n::stop", "s,x.yaml")

    title = "title=NO-GO%3A a%3Ab%2Cc%25 d"
    assert line == f"::error {title},file=s%2Cx.yaml::50 %25%0D%0A::stop"


def test_the_kind_of_an_annotation_follows_decision_and_policy() -> None:
    def kinds(**changes: Any) -> list[str]:
        lines = annotations(gate_verdict(gate_case(), SLOWER, OPEN, FASTER, **changes))
        return [f"{m[1]} {m[2]}" for m in re.finditer(r"^::(\w+) title=([^:,]*)", lines, re.M)]

    assert annotations(gate_verdict(gate_case())) == ""
    slower, undecided = "NO-GO%3A forward/nsa", "INCONCLUSIVE%3A decode/nsa"
    assert kinds(blocks=False) == [
        "error NO-GO%3A gate",
        f"error {slower}",
        f"notice {undecided}",
    ]
    assert f"warning {slower}" in kinds(stage=Stage.WARN, blocks=False)
    assert {k.split()[0] for k in kinds(stage=Stage.SHADOW, blocks=False)} == {"notice"}
    assert f"notice {undecided}" in kinds(blocks=True), "the NO-GO blocks"
    assert f"error {undecided}" in kinds(blocks=True, decision=Decision.INCONCLUSIVE)


def test_only_the_ten_worst_are_annotated() -> None:
    many = [dataclasses.replace(OPEN, case_id=f"case/{i}") for i in range(30)]

    lines = annotations(gate_verdict(*many, SLOWER)).splitlines()

    assert len(lines) == 10
    assert "forward/nsa" in lines[1]


# --- runs --------------------------------------------------------------------------------


def test_the_command_writes_the_page_of_a_run(tmp_path: Path) -> None:
    store(tmp_path, fake_runs.run(fake_runs.sweep(seq_len=[1]), lambda c: fake_runs.timed(c, 0.1)))

    page = harness("export", "latest", "--store", ".", "--format", "step-summary", cwd=tmp_path)

    assert page.stdout.startswith("## ✅ Run: GO"), page.stderr


def test_a_run_is_shown_as_a_verdict_but_not_as_a_gate() -> None:
    ends = {512: None, 1024: Outcome.OUT_OF_MEMORY, 2048: Outcome.CRASH}

    def measure(c: Case) -> list[Measurement]:
        ended = ends[int(c.axes["seq_len"])]
        return fake_runs.ended(c, ended) if ended else fake_runs.timed(c, 0.1)

    run = fake_runs.run(fake_runs.sweep(seq_len=[*ends]), measure)
    cases = summary.summarise(run)
    verdict = gate.judge(run.suite, run.environment, cases, scaling.fit(cases))

    judged = run_verdict.of_run(run, cases, verdict)
    text, document, lines = comment(judged), junit(judged), annotations(judged)

    decisions = [Decision.GO, Decision.INCONCLUSIVE, Decision.NO_GO]
    assert [c.decision for c in judged.cases] == decisions
    assert judged.cases[2].reason == "crash: planted: crash"
    assert [*results(document).values()][-3:] == ["passed", "skipped", "failure"]
    assert text.startswith(f"## {page._SIGNS[verdict.decision]} Run: {verdict.decision}\n")
    assert f"A run, judged by the rules of `{run.suite.path}`." in text
    assert not re.search(r"gate\b|stage|block|absolute", text.replace(run.suite.path, ""), re.I)
    assert ElementTree.fromstring(document).get("name") == "harness run"
    assert results(document)["verdict"] == "failure"
    assert f"title={verdict.decision}%3A run" in lines


def test_a_slow_case_that_counts_as_measured_is_no_failure() -> None:
    run = fake_runs.variables()
    seen = summary.summarise(run)

    judged = run_verdict.of_run(run, seen, gate.judge(run.suite, run.environment, seen, ()))

    assert {c.decision for c in judged.cases} == {judged.decision} == {Decision.GO}
    assert judged.reason.startswith("the fastest is train/nsa/A=1/B=1/C=0 with 53")
    assert {*results(junit(judged)).values()} == {"passed"}


def test_a_case_that_was_not_run_is_skipped_and_no_failure() -> None:
    cases = fake_runs.sweep(seq_len=[1, 2])
    run = dataclasses.replace(
        fake_runs.run(cases, lambda c: fake_runs.timed(c, 1.0) if c is cases[0] else []),
        stopped=Stop(rule="floor"),
    )
    seen = summary.summarise(run)
    judged = run_verdict.of_run(run, seen, gate.judge(run.suite, run.environment, seen, ()))

    document = junit(judged)

    assert [c.case_id for c in judged.cases] == [cases[0].case_id]
    assert [*results(document).values()][-2:] == ["passed", "skipped"]
    assert f"{cases[1].case_id}" in comment(judged)
    for said in (document, comment(judged)):
        assert "decided by rule “floor”" in said
