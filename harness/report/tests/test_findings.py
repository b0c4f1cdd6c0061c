"""The sentences on axes without effect and on variables."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.dead_axes import DeadAxis
from harness.records import Case, Counters, Profile, Run, TensorDigest
from harness.report.tests.test_report import values
from harness.report.text import dead_axis_sentence
from harness.tests.fake_runs import run, sweep, timed

DEAD = DeadAxis(
    workload="train",
    provider="nsa",
    axes=("NSA_FWE_Q",),
    values=((1,), (4,), (8,)),
    pairs=6,
    without_kernels=False,
    time_differs=False,
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "`NSA_FWE_Q` has no effect (1, 4 and 8): the same operators, kernels, counters and"),
        ({"without_kernels": True}, "(kernels not seen) in 6"),
        ({"time_differs": True}, "in 6 pairs of cases; only the step time differs."),
        ({"axes": ("provider",), "values": (("a",), ("b",))}, "providers a and b do the same:"),
    ],
)
def test_an_axis_without_effect_in_words(changes: dict[str, Any], expected: str) -> None:
    assert expected in dead_axis_sentence(replace(DEAD, **changes))


def alike(cases: Sequence[Case]) -> Run:
    """A run in which every case did the same."""
    digest = TensorDigest(name="loss", dtype="float32", shape=(), norm=1.0, projection=1.0)
    return run(
        cases,
        lambda c: timed(
            c,
            0.05,
            processes=2,
            counters=Counters(dispatched_ops=100, steps=2),
            profile=Profile(fingerprint="abc"),
            output_digest=(digest,),
        ),
    )


def test_an_axis_without_effect_is_a_cause_and_in_the_profile() -> None:
    built = values(alike(sweep(flag=[0, 1])))

    assert "flag has no effect" in f"{built['lines']}{built['why']}"
    assert built["dead"][0].startswith("`train/nsa`: `flag` has no effect (0 and 1)")
