"""What a silent process does, by recorded samples; the tests own the clock and the samples."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from harness.messages import PhaseBegan, StepsDone
from harness.records import ActivitySample, Case, Outcome
from harness.runner import silence
from harness.runner.joined import Ending
from harness.runner.silence import Activity, Pace, judge, reason
from harness.runner.watchdog import RunObserver, Story
from harness.tests.workers import QUICK, make_case

AT = 1000.0
"""time.monotonic at the launch."""
SAMPLE = ActivitySample(at_s=0.0, cpu_s=5.0, io_bytes=10**6, rss_bytes=10**9)


def samples(*changes: Mapping[str, object], **each: object) -> list[ActivitySample]:
    """Three samples, three seconds apart; `each` of all, `changes` of one after the other."""
    steps = zip(range(3), itertools.chain(changes, itertools.repeat({})), strict=False)
    return [replace(SAMPLE, at_s=3.0 * i, **{**each, **one}) for i, one in steps]  # type: ignore[arg-type]


IDLE: dict[str, list[ActivitySample]] = {
    "a lock": samples(),
    "a GPU at rest": samples(gpu_utilisation=0.01),
    "nothing that moves much": samples({"cpu_s": 4.99}, {"io_bytes": 10**6 - 900}),
}
WORK: dict[str, list[ActivitySample]] = {
    "an endless loop": samples({"cpu_s": 2.0}, {"cpu_s": 5.0}, {"cpu_s": 8.0}),
    "data is read": samples({"io_bytes": 0}, {"io_bytes": 10**5}, {"io_bytes": 10**6}),
    "it waits for a processor": samples({"states": ("running", "sleeping")}),
    "memory grows": samples({"rss_bytes": 10**8}, {"rss_bytes": 5 * 10**8}),
    "a network file system": samples({}, {"states": ("disk-sleep",)}),
    "many kernels": samples(gpu_utilisation=1.0, gpu_power=0.9),
    "kernels of several kinds": samples({}, {"gpu_power": 0.3}, gpu_utilisation=1.0, gpu_power=0.2),
    "kernels with gaps": samples({}, {"gpu_utilisation": 0.8}, gpu_utilisation=1.0, gpu_power=0.2),
    "a GPU whose power is unknown": samples(gpu_utilisation=1.0),
    "a little on the GPU": samples({}, {}, {"gpu_utilisation": 0.06}),
}


@pytest.mark.parametrize("what", [*IDLE, *WORK])
def test_a_process_in_which_nothing_moves_is_idle_and_any_other_is_busy(what: str) -> None:
    seen = {**IDLE, **WORK}[what]

    assert judge(seen) is (Activity.IDLE if what in IDLE else Activity.BUSY)
    assert what in WORK or reason(Activity.IDLE, seen) == "it stands still"


@pytest.mark.parametrize("cpu_s", [(5.0, 5.0, 5.0), (2.0, 5.0, 8.0)])  # blocked, or polling
def test_a_kernel_that_computes_nothing_and_does_not_end_is_named(cpu_s: Sequence[float]) -> None:
    found = samples(*({"cpu_s": s} for s in cpu_s), gpu_utilisation=1.0, gpu_power=0.22)

    assert judge(found) is Activity.SPINNING_KERNEL
    assert reason(Activity.SPINNING_KERNEL, found).startswith("one kernel keeps the GPU busy")


def test_the_limit_is_six_of_the_slowest_recent_steps_and_the_first_does_not_count() -> None:
    followed = Pace(QUICK)
    quick = QUICK.stall_s, 3 * QUICK.stall_s
    assert followed.limits == quick, "no step is known yet"

    for steps, spent_s in ((1, 500.0), (2, 501.0), (3, 502.0)):  # the first one compiled
        followed.ran(steps, spent_s, 1.0)
    assert followed.limits == quick
    followed.ran(4, 552.0, 1.0)
    assert followed.limits == (300.0, 300.0)
    for steps in range(5, 5 + silence.RECENT):
        followed.ran(steps, 548.0 + steps, 1.0)
    assert followed.limits == quick, "a slow step long ago is forgotten"
    assert Pace(replace(QUICK, stall_s=100.0)).limits == (100.0, 300.0)


class Simulated(RunObserver):
    """A process in warm-up; `at` is the time on the test's clock, and every look takes 0.5 s."""

    def __init__(self, *, timeout_s: float = 1e6, cores: float = 0.0, **each: object) -> None:
        case = make_case("good", settings=replace(QUICK, timeout_s=timeout_s))
        self.said: list[str] = []
        self.story = Story(AT, case, 0, self.take, self)
        self.story.hear(PhaseBegan(name="warmup", at=AT), AT)
        self.at, self.steps = AT, 0
        self.cores, self.each = cores, each

    def busy(self, case: Case, process: int, what: str) -> None:
        self.said.append(what)

    def take(self) -> ActivitySample:
        at_s = self.at - AT
        return replace(SAMPLE, at_s=at_s, cpu_s=self.cores * at_s, **self.each)  # type: ignore[arg-type]

    def silent(self, seconds: float) -> Ending | None:
        """How it ends in so much time without a message; None if it does not."""
        until, ending = self.at + seconds, None
        while self.at < until and ending is None:
            self.at += 0.5
            ending = self.story.ending(self.at, None)
        return ending

    def step(self, seconds: float) -> Ending | None:
        """A step of this time, with its report."""
        ending, self.steps = self.silent(seconds), self.steps + 1
        done = StepsDone(steps=self.steps, spent_s=self.at - AT, shortest_s=1.0)
        self.story.hear(done, self.at)
        return ending


