"""Command line. The only module that prints, and the only one that exits.

Exit status: 0 go; 1 a regression or NO-GO; 2 the request could not be carried out;
3 undecided, interrupted, or an invalid environment. An absent answer is never a pass.
"""

import datetime
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from harness import (
    doctor,
    drift,
    environment,
    findings,
    gate,
    phrases,
    store,
)
from harness import suite as suites
from harness.analysis import overhead as sampling
from harness.analysis import scaling, spread, summary, targets, timeuse
from harness.analysis.dead_axes import oddities
from harness.cli import bisect, compare, console, exchange, history
from harness.cli import gate as gate_commands
from harness.cli.group import Commands
from harness.cli.progress import ProgressBar
from harness.errors import HarnessError, SuiteError
from harness.execution import machine
from harness.execution.launcher import Launcher
from harness.execution.proof import prove, unproved
from harness.execution.runner import run_suite, settled
from harness.execution.vacancy import mismatch, watch_over
from harness.probes.open import open_probes
from harness.records import (
    CaseSummary,
    Decision,
    Environment,
    Run,
    Suite,
    Verdict,
)

EXIT_REFUSED = 2
EXIT_UNDECIDED = Decision.INCONCLUSIVE.exit_status

app = typer.Typer(
    name="harness",
    cls=Commands,
    help="Measure sparse-attention kernels and models, and say how sure the numbers are.",
    epilog="Exit status: 0 go, 1 no-go, 2 the request could not be carried out, 3 undecided.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
out = console.console()
err = console.console(stderr=True)

compare.register(app)
exchange.register(app)
gate_commands.register(app)
history.register(app)
bisect.register(app)

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run id, the start of one, a folder, or latest.")
]
StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the recorded runs.")]
ReportsOption = Annotated[Path, typer.Option("--reports", help="Folder of the dated reports.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables.")
]
FilterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--filter", "-f", help="Only cases whose id fits; a leading ! leaves them out. Repeatable."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="axis=value[,value...], or measure.processes=1. Repeatable."),
]
STORE = Path("reports/runs")
REPORTS = Path("reports")


def main() -> None:
    """Entry point: a HarnessError is one message and exit 2; a defect keeps its traceback."""
    try:
        app()
    except HarnessError as error:
        err.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(EXIT_REFUSED)


@app.command(rich_help_panel="Measure")
def run(
    suite: Annotated[
        str | None, typer.Argument(help="Suite file, or the name of a shipped one: smoke.")
    ] = None,
    only: FilterOption = None,
    overrides: SetOption = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with an interrupted run, or latest.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show the plan and stop. It is read from the file alone: no factory or program is "
            "asked whether it would take its cases.",
        ),
    ] = False,
    as_json: JsonOption = False,
    store_root: StoreOption = STORE,
    reports: ReportsOption = REPORTS,
    report: Annotated[bool, typer.Option(help="Write the dated report at the end.")] = True,
    wait_for_gpu: Annotated[
        float,
        typer.Option(
            "--wait-for-gpu",
            metavar="SECONDS",
            min=0,
            help="Wait so long for a GPU that another harness or process uses.",
        ),
    ] = 0.0,
    proof: Annotated[
        bool,
        typer.Option(help="Have the instrument prove itself first; a report says if it did not."),
    ] = True,
) -> None:
    """Run a suite, record it, write its report and give its verdict.

    harness run suites/smoke.yaml

    harness run a100-retest --filter 'train/*' --set seq_len=512

    harness run --resume latest
    """
    began = time.monotonic()
    if (suite is None) == (resume is None):
        raise HarnessError(
            "a run needs either a suite or --resume RUN",
            "For example: harness run suites/smoke.yaml",
        )
    if resume is not None and (only or overrides or dry_run):
        raise HarnessError(
            "--resume goes on with the recorded plan; --filter, --set and --dry-run change it",
            "Leave them out, or start a new run.",
        )
    before = None
    if suite is not None:
        chosen = suites.load(suite, overrides=overrides or (), filters=only or ())
        if dry_run:
            _show_plan(chosen, as_json)
            return
    elif resume is not None:
        before = store.load(store_root, resume)
        chosen = before.suite
    if report:
        # harness.report brings matplotlib, which the other commands need not wait for.
        from harness.report import render

        render.check_writable(reports)
    with ExitStack() as held:
        command = ("harness", *sys.argv[1:])
        taken = machine.take(held, chosen, command=command, wait_s=wait_for_gpu, say=_say)
        launcher, here = taken.launcher, taken.here
        if before is not None:
            drift.require_alike(before, here)
        _warn(chosen, here, launcher.preflight(chosen), launcher.not_preloaded)
        done: Collection[tuple[str, int]] = ()
        if before is None:
            writer = store.create(store_root, chosen, here)
        else:
            writer, recorded = store.resume(
                store_root,
                before.folder,
                notes=[str(d) for d in drift.differences(before.environment, here)],
            )
            done = settled(chosen, recorded.measurements)
        if taken.lock is not None:
            taken.lock.describe(writer.run_id)
        with writer:
            if _carry_out(chosen, here, writer, done, launcher, wait_for_gpu, proof=proof):
                writer.finish(wall_s=time.monotonic() - began if before is None else None)
    _conclude(store.load(store_root, writer.run_id), reports if report else None, as_json)


