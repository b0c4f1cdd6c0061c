"""Suite files: what becomes of a good one, and where a bad one is said to be bad."""

import json
import re
from collections.abc import Sequence
from dataclasses import fields
from math import prod
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from harness import suite
from harness.errors import SuiteError
from harness.records import METRICS, Case, MeasureSettings, Outcome, Suite
from harness.suite_schema import ExpectationModel, MeasureModel

GOOD = """\
schema: 1
title: Retest
subject: A100 Retest
question: Is it fast enough?
measure: {processes: 4, timeout_s: 90}
workloads:
  - name: train
    factory: suites.workloads:train
    providers: [nsa, dense]
    axes:
      preset: small
      seq_len: [128, 256, 512]
      gc: ["off", "on"]
      NSA_USE_FA2: [0, 1]
    exclude:
      - {provider: dense, NSA_USE_FA2: 1}
      - {gc: "on", seq_len: [256, 512]}
    env: {OMP_NUM_THREADS: 1}
    measure: {timeout_s: 60}
    allow: {timeout: slow card}
expectations:
  - match: {seq_len: 128, gc: "off"}
    gpu: A100
    tokens_per_s: {low: 500, high: 1500}
    source: runbook
verdict:
  - name: throughput
    match: {provider: nsa}
    metric: tokens_per_s
    go: 500
    abort: 100
  - name: scaling
    match: {gc: off}
    metric: scaling_exponent
    axis: seq_len
    go: 1.3
    abort: 1.8
cost: {steps: 50000, match: {seq_len: 512}, usd_per_gpu_hour: 2.0}
"""
SHIPPED = (
    *("a100-retest", "attention", "counters", "decode"),
    *("forward-scaling", "gate", "smoke", "train-125m"),
)


def error_of(text: str) -> str:
    with pytest.raises(SuiteError) as caught:
        suite.loads(text, "x.yaml")
    return str(caught.value)


def ids(loaded: Suite) -> list[str]:
    return [case.case_id for case in loaded.cases]


def write_suite(folder: Path, text: str = GOOD) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


# --- a good suite ------------------------------------------------------------------------


def test_cases_follow_the_declared_order_and_leave_out_what_is_excluded() -> None:
    assert ids(suite.loads(GOOD, "x.yaml")) == [
        "train/nsa/seq_len=128/gc=off/NSA_USE_FA2=0",
        "train/nsa/seq_len=128/gc=off/NSA_USE_FA2=1",
        "train/nsa/seq_len=128/gc=on/NSA_USE_FA2=0",
        "train/nsa/seq_len=128/gc=on/NSA_USE_FA2=1",
        "train/nsa/seq_len=256/gc=off/NSA_USE_FA2=0",
        "train/nsa/seq_len=256/gc=off/NSA_USE_FA2=1",
        "train/nsa/seq_len=512/gc=off/NSA_USE_FA2=0",
        "train/nsa/seq_len=512/gc=off/NSA_USE_FA2=1",
        "train/dense/seq_len=128/gc=off/NSA_USE_FA2=0",
        "train/dense/seq_len=128/gc=on/NSA_USE_FA2=0",
        "train/dense/seq_len=256/gc=off/NSA_USE_FA2=0",
        "train/dense/seq_len=512/gc=off/NSA_USE_FA2=0",
    ]


def test_a_case_carries_axes_environment_settings_and_allowances() -> None:
    case = suite.loads(GOOD, "x.yaml").cases[1]

    assert case == Case(
        case_id="train/nsa/seq_len=128/gc=off/NSA_USE_FA2=1",
        workload="train",
        factory="suites.workloads:train",
        provider="nsa",
        axes={"preset": "small", "seq_len": 128, "gc": "off", "NSA_USE_FA2": 1},
        swept=("seq_len", "gc", "NSA_USE_FA2"),
        env={"OMP_NUM_THREADS": "1", "NSA_USE_FA2": "1"},
        settings=MeasureSettings(processes=4, timeout_s=60),
        allow={Outcome.TIMEOUT: "slow card"},
    )


