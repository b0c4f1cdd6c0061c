"""The instrument's proof: what it finds right here, and every way in which it must fail."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from harness.analysis.self_test import judge
from harness.cli import main as cli
from harness.cli import run as run_command
from harness.cli.tests.test_cli import SUITE
from harness.machine.cpu import CpuProbe
from harness.machine.nvml import NvmlProbe, gpus
from harness.measure import self_test
from harness.measure.timing import CudaStopwatch, HostStopwatch, TimedStep
from harness.records import Peaks, Phase, Proof, ProofCheck, SelfTestReadings, Telemetry
from harness.runner.launcher import Launcher
from harness.runner.self_test import prove
from harness.store import reader

GPU = Path("/dev/nvidiactl").exists()
PHASES = (
    Phase(name="rest", start_s=1.0, end_s=2.0),
    Phase(name="burn", start_s=2.0, end_s=3.0),
    Phase(name="spin", start_s=3.0, end_s=3.4),
)
CLOCK_HZ = 1.98e9
RIGHT = SelfTestReadings(
    waits_s=(0.004, 0.02),
    host_s=(0.004_01, 0.020_01),
    burn_cpu_s=0.99,
    spin_cycles=(5_000_000, 40_000_000),
    spin_event_s=(5e6 / CLOCK_HZ + 4e-6, 4e7 / CLOCK_HZ + 4e-6),
    spin_host_s=(5e6 / CLOCK_HZ + 3e-5, 4e7 / CLOCK_HZ + 3e-5),
    resident_s=4e-6,
    flushed_s=6e-6,
    peaks=Peaks(flops_per_s={"bf16": 8e14}),
)


def telemetry(**levels: Mapping[str, float]) -> Telemetry:
    """Channels that hold one level in each phase; a reading every 50 ms."""
    t_s = tuple(0.05 * i for i in range(80))
    return Telemetry(
        t_s=t_s,
        channels={
            channel: tuple(
                next((level[p.name] for p in PHASES if p.start_s <= t <= p.end_s), 0.0) for t in t_s
            )
            for channel, level in levels.items()
        },
    )


ON_GPU = telemetry(
    gpu_utilisation={"rest": 0.0, "burn": 1.0, "spin": 1.0},
    gpu_sm_clock_hz={"rest": 345e6, "burn": 1.7e9, "spin": CLOCK_HZ},
)
ON_CPU = telemetry(cpu_utilisation={"rest": 0.01, "burn": 0.98, "spin": 1.0})


def answers(
    readings: SelfTestReadings, seen: Telemetry, *, cuda: bool = True
) -> dict[str, bool | None]:
    return {c.name: c.holds for c in judge(readings, PHASES, seen, cuda=cuda)}


def test_an_instrument_that_reads_right_is_proved() -> None:
    assert answers(RIGHT, ON_GPU) == dict.fromkeys(
        ("host_clock", "cuda_events", "spin_kernel", "gpu_sampler", "l2_flush"), True
    )
    on_cpu = replace(RIGHT, resident_s=None, flushed_s=None)
    assert answers(on_cpu, ON_CPU, cuda=False) == {"host_clock": True, "cpu_sampler": True}


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        pytest.param("host_clock", {"host_s": (0.0042, 0.021)}, id="5 % fast"),
        pytest.param("host_clock", {"host_s": (0.009, 0.025)}, id="5 ms too long each"),
        pytest.param("cuda_events", {"spin_event_s": (2.4e-3, 19.2e-3)}, id="events 5 % off"),
        pytest.param("cuda_events", {"spin_host_s": (1e-5, 2e-5)}, id="not synchronised"),
        pytest.param("cuda_events", {"spin_cycles": None}, id="no spin"),
        pytest.param("spin_kernel", {"spin_cycles": (5_000_000, 30_000_000)}, id="cycles off"),
        pytest.param("l2_flush", {"flushed_s": 4.1e-6}, id="flush does nothing"),
    ],
)
def test_a_wrong_reading_is_refuted(check: str, changes: dict[str, Any]) -> None:
    assert answers(replace(RIGHT, **changes), ON_GPU)[check] is False


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param({"rest": 0.0, "burn": 0.1, "spin": 0.0}, id="blind"),
        pytest.param({"rest": 0.9, "burn": 1.0, "spin": 1.0}, id="busy before"),
        pytest.param({"rest": 0.0, "burn": 0.6, "spin": 0.6}, id="half"),
    ],
)
def test_a_gpu_sampler_that_does_not_see_the_burn_is_refuted(levels: dict[str, float]) -> None:
    assert answers(RIGHT, telemetry(gpu_utilisation=levels))["gpu_sampler"] is False


def test_a_cpu_sampler_is_held_against_the_worker_s_own_account() -> None:
    """On a crowded machine a burn gets half a core, and half a core is then the right answer."""
    half = telemetry(cpu_utilisation={"rest": 0.0, "burn": 0.5, "spin": 0.5})

    crowded = answers(replace(RIGHT, burn_cpu_s=0.5), half, cuda=False)
    blind = answers(RIGHT, half, cuda=False)
    starved = answers(replace(RIGHT, burn_cpu_s=0.1), half, cuda=False)

    assert [a["cpu_sampler"] for a in (crowded, blind, starved)] == [True, False, None]


def test_what_cannot_be_read_is_neither_proved_nor_refuted() -> None:
    missing = Telemetry(unavailable={"gpu_utilisation": "a MIG slice"})

    checks = {c.name: c for c in judge(RIGHT, PHASES, missing, cuda=True)}

    assert checks["gpu_sampler"].holds is None
    assert "a MIG slice" in checks["gpu_sampler"].fact
    assert checks["spin_kernel"].holds is None
    assert Proof(at="", device="", checks=tuple(checks.values())).refuted == ()


@pytest.mark.skipif(GPU, reason="this is the CPU's proof; the GPU's is below")
def test_the_instrument_proves_itself_here() -> None:
    """In a worker, watched by the real probes."""
    probe = CpuProbe()
    with Launcher() as launcher:
        launcher.describe()
        proof = prove(launcher, [probe], None)

    holds = {c.name: c.holds for c in proof.checks}
    assert holds["host_clock"] is True, proof
    assert holds["cpu_sampler"] in (True, None), proof  # None: other tests take the cores
    assert proof.refuted == ()
    assert proof.peaks.flops_per_s["fp32"] > 1e8
    assert proof.peaks.bytes_per_s is not None
    assert proof.peaks.launch_s is None


def test_a_stopwatch_that_runs_fast_is_seen_in_what_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a twentieth: the waits are ended by another clock than the one it reads."""
    read = HostStopwatch.read

    def fast(self: HostStopwatch, run: Any) -> TimedStep:
        true = read(self, run)
        return replace(true, time_s=1.05 * true.time_s)

    monkeypatch.setattr(HostStopwatch, "read", fast)

    waits_s, host_s = self_test._read_waits()

    assert answers(replace(RIGHT, waits_s=waits_s, host_s=host_s), ON_GPU)["host_clock"] is False


