"""Axes without effect, and speeds that do not follow the work."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.dead_axes import DeadAxis, Invariance, oddities
from harness.analysis.summary import summarise
from harness.records import Case, Counters, Measurement, Outcome, Profile, TensorDigest
from harness.tests.fake_runs import case, ended, run, sweep, timed


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
    counters = Counters(dispatched_ops=ops, host_syncs=3, steps=2)
    profile = Profile(fingerprint=names, no_kernels="" if gpu else "no GPU")
    outputs = [() if output is None else (_digest(x, dtype),) for x in output or (0, 0, 0)]
    measured = timed(
        c, step_s, counters=None if ops is None else counters, profile=profile, **changes
    )
    return [replace(m, output_digest=o) for m, o in zip(measured, outputs, strict=True)]


def _digest(x: float, dtype: str) -> TensorDigest:
    return TensorDigest(name="loss", dtype=dtype, shape=(), norm=abs(x), projection=x)


def dead(cases: Sequence[Case], measure: Callable[[Case], list[Measurement]]) -> list[DeadAxis]:
    recorded = run(cases, measure)
    return list(oddities(recorded, summarise(recorded)).dead)


def constant(
    cases: Sequence[Case], measure: Callable[[Case], list[Measurement]]
) -> list[Invariance]:
    recorded = run(cases, measure)
    return list(oddities(recorded, summarise(recorded)).still)


SWEEP = sweep(seq_len=[512, 2048], flag=[0, 1, 2])
"""`seq_len` always changes the outputs of `of_length`."""


def of_length(c: Case, **changes: Any) -> list[Measurement]:
    t = float(c.axes["seq_len"])
    return did(c, **{"output": (t, t, t), "step_s": t * 1e-4, **changes})


def test_an_axis_without_effect_is_dead() -> None:
    (found,) = dead(SWEEP, of_length)

    assert (found.workload, found.provider, found.axes) == ("train", "nsa", ("flag",))
    assert found.values == ((0,), (1,), (2,))
    assert found.all_values
    assert found.pairs == 6
    assert not found.time_differs
    assert not found.without_kernels
    assert 0.9 < found.fastest <= 1 <= found.slowest < 1.1


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"ops": 101}, id="one operator more"),
        pytest.param({"names": "abd"}, id="another kernel as often"),
        pytest.param({"output": (1.0 + 1e-12,) * 3}, id="the outputs in the twelfth digit"),
        pytest.param({"dtype": "bfloat16"}, id="the outputs' dtype"),
    ],
)
def test_an_axis_that_changes_anything_is_not_dead(changed: dict[str, Any]) -> None:
    cases = sweep(flag=[0, 1])
    assert dead(cases, did)  # without the change it is dead

    assert dead(cases, lambda c: did(c, **changed if c.axes["flag"] else {})) == []


def test_a_value_that_has_an_effect_in_one_group_is_not_dead() -> None:
    def measure(c: Case) -> list[Measurement]:
        both = c.axes == {"seq_len": 2048, "flag": 2, "precision": "bf16"}
        return of_length(c, ops=120 if both else 100)

    (found,) = dead(SWEEP, measure)

    assert found.values == ((0,), (1,))
    assert not found.all_values


@pytest.mark.parametrize("unknown", [{"ops": None}, {"output": None}], ids=["counters", "outputs"])
def test_cases_without_counters_or_outputs_are_not_compared(unknown: dict[str, Any]) -> None:
    assert dead(SWEEP, lambda c: did(c, **unknown)) == []


def test_without_a_gpu_kernels_are_not_compared() -> None:
    (found,) = dead(sweep(flag=[0, 1]), lambda c: did(c, gpu=False))

    assert found.without_kernels


def test_counters_that_differ_between_processes_are_not_compared() -> None:
    def measure(c: Case) -> list[Measurement]:
        first, *rest = did(c)
        return [replace(first, counters=Counters(dispatched_ops=7, host_syncs=3, steps=2)), *rest]

    (found,) = dead(sweep(flag=[0, 1]), measure)  # host_syncs agree
    assert found.pairs == 1

    def nothing_agrees(c: Case) -> list[Measurement]:
        return [replace(m, counters=Counters(host_syncs=m.process, steps=2)) for m in measure(c)]

    assert dead(sweep(flag=[0, 1]), nothing_agrees) == []


def test_outputs_that_differ_as_much_within_a_case_as_between_cases_agree() -> None:
    noisy = {0: (1.0, 1.00002, 1.00001), 1: (1.00001, 1.0, 1.00003), 2: (1.001, 1.00101, 1.00102)}

    (found,) = dead(sweep(flag=[0, 1, 2]), lambda c: did(c, output=noisy[int(c.axes["flag"])]))

    assert found.values == ((0,), (1,))


def test_a_dead_axis_may_differ_in_time() -> None:
    cases = sweep(prefetch=[0, 4])

    (found,) = dead(cases, lambda c: did(c, step_s=0.04 if c.axes["prefetch"] else 0.05))

    assert found.time_differs
    assert found.fastest == pytest.approx(0.8, rel=0.05)


def test_axes_that_only_change_together_are_compared_together() -> None:
    zipped = [case({"v2": a, "pack": b}) for a, b in ((1, 0), (0, 0), (1, 1))]
    names = {(1, 0): "gather", (0, 0): "loop", (1, 1): "gather"}
    rows = [*zipped, case({"v2": 0, "pack": 1})]
    together = [zipped[1], zipped[2]]

    assert [d.axes for d in dead(rows, did)] == [("v2",), ("pack",)]
    (found,) = dead(together, did)
    assert (found.axes, found.values) == (("v2", "pack"), ((0, 0), (1, 1)))
    assert (
        dead(together, lambda c: did(c, names=names[int(c.axes["v2"]), int(c.axes["pack"])])) == []
    )


def test_two_providers_may_do_the_same() -> None:
    cases = [*sweep(seq_len=[512], provider="dense"), *sweep(seq_len=[512], provider="flash")]

    (found,) = dead(cases, did)

    assert (found.provider, found.axes) == ("", ("provider",))
    assert found.values == (("dense",), ("flash",))


def test_a_case_that_failed_is_not_compared() -> None:
    def measure(c: Case) -> list[Measurement]:
        return did(c) if c.axes["flag"] else ended(c, Outcome.CRASH)

    assert dead(sweep(flag=[0, 1]), measure) == []


def test_the_compared_pairs_are_counted() -> None:
    recorded = run(SWEEP, lambda c: of_length(c, **({"ops": None} if c.axes["flag"] == 2 else {})))

    found = oddities(recorded, summarise(recorded))

    # 2 lengths with 3 pairs each, one of them known; 3 pairs of lengths with different outputs.
    assert (found.pairs, found.compared) == (9, 5)


def test_a_constant_speed_along_a_dead_axis_is_not_listed_again() -> None:
    recorded = run(sweep(seq_len=[512, 2048]), lambda c: did(c, effective={}, tokens=512, flops=10))

    found = oddities(recorded, summarise(recorded))

    assert [d.axes for d in found.dead] == [("seq_len",)]
    assert found.still == ()


# --- speeds ------------------------------------------------------------------------------


def test_constant_tokens_per_s_are_odd_if_a_token_costs_more() -> None:
    cases = sweep(seq_len=[512, 1024, 2048])

    def measure(c: Case) -> list[Measurement]:
        t = int(c.axes["seq_len"])
        return timed(c, t / 10, flops=t * t * 10**6)

    (found,) = constant(cases, measure)

    assert (found.axis, found.low, found.high) == ("seq_len", 512, 2048)
    assert found.metric == "tokens_per_s"
    assert found.value == pytest.approx(10, rel=0.05)
    assert found.growth == pytest.approx(4)
    assert found.reached


def test_constant_tokens_per_s_are_expected_if_a_token_costs_the_same() -> None:
    assert (
        constant(sweep(seq_len=[512, 1024, 2048]), lambda c: timed(c, int(c.axes["seq_len"]) / 10))
        == []
    )


@pytest.mark.parametrize("readings", [{}, {"loss": (3.0, 2.5)}], ids=["silent", "same metrics"])
def test_a_length_that_the_workload_never_uses_is_odd(readings: dict[str, Any]) -> None:
    (found,) = constant(
        sweep(seq_len=[512, 1024, 2048]),
        lambda c: timed(c, 0.05, tokens=512, effective={}, readings=readings),
    )

    assert not found.reached
    assert found.growth == 1


@pytest.mark.parametrize(
    ("curves", "odd_ones"),
    [
        pytest.param([(3.0, 2.5), (3.0, 2.5, 2.2), (3.0, 2.5)], 0, id="reaches"),
        pytest.param([(3.0, 2.5), (3.1, 2.4), (2.9, 2.6)], 1, id="noise"),
        pytest.param([(), (), ()], 1, id="nothing"),
    ],
)
def test_a_program_whose_metrics_follow_the_axis_uses_it(
    curves: Sequence[tuple[float, ...]], odd_ones: int
) -> None:
    def measure(c: Case) -> list[Measurement]:
        scale = float(c.axes["seq_len"])
        processes = timed(c, 0.05, tokens=512, effective={})
        return [
            replace(m, readings={"loss": tuple(x * scale for x in curve)})
            for m, curve in zip(processes, curves, strict=True)
        ]

    assert len(constant(sweep(seq_len=[512, 2048]), measure)) == odd_ones


def test_a_constant_time_for_growing_work_is_odd_at_two_values() -> None:
    (found,) = constant(sweep(seq_len=[512, 2048]), lambda c: timed(c, 0.05))

    assert (found.metric, found.growth) == ("step_s", 4)


@pytest.mark.parametrize("exponent", [0.1, 0.9, 2.0])
def test_a_changing_speed_is_not_odd(exponent: float) -> None:
    def measure(c: Case) -> list[Measurement]:
        t = int(c.axes["seq_len"])
        return timed(c, 0.01 * (t / 512) ** exponent, flops=t * t)

    assert constant(sweep(seq_len=[512, 1024, 2048]), measure) == []


def test_a_constant_speed_along_a_variable_is_not_odd() -> None:
    cases = sweep(NSA_FWE_Q=[1, 4, 16])

    assert constant(cases, lambda c: timed(c, 0.05, effective={})) == []
