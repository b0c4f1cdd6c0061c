"""A/A: the same code on both sides, run exactly as a gate runs baseline and candidate."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import HarnessError
from harness.gate import calibration
from harness.gate.calibration import MIN_PAIRS
from harness.gate.plan import Say
from harness.machine import doctor, environment
from harness.machine.gpu_idle import mismatch
from harness.records import Environment, Outcome, Pair, Suite
from harness.runner.interleave import Bench, Observer, Side, Task, pairs
from harness.runner.rig import take
from harness.suite.load import shipped_roots


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks of a calibration."""

    suite: Suite
    pairs: int
    store: Path
    baselines: Path
    command: tuple[str, ...] = ()
    wait_for_gpu_s: float = 0.0


def calibrate(request: Request, observer: Observer, say: Say) -> calibration.Stored:
    """Measure A/A pairs of a suite, and keep the noise of this node.

    Raises:
        HarnessError: The machine is not fit, a case did not end ok in every process, or too few
            of its pairs were steady.
    """
    if request.pairs < MIN_PAIRS:
        raise HarnessError(
            f"{request.pairs} pairs say too little of a node's noise", f"Take {MIN_PAIRS} or more."
        )
    suite = request.suite
    with ExitStack() as held:
        wait_s = request.wait_for_gpu_s
        rig, first, here = take(held, suite, command=request.command, wait_s=wait_s, say=say)
        second = rig.start_for(suite)
        second.describe()
        _require_fit(suite, here, request)
        first.preflight(suite)
        sides = [Side("baseline", (), first, here), Side("candidate", (), second, here)]
        rig.observe(here)
        bench = held.enter_context(Bench(sides, rig.probes, observer, rig.gpu))
        counted = tuple(
            replace(c, settings=replace(c.settings, processes=request.pairs)) for c in suite.cases
        )
        for side in sides:
            bench.record(request.store, side, replace(suite, cases=counted), suite.path)
        if refuted := bench.prove():
            raise HarnessError(f"the instrument is wrong: {'; '.join(refuted)}")
        tasks = [Task(suite=suite.path, case=case) for case in suite.cases]
        try:
            found = steady_pairs(bench.rounds, sides, tasks, request.pairs)
        except HarnessError:
            bench.finish()  # what was measured stays; nothing of it is left to resume
            raise
        bench.finish()
        run_id = " ".join(side.writers[suite.path].run_id for side in sides)
        return calibration.store(request.baselines, here, suite.path, run_id, found)


def steady_pairs(
    take: Callable[[Sequence[tuple[Task, range]], str], None],
    sides: Sequence[Side],
    tasks: Sequence[Task],
    wanted: int,
) -> Mapping[str, Sequence[Pair]]:
    """The steady A/A pairs of every case.

    One unsteady process must not cost all the others: where fewer than MIN_PAIRS are steady more
    are taken, while one in two of at most twice as many as wanted would do.

    Args:
        take: Carries out rounds, as `Bench.rounds`.

    Raises:
        HarnessError: A case did not end ok, or too few of its pairs are steady.
    """
    tried = {task.key: 0 for task in tasks}
    found: dict[str, Sequence[Pair]] = {}
    asked, text = [(task, wanted) for task in tasks], "A/A"
    while asked:
        take([(t, range(tried[t.key], tried[t.key] + n)) for t, n in asked], text)
        short = []
        for task, taken in asked:
            tried[task.key] += taken
            found[task.case.case_id], unsteady = _steady(task, sides, tried[task.key])
            if lacking := max(0, MIN_PAIRS - len(found[task.case.case_id])):
                if tried[task.key] + 2 * lacking > 2 * wanted:
                    raise HarnessError(
                        f"{task.case.case_id} found no steady state in {unsteady} of "
                        f"{tried[task.key]} pairs, and {MIN_PAIRS} steady ones are the least",
                        "Take more --pairs, or give the suite a longer warmup_s.",
                    )
                short.append((task, lacking))
        asked, text = short, "A/A again"
    return found


def _steady(task: Task, sides: Sequence[Side], tried: int) -> tuple[Sequence[Pair], int]:
    a, b = sides
    if bad := next((m for m in (*a.of(task), *b.of(task)) if m.outcome is not Outcome.OK), None):
        raise HarnessError(
            f"{task.case.case_id} ended {bad.outcome}: {bad.detail}",
            "A calibration takes cases that run: leave it out with --filter '!...'.",
        )
    return pairs(task, a, b, range(tried))


def _require_fit(suite: Suite, here: Environment, request: Request) -> None:
    home = environment.home_of(suite.cases[0].factory, shipped_roots(suite))
    pins = environment.pins_of(home)
    vitals = doctor.inspect(here, store=request.store, constraints=pins)
    bad = [
        f"{c.name}: {c.fact}"
        for c in doctor.checks(here, vitals)
        if c.grade in (doctor.Grade.FAIL, doctor.Grade.UNKNOWN)
    ]
    if unfit := mismatch(suite.requires, here):
        bad.append(unfit)
    if bad:
        raise HarnessError(
            f"this machine is not fit to be calibrated: {'; '.join(bad)}", "See `harness doctor`."
        )
