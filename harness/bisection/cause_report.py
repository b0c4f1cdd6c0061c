"""What a search for causes came to, for a person: one sentence, and a dated page of Markdown."""

import datetime
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.analysis.minimal import Part
from harness.bisection.cause_session import CausesResult
from harness.bisection.report import dated, measured, reading
from harness.ci.text import cell, code


def sentence(result: CausesResult) -> str:
    """The answer."""
    causes, begun = result.causes, result.begun
    told = "; ".join(_part(result, part) for part in causes.parts)
    if result.found:
        return f"{begun.criterion} is moved by {told}"
    if causes.parts:
        return (
            f"{begun.criterion} is moved by {told}; undecided whether that is all: {causes.reason}"
        )
    if result.resumable:
        return f"no cause is named: {causes.reason}"
    names = ", ".join(f.name for f in result.fixed) or "nothing that is recorded"
    return f"no cause is named: {causes.reason}. What could not be varied here: {names}"


def _part(result: CausesResult, part: Part) -> str:
    names = " with ".join(
        f"{c} ({c.then} in the first run, {c.now} in the second)" for c in result.named(part.mask)
    )
    if part.comparison is not None:
        changed = part.comparison
        # Where the second run is the faster one, the sides were exchanged for the test.
        ratio = 1 / changed.ratio if changed.case_id.startswith("good") else changed.ratio
        sure = "" if part.confirmed else ", not confirmed"
        return f"{names}: {ratio - 1:+.1%} in {changed.pairs} new pairs{sure}"
    before, after = result.values.get(part.base), result.values.get(part.base | part.mask)
    if before and after:
        return f"{names}: {before[0]:g} becomes {after[0]:g}"
    return names


def document(result: CausesResult) -> dict[str, Any]:
    """The same for a program."""
    return {
        "bisection": result.folder.name,
        "folder": str(result.folder),
        "found": result.found,
        "sentence": sentence(result),
        "runs": list(result.begun.runs),
        "case": result.begun.case.case_id,
        "criterion": asdict(result.begun.criterion),
        "processes": result.processes,
        "wall_s": result.wall_s,
        "resumable": result.resumable,
        "notes": result.notes,
        "causes": [
            {
                "differences": [asdict(c) for c in result.named(part.mask)],
                "confirmed": part.confirmed,
                "comparison": asdict(part.comparison) if part.comparison else None,
            }
            for part in result.causes.parts
        ],
        "varied": [asdict(c) for c in result.begun.causes],
        "not_varied": [asdict(f) for f in result.fixed],
        "measured": [
            {
                "differences": [c.name for c in result.named(mask)],
                "values": list(values),
                "moves": result.decided.get(mask),
            }
            for mask, values in result.values.items()
        ],
        "left_out": [
            {"differences": [c.name for c in result.named(x.position)], "reason": x.reason}
            for x in result.left_out
        ],
    }


def write(result: CausesResult, reports: Path, date: datetime.date) -> Path:
    """Write the page; one more version where there is one of that date.

    Raises:
        ReportError: It cannot be written.
    """
    return dated(reports, date, f"Causes in {result.begun.case.case_id}", markdown(result, date))


def markdown(result: CausesResult, date: datetime.date) -> str:
    """The page as text."""
    return "\n".join(_lines(result, date)) + "\n"


def _lines(result: CausesResult, date: datetime.date) -> Iterator[str]:
    begun = result.begun
    yield f"# What moved {cell(begun.case.case_id)}"
    yield ""
    yield f"{date:%Y-%m-%d}. **{cell(sentence(result), 900)}.**"
    yield ""
    yield f"- Criterion: {cell(str(begun.criterion))}"
    yield f"- First run: {code(begun.runs[0])}"
    yield f"- Second run: {code(begun.runs[1])}"
    at = code(begun.commit[:10]) if begun.commit else "the working tree as it is"
    yield f"- Code: {at}, the same for both"
    yield from measured(result, f"{len(result.values)} configurations")
    yield ""
    yield "## What was varied"
    yield ""
    yield "| difference | first run | second run | moves it |"
    yield "|:--|:--|:--|:--|"
    named = {i for part in result.causes.parts for i in part.items}
    for i, cause in enumerate(begun.causes):
        alone = result.decided.get(1 << i)
        moves = "**yes**" if i in named else "no" if result.found or alone is False else "unknown"
        yield f"| {cell(str(cause))} | {cell(cause.then)} | {cell(cause.now)} | {moves} |"
    if result.fixed:
        yield ""
        yield "## What could not be varied here"
        yield ""
        yield "| difference | first run | second run | here | why |"
        yield "|:--|:--|:--|:--|:--|"
        for f in result.fixed:
            shown = " | ".join(cell(text) for text in (f.name, f.then, f.now, f.here, f.why))
            yield f"| {shown} |"
    yield ""
    yield "## What was measured"
    yield ""
    yield "| taken over from the second run | processes | reading | nearer to the second run |"
    yield "|:--|--:|--:|:--|"
    full = (1 << len(begun.causes)) - 1
    for mask, values in result.values.items():
        names = ", ".join(str(c) for c in result.named(mask)) or "nothing"
        names = "everything" if mask == full else names
        moves = {True: "yes", False: "no", None: ""}[result.decided.get(mask)]
        shown = reading(begun.criterion, statistics.median(values))
        yield f"| {cell(names)} | {len(values)} | {shown} | {moves} |"
    if result.left_out:
        yield ""
        yield "Left out:"
        yield ""
        for x in result.left_out:
            names = ", ".join(str(c) for c in result.named(x.position)) or "nothing"
            yield f"- with {cell(names)}: {cell(x.reason, 500)}"
