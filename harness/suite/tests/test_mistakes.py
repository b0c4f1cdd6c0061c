"""Bad suite files: each mistake is told with its place, what is wrong and the nearest name."""

import re

import pytest

from harness.tests.good_suite import GOOD, error_of

# --- place, problem, nearest name --------------------------------------------------------

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


# --- no suite at all ---------------------------------------------------------------------


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
