"""Self-test of the clocks and probes on work of known size, before anything is measured.

A worker waits, keeps the device busy and spins, and reports what its stopwatches read, while the
parent's probes sample it; harness.runner.self_test judges. The worker also measures the peaks of
the device (matrix products, a copy, a launch), from which roofline bounds are computed.

`torch.cuda._sleep(n)` launches one thread that spins for n cycles of the SM's counter; the SM clock
follows from the times of two such launches.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, cast

import torch

from harness.measure.timing import CudaStopwatch, HostStopwatch, Stopwatch, TimedStep
from harness.records import Peaks, SelfTestReadings

WAITS_S = (0.004, 0.02)
WAITS = 5
REST_S = 0.3
GPU_REST_S = 0.7
"""Longer, because NVML's utilisation is an average over a past window."""
BURN_S = 1.0
SPIN_CYCLES = (5_000_000, 40_000_000)
SPINS = 12
GPU_SIDE, CPU_SIDE = 8192, 1024
"""Rows of the square matrices."""
COPY_BYTES, CPU_COPY_BYTES = 2**30, 2**26
BEST_OF, LAUNCHES, SYNCS = 8, 2000, 500
TURNS, COOL_S = 6, 0.01
"""Products at each precision, in turns; before each the GPU cools and its power budget recovers."""


def run(phase: Callable[[str], None]) -> SelfTestReadings:
    """Take all readings; calls `phase` with the name of each phase as it begins."""
    products = _Products() if torch.cuda.is_available() else None
    phase("rest")
    time.sleep(GPU_REST_S if products else REST_S)
    phase("burn")
    began = time.process_time()
    until = time.monotonic() + BURN_S
    while time.monotonic() < until:
        if products:
            products.burn()
    burn_cpu_s = time.process_time() - began
    phase("waits")  # meanwhile the SM clock recovers from the power limit
    short, long = map(read_wait, WAITS_S)
    readings = SelfTestReadings(
        waits_s=(short.output, long.output),
        host_s=(short.time_s, long.time_s),
        burn_cpu_s=burn_cpu_s,
    )
    if products is None:
        phase("peaks")
        return replace(readings, peaks=cpu_peaks())
    phase("spin")
    events, hosts = _read_spins()
    phase("peaks")
    copied = min(COPY_BYTES, torch.cuda.mem_get_info()[0] // 8) // 4 * 4
    return replace(
        readings,
        spin_cycles=SPIN_CYCLES,
        spin_event_s=events,
        spin_host_s=hosts,
        peaks=Peaks(
            flops_per_s=products.reached(),
            bytes_per_s=_bandwidth(CudaStopwatch(), copied, "cuda"),
            launch_s=_least_each_s(partial(cast(Any, torch.cuda._sleep), 0), LAUNCHES),
            sync_s=_least_each_s(torch.zeros((), device="cuda").item, SYNCS),
        ),
    )


def cpu_peaks() -> Peaks:
    """Of a float32 matrix product, and of a copy or a sum, with torch's threads in this process."""
    a, b = (torch.randn(CPU_SIDE, CPU_SIDE) for _ in range(2))
    product_s = _best_s(HostStopwatch(), lambda: torch.mm(a, b))
    return Peaks(
        flops_per_s={"fp32": 2 * CPU_SIDE**3 / product_s},
        bytes_per_s=_bandwidth(HostStopwatch(), CPU_COPY_BYTES, "cpu"),
    )


def read_wait(seconds: float) -> TimedStep:
    """A busy wait by the host stopwatch and, as output, by another system clock: of several, the
    one on which the two differ least, because other processes can only increase the difference."""
    readings = [HostStopwatch().read(lambda: _wait(seconds)) for _ in range(WAITS)]
    return min(readings, key=lambda reading: abs(reading.time_s - reading.output))


def _wait(seconds: float) -> float:
    """Wait actively; returns the time waited."""
    began = now = time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
    while now - began < seconds:
        now = time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
    return now - began


def _bandwidth(watch: Stopwatch, size: int, device: str) -> float:
    """Bytes a second of a copy far larger than the cache, or of a sum: the larger."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copy_s = _best_s(watch, lambda: target.copy_(source))
    return max(2 * size / copy_s, size / _best_s(watch, source.sum))


def _best_s(watch: Stopwatch, compute: Callable[[], object]) -> float:
    """The shortest time, after a first run that is not timed."""
    compute()
    return min(watch.read(compute).time_s for _ in range(BEST_OF))


# --- on a GPU ----------------------------------------------------------------------------


def _read_spins() -> tuple[tuple[float, float], tuple[float, float]]:
    """Medians of both spins, in turns, by both clocks."""
    sleep: Any = torch.cuda._sleep  # untyped in torch
    watch = CudaStopwatch()
    watch.read(lambda: sleep(SPIN_CYCLES[0]))
    readings = [
        [watch.read(partial(sleep, cycles)) for cycles in SPIN_CYCLES] for _ in range(SPINS)
    ]
    short, long = zip(*readings, strict=True)
    return (
        (median(r.time_s for r in short), median(r.time_s for r in long)),
        (median(r.host_s for r in short), median(r.host_s for r in long)),
    )


class _Products:
    """Square matrix products, to keep the device busy and for its peak at each precision."""

    def __init__(self) -> None:
        self._flops = 2 * GPU_SIDE**3
        self._half = [
            torch.randn(GPU_SIDE, GPU_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        ]
        self._out = torch.empty_like(self._half[0])
        torch.mm(*self._half, out=self._out)  # creates the handle and selects the kernel
        torch.cuda.synchronize()

    def burn(self) -> None:
        for _ in range(10):
            torch.mm(*self._half, out=self._out)
        torch.cuda.synchronize()

    def reached(self) -> dict[str, float]:
        """FLOP/s at each precision, on the same numbers."""
        half = self._half
        of: dict[str, tuple[list[torch.Tensor], str]] = {
            "bf16": (half, "ieee"),
            "fp16": ([x.half() for x in half], "ieee"),
            "tf32": ([x.float() for x in half], "tf32"),
        }
        of["fp32"] = of["tf32"][0], "ieee"
        outs, watch = {name: torch.empty_like(x[0]) for name, (x, _) in of.items()}, CudaStopwatch()

        def time_s(name: str) -> float:
            operands, torch.backends.cuda.matmul.fp32_precision = of[name]
            return watch.read(lambda: torch.mm(*operands, out=outs[name])).time_s

        before = torch.backends.cuda.matmul.fp32_precision
        try:
            return {name: self._flops / s for name, s in best_in_turns(of, time_s).items()}
        finally:
            torch.backends.cuda.matmul.fp32_precision = before


def best_in_turns(names: Iterable[str], time_s: Callable[[str], float]) -> dict[str, float]:
    """The shortest time of each. In turns, because a GPU that comes from a load is slower: one
    precision after the other, bf16 was measured hot and fp16 cool, 17 % apart."""
    best = dict.fromkeys(names, math.inf)
    for _ in range(TURNS):
        for name in best:
            time.sleep(COOL_S)
            best[name] = min(best[name], time_s(name))
    return best


def _least_each_s(call: Callable[[], object], times: int) -> float:
    """Time of one call, from many in a row: the least of several means."""
    took = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - began) / times)
    return min(took)
