"""Byte streams to train on: batches of int64 [B, T + 1], the same for the same seed and rank.

synthetic            each byte is the one before plus 1, 2, 4 or 8 (mod 256), drawn uniformly:
                     8 bits per byte for a unigram model, exactly 2 for a model that has learnt it
text                 the sources of the Python standard library, real text on every machine;
                     random windows, every 20th file held out
fineweb_edu          HuggingFaceFW/fineweb-edu, sample-10BT, streamed through `datasets`
fineweb_edu:PATH     documents from a .parquet, .jsonl or .txt file, or a folder of them

Data that is absent, unreachable, stalled or malformed raises DataError; nothing replaces it.
"""

import difflib
import math
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa.train.documents import (
    HELD_OUT_EVERY,
    DataError,
    Loader,
    Reader,
    Split,
    hub_source,
    local_source,
    share,
)

__all__ = [
    "DATASETS",
    "SYNTHETIC_BITS_PER_BYTE",
    "ByteStream",
    "DataError",
    "Loader",
    "Split",
    "bits_per_byte",
    "check_dataset",
    "fetches",
    "open_stream",
    "text_corpus",
    "unigram_entropy",
]

DATASETS = ("synthetic", "text", "fineweb_edu")
SYNTHETIC_STEPS = (1, 2, 4, 8)
SYNTHETIC_BITS_PER_BYTE = math.log2(len(SYNTHETIC_STEPS))
"""Entropy of `synthetic` given the byte before: what a perfect model reaches."""


class ByteStream(Iterator[Tensor]):
    """An endless stream of batches, int64 [B, T + 1] on the CPU.

    Inputs are [:, :-1], targets [:, 1:]. Close it, or use it as a context manager: a
    fineweb_edu stream keeps a thread until then.
    """

    def __init__(
        self,
        description: str,
        draw: Callable[[], NDArray[Any]],
        close: Callable[[], None] | None = None,
        *,
        in_memory: bool = False,
    ) -> None:
        """
        Args:
            draw: Makes the next batch, of any integer type.
            in_memory: Whether `draw` never waits or fails after its first batch.
        """
        self.description = description
        """What is read; two different streams have different descriptions."""
        self._draw = draw
        self._close = close
        self._in_memory = in_memory
        self._ready: deque[Tensor] = deque()

    def __next__(self) -> Tensor:
        if self._ready:
            return self._ready.popleft()
        return torch.from_numpy(self._draw().astype(np.int64))

    def prepare(self, batches: int) -> None:
        """Draw this many batches ahead, while the host waits for a GPU.

        They are pinned if there is a GPU. Does nothing if drawing may wait or fail: such an error
        belongs to the step that needs the batch.
        """
        pinned = torch.cuda.is_available()
        while self._in_memory and len(self._ready) < batches:
            drawn = self._draw()
            batch = torch.empty(drawn.shape, dtype=torch.int64, pin_memory=pinned)
            batch.numpy()[...] = drawn  # Tensor.copy_ would wake a thread for every core
            self._ready.append(batch)

    def close(self) -> None:
        """Stop reading; returns within about a second, also when the source hangs."""
        if self._close is not None:
            self._close()

    def __enter__(self) -> "ByteStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_dataset(dataset: str) -> None:
    """Raise DataError, with the nearest valid name, unless `dataset` is one of this module's."""
    name, colon, path = dataset.partition(":")
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.5)
        raise DataError(
            f"unknown dataset {name!r}; known are {', '.join(DATASETS)}",
            f"Did you mean {near[0]!r}?" if near else "For a local file use fineweb_edu:PATH.",
        )
    if colon and (name != "fineweb_edu" or not path):
        raise DataError(
            f"{dataset!r}: only fineweb_edu takes a path, after a colon",
            f"Write {name!r}, or fineweb_edu:PATH with a file or a folder.",
        )


def fetches(dataset: str) -> bool:
    """Whether a dataset is read through `loader` and not drawn in memory."""
    return dataset.partition(":")[0] == "fineweb_edu"


