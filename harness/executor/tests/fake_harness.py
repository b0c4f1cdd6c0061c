"""A `harness run` that measures nothing: what Ray starts on nodes whose GPUs are only names.

Files in its folder say what goes wrong: `kill-a` ends the worker of Ray that measures workload a,
`hold-a` lets that unit last as long as the file exists, `other-driver` is found by one GPU. It
notes each start in `started`.
"""

import os
import signal
import sys
import time
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import psutil

from harness.records import Suite
from harness.store import writer
from harness.tests import fake_runs

PROCESSES = 2


def suite(workloads: str = "abcdef") -> Suite:
    """Cases of two providers, two processes each: one unit per workload."""
    settings = replace(fake_runs.case({}).settings, processes=PROCESSES)
    cases = [
        fake_runs.case({}, workload=w, provider=p, settings=settings)
        for w in workloads
        for p in ("nsa", "dense")
    ]
    return replace(fake_runs.run(cases, lambda _: []).suite, device="cuda")


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("words", nargs=2)
    parser.add_argument("--filter", action="append")
    parser.add_argument("--store", type=Path)
    given, _ = parser.parse_known_args()
    cases = [c for c in suite().cases if c.case_id in given.filter]
    name = cases[0].workload
    with Path("started").open("a") as started:
        started.write(name)
    if Path("refuse").exists():
        sys.exit("error: no such suite")
    if (kill := Path(f"kill-{name}")).exists():
        left = int(kill.read_text()) - 1
        kill.write_text(str(left)) if left else kill.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)  # until this process is ended, too
    Path(f"running-{name}").touch()
    while Path(f"hold-{name}").exists():
        time.sleep(0.05)
    node = psutil.Process(os.getppid()).ppid()
    gpu = replace(fake_runs.H200, uuid=f"GPU-{node}-{os.environ['CUDA_VISIBLE_DEVICES']}")
    if Path("other-driver").exists() and name == "b":
        gpu = replace(gpu, driver="1")
    here = fake_runs.environment(gpu=gpu, variables={"CUDA_VISIBLE_DEVICES": gpu.uuid})
    writing = writer.create(given.store, replace(suite(), cases=tuple(cases)), here)
    for case in cases:
        for m in fake_runs.timed(case, 0.01, processes=PROCESSES):
            log = writing.log_path(case.case_id, m.process)
            log.write_text(gpu.uuid)
            writing.append(replace(m, log=f"logs/{log.name}"))
    writing.finish()


if __name__ == "__main__":
    main()
