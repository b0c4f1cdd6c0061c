"""How much builds of the same kernels differ that differ in nothing that matters.

    python -m reports.studies.build_noise OUT                # on a GPU, 8 minutes
    python -m reports.studies.build_noise OUT --builds 4 --processes 3 --suite FILE

copies nsa and suites into OUT once for each build, adds comment lines at the top of every module
(line numbers move, so every kernel is compiled anew) and an unused function to every second build,
gives each build a Triton cache of its own, and measures all builds in turns, in fresh processes.
Two commits of one speed differ by as much as two of these builds, whatever the number of processes.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import stats

from harness.records import Case, Measurement, Outcome
from harness.runner.interleave import clock
from harness.runner.launcher import Launcher
from harness.runner.rig import Rig
from harness.runner.run import run_one, terminating_like_ctrl_c
from harness.runner.watchdog import RunObserver
from harness.suite import load as suites

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("nsa", "suites")
SUITE = """\
schema: 1
title: Builds
subject: Builds
question: How much do equal builds differ?
device: cuda
measure: {processes: 1, min_samples: 20, max_samples: 200, sample_s: 0.2, warmup_s: 1,
          timeout_s: 120, stall_s: 100, accuracy: false, profile: false, graph: true}
workloads:
  - name: attention
    factory: suites.workloads:attention
    providers: [triton]
    axes: {seq_len: 8192, batch: 1, q_heads: [64, 32], kv_heads: 4, head_dim_qk: 128,
           head_dim_v: 128, dtype: bf16, pass: [forward, forward+backward]}
"""
COMPILE = """
import importlib, json, sys
for case in json.loads(sys.argv[1]):
    module, _, name = case["factory"].partition(":")
    getattr(importlib.import_module(module), name)(case["provider"], case["axes"]).run()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpread:
    """One case: how its step time varies within builds and between them, as standard deviations of
    its logarithm."""

    within: float
    """Of processes of one build, rounds removed."""
    between: float
    """Of builds, beyond what their processes explain; 0 if they explain all."""
    between_high: float
    """Upper end of the 95 % interval of `between`."""
    p_value: float
    """Of the F test that builds do not differ."""


def spread(logs: npt.NDArray[np.float64]) -> BuildSpread:
    """The variance components of [builds, rounds] logarithms, by two-way analysis of variance.

    The interval of the ratio of the components is exact for normal data (Searle, Casella and
    McCulloch, Variance Components, 1992, section 3.6); that of `between` takes `within` as known.
    """
    builds, rounds = logs.shape
    residual = logs - logs.mean(1, keepdims=True) - logs.mean(0, keepdims=True) + logs.mean()
    freedom = (builds - 1) * (rounds - 1)
    within = float((residual**2).sum() / freedom)
    of_builds = float(rounds * logs.mean(1).var(ddof=1))
    ratio = of_builds / within
    high = ratio / stats.f.ppf(0.025, builds - 1, freedom)
    return BuildSpread(
        within=within**0.5,
        between=max(0.0, (of_builds - within) / rounds) ** 0.5,
        between_high=(max(0.0, high - 1) * within / rounds) ** 0.5,
        p_value=float(stats.f.sf(ratio, builds - 1, freedom)),
    )


class Logs:
    """A writer that keeps only the logs of processes; what is measured stays with the caller."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, measurement: Measurement) -> None: ...

    def log_path(self, case_id: str, process: int) -> Path:
        return self.folder / f"{case_id.replace('/', '_')}-{process}.log"


def build(folder: Path, number: int) -> Path:
    """A copy of the packages that differs from the others in comments and an unused function."""
    for package in PACKAGES:
        leave = shutil.ignore_patterns("__pycache__", "tests", "build")
        shutil.copytree(ROOT / package, folder / package, ignore=leave)
    for file in folder.rglob("*.py"):
        text = file.read_text()
        unused = f"\n\ndef _unused_{number}():\n    return {number}\n" if number % 2 else ""
        if "from __future__" not in text:
            file.write_text(f"# build {number}\n" * number + text + unused)
    return folder


def compiled(folder: Path, cases: Sequence[Case], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """A process that compiles what the cases launch, into the build's own cache."""
    rows = [{"factory": c.factory, "provider": c.provider, "axes": dict(c.axes)} for c in cases]
    command = [sys.executable, "-c", COMPILE, json.dumps(rows)]
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, sys.path)])
    variables = {**os.environ, **env, "PYTHONPATH": path}
    return subprocess.Popen(command, cwd=folder, env=variables, text=True)


def measured(
    folders: Sequence[Path], cases: Sequence[Case], processes: int, out: Path
) -> dict[str, npt.NDArray[np.float64]]:
    """Step times in seconds, [builds, processes], of each case; rounds alternate their order."""
    envs = [{"TRITON_CACHE_DIR": str(folder / ".triton")} for folder in folders]
    for process in [compiled(f, cases, e) for f, e in zip(folders, envs, strict=True)]:
        if process.wait():
            raise RuntimeError(f"a build does not run: exit status {process.returncode}")
    found = {c.case_id: np.full((len(folders), processes), np.nan) for c in cases}
    writer, observer = Logs(out / "logs"), RunObserver()
    with terminating_like_ctrl_c(), ExitStack() as held:
        rig = held.enter_context(Rig("any", say=_print))
        launchers = [
            held.enter_context(Launcher([f], around=e)) for f, e in zip(folders, envs, strict=True)
        ]
        here = rig.describe(launchers[0], command=sys.argv, repository=None, cases=cases)
        rig.observe(here)
        _print(f"{here.device_name}, {len(folders)} builds, {processes} processes each")
        for i in range(processes):
            order = range(len(folders)) if i % 2 == 0 else reversed(range(len(folders)))
            for b in order:
                for case in cases:
                    m = run_one(case, i, launchers[b], writer, rig.probes, observer, rig.gpu)
                    if m.outcome is not Outcome.OK:
                        raise RuntimeError(f"build {b}: {case.case_id}: {m.outcome}: {m.detail}")
                    found[case.case_id][b, i] = statistics.median(m.kept_s)
                    _print(f"{i} {b} {case.case_id} {found[case.case_id][b, i]:.6g} {clock(m)}")
    return found


def table(found: Mapping[str, npt.NDArray[np.float64]]) -> str:
    """The study's answer, as Markdown."""
    lines = [
        "| case | step, ms | processes of a build, sd | builds, sd | at most | p |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for case_id, times in found.items():
        s = spread(np.log(times))
        lines.append(
            f"| `{case_id}` | {1e3 * np.median(times):.3g} | {s.within:.2%} "
            f"| {s.between:.2%} | {s.between_high:.2%} | {s.p_value:.2g} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--builds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--suite", type=Path)
    given = parser.parse_args()
    suite = suites.load(given.suite) if given.suite else suites.loads(SUITE, "builds.yaml")
    folders = [build(given.out / f"build-{i}", i) for i in range(given.builds)]
    _print(table(measured(folders, suite.cases, given.processes, given.out)))


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
