"""Units of a suite: the cases that one GPU must measure, since a rule or a suspect compares them,
or since they are the providers of one case."""

from collections.abc import Iterator, Sequence

from harness.analysis.suspects import sides
from harness.records import Case, Suite, pairs, partners

TASKS, LEAST = 8, 12  # of a GPU or core; processes of a task, which begins with a self-test


def units(suite: Suite) -> list[tuple[Case, ...]]:
    """The cases that one GPU must measure together, those of rules with `abort_early` first."""
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


def joined(units: Sequence[Sequence[Case]], slots: int) -> Sequence[Sequence[Case]]:
    """The units for the tasks of so many GPUs or cores: small neighbours share one."""
    each = sum(c.settings.processes for u in units for c in u) / slots
    most = max(min(LEAST, each), each / TASKS)
    found: list[Sequence[Case]] = [()]
    for unit in units:
        if sum(c.settings.processes for c in (*found[-1], *unit)) > most:
            found.append(())
        found[-1] = (*found[-1], *unit)
    return [task for task in found if task]


def _links(suite: Suite) -> Iterator[Sequence[Case]]:
    """Cases that are compared with each other."""
    yield from pairs(suite.cases, "provider")
    for rule in suite.rules:
        yield from rule.pairs(suite.cases)
        if rule.metric == "scaling_exponent" and rule.axis:
            yield from pairs(filter(rule.match.accepts, suite.cases), rule.axis)
    if suite.suspects:
        for suspect in suite.suspects.tested:
            yield from sides(suspect, suite.suspects.gap.where, suite.cases)
        for seen in [o for o in suite.suspects.observed if o.over.criteria]:
            free = *seen.over.criteria, *seen.at.criteria
            yield from partners(suite.cases, seen.over, seen.at, *free)
