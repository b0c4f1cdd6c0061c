"""Whether this machine is fit to measure on: the checks of `harness doctor`."""

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from harness import units
from harness.machine.nvml import IDLE, SETTINGS, NvmlProbe, throttle_words
from harness.records import Check, Decision, Environment, Gpu, Grade, Vitals

TF32_SINCE = (8, 0)
FLASH_ATTENTION_SINCE = (8, 0)
IDLE_UTILISATION = 0.05
IDLE_MEMORY_BYTES = 256 * 2**20  # a CUDA context alone takes more
SETTLE_S = 3.0  # NVML's utilisation covers up to a second; processes are counted once a second
BUSY_LOAD = 0.3
"""Load per core above which other work disturbs a measurement."""
STEAL = 0.03
"""Share of the CPU time wanted above which other virtual machines slow a step that waits for the
host."""
AT_START = psutil.cpu_times()
DISK_FAIL_BYTES = 100 * 10**6
DISK_WARN_BYTES = 10**9

DISTORTING = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for the kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
    "TRITON_INTERPRET": "Triton kernels are interpreted on the CPU",
}
"""Environment variables that distort timings, and how."""


def steal_share(before: Any, now: Any) -> float | None:
    """Stolen over wanted CPU time between two readings of psutil.cpu_times()."""
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    spent = {n: getattr(now, n) - getattr(before, n) for n in names if hasattr(now, n)}
    return spent["steal"] / wanted if "steal" in spent and (wanted := sum(spent.values())) else None


def stolen_text(share: float) -> str:
    return f"CPU time stolen by other virtual machines: {units.percent(share)}"


def _read_gpu(environment: Environment) -> tuple[Mapping[str, float | None], Mapping[str, str]]:
    """One reading, once the GPU is idle: the worker that reported the facts has just ended."""
    gpu = environment.gpu
    probe = NvmlProbe(gpu.uuid if gpu else None, why=environment.gpu_unavailable)
    deadline_s = time.monotonic() + SETTLE_S
    with closing(probe):
        while True:
            reading = probe.read()
            busy = _gpu_idle(Vitals(gpu=reading)).grade is Grade.FAIL
            if not busy or time.monotonic() > deadline_s:
                return reading, dict(probe.unavailable)
            time.sleep(SETTLE_S / 20)


def examined(environment: Environment, *, store: Path, constraints: Path) -> Environment:
    """The environment with the state of the machine and its checks.

    Args:
        environment: Names the GPU to read.
        store: The folder of the runs; need not exist.
        constraints: The file of pinned versions; need not exist.
    """
    reading, unavailable = _read_gpu(environment)
    folder = store.absolute()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    vitals = Vitals(
        gpu=reading,
        gpu_unavailable=unavailable,
        load=os.getloadavg()[0],
        steal=steal_share(AT_START, psutil.cpu_times()),
        disk_free_bytes=shutil.disk_usage(existing).free,
        pinned=read_pins(constraints.read_text()) if constraints.is_file() else {},
    )
    found = tuple(checks(environment, vitals))
    return replace(environment, vitals=replace(vitals, checks=found))


def read_pins(text: str) -> dict[str, str]:
    """The `name==version` lines of a constraints file; lines with a marker are left out."""
    pin = re.compile(r"^([\w.-]+)==([\w.+!-]+)\s*(?:#.*)?$", re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in pin.findall(text)}


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
        Grade.WARN: f"fit to measure on, with {_count(count, 'warning')}",
        Grade.UNKNOWN: f"unknown: {_count(count, 'check')} could not be made",
        Grade.FAIL: f"not fit to measure on: {_count(count, 'check')} failed",
    }[grade]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def exit_status(found: Sequence[Check]) -> int:
    """0 if every check is ok or a warning, else 3."""
    fit = worst(found) in (Grade.OK, Grade.WARN)
    return 0 if fit else Decision.INCONCLUSIVE.exit_status


