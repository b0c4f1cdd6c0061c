"""The command `report`: dated pages of recorded runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from harness import units
from harness.analysis import verdict as verdicts
from harness.analysis.dead_axes import dead_axes
from harness.cli import console, options
from harness.cli.options import out, say, show
from harness.errors import HarnessError
from harness.records import CaseSummary, Run
from harness.report import conditions, text
from harness.report.series import since
from harness.report.series.rules import judged_by
from harness.store import reader

SHORT_TABLE = 8
"""Cases up to which a run ends with a table of them; the report has every table."""
LATEST, NEWEST, NO_RUN = "latest", "newest", since.NO_RUN
"""What the run and `--against` may be beside ids."""


def written(recorded: Run, reports: Path, *, against: str = NEWEST) -> Path:
    """The path of a new report. `against` is a run of the same store, `none`, or `newest`: the
    newest earlier full run of the suite on the same GPU model."""
    from harness.report.series import pages  # imports matplotlib, which is slow

    before = since.earlier(recorded, say)
    if against == NEWEST:
        device = recorded.environment.device_name
        against = next((name for name in reversed(before) if before[name] == device), NO_RUN)
    return pages.write(recorded, reports, _compared(recorded, against), len(before) + 1)


def _compared(recorded: Run, against: str) -> Run | None:
    """The earlier run of a comparison; a HarnessError if it is absent, or the run itself."""
    if against == NO_RUN:
        return None
    before = reader.load(Path(recorded.folder).parent, against)
    if before.run_id == recorded.run_id:
        raise HarnessError(
            f"--against {before.run_id} is the run itself",
            f"Name another: harness list runs --suite {recorded.suite.name}; or --against none.",
        )
    return before


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
    recorded = judged_by(rules or "", reader.load(store_root, run_id))
    page = written(recorded, reports, against=against)
    conclude(recorded, page)


def conclude(recorded: Run, page: Path | None) -> NoReturn:
    """Show the few lines of a run that a person reads first, and exit with its verdict."""
    cases, verdict = verdicts.of_run(recorded)
    if len(cases) <= SHORT_TABLE:
        show_cases(recorded, cases)
    out.print(console.ending(recorded, cases, verdict, page))
    raise typer.Exit(verdict.decision.exit_status)


def show_cases(recorded: Run, cases: Sequence[CaseSummary]) -> None:
    """The table of cases, what programs ran, and what is odd."""
    out.print(console.summaries(cases))
    for program in text.ran_lines(recorded):
        show(program)
    dead = map(text.dead_axis_sentence, dead_axes(recorded, cases))
    for note in (*recorded.notes, *dead, *conditions.flag_sentences(recorded)):
        show(f"note: {note.replace('`', '')}")
