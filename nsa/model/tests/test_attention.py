"""The attention layers: their parts, their promises, and what routes may not change."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nsa import ops
from nsa.config import BRANCHES, PRESETS, ModelConfig, Routes
from nsa.flags import Prefill
from nsa.model.attention import DenseAttention, Gate, MeanPhi, NSAttention, Phi
from nsa.model.cache import Heads, KeyValues, LayerCache
from nsa.model.rotary import Rotation, rotate

TINY = PRESETS["tiny"]  # l = 8, d = 4, l' = 8, n = 4, w = 16
DENSE = replace(TINY, attention="dense")
T = 45
ANY_ROUTE = [
    pytest.param(Routes(), id="default"),
    pytest.param(Routes.reference(), id="reference"),
    *(pytest.param(Routes(select=s), id=s) for s in ("loop", "masked", "packed", "varlen")),
]


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def variant(**sizes: object) -> ModelConfig:
    """The tiny model with other NSA settings."""
    return replace(TINY, nsa=replace(TINY.nsa, **sizes))  # type: ignore[arg-type]


def nsa() -> NSAttention:
    return NSAttention(TINY).double()


def layer_of(config: ModelConfig) -> NSAttention | DenseAttention:
    layer = NSAttention(config) if config.attention == "nsa" else DenseAttention(config)
    return layer.double()


def features(batch_size: int = 2, length: int = T) -> Tensor:
    return torch.randn(batch_size, length, TINY.dim, dtype=torch.float64)


def parts(layer: NSAttention, x: Tensor) -> tuple[Heads, KeyValues]:
    """What the layer makes of its tokens before they attend."""
    rotation = Rotation.of(TINY, T, like=x)
    heads = layer.project(x, rotation.tokens)
    return heads, layer._key_values(heads, Routes(), rotation, None, None, compile_parts=False)


def gradients(layer: torch.nn.Module, x: Tensor, **options: object) -> dict[str, Tensor]:
    """Output and every gradient of a random functional of it."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x, **options)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    found = {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad}
    return {"y": y.detach()} | {name: g.clone() for name, g in found.items() if g is not None}


# --- parts -------------------------------------------------------------------------------


def test_phi_is_an_mlp_over_the_block_and_its_positions() -> None:
    phi = Phi(block_size=8, dim=6).double()
    blocks = torch.randn(2, 3, 8, 4, 6, dtype=torch.float64)

    out = phi(blocks)

    one = (blocks[1, 2, :, 3] + phi.position).flatten()  # as eq. 7 has it, for one head
    torch.testing.assert_close(out[1, 2, 3], phi.out(F.silu(phi.mix(one))))
    assert out.shape == (2, 3, 4, 6)


def test_phi_knows_the_order_of_its_tokens_and_the_mean_does_not() -> None:
    blocks = torch.randn(1, 1, 8, 1, 6)

    assert not torch.allclose(Phi(8, 6)(blocks), Phi(8, 6)(blocks.flip(2)))
    torch.testing.assert_close(MeanPhi()(blocks), MeanPhi()(blocks.flip(2)))
    assert not list(MeanPhi().parameters())


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_gates_weigh_each_head_and_branch(kind: str) -> None:
    gates = Gate(variant(gate=kind))(torch.randn(2, 5, TINY.dim))

    assert gates.shape == (2, 5, TINY.n_heads, 3)
    assert ((gates > 0) & (gates < 1)).all()
    sums = gates.sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums)) == (kind == "softmax")


def test_rotation_keeps_lengths_and_depends_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, T, 4, 16, dtype=torch.float64)
    near = Rotation.of(TINY, T, like=q).tokens
    far = Rotation.of(TINY, T, like=q, start=1000).tokens

    dots = [
        torch.einsum("bthd,bshd->bhts", rotate(q, turns), rotate(k, turns)) for turns in (near, far)
    ]

    torch.testing.assert_close(dots[0], dots[1])
    torch.testing.assert_close(rotate(q, near).norm(dim=-1), q.norm(dim=-1))
    assert not torch.allclose(rotate(q, near), q)


