"""What one process costs beside its samples, by phase: the harness timing itself.

    python -m reports.studies.process_overhead [SUITE] [--filter TEXT] [--processes N]
    python -m reports.studies.process_overhead --stored RUN...

The second command states how long processes of stored runs lived, and how many of them compiled.
Without a suite it measures a trivial workload whose setup and accuracy take no time, so all of the
time is the harness's own. The figures in harness/runner/README.md come from here.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.machine import environment
from harness.machine.probes import open_probes
from harness.records import Measurement, MeasureSettings, Outcome, Suite
from harness.runner.launcher import Launcher
from harness.runner.run import Agenda, run_suite
from harness.store import reader
from harness.store.writer import create
from harness.suite import load as suites
from harness.tests.workers import Quiet, make_case, make_suite

TIMED = ("warmup", "sampling")


def trivial() -> Suite:
    """One fake case, a millisecond a step."""
    settings = MeasureSettings(min_samples=3, max_samples=20, sample_s=0.01, warmup_s=0.2)
    return make_suite(make_case("good", settings=settings, axes={}))


def table(measurements: Sequence[Measurement], wall_s: float) -> str:
    """Medians over processes, in milliseconds: each phase, the exit, and the time between."""
    rows: dict[str, list[float]] = {}
    for m in measurements:
        for phase in m.phases:
            rows.setdefault(phase.name, []).append(phase.end_s - phase.start_s)
        rows.setdefault("exit", []).append(m.wall_s - m.phases[-1].end_s)
    lines = [f"{name:10} {1e3 * statistics.median(t):8.1f} ms" for name, t in rows.items()]
    timed = sum(sum(t) for name, t in rows.items() if name in TIMED)
    between = (wall_s - sum(m.wall_s for m in measurements)) / len(measurements)
    lines.append(f"{'between':10} {1e3 * between:8.1f} ms, mean")
    overhead = 1e3 * (wall_s - timed) / len(measurements)
    lines.append(
        f"{'overhead':10} {overhead:8.1f} ms a process, mean: all but {' and '.join(TIMED)}"
    )
    return "\n".join(lines)


def stored_table(run_ids: Sequence[str], store: Path) -> str:
    """Seconds of a process in cases with two or more; one compiled if it lived a second and half
    as long again as the shortest of its case."""
    rows = [
        "| run | processes | seconds, median | compile | seconds, median of those |",
        "|:--|--:|--:|--:|--:|",
    ]
    for run_id in run_ids:
        lived: dict[str, list[float]] = {}
        for m in reader.load(store, run_id).measurements:
            if m.outcome is Outcome.OK:
                lived.setdefault(m.case_id, []).append(m.wall_s)
        warm, compiled = [], []
        for walls in (w for w in lived.values() if len(w) > 1):
            limit_s = max(min(walls) + 1, 1.5 * min(walls))
            warm += [w for w in walls if w <= limit_s]
            compiled += [w for w in walls if w > limit_s]
        count, more = len(warm) + len(compiled), ""
        if compiled:
            more = f"{statistics.median(compiled):.1f}"
        share = f"{len(compiled)} ({len(compiled) / count:.0%})"
        rows.append(f"| {run_id} | {count} | {statistics.median(warm):.1f} | {share} | {more} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", nargs="?")
    parser.add_argument("--filter", action="append", default=[])
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--stored", nargs="+", metavar="RUN", default=[])
    given = parser.parse_args()
    if given.stored:
        sys.stdout.write(stored_table(given.stored, Path("reports/runs")) + "\n")
        return
    suite = suites.load(given.suite, filters=given.filter) if given.suite else trivial()
    suite = replace(
        suite,
        cases=tuple(
            replace(c, settings=replace(c.settings, processes=given.processes)) for c in suite.cases
        ),
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Launcher() as launcher:
        here = environment.capture(launcher.describe(), command=(), repository=None)
        launcher.preflight(suite)
        start_s = time.monotonic() - began
        sys.stdout.write(f"{'start':10} {start_s:8.2f} s, once: torch, facts, preflight\n")
        probes = open_probes(here.gpu)
        with create(Path(folder), suite, here) as writer:
            began = time.monotonic()
            run_suite(
                Agenda(suite), writer=writer, probes=probes, observer=Quiet(), launcher=launcher
            )
            wall_s = time.monotonic() - began
        sys.stdout.write(table(reader.load(Path(folder), "latest").measurements, wall_s) + "\n")


if __name__ == "__main__":
    main()
