"""Noise classes, comparisons with stored processes, and A/A pairs."""

import json
import math
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.analysis.comparison import judge, statistics
from harness.cli.main import app
from harness.errors import HarnessError
from harness.gate.aa import steady_pairs, vary
from harness.gate.calibration import (
    MIN_PAIRS,
    THRESHOLDS,
    BetweenCards,
    NoiseClass,
    between_cards,
    calibrate,
)
from harness.gate.unpaired import Process, compare_stored
from harness.records import Case, Change, Estimate, Measurement, Outcome, Pair, Thresholds
from harness.runner import interleave
from harness.runner.interleave import Side, Task
from harness.runner.launcher import Launcher
from harness.store import reader
from harness.store.index import HistoryPoint
from harness.tests import fake_runs
from harness.tests.gate_repositories import WORKLOADS, repository
from reports.studies.noise import NOISY, QUIET, TYPICAL, Noise


def drawn(noise: Noise, n: int, *, seed: int, ratio: float = 1.0) -> list[Pair]:
    draw = noise.draw(np.random.default_rng(seed), 1, n)
    return [
        Pair(
            baseline_s=0.01 * math.exp(a),
            candidate_s=0.01 * ratio * math.exp(b),
            swapped=i % 2 == 1,
        )
        for i, (a, b) in enumerate(zip(draw.baseline[0], draw.candidate[0], strict=True))
    ]


@pytest.mark.parametrize(
    ("noise", "expected"),
    [(QUIET, NoiseClass.QUIET), (TYPICAL, NoiseClass.TYPICAL), (NOISY, NoiseClass.NOISY)],
    ids=lambda x: getattr(x, "name", ""),
)
def test_the_noise_class_is_found(noise: Noise, expected: NoiseClass) -> None:
    calibration = calibrate({f"c{i}": drawn(noise, 20, seed=i) for i in range(7)})

    assert calibration.noise is expected
    assert calibration.biased == ()


def test_a_noisy_case_on_a_quiet_node_gets_its_own_thresholds() -> None:
    calibration = calibrate(
        {**{f"c{i}": drawn(QUIET, 20, seed=i) for i in range(4)}, "wild": drawn(NOISY, 20, seed=9)}
    )

    assert calibration.noise is NoiseClass.QUIET
    assert calibration.thresholds("wild") == THRESHOLDS[NoiseClass.NOISY]
    assert calibration.thresholds("c0") == calibration.thresholds("new") == Thresholds()


def test_a_case_whose_aa_pairs_differ_is_named() -> None:
    calibration = calibrate(
        {"a": drawn(TYPICAL, 20, seed=1), "b": drawn(TYPICAL, 20, seed=2, ratio=1.04)}
    )

    assert calibration.biased == ("b",)


def test_cases_of_different_noise_are_judged_together() -> None:
    """By Holm over all of them, each under its own tolerance."""
    pairs = {"a": drawn(TYPICAL, 32, seed=1), "b": drawn(NOISY, 32, seed=3)}
    own = {"a": Thresholds(), "b": THRESHOLDS[NoiseClass.NOISY]}

    def changes(**own: Thresholds) -> list[Change]:
        looked = {case_id: statistics(pairs[case_id], t) for case_id, t in own.items()}
        return [answer.change for answer in judge(looked, own).values()]

    assert changes(**own) == [Change.SAME, Change.SAME]
    assert changes(a=own["a"], b=Thresholds()) == [Change.SAME, Change.UNDECIDED]


# --- against a stored baseline -----------------------------------------------------------


def processes(*levels: float, hz: float | None = None) -> list[Process]:
    return [Process(samples_s=(0.01 * level,), hz=hz, wall_s=10.0) for level in levels]


def drawn_levels(level: float, n: int, *, seed: int) -> list[float]:
    return [level * math.exp(x) for x in np.random.default_rng(seed).normal(0, 0.005, size=n)]


def stored(ratio: float, *, day_cv: float = 0.005, n: int = 10, hz: float | None = None):
    before = processes(*drawn_levels(1.0, n, seed=1), hz=1.98e9 if hz else None)
    now = processes(*drawn_levels(ratio, n, seed=2), hz=hz)
    limits = {"a": Thresholds()}
    return compare_stored({"a": (before, now)}, day_cv=day_cv, thresholds=limits)[0]


@pytest.mark.parametrize(
    ("ratio", "day_cv", "change"),
    [
        pytest.param(1.00, 0.005, Change.SAME, id="unchanged"),
        pytest.param(1.05, 0.005, Change.SLOWER, id="5 % slower"),
        pytest.param(0.90, 0.005, Change.FASTER, id="10 % faster"),
        pytest.param(1.05, 0.020, Change.UNDECIDED, id="days differ by as much"),
        pytest.param(1.00, 0.020, Change.UNDECIDED, id="no change, and no way to know"),
    ],
)
def test_a_stored_baseline_decides_within_the_variation_of_days(
    ratio: float, day_cv: float, change: Change
) -> None:
    answer = stored(ratio, day_cv=day_cv)

    assert answer.change is change
    assert (answer.low or math.inf) < ratio < (answer.high or 0)
    if change is Change.UNDECIDED:
        assert answer.pairs_needed == 20
        assert answer.minutes_needed == pytest.approx(20 * 20.0 / 60)


