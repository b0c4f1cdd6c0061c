"""Pivot tables of stored cases: what they print, and that they never mix two configurations."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli.pivots import pivot
from harness.errors import HarnessError
from harness.records import Case, Measurement, Run
from harness.tests.command_line import harness
from harness.tests.fake_runs import H200, environment, run, sweep, timed

A100 = replace(H200, name="A100")
STEP_S = {"nsa": 0.05, "dense": 0.1}
STORE = Path(__file__).parents[3] / "reports" / "runs"


def measured(c: Case) -> list[Measurement]:
    return timed(c, STEP_S[c.provider] * int(c.axes["seq_len"]) / 512, cv=0.001)


def recorded(name: str = "a", *, gpu: Any = H200, **axes: Any) -> Run:
    swept = {"seq_len": [512, 1024], **axes}
    both = [*sweep(provider="nsa", **swept), *sweep(provider="dense", **swept)]
    return run(both, measured, env=environment(gpu=gpu), run_id=f"run-{name}")


def of(*runs: Run, rows: str = "", cols: str = "", metric: str = "step_s") -> list[list[str]]:
    """The words of each line: the metric, the columns, the axes of the rows, the rows."""
    return [line.split() for line in pivot(runs, rows, cols, metric).splitlines()]


def test_an_axis_that_varies_and_is_no_column_is_a_row() -> None:
    title, columns, axes, *rows = of(recorded(gc=["off", "on"]), rows="seq_len", cols="provider")

    assert title == ["step_s"]
    assert columns == ["provider", "nsa", "dense"]
    assert axes == ["seq_len", "gc"]
    assert [r[0] for r in rows] == ["512", "on", "1024", "on"]
    assert all(r[-5].startswith(("100", "200", "99", "199")) for r in rows), "ms of dense"


def test_platforms_are_side_by_side_and_two_runs_of_one_are_rows() -> None:
    two = [recorded("a"), recorded("b", gpu=A100)]

    by_gpu = of(*two, rows="seq_len,provider", cols="gpu")
    three = of(*two, recorded("c"), rows="seq_len,provider", cols="gpu")

    assert by_gpu[1][-3:] == ["NVIDIA", "H200", "A100"]
    assert by_gpu[2] == ["seq_len", "provider"]
    assert three[2] == ["seq_len", "provider", "run"]
    assert len(three) - 3 == 3 * 4, "no cell of one run is another run's"


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ({"cols": "provder"}, "workload, provider, seq_len"),
        ({"cols": "provider", "rows": "provider"}, "named twice"),
        ({"cols": "provider", "metric": "peak_memory"}, "Did you mean 'peak_memory_bytes'"),
    ],
)
def test_a_request_without_an_answer_lists_what_there_is(asked: Any, remedy: str) -> None:
    with pytest.raises(HarnessError, match=remedy):
        of(recorded(), **asked)


def test_the_command_of_the_reports_answers_for_two_runs() -> None:
    runs = "20261123-172759", "20261123-022712"

    asked = ("show", *runs, "--store", ".")
    shown = harness(*asked, "--cols", "gpu", "-f", "whole/*=65536*", cwd=STORE)
    lacking = harness(*asked, cwd=STORE)

    assert shown.returncode == 0, shown.stderr
    assert [line for line in shown.stdout.splitlines() if runs[0] in line]
    assert "Add --cols run" in lacking.stderr
