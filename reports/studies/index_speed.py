"""How long a question to the index of a large store takes.

    python -m reports.studies.index_speed --runs 10000 --cases 60 --folder /tmp/large

makes a store of that many runs in the folder, or continues with the one that exists, indexes it and
times each question in a new process, which checks every folder before it answers. Runs differ only
in id, time, commit, GPU and suite: the time of an answer does not depend on the numbers in a run or
on how many samples it has.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from harness import units
from harness.records import (
    SCHEMA_VERSION,
    Case,
    Clock,
    Environment,
    Git,
    Gpu,
    Measurement,
    Outcome,
    Phase,
    Suite,
)
from harness.store import index, lines, reader
from harness.store.index import Index, RunFilter

SUITES = ("attention", "decode", "smoke", "train")
GPUS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200")
RUNS_A_COMMIT = 5
BEGAN = datetime(2024, 1, 1, tzinfo=UTC)
SAMPLES, PROCESSES = 20, 2

QUESTIONS = {
    "list all runs": lambda known: known.runs(),
    "list the latest 20": lambda known: known.runs(RunFilter(limit=20)),
    "latest of a suite": lambda known: known.runs(RunFilter(suite="train", limit=1)),
    "by GPU": lambda known: known.runs(RunFilter(gpu="H200")),
    "by commit": lambda known: known.runs(RunFilter(commit=commit_of(500))),
    "by date": lambda known: known.runs(RunFilter(since="2024-03-01", until="2024-03-31")),
    "by outcome": lambda known: known.runs(RunFilter(outcome="crash")),
    "history of a case": lambda known: known.history(case_id(7), metric="step_s"),
    "history on one GPU": lambda known: known.history(
        case_id(7), RunFilter(gpu="H200"), metric="step_s"
    ),
    "history, latest 20": lambda known: known.history(
        case_id(7), RunFilter(limit=20), metric="step_s"
    ),
    "ids of all cases": Index.case_ids,
}
"""The questions; each answer is a sequence or one run."""


def case_id(number: int) -> str:
    return f"train/nsa/seq_len={512 * (number + 1)}"


def commit_of(run: int) -> str:
    return f"{run // RUNS_A_COMMIT:08x}" * 5


def make(root: Path, runs: int, cases: int) -> None:
    """Write the runs that the store does not have yet."""
    whole, broken = _measurements(cases, broken=False), _measurements(cases, broken=True)
    for number in range(runs):
        began = BEGAN + timedelta(hours=2 * number)
        suite, gpu = SUITES[number % len(SUITES)], GPUS[number % len(GPUS)]
        run_id = f"{began:%Y%m%d-%H%M%S}-{suite}-{number:04x}"
        folder = root / run_id
        if folder.exists():
            continue
        first = lines.encode(
            lines.Started(
                schema=SCHEMA_VERSION,
                run_id=run_id,
                started_at=began.isoformat(timespec="seconds"),
                environment=_environment(gpu, commit_of(number)),
                suite=_suite(suite, cases),
            )
        )
        end = lines.Ended(at=began.isoformat(timespec="seconds"), measurements=cases * PROCESSES)
        folder.mkdir(parents=True)
        body = broken if number % 20 == 0 else whole
        (folder / reader.RUN_FILE).write_bytes(first + body + lines.encode(end))


def _suite(name: str, cases: int) -> Suite:
    return Suite(
        name=name,
        title=name.title(),
        subject=name.title(),
        question="How fast is it?",
        path=f"suites/{name}.yaml",
        text="schema: 1\n",
        sha256="0" * 64,
        cases=tuple(
            Case(
                case_id=case_id(number),
                workload="train",
                factory="suites.workloads:train",
                provider="nsa",
                axes={"seq_len": 512 * (number + 1), "precision": "bf16"},
                swept=("seq_len",),
            )
            for number in range(cases)
        ),
    )


def _measurements(cases: int, *, broken: bool) -> bytes:
    """The lines of a run's processes; of a broken one the first case crashed."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(cases):
        for process in range(PROCESSES):
            samples = tuple(float(s) for s in 0.01 * rng.lognormal(sigma=0.01, size=SAMPLES))
            ok = Measurement(
                case_id=case_id(number),
                process=process,
                outcome=Outcome.OK,
                clock=Clock.CUDA_EVENT,
                samples_s=samples,
                steady=True,
                tokens=512 * (number + 1),
                flops=10**12,
                peak_memory_bytes=2**33,
                phases=(Phase(name="sampling", start_s=1.0, end_s=3.0),),
                wall_s=4.0,
            )
            bad = replace(ok, outcome=Outcome.CRASH, detail="planted", samples_s=())
            found.append(lines.encode(bad if broken and number == 0 else ok))
    return b"".join(found)


def _environment(gpu: str, commit: str) -> Environment:
    return Environment(
        captured_at=BEGAN.isoformat(),
        hostname="node-7",
        os="Linux",
        cpu="a CPU",
        cpu_count=16,
        memory_bytes=2**38,
        gpu=Gpu(
            name=gpu,
            uuid=f"GPU-{gpu.replace(' ', '-').lower()}",
            index=0,
            memory_bytes=80 * 2**30,
            driver="570.124.06",
            cuda_driver="12.8",
            compute_capability="9.0",
        ),
        versions={"torch": "2.11.0"},
        git=Git(commit=commit, branch="main"),
    )


def ask(root: Path, name: str) -> tuple[float, float, int]:
    """Seconds that a question takes, the check of all folders included, and how many of them were
    spent on a CPU; and how many answers it has."""
    began, idle = time.perf_counter(), time.process_time()
    answer = index.ask(root, QUESTIONS[name], _complain)
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - idle
    return took_s, cpu_s, len(answer) if isinstance(answer, tuple) else int(answer is not None)


def _complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def table(root: Path, repeats: int) -> str:
    """The slowest of some new processes' answers to every question, as Markdown."""
    rows = ["| question | answers | slowest | of it CPU |", "|:--|--:|--:|--:|"]
    for name in QUESTIONS:
        command = [sys.executable, "-m", "reports.studies.index_speed", "--ask", name]
        command += ["--folder", str(root)]
        answers = [
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            for _ in range(repeats)
        ]
        slowest, cpu = max((float(took_s), float(cpu_s)) for took_s, cpu_s, _ in answers)
        times = f"{units.duration(slowest)} | {units.duration(cpu)}"
        rows.append(f"| {name} | {int(answers[0][2]):,} | {times} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time questions to the index of a large store.")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--folder", type=Path, required=True, help="where the store is, or goes")
    parser.add_argument("--repeats", type=int, default=5, help="processes that ask each question")
    parser.add_argument("--ask", choices=QUESTIONS, help="only this question, of a store as it is")
    options = parser.parse_args(arguments)
    if options.ask:
        sys.stdout.write(" ".join(map(str, ask(options.folder, options.ask))) + "\n")
        return
    began = time.perf_counter()
    make(options.folder, options.runs, options.cases)
    made = time.perf_counter()
    index.rebuild(options.folder, _complain)
    rebuilt_s = time.perf_counter() - made
    size = (options.folder / index.INDEX).stat().st_size
    sys.stdout.write(
        f"{table(options.folder, options.repeats)}\n\n{options.runs:,} runs of {options.cases} "
        f"cases; made in {units.duration(made - began)}, index of {units.size(size)} rebuilt in "
        f"{units.duration(rebuilt_s)}. Each question was put by {options.repeats} new processes.\n"
    )


if __name__ == "__main__":
    main()
