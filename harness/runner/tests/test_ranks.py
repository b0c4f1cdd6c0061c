"""The ranks of a program as the parent sees them: their GPUs, and the one that hangs."""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

from harness.errors import ProbeError
from harness.machine import gpu_lock, nvml
from harness.machine.nvml import NvmlProbe
from harness.machine.probes import open_probes
from harness.records import Clock, Measurement, Outcome, Phase, Program, Rank
from harness.runner import evidence, joined, rig, telemetry
from harness.runner.forkserver import Worker
from harness.tests.fake_nvml import OTHER_UUID, UUID, FakeNvml
from harness.tests.small_run import ENVIRONMENT
from harness.tests.workers import make_case, make_suite

AT = 100.0
GRADIENTS = evidence.ThreadStack(("_engine_run_backward (graph.py:865)", "backward (_tensor.py:1)"))
DATA = evidence.ThreadStack(("read (data.py:7)",))
ON = replace(make_case("two"), program=Program(argv=("x",), world_size=2))


def test_every_gpu_of_a_case_is_read_and_each_rank_gets_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, clock = FakeNvml(), SimpleNamespace(now=AT)
    fake.names *= 2
    fake.answers["nvmlDeviceGetUtilizationRates"] = lambda d: SimpleNamespace(gpu=(100, 30)[d])
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(nvml, "pynvml", fake)
    monkeypatch.setattr(telemetry, "time", clock)
    probes = open_probes(nvml.gpus())
    worker = cast("Worker", SimpleNamespace(pid=os.getpid(), launched_at=AT))
    recorder = telemetry.Recorder(telemetry.of_case(probes, ON), worker)
    for _ in range(40):
        clock.now += telemetry.PROBE_INTERVAL_S
        recorder.read_if_due()
    seen = recorder.telemetry()
    phases = (Phase(name="sampling", start_s=0.0, end_s=2.0),)
    m = Measurement(
        case_id="two", process=0, outcome=Outcome.OK, clock=Clock.HOST, samples_s=(1.0,),
        ranks=(Rank(rank=0), Rank(rank=1)), telemetry=seen, phases=phases,
    )  # fmt: skip

    found = [joined.with_gpu(m, rank) for rank in m.ranks]

    assert [r.gpu_utilisation for r in found] == [1.0, pytest.approx(0.3)]
    assert [r.gpu_power_w for r in found] == [pytest.approx(117.915)] * 2
    assert set(seen.channels) > {"gpu_utilisation", "gpu1_utilisation", "gpu1_sm_clock_hz"}
    fake.answers["nvmlDeviceGetUtilizationRates"] = lambda d: SimpleNamespace(gpu=(0, 100)[d])
    assert telemetry.Recorder(probes, worker).sample().gpu_utilisation == 1.0, "rank 1 waits"
    assert telemetry.of_case(probes, make_case("one")) == (probes[0], probes[-1])


def test_a_run_with_ranks_locks_and_reads_their_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake, check = FakeNvml(), Mock()
    fake.names *= 2
    monkeypatch.setattr(nvml, "pynvml", fake)
    monkeypatch.setattr(gpu_lock, "FOLDER", tmp_path)
    monkeypatch.setattr(rig, "nvml_meter", nullcontext)
    monkeypatch.setattr(rig, "IdleCheck", check)
    here = replace(ENVIRONMENT, gpu=nvml.gpus()[0])
    monkeypatch.setattr("harness.machine.environment.capture", lambda *_, **__: here)

    facts = {"torch_settings": {"device": "cuda"}, "gpu_uuids": [UUID, OTHER_UUID]}

    with rig.Rig(say=print) as own:
        own.launcher = Mock(describe=lambda: facts)
        own.describe(make_suite(ON), command=(), repository=None)
        own.observe(here)

        assert [p.uuid for p in own.probes if isinstance(p, NvmlProbe)] == [UUID, OTHER_UUID]
        assert check.call_args.args == (UUID, OTHER_UUID)
        with pytest.raises(ProbeError):
            gpu_lock.GpuLock(OTHER_UUID)
    gpu_lock.GpuLock(OTHER_UUID)  # is free again


@pytest.mark.parametrize(
    ("steps", "stacks", "rank"),
    [
        ((5, 5), {0: GRADIENTS, 1: DATA}, 1),
        ((5, 5), {0: DATA, 1: GRADIENTS}, 0),
        ((5, 4), {0: DATA, 1: GRADIENTS}, 1),  # by the steps first
        ((5, 5), {0: GRADIENTS, 1: GRADIENTS}, None),
        ((5, 5), {0: DATA, 1: DATA}, None),
        ((), {}, None),
    ],
)
def test_the_rank_for_which_the_others_wait_is_named(
    steps: tuple[int, ...], stacks: dict[int, evidence.ThreadStack], rank: int | None
) -> None:
    found = evidence.behind(steps, stacks)

    assert (found.rank if found else None) == rank
