"""Axes without effect."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.dead_axes import DeadAxis, dead_axes
from harness.analysis.summary import summarise
from harness.records import (
    Case,
    Counters,
    Measurement,
    MetricSource,
    Outcome,
    Profile,
    Program,
    Steps,
    TensorDigest,
)
from harness.tests.fake_runs import case, ended, late, run, sweep, timed, trained


def did(
    c: Case,
    step_s: float = 0.05,
    *,
    ops: int | None = 100,
    names: str = "abc",
    output: Sequence[float] | None = (1.0, 1.0, 1.0),
    dtype: str = "float32",
    gpu: bool = True,
    **changes: Any,
) -> list[Measurement]:
    """Three processes that counted `ops` and ran `names`, each with its own output."""
    counters = Counters(dispatched_ops=ops, host_syncs=3, steps=2) if ops else None
    profile = Profile(fingerprint=names, no_kernels="" if gpu else "no GPU")
    measured = timed(c, step_s, counters=counters, profile=profile, **changes)
    if output is None:
        return measured
    digests = [
        TensorDigest(name="loss", dtype=dtype, shape=(), norm=abs(x), projection=x) for x in output
    ]
    return [replace(m, output_digest=(digests[m.process],)) for m in measured]


def inert(
    cases: Sequence[Case], measure: Callable[[Case], list[Measurement]]
) -> tuple[DeadAxis, ...]:
    recorded = run(cases, measure)
    return dead_axes(recorded, summarise(recorded))


FLAGS = sweep(flag=[0, 1])
SWEEP = sweep(seq_len=[512, 2048], flag=[0, 1, 2])
"""`seq_len` always changes the outputs of `of_length`."""
LENGTHS = sweep(seq_len=[512, 1024, 2048])


def of_length(c: Case, **changes: Any) -> list[Measurement]:
    t = float(c.axes["seq_len"])
    return did(c, **{"output": (t, t, t), "step_s": t * 1e-4, **changes})


NOISY = {0: (1.0, 1.00002, 1.00001), 1: (1.00001, 1.00002, 1.00003), 2: (1.001, 1.00101, 1.00102)}
"""Outputs of three processes: those of 0 and 1 differ by 1.5 times what one case's do."""
AS_FAST = {"time_differs": False}
PROVIDERS = [case({"seq_len": 512}, provider=name) for name in ("p", "q")]


def slow_at(step: int) -> dict[str, Any]:
    return {"pace": lambda n: 9.0 if n == step else 1.0}


@pytest.mark.parametrize(
    ("cases", "measure", "expected"),
    [
        (SWEEP, of_length, {"workload": "train", "provider": "nsa", "axes": ("flag",), "pairs": 6}),
        (SWEEP, of_length, {"values": ((0,), (1,), (2,)), **AS_FAST}),
        (FLAGS, lambda c: did(c), {"without_kernels": False}),
        (FLAGS, lambda c: did(c, gpu=False), {"without_kernels": True}),
        (FLAGS, lambda c: did(c, 0.05 - 0.01 * int(c.axes["flag"])), {"time_differs": True}),
        (FLAGS, lambda c: did(c, 0.05 - 0.002 * int(c.axes["flag"]), processes=1), AS_FAST),
        (FLAGS, lambda c: did(c, output=NOISY[int(c.axes["flag"])]), {"values": ((0,), (1,))}),
        (PROVIDERS, did, {"provider": "", "axes": ("provider",), "values": (("p",), ("q",))}),
    ],
)
def test_values_without_effect_are_dead(
    cases: Sequence[Case], measure: Callable[[Case], list[Measurement]], expected: dict[str, Any]
) -> None:
    (found,) = inert(cases, measure)

    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    "changed",
    [{"ops": 101}, {"names": "abd"}, {"output": (1.0 + 1e-12,) * 3}, {"dtype": "bfloat16"}],
)
def test_an_axis_that_changes_anything_is_not_dead(changed: dict[str, Any]) -> None:
    assert inert(FLAGS, did)  # without the change

    assert inert(FLAGS, lambda c: did(c, **changed if c.axes["flag"] else {})) == ()


