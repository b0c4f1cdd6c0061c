"""Splits the cases of a suite into blocks, so that what is compared is measured on one GPU.

A unit is what may not be split: the cases whose comparison decides something. These are the pairs
of a ratio rule, the curve of a rule on scaling, the cases without and with a suspect, and the
providers of one case. Units fill blocks in the order of the suite, so that neighbours mostly stay
together, too. Comparisons that only the report makes are left out between two GPUs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from harness.analysis.suspects import sides
from harness.executor.jobs import BLOCK_S, CaseBlock
from harness.records import Case, Suite
from harness.runner.telemetry import gpus_of

PER_SLOT, LEAST_S, MOST_CASES = 4, 300.0, 200
"""Blocks that a slot measures one after the other, so that all slots end at about the same time;
the time that is worth the start of a block; and cases that fit into one command."""
START_S, SLACK = 600.0, 2.0
"""How much longer than the time limits of its processes a job may take: for start, self-test and
the processes that only count."""


def units(suite: Suite) -> list[tuple[Case, ...]]:
    """The cases in groups that one GPU must measure: first those of rules with `abort_early`, else
    in the order of the suite."""
    group = {c.case_id: [c] for c in suite.cases}
    for linked in _links(suite):
        for case in linked[1:]:
            ours, theirs = group[linked[0].case_id], group[case.case_id]
            if ours is not theirs:
                ours += theirs
                group.update((c.case_id, ours) for c in theirs)
    place = {c.case_id: i for i, c in enumerate(suite.cases)}
    once = {id(members): members for members in group.values()}.values()
    early = {c.case_id for r in suite.rules if r.abort_early for c in r.needs(suite.cases)}
    found = [tuple(sorted(members, key=lambda c: place[c.case_id])) for members in once]
    return sorted(found, key=lambda members: not any(c.case_id in early for c in members))


def _links(suite: Suite) -> Iterator[Sequence[Case]]:
    """Cases that are compared with each other."""
    yield from _alike(suite.cases, "provider")
    for rule in suite.rules:
        yield from rule.pairs(suite.cases)
        if rule.metric == "scaling_exponent" and rule.axis:
            yield from _alike(filter(rule.match.accepts, suite.cases), rule.axis)
    if suite.suspects:
        for suspect in suite.suspects.tested:
            yield from sides(suspect, suite.suspects.gap.where, suite.cases)


def _alike(cases: Iterable[Case], axis: str) -> Iterable[Sequence[Case]]:
    """Groups of cases that are equal in all but one axis."""
    groups: dict[object, list[Case]] = {}
    for c in cases:
        groups.setdefault(c.apart_from(axis), []).append(c)
    return groups.values()


def is_alone(case: Case) -> bool:
    """Whether nothing else may be measured on the node: it takes several GPUs, or the suite says
    that it shares what it measures."""
    return case.settings.exclusive or gpus_of(case) > 1


def packed(
    groups: Sequence[Sequence[Case]], expected_s: Mapping[str, float], *, slots: int, first: int = 0
) -> list[CaseBlock]:
    """Blocks of whole units: several a slot if that leaves LEAST_S for each, and none over BLOCK_S
    or MOST_CASES, unless one unit is.

    Those that need a node alone come first: one after the other, before the others fill the node.

    Args:
        expected_s: Case id -> expected lifetime of one process.
        slots: How many blocks may run at once.
        first: Number of the first block.
    """
    known = [(g, sum(expected_s[c.case_id] * c.settings.processes for c in g)) for g in groups]
    slot_s = sum(t for _, t in known) / max(1, slots)
    goal_s = min(BLOCK_S, slot_s, max(LEAST_S, slot_s / PER_SLOT)) * (1 + 1e-9)
    found: list[tuple[list[Case], float, bool]] = []
    for members, time_s in sorted(known, key=lambda unit: not any(map(is_alone, unit[0]))):
        alone = any(map(is_alone, members))
        cases, before_s, like = found[-1] if found else ([], 0.0, not alone)
        full = before_s + time_s > goal_s or len(cases) + len(members) > MOST_CASES
        if like is not alone or full:
            found.append(([], 0.0, alone))
        cases, before_s, _ = found[-1]
        found[-1] = ([*cases, *members], before_s + time_s, alone)
    return [
        CaseBlock(
            name=f"b{number:03d}",
            case_ids=tuple(c.case_id for c in cases),
            expected_s=time_s,
            limit_s=START_S
            + SLACK * sum(c.settings.processes * c.settings.timeout_s for c in cases),
            alone=alone,
        )
        for number, (cases, time_s, alone) in enumerate(found, first)
    ]
