"""Gates over a repository with planted faults."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.gate import baselines, files, session
from harness.gate.plan import Request
from harness.gate.records import GateCase, GateVerdict, Mode, State, decode
from harness.gate.session import carry_out
from harness.records import Decision, Measurement, Outcome, Thresholds
from harness.runner.interleave import Side, Task
from harness.store import reader
from harness.tests import fake_runs
from harness.tests.command_line import harness
from harness.tests.gate_repositories import commit, git, repository, write

ROOT = Path(__file__).resolve().parents[3]
GO, NO_GO, OPEN = Decision.GO, Decision.NO_GO, Decision.INCONCLUSIVE

WORKLOADS = """\
import importlib
import time
import torch
from harness.workload import Workload

KNOWN = {known}

def preflight(function, provider, axes, env):
    if provider not in KNOWN:
        raise ValueError(f"no provider {{provider}}")

def toy(provider, axes):
    kernel = importlib.import_module("toy." + provider)
    exact = torch.ones(8, dtype=torch.float64)
    return Workload(
        run=kernel.run,
        check=lambda: {{"o": kernel.run().float()}},
        reference=lambda: {{"o": exact}},
        eager=lambda: {{"o": exact.float()}},
        tokens=10,
    )
"""
KERNEL = """\
import time
import torch

def run():
    time.sleep({s})
    out = torch.ones(8)
    {more}
    return out
"""
SUITE = """\
schema: 1
title: Toys
subject: Toys
question: Do the toys run?
measure: {{processes: 2, min_samples: 8, max_samples: 8, sample_s: 0.5, warmup_s: 0.2,
          timeout_s: 20, stall_s: 20}}
workloads:
  - {{name: toy, factory: toysuites.workloads:toy, providers: [{providers}]}}
"""
POLICY = """\
schema: 1
stage: block
suites: [{suite: toysuites/toys.yaml}]
counters: [{suite: toysuites/toys.yaml, cases: ["*/same", "*/slow"]}]
absolute:
  - {metric: tokens_per_s, low: 1, source: toys}
compare: {screen_pairs: 2, screen_ratio: 1.4, confirm_pairs: 5, alpha: 0.1, practical: 0.2,
          tolerance: 0.6, stored_tolerance: 0.7}
"""
ALL = ("same", "slow", "fast", "wrong", "nan", "crash", "unread", "gone")


def kernel(s: float = 0.004, more: str = "pass") -> str:
    return KERNEL.format(s=s, more=more)


def tree(providers: tuple[str, ...], **changed: str) -> dict[str, str | None]:
    """The files of a side; every kernel is the same but for those that are changed."""
    made: dict[str, str | None] = {f"toy/{name}.py": kernel() for name in providers}
    made |= {"toy/fast.py": kernel(0.016)}
    made |= {f"toy/{name}.py": text for name, text in changed.items()}
    return {
        **made,
        "toysuites/workloads.py": WORKLOADS.format(known=repr(providers)),
        "toysuites/toys.yaml": SUITE.format(providers=", ".join(providers)),
        "ci/gate.yaml": POLICY,
    }


class Quiet:
    """Counts the processes."""

    def __init__(self) -> None:
        self.processes: list[tuple[str, Measurement]] = []

    def stage(self, text: str, processes: int) -> None: ...

    def ended(self, side: str, measurement: Measurement) -> None:
        self.processes.append((side, measurement))


def judge(folder: Path, **request: object) -> GateVerdict:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return carry_out(Request(self_test=False, **request), Quiet(), lambda _: None)  # type: ignore[arg-type]
    finally:
        os.chdir(before)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that other tests set would make this machine unfit."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


# --- base and head, interleaved ----------------------------------------------------------


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GateVerdict, Path]]:
    """One gate over a change that breaks each kernel in its own way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        folder = repository(tmp_path_factory.mktemp("toys"), tree(ALL))
        head = tuple(name for name in ALL if name != "gone")
        broken = tree(
            (*head, "new"),
            slow=kernel(0.012),
            fast=kernel(0.004),
            wrong=kernel(more="out[0] = 2.0"),
            nan=kernel(more="out[0] = float('nan')"),
            crash=kernel(more="raise ValueError('planted')"),
            unread=kernel(more="return out("),
        )
        commit(folder, {**broken, "toy/gone.py": None}, branch="change")
        yield judge(folder, mode=Mode.RELATIVE, base="main", head="HEAD"), folder


