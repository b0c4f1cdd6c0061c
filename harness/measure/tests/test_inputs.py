"""What is timed: the workload's run, its inputs taking turns, or a replay of it. Never another."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from harness.measure import inputs as arrange
from harness.records import MeasureSettings
from harness.tests.fake_workloads import good
from harness.workload import Unsupported, Workload

GOOD = good("fake", {})
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def arranged(workload: Workload, **settings: Any) -> arrange.Arranged:
    return arrange.arrange(workload, MeasureSettings(**settings))


def test_nothing_asked_leaves_the_run_as_it_is() -> None:
    found = arranged(GOOD)

    assert (found.run, found.own_bytes, found.how) == (GOOD.run, 0, {})


def test_rotated_inputs_take_turns() -> None:
    workload = replace(GOOD, rotated=lambda n: [partial(int, i) for i in range(n)])

    found = arranged(workload, rotate_inputs=3)

    assert [found.run() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert found.how == {"rotated_inputs": 3}


def test_a_workload_that_gives_too_few_inputs_is_a_defect() -> None:
    with pytest.raises(ValueError, match=r"rotated\(3\) gave 1 runs"):
        arranged(replace(GOOD, rotated=lambda n: [GOOD.run]), rotate_inputs=3)


@pytest.mark.parametrize(
    ("workload", "settings", "said"),
    [
        (GOOD, {"rotate_inputs": 2}, "no other inputs to rotate"),
        (GOOD, {"graph": True}, "does not say that its run may be captured"),
        (replace(GOOD, capturable=True), {"graph": True}, "needs a CUDA device"),
    ],
)
def test_what_cannot_be_arranged_is_unsupported_and_nothing_else_is_timed(
    workload: Workload, settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(Unsupported, match=said):
        arranged(workload, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_a_replay_that_writes_nothing_is_not_taken_for_the_run(dtype: torch.dtype) -> None:
    written = {"o": torch.ones(4, dtype=dtype), "lse": torch.zeros(2, dtype=dtype)}

    def replays() -> dict[str, torch.Tensor]:
        for value in written.values():
            value.fill_(1)
        return written

    def replays_half() -> dict[str, torch.Tensor]:
        written["o"].fill_(1)
        return written

    arrange.require_written(replays)
    with pytest.raises(Unsupported, match="does not write lse"):
        arrange.require_written(replays_half)


@pytest.mark.gpu
@gpu
def test_a_replay_computes_what_the_run_computes() -> None:
    x = torch.randn(256, 256, device="cuda")
    workload = replace(GOOD, run=lambda: {"o": x @ x}, capturable=True)

    found = arranged(workload, graph=True)
    x.mul_(2)

    torch.testing.assert_close(found.run()["o"], x @ x)
    assert found.how == {"timed_as": "graph replay"}


@pytest.mark.gpu
@gpu
def test_a_run_that_waits_for_the_device_cannot_be_captured() -> None:
    x = torch.randn(256, device="cuda")
    workload = replace(GOOD, run=lambda: x * x.sum().item(), capturable=True)

    with pytest.raises(Unsupported, match="cannot be captured"):
        arranged(workload, graph=True)


@pytest.mark.gpu
@gpu
def test_inputs_take_turns_in_replays_too() -> None:
    inputs = [torch.full((4,), float(i), device="cuda") for i in range(2)]
    workload = replace(
        GOOD,
        rotated=lambda n: [partial(torch.add, x, 1) for x in inputs],
        capturable=True,
    )

    found = arranged(workload, rotate_inputs=2, graph=True)

    assert [float(found.run()[0]) for _ in range(3)] == [1.0, 2.0, 1.0]