def _carry_out(
    suite: Suite,
    here: Environment,
    writer: store.RunWriter,
    done: Collection[tuple[str, int]],
    launcher: Launcher,
    wait_for_gpu: float,
    *,
    proof: bool,
) -> bool:
    """Prove the instrument and measure what is left; whether there was an end to that."""
    _say(f"{writer.run_id}: {suite.question}")
    probes = open_probes(here.gpu, why=here.gpu_unavailable)
    try:
        with ExitStack() as held:
            gpu = watch_over(held, here, wait_s=wait_for_gpu, say=_say)
            shown = prove(launcher, probes, here.gpu) if proof else unproved(here.gpu, "--no-proof")
            writer.append_proof(shown)
            if shown.refuted:
                err.print(console.refuted(shown, writer.folder))
                return False
            run_suite(
                suite,
                writer=writer,
                probes=probes,
                observer=held.enter_context(ProgressBar(err, suite, done)),
                done=done,
                launcher=launcher,
                gpu=gpu,
                unfit=mismatch(suite.requires, here),
            )
    except KeyboardInterrupt:
        err.print(
            f"interrupted; all finished processes are recorded in {writer.folder}\n"
            f"  go on with: harness run --resume {writer.folder}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(EXIT_UNDECIDED) from None
    finally:
        for probe in probes:
            probe.close()
    return True


def _warn(
    suite: Suite, here: Environment, work: Mapping[str, targets.Work], not_preloaded: str
) -> None:
    """What a person should know before the run rather than after it."""
    if not_preloaded:
        _say(f"note: each worker imports its workload for itself: {not_preloaded}")
    for target in targets.modest(suite, here, work):
        _say(f"warning: {phrases.target(target)}")


@app.command(rich_help_panel="Measure")
def overhead(
    suite: Annotated[str, typer.Argument(help="Suite file, or the name of a shipped one.")],
    only: FilterOption = None,
    overrides: SetOption = None,
    processes: Annotated[
        int, typer.Option(min=2, help="Pairs of processes per case: one sampled, one not.")
    ] = 12,
    as_json: JsonOption = False,
    store_root: StoreOption = STORE,
) -> None:
    """Measure what reading the probes costs: the same cases with and without, taking turns.

    harness overhead attention --filter 'whole/triton/*seq_len=8192/pass=forward' --processes 24

    Exit status: 0 at most 0.5 % of the step time, 1 more, 3 undecided.
    """
    chosen = suites.load(suite, overrides=overrides or (), filters=only or ())
    chosen = sampling.arranged(chosen, processes=processes)
    with ExitStack() as held:
        command = ("harness", *sys.argv[1:])
        taken = machine.take(held, chosen, command=command, wait_s=0.0, say=_say)
        taken.launcher.preflight(chosen)
        with store.create(store_root, chosen, taken.here) as writer:
            if _carry_out(chosen, taken.here, writer, (), taken.launcher, 0.0, proof=True):
                writer.finish()
    recorded = store.load(store_root, writer.run_id)
    found = sampling.overhead(recorded)
    if as_json:
        _document({"run": recorded.run_id, "overhead": asdict(found) if found else None})
    else:
        said = phrases.overhead(found, sampling.LIMIT) if found else "no pair of processes ended ok"
        out.print(said, markup=False, highlight=False)
        out.print(f"Run: {recorded.folder}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit({True: 0, False: 1, None: EXIT_UNDECIDED}[found.shown if found else None])


def _say(text: str) -> None:
    err.print(text, highlight=False, markup=False, soft_wrap=True)


@app.command(rich_help_panel="Measure")
def show(
    run_id: RunArgument = "latest", as_json: JsonOption = False, store_root: StoreOption = STORE
) -> None:
    """Show a recorded run: its cases, and the verdict as it is given today."""
    _conclude(store.load(store_root, run_id), None, as_json)


@app.command("report", rich_help_panel="Measure")
def report_(
    run_id: RunArgument = "latest",
    as_json: JsonOption = False,
    store_root: StoreOption = STORE,
    reports: ReportsOption = REPORTS,
) -> None:
    """Write one more dated report of a recorded run; earlier ones stay as they are."""
    _conclude(store.load(store_root, run_id), reports, as_json)


@app.command("doctor", rich_help_panel="Measure")
def doctor_(
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Name what differs from a recorded run and could move a number."
        ),
    ] = None,
    as_json: JsonOption = False,
    store_root: StoreOption = STORE,
) -> None:
    """Print the environment, and whether numbers taken in it would mean anything.

    With --against: 0 where nothing differs, 3 where something does.
    """
    recorded = store.load(store_root, against) if against is not None else None
    shipped = suites.available()
    measured = recorded.suite if recorded else suites.load(shipped[0]) if shipped else None
    cases = measured.cases if measured else ()
    home = environment.home_of(cases[0].factory) if cases else Path.cwd()
    with Launcher() as launcher:
        here = environment.capture(
            launcher.describe(),
            command=("harness", *sys.argv[1:]),
            repository=home,
            cases=cases,
        )
    if recorded is not None:
        _show_drift(recorded, here, as_json)
    vitals = doctor.inspect(here, store=store_root, constraints=environment.pins_of(home))
    found = doctor.checks(here, vitals)
    grade = doctor.worst(found)
    if as_json:
        _document(
            {"environment": asdict(here), "checks": [asdict(c) for c in found], "verdict": grade}
        )
    else:
        out.print(console.doctor(here, found))
    raise typer.Exit(doctor.exit_status(found))


