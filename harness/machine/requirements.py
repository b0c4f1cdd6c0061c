"""What a suite requires of the machine, checked before its first case.

Pure: a suite and an environment in, checks out. A failed check ends the run; what a suite only
wants (`else: note`) is a warning. What was not recorded is not met.
"""

import shlex
from fnmatch import fnmatchcase

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from harness import units
from harness.errors import SuiteError
from harness.machine.facts import REMEDIES
from harness.records import Check, Environment, Grade, Scalar, Suite, gpu_matches

GPU_NODE = "Run it on a GPU node; `harness run smoke` and `harness gate --counters` need no GPU."
_CHOOSE = "Choose GPUs with CUDA_VISIBLE_DEVICES; `nvidia-smi -L` lists them."
_UNKNOWN = "not recorded"


def checks(suite: Suite, here: Environment) -> tuple[Check, ...]:
    """One check for each requirement of the suite."""
    found = []
    if suite.device == "cuda" and here.gpu is None:
        fact = f"this suite needs an NVIDIA GPU, but none is available: {here.gpu_unavailable}"
        found.append(Check("GPU", Grade.FAIL, fact, GPU_NODE))
    for stated, missed in ((suite.requires, Grade.FAIL), (suite.wants, Grade.WARN)):
        for key, wanted in stated.items():
            kind, _, name = key.partition(".")
            seen, met, remedy = _seen(kind, name, wanted, here)
            needed = "any" if wanted == "*" else units.scalar(wanted).strip("*")
            if kind == "gpu_free_bytes":
                needed = f"{float(wanted) / 1e9:.1f} GB"
            fact = f"{seen}; required: {needed.replace('|', ' or ')}"
            grade = Grade.OK if met else missed
            found.append(Check(name or kind, grade, fact, "" if met else remedy))
    return tuple(found)


def require(suite: Suite, here: Environment) -> None:
    """Raise a SuiteError with every requirement that is not met."""
    found = checks(suite, here)
    if unmet := [f"{c.name}: {c.fact}. {c.remedy}" for c in found if c.grade is Grade.FAIL]:
        problem = f"requirements that are not met: {len(unmet)} of {len(found)}"
        raise SuiteError(suite.path, problem, "\n  ".join(unmet))


def _seen(kind: str, name: str, wanted: Scalar, here: Environment) -> tuple[str, bool, str]:
    """What the machine has, whether that is enough, and what to do if it is not."""
    match kind:
        case "packages":
            return _package(name, str(wanted), here)
        case "variables":
            return _variable(name, str(wanted), here)
        case "torch" if here.gpu or name in here.torch_settings:
            value = here.torch_settings.get(name, _UNKNOWN)
            remedy = REMEDIES.get(name, "Set it before the run.")
            return units.scalar(value), value == wanted, remedy
    if here.gpu is None:
        why = f": {here.gpu_unavailable}" if kind == "gpu" else ""
        return f"no GPU{why}", False, GPU_NODE
    if kind == "gpu":
        fits = any(gpu_matches(one, here.gpu.name) for one in str(wanted).split("|"))
        return here.gpu.name, fits, f"Run it on such a GPU. {_CHOOSE}"
    if kind == "driver":
        enough = _satisfies(here.gpu.driver, str(wanted))
        return here.gpu.driver, enough, "Update the driver; `nvidia-smi` shows it."
    has = here.gpu_count if kind == "gpus" else here.gpu_free_bytes
    seen = _UNKNOWN if has is None else str(has) if kind == "gpus" else f"{has / 1e9:.1f} GB"
    remedy = _CHOOSE if kind == "gpus" else f"End what holds it (`nvidia-smi`). {_CHOOSE}"
    return seen, has is not None and has >= float(wanted), remedy


def _package(name: str, wanted: str, here: Environment) -> tuple[str, bool, str]:
    remedy = f"pip install {shlex.quote(name + wanted.strip('*'))}"
    remedy += " --no-build-isolation" if name == "flash-attn" else ""
    if name in ("python", "cuda", "cudnn"):
        remedy = "Use a Python, or a torch, that has it."
    version = here.versions.get(name, _UNKNOWN)
    met = version is not None and _satisfies(version, wanted)
    return version or "not installed", met, remedy


def _variable(name: str, wanted: str, here: Environment) -> tuple[str, bool, str]:
    value = here.variables.get(name, "not set")
    met = name in here.variables and fnmatchcase(value, wanted)
    remedy = f"export {name}={'...' if wanted == '*' else shlex.quote(wanted.strip('*'))}"
    return value, met, remedy


def _satisfies(version: str, wanted: str) -> bool:
    """Whether a version meets a bound such as `>=2,<3`, or a pattern such as `580.*`."""
    if wanted[:1] not in "<>=!~":
        return version != _UNKNOWN and fnmatchcase(version, wanted)
    try:
        release = Version(Version(version).base_version)  # 2.9.0a0+nv is a build of 2.9
        return SpecifierSet(wanted).contains(release)
    except InvalidVersion:
        return False
