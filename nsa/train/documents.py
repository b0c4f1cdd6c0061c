"""Documents of fineweb_edu: from the hub or a local path, through a thread with a deadline.

    source() -> share() -> Reader.take()

A source reads all documents once, `share` keeps one split and rank and starts over at the end, and
`Reader` runs both in a thread, so that a stalled source is an error and not a hang.
"""

import importlib
import json
import queue
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

HELD_OUT_EVERY = 20
"""Every 20th document (fineweb_edu) or file (text) is held out from training."""
END_OF_DOCUMENT = b"\0"
"""Follows every document."""

Split = Literal["train", "held_out"]
Documents = Generator[tuple[str, bytes], None, None]
"""Where a document was read (`file.jsonl:17`), and its bytes, which are never empty."""

_HUB_NAME, _HUB_CONFIG = "HuggingFaceFW/fineweb-edu", "sample-10BT"
_CLOSE_S = 1.0


class DataError(Exception):
    """Data cannot be read: the place and the fact, then the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """How documents are fetched."""

    doc_batch: int = 64
    """Documents per fetch; the seed shuffles within a fetch (NSA_FWE_DOC_BATCH)."""
    prefetch: bool = True
    """Fetch ahead of the training step (NSA_FWE_PREFETCH)."""
    queue_depth: int = 4
    """Fetches kept ready (NSA_FWE_Q)."""
    timeout_s: float = 60.0
    """Longest wait for one fetch before it is a DataError."""

    def __post_init__(self) -> None:
        for name in ("doc_batch", "queue_depth", "timeout_s"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}={value} must be positive")


class Reader:
    """Reads documents in a thread and hands out their bytes, END_OF_DOCUMENT after each.

    The thread is a daemon and makes one fetch per permit: with prefetch, permits for
    queue_depth fetches are out from the start; without, one is given out on demand.
    """

    def __init__(
        self, documents: Documents, name: str, rng: np.random.Generator, loader: Loader
    ) -> None:
        self._documents = documents
        self._name = name
        self._rng = rng
        self._loader = loader
        self._place = ""
        self._ready: queue.SimpleQueue[bytes | DataError | None] = queue.SimpleQueue()
        self._permits = threading.Semaphore(loader.queue_depth if loader.prefetch else 0)
        self._closed = threading.Event()
        self._rest = np.empty(0, np.uint8)
        self._error: DataError | None = None
        self._thread = threading.Thread(target=self._run, name="nsa-loader", daemon=True)
        self._thread.start()

    def take(self, count: int) -> NDArray[np.uint8]:
        """The next `count` bytes, uint8 [count].

        Raises:
            DataError: The source is malformed or unreachable, or one fetch took longer than
                timeout_s; the message names the last document read.
        """
        parts, held = [self._rest], len(self._rest)
        while held < count:
            parts.append(np.frombuffer(self._fetch(), np.uint8))
            held += len(parts[-1])
        data = np.concatenate(parts)
        self._rest = data[count:]
        return data[:count]

    def close(self) -> None:
        """Stop the thread; after a second give up on one that hangs in its source."""
        self._closed.set()
        self._permits.release()
        self._thread.join(_CLOSE_S)

    def _fetch(self) -> bytes:
        if self._closed.is_set():
            raise RuntimeError(f"{self._name}: the stream is closed")
        if self._error is not None:
            raise self._error
        if not self._loader.prefetch:
            self._permits.release()
        try:
            block = self._ready.get(timeout=min(self._loader.timeout_s, threading.TIMEOUT_MAX))
        except queue.Empty:
            raise DataError(
                f"{self._name}: no data for {self._loader.timeout_s:g} s, "
                + (f"after {self._place}" if self._place else "before the first document"),
                "Check the network or disk, raise --loader-timeout, or use --dataset text.",
            ) from None
        if self._loader.prefetch:
            self._permits.release()
        if isinstance(block, DataError):
            self._error = block
            raise block
        if block is None:
            raise RuntimeError(f"{self._name}: the loader thread died; its traceback is above")
        return block

    def _run(self) -> None:
        try:
            with closing(self._documents):
                while self._permits.acquire() and not self._closed.is_set():
                    fetch = []
                    for place, text in islice(self._documents, self._loader.doc_batch):
                        self._place = place
                        fetch.append(text)
                    self._rng.shuffle(fetch)
                    self._ready.put(END_OF_DOCUMENT.join([*fetch, b""]))
        except DataError as error:
            self._ready.put(error)
        finally:
            self._ready.put(None)


def share(
    source: Callable[[], Documents], name: str, split: Split, rank: int, world_size: int
) -> Documents:
    """The documents of one split that fall to one rank, over and over."""
    while True:
        total = in_split = mine = 0
        with closing(source()) as documents:
            for place, text in documents:
                total += 1
                if (total % HELD_OUT_EVERY == 0) != (split == "held_out"):
                    continue
                if in_split % world_size == rank:
                    mine += 1
                    yield place, text
                in_split += 1
        if not mine:
            raise DataError(
                f"{name}: no document for rank {rank} of {world_size} in the {split} split: "
                f"{total} documents with text, {in_split} of them in this split",
                f"Give more documents: every {HELD_OUT_EVERY}th is held out, and the ranks share "
                "the rest.",
            )


def hub_source() -> Callable[[], Documents]:
    """fineweb-edu, sample-10BT, streamed.

    Raises:
        DataError: The `datasets` package is not installed. Without a network, the first document
            raises it.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"fineweb_edu: streaming needs the `datasets` package ({error})",
            "Run pip install 'nsa-harness[data]', or give a local path: fineweb_edu:PATH.",
        ) from error

    def documents() -> Documents:
        try:
            rows = datasets.load_dataset(_HUB_NAME, name=_HUB_CONFIG, split="train", streaming=True)
            for number, row in enumerate(rows):
                yield from _document(f"{_HUB_NAME} document {number}", row)
        except _network_errors() as error:
            raise DataError(
                f"{_HUB_NAME}: cannot be streamed: {type(error).__name__}: {error}",
                "Check the network, or download it and give the path: fineweb_edu:PATH.",
            ) from error

    return documents


