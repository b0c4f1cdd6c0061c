"""Small losses that add up since a tag."""

import itertools
import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.gate import creep
from harness.records import Estimate
from harness.store.index import HistoryPoint
from harness.suite import load as suites
from harness.tests.gate_repositories import git
from harness.tests.indexed import CASE, CASES, record, silent

STEPS = [1 + 0.004 * i + 0.002 * (i % 3) for i in range(13)]
"""Step times of a run at the tag and of one after each of 12 commits."""


@pytest.fixture
def tagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with 13 commits, the first one tagged."""
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    who = "committer a <a@localhost> 1700000000 +0000\ndata 0\n"
    commits = "".join(f"commit refs/heads/main\nmark :{i}\n{who}" for i in range(1, 14))
    made = f"{commits}reset refs/tags/v1.2\nfrom :1\n".encode()
    subprocess.run(["git", "fast-import", "--quiet"], cwd=tmp_path, input=made, check=True)
    monkeypatch.chdir(tmp_path)
    numbers = map("{:04x}".format, itertools.count())  # chance repeats ids within a second
    monkeypatch.setattr("harness.store.writer.secrets.token_hex", lambda _: next(numbers))
    return tmp_path


def measured(folder: Path, **others: Any) -> None:
    """A run of each commit."""
    for step, commit in zip(
        STEPS, git(folder, "rev-list", "--reverse", "main").split(), strict=True
    ):
        record(folder / "runs", **dict[str, Any](commit=commit, step_s=0.01 * step) | others)


def history(folder: Path, *options: str) -> str:
    """What `harness history` says of creep."""
    asked = ["history", CASE, "--limit=2", *options, "--store", str(folder / "runs"), "--json"]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code == 0, answer.output
    return str(json.loads(answer.stdout)["creep"])


def gate(folder: Path) -> str:
    """The line of a gate of that branch."""
    suite = replace(suites.load("counters"), name="retest", cases=tuple(CASES))
    both = {"a.yaml": suite, "b.yaml": replace(suite, name="other")}
    return "".join(creep.line(folder / "runs", folder, "main", both, silent))


def test_history_and_gate_name_what_crept_since_the_tag(
    tagged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(tagged)
    git(tagged, "tag", "v1.3")  # of HEAD: it ends the stretch

    assert history(tagged).startswith("since v1.2 (13 runs): +4.0 % [")
    measured(tagged, suite="other", step_s=0.01)  # has the same cases, and they are steady
    assert all(c.case_id in gate(tagged) for c in CASES)
    assert "without its largest step, +2.8 %" in gate(tagged)
    monkeypatch.setattr(creep, "holm", lambda p_values: dict.fromkeys(p_values, 1.0))
    assert gate(tagged) == "", "jointly"
    git(tagged, "tag", "--delete", "v1.2", "v1.3")
    assert "git tag" in history(tagged), "what is missing"


def test_history_looks_at_every_run_since_the_tag(tagged: Path) -> None:
    measured(tagged)

    for option in ("--commit=abc", "--since=2030-01-01", "--until=2020-01-01", "--outcome=crash"):
        assert history(tagged, option).startswith("since v1.2 (13 runs)")


def test_a_clone_without_tags_says_how_to_get_them(tmp_path: Path, tagged: Path) -> None:
    measured(tagged)
    git(tmp_path, "clone", "--quiet", "--depth=1", "--no-tags", tagged.as_uri(), "shallow")

    (said,) = creep.line(tagged / "runs", tmp_path / "shallow", "HEAD", {}, silent)

    assert "git fetch --unshallow --tags" in said
    git(tagged, "tag", "--delete", "v1.2")
    assert [*creep.line(tagged / "runs", tagged, "HEAD", {}, silent)] == []
    assert "not in a git repository" in creep.since_tag(CASE, (), Path("/"))


def looked(step_s: Any, commits: Sequence[int] | None = None, **first: Any) -> creep.Creep | int:
    """What runs with these times say of a case, each of another commit or of these; the first six
    with other fields."""
    points = [
        HistoryPoint(
            **{"folder": "", "run_id": str(i), "outcome": "ok", "detail": "", "digest": "a"}
            | {"commit": str(commits[i] if commits else i), "started_at": f"{i:04}"}
            | (first if i < 6 else {}),
            metrics={"step_s": Estimate(value=s, low=s, high=s, processes=2, samples=9)},
        )
        for i, s in enumerate(step_s)
    ]
    return creep.of_case(CASE, points, ("v1", {str(i): i for i in range(len(points))}))


@pytest.mark.parametrize(
    ("runs", "loss"), [(8, 1.05), (12, 1.02), (13, 1.05), (16, 1.1), (40, 1.05)]
)
def test_one_large_step_is_not_creep(runs: int, loss: float) -> None:
    flat = np.exp(np.random.default_rng(1).normal(0, 0.0005, runs))

    for place in range(1, runs):
        found = looked([*flat[:place], *(loss * flat[place:])])
        assert isinstance(found, creep.Creep)
        assert not found.found, f"the step is before run {place}"


def test_a_commit_counts_once_and_many_are_thinned_out() -> None:
    lost = np.linspace(1, 1.1, 1000)

    assert looked(STEPS, [0] * 13) == 1
    assert looked([9, *STEPS], [0, *range(13)]) == looked(STEPS), "the newest run of a commit"
    assert isinstance(found := looked(lost), creep.Creep)
    assert found.runs == creep.MOST
    assert found.ratio == pytest.approx(lost[750:].mean() / lost[:250].mean(), abs=1e-3)


@pytest.mark.parametrize(
    "other",
    [{"commit": "f"}, {"dirty": True}, {"device": "A100"}, {"node": "500 W"}, {"digest": "b"}],
)
def test_runs_that_differ_in_more_than_the_commit_are_not_compared(other: dict[str, Any]) -> None:
    assert isinstance(looked(STEPS), creep.Creep)
    assert looked(STEPS, **other) == 7, "the first six differ"