def test_rules_expectations_and_cost_arrive_whole() -> None:
    loaded = suite.loads(GOOD, "folder/x.yaml")

    assert (loaded.name, loaded.path, loaded.text) == ("x", "folder/x.yaml", GOOD)
    assert loaded.subject == "A100 Retest"
    (expectation,) = loaded.expectations
    assert (expectation.metric, expectation.low, expectation.high) == ("tokens_per_s", 500, 1500)
    assert (expectation.gpu, expectation.source) == ("A100", "runbook")
    assert expectation.match.criteria == {"seq_len": (128,), "gc": ("off",)}
    throughput, scaling = loaded.rules
    assert (throughput.go, throughput.abort, throughput.quantifier) == (500, 100, "all")
    assert (scaling.metric, scaling.axis) == ("scaling_exponent", "seq_len")
    assert loaded.cost is not None
    assert (loaded.cost.steps, loaded.cost.usd_per_gpu_hour) == (50000, 2.0)


def test_the_words_off_and_on_are_text_and_booleans_are_spelt_out_in_ids() -> None:
    loaded = suite.loads(GOOD.replace('gc: ["off", "on"]', "gc: [off, on, true]"), "x.yaml")

    assert loaded.cases[0].axes["gc"] == "off"
    assert "train/nsa/seq_len=128/gc=true/NSA_USE_FA2=0" in ids(loaded)


def test_zipped_axes_advance_together() -> None:
    text = GOOD.replace("    env:", "    zip: [[seq_len, batch]]\n    env:").replace(
        "      gc:", "      batch: [4, 2, 2]\n      gc:"
    )
    text = text.replace("metric: scaling_exponent\n    axis: seq_len", "metric: step_s")

    loaded = suite.loads(text, "x.yaml")

    pairs = {(c.axes["seq_len"], c.axes["batch"]) for c in loaded.cases}
    assert pairs == {(128, 4), (256, 2), (512, 2)}
    assert ids(loaded)[0] == "train/nsa/seq_len=128/batch=4/gc=off/NSA_USE_FA2=0"


def test_settings_and_allowances_can_be_for_some_cases_only() -> None:
    text = GOOD.replace(
        "measure: {timeout_s: 60}",
        "measure: [{match: {seq_len: 512}, timeout_s: 120}, {match: {gc: 'on'}, processes: 2}]",
    ).replace(
        "allow: {timeout: slow card}",
        "allow: [{match: {seq_len: 512}, outcome: timeout, reason: long}]",
    )

    cases = suite.loads(text, "x.yaml").cases

    assert {c.settings.timeout_s for c in cases if c.axes["seq_len"] == 512} == {120}
    assert {c.settings.timeout_s for c in cases if c.axes["seq_len"] != 512} == {90}
    assert {c.settings.processes for c in cases if c.axes["gc"] == "on"} == {2}
    assert {c.axes["seq_len"] for c in cases if Outcome.TIMEOUT in c.allow} == {512}


def test_aliases_repeat_a_value() -> None:
    text = GOOD.replace("match: {provider: nsa}", "match: &nsa {provider: nsa}").replace(
        "match: {gc: off}", "match: *nsa"
    )

    throughput, scaling = suite.loads(text, "x.yaml").rules

    assert throughput.match == scaling.match


# --- sweeps ------------------------------------------------------------------------------

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
def test_a_sweep_has_every_combination_once_but_the_excluded(
    axes: list[list[int]], data: st.DataObject
) -> None:
    out = [data.draw(st.sets(st.sampled_from(values))) for values in axes]
    criteria = {f"a{i}": sorted(values) for i, values in enumerate(out) if values}
    excluded = 2 * prod(len(v or axis) for v, axis in zip(out, axes, strict=True))
    total = 2 * prod(map(len, axes))
    assume(not criteria or excluded < total)
    text = swept_suite(axes, f"    exclude: [{json.dumps(criteria)}]" if criteria else "")

    loaded = suite.loads(text, "x.yaml")

    assert len(loaded.cases) == total - (excluded if criteria else 0)
    assert len(set(ids(loaded))) == len(loaded.cases)
    assert loaded.cases == suite.loads(text, "x.yaml").cases
    order = [
        [case.provider != "p"]
        + [values.index(int(case.axes[f"a{i}"])) for i, values in enumerate(axes)]
        for case in loaded.cases
    ]
    assert order == sorted(order)


