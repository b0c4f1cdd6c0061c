"""Which blocks are selected: a second derivation in plain Python, causality, ties."""

import math

import pytest
import torch
from torch import Tensor

from nsa import ops, reference
from nsa.config import ROUTES, NSAConfig, Positions
from nsa.routes import eager
from nsa.tests.operator_inputs import DEVICES, SMALL, mean, normal

CONFIGS = [
    pytest.param(SMALL, id="paper-proportions"),
    pytest.param(
        NSAConfig(compress_block_size=4, compress_stride=4, select_block_size=4, num_blocks=3),
        id="no-overlap-and-equal-sizes",
    ),
    pytest.param(
        NSAConfig(compress_block_size=12, compress_stride=2, select_block_size=6, num_blocks=5),
        id="compressed-blocks-longer-than-selected",
    ),
]
PORTABLE = [route for route in ROUTES["scores"] if route != "triton"]
"""Triton's takes half precision only, and is judged in test_kernels_routes.py."""


def slow_importance(
    q: list[list[float]], k_cmp: list[list[float]], t: int, scale: float, config: NSAConfig
) -> list[float]:
    """Eq. 8 to 10 for one query and KV head, token by token: q holds the group's G heads."""
    start, size = config.compress_stride, config.compress_block_size
    tokens = [set(range(i * start, i * start + size)) for i in range(len(k_cmp))]
    visible = [i for i in range(len(k_cmp)) if max(tokens[i]) <= t]
    importance = [0.0] * (t // config.select_block_size + 1)
    for head in q:
        dot = {i: sum(a * b for a, b in zip(head, k_cmp[i], strict=True)) for i in visible}
        weight = {i: math.exp(scale * dot[i]) for i in visible}
        for i in visible:
            for token in tokens[i]:
                j = token // config.select_block_size
                importance[j] += weight[i] / sum(weight.values())
    return importance


def slow_selection(q: Tensor, k_cmp: Tensor, config: NSAConfig) -> list[list[list[int]]]:
    """Selected blocks of one batch entry, [T][HKV][<= n], ascending."""
    T, HQ, D = q.shape
    HKV = k_cmp.shape[1]
    G = HQ // HKV
    chosen: list[list[list[int]]] = []
    for t in range(T):
        chosen.append([])
        for h in range(HKV):
            group = q[t, h * G : (h + 1) * G].tolist()
            importance = slow_importance(group, k_cmp[:, h].tolist(), t, D**-0.5, config)
            own = len(importance) - 1
            always = {0, own, max(own - 1, 0)}
            rest = sorted(set(range(own)) - always, key=lambda j: (-importance[j], j))
            chosen[t].append(sorted([*always, *rest][: config.num_blocks]))
    return chosen


def without_unused(blocks: Tensor) -> list[list[list[int]]]:
    return [[[j for j in slots if j >= 0] for slots in heads] for heads in blocks.tolist()]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("route", PORTABLE)
def test_selection_equals_a_token_by_token_derivation(route: str, config: NSAConfig) -> None:
    q, k = normal(1, 90, 6, 8, seed=0), normal(1, 90, 2, 8, seed=1)
    k_cmp = ops.compress_blocks(k, mean, config=config)

    blocks = ops.select_blocks(q, k_cmp, config=config, route=route)

    assert blocks.dtype == torch.int32
    assert without_unused(blocks[0]) == slow_selection(q[0], k_cmp[0], config)


def test_paper_sizes_weigh_compressed_blocks_1_2_2_2_1() -> None:
    """Select block 1 overlaps compressed blocks 3 to 7."""
    one_hot = torch.eye(15, dtype=torch.float64).view(1, 15, 1, 15)

    importance = eager.to_select_blocks(one_hot, 256, NSAConfig())

    assert importance[0, :, 0, 1].tolist() == [0, 0, 0, 1, 2, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("route", PORTABLE)
def test_slots_ascend_and_unused_ones_come_last(route: str) -> None:
    """Before n causal blocks exist, all of them are selected: n = 4, blocks of 16."""
    q, k_cmp = normal(1, 90, 4, 8, seed=0), normal(1, 21, 2, 8, seed=1)

    blocks = ops.select_blocks(q, k_cmp, config=SMALL, route=route)

    assert blocks[0, 0, 0].tolist() == [0, -1, -1, -1]
    assert blocks[0, 16, 0].tolist() == [0, 1, -1, -1]
    assert blocks[0, 63, 0].tolist() == [0, 1, 2, 3]
    full = blocks[0, 64:]
    assert (full.diff(dim=-1) > 0).all()
    assert (full[..., 0] == 0).all()
    own = torch.arange(64, 90) // 16
    assert torch.equal(full[..., -1].long(), own[:, None].expand(-1, 2))
    assert torch.equal(full[..., -2].long(), own[:, None].expand(-1, 2) - 1)


@pytest.mark.parametrize("route", PORTABLE)
def test_more_slots_than_blocks(route: str) -> None:
    q, k_cmp = normal(1, 20, 2, 8, seed=0), normal(1, 4, 1, 8, seed=1)

    blocks = ops.select_blocks(q, k_cmp, config=SMALL, route=route)

    assert blocks.shape == (1, 20, 1, 4)
    assert blocks[0, -1, 0].tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("route", PORTABLE)
def test_ties_go_to_the_lower_block(route: str, device: str) -> None:
    """q = 0 makes every visible block equally probable, so blocks 1 to own - 2 tie."""
    q, k_cmp = torch.zeros(1, 150, 6, 8, device=device), torch.ones(1, 36, 2, 8, device=device)

    blocks = ops.select_blocks(q, k_cmp, config=SMALL, route=route)

    assert blocks[0, 149].tolist() == [[0, 1, 8, 9]] * 2


@pytest.mark.parametrize("route", PORTABLE)
def test_a_group_selects_together(route: str) -> None:
    """Eq. 10: a permutation of the heads within a group changes nothing."""
    q, k_cmp = normal(1, 90, 6, 8, seed=0), normal(1, 21, 2, 8, seed=1)

    blocks = ops.select_blocks(q, k_cmp, config=SMALL, route=route)
    permuted = ops.select_blocks(q[:, :, [2, 0, 1, 5, 3, 4]], k_cmp, config=SMALL, route=route)

    assert torch.equal(blocks, permuted)
    assert not torch.equal(blocks[:, :, 0], blocks[:, :, 1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk", [1 << 27, 1])
def test_routes_differ_only_where_scores_tie_within_rounding(
    chunk: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "CHUNK_ELEMENTS", chunk)
    q, k_cmp = (
        normal(2, *size, 16, seed=H, device=device, dtype=dtype)
        for H, size in enumerate([(200, 6), (49, 2)])
    )
    at = Positions.of(q, config=SMALL)
    importance = reference.block_importance(q.double(), k_cmp.double(), at)

    defined, chosen = (
        ops.select_blocks(q, k_cmp, config=SMALL, route=route) for route in ("reference", "eager")
    )

    def held(blocks: Tensor) -> Tensor:
        return importance.gather(-1, blocks.clamp(min=0).long()).where(blocks >= 0, 0).sum(-1)

    assert (chosen == defined).all(-1).double().mean() > 0.99
    torch.testing.assert_close(held(chosen), held(defined), atol=1e-5, rtol=0)


@pytest.mark.parametrize("route", PORTABLE)
def test_packed_documents_select_as_separate_ones(route: str) -> None:
    lengths = [5, 70, 1, 0, 90]
    cu_seqlens = torch.tensor([0, 5, 75, 76, 76, 166], dtype=torch.int32)
    q, k = normal(1, 166, 6, 8, seed=0), normal(1, 166, 2, 8, seed=1)
    k_cmp = ops.compress_blocks(k, mean, config=SMALL, cu_seqlens=cu_seqlens)

    packed = ops.select_blocks(q, k_cmp, config=SMALL, route=route, cu_seqlens=cu_seqlens)

    separate = [
        ops.select_blocks(
            query, ops.compress_blocks(key, mean, config=SMALL), config=SMALL, route="reference"
        )
        for query, key in zip(q.split(lengths, 1), k.split(lengths, 1), strict=True)
        if query.shape[1]
    ]
    assert torch.equal(packed, torch.cat(separate, 1))


@pytest.mark.parametrize("T", [1, 5, 40])
@pytest.mark.parametrize("route", PORTABLE)
def test_last_queries_alone_select_as_in_prefill(route: str, T: int) -> None:
    q, k_cmp = normal(1, 90, 6, 8, seed=0), normal(1, 21, 2, 8, seed=1)
    whole = ops.select_blocks(q, k_cmp, config=SMALL, route=route)

    tail = ops.select_blocks(q[:, -T:], k_cmp, config=SMALL, route=route, q_start=90 - T)

    assert torch.equal(tail, whole[:, -T:])


def test_selection_takes_no_part_in_autograd() -> None:
    q, k_cmp = normal(1, 90, 6, 8, seed=0), normal(1, 21, 2, 8, seed=1).requires_grad_()

    assert not ops.select_blocks(q.requires_grad_(), k_cmp, config=SMALL).requires_grad
