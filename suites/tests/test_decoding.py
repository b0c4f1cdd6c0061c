"""The `decode_attention` workload."""

from collections.abc import Mapping

import pytest

from harness.measure import accuracy
from harness.measure.failures import Failed
from harness.records import Scalar
from harness.workload import Unsupported
from nsa import reference
from suites import workloads
from suites.axes import AxisError
from suites.tests.small import OPERATOR, needs_no_gpu

AXES: Mapping[str, Scalar] = {
    **{name: value for name, value in OPERATOR.items() if name not in ("seq_len", "pass")},
    "context": 70,
    "batch": 3,
}


@pytest.mark.parametrize("provider", ["reference", "eager", "dense"])
@pytest.mark.parametrize("context", [1, 70])
def test_a_step_agrees_with_its_definition(provider: str, context: int) -> None:
    workload = workloads.decode_attention(provider, {**AXES, "context": context})

    compared = accuracy.compare(workload)

    assert {t.name for t in compared.tensors} == {"o"} | (
        set() if provider == "dense" else {"selected"}
    )
    accuracy.require_finite_output(workload.run())
    assert workload.effective
    seen = workload.effective()
    assert (seen["context"], seen["batch"], seen["graph"]) == (context, 3, "off")
    assert seen["checked_sequences"] == 2
    assert workload.tokens == 3


def test_a_wrong_selection_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "nsa.routes.eager.top_blocks", lambda i, *a, **kw: reference.top_blocks(-i, *a, **kw)
    )

    with pytest.raises(Failed, match="selected"):
        accuracy.compare(workloads.decode_attention("eager", AXES))


def test_dense_attention_reads_many_times_what_nsa_reads() -> None:
    """Table 4 of the paper: 11.6 times at 64k, which counts what is read of one more key."""
    axes = {**AXES, "batch": 1, "context": 2000}

    dense = workloads.decode_attention("dense", axes)
    nsa = workloads.decode_attention("eager", axes)

    assert dense.bytes
    assert nsa.bytes
    kv = 2 * (16 + 8) * 4  # bytes of one key and value
    q_and_out = 6 * (16 + 8) * 4
    assert dense.bytes == 2000 * kv + q_and_out
    assert nsa.bytes == (499 + 4 * 8 + 16) * kv + q_and_out + 6 * 3 * 4


@needs_no_gpu
@pytest.mark.parametrize(
    ("provider", "axes", "message"),
    [
        ("triton", AXES, "triton: needs"),
        ("dense-split", AXES, "needs tensors on CUDA"),
        ("dense-cudnn", AXES, "needs tensors on CUDA"),
        ("dense", {**AXES, "graph": "on"}, "need an NVIDIA GPU"),
    ],
)
def test_what_cannot_run_here_declines(
    provider: str, axes: Mapping[str, Scalar], message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        workloads.decode_attention(provider, axes)


@pytest.mark.parametrize(
    ("provider", "axes", "message"),
    [
        ("tritn", AXES, "did you mean 'triton'"),
        ("triton", {**AXES, "graph": "yes"}, "graph='yes'"),
        ("eager", {**AXES, "graph": "on"}, "waits for the device"),
        ("triton", {**AXES, "seq_len": 8}, "does not read the axis 'seq_len'"),
        ("triton", {**AXES, "NSA_USE_FA2": 1}, "does not read NSA_USE_FA2"),
    ],
)
def test_a_bad_case_is_refused(provider: str, axes: Mapping[str, Scalar], message: str) -> None:
    with pytest.raises(AxisError, match=message):
        workloads.preflight("decode_attention", provider, axes, {})
