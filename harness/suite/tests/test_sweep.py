"""Sweeps: the cases of axes, overrides and filters."""

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.suite import load as suites
from harness.tests.good_suite import GOOD, ids, write_suite

# --- what a sweep expands to -------------------------------------------------------------


axis_values = st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True)


def swept_suite(axes: Sequence[Sequence[int]], exclude: str = "", zipped: str = "") -> str:
    lines = [f"      a{i}: {list(values)}" for i, values in enumerate(axes)]
    return "\n".join(
        [
            "schema: 1\ntitle: t\nsubject: s\nquestion: q\nworkloads:",
            "  - name: w\n    factory: m:f\n    providers: [p, r]\n    axes:",
            *lines,
            exclude,
            zipped,
        ]
    )


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
    text = swept_suite(axes, f"    exclude: [{json.dumps(criteria)}]" if criteria else "")

    loaded = suites.loads(text, "x.yaml")

    assert len(loaded.cases) == total - (excluded if criteria else 0)
    assert len(set(ids(loaded))) == len(loaded.cases)
    assert loaded.cases == suites.loads(text, "x.yaml").cases
    order = [
        [case.provider != "p"]
        + [values.index(int(case.axes[f"a{i}"])) for i, values in enumerate(axes)]
        for case in loaded.cases
    ]
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

    assert len(loaded.rules) == 2
    assert len(loaded.expectations) == 1
    assert not any(loaded.expectations[0].match.accepts(c) for c in loaded.cases)


# --- filters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        pytest.param([], 12, id="none"),
        pytest.param(["dense"], 4, id="part"),
        pytest.param(["train/nsa/*FA2=0"], 4, id="pattern"),
        pytest.param(["seq_len=512", "gc=on"], 6, id="any-of-two"),
        pytest.param(["!nsa"], 4, id="without"),
        pytest.param(["nsa", "!seq_len=128", "!*FA2=1"], 2, id="with-and-without"),
    ],
)
def test_filters_choose_cases(tmp_path: Path, filters: list[str], count: int) -> None:
    assert len(suites.load(write_suite(tmp_path), filters=filters).cases) == count


def test_the_id_of_a_case_chooses_that_case_alone(tmp_path: Path) -> None:
    path = write_suite(tmp_path)
    path.write_text(path.read_text().replace("512", "1280"))
    (first, *_) = suites.load(path).cases
    longer = first.case_id.replace("seq_len=128", "seq_len=1280")

    ids = [c.case_id for c in suites.load(path, filters=[first.case_id]).cases]

    assert ids == [first.case_id]
    assert longer in [c.case_id for c in suites.load(path).cases]
