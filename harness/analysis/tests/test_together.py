"""Two variables that act only together, planted in measured cases and in timeouts."""

from collections.abc import Callable
from typing import Any

import pytest

from harness.analysis.effects import Together, together
from harness.analysis.summary import summarise
from harness.records import Case, Measurement, Outcome, Scalar
from harness.report.text import together_sentences
from harness.tests.fake_runs import ended, run, sweep, timed

QUICK_S, LATE_S = 0.95, 45.0
Both = Callable[[Case], bool]


def found(
    quick: Both,
    *,
    late: Callable[[Case], list[Measurement]] | None = None,
    quick_s: float = QUICK_S,
    processes: int = 3,
    **axes: Any,
) -> tuple[Together, ...]:
    """Of cases that take `quick_s`, and others that time out, or what `late` says."""

    def measure(c: Case) -> list[Measurement]:
        if quick(c):
            return timed(c, quick_s, cv=0.0005, tokens=512, processes=processes)
        return late(c) if late else timeout(c)

    return together(summarise(run(sweep(A=[0, 1], B=[0, 1], **axes), measure)))


def timeout(c: Case, bound_s: float = LATE_S) -> list[Measurement]:
    return ended(c, Outcome.TIMEOUT, lower_bound_s=bound_s, tokens=512)


def at(**values: Scalar) -> Both:
    return lambda c: all(c.axes[name] == value for name, value in values.items())


BOTH = at(A=1, B=1)


def test_two_variables_that_act_only_together_are_found_by_the_bounds_of_timeouts() -> None:
    (one,) = found(at(A=1, B=1))

    assert (one.values, one.at_least, one.squares, one.of) == ({"A": 1, "B": 1}, True, 1, 1)
    assert one.ratio == pytest.approx(QUICK_S / LATE_S, rel=0.02)
    assert [*together_sentences([one])] == [
        "A=1 with B=1 is at least 47x faster; neither alone is shown to be."
    ]
    (said,) = together_sentences(found(lambda c: not at(A=1, B=1)(c)))
    assert said == "A=1 with B=1 is at least 46x slower; neither alone is shown to be."


def test_measured_cases_have_an_interval() -> None:
    slow = found(at(A=0, B=0), late=lambda c: timed(c, LATE_S, tokens=512))
    single = found(
        at(A=1, B=1), late=lambda c: timed(c, LATE_S, tokens=512, processes=1), processes=1
    )

    (said,) = together_sentences(slow)
    assert said.startswith("A=0 with B=0 is 47.1x [")
    assert said.endswith("] faster; neither alone is shown to be.")
    (said,) = together_sentences(single)
    assert said.endswith("x faster (one process a case); neither alone is shown to be.")


@pytest.mark.parametrize(
    ("quick", "changes"),
    [
        pytest.param(at(A=1), {}, id="one-alone-does-it"),
        pytest.param(lambda c: c.axes["A"] == c.axes["B"], {}, id="neither-does-it-too"),
        pytest.param(lambda _: False, {}, id="nothing-is-known"),
        pytest.param(at(A=1, B=1), {"late": lambda c: timeout(c, 0.9)}, id="slower-than-bounds"),
        pytest.param(at(A=1, B=1), {"late": lambda c: timeout(c, 1.1)}, id="hardly-faster"),
        # A hang is no bound.
        (BOTH, {"late": lambda c: ended(c, Outcome.HANG, lower_bound_s=LATE_S, tokens=512)}),
        # One alone helps.
        (BOTH, {"late": lambda c: timed(c, LATE_S / (1 + 9 * c.axes["A"]), tokens=512)}),
    ],
)
def test_no_more_is_claimed_than_is_shown(quick: Both, changes: dict[str, Any]) -> None:
    assert found(quick, **changes) == ()


def test_a_third_variable_is_named_only_if_it_matters() -> None:
    (always,) = found(at(A=1, B=1), C=[0, 1])
    only = found(at(A=1, B=1, C=1), C=[0, 1])

    assert (always.squares, always.of, always.within) == (2, 2, {})
    assert {tuple(t.values): t.within for t in only} == {
        ("A", "B"): {"C": 1}, ("A", "C"): {"B": 1}, ("B", "C"): {"A": 1}
    }  # fmt: skip
    assert next(iter(together_sentences(only))) == (
        "A=1 with B=1 is at least 47x faster at C=1; neither alone is shown to be."
    )


@pytest.mark.parametrize("seed", range(20))
def test_scatter_alone_is_no_effect(seed: int) -> None:
    noise = found(
        lambda _: False, late=lambda c: timed(c, 1.0, cv=0.2, seed=seed), C=[0, 1], D=[0, 1]
    )

    assert noise == ()
