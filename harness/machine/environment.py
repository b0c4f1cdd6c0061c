"""The machine and the software of a run, as parent and worker see them."""

import os
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from harness import __version__
from harness.errors import ProbeError
from harness.git.repository import home, read_git
from harness.machine import nvml
from harness.records import CHOOSE_GPU, VARIABLE_PREFIXES, Environment, Gpu

NOT_REPORTED = "not available"
"""Value of the fields of a Gpu that only NVML reports."""
_SECRET = re.compile(r"AUTH|CREDENTIAL|DSN|KEY|PASS|PWD|SECRET|TOKEN|URL|URI", re.IGNORECASE)


def capture(
    facts: Mapping[str, Any],
    *,
    command: Sequence[str],
    repository: Path | None,
    required: Collection[str] = (),
) -> Environment:
    """Describe this machine, as the parent and a worker, by its `facts`, see it. `repository` is a
    folder of the repository under test; the `required` keys name packages and variables."""
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
        gpu_count=len(facts["gpu_uuids"]),
        gpu_free_bytes=nvml.optional(lambda: nvml.free_bytes(gpu.uuid)) if gpu else None,
        versions={
            **{
                name: next((d.version for d in metadata.distributions(name=name)), None)
                for kind, _, name in (key.partition(".") for key in required)
                if kind == "packages"
            },
            "python": platform.python_version(),
            "harness": __version__,
            "numpy": metadata.version("numpy"),
            **facts["versions"],
        },
        torch_settings=dict(facts["torch_settings"]),
        variables=_variables(required),
        prefixes=VARIABLE_PREFIXES,
        interpreter=facts.get("interpreter", ""),
        git=read_git(repository) if repository else None,
        command=tuple(command),
    )


def _variables(required: Collection[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLE_PREFIXES) and name not in CHOOSE_GPU:
            found[name] = value
        elif f"variables.{name}" in required:
            found[name] = "set" if _SECRET.search(name) else value
    return found


def _os() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        name = platform.system()
    return f"{name}, kernel {platform.release()}"


def _cpu_model() -> str:
    """The model in /proc/cpuinfo (x86); elsewhere the architecture."""
    found = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text("utf-8"), re.M)
    return found[1].strip() if found else platform.machine()


def _gpu(facts: Mapping[str, Any]) -> tuple[Gpu | None, str]:
    """The GPU that the workers use, or why they use none."""
    for uuid in facts["gpu_uuids"][:1]:
        try:
            return nvml.find(uuid), ""
        except ProbeError:
            # As torch describes it: this run must not be recorded as a run on the CPU.
            none = NOT_REPORTED
            return Gpu(uuid=uuid, index=0, driver=none, cuda_driver=none, **facts["gpu"]), ""
    problem = facts.get("cuda_unavailable") or "torch has no GPU"
    try:
        names = ", ".join(gpu.name for gpu in nvml.gpus())
    except ProbeError as error:
        return None, f"{problem}; {error}"
    return None, f"{problem}, but NVML lists {names}"


def home_of(factory: str, roots: Sequence[Path] = ()) -> Path:
    """The folder of a factory's module, in the repository of the run, without importing it; the
    current folder if unknown. Workers search `roots` first."""
    name = factory.partition(":")[0].partition(".")[0]
    here = Path.cwd()
    if not name:  # a program, which runs here
        return here
    # The same order as in a worker, see runner.forkserver.
    first = [str(folder) for folder in roots or home(here)]
    spec = PathFinder.find_spec(name, first) or find_spec(name)
    if spec and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin).parent if spec and spec.has_location and spec.origin else here