def test_heads_turn_alike() -> None:
    """Rotary is applied per head: a head's number must not enter its angles."""
    x = torch.randn(1, T, 1, 16).expand(1, T, 4, 16)

    turned = rotate(x, Rotation.of(TINY, T, like=x).tokens)

    assert torch.equal(turned, turned[:, :, :1].expand_as(turned))


def test_long_positions_lose_nothing_to_float32() -> None:
    start = 10_000_000
    exact = Rotation.of(TINY, 4, like=torch.empty(0).double(), start=start)

    single = Rotation.of(TINY, 4, like=torch.empty(0), start=start)

    assert single.tokens.dtype == torch.float32
    torch.testing.assert_close(single.tokens, exact.tokens.float())


def test_a_turn_multiplies_a_pair_as_a_complex_number() -> None:
    """The definition, from the paper's own notation: neighbouring channels are one number."""
    x = torch.randn(2, T, 3, 16, dtype=torch.float64)
    pair, position = torch.arange(8).double(), torch.arange(T).double()
    angles = position[:, None] * TINY.rope_theta ** (-pair / 8)
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)))

    expected = torch.view_as_real(numbers * torch.exp(1j * angles)[:, None]).flatten(-2)

    torch.testing.assert_close(rotate(x, Rotation.of(TINY, T, like=x).tokens), expected)


# --- the layer ---------------------------------------------------------------------------


def test_output_is_the_gated_sum_of_ops_attention() -> None:
    """The layer's own composition against the operator's."""
    layer, x = nsa(), features()
    heads, kv = parts(layer, x)

    whole = ops.attention(
        heads.q,
        kv.k_cmp,
        kv.v_cmp,
        kv.k_sel,
        kv.v_sel,
        kv.k_win,
        kv.v_win,
        heads.gates,
        config=TINY.nsa,
        routes=Routes(),
    )

    torch.testing.assert_close(layer(x, routes=Routes()), layer.out(whole.flatten(-2)))


def test_each_branch_has_keys_and_values_of_its_own() -> None:
    """No output row of the projection may feed two branches."""
    layer, x = nsa(), features()
    _, kv = parts(layer, x)
    used = []
    for name in ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win"):
        (grad,) = torch.autograd.grad(getattr(kv, name).sum(), layer.qkv.weight, retain_graph=True)
        used.append(grad.ne(0).any(-1))

    rows = torch.stack(used).sum(0)

    queries = TINY.n_heads * TINY.head_dim_qk
    assert rows[:queries].max() == 0
    assert (rows[queries:] == 1).all()


@pytest.mark.parametrize("config", [TINY, variant(phi="mean"), DENSE], ids=["mlp", "mean", "dense"])
def test_shifting_all_positions_changes_nothing(config: ModelConfig) -> None:
    """Every branch sees relative positions only, the compressed keys included."""
    layer, x = layer_of(config), features()
    far = Rotation.of(config, T, like=x, start=1000)
    # A shift by a multiple of d completes blocks at the same tokens; the first l/d - 1 of them
    # began before the shift's first token and are not here.
    far = replace(far, blocks=far.blocks[:, -config.nsa.compressed_length(T) :])

    here, there = (layer(x, routes=Routes(), rotation=r) for r in (None, far))

    torch.testing.assert_close(here, there)


@pytest.mark.parametrize("config", [TINY, DENSE], ids=["nsa", "dense"])
def test_order_matters(config: ModelConfig) -> None:
    """The guard of the test above: positions are seen at all."""
    layer, x = layer_of(config), features()
    still = Rotation.of(config, T, like=x)
    no_turn = torch.tensor([1.0, 0.0], dtype=torch.float64).view(2, 1, 1)  # cosine, sine
    still = replace(
        still, tokens=no_turn.expand_as(still.tokens), blocks=no_turn.expand_as(still.blocks)
    )

    assert not torch.allclose(layer(x, routes=Routes()), layer(x, routes=Routes(), rotation=still))