def local_source(path: Path) -> Callable[[], Documents]:
    """The files of a folder in sorted order, or one file: .jsonl, .parquet or .txt.

    A line of .jsonl and a row of .parquet is a document, its text in the field "text"; a
    .txt file is one document.

    Raises:
        DataError: The file does not exist. A malformed file raises it at the malformed place.
    """
    remedy = "Correct the path after fineweb_edu:"
    try:
        path = path.expanduser()
        if not path.exists():
            raise DataError(f"{path}: no such file or folder", remedy)
    except (OSError, RuntimeError) as error:  # of exists; of expanduser
        raise DataError(f"{path}: {error}", remedy) from error
    readers = {".jsonl": _jsonl, ".parquet": _parquet, ".txt": _txt}
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [file for file in found if file.suffix in readers]
    if not files:
        raise DataError(
            f"{path}: {'holds no' if path.is_dir() else 'is not a'} {', '.join(readers)} file",
            "Convert it to one of these; unpack .gz and .zst first.",
        )

    def documents() -> Documents:
        for file in files:
            try:
                yield from readers[file.suffix](file)
            except OSError as error:
                raise DataError(
                    f"{file}: {error.strerror or error}",
                    "Make the file readable, or download it again.",
                ) from error

    return documents


def _txt(file: Path) -> Documents:
    if text := file.read_bytes():
        yield str(file), text


def _jsonl(file: Path) -> Documents:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or too deep
                raise DataError(
                    f"{file}:{number}: not JSON: {error}", "Correct or remove the line."
                ) from error
            yield from _document(f"{file}:{number}", row)


def _parquet(file: Path) -> Documents:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(
            f"{file}: reading .parquet needs the `pyarrow` package ({error})",
            "Run pip install 'nsa-harness[data]', or convert the file to .jsonl.",
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            if "text" not in table.schema_arrow.names:
                yield from _document(str(file), dict.fromkeys(table.schema_arrow.names))
            for batch in table.iter_batches(batch_size=256, columns=["text"]):
                for row in batch.to_pylist():
                    yield from _document(f"{file} row {number}", row)
                    number += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file} row {number}: {error}", "Download the file again.") from error


def _document(place: str, row: Any) -> Documents:
    """The text of one row, unless it is empty; DataError without the field."""
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        if isinstance(row, dict) and "text" in row:
            has = f"but {type(text).__name__}"
        else:
            fields = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
            has = f"the row has {fields or 'no fields'}"
        raise DataError(
            f'{place}: no string in the field "text"; {has}',
            "Put the text there, as a string; or remove the row.",
        )
    try:
        data = text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise DataError(
            f"{place}: not Unicode text: {error}", "Correct or remove the row."
        ) from error
    if data:
        yield place, data


def _network_errors() -> tuple[type[Exception], ...]:
    """OSError, and what the HTTP clients that `datasets` loads raise."""
    clients = (("httpx", "HTTPError"), ("httpx2", "HTTPError"), ("aiohttp", "ClientError"))
    loaded = [(sys.modules[module], name) for module, name in clients if module in sys.modules]
    return OSError, *(getattr(module, name) for module, name in loaded)
