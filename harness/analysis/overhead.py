"""Where the time and energy of a run go, and how long a run will take."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from harness.records import Measurement, Run, Suite

WORK = ("accuracy", "profile", "counters", "warmup", "sampling", "repeat")
"""Phases in which a worker does what the suite asks for: compare, count, warm up, sample, and
compare again."""
ENERGY_S = 2.0


def time_use(run: Run) -> tuple[float, float, float] | None:
    """Seconds of a run (or of all its processes), of its work, and of what else a process does on
    average: it builds the workload, imports and compiles. None without a time or phases."""
    lives_s = sum(m.wall_s for m in run.measurements)
    phases = (p for m in run.measurements for p in m.phases if p.name in WORK)
    work_s = sum(p.end_s - p.start_s for p in phases)
    if min(lives_s, work_s) <= 0:
        return None
    return run.wall_s or lives_s, work_s, (lives_s - work_s) / len(run.measurements)


def last_runs(suite: Suite, runs: Iterable[Run]) -> dict[str, Run]:
    """Case id -> the last of the runs that measured it with its settings. The runs are of the same
    suite on the same GPU model, newest last."""
    asked, found = {c.case_id: c.settings for c in suite.cases}, dict[str, Run]()
    for run in runs:
        for case in run.suite.cases:
            now = asked.get(case.case_id)
            of = now and replace(
                case.settings, processes=now.processes, most_processes=now.most_processes
            )
            if now and run.of(case.case_id) and of == now:
                found[case.case_id] = run
    return found


def power_w(m: Measurement) -> float | None:
    """Mean power of the GPU while sampling, by NVML's counter of energy: its steps are up to 0.1 s
    apart, so at least ENERGY_S. None if that is shorter, or if several GPUs share the step."""
    counter, sampling = (m.telemetry, next((p for p in m.phases if p.name == "sampling"), None))
    if not counter or not sampling or m.ranks:
        return None
    read = zip(counter.t_s, counter.channels.get("gpu_energy_j", ()), strict=False)
    within = [(t, e) for t, e in read if e is not None and sampling.start_s <= t <= sampling.end_s]
    if not within or within[-1][0] - within[0][0] < ENERGY_S:
        return None
    (began_s, begin), (ended_s, end) = within[0], within[-1]
    rises = all(a <= b for (_, a), (_, b) in pairwise(within))  # else the counter began anew
    return (end - begin) / (ended_s - began_s) if rises and end > begin else None
