"""One number per row of the scores, by head: lse, delta and gate for the backward kernels."""

from functools import lru_cache
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.banded.band import Band
from nsa.kernels.common.device import architecture, ceil_div, head_blocks, padded
from nsa.kernels.common.launch import KINDS, KernelLaunch
from nsa.kernels.common.tiles import has_bulk_copies

BLOCK_T = 64
"""Tokens of a program."""
PAD_TOKENS = 128
"""lse, delta and gate are padded to a multiple of this; no tile of queries is longer."""


class Sizes(NamedTuple):
    """Constants of the banded kernels, tiles aside."""

    HKV: int
    G: int
    D: int
    D1: int
    D2: int
    DV: int
    DV_BLOCK: int
    GATED: bool
    STRIDE: int
    SPAN: int
    WINDOW: bool
    DOCUMENTS: bool
    BULK: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, band: Band, *, gated: bool = False) -> Self:
        D, DV, HKV = q.shape[-1], v.shape[-1], k.shape[2]
        return cls(
            HKV, q.shape[2] // HKV, D, *head_blocks(D), DV, padded(DV), gated, band.stride,
            band.span, band.window > 0, band.documents is not None,
            has_bulk_copies(architecture(q.device)),
        )  # fmt: skip


def empty_planes(lse: Tensor) -> Tensor:
    """[3, B, HQ, padded T], float32, for `write_planes`."""
    B, T, HQ = lse.shape
    return torch.empty(
        3, B, HQ, ceil_div(T, PAD_TOKENS) * PAD_TOKENS, dtype=torch.float32, device=lse.device
    )


def write_planes(planes: Tensor, lse: Tensor, delta: Tensor, gate: Tensor | None) -> None:
    """Store lse, delta and gate by head, so that the queries of a tile are contiguous.

    Past the last query lse is inf and the others 0. Without a gate the third is not written.
    """
    B, T, HQ = lse.shape
    third = delta if gate is None else gate
    T_padded = planes.shape[-1]
    _launch(HQ, gate is not None)(
        (T_padded // BLOCK_T, B),
        (lse, delta, third, planes),
        (B, T, T_padded, *lse.stride(), *delta.stride(), *third.stride()),
    )


@lru_cache(maxsize=KINDS)
def _launch(HQ: int, gated: bool) -> KernelLaunch:
    return KernelLaunch(
        _transpose_kernel, HQ=HQ, GATED=gated, BLOCK_T=BLOCK_T, BLOCK_H=min(64, padded(HQ)),
        num_warps=8 if HQ > 32 else 4,
    )  # fmt: skip


# Strides of one number a row are multiples of 16 at some lengths only.
@triton.jit(
    do_not_specialize=[
        *("B", "T", "T_padded"),
        *(f"{x}_{axis}" for x in ("lse", "delta", "gate") for axis in ("batch", "token", "head")),
    ]
)
def _transpose_kernel(
    lse_ptr,
    delta_ptr,
    gate_ptr,
    planes_ptr,  # [3, B, HQ, T_padded], float32
    B,
    T,
    T_padded,
    lse_batch: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    delta_batch: tl.int64,
    delta_token: tl.int64,
    delta_head: tl.int64,
    gate_batch: tl.int64,
    gate_token: tl.int64,
    gate_head: tl.int64,
    HQ: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    for first in tl.static_range(0, HQ, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        exists = (head < HQ)[None, :] & (token < T_padded)[:, None]
        mask = exists & (token < T)[:, None]
        out = planes_ptr + (b * HQ + head)[None, :] * T_padded + token[:, None]
        plane = B.to(tl.int64) * HQ * T_padded
        lse = lse_ptr + b * lse_batch + token[:, None] * lse_token + head[None, :] * lse_head
        tl.store(out, tl.load(lse, mask=mask, other=float("inf")), mask=exists)
        delta = delta_ptr + b * delta_batch
        delta += token[:, None] * delta_token + head[None, :] * delta_head
        tl.store(out + plane, tl.load(delta, mask=mask, other=0.0), mask=exists)
        if GATED:
            gate = gate_ptr + b * gate_batch
            gate += token[:, None] * gate_token + head[None, :] * gate_head
            factor = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
            tl.store(out + 2 * plane, factor, mask=exists)
