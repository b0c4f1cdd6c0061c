"""The rotary kernel against complex multiplication in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa.kernels.rotary import rotate, rotate_into
from nsa.tests.operator_inputs import DEVICES, normal

Shape = tuple[int, int, int, int]

SHAPES = [
    pytest.param((1, 1, 1, 2), id="one-pair"),
    pytest.param((2, 37, 6, 64), id="rows-that-fill-no-tile"),
    pytest.param((1, 5, 3, 80), id="channels-and-heads-no-powers-of-two"),
    pytest.param((2, 9, 2, 192), id="paper's-head"),
    pytest.param((1, 0, 2, 64), id="no-tokens"),
]


def turns(T: int, D: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine of arbitrary angles, [T, D / 2], float32."""
    angles = 3 * normal(T, D // 2, seed=7, device=device)
    return angles.cos().float(), angles.sin().float()


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int = 1) -> Tensor:
    """The definition: pairs as complex numbers times exp(i * angle)."""
    pairs = torch.view_as_complex(x.double().contiguous().unflatten(-1, (-1, 2)))
    turn = torch.complex(cos.double(), sign * sin.double())
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2)


def contiguous(x: Tensor) -> Tensor:
    return x


def heads_first(x: Tensor) -> Tensor:
    """The same numbers, laid out [B, H, T, D]: B and T cannot be joined to one axis."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(x: Tensor) -> Tensor:
    """The same numbers, cut out of a projection with more heads, at odd addresses."""
    B, T, H, D = x.shape
    wide = torch.full((B, T, H * D + 7), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., 3:-4] = x.flatten(-2)
    cut: Tensor = wide[..., 3:-4].unflatten(-1, (H, D))
    return cut


def channels_apart(x: Tensor) -> Tensor:
    """The same numbers with the channels not next to each other."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


Layout = Callable[[Tensor], Tensor]
LAYOUTS = [contiguous, heads_first, sliced, channels_apart]


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    """bfloat16 too where Triton compiles; its interpreter gets bfloat16 wrong."""
    if device == "cuda":
        return (torch.float16, torch.bfloat16, torch.float32)
    return (torch.float16, torch.float32)


def assert_rounded_once(got: Tensor, exact: Tensor) -> None:
    """Half a unit of the last place, and float32's own error where terms cancel."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=0.51 * eps, atol=2e-6)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN."""
    empty = torch.empty

    def poisoned(size: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return empty(size, dtype=dtype, device=device).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradient_are_the_exact_ones_rounded(
    shape: Shape, layout: Layout, device: str
) -> None:
    cos, sin = turns(shape[1], shape[3], device)
    for dtype in dtypes(device):
        x = layout(normal(*shape, seed=0, device=device, dtype=dtype)).requires_grad_()
        grad = layout(normal(*shape, seed=1, device=device, dtype=dtype))

        out = rotate(x, cos, sin)
        (dx,) = torch.autograd.grad(out, x, grad)

        assert out.dtype == dx.dtype == dtype
        assert out.is_contiguous()
        assert_rounded_once(out.detach(), turned(x.detach(), cos, sin))
        wide = x.detach().double().requires_grad_()
        (exact,) = torch.autograd.grad(turned(wide, cos, sin), wide, grad.double())
        assert_rounded_once(dx, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_in_place_changes_these_heads_and_no_other_number(device: str) -> None:
    T, H, D = 11, 5, 48
    cos, sin = turns(T, D, device)
    projection = normal(2, T, 2 * H * D, seed=0, device=device, dtype=torch.float16)
    before = projection.clone()
    heads = projection.unflatten(-1, (-1, D))[:, :, H - 1 : -1]
    expected = rotate(heads.clone(), cos, sin)

    returned = rotate_into(heads, heads, cos, sin)

    assert returned is heads
    assert torch.equal(heads, expected)
    untouched = before.unflatten(-1, (-1, D)).clone()
    untouched[:, :, H - 1 : -1] = expected
    assert torch.equal(projection, untouched.flatten(-2))


@pytest.mark.parametrize("device", DEVICES)
def test_the_inverse_turns_back(device: str) -> None:
    cos, sin = turns(9, 64, device)
    x = normal(1, 9, 3, 64, seed=0, device=device, dtype=torch.float32)

    back = rotate_into(torch.full_like(x, torch.nan), rotate(x, cos, sin), cos, sin, inverse=True)

    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_angles_may_be_the_parts_of_one_complex_tensor(device: str) -> None:
    cos, sin = turns(9, 64, device)
    both = torch.complex(cos, sin)
    x = normal(2, 9, 3, 64, seed=0, device=device, dtype=torch.float16)

    assert torch.equal(rotate(x, both.real, both.imag), rotate(x, cos, sin))


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_plain_sum_has_no_strides(device: str) -> None:
    """out.sum().backward() hands over an expanded scalar."""
    cos, sin = turns(5, 16, device)
    x = normal(1, 5, 2, 16, seed=0, device=device, dtype=torch.float32).requires_grad_()

    (dx,) = torch.autograd.grad(rotate(x, cos, sin).sum(), x)

    torch.testing.assert_close(dx.double(), turned(torch.ones_like(dx), cos, sin, sign=-1))
