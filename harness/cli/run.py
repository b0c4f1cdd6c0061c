"""The command `run`: measure a suite."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from harness import units
from harness.analysis.study import Foreseen, Study, foreseen, task
from harness.cli import console, options
from harness.cli import report as pages
from harness.cli.options import command, out, say
from harness.cli.progress import ProgressBar
from harness.errors import HarnessError, ProbeError
from harness.executor import driver
from harness.executor.task import UnitCommand
from harness.machine import drift, nvml
from harness.records import Decision, Environment, Run, Stop, Suite
from harness.report import text
from harness.report.series import render
from harness.runner.launcher import Launcher
from harness.runner.rig import Rig, take
from harness.runner.run import Agenda, Budget, run_suite
from harness.runner.self_test import run_self_test
from harness.store import reader
from harness.store import writer as store_writer
from harness.suite import load as suites

ResumeOption = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Continue an interrupted run: its id, or latest."),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Show cases, expected times and bounds, and stop; starts no workload."
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="MINUTES",
        min=0.001,
        help="Measure first what decides, and start no process after MINUTES.",
    ),
]
AbortOption = Annotated[
    bool,
    typer.Option(
        help="Stop as soon as a rule with abort_early is NO-GO, or measure every case.",
    ),
]
ReportOption = Annotated[bool, typer.Option(help="Write a dated report at the end.")]
TraceOption = Annotated[
    bool, typer.Option("--trace", help="Keep the Chrome trace of one profile per case.")
]
ExecutorOption = Annotated[
    Literal["ray"] | None,
    typer.Option(help="Measure on several GPUs at once: all of this node, or those of a cluster."),
]
AddressOption = Annotated[
    str | None, typer.Option(help="Of a running Ray cluster, or auto; default: this node alone.")
]


def run(
    suite: options.OptionalSuite = None,
    only: options.FilterOption = None,
    overrides: options.SetOption = None,
    resume: ResumeOption = None,
    dry_run: DryRunOption = False,
    budget_min: BudgetOption = None,
    abort: AbortOption = True,
    store_root: options.StoreOption = options.STORE,
    reports: options.ReportsOption = options.REPORTS,
    report: ReportOption = True,
    trace: TraceOption = False,
    wait_for_gpu: options.WaitOption = 0.0,
    self_test: options.SelfTestOption = True,
    executor: ExecutorOption = None,
    address: AddressOption = None,
) -> None:
    """Measure a suite, store every sample, write a report and give the suite's verdict.

    \b
    harness run suites/smoke.yaml
    harness run a100-retest --filter 'train/*' --set seq_len=512
    harness run --resume latest
    harness run attention --executor ray
    """
    began = time.monotonic()
    if (suite is None) == (resume is None):
        raise HarnessError(
            "a run needs either a suite or --resume RUN, which has its own suite",
            "For example: harness run suites/smoke.yaml",
        )
    if dry_run and budget_min:
        raise HarnessError("--dry-run shows the whole plan; --budget does not apply", "Remove one.")
    if resume is not None and (only or overrides or dry_run or executor):
        raise HarnessError(
            "--resume continues the recorded plan; --filter, --set, --executor and --dry-run do "
            "not apply",
            "Remove them, or start a new run.",
        )
    before = how = None
    if suite is not None:
        chosen = suites.load(suite, overrides=overrides or (), filters=only or ())
        if executor:
            words = tuple(f"--set={value}" for value in overrides or ())
            how = UnitCommand(suite=suite, folder=str(Path.cwd()), options=words)
    else:
        before = _unfinished(store_root, resume or "", abort)
        chosen, how = before.suite, driver.command_of(before)
    if dry_run:
        out.print(console.plan(chosen, *_known(chosen, store_root)))
        return
    if report:
        render.check_writable(reports)
    if how:
        if budget_min:
            raise HarnessError("--budget does not apply to a run with --executor", "Remove it.")
        words = _words(trace=trace, self_test=self_test, wait_s=wait_for_gpu)
        how = replace(how, options=(*how.options, *words))
        folder, stop = _on_several_gpus(chosen, before, how, address, store_root, abort)
    else:
        if address:
            raise HarnessError("--address applies to --executor ray only", "Remove it.")
        folder, stop = _on_one_gpu(
            chosen,
            before,
            began,
            store_root,
            budget_s=(budget_min or 0.0) * units.MINUTE_S,
            abort=abort,
            trace=trace,
            wait_s=wait_for_gpu,
            self_test=self_test,
        )
    if stop:
        rest = text.rest_command(stop, folder)
        say(f"stopped: {units.stop_text(stop)}\n  To measure the rest: {rest}")
    of = Study(reader.load(store_root, folder))
    pages.conclude(of, pages.written(of, reports) if report else None)


def _unfinished(store_root: Path, name: str, abort: bool) -> Run:
    """The run to go on with."""
    before = reader.load(store_root, name)
    if before.stopped and before.stopped.rule and abort:
        raise HarnessError(
            f"run {before.run_id} ended early: {units.stop_text(before.stopped)}",
            f"To measure the rest: {text.rest_command(before.stopped, before.folder)}",
        )
    return before


def _words(*, trace: bool, self_test: bool, wait_s: float) -> tuple[str, ...]:
    """The options of this command that a unit of a run on several GPUs has, too."""
    given = {"--trace": trace, "--no-self-test": not self_test, f"--wait-for-gpu={wait_s}": wait_s}
    return tuple(word for word, is_given in given.items() if is_given)


def _on_several_gpus(
    chosen: Suite,
    before: Run | None,
    how: UnitCommand,
    address: str | None,
    store: Path,
    abort: bool,
) -> tuple[Path, Stop | None]:
    """The folder of the run, and why cases are left."""
    with driver.connected(address) as ray, ExitStack() as held:
        if before:
            writer, _ = store_writer.resume(store, before.folder)
        else:
            writer = driver.begin(chosen, how, store, command())
        held.enter_context(writer)
        try:
            return writer.folder, driver.measure(ray, writer, how, abort, say)
        except KeyboardInterrupt:
            raise _interrupted(writer.folder) from None


def _on_one_gpu(
    chosen: Suite,
    before: Run | None,
    began: float,
    store: Path,
    *,
    budget_s: float,
    abort: bool,
    trace: bool,
    wait_s: float,
    self_test: bool,
) -> tuple[Path, Stop | None]:
    """The folder of the run, and why cases are left."""
    with ExitStack() as held:
        rig, here = take(held, chosen, command=command(), wait_s=wait_s, say=say, store=store)
        launcher = rig.launcher
        launcher.traces = trace
        if before is not None:
            drift.require_alike(before, here)
        launcher.preflight(chosen)
        if launcher.not_preloaded:
            say(f"note: every worker imports its workload again: {launcher.not_preloaded}")
        if before is None:
            writer = store_writer.create(store, chosen, here)
        else:
            was = next((e for e in before.environments if e.card == here.card), before.environment)
            notes = [str(d) for d in drift.differences(was, here)]
            writer, before = store_writer.resume(store, before.folder, notes=notes, here=here)
        agenda = Agenda(
            chosen,
            recorded=before.measurements if before else (),
            device=here.device_name,
            read=lambda: reader.read(writer.folder),
            abort=abort,
            budget=Budget(total_s=budget_s, ends_at=began + budget_s) if budget_s else None,
        )
        rig.measures(writer.run_id)
        with writer:
            if _carry_out(agenda, rig, here, writer, self_test=self_test):
                wall_s = time.monotonic() - began if before is None else None
                writer.finish(wall_s=wall_s, stopped=agenda.stop)
    return writer.folder, agenda.stop


def _carry_out(
    agenda: Agenda,
    rig: Rig,
    here: Environment,
    writer: store_writer.RunWriter,
    *,
    self_test: bool,
) -> bool:
    """Self-test the probes and measure what is left; False where the self-test failed."""
    suite = agenda.suite
    shipped = ", shipped with the harness" if suites.shipped_roots(suite) else ""
    say(f"{writer.run_id} of {suite.path}{shipped}: {suite.question}")
    try:
        rig.observe(here)
        skip = "" if self_test else "--no-self-test"
        tested = run_self_test(rig.launcher, rig.probes, here.gpu, skip=skip)
        writer.append(tested)
        if tested.refuted:
            failed = "\n".join(f"  {check.name}: {check.fact}" for check in tested.refuted)
            say(
                f"The self-test of timers and probes failed, so nothing was measured:\n{failed}\n"
                f"Fix the cause, then continue with: {text.rest_command(None, writer.folder)}\n"
                "To measure anyway, add --no-self-test; the report then says so."
            )
            return False
        with ProgressBar(suite) as progress:
            rig.observer = progress
            run_suite(agenda, rig, writer)
    except KeyboardInterrupt:
        raise _interrupted(writer.folder) from None
    return True


def _interrupted(folder: object) -> typer.Exit:
    """The exit of a run that Ctrl-C ended, which this says."""
    say(
        f"interrupted; all finished processes are recorded in {folder}\n"
        f"  Continue with: {text.rest_command(None, folder)}"
    )
    return typer.Exit(Decision.INCONCLUSIVE.exit_status)


def _known(suite: Suite, store_root: Path) -> tuple[dict[str, Run], dict[str, Foreseen]]:
    """The last runs of the cases on the model of the GPU that workers will use or the CPU (on any,
    if the machine has several models), and what the stored runs let foresee."""
    try:
        models = {gpu.name for gpu in nvml.gpus()} if suite.device != "cpu" else {"cpu"}
    except ProbeError:
        models = {"cpu"}
    bounds = models != {"cpu"}  # for which any run serves
    runs = [*reader.stored(store_root, say, lambda r: bounds or r.environment.device_name == "cpu")]
    here = [r for r in runs if len(models) > 1 or r.environment.device_name in models]
    built = ((c, m) for r in runs for c in r.suite.cases for m in r.of(c.case_id))
    known = {task(c) for c, m in built if m.flops or m.bytes}
    others = tuple(c for c in suite.cases if c.factory and task(c) not in known)
    work: Mapping[str, tuple[int, int]] = {}
    if others and any(r.environment.gpu for r in here):
        with Launcher.of(suite) as launcher:
            work = launcher.check(replace(suite, cases=others))
    return last_runs(suite, here), foreseen(suite, runs, here, work)


def last_runs(suite: Suite, runs: Sequence[Run]) -> dict[str, Run]:
    """Case id -> the suite's last run with its settings; all are on one GPU model, newest last."""
    asked, found = {c.case_id: c.settings for c in suite.cases}, dict[str, Run]()
    for run in (r for r in runs if r.suite.name == suite.name):
        for case in run.suite.cases:
            now = asked.get(case.case_id)
            of = now and replace(
                case.settings, processes=now.processes, most_processes=now.most_processes
            )
            if now and run.of(case.case_id) and of == now:
                found[case.case_id] = run
    return found
