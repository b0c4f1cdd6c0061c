"""Side streams: kernels that run beside those of the caller's stream.

The gradients of the branches are independent until their shares of dq are added up, and none of
them fills a GPU until its end: when one runs out of programs the next can begin. At short lengths,
where each has fewer programs than the GPU has room for, they run side by side. But there launching
takes longer than the kernels do, and longer still on streams, unless a graph is captured.

Tensors are allocated on the caller's stream only. Those without another owner are kept until that
stream has waited, so that none is freed while a side stream still needs it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """One stream beside the caller's; without a stream, the caller's own."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream
        self._kept: list[Tensor] = []
        self._pending = False

    @contextmanager
    def launches(self, *kept: Tensor) -> Iterator[None]:
        """Kernels launched here start after all earlier work of the caller's stream.

        Allocate nothing inside: it would belong to the memory of the other stream.

        Args:
            kept: Tensors that the kernels use and the caller may release.
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
        """Make later work of the caller's stream wait for the kernels of this one."""
        if self._stream is not None and self._pending:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._kept.clear()
        self._pending = False


FEW = 1 << 25
"""Elements of queries and outputs up to which kernels wait for the host that launches them."""


@contextmanager
def side_streams(device: torch.device, count: int, elements: int) -> Iterator[list[SideStream]]:
    """`count` streams beside the caller's, or none for work whose launches take longer
    than its kernels; joined at the end, also after an error."""
    sides = [SideStream(stream) for stream in _streams(device, count, elements)]
    try:
        yield sides
    finally:
        for side in sides:
            side.join()


_pools: dict[tuple[int, int], list[torch.cuda.Stream]] = {}
"""By device and the caller's stream, so that two callers do not wait for each other."""


def _streams(
    device: torch.device, count: int, elements: int
) -> list[torch.cuda.Stream] | list[None]:
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return [None] * count
    if elements <= FEW and not torch.cuda.is_current_stream_capturing():
        return [None] * count
    caller = torch.cuda.current_stream(device)
    pool = _pools.setdefault((caller.device_index, caller.cuda_stream), [])
    while len(pool) < count:
        pool.append(torch.cuda.Stream(device))
    return pool[:count]
