"""The function that is timed: the plain run, or a graph replay."""

from dataclasses import replace

import pytest
import torch

from harness.measure import inputs
from harness.records import MeasureSettings
from harness.tests.fake_workloads import good
from harness.workload import Unsupported

GOOD = good("fake", {})
GRAPH = MeasureSettings(graph=True)


@pytest.mark.parametrize(
    ("capturable", "reason"), [(False, "not marked capturable"), (True, "needs a CUDA device")]
)
def test_a_graph_that_cannot_be_made_is_unsupported(
    capturable: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(Unsupported, match=reason):
        inputs.prepare(replace(GOOD, capturable=capturable), GRAPH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_a_replay_that_leaves_an_output_unwritten_is_unsupported(dtype: torch.dtype) -> None:
    written = {"o": torch.ones(4, dtype=dtype), "lse": torch.zeros(2, dtype=dtype)}

    def replays(*names: str) -> dict[str, torch.Tensor]:
        for name in names:
            written[name].fill_(1)
        return written

    inputs.require_written(lambda: replays("o", "lse"))
    with pytest.raises(Unsupported, match="write lse"):
        inputs.require_written(lambda: replays("o"))


@pytest.mark.gpu
def test_a_run_that_waits_for_the_device_cannot_be_captured() -> None:
    x = torch.randn(256, device="cuda")
    workload = replace(GOOD, run=lambda: x * x.sum().item(), capturable=True)

    with pytest.raises(Unsupported, match="cannot be captured"):
        inputs.prepare(workload, GRAPH)


@pytest.mark.gpu
def test_replays_compute_the_same_as_the_run() -> None:
    given = torch.full((4,), 1.0, device="cuda")

    found = inputs.prepare(replace(GOOD, run=lambda: given + 1, capturable=True), GRAPH)
    first = float(found()[0])
    given.mul_(2)

    assert (first, float(found()[0])) == (2.0, 3.0)