def test_cases_of_other_suites_count_in_the_correction() -> None:
    levels = [processes(*drawn_levels(ratio, 10, seed=1)) for ratio in (1.0, 1.03)]

    p_values = [
        compare_stored(
            {"a": (levels[0], levels[1])}, beside=n, day_cv=0.005, thresholds={"a": Thresholds()}
        )[0].p_value
        for n in (0, 59)
    ]

    assert p_values[0]
    assert p_values[1] == pytest.approx(60 * p_values[0])


def test_two_noisy_processes_are_undecided() -> None:
    """Student's quantile of one degree of freedom takes the bound out of all sense."""
    wild, alike = processes(1.0, 3.0), processes(1.0, 1.1)
    sides = {"a": (wild, wild), **{f"b{i}": (alike, alike) for i in range(5)}}

    limits = dict.fromkeys(sides, Thresholds(alpha=1e-4))
    (answer, *_) = compare_stored(sides, day_cv=0.01, thresholds=limits)

    assert answer.change is Change.UNDECIDED
    assert (answer.low, answer.high, answer.smallest_effect) == (None, None, None)
    assert "unbounded" in answer.reason


def test_more_processes_do_not_reduce_the_variation_between_days() -> None:
    few, many = stored(1.0, n=10, day_cv=0.02), stored(1.0, n=1000, day_cv=0.02)

    assert few.high is not None
    assert many.high is not None
    assert many.high - many.ratio > 0.9 * (few.high - few.ratio)


def test_a_day_with_another_clock_is_undecided() -> None:
    assert stored(1.05, hz=1.98e9 / 1.05).clock_explained
    assert stored(1.05, hz=1.98e9).change is Change.SLOWER


def test_the_interval_over_days_covers_the_true_ratio() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(400):
        days = np.exp(rng.normal(0.0, 0.01, size=2))
        before, now = (processes(*d * np.exp(rng.normal(0.0, 0.008, size=5))) for d in days)
        sides, limits = {"a": (before, now)}, {"a": Thresholds()}
        (answer,) = compare_stored(sides, day_cv=0.01, thresholds=limits)
        inside += (answer.low or math.inf) < 1.0 < (answer.high or 0)

    assert 0.97 < inside / 400 < 1.0


def ran(card: str, step_s: float, **others: Any) -> HistoryPoint:
    step = Estimate(value=step_s, low=None, high=None, processes=1, samples=1)
    fields = {"device": "H200", "outcome": "ok", "detail": "", "digest": "", **others}
    return HistoryPoint(run_id="", folder="", device_id=card, metrics={"step_s": step}, **fields)


def test_the_variation_between_cards_is_estimated_from_three_of_them() -> None:
    """One of nine cases is improved threefold on the way, which is not the cards'."""
    rng = np.random.default_rng(0)
    level = {card: rng.normal(0, 0.06, size=9) for card in "abcdefgh"}
    histories = [
        [ran(card, math.exp(x[i]) / (1 + 2 * (i == 0 and card > "c"))) for card, x in level.items()]
        for i in range(9)
    ]

    assert between_cards([h[:2] for h in histories], "H200") == BetweenCards()
    assert between_cards(histories, "A100") == BetweenCards()
    assert between_cards([[ran("a", 1.0), ran("b", 9.0, node="driver 2")]], "H200").cards == 0
    found = between_cards(histories, "H200")
    assert found.cards == 8
    assert found.cv == pytest.approx(0.05, abs=0.012)
    equal = between_cards([[ran(card, 1.0) for card in "abc"]], "H200")
    assert equal.cv == pytest.approx(0.02 * math.sqrt(4 / 6)), "three cards are two pairs of six"
    assert "measured on 8" in found.sentence


TASKS = [Task(suite="s.yaml", case=fake_runs.case({"seq_len": n})) for n in (512, 1024)]


class TwoSides:
    """Two sides; the first `unsteady` processes of the first case are not steady."""

    def __init__(self, unsteady: int, outcome: Outcome = Outcome.OK) -> None:
        self.sides = [Side(n, (), cast(Any, None), fake_runs.environment()) for n in "ab"]
        self.unsteady = unsteady
        self.outcome = outcome
        self.asked: list[list[int]] = []

    def take(self, plan: Sequence[tuple[Task, range]], text: str) -> None:
        self.asked.append([len(indices) for _, indices in plan])
        for side in self.sides:
            for task, indices in plan:
                side.measured.setdefault(task.key, []).extend(
                    self.process(task, index) for index in indices
                )

    def process(self, task: Task, index: int) -> Any:
        if self.outcome is not Outcome.OK:
            return fake_runs.ended(task.case, self.outcome)[0]
        steady = task is not TASKS[0] or index >= self.unsteady
        return fake_runs.timed(task.case, 0.1, processes=1, process=index, steady=steady)[0]

    def pairs(self, wanted: int) -> list[int]:
        found = steady_pairs(self.take, self.sides, TASKS, wanted)
        return [len(found[task.case.case_id]) for task in TASKS]


