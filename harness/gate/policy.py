"""The policy of a gate: its cases, limits, stage and exemptions.

ci/gate.yaml is read like a suite: YAML 1.2 with positions, validated by the models below, which
also give its JSON Schema. Case patterns are checked against the suites. Every error has its file,
line and column.
"""

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from harness import units
from harness.errors import SuiteError
from harness.gate.records import Stage
from harness.records import METRICS, Case, Match, PathRule, Rule, Thresholds
from harness.suite.fields import Form, Matching, Text, checked, schema_of, wrong
from harness.suite.load import fits
from harness.suite.positions import Document, Loc, Problem, nearest, read
from harness.suite.schema import metric_name
from harness.suite.sweep import check_match, match

DEFAULT = Path("ci/gate.yaml")
DEFAULT_MAX_AGE_DAYS = 30
LEAST = """\
A policy needs at least:
    schema: 1
    stage: warn
    suites: [{suite: suites/gate.yaml}]"""


# --- the form ----------------------------------------------------------------------------


def _inside(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts:
        remedy = "Write it relative to the root of the repository."
        raise wrong(f"must be in the repository, not {path!r}", remedy=remedy)
    return path


def _date(text: str) -> str:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        raise wrong(f"must be a date, not {text!r}", remedy="Write it as 2026-12-31.") from None
    return text


def _globs(patterns: list[str]) -> list[str]:
    for pattern in patterns:
        if special := re.search(r"[][?+{}\\]", pattern):
            remedy = "Use *, ** and a leading !."
            raise wrong(f"{pattern!r} contains {special[0]!r}", remedy=remedy)
    if all(pattern.startswith("!") for pattern in patterns):
        raise wrong("only excludes files", remedy='Begin with "**", which includes every file.')
    return patterns


def _fits_glob(path: str, glob: str) -> bool:
    parts = re.split(r"(\*\*/|\*\*|\*)", glob)
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    return re.fullmatch("".join(wild.get(p, re.escape(p)) for p in parts), path) is not None


Inside = Annotated[str, Field(min_length=1), AfterValidator(_inside)]
Date = Annotated[str, AfterValidator(_date)]
Patterns = Annotated[list[Text], Field(min_length=1)]
Texts = Annotated[list[Text], Field(default_factory=list)]
Globs = Annotated[list[Text], Field(min_length=1), AfterValidator(_globs)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class SuiteChoice(Form):
    """A suite, and the cases of it that the gate judges."""

    suite: Inside
    """Path of the suite file from the root of the repository."""
    cases: Texts
    """Patterns or parts of case ids, as for `harness run --filter`; all if absent."""
    paths: Globs | None = None
    """Changed files that trigger these cases; the policy's `paths` if absent."""


class KernelsModel(Form):
    """Kernels that must and must not run; patterns of names."""

    must: Texts
    must_not: Texts

    @model_validator(mode="after")
    def _something(self) -> "KernelsModel":
        if not (self.must or self.must_not):
            raise wrong("needs must, must_not or both")
        return self


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
    kernels: KernelsModel | None = None
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
    """New pairs for the cases that the screen left open."""
    alpha: Fraction | None = None
    """Probability of calling any case of a clean change slower."""
    practical: Fraction | None = None
    """Slowdowns below this are ignored."""
    tolerance: Fraction | None = None
    """A case passes if its slowdown is proven to be below this."""
    stored_tolerance: Fraction | None = None
    """The same against a stored baseline."""


class CalibrationModel(Form):
    """Requirements for the calibration of the node (`harness calibrate`)."""

    required: bool = False
    """Refuse to judge times on a GPU without a calibration."""
    max_age_days: Annotated[int, Field(ge=1)] = DEFAULT_MAX_AGE_DAYS
    """Refuse an older calibration."""


class BaselineModel(Form):
    """Requirements for a stored baseline (`harness baseline set`)."""

    max_age_days: Annotated[int, Field(ge=1)] = DEFAULT_MAX_AGE_DAYS
    """Refuse an older baseline."""


class ExemptionModel(Form):
    """Cases that are excused until a date."""

    cases: Patterns
    """Patterns or parts of case ids."""
    expect: Literal["noisy", "failure", "missing"]
    """`noisy`: comparisons of times are ignored; counters and limits still count. `failure`: any
    result is ignored, and a pass is reported. `missing`: the candidate may lack the case."""
    reason: Text
    expires: Date
    """Last day of the exemption. From the next day on it fails the gate."""


class PolicyModel(Form):
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
    suites: Annotated[list[SuiteChoice], Field(min_length=1)]
    """Suites that are timed."""
    counters: Annotated[list[SuiteChoice], Field(default_factory=list)]
    """Suites that `harness gate --counters` counts: small cases that run anywhere."""
    absolute: Annotated[list[AbsoluteModel], Field(default_factory=list)]
    compare: CompareModel = CompareModel()
    calibration: CalibrationModel = CalibrationModel()
    baseline: BaselineModel = BaselineModel()
    exemptions: Annotated[list[ExemptionModel], Field(default_factory=list)]
    paths: Globs | None = None
    """Changed files that trigger the suites without `paths` of their own; every file if absent. As
    in GitHub Actions: `*` stays within a folder, `**` crosses folders, `!` excludes, and the last
    pattern that matches decides. A suite's own file and the policy always trigger it."""

    @model_validator(mode="before")
    @classmethod
    def _paths_instead(cls, data: Any) -> Any:
        for key in ("reaches", "select"):
            if isinstance(data, dict) and key in data:
                remedy = 'List the files that trigger a suite: paths: ["src/**", "!**/*.md"].'
                raise wrong("is not a key of a policy; use `paths`", key=key, remedy=remedy)
        return data

    @model_validator(mode="after")
    def _once(self) -> "PolicyModel":
        for key in ("suites", "counters"):
            names = [choice.suite for choice in getattr(self, key)]
            if len(names) > len(set(names)):
                raise wrong("names a suite twice", key=key, remedy="Put its cases in one entry.")
        return self


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a policy file, for editors."""
    return schema_of(PolicyModel)


# --- the record --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSuite:
    """A suite, the filters on its cases, and the files that trigger them."""

    suite: str
    filters: tuple[str, ...] = ()
    paths: tuple[str, ...] = ("**",)
    loc: Loc = field(default=(), compare=False)
    """Place in the policy's file; empty if it comes from the command line."""

    def concerned_by(self, path: str) -> bool:
        """Whether a changed file triggers these cases; the last pattern that matches decides."""
        fitting = [glob for glob in self.paths if _fits_glob(path, glob.removeprefix("!"))]
        return path == self.suite or bool(fitting and not fitting[-1].startswith("!"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemption:
    cases: tuple[str, ...]
    expect: str
    reason: str
    expires: datetime.date
    place: str
    """Such as `ci/gate.yaml:12`."""

    def covers(self, case_id: str) -> bool:
        return any(fits(case_id, pattern) for pattern in self.cases)

    def expired(self, today: datetime.date) -> bool:
        return today > self.expires

    @property
    def sentence(self) -> str:
        return f"{self.expect} until {self.expires.isoformat()}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy file, validated."""

    path: str
    stage: Stage
    inconclusive_blocks: bool = False
    new_cases_block: bool = False
    roots: tuple[str, ...] = (".",)
    choices: tuple[ChosenSuite, ...] = ()
    counted: tuple[ChosenSuite, ...] = ()
    rules: tuple[Rule, ...] = ()
    """Absolute limits; `go` is also `abort`."""
    kernels: tuple[tuple[Match, str, PathRule], ...] = ()
    """Cases, a pattern of GPUs, and the kernels that must and must not run there."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    given: Mapping[str, Any] = field(default_factory=dict)
    """The thresholds that the file itself sets; a calibration changes only the others."""
    calibration_required: bool = False
    calibration_days: int = DEFAULT_MAX_AGE_DAYS
    baseline_days: int = DEFAULT_MAX_AGE_DAYS
    exemptions: tuple[Exemption, ...] = ()

    def concerned(self, choices: Sequence[ChosenSuite], changed: Sequence[str]) -> Sequence[str]:
        """The suites that changed files trigger; a change of this policy triggers all."""
        return [
            c.suite for c in choices if self.path in changed or any(map(c.concerned_by, changed))
        ]


def load(path: Path) -> tuple[Policy, Document]:
    """Read a policy, and its document for `check`.

    Raises:
        SuiteError: With place, problem and remedy.
    """
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise SuiteError(path, "not a text file", "See ci/gate.yaml.") from None
    except OSError as error:
        remedy = "Name one with --policy, or copy ci/gate.yaml."
        raise SuiteError(path, f"cannot read the policy: {error.strerror}", remedy) from None
    return parse(text, path)


def parse(text: str, path: Path) -> tuple[Policy, Document]:
    """The same for the text of the file, perhaps from another commit."""
    document = read(text, path, least=LEAST)
    model = checked(PolicyModel, document)
    given = model.compare.model_dump(exclude_unset=True)
    try:
        thresholds = Thresholds(**given)
    except ValueError as error:
        raise document.error([Problem(("compare",), str(error), at_key=True)]) from None
    policy = Policy(
        path=str(path),
        stage=Stage(model.stage),
        inconclusive_blocks=model.inconclusive == "block",
        new_cases_block=model.new_cases == "block",
        roots=tuple(model.roots),
        choices=_choices(model, "suites"),
        counted=_choices(model, "counters"),
        rules=tuple(
            _rule(a, f"{path}:{document.values['absolute', i][0]}")
            for i, a in enumerate(model.absolute)
            if a.metric
        ),
        kernels=tuple(
            (match(a.match), a.gpu, PathRule(must=tuple(k.must), must_not=tuple(k.must_not)))
            for a in model.absolute
            if (k := a.kernels)
        ),
        thresholds=thresholds,
        given=given,
        calibration_required=model.calibration.required,
        calibration_days=model.calibration.max_age_days,
        baseline_days=model.baseline.max_age_days,
        exemptions=tuple(
            Exemption(
                cases=tuple(e.cases),
                expect=e.expect,
                reason=e.reason,
                expires=datetime.date.fromisoformat(e.expires),
                place=f"{path}:{document.values['exemptions', i][0]}",
            )
            for i, e in enumerate(model.exemptions)
        ),
    )
    return policy, document


def _choices(model: PolicyModel, key: Literal["suites", "counters"]) -> tuple[ChosenSuite, ...]:
    return tuple(
        ChosenSuite(
            suite=c.suite,
            filters=tuple(c.cases),
            paths=tuple(c.paths or model.paths or ["**"]),
            loc=(key, i),
        )
        for i, c in enumerate(getattr(model, key))
    )


def _rule(model: AbsoluteModel, place: str) -> Rule:
    assert model.metric is not None
    bound = model.low if METRICS[model.metric].higher_is_better else model.high
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


def check(
    document: Document, cases: Sequence[Case], gone: Sequence[str], files: Sequence[str] = ()
) -> None:
    """Check that the cases and files in a policy exist.

    Args:
        document: As `load` returned it.
        cases: All cases that it chooses.
        gone: Ids of cases that only the baseline has.
        files: Paths of the candidate's files; empty if no change is judged.

    Raises:
        SuiteError: A line has no effect: no case or file matches it.
    """
    problems = [*_unknown_cases(document.data, cases, gone)]
    if problems := problems + [*_stale_globs(document.data, files)] * bool(files):
        raise document.error(problems)


def _unknown_cases(data: Any, cases: Sequence[Case], gone: Sequence[str]) -> Iterator[Problem]:
    ids = [*dict.fromkeys(case.case_id for case in cases)]  # suites may share some
    for i, rule in enumerate(data.get("absolute", ())):
        yield from check_match(rule.get("match", {}), ("absolute", i, "match"), cases)
    for i, entry in enumerate(data.get("exemptions", ())):
        if entry["expect"] == "missing":
            continue  # after the merge the baseline lacks the case too
        for j, pattern in enumerate(entry["cases"]):
            if not any(fits(case_id, pattern) for case_id in (*ids, *gone)):
                loc: Loc = ("exemptions", i, "cases", j)
                remedy = nearest(pattern, ids)
                yield Problem(loc, f"no case of the gate matches {pattern!r}", remedy)


def _stale_globs(data: Any, files: Sequence[str]) -> Iterator[Problem]:
    """Patterns that match no file: with a misspelt one the gate would measure nothing."""
    places: list[tuple[Loc, Any]] = [((), data)]
    for key in ("suites", "counters"):
        places += [((key, i), choice) for i, choice in enumerate(data.get(key, ()))]
    for loc, entry in places:
        for j, glob in enumerate(entry.get("paths", ())):
            if not glob.startswith("!") and not any(_fits_glob(file, glob) for file in files):
                text = f"no file of the candidate matches {glob!r}"
                remedy = "Patterns start at the root of the repository."
                yield Problem((*loc, "paths", j), text, remedy)
