"""The part of a suite file that decides: expectations, rules, suspects, labels and cost."""

from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from harness.records import (
    METRICS,
    CostPlan,
    Gap,
    Match,
    Observation,
    Rule,
    Suspect,
    Suspects,
    Weight,
)
from harness.suite.fields import (
    Form,
    Positive,
    Some,
    SomeMatching,
    Text,
    form_of,
    read_as,
    reads,
    wrong,
)
from harness.suite.positions import nearest


class RangeModel(Form):
    """Bounds of an expected number in SI base units; at least one."""

    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _ordered(self) -> "RangeModel":
        if self.low is None and self.high is None:
            raise wrong("needs low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise wrong(f"must not be above high, {self.high:g}", key="low")
        return self


_BOUNDS: dict[str, Any] = {
    m.name: (RangeModel | None, Field(default=None, description=m.about or None))
    for m in METRICS.values()
    if m.of_case
}
WeightOf = Literal["fail", "condition", "note"]
_OF_BOTH = ("match", "gpu", "source", "asks", "counts")
"""What the form of an expectation has of a rule."""
_ExpectationForm = create_model(
    "Expectation",
    __doc__="A value that some source expects of a case.",
    __base__=form_of(Rule, leave={f.name for f in fields(Rule)} - {*_OF_BOTH}),
    counts=(WeightOf, Field(default="condition", description="What a miss does to the verdict.")),
    source=(Text, Field(description="A report, a data sheet or a runbook, with its date.")),
    **_BOUNDS,
)


def _expectation(form: Any) -> Rule:
    """The rule of a form with one metric, called by its source."""
    named = form.model_fields_set & METRICS.keys()
    if len(named) != 1:
        raise wrong("must name exactly one metric", remedy=f"Metrics: {', '.join(_BOUNDS)}.")
    (metric,) = named
    stated = {name: value for name, value in form if name not in METRICS}
    stated |= getattr(form, metric).model_dump()
    name = form.source.partition(", ")[0]
    return Rule(**stated | {"name": name, "metric": metric, "counts": Weight(form.counts)})


StatedExpectation = Annotated[
    Rule, read_as(Annotated[_ExpectationForm, AfterValidator(_expectation)])
]


def metric_name(name: str) -> str:
    if name not in METRICS:
        raise wrong(f"must name a metric, not {name!r}", remedy=nearest(name, [*METRICS]))
    return name


_RuleForm = create_model(
    "Rule",
    __doc__=Rule.__doc__,
    __base__=form_of(
        Rule,
        leave=("low", "high", "source", "free", "asked"),
        metric=Annotated[Text, Field(json_schema_extra={"examples": [*METRICS]})],
        go=float | None,
        quantifier=Literal["all", "any"],
        over=Literal["all", "last_octave"],
        missing=WeightOf,
        counts=WeightOf,
    ),
    go=(float | None, Field(default=None, description="In SI base units.")),
    at_least=(Positive | None, Field(default=None, description="Of a ratio rule, in place of go.")),
)


def _rule(form: Any) -> Rule:
    """The rule of a form that makes sense."""
    given, scaling = form.model_fields_set, form.metric == "scaling_exponent"
    if scaling and form.axis is None:
        raise wrong("needs an axis for the fit", key="metric", remedy="Add axis.")
    for key in ("axis", "over"):
        if not scaling and key in given:
            raise wrong("is only for scaling_exponent", key=key)
    if scaling and form.against is not None:
        raise wrong("is not for scaling_exponent", key="against")
    if form.abort_early and form.counts != "fail":
        text = f"is not for a rule with counts: {form.counts}, which cannot be NO-GO"
        raise wrong(text, key="abort_early")
    ratio = form.against is not None
    needed, foreign = ("at_least", "go") if ratio else ("go", "at_least")
    if getattr(form, needed) is None:
        raise wrong(f"needs {needed}")
    for key in (foreign, *(() if ratio else ("missing",))):
        if key in given:
            raise wrong(f"is {'not ' if ratio else ''}for a rule with against", key=key)
    stated = {name: value for name, value in form if name != "at_least"}
    stated |= {"missing": Weight(form.missing), "counts": Weight(form.counts)}
    return Rule(**stated | {"go": getattr(form, needed)})


def contrary(rule: Rule) -> str:
    """What is wrong with `abort`; empty if nothing."""
    higher, (low, high) = rule.higher_is_better, rule.limits
    if rule.against is not None and rule.abort is not None and rule.abort <= 0:
        return "must be above 0"
    if rule.abort is None or not low < rule.abort < high:
        return ""
    if rule.against is not None:
        return "must be below at_least"
    return f"must be worse than go; for {rule.metric}, {'higher' if higher else 'lower'} is better"


StatedRule = Annotated[Rule, read_as(Annotated[_RuleForm, AfterValidator(_rule)])]
Cost = Annotated[
    CostPlan, reads(CostPlan, steps=Annotated[int, Field(ge=1)], usd_per_gpu_hour=Positive)
]


def _worse(gap: Gap) -> Gap:
    if (gap.seen < gap.expected) != METRICS[gap.metric].higher_is_better:
        raise wrong(f"must be worse than expected, {gap.expected:g}", key="seen")
    return gap


def _one_form(suspect: Suspect) -> Suspect:
    within, pairs = suspect.within.criteria, (suspect.without.criteria, suspect.with_.criteria)
    if all(pairs) == (suspect.control is not None):
        raise wrong("needs either `without` and `with`, or `control`")
    without, with_ = (Match(criteria={**within, **side}) for side in pairs)
    return replace(suspect, without=without, with_=with_)


def _observation(o: Observation) -> Observation:
    if o.metric != "gpu_memory_bytes":
        metric_name(o.metric)
    return o


MetricName = Annotated[Text, AfterValidator(metric_name)]
Known = Annotated[
    Gap, reads(Gap, metric=MetricName, expected=Positive, seen=Positive), AfterValidator(_worse)
]
Observed = Annotated[
    Observation, reads(Observation, metric=Text, seen=Positive), AfterValidator(_observation)
]
InThatRun = Literal["on", "off", "unknown"]
Tested = Annotated[Suspect, reads(Suspect, then=InThatRun), AfterValidator(_one_form)]
Diagnosis = Annotated[
    Suspects, reads(Suspects, gap=Known, tested=Some[Tested], observed=list[Observed])
]


class LabelModel(Form):
    """A short name for some cases."""

    match: SomeMatching
    name: Text
