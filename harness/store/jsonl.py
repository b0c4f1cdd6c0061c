"""Whole runs as JSON lines: the bytes of their run.jsonl, one run after the other.

The logs beside run.jsonl are not included. A run is checked line by line before it is imported.
"""

import re
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from harness.errors import HarnessError, StoreError
from harness.store import reader

MAX_BYTES = 2**28
"""Of a file to import: about ten million samples."""

_FIRST = re.compile(rb'^{"kind": "run"', re.MULTILINE)


def export(folder: Path) -> bytes:
    """The lines of a run as they were written, without an incomplete last line.

    Raises:
        StoreError: The run is damaged.
    """
    _, whole_bytes = reader.read(folder)
    return Path(folder, reader.RUN_FILE).read_bytes()[:whole_bytes]


def import_runs(file: Path, root: Path) -> tuple[str, ...]:
    """Put the runs of a file into a store, each whole or not at all.

    Returns:
        Their ids; a run that the store has already, with the same bytes, is one of them.

    Raises:
        HarnessError: A line is not valid, or another run has the id. Earlier runs are imported.
    """
    ids = tuple(_adopt(file, first, data, root) for first, data in _runs(file))
    if not ids:
        remedy = "Write such a file: harness export RUN --format jsonl -o FILE"
        raise HarnessError(f"{file}: the file contains no run", remedy)
    return ids


def read_file(path: Path) -> bytes:
    """The content of a file that somebody else may have made.

    Raises:
        HarnessError: It cannot be read, or is too long.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise HarnessError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise HarnessError(f"{path}: more than {MAX_BYTES} bytes", "Split the file.")
    return data


def _runs(file: Path) -> Iterator[tuple[int, bytes]]:
    """First line number and bytes of every run in a file."""
    data = read_file(file)
    data = data if data.endswith(b"\n") else data + b"\n" * bool(data)
    starts = {0, *(found.start() for found in _FIRST.finditer(data)), len(data)}
    for begin, end in pairwise(sorted(starts)):
        yield data.count(b"\n", 0, begin) + 1, data[begin:end]


def _adopt(file: Path, first: int, data: bytes, root: Path) -> str:
    """Check one run and put it into a store; its id."""
    run, _ = reader.parse(data, root, file, first)
    run_id = run.run_id
    if not re.fullmatch(r"\w[\w.=-]{,199}", run_id, flags=re.ASCII):
        raise HarnessError(f"{file}:{first}: {run_id!r} is not a run id", "The file was changed.")
    target = root / run_id
    if target.exists():
        if (target / reader.RUN_FILE).is_file() and export(target) == data:
            return run_id
        raise StoreError(
            f"{file}:{first}: {target} exists with other content",
            "Import into another folder with --store, or move the existing run away.",
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".import-", dir=root) as draft:
            folder = Path(draft, run_id)
            folder.mkdir()
            (folder / reader.RUN_FILE).write_bytes(data)
            (folder / reader.SUITE_FILE).write_bytes(run.suite.text.encode())
            folder.rename(target)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror}") from error
    return run_id
