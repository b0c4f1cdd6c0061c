"""Small git repositories for a gate to compare: a package, a suite and a policy of their own."""

import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

KERNEL = """\
import time

def run(step_s):
    time.sleep(step_s)
    return 1.0
"""

WORKLOADS = """\
import torch
from harness.workload import Unsupported, Workload
from toy import kernel

def sleeps(provider, axes):
    exact = torch.ones(8, dtype=torch.float64)

    def run():
        return exact * kernel.run(axes["step_s"])

    return Workload(
        run=run,
        check=lambda: {"o": run().float()},
        reference=lambda: {"o": exact},
        eager=lambda: {"o": exact.float()},
        tokens=10,
    )
"""

SUITE = """\
schema: 1
title: Toys
subject: Toys
question: Do the toys run?
measure: {processes: 2, min_samples: 12, max_samples: 12, sample_s: 0.5, warmup_s: 0.5,
          timeout_s: 20, stall_s: 20}
workloads:
  - name: sleep
    factory: toysuites.workloads:sleeps
    providers: [a]
    axes: {step_s: [0.004]}
"""

POLICY = """\
schema: 1
stage: block
suites: [{suite: toysuites/toys.yaml}]
compare: {screen_pairs: 2, screen_ratio: 1.3, confirm_pairs: 6, alpha: 0.1, practical: 0.2,
          tolerance: 0.4, stored_tolerance: 0.5}
"""

FILES: Mapping[str, str] = {
    "toy/__init__.py": "",
    "toy/kernel.py": KERNEL,
    "toysuites/__init__.py": "",
    "toysuites/workloads.py": WORKLOADS,
    "toysuites/toys.yaml": SUITE,
    "ci/gate.yaml": POLICY,
    ".gitignore": "__pycache__/\nreports/\n",
}


def git(folder: Path, *arguments: str) -> str:
    names = {
        f"GIT_{who}_{what}": "test@localhost"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    answer = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env={**os.environ, **names, "GIT_CONFIG_GLOBAL": os.devnull},
        check=True,
        capture_output=True,
        text=True,
    )
    return answer.stdout.strip()


def fingerprint(folder: Path) -> str:
    """A hash of all that a bisection must leave as it was: every source of the working tree, the
    index, HEAD, branches, tags, stash, configuration, and the list of worktrees."""
    digest = hashlib.sha256()
    for place, folders, files in os.walk(folder):
        if place == str(folder):
            folders.remove(".git")  # git may be removing files in it
        folders[:] = sorted({*folders} - {"__pycache__"})  # Python writes it, and git ignores it
        for path in (Path(place, name) for name in sorted(files)):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_mode}\0".encode())
            digest.update(path.read_bytes())
    for name in ("index", "HEAD", "config"):
        digest.update((folder / ".git" / name).read_bytes())
    for words in (("for-each-ref",), ("stash", "list"), ("worktree", "list")):
        digest.update(git(folder, *words).encode())
    return digest.hexdigest()


def repository(folder: Path, changes: Mapping[str, str | None] | None = None) -> Path:
    """A repository whose branch `main` holds FILES, and these."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder, {**FILES, **(changes or {})})
    return folder


def commit(folder: Path, files: Mapping[str, str | None], *, branch: str = "") -> str:
    """Commit these files, None for one that goes, on a new branch if one is named."""
    if branch:
        git(folder, "checkout", "--quiet", "-b", branch)
    write(folder, files)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a change")
    return git(folder, "rev-parse", "HEAD")


def write(folder: Path, files: Mapping[str, str | None]) -> None:
    for name, text in files.items():
        path = folder / name
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


TOY_WORKLOADS = (
    WORKLOADS.replace(
        "from toy import kernel", "from importlib import import_module, util"
    ).replace("kernel.run(", 'import_module("toy." + provider).run(')
    + """
def preflight(function, provider, axes, env):
    if util.find_spec("toy." + provider) is None:
        raise ValueError(f"no provider {provider}")
"""
)
TOYS = "toysuites/toys.yaml"
TOYS_POLICY = POLICY + f"counters: [{{suite: {TOYS}}}]\n"
"""Suite and policy of a repository with a kernel file for each provider."""


def kernel(result: str = "1.0", times: int = 1) -> str:
    """A kernel file that takes so many times as long."""
    text = KERNEL.replace("sleep(step_s)", f"sleep({times} * step_s)")
    return text.replace("return 1.0", f"return {result}")


def tree(*providers: str, **changed: str) -> dict[str, str | None]:
    """The files of a side; every kernel is the same but for those that are changed."""
    return {
        **{f"toy/{name}.py": changed.get(name, kernel()) for name in providers},
        "toysuites/workloads.py": TOY_WORKLOADS,
        TOYS: SUITE.replace("[a]", f"[{', '.join(providers)}]"),
        "ci/gate.yaml": TOYS_POLICY,
    }
