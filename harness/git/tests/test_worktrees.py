"""Two trees stand side by side, code comes from the right one, and nothing is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.git import origin
from harness.git.repository import Repository
from harness.git.worktrees import PREFIX, checked_out, sweep
from harness.records import Case, Clock, Measurement, MeasureSettings, Outcome
from harness.runner.interleave import verified
from harness.runner.launcher import Launcher
from harness.runner.run import RunObserver, run_one
from harness.tests.gate_repositories import KERNEL, commit, git, repository, write

ROOT = Path(__file__).resolve().parents[3]
CASE = Case(
    case_id="sleep/a",
    workload="sleep",
    factory="toysuites.workloads:sleeps",
    provider="a",
    axes={"step_s": 0.001},
    settings=MeasureSettings(min_samples=2, max_samples=2, warmup_s=0.05, timeout_s=20),
)


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    return repository(tmp_path / "toys")


def state(folder: Path) -> tuple[str, ...]:
    """All that a gate must leave as it was."""
    return (
        git(folder, "status", "--porcelain"),
        git(folder, "branch", "--all", "--verbose"),
        git(folder, "worktree", "list"),
        (folder / ".git/index").read_bytes().hex(),
        (folder / "toy/kernel.py").read_text(),
    )


def test_two_commits_stand_side_by_side_and_the_users_tree_is_not_touched(toys: Path) -> None:
    commit(toys, {"toy/kernel.py": KERNEL + "# new\n"}, branch="change")
    write(toys, {"toy/kernel.py": "half done", "notes.txt": "untracked"})
    repo = Repository.around(toys)
    repo.dirty()
    before = state(toys)

    with checked_out(repo, repo.commit("main"), repo.commit("change")) as (base, head):
        texts = [(tree / "toy/kernel.py").read_text() for tree in (base, head)]
        folder = base.parent

    assert texts == [KERNEL, KERNEL + "# new\n"]
    assert state(toys) == before
    assert not folder.exists()


def test_the_working_tree_can_be_a_side_with_all_that_is_not_committed(toys: Path) -> None:
    write(toys, {"toy/kernel.py": "half done", "toy/more.py": "untracked", "reports/x": "ignored"})
    repo = Repository.around(toys)
    before = state(toys)

    with checked_out(repo, repo.snapshot()) as (head,):
        found = {p.relative_to(head).as_posix() for p in head.rglob("*.py")}
        text = (head / "toy/kernel.py").read_text()
        ignored = (head / "reports").exists()

    assert text == "half done"
    assert "toy/more.py" in found
    assert not ignored
    assert state(toys) == before


def test_what_the_harness_writes_is_no_change(toys: Path) -> None:
    (toys / ".gitignore").write_text("__pycache__/\n")
    commit(toys, {})
    repo = Repository.around(toys)
    write(toys, {"reports/runs/a/run.jsonl": "x", "ci/baselines/counters.json": "x"})
    assert not repo.dirty()

    write(toys, {"ci/gate.yaml": "x"})

    assert repo.dirty()


def test_changed_paths_name_both_ends_of_a_move(toys: Path) -> None:
    (toys / "toy/kernel.py").rename(toys / "toy/moved.py")
    commit(toys, {}, branch="change")
    repo = Repository.around(toys)

    changed = repo.changed(repo.commit("main"), repo.commit("change"))

    assert changed == ("toy/kernel.py", "toy/moved.py")


def test_the_base_is_where_the_branches_parted(toys: Path) -> None:
    parted = git(toys, "rev-parse", "HEAD")
    commit(toys, {"a": "1"}, branch="change")
    git(toys, "checkout", "--quiet", "main")
    commit(toys, {"b": "2"})
    repo = Repository.around(toys)

    assert repo.merge_base(repo.commit("main"), repo.commit("change")) == parted


@pytest.mark.parametrize("ref", ["nowhere", "--upload-pack=touch x", ""])
def test_a_ref_that_is_none_is_refused_with_the_remedy(ref: str, toys: Path) -> None:
    with pytest.raises(HarnessError, match="names no commit"):
        Repository.around(toys).commit(ref)


def test_outside_a_repository_the_gate_says_so(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="in no git repository"):
        Repository.around(tmp_path)


def test_under_a_hook_the_folder_decides_which_repository_is_meant(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = repository(tmp_path / "other", {"toy/kernel.py": "other"})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))

    assert Repository.around(toys).root == toys


def test_a_hook_of_the_users_does_not_run(toys: Path, tmp_path: Path) -> None:
    hook = toys / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    repo = Repository.around(toys)

    with checked_out(repo, repo.commit("main")):
        pass

    assert not (tmp_path / "ran").exists()


HOLD = """\
import sys, time
from pathlib import Path
from harness.runner.run import terminating_like_ctrl_c
from harness.git.repository import Repository
from harness.git.worktrees import PREFIX, checked_out, sweep
repo = Repository.around(Path(sys.argv[1]))
with terminating_like_ctrl_c(), checked_out(repo, repo.commit("main"), repo.commit("main")) as t:
    print(t[0].parent, flush=True)
    time.sleep(60)