@pytest.mark.parametrize(
    ("provider", "decision", "state", "said"),
    [
        ("slow", NO_GO, State.COMPARED, "+"),
        ("fast", GO, State.COMPARED, "-"),
        ("wrong", NO_GO, State.FAILED, "incorrect"),
        ("nan", NO_GO, State.FAILED, "non finite"),
        ("crash", NO_GO, State.FAILED, "planted"),
        ("unread", NO_GO, State.FAILED, "SyntaxError"),
        ("gone", OPEN, State.MISSING, "but the candidate does not"),
        ("new", GO, State.NEW, "no provider new"),
    ],
)
def test_each_planted_fault_has_its_decision(
    provider: str,
    decision: Decision,
    state: State,
    said: str,
    interleaved: tuple[GateVerdict, Path],
) -> None:
    found = of(interleaved[0], provider)

    assert (found.decision, found.state) == (decision, state), found
    assert said in found.reason


def of(verdict: GateVerdict, provider: str) -> GateCase:
    (found,) = (c for c in verdict.cases if c.case_id == f"toy/{provider}")
    return found


def test_the_worst_case_decides_and_blocks(interleaved: tuple[GateVerdict, Path]) -> None:
    verdict, _ = interleaved

    assert (verdict.decision, verdict.blocks, verdict.exit_status) == (NO_GO, True, 1)
    assert {f.check for f in verdict.findings} == {"policy"} or not verdict.findings


def test_a_slowdown_is_stated_with_its_interval_and_cost(
    interleaved: tuple[GateVerdict, Path],
) -> None:
    slow = of(interleaved[0], "slow")

    assert slow.change == "slower"
    assert slow.comparison is not None
    assert slow.comparison.low is not None
    assert 1.5 < slow.comparison.low <= slow.comparison.ratio
    assert (slow.comparison.pairs, slow.gpu_s > 0) == (5, True)
    assert of(interleaved[0], "fast").change == "faster"


def test_an_unchanged_kernel_is_not_slower(
    interleaved: tuple[GateVerdict, Path],
) -> None:
    """On a busy machine it may be undecided."""
    same = of(interleaved[0], "same")

    assert same.decision is not NO_GO
    assert same.state is State.COMPARED


def test_both_sides_are_stored_as_runs_of_their_commits(
    interleaved: tuple[GateVerdict, Path],
) -> None:
    verdict, folder = interleaved
    assert verdict.baseline is not None
    for side, ref in ((verdict.baseline, "main"), (verdict.candidate, "change")):
        run = reader.load(folder / "reports/runs", side.run_id)
        assert run.ended_at
        assert [p.skipped for p in run.self_tests] == ["not requested"]
        assert run.environment.git is not None
        assert run.environment.git.commit == git(folder, "rev-parse", ref) == side.commit
        assert not side.uncommitted
        packages = {m.code["toy"] for m in run.measurements if m.outcome is Outcome.OK}
        assert len(packages) == 1
    assert len({len(p) for p in packages}) == 1


def test_pairs_alternate_their_order(interleaved: tuple[GateVerdict, Path]) -> None:
    verdict, folder = interleaved
    assert verdict.baseline is not None
    began: dict[int, dict[str, str]] = {}
    for name, side in (("base", verdict.baseline), ("head", verdict.candidate)):
        for m in reader.load(folder / "reports/runs", side.run_id).of("toy/slow"):
            began.setdefault(m.process, {})[name] = m.started_at

    first = [min(sides, key=lambda name: sides[name]) for _, sides in sorted(began.items())]

    assert first == ["base", "head", "base", "head", "base", "head", "base"]


def test_accuracy_is_checked_once_per_side(interleaved: tuple[GateVerdict, Path]) -> None:
    verdict, folder = interleaved
    run = reader.load(folder / "reports/runs", verdict.candidate.run_id)

    checked = [m.process for m in run.of("toy/slow") if m.accuracy and m.accuracy.tensors]

    assert checked == [0]


