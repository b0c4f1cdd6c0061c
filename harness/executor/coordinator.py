"""Deals the blocks of a suite to the slots of an executor until everything is measured.

A block whose job died is tried once more: where it stopped, if its slot can go on, else its
unfinished units afresh on another slot. Then its cases are recorded as lost. What decides is on the
disk, the run and a folder per attempt, so that a killed coordinator is resumed without loss.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness import units
from harness.analysis import verdict
from harness.errors import HarnessError
from harness.executor.blocks import packed
from harness.executor.jobs import Attempt, CaseBlock, Executor, Job, JobEnd
from harness.executor.merge import Merge, run_in
from harness.machine import environment
from harness.records import Run, Stop, Suite
from harness.runner.run import Agenda, terminating_like_ctrl_c
from harness.store import reader, writer

BLOCKS, PLAN = "blocks", "plan.json"
"""Folder of the attempts in the folder of an unfinished run, and what is in it beside them."""
STARTS, POLL_S, REFUSED = 2, 0.2, 2
"""Starts of a block; seconds between looks at the jobs; exit status of a wrong request."""
NOT_A_WORKER: Mapping[str, Any] = {
    "gpu_uuids": [],
    "cuda_unavailable": "",
    "versions": {},
    "torch_settings": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """What a run over several GPUs needs beside its suite."""

    executor: str
    """local, ssh or slurm."""
    file: str = ""
    """The hosts of ssh, the profile of slurm."""
    suite: str
    """As the user named it."""
    options: tuple[str, ...] = ()
    """Of the user, for every block."""


def dealt(run: Run) -> Dealt | None:
    """How an unfinished run was started; None if no executor did."""
    path = Path(run.folder, BLOCKS, PLAN)
    return Dealt(**json.loads(path.read_text())) if path.is_file() else None


def begin(
    suite: Suite, before: Run | None, how: Dealt, store: Path, command: Sequence[str]
) -> writer.RunWriter:
    """A new run, or `before` to go on with. Its environments come with its blocks."""
    if before is not None:
        return writer.resume(store, before.folder)[0]
    here = environment.capture(NOT_A_WORKER, command=command, repository=None)
    made = writer.create(store, suite, here, where=how.executor)
    (folder := made.folder / BLOCKS).mkdir()
    (folder / PLAN).write_text(json.dumps(asdict(how)))
    return made


class Coordinator:
    """One execution of a suite over the slots of an executor."""

    def __init__(
        self,
        writing: writer.RunWriter,
        executor: Executor,
        how: Dealt,
        *,
        expected_s: Mapping[str, float],
        device: str = "",
        abort: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start nothing yet.

        Args:
            expected_s: Case id -> expected lifetime of one process.
            device: The name of the GPUs, if it is known: rules may be for one.
            abort: Whether a rule with `abort_early` ends the run.
        """
        recorded, _ = reader.read(writing.folder)
        self._agenda = Agenda(
            recorded.suite,
            recorded=recorded.measurements,
            device=device or recorded.environment.device_name,
            decide=(lambda: verdict.of_run(reader.read(writing.folder)[0])[-1]) if abort else None,
        )
        self._writing, self._executor, self._how = writing, executor, how
        self._merge = Merge(writing, self._agenda, recorded)
        self._folder, self._expected_s = writing.folder / BLOCKS, expected_s
        self._say = say
        self._waiting: list[Attempt] = []
        self._jobs: dict[int, tuple[Job, float]] = {}
        """With the time of the start, by identity."""
        self._starts = Counter[str]()

    def run(self) -> None:
        """Measure what is left, and finish the run. No job is left, however this returns.

        Raises:
            KeyboardInterrupt: Ctrl-C, or SIGTERM. What the jobs finished is on the disk.
            HarnessError: The first blocks are refused, no slot is left, or the store fails.
        """
        with terminating_like_ctrl_c():
            try:
                self._plan()
                while (self._waiting or self._jobs) and self._agenda.next():
                    self._turn()
            finally:
                self._cancel()
        self._writing.finish(stopped=self.stop)
        if not self._agenda.stop and not self._merge.lost:  # else the logs say why
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def stop(self) -> Stop | None:
        """Why cases are left."""
        return self._agenda.stop

    def _plan(self) -> None:
        """Merge what the disk has, and put what is left into blocks."""
        self._executor.recover(self._folder)
        slots, again = self._executor.slots(), set[str]()
        first = max((int(path.name[1:].partition("-")[0]) for path in self._attempts()), default=-1)
        for folder in self._attempts():
            self._merge.take(folder)
        for folder in self._attempts()[::-1]:  # the last attempt at a case is the one to go on with
            run, slot = run_in(folder), _slot_file(folder)
            where = slot.read_text() if slot.is_file() else ""
            if run is None or run.ended_at or where not in slots:
                continue
            ids = {c.case_id for c in run.suite.cases}
            if self._merge.left(ids) and not ids & again:
                again |= ids
                (block,) = packed([run.suite.cases], self._expected_s, slots=1)
                block = replace(block, name=folder.name.partition("-")[0])
                self._wait(block, folder.name, slot=where)
        fresh = [g for g in self._merge.left() if g[0].case_id not in again]
        for block in packed(fresh, self._expected_s, slots=len(slots), first=first + 1):
            self._wait(block, f"{block.name}-0")
        self._waiting.sort(key=lambda attempt: not attempt.block.alone)
        self._say(f"{self._writing.run_id}: blocks: {len(self._waiting)}, slots: {len(slots)}")

    def _attempts(self) -> list[Path]:
        """The folders of all attempts on the disk."""
        found = (path for path in self._folder.glob("b*-*") if path.is_dir())
        return sorted(found, key=lambda path: (len(path.name), path.name))  # b999-0, b1000-0

    def _wait(self, block: CaseBlock, folder: str, **where: Any) -> None:
        path = self._folder / folder
        path.mkdir(exist_ok=True)
        suite, options = self._how.suite, self._how.options
        self._waiting.append(
            Attempt(block=block, folder=path, suite=suite, options=options, **where)
        )

    def _turn(self) -> None:
        """Start what can start, and see what has ended."""
        for attempt in [
            a for a in self._waiting if a.slot and a.slot not in self._executor.slots()
        ]:
            self._waiting.remove(attempt)
            self._afresh(attempt)
        for job in self._executor.start(self._waiting):
            self._waiting.remove(job.attempt)
            self._starts[job.attempt.block.name] += 1
            _slot_file(job.attempt.folder).write_text(job.slot)
            self._jobs[id(job)] = job, time.monotonic()
        if not self._jobs:
            raise HarnessError(
                f"no slot is left; blocks that wait for one: {len(self._waiting)}",
                f"Repair a host, then: harness run --resume {self._writing.folder}",
            )
        ended = [(job, end) for job, _ in self._jobs.values() if (end := job.poll())]
        for job, end in ended:
            _, since = self._jobs.pop(id(job))
            self._ended(job, end, (time.monotonic() - since) / units.MINUTE_S)
        if not ended:
            time.sleep(POLL_S)

    def _ended(self, job: Job, end: JobEnd, minutes: float) -> None:
        """Merge what a job measured, and try the rest again or give it up."""
        attempt, block = job.attempt, job.attempt.block
        before = self._merge.left(block.case_ids)
        unlike = self._merge.take(attempt.folder)
        left = self._merge.left(block.case_ids)
        why = unlike or end.detail or f"{job.slot}: the job ended before its cases"
        cases = sum(map(len, before)) - sum(map(len, left))
        said = f"block {block.name} on {job.slot}: cases measured: {cases}, {minutes:.1f} min"
        if not left:
            pass
        elif self._starts[block.name] < STARTS:
            said += f"; tried again: {why}"
            run = run_in(attempt.folder)
            goes_on = not (end.lost or unlike or end.status == REFUSED)
            attempt = replace(attempt, slot=job.slot)
            if goes_on and run and run.measurements:
                self._waiting.append(attempt)
            else:
                self._afresh(attempt)
        elif end.status == REFUSED and not self._merge.begun:
            raise HarnessError(f"block {block.name} was refused twice: {end.detail}")
        else:
            busy = [job.attempt.folder for job, _ in self._jobs.values()]
            ended = [folder for folder in self._attempts() if folder not in busy]
            self._merge.give_up(left, ended, f"{STARTS} tries: {why}")
            said += f"; lost: {why}"
        self._say(f"{said}; blocks left: {len(self._waiting) + len(self._jobs)}")

    def _afresh(self, attempt: Attempt) -> None:
        """Let another slot try what is left of a block."""
        name = attempt.block.name
        left = self._merge.left(attempt.block.case_ids)
        (rest,) = packed([[c for unit in left for c in unit]], self._expected_s, slots=1)
        tries = sum(path.is_dir() for path in self._folder.glob(f"{name}-*"))
        # A folder belongs to one GPU.
        self._wait(replace(rest, name=name), f"{name}-{tries}", avoid=attempt.slot)
        self._waiting.insert(0, self._waiting.pop())  # it would end last

    def _cancel(self) -> None:
        """End all jobs, and merge what they finished."""
        jobs = [job for job, _ in self._jobs.values()]
        with ThreadPoolExecutor(256) as pool:  # each may take seconds
            list(pool.map(lambda job: job.cancel(), jobs))
        for job in jobs:
            self._merge.take(job.attempt.folder)


def _slot_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.slot")
