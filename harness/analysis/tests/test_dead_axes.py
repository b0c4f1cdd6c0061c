"""Axes without effect, and speeds that do not follow the work."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.dead_axes import Oddities, oddities
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
    counters = Counters(dispatched_ops=ops, host_syncs=3, steps=2) if ops else None
    profile = Profile(fingerprint=names, no_kernels="" if gpu else "no GPU")
    measured = timed(c, step_s, counters=counters, profile=profile, **changes)
    if output is None:
        return measured
    digests = [
        TensorDigest(name="loss", dtype=dtype, shape=(), norm=abs(x), projection=x) for x in output
    ]
    return [replace(m, output_digest=(digests[m.process],)) for m in measured]


def odd(cases: Sequence[Case], measure: Callable[[Case], list[Measurement]]) -> Oddities:
    recorded = run(cases, measure)
    return oddities(recorded, summarise(recorded))


FLAGS = sweep(flag=[0, 1])
SWEEP = sweep(seq_len=[512, 2048], flag=[0, 1, 2])
"""`seq_len` always changes the outputs of `of_length`."""
LENGTHS = sweep(seq_len=[512, 1024, 2048])


def of_length(c: Case, **changes: Any) -> list[Measurement]:
    t = float(c.axes["seq_len"])
    return did(c, **{"output": (t, t, t), "step_s": t * 1e-4, **changes})


def test_an_axis_without_effect_is_dead() -> None:
    (found,) = odd(SWEEP, of_length).dead

    assert (found.workload, found.provider, found.axes) == ("train", "nsa", ("flag",))
    assert found.values == ((0,), (1,), (2,))
    assert (found.all_values, found.pairs) == (True, 6)
    assert (found.time_differs, found.without_kernels) == (False, False)
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
    assert odd(FLAGS, did).dead  # without the change

    assert odd(FLAGS, lambda c: did(c, **changed if c.axes["flag"] else {})).dead == ()


def test_a_value_that_has_an_effect_in_one_group_is_not_dead() -> None:
    def measure(c: Case) -> list[Measurement]:
        both = c.axes == {"seq_len": 2048, "flag": 2, "precision": "bf16"}
        return of_length(c, ops=120 if both else 100)

    (found,) = odd(SWEEP, measure).dead

    assert found.values == ((0,), (1,))
    assert not found.all_values


@pytest.mark.parametrize(
    "measure",
    [
        lambda c: did(c, ops=None),
        lambda c: did(c, output=None),
        lambda c: did(c) if c.axes["flag"] else ended(c, Outcome.CRASH),
    ],
    ids=["no counters", "no outputs", "failed"],
)
def test_cases_of_which_too_little_is_known_are_not_compared(
    measure: Callable[[Case], list[Measurement]],
) -> None:
    found = odd(FLAGS, measure)

    assert (found.dead, found.compared) == ((), 0)


def test_without_a_gpu_kernels_are_not_compared() -> None:
    (found,) = odd(FLAGS, lambda c: did(c, gpu=False)).dead

    assert found.without_kernels


@pytest.mark.parametrize(("syncs_agree", "dead"), [(True, 1), (False, 0)])
def test_counters_that_differ_between_processes_are_not_compared(
    syncs_agree: bool, dead: int
) -> None:
    def measure(c: Case) -> list[Measurement]:
        return [
            replace(
                m,
                counters=Counters(
                    dispatched_ops=m.process, host_syncs=0 if syncs_agree else m.process, steps=2
                ),
            )
            for m in did(c)
        ]

    assert len(odd(FLAGS, measure).dead) == dead


def test_outputs_that_differ_as_much_within_a_case_as_between_cases_agree() -> None:
    noisy = {0: (1.0, 1.00002, 1.00001), 1: (1.00001, 1.0, 1.00003), 2: (1.001, 1.00101, 1.00102)}

    (found,) = odd(sweep(flag=[0, 1, 2]), lambda c: did(c, output=noisy[int(c.axes["flag"])])).dead

    assert found.values == ((0,), (1,))


def test_a_dead_axis_may_differ_in_time() -> None:
    (found,) = odd(FLAGS, lambda c: did(c, step_s=0.04 if c.axes["flag"] else 0.05)).dead

    assert found.time_differs
    assert found.fastest == pytest.approx(0.8, rel=0.05)


def test_axes_that_only_change_together_are_compared_together() -> None:
    rows = [case({"v2": a, "pack": b}) for a, b in ((1, 0), (0, 0), (1, 1), (0, 1))]

    assert [d.axes for d in odd(rows, did).dead] == [("v2",), ("pack",)]
    (found,) = odd(rows[1:3], did).dead
    assert (found.axes, found.values) == (("v2", "pack"), ((0, 0), (1, 1)))
    assert odd(rows[1:3], lambda c: did(c, names="gather" if c.axes["v2"] else "loop")).dead == ()


def test_two_providers_may_do_the_same() -> None:
    cases = [case({"seq_len": 512}, provider=name) for name in ("dense", "flash")]

    (found,) = odd(cases, did).dead

    assert (found.provider, found.axes) == ("", ("provider",))
    assert found.values == (("dense",), ("flash",))


def test_the_compared_pairs_are_counted() -> None:
    found = odd(SWEEP, lambda c: of_length(c, ops=None if c.axes["flag"] == 2 else 100))

    # 2 lengths with 3 pairs each, one of them known; 3 pairs of lengths with different outputs.
    assert (found.pairs, found.compared) == (9, 5)


def test_a_constant_speed_along_a_dead_axis_is_not_listed_again() -> None:
    found = odd(LENGTHS, lambda c: did(c, effective={}, tokens=512, flops=10))

    assert [d.axes for d in found.dead] == [("seq_len",)]
    assert found.still == ()


# --- speeds ------------------------------------------------------------------------------


def test_constant_tokens_per_s_are_odd_if_a_token_costs_more() -> None:
    def measure(c: Case) -> list[Measurement]:
        t = int(c.axes["seq_len"])
        return timed(c, t / 10, flops=t * t * 10**6)

    (found,) = odd(LENGTHS, measure).still

    assert (found.axis, found.low, found.high) == ("seq_len", 512, 2048)
    assert found.metric == "tokens_per_s"
    assert found.value == pytest.approx(10, rel=0.05)
    assert found.growth == pytest.approx(4)
    assert found.reached


@pytest.mark.parametrize("readings", [{}, {"loss": (3.0, 2.5)}], ids=["silent", "same metrics"])
def test_a_length_that_the_workload_never_uses_is_odd(readings: dict[str, Any]) -> None:
    (found,) = odd(
        LENGTHS, lambda c: timed(c, 0.05, tokens=512, effective={}, readings=readings)
    ).still

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
        return [
            replace(m, readings={"loss": tuple(x * scale for x in curves[m.process])})
            for m in timed(c, 0.05, tokens=512, effective={})
        ]

    assert len(odd(LENGTHS[::2], measure).still) == odd_ones


def test_a_constant_time_for_growing_work_is_odd_at_two_values() -> None:
    (found,) = odd(LENGTHS[::2], lambda c: timed(c, 0.05)).still

    assert (found.metric, found.growth) == ("step_s", 4)


@pytest.mark.parametrize(("exponent", "flops"), [(0.1, 2), (0.9, 2), (2.0, 2), (1.0, 1)])
def test_a_changing_speed_or_a_constant_cost_per_token_is_not_odd(
    exponent: float, flops: int
) -> None:
    def measure(c: Case) -> list[Measurement]:
        t = int(c.axes["seq_len"])
        return timed(c, 0.01 * (t / 512) ** exponent, flops=t**flops)

    assert odd(LENGTHS, measure).still == ()


def test_a_constant_speed_along_a_variable_is_not_odd() -> None:
    assert odd(sweep(NSA_FWE_Q=[1, 4, 16]), lambda c: timed(c, 0.05, effective={})).still == ()
