"""Comparison of outputs with the reference, and checks for NaN and Inf."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.measure.accuracy import compare, require_finite_output
from harness.measure.failures import Failed, NonFinite
from harness.workload import Workload

EXACT = torch.linspace(-1, 1, 1000, dtype=torch.float64)


def workload(
    output: Tensor | Mapping[str, Tensor],
    *,
    eager: Tensor | None = None,
    reference: Tensor = EXACT,
    **rest: Any,
) -> Workload:
    outputs = {"o": output} if isinstance(output, Tensor) else output
    return Workload(
        run=lambda: None,
        check=lambda: outputs,
        reference=lambda: {"o": reference},
        eager=None if eager is None else lambda: {"o": eager},
        **rest,
    )


def test_the_bound_is_twice_the_eager_error_and_two_epsilon_of_the_largest_value() -> None:
    exact = 1000 * EXACT
    eager, output = (exact + 10).bfloat16(), (exact - 15).bfloat16()

    (tensor,) = compare(workload(output, eager=eager, reference=exact)).tensors

    errors = [float((x.double() - exact).abs().max() / 1000) for x in (eager, output)]
    assert tensor.name == "o"
    assert tensor.bound == pytest.approx(2 * errors[0] + 2 * torch.finfo(torch.bfloat16).eps)
    assert tensor.error == pytest.approx(errors[1])


@pytest.mark.parametrize("eager", [None, EXACT])
def test_without_a_less_precise_eager_the_bound_is_eight_epsilon(eager: Tensor | None) -> None:
    """Also of an output that requires a gradient."""
    (tensor,) = compare(workload(EXACT.float().requires_grad_() * 1, eager=eager)).tensors

    assert tensor.bound == 8 * torch.finfo(torch.float32).eps
    assert tensor.error < 1e-6


NUMBERS, ZERO = torch.arange(10), 0 * EXACT.float()


@pytest.mark.parametrize(
    ("exact", "right", "wrong", "error"),
    [(NUMBERS, NUMBERS, NUMBERS.flip(0), 1), (0 * EXACT, ZERO, ZERO + 1e-3, 1e-3)],
)
def test_integers_must_be_equal_and_zeros_are_compared_absolutely(
    exact: Tensor, right: Tensor, wrong: Tensor, error: float
) -> None:
    assert compare(workload(right, reference=exact)).tensors[0].error == 0
    with pytest.raises(Failed, match="error") as raised:
        compare(workload(wrong, reference=exact))
    assert raised.value.seen["accuracy"].tensors[0].error == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_counted_and_another_shape_is_incorrect(bad: float) -> None:
    output = EXACT.float().clone()
    output[3] = bad

    with pytest.raises(NonFinite, match="o: 1 of 1000 values"):
        compare(workload(output))
    with pytest.raises(Failed, match="shape"):
        compare(workload(torch.zeros(1)))  # would broadcast


def test_reference_and_eager_must_be_finite_and_name_the_same_tensors() -> None:
    nan = torch.full((1000,), float("nan"), dtype=torch.float64)

    with pytest.raises(ValueError, match="reference"):
        compare(workload(EXACT.float(), reference=nan))
    with pytest.raises(ValueError, match="eager"):
        compare(workload(EXACT.float(), eager=nan.float()))
    with pytest.raises(ValueError, match=r"check.*lse"):
        compare(workload({"o": EXACT.float(), "lse": EXACT.float()}))


def test_a_workload_without_a_reference_is_skipped_with_the_reason() -> None:
    without = Workload(run=lambda: None, check=dict, no_reference="64 GiB of scores")

    assert compare(without).skipped == "64 GiB of scores"
    assert compare(Workload(run=lambda: None)).skipped == "the workload has nothing to compare"


def test_outputs_of_a_run_are_checked_by_name() -> None:
    require_finite_output(None)
    require_finite_output({"loss": torch.ones(())})
    with pytest.raises(NonFinite, match="loss: 1 of 1") as raised:
        require_finite_output({"loss": torch.tensor(float("nan"))}, steps=7)
    assert (raised.value.source, raised.value.steps) == ("run", 7)
    with pytest.raises(NonFinite, match="output: 1 of 2"):
        require_finite_output(torch.tensor([1, float("inf")]))
    for wrong in ([1.0], {"loss": 1.0}):
        with pytest.raises(TypeError):
            require_finite_output(wrong)