@given(st.integers(1, 4), axis_values)
@settings(max_examples=20, deadline=None)
def test_a_zipped_sweep_is_as_long_as_its_axes(length: int, crossed: list[int]) -> None:
    axes = [list(range(length)), crossed, list(range(10, 10 + length))]

    loaded = suite.loads(swept_suite(axes, zipped="    zip: [[a2, a0]]"), "x.yaml")

    assert len(loaded.cases) == 2 * length * len(crossed)
    assert all(c.axes["a2"] == 10 + int(c.axes["a0"]) for c in loaded.cases)


# --- bad suites: place, problem, nearest name --------------------------------------------


MISTAKES = [
    # what is replaced, what by ("^" marks where the error must point), what must be said
    ("    providers:", "    ^provider:", "did you mean 'providers'"),
    ("schema: 1\ntitle: Retest\n", "^schema: 1\n", "title is missing"),
    ("schema: 1", "schema: ^2", "schema must be 1, not 2"),
    ("title: Retest", "title: ^5", "title must be text, not 5"),
    ("processes: 4", "processes: ^-4", "must be greater than or equal to 1, not -4"),
    ("processes: 4", "processes: ^1.5", "must be a whole number, not 1.5"),
    ("measure: {processes: 4", "^measure: {min_samples: 201", "is above max_samples 200"),
    ("measure: {timeout_s: 60}", "^measure: {max_samples: 1}", "min_samples 5 is above"),
    ("[128, 256, 512]", "^[]", "must not be empty"),
    ("256, 512]\n", "^[1]]\n", "must be one value"),
    ("256, 512]\n", "^null, 512]\n", "seq_len has no value"),
    ("256, 512]\n", "^.nan, 512]\n", ".nan is no finite number"),
    ("256, 512]\n", "256, ^0x100, 512]\n", "256 is listed twice"),
    ("256, 512]\n", "1, ^true]\n", "true is listed twice"),
    ('["off", "on"]', '["off", ^"o/n"]', "'o/n' cannot stand in a case id"),
    ("seq_len: [128", "^Seq-len: [128", "lower_case, or UPPER_CASE"),
    ("preset: small", "^provider: x", "'provider' cannot be an axis"),
    ("suites.workloads:train", "^suites.workloads", "package.module:function"),
    ("A100 Retest", "^../Retest", "it names the report's file"),
    ("[nsa, dense]", "[nsa, ^nsa]", "'nsa' is listed twice"),
    ("NSA_USE_FA2: 1}", "^NSA_USE_FA: 1}", "did you mean 'NSA_USE_FA2'"),
    ("NSA_USE_FA2: 1}", "NSA_USE_FA2: ^2}", "did you mean 1"),
    ("[256, 512]}", "[256, ^513]}", "did you mean 512"),
    ("OMP_NUM_THREADS", "^NSA_USE_FA2", "is an axis and in env as well"),
    ("{OMP_NUM_THREADS: 1}", "[{match: {gc: ^of}, set: {X: 1}}]", "did you mean 'off'"),
    (
        "{OMP_NUM_THREADS: 1}",
        "[{match: {provider: nsa}, set: {^NSA_USE_FA2: 1}}]",
        "is an axis and in env as well",
    ),
    ("allow: {timeout", "allow: {^timout", "did you mean 'timeout'"),
    ("allow: {timeout", "allow: {^ok", "ok needs no allowance"),
    ("slow card", "^''", "must not be empty"),
    ("{timeout: slow card}", "[{outcome: ^slow, reason: x}]", "'slow' is no outcome"),
    (
        "{timeout: slow card}",
        "[{match: {^sq_len: 512}, outcome: timeout, reason: x}]",
        "did you mean 'seq_len'",
    ),
    ("{timeout_s: 60}", "[{match: {seq_len: ^513}, timeout_s: 60}]", "did you mean 512"),
    ('gc: "off"}', "gc: ^of}", "did you mean 'off'"),
    ("seq_len: 128, gc", 'seq_len: ^"128", gc', "seq_len is never '128'"),
    ('{seq_len: 128, gc: "off"}', '^{seq_len: 256, gc: "on"}', "matches no case"),
    ("{low: 500,", "{low: ^5000,", "low must not be above high, 1500"),
    ("{low: 500, high: 1500}", "^{}", "needs low, high or both"),
    ("tokens_per_s: {low", "^tokens: {low", "did you mean 'tokens_per_s'"),
    ("match: {seq_len: 128", "^step_s: {low: 1}\n    match: {seq_len: 128", "exactly one metric"),
    ("metric: tokens_per_s", "metric: ^token_per_s", "did you mean 'tokens_per_s'"),
    ("match: {provider: nsa}", "match: {^provder: nsa}", "did you mean 'provider'"),
    ("match: {provider: nsa}", "match: {workload: ^tran}", "did you mean 'train'"),
    ("name: scaling", "name: ^throughput", "a second rule"),
    ("go: 500\n    abort: 100", "go: 50\n    abort: ^100", "good when high"),
    (
        "metric: scaling_exponent\n    axis: seq_len",
        "metric: step_s\n    axis: ^seq_len",
        "axis goes with scaling_exponent",
    ),
    (
        "metric: scaling_exponent\n    axis: seq_len",
        "metric: ^scaling_exponent",
        "metric needs an axis",
    ),
    ("go: 1.3\n    abort: 1.8", "go: 1.9\n    abort: ^1.8", "good when low"),
    ("axis: seq_len", "axis: ^seq_ln", "did you mean 'seq_len'"),
    ("axis: seq_len", "axis: ^gc", "'gc' is no swept axis of numbers"),
    (
        "match: {gc: off}\n    metric: scaling_exponent\n    axis: seq_len",
        "match: {gc: on}\n    metric: scaling_exponent\n    axis: ^seq_len",
        "no curve has more than 1",
    ),
    ("steps: 50000", "steps: ^0", "must be greater than or equal to 1, not 0"),
    ("match: {seq_len: 512}, usd", "match: {^seq_ln: 512}, usd", "did you mean 'seq_len'"),
    ("usd_per_gpu_hour: 2.0", "usd_per_gpu_hour: ^-1", "must be greater than 0, not -1"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "marked", "said"), MISTAKES)