def test_an_axis_of_which_one_value_changes_anything_is_not_dead() -> None:
    def in_one_group(c: Case) -> list[Measurement]:
        return of_length(c, ops=120 if c.case_id.endswith("2048/flag=2") else 100)

    by_noise = inert(sweep(flag=[0, 1, 2]), lambda c: did(c, output=NOISY[int(c.axes["flag"])]))
    unknown = inert(SWEEP, lambda c: of_length(c, ops=None if c.axes["flag"] == 2 else 100))
    found = *inert(SWEEP, in_one_group), *by_noise, *unknown
    assert not [d for d in found if "flag" in d.axes]


@pytest.mark.parametrize(
    ("until_sampled", "changed", "dead"),
    [
        (False, lambda _: {}, True),
        (False, lambda _: {"steps": 10}, False),
        (False, lambda _: slow_at(100), False),
        (False, lambda process: slow_at(50 + 9 * process), True),  # in each process another one
        (True, lambda _: {"steps": 190}, True),
    ],
)
@pytest.mark.parametrize("is_program", [True, False])
def test_runs_of_other_steps_do_not_do_the_same(
    is_program: bool, until_sampled: bool, changed: Callable[[int], dict[str, Any]], dead: bool
) -> None:
    steps = Steps(step="s", until="sampled" if until_sampled else "exit")
    program = Program(argv=("x",), steps=steps)
    cases = [replace(c, program=program if is_program else None) for c in FLAGS]

    def measure(c: Case) -> list[Measurement]:
        measured = did(c, until_sampled=None if is_program else until_sampled)
        return [trained(m, **changed(m.process) if c.axes["flag"] else {}) for m in measured]

    assert bool(inert(cases, measure)) is dead


def test_first_lines_that_arrived_together_are_no_effect() -> None:
    def measure(c: Case) -> list[Measurement]:
        return [late(trained(m)) if c.axes["flag"] else trained(m) for m in did(c)]

    assert inert(FLAGS, measure)


@pytest.mark.parametrize(
    "measure",
    [
        lambda c: did(c, ops=None),
        lambda c: did(c, output=None),
        lambda c: did(c) if c.axes["flag"] else ended(c, Outcome.CRASH),
        lambda c: [*did(c, processes=2), replace(did(c, 9 * 0.05)[2], process=2)],
    ],
)
def test_cases_of_which_too_little_is_known_are_not_compared(
    measure: Callable[[Case], list[Measurement]],
) -> None:
    assert inert(FLAGS, measure) == ()


@pytest.mark.parametrize("syncs_agree", [True, False])
def test_counters_that_differ_between_processes_are_not_compared(syncs_agree: bool) -> None:
    def counted(m: Measurement) -> Measurement:
        syncs = 0 if syncs_agree else m.process
        return replace(m, counters=Counters(dispatched_ops=m.process, host_syncs=syncs, steps=2))

    assert len(inert(FLAGS, lambda c: [*map(counted, did(c))])) == syncs_agree


def test_a_profile_of_more_steps_does_not_show_an_effect() -> None:
    """What runs now and then may be in one of the profiles only."""
    seen: Any = {}, {"profile": Profile(fingerprint="abcd", steps=9)}

    (found,) = inert(FLAGS, lambda c: [replace(m, **seen[c.axes["flag"]]) for m in did(c)])

    assert found.without_kernels


LOSSES = tuple(1 / n for n in range(3, 20))
RATE = MetricSource(metric="rate", unit="tokens/s")


