"""Verdict files: written, read, and refused if invalid."""

import json

import pytest

from harness.errors import HarnessError
from harness.gate.records import (
    CounterChange,
    GateCase,
    GateSide,
    GateVerdict,
    LeftOut,
    Mode,
    Stage,
    State,
    decode,
    encode,
)
from harness.records import Decision, Finding
from harness.tests.fake_runs import comparison

VERDICT = GateVerdict(
    decision=Decision.NO_GO,
    reason="train/nsa is slower",
    mode=Mode.RELATIVE,
    stage=Stage.BLOCK,
    blocks=True,
    policy="ci/gate.yaml",
    candidate=GateSide(ref="HEAD", commit="ab" * 20),
    baseline=GateSide(ref="main", commit="cd" * 20),
    cases=(
        GateCase(
            case_id="train/nsa",
            suite="suites/gate.yaml",
            decision=Decision.NO_GO,
            reason="+7.0%",
            state=State.COMPARED,
            findings=(Finding(check="ran", decision=Decision.GO, reason="5 processes"),),
            counters=(CounterChange(name="host_syncs", before=0, after=None),),
            comparison=comparison(ratio=1.07),
        ),
    ),
    left_out=(LeftOut(case_id="decode/nsa", suite="suites/gate.yaml", reason="not reached"),),
)


def test_a_verdict_round_trips() -> None:
    assert decode(encode(VERDICT), "verdict.json") == VERDICT


def test_a_verdict_without_a_newer_field_loads() -> None:
    stored = json.loads(encode(VERDICT))
    del stored["candidate"]["uncommitted"]

    assert decode(json.dumps(stored), "verdict.json") == VERDICT


def test_a_verdict_of_schema_1_loads() -> None:
    """The numbers of a comparison were fields of the case, and the sides were base and head."""
    stored = json.loads(encode(VERDICT))
    (case,) = stored["cases"]
    numbers = case.pop("comparison")
    case |= {n: v for n, v in numbers.items() if n not in ("reason", "clock_explained")}
    stored |= {"schema": 1, "head": stored.pop("candidate"), "base": stored.pop("baseline")}

    found = decode(json.dumps(stored), "verdict.json")

    assert found.candidate == VERDICT.candidate
    assert found.baseline == VERDICT.baseline
    assert found.cases[0].comparison == comparison(ratio=1.07, reason=case["reason"])
    assert found.cases[0].counters == VERDICT.cases[0].counters


def test_the_document_has_the_exit_status() -> None:
    assert json.loads(encode(VERDICT))["exit_status"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[1]", "not a JSON object"),
        ('{"schema": 99}', "schema is 99"),
        ('{"schema": 1, "decision": "PASS"}', "decision"),
        ('{"schema": 1, "cases": [1]}', "a case is not a JSON object"),
        ("[" * 100_000, "verdict.json"),
    ],
    ids=["empty", "list", "later", "unknown", "case", "deep"],
)
def test_an_invalid_verdict_is_refused(text: str, said: str) -> None:
    with pytest.raises(HarnessError, match="is not a verdict of a gate") as refused:
        decode(text, "verdict.json")

    assert said in str(refused.value)
