"""Sentences that the command line and the report both say."""

import shlex
from collections.abc import Sequence

from harness import units
from harness.analysis.overhead import Overhead
from harness.analysis.targets import Target
from harness.analysis.timeuse import TimeUse
from harness.program import INTERPRETER
from harness.records import Case, Measurement


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
    if used.work_share is None or used.sampling_share is None or used.overhead_s is None:
        return f"{units.duration(used.wall_s)}{of}; what it went into is unknown"
    return (
        f"{units.duration(used.wall_s)}{of}: {units.percent(used.work_share)} work (accuracy, "
        f"counting, warm-up, sampling), {units.percent(used.sampling_share)} sampling; overhead "
        f"{units.duration(used.overhead_s)} a process"
    )


def command(case: Case) -> str:
    """The program of a case and its arguments, as one would type it; empty for a factory."""
    words = case.program.argv if case.program else ()
    return shlex.join("python" if word == INTERPRETER else word for word in words)


def variables(case: Case) -> str:
    """Names of the variables that a case sets; a value may be nobody's business."""
    return ", ".join(case.env)


def folder(case: Case, measured: Sequence[Measurement]) -> str:
    """Where the program of a case ran; as the suite has it, where none got so far."""
    ran = (m.code["program"] for m in measured if "program" in m.code)
    return next(ran, case.program.cwd if case.program else "")


def programs(cases: Sequence[Case], measured: Sequence[Measurement]) -> Sequence[str]:
    """What ran, of each workload that is a program: its first case."""
    said = []
    for name in dict.fromkeys(case.workload for case in cases if case.program):
        own = [case for case in cases if case.workload == name]
        first = own[0]
        where = folder(first, [m for m in measured if m.case_id == first.case_id])
        text = f"{name} runs: {command(first)} (in {where}"
        text += f"; sets {variables(first)})" if first.env else ")"
        rest = len(own) - 1
        if rest:
            text += f"; {rest} more case{'s run' if rest > 1 else ' runs'} it with other axes"
        said.append(text)
    return said


def overhead(found: Overhead, limit: float) -> str:
    """What reading the probes costs, with its interval and what that says of the limit."""
    cost = units.change(found.ratio, found.low, found.high)
    if found.low is None or found.high is None:
        shown = "one pair has no interval, and shows nothing"
    elif found.shown:
        shown = f"at most {units.percent(limit)}, as asked"
    elif found.shown is False:
        shown = f"more than the {units.percent(limit)} allowed"
    else:
        shown = f"not decided against {units.percent(limit)}: take more pairs"
    return f"sampling: step time {cost} over {found.pairs} pairs of processes; {shown}"
