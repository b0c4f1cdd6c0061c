"""The result of a bisection: one sentence, a document for programs, a dated page."""

import datetime
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import units
from harness.bisect.criteria import Criterion, CriterionKind
from harness.bisect.search import DOWN
from harness.bisect.session import BisectResult
from harness.records import METRICS
from harness.report.markdown import cell, clipped, code, fenced, plain
from harness.report.series import render
from harness.report.series.gate_text import because
from harness.report.series.machine_code import ir_table, kernel_table


def sentence(result: BisectResult) -> str:
    """The answer, without its first capital and full stop."""
    commits = [result.request.history[p] for p in result.conclusion.culprits]
    because = _because(result)
    if result.found:
        name = f"{commits[0].short} is the first bad commit"
        return f"{name} ({plain(commits[0].subject)}): {because}"
    if len(commits) > 1:
        names = ", ".join(c.short for c in commits)
        return f"the first bad commit is one of {names}; only the last is measurable: {because}"
    if commits:
        return f"no commit is confirmed; {commits[0].short} is the most likely: {because}"
    return f"no commit was found: {because}"


def write(result: BisectResult, reports: Path, date: datetime.date) -> Path:
    """Write the page, or a HarnessError; the next version if one of that date exists."""
    subject = f"Bisect of {result.request.case.case_id}"
    page = markdown(result, date).encode()
    return render.write(reports, date, subject, lambda name, _: {name: page})


def markdown(result: BisectResult, date: datetime.date) -> str:
    """The page as text."""
    values: dict[str, Any] = {
        "result": result,
        "answer": sentence(result),
        "date": date.isoformat(),
        "command": shlex.join(result.request.command),
        "calls": lambda number: f"{number:.4g}",
        "reading": lambda values: _median(result.request.criterion, values),
        "change": lambda ratio: units.ratio(ratio, "change"),
        "zip": zip,
        "kernels": kernel_table(result.profile.kernels if result.profile else (), cases=False),
        "ir": ir_table(result.profile.kernels if result.profile else ()),
        "text": cell,
        "code": code,
        "block": lambda text: fenced(clipped(text, 4000)).strip("\n"),
    }
    return render.rendered("bisection.md.j2", values)


def _because(result: BisectResult) -> str:
    """The evidence for the conclusion."""
    conclusion, found = result.conclusion, result.conclusion.comparison
    history, criterion = result.request.history, result.request.criterion
    why = because(conclusion.facts)
    if conclusion.confirmed and found is not None and conclusion.good is not None:
        good = history[conclusion.good].short
        title = str(criterion)
        if criterion.kind is CriterionKind.METRIC:
            title = units.title(criterion.name)
        pairs, p = found.ratio.n, found.ratio.p
        ratio = found.ratio.inverse if found.case_id == DOWN else found.ratio
        moved = f"{title} {units.ratio(ratio, 'change')} against {good} before it"
        return f"{moved}, confirmed by {pairs} new pairs (p = {p:.2g})"
    if not (criterion.exact and conclusion.culprits and conclusion.good is not None):
        ends = ((history[at].short, result.values[at]) for at in (0, -1))
        read = ", ".join(f"{values[0]:g} at {commit}" for commit, values in ends if values)
        if criterion.kind is CriterionKind.COUNTER and not conclusion.culprits and read:
            return f"{why} ({criterion.name}: {read})"
        return why
    before, after = (result.values[p] for p in (conclusion.good, conclusion.culprits[-1]))
    if not (before and after):
        return why
    at = f"{history[conclusion.good].short} before it"
    match criterion.kind, after[0] > before[0]:
        case CriterionKind.COUNTER, _:
            return f"{criterion.name} is {after[0]:g}, but {before[0]:g} at {at}"
        case CriterionKind.OUTCOME, True:
            return f"it ends with {criterion.name}, but {at} does not"
    return f"it does not end with {criterion.name}, but {at} does"


def _median(criterion: Criterion, values: Sequence[float]) -> str:
    """The median of the values, in the unit of the criterion; empty without values."""
    if not values:
        return ""
    value = statistics.median(values)
    if criterion.kind is CriterionKind.OUTCOME:
        return "yes" if value else "no"
    known = criterion.kind is CriterionKind.METRIC and criterion.name in METRICS
    return units.plain(criterion.name, value, 3) if known else f"{value:.6g}"
