"""The interface between the harness and the code it measures.

A suite names a factory as `package.module:function`. The worker imports it, calls it with the
provider and the axes of one case, and gets a Workload. The harness knows nothing else of a kernel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from harness.records import Scalar


class Unsupported(Exception):
    """Raised by a factory, or by a first call, to decline a case; becomes Measurement.detail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One computation with its inputs bound, ready to be checked and timed."""

    run: Callable[[], Any]
    """Run one step on the current stream; must not synchronise. The result (a tensor, or a mapping
    of names to tensors) is checked for NaN and Inf after sampling."""
    check: Callable[[], Mapping[str, Any]] | None = None
    """The outputs to compare, by name, from the code under test; called once, before any `run`.
    None: nothing can be compared."""
    reference: Callable[[], Mapping[str, Any]] | None = None
    """The same names from the definition, in float64 (or float32 if that is too expensive)."""
    eager: Callable[[], Mapping[str, Any]] | None = None
    """The definition at the working precision; its error against `reference` is the bound."""
    no_reference: str = ""
    """Why `reference` is None."""
    sampled: tuple[int, int] | None = None
    """Rows that the three contain, of rows in all, if they are a sample; None: everything."""
    tokens: int | None = None
    """Tokens that one step processes; None if the workload has no tokens."""
    flops: int | None = None
    """Floating-point operations that one step needs mathematically, without masked work."""
    bytes: int | None = None
    """Bytes a perfect implementation moves: each input read once, each output written once."""
    effective: Callable[[], Mapping[str, Scalar]] | None = None
    """Called after the last sample: the configuration as observed. An entry with the name of an
    axis must equal the axis, or the outcome is path_mismatch."""
    flags: Callable[[], Mapping[str, bool]] | None = None
    """Called with `effective`: for each environment variable that is set and that this code knows
    as a flag, whether it was read. If the case sets one that was not read, the outcome is
    path_mismatch. None: unknown."""
    fresh: Callable[[int], None] | None = None
    """Write inputs number i, of the same shapes, into the tensors that `run` reads; number 0 are
    those at the beginning. Called before every step, outside of its time, so that an output kept
    from an earlier step is wrong. None: every step has the same inputs."""
    stateful: bool | None = None
    """Whether a step changes what the next one computes, as training does. False: every step must
    give the same output for the same inputs, or the outcome is incorrect. None: unknown, so that
    outputs of steps are not compared."""
    unreplayed: Callable[[], Any] | None = None
    """The step of a `run` that replays a CUDA graph, with the same kernels launched one by one: a
    profile of it shows the ranges of kernels, which those of a graph lack. Called after `run`."""
    steps: int | None = None
    """Of a training run: it takes exactly this many steps, at least 2, within its timeout. None:
    as many as give enough samples."""
    recorded: Callable[[], Mapping[str, Any]] | None = None
    """Called after every step, outside of its time: numbers or scalar tensors of this step by name,
    which the record keeps step by step: loss (nats), bits_per_byte, grad_norm, memory_bytes."""
    capturable: bool = False
    """Whether replaying a captured step as a CUDA graph does the work of a call: no state on the
    host, such as a cursor in the data, changes from step to step."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 2:
            raise ValueError(f"steps={self.steps} is below 2, so nothing is left after a warm-up")


PRELOAD = "PRELOAD"
"""Name of an optional tuple in a factory's module: modules that its factories import when called.
The factory's module and these are imported once, before the NSA_* variables of a case are set, so
the variables must be read in calls. The imports must not touch CUDA."""
PREFLIGHT = "preflight"
"""Name of an optional function in a factory's module: a Preflight."""


class Preflight(Protocol):
    """Checks a case without building it, so that a mistake in a suite is found before the run."""

    def __call__(
        self, function: str, provider: str, axes: Mapping[str, Scalar], env: Mapping[str, str]
    ) -> tuple[int, int] | None:
        """Check the arguments and environment variables for `function` of this module; a ValueError
        if the case cannot run: what is wrong, where, and what to do. May return the FLOPs and bytes
        of a step, from which a dry run tells its bound."""


class Factory(Protocol):
    """The function that a suite's `factory:` names."""

    def __call__(self, provider: str, axes: Mapping[str, Scalar]) -> Workload: ...
