"""The table of metrics: name, unit, direction, and how values are printed."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A named quantity with its unit and the direction in which it is good."""

    name: str
    title: str
    unit: str
    """For METRICS it also sets how values are printed: see harness.units."""
    higher_is_better: bool
    counted: bool = False
    """An exact count of one step, without noise: one of harness.records.COUNTERS."""
    of_case: bool = True
    """Whether a single case has a value, so that an expectation may name the metric."""
    signed: bool = False
    """Whether it may be 0 or negative, so that a factor says nothing of it."""
    about: str = ""
    """What the name does not say, for editors of a suite."""


_TABLE = (  # name, title, unit, whether higher is better, and what the name does not say
    ("tokens_per_s", "tokens/s", "tokens/s", True, ""),
    ("tokens_per_s_per_gpu", "tokens/s per GPU", "tokens/s", True, "Over the ranks of a program."),
    ("step_s", "step time", "s", False, ""),
    ("kernel_s", "kernel time", "s", False, "GPU time of a step, by the profile."),
    ("step_cycles", "step cycles", "cycles", False, "Step time in cycles of the SM clock."),
    ("mfu", "MFU", "ratio", True, "Model FLOPs utilisation, 0 to 1."),
    ("roofline_share", "share of roofline", "ratio", True, "By measured peaks, 0 to 1."),
    ("peak_memory_bytes", "peak memory", "B", False, ""),
    ("energy_j", "energy a step", "J", False, "By NVML, if a process samples for two seconds."),
    ("energy_per_token_j", "energy a token", "J", False, "As energy_j."),
    ("gpu_utilisation", "GPU", "ratio", True, "0 to 1."),
    ("cpu_utilisation", "CPU", "cores", False, "In cores: 1.0 is one busy core."),
    ("error_of_bound", "largest error as a share of its bound", "ratio", False, "Before timing."),
    ("scaling_exponent", "scaling exponent", "1", False, ""),
)
_LAST = "Mean of the last tenth of the steps"
_OVER_STEPS = (  # likewise, of a training run only
    ("steps_taken", "steps taken", "steps", True, "Number of the last step."),
    ("loss_last", "last loss", "1", False, f"{_LAST}, in nats."),
    ("bits_per_byte_last", "last bits per byte", "1", False, f"{_LAST}."),
    ("tokens_per_s_drift", "drift of tokens/s", "ratio", True, "-0.1: a tenth is lost."),
    ("memory_growth_bytes_per_step", "memory growth a step", "B", False, "Without jumps."),
    ("slow_steps", "slow steps", "steps", False, "3x as long as those around them."),
)
_COUNTS = {
    "dispatched_ops": "operators",
    "host_syncs": "host syncs",
    "allocations": "allocations",
    "kernel_launches": "kernel launches",
    "device_waits": "waits for the device",
    "host_device_copies": "host-device copies",
}
"""Counts per step -> what they count."""
COUNTERS = tuple(_COUNTS)
"""The counts of Counters, by name; each is a metric too."""
_SIGNED = ("tokens_per_s_drift", "memory_growth_bytes_per_step")
OVER_STEPS = tuple(name for name, *_ in _OVER_STEPS)
"""Metrics that only a training run has."""

SPEEDS = ("tokens_per_s", "step_s")
"""Metrics of speed, one of which a table of speeds shows."""

METRICS: Mapping[str, Metric] = {
    name: Metric(
        name=name,
        title=title,
        unit=unit,
        higher_is_better=higher,
        counted=name in _COUNTS,
        of_case=name != "scaling_exponent",
        signed=name in _SIGNED,
        about=about,
    )
    for name, title, unit, higher, about in (
        *_TABLE,
        *_OVER_STEPS,
        *((n, f"{what} per step", "1", False, "A count per step.") for n, what in _COUNTS.items()),
    )
}
"""Every metric of the harness: the keys of expectations, and how values are printed."""
