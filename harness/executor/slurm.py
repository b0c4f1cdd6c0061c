"""Blocks as jobs of Slurm, through submitit, from a node that shares the folder of the run.

All jobs of a run have one name in Slurm: one `squeue` says how they are, and a coordinator that is
started again finds them by it.
"""

import getpass
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from math import ceil
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from harness import units
from harness.errors import HarnessError
from harness.executor.hosts import last_words
from harness.executor.jobs import Attempt, JobEnd
from harness.suite.fields import Form, Text, Value, checked
from harness.suite.load import text_of
from harness.suite.positions import read

FOLDER = ".slurm"
"""Of submitit, in the folder of the attempts: arguments, logs and results of the jobs."""
MAX_ARRAY = 1000
"""Jobs of one array: one less than Slurm's own default of MaxArraySize."""
ASK_S, ASK_ONE_S = 2.0, 0.01
"""Time between two questions to the controller, and what each job adds."""
CANCEL_S = 60.0
"""Slurm kills what does not end within KillWait, 30 s by default."""
CONTROLLER_S, CONTROLLER_POLL_S = 30 * units.MINUTE_S, 2.0
"""How long a controller that does not answer is waited for."""
WAITING_S, WAITING_AGAIN_S = units.MINUTE_S, 30 * units.MINUTE_S
"""When it is said that Slurm does not run a job, and how long after it again."""
GONE = "unknown to Slurm"
ENDED = {
    GONE,
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "SPECIAL_EXIT", "TIMEOUT"),
}
NOT_THE_NODE = ("CANCELLED", "PREEMPTED")
"""States that say nothing about the node of a job."""
REFUSALS = 3
PING = "Ask it: scontrol ping. If its configuration is elsewhere, set SLURM_CONF."

Answer = TypeVar("Answer")


class SlurmProfile(Form):
    """A profile file: what the jobs of a run ask Slurm for."""

    jobs: Annotated[int, Field(ge=1)] = 8
    """At most this many run at once."""
    time_min: Annotated[int, Field(ge=1)] = 60
    """Longest time limit of a job."""
    partition: Text | None = None
    gres: Text = "gpu:1"
    """`none` on nodes without GPUs."""
    cpus_per_task: Annotated[int, Field(ge=1)] | None = None
    setup: list[Text] = Field(default_factory=list)
    """Shell lines before the harness starts."""
    sbatch: dict[str, Value] = Field(default_factory=dict)
    """Any other option of sbatch by its long name; `true` for one without a value."""


def measure(arguments: Sequence[str], log: str) -> int:
    """Run the harness on the node of a job; its exit status."""
    command = [sys.executable, "-m", "harness", *arguments]
    with Path(log).open("ab") as end:
        return subprocess.run(command, stdout=end, stderr=end, check=False).returncode


class SlurmJob:
    """One attempt in Slurm's queue; see harness.executor.jobs.Job."""

    def __init__(self, attempt: Attempt, executor: "SlurmExecutor", job_id: str) -> None:
        self.attempt, self.executor, self.job_id = attempt, executor, job_id
        self.slot = f"Slurm job {job_id}"

    def poll(self) -> JobEnd | None:
        state = self.executor.states().get(self.job_id, GONE)
        if state not in ENDED:
            return None
        status = self.executor.status(self.job_id)
        words = [state if status is None or state != "COMPLETED" else f"exit status {status}"]
        if state in ("COMPLETED", "FAILED"):
            words += last_words(Path(f"{self.attempt.folder}.log"))
        return JobEnd(detail=": ".join([self.slot, *words]), lost=True, status=status)

    def cancel(self) -> None:
        self.executor.cancel_all()