def test_a_burn_keeps_the_core_busy_by_its_own_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "BURN_S", 0.1)
    began = time.monotonic()

    used = self_test._burn_cpu()

    assert 0 < used <= time.monotonic() - began + 0.02


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fakes.yaml").write_text(SUITE % "good")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planted(*, holds: bool) -> Any:
    check = ProofCheck(name="host_clock", holds=holds, fact="planted")
    return lambda *_: Proof(at="2026-11-21T07:30:12+00:00", device="cpu", checks=(check,))


def test_nothing_is_measured_with_a_refuted_instrument_and_the_run_can_go_on(
    fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here without a proof, which the report then says."""
    wrong = ProofCheck(name="host_clock", holds=False, fact="planted")
    shown = Proof(at="2026-11-21T07:30:12+00:00", device="cpu", checks=(wrong,))
    monkeypatch.setattr(run_command, "prove", lambda *_: shown)
    refuted = CliRunner().invoke(cli.app, ["run", "fakes.yaml", "--no-report"])
    before = reader.load(Path("reports/runs"), "latest")

    resumed = CliRunner().invoke(cli.app, ["run", "--resume", "latest", "--no-self-test"])

    assert refuted.exit_code == 3
    assert "invalid_environment" in refuted.stdout
    assert (before.measurements, before.ended_at, before.proofs) == ((), "", (shown,))
    assert resumed.exit_code == 0, resumed.output
    after = reader.load(Path("reports/runs"), "latest")
    assert (len(after.proofs), len(after.measurements)) == (2, 4)
    assert after.wall_s is None, "nobody knows how long the first part took"
    (report,) = Path("reports").glob("*.md")
    assert "Skipped (--no-self-test)" in report.read_text()


@pytest.mark.parametrize(
    ("copy_s", "sum_s", "moved"),
    [pytest.param(1.0, 4.0, 2, id="copies"), pytest.param(4.0, 1.0, 1, id="reads")],
)
def test_the_peak_of_memory_is_that_of_copies_or_of_sums(
    copy_s: float, sum_s: float, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that only reads was faster than its floor, by the speed of a copy."""
    times = iter([1.0, copy_s, sum_s])
    monkeypatch.setattr(self_test, "_best_s", lambda _: next(times))

    assert self_test.cpu_peaks().bytes_per_s == moved * self_test.CPU_COPY_BYTES


def test_a_peak_is_the_best_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A floor is a bound: what a hot card keeps up is none."""
    took = iter([5.0, 3.0, 2.0, 4.0, 6.0])

    def read(watch: HostStopwatch, run: object) -> TimedStep:
        at_s = next(took)
        return TimedStep(began_at=0.0, time_s=at_s, host_s=at_s, output=None)

    monkeypatch.setattr(HostStopwatch, "read", read)

    assert self_test._best_s(lambda: None) == 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU here")
def test_the_instrument_proves_itself_on_a_gpu() -> None:
    (gpu, *_) = gpus()
    probes = (NvmlProbe(gpu.uuid), CpuProbe())
    with Launcher() as launcher:
        launcher.describe()
        proof = prove(launcher, probes, gpu)

    assert proof.refuted == (), proof
    assert {c.name for c in proof.checks} == {
        "host_clock",
        "cuda_events",
        "spin_kernel",
        "gpu_sampler",
        "l2_flush",
    }
    assert proof.wall_s < 5
    assert proof.peaks.flops_per_s["bf16"] > 1e14
    assert proof.peaks.launch_s is not None
    assert 5e-7 < proof.peaks.launch_s < 2e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_without_the_flush_the_copy_stays_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a flush that writes nothing leaves both copies equally fast."""
    monkeypatch.setattr(CudaStopwatch, "flush", lambda _: None)

    resident_s, unflushed_s = self_test._read_copies()

    readings = replace(RIGHT, resident_s=resident_s, flushed_s=unflushed_s)
    assert answers(readings, ON_GPU)["l2_flush"] is False
