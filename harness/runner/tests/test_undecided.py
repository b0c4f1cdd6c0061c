"""What is open gets more processes, and nothing else does."""

from dataclasses import replace
from typing import Any

import pytest

from harness import records as r
from harness.analysis.statistics import near
from harness.runner.undecided import undecided
from harness.tests.fake_runs import ended, run, sweep, taking, to

CASES = [c for p in ("nsa", "dense") for c in sweep(provider=p, seq_len=[512, 1024, 2048])]
NSA, DENSE = ([c.case_id for c in CASES if c.provider == p] for p in ("nsa", "dense"))
GAP = r.Gap(metric="tokens_per_s", expected=500, seen=50, source="s", where=to(seq_len=512))


def left(step_s: tuple[float, ...] = (), dense: int = 2, **asked: Any) -> dict[str, str]:
    """NSA takes these step times in each length, or times out; dense takes 1 s, and 1.2 s in a
    second process; the operators of a step vary."""
    steps = {"series": {"dispatched_ops": (9, 12)}, "steps": 2}
    ops = r.Counters(**dict.fromkeys(r.COUNTERS, 9), **steps)  # type: ignore[arg-type]

    def measure(c: r.Case) -> list[r.Measurement]:
        if c.provider == "nsa" and not step_s:
            return ended(c, r.Outcome.TIMEOUT, lower_bound_s=60.0)
        steps_s = (1.0, 1.2)[:dense] if c.provider == "dense" else step_s
        return taking(c, *steps_s, counters=ops)

    once = [replace(c, settings=r.MeasureSettings(processes=1)) for c in CASES]
    return undecided(run(once, measure, **asked))


SHORT: dict[str, Any] = {"metric": "tokens_per_s", "match": to(provider="nsa", seq_len=512)}
SPEED: dict[str, Any] = {"metric": "tokens_per_s", "match": to(provider="nsa")}
ALL: dict[str, Any] = {"metric": "step_s", "match": to(provider="nsa")}
PAIRS: dict[str, Any] = {"against": to(provider="dense"), "go": 10.0, **ALL}
FIT: dict[str, Any] = {**ALL, "metric": "scaling_exponent", "axis": "seq_len", "go": 1.5}


@pytest.mark.parametrize(
    ("rule", "step_s", "dense", "ids"),
    [
        ({"go": 450, **SHORT}, (1.0, 1.3), 2, NSA[:1]),
        ({"go": 450, **SHORT, "gpu": "A100"}, (1.0, 1.3), 2, []),
        ({"go": 450, **SHORT, "counts": r.Weight.NOTE}, (1.0, 1.3), 2, []),
        ({"go": 450, **SHORT, "counts": r.Weight.CONDITION}, (1.0, 1.3), 2, NSA[:1]),
        ({"go": 450, **SPEED}, (1.0, 1.001), 2, NSA[:1]),  # met, but near for processes like dense
        ({"go": 450, **SPEED}, (1.0, 1.001), 1, []),
        ({"go": 1100, **SPEED}, (1.0, 1.001), 2, []),  # one of the others is far
        ({"go": 50, **SHORT}, (1.0, 1.3), 2, []),
        ({"go": 5000, **SHORT}, (1.0, 1.3), 2, []),
        ({"go": 1.1, **ALL}, (1.0, 1.3), 2, NSA),
        ({"go": 10, **ALL, "metric": "dispatched_ops"}, (1.0, 1.3), 2, []),
        (FIT, (1.0,), 2, NSA),
        (PAIRS, (0.1, 0.13), 2, [*NSA, *DENSE]),
        (PAIRS, (0.01, 0.0101), 2, []),
        (PAIRS, (0.01, 0.0101), 1, [*NSA, *DENSE]),
        (PAIRS, (0.01,), 2, [*NSA, *DENSE]),
        (PAIRS, (0.01, 0.5), 2, [*NSA, *DENSE]),
        (PAIRS, (), 2, []),
        (PAIRS, (), 1, DENSE),  # NSA timed out
    ],
)
def test_the_cases_of_an_open_rule_are_named(
    rule: dict[str, Any], step_s: tuple[float, ...], dense: int, ids: list[str]
) -> None:
    found = left(step_s, dense, rules=[r.Rule(name="r", **rule)])

    assert sorted(found.items()) == sorted(dict.fromkeys(ids, "r").items())


def test_few_processes_near_a_limit_are_confirmed() -> None:
    two = r.Estimate(value=1.0, low=None, high=None, n=2, samples=9, each=(0.99, 1.01))

    found = [near(replace(two, usual=u), None, 1.1) for u in (0.03, 0.05, None)]
    assert found == [False, True, True]
    assert not near(replace(two, usual=0.05, n=6), 1.1)
    assert not near(replace(two, each=(1.0, 1.0)), 1.1), "an exact metric"


@pytest.mark.parametrize(
    ("counts", "low", "ids"),
    [(r.Weight.FAIL, 450, NSA[:1]), (r.Weight.NOTE, 450, []), (r.Weight.CONDITION, 9000, [])],
)
def test_an_open_expectation_is_named_if_it_counts(
    counts: r.Weight, low: float, ids: list[str]
) -> None:
    short = r.Rule(name="a source", counts=counts, low=low, **SHORT)
    assert [*left((1.0, 1.3), expectations=[short])] == ids


@pytest.mark.parametrize(
    ("step_s", "of_pair", "of_control"),
    [((0.3, 0.301), 0, 0), ((20.0, 20.1), 0, 0), ((1.0, 1.9), 2, 1)],
)
def test_an_open_suspect_names_its_pair_and_a_control_its_worst_case(
    step_s: tuple[float, float], of_pair: int, of_control: int
) -> None:
    pair = r.Suspect(name="nsa", without=to(provider="dense"), with_=to(provider="nsa"))
    control = r.Suspect(name="nsa", control=to(provider="nsa"))

    found = [left(step_s, suspects=r.Suspects(gap=GAP, tested=(s,))) for s in (pair, control)]

    assert found == [
        dict.fromkeys([NSA[0], DENSE[0]][:of_pair], "nsa"),
        dict.fromkeys(NSA[:of_control], "nsa"),
    ]