def test_a_mistake_is_told_with_its_place_and_the_nearest_valid_name(
    old: str, marked: str, said: str
) -> None:
    assert GOOD.count(old) == 1, "the test would change something else too"
    text = GOOD.replace(old, marked)
    before, after = text.split("^")
    place = f"{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"

    message = error_of(before + after)

    assert message.startswith(f"x.yaml:{place}: ")
    assert said in message.replace("Did", "did")


@pytest.mark.parametrize(
    ("zipped", "said"),
    [
        pytest.param("[seq_len, gcc]", "did you mean 'gc'", id="unknown"),
        pytest.param("[seq_len, preset]", "'preset' is no swept axis", id="fixed"),
        pytest.param("[seq_len, gc]", "seq_len has 3, gc has 2", id="unequal"),
        pytest.param("[gc, NSA_USE_FA2], [gc, seq_len]", "'gc' is zipped twice", id="twice"),
        pytest.param("[gc]", "at least 2", id="alone"),
        pytest.param("[gc, other]", "gc and other repeat a combination", id="repeated"),
    ],
)
def test_a_zip_that_cannot_advance_is_told(zipped: str, said: str) -> None:
    axes = GOOD.replace('gc: ["off", "on"]', 'gc: ["off", "on", "off"]\n      other: [1, 2, 1]')
    text = axes if "other" in zipped else GOOD

    message = error_of(text.replace("    env:", f"    zip: [{zipped}]\n    env:"))

    assert message.startswith(f"x.yaml:{19 if text is axes else 18}:")
    assert said in message.replace("Did", "did")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("", "x.yaml: the file is empty", id="empty"),
        pytest.param("# nothing\n", "x.yaml: the file is empty", id="comment-only"),
        pytest.param("just words\n", "x.yaml:1:1: the suite must be a mapping", id="words"),
        pytest.param("- a\n", "x.yaml:1:1: the suite must be a mapping", id="list"),
        pytest.param("a: [1,\nb: 2\n", "x.yaml:3:1: not YAML", id="malformed"),
        pytest.param("a:\n\t- 1\n", "Indent with spaces", id="tab"),
        pytest.param("a: 1\nb: 2\na: 3\n", "x.yaml:3:1: key 'a' stands here again", id="key-twice"),
        pytest.param("a:\n", "x.yaml:2:1: a has no value", id="no-value"),
        pytest.param("1: a\n", "x.yaml:1:1: a key must be text", id="number-as-key"),
        pytest.param("? [a]\n: 1\n", "x.yaml:1:3: a key must be text", id="list-as-key"),
        pytest.param("a: 1\n---\nb: 2\n", "x.yaml:2:1: not YAML", id="two-documents"),
        pytest.param("%YAML 1.1\n---\na: off\n", "x.yaml:3:4: off is no boolean", id="yaml-1.1"),
        pytest.param("a: 1e999\n", "x.yaml:1:4: 1e999 is no finite number", id="infinite"),
        pytest.param("a: &x {b: 1}\nc: {<<: *x}\n", "x.yaml:2:5: '<<'", id="merge-key"),
        pytest.param("a: &x [*x]\n", "an alias contains itself", id="recursive-alias"),
        pytest.param("a: *x\n", "x.yaml:1:4: not YAML: found undefined alias", id="no-anchor"),
        pytest.param("a: b\x00\n", "x.yaml:1:5: not text: character #x0000", id="nul"),
        pytest.param("a: " + "[" * 1000, "nested too deeply", id="deep"),
    ],
)
def test_what_is_no_suite_at_all_gets_one_message(text: str, said: str) -> None:
    assert said in error_of(text)


