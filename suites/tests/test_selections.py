"""Blocks that a case is given instead of selecting them."""

import gc
from dataclasses import replace
from itertools import product

import pytest
import torch

from harness.measure import accuracy
from nsa.config import PRESETS, NSAConfig
from nsa.tests.operator_inputs import needs_gpu
from nsa.train.config import TrainConfig
from nsa.train.loop import Trainer
from suites import selections, workloads
from suites.axes import AxisError
from suites.selections import SELECTIONS, distinct_share, fixed_blocks, trained_blocks
from suites.tests.small import OPERATOR

CONFIG = NSAConfig(
    compress_block_size=8, compress_stride=4, select_block_size=8, num_blocks=5, window_size=8
)
T = 203


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(PRESETS["tiny"], n_layers=4)
    recipe = TrainConfig(model=model, dataset="text", seq_len=512, steps=3, warmup_steps=0)
    monkeypatch.setattr(selections, "TRAINED", recipe)


def draw(selection: str, seed: int = 0, B: int = 2, HKV: int = 3) -> torch.Tensor:
    if selection == "trained":
        return trained_blocks(B=B, T=T, HKV=HKV, config=CONFIG, device="cpu")
    rng = torch.Generator().manual_seed(seed)
    assert selection in ("random", "local")
    return fixed_blocks(selection, B=B, T=T, HKV=HKV, config=CONFIG, rng=rng)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("selection", "B", "HKV"),
    [("random", 2, 3), ("local", 2, 3), *product(["trained"], [1, 2], [2, 4, 8])],
)
def test_blocks_are_a_valid_selection(selection: str, B: int, HKV: int) -> None:
    blocks = draw(selection, B=B, HKV=HKV)

    own = torch.arange(T)[None, :, None, None] // CONFIG.select_block_size
    used = blocks >= 0
    assert blocks.dtype is torch.int32
    assert torch.equal(used.sum(-1), (own[..., 0] + 1).clamp(max=5).expand(B, T, HKV))
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


def test_heads_come_from_the_layers_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    text, head = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None]
    layers = [(100 * text + 10 * head + layer).expand(2, T, 2, 5) for layer in range(4)]
    monkeypatch.setattr(selections, "_train", lambda recipe: layers)
    monkeypatch.setattr(selections, "TRAINED", replace(selections.TRAINED, seed=2))

    assert draw("trained", HKV=4)[1, -1, :, 0].tolist() == [100, 101, 102, 103]
    assert draw("trained", B=1, HKV=8)[0, -1, :, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_the_model_of_trained_learns_before_it_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    after_three = draw("trained")
    monkeypatch.setattr(selections, "TRAINED", replace(selections.TRAINED, steps=20))

    assert 0.3 > (draw("trained") != after_three).double().mean() > 0.01


def test_a_model_that_has_not_learnt_gives_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selections, "TRAINED", replace(selections.TRAINED, lr=1e30))

    with pytest.raises(FloatingPointError, match="held-out loss of nan"):
        draw("trained")


def test_training_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    step = Trainer.step

    def seen(trainer: Trainer) -> torch.Tensor:
        modes.append(torch.get_deterministic_debug_mode())
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", seen)
    monkeypatch.setattr(selections, "TRAINED", replace(selections.TRAINED, seed=1))
    blocks = draw("trained")

    assert draw("trained") is blocks
    assert modes == [1, 1, 1]
    assert torch.get_deterministic_debug_mode() == 0
    assert not [one for one in gc.get_objects() if type(one) is Trainer]


@pytest.mark.filterwarnings("ignore:.*eterministic")  # cuBLAS, which wants a variable
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_every_process_gets_the_same_trained_blocks(device: str) -> None:
    runs, length = [], T if device == "cpu" else 8192
    for _ in range(2):
        selections._of_layers.cache_clear()
        runs.append(trained_blocks(B=1, T=length, HKV=8, config=CONFIG, device=device))

    assert torch.equal(*runs)


def test_a_model_with_too_few_heads_is_refused() -> None:
    sizes = {"seq_len": 64, "q_heads": 9, "kv_heads": 9, "head_dim_qk": 16, "head_dim_v": 16}
    words = {"dtype": "fp32", "pass": "forward", "branch": "select", "selection": "trained"}

    with pytest.raises(AxisError, match="kv_heads=9 with selection=trained, whose model has 8"):
        workloads.preflight("attention", "gather", {**sizes, **words}, {})


@pytest.mark.parametrize("queries", [4, 16])
def test_distinct_share_counts_blocks_that_neighbours_do_not_share(queries: int) -> None:
    blocks = draw("random")
    asked = distinct = 0
    for rows in blocks[:, : T // queries * queries].unflatten(1, (-1, queries)).flatten(0, 1):
        for head in rows.unbind(1):
            used = [block for block in head.flatten().tolist() if block >= 0]
            asked, distinct = asked + len(used), distinct + len(set(used))

    assert distinct_share(blocks, queries) == pytest.approx(distinct / asked)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_branch_computes_with_the_blocks_it_is_given(selection: str) -> None:
    of_branch = {"pass": "forward", "branch": "select", "selection": selection}
    workload = workloads.attention("gather", {**OPERATOR, "seq_len": 150, **of_branch})

    accuracy.compare(workload)

    assert workload.effective
    seen = workload.effective()
    assert seen["selection"] == selection
    assert (float(seen["blocks_back"]) < 3.5) == (selection == "local")  # of 18 in the end
    assert 1 > float(seen["distinct_of_4"]) > float(seen["distinct_of_16"]) > 1 / 16
