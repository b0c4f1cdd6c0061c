"""The instruments: NVML with recorded answers, and the CPU with real processes."""

import os
import re
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from harness.errors import ProbeError
from harness.probes import Probe, cpu, nvml, occupancy
from harness.probes.cpu import CpuProbe
from harness.probes.nvml import NvmlProbe
from harness.probes.occupancy import NvmlMeter
from harness.probes.open import open_probes
from harness.records import Gpu

UUID = "GPU-b7bfa17a-3f14-3ac1-4106-fc1938c284ab"
OTHER_UUID = "GPU-b7bf0000-0000-0000-0000-000000000000"


class FakeNvml:
    """pynvml with the answers of an H200; `fails` makes functions raise instead.

    Constants and errors are the real ones, so a name that pynvml lacks fails here as well.
    """

    def __init__(self) -> None:
        self.open_sessions = 0
        self.calls: Counter[str] = Counter()
        self.fails: dict[str, pynvml.NVMLError] = {}
        self.names = ["NVIDIA H200"]
        self.uuids = [UUID, OTHER_UUID]
        self.pids: list[int] = []
        self.answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: self._count(1),
            "nvmlShutdown": lambda: self._count(-1),
            "nvmlSystemGetDriverVersion": lambda: "580.159.04",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
            "nvmlDeviceGetCount": lambda: len(self.names),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
            "nvmlDeviceGetIndex": lambda device: device,
            "nvmlDeviceGetName": lambda device: self.names[device],
            "nvmlDeviceGetUUID": lambda device: self.uuids[device],
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetCudaComputeCapability": lambda device: (9, 0),
            "nvmlDeviceGetEnforcedPowerLimit": lambda device: 700000,
            "nvmlDeviceGetMaxClockInfo": lambda device, clock: 1980,
            "nvmlDeviceGetUtilizationRates": lambda device: SimpleNamespace(gpu=98, memory=40),
            "nvmlDeviceGetPowerUsage": lambda device: 117915,
            "nvmlDeviceGetClockInfo": lambda device, clock: 405,
            "nvmlDeviceGetTemperature": lambda device, sensor: 31,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda device: 0x24,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda device: 0x4,
            "nvmlDeviceGetComputeRunningProcesses": lambda device: [
                SimpleNamespace(pid=pid) for pid in self.pids
            ],
        }

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)
        if not isinstance(real, FunctionType):
            return real

        def call(*args: object) -> object:
            self.calls[name] += 1
            if name in self.fails:
                raise self.fails[name]
            return self.answers[name](*args)

        return call

    def _count(self, change: int) -> None:
        self.open_sessions += change

    def _by_uuid(self, uuid: str) -> int:
        if uuid not in self.uuids[: len(self.names)]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.uuids.index(uuid)

    def _memory(self, device: int, version: int | None = None) -> SimpleNamespace:
        used = 3870097408 + (0 if version == pynvml.nvmlMemory_v2 else 644939776)
        return SimpleNamespace(total=150754820096, used=used)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setattr(nvml, "pynvml", fake)
    namespace = tmp_path / "pid"
    namespace.symlink_to(nvml.HOST_PID_NAMESPACE)
    monkeypatch.setattr(nvml, "PID_NAMESPACE", namespace)
    return fake


def nvml_error(code: str) -> pynvml.NVMLError:
    return pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))


