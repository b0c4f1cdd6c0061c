"""The suite for the differences of two runs, and what it finds on a modelled machine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.summary import summarise
from harness.analysis.suspects import Conclusion, diagnose
from harness.bisect import differences
from harness.errors import HarnessError
from harness.records import Case, Outcome, Run
from harness.suite import load as suites
from harness.tests import fake_runs
from harness.tests.fake_runs import environment, timed

CASE = "train/nsa/seq_len=512"
SUITE = """\
schema: 1
title: Toys
subject: Toys
question: How fast?
workloads:
  - name: train
    factory: toys.workloads:train
    providers: [nsa, dense]
    axes: {seq_len: [512, 1024], NSA_ROUTE: loop, batch: 8}
    exclude: [{provider: dense, seq_len: 1024}]
    env: {NSA_KEEP: 1}
    kernels: {must: [fwd]}
    measure: {graph: true}
"""


def run_of(
    text: str, step_s: Callable[[Case], float], env: dict[str, Any] | None = None, run_id: str = ""
) -> Run:
    """A run of a suite's text, measured on a modelled machine without a GPU."""
    suite = suites.loads(text, "suites/toys.yaml")

    def seen(case: Case) -> list[Any]:
        return timed(case, step_s(case), processes=5, cv=0.002, tokens=512)

    run = fake_runs.run(suite.cases, seen, env=environment(gpu=None, **(env or {})))
    return replace(run, suite=suite, run_id=run_id)


def two_runs(second_s: float = 0.108, text: str = SUITE, **env: Any) -> list[Run]:
    """Two runs; the second has this step time, these fields of its environment, and this suite."""
    first = run_of(SUITE, lambda case: 0.1, {"variables": {"NSA_A": "1"}}, "first-run")
    return [first, run_of(text, lambda case: second_s, {"variables": {}, **env}, "second-run")]


def written(runs: list[Run]) -> str:
    return differences.suite_of(runs, "train/nsa/seq_len=512", "reports/it.yaml")


OTHER = SUITE.replace("NSA_ROUTE: loop", "NSA_ROUTE: fast").replace("graph: true", "flush_l2: true")
VARIED = {"axis NSA_ROUTE", "variable NSA_A", "setting graph", "setting flush_l2"}


def test_each_difference_is_taken_alone_and_left_out_alone() -> None:
    suite = suites.loads(written(two_runs(text=OTHER)), "it.yaml")

    cases = {case.workload: case for case in suite.cases}
    first, second = cases["first"], cases["second"]
    assert (first.factory, first.axes["batch"]) == ("toys.workloads:train", 8)
    assert first.env == {"NSA_ROUTE": "loop", "NSA_KEEP": "1", "NSA_A": "1"}
    assert second.env == {"NSA_ROUTE": "fast", "NSA_KEEP": "1"}
    assert cases["with-axis-NSA_ROUTE"].env == {**first.env, "NSA_ROUTE": "fast"}
    assert cases["without-axis-NSA_ROUTE"].env == {**second.env, "NSA_ROUTE": "loop"}
    assert cases["with-variable-NSA_A"].env == {"NSA_ROUTE": "loop", "NSA_KEEP": "1"}
    graphs = [cases[n].settings.graph for n in ("first", "with-setting-graph", "second")]
    assert graphs == [True, False, False]
    assert cases["without-setting-graph"].settings.graph


def conclusions(text: str, step_s: Callable[[Case], float]) -> dict[str, Conclusion]:
    run = run_of(text, step_s)
    return {d.name: d.conclusion for d in diagnose(run.suite, summarise(run))}


