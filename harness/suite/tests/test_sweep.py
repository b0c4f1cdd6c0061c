"""Sweeps: the cases of axes, overrides and filters."""

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.errors import SuiteError
from harness.suite import load as suites
from harness.suite import sweep
from harness.tests.good_suite import GOOD, error_of, ids, write_suite

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


# --- wrong sweeps ------------------------------------------------------------------------


def test_a_zip_must_not_repeat_a_combination() -> None:
    axes = GOOD.replace('gc: ["off", "on"]', 'gc: ["off", "on", "off"]\n      other: [1, 2, 1]')

    message = error_of(axes.replace("    env:", "    zip: [[gc, other]]\n    env:"))

    assert message.startswith("x.yaml:19:11: gc and other")


def test_the_number_of_cases_is_checked_before_they_are_made() -> None:
    values = list(range(1000))

    message = error_of(swept_suite([values, values, values]))

    assert message.startswith("x.yaml:9:5: 2000000000 cases")


def test_workloads_need_different_names() -> None:
    one = swept_suite([range(4)])

    assert "two workloads are named 'w'" in error_of(one + one[one.index("  - name: w") :])


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


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        pytest.param("seq_ln=512", "did you mean 'seq_len'", id="unknown-axis"),
        pytest.param("seq_len", "axis=value", id="no-value"),
        pytest.param("seq_len=", "axis=value", id="empty-value"),
        pytest.param("seq_len=1,,2", "'' is not a value", id="gap"),
        pytest.param("seq_len=.inf", "not a finite number", id="infinite"),
        pytest.param("seq_len=1,1", "1 is listed twice", id="twice"),
        pytest.param("seq_len=128 seq_len=256", "seq_len is set twice", id="set-twice"),
        pytest.param("seq_len=a/b", "case id", id="unsafe"),
        pytest.param("measure.proceses=1", "did you mean 'processes'", id="unknown-setting"),
        pytest.param("measure.processes=0", "not 0", id="bad-setting"),
        pytest.param(
            "measure.max_samples=2", "min_samples 5 is above max_samples 2", id="contrary"
        ),
        pytest.param("seq_len=" + ",".join(map(str, range(999))), "cases, but", id="many"),
    ],
)
def test_a_wrong_override_has_a_remedy(
    tmp_path: Path, override: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "MAX_CASES", 1000)
    path = write_suite(tmp_path)

    with pytest.raises(SuiteError, match=r"^--set ") as caught:
        suites.load(path, overrides=override.split())

    assert shown in str(caught.value).replace("Did", "did")
    assert len(str(caught.value)) < 400


def test_an_override_that_leaves_only_excluded_cases_is_an_error(tmp_path: Path) -> None:
    text = GOOD.replace("[nsa, dense]", "[dense, nsa]").replace("provider: dense", "provider: nsa")
    path = write_suite(tmp_path, text.replace("seq_len: [256, 512]", "provider: dense"))

    with pytest.raises(SuiteError, match="every case is excluded with these overrides"):
        suites.load(path, overrides=["gc=on", "NSA_USE_FA2=1"])


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


@pytest.mark.parametrize("empty", ["", "!"])
def test_an_empty_filter_is_refused(tmp_path: Path, empty: str) -> None:
    """An unset shell variable must not start the whole suite."""
    with pytest.raises(SuiteError, match="empty filter"):
        suites.load(write_suite(tmp_path), filters=["train", empty])


def test_a_filter_without_a_match_lists_cases(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="no case matches 'nothing'") as caught:
        suites.load(write_suite(tmp_path), filters=["nothing"])

    assert "train/nsa/seq_len=128/gc=off/NSA_USE_FA2=0" in str(caught.value)
    assert "and 7 more" in str(caught.value)