"""


def holding(toys: Path) -> tuple["subprocess.Popen[str]", Path]:
    """A process that has worktrees checked out, and their folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(toys)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert (folder / "base").is_dir()
    return process, folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_interrupted_removes_its_worktrees(
    number: signal.Signals, toys: Path
) -> None:
    before = state(toys)
    process, folder = holding(toys)

    process.send_signal(number)
    process.communicate(timeout=30)

    assert not folder.exists()
    assert state(toys) == before


def test_worktrees_of_a_killed_process_are_removed_by_the_next_one(toys: Path) -> None:
    before, repo = state(toys), Repository.around(toys)
    process, folder = holding(toys)

    with checked_out(repo, repo.commit("main")) as (mine,):
        assert (folder / "base").is_dir()  # the process is alive
        process.kill()
        process.communicate(timeout=30)
        with checked_out(repo, repo.commit("main")):
            assert not folder.exists()
            assert mine.is_dir()

    assert state(toys) == before


@pytest.mark.parametrize(("age_s", "left"), [(60.0, True), (2 * 86_400.0, False)])
def test_trees_that_may_be_another_machines_are_left_alone_for_a_day(
    age_s: float, left: bool, toys: Path, tmp_path: Path
) -> None:
    """A folder under /tmp is not on every machine that shares the repository."""
    tree = tmp_path / f"{PREFIX}x/base"
    git(toys, "worktree", "add", "--quiet", "--detach", str(tree), "main")
    shutil.rmtree(tree.parent)
    (entry,) = (toys / ".git/worktrees").glob("*/gitdir")
    os.utime(entry, (time.time() - age_s,) * 2)

    sweep(Repository(toys))

    assert (str(tree) in git(toys, "worktree", "list")) is left


class Folder:
    """A place for logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def append(self, measurement: Measurement) -> None: ...

    def log_path(self, case_id: str, process: int) -> Path:
        (self.folder / "log").touch()
        return self.folder / "log"


def measured(roots: list[Path], folder: Path, elsewhere: Sequence[Path] = ()) -> Measurement:
    with Launcher(roots, elsewhere=elsewhere) as launcher:
        return run_one(CASE, 0, launcher, Folder(folder), (), RunObserver())


def test_workers_take_the_code_from_their_tree(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own tree is importable too, and comes second."""
    other = repository(tmp_path / "other")
    monkeypatch.syspath_prepend(str(other))

    measurement = measured([toys], tmp_path)

    assert measurement.outcome is Outcome.OK, measurement.detail
    assert measurement.code == {
        "toy": str(toys / "toy/__init__.py"),
        "toysuites": str(toys / "toysuites/__init__.py"),
    }


