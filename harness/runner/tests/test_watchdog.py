"""When a process times out or hangs, and what is recorded then; the tests own the clock."""

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from harness.machine.probes import Probe
from harness.messages import (
    MAX_DRAIN_BYTES,
    MAX_LINE_BYTES,
    Answer,
    Built,
    Channel,
    Garbled,
    Message,
    MessageReader,
    PhaseBegan,
    StepsDone,
)
from harness.records import (
    ActivitySample,
    Evidence,
    Measurement,
    MeasureSettings,
    Outcome,
    OverSteps,
    Program,
    Steps,
)
from harness.records.measured import MAX_DETAIL_BYTES
from harness.runner import evidence, telemetry, watchdog
from harness.runner.evidence import LEFT_OUT, LOG_HEAD_BYTES, LOG_TAIL_BYTES
from harness.runner.forkserver import Worker
from harness.runner.joined import Ending, joined
from harness.runner.watchdog import RunObserver, Story
from harness.tests.workers import QUICK, Counter, make_case

AT = 1000.0
"""time.monotonic at the launch."""
IDLE = ActivitySample(at_s=0.0, cpu_s=0.0, io_bytes=0, rss_bytes=0)


def reported(*steps_s: float, settings: MeasureSettings = QUICK, phase: str = "warmup") -> Story:
    """A process that reported these steps, one after the other, from the launch on."""
    story = Story(AT, make_case("good", settings=settings), 0, lambda: IDLE, RunObserver())
    story.hear(PhaseBegan(name="setup", at=AT), AT)
    story.hear(Built(tokens=64, flops=128, bytes=256), AT)
    story.hear(PhaseBegan(name=phase, at=AT), AT)
    for count in range(1, len(steps_s) + 1):
        spent_s = sum(steps_s[:count])
        report = StepsDone(steps=count, spent_s=spent_s, shortest_s=min(steps_s[:count]))
        story.hear(report, AT + spent_s)
    return story


def after(story: Story, seconds: float) -> Ending:
    """How it ended so long after the launch; it had not ended just before."""
    assert story.ending(AT + seconds - 0.01, None) is None
    ending = story.ending(AT + seconds + 0.01, None)
    assert ending is not None
    return ending


def recorded(story: Story, ending: Ending) -> Measurement:
    """What is recorded of a process that ended so."""
    return joined(story.answered, ending, Path("logs/x.log"))


@pytest.mark.parametrize(
    ("steps_s", "timeout_s", "phase", "said", "bound_s", "steps"),
    [
        ((1.0, 1.0), 2.5, "warmup", "slow: not done in 2.5 s, set timeout_s to 5 or more", 1.0, 2),
        ((1.0, 0.1), 1.8, "warmup", "no step finished in 0.71 s", 0.1, 2),  # the first one is cold
        ((), 1.0, "warmup", "no step finished in 1.01 s, in warmup; no step is known", 0.9, 0),
        ((), 0.5, "accuracy", "no step finished in 0.51 s, in accuracy", None, None),
    ],
)
def test_a_timeout_says_how_slow_the_steps_are_and_bounds_one(
    steps_s: Sequence[float], timeout_s: float, phase: str, said: str, bound_s: float | None,
    steps: int | None,
) -> None:  # fmt: skip
    story = reported(*steps_s, settings=replace(QUICK, timeout_s=timeout_s), phase=phase)

    m = recorded(story, after(story, timeout_s))

    assert (m.outcome, m.detail.startswith(said)) == (Outcome.TIMEOUT, True), m.detail
    assert m.lower_bound_s == (bound_s and pytest.approx(bound_s, abs=0.02))
    assert m.evidence
    assert (m.evidence.phase, m.evidence.steps, m.evidence.frame) == (phase, steps, "")
    assert (m.tokens, m.flops, m.bytes) == (64, 128, 256), "a bound on the time bounds the rate"


@pytest.mark.parametrize(("until", "first"), [("exit", "add until: sampled"), ("sampled", "set")])
def test_a_slow_program_may_end_once_it_is_sampled(until: str, first: str) -> None:
    story = reported(1.0, 1.0, settings=replace(QUICK, timeout_s=2.5))
    program = Program(argv=("x",), steps=Steps(step="s", until=until))
    story._case = replace(story._case, program=program)

    assert recorded(story, after(story, 2.5)).detail.startswith(
        f"slow: not done in 2.5 s, {first} "
    )


@pytest.mark.parametrize(
    ("phase", "since_s", "gpu_used_s", "bound_s"),
    [
        ("setup", 2.0, None, 6.0),
        ("setup", None, 3.0, 5.0),
        ("setup", 2.0, 3.0, 5.0),  # it printed while it loaded something
        ("setup", 3.0, 2.0, 5.0),
        ("setup", None, None, None),
        ("warmup", 2.0, 3.0, 6.0),  # since the last step of setup
        ("profile", 2.0, 3.0, None),
    ],
)
def test_the_first_step_of_a_program_begins_with_its_output_or_its_use_of_a_gpu(
    phase: str, since_s: float | None, gpu_used_s: float | None, bound_s: float | None
) -> None:
    story = reported(settings=replace(QUICK, timeout_s=8.0), phase=phase)
    story._case = replace(story._case, program=Program(argv=("x",), steps=Steps(step="s")))
    story.gpu_used_at = AT + gpu_used_s if gpu_used_s else None
    for heard_s in (2.0, 7.0):  # a later line begins no step
        since = AT + since_s if since_s else None
        line = StepsDone(steps=0, spent_s=0.0, shortest_s=0.0, since=since)
        story.hear(line, AT + heard_s)

    found = after(story, 8.0).lower_bound_s

    assert found == (bound_s and pytest.approx(bound_s - watchdog.UNREPORTED_S, abs=0.02))


