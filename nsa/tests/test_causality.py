"""Nothing before a token depends on it: bit for bit, on every route, beyond the window."""

import pytest
import torch
from torch import Tensor

from nsa import ops
from nsa.config import Routes
from nsa.routes import eager
from nsa.tests.operator_inputs import DEVICES, PORTABLE, SMALL, draw, mean, normal, run

T = 90
assert SMALL.window_size < T

CHOICES = [
    pytest.param(Routes(**{part: route}), id=f"{part}-{route}")
    for part, routes in {**PORTABLE, "scores": ["eager"]}.items()
    if part != "dense"
    for route in routes
] + [pytest.param(Routes.reference(), id="reference")]


def everything(x: dict[str, Tensor], routes: Routes) -> tuple[Tensor, Tensor]:
    """Selection and output of the whole operator on raw tokens."""
    k_cmp, v_cmp = (ops.compress_blocks(x[n], mean, config=SMALL) for n in ("k_cmp", "v_cmp"))
    blocks = ops.select_blocks(x["q"], k_cmp, config=SMALL, route=routes.scores)
    kv = (k_cmp, v_cmp, x["k_sel"], x["v_sel"], x["k_win"], x["v_win"])
    return blocks, ops.attention(x["q"], *kv, x["gates"], config=SMALL, routes=routes)


def tokens(seed: int, device: str) -> dict[str, Tensor]:
    heads = {"q": (6, 16), "gates": (6, 3)} | {
        f"{kind}_{branch}": (2, D)
        for kind, D in (("k", 16), ("v", 8))
        for branch in ("cmp", "sel", "win")
    }
    return {
        name: normal(2, T, *size, seed=seed + i, device=device, dtype=torch.float32)
        for i, (name, size) in enumerate(heads.items())
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [1 << 27, 1 << 12], ids=["whole", "chunked"])
@pytest.mark.parametrize("routes", CHOICES)
def test_later_tokens_change_nothing_before_them(
    routes: Routes, chunk: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(eager, "WINDOW_TILE", 16)
    before, other = tokens(0, device), tokens(100, device)
    blocks, out = everything(before, routes)

    for s in (1, 8, 33, 64, T - 1):
        after = {name: torch.cat([x[:, :s], other[name][:, s:]], 1) for name, x in before.items()}
        changed_blocks, changed_out = everything(after, routes)

        assert torch.equal(blocks[:, :s], changed_blocks[:, :s])
        assert torch.equal(out[:, :s], changed_out[:, :s])
        assert not torch.equal(out[:, s:], changed_out[:, s:])


@pytest.mark.parametrize("route", ["reference", *PORTABLE["dense"]])
def test_dense_attention_is_causal(route: str) -> None:
    x, other = (draw("dense", T, dtype=torch.float32, Dk=D) for D in (16, 24))
    s = 33
    out = run("dense", route, x)

    x.k[:, s:], x.v[:, s:] = other.k[:, s:, :, :16], other.v[:, s:] + 1
    changed = run("dense", route, x)

    assert torch.equal(out[:, :s], changed[:, :s])
    assert not torch.equal(out[:, s:], changed[:, s:])
