"""The selected backward pass in Gluon: on a GPU of 9.0 itself, else on `warpgroups`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nsa.kernels.common.device import Architecture, as_architecture
from nsa.kernels.selected import backward
from nsa.kernels.selected import forward as selected
from nsa.kernels.selected.backward import selected_backward
from nsa.kernels.selected.forward import selected_forward
from nsa.kernels.tests.aot_cases import Shape, _selected_backward
from nsa.kernels.tests.test_selected import (
    assert_as_good_as_the_definition,
    by_kernels,
    draw,
    gradient,
    strided,
)
from nsa.kernels.tests.where import CALLS_KERNELS, TRITON
from nsa.tests.operator_inputs import normal

pytestmark = [*CALLS_KERNELS, pytest.mark.usefixtures("emulated")]
places = pytest.mark.parametrize(("device", "dtype"), TRITON)
HEADS: dict[str, Any] = {"HQ": 8, "Dk": 192, "Dv": 128, "block_size": 64}


@places
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"T": 66}, id="more-tiles-than-slots"),
        pytest.param({"T": 45, "Dk": 128}, id="more-tiles-than-slots-of-smaller-heads"),
        pytest.param({"T": 5, "HQ": 32, "HKV": 2, "B": 2}, id="two-groups-of-16-in-a-batch"),
        pytest.param({"T": 3, "HQ": 64}, id="a-group-of-64"),
        pytest.param({"T": 1}, id="one-token"),
        pytest.param({"T": 12, "q_start": 70}, id="a-later-piece"),
        pytest.param({"T": 27, "block_size": 24}, id="block-of-24"),
        pytest.param({"T": 9, "block_size": 100, "q_start": 120}, id="block-in-two-uneven-parts"),
        pytest.param({"documents": (5, 1, 18, 0, 3), "block_size": 16}, id="documents"),
    ],
)
def test_error_is_no_worse_than_that_of_the_definition(
    shape: dict[str, Any], device: str, dtype: torch.dtype
) -> None:
    x = draw(**HEADS | shape, device=device, dtype=dtype)

    assert_as_good_as_the_definition(x, by_kernels(x))


@places
@pytest.mark.parametrize("deterministic", [False, True])
def test_chunks_of_a_batch_join_to_the_whole(
    deterministic: bool, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected, "SCRATCH_BYTES", 1)
    x = draw(**HEADS | {"T": 9, "B": 2, "block_size": 16}, device=device, dtype=dtype)

    got = by_kernels(x, deterministic=deterministic)

    assert_as_good_as_the_definition(x, got)
    if deterministic:
        again = by_kernels(x, deterministic=True)
        assert all(torch.equal(got[name], again[name]) for name in got)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")  # then masked
@places
def test_keys_of_other_blocks_are_not_read(device: str, dtype: torch.dtype) -> None:
    """Not even where a block has fewer keys than a tile: those would score 0, others far less."""
    x = draw(**HEADS | {"T": 32, "block_size": 8}, device=device, dtype=dtype)
    blocks = torch.tensor([2, -1, 0], dtype=torch.int32, device=device).expand_as(x.blocks)
    k, v = 4 * x.k.abs(), x.v.clone()
    k[:, 8:16] = v[:, 8:16] = float("nan")

    got = by_kernels(replace(x, q=-4 * x.q.abs(), k=k, v=v, blocks=blocks))

    assert all(g.isfinite().all() for g in got.values())


@places
def test_it_is_its_twin_with_a_gate_and_strides(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw(**HEADS | {"T": 19}, device=device, dtype=dtype)
    o, lse, index, _ = selected_forward(x.q, x.k, x.v, x.blocks, x.at)
    do = gradient(x)
    delta = torch.stack([(do.float() * o.float()).sum(-1)] * 3, -1)[..., 1]
    gate = normal(*x.q.shape[:3], 3, seed=7, device=device, dtype=dtype).sigmoid()[..., 1]
    do, q, k, v = map(strided, (do, x.q, x.k, x.v))
    given = (do, q, k, v, strided(lse[..., None])[..., 0], delta, index, x.at)

    got = selected_backward(*given, gate=gate)
    monkeypatch.setattr(backward, "hopper_serves", lambda *_: False)
    expected = selected_backward(*given, gate=gate)

    bound = 4 * torch.finfo(dtype).eps  # shares of dq and their sum are rounded
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=bound, rtol=bound)


@pytest.mark.parametrize("device", ["meta"])
@pytest.mark.parametrize(
    ("arch", "G", "D", "DV", "serves"),
    [
        ("sm_90", 8, 192, 128, True),
        ("sm_90", 64, 128, 128, True),
        ("sm_90", 4, 192, 128, False),
        ("sm_90", 24, 192, 128, False),
        ("sm_90", 16, 64, 64, False),
        ("sm_80", 16, 192, 128, False),
    ],
)
def test_it_serves_groups_of_whole_panels(
    arch: Architecture, G: int, D: int, DV: int, serves: bool, device: str,
    launched: dict[str, bool],
) -> None:  # fmt: skip
    with as_architecture(arch):
        _selected_backward()(Shape(name="", HQ=2 * G, HKV=2, Dk=D, Dv=DV), 256)

    assert launched["_backward_kernel"] == serves
