"""Whole runs as JSON lines: the bytes of their run.jsonl, one run after the other.

Everything is kept but the files beside run.jsonl, which are logs and evidence. A run to import is
checked line by line before it is among the recorded runs.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.errors import HarnessError, StoreError
from harness.store import lines, reader, writer

MAX_RUN_BYTES = 1024 * 2**20
"""Of one run to import."""
MAX_ID = 200
_FIRST = b'{"kind": "run"'
_EXPORT = "`harness export RUN --format jsonl -o FILE`"


def export(folder: Path) -> bytes:
    """A run's lines as they were written, without a last one that was cut short.

    Raises:
        StoreError: The run is damaged.
    """
    run = reader.load(folder.parent, folder)  # damaged runs are not exported
    data = Path(run.folder, reader.RUN_FILE).read_bytes()
    return data[: data.rfind(b"\n") + 1]


def import_runs(file: Path, root: Path) -> tuple[str, ...]:
    """Put the runs of a file under a store's root, each whole or not at all.

    Returns:
        Their ids, with those of runs that were there before with the same bytes.

    Raises:
        HarnessError: The file is not such a file, or another run has the id. The runs before
            that place are imported.
    """
    ids = []
    for place, data in _runs(file):
        ids.append(_adopt(place, data, root))
    if not ids:
        raise HarnessError(f"{file}: no run in it", f"Write one with {_EXPORT}.")
    return tuple(ids)


def _runs(file: Path) -> Iterator[tuple[str, bytes]]:
    """Place and bytes of every run in a file."""
    held: list[bytes] = []
    size, place = 0, f"{file}:1"
    try:
        with file.open("rb") as source:
            for number, line in enumerate(iter(lambda: source.readline(MAX_RUN_BYTES + 1), b""), 1):
                if line.startswith(_FIRST) and held:
                    yield place, b"".join(held)
                    held, size, place = [], 0, f"{file}:{number}"
                held.append(line if line.endswith(b"\n") else line + b"\n")
                size += len(line)
                if size > MAX_RUN_BYTES:
                    raise HarnessError(f"{place}: a run of more than {MAX_RUN_BYTES} bytes")
    except OSError as error:
        raise HarnessError(f"{file}: cannot be read: {error.strerror}") from None
    if held:
        yield place, b"".join(held)


def _adopt(place: str, data: bytes, root: Path) -> str:
    started = lines.decode(data[: data.find(b"\n") + 1], place)
    if not isinstance(started, lines.Started):
        raise HarnessError(f"{place}: no run begins here", f"Write such a file with {_EXPORT}.")
    run_id = started.run_id
    if len(run_id) > MAX_ID or not re.fullmatch(r"\w[\w.=-]*", run_id, flags=re.ASCII):
        raise HarnessError(f"{place}: {run_id!r} is not the id of a run", "The file was changed.")
    target = root / run_id
    if target.exists():
        if (target / reader.RUN_FILE).is_file() and export(target) == data:
            return run_id
        raise StoreError(
            f"{place}: {target} exists and has another content",
            "Import into another folder with --store, or move the existing run away.",
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".import-", dir=root))
    except OSError as error:
        raise StoreError(f"cannot write {root}: {error.strerror}") from error
    try:
        folder = draft / run_id
        folder.mkdir()
        for name, text in (
            (reader.RUN_FILE, data),
            (reader.SUITE_FILE, started.suite.text.encode()),
        ):
            with (folder / name).open("wb") as file:
                writer.append_synced(file.fileno(), text)
        try:
            reader.load(draft, folder)
        except StoreError as error:
            raise HarnessError(f"{place}: {error}".replace(f"{folder}/", f"{run_id}/")) from None
        writer.sync_directory(folder)
        folder.rename(target)
        writer.sync_directory(root)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return run_id
