"""Reads a case's axes; a misspelt, missing or unused axis is an error.

A sweep of an axis that its workload does not read would report equal numbers as a result;
`Axes.finish` refuses it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any, TypeVar

import torch

from harness.records import Scalar
from nsa.config import BRANCHES, NSAConfig
from nsa.flags import PREFIX, Flags

Word = TypeVar("Word", bound=str)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DENSE = {
    "dense": "sdpa",
    "dense-cudnn": "cudnn",
    "dense-flash": "flash",
    "dense-triton": "triton",
}
"""Providers that compute plain causal attention, and their route in nsa.ops."""

_AXIS_OF = {
    "NSA_SEQ_LEN": "seq_len",
    "NSA_BATCH_SIZE": "batch",
    "NSA_ACCUM": "accum",
    "NSA_NO_GC": "gc",
}
"""Flags that set options of the training script, and the axis that replaces each in a suite."""

_FA2 = {"NSA_USE_FA2", "NSA_USE_FA2_WIN", "NSA_USE_FA2_CMP", "NSA_FORCE_PARITY"}
_MODEL = _FA2 | {
    "NSA_PREFILL_BATCHED",
    "NSA_SEL_RANGES_V2",
    "NSA_USE_SEL_PACK",
    "NSA_FORCE_SEL_MASK",
    "NSA_USE_SEL_VARLEN",
    "NSA_USE_TRITON",
    "NSA_USE_TRITON_SEL",
    "NSA_DISABLE_AUX_STATS",
}
_ROUTING = (_MODEL | {"NSA_BRANCHES"}) - {"NSA_PREFILL_BATCHED"}
"""Flags that concern only NSA's branches."""
_TRAIN = _MODEL | {"NSA_BRANCHES", "NSA_FWE_DOC_BATCH", "NSA_FWE_PREFETCH", "NSA_FWE_Q"}
READ_FLAGS: Mapping[str, set[str]] = {
    "attention": _FA2,  # its provider is the route of the selection
    "forward": _MODEL,
    "layer": _MODEL,
    "decode": _MODEL,
    "decode_attention": set(),  # its provider is the route of everything
    "training_run": _TRAIN,
    "train": _TRAIN,
}
"""Flags that a workload reads for at least one provider or dataset, and so can sweep."""


class AxisError(ValueError):
    """An axis is missing, has the wrong kind of value, or is not one the workload reads."""


def target_device() -> str:
    """Where a workload runs: on the GPU, if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def word_of(dtype: torch.dtype) -> str:
    """The axis's name of a dtype."""
    return next((word for word, known in DTYPES.items() if known is dtype), str(dtype))


class Axes:
    """The axes of one case, read one by one; upper-case axes are environment variables, and reach
    the workload through the environment."""

    def __init__(self, workload: str, axes: Mapping[str, Scalar], flags: Flags) -> None:
        for flag, axis in _AXIS_OF.items():
            if flag in flags.set_names:
                raise AxisError(
                    f"{flag} is set, but in a suite the axis {axis!r} sets this\n"
                    f"  Unset {flag}, or sweep {axis}."
                )
        for name in axes:
            if name.startswith(PREFIX) and name not in READ_FLAGS[workload]:
                raise AxisError(
                    f"{workload} does not read {name}, so sweeping it would measure nothing\n"
                    f"  It reads {', '.join(sorted(READ_FLAGS[workload]))}."
                )
        self.flags = flags
        self._workload = workload
        self._variables = [name for name in axes if name in _ROUTING]
        self._axes = {name: value for name, value in axes.items() if not name.isupper()}
        self._known: set[str] = set()

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise AxisError(f"{self._workload}: {name}={value!r} is not a positive whole number")
        return value

    def word(self, name: str, choices: Iterable[Word], default: Word | None = None) -> Word:
        """One of a closed list."""
        return self._one_of(name, self._take(name, default), choices)

    def provider(self, provider: str, choices: Iterable[str]) -> str:
        """The case's provider: not an axis, but also one of a closed list."""
        return self._one_of("provider", provider, choices)

    def text(self, name: str, default: str | None = None) -> str:
        """Any string; its reader checks it."""
        value = self._take(name, default)
        if not isinstance(value, str):
            raise AxisError(f"{self._workload}: {name}={value!r} is not text; quote it")
        return value

    def sizes(self) -> NSAConfig:
        """The sizes of NSA by their names; those of the paper by default."""
        paper = {n: size for n, size in asdict(NSAConfig()).items() if isinstance(size, int)}
        given: dict[str, Any] = {name: self.integer(name, size) for name, size in paper.items()}
        return NSAConfig(**given)

    def unrouted(self, why: str) -> None:
        """Refuse axes that choose a route of a branch where the provider has no such choice. A flag
        without effect, such as NSA_USE_FA2=0, is accepted."""
        for name in self._variables:
            if not self.flags.asks_nothing_of_branches(name):
                raise AxisError(
                    f"{self._workload}: {name} has no effect here: {why}\n"
                    "  Exclude this combination."
                )

    def every_branch(self) -> None:
        """Refuse to leave a branch out where the references compute all three."""
        if self.flags.branches != BRANCHES:
            raise AxisError(
                f"{self._workload}: NSA_BRANCHES leaves a branch out, which only `train` can do\n"
                "  Unset NSA_BRANCHES here."
            )

    def finish(self) -> None:
        """Refuse axes that were not read."""
        for name in self._axes:
            if name not in self._known:
                raise AxisError(
                    f"{self._workload} does not read the axis {name!r}, so sweeping it would "
                    f"measure nothing; it reads {', '.join(sorted(self._known))}"
                    + _hint(name, self._known)
                )

    def _one_of(self, name: str, value: Scalar, choices: Iterable[Word]) -> Word:
        known = {str(choice): choice for choice in choices}
        if not isinstance(value, str) or value not in known:
            raise AxisError(
                f"{self._workload}: {name}={value!r} is not one of {', '.join(known)}"
                + _hint(str(value), known)
            )
        return known[value]

    def _take(self, name: str, default: Scalar | None) -> Scalar:
        self._known.add(name)
        value = self._axes.get(name, default)
        if value is None:
            raise AxisError(f"{self._workload} needs the axis {name!r}")
        return value


def _hint(word: str, choices: Iterable[str]) -> str:
    near = get_close_matches(word, list(choices), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
