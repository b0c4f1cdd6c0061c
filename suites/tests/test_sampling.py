"""Rows of a long sequence, compared with the definition in parts: right when the code is, against
the whole definition and PyTorch's attention, and wrong when a kernel is."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.measure import accuracy
from harness.measure.failures import Failed
from harness.records import Scalar
from nsa import ops
from nsa.config import NSAConfig
from nsa.flags import Flags
from suites import attention, workloads
from suites.attention_plan import AttentionPlan
from suites.inputs import AttentionInputs
from suites.sampling import ENDS, SPREAD, rows_of
from suites.tests.small import OPERATOR

T = 600
AXES: Mapping[str, Scalar] = {**OPERATOR, "seq_len": T, "dtype": "bf16"}
PROVIDERS = {
    "whole": "gather",
    "select": "gather",
    "compress": "eager",
    "window": "eager",
    "scores": "eager",
    "dense": "dense",
}


@pytest.fixture(autouse=True)
def _sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No definition fits; three rows are computed at a time."""
    monkeypatch.setattr(attention, "REFERENCE_BYTES", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(attention, "SCORES_BYTES", 3 * 8 * 6 * T)


def axes(part: str) -> dict[str, Scalar]:
    one = "forward" if part == "scores" else AXES["pass"]
    return {**AXES, "branch": "whole" if part == "dense" else part, "pass": one}


def build(part: str) -> tuple[AttentionPlan, Any, Tensor, Any]:
    """The plan, its inputs, the selected blocks and the sample of one part."""
    p = AttentionPlan.read(PROVIDERS[part], axes(part), Flags())
    x = attention._draw(p, "cpu")
    return p, x, attention._select(p, x), attention._sample(p, "cpu")


def test_rows_are_spread_over_the_sequence_with_its_ends_and_borders() -> None:
    rows = rows_of(65536, NSAConfig()).tolist()

    assert rows == sorted(set(rows))
    assert len(rows) <= 100
    assert {0, 31, 47, 48, 63, 64, 511, 512, 1023, 1024, 65471, 65472, 65532, 65535} <= set(rows)
    assert all(any(n <= r * SPREAD / 65536 < n + 1 for r in rows) for n in range(SPREAD))
    assert rows_of(ENDS, NSAConfig()).tolist() == list(range(ENDS))


def test_no_gate_is_drawn_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "normal_", lambda x, **_: x.fill_(9.0))
    drawn = AttentionInputs(*(torch.empty(2).bfloat16() for _ in AttentionInputs.__slots__))
    drawn.write(seed=0)
    assert drawn.gates.tolist() == [1 - 2**-8] * 2


@pytest.mark.parametrize("part", PROVIDERS)
def test_rows_in_parts_are_those_of_the_whole_definition(part: str) -> None:
    p, x, blocks, sample = build(part)

    found = attention._reference(p, x, blocks, sample, torch.float64)

    assert sample.rows.numel() < T
    whole = attention._reference(p, x, blocks, None, torch.float64)
    grad, gates = sample.alone(x.grad, x.gates)
    assert gates.max() < 1  # an operator may take their logits
    alone = replace(x, grad=grad, gates=gates)
    keys = attention._reference(p, alone, blocks, None, torch.float64)
    assert found.keys() == whole.keys()
    for name, value in sample.weigh(sample.take(whole), keys).items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-12)


def test_rows_of_dense_attention_are_those_of_pytorch() -> None:
    p, x, blocks, sample = build("dense")
    q, k, v = (t.double().requires_grad_() for t in (x.q, x.k_sel, x.v_sel))
    grad, _ = sample.alone(x.grad, x.gates)
    qh, kh, vh = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(qh, kh, vh, is_causal=True, enable_gqa=True).transpose(1, 2)
    (dq,) = torch.autograd.grad(y, q, x.grad.double(), retain_graph=True)
    dk, dv = torch.autograd.grad(y, (k, v), grad.double())
    expected = sample.weigh(sample.take({"o": y.detach(), "dq": dq}), {"dk_sel": dk, "dv_sel": dv})

    found = attention._reference(p, x, blocks, sample, torch.float64)

    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("part", PROVIDERS)
def test_a_right_kernel_passes_and_the_record_counts_the_rows(part: str) -> None:
    workload = workloads.attention(PROVIDERS[part], axes(part))

    compared = accuracy.compare(workload)

    assert compared.sampled == (len(rows_of(T, build(part)[0].config)), T)
    assert compared.tensors


@pytest.mark.parametrize("part", PROVIDERS)
def test_every_row_and_key_counts_alike(part: str) -> None:
    """Else an error of a late row would be small beside the values of an early one."""
    p, x, blocks, sample = build(part)

    for name, value in attention._reference(p, x, blocks, sample, torch.float64).items():
        if name == "selected":
            continue
        last = value[:, -value.shape[1] // 8 :]
        assert last.abs().amax() > value.abs().amax() / 4, name


# --- planted faults ----------------------------------------------------------------------

Kernel = Callable[..., Tensor]


def last_rows_of_others(honest: Kernel) -> Kernel:
    """As by an offset that overflows: the last rows are those of the beginning."""

    def run(*args: Tensor, **options: Any) -> Tensor:
        y = honest(*args, **options)
        return torch.cat([y[:, :-2], y[:, :2]], 1)

    return run


def one_block_less(honest: Kernel) -> Kernel:
    """Skips the second of the selected blocks, in the second half of the sequence."""

    def run(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, **options: Any) -> Tensor:
        left = torch.cat([blocks[..., :1], blocks[..., 2:], -torch.ones_like(blocks[..., :1])], -1)
        late = torch.arange(T)[:, None, None] >= T // 2
        return honest(q, k, v, torch.where(late, left, blocks), **options)

    return run


def keys_without_the_last_queries(honest: Kernel) -> Kernel:
    """The gradients of keys and values lack what the last queries contribute."""

    def run(q: Tensor, k: Tensor, v: Tensor, *args: Tensor, **options: Any) -> Tensor:
        cut = T - 20
        early = honest(q, k, v, *args, **options)[:, :cut]
        late = honest(q, k.detach(), v.detach(), *args, **options)[:, cut:]
        return torch.cat([early, late], 1)

    return run


def blocks_of_no_worth(honest: Kernel) -> Kernel:
    """The last queries select the best blocks of another query."""

    def run(*args: Tensor, **options: Any) -> Tensor:
        blocks = honest(*args, **options)
        return torch.cat([blocks[:, :-2], blocks[:, -20:-18]], 1)

    return run


FAULTS = [
    ("window", "window_attention", lambda f: lambda *x, **o: f(*x, **{**o, "window_size": 17})),
    ("window", "window_attention", last_rows_of_others),
    ("window", "window_attention", keys_without_the_last_queries),
    ("compress", "compress_attention", lambda f: lambda *x, **o: f(*x, **{**o, "q_start": 1})),
    ("compress", "compress_attention", keys_without_the_last_queries),
    ("select", "selected_attention", one_block_less),
    ("select", "selected_attention", keys_without_the_last_queries),
    ("dense", "dense_attention", last_rows_of_others),
    ("dense", "dense_attention", keys_without_the_last_queries),
    ("scores", "select_blocks", blocks_of_no_worth),
    ("whole", "attention", last_rows_of_others),
]


@pytest.mark.parametrize(("part", "function", "fault"), FAULTS)
def test_a_wrong_kernel_is_caught(
    part: str, function: str, fault: Callable[[Kernel], Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, function, fault(getattr(ops, function)))

    with pytest.raises(Failed, match="error"):
        accuracy.compare(workloads.attention(PROVIDERS[part], axes(part)))