@pytest.mark.parametrize(
    "tag",
    ["!!python/object/apply:os.getcwd []", "!!python/name:os.sep ''", "!mine 1", "!!binary aGk="],
)
def test_a_tag_is_refused_and_not_constructed(tag: str) -> None:
    assert re.search(
        r"x.yaml:2:8: tag \S+ is not allowed", error_of(GOOD.replace("Retest", tag, 1))
    )


def test_aliases_cannot_blow_the_memory() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 6)]

    assert "more than 100000 values" in error_of("\n".join(lines))


def test_the_number_of_cases_is_bounded_before_they_are_made() -> None:
    values = list(range(20))

    message = error_of(swept_suite([values, values, values]))

    assert message.startswith("x.yaml:9:5: 16000 cases; a suite may have 10000")


def test_a_match_that_names_its_workload_is_held_to_the_axes_of_that_one() -> None:
    other = "  - {name: decode, factory: m:f, providers: [p], axes: {context: [1, 2]}}\n"
    text = GOOD.replace("expectations:", other + "expectations:")

    message = error_of(text.replace("match: {provider: nsa}", "match: {workload: decode, gc: off}"))

    assert message.startswith("x.yaml:29:31: 'gc' is no axis here")
    assert "Valid: 'workload', 'provider', 'context'." in message


def test_several_problems_are_told_together_in_the_order_of_the_file() -> None:
    text = GOOD.replace("go: 500", "go: fast").replace("processes: 4", "processes: x")

    message = error_of(text)

    assert message.startswith("x.yaml:5:22: measure.processes must be a whole number, not 'x'")
    assert "\n  also at 30:9: go must be a number, not 'fast'" in message


