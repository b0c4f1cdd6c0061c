"""Jobs of a real Slurm, which ci/slurm.sh starts; a profile file is read without one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness.errors import HarnessError
from harness.executor import slurm
from harness.executor.jobs import Attempt, CaseBlock
from harness.store import reader

pytest.importorskip("submitit")
RIG = os.environ.get("HARNESS_TEST_SLURM", "")
HOW = "no Slurm: ci/slurm.sh start FOLDER, then set HARNESS_TEST_SLURM=FOLDER"
needs_slurm = pytest.mark.skipif(not RIG, reason=os.environ.get("HARNESS_NO_SLURM", HOW))
SCRIPT = Path(__file__).parents[3] / "ci/slurm.sh"
SUITE = r"""
schema: 1
title: Two cases
subject: Two Cases
question: Do both end?
device: cpu
workloads:
  - name: wait
    command: "{python} wait.py {length_s}"
    axes: {length_s: [0.01, 0.02]}
    progress: 'step (?P<step>\d+)'
    # It waits for the test, however slow that is.
    measure: {processes: 1, profile: false, telemetry: false, stall_s: 3000, timeout_s: 3000}
"""
PROGRAM = """
import pathlib, sys, time
for step in range(1, 15):
    time.sleep(float(sys.argv[1]))
    print("step", step, flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.1)
