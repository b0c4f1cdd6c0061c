"""Rotary embedding: rotates neighbouring channel pairs of every head by their token's angles.

One pass over memory. A program takes a tile of rows, one row a head of a token; the turns of a
token are read from memory once and from cache for its other heads. The inverse of a turn is its
transpose, so the backward pass is the same kernel with the sine negated, and keeps no input.

Source: Su et al. 2021, arXiv:2104.09864, eq. 34.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.kernels.common.device import ceil_div, last_contiguous, power_of_2

TILE = 4096
"""Elements of a tile: with 128 threads, four loads of 16 bytes each."""
WARPS = 4


@triton.jit(do_not_specialize=["T", "rows"])
def _rotate_kernel(
    x_ptr,  # [B * T, H, D]
    cos_ptr,  # [T, D / 2], float32
    sin_ptr,  # [T, D / 2], float32
    out_ptr,  # [B * T, H, D]; may be x
    x_token: tl.int64,
    x_head: tl.int64,
    cos_token: tl.int64,
    sin_token: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    T,
    rows,  # B * T * H
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // H, row % H
    channel = tl.arange(0, BLOCK_D)
    pair = tl.arange(0, BLOCK_D // 2)
    valid = (row < rows)[:, None]
    mask = valid & (channel < D)[None, :]
    pair_mask = valid & (pair < D // 2)[None, :]
    turn = (token % T).to(tl.int64)
    token = token.to(tl.int64)

    x_start = token * x_token + head * x_head
    x = tl.load(x_ptr + x_start[:, None] + channel[None, :], mask=mask, other=0.0)
    cos_offsets = (turn * cos_token)[:, None] + pair[None, :]
    sin_offsets = (turn * sin_token)[:, None] + pair[None, :]
    cos = tl.load(cos_ptr + cos_offsets, mask=pair_mask, other=0.0)
    sin = tl.load(sin_ptr + sin_offsets, mask=pair_mask, other=0.0)
    if INVERSE:
        sin = -sin

    real, imaginary = tl.split(x.to(tl.float32).reshape(ROWS, BLOCK_D // 2, 2))  # [ROWS, D / 2]
    turned = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
    turned = turned.reshape(ROWS, BLOCK_D).to(out_ptr.dtype.element_ty)
    out_start = token * out_token + head * out_head
    tl.store(out_ptr + out_start[:, None] + channel[None, :], turned, mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs (0, 1), (2, 3) ... of every head by its token's angles.

    Args:
        x: [B, T, H, D], float32 or narrower, any strides; D is even. All heads that share the
            angles belong in one call: queries and keys, cut from one projection.
        cos, sin: [T, D / 2], float32.

    Returns:
        [B, T, H, D], contiguous, dtype of x. Differentiable in x only.
    """
    turned: Tensor = _Rotate.apply(x, cos, sin)
    return turned


def rotate_into(
    out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False
) -> Tensor:
    """Write the turned x to `out`, outside autograd, and return it.

    Args:
        out: [B, T, H, D], channels contiguous, B and T joinable to one axis. It may be x.
        inverse: Turn by the negative angles.
    """
    B, T, H, D = x.shape
    rows = B * T * H
    if not rows:
        return out
    block_d = power_of_2(D)
    tile_rows = max(1, TILE // block_d)
    target = out.view(B * T, H, D)
    cos, sin = last_contiguous(cos), last_contiguous(sin)
    x = last_contiguous(x).flatten(0, 1)  # a view unless B and T cannot be joined
    _rotate_kernel[(ceil_div(rows, tile_rows),)](
        x,
        cos,
        sin,
        target,
        *x.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        *target.stride()[:2],
        T,
        rows,
        H=H,
        D=D,
        BLOCK_D=block_d,
        ROWS=tile_rows,
        INVERSE=inverse,
        num_warps=WARPS,
    )
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_into(_contiguous_like(x), x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_into(_contiguous_like(grad), grad, cos, sin, inverse=True), None, None


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
