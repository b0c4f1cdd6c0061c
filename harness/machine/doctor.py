"""Whether numbers taken here would mean anything: the checks behind `harness doctor`."""

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from harness.machine.nvml import IDLE, SETTINGS, NvmlProbe, throttle_words
from harness.records import Environment

EXIT_INVALID = 3
"""Exit status for an environment that is invalid, or that nobody could judge."""

TF32_SINCE = (8, 0)
FLASH_ATTENTION_SINCE = (8, 0)
IDLE_UTILISATION = 0.05
IDLE_MEMORY_BYTES = 256 * 2**20  # a CUDA context alone takes more
SETTLE_S = 3.0  # NVML's utilisation looks back up to a second; processes are counted once a second
BUSY_LOAD = 0.3
"""Load per core from which other work is felt."""
DISK_FAIL_BYTES = 100 * 10**6
DISK_WARN_BYTES = 10**9

DISTORTING = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for the kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
    "TRITON_INTERPRET": "Triton kernels are interpreted on the CPU",
}
"""Environment variables that turn a timing into something else, and how."""


class Grade(StrEnum):
    OK = "ok"
    WARN = "warn"  # the numbers hold, with this said beside them
    UNKNOWN = "unknown"  # could not be found out, which is never ok
    FAIL = "fail"  # the numbers would not hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    grade: Grade
    fact: str
    """What was found."""
    remedy: str = ""
    """What to do about it; empty when there is nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """The state of the machine at one moment, with no worker of ours alive."""

    gpu: Mapping[str, float | None] = field(default_factory=dict)
    """One reading of NvmlProbe."""
    gpu_unavailable: Mapping[str, str] = field(default_factory=dict)
    load: float = 0.0
    """Processes that ran or waited in the last minute, on average (load average)."""
    disk_free_bytes: int = 0
    """Where runs are stored."""
    pinned: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> version in constraints.txt; empty when there is none."""


def inspect(environment: Environment, *, store: Path, constraints: Path) -> Vitals:
    """Look at the machine now.

    Args:
        environment: Says which GPU to read.
        store: Where runs are stored; need not exist yet.
        constraints: The pinned versions; need not exist.
    """
    reading, unavailable = _read_gpu(environment)
    folder = store.absolute()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    return Vitals(
        gpu=reading,
        gpu_unavailable=unavailable,
        load=os.getloadavg()[0],
        disk_free_bytes=shutil.disk_usage(existing).free,
        pinned=read_pins(constraints.read_text()) if constraints.is_file() else {},
    )


def _read_gpu(environment: Environment) -> tuple[Mapping[str, float | None], Mapping[str, str]]:
    """One reading, after the GPU has settled: the worker that told the facts has just ended."""
    gpu = environment.gpu
    probe = NvmlProbe(gpu.uuid if gpu else None, why=environment.gpu_unavailable)
    deadline_s = time.monotonic() + SETTLE_S
    try:
        while True:
            reading = probe.read()
            busy = _gpu_idle(Vitals(gpu=reading)).grade is Grade.FAIL
            if not busy or time.monotonic() > deadline_s:
                return reading, dict(probe.unavailable)
            time.sleep(SETTLE_S / 20)
    finally:
        probe.close()


def read_pins(text: str) -> dict[str, str]:
    """The `name==version` lines of a constraints file; lines with a marker are left out."""
    pin = re.compile(r"^([\w.-]+)==([\w.+!-]+)\s*(?:#.*)?$", re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in pin.findall(text)}


def checks(environment: Environment, vitals: Vitals) -> tuple[Check, ...]:
    """Judge an environment. Pure: all that was looked at is in the arguments."""
    return tuple(_all_checks(environment, vitals))


def worst(found: Sequence[Check]) -> Grade:
    """The grade of the whole: that of its worst check; UNKNOWN if nothing was checked."""
    order = list(Grade)
    return max((c.grade for c in found), key=order.index, default=Grade.UNKNOWN)


def verdict(found: Sequence[Check]) -> str:
    """The whole in one phrase: is this machine fit to measure on?"""
    if not found:
        return "unknown: nothing was checked"
    grade = worst(found)
    count = sum(c.grade is grade for c in found)
    checks = f"{count} check{'s'[: count > 1]}"
    return {
        Grade.OK: "fit to measure on",
        Grade.WARN: f"fit to measure on, with {count} warning{'s'[: count > 1]}",
        Grade.UNKNOWN: f"unknown: {checks} found no answer",
        Grade.FAIL: f"not fit to measure on: {checks} failed",
    }[grade]


def exit_status(found: Sequence[Check]) -> int:
    """0 where every check is ok or a warning, else 3. An absent answer is never a pass."""
    return 0 if worst(found) in (Grade.OK, Grade.WARN) else EXIT_INVALID


