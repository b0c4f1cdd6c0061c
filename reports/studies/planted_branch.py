"""A slowdown planted in a repository's own history, on a scratch branch of a clone, and bisected.

    python -m reports.studies.planted_branch FOLDER --file nsa/ops.py \\
        --after 'need\\(window_size >= 1' --insert 'q[:, : q.shape[1] // 4].clone()' \\
        -- attention --case window/triton --effect 0.03

clones the repository into FOLDER/repository, puts a commit that adds a line into the last COMMITS
of its first parents, at place AT, and carries every later commit over, with that line in it. Then
it bisects from before all of them to the branch's end. What is found is held against the planted
commit. Nothing is written to the repository that was cloned.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.git.repository import run_git

BRANCH = "planted"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """One line more in one file."""

    file: str
    after: str
    """Regular expression of the one line that it comes after; it takes over its indentation."""
    insert: str

    def into(self, text: str) -> str:
        """The file's text with the line in it; ValueError if no line matches, or several do."""
        lines = text.splitlines(keepends=True)
        fits = [n for n, line in enumerate(lines) if re.search(self.after, line)]
        if len(fits) != 1:
            raise ValueError(f"{self.after!r} fits {len(fits)} lines of {self.file}, not one")
        line = lines[fits[0]]
        indent = line[: len(line) - len(line.lstrip())]
        return "".join((*lines[: fits[0] + 1], f"{indent}{self.insert}\n", *lines[fits[0] + 1 :]))


def make(source: Path, folder: Path, plant: Plant, commits: int, at: int) -> tuple[str, str]:
    """Clone a repository, or a bundle of it, with a branch on which the planted commit comes before
    number `at` of the last first parents, from 1; the good commit and the planted one. ValueError
    if the history is too short, or the line has no place in one of its commits."""
    run_git(Path(), "clone", "--quiet", str(source), str(folder))
    line = run_git(folder, "rev-list", "--first-parent", "--reverse", "HEAD").split()[
        -commits - 1 :
    ]
    if not 1 <= at <= len(line) - 1 == commits:
        raise ValueError(f"{len(line) - 1} commits; the planted one cannot be number {at}")
    planted = _with(folder, plant, line[at - 1], line[at - 1], f"Planted: {plant.insert}")
    tip = planted
    for sha in line[at:]:
        tip = _with(folder, plant, sha, tip, "")
    run_git(folder, "checkout", "--quiet", "-b", BRANCH, tip)
    return line[0], planted


def _with(folder: Path, plant: Plant, commit: str, parent: str, subject: str) -> str:
    """A commit with another one's tree and the line in it, and its words unless some are given."""
    text = run_git(folder, "show", f"{commit}:{plant.file}") + "\n"
    mode = run_git(folder, "ls-tree", commit, "--", plant.file).split()[0]
    with tempfile.TemporaryDirectory() as place:
        index = {"GIT_INDEX_FILE": str(Path(place, "index"))}
        run_git(folder, "read-tree", commit, variables=index)
        Path(place, "text").write_text(plant.into(text))
        blob = run_git(folder, "hash-object", "-w", str(Path(place, "text")))
        entry = f"{mode},{blob},{plant.file}"
        run_git(folder, "update-index", "--cacheinfo", entry, variables=index)
        tree = run_git(folder, "write-tree", variables=index)
    name, email, date = run_git(folder, "log", "-1", "--format=%an%n%ae%n%aI", commit).split("\n")
    who = {
        f"GIT_{role}_{key}": value
        for role in ("AUTHOR", "COMMITTER")
        for key, value in (("NAME", name), ("EMAIL", email), ("DATE", date))
    }
    message = subject or run_git(folder, "log", "-1", "--format=%B", commit)
    return run_git(folder, "commit-tree", tree, "-p", parent, "-m", message, variables=who)


def _state(folder: Path) -> tuple[str, ...]:
    """What a bisection must leave as it was."""
    asked = (("status", "--porcelain"), ("for-each-ref",), ("rev-parse", "HEAD"), ("stash", "list"))
    return tuple(run_git(folder, *words) for words in (*asked, ("worktree", "list")))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Bisect a slowdown planted in a real history.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repository", type=Path, default=Path(), help="or a bundle of it")
    parser.add_argument("--file", required=True)
    parser.add_argument("--after", required=True, metavar="REGEX")
    parser.add_argument("--insert", required=True, metavar="LINE")
    parser.add_argument("--commits", type=int, default=64)
    parser.add_argument("--at", type=int, default=41)
    parser.add_argument("bisect", nargs="+", help="arguments of harness bisect, after --")
    options = parser.parse_args(arguments)
    plant = Plant(file=options.file, after=options.after, insert=options.insert)
    clone = options.folder / "repository"
    good, planted = make(options.repository.absolute(), clone, plant, options.commits, options.at)
    before, began = _state(clone), time.monotonic()
    places = [f"--{name}={(options.folder / name).absolute()}" for name in ("state", "reports")]
    words = (*options.bisect, "--good", good, "--bad", BRANCH, *places)
    done = subprocess.run(
        [sys.executable, "-m", "harness", "bisect", *words],
        cwd=clone,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    right = done.returncode == 0 and done.stdout.startswith(planted[:10])
    sys.stdout.write(
        f"{done.stderr}{'right' if right else 'WRONG'}, planted {planted[:10]}, exit "
        f"{done.returncode}, {time.monotonic() - began:.0f} s: {done.stdout}"
    )
    kept = _state(clone) == before
    sys.stdout.write(f"working tree, index, refs: {'as they were' if kept else 'CHANGED'}\n")
    raise SystemExit(0 if right and kept else 1)


if __name__ == "__main__":
    main()
