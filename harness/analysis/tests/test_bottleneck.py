"""What limits a step: a planted cause gives its word."""

from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.recorded import clock_limit
from harness.analysis.roofline import Bottleneck, Limit, bottleneck
from harness.analysis.study import Study
from harness.records import (
    Breakdown,
    CaseSummary,
    Counters,
    Estimate,
    Measurement,
    Outcome,
    Peaks,
    Phase,
    Profile,
    Rank,
    SelfTest,
    Telemetry,
    Use,
)
from harness.tests.fake_runs import case, run, sweep, timed

STEP_S = 0.010
PEAKS = Peaks(launch_s=4e-6, sync_s=2e-5)
REDUCE = Use(name="ncclDevKernel_AllReduce_Sum_bf16", calls=1, time_s=0.6 * STEP_S)
SENT = {"communication_s": REDUCE.time_s}


def found(
    busy: float | None = None,
    *,
    apart: float = 0.0,
    launches: int = 10,
    syncs: int = 0,
    kernels: tuple[Use, ...] = (),
    where: dict[str, Any] | None = None,
    share: float | None = None,
    by: str = "compute",
    nvml: float | None = None,
    **changes: Any,
) -> Bottleneck | None:
    """The limit of a step in which the GPU works for this share, by its profile."""
    one = case({"name": "a"})

    def work(share: float) -> Profile:
        made = Breakdown(step_s=STEP_S, device_busy_s=share * STEP_S, **(where or {}))
        return Profile(kernels=kernels, breakdown=made, steps=2)

    measured: list[Measurement] = [
        replace(
            m,
            profile=None if busy is None else work(busy + apart * (m.process - 1)),
            counters=Counters(kernel_launches=launches, host_syncs=syncs, steps=2),
            samples_s=(STEP_S,) * 20,
            **changes,
        )
        for m in timed(one, STEP_S, telemetry={"gpu_utilisation": nvml} if nvml else None)
    ]
    known = {"step_s": STEP_S, "roofline_share": share}
    metrics = {k: Estimate(value=v, low=v, high=v, n=3, samples=30) for k, v in known.items() if v}
    seen = CaseSummary(case=one, outcome=Outcome.OK, metrics=metrics, roofline_by=by)
    return bottleneck(seen, measured, PEAKS)


def limit(**known: Any) -> Limit | None:
    made = found(**known)
    return made.limit if made else None


@pytest.mark.parametrize(
    ("known", "word"),
    [
        ({}, Limit.NOT_MEASURED),
        ({"busy": 0.3}, Limit.HOST),
        ({"busy": 0.3, "launches": 1000}, Limit.LAUNCHES),
        ({"busy": 0.3, "syncs": 200}, Limit.SYNCS),
        ({"busy": 0.3, "syncs": 100}, Limit.HOST),
        ({"busy": 0.3, "where": {"gap_by_range": {"train.data": 0.6}}}, Limit.DATA),
        ({"busy": 0.3, "where": {"gap_by_range": {"train.database": 0.6}}}, Limit.HOST),
        ({"busy": 0.3, "where": {"host_by_range": {"enumerate(DataLoader)#x": 0.7}}}, Limit.DATA),
        ({"busy": 0.3, "where": {"host_by_range": {"enumerate(DataLoader)#x": 0.5}}}, Limit.HOST),
        ({"busy": 0.98, "kernels": (REDUCE,)}, Limit.COMMUNICATION),
        ({"busy": 0.98, "kernels": (REDUCE, Use(name="gemm", calls=1, time_s=0.01))}, Limit.GPU),
        ({"busy": 0.98, "kernels": (REDUCE,), "where": {**SENT, "exposed_s": 0.0}}, Limit.GPU),
        ({"busy": 0.98, "where": {**SENT, "exposed_s": 0.003}}, Limit.COMMUNICATION),
        ({"busy": 0.85, "apart": 0.1}, Limit.BOTH),  # the mean of 0.75, 0.85 and 0.95
        ({"busy": 0.97}, Limit.GPU),
        ({"busy": 0.97, "share": 0.3}, Limit.BELOW),
        ({"busy": 0.97, "share": 0.7}, Limit.COMPUTE),
        ({"busy": 0.97, "share": 0.7, "by": "bandwidth"}, Limit.BANDWIDTH),
        ({"nvml": 0.3}, Limit.HOST),
        ({"nvml": 0.95, "share": 0.3}, Limit.BELOW),
        ({"busy": 0.3, "nvml": 0.99}, Limit.HOST),
    ],
)
def test_a_step_is_limited_by_what_was_planted(known: dict[str, Any], word: Limit) -> None:
    assert limit(**known) is word


def test_a_step_that_is_one_graph_does_not_wait_for_the_host() -> None:
    known = Profile(breakdown=Breakdown(step_s=STEP_S, device_busy_s=0.3 * STEP_S), steps=2)
    made = run(sweep(n=[1, 7]), lambda c: [replace(m, profile=known) for m in timed(c, STEP_S)])
    made = replace(made, self_tests=(SelfTest(at="", device="", peaks=PEAKS),))
    graph = Counters(steps=2, hidden=("CUDA graph",), host_syncs=600)
    n = {c.case_id: int(c.axes["n"]) for c in made.suite.cases}
    each = ((m, replace(graph, kernel_launches=n[m.case_id])) for m in made.measurements)
    made = replace(made, measurements=tuple(replace(m, counters=of) for m, of in each))
    assert Study(made).waiting == {[*n][1]}


@pytest.mark.parametrize("hot", [0, 1])
def test_the_clock_of_the_slowest_of_several_gpus_limits(hot: int) -> None:
    channels = {}
    for rank, number in enumerate(("", "1")):
        channels[f"gpu{number}_sm_clock_hz"] = (1.0e9 if rank == hot else 1.9e9,) * 3
        channels[f"gpu{number}_throttle_reasons"] = (0x4 if rank == hot else 0x0,) * 3
    seen = Telemetry(t_s=(0.5, 1.0, 1.5), channels=channels)
    phases, ranks = (Phase(name="sampling", start_s=0, end_s=2),), (Rank(rank=0), Rank(rank=1))
    (m,) = timed(case({"name": "a"}), 0.2, processes=1)

    limit = clock_limit([replace(m, ranks=ranks, telemetry=seen, phases=phases)], 1.98e9)

    assert limit is not None
    assert limit.by == "power"
    assert limit.clock_hz == 1.0e9
