"""A `harness run` that measures nothing: what Ray starts on nodes whose GPUs are only names.

Files in its folder say what goes wrong: `kill-a` holds how often Ray's worker for workload a dies,
`hold-a` lets that unit last as long as the file exists. It notes each start in `started`.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

from harness.records import Suite
from harness.store import writer
from harness.tests import fake_runs

PROCESSES = 6  # a unit of two cases fills a task


def suite(workloads: str = "abcdef") -> Suite:
    """Cases of two providers: one unit per workload."""
    settings = replace(fake_runs.case({}).settings, processes=PROCESSES)
    cases = [
        fake_runs.case({}, workload=w, provider=p, settings=settings)
        for w in workloads
        for p in ("nsa", "dense")
    ]
    return replace(fake_runs.run(cases, lambda _: []).suite, device="cuda")


def main() -> None:
    store = Path(sys.argv[sys.argv.index("--store") + 1])
    cases = tuple(c for c in suite().cases if f"--filter={c.case_id}" in sys.argv)
    name = cases[0].workload
    with Path("started").open("a") as started:
        started.write(name)
    if Path("no such suite").exists():
        sys.exit("error: no such suite")
    kill = Path(f"kill-{name}")
    if kill.exists() and Path("started").read_text().count(name) <= int(kill.read_text()):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)  # until this process is ended, too
    Path(f"running-{name}").touch()
    while Path(f"hold-{name}").exists():
        time.sleep(0.05)
    node = psutil.Process(os.getppid()).ppid()
    gpu = replace(fake_runs.H200, uuid=f"GPU-{node}-{os.environ['CUDA_VISIBLE_DEVICES']}")
    if Path("driver").exists() and name == "b":
        gpu = replace(gpu, driver="1")
        while '"measurement"' not in next(Path("runs").glob("*/run.jsonl")).read_text():
            time.sleep(0.05)  # the other GPU enters first
    writing = writer.create(store, replace(suite(), cases=cases), fake_runs.environment(gpu=gpu))
    for case in cases:
        for m in fake_runs.timed(case, 0.01, processes=PROCESSES):
            log = writing.log_path(case.case_id, m.process)
            log.write_text(gpu.uuid)
            writing.append(replace(m, log=f"logs/{log.name}", card=gpu.uuid))
    writing.finish()


if __name__ == "__main__":
    main()