def _all_checks(environment: Environment, vitals: Vitals) -> Iterator[Check]:
    yield _device(environment)
    if environment.gpu:
        yield _tf32(environment)
        yield _flash_attention(environment)
        yield _allocator(environment)
        yield _gpu_idle(vitals)
        yield _clocks(vitals)
    yield _debug_modes(environment)
    yield _variables(environment)
    if vitals.pinned:
        yield _versions(environment, vitals.pinned)
    yield _load(environment, vitals)
    yield _disk(vitals)
    yield _git(environment)


def _device(environment: Environment) -> Check:
    if environment.gpu:
        return Check(name="device", grade=Grade.OK, fact=environment.gpu.name)
    return Check(
        name="device",
        grade=Grade.WARN,
        fact=f"no GPU: {environment.gpu_unavailable}",
        remedy="Numbers will describe this CPU; that is well if they should.",
    )


def _tf32(environment: Environment) -> Check:
    name = "TF32"
    if not _has(environment, TF32_SINCE):
        return Check(name=name, grade=Grade.OK, fact="this GPU has none")
    match environment.torch_settings.get("allow_tf32_matmul"):
        case True:
            return Check(name=name, grade=Grade.OK, fact="on for float32 matrix products")
        case False:
            return Check(
                name=name,
                grade=Grade.WARN,
                fact="off: float32 matrix products run at a fraction of the GPU's speed",
                remedy="Set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, unless exact float32 is meant.",
            )
    return _unknown(name, "no worker said")


def _flash_attention(environment: Environment) -> Check:
    name = "FlashAttention-2"
    package = environment.versions.get("flash-attn")
    in_torch = environment.torch_settings.get("flash_attention_in_torch")
    if not _has(environment, FLASH_ATTENTION_SINCE):
        return Check(name=name, grade=Grade.WARN, fact="this GPU is older than it supports")
    found = [f"flash-attn {package}"] if package else []
    found += ["torch's own"] if in_torch else []
    if found:
        return Check(name=name, grade=Grade.OK, fact=" and ".join(found))
    if in_torch is None:
        return _unknown(name, "no worker said")
    return Check(
        name=name,
        grade=Grade.WARN,
        fact="absent: neither the package nor torch's own",
        remedy="pip install flash-attn --no-build-isolation, or a torch built with it.",
    )


def _allocator(environment: Environment) -> Check:
    name = "allocator"
    match environment.torch_settings.get("expandable_segments"):
        case True:
            return Check(name=name, grade=Grade.OK, fact="expandable segments")
        case False:
            return Check(
                name=name,
                grade=Grade.WARN,
                fact="fixed segments: long sequences can run out of memory by fragmentation",
                remedy="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
            )
    return _unknown(name, "no worker said")


def _gpu_idle(vitals: Vitals) -> Check:
    """Memory in use betrays a process even where NVML does not list processes."""
    name = "GPU idle"
    foreign = vitals.gpu.get("gpu_foreign_processes")
    utilisation = vitals.gpu.get("gpu_utilisation")
    memory = vitals.gpu.get("gpu_memory_bytes")
    remedy = "Wait for the GPU, or choose another with CUDA_VISIBLE_DEVICES."
    if foreign:
        fact = f"{foreign:.0f} other processes compute on it"
        return Check(name=name, grade=Grade.FAIL, fact=fact, remedy=remedy)
    if utilisation is not None and utilisation > IDLE_UTILISATION:
        fact = f"busy for {utilisation:.0%} of the time with no worker of ours"
        return Check(name=name, grade=Grade.FAIL, fact=fact, remedy=remedy)
    if memory is not None and memory > IDLE_MEMORY_BYTES:
        fact = f"{memory / 1e9:.1f} GB in use with no worker of ours"
        return Check(name=name, grade=Grade.FAIL, fact=fact, remedy=remedy)
    if utilisation is None or (foreign is None and memory is None):
        return _unread(name, vitals, "gpu_utilisation", "gpu_foreign_processes")
    fact = "no other process" if foreign is not None else "no memory in use"
    return Check(name=name, grade=Grade.OK, fact=f"{fact}, {utilisation:.0%} busy")


