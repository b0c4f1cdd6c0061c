"""Two runs compared by what they stored: what differs is named, and an unknown is no pass."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness.cli import console_verdict
from harness.cli import main as cli
from harness.errors import HarnessError
from harness.gate import compare as comparing
from harness.gate.records import GateVerdict, State
from harness.records import (
    Case,
    Counters,
    Decision,
    Environment,
    Git,
    Measurement,
    MeasureSettings,
    Outcome,
    Run,
)
from harness.store.writer import create
from harness.tests.fake_runs import H200, case, ended, environment, run, sweep, timed

CASES = sweep(seq_len=[512, 1024])
FIRST, SECOND = (c.case_id for c in CASES)


def at(commit: str, *, gpu=H200) -> Environment:
    return environment(gpu=gpu, git=Git(commit=commit * 40, branch="main"))


def steady(step_s: float) -> Callable[[Case], list[Measurement]]:
    return lambda c: timed(c, step_s, processes=6, cv=0.001)


def side(
    name: str,
    measure: Callable[[Case], list[Measurement]],
    *,
    cases: Sequence[Case] = CASES,
    env: Environment | None = None,
) -> Run:
    six = [replace(c, settings=MeasureSettings(processes=6)) for c in cases]
    return run(six, measure, env=env or at(name), run_id=f"run-{name}", folder=f"runs/run-{name}")


def compare(a: Run, b: Run, **options: Any) -> GateVerdict:
    return comparing.runs(a, b, calibrations=Path("none"), **options)


def of(compared: GateVerdict, case_id: str) -> tuple[Decision, State, str | None]:
    (found,) = (c for c in compared.cases if c.case_id == case_id)
    return found.decision, found.state, found.change


# --- times -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "decision", "change", "status"),
    [
        pytest.param(0.98, Decision.GO, "same", 0, id="not slower"),
        pytest.param(1.5, Decision.NO_GO, "slower", 1, id="slower"),
        pytest.param(0.5, Decision.GO, "faster", 0, id="faster"),
        pytest.param(1.0, Decision.INCONCLUSIVE, "undecided", 3, id="days scatter by as much"),
    ],
)
def test_times_are_judged_as_the_gate_judges_them(
    factor: float, decision: Decision, change: str, status: int
) -> None:
    answer = compare(side("a", steady(0.1)), side("b", steady(0.1 * factor)))

    assert (answer.decision, answer.exit_status) == (decision, status)
    assert of(answer, FIRST) == (decision, State.COMPARED, change)
    assert answer.cases[0].comparison is not None
    assert answer.cases[0].comparison.ratio == pytest.approx(factor, rel=0.01)
    assert [d.name for d in answer.differences] == ["commit"]


def test_one_process_is_undecided() -> None:
    def single(c: Case) -> list[Measurement]:
        return timed(c, 0.2, processes=1)

    answer = compare(side("a", steady(0.1)), side("b", single))

    assert of(answer, FIRST)[:2] == (Decision.INCONCLUSIVE, State.UNCOMPARED)
    assert answer.exit_status == 3


def test_unsteady_processes_do_not_count() -> None:
    def unsteady(c: Case) -> list[Measurement]:
        return [replace(m, steady=m.process == 0) for m in timed(c, 0.2, processes=6)]

    answer = compare(side("a", steady(0.1)), side("b", unsteady))

    assert "1 in the candidate" in answer.cases[0].reason
    assert answer.decision is Decision.INCONCLUSIVE


# --- undecided ---------------------------------------------------------------------------


def test_another_environment_leaves_times_undecided() -> None:
    a = side("a", steady(0.1))
    b = side("b", steady(0.2), env=at("b", gpu=replace(H200, uuid="GPU-another")))

    answer = compare(a, b)

    assert [d.name for d in answer.differences] == ["GPU UUID", "commit"]
    assert of(answer, FIRST) == (Decision.INCONCLUSIVE, State.COMPARED, "slower")
    assert "GPU UUID differs" in answer.reason
    assert any("--across" in remedy for remedy in answer.remedies)
    assert any(f"compare {'a' * 10} {'b' * 10}" in remedy for remedy in answer.remedies)
    assert compare(a, b, across=True).decision is Decision.NO_GO


def test_a_case_of_one_side_is_undecided() -> None:
    (other,) = sweep(seq_len=[4096])
    a = side("a", steady(0.1))
    b = side("b", steady(0.098), cases=[CASES[0], other])

    answer = compare(a, b)

    states = {c.case_id: c.state for c in answer.cases}
    assert (states[SECOND], states[other.case_id]) == (State.MISSING, State.NEW)
    assert answer.decision is Decision.INCONCLUSIVE
    assert answer.reason == "1 case only in the baseline; 1 case only in the candidate"
    assert compare(a, b, filters=["seq_len=512"]).decision is Decision.GO


def test_an_unmeasured_case_is_undecided() -> None:
    a = side("a", steady(0.1))
    b = side("b", lambda c: steady(0.098)(c) if c.case_id == FIRST else [])

    answer = compare(a, b)

    assert of(answer, FIRST)[0] is Decision.GO
    assert of(answer, SECOND)[:2] == (Decision.INCONCLUSIVE, State.FAILED)
    assert answer.exit_status == 3


@pytest.mark.parametrize(
    ("a_ends", "b_ends", "decision"),
    [
        pytest.param(Outcome.OK, Outcome.CRASH, Decision.NO_GO, id="broken"),
        pytest.param(Outcome.OK, Outcome.TIMEOUT, Decision.NO_GO, id="a runs it"),
        pytest.param(Outcome.CRASH, Outcome.OK, Decision.INCONCLUSIVE, id="repaired"),
        pytest.param(Outcome.UNSUPPORTED, Outcome.OK, Decision.INCONCLUSIVE, id="new in B"),
        pytest.param(Outcome.TIMEOUT, Outcome.TIMEOUT, Decision.INCONCLUSIVE, id="neither"),
    ],
)
def test_outcomes_decide(a_ends: Outcome, b_ends: Outcome, decision: Decision) -> None:
    def ends(how: Outcome) -> Callable[[Case], list[Measurement]]:
        return lambda c: steady(0.1)(c) if how is Outcome.OK else ended(c, how)

    answer = compare(side("a", ends(a_ends)), side("b", ends(b_ends)))

    assert answer.decision is decision


def test_a_changed_case_is_not_compared() -> None:
    before = [replace(CASES[0], axes={"seq_len": 512, "batch": 1})]
    after = [replace(before[0], axes={"seq_len": 512, "batch": 4})]

    answer = compare(side("a", steady(0.1), cases=before), side("b", steady(0.1), cases=after))

    assert answer.decision is Decision.INCONCLUSIVE
    assert "axis batch: 1 in the baseline, 4 in the candidate" in answer.cases[0].reason
    assert "axis batch" in answer.differences[-1].name


def test_an_impossible_comparison_is_refused() -> None:
    a = side("a", steady(0.1))

    with pytest.raises(HarnessError, match="both are run run-a"):
        compare(a, a)
    with pytest.raises(HarnessError, match="no case of the two runs matches"):
        compare(a, side("b", steady(0.1)), filters=["nowhere"])


# --- counters ----------------------------------------------------------------------------


def counting(host_syncs: int, step_s: float = 0.1) -> Callable[[Case], list[Measurement]]:
    counters = Counters(steps=2, host_syncs=host_syncs, dispatched_ops=7)
    return lambda c: [replace(m, counters=counters) for m in steady(step_s)(c)]


def test_counters_are_compared_exactly_and_shown_beside_times() -> None:
    a, b = side("a", counting(34)), side("b", counting(35, 0.098))

    exact = compare(a, b, counters=True)
    timed_too = compare(a, b)

    assert exact.decision is Decision.NO_GO
    assert [(c.name, c.before, c.after) for c in exact.cases[0].counters] == [
        ("host_syncs", 34, 35)
    ]
    assert timed_too.decision is Decision.GO
    assert "host_syncs 34 → 35" in timed_too.cases[0].findings[-1].reason
    assert compare(a, side("c", counting(34)), counters=True).exit_status == 0
    assert compare(a, side("c", steady(0.1)), counters=True).exit_status == 3


# --- the command -------------------------------------------------------------------------


def record(root: Path, whole: Run) -> str:
    with create(root, whole.suite, whole.environment) as writer:
        for m in whole.measurements:
            writer.append(m)
        writer.finish()
    return writer.run_id


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    ids = [record(tmp_path, side(n, steady(s))) for n, s in (("a", 0.1), ("b", 0.15))]

    shown = CliRunner().invoke(cli.app, ["compare", *ids, "--store", str(tmp_path)])
    told = CliRunner().invoke(cli.app, ["compare", *ids, "--json", "--store", str(tmp_path)])

    assert (shown.exit_code, told.exit_code) == (1, 1), shown.output
    document = json.loads(told.stdout)
    assert (document["decision"], document["exit_status"]) == ("NO-GO", 1)
    assert [c["comparison"]["change"] for c in document["cases"]] == ["slower", "slower"]
    assert document["baseline"]["run_id"] == ids[0]
    assert shown.stdout.index("commit") < shown.stdout.index("slower"), "differences first"
    assert "Comparison: NO-GO  2 of 2 cases" in shown.stdout
    assert "--ci" not in shown.stdout


@pytest.mark.parametrize("width", [80, 160])
def test_no_number_is_wrapped(width: int) -> None:
    long = case({"seq_len": 512, "head_dim_qk": 192, "head_dim_v": 128, "pass": "forward+backward"})
    a = side("a", steady(0.1), cases=[*CASES, long])
    b = side("b", steady(0.15), cases=[CASES[0], long])
    console = Console(width=width)

    with console.capture() as shown:
        console.print(console_verdict.shown(compare(a, b)))

    lines = shown.get().splitlines()
    assert any(line.split()[:3] == ["differs", "baseline", "candidate"] for line in lines)
    assert max(map(len, lines)) <= width
    assert sum("+50 %" in line and "150 ms" in line for line in lines) == 2
    assert sum("only the baseline has this case" in line for line in lines) == 1
