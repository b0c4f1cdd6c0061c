"""Which cases a suite needs, in the order in which they decide, and which leave something open.

Open or decided is what the verdict and the diagnosis say. A case is measured again only if another
process of it may change that: if its processes are on both sides of a limit, or too few, or so near
to it that chance may have put them there. A count and a case that failed gain nothing by it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from harness.analysis import verdict
from harness.analysis.statistics import near
from harness.analysis.study import Study
from harness.analysis.suspects import sides
from harness.records import (
    METRICS,
    Case,
    CaseSummary,
    Decision,
    Finding,
    Outcome,
    Rule,
    RuleResult,
    Run,
    Suite,
    Weight,
    gpu_matches,
)

LEAST = 0.012
"""Scatter of a process that is assumed at least while a case may have more of them: two that agree
by chance may be of a second mode, as of another clock."""


def needed(suite: Suite, device: str) -> dict[str, list[Case]]:
    """Rule, suspect or `verdict.EXPECTED` -> the cases that it needs on this GPU. The order: rules
    with `abort_early`, the parts of the question, what asks no part. Notes are left out."""
    parts = [*suite.parts]

    def place(asks: str) -> int:
        return parts.index(asks) if asks in parts else len(parts)

    found = [
        (not r.abort_early, place(r.asks), name or r.name, r.needs(suite.cases))
        for name, rules in (("", suite.rules), (verdict.EXPECTED, suite.expectations))
        for r in rules
        if gpu_matches(r.gpu, device) and (r.counts is not Weight.NOTE or r.asks)
    ]
    if suite.suspects:
        for s in suite.suspects.tested:
            cases = [c for pair in sides(s, suite.suspects.gap.where, suite.cases) for c in pair]
            cases = [*filter(s.control.accepts, suite.cases)] if s.control else cases
            found.append((True, place(suite.suspects.asks), s.name, cases))
    of: dict[str, list[Case]] = {}
    for *_, name, cases in sorted(found, key=lambda one: one[:2]):
        of.setdefault(name, []).extend(cases)
    return of


def undecided(run: Run) -> dict[str, str]:
    """Case id -> the rule or suspect that another process of it may decide: the most decisive
    first, and of one rule the case whose processes differ most."""
    of = Study(run)
    by_id = {s.case.case_id: s for s in of.summaries}
    left: dict[str, list[str]] = {name: [] for name in needed(run.suite, of.verdict.device)}
    for name, ids in (
        *_open_rules(of.verdict.rules, by_id),
        *((d.name, d.undecided) for d in of.diagnoses),
    ):
        left.setdefault(name, []).extend(i for i in ids if by_id[i].outcome is Outcome.OK)
    found: dict[str, str] = {}
    for name, ids in left.items():
        for case_id in sorted(ids, key=lambda i: -by_id[i].spread):
            found.setdefault(case_id, name)
    return found


def _open_rules(
    results: Sequence[RuleResult], summaries: Mapping[str, CaseSummary]
) -> Iterator[tuple[str, Sequence[str]]]:
    for r in results:
        findings = (*r.findings, *r.perhaps) if r.applies and (r.counts or r.asks) else ()
        open_ = [f for f in findings if _may_change(f)] or _near(r)
        for f in open_:
            yield r.rule, [i for i in (*f.cases, f.partner) if i in summaries]


def _near(result: RuleResult) -> Sequence[Finding]:
    """The findings that decide a rule so near to its limits that more processes must confirm it."""
    rule = result.stated
    if rule is None or rule.metric == "scaling_exponent" or rule.quantity.counted:
        return ()
    if not (result.applies and result.counts):
        return ()
    found = [f for f in result.findings if doubted(f, rule)]
    one_decides = (result.decision is Decision.GO) == (rule.quantifier == "any")
    return () if one_decides and len(found) < len(result.findings) else found


def doubted(f: Finding, rule: Rule) -> bool:
    """Whether a decision is near a limit. Both processes of a NO-GO may be disturbed: near is then
    what is within a factor of two."""
    e = f.estimate
    if e and e.n == 2 and f.decision is Decision.NO_GO:
        e = replace(e, usual=None)
    return e is not None and near(e, rule.go, rule.abort, least=LEAST)


def _may_change(finding: Finding) -> bool:
    """Whether more processes of the cases may decide what a finding leaves open."""
    metric = METRICS.get(finding.metric)
    if finding.decision in (Decision.GO, Decision.NO_GO) or (metric and metric.counted):
        return False
    return finding.fact in verdict.LOOSE or finding.likely is not None
