"""nsa.ops: refused inputs, and what routes guarantee about memory and host waits."""

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import ops
from nsa.config import BRANCHES, ROUTES, Routes
from nsa.routes import eager
from nsa.tests.operator_inputs import SMALL, draw, normal, outputs_and_gradients, run

WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten.equal.default,
}
"""Operators whose result, or its size, the host must wait for."""


class Watch(TorchDispatchMode):
    """Records every operator, those of the backward pass included, and the largest result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if func in WAITING or by_mask:
            self.waits.add(str(func))
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):  # expanded views take no memory
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.itemsize)
        return out


def watch(part: str, route: str, T: int, **options: Any) -> Watch:
    x = draw(part, T, dtype=torch.float32, B=1, **options)
    seen = Watch()
    with seen:
        outputs_and_gradients(part, route, x)
    return seen


@pytest.mark.parametrize("chunk", [1 << 27, 1 << 12], ids=["whole", "chunked"])
@pytest.mark.parametrize("documents", [[], [5, 56]], ids=["batch", "documents"])
@pytest.mark.parametrize(
    ("part", "route"),
    [
        ("compress", "eager"),
        ("select", "gather"),
        ("select", "masked"),
        ("window", "eager"),
        ("dense", "sdpa"),
    ],
)
def test_vectorised_routes_never_wait_for_the_device(
    part: str, route: str, documents: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "CHUNK_ELEMENTS", chunk)

    assert watch(part, route, 61, documents=documents).waits == set()


@pytest.mark.parametrize("documents", [[], [5, 56]], ids=["batch", "documents"])
def test_selection_never_waits_for_the_device(documents: list[int]) -> None:
    x = draw("compress", 61, documents=documents)

    with Watch() as seen:
        ops.select_blocks(x.q, x.k, config=SMALL, cu_seqlens=x.cu_seqlens)

    assert seen.waits == set()


@pytest.mark.parametrize("route", ["loop", "packed", "varlen"])
def test_routes_that_wait_are_detected(route: str) -> None:
    """The watch above can fail: these read the selection on the host."""
    assert watch("select", route, 61).waits != set()


@pytest.mark.parametrize(
    ("part", "route"),
    [
        ("compress", "eager"),
        ("select", "gather"),
        ("select", "packed"),
        ("select", "varlen"),
        ("window", "eager"),
    ],
)
def test_memory_grows_linearly(part: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "CHUNK_ELEMENTS", 1 << 16)

    short, long = (watch(part, route, T).largest for T in (256, 768))

    assert long <= 3.1 * short


@pytest.mark.parametrize("part", ["compress", "scores", "window"])
def test_chunks_fill_their_budget_and_keep_it(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest intermediate, of a batch and of several heads: not above, nor far below."""
    budget = 1 << 17
    monkeypatch.setattr(eager, "CHUNK_ELEMENTS", budget)
    monkeypatch.setattr(eager, "WINDOW_TILE", 8)
    x = draw("compress" if part == "scores" else part, 400, B=5, Dk=4, Dv=4, dtype=torch.float32)

    with Watch() as seen, torch.no_grad():
        if part == "scores":
            ops.select_blocks(x.q, x.k, config=SMALL)
        else:
            run(part, "eager", x)

    assert budget / 2 < seen.largest <= budget


@pytest.mark.parametrize("part", ["compress", "select", "window"])
def test_the_definition_is_quadratic(part: str) -> None:
    """So the test above can fail."""
    short, long = (watch(part, "reference", T).largest for T in (256, 768))

    assert long > 8 * short


def test_routes_refuse_an_unknown_name_and_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"select='gathr' .* did you mean 'gather'"):
        Routes(select="gathr")
    with pytest.raises(ValueError, match="window='gather' is not a route"):
        Routes(window="gather")


def test_one_branch_at_least_runs() -> None:
    with pytest.raises(ValueError, match="every branch is off"):
        Routes.triton([])
    with pytest.raises(ValueError, match="scores='off' is not a route"):
        Routes(scores="off")


SELECTING = [Routes(), Routes(select="masked"), Routes.reference()]


@pytest.mark.parametrize("routes", SELECTING, ids=["gather", "masked", "reference"])
def test_branches_one_at_a_time_add_up_to_the_whole(routes: Routes) -> None:
    """Output and gradients, without the code that joins them; what is off is not even read."""
    x = {part: draw(part, 61) for part in BRANCHES}
    gates = normal(2, 61, 6, 3, seed=8).sigmoid()

    def attend(*on: str) -> dict[str, Tensor]:
        leaves = {"q": x["select"].q.clone(), "gates": gates.clone()}
        for part in BRANCHES:
            leaves |= {f"k_{part}": x[part].k.clone(), f"v_{part}": x[part].v.clone()}
            if part not in on and (part, on) != ("compress", ("select",)):
                leaves |= {f"k_{part}": x[part].k[:, :0].clone()}
        for leaf in leaves.values():
            leaf.requires_grad_()
        q, weights, *keys = leaves.values()
        tensors: Any = (q, *keys, weights)
        off = {part: "off" for part in BRANCHES if part not in on}
        out = ops.attention(*tensors, config=SMALL, routes=replace(routes, **off))
        grads = torch.autograd.grad(
            out, list(leaves.values()), normal(*out.shape, seed=9), materialize_grads=True
        )
        return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}

    whole, alone = attend(*BRANCHES), {part: attend(part) for part in BRANCHES}

    for name in ("out", "q", "gates"):
        total = sum(one[name] for one in alone.values())
        torch.testing.assert_close(total, whole[name])
    for i, (part, one) in enumerate(alone.items()):
        for name in (f"k_{part}", f"v_{part}"):
            torch.testing.assert_close(one[name], whole[name])
        assert not one["gates"][..., [j for j in range(3) if j != i]].any()