def checks(environment: Environment, vitals: Vitals) -> Iterator[Check]:
    """Judge an environment. Pure."""
    yield _device(environment)
    if environment.gpu:
        yield _tf32(environment)
        yield _flash_attention(environment)
        yield _setting(
            environment,
            "allocator",
            "expandable_segments",
            on="expandable segments",
            off="fixed segments: fragmentation can exhaust the memory at long sequences",
            remedy="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        )
        yield _gpu_idle(vitals)
        yield _clocks(vitals)
        yield _power_limit(environment.gpu)
    yield _debug_modes(environment)
    yield _variables(environment)
    if vitals.pinned:
        yield _versions(environment, vitals.pinned)
    yield _load(environment, vitals)
    if vitals.steal is not None:
        yield _steal(vitals.steal)
    yield _disk(vitals)
    yield _git(environment)


def _device(environment: Environment) -> Check:
    if environment.gpu:
        return Check("device", Grade.OK, environment.gpu.name)
    remedy = "Results will describe the CPU. Ignore this if intended."
    return Check("device", Grade.WARN, f"no GPU: {environment.gpu_unavailable}", remedy)


def _tf32(environment: Environment) -> Check:
    if not _has(environment, TF32_SINCE):
        return Check("TF32", Grade.OK, "this GPU does not have it")
    return _setting(
        environment,
        "TF32",
        "allow_tf32_matmul",
        on="on for float32 matrix products",
        off="off: float32 matrix products run far below full speed",
        remedy="Set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, unless exact float32 is intended.",
    )


def _setting(
    environment: Environment, name: str, setting: str, *, on: str, off: str, remedy: str
) -> Check:
    """Ok if a setting of torch is on, a warning if it is off."""
    match environment.torch_settings.get(setting):
        case True:
            return Check(name, Grade.OK, on)
        case False:
            return Check(name, Grade.WARN, off, remedy)
    return _unknown(name)


def _flash_attention(environment: Environment) -> Check:
    name = "FlashAttention-2"
    package = environment.versions.get("flash-attn")
    in_torch = environment.torch_settings.get("flash_attention_in_torch")
    if not _has(environment, FLASH_ATTENTION_SINCE):
        return Check(name, Grade.WARN, "it does not support this GPU")
    found = [f"flash-attn {package}"] if package else []
    found += ["torch's own"] if in_torch else []
    if found:
        return Check(name, Grade.OK, " and ".join(found))
    if in_torch is None:
        return _unknown(name)
    fact = "absent: neither the package nor torch's own"
    remedy = "Install a torch built with it, or the package: nsa/README.md, 'Install flash-attn'."
    return Check(name, Grade.WARN, fact, remedy)


def _gpu_idle(vitals: Vitals) -> Check:
    """Where NVML does not list processes, memory in use shows that there are some."""
    foreign = vitals.gpu.get("gpu_foreign_processes")
    utilisation = vitals.gpu.get("gpu_utilisation")
    memory = vitals.gpu.get("gpu_memory_bytes")
    busy = ""
    if foreign:
        busy = f"processes of others on it: {foreign:.0f}"
    elif utilisation is not None and utilisation > IDLE_UTILISATION:
        busy = f"busy for {units.percent(utilisation)} of the time with no worker of ours"
    elif memory is not None and memory > IDLE_MEMORY_BYTES:
        busy = f"{memory / 1e9:.1f} GB in use with no worker of ours"
    if busy:
        remedy = "Wait for the GPU, or choose another with CUDA_VISIBLE_DEVICES."
        return Check("GPU idle", Grade.FAIL, busy, remedy)
    if utilisation is None or (foreign is None and memory is None):
        return _unread("GPU idle", vitals, "gpu_utilisation", "gpu_foreign_processes")
    fact = "no other process" if foreign is not None else "no memory in use"
    return Check("GPU idle", Grade.OK, f"{fact}, {units.percent(utilisation)} busy")


def _clocks(vitals: Vitals) -> Check:
    mask = vitals.gpu.get("gpu_throttle_reasons")
    if mask is None:
        return _unread("clocks", vitals, "gpu_throttle_reasons")
    faults, by_hand = int(mask) & ~(IDLE | SETTINGS), int(mask) & SETTINGS
    if faults:
        fact = f"throttled at rest by {', '.join(throttle_words(faults))}"
        remedy = "Cool the GPU, or check its power supply and limits (nvidia-smi -q)."
        return Check("clocks", Grade.FAIL, fact, remedy)
    if by_hand:
        fact = f"limited by a setting: {', '.join(throttle_words(by_hand))}"
        remedy = "Compare only with numbers taken at the same clocks."
        return Check("clocks", Grade.WARN, fact, remedy)
    clock_hz = vitals.gpu.get("gpu_sm_clock_hz")
    now = "" if clock_hz is None else f", {clock_hz / 1e6:,.0f} MHz at rest"
    return Check("clocks", Grade.OK, f"not throttled{now}")


def _power_limit(gpu: Gpu) -> Check:
    remedy = "Compare only with numbers taken at the same limit."
    if gpu.power_limit_w is None or gpu.power_limit_share is None:
        return Check("power limit", Grade.WARN, "NVML gives no limit or no default", remedy)
    fact = f"{gpu.power_limit_w:.0f} W, {units.percent(gpu.power_limit_share)} of its default"
    if gpu.power_limit_share < 1:
        return Check("power limit", Grade.WARN, fact, remedy)
    return Check("power limit", Grade.OK, fact)


def _debug_modes(environment: Environment) -> Check:
    settings = environment.torch_settings
    modes = ("anomaly_mode", "debug_build", "deterministic")
    if any(mode not in settings for mode in modes):
        return _unknown("debug modes")
    on = [mode.replace("_", " ") for mode in modes if settings[mode]]
    if not on:
        return Check("debug modes", Grade.OK, "off")
    grade = Grade.WARN if on == ["deterministic"] else Grade.FAIL
    return Check("debug modes", grade, f"on: {', '.join(on)}", "Turn them off for timing.")


def _variables(environment: Environment) -> Check:
    found = [v for v in DISTORTING if environment.variables.get(v, "0") not in ("", "0")]
    if not found:
        return Check("variables", Grade.OK, "none distorts timings")
    fact = "; ".join(f"{v} is set: {DISTORTING[v]}" for v in found)
    return Check("variables", Grade.FAIL, fact, f"unset {' '.join(found)}")


def _versions(environment: Environment, pinned: Mapping[str, str]) -> Check:
    """A local build such as 2.11.0+cu130 is version 2.11.0."""
    installed = {n: v.partition("+")[0] for n, v in environment.versions.items() if v}
    compared = {n: v for n, v in installed.items() if n in pinned}
    other = [f"{n} {v} (pinned: {pinned[n]})" for n, v in compared.items() if v != pinned[n]]
    if other:
        remedy = "To compare with numbers of the pinned versions: pip install -c constraints.txt."
        return Check("versions", Grade.WARN, ", ".join(other), remedy)
    if not compared:
        return _unknown("versions", "constraints.txt does not pin any relevant package")
    return Check("versions", Grade.OK, f"as pinned: {', '.join(compared)}")


def _load(environment: Environment, vitals: Vitals) -> Check:
    fact = f"load {vitals.load:.1f} on {environment.cpu_count} cores"
    if vitals.load <= BUSY_LOAD * environment.cpu_count:
        return Check("CPU load", Grade.OK, fact)
    fact += ": other work runs, or ran in the last minute"
    return Check("CPU load", Grade.WARN, fact, "Wait for it; it slows host-bound steps most.")


def _steal(share: float) -> Check:
    if share <= STEAL:
        return Check("CPU steal", Grade.OK, stolen_text(share))
    remedy = "Use another host; this one slows every step that waits for the CPU."
    return Check("CPU steal", Grade.WARN, stolen_text(share), remedy)


def _disk(vitals: Vitals) -> Check:
    free = vitals.disk_free_bytes
    fact = f"{free / 1e9:.1f} GB free for runs"
    if free >= DISK_WARN_BYTES:
        return Check("disk", Grade.OK, fact)
    grade = Grade.FAIL if free < DISK_FAIL_BYTES else Grade.WARN
    return Check("disk", grade, fact, "Make room, or name another folder with --store.")


def _git(environment: Environment) -> Check:
    git = environment.git
    if git is None:
        fact = "not in a git repository: numbers cannot be traced to a commit"
        return Check("git", Grade.WARN, fact, "Run from a clone of the project.")
    where = f"{git.branch} {git.commit[:10]}"
    if git.dirty_sha256:
        remedy = "Commit the changes, so that the numbers can be reproduced."
        return Check("git", Grade.WARN, f"{where} with uncommitted changes", remedy)
    return Check("git", Grade.OK, f"{where}, clean")


def _has(environment: Environment, since: tuple[int, int]) -> bool:
    assert environment.gpu is not None
    major, minor = map(int, environment.gpu.compute_capability.split("."))
    return (major, minor) >= since


def _unknown(name: str, why: str = "the worker did not report it") -> Check:
    return Check(name, Grade.UNKNOWN, f"unknown: {why}")


def _unread(name: str, vitals: Vitals, *channels: str) -> Check:
    """Unknown for the reason of the first of these channels that has one."""
    reasons = (vitals.gpu_unavailable.get(channel) for channel in channels)
    return _unknown(name, next((r for r in reasons if r), "NVML did not answer"))
