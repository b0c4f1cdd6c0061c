"""Suites with one command, a Python program, and what a run of it measured."""

from pathlib import Path

from harness.records import Measurement, OverSteps, Suite
from harness.runner.launcher import Launcher
from harness.runner.run import Agenda, run_suite
from harness.suite import load as suites
from harness.tests.workers import Counter, Memory, descendants, rig_of

HEAD = """
schema: 1
title: T
subject: S
question: Q?
measure: {processes: 1, min_samples: 3, max_samples: 20, sample_s: 0.01, warmup_s: 0.2,
          timeout_s: 20, stall_s: 15, profile: false}
workloads:
  - name: prog
"""
STEPS = r"progress: {step: 'step (?P<step>\d+)'}"
LOSS = r"metrics: {loss: {line: 'loss (?P<value>\S+)', unit: nats, better: lower}}"


def asked(*rows: str) -> Suite:
    """A suite with one workload of these rows."""
    return suites.loads(HEAD + "".join(f"    {row}\n" for row in rows), "suite.yaml")


def suite_of(program: str, folder: Path, *lines: str) -> Suite:
    """A suite with one workload: a Python program of this text, and further lines of YAML."""
    (folder / "program.py").write_text("import os, sys, time, json, signal\n" + program)
    return asked("command: ['{python}', program.py]", f"cwd: {folder}", *lines)


def run(warm: Launcher, folder: Path, asked: Suite) -> Measurement:
    """One process of the only case; nothing is left running."""
    writer = Memory(folder)
    run_suite(Agenda(asked), rig_of(warm, [Counter()]), writer)
    assert descendants() == []
    (m,) = writer.measurements
    return m


def measured(warm: Launcher, folder: Path, program: str, *lines: str) -> Measurement:
    return run(warm, folder, suite_of(program, folder, *lines))


def steps_of(m: Measurement) -> OverSteps:
    assert m.over_steps is not None
    return m.over_steps
