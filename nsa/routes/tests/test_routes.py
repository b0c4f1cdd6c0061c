"""Every route of every branch against its definition in nsa.reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import ops
from nsa.config import ROUTES, NSAConfig, Routes
from nsa.routes import eager
from nsa.tests.operator_inputs import (
    ALL_ROUTES,
    DEVICES,
    PORTABLE_ROUTES,
    SMALL,
    Inputs,
    draw,
    fa2_params,
    mean,
    needs_gpu,
    normal,
    outputs_and_gradients,
    run,
    skip_what_the_build_lacks,
)


@pytest.fixture(autouse=True)
def small_window_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the sequences below span several tiles, the last one ragged."""
    monkeypatch.setattr(eager, "WINDOW_TILE", 16)


SHAPES = [
    pytest.param({"HQ": 6, "HKV": 2, "Dk": 16, "Dv": 8}, id="group-of-3"),
    pytest.param({"HQ": 2, "HKV": 2, "Dk": 8, "Dv": 24}, id="group-of-1-and-wider-values"),
    pytest.param({"HQ": 12, "HKV": 2, "Dk": 16, "Dv": 16}, id="group-of-6-and-equal-head-sizes"),
    pytest.param({"HQ": 4, "HKV": 2, "Dk": 16, "Dv": 16, "B": 1}, id="batch-of-1"),
]
LENGTHS = [
    pytest.param(T, id=name)
    for T, name in [(1, "1"), (7, "l-1"), (8, "l"), (22, "w+1"), (63, "63")]
]


FUSED_FLOAT32 = {"masked", "sdpa"}
"""Routes that PyTorch computes on a GPU in float32 with one fused kernel; its backward pass sums
in another order, at more than twice the definition's error (seen on an H200, torch 2.11)."""


def excess_error(
    part: str, route: str, x: Inputs, config: NSAConfig = SMALL, *, factor: float = 2
) -> dict[str, float]:
    """By how much a route's error exceeds twice the definition's at the same precision.

    Both are judged against the definition in float64, so no tolerance is picked by hand. Errors
    are Euclidean norms: the largest single one depends on the luck of summation order. Twice,
    as in FlashAttention's own tests, and one rounding of the result, for where the definition
    happens to be exact.
    """
    exact = outputs_and_gradients(part, "reference", x.to(torch.float64), config=config)
    definition = outputs_and_gradients(part, "reference", x, config=config)
    got = outputs_and_gradients(part, route, x, config=config)
    excess = {}
    for name, truth in exact.items():
        assert got[name].dtype == x.q.dtype
        assert got[name].shape == truth.shape
        allowed = (
            factor * (definition[name] - truth).norm() + torch.finfo(x.q.dtype).eps * truth.norm()
        )
        excess[name] = ((got[name] - truth).norm() - allowed).item()
    return excess


def assert_none(excess: dict[str, float]) -> None:
    assert {name: e for name, e in excess.items() if not e <= 0} == {}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("part", "route"), PORTABLE_ROUTES)
