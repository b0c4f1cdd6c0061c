"""NVML with the recorded answers of an H200, and with a real GPU."""

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from harness.errors import ProbeError
from harness.machine import environment, nvml
from harness.machine.gpu_idle import nvml_meter
from harness.machine.nvml import NvmlProbe
from harness.machine.probes import open_probes
from harness.measure import facts as worker_facts
from harness.tests.fake_nvml import UUID, FakeNvml, nvml_error
from harness.tests.fake_runs import H200
from harness.tests.processes import running


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setattr(nvml, "pynvml", fake)
    namespace = tmp_path / "pid"
    namespace.symlink_to(nvml.HOST_PID_NAMESPACE)
    monkeypatch.setattr(nvml, "PID_NAMESPACE", namespace)
    return fake


# --- the list of GPUs --------------------------------------------------------------------


def test_a_gpu_is_described_in_si_units(fake: FakeNvml) -> None:
    (gpu,) = nvml.gpus()

    assert gpu == replace(H200, uuid=UUID, driver="580.159.04", cuda_driver="13.0")
    assert nvml.find(UUID) == gpu
    fake.fails["nvmlDeviceGetEnforcedPowerLimit"] = nvml_error("NOT_SUPPORTED")
    assert nvml.find(UUID) == replace(gpu, power_limit_w=None)
    assert fake.open_sessions == 0


def test_a_machine_without_a_driver_or_a_gpu_is_an_error(fake: FakeNvml) -> None:
    fake.names = []
    with pytest.raises(ProbeError, match="NVML lists no GPU"):
        nvml.gpus()

    fake.fails["nvmlInit"] = nvml_error("LIBRARY_NOT_FOUND")
    with pytest.raises(ProbeError, match="NVML: NVML Shared Library Not Found"):
        nvml.gpus()
    assert fake.open_sessions == 0


def test_every_throttle_reason_of_nvml_has_a_name() -> None:
    named = {
        value
        for name, value in vars(pynvml).items()
        if name.startswith("nvmlClocksThrottleReason") and value and value & (value - 1) == 0
    }

    assert named <= set(nvml.THROTTLE_REASONS)
    assert nvml.throttle_words(0x8004) == ("power cap", "reason 0x8000")


# --- the probe ---------------------------------------------------------------------------


READING = {
    "gpu_utilisation": 0.98,
    "gpu_memory_bytes": 3870097408,
    "gpu_power_w": 117.915,
    "gpu_energy_j": 6500.0,
    "gpu_sm_clock_hz": 405e6,
    "gpu_temperature_c": 31,
    "gpu_throttle_reasons": 0x24,
    "gpu_foreign_processes": 0,
}


def test_a_reading_is_in_si_units(fake: FakeNvml) -> None:
    probe = NvmlProbe(UUID)

    assert probe.read() == READING
    assert probe.unavailable == {}
    probe.close()
    probe.close()
    assert probe.read() == {}, "NVML is closed"
    assert fake.open_sessions == 0


def test_the_power_of_a_gpu_is_a_share_of_its_limit_if_that_is_known(fake: FakeNvml) -> None:
    assert NvmlProbe(UUID).use() == (0.98, 117.915 / 700)
    assert NvmlProbe("GPU-gone").use() == (None, None)
    fake.fails["nvmlDeviceGetEnforcedPowerLimit"] = nvml_error("NOT_SUPPORTED")
    assert NvmlProbe(UUID).use() == (0.98, None)


def test_what_the_gpu_lacks_is_unavailable_and_a_single_failed_reading_is_none(
    fake: FakeNvml,
) -> None:
    fake.fails["nvmlDeviceGetPowerUsage"] = nvml_error("NOT_SUPPORTED")
    lacking = NvmlProbe(UUID)
    fake.fails["nvmlDeviceGetCurrentClocksEventReasons"] = nvml_error("FUNCTION_NOT_FOUND")

    assert lacking.unavailable == {"gpu_power_w": "Not Supported"}
    assert lacking.read().keys() == READING.keys() - {"gpu_power_w"}
    assert lacking.read()["gpu_throttle_reasons"] == 0x4, "an older driver has an older name"

    fake.fails.clear()
    probe = NvmlProbe(UUID)
    fake.fails["nvmlDeviceGetPowerUsage"] = nvml_error("UNKNOWN")
    assert probe.read() == {**READING, "gpu_power_w": None}


