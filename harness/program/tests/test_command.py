"""A program is run unchanged and measured by its output."""

from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from harness.messages import MeasureOrder, StepsDone
from harness.program import command
from harness.program.process import FATAL, TRACEBACK, Lines, Read, Tail
from harness.program.reported import ProgramSteps, Step
from harness.records import Clock, MeasureSettings, Outcome
from harness.runner.launcher import Launcher
from harness.tests.commands import LOSS, STEPS, asked, measured, run, steps_of, suite_of
from harness.tests.faulty import evidence_of

# --- samples and metrics -----------------------------------------------------------------


def test_times_between_progress_lines_are_the_samples_and_keep_their_metrics(
    warm: Launcher, tmp_path: Path
) -> None:
    program = """
for i in range(1, 13):
    time.sleep(0.02)
    if i == 5: print("norm 3")
    print(f"step {i} loss {1 / i}")
"""
    norm = "grad_norm: {line: 'norm (?P<value>\\S+)', unit: '1', better: lower}"
    m = measured(warm, tmp_path, program, STEPS, LOSS[:-1] + f", {norm}}}", "tokens: [4, 8]")

    readings, seen = (*m.warmup_s, *m.samples_s), steps_of(m)
    assert (m.outcome, m.detail, m.clock) == (Outcome.OK, "", Clock.HOST)
    assert len(readings) == 11  # the first line ends the setup
    assert np.median(readings) > 0.01  # a line read late shortens the next reading
    assert sum(readings) < m.wall_s
    assert (m.tokens, m.effective["timed_by"]) == (32, "progress lines")
    assert [p.name for p in m.phases] == ["start", "setup", "warmup", "sampling"]
    assert m.samples_at_s[0] == pytest.approx(m.phases[-1].start_s, abs=1e-6)
    losses = m.readings["loss"]
    assert losses == tuple(pytest.approx(1 / i) for i in range(13 - len(losses), 13))
    assert "step 12" in (tmp_path / m.log).read_text()
    assert seen.step == tuple(range(2, 13))
    assert seen.step_s == pytest.approx(readings)
    assert seen.values["loss"] == pytest.approx([1 / i for i in seen.step])
    assert seen.values["grad_norm"] == tuple(3.0 if i == 5 else None for i in seen.step)
    assert 0 < seen.end_s[0] < seen.end_s[-1] < m.wall_s


class Session:
    """A program whose lines are made up, and what its worker reports; the clock is the test's."""

    def __init__(self, progress: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Any] = []
        (case,) = suite_of("", folder, progress, LOSS).cases
        assert case.program
        order = MeasureOrder(case=case, process=0, launched_at=0.0)
        self.own = command._Session(case.program, order, Mock(send=self.sent.append))
        self.now = 1000.0
        for clock in ("harness.messages.monotonic", "harness.program.command.time.monotonic"):
            monkeypatch.setattr(clock, lambda: self.now)

    def prints(self, *lines: str, after: float) -> None:
        self.now += after
        read = Read(self.now, lines, False, b"")
        self.own._report(read, self.own.own.take(read))


def test_the_last_of_quick_steps_are_reported_while_none_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines have no number of their own, and come too fast to be reported one by one."""
    session = Session("progress: {step: '^step'}", tmp_path, monkeypatch)

    for _ in range(42):
        session.prints("step loss 1", after=0.012)
    session.prints(after=0.5)

    kept = [m.over_steps.step for m in session.sent if getattr(m, "over_steps", None)]
    assert [*chain(*kept)] == [*range(2, 43)]  # the first line ends the setup


def test_the_unfinished_step_begins_with_the_first_line_or_the_end_of_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is reported at once: no other line may follow."""
    session = Session("progress: {step: '^step', setup_steps: 3}", tmp_path, monkeypatch)

    began: list[float | None] = []
    for lines in ((), ("loading",), ("loaded",), ("step",), ("of 3",), ("step",)):
        session.prints(*lines, after=0.02)
        done = [m.since for m in session.sent if isinstance(m, StepsDone)]
        began.append(done[-1] if done else None)

    assert began == [None, *map(pytest.approx, (1000.04, 1000.04, 1000.08, 1000.08, 1000.12))]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_program_whose_step_does_not_end_has_a_bound_on_it(
    warm: Launcher, tmp_path: Path, steps: int
) -> None:
    """The time before its first line, and of a step of setup, is not in the bound."""
    program = """
time.sleep(1)
print("loaded", flush=True)
for i in range(STEPS):
    time.sleep(1)
    print(f"step {i}", flush=True)
while True: pass
"""
    progress = r"progress: {step: 'step (?P<step>\d+)', setup_steps: 2}"
    limits = "measure: {timeout_s: 6}"

    m = measured(warm, tmp_path, program.replace("STEPS", str(steps)), progress, limits)

    assert m.outcome is Outcome.TIMEOUT
    assert 0 < (m.lower_bound_s or 0) < m.wall_s - 1 - steps
    assert (evidence_of(m).working, m.tokens) == (True, None)


