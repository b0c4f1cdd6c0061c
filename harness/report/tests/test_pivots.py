"""Pivot tables of stored cases: what they print, and that they never mix two configurations."""

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.gate import compare as comparing
from harness.records import Case, Counters, Measurement, MeasureSettings, Outcome, Run
from harness.report import pivots
from harness.report.pivots import PivotTables
from harness.tests.fake_runs import H200, ended, environment, run, sweep, timed

A100 = replace(H200, name="NVIDIA A100")
STEP_S = {"nsa": 0.05, "dense": 0.1}
Change = Callable[[Case], dict[str, Any]]


def measured(c: Case) -> list[Measurement]:
    return timed(c, STEP_S[c.provider] * int(c.axes["seq_len"]) / 512, cv=0.001)


def recorded(name: str = "a", *, gpu: Any = H200, **axes: Any) -> Run:
    swept = {"seq_len": [1024, 512], **axes}
    both = [*sweep(provider="nsa", **swept), *sweep(provider="dense", **swept)]
    return run(both, measured, env=environment(gpu=gpu), run_id=f"run-{name}")


def of(*runs: Run, rows: str = "", cols: str = "", metric: str = "step_s") -> PivotTables:
    first, second = (tuple(filter(None, x.split(","))) for x in (rows, cols))
    return pivots.pivot(pivots.cases(runs), first, second, metric, pivots.values(metric))


def values(found: PivotTables) -> list[dict[str, str]]:
    return list(csv.DictReader(found.csv().splitlines()))


def test_a_table_is_split_by_an_axis_that_is_neither_in_rows_nor_in_columns() -> None:
    found = of(recorded(gc=["off", "on"]), rows="seq_len", cols="provider")

    assert [heading for heading, _ in found.parts] == ["step time: gc=off", "step time: gc=on"]
    for _, table in found.parts:
        assert table.columns == ("seq_len", ">nsa", ">dense")
        assert [row[0] for row in table.rows] == ["512", "1024"], "numbers ascend"
        assert table.rows[0][1].startswith("50.")
    assert "**step time: gc=off**\n\n| seq_len | nsa | dense |" in found.markdown()


def test_csv_is_one_table_of_si_numbers_with_their_intervals() -> None:
    rows = values(of(recorded(gc=["off", "on"]), rows="seq_len", cols="provider"))

    assert [(r["gc"], r["seq_len"]) for r in rows] == [
        ("off", "512"), ("off", "1024"), ("on", "512"), ("on", "1024"),
    ]  # fmt: skip
    assert all(float(r["dense lo"]) < float(r["dense"]) < float(r["dense hi"]) for r in rows)
    assert float(rows[1]["dense"]) == pytest.approx(0.2, rel=0.02)


def test_without_rows_every_axis_that_varies_is_one() -> None:
    ((_, table),) = of(recorded(gc=["off", "on"]), cols="provider").parts

    assert table.columns == ("seq_len", "gc", ">nsa", ">dense")


def test_platforms_stand_side_by_side_and_two_runs_of_one_are_split() -> None:
    two = [recorded("a"), recorded("b", gpu=A100)]

    ((_, table),) = of(*two, rows="seq_len,provider", cols="gpu").parts
    three = of(*two, recorded("c"), rows="seq_len,provider", cols="gpu")
    by_run = of(*two, recorded("c"), cols="run")

    assert table.columns[2:] == (">NVIDIA H200", ">NVIDIA A100")
    assert table.remarks == ("run by gpu: NVIDIA H200: run-a; NVIDIA A100: run-b.",)
    assert [h.partition(": ")[2] for h, _ in three.parts] == ["run-a", "run-b", "run-c"]
    assert by_run.parts[0][1].columns[2:] == (">run-a", ">run-b", ">run-c")


