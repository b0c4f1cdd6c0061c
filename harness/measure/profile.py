"""Counters and profile of a few steps after the last sample: the profiler's hooks stay in the
driver, all is compiled and tuned by then, so that steps can be exactly alike, and the known length
of a step shows whether the profile fits into the time left.
"""

import gc
import gzip
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile, record_function

from harness.measure import compiled
from harness.measure.counters import StepCount, counting
from harness.measure.profile_events import DRAIN, STEP, Event, EventKind, Trace
from harness.records import (
    COUNTERS,
    MAX_USES,
    SAME_STEP,
    Breakdown,
    Counters,
    Profile,
    Use,
    by_range,
)

MAX_STEP_S = 30.0
"""A longer step is not counted."""
LONG_STEP_S = 1.0
"""Of a longer step only one is counted and profiled."""
PROFILE_S = 0.1
"""Time to fill with profiled steps."""
MAX_PROFILED_STEPS = 20
MORE_STEPS = 6
"""Steps that are counted beyond two, if these two differ."""
MAX_OPERATORS = 4_000
"""Operators of all profiled steps, if two steps have fewer."""
TOO_MANY_OPERATORS = 300_000
"""With more operators a step, a profile takes minutes and gigabytes."""
SLOWER = 4.0
"""Assumed slowdown of a counted or profiled step."""
OPERATOR_S = 0.25e-3
"""Assumed time to evaluate the profile of a call of an operator: twice that of an H200's host."""
SWITCHED_OFF = "switched off (measure.profile)"

Result = TypeVar("Result")

_RUNTIME = re.compile(r"cu(da)?[A-Z]\w*")
_OF_THE_PROFILER = re.compile(
    r"Activity Buffer Request|Buffer Flush|Command Buffer Full|Instrumentation"
    r"|Lazy Function Loading|Resource|Runtime Triggered Module Loading"
)
"""Events of the profiler's own work."""

