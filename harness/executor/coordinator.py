"""Deals the blocks of a suite to the slots of an executor until everything is measured.

A block whose job died goes on once: where it stopped, if its slot can, else its remaining units
start afresh on another slot. After that its cases are recorded as lost. Everything that decides is
on the disk: the run, and one folder per attempt, from which a killed coordinator is resumed.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from harness import units
from harness.errors import HarnessError
from harness.executor.blocks import packed
from harness.executor.jobs import Attempt, CaseBlock, Executor, Job, JobEnd
from harness.executor.merge import Merge, run_in
from harness.records import Case
from harness.runner.run import Agenda, terminating_like_ctrl_c

BLOCKS = "blocks"
"""Folder of the attempts in the run folder, while the run is unfinished."""
STARTS = 2
POLL_S = 0.2
REFUSED = 2
"""Exit status of a request that cannot be carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """How one job of a block went."""

    block: str
    slot: str
    cases: int
    minutes: float
    retried: bool
    ended: str
    """Why it did not measure all of its cases; empty if it did."""


class Coordinator:
    """One execution of a suite over the slots of an executor."""

    def __init__(
        self,
        agenda: Agenda,
        executor: Executor,
        merge: Merge,
        folder: Path,
        *,
        expected_s: Mapping[str, float],
        suite: str,
        options: Sequence[str] = (),
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start nothing yet.

        Args:
            folder: Of the attempts: BLOCKS in the run folder.
            expected_s: Case id -> expected lifetime of one process.
            suite: As the user named it.
            options: Of `harness run` for every block.
        """
        self._agenda, self._executor, self._merge, self._folder = agenda, executor, merge, folder
        self._expected_s, self._suite, self._options = expected_s, suite, tuple(options)
        self._say, self._clock, self._sleep = say, clock, sleep
        self._waiting: list[Attempt] = []
        self._jobs: list[tuple[Job, float]] = []
        """With the time of the start."""
        self._starts = Counter[str]()
        self.rows: list[BlockRow] = []

    def run(self) -> None:
        """Measure what is left. No job is left running, however this returns.

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

    def _plan(self) -> None:
        """Merge what the disk has, and put what is left into blocks."""
        self._folder.mkdir(exist_ok=True)
        self._executor.recover(self._folder)
        slots, first = self._executor.slots(), 0
        for folder in self._attempts():
            name = folder.name.partition("-")[0]
            first = max(first, int(name[1:]) + 1)
            self._merge.take(folder)
            slot_file, begun = _slot_file(folder), run_in(folder)
            slot = slot_file.read_text() if slot_file.exists() else ""
            if begun and not begun.ended_at and self._executor.resumes and slot in slots:
                left = self._merge.left([c.case_id for c in begun.suite.cases])
                if left and begun.suite.sha256 == self._agenda.suite.sha256:
                    block = replace(self._block(begun.suite.cases), name=name)
                    self._waiting.append(self._attempt(block, 0, folder=folder, slot=slot))
        again = {i for attempt in self._waiting for i in attempt.block.case_ids}
        groups = [g for g in self._merge.groups if self._merge.waits(g)]
        fresh = [g for g in groups if g[0].case_id not in again]
        for block in packed(fresh, self._expected_s, slots=len(slots), first=first):
            self._waiting.append(self._attempt(block, 0))
        self._waiting.sort(key=lambda a: not a.block.alone)

    def _attempts(self) -> list[Path]:
        """The folders of all attempts on the disk."""
        return sorted(path for path in self._folder.glob("b*-*") if path.is_dir())

    def _block(self, cases: Sequence[Case]) -> CaseBlock:
        return packed([cases], self._expected_s, slots=1)[0]

    def _attempt(
        self,
        block: CaseBlock,
        number: int,
        *,
        folder: Path | None = None,
        slot: str = "",
        avoid: str = "",
    ) -> Attempt:
        folder = folder or self._folder / f"{block.name}-{number}"
        folder.mkdir(exist_ok=True)
        return Attempt(
            block=block,
            folder=folder,
            suite=self._suite,
            options=self._options,
            slot=slot,
            avoid=avoid,
        )

    def _turn(self) -> None:
        """Start what can start, and see what has ended."""
        started = self._executor.start(self._waiting)
        for job in started:
            self._waiting.remove(job.attempt)
            self._starts[job.attempt.block.name] += 1
            _slot_file(job.attempt.folder).write_text(job.slot)
            self._jobs.append((job, self._clock()))
        ended = [(job, since, end) for job, since in self._jobs if (end := job.poll())]
        for job, since, end in ended:
            self._jobs.remove((job, since))
            self._ended(job, since, end)
        if not self._jobs and not ended:
            raise HarnessError(
                f"no slot is left for {len(self._waiting)} blocks of the run",
                f"Repair a host, then: harness run --resume {self._folder.parent}",
            )
        if not ended:
            self._sleep(POLL_S)

    def _ended(self, job: Job, since: float, end: JobEnd) -> None:
        """Merge what a job measured, and try the rest again or give it up."""
        attempt, block = job.attempt, job.attempt.block
        unlike = self._merge.take(attempt.folder)
        left = self._merge.left(block.case_ids)
        why = unlike or end.detail or f"{job.slot}: the job ended before its cases"
        row = BlockRow(
            block=block.name,
            slot=job.slot,
            cases=len(block.case_ids) - sum(map(len, left)),
            minutes=(self._clock() - since) / units.MINUTE_S,
            retried=self._starts[block.name] > 1,
            ended=why if left else "",
        )
        self.rows.append(row)
        if not left:
            return
        if self._starts[block.name] >= STARTS:
            if end.status == REFUSED and not self._merge.begun:
                raise HarnessError(f"block {block.name} was refused twice: {end.detail}")
            for group in left:
                self._merge.give_up(group, self._attempts(), f"lost after {STARTS} tries: {why}")
            self._say(f"block {block.name} is lost after {STARTS} tries: {why}")
            return
        self._say(f"block {block.name}: {why}; it is tried once more")
        if not (end.lost or unlike) and run_in(attempt.folder):
            self._waiting.append(replace(attempt, slot=job.slot))
            return
        cases = [c for g in left for c in g]
        rest = replace(self._block(cases), name=block.name)
        self._waiting.append(self._attempt(rest, 1, avoid=job.slot))

    def _cancel(self) -> None:
        """End all jobs, and merge what they finished."""
        jobs = [job for job, _ in self._jobs]
        self._jobs.clear()
        if jobs:
            with ThreadPoolExecutor(len(jobs)) as pool:  # each may take seconds
                list(pool.map(lambda job: job.cancel(), jobs))
        for job in jobs:
            self._merge.take(job.attempt.folder)

    def tidy(self) -> None:
        """Remove the folder of the attempts, unless one measured what did not enter the run."""
        if not any(map(run_in, self._attempts())):
            shutil.rmtree(self._folder)


def _slot_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.slot")
