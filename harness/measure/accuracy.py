"""Accuracy of the code under test, checked before anything is timed, tensor by tensor:

    error(x) = max |x - reference| / max |reference|
    bound    = 2 error(eager) + 2 eps        eps: machine epsilon of the tensor's dtype

The error of the eager definition shows what the working precision costs, so no tolerance is chosen
by hand. The factor 2: two orders of summation have similar, not equal errors, and the largest of
many errors varies. The 2 eps: eager may be exact by luck; one for the rounding of the output, one
for that of an intermediate (flash attention rounds the probabilities). If eager is absent or as
precise as the reference, the bound is 8 eps: three bits of the working precision. If the reference
is zero, the error is absolute.

The largest of a few errors varies most: compare tensors of many elements, not a scalar loss.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from harness.measure.failures import Failed, NonFinite
from harness.records import Accuracy, Outcome, TensorError
from harness.workload import Workload

EAGER_FACTOR = 2.0
ROUNDING_EPS = 2.0
ROUNDING_EPS_WITHOUT_EAGER = 8.0
SMALL = 1024
"""Most elements of a tensor that is checked after every step."""


def compare(workload: Workload, progress: Callable[[], None] = lambda: None) -> Accuracy:
    """Compare `check()` with `reference()`, within a bound set by `eager()`; `progress` after each.

    Raises Failed if the code under test is incorrect or not finite, and ValueError if the three
    name different tensors, or if reference or eager contain NaN or Inf.
    """
    if workload.check is None or workload.reference is None:
        return Accuracy(skipped=workload.no_reference or "the workload has nothing to compare")
    outputs = workload.check()
    progress()
    for name, output in outputs.items():
        _require_finite(name, output)
    reference = workload.reference()
    progress()
    eager = workload.eager() if workload.eager else None
    progress()
    _require_comparable("check()", outputs, reference, finite=False)
    _require_comparable("reference()", reference, reference, finite=True)
    if eager is not None:
        _require_comparable("eager()", eager, reference, finite=True)

    tensors = tuple(
        _judge(name, outputs[name], exact, None if eager is None else eager[name])
        for name, exact in reference.items()
    )
    accuracy = Accuracy(tensors=tensors, sampled=workload.sampled)
    if beyond := [t for t in tensors if not t.error <= t.bound]:
        worst, *others = sorted(beyond, key=lambda t: t.bound / t.error)
        also = f"; {', '.join(t.name for t in others)} too" if others else ""
        problem = f"{worst.name}: error {worst.error:.3g}, bound {worst.bound:.3g}{also}"
        raise Failed(Outcome.INCORRECT, problem, accuracy=accuracy)
    return accuracy


def _require_finite(name: str, value: Tensor, steps: int | None = None, when: str = "") -> None:
    if value.is_floating_point() or value.is_complex():
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            problem = f"{name}: {bad} of {value.numel()} values are NaN or Inf{when}"
            raise NonFinite(problem, "check" if steps is None else "run", steps)


def require_finite_step(output: object, step: int, *, own: int | None = None) -> None:
    """Raise NonFinite if a small output of a step, such as a loss, contains NaN or Inf; reading a
    large one would change the caches. `own`: the workload's own number of the step."""
    for name, value in _named(output):
        if isinstance(value, Tensor) and value.numel() <= SMALL:
            when = f"{step} (counted from 0)" if own is None else f"{own}"
            _require_finite(name, value, step + 1, f", first in step {when}")


def require_finite_output(output: object, *, steps: int = 1) -> None:
    """Raise NonFinite if what the last of `steps` calls of `run()` returned contains NaN or Inf."""
    for name, value in _named(output) if output is not None else ():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"run() returned a {type(value).__name__} as {name!r}; "
                "return a tensor, a mapping of names to tensors, or None"
            )
        _require_finite(name, value, steps)


def _named(output: object) -> Iterable[tuple[str, object]]:
    return output.items() if isinstance(output, Mapping) else [("output", output)]


def _judge(name: str, output: Tensor, exact: Tensor, eager: Tensor | None) -> TensorError:
    if output.shape != exact.shape:
        problem = f"{name}: shape {list(output.shape)}, reference {list(exact.shape)}"
        raise Failed(Outcome.INCORRECT, problem)
    eps = eps_of(output.dtype)
    if eager is not None and eager.shape != exact.shape:
        raise ValueError(f"{name}: eager() {list(eager.shape)}, reference() {list(exact.shape)}")
    if eager is None or eps_of(exact.dtype) >= eps_of(eager.dtype):
        bound = ROUNDING_EPS_WITHOUT_EAGER * eps
    else:
        bound = EAGER_FACTOR * error_of(eager, exact) + ROUNDING_EPS * eps
    return TensorError(name=name, error=error_of(output, exact), bound=bound)


def error_of(value: Tensor, exact: Tensor) -> float:
    """Largest difference, over the largest value of `exact`."""
    if exact.numel() == 0:
        return 0.0
    exact = exact.detach().double()
    difference = (value.detach().to(exact.device, torch.float64) - exact).abs().amax()
    return float(difference) / (float(exact.abs().amax()) or 1.0)


def eps_of(dtype: torch.dtype) -> float:
    """Machine epsilon; 0 for integers and booleans, so that they must be equal."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _require_comparable(
    source: str, tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor], *, finite: bool
) -> None:
    if tensors.keys() != reference.keys():
        raise ValueError(f"{source} names {sorted(tensors)}, reference() names {sorted(reference)}")
    for name, value in tensors.items() if finite else ():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{source} contains NaN or Inf in {name!r}; nothing can be compared")
