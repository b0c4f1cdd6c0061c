"""What a report says of a failure."""

from pathlib import Path

from harness.analysis.study import Study
from harness.records import Evidence, NonFiniteOrigin, Outcome
from harness.report.endings import failures
from harness.tests.fake_runs import ended, run, sweep


def test_a_failure_shows_its_facts_its_command_and_the_files_that_are_there(tmp_path: Path) -> None:
    (case,) = sweep(seq_len=[512])
    seen = Evidence(steps=5, frame="wait (x.py:3)")
    said = "no progress for 30.2 s\na second line"
    recorded = run(
        [case],
        lambda c: ended(c, Outcome.HANG, detail=said, evidence=seen, log="x.log"),
        folder=str(tmp_path),
    )

    (elsewhere,) = failures(Study(recorded))
    (tmp_path / "x.log").touch()
    (found,) = failures(Study(recorded))

    assert found.outcome == "hang"
    assert found.detail == "no progress for 30.2 s"
    assert found.facts[0] == "innermost frame: wait (x.py:3)"
    assert (elsewhere.log, found.log) == ("", "x.log")
    only = f"--filter {case.case_id} --set measure.processes=1"
    assert found.command == f"harness run {recorded.suite.path} {only}"


def test_the_origin_of_a_nan_is_named_for_each_computation() -> None:
    (case,) = sweep(seq_len=[512])
    origins = (
        NonFiniteOrigin(
            computation="check",
            precision="bfloat16",
            value="NaN",
            tensor="output 0 of aten.div",
            operator="aten.div",
            module="layers.3 (Block)",
        ),
        NonFiniteOrigin(computation="reference", precision="float64"),
        NonFiniteOrigin(computation="eager", precision="", note="not looked at: 60 s were over"),
    )
    recorded = run(
        [case], lambda c: ended(c, Outcome.NON_FINITE, evidence=Evidence(origins=origins))
    )

    (found,) = failures(Study(recorded))

    assert found.facts == (
        "check (bfloat16): first NaN in output 0 of aten.div, in layers.3 (Block)",
        "reference (float64): finite",
        "eager: not looked at: 60 s were over",
    )
