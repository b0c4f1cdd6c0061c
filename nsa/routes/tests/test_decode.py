"""Decoding, one query per sequence: every route against the definition, and the kernels' edges."""

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import reference
from nsa.config import NSAConfig, Positions
from nsa.errors import Unsupported
from nsa.kernels.common import device
from nsa.kernels.decode import attend as kernels
from nsa.kernels.decode import scores as decode_scores
from nsa.kernels.tests.where import CALLS_KERNELS
from nsa.ops import DECODE_ROUTES, decode_attention
from nsa.tests.operator_inputs import DEVICES, SMALL, mean, normal

pytestmark = CALLS_KERNELS
CAPACITY = 96
ODD = NSAConfig(
    compress_block_size=9, compress_stride=3, select_block_size=12, num_blocks=5, window_size=7
)
"""Nothing here is a power of two, and three compressed blocks overlap."""
LARGE_BLOCKS = NSAConfig(
    compress_block_size=8, compress_stride=2, select_block_size=96, num_blocks=3, window_size=70
)
"""A select block is more than one tile of keys, and the window is too."""


@dataclass(frozen=True, slots=True)
class Cache:
    """What decode_attention reads, in the order of its arguments."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor
    lengths: Tensor

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in fields(self)]

    def to(self, dtype: torch.dtype) -> "Cache":
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return Cache(**{n: x if n == "lengths" else x.to(dtype) for n, x in held.items()})


def draw(
    lengths: list[int],
    *,
    HQ: int = 6,
    HKV: int = 2,
    Dk: int = 16,
    Dv: int = 8,
    config: NSAConfig = SMALL,
    capacity: int = CAPACITY,
    ring: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float16,
) -> Cache:
    """Caches of Gaussian keys and values, NaN in every row that a sequence does not use."""
    B = len(lengths)
    ring = min(config.window_size, capacity) if ring is None else ring
    full = [
        normal(B, capacity, H, D, seed=seed, device=device, dtype=dtype)
        for seed, (H, D) in enumerate([(HKV, Dk), (HKV, Dv)] * 3)
    ]
    k_cmp, v_cmp = (reference.compress_blocks(x, mean, config=config) for x in full[:2])
    k_sel, v_sel = (x.clone() for x in full[2:4])
    k_win, v_win = (x.new_full((B, ring, *x.shape[2:]), torch.nan) for x in full[4:])
    for b, length in enumerate(lengths):
        for x in (k_cmp, v_cmp):
            x[b, config.compressed_length(length) :] = torch.nan
        for x in (k_sel, v_sel):
            x[b, length:] = torch.nan
        for position in range(max(0, length - config.window_size), length):
            k_win[b, position % ring] = full[4][b, position]
            v_win[b, position % ring] = full[5][b, position]
    return Cache(
        q=normal(B, 1, HQ, Dk, seed=6, device=device, dtype=dtype),
        k_cmp=k_cmp,
        v_cmp=v_cmp,
        k_sel=k_sel,
        v_sel=v_sel,
        k_win=k_win,
        v_win=v_win,
        gates=normal(B, 1, HQ, 3, seed=7, device=device, dtype=dtype).sigmoid(),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def run(route: str, x: Cache, config: NSAConfig = SMALL) -> tuple[Tensor, Tensor]:
    return decode_attention(*x.tensors(), config=config, route=route)


def assert_as_defined(x: Cache, config: NSAConfig = SMALL, route: str = "triton") -> None:
    """Outputs at most twice as far from float64 as the definition's; selections equal."""
    exact, blocks = run("reference", x.to(torch.float64), config)
    definition, _ = run("reference", x, config)
    out, chosen = run(route, x, config)
    assert torch.equal(chosen, blocks)
    assert out.dtype == x.q.dtype
    assert out.shape == exact.shape
    allowed = 2 * (definition - exact).norm() + torch.finfo(x.q.dtype).eps * exact.norm()
    assert (out - exact).norm() <= allowed


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few tokens are several tiles, chunks and rounds of candidates."""
    monkeypatch.setattr(kernels, "KEYS", 16)
    monkeypatch.setattr(kernels, "WEIGHED", 4)
    monkeypatch.setattr(kernels, "MERGED", 2)
    monkeypatch.setattr(kernels, "MERGED_CROWDED", 2)
    monkeypatch.setattr(decode_scores, "CHUNK", 4)
    monkeypatch.setattr(decode_scores, "SPLITS", 2)


LENGTHS = [1, 7, 8, 12, 16, 17, 21, 22, 64, 65, 96]
"""Around l, l + d, l', w, their multiples, and the capacity."""


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_of_different_lengths(device: str) -> None:
    assert_as_defined(draw(LENGTHS, HQ=3, HKV=1, device=device))


@pytest.mark.parametrize("programs", [1, 10_000])
def test_pieces_join_to_the_whole(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long piece, and as many as there are tiles."""
    monkeypatch.setattr(kernels, "COMPRESS_WARPS", programs)
    monkeypatch.setattr(kernels, "ATTEND_PROGRAMS", programs)

    assert_as_defined(draw([1, 8, 40, 96]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("Dv", [8, 256])
def test_programs_of_few_warps(Dv: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a large batch gets, heads small and large."""
    monkeypatch.setattr(kernels, "CROWDED", 1)

    assert_as_defined(draw([1, 17, 96], Dv=Dv, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"HQ": 2, "HKV": 2, "Dk": 8, "Dv": 24}, id="group-of-1-and-wider-values"),
        pytest.param({"HQ": 6, "HKV": 1, "Dk": 24, "Dv": 16}, id="group-of-6-and-key-in-two"),
        pytest.param({"HQ": 20, "HKV": 1, "Dk": 48, "Dv": 40}, id="group-of-20"),
        pytest.param({"HQ": 64, "HKV": 1, "Dk": 16, "Dv": 16}, id="group-of-64"),
    ],
)
def test_head_sizes_and_groups(shape: dict[str, Any], device: str) -> None:
    assert_as_defined(draw([5, 61], **shape, device=device))