def test_code_from_another_tree_is_a_path_mismatch(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree that lacks the package lets the next one on the path answer in its name."""
    other = repository(tmp_path / "other")
    monkeypatch.syspath_prepend(str(other))
    for file in (toys / "toysuites").iterdir():
        file.unlink()
    (toys / "toysuites").rmdir()

    measurement = measured([toys], tmp_path)

    assert measurement.outcome is Outcome.PATH_MISMATCH
    assert f"toysuites is {other}" in measurement.detail


@pytest.mark.parametrize("place", ["mine", "linked"])
@pytest.mark.parametrize(
    ("ignored", "roots", "outcome"),
    [
        ("", ["."], Outcome.PATH_MISMATCH),
        ("", [".", "src"], Outcome.OK),
        ("/src/\n", ["."], Outcome.OK),  # such as a virtual environment
    ],
)
def test_code_of_the_users_own_tree_is_a_path_mismatch(
    place: str,
    ignored: str,
    roots: list[str],
    outcome: Outcome,
    toys: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An editable install answers from the user's tree, on both sides alike; so may one that was
    made in another worktree."""
    workloads = (toys / "toysuites/workloads.py").read_text()
    commit(toys, {"toysuites/workloads.py": f"import kern.ops\n{workloads}"})
    kern = {"src/kern/__init__.py": "", "src/kern/ops.py": ""}
    if ignored:
        commit(toys, {".gitignore": f"__pycache__/\n{ignored}"})
        write(toys, kern)
    else:
        commit(toys, kern)
    git(toys, "worktree", "add", "--quiet", "--detach", str(tmp_path / "linked"))
    write(tmp_path / "linked", kern)
    repo = Repository.around(toys)
    code = {"mine": toys, "linked": tmp_path / "linked"}[place] / "src"
    monkeypatch.syspath_prepend(str(code))

    with checked_out(repo, repo.commit("main")) as (tree,):
        found = measured([tree / root for root in roots], tmp_path, repo.worktrees())

    assert found.outcome is outcome, found.detail
    if outcome is Outcome.PATH_MISMATCH:
        assert found.detail == (
            f"not from the tree under test: kern is {code}/kern/__init__.py and 1 more; "
            "name the folder it is imported from under `roots` in the policy "
            "(--root of a bisection)"
        )


def test_in_ones_own_tree_ones_own_code_is_no_stranger(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workloads = (toys / "toysuites/workloads.py").read_text()
    commit(toys, {"toysuites/workloads.py": f"import kern\n{workloads}", "src/kern.py": ""})
    monkeypatch.syspath_prepend(str(toys / "src"))

    found = measured([toys], tmp_path, Repository.around(toys).worktrees())

    assert found.outcome is Outcome.OK, found.detail


@pytest.mark.parametrize("installed", [True, False])
def test_what_is_installed_in_the_users_tree_is_none_of_it(
    installed: bool, toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment is none of it even where nobody has told git to ignore it."""
    folder = toys / "venv/site-packages"
    place = folder / "kern.py"
    write(toys, {"venv/site-packages/kern.py": ""})
    if installed:
        monkeypatch.setattr("sysconfig.get_path", lambda _: str(folder))

    found = origin.foreign([("kern", str(place))], [str(tmp_path / "tree")], [str(toys)])

    assert found == (() if installed else (f"kern is {place}",))


def test_the_harness_is_no_stranger_where_it_lies_in_the_repository(tmp_path: Path) -> None:
    here = [
        ("harness.store.reader", str(ROOT / "harness/store/reader.py")),
        ("nsa", str(ROOT / "nsa/ops.py")),
    ]

    found = origin.foreign(here, [str(tmp_path)], [str(ROOT)])

    assert found == (f"nsa is {ROOT / 'nsa/ops.py'}",)


def test_a_worker_that_does_not_say_where_its_code_came_from_is_not_believed(
    tmp_path: Path,
) -> None:
    silent = Measurement(
        case_id="sleep/a", process=0, outcome=Outcome.OK, clock=Clock.HOST, samples_s=(1.0,)
    )

    checked = verified(silent, CASE, [tmp_path])

    assert checked.outcome is Outcome.PATH_MISMATCH
    assert "an unknown place" in checked.detail