def _show_drift(recorded: Run, here: Environment, as_json: bool) -> NoReturn:
    """Show what differs from a run, and exit: 0 where nothing does."""
    found = (
        *drift.differences(recorded.environment, here),
        *_suite_drift(recorded),
    )
    if as_json:
        _document({"against": recorded.run_id, "differences": [asdict(d) for d in found]})
    else:
        out.print(console.drift(recorded.run_id, found))
    raise typer.Exit(EXIT_UNDECIDED if found else 0)


def _suite_drift(recorded: Run) -> Sequence[drift.Difference]:
    """How the suite's file differs from the copy that the run kept."""
    kept = Path(recorded.folder, store.SUITE_FILE)
    try:
        return drift.configuration(suites.load(str(kept)), suites.load(recorded.suite.path))
    except SuiteError as error:
        problem = str(error).partition("\n")[0]
        return (
            drift.Difference(name="suite", then=recorded.suite.path, now=problem, how="unknown"),
        )


@app.command(rich_help_panel="Keep")
def schema() -> None:
    """Print the JSON Schema of suite files, for editors."""
    _document(suites.json_schema())


def _show_plan(suite: Suite, as_json: bool) -> None:
    if as_json:
        _document({"suite": suite.name, "cases": [asdict(c) for c in suite.cases]})
    else:
        out.print(console.plan(suite))


def _conclude(recorded: Run, reports: Path | None, as_json: bool) -> None:
    """Show a run with its verdict, after writing its report if asked to, and exit with it."""
    cases = summary.summarise(recorded)
    fits = scaling.fit(cases)
    verdict = gate.judge(recorded.suite, recorded.environment, cases, fits)
    markdown = None
    if reports is not None:
        from harness.report import render

        markdown = render.write(recorded, reports, date=datetime.date.today()).markdown
    if as_json:
        _document(_conclusion(recorded, cases, verdict, markdown))
    else:
        out.print(console.summaries(cases))
        for program in phrases.programs(recorded.suite.cases, recorded.measurements):
            out.print(program, markup=False, highlight=False, soft_wrap=True)
        for note in recorded.notes:
            out.print(f"note: {note}", markup=False, highlight=False)
        for oddity in findings.plain(oddities(recorded, cases)):
            out.print(f"odd: {oddity}", markup=False, highlight=False, soft_wrap=True)
        out.print(console.verdict(verdict))
        if used := timeuse.time_use(recorded):
            out.print(f"Time: {phrases.time_use(used)}", markup=False, highlight=False)
        out.print(f"Run: {recorded.folder}", markup=False, highlight=False, soft_wrap=True)
        if markdown:
            out.print(f"Report: {markdown}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(verdict.decision.exit_status)


def _conclusion(
    recorded: Run, cases: Sequence[CaseSummary], verdict: Verdict, markdown: Path | None
) -> dict[str, object]:
    return {
        "run": recorded.run_id,
        "folder": recorded.folder,
        "finished": bool(recorded.ended_at),
        "device": recorded.environment.device_name,
        "report": str(markdown) if markdown else None,
        "proof": asdict(recorded.proof) if recorded.proof else None,
        "time": asdict(used) if (used := timeuse.time_use(recorded)) else None,
        "spread": [asdict(s) for s in spread.spreads(recorded)],
        "verdict": asdict(verdict),
        "oddities": asdict(oddities(recorded, cases)),
        "cases": [
            {
                "case": c.case.case_id,
                "program": asdict(c.case.program) if c.case.program else None,
                "outcome": c.outcome,
                "detail": c.detail,
                "metrics": {name: asdict(e) for name, e in c.metrics.items()},
                "lower_bound_s": c.lower_bound_s,
                "notes": c.notes,
            }
            for c in cases
        ],
    }


def _document(value: object) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