KERNEL = {"cores": 1.0, "gpu_utilisation": 1.0, "gpu_power": 0.2}


@pytest.mark.parametrize("work", [{"cores": 1.0}, {"gpu_utilisation": 1.0, "gpu_power": 0.8}])
def test_twenty_busy_steps_of_20_to_100_seconds_are_not_a_hang(work: dict[str, float]) -> None:
    draw, process = random.Random(0), Simulated(**work)

    assert [process.step(draw.uniform(20, 100)) for _ in range(20)] == [None] * 20


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize(("each", "limit_s"), [({}, 30.0), (KERNEL, 90.0)])
def test_a_process_that_stands_still_hangs_within_two_limits(
    each: dict[str, float], limit_s: float, steps: int
) -> None:
    process = Simulated(**each)
    assert [process.step(0.5) for _ in range(steps)] == [None] * steps

    assert process.silent(limit_s) is None
    ending = process.silent(limit_s)

    assert ending is not None
    assert (ending.outcome, f"(limit {limit_s:g} s)" in ending.detail) == (Outcome.HANG, True)
    assert ("no step is known yet" in ending.detail) is (steps == 0)
    assert ("set stall_s to" in ending.advice) is (each is not KERNEL)


def test_an_endless_loop_is_reported_as_busy_and_runs_into_the_time_limit() -> None:
    process = Simulated(cores=1.0, timeout_s=400.0)

    ending = process.silent(1000.0)

    said = "busy: no step finished in {} s, in warmup; no step is known yet; it uses 1.0 CPU cores"
    assert process.said == [said.format(90.5)]
    assert ending is not None
    assert (ending.outcome, ending.detail) == (Outcome.TIMEOUT, said.format(400))
    assert ending.advice.startswith("if it is not stuck, set timeout_s to 2")


@pytest.mark.parametrize(
    ("each", "timeout_s", "steps_s", "word", "working"),
    [
        ({"cores": 1.0}, 8.0, (), "busy: no step finished in 8", True),
        ({"gpu_utilisation": 0.5}, 8.0, (), "busy: no step finished in 8", True),
        ({}, 8.0, (), "idle: no step finished in 8", False),
        ({}, 8.0, (2.5, 2.5), "slow: not done in 8", True),
        ({}, 60.0, (7.5,) * 3, "idle: no step finished in 38", False),  # before its limit, 45 s
    ],
)
def test_a_time_limit_leaves_enough_time_to_see_whether_a_process_works(
    each: dict[str, float], timeout_s: float, steps_s: Sequence[float], word: str, working: bool
) -> None:
    process = Simulated(timeout_s=timeout_s, **each)
    assert [process.step(s) for s in steps_s] == [None] * len(steps_s)

    ending = process.silent(60.0)

    assert ending is not None
    assert ending.detail.startswith(word)
    assert (ending.outcome, ending.evidence.working) == (Outcome.TIMEOUT, working)


def test_a_process_that_prints_until_its_time_limit_works() -> None:
    process = Simulated(timeout_s=8.0)
    for _ in range(15):
        assert process.silent(0.5) is None
        process.story.hear(StepsDone(steps=0, spent_s=0.0, shortest_s=0.0), process.at)

    ending = process.silent(10.0)

    assert ending is not None
    assert ending.evidence.working


def test_a_sign_of_life_begins_the_silence_anew() -> None:
    process = Simulated()
    process.silent(QUICK.stall_s + silence.WINDOW_S + 1.0)
    assert process.story.silence.samples

    process.story.hear(StepsDone(steps=0, spent_s=0.0, shortest_s=0.0), process.at)

    assert process.silent(QUICK.stall_s - 1.0) is None
    assert not process.story.silence.samples
