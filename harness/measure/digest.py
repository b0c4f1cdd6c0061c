"""Outputs of steps in a few numbers: whether two cases, or two steps, computed the same.

The first step of a process starts from seeded weights and inputs; a training step then changes
the weights. Any other step computes the same from the same inputs, so the last timed output, or
that of one more step with the first inputs, is compared with the first one.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from harness.measure import accuracy, facts
from harness.measure.failures import Failed
from harness.records import Accuracy, Outcome, TensorDigest

CHUNK = 2**18
"""Elements in float64 at a time: 2 MB, which also fits on a nearly full device."""
MOST = 2**20
"""Most elements read; of a larger tensor every n-th, n odd, so that every column is read."""

Elements = Mapping[str, Tensor]
"""The elements of each tensor that are read, on the host."""


class FirstOutput:
    """The digest of the first output, and the device's peak without that of the digest."""

    def __init__(self) -> None:
        self._peak_bytes = 0
        self.digest: tuple[TensorDigest, ...] = ()
        """Empty before the first step, and if its output contains NaN or Inf."""
        self.elements: Elements = {}

    def inspect(self, output: Any) -> None:
        """Called with the output of the first step, before the next one."""
        self._peak_bytes = facts.device_peak_bytes() or 0
        self.digest, self.elements = of(output), elements(output)
        facts.start_peak()

    def device_peak_bytes(self) -> int | None:
        """The device's peak since `facts.start_peak`, without that of the digest."""
        peak = facts.device_peak_bytes()
        return None if peak is None else max(peak, self._peak_bytes)


def require_same(output: Any, step: int, first: Elements, checked: Accuracy) -> None:
    """Incorrect if the output of a step with the first inputs is not the first output, up to
    rounding: twice the bound of its accuracy, or half of its digits."""
    found = elements(output)
    bounds = {t.name: 2 * t.bound for t in checked.tensors}  # each is within the bound
    for name, tensor in {**found, **first}.items():
        error = _error(name, found, first)
        bound = bounds.get(name, math.sqrt(accuracy.eps_of(tensor.dtype)))
        if not error <= bound:
            which = f"run() in step {step}, compared with step 0: {name or 'output'}"
            problem = f"{which}: error {error:.3g}, bound {bound:.3g}"
            raise Failed(Outcome.INCORRECT, problem, accuracy=checked)


def require_change(output: Any, step: int, first: Elements, checked: Accuracy) -> None:
    """Incorrect if a step with other inputs than the first returned the same output."""
    found = elements(output)
    names = [name for name, x in found.items() if x.is_floating_point()]
    if names and not any(_error(name, found, first) for name in names):
        problem = f"run() in step {step} had fresh inputs, but returned the output of step 0"
        kept = f"{problem}: it is kept, not computed"
        raise Failed(Outcome.INCORRECT, kept, accuracy=checked)


def _error(name: str, found: Elements, first: Elements) -> float:
    """Infinite if a tensor is absent or has another shape."""
    a, b = found.get(name), first.get(name)
    if a is None or b is None or a.shape != b.shape:
        return math.inf
    return accuracy.error_of(a, b)


def elements(output: Any) -> Elements:
    """The elements of an output that its digest reads."""
    return {
        name: torch.cat([x.cpu() for _, x in _chunks(value)] or [value.reshape(-1).cpu()])
        for name, value in _tensors(output)
    }


def of(output: Any) -> tuple[TensorDigest, ...]:
    """The digests of the tensors of an output, by name; empty if one contains NaN or Inf."""
    digests = tuple(_of_tensor(name, value) for name, value in _tensors(output))
    finite = all(math.isfinite(d.norm) and math.isfinite(d.projection) for d in digests)
    return digests if finite else ()


def _tensors(output: Any) -> list[tuple[str, Tensor]]:
    named = output if isinstance(output, Mapping) else {"": output}
    found = {str(n): x.detach() for n, x in named.items() if isinstance(x, Tensor)}
    return sorted(found.items(), key=lambda item: item[0])


@torch.no_grad()
def _chunks(tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions and values of the elements that are read, in parts."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    step = -(-numbers.numel() // MOST) | 1
    for part in torch.arange(0, numbers.numel(), step).split(CHUNK):
        i = part.to(numbers.device)
        # Indexed, because flattening a tensor that is not contiguous would copy all of it.
        at = torch.unravel_index(i, numbers.shape) if numbers.dim() else ()
        yield i, numbers[at].reshape(-1)


@torch.no_grad()
def _of_tensor(name: str, tensor: Tensor) -> TensorDigest:
    squares, projection = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for i, values in _chunks(tensor):
        x = values.double()
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
