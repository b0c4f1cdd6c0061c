"""Two variables that act only together, planted in measured cases and in timeouts."""

from collections.abc import Callable
from typing import Any

import pytest

from harness.analysis.effects import effects, together
from harness.analysis.summary import summarise
from harness.records import Case, Measurement, Outcome, Scalar
from harness.report.text import together_sentences
from harness.tests.fake_runs import ended, run, sweep, timed

QUICK_S, LATE_S = 0.95, 45.0
Late = Callable[[Case], list[Measurement]]


def at(**values: Scalar) -> Callable[[Case], bool]:
    return lambda c: all(c.axes[name] == value for name, value in values.items())


def timeout(c: Case, bound_s: float = LATE_S) -> list[Measurement]:
    return ended(c, Outcome.TIMEOUT, lower_bound_s=bound_s, tokens=512)


def said(quick: Callable[[Case], bool], late: Late = timeout, **axes: Any) -> list[str]:
    """Of cases that take `QUICK_S`, and others that time out, or what `late` says."""

    def measure(c: Case) -> list[Measurement]:
        return timed(c, QUICK_S, cv=0.0005, tokens=512) if quick(c) else late(c)

    cases = summarise(run(sweep(A=[0, 1], B=[0, 1], **axes), measure))
    return [*together_sentences(effects(cases))]


BOTH = at(A=1, B=1)
FASTER = "A=1 with B=1 is at least 47x faster; neither alone is shown to be."


def test_two_variables_that_act_only_together_are_found_by_the_bounds_of_timeouts() -> None:
    assert said(BOTH) == [FASTER]
    assert said(lambda c: not BOTH(c)) == [FASTER.replace("faster", "slower")]
    assert said(at(A=0, B=1)) == [FASTER.replace("A=1", "A=0")]


def test_measured_cases_have_an_interval() -> None:
    (one,) = said(at(A=0, B=0), late=lambda c: timed(c, LATE_S, tokens=512))

    assert one.startswith("A=0 with B=0 is 47")
    assert one.endswith("] faster; neither alone is shown to be.")


@pytest.mark.parametrize(
    ("quick", "late"),
    [
        pytest.param(at(A=1), timeout, id="one-alone-does-it"),
        pytest.param(lambda c: c.axes["A"] == c.axes["B"], timeout, id="neither-does-it-too"),
        pytest.param(lambda _: False, timeout, id="nothing-is-known"),
        pytest.param(BOTH, lambda c: timeout(c, 0.9), id="slower-than-bounds"),
        pytest.param(BOTH, lambda c: timeout(c, 1.1), id="hardly-faster"),
        pytest.param(
            BOTH,
            lambda c: ended(c, Outcome.HANG, lower_bound_s=LATE_S, tokens=512),
            id="a-hang-is-no-bound",
        ),
        pytest.param(
            BOTH,
            lambda c: timed(c, LATE_S / (1 + 9 * c.axes["A"]), tokens=512),
            id="one-alone-helps",
        ),
    ],
)
def test_no_more_is_claimed_than_is_shown(quick: Callable[[Case], bool], late: Late) -> None:
    assert said(quick, late) == []


def test_a_third_variable_is_named_only_if_it_matters() -> None:
    assert said(BOTH, C=[0, 1]) == [FASTER]
    assert FASTER.replace(";", " at C=1;") in said(at(A=1, B=1, C=1), C=[0, 1])


@pytest.mark.parametrize("seed", range(10))
def test_scatter_alone_is_no_effect(seed: int) -> None:
    cases = run(
        sweep(A=[0, 1], B=[0, 1], C=[0, 1], D=[0, 1]), lambda c: timed(c, 1.0, cv=0.2, seed=seed)
    )

    assert together(effects(summarise(cases))) == ()
