"""The ranks of a program as the parent sees them: what their GPUs did, and in which one a hang
begins."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.analysis.recorded import readings
from harness.records import Measurement, Rank, Telemetry, of_rank
from harness.runner.stacks import ThreadStack

_INNERMOST = 8
"""Frames that may show that a rank waits for the others."""
_IN_A_COLLECTIVE = re.compile(
    r"\((distributed_c10d|_functional_collectives|c10d_logger).py:|^_engine_run_backward "
)
"""DDP averages gradients inside the backward pass."""


def with_gpus(m: Measurement) -> tuple[Rank, ...]:
    """The ranks of a measurement with what their GPUs did."""
    return tuple(_with_gpu(m, m.telemetry, rank) if m.telemetry else rank for rank in m.ranks)


def _with_gpu(m: Measurement, seen: Telemetry, rank: Rank) -> Rank:
    names = {of_rank(name, rank.rank): name for name in ("gpu_utilisation", "gpu_power_w")}
    own = {names[of]: found for of, found in seen.channels.items() if of in names}
    alone = replace(m, telemetry=replace(seen, channels=own))

    def mean(channel: str) -> float | None:
        found = readings(alone, channel, ("sampling",))
        return statistics.fmean(found) if found else None

    return replace(rank, gpu_utilisation=mean("gpu_utilisation"), gpu_power_w=mean("gpu_power_w"))


def stuck(steps: Sequence[int], stacks: Mapping[int, ThreadStack]) -> tuple[int, str] | None:
    """The rank in which a hang begins, and by what that is seen; None if it is not.

    It is the rank that is behind by its steps, or else the only one, of those with a stack, that
    does not wait in a collective.
    """
    if len(set(steps)) > 1:
        rank = min(range(len(steps)), key=lambda r: (steps[r], r))
        return rank, f"it finished {steps[rank]} steps, others {max(steps)}"
    inner = {rank: stack.frames[:_INNERMOST] for rank, stack in stacks.items()}
    apart = [rank for rank, seen in inner.items() if not any(map(_IN_A_COLLECTIVE.search, seen))]
    if len(apart) == 1 and len(inner) > 1:
        return apart[0], "the others wait in a collective"
    return None
