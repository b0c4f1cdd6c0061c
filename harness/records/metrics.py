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


METRICS: Mapping[str, Metric] = {
    m.name: m
    for m in (
        Metric(name="tokens_per_s", title="tokens/s", unit="tokens/s", higher_is_better=True),
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
        Metric(
            name="steps_taken",
            title="steps taken",
            unit="steps",
            higher_is_better=True,
            about="Number of the last step of a training run.",
        ),
        Metric(
            name="loss_last",
            title="last loss",
            unit="1",
            higher_is_better=False,
            about="Mean of the last tenth of the steps, in nats.",
        ),
        Metric(
            name="bits_per_byte_last",
            title="last bits per byte",
            unit="1",
            higher_is_better=False,
            about="Mean of the last tenth of the steps.",
        ),
        Metric(
            name="tokens_per_s_drift",
            title="drift of tokens/s",
            unit="ratio",
            higher_is_better=True,
            signed=True,
            about="Change over the run by the trend: -0.1 is a tenth slower at the end.",
        ),
        Metric(
            name="memory_growth_bytes_per_step",
            title="memory growth a step",
            unit="B",
            higher_is_better=False,
            signed=True,
        ),
        Metric(
            name="slow_steps",
            title="slow steps",
            unit="steps",
            higher_is_better=False,
            about="Steps that take three times as long as those around them.",
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

OVER_STEPS = (
    "steps_taken",
    "loss_last",
    "bits_per_byte_last",
    "tokens_per_s_drift",
    "memory_growth_bytes_per_step",
    "slow_steps",
)
"""Metrics that only a training run has, by what its steps reported."""
