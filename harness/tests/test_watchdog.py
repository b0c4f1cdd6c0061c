"""What the watchdog decides about time, on a clock that the test owns and without a process."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from harness.execution import recorder, watchdog
from harness.execution.messages import Answer, Built, Channel, Message, PhaseBegan, Progress
from harness.execution.pace import STALL_FLOOR_S, STALL_STEPS
from harness.execution.recorder import PROBE_INTERVAL_S
from harness.execution.watchdog import UNREPORTED_S, watch
from harness.records import Evidence, Measurement, Outcome
from harness.tests.workers import QUICK, Counter, make_case

BEAT_S = 2 * PROBE_INTERVAL_S
"""The watchdog looks at least this often, so a limit is passed by no more."""


class Clock:
    """Moves when a worker is waited for, and at no other time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Scripted:
    """A worker that says what the test has written down, when the test says so; then nothing."""

    pid = 0
    cold = False

    def __init__(self, clock: Clock, said: list[tuple[float, Message]]) -> None:
        self._clock = clock
        self.launched_at = clock.now
        self.exit_code: int | None = None
        self.answers, self._end = os.pipe()
        os.set_blocking(self.answers, False)
        self._said = [(clock.now + at_s, message) for at_s, message in said]

    def wait(self, *, seconds: float) -> None:
        until = self._clock.now + max(0.0, seconds)
        if self._said and self._said[0][0] <= until:
            self._clock.now, message = self._said.pop(0)
            Channel(self._end).send(message)
            if isinstance(message, Answer):
                self.exit_code = 0
        else:
            self._clock.now = until

    def end(self) -> int:
        os.close(self.answers)
        os.close(self._end)
        return 0


def timed(
    *steps_s: float, built_at_s: float = 1.0, warmup_at_s: float = 2.0
) -> Iterator[tuple[float, Message]]:
    """A worker that builds its workload, and then takes so long for each step."""
    yield 0.5, PhaseBegan(name="setup", at=1000.5)
    yield built_at_s, Built(tokens=64, flops=128, bytes=256)
    yield warmup_at_s, PhaseBegan(name="warmup", at=1000 + warmup_at_s)
    for runs in range(1, len(steps_s) + 1):
        done = steps_s[:runs]
        progress = Progress(runs=runs, spent_s=sum(done), shortest_s=min(done))
        yield warmup_at_s + sum(done), progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(recorder, "time", clock)
    monkeypatch.setattr(watchdog, "_stacks", lambda *arguments: arguments[4])
    return clock


def seen(
    clock: Clock,
    folder: Path,
    *said: tuple[float, Message],
    timeout_s: float,
    stall_s: float,
    probes: Sequence[Counter] = (),
) -> tuple[Measurement, Evidence]:
    """What the watchdog makes of a worker, and the evidence it keeps."""
    case = make_case("good", settings=replace(QUICK, timeout_s=timeout_s, stall_s=stall_s))
    log = folder / "log"
    log.touch()
    worker = Scripted(clock, list(said))
    found = watch(
        worker,  # type: ignore[arg-type]
        case,
        0,
        log=log,
        run_folder=folder,
        probes=probes,
    )
    return found, found.evidence or Evidence()


def test_steps_that_end_are_slow_until_the_timeout(clock: Clock, tmp_path: Path) -> None:
    m, found = seen(clock, tmp_path, *timed(*[9.0] * 99), timeout_s=60.0, stall_s=10.0)

    assert m.outcome is Outcome.TIMEOUT
    assert m.wall_s == pytest.approx(60.0, abs=BEAT_S)
    assert (found.runs, found.runs_exact, found.pace_s) == (6, True, 9.0)
    assert m.lower_bound_s == 9.0
    assert found.needed_s == (1 + QUICK.min_samples) * 9.0


