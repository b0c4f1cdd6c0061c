"""A repository made for a bisection: a long history with two commits planted in it.

One makes a step slower, the other adds a host synchronisation. Of the others some are merges, some
do not build, and one lacks the case.
"""

import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.tests.gate_repositories import git

KERNEL = """\
import time

REVISION = {revision!r}
STEP_S = {step_s!r}
SYNCS = {syncs!r}

def run(x):
    for _ in range(SYNCS):
        x.sum().item()
    time.sleep(STEP_S)
    return x + 1
"""
WORKLOADS = """\
import torch
from harness.workload import Workload
from toy import kernel

def {factory}(provider, axes):
    x = torch.ones(8, dtype=torch.float64)
    return Workload(run=lambda: kernel.run(x))
"""
SUITE = """\
schema: 1
title: Toys
subject: Toys
question: Which commit was it?
measure: {processes: 2, min_samples: 9, max_samples: 9, sample_s: 0.2, warmup_s: 3,
          timeout_s: 60, stall_s: 60}
workloads:
  - name: sleep
    factory: toysuites.workloads:sleeps
    providers: [a]
    axes: {size: 8}
"""
SUITE_PATH = "toysuites/toys.yaml"
BUILD = "sh build.sh"
CASE = "sleep/a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """The planted commits by position on the line of first parents; 0 is the good commit."""

    commits: int = 64
    slow_at: int = 41
    sync_at: int = 23
    base_s: float = 0.02
    step: float = 0.05
    merges: Collection[int] = (10, 23, 30, 50)
    """Each brings a side of two commits; of a planted one, the first of them plants it."""
    unbuildable: Collection[int] = (20, 21, 39, 44, 45)
    caseless: Collection[int] = (33,)


def make(folder: Path, planted: Planted) -> tuple[str, ...]:
    """Make the repository; the hash of each commit on the line of first parents."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    script: list[str] = []
    marks = iter(range(1, 10**6))
    tips = [_commit(script, next(marks), "the beginning", _files(planted, 0, 0), ())]
    for position in range(1, planted.commits + 1):
        parents = [tips[-1]]
        if position in planted.merges:
            side = tips[-1]
            for n in (1, 2):
                files = _files(planted, position, n)
                subject = f"side {n} of {position}"
                side = _commit(script, next(marks), subject, files, (side,), branch="side")
            parents.append(side)
        subject = f"merge {position}" if len(parents) > 1 else f"change {position}"
        files = _files(planted, position, 0)
        tips.append(_commit(script, next(marks), subject, files, tuple(parents)))
    importing = ["git", "fast-import", "--quiet"]
    subprocess.run(importing, cwd=folder, input="".join(script), text=True, check=True)
    git(folder, "update-ref", "-d", "refs/heads/side")
    git(folder, "reset", "--quiet", "--hard", "main")
    line = git(folder, "rev-list", "--first-parent", "--reverse", "main")
    return tuple(line.split())


def _files(planted: Planted, position: int, side: int) -> Mapping[str, str]:
    """The tree of a commit; `side` counts the commits of the side that a merge brings."""
    slow, synced = position >= planted.slow_at, position >= planted.sync_at
    whole = side == 0
    factory = "sleeps" if position not in planted.caseless or not whole else "renamed"
    broken = position in planted.unbuildable and whole
    return {
        "toy/__init__.py": "",
        "toy/kernel.py": KERNEL.format(
            revision=f"{position}.{side}",
            step_s=planted.base_s * (1 + planted.step if slow else 1),
            syncs=2 if synced else 1,
        ),
        "toysuites/__init__.py": "",
        "toysuites/workloads.py": WORKLOADS.format(factory=factory),
        "toysuites/toys.yaml": SUITE,
        "build.sh": "echo it does not compile; exit 1\n" if broken else "touch built\n",
        ".gitignore": "__pycache__/\nbuilt\nreports/\n",
    }


def _commit(
    script: list[str],
    mark: int,
    subject: str,
    files: Mapping[str, str],
    parents: Sequence[int],
    branch: str = "main",
) -> int:
    """One commit in the words of git fast-import; its mark."""
    when = f"{1_700_000_000 + mark} +0000"
    script.append(f"commit refs/heads/{branch}\nmark :{mark}\n")
    script.append(f"author A. Uthor <a@localhost> {when}\n")
    script.append(f"committer A. Uthor <a@localhost> {when}\n")
    script.append(f"data {len(subject.encode())}\n{subject}\n")
    for name, parent in zip(("from", "merge"), parents, strict=False):
        script.append(f"{name} :{parent}\n")
    script.append("deleteall\n")
    for path, text in files.items():
        script.append(f"M 100644 inline {path}\ndata {len(text.encode())}\n{text}\n")
    script.append("\n")
    return mark
