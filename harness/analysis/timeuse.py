"""Where the wall time of a run went: into work on its cases, or into the harness."""

from dataclasses import dataclass

from harness.records import Run

SAMPLING = "sampling"
WORK = ("accuracy", "census", "counters", "warmup", SAMPLING)
"""Phases in which a worker does what the suite asked for: compare, count, warm up, sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """Seconds of one run."""

    wall_s: float
    """From the command's start to the last measurement; or the lives of the processes, end to
    end, where that is unknown (`whole` is then False)."""
    whole: bool
    work_s: float | None
    """None where no process told its phases, as in a run that was imported."""
    sampling_s: float | None
    processes: int
    lives_s: float
    """Of all processes, launch to exit."""

    @property
    def work_share(self) -> float | None:
        return None if self.work_s is None else self.work_s / self.wall_s

    @property
    def sampling_share(self) -> float | None:
        return None if self.sampling_s is None else self.sampling_s / self.wall_s

    @property
    def overhead_s(self) -> float | None:
        """Of one process, on average: its life without its work. Building the workload, with
        whatever it imports and compiles there, is in it."""
        return None if self.work_s is None else (self.lives_s - self.work_s) / self.processes


def by_phase(run: Run) -> dict[str, float]:
    """Seconds of each phase over all processes, in the order in which they are first seen."""
    spent: dict[str, float] = {}
    for m in run.measurements:
        for p in m.phases:
            spent[p.name] = spent.get(p.name, 0.0) + p.end_s - p.start_s
    return spent


def time_use(run: Run) -> TimeUse | None:
    """None where no process ran, or nobody knows for how long."""
    lives_s = sum(m.wall_s for m in run.measurements)
    wall_s = run.wall_s or lives_s
    if wall_s <= 0:
        return None
    spent = by_phase(run)
    return TimeUse(
        wall_s=wall_s,
        whole=run.wall_s is not None,
        work_s=sum(spent.get(name, 0.0) for name in WORK) if spent else None,
        sampling_s=spent.get(SAMPLING, 0.0) if spent else None,
        processes=len(run.measurements),
        lives_s=lives_s,
    )
