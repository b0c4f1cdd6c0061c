"""The whole operator by its kernels, and what it selects, against the definition.

Whatever a kernel must write is NaN before, in every test here.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from nsa import ops, reference
from nsa.config import BRANCHES, Positions, Routes
from nsa.errors import Unsupported
from nsa.kernels import scores
from nsa.kernels.common import streams
from nsa.kernels.common.launch import KernelLaunch
from nsa.kernels.tests.where import (
    ARCHITECTURES_AND_SHAPES,
    CALLS_KERNELS,
    FLOAT32_ROUNDING,
    LENGTHS,
    SHAPES,
    TRITON,
)
from nsa.routes.tests.test_routes import assert_none, excess_error
from nsa.tests.operator_inputs import (
    SMALL,
    draw,
    mean,
    needs_gpu,
    normal,
    outputs_and_gradients,
    run,
)

pytestmark = CALLS_KERNELS


def tokens(
    T: int,
    *,
    HQ: int = 6,
    HKV: int = 2,
    Dk: int = 16,
    Dv: int = 8,
    B: int = 1,
    seed: int = 0,
    device: str,
    dtype: torch.dtype,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Tensor]:
    """The operator's inputs by its argument names, with gates that are strided."""
    sizes = {"q": (HQ, Dk), "gates": (HQ, 3)} | {
        f"{kind}_{branch}": (HKV, D)
        for branch in ("cmp", "sel", "win")
        for kind, D in (("k", Dk), ("v", Dv))
    }
    x = {
        name: normal(B, T, *size, seed=seed + i, device=device, dtype=dtype)
        for i, (name, size) in enumerate(sizes.items())
    }
    x["gates"] = x["gates"].sigmoid()
    for name in ("k_cmp", "v_cmp"):
        x[name] = ops.compress_blocks(x[name], mean, config=SMALL, cu_seqlens=cu_seqlens)
    return x


