"""What the first run gave, in a few numbers: enough to see whether two cases computed the same.

The first run of a process starts from seeded weights and inputs, so that cases which differ in
nothing that matters give the same; from the second on, a training step has moved the weights.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from harness.measure import memory
from harness.measure.timing import Stopwatch, TimedStep
from harness.records import Clock, TensorDigest

CHUNK = 2**18
"""Elements in float64 at a time: 2 MB, so that a device that is nearly full has room for it."""
MOST = 2**20
"""Elements looked at; of a larger tensor every n-th, n odd, so that no column is left out."""


class OfFirst:
    """A stopwatch that takes the digest of the first reading's output, when it has been timed."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._taken = False
        self._peak_bytes = 0
        self.digest: tuple[TensorDigest, ...] = ()
        """Empty before the first reading, and where its output holds no finite numbers."""

    @property
    def clock(self) -> Clock:
        return self._watch.clock

    @property
    def own_bytes(self) -> int:
        return self._watch.own_bytes

    def read(self, run: Callable[[], Any]) -> TimedStep:
        reading = self._watch.read(run)
        if not self._taken:
            self._taken = True
            self._peak_bytes = memory.device_peak_bytes() or 0
            self.digest = of(reading.output)
            memory.start_peak()
        return reading

    def device_peak_bytes(self) -> int | None:
        """The device's peak since it was last forgotten, that of the digest left out."""
        peak = memory.device_peak_bytes()
        return None if peak is None else max(peak, self._peak_bytes)


def of(output: Any) -> tuple[TensorDigest, ...]:
    """The digests of a tensor, or of the tensors of a mapping, in the order of their names.

    Returns:
        Nothing where there is no tensor, or where one holds NaN or Inf.
    """
    digests = tuple(_of_tensor(name, tensor) for name, tensor in sorted(_tensors(output)))
    finite = all(math.isfinite(d.norm) and math.isfinite(d.projection) for d in digests)
    return digests if finite else ()


def _tensors(output: Any) -> Iterator[tuple[str, Tensor]]:
    named = output if isinstance(output, Mapping) else {"": output}
    for name, value in named.items():
        if isinstance(value, Tensor):
            yield str(name), value.detach()


@torch.no_grad()
def _of_tensor(name: str, tensor: Tensor) -> TensorDigest:
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    step = -(-numbers.numel() // MOST) | 1
    squares = numbers.new_zeros((), dtype=torch.float64)
    projection = numbers.new_zeros((), dtype=torch.float64)
    for start in range(0, numbers.numel(), CHUNK * step):
        stop = min(numbers.numel(), start + CHUNK * step)
        i = torch.arange(start, stop, step, device=numbers.device)
        # By indices: to flatten a tensor that is not contiguous would copy it whole.
        at = torch.unravel_index(i, numbers.shape) if numbers.dim() else ()
        x = numbers[at].double().reshape(-1)
        squares += x @ x
        projection += x @ i.double().cos_()
    return TensorDigest(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        norm=math.sqrt(squares.item()),
        projection=projection.item(),
    )
