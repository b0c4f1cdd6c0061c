"""Blocks that a case is given instead of selecting them."""

import pytest
import torch

from harness.measure import accuracy
from harness.records import Scalar
from nsa.config import NSAConfig
from suites import selections, workloads
from suites.selections import SELECTIONS, fixed_blocks

CONFIG = NSAConfig(
    compress_block_size=8, compress_stride=4, select_block_size=8, num_blocks=5, window_size=8
)
T = 203


def draw(selection: str, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    assert selection in ("random", "local")
    return fixed_blocks(selection, B=2, T=T, HKV=3, config=CONFIG, rng=rng)  # type: ignore[arg-type]


@pytest.mark.parametrize("selection", ["random", "local"])
def test_blocks_are_a_valid_selection(selection: str) -> None:
    blocks = draw(selection)

    own = torch.arange(T)[None, :, None, None] // CONFIG.select_block_size
    used = blocks >= 0
    assert blocks.dtype is torch.int32
    assert torch.equal(used.sum(-1), (own[..., 0] + 1).clamp(max=5).expand(2, T, 3))
    assert (blocks <= own).all()
    later, earlier = blocks[..., 1:], blocks[..., :-1]
    assert ((later > earlier) | (later < 0)).all()  # ascending, distinct, unused at the end
    for forced in (torch.zeros_like(own), own, (own - 1).clamp(min=0)):
        assert (blocks == forced).any(-1).all()


def test_local_blocks_are_the_nearest() -> None:
    blocks = draw("local")[:, -1]

    assert blocks.tolist() == [[[0, 22, 23, 24, 25]] * 3] * 2


def test_random_blocks_lie_anywhere_and_differ_between_queries_and_heads() -> None:
    blocks = draw("random")[:, 160:]  # 20 or more causal blocks

    others = blocks[..., 1:3].double()
    assert 7 < others.mean() < 13
    assert blocks[:, :, 0].ne(blocks[:, :, 1]).any(-1).double().mean() > 0.9
    assert blocks[:, 1:].ne(blocks[:, :-1]).any(-1).double().mean() > 0.9
    assert torch.equal(blocks, draw("random")[:, 160:])
    assert not torch.equal(blocks, draw("random", seed=1)[:, 160:])


def test_chunks_join_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw("local")
    monkeypatch.setattr(selections, "_CHUNK_ELEMENTS", 1000)

    assert torch.equal(draw("local"), whole)
    assert draw("random").shape == whole.shape


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_branch_computes_with_the_blocks_it_is_given(selection: str) -> None:
    axes: dict[str, Scalar] = {
        "seq_len": 150,
        "q_heads": 6,
        "kv_heads": 2,
        "head_dim_qk": 16,
        "head_dim_v": 8,
        "compress_block_size": 8,
        "compress_stride": 4,
        "select_block_size": 8,
        "num_blocks": 4,
        "window_size": 16,
        "dtype": "fp32",
        "pass": "forward",
        "branch": "select",
        "selection": selection,
    }
    workload = workloads.attention("gather", axes)

    accuracy.compare(workload)

    assert workload.effective
    seen = workload.effective()
    assert seen["selection"] == selection
    assert (float(seen["blocks_back"]) < 3.5) == (selection == "local")  # of 18 in the end
