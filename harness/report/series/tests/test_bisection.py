"""The sentence and the page of a bisection, from results made by hand.

To accept a change of the pages: python -m harness.report.series.tests.test_bisection
"""

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.bisect.criteria import Criterion, CriterionKind
from harness.bisect.culprit import CallsChange, ProfileChange
from harness.bisect.history import Commit
from harness.bisect.journal import BisectRequest, Skipped
from harness.bisect.search import DOWN, UP, CommitsConclusion
from harness.bisect.session import BisectResult
from harness.records import Change, KernelChange, Ratio
from harness.report.series import bisection
from harness.tests.fake_runs import case, comparison, environment
from harness.tests.fake_verdicts import KERNEL
from harness.tests.small_run import SUITE

DATE = datetime.date(2026, 11, 21)
STEP_TIME = Criterion(kind=CriterionKind.METRIC, name="step_s")
SYNCS = Criterion(kind=CriterionKind.COUNTER, name="host_syncs")
CRASH = Criterion(kind=CriterionKind.OUTCOME, name="crash")
COMMITS = tuple(
    Commit(
        sha=f"{n}" * 40,
        subject=f"change {n} | `x`",
        author="A. Uthor",
        date="2026-11-20T10:00:00+00:00",
        parents=("a", "b")[: 1 + (n == 2)],
    )
    for n in range(5)
)
SLOWER = comparison(
    case_id=UP, change=Change.SLOWER, ratio=Ratio(value=1.1, low=1.08, high=1.12, p=2e-5, n=14)
)
FOUND = CommitsConclusion(culprits=(3,), good=2, probability=1.0, confirmed=True)
CONFIRMED = replace(FOUND, probability=0.987, comparison=SLOWER)


def of_commits(
    conclusion: CommitsConclusion, criterion: Criterion = STEP_TIME, **changes: Any
) -> BisectResult:
    values = ((0.1, 0.102), (), (0.101,), (0.111, 0.11), (0.11,))
    request = BisectRequest(
        started_at="2026-11-21T07:30:12+00:00",
        repository=".",
        suite=SUITE,
        case=case({"seq_len": 2048}),
        effect=0.03,
        environment=environment(),
        command=("harness", "bisect", "train"),
        criterion=criterion,
        history=COMMITS,
    )
    return BisectResult(
        **{
            "request": request,
            "conclusion": conclusion,
            "probabilities": (0.0, 0.01, 0.0, 0.987, 0.003),
            "skipped": (Skipped(position=1, commit="1" * 40, reason="no <build>"),),
            "values": values,
            "step": None if criterion.exact else 1.102,
            "noise": None if criterion.exact else 0.008,
            "summary": " kernel.py | 2 +-\n",
            "folder": Path("state/20261121-train"),
            "processes": 31,
            "wall_s": 150.0,
            **changes,
        }
    )


def exact(before: float, after: float) -> dict[str, Any]:
    return {"values": ((before,), (), (before,), (after,), (after,))}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (of_commits(CONFIRMED), "step time +10.0 % [+8.0 … +12.0] against 2222222222 before it"),
        (
            of_commits(replace(CONFIRMED, comparison=replace(SLOWER, case_id=DOWN))),
            "step time -9.1 % [-10.7 … -7.4] against",
        ),
        (of_commits(FOUND, SYNCS, **exact(1, 3)), "host_syncs is 3, but 1 at 2222222222"),
        (of_commits(FOUND, CRASH, **exact(0, 1)), "it ends with crash, but 2222222222"),
        (of_commits(FOUND, CRASH, **exact(1, 0)), "it does not end with crash, but"),
    ],
)
def test_the_sentence_says_how_the_culprit_differs(result: BisectResult, expected: str) -> None:
    text = bisection.sentence(result)

    assert text.startswith("3333333333 is the first bad commit (change 3")
    assert expected in text


def test_the_sentence_without_a_confirmed_commit() -> None:
    several = replace(FOUND, culprits=(1, 2), confirmed=True, facts={"good_before": True})
    likely = replace(CONFIRMED, confirmed=False, facts={"likely": 0.987, "new_pairs": 14})
    none = CommitsConclusion(facts={"both_alike": True})

    texts = [bisection.sentence(of_commits(c)) for c in (several, likely, none)]

    assert texts[0].startswith("the first bad commit is one of 1111111111, 2222222222;")
    assert texts[1].startswith("no commit is confirmed; 3333333333 is the most likely: 98.7 % l")
    assert texts[2] == "no commit was found: good and bad do not differ on this machine"
    counted = bisection.sentence(of_commits(none, SYNCS, **exact(2, 2)))
    assert counted.endswith("(host_syncs: 2 at 0000000000, 2 at 4444444444)")


CHANGED = ProfileChange(
    kernels=(KernelChange(name="_copy", before=KERNEL, after=None),),
    calls=(
        CallsChange(kind="counter", name="host_syncs", before=0, after=2),
        CallsChange(kind="kernel", name="copy|<16>", before=0, after=1.5),
    ),
)
REVIEWED = Path(__file__).with_name("bisection_of_commits.md")


def page() -> str:
    return bisection.markdown(of_commits(CONFIRMED, profile=CHANGED), DATE)


def test_the_page_is_the_reviewed_text() -> None:
    assert page() == REVIEWED.read_text(encoding="utf-8")


if __name__ == "__main__":
    REVIEWED.write_text(page(), encoding="utf-8")