@contextmanager
def running(script: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A Python process of its own; killed, with its pipes closed, at the end."""
    process = subprocess.Popen(
        [sys.executable, "-SEc", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == line


# --- the list of GPUs --------------------------------------------------------------------


def test_a_gpu_is_described_in_si_units(fake: FakeNvml) -> None:
    (gpu,) = nvml.gpus({})

    assert gpu == Gpu(
        name="NVIDIA H200",
        uuid=UUID,
        index=0,
        memory_bytes=150754820096,
        driver="580.159.04",
        cuda_driver="13.0",
        compute_capability="9.0",
        power_limit_w=700.0,
        max_sm_clock_hz=1.98e9,
    )
    assert nvml.find(UUID) == gpu
    assert fake.open_sessions == 0


def test_what_a_gpu_does_not_report_is_none(fake: FakeNvml) -> None:
    fake.fails["nvmlDeviceGetEnforcedPowerLimit"] = nvml_error("NOT_SUPPORTED")

    assert nvml.find(UUID).power_limit_w is None


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1]),
        ("1,0", [1, 0]),
        (" 1 ", [1]),
        ("1,7,0", [1]),  # CUDA stops at the first it cannot place
        (OTHER_UUID, [1]),
        ("GPU-b7bfa", [0]),
    ],
)
def test_the_gpus_are_those_cuda_would_show(
    fake: FakeNvml, setting: str | None, expected: list[int]
) -> None:
    fake.names = ["NVIDIA H200", "NVIDIA H200"]

    found = nvml.gpus({} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})

    assert [gpu.index for gpu in found] == expected


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("", "hides every GPU"),
        ("-1", "hides every GPU"),
        ("GPU-b7bf", "hides every GPU"),  # begins two UUIDs
        ("MIG-41b3", "MIG slice MIG-41b3"),
    ],
)
def test_no_visible_gpu_is_an_error_with_the_reason(fake: FakeNvml, setting: str, why: str) -> None:
    fake.names = ["NVIDIA H200", "NVIDIA H200"]

    with pytest.raises(ProbeError, match=why):
        nvml.gpus({"CUDA_VISIBLE_DEVICES": setting})


def test_indices_of_unlike_gpus_need_the_order_of_the_bus(fake: FakeNvml) -> None:
    """CUDA's 0 is the fastest, NVML's 0 the first on the bus: the wrong card would be read."""
    fake.names = ["NVIDIA T4", "NVIDIA H200"]

    with pytest.raises(ProbeError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        nvml.gpus({"CUDA_VISIBLE_DEVICES": "0"})

    by_bus = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [gpu.name for gpu in nvml.gpus(by_bus)] == ["NVIDIA T4"]


def test_a_machine_without_a_driver_says_so(fake: FakeNvml) -> None:
    fake.fails["nvmlInit"] = nvml_error("LIBRARY_NOT_FOUND")

    with pytest.raises(ProbeError, match="NVML: NVML Shared Library Not Found"):
        nvml.gpus({})


def test_a_driver_without_a_gpu_says_so(fake: FakeNvml) -> None:
    fake.names = []

    with pytest.raises(ProbeError, match="NVML lists no GPU"):
        nvml.gpus({})
    assert fake.open_sessions == 0


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0, ()),
        (0x1, ("GPU idle",)),
        (0x64, ("power cap", "software thermal slowdown", "hardware thermal slowdown")),
        (0x8000, ("reason 0x8000",)),
    ],
)
def test_throttle_reasons_in_words(mask: int, words: tuple[str, ...]) -> None:
    assert nvml.throttle_words(mask) == words


def test_every_reason_nvml_names_has_a_word() -> None:
    named = {
        value
        for name, value in vars(pynvml).items()
        if name.startswith("nvmlClocksThrottleReason") and value and value & (value - 1) == 0
    }

    assert named <= set(nvml.THROTTLE_REASONS)


# --- the NVML probe ----------------------------------------------------------------------


def test_a_reading_is_in_si_units(fake: FakeNvml) -> None:
    probe = NvmlProbe(UUID)

    assert probe.read() == {
        "gpu_utilisation": 0.98,
        "gpu_memory_bytes": 3870097408,
        "gpu_power_w": 117.915,
        "gpu_sm_clock_hz": 405e6,
        "gpu_temperature_c": 31,
        "gpu_throttle_reasons": 0x24,
        "gpu_foreign_processes": 0,
    }
    assert probe.unavailable == {}
    probe.close()
    probe.close()
    assert fake.open_sessions == 0


def test_a_channel_the_gpu_lacks_is_unavailable_with_nvmls_reason(fake: FakeNvml) -> None:
    fake.fails["nvmlDeviceGetPowerUsage"] = nvml_error("NOT_SUPPORTED")

    probe = NvmlProbe(UUID)

    assert probe.unavailable == {"gpu_power_w": "Not Supported"}
    assert set(probe.read()) == set(nvml.CHANNELS) - {"gpu_power_w"}


def test_a_single_failure_is_none_and_passes(fake: FakeNvml) -> None:
    probe = NvmlProbe(UUID)

    fake.fails["nvmlDeviceGetPowerUsage"] = nvml_error("UNKNOWN")
    failed = probe.read()
    fake.fails.clear()

    assert failed["gpu_power_w"] is None
    assert failed["gpu_temperature_c"] == 31
    assert probe.read()["gpu_power_w"] == 117.915


def test_an_older_driver_is_asked_by_the_older_name(fake: FakeNvml) -> None:
    fake.fails["nvmlDeviceGetCurrentClocksEventReasons"] = nvml_error("FUNCTION_NOT_FOUND")

    assert NvmlProbe(UUID).read()["gpu_throttle_reasons"] == 0x4


def test_without_nvml_every_channel_says_why(fake: FakeNvml) -> None:
    fake.fails["nvmlInit"] = nvml_error("DRIVER_NOT_LOADED")

    assert NvmlProbe(UUID).unavailable == dict.fromkeys(nvml.CHANNELS, "NVML: Driver Not Loaded")


def test_without_a_gpu_every_channel_says_why(fake: FakeNvml) -> None:
    probe = NvmlProbe(None, why="torch was built without CUDA")

    assert probe.unavailable == dict.fromkeys(nvml.CHANNELS, "torch was built without CUDA")
    assert probe.read() == {}
    probe.close()
    assert fake.calls == {}, "NVML is not even asked"


def test_a_uuid_nvml_does_not_know_is_no_reading_of_another_gpu(fake: FakeNvml) -> None:
    probe = NvmlProbe("GPU-gone")

    assert probe.unavailable["gpu_power_w"] == "NVML knows no GPU GPU-gone: Not Found"
    probe.close()
    assert fake.open_sessions == 0


def test_the_worker_its_children_and_we_are_not_foreign(fake: FakeNvml) -> None:
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


def test_foreign_processes_are_counted_once_a_second(fake: FakeNvml) -> None:
    probe = NvmlProbe(UUID)
    probe.attach(1)
    before = fake.calls["nvmlDeviceGetComputeRunningProcesses"]

    for _ in range(20):
        probe.read()

    assert fake.calls["nvmlDeviceGetComputeRunningProcesses"] == before + 1


def test_a_container_cannot_tell_who_is_foreign(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There NVML lists the host's process ids, or none: zero would be a guess."""
    namespace = tmp_path / "of-a-container"
    namespace.symlink_to("pid:[4026532756]")
    monkeypatch.setattr(nvml, "PID_NAMESPACE", namespace)

    probe = NvmlProbe(UUID)

    assert "container" in probe.unavailable["gpu_foreign_processes"]
    assert "gpu_foreign_processes" not in probe.read()


@pytest.mark.gpu
def test_a_real_gpu_answers() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
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
    started = time.monotonic()
    for _ in range(100):
        probe.read()
    cost_s = (time.monotonic() - started) / 100
    probe.close()

    assert probe.unavailable.keys() <= {"gpu_foreign_processes"}
    assert reading["gpu_utilisation"] > 0.5
    assert reading["gpu_memory_bytes"] > x.nbytes
    assert 50 < reading["gpu_power_w"] <= 1.2 * (gpu.power_limit_w or 2000)
    assert 1e8 < reading["gpu_sm_clock_hz"] <= (gpu.max_sm_clock_hz or 1e10)
    assert 10 < reading["gpu_temperature_c"] < 110
    assert reading.get("gpu_foreign_processes", 0) == 0
    assert cost_s < 1e-3


# --- the CPU probe -----------------------------------------------------------------------

BURN = """
import sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
"""


def watch(probe: CpuProbe, process: "subprocess.Popen[str]", until: str) -> float:
    """Core seconds the probe saw until the process printed a line; tells it to begin."""
    assert process.stdin is not None
    used_s, before = 0.0, time.monotonic()
    process.stdin.write("go\n")
    process.stdin.flush()
    done = False
    while not done:
        done = _readable(process)
        time.sleep(0.02)
        cores = probe.read()["cpu_utilisation"]
        now = time.monotonic()
        assert cores is not None
        assert cores >= 0
        used_s += cores * (now - before)
        before = now
    wait_for(process, until)
    return used_s


def _readable(process: "subprocess.Popen[str]") -> bool:
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], 0)[0])


