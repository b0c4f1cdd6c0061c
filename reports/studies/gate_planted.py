"""How the gate judges planted slowdowns, and a change without effect, on this machine.

    python -m reports.studies.gate_planted OUT                       # on a GPU, 8 minutes
    python -m reports.studies.gate_planted OUT --suite suites/gate.yaml --cases train --slower 0.05
    ... --step-s RUN     # step times of a stored run: no gate of the same commit comes first

copies packages and a suite into a git repository of its own, OUT/repository, and gates it with
base and head interleaved, as `harness gate --base` does: first the same commit on both sides, then
commits in which every step of every case waits longer, by a given share of the step as the first
gate measured it. On a GPU the wait is a kernel that spins, and a step the replay of a CUDA graph.
Each verdict is printed in a table, with pairs and minutes, and appended to OUT/gates.jsonl at once,
so an interrupted study keeps what it found. A clean change that was NO-GO, or a slowdown that was
GO, is named below the table.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from harness import units
from harness.gate.plan import Request
from harness.gate.records import GateCase, GateRecord, Mode
from harness.gate.session import carry_out
from harness.records import Case, Decision, Measurement
from harness.report.series.gate_text import plain, reason
from harness.runner.run import terminating_like_ctrl_c
from harness.store import reader
from harness.suite import load as suites
from harness.suite.choice import fits
from harness.tests.gate_repositories import commit, git

ROOT = Path(__file__).resolve().parents[2]
SUITE_PATH = "suites/planted.yaml"
SUITE = """\
schema: 1
title: Planted slowdowns
subject: Planted
question: Does the gate find a planted slowdown, and none in a clean change?
device: cuda
measure: {processes: 2, min_samples: 20, max_samples: 200, sample_s: 0.2, warmup_s: 1,
          timeout_s: 60, stall_s: 50, accuracy: false, profile: false,
          graph: true}  # kernels alone: on a slow host ten launches scatter by 5 %
workloads:
  - name: attention
    factory: suites.workloads:attention
    providers: [triton]
    axes: {seq_len: 8192, batch: 1, q_heads: 32, kv_heads: 2, head_dim_qk: 128, head_dim_v: 128,
           dtype: bf16, pass: forward}
