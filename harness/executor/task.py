"""Measures one unit on the node that Ray chose: an ordinary `harness run` in its own process."""

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.errors import HarnessError, ProbeError
from harness.machine import nvml
from harness.store import reader

POLL_S, GRACE_S = 0.1, 20.0
"""Between looks at the process; from the request to end until it is killed."""
ENDS_WITH_ITS_WORKER = (  # also if that is killed: Ray gives its GPU to another task at once
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM);"  # PDEATHSIG
    "os.getppid() == int(sys.argv[1]) or sys.exit('its worker was killed');"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCommand:
    """How the units of a run are measured, on every node."""

    suite: str
    folder: str
    """The current folder of the command."""
    options: tuple[str, ...] = ()
    """Of the user, one word each: --set=NAME=VALUE, --trace, ..."""
    module: str = "harness"


def measure(how: UnitCommand, case_ids: Sequence[str], gpus: Sequence[str]) -> dict[str, bytes]:
    """Measure a unit on these GPUs, by Ray's names for them; the run folder, by paths in it.
    ChildProcessError if a signal ended the command, HarnessError if it was refused."""
    if not Path(how.folder).is_dir():
        raise HarnessError(f"{platform.node()} refused a unit: it has no folder {how.folder}")
    filters = [f"--filter={case_id}" for case_id in case_ids]
    with tempfile.TemporaryDirectory(prefix="harness-unit-") as store:
        fixed = ["--store", store, "--no-report", "--no-abort", "--wait-for-gpu=60"]
        words = ["-m", how.module, "run", how.suite, *filters, *fixed, *how.options]
        with (log := Path(store, "output.log")).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", ENDS_WITH_ITS_WORKER, str(os.getpid()), *words],
                cwd=how.folder,
                env=_variables(gpus),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the driver, which then cancels the task
            )
            _wait_for(process)
        if process.returncode < 0:
            raise ChildProcessError(f"signal {-process.returncode} on {platform.node()}")
        record = next(Path(store).glob(f"*/{reader.RUN_FILE}"), None)
        if record is None or not reader.read(record.parent)[0].ended_at:
            said = log.read_text(errors="replace").rpartition("error: ")[-1].strip()
            raise HarnessError(f"{platform.node()} refused a unit: {said}")
        files = [path for path in record.parent.rglob("*") if path.is_file()]
        return {str(path.relative_to(record.parent)): path.read_bytes() for path in files}


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    """Until it ends. If the task is cancelled, end it with all that it started."""
    try:
        while process.poll() is None:  # a wait without looks would not notice that
            time.sleep(POLL_S)
    finally:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _variables(gpus: Sequence[str]) -> dict[str, str]:
    """Those of `ray start`, for Ray gives its workers fewer threads, and the GPUs by UUID."""
    of_raylet = psutil.Process(os.getppid()).environ()  # with another allocator for itself
    found = {n: v for n, v in of_raylet.items() if not n.startswith(("RAY_", "LD_PRELOAD"))}
    if gpus:
        uuids: dict[str, str] = {}
        with suppress(ProbeError):  # without NVML, a GPU has only its index
            uuids = {str(g.index): g.uuid for g in nvml.gpus()}
        found["CUDA_VISIBLE_DEVICES"] = ",".join(uuids.get(name, name) for name in gpus)
    return found
