"""A/A: the same commit on both sides, run exactly as a gate runs baseline and candidate."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from harness.errors import HarnessError
from harness.gate import calibration
from harness.gate.calibration import MIN_PAIRS
from harness.gate.plan import Say, unfitness
from harness.machine import environment
from harness.records import Outcome, Pair, Suite
from harness.runner.interleave import Bench, Observer, Side, Task, pairs
from harness.runner.rig import take
from harness.suite.load import shipped_roots


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
        rig, first, here = take(held, suite, command=command, wait_s=wait_for_gpu_s, say=say)
        second = rig.start_for(suite)
        second.describe()
        home = environment.home_of(suite.cases[0].factory, shipped_roots(suite))
        if bad := [*unfitness([suite], here, store=store, home=home)]:
            problem = f"this machine is not fit to calibrate: {'; '.join(bad)}"
            raise HarnessError(problem, "See: harness doctor")
        first.preflight(suite)
        sides = [Side("baseline", (), first, here), Side("candidate", (), second, here)]
        rig.observe(here)
        bench = held.enter_context(Bench(sides, rig.probes, observer, rig.gpu))
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
        return calibration.store(baselines, here, suite.path, run_id, found)


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