@pytest.mark.parametrize(
    ("disturbed", "said", "pairs"),
    [
        ({0, 1}, "", 20),  # of the screen, which decided nothing
        ({0, 1, 7, 12, 20, 25}, "4 of 20 pairs were not steady, or disturbed", 16),
        (set(range(6, 26)), "none of 20 new pairs was steady and undisturbed", 6),
    ],
)
def test_remarks_are_about_the_pairs_that_decide(
    disturbed: set[int], said: str, pairs: int
) -> None:
    case = fake_runs.case({"seq_len": 512})
    task = Task(suite="s", case=case)
    sides = [Side(name, (), None, None) for name in ("base", "head")]  # type: ignore[arg-type]

    def measure(indices: range) -> None:
        for seed, side in enumerate(sides):
            made = fake_runs.timed(case, 0.1, processes=26, cv=0.3, seed=seed)
            side.measured.setdefault(task.key, []).extend(
                replace(made[i], steady=i not in disturbed) for i in indices
            )

    def rounds(plan: Any, _: str) -> None:
        for _task, indices in plan:
            measure(indices)

    measure(range(6))
    plan: Any = SimpleNamespace(sides=sides, tasks=[task], thresholds=lambda _: Thresholds())
    bench: Any = SimpleNamespace(rounds=rounds)

    answers = session._interleaved(plan, bench, {task.key: 6})

    assert answers.remarks.get(task.key, "") == said
    assert answers.comparisons[task.key].pairs == pairs


def test_worktrees_are_removed(interleaved: tuple[GateVerdict, Path]) -> None:
    _, folder = interleaved

    assert len(git(folder, "worktree", "list").splitlines()) == 1
    assert git(folder, "status", "--porcelain") == ""


def test_a_suite_without_changes_is_not_measured(tmp_path: Path) -> None:
    policy = SHORT + 'paths: ["toy/**"]\n'
    folder = repository(tmp_path / "toys", {**tree(("same",)), "ci/gate.yaml": policy})
    commit(folder, {"README.md": "words"}, branch="change")

    verdict = judge(folder, mode=Mode.RELATIVE, base="main", head="HEAD")

    assert (verdict.decision, verdict.cases) == (GO, ())
    assert [x.case_id for x in verdict.left_out] == ["toy/same"]
    assert not (folder / "reports/runs").exists()


SHORT = "\n".join(POLICY.splitlines()[:4]).replace(', "*/slow"', "") + "\n"
"""The policy without lines about single cases."""


# --- one tree ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(
        tmp_path_factory.mktemp("alone"),
        {
            **tree(("same", "slow")),
            "toysuites/toys.yaml": SUITE.format(providers="same, slow").replace(
                "processes: 2", "processes: 3"
            ),
        },
    )


def test_a_later_tree_is_compared_with_a_stored_baseline(alone: Path) -> None:
    by_floors = judge(alone, mode=Mode.ABSOLUTE)
    made = baselines.of_run(reader.load(alone / "reports/runs", by_floors.candidate.run_id))
    files.write(files.path_of(alone / files.FOLDER, made.device, made.suite), made)
    more = POLICY.replace("screen_pairs: 2", "screen_pairs: 4")
    write(alone, {"toy/slow.py": kernel(0.02), "ci/gate.yaml": more})

    held = judge(alone, mode=Mode.BASELINE)
    write(alone, {"toy/slow.py": kernel(), "ci/gate.yaml": POLICY})

    assert by_floors.decision is GO, by_floors.reason
    today = reader.load(alone / "reports/runs", held.candidate.run_id)
    assert len(today.of("toy/same")) == 4, "the suite's three are too few"
    assert of(held, "slow").decision is NO_GO, held
    assert of(held, "same").decision is not NO_GO, held
    assert of(held, "slow").change == "slower"


def test_a_new_host_sync_is_found_without_recorded_counters(alone: Path) -> None:
    write(alone, {"toy/slow.py": kernel(more="float(out[0])")})

    found = judge(alone, mode=Mode.COUNTERS, base="HEAD", every_case=True)
    write(alone, {"toy/slow.py": kernel()})

    assert found.decision is NO_GO
    assert of(found, "same").decision is GO
    seen = [(c.name, c.before, c.after) for c in of(found, "slow").counters]
    assert ("host_syncs", 0, 1) in seen
    assert found.baseline is not None
    assert (found.candidate.commit, found.candidate.uncommitted) == (found.baseline.commit, True)
    assert not found.baseline.uncommitted
    assert "harness baseline counters" in found.remedies[0]


