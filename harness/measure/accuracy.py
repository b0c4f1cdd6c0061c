"""Is the answer right? Asked before anything is timed.

Code under test and eager definition are both judged against the reference, tensor by tensor:

    error(x) = max |x - reference| / max |reference|
    bound    = 2 error(eager) + 2 eps        eps: machine epsilon of the tensor's dtype

The eager definition at the working precision says what that precision costs here; nobody picks
a tolerance. Twice, because two orders of summation err alike but not equally, and the largest
of many errors varies. 2 eps, because eager may by luck be exact: one for the rounding of the
output, one for that of an intermediate (flash attention rounds the probabilities). Where eager
tells nothing, being absent or no less precise than the reference, the bound is 8 eps instead:
three bits of the working precision. A reference of zeros is compared absolutely.

The largest of few errors varies most: compare tensors of many elements, not a scalar loss.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from harness.records import Accuracy, TensorError
from harness.workload import Workload

EAGER_FACTOR = 2.0
ROUNDING_EPS = 2.0
ROUNDING_EPS_WITHOUT_EAGER = 8.0
SMALL = 1024
"""Elements of a tensor that is looked at after every run."""


class Incorrect(Exception):
    """The code under test disagrees with the reference."""

    def __init__(self, problem: str, accuracy: Accuracy | None = None) -> None:
        super().__init__(problem)
        self.accuracy = accuracy


class NonFinite(Exception):
    """NaN or Inf where a number belongs."""

    computation = "check"
    """Which of the workload's computations gave it: check or run."""
    step: int | None = None
    """For run: which one, counted from 0; None where only the last was looked at."""
    runs = 0
    """How many runs were done by then."""


def compare(workload: Workload, progress: Callable[[], None] = lambda: None) -> Accuracy:
    """Compare `check()` with `reference()`, within a bound set by `eager()`.

    Args:
        workload: Its check, reference and eager are called once each, in this order.
        progress: Called after each of the three.

    Raises:
        NonFinite: An output of the code under test holds NaN or Inf.
        Incorrect: An output has another shape than the reference, or lies beyond its bound.
        ValueError: The three do not name the same tensors, or the yardstick holds NaN or Inf.
    """
    if workload.check is None or workload.reference is None:
        return Accuracy(skipped=workload.no_reference or "the workload has nothing to compare")
    outputs = workload.check()
    progress()
    for name, output in outputs.items():
        require_finite(name, output)
    reference = workload.reference()
    progress()
    eager = workload.eager() if workload.eager else None
    progress()
    _require_names("check()", outputs, reference)
    _require_yardstick("reference()", reference)
    if eager is not None:
        _require_names("eager()", eager, reference)
        _require_yardstick("eager()", eager)

    tensors = tuple(
        _judge(name, outputs[name], exact, None if eager is None else eager[name])
        for name, exact in reference.items()
    )
    accuracy = Accuracy(tensors=tensors)
    beyond = [t for t in tensors if not t.error <= t.bound]
    if beyond:
        raise Incorrect(
            "; ".join(f"{t.name}: error {t.error:.3g}, bound {t.bound:.3g}" for t in beyond),
            accuracy,
        )
    return accuracy


def require_finite(name: str, value: Tensor) -> None:
    """Raise NonFinite, with the name and the count, unless every element is a number."""
    if value.is_floating_point() or value.is_complex():
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            raise NonFinite(f"{name}: {bad} of {value.numel()} values are NaN or Inf")


def require_finite_step(output: object, step: int) -> None:
    """Check what one run in a series returned, as far as it is small: a loss, not a tensor whose
    reading would sweep the caches before the next sample.

    Raises:
        NonFinite: It holds NaN or Inf; with the step.
    """
    named = output.items() if isinstance(output, Mapping) else [("output", output)]
    for name, value in named:
        if isinstance(value, Tensor) and value.numel() <= SMALL:
            try:
                require_finite(str(name), value)
            except NonFinite as error:
                error.computation, error.step, error.runs = "run", step, step + 1
                error.args = (f"{error}, first in run {step} (counted from 0)",)
                raise


def require_finite_output(output: object, *, runs: int = 1) -> None:
    """Check what the last of so many `run()` returned: a tensor, tensors by name, or nothing.

    Raises:
        NonFinite: It holds NaN or Inf.
        TypeError: It is something else, which cannot be checked.
    """
    try:
        _require_finite_output(output)
    except NonFinite as error:
        error.computation, error.runs = "run", runs
        raise


def _require_finite_output(output: object) -> None:
    match output:
        case None:
            pass
        case Tensor():
            require_finite("output", output)
        case Mapping():
            for name, value in output.items():
                if not isinstance(value, Tensor):
                    raise TypeError(f"run() returned a {type(value).__name__} named {name!r}")
                require_finite(str(name), value)
        case _:
            raise TypeError(
                f"run() returned a {type(output).__name__}; a tensor, a mapping of names to "
                "tensors, or None is what can be checked"
            )


def _judge(name: str, output: Tensor, exact: Tensor, eager: Tensor | None) -> TensorError:
    if output.shape != exact.shape:
        raise Incorrect(f"{name}: shape {list(output.shape)}, reference {list(exact.shape)}")
    eps = _eps(output.dtype)
    if eager is not None and eager.shape != exact.shape:
        raise ValueError(f"{name}: eager() {list(eager.shape)}, reference() {list(exact.shape)}")
    if eager is None or _eps(exact.dtype) >= _eps(eager.dtype):
        bound = ROUNDING_EPS_WITHOUT_EAGER * eps
    else:
        bound = EAGER_FACTOR * _error(eager, exact) + ROUNDING_EPS * eps
    return TensorError(name=name, error=_error(output, exact), bound=bound)


def _error(value: Tensor, exact: Tensor) -> float:
    if exact.numel() == 0:
        return 0.0
    exact = exact.detach().double()
    difference = (value.detach().to(exact.device, torch.float64) - exact).abs().amax()
    return float(difference) / (float(exact.abs().amax()) or 1.0)


def _eps(dtype: torch.dtype) -> float:
    """Machine epsilon; 0 for integers and booleans, which must be equal."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _require_names(who: str, got: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
    if got.keys() != reference.keys():
        raise ValueError(f"{who} names {sorted(got)}, reference() names {sorted(reference)}")


def _require_yardstick(who: str, tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{who} holds NaN or Inf in {name!r}: it cannot be a yardstick")