def test_excluding_everything_is_an_error() -> None:
    message = error_of(GOOD.replace('gc: "on", seq_len: [256, 512]', 'gc: ["on", "off"]'))

    assert message.startswith("x.yaml:15:5: every combination is excluded")


def test_workloads_bear_different_names_and_share_the_bound_on_cases() -> None:
    values = list(range(20))
    one = swept_suite([values, values, range(10)])  # 8000 cases
    again = one[one.index("  - name: w") :]

    assert "a second workload named 'w'" in error_of(one + again)
    assert "16000 cases" in error_of(one + again.replace("name: w", "name: v"))


# --- finding a suite ---------------------------------------------------------------------


def test_shipped_suites_are_found_by_name_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    for ref in ("smoke", "smoke.yaml", "suites/smoke.yaml", Path("smoke")):
        assert suite.load(ref).path == "suites/smoke.yaml"


def test_a_file_at_hand_goes_before_a_shipped_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke.yaml").write_text(GOOD)

    assert suite.load("smoke.yaml").title == "Retest"


def test_a_missing_file_lists_the_suites_there_are(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="no such suite") as caught:
        suite.load(tmp_path / "smok.yaml")

    assert "Did you mean 'smoke'" in str(caught.value)
    assert all(name in str(caught.value) for name in SHIPPED)


def test_a_binary_file_and_a_folder_are_told_as_such(tmp_path: Path) -> None:
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\x89PNG\xff\x00")

    with pytest.raises(SuiteError, match="not a text file"):
        suite.load(binary)
    with pytest.raises(SuiteError, match="directory"):
        suite.load(tmp_path)


def test_the_text_is_kept_as_it_stands_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(GOOD.replace("\n", "\r\n").encode())

    loaded = suite.load(path)

    assert loaded.text.encode() == path.read_bytes()
    assert loaded.sha256 != suite.loads(GOOD, path).sha256
    assert loaded.cases == suite.loads(GOOD, path).cases


# --- overrides and filters ---------------------------------------------------------------


def test_an_override_replaces_the_axis_and_keeps_the_ids_of_the_cases_left(tmp_path: Path) -> None:
    path = write_suite(tmp_path)

    some = suite.load(path, overrides=["seq_len=512", "NSA_USE_FA2=0", "measure.processes=1"])

    assert set(ids(some)) < set(ids(suite.load(path)))
    assert {c.axes["seq_len"] for c in some.cases} == {512}
    assert {c.settings.processes for c in some.cases} == {1}
    assert some.text == GOOD


def test_an_overridden_fixed_axis_enters_the_id(tmp_path: Path) -> None:
    """Else two different measurements would bear one name."""
    loaded = suite.load(write_suite(tmp_path), overrides=["preset=tiny"])

    assert loaded.cases[0].case_id == "train/nsa/preset=tiny/seq_len=128/gc=off/NSA_USE_FA2=0"


def test_an_override_keeps_the_type_that_the_file_gives_a_value(tmp_path: Path) -> None:
    path = write_suite(tmp_path, GOOD.replace('["off", "on"]', '["off", "on", "1"]'))

    loaded = suite.load(path, overrides=["gc=off,1,2", "NSA_USE_FA2=0"])

    assert [*dict.fromkeys(c.axes["gc"] for c in loaded.cases)] == ["off", "1", 2]
    assert loaded.cases[0].axes["NSA_USE_FA2"] == 0


