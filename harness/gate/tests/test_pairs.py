"""Which pairs of processes a gate takes, and how many, until it can decide."""

import math
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from harness.analysis import comparison
from harness.gate import session
from harness.gate.compare import PLAIN
from harness.gate.policy import by_scatter
from harness.records import Breakdown, Change, Counters, Measurement, Outcome, Profile, Thresholds
from harness.runner.interleave import Side, Task, pairs
from harness.tests import fake_runs
from harness.tests.fake_verdicts import KERNEL

COUNTS, WORKS = Counters(steps=2), Breakdown(step_s=0.1, device_busy_s=0.099)


@pytest.mark.parametrize(
    ("disturbed", "failed", "said", "pairs"),
    [
        ((), None, None, 26),
        ({0, 1}, None, {"unsteady": 2, "pairs": 28}, 26),
        ({0, 1, 7, 12, 20, 25, 33}, None, {"unsteady": 6, "pairs": 32}, 26),  # 32 processes at most
        (set(range(6, 40)), None, {"unsteady": 26, "pairs": 32}, 6),
        ((), 25, None, None),
    ],
)
def test_unsteady_pairs_are_replaced_and_a_case_that_fails_is_not_compared(
    disturbed: Collection[int], failed: int | None, said: Any, pairs: int | None
) -> None:
    answers, key = compared_in_turns(Thresholds(most_pairs=20), 0.3, disturbed, failed)

    assert answers.remarks.get(key) == said
    compared = answers.comparisons.get(key)
    assert (compared.ratio.n if compared else None) == pairs


@pytest.mark.parametrize(("disturbed", "pairs"), [({1, 4}, 6), ({1, 4, 6}, 12)])
def test_a_disturbed_pair_of_the_screen_is_measured_again_once(
    disturbed: Collection[int], pairs: int
) -> None:
    answers, key = compared_in_turns(Thresholds(), 0.001, disturbed)

    found = answers.comparisons[key]
    assert (found.ratio.n, found.change) == (pairs, Change.SAME)


@pytest.mark.parametrize(
    ("ratio", "cv", "pairs", "change", "tolerance"),
    [
        (1.0, 0.001, 6, Change.SAME, None),
        (1.15, 0.03, 12, Change.SLOWER, None),
        (0.85, 0.03, 12, Change.FASTER, None),
        (1.04, 0.03, 18, Change.SLOWER, None),
        (1.0, 0.012, 18, Change.SAME, None),
        (1.0, 0.05, 66, Change.SAME, None),
        (1.03, 0.03, 26, Change.SLOWER, None),
        (1.0, 0.1, 70, Change.UNDECIDED, 0.05),
    ],
)
def test_the_scatter_and_the_change_of_a_case_decide_how_many_pairs_it_takes(
    ratio: float, cv: float, pairs: int, change: Change, tolerance: float | None
) -> None:
    answers, key = compared_in_turns(None, cv, ratio=ratio)

    found = answers.comparisons[key]
    assert (found.ratio.n, found.change, found.facts.get("across")) == (pairs, change, tolerance)
    assert found.case_id == key[1]


def test_the_looks_spend_all_of_alpha_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = []

    def statistics(pairs: Any, thresholds: Thresholds, share: float) -> comparison.Statistics:
        spent.append((len(pairs), share))
        return looked(pairs, thresholds, share)

    looked = comparison.statistics
    monkeypatch.setattr(comparison, "statistics", statistics)

    compared_in_turns(Thresholds(), 0.3)

    assert [pairs for pairs, _ in spent] == [12, 18, 26, 70]
    assert sum(share for _, share in spent) == pytest.approx(1.0)


def test_a_case_that_passes_the_screen_counts_in_the_correction() -> None:
    answers, key = compared_in_turns(Thresholds(build_cv=0.0), 0.03, ratio=1.15, beside=True)

    found = answers.comparisons[key]
    assert (len(answers.comparisons), found.ratio.n, found.change) == (2, 13, Change.SLOWER)
    assert found.ratio.p == pytest.approx(2 / comparison.EARLY / math.comb(13, 6))


