"""What the coordinator and an executor say to each other.

The coordinator decides which cases form a block, which block is tried next, and what enters the
run. An executor knows machines: it starts `harness run` on GPUs that nothing else uses, says when
it ended, and brings the run folder back. Executors measure, parse and merge nothing.
"""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.store.reader import RUN_FILE

SET = "--set="
BLOCK_S = 50 * 60.0
"""Expected time that a block may fill, unless one unit alone takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseBlock:
    """Cases that one job measures, one after the other, on one node."""

    name: str
    """b000, b001, ...: unique in its run, and fit for a file name."""
    case_ids: tuple[str, ...]
    expected_s: float
    limit_s: float
    """When it is still running after this time, its job hangs."""
    alone: bool = False
    """Whether it takes every GPU of its node, and nothing else is measured there meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try of a block. Starting it again in the same folder goes on where it stopped."""

    block: CaseBlock
    folder: Path
    """The store of the job as the coordinator reads it: the run folder of the block, and nothing
    else, is in here when the job has ended. Its name is `{block.name}-{number}`."""
    suite: str
    """As the user named it, relative to the folder of the command."""
    options: tuple[str, ...] = ()
    """Of the user, one word each: --set=NAME=VALUE, --trace, ..."""
    slot: str = ""
    """The only slot that may run it, since a part of its cases was measured there; empty: any."""
    avoid: str = ""
    """The slot that lost the block before; used only if there is no other."""

    def arguments(self, store: str) -> tuple[str, ...]:
        """What follows `harness`, with `folder` as the node of the job names it."""
        shared = ("--store", store, "--no-report", "--no-abort", "--wait-for-gpu=60")
        if any(self.folder.glob(f"*/{RUN_FILE}")):
            again = [word for word in self.options if not word.startswith(SET)]
            return ("run", "--resume", "latest", *shared, *again)
        # A pattern that matches this id alone: without `[` it would match any longer id, too.
        exact = (f"[{i[0]}]{glob.escape(i[1:])}" for i in self.block.case_ids)
        filters = (word for pattern in exact for word in ("--filter", pattern))
        return ("run", self.suite, *filters, *shared, *self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended. Whether its block is complete is in the run folder, not here."""

    detail: str = ""
    """For people, with the host: `node7: exit status 2: error: ...`, `job 4711 was preempted`."""
    lost: bool = False
    """Whether the slot cannot go on with this attempt: dead host, preempted job. Otherwise the same
    slot may start it again."""
    status: int | None = None
    """Exit status of `harness run`; None if it is not known. 2 is a refusal."""


class Job(Protocol):
    """A started attempt."""

    attempt: Attempt
    slot: str
    """For people and for `Attempt.slot`: a GPU UUID, `host GPU 0`, a Slurm job."""

    def poll(self) -> JobEnd | None:
        """None while it waits or runs. Once it has ended, its run folder is in attempt.folder, as
        far as it can be had. Returns quickly, and never raises for the fault of a node."""

    def cancel(self) -> None:
        """End it and everything it started, and bring its run folder back with the processes that
        finished. Idempotent."""


class Executor(Protocol):
    """Starts jobs on GPUs that are held exclusively."""

    def slots(self) -> Sequence[str]:
        """The names of the slots that are alive. Slurm: as many as jobs may run at once."""

    def start(self, waiting: Sequence[Attempt]) -> Sequence[Job]:
        """Start as many of these as slots are free, the first ones first, and return their jobs.

        An attempt whose `slot` is busy stays waiting and does not hold up the next ones. One that
        is `alone` starts when its node is idle, and nothing starts beside it. Slurm submits all
        that it may have in the queue as one array.
        """

    def recover(self, blocks: Path) -> None:
        """End jobs that an earlier, killed coordinator of this run left, and bring their folders
        back; called before the attempts on the disk are merged.

        Args:
            blocks: The folder with one folder per attempt. An executor may keep its own files in
                it, with names that start with a dot.
        """
