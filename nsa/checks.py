"""Checks of the inputs of `nsa.ops`: shapes, dtypes and devices, never their content."""

import torch
from torch import Tensor

from nsa.config import Positions


def shape(x: Tensor) -> list[int]:
    """The shape as a list, for messages."""
    return list(x.shape)


def need(holds: bool, name: str, got: object, needed: object) -> None:
    """Raise ValueError with the name, what it is and what it must be, unless `holds`."""
    if not holds:
        raise _wrong(name, got, needed)


def _wrong(name: str, got: object, needed: object) -> ValueError:
    return ValueError(f"{name} is {got}, but must be {needed}")


def check_keys(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str] = ("k", "v")) -> None:
    """Validate shapes, dtypes and devices of a query and its keys and values.

    It runs at every call, so it formats a message only when there is an error.
    """
    if q.dim() != 4 or q.shape[1] == 0:
        raise _wrong("q", shape(q), "[B, T, HQ, Dk] with T > 0")
    if not q.is_floating_point():
        raise _wrong("q", q.dtype, "floating point")
    for name, x in zip(names, (k, v), strict=True):
        if x.dim() != 4:
            raise _wrong(name, shape(x), "[B, S, HKV, D]")
        if x.dtype != q.dtype:
            raise _wrong(name, x.dtype, f"{q.dtype}, as q")
        if x.device != q.device:
            raise _wrong(name, f"on {x.device}", f"on {q.device}, as q")
    B, _, HQ, Dk = q.shape
    S, HKV = k.shape[1:3]
    if k.shape[0] != B or k.shape[3] != Dk:
        raise _wrong(names[0], shape(k), f"[{B}, S, HKV, {Dk}], as q")
    if v.shape[:3] != (B, S, HKV):
        raise _wrong(names[1], shape(v), f"[{B}, {S}, {HKV}, Dv], as k")
    if HQ % HKV:
        raise _wrong("q", f"of {HQ} heads", f"of a multiple of the {HKV} KV heads")


def check_compress(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, at: Positions) -> None:
    """Require every whole compressed block; with cu_seqlens their number depends on content."""
    check_keys(q, k_cmp, v_cmp, names=("k_cmp", "v_cmp"))
    check_documents(q, at)
    if at.cu_seqlens is not None:
        return
    tokens, got = at.q_start + q.shape[1], k_cmp.shape[1]
    N = at.config.compressed_length(tokens)
    need(
        got == N, "k_cmp", f"of length {got}", f"of length {N}: the whole blocks of {tokens} tokens"
    )


def check_scores(q: Tensor, k_cmp: Tensor, at: Positions) -> None:
    """As check_compress, of a query and the keys alone."""
    check_compress(q, k_cmp, k_cmp, at)


def check_select(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, at: Positions) -> None:
    """Require every key up to the last query, and one row of block indices for each query."""
    check_dense(q, k, v, at)
    expected = [*q.shape[:2], k.shape[2], at.config.num_blocks]
    need(list(block_indices.shape) == expected, "block_indices", shape(block_indices), expected)
    need(
        block_indices.dtype in (torch.int32, torch.int64),
        "block_indices",
        block_indices.dtype,
        "int32 or int64",
    )
    need(block_indices.device == q.device, "block_indices", block_indices.device, q.device)


def check_dense(q: Tensor, k: Tensor, v: Tensor, at: Positions) -> None:
    """Require every key up to the last query."""
    check_keys(q, k, v)
    check_documents(q, at)
    _check_length(q, k, at.q_start)


def check_window(q: Tensor, k: Tensor, v: Tensor, at: Positions) -> None:
    """Require every key of the window branch that a query sees."""
    check_keys(q, k, v)
    check_documents(q, at)
    first_seen = max(0, at.q_start - at.config.window_size + 1)
    need(
        0 <= at.k_start <= first_seen,
        "k_start",
        at.k_start,
        f"0 to {first_seen}, the first position the first query sees",
    )
    _check_length(q, k, at.q_start - at.k_start)


def check_documents(q: Tensor, at: Positions) -> None:
    """Validate where queries are; packed documents are prefill, in a batch of one."""
    need(at.q_start >= 0, "q_start", at.q_start, "at least 0")
    if at.cu_seqlens is None:
        return
    need(at.cu_seqlens.dtype == torch.int32, "cu_seqlens", at.cu_seqlens.dtype, "int32")
    got = shape(at.cu_seqlens)
    need(len(got) == 1 and got[0] >= 2, "cu_seqlens", got, "[documents + 1]")
    need(at.cu_seqlens.device == q.device, "cu_seqlens", at.cu_seqlens.device, q.device)
    need(q.shape[0] == 1, "B", q.shape[0], "1 with cu_seqlens")
    need(at.q_start == 0, "q_start", at.q_start, "0 with cu_seqlens")


def _check_length(q: Tensor, k: Tensor, before: int) -> None:
    """Require that the keys, `before` of them older than the queries, end where these end."""
    S = before + q.shape[1]
    need(k.shape[1] == S, "k", f"of length {k.shape[1]}", f"of length {S}: to the last query")
