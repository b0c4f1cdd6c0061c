"""Sentences that the command line and the report both say."""

from harness import units
from harness.analysis.overhead import Overhead
from harness.analysis.targets import Target
from harness.analysis.timeuse import TimeUse


def target(t: Target) -> str:
    """The rule “floor” asks for 785 tokens/s: on A100 0.12 % MFU, 850x below the card's peak."""
    return (
        f"{t.stated_by} asks for {units.quantity('tokens_per_s', t.tokens_per_s)} of "
        f"`{t.case_id}`: on {t.peak.gpu} that is {units.percent(t.mfu)} MFU, "
        f"{units.factor(1 / t.mfu)} below the card's peak "
        f"({units.number(t.peak.flops_per_s / 1e12)} TFLOP/s, dense {t.peak.precision})"
    )


def time_use(used: TimeUse) -> str:
    """Where the wall time of a run went."""
    of = "" if used.whole else " of processes' life"
    return (
        f"{units.duration(used.wall_s)}{of}: {units.percent(used.work_share)} work (accuracy, "
        f"counting, warm-up, sampling), {units.percent(used.sampling_share)} sampling; overhead "
        f"{units.duration(used.overhead_s)} a process"
    )


def overhead(found: Overhead, limit: float) -> str:
    """What reading the probes costs, with its interval and what that says of the limit."""
    cost = units.change(found.ratio, found.low, found.high)
    if found.low is None or found.high is None:
        shown = "one pair has no interval, and shows nothing"
    elif found.high - 1 <= limit:
        shown = f"at most {units.percent(limit)}, as asked"
    elif found.low - 1 > limit:
        shown = f"more than the {units.percent(limit)} allowed"
    else:
        shown = f"not decided against {units.percent(limit)}: take more pairs"
    return f"sampling: step time {cost} over {found.pairs} pairs of processes; {shown}"