"""
LIMIT_S = 150
"""Of a test, whatever it waits for; 20 s on two idle cores."""
LATE: list[str] = []
"""Why later tests are not tried: each would take as long."""
RUNS: list[subprocess.Popen[bytes]] = []


def too_long(*_: object) -> None:
    """Called by SIGALRM."""
    LATE.append(f"an earlier test did not end in {LIMIT_S} s")
    said = [f"no end after {LIMIT_S} s"]
    for command in ("squeue --states=all", "sinfo -N -l", "tail -n20 output"):
        words = ["timeout", "10", *command.split()]
        end = subprocess.run(words, capture_output=True, text=True, check=False)
        said += [command, end.stdout + end.stderr]
    pytest.fail("\n".join([*said, f"more: {RIG}/slurmctld.log, {RIG}/slurmd.log"]))


def wait_for(what: Callable[[], object]) -> None:
    while not what():
        time.sleep(0.1)


def output(*command: object) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def states(*options: str) -> dict[str, str]:
    lines = output("squeue", "-h", "--array", "--format=%i %T", *options).splitlines()
    return dict(line.split() for line in lines)


@pytest.fixture(autouse=True)
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("SLURM_CONF", f"{RIG}/slurm.conf")
    monkeypatch.setattr(slurm, "CONTROLLER_POLL_S", 0.01)
    monkeypatch.chdir(tmp_path)
    if LATE:
        pytest.skip(LATE[0])
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    Path("go").touch()  # for programs that Slurm lost
    for process in RUNS:
        process.kill()
        process.wait()
    RUNS.clear()
    if RIG:
        subprocess.run(["timeout", "10", "scancel", "--user=root", "--quiet"], check=False)


def run(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "harness", "run", *arguments, "--no-report", "--store", "st"]
    with Path("output").open("a") as said:
        RUNS.append(subprocess.Popen(command, stdout=said, stderr=said))
    return RUNS[-1]


def measuring() -> list[str]:
    """Ids of the jobs whose programs wait for the file `go`."""
    logs = [log for log in Path("st").glob("*/blocks/*/*/logs/*.log") if "14" in log.read_text()]
    slots = [Path(f"{log.parents[2]}.slot") for log in logs]
    return [slot.read_text().split()[-1] for slot in slots if slot.exists() and slot.read_text()]


@needs_slurm
def test_a_run_survives_the_end_of_the_controller_of_a_job_and_of_the_coordinator() -> None:
    Path("s.yaml").write_text(SUITE)
    Path("wait.py").write_text(PROGRAM)
    Path("profile.yaml").write_text("jobs: 2\npartition: low\ntime_min: 60\n")
    profile = ("--profile-file", "profile.yaml", "--no-self-test")
    coordinator = run("s.yaml", "--executor", "slurm", *profile)
    wait_for(lambda: len(measuring()) == 2)
    kept, lost = measuring()
    # A controller that dies before it has saved what runs, up to 5 s later, loses these jobs: it
    # gives their ids away, and drains the node on which they still run.
    at = time.time()
    output("scontrol", "update", f"jobid={kept}", "comment=save")
    wait_for(lambda: Path(RIG, "state/job_state").stat().st_mtime > at)
    os.kill(int(Path(RIG, "slurmctld.pid").read_text()), signal.SIGKILL)
    output(SCRIPT, "controller", RIG)
    output("scancel", lost)
    wait_for(lambda: {*measuring()} - {kept, lost})  # the second try
    (second,) = {*measuring()} - {kept, lost}
    coordinator.kill()
    coordinator.wait()

    slots, at = [*Path("st").glob("*/blocks/*.slot")], time.time()
    resumed = run("--resume", "latest")
    wait_for(lambda: sum(slot.stat().st_mtime > at for slot in slots) == 2)  # it has both jobs
    Path("go").touch()

    assert resumed.wait() == 0
    assert f"; tried again: Slurm job {lost}: CANCELLED" in Path("output").read_text()
    assert [m.outcome for m in reader.load(Path("st"), "latest").measurements] == ["ok", "ok"]
    assert {states("--states=all")[job] for job in (kept, second)} == {"COMPLETED"}


def executor(**profile: object) -> slurm.SlurmExecutor:
    form = slurm.SlurmProfile.model_validate({"gres": "none", "jobs": 2, **profile})
    made = slurm.SlurmExecutor(form, print)
    made.recover(Path("RUN/blocks"))
    return made


def attempts(count: int, *, alone: bool = False) -> list[Attempt]:
    block = CaseBlock(name="b", case_ids=("a",), expected_s=1.0, limit_s=60.0, alone=alone)
    return [Attempt(block=block, folder=Path(f"b{i}"), suite="none.yaml") for i in range(count)]


@needs_slurm
def test_a_lost_job_has_slurms_state_and_a_cancelled_array_leaves_none() -> None:
    first, second = executor(setup=["sleep 100"]).start(attempts(2))
    assert first.job_id.partition("_")[0] == second.job_id.partition("_")[0]  # one array
    wait_for(lambda: [*states().values()].count("RUNNING") == 2)
    output("scancel", first.job_id)
    wait_for(first.poll)
    assert (end := first.poll())
    assert (end.lost, end.status, end.detail) == (True, None, f"{first.slot}: CANCELLED")
    assert second.poll() is None
    second.cancel()
    wait_for(lambda: not states())


@needs_slurm
def test_a_block_alone_gets_a_whole_node_and_a_refusal_its_status() -> None:
    made = executor(setup=["echo $SLURM_JOB_GPUS > gpus"])
    (job,) = made.start(attempts(1, alone=True))
    wait_for(job.poll)
    assert Path("gpus").read_text() == "0,1\n"
    assert (end := job.poll())
    assert end.status == 2
    assert "exit status 2: error: " in end.detail
    # It does without its node, if there is another.
    (again,) = made.start([replace(a, avoid=job.slot) for a in attempts(1, alone=True)])
    wait_for(again.poll)
    assert made.nodes[job.job_id] == made.nodes[again.job_id] != ""
    with pytest.raises(HarnessError, match="Slurm refuses"):
        executor(partition="none").start(attempts(1))


def test_it_submits_what_may_run_and_waits_for_a_controller_and_cancels_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    does = {
        "squeue": "echo '6|PREEMPTED|node5|None\n7|RUNNING|node7|None\n8|PENDING||Priority'",
        "sbatch": "cat $1 > sbatch-got; echo Submitted batch job 9",
    }
    for name in ("srun", "scontrol", "scancel", *does):
        jobs = does.get(name, f"echo $* > {name}-got")
        Path(name).write_text(f"#!/bin/sh\n[ -e {tmp_path}/up ] || exit 1\n{jobs}\n")
        Path(name).chmod(0o755)
    profile = slurm.SlurmProfile(jobs=2, sbatch={"exclude": "node6"})
    made = slurm.SlurmExecutor(profile, lambda _: Path("up").touch())
    made.recover(tmp_path)
    assert made.slots() == ["Slurm job 7", "Slurm 1"]  # it measures, and can go on
    assert Path("scancel-got").read_text() == "8\n"

    known, *lost = attempts(3)
    waiting = [replace(known, slot="Slurm job 7"), *(replace(a, avoid="Slurm job 7") for a in lost)]
    assert [job.job_id for job in made.start(waiting)] == ["7", "9"]  # two at once
    assert "--exclude=node6,node7" in Path("sbatch-got").read_text()
    assert made.nodes["6"] == ""  # it was not the fault of its node

    monkeypatch.setattr(slurm, "CANCEL_S", 0)
    monkeypatch.setattr(made, "_submit", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        made.start(attempts(1))
    assert "--name=harness-" in Path("scancel-got").read_text()

    Path("up").unlink()
    monkeypatch.setattr(slurm, "CONTROLLER_S", -1)
    with pytest.raises(HarnessError, match="did not answer"):
        made.states(now=True)


def test_a_job_that_slurm_does_not_run_is_said_after_a_minute_and_then_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", str)
    clock, said, lines = Mock(), list[str](), list[str]()
    monkeypatch.setattr(slurm, "time", clock)
    monkeypatch.setattr(slurm, "_output", lambda _: "\n".join(lines))
    made = slurm.SlurmExecutor(slurm.SlurmProfile(), said.append)
    made._mine.update("1234")

    def said_at(second: float, *queue: str) -> int:
        clock.monotonic.return_value = second
        lines[:] = ["1|RUNNING|node7|None", "2|PENDING||JobArrayTaskLimit", *queue]
        made.states(now=True)
        return len(said)

    held = "3|PENDING||JobHeldUser"
    assert [said_at(t) for t in (0, 100)] == [0, 0]
    assert [said_at(t, held) for t in (101, 159, 161, 1900, 1962)] == [0, 0, 1, 1, 2]
    assert "3 is PENDING: JobHeldUser; more: scontrol show job 3" in said[0]
    assert [said_at(2000), said_at(2001, "4|COMPLETING|node7|None")] == [2, 2]
    assert [said_at(2059, held), said_at(2061, held)] == [2, 3]
    assert [said_at(t, "5|PENDING||Priority") for t in (2062, 9000)] == [3, 3], "of another run"


def test_a_wrong_profile_or_no_slurm_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as bare:
        bare.setenv("PATH", "")
        with pytest.raises(HarnessError, match="squeue"):
            slurm.of("", print)
    Path("profile.yaml").write_text("partition: gpu\ntime_mins: 5\n")
    with pytest.raises(HarnessError, match=r"profile.yaml:2:1: unknown key 'time_mins'"):
        slurm.of("profile.yaml", print)
    for name, jobs in (("squeue", "true"), ("scontrol", "echo no controller >&2; exit 1")):
        Path(name).write_text(f"#!/bin/sh\n{jobs}\n")
        Path(name).chmod(0o755)
    monkeypatch.setenv("PATH", ".", prepend=":")
    with pytest.raises(HarnessError, match="Slurm does not answer: no controller"):
        slurm.of("", print)
