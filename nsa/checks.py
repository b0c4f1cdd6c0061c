"""What `nsa.ops` asks of its inputs: shapes, dtypes, devices, and never their content."""

import torch
from torch import Tensor

from nsa.config import NSAConfig


def shape(x: Tensor) -> list[int]:
    """The shape as people write it."""
    return list(x.shape)


def need(holds: bool, name: str, got: object, needed: object) -> None:
    """Raise ValueError with the name, what it is and what it must be, unless that holds."""
    if not holds:
        raise ValueError(f"{name} is {got}, and must be {needed}")


def check_keys(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str] = ("k", "v")) -> None:
    """Validate shapes, dtypes and devices of a query and its keys and values."""
    if _fit(q, k, v):  # as nearly always; to word what might be wrong takes as long as a launch
        return
    need(q.dim() == 4 and q.shape[1] > 0, "q", shape(q), "[B, T, HQ, Dk] with T > 0")
    need(q.is_floating_point(), "q", q.dtype, "floating point")
    for name, x in zip(names, (k, v), strict=True):
        need(x.dim() == 4, name, shape(x), "[B, S, HKV, D]")
        need(x.dtype == q.dtype, name, x.dtype, f"{q.dtype}, as q")
        need(x.device == q.device, name, f"on {x.device}", f"on {q.device}, as q")
    B, _, HQ, Dk = q.shape
    _, S, HKV, _ = k.shape
    need(k.shape[0] == B and k.shape[3] == Dk, names[0], shape(k), f"[{B}, S, HKV, {Dk}], as q")
    need(list(v.shape[:3]) == [B, S, HKV], names[1], shape(v), f"[{B}, {S}, {HKV}, Dv], as k")
    need(HQ % HKV == 0, "q", f"of {HQ} heads", f"of a multiple of the {HKV} KV heads")


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `check_keys` would find nothing."""
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        return False
    if not (q.dim() == k.dim() == v.dim() == 4 and q.is_floating_point()):
        return False
    B, T, HQ, Dk = q.shape
    S, HKV = k.shape[1:3]
    return T > 0 and k.shape == (B, S, HKV, Dk) and v.shape[:3] == (B, S, HKV) and HQ % HKV == 0


def check_documents(q: Tensor, q_start: int, cu_seqlens: Tensor | None) -> None:
    """Validate where queries stand; packed documents are prefill, in a batch of one."""
    need(q_start >= 0, "q_start", q_start, "at least 0")
    if cu_seqlens is None:
        return
    need(cu_seqlens.dtype == torch.int32, "cu_seqlens", cu_seqlens.dtype, "int32")
    got = shape(cu_seqlens)
    need(len(got) == 1 and got[0] >= 2, "cu_seqlens", got, "[documents + 1]")
    need(cu_seqlens.device == q.device, "cu_seqlens", cu_seqlens.device, q.device)
    need(q.shape[0] == 1, "B", q.shape[0], "1 with cu_seqlens")
    need(q_start == 0, "q_start", q_start, "0 with cu_seqlens")


def check_length(q: Tensor, k: Tensor, q_start: int, k_start: int = 0) -> None:
    """Require that the keys end where the queries end."""
    S = q_start + q.shape[1] - k_start
    need(k.shape[1] == S, "k", f"of length {k.shape[1]}", f"of length {S}: to the last query")


def check_compressed(
    q: Tensor, k_cmp: Tensor, config: NSAConfig, q_start: int, cu_seqlens: Tensor | None
) -> None:
    """Require every whole compressed block; with cu_seqlens their number depends on content."""
    if cu_seqlens is not None:
        return
    tokens, got = q_start + q.shape[1], k_cmp.shape[1]
    N = config.compressed_length(tokens)
    need(
        got == N, "k_cmp", f"of length {got}", f"of length {N}: the whole blocks of {tokens} tokens"
    )


def check_window(q: Tensor, k: Tensor, window_size: int, q_start: int, k_start: int) -> None:
    """Require every key of the window branch that a query sees."""
    first_seen = max(0, q_start - window_size + 1)
    need(
        0 <= k_start <= first_seen,
        "k_start",
        k_start,
        f"0 to {first_seen}, the first position the first query sees",
    )
    check_length(q, k, q_start, k_start)