def affordable(shape: Mapping[str, int], device: str) -> dict[str, Any]:
    """The same group and heads; in the interpreter one sequence and one KV head of them."""
    if device == "cuda":
        return dict(shape)
    return {**shape, "B": 1, "HQ": shape["HQ"] // shape["HKV"], "HKV": 1}


def forward(
    x: Mapping[str, Any], on: Sequence[str] = BRANCHES, **where: Any
) -> tuple[Tensor, Tensor]:
    """Output and selection."""
    routes = Routes.triton(on)
    return ops.attention(**x, config=SMALL, routes=routes, return_blocks=True, **where)


def whole(x: Mapping[str, Tensor], **where: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Output, gradients of all inputs and the selection."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    out, blocks = forward(leaves, **where)
    return {"out": out.detach(), **gradients(out, leaves)}, blocks


def gradients(out: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    grad = normal(*out.shape, seed=9, device=str(out.device), dtype=out.dtype)
    grads = torch.autograd.grad(out, tuple(leaves.values()), grad, materialize_grads=True)
    return {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def definition(
    x: Mapping[str, Tensor],
    blocks: Tensor,
    dtype: torch.dtype,
    cu_seqlens: Tensor | None = None,
    on: Sequence[str] = BRANCHES,
) -> dict[str, Tensor]:
    """The same by nsa.reference, for the blocks that were selected; a gate that is off is zero."""
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in x.items()}
    q = leaves["q"]
    at = Positions.of(q, config=SMALL, cu_seqlens=cu_seqlens)
    branches = (
        reference.compress_attention(q, leaves["k_cmp"], leaves["v_cmp"], at),
        reference.selected_attention(q, leaves["k_sel"], leaves["v_sel"], blocks, at),
        reference.window_attention(q, leaves["k_win"], leaves["v_win"], at),
    )
    gates = leaves["gates"] * torch.tensor([branch in on for branch in BRANCHES]).to(q)
    out = reference.gated_sum(gates, *branches)
    return {"out": out.detach(), **gradients(out, leaves)}


def assert_whole_is_as_defined(
    x: Mapping[str, Tensor], cu_seqlens: Tensor | None = None, on: Sequence[str] = BRANCHES
) -> None:
    """Within twice the definition's own error at the same precision, as each part is."""
    got, blocks = whole(x, on=on, cu_seqlens=cu_seqlens)

    dtype = x["q"].dtype
    assert blocks.shape[-1] == (SMALL.num_blocks if "select" in on else 0)
    if "select" not in on:
        blocks = blocks.new_full((*blocks.shape[:3], SMALL.num_blocks), -1)
    exact = definition(x, blocks, torch.float64, cu_seqlens, on)
    own = definition(x, blocks, dtype, cu_seqlens, on)
    for name, truth in exact.items():
        assert got[name].dtype == dtype
        assert got[name].shape == truth.shape
        allowed = 2 * (own[name] - truth).norm() + torch.finfo(dtype).eps * truth.norm()
        assert (got[name] - truth).norm() <= allowed + FLOAT32_ROUNDING, name


@pytest.mark.parametrize(
    ("shape", "device", "dtype"),
    [
        pytest.param(*shape.values, *where.values, marks=where.marks, id=f"{shape.id}-{where.id}")
        for where in TRITON
        for shape in (SHAPES if where.values[0] == "cuda" else SHAPES[:3])
    ],
)
def test_the_whole_is_as_defined(shape: dict[str, Any], device: str, dtype: torch.dtype) -> None:
    T = 61 if device == "cuda" else 37
    x = tokens(T, **affordable(shape, device), device=device, dtype=dtype)

    assert_whole_is_as_defined(x)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_chunks_join_to_the_whole(device: str, dtype: torch.dtype) -> None:
    x = tokens(37, B=2, HQ=2, HKV=1, device=device, dtype=dtype)

    assert_whole_is_as_defined(x)


@pytest.mark.usefixtures("architecture", "small_chunks")
@pytest.mark.parametrize(("part", "expected"), [("compress", 5), ("window", 5)])
@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_splits_of_the_queries_add_up(
    device: str, dtype: torch.dtype, part: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw(part, 61, HQ=3, HKV=1, B=1, dtype=dtype, device=device)
    splits: list[int] = []
    new_empty = Tensor.new_empty

    def counted(self: Tensor, *size: int, **options: Any) -> Tensor:
        if options.get("dtype") == torch.float32 and len(size) == 5:  # [splits, B, S, HKV, D]
            splits.append(size[0])
        return new_empty(self, *size, **options)

    monkeypatch.setattr(Tensor, "new_empty", counted)

    assert_none(excess_error(part, "triton", x))
    assert splits == [expected, expected]


@pytest.mark.parametrize(("device", "dtype"), TRITON)
@pytest.mark.parametrize("T", LENGTHS)
def test_the_whole_at_odd_lengths(T: int, device: str, dtype: torch.dtype) -> None:
    heads = affordable({"HQ": 6, "HKV": 2}, device)

    assert_whole_is_as_defined(tokens(T, **heads, device=device, dtype=dtype))


SOME = [on for n in (1, 2) for on in combinations(BRANCHES, n)]
KERNELS = {
    "compress": {"forward compress", "_query_kernel", "_key_kernel"},
    "select": {"_score_kernel", "_top_kernel", "_partial_kernel", "_combine_kernel",
               "_backward_kernel", "_reduce_kernel"},
    "window": {"forward window", "_query_kernel", "_key_kernel"},
}  # fmt: skip
"""The kernels of a branch that another may share, and those of no other."""


@pytest.mark.parametrize("on", SOME, ids="-".join)
@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_a_branch_that_is_off_is_a_gate_of_zero_and_launches_nothing(
    device: str, dtype: torch.dtype, on: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    launch = KernelLaunch.__call__

    def noted(self: KernelLaunch, *arguments: Any) -> None:
        name, sizes = self.kernel.__name__, self.named
        if name == "_forward_kernel":
            of = "window" if sizes["WINDOW"] else "sums" if sizes["ONLY_LSE"] else "compress"
            name = f"forward {of}"
        launched.append(name)
        launch(self, *arguments)

    monkeypatch.setattr(KernelLaunch, "__call__", noted)
    x = tokens(37, HQ=3, HKV=1, device=device, dtype=dtype)

    assert_whole_is_as_defined(x, on=on)

    expected = set[str]().union(*(KERNELS[branch] for branch in on))
    expected |= {"forward sums"} if "select" in on and "compress" not in on else set()
    known = set[str]().union(*KERNELS.values(), {"forward sums"})
    assert set(launched) & known == expected
    assert launched.count("_query_kernel") == len({"compress", "window"}.intersection(on))


@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_the_whole_of_packed_documents(device: str, dtype: torch.dtype) -> None:
    bounds = torch.tensor([0, 5, 30, 31, 31, 57], dtype=torch.int32, device=device)

    x = tokens(57, HQ=3, HKV=1, device=device, dtype=dtype, cu_seqlens=bounds)

    assert_whole_is_as_defined(x, bounds)


def assert_selected_the_best(
    x: Mapping[str, Tensor], blocks: Tensor, record_property: Callable[[str, object], None]
) -> None:
    """A block chosen for another is worth the same, within float32's rounding of the scores."""
    q, k_cmp = x["q"].double(), x["k_cmp"].double()
    at = Positions.of(q, config=SMALL)
    expected = reference.select_blocks(q, k_cmp, at)
    importance = reference.block_importance(q, k_cmp, at)

    assert blocks.dtype is torch.int32
    assert torch.equal(blocks < 0, expected < 0)
    agreement = (blocks == expected).all(-1).double().mean().item()
    record_property("selection_agreement", agreement)
    assert agreement > 0.99
    worth, best = (
        importance.gather(-1, b.clamp(min=0).long()).masked_fill(b < 0, 0).sum(-1)
        for b in (blocks, expected)
    )
    assert (best - worth).max() <= 1e-5 * best.max()


@pytest.mark.parametrize(
    ("architecture", "shape", "device", "dtype"),
    ARCHITECTURES_AND_SHAPES,
    indirect=["architecture"],
)
def test_selection_agrees_except_where_scores_tie(
    architecture: None,
    shape: dict[str, Any],
    device: str,
    dtype: torch.dtype,
    record_property: Callable[[str, object], None],
) -> None:
    """At 101 tokens there are 7 blocks to choose 4 from."""
    T = 2003 if device == "cuda" else 101
    x = tokens(T, **affordable(shape, device), device=device, dtype=dtype)

    blocks = ops.select_blocks(x["q"], x["k_cmp"], config=SMALL, route="triton")

    assert_selected_the_best(x, blocks, record_property)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_the_whole_selects_as_the_scores_alone(
    device: str, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    x = tokens(80, HQ=2, HKV=1, device=device, dtype=dtype)

    with torch.no_grad():
        _, blocks = forward(x)

    assert_selected_the_best(x, blocks, record_property)


@pytest.mark.parametrize("small", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize(("device", "dtype"), TRITON)
@torch.no_grad()
def test_later_tokens_change_nothing_before_them(
    device: str, dtype: torch.dtype, small: bool, request: pytest.FixtureRequest
) -> None:
    """Bit for bit, output and selection, beyond the window."""
    if small:
        request.getfixturevalue("small_chunks")
    T = 90 if device == "cuda" else 57
    raw, other = (
        tokens(T, HQ=2, HKV=1, seed=seed, device=device, dtype=dtype) for seed in (0, 100)
    )
    before, blocks = forward(raw)

    for s in (1, 8, 33, 64, T - 1) if device == "cuda" else (33,):
        after = {}
        for name, x in raw.items():
            rows = SMALL.compressed_length(s) if name.endswith("_cmp") else s
            after[name] = torch.cat([x[:, :rows], other[name][:, rows:]], 1)
        changed, changed_blocks = forward(after)

        assert torch.equal(blocks[:, :s], changed_blocks[:, :s])
        assert torch.equal(before[:, :s], changed[:, :s])
        assert not torch.equal(before[:, s:], changed[:, s:])


@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_no_selection_yields_zeros_with_zero_gradients(device: str, dtype: torch.dtype) -> None:
    x = draw("select", 40, HQ=3, HKV=1, B=1, device=device, dtype=dtype)
    late = torch.arange(40, device=device).view(-1, 1, 1) >= 20
    x = replace(x, blocks=x.blocks.where(late, -1))

    got = outputs_and_gradients("select", "triton", x)

    for name in ("out", "dq"):
        assert torch.equal(got[name][:, :20], torch.zeros_like(got[name][:, :20]))
        assert got[name][:, 20:].abs().sum(-1).min() > 0
    assert got["dk"].isfinite().all()


@pytest.mark.gpu
@needs_gpu
def test_gradients_repeat_bit_for_bit_if_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x = tokens(2000, HQ=16, HKV=2, Dk=64, Dv=64, device="cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [whole(x)[0] for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)

    for name, first in runs[0].items():
        assert all(torch.equal(first, other[name]) for other in runs[1:]), name


@pytest.mark.parametrize(("few", "captured"), [(True, False), (True, True), (False, False)])
def test_work_that_launching_takes_longer_than_stays_on_one_stream_unless_captured(
    few: bool, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Mock(**{"is_current_stream_capturing.return_value": captured})
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(streams, "_pools", {})
    made = streams._streams(torch.device("cuda"), 2, streams.FEW + (not few))
    assert (made == [None, None]) is (few and not captured)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("T", [500, 5000])
def test_branches_side_by_side_give_the_bits_of_one_after_another(
    T: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes memory meanwhile: a kernel beside has not lost what it reads."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x = tokens(T, HQ=12, HKV=2, Dk=64, Dv=64, device="cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        monkeypatch.setattr(streams, "FEW", 0)
        beside = [whole(x)[0] for _ in range(20)]
        monkeypatch.setattr(streams, "FEW", sys.maxsize)
        in_turn, _ = whole(x)
    finally:
        torch.use_deterministic_algorithms(False)

    for name, expected in in_turn.items():
        assert all(torch.equal(got[name], expected) for got in beside), name


@pytest.mark.gpu
@needs_gpu
def test_a_captured_step_has_the_bits_of_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its branches side by side: the graph then has them so."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x = tokens(700, HQ=12, HKV=2, Dk=64, Dv=64, device="cuda", dtype=torch.bfloat16)
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    do = normal(*forward(leaves)[0].shape, seed=9, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        out, _ = forward(leaves)
        return out.detach(), *torch.autograd.grad(out, tuple(leaves.values()), do)

    torch.use_deterministic_algorithms(True)
    try:
        expected = step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step()
        for _ in range(10):
            graph.replay()
    finally:
        torch.use_deterministic_algorithms(False)

    for name, a, b in zip(("out", *leaves), got, expected, strict=True):
        assert torch.equal(a, b), name


def test_what_the_kernels_cannot_do_is_refused() -> None:
    x = draw("window", 8, dtype=torch.float32)

    with pytest.raises(Unsupported, match="needs float16 or bfloat16"):
        run("window", "triton", x)


@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_a_batch_beyond_the_grid_is_refused(device: str, dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, 2, 16, device=device, dtype=dtype).expand(40_000, 1, 2, 16)

    with pytest.raises(Unsupported, match=r"B \* HKV of at most 65535, but it is 80000"):
        ops.window_attention(x, x, x, window_size=8, route="triton")


@pytest.mark.parametrize(("device", "dtype"), TRITON)
@torch.no_grad()
def test_scores_of_many_sequences_stay_within_the_grid(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = tokens(40, HQ=2, HKV=1, B=5, device=device, dtype=dtype)
    expected = ops.select_blocks(x["q"], x["k_cmp"], config=SMALL, route="triton")
    grids: list[tuple[int, ...]] = []
    launch = KernelLaunch.__call__

    def noted(self: KernelLaunch, grid: Any, *arguments: Any) -> None:
        grids.extend([grid] if len(grid) == 3 else [])
        launch(self, grid, *arguments)

    monkeypatch.setattr(KernelLaunch, "__call__", noted)
    monkeypatch.setattr(scores, "MAX_GRID_Y", 3)
    blocks = ops.select_blocks(x["q"], x["k_cmp"], config=SMALL, route="triton")

    assert max(y for _, y, _ in grids) == 3
    assert torch.equal(blocks, expected)