"""
POLICY = """\
schema: 1
stage: block
suites: [{{suite: {suite}, cases: {cases}}}]
compare: {compare}
"""
SLOWER = (0.05, 0.10, 0.03)
AGAIN = 5
MINUTES = 8.0

DELAY = '''

# --- planted by reports.studies.gate_planted ---

import dataclasses as _dataclasses
import functools as _functools
import time as _time

import torch as _torch

_CYCLES = 20_000_000
"""Of one spin that tells how long a cycle is."""


@_functools.cache
def _cycles(delay_s):
    found = []
    for _ in range(9):
        begin, end = (_torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        _torch.cuda._sleep(_CYCLES)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return int(delay_s / sorted(found)[4] * _CYCLES)


def _wait(delay_s):
    if _torch.cuda.is_available():
        _torch.cuda._sleep(_cycles(delay_s))
    else:
        end = _time.perf_counter() + delay_s
        while _time.perf_counter() < end:
            pass


def _slower(build, delays_s):
    @_functools.wraps(build)
    def built(provider, axes):
        workload = build(provider, axes)
        delay_s = delays_s.get(repr((provider, sorted(axes.items()))))
        if delay_s is None:
            return workload
        if _torch.cuda.is_available():
            _cycles(delay_s)

        def run():
            output = workload.run()
            _wait(delay_s)
            return output

        return _dataclasses.replace(workload, run=run)

    return built


{function} = _slower({function}, {delays_s!r})
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedCase:
    """One case in one gate."""

    gate: str
    slower: float
    """The planted share of a step; 0 is none."""
    case: GateCase
    wall_s: float
    """Of the whole gate."""

    @property
    def wrong(self) -> bool:
        """A false alarm, or a slowdown that was let through; undecided is neither."""
        return self.case.decision is (Decision.GO if self.slower else Decision.NO_GO)


class Quiet:
    """Tells of processes that did not end ok."""

    def stage(self, text: str, processes: int) -> None: ...

    def ended(self, side: str, measurement: Measurement) -> None:
        if not measurement.samples_s:
            _tell(f"{side}: {measurement.case_id}: {measurement.outcome}: {measurement.detail}")


class Scratch:
    """A repository in which slowdowns are planted, one a branch."""

    def __init__(
        self,
        folder: Path,
        packages: Iterable[Path],
        suite_text: str,
        compare: str,
        cases: Sequence[str] = (),
    ) -> None:
        """Make it: packages, a suite and a policy, on the branch `main`."""
        self.folder = folder
        folder.mkdir(parents=True)
        for package in packages:
            leave = shutil.ignore_patterns("__pycache__", "tests")
            shutil.copytree(package, folder / package.name, ignore=leave)
        suite = folder / SUITE_PATH
        suite.parent.mkdir(exist_ok=True)
        suite.write_text(suite_text)
        policy = folder / "ci/gate.yaml"
        policy.parent.mkdir()
        policy.write_text(POLICY.format(suite=SUITE_PATH, compare=compare, cases=json.dumps(cases)))
        (folder / ".gitignore").write_text("__pycache__/\nreports/\n")
        self.cases = {c.case_id: c for c in suites.loads(suite_text, SUITE_PATH).cases}
        git(folder, "init", "--quiet", "--initial-branch=main")
        commit(folder, {})

    def plant(self, name: str, delays_s: Mapping[str, float]) -> None:
        """A branch on which each step of these cases waits longer by its delay."""
        of: dict[str, dict[str, float]] = {}
        for case_id, delay_s in delays_s.items():
            case = self.cases[case_id]
            key = repr((case.provider, sorted(case.axes.items())))
            of.setdefault(case.factory, {})[key] = delay_s
        for factory, delays in of.items():
            module, _, function = factory.partition(":")
            file = self.folder / f"{module.replace('.', '/')}.py"
            with file.open("a") as text:
                text.write(DELAY.format(delays_s=delays, function=function))
        commit(self.folder, {}, branch=name)
        git(self.folder, "checkout", "--quiet", "main")

    def gate(self, head: str, *, proof: bool) -> GateRecord:
        """Judge a branch against `main`."""
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            asked = Request(mode=Mode.RELATIVE, base="main", head=head, measure=True)
            return carry_out(replace(asked, self_test=proof), Quiet(), _tell)
        finally:
            os.chdir(before)


def study(
    scratch: Scratch,
    slower: Sequence[float],
    again: int,
    minutes: float,
    known_s: Mapping[str, float],
) -> Iterator[Sequence[PlantedCase]]:
    """Gate after gate: those of the same commit, which are short, then the slowdowns; none is
    begun past the time. Without known step times, the first gate tells them."""
    began = time.monotonic()
    plan = [*[0.0] * max(not known_s, again), *slower]
    step_s = dict(known_s)
    for number, share in enumerate(plan):
        if time.monotonic() - began > minutes * 60:
            _tell(f"{minutes:g} minutes are over: {len(plan) - number} gates were not begun")
            return
        head = f"slower-{share:g}" if share else "main"
        if share:
            scratch.plant(head, {c: share * s for c, s in step_s.items()})
        start = time.monotonic()
        verdict = scratch.gate(head, proof=number == 0)
        wall_s = time.monotonic() - start
        for case in verdict.cases if not step_s else ():
            if case.baseline_s is None:
                raise RuntimeError(f"{case.case_id} was not timed: {reason(case)}")
            step_s[case.case_id] = case.baseline_s
        name = f"+{units.percent(share)}" if share else f"A/A {plan[: number + 1].count(0.0)}"
        yield [PlantedCase(gate=name, slower=share, case=c, wall_s=wall_s) for c in verdict.cases]


def step_times(folder: Path, cases: Iterable[Case]) -> Mapping[str, float]:
    """The median step of each case in a stored run, by its axes: ids follow what a suite sweeps."""
    run = reader.load(folder.parent, folder.name)
    taken = [
        (c.factory, c.provider, c.axes, [s for m in run.of(c.case_id) for s in m.kept_s])
        for c in run.suite.cases
    ]
    found = {}
    for case in cases:
        work = (case.factory, case.provider, case.axes)
        steps = [s for *other, kept in taken if tuple(other) == work for s in kept]
        if not steps:
            raise SystemExit(
                f"error: {folder.name} has no step of {case.case_id}\n"
                "  Choose others with --cases, or leave out --step-s."
            )
        found[case.case_id] = median(steps)
    return found


def markdown(lines: Sequence[PlantedCase]) -> str:
    """The table."""
    rows = [
        "| planted | case | verdict | ratio | pairs | minutes | gate takes |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for line in lines:
        case, found = line.case, line.case.comparison
        ratio, pairs = reason(case), 0
        if found:
            low, high = (f"{b:.3f}" if b else "?" for b in (found.ratio.low, found.ratio.high))
            ratio, pairs = f"{found.ratio.value:.3f} ({low} to {high})", found.ratio.n
        rows.append(
            f"| {line.gate} | {case.case_id} | {case.decision} | {ratio} | {pairs} | "
            f"{case.gpu_s / 60:.2f} | {line.wall_s:.0f} s |"
        )
    return "\n".join(rows) + "\n"


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Plant slowdowns, and see what the gate says.")
    parser.add_argument("out", type=Path, help="A folder that does not exist yet.")
    parser.add_argument("--suite", type=Path, help="Another suite; all of its cases get slower.")
    parser.add_argument("--cases", nargs="+", default=[], help="Patterns of its case ids.")
    parser.add_argument("--packages", nargs="+", type=Path, default=[ROOT / "nsa", ROOT / "suites"])
    parser.add_argument("--slower", nargs="+", type=float, default=list(SLOWER))
    parser.add_argument("--again", type=int, default=AGAIN, help="A/A gates.")
    parser.add_argument("--step-s", type=Path, metavar="RUN", help="Step times, from a stored run.")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="Begin no gate after.")
    parser.add_argument("--compare", default="{}", help="`compare` of the policy, as YAML.")
    options = parser.parse_args(arguments)
    text = options.suite.read_text() if options.suite else SUITE
    cases, patterns = suites.loads(text, SUITE_PATH).cases, options.cases or ["*"]
    judged = [c for c in cases if any(fits(c.case_id, p) for p in patterns)]
    known_s = step_times(options.step_s, judged) if options.step_s else {}
    folder = options.out / "repository"
    scratch = Scratch(folder, options.packages, text, options.compare, options.cases)
    lines: list[PlantedCase] = []
    status = 0
    with terminating_like_ctrl_c(), (options.out / "gates.jsonl").open("w") as journal:
        try:
            for found in study(scratch, options.slower, options.again, options.minutes, known_s):
                lines += found
                for line in found:
                    journal.write(json.dumps(asdict(line) | {"case": plain(line.case)}) + "\n")
                    case = line.case
                    _tell(f"{line.gate}: {case.case_id}: {case.decision}: {reason(case)}")
                journal.flush()
        except KeyboardInterrupt:
            _tell("interrupted: the gate in progress says nothing")
            status = 130
    sys.stdout.write(markdown(lines))
    for line in lines:
        if line.wrong:
            case = line.case
            sys.stdout.write(f"WRONG: {line.gate}: {case.case_id} is {case.decision}\n")
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    main()
