"""What a training run says of its steps: ends, trends, slow steps, and two losses compared."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.analysis.overhead import course, leaked, loss_difference
from harness.analysis.summary import summarise
from harness.analysis.verdict import judge
from harness.records import Decision, Measurement, Outcome, Rule, Telemetry
from harness.tests.fake_runs import case, ended, run, timed, trained

CASE = case({"seq_len": 512})
EVEN = range(1697, 1857, 20)
AT_ONCE = (1697, 1703, 1712, 1717, 1780, 1785, 1803, 1825)
"""MiB of a compiled kernel of another project, which loads code as it runs."""


def training(process: int = 0, **changes: Any) -> Measurement:
    """A process of 512 tokens a step; see fake_runs.trained."""
    return trained(timed(CASE, 0.05)[process], **changes)


def test_the_ends_are_the_first_step_and_the_mean_of_the_last_tenth() -> None:
    went = course([training(bits_per_byte=lambda n: 8.0 if n <= 190 else float(n))])

    assert went is not None
    assert (went.steps, went.first["bits_per_byte"]) == (200, 8.0)
    assert went.last["bits_per_byte"] == pytest.approx(np.mean(range(181, 201)), rel=0.5)
    assert went.last["loss"] == pytest.approx(
        np.mean([5.5 - n / 100 for n in range(181, 201)]), rel=0.01
    )


def test_a_trend_is_the_change_over_the_run_with_an_interval() -> None:
    went = course([training(pace=lambda n: 2 ** (n / 199), seed=s) for s in (1, 2)])

    assert went is not None
    assert went.drift is not None
    assert went.drift.value == pytest.approx(-0.5, abs=0.01)
    assert went.drift.high - went.drift.low < 0.02  # type: ignore[operator]
    assert went.speed == pytest.approx((512 / 0.05 / 2**0.25, 512 / 0.05 / 2**0.9), rel=0.05)


def test_lines_of_ten_steps_grow_by_the_step() -> None:
    went = course([training(every=10, steps=400, memory_bytes=lambda n: 1e9 + 2**20 * n)])

    assert went is not None
    assert went.growth is not None
    assert went.growth.value == pytest.approx(2**20)
    assert went.leaked > 300 * 2**20


@pytest.mark.parametrize(("mib", "leaks"), [(EVEN, True), (AT_ONCE, False)], ids=["even", "once"])
def test_memory_leaks_if_it_grows_in_every_block(mib: Sequence[int], leaks: bool) -> None:
    read = [float(m * 2**20) for m in (mib[0], *mib) for _ in range(8)]

    assert bool(leaked(read)) == leaks


def test_memory_is_that_of_the_telemetry_if_no_step_reports_it() -> None:
    m = training()
    t = tuple(x / 10 for x in range(110))
    grows = tuple(1e9 + 1e8 * x for x in t)

    def growth(readings: int) -> float | None:
        channels = {"rss_bytes": grows[:readings]}
        seen = replace(m, telemetry=Telemetry(t_s=t[:readings], channels=channels))
        went = course([seen])
        return went.growth.value if went and went.growth else None

    assert growth(110) == pytest.approx(0.05 * 1e8, rel=0.01)
    assert growth(12) is None, "too few readings to tell"


def test_a_few_steps_have_ends_but_no_trend() -> None:
    went = course([training(steps=9)])

    assert went is not None
    assert (went.drift, went.growth, went.trend) == (None, None, "")
    assert went.last


def test_a_failed_process_still_names_its_first_step_without_a_number() -> None:
    m = training(steps=40)
    assert m.over_steps is not None
    bad = replace(m.over_steps, not_finite={"loss": (41,), "grad_norm": (3, 41)})
    (failed,) = ended(CASE, Outcome.NON_FINITE, over_steps=bad)

    went = course([failed])

    assert went is not None
    assert went.not_finite == {"loss": 41, "grad_norm": 3}


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({}, "same"),
        ({"loss": lambda n: 5.5 - n / 100 * 1.004}, "same"),
        ({"loss": lambda n: (5.5 - n / 100) * 1.1}, "lower"),
        ({"loss": lambda n: (5.5 - n / 100) * 0.9}, "higher"),
        ({"seed": 1, "loss": lambda n: (5.5 - n / 100) * 1.005}, "not decided"),
        ({"steps": 20}, ""),
    ],
)
def test_two_losses_are_compared_at_equal_steps(theirs: dict[str, Any], said: str) -> None:
    found = loss_difference([training()], [training(**theirs)])

    assert (found[1] if found else "") == said


def test_processes_with_other_seeds_are_the_noise() -> None:
    """The two of one side end 10 % apart, so 4 % is no difference."""
    apart = [training(loss=lambda n, x=x: x * (5.5 - n / 100)) for x in (0.95, 1.05)]
    other = [training(loss=lambda n: 1.04 * (5.5 - n / 100))] * 2

    assert loss_difference(other, apart)[1] == "same"  # type: ignore[index]
    assert loss_difference(other, [training()] * 2)[1] == "higher"  # type: ignore[index]


@pytest.mark.parametrize(
    ("metric", "go", "decision"),
    [
        ("steps_taken", 200, Decision.GO),
        ("steps_taken", 201, Decision.NO_GO),
        ("loss_last", 4.0, Decision.GO),
        ("loss_last", 3.0, Decision.NO_GO),
        ("bits_per_byte_last", 3.0, Decision.INCONCLUSIVE),
        ("tokens_per_s_drift", -0.05, Decision.GO),
        ("memory_growth_bytes_per_step", 1024, Decision.GO),
        ("memory_growth_bytes_per_step", -1, Decision.NO_GO),
        ("slow_steps", 0, Decision.NO_GO),
        ("slow_steps", 1, Decision.GO),
    ],
)
def test_a_rule_asks_for_them(metric: str, go: float, decision: Decision) -> None:
    seen = [
        training(process=p, memory_bytes=lambda _: 1e9, pace=lambda n: 9.0 if n == 50 else 1.0)
        for p in range(3)
    ]
    recorded = run([CASE], lambda _: seen, rules=[Rule(name="it", metric=metric, go=go)])

    verdict = judge(recorded.suite, recorded.environment, summarise(recorded), ())

    assert verdict.rules[-1].decision is decision
