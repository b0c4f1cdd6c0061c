"""FlashAttention-2 routes, as far as they can be seen without a GPU.

The folding of the compress branch is exact arithmetic on positions, so it runs here on causal
attention in plain PyTorch; the flash-attn package is stood in for by a module that does what
its documentation says. The real ones run in test_routes.py, on a GPU.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import ops, reference
from nsa.config import NSAConfig, Positions
from nsa.routes import fa2
from nsa.tests.operator_inputs import SMALL, draw, mean, normal, run, skip_what_the_build_lacks

CONFIGS = [
    pytest.param(SMALL, id="l-twice-d"),
    pytest.param(NSAConfig(compress_block_size=4, compress_stride=4), id="l-equals-d"),
    pytest.param(NSAConfig(compress_block_size=3, compress_stride=1), id="d-1"),
    pytest.param(NSAConfig(compress_block_size=1, compress_stride=1), id="l-1"),
    pytest.param(NSAConfig(compress_block_size=12, compress_stride=4), id="l-thrice-d"),
]


def causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Attention aligned at the end, as FlashAttention-2 aligns it."""
    assert 0 < q.shape[1] <= k.shape[1]
    q_start = k.shape[1] - q.shape[1]
    return reference.dense_attention(q, k, v, Positions.of(q, q_start=q_start, scale=scale))


def compressed(T: int, config: NSAConfig) -> tuple[Tensor, Tensor, Tensor]:
    N = config.compressed_length(T)
    return (
        normal(2, T, 6, 8, seed=0).requires_grad_(),
        normal(2, N, 2, 8, seed=1).requires_grad_(),
        normal(2, N, 2, 4, seed=2).requires_grad_(),
    )


