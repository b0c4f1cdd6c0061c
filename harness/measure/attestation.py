"""Compares what ran with what the case asked for: axes and flags, kernels and operators."""

from harness.measure.failures import Failed
from harness.measure.profile import StepProfile
from harness.records import Case, Outcome, PathRule, Scalar
from harness.workload import Workload

SHOWN = 6
"""Names, those with most time first, that a mismatch lists."""


def observed(case: Case, workload: Workload) -> tuple[dict[str, Scalar], dict[str, bool]]:
    """The configuration that the workload observed, and for each variable known to it, whether
    anything read it; a path mismatch if an axis was observed with another value, or if nothing read
    a variable of the case. torch or CUDA may read one that the workload does not know."""
    seen = dict(workload.effective()) if workload.effective else {}
    for name, value in seen.items():
        if not isinstance(value, bool | int | float | str):
            raise TypeError(f"effective() gives {name!r} a {type(value).__name__}, not a scalar")
    read = dict(workload.flags()) if workload.flags else {}
    for name, was_read in read.items():
        if not isinstance(was_read, bool):
            raise TypeError(f"flags() gives {name!r} a {type(was_read).__name__}, not a bool")
    wrong = [
        f"{name}: asked for {asked}, ran with {seen[name]}"
        for name, asked in case.axes.items()
        if seen.get(name, asked) != asked
    ]
    wrong += [
        f"{name}={value} was set, but nothing that ran read it"
        for name, value in case.env.items()
        if not read.get(name, True)
    ]
    if wrong:
        raise Failed(Outcome.PATH_MISMATCH, "; ".join(wrong), effective=seen, flags_read=read)
    return seen, read


def mismatch(case: Case, ran: StepProfile) -> str:
    """Which rules the profile breaks: a kernel or operator that must run did not, or one that must
    not run did. Empty without a profile, but then the verdict does not pass either."""
    if ran.profile.skipped:
        return ""
    found = [_broken(case.operators, ran.operators, "operators")]
    if not ran.profile.no_kernels:
        found.append(_broken(case.kernels, ran.kernels, "kernels"))
    return "; ".join(filter(None, found))


def _broken(rule: PathRule, names: tuple[str, ...], what: str) -> str:
    broken = rule.broken_by(names)
    if not broken:
        return ""
    rest = len(names) - SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return f"{what}: {', '.join(broken)} (seen: {', '.join(names[:SHOWN]) or 'none'}{more})"
