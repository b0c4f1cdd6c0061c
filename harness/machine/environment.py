"""The machine and the software of a run, as parent and worker see them."""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from harness import __version__
from harness.errors import ProbeError
from harness.git.origin import OURS, packages_in
from harness.git.repository import home, read_git, top
from harness.machine import nvml
from harness.records import VARIABLE_PREFIXES, Case, Environment, Gpu

NOT_REPORTED = "not available"
"""Value of the fields of a Gpu that only NVML reports."""
DATA_END_BYTES = 2**16
DIGEST_LENGTH = 8
_SECRET = re.compile(r"AUTH|CREDENTIAL|DSN|KEY|PASS|PWD|SECRET|TOKEN|URL|URI", re.IGNORECASE)


def capture(
    facts: Mapping[str, Any],
    *,
    command: Sequence[str],
    repository: Path | None,
    cases: Iterable[Case] = (),
    required: Collection[str] = (),
) -> Environment:
    """Describe this machine, as the parent and a worker, by its `facts`, see it.

    `repository` is a folder of the repository under test, see `home_of`. Cases name data, and the
    required keys of a suite packages and variables.
    """
    gpu, problem = _gpu(facts)
    path, root = facts.get("path", ()), top([repository]) if repository else None
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
        gpu_free_bytes=nvml.free_bytes(gpu.uuid) if gpu else None,
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
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLE_PREFIXES)
            or (f"variables.{name}" in required and not _SECRET.search(name))
        },
        prefixes=VARIABLE_PREFIXES,
        other_variables=_other_variables(),
        interpreter=facts.get("interpreter", ""),
        path=tuple(_placed(place, root) for place in path if Path(place).is_absolute()),
        packages=_packages([case.factory for case in cases], path, root),
        git=read_git(repository) if repository else None,
        command=tuple(command),
        data=data_files(cases),
    )


def _other_variables() -> dict[str, str]:
    """Digests of the variables that are not recorded with their values."""
    return {
        name: "set"
        if _SECRET.search(name)
        else hashlib.sha256(os.fsencode(value)).hexdigest()[:DIGEST_LENGTH]
        for name, value in sorted(os.environ.items())
        if not name.startswith(VARIABLE_PREFIXES)
    }


def _placed(place: str, root: Path | None) -> str:
    """A path, from the innermost of the folders that another machine may have elsewhere."""
    known = {"{prefix}": Path(sys.prefix), "{base}": Path(sys.base_prefix)}
    known |= {"{repository}": root} if root else {}
    around = [(word, f) for word, f in known.items() if Path(place).is_relative_to(f)]
    if not around:
        return place
    word, folder = max(around, key=lambda one: len(one[1].parts))
    return str(Path(word, Path(place).relative_to(folder)))


def _packages(
    factories: Sequence[str], path: Sequence[str], root: Path | None
) -> Mapping[str, str]:
    """Top-level packages of the factories and of the repository -> where they are imported from."""
    names = {factory.partition(":")[0].partition(".")[0] for factory in factories}
    names |= packages_in([str(root)]) if root else set()
    names -= {"__main__", OURS, *sys.stdlib_module_names}
    found = {name: _found(name, path) for name in sorted(filter(str.isidentifier, names))}
    return {name: _placed(str(place), root) for name, place in found.items() if place}


def _found(name: str, path: Sequence[str]) -> Path | None:
    """The file of a module, or the folder of a package, on this path, or as this process finds it;
    without importing it."""
    spec = PathFinder.find_spec(name, path) or find_spec(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    if places:
        return Path(places[0])
    return Path(spec.origin) if spec.has_location and spec.origin else None


def _os() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        name = platform.system()
    return f"{name}, kernel {platform.release()}"


def _cpu_model() -> str:
    """The model in /proc/cpuinfo (x86); elsewhere the architecture."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


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


# --- data and the repository -------------------------------------------------------------


def data_files(cases: Iterable[Case]) -> dict[str, str]:
    """Path -> size and hash, for every existing path in an axis or a variable of a case.

    A value is `PATH` or `KIND:PATH`. Only both ends of a file are hashed: a corpus is long.
    """
    values = {str(v) for c in cases for v in (*c.axes.values(), *c.env.values())}
    paths = {Path(v.rpartition(":")[2]) for v in values if "/" in v}
    return {str(path): _contents(path) for path in sorted(paths) if path.exists()}


def _contents(path: Path) -> str:
    """Size and hash of a file, or of all files in a folder."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    digest, total_bytes = hashlib.sha256(), 0
    for file in files:
        size = file.stat().st_size
        total_bytes += size
        digest.update(f"{file.relative_to(path)} {size}\0".encode())
        try:
            with file.open("rb") as data:
                digest.update(data.read(DATA_END_BYTES))
                data.seek(max(0, size - DATA_END_BYTES))
                digest.update(data.read(DATA_END_BYTES))
        except OSError as error:
            digest.update(f"unreadable: {error.strerror}".encode())
    return f"{total_bytes} bytes, {digest.hexdigest()[:12]}"


def home_of(factory: str, roots: Sequence[Path] = ()) -> Path:
    """The folder of a factory's module, without importing it; the current folder if unknown.

    The repository of a run is the one with this folder, wherever the run is started. `roots` are
    the folders that workers search first.
    """
    name = factory.partition(":")[0].partition(".")[0]
    here = Path.cwd()
    if not name:  # a program, which runs here
        return here
    # The same order as in a worker, see runner.forkserver.
    first = roots or home(here)
    place = _found(name, [str(folder) for folder in first])
    return here if place is None else place if place.is_dir() else place.parent