def test_a_cold_first_run_bounds_no_later_one(clock: Clock, tmp_path: Path) -> None:
    m, _ = seen(clock, tmp_path, *timed(40.0, 4.0), timeout_s=60.0, stall_s=50.0)

    assert m.outcome is Outcome.TIMEOUT
    assert m.lower_bound_s == pytest.approx(60.0 - 46.0 - UNREPORTED_S, abs=BEAT_S)


def test_a_first_run_longer_than_the_timeout_is_a_timeout_not_a_hang(
    clock: Clock, tmp_path: Path
) -> None:
    m, found = seen(clock, tmp_path, *timed(), timeout_s=60.0, stall_s=70.0)

    assert m.outcome is Outcome.TIMEOUT
    assert (found.phase, found.runs) == ("warmup", 0)
    assert m.tokens == 64, "known all the same, so that the bound on the time bounds the rate"
    assert m.lower_bound_s == pytest.approx(60.0 - 2.0 - UNREPORTED_S, abs=BEAT_S)


def test_a_timeout_before_the_first_run_bounds_nothing(clock: Clock, tmp_path: Path) -> None:
    (setup, *_) = timed()
    m, found = seen(clock, tmp_path, setup, timeout_s=60.0, stall_s=70.0)

    assert (m.outcome, m.lower_bound_s, found.phase) == (Outcome.TIMEOUT, None, "setup")


def test_silence_before_there_are_steps_is_a_hang_after_the_suites_limit(
    clock: Clock, tmp_path: Path
) -> None:
    (setup, *_) = timed()
    m, found = seen(clock, tmp_path, setup, timeout_s=600.0, stall_s=70.0)

    assert (m.outcome, found.phase, found.stall_limit_s) == (Outcome.HANG, "setup", 70.0)
    assert m.wall_s == pytest.approx(70.5, abs=BEAT_S)


@pytest.mark.parametrize(
    ("step_s", "limit_s"),
    [(0.001, STALL_FLOOR_S), (2.0, STALL_STEPS * 2.0), (4.0, 150.0)],
    ids=["the floor", "fifty steps", "the suite's limit"],
)
def test_silence_after_steps_is_judged_by_their_pace(
    clock: Clock, tmp_path: Path, step_s: float, limit_s: float
) -> None:
    m, found = seen(clock, tmp_path, *timed(*[step_s] * 5), timeout_s=600.0, stall_s=150.0)

    assert m.outcome is Outcome.HANG
    assert (found.runs, found.runs_exact, found.stall_limit_s) == (5, True, limit_s)
    assert found.silent_s == pytest.approx(limit_s, abs=BEAT_S)
    assert m.lower_bound_s == pytest.approx(limit_s - UNREPORTED_S, abs=BEAT_S)


def test_a_sign_of_life_between_steps_is_no_hang(clock: Clock, tmp_path: Path) -> None:
    steps = [*timed(*[0.001] * 5)]
    last_at_s, last = steps[-1]
    alive = [(last_at_s + 20.0 * i, last) for i in range(1, 9)]
    answer = Answer(
        measurement=Measurement(
            case_id="good",
            process=0,
            outcome=Outcome.OK,
            samples_s=(0.001,),
            host_samples_s=(0.001,),
        )
    )

    m, _ = seen(
        clock, tmp_path, *steps, *alive, (last_at_s + 165.0, answer), timeout_s=600.0, stall_s=150.0
    )

    assert m.outcome is Outcome.OK


def test_probes_are_read_twenty_times_a_second_whatever_is_said_meanwhile(
    clock: Clock, tmp_path: Path
) -> None:
    probe = Counter()
    m, _ = seen(clock, tmp_path, *timed(*[0.013] * 99), timeout_s=9.0, stall_s=10.0, probes=[probe])

    assert m.telemetry is not None
    t_s = m.telemetry.t_s
    assert len(t_s) == probe.readings
    assert t_s[0] == 0.0
    gaps = [later - earlier for earlier, later in pairwise(t_s)]
    assert min(gaps) > 0.5 * PROBE_INTERVAL_S
    assert max(gaps) < 1.5 * PROBE_INTERVAL_S
