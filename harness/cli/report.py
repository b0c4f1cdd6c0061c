"""The commands `report` and `verify`: dated pages of recorded runs, and whether they still fit."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from difflib import unified_diff
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from harness.analysis import overhead as sampling
from harness.analysis import summary
from harness.analysis import verdict as gate
from harness.analysis.causes import in_output
from harness.analysis.dead_axes import oddities
from harness.analysis.suspects import together
from harness.cli import console, options
from harness.cli.options import document, out, say, show
from harness.errors import HarnessError
from harness.records import CaseSummary, Run, Verdict
from harness.report import text
from harness.report.series import since
from harness.store import reader
from harness.suite import load as suites

SHORT_TABLE = 8
"""Cases up to which a run ends with a table of them; the report has every table."""
SHOWN_LINES = 20
"""Of the differences between a report and its record."""
NEWEST, NO_RUN = "newest", since.NO_RUN
"""What `--against` takes in place of a run."""


def written(
    recorded: Run,
    reports: Path,
    *,
    against: str = NEWEST,
    notes: Path | None = None,
    author: str = "",
) -> Path:
    """The path of a new report.

    Args:
        against: A run of the same store, `none`, or `newest`: the newest earlier full run of the
            suite on the same GPU model.
    """
    from harness.report import context  # imports matplotlib, which is slow

    before = since.earlier(recorded, say)
    if against == NEWEST:
        device = recorded.environment.device_name
        against = next((h.run_id for h in reversed(before) if h.device == device), NO_RUN)
    if author != " ".join(author.split()) or not author.isprintable():
        raise HarnessError(f"--author {author!r} is not a name on one line", "Write a name.")
    beside = context.Beside(
        against=_compared(recorded, against),
        notes=_stored(notes, Path(recorded.folder)) if notes else "",
        author=author,
    )
    return context.write(recorded, reports, beside, len(before) + 1)


def _compared(recorded: Run, against: str) -> Run | None:
    """The earlier run of a comparison.

    Raises:
        HarnessError: It is absent, the run itself, or has none of its cases.
    """
    if against == NO_RUN:
        return None
    before = reader.load(Path(recorded.folder).parent, against)
    here, there = ({c.case_id for c in r.suite.cases} for r in (recorded, before))
    if before.run_id == recorded.run_id or not here & there:
        what = "the run itself" if here & there else f"a run without a case of {recorded.run_id}"
        raise HarnessError(
            f"--against {before.run_id} is {what}",
            f"Name another: harness list runs --suite {recorded.suite.name}; or --against none.",
        )
    return before


def _stored(notes: Path, folder: Path) -> str:
    """The name of a copy of the notes in the run's folder, which is there for `verify`.

    Raises:
        HarnessError: The notes cannot be read, or the copy cannot be written.
    """
    if not notes.is_file() and (folder / notes.name).is_file():
        return notes.name  # as the command in a report names it
    try:
        text = notes.read_text(encoding="utf-8")
        name = f"notes-{hashlib.sha256(text.encode()).hexdigest()[:8]}.md"
        (folder / name).write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise HarnessError(
            f"cannot read --notes {notes}, or copy it to {folder}: {why}",
            "Name a Markdown file; its copy goes to the run's folder.",
        ) from error
    return name


def judged_by(rules: str | None, recorded: Run) -> Run:
    """The run with the question, rules and expectations of another suite file."""
    if rules is None:
        return recorded
    suite = suites.load(rules)
    there = {c.case_id for c in recorded.suite.cases}
    missing = [c for c in suite.cases if c.case_id not in there]
    if len(missing) == len(suite.cases):
        raise HarnessError(
            f"{suite.path} has no case of {recorded.run_id}, so its rules say nothing about it"
        )
    own = (
        *("question", "parts", "decides_for", "peers", "labels", "axis_names"),
        *("expectations", "rules", "cost", "suspects"),
    )
    taken = {name: getattr(suite, name) for name in own}
    judged = replace(recorded.suite, left_out=len(missing), **taken)
    note = f"judged by the rules of {suite.path} (sha256 {suite.sha256[:12]}), not by its own"
    return replace(recorded, suite=judged, notes=(*recorded.notes, note), judged_by=suite.path)


def report_(
    run_id: options.RunArgument = "latest",
    rules: options.RulesOption = None,
    against: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Compare with this run, or none; by default the newest earlier full run of the "
            "suite on this GPU model.",
        ),
    ] = NEWEST,
    notes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Markdown notes of a person, shown as their own section."
        ),
    ] = None,
    author: Annotated[str, typer.Option(metavar="NAME", help="Author that the report names.")] = "",
    as_json: options.JsonOption = False,
    store_root: options.StoreOption = options.STORE,
    reports: options.ReportsOption = options.REPORTS,
) -> None:
    """Write a new dated report of a recorded run; existing reports are not changed.

    \b
    harness report latest
    harness report latest --against 20261121-0730 --notes notes.md --author "A. Name"
    """
    recorded = judged_by(rules, reader.load(store_root, run_id))
    page = written(recorded, reports, against=against, notes=notes, author=author)
    conclude(recorded, page, as_json)


def conclude(
    recorded: Run, markdown: Path | None, as_json: bool, *, whole: bool = True
) -> NoReturn:
    """Show the run with its verdict, and its report if there is one, and exit with the verdict.

    Args:
        whole: With every case, rule and note; otherwise the few lines that a person reads first.
    """
    cases, verdict = gate.of_run(recorded)
    if as_json:
        document(_conclusion(recorded, cases, verdict, markdown))
        raise typer.Exit(verdict.decision.exit_status)
    if whole or len(cases) <= SHORT_TABLE:
        _show_cases(recorded, cases)
    if whole:
        for sentence in text.together_sentences(together(cases), recorded.suite.axis):
            show(sentence)
        out.print(console.verdict(verdict))
        if used := sampling.time_use(recorded):
            show(f"Time: {text.time_use_sentence(used)}")
        show(f"Run: {recorded.folder}")
        if markdown:
            show(f"Report: {markdown}")
    else:
        out.print(console.ending(recorded, cases, verdict, markdown))
    raise typer.Exit(verdict.decision.exit_status)


def _show_cases(recorded: Run, cases: Sequence[CaseSummary]) -> None:
    """The table of cases, what programs ran, and what is odd."""
    out.print(console.summaries(cases))
    for program in text.ran_lines(recorded):
        show(program)
    odd = text.oddity_sentences(oddities(recorded, cases))
    seen = (
        f"{c.cases[0]}{f' (+{len(c.cases) - 1} more)' if c.cases[1:] else ''}: {c.evidence}"
        for c in in_output(recorded)
    )
    for note in (*recorded.notes, *odd, *seen, *text.flag_sentences(recorded)):
        show(f"note: {note.replace('`', '')}")


def _conclusion(
    recorded: Run, cases: Sequence[CaseSummary], verdict: Verdict, markdown: Path | None
) -> dict[str, object]:
    return {
        "run": recorded.run_id,
        "folder": recorded.folder,
        "finished": bool(recorded.ended_at),
        "stopped": asdict(recorded.stopped) if recorded.stopped else None,
        "device": recorded.environment.device_name,
        "report": str(markdown) if markdown else None,
        "self_test": asdict(recorded.self_test) if recorded.self_test else None,
        "time": asdict(used) if (used := sampling.time_use(recorded)) else None,
        "spread": [asdict(s) for s in summary.spreads(recorded)],
        "verdict": asdict(verdict),
        "together": [asdict(t) for t in together(cases)],
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


def verify(
    pages: Annotated[
        list[Path], typer.Argument(metavar="REPORT...", help="Reports of runs, as Markdown files.")
    ],
    store_root: options.StoreOption = options.STORE,
) -> None:
    """Render reports again from their records, and show where they differ; figures aside.

    \b
    harness verify reports/*Report*.md --store reports/runs
    """
    from harness.report import context  # imports matplotlib, which is slow

    differ = False
    for page in pages:
        try:
            made = context.written(page.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise HarnessError(
                f"cannot read {page}: {why}", "Name a page that `harness report` wrote."
            ) from error
        if made is None:
            raise HarnessError(
                f"{page} does not say from which run it was made",
                "Name a report that `harness run` or `harness report` has written.",
            )
        run, given = reader.load(store_root, made.run_id), made.options.get
        run = judged_by(given("rules"), run)
        against, author = given("against", NO_RUN), given("author", "")
        beside = context.Beside(
            against=_compared(run, against),
            notes=given("notes", ""),
            author=author,
        )
        for path, now in context.pages(run, page, made.mark, beside).items():
            there = path.read_text(encoding="utf-8") if path.is_file() else ""
            lines = list(unified_diff(there.splitlines(), now.splitlines(), str(path), "now", n=0))
            differ = differ or bool(lines)
            show(f"{path}: {'differs' if lines else 'as its record says'}")
            for line in lines[2 : 2 + SHOWN_LINES]:
                show(f"  {line}")
    raise typer.Exit(int(differ))
