"""A bisection of a generated repository with real workers, by a counter: killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.bisect import session
from harness.bisect.journal import STATE
from harness.bisect.tests.planted import BUILD, CASE, SUITE_PATH, Planted, make
from harness.tests.command_line import harness
from harness.tests.gate_repositories import fingerprint, git

PLANTED = Planted(
    commits=16,
    sync_at=6,
    slow_at=12,
    merges=(3, 6),
    unbuildable=(4, 8),
    caseless=(10,),
    base_s=0.001,
)
ROOT = Path(__file__).resolve().parents[3]
KILLED_AFTER = 4
"""Lines of the journal when the search is killed; the first is the request."""


def test_a_killed_search_resumes_and_names_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, state = tmp_path / "repository", tmp_path / "state"
    line = make(repository, PLANTED)
    (repository / "toy/kernel.py").write_text("half done")  # the user's uncommitted work
    (repository / "notes.txt").write_text("untracked")
    git(repository, "add", "toy/kernel.py")
    before = fingerprint(repository)
    places = ["--state", str(state), "--reports", str(tmp_path / "reports")]
    ends = ["--case", CASE, "--good", line[0], "--bad", "main"]
    asked = [SUITE_PATH, *ends, "--counter", "host_syncs", "--build", BUILD]
    first = bisecting(repository, *asked, *places)
    journal = killed(first, state)
    assert first.returncode == -signal.SIGKILL
    left = journal.read_bytes()
    with journal.open("ab") as file:
        file.write(b'{"kind": "taken", "blo')  # as if killed in the middle of a line

    results: list[session.BisectResult] = []
    search = session.run

    def kept(*asked: Any) -> session.BisectResult:
        results.append(search(*asked))
        return results[-1]

    monkeypatch.setattr(session, "run", kept)
    again = harness("bisect", "--resume", "latest", *places, cwd=repository)

    assert again.returncode == 0, again.stderr
    (answer,) = results
    culprit = line[PLANTED.sync_at]
    assert answer.request.history[answer.conclusion.culprits[0]].sha == culprit
    assert answer.profile
    assert {"host_syncs", "aten::item"} <= {found.name for found in answer.profile.calls}
    # Nothing is measured twice.
    whole = journal.read_bytes()
    assert whole.startswith(left)
    lines = [json.loads(text) for text in whole.splitlines()]
    taken = [x for x in lines if x["kind"] == "taken"]
    searched = [x["position"] for x in taken if x["stage"] != "profile"]
    assert 4 <= len(searched) == len(set(searched)) <= 2 + 5  # about log2
    assert len(taken) == len(searched) + 2 == answer.processes
    # Commits that do not build are skipped with the reason.
    left_out = {x.commit: x.reason for x in answer.skipped}
    assert left_out
    assert left_out.keys() <= {line[p] for p in PLANTED.unbuildable}
    assert all("it does not compile" in reason for reason in left_out.values())
    # The user's tree, index and refs, and the list of worktrees, are as before.
    assert fingerprint(repository) == before
    (report,) = (tmp_path / "reports").glob("*.md")
    page = report.read_text()
    assert f"{culprit[:10]} is the first bad commit" in page
    assert f"`{culprit}` by A. Uthor" in page
    assert "toy/kernel.py | 4 ++--" in page


def bisecting(repository: Path, *words: str) -> "subprocess.Popen[str]":
    """A bisection of a repository, begun; its answer comes on stdout."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-m", "harness", "bisect", *words],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def killed(running: "subprocess.Popen[str]", state: Path) -> Path:
    """Kill a bisection once its journal has KILLED_AFTER lines; the journal."""
    journal = None
    while journal is None or journal.read_bytes().count(b"\n") < KILLED_AFTER:
        assert running.poll() is None, running.communicate()[1]
        journal = next(state.glob(f"*/{STATE}"), None)
        time.sleep(0.01)
    running.kill()
    running.communicate()
    return journal