def test_a_variable_of_one_provider_splits_nothing_and_one_that_differs_splits() -> None:
    one, other = recorded("a"), recorded("b")

    def setting(r: Run, provider: str, value: str) -> Run:
        set_ = [replace(c, env={"NSA_X": value} if c.provider == provider else {})
                for c in r.suite.cases]  # fmt: skip
        return replace(r, suite=replace(r.suite, cases=tuple(set_)))

    ((_, table),) = of(setting(one, "nsa", "1"), rows="seq_len", cols="provider").parts
    differing = of(setting(one, "nsa", "1"), setting(other, "nsa", "0"), rows="run", cols="seq_len")

    exported = replace(other, environment=environment(variables={"NSA_Y": "2"}))
    ((_, of_runs),) = of(one, exported, cols="run").parts

    assert table.remarks == ("NSA_X by provider: nsa: 1; dense: –.",)
    assert "NSA_Y by run: run-a: –; run-b: 2." in of_runs.remarks
    assert {"nsa, NSA_X=1", "nsa, NSA_X=0"} <= {h[11:] for h, _ in differing.parts}


def test_a_case_without_a_value_says_how_it_ended() -> None:
    cases = sweep(seq_len=[512, 1024, 2048])

    def measure(c: Case) -> list[Measurement]:
        return timed(c, 0.05) if c is cases[0] else ended(c, Outcome.CRASH) if c is cases[1] else []

    whole = run(cases, measure)
    ((_, table),) = of(whole, cols="seq_len", metric="peak_memory_bytes").parts

    assert table.rows[0][1:] == ("crash", "not run")
    assert values(of(whole, cols="seq_len"))[0]["seq_len=1024"] == "crash"


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ({"cols": "provder"}, "workload, provider, seq_len, precision"),
        ({"cols": "gpu"}, "workload, provider, seq_len, precision"),
        ({"cols": "provider", "rows": "provider"}, "--rows or in --cols"),
        ({"cols": "provider", "metric": "peak_memory"}, "Did you mean peak_memory_bytes"),
    ],
)
def test_a_request_without_an_answer_lists_what_there_is(asked: Any, remedy: str) -> None:
    with pytest.raises(HarnessError, match=remedy):
        of(recorded(), **asked)


# --- ratios of two runs --------------------------------------------------------------------


def side(name: str, step_s: float, gpu: Any = H200, **changes: Any) -> Run:
    cases = [replace(c, settings=MeasureSettings(processes=6)) for c in sweep(seq_len=[512, 1024])]
    return run(
        cases,
        lambda c: timed(c, step_s, processes=6, cv=0.001, **changes),
        env=environment(gpu=gpu),
        run_id=f"run-{name}",
    )


def against(a: Run, b: Run, metric: str = "step_s") -> dict[str, str]:
    judged = comparing.runs(a, b, calibrations=Path("none"))
    cells = pivots.changes(metric, judged.cases, pivots.cases([a]))
    found = pivots.pivot(pivots.cases([b]), (), ("seq_len",), metric, cells)
    text = found.parts[0][1].rows[0][0]
    return {"text": text, **values(found)[0]}


def test_a_ratio_has_its_interval_and_one_that_decides_nothing_is_marked() -> None:
    slower = against(side("a", 0.1), side("b", 0.15))
    unclear = against(side("a", 0.1), side("b", 0.104))
    elsewhere = against(side("a", 0.1), side("b", 0.15, gpu=A100))

    assert slower["text"].startswith("5")
    assert slower["text"].endswith("slower")
    assert 1.4 < float(slower["seq_len=512 lo"]) < float(slower["seq_len=512"]) < 1.6
    assert unclear["text"].startswith("~ +4")
    assert unclear["seq_len=512"] == "~"
    assert float(unclear["seq_len=512 lo"]) < 1.04
    assert elsewhere["text"].startswith("~ +5")


def test_other_metrics_are_compared_by_their_processes() -> None:
    a = side("a", 0.1, peak_memory_bytes=100, counters=Counters(host_syncs=4, steps=2))
    b = side("b", 0.1, peak_memory_bytes=120, counters=Counters(host_syncs=6, steps=2))
    across = replace(b, environment=replace(b.environment, gpu=A100))

    assert against(a, b, "peak_memory_bytes")["text"].startswith("+20")
    assert against(a, replace(a, run_id="c"), "peak_memory_bytes")["text"] == "same"
    assert against(a, b, "host_syncs")["text"] == "4 → 6"
    assert against(a, across, "host_syncs")["text"] == "~ 4 → 6"
