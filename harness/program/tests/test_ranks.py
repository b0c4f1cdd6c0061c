"""A program of several ranks: how it is started, measured and ended, and which rank failed."""

import os
from pathlib import Path

import pytest

from harness.program.process import Read
from harness.program.ranks import SETTLE_S, RankOutput
from harness.records import Outcome
from harness.runner import evidence
from harness.runner.launcher import Launcher
from harness.tests.commands import LOSS, STEPS, measured, suite_of
from harness.tests.faulty import LeapingClock, evidence_of

TWO = "world_size: 2"
ABORTS = "import atexit; atexit.register(os.abort); raise OSError('no data')"
RANK = "rank = int(os.environ['RANK'])\n"
GLOO = """
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")

def step(i):
    dist.all_reduce(torch.ones(1))
    print("step", i)

"""


def test_each_rank_has_the_variables_of_torchrun_and_its_output_its_number(
    warm: Launcher, tmp_path: Path
) -> None:
    program = """
names = "OMP_NUM_THREADS WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR".split()
print(*(os.environ[n] for n in names), int(os.environ["MASTER_PORT"]) > 0)
for i in range(1, 13):
    time.sleep(0.01); print("step", i, "loss", 1 / (i + rank))
"""
    m = measured(warm, tmp_path, RANK + program, STEPS, LOSS, TWO, "tokens: [n, 8]", "axes: {n: 2}")

    assert m.outcome is Outcome.OK, m.detail
    log = (tmp_path / m.log).read_text()
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    for rank in (0, 1):
        assert f"[rank {rank}] {threads} 2 {rank} 2 127.0.0.1 True" in log
    assert [(r.rank, r.steps, r.ended) for r in m.ranks] == [(0, 12, ""), (1, 12, "")]
    assert all(r.step_s is not None and 0.005 < r.step_s < 1 for r in m.ranks)
    taken = len(m.warmup_s) + len(m.samples_s)
    assert 5 < taken < 12, "the samples are those of rank 0; lines that come together are one"
    assert m.readings["loss"][-1] == pytest.approx(1 / 12)


@pytest.mark.parametrize(
    ("fault", "outcome", "said"),
    [
        ("raise OSError('no data')", Outcome.CRASH, "rank 1 exited with 1, after its step 4: OS"),
        (ABORTS, Outcome.CRASH, "rank 1 was killed by SIGABRT, after its step 4: OSError: no data"),
        ("raise MemoryError", Outcome.OUT_OF_MEMORY, "rank 1 exited with 1, after its step 4: Mem"),
        ("print('step 5 loss nan'); hang()", Outcome.NON_FINITE, "rank 1: loss is nan"),
        ("print('step 5 loss x'); hang()", Outcome.UNSUPPORTED, "rank 1: loss: 'x' is not a numb"),
        ("sys.exit(0)", Outcome.CRASH, "rank 0 exited with 1, after its step 4: Runtime"),
    ],
)
def test_the_rank_that_fails_first_has_the_outcome_and_all_are_ended(
    warm: Launcher, tmp_path: Path, fault: str, outcome: Outcome, said: str
) -> None:
    """The others fail later, as collectives do without a peer, or hang."""
    program = f"""
def hang():
    import subprocess
    subprocess.run(["sleep", "60"])
for i in range(1, 5):
    time.sleep(0.01); print("step", i, "loss", 1)
open(f"{{rank}} is done", "w").close()
while sum(name.endswith(" is done") for name in os.listdir()) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if rank == 1:
    {fault}
if rank == 0:
    time.sleep({0.25 if "no data" in fault else 0})
    raise RuntimeError("Connection closed by peer")
hang()
"""
    m = measured(warm, tmp_path, RANK + program, STEPS, LOSS, f"world_size: {2 + (said[5] == '1')}")

    assert m.outcome is outcome, m.detail
    assert m.detail.startswith(said), m.detail
    assert evidence_of(m).rank == int(said[5])
    assert said[5] == "1" or m.detail.endswith("; rank 1 had ended, after its step 4")
    if "no data" in fault:
        lines = (tmp_path / "program.py").read_text().splitlines()
        line = 1 + next(i for i, text in enumerate(lines) if "no data" in text)
        assert evidence_of(m).frame == f"<module> (program.py:{line})"
    assert [r.steps for r in m.ranks] == [4, 4, 4][: len(m.ranks)]


