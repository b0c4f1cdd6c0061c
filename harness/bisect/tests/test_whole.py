"""A bisection of a generated repository with real workers, by a counter: killed and resumed."""

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from harness.tests.command_line import harness
from harness.tests.gate_repositories import commit, git, repository
from reports.studies.planted_history import (
    BUILD,
    CASE,
    SUITE_PATH,
    Planted,
    bisecting,
    fingerprint,
    killed,
    make,
)

PLANTED = Planted(
    commits=16,
    sync_at=6,
    slow_at=12,
    merges=(3, 6),
    unbuildable=(4, 8),
    caseless=(10,),
    base_s=0.001,
)
KILLED_AFTER = 4
"""Lines of the journal when the search is killed; the first is the request."""


@dataclass(frozen=True)
class Bisected:
    """What the bisection left."""

    line: Sequence[str]
    repository: Path
    before: str
    after: str
    left_by_kill: bytes
    state: Path
    status: int
    answer: dict[str, object]
    page: str


@pytest.fixture(scope="module")
def bisected(tmp_path_factory: pytest.TempPathFactory) -> Bisected:
    places = tmp_path_factory.mktemp("planted")
    repository = places / "repository"
    line = make(repository, PLANTED)
    (repository / "toy/kernel.py").write_text("half done")  # the user's uncommitted work
    (repository / "notes.txt").write_text("untracked")
    git(repository, "add", "toy/kernel.py")
    where = ["--state", str(places / "state"), "--reports", str(places / "reports")]
    before = fingerprint(repository)
    ends = ["--case", CASE, "--good", line[0], "--bad", "main"]
    asked = [SUITE_PATH, *ends, "--counter", "host_syncs", "--build", BUILD]
    first = bisecting(repository, *asked, *where)
    journal = killed(first, places / "state", KILLED_AFTER)
    assert first.returncode == -signal.SIGKILL
    left = journal.read_bytes()
    with journal.open("ab") as file:
        file.write(b'{"kind": "taken", "level": 0, "blo')  # as if killed in the middle of a line

    again = harness("bisect", "--resume", "latest", "--json", *where, cwd=repository)
    assert again.stdout, again.stderr
    answer = json.loads(again.stdout)
    return Bisected(
        line=line,
        repository=repository,
        before=before,
        after=fingerprint(repository),
        left_by_kill=left,
        state=journal,
        status=again.returncode,
        answer=answer,
        page=Path(answer["report"]).read_text(),
    )


def test_a_planted_host_synchronisation_is_found_in_about_log2_processes(
    bisected: Bisected,
) -> None:
    assert bisected.status == 0
    assert bisected.answer["found"] is True
    culprit = bisected.answer["culprit"]
    assert isinstance(culprit, dict)
    assert culprit["sha"] == bisected.line[PLANTED.sync_at]
    assert 4 <= int(str(bisected.answer["processes"])) <= 2 + 5


def test_a_killed_search_resumes_and_measures_nothing_twice(bisected: Bisected) -> None:
    whole = bisected.state.read_bytes()
    assert whole.startswith(bisected.left_by_kill)
    lines = [json.loads(text) for text in whole.splitlines()]
    taken = [x["position"] for x in lines if x["kind"] == "taken"]
    assert len(taken) == len(set(taken)) == bisected.answer["processes"]


def test_the_users_tree_index_and_refs_are_unchanged(bisected: Bisected) -> None:
    assert bisected.after == bisected.before
    assert len(git(bisected.repository, "worktree", "list").splitlines()) == 1
    assert (bisected.repository / "toy/kernel.py").read_text() == "half done"


def test_commits_that_do_not_build_are_skipped_with_the_reason(bisected: Bisected) -> None:
    histories = bisected.answer["histories"]
    assert isinstance(histories, list)
    left_out = {x["commit"]: x["reason"] for x in histories[0]["left_out"]}
    assert left_out
    assert left_out.keys() <= {bisected.line[p] for p in PLANTED.unbuildable}
    assert all("it does not compile" in reason for reason in left_out.values())


def test_the_page_has_the_culprit_with_its_author_and_files(bisected: Bisected) -> None:
    culprit = bisected.line[PLANTED.sync_at]
    assert f"{culprit[:10]} is the first bad commit" in bisected.page
    assert f"`{culprit}` by A. Uthor" in bisected.page
    assert "toy/kernel.py | 4 ++--" in bisected.page


WORKLOADS = """\
import torch
from harness.workload import Workload
from toy import kernel

def sleeps(provider, axes):
    x = torch.ones(1 << 20, device="cuda")
    return Workload(run=lambda: kernel.run(x))
"""


@pytest.mark.free_gpu
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "criterion", [("--counter", "kernel_launches"), ("--kernel", "*sigmoid*")], ids=lambda c: c[1]
)
def test_on_a_gpu_a_planted_kernel_is_found(criterion: tuple[str, str], tmp_path: Path) -> None:
    once = "def run(x):\n    return x + 1\n"
    files = {"toysuites/workloads.py": WORKLOADS, "toy/kernel.py": once}
    folder = repository(tmp_path / "toys", files)
    line = [git(folder, "rev-parse", "HEAD")]
    for n in range(8):
        text = once if n < 5 else once.replace("x + 1", "torch.sigmoid(x) + 1")
        line.append(commit(folder, {"toy/kernel.py": f"import torch\n# {n}\n{text}"}))
    places = ("--state", str(tmp_path / "state"), "--reports", str(tmp_path / "reports"))

    running = bisecting(
        folder, SUITE_PATH, "--case", "sleep/a", "--good", line[0], *criterion, *places
    )
    answer, message = running.communicate(timeout=300)

    assert running.returncode == 0, message
    assert answer.startswith(line[6][:10])