def test_routes_of_the_definition() -> None:
    assert set(astuple(Routes.reference())) == {"reference"}


def test_every_named_route_is_implemented() -> None:
    for part, names in ROUTES.items():
        assert tuple(ops._IMPLEMENTATIONS[part]) == names
        assert getattr(Routes(), part) in names


Q, KV, KC = (2, 61, 6, 16), (2, 61, 2, 16), (2, 14, 2, 16)


def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"q": zeros(61, 6, 16)}, r"q is \[61, 6, 16\], but must be \[B, T, H", id="rank"
        ),
        pytest.param({"q": zeros(2, 61, 5, 16)}, "q is of 5 heads", id="group"),
        pytest.param({"q": zeros(2, 0, 6, 16)}, "T > 0", id="no-query"),
        pytest.param({"q": zeros(*Q, dtype=torch.int32)}, "floating point", id="integers"),
        pytest.param(
            {"k": zeros(2, 61, 2, 8)},
            r"k is \[2, 61, 2, 8\], but must be \[2, S, HKV, 16\]",
            id="head-dim",
        ),
        pytest.param({"k": zeros(1, 61, 2, 16)}, r"must be \[2, S, HKV, 16\]", id="batch"),
        pytest.param({"v": zeros(2, 60, 2, 16)}, r"v is \[2, 60, 2, 16\]", id="value-length"),
        pytest.param(
            {"v": zeros(*KV, dtype=torch.float64)},
            "v is torch.float64, but must be torch.float32, as q",
            id="dtype",
        ),
        pytest.param(
            {"k": torch.zeros(KV, device="meta")}, "k is on meta, but must be on cpu", id="device"
        ),
        pytest.param(
            {"blocks": zeros(2, 61, 2, 3, dtype=torch.int32)},
            r"must be \[2, 61, 2, 4\]",
            id="slots",
        ),
        pytest.param({"blocks": zeros(2, 61, 2, 4)}, "int32 or int64", id="index-dtype"),
        pytest.param({"q_start": 5}, "k is of length 61, but must be of length 66", id="alignment"),
        pytest.param({"q_start": -1}, "q_start is -1", id="negative-start"),
        pytest.param(
            {"cu_seqlens": zeros(3, dtype=torch.int32)},
            "B is 2, but must be 1",
            id="documents-in-a-batch",
        ),
        pytest.param(
            {"cu_seqlens": zeros(3, dtype=torch.int64)},
            "cu_seqlens is torch.int64",
            id="documents-dtype",
        ),
        pytest.param(
            {"cu_seqlens": zeros(1, dtype=torch.int32)},
            r"must be \[documents \+ 1\]",
            id="no-document",
        ),
        pytest.param({"route": "cudnn"}, "select='cudnn' is not a route", id="route"),
    ],
)
def test_wrong_input_is_named_with_what_it_is_and_what_it_must_be(
    changes: dict[str, Any], message: str
) -> None:
    call = {
        "q": zeros(*Q),
        "k": zeros(*KV),
        "v": zeros(*KV),
        "blocks": zeros(2, 61, 2, 4, dtype=torch.int32),
    } | changes
    tensors = [call.pop(name) for name in ("q", "k", "v", "blocks")]

    with pytest.raises(ValueError, match=message):
        ops.selected_attention(*tensors, config=SMALL, **call)


def test_compressed_keys_must_be_all_of_them() -> None:
    for length in (13, 15):
        k_cmp = zeros(2, length, 2, 16)
        with pytest.raises(
            ValueError, match=f"k_cmp is of length {length}, but must be of length 14"
        ):
            ops.compress_attention(zeros(*Q), k_cmp, k_cmp, config=SMALL)
        with pytest.raises(ValueError, match=f"k_cmp is of length {length}"):
            ops.select_blocks(zeros(*Q), k_cmp, config=SMALL)


def test_a_window_must_bring_every_key_it_sees() -> None:
    q, k = zeros(1, 2, 2, 8), zeros(1, 9, 2, 8)

    with pytest.raises(ValueError, match="k_start is 13, but must be 0 to 12"):
        ops.window_attention(q, k, k, window_size=9, q_start=20, k_start=13)
    with pytest.raises(ValueError, match="k is of length 9, but must be of length 10"):
        ops.window_attention(q, k, k, window_size=9, q_start=20, k_start=12)
    with pytest.raises(ValueError, match="window_size is 0"):
        ops.window_attention(q, k, k, window_size=0)


def test_gates_have_one_weight_per_branch() -> None:
    kv, kc = zeros(*KV), zeros(*KC)

    with pytest.raises(ValueError, match=r"gates is \[2, 61, 6, 2\], but must be \[2, 61, 6, 3\]"):
        ops.attention(
            zeros(*Q), kc, kc, kv, kv, kv, kv, zeros(2, 61, 6, 2), config=SMALL, routes=Routes()
        )


@pytest.mark.parametrize("route", ["cudnn", "flash", "efficient"])
def test_a_gpu_backend_on_the_cpu_is_unsupported(route: str) -> None:
    with pytest.raises(ops.Unsupported, match=f"^{route}: needs tensors on CUDA.*`math`"):
        ops.dense_attention(zeros(*Q), zeros(*KV), zeros(*KV), route=route)