def test_the_suspects_of_the_suite_name_the_difference_that_moves_the_number() -> None:
    text = written(two_runs(text=OTHER, hostname="node-8"))

    found = conclusions(text, lambda case: 0.1085 if case.env["NSA_ROUTE"] == "fast" else 0.1)

    shown = {Conclusion.CONTRIBUTES, Conclusion.ENOUGH}
    moving = {name for name, conclusion in found.items() if conclusion in shown}
    route = "axis NSA_ROUTE"
    assert moving == {f"{route} alone", f"{route} beside all others", "all differences together"}
    assert {found[f"{v} alone"] for v in VARIED - {route}} == {Conclusion.RULED_OUT}
    assert found["host"] is Conclusion.NOT_TESTED


def test_two_differences_that_act_only_together_are_seen_beside_all_others() -> None:
    text = written(two_runs(text=OTHER))

    def both(case: Case) -> float:
        return 0.108 if case.env["NSA_ROUTE"] == "fast" and "NSA_A" not in case.env else 0.1

    found = conclusions(text, both)

    for name in ("axis NSA_ROUTE", "variable NSA_A"):
        assert found[f"{name} alone"] is Conclusion.RULED_OUT
        assert found[f"{name} beside all others"] in (Conclusion.CONTRIBUTES, Conclusion.ENOUGH)


def test_a_single_difference_is_two_cases_of_the_faster_and_the_slower_run() -> None:
    text = written(two_runs(second_s=0.09))  # the second run is the faster one

    suite = suites.loads(text, "it.yaml")

    assert [c.env.get("NSA_A") for c in suite.cases] == [None, "1"]
    assert suite.suspects is not None
    assert [s.name for s in suite.suspects.tested] == ["all differences together"]
    assert suite.question.endswith("slower in first-run than in second-run?")


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("toys.workloads", "toys.other", "workload factory"),
        ("seq_len: [512", "seq_len: [256, 512", ""),
    ],
)
def test_a_change_of_the_workload_is_a_difference_and_one_of_the_sweep_is_not(
    old: str, new: str, name: str
) -> None:
    suite = suites.loads(written(two_runs(text=OTHER.replace(old, new))), "it.yaml")

    assert suite.suspects is not None
    varied = {
        s.name.removesuffix(" alone") for s in suite.suspects.tested if s.name.endswith(" alone")
    }
    assert varied == VARIED | ({name} if name else set())


def test_the_head_says_how_to_run_it_and_what_cannot_be_varied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alike = {"variables": {"NSA_A": "1", "NSA_B": "x y"}}
    first = run_of(SUITE, lambda case: 0.1, {"variables": {"NSA_B": "x y"}}, "first-run")
    second = run_of(SUITE, lambda case: 0.11, {**alike, "hostname": "node-8"}, "second-run")
    for name in ("NSA_HERE", "NSA_B", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")

    head = written([first, second]).partition("schema:")[0].splitlines()

    assert head[0] == f"# What makes {CASE} slower in second-run than in first-run?"
    assert head[1].startswith("# Run at 406312f800: env ")
    assert head[1].endswith(" NSA_B='x y' harness run reports/it.yaml")
    assert " -u NSA_HERE " in head[1]
    assert "-u NSA_B" not in head[1], "it has the value of both runs"
    assert "CUDA_VISIBLE_DEVICES" not in head[1], "the machine decides it"
    assert "# Not varied: host: node-7 before, node-8 now" in head


def test_runs_without_a_difference_or_a_step_time_are_refused() -> None:
    same: dict[str, Any] = {"variables": {"NSA_A": "1"}, "hostname": "node-8"}
    with pytest.raises(HarnessError, match=r"anything that a case can set[\s\S]*host: .*node-8"):
        written(two_runs(**same))
    with pytest.raises(HarnessError, match="matches 0 cases of first-run"):
        differences.suite_of(two_runs(), "nothing", "it.yaml")
    first, second = two_runs()
    failed = [replace(m, outcome=Outcome.CRASH, samples_s=()) for m in second.measurements]
    with pytest.raises(HarnessError, match=f"second-run has no step time of {CASE}: crash"):
        written([first, replace(second, measurements=tuple(failed))])
