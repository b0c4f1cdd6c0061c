"""The commands `calibrate` and `baseline`: how noisy a node is, and what a gate compares with."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from harness import units
from harness.cli import options
from harness.cli.console import table
from harness.cli.options import command, document, out, say, show
from harness.cli.progress import GateProgress
from harness.gate import aa, baselines, calibration, counters, files, policy, records
from harness.gate.plan import Request
from harness.gate.records import Mode
from harness.gate.session import count
from harness.git.repository import try_git
from harness.store import reader
from harness.suite import load as suites

baseline = typer.Typer(
    name="baseline",
    help="Manage the stored baselines that a gate compares with.",
    no_args_is_help=True,
)


def calibrate(
    suite: options.SuiteArgument,
    only: options.FilterOption = None,
    pairs: Annotated[
        int, typer.Option(metavar="COUNT", min=calibration.MIN_PAIRS, help="A/A pairs per case.")
    ] = 12,
    as_json: options.JsonOption = False,
    store_root: options.StoreOption = options.STORE,
    baseline_folder: options.BaselinesOption = files.FOLDER,
    wait_for_gpu: options.WaitOption = 0.0,
) -> None:
    """Measure this machine's noise with A/A pairs (same commit twice); a gate uses the result.

    \b
    harness calibrate suites/gate.yaml

    Exit status: 0 calibrated; 3 two runs of the same code differ.
    """
    with GateProgress() as progress:
        stored = aa.calibrate(
            suites.load(suite, filters=only or ()),
            progress,
            say,
            wanted=pairs,
            store=store_root,
            baselines=baseline_folder,
            command=command(),
            wait_for_gpu_s=wait_for_gpu,
        )
    if as_json:
        document(asdict(stored))
    else:
        out.print(_calibration(stored))
        kept = files.path_of(baseline_folder, stored.model, stored.suite, calibration.KIND)
        say(f"Calibration: {kept}")
    raise typer.Exit(3 if stored.answer.biased else 0)


@baseline.command("set")
def set_(
    run_id: options.RunArgument = "latest",
    store_root: options.StoreOption = options.STORE,
    baseline_folder: options.BaselinesOption = files.FOLDER,
) -> None:
    """Make a finished run of committed code the baseline of its GPU model and suite.

    \b
    harness baseline set latest
    """
    author = (try_git(Path.cwd(), "config", "user.name") or "").strip()
    made = baselines.of_run(reader.load(store_root, run_id), author)
    path = files.path_of(baseline_folder, files.model_id(made.environment), made.suite)
    files.write(path, made)
    show(f"{path}: {len(made.cases)} cases at commit {made.commit[:10]}")
    for case_id, outcome in made.left_out.items():
        show(f"left out: {case_id} (outcome {outcome})")


@baseline.command("show")
def show_(
    as_json: options.JsonOption = False, baseline_folder: options.BaselinesOption = files.FOLDER
) -> None:
    """List the stored baselines and calibrations, and how old they are.

    \b
    harness baseline show
    """
    found = [
        (path, record)
        for path in (*sorted(baseline_folder.glob("*/*.json")), counters.path_of(baseline_folder))
        if (record := _read(path)) is not None
    ]
    if as_json:
        document([{"path": str(p), **_provenance(r)} for p, r in found])
        return
    rows = table("file", "device", "commit", "taken", "age", "cases", "by")
    for path, record in found:
        p = _provenance(record)
        age = f"{files.age_days(str(p['at'])):.0f} d"
        commit = str(p["commit"])[:10] + (records.UNCOMMITTED if p["uncommitted"] else "")
        card = str(p["device"])
        name = str(p["device_name"]) + (f", {card[:12]}" if card.startswith("GPU-") else "")
        shown = (str(p["at"]), age, str(p["cases"]), escape(str(p["author"])))
        rows.add_row(escape(str(path)), escape(name), commit, *shown)
    out.print(rows if found else f"no baselines in {baseline_folder}")


@baseline.command("counters")
def counters_(
    policy_file: options.PolicyOption = policy.DEFAULT,
    store_root: options.StoreOption = options.STORE,
    baseline_folder: options.BaselinesOption = files.FOLDER,
) -> None:
    """Count the working tree's steps and store the counts, to accept an intended change.

    \b
    harness baseline counters

    `harness gate --counters` compares with the stored file. Commit it with the change.
    """
    request = Request(
        mode=Mode.COUNTERS,
        policy=policy_file,
        store=store_root,
        baselines=baseline_folder,
        command=command(),
    )
    with GateProgress() as progress:
        made = count(request, progress, say)
    cases = sum(map(len, made.cases.values()))
    show(f"{counters.path_of(baseline_folder)}: {cases} cases, torch {made.torch}")


def _calibration(stored: calibration.Stored) -> RenderableType:
    answer = stored.answer
    rows = table("case", "noise", "variation between processes", "A/A ratio")
    for case in answer.cases:
        variation, ratio = units.percent(case.process_cv), units.change(case.ratio)
        rows.add_row(escape(case.case_id), case.noise, variation, ratio)
    limits = calibration.THRESHOLDS[answer.noise]
    lines = [
        f"{stored.device_name} ({stored.device}) is {answer.noise}: processes of the same code "
        f"vary by {units.percent(answer.process_cv)}",
        f"A gate here screens with {limits.screen_pairs} pairs, confirms with "
        f"{limits.confirm_pairs}, and passes changes proven to be below "
        f"{units.percent(limits.tolerance)}",
        f"Builds: {stored.builds}",
        *(
            f"{c}: two runs of the same code differ; this machine is too noisy"
            for c in answer.biased
        ),
    ]
    return Group(rows, *map(Text, lines))


Kept = baselines.Baseline | calibration.Stored | counters.CounterBaseline


def _read(path: Path) -> Kept | None:
    if path.name == counters.FILE:
        return counters.load(path.parent)
    if path.name.endswith(f"{calibration.KIND}.json"):
        return files.read(path, calibration.Stored, "Remove it, then: harness calibrate SUITE")
    return files.read(path, baselines.Baseline, "Remove it, then: harness baseline set RUN")


def _provenance(record: Kept) -> dict[str, object]:
    run_id, author, uncommitted = "", "", False  # a run of uncommitted code makes no baseline
    match record:
        case counters.CounterBaseline():
            suite, name = " ".join(record.cases), f"{record.device}, torch {record.torch}"
            at, uncommitted = record.set_at, record.uncommitted
            cases = sum(map(len, record.cases.values()))
        case calibration.Stored():
            suite, name, run_id = record.suite, record.device_name, record.run_id
            at, uncommitted, cases = record.at, record.uncommitted, len(record.answer.cases)
        case baselines.Baseline():
            suite, name, run_id = record.suite, record.environment.device_name, record.run_id
            at, cases, author = record.measured_at, len(record.cases), record.author
    return {
        "suite": suite,
        "device": record.device,
        "device_name": name,
        "commit": record.commit,
        "uncommitted": uncommitted,
        "run_id": run_id,
        "at": at,
        "cases": cases,
        "author": author,
    }
