"""Measures one unit on the node that Ray chose: an ordinary `harness run` in its own process."""

import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from harness.errors import HarnessError
from harness.machine import nvml
from harness.processes import end_with, log_end
from harness.store import reader


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCommand:
    """How the units of a run are measured, on every node."""

    suite: str
    folder: str
    """The current folder of the command."""
    options: tuple[str, ...] = ()
    """Of the user, one word each: --set=NAME=VALUE, --trace, ..."""
    module: str = "harness"


def measure(how: UnitCommand, case_ids: Sequence[str]) -> dict[str, bytes]:
    """Measure a unit in a task of Ray, on the GPUs of that task; the run folder, by paths in it.
    ChildProcessError if a signal ended the command, HarnessError if it was refused."""
    if not Path(how.folder).is_dir():
        raise HarnessError(f"{platform.node()} refused a unit: it has no folder {how.folder}")
    filters = [f"--filter={case_id}" for case_id in case_ids]
    with tempfile.TemporaryDirectory(prefix="harness-unit-") as store:
        fixed = ["--store", store, "--no-report", "--no-abort", "--wait-for-gpu=60"]
        words = ["-m", how.module, "run", how.suite, *filters, *fixed, *how.options]
        with (log := Path(store, "output.log")).open("wb") as output:
            ended = subprocess.run(
                [sys.executable, *words],
                cwd=how.folder,
                env=_variables(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the driver, with which the task ends
                preexec_fn=partial(end_with, os.getpid(), signal.SIGTERM),
            )
        if ended.returncode < 0:
            raise ChildProcessError(f"signal {-ended.returncode} on {platform.node()}")
        record = next(Path(store).glob(f"*/{reader.RUN_FILE}"), None)
        if record is None or not reader.read(record.parent).ended_at:
            said = log_end(log).rpartition("error: ")[-1].strip()
            raise HarnessError(f"{platform.node()} refused a unit: {said}")
        files = [path for path in record.parent.rglob("*") if path.is_file()]
        return {str(path.relative_to(record.parent)): path.read_bytes() for path in files}


def _variables() -> dict[str, str]:
    """Those of `ray start`: Ray gives its workers fewer threads. The GPUs are named by UUID."""
    import ray

    of_raylet = psutil.Process(os.getppid()).environ()  # with another allocator for itself
    found = {n: v for n, v in of_raylet.items() if not n.startswith(("RAY_", "LD_PRELOAD"))}
    if gpus := ray.get_runtime_context().get_accelerator_ids()["GPU"]:
        uuids = nvml.optional(lambda: {str(g.index): g.uuid for g in nvml.gpus()}) or {}
        found["CUDA_VISIBLE_DEVICES"] = ",".join(uuids.get(name, name) for name in gpus)
    return found