class SlurmExecutor:
    """Submits blocks; see harness.executor.jobs.Executor."""

    def __init__(self, profile: SlurmProfile, say: Callable[[str], None]) -> None:
        try:
            import submitit
        except ImportError:
            raise HarnessError(
                "--executor slurm needs submitit, which is not installed",
                "Install it: pip install 'nsa-harness[slurm]'",
            ) from None
        if not shutil.which("squeue"):
            raise HarnessError(
                "squeue, a command of Slurm, was not found on PATH",
                "Start the run on a node of the cluster, such as its login node.",
            )
        self._submitit, self._profile, self._say = submitit, profile, say
        self._folder, self._job_name = Path(), ""
        self._states: Mapping[str, str] = {}
        self.nodes: dict[str, str] = {}
        """Job id -> its node; empty if it has none, or does not end for its fault."""
        self._say_at = 0.0
        self._asked_at = float("-inf")
        self._mine: set[str] = set()
        self._found: dict[str, str] = {}
        """Slot -> id of the running jobs of an earlier coordinator."""
        self._cancelling, self._cancelled = threading.Lock(), False

    def recover(self, blocks: Path) -> None:
        """Find the running jobs of an earlier coordinator; those that still wait are ended."""
        self._folder = blocks.resolve() / FOLDER
        self._job_name = f"harness-{blocks.resolve().parent.name}"
        running = [i for i, state in self.states(now=True).items() if state == "RUNNING"]
        self._found = {f"Slurm job {i}": i for i in running}
        self._mine.update(running)
        self._end_others()

    def slots(self) -> Sequence[str]:
        return [*self._found, *(f"Slurm {i}" for i in range(len(self._found), self._profile.jobs))]

    def start(self, waiting: Sequence[Attempt]) -> Sequence[SlurmJob]:
        known = [a for a in waiting if a.slot in self._found]
        jobs = [SlurmJob(a, self, self._found.pop(a.slot)) for a in known]
        if self._found:  # nothing waits for what these measure
            self._mine.difference_update(self._found.values())
            self._found.clear()
            self._end_others()
        fresh = [a for a in waiting if not a.slot]
        if fresh and (live := {i for i in self._mine if self.states().get(i, GONE) not in ENDED}):
            fresh = fresh[: max(0, self._profile.jobs - len(live))]
        alike: dict[tuple[bool, str], list[Attempt]] = {}
        for a in fresh:
            node = self.nodes.get(a.avoid.rpartition(" ")[-1], "")
            alike.setdefault((a.block.alone, node), []).append(a)
        arrays = [
            (of[i : i + MAX_ARRAY], node)
            for (_, node), of in alike.items()
            for i in range(0, len(of), MAX_ARRAY)
        ]
        for array, node in arrays:
            at_once = max(1, self._profile.jobs // len(arrays))
            avoid = iter([node])  # once: there may be no other
            try:
                jobs += self._patiently(lambda: self._submit(array, next(avoid, ""), at_once))  # noqa: B023
            except KeyboardInterrupt:  # sbatch may have submitted jobs whose ids did not arrive
                self.cancel_all()
                raise
        return jobs

    def _submit(self, array: Sequence[Attempt], avoid: str, at_once: int) -> list[SlurmJob]:
        given, alone = self._profile, array[0].block.alone
        # A job that Slurm restarts by itself would not know what is measured.
        others = {"no-requeue": True, **given.sbatch}
        if avoid:
            others["exclude"] = f"{others.get('exclude', avoid)},{avoid}"
        if long := [a.block for a in array if a.block.expected_s > given.time_min * units.MINUTE_S]:
            self._say(
                f"warning: block {long[0].name} may take {long[0].expected_s / 60:.0f} min, "
                f"but Slurm ends it after {given.time_min}: raise time_min in the profile file"
            )
        self._end_others()  # a controller that died may have taken jobs that it did not confirm
        limit_s = max(a.block.limit_s for a in array)
        cores = given.cpus_per_task
        asked = {
            "partition": given.partition,
            "gres": None if alone else given.gres,
            "exclusive": alone or None,
            "cpus_per_task": cores,
            # A step does not inherit it from its job.
            "srun_args": [f"--cpus-per-task={cores}"] if cores else None,
            "setup": given.setup or None,
        }
        slurm = self._submitit.SlurmExecutor(self._folder)
        slurm.update_parameters(
            job_name=self._job_name,
            nodes=1,
            time=min(given.time_min, ceil(limit_s / units.MINUTE_S)),
            signal_delay_s=0,  # Slurm ends a job with SIGTERM, as Ctrl-C does, without another
            array_parallelism=at_once,
            additional_parameters=others,
            **{name: value for name, value in asked.items() if value is not None},
        )
        folders = [str(a.folder.resolve()) for a in array]
        arguments = [a.arguments(folder) for a, folder in zip(array, folders, strict=True)]
        with redirect_stderr(StringIO()):  # what sbatch says is in the error, too
            made = slurm.map_array(measure, arguments, [f"{folder}.log" for folder in folders])
        self._mine.update(job.job_id for job in made)
        self._asked_at = float("-inf")
        return [SlurmJob(a, self, job.job_id) for a, job in zip(array, made, strict=True)]

    def states(self, *, now: bool = False) -> Mapping[str, str]:
        """Job id -> Slurm's word for its state, of all jobs of this run that Slurm knows."""
        if now or time.monotonic() - self._asked_at > ASK_S + ASK_ONE_S * len(self._mine):
            ask = ["squeue", *self._ours(), "--states=all", "--array", "-h", "-o", "%i|%T|%N|%r"]
            lines = self._patiently(lambda: _output(ask)).splitlines()
            found = [line.split("|", 3) for line in lines]
            self._states = {i: state for i, state, *_ in found}
            self.nodes.update((i, "" if state in NOT_THE_NODE else n) for i, state, n, _ in found)
            self._asked_at = time.monotonic()
            self._say_what_waits({i: reason for i, *_, reason in found})
        return self._states

    def _say_what_waits(self, reasons: Mapping[str, str]) -> None:
        """Say now and then that Slurm does not run jobs of this run, for another reason than that
        enough of them run."""
        states, now = self._states, time.monotonic()
        live = [i for i in reasons if i in self._mine and states[i] not in {*ENDED, "RUNNING"}]
        waiting = [i for i in live if reasons[i] != "JobArrayTaskLimit"]
        if not waiting:
            self._say_at = now + WAITING_S
        elif now >= self._say_at:
            self._say_at, first = now + WAITING_AGAIN_S, waiting[0]
            self._say(
                f"jobs that wait for Slurm: {len(waiting)}; {first} is {states[first]}: "
                f"{reasons[first]}; more: scontrol show job {first}"
            )

    def status(self, job_id: str) -> int | None:
        """Exit status of the harness in a job that ended; None if it did not get that far."""
        files = self._submitit.core.utils
        path = files.JobPaths(self._folder, job_id).result_pickle
        outcome, value = files.pickle_load(path) if path.exists() else ("", None)
        return value if outcome == "success" else None

    def cancel_all(self) -> None:
        """End all jobs of this run, once."""
        with self._cancelling:
            if self._cancelled:
                return
            self._cancelled = True
            end = ["scancel", *self._ours()]
            if subprocess.run(end, capture_output=True, check=False).returncode:
                self._say(f"Slurm did not end the jobs. Later: {' '.join(end)}")
                return
            until = time.monotonic() + CANCEL_S
            while {*self.states(now=True).values()} - ENDED and time.monotonic() < until:
                time.sleep(ASK_S / 4)

    def _ours(self) -> tuple[str, ...]:
        return f"--name={self._job_name}", f"--user={getpass.getuser()}"

    def _end_others(self) -> None:
        """End jobs of this run that no attempt is waiting for."""
        states = self.states(now=True)
        if others := [i for i, s in states.items() if s not in ENDED and i not in self._mine]:
            self._patiently(lambda: _output(["scancel", *others]))

    def _patiently(self, do: Callable[[], Answer]) -> Answer:
        """Do what needs the controller, and wait while that does not answer.

        Raises:
            HarnessError: Slurm refuses a job, or the controller is away for too long.
        """
        refused, since = 0, 0.0
        while True:
            answers = False
            try:
                return do()
            except subprocess.CalledProcessError as error:  # squeue, scancel: not by the profile
                said = error.stderr.strip() or str(error)
            except self._submitit.core.utils.FailedJobError as error:
                said = str(error)
                ping = subprocess.run(["scontrol", "ping"], capture_output=True, check=False)
                answers = ping.returncode == 0
            problem = said.splitlines()[-1]
            refused += answers
            if refused >= REFUSALS:
                raise HarnessError(f"Slurm refuses a job: {problem}", "Correct the profile file.")
            if not (answers or since):
                self._say(f"{problem}; jobs that run go on, and this waits")
                since = time.monotonic()
            if since and time.monotonic() - since > CONTROLLER_S:
                raise HarnessError(
                    f"Slurm did not answer for {CONTROLLER_S / 60:.0f} min: {problem}",
                    f"When it is back: harness run --resume {self._folder.parents[1]}",
                )
            time.sleep(CONTROLLER_POLL_S)


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def of(file: str, say: Callable[[str], None]) -> SlurmExecutor:
    """The jobs that a profile file describes; see harness/executor/README.md.

    Args:
        file: The profile; empty: all defaults.

    Raises:
        HarnessError: The file cannot be read or is wrong, submitit is not installed, or Slurm does
            not answer.
    """
    profile = SlurmProfile()
    if file:
        text = text_of(Path(file), file, "Name a file: --profile-file FILE.")
        least = "See harness/executor/README.md for an example."
        profile = checked(SlurmProfile, read(text, file, least=least))
    made = SlurmExecutor(profile, say)
    ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, check=False)
    if ping.returncode:
        lines = (ping.stderr or ping.stdout).strip().splitlines()
        raise HarnessError(
            f"Slurm does not answer: {lines[-1] if lines else 'no reason given'}", PING
        )
    return made
