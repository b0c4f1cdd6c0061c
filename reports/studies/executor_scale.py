"""What the coordinator of many GPUs costs: time to plan and to merge, memory, files.

    python -m reports.studies.executor_scale --gpus 1000 --folder /tmp/scale

plans, deals and merges with the code of `harness run --executor`. Its GPUs copy measurements of a
stored run into the folders of the jobs, and its clock jumps to the next end of a job. One job in
twenty is lost half-way and tried again.
"""

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from harness import units
from harness.executor.coordinator import Coordinator, Dealt, begin
from harness.executor.jobs import Attempt, JobEnd
from harness.records import SCHEMA_VERSION, Outcome, Run, Suite
from harness.store import lines, reader

TEMPLATE = Path("reports/runs/20261123-022712-attention-h200-e30c")
LOST = 20
"""One job in so many is lost."""
PROCESS_S = 30.0
SPREAD = 0.2
"""Of the time that a job takes against the expected one."""


@dataclass
class FakeSlots:
    """GPUs that copy measurements; see harness.executor.jobs.Executor."""

    gpus: int
    template: Run
    suite: Suite
    now_s: float = 0.0
    """The time of the simulation."""
    writing_s: float = 0.0
    """Real time that the fake jobs took, which is not the coordinator's."""
    writing_cpu_s: float = 0.0
    first_s: float = 0.0
    """Real time of the first start."""
    busy: dict[str, "FakeSlotJob"] = field(default_factory=dict)
    jobs: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.cases = {c.case_id: c for c in self.suite.cases}
        self.good = [m for m in self.template.measurements if m.outcome is Outcome.OK]

    def recover(self, blocks: Path) -> None:
        """Nothing is left of an earlier run."""

    def slots(self) -> Sequence[str]:
        return [f"GPU-{i:04d}" for i in range(self.gpus)]

    def start(self, waiting: Sequence[Attempt]) -> Sequence["FakeSlotJob"]:
        self.first_s = self.first_s or time.perf_counter()
        free = [name for name in self.slots() if name not in self.busy]
        jobs = [FakeSlotJob(self, a, slot) for a, slot in zip(waiting, free, strict=False)]
        self.now_s = min(job.ends_s for job in self.busy.values())
        return jobs


class FakeSlotJob:
    """A block that is measured at once when its time is over; see harness.executor.jobs.Job."""

    def __init__(self, slots: FakeSlots, attempt: Attempt, slot: str) -> None:
        self.attempt, self.slot, self.slots = attempt, slot, slots
        slots.busy[slot] = self
        slots.jobs += 1
        self.lost = slots.jobs % LOST == 0
        took_s = attempt.block.expected_s * slots.rng.lognormal(sigma=SPREAD)
        self.ends_s = slots.now_s + took_s * (0.5 if self.lost else 1.0)

    def poll(self) -> JobEnd | None:
        if self.slots.now_s < self.ends_s:
            return None
        del self.slots.busy[self.slot]
        began, idle = time.perf_counter(), time.process_time()
        self._write()
        self.slots.writing_s += time.perf_counter() - began
        self.slots.writing_cpu_s += time.process_time() - idle
        return JobEnd(detail=f"{self.slot}: lost", lost=self.lost)

    def cancel(self) -> None:
        """Nothing runs."""

    def _write(self) -> None:
        """The run folder of the block, with a log a process."""
        slots, folder = self.slots, self.attempt.folder / f"20261123-{self.attempt.folder.name}"
        cases = [slots.cases[i] for i in self.attempt.block.case_ids]
        here, at = slots.template.environment, slots.template.started_at
        assert here.gpu is not None
        began = lines.Started(
            schema=SCHEMA_VERSION,
            run_id=folder.name,
            started_at=at,
            environment=replace(here, gpu=replace(here.gpu, uuid=self.slot)),
            suite=replace(slots.suite, cases=tuple(cases)),
        )
        found = [lines.encode(began)]
        (folder / "logs").mkdir(parents=True)
        for case in cases[: len(cases) // 2 if self.lost else None]:
            for process in range(case.settings.processes):
                log = f"logs/{case.case_id.replace('/', '_')}.{process}.log"
                (folder / log).write_text("step\n" * 200)
                like = slots.good[len(found) % len(slots.good)]
                one = replace(like, case_id=case.case_id, process=process, log=log, card="")
                found.append(lines.encode(one))
        if not self.lost:
            found.append(lines.encode(lines.Ended(at=at, measurements=len(found))))
        (folder / reader.RUN_FILE).write_bytes(b"".join(found))


def suite_of(count: int, template: Suite) -> Suite:
    """So many cases: two providers at each point, which stay together."""
    like = template.cases[0]
    points = [(512 * (i + 1), p) for i in range(count // 2) for p in ("triton", "dense")]
    cases = [
        replace(like, case_id=f"scale/{p}/seq_len={n}", provider=p, axes={"seq_len": n}, swept=())
        for n, p in points
    ]
    return replace(template, name="scale", cases=tuple(cases), rules=(), suspects=None)


def simulate(gpus: int, cases: int, root: Path) -> list[tuple[str, str]]:
    """What to show, and its number, after one run over so many GPUs."""
    template, _ = reader.read(TEMPLATE)
    suite = suite_of(gpus * cases, template.suite)
    slots = FakeSlots(gpus, template, suite)
    expected_s = {c.case_id: PROCESS_S for c in suite.cases}
    how = Dealt(executor="local", suite=suite.path)
    began, idle = time.perf_counter(), time.process_time()
    with begin(suite, None, how, root, ["harness", "run", suite.path]) as writing:
        one = Coordinator(writing, slots, how, expected_s=expected_s)
        one.run()
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - idle - slots.writing_cpu_s
    plan_s, merge_s = slots.first_s - began, took_s - (slots.first_s - began) - slots.writing_s
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    files = len([*writing.folder.glob("logs/*"), *writing.folder.glob("*.*")])
    began = time.perf_counter()
    run, _ = reader.read(writing.folder)
    read_s = time.perf_counter() - began
    good = sum(m.outcome is Outcome.OK for m in run.measurements)
    all_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    work_s = good * PROCESS_S
    return [
        ("GPUs, jobs", f"{gpus:,}, {slots.jobs:,}"),
        ("cases, processes", f"{len(suite.cases):,}, {good:,}"),
        ("cases that were lost twice", f"{len(run.measurements) - good:,}"),
        ("time to plan", units.duration(plan_s)),
        ("time to merge", units.duration(merge_s)),
        ("CPU time of both", units.duration(cpu_s)),
        ("coordinator's time a case", units.duration((plan_s + merge_s) / len(suite.cases))),
        ("coordinator's memory", units.size(memory)),
        ("files of the merged run", f"{files:,}"),
        ("bytes of run.jsonl", units.size((writing.folder / reader.RUN_FILE).stat().st_size)),
        ("time to read it", units.duration(read_s)),
        ("memory with all of it read", units.size(all_memory)),
        ("GPU time of the processes", units.duration(work_s)),
        ("end of the last job", units.duration(slots.now_s)),
        ("GPUs in use until then", units.percent(work_s / gpus / slots.now_s)),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Simulate the coordinator of many GPUs.")
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--cases", type=int, default=10, help="a GPU")
    parser.add_argument("--folder", type=Path, required=True, help="a store for the run")
    given = parser.parse_args(arguments)
    rows = simulate(given.gpus, given.cases, given.folder)
    sys.stdout.write("| | |\n|:--|--:|\n")
    sys.stdout.writelines(f"| {name} | {value} |\n" for name, value in rows)


if __name__ == "__main__":
    main()
