"""A/A: the same commit on both sides, run exactly as a gate runs baseline and candidate.

In a git repository the sides are two builds: worktrees of the commit, one of them with comments and
an unused function in every module, and with an empty Triton cache. What they differ by is the luck
of a build. The order in which kernels are tuned is the same.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.gate import calibration
from harness.gate.calibration import MIN_PAIRS
from harness.gate.plan import Say, unfitness
from harness.git.repository import Repository, read_git
from harness.git.worktrees import checked_out
from harness.machine import environment
from harness.records import Outcome, Pair, Suite
from harness.runner.interleave import Bench, Observer, Side, Task, pairs
from harness.runner.rig import take
from harness.suite.load import shipped_roots

SIDES = "baseline", "candidate"


def calibrate(
    suite: Suite,
    observer: Observer,
    say: Say,
    *,
    wanted: int,
    store: Path,
    baselines: Path,
    command: tuple[str, ...] = (),
    wait_for_gpu_s: float = 0.0,
) -> calibration.Stored:
    """Measure A/A pairs of a suite, and store the noise of this node.

    Args:
        wanted: Pairs of each case, MIN_PAIRS or more.

    Raises:
        HarnessError: The machine is not fit, a case failed, or too few of its pairs were steady.
    """
    with ExitStack() as held:
        builds = two_builds(suite, held)
        rig, first, here = take(held, suite, command=command, wait_s=wait_for_gpu_s, say=say)
        if not builds:
            say("Both sides are one build: the code is not in a git repository.")
        launchers = [rig.start(**b) for b in builds] or [first, rig.start_for(suite)]
        roots = [b["roots"] for b in builds] or [(), ()]
        sides = [Side(*side, here) for side in zip(SIDES, roots, launchers, strict=True)]
        for launcher in launchers:
            launcher.describe()
        home = environment.home_of(suite.cases[0].factory, shipped_roots(suite))
        if bad := [*unfitness(here, store=store, home=home)]:
            problem = f"this machine is not fit to calibrate: {'; '.join(bad)}"
            raise HarnessError(problem, "See: harness doctor")
        sides[0].launcher.preflight(suite)
        rig.observe(here)
        bench = Bench(sides, rig.probes, observer, held, rig.gpu)
        counted = tuple(
            replace(c, settings=replace(c.settings, processes=wanted)) for c in suite.cases
        )
        for side in sides:
            bench.record(store, side, replace(suite, cases=counted), suite.path)
        if failed := bench.run_self_test():
            raise HarnessError(f"the self-test failed: {'; '.join(failed)}")
        tasks = [Task(suite=suite.path, case=case) for case in suite.cases]
        try:
            found = steady_pairs(bench.rounds, sides, tasks, wanted)
        except HarnessError:
            bench.finish()  # nothing is left to resume
            raise
        bench.finish()
        run_id = " ".join(side.writers[suite.path].run_id for side in sides)
        two = bool(builds)
        return calibration.store(baselines, here, suite.path, run_id, found, builds=two)


def two_builds(suite: Suite, held: ExitStack) -> list[dict[str, Any]]:
    """What `Rig.start` needs for two builds of the code; empty if it is not in one repository."""
    folders = {}
    for factory in {case.factory for case in suite.cases}:
        home = environment.home_of(factory, shipped_roots(suite)).resolve()
        package = factory.partition(":")[0].partition(".")[0]  # none of a program
        folders[home.parent if package and home.name == package else home] = home
    if any(read_git(home) is None for home in folders.values()):
        return []
    repository = Repository.around(next(iter(folders)))
    if not all(folder.is_relative_to(repository.root) for folder in folders):
        return []
    commit = repository.snapshot() if repository.dirty() else repository.commit("HEAD")
    trees = held.enter_context(checked_out(repository, commit, commit))
    vary(trees[1])
    parts = [folder.relative_to(repository.root) for folder in folders]
    caches: tuple[dict[str, str], ...] = {}, {"TRITON_CACHE_DIR": str(trees[1] / ".triton")}
    roots = [[(tree / part).resolve() for part in parts] for tree in trees]
    both = zip(roots, caches, strict=True)
    return [{"roots": r, "elsewhere": repository.worktrees(), "around": c} for r, c in both]


def vary(tree: Path) -> None:
    """Move the lines of every module and add an unused function: another build of the same code."""
    for file in tree.rglob("*.py"):
        text = file.read_bytes()
        # The first two lines may name the interpreter or the encoding.
        if not file.is_symlink() and not re.match(BOM_UTF8 + rb"|(.*\n)?#(!|.*coding)", text):
            file.write_bytes(b"#\n" * 7 + text + b"\n\ndef _unused():\n    return 0\n")


def steady_pairs(
    take: Callable[[Sequence[tuple[Task, range]], str], None],
    sides: Sequence[Side],
    tasks: Sequence[Task],
    wanted: int,
) -> Mapping[str, Sequence[Pair]]:
    """The steady A/A pairs of every case.

    If fewer than MIN_PAIRS are steady, the missing ones are measured again, as long as twice that
    number fits into a total of twice `wanted`.

    Args:
        take: Carries out rounds, as `Bench.rounds`.

    Raises:
        HarnessError: A case failed, or too few of its pairs are steady.
    """
    tried = {task.key: 0 for task in tasks}
    found: dict[str, Sequence[Pair]] = {}
    planned, text = [(task, wanted) for task in tasks], "A/A"
    while planned:
        take([(t, range(tried[t.key], tried[t.key] + n)) for t, n in planned], text)
        short = []
        for task, taken in planned:
            tried[task.key] += taken
            found[task.case.case_id], unsteady = _steady(task, sides, tried[task.key])
            if lacking := max(0, MIN_PAIRS - len(found[task.case.case_id])):
                if tried[task.key] + 2 * lacking > 2 * wanted:
                    raise HarnessError(
                        f"{task.case.case_id}: {unsteady} of {tried[task.key]} pairs are not "
                        f"steady; {MIN_PAIRS} steady pairs are needed",
                        "Take more --pairs, or give the suite a longer warmup_s.",
                    )
                short.append((task, lacking))
        planned, text = short, "more A/A"
    return found


def _steady(task: Task, sides: Sequence[Side], tried: int) -> tuple[Sequence[Pair], int]:
    baseline, candidate = sides
    measured = (*baseline.of(task), *candidate.of(task))
    if bad := next((m for m in measured if m.outcome is not Outcome.OK), None):
        raise HarnessError(
            f"{task.case.case_id} ended {bad.outcome}: {bad.detail}",
            "A calibration needs cases that run: leave it out with --filter '!...'.",
        )
    return pairs(task, baseline, candidate, range(tried))
