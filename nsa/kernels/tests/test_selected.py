"""Selected attention, key-major in Triton, against its definition; and the selection inverted."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import reference
from nsa.config import NSAConfig, Positions
from nsa.errors import Unsupported
from nsa.kernels.selected import forward as selected
from nsa.kernels.selected import inverse
from nsa.kernels.selected.backward import selected_backward
from nsa.kernels.selected.forward import selected_forward
from nsa.kernels.selected.inverse import Selected
from nsa.kernels.tests.where import CALLS_KERNELS
from nsa.tests.gpu import no_waiting
from nsa.tests.operator_inputs import DEVICES, needs_gpu, normal

pytestmark = CALLS_KERNELS


@dataclass(frozen=True, slots=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    blocks: Tensor
    block_size: int
    q_start: int = 0
    cu_seqlens: Tensor | None = None

    @property
    def at(self) -> Positions:
        size = self.block_size
        config = NSAConfig(compress_block_size=size, compress_stride=size, select_block_size=size)
        return Positions.of(self.q, config=config, q_start=self.q_start, cu_seqlens=self.cu_seqlens)


def draw(
    T: int = 25,
    *,
    B: int = 1,
    HQ: int = 3,
    HKV: int = 1,
    Dk: int = 16,
    Dv: int = 16,
    block_size: int = 8,
    n: int = 3,
    q_start: int = 0,
    documents: tuple[int, ...] = (),
    device: str = "cpu",
    dtype: torch.dtype = torch.float16,
) -> Inputs:
    """Gaussian tensors; n or fewer distinct causal blocks at random, in any order, -1 anywhere."""
    T = sum(documents) or T
    S = q_start + T
    q, k, v = (
        normal(B, length, H, D, seed=seed, device=device, dtype=dtype)
        for seed, (length, H, D) in enumerate([(T, HQ, Dk), (S, HKV, Dk), (S, HKV, Dv)])
    )
    bounds = [sum(documents[:i]) for i in range(len(documents) + 1)] if documents else [0, T]
    start = torch.tensor([a for a, b in pairwise(bounds) for _ in range(a, b)])
    own = (q_start + torch.arange(T) - start) // block_size
    M = max(n, -(-S // block_size))
    rng = torch.Generator().manual_seed(3)
    order = torch.rand(B, T, HKV, M, generator=rng).argsort(-1)  # distinct blocks
    causal = order <= own[:, None, None]
    kept = causal & (causal.cumsum(-1) <= n)
    ranked = torch.where(kept, order, -1).sort(-1, descending=True).values[..., :n]
    shuffle = torch.rand(ranked.shape, generator=rng).argsort(-1)
    return Inputs(
        q,
        k,
        v,
        ranked.gather(-1, shuffle).to(device, torch.int32),
        block_size,
        q_start,
        torch.tensor(bounds, dtype=torch.int32, device=device) if documents else None,
    )


def gradient(x: Inputs) -> Tensor:
    shape = (*x.q.shape[:3], x.v.shape[3])
    return normal(*shape, seed=9, device=x.q.device.type, dtype=x.q.dtype)


def by_kernels(
    x: Inputs, *, deterministic: bool = False, do: Tensor | None = None
) -> Mapping[str, Tensor]:
    o, lse, index, out = selected_forward(
        x.q, x.k, x.v, x.blocks, x.at, deterministic=deterministic
    )
    assert out is None
    do = gradient(x) if do is None else do
    delta = (do.float() * o.float()).sum(-1)
    dq, dk, dv = selected_backward(
        do, x.q, x.k, x.v, lse, delta, index, x.at, deterministic=deterministic
    )
    return {"o": o, "dq": dq, "dk": dk, "dv": dv}


def by_definition(x: Inputs, dtype: torch.dtype) -> Mapping[str, Tensor]:
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (x.q, x.k, x.v))
    o = reference.selected_attention(q, k, v, x.blocks, x.at)
    grads = torch.autograd.grad(o, (q, k, v), gradient(x).to(dtype))
    return {"o": o.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def assert_as_good_as_the_definition(x: Inputs, got: Mapping[str, Tensor]) -> None:
    """Error of at most twice the definition's at the same precision, and one rounding.

    Where a query sees a single key, dq and dk are differences of two equal float32 sums.
    """
    float32 = torch.finfo(torch.float32).eps * gradient(x).norm() * x.v.norm()
    exact, definition = by_definition(x, torch.float64), by_definition(x, x.q.dtype)
    excess = {}
    for name, truth in exact.items():
        assert got[name].dtype == x.q.dtype
        assert got[name].shape == truth.shape
        allowed = 2 * (definition[name] - truth).norm()
        allowed += torch.finfo(x.q.dtype).eps * truth.norm() + float32
        excess[name] = ((got[name] - truth).norm() - allowed).item()
    assert {name: e for name, e in excess.items() if not e <= 0} == {}


SHAPES = [
    pytest.param({"HQ": 2, "HKV": 2, "Dk": 8, "Dv": 24}, id="group-of-1-and-wider-values"),
    pytest.param(
        {"HQ": 3, "HKV": 1, "Dk": 24, "Dv": 16, "B": 2, "T": 17}, id="group-of-3-in-a-batch"
    ),
    pytest.param({"HQ": 6, "HKV": 1, "Dk": 48, "Dv": 32, "T": 17}, id="group-of-6"),
    pytest.param({"HQ": 16, "HKV": 1, "Dk": 32, "Dv": 64, "T": 17}, id="group-of-16"),
    pytest.param({"HQ": 5, "HKV": 1, "Dk": 192, "Dv": 128, "T": 23}, id="heads-of-the-paper"),
    pytest.param({"block_size": 5, "HQ": 4, "HKV": 2}, id="block-of-5"),
    pytest.param({"block_size": 24, "T": 49}, id="block-of-24"),
    pytest.param(
        {"block_size": 67, "q_start": 120, "T": 20, "HQ": 2}, id="block-in-two-uneven-parts"
    ),
    pytest.param(
        {"n": 18, "block_size": 2, "q_start": 20, "T": 18}, id="more-slots-than-are-read-at-once"
    ),
    pytest.param({"T": 1}, id="one-token"),
    pytest.param({"q_start": 37, "T": 19, "HQ": 4, "HKV": 2}, id="a-later-piece"),
    pytest.param({"q_start": 70, "T": 1, "B": 3}, id="one-query-at-the-end"),
    pytest.param({"documents": (7, 1, 20, 0, 13)}, id="documents"),
    pytest.param({"documents": (8, 24)}, id="documents-of-whole-blocks"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_no_worse_than_that_of_the_definition(shape: dict[str, Any], device: str) -> None:
    x = draw(**shape, device=device)

    assert_as_good_as_the_definition(x, by_kernels(x))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_error_in_bfloat16_is_no_worse_than_that_of_the_definition(shape: dict[str, Any]) -> None:
    x = draw(**shape, device="cuda", dtype=torch.bfloat16)

    assert_as_good_as_the_definition(x, by_kernels(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "chunks", "deterministic"),
    [
        pytest.param({"T": 33, "block_size": 16}, 3, True, id="pieces-of-a-sequence"),
        pytest.param({"T": 33, "block_size": 16}, 3, False, id="pieces-in-any-order"),
        pytest.param({"T": 19, "B": 2, "block_size": 16}, 4, False, id="pieces-in-a-batch"),
        pytest.param({"T": 7, "B": 5}, 3, False, id="several-sequences-at-once"),
        pytest.param({"T": 30, "q_start": 20, "block_size": 16}, 2, False, id="later-pieces"),
        pytest.param({"documents": (7, 1, 20, 0, 15)}, 3, True, id="documents"),
    ],
)
def test_chunks_join_to_the_whole(
    shape: dict[str, Any],
    chunks: int,
    deterministic: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selected, "SCRATCH_BYTES", 1)  # as few queries as there may be
    x = draw(**shape, device=device)

    _, _, index, _ = selected_forward(x.q, x.k, x.v, x.blocks, x.at)

    assert len(index.chunks) == chunks
    assert_as_good_as_the_definition(x, by_kernels(x, deterministic=deterministic))


@pytest.mark.parametrize("device", DEVICES)
def test_items_of_a_block_join_to_the_whole(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse, "ITEM_ROWS", 42)  # of heads this small, half
    monkeypatch.setattr(inverse, "MIN_ITEM_ROWS", 21)
    x = draw(T=40, device=device)

    index = selected_forward(x.q, x.k, x.v, x.blocks, x.at)[2]

    pairs = index.items[: index.first_item[-1], :2].diff().flatten()
    assert pairs.max() == 21 // 3
    assert len(pairs) > 5  # blocks
    assert_as_good_as_the_definition(x, by_kernels(x))


def strided(x: Tensor) -> Tensor:
    """The same numbers, cut out of a wider tensor that is NaN elsewhere, heads first."""
    B, T, H, D = x.shape
    wide = torch.full((B, H, T, D + 8), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., :D] = x.transpose(1, 2)
    return wide[..., :D].transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wide", [False, True], ids=["32-bit", "64-bit"])
def test_inputs_may_be_strided(wide: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the offsets of a tensor too large for this test."""
    if wide:
        monkeypatch.setattr(selected, "needs_wide_offsets", lambda *_: True)
        monkeypatch.setattr("nsa.kernels.selected.backward.needs_wide_offsets", lambda *_: True)
    x = draw(T=11, HQ=6, HKV=2, device=device)
    expected = by_kernels(x)
    blocks = x.blocks.long().transpose(1, 2).contiguous().transpose(1, 2)

    got = by_kernels(replace(x, q=strided(x.q), k=strided(x.k), v=strided(x.v), blocks=blocks))

    for name in ("o", "dq"):
        assert torch.equal(got[name], expected[name])
    for name in ("dk", "dv"):  # lists may be in another order
        torch.testing.assert_close(got[name], expected[name], atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_no_selection_yields_zeros_with_zero_gradients(device: str) -> None:
    x = draw(device=device)
    x.blocks[:, :12] = -1

    got = by_kernels(x)
    lse = selected_forward(x.q, x.k, x.v, x.blocks, x.at)[1]

    assert_as_good_as_the_definition(x, got)
    assert lse[:, :12].isneginf().all()
    assert lse[:, 12:].isfinite().all()
    for name in ("o", "dq"):
        assert torch.equal(got[name][:, :12], torch.zeros_like(got[name][:, :12]))


@pytest.mark.parametrize("device", DEVICES)
def test_an_empty_selection_yields_zeros(device: str) -> None:
    x = draw(device=device)
    x.blocks.fill_(-1)

    assert {name: g.abs().max().item() for name, g in by_kernels(x).items()} == {
        "o": 0,
        "dq": 0,
        "dk": 0,
        "dv": 0,
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [{}, {"documents": (7, 1, 8, 13)}], ids=["one", "documents"])
def test_blocks_after_the_query_count_as_unused(shape: dict[str, Any], device: str) -> None:
    x = draw(**shape, device=device)
    future = torch.where(x.blocks < 0, 1 << 20, x.blocks)
    assert (future != x.blocks).any()

    expected, got = by_kernels(x), by_kernels(replace(x, blocks=future))

    for name in ("o", "dq"):
        assert torch.equal(got[name], expected[name])


@pytest.mark.parametrize("device", DEVICES)
def test_unselected_blocks_are_not_read(device: str) -> None:
    x = draw(T=32, device=device)
    blocks = torch.tensor([2, -1, 0], dtype=torch.int32, device=device).expand_as(x.blocks)
    before = by_kernels(replace(x, blocks=blocks))
    k, v = x.k.clone(), x.v.clone()
    k[:, 8:16] = v[:, 8:16] = k[:, 24:] = v[:, 24:] = float("nan")

    after = by_kernels(replace(x, k=k, v=v, blocks=blocks))

    for name in ("o", "dq"):
        assert torch.equal(after[name], before[name])
    for name in ("dk", "dv"):
        assert torch.equal(after[name][:, 8:16], torch.zeros_like(k[:, 8:16]))
        assert after[name].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_lse_is_that_of_the_selected_keys_in_log2_units(device: str) -> None:
    x = draw(T=30, HQ=2, HKV=1, block_size=16, device=device)
    key = torch.arange(30, device=device)
    chosen = (x.blocks[0, :, 0, :, None] == key // 16).any(1) & (key <= key[:, None])
    scores = torch.einsum("thd,sd->hts", x.q[0].double(), x.k[0, :, 0].double())
    scores = scores.mul(16**-0.5).masked_fill(~chosen, -torch.inf)

    lse = selected_forward(x.q, x.k, x.v, x.blocks, x.at)[1]

    expected = (scores.logsumexp(-1) / torch.log(torch.tensor(2.0))).T[None].float()
    torch.testing.assert_close(lse, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [lambda x: x, strided], ids=["contiguous", "strided"])
def test_the_gated_sum_is_computed_on_the_way(layout: Any, device: str) -> None:
    x = draw(T=11, B=2, Dv=24, device=device)
    shape = (*x.q.shape[:3], 24)
    o_cmp, o_win = (normal(*shape, seed=s, device=device, dtype=x.q.dtype) for s in (5, 6))
    gates = normal(*shape[:3], 3, seed=7, device=device, dtype=torch.float16).sigmoid()

    o, lse, _, out = selected_forward(
        x.q, x.k, x.v, x.blocks, x.at, gated=(layout(gates), layout(o_cmp), layout(o_win))
    )

    alone, alone_lse, _, _ = selected_forward(x.q, x.k, x.v, x.blocks, x.at)
    assert torch.equal(o, alone)
    assert torch.equal(lse, alone_lse)
    assert out is not None
    expected = reference.gated_sum(*(t.double() for t in (gates, o_cmp, o, o_win)))
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("others", [0, 1, 2])
def test_backward_takes_the_gate_and_adds_what_others_contribute(others: int, device: str) -> None:
    x = draw(T=19, Dk=24, device=device)
    o, lse, index, _ = selected_forward(x.q, x.k, x.v, x.blocks, x.at)
    do = gradient(x)
    delta = torch.stack([(do.float() * o.float()).sum(-1)] * 3, -1)[..., 1]
    gates = normal(*x.q.shape[:3], 3, seed=7, device=device, dtype=torch.float16).sigmoid()
    gate = gates[..., 1]
    more = [
        strided(normal(*x.q.shape, seed=s, device=device, dtype=x.q.dtype))
        for s in range(5, 5 + others)
    ]

    got = selected_backward(do, x.q, x.k, x.v, lse, delta, index, x.at, gate=gate, add_dq=more)

    scaled = (gate[..., None].double() * do.double()).to(do.dtype)
    expected = selected_backward(
        scaled, x.q, x.k, x.v, lse, (scaled.float() * o.float()).sum(-1), index, x.at
    )
    dq = expected[0].double() + sum((m.double() for m in more), torch.zeros((), device=device))
    for a, b in zip(got, (dq, *expected[1:]), strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=8e-3, rtol=4e-3)


def inverted(x: Inputs) -> Mapping[tuple[int, int, int], list[int]]:
    """(sequence * HKV + KV head, first key) -> pairs in ascending order, in plain Python."""
    lists = defaultdict(list)
    starts = [0] if x.cu_seqlens is None else x.cu_seqlens.tolist()
    B, T, HKV, n = x.blocks.shape
    for b in range(B):
        for t in range(T):
            start = max(s for s in starts if s <= t)
            for h in range(HKV):
                for slot, block in enumerate(x.blocks[b, t, h].tolist()):
                    first = start + block * x.block_size
                    if block >= 0 and first <= x.q_start + t:
                        lists[b * HKV + h, first, (b * T + t) // T].append((b * T + t) * n + slot)
    return lists


def listed(index: Selected) -> Mapping[tuple[int, int], list[list[int]]]:
    """(sequence * HKV + KV head, first key) -> pairs of each item."""
    lists = defaultdict(list)
    for start, stop, row, first, _ in index.items[: index.first_item[-1]].tolist():
        lists[row, first].append(index.pairs[start:stop].tolist())
    return lists


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape",
    [{"B": 2}, {"q_start": 19}, {"documents": (7, 1, 12, 0, 9)}, {"block_size": 3}],
    ids=str,
)
def test_lists_hold_the_queries_of_each_block(shape: dict[str, Any], device: str) -> None:
    x = draw(**shape, device=device)
    sizes: dict[str, Any] = {"keys": x.k.shape[1], "group": 3, "channels": 32, "chunk_tokens": 1000}
    where: dict[str, Any] = {
        "q_start": x.q_start,
        "cu_seqlens": x.cu_seqlens,
        "block_size": x.block_size,
    }
    expected = {(row, first): pairs for (row, first, _), pairs in inverted(x).items()}

    index = inverse.invert(x.blocks, **sizes, **where)
    ordered = inverse.invert(x.blocks, **sizes, **where, deterministic=True)

    assert {key: sorted(chain(*items)) for key, items in listed(index).items()} == expected
    assert listed(ordered) == {key: [pairs] for key, pairs in expected.items()}
    assert index.first_item[-1] <= index.chunks[0].max_items


@pytest.mark.parametrize("device", DEVICES)
def test_a_key_ends_where_its_document_ends(device: str) -> None:
    x = draw(documents=(7, 1, 20, 17), block_size=16, device=device)
    index = inverse.invert(
        x.blocks,
        keys=45,
        group=3,
        channels=32,
        block_size=16,
        chunk_tokens=1000,
        cu_seqlens=x.cu_seqlens,
    )

    spans = {tuple(row) for row in index.items[: index.first_item[-1], 3:].tolist()}

    assert spans == {(0, 7), (7, 8), (8, 24), (24, 28), (28, 44), (44, 45)}


def test_limits_are_named() -> None:
    x = draw(T=2)
    with pytest.raises(Unsupported, match="at most 128 keys, but these have 129"):
        inverse.invert(x.blocks, keys=2, group=3, channels=32, block_size=129, chunk_tokens=16)
    many = torch.zeros(1, dtype=torch.int32).expand(1, 1 << 20, 64, 64)
    with pytest.raises(Unsupported, match="must be less than 2147483648"):
        inverse.invert(many, keys=1 << 20, group=1, channels=32, block_size=16, chunk_tokens=16)


@pytest.mark.gpu
@needs_gpu
def test_deterministic_gradients_are_the_same_bits_in_every_run() -> None:
    x = draw(2000, B=2, HQ=16, HKV=1, Dk=64, Dv=64, n=8, device="cuda", dtype=torch.bfloat16)
    first = by_kernels(x, deterministic=True)

    for _ in range(5):
        again = by_kernels(x, deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("documents", [(), (100, 1, 156)], ids=["one", "documents"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_host_never_waits_and_a_graph_can_be_captured(
    deterministic: bool, documents: tuple[int, ...]
) -> None:
    x = draw(257, documents=documents, device="cuda", dtype=torch.bfloat16)
    do = gradient(x)  # copied from the host, which waits for it
    expected = by_kernels(x, deterministic=deterministic, do=do)
    with no_waiting():
        by_kernels(x, deterministic=deterministic, do=do)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = by_kernels(x, deterministic=deterministic, do=do)
    graph.replay()

    for name in ("o", "dq"):
        assert torch.equal(got[name], expected[name])
