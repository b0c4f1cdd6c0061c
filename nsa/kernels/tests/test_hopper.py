"""The Gluon kernels against the definition: on a GPU of 9.0 themselves, else on `warpgroups`."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.kernels.banded.backward import banded_backward
from nsa.kernels.banded.band import Band
from nsa.kernels.banded.forward import banded_forward
from nsa.kernels.common import hopper
from nsa.kernels.common.device import Architecture, as_architecture
from nsa.kernels.tests.test_operator import assert_whole_is_as_defined, tokens
from nsa.kernels.tests.test_routes import assert_none_but_rounding
from nsa.kernels.tests.where import CALLS_KERNELS, TRITON
from nsa.routes.tests.test_routes import excess_error
from nsa.tests.operator_inputs import SMALL, draw, run

pytestmark = [*CALLS_KERNELS, pytest.mark.usefixtures("emulated")]

CONFIG = replace(SMALL, compress_block_size=4, compress_stride=2, window_size=100)
"""So that a band has several tiles of keys."""
HEADS: dict[str, Any] = {"HQ": 2, "HKV": 1, "Dv": 128}
parts = pytest.mark.parametrize("part", ["compress", "window", "dense"])
places = pytest.mark.parametrize(("device", "dtype"), TRITON)


@pytest.mark.parametrize(
    ("Dk", "documents"),
    [
        pytest.param(128, (), id="128-batch"),
        pytest.param(192, (), id="192-batch"),
        pytest.param(192, (5, 35, 1, 260), id="192-documents"),
    ],
)
@parts
@places
def test_error_is_no_worse_than_that_of_the_definition(
    device: str, dtype: torch.dtype, Dk: int, part: str, documents: tuple[int, ...]
) -> None:
    where: dict[str, Any] = {"config": CONFIG, "documents": documents}
    x = draw(part, 301, **HEADS, Dk=Dk, **where, device=device, dtype=dtype)

    assert_none_but_rounding(excess_error(part, "triton", x, CONFIG))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("Dk", [128, 192])
@places
def test_queries_split_among_programs(device: str, dtype: torch.dtype, Dk: int) -> None:
    x = draw("compress", 201, **HEADS, Dk=Dk, config=CONFIG, B=1, device=device, dtype=dtype)

    assert_none_but_rounding(excess_error("compress", "triton", x, CONFIG))


@parts
@places
def test_last_queries_alone_equal_the_last_rows_of_prefill(
    device: str, dtype: torch.dtype, part: str
) -> None:
    x = draw(part, 201, **HEADS, Dk=128, config=CONFIG, device=device, dtype=dtype)
    whole = run(part, "triton", x, config=CONFIG)

    tail = run(part, "triton", x.tail(part, 140), config=CONFIG, q_start=61)

    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(tail, whole[:, -140:], atol=rounding, rtol=rounding)


@places
def test_the_whole_with_its_gates(device: str, dtype: torch.dtype) -> None:
    assert_whole_is_as_defined(tokens(70, **HEADS, Dk=192, device=device, dtype=dtype))


FORWARD_AND_QUERY = {"_forward_kernel", "_query_kernel"}


@pytest.mark.parametrize("device", ["meta"])
@pytest.mark.parametrize(
    ("arch", "D", "DV", "window", "expected"),
    [
        ("sm_90", 192, 128, 0, {*FORWARD_AND_QUERY, "_key_kernel"}),
        ("sm_90", 192, 128, 512, {*FORWARD_AND_QUERY, "_key_kernel"}),
        ("sm_90", 128, 128, 0, {*FORWARD_AND_QUERY, "_key_kernel"}),
        ("sm_90", 128, 128, 512, FORWARD_AND_QUERY),
        ("sm_90", 64, 64, 0, set()),
        ("sm_80", 192, 128, 0, set()),
    ],
)
def test_they_serve_where_they_are_faster(
    arch: Architecture, D: int, DV: int, window: int, expected: set[str], device: str,
    launched: dict[str, bool],
) -> None:  # fmt: skip
    q, k, v, do = (
        torch.empty(1, 256, H, size, dtype=torch.float16, device=device)
        for H, size in ((2, D), (1, D), (1, DV), (2, DV))
    )

    with as_architecture(arch):
        _, lse = banded_forward(q, k, v, Band(window=window), scale=1.0)
        banded_backward(do, q, k, v, lse, lse, Band(window=window), scale=1.0)

    assert {*FORWARD_AND_QUERY, "_key_kernel"} <= {*launched}
    assert {name for name, gluon in launched.items() if gluon} == expected


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize(("major", "programs"), [(8, 0), (9, 132), (10, 0)])
def test_only_9_0_has_their_products(
    major: int, programs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(major=major, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    assert hopper.multiprocessors.__wrapped__(torch.device(device)) == programs


@pytest.mark.parametrize("device", ["meta"])
@pytest.mark.parametrize(("version", "expected"), [((3, 5), False), ((3, 6), True)])
def test_an_older_triton_cannot_compile_them(
    version: tuple[int, int], expected: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "TRITON", version)

    assert hopper.takes(*torch.empty(2, 1, 1, 1, 128, device=device)) == expected