@pytest.mark.parametrize("T", [1, 3, 4, 7, 8, 12, 31, 32, 33])
@pytest.mark.parametrize("config", CONFIGS)
def test_folding_computes_the_compress_branch(config: NSAConfig, T: int) -> None:
    q, k, v = compressed(T, config)
    at = Positions.of(q, config=config, scale=0.3)
    fold = partial(fa2.fold_compress, causal=causal)
    grad = normal(2, T, 6, 4, seed=3)

    got, expected = (f(q, k, v, at) for f in (fold, reference.compress_attention))

    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    for a, b in zip(
        torch.autograd.grad(got, (q, k, v), grad),
        torch.autograd.grad(expected, (q, k, v), grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("T", [1, 2, 5, 20])
@pytest.mark.parametrize("total", [7, 8, 30, 32, 33])
@pytest.mark.parametrize("config", CONFIGS)
def test_folding_the_last_queries(config: NSAConfig, total: int, T: int) -> None:
    T = min(T, total)
    q, k, v = compressed(total, config)
    at = Positions.of(q, config=config, scale=0.3)
    whole = reference.compress_attention(q, k, v, at)

    tail = fa2.fold_compress(q[:, -T:], k, v, replace(at, q_start=total - T), causal=causal)

    torch.testing.assert_close(tail, whole[:, -T:], atol=1e-12, rtol=0)


def test_folding_takes_two_calls_whatever_the_length() -> None:
    calls = []

    def counted(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        calls.append(q.shape[2])
        return causal(q, k, v, scale=scale)

    q, k, v = compressed(100, SMALL)
    fa2.fold_compress(q, k, v, Positions.of(q, config=SMALL), causal=counted)

    assert calls == [3 * 6, 1 * 6]  # d - 1 residues and the last one, as query heads


def fake_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """flash_attn.flash_attn_varlen_func, from its documentation (2.6)."""
    assert causal
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    outputs = []
    bounds = [*zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)]
    for (q0, k0), (q1, k1) in pairwise(bounds):
        assert q1 - q0 <= max_seqlen_q
        assert k1 - k0 <= max_seqlen_k
        i = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        j = torch.arange(k1 - k0)
        visible = (j <= i + window_size[1]) & ((window_size[0] < 0) | (j >= i - window_size[0]))
        rows = reference.masked_attention(
            q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], visible, softmax_scale
        )
        outputs.append(rows[0])
    return torch.cat(outputs)


@pytest.fixture
def fake_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flash-attn package that runs on the CPU and takes float64."""
    package = SimpleNamespace(flash_attn_varlen_func=fake_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(fa2, "require", lambda provider, q, v: None)


@pytest.mark.usefixtures("fake_package")
@pytest.mark.parametrize("documents", [[], [5, 40, 16]], ids=["batch", "documents"])
@pytest.mark.parametrize("part", ["window", "compress"])
def test_package_is_called_as_documented(part: str, documents: list[int]) -> None:
    """Heads of 20 and 12 are padded to 24, documents kept apart, masks aligned at the end."""
    x = draw(part, 61, Dk=20, Dv=12, documents=documents)

    got, expected = (run(part, route, x) for route in ("fa2-package", "reference"))

    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("fake_package")
def test_package_decodes() -> None:
    x = draw("window", 61)

    tail = ops.window_attention(
        x.q[:, -3:], x.k, x.v, window_size=9, q_start=58, route="fa2-package"
    )

    at = Positions.of(x.q, config=NSAConfig(window_size=9))
    whole = reference.window_attention(x.q, x.k, x.v, at)
    torch.testing.assert_close(tail, whole[:, -3:], atol=1e-12, rtol=0)


@pytest.fixture
def narrow_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """A build for bfloat16 and heads of at most 128, in its own words; the shapes of its calls."""
    calls: list[tuple[int, ...]] = []

    def varlen(q: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(tuple(q.shape))
        if q.dtype is torch.float32:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if q.dtype is torch.float16:
            raise RuntimeError("flash-attn: fp16 was left out of this build")
        if q.shape[-1] > 128:
            raise RuntimeError("flash-attn: this build holds heads of at most 128")
        return fake_varlen_func(q, *args, **options)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=varlen))
    for check in ("_absence", "_refusal"):  # this is no GPU
        monkeypatch.setattr(fa2, check, lambda *_: "")
    fa2._asked.cache_clear()
    yield calls
    fa2._asked.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "Dk", "said"),
    [
        (torch.float16, 20, "float16 with heads of 24 .*fp16 was left out"),
        (torch.bfloat16, 136, "bfloat16 with heads of 136 .*at most 128"),
    ],
)
@pytest.mark.parametrize("part", ["window", "compress"])
def test_the_package_is_asked_once_what_it_was_built_for(
    part: str, dtype: torch.dtype, Dk: int, said: str, narrow_build: list[tuple[int, ...]]
) -> None:
    lacking, built = draw(part, 61, Dk=Dk, dtype=dtype), draw(part, 61, dtype=torch.bfloat16)

    for _ in range(2):
        with pytest.raises(ops.Unsupported, match=f"^fa2-package: .*{said}.*pip install"):
            run(part, "fa2-package", lacking)
    with pytest.raises(pytest.skip.Exception, match=said):
        skip_what_the_build_lacks("fa2-package", lacking)
    assert len(narrow_build) == 1

    skip_what_the_build_lacks("fa2-package", built)
    got, expected = (run(part, route, built) for route in ("fa2-package", "reference"))
    torch.testing.assert_close(got, expected)
    skip_what_the_build_lacks("fa2-torch", lacking)
    assert narrow_build.count((1, 1, 16)) == 1


@pytest.mark.usefixtures("narrow_build")
def test_a_fault_of_the_device_is_no_refusal() -> None:
    x = draw("window", 61, dtype=torch.float32)

    with pytest.raises(RuntimeError, match=r"^CUDA error"):
        run("window", "fa2-package", x)


@pytest.mark.parametrize("provider", fa2.PROVIDERS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_an_absent_provider_says_why_and_nothing_else_runs(provider: str) -> None:
    q, k = normal(1, 8, 2, 8, seed=0), normal(1, 8, 2, 8, seed=1)
    k_cmp = ops.compress_blocks(k, mean, config=SMALL)
    reason = "not installed|sees none"

    assert fa2.providers()[provider]
    with pytest.raises(ops.Unsupported, match=f"^{provider}: .*({reason}).*`eager`"):
        ops.window_attention(q, k, k, window_size=4, route=provider)
    with pytest.raises(ops.Unsupported, match=f"^{provider}: .*({reason}).*`eager`"):
        ops.compress_attention(q, k_cmp, k_cmp, config=SMALL, route=provider)


@pytest.mark.parametrize(
    ("size", "dtype", "reason"),
    [
        pytest.param(8, torch.float16, "on CUDA, but these are on cpu", id="cpu"),
        pytest.param(8, torch.float32, "on CUDA", id="cpu-first"),
    ],
)
def test_tensors_it_does_not_take(
    size: int, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa2, "_absence", lambda provider: "")
    q = torch.zeros(1, 4, 2, size, dtype=dtype)

    with pytest.raises(ops.Unsupported, match=reason):
        ops.window_attention(q, q, q, window_size=4, route="fa2-torch")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize(
    ("size", "dtype", "reason"),
    [
        pytest.param(8, torch.float32, "float16 or bfloat16, but these are float32", id="dtype"),
        pytest.param(264, torch.float16, "at most 256, but these have 264", id="head-size"),
    ],
)
def test_tensors_it_does_not_take_on_a_gpu(size: int, dtype: torch.dtype, reason: str) -> None:
    q = torch.zeros(1, 4, 2, size, dtype=dtype, device="cuda")

    with pytest.raises(ops.Unsupported, match=reason):
        ops.window_attention(q, q, q, window_size=4, route="fa2-torch")
