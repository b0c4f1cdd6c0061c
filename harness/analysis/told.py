"""What programs told of themselves, over the processes of a case."""

from collections.abc import Mapping, Sequence

import numpy as np

from harness.analysis import stats
from harness.records import METRICS, Case, Estimate, Measurement

BY_THE_HARNESS = ("step_s", "peak_memory_bytes")
"""Told as well, and kept where the harness keeps its own."""


def estimates(case: Case, measurements: Sequence[Measurement]) -> Mapping[str, Estimate]:
    """By metric; one that a process did not tell is absent.

    A process counts once, by its last value or by the median of all. Those of the harness's
    metrics are rates, and get a geometric mean; of another nobody knows whether it can be zero.
    """
    found = {}
    for reading in case.program.readings if case.program else ():
        name = reading.metric
        values = [m.readings.get(name, ()) for m in measurements]
        if name in BY_THE_HARNESS or not values or not all(values):
            continue
        each = [float(v[-1] if reading.last else np.median(v)) for v in values]
        samples = len(each) if reading.last else sum(map(len, values))
        rate = name in METRICS and all(v > 0 for v in each)
        mean = stats.geometric if rate else stats.arithmetic
        found[name] = mean(each, samples=samples)
    return found
