"""GPUs that measure at once and die as planned, and a suite for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.executor.jobs import Attempt, JobEnd
from harness.records import Suite
from harness.runner.run import Agenda
from harness.store import reader, writer
from harness.tests import fake_runs

PROCESSES = 2


def suite(*, workloads: str = "abcd", **changes: Any) -> Suite:
    """Cases of two providers, two processes each: one unit per workload."""
    settings = replace(fake_runs.case({}).settings, processes=PROCESSES)
    cases = [
        fake_runs.case({}, workload=w, provider=p, settings=settings)
        for w in workloads
        for p in ("nsa", "dense")
    ]
    return replace(fake_runs.run(cases, lambda _: []).suite, **changes)


def measure(attempt: Attempt, whole: Suite, gpu: str, most: int) -> None:
    """What `harness run` does in the folder of an attempt, at most so many processes of it."""
    arguments = attempt.arguments(str(attempt.folder))
    env = fake_runs.environment(
        gpu=replace(fake_runs.H200, uuid=gpu), variables={"CUDA_VISIBLE_DEVICES": gpu, "NSA_X": "1"}
    )
    cases = tuple(c for c in whole.cases if c.case_id in attempt.block.case_ids)
    if "--resume" in arguments:
        writing, _ = writer.resume(attempt.folder, "latest")
    else:
        writing = writer.create(attempt.folder, replace(whole, cases=cases), env)
    with writing:
        run, _ = reader.read(writing.folder)
        agenda = Agenda(run.suite, recorded=run.measurements)
        while (step := agenda.next()) and (most := most - 1) >= 0:
            log = writing.log_path(step[0].case_id, step[1])
            log.write_text(gpu)
            of_case = fake_runs.timed(step[0], 0.01, processes=PROCESSES)
            writing.append(replace(of_case[step[1]], log=f"logs/{log.name}"))
            agenda.ended(of_case[step[1]])
        if not step:
            writing.finish()


@dataclass
class FakeJob:
    attempt: Attempt
    slot: str
    end: JobEnd | BaseException
    cancelled: bool = False

    def poll(self) -> JobEnd:
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end

    def cancel(self) -> None:
        self.cancelled = True


Plan = Callable[[Attempt, str], tuple[int, JobEnd | BaseException]]


@dataclass
class FakeNodes:
    """An executor whose jobs have ended when they start: after as many processes as planned."""

    whole: Suite
    gpus: list[str]
    plan: Plan = lambda *_: (1000, JobEnd())
    started: list[tuple[str, str]] = field(default_factory=list)
    jobs: list[FakeJob] = field(default_factory=list)

    def slots(self) -> Sequence[str]:
        return self.gpus

    def start(self, waiting: Sequence[Attempt]) -> Sequence[FakeJob]:
        found = []
        for attempt, gpu in zip(waiting, self.gpus, strict=False):
            fit = [g for g in self.gpus if g != attempt.avoid] or self.gpus
            gpu = attempt.slot or (gpu if gpu in fit else fit[0])
            most, end = self.plan(attempt, gpu)
            measure(attempt, self.whole, gpu, most)
            self.started.append((attempt.block.name, gpu))
            found.append(FakeJob(attempt, gpu, end))
        self.jobs += found
        return found

    def recover(self, blocks: Path) -> None:
        pass
