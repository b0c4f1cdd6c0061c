"""The command `report`: dated pages of recorded runs."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from harness import units
from harness.analysis.study import Study
from harness.cli import console, options
from harness.cli.options import out, say, show
from harness.errors import HarnessError
from harness.records import Run
from harness.report import conditions, text
from harness.report.series import since
from harness.report.series.rules import judged_by
from harness.store import reader

SHORT_TABLE = 8
"""Cases up to which a run ends with a table of them; the report has every table."""
LATEST, NEWEST, NO_RUN = "latest", "newest", since.NO_RUN
"""What the run and `--against` may be beside ids."""


def written(of: Study, reports: Path, *, against: str = NEWEST) -> Path:
    """The path of a new report. `against` is a run of the same store, `none`, or `newest`: the
    newest earlier full run of the suite on the same GPU model."""
    from harness.report.series import pages  # imports matplotlib, which is slow

    recorded, before = of.run, since.earlier(of.run, say)
    if against == NEWEST:
        device = recorded.environment.device_name
        against = next((name for name in reversed(before) if before[name] == device), NO_RUN)
    return pages.write(of, reports, _compared(recorded, against), len(before) + 1)


def _compared(recorded: Run, against: str) -> Study | None:
    """The earlier run of a comparison; a HarnessError if it is absent, or the run itself."""
    if against == NO_RUN:
        return None
    before = reader.load(Path(recorded.folder).parent, against)
    if before.run_id == recorded.run_id:
        raise HarnessError(
            f"--against {before.run_id} is the run itself",
            f"Name another: harness list runs --suite {recorded.suite.name}; or --against none.",
        )
    return Study(before)


def report_(
    run_id: options.RunArgument = LATEST,
    rules: options.RulesOption = None,
    against: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Compare with this run, or none; by default the newest earlier full run of the "
            "suite on this GPU model.",
        ),
    ] = NEWEST,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Render all reports in the folder again from their records, and the list of the "
            "newest in its README.md.",
        ),
    ] = False,
    store_root: options.StoreOption = options.STORE,
    reports: options.ReportsOption = options.REPORTS,
) -> None:
    """Write a new dated report of a recorded run; existing reports are not changed.

    \b
    harness report latest
    harness report latest --against 20261121-0730
    harness report --all    # after a change of words, rules or records
    """
    if every:
        from harness.report.series import every_page  # imports matplotlib, which is slow

        if rules or against != NEWEST or run_id != LATEST:
            raise HarnessError(
                "--all renders each report as it was made", "Name only --store and --reports."
            )
        changed = every_page.write(reports, store_root)
        for path in changed:
            show(str(path))
        show(f"{units.plural('file', len(changed))} changed in {reports}")
        return
    of = Study(judged_by(rules or "", reader.load(store_root, run_id)))
    conclude(of, written(of, reports, against=against))


def conclude(of: Study, page: Path | None) -> NoReturn:
    """Show the few lines of a run that a person reads first, and exit with its verdict."""
    if len(of.summaries) <= SHORT_TABLE:
        show_cases(of)
    out.print(console.ending(of, page))
    raise typer.Exit(of.verdict.decision.exit_status)


def show_cases(of: Study) -> None:
    """The table of cases, what programs ran, and what is odd."""
    out.print(console.summaries(of.summaries))
    for program in text.ran_lines(of.run):
        show(program)
    dead = map(text.dead_axis_sentence, of.dead_axes)
    for note in (*of.run.notes, *dead, *conditions.flag_sentences(of.run)):
        show(f"note: {note.replace('`', '')}")
