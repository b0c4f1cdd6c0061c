"""Command line of the gate: `harness gate`, `harness calibrate`, `harness baseline`.

harness.cli.main registers these commands and ends the process.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from harness import store, units
from harness import suite as suites
from harness.analysis import calibrate as noise
from harness.ci import phrases
from harness.ci.page import step_summary
from harness.errors import HarnessError, StoreError
from harness.gating import baselines, calibration, counting, files, policy, records, selfcheck
from harness.gating.planning import Request
from harness.gating.records import GateVerdict, Mode
from harness.gating.session import carry_out, count
from harness.gating.worktrees import WORKING_TREE
from harness.records import Decision, Measurement, Outcome

out = Console()
err = Console(stderr=True)

StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the recorded runs.")]
BaselinesOption = Annotated[
    Path, typer.Option("--baselines", help="Folder of baselines and calibrations.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
WaitOption = Annotated[
    float,
    typer.Option("--wait-for-gpu", metavar="SECONDS", min=0, help="Wait so long for a GPU in use."),
]
FilterOption = Annotated[
    list[str] | None,
    typer.Option("--filter", "-f", help="Only cases whose id fits; ! leaves out. Repeatable."),
]
_STYLE = {
    Decision.GO: "bold green",
    Decision.NO_GO: "bold red",
    Decision.INCONCLUSIVE: "bold magenta",
}

baseline = typer.Typer(
    name="baseline", help="Stored baselines: what a gate compares with.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(rich_help_panel="Judge")(gate)
    app.command(rich_help_panel="Judge")(calibrate)
    app.add_typer(baseline, rich_help_panel="Judge")


def gate(
    base: Annotated[
        str, typer.Option(metavar="REF", help="Compare with where the head left this branch.")
    ] = "",
    head: Annotated[
        str, typer.Option(metavar="REF", help="What is judged; . is the working tree.")
    ] = WORKING_TREE,
    against_baseline: Annotated[
        bool, typer.Option("--baseline", help="Compare with the stored baseline of this GPU.")
    ] = False,
    counters: Annotated[
        bool, typer.Option("--counters", help="Compare counters per step; needs no GPU.")
    ] = False,
    policy_file: Annotated[Path, typer.Option("--policy", help="The gate's policy.")] = (
        policy.DEFAULT
    ),
    every_case: Annotated[
        bool, typer.Option("--all", help="Judge the cases that the change cannot reach as well.")
    ] = False,
    ci: Annotated[
        bool,
        typer.Option("--ci", help="Exit 0 unless the policy blocks: by stage and `inconclusive`."),
    ] = False,
    verdict_file: Annotated[
        Path | None, typer.Option("--verdict", metavar="FILE", help="Write the verdict as JSON.")
    ] = None,
    summary_file: Annotated[
        Path | None, typer.Option("--summary", metavar="FILE", help="Write it as Markdown.")
    ] = None,
    as_json: JsonOption = False,
    store_root: StoreOption = store.DEFAULT_ROOT,
    baseline_folder: BaselinesOption = files.FOLDER,
    wait_for_gpu: WaitOption = 0.0,
    proof: Annotated[
        bool, typer.Option(help="Have the instrument prove itself before it times anything.")
    ] = True,
) -> None:
    """Judge a change by a policy: GO, NO-GO or INCONCLUSIVE.

    harness gate --base origin/main          base and head, interleaved

    harness gate --baseline                  against the stored baseline of this GPU

    harness gate                             by the policy's floors and ceilings alone

    harness gate --counters                  counters per step, exactly, on any machine

    Exit status: 0 GO, 1 NO-GO, 2 it could not be carried out, 3 INCONCLUSIVE.
    """
    if against_baseline and (counters or base):
        raise HarnessError(
            "--baseline compares with what is stored; --base and --counters with something else",
            "Choose one of them.",
        )
    mode = Mode.RELATIVE if base else Mode.BASELINE if against_baseline else Mode.ABSOLUTE
    request = Request(
        mode=Mode.COUNTERS if counters else mode,
        policy=policy_file,
        base=base,
        head=head,
        every_case=every_case,
        store=store_root,
        baselines=baseline_folder,
        command=("harness", *sys.argv[1:]),
        wait_for_gpu_s=wait_for_gpu,
        proof=proof,
    )
    for file in (verdict_file, summary_file):
        _require_writable(file)
    with GateProgress() as progress:
        verdict = carry_out(request, progress, _say)
    if verdict_file is not None:
        verdict_file.write_text(records.encode(verdict), encoding="utf-8")
    if summary_file is not None:
        summary_file.write_text(step_summary(verdict), encoding="utf-8")
    if as_json:
        sys.stdout.write(records.encode(verdict))
    else:
        out.print(shown(verdict))
    raise typer.Exit(0 if ci and not verdict.blocks else verdict.exit_status)


def calibrate(
    suite: Annotated[str, typer.Argument(help="Suite file, or the name of a shipped one.")],
    only: FilterOption = None,
    pairs: Annotated[
        int, typer.Option(min=noise.MIN_PAIRS, help="A/A pairs of processes per case.")
    ] = 12,
    as_json: JsonOption = False,
    store_root: StoreOption = store.DEFAULT_ROOT,
    baseline_folder: BaselinesOption = files.FOLDER,
    wait_for_gpu: WaitOption = 0.0,
) -> None:
    """Measure the code against itself: how noisy is this node, and what can a gate see on it?

    harness calibrate suites/gate.yaml
    """
    request = selfcheck.Request(
        suite=suites.load(suite, filters=only or ()),
        pairs=pairs,
        store=store_root,
        baselines=baseline_folder,
        command=("harness", *sys.argv[1:]),
        wait_for_gpu_s=wait_for_gpu,
    )
    with GateProgress() as progress:
        stored = selfcheck.calibrate(request, progress, _say)
    if as_json:
        _document(asdict(stored))
    else:
        out.print(_calibration(stored))
        where = files.path_of(baseline_folder, stored.device, stored.suite, calibration.KIND)
        _say(f"Kept in {where}")
    raise typer.Exit(3 if stored.answer.biased else 0)


@baseline.command("set")
def set_(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A run, or latest.")] = "latest",
    store_root: StoreOption = store.DEFAULT_ROOT,
    baseline_folder: BaselinesOption = files.FOLDER,
) -> None:
    """Make a recorded run the baseline of its GPU and suite; one that is not ok is refused."""
    made = baselines.of_run(store.load(store_root, run_id))
    path = files.path_of(baseline_folder, made.device, made.suite)
    files.write(path, made)
    out.print(f"{path}: {len(made.cases)} cases of {made.commit[:10]}", highlight=False)
    for case_id, outcome in made.left_out.items():
        out.print(f"left out: {case_id}, which ends {outcome}", highlight=False, markup=False)


@baseline.command("show")
def show(as_json: JsonOption = False, baseline_folder: BaselinesOption = files.FOLDER) -> None:
    """List the stored baselines and calibrations, with where they came from."""
    found = [
        (path, read)
        for path in (*sorted(baseline_folder.glob("*/*.json")), counting.path_of(baseline_folder))
        if (read := _read(path)) is not None
    ]
    if as_json:
        _document([{"path": str(p), **_provenance(r)} for p, r in found])
        return
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for column in ("file", "device", "commit", "taken", "age", "cases"):
        table.add_column(column, overflow="fold")
    for path, record in found:
        p = _provenance(record)
        age = f"{files.age_days(str(p['at'])):.0f} d"
        commit = str(p["commit"])[:10] + (records.UNCOMMITTED if p["uncommitted"] else "")
        name = str(p["device_name"])
        table.add_row(escape(str(path)), escape(name), commit, str(p["at"]), age, str(p["cases"]))
    out.print(table if found else f"no baselines in {baseline_folder}")


@baseline.command("diff")
def diff(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A run, or latest.")] = "latest",
    as_json: JsonOption = False,
    store_root: StoreOption = store.DEFAULT_ROOT,
    baseline_folder: BaselinesOption = files.FOLDER,
) -> None:
    """Show how a recorded run differs from the baseline of its GPU. `harness gate` judges."""
    run = store.load(store_root, run_id)
    device = files.device_id(run.environment)
    stored = baselines.load(baseline_folder, device, run.suite.path)
    if stored is None:
        raise StoreError(
            f"no baseline of {run.suite.path} on {device} in {baseline_folder}",
            f"Make it one: harness baseline set {run.run_id}",
        )
    rows = baselines.compared(stored, run)
    if as_json:
        _document([asdict(row) for row in rows])
        return
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for column in ("case", "baseline", "run", "change"):
        table.add_column(column, overflow="fold")
    for row in rows:
        times = [units.duration(t) if t else "absent" for t in (row.baseline_s, row.run_s)]
        ratio = row.run_s / row.baseline_s if row.run_s and row.baseline_s else None
        table.add_row(escape(row.case_id), *times, units.change(ratio) if ratio else "")
    out.print(table)
    out.print(f"Baseline: {stored.commit[:10]}, {stored.measured_at}", highlight=False)


@baseline.command("counters")
def counters_(
    policy_file: Annotated[Path, typer.Option("--policy", help="The gate's policy.")] = (
        policy.DEFAULT
    ),
    store_root: StoreOption = store.DEFAULT_ROOT,
    baseline_folder: BaselinesOption = files.FOLDER,
) -> None:
    """Count the working tree's cases and put that on record: what a change does to them is meant.

    `harness gate --counters` compares with it. Commit the file with the change.
    """
    request = Request(
        mode=Mode.COUNTERS,
        policy=policy_file,
        store=store_root,
        baselines=baseline_folder,
        command=("harness", *sys.argv[1:]),
    )
    with GateProgress() as progress:
        made = count(request, progress, _say)
    cases = sum(map(len, made.cases.values()))
    out.print(
        f"{counting.path_of(baseline_folder)}: {cases} cases, torch {made.torch}", highlight=False
    )


# --- what is shown -----------------------------------------------------------------------


def shown(verdict: GateVerdict) -> RenderableType:
    """A verdict as the terminal shows it."""
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for column in ("", "case", "change", "why"):
        table.add_column(column, overflow="fold")
    for case in phrases.worst_first(verdict):
        table.add_row(
            Text(str(case.decision), style=_STYLE[case.decision]),
            escape(case.case_id),
            escape(phrases.change(case)),
            escape(phrases.why(case)),
        )
    head = Text.assemble(
        "Gate: ", (str(verdict.decision), _STYLE[verdict.decision]), f"  {verdict.reason}"
    )
    lines: list[RenderableType] = [table] if verdict.cases else []
    lines += [Text(f"{f.check}: {f.decision}: {f.reason}") for f in verdict.findings]
    if verdict.left_out:
        first = verdict.left_out[0]
        lines.append(
            Text(f"{len(verdict.left_out)} left out, such as {first.case_id}: {first.reason}")
        )
    lines.append(head)
    lines += [Text(f"  {remedy}") for remedy in verdict.remedies]
    effect = "blocks" if verdict.blocks else "does not block"
    if verdict.decision is not Decision.GO:
        setting = phrases.of_undecided(verdict)
        why = f"says {setting}" if setting else f"has stage {verdict.stage}"
        lines.append(Text(f"  With --ci it {effect}: the policy {why}"))
    if verdict.gpu_s:
        spent = units.duration(verdict.gpu_s)
        lines.append(Text(f"Processes took {spent} on {verdict.device}"))
    return Group(*lines)


def _calibration(stored: calibration.Stored) -> RenderableType:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for column in ("case", "noise", "scatter of processes", "A/A ratio"):
        table.add_column(column, overflow="fold")
    for case in stored.answer.cases:
        table.add_row(
            escape(case.case_id),
            case.noise,
            units.percent(case.process_cv),
            units.change(case.ratio),
        )
    limits = noise.THRESHOLDS[stored.answer.noise]
    said = [
        f"{stored.device_name} ({stored.device}) is {stored.answer.noise}: processes of the same "
        f"code scatter by {units.percent(stored.answer.process_cv)}",
        f"A gate screens with {limits.screen_pairs} pairs, confirms with {limits.confirm_pairs}, "
        f"and passes what is shown under {units.percent(limits.tolerance)}",
        *(f"{c} differs from itself: nothing can be compared here" for c in stored.answer.biased),
    ]
    return Group(table, *map(Text, said))


Kept = baselines.Baseline | calibration.Stored | counting.CounterBaseline


def _read(path: Path) -> Kept | None:
    if path.name == counting.FILE:
        return counting.load(path.parent)
    if path.name.endswith(f"{calibration.KIND}.json"):
        return files.read(path, calibration.Stored, "Remove it, and calibrate anew.")
    return files.read(path, baselines.Baseline, "Remove it, and set it anew.")


def _provenance(record: Kept) -> dict[str, object]:
    if isinstance(record, counting.CounterBaseline):
        return {
            "suite": " ".join(record.cases),
            "device": record.device,
            "device_name": f"{record.device}, torch {record.torch}",
            "commit": record.commit,
            "uncommitted": record.uncommitted,
            "run_id": "",
            "at": record.set_at,
            "cases": sum(map(len, record.cases.values())),
        }
    uncommitted = False  # a run of such code makes no baseline
    if isinstance(record, calibration.Stored):
        at, name, cases = record.at, record.device_name, len(record.answer.cases)
        uncommitted = record.uncommitted
    else:
        at, name = record.measured_at, record.environment.device_name
        cases = len(record.cases)
    return {
        "suite": record.suite,
        "device": record.device,
        "device_name": name,
        "commit": record.commit,
        "uncommitted": uncommitted,
        "run_id": record.run_id,
        "at": at,
        "cases": cases,
    }


class GateProgress:
    """A bar, and a line for each process that did not end ok."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            console=err,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> "GateProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, text: str, processes: int) -> None:
        self._bar.reset(self._task, description=text, total=processes)

    def ended(self, side: str, measurement: Measurement) -> None:
        self._bar.advance(self._task)
        if measurement.outcome is not Outcome.OK:
            detail = measurement.detail.partition("\n")[0]
            _say(f"{side}: {measurement.case_id}: {measurement.outcome}: {detail}")


def _require_writable(file: Path | None) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        there = file.exists()
        with file.open("a", encoding="utf-8"):
            pass
        if not there:
            file.unlink()  # an empty verdict would be taken for one
    except OSError as error:
        raise HarnessError(
            f"cannot write {file}: {error.strerror}", "Name a file that can be written."
        ) from None


def _say(text: str) -> None:
    err.print(text, highlight=False, markup=False, soft_wrap=True)


def _document(value: Sequence[object] | dict[str, object]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(text + "\n")
