"""How far a run's numbers can be trusted: the spread of each case, and the self-test."""

from harness.analysis.summary import spreads, summarise
from harness.records import Peaks, SelfTest
from harness.report import steadiness
from harness.tests.fake_runs import case, run, timed

CASE = case({"seq_len": 512})
PEAKS = Peaks(flops_per_s={"bf16": 8e14}, bytes_per_s=4e12, launch_s=2e-6, sync_s=9e-6)
PROOF = SelfTest(at="2026-11-21T07:30:13+00:00", device="GPU-5d1e0f4c", peaks=PEAKS)


def test_every_case_with_a_step_time_has_a_row() -> None:
    made = run([CASE], lambda _: timed(CASE, 0.05, steady=False), self_tests=(PROOF,))

    found = steadiness.table(spreads(made), summarise(made))

    assert found is not None
    (row,) = found.rows
    assert row[0] == f"`{CASE.case_id}`"
    assert row[-1].endswith("(compute)")


def test_the_report_states_the_measured_peaks_or_why_there_are_none() -> None:
    measured = steadiness.self_test_sentence(run([CASE], lambda _: [], self_tests=(PROOF,)))
    skipped = SelfTest(at="", device="cpu", skipped="--no-self-test")

    assert "800,000 GFLOP/s bf16" in measured
    assert "9.00 µs a host sync" in measured
    assert "GPU-5d1e0f4c" in measured
    assert "--no-self-test" in steadiness.self_test_sentence(
        run([CASE], lambda _: [], self_tests=(skipped,))
    )
