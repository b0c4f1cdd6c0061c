"""Route `triton` of every part, and the whole operator in one, against the definition.

On the CPU the kernels run in Triton's interpreter, in float16; on a GPU in both half precisions.
Whatever a kernel must write is NaN before, in every test here. The selected branch alone has its
own tests; the interpreter takes milliseconds a program, so here it runs that branch in the whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from nsa import ops, reference
from nsa.config import BRANCHES, Positions, Routes
from nsa.errors import Unsupported
from nsa.kernels import scores
from nsa.kernels.banded import key as banded_key
from nsa.kernels.common import streams
from nsa.kernels.common.device import Architecture, as_architecture
from nsa.kernels.common.launch import KernelLaunch
from nsa.kernels.selected import forward as selected
from nsa.kernels.selected import inverse
from nsa.routes.tests.test_routes import assert_none, excess_error
from nsa.tests.operator_inputs import (
    SMALL,
    Inputs,
    draw,
    mean,
    needs_gpu,
    normal,
    outputs_and_gradients,
    run,
)

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter, of a loop whose bounds are runtime values; an error from NumPy 2.4 on.
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
)

TRITON = [
    pytest.param("cpu", torch.float16, id="interpreter"),
    *(
        pytest.param("cuda", dtype, marks=[pytest.mark.gpu, needs_gpu], id=f"gpu-{name}")
        for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16))
    ),
]
"""Where the kernels run, and in which precision."""
PARTS = [
    pytest.param(part, *where.values, marks=where.marks, id=f"{part}-{where.id}")
    for part in ("compress", "select", "window", "dense")
    for where in TRITON
    if (part, where.values[0]) != ("select", "cpu")
]
SHAPES = [
    pytest.param({"HQ": 2, "HKV": 2, "Dk": 16, "Dv": 32}, id="group-of-1-and-wider-values"),
    pytest.param({"HQ": 6, "HKV": 2, "Dk": 20, "Dv": 12}, id="group-of-3-and-odd-head-sizes"),
    pytest.param({"HQ": 12, "HKV": 2, "Dk": 48, "Dv": 16, "B": 1}, id="group-of-6-and-two-blocks"),
    pytest.param({"HQ": 16, "HKV": 1, "Dk": 16, "Dv": 16, "B": 1}, id="group-of-16-and-one-head"),
]
BY_POINTERS = ("group-of-3-and-odd-head-sizes", "group-of-6-and-two-blocks")
"""Shapes that the interpreter computes by pointers too: other paths of a tile's mask."""
ARCHITECTURES_AND_SHAPES = [
    pytest.param(
        arch, *shape.values, *where.values, marks=where.marks, id=f"{arch}-{shape.id}-{where.id}"
    )
    for where in TRITON
    for shape in SHAPES
    for arch in get_args(Architecture)
    if where.values[0] == "cuda" or arch == "sm_90" or shape.id in BY_POINTERS
]
LENGTHS = [1, 7, 8, 22, 63]
FLOAT32_ROUNDING = 1e-6
POISON = 1 << 30
"""In place of an index that was not written: an address far outside of every tensor."""


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN, or an index that must not be followed."""

    def poisoned(make: Any) -> Any:
        def empty(*args: Any, **options: Any) -> Tensor:
            x: Tensor = make(*args, **options)
            return x.fill_(torch.nan if x.is_floating_point() else POISON)

        return empty

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(params=get_args(Architecture))
def architecture(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles by bulk copy, as on sm_90, and by pointers, as on sm_80: a GPU of 9.0 can do both."""
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    if request.param == "sm_90" and here < (9, 0):
        pytest.skip("tiles of sm_90 may not fit the shared memory of this GPU")
    with as_architecture(request.param):
        yield


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are taken in several chunks, those of a block in several items, and those that see a
    tile of keys in several splits."""
    monkeypatch.setattr(scores, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(selected, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(inverse, "ITEM_ROWS", 32)
    monkeypatch.setattr(inverse, "MIN_ITEM_ROWS", 32)
    monkeypatch.setattr(banded_key, "MIN_SPLIT_ROWS", 32)
    monkeypatch.setattr(banded_key, "MIN_WINDOW_ROWS", 32)


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


# --- the whole ---------------------------------------------------------------------------


def tokens(
    T: int,
    *,
    HQ: int = 6,
    HKV: int = 2,
    Dk: int = 16,
    Dv: int = 8,
    B: int = 1,
    seed: int = 0,
    device: str,
    dtype: torch.dtype,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Tensor]:
    """The operator's inputs by its argument names, with gates that are strided."""
    sizes = {"q": (HQ, Dk), "gates": (HQ, 3)} | {
        f"{kind}_{branch}": (HKV, D)
        for branch in ("cmp", "sel", "win")
        for kind, D in (("k", Dk), ("v", Dv))
    }
    x = {
        name: normal(B, T, *size, seed=seed + i, device=device, dtype=dtype)
        for i, (name, size) in enumerate(sizes.items())
    }
    x["gates"] = x["gates"].sigmoid()
    for name in ("k_cmp", "v_cmp"):
        x[name] = ops.compress_blocks(x[name], mean, config=SMALL, cu_seqlens=cu_seqlens)
    return x