def _clocks(vitals: Vitals) -> Check:
    name = "clocks"
    mask = vitals.gpu.get("gpu_throttle_reasons")
    if mask is None:
        return _unread(name, vitals, "gpu_throttle_reasons")
    faults = int(mask) & ~(IDLE | SETTINGS)
    if faults:
        return Check(
            name=name,
            grade=Grade.FAIL,
            fact=f"held down at rest by {', '.join(throttle_words(faults))}",
            remedy="Cool the GPU, or look at its power supply and limits (nvidia-smi -q).",
        )
    if set_by_hand := int(mask) & SETTINGS:
        return Check(
            name=name,
            grade=Grade.WARN,
            fact=f"limited by hand: {', '.join(throttle_words(set_by_hand))}",
            remedy="Compare only with numbers taken at the same clocks.",
        )
    return Check(name=name, grade=Grade.OK, fact="not held down")


def _debug_modes(environment: Environment) -> Check:
    name = "debug modes"
    settings = environment.torch_settings
    modes = ("anomaly_mode", "debug_build", "deterministic")
    if any(mode not in settings for mode in modes):
        return _unknown(name, "no worker said")
    on = [mode.replace("_", " ") for mode in modes if settings[mode]]
    if not on:
        return Check(name=name, grade=Grade.OK, fact="off")
    wrong = settings["anomaly_mode"] or settings["debug_build"]
    return Check(
        name=name,
        grade=Grade.FAIL if wrong else Grade.WARN,
        fact=f"on: {', '.join(on)}",
        remedy="Switch them off for timing.",
    )


def _variables(environment: Environment) -> Check:
    name = "variables"
    found = [v for v in DISTORTING if environment.variables.get(v, "0") not in ("", "0")]
    if not found:
        return Check(name=name, grade=Grade.OK, fact="none that distorts a timing")
    return Check(
        name=name,
        grade=Grade.FAIL,
        fact="; ".join(f"{v} is set: {DISTORTING[v]}" for v in found),
        remedy=f"unset {' '.join(found)}",
    )


def _versions(environment: Environment, pinned: Mapping[str, str]) -> Check:
    """A build such as 2.11.0+cu130 is the version 2.11.0."""
    name = "versions"
    installed = {n: v.partition("+")[0] for n, v in environment.versions.items() if v}
    compared = {n: v for n, v in installed.items() if n in pinned}
    other = [f"{n} {v} (pinned: {pinned[n]})" for n, v in compared.items() if v != pinned[n]]
    if other:
        return Check(
            name=name,
            grade=Grade.WARN,
            fact=", ".join(other),
            remedy="pip install -c constraints.txt, to compare with numbers of the pinned ones.",
        )
    if not compared:
        return _unknown(name, "constraints.txt pins none of those that matter")
    return Check(name=name, grade=Grade.OK, fact=f"as pinned: {', '.join(compared)}")


def _load(environment: Environment, vitals: Vitals) -> Check:
    fact = f"load {vitals.load:.1f} on {environment.cpu_count} cores"
    if vitals.load <= BUSY_LOAD * environment.cpu_count:
        return Check(name="CPU load", grade=Grade.OK, fact=fact)
    return Check(
        name="CPU load",
        grade=Grade.WARN,
        fact=f"{fact}: other work is running, or ran within the last minute",
        remedy="Wait for it; host-bound steps suffer most.",
    )


def _disk(vitals: Vitals) -> Check:
    free = vitals.disk_free_bytes
    grade = (
        Grade.FAIL if free < DISK_FAIL_BYTES else Grade.WARN if free < DISK_WARN_BYTES else Grade.OK
    )
    return Check(
        name="disk",
        grade=grade,
        fact=f"{free / 1e9:.1f} GB free where runs are stored",
        remedy="" if grade is Grade.OK else "Make room, or name another folder with --store.",
    )


def _git(environment: Environment) -> Check:
    git = environment.git
    if git is None:
        return Check(
            name="git",
            grade=Grade.WARN,
            fact="not a repository: numbers cannot be traced to a commit",
            remedy="Run from a clone of the project.",
        )
    if git.dirty_sha256:
        return Check(
            name="git",
            grade=Grade.WARN,
            fact=f"{git.branch} {git.commit[:10]} with uncommitted changes",
            remedy="Commit them, so that the numbers can be repeated.",
        )
    return Check(name="git", grade=Grade.OK, fact=f"{git.branch} {git.commit[:10]}, clean")


def _has(environment: Environment, since: tuple[int, int]) -> bool:
    assert environment.gpu is not None
    major, minor = map(int, environment.gpu.compute_capability.split("."))
    return (major, minor) >= since


def _unknown(name: str, why: str) -> Check:
    return Check(name=name, grade=Grade.UNKNOWN, fact=f"unknown: {why}")


def _unread(name: str, vitals: Vitals, *channels: str) -> Check:
    """The reason the first of these channels has for not being there."""
    reasons = (vitals.gpu_unavailable.get(channel) for channel in channels)
    return _unknown(name, next((r for r in reasons if r), "NVML did not answer"))
