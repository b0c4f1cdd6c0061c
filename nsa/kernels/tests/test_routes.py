"""Route `triton` of every part against the definition; test_operator.py has the whole.

Whatever a kernel must write is NaN before, in every test here. The selected branch alone has its
own tests; the interpreter takes milliseconds a program, so here it runs that branch in the whole.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nsa.kernels.common.device import as_architecture
from nsa.kernels.tests.where import (
    ARCHITECTURES_AND_SHAPES,
    CALLS_KERNELS,
    FLOAT32_ROUNDING,
    LENGTHS,
    TRITON,
)
from nsa.routes.tests.test_routes import assert_none, excess_error
from nsa.tests.operator_inputs import SMALL, Inputs, draw, outputs_and_gradients, run

pytestmark = CALLS_KERNELS

PARTS = [
    pytest.param(part, *where.values, marks=where.marks, id=f"{part}-{where.id}")
    for part in ("compress", "select", "window", "dense")
    for where in TRITON
    if (part, where.values[0]) != ("select", "cpu")
]


def assert_none_but_rounding(excess: dict[str, float]) -> None:
    """A query that sees one key has a gradient of exactly 0, which the definition finds.

    The kernels subtract two float32 sums of the same terms, taken in two orders.
    """
    assert {name: e for name, e in excess.items() if not e <= FLOAT32_ROUNDING} == {}


@pytest.mark.parametrize(
    ("architecture", "shape", "device", "dtype", "part"),
    [
        pytest.param(*case.values, part, marks=case.marks, id=f"{part}-{case.id}")
        for case in ARCHITECTURES_AND_SHAPES
        for part in ("compress", "select", "window", "dense")
        if (part, case.values[2]) != ("select", "cpu")
    ],
    indirect=["architecture"],
)
def test_error_is_no_worse_than_that_of_the_definition(
    architecture: None, shape: dict[str, Any], device: str, dtype: torch.dtype, part: str
) -> None:
    assert_none(excess_error(part, "triton", draw(part, 61, **shape, dtype=dtype, device=device)))


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize(("part", "device", "dtype"), PARTS)
def test_odd_lengths(part: str, T: int, device: str, dtype: torch.dtype) -> None:
    x = draw(part, T, dtype=dtype, device=device)

    assert_none_but_rounding(excess_error(part, "triton", x))


@pytest.mark.parametrize("T", [1, 22])
@pytest.mark.parametrize(("part", "device", "dtype"), PARTS)
def test_odd_lengths_by_pointers(part: str, T: int, device: str, dtype: torch.dtype) -> None:
    with as_architecture("sm_80"):
        x = draw(part, T, dtype=dtype, device=device)

        assert_none_but_rounding(excess_error(part, "triton", x))


@pytest.mark.usefixtures("architecture")
@pytest.mark.parametrize(("part", "device", "dtype"), PARTS)
def test_gradients_of_packed_documents(part: str, device: str, dtype: torch.dtype) -> None:
    x = draw(part, 76, documents=[5, 30, 1, 40], dtype=dtype, device=device)

    assert_none_but_rounding(excess_error(part, "triton", x))


@pytest.mark.parametrize(("part", "device", "dtype"), PARTS)
def test_packed_documents_equal_separate_ones(part: str, device: str, dtype: torch.dtype) -> None:
    lengths = [5, 30, 1, 0, 41]
    x = draw(part, sum(lengths), documents=lengths, dtype=dtype, device=device)
    rows = [SMALL.compressed_length(n) if part == "compress" else n for n in lengths]

    packed = run(part, "triton", x)

    separate = [
        run(part, "triton", Inputs(*document))
        for document in zip(
            x.q.split(lengths, 1),
            x.k.split(rows, 1),
            x.v.split(rows, 1),
            x.blocks.split(lengths, 1),
            strict=True,
        )
        if document[0].shape[1]
    ]
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(packed, torch.cat(separate, 1), atol=rounding, rtol=rounding)


@pytest.mark.usefixtures("architecture")
@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize(("part", "device", "dtype"), PARTS)
def test_last_queries_alone_equal_the_last_rows_of_prefill(
    part: str, T: int, device: str, dtype: torch.dtype
) -> None:
    x = draw(part, 63, dtype=dtype, device=device)
    whole = run(part, "triton", x)

    tail = run(part, "triton", x.tail(part, T), q_start=63 - T)

    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(tail, whole[:, -T:], atol=rounding, rtol=rounding)


@pytest.mark.parametrize(("part", "device", "dtype"), PARTS)
def test_invisible_keys_weigh_nothing(part: str, device: str, dtype: torch.dtype) -> None:
    """Keys and values after the query near the largest of float16."""
    x = draw(part, 63, dtype=dtype, device=device)
    before = run(part, "triton", x)
    rows = SMALL.compressed_length(33) if part == "compress" else 33
    k, v = x.k.clone(), x.v.clone()
    k[:, rows:], v[:, rows:] = 6e4, 6e4

    after = run(part, "triton", replace(x, k=k, v=v))

    assert torch.equal(before[:, :33], after[:, :33])


@pytest.mark.usefixtures("architecture")
@pytest.mark.parametrize(("part", "device", "dtype"), PARTS)
def test_strides_change_nothing(part: str, device: str, dtype: torch.dtype) -> None:
    """Heads cut from one projection, as the layer hands them over, and heads before tokens."""
    x = draw(part, 37, dtype=dtype, device=device)
    expected = outputs_and_gradients(part, "triton", x)
    q = torch.cat([x.q, x.q], 2)[:, :, : x.q.shape[2]]
    k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x.k, x.v))
    strided = replace(x, q=q, k=k, v=v)
    assert not q.is_contiguous()

    got = outputs_and_gradients(part, "triton", strided)

    rounding = 4 * torch.finfo(dtype).eps
    for name, one in expected.items():
        torch.testing.assert_close(got[name], one, atol=rounding, rtol=rounding)
