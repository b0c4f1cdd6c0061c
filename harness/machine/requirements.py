"""What a suite requires of the machine, checked before its first case.

Pure: a suite and an environment in, checks out. A check that fails or is unknown ends the run; what
a suite only wants (`else: note`) is a warning.
"""

import shlex
from collections.abc import Iterator
from fnmatch import fnmatchcase

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from harness import units
from harness.errors import SuiteError
from harness.machine.environment import NOT_REPORTED
from harness.records import Check, Environment, Grade, Scalar, Suite, gpu_matches

GPU_NODE = "Run it on a GPU node. `harness list` shows what runs anywhere."
_CHOOSE = "Choose GPUs with CUDA_VISIBLE_DEVICES; `nvidia-smi -L` lists them."
_ANEW = "Measure it anew: `harness run`."
_TITLES = {
    "gpu": "GPU model",
    "gpus": "number of GPUs",
    "gpu_free_bytes": "free GPU memory",
}
_NO_PACKAGE = {
    "python": "Use a Python of this version.",
    "cuda": "Install a torch that is built for it.",
    "cudnn": "Install a torch that brings it.",
}
_TORCH = {
    "allow_tf32_matmul": "export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 (0: off)",
    "float32_matmul_precision": "export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 (high; 0: highest)",
    "expandable_segments": "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "flash_attention_in_torch": "Install a torch that is built with FlashAttention.",
}
"""What sets a setting of torch before the workload starts."""

_Seen = tuple[str, bool | None, str]
"""What the machine has, whether that is enough (None: unknown), and what else to do."""


def checks(suite: Suite, here: Environment, gpu_node: str = GPU_NODE) -> tuple[Check, ...]:
    """One check for each requirement of the suite; `gpu_node` is the remedy where there is no GPU
    at all."""
    return tuple(_checks(suite, here, gpu_node))


def require(suite: Suite, here: Environment, gpu_node: str = GPU_NODE) -> None:
    """Refuse a machine that lacks something.

    Raises:
        SuiteError: With every requirement that is not met.
    """
    found = checks(suite, here, gpu_node)
    unmet = [c for c in found if c.grade in (Grade.FAIL, Grade.UNKNOWN)]
    if unmet:
        count = f"{len(unmet)} of its {len(found)} requirements" if found[1:] else "a requirement"
        lines = [f"{c.name}: {c.fact}. {c.remedy}" for c in unmet]
        verb = "are" if unmet[1:] else "is"
        raise SuiteError(suite.path, f"{count} {verb} not met", "\n  ".join(lines))


def _checks(suite: Suite, here: Environment, gpu_node: str) -> Iterator[Check]:
    if suite.device == "cuda" and here.gpu is None:
        fact = f"this suite needs an NVIDIA GPU, but none is available: {here.gpu_unavailable}"
        yield Check("GPU", Grade.FAIL, fact, gpu_node)
    for stated, missed in ((suite.requires, Grade.FAIL), (suite.wants, Grade.WARN)):
        for key, wanted in stated.items():
            kind, _, name = key.partition(".")
            seen, enough, remedy = _seen(kind, name, wanted, here)
            grade = Grade.OK if enough else missed
            if enough is None and missed is Grade.FAIL:
                grade = Grade.UNKNOWN
            fact = f"{seen}; required: {_shown(kind, wanted)}"
            yield Check(name or _TITLES.get(kind, kind), grade, fact, "" if enough else remedy)


def _shown(kind: str, wanted: Scalar) -> str:
    match kind:
        case "gpus":
            return f"{wanted} or more"
        case "gpu_free_bytes":
            return f"{float(wanted) / 1e9:.1f} GB or more"
        case "gpu":
            return " or ".join(str(wanted).split("|"))
    return "any" if wanted == "*" else units.scalar(wanted).strip("*")


def _seen(kind: str, name: str, wanted: Scalar, here: Environment) -> _Seen:
    match kind:
        case "packages":
            return _package(name, str(wanted), here)
        case "variables":
            return _variable(name, str(wanted), here)
        case "torch" if name in here.torch_settings:
            value = here.torch_settings[name]
            return units.scalar(value), value == wanted, _TORCH.get(name, "Set it before the run.")
        case "torch" if here.gpu:
            return "not recorded", None, _ANEW
    if here.gpu is None:
        return f"no GPU{f': {here.gpu_unavailable}' * (kind == 'gpu')}", False, GPU_NODE
    if kind == "gpu":
        fits = any(gpu_matches(one, here.gpu.name) for one in str(wanted).split("|"))
        return here.gpu.name, fits, f"Run it on such a GPU. {_CHOOSE}"
    if kind == "driver":
        known = here.gpu.driver != NOT_REPORTED
        enough = _satisfies(here.gpu.driver, str(wanted)) if known else None
        return here.gpu.driver, enough, "Update the driver; `nvidia-smi` shows it."
    has = here.gpu_count if kind == "gpus" else here.gpu_free_bytes
    if has is None:
        return "not recorded", None, _ANEW
    if kind == "gpus":
        return str(has), has >= float(wanted), _CHOOSE
    remedy = f"End what holds it (`nvidia-smi` lists it), or take another GPU. {_CHOOSE}"
    return f"{has / 1e9:.1f} GB", has >= float(wanted), remedy


def _package(name: str, wanted: str, here: Environment) -> _Seen:
    """Installed as distribution metadata has it; torch, CUDA and flash-attn as a worker has it."""
    bound = "" if wanted == "*" else wanted
    install = f"pip install {shlex.quote(name + bound)}"
    install += " --no-build-isolation" if name == "flash-attn" else ""
    remedy = _NO_PACKAGE.get(name, install)
    if name not in here.versions:
        return "not recorded", None, remedy
    version = here.versions[name]
    if version is None:
        return "not installed", False, remedy
    return version, _satisfies(version, wanted), remedy


def _variable(name: str, wanted: str, here: Environment) -> _Seen:
    remedy = f"export {name}={'...' if wanted == '*' else shlex.quote(wanted.strip('*'))}"
    if name in here.variables:
        value = here.variables[name]
        return value or "empty", fnmatchcase(value, wanted), remedy
    if name in here.other_variables:  # only a digest
        return "set", True if wanted == "*" else None, remedy
    known = name.startswith(here.prefixes) or bool(here.other_variables)
    return ("not set", False, remedy) if known else ("not recorded", None, remedy)


def _satisfies(version: str, wanted: str) -> bool:
    """Whether a version meets a bound such as `>=2,<3`, or a pattern such as `580.*`."""
    if wanted[:1] not in "<>=!~":
        return fnmatchcase(version, wanted)
    try:
        return SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
