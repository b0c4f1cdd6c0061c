"""The flight recorder of NCCL: the last collectives of each rank of a program that hangs.

Each rank keeps its last collectives. It writes them to a file when a byte arrives in its pipe, or
when a collective times out. Without NCCL there is neither pipe nor file.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp, ProcessGroupNCCL.hpp.
"""

import os
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.records import Case, EvidenceFile

DUMP_S = 4.0
"""Longest time to wait for the dumps; a rank looks at its pipe every second."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Collective:
    """The last collective that a rank began."""

    number: int
    """From 1, equal on all ranks for the same collective."""
    name: str
    state: str
    """scheduled, started or completed."""


def prefix(log: Path) -> str:
    """Begins the names of the dumps of a process's ranks, beside its log."""
    return str(log.resolve().with_suffix(".flight-"))


def ask(log: Path, ranks: int) -> Mapping[int, Collective]:
    """Have the ranks dump, and read the last collective of each that did."""
    asked = []
    for rank in range(ranks):
        with suppress(OSError):  # it does not use NCCL, or is gone
            fd = os.open(f"{prefix(log)}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            with os.fdopen(fd, "wb") as pipe:
                pipe.write(b"1")
            asked.append(rank)
    deadline = time.monotonic() + DUMP_S
    found: dict[int, Collective] = {}
    while len(found) < len(asked) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        for rank in asked:
            if last := last_collective(Path(f"{prefix(log)}{rank}")):
                found[rank] = last
    return found


def last_collective(dump: Path) -> Collective | None:
    """The newest entry of a dump; None if it is absent, incomplete, or of another format."""
    try:
        with dump.open("rb") as file:
            entries = _Plain(file).load()["entries"]
        last = max(entries, key=lambda entry: entry["collective_seq_id"])
        name, state = str(last["profiling_name"]), str(last["state"])
        return Collective(int(last["collective_seq_id"]), name.rpartition(":")[2], state)
    except (OSError, EOFError, pickle.UnpicklingError, KeyError, TypeError, ValueError):
        return None


class _Plain(pickle.Unpickler):
    """Reads containers, texts and numbers only: the program under test wrote the file."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a dump")


def take(
    log: Path, case: Case, keep: Callable[[Path, EvidenceFile], EvidenceFile]
) -> list[EvidenceFile]:
    """Remove the pipes, and keep the dumps."""
    kept = []
    for rank in range(case.program.ranks if case.program else 0):
        dump = Path(f"{prefix(log)}{rank}")
        Path(f"{dump}.pipe").unlink(missing_ok=True)
        if dump.exists():
            kept.append(keep(dump, EvidenceFile(name=f"flight recorder of rank {rank}")))
    return kept
