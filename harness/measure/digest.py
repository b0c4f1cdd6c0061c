"""The output of the first step in a few numbers, which show whether two cases computed the same.

The first step of a process starts from seeded weights and inputs; a training step then changes
the weights.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.measure import memory
from harness.records import TensorDigest

CHUNK = 2**18
"""Elements in float64 at a time: 2 MB, which also fits on a nearly full device."""
MOST = 2**20
"""Most elements read; of a larger tensor every n-th, n odd, so that every column is read."""


class FirstOutput:
    """The digest of the first output, and the device's peak without that of the digest."""

    def __init__(self) -> None:
        self._peak_bytes = 0
        self.digest: tuple[TensorDigest, ...] = ()
        """Empty before the first step, and if its output contains NaN or Inf."""

    def inspect(self, output: Any) -> None:
        """Called with the output of the first step, before the next one."""
        self._peak_bytes = memory.device_peak_bytes() or 0
        self.digest = of(output)
        memory.start_peak()

    def device_peak_bytes(self) -> int | None:
        """The device's peak since `memory.start_peak`, without that of the digest."""
        peak = memory.device_peak_bytes()
        return None if peak is None else max(peak, self._peak_bytes)


def of(output: Any) -> tuple[TensorDigest, ...]:
    """The digests of a tensor, or of a mapping's tensors sorted by name; empty if one contains
    NaN or Inf."""
    named = output if isinstance(output, Mapping) else {"": output}
    digests = tuple(
        _of_tensor(str(name), value.detach())
        for name, value in sorted(named.items(), key=lambda item: str(item[0]))
        if isinstance(value, Tensor)
    )
    finite = all(math.isfinite(d.norm) and math.isfinite(d.projection) for d in digests)
    return digests if finite else ()


@torch.no_grad()
def _of_tensor(name: str, tensor: Tensor) -> TensorDigest:
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    step = -(-numbers.numel() // MOST) | 1
    squares = numbers.new_zeros((), dtype=torch.float64)
    projection = numbers.new_zeros((), dtype=torch.float64)
    for start in range(0, numbers.numel(), CHUNK * step):
        stop = min(numbers.numel(), start + CHUNK * step)
        i = torch.arange(start, stop, step, device=numbers.device)
        # Indexed, because flattening a tensor that is not contiguous would copy all of it.
        at = torch.unravel_index(i, numbers.shape) if numbers.dim() else ()
        x = numbers[at].double().reshape(-1)
        # Not `x @ x`: cuBLAS would keep a workspace of 32 MiB, which the step's peak then includes.
        squares += (x * x).sum()
        projection += i.double().cos_().mul_(x).sum()
    return TensorDigest(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        norm=math.sqrt(squares.item()),
        projection=projection.item(),
    )
