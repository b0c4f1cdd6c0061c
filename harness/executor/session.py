"""One `harness run --executor`: makes or resumes the run, and has its blocks measured."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.analysis import verdict
from harness.errors import HarnessError
from harness.executor import hosts
from harness.executor.coordinator import BLOCKS, BlockRow, Coordinator
from harness.executor.jobs import Executor
from harness.executor.merge import Merge
from harness.machine import environment
from harness.records import Run, Stop, Suite
from harness.runner.run import Agenda
from harness.store import reader, writer
from harness.store.writer import RunWriter

PLAN = "plan.json"
NOT_A_WORKER: Mapping[str, object] = {
    "gpu_uuid": None,
    "cuda_unavailable": "the coordinator starts no worker",
    "versions": {},
    "torch_settings": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """What a run needs beside its suite; kept in its folder until it is finished."""

    executor: str
    """local or ssh."""
    file: str = ""
    """The hosts of ssh."""
    suite: str = ""
    """As the user named it."""
    options: tuple[str, ...] = ()
    """Of the user, for every block."""


def dealt(run: Run) -> Dealt | None:
    """How an unfinished run was started; None if no executor did."""
    path = Path(run.folder, BLOCKS, PLAN)
    return Dealt(**json.loads(path.read_text())) if path.is_file() else None


def executor_of(asked: Dealt, suite: Suite) -> Executor:
    """
    Raises:
        HarnessError: Its file is absent or wrong.
    """
    if asked.executor == "local":
        return hosts.local(suite.device)
    if not asked.file:
        raise HarnessError("--executor ssh needs its hosts", "Add --hosts FILE.")
    return hosts.ssh(Path(asked.file))


def begin(
    suite: Suite, before: Run | None, asked: Dealt, store: Path, command: Sequence[str]
) -> RunWriter:
    """A new run, or `before` to go on with. Its environment comes with the first block."""
    if before is not None:
        return writer.resume(store, before.folder)[0]
    here = environment.capture(NOT_A_WORKER, command=command, repository=None)
    made = writer.create(store, suite, here, where=asked.executor)
    (folder := made.folder / BLOCKS).mkdir()
    (folder / PLAN).write_text(json.dumps(asdict(asked)))
    return made


def execute(
    writing: RunWriter,
    asked: Dealt,
    *,
    device: str,
    expected_s: Mapping[str, float],
    abort: bool,
    say: Callable[[str], None],
    began: float | None,
) -> tuple[Stop | None, Sequence[BlockRow]]:
    """Measure what a run lacks, and finish it: why cases are left, and a row per job.

    Args:
        device: The name of the GPUs; empty if it is not known.
        expected_s: Case id -> expected lifetime of one process.
        began: time.monotonic at the start of the command that made the run; None if resumed.

    Raises:
        KeyboardInterrupt: Ctrl-C, or SIGTERM. What was measured is stored.
        HarnessError: The request cannot be carried out.
    """
    recorded, _ = reader.read(writing.folder)
    say(f"{recorded.run_id}: {recorded.suite.question}")
    agenda = Agenda(
        recorded.suite,
        recorded=recorded.measurements,
        device=device or recorded.environment.device_name,
        decide=(lambda: verdict.of_run(reader.read(writing.folder)[0])[-1]) if abort else None,
    )
    coordinator = Coordinator(
        agenda,
        executor_of(asked, recorded.suite),
        Merge(writing, agenda, recorded),
        writing.folder / BLOCKS,
        expected_s=expected_s,
        suite=asked.suite,
        options=asked.options,
        say=say,
    )
    coordinator.run()
    wall_s = None if began is None else time.monotonic() - began
    writing.finish(wall_s=wall_s, stopped=agenda.stop)
    if agenda.stop is None:
        coordinator.tidy()
    return agenda.stop, coordinator.rows
