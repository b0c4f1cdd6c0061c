"""The seam: all that the harness knows of a kernel.

A suite names a factory as `package.module:function`. The worker imports it, calls it with the
provider and the axes of one case, and gets a Workload back. Nothing else crosses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness.records import Scalar


class Unsupported(Exception):
    """Raised by a factory, or by a first call, to decline a case; becomes Measurement.detail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One computation with its inputs bound, ready to be checked and timed.

    Tolerance, repetitions and baseline are decisions of the suite, so they are not here.
    """

    run: Callable[[], Any]
    """Launch the computation once on the current stream; must not synchronise. What it returns
    (a tensor, or a mapping of names to tensors) is checked for NaN and Inf after sampling."""
    check: Callable[[], Mapping[str, Any]] | None = None
    """The outputs to compare, by name, computed by the code under test; called once, before
    any `run`. None: nothing can be compared."""
    reference: Callable[[], Mapping[str, Any]] | None = None
    """The same names from the definition, in float64 (or float32 where that is too dear)."""
    eager: Callable[[], Mapping[str, Any]] | None = None
    """The definition at the working precision; its error against `reference` is the bound."""
    no_reference: str = ""
    """Why `reference` is None."""
    tokens: int | None = None
    """Tokens one run processes; None where that means nothing."""
    flops: int | None = None
    """Floating-point operations the mathematics of one run needs; masked work is not counted."""
    bytes: int | None = None
    """Bytes a perfect implementation moves: each input read once, each output written once."""
    effective: Callable[[], Mapping[str, Scalar]] | None = None
    """Called after the last sample: the configuration as observed, not as asked for. What it
    tells under the name of an axis must equal the axis; else the outcome is path_mismatch."""
    flags: Callable[[], Mapping[str, bool]] | None = None
    """Called with `effective`: each environment variable that is set and that this code knows as
    a flag, and whether anything has asked for it. One that the case sets and nothing has asked
    for makes the outcome path_mismatch. None: nobody can tell."""
    rotated: Callable[[int], Sequence[Callable[[], Any]]] | None = None
    """So many runs like `run`, each on inputs of its own of the same shapes. None: the inputs
    cannot be rotated."""
    capturable: bool = False
    """Whether replaying one captured run does the work of a call: nothing on the host moves from
    run to run, such as a cursor in the data. Only then may the harness capture it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one run of a case will do, told without building it."""

    tokens: int | None
    flops: int | None


COUNTS = "counts"
"""Name of the function that a factory's module may offer to tell Counts; called as `preflight`
is, and after it. With it `harness run` can warn, before it begins, of a target that asks little."""
PRELOAD = "PRELOAD"
"""Name of a tuple of module names in a factory's module: what its factories import when called.
The factory's module, and these, are imported once and before a case's NSA_* variables are set,
which must therefore be read when something is called. They may not touch CUDA."""
PREFLIGHT = "preflight"
"""Name of the function that a factory's module may offer beside its factories."""


class Preflight(Protocol):
    """Checks a case without building it, so that a suite with a mistake stops before it runs."""

    def __call__(
        self, function: str, provider: str, axes: Mapping[str, Scalar], env: Mapping[str, str]
    ) -> None:
        """Check what `function` of this module would be called with, under these variables.

        Raises:
            ValueError: The case cannot run; with the place, the fact and the remedy.
        """


class Factory(Protocol):
    """What a suite's `factory:` must name."""

    def __call__(self, provider: str, axes: Mapping[str, Scalar]) -> Workload: ...