def test_without_nvml_or_the_gpu_every_channel_is_unavailable(fake: FakeNvml) -> None:
    (of_cpu,) = open_probes(())
    assert of_cpu.read().keys() == {"cpu_utilisation", "rss_bytes"}
    assert fake.calls == {}

    unknown = NvmlProbe("GPU-gone")
    assert unknown.unavailable.keys() == READING.keys()
    assert "GPU-gone" in unknown.unavailable["gpu_power_w"]
    assert unknown.read() == {}
    unknown.close()
    assert fake.open_sessions == 0

    fake.fails["nvmlInit"] = nvml_error("DRIVER_NOT_LOADED")
    assert NvmlProbe(UUID).unavailable == dict.fromkeys(READING, "Driver Not Loaded")


def test_only_processes_outside_worker_and_parent_are_foreign(fake: FakeNvml) -> None:
    script = """
import os, sys
child = os.fork()
print(child or "child", flush=True)
sys.stdin.read()
"""
    with running(script) as worker, running("input()") as stranger:
        assert worker.stdout is not None
        lines = {worker.stdout.readline().strip() for _ in range(2)}
        child = int((lines - {"child"}).pop())
        probe = NvmlProbe(UUID)
        probe.attach(worker.pid)

        fake.pids = [worker.pid, child, os.getpid()]
        assert probe.read()["gpu_foreign_processes"] == 0

        fake.pids.append(stranger.pid)
        probe.attach(worker.pid)
        assert probe.read()["gpu_foreign_processes"] == 1


def test_in_a_container_foreign_processes_are_unavailable(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NVML lists process ids of the host there, or none: zero would be a guess."""
    namespace = tmp_path / "of-a-container"
    namespace.symlink_to("pid:[4026532756]")
    monkeypatch.setattr(nvml, "PID_NAMESPACE", namespace)

    probe = NvmlProbe(UUID)

    assert "container" in probe.unavailable["gpu_foreign_processes"]
    assert "gpu_foreign_processes" not in probe.read()


@pytest.mark.gpu
def test_a_real_gpu_answers() -> None:
    (gpu, *_) = nvml.gpus()
    assert gpu.uuid == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    probe = NvmlProbe(gpu.uuid)
    probe.attach(os.getpid())

    x = torch.ones(2**28, device="cuda")
    started = time.monotonic()
    while time.monotonic() - started < 1.5:
        x.mul_(1.0)
        torch.cuda.synchronize()
    reading = {name: value for name, value in probe.read().items() if value is not None}
    probe.close()
    facts = worker_facts.describe()
    seen = facts["gpu"]

    assert environment.capture(facts, command=(), repository=None).gpu == gpu
    assert facts["gpu_uuids"][0] == gpu.uuid
    assert (seen["name"], seen["compute_capability"]) == (gpu.name, gpu.compute_capability)
    assert isinstance(facts["torch_settings"]["expandable_segments"], bool)
    assert facts["versions"]["cudnn"].count(".") == 2
    assert probe.unavailable.keys() <= {"gpu_foreign_processes"}
    assert reading["gpu_utilisation"] > 0.5
    assert reading["gpu_memory_bytes"] > x.nbytes
    assert 50 < reading["gpu_power_w"] <= 1.2 * (gpu.power_limit_w or 2000)
    assert 1e8 < reading["gpu_sm_clock_hz"] <= (gpu.max_sm_clock_hz or 1e10)
    assert 10 < reading["gpu_temperature_c"] < 110
    assert reading.get("gpu_foreign_processes", 0) == 0


# --- who uses the GPU between two workers ------------------------------------------------


def test_a_meter_names_processes_memory_and_throttling(fake: FakeNvml) -> None:
    fake.answers["nvmlDeviceGetComputeRunningProcesses"] = lambda device: [
        SimpleNamespace(pid=pid, usedGpuMemory=8 * 10**9) for pid in (os.getpid(), 2**22 + 1)
    ]

    with nvml_meter(UUID) as meter:
        use = meter()

    assert use.used_bytes == 3870097408
    assert use.throttled_by == ("power cap", "software thermal slowdown")
    assert use.processes is not None
    own, gone = use.processes[os.getpid()], use.processes[2**22 + 1]
    assert re.fullmatch(rf"process {os.getpid()} \(.+ of \w+\), 8.00 GB", own)
    assert gone == f"process {2**22 + 1} (name and user cannot be read), 8.00 GB"
    assert fake.open_sessions == 0
