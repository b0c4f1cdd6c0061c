"""What a training run says of its steps: ends, trends and slow steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.analysis.over_steps import Course, course, leaked
from harness.analysis.study import Study
from harness.records import Decision, Measurement, Outcome, Rule, Telemetry
from harness.tests.fake_runs import case, ended, late, run, timed, trained

CASE = case({"seq_len": 512})
EVEN = range(1697, 1857, 20)
AT_ONCE = (1697, 1703, 1712, 1717, 1780, 1785, 1803, 1825)
"""MiB of a compiled kernel of another project, which loads code as it runs."""


def grows_evenly(n: int) -> float:
    return 1e9 + 2**20 * n


def training(process: int = 0, **changes: Any) -> Measurement:
    """A process of 512 tokens a step; see fake_runs.trained."""
    return trained(timed(CASE, 0.05)[process], **changes)


def course_of(*measured: Measurement) -> Course:
    found = course(measured)
    assert found is not None
    return found


def test_the_ends_are_the_first_step_and_the_mean_of_the_last_tenth() -> None:
    went = course_of(training(bits_per_byte=lambda n: 8.0 if n <= 190 else float(n)))

    assert (went.steps, went.first["bits_per_byte"]) == (200, 8.0)
    assert went.last["bits_per_byte"] == pytest.approx((10 * 8.0 + sum(range(191, 201))) / 20)
    assert went.last["loss"] == pytest.approx(5.5 - 190.5 / 100, rel=0.01)


def test_the_first_loss_is_that_of_the_processes_that_recorded_the_first_step() -> None:
    first, second = (training(p, bits_per_byte=lambda n: 9.0 - n) for p in range(2))

    assert course_of(late(second), first).first["bits_per_byte"] == 8.0


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize(
    ("pace", "quarters"),
    [
        (lambda n: 2 ** (n / 199), (2**0.234, 2**0.89)),
        (lambda n: 1 / 0.9 if n > 100 else 1.0, (1.0, 1 / 0.9)),
    ],
)
def test_a_drift_is_the_last_quarter_over_the_first(
    pace: Callable[[int], float], quarters: tuple[float, float], processes: int
) -> None:
    went = course_of(*(training(pace=pace, seed=s) for s in range(processes)))

    assert went.drift is not None
    assert went.speed is not None
    assert went.speed == pytest.approx([512 / 0.05 / q for q in quarters], rel=0.01)
    assert went.drift.value == pytest.approx(went.speed[1] / went.speed[0] - 1)
    assert went.drift.low < went.drift.value < went.drift.high  # type: ignore[operator]
    assert went.trend == "sinking"


def correlated(rng: np.random.Generator, *, memory: float, scale: float) -> list[float]:
    """Factors to the step time of 200 steps that start anywhere and return to 1."""
    x = [float(rng.normal(0, scale))]
    for e in rng.normal(0, scale * (1 - memory**2) ** 0.5, 200):
        x.append(memory * x[-1] + float(e))
    return [float(f) for f in np.exp(x)]


@pytest.mark.parametrize("processes", [1, 2])
def test_correlated_noise_seldom_is_a_trend(processes: int) -> None:
    """With a t-interval over the blocks, 17 % of these runs sink or rise."""
    rng, said = np.random.default_rng(0), []
    for _ in range(200):
        noise = [correlated(rng, memory=0.98, scale=0.1) for _ in range(processes)]
        said.append(course_of(*(training(pace=of.__getitem__) for of in noise)).trend)

    assert said.count("sinking") + said.count("rising") <= 0.06 * len(said)


@pytest.mark.parametrize(
    ("ends", "said"),
    [((0.8, 0.81), "sinking"), ((0.6, 0.9), "not decided"), ((0.8,) * 9 + (0.97,), "not decided")],
)
def test_every_process_has_to_sink(ends: Sequence[float], said: str) -> None:
    """The processes differ, not their steps: many blocks of two are no evidence of a third."""
    seen = [training(pace=lambda n, e=e: e ** (-n / 200), seed=s) for s, e in enumerate(ends)]

    assert course_of(*seen).trend == said


def test_a_process_that_ended_early_has_no_say_in_the_trend() -> None:
    fields: dict[str, Any] = {"pace": lambda n: 1 + n / 1000, "memory_bytes": grows_evenly}
    whole = training(steps=1000, **fields)

    alone = course_of(whole)
    for steps in (10, 60):
        went = course_of(whole, training(steps=steps, **fields))
        assert (went.steps, went.trend) == (steps, "sinking")
        assert (went.drift, went.growth, went.leaked) == (alone.drift, alone.growth, alone.leaked)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_jump_of_memory_is_no_growth(processes: int) -> None:
    jump = training(memory_bytes=lambda n: 5e9 + 3e8 * (n > 100))

    went = course_of(*[jump] * processes)

    assert went.growth is not None
    assert (went.leaked, went.growth.value, went.growth.high) == (0.0, 0.0, 0.0)


def test_steps_of_one_number_have_no_growth() -> None:
    m = training(memory_bytes=grows_evenly)
    assert m.over_steps is not None

    assert course_of(replace(m, over_steps=replace(m.over_steps, step=(7,) * 200))).growth is None


@pytest.mark.parametrize(("delay", "named"), [(0.04, False), (0.06, True)])
def test_a_slow_step_loses_time_that_matters(delay: float, named: bool) -> None:
    """Steps of 2 ms, one of which waits for the system."""
    seen = training(pace=lambda n: (0.002 + delay * (n == 50)) / 0.05)

    went = course_of(seen, seen, training(pace=lambda _: 0.04))

    assert dict(went.slow_in) == ({50: 2} if named else {})


def test_lines_of_ten_steps_grow_by_the_step() -> None:
    went = course_of(training(every=10, steps=400, memory_bytes=grows_evenly))

    assert went.growth is not None
    assert went.growth.value == pytest.approx(2**20)
    assert went.leaked > 300 * 2**20


@pytest.mark.parametrize(("mib", "leaks"), [(EVEN, True), (AT_ONCE, False)])
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
        growth = course_of(seen).growth
        return growth.value if growth else None

    assert growth(110) == pytest.approx(0.05 * 1e8, rel=0.01)
    assert growth(12) is None, "too few readings to tell"


def test_a_few_steps_have_ends_but_no_trend() -> None:
    went = course_of(training(steps=9))

    assert (went.drift, went.growth, went.trend) == (None, None, "")
    assert went.last


def test_a_failed_process_still_names_its_first_step_without_a_number() -> None:
    m = training(steps=40)
    assert m.over_steps is not None
    bad = replace(m.over_steps, not_finite={"loss": (41,), "grad_norm": (3, 41)})
    (failed,) = ended(CASE, Outcome.NON_FINITE, over_steps=bad)

    went = course_of(failed)

    assert went.not_finite == {"loss": 41, "grad_norm": 3}


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

    assert Study(recorded).verdict.rules[-1].decision is decision
