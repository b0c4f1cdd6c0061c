"""The commands `run`, `overhead` and `show`: measure a suite, show what was recorded."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from harness import units
from harness.analysis import overhead as sampling
from harness.analysis import roofline
from harness.analysis import verdict as gate
from harness.cli import console, options
from harness.cli import report as pages
from harness.cli.options import command, document, err, out, say, show
from harness.cli.progress import ProgressBar
from harness.errors import HarnessError, ProbeError
from harness.executor import coordinator, slurm
from harness.executor import hosts as executors
from harness.executor.coordinator import Coordinator, Dealt
from harness.executor.jobs import SET, Executor
from harness.git.repository import ignore_line
from harness.machine import drift, environment, nvml, requirements
from harness.records import Check, Decision, Environment, Stop, Suite
from harness.report import pivots, render, text
from harness.runner.launcher import Launcher
from harness.runner.rig import Rig, take
from harness.runner.run import Agenda, Budget, run_suite
from harness.runner.self_test import run_self_test, skipped_self_test
from harness.store import index, reader
from harness.store import writer as store_writer
from harness.suite import load as suites

EXIT_UNDECIDED = Decision.INCONCLUSIVE.exit_status
MOST_RUNS = 3
"""Runs of a suite that are read for the expected times of its cases."""


class ExecutorName(StrEnum):
    """What starts the processes of a run on several GPUs."""

    LOCAL = "local"
    SSH = "ssh"
    SLURM = "slurm"


def run(
    suite: options.OptionalSuite = None,
    only: options.FilterOption = None,
    overrides: options.SetOption = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Continue an interrupted run: its id, or latest."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show the plan with its expected minutes, and stop; starts no workload.",
        ),
    ] = False,
    budget_min: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="MINUTES",
            min=0.1,
            help="Measure first what decides, and stop before MINUTES are over.",
        ),
    ] = None,
    abort: Annotated[
        bool,
        typer.Option(
            "--abort/--no-abort",
            help="Stop as soon as a rule with abort_early is NO-GO, or measure every case.",
        ),
    ] = True,
    as_json: options.JsonOption = False,
    store_root: options.StoreOption = options.STORE,
    reports: options.ReportsOption = options.REPORTS,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write a dated report at the end.")
    ] = True,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Keep the Chrome trace of one profile per case, at most 256 MiB uncompressed.",
        ),
    ] = False,
    wait_for_gpu: options.WaitOption = 0.0,
    self_test: options.SelfTestOption = True,
    executor: Annotated[
        ExecutorName | None,
        typer.Option(help="Measure on several GPUs at once: all of this node, or those of hosts."),
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="For ssh: a host a line; see harness/executor/README.md."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile-file",
            metavar="FILE",
            help="For slurm: partition, limits, gres; see harness/executor/README.md.",
        ),
    ] = None,
) -> None:
    """Measure a suite, store every sample, write a report and give the suite's verdict.

    \b
    harness run suites/smoke.yaml
    harness run a100-retest --filter 'train/*' --set seq_len=512
    harness run --resume latest
    harness run attention --executor local
    """
    began = time.monotonic()
    if suite is None and resume is None:
        raise HarnessError(
            "a run needs either a suite or --resume RUN",
            "For example: harness run suites/smoke.yaml",
        )
    if suite is not None and resume is not None:
        raise HarnessError(
            f"--resume {resume} continues that run with its own suite",
            f"Remove {suite}, or remove --resume to start a new run.",
        )
    if dry_run and budget_min:
        raise HarnessError("--dry-run shows the whole plan; --budget does not apply", "Remove one.")
    files = {ExecutorName.SSH: ("--hosts", hosts), ExecutorName.SLURM: ("--profile-file", profile)}
    for name, (option, file) in files.items():
        if file and executor is not name:
            raise HarnessError(
                f"{option} applies to --executor {name} only",
                f"Remove it, or use --executor {name}.",
            )
    if resume is not None and (only or overrides or dry_run or executor):
        raise HarnessError(
            "--resume continues the recorded plan; --filter, --set, --executor and --dry-run do "
            "not apply",
            "Remove them, or start a new run.",
        )
    before = None
    if suite is not None:
        chosen = suites.load(suite, overrides=overrides or (), filters=only or ())
        if dry_run:
            expected = _expected(chosen, store_root, _device(chosen))
            state = _requirements(chosen)
            if as_json:
                cases, times = [asdict(c) for c in chosen.cases], [asdict(e) for e in expected]
                needs = [asdict(c) for c in state]
                document(
                    {"suite": chosen.name, "cases": cases, "expected": times, "requirements": needs}
                )
            else:
                out.print(console.plan(chosen, expected, state))
            return
    elif resume is not None:
        before = reader.load(store_root, resume)
        chosen = before.suite
        if before.stopped and before.stopped.rule and abort:
            raise HarnessError(
                f"run {before.run_id} ended early: {units.stop_text(before.stopped)}",
                f"To measure the rest: {text.rest_command(before.stopped, before.folder)}",
            )
    if report:
        render.check_writable(reports)
    how = coordinator.dealt(before) if before else None
    if budget_min and (executor or how):
        raise HarnessError("--budget does not apply to a run with --executor", "Remove it.")
    given = [*["--trace"][:trace], *["--no-self-test"][self_test:]]
    given += [f"--wait-for-gpu={wait_for_gpu}"] if wait_for_gpu else []
    if how is not None:
        how = replace(how, options=(*how.options, *given))
    elif executor and suite:
        given += [f"{SET}{value}" for value in overrides or ()]
        named = str(file.resolve()) if (file := hosts or profile) else ""
        how = Dealt(executor=executor, file=named, suite=suite, options=tuple(given))
    if how is not None:
        device = ""
        gpus: Executor = (
            slurm.of(how.file, say)
            if how.executor == ExecutorName.SLURM
            else executors.of(how.executor, how.file, chosen.device)
        )
        if how.executor == ExecutorName.LOCAL:
            device = _device(chosen)
        expected = _expected(chosen, store_root, device)
        means_s = {e.case_id: (e.low_s + e.high_s) / 2 for e in expected}
        with coordinator.begin(chosen, before, how, store_root, command()) as writer:
            try:
                one = Coordinator(
                    writer, gpus, how, expected_s=means_s, device=device, abort=abort, say=say
                )
                one.run()
            except KeyboardInterrupt:
                raise _interrupted(writer.folder) from None
        _finish(writer.folder, one.stop, store_root, reports if report else None, as_json)
    with ExitStack() as held:
        rig, launcher, here = take(
            held, chosen, command=command(), wait_s=wait_for_gpu, say=say, store=store_root
        )
        launcher.traces = trace
        if before is not None:
            drift.require_alike(before, here)
        work = launcher.preflight(chosen)
        if launcher.not_preloaded:
            say(f"note: every worker imports its workload again: {launcher.not_preloaded}")
        for target in roofline.modest(chosen, here, work):
            say(f"warning: {text.target_text(target)}")
        if before is None:
            writer = store_writer.create(store_root, chosen, here)
        else:
            writer, before = store_writer.resume(
                store_root,
                before.folder,
                notes=[str(d) for d in drift.differences(before.environment, here)],
            )
        budget = None
        if total_s := (budget_min or 0.0) * units.MINUTE_S:
            known = _expected(chosen, store_root, here.device_name)
            alike_s = {e.case_id: e.high_s for e in known if e.run_id}
            budget = Budget(total_s=total_s, ends_at=began + total_s, expected_s=alike_s)
        agenda = Agenda(
            chosen,
            recorded=before.measurements if before else (),
            device=here.device_name,
            decide=(lambda: gate.of_run(reader.read(writer.folder)[0])[-1]) if abort else None,
            budget=budget,
        )
        rig.measures(writer.run_id)
        with writer:
            if _carry_out(agenda, rig, launcher, here, writer, self_test=self_test):
                wall_s = time.monotonic() - began if before is None else None
                writer.finish(wall_s=wall_s, stopped=agenda.stop)
    _finish(writer.folder, agenda.stop, store_root, reports if report else None, as_json)


def _finish(
    folder: Path, stop: Stop | None, store_root: Path, reports: Path | None, as_json: bool
) -> NoReturn:
    """Say what is left, write the report, show the run and exit with its verdict."""
    if stop:
        rest = text.rest_command(stop, folder)
        say(f"stopped: {units.stop_text(stop)}\n  To measure the rest: {rest}")
    if line := ignore_line(store_root):
        say(f"note: git lists the records as untracked; to ignore them, add {line} to .gitignore")
    recorded = reader.load(store_root, folder)
    page = pages.written(recorded, reports) if reports else None
    pages.conclude(recorded, page, as_json, whole=False)


def _carry_out(
    agenda: Agenda,
    rig: Rig,
    launcher: Launcher,
    here: Environment,
    writer: store_writer.RunWriter,
    *,
    self_test: bool,
) -> bool:
    """Self-test the probes and measure what is left; False where the self-test failed."""
    suite = agenda.suite
    say(f"{writer.run_id}: {suite.question}")
    try:
        rig.observe(here)
        tested = (
            run_self_test(launcher, rig.probes, here.gpu)
            if self_test
            else skipped_self_test(here.gpu, "--no-self-test")
        )
        writer.append(tested)
        if tested.refuted:
            err.print(console.failed_self_test(tested, writer.folder))
            return False
        with ProgressBar(err, suite) as progress:
            run_suite(
                agenda,
                writer=writer,
                probes=rig.probes,
                observer=progress,
                launcher=launcher,
                gpu=rig.gpu,
            )
    except KeyboardInterrupt:
        raise _interrupted(writer.folder) from None
    return True


def _interrupted(folder: object) -> typer.Exit:
    """The exit of a run that Ctrl-C ended, which this says."""
    say(
        f"interrupted; all finished processes are recorded in {folder}\n"
        f"  Continue with: {text.rest_command(None, folder)}"
    )
    return typer.Exit(EXIT_UNDECIDED)


def _device(suite: Suite) -> str:
    """The model of the GPU that workers will use, or `cpu`; empty if the machine has several."""
    try:
        models = {gpu.name for gpu in nvml.gpus()} if suite.device != "cpu" else {"cpu"}
    except ProbeError:
        return "cpu"
    return models.pop() if len(models) == 1 else ""


def _requirements(suite: Suite) -> Sequence[Check]:
    """The state of what the suite requires; a worker starts only if it requires anything."""
    if not (required := {*suite.requires, *suite.wants}):
        return ()
    with Launcher.of(suite) as launcher:
        facts = launcher.describe()
    here = environment.capture(facts, command=command(), repository=None, required=required)
    return requirements.checks(suite, here)


def _expected(suite: Suite, store_root: Path, device: str) -> Sequence[sampling.ExpectedTime]:
    """The expected time of each case, by the newest stored runs of the suite on this device, or on
    any without a device."""
    stored: Sequence[reader.RunHeader] = ()
    if store_root.is_dir():
        choice = index.RunFilter(suite=suite.name)
        stored = index.ask(store_root, lambda known: known.runs(choice), say)
    alike = [h for h in stored if h.device == (device or h.device) and not h.problem][-MOST_RUNS:]
    return sampling.expected_times(suite, [reader.load(store_root, h.folder) for h in alike])


def overhead(
    suite: options.SuiteArgument,
    only: options.FilterOption = None,
    overrides: options.SetOption = None,
    processes: Annotated[
        int,
        typer.Option(
            metavar="COUNT", min=2, help="Pairs of processes per case: one sampled, one not."
        ),
    ] = 12,
    as_json: options.JsonOption = False,
    store_root: options.StoreOption = options.STORE,
) -> None:
    """Measure what sampling the probes costs: the same cases with and without it, interleaved.

    \b
    harness overhead attention --filter 'whole/triton/*seq_len=8192/pass=forward' --processes 24

    Exit status: 0 at most 0.5 % of the step time; 1 more; 3 undecided.
    """
    chosen = suites.load(suite, overrides=overrides or (), filters=only or ())
    chosen = sampling.arranged(chosen, processes=processes)
    with ExitStack() as held:
        rig, launcher, here = take(held, chosen, command=command(), wait_s=0.0, say=say)
        launcher.preflight(chosen)
        with store_writer.create(store_root, chosen, here) as writer:
            if _carry_out(Agenda(chosen), rig, launcher, here, writer, self_test=True):
                writer.finish()
    recorded = reader.load(store_root, writer.folder)
    found = sampling.overhead(recorded)
    if as_json:
        document({"run": recorded.run_id, "overhead": asdict(found) if found else None})
    else:
        none = "no pair of processes ended ok"
        show(text.overhead_sentence(found, sampling.LIMIT) if found else none)
        show(f"Run: {recorded.folder}")
    raise typer.Exit({True: 0, False: 1, None: EXIT_UNDECIDED}[found.shown if found else None])


def show_(
    run_ids: options.RunsArgument = None,
    rules: options.RulesOption = None,
    rows: options.RowsOption = "",
    cols: options.ColsOption = "",
    only: options.FilterOption = None,
    metric: options.MetricOption = "",
    as_json: options.JsonOption = False,
    store_root: options.StoreOption = options.STORE,
) -> None:
    """Show a recorded run: its cases, and the verdict by its suite's rules; or a table of runs.

    \b
    harness show latest
    harness show 20261121-0730 --rules a100-retest
    harness show latest --rows seq_len --cols provider --metric peak_memory_bytes
    harness show RUN RUN --cols gpu    # platforms side by side

    A pivot table takes any axis, also workload, provider, gpu, commit and run. Axes in which cases
    differ and that are not columns are rows.
    """
    asked = bool(rows or cols)
    options.require_pivot(
        asked, {"--filter": only, "--metric": metric}, {"--rules": rules, "--json": as_json}
    )
    named = (reader.load(store_root, name) for name in run_ids or ["latest"])
    runs = [*{run.run_id: run for run in named}.values()]
    if not asked:
        if len(runs) > 1:
            raise HarnessError("several runs need a pivot table", "Add --cols run.")
        pages.conclude(pages.judged_by(rules, runs[0]), None, as_json)
    named_axes = options.axes(rows), options.axes(cols)
    show(pivots.pivot(runs, *named_axes, metric or "step_s", only or ()))