def test_cpu_time_is_counted_whole() -> None:
    """Summed over readings, so that a busy test machine changes nothing."""
    script = (
        BURN + "print('up', flush=True); input(); burn(0.4); print('done', flush=True); input()"
    )
    with running(script) as process:
        wait_for(process, "up")
        probe = CpuProbe()
        probe.attach(process.pid)

        used_s = watch(probe, process, "done")

    assert used_s == pytest.approx(0.4, abs=0.06)


def test_children_that_come_and_go_are_counted() -> None:
    """More often than the family is searched for: most are never seen alive."""
    script = (
        BURN
        + """
import os
print('up', flush=True); input()
for _ in range(4):
    child = os.fork()
    if not child:
        burn(0.1)
        os._exit(0)
    os.waitpid(child, 0)
print('done', flush=True); input()
"""
    )
    with running(script) as process:
        wait_for(process, "up")
        probe = CpuProbe()
        probe.attach(process.pid)

        used_s = watch(probe, process, "done")

    assert used_s == pytest.approx(0.4, abs=0.08)


def test_cpu_time_never_runs_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that ignores SIGCHLD never learns its child's time: the tree's total falls."""
    monkeypatch.setattr(cpu, "REFRESH_S", 0.0)
    script = (
        BURN
        + """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print('up', flush=True); input()
if not os.fork():
    burn(0.3)
    os._exit(0)
try:
    os.wait()
except ChildProcessError:
    print('done', flush=True); input()
"""
    )
    with running(script) as process:
        wait_for(process, "up")
        probe = CpuProbe()
        probe.attach(process.pid)

        used_s = watch(probe, process, "done")  # asserts that no reading is negative

    assert used_s > 0.2


def test_memory_of_children_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "REFRESH_S", 0.0)
    script = """