def test_an_earlier_failure_than_a_garbled_line_is_awaited(tmp_path: Path) -> None:
    (case,) = suite_of("", tmp_path, STEPS, LOSS, TWO).cases
    assert case.program
    garbled = RankOutput(1, case.program, case.settings, 0.0)

    garbled.take(Read(10.0, ("step 5 loss x",), from_stderr=False, data=b"", rank=1))

    assert [garbled.is_first(10.0 + wait * SETTLE_S) for wait in (0.9, 1.1)] == [False, True]


@pytest.mark.parametrize(
    ("end", "said"),
    [  # every rank of nsa.train knows the losses of all
        ("sys.exit('error: the loss of rank 1 is nan\\n  Lower --lr.')", "the loss of rank 1 is"),
        ("print('step 2 took', 'nan' if rank else 1); time.sleep(60)", "rank 1: step_s is nan"),
    ],
)
def test_the_rank_that_has_nan_has_the_outcome(
    warm: Launcher, tmp_path: Path, end: str, said: str
) -> None:
    progress = r"progress: {step: 'step (?P<step>\d+) took (?P<step_s>\S+)'}"
    program = f"{RANK}print('step 1 took 1 loss 1')\n{end}"
    m = measured(warm, tmp_path, program, progress, LOSS, TWO)

    assert m.outcome is Outcome.NON_FINITE, m.detail
    assert m.detail.startswith(said), m.detail
    assert evidence_of(m).rank == 1


def test_a_rank_that_dies_before_there_are_enough_samples_is_not_overlooked(
    warm: Launcher, tmp_path: Path
) -> None:
    dead = tmp_path / "dead"
    program = f"""
dead = {str(dead)!r}
for i in range(1, 1000):
    if rank == 1 and i == 3:
        open(dead, "w").close()
        os._exit(3)
    while i == 3 and not os.path.exists(dead): time.sleep(0.01)
    time.sleep(0.02 if i < 4 else 0.2); print("step", i)
"""
    m = measured(warm, tmp_path, RANK + program, STEPS[:-1] + ", until: sampled}", TWO)

    assert m.detail.startswith("rank 1 exited with 3, after its step 2"), m.detail


def test_the_collective_of_a_dead_rank_fails_in_its_peer_which_is_not_the_first_cause(
    warm: Launcher, tmp_path: Path
) -> None:
    program = """
for i in range(1, 100):
    if rank == 1 and i == 13: os.kill(os.getpid(), 9)
    step(i)
"""
    m = measured(warm, tmp_path, GLOO + program, STEPS, TWO)

    assert m.outcome is Outcome.CRASH
    assert m.detail == "rank 1 was killed by SIGKILL, after its step 12: step 12"
    assert (evidence_of(m).rank, evidence_of(m).signal) == (1, "SIGKILL")
    assert [r.steps for r in m.ranks] == [12, 12]
    assert [r.ended for r in m.ranks][1] == "killed by SIGKILL"


def test_a_hang_names_the_rank_that_does_not_reach_the_collective(
    warm: Launcher, tmp_path: Path, clock: LeapingClock
) -> None:
    program = f"""
def read_data():
    time.sleep(0.5)
    os.close(os.open({str(clock.mark)!r}, os.O_CREAT))
    time.sleep(1000)
for i in range(1, 100):
    if rank == 1 and i == 6: read_data()
    step(i)
"""
    m = measured(warm, tmp_path, GLOO + program, STEPS, TWO, "measure: {timeout_s: 1000000}")

    assert m.outcome is Outcome.HANG
    assert "rank 1 is behind: the others wait in a collective" in m.detail, m.detail
    assert evidence_of(m).rank == 1
    assert evidence_of(m).frame.startswith("read_data (program.py:")
    assert [(r.steps, r.ended) for r in m.ranks] == [(5, "did not end")] * 2
    written = evidence.by_rank((tmp_path / m.log).read_text())
    assert "in all_reduce" in written[0]
    assert "in read_data" in written[1]


def test_ranks_that_do_not_print_their_steps_have_none(warm: Launcher, tmp_path: Path) -> None:
    """As under most trainers: only rank 0 prints."""
    program = """
for i in range(1, 9):
    time.sleep(0.01)
    if rank == 0: print("step", i)
"""
    m = measured(warm, tmp_path, RANK + program, STEPS, TWO)

    assert m.outcome is Outcome.OK, m.detail
    assert [(r.rank, r.steps, r.step_s) for r in m.ranks] == [(0, None, None), (1, None, None)]
