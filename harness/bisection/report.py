"""What a bisection came to, for a person: one sentence, and a dated page of Markdown."""

import datetime
import re
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import units
from harness.bisection.cause_session import CausesResult
from harness.bisection.criteria import Criterion, Kind
from harness.bisection.session import Level, Result
from harness.ci.text import cell, clipped, code, plain
from harness.errors import ReportError

SHOWN = 0.001
"""Probability from which a commit that was not measured is listed all the same."""


def sentence(result: Result) -> str:
    """The answer."""
    first, last = result.levels[0], result.levels[-1]
    level = last if last.conclusion.found else first
    conclusion, commits = level.conclusion, [level.history[p] for p in level.conclusion.culprits]
    why = _why(level, result.begun.criterion)
    if conclusion.found:
        commit = commits[0]
        where = "the first bad commit"
        if level is not first:
            where += f" on the side that {first.history[_at(first)].short} merged"
        return f"{commit.short} is {where}, {plain(commit.subject)!r}: {why}"
    if len(commits) > 1:
        names = ", ".join(c.short for c in commits)
        return f"the first bad commit is one of {names}; all but the last cannot be measured: {why}"
    if commits:
        return f"no commit is named; {commits[0].short} is the likeliest: {why}"
    return f"no commit is named: {why}"


def _why(level: Level, criterion: Criterion) -> str:
    """What the conclusion rests on."""
    conclusion, found = level.conclusion, level.conclusion.comparison
    if conclusion.confirmed and found is not None and conclusion.good is not None:
        # Where the step went down, the sides were exchanged for the test.
        down = found.case_id.startswith("good")
        ratio = 1 / found.ratio if down else found.ratio
        return (
            f"{criterion} {ratio - 1:+.1%} against {level.history[conclusion.good].short} before "
            f"it, in {found.pairs} new pairs (p = {found.p_value:.2g})"
        )
    ends = ((level.history[at].short, level.values[at]) for at in (0, -1))
    read = ", ".join(f"{values[0]:g} at {commit}" for commit, values in ends if values)
    if criterion.kind is Kind.COUNTER and not conclusion.culprits and read:
        return f"{conclusion.reason} ({criterion.name}: {read})"
    if not (criterion.exact and conclusion.culprits and conclusion.good is not None):
        return conclusion.reason
    before, after = level.values[conclusion.good], level.values[_at(level)]
    if not (before and after):
        return conclusion.reason
    at = level.history[conclusion.good].short
    match criterion.kind:
        case Kind.COUNTER:
            return f"{criterion.name} is {after[0]:g}, and {before[0]:g} in {at} before it"
        case Kind.OUTCOME if after[0] > before[0]:
            return f"it ends {criterion.name}, and {at} before it does not"
        case Kind.OUTCOME:
            return f"it no longer ends {criterion.name}, as {at} before it does"
        case _ if after[0] > before[0]:
            return f"{criterion.name} runs, and in {at} before it does not"
    return f"{criterion.name} no longer runs, as in {at} before it"


def document(result: Result) -> dict[str, Any]:
    """The same for a program."""
    culprit = result.culprit
    return {
        "bisection": result.folder.name,
        "folder": str(result.folder),
        "found": result.found,
        "culprit": asdict(culprit) if culprit else None,
        "sentence": sentence(result),
        "case": result.begun.case.case_id,
        "criterion": asdict(result.begun.criterion),
        "processes": result.processes,
        "wall_s": result.wall_s,
        "resumable": result.resumable,
        "notes": result.notes,
        "histories": [
            {
                "conclusion": asdict(level.conclusion),
                "step": level.step,
                "noise": level.noise,
                "commits": [
                    {**asdict(c), "probability": p, "values": v}
                    for c, p, v in zip(
                        level.history, level.probabilities, level.values, strict=True
                    )
                ],
                "left_out": [{"commit": x.commit, "reason": x.reason} for x in level.left_out],
            }
            for level in result.levels
        ],
    }


def write(result: Result, reports: Path, date: datetime.date) -> Path:
    """Write the page; one more version where there is one of that date.

    Raises:
        ReportError: It cannot be written.
    """
    return dated(reports, date, f"Bisect of {result.begun.case.case_id}", markdown(result, date))