@pytest.mark.parametrize(
    ("code", "ratio", "disturbed", "pairs"),
    [
        ("aa", 1.0, (), 1),
        ("aa", 1.0, (0,), 1),  # the second
        ("aa", 1.0, (0, 1), 6),
        ("aa", 1.015, (), 1),  # kernels are 97.5 % of both steps
        ("ab", 1.0, (), 6),  # another
        ("aa", 1.03, (), 12),  # slower, unseen by the code
        ("aa", 1.15, (), 12),
    ],
)
def test_one_pair_is_enough_if_it_runs_the_same_machine_code_as_fast(
    code: str, ratio: float, disturbed: Collection[int], pairs: int
) -> None:
    answers, key = compared_in_turns(None, 0.001, disturbed, ratio=ratio, code=code)

    assert (key in answers.same) == (pairs == 1)
    assert pairs == 1 or answers.comparisons[key].ratio.n == pairs


def compared_in_turns(
    thresholds: Thresholds | None,
    cv: float,
    disturbed: Collection[int] = (),
    failed: int | None = None,
    *,
    ratio: float = 1.0,
    beside: bool = False,
    code: str = "",
) -> tuple[session._Answers, tuple[str, str]]:
    """Compare one case whose processes scatter so far; without thresholds, by its own pairs.

    Args:
        beside: Also a case that does not change, of the same name in another suite.
        code: The hash of each side's kernel; without it the machine code is not asked.
    """
    case = fake_runs.case({"seq_len": 512})
    tasks = [Task(suite=suite, case=case) for suite in ("s", "other")[: 1 + beside]]
    sides = [Side(name, (), None, None) for name in ("base", "head")]  # type: ignore[arg-type]
    made = [
        fake_runs.timed(case, step_s, processes=80, cv=cv, seed=seed)
        for seed, step_s in ((1, 0.1), (2, 0.1 * ratio))
    ]
    for i, timed in enumerate(made if code else ()):
        own = (replace(KERNEL, code=code[i]),)
        ran = Profile(fingerprint="f", compiled=own, unknown=(), breakdown=WORKS)
        made[i] = [replace(m, profile=ran, counters=COUNTS) for m in timed]
        made[i][0] = replace(made[i][0], profile=None if disturbed else ran)
    calm = fake_runs.timed(case, 0.1, processes=80, cv=0.0)

    def rounds(plan: Any, _: str) -> None:
        for side, timed in zip(sides, made, strict=True):
            for task, i in ((task, i) for task, indices in plan for i in indices):
                (crashed,) = fake_runs.ended(case, Outcome.CRASH)
                ran = calm[i] if task.suite == "other" else timed[i]
                ran = replace(crashed, process=i) if i == failed else ran
                ran = replace(ran, steady=i not in disturbed)
                side.measured.setdefault(task.key, []).append(ran)

    policy: Any = SimpleNamespace(thresholds=lambda *sd: thresholds or PLAIN.thresholds(*sd))
    plan: Any = SimpleNamespace(sides=sides, tasks=tasks, policy=policy)
    bench: Any = SimpleNamespace(rounds=rounds)
    return session._interleaved(plan, bench, bool(code)), tasks[0].key


# --- processes that make a pair ------------------------------------------------------------

CASE = fake_runs.case({"seq_len": 512})


def side(measured: list[Measurement]) -> Any:
    return SimpleNamespace(of=lambda _: measured)


def test_a_stated_tolerance_is_not_widened_and_no_case_passes_the_stored_one() -> None:
    def tolerance(**given: Any) -> float:
        return by_scatter(Thresholds(**given), given, 0.1).tolerance

    found = tolerance(), tolerance(tolerance=0.04), tolerance(stored_tolerance=0.04)
    assert found == (0.05, 0.04, 0.04)


@pytest.mark.parametrize(("throttled", "left_out"), [(12, 0), (16, 1)])
def test_a_pair_is_made_of_the_samples_that_were_kept(throttled: int, left_out: int) -> None:
    """A throttled process is slow in many of its samples; if too few are left, it makes no pair."""
    base = fake_runs.timed(CASE, 0.1, processes=1)
    slow = tuple(s * 3 for s in base[0].samples_s[:throttled]) + base[0].samples_s[throttled:]
    throttled_too = {"throttled": tuple(range(throttled))}
    head = [replace(base[0], samples_s=slow, discarded=throttled_too)]

    found, disturbed = pairs(Task(suite="s", case=CASE), side(base), side(head))

    assert (len(found), disturbed) == (1 - left_out, left_out)
    for pair in found:
        assert pair.candidate_s == pytest.approx(pair.baseline_s, rel=0.02)
