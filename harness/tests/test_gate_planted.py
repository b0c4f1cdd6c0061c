"""The study of planted slowdowns, on the CPU, with a step that doubles."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from harness import suite
from harness.gating.planning import Request
from harness.gating.records import GateCase, GateSide, GateVerdict, Stage, State
from harness.records import Decision
from harness.studies import gate_planted
from harness.studies.gate_planted import Line, main, markdown
from harness.tests import fake_runs
from harness.tests.gate_repositories import FILES, SUITE, git, write

CASE_ID = "sleep/a/step_s=0.004"


def line(share: float, decision: Decision) -> Line:
    return Line(
        gate="g",
        slower=share,
        case_id="a",
        decision=decision,
        ratio=1.05,
        low=1.04,
        high=None,
        pairs=20,
        minutes=1.25,
        wall_s=90.0,
        reason="+5.0%",
    )


def step_of(text: str) -> float:
    """The step that a tree's module of workloads makes, as it is on a branch."""
    names: dict[str, Any] = {}
    exec(compile(text, "workloads.py", "exec"), names)
    run = names["sleeps"]("a", {"step_s": 0.004}).run
    took = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return min(took)


def gate_by_one_process(request: Request, observer: object, say: object) -> GateVerdict:
    """In place of a gate, which tests of its own show to find such a slowdown."""
    before, after = (
        step_of(git(Path.cwd(), "show", f"{ref}:toysuites/workloads.py"))
        for ref in (request.base, request.head)
    )
    slower = after > 1.5 * before
    case = GateCase(
        case_id=CASE_ID,
        suite=gate_planted.SUITE_PATH,
        decision=Decision.NO_GO if slower else Decision.GO,
        reason="",
        state=State.COMPARED,
        baseline_s=before,
        candidate_s=after,
        comparison=fake_runs.comparison(ratio=after / before),
        gpu_s=6.0,
    )
    return GateVerdict(
        decision=case.decision,
        reason="",
        mode=request.mode,
        stage=Stage.BLOCK,
        blocks=slower,
        policy=str(request.policy),
        candidate=GateSide(ref=request.head),
        cases=(case,),
    )


def test_a_slowdown_is_planted_on_a_branch_and_its_gate_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_planted, "carry_out", gate_by_one_process)
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, FILES)
    (tmp_path / "toys.yaml").write_text(SUITE)
    out = tmp_path / "out"

    main(
        [
            *(str(out), "--suite", str(tmp_path / "toys.yaml")),
            *("--packages", str(tmp_path / "toy"), str(tmp_path / "toysuites")),
            *("--slower", "1.0", "--again", "2"),
        ]
    )

    kept = [json.loads(text) for text in (out / "gates.jsonl").read_text().splitlines()]
    said = capsys.readouterr().out
    assert "WRONG" not in said
    assert [(k["gate"], k["decision"]) for k in kept] == [
        ("A/A 1", "GO"),
        ("A/A 2", "GO"),
        ("+100%", "NO-GO"),
    ]
    assert f"| +100% | {CASE_ID} | NO-GO | " in said
    assert git(out / "repository", "status", "--porcelain") == ""
    assert "_DELAY_S" not in (out / "repository/toysuites/workloads.py").read_text()


@pytest.mark.parametrize(
    ("share", "decision", "wrong"),
    [
        (0.0, Decision.GO, False),
        (0.0, Decision.INCONCLUSIVE, False),
        (0.0, Decision.NO_GO, True),
        (0.05, Decision.NO_GO, False),
        (0.05, Decision.INCONCLUSIVE, False),
        (0.05, Decision.GO, True),
    ],
)
def test_only_a_false_alarm_and_a_slowdown_let_through_are_wrong(
    share: float, decision: Decision, wrong: bool
) -> None:
    assert line(share, decision).wrong is wrong


def test_the_table_states_verdict_bounds_pairs_and_minutes() -> None:
    assert markdown([line(0.05, Decision.NO_GO)]).splitlines()[-1] == (
        "| g | a | NO-GO | 1.050 (1.040 to ?) | 20 | 1.25 | 90 s |"
    )


def test_the_suite_of_the_study_is_a_suite_of_one_case_for_a_gpu() -> None:
    found = suite.loads(gate_planted.SUITE, "planted.yaml")

    assert (found.device, len(found.cases)) == ("cuda", 1)