def test_a_reported_step_time_is_the_sample(warm: Launcher, tmp_path: Path) -> None:
    program = "for i in range(9): print(f'it {i} took {i + 100} ms')"
    progress = r"progress: {step: 'it (?P<step>\d+) took (?P<step_ms>\d+) ms', setup_steps: 2}"

    m = measured(warm, tmp_path, program, progress)

    assert (*m.warmup_s, *m.samples_s) == tuple(pytest.approx(0.1 + i / 1e3) for i in range(2, 9))


IN_PROGRESS = (r"progress: 'step (?P<step>\d+) took (?P<step_s>\S+)'",)
AS_A_METRIC = (STEPS, r"metrics: {step_s: {line: 'took (?P<value>\S+)'}}")


@pytest.mark.parametrize(
    ("share", "lines", "every", "noted"),
    [
        (0.95, IN_PROGRESS, 1, None),
        (0.65, IN_PROGRESS, 3, pytest.approx(0.65, abs=0.12)),
        (0.65, AS_A_METRIC, 1, pytest.approx(0.65, abs=0.12)),
        (0.95, AS_A_METRIC, 3, None),
    ],
)
def test_time_that_a_program_leaves_out_of_its_steps_is_noted(
    share: float, lines: tuple[str, ...], every: int, noted: object, warm: Launcher, tmp_path: Path
) -> None:
    program = f"""
last = time.perf_counter()
for i in range(0, {12 * every}, {every}):
    time.sleep(0.03)
    now = time.perf_counter()
    print("step", i, "took", {share / every} * (now - last))
    last = now
time.sleep(0.5)  # a checkpoint after the last step
"""
    m = measured(warm, tmp_path, program, *lines)

    assert (m.outcome, m.effective.get("timed_share")) == (Outcome.OK, noted)


def test_an_exception_before_exit_status_0_is_noted(warm: Launcher, tmp_path: Path) -> None:
    program = """
import logging
try:
    for i in range(9):
        time.sleep(0.02); print("step", i)
    raise KeyError from ValueError('a\\n b')
except Exception:
    logging.exception("failed")
print("done")
"""
    m = measured(warm, tmp_path, program, STEPS)

    assert (m.outcome, m.effective.get("raised")) == (Outcome.OK, "KeyError")


@pytest.mark.parametrize(
    ("before", "between", "raised"),
    [
        ("step 2", "step 3 loss 2.0", "mine.BadShard: y"),
        ("step 2", "loss: 2.0", "mine.BadShard: y"),
        ("Exception ignored in: <function Loader.__del__ at 0x7f>", "    pass", ""),
        ("Exception ignored in: x", f"{FATAL}Segmentation fault", f"{FATAL}Segmentation fault"),
    ],
)
def test_the_exception_is_the_last_line_of_its_traceback(
    before: str, between: str, raised: str
) -> None:
    tail = Tail()
    lines = (before, f"{TRACEBACK}:", "  File", between, "mine.BadShard: y", "x: 1")
    tail.add(Read(0.0, (*lines, "", "Extension modules: numpy (total: 1)"), True, b""))

    assert (tail.raised, tail.last) == (raised, "x: 1")


def test_a_program_is_ended_once_there_are_enough_samples(warm: Launcher, tmp_path: Path) -> None:
    program = """
i = 0
while True:
    i += 1; time.sleep(0.005); print("step", i)
"""
    m = measured(warm, tmp_path, program, STEPS[:-1] + ", until: sampled}")

    assert m.outcome is Outcome.OK
    assert 3 <= len(m.samples_s) <= 20
    assert "samples_cut" not in m.effective


