"""Mistakes in suite files: place, fact, cause and remedy.

All messages are in messages.txt. To accept changed ones: ACCEPT=1 pytest harness/suite
"""

import os
from pathlib import Path

import pytest

from harness.suite import sweep
from harness.tests.good_suite import GOOD, error_of

MESSAGES = Path(__file__).with_name("messages.txt")
OTHER = "  - {name: decode, factory: m:f, providers: [p], axes: {context: [1, 2]}}\n"
PAIR = "{name: a, within: {gc: off}, without: {provider: dense}, with: {provider: nsa}}"
SUSPECTS = (
    "suspects:\n  gap: {{metric: step_s, expected: 1.0, seen: {}, source: s}}\n  tested: [{}]\n"
)

# What is replaced in a good suite, and by what; "^" marks the place that the error must name.
MISTAKES = [
    ("    providers:", "    ^provider:"),
    ("schema: 1\ntitle: Retest\n", "^schema: 1\n"),
    ("schema: 1", "schema: ^2"),
    ("title: Retest", "title: ^5"),
    ("processes: 4", "processes: ^-4"),
    ("processes: 4", "processes: {from: 3, to: ^2}"),
    ("measure: {timeout_s: 60}", "^measure: {max_samples: 1}"),
    ("[128, 256, 512]", "^[]"),
    ("256, 512]\n", "^[1]]\n"),
    ("256, 512]\n", "^null, 512]\n"),
    ("256, 512]\n", "^.nan, 512]\n"),
    ("256, 512]\n", "256, ^0x100, 512]\n"),
    ("256, 512]\n", "1, ^true]\n"),
    ('["off", "on"]', '["off", ^"o/n"]'),
    ("seq_len: [128", "^Seq-len: [128"),
    ("preset: small", "^provider: x"),
    ("suites.workloads:train", "^suites.workloads"),
    ("A100 Retest", "^../Retest"),
    ("[nsa, dense]", "[nsa, ^nsa]"),
    ("NSA_USE_FA2: 1}", "^NSA_USE_FA: 1}"),
    ("[256, 512]}", "[256, ^513]}"),
    ("{OMP_NUM_THREADS", "^{NSA_USE_FA2"),
    ("{OMP_NUM_THREADS: 1}", "[{match: {provider: nsa}, set: {^NSA_USE_FA2: 1}}]"),
    ("allow: {timeout", "allow: {^timout"),
    ("allow: {timeout", "allow: {^ok"),
    ("slow card", "^''"),
    ("seq_len: 128, gc", 'seq_len: ^"128", gc'),
    ('{seq_len: 128, gc: "off"}', '^{seq_len: 256, gc: "on"}'),
    ("{low: 500,", "{low: ^5000,"),
    ("{low: 500, high: 1500}", "^{}"),
    ("match: {seq_len: 128", "^step_s: {low: 1}\n    match: {seq_len: 128"),
    ("metric: tokens_per_s", "metric: ^token_per_s"),
    ("match: {provider: nsa}", "match: {^provder: nsa}"),
    ("match: {provider: nsa}", "match: {workload: ^tran}"),
    ("name: scaling", "name: ^throughput"),
    ("go: 500\n    abort: 100", "go: 50\n    abort: ^100"),
    ("go: 500\n    abort: 100", "counts: note\n    abort_early: ^true\n    go: 500"),
    ("go: 500\n    abort: 100", "against: {provider: dense}\n    at_least: 1.2\n    go: ^500"),
    ("go: 500\n    abort: 100", "against: {provider: dense}\n    at_least: 1.2\n    abort: ^2.0"),
    ("go: 500\n    abort: 100", "missing: ^note\n    go: 500"),
    ("metric: scaling_exponent\n    axis: seq_len", "metric: step_s\n    axis: ^seq_len"),
    ("metric: scaling_exponent\n    axis: seq_len", "metric: ^scaling_exponent"),
    ("go: 1.3\n    abort: 1.8", "go: 1.9\n    abort: ^1.8"),
    ("axis: seq_len", "axis: ^gc"),
    (
        "match: {gc: off}\n    metric: scaling_exponent\n    axis: seq_len",
        "match: {gc: on}\n    metric: scaling_exponent\n    axis: ^seq_len",
    ),
    ("steps: 50000", "steps: ^0"),
    ("env: {OMP_NUM_THREADS: 1}", "operators: ^{}\n    env: {OMP_NUM_THREADS: 1}"),
    ("    env:", "    zip: [[seq_len, ^preset]]\n    env:"),
    ("    env:", "    zip: [^[seq_len, gc]]\n    env:"),
    ("    env:", "    zip: [[gc, NSA_USE_FA2], ^[gc, seq_len]]\n    env:"),
    ("    env:", "    zip: [^[gc]]\n    env:"),
    ("exclude:", '^exclude:\n      - {gc: ["off", "on"]}'),
    ("FA2: [0, 1]\n", "FA2: [0, 1, 0]\n      x: [1, 2, 1]\n    zip: [^[NSA_USE_FA2, x]]\n"),
    ("expectations:", "  - {name: ^train, factory: m:f, providers: [p]}\nexpectations:"),
    ("cost:", f"{SUSPECTS.format('^0.5', PAIR)}cost:"),
    ("cost:", f"{SUSPECTS.format('2.0', '^{name: a, without: {gc: off}}')}cost:"),
    ("cost:", "requires: {packages: {flash-attn: ^'>=two'}}\ncost:"),
]  # fmt: skip
OVERRIDES = [
    "seq_ln=512",
    "seq_len",
    "seq_len=1,,2",
    "seq_len=128 seq_len=256",
    "seq_len=a/b",
    "measure.proceses=1",
    "measure.max_samples=2",
    "gc=on seq_len=512",
    "preset=" + ",".join(map(str, range(99))),
]
UNREADABLE = {
    "empty": "",
    "words": "just words\n",
    "comment in a text": "a: step #1\n",
    "colon in a text": "a: step: 1\n",
    "malformed": "a: [1,\nb: 2\n",
    "tab": "a:\n\t- 1\n",
    "key-twice": "a: 1\nb: 2\na: 3\n",
    "no-value": "a:\n",
    "list-as-key": "? [a]\n: 1\n",
    "two-documents": "a: 1\n---\nb: 2\n",
    "yaml-1.1": "%YAML 1.1\n---\na: off\n",
    "infinite": "a: 1e999\n",
    "merge-key": "a: &x {b: 1}\nc: {<<: *x}\n",
    "recursive-alias": "a: &x [*x]\n",
    "nul": "a: b\x00\n",
    "deep": "a: " + "[" * 1000,
    "number of 64 bits": "a: 9223372036854775808",
}
TAGS = ["!!python/object/apply:os.getcwd []", "!!python/name:os.sep ''", "!mine 1", "!!binary aGk="]


