"""A commit and the working tree compared, and the names that `harness compare` accepts."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli import main as cli
from harness.errors import HarnessError
from harness.gate import compare
from harness.gate.records import GateCase, GateSide, GateVerdict, Mode, Stage, State
from harness.gate.tests.test_compare_runs import record, side, steady
from harness.records import Decision
from harness.store import reader
from harness.tests.gate_repositories import FILES, KERNEL, commit, git, repository, write

SUITE_FILE = "toysuites/toys.yaml"
MORE = KERNEL.replace("return 1.0", "return float(__import__('torch').ones(1).sum())")
SUITE = FILES["toysuites/toys.yaml"].replace("providers: [a]", "providers: [a, b]")
STALE_POLICY = FILES["ci/gate.yaml"] + (
    "absolute: [{metric: step_s, high: 1.0e-9, source: a floor that nothing reaches}]\n"
    "exemptions: [{cases: ['*'], expect: noisy, reason: all, expires: 2099-01-01}]\n"
)


def state_of(root: Path) -> dict[str, str]:
    """Everything that a comparison must not change."""
    kept = {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file() and ".git" not in p.parts and "reports" not in p.parts
    }
    for command in ("for-each-ref", "status --porcelain", "worktree list", "stash list"):
        kept[command] = git(root, *command.split())
    index = (root / ".git/index").read_bytes()
    return {**kept, "HEAD": git(root, "rev-parse", "HEAD"), "index": index.hex()}


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Uncommitted changes, a new case, and a baseline with further commits."""
    root = repository(tmp_path_factory.mktemp("toys"), {"ci/gate.yaml": STALE_POLICY})
    git(root, "branch", "work")
    commit(root, {"toy/kernel.py": KERNEL + "\n# main went on\n"})
    git(root, "checkout", "--quiet", "work")
    write(root, {"toy/kernel.py": MORE, "toysuites/toys.yaml": SUITE, "untracked.txt": "mine"})
    git(root, "add", "toysuites/toys.yaml")  # staged, unlike the rest
    before = state_of(root)
    with contextlib.chdir(root):
        told = CliRunner().invoke(
            cli.app, ["compare", "main", ".", "--counters", "--json", "--suite", SUITE_FILE]
        )
    assert told.exit_code in (0, 1, 3), told.output + repr(told.exception)
    return {
        "root": root,
        "before": before,
        "after": state_of(root),
        "exit": told.exit_code,
        **json.loads(told.stdout),
    }


def test_the_working_tree_is_compared_with_a_commit(answer: dict[str, Any]) -> None:
    found = {case["case_id"]: case for case in answer["cases"]}
    (more,) = (case for name, case in found.items() if name.startswith("sleep/a"))

    assert (answer["decision"], answer["exit"], answer["exit_status"]) == ("NO-GO", 1, 1)
    assert more["state"] == "compared"
    assert "dispatched_ops" in [c["name"] for c in more["counters"]]
    assert more["exemption"] == ""
    assert answer["findings"] == []
    assert (answer["mode"], answer["subject"]) == ("counters", "comparison")
    assert answer["baseline"]["commit"] == git(answer["root"], "rev-parse", "main")
    assert "uncommitted changes" in [d["name"] for d in answer["differences"]]


def test_the_users_files_and_refs_are_unchanged(answer: dict[str, Any]) -> None:
    assert answer["after"] == answer["before"]


def test_both_sides_are_stored_as_runs(answer: dict[str, Any]) -> None:
    runs = [
        reader.load(answer["root"] / reader.DEFAULT_ROOT, answer[side]["run_id"])
        for side in ("baseline", "candidate")
    ]

    assert all(run.ended_at for run in runs)
    assert runs[0].environment.git is not None
    assert runs[0].environment.git.commit == answer["baseline"]["commit"]


def test_a_case_that_only_one_side_can_run_is_undecided() -> None:
    def of(state: State, decision: Decision) -> GateCase:
        return GateCase(case_id=state, suite="s", decision=decision, reason="why", state=state)

    verdict = GateVerdict(
        decision=Decision.GO,
        reason="2 cases hold; 1 new",
        mode=Mode.RELATIVE,
        stage=Stage.SHADOW,
        blocks=False,
        policy="",
        candidate=GateSide(ref="b"),
        baseline=GateSide(ref="a"),
        cases=(of(State.COMPARED, Decision.GO), of(State.NEW, Decision.GO)),
    )

    answer = compare.commits(verdict, ())

    assert [c.decision for c in answer.cases] == [Decision.GO, Decision.INCONCLUSIVE]
    assert (answer.decision, answer.exit_status) == (Decision.INCONCLUSIVE, 3)
    assert answer.reason == "1 case only in the candidate"


@pytest.fixture(scope="module")
def two_branches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Branches main and work, and a stored run."""
    root = repository(tmp_path_factory.mktemp("toys"))
    commit(root, {"toy/kernel.py": KERNEL + "\n"}, branch="work")
    git(root, "checkout", "--quiet", "main")
    record(root / reader.DEFAULT_ROOT, side("a", steady(0.1)))
    return root


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([".", "HEAD"], "must be the candidate", id="order"),
        pytest.param(["HEAD", "main"], "are both commit", id="same"),
        pytest.param(["HEAD", "."], "has no changes", id="clean"),
        pytest.param(["HEAD", "nowhere"], "neither a run", id="neither"),
        pytest.param(["HEAD", "latest"], "HEAD is a commit but .* is a run", id="mixed"),
        pytest.param(["main", "work", "--across"], "stored runs only", id="across"),
        pytest.param(["main", "work", "--suite", "no.yaml"], "has no suite", id="suite"),
        pytest.param(["main", "work", "-f", "nothing"], "no case of .* matches", id="filter"),
        pytest.param(["main", "work", "--policy", "no.yaml"], "no.yaml not found", id="policy"),
        pytest.param(
            ["main", "work", "--suite", "any.yaml", "--policy", "no.yaml"],
            "no.yaml: cannot read the policy",
            id="policy beside a suite",
        ),
    ],
)
def test_an_impossible_comparison_is_refused(
    two_branches: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(two_branches)

    with pytest.raises(HarnessError, match=message):
        CliRunner().invoke(cli.app, ["compare", *arguments], catch_exceptions=False)