def open_stream(
    dataset: str,
    *,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    split: Split = "train",
    loader: Loader | None = None,
) -> ByteStream:
    """Open one rank's stream of a dataset.

    `synthetic` and `text` draw from a generator seeded by seed, rank and split. Of
    fineweb_edu, rank r reads documents r, r + world_size, ... of the split, whole and one
    after another, and starts over at the end.

    Args:
        dataset: `synthetic`, `text`, `fineweb_edu` or `fineweb_edu:PATH`.
        batch_size: Rows per batch (B).
        seq_len: Bytes a row trains on (T); a row holds one more, its last target.
        seed: Not negative.
        loader: How fineweb_edu is fetched; the defaults of Loader when None.

    Raises:
        DataError: The name is unknown or the data absent. Malformed, unreachable or stalled data
            raises it from the batch that needs it.
    """
    check_dataset(dataset)
    name, _, path = dataset.partition(":")
    shape = (batch_size, seq_len + 1)
    rng = np.random.default_rng([seed, rank, split == "held_out"])
    match name:
        case "synthetic":
            return ByteStream(name, lambda: _synthetic(rng, shape), in_memory=True)
        case "text":
            corpus = text_corpus(split)
            python = sys.version.split()[0]
            return ByteStream(
                f"text ({split}: {len(corpus):,} bytes of Python {python})",
                lambda: _windows(corpus, rng, shape),
                in_memory=True,
            )
    source = local_source(Path(path)) if path else hub_source()
    documents = share(source, dataset, split, rank, world_size)
    reader = Reader(documents, dataset, rng, loader or Loader())
    return ByteStream(
        f"{dataset} ({split}, rank {rank} of {world_size})",
        lambda: reader.take(math.prod(shape)).reshape(shape),
        reader.close,
    )


def bits_per_byte(loss: float) -> float:
    """Cross-entropy in nats per byte, as torch computes it, in bits per byte."""
    return loss / math.log(2)


def unigram_entropy(data: NDArray[np.uint8]) -> float:
    """Entropy of the byte frequencies, bits per byte: what a model without context reaches.

    Args:
        data: Bytes, uint8, any shape, not empty.

    Source: Shannon 1948, section 6, with the frequencies in place of the probabilities.
    """
    counts = np.bincount(data.ravel(), minlength=256)
    p = counts[counts > 0] / data.size
    return float(-(p * np.log2(p)).sum())


@cache
def text_corpus(split: Split) -> NDArray[np.uint8]:
    """The .py sources of the running Python's standard library, one after another.

    In the order of their relative paths. Tests and generated build settings are left out:
    they differ between installations of one version. Python 3.11 gives 12 million bytes.

    Returns:
        uint8 [bytes], read-only.
    """
    root = Path(sysconfig.get_path("stdlib"))
    not_library = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = sorted(
        name.as_posix()
        for name in (file.relative_to(root) for file in root.rglob("*.py"))
        if not not_library.intersection(name.parts) and not name.name.startswith("_sysconfigdata")
    )
    chosen = [
        name
        for number, name in enumerate(names, start=1)
        if (number % HELD_OUT_EVERY == 0) == (split == "held_out")
    ]
    if not chosen:
        raise DataError(
            f"{root}: only {len(names)} standard library sources, too few to train on",
            "Use a Python installed with its sources, or --dataset synthetic.",
        )
    return np.frombuffer(b"".join((root / name).read_bytes() for name in chosen), np.uint8)


def _synthetic(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.int64]:
    steps = rng.choice(np.array(SYNTHETIC_STEPS), size=shape)
    steps[:, 0] = rng.integers(256, size=shape[0])
    return steps.cumsum(axis=1) % 256


def _windows(
    corpus: NDArray[np.uint8], rng: np.random.Generator, shape: tuple[int, int]
) -> NDArray[np.uint8]:
    batch_size, length = shape
    if length > len(corpus):
        raise DataError(
            f"text: a row of {length:,} bytes is longer than the corpus of {len(corpus):,} bytes",
            "Lower --seq-len.",
        )
    starts = rng.integers(len(corpus) - length + 1, size=(batch_size, 1))
    return corpus[starts + np.arange(length)]
