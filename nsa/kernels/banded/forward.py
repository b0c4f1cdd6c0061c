"""Attention over a band: the compress and window branches, and dense attention.

A program of the forward pass owns a tile of queries of one head and walks the keys that any of
them sees; only tiles at the two edges of the band are masked. Programs of the heads that share a KV
head run side by side, and find its keys in L2. The backward pass is in `backward`.

Source: Dao 2023, "FlashAttention-2", arXiv:2307.08691 (the recurrence); Yuan et al. 2025,
arXiv:2502.11089, eq. 5, 7 and section 3.3.3 (the branches).
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.banded.band import Band
from nsa.kernels.banded.hopper_query import hopper_forward
from nsa.kernels.banded.interval import UNSPECIALISED, Tile, interval
from nsa.kernels.banded.planes import Sizes
from nsa.kernels.common.device import LOG2_E, Architecture, architecture, ceil_div
from nsa.kernels.common.hopper import takes
from nsa.kernels.common.launch import KINDS, KernelLaunch
from nsa.kernels.common.tiles import aligned, load_tile, sources, units

UNITS = [f"{x}_{axis}" for x in ("do", "q", "k", "v") for axis in ("batch", "token", "head")]


def forward_tile(arch: Architecture, D: int, DV: int) -> Tile:
    """For keys of D and values of DV; shared memory and registers without spills decide."""
    head = max(D, DV)
    if arch == "sm_80":
        if head <= 64:
            return Tile(128, 64, 8, 3)
        if DV <= 128:
            return Tile(128, 32, 8, 3 if head <= 128 else 2)
        return Tile(64, 64, 8, 2)
    if head <= 128:
        return Tile(64, 64, 4, 3)
    return Tile(64, 64, 4, 2) if head <= 192 else Tile(128, 64, 8, 2)


@triton.jit
def _walk(
    acc,  # [BLOCK_M, DV_BLOCK]
    row_max,  # [BLOCK_M], log2 units
    row_sum,  # [BLOCK_M]
    q1,
    q2,
    low,
    high,
    k1_tiles,
    k2_tiles,
    v_tiles,
    k_strides,
    v_strides,
    b,
    h,
    begin,
    end,
    S,
    scale,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    ONLY_LSE: tl.constexpr,
    BULK: tl.constexpr,
):
    """Take in the keys [begin, end); unmasked, every row sees all of them and tiles are whole."""
    for start in tl.range(begin, end, BLOCK_N):
        k1 = load_tile(k1_tiles, k_strides, b, start, h, S, 0, D1, D, BLOCK_N, MASKED, BULK)
        s = tl.dot(q1, tl.trans(k1))
        if D2 > 0:
            k2 = load_tile(k2_tiles, k_strides, b, start, h, S, D1, D2, D, BLOCK_N, MASKED, BULK)
            s = tl.dot(q2, tl.trans(k2), s)
        if MASKED:
            key = start + tl.arange(0, BLOCK_N)
            visible = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
            s = tl.where(visible, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
        # A row that has seen no key yet keeps -inf, and nothing is subtracted from -inf.
        base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        p = tl.exp2(s * scale - base[:, None])
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        row_max = new_max
        if not ONLY_LSE:
            v = load_tile(
                v_tiles, v_strides, b, start, h, S, 0, DV_BLOCK, DV, BLOCK_N, MASKED, BULK
            )
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=[*UNSPECIALISED, *UNITS])
def _forward_kernel(
    q1_tiles,  # of [B, T, HKV * G, D]: BLOCK_M tokens of a head, D1 channels; see `tiles.sources`
    q2_tiles,  # D2 channels
    k1_tiles,  # of [B, S, HKV, D]: BLOCK_N tokens of a head
    k2_tiles,
    v_tiles,  # of [B, S, HKV, DV]
    o_ptr,  # [B, T, HKV * G, DV], contiguous
    lse_ptr,  # [B, HKV * G, T], float32, log2 units
    low_ptr,
    high_ptr,
    scale,  # times log2(e)
    T,
    S,
    q_start,
    k_start,
    window,
    q_batch,  # see `tiles.units`
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ONLY_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BULK: tl.constexpr,
):
    # The last queries see the most keys; they go first, so that no long program is left at the end.
    tile = tl.num_programs(0) // G - 1 - tl.program_id(0) // G
    b = tl.program_id(1) // HKV
    h = tl.program_id(1) % HKV
    head = h * G + tl.program_id(0) % G

    first = tile * BLOCK_M
    token = first + tl.arange(0, BLOCK_M)
    valid = token < T
    q_strides = (q_batch, q_token, q_head)
    k_strides = (k_batch, k_token, k_head)
    v_strides = (v_batch, v_token, v_head)
    q1 = load_tile(q1_tiles, q_strides, b, first, head, T, 0, D1, D, BLOCK_M, True, BULK)
    q2 = q1
    if D2 > 0:
        q2 = load_tile(q2_tiles, q_strides, b, first, head, T, D1, D2, D, BLOCK_M, True, BULK)

    low, high = interval(
        token, low_ptr, high_ptr, T, S, q_start, k_start, window, STRIDE, SPAN, WINDOW, DOCUMENTS
    )
    begin, all_end = interval(
        first, low_ptr, high_ptr, T, S, q_start, k_start, window, STRIDE, SPAN, WINDOW, DOCUMENTS
    )
    all_begin, end = interval(
        first + BLOCK_M - 1, low_ptr, high_ptr, T, S, q_start, k_start, window,
        STRIDE, SPAN, WINDOW, DOCUMENTS,
    )  # fmt: skip

    acc = tl.zeros([BLOCK_M, DV_BLOCK], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Every row sees the keys [all_begin, all_end): of those, whole tiles need no mask.
    middle = begin
    if WINDOW or DOCUMENTS:
        middle = tl.minimum(begin + tl.cdiv(all_begin - begin, BLOCK_N) * BLOCK_N, end)
        acc, row_max, row_sum = _walk(
            acc, row_max, row_sum, q1, q2, low, high, k1_tiles, k2_tiles, v_tiles,
            k_strides, v_strides, b, h, begin, middle, S, scale,
            D, D1, D2, DV, DV_BLOCK, BLOCK_N, True, ONLY_LSE, BULK,
        )  # fmt: skip
    whole_end = middle + tl.maximum(all_end - middle, 0) // BLOCK_N * BLOCK_N
    acc, row_max, row_sum = _walk(
        acc, row_max, row_sum, q1, q2, low, high, k1_tiles, k2_tiles, v_tiles,
        k_strides, v_strides, b, h, middle, whole_end, S, scale,
        D, D1, D2, DV, DV_BLOCK, BLOCK_N, False, ONLY_LSE, BULK,
    )  # fmt: skip
    acc, row_max, row_sum = _walk(
        acc, row_max, row_sum, q1, q2, low, high, k1_tiles, k2_tiles, v_tiles,
        k_strides, v_strides, b, h, whole_end, end, S, scale,
        D, D1, D2, DV, DV_BLOCK, BLOCK_N, True, ONLY_LSE, BULK,
    )  # fmt: skip

    # A row that saw no key keeps row_sum == 0 and row_max == -inf: output 0, lse -inf.
    denominator = tl.where(row_sum > 0, row_sum, 1.0)
    lse_row = (b.to(tl.int64) * (HKV * G) + head) * T + token
    tl.store(lse_ptr + lse_row, row_max + tl.log2(denominator), mask=valid)
    if not ONLY_LSE:
        out_row = (b.to(tl.int64) * T + token) * (HKV * G) + head
        o = acc / denominator[:, None]
        offs_v = tl.arange(0, DV_BLOCK)
        tl.store(
            o_ptr + out_row[:, None] * DV + offs_v[None, :],
            o.to(o_ptr.dtype.element_ty),
            mask=valid[:, None] & (offs_v < DV)[None, :],
        )


def banded_forward(
    q: Tensor, k: Tensor, v: Tensor | None, band: Band, *, scale: float
) -> tuple[Tensor | None, Tensor]:
    """Attend over a band.

    Args:
        q: [B, T, HQ, Dk].
        k: [B, S, HKV, Dk].
        v: [B, S, HKV, Dv]; without it only lse is computed.

    Returns:
        o: [B, T, HQ, Dv], dtype of q; zeros where no key is seen. None without v.
        lse: [B, T, HQ], float32: log2 of the sum of exp(scale * q.k); -inf where none is seen. A
            view, in which the queries of a head are contiguous.
    """
    B, T, HQ = q.shape[:3]
    S, HKV = k.shape[1:3]
    values = k if v is None else v
    o = None if v is None else q.new_empty(B, T, HQ, values.shape[-1])
    lse = torch.empty(B, HQ, T, dtype=torch.float32, device=q.device)
    if S == 0:
        return None if o is None else o.zero_(), lse.fill_(float("-inf")).transpose(1, 2)
    sizes = Sizes.of(q, k, values, band)
    q, k, values = aligned(q), aligned(k), aligned(values)
    if o is not None and takes(q, values):
        hopper_forward(o, lse, q, k, values, band, scale=scale, sizes=sizes)
        return o, lse.transpose(1, 2)
    tile = forward_tile(architecture(q.device), sizes.D, sizes.DV)
    bulk = sizes.BULK
    _launch(sizes, o is None, tile)(
        (ceil_div(T, tile.queries) * sizes.G, B * HKV),
        (
            *sources(q, tile.queries, sizes.D1, sizes.D2, bulk=bulk),
            *sources(k, tile.keys, sizes.D1, sizes.D2, bulk=bulk),
            *sources(values, tile.keys, sizes.DV_BLOCK, bulk=bulk),
            lse if o is None else o, lse, *band.tables(lse)[:2],
        ),
        (
            scale * LOG2_E, T, S, band.q_start, band.k_start, band.window,
            *units(q, bulk=bulk), *units(k, bulk=bulk), *units(values, bulk=bulk),
        ),
    )  # fmt: skip
    return o, lse.transpose(1, 2)


@lru_cache(maxsize=KINDS)
def _launch(sizes: Sizes, only_lse: bool, tile: Tile) -> KernelLaunch:
    constants = sizes._asdict()
    del constants["GATED"]
    return KernelLaunch(
        _forward_kernel, **constants, ONLY_LSE=only_lse, BLOCK_M=tile.queries, BLOCK_N=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