def reporting(c: Case, *curves: Sequence[float], **changes: Any) -> list[Measurement]:
    """A program whose processes report these losses, and a rate that is noise."""
    found = did(c, output=None, processes=len(curves), **changes)
    read = [{"loss": tuple(curves[m.process]), "rate": (m.samples_s[0],)} for m in found]
    return [replace(m, readings=values) for m, values in zip(found, read, strict=True)]


@pytest.mark.parametrize(
    ("first", "second", "dead"),
    [
        ([LOSSES, LOSSES], [LOSSES, LOSSES], 1),
        ([LOSSES], [LOSSES], 1),
        ([LOSSES[2:], LOSSES], [LOSSES[1:], LOSSES[:-3]], 1),  # they start later
        ([LOSSES] * 2, [(*LOSSES[:-1], 0.1)] * 2, 0),
        ([LOSSES], [LOSSES[::-1]], 0),  # may be noise
        ([LOSSES, LOSSES[::-1]], [LOSSES, LOSSES], 0),
        ([()], [()], 0),
    ],
)
def test_equal_reported_metrics_stand_for_outputs(
    first: Sequence[Any], second: Sequence[Any], dead: int
) -> None:
    program = Program(argv=("x",), readings=(MetricSource(metric="loss", unit="nats"), RATE))
    cases = [replace(c, program=program) for c in FLAGS]

    found = inert(cases, lambda c: reporting(c, *(second if c.axes["flag"] else first)))

    assert len(found) == dead


@pytest.mark.parametrize(
    ("steps", "dead"),
    [
        ((90, 110, 95), 1),
        ((90, 110), 1),
        ((95, 120, 100), 0),  # the ranges overlap
        ((200, 220, 205), 0),
    ],
)
def test_counts_that_vary_from_step_to_step_are_the_same_in_every_step_or_unknown(
    steps: tuple[int, ...], dead: int
) -> None:
    def varying(c: Case) -> list[Measurement]:
        ops = steps if c.axes["flag"] else (90, 110, 95)
        counters = Counters(dispatched_ops=ops[0], host_syncs=3, steps=len(ops))
        varied = replace(counters, series={"dispatched_ops": ops})
        return [replace(m, counters=varied) for m in did(c)]

    assert len(inert(FLAGS, varying)) == dead


TRAIN = Program(
    argv=("x",), readings=(RATE,), carried={"seq_len": "--seq-len"}, work_axes=("seq_len",)
)


@pytest.mark.parametrize(
    ("program", "flags", "curve", "withdrawn"),
    [
        (TRAIN, {"--seq-len": False}, (), True),
        (TRAIN, {}, LOSSES, True),
        (TRAIN, {"--seq-len": True}, (), False),
        (TRAIN, {}, (), False),
        (replace(TRAIN, work_axes=()), {}, LOSSES, False),
    ],
)
def test_tokens_computed_from_an_axis_without_effect_are_withdrawn(
    program: Program, flags: dict[str, bool], curve: Sequence[float], withdrawn: bool
) -> None:
    cases = [replace(c, program=program) for c in LENGTHS]
    recorded = run(cases, lambda c: reporting(c, curve, flags_read=flags))

    for s in summarise(recorded):
        assert ("tokens_per_s" not in s.metrics) == withdrawn == (s.tokens is None)
        assert ({"withdrawn": "seq_len"} in s.notes) == withdrawn
        assert "step_s" in s.metrics
        assert s.withdrawn == ("seq_len" if withdrawn else "")


def test_axes_that_only_change_together_are_compared_together() -> None:
    rows = [case({"v2": a, "pack": b}) for a, b in ((1, 0), (0, 0), (1, 1), (0, 1))]

    assert [d.axes for d in inert(rows, did)] == [("v2",), ("pack",)]
    (found,) = inert(rows[1:3], did)
    assert (found.axes, found.values) == (("v2", "pack"), ((0, 0), (1, 1)))
    assert inert(rows[1:3], lambda c: did(c, names="gather" if c.axes["v2"] else "loop")) == ()
