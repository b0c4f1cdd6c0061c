"""A cache answers each token as one long prefill would have."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa.config import PRESETS, ModelConfig, NSAConfig, Routes
from nsa.model.attention import DenseAttention, NSAttention
from nsa.model.cache import DenseCache, LayerCache, _Window
from nsa.model.rotary import Rotation

TINY = PRESETS["tiny"]  # l = 8, d = 4, l' = 8, n = 4, w = 16
DENSE = replace(TINY, attention="dense")
T = 45


def layer_and_input(config: ModelConfig) -> tuple[NSAttention | DenseAttention, Tensor]:
    torch.manual_seed(0)
    layer = NSAttention(config) if config.attention == "nsa" else DenseAttention(config)
    return layer.double().requires_grad_(False), torch.randn(2, T, config.dim).double()


def new_cache(config: ModelConfig, capacity: int = T) -> LayerCache | DenseCache:
    return LayerCache(config.nsa, capacity) if config.attention == "nsa" else DenseCache(capacity)


def in_pieces(
    layer: NSAttention | DenseAttention, x: Tensor, sizes: list[int], capacity: int = T
) -> Tensor:
    cache = new_cache(layer.config, capacity)
    return torch.cat([layer(p, routes=Routes(), cache=cache) for p in x.split(sizes, 1)], 1)


@pytest.mark.parametrize("prefill", [0, 1, 3, 4, 7, 8, 9, 11, 12, 15, 16, 17, 32, 33, 44])
def test_prefill_then_decode_is_one_long_prefill(prefill: int) -> None:
    """Prefill lengths on both sides of d, l, l' and w; decoding crosses the rest."""
    layer, x = layer_and_input(TINY)
    whole = layer(x, routes=Routes())

    pieces = in_pieces(layer, x, [prefill] * bool(prefill) + [1] * (T - prefill))

    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "sizes", [[45], [5, 40], [20, 2, 23], [15, 1, 16, 13], [31, 3, 5, 6]], ids=str
)
def test_any_pieces_are_one_long_prefill(sizes: list[int]) -> None:
    """Pieces of more than one token: several queries at once behind a cache."""
    layer, x = layer_and_input(TINY)

    pieces = in_pieces(layer, x, sizes)

    torch.testing.assert_close(pieces, layer(x, routes=Routes()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sizes", [[45], [1] * 45, [7, 30, 8]], ids=["one", "tokens", "pieces"])
def test_dense_pieces_are_one_long_prefill(sizes: list[int]) -> None:
    layer, x = layer_and_input(DENSE)

    pieces = in_pieces(layer, x, sizes)

    torch.testing.assert_close(pieces, layer(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(replace(TINY.nsa, window_size=1), id="w=1"),
        pytest.param(replace(TINY.nsa, window_size=64), id="w=64"),
        pytest.param(replace(TINY.nsa, compress_stride=8), id="d=l"),
        pytest.param(replace(TINY.nsa, compress_stride=1), id="d=1"),
    ],
)
def test_extreme_sizes_decode_as_they_prefill(config: NSAConfig) -> None:
    """A window of one token, one longer than the text; blocks side by side, and at every token."""
    layer, x = layer_and_input(replace(TINY, nsa=config))

    pieces = in_pieces(layer, x, [10] + [1] * 35)

    torch.testing.assert_close(pieces, layer(x, routes=Routes()), rtol=1e-12, atol=1e-14)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Small layers of any shape: l and l' multiples of d, groups of any size, Dk != Dv."""
    stride, n_kv_heads = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    return replace(
        TINY,
        n_heads=n_kv_heads * draw(st.integers(1, 3)),
        n_kv_heads=n_kv_heads,
        head_dim_qk=2 * draw(st.integers(1, 4)),
        head_dim_v=draw(st.integers(1, 8)),
        nsa=NSAConfig(
            compress_block_size=stride * draw(st.integers(1, 4)),
            compress_stride=stride,
            select_block_size=stride * draw(st.integers(1, 4)),
            num_blocks=draw(st.integers(3, 6)),
            window_size=draw(st.integers(1, 20)),
            phi=draw(st.sampled_from(["mlp", "mean"])),
            gate=draw(st.sampled_from(["sigmoid", "softmax"])),
        ),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(config=models(), cuts=st.sets(st.integers(1, T - 1), max_size=6))
def test_any_sizes_in_any_pieces_are_one_long_prefill(config: ModelConfig, cuts: set[int]) -> None:
    layer, x = layer_and_input(config)

    pieces = in_pieces(layer, x, [b - a for a, b in pairwise([0, *sorted(cuts), T])])

    torch.testing.assert_close(pieces, layer(x, routes=Routes()), rtol=1e-11, atol=1e-13)


def test_float32_decodes_to_rounding() -> None:
    layer, x = layer_and_input(TINY)
    layer, x = layer.float(), x.float()

    pieces = in_pieces(layer, x, [10] + [1] * 35)

    torch.testing.assert_close(pieces, layer(x, routes=Routes()), rtol=0, atol=1e-6)


def test_token_by_token_prefill_fills_the_same_cache() -> None:
    layer, x = layer_and_input(TINY)
    cache = new_cache(TINY)
    first = layer(x[:, :20], routes=Routes(), prefill="token", cache=cache)
    second = layer(x[:, 20:], routes=Routes(), prefill="token", cache=cache)

    whole = layer(x, routes=Routes())

    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pieces", [[1] * 20, [3] * 7, [7, 1, 2, 1], [4, 5, 6], [1, 9, 1]], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_window_returns_what_the_new_tokens_see(size: int, pieces: list[int]) -> None:
    rows = torch.arange(sum(pieces)).view(1, -1, 1, 1)
    window, end = _Window(size, rows), 0
    for piece in rows.split(pieces, 1):
        start, end = end, end + piece.shape[1]

        seen = window.append(piece)

        assert torch.equal(seen, rows[:, max(0, start - (size - 1)) : end])


def test_decoding_keeps_its_storage() -> None:
    """After the prefill nothing is allocated that grows with the text."""
    layer, x = layer_and_input(TINY)
    cache = LayerCache(TINY.nsa, T)
    layer(x[:, :9], routes=Routes(), cache=cache)
    rows = (cache._k_cmp, cache._v_cmp, cache._k_sel, cache._v_sel, cache._k_win, cache._v_win)
    before = [r.buffer.data_ptr() for r in rows]

    layer(x[:, 9:], routes=Routes(), cache=cache)

    assert [r.buffer.data_ptr() for r in rows] == before
    assert cache._k_win.buffer.shape[1] == 2 * TINY.nsa.window_size
    tail = cache._tail[0]
    assert tail.shape[1] == T - TINY.nsa.compressed_length(T) * TINY.nsa.compress_stride
    assert tail.untyped_storage().nbytes() == tail.nbytes  # not a view that keeps x alive


def test_a_decoded_token_rarely_moves_the_window() -> None:
    rows = torch.arange(64).view(1, -1, 1, 1)
    window = _Window(16, rows)
    window.append(rows[:, :32])
    storage = window.buffer.untyped_storage().data_ptr()

    seen = [window.append(row) for row in rows[:, 32:].split(1, 1)]

    moved = [i for i, view in enumerate(seen) if view.untyped_storage().data_ptr() != storage]
    assert moved == [0, 17]


@pytest.mark.parametrize("config", [TINY, DENSE], ids=["nsa", "dense"])
@pytest.mark.parametrize("held", [3, 8, 15, 20, 31])
def test_a_cache_goes_back_to_its_mark(config: ModelConfig, held: int) -> None:
    """What is forgotten crosses block ends and a move of the window, and may differ each time."""
    layer, x = layer_and_input(config)
    whole = layer(x, routes=Routes())
    cache = new_cache(config, capacity=64)
    layer(x[:, :held], routes=Routes(), cache=cache)

    rewind = cache.mark()
    for forgotten in (33, 1):
        layer(x[:, :forgotten].neg(), routes=Routes(), cache=cache)
        rewind()
        assert cache.length == held

    after = layer(x[:, held:], routes=Routes(), cache=cache)
    torch.testing.assert_close(after, whole[:, held:], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("config", [TINY, DENSE], ids=["nsa", "dense"])
def test_what_a_cache_cannot_hold_is_refused(config: ModelConfig) -> None:
    layer, x = layer_and_input(config)
    cache = new_cache(config, capacity=10)
    layer(x[:, :8], routes=Routes(), cache=cache)

    with pytest.raises(ValueError, match="11 tokens do not fit a cache with capacity=10"):
        layer(x[:, 8:11], routes=Routes(), cache=cache)
    with pytest.raises(ValueError, match="k holds 1 sequences; this cache holds 2"):
        layer(x[:1, 8:9], routes=Routes(), cache=cache)
    with pytest.raises(ValueError, match="k requires a gradient"):
        layer.requires_grad_()(x[:, 8:9], routes=Routes(), cache=cache)
    with pytest.raises(ValueError, match="cu_seqlens with a cache"):
        layer(
            x[:1, 8:9],
            routes=Routes(),
            cache=cache,
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        )
    assert cache.length == 8


def test_compressed_keys_are_rotated_where_their_blocks_end() -> None:
    rotation = Rotation.of(TINY, 20, like=torch.empty(0).double(), start=9)
    all_turns = Rotation.of(TINY, 29, like=torch.empty(0).double())

    assert torch.equal(rotation.tokens, all_turns.tokens[:, 9:])
    assert torch.equal(rotation.blocks, all_turns.tokens[:, [11, 15, 19, 23, 27]])
