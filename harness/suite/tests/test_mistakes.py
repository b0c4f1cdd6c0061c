"""Mistakes in suite files: place, fact, cause and remedy.

All messages are in messages.txt, each below its mistake: `--- what is replaced in a good suite ->
what by`, in which "^" marks the place that the error must name, or `--- --set` with an override. To
add one, write its line; to accept its message and changed ones: ACCEPT=1 pytest harness/suite
"""

import os
import re
from ast import literal_eval
from pathlib import Path

import pytest

from harness.suite import sweep
from harness.tests.good_suite import GOOD, error_of

MESSAGES = Path(__file__).with_name("messages.txt")
OTHER = "  - {name: decode, factory: m:f, providers: [p], axes: {context: [1, 2]}}\n"
UNREADABLE = {
    "empty": "",
    "comment-only": "# nothing\n",
    "words": "just words\n",
    "comment in a text": "a: step #1\n",
    "colon in a text": "a: step: 1\n",
    "malformed": "a: [1,\nb: 2\n",
    "tab": "a:\n\t- 1\n",
    "key-twice": "a: 1\nb: 2\na: 3\n",
    "no-value": "a:\n",
    "number-as-key": "1: a\n",
    "list-as-key": "? [a]\n: 1\n",
    "two-documents": "a: 1\n---\nb: 2\n",
    "yaml-1.1": "%YAML 1.1\n---\na: off\n",
    "infinite": "a: 1e999\n",
    "merge-key": "a: &x {b: 1}\nc: {<<: *x}\n",
    "recursive-alias": "a: &x [*x]\n",
    "no-anchor": "a: *x\n",
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
    listed = re.findall(r"^--- (.+)$", MESSAGES.read_text(), re.MULTILINE)
    assert len(listed) >= 114, "one is lost"
    said = {}
    for mistake in (line for line in listed if " -> " in line):
        text, place = broken(*map(literal_eval, mistake.split(" -> ")))
        said[mistake] = error_of(text)
        assert said[mistake].startswith(place)
    others = {"several mistakes": several, "axis of another workload": of_other, **UNREADABLE}
    said |= {what: error_of(text) for what, text in others.items()}
    monkeypatch.setattr(sweep, "MAX_CASES", 1000)
    for override in (line for line in listed if line.startswith("--set ")):
        said[override] = error_of(GOOD, override.split()[1:])
    said |= {f"--filter {f!r}": error_of(GOOD, filters=["train", f]) for f in ("", "!")}
    said["--filter nothing"] = error_of(GOOD, filters=["train", "nothing"])
    shown = "\n".join(f"--- {what}\n{error}\n" for what, error in said.items())
    if os.environ.get("ACCEPT"):
        MESSAGES.write_text(shown)

    assert shown == MESSAGES.read_text()


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_is_refused_and_not_constructed(tag: str) -> None:
    assert error_of(GOOD.replace("Retest", tag, 1)).startswith("x.yaml:2:8: tag ")
