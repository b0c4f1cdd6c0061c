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


_LAST = "Mean of the last tenth of the steps"
_OVER_STEPS = (
    ("steps_taken", "steps taken", "steps", True, False, "Number of the last step."),
    ("loss_last", "last loss", "1", False, False, f"{_LAST}, in nats."),
    ("bits_per_byte_last", "last bits per byte", "1", False, False, f"{_LAST}."),
    ("tokens_per_s_drift", "drift of tokens/s", "ratio", True, True, "-0.1: a tenth is lost."),
    ("memory_growth_bytes_per_step", "memory growth a step", "B", False, True, "Without jumps."),
    ("slow_steps", "slow steps", "steps", False, False, "3x as long as those around them."),
)
"""Metrics that only a training run has: name, title, unit, direction, signed, about."""
OVER_STEPS = tuple(name for name, *_ in _OVER_STEPS)

METRICS: Mapping[str, Metric] = {
    m.name: m
    for m in (
        Metric(name="tokens_per_s", title="tokens/s", unit="tokens/s", higher_is_better=True),
        Metric(
            name="tokens_per_s_per_gpu",
            title="tokens/s per GPU",
            unit="tokens/s",
            higher_is_better=True,
            about="Of a program with world_size: tokens/s over its ranks.",
        ),
        Metric(name="step_s", title="step time", unit="s", higher_is_better=False),
        Metric(
            name="step_cycles",
            title="step cycles",
            unit="cycles",
            higher_is_better=False,
            about="Step time in cycles of the SM clock as measured.",
        ),
        Metric(
            name="mfu",
            title="MFU",
            unit="ratio",
            higher_is_better=True,
            about="Model FLOPs utilisation, 0 to 1.",
        ),
        Metric(
            name="roofline_share",
            title="share of roofline",
            unit="ratio",
            higher_is_better=True,
            about="Shortest time by the machine's measured peaks over the measured time, 0 to 1.",
        ),
        Metric(name="peak_memory_bytes", title="peak memory", unit="B", higher_is_better=False),
        Metric(
            name="gpu_utilisation",
            title="GPU",
            unit="ratio",
            higher_is_better=True,
            about="0 to 1.",
        ),
        Metric(
            name="cpu_utilisation",
            title="CPU",
            unit="cores",
            higher_is_better=False,
            about="In cores: 1.0 is one busy core.",
        ),
        Metric(
            name="scaling_exponent",
            title="scaling exponent",
            unit="1",
            higher_is_better=False,
            of_case=False,
        ),
        *(
            Metric(
                name=name,
                title=title,
                unit=unit,
                higher_is_better=higher,
                signed=signed,
                about=about,
            )
            for name, title, unit, higher, signed, about in _OVER_STEPS
        ),
        *(
            Metric(
                name=name,
                title=title,
                unit="1",
                higher_is_better=False,
                counted=True,
                about="A count per step.",
            )
            for name, title in (
                ("dispatched_ops", "operators per step"),
                ("host_syncs", "host syncs per step"),
                ("allocations", "allocations per step"),
                ("kernel_launches", "kernel launches per step"),
                ("device_waits", "waits for the device per step"),
                ("host_device_copies", "host-device copies per step"),
            )
        ),
    )
}
"""Every metric of the harness. It defines the keys of a suite's expectations and how values are
printed."""
