"""The terminal's table of a run's cases."""

from rich.console import Console

from harness.cli import console
from harness.records import CaseSummary, Estimate, Outcome
from harness.tests.fake_runs import case


def summary(seq_len: int, outcome: Outcome = Outcome.OK, **told: object) -> CaseSummary:
    step = Estimate(value=0.01, low=None, high=None, processes=1, samples=9)
    metrics = {"step_s": step} if outcome is Outcome.OK else {}
    return CaseSummary(case=case({"seq_len": seq_len}), outcome=outcome, metrics=metrics, **told)  # type: ignore[arg-type]


def shown(*cases: CaseSummary) -> list[str]:
    wide = Console(width=200)
    with wide.capture() as captured:
        wide.print(console.summaries(cases))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_notes_that_differ_only_in_numbers_share_a_line_and_failures_come_first() -> None:
    lines = shown(
        summary(1, notes=("clock limited in 4 of 9 readings", "few samples")),
        summary(2, notes=("clock limited in 11 of 12 readings",)),
        summary(3, Outcome.CRASH, detail="illegal memory access\nand a traceback"),
        summary(4, Outcome.CRASH, detail="illegal memory access"),
    )

    assert lines[5:] == [
        "train/nsa/seq_len=3: illegal memory access (+1 more)",
        "train/nsa/seq_len=1: clock limited in 4 of 9 readings (+1 more)",
        "train/nsa/seq_len=1: few samples",
    ]