@pytest.mark.parametrize("routes", ANY_ROUTE)
@pytest.mark.parametrize("prefill", ["batched", "token"])
def test_causality_is_exact(routes: Routes, prefill: Prefill) -> None:
    layer, x = nsa(), features(1)
    changed = torch.cat([x[:, :30], features(1, T - 30)], 1)

    before, after = (layer(z, routes=routes, prefill=prefill) for z in (x, changed))

    assert torch.equal(before[:, :30], after[:, :30])
    assert not torch.allclose(before[:, 30:], after[:, 30:])


@pytest.mark.parametrize("routes", ANY_ROUTE[1:])
def test_routes_agree_in_output_and_gradients(routes: Routes) -> None:
    layer, x = nsa(), features()

    torch.testing.assert_close(
        gradients(layer, x, routes=routes), gradients(layer, x, routes=Routes())
    )


@pytest.mark.parametrize("prefill", ["batched", "token"])
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("on", [["window"], ["select"], ["select", "window"], ["compress"]])
def test_a_branch_that_is_off_is_a_gate_of_zero(on: list[str], gate: str, prefill: Prefill) -> None:
    """And phi runs only for what is read: values by the compress branch, keys by the scores too."""
    layer, x = NSAttention(variant(gate=gate)).double(), features()
    ran: list[str] = []
    for name, phi in (("k", layer.phi_k), ("v", layer.phi_v)):
        phi.register_forward_hook(lambda *_, name=name: ran.append(name))

    found = gradients(layer, x, routes=Routes.reference(on), prefill=prefill)

    assert ran == {"select": ["k"], "compress": ["k", "v"]}.get(on[0], [])
    weights = torch.tensor([float(branch in on) for branch in BRANCHES])
    layer.gate.register_forward_hook(lambda _, __, gates: gates * weights)
    expected = gradients(layer, x, routes=Routes(), prefill=prefill)
    assert all(not expected.pop(name).any() for name in expected.keys() - found.keys())
    torch.testing.assert_close(found, expected)


def test_a_cache_holds_what_every_branch_reads() -> None:
    layer, x = nsa(), features()
    with torch.no_grad():
        whole = layer(x, routes=Routes(compress="off"))
        cache = LayerCache(TINY.nsa, T)
        pieces = [layer(p, routes=Routes(compress="off"), cache=cache) for p in x.split(20, 1)]

    torch.testing.assert_close(torch.cat(pieces, 1), whole)


@pytest.mark.parametrize("length", [1, 4, 7, 8, 17, T])
@pytest.mark.parametrize(
    "config", [TINY, variant(phi="mean", gate="softmax"), DENSE], ids=["nsa", "ablations", "dense"]
)
def test_token_by_token_is_batched(config: ModelConfig, length: int) -> None:
    layer, x = layer_of(config), features(2, length)

    slow = gradients(layer, x, routes=Routes(), prefill="token")

    fast = gradients(layer, x, routes=Routes())
    assert slow.keys() == fast.keys()
    torch.testing.assert_close(slow, fast)


def test_odd_heads_and_groups_compute() -> None:
    """G = 3, one KV head, an odd Dv: nothing may rely on powers of two."""
    config = replace(TINY, dim=30, n_heads=3, n_kv_heads=1, head_dim_qk=6, head_dim_v=5)
    layer = NSAttention(config).double()
    x = torch.randn(2, T, 30, dtype=torch.float64)

    found, expected = (gradients(layer, x, routes=r) for r in (Routes(), Routes.reference()))

    torch.testing.assert_close(found, expected)