@pytest.mark.parametrize(
    ("unsteady", "wanted", "asked", "found"),
    [
        pytest.param(0, 12, [[12, 12]], [12, 12], id="all are steady"),
        pytest.param(2, 12, [[12, 12]], [10, 12], id="enough are"),
        pytest.param(3, 12, [[12, 12], [1]], [10, 12], id="one more"),
        pytest.param(5, 10, [[10, 10], [5]], [10, 10], id="one in two"),
    ],
)
def test_unsteady_pairs_are_replaced(
    unsteady: int, wanted: int, asked: list[list[int]], found: list[int]
) -> None:
    machine = TwoSides(unsteady)

    assert machine.pairs(wanted) == found
    assert machine.asked == asked


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (TwoSides(6), "6 of 10 pairs are not steady; 10 steady pairs are needed"),
        (TwoSides(0, Outcome.NON_FINITE), "ended non_finite: planted"),
    ],
)
def test_a_failed_or_unsteady_case_is_refused_at_once(machine: TwoSides, said: str) -> None:
    with pytest.raises(HarnessError, match=said):
        machine.pairs(MIN_PAIRS)

    assert len(machine.asked) == 1


def test_the_command_stores_the_noise_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: dict[str, set[str]] = {}

    def run_one(case: Case, index: int, launcher: Launcher, *_: object) -> Measurement:
        (root,) = launcher._roots
        module = Path(root, "toysuites/workloads.py")
        builds.setdefault(root, set()).add(module.read_text())
        measured = fake_runs.timed(case, 0.1, processes=1, process=index, seed=index % 2)[0]
        return replace(measured, code={"toysuites": str(module)})

    monkeypatch.setattr(interleave, "run_one", run_one)
    monkeypatch.setattr(interleave.Bench, "run_self_test", lambda _: ())
    monkeypatch.chdir(repository(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # set by other tests

    said = CliRunner().invoke(app, ["calibrate", "toysuites/toys.yaml", "--json"])

    assert said.exit_code == 0, said.exception
    answer = json.loads(said.stdout)
    assert [c["case_id"] for c in answer["answer"]["cases"]] == ["sleep/a/step_s=0.004"]
    (kept,) = (tmp_path / "ci/baselines").glob("*/toysuites__toys.calibration.json")
    assert json.loads(kept.read_text())["answer"] == answer["answer"]
    runs = [reader.load(tmp_path / "reports/runs", r) for r in answer["run_id"].split()]
    assert [(len(r.measurements), bool(r.ended_at)) for r in runs] == [(12, True)] * 2
    plain, varied = (text for root in sorted(builds) for text in builds[root])
    assert plain == WORKLOADS
    assert varied != plain
    assert plain in varied
    assert not any(Path(root).exists() for root in builds)


def test_a_varied_build_runs_as_before(tmp_path: Path) -> None:
    texts = {
        "a.py": '"""Doc."""\nfrom __future__ import annotations\nX = 1',
        "b.py": "#!/bin/sh\nX = 1\n",
        "c.py": "\n# -*- coding: latin-1 -*-\nX = '\xe9'\n",
        "d.py": "# ours\nX = 1\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="latin-1")

    vary(tmp_path)

    same = {n for n, text in texts.items() if (tmp_path / n).read_text("latin-1") == text}
    assert same == {"b.py", "c.py"}
    for name in texts.keys() - {"b.py"}:
        assert runpy.run_path(str(tmp_path / name))["X"] in (1, "\xe9")


def test_the_luck_of_builds_is_measured_over_the_cases_and_enters_the_thresholds() -> None:
    pairs = {f"c{i}": drawn(QUIET, 12, seed=i, ratio=1 + 0.02 * (-1) ** i) for i in range(24)}

    measured = calibrate(pairs, builds=True)

    assert measured.build_cv == pytest.approx(0.02 / math.sqrt(2), rel=0.1)
    assert measured.thresholds("c0").build_cv == measured.thresholds("new").build_cv
    assert measured.thresholds("c0").build_cv == measured.build_cv
    assert measured.biased == ()
    assert calibrate(pairs).biased, "if all differ that far, it is the luck of builds"
    for unknown in (calibrate(pairs), calibrate({"c0": pairs["c0"]}, builds=True)):
        assert unknown.build_cv is None
        assert unknown.thresholds("c0").build_cv == Thresholds().build_cv
    same = {case_id: drawn(QUIET, 12, seed=i) for i, case_id in enumerate(pairs)}
    assert (calibrate(same, builds=True).build_cv or 0) < 0.001
