"""The ranks of a program as the parent sees them: what their GPUs did, and in which one a hang
begins."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from harness.analysis.statistics import readings
from harness.machine.nvml import CHANNELS, NvmlProbe
from harness.machine.probes import Probe
from harness.records import Measurement, Rank, Telemetry, of_rank
from harness.runner.stacks import ThreadStack

_INNERMOST = 8
"""Frames that may show that a rank waits for the others."""
_IN_A_COLLECTIVE = re.compile(
    r"\((distributed_c10d|_functional_collectives|c10d_logger).py:|^_engine_run_backward "
)
"""DDP averages gradients inside the backward pass."""


def completed(m: Measurement, probes: Sequence[Probe]) -> Measurement:
    """The measurement with what the GPU of each rank did."""
    gpus = {p.rank: p.uuid for p in probes if isinstance(p, NvmlProbe) and p.uuid}
    return replace(
        m, ranks=tuple(_with_gpu(m, r, gpus[r.rank]) if r.rank in gpus else r for r in m.ranks)
    )


def _with_gpu(m: Measurement, rank: Rank, uuid: str) -> Rank:
    channels = m.telemetry.channels if m.telemetry else {}
    names = {of_rank(name, rank.rank): name for name in CHANNELS}
    own = {name: channels[of] for of, name in names.items() if of in channels}
    telemetry = Telemetry(t_s=m.telemetry.t_s if m.telemetry else (), channels=own)
    alone = replace(m, telemetry=telemetry)
    used = readings(alone, "gpu_utilisation", ("sampling",))
    drawn = readings(alone, "gpu_power_w", ("sampling",))
    clock = readings(alone, "gpu_sm_clock_hz", ("sampling",))
    taken = [x for x in own.get("gpu_memory_bytes", ()) if x is not None]
    return replace(
        rank,
        gpu=uuid,
        peak_memory_bytes=int(max(taken)) if taken else None,
        gpu_utilisation=float(np.mean(used)) if used else None,
        gpu_power_w=float(np.mean(drawn)) if drawn else None,
        gpu_sm_clock_hz=float(np.mean(clock)) if clock else None,
    )


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
