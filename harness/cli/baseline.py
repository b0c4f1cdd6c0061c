"""The command `baseline`: what a gate compares with."""

from pathlib import Path

import typer
from rich.markup import escape

from harness.cli import options
from harness.cli.console import table
from harness.cli.options import command, document, out, say, show
from harness.cli.progress import GateProgress
from harness.gate import baselines, counters, files, policy, records
from harness.gate.plan import Request
from harness.gate.records import Mode
from harness.gate.session import count
from harness.git.repository import try_git
from harness.store import reader

baseline = typer.Typer(
    name="baseline",
    help="Manage the stored baselines that a gate compares with.",
    no_args_is_help=True,
)


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
    """List the stored baselines, and how old they are.

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


Kept = baselines.Baseline | counters.CounterBaseline


def _read(path: Path) -> Kept | None:
    if path.name == counters.FILE:
        return counters.load(path.parent)
    return files.read(path, baselines.Baseline, "Remove it, then: harness baseline set RUN")


def _provenance(record: Kept) -> dict[str, object]:
    run_id, author, uncommitted = "", "", False  # a run of uncommitted code makes no baseline
    match record:
        case counters.CounterBaseline():
            suite, name = " ".join(record.cases), f"{record.device}, torch {record.torch}"
            at, uncommitted = record.set_at, record.uncommitted
            cases = sum(map(len, record.cases.values()))
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