def test_a_rule_that_an_override_leaves_without_cases_is_kept(tmp_path: Path) -> None:
    """The gate must say that it judged nothing, rather than pass without it."""
    loaded = suite.load(write_suite(tmp_path), overrides=["seq_len=64"])

    assert len(loaded.rules) == 2
    assert len(loaded.expectations) == 1
    assert not any(loaded.expectations[0].match.accepts(c) for c in loaded.cases)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        pytest.param("seq_ln=512", "did you mean 'seq_len'", id="unknown-axis"),
        pytest.param("seq_len", "axis=value", id="no-value"),
        pytest.param("seq_len=", "axis=value", id="empty-value"),
        pytest.param("seq_len=1,,2", "'' is no value", id="gap"),
        pytest.param("seq_len=.inf", "no finite number", id="infinite"),
        pytest.param("seq_len=1,1", "1 is listed twice", id="twice"),
        pytest.param("seq_len=a/b", "case id", id="unsafe"),
        pytest.param("measure.proceses=1", "did you mean 'processes'", id="unknown-setting"),
        pytest.param("measure.processes=0", "not 0", id="bad-setting"),
        pytest.param(
            "measure.max_samples=2", "min_samples 5 is above max_samples 2", id="contrary"
        ),
        pytest.param("seq_len=" + ",".join(map(str, range(9999))), "a suite may have", id="many"),
    ],
)
def test_a_bad_override_is_told_with_a_remedy(tmp_path: Path, override: str, said: str) -> None:
    path = write_suite(tmp_path)

    with pytest.raises(SuiteError, match=r"^--set ") as caught:
        suite.load(path, overrides=[override])

    assert said in str(caught.value).replace("Did", "did")
    assert len(str(caught.value)) < 400


def test_an_override_to_excluded_combinations_only_is_an_error(tmp_path: Path) -> None:
    text = GOOD.replace("[nsa, dense]", "[dense, nsa]").replace("provider: dense", "provider: nsa")
    path = write_suite(tmp_path, text.replace("seq_len: [256, 512]", "provider: dense"))

    with pytest.raises(SuiteError, match="every case is excluded with these overrides"):
        suite.load(path, overrides=["gc=on", "NSA_USE_FA2=1"])


def test_setting_an_axis_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="seq_len is set twice"):
        suite.load(write_suite(tmp_path), overrides=["seq_len=128", "seq_len=256"])


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
    assert len(suite.load(write_suite(tmp_path), filters=filters).cases) == count


@pytest.mark.parametrize("empty", ["", "!"])
def test_an_empty_filter_is_refused(tmp_path: Path, empty: str) -> None:
    """It would fit every case: an unset shell variable must not start the whole suite."""
    with pytest.raises(SuiteError, match="empty filter"):
        suite.load(write_suite(tmp_path), filters=["train", empty])


def test_a_filter_that_leaves_nothing_shows_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="no case fits nothing") as caught:
        suite.load(write_suite(tmp_path), filters=["nothing"])

    assert "train/nsa/seq_len=128/gc=off/NSA_USE_FA2=0" in str(caught.value)
    assert "and 7 more" in str(caught.value)


def test_variables_may_be_set_for_some_cases() -> None:
    listed = "[{match: {provider: nsa}, set: {A: 1, B: x}}, {match: {seq_len: 512}, set: {A: 2}}]"
    cases = suite.loads(GOOD.replace("{OMP_NUM_THREADS: 1}", listed), "x.yaml").cases

    env = {(c.provider, c.axes["seq_len"]): c.env for c in cases if not c.axes["NSA_USE_FA2"]}

    assert env["nsa", 128] == {"A": "1", "B": "x", "NSA_USE_FA2": "0"}
    assert env["nsa", 512] == {"A": "2", "B": "x", "NSA_USE_FA2": "0"}  # the last one counts
    assert env["dense", 512] == {"A": "2", "NSA_USE_FA2": "0"}
    assert env["dense", 128] == {"NSA_USE_FA2": "0"}


# --- what must run -----------------------------------------------------------------------

MUST = """\
    kernels:
      - {match: {provider: nsa}, must: [_forward_kernel]}
      - {match: {provider: nsa, gc: "on"}, must: [_backward_kernel], must_not: ["*flash*"]}
    operators: {must_not: ["aten::item"]}
"""


