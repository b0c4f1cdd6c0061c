"""A verdict goes to a file and comes back, and nothing else is taken for one."""

import json

import pytest

from harness.errors import HarnessError
from harness.gating.records import (
    CounterChange,
    Finding,
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
from harness.records import Decision

VERDICT = GateVerdict(
    decision=Decision.NO_GO,
    reason="train/nsa is slower",
    mode=Mode.RELATIVE,
    stage=Stage.BLOCK,
    blocks=True,
    policy="ci/gate.yaml",
    head=GateSide(ref="HEAD", commit="ab" * 20),
    base=GateSide(ref="main", commit="cd" * 20),
    cases=(
        GateCase(
            case_id="train/nsa",
            suite="suites/gate.yaml",
            decision=Decision.NO_GO,
            reason="+7.0%",
            state=State.COMPARED,
            findings=(Finding(check="ran", decision=Decision.GO, reason="5 processes"),),
            counters=(CounterChange(name="host_syncs", before=0, after=None),),
            ratio=1.07,
        ),
    ),
    left_out=(LeftOut(case_id="decode/nsa", suite="suites/gate.yaml", reason="not reached"),),
)


def test_a_verdict_comes_back_as_it_was() -> None:
    assert decode(encode(VERDICT), "verdict.json") == VERDICT


def test_a_verdict_of_before_a_field_was_there_comes_back() -> None:
    stored = json.loads(encode(VERDICT))
    del stored["head"]["uncommitted"]

    assert decode(json.dumps(stored), "verdict.json") == VERDICT


def test_the_document_carries_the_exit_status() -> None:
    assert json.loads(encode(VERDICT))["exit_status"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[1]", "not a JSON object"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1, "decision": "PASS"}', "decision"),
        ("[" * 100_000, "verdict.json"),
    ],
    ids=["empty", "list", "later", "unknown", "deep"],
)
def test_anything_else_is_refused_in_one_message(text: str, said: str) -> None:
    with pytest.raises(HarnessError, match="is no verdict of a gate") as refused:
        decode(text, "verdict.json")

    assert said in str(refused.value)
