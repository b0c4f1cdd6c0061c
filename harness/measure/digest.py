"""Outputs of steps in a few numbers: whether two cases, or two steps, computed the same.

The first step of a process starts from seeded weights and inputs; a training step then changes
the weights. Any other step computes the same from the same inputs, so the last timed output is
compared with the first one, or with that of one more step on the same inputs.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from harness.measure import accuracy, memory
from harness.records import Accuracy, TensorDigest
from harness.workload import Workload

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
        self._peak_bytes = memory.device_peak_bytes() or 0
        self.digest, self.elements = of(output), elements(output)
        memory.start_peak()

    def device_peak_bytes(self) -> int | None:
        """The device's peak since `memory.start_peak`, without that of the digest."""
        peak = memory.device_peak_bytes()
        return None if peak is None else max(peak, self._peak_bytes)


class Repeats:
    """Compares outputs of steps with the same inputs: they agree up to rounding."""

    def __init__(self, workload: Workload, checked: Accuracy, first: Elements) -> None:
        self._stateful = workload.stateful
        self._bounds = {t.name: 2 * t.bound for t in checked.tensors}  # each is within the bound
        self._checked = checked
        self._seen = {0: (0, first)}
        self._equal, self.problem = False, ""

    def add(self, output: Any, step: int, inputs: int) -> None:
        """Compare the output of a step with the first one seen of the same inputs, if any."""
        found = elements(output)
        before, expected = self._seen.setdefault(inputs, (step, found))
        if expected is found or self._stateful:
            return
        errors = [self._error(name, found, expected) for name in {**expected, **found}]
        self._equal |= bool(found) and not any(error for _, error, _ in errors)
        for name, error, bound in errors:
            if not error <= bound:
                where = f"run() in step {step}, compared with step {before}"
                self.problem = self.problem or (
                    f"{where}: {name or 'output'}: error {error:.3g}, bound {bound:.3g}"
                )

    def require(self) -> None:
        """Raise Incorrect if an output was wrong.

        If the workload does not say whether a step changes what the next one computes, outputs
        that never come back are taken for those of such steps.
        """
        if self.problem and (self._stateful is False or self._equal):
            hint = (
                "" if self._stateful is False else "; set Workload.stateful if steps change state"
            )
            raise accuracy.Incorrect(self.problem + hint, self._checked)

    def require_change(self, output: Any, step: int) -> None:
        """Raise Incorrect if a step with other inputs than the first returned the same output."""
        found, (_, first) = elements(output), self._seen[0]
        names = [name for name, x in found.items() if x.is_floating_point()]
        if names and not any(self._error(name, found, first)[1] for name in names):
            problem = f"run() in step {step} had fresh inputs, but returned the output of step 0"
            raise accuracy.Incorrect(f"{problem}: it is kept, not computed", self._checked)

    def _error(self, name: str, found: Elements, expected: Elements) -> tuple[str, float, float]:
        a, b = found.get(name), expected.get(name)
        if a is None or b is None or a.shape != b.shape:
            return name, math.inf, 0.0
        bound = self._bounds.get(name, math.sqrt(accuracy.eps_of(b.dtype)))
        return name, accuracy.error_of(a, b), bound


def elements(output: Any) -> Elements:
    """The elements of an output that its digest reads."""
    return {
        name: torch.cat([x.cpu() for _, x in _chunks(value)] or [value.reshape(-1).cpu()])
        for name, value in _tensors(output)
    }


def of(output: Any) -> tuple[TensorDigest, ...]:
    """The digests of a tensor, or of a mapping's tensors sorted by name; empty if one contains
    NaN or Inf."""
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
    for start in range(0, numbers.numel(), CHUNK * step):
        stop = min(numbers.numel(), start + CHUNK * step)
        i = torch.arange(start, stop, step, device=numbers.device)
        # Indexed, because flattening a tensor that is not contiguous would copy all of it.
        at = torch.unravel_index(i, numbers.shape) if numbers.dim() else ()
        yield i, numbers[at].reshape(-1)


@torch.no_grad()
def _of_tensor(name: str, tensor: Tensor) -> TensorDigest:
    squares = torch.zeros((), dtype=torch.float64, device=tensor.device)
    projection = torch.zeros((), dtype=torch.float64, device=tensor.device)
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
