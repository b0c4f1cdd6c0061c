"""The part of a suite file that decides: expectations, rules, suspects, labels and cost."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from harness.records import METRICS
from harness.suite.fields import OLD_METRICS, Form, Matching, Positive, Text, wrong
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


if TYPE_CHECKING:
    _Bounds = Form
else:
    _Bounds = create_model(
        "_Bounds",
        __base__=Form,
        **{
            m.name: (RangeModel | None, Field(default=None, description=m.about or None))
            for m in METRICS.values()
            if m.of_case
        },
    )


WeightOf = Literal["fail", "condition", "note"]


class ExpectationModel(_Bounds):
    """An expected range of one metric for some cases on a GPU, with its source."""

    match: Matching = {}
    counts: WeightOf = "condition"
    """What a miss does to the verdict: `fail`, `condition` (at worst CONDITIONAL) or `note`."""
    asks: Text | None = None
    """The part of the question that it answers."""
    gpu: Text = "*"
    """Pattern of the GPU that the number is for: `A100` means `*A100*`; `cpu` for no GPU."""
    source: Text
    """Where the number comes from: a report, a data sheet, a runbook, with its date."""

    @model_validator(mode="after")
    def _one_metric(self) -> "ExpectationModel":
        if len(self.model_fields_set & METRICS.keys()) != 1:
            names = ", ".join(_Bounds.model_fields)
            raise wrong("must name exactly one metric", remedy=f"Metrics: {names}.")
        return self

    @property
    def expected(self) -> tuple[str, RangeModel]:
        """The metric and its bounds."""
        (metric,) = self.model_fields_set & METRICS.keys()
        return metric, getattr(self, metric)


def metric_name(name: str) -> str:
    if name not in METRICS:
        raise wrong(f"must name a metric, not {name!r}", remedy=nearest(name, [*METRICS]))
    return name


class RuleModel(Form):
    """A rule of the verdict: GO at `go` or better, NO-GO beyond `abort`, else CONDITIONAL."""

    name: Text
    asks: Text | None = None
    """The part of the question that the rule answers."""
    metric: Annotated[
        Text,
        AfterValidator(lambda name: OLD_METRICS.get(name, name)),
        Field(json_schema_extra={"examples": [*METRICS]}),
    ]
    """A metric of the harness, or one that a program of the suite reports."""
    go: float | None = None
    """In SI base units."""
    against: Matching | None = None
    """Makes a ratio rule: each matched case is compared with the case that these values select and
    that is equal in all other axes: `{provider: dense}`."""
    at_least: Positive | None = None
    """For a ratio rule, in place of go: how many times better the matched case must be."""
    missing: WeightOf = "condition"
    """What a pair does to the verdict if the other case has no value."""
    abort: float | None = None
    """If absent, everything worse than `go` is NO-GO."""
    abort_early: bool = False
    """Run its cases first; if it is then NO-GO, run no others."""
    match: Matching = {}
    """The cases to judge; all if absent."""
    quantifier: Literal["all", "any"] = "all"
    """`all`: every case must pass. `any`: the best case decides."""
    axis: str | None = None
    """For scaling_exponent: the axis of the fit."""
    over: Literal["all", "last_octave"] = "all"
    """For scaling_exponent: the whole curve, or its last two lengths. A curve that steepens is
    always judged by its last two."""
    counts: WeightOf = "fail"
    """What the rule does to the verdict: `condition` makes it CONDITIONAL at worst."""
    gpu: Text = "*"
    """Pattern of the GPUs that the rule applies to; `!A100` is any other GPU."""

    @model_validator(mode="after")
    def _sensible(self) -> "RuleModel":
        if self.metric == "scaling_exponent" and self.axis is None:
            raise wrong("needs an axis for the fit", key="metric", remedy="Add axis.")
        for key in ("axis", "over"):
            if self.metric != "scaling_exponent" and key in self.model_fields_set:
                raise wrong("is only for scaling_exponent", key=key)
        if self.metric == "scaling_exponent" and self.against is not None:
            raise wrong("is not for scaling_exponent", key="against")
        if self.abort_early and self.counts != "fail":
            text = f"is not for a rule with counts: {self.counts}, which cannot be NO-GO"
            raise wrong(text, key="abort_early")
        ratio = self.against is not None
        needed, foreign = ("at_least", "go") if ratio else ("go", "at_least")
        if getattr(self, needed) is None:
            raise wrong(f"needs {needed}")
        for key in (foreign, *(() if ratio else ("missing",))):
            if key in self.model_fields_set:
                raise wrong(f"is {'not ' if ratio else ''}for a rule with against", key=key)
        return self

    @property
    def limit(self) -> float:
        """The value at or beyond which the rule is GO."""
        stated = self.at_least if self.go is None else self.go
        assert stated is not None
        return stated

    def contrary(self, *, higher_is_better: bool) -> str:
        """What is wrong with `abort`; empty if nothing."""
        if self.abort is None or self.abort == self.limit:
            return ""
        if self.against is not None:
            return "must be below at_least" if self.abort > self.limit else ""
        better = "higher" if higher_is_better else "lower"
        if (self.abort > self.limit) != higher_is_better:
            return ""
        return f"must be worse than go; for {self.metric}, {better} is better"


class CostModel(Form):
    """The training run for which the report extrapolates time and cost."""

    steps: Annotated[int, Field(ge=1)]
    match: Matching = {}
    """The cases to extrapolate from; all if absent."""
    usd_per_gpu_hour: Positive | None = None


class GapModel(Form):
    """A number that somebody saw, and what was expected of it."""

    metric: Annotated[Text, AfterValidator(metric_name)]
    expected: Positive
    seen: Positive
    where: Matching = {}
    """The configuration in which it was seen; effects are taken there."""
    gpu: Text = "*"
    """The GPU on which it was seen."""
    source: Text

    @model_validator(mode="after")
    def _worse(self) -> "GapModel":
        if (self.seen < self.expected) != METRICS[self.metric].higher_is_better:
            raise wrong(f"must be worse than expected, {self.expected:g}", key="seen")
        return self


class SuspectModel(Form):
    """Something that may explain the gap: pairs of cases without and with it, or a control."""

    name: Text
    within: Matching = {}
    """Both sides of each pair."""
    without: Matching = {}
    with_: Matching = Field(default={}, alias="with")
    """Pairs are equal in every axis that neither side names."""
    control: Matching | None = None
    """Cases without the subject: if they do as well as was expected, the rest is ruled out."""
    remedy: Text | None = None
    """What removes it, such as NSA_PREFILL_BATCHED=1."""

    @model_validator(mode="after")
    def _one_form(self) -> "SuspectModel":
        pairs = bool(self.without and self.with_)
        if pairs == (self.control is not None):
            raise wrong("needs either `without` and `with`, or `control`")
        return self


class SuspectsModel(Form):
    """The diagnosis of a gap."""

    asks: Text | None = None
    """The part of the question that it answers."""
    gap: GapModel
    tested: Annotated[list[SuspectModel], Field(min_length=1)]
    not_tested: list[Text] = []
    """What the suite does not vary, so that the report says so."""


class LabelModel(Form):
    """A short name for some cases."""

    match: Annotated[Matching, Field(min_length=1)]
    name: Text