def affordable(shape: Mapping[str, int], device: str) -> dict[str, Any]:
    """The same group and heads; in the interpreter one sequence and one KV head of them."""
    if device == "cuda":
        return dict(shape)
    return {**shape, "B": 1, "HQ": shape["HQ"] // shape["HKV"], "HKV": 1}


def forward(
    x: Mapping[str, Any], on: Sequence[str] = BRANCHES, **where: Any
) -> tuple[Tensor, Tensor]:
    """Output and selection."""
    routes = Routes.triton(on)
    return ops.attention(**x, config=SMALL, routes=routes, return_blocks=True, **where)


def whole(x: Mapping[str, Tensor], **where: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Output, gradients of all inputs and the selection."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    out, blocks = forward(leaves, **where)
    return {"out": out.detach(), **gradients(out, leaves)}, blocks


def gradients(out: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    grad = normal(*out.shape, seed=9, device=str(out.device), dtype=out.dtype)
    grads = torch.autograd.grad(out, tuple(leaves.values()), grad, materialize_grads=True)
    return {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def definition(
    x: Mapping[str, Tensor],
    blocks: Tensor,
    dtype: torch.dtype,
    cu_seqlens: Tensor | None = None,
    on: Sequence[str] = BRANCHES,
) -> dict[str, Tensor]:
    """The same by nsa.reference, for the blocks that were selected; a gate that is off is zero."""
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in x.items()}
    q = leaves["q"]
    at = Positions.of(q, config=SMALL, cu_seqlens=cu_seqlens)
    branches = (
        reference.compress_attention(q, leaves["k_cmp"], leaves["v_cmp"], at),
        reference.selected_attention(q, leaves["k_sel"], leaves["v_sel"], blocks, at),
        reference.window_attention(q, leaves["k_win"], leaves["v_win"], at),
    )
    gates = leaves["gates"] * torch.tensor([branch in on for branch in BRANCHES]).to(q)
    out = reference.gated_sum(gates, *branches)
    return {"out": out.detach(), **gradients(out, leaves)}


def assert_whole_is_as_defined(
    x: Mapping[str, Tensor], cu_seqlens: Tensor | None = None, on: Sequence[str] = BRANCHES
) -> None:
    """Within twice the definition's own error at the same precision, as in test_routes."""
    got, blocks = whole(x, on=on, cu_seqlens=cu_seqlens)

    dtype = x["q"].dtype
    assert blocks.shape[-1] == (SMALL.num_blocks if "select" in on else 0)
    if "select" not in on:
        blocks = blocks.new_full((*blocks.shape[:3], SMALL.num_blocks), -1)
    exact = definition(x, blocks, torch.float64, cu_seqlens, on)
    own = definition(x, blocks, dtype, cu_seqlens, on)
    for name, truth in exact.items():
        assert got[name].dtype == dtype
        assert got[name].shape == truth.shape
        allowed = 2 * (own[name] - truth).norm() + torch.finfo(dtype).eps * truth.norm()
        assert (got[name] - truth).norm() <= allowed + FLOAT32_ROUNDING, name


@pytest.mark.parametrize(
    ("shape", "device", "dtype"),
    [
        pytest.param(*shape.values, *where.values, marks=where.marks, id=f"{shape.id}-{where.id}")
        for where in TRITON
        for shape in (SHAPES if where.values[0] == "cuda" else SHAPES[:3])
    ],
)
def test_the_whole_is_as_defined(shape: dict[str, Any], device: str, dtype: torch.dtype) -> None:
    T = 61 if device == "cuda" else 37
    x = tokens(T, **affordable(shape, device), device=device, dtype=dtype)

    assert_whole_is_as_defined(x)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_chunks_join_to_the_whole(device: str, dtype: torch.dtype) -> None:
    x = tokens(37, B=2, HQ=2, HKV=1, device=device, dtype=dtype)

    assert_whole_is_as_defined(x)


@pytest.mark.usefixtures("architecture", "small_chunks")
@pytest.mark.parametrize(("part", "expected"), [("compress", 5), ("window", 5)])
@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_splits_of_the_queries_add_up(
    device: str, dtype: torch.dtype, part: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw(part, 61, HQ=3, HKV=1, B=1, dtype=dtype, device=device)
    splits: list[int] = []
    new_empty = Tensor.new_empty

    def counted(self: Tensor, *size: int, **options: Any) -> Tensor:
        if options.get("dtype") == torch.float32 and len(size) == 5:  # [splits, B, S, HKV, D]
            splits.append(size[0])
        return new_empty(self, *size, **options)

    monkeypatch.setattr(Tensor, "new_empty", counted)

    assert_none(excess_error(part, "triton", x))
    assert splits == [expected, expected]


@pytest.mark.parametrize(("device", "dtype"), TRITON)
@pytest.mark.parametrize("T", LENGTHS)
def test_the_whole_at_odd_lengths(T: int, device: str, dtype: torch.dtype) -> None:
    heads = affordable({"HQ": 6, "HKV": 2}, device)

    assert_whole_is_as_defined(tokens(T, **heads, device=device, dtype=dtype))


SOME = [on for n in (1, 2) for on in combinations(BRANCHES, n)]
KERNELS = {
    "compress": {"forward compress", "_query_kernel", "_key_kernel"},
    "select": {"_score_kernel", "_top_kernel", "_partial_kernel", "_combine_kernel",
               "_backward_kernel", "_reduce_kernel"},
    "window": {"forward window", "_query_kernel", "_key_kernel"},
}  # fmt: skip
"""The kernels of a branch that another may share, and those of no other."""


@pytest.mark.parametrize("on", SOME, ids="-".join)
@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_a_branch_that_is_off_is_a_gate_of_zero_and_launches_nothing(
    device: str, dtype: torch.dtype, on: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    launch = KernelLaunch.__call__

    def noted(self: KernelLaunch, *arguments: Any) -> None:
        name, sizes = self.kernel.__name__, self.named
        if name == "_forward_kernel":
            of = "window" if sizes["WINDOW"] else "sums" if sizes["ONLY_LSE"] else "compress"
            name = f"forward {of}"
        launched.append(name)
        launch(self, *arguments)

    monkeypatch.setattr(KernelLaunch, "__call__", noted)
    x = tokens(37, HQ=3, HKV=1, device=device, dtype=dtype)

    assert_whole_is_as_defined(x, on=on)

    expected = set[str]().union(*(KERNELS[branch] for branch in on))
    expected |= {"forward sums"} if "select" in on and "compress" not in on else set()
    known = set[str]().union(*KERNELS.values(), {"forward sums"})
    assert set(launched) & known == expected
    assert launched.count("_query_kernel") == len({"compress", "window"}.intersection(on))


@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_the_whole_of_packed_documents(device: str, dtype: torch.dtype) -> None:
    bounds = torch.tensor([0, 5, 30, 31, 31, 57], dtype=torch.int32, device=device)

    x = tokens(57, HQ=3, HKV=1, device=device, dtype=dtype, cu_seqlens=bounds)

    assert_whole_is_as_defined(x, bounds)


def assert_selected_the_best(
    x: Mapping[str, Tensor], blocks: Tensor, record_property: Callable[[str, object], None]
) -> None:
    """A block chosen for another is worth the same, within float32's rounding of the scores."""
    q, k_cmp = x["q"].double(), x["k_cmp"].double()
    at = Positions.of(q, config=SMALL)
    expected = reference.select_blocks(q, k_cmp, at)
    importance = reference.block_importance(q, k_cmp, at)

    assert blocks.dtype is torch.int32
    assert torch.equal(blocks < 0, expected < 0)
    agreement = (blocks == expected).all(-1).double().mean().item()
    record_property("selection_agreement", agreement)
    assert agreement > 0.99
    worth, best = (
        importance.gather(-1, b.clamp(min=0).long()).masked_fill(b < 0, 0).sum(-1)
        for b in (blocks, expected)
    )
    assert (best - worth).max() <= 1e-5 * best.max()


@pytest.mark.parametrize(
    ("architecture", "shape", "device", "dtype"),
    ARCHITECTURES_AND_SHAPES,
    indirect=["architecture"],
)
def test_selection_agrees_except_where_scores_tie(
    architecture: None,
    shape: dict[str, Any],
    device: str,
    dtype: torch.dtype,
    record_property: Callable[[str, object], None],
) -> None:
    """At 101 tokens there are 7 blocks to choose 4 from."""
    T = 2003 if device == "cuda" else 101
    x = tokens(T, **affordable(shape, device), device=device, dtype=dtype)

    blocks = ops.select_blocks(x["q"], x["k_cmp"], config=SMALL, route="triton")

    assert_selected_the_best(x, blocks, record_property)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_the_whole_selects_as_the_scores_alone(
    device: str, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    x = tokens(80, HQ=2, HKV=1, device=device, dtype=dtype)

    with torch.no_grad():
        _, blocks = forward(x)

    assert_selected_the_best(x, blocks, record_property)


@pytest.mark.parametrize("small", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize(("device", "dtype"), TRITON)
@torch.no_grad()
def test_later_tokens_change_nothing_before_them(
    device: str, dtype: torch.dtype, small: bool, request: pytest.FixtureRequest
) -> None:
    """Bit for bit, output and selection, beyond the window."""
    if small:
        request.getfixturevalue("small_chunks")
    T = 90 if device == "cuda" else 57
    raw, other = (
        tokens(T, HQ=2, HKV=1, seed=seed, device=device, dtype=dtype) for seed in (0, 100)
    )
    before, blocks = forward(raw)

    for s in (1, 8, 33, 64, T - 1) if device == "cuda" else (33,):
        after = {}
        for name, x in raw.items():
            rows = SMALL.compressed_length(s) if name.endswith("_cmp") else s
            after[name] = torch.cat([x[:, :rows], other[name][:, rows:]], 1)
        changed, changed_blocks = forward(after)

        assert torch.equal(blocks[:, :s], changed_blocks[:, :s])
        assert torch.equal(before[:, :s], changed[:, :s])
        assert not torch.equal(before[:, s:], changed[:, s:])


@pytest.mark.parametrize(("device", "dtype"), TRITON)
def test_no_selection_yields_zeros_with_zero_gradients(device: str, dtype: torch.dtype) -> None:
    x = draw("select", 40, HQ=3, HKV=1, B=1, device=device, dtype=dtype)
    late = torch.arange(40, device=device).view(-1, 1, 1) >= 20
    x = replace(x, blocks=x.blocks.where(late, -1))

    got = outputs_and_gradients("select", "triton", x)

    for name in ("out", "dq"):
        assert torch.equal(got[name][:, :20], torch.zeros_like(got[name][:, :20]))
        assert got[name][:, 20:].abs().sum(-1).min() > 0
    assert got["dk"].isfinite().all()


@pytest.mark.gpu
@needs_gpu
def test_gradients_repeat_bit_for_bit_in_deterministic_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x = tokens(2000, HQ=16, HKV=2, Dk=64, Dv=64, device="cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [whole(x)[0] for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)

    for name, first in runs[0].items():
        assert all(torch.equal(first, other[name]) for other in runs[1:]), name


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("T", [500, 5000])
def test_branches_side_by_side_give_the_bits_of_one_after_another(
    T: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes memory meanwhile: a kernel beside has not lost what it reads."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x = tokens(T, HQ=12, HKV=2, Dk=64, Dv=64, device="cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        beside = [whole(x)[0] for _ in range(20)]
        monkeypatch.setattr(streams, "_streams", lambda device, count: [None] * count)
        in_turn, _ = whole(x)
    finally:
        torch.use_deterministic_algorithms(False)

    for name, expected in in_turn.items():
        assert all(torch.equal(got[name], expected) for got in beside), name


@pytest.mark.gpu
@needs_gpu
def test_a_captured_step_has_the_bits_of_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its branches side by side: the graph then has them so."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x = tokens(700, HQ=12, HKV=2, Dk=64, Dv=64, device="cuda", dtype=torch.bfloat16)
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    do = normal(*forward(leaves)[0].shape, seed=9, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        out, _ = forward(leaves)
        return out.detach(), *torch.autograd.grad(out, tuple(leaves.values()), do)

    torch.use_deterministic_algorithms(True)
    try:
        expected = step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step()
        for _ in range(10):
            graph.replay()
    finally:
        torch.use_deterministic_algorithms(False)

    for name, a, b in zip(("out", *leaves), got, expected, strict=True):
        assert torch.equal(a, b), name


def test_what_the_kernels_cannot_do_is_refused() -> None:
    x = draw("window", 8, dtype=torch.float32)

    with pytest.raises(Unsupported, match="needs float16 or bfloat16"):
        run("window", "triton", x)
