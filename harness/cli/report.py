"""The commands `report` and `verify`: dated pages of recorded runs, and whether they still fit."""

import hashlib
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options
from harness.cli.options import say, show
from harness.errors import HarnessError
from harness.records import Run
from harness.report.series import cited, since
from harness.store import reader
from harness.suite import load as suites

SHOWN_LINES = 20
"""Of the differences between a report and its record."""
NEWEST, NO_RUN = "newest", since.NO_RUN
"""What `--against` and `--cite` take in place of runs."""


def written(
    recorded: Run,
    reports: Path,
    *,
    against: str = NEWEST,
    cite: str = NEWEST,
    notes: Path | None = None,
    author: str = "",
) -> Path:
    """The path of a new report.

    Args:
        against: A run of the same store, `none`, or `newest`: the newest earlier full run of the
            suite on the same GPU model.
        cite: Runs of the same store with commas between, `none`, or `newest`: those that say more.
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
        cited=cited.find(recorded, say) if cite == NEWEST else _cited(recorded, cite),
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


def _cited(recorded: Run, runs: str) -> tuple[Run, ...]:
    root = Path(recorded.folder).parent
    return () if runs == NO_RUN else tuple(reader.load(root, r) for r in runs.split(","))


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
        *("expectations", "rules", "cost", "suspects", "see_also"),
    )
    taken = {name: getattr(suite, name) for name in own}
    judged = replace(recorded.suite, left_out=len(missing), **taken)
    note = f"judged by the rules of {suite.path} (sha256 {suite.sha256[:12]}), not by its own"
    return replace(recorded, suite=judged, notes=(*recorded.notes, note), judged_by=suite.path)


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
            cited=_cited(run, given("cite", NO_RUN)),
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
