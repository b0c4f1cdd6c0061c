"""Which pairs of processes a gate compares: those of the screen, or new ones that confirm."""

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from harness.gate import session
from harness.gate.compare import PLAIN
from harness.gate.plan import Plan
from harness.records import Change, Outcome, Thresholds
from harness.runner.interleave import Side, Task
from harness.tests import fake_runs


@pytest.mark.parametrize(
    ("disturbed", "failed", "said", "pairs"),
    [
        ({0, 1}, None, "", 20),  # of the screen, which decided nothing
        ({0, 1, 7, 12, 20, 25}, None, "3 of 20 pairs were not steady, or disturbed", 17),
        (set(range(6, 26)), None, "20 of 20 pairs were not steady, or disturbed", 6),
        (set(), 25, "", None),
    ],
)
def test_the_pairs_that_decide_are_compared_unless_a_process_failed(
    disturbed: set[int], failed: int | None, said: str, pairs: int | None
) -> None:
    answers, key = compared_in_turns(Thresholds(most_pairs=20), 0.3, disturbed, failed)

    assert answers.remarks.get(key, "") == said
    compared = answers.comparisons.get(key)
    assert (compared.pairs if compared else None) == pairs


def test_a_disturbed_pair_of_the_screen_is_measured_again() -> None:
    answers, key = compared_in_turns(Thresholds(), 0.001, {1, 4, 6})  # one of the two more, too

    assert (answers.comparisons[key].pairs, answers.comparisons[key].change) == (20, Change.SAME)
    answers, key = compared_in_turns(Thresholds(), 0.001, {1, 4})

    assert (answers.comparisons[key].pairs, answers.comparisons[key].change) == (6, Change.SAME)


@pytest.mark.parametrize(
    ("cv", "pairs", "change", "tolerance"),
    [
        (0.012, 20, Change.SAME, None),
        (0.05, 60, Change.SAME, None),
        (0.1, 64, Change.UNDECIDED, 0.05),
    ],
)
def test_a_case_without_calibration_is_judged_by_the_scatter_of_its_pairs(
    cv: float, pairs: int, change: Change, tolerance: float | None
) -> None:
    answers, key = compared_in_turns(None, cv)

    found = answers.comparisons[key]
    assert (found.pairs, found.change, found.tolerance) == (pairs, change, tolerance)


def compared_in_turns(
    thresholds: Thresholds | None,
    cv: float,
    disturbed: Collection[int] = (),
    failed: int | None = None,
) -> tuple[session._Answers, tuple[str, str]]:
    """Compare one case whose processes scatter so far; without thresholds, by its own pairs."""
    case = fake_runs.case({"seq_len": 512})
    task = Task(suite="s", case=case)
    sides = [Side(name, (), None, None) for name in ("base", "head")]  # type: ignore[arg-type]
    made = [fake_runs.timed(case, 0.1, processes=80, cv=cv, seed=seed) for seed in (1, 2)]

    def rounds(plan: Any, _: str) -> None:
        for side, timed in zip(sides, made, strict=True):
            for i in (i for _, indices in plan for i in indices):
                (crashed,) = fake_runs.ended(case, Outcome.CRASH)
                ran = replace(crashed, process=i) if i == failed else timed[i]
                ran = replace(ran, steady=i not in disturbed)
                side.measured.setdefault(task.key, []).append(ran)

    rounds([(task, range(6))], "screen")
    plan: Any = SimpleNamespace(sides=sides, tasks=[task], calibrations={}, policy=PLAIN)
    plan.thresholds = lambda *a, **k: thresholds or Plan.thresholds(plan, *a, **k)
    bench: Any = SimpleNamespace(rounds=rounds)
    return session._interleaved(plan, bench, {task.key: 6}), task.key
