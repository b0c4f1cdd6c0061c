"""Small losses that add up since a tag."""

import itertools
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.gate import creep
from harness.suite import load as suites
from harness.tests.fake_runs import H200
from harness.tests.gate_repositories import git
from harness.tests.indexed import A100, CASE, CASES, record, silent

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


def measured(folder: Path, first: int = 0, end: int = 13, **others: Any) -> None:
    """A run of each of these commits."""
    for i, commit in enumerate(git(folder, "rev-list", "--reverse", "main").split()[first:end]):
        given: dict[str, Any] = {"commit": commit, "step_s": 0.01 * STEPS[first + i]}
        record(folder / "runs", **(given | others))


def history(folder: Path) -> str:
    """What `harness history` says of creep."""
    asked = ["history", CASE, "--limit", "2", "--store", str(folder / "runs"), "--json"]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code == 0, answer.output
    return str(json.loads(answer.stdout)["creep"])


def gate(folder: Path) -> str:
    """The line of a gate of that branch."""
    suite = replace(suites.load("counters"), name="retest", cases=tuple(CASES))
    return "".join(creep.line(folder / "runs", folder, "main", {"a.yaml": suite}, silent))


def test_history_and_gate_name_what_crept_since_the_tag(
    tagged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(tagged)
    git(tagged, "tag", "v1.3")  # of HEAD: it ends the stretch

    assert history(tagged).startswith("since v1.2 (13 runs): +4.0 % [")
    assert all(c.case_id in gate(tagged) for c in CASES)
    assert "largest single step is +0.60 %" in gate(tagged)
    monkeypatch.setattr(creep, "holm", lambda p_values: dict.fromkeys(p_values, 1.0))
    assert gate(tagged) == "", "jointly"
    git(tagged, "tag", "--delete", "v1.2", "v1.3")
    assert "git tag" in history(tagged), "what is missing"


def test_one_large_step_is_not_creep(tagged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.STEPS", [1.0 + 0.001 * (i % 3) for i in range(8)] + [1.05] * 5)
    measured(tagged)

    assert "does not show creep; the largest single step is +4.9 %" in history(tagged)
    assert gate(tagged) == ""


@pytest.mark.parametrize(
    "others",
    [
        {"commit": "f" * 40},
        {"dirty": "d" * 64},
        {"gpu": A100},
        {"gpu": replace(H200, driver="999")},
        {"gpu": replace(H200, power_limit_w=500.0)},
        {"longer": 7},
    ],
)
def test_runs_that_differ_in_more_than_the_commit_are_not_compared(
    others: dict[str, Any], tagged: Path
) -> None:
    measured(tagged, 0, 6, **others)
    measured(tagged, 6)

    assert history(tagged).startswith("not known: 7 of 8 needed runs since v1.2")
    assert gate(tagged) == ""
