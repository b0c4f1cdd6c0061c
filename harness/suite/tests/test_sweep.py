"""Sweeps: the cases of axes, overrides and filters."""

import json
from math import prod
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.suite import load as suites
from harness.tests.good_suite import GOOD, ids, write_suite

# --- what a sweep expands to -------------------------------------------------------------


axis_values = st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True)


@given(st.lists(axis_values, min_size=1, max_size=3), st.data())
@settings(max_examples=40, deadline=None)
def test_a_sweep_has_every_combination_once_except_the_excluded(
    axes: list[list[int]], data: st.DataObject
) -> None:
    out = [data.draw(st.sets(st.sampled_from(values))) for values in axes]
    criteria = {f"a{i}": sorted(values) for i, values in enumerate(out) if values}
    excluded = 2 * prod(len(v or axis) for v, axis in zip(out, axes, strict=True))
    total = 2 * prod(map(len, axes))
    assume(not criteria or excluded < total)
    exclude = f"    exclude: [{json.dumps(criteria)}]" if criteria else ""
    head = "schema: 1\ntitle: t\nsubject: s\nquestion: q\nworkloads:\n  - name: w\n    factory: m:f"
    lines = [f"      a{i}: {list(values)}" for i, values in enumerate(axes)]
    text = "\n".join([head, "    providers: [p, r]\n    axes:", *lines, exclude])

    cases = suites.loads(text, "x.yaml").cases

    assert len({c.case_id for c in cases}) == len(cases) == total - (excluded if criteria else 0)
    assert cases == suites.loads(text, "x.yaml").cases
    places = [[values.index(int(c.axes[f"a{i}"])) for i, values in enumerate(axes)] for c in cases]
    order = [(c.provider, *at) for c, at in zip(cases, places, strict=True)]
    assert order == sorted(order)


# --- overrides ---------------------------------------------------------------------------


def test_an_override_replaces_the_axis_and_keeps_the_ids_of_remaining_cases(tmp_path: Path) -> None:
    path = write_suite(tmp_path)

    some = suites.load(path, overrides=["seq_len=512", "NSA_USE_FA2=0", "measure.processes=1"])

    assert set(ids(some)) < set(ids(suites.load(path)))
    assert {c.axes["seq_len"] for c in some.cases} == {512}
    assert {c.settings.processes_text for c in some.cases} == {"1"}
    assert some.text == GOOD


def test_processes_are_a_number_or_from_and_to_in_the_suite_a_workload_and_an_override() -> None:
    adaptive = GOOD.replace("processes: 4", "processes: {to: 6}")
    fixed = adaptive.replace("measure: {timeout_s: 60}", "measure: {processes: 1}")
    option = ["measure.processes={from: 3, to: 5}"]

    made = [suites.loads(adaptive, "x"), suites.loads(fixed, "x"), suites.loads(fixed, "x", option)]

    assert [s.cases[0].settings.processes_text for s in made] == ["2 to 6", "1", "3 to 5"]


def test_an_overridden_fixed_axis_enters_the_id_only_with_several_values(tmp_path: Path) -> None:
    one, two = (
        suites.load(write_suite(tmp_path), overrides=[f"preset={values}"]).cases[0]
        for values in ("tiny", "tiny,small")
    )

    assert one.axes["preset"] == two.axes["preset"] == "tiny"
    assert one.case_id == "train/nsa/seq_len=128/gc=off/NSA_USE_FA2=0"
    assert two.case_id == "train/nsa/preset=tiny/seq_len=128/gc=off/NSA_USE_FA2=0"


def test_a_rule_without_cases_after_an_override_is_kept(tmp_path: Path) -> None:
    """The verdict must show that the rule judged nothing."""
    loaded = suites.load(write_suite(tmp_path), overrides=["seq_len=64"])

    assert (len(loaded.rules), len(loaded.expectations)) == (2, 1)
    assert not any(loaded.expectations[0].match.accepts(c) for c in loaded.cases)


# --- filters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ([], 12),
        (["dense"], 4),
        (["train/nsa/*FA2=0"], 4),
        (["seq_len=512", "gc=on"], 6),
        (["!nsa"], 4),
        (["nsa", "!seq_len=128", "!*FA2=1"], 2),
    ],
)
def test_filters_choose_cases(tmp_path: Path, filters: list[str], count: int) -> None:
    assert len(suites.load(write_suite(tmp_path), filters=filters).cases) == count


def test_the_id_of_a_case_chooses_that_case_alone(tmp_path: Path) -> None:
    path = write_suite(tmp_path, GOOD.replace("FA2: [0, 1]", "FA2: [1, 10]"))
    first, longer, *_ = ids(suites.load(path))

    assert longer == f"{first}0"
    assert ids(suites.load(path, filters=[first])) == [first]
