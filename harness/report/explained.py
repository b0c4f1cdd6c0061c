"""What explains a gap: the Why line, the suspects, and what was seen against each candidate."""

import math
from collections.abc import Mapping, Sequence

from harness import units
from harness.analysis.study import Study
from harness.analysis.suspects import Candidate, Conclusion, Diagnosis, Fingerprint, Reproduction
from harness.records import METRICS, Observation, Suite, gpu_matches
from harness.report.tables import NONE, Table
from harness.report.text import a_gpu, gap_place, listed


def line(
    found: Sequence[Diagnosis],
    suite: Suite,
    device: str,
    again: Reproduction | None = None,
    marks: Fingerprint | None = None,
) -> str:
    """What explains the gap of the suite's suspects, in one sentence; empty without any."""
    if suite.suspects is None:
        return ""
    gap = suite.suspects.gap
    tested = [d for d in found if d.conclusion is not Conclusion.NOT_TESTED]
    if found and not tested:
        return "not tested in this run"
    if not found:
        return f"the gap ({units.factor(gap.factor)}) is too small to explain by one run"
    seen = units.quantity(gap.metric, gap.seen)
    if again and not again.reproduced:
        return f"not known: that day's settings give {_again(again, gap.metric)}"
    own = [d for d in tested if not d.is_control]
    if own and all(d.then == "off" for d in own):
        return f"not explained: nothing that was tested was on in the run that made {seen}"
    elsewhere = "" if gpu_matches(gap.gpu, device) else f"; not confirmed on {a_gpu(gap.gpu)}"
    if enough := [d for d in found if d.conclusion is Conclusion.ENOUGH]:
        far = {d.name: abs(math.log((d.reached or math.inf) / gap.seen)) for d in enough}
        nearest = min(enough, key=lambda d: (d.then != "on", far[d.name]))
        here = ""
        if nearest.reached is not None and nearest.reached < gap.expected:
            number = units.quantity(gap.metric, nearest.reached)
            quiet = marks.quiet(nearest.name, nearest.reached) if marks else nearest.reached
            here = f": {number} here"
            if quiet != nearest.reached:
                here = f": {number} on this slow host, about {units.number(quiet, 2)} on another"
        on = ", which was on," if nearest.then == "on" else ""
        others = {d.name: d.then for d in enough if d is not nearest}
        known = "" if {*others.values()} - {"unknown"} else ", if it was on"
        are = "are" if len(others) > 1 else "is"
        more = f"; so {are} {listed([*others])}{known}" if others else ""
        makes = [c.suspects for c in marks.candidates if c.agrees[0]] if marks else []
        is_ = "is enough by itself"
        if others and makes == [(nearest.name,)]:
            is_, more = f"comes nearest of {len(enough)} that are enough by themselves", ""
        return f"{nearest.name}{on} {is_}{here}{more}{elsewhere}"
    if some := [d.name for d in found if d.conclusion is Conclusion.CONTRIBUTES]:
        return f"not explained; in part by {listed(some)}{elsewhere}"
    untested = [d.name for d in found if d not in tested]
    rest = f"; not tested: {listed(untested)}" if untested else elsewhere
    return f"not explained: no suspect costs enough here{rest}"


def _again(again: Reproduction, metric: str) -> str:
    """`4,030 tokens/s here, 149x as much`."""
    return f"{units.quantity(metric, again.here)} here, {units.factor(again.times)} as much"


def reproduced_sentence(again: Reproduction | None, of: Study) -> str:
    """Whether the settings of that day reproduce the gap; empty without a case of them."""
    suspects = of.run.suite.suspects
    if again is None or suspects is None:
        return ""
    does = "reproduces it" if again.reproduced else "does not reproduce it, whatever it costs here"
    settings = "With that day's settings, as far as the suite has them,"
    made = _again(again, suspects.gap.metric)
    return f"{settings} {of.names[again.case_id]} makes {made}: that {does}."


