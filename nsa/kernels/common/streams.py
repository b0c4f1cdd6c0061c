"""Kernels beside the caller's stream.

The gradients of the branches need nothing of each other until their shares of dq are added up, and
none fills a GPU to its end: where one runs out of programs the next can begin. At short lengths,
where each has fewer programs than the GPU has room for, they run side by side.

Tensors are allocated on the caller's stream alone, and those that nobody else holds are kept until
it has waited; so none is given away while a kernel beside still needs it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Side:
    """One stream beside the caller's; without a stream, the caller's own."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream
        self._kept: list[Tensor] = []
        self._pending = False

    @contextmanager
    def launches(self, *kept: Tensor) -> Iterator[None]:
        """Kernels launched here start after all that the caller's stream was given before.

        Allocate nothing inside: what is allocated there belongs to another stream's memory.

        Args:
            kept: What the kernels use and the caller may let go of.
        """
        if self._stream is None:
            yield
            return
        self._kept.extend(kept)
        self._pending = True
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the caller's stream is given from now on starts after the kernels of this one."""
        if self._stream is not None and self._pending:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._kept.clear()
        self._pending = False


@contextmanager
def beside(device: torch.device, count: int) -> Iterator[list[Side]]:
    """So many streams beside the caller's, joined at the end, by an error too."""
    sides = [Side(stream) for stream in _streams(device, count)]
    try:
        yield sides
    finally:
        for side in sides:
            side.join()


_pools: dict[tuple[int, int], list[torch.cuda.Stream]] = {}
"""By device and the caller's stream: two callers must not wait for each other."""


def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream] | list[None]:
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return [None] * count
    caller = torch.cuda.current_stream(device)
    pool = _pools.setdefault((caller.device_index, caller.cuda_stream), [])
    while len(pool) < count:
        pool.append(torch.cuda.Stream(device))
    return pool[:count]