def test_every_parameter_learns() -> None:
    """All branches reach the loss: a projection that nothing reads would have no gradient."""
    layer = nsa()

    found = gradients(layer, features(), routes=Routes())

    for name, _ in layer.named_parameters():
        assert found[name].abs().max() > 0, name


@pytest.mark.parametrize("prefill", ["batched", "token"])
@pytest.mark.parametrize("config", [TINY, DENSE], ids=["nsa", "dense"])
def test_packed_documents_are_the_documents_alone(config: ModelConfig, prefill: Prefill) -> None:
    layer, x = layer_of(config), features(1)
    bounds = torch.tensor([0, 3, 11, 12, 40, T], dtype=torch.int32)

    packed = layer(x, routes=Routes(), prefill=prefill, cu_seqlens=bounds)

    alone = [layer(document, routes=Routes()) for document in x.split([3, 8, 1, 28, 5], 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


def test_documents_begin_at_position_0() -> None:
    bounds = torch.tensor([0, 3, 20, 29], dtype=torch.int32)
    alone = [Rotation.of(TINY, n, like=torch.empty(0)) for n in (3, 17, 9)]

    packed = Rotation.of(TINY, 29, like=torch.empty(0), cu_seqlens=bounds)

    assert torch.equal(packed.tokens, torch.cat([r.tokens for r in alone], 1))
    assert torch.equal(packed.blocks, torch.cat([r.blocks for r in alone], 1))


def test_unknown_prefill_is_refused() -> None:
    with pytest.raises(ValueError, match="prefill='serial' is neither 'batched' nor 'token'"):
        nsa()(features(), routes=Routes(), prefill="serial")


def test_dense_is_torchs_attention() -> None:
    """A second opinion on the whole dense layer but its rotary."""
    layer, x = DenseAttention(DENSE).double(), features()
    q, k, v = layer.qkv(x).split([4 * 16, 2 * 16, 2 * 8], -1)
    turns = Rotation.of(DENSE, T, like=x).tokens
    q, k = (rotate(y.unflatten(-1, (-1, 16)), turns).transpose(1, 2) for y in (q, k))
    v = v.unflatten(-1, (-1, 8)).transpose(1, 2)
    k, v = (y.repeat_interleave(2, 1) for y in (k, v))

    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.testing.assert_close(layer(x), layer.out(out.transpose(1, 2).flatten(-2)))


# --- what a forward leaves behind --------------------------------------------------------


@pytest.mark.parametrize("prefill", ["batched", "token"])
def test_aux_stats_tell_gates_and_blocks(prefill: Prefill) -> None:
    layer, x = nsa(), features(2, 24)
    assert layer.aux_stats() == {}

    layer(x, routes=Routes(), prefill=prefill)

    stats = layer.aux_stats()
    torch.testing.assert_close(stats["gate_mean"], layer.gate(x).float().mean((0, 1, 2)))
    assert stats["selected_blocks"].item() == 2.0  # 8 queries each see 1, 2 and 3 blocks
    assert not stats["gate_mean"].requires_grad


def test_aux_stats_can_be_left_out() -> None:
    layer = NSAttention(TINY, aux_stats=False)

    layer(torch.randn(1, 9, TINY.dim), routes=Routes())

    assert layer.aux_stats() == {}


def test_a_profile_shows_the_branches() -> None:
    layer, x = nsa(), features()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        layer(x, routes=Routes())

    names = {event.key for event in seen.key_averages()}
    assert names >= {f"nsa.{part}" for part in ("compress", "scores", "select", "window", "gate")}


def test_autocast_changes_projections_and_not_the_selection_rule() -> None:
    """Inside the operator float32 stays float32 where the mathematics asks for it."""
    layer = NSAttention(TINY)
    x = torch.randn(2, T, TINY.dim)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x, routes=Routes())

    exact = layer(x, routes=Routes())
    assert low.dtype == torch.bfloat16
    assert (low - exact).abs().max() < 0.05 * exact.abs().max()