def suspects_table(
    found: Sequence[Diagnosis], suite: Suite, before: Sequence[Diagnosis] = (), day: str = ""
) -> Table | None:
    """One row a suspect: its effect, that in the earlier run of this day if it was measured there,
    and the conclusion against the gap."""
    if suite.suspects is None or all(d.conclusion is Conclusion.NOT_TESTED for d in found):
        return None
    gap = suite.suspects.gap
    higher, rows = METRICS[gap.metric].higher_is_better, []
    tested = [d for d in found if d.effect or d.conclusion is not Conclusion.NOT_TESTED]
    then = {d.name: d for d in before if d.effect or d.control}
    for d in tested:
        text = str(d.conclusion)
        if d.share:
            text += f" {units.percent(d.share[0])} to {units.percent(d.share[1])}"
        spared = d.conclusion in (Conclusion.UNDECIDED, Conclusion.APART)
        if spared and d.reached and (d.reached > gap.expected) == higher:
            text += f": still {units.quantity(gap.metric, d.reached)} here"
        seen = (_effect(d, gap.metric), *([_effect(then.get(d.name), gap.metric)] if then else []))
        was = NONE if d.is_control else {"on": "yes", "off": "no"}.get(d.then, d.then)
        rows.append((d.name, was, *seen, text))
    if untested := [d.name for d in found if d not in tested]:
        nothing = [NONE] * (3 if then else 2)
        rows.append((listed(untested), *nothing, str(Conclusion.NOT_TESTED)))
    of_gap, expected = (units.quantity(gap.metric, v) for v in (gap.seen, gap.expected))
    side = "below" if higher else "above"
    title = f"what could explain {of_gap} ({units.factor(gap.factor)} {side} {expected})"
    where = f", {place}" if (place := gap_place(suite)) else ""
    columns = [title, "in that run", f">effect on the step time per token here{where}"]
    columns += [f">on {day}"] if then else []
    return Table(columns=(*columns, "conclusion"), rows=tuple(rows))


def _effect(d: Diagnosis | None, metric: str) -> str:
    """`76 % [48 … 111] slower (2 processes)`, or the number of a control."""
    if d and d.control:
        return f"control: {units.value(metric, d.control, unit=True)}{units.repeats(d.control.n)}"
    return f"{units.ratio(d.effect)}{units.repeats(d.effect.n)}" if d and d.effect else NONE


# --- what was seen that day against what each candidate does here ------------------------------


def fingerprint_table(found: Fingerprint | None, of: Study) -> Table | None:
    """A row an observation, a column a candidate; a mark where they agree."""
    if found is None:
        return None
    rows = []
    for i, o in enumerate(found.seen):
        here = [(c.here[i], " ✓" if c.agrees[i] else "") for c in found.candidates]
        cells = (NONE if x is None else f"{_number(o, x)}{mark}" for x, mark in here)
        rows.append((_observed(o, of.run.suite), _number(o, o.seen), *cells))
    names = [f">{_name(c, of.names)}" for c in found.candidates]
    columns = ("seen in that run", ">then", *names)
    remark = fingerprint_sentence(found, of.names, of.run.suite)
    return Table(columns=columns, rows=tuple(rows), remarks=(remark,))


def fingerprint_sentence(found: Fingerprint, short: Mapping[str, str], suite: Suite) -> str:
    """Which candidates fit best what was seen, and what the only one contradicts."""
    best, seen = [c for c in found.candidates if c.misfit == found.candidates[0].misfit], found.seen
    if not any(any(c.agrees) for c in found.candidates):
        return f"None agrees with any of {units.plural('observation', len(seen))}."
    names, agree = listed([_name(c, short) for c in best]), "agree" if best[1:] else "agrees"
    counts = listed([*dict.fromkeys(f"{sum(c.agrees)}" for c in best)])
    of = units.plural("observation", max(len(c.here) - c.here.count(None) for c in best))
    all_ = "" if best[0].against else "all that was measured here, "
    only = "only " if all_ and len(best) < len(found.candidates) else ""
    said = f"{only}{names} {agree} with {all_}{counts} of {of}"
    if best[0].against and not best[1:]:
        said += f", not with {listed([_observed(seen[i], suite) for i in best[0].against])}"
    if not any(c.agrees[0] for c in found.candidates):
        said += f"; none makes {_number(seen[0], seen[0].seen)}"
    return f"{said[0].upper()}{said[1:]}."


def _name(c: Candidate, short: Mapping[str, str]) -> str:
    """Of its suspects, or of its case if that is shorter."""
    case = short[c.case_id]
    return min(case, listed(c.suspects), key=len) if c.suspects else case


def _number(o: Observation, value: float) -> str:
    if o.over.criteria:
        return units.factor(value)
    return units.size(value) if o.metric.endswith("_bytes") else units.quantity(o.metric, value)


def _observed(o: Observation, suite: Suite) -> str:
    """`tokens/s, T=2048 over T=512`."""
    title = METRICS[o.metric].title if o.metric in METRICS else "GPU memory"
    at, over = (
        ", ".join(f"{suite.axis(k)}={v[0]}" for k, v in m.criteria.items()) for m in (o.at, o.over)
    )
    return f"{title}{f', {at}' if at else ''}{f' over {over}' if over else ''}"
