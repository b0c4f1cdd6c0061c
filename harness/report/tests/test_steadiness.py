"""How far a run's numbers can be trusted: the spread of each case, and the self-test."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis.study import Study
from harness.records import Case, Measurement, Outcome, Peaks, Phase, Program, SelfTest
from harness.report import conditions, context, steadiness
from harness.report.tables import NONE, Table
from harness.report.tests.test_answer import CASES, FLOOR
from harness.report.tests.test_report import values
from harness.tests.fake_runs import case, ended, run, sweep, timed, trained

CASE = case({"seq_len": 512})
PEAKS = Peaks(flops_per_s={"bf16": 8e14}, bytes_per_s=4e12, launch_s=2e-6, sync_s=9e-6)
PROOF = SelfTest(at="2026-11-21T07:30:13+00:00", device="GPU-5d1e0f4c", peaks=PEAKS)


def test_the_report_states_the_measured_peaks_or_why_there_are_none() -> None:
    skipped = SelfTest(at="", device="cpu", skipped="--no-self-test")
    tests = [run([CASE], lambda _: [], self_tests=(test,)) for test in (PROOF, skipped)]

    measured, none = map(steadiness.self_test_sentence, tests)

    for said in ("800,000 GFLOP/s bf16", "9.00 µs a host sync", "GPU-5d1e0f4c"):
        assert said in measured
    assert "--no-self-test" in none


def test_a_row_a_training_run_says_how_it_went() -> None:
    cases = sweep(prefill=["batched", "token"], precision=["bf16", "fp16"])

    def measure(c: Case) -> list[Measurement]:
        faults: dict[int, dict[str, object]] = {
            1: {"not_finite": {"grad_norm": (2,)}, "memory_bytes": lambda n: 8e9 + n * 2**20},
            2: {"pace": lambda n: (1 + n / 200) * (8 if n == 120 else 1), "loss": lambda n: 6.0},
        }
        if c is cases[3]:
            (m,) = ended(c, Outcome.NON_FINITE)
            return [trained(m, steps=5, not_finite={"loss": (6,)})]
        return [trained(m, **faults.get(cases.index(c), {})) for m in timed(c, 0.05)]  # type: ignore[arg-type]

    found = steadiness.over_steps(run(cases, measure), {c.case_id: c.case_id[-6:] for c in cases})

    assert found is not None
    first, leaks, sinks, failed = (row[1:] for row in found.rows)
    assert first[:2] == ("200", "5.314 → 3.585")
    assert first[2:] == ("10,200 → 10,300 (steady)", "–", "–", "–")
    assert leaks[2:] == (
        "10,200 → 10,300 (steady)", "leak: 1.00 MiB a step", "–", "grad_norm at 2",
    )  # fmt: skip
    assert sinks[2].endswith("(sinking)")
    assert sinks[4].startswith("120 (")
    assert (failed[0], failed[-1]) == ("5", "loss at 6")
    assert steadiness.over_steps(run([CASE], lambda c: timed(c, 0.05)), {}) is None


def test_withdrawn_tokens_are_not_shown_over_the_steps() -> None:
    program = Program(argv=("x",), carried={"rows": "--rows"}, work_axes=("rows",))

    def shown(*, was_read: bool) -> object:
        cases = [replace(c, program=program) for c in sweep(rows=[1, 2])]
        flags = {"--rows": was_read}
        of = run(
            cases, lambda c: [trained(m) for m in timed(c, 0.05, tokens=512, flags_read=flags)]
        )
        table = context.build(Study(of), Path("reports"))[0]["over_steps"]
        assert isinstance(table, Table)
        return table.rows[0][3]

    assert shown(was_read=True) == "10,200 → 10,300 (steady)"
    assert shown(was_read=False) == NONE


def test_an_unsteady_case_and_an_unfinished_run_are_doubted() -> None:
    recorded = run(CASES, lambda c: timed(c, 0.05, steady=c is not CASES[1]))

    trust = values(replace(recorded, ended_at=""))["trust"]

    assert "of 4 cases: 1 without steady state" in trust
    late = replace(CASE, allow={Outcome.TIMEOUT: ""})
    ends = values(run([late], lambda c: ended(c, Outcome.TIMEOUT)))["trust"]
    assert "0 of 1 case ran (allowed: 1)" in ends
    assert "unfinished" in values(replace(recorded, ended_at=""))["answer"]


@pytest.mark.parametrize("provider", ["nsa", "dense"])
def test_a_doubt_is_named_if_a_rule_depends_on_it(provider: str) -> None:
    doubted = next(c for c in CASES if c.provider == provider and c.axes["seq_len"] == 2048)
    rule = replace(FLOOR, asks="")
    made = run(CASES, lambda c: timed(c, 0.05, steady=c is not doubted), rules=(rule,))

    doubt = "; of 2 cases behind the answers: 1 without steady state."
    assert values(made)["trust"].endswith(doubt) == (provider == "nsa")


def test_without_wall_time_a_run_takes_as_long_as_its_processes() -> None:
    work = (Phase(name="sampling", start_s=0.25, end_s=0.75), Phase(name="x", start_s=0, end_s=9))
    made = run([CASE], lambda _: timed(CASE, 0.05, processes=1, phases=work, wall_s=2.0))

    assert conditions.time_use(made) == (2.0, 0.5, 1.5)
    assert conditions.time_use(run([CASE], lambda _: [])) is None