def broken(old: str, marked: str) -> tuple[str, str]:
    """A suite with one mistake, and the place of the mistake."""
    assert GOOD.count(old) == 1, "the test would change something else too"
    before, after = GOOD.replace(old, marked).split("^")
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    return before + after, f"x.yaml:{line}:{column}: "


def test_the_messages_are_those_that_were_accepted_and_name_the_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = GOOD.replace("go: 500", "go: fast").replace("processes: 4", "processes: x")
    of_other = GOOD.replace("match: {provider: nsa}", "match: {workload: decode, gc: off}")
    of_other = of_other.replace("expectations:", OTHER + "expectations:")
    said = {}
    for old, marked in MISTAKES:
        text, place = broken(old, marked)
        said[f"{old!r} -> {marked!r}"] = error_of(text)
        assert error_of(text).startswith(place)
    others = {"several mistakes": several, "axis of another workload": of_other, **UNREADABLE}
    said |= {what: error_of(text) for what, text in others.items()}
    monkeypatch.setattr(sweep, "MAX_CASES", 1000)
    for override in OVERRIDES:
        said[f"--set {override}"] = error_of(GOOD, override.split())
    said |= {f"--filter {f!r}": error_of(GOOD, filters=["train", f]) for f in ("", "!")}
    said["--filter nothing"] = error_of(GOOD, filters=["train", "nothing"])
    shown = "\n".join(f"--- {what}\n{error}\n" for what, error in said.items())
    if os.environ.get("ACCEPT"):
        MESSAGES.write_text(shown)

    assert shown == MESSAGES.read_text()


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_is_refused_and_not_constructed(tag: str) -> None:
    assert error_of(GOOD.replace("Retest", tag, 1)).startswith("x.yaml:2:8: tag ")