def test_each_case_has_what_is_stated_of_it() -> None:
    loaded = suite.loads(GOOD.replace("    env:", MUST + "    env:"), "x.yaml")

    stated = {
        (c.provider, c.axes["gc"]): (c.kernels.must, c.kernels.must_not) for c in loaded.cases
    }
    assert stated["nsa", "off"] == (("_forward_kernel",), ())
    assert stated["nsa", "on"] == (("_forward_kernel", "_backward_kernel"), ("*flash*",))
    assert stated["dense", "off"] == ((), ())
    assert {c.operators.must_not for c in loaded.cases} == {("aten::item",)}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('{must_not: ["aten::item"]}', "{}", "operators needs must, must_not or both"),
        ("provider: nsa, gc", "provider: nas, gc", "provider is never 'nas'"),
        ("must: [_forward_kernel]", "mast: [_forward_kernel]", "unknown key 'mast'"),
    ],
)
def test_a_statement_that_says_nothing_is_refused(old: str, new: str, said: str) -> None:
    text = GOOD.replace("    env:", MUST.replace(old, new) + "    env:")

    assert said in error_of(text)


# --- the schema and the suites that ship -------------------------------------------------


def test_the_exported_schema_is_up_to_date() -> None:
    """Regenerate it with `harness schema > suites/suite.schema.json`."""
    written = (suite.available()[0].parent / "suite.schema.json").read_text()

    assert json.loads(written) == suite.json_schema()


def test_the_schema_accepts_a_good_suite_and_refuses_a_bad_one() -> None:
    schema = suite.json_schema()
    yaml = YAML(typ="safe", pure=True)

    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.load(GOOD), schema)
    for old, new in [
        ("providers", "provider"),
        ("processes: 4", "processes: 0"),
        ("go: 500", "go: x"),
    ]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.load(GOOD.replace(old, new)), schema)


def test_the_format_knows_every_setting_and_every_metric() -> None:
    defaults = {f.name: f.default for f in fields(MeasureSettings)}

    assert set(MeasureModel.model_fields) == set(defaults)
    for name, form in MeasureModel.model_fields.items():
        default = str(defaults[name]).lower().removesuffix(".0")
        assert str(form.description).endswith(f" Default {default}.")
    assert METRICS.keys() - ExpectationModel.model_fields.keys() == {"scaling_exponent"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_suite_opens_with_its_question_and_names_its_schema(name: str) -> None:
    loaded = suite.load(name)

    lines = loaded.text.splitlines()
    assert lines[0] == "# yaml-language-server: $schema=suite.schema.json"
    assert lines[2].endswith("?")
    assert loaded.question.endswith("?")
    assert loaded.rules
    jsonschema.validate(YAML(typ="safe", pure=True).load(loaded.text), suite.json_schema())


def test_no_suite_ships_untested() -> None:
    assert tuple(path.stem for path in suite.available()) == SHIPPED


def test_the_retest_keeps_the_floors_and_the_matrix_of_the_report_of_2025_08_31() -> None:
    retest = suite.load("a100-retest")

    throughput = retest.rules[0]
    assert (throughput.metric, throughput.go, throughput.abort) == ("tokens_per_s", 500, 100)
    judged = [c for c in retest.cases if throughput.match.accepts(c)]
    assert {
        tuple(c.axes[a] for a in ("seq_len", "gc", "dataset", "NSA_USE_FA2")) for c in judged
    } == {
        (t, gc, d, fa2)
        for t in (512, 2048)
        for gc in ("off", "on")
        for d in ("synthetic", "text")
        for fa2 in (0, 1)
    }
    assert retest.cost is not None
    assert retest.cost.steps == 50_000


def test_the_forward_suite_gives_the_longest_sequence_more_time() -> None:
    cases = suite.load("forward-scaling").cases

    assert {c.settings.timeout_s for c in cases if c.axes["seq_len"] == 2048} == {120}
    assert {c.settings.timeout_s for c in cases if c.axes["seq_len"] != 2048} == {30}
