"""The policy of a gate: its cases, limits and stage, and the cases that are exempt.

ci/gate.yaml is read like a suite: YAML 1.2 with positions, validated by the models below, which
also give its JSON Schema. Case patterns are checked against the suites. Every error has its file,
line and column.
"""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from harness import units
from harness.gate.noise import by_scatter
from harness.records import METRICS, Case, Rule, Thresholds
from harness.suite.choice import fits
from harness.suite.decisions import metric_name
from harness.suite.fields import Form, Matching, Text, checked, wrong
from harness.suite.load import text_of
from harness.suite.positions import Document, Problem, read
from harness.suite.schema import PathModel
from harness.suite.sweep import check_match, match

DEFAULT = Path("ci/gate.yaml")


# --- the form ----------------------------------------------------------------------------


def _inside(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts:
        remedy = "Write it relative to the root of the repository."
        raise wrong(f"must be in the repository, not {path!r}", remedy=remedy)
    return path


def _date(text: Any) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except (TypeError, ValueError):
        raise wrong(f"must be a date, not {text!r}", remedy="Write it as 2026-12-31.") from None


Inside = Annotated[str, Field(min_length=1), AfterValidator(_inside)]
Date = Annotated[datetime.date, PlainValidator(_date, json_schema_input_type=str)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class ChosenSuite(Form):
    """A suite, and the cases of it that the gate judges."""

    suite: Inside
    """Path of the suite file from the root of the repository."""
    cases: list[Text] = Field(default_factory=list)
    """Patterns or parts of case ids, as for `harness run --filter`; all if absent."""


class AbsoluteModel(Form):
    """An absolute limit, or required kernels, for some cases on some GPUs."""

    match: Annotated[Matching, Field(default_factory=dict)]
    """The cases, by axis, `workload` or `provider`; all if absent."""
    gpu: Text = "*"
    """A pattern: `A100` means `*A100*`; `cpu` means no GPU."""
    metric: Annotated[str, AfterValidator(metric_name)] | None = None
    low: float | None = None
    """Lower limit in SI units: NO-GO if the whole interval is below."""
    high: float | None = None
    """Upper limit in SI units: NO-GO if the whole interval is above."""
    kernels: PathModel | None = None
    source: Text
    """Where the number comes from."""

    @model_validator(mode="after")
    def _sensible(self) -> "AbsoluteModel":
        if (self.metric is None) == (self.kernels is None):
            raise wrong("needs either a metric or kernels")
        if self.metric is None:
            if self.low is not None or self.high is not None:
                raise wrong("low and high need a metric")
            return self
        if self.metric == "scaling_exponent":
            raise wrong("scaling_exponent is of several cases; a gate judges one", key="metric")
        good = METRICS[self.metric].higher_is_better
        wanted, other = (self.low, self.high) if good else (self.high, self.low)
        if wanted is None or other is not None:
            title, side = METRICS[self.metric].title, "low" if good else "high"
            raise wrong(f"{title} needs {side} only", remedy="The other direction is better.")
        return self


class CompareModel(Form):
    """Thresholds of the comparison that differ from the defaults."""

    screen_pairs: Annotated[int, Field(ge=2)] | None = None
    """Pairs of processes that screen every case."""
    screen_ratio: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio of times that passes the screen."""
    confirm_pairs: Annotated[int, Field(ge=1)] | None = None
    """New pairs for a case that the screen left open and no earlier look decides."""
    most_pairs: Annotated[int, Field(ge=1)] | None = None
    """Most new pairs of a case whose pairs scatter far; confirm_pairs if only that is set."""
    alpha: Fraction | None = None
    """Probability of calling any case of a clean change slower."""
    practical: Fraction | None = None
    """Slowdowns below this are ignored."""
    tolerance: Fraction | None = None
    """A case passes if its slowdown is proven to be below this."""
    stored_tolerance: Fraction | None = None
    """The same against a stored run."""


class Exemption(Form):
    """Cases whose comparison does not decide the gate, until a date."""

    cases: Annotated[list[Text], Field(min_length=1)]
    """Patterns or parts of case ids."""
    because: Text
    expires: Date
    """Last day. From the next day on the entry is NO-GO."""

    def covers(self, case_id: str) -> bool:
        return any(fits(case_id, pattern) for pattern in self.cases)

    def expired(self, today: datetime.date) -> bool:
        return today > self.expires

    @property
    def sentence(self) -> str:
        """`exempt until 2026-12-31: known`."""
        return f"exempt until {self.expires}: {self.because}"


class PolicyForm(Form):
    """What a gate judges, and what blocks a change."""

    version: Literal[1] = Field(alias="schema")
    """Version of this format."""
    stage: Literal["shadow", "warn", "block"]
    """`shadow` records, `warn` shows, `block` prevents the merge of a NO-GO."""
    inconclusive: Literal["neutral", "block"] = "neutral"
    """Whether an undecided gate blocks in stage block. It is never shown as a pass."""
    new_cases: Literal["allow", "block"] = "allow"
    """Whether a case that the baseline cannot run passes on absolute limits alone."""
    roots: Annotated[list[Inside], Field(min_length=1, default_factory=lambda: ["."])]
    """Folders of the repository from which its packages are imported."""
    suites: Annotated[list[ChosenSuite], Field(min_length=1)]
    """Suites that are timed."""
    counters: Annotated[list[ChosenSuite], Field(default_factory=list)]
    """Suites that `harness gate --counters` counts: small cases that run anywhere."""
    absolute: Annotated[list[AbsoluteModel], Field(default_factory=list)]
    compare: CompareModel = CompareModel()
    exempt: Annotated[list[Exemption], Field(default_factory=list)]
    """Cases whose comparison does not decide, each until a date."""

    @model_validator(mode="after")
    def _once(self) -> "PolicyForm":
        for key in ("suites", "counters"):
            names = [choice.suite for choice in getattr(self, key)]
            if len(names) > len(set(names)):
                raise wrong("names a suite twice", key=key, remedy="Put its cases in one entry.")
        return self


# --- the record --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy file, validated."""

    path: str
    """From the root of the repository."""
    form: PolicyForm
    document: Document | None = None
    """For the places of errors; None in a comparison of commits, which is not judged by it."""

    @property
    def given(self) -> Mapping[str, Any]:
        """The thresholds that the file itself sets; the scatter of pairs changes only others."""
        found: dict[str, Any] = self.form.compare.model_dump(exclude_unset=True)
        pairs = {"most_pairs": found["confirm_pairs"]} if "confirm_pairs" in found else {}
        return pairs | found

    def thresholds(self, pair_sd: float = 0.0) -> Thresholds:
        """Of a case whose pairs have this standard deviation."""
        return by_scatter(Thresholds(**self.given), self.given, pair_sd / math.sqrt(2))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Absolute limits; `go` is also `abort`."""
        limits = enumerate(self.form.absolute)
        return tuple(_rule(a, self.place("absolute", i)) for i, a in limits if a.metric)

    def place(self, *loc: str | int) -> str:
        """Such as `ci/gate.yaml:12`."""
        return f"{self.path}:{self.document.values[loc][0]}" if self.document else self.path


def load(path: Path) -> Policy:
    """Read a policy.

    Raises:
        SuiteError: With place, problem and remedy.
    """
    return parse(text_of(path, path, "Name one with --policy, or write one: harness init."), path)


def parse(text: str, path: Path) -> Policy:
    """The same for the text of the file, perhaps from another commit."""
    document = read(text, path, least="Write one: harness init.")
    policy = Policy(path=str(path), form=checked(PolicyForm, document), document=document)
    try:
        Thresholds(**policy.given)
    except ValueError as error:
        raise document.error([Problem(("compare",), str(error), at_key=True)]) from None
    return policy


def _rule(model: AbsoluteModel, place: str) -> Rule:
    bound = model.high if model.low is None else model.low
    assert model.metric is not None
    assert bound is not None
    title, gpu = METRICS[model.metric].title, "" if model.gpu == "*" else f" on {model.gpu}"
    limit = units.quantity(model.metric, bound)
    side = "lower limit of" if METRICS[model.metric].higher_is_better else "upper limit of"
    return Rule(
        name=f"{side} {title}{gpu}: {limit} ({model.source}, {place})",
        metric=model.metric,
        go=bound,
        match=match(model.match),
        gpu=model.gpu,
    )


def check(document: Document, cases: Sequence[Case]) -> None:
    """Check that a policy's limits match some of these cases, which are all that it chooses.

    Raises:
        SuiteError: A line has no effect, because no case matches it.
    """
    problems = []
    for i, rule in enumerate(document.data.get("absolute", ())):
        problems += check_match(rule.get("match", {}), ("absolute", i, "match"), cases)
    if problems:
        raise document.error(problems)