def part(*steps: int, **values: tuple[float, ...]) -> OverSteps:
    times_s = tuple(float(n) for n in steps)
    return OverSteps(step=steps, step_s=times_s, end_s=times_s, values=values)


def test_the_steps_of_a_process_without_an_answer_are_kept_and_those_of_its_ranks() -> None:
    story = reported(1.0, settings=replace(QUICK, timeout_s=9.0))
    bad = replace(part(4, loss=(1.0,), grad_norm=(5.0,)), not_finite={"grad_norm": (3, 4)})
    for at, over_steps in ((2, part(1, 2, loss=(3.0, 2.0))), (3, part(3)), (4, bad)):
        times = {"steps": at, "spent_s": float(at), "shortest_s": 1.0, "rank_steps": (19, 0)}
        story.hear(StepsDone(over_steps=over_steps, **times), AT + at)  # type: ignore[arg-type]

    m = recorded(story, after(story, 9.0))

    loss, norm = (3.0, 2.0, None, 1.0), (None, None, None, 5.0)
    whole = replace(part(1, 2, 3, 4), values={"loss": loss, "grad_norm": norm})
    assert m.outcome is Outcome.TIMEOUT
    assert m.over_steps == replace(whole, not_finite={"grad_norm": (3, 4)})
    assert OverSteps.joined([part(1), part(2)]) is None, "no value was reported"
    assert [r.steps for r in m.ranks] == [19, None], "one showed no step"


TWO_S = {"samples_s": (1.0, 1.0), "host_samples_s": (1.0, 1.0), "samples_at_s": (0.0, 1.0)}
GOOD = Measurement(case_id="good", process=0, outcome=Outcome.OK, **TWO_S)  # type: ignore[arg-type]
FAILED = replace(GOOD, evidence=Evidence(phase="run", steps=2))
FAILED = FAILED.without_samples(Outcome.NON_FINITE, "loss")


def test_a_phase_that_begins_again_is_one_phase_from_then_on() -> None:
    story = reported()
    for at in (AT + 1, AT + 2):
        story.hear(PhaseBegan(name="sampling", at=at), at)

    phases = [(p.name, p.start_s, p.end_s) for p in story.phases(AT + 3)]

    assert phases[-2:] == [("warmup", 0, 2), ("sampling", 2, 3)]
    with pytest.raises(Garbled):
        story.hear(PhaseBegan(name="lunch", at=AT), AT)


@pytest.mark.parametrize("at", [-1e300, math.nan, 1e300])
def test_a_phase_begins_between_the_one_before_it_and_now(at: float) -> None:
    story = reported(0.5)
    story.hear(PhaseBegan(name="sampling", at=at), AT + 1)

    lengths = [p.end_s - p.start_s for p in story.phases(AT + 3)]

    assert min(lengths) >= 0
    assert sum(lengths) == 3


def watched(
    folder: Path,
    *messages: Message,
    probe: Counter | None = None,
    settings: MeasureSettings = QUICK,
    survivors: int = 0,
) -> Measurement:
    """What is recorded of a process that sent these messages and ended."""
    answers, end = os.pipe()
    os.set_blocking(answers, False)
    for message in messages:
        Channel(end).send(message)
    os.close(end)
    worker = SimpleNamespace(
        pid=os.getpid(), answers=answers, launched_at=time.monotonic(), cold=True,
        exit_code=0, wait=lambda **_: None, closed_pipe=False, end=lambda: survivors,
    )  # fmt: skip
    (folder / "x.log").touch()
    return watchdog.watch(
        cast("Worker", worker), make_case("good", settings=settings), 0,
        log=folder / "x.log", probes=[probe] if probe else [], observer=RunObserver(),
    )  # fmt: skip


def test_an_answer_is_joined_to_what_the_parent_saw(tmp_path: Path) -> None:
    done, probe = StepsDone(steps=1, spent_s=0.5, shortest_s=0.5), Counter()
    answer = Answer(measurement=replace(FAILED, effective={"name": "a\udc80"}))  # no Unicode

    m = watched(tmp_path, done, answer, probe=probe, survivors=2)

    said = "loss; 2 processes survived SIGKILL"
    assert (m.outcome, m.detail) == (Outcome.NON_FINITE, said)
    assert m.effective == {"name": "a?", "start": "cold"}
    assert m.telemetry
    assert len(m.telemetry.t_s) == probe.readings == 1
    assert m.evidence
    assert (m.evidence.phase, m.evidence.steps) == ("run", 2)


