"""What the analysis finds in one run, each thing once: pages, the screen and gates read the same.

`Study(run)` computes a thing when it is first asked for.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from harness import units
from harness.analysis import scaling, summary, suspects
from harness.analysis.bounds import precision_of
from harness.analysis.dead_axes import DeadAxis, dead_axes
from harness.analysis.effects import Effect, Versus, effects, versus
from harness.analysis.roofline import Bottleneck, Limit, bottleneck, bound
from harness.analysis.scaling import ScalingFit
from harness.analysis.suspects import Diagnosis, Reproduction
from harness.analysis.verdict import judge
from harness.records import Case, CaseSummary, Peaks, Run, Suite, Verdict, gpu_matches

Foreseen = tuple[float | None, float]
"""Of a case: the step that is expected, in seconds, if any; and its roofline bound."""


class Study:
    """A run with what is found in it."""

    def __init__(self, run: Run) -> None:
        self.summaries: Sequence[CaseSummary] = summary.summarise(run)
        withdrawn = {s.case.case_id for s in self.summaries if s.withdrawn}
        known = (replace(m, tokens=None) if m.case_id in withdrawn else m for m in run.measurements)
        device = run.environment.device_name
        parts = {n: q.replace("{gpu}", device) for n, q in run.suite.parts.items()}
        suite = replace(run.suite, parts=parts)
        self.run = replace(run, measurements=tuple(known), suite=suite)
        """Without the tokens that are withdrawn; the questions name its GPU."""
        self.pace: Mapping[str, float] = {}
        """Case id -> how many times as long its steps take by its host; set by a comparison."""

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Case id -> what people call the case."""
        return case_names(self.run.suite)

    @cached_property
    def fits(self) -> Sequence[ScalingFit]:
        return scaling.fit(self.summaries)

    @cached_property
    def verdict(self) -> Verdict:
        return judge(self.run.suite, self.run.environment, self.summaries, self.fits)

    @cached_property
    def asked(self) -> Sequence[CaseSummary]:
        """The cases that a rule of the suite asks on this GPU."""
        device = self.run.environment.device_name
        rules = [r for r in self.run.suite.rules if gpu_matches(r.gpu, device)]
        return [s for s in self.summaries if any(r.match.accepts(s.case) for r in rules)]

    @cached_property
    def effects(self) -> Sequence[Effect]:
        return effects(self.summaries)

    @cached_property
    def versus(self) -> Sequence[Versus]:
        return versus(self.summaries)

    @cached_property
    def dead_axes(self) -> Sequence[DeadAxis]:
        return dead_axes(self.run, self.summaries)

    @cached_property
    def diagnoses(self) -> Sequence[Diagnosis]:
        return suspects.diagnose(self.run.suite, self.summaries)

    @cached_property
    def reproduction(self) -> Reproduction | None:
        return suspects.reproduction(self.run.suite, self.summaries)

    @cached_property
    def bottlenecks(self) -> Mapping[str, Bottleneck]:
        """Case id -> what limits its step, if it has a time."""
        run, gpu = self.run, self.run.environment.gpu
        peaks = run.self_test.peaks if run.self_test else Peaks()
        most_hz = gpu.max_sm_clock_hz if gpu else None
        of = {s.case.case_id: s for s in self.summaries}
        each = ((i, bottleneck(s, run.of(i), peaks, most_hz)) for i, s in of.items())
        return {i: b for i, b in each if b}

    @cached_property
    def waiting(self) -> set[str]:
        """The cases in which the GPU waits for the host; a step that is one CUDA graph does not."""
        by_host = (Limit.HOST, Limit.SYNCS, Limit.LAUNCHES)
        return {i for i, b in self.bottlenecks.items() if b.limit in by_host}


def case_names(suite: Suite) -> dict[str, str]:
    """Case id -> the suite's label for it, or its provider and swept axes; each name once.

    A label that several workloads share means the first of them; of several providers it means the
    suite's first one.
    """
    several = len({c.workload for c in suite.cases}) > 1
    names, groups, means = {}, dict[tuple[str, ...], list[Case]](), dict[str, str]()
    for c in suite.cases:
        axes = (f"{suite.axis(a)}={units.scalar(c.axes[a])}" for a in c.swept)
        provider = suite.provider(c.workload, c.provider)
        words = (f"{c.workload}: {provider}" if several else provider, *axes)
        label = suite.label(c) or words
        groups.setdefault(label, []).append(c)
        means.setdefault(label[0], c.workload)
    for label, cases in groups.items():
        ours = suite.cases[0].provider if len({c.provider for c in cases}) > 1 else ""
        apart = len({(c.workload, c.provider) for c in cases}) == len(cases)
        for c in cases:
            where = "" if c.workload == means[label[0]] else f"{c.workload}: "
            own = suite.provider(c.workload, c.provider)
            whose = f" ({own})" if ours and c.provider != ours else ""
            names[c.case_id] = f"{where}{', '.join(label)}{whose}" if apart else c.case_id
    return names


def task(c: Case) -> Hashable:
    """What a case computes, in whatever suite it stands."""
    return c.factory, c.provider, frozenset(c.axes.items()), frozenset(c.env.items())


def foreseen(
    suite: Suite,
    runs: Sequence[Run],
    here: Sequence[Run],
    work: Mapping[str, tuple[int, int]],
) -> dict[str, Foreseen]:
    """Case id -> its step and the roofline bound of that: the bound by its FLOPs and bytes in any
    of the runs, or else in `work`, and the last peaks of `here`, the runs on this GPU model; the
    step by the share of the bound that its provider reached here in the most similar case, None if
    none ran."""
    here = [r for r in here if r.environment.gpu and r.self_test]
    if len({r.environment.device_name for r in here}) != 1:
        return {}

    last, proof, bounds_s = here[-1].environment, here[-1].self_test, dict[Hashable, float]()
    peaks = proof.peaks if proof else Peaks()
    for case, (flops, moved) in ((c, work[c.case_id]) for c in suite.cases if c.case_id in work):
        of = precision_of(case.axes, {}, last)
        limit = bound(peaks, flops=flops, bytes_moved=moved, launches=None, precision=of)
        if limit:
            bounds_s[task(case)] = limit.seconds
    for case, m in ((c, m) for r in runs for c in r.suite.cases for m in r.of(c.case_id)):
        counts = [replace(m, counters=None)]  # launches may depend on the GPU
        if limit := summary.roofline_bound(case, counts, m.effective, last, proof):
            bounds_s[task(case)] = limit.seconds
    timed = [(c, summary.step_time(c, r.of(c.case_id))) for r in here for c in r.suite.cases]
    seen = [(c, step_s, bounds_s[task(c)]) for c, step_s in timed if step_s and task(c) in bounds_s]
    found = {}
    for case in suite.cases:
        if bound_s := bounds_s.get(task(case)):
            alike = [
                (len(case.axes.items() & c.axes.items()), -max(s / bound_s, bound_s / s), i, t / s)
                for i, (c, t, s) in enumerate(seen)
                if (c.factory, c.provider) == (case.factory, case.provider)
            ]
            found[case.case_id] = bound_s * max(alike)[-1] if alike else None, bound_s
    return found
