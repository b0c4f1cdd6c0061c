"""Selected attention, key-major: dq of a query, the sum of its shares and of other branches' dq.

The backward kernel writes a share of dq for each block that a query selected; here they are added
up in the order of the slots, so that the sum is the same in every run.

Source: Yuan et al. 2025, "Native Sparse Attention", arXiv:2502.11089, eq. 12.
"""

from functools import lru_cache

import triton
import triton.language as tl

from nsa.kernels.common.device import power_of_2
from nsa.kernels.common.launch import KINDS, KernelLaunch
from nsa.kernels.selected.keymajor import seen_slots

SLOTS = 16
"""Slots whose shares a program has in flight at once."""
ELEMENTS = 1024
"""Elements of G * D that a program adds up."""


@triton.jit(do_not_specialize=["first_token", "T", "q_start"])
def _reduce_kernel(
    partial_ptr,  # [tokens of the chunk, HKV, N, G, D]
    blocks_ptr,  # [B * T, HKV, N / PARTS]
    document_start_ptr,  # [T], or None
    dq_ptr,  # [B * T, HKV, G, D]
    add1_ptr,  # [B, T, HKV * G, D], or None
    add2_ptr,  # [B, T, HKV * G, D], or None
    add1_b: tl.int64,
    add1_t: tl.int64,
    add1_h: tl.int64,
    add2_b: tl.int64,
    add2_t: tl.int64,
    add2_h: tl.int64,
    first_token,
    T,
    q_start,
    HKV: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    VARLEN: tl.constexpr,
    ADDED: tl.constexpr,
    SLOTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """dq of one query and KV head, ELEMENTS of its G * D at a time: the sum over slots."""
    local = tl.program_id(0) // HKV
    h = tl.program_id(0) % HKV
    token = first_token + local
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = element < G * D
    base = partial_ptr + (local.to(tl.int64) * HKV + h) * (N * G * D)

    dq = tl.zeros([ELEMENTS], tl.float32)
    for s in range(0, N, SLOTS):
        slot = s + tl.arange(0, SLOTS)
        seen = seen_slots(
            blocks_ptr,
            document_start_ptr,
            token,
            h,
            slot,
            T,
            q_start,
            HKV,
            N,
            BLOCK_SIZE,
            PARTS,
            VARLEN,
        )
        share = tl.load(
            base + slot[:, None] * (G * D) + element[None, :],
            mask=seen[:, None] & inside[None, :],
            other=0.0,
        )
        dq += tl.sum(share.to(tl.float32), 0)
    b = token // T
    t = token - b * T
    head = h * G + element // D
    if ADDED > 0:
        at = b * add1_b + t * add1_t + head * add1_h + element % D
        dq += tl.load(add1_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED > 1:
        at = b * add2_b + t * add2_t + head * add2_h + element % D
        dq += tl.load(add2_ptr + at, mask=inside, other=0.0).to(tl.float32)
    out = dq_ptr + (token.to(tl.int64) * HKV + h) * (G * D) + element
    tl.store(out, dq.to(dq_ptr.dtype.element_ty), mask=inside)


@lru_cache(maxsize=KINDS)
def reduce_launch(
    HKV: int, G: int, N: int, Dk: int, block_size: int, parts: int, documents: bool, added: int
) -> KernelLaunch:
    """The kernel for heads of Dk, N slots, `parts` of them to a selected block."""
    return KernelLaunch(
        _reduce_kernel,
        HKV=HKV,
        G=G,
        N=N,
        D=Dk,
        BLOCK_SIZE=block_size,
        PARTS=parts,
        VARLEN=documents,
        ADDED=added,
        SLOTS=min(SLOTS, power_of_2(N)),
        ELEMENTS=min(ELEMENTS, power_of_2(G * Dk)),
    )