NO_GPU = "no GPU"
NO_CUPTI = "the profiler saw no call of CUDA (CUPTI is absent, in use or not permitted)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Counters and profile, and the names of all kernels and operators, most time first."""

    counters: Counters
    profile: Profile
    kernels: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Which steps to count and profile; `progress` is called after each."""

    step_s: float
    time_left_s: float
    profiling: bool = True
    """Whether to profile, or only to count operators."""
    profile_s: float = PROFILE_S
    """Time to fill with profiled steps; at least two are profiled."""
    more_steps: int = MORE_STEPS
    """Steps to count beyond two, if these differ, within a quarter of the time left."""
    progress: Callable[[], None] = lambda: None
    trace: str = ""
    """File for a Chrome trace of the profiled steps, beside the log; empty for none."""
    unreplayed: Callable[[], Any] | None = None
    """As of Workload; run twice here."""


def take(run: Callable[[], Any], ask: ProfileRequest) -> StepProfile:
    """Count and profile a few steps of `run`, which is warm."""
    return _driven(requests(ask), run)


def _driven(steps: Generator[None, None, Result], run: Callable[[], Any]) -> Result:
    """Run the steps that a generator asks for; what it returns."""
    output = None
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: Result = done.value
            return result
        del output  # so that only one output is alive at a time
        output = run()


def requests(ask: ProfileRequest) -> Generator[None, None, StepProfile]:
    """Count and profile steps that the caller runs: one between each yield and the next resumption,
    all in one thread."""
    began = time.monotonic()
    step_s = ask.step_s
    needed_s = SLOWER * step_s * (2.5 if step_s > LONG_STEP_S else 5)  # with a quarter to spare
    if why := too_long(step_s, needed_s, ask.time_left_s):
        return without_profile(why)
    gc.collect()
    counted: list[StepCount] = []
    wanted = 1 if step_s > LONG_STEP_S else 2
    while len(counted) < wanted:
        with counting() as step:
            yield
        counted.append(step)
        ask.progress()
        if step != counted[0] and time.monotonic() - began < ask.time_left_s / 4:
            wanted = 2 + ask.more_steps
    dispatched = counted[0].dispatched_ops
    why = "" if ask.profiling else SWITCHED_OFF
    if ask.profiling and dispatched > TOO_MANY_OPERATORS:
        why = f"a step of {dispatched:,} operators is too large to profile"
    count = _steps(step_s, dispatched, ask.profile_s)
    needed_s = count * (SLOWER * step_s + OPERATOR_S * dispatched)
    if why := why or too_long(step_s, needed_s, ask.time_left_s - (time.monotonic() - began)):
        return StepProfile(
            counters=_counters(counted, None, why),
            profile=Profile(skipped=why, wall_s=time.monotonic() - began),
        )
    seen = yield from _profiled(count, ask.progress, ask.trace)
    no_kernels = "" if seen.sees_the_gpu else NO_CUPTI
    if not torch.cuda.is_available():
        no_kernels = NO_GPU
    kernels, operators = () if no_kernels else seen.kernels(), seen.operators()
    sent_s, exposed_s = (0.0, 0.0) if no_kernels else seen.communication()
    seen_calls = [
        sorted(f"{use.name} {use.where} {use.calls:g}" for use in uses)
        for uses in (kernels, operators)
    ]
    own = compiled.kernels()
    fingerprint, ranges = sha256(repr(seen_calls).encode()).hexdigest()[:16], ""
    if kernels and ask.unreplayed:
        kernels, ranges = _with_ranges(kernels, ask.unreplayed)
    return StepProfile(
        counters=_counters(counted, seen, no_kernels),
        kernels=_names(kernels),
        operators=_names(operators),
        profile=Profile(
            kernels=kernels[:MAX_USES],
            operators=operators[:MAX_USES],
            fingerprint=fingerprint,
            compiled=own,
            unknown=compiled.unknown(_names(kernels), own)[:MAX_USES],
            breakdown=Breakdown(
                step_s=step_s,
                communication_s=sent_s or None,
                exposed_s=exposed_s,
                device_busy_s=None if no_kernels else seen.busy_s(),
                gap_by_range={} if no_kernels else seen.gap_by_range(),
                host_by_range=seen.host_by_range(),
                kernels_by_range=by_range(kernels),
                ranges=ranges,
            ),
            steps=len(seen.windows),
            wall_s=time.monotonic() - began,
            no_kernels=no_kernels,
        ),
    )


def without_profile(why: str) -> StepProfile:
    """Nothing was counted or profiled, for this reason."""
    unknown = Counters(unknown=dict.fromkeys(COUNTERS, why))
    return StepProfile(counters=unknown, profile=Profile(skipped=why))


def _names(uses: Sequence[Use]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(use.name for use in uses))


def too_long(step_s: float, needed_s: float, left_s: float) -> str:
    """Why steps are not counted; empty if they are."""
    if step_s > MAX_STEP_S:
        return f"one step takes {step_s:.3g} s, over {MAX_STEP_S:g} s"
    if needed_s > left_s:
        left = f"{max(0.0, left_s):.3g} s are left until timeout_s"
        return f"it may take {needed_s:.3g} s, and {left}"
    return ""


def _steps(step_s: float, operators: int, profile_s: float) -> int:
    """Steps to profile: at least two, unless one is long."""
    if step_s > LONG_STEP_S:
        return 1
    fill = int(profile_s / step_s)
    affordable = MAX_OPERATORS // max(1, operators)
    return max(2, min(fill, affordable, MAX_PROFILED_STEPS))


def _profiled(
    steps: int, progress: Callable[[], None], trace: str = ""
) -> Generator[None, None, Trace]:
    on_gpu, was_enabled = torch.cuda.is_available(), gc.isenabled()
    device = "cuda" if on_gpu else None
    gc.disable()
    try:
        with profile(use_kineto=True, use_device=device, profile_memory=not on_gpu) as profiler:
            for _ in range(steps):
                with record_function(STEP):
                    yield
                with record_function(DRAIN):
                    if on_gpu:
                        torch.cuda.synchronize()
                progress()
    finally:
        if was_enabled:
            gc.enable()
    if trace:
        _write_trace(profiler, Path(trace))
    return Trace(_events(profiler))


def _with_ranges(
    replayed: tuple[Use, ...], unreplayed: Callable[[], Any]
) -> tuple[tuple[Use, ...], str]:
    """The kernels of a graph with the ranges of the same step without replay, and how, or why not:
    it needs its memory a second time."""
    try:
        unreplayed()  # allocates
        torch.cuda.synchronize()
        seen = _driven(_profiled(1, lambda: None), unreplayed)
    except torch.OutOfMemoryError:
        return replayed, "a step without replay does not fit the memory"
    return share_among(seen.kernels(), replayed)


def share_among(launched: Sequence[Use], replayed: Sequence[Use]) -> tuple[tuple[Use, ...], str]:
    """Replayed kernels with the ranges of those that were launched one by one, and what differs:
    the time of a name is shared among its ranges as it was there, if it ran as often."""
    calls, times = (defaultdict[str, list[float]](lambda: [0.0, 0.0]) for _ in range(2))
    for i, uses in enumerate((replayed, launched)):
        for use in uses:
            calls[use.name][i] += use.calls
            times[use.name][i] += use.time_s
    odd = sorted(name for name, (graph, alone) in calls.items() if graph != alone)
    shared = [use for use in replayed if use.name in odd]
    for use in launched:
        if use.name not in odd:
            graph_s, alone_s = times[use.name]
            shared.append(replace(use, time_s=graph_s * use.time_s / (alone_s or 1.0)))
    but = f", but for {len(odd)} that replay otherwise: {', '.join(odd[:3])}" if odd else ""
    return tuple(sorted(shared, key=lambda use: -use.time_s)), SAME_STEP + but


def _write_trace(profiler: profile, file: Path) -> None:
    """Write the Chrome trace, compressed, to a file whose name ends with `.gz`."""
    whole = file.with_suffix("")
    profiler.export_chrome_trace(str(whole))
    with whole.open("rb") as written, gzip.open(file, "wb", compresslevel=1) as compressed:
        shutil.copyfileobj(written, compressed)
    whole.unlink()


def _events(profiler: profile) -> Iterator[Event]:
    results: Any = profiler.kineto_results
    for e in results.events():
        kind, start_ns = _kind(e, e.name()), e.start_ns()
        if kind is not None:
            ids = e.correlation_id(), e.linked_correlation_id(), e.sequence_nr(), e.fwd_thread_id()
            end_ns = start_ns + e.duration_ns()
            yield Event(kind, e.name(), start_ns, end_ns, e.start_thread_id(), *ids)


def _kind(e: Any, name: str) -> EventKind | None:
    if name == "[memory]":
        return EventKind.MEMORY if e.nbytes() > 0 else None  # else it was freed
    if name.startswith("aten::"):
        return EventKind.OPERATOR
    if e.device_type() != DeviceType.CPU:
        if e.is_user_annotation():
            return None  # a copy of a range
        return EventKind.COPY if name.startswith(("Memcpy", "Memset")) else EventKind.KERNEL
    if e.is_user_annotation():
        return EventKind.RANGE
    if _RUNTIME.fullmatch(name):
        return EventKind.RUNTIME
    return None if _OF_THE_PROFILER.fullmatch(name) else EventKind.OPERATOR


def _counters(counted: Sequence[StepCount], seen: Trace | None, why: str) -> Counters:
    """Operators and reads as counted without the profiler, the rest from the profile; `why` there
    is nothing of kernels."""
    series: dict[str, Sequence[int]] = {
        "dispatched_ops": [c.dispatched_ops for c in counted],
        "host_syncs": [c.host_syncs for c in counted],
    }
    profiled = {} if seen is None else seen.counts()
    series |= {name: n for name, n in profiled.items() if name == "allocations" or not why}
    if torch.cuda.is_available():  # those of the device, by its allocator
        series["allocations"] = [c.device_allocations for c in counted]
    differing = {name: tuple(values) for name, values in series.items() if len(set(values)) > 1}
    return Counters(
        **{name: values[0] for name, values in series.items()},
        steps=min(map(len, series.values())),
        series=differing,
        unknown={name: why for name in COUNTERS if name not in series},
        hidden=() if seen is None else seen.hidden(),
    )