def dated(reports: Path, date: datetime.date, subject: str, text: str) -> Path:
    """Write a page under a name that says when and of what, and which version it is.

    Raises:
        ReportError: It cannot be written.
    """
    subject = re.sub(r'[\x00-\x1f/\\:*?"<>|]+', "-", subject)
    version = 1
    while True:
        path = reports / f"{date:%Y-%m-%d} Test Engineer Report - {subject} v{version}.md"
        try:
            reports.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:
            version += 1
        except OSError as error:
            raise ReportError(f"{path}: the report cannot be written: {error.strerror}") from error


def reading(criterion: Criterion, value: float) -> str:
    """A reading of the criterion, for a person."""
    if criterion.kind is Kind.METRIC and criterion.name == "step_s":
        return units.duration(value)
    if criterion.kind is Kind.METRIC and criterion.name == "peak_memory_bytes":
        return units.size(value)
    if criterion.kind in (Kind.OUTCOME, Kind.KERNEL):
        return "yes" if value else "no"
    return f"{value:.6g}"


def markdown(result: Result, date: datetime.date) -> str:
    """The page as text."""
    return "\n".join(_lines(result, date)) + "\n"


def measured(result: Result | CausesResult, what: str) -> Iterator[str]:
    """Where and how a search measured `what`, and how it goes on: items of a list."""
    if (here := result.begun.environment) is not None:
        versions = ", ".join(f"{n} {here.versions.get(n)}" for n in ("torch", "triton", "python"))
        yield f"- Measured on {cell(here.device_name)}, {cell(here.hostname)}; {versions}"
    took = f"this command took {result.wall_s / 60:.1f} minutes"
    yield f"- {result.processes} processes of {what}; {took}"
    yield f"- Command: {code(shlex.join(result.begun.command))}"
    yield f"- State, log and output of every process: {code(str(result.folder))}"
    yield from (f"- Note: {cell(note)}" for note in result.notes)
    if result.resumable:
        yield f"- Go on with {code(f'harness bisect --resume {result.folder.name}')}"


def _lines(result: Result, date: datetime.date) -> Iterator[str]:
    begun = result.begun
    yield f"# Bisect of {cell(begun.case.case_id)}"
    yield ""
    yield f"{date:%Y-%m-%d}. **{cell(sentence(result), 600)}**"
    yield ""
    yield f"- Criterion: {cell(str(begun.criterion))}"
    good, bad = begun.history[0], begun.history[-1]
    for name, commit in (("Good", good), ("Bad", bad)):
        yield f"- {name}: {code(commit.short)} {cell(commit.subject)}"
    read = sum(1 for level in result.levels for values in level.values if values)
    yield from measured(result, f"{read} commits; {len(begun.history)} lie from good to bad")
    for number, level in enumerate(result.levels):
        yield from _level(level, number, result)


def _level(level: Level, number: int, result: Result) -> Iterator[str]:
    yield ""
    yield "## The history" if number == 0 else f"## The side that was merged ({number})"
    yield ""
    yield f"Conclusion: {cell(_why(level, result.begun.criterion), 600)}."
    if level.step is not None and level.noise is not None:
        yield (
            f"Bad over good is {level.step - 1:+.2%}; one process scatters by {level.noise:.2%}."
        )
    if level.conclusion.culprits:
        commit = level.history[level.conclusion.culprits[-1]]
        yield ""
        yield f"{code(commit.sha)} by {cell(commit.author)}, {cell(commit.date)}:"
        yield ""
        yield "```text"
        yield plain(commit.subject).replace("```", "'''")
        if summary := result.summaries[number]:
            yield ""
            yield plain(clipped(summary, 4000)).replace("```", "'''")
        yield "```"
    yield ""
    yield "| commit | | processes | reading | probability |"
    yield "|:--|:--|--:|--:|--:|"
    left_out = {x.position: x.reason for x in level.left_out}
    for position, commit in enumerate(level.history):
        values, chance = level.values[position], level.probabilities[position]
        if not values and chance < SHOWN and position not in left_out:
            continue
        shown = reading(result.begun.criterion, statistics.median(values)) if values else ""
        if position in left_out:
            shown = "left out"
        mark = " (merge)" if commit.merge else ""
        yield (
            f"| {code(commit.short)} | {cell(commit.subject, 80)}{mark} | {len(values) or ''} "
            f"| {shown} | {chance:.1%} |"
        )
    if left_out:
        yield ""
        yield "Left out:"
        yield ""
        yield from (
            f"- {code(level.history[p].short)}: {cell(reason, 500)}"
            for p, reason in left_out.items()
        )


def _at(level: Level) -> int:
    return level.conclusion.culprits[-1]