def test_samples_taken_while_the_gpu_was_throttled_are_marked_and_kept(tmp_path: Path) -> None:
    class Throttled(Counter):
        def read(self) -> Mapping[str, float | None]:
            return {"gpu_throttle_reasons": float(0x40)}

    m = watched(tmp_path, Answer(measurement=GOOD), probe=Throttled())

    assert (m.outcome, m.discarded) == (Outcome.OK, {"throttled": (0, 1)})
    assert (m.samples_s, m.kept_s, m.is_evidence(2)) == ((1.0, 1.0), (), False)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([Answer(measurement=GOOD)] * 2, "unexpected answer"),
        ([Answer(measurement=replace(GOOD, case_id="next"))], "for another process"),
        ([Answer(measurement=replace(GOOD, process=1))], "for another process"),
        ([Answer(measurement=replace(FAILED, case_id="next"), final=False)], "for another process"),
    ],
)
def test_a_second_answer_or_one_for_another_process_is_a_crash(
    tmp_path: Path, messages: Sequence[Message], said: str
) -> None:
    m = watched(tmp_path, *messages)

    assert (m.case_id, m.process, m.outcome, m.samples_s) == ("good", 0, Outcome.CRASH, ())
    assert said in m.detail


def test_a_long_detail_keeps_its_head_and_its_tail() -> None:
    m = replace(FAILED, detail=f"ValueError: {'µ' * 10**6}; killed")

    assert m.detail.startswith("ValueError: µµ")
    assert m.detail.endswith("µ; killed")
    assert len(m.detail.encode()) <= MAX_DETAIL_BYTES
    assert replace(m) == m


def test_the_log_of_a_workload_keeps_its_head_and_its_tail(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_bytes(b"head" + bytes(LOG_HEAD_BYTES + 2 * LOG_TAIL_BYTES) + b"tail")

    watched(tmp_path, Answer(measurement=FAILED))

    log = (tmp_path / "x.log").read_bytes()
    assert len(log) == LOG_HEAD_BYTES + len(LEFT_OUT) + LOG_TAIL_BYTES
    assert (log[:4], log[-4:]) == (b"head", b"tail")
    evidence.cut_log(tmp_path / "gone/x.log")  # of a run that somebody removed
    assert evidence.raised_in(tmp_path / "gone/x.log", None) == ""


def test_a_process_that_answered_has_time_to_exit() -> None:
    story = reported(0.5)
    story.hear(Answer(measurement=FAILED), AT + 1.0)

    ending = after(story, 1.0 + watchdog.EXIT_S)

    assert (ending.outcome, recorded(story, ending).outcome) == (None, Outcome.NON_FINITE)


def test_a_line_without_an_end_is_read_in_linear_time_with_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "read", lambda _, size: b"x" * size)
    reader, looks, began_s = MessageReader(0), 0, time.process_time()

    with suppress(Garbled):
        for looks in itertools.count():  # noqa: B007
            reader.drain(lambda _: None)

    assert looks == MAX_LINE_BYTES // MAX_DRAIN_BYTES
    assert time.process_time() - began_s < 3.0, "0.05 s; a quadratic reader takes ten"


def recorder_of(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> tuple[SimpleNamespace, telemetry.Recorder]:
    """A recorder, and its clock."""
    clock = SimpleNamespace(now=AT)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(telemetry, "time", clock)
    worker = cast("Worker", SimpleNamespace(pid=1, launched_at=AT))
    return clock, telemetry.Recorder([probe], worker)


@pytest.mark.parametrize(
    ("readings", "used_s"),
    [
        ([{"gpu_utilisation": 0.0}, {"gpu_utilisation": 0.3}], 2.0),
        ([{"gpu_utilisation": 0.0}, {"gpu1_utilisation": 0.3}], 2.0),
        ([{"gpu_utilisation": 0.3, "gpu_foreign_processes": 1.0}], None),
        ([{"cpu_utilisation": 1.0, "gpu_utilisation": None}], None),
    ],
)
def test_the_first_use_of_a_gpu_is_that_of_the_worker(
    monkeypatch: pytest.MonkeyPatch, readings: list[dict[str, float | None]], used_s: float | None
) -> None:
    before = {"gpu_utilisation": 1.0}  # of the process before, whose mean NVML still has
    left = [before, *readings, {}, {}]
    probe = cast("Probe", SimpleNamespace(attach=lambda _: None, read=lambda: left.pop(0)))
    clock, recorder = recorder_of(probe, monkeypatch)

    for _ in range(3):
        recorder.read_if_due()
        clock.now += 1.0

    assert recorder.gpu_used_at == (used_s and AT + used_s)


def test_probes_are_read_at_intervals_without_catching_up(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Counter()
    clock, beat = recorder_of(probe, monkeypatch)

    for _ in range(100):
        clock.now += telemetry.PROBE_INTERVAL_S / 4
        beat.read_if_due()
    on_time = probe.readings
    clock.now += 10.0
    for _ in range(3):
        beat.read_if_due()

    assert on_time in (25, 26)
    assert probe.readings <= on_time + 2
    assert len(beat.telemetry().t_s) == probe.readings