import os, sys
if os.fork():
    os.wait()
else:
    held = bytearray(os.urandom(1)) * 60_000_000
    print('up', flush=True)
    sys.stdin.read()
"""
    with running(script) as process:
        wait_for(process, "up")
        probe = CpuProbe()
        probe.attach(process.pid)

        reading = probe.read()["rss_bytes"]

    assert reading is not None
    assert reading > 60e6


def test_a_dead_worker_reads_as_none() -> None:
    nothing = {"cpu_utilisation": None, "rss_bytes": None}
    probe = CpuProbe()
    assert probe.read() == nothing, "not attached yet"
    with running("print('up', flush=True); input()") as process:
        wait_for(process, "up")
        probe.attach(process.pid)
        assert probe.read()["rss_bytes"]

        process.kill()
        deadline = time.monotonic() + 5
        while probe.read() != nothing and time.monotonic() < deadline:
            time.sleep(0.01)

        assert probe.read() == nothing, "a zombie, not waited for"
    assert probe.read() == nothing
    probe.attach(process.pid)
    assert probe.read() == nothing, "attached too late"


def test_attach_begins_anew() -> None:
    idle = "print('up', flush=True); input()"
    busy = BURN + "burn(0.3); print('up', flush=True); input()"
    with running(busy) as first, running(idle) as second, running(busy) as third:
        probe = CpuProbe()
        for process in (first, second, third):
            wait_for(process, "up")
            probe.attach(process.pid)
            time.sleep(0.05)

            reading = probe.read()

            assert reading["cpu_utilisation"] == pytest.approx(0, abs=0.4)
            own = psutil.Process(process.pid).memory_info().rss
            assert reading["rss_bytes"] == pytest.approx(own, rel=0.1)


def test_a_reading_is_cheap_enough_for_twenty_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    search = psutil.Process.children

    def counted(process: psutil.Process, *, recursive: bool) -> list[psutil.Process]:
        searches.append(process)
        return search(process, recursive=recursive)

    monkeypatch.setattr(psutil.Process, "children", counted)
    probe = CpuProbe()
    probe.attach(os.getpid())
    before_s = time.process_time()

    for _ in range(100):
        probe.read()

    assert (time.process_time() - before_s) / 100 < 0.0025  # 5 % of a core
    assert len(searches) <= 2, "the whole machine is searched only now and then"


# --- together ----------------------------------------------------------------------------


def test_the_probes_cover_every_channel_of_the_telemetry() -> None:
    opened: tuple[Probe, ...] = open_probes(None, why="because")

    channels = {name for probe in opened for name in (*probe.unavailable, *probe.read())}

    assert channels == {*nvml.CHANNELS, "cpu_utilisation", "rss_bytes"}
    assert {why for probe in opened for why in probe.unavailable.values()} == {"because"}


# --- who uses the GPU between two workers --------------------------------------------------


@pytest.fixture
def occupied(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(occupancy, "pynvml", fake)
    fake.answers["nvmlDeviceGetComputeRunningProcesses"] = lambda device: [
        SimpleNamespace(pid=pid, usedGpuMemory=8 * 10**9) for pid in fake.pids
    ]
    return fake


def test_a_meter_names_processes_memory_and_throttling(occupied: FakeNvml) -> None:
    occupied.pids = [os.getpid(), 2**22 + 1]

    with NvmlMeter(UUID) as meter:
        use = meter.use()

    assert use.used_bytes == 3870097408
    assert use.throttled_by == ("power cap", "software thermal slowdown")
    assert use.processes is not None
    assert re.fullmatch(
        rf"process {os.getpid()} \(.+ of \w+\), 8.00 GB", use.processes[os.getpid()]
    )
    assert use.processes[2**22 + 1] == (
        f"process {2**22 + 1} (of which nothing can be read), 8.00 GB"
    )
    assert occupied.open_sessions == 0


def test_a_meter_leaves_open_what_it_cannot_read(
    occupied: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a container NVML's process ids are not ours: nobody is listed, which is not nobody."""
    monkeypatch.setattr(nvml, "PID_NAMESPACE", tmp_path / "absent")
    occupied.fails["nvmlDeviceGetMemoryInfo"] = nvml_error("NOT_SUPPORTED")

    with NvmlMeter(UUID) as meter:
        use = meter.use()

    assert (use.used_bytes, use.processes) == (None, None)


def test_a_meter_of_no_gpu_is_an_error_and_closes_nvml(occupied: FakeNvml) -> None:
    with pytest.raises(ProbeError, match="NVML knows no GPU"):
        NvmlMeter("GPU-absent")

    assert occupied.open_sessions == 0
