"""Whether this machine is fit to measure on: the checks of `harness doctor`."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from harness import units
from harness.errors import ProbeError
from harness.machine import nvml
from harness.machine.facts import DISTORTING, REMEDIES, RIGHT, SETTINGS
from harness.machine.gpu_idle import GpuUse, nvml_meter
from harness.records import Check, Decision, Environment, Gpu, Grade

BUSY_LOAD = 0.3
"""Load per core above which other work disturbs a measurement."""
DISK_FAIL_BYTES = 100 * 10**6
DISK_WARN_BYTES = 10**9


def examined(environment: Environment, *, store: Path) -> Environment:
    """The environment with its checks; `store`, the folder of the runs, need not exist."""
    folder = store.absolute()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free_bytes = shutil.disk_usage(existing).free
    use: GpuUse | str = ""
    if environment.gpu:
        try:
            with nvml_meter(environment.gpu.uuid) as meter:
                use = meter()
        except ProbeError as error:
            use = str(error)
    found = checks(environment, use, load=os.getloadavg()[0], disk_free_bytes=free_bytes)
    return replace(environment, checks=tuple(found))


def worst(found: Sequence[Check]) -> Grade:
    """The worst grade of the checks; UNKNOWN without checks."""
    order = list(Grade)
    return max((c.grade for c in found), key=order.index, default=Grade.UNKNOWN)


def verdict(found: Sequence[Check]) -> str:
    """One phrase: is this machine fit to measure on?"""
    grade = worst(found)
    count = sum(c.grade is grade for c in found)
    return {
        Grade.OK: "fit to measure on",
        Grade.WARN: f"fit to measure on, with {units.plural('warning', count)}",
        Grade.UNKNOWN: f"unknown: {units.plural('check', count)} could not be made",
        Grade.FAIL: f"not fit to measure on: {units.plural('check', count)} failed",
    }[grade]


def exit_status(found: Sequence[Check]) -> int:
    """0 if every check is ok or a warning, else 3."""
    fit = worst(found) in (Grade.OK, Grade.WARN)
    return 0 if fit else Decision.INCONCLUSIVE.exit_status


def checks(
    environment: Environment, use: GpuUse | str, *, load: float, disk_free_bytes: int
) -> Iterator[Check]:
    """All checks, those of the GPU first; `use` of it, or why that is unknown."""
    yield _device(environment)
    yield from _settings(environment)
    if environment.gpu:
        yield _gpu_idle(use)
        yield _clocks(use)
        yield _power_limit(environment.gpu)
    yield _variables(environment)
    yield _load(environment, load)
    yield _disk(disk_free_bytes)
    yield _git(environment)


def _device(environment: Environment) -> Check:
    if environment.gpu:
        return Check("device", Grade.OK, environment.gpu.name)
    remedy = "Results will describe the CPU. Ignore this if intended."
    return Check("device", Grade.WARN, f"no GPU: {environment.gpu_unavailable}", remedy)


def _settings(environment: Environment) -> Iterator[Check]:
    """The settings of torch that have a right value, where the device has them."""
    for name, right in RIGHT.items():
        if right.value and not (environment.gpu and environment.gpu.capability >= right.since):
            continue
        value = environment.torch_settings.get(name)
        state = "on" if value else "off"
        if value is None:
            yield _unknown(right.label)
        elif value == right.value:
            yield Check(right.label, Grade.OK, state)
        else:
            yield Check(right.label, right.wrong, f"{state}: {SETTINGS[name]}", REMEDIES[name])


def _gpu_idle(use: GpuUse | str) -> Check:
    if isinstance(use, str):
        return _unknown("GPU idle", use)
    if busy := use.others()[0]:
        remedy = "Wait for the GPU, or choose another with CUDA_VISIBLE_DEVICES."
        return Check("GPU idle", Grade.FAIL, busy, remedy)
    if use.processes is None and use.used_bytes is None:
        return _unknown("GPU idle", "NVML lists neither processes nor memory in use")
    return Check("GPU idle", Grade.OK, "no other process uses it")


def _clocks(use: GpuUse | str) -> Check:
    if isinstance(use, str) or use.throttle_mask is None:
        return _unknown("clocks", use if isinstance(use, str) else "NVML does not show them")
    if use.throttled_by:
        fact = f"throttled at rest by {', '.join(use.throttled_by)}"
        remedy = "Cool the GPU, or check its power supply and limits (nvidia-smi -q)."
        return Check("clocks", Grade.FAIL, fact, remedy)
    if by_hand := nvml.throttle_words(use.throttle_mask & nvml.SETTINGS):
        fact = f"limited by a setting: {', '.join(by_hand)}"
        remedy = "Compare only with numbers taken at the same clocks."
        return Check("clocks", Grade.WARN, fact, remedy)
    return Check("clocks", Grade.OK, "not throttled")


def _power_limit(gpu: Gpu) -> Check:
    fact, full = "NVML gives no limit or no default", False
    if gpu.power_limit_w is not None and gpu.power_limit_share is not None:
        fact = f"{gpu.power_limit_w:.0f} W, {units.percent(gpu.power_limit_share)} of its default"
        full = gpu.power_limit_share >= 1
    return _graded("power limit", full, fact, "Compare only with numbers taken at the same limit.")


def _variables(environment: Environment) -> Check:
    found = [v for v in DISTORTING if environment.variables.get(v, "0") not in ("", "0")]
    fact = "; ".join(f"{v} is set: {DISTORTING[v]}" for v in found) or "none distorts timings"
    return _graded("variables", not found, fact, f"unset {' '.join(found)}", Grade.FAIL)


def _load(environment: Environment, load: float) -> Check:
    quiet = load <= BUSY_LOAD * environment.cpu_count
    fact = f"load {load:.1f} on {environment.cpu_count} cores"
    if not quiet:
        fact += ": other work runs, or ran in the last minute"
    return _graded("CPU load", quiet, fact, "Wait for it; it slows host-bound steps most.")


def _disk(free_bytes: int) -> Check:
    fact = f"{free_bytes / 1e9:.1f} GB free for runs"
    remedy = "Make room, or name another folder with --store."
    grade = Grade.FAIL if free_bytes < DISK_FAIL_BYTES else Grade.WARN
    return _graded("disk", free_bytes >= DISK_WARN_BYTES, fact, remedy, grade)


def _git(environment: Environment) -> Check:
    git = environment.git
    if git is None:
        fact = "not in a git repository: numbers cannot be traced to a commit"
        return Check("git", Grade.WARN, fact, "Run from a clone of the project.")
    state = "with uncommitted changes" if git.dirty_sha256 else "clean"
    remedy = "Commit the changes, so that the numbers can be reproduced."
    fact = f"{git.branch} {git.commit[:10]}, {state}"
    return _graded("git", not git.dirty_sha256, fact, remedy)


def _graded(name: str, good: bool, fact: str, remedy: str, grade: Grade = Grade.WARN) -> Check:
    """A check with its grade and remedy, if it is not good."""
    return Check(name, Grade.OK, fact) if good else Check(name, grade, fact, remedy)


def _unknown(name: str, why: str = "the worker did not report it") -> Check:
    return Check(name, Grade.UNKNOWN, f"unknown: {why}")
