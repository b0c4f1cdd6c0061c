"""Runs of two cases in a store."""

import json
from dataclasses import replace
from pathlib import Path

from harness.records import Git, Outcome, Run
from harness.store import reader
from harness.store.writer import create
from harness.tests.fake_runs import H200, ended, environment, run, sweep, timed

A100 = replace(H200, name="NVIDIA A100-SXM4-80GB", uuid="GPU-a100")
CASES = sweep(seq_len=[512, 1024])


def record(
    root: Path,
    *,
    commit: str = "a" * 40,
    gpu=H200,
    suite: str = "retest",
    step_s: float = 0.01,
    broken: Outcome | None = None,
    finish: bool = True,
    dirty: str = "",
) -> str:
    """A run of two cases in a store; its id."""
    env = environment(gpu=gpu, git=Git(commit=commit, branch="main", dirty_sha256=dirty))
    whole = run(
        CASES,
        lambda c: ended(c, broken) if broken and c == CASES[1] else timed(c, step_s, processes=2),
        env=env,
        name=suite,
    )
    return store(root, whole, finish=finish)


def store(root: Path, recorded: Run, *, finish: bool = True) -> str:
    """Write a fabricated run into a store; its id."""
    with create(root, recorded.suite, recorded.environment) as writer:
        for m in recorded.measurements:
            writer.append(m)
        if finish:
            writer.finish()
    return writer.run_id


def dated(root: Path, run_id: str, at: str) -> None:
    """Move a run to another time."""
    file = root / run_id / reader.RUN_FILE
    first, _, rest = file.read_text().partition("\n")
    began = {**json.loads(first), "started_at": at}
    file.write_text(json.dumps(began, ensure_ascii=False) + "\n" + rest)