def test_metrics_come_from_json_lines(warm: Launcher, tmp_path: Path) -> None:
    program = """
print("{not json}")
for i in range(4):
    print(json.dumps({"train": {"ms": 10 + i}, "x": 5 + i}))
print("RESULT " + json.dumps({"speed": [7, 8]}), file=sys.stderr)
"""
    m = measured(
        warm, tmp_path, program,
        "metrics:",
        "  step_s: {json: train.ms, scale: 0.001}",
        "  speed: {json: speed.1, prefix: 'RESULT', unit: x, better: higher}",
        "  tokens: {json: x, unit: tokens, better: higher, scale: 2}",
    )  # fmt: skip

    assert (*m.warmup_s, *m.samples_s) == tuple(pytest.approx(0.01 + i / 1e3) for i in range(4))
    assert m.readings == {"speed": (8.0,), "tokens": (10.0, 12.0, 14.0, 16.0)}
    assert m.tokens == 13, "of a step, for the suite does not state them"


def test_axes_are_arguments_and_variables(warm: Launcher, tmp_path: Path) -> None:
    """How a suite expands them: harness/suite/tests/expanded.txt."""
    program = "import os, sys, json\nn = int(os.environ['SIZE']) + len(sys.argv)\n"
    (tmp_path / "program.py").write_text(f"{program}print(json.dumps({{'n': n}}))\n")
    suite = asked(
        "command: '{python} program.py --n={n} {fast:--fast}'",
        f"cwd: {tmp_path}",
        "axes: {n: 6, SIZE: 7, fast: true}",
        "metrics: {n: {json: n, unit: x, better: higher}}",
    )

    assert run(warm, tmp_path, suite).readings["n"] == (7 + 3,)
    more = asked("command: x {n} {r}", "tokens: [n, r]", "gpus: r", "axes: {n: 6, r: [1, 2]}")
    assert [c.program.work_axes for c in more.cases if c.program] == [("n",)] * 2


# --- output ------------------------------------------------------------------------------


def test_a_flood_of_output_is_bounded_in_memory_and_log(warm: Launcher, tmp_path: Path) -> None:
    program = """
block = ("x" * 999 + "\\n") * 1000
for i in range(1, 16):
    sys.stdout.write(block); print("step", i)
sys.stdout.write("\\rloss 0.5" + "y" * 5_000_000)
"""
    m = measured(warm, tmp_path, program, STEPS, LOSS.replace(r"\S+", r"[\d.]+"))

    assert m.outcome is Outcome.OK
    assert m.readings["loss"] == (0.5,), "the last line needs no end"
    assert len(m.warmup_s) + len(m.samples_s) == 14
    log = (tmp_path / m.log).read_bytes()
    assert len(log) < 13 * 2**20
    assert (log[:3], log[-1000:]) == (b"xxx", b"y" * 1000)
    assert b"left out output" in log


def test_lines_are_cut_at_any_end_and_at_their_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.program.process.MAX_LINE_BYTES", 8)
    lines = Lines()

    chunks = (b"one\r\ntw", b"o\rthree\n\n", b"x" * 20, b"yy\nend", b"", b"")
    found = [line for chunk in chunks for line in lines.feed(chunk)]

    assert found == ["one", "two", "three", "x" * 8, "end"]


def test_descendants_that_outlive_the_program_are_ended(warm: Launcher, tmp_path: Path) -> None:
    program = """
import subprocess
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
print("RESULT", json.dumps({"pid": child.pid}))
"""
    metrics = "metrics: {pid: {json: pid, prefix: RESULT, unit: x, better: higher}}"
    m = measured(warm, tmp_path, program, metrics)

    assert not psutil.pid_exists(int(m.readings["pid"][0]))
    (sample_s,) = m.samples_s
    assert sample_s < m.wall_s < 600, "the harness waited for its pipe"
    assert (m.effective["timed_by"], m.steady) == ("the whole program", None)


# --- the series --------------------------------------------------------------------------


def test_lines_that_arrive_together_share_their_time() -> None:
    series = ProgramSteps(MeasureSettings(), setup_steps=1)

    assert series.add([Step(1, None)], 10.0) == []
    assert series.add([Step(2, None), Step(3, None)], 10.5) == [0.25, 0.25]
    assert series.add([Step(0, None)], 11.0) == []  # the count restarts
    assert series.add([Step(1, None)], 11.125) == [0.125]
    assert list(series.time_s) == [0.25, 0.25, 0.125]
    assert list(series.began_at) == [10.0, 10.25, 11.0]


def test_lines_that_report_several_steps_are_recognised() -> None:
    series = ProgramSteps(MeasureSettings(), setup_steps=1)
    for number, count in enumerate((None, 1, 2, 2, 1, 2)):
        series.add([Step(count, None)], 10.0 + number)
    assert series.one_by_one

    series.add([Step(12, None)], 20.0)

    assert series.time_s[-1] == 0.5, "the mean of ten"
    assert not series.one_by_one
