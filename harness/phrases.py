"""Sentences that the command line and the report both say."""

import shlex
from collections.abc import Sequence

from harness import units
from harness.analysis.overhead import Overhead
from harness.analysis.targets import Target
from harness.analysis.timeuse import TimeUse
from harness.gate import EVERY_CASE_RAN, KERNELS_THAT_RAN, WHAT_RAN
from harness.program import INTERPRETER
from harness.records import (
    Case,
    Decision,
    Finding,
    Match,
    Measurement,
    RuleResult,
    Verdict,
)
from harness.units import finding_sentence


def target_text(t: Target) -> str:
    """The rule “floor” asks for 785 tokens/s: on A100 0.12 % MFU, 850x below the card's peak."""
    return (
        f"{t.stated_by} asks for {units.quantity('tokens_per_s', t.tokens_per_s)} of "
        f"`{t.case_id}`: on {t.peak.gpu} that is {units.percent(t.mfu)} MFU, "
        f"{units.factor(1 / t.mfu)} below the card's peak "
        f"({units.number(t.peak.flops_per_s / 1e12)} TFLOP/s, dense {t.peak.precision})"
    )


def time_use_sentence(used: TimeUse) -> str:
    """Where the wall time of a run went."""
    of = "" if used.whole else " of processes' life"
    if used.work_share is None or used.sampling_share is None or used.overhead_s is None:
        return f"{units.duration(used.wall_s)}{of}; what it went into is unknown"
    return (
        f"{units.duration(used.wall_s)}{of}: {units.percent(used.work_share)} work (accuracy, "
        f"counting, warm-up, sampling), {units.percent(used.sampling_share)} sampling; overhead "
        f"{units.duration(used.overhead_s)} a process"
    )


def command_text(case: Case) -> str:
    """The program of a case and its arguments, as one would type it; empty for a factory."""
    words = case.program.argv if case.program else ()
    return shlex.join("python" if word == INTERPRETER else word for word in words)


def variables_text(case: Case) -> str:
    """Names of the variables that a case sets; a value may be nobody's business."""
    return ", ".join(case.env)


def folder_text(case: Case, measured: Sequence[Measurement]) -> str:
    """Where the program of a case ran; as the suite has it, where none got so far."""
    ran = (m.code["program"] for m in measured if "program" in m.code)
    return next(ran, case.program.cwd if case.program else "")


def program_lines(cases: Sequence[Case], measured: Sequence[Measurement]) -> Sequence[str]:
    """What ran, of each workload that is a program: its first case."""
    said = []
    for name in dict.fromkeys(case.workload for case in cases if case.program):
        own = [case for case in cases if case.workload == name]
        first = own[0]
        where = folder_text(first, [m for m in measured if m.case_id == first.case_id])
        text = f"{name} runs: {command_text(first)} (in {where}"
        text += f"; sets {variables_text(first)})" if first.env else ")"
        rest = len(own) - 1
        if rest:
            text += f"; {rest} more case{'s run' if rest > 1 else ' runs'} it with other axes"
        said.append(text)
    return said


def overhead_sentence(found: Overhead, limit: float) -> str:
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


# --- findings, rules and verdicts ----------------------------------------------------------


def rule_sentence(result: RuleResult) -> str:
    """Why a rule decided as it did."""
    if not result.applies and result.stated:
        return f"stated for {result.stated.gpu}; {finding_sentence(result.findings[0])}"
    share = f"{len(result.findings)} of {result.judged}: " if result.judged > 1 else ""
    if result.stated is None and result.decision is Decision.GO:
        return _held(result)
    if result.findings:
        text = share + _joined(result.findings)
        if result.perhaps:
            text += f"; undecided, perhaps GO: {_joined(result.perhaps)}"
        return text
    if result.matched:
        return "no matched case has an outcome that could decide"
    return "the rule matches no case of this run"


def _held(result: RuleResult) -> str:
    """Of a rule that every suite has."""
    if result.rule == WHAT_RAN:
        if result.judged == 1:
            return "seen in the one case that states any"
        return f"seen in all {result.judged} cases that state any"
    ran = f"all {result.judged} cases ran" if result.judged > 1 else "the case ran"
    if not result.findings:
        return ran
    allowed = "; ".join(f"{f.subject}: {finding_sentence(f)}" for f in result.findings)
    return f"{ran} or ended as the suite allows ({allowed})"


def verdict_sentence(v: Verdict) -> str:
    """Why a suite's verdict is what it is."""
    if v.rule is None:
        return f"no rule of the suite was stated for {v.device}"
    applied = [r.rule for r in v.rules if r.applies]
    if v.decision is Decision.GO and len(applied) > 1:
        return f"all hold: {'; '.join(applied)}"
    return rule_sentence(v.rule)


REQUIREMENTS = {
    EVERY_CASE_RAN: "every case ends ok, or as the suite allows",
    WHAT_RAN: "all required operators ran and no forbidden one did; on a GPU also kernels",
    KERNELS_THAT_RAN: "all required kernels ran and no forbidden one did",
}


def requirement_text(result: RuleResult) -> str:
    """A rule as a sentence: `tokens/s ≥ 500 in every case with gc=off; NO-GO under 100`."""
    if result.stated is None:
        return REQUIREMENTS[result.rule]
    stated = result.stated
    metric = stated.quantity
    sign = "≥" if metric.higher_is_better else "≤"
    whose = "every case" if stated.quantifier == "all" else "the best case"
    if chosen := _criteria(stated.match):
        whose += f" with {chosen}"
    along = f" over {stated.axis}" if stated.axis else ""
    text = f"{metric.title}{along} {sign} {units.plain(stated.metric, stated.go)} in {whose}"
    if stated.abort is not None:
        side = "under" if metric.higher_is_better else "over"
        text += f"; NO-GO {side} {units.plain(stated.metric, stated.abort)}"
    return text


def _criteria(match: Match) -> str:
    return " and ".join(
        f"{name}={' or '.join(map(str, values))}" for name, values in match.criteria.items()
    )


def _joined(findings: Sequence[Finding], most: int = 2) -> str:
    """The first few findings as a sentence; those of one reason share it."""
    by_reason: dict[str, list[str]] = {}
    for f in findings:
        by_reason.setdefault(finding_sentence(f), []).append(f.subject)
    shown = list(by_reason.items())[:most]
    text = "; ".join(
        f"{_subjects(names, most)}: {reason}" if any(names) else reason for reason, names in shown
    )
    rest = len(findings) - sum(len(names) for _, names in shown)
    return f"{text}; and {rest} more" if rest else text


def _subjects(names: Sequence[str], most: int) -> str:
    if len(names) <= most:
        return " and ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"