def test_a_case_that_is_not_measured_any_more_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository(tmp_path / "toys", tree(("same", "slow")))
    monkeypatch.chdir(folder)
    session.count(Request(mode=Mode.COUNTERS), Quiet(), lambda _: None)
    run_id = judge(folder, mode=Mode.ABSOLUTE).candidate.run_id
    made = baselines.of_run(reader.load(folder / "reports/runs", run_id))
    files.write(files.path_of(folder / files.FOLDER, made.device, made.suite), made)
    narrow = POLICY.replace('["*/same", "*/slow"]', '["*/same"]')

    write(folder, {"ci/gate.yaml": narrow})
    by_policy = judge(folder, mode=Mode.COUNTERS, base="HEAD", every_case=True)
    on_record = judge(folder, mode=Mode.COUNTERS)
    write(folder, {**tree(("same",)), "ci/gate.yaml": narrow})
    baseline = judge(folder, mode=Mode.BASELINE)

    whys = [of(v, "slow") for v in (by_policy, on_record, baseline)]
    assert [(c.state, c.decision) for c in whys] == [(State.MISSING, OPEN)] * 3
    assert len({c.reason for c in whys}) == 3
    assert {v.decision for v in (by_policy, on_record, baseline)} == {OPEN}


def test_limits_for_other_gpus_are_noted(alone: Path) -> None:
    other = POLICY.replace("metric: tokens_per_s", "gpu: H200, metric: tokens_per_s")
    write(alone, {"ci/gate.yaml": other})

    found = judge(alone, mode=Mode.ABSOLUTE)
    write(alone, {"ci/gate.yaml": POLICY})

    (noted,) = (f for f in found.findings if f.check == "absolute")
    assert (noted.decision, "H200" in noted.reason) == (GO, True)


@pytest.mark.parametrize(("roots", "found"), [("", State.FAILED), ("[., src]", State.COMPARED)])
def test_code_from_outside_both_trees_is_refused(
    roots: str, found: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an editable install both sides would import the user's tree."""
    folder = repository(
        tmp_path / "toys",
        {
            **tree(("same",), same="from kern.ops import run\n"),
            "src/kern/__init__.py": "",
            "src/kern/ops.py": kernel(),
            "ci/gate.yaml": SHORT + (f"roots: {roots}\n" if roots else ""),
        },
    )
    write(folder, {"src/kern/ops.py": kernel(more="float(out[0])")})
    monkeypatch.syspath_prepend(str(folder / "src"))

    verdict = judge(folder, mode=Mode.COUNTERS, base="HEAD", every_case=True)

    case = of(verdict, "same")
    assert (case.decision, case.state) == (NO_GO, found), case
    if not roots:
        assert f"kern is {folder / 'src/kern/__init__.py'}" in case.reason
        assert "under `roots` in the policy" in case.reason
    else:
        assert "host_syncs" in [c.name for c in case.counters]


# --- the command -------------------------------------------------------------------------


def command(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-m", "harness", "gate", *arguments],
        cwd=folder,
        env={**env, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )


def test_the_command_writes_its_verdict(alone: Path, tmp_path: Path) -> None:
    verdict, summary = tmp_path / "out/verdict.json", tmp_path / "out/summary.md"
    write(alone, {"ci/baselines/counters.json": "{}"})

    asked = ("gate", "--counters", "--verdict", str(verdict))
    damaged = harness(*asked, cwd=alone)
    left = verdict.exists()
    (alone / "ci/baselines/counters.json").unlink()
    strict = harness(*asked, "--summary", str(summary), cwd=alone)

    assert (damaged.returncode, left) == (2, False)
    assert "counters.json" in damaged.stderr
    assert strict.returncode == 3
    assert "Gate: INCONCLUSIVE" in strict.stdout
    assert decode(verdict.read_bytes(), "it").decision is OPEN
    assert "INCONCLUSIVE" in summary.read_text()


def test_an_interrupted_gate_removes_its_worktrees(alone: Path) -> None:
    commit(alone, {"toy/same.py": kernel(0.4)}, branch="slow")
    running = command(alone, "--base", "main", "--head", "HEAD", "--all")
    deadline = time.monotonic() + 60
    while len(trees := git(alone, "worktree", "list").splitlines()) < 3:
        assert time.monotonic() < deadline
        assert running.poll() is None
        time.sleep(0.05)
    folder = Path(trees[1].split()[0]).parent

    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 3
    assert not folder.exists()
    assert len(git(alone, "worktree", "list").splitlines()) == 1
    git(alone, "checkout", "--quiet", "main")


def test_a_candidate_without_the_suite_is_refused(tmp_path: Path) -> None:
    folder = repository(tmp_path / "toys", {**tree(("same",)), "ci/gate.yaml": SHORT})
    (folder / "toysuites/toys.yaml").unlink()

    with pytest.raises(HarnessError, match="the candidate has no suite"):
        judge(folder, mode=Mode.ABSOLUTE)
