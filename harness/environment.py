"""Where, on what and with what a run is made; and how two such places differ."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from harness import __version__
from harness.errors import ProbeError
from harness.probes import nvml
from harness.records import Environment, Git, Gpu

VARIABLE_PREFIXES = ("NSA_", "CUDA_", "TORCH_", "PYTORCH_", "NCCL_", "OMP_", "TRITON_")
"""Environment variables with these beginnings move numbers; no other is recorded."""

NOT_REPORTED = "not available"
"""Stands in a Gpu for what only NVML could say."""


def capture(
    facts: Mapping[str, Any], *, command: Sequence[str], repository: Path | None
) -> Environment:
    """Describe this machine, as the parent and a worker see it.

    Args:
        facts: What harness.measure.facts.describe() said in a worker.
        command: The command line that made the run.
        repository: A folder of the repository under test; None where there is none. See
            `home_of`.
    """
    gpu, problem = _gpu(facts)
    return Environment(
        captured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        hostname=platform.node(),
        os=_os(),
        cpu=_cpu_model(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        gpu=gpu,
        gpu_unavailable=problem,
        versions={
            "python": platform.python_version(),
            "harness": __version__,
            "numpy": metadata.version("numpy"),
            **facts["versions"],
        },
        torch_settings=dict(facts["torch_settings"]),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLE_PREFIXES)
        },
        git=read_git(repository) if repository else None,
        command=tuple(command),
    )


def drift(recorded: Environment, here: Environment) -> tuple[str, ...]:
    """What differs between two environments and can move a number, one sentence each."""
    pairs = {
        "host": (recorded.hostname, here.hostname),
        "CPU": (recorded.cpu, here.cpu),
        "CPU count": (recorded.cpu_count, here.cpu_count),
        "GPU": _gpu_words(recorded.gpu, here.gpu),
        "driver": tuple(e.gpu.driver if e.gpu else None for e in (recorded, here)),
        "commit": tuple(e.git.commit[:10] if e.git else None for e in (recorded, here)),
        "uncommitted changes": tuple(
            e.git.dirty_sha256[:10] if e.git else None for e in (recorded, here)
        ),
        **_paired(recorded.versions, here.versions),
        **_paired(recorded.torch_settings, here.torch_settings),
        **_paired(recorded.variables, here.variables),
    }
    return tuple(
        f"{name}: {_word(before)} then, {_word(now)} now"
        for name, (before, now) in pairs.items()
        if before != now
    )


def home_of(factory: str) -> Path:
    """The folder of a factory's module, which is not imported; the current one if unknown.

    A run from any folder is of the code it measures, not of the repository it happens to be
    started in.

    Args:
        factory: `package.module:function`.
    """
    name = factory.partition(":")[0].partition(".")[0]
    here = Path.cwd()
    # As a worker looks for it: see execution.launcher.
    spec = find_spec(name) or PathFinder.find_spec(name, [str(here)])
    places = list(spec.submodule_search_locations or ()) if spec else []
    if places:
        return Path(places[0])
    return Path(spec.origin).parent if spec and spec.has_location and spec.origin else here


def read_git(folder: Path) -> Git | None:
    """Where the repository around a folder stands; None without a repository, a commit or git.

    What a run writes under reports/ does not make the tree dirty. A folder that the repository
    ignores, such as a virtual environment within it, is not of it.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or _git(folder, "check-ignore", "--quiet", ".") is not None:
        return None
    root = Path(os.fsdecode(top).removesuffix("\n"))
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    branch = _git(root, "symbolic-ref", "--short", "HEAD")
    return Git(
        commit=commit.decode().strip(),
        branch=os.fsdecode(branch).strip() if branch else "(detached)",
        dirty_sha256=_dirty_sha256(root),
    )


def _dirty_sha256(root: Path) -> str:
    """Hash of all that differs from the commit; empty when nothing does."""
    paths = ("--", ".", ":(exclude)reports")
    diff = _git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", *paths) or b""
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z", *paths) or b""
    untracked = [name for name in listed.split(b"\0") if name]
    if not diff and not untracked:
        return ""
    digest = hashlib.sha256(diff)
    for name in sorted(untracked):
        path = root / os.fsdecode(name)
        if path.is_symlink():
            content = os.fsencode(path.readlink())
        elif path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        else:  # a repository within this one
            content = b""
        digest.update(name + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _git(folder: Path, *arguments: str) -> bytes | None:
    """What git answers; None where it refuses or is not installed."""
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout if answer.returncode == 0 else None


def _gpu(facts: Mapping[str, Any]) -> tuple[Gpu | None, str]:
    """The GPU the workers use, or why they use none."""
    uuid, seen = facts["gpu_uuid"], facts.get("gpu")
    if uuid is not None:
        try:
            return nvml.find(uuid), ""
        except ProbeError:
            if seen is None:
                raise
        return _gpu_without_nvml(uuid, seen), ""
    problem = facts.get("cuda_unavailable") or "torch has no GPU"
    try:
        names = ", ".join(gpu.name for gpu in nvml.gpus())
    except ProbeError as error:
        return None, f"{problem}; {error}"
    return None, f"{problem}, though NVML shows {names}"


def _gpu_without_nvml(uuid: str, seen: Mapping[str, Any]) -> Gpu:
    """Numbers of a GPU must not go under `cpu` because NVML is missing."""
    return Gpu(
        name=seen["name"],
        uuid=uuid,
        index=0,
        memory_bytes=seen["memory_bytes"],
        driver=NOT_REPORTED,
        cuda_driver=NOT_REPORTED,
        compute_capability=seen["compute_capability"],
    )


def _os() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        name = platform.system()
    return f"{name}, kernel {platform.release()}"


def _cpu_model() -> str:
    """From /proc/cpuinfo, which names x86 processors; elsewhere the architecture must do."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _gpu_words(before: Gpu | None, now: Gpu | None) -> tuple[str | None, str | None]:
    return (
        f"{before.name} ({before.uuid})" if before else None,
        f"{now.name} ({now.uuid})" if now else None,
    )


def _paired(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By name, both values; None where one side has no such name."""
    return {name: (before.get(name), now.get(name)) for name in sorted({*before, *now})}


def _word(value: object) -> str:
    return "none" if value is None or value == "" else str(value)
