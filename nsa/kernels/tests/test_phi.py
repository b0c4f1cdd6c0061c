"""phi's kernels against nsa.model.attention.Phi over nsa.reference.compress_blocks."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import reference
from nsa.config import NSAConfig
from nsa.kernels.phi import forward
from nsa.kernels.phi import weights as phi_weights
from nsa.kernels.phi.forward import block_starts, phi_blocks
from nsa.model.attention import Phi
from nsa.routes.tests.test_routes import assert_none
from nsa.tests.operator_inputs import DEVICES, SMALL, needs_gpu, normal

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter, for the bounds of a loop that are known at run time only.
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning",
    # torch, where a process's first cuBLAS product is one of a backward pass.
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
)

APART = NSAConfig(
    compress_block_size=8, compress_stride=8, select_block_size=16, num_blocks=3, window_size=16
)
"""Blocks that do not overlap."""
DENSE = NSAConfig(
    compress_block_size=6, compress_stride=2, select_block_size=12, num_blocks=3, window_size=16
)
"""Three blocks share a token; no size is a power of two but the stride."""

SHAPES = [
    pytest.param((1, 61, 2, 16), SMALL, id="plain"),
    pytest.param((2, 47, 3, 80), SMALL, id="channels-and-heads-no-powers-of-two"),
    pytest.param((2, 45, 1, 192), SMALL, id="paper's-head"),
    pytest.param((2, 43, 2, 24), APART, id="blocks-apart"),
    pytest.param((2, 39, 2, 24), DENSE, id="three-blocks-share-a-token"),
    pytest.param((1, 300, 2, 8), SMALL, id="rows-of-several-tiles"),
    pytest.param((1, 8, 2, 16), SMALL, id="T=l"),
]
NAMES = ("x", "position", "w1", "b1", "w2", "b2")
Layout = Callable[[Tensor], Tensor]
Blocks = Callable[[Tensor, Phi], Tensor]


def contiguous(x: Tensor) -> Tensor:
    return x


def heads_first(x: Tensor) -> Tensor:
    """The same numbers, laid out [B, H, T, D]."""
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


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    """bfloat16 too where Triton compiles; its interpreter gets bfloat16 wrong."""
    return (torch.float16, torch.bfloat16) if device == "cuda" else (torch.float16,)


def mlp(config: NSAConfig, dim: int, device: str) -> Phi:
    """phi with biases that are not zero, in float64."""
    module = Phi(config.compress_block_size, dim).to(device, torch.float64)
    rng = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        draw = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        parameter.data = (draw * parameter.shape[-1] ** -0.5).half().double().to(device)
    return module


def parameters(module: Phi) -> tuple[Tensor, ...]:
    mix, out = module.mix, module.out
    return module.position, mix.weight, mix.bias, out.weight, out.bias


def defined(config: NSAConfig, cu_seqlens: Tensor | None = None) -> Blocks:
    def run(x: Tensor, module: Phi) -> Tensor:
        return reference.compress_blocks(x, module, config=config, cu_seqlens=cu_seqlens)

    return run


def fused(config: NSAConfig, starts: Tensor | None = None) -> Blocks:
    def run(x: Tensor, module: Phi) -> Tensor:
        return phi_blocks(x, *parameters(module), config=config, starts=starts)

    return run


def outputs_and_gradients(
    run: Blocks, x: Tensor, module: Phi, dtype: torch.dtype, weights: torch.dtype | None = None
) -> Mapping[str, Tensor]:
    """The output and all gradients, for a fixed Gaussian gradient of the output."""
    x = x.detach().to(dtype).requires_grad_()
    module.to(weights or dtype)
    out = run(x, module)
    grad = normal(*out.shape, seed=9, device=str(out.device)).half().to(dtype)
    grads = torch.autograd.grad(out, (x, *parameters(module)), grad)
    return {"out": out.detach(), **dict(zip(NAMES, grads, strict=True))}


def excess(got: Any, definition: Any, exact: Any, dtype: torch.dtype) -> dict[str, float]:
    """By how much the error exceeds twice the definition's; see test_routes.excess_error."""
    over = {}
    for name, truth in exact.items():
        assert got[name].shape == truth.shape
        allowed = 2 * (definition[name] - truth).norm() + torch.finfo(dtype).eps * truth.norm()
        over[name] = ((got[name] - truth).norm() - allowed).item()
    return over


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        return empty(*size, **options).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "config"), SHAPES)
def test_error_is_no_worse_than_that_of_the_definition(
    shape: tuple[int, int, int, int], config: NSAConfig, device: str
) -> None:
    for dtype in dtypes(device):
        module = mlp(config, shape[-1], device)
        x = normal(*shape, seed=0, device=device, dtype=dtype)
        exact = outputs_and_gradients(defined(config), x, module, torch.float64)
        definition = outputs_and_gradients(defined(config), x, module, dtype)

        got = outputs_and_gradients(fused(config), x, module, dtype)

        assert all(g.dtype == dtype for g in got.values())
        assert_none(excess(got, definition, exact, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [heads_first, sliced, channels_apart])
def test_any_strides(layout: Layout, device: str) -> None:
    module = mlp(SMALL, 16, device).half()
    x = normal(2, 31, 3, 16, seed=0, device=device, dtype=torch.float16)
    grad = normal(2, 6, 3, 16, seed=1, device=device, dtype=torch.float16)
    plain, strided = x.clone().requires_grad_(), layout(x).requires_grad_()
    inputs = parameters(module)

    expected_out = fused(SMALL)(plain, module)
    out = fused(SMALL)(strided, module)
    expected = torch.autograd.grad(expected_out, (plain, *inputs), grad)
    got = torch.autograd.grad(out, (strided, *inputs), layout(grad))

    assert torch.equal(out, expected_out)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_one_program_a_tile_gives_what_many_give(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = mlp(SMALL, 32, device)
    x = normal(1, 70, 2, 32, seed=0, device=device, dtype=torch.float16)
    exact = outputs_and_gradients(defined(SMALL), x, module, torch.float64)
    many = outputs_and_gradients(fused(SMALL), x, module, torch.float16)
    for where in (forward, phi_weights):
        monkeypatch.setattr(where, "FILL", 1)

    one = outputs_and_gradients(fused(SMALL), x, module, torch.float16)

    assert_none(excess(one, many, exact, torch.float16))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dim", [80, 128, 192, 256])
@pytest.mark.parametrize("packed", [False, True], ids=["one-document", "documents"])
def test_thousands_of_rows_in_steps_that_overlap(packed: bool, dim: int) -> None:
    """Here a load once overwrote what the product of the step before still read: few rows lost."""
    config = NSAConfig()
    bounds = [0, 3001, 3010, 5000, 16384] if packed else [0, 16384]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    starts = block_starts(cu_seqlens, bounds[-1], config) if packed else None
    rows = sum(config.compressed_length(b - a) for a, b in pairwise(bounds))
    define = defined(config, cu_seqlens)

    def used(x: Tensor, module: Phi) -> Tensor:
        return fused(config, starts)(x, module)[:, :rows]

    for dtype in dtypes("cuda"):
        module = mlp(config, dim, "cuda")
        x = normal(1, bounds[-1], 4, dim, seed=0, device="cuda", dtype=dtype)
        exact = outputs_and_gradients(define, x, module, torch.float64)
        definition = outputs_and_gradients(define, x, module, dtype)

        got = outputs_and_gradients(used, x, module, dtype)

        assert_none(excess(got, definition, exact, dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_float32_masters_get_float32_gradients(device: str) -> None:
    module = mlp(SMALL, 16, device)
    x = normal(2, 31, 2, 16, seed=0, device=device, dtype=torch.float16)
    exact = outputs_and_gradients(defined(SMALL), x, module, torch.float64)
    definition = outputs_and_gradients(defined(SMALL), x, module, torch.float16)

    got = outputs_and_gradients(fused(SMALL), x, module, torch.float16, torch.float32)

    assert got["out"].dtype == got["x"].dtype == torch.float16
    assert all(got[name].dtype == torch.float32 for name in NAMES[1:])
    assert_none(excess(got, definition, exact, torch.float16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T", [0, 1, 7])
def test_no_block_gives_no_row_and_zero_gradients(T: int, device: str) -> None:
    module = mlp(SMALL, 16, device)
    x = normal(2, T, 2, 16, seed=0, device=device, dtype=torch.float16)

    got = outputs_and_gradients(fused(SMALL), x, module, torch.float16)

    assert got["out"].shape == (2, 0, 2, 16)
    assert all(torch.equal(got[name], torch.zeros_like(got[name])) for name in NAMES)


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_is_asked_for_is_computed(device: str) -> None:
    module = mlp(SMALL, 16, device).half()
    x = normal(1, 31, 2, 16, seed=0, device=device, dtype=torch.float16)
    grad = normal(1, 6, 2, 16, seed=1, device=device, dtype=torch.float16)
    wanted = x.clone().requires_grad_()
    both = torch.autograd.grad(fused(SMALL)(wanted, module), (wanted, *parameters(module)), grad)

    weights = torch.autograd.grad(fused(SMALL)(x, module), parameters(module), grad)
    (dx,) = torch.autograd.grad(fused(SMALL)(wanted, module.requires_grad_(False)), wanted, grad)

    assert torch.equal(dx, both[0])
    assert all(torch.equal(a, b) for a, b in zip(weights, both[1:], strict=True))


DOCUMENTS = [
    pytest.param([5, 30, 1, 0, 41], SMALL, id="some-without-a-block"),
    pytest.param([8, 8, 9, 12], SMALL, id="one-block-each-and-two"),
    pytest.param([3, 2], SMALL, id="no-block-at-all"),
    pytest.param([64], SMALL, id="one-document"),
    pytest.param([9, 25, 6, 7], DENSE, id="three-blocks-share-a-token"),
    pytest.param([9, 25, 8], APART, id="blocks-apart"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lengths", "config"), DOCUMENTS)
def test_packed_documents(lengths: list[int], config: NSAConfig, device: str) -> None:
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    starts = block_starts(cu_seqlens, bounds[-1], config)
    rows = sum(config.compressed_length(n) for n in lengths)
    module = mlp(config, 16, device)
    x = normal(1, bounds[-1], 2, 16, seed=0, device=device, dtype=torch.float16)

    def used(x: Tensor, module: Phi) -> Tensor:
        out = fused(config, starts)(x, module)
        assert not out[:, rows:].any()
        return out[:, :rows]

    exact = outputs_and_gradients(defined(config, cu_seqlens), x, module, torch.float64)
    definition = outputs_and_gradients(defined(config, cu_seqlens), x, module, torch.float16)
    got = outputs_and_gradients(used, x, module, torch.float16)

    assert_none(excess(got, definition, exact, torch.float16))


@pytest.mark.parametrize("device", DEVICES)
def test_unused_rows_pass_nothing_on(device: str) -> None:
    """For any gradient of a row that no block fills."""
    cu_seqlens = torch.tensor([0, 11, 30], dtype=torch.int32, device=device)
    starts = block_starts(cu_seqlens, 30, SMALL)
    module = mlp(SMALL, 16, device).half()
    x = normal(1, 30, 2, 16, seed=0, device=device, dtype=torch.float16).requires_grad_()
    assert starts.tolist() == [0, 11, 15, 19, -1, -1]
    out = fused(SMALL, starts)(x, module)
    quiet = normal(*out.shape, seed=1, device=device, dtype=torch.float16)
    quiet[:, 4:] = 0
    loud = quiet.clone()
    loud[:, 4:] = 100

    for a, b in zip(
        torch.autograd.grad(out, (x, *parameters(module)), quiet, retain_graph=True),
        torch.autograd.grad(out, (x, *parameters(module)), loud),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_outside_a_block_do_not_reach_it(device: str) -> None:
    module = mlp(SMALL, 16, device).half()
    x = normal(1, 31, 2, 16, seed=0, device=device, dtype=torch.float16)
    before = fused(SMALL)(x, module)
    x[:, 12:16] = torch.nan  # in blocks 2 and 3; block i covers [4 i, 4 i + 8)

    after = fused(SMALL)(x, module)

    reached = after.isnan().any(-1).any(-1)[0]
    assert reached.tolist() == [False, False, True, True, False, False]
    assert torch.equal(before[:, ~reached], after[:, ~reached])