def test_error_is_no_worse_than_that_of_the_definition(
    part: str, route: str, shape: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    x = draw(part, 61, **shape, dtype=dtype, device=device)
    fused = device == "cuda" and dtype is torch.float32 and route in FUSED_FLOAT32

    assert_none(excess_error(part, route, x, factor=4 if fused else 2))


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize(("part", "route"), PORTABLE_ROUTES)
def test_odd_lengths(part: str, route: str, T: int) -> None:
    assert_none(excess_error(part, route, draw(part, T, dtype=torch.float32)))


@pytest.mark.parametrize(("part", "route"), PORTABLE_ROUTES)
def test_chunks_join_to_the_whole(part: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At this budget every chunk holds one row, and bfloat16 gradients of many chunks add up."""
    monkeypatch.setattr(eager, "CHUNK_ELEMENTS", 1)

    assert_none(excess_error(part, route, draw(part, 61, dtype=torch.bfloat16)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("part", "route"), fa2_params())
def test_flash_attention_error_is_no_worse_than_that_of_the_definition(
    part: str, route: str, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    x = draw(part, 61, **shape, dtype=dtype, device="cuda")
    skip_what_the_build_lacks(route, x)

    assert_none(excess_error(part, route, x))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("route", ["cudnn", "flash", "efficient"])
def test_dense_backend_error_is_no_worse_than_that_of_the_definition(route: str) -> None:
    x = draw("dense", 61, Dk=64, Dv=64, dtype=torch.bfloat16, device="cuda")

    assert_none(excess_error("dense", route, x))


@pytest.mark.gpu
@pytest.mark.parametrize(("part", "route"), fa2_params())
def test_flash_attention_keeps_documents_apart(part: str, route: str) -> None:
    x = draw(part, 61, documents=[5, 40, 16], dtype=torch.bfloat16, device="cuda")
    skip_what_the_build_lacks(route, x)

    assert_none(excess_error(part, route, x))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize(("part", "route"), fa2_params())
def test_flash_attention_decodes(part: str, route: str, T: int) -> None:
    x = draw(part, 63, dtype=torch.bfloat16, device="cuda")
    skip_what_the_build_lacks(route, x)
    whole = run(part, "reference", x.to(torch.float64))

    tail = run(part, route, x.tail(part, T), q_start=63 - T)

    torch.testing.assert_close(tail.double(), whole[:, -T:], atol=2e-2, rtol=0)


@pytest.mark.parametrize(("part", "route"), ALL_ROUTES)
def test_packed_documents_equal_separate_ones(part: str, route: str) -> None:
    lengths = [5, 30, 1, 0, 41]
    x = draw(part, sum(lengths), documents=lengths)
    rows = [SMALL.compressed_length(n) if part == "compress" else n for n in lengths]

    packed = run(part, route, x)

    separate = [
        run(part, route, Inputs(*document))
        for document in zip(
            x.q.split(lengths, 1),
            x.k.split(rows, 1),
            x.v.split(rows, 1),
            x.blocks.split(lengths, 1),
            strict=True,
        )
        if document[0].shape[1]
    ]
    torch.testing.assert_close(packed, torch.cat(separate, 1), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("part", "route"), PORTABLE_ROUTES)
def test_gradients_of_packed_documents(part: str, route: str) -> None:
    x = draw(part, 76, documents=[5, 30, 1, 40], dtype=torch.float32)

    assert_none(excess_error(part, route, x))


@pytest.mark.parametrize("T", [1, 5, 40])
@pytest.mark.parametrize(("part", "route"), ALL_ROUTES)
def test_last_queries_alone_equal_the_last_rows_of_prefill(part: str, route: str, T: int) -> None:
    """Decode and chunked prefill: queries stand at the end of the keys, not at their start."""
    x = draw(part, 63)
    whole = run(part, route, x)

    tail = run(part, route, x.tail(part, T), q_start=63 - T)

    torch.testing.assert_close(tail, whole[:, -T:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("route", ["reference", "eager"])
def test_window_needs_only_the_keys_it_sees(route: str, T: int) -> None:
    x = draw("window", 63)
    whole = run("window", route, x)
    q_start = 63 - T
    k_start = q_start - SMALL.window_size + 1

    tail = ops.window_attention(
        x.q[:, -T:],
        x.k[:, k_start:],
        x.v[:, k_start:],
        window_size=SMALL.window_size,
        route=route,
        q_start=q_start,
        k_start=k_start,
    )

    torch.testing.assert_close(tail, whole[:, -T:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("route", [r for r in ROUTES["select"] if r != "triton"])
def test_no_selection_yields_zeros_with_zero_gradients(route: str) -> None:
    x = draw("select", 40)
    x = replace(
        x,
        blocks=torch.full_like(x.blocks, -1).where(torch.arange(40).view(-1, 1, 1) < 20, x.blocks),
    )

    got = outputs_and_gradients("select", route, x)

    for name in ("out", "dq"):
        assert torch.equal(got[name][:, :20], torch.zeros_like(got[name][:, :20]))
        assert got[name][:, 20:].abs().min() > 0
    assert got["dk"].isfinite().all()


@pytest.mark.parametrize("route", ROUTES["compress"][:2])
def test_queries_before_the_first_block_yield_zeros_with_zero_gradients(route: str) -> None:
    got = outputs_and_gradients("compress", route, draw("compress", 20))

    for name in ("out", "dq"):
        assert torch.equal(got[name][:, :7], torch.zeros_like(got[name][:, :7]))
    assert got["out"][:, 7:].abs().min() > 0
    assert all(g.isfinite().all() for g in got.values())


@pytest.mark.parametrize("route", ["loop", "gather", "packed", "varlen"])
def test_unselected_blocks_are_not_read(route: str) -> None:
    """What makes the branch sparse: NaN in a key or value that is read would reach the output."""
    x = draw("select", 64)
    blocks = torch.tensor([0, 2, -1, -1], dtype=torch.int32).expand_as(x.blocks)
    before = run("select", route, replace(x, blocks=blocks))
    k, v = x.k.clone(), x.v.clone()
    k[:, 16:32] = v[:, 16:32] = float("nan")

    after = run("select", route, replace(x, k=k, v=v, blocks=blocks))

    assert torch.equal(before[:, 32:], after[:, 32:])  # earlier queries stand in block 1 or before


@pytest.mark.parametrize("T", [32, 33])
@pytest.mark.parametrize(("part", "route"), ALL_ROUTES)
def test_invisible_keys_weigh_nothing(part: str, route: str, T: int) -> None:
    """Keys of 1e30 after the query, and values that any weight at all would make visible."""
    x = draw(part, 63)
    before = run(part, route, x)
    rows = SMALL.compressed_length(T) if part == "compress" else T
    k, v = x.k.clone(), x.v.clone()
    k[:, rows:], v[:, rows:] = 1e30, 1e30

    after = run(part, route, replace(x, k=k, v=v))

    assert torch.equal(before[:, :T], after[:, :T])


@pytest.mark.parametrize("routes", [Routes(), Routes.reference()], ids=["eager", "reference"])
def test_attention_is_the_gated_sum_of_its_branches(routes: Routes) -> None:
    x = {part: draw(part, 61) for part in ("compress", "select", "window")}
    gates = normal(2, 61, 6, 3, seed=5).sigmoid()

    c, s, w = x.values()
    out = ops.attention(c.q, c.k, c.v, s.k, s.v, w.k, w.v, gates, config=SMALL, routes=routes)

    branches = [run(part, "reference", inputs) for part, inputs in x.items()]
    expected = sum(gates[..., i, None] * branch for i, branch in enumerate(branches))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


def test_autocast_does_not_reach_inside() -> None:
    """Under autocast a float32 score would silently become bfloat16, and select other blocks."""
    q, k, v = (normal(1, 61, H, 16, seed=H, dtype=torch.float32) for H in (6, 2, 3))
    v = v[:, :, :2]
    k_cmp = ops.compress_blocks(k, mean, config=SMALL)

    def everything() -> tuple[Tensor, ...]:
        blocks = ops.select_blocks(q, k_cmp, config=SMALL)
        return (
            blocks,
            ops.selected_attention(q, k, v, blocks, config=SMALL),
            ops.window_attention(q, k, v, window_size=8),
            ops.dense_attention(q, k, v),
        )

    outside = everything()
    with torch.autocast("cpu", torch.bfloat16):
        inside = everything()

    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