@pytest.mark.parametrize(
    ("config", "ring"),
    [
        pytest.param(ODD, None, id="odd-ring-of-w"),
        pytest.param(ODD, 77, id="odd-larger-ring"),
        pytest.param(ODD, CAPACITY, id="odd-all-rows"),
        pytest.param(LARGE_BLOCKS, None, id="large-blocks"),
    ],
)
def test_block_sizes_and_rings(config: NSAConfig, ring: int | None) -> None:
    assert_as_defined(draw([1, 13, 96], config=config, ring=ring), config)


def test_tiles_as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    assert_as_defined(draw([9, 96]))


def test_more_blocks_than_a_chunk_of_candidates_holds() -> None:
    config = replace(SMALL, select_block_size=4, num_blocks=70, window_size=4)

    assert_as_defined(draw([30, 330], config=config, capacity=340, HQ=2, HKV=1), config)


def test_a_capacity_without_a_compressed_block() -> None:
    assert_as_defined(draw([1, 5], capacity=5))


@pytest.mark.parametrize("route", ["reference", "eager"])
def test_routes_by_sequence_agree(route: str) -> None:
    x = draw([1, 7, 8, 22, 65, 96], dtype=torch.float32)

    assert_as_defined(x, route=route)


def test_decoding_is_the_last_row_of_a_prefill() -> None:
    """An oracle that does not know of caches: the definition over all tokens at once."""
    lengths = [9, 33, 80]
    x = draw(lengths, ring=CAPACITY, dtype=torch.float64)

    out, blocks = run("eager", x)

    for b, n in enumerate(lengths):
        one = slice(b, b + 1)
        q = normal(1, n, 6, 16, seed=11)
        q[:, -1] = x.q[b]
        k_cmp, v_cmp = (c[one, : SMALL.compressed_length(n)] for c in (x.k_cmp, x.v_cmp))
        k_sel, v_sel, k_win, v_win = (
            c[one, :n].nan_to_num() for c in (x.k_sel, x.v_sel, x.k_win, x.v_win)
        )
        gates = x.gates[one].expand(-1, n, -1, -1)
        at = Positions.of(q, config=SMALL)
        whole = reference.attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, at)
        torch.testing.assert_close(out[b, 0], whole[0, -1], atol=1e-12, rtol=0)
        chosen = reference.select_blocks(q, k_cmp, at)
        assert torch.equal(blocks[b, 0], chosen[0, -1])


def test_ties_go_to_the_lower_block() -> None:
    """Equal keys everywhere: all blocks but the last share one importance."""
    x = draw([96])
    x.k_cmp.fill_(0.5)

    _, chosen = run("triton", x)
    _, blocks = run("reference", x)

    assert torch.equal(chosen, blocks)


def test_strides_are_heeded() -> None:
    x = draw([8, 96])

    def strange(t: Tensor) -> Tensor:
        return t.transpose(0, 1).contiguous().transpose(0, 1)

    changed = {f.name: strange(getattr(x, f.name)) for f in fields(x) if f.name != "lengths"}
    out, chosen = run("triton", replace(x, **changed))
    expected, blocks = run("triton", x)

    assert torch.equal(out, expected)
    assert torch.equal(chosen, blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("device", DEVICES[1:])
def test_one_graph_serves_every_length(device: str) -> None:
    x = draw([1, 96], device=device)
    others = torch.tensor([50, 7], dtype=torch.int32, device=device)
    full = draw([96, 96], device=device)
    x = replace(full, lengths=x.lengths)
    run("triton", x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, blocks = run("triton", x)
    for lengths in (others, torch.flip(others, [0]), torch.full_like(others, 1)):
        x.lengths.copy_(lengths)
        graph.replay()
        expected, chosen = run("triton", x)
        assert torch.equal(out, expected)
        assert torch.equal(blocks, chosen)


def test_limits_are_named() -> None:
    with pytest.raises(Unsupported, match="float16 or bfloat16, but these are float32"):
        run("triton", draw([5], dtype=torch.float32))
    with pytest.raises(Unsupported, match=f"at most {device.MAX_HEAD_DIM}"):
        run("triton", draw([5], Dk=258, HQ=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.ones(2, dtype=torch.int64)}, "lengths is torch.int64"),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, r"lengths is \[3\], but must be \[2\]"),
        ({"q": torch.zeros(2, 2, 6, 16)}, r"must be \[B, 1, HQ, Dk\]"),
        ({"gates": torch.zeros(2, 1, 6, 2)}, "gates is"),
        ({"k_cmp": torch.zeros(2, 3, 2, 16), "v_cmp": torch.zeros(2, 3, 2, 8)}, "at least 23"),
        ({"k_win": torch.zeros(2, 20, 2, 16), "v_win": torch.zeros(2, 20, 2, 8)}, "at least 21"),
        ({"v_win": torch.zeros(2, 21, 2, 9)}, "as sel"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    x = draw([5, 7], dtype=torch.float32)

    with pytest.raises(ValueError, match=message):
        run("reference", replace(x, **change))


def test_an_unknown_route_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        run("tritn", draw([5]))
    assert DECODE_ROUTES == ("reference", "eager", "triton")
