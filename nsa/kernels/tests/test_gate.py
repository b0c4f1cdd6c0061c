"""The gate's kernels against the formula in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa import reference
from nsa.kernels.gate import gate_backward, gate_forward, row_dot
from nsa.tests.operator_inputs import DEVICES, normal

SHAPES = [
    pytest.param((1, 1, 1, 16), id="one-row"),
    pytest.param((2, 37, 6, 64), id="rows-that-fill-no-tile"),
    pytest.param((1, 5, 3, 80), id="channels-and-heads-no-powers-of-two"),
    pytest.param((1, 9, 2, 256), id="widest-head"),
    pytest.param((2, 3, 2, 1), id="one-channel"),
    pytest.param((1, 0, 2, 64), id="no-tokens"),
]


def contiguous(x: Tensor) -> Tensor:
    return x


def heads_first(x: Tensor) -> Tensor:
    """The same numbers, laid out [B, H, T, D]: B and T cannot be joined to one axis."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(x: Tensor) -> Tensor:
    """The same numbers, cut out of a wider projection; rows begin at odd addresses."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., 3:-2] = x
    return wide[..., 3:-2]


def channels_apart(x: Tensor) -> Tensor:
    """The same numbers with the channels not next to each other."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


LAYOUTS = [contiguous, heads_first, sliced, channels_apart]
Layout = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN."""
    empty = torch.empty

    def poisoned(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return empty(*size, dtype=dtype, device=device).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", poisoned)


def draw(
    shape: tuple[int, int, int, int],
    device: str,
    *,
    layout: Layout = contiguous,
    dtype: torch.dtype = torch.float16,
    gates_dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, list[Tensor]]:
    """Gates [B, T, H, 3] and three branches' outputs."""
    gates = normal(*shape[:3], 3, seed=0, device=device, dtype=gates_dtype).sigmoid()
    branches = [normal(*shape, seed=1 + i, device=device, dtype=dtype) for i in range(3)]
    return layout(gates), [layout(o) for o in branches]


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    """bfloat16 too where Triton compiles; its interpreter gets bfloat16 wrong."""
    return (torch.float16, torch.bfloat16) if device == "cuda" else (torch.float16,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_rounds_the_exact_sum_once(
    shape: tuple[int, int, int, int], layout: Layout, device: str
) -> None:
    for dtype in dtypes(device):
        gates, branches = draw(shape, device, layout=layout, dtype=dtype)
        exact = reference.gated_sum(gates.double(), *(o.double() for o in branches))

        out = gate_forward(gates, *branches)

        assert out.dtype == dtype
        assert out.is_contiguous()
        eps = torch.finfo(dtype).eps
        # Half a unit of the last place, and the float32 sum's own error where terms cancel.
        torch.testing.assert_close(out.double(), exact, rtol=0.51 * eps, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gates_dtype", [torch.float32, torch.float64])
def test_gates_may_have_a_dtype_of_their_own(gates_dtype: torch.dtype, device: str) -> None:
    gates, branches = draw((1, 5, 6, 64), device, gates_dtype=gates_dtype)
    exact = reference.gated_sum(gates.double(), *(o.double() for o in branches))

    out = gate_forward(gates, *branches)

    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), exact, rtol=5e-4, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_is_the_gradient_of_the_gates(
    shape: tuple[int, int, int, int], layout: Layout, device: str
) -> None:
    for dtype in dtypes(device):
        gates, branches = draw(shape, device, layout=layout, dtype=dtype)
        do = layout(normal(*shape, seed=9, device=device, dtype=dtype))
        wide = gates.double().detach().requires_grad_()
        out = reference.gated_sum(wide, *(o.double() for o in branches))
        (exact,) = torch.autograd.grad(out, wide, do.double())

        delta = gate_backward(do, *branches)

        assert delta.dtype == torch.float32
        assert delta.is_contiguous()
        torch.testing.assert_close(delta.double(), exact, rtol=1e-5, atol=1e-4)
        for b, o in enumerate(branches):
            one = row_dot(do, o)
            assert one.is_contiguous()
            torch.testing.assert_close(one.double(), exact[..., b], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_operands_may_have_different_layouts(device: str) -> None:
    shape = (2, 9, 4, 64)
    gates, branches = draw(shape, device)
    do = normal(*shape, seed=9, device=device, dtype=torch.float16)
    mixed = [sliced(branches[0]), heads_first(branches[1]), branches[2]]
    every_second = torch.stack([gates, gates], -1)[..., 0]

    assert torch.equal(gate_forward(every_second, *mixed), gate_forward(gates, *branches))
    got, expected = gate_backward(do, *mixed), gate_backward(do, *branches)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # sums in another order


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_plain_sum_has_no_strides(device: str) -> None:
    """out.sum().backward() hands over an expanded scalar."""
    _, branches = draw((1, 5, 2, 64), device)
    do = torch.ones((), dtype=torch.float16, device=device).expand(1, 5, 2, 64)

    delta = gate_backward(do, *branches)

    exact = torch.stack([o.double().sum(-1) for o in branches], -1)
    torch.testing.assert_close(delta.double(), exact, rtol=1e-5, atol=1e-4)
